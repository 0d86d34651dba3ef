"""How a model was trained and calibrated, with which software, and on which machine."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How the spread of a model was calibrated on validation data."""

    factor: float  # multiplies the noise
    crps: tuple[float, float]  # eV/Å, of the validation forces, before and after
    ssr: tuple[float, float]  # spread-skill ratio of the validation forces, before and after
    level: float  # probability of the conformal intervals
    conformal: float | None  # intervals are mean ± conformal * sigma; None: see `withheld`
    structures: int
    samples: int  # K during calibration; the intervals hold for this number of samples or more
    seed: int = 0
    shift: float = 0.0  # eV per atom, added to all energies to keep their mean unchanged
    data: str | None = None  # name of the validation data
    withheld: str | None = None  # why there are no conformal intervals
    energy_factor: float = 1.0  # multiplies the reported spread of the energies; the samples keep theirs
    energy_ssr: tuple[float, float] | None = None  # before and after; None: too few energies to fit the factor

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """A calibration from the plain values of a file."""
        pairs = {name: tuple(record[name]) for name in ("crps", "ssr", "energy_ssr") if record.get(name)}
        return cls(**{name: value for name, value in record.items() if name in _names(cls)} | pairs)

    def conformal_for(self, samples: int) -> float | None:
        """Factor of the conformal intervals; None if `samples` is below the number in the calibration."""
        return self.conformal if samples >= self.samples else None  # the spread of fewer samples is noisier


@dataclass(frozen=True)
class DataSource:
    """A file of structures."""

    file: str
    structures: int


@dataclass(frozen=True, kw_only=True)
class History:
    """How a model was fine-tuned."""

    config: Mapping[str, Any]  # the settings of the run, as plain values
    energy_offsets: bool = True  # whether energy offsets per element were fitted to the training set
    train: DataSource | None = None
    valid: DataSource | None = None
    steps: int = 0
    passes: int = 0  # forward and backward passes: structures times samples
    seconds: float = 0.0
    offsets: Mapping[int, float] = field(default_factory=dict)  # eV per atom, by atomic number
    compositions: Sequence[str] = ()  # formulas that all compositions of the training set combine
    error_before: Mapping[str, float] = field(default_factory=dict)  # MAE of each label before fine-tuning
    noise_rate: float | None = None  # learning rate of the parameters that the method adds
    validation: Mapping[str, float] = field(default_factory=dict)  # scores of the kept weights
    validation_curve: Sequence[Mapping[str, float]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """A history from the plain values of a file; files before format 4 lack some values."""
        config = record.get("config", {})
        given = {"config": config, "energy_offsets": config.get("offsets", True)}
        given |= {name: value for name, value in record.items() if name in _names(cls)}
        sources = {name: DataSource(**given[name]) for name in ("train", "valid") if given.get(name)}
        return cls(**given | sources)


def as_record(history: History | None, calibration: Calibration | None) -> dict[str, Any]:
    """History and calibration as plain values, to print or to write as JSON."""
    record: dict[str, Any] = {}
    if history is not None:
        record = asdict(history)
        del record["energy_offsets"], record["validation_curve"]  # the first repeats the config, the second is too long
    if calibration is not None:
        record["calibration"] = asdict(calibration)
    return record


def _names(kind: type) -> set[str]:
    return {own.name for own in fields(kind)}


def environment(*packages: str) -> dict[str, dict[str, Any]]:
    """Package versions, and processor, threads and GPU of this machine."""
    versions = {"python": platform.python_version()}
    for package in ("pmlip", "torch", "numpy", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "versions": versions,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
