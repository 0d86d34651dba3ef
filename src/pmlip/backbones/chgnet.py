"""CHGNet: forces and stress by autograd; the package includes the weights.

Every sample is exactly equivariant to rotation, translation and permutation, and its forces are exact gradients.
"""

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator
from torch import Tensor, nn

from pmlip.atomic_files import atomic_write
from pmlip.backbones.base import Backbone, Graph, Readout, conservative_outputs, distance_features, times_own
from pmlip.noise.injection import Site
from pmlip.noise.layer_classes import become
from pmlip.noise.split_linear import SplitInput, SplitLinear, split_input
from pmlip.structures.atoms import StructureError

try:
    from chgnet.graph import CrystalGraphConverter
    from chgnet.model import CHGNet
    from chgnet.model.dynamics import CHGNetCalculator
    from chgnet.model.functions import MLP, GatedMLP
    from chgnet.model.layers import AngleUpdate, AtomConv, BondConv
    from chgnet.model.model import BatchedGraph
    from pymatgen.core import Structure
    from pymatgen.io.ase import AseAtomsAdaptor
except ImportError as error:
    raise ImportError("backbone 'chgnet' needs: pip install 'pmlip[chgnet]'") from error

VARIANTS = ("0.3.0", "r2scan")


@dataclass(frozen=True)
class Batch:
    numbers: Tensor  # (node,)
    positions: Tensor  # (node, 3)
    cell: Tensor  # (system, 3, 3)
    volume: Tensor  # (system,); NaN for a structure without a cell
    image: Tensor  # (edge, 3) periodic image of the neighbour, in cell vectors
    edge: Tensor  # (edge, 2) node indices of centre and neighbour
    bond_of_edge: Tensor  # (edge,) directed edge -> undirected bond
    edge_of_bond: Tensor  # (bond,) undirected bond -> one of its two edges
    angle: Tensor  # (angle, 5) node, bond i, edge i, bond j, edge j


class _UnwrittenStructure(Structure):
    """A structure that is not written to a file: CHGNet writes bond_graph_error.cif if it cannot build a graph."""

    def to(self, *_: Any, **__: Any) -> str:
        return ""


class SplitGatedMLP(GatedMLP):
    """The package's gated MLP on a `SplitInput`."""

    def forward(self, rows: SplitInput) -> Tensor:
        core, gate = (_through(mlp, rows) for mlp in (self.mlp_core, self.mlp_gate))
        if self.norm is not None:
            core, gate = self.bn1(core), self.bn2(gate)
        return self.activation(core) * self.sigmoid(gate)


def _through(mlp: MLP, rows: SplitInput) -> Any:
    x: Any = rows
    for layer in mlp.layers:
        if not isinstance(layer, nn.Dropout):  # skip: its rate is 0, and it does not accept a SplitInput
            x = layer(x)
    return x


class SplitAtomConv(AtomConv):
    def forward(
        self,
        atom_feas: Tensor,
        bond_feas: Tensor,
        bond_weights: Tensor,
        atom_graph: Tensor,
        directed2undirected: Tensor,
    ) -> Tensor:
        centre, neighbour = atom_graph.unbind(1)
        bond = directed2undirected
        rows = split_input((atom_feas, centre), (bond_feas, bond), (atom_feas, neighbour))
        messages = self.twoBody_atom(rows) * bond_weights.index_select(0, bond)
        return atom_feas + self.mlp_out(torch.zeros_like(atom_feas).index_add(0, centre, messages))


class SplitBondConv(BondConv):
    def forward(
        self, atom_feas: Tensor, bond_feas: Tensor, bond_weights: Tensor, angle_feas: Tensor, bond_graph: Tensor
    ) -> Tensor:
        centre, first, second = bond_graph.unbind(1)
        rows = split_input((bond_feas, first), (bond_feas, second), (angle_feas, None), (atom_feas, centre))
        messages = self.twoBody_bond(rows) * bond_weights.index_select(0, first) * bond_weights.index_select(0, second)
        return bond_feas + self.mlp_out(torch.zeros_like(bond_feas).index_add(0, first, messages))


class SplitAngleUpdate(AngleUpdate):
    def forward(self, atom_feas: Tensor, bond_feas: Tensor, angle_feas: Tensor, bond_graph: Tensor) -> Tensor:
        centre, first, second = bond_graph.unbind(1)
        rows = split_input((bond_feas, first), (bond_feas, second), (angle_feas, None), (atom_feas, centre))
        return angle_feas + self.twoBody_bond(rows)


SPLIT: dict[type[nn.Module], type[nn.Module]] = {
    AtomConv: SplitAtomConv,
    BondConv: SplitBondConv,
    AngleUpdate: SplitAngleUpdate,
    GatedMLP: SplitGatedMLP,
}


def _split(module: CHGNet) -> None:
    """Make message passing use split inputs, equal up to rounding.

    Does nothing for a model whose layers differ from the published models' layers.
    """
    layers = [*module.atom_conv_layers, *module.bond_conv_layers, *module.angle_layers]
    layers = [layer for layer in layers if layer is not None]
    inner = [part for layer in layers for part in layer.modules()]
    norms = [getattr(layer, f"{kind}_norm", None) for layer in layers for kind in ("atom", "bond", "angle")]
    if (
        not all(type(layer) in SPLIT and layer.resnet and getattr(layer, "use_mlp_out", True) for layer in layers)
        or any(norm is not None for norm in norms)
        or any(part.p > 0 for part in inner if isinstance(part, nn.Dropout))
    ):
        return
    for part in inner:
        if type(part) is GatedMLP:
            for mlp in (part.mlp_core, part.mlp_gate):
                become(next(layer for layer in mlp.layers if isinstance(layer, nn.Linear)), SplitLinear)
        if type(part) in SPLIT:
            become(part, SPLIT[type(part)])


class CHGNetBackbone(Backbone):
    name = "chgnet"
    equivariant = True
    conservative = True
    rate = 3e-3
    tangent_cover = "readout"
    module: CHGNet

    def __init__(self, module: CHGNet, variant: str) -> None:
        super().__init__(module, variant)
        if any(layer.mlp_out.layers[-1].bias is not None for layer in module.bond_conv_layers if layer is not None):
            raise ValueError(
                "this CHGNet (0.2.0 or older) has biases that make a structure without angles depend on the other "
                "structures in its batch; use 0.3.0 or later"
            )
        _split(module)
        own = module.graph_converter
        self.converter = CrystalGraphConverter(
            atom_graph_cutoff=own.atom_graph_cutoff,
            bond_graph_cutoff=own.bond_graph_cutoff,
            on_isolated_atoms="ignore",  # `_single` raises an error that names the atom
        )

    def sites(self) -> list[Site]:
        blocks = {"atom_conv_layers": ("twoBody_atom", "edge"), "bond_conv_layers": ("twoBody_bond", "angle")}
        blocks["angle_layers"] = ("twoBody_bond", "angle")
        return [
            Site(f"{layers}.{i}.{block}.mlp_{part}", rows)
            for layers, (block, rows) in blocks.items()
            for i, layer in enumerate(getattr(self.module, layers))
            for part in ("core", "gate")
            if layer is not None
        ]

    def atom_of_row(self, graph: Graph) -> dict[str, Tensor]:
        batch: Batch = graph.batch
        return {"edge": batch.edge[:, 0], "angle": batch.angle[:, 0]}

    def readouts(self) -> list[Readout]:
        if not self.module.mlp_first:
            raise ValueError("this CHGNet averages the features of atoms before its readout, so atoms have no features")
        return [Readout("mlp")]

    def single(self, atoms: Atoms, index: int) -> Graph:
        like = self.module.bond_embedding.weight
        built = vars(self._single(atoms, index))
        batch = Batch(**{name: x.to(like) if x.is_floating_point() else x.to(like.device) for name, x in built.items()})
        rows = {"node": batch.numbers, "edge": batch.edge[:, 0], "angle": batch.angle[:, 0]}
        return Graph(batch, {kind: torch.zeros_like(index) for kind, index in rows.items()}, 1, batch.numbers)

    def join_batches(self, batches: Sequence[Batch]) -> Batch:
        return _join(batches)

    def _single(self, atoms: Atoms, index: int) -> Batch:
        for atom in atoms:
            if atom.number not in self.elements:
                known = f"only elements 1 to {self.elements[-1]}"
                raise StructureError(atoms, index, f"CHGNet does not know {atom.symbol}, {known}")
        boxed = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        has_cell = atoms.cell.rank == 3
        if not has_cell:
            if (atoms.pbc & ~atoms.cell.array.any(axis=1)).any():
                raise StructureError(atoms, index, "it is periodic along an axis without a cell vector")
            # CHGNet needs a full cell; axes without a cell vector are not periodic, so an arbitrary one is correct
            boxed.set_cell(atoms.cell.complete() if atoms.cell.rank else np.ptp(atoms.positions, axis=0) + 1)
        try:
            graph = self.converter(AseAtomsAdaptor.get_structure(boxed, cls=_UnwrittenStructure))
        except (RuntimeError, ValueError) as error:
            raise StructureError(
                atoms, index, "CHGNet cannot build its graph; check the positions, the cell and their unit"
            ) from error
        edge = graph.atom_graph.long().reshape(-1, 2)
        if isolated := set(range(len(atoms))) - set(edge[:, 0].tolist()):
            raise StructureError(
                atoms,
                index,
                f"atom {min(isolated)} ({atoms[min(isolated)].symbol}) has no neighbour within "
                f"{self.converter.atom_graph_cutoff} Å, and CHGNet does not support isolated atoms; remove it",
            )
        return Batch(
            numbers=graph.atomic_number.long(),
            positions=torch.from_numpy(boxed.positions),
            cell=torch.from_numpy(boxed.cell.array)[None],
            volume=torch.tensor([atoms.cell.volume if has_cell else torch.nan], dtype=torch.float64),
            image=graph.neighbor_image,
            edge=edge,
            bond_of_edge=graph.directed2undirected.long(),
            edge_of_bond=graph.undirected2directed.long(),
            angle=graph.bond_graph.long().reshape(-1, 5),
        )

    def row_features(self, graph: Graph) -> dict[str, Tensor]:
        batch: Batch = graph.batch
        images = times_own(batch.image, batch.cell, graph.rows["edge"])
        vectors = batch.positions[batch.edge[:, 1]] + images - batch.positions[batch.edge[:, 0]]
        distances = vectors.norm(dim=-1)
        first, second = batch.angle[:, 2], batch.angle[:, 4]
        cosines = (vectors[first] * vectors[second]).sum(-1) / (distances[first] * distances[second])
        return {
            "edge": distance_features(distances, self.converter.atom_graph_cutoff),
            "angle": torch.stack([cosines, distances[first], distances[second]], dim=-1),
        }

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        batch: Batch = graph.batch
        return conservative_outputs(
            graph,
            positions=batch.positions,
            cell=batch.cell,
            volume=batch.volume,
            energy=partial(self._energy, graph),
        )

    def _energy(self, graph: Graph, positions: Tensor, cell: Tensor) -> Tensor:
        batch: Batch = graph.batch
        module = self.module
        images = times_own(batch.image, cell, graph.rows["edge"])
        # The encoder adds image @ lattice of a single structure. Here `images` holds that sum, so pass zeros.
        none = images.new_zeros(1, 3)
        atom_bases, bond_bases, directions = module.bond_basis_expansion(
            center=positions.index_select(0, batch.edge[:, 0]),
            neighbor=positions.index_select(0, batch.edge[:, 1]) + images,
            undirected2directed=batch.edge_of_bond,
            image=none,
            lattice=none.expand(3, 3),
        )
        prediction = module._compute(
            BatchedGraph(
                atomic_numbers=batch.numbers,
                bond_bases_ag=atom_bases,
                bond_bases_bg=bond_bases,
                angle_bases=module.angle_basis_expansion(
                    directions.index_select(0, batch.angle[:, 2]), directions.index_select(0, batch.angle[:, 4])
                ),
                batched_atom_graph=batch.edge,
                batched_bond_graph=batch.angle[:, [0, 1, 3]],
                atom_owners=graph.rows["node"],
                directed2undirected=batch.bond_of_edge,
                atom_positions=[positions],
                strains=[cell],
                volumes=batch.volume,
            )
        )
        energy = prediction["e"].double()
        if module.is_intensive:
            energy = energy * prediction["atoms_per_graph"]
        if module.composition_model is not None:
            reference = module.composition_model.fc.weight[0].double()
            energy = energy.index_add(0, graph.rows["node"], reference[batch.numbers - 1])
        return energy

    @property
    def elements(self) -> range:
        return range(1, len(self.module.atom_embedding.embedding.weight) + 1)

    def references(self) -> dict[int, float]:
        if self.module.composition_model is None:
            return {}
        return dict(enumerate(self.module.composition_model.fc.weight[0].tolist(), start=1))

    def shift_references(self, offsets: Mapping[int, float]) -> None:
        if self.module.composition_model is None:
            raise ValueError(
                "this CHGNet has no composition model to store energy offsets in; pass offsets=False to train without "
                "them"
            )
        weight = self.module.composition_model.fc.weight
        with torch.no_grad():
            for number, offset in offsets.items():
                weight[0, number - 1] += offset

    def calculator(self) -> Calculator:
        single = self.module.bond_embedding.weight.dtype == torch.float32
        with _quiet():
            return CHGNetCalculator(
                # the calculator builds graphs in single precision
                self.module if single else copy.deepcopy(self.module).float(),
                use_device=str(self.module.bond_embedding.weight.device),
                on_isolated_atoms="error",
            )

    def save(self, path: str | Path) -> None:
        """Write a file that `CHGNet.from_file` reads."""
        with atomic_write(path) as file:
            torch.save({"model": self.module.as_dict()}, file)


def load(variant: str = "", *, weights: str | Path | None = None, device: str = "cpu") -> CHGNetBackbone:
    """Load CHGNet 0.3.0, another variant, or a local checkpoint written by CHGNet."""
    variant = variant or VARIANTS[0]
    if weights is None and variant not in VARIANTS:
        raise ValueError(f"unknown CHGNet variant {variant!r}; allowed: {', '.join(VARIANTS)}")
    with _quiet():
        module = CHGNet.load(model_name=variant, use_device="cpu", verbose=False) if weights is None else _read(weights)
    return CHGNetBackbone(module, variant).to(device)


def _read(path: str | Path) -> CHGNet:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no weights file {path}")
    try:
        return CHGNet.from_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
    except Exception:  # torch raises many types of error for damaged files, and some advise to load them unsafely
        raise ValueError(f"{path} is not a checkpoint of CHGNet") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):  # CHGNet prints in its constructor
        yield


def _join(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches and shift their node, edge and bond indices."""
    edge, bond = [part.edge for part in parts], [part.edge_of_bond for part in parts]
    angle = [part.angle for part in parts]
    nodes, edges, bonds = _starts([part.numbers for part in parts]), _starts(edge), _starts(bond)
    of_edge = _part(edge)
    joined = Batch(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Batch)})
    return replace(
        joined,
        edge=joined.edge + nodes[of_edge, None],
        bond_of_edge=joined.bond_of_edge + bonds[of_edge],
        edge_of_bond=joined.edge_of_bond + edges[_part(bond)],
        angle=joined.angle + torch.stack([nodes, bonds, edges, bonds, edges], dim=1)[_part(angle)],
    )


def _starts(parts: Sequence[Tensor]) -> Tensor:
    """Return the index of the first row of each part after concatenation."""
    return torch.tensor([0, *(len(part) for part in parts[:-1])], device=parts[0].device).cumsum(0)


def _part(parts: Sequence[Tensor]) -> Tensor:
    """Return the index of the part that each concatenated row comes from."""
    lengths = torch.tensor([len(part) for part in parts], device=parts[0].device)
    return torch.repeat_interleave(torch.arange(len(parts), device=lengths.device), lengths)
