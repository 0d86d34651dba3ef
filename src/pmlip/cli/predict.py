"""pmlip predict: a file of structures in, the same with predictions and uncertainties out."""

import hashlib
from pathlib import Path

from rich.console import Console

from pmlip.cli.checks import check_new_file, chosen_device
from pmlip.cli.progress import counter, progress_bar, resumable
from pmlip.loading import load
from pmlip.prediction import predict_file


def run(
    path: Path,
    data: Path,
    *,
    out: Path,
    samples: int,
    seed: int,
    weights: Path | None,
    trust: bool,
    device: str | None,
    console: Console,
) -> dict[str, object]:
    check_new_file(out)
    loaded = load(path, weights=weights, trust=trust, device=chosen_device(device))
    identity = hashlib.sha256(path.read_bytes()).hexdigest()
    with progress_bar(console) as bar, resumable(console):
        count = predict_file(
            loaded,
            data,
            out,
            samples=samples,
            seed=seed,
            identity=identity,
            progress=counter(bar, data.name),
        )
    console.print(f"{count} structures with predictions and uncertainties are in {out}")
    return {"structures": count, "out": str(out), "samples": loaded.fixed_samples or samples, "seed": seed}
