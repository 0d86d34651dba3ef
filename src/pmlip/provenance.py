"""Where a model and a measurement come from: how a model was trained and calibrated, and on which machine."""

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
    """How the spread of a model was scaled to validation data."""

    factor: float  # applied to the noise
    crps: tuple[float, float]  # eV/Å, of the validation forces before and after
    ssr: tuple[float, float]  # spread-skill ratio of the validation forces before and after
    level: float  # probability of the conformal intervals
    conformal: float | None  # intervals are mean ± conformal * sigma; None: too few structures for the level
    structures: int
    samples: int  # K during calibration; the intervals hold for at least as many
    seed: int = 0
    shift: float = 0.0  # eV per atom, added to all energies so that their mean stays the same
    data: str | None = None  # name of the validation data

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """From the plain values of a file."""
        pairs = {name: tuple(record[name]) for name in ("crps", "ssr")}
        return cls(**{name: value for name, value in record.items() if name in _names(cls)} | pairs)

    def conformal_for(self, samples: int) -> float | None:
        """The factor of the conformal intervals, where it holds for this many samples; fewer give a noisier spread."""
        return self.conformal if samples >= self.samples else None


@dataclass(frozen=True)
class DataSource:
    """A file of structures."""

    file: str
    structures: int


@dataclass(frozen=True, kw_only=True)
class History:
    """How a model was fine-tuned."""

    config: Mapping[str, Any]  # the settings of the run, as plain values
    energy_offsets: bool = True  # whether an energy per element was fitted to the training set
    train: DataSource | None = None
    valid: DataSource | None = None
    steps: int = 0
    passes: int = 0  # structures times samples through the network and back
    seconds: float = 0.0
    offsets: Mapping[int, float] = field(default_factory=dict)  # eV per atom, by atomic number
    error_before: Mapping[str, float] = field(default_factory=dict)  # MAE of each label before fine-tuning
    noise_rate: float | None = None  # learning rate of the parameters that the method added
    validation: Mapping[str, float] = field(default_factory=dict)  # scores of the weights that were kept
    validation_curve: Sequence[Mapping[str, float]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """From the plain values of a file; files before format 4 name fewer of them."""
        config = record.get("config", {})
        given = {"config": config, "energy_offsets": config.get("offsets", True)}
        given |= {name: value for name, value in record.items() if name in _names(cls)}
        sources = {name: DataSource(**given[name]) for name in ("train", "valid") if given.get(name)}
        return cls(**given | sources)


def as_record(history: History | None, calibration: Calibration | None) -> dict[str, Any]:
    """How a model was made, as plain values to print or to write as JSON."""
    record: dict[str, Any] = {}
    if history is not None:
        record = asdict(history)
        del record["energy_offsets"], record["validation_curve"]  # in the config, and too long to print
    if calibration is not None:
        record["calibration"] = asdict(calibration)
    return record


def _names(kind: type) -> set[str]:
    return {own.name for own in fields(kind)}


def environment(*packages: str) -> dict[str, dict[str, Any]]:
    """Versions, processor and threads of this run."""
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
