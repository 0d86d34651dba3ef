import errno
import json
import os

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

import pmlip
from conftest import randomise_noise
from molecules import calibration, molecules
from pmlip import methods, prediction
from pmlip.errors import OutputInUseError
from pmlip.locks import locked_file
from pmlip.prediction import count_structures, predict_file
from pmlip.provenance import History
from tiny import tiny_backbone


@pytest.fixture
def model():
    return randomise_noise(pmlip.perturb(tiny_backbone()))


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(prediction, "BATCH", 3)


def water(count):
    made = []
    for index in range(count):
        atoms = Atoms("OH2", [[0, 0, 0], [0, 0.76, 0.59], [0, -0.76, 0.59]])
        atoms.rattle(0.05, seed=index)
        atoms.info["name"] = f"w{index}"
        made.append(atoms)
    return made


def test_every_structure_gets_mean_and_uncertainties(model, tmp_path):
    structures = water(8)
    structures[2].calc = SinglePointCalculator(structures[2], energy=-1.5, forces=np.ones((3, 3)))
    write(tmp_path / "in.extxyz", structures)
    seen = []
    options = {"samples": 4, "seed": 1, "progress": lambda *numbers: seen.append(numbers)}
    assert predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", **options) == 8
    assert seen == [(3, 8), (6, 8), (8, 8)]
    found = read(tmp_path / "out.extxyz", ":")
    drawn, mean = model.sample_with_mean(structures, samples=4, seed=1)
    np.testing.assert_allclose(np.concatenate([atoms.get_forces() for atoms in found]), mean.forces, atol=1e-7)
    np.testing.assert_allclose([atoms.get_potential_energy() for atoms in found], mean.energy, atol=1e-9)
    np.testing.assert_allclose([atoms.info["energy_uncertainty"] for atoms in found], drawn.spread.energy, atol=1e-9)
    assert [atoms.info["name"] for atoms in found] == [f"w{index}" for index in range(8)]
    assert found[2].info["REF_energy"] == -1.5
    assert {file.name for file in tmp_path.iterdir()} == {"in.extxyz", "out.extxyz"}


@pytest.mark.parametrize("method", ["p", "blip"])
@pytest.mark.parametrize("cut", [0, 40])
def test_an_interrupted_run_goes_on_and_ends_the_same(model, tmp_path, monkeypatch, cut, method):
    """Also where the noise of a structure depends on its place in a batch."""
    model = model if method == "p" else methods.make("blip", tiny_backbone())
    write(tmp_path / "in.extxyz", water(8))
    predict_file(model, tmp_path / "in.extxyz", tmp_path / "whole.extxyz", samples=4)
    asked, sample = [], model.sample_with_mean

    def fails_the_third_time(structures, **options):
        asked.append(len(structures))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return sample(structures, **options)

    monkeypatch.setattr(model, "sample_with_mean", fails_the_third_time)
    with pytest.raises(KeyboardInterrupt):
        predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4)
    assert not (tmp_path / "out.extxyz").exists()
    partial = tmp_path / "out.extxyz.partial"
    if cut:  # as a killed process leaves it
        partial.write_bytes(partial.read_bytes() + partial.read_bytes()[:cut])
    assert predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4) == 8
    assert asked[3:] == [2]
    assert (tmp_path / "out.extxyz").read_text() == (tmp_path / "whole.extxyz").read_text()


def test_the_spread_of_the_energies_has_its_own_factor(model, tmp_path):
    write(tmp_path / "in.extxyz", water(4))
    drawn = model.sample(water(4), samples=4)
    model.calibration = calibration(conformal=None, samples=4, energy_factor=0.25)
    predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4)
    found = read(tmp_path / "out.extxyz", ":")
    reported = [atoms.info["energy_uncertainty"] for atoms in found]
    np.testing.assert_allclose(reported, 0.25 * drawn.spread.energy, rtol=1e-5)
    forces = np.concatenate([atoms.arrays["forces_uncertainty"] for atoms in found])
    np.testing.assert_allclose(forces, drawn.spread.forces, atol=1e-7)


def test_references_that_are_there_already_stay(model, tmp_path):
    """The predictions of one model as the input of another: the DFT labels are still those of DFT."""
    (atoms,) = water(1)
    atoms.calc = SinglePointCalculator(atoms, energy=-1.5, forces=np.ones((3, 3)))
    write(tmp_path / "in.extxyz", atoms)
    predict_file(model, tmp_path / "in.extxyz", tmp_path / "first.extxyz", samples=4)
    predict_file(model, tmp_path / "first.extxyz", tmp_path / "second.extxyz", samples=4, seed=1)
    assert read(tmp_path / "second.extxyz").info["REF_energy"] == -1.5


def test_what_another_model_predicted_does_not_stay_and_is_no_reference(model, tmp_path):
    write(tmp_path / "in.extxyz", water(1))
    model.calibration = calibration(conformal=2.0, samples=2)
    predict_file(model, tmp_path / "in.extxyz", tmp_path / "first.extxyz", samples=4)
    assert "forces_interval" in read(tmp_path / "first.extxyz").arrays
    model.calibration = None
    predict_file(model, tmp_path / "first.extxyz", tmp_path / "second.extxyz", samples=4)
    second = read(tmp_path / "second.extxyz")
    assert "forces_interval" not in second.arrays
    assert "REF_energy" not in second.info
    assert second.info["previous_energy"] == read(tmp_path / "first.extxyz").get_potential_energy()


def test_what_a_recorder_wrote_to_a_database_is_no_reference_either(model, tmp_path):
    (atoms,) = water(1)
    atoms.calc = pmlip.PMLIPCalculator(model, samples=4)
    pmlip.Recorder(atoms, tmp_path / "md.db")()
    predict_file(model, tmp_path / "md.db", tmp_path / "out.extxyz", samples=4)
    (found,) = read(tmp_path / "out.extxyz", ":")
    assert "REF_energy" not in found.info
    assert found.info["previous_energy"] == pytest.approx(atoms.get_potential_energy())
    with pytest.raises(ValueError, match="it carries uncertainties, so its 'energy' is probably a prediction"):
        pmlip.read_structures(tmp_path / "out.extxyz")


def test_a_name_of_two_lines_does_not_spoil_the_file(model, tmp_path):
    structures = water(4)
    structures[1].info["note"] = "first line\nsecond line"
    write(tmp_path / "in.traj", structures)
    predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4)
    assert [atoms.info.get("note") for atoms in read(tmp_path / "out.extxyz", ":")][1] == "first line second line"


def test_other_results_of_the_source_stay_too(model, tmp_path):
    (atoms,) = water(1)
    results = {"free_energy": -2.0, "magmoms": np.arange(3.0), "dipole": np.ones(3)}
    results["born_effective_charges"] = np.zeros((3, 3, 3))  # which extxyz has no place for
    atoms.calc = SinglePointCalculator(atoms, **results)
    write(tmp_path / "in.traj", atoms)
    predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4)
    found = read(tmp_path / "out.extxyz")
    assert found.info["REF_free_energy"] == -2.0
    np.testing.assert_array_equal(found.info["REF_dipole"], np.ones(3))
    np.testing.assert_array_equal(found.arrays["REF_magmoms"], np.arange(3.0))


def test_what_failed_at_the_start_leaves_nothing_behind(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        predict_file(model, tmp_path / "misspelt.extxyz", tmp_path / "out.extxyz", samples=4)
    assert not list(tmp_path.iterdir())


def test_what_was_begun_otherwise_is_not_continued(model, tmp_path):
    write(tmp_path / "in.extxyz", water(2))
    (tmp_path / "out.extxyz.partial").touch()
    (tmp_path / "out.extxyz.partial.json").write_text('{"samples": 7}')
    with pytest.raises(ValueError, match=r"out.extxyz.partial belongs to a run with another model, source, samples"):
        predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4)


@pytest.fixture
def stopped_at_the_last(model, tmp_path, monkeypatch):
    """Good structures, and a run on a file of them that could not take the last."""
    monkeypatch.setattr(prediction, "BATCH", 2)
    structures = water(5)
    broken = [atoms.copy() for atoms in structures]
    broken[4].positions[1] = np.nan
    write(tmp_path / "in.traj", broken)
    with pytest.raises(ValueError, match="structure 4"):
        predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4)
    return structures


def test_after_a_bad_structure_was_removed_the_rest_goes_on(model, tmp_path, stopped_at_the_last):
    write(tmp_path / "in.traj", stopped_at_the_last[:4])
    assert predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4) == 4


@pytest.mark.parametrize("kept", [slice(1, None), slice(2)])
def test_other_structures_under_the_same_name_are_noticed(model, tmp_path, stopped_at_the_last, kept):
    write(tmp_path / "in.traj", stopped_at_the_last[kept])
    with pytest.raises(ValueError, match="differs from the structure at its position in"):
        predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4)


def moved(atoms):
    atoms.positions[1] += 0.01


def relabelled(atoms):
    atoms.calc = SinglePointCalculator(atoms, energy=-1.5)


def renamed(atoms):
    atoms.info["name"] = "another"


@pytest.mark.parametrize("change", [moved, relabelled, renamed])
@pytest.mark.parametrize("index", [0, 2])
def test_a_change_of_any_finished_structure_is_noticed(model, tmp_path, stopped_at_the_last, change, index):
    change(stopped_at_the_last[index])
    write(tmp_path / "in.traj", stopped_at_the_last)
    with pytest.raises(ValueError, match="differs from the structure at its position in"):
        predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4)
    (tmp_path / "out.extxyz.partial").unlink()  # as the message says
    assert predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4) == 5


def test_what_a_killed_run_had_not_noted_is_predicted_again(model, tmp_path, monkeypatch, stopped_at_the_last):
    """It notes a batch after writing it."""
    write(tmp_path / "in.traj", stopped_at_the_last)
    asked, sample = [], model.sample_with_mean
    monkeypatch.setattr(
        model, "sample_with_mean", lambda some, **options: asked.append(len(some)) or sample(some, **options)
    )
    with (tmp_path / "out.extxyz.partial").open("a") as file:
        file.writelines((tmp_path / "out.extxyz.partial").read_text().splitlines(keepends=True)[:10])
    assert predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4) == 5
    assert asked == [1]
    assert len(read(tmp_path / "out.extxyz", ":")) == 5


def test_what_an_older_version_began_is_not_continued(model, tmp_path, stopped_at_the_last):
    notes = tmp_path / "out.extxyz.partial.json"
    content = json.loads(notes.read_text())
    notes.write_text(json.dumps({name: content[name] for name in ("model", "source", "samples", "seed")}))
    with pytest.raises(
        ValueError, match=r"partial is from an older pmlip and cannot be resumed; remove .*partial.json"
    ):
        predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4)


def test_only_one_process_writes_an_output(model, tmp_path, stopped_at_the_last):
    write(tmp_path / "in.traj", stopped_at_the_last)
    before = (tmp_path / "out.extxyz.partial").read_text()
    with locked_file(tmp_path / "out.extxyz"), pytest.raises(OutputInUseError, match=r"out.extxyz is being written by"):
        predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz", samples=4)
    assert (tmp_path / "out.extxyz.partial").read_text() == before


def test_the_lock_is_held_while_structures_are_predicted(model, tmp_path, monkeypatch):
    write(tmp_path / "in.extxyz", water(1))
    sample = model.sample_with_mean

    def locked(structures, **options):
        with pytest.raises(OutputInUseError), locked_file(tmp_path / "out.extxyz"):
            pass
        return sample(structures, **options)

    monkeypatch.setattr(model, "sample_with_mean", locked)
    assert predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"in.extxyz", "out.extxyz"}


def test_unfinished_predictions_are_no_source_of_their_own_output(model, tmp_path):
    source = tmp_path / "out.extxyz.partial"
    write(source, water(2), format="extxyz")
    before = source.read_text()
    with pytest.raises(ValueError, match=r"is where unfinished predictions for out.extxyz are kept"):
        predict_file(model, source, tmp_path / "out.extxyz", samples=4)
    assert source.read_text() == before


def test_an_at_sign_belongs_to_the_name(model, tmp_path):
    """Also where ASE would read an index after it."""
    for name in ("water@300K", "water@0"):
        write(tmp_path / f"{name}.extxyz", water(3))
        assert predict_file(model, tmp_path / f"{name}.extxyz", tmp_path / f"out-{name}.extxyz", samples=4) == 3


def test_a_full_disk_names_the_file_and_loses_nothing(model, tmp_path, monkeypatch):
    write(tmp_path / "in.extxyz", water(8))

    partial, sync, calls = tmp_path / "out.extxyz.partial", os.fsync, []

    def full(descriptor):
        if partial.exists() and os.fstat(descriptor).st_ino == partial.stat().st_ino:
            calls.append(descriptor)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(prediction.os, "fsync", full)
        with pytest.raises(OSError, match=r"^cannot write .*out.extxyz.partial: No space left on device; free some"):
            predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4)
    assert predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4) == 8


def test_bad_input_names_the_file_and_the_structure(model, tmp_path):
    structures = water(5)
    structures[4].positions[1] = np.nan
    write(tmp_path / "in.traj", structures)
    with pytest.raises(ValueError, match=r"in.traj: structure 4 \(H2O\): a position or a cell vector is NaN"):
        predict_file(model, tmp_path / "in.traj", tmp_path / "out.extxyz")
    with pytest.raises(ValueError, match=r"out must end in .extxyz or .xyz, got out='out.traj'"):
        predict_file(model, tmp_path / "in.traj", tmp_path / "out.traj")
    (tmp_path / "there.extxyz").write_text("something")
    with pytest.raises(ValueError, match="exists already"):
        predict_file(model, tmp_path / "in.traj", tmp_path / "there.extxyz")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        predict_file(model, tmp_path / "none.extxyz", tmp_path / "other.extxyz")
    with pytest.raises(ValueError, match="was never trained"):
        predict_file(pmlip.perturb(tiny_backbone()), tmp_path / "in.traj", tmp_path / "other.extxyz")


def test_counting(tmp_path):
    write(tmp_path / "in.extxyz", water(3))
    np.savez(tmp_path / "in.npz", positions=np.zeros((4, 2, 3)))
    assert count_structures(tmp_path / "in.extxyz") == 3
    assert count_structures(tmp_path / "in.npz") == 4
    assert count_structures(tmp_path / "in.traj") is None


@pytest.mark.parametrize("samples", [0, 3])
def test_a_model_that_knows_its_training_set_predicts_its_novelty(samples, tmp_path):
    data = molecules(40)
    made = randomise_noise(pmlip.perturb(tiny_backbone()))
    made.fit_novelty(data[:20], valid=data[20:])
    write(tmp_path / "in.extxyz", data[:3])
    predict_file(made, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=samples)
    found = made.novelty(data[:3])
    for index, atoms in enumerate(read(tmp_path / "out.extxyz", ":")):
        assert atoms.info["novelty"] == pytest.approx(float(found.structure[index]), rel=1e-6)
        np.testing.assert_allclose(atoms.arrays["atom_novelty"], found.atom[found.system == index], rtol=1e-6)
        if samples == 0:
            np.testing.assert_allclose(atoms.get_forces(), made.predict(data[index]).forces, atol=1e-7)
            np.testing.assert_allclose(
                atoms.arrays["forces_uncertainty"][:, 0], found.sigma[found.system == index], rtol=1e-6
            )


def test_the_first_structure_with_another_composition_is_named(model, tmp_path):
    model.history = History(config={}, compositions=["H2O"])
    other = [Atoms("OH", [[0, 0, 0], [0, 0, 1.0]]) for _ in range(2)]
    write(tmp_path / "in.extxyz", [*water(4), *other])
    with pytest.warns(UserWarning, match=r"structure 4 \(HO\) is no combination") as caught:
        predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=2)
    assert len(caught) == 1


@pytest.fixture
def interrupted(model, tmp_path, monkeypatch):
    """A run that was interrupted after its second batch."""
    write(tmp_path / "in.extxyz", water(8))
    done, sample = [], model.sample_with_mean

    def fails_the_third_time(structures, **options):
        done.append(structures)
        if len(done) == 3:
            raise KeyboardInterrupt
        return sample(structures, **options)

    monkeypatch.setattr(model, "sample_with_mean", fails_the_third_time)
    with pytest.raises(KeyboardInterrupt):
        predict_file(model, tmp_path / "in.extxyz", tmp_path / "out.extxyz", samples=4)
    return tmp_path


@pytest.mark.parametrize("content", ["", '{"model": ', "[1, 2]", "[" * 100_000, "\xff"])
def test_damaged_notes_of_an_interrupted_run_are_one_sentence(model, interrupted, content):
    (interrupted / "out.extxyz.partial.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"out.extxyz.partial.json is damaged: .*; remove it to start again") as found:
        predict_file(model, interrupted / "in.extxyz", interrupted / "out.extxyz", samples=4)
    assert "\n" not in str(found.value)


def test_damaged_predictions_of_an_interrupted_run_are_one_sentence(model, interrupted):
    partial = interrupted / "out.extxyz.partial"
    partial.write_bytes(partial.read_bytes().replace(b"H ", b"? "))
    with pytest.raises(ValueError, match=r"out.extxyz.partial is damaged, or differs .*; remove .* to start again"):
        predict_file(model, interrupted / "in.extxyz", interrupted / "out.extxyz", samples=4)


@pytest.mark.parametrize("first", [b"9" * 30, b"9" * 5000, b"99999999999", b"\xff"])
def test_no_number_of_atoms_is_too_large_to_count(tmp_path, first):
    write(tmp_path / "in.xyz", water(2), format="extxyz")
    whole = (tmp_path / "in.xyz").read_bytes()
    (tmp_path / "in.xyz").write_bytes(whole + first + b"\n\nH 0 0 0\n")
    assert count_structures(tmp_path / "in.xyz") == 2
