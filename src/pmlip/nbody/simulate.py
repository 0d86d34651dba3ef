"""Charged particles in free space, integrated as in the benchmark of Fuchs et al. (2020) and Satorras et al. (2021).

F_i = sum_j q_i q_j (x_i - x_j) / |x_i - x_j|^3, each component cut to +-100;   dt = 0.001
v += dt F;   then for step 1, 2, ...:   x += dt v,  record,  v += dt F
"""

from collections.abc import Sequence

import numpy as np

try:
    import numba
except ImportError as error:
    raise ImportError("the N-body simulation needs: pip install 'pmlip[nbody]'") from error

TIME_STEP = 0.001
LARGEST_FORCE = 100.0
START_SPEED = 0.5
LANES = 8  # trajectories that one core integrates together, so that the compiler can use vector instructions


def initial(trajectories: int, *, particles: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random initial positions, velocities and charges.

    Positions ~ N(0, 1) and velocities of norm 0.5 in random directions are (trajectory, particle, 3). Charges, +-1 with
    equal probability, are (trajectory, particle). Trajectory i depends only on (seed, i).
    """
    if trajectories < 1 or particles < 2:
        raise ValueError(
            "at least 1 trajectory and at least 2 particles are needed, got "
            f"trajectories={trajectories} and particles={particles}"
        )
    positions = np.empty((trajectories, particles, 3))
    velocities = np.empty_like(positions)
    charges = np.empty((trajectories, particles))
    for i in range(trajectories):
        random = np.random.default_rng((seed, i))
        positions[i] = random.standard_normal((particles, 3))
        velocities[i] = random.standard_normal((particles, 3))
        charges[i] = random.choice([-1.0, 1.0], particles)
    velocities *= START_SPEED / np.linalg.norm(velocities, axis=-1, keepdims=True)
    return positions, velocities, charges


def simulate(
    positions: np.ndarray,
    velocities: np.ndarray,
    charges: np.ndarray,
    *,
    steps: Sequence[int] = (3100, 4100),
    time_step: float = TIME_STEP,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and velocities at the given steps, each (recorded step, trajectory, particle, 3).

    positions and velocities: (trajectory, particle, 3). charges: (trajectory, particle). Runs on all cores.
    """
    x, v, q = (np.asarray(array, dtype=float) for array in (positions, velocities, charges))
    if x.ndim != 3 or x.shape[-1] != 3 or v.shape != x.shape or q.shape != x.shape[:2]:
        raise ValueError(
            "positions and velocities must be (trajectory, particle, 3) and charges (trajectory, particle), "
            f"got {x.shape}, {v.shape} and {q.shape}"
        )
    recorded = np.asarray(steps, dtype=np.int64)
    if recorded.size == 0 or recorded[0] < 1 or (np.diff(recorded) <= 0).any():
        raise ValueError(f"steps must be positive and increasing, got {tuple(steps)}")
    # lanes last: (group, particle, 3, lane); copies of the last trajectory fill the last group
    count = len(x)
    groups = -(-count // LANES)
    chosen = np.minimum(np.arange(groups * LANES), count - 1).reshape(groups, LANES)
    out_x, out_v = _integrate(
        np.ascontiguousarray(x[chosen].transpose(0, 2, 3, 1)),
        np.ascontiguousarray(v[chosen].transpose(0, 2, 3, 1)),
        np.ascontiguousarray(q[chosen].transpose(0, 2, 1)),
        recorded,
        time_step,
    )
    shape = (len(recorded), groups * LANES, *x.shape[1:])
    x, v = (out.transpose(1, 0, 4, 2, 3).reshape(shape)[:, :count] for out in (out_x, out_v))
    return x, v


@numba.njit(parallel=True, cache=True, error_model="numpy")
def _integrate(
    x: np.ndarray, v: np.ndarray, q: np.ndarray, steps: np.ndarray, dt: float
) -> tuple[np.ndarray, np.ndarray]:
    groups = x.shape[0]
    out_x = np.empty((groups, steps.size, *x.shape[1:]))
    out_v = np.empty_like(out_x)
    for group in numba.prange(groups):
        gx, gv, force = x[group].copy(), v[group].copy(), np.empty(x.shape[1:])
        _forces(gx, q[group], force)
        gv += dt * force
        record = 0
        for step in range(1, steps[-1] + 1):
            gx += dt * gv
            if step == steps[record]:
                out_x[group, record] = gx
                out_v[group, record] = gv
                record += 1
            _forces(gx, q[group], force)
            gv += dt * force
    return out_x, out_v


@numba.njit(cache=True, error_model="numpy", inline="always")
def _forces(x: np.ndarray, q: np.ndarray, force: np.ndarray) -> None:
    particles = x.shape[0]
    force[:] = 0.0
    for i in range(particles):
        for j in range(i):
            for lane in range(LANES):
                dx = x[i, 0, lane] - x[j, 0, lane]
                dy = x[i, 1, lane] - x[j, 1, lane]
                dz = x[i, 2, lane] - x[j, 2, lane]
                square = dx * dx + dy * dy + dz * dz
                strength = q[i, lane] * q[j, lane] / (square * np.sqrt(square))
                force[i, 0, lane] += strength * dx
                force[i, 1, lane] += strength * dy
                force[i, 2, lane] += strength * dz
                force[j, 0, lane] -= strength * dx
                force[j, 1, lane] -= strength * dy
                force[j, 2, lane] -= strength * dz
    for i in range(particles):
        for axis in range(3):
            for lane in range(LANES):
                force[i, axis, lane] = min(max(force[i, axis, lane], -LARGEST_FORCE), LARGEST_FORCE)
