"""The CRPS of a batch, CRPS(E/N) + CRPS(F) (+ CRPS(stress)), reduced and weighted, and its gradient in chunks."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pmlip.samples import PER_ATOM, Outputs, mean_per_system
from pmlip.scores import almost_fair_crps

DEFAULT_WEIGHTS: Mapping[str, float] = {"energy": 1.0, "forces": 1.0}


class Loss(NamedTuple):
    total: Tensor  # the weighted sum
    terms: dict[str, Tensor]  # unweighted terms


def crps_loss(
    samples: Mapping[str, Tensor],
    labels: Outputs,
    *,
    weights: Mapping[str, float] = DEFAULT_WEIGHTS,
    fairness: float = 1.0,
    carriers: Mapping[str, int] | None = None,
    common_energy: float = 1.0,
) -> Loss:
    """Return the sum over outputs of weight * CRPS, averaged over the structures that carry the label.

    Energies are scored per atom; entries of forces and stress are averaged within their structure. Residuals are
    computed in double precision, because single precision is too coarse for total energies. Missing labels (NaN) are
    left out of both terms of the score; otherwise the spread could grow there without a penalty.

    carriers: number of structures that carry each label in the full batch, if this call sees a part of it. The losses
    and gradients of the parts then sum to the full loss; the energy term does so only if common_energy = 1.

    common_energy: factor on the batch-mean energy error per atom (mean over samples and structures); 0 ignores a
    constant offset of the energies. A batch with a single energy label is not affected.
    """
    check_weights(weights, allowed=samples)
    terms: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight == 0:
            continue
        prediction, label = samples[name], labels[name].to(samples[name].device)
        if prediction.shape[1:] != label.shape:
            raise ValueError(
                f"{name}: samples {tuple(prediction.shape)} do not fit labels {tuple(label.shape)}; "
                "expected (sample, *label shape)"
            )
        if label.isinf().any():
            raise ValueError(f"a label of {name} is infinite; remove it, or set it to NaN if it is missing")
        total_carriers = None if carriers is None else carriers[name]
        residual = _residual(name, prediction, label, labels, common_energy)
        terms[name] = _mean_crps(name, residual, label, labels, fairness, total_carriers)
    if carriers is None and not any(bool(labels[name].isfinite().any()) for name in terms):
        raise ValueError(f"no structure of this batch carries a label of {' or '.join(terms)}")
    total = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
    if not total.isfinite():
        bad = [name for name, term in terms.items() if not term.isfinite()]
        raise FloatingPointError(
            f"the predicted {' and '.join(bad)} hold a NaN or an infinite value; in training, lower the learning rates"
        )
    return Loss(total, terms)


def check_weights(weights: Mapping[str, float], *, allowed: Mapping[str, object]) -> None:
    """Raise an error for a weight of an unknown output, a negative weight, or weights that are all zero."""
    for name, weight in weights.items():
        if name not in allowed:
            raise ValueError(f"weights has {name!r}, which is not an output; allowed: {', '.join(allowed)}")
        if not weight >= 0:
            raise ValueError(f"the weight of {name} must not be negative, got {weight}")
    if not any(weights.values()):
        raise ValueError("all loss weights are zero; at least one must be positive")


def count_carriers(labels: Outputs) -> dict[str, int]:
    """Return the number of structures that carry each label, completely or in part."""
    counts = {}
    for name, label in labels.items():
        present = label.isfinite().flatten(1).any(-1) if label.dim() > 1 else label.isfinite()
        counts[name] = len(labels.system[present].unique()) if name in PER_ATOM else int(present.sum())
    return counts


def _residual(name: str, prediction: Tensor, label: Tensor, labels: Outputs, common_energy: float) -> Tensor:
    """Return prediction - label in double precision, per atom for energies; 0 for missing labels."""
    present = label.isfinite()
    residual = torch.where(present, prediction.double() - label, 0.0)
    if name != "energy":
        return residual
    residual = residual / labels.atoms_per_system.to(label.device)
    if present.sum() < 2:  # one label: the batch mean would be its own error
        return residual
    batch_mean = residual.sum() / (len(residual) * present.sum())
    return torch.where(present, residual - (1 - common_energy) * batch_mean, 0.0)


def _mean_crps(
    name: str, residual: Tensor, label: Tensor, labels: Outputs, fairness: float, carriers: int | None
) -> Tensor:
    present = label.isfinite()
    system, systems = labels.system.to(label.device), labels.systems
    score = almost_fair_crps(residual, torch.zeros_like(label), fairness=fairness)
    # average over the labelled entries of each structure, then over structures with labels
    if name in PER_ATOM:
        mean = mean_per_system(score, system, systems)
        share = mean_per_system(present.double(), system, systems)
    else:
        mean = score.reshape(systems, -1).mean(-1)
        share = present.double().reshape(systems, -1).mean(-1)
    labelled = share > 0
    total = torch.where(labelled, mean / share.clamp(min=1e-12), 0.0).sum()
    return total / (labelled.sum() if carriers is None else torch.tensor(carriers)).clamp(min=1)


def backpropagate(
    predict: Callable[[Tensor], Mapping[str, Tensor]],
    noise: Tensor,
    loss: Callable[[Mapping[str, Tensor]], Loss],
    *,
    chunk: int | None = None,
) -> Loss:
    """Add the gradient of `loss(predict(noise))` to the parameters; return the detached loss.

    chunk: number of samples per chunk of noise (sample, ...). Memory then does not grow with K, and the gradient is the
    same. A first pass predicts all samples without a graph and computes dLoss/dprediction. A second pass runs each
    chunk again and backpropagates its part of dLoss/dprediction. It costs one more forward pass. Random layers of the
    backbone (dropout) see the same random numbers in both passes.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk must hold at least 1 sample, got chunk={chunk}")
    if chunk is None or chunk >= len(noise):
        joint = loss(predict(noise))
        joint.total.backward()
        return _detached(joint)

    parts, states = [], []
    with torch.no_grad():
        for piece in noise.split(chunk):
            states.append(_random_state())
            parts.append(predict(piece))
    leaves = {name: torch.cat([part[name].detach() for part in parts]).requires_grad_() for name in parts[0]}
    value = loss(leaves)
    value.total.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for start, state in zip(range(0, len(noise), chunk), states, strict=True):
        with torch.random.fork_rng(devices=range(len(state) - 1)):
            _set_random_state(state)
            outputs = predict(noise[start : start + chunk])
        used = [name for name in gradients if outputs[name].requires_grad]
        torch.autograd.backward(
            [outputs[name] for name in used],
            [gradients[name][start : start + chunk].to(outputs[name]) for name in used],
        )
    return _detached(value)


def _detached(loss: Loss) -> Loss:
    return Loss(loss.total.detach(), {name: term.detach() for name, term in loss.terms.items()})


def _random_state() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.random.get_rng_state(), *cuda]


def _set_random_state(state: list[Tensor]) -> None:
    torch.random.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])
