"""Orb-v3 (direct and conservative) and Orb-v2; the package downloads the weights, or they come from a local file.

Every sample is exactly equivariant to translation and permutation. Direct models have zero net force, and forces of
conservative models are exact gradients. Rotation is only approximate: Orb passes bond directions through plain MLPs and
learned equivariance from data.
"""

import contextlib
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator
from torch import Tensor, nn

from pmlip.atomic_files import atomic_write
from pmlip.backbones.base import Backbone, Graph, Readout, conservative_outputs, distance_features, times_own
from pmlip.errors import first_reason
from pmlip.noise.injection import Site
from pmlip.noise.layer_classes import become
from pmlip.noise.split_linear import SplitLinear, split_input
from pmlip.structures.atoms import StructureError

try:
    from orb_models.forcefield.atomic_system import ase_atoms_to_atom_graphs
    from orb_models.forcefield.base import AtomGraphs, batch_graphs
    from orb_models.forcefield.calculator import ORBCalculator
    from orb_models.forcefield.conservative_regressor import ConservativeForcefieldRegressor
    from orb_models.forcefield.gns import AttentionInteractionNetwork
    from orb_models.forcefield.pretrained import ORB_PRETRAINED_MODELS
except ImportError as error:
    raise ImportError("backbone 'orb' needs: pip install 'pmlip[orb]'") from error

ELEMENTS = range(1, 118)  # Orb's embedding has 118 rows, indexed by atomic number from 0


class SplitInteraction(AttentionInteractionNetwork):
    """The package's message passing with a split first layer in the edge MLP.

    A third less work; results are equal up to rounding.
    """

    def forward(
        self,
        nodes: Tensor,
        edges: Tensor,
        senders: Tensor,
        receivers: Tensor,
        cutoff: Tensor,
        cond_nodes: Tensor | None = None,
        cond_edges: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if cond_nodes is not None:
            nodes = nodes + self._cond_node_proj(cond_nodes)
        first, *rest = self._edge_mlp.mlp
        messages = first(split_input((edges, None), (nodes, senders), (nodes, receivers)))
        for layer in (*rest, *list(self._edge_mlp)[1:]):
            messages = layer(messages)
        received = torch.sigmoid(self._receive_attn(edges)) * cutoff
        sent = torch.sigmoid(self._send_attn(edges)) * cutoff
        into = torch.zeros_like(nodes).index_add(0, receivers, messages * received)
        out_of = torch.zeros_like(nodes).index_add(0, senders, messages * sent)
        return nodes + self._node_mlp(torch.cat([nodes, into, out_of], dim=1)), edges + messages


def _split(layer: Any) -> None:
    """Make a message-passing layer use split inputs, if it has the settings of the published Orb models."""
    if (
        type(layer) is AttentionInteractionNetwork
        and layer._attention_gate == "sigmoid"
        and layer._distance_cutoff
        and layer._edge_cond == "none"
        and layer._node_cond in ("none", "additive")
    ):
        become(layer, SplitInteraction)
        become(layer._edge_mlp.mlp[0], SplitLinear)


class OrbBackbone(Backbone):
    name = "orb"
    equivariant = False
    rate = 5e-5
    module: Any  # a DirectForcefieldRegressor or a ConservativeForcefieldRegressor

    def __init__(self, module: nn.Module, variant: str) -> None:
        super().__init__(module, variant)
        self.conservative = isinstance(module, ConservativeForcefieldRegressor)
        for layer in self.module.model.gnn_stacks:
            _split(layer)

    def sites(self) -> list[Site]:
        return [
            Site(f"model.gnn_stacks.{i}._{kind}_mlp.mlp.NN-0", kind)
            for i in range(len(self.module.model.gnn_stacks))
            for kind in ("node", "edge")
        ]

    def atom_of_row(self, graph: Graph) -> dict[str, Tensor]:
        return {"edge": graph.batch.receivers}

    def readouts(self) -> list[Readout]:
        return [Readout("heads.energy")]

    def heads(self) -> list[str]:
        return ["heads"]

    def single(self, atoms: Atoms, index: int) -> Graph:
        batch = self._single(atoms, index).to(self._like.device)
        counts = {"node": batch.n_node, "edge": batch.n_edge}
        rows = {kind: torch.zeros(int(n), dtype=torch.long, device=n.device) for kind, n in counts.items()}
        return Graph(batch, rows, 1, batch.atomic_numbers)

    def join_batches(self, batches: Sequence[AtomGraphs]) -> AtomGraphs:
        return batch_graphs(list(batches))

    def _single(self, atoms: Atoms, index: int) -> AtomGraphs:
        for atom in atoms:
            if atom.number not in ELEMENTS:
                known = f"only elements 1 to {ELEMENTS[-1]}"
                raise StructureError(atoms, index, f"Orb does not know {atom.symbol}, {known}")
        if atoms.pbc.any() and not (atoms.pbc.all() and atoms.cell.rank == 3):
            raise StructureError(
                atoms,
                index,
                f"Orb supports structures that are periodic along all axes or none, got pbc={atoms.pbc.tolist()}; set "
                "a full cell with vacuum and pbc=True",
            )
        # copy only the geometry: Orb would read features and targets from `info`
        plain = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        if self.module.model.conditioner is not None:
            for key in ("charge", "spin"):
                if key not in atoms.info:
                    raise StructureError(atoms, index, f"{self.variant} needs its {key}; set atoms.info[{key!r}]")
                plain.info[key] = float(atoms.info[key])
        return ase_atoms_to_atom_graphs(
            plain,
            self.module.system_config,
            device=torch.device("cpu"),
            output_dtype=self._like.dtype,
            graph_construction_dtype=self._like.dtype,
        )

    def row_features(self, graph: Graph) -> dict[str, Tensor]:
        batch = graph.batch
        distances = batch.edge_features["vectors"].norm(dim=-1)
        return {
            "node": batch.atomic_numbers_embedding,
            "edge": distance_features(distances, self.module.system_config.radius),
        }

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        batch = graph.batch
        volume = torch.linalg.det(batch.cell).abs()
        volume = volume.masked_fill(volume == 0, torch.nan)
        if self.conservative:
            energy = partial(self._energy_at, graph)
            outputs = conservative_outputs(
                graph, positions=batch.positions, cell=batch.cell, volume=volume, energy=energy
            )
            return outputs if self.module.has_stress else {name: outputs[name] for name in ("energy", "forces")}
        outputs = self._directly(graph)
        if "stress" in outputs:
            outputs["stress"] = outputs["stress"].masked_fill(volume.isnan()[:, None], torch.nan)
        return outputs

    def _directly(self, graph: Graph) -> dict[str, Tensor]:
        batch, heads = graph.batch, self.module.heads
        nodes = self.module.model(batch)["node_features"]
        outputs = {"energy": self._energy(graph, nodes)}
        outputs |= {name: heads[name].predict(nodes, batch) for name in ("forces", "stress") if name in heads}
        if self.module.pair_repulsion:
            repulsion = self.module.pair_repulsion_fn(batch)
            outputs = {name: value + repulsion[name] for name, value in outputs.items()}
        return outputs

    def _energy_at(self, graph: Graph, positions: Tensor, cell: Tensor) -> Tensor:
        batch = graph.batch
        images = times_own(batch.edge_features["unit_shifts"], cell, graph.rows["edge"])
        receivers, senders = (positions.index_select(0, end) for end in (batch.receivers, batch.senders))
        vectors = receivers - senders + images
        moved = batch._replace(
            node_features={**batch.node_features, "positions": positions},
            edge_features={**batch.edge_features, "vectors": vectors},
        )
        energy = self._energy(graph, self.module.model(moved)["node_features"])
        return energy + self.module.pair_repulsion_fn(moved)["energy"] if self.module.pair_repulsion else energy

    def _energy(self, graph: Graph, nodes: Tensor) -> Tensor:
        """Return the energy of each system (system,), reference energies included, in double precision."""
        batch, head = graph.batch, self.module.heads["energy"]
        energy = head.normalizer.inverse(head(nodes, batch)).double()
        if head.atom_avg:
            energy = energy * batch.n_node
        reference = head.reference.linear.weight.flatten().double()
        return energy.index_add(0, graph.rows["node"], reference[batch.atomic_numbers])

    @property
    def elements(self) -> range:
        return ELEMENTS

    def references(self) -> dict[int, float]:
        weight = self.module.heads["energy"].reference.linear.weight.view(-1).tolist()
        return {number: weight[number] for number in self.elements}

    def shift_references(self, offsets: Mapping[int, float]) -> None:
        weight = self.module.heads["energy"].reference.linear.weight
        with torch.no_grad():
            for number, offset in offsets.items():
                weight.view(-1)[number] += offset

    @property
    def has_confidence(self) -> bool:
        return "confidence" in self.module.heads

    def expected_errors(self, graph: Graph) -> Tensor:
        """Return the absolute error of force components predicted by the confidence head of Orb-v3, (atom,) eV/Å."""
        head = self.module.heads["confidence"]
        with torch.no_grad():
            logits = head(self.module.model(graph.batch)["node_features"], graph.batch)
        middles = (torch.arange(logits.shape[-1]).to(logits) + 0.5) * head.max_error / logits.shape[-1]
        return logits.softmax(-1) @ middles

    def calculator(self) -> Calculator:
        return ORBCalculator(self.module, device=self._like.device)

    def save(self, path: str | Path) -> None:
        """Write a file that the package's model functions read as `weights_path`."""
        with atomic_write(path) as file:
            torch.save(self.module.state_dict(), file)


def variants() -> dict[str, Callable[..., Any]]:
    """Return the package's models with published weights, by name."""
    return {
        name: make
        for name, make in ORB_PRETRAINED_MODELS.items()
        if inspect.signature(make).parameters["weights_path"].default is not None
    }


def load(variant: str = "", *, weights: str | Path | None = None, device: str = "cpu") -> OrbBackbone:
    """Load an Orb by its name, "orb_v3_direct_20_omat" or "orb-v3-direct-20-omat", by download or from a local file."""
    allowed = variants()
    variant = (variant or "orb-v3-conservative-20-omat").replace("_", "-")
    if variant not in allowed:
        raise ValueError(f"unknown Orb {variant!r}; allowed: {', '.join(allowed)}")
    make = allowed[variant]
    if weights is not None and not Path(weights).is_file():
        raise FileNotFoundError(f"there is no weights file {weights}")
    address = inspect.signature(make).parameters["weights_path"].default if weights is None else str(weights)
    with _restore_torch_settings():
        try:
            module = make(weights_path=address, device="cpu", precision="float32-highest", compile=False, train=True)
        except Exception as error:
            # torch's error about a pickle advises to load it unsafely, so it is not shown
            if weights is not None and isinstance(error, pickle.UnpicklingError | EOFError):
                raise ValueError(
                    f"{weights} does not hold the weights of {variant}: it is damaged, or holds more than weights"
                ) from None
            if weights is not None:
                raise ValueError(f"{weights} does not hold the weights of {variant}: {first_reason(error)}") from error
            raise ConnectionError(
                f"the weights of {variant} could not be downloaded ({type(error).__name__}); fetch {address} on "
                "another machine and pass the file as weights=PATH"
            ) from error
    return OrbBackbone(module.eval(), variant).to(device)


@contextlib.contextmanager
def _restore_torch_settings() -> Iterator[None]:
    """Undo the changes that the package makes to torch's global precision when it loads a model; hide its warning."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
