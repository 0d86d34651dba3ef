"""Write, detect and remove the uncertainties that pmlip stores on structures."""

from collections.abc import Mapping
from typing import Any

from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.calculators.singlepoint import SinglePointCalculator

# pmlip writes these names with its predictions. On a structure that has one, "energy" may be a prediction, not a label.
SPREADS_PER_ATOM = ("forces_uncertainty", "atom_uncertainty", "forces_interval", "atom_novelty")
SPREADS_PER_STRUCTURE = ("energy_uncertainty", "max_atom_uncertainty", "stress_uncertainty", "novelty")


def has_uncertainties(atoms: Atoms) -> bool:
    return any(name in place for place in places(atoms) for name in (*SPREADS_PER_ATOM, *SPREADS_PER_STRUCTURE))


def without_uncertainties(atoms: Atoms) -> Atoms:
    """Copy a structure without its uncertainties, including the copies in nested dicts that ase.db makes."""
    bare = atoms.copy()

    def others(place: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in place.items() if name not in (*SPREADS_PER_ATOM, *SPREADS_PER_STRUCTURE)}

    bare.info = {name: others(value) if isinstance(value, dict) else value for name, value in others(bare.info).items()}
    bare.arrays = others(bare.arrays)
    return bare


def places(atoms: Atoms) -> list[Mapping[str, Any]]:
    """Return the mappings that can hold a label: calculator results, `info`, `arrays`, and dicts nested in `info`."""
    results = atoms.calc.results if atoms.calc is not None else {}
    info = {name: value for name, value in atoms.info.items() if not isinstance(value, dict)}
    # ase.db stores everything except calculator results in a dict inside `info`
    nested = [value for value in atoms.info.values() if isinstance(value, dict)]
    return [results, info, atoms.arrays, *nested]


def annotated(atoms: Atoms, results: Mapping[str, Any]) -> Atoms:
    """Copy a structure with new results: ASE properties go to a calculator, uncertainties to `info` and `arrays`.

    Earlier uncertainties are removed.
    """
    carrier = without_uncertainties(atoms)
    for name in SPREADS_PER_STRUCTURE:
        if name in results:
            carrier.info[name] = results[name]
    for name in SPREADS_PER_ATOM:
        if name in results:
            carrier.arrays[name] = results[name]
    known = {name: value for name, value in results.items() if name in all_properties}
    carrier.calc = SinglePointCalculator(carrier, **known)
    return carrier
