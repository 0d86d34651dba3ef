"""The training loss: the CRPS of samples, with each label scaled by its error before fine-tuning."""

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
    """The loss of a training step, and the scores of validation data.

    scales: mean absolute error of each label before fine-tuning.

    Two terms need an explanation. Training on forces moves all energies by a common amount. This amount is fitted after
    training, so the loss gives it only the small factor `common_energy`. Early in training the energies of samples
    spread so widely that their gradient hardly moves their mean. So the prediction without noise is scored too.
    """

    def __init__(
        self, model: Method, config: FinetuneConfig, scales: Mapping[str, float], processes: Processes
    ) -> None:
        self.learner, self.config, self.processes = model.learner(), config, processes
        self.weights = {name: config.weights[name] / scale for name, scale in scales.items()}
        self.samples = config.samples if self.learner.trains_on_samples else 1
        without_noise = {"energy": config.energy_without_noise, "forces": config.forces_without_noise}
        score_noise_free = self.learner.trains_on_samples and not config.freeze_backbone
        point = {name: without_noise.get(name, 0.0) * weight for name, weight in self.weights.items()}
        self.point_weights = {name: weight for name, weight in point.items() if weight and score_noise_free}

    def draw(self, systems: int, generator: torch.Generator) -> Tensor:
        """Draws for a training step; the last draw is zero if the noise-free prediction is scored too."""
        draws = self.learner.draw(self.samples, systems, generator)
        return torch.cat([draws, torch.zeros_like(draws[:1])]) if self.point_weights else draws

    @property
    def chunk(self) -> int | None:
        """Samples per pass; None: all samples and the noise-free prediction in one pass."""
        given = self.config.chunk
        return None if given is None or given >= self.samples else given

    @property
    def passes(self) -> int:
        """Forward passes per structure and step."""
        return self.samples + bool(self.point_weights)

    def loss(self, own_labels: Outputs, batch_labels: Outputs, outputs: Mapping[str, Tensor]) -> losses.Loss:
        """The loss of a batch, with gradients for the share of this process.

        own_labels: labels of the share of this process. batch_labels: labels of the whole batch.
        """
        energies = self.processes.gather_batch(outputs["energy"].double(), batch_labels.systems)
        common = self.config.common_energy if self.config.offsets else 1.0
        samples = {name: values[: self.samples] for name, values in outputs.items()}
        drawn = energies[: self.samples]
        loss = self._score(
            self.weights, own_labels, batch_labels, samples, drawn, fairness=self.config.fairness, common=common
        )
        if self.point_weights:
            point = {name: values[self.samples :] for name, values in outputs.items()}
            alone = energies[self.samples :]
            error = self._score(self.point_weights, own_labels, batch_labels, point, alone, fairness=1.0, common=common)
            loss = loss._replace(total=loss.total + error.total)
        penalty = self.learner.penalty()
        sharers = min(self.processes.count, batch_labels.systems)  # number of processes with structures
        return loss if penalty is None else loss._replace(total=loss.total + penalty / sharers)

    def without_structures(self, batch_labels: Outputs) -> None:
        """Join the collective call in `loss` from a process without structures in this batch."""
        none = torch.zeros(self.passes, 0, dtype=torch.float64, device=self.processes.device)
        self.processes.gather_batch(none, batch_labels.systems)

    def scores(
        self,
        model: Method,
        valid: Sequence[Atoms],
        own_labels: Outputs | None,
        batch_labels: Outputs,
        *,
        common_error_counts: bool,
    ) -> dict[str, float]:
        """Scores of a model on validation data.

        own_labels: labels of the share of this process; None: the share is empty. batch_labels: labels of all
        structures.
        common_error_counts: whether an energy error common to all structures counts.
        """
        count = model.fixed_samples or self.config.validation_samples
        outputs: Mapping[str, Tensor] = {"energy": torch.zeros(count, 0, dtype=torch.float64)}
        if own_labels is not None:
            share = valid[self.processes.share]
            outputs = model.sample(share, samples=count, seed=SEED_OF_FIT, chunk_atoms=FIXED_ATOMS)
        energies = outputs["energy"].double().to(self.processes.device)
        energies = self.processes.gather_batch(energies, batch_labels.systems).cpu()
        common = 1.0 if common_error_counts else 0.0
        loss = self._score(self.weights, own_labels, batch_labels, outputs, energies, fairness=1.0, common=common)
        terms = self.summed(loss)
        return {"valid": self.total(terms), **{f"valid_{name}": value for name, value in terms.items()}}

    def summed(self, loss: losses.Loss | None) -> dict[str, float]:
        """Loss terms of the whole batch. loss=None: this process has no structures."""
        own = {} if loss is None else loss.terms
        return self.processes.sum_terms({name: float(own.get(name, 0.0)) for name in self.weights})

    def total(self, terms: Mapping[str, float]) -> float:
        return sum(weight * terms[name] for name, weight in self.weights.items())

    def _score(
        self,
        weights: Mapping[str, float],
        own_labels: Outputs | None,
        batch_labels: Outputs,
        outputs: Mapping[str, Tensor],
        energies: Tensor,
        *,
        fairness: float,
        common: float,
    ) -> losses.Loss:
        """CRPS of the forces and stress of this process's share, and of the energies of the whole batch.

        Energies need the whole batch because `common` scales the error of their mean.
        """
        carriers = losses.count_carriers(batch_labels)
        total, terms = torch.zeros((), dtype=torch.float64, device=energies.device), dict[str, Tensor]()
        others = {name: weight for name, weight in weights.items() if name != "energy"}
        if own_labels is not None and others:
            scored = losses.crps_loss(outputs, own_labels, weights=others, fairness=fairness, carriers=carriers)
            total, terms = total + scored.total, dict(scored.terms)
        if "energy" in weights:
            scored = losses.crps_loss(
                {"energy": energies},
                batch_labels,
                weights={"energy": weights["energy"]},
                fairness=fairness,
                carriers=carriers,
                common_energy=common,
            )
            total = total + scored.total
            if self.processes.rank == 0:  # terms are summed over processes later
                terms |= scored.terms
        return losses.Loss(total, terms)
