import numpy as np
import pytest

from pmlip.nbody import initial, simulate
from pmlip_bench.nbody.textbook import simulate_plainly


def energy(x, v, q):
    first, second = np.triu_indices(x.shape[-2], 1)
    distance = np.linalg.norm(x[..., first, :] - x[..., second, :], axis=-1)
    return (v**2).sum((-1, -2)) / 2 + (q[..., first] * q[..., second] / distance).sum(-1)


@pytest.mark.parametrize("particles", [2, 5])
def test_trajectories_are_those_of_a_plain_loop(particles):
    start = initial(3, particles=particles, seed=1)
    steps = (1, 200, 600)
    given = simulate(*start, steps=steps)
    for i in range(3):
        for record, step in enumerate(steps):
            expected = simulate_plainly(*(array[i] for array in start), steps=step)
            for ours, theirs in zip(given, expected, strict=True):
                np.testing.assert_allclose(ours[record, i], theirs, atol=1e-9)


def test_energy_is_conserved_at_small_steps():
    """The error of the energy falls with the time step, where no two particles come near each other."""
    x, v, q = initial(200, seed=2)
    q[:] = 1.0  # they repel
    x *= 2
    drift = []
    for time_step, steps in ((1e-3, 1000), (1e-4, 10_000)):
        out_x, out_v = simulate(x, v, q, steps=(1, steps), time_step=time_step)
        # recorded velocities belong to half a step before, which is corrected by comparing like with like
        change = energy(out_x[1], out_v[1], q) - energy(out_x[0], out_v[0], q)
        drift.append(np.abs(change).max())
    assert drift[0] < 0.02
    assert drift[1] < 0.2 * drift[0]


def test_time_runs_backwards():
    """The scheme is x += dt v, v += dt F(x): from (x_n, v_n) with the velocity turned it retraces its own steps."""
    x, v, q = initial(50, seed=3)
    q[:] = 1.0
    (x1, x2), (v1, _) = simulate(x, v, q, steps=(100, 600))
    there, velocity = simulate(x, v, q, steps=(600,))
    # `simulate` begins with a kick, and so goes back exactly from the positions after the last kick
    back, _ = simulate(there[0], -velocity_after_kick(there[0], velocity[0], q), q, steps=(500,))
    np.testing.assert_allclose(x2, there[0])
    np.testing.assert_allclose(back[0], x1, atol=1e-9)
    assert v1.shape == x1.shape


def velocity_after_kick(x, v, q):
    """The velocity once the force at the last position has acted twice: what turns round to the first kick."""
    nothing = np.zeros_like(v)
    _, kick = simulate(x, nothing, q, steps=(1,))
    return v + kick[0]


def test_the_start_is_as_described():
    x, v, q = initial(4000, seed=4)
    assert x.std() == pytest.approx(1, abs=0.01)
    np.testing.assert_allclose(np.linalg.norm(v, axis=-1), 0.5)
    assert set(np.unique(q)) == {-1, 1}
    assert abs(q.mean()) < 0.03
    for more, few in zip((x, v, q), initial(10, seed=4), strict=True):
        np.testing.assert_array_equal(more[:10], few)


def test_momentum_is_conserved_and_mirror_charges_move_alike():
    x, v, q = initial(20, seed=5)
    _, velocities = simulate(x, v, q, steps=(1, 300))
    np.testing.assert_allclose(velocities[1].sum(1), velocities[0].sum(1), atol=1e-10)
    np.testing.assert_array_equal(simulate(x, v, -q, steps=(300,))[0], simulate(x, v, q, steps=(300,))[0])


def test_the_known_figures_of_the_benchmark():
    """Best constant-velocity fit x + t v: t about 0.72 with a mean squared error of about 0.08."""
    x, v, q = initial(4000, seed=6)
    (start, end), (velocity, _) = simulate(x, v, q)
    t = ((end - start) * velocity).sum() / (velocity**2).sum()
    assert t == pytest.approx(0.72, abs=0.05)
    assert ((start + t * velocity - end) ** 2).mean() == pytest.approx(0.082, abs=0.015)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": ()}, "positive and increasing"),
        ({"steps": (0, 5)}, "positive and increasing"),
        ({"steps": (5, 5)}, "positive and increasing"),
        ({"charges": np.ones((2, 4))}, r"got \(2, 5, 3\), \(2, 5, 3\) and \(2, 4\)"),
    ],
)
def test_bad_input_is_refused(change, message):
    x, v, q = initial(2)
    with pytest.raises(ValueError, match=message):
        simulate(**{"positions": x, "velocities": v, "charges": q, **change})


def test_too_few_particles_are_refused():
    with pytest.raises(ValueError, match="at least 2 particles are needed, got trajectories=3 and particles=1"):
        initial(3, particles=1)
