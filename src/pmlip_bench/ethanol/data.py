"""The structures of the ethanol benchmark: training, validation, test and out-of-distribution (unseen) sets."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from ase import Atoms

from pmlip.structures.files import read_structures
from pmlip.structures.labels import fingerprint, labels
from pmlip.training.config import FinetuneConfig

MD = "MD"  # the test set
PATH = "H removal"
PAIRS = "dimers"
UNSEEN = {
    PATH: "test_H_removal.xyz",
    "normal mode 874": "test_norm_mode_874.xyz",
    "normal mode 3005": "test_norm_mode_3005.xyz",
    "methanol": "test_methanol.xyz",
    PAIRS: "test_dimers.xyz",
}


@dataclass(frozen=True, kw_only=True)
class EthanolSettings:
    data: str  # folder with the files of the ethanol set
    train: int = 200  # structures of train.xyz to train on
    valid: int = 50  # other structures of train.xyz, to choose the weights, calibrate and scale novelty
    test: int = 200  # structures of test_MD.xyz
    test_samples: int = 32  # samples per test structure
    config: FinetuneConfig = field(default_factory=lambda: FinetuneConfig(steps=400))


@dataclass(frozen=True)
class Splits:
    train: list[Atoms]
    valid: list[Atoms]
    test: list[Atoms]
    unseen: dict[str, list[Atoms]]

    @cached_property
    def training_hash(self) -> str:
        return _hash([*self.train, *self.valid])

    @cached_property
    def test_hash(self) -> str:
        return _hash([*self.test, *(atoms for part in self.unseen.values() for atoms in part)])


def splits(settings: EthanolSettings) -> Splits:
    """The structures of all cells, the same for all seeds."""
    folder = Path(settings.data)
    fitted = _some(folder / "train.xyz", settings.train + settings.valid)
    return Splits(
        fitted[: settings.train],
        fitted[settings.train :],
        _some(folder / "test_MD.xyz", settings.test),
        {name: read_structures(folder / file)[0] for name, file in UNSEEN.items()},
    )


def _some(file: Path, count: int) -> list[Atoms]:
    """A random selection of `count` structures, the same in every call."""
    structures, _ = read_structures(file)
    if count > len(structures):
        raise ValueError(f"{file}: {count} structures are needed, but it holds {len(structures)}")
    return [structures[i] for i in np.random.default_rng(0).permutation(len(structures))[:count]]


def _hash(structures: list[Atoms]) -> str:
    return fingerprint(structures, labels(structures))[:16]
