"""Make the silica set that ships with pmlip: SiO2 structures with PBE labels from Quantum ESPRESSO.

    apt-get install quantum-espresso libopenblas0-serial         # pw.x 6.7; the reference BLAS is half as fast
    pip download --no-deps --no-binary :all: upf_tools==0.0.1    # tests/sssp has the SSSP pseudopotentials
    tar xzf upf_tools-0.0.1.tar.gz
    python make.py converge --pseudo upf_tools-0.0.1/tests/sssp --out convergence
    python make.py draw structures.extxyz                        # or use the stored file: xz -dk structures.extxyz.xz
    python make.py label structures.extxyz --pseudo upf_tools-0.0.1/tests/sssp --labels labels --jobs 2
    python make.py collect structures.extxyz --labels labels --out ../../src/pmlip/data/silica_pbe.extxyz.xz
    python make.py restore ../../src/pmlip/data/silica_pbe.extxyz.xz --labels labels     # to extend a collected set

Each finished label has its own file, so each step can be interrupted and resumed. README.md describes the set.
"""

import argparse
import json
import lzma
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.io import read, write
from ase.io.espresso import read_espresso_out, write_espresso_in
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from ase.spacegroup import crystal

PSEUDOPOTENTIALS = {"Si": "Si.pbe-n-rrkjus_psl.1.0.0.UPF", "O": "O.pbe-n-kjpaw_psl.0.1.UPF"}


@dataclass(frozen=True)
class Accuracy:
    cutoff: float = 50.0  # Ry, for wave functions; the density cutoff is 8 times larger
    kpoints: tuple[int, int, int] = (2, 2, 2)  # shifted by half a step, so that symmetry removes half of the points
    threshold: float = 1e-9  # Ry; the SCF cycle stops at this estimated energy error


SPLIT = {"train": 160, "valid": 32, "test": 48}  # in-distribution structures
KPOINTS = {"quartz": (2, 2, 2), "cristobalite": (2, 2, 2), "stishovite": (3, 3, 4), "coesite": (2, 2, 2)}


def polymorph(name: str) -> Atoms:
    """The primitive cell of a polymorph with experimental lattice constants."""
    sites, group, cell = {
        "quartz": ([(0.4697, 0, 1 / 3), (0.4135, 0.2669, 0.2145)], 152, [4.913, 4.913, 5.405, 90, 90, 120]),
        "cristobalite": ([(0.3003, 0.3003, 0), (0.2392, 0.1044, 0.1787)], 92, [4.972, 4.972, 6.922, 90, 90, 90]),
        "stishovite": ([(0, 0, 0), (0.3062, 0.3062, 0)], 136, [4.178, 4.178, 2.666, 90, 90, 90]),
        "coesite": (
            [
                *((0.1403, 0.1083, 0.0723), (0.5068, 0.1580, 0.5408)),
                *((0, 0, 0), (0.5, 0.1163, 0.75), (0.2660, 0.1232, 0.9401), (0.3114, 0.1038, 0.3280)),
                (0.0175, 0.2117, 0.4784),
            ],
            15,
            [7.1356, 12.3692, 7.1736, 90, 120.34, 90],
        ),
    }[name]
    silicon = 2 if name == "coesite" else 1
    symbols = ["Si"] * silicon + ["O"] * (len(sites) - silicon)
    made = crystal(symbols, sites, spacegroup=group, cellpar=cell, primitive_cell=True)
    return Atoms(made.symbols, made.positions, cell=made.cell, pbc=True)


# ----------------------------------------------------------------------------------------------------- structures


def draw() -> Iterator[Atoms]:
    """All structures of the set without labels; `info` says which part a structure belongs to and how it was made."""
    index = Counter[str]()

    def named(atoms: Atoms, part: str, name: str, how: str, **more: float) -> Atoms:
        atoms.info = {"id": f"{part}-{index[part]:03d}", "part": part, "polymorph": name, "made": how, **more}
        index[part] += 1
        return atoms

    for name in ("quartz", "cristobalite"):
        for number in range(40):
            random = np.random.default_rng([1, number, len(name)])
            size = round(float(random.uniform(0.02, 0.08)), 4)
            strain = _random_strain(random, 0.02)
            atoms = _displaced(_strained(polymorph(name), strain), size, random)
            yield named(atoms, "inside", name, "displacements", displacement=size, strain=_size(strain))
        for number, temperature in enumerate((300, 450, 600, 750, 900)):
            random = np.random.default_rng([2, number, len(name)])
            strain = _random_strain(random, 0.02)
            for atoms in _md(_strained(polymorph(name), strain), temperature, count=16, random=random):
                yield named(atoms, "inside", name, "md", temperature=temperature, strain=_size(strain))
        for number, temperature in enumerate((1500, 2200, 3000)):
            random = np.random.default_rng([3, number, len(name)])
            for atoms in _md(polymorph(name), temperature, count=4, random=random):
                yield named(atoms, "hot", name, "md", temperature=temperature, strain=0.0)
        for number in range(12):
            random = np.random.default_rng([4, number, len(name)])
            strain = _random_strain(random, 0.02) + np.eye(3) * np.linspace(-0.08, 0.08, 12)[number]
            atoms = _displaced(_strained(polymorph(name), strain), 0.03, random)
            yield named(atoms, "strained", name, "strain", displacement=0.03, strain=_size(strain))
    for strain in np.linspace(-0.03, 0.03, 7):
        atoms = _strained(polymorph("quartz"), strain * np.eye(3))
        yield named(atoms, "eos", "quartz", "volume", strain=round(float(strain), 4))
    for name, count in (("stishovite", 18), ("coesite", 6)):
        for number in range(count):
            random = np.random.default_rng([5, number, len(name)])
            size = round(float(random.uniform(0.02, 0.08)), 4)
            strain = _random_strain(random, 0.02)
            atoms = _displaced(_strained(polymorph(name), strain), size, random)
            yield named(atoms, "polymorph", name, "displacements", displacement=size, strain=_size(strain))


def _random_strain(random: np.random.Generator, largest: float) -> np.ndarray:
    strain = random.uniform(-largest, largest, (3, 3))
    return (strain + strain.T) / 2


def _size(strain: np.ndarray) -> float:
    """The principal strain of largest magnitude, with its sign."""
    principal = np.linalg.eigvalsh(strain)
    return round(float(principal[np.abs(principal).argmax()]), 4)


def _strained(atoms: Atoms, strain: np.ndarray) -> Atoms:
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    return atoms


def _displaced(atoms: Atoms, size: float, random: np.random.Generator) -> Atoms:
    """Add Gaussian noise with standard deviation `size` (Å) to every coordinate."""
    atoms.positions += random.normal(scale=size, size=atoms.positions.shape)
    return atoms


def _md(atoms: Atoms, temperature: float, *, count: int, random: np.random.Generator) -> Iterator[Atoms]:
    """Snapshots of constant-volume MD with CHGNet, every 0.15 ps after the first 0.3 ps."""
    from chgnet.model.dynamics import CHGNetCalculator

    atoms = atoms.copy()
    atoms.calc = CHGNetCalculator(use_device="cpu")
    thermalize_momenta(atoms, temperature_K=temperature, rng=random)
    motion = Langevin(atoms, 2 * units.fs, temperature_K=temperature, friction=0.02 / units.fs, rng=random)
    motion.run(150)
    for _ in range(count):
        motion.run(75)
        yield Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True)


# --------------------------------------------------------------------------------------------------------- labels


class LabelError(RuntimeError):
    """A DFT calculation failed; the second argument is its output."""


def label(atoms: Atoms, pseudo: Path, accuracy: Accuracy) -> Atoms:
    """The structure with PBE energy, forces and stress, computed on one core."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with (directory / "pw.in").open("w") as file:
            write_espresso_in(
                file,
                atoms,
                input_data={
                    "control": {
                        "tprnfor": True,
                        "tstress": True,
                        "disk_io": "none",
                        "outdir": ".",
                        "pseudo_dir": str(pseudo.resolve()),
                    },
                    "system": {"ecutwfc": accuracy.cutoff, "ecutrho": 8 * accuracy.cutoff, "occupations": "fixed"},
                    "electrons": {"conv_thr": accuracy.threshold, "mixing_beta": 0.5},
                },
                pseudopotentials=PSEUDOPOTENTIALS,
                kpts=accuracy.kpoints,
                koffset=(1, 1, 1),
            )
        output = directory / "pw.out"
        with output.open("w") as file:
            ended = subprocess.run(
                ["pw.x", "-in", "pw.in"],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=directory,
                check=False,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        text = output.read_text()
        if ended.returncode or "convergence has been achieved" not in text:
            raise LabelError(f"{atoms.info.get('id')}: pw.x failed or its SCF cycle did not converge", text)
        with output.open() as file:
            labelled: Atoms = list(read_espresso_out(file, index=slice(None)))[-1]
    labelled.info = atoms.info | {
        "cutoff_Ry": accuracy.cutoff,
        "kpoints": "x".join(map(str, accuracy.kpoints)),
        "scf_threshold_Ry": accuracy.threshold,
        "scf_iterations": text.count("iteration #"),
    }
    # keep the original geometry: pw.x prints it with fewer digits
    labelled.set_cell(atoms.cell)
    labelled.positions = atoms.positions
    labelled.calc.atoms = labelled.copy()
    return labelled


def label_all(structures: list[Atoms], pseudo: Path, labels: Path, *, jobs: int) -> None:
    """Label all structures without a label file, `jobs` at a time.

    The order is random, so that an incomplete set is a small version of the whole. If a calculation fails, its output
    is saved next to the labels and the others continue.
    """
    labels.mkdir(parents=True, exist_ok=True)
    mixed = [structures[i] for i in np.random.default_rng(0).permutation(len(structures))]

    failed = []

    def work(atoms: Atoms) -> None:
        file = labels / f"{atoms.info['id']}.extxyz"
        if file.exists():
            return
        try:
            done = label(atoms, pseudo, Accuracy(kpoints=KPOINTS[atoms.info["polymorph"]]))
        except LabelError as error:
            message, text = error.args
            file.with_suffix(".failed").write_text(text)
            failed.append(message)
            print(message, flush=True)
            return
        partial = file.with_suffix(".partial")
        write(partial, done, format="extxyz")
        partial.rename(file)
        print(file, f"{done.get_potential_energy() / len(done):.4f} eV/atom", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, mixed))
    if failed:
        raise SystemExit(f"{len(failed)} labels failed; the output of pw.x is in {labels}/*.failed")


def collect(structures: list[Atoms], labels: Path, out: Path) -> None:
    """Write all finished labels to one compressed file; split the in-distribution structures at random."""
    inside = [atoms.info["id"] for atoms in structures if atoms.info["part"] == "inside"]
    order = [inside[i] for i in np.random.default_rng(0).permutation(len(inside))]
    parts = [name for name, count in SPLIT.items() for _ in range(count)]
    split = dict(zip(order, parts, strict=True))
    ids = order + [atoms.info["id"] for atoms in structures if atoms.info["part"] != "inside"]
    found = [read(labels / f"{id}.extxyz") for id in ids if (labels / f"{id}.extxyz").exists()]
    for atoms in found:
        atoms.info["part"] = split.get(atoms.info["id"], atoms.info["part"])
        atoms.calc.results.pop("free_energy", None)  # equal to the energy: bands are full or empty
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "silica.extxyz"
        write(plain, found, format="extxyz")
        out.write_bytes(lzma.compress(plain.read_bytes(), preset=9))
    print(f"{len(found)} of {len(structures)} structures -> {out}, {out.stat().st_size / 1e3:.0f} kB")
    print(dict(Counter(atoms.info["part"] for atoms in found)))


def restore(collected: list[Atoms], labels: Path) -> None:
    """Write the label files of a collected set, so that only missing labels are computed."""
    labels.mkdir(parents=True, exist_ok=True)
    for atoms in collected:
        write(labels / f"{atoms.info['id']}.extxyz", atoms, format="extxyz")


# ---------------------------------------------------------------------------------------------------- convergence


def converge(pseudo: Path, out: Path) -> None:
    """Write the errors of forces, stress and energy differences against finer calculations, on distorted polymorphs.

    Cutoffs are compared at the coarsest k-point grid, and grids at the smallest cutoff, assuming that both errors add.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, used in KPOINTS.items():
        if name == "coesite":
            continue  # bonds as in quartz, at a much higher cost
        coarse, finer = (1, 1, 1) if name != "stishovite" else (2, 2, 2), tuple(k + 1 for k in used)
        cutoffs = [Accuracy(cutoff, coarse) for cutoff in (90.0, 60.0, 50.0, 40.0)]
        grids = [Accuracy(40.0, kpoints) for kpoints in (finer, used)]
        pair = [_displaced(polymorph(name), size, np.random.default_rng([6, len(name)])) for size in (0.03, 0.06)]
        for best, *others in (cutoffs, grids):
            reference = [_kept(atoms, pseudo, best, out, f"{name}-{i}") for i, atoms in enumerate(pair)]
            for accuracy in others:
                found = [_kept(atoms, pseudo, accuracy, out, f"{name}-{i}") for i, atoms in enumerate(pair)]
                row = {"polymorph": name, **asdict(accuracy), "against": asdict(best)} | _distance(found, reference)
                rows.append(row)
                print(row, flush=True)
    (out / "convergence.json").write_text(json.dumps(rows, indent=1) + "\n")


def _kept(atoms: Atoms, pseudo: Path, accuracy: Accuracy, out: Path, name: str) -> Atoms:
    """The labelled structure, read from its file if that exists."""
    file = out / f"{name}-{accuracy.cutoff:.0f}-{'x'.join(map(str, accuracy.kpoints))}.extxyz"
    if not file.exists():
        write(file, label(atoms, pseudo, accuracy), format="extxyz")
    found: Atoms = read(file)
    return found


def _distance(given: list[Atoms], best: list[Atoms]) -> dict[str, float]:
    forces = [a.get_forces() - b.get_forces() for a, b in zip(given, best, strict=True)]
    stress = [a.get_stress() - b.get_stress() for a, b in zip(given, best, strict=True)]
    energy = [a.get_potential_energy() - b.get_potential_energy() for a, b in zip(given, best, strict=True)]
    return {
        "force_meV_per_A": round(1e3 * float(np.sqrt(np.mean(np.square(forces)))), 2),
        "stress_kbar": round(float(np.abs(stress).max()) / (0.1 * units.GPa), 2),
        "energy_difference_meV_per_atom": round(1e3 * abs(energy[1] - energy[0]) / len(best[0]), 3),
    }


# ------------------------------------------------------------------------------------------------------- commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    steps = {name: commands.add_parser(name) for name in ("converge", "draw", "label", "collect", "restore")}
    for name in ("draw", "label", "collect", "restore"):
        steps[name].add_argument("structures", type=Path, help="file with structures")
    for name in ("converge", "label"):
        steps[name].add_argument("--pseudo", type=Path, required=True, help="folder with the SSSP pseudopotentials")
    for name in ("label", "collect", "restore"):
        steps[name].add_argument("--labels", type=Path, required=True, help="folder with one file per finished label")
    for name in ("converge", "collect"):
        steps[name].add_argument("--out", type=Path, required=True, help="output file or folder")
    steps["label"].add_argument("--jobs", type=int, default=1, help="calculations at the same time, one core each")
    given = parser.parse_args()
    if given.command == "converge":
        converge(given.pseudo, given.out)
    elif given.command == "draw":
        write(given.structures, list(draw()), format="extxyz")
    elif given.command == "label":
        label_all(read(given.structures, ":"), given.pseudo, given.labels, jobs=given.jobs)
    elif given.command == "restore":
        restore(read(given.structures, ":"), given.labels)
    else:
        collect(read(given.structures, ":"), given.labels, given.out)


if __name__ == "__main__":
    main()
