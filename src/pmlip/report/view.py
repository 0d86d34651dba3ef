"""3-D view of the most uncertain structures, with chemiscope."""

import base64
import importlib.resources
import json

import numpy as np
from ase import Atoms

from pmlip.report.entry import Entry

SHOWN = 8  # number of structures


def view(entry: Entry) -> str:
    """A chemiscope data set of the most uncertain structures, as base64-encoded JSON."""
    import chemiscope

    rows = entry.forces.varying_atoms
    systems = np.unique(rows.system)
    largest = np.array([rows["spread"][rows.system == i].max() for i in systems])
    chosen = systems[np.argsort(-largest)[:SHOWN]]
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
    if "novelty" in rows and np.isfinite(rows["novelty"][atoms]).all():
        properties["novelty"], units["novelty"] = rows["novelty"][atoms], ""
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


def viewer_code() -> str:
    """The JavaScript code of chemiscope, from its Python package."""
    code = importlib.resources.files("chemiscope") / "sphinx" / "static" / "chemiscope.min.js"
    return code.read_text().replace("</script", "<\\/script")
