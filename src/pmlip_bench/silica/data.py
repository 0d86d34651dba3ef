"""The structures of the silica benchmark: which to train on, to validate with, to test with, and which are unseen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from ase import Atoms

from pmlip import datasets
from pmlip.backbones import Backbone
from pmlip.structures.atoms import in_file
from pmlip.structures.labels import fingerprint, labels, require_labels
from pmlip.training.config import FinetuneConfig

SHIPPED = "silica-pbe"
TUNING = "silica-pbe-tuning"  # parts of its training and validation data: quartz, and cristobalite as what is unseen


@dataclass(frozen=True, kw_only=True)
class SilicaSettings:
    backbone: str
    data: str  # silica-pbe, a file of structures, or name:file of pmlip.datasets
    test_data: str | None = None  # a file of its own to test on; otherwise the test set is taken from the data first
    unseen: tuple[str, ...] = ()  # files of other structures; silica-pbe has its own
    weights: str | None = None  # local file of the backbone's weights
    trust: bool = False  # load weights that are a pickle
    energy_key: str | None = None  # names of the labels in the files, where they are not found by themselves
    forces_key: str | None = None
    stress_key: str | None = None
    test: int = 400
    valid_share: float = 0.25  # of the training structures, as many again to validate on; at least 8, if there are
    test_unseen: int = 100  # structures of each unseen file
    test_samples: int = 32
    config: FinetuneConfig = field(default_factory=FinetuneConfig)

    @property
    def files(self) -> list[str]:
        """What is read from files; silica-pbe is not."""
        own = [] if self.data in (SHIPPED, TUNING) else [self.data]
        return [*own, *([self.test_data] if self.test_data else []), *self.unseen]

    @property
    def keys(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in ("energy_key", "forces_key", "stress_key")}

    def read(self, given: str) -> list[Atoms]:
        return datasets.read_set(given, **self.keys)


def check_files(settings: SilicaSettings, backbone: Backbone) -> None:
    """Before anything is computed: do all structures carry labels, and can the backbone take what they are made of?"""
    for given in settings.files:
        structures = settings.read(given)
        # one of each kind: to look at all of a large file would take a minute
        kinds = {atoms.get_chemical_formula(): index for index, atoms in reversed(list(enumerate(structures)))}
        with in_file(_file(given)):
            require_labels(structures, ("energy", "forces"))
            backbone.check(structures, sorted(kinds.values()))


def _file(given: str) -> Path:
    """The file of "file" or "name:file"."""
    return Path(given.rpartition(":")[2])


def stem(given: str) -> str:
    return _file(given).stem


def without_folder(given: str) -> str:
    """The same without the folder of the file; how it is read ("name:") belongs to the settings."""
    reader, colon, _ = given.rpartition(":")
    return f"{reader}{colon}{_file(given).name}"


@dataclass(frozen=True)
class Splits:
    train: list[Atoms]
    valid: list[Atoms]
    test: list[Atoms]
    unseen: dict[str, list[Atoms]]

    @property
    def everything(self) -> list[Atoms]:
        parts = (self.train, self.valid, self.test, *self.unseen.values())
        return [atoms for part in parts for atoms in part]

    @cached_property
    def hash(self) -> str:
        return fingerprint(self.everything, labels(self.everything))[:16]


def splits(size: int, settings: SilicaSettings) -> Splits:
    """The structures of a cell; the same for all seeds, and a smaller training set is the beginning of a larger one."""
    wanted = max(8, round(settings.valid_share * size))
    if settings.data in (SHIPPED, TUNING) and (settings.test_data or settings.unseen or any(settings.keys.values())):
        raise ValueError(
            f"{settings.data} has labels, test and unseen sets of its own; to use others, choose other data"
        )
    if settings.data == TUNING:
        train, valid = datasets.silica_pbe("train"), datasets.silica_pbe("valid")
        quartz = _of_polymorph(train, "quartz")
        _check_enough(size + 1, len(quartz), settings)
        unseen = {"cristobalite": _of_polymorph(valid, "cristobalite")}
        return Splits(quartz[:size], _of_polymorph(valid, "quartz"), quartz[size:], unseen)
    if settings.data == SHIPPED:
        train, valid, test = (datasets.silica_pbe(part) for part in ("train", "valid", "test"))
        _check_enough(size, len(train), settings)
        unseen = {part: datasets.silica_pbe(part) for part in datasets.UNSEEN_SILICA_PBE}
        return Splits(train[:size], valid[:wanted], test, unseen)
    unseen = {stem(file): _some(settings.read(file), settings.test_unseen) for file in settings.unseen}
    if len(unseen) < len(settings.unseen):
        raise ValueError(f"files of unseen structures must have different names, got {', '.join(settings.unseen)}")
    structures = settings.read(settings.data)
    if settings.test_data is not None:
        # as in the paper: training from the front of the file, validation from its end
        _check_enough(size + 1, len(structures), settings)
        rest = structures[size:]
        return Splits(structures[:size], rest[::-1][:wanted], settings.read(settings.test_data), unseen)
    _check_enough(settings.test + size + wanted, len(structures), settings)
    mixed = _some(structures, len(structures))
    rest = mixed[settings.test :]
    return Splits(rest[:size], rest[::-1][:wanted], mixed[: settings.test], unseen)


def _some(structures: Sequence[Atoms], count: int) -> list[Atoms]:
    """So many of them by chance, always the same."""
    return [structures[i] for i in np.random.default_rng(0).permutation(len(structures))[:count]]


def _of_polymorph(structures: Sequence[Atoms], polymorph: str) -> list[Atoms]:
    return [atoms for atoms in structures if atoms.info["polymorph"] == polymorph]


def _check_enough(needed: int, held: int, settings: SilicaSettings) -> None:
    if needed > held:
        raise ValueError(
            f"{needed} structures in all were asked for, with those to validate and test on, but {settings.data} holds "
            f"{held}"
        )
