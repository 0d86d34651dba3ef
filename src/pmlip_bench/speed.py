"""Measures the speed of parts of pmlip and of other implementations in the same run."""

import contextlib
import copy
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ase.io import write
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pmlip.atomic_files import write_json
from pmlip.provenance import environment
from pmlip.scores import fair_crps
from pmlip_bench.runner import slug
from pmlip_bench.speed_tables import novelty_markdown, predict_markdown, step_markdown, times

ENTRIES = 100_000
SAMPLES = (10, 100, 1000)
PAIRS = 10**8  # pairs of samples that the double sum can hold; with more, it is timed on fewer entries and scaled up
SECONDS = 1.0  # each measurement is repeated for about this long
SEED = 0


def run(
    only: str | None,
    out: Path | None,
    console: Console,
    *,
    backbone: str = "chgnet",
    weights: Path | None = None,
    trust: bool = False,
) -> None:
    """Measure each part (or `only` one), print its table, and write its result file to `out` if given.

    backbone, weights, trust: the potential for the parts predict and novelty.
    """
    if only is not None and only not in PARTS:
        raise ValueError(f"unknown part {only!r}; allowed: {', '.join(PARTS)}")
    for name in PARTS if only is None else [only]:
        measure, file = PARTS[name], name
        if name in OF_A_BACKBONE:
            measure = partial(measure, backbone=backbone, weights=weights, trust=trust)
            file = f"{name}-{slug(backbone)}"
        result = measure(console)
        if out is not None:
            write_json(out / f"{file}.json", result)
            console.print(f"written: {out / f'{file}.json'}")


def measure_crps(console: Console) -> dict[str, Any]:
    """Time and memory of the fair CRPS of 1e5 entries, without and with its gradient."""
    try:
        import scoringrules
    except ImportError as error:
        raise ImportError("the part crps needs scoringrules: pip install 'pmlip[bench]'") from error

    def numba(samples: Tensor, target: Tensor) -> Any:
        return scoringrules.crps_ensemble(target.numpy(), samples.T.numpy(), estimator="pwm", backend="numba")

    def through_torch(samples: Tensor, target: Tensor) -> Tensor:
        return scoringrules.crps_ensemble(target, samples.T, estimator="pwm", backend="torch")

    def with_gradient(score: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
        def both(samples: Tensor, target: Tensor) -> None:
            score(samples.requires_grad_(), target).sum().backward()
            samples.grad = None
            samples.requires_grad_(False)

        return both

    contestants: dict[str, dict[str, Callable[[Tensor, Tensor], Any]]] = {
        "forward": {"pmlip": fair_crps, "scoringrules": numba, "double sum": double_sum},
        "forward + backward": {
            "pmlip": with_gradient(fair_crps),
            "scoringrules": with_gradient(through_torch),
            "double sum": with_gradient(double_sum),
        },
    }
    rows = []
    for count in SAMPLES:
        # each implementation gets its fastest memory layout: scoringrules has the samples on the last axis
        for task, rivals in contestants.items():
            for name, function in rivals.items():
                entries = ENTRIES if name != "double sum" else min(ENTRIES, PAIRS // count**2)
                generator = torch.Generator().manual_seed(SEED)
                samples = torch.randn(count, entries, generator=generator)
                if name == "scoringrules":
                    samples = samples.T.contiguous().T
                target = torch.randn(entries, generator=generator)
                work = partial(function, samples, target)
                scale = ENTRIES / entries
                rows.append(
                    {
                        "samples": count,
                        "task": task,
                        "contestant": name,
                        "seconds": _seconds(work) * scale,
                        "peak_megabytes": _peak_memory(work) * scale / 1e6,
                        "entries_measured": entries,
                    }
                )
    console.print(_table(rows))
    return {
        "what": f"fair CRPS of {ENTRIES} single-precision entries; the least of several runs",
        "seed": SEED,
        "rows": rows,
        **environment("scoringrules", "numba"),
    }


def measure_nbody(console: Console) -> dict[str, Any]:
    """Times of a training step of P-EGNN and of K passes of a textbook EGNN, on one thread; and of a simulation."""
    from pmlip.nbody.data import Trajectories
    from pmlip.nbody.p_egnn import PEGNN
    from pmlip.nbody.simulate import initial, simulate
    from pmlip_bench.nbody.textbook import TextbookEGNN, complete_pairs, simulate_plainly
    from pmlip_bench.nbody.training import compile_network

    graphs, count = 100, 10
    x, v, q = initial(graphs, seed=SEED)
    batch = Trajectories(*(torch.from_numpy(array).float() for array in (x, v, q, x + v, v)))
    generator = torch.Generator().manual_seed(SEED)
    ours, textbook = PEGNN(), TextbookEGNN()
    pairs = complete_pairs(graphs, x.shape[1])
    flat = [array.flatten(0, 1) for array in (batch.positions, batch.velocities, batch.charges)]

    def textbook_step() -> None:
        outputs = torch.stack([textbook(*flat, pairs) for _ in range(count)])
        fair_crps(outputs, batch.target.flatten(0, 1)).mean().backward()

    with _one_thread():
        steps = {"training step": _seconds(lambda: ours.loss(batch, generator, count).backward())}
        if compile_network(ours):
            steps["compiled training step"] = _seconds(lambda: ours.loss(batch, generator, count).backward())
        plain_step = _seconds(textbook_step)
    many = initial(2000, seed=SEED)
    trajectory = _seconds(partial(simulate, *many)) / len(many[0])
    plain_trajectory = _seconds(partial(simulate_plainly, x[0], v[0], q[0], steps=4100))
    rows: list[dict[str, Any]] = [
        *(
            {"what": f"{what}, K = {count}, batch {graphs}, one thread", "seconds": seconds, "plain": plain_step}
            for what, seconds in steps.items()
        ),
        {"what": "one simulated trajectory, all cores", "seconds": trajectory, "plain": plain_trajectory},
    ]
    table = Table(title="N-body: pmlip against a textbook EGNN and a plain Python loop")
    for column in ("", "pmlip, ms", "plain, ms", "times faster"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        row["ratio"] = row["plain"] / row["seconds"]
        table.add_row(row["what"], f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['plain']:.1f}", f"{row['ratio']:.1f}")
    console.print(table)
    return {"what": "the least of several runs", "seed": SEED, "rows": rows, **environment("numba")}


def double_sum(samples: Tensor, target: Tensor) -> Tensor:
    """The fair CRPS, computed directly from its formula in O(K^2) time and memory."""
    count = len(samples)
    pairs = (samples[:, None] - samples[None]).abs().sum((0, 1))
    return (samples - target).abs().mean(0) - pairs / (2 * count * (count - 1))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seconds(work: Callable[[], object]) -> float:
    """The fastest of several runs, after one warm-up run."""
    work()
    best, spent = float("inf"), 0.0
    while spent == 0 or spent < SECONDS:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        best, spent = min(best, seconds), spent + seconds
    return best


def _peak_memory(work: Callable[[], object]) -> float:
    """Peak memory in bytes above the level before the run; NaN outside Linux."""
    return _peaks(work)[0]


def _peaks(work: Callable[[], object]) -> tuple[float, float]:
    """Peak memory in bytes, above the level before the run and in total, from the kernel's high-water mark."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        return float("nan"), float("nan")

    def kilobytes(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1])

    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system: reusing it would not count
    before = kilobytes("VmRSS:")
    reset.write_text("5")
    work()
    peak = kilobytes("VmHWM:")
    return 1024.0 * max(0, peak - before), 1024.0 * peak


def measure_step(console: Console) -> dict[str, Any]:
    """Time and memory of a training step of P-CHGNet on four structures, for several numbers of samples.

    The step is the same as in fine-tuning and includes the pass without noise. For comparison, it is also measured with
    CHGNet's own message passing, which concatenates the inputs of its layers.
    """
    from pmlip import losses
    from pmlip.backbones import load_backbone
    from pmlip.backbones.chgnet import SPLIT
    from pmlip.datasets import silica_pbe
    from pmlip.methods.p import Potential, perturb
    from pmlip.noise.layer_classes import become
    from pmlip.structures import LABELS
    from pmlip.structures.labels import labels
    from pmlip.training.config import FinetuneConfig
    from pmlip.training.distributed import Processes
    from pmlip.training.objective import Objective

    model = perturb(load_backbone("chgnet"))
    published = copy.deepcopy(model)
    original_class = {ours: theirs for theirs, ours in SPLIT.items()}
    for part in published.modules():
        become(part, original_class.get(type(part), type(part)))
    structures = silica_pbe("train")[:4]
    graph, target = model.backbone.graph(structures), labels(structures)

    def step(model: Potential, samples: int, chunk: int | None) -> None:
        model.zero_grad(set_to_none=True)
        config = FinetuneConfig(samples=samples, chunk=chunk)
        objective = Objective(model, config, dict.fromkeys(LABELS, 1.0), Processes())
        noise = objective.draw(len(structures), torch.Generator().manual_seed(SEED))
        loss = partial(objective.loss, target, target)
        losses.backpropagate(partial(model, graph), noise, loss, chunk=objective.chunk)

    rows = []
    step(model, 2, None)  # warm-up, not counted
    for contestant, samples, chunk in (
        (model, 4, None),
        (model, 16, None),
        (model, 16, 4),
        (model, 64, 4),
        (published, 4, None),
    ):
        work = partial(step, contestant, samples, chunk)
        above, total = _peaks(work)
        row = {"in_parts": contestant is model, "samples": samples, "chunk": chunk, "seconds": _seconds(work)}
        rows.append(row | {"peak_megabytes": above / 1e6, "peak_rss_megabytes": total / 1e6})
        contestant.zero_grad(set_to_none=True)
    sizes = ", ".join(str(len(atoms)) for atoms in structures)
    result = {"what": f"a training step of P-CHGNet on structures of {sizes} atoms", "seed": SEED, "rows": rows}
    console.print(step_markdown(result))
    return result | environment("chgnet")


def measure_predict(
    console: Console,
    *,
    backbone: str = "chgnet",
    weights: Path | None = None,
    trust: bool = False,
    count: int = 1000,
    samples: int = 16,
) -> dict[str, Any]:
    """Times of `pmlip predict` and of K passes of the backbone's own calculator, on one thread."""
    from pmlip.backbones import load_backbone
    from pmlip.datasets import silica_pbe
    from pmlip.methods.p import perturb
    from pmlip.prediction import predict_file

    model = perturb(load_backbone(backbone, weights=weights, trust=trust))
    model.randomise(0.01, seed=SEED)
    known = silica_pbe("train")
    structures = [known[index % len(known)] for index in range(count)]
    some = structures[: max(1, count // 40)]  # enough: the stock calculator takes the same time per structure
    with _one_thread():
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "in.extxyz", Path(folder) / "out.extxyz"
            write(source, structures)
            began = time.perf_counter()
            predict_file(model, source, out, samples=samples)
            ours = (time.perf_counter() - began) / (count * samples)
        spent = 0.0
        for number in range(samples):
            calculator = model.member(number).calculator()
            calculator.get_forces(some[0].copy())  # warm-up, not counted
            began = time.perf_counter()
            for atoms in some:
                calculator.calculate(atoms.copy(), ["energy", "forces", "stress"])
            spent += time.perf_counter() - began
        stock = spent / (len(some) * samples)
    result = {
        "what": f"{count} structures of 9 or 12 atoms, K = {samples}, one thread: seconds per structure and sample",
        "backbone": backbone,
        "seed": SEED,
        "structures_of_the_stock_calculator": len(some),
        "rows": [{"backbone": backbone, "seconds": ours, "stock": stock, "ratio": stock / ours}],
    }
    console.print(predict_markdown([result]))
    return result | environment()


def measure_novelty(
    console: Console,
    *,
    backbone: str = "chgnet",
    weights: Path | None = None,
    trust: bool = False,
    train: int = 128,
    repeats: Sequence[tuple[int, int, int]] = ((2, 2, 2), (4, 3, 2)),
    rounds: int = 10,
) -> dict[str, Any]:
    """Processor times of an MD step with novelty and one-pass error bars, on one thread.

    They are compared with the same pass without novelty, graph included, and with the backbone's own calculator.
    train: structures to compare with. repeats: of a quartz cell of 9 atoms.
    """
    from pmlip import methods
    from pmlip.backbones import load_backbone
    from pmlip.calculator import PMLIPCalculator
    from pmlip.datasets import silica_pbe
    from pmlip.novelty import KINDS

    potential = load_backbone(backbone, weights=weights, trust=trust)
    stock = potential.calculator()
    model = methods.make("deterministic", potential)  # P without noise makes the same pass
    known = silica_pbe("train")
    cell = next(atoms for atoms in known if len(atoms) == 9)
    rows: list[dict[str, Any]] = []
    with _one_thread():
        model.fit_novelty(known[:train], valid=silica_pbe("valid")[:24])
        for repeat in repeats:
            atoms = cell.repeat(repeat)
            works: dict[str, Callable[[], object]] = {
                "stock": partial(stock.calculate, atoms, ["energy", "forces", "stress"]),
                "plain": partial(model.predict, atoms),
            }
            for kind in KINDS:
                single = copy.copy(model)
                single.training_features = {kind: model.training_features[kind]}
                works[kind] = partial(PMLIPCalculator(single, samples=0).calculate, atoms)
            seconds = _in_turn(works, rounds)
            for kind in KINDS:
                row = {"backbone": backbone, "atoms": len(atoms), "features": kind, "seconds": min(seconds[kind])}
                for name in ("plain", "stock"):
                    pairs = zip(seconds[kind], seconds[name], strict=True)
                    row |= {name: min(seconds[name]), f"times_{name}": median(own / other for own, other in pairs)}
                rows.append(row)
    result = {
        "what": "a step with forces, novelty and error bars, one thread: least processor seconds, and the "
        "median over rounds of the ratio to the same pass without novelty and to the stock calculator, which take "
        "turns",
        "seed": SEED,
        "train": train,
        "rounds": rounds,
        "rows": rows,
    }
    console.print(novelty_markdown([result]))
    return result | environment()


def _in_turn(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each work in each round, after one warm-up run of each.

    Unlike wall-clock time, they do not count the time that the processor spends on other processes.
    """
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    return seconds


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Fair CRPS, {ENTRIES} entries: time and peak memory, and ratios to pmlip")
    for column in ("K", "task", "who", "ms", "× pmlip", "MB", "× pmlip"):
        table.add_column(column, justify="left" if column in ("task", "who") else "right")
    ours = {(row["samples"], row["task"]): row for row in rows if row["contestant"] == "pmlip"}
    for row in rows:
        own = ours[row["samples"], row["task"]]
        table.add_row(
            str(row["samples"]),
            row["task"],
            row["contestant"],
            f"{1e3 * row['seconds']:.1f}",
            times(row["seconds"], own["seconds"]),
            f"{row['peak_megabytes']:.0f}",
            times(row["peak_megabytes"], own["peak_megabytes"]),
        )
    return table


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "crps": measure_crps,
    "nbody": measure_nbody,
    "step": measure_step,
    "predict": measure_predict,
    "novelty": measure_novelty,
}
OF_A_BACKBONE = ("predict", "novelty")  # parts that measure a given potential; they have one result file for each
