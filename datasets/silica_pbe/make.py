"""Make the quartz set that the demo uses: distorted alpha-quartz labelled with PBE by Quantum ESPRESSO.

    apt-get install quantum-espresso                             # pw.x, version 6.7
    pip download --no-deps --no-binary :all: upf_tools==0.0.1    # tests/sssp holds the SSSP pseudopotentials
    tar xzf upf_tools-0.0.1.tar.gz
    python make.py --pseudo upf_tools-0.0.1/tests/sssp --labels labels
    python make.py --labels labels --collect ../../src/pmlip/data/quartz_pbe.extxyz

PBE, 50 Ry (400 Ry for the density), 2 x 2 x 2 k-points; how far that is from convergence has not been measured yet.
There is one file per finished label, so it can be stopped and started again. A label takes about 70 s on one core.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.calculators.espresso import Espresso, EspressoProfile
from ase.io import read, write
from ase.spacegroup import crystal

PSEUDOPOTENTIALS = {"Si": "Si.pbe-n-rrkjus_psl.1.0.0.UPF", "O": "O.pbe-n-kjpaw_psl.0.1.UPF"}
CUTOFF = 50.0  # Ry, wave functions; eight times that for the density
KPOINTS = (2, 2, 2)
COUNT = 56
STRONG = 0.08  # Å: structures with larger random displacements are the out-of-distribution test


def structures() -> list[Atoms]:
    """Alpha-quartz with random strains to 2 % and random displacements of 0.02 to 0.12 Å in each direction."""
    quartz = crystal(
        ["Si", "O"],
        [(0.4697, 0, 1 / 3), (0.4135, 0.2669, 0.2145)],
        spacegroup=152,
        cellpar=[4.913, 4.913, 5.405, 90, 90, 120],
    )
    made = []
    for index in range(COUNT):
        random = np.random.default_rng([0, index])
        strain = random.uniform(-1, 1, (3, 3)) * 0.02
        rattle = random.uniform(0.02, 0.12)
        atoms = Atoms(quartz.symbols, quartz.positions, cell=quartz.cell, pbc=True)
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
        atoms.positions += random.normal(scale=rattle, size=atoms.positions.shape)
        atoms.info |= {"kind": "strong" if rattle > STRONG else "mild", "rattle": round(float(rattle), 4)}
        made.append(atoms)
    return made


def label(atoms: Atoms, pseudo: Path) -> Atoms:
    """Energy, forces and stress of one structure with PBE."""
    with tempfile.TemporaryDirectory() as folder:
        atoms.calc = Espresso(
            profile=EspressoProfile(command="pw.x", pseudo_dir=pseudo.resolve()),
            directory=folder,
            pseudopotentials=PSEUDOPOTENTIALS,
            kpts=KPOINTS,
            input_data={
                "control": {"tprnfor": True, "tstress": True},
                "system": {"ecutwfc": CUTOFF, "ecutrho": 8 * CUTOFF, "occupations": "fixed"},
                "electrons": {"conv_thr": 1e-9},
            },
        )
        atoms.get_potential_energy()
        atoms.get_stress()
    return atoms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pseudo", type=Path, help="folder of the SSSP pseudopotentials")
    parser.add_argument("--labels", type=Path, required=True, help="folder with one file per finished label")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th structure from the I-th, for N jobs at once")
    parser.add_argument("--collect", type=Path, help="write the finished labels into this one file")
    arguments = parser.parse_args()
    if arguments.collect:
        files = sorted(arguments.labels.glob("*.extxyz"))
        write(arguments.collect, [read(file) for file in files], format="extxyz")
        print(f"{len(files)} of {COUNT} structures -> {arguments.collect}")
        return
    arguments.labels.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    first, jobs = map(int, arguments.part.split("/"))
    for index, atoms in list(enumerate(structures()))[first::jobs]:
        file = arguments.labels / f"{index:03d}.extxyz"
        if file.exists():
            continue
        partial = file.with_suffix(".partial")
        write(partial, label(atoms, arguments.pseudo), format="extxyz")
        partial.rename(file)
        print(file, f"{atoms.get_potential_energy():.4f} eV", flush=True)


if __name__ == "__main__":
    main()
