"""MACE: forces and stress by autograd; from a local model file or an existing MACE module.

Every sample is exactly equivariant to rotation, translation and permutation, and its forces are exact gradients.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator
from torch import Tensor, nn

from pmlip.atomic_files import atomic_write
from pmlip.backbones.base import Backbone, Graph, Readout
from pmlip.errors import first_reason
from pmlip.noise.injection import Site

try:
    from mace.calculators import MACECalculator
    from mace.modules import MACE, ScaleShiftMACE

    from pmlip.backbones._neighbours import Batch, atom_of_row, build_graph, join, outputs_by_gradient
except ImportError as error:
    raise ImportError("backbone 'mace' needs: pip install 'pmlip[mace]'") from error


class MACEBackbone(Backbone):
    """MACE backbone; variant: name of the head, or "" for a model with a single head."""

    name = "mace"
    equivariant = True
    conservative = True
    module: Any  # a MACE or a ScaleShiftMACE

    def __init__(self, module: nn.Module, variant: str = "") -> None:
        if type(module) not in (MACE, ScaleShiftMACE) or hasattr(module, "joint_embedding"):
            raise ValueError(
                f"the module must be a plain MACE or ScaleShiftMACE, without inputs for charge, spin or other "
                f"properties; got a {type(module).__name__}"
            )
        heads = getattr(module, "heads", None) or ["Default"]
        if variant not in heads and (variant or len(heads) > 1):
            allowed = " or ".join(f"'mace:{head}'" for head in heads)
            raise ValueError(f"this MACE has no head {variant!r}; ask for {allowed}")
        super().__init__(module, variant or heads[0])
        self.head = heads.index(self.variant)
        self.species = {number: index for index, number in enumerate(self.module.atomic_numbers.tolist())}

    def sites(self) -> list[Site]:
        return [Site(f"interactions.{i}.conv_tp_weights", "edge") for i in range(len(self.module.interactions))]

    def atom_of_row(self, graph: Graph) -> dict[str, Tensor]:
        return atom_of_row(graph)

    def readouts(self) -> list[Readout]:
        first = [getattr(readout, "linear", None) or readout.linear_1 for readout in self.module.readouts]
        return [Readout(f"readouts.{i}", linear.irreps_in.count("0e")) for i, linear in enumerate(first)]

    def single(self, atoms: Atoms, index: int) -> Graph:
        return build_graph(
            atoms,
            index,
            cutoff=float(self.module.r_max),
            species=self.species,
            like=self._like,
            potential="this MACE",
        )

    def join_batches(self, batches: Sequence[Batch]) -> Batch:
        return join(batches)

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        return outputs_by_gradient(graph, partial(self._energy, graph), self._like)

    def _energy(self, graph: Graph, vectors: Tensor) -> Tensor:
        batch: Batch = graph.batch
        nodes = torch.bincount(graph.rows["node"], minlength=graph.systems)
        outputs = self.module(
            {
                "node_attrs": nn.functional.one_hot(batch.species, len(self.species)).to(vectors),
                "edge_index": batch.edge.T,
                # MACE computes edge vectors as position differences + shifts. They are already computed in double
                # precision, so pass them as shifts.
                "positions": vectors.new_zeros(len(batch.species), 3),
                "shifts": vectors,
                "cell": batch.cell.to(vectors).flatten(0, 1),
                "batch": graph.rows["node"],
                "ptr": nn.functional.pad(nodes.cumsum(0), (1, 0)),
                "head": torch.full_like(nodes, self.head),
            },
            compute_force=False,
        )
        energy = outputs["node_energy"].double()
        return energy.new_zeros(graph.systems).index_add(0, graph.rows["node"], energy)

    @property
    def elements(self) -> list[int]:
        return list(self.species)

    def references(self) -> dict[int, float]:
        own = self.module.atomic_energies_fn.atomic_energies
        of_head = own if own.dim() == 1 else own[0]
        return {number: float(of_head[index]) for number, index in self.species.items()}

    def shift_references(self, offsets: Mapping[int, float]) -> None:
        references = self.module.atomic_energies_fn.atomic_energies
        with torch.no_grad():
            for number, offset in offsets.items():
                references[..., self.species[number]] += offset

    def calculator(self) -> Calculator:
        before = torch.get_default_dtype()  # MACECalculator changes it
        try:
            # a copy: the calculator sets requires_grad=False on its parameters
            return MACECalculator(
                models=copy.deepcopy(self.module),
                device=str(self._like.device),
                default_dtype=str(self._like.dtype).removeprefix("torch."),
                head=self.variant,
            )
        finally:
            torch.set_default_dtype(before)

    def save(self, path: str | Path) -> None:
        """Write the model as MACE does, as a pickle. Reading a folded sample needs pmlip."""
        with atomic_write(path) as file:
            torch.save(self.module, file)


def load(
    variant: str = "", *, weights: str | Path | None = None, device: str = "cpu", trust: bool = False
) -> MACEBackbone:
    """Load a MACE from a local model file; variant: name of the head if it has several."""
    if weights is None:
        raise ValueError(
            "the MACE package includes no weights; download a model and pass its file as weights=PATH with trust=True"
        )
    if not Path(weights).is_file():
        raise FileNotFoundError(f"there is no weights file {weights}")
    if not trust:
        raise ValueError(
            f"{weights} is a MACE model, which is a pickle and can execute code when it is loaded; if you trust its "
            "source, pass trust=True"
        )
    try:
        module = torch.load(weights, map_location="cpu", weights_only=False)
    except Exception as error:  # torch raises many types of error for damaged files
        raise ValueError(f"{weights} cannot be read as a MACE model: {first_reason(error)}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{weights} holds a {type(module).__name__}, not a whole MACE model; pass the .model file")
    return MACEBackbone(module.eval(), variant).to(device)
