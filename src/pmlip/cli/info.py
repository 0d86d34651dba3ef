"""pmlip info: the content of a model file."""

from typing import Any

from rich.console import Console
from rich.table import Table

from pmlip.cli.options import AsJson, Model, print_json
from pmlip.run_folder import model_file


def info(model: Model, as_json: AsJson = False) -> None:
    """Show the backbone, training data, settings, scores and versions of a model.

    Example: pmlip info p-chgnet/model.pt
    """
    from pmlip import checkpoint
    from pmlip.provenance import as_record

    model = model_file(model)
    console = Console(quiet=as_json)
    content = checkpoint.read(model)
    settings = dict(content.settings)
    made = as_record(content.history, content.calibration)
    record = {
        "file": model.name,
        "method": settings.pop("method", "p"),
        "backbone": content.origin.name,
        "backbone_weights": content.origin.weights[:12],
        "parameters": sum(value.numel() for value in content.state.values()),
        "noise": {"dimension": settings["noise_dim"], "sites": len(settings["sites"])} if "sites" in settings else {},
        "options": settings.get("options", {}),
        "tangent_samples": any(name.endswith("tangent.width") and value > 0 for name, value in content.state.items()),
        **made,
        "calibrated": content.calibration is not None,
        "novelty": {kind: one.describe() for kind, one in content.training_features.items()},
        "versions": dict(content.versions),
    }
    table = Table(title=str(model), show_header=False)
    for name, value in record.items():
        if value not in ({}, None) and name != "file":
            table.add_row(name.replace("_", " "), _shown(value))
    console.print(table)
    if not made:
        console.print("No training record: this model was not fine-tuned by pmlip.")
    print_json(record, as_json)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items() if inner is not None)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
