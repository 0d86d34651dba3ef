"""Runs a method on structures in chunks of (structure, sample) pairs."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from ase import Atoms
from torch import Tensor, nn

from pmlip import novelty
from pmlip.backbones.base import Backbone, Graph, evaluating
from pmlip.methods._chunks import ChunkSize, run_in_chunks
from pmlip.novelty import Novelty, TrainingFeatures
from pmlip.samples import Outputs
from pmlip.structures.atoms import StructureError, numbered_from, system_index

ATOMS_IN_A_PASS = 128  # where the size of a pass is not tuned at run time


def run(
    model: nn.Module,
    backbone: Backbone,
    structures: list[Atoms],
    draws: Tensor | None,
    *,
    row_noise: bool,
    in_turn: bool,
    chunk_atoms: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Outputs (sample, system or atom, ...) of every structure with every draw; draws=None: one sample without noise.

    row_noise, in_turn: `Method.row_noise` and `Method.in_turn`.
    """
    if chunk_atoms is not None and chunk_atoms < 1:
        raise ValueError(f"chunk_atoms must be at least 1, got chunk_atoms={chunk_atoms}")
    noise = torch.zeros(1) if draws is None else draws
    if chunk_atoms is not None:
        chunk = ChunkSize(chunk_atoms, settled=True)
    elif row_noise or in_turn:
        # With row noise, the noise of a structure depends on the others in its pass, so the chunk size must not depend
        # on timings. Samples in turn need no memory for all of them, and share a part of their work.
        chunk = ChunkSize(ATOMS_IN_A_PASS * len(noise), settled=True)
    else:
        known: dict[torch.device, ChunkSize] = model.__dict__.setdefault("_chunks", {})
        chunk = known.setdefault(next(model.parameters()).device, ChunkSize())

    def forward(group: tuple[int, Graph], piece: Tensor) -> dict[str, Tensor]:
        start, graph = group
        # change the seed per group; otherwise row i of every group would draw the same noise
        own = None if draws is None else piece + start if row_noise else piece
        return {name: value.cpu() for name, value in model(graph, own).items()}

    with evaluating(model), torch.no_grad():
        outputs = run_in_chunks(
            partial(_build, backbone, structures),
            forward,
            sizes=[len(atoms) for atoms in structures],
            noise=noise,
            chunk=chunk,
            progress=progress,
        )
    _refuse_non_finite(outputs, structures)
    return outputs


def measure(
    backbone: Backbone,
    structures: list[Atoms],
    training: TrainingFeatures,
    *,
    chunk_atoms: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> Novelty:
    """The novelty of every structure, and the prediction of the backbone from the same passes."""

    def forward(group: tuple[int, Graph], _: Tensor) -> dict[str, Tensor]:
        gamma, outputs = novelty.lengths(backbone, group[1], training)
        return {name: value[None].cpu() for name, value in {**outputs, "gamma": gamma}.items()}

    with evaluating(backbone):
        found = run_in_chunks(
            partial(_build, backbone, structures),
            forward,
            sizes=[len(atoms) for atoms in structures],
            noise=torch.zeros(1),
            chunk=ChunkSize(chunk_atoms or ATOMS_IN_A_PASS, settled=True),
            progress=progress,
        )
    gamma = found.pop("gamma")[0]
    _refuse_non_finite(found, structures)
    novelty.refuse_nan(gamma, structures)
    predicted = Outputs({name: value[0] for name, value in found.items()}, system_index(structures))
    return training.novelty(gamma, predicted)


def measure_unusual(
    backbone: Backbone,
    structures: list[Atoms],
    latent: Novelty,
    gradients: TrainingFeatures,
    *,
    chunk_atoms: int | None,
) -> Novelty:
    """The novelty by latent features, with unusual structures measured again by site gradients.

    Gradients need a backward pass, but their size stays close to the errors far from the training set.
    """
    chosen = latent.unusual.nonzero().flatten().tolist()
    if not chosen:
        return latent
    try:
        again = measure(backbone, [structures[index] for index in chosen], gradients, chunk_atoms=chunk_atoms)
    except StructureError as error:
        raise StructureError(error.atoms, chosen[error.index], error.problem) from None
    return novelty.combined(latent, again)


def _build(backbone: Backbone, structures: list[Atoms], start: int, stop: int) -> tuple[int, Graph]:
    """The index of the first structure, and the graph of structures `start` to `stop` - 1."""
    with numbered_from(start):
        return start, backbone.graph(structures[start:stop])


def _refuse_non_finite(outputs: Mapping[str, Tensor], structures: list[Atoms]) -> None:
    # the stress of a structure without a cell is NaN by definition
    system = system_index(structures)
    for name, where in (("energy", torch.arange(len(structures))), ("forces", system)):
        bad = (~outputs[name].isfinite()).nonzero()
        if len(bad):
            sample, row = bad[0][:2].tolist()
            index = int(where[row])
            raise StructureError(
                structures[index],
                index,
                f"the predicted {name} of sample {sample} is NaN or infinite; check for overlapping atoms, and that "
                "training did not diverge",
            )
