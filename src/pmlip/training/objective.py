"""The loss of a fine-tuning: the CRPS of samples, each label in units of its error before fine-tuning."""

from collections.abc import Mapping, Sequence

import torch
from ase import Atoms
from torch import Tensor

from pmlip import losses
from pmlip.methods.base import FIXED_ATOMS, Method
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.samples import Outputs
from pmlip.training.config import FinetuneConfig
from pmlip.training.distributed import Processes


class Objective:
    """scales: mean absolute error of each label before fine-tuning.

    A step that changes forces shifts all energies together by more than they differ from their labels. Pulling them
    back would cost the forces, and the common offset is fitted at the end, so most of the batch-mean energy error is
    left out. Early in training, noise scatters energies so widely that samples hardly pull their mean to the label;
    so energies, and with them forces, are also scored without noise.
    """

    def __init__(
        self, model: Method, config: FinetuneConfig, scales: Mapping[str, float], processes: Processes
    ) -> None:
        self.learner, self.config, self.processes = model.learner(), config, processes
        self.weights = {name: config.weights[name] / scale for name, scale in scales.items()}
        self.samples = config.samples if self.learner.trains_on_samples else 1
        without_noise = {"energy": config.energy_without_noise, "forces": config.forces_without_noise}
        learned = self.learner.trains_on_samples and not config.freeze_backbone
        point = {name: without_noise.get(name, 0.0) * weight for name, weight in self.weights.items()}
        self.point_weights = {name: weight for name, weight in point.items() if weight and learned}

    def draw(self, systems: int, generator: torch.Generator) -> Tensor:
        """Draws for a training step, and one of zeros where the prediction without noise is scored too."""
        draws = self.learner.draw(self.samples, systems, generator)
        return torch.cat([draws, torch.zeros_like(draws[:1])]) if self.point_weights else draws

    @property
    def chunk(self) -> int | None:
        """Samples in one pass; None: all, with the one without noise."""
        given = self.config.chunk
        return None if given is None or given >= self.samples else given

    @property
    def passes(self) -> int:
        """Passes of each structure in a step."""
        return self.samples + bool(self.point_weights)

    def loss(self, part: Outputs, whole: Outputs, outputs: Mapping[str, Tensor]) -> losses.Loss:
        """The loss of a batch, with gradients for the share of this process.

        part, whole: labels of the share and of the batch.
        """
        energies = self.processes.gather_batch(outputs["energy"].double(), whole.systems)
        common = self.config.common_energy if self.config.offsets else 1.0
        samples = {name: values[: self.samples] for name, values in outputs.items()}
        drawn = energies[: self.samples]
        loss = self._score(self.weights, part, whole, samples, drawn, fairness=self.config.fairness, common=common)
        if self.point_weights:
            point = {name: values[self.samples :] for name, values in outputs.items()}
            alone = energies[self.samples :]
            error = self._score(self.point_weights, part, whole, point, alone, fairness=1.0, common=common)
            loss = loss._replace(total=loss.total + error.total)
        penalty = self.learner.penalty()
        sharers = min(self.processes.count, whole.systems)  # processes that have structures
        return loss if penalty is None else loss._replace(total=loss.total + penalty / sharers)

    def without_structures(self, whole: Outputs) -> None:
        """Take part in a batch that is too small for all processes."""
        none = torch.zeros(self.passes, 0, dtype=torch.float64, device=self.processes.device)
        self.processes.gather_batch(none, whole.systems)

    def scores(
        self, model: Method, valid: Sequence[Atoms], part: Outputs | None, whole: Outputs, *, zero_counts: bool
    ) -> dict[str, float]:
        """Scores of a model on validation data; zero_counts: whether a common energy offset counts.

        part: labels of the share of this process; None: it has none.
        """
        count = model.fixed_samples or self.config.validation_samples
        outputs: Mapping[str, Tensor] = {"energy": torch.zeros(count, 0, dtype=torch.float64)}
        if part is not None:
            share = valid[self.processes.share]
            outputs = model.sample(share, samples=count, seed=SEED_OF_FIT, chunk_atoms=FIXED_ATOMS)
        energies = outputs["energy"].double().to(self.processes.device)
        energies = self.processes.gather_batch(energies, whole.systems).cpu()
        common = 1.0 if zero_counts else 0.0
        loss = self._score(self.weights, part, whole, outputs, energies, fairness=1.0, common=common)
        terms = self.summed(loss)
        return {"valid": self.total(terms), **{f"valid_{name}": value for name, value in terms.items()}}

    def summed(self, loss: losses.Loss | None) -> dict[str, float]:
        """The terms of the whole batch; None: this process had no structures."""
        own = {} if loss is None else loss.terms
        return self.processes.sum_terms({name: float(own.get(name, 0.0)) for name in self.weights})

    def total(self, terms: Mapping[str, float]) -> float:
        return sum(weight * terms[name] for name, weight in self.weights.items())

    def _score(
        self,
        weights: Mapping[str, float],
        part: Outputs | None,
        whole: Outputs,
        outputs: Mapping[str, Tensor],
        energies: Tensor,
        *,
        fairness: float,
        common: float,
    ) -> losses.Loss:
        """Forces and stress of the share of this process; energies, which share an offset, of the whole batch."""
        carriers = losses.count_carriers(whole)
        total, terms = torch.zeros((), dtype=torch.float64, device=energies.device), dict[str, Tensor]()
        others = {name: weight for name, weight in weights.items() if name != "energy"}
        if part is not None and others:
            scored = losses.crps_loss(outputs, part, weights=others, fairness=fairness, carriers=carriers)
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
            if self.processes.rank == 0:  # once for all processes
                terms |= scored.terms
        return losses.Loss(total, terms)
