"""The N-body data: simulated once and cached on disk, or read from files of the public generator."""

import hashlib
import json
import os
import warnings
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pmlip.atomic_files import atomic_write
from pmlip.nbody.simulate import initial, simulate

SPLITS = ("train", "valid", "test", "out_of_distribution")


@dataclass(frozen=True, kw_only=True)
class NBodyConfig:
    particles: int = 5
    train: int = 10_000  # trajectories; smaller training sets are the first of these
    valid: int = 2_000
    test: int = 2_000
    steps: tuple[int, int] = (3100, 4100)  # input and target; frames 30 and 40, with 100 steps per frame
    out_of_distribution: int = 2_000
    out_of_distribution_steps: tuple[int, int] = (8100, 9100)  # frames 80 and 90
    seed: int = 0

    def split(self, name: str) -> tuple[int, tuple[int, int], int]:
        """Number of trajectories, steps and seed of a split; no two splits share a trajectory."""
        if name not in SPLITS:
            raise ValueError(f"unknown split {name!r}; allowed: {', '.join(SPLITS)}")
        steps = self.out_of_distribution_steps if name == "out_of_distribution" else self.steps
        return getattr(self, name), steps, len(SPLITS) * self.seed + SPLITS.index(name)


_FIELDS = ("positions", "velocities", "charges", "target", "target_velocities")


@dataclass(frozen=True)
class Trajectories:
    """Initial states and targets of particles, in single precision."""

    positions: Tensor  # (trajectory, particle, 3) at the input step
    velocities: Tensor  # (trajectory, particle, 3)
    charges: Tensor  # (trajectory, particle)
    target: Tensor  # (trajectory, particle, 3) positions at the target step
    target_velocities: Tensor  # (trajectory, particle, 3); not predicted, used by `with_reversed`

    def __len__(self) -> int:
        return len(self.positions)

    def first(self, count: int) -> "Trajectories":
        if not 1 <= count <= len(self):
            raise ValueError(f"count must lie between 1 and {len(self)}, the number of trajectories, got count={count}")
        return self.part(0, count)

    def part(self, start: int, stop: int) -> "Trajectories":
        return self.select(slice(start, stop))

    def at_rest(self, elapsed: float) -> "Trajectories":
        """The trajectories in the centre-of-mass frame; `elapsed` is the time between input and target.

        Exact: momentum is conserved, so the centre moves at constant velocity, and errors are equal in both frames.
        """
        drift = self.velocities.mean(-2, keepdim=True)
        return Trajectories(
            self.positions,
            self.velocities - drift,
            self.charges,
            self.target - elapsed * drift,
            self.target_velocities - drift,
        )

    def with_reversed(self) -> "Trajectories":
        """The trajectories and their time reversals, which start at the target with negated velocities.

        Valid data, since the equations of motion are invariant under time reversal.
        """
        reversed_ = (self.target, -self.target_velocities, self.charges, self.positions, -self.velocities)
        own = (getattr(self, name) for name in _FIELDS)
        return Trajectories(*(torch.cat(pair) for pair in zip(own, reversed_, strict=True)))

    def select(self, index: Tensor | slice) -> "Trajectories":
        return Trajectories(*(getattr(self, name)[index] for name in _FIELDS))


def load(split: str, config: NBodyConfig | None = None, *, cache: Path | None = None) -> Trajectories:
    """A split of the data; simulated unless the folder `cache` holds it (default: `cache_folder()`)."""
    config = config or NBodyConfig()
    count, steps, seed = config.split(split)
    settings = {"split": split, **asdict(config), "format": 2}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    file = (cache or cache_folder()) / f"nbody-{split}-{digest}.npz"
    if file.exists():
        try:
            with file.open("rb") as content, np.load(content) as stored:
                return Trajectories(*(torch.from_numpy(stored[name]) for name in _FIELDS))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            warnings.warn(f"{file} is damaged; the trajectories are simulated again", stacklevel=2)
    x, v, q = initial(count, particles=config.particles, seed=seed)
    positions, velocities = simulate(x, v, q, steps=steps)
    arrays = (positions[0], velocities[0], q, positions[1], velocities[1])
    named = {name: array.astype(np.float32) for name, array in zip(_FIELDS, arrays, strict=True)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as stream:
        np.savez(stream, allow_pickle=False, **named)
    return Trajectories(*map(torch.from_numpy, named.values()))


def read_public(folder: str | Path, split: str, *, frames: tuple[int, int] = (30, 40)) -> Trajectories:
    """A split from the files `loc_`, `vel_` and `charges_SPLIT_charged5_initvel1small.npy` of the public generator.

    Positions and velocities are (trajectory, frame, 3, particle), with 100 steps per frame; charges are (trajectory,
    particle, 1).
    """
    arrays = {}
    for kind in ("loc", "vel", "charges"):
        found = sorted(Path(folder).glob(f"{kind}_{split}_charged*.npy"))
        if len(found) != 1:
            raise FileNotFoundError(
                f"expected one file {kind}_{split}_charged*.npy in {folder}, found: "
                f"{', '.join(file.name for file in found) or 'none'}"
            )
        arrays[kind] = np.load(found[0]).astype(np.float32)
    count, length, axes, particles = arrays["loc"].shape if arrays["loc"].ndim == 4 else (0, 0, 0, 0)
    if axes != 3 or arrays["vel"].shape != arrays["loc"].shape or arrays["charges"].size != count * particles:
        raise ValueError(
            "positions and velocities must be (trajectory, frame, 3, particle) and charges (trajectory, particle, 1), "
            f"got {arrays['loc'].shape}, {arrays['vel'].shape} and {arrays['charges'].shape}"
        )
    start, end = frames
    if not 0 <= start < end < length:
        raise ValueError(f"frames must be two increasing numbers between 0 and {length - 1}, got frames={frames}")
    return Trajectories(
        torch.from_numpy(arrays["loc"][:, start]).mT.contiguous(),
        torch.from_numpy(arrays["vel"][:, start]).mT.contiguous(),
        torch.from_numpy(arrays["charges"]).reshape(count, particles),
        torch.from_numpy(arrays["loc"][:, end]).mT.contiguous(),
        torch.from_numpy(arrays["vel"][:, end]).mT.contiguous(),
    )


def cache_folder() -> Path:
    """The folder in the environment variable PMLIP_CACHE, or `pmlip` in the user's cache folder."""
    if named := os.environ.get("PMLIP_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pmlip"
