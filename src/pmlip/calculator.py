"""For ASE: a calculator with uncertainties, and a recorder that writes them to files.

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

from pmlip.atomic_files import naming
from pmlip.loading import load
from pmlip.methods.base import Method
from pmlip.metrics import predictive_sigma
from pmlip.novelty import Novelty
from pmlip.samples import Samples
from pmlip.structures.annotations import SPREADS_PER_ATOM, SPREADS_PER_STRUCTURE, annotated
from pmlip.structures.atoms import electrons
from pmlip.unfamiliar import Watch

POINTS = ("mean", "zero")


class PMLIPCalculator(Calculator):
    """Energy, forces and stress with uncertainties, which are standard deviations over K samples.

    Besides the standard ASE properties, `results` holds

        energy_uncertainty    eV, of the total energy; it grows linearly with the number of atoms (see docs/method.md)
        forces_uncertainty    (atom, 3) eV/Å, of each component
        atom_uncertainty      (atom,) eV/Å, square root of the trace of the covariance of the atom's force; invariant
                              under rotation if the potential is equivariant
        max_atom_uncertainty  eV/Å, largest value of atom_uncertainty
        stress_uncertainty    (6,) eV/Å^3, for structures with a cell
        forces_interval       (atom, 3) eV/Å; DFT forces lie within forces ± forces_interval with the probability given
                              in the calibration. Needs a calibrated model, point="mean", and at least as many samples
                              as the calibration used.

    and the variances energy_var and stress_var, named as in MACE. ensembles=True adds energy_ensemble (K,),
    forces_ensemble (K, atom, 3), stress_ensemble (K, 6), and forces_comm, a second name of forces_ensemble. Calibration
    has a separate factor for energies: energy_uncertainty and energy_var include it, energy_ensemble does not.

    If the model knows its training set (`pmlip finetune` stores its features), `results` also holds

        novelty               of the structure, compared with the training set; 1 is the 95 % quantile of held-out
                              structures
        atom_novelty          (atom,), 1 is the 95 % quantile of held-out atoms

    and the calculator warns once when a structure lies outside the training set. It also warns once about a ratio of
    elements that the training set does not combine. With samples=0, one pass gives the
    prediction without noise, novelty, and error bars of the forces from novelty. For direct forces, a structure with
    unusual latent features costs a second pass (`Method.novelty`).

    point: "mean" gives the mean over all noise for energy, forces and stress, estimated from the samples and two more
    passes (`Method.sample_with_mean`); "zero" gives the prediction without noise. Every call draws the same samples
    from the seed. So the energy of perturbed models and ensembles is as smooth a function of the positions as the
    energy of the backbone. For methods whose noise is drawn per batch row (BLIP, MC dropout), use "zero" for relaxation
    and MD.
    """

    implemented_properties: ClassVar[list[str]] = [
        *("energy", "free_energy", "forces", "stress"),
        *("energy_uncertainty", "forces_uncertainty", "stress_uncertainty"),
        *("atom_uncertainty", "max_atom_uncertainty", "forces_interval", "energy_var", "stress_var"),
        *("novelty", "atom_novelty"),
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
        """model: a model, or a model file; `weights`, `device` and `trust` are then passed to `pmlip.load`."""
        super().__init__()
        self.model: Method = (
            model if isinstance(model, Method) else load(model, weights=weights, device=device, trust=trust)
        )
        if point not in POINTS:
            raise ValueError(f"point must be one of {', '.join(POINTS)}, got {point!r}")
        if samples == 0 and ensembles:
            raise ValueError("ensembles=True needs samples, got samples=0")
        self.samples = self.model.prediction_samples(samples)
        self.seed, self.point, self.ensembles = seed, point, ensembles
        self._watch = Watch(self.model)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        found = self.model.novelty(self.atoms) if self.model.training_features else None
        self._watch.look([self.atoms], found)
        if not self.samples:
            assert found is not None
            self.results = one_pass(found)[0]
            self.results["free_energy"] = self.results["energy"]
            return
        calibration = self.model.calibration
        conformal = None
        if self.point == "mean":
            drawn, chosen = self.model.sample_with_mean(self.atoms, samples=self.samples, seed=self.seed)
            conformal = calibration.conformal_for(self.samples) if calibration else None
        else:  # conformal intervals hold for the mean only
            drawn = self.model.sample(self.atoms, samples=self.samples, seed=self.seed)
            chosen = self.model.predict(self.atoms)
        energy_factor = calibration.energy_factor if calibration else 1.0
        self.results = uncertainties(drawn, conformal=conformal, energy_factor=energy_factor)[0]
        if found is not None:
            self.results |= novelty_of(found)[0]
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
        """Changes since the last calculation, including charge and spin in `atoms.info`, which ASE ignores."""
        changed: list[str] = super().check_state(atoms, tol=tol)
        if self.atoms is not None and electrons(atoms) != electrons(self.atoms):
            changed.append("info")
        return changed

    def export_properties(self) -> Properties:
        """The results that ASE defines; its `Properties` rejects other names."""
        return Properties({name: value for name, value in self.results.items() if name in all_outputs})

    def annotate(self, atoms: Atoms) -> Atoms:
        """A copy of the structure with energy, forces and stress as labels, and their uncertainties.

        The uncertainties are in `info` and `arrays`, which extxyz stores; see `Recorder` for other formats.
        """
        self.get_property("energy", atoms)
        return annotated(atoms, self.results)

    def members(self) -> list[Calculator]:
        """An ASE calculator for each of the K samples."""
        return [sample_calculator(self.model, k, seed=self.seed) for k in range(self.samples)]


def sample_calculator(model: Method, number: int, *, seed: int = 0) -> Calculator:
    """An ASE calculator of one sample: of the potential's package if that can hold all of the sample."""
    if model.members_are_whole:
        return model.member(number, seed=seed).calculator()
    return SampleCalculator(model, number, seed=seed)


class SampleCalculator(Calculator):
    """One sample of a model as a potential, with energy, forces and stress."""

    implemented_properties: ClassVar[list[str]] = ["energy", "free_energy", "forces", "stress"]

    def __init__(self, model: Method, number: int, *, seed: int = 0) -> None:
        super().__init__()
        self.model, self.number, self.seed = model, number, seed

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        found = self.model.sample_number(self.number, self.atoms, seed=self.seed)
        self.results = {"energy": float(found.energy[0]), "forces": found.forces.double().numpy()}
        self.results["free_energy"] = self.results["energy"]
        if "stress" in found and bool(found.stress.isfinite().all()):
            self.results["stress"] = found.stress[0].double().numpy()


def uncertainties(
    drawn: Samples, *, conformal: float | None = None, energy_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Uncertainties of each structure by name (`SPREADS_PER_STRUCTURE` and `SPREADS_PER_ATOM`).

    conformal: factor of the force intervals, from `Calibration.conformal_for`; None: no intervals. energy_factor:
    factor on the spread of the energies, from `Calibration.energy_factor`.
    """
    spread = drawn.spread
    found = []
    for index in range(drawn.systems):
        forces = spread.forces[drawn.system == index].double().numpy()
        per_atom = np.sqrt((forces**2).sum(-1))
        own: dict[str, Any] = {
            "energy_uncertainty": energy_factor * float(spread.energy[index]),
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


def novelty_of(found: Novelty) -> list[dict[str, Any]]:
    """The novelty of each structure and of its atoms, by name."""
    return [
        {"novelty": float(novelty), "atom_novelty": found.atom[found.system == index].numpy()}
        for index, novelty in enumerate(found.structure)
    ]


def one_pass(found: Novelty) -> list[dict[str, Any]]:
    """The prediction without noise of each structure, with its novelty and the error bars of its forces."""
    results = []
    for index, own in enumerate(novelty_of(found)):
        mine = found.system == index
        own |= {
            "energy": float(found.predicted.energy[index]),
            "forces": found.predicted.forces[mine].double().numpy(),
        }
        if "stress" in found.predicted and bool(found.predicted.stress[index].isfinite().all()):
            own["stress"] = found.predicted.stress[index].double().numpy()
        sigma = found.sigma[mine].numpy()
        if not np.isnan(sigma).any():  # they were fitted
            own["forces_uncertainty"] = np.repeat(sigma[:, None], 3, axis=1)
            own["atom_uncertainty"] = np.sqrt(3) * sigma
            own["max_atom_uncertainty"] = float(own["atom_uncertainty"].max())
        results.append(own)
    return results


class Recorder:
    """An observer for relaxations and MD: each call appends the annotated structure to an extxyz, traj or db file.

        dynamics.attach(Recorder(atoms, "md.extxyz"), interval=10)

    extxyz stores uncertainties in `info` and `arrays`; traj stores everything in `info`; a database stores scalars as
    key-value pairs and arrays in `data`. An existing file is extended.
    """

    def __init__(self, atoms: Atoms, path: str | Path) -> None:
        if not isinstance(atoms.calc, PMLIPCalculator):
            raise ValueError(f"atoms.calc must be a PMLIPCalculator, got {type(atoms.calc).__name__}")
        self.atoms, self.path = atoms, Path(path)
        if self.path.suffix not in _WRITERS:
            raise ValueError(f"path must end in one of {', '.join(_WRITERS)}, got {self.path.name!r}")

    def __call__(self) -> None:
        atoms = self.atoms.calc.annotate(self.atoms)
        with naming(self.path):
            _WRITERS[self.path.suffix](self.path, atoms)


def _write_extxyz(path: Path, atoms: Atoms) -> None:
    write(path, atoms, format="extxyz", append=True)


def _write_traj(path: Path, atoms: Atoms) -> None:
    atoms.info |= _per_atom(atoms)  # traj stores only the arrays that ASE defines
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
