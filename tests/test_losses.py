import numpy as np
import pytest
import torch
from torch import nn

from pmlip.losses import backpropagate, crps_loss
from pmlip.samples import Outputs
from pmlip.scores import fair_crps

SYSTEM = torch.tensor([0, 0, 0, 1])
NAN = torch.nan


def batch(samples=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"energy": (2,), "forces": (4, 3), "stress": (2, 6)}
    predicted = {name: torch.randn(samples, *shape, generator=generator) for name, shape in shapes.items()}
    label = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return predicted, Outputs(label, SYSTEM)


def test_it_is_the_formula_of_the_paper():
    """CRPS(E/N) + CRPS(F), the entries of each structure averaged first, then the structures."""
    predicted, label = batch()
    atoms = torch.tensor([3, 1])
    energy = fair_crps(predicted["energy"] / atoms, label.energy / atoms).mean()
    forces = fair_crps(predicted["forces"].double(), label.forces)
    by_structure = torch.stack([forces[:3].mean(), forces[3:].mean()]).mean()
    stress = fair_crps(predicted["stress"].double(), label.stress).mean()
    loss = crps_loss(predicted, label)
    torch.testing.assert_close(loss.total, energy + by_structure)
    weighed = crps_loss(predicted, label, weights={"energy": 0.5, "forces": 2.0, "stress": 3.0})
    torch.testing.assert_close(weighed.total, 0.5 * energy + 2 * by_structure + 3 * stress)
    torch.testing.assert_close(weighed.terms["stress"], stress)


def test_missing_labels_leave_both_terms():
    """The loss is that of the labelled structures alone, and unlabelled entries get no gradient, not even to spread."""
    predicted, label = batch()
    predicted = {name: value.requires_grad_() for name, value in predicted.items()}
    label.energy[0] = NAN
    label.forces[3] = NAN
    label.forces[0, 1] = NAN
    loss = crps_loss(predicted, label, weights={"energy": 1.0, "forces": 1.0, "stress": 1.0})
    forces = fair_crps(predicted["forces"].double(), label.forces.nan_to_num())[:3].flatten()
    torch.testing.assert_close(loss.terms["forces"], torch.cat([forces[:1], forces[2:]]).mean())
    loss.total.backward()
    assert not predicted["energy"].grad[:, 0].any()
    assert not predicted["forces"].grad[:, 3].any()
    assert not predicted["forces"].grad[:, 0, 1].any()
    assert bool(predicted["forces"].grad[:, 0, 0].any())


def test_what_energies_have_in_common_counts_as_much_as_is_asked():
    """Their mean residual per atom is moved to that share of itself; a shift of them all then matters as little."""
    predicted, label = batch()
    atoms = torch.tensor([3, 1])
    residual = (predicted["energy"] - label.energy) / atoms
    expected = fair_crps(residual - 0.7 * residual.mean(), torch.zeros(2)).mean()
    torch.testing.assert_close(crps_loss(predicted, label, weights={"energy": 1.0}, common_energy=0.3).total, expected)
    moved = predicted | {"energy": predicted["energy"] + 5.0 * atoms}
    scores = [crps_loss(given, label, weights={"energy": 1.0}, common_energy=0.0).total for given in (predicted, moved)]
    torch.testing.assert_close(*scores, rtol=1e-6, atol=0)
    label.energy[1] = NAN  # one is left, and has nothing in common with others
    alone = crps_loss(predicted, label, weights={"energy": 1.0}, common_energy=0.0).total
    torch.testing.assert_close(alone, fair_crps(residual[:, :1], torch.zeros(1)).mean())


def test_a_term_without_any_label_is_zero_and_a_batch_without_any_is_refused():
    predicted, label = batch()
    label.energy[:] = NAN
    assert float(crps_loss(predicted, label).terms["energy"]) == 0
    label.forces[:] = NAN
    with pytest.raises(ValueError, match="no structure of this batch carries a label of energy or forces"):
        crps_loss(predicted, label)


def test_residuals_are_formed_in_double_precision():
    """Near 1e4 eV single precision resolves 1e-3 eV; the loss must see 1e-6."""
    true = torch.tensor([-31234.567891, -9876.54321], dtype=torch.float64)
    _, label = batch()
    label = Outputs({**label.named, "energy": true}, SYSTEM)
    shifts = torch.tensor([[1e-6, -2e-6], [3e-6, 4e-6]], dtype=torch.float64)
    loss = crps_loss({"energy": true + shifts}, label, weights={"energy": 1.0})
    expected = fair_crps(shifts / torch.tensor([3, 1]), torch.zeros(2, dtype=torch.float64)).mean()
    assert float(loss.total) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "weights", "message"),
    [
        ({}, {"energy": -1.0}, "weight of energy must not be negative, got -1"),
        ({}, {"energy": torch.nan}, "must not be negative, got nan"),
        ({}, {"energy": 0.0}, "all loss weights are zero"),
        ({}, {"dipole": 1.0}, "'dipole', which is not an output; allowed: energy, forces, stress"),
        ({"forces": torch.zeros(4, 5, 3)}, {"forces": 1.0}, r"forces: samples \(4, 5, 3\) do not fit labels \(4, 3\)"),
    ],
)
def test_bad_input_is_refused(change, weights, message):
    predicted, label = batch()
    with pytest.raises(ValueError, match=message):
        crps_loss({**predicted, **change}, label, weights=weights)


@pytest.mark.parametrize("value", [NAN, torch.inf])
def test_predictions_that_are_no_numbers_are_a_failure_not_bad_input(value):
    predicted, label = batch()
    with pytest.raises(FloatingPointError, match="predicted energy hold a NaN or an infinite"):
        crps_loss({**predicted, "energy": torch.full((4, 2), value)}, label, weights={"energy": 1.0})


def test_infinite_labels_are_refused():
    predicted, label = batch()
    label.forces[0, 0] = torch.inf
    with pytest.raises(ValueError, match="a label of forces is infinite"):
        crps_loss(predicted, label)


class Conservative(nn.Module):
    """Energies of K samples with forces by autograd, and a dropout that must see the same numbers twice."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1)).double()

    def forward(self, noise):
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            x = torch.ones(len(noise), 4, 3, dtype=torch.float64).requires_grad_()
            energy = self.net(torch.cat([x, noise[:, None].expand(-1, 4, -1)], -1)).sum((1, 2))
            (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=differentiable)
        return {"energy": torch.stack([energy, energy**2], 1), "forces": -gradient}


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_two_passes_give_the_joint_gradient_also_with_dropout(chunk):
    _, label = batch()
    torch.manual_seed(0)
    model, noise = Conservative(), torch.randn(8, 2, dtype=torch.float64)

    def predict(piece):
        # row by row, so that the joint pass uses up the random numbers of the dropout in the same order
        rows = [model(row[None]) for row in piece]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    gradients, totals = [], []
    for size in (None, chunk):
        model.zero_grad()
        torch.manual_seed(3)
        loss = backpropagate(predict, noise, lambda out: crps_loss(out, label), chunk=size)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        totals.append(loss.total)
    torch.testing.assert_close(totals[1], totals[0])
    assert not totals[0].requires_grad
    for joint, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, joint, rtol=1e-9, atol=1e-12)


def test_two_passes_hold_the_graph_of_one_chunk_only():
    """The number of samples that are alive with their graph at once, counted at the layer that makes them."""
    most = {}
    _, label = batch()
    for chunk in (None, 2):
        alive, peak = set(), 0
        model = Conservative()

        def predict(piece, model=model, alive=alive):
            nonlocal peak
            outputs = model(piece)
            if outputs["energy"].requires_grad:
                token = object()
                alive.add(token)
                peak = max(peak, len(alive) * len(piece))
                outputs["energy"].register_hook(lambda _, alive=alive, token=token: alive.discard(token))
            return outputs

        backpropagate(predict, torch.randn(8, 2, dtype=torch.float64), lambda out: crps_loss(out, label), chunk=chunk)
        most[chunk] = peak
    assert most == {None: 8, 2: 2}


def test_two_passes_bear_an_output_that_no_parameter_reaches():
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    _, label = batch()
    noise = torch.randn(4, 2, dtype=torch.float64)
    gradients = []
    for chunk in (None, 2):
        weight.grad = None
        backpropagate(
            lambda e: {"energy": weight * e, "forces": torch.zeros(len(e), 4, 3, dtype=torch.float64)},
            noise,
            lambda out: crps_loss(out, label),
            chunk=chunk,
        )
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 sample, got chunk=0"):
        backpropagate(lambda e: {}, torch.zeros(2, 2), lambda out: None, chunk=0)


def test_the_loss_is_least_for_the_true_spread():
    """Proper: among Gaussian samples of different widths the true width scores best."""
    random = np.random.default_rng(0)
    target = torch.from_numpy(random.normal(size=(20_000, 3)))
    label = Outputs({"forces": target}, torch.arange(20_000))
    draws = torch.from_numpy(random.normal(size=(8, 20_000, 3)))
    totals = [
        float(crps_loss({"forces": width * draws}, label, weights={"forces": 1.0}).total) for width in (0.7, 1.0, 1.4)
    ]
    assert totals[1] == min(totals)
