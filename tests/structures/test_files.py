import bz2
import gzip
import io
import lzma
import sqlite3
import zipfile

import ase.db
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from pmlip.structures import files
from pmlip.structures.files import iterate, npz_shapes, read_structures
from pmlip.structures.labels import labels


def structures(count=3, *, seed=0):
    """Rattled crystals with labels under ASE's own names."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        atoms = bulk("NaCl", "rocksalt", a=5.6)
        atoms.rattle(0.1, seed=index)
        results = {"energy": -7.0 + random.normal(), "forces": random.normal(size=(2, 3))}
        atoms.calc = SinglePointCalculator(atoms, **results, stress=random.normal(size=6))
        made.append(atoms)
    return made


def renamed(atoms, names):
    """The same with its labels under other names, as fields of the file."""
    moved = atoms.copy()
    for label, name in names.items():
        value = atoms.calc.results[label]
        if label == "forces":
            moved.arrays[name] = value
        else:
            moved.info[name] = value
    return moved


def assert_same_labels(given, expected):
    for name, value in labels(expected).items():
        np.testing.assert_allclose(labels(given)[name], value, atol=1e-7)


@pytest.mark.parametrize("suffix", ["extxyz", "db", "traj"])
def test_labels_survive_the_file(tmp_path, suffix):
    original, path = structures(), tmp_path / f"data.{suffix}"
    if suffix == "db":
        with ase.db.connect(path) as database:
            for atoms in original:
                database.write(atoms)
    else:
        write(path, original)
    read, found = read_structures(path)
    assert_same_labels(read, original)
    assert found.structures == 3
    assert found.elements == {"Na": 3, "Cl": 3}
    assert "3 structures of 2 atoms (Na, Cl); labels: energy ('energy', 3 of 3)" in str(found)


@pytest.mark.parametrize("suffix", ["extxyz", "db", "traj"])
@pytest.mark.parametrize("name", ["data@300K", "data@0"])
def test_an_at_sign_belongs_to_the_name(tmp_path, suffix, name):
    """ASE would read the text after it as an index."""
    original, path = structures(), tmp_path / f"{name}.{suffix}"
    if suffix == "db":
        with ase.db.connect(path) as database:
            for atoms in original:
                database.write(atoms)
    else:
        write(path, original)
    assert read_structures(path)[1].structures == 3


def test_labels_beside_the_results_in_a_database(tmp_path):
    original = structures(2)
    with ase.db.connect(tmp_path / "data.db") as database:
        for atoms in original:
            results = atoms.calc.results
            bare = atoms.copy()
            database.write(bare, REF_energy=results["energy"], data={"REF_forces": results["forces"]})
    read, found = read_structures(tmp_path / "data.db")
    assert found.labels == {"energy": ("REF_energy", 2), "forces": ("REF_forces", 2)}
    np.testing.assert_allclose(read[1].get_forces(), original[1].get_forces())


def test_npz(tmp_path):
    original = structures()
    content = {
        "positions": [atoms.positions for atoms in original],
        "cells": [atoms.cell.array for atoms in original],
        "energies": [atoms.get_potential_energy() for atoms in original],
        "forces": [atoms.get_forces() for atoms in original],
    }
    np.savez(tmp_path / "data.npz", symbols=["Na", "Cl"], **content)
    read, found = read_structures(tmp_path / "data.npz")
    assert set(found.labels) == {"energy", "forces"}
    for given, expected in zip(read, original, strict=True):
        np.testing.assert_allclose(given.get_forces(), expected.get_forces())
        assert given.get_potential_energy() == pytest.approx(expected.get_potential_energy())
        assert given.pbc.all()


def test_npz_with_arrays_of_another_length(tmp_path):
    original = structures()
    content = {"symbols": ["Na", "Cl"], "positions": [atoms.positions for atoms in original]}
    forces = [atoms.get_forces() for atoms in original]
    np.savez(tmp_path / "data.npz", **content, forces=forces, cell=original[0].cell.array)  # one cell for all
    assert all((atoms.cell == original[0].cell).all() for atoms in read_structures(tmp_path / "data.npz")[0])
    np.savez(tmp_path / "data.npz", **content, forces=forces, energies=np.zeros(10))
    with pytest.raises(ValueError, match=r"energy has shape \(10,\), but positions holds 3 structures"):
        read_structures(tmp_path / "data.npz")


def test_npz_with_labels_under_other_names(tmp_path):
    original = structures()
    content = {
        "positions": [atoms.positions for atoms in original],
        "cells": [atoms.cell.array for atoms in original],
        "dft_energy": [atoms.get_potential_energy() for atoms in original],
        "F": [atoms.get_forces() for atoms in original],
        "name": "salt",
    }
    np.savez(tmp_path / "data.npz", symbols=["Na", "Cl"], **content)
    read, found = read_structures(tmp_path / "data.npz", forces_key="F")
    assert found.labels == {"energy": ("dft_energy", len(read)), "forces": ("F", len(read))}
    np.testing.assert_allclose(read[1].get_forces(), original[1].get_forces())
    with pytest.raises(ValueError, match=r"forces_key='f' is not in the file; names in the file: .*dft_energy.*F"):
        read_structures(tmp_path / "data.npz", forces_key="f")


def test_real_zeolites(shared):
    read, found = read_structures(shared / "data" / "zeo22" / "edi.npz")
    assert (len(read), found.atoms, set(found.elements)) == (1609, (15, 15), {"Si", "O"})


@pytest.mark.parametrize(
    "names",
    [
        {"energy": "REF_energy", "forces": "REF_forces", "stress": "REF_stress"},
        {"energy": "dft_energy", "forces": "dft_forces"},
        {"energy": "energy", "forces": "force"},
    ],
)
def test_names_people_use_are_found(tmp_path, names):
    write(tmp_path / "data.extxyz", [renamed(atoms, names) for atoms in structures()])
    read, found = read_structures(tmp_path / "data.extxyz")
    assert {label: name for label, (name, _) in found.labels.items()} == names
    np.testing.assert_allclose(read[1].get_forces(), structures()[1].get_forces(), atol=1e-7)


def test_a_name_of_ones_own(tmp_path):
    names = {"energy": "pbe_e", "forces": "pbe_f"}
    write(tmp_path / "data.extxyz", [renamed(atoms, names) for atoms in structures()])
    read, _ = read_structures(tmp_path / "data.extxyz", energy_key="pbe_e", forces_key="pbe_f")
    assert_energy = [atoms.get_potential_energy() for atoms in read]
    np.testing.assert_allclose(assert_energy, [atoms.get_potential_energy() for atoms in structures()], atol=1e-7)
    with pytest.raises(ValueError, match=r"energy_key='pbe_g' is not in the file; names .*; did you mean 'pbe_"):
        read_structures(tmp_path / "data.extxyz", energy_key="pbe_g")
    with pytest.raises(ValueError, match=r"no energies, forces or stresses were found; names in the file: .*pbe_e"):
        read_structures(tmp_path / "data.extxyz")


def test_reference_labels_win_over_those_another_potential_left(tmp_path):
    atoms = structures(1)[0]
    both = renamed(atoms, {"energy": "REF_energy", "forces": "REF_forces"})
    both.calc = SinglePointCalculator(both, energy=99.0, forces=np.ones((2, 3)))
    write(tmp_path / "data.extxyz", both)
    read, _ = read_structures(tmp_path / "data.extxyz")
    assert read[0].get_potential_energy() == pytest.approx(atoms.get_potential_energy())


def test_a_prediction_is_not_taken_for_a_label_unless_asked_to(tmp_path):
    made = structures(2)
    made[1].info["energy_uncertainty"] = 0.1
    write(tmp_path / "data.extxyz", made)
    with pytest.raises(ValueError, match=r"structure 1 .* 'energy' is probably a prediction; .* energy_key='energy'"):
        read_structures(tmp_path / "data.extxyz")
    keys = {f"{label}_key": label for label in ("energy", "forces", "stress")}
    assert_same_labels(read_structures(tmp_path / "data.extxyz", **keys)[0], made)
    # beside references, what has a plain name is no label
    for atoms in made:
        atoms.info["REF_energy"] = 1.0
    write(tmp_path / "data.extxyz", made)
    assert set(read_structures(tmp_path / "data.extxyz")[1].labels) == {"energy"}


def test_a_virial_becomes_a_stress(tmp_path):
    atoms = structures(1)[0]
    virial = np.array([[1.0, 0.2, 0.3], [0.2, 2.0, 0.4], [0.3, 0.4, 3.0]])
    moved = renamed(atoms, {"energy": "energy", "forces": "forces"})
    moved.info["virial"] = moved.info["vasp_virial"] = virial
    write(tmp_path / "data.extxyz", moved)
    expected = -np.array([1.0, 2.0, 3.0, 0.4, 0.3, 0.2]) / atoms.get_volume()
    for key in (None, "vasp_virial"):
        read, _ = read_structures(tmp_path / "data.extxyz", stress_key=key)
        np.testing.assert_allclose(read[0].get_stress(), expected)


def test_a_second_name_for_the_same_label_is_not_overlooked(tmp_path):
    """A file put together from two: without a word, the labels of one of them would be lost."""
    first, second = structures(2)
    mixed = [renamed(first, {"energy": "REF_energy", "forces": "REF_forces"}), second]
    write(tmp_path / "data.extxyz", mixed)
    with pytest.raises(
        ValueError, match=r"structure 1 \(ClNa\): its energy is named 'energy', but in other structures 'REF_e"
    ):
        read_structures(tmp_path / "data.extxyz")
    read, found = read_structures(tmp_path / "data.extxyz", energy_key="energy", forces_key="forces")
    assert found.labels["energy"] == ("energy", 1)
    assert len(read) == 2
    virial = renamed(first, {"energy": "energy", "forces": "forces"})
    virial.info["virial"] = np.eye(3)
    write(tmp_path / "data.extxyz", [second, virial])
    with pytest.raises(
        ValueError, match=r"structure 1 \(ClNa\): its stress is named 'virial', but in other structures 'stress'"
    ):
        read_structures(tmp_path / "data.extxyz")


def bad(problem):
    atoms = structures(1)[0]
    good = structures(1)[0]
    if problem == "nan":
        atoms.calc.results["forces"][0, 0] = np.nan
    else:
        atoms = renamed(atoms, {"forces": "forces"})
        atoms.info["energy"] = "low"
        good = renamed(good, {"forces": "forces", "energy": "energy"})
    return [good, atoms]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("nan", r"data.extxyz: structure 1 \(ClNa\): its label 'forces' is NaN or infinite"),
        ("word", r"data.extxyz: structure 1 \(ClNa\): its 'energy' is 'low', which is not numeric"),
    ],
)
def test_bad_labels_name_the_file_and_the_structure(tmp_path, problem, message):
    write(tmp_path / "data.extxyz", bad(problem))
    with pytest.raises(ValueError, match=message):
        read_structures(tmp_path / "data.extxyz")


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_structures(tmp_path / "none.extxyz")
    (tmp_path / "empty.extxyz").touch()
    with pytest.raises(ValueError, match=r"empty\.extxyz is empty"):
        read_structures(tmp_path / "empty.extxyz")
    (tmp_path / "text.extxyz").write_text("no structures here\n")
    with pytest.raises(ValueError, match=r"text\.extxyz: "):
        read_structures(tmp_path / "text.extxyz")
    np.savez(tmp_path / "other.npz", coordinates=np.zeros((2, 3, 3)), z=[1, 1, 8])
    with pytest.raises(
        ValueError, match=r"other.npz: it cannot be read: .* must hold positions .*; it holds coordinates, z"
    ):
        read_structures(tmp_path / "other.npz")
    write(tmp_path / "bare.extxyz", Atoms("H2", [[0, 0, 0], [0, 0, 0.7]]))
    with pytest.raises(ValueError, match="no energies, forces or stresses were found"):
        read_structures(tmp_path / "bare.extxyz")


@pytest.mark.parametrize(
    "names",
    [
        {"positions": "R", "numbers": "z", "energy": "E", "forces": "F"},
        {"positions": "coords", "numbers": "nuclear_charges", "energy": "energies", "forces": "forces"},
    ],
)
def test_npz_of_sgdml_and_rmd17(tmp_path, names):
    random = np.random.default_rng(0)
    content = {"positions": random.normal(size=(2, 3, 3)), "numbers": np.array([8, 1, 1])}
    content |= {"energy": np.array([[-1.0], [-2.0]]), "forces": random.normal(size=(2, 3, 3))}
    np.savez(tmp_path / "water.npz", theory="PBE", **{names[name]: value for name, value in content.items()})
    read, found = read_structures(tmp_path / "water.npz")
    assert [atoms.get_potential_energy() for atoms in read] == [-1.0, -2.0]
    np.testing.assert_allclose(read[1].get_forces(), content["forces"][1])
    assert found.elements == {"O": 2, "H": 4}


def test_names_of_labels_are_found_without_regard_to_case(tmp_path):
    lines = ["1", 'Properties=species:S:1:pos:R:3:Force:R:3 Energy=-1 Virial="1 0 0 0 1 0 0 0 1" vdW_energy=-2']
    lines += ["H 0 0 0 1 2 3"]
    lines[1] = 'Lattice="2 0 0 0 2 0 0 0 2" ' + lines[1]
    (tmp_path / "data.extxyz").write_text("\n".join(lines))
    read, found = read_structures(tmp_path / "data.extxyz")
    assert found.labels == {"energy": ("Energy", 1), "forces": ("Force", 1), "stress": ("Virial", 1)}
    assert read[0].get_forces()[0].tolist() == [1, 2, 3]
    assert read[0].get_stress()[0] == pytest.approx(-1 / 8)
    assert found.unused == ("vdW_energy",)
    assert "not used: 'vdW_energy'" in str(found)


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files(tmp_path, suffix):
    original = structures()
    write(tmp_path / "data.extxyz", original)
    packed = tmp_path / f"data.extxyz.{suffix}"
    packed.write_bytes(COMPRESS[suffix]((tmp_path / "data.extxyz").read_bytes()))
    assert_same_labels(read_structures(packed)[0], original)


@pytest.mark.parametrize("suffix", ["extxyz", "traj", "db", "npz", *(f"extxyz.{name}" for name in COMPRESS)])
def test_truncated_files_and_garbage_are_one_sentence(tmp_path, suffix):
    file = tmp_path / f"data.{suffix}"
    if suffix == "db":
        with ase.db.connect(file) as database:
            database.write(structures(1)[0])
    elif suffix == "npz":
        np.savez(file, symbols=["Na", "Cl"], positions=[atoms.positions for atoms in structures()])
    else:
        write(file, structures())
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    for content in (whole[: len(whole) // 2], random.bytes(300), bytes(300)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{file}: ") as found:
            list(iterate(file))
        assert "\n" not in str(found.value)
        assert len(str(found.value)) < 500
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_expands_without_end_is_refused(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(files, "ALWAYS_ALLOWED", 2**20)
    file = tmp_path / f"data.extxyz.{suffix}"
    file.write_bytes(COMPRESS[suffix](b"1" * 2**24))
    with pytest.raises(ValueError, match=r"it expands to more than 1 MB, 100 times its size; .*, decompress it"):
        list(iterate(file))


def test_an_npz_file_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ALWAYS_ALLOWED", 2**20)
    np.savez_compressed(tmp_path / "data.npz", symbols=["H"], positions=np.zeros((10**6, 1, 3)))
    with pytest.raises(ValueError, match=r"it expands to more than 2 MB, 100 times its size"):
        list(iterate(tmp_path / "data.npz"))


def test_the_size_in_the_header_of_an_array_is_not_believed(tmp_path):
    """numpy would allocate it, and read what there is."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"shape": (10**12, 2, 3), "fortran_order": False, "descr": np.dtype(float).str}
    )
    np.savez(tmp_path / "data.npz", symbols=["H", "H"])
    with zipfile.ZipFile(tmp_path / "data.npz", "a") as archive:
        archive.writestr("positions.npy", stream.getvalue() + bytes(48))
    with pytest.raises(
        ValueError, match=r"its array 'positions' has 48 bytes, too few or too many for shape \(1000000"
    ):
        list(iterate(tmp_path / "data.npz"))


def test_the_advice_of_numpy_to_load_unsafely_reaches_nobody(tmp_path):
    np.savez(tmp_path / "data.npz", positions=np.array([None, 1]), symbols=["H"])
    with pytest.raises(ValueError, match="its array 'positions' holds Python objects; store numbers or strings"):
        list(iterate(tmp_path / "data.npz"))
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, np.array([None, 1]))
    with pytest.raises(ValueError, match="it cannot be read: File is not a zip file"):
        list(iterate(tmp_path / "data.npz"))


def test_the_shapes_of_arrays_are_known_without_reading_them(tmp_path):
    np.savez(tmp_path / "data.npz", positions=np.zeros((4, 2, 3)), energy=np.zeros(4), names=["a"])
    assert npz_shapes(tmp_path / "data.npz") == {"positions": (4, 2, 3), "energy": (4,), "names": (1,)}


@pytest.mark.parametrize("count", ["4", "999999999999", "9" * 30])
def test_a_frame_with_fewer_atoms_than_it_says(tmp_path, count):
    """Without going through the lines it lacks."""
    (tmp_path / "data.extxyz").write_text(f"{count}\n\nH 0 0 0\nH 0 0 1\n")
    with pytest.raises(ValueError, match=r"data\.extxyz: it cannot be read: .*"):
        list(iterate(tmp_path / "data.extxyz"))


@pytest.mark.parametrize("columns", ["99999999999", "10000", "+0099999999999", "1_000_000_000_000"])
def test_columns_without_end_are_refused(tmp_path, columns):
    """ASE makes a list of them before it reads a line."""
    (tmp_path / "data.extxyz").write_text(f"1\nProperties=species:S:1:pos:R:{columns} pbc=F\nH 0 0 0\n")
    with pytest.raises(ValueError, match="the Properties of a frame name an array with 10000 columns or more"):
        list(iterate(tmp_path / "data.extxyz"))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("suffix", ["extxyz", "extxyz.gz", "cif"])
def test_a_byte_order_mark_is_named(tmp_path, encoding, suffix):
    content = "1\n\nH 0 0 0\n".encode(encoding)
    (tmp_path / f"data.{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(ValueError, match="it begins with a byte order mark; save it as UTF-8 without one"):
        list(iterate(tmp_path / f"data.{suffix}"))


def test_a_database_of_something_else_is_not_changed(tmp_path):
    """ASE adds its tables to a database that it reads."""
    connection = sqlite3.connect(tmp_path / "data.db")
    connection.execute("CREATE TABLE orders (number INTEGER)")
    connection.commit()
    connection.close()
    before = (tmp_path / "data.db").read_bytes()
    with pytest.raises(ValueError, match="it is a database, but not one of ASE"):
        list(iterate(tmp_path / "data.db"))
    assert (tmp_path / "data.db").read_bytes() == before


@pytest.mark.parametrize(
    ("comment", "name"),
    [
        ("Properties=species:S:1:pos:R:3 energy=-1 energy=-2", "energy"),
        ("Properties=species:S:1:pos:R:3:forces:R:3:forces:R:3", "forces"),
    ],
)
def test_a_name_given_twice_is_refused(tmp_path, comment, name):
    (tmp_path / "data.extxyz").write_text(f"1\n{comment}\nH 0 0 0 1 2 3 4 5 6\n")
    with pytest.raises(ValueError, match=f"a frame names '{name}' twice; rename or remove one of them"):
        list(iterate(tmp_path / "data.extxyz"))


def test_equal_signs_in_quotes_are_no_names(tmp_path):
    comment = 'Properties=species:S:1:pos:R:3 note="energy=1 energy=2" energy=-1'
    (tmp_path / "data.extxyz").write_text(f"1\n{comment}\nH 0 0 0\n")
    (atoms,) = iterate(tmp_path / "data.extxyz")
    assert atoms.info["note"] == "energy=1 energy=2"
