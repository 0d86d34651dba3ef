import json
import math

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from rich.console import Console
from typer.testing import CliRunner

from pmlip.atomic_files import write_json
from pmlip.cli import app
from pmlip.training.config import FinetuneConfig
from pmlip_bench.ethanol import cells as benchmark
from pmlip_bench.ethanol.cells import true_force
from pmlip_bench.ethanol.data import UNSEEN, EthanolSettings, splits
from tiny import tiny_backbone

ETHANOL = Atoms(
    "C2OH6",
    [
        *([1.17, -0.41, 0.0], [0.0, 0.55, 0.0], [-1.19, -0.21, 0.0], [2.11, 0.15, 0.0]),
        *([1.13, -1.05, 0.89], [1.13, -1.05, -0.89], [0.04, 1.19, 0.89], [0.04, 1.19, -0.89], [-1.96, 0.38, 0.0]),
    ],
)


def morse(distance):
    return 4.6 * (1 - np.exp(-2.2 * (distance - 0.97))) ** 2


def labelled(atoms, *, forces=True, **info):
    """With the energy of the O-H bond, an energy per carbon atom, and small forces."""
    made = atoms.copy()
    made.info |= info
    energy = -1000.0 * atoms.symbols.count("C") + morse(info.get("OH_dist", 0.97))
    given = {"energy": energy} | ({"forces": 0.1 * np.sin(5 * atoms.positions)} if forces else {})
    made.calc = SinglePointCalculator(made, **given)
    return made


def stretched(distance, displacement=0.0):
    """Ethanol with this O-H distance; the last atom is the hydrogen of the hydroxyl group."""
    atoms = ETHANOL.copy()
    atoms.positions[:8] += displacement
    bond = atoms.positions[8] - atoms.positions[2]
    atoms.positions[8] = atoms.positions[2] + distance * bond / np.linalg.norm(bond)
    return atoms


@pytest.fixture
def settings(tmp_path):
    """Small files in the form of the ethanol set."""
    random, folder = np.random.default_rng(0), tmp_path / "data"
    folder.mkdir()
    near = random.uniform(0.9, 1.06, 44)
    moved = 0.03 * random.normal(size=(44, 8, 3))
    md = [labelled(stretched(r, d), OH_dist=r) for r, d in zip(near, moved, strict=True)]
    methanol = [labelled(atoms[[1, *range(2, 7)]], OH_dist=0.97) for atoms in md[:3]]
    pulled = [labelled(stretched(r), forces=False, OH_dist=r) for r in 0.675 + 0.1 * np.arange(20)]
    mode = [labelled(stretched(0.97, s), forces=False) for s in (-0.2, 0.0, 0.2)]
    dimers = [labelled(Atoms(pair, [[0, 0, 0], [1, 0, 0]]), forces=False) for pair in ("OH", "CH", "NH")]
    files = dict(zip(UNSEEN.values(), (pulled, mode, mode, methanol, dimers), strict=True))
    for name, structures in {"train.xyz": md[:34], "test_MD.xyz": md[34:], **files}.items():
        write(folder / name, structures, format="extxyz")
    config = FinetuneConfig(steps=3, batch=4)
    return EthanolSettings(data=str(folder), train=12, valid=22, test=8, test_samples=4, config=config)


@pytest.fixture
def in_this_process(monkeypatch):
    """Cells with a tiny potential, one after the other in this process; names of the cells that ran."""
    done = []

    def run_cells(cells, job, folder, **_):
        for cell in cells:
            if not cell.file(folder).exists():
                write_json(cell.file(folder), job(cell))
                done.append(cell.name)

    monkeypatch.setattr(benchmark, "load_backbone", lambda *_, **__: tiny_backbone(dtype=torch.float32))
    monkeypatch.setattr(benchmark, "run_cells", run_cells)
    return done


def run(settings, folder, names=("deterministic", "p")):
    return benchmark.run(settings, names=names, seeds=1, folder=folder, jobs=1, console=Console(quiet=True))


@pytest.mark.usefixtures("quick_energy_zero")
def test_from_end_to_end(settings, in_this_process, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    rows = run(settings, tmp_path)
    assert {row["structures"] for row in rows} == {"MD", *UNSEEN}
    assert (tmp_path / "path.png").read_bytes().startswith(b"\x89PNG")
    of_p, plain = (json.loads((tmp_path / f"{name}-12-0.json").read_text()) for name in ("p", "deterministic"))
    for result in (of_p, plain):
        sets = result["sets"]
        assert {name for name, found in sets.items() if "relative_energy" not in found} == {"methanol", "dimers"}
        assert {name for name, found in sets.items() if "energy" not in found} == {"methanol", "dimers"}
        assert {name for name, found in sets.items() if "forces" in found} == {"MD", "methanol"}
        assert all(0 <= sets[name]["auroc_novelty"] <= 1 for name in UNSEEN)
        assert sets["dimers"]["novelty"]["0.95"] is None  # nitrogen, which the training set lacks: JSON has no infinity
        assert len(result["path"]["frames"]) == 20
        assert "HN" not in result["pairs_inside"]
    assert {"auroc_spread", "spread_ratio"} <= of_p["sets"]["H removal"].keys()
    assert "auroc_spread" not in plain["sets"]["H removal"]
    assert of_p["calibration"]["structures"] == 22
    assert plain["calibration"] is None
    with_spread, without = of_p["path"]["frames"][3], plain["path"]["frames"][3]
    assert with_spread.keys() - without.keys() == {"force_spread", "structure_force_spread", "energy_spread"}


@pytest.mark.usefixtures("quick_energy_zero")
def test_another_evaluation_uses_the_same_weights(settings, in_this_process, tmp_path):
    run(settings, tmp_path, names=["p"])
    first = json.loads((tmp_path / "p-12-0.json").read_text())
    weights = (tmp_path / "weights" / "p-12-0.pt").stat().st_mtime_ns
    run(settings, tmp_path, names=["p"])
    assert in_this_process == ["p-12-0"]
    (tmp_path / "p-12-0.json").unlink()
    run(settings, tmp_path, names=["p"])
    assert in_this_process == ["p-12-0", "p-12-0"]
    again = json.loads((tmp_path / "p-12-0.json").read_text())
    assert (tmp_path / "weights" / "p-12-0.pt").stat().st_mtime_ns == weights
    assert again["path"]["scores"] == pytest.approx(first["path"]["scores"], rel=1e-3)
    changed = EthanolSettings(**{**vars(settings), "test_samples": 5})
    with pytest.raises(ValueError, match=r"other settings \(test_samples = 4, now 5\)"):
        run(changed, tmp_path, names=["p"])


def test_the_path_shows_the_force_and_the_energy_of_a_known_potential(settings, in_this_process, tmp_path):
    run(settings, tmp_path, names=["deterministic"])
    result = json.loads((tmp_path / "deterministic-12-0.json").read_text())
    frames = result["path"]["frames"]
    distance = np.array([frame["oh_distance"] for frame in frames])
    step = 1e-4
    expected = (morse(distance - step) - morse(distance + step)) / (2 * step)
    found = np.array([frame["force"] for frame in frames])
    np.testing.assert_allclose(found[1:-1], expected[1:-1], rtol=1e-3, atol=0.01)
    lowest = morse(0.975)  # the structure of the path that energies are relative to
    np.testing.assert_allclose([frame["energy"] for frame in frames], morse(distance) - lowest, atol=1e-6)
    assert frames[3]["energy_error"] == 0
    errors = [frame["force_error"] for frame in frames]
    assert result["path"]["scores"]["mae"] == pytest.approx(np.abs(errors).mean())
    bars = [frame["one_pass_error_bar"] for frame in frames]
    ratio = math.sqrt(np.square(bars).mean() / np.square(errors).mean())
    assert result["path"]["scores"]["ssr_one_pass"] == pytest.approx(ratio)


def test_energies_may_have_any_zero():
    distance = 0.7 + 0.1 * np.arange(10)
    np.testing.assert_allclose(true_force(distance, morse(distance) - 4200), true_force(distance, morse(distance)))


def test_training_validation_and_test_structures_are_different(shared):
    folder = shared / "data" / "ethanol"
    if not folder.is_dir():
        pytest.skip("needs the ethanol set of BOTNet-datasets")
    parts = splits(EthanolSettings(data=str(folder)))
    sizes = {name: len(structures) for name, structures in parts.unseen.items()}
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (200, 50, 200)
    assert sizes == {"H removal": 60, "normal mode 874": 37, "normal mode 3005": 18, "methanol": 145, "dimers": 429}
    everything = [*parts.train, *parts.valid, *parts.test, *parts.unseen["H removal"]]
    assert len({atoms.positions.tobytes() for atoms in everything}) == len(everything)
    assert max(atoms.info["OH_dist"] for atoms in parts.train) < 1.1  # the bond is never broken in training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "ensemble"], "ensemble is built from other models"),
        (["--methods", "deterministc"], "did you mean 'deterministic'?"),
        ([], "there is no file"),
    ],
)
def test_bad_input_is_refused(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["bench", "ethanol", "--data", str(tmp_path), "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_too_few_structures_are_refused(settings):
    with pytest.raises(ValueError, match=r"train.xyz: 222 structures are needed, but it holds 34"):
        splits(EthanolSettings(data=settings.data, train=200, valid=22))
