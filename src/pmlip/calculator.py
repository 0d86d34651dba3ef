"""For ASE: a calculator that knows how sure it is, and uncertainties that survive in files.

atoms.calc = PMLIPCalculator(model, samples=16)
atoms.get_forces(); atoms.calc.results["forces_uncertainty"]
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ase.db
import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.io import write
from ase.io.trajectory import Trajectory
from ase.outputs import Properties, all_outputs

from pmlip.loading import load
from pmlip.methods.base import Method
from pmlip.metrics import predictive_sigma
from pmlip.samples import Samples
from pmlip.structures.annotations import SPREADS_PER_ATOM, SPREADS_PER_STRUCTURE, annotated
from pmlip.structures.atoms import electrons

POINTS = ("mean", "zero")


class PMLIPCalculator(Calculator):
    """Energy, forces and stress with their uncertainties: the standard deviations over K samples.

    Besides ASE's own properties, `results` holds

        energy_uncertainty    eV, of the total energy; it grows like the number of atoms (see docs/method.md)
        forces_uncertainty    (atom, 3) eV/Å, of each component
        atom_uncertainty      (atom,) eV/Å, root of the trace of the covariance of its force; the same when turned, if
                              the potential is equivariant
        max_atom_uncertainty  eV/Å, its largest value
        stress_uncertainty    (6,) eV/Å^3, where there is a cell
        forces_interval       (atom, 3) eV/Å, of a calibrated model with at least as many samples as in its
                              calibration and point="mean": DFT forces lie within forces ± this as often as was
                              asked for there

    and in MACE's naming energy_var and stress_var, their squares. ensembles=True adds energy_ensemble (K,),
    forces_ensemble (K, atom, 3), stress_ensemble (K, 6), and forces_comm, the second once more.

    point: "mean" over all noise, as the samples and two more passes tell it (`Method.sample_with_mean`), or "zero", the
    prediction without noise, for energy, forces and stress. The samples are those of the seed at every call, so for
    perturbed models and ensembles the energy is as smooth a function of the positions as the backbone's. Where noise
    belongs to rows (BLIP, dropout), take "zero" for relaxation and MD.
    """

    implemented_properties: ClassVar[list[str]] = [
        *("energy", "free_energy", "forces", "stress"),
        *("energy_uncertainty", "forces_uncertainty", "stress_uncertainty"),
        *("atom_uncertainty", "max_atom_uncertainty", "forces_interval", "energy_var", "stress_var"),
    ]

    def __init__(
        self,
        model: Method | str | Path,
        *,
        samples: int = 16,
        seed: int = 0,
        point: str = "mean",
        ensembles: bool = False,
        weights: str | Path | None = None,
        device: str = "cpu",
        trust: bool = False,
    ) -> None:
        """model: a model, or the file of one, which is then loaded as `pmlip.load` does with the last three."""
        super().__init__()
        self.model: Method = (
            model if isinstance(model, Method) else load(model, weights=weights, device=device, trust=trust)
        )
        if point not in POINTS:
            raise ValueError(f"point must be one of {', '.join(POINTS)}, got {point!r}")
        self.samples = self.model.spread_samples(samples)
        self.seed, self.point, self.ensembles = seed, point, ensembles

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        if self.point == "mean":
            drawn, chosen = self.model.sample_with_mean(self.atoms, samples=self.samples, seed=self.seed)
            calibration = self.model.calibration
            conformal = calibration.conformal_for(self.samples) if calibration else None
        else:  # intervals are for the mean
            conformal = None
            drawn = self.model.sample(self.atoms, samples=self.samples, seed=self.seed)
            chosen = self.model.predict(self.atoms)
        self.results = uncertainties(drawn, conformal=conformal)[0]
        self.results |= {
            "energy": float(chosen.energy[0]),
            "free_energy": float(chosen.energy[0]),
            "forces": chosen.forces.double().numpy(),
        }
        if "stress_uncertainty" in self.results:
            self.results["stress"] = chosen.stress[0].double().numpy()
            self.results["stress_var"] = self.results["stress_uncertainty"] ** 2
        self.results["energy_var"] = self.results["energy_uncertainty"] ** 2
        if self.ensembles:
            self.results["energy_ensemble"] = drawn.energy[:, 0].numpy()
            self.results["forces_ensemble"] = drawn.forces.double().numpy()
            self.results["forces_comm"] = self.results["forces_ensemble"]
            if "stress" in self.results:
                self.results["stress_ensemble"] = drawn.stress[:, 0].double().numpy()

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation; ASE does not look for charge and spin where potentials do."""
        changed: list[str] = super().check_state(atoms, tol=tol)
        if self.atoms is not None and electrons(atoms) != electrons(self.atoms):
            changed.append("info")
        return changed

    def export_properties(self) -> Properties:
        """What ASE knows; it refuses other names."""
        return Properties({name: value for name, value in self.results.items() if name in all_outputs})

    def annotate(self, atoms: Atoms) -> Atoms:
        """A copy of the structure that carries energy, forces and stress as labels, and their uncertainties.

        The uncertainties are in `info` and `arrays`, where extxyz keeps them; see `Recorder` for other files.
        """
        self.get_property("energy", atoms)
        return annotated(atoms, self.results)

    def members(self) -> list[Calculator]:
        """The backbone's own ASE calculator of each sample: K ordinary potentials."""
        return [self.model.member(k, seed=self.seed).calculator() for k in range(self.samples)]


def uncertainties(drawn: Samples, *, conformal: float | None = None) -> list[dict[str, Any]]:
    """What the samples say of each structure, under the names in `SPREADS_PER_STRUCTURE` and `SPREADS_PER_ATOM`.

    conformal: the factor that `pmlip.calibration` found for intervals of the forces.
    """
    spread = drawn.spread
    found = []
    for index in range(drawn.systems):
        forces = spread.forces[drawn.system == index].double().numpy()
        per_atom = np.sqrt((forces**2).sum(-1))
        own: dict[str, Any] = {
            "energy_uncertainty": float(spread.energy[index]),
            "forces_uncertainty": forces,
            "atom_uncertainty": per_atom,
            "max_atom_uncertainty": float(per_atom.max()),
        }
        if "stress" in spread and bool(spread.stress[index].isfinite().all()):
            own["stress_uncertainty"] = spread.stress[index].double().numpy()
        if conformal is not None:
            own["forces_interval"] = conformal * predictive_sigma(forces, drawn.count)
        found.append(own)
    return found


class Recorder:
    """Writes annotated structures to extxyz, traj or ase.db, one at each call: an observer for relaxations and MD.

        dynamics.attach(Recorder(atoms, "md.extxyz"), interval=10)

    extxyz keeps uncertainties in `info` and `arrays`, traj all of them in `info`, a database per structure as
    key-value pairs and per atom in `data`. An existing file is continued.
    """

    def __init__(self, atoms: Atoms, path: str | Path) -> None:
        if not isinstance(atoms.calc, PMLIPCalculator):
            raise ValueError(f"the structure must have a PMLIPCalculator, got {type(atoms.calc).__name__}")
        self.atoms, self.path = atoms, Path(path)
        if self.path.suffix not in _WRITERS:
            raise ValueError(f"uncertainties are written to {', '.join(_WRITERS)}, not to {self.path.name!r}")

    def __call__(self) -> None:
        _WRITERS[self.path.suffix](self.path, self.atoms.calc.annotate(self.atoms))


def _write_extxyz(path: Path, atoms: Atoms) -> None:
    write(path, atoms, format="extxyz", append=True)


def _write_traj(path: Path, atoms: Atoms) -> None:
    atoms.info |= _per_atom(atoms)  # traj keeps no arrays of other names
    with Trajectory(path, "a") as trajectory:
        trajectory.write(atoms)


def _write_database(path: Path, atoms: Atoms) -> None:
    pairs = {name: atoms.info[name] for name in SPREADS_PER_STRUCTURE if np.ndim(atoms.info.get(name, [])) == 0}
    rest = {name: atoms.info[name] for name in SPREADS_PER_STRUCTURE if name in atoms.info and name not in pairs}
    with ase.db.connect(path) as database:
        database.write(atoms, key_value_pairs=pairs, data=rest | _per_atom(atoms))


def _per_atom(atoms: Atoms) -> dict[str, np.ndarray]:
    return {name: atoms.arrays[name] for name in SPREADS_PER_ATOM if name in atoms.arrays}


_WRITERS: dict[str, Callable[[Path, Atoms], None]] = {
    ".extxyz": _write_extxyz,
    ".xyz": _write_extxyz,
    ".traj": _write_traj,
    ".db": _write_database,
}
