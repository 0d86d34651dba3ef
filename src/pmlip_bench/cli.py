"""pmlip bench: each command writes result files and what is made of them."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pmlip.cli.options import AsJson, EnergyKey, ForcesKey, StressKey, Trust, Weights, exit_on_error, print_json
from pmlip.training.config import FinetuneConfig

bench = typer.Typer(no_args_is_help=True, help="Benchmarks; each writes result files.")

Jobs = Annotated[int, typer.Option(min=1, help="Processes at once, one thread each.")]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds 0 to SEEDS - 1.")]
Sizes = Annotated[str, typer.Option(help="Training sizes, with commas between them.")]
Methods = Annotated[str, typer.Option(help="Methods, with commas between them.")]
Results = Annotated[Path, typer.Option(help="Folder of the result files; what is finished is skipped.")]


@bench.command()
def nbody(
    methods: Methods = "egnn,ensemble,blip,mc-dropout,p-egnn,p-ensemble",
    sizes: Annotated[
        str | None, typer.Option(help="Training sizes, with commas between them; by default those of the preset.")
    ] = None,
    seeds: Seeds = 4,
    jobs: Jobs = 1,
    preset: Annotated[str, typer.Option(help="quick: minutes, to try it out; full: the benchmark.")] = "full",
    at_rest: Annotated[bool, typer.Option(help="Work in the frame of the centre of mass.")] = True,
    time_reversal: Annotated[bool, typer.Option(help="Train on the reversed trajectories too.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the result files; by default benchmarks/results/nbody, or nbody-quick."),
    ] = None,
    params: Annotated[bool, typer.Option("--params", help="Print the paper's table of parameters and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Where are five charged particles after a thousand steps? Trains each method from scratch.

    Example: pmlip bench nbody --preset quick --methods egnn,p-egnn --seeds 2 --jobs 2
    """
    from pmlip_bench.nbody import cells as benchmark
    from pmlip_bench.nbody.methods import parameter_table

    if params:
        for name, count, ratio in parameter_table():
            typer.echo(f"{name:24} {count:8,} {ratio:5.2f}x")
        return
    with exit_on_error():
        if preset not in benchmark.PRESETS:
            raise ValueError(f"unknown preset {preset!r}; allowed: {', '.join(benchmark.PRESETS)}")
        chosen = benchmark.PRESETS[preset]
        settings = replace(chosen.settings, at_rest=at_rest, time_reversal=time_reversal)
        rows = benchmark.run(
            methods=_listed(methods),
            sizes=chosen.sizes if sizes is None else _whole_numbers(sizes),
            seeds=seeds,
            preset=replace(chosen, settings=settings),
            folder=out or Path("nbody-quick" if preset == "quick" else "benchmarks/results/nbody"),
            jobs=jobs,
            console=Console(quiet=as_json),
        )
    print_json(rows, as_json)


@bench.command()
def nbody_trials(
    methods: Methods = "egnn,blip,mc-dropout,p-egnn",
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/nbody/trials"),
) -> None:
    """Tune the recipes of the N-body benchmark on validation data: the same number of trials for each method.

    Example: pmlip bench nbody-trials --methods p-egnn --jobs 2
    """
    from pmlip_bench.nbody.trials import tune

    with exit_on_error():
        tune(_listed(methods), out, jobs=jobs, console=Console())


@bench.command()
def nbody_ablation(
    seeds: Seeds = 2,
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/nbody/ablation"),
) -> None:
    """Change one thing of P-EGNN that its paper leaves untested: where the noise enters, whose it is, how much of it.

    Example: pmlip bench nbody-ablation --seeds 2 --jobs 2
    """
    from pmlip_bench.nbody.trials import ablate

    with exit_on_error():
        ablate(out, seeds=seeds, jobs=jobs, console=Console())


@bench.command()
def silica(
    data: Annotated[
        str, typer.Option(help="silica-pbe, a file with DFT labels, tan_silica:FILE or zeo22:FILE.")
    ] = "silica-pbe",
    backbone: Annotated[str, typer.Option(help="Backbone to fine-tune.")] = "chgnet",
    weights: Weights = None,
    trust: Trust = False,
    test_data: Annotated[str | None, typer.Option(help="Test on this file, given as for --data.")] = None,
    unseen: Annotated[list[str] | None, typer.Option(help="Out-of-distribution structures; repeatable.")] = None,
    energy_key: EnergyKey = None,
    forces_key: ForcesKey = None,
    stress_key: StressKey = None,
    methods: Methods = "p,blip,ensemble,mc-dropout,constant,force-scaled,deterministic",
    sizes: Sizes = "32,128",
    seeds: Seeds = 4,
    test: Annotated[
        int | None, typer.Option(min=3, help="Structures to test on, 400 by default, where the data has no such part.")
    ] = None,
    samples: Annotated[int, typer.Option(min=3, help="Samples K at test.")] = 32,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each fine-tuning; by default about 600.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Structures in a step.")] = FinetuneConfig.batch,
    chunk: Annotated[int | None, typer.Option(min=1, help="Samples in one pass of a step; by default all.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/silica"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune a pretrained potential on silica by every method, and compare them.

    Example: pmlip bench silica --methods p,constant --sizes 32 --seeds 2 --steps 400 --jobs 2
    """
    from pmlip.cli.checks import chosen_device
    from pmlip_bench.silica.cells import run
    from pmlip_bench.silica.data import SHIPPED, SilicaSettings

    with exit_on_error():
        data = SHIPPED if data == "silica_pbe" else data  # its name in Python
        if test is not None and (data == SHIPPED or test_data):
            raise ValueError(f"--test {test}: there is a test set already, {test_data or f'that of {data}'}")
        rows = run(
            SilicaSettings(
                backbone=backbone,
                data=data,
                test_data=test_data,
                unseen=tuple(unseen or ()),
                weights=str(weights) if weights else None,
                trust=trust,
                energy_key=energy_key,
                forces_key=forces_key,
                stress_key=stress_key,
                test=SilicaSettings.test if test is None else test,
                test_samples=samples,
                config=FinetuneConfig(steps=steps, batch=batch, chunk=chunk),
            ),
            names=_listed(methods),
            sizes=_whole_numbers(sizes),
            seeds=seeds,
            folder=out,
            jobs=jobs,
            console=Console(quiet=as_json),
            device=chosen_device(device),
        )
    print_json(rows, as_json)


@bench.command()
def silica_trials(
    methods: Methods = "p,blip,mc-dropout,deterministic",
    seeds: Seeds = 2,
    jobs: Jobs = 1,
    out: Results = Path("benchmarks/results/silica/trials"),
) -> None:
    """Tune the fine-tuning of CHGNet on validation data: the same number of trials for each method.

    Example: pmlip bench silica-trials --methods p,blip --jobs 2
    """
    from pmlip_bench.silica.cells import run
    from pmlip_bench.silica.data import TUNING, SilicaSettings
    from pmlip_bench.silica.variants import BEFORE, trials

    with exit_on_error():
        run(
            SilicaSettings(backbone="chgnet", data=TUNING, config=BEFORE),
            names=trials(_listed(methods)),
            sizes=[48],
            seeds=seeds,
            folder=out,
            jobs=jobs,
            console=Console(),
        )


@bench.command()
def symmetry(
    backbone: Annotated[str, typer.Argument(help="Backbone, as for finetune.")],
    model: Annotated[
        Path | None, typer.Option(help="A model that finetune made of it; by default one with random noise weights.")
    ] = None,
    weights: Weights = None,
    trust: Trust = False,
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = Path("benchmarks/results/symmetry"),
) -> None:
    """Measure how far a sample of a turned structure is from the turned sample.

    Example: pmlip bench symmetry chgnet
    """
    from pmlip_bench.symmetry import run

    with exit_on_error():
        run(backbone, model=model, weights=weights, trust=trust, out=out, console=Console())


@bench.command()
def speed(
    only: Annotated[str | None, typer.Option(help="Measure this part alone: crps, nbody, step or predict.")] = None,
    backbone: Annotated[str, typer.Option(help="Backbone of the part predict.")] = "chgnet",
    weights: Weights = None,
    trust: Trust = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the result files.")] = None,
) -> None:
    """Measure our parts beside their rivals in one run, as ratios.

    Example: pmlip bench speed --only crps
    """
    from pmlip_bench.speed import run

    with exit_on_error():
        run(only, out, Console(), backbone=backbone, weights=weights, trust=trust)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(text: str) -> list[int]:
    for part in _listed(text):
        if not part.isdecimal() or int(part) == 0:
            raise ValueError(f"whole numbers of at least 1 with commas between them are wanted, got {part!r}")
    return [int(part) for part in _listed(text)]
