from importlib import resources

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from ase.units import GPa

from pmlip import datasets
from pmlip.structures.labels import labels
from silica_files import in_kcal, silica


def test_tan_silica_is_converted_to_electronvolts(tmp_path):
    original = silica()
    write(tmp_path / "train.xyz", in_kcal(original), format="extxyz")
    for read in (
        datasets.tan_silica(tmp_path / "train.xyz"),
        datasets.read_set(f"tan_silica:{tmp_path / 'train.xyz'}"),
    ):
        np.testing.assert_allclose(labels(read).energy, labels(original).energy, rtol=1e-9)
        np.testing.assert_allclose(labels(read).forces, labels(original).forces, atol=1e-7)


def test_one_electronvolt_is_23_kilocalories_per_mole(tmp_path):
    """In numbers of its own, so that no error can cancel: of energies and of forces."""
    (atoms,) = silica()[:1]
    per_atom = atoms.get_potential_energy() / len(atoms)
    forces = np.full((6, 3), 23.060548)
    other = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True)
    other.calc = SinglePointCalculator(other, energy=23.060548 * 6 * per_atom, forces=forces)
    write(tmp_path / "train.xyz", other, format="extxyz")
    (read,) = datasets.tan_silica(tmp_path / "train.xyz")
    assert read.get_potential_energy() == pytest.approx(6 * per_atom, rel=1e-6)
    np.testing.assert_allclose(read.get_forces(), 1.0, rtol=1e-6)


def test_zeo22_is_read_from_its_npz(tmp_path):
    original = silica()
    np.savez(
        tmp_path / "edi.npz",
        energies=labels(original).energy.numpy().astype(np.float32),
        forces=labels(original).forces.reshape(5, 6, 3).numpy(),
        positions=np.stack([atoms.positions for atoms in original]),
        cells=np.stack([atoms.cell.array for atoms in original]),
        symbols=np.array(original[0].get_chemical_symbols()),
    )
    read = datasets.zeo22(tmp_path / "edi.npz")
    np.testing.assert_allclose(labels(read).energy, labels(original).energy, rtol=1e-6)
    assert all(atoms.pbc.all() for atoms in read)


def test_another_unit_is_noticed(tmp_path):
    write(tmp_path / "electronvolts.xyz", silica(), format="extxyz")
    with pytest.raises(ValueError, match=r"energies are -7\.\d+ per atom, but in kcal/mol they would lie between -300"):
        datasets.tan_silica(tmp_path / "electronvolts.xyz")
    write(tmp_path / "kcal.xyz", in_kcal(silica()), format="extxyz")
    with pytest.raises(ValueError, match=r"energies are -1\d\d\.?\d* per atom, but in eV"):
        datasets.zeo22(tmp_path / "kcal.xyz")


def test_other_matter_missing_labels_and_wrong_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown data set 'tan'; allowed before the colon: tan_silica, zeo22"):
        datasets.read_set("tan:file.xyz")
    with pytest.raises(FileNotFoundError, match=r"there is no file none\.xyz"):
        datasets.read_set("tan_silica:none.xyz")
    salt = silica(2)
    salt[1].symbols[0] = "Na"
    write(tmp_path / "salt.xyz", in_kcal(salt), format="extxyz")
    with pytest.raises(ValueError, match=r"structure 1 is NaO4Si, not silica"):
        datasets.tan_silica(tmp_path / "salt.xyz")
    bare = in_kcal(silica(2))
    del bare[1].calc.results["forces"]
    write(tmp_path / "bare.xyz", bare, format="extxyz")
    with pytest.raises(ValueError, match=r"structure 1 .*it has no forces"):
        datasets.tan_silica(tmp_path / "bare.xyz")


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match=r"has no part 'trian'; allowed: train, .*did you mean 'train'"):
        datasets.silica_pbe("trian")


def test_the_shipped_set_is_labelled_and_split():
    sizes = {part: len(datasets.silica_pbe(part)) for part in datasets.SILICA_PBE_PARTS}
    assert sizes == {"train": 160, "valid": 32, "test": 48, "hot": 24, "strained": 24, "polymorph": 24, "eos": 7}
    everything = [atoms for part in datasets.SILICA_PBE_PARTS for atoms in datasets.silica_pbe(part)]
    assert len({atoms.info["id"] for atoms in everything}) == len(everything)
    found = labels(everything)
    assert all(bool(value.isfinite().all()) for value in found.values())
    for atoms in everything:
        assert np.abs(atoms.get_forces().sum(0)).max() < 0.02  # eV/Å, no net force but for the grid of the plane waves
        described = {"polymorph", "made", "strain", "cutoff_Ry", "kpoints", "scf_threshold_Ry", "scf_iterations"}
        assert described <= atoms.info.keys()
    file = resources.files("pmlip") / "data" / "silica_pbe.extxyz.xz"
    assert len(file.read_bytes()) < 1e6


def test_the_parts_of_the_shipped_set_are_what_they_are_called():
    of = {part: [atoms.info for atoms in datasets.silica_pbe(part)] for part in datasets.SILICA_PBE_PARTS}
    for part in ("train", "valid", "test"):
        assert {info["polymorph"] for info in of[part]} == {"quartz", "cristobalite"}
        assert max(info.get("temperature", 0) for info in of[part]) <= 900
    assert min(info["temperature"] for info in of["hot"]) >= 1500
    assert {info["polymorph"] for info in of["polymorph"]} == {"stishovite", "coesite"}
    assert max(abs(info["strain"]) for info in of["strained"]) > 0.08
    forces = {part: float(labels(datasets.silica_pbe(part)).forces.square().mean()) for part in ("test", "hot")}
    assert forces["hot"] > 1.2 * forces["test"]


def test_the_stress_of_the_shipped_set_is_the_derivative_of_its_energy():
    eos = sorted(datasets.silica_pbe("eos"), key=lambda atoms: atoms.info["strain"])
    energies, volumes = (
        [function(atoms) for atoms in eos] for function in (Atoms.get_potential_energy, Atoms.get_volume)
    )
    derivative = np.gradient(np.array(energies), np.array(volumes), edge_order=2)
    pressure = np.array([-atoms.get_stress()[:3].mean() for atoms in eos])
    # finite differences, and plane waves that change with the cell: 2 GPa in a range of 12
    np.testing.assert_allclose(pressure[1:-1], -derivative[1:-1], atol=2 * GPa)
