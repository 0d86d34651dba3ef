"""pmlip info: what a file of a model is."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pmlip import checkpoint
from pmlip.provenance import as_record


def run(path: Path, *, console: Console) -> dict[str, Any]:
    content = checkpoint.read(path)
    settings = dict(content.settings)
    made = as_record(content.history, content.calibration)
    record = {
        "file": path.name,
        "method": settings.pop("method", "p"),
        "backbone": content.origin.name,
        "backbone_weights": content.origin.weights[:12],
        "parameters": sum(value.numel() for value in content.state.values()),
        "noise": {"dimension": settings["noise_dim"], "sites": len(settings["sites"])} if "sites" in settings else {},
        "options": settings.get("options", {}),
        **made,
        "versions": dict(content.versions),
    }
    table = Table(title=str(path), show_header=False)
    for name, value in record.items():
        if value not in ({}, None) and name != "file":
            table.add_row(name.replace("_", " "), _shown(value))
    console.print(table)
    if not made:
        console.print("It does not say how it was trained: it was saved by hand, not by pmlip finetune.")
    return record


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items() if inner is not None)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
