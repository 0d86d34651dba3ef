"""pmlip fold: one sample as an ordinary file of the potential's own package."""

from pathlib import Path

from rich.console import Console

from pmlip.cli.checks import check_new_file
from pmlip.loading import load


def run(
    path: Path, *, out: Path, sample: int, seed: int, weights: Path | None, trust: bool, console: Console
) -> dict[str, object]:
    check_new_file(out)
    loaded = load(path, weights=weights, trust=trust)
    if loaded.fixed_samples != 1:  # of a single answer no spread is asked
        loaded.check_spread()
    folded = loaded.member(sample, seed=seed)
    folded.save(out)
    console.print(f"sample {sample} of seed {seed} is an ordinary {folded.name}:{folded.variant} in {out}")
    return {"backbone": f"{folded.name}:{folded.variant}", "sample": sample, "seed": seed, "out": str(out)}
