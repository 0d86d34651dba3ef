"""What every result file says about where it was measured."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def environment(*packages: str) -> dict[str, object]:
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
