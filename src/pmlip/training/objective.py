"""What a fine-tuning makes small: the CRPS of samples, each label measured in units of its error before."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from ase import Atoms
from torch import Tensor

from pmlip import losses
from pmlip.methods.base import FIXED_ATOMS, Method
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.samples import Outputs
from pmlip.structures.labels import labels
from pmlip.training.config import FinetuneConfig
from pmlip.training.distributed import summed, whole_batch

if TYPE_CHECKING:  # it takes seconds to import
    from lightning_fabric import Fabric


class Objective:
    """scales: mean absolute error of each label before fine-tuning.

    A step that changes forces moves all energies together by more than they differ from their labels. To pull them back
    would cost the forces, and their zero is fitted in the end, so most of that pull is left out. And early on noise
    throws energies so far apart that samples alone hardly pull their mean to the label, so the energies without noise
    are scored too, and with them the forces, whose mean over samples gains by it.
    """

    def __init__(self, model: Method, config: FinetuneConfig, scales: Mapping[str, float], fabric: "Fabric") -> None:
        self.model, self.config, self.fabric = model, config, fabric
        self.weights = {name: config.weights[name] / scale for name, scale in scales.items()}
        self.samples = config.samples if model.trains_on_samples else 1
        without_noise = {"energy": config.energy_without_noise, "forces": config.forces_without_noise}
        learned = model.trains_on_samples and not config.freeze_backbone
        point = {name: without_noise.get(name, 0.0) * weight for name, weight in self.weights.items()}
        self.point_weights = {name: weight for name, weight in point.items() if weight and learned}

    def draw(self, systems: int, generator: torch.Generator) -> Tensor:
        """Draws for a training step, with one more that is no noise where that is scored too."""
        draws = self.model.draw_for_training(self.samples, systems, generator)
        return torch.cat([draws, torch.zeros_like(draws[:1])]) if self.point_weights else draws

    @property
    def chunk(self) -> int | None:
        """Samples to take at once; where that is all of them, the one without noise does not need a pass of its own."""
        given = self.config.chunk
        return None if given is None or given >= self.samples else given

    @property
    def passes(self) -> int:
        """Of each structure in a step."""
        return self.samples + bool(self.point_weights)

    def loss(self, part: Sequence[Atoms], whole: Sequence[Atoms], outputs: Mapping[str, Tensor]) -> losses.Loss:
        """That of a batch, with gradients for the part of it that this process has."""
        target = labels(whole)
        energies = whole_batch(outputs["energy"].double(), len(whole), self.fabric)
        common = self.config.common_energy if self.config.offsets else 1.0
        samples = {name: values[: self.samples] for name, values in outputs.items()}
        drawn = energies[: self.samples]
        loss = self._score(self.weights, part, target, samples, drawn, fairness=self.config.fairness, common=common)
        if self.point_weights:
            point = {name: values[self.samples :] for name, values in outputs.items()}
            alone = energies[self.samples :]
            error = self._score(self.point_weights, part, target, point, alone, fairness=1.0, common=common)
            loss = loss._replace(total=loss.total + error.total)
        penalty = self.model.penalty()
        sharers = min(self.fabric.world_size, len(whole))  # processes that have structures
        return loss if penalty is None else loss._replace(total=loss.total + penalty / sharers)

    def without_structures(self, whole: Sequence[Atoms]) -> None:
        """What a process does for a batch that is too small for all of them."""
        whole_batch(
            torch.zeros(self.passes, 0, dtype=torch.float64, device=self.fabric.device), len(whole), self.fabric
        )

    def scores(self, valid: Sequence[Atoms], *, zero_counts: bool) -> dict[str, float]:
        """Scores of the model as it is on validation data; zero_counts: whether the zero of the energies does."""
        part = valid[self.fabric.global_rank :: self.fabric.world_size]
        count = self.model.fixed_samples or self.config.validation_samples
        outputs: Mapping[str, Tensor] = {"energy": torch.zeros(count, 0, dtype=torch.float64)}
        if part:
            outputs = self.model.sample(part, samples=count, seed=SEED_OF_FIT, chunk_atoms=FIXED_ATOMS)
        energies = whole_batch(outputs["energy"].double().to(self.fabric.device), len(valid), self.fabric).cpu()
        common = 1.0 if zero_counts else 0.0
        loss = self._score(self.weights, part, labels(valid), outputs, energies, fairness=1.0, common=common)
        terms = self.summed(loss)
        return {"valid": self.total(terms), **{f"valid_{name}": value for name, value in terms.items()}}

    def summed(self, loss: losses.Loss | None) -> dict[str, float]:
        """The terms of all processes, added up; None: this one had no structures."""
        own = {} if loss is None else loss.terms
        return summed({name: float(own.get(name, 0.0)) for name in self.weights}, self.fabric)

    def total(self, terms: Mapping[str, float]) -> float:
        return sum(weight * terms[name] for name, weight in self.weights.items())

    def _score(
        self,
        weights: Mapping[str, float],
        part: Sequence[Atoms],
        whole: Outputs,
        outputs: Mapping[str, Tensor],
        energies: Tensor,
        *,
        fairness: float,
        common: float,
    ) -> losses.Loss:
        """Of forces and stress the scores of this process's part; of the energies, which share a zero, of them all.

        whole: the labels of all structures.
        """
        carriers = losses.count_carriers(whole)
        total, terms = torch.zeros((), dtype=torch.float64, device=energies.device), dict[str, Tensor]()
        others = {name: weight for name, weight in weights.items() if name != "energy"}
        if part and others:
            scored = losses.crps_loss(outputs, labels(part), weights=others, fairness=fairness, carriers=carriers)
            total, terms = total + scored.total, dict(scored.terms)
        if "energy" in weights:
            scored = losses.crps_loss(
                {"energy": energies},
                whole,
                weights={"energy": weights["energy"]},
                fairness=fairness,
                carriers=carriers,
                common_energy=common,
            )
            total = total + scored.total
            if self.fabric.global_rank == 0:  # for all of them
                terms |= scored.terms
        return losses.Loss(total, terms)
