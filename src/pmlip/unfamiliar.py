"""Warnings about structures that the training set says little about: by novelty, and by their ratio of elements."""

import warnings
from collections.abc import Sequence

from ase import Atoms

from pmlip.methods.base import Method
from pmlip.novelty import Novelty
from pmlip.structures.energy_offsets import is_combination


class Watch:
    """Warns once for each reason, about the first structure of a run that gives it."""

    def __init__(self, model: Method, *, numbered: bool = False) -> None:
        """numbered: whether warnings name the number of the structure, too."""
        history = model.history
        self._compositions = history.compositions if history is not None and history.energy_offsets else ()
        self._numbered = numbered
        self._warned: set[str] = set()
        self._familiar: set[str] = set()

    def look(self, structures: Sequence[Atoms], found: Novelty | None, *, first: int = 0) -> None:
        """Look at structures number `first` and following, and at their novelty."""
        if found is not None and "novelty" not in self._warned:
            for index in found.outside.nonzero().flatten().tolist()[:1]:
                name = self._name(structures[index], first + index)
                self._warn(
                    "novelty", f"{name} lies outside the training set: {found.explain(index, structures[index])}"
                )
        if self._compositions and "composition" not in self._warned:
            for index, atoms in enumerate(structures):
                formula = atoms.get_chemical_formula()
                if formula in self._familiar or is_combination(atoms, self._compositions):
                    self._familiar.add(formula)
                    continue
                self._warn(
                    "composition",
                    f"{self._name(atoms, first + index)} is no combination of the compositions in the training set "
                    f"({', '.join(self._compositions)}): its energy relative to theirs can be far off",
                )
                break

    def _name(self, atoms: Atoms, number: int) -> str:
        formula: str = atoms.get_chemical_formula()
        return f"structure {number} ({formula})" if self._numbered else formula

    def _warn(self, reason: str, text: str) -> None:
        self._warned.add(reason)
        warnings.warn(text, stacklevel=4)
