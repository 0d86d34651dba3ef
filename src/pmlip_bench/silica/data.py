"""The structures of the silica benchmark: training, validation, test and out-of-distribution (unseen) sets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from ase import Atoms

from pmlip import datasets
from pmlip.backbones import Backbone
from pmlip.structures.atoms import in_file
from pmlip.structures.labels import fingerprint, labels, require_labels
from pmlip.training.config import FinetuneConfig

SHIPPED = "silica-pbe"
TUNING = "silica-pbe-tuning"  # its training and validation parts only: quartz, with cristobalite as unseen


@dataclass(frozen=True, kw_only=True)
class SilicaSettings:
    backbone: str
    data: str  # silica-pbe, a file of structures, or name:file of pmlip.datasets
    test_data: str | None = None  # separate file to test on; if None, the test set is taken from data
    unseen: tuple[str, ...] = ()  # files of out-of-distribution structures; silica-pbe includes some
    weights: str | None = None  # local file with the weights of the backbone
    trust: bool = False  # allow weights stored as a pickle, which can execute code
    energy_key: str | None = None  # names of the labels in the files, if not detected automatically
    forces_key: str | None = None
    stress_key: str | None = None
    test: int = 400  # test structures taken from data
    valid_share: float = 0.25  # size of the validation set relative to the training set; at least 8 if the data allows
    test_unseen: int = 100  # structures taken from each unseen file
    test_samples: int = 32  # samples per test structure
    config: FinetuneConfig = field(default_factory=partial(FinetuneConfig, tangent=False))

    @property
    def files(self) -> list[str]:
        """All data that is read from files; silica-pbe ships with the package."""
        own = [] if self.data in (SHIPPED, TUNING) else [self.data]
        return [*own, *([self.test_data] if self.test_data else []), *self.unseen]

    @property
    def keys(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in ("energy_key", "forces_key", "stress_key")}

    def read(self, given: str) -> list[Atoms]:
        return datasets.read_set(given, **self.keys)


def check_files(settings: SilicaSettings, backbone: Backbone) -> None:
    """Check before a long run that all structures have labels and that the backbone supports their compositions."""
    for given in settings.files:
        structures = settings.read(given)
        # the first structure of each composition: checking all of a large file would take a minute
        kinds = {atoms.get_chemical_formula(): index for index, atoms in reversed(list(enumerate(structures)))}
        with in_file(_file(given)):
            require_labels(structures, ("energy", "forces"))
            backbone.check(structures, sorted(kinds.values()))


def _file(given: str) -> Path:
    """The path in "file" or "name:file"."""
    return Path(given.rpartition(":")[2])


def stem(given: str) -> str:
    return _file(given).stem


def without_folder(given: str) -> str:
    """The same text with the file's name instead of its path; the prefix "name:" is kept."""
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
    """The structures of a cell, the same for all seeds; smaller training sets are prefixes of larger ones."""
    wanted = max(8, round(settings.valid_share * size))
    given = [f"{name}=..." for name in ("test_data", "unseen", *settings.keys) if getattr(settings, name)]
    if settings.data in (SHIPPED, TUNING) and given:
        raise ValueError(
            f"{settings.data} includes labels, a test set and unseen sets; omit {', '.join(given)} or choose other data"
        )
    if settings.data == TUNING:
        train, valid = datasets.silica_pbe("train"), datasets.silica_pbe("valid")
        quartz = _of_polymorph(train, "quartz")
        _check_enough(size + 1, len(quartz), settings.data, "to train and test on")
        unseen = {"cristobalite": _of_polymorph(valid, "cristobalite")}
        return Splits(quartz[:size], _of_polymorph(valid, "quartz"), quartz[size:], unseen)
    if settings.data == SHIPPED:
        train, valid, test = (datasets.silica_pbe(part) for part in ("train", "valid", "test"))
        _check_enough(size, len(train), settings.data, "to train on")
        unseen = {part: datasets.silica_pbe(part) for part in datasets.UNSEEN_SILICA_PBE}
        return Splits(train[:size], valid[:wanted], test, unseen)
    unseen = {stem(file): _some(settings.read(file), settings.test_unseen) for file in settings.unseen}
    if len(unseen) < len(settings.unseen):
        raise ValueError(
            "files of unseen structures must have different names, not counting folder and extension; got "
            f"{', '.join(settings.unseen)}"
        )
    structures = settings.read(settings.data)
    if settings.test_data is not None:
        # as in the paper: training structures from the start of the file, validation structures from its end
        _check_enough(size + 1, len(structures), settings.data, "to train and validate on")
        rest = structures[size:]
        return Splits(structures[:size], rest[::-1][:wanted], settings.read(settings.test_data), unseen)
    _check_enough(settings.test + size + wanted, len(structures), settings.data, "to train, validate and test on")
    mixed = _some(structures, len(structures))
    rest = mixed[settings.test :]
    return Splits(rest[:size], rest[::-1][:wanted], mixed[: settings.test], unseen)


def _some(structures: Sequence[Atoms], count: int) -> list[Atoms]:
    """A random selection of `count` structures, the same in every call."""
    return [structures[i] for i in np.random.default_rng(0).permutation(len(structures))[:count]]


def _of_polymorph(structures: Sequence[Atoms], polymorph: str) -> list[Atoms]:
    return [atoms for atoms in structures if atoms.info["polymorph"] == polymorph]


def _check_enough(needed: int, held: int, data: str, purpose: str) -> None:
    if needed > held:
        raise ValueError(
            f"{needed} structures are needed {purpose}, but {data} has {held}; choose a smaller training size"
        )
