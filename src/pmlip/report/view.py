"""3-D view of the most uncertain and the most unusual structures, with chemiscope."""

import base64
import importlib.resources
import itertools
import json

import numpy as np
from ase import Atoms

from pmlip.report.entry import Entry

SHOWN = 8  # number of structures


def view(entry: Entry) -> str:
    """A chemiscope data set, as base64-encoded JSON, of the structures with the largest spread and novelty.

    Atoms can be coloured by spread, error, force and novelty.
    """
    import chemiscope

    rows = entry.forces.varying_atoms
    chosen = _chosen(entry)
    atoms = np.concatenate([np.flatnonzero(rows.system == i) for i in chosen])
    structures = [
        Atoms(s.symbols, s.positions, cell=s.cell, pbc=s.pbc) for s in (entry.evaluation.listed[i] for i in chosen)
    ]
    properties = {
        "force uncertainty": rows["spread"][atoms],
        "true force error": rows["error"][atoms],
        "size of the force": rows["force"][atoms],
    }
    units = dict.fromkeys(properties, "eV/Å")
    if entry.evaluation.novelty is not None:
        known = entry.evaluation.novelty.atom.numpy()
        own = np.concatenate([known[entry.forces.system.numpy() == i] for i in chosen])
        properties["novelty"], units["novelty"] = _finite(own), ""
    settings = chemiscope.quick_settings(
        x="force uncertainty",
        y="true force error",
        map_color="force uncertainty",
        target="atom",
        periodic=any(atoms.pbc.any() for atoms in structures),
        map_settings={"x": {"scale": "log"}, "y": {"scale": "log"}, "palette": "viridis"},
        structure_settings={
            "color": {"property": "force uncertainty", "palette": "viridis"},
            "environments": {"activated": False},
        },
    )
    dataset = chemiscope.create_input(
        structures,
        metadata={"name": f"{entry.model} on {entry.data}"},
        properties={
            name: {"target": "atom", "values": values, "units": units[name]} for name, values in properties.items()
        },
        environments=chemiscope.all_atomic_environments(structures),
        settings=settings,
    )
    return base64.b64encode(json.dumps(dataset).encode()).decode()


def _chosen(entry: Entry) -> np.ndarray:
    """The structures to show: in turn the next by the largest spread of an atom and, if it is known, by novelty."""
    rows = entry.forces.varying_atoms
    systems = np.unique(rows.system)
    orders = [np.array([rows["spread"][rows.system == i].max() for i in systems])]
    if entry.evaluation.novelty is not None:
        orders.append(entry.evaluation.structure_novelty[systems])
    ranked = zip(*(systems[np.argsort(-order, kind="stable")] for order in orders), strict=True)
    return np.array(list(dict.fromkeys(itertools.chain.from_iterable(ranked)))[:SHOWN])


def _finite(novelty: np.ndarray) -> np.ndarray:
    """Novelty with infinity replaced by twice the largest finite value, which a colour scale can show."""
    largest = novelty[np.isfinite(novelty)].max(initial=1.0)
    return np.where(np.isfinite(novelty), novelty, 2 * largest)


def viewer_code() -> str:
    """The JavaScript code of chemiscope, from its Python package."""
    code = importlib.resources.files("chemiscope") / "sphinx" / "static" / "chemiscope.min.js"
    return code.read_text().replace("</script", "<\\/script")
