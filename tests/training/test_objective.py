"""What a fine-tuning makes small, on a tiny potential in double precision."""

from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from molecules import CONFIG, assert_same, model, molecules
from pmlip.samples import mean_per_system
from pmlip.structures.labels import labels
from pmlip.training.baseline import fit_offsets_and_measure_errors
from pmlip.training.batches import LabelledStructures
from pmlip.training.distributed import Processes
from pmlip.training.finetuning import finetune
from pmlip.training.objective import Objective
from pmlip_bench.silica.variants import AS_IN_THE_PAPER

pytestmark = pytest.mark.usefixtures("quick_energy_zero")


def objective(trained, config, scales):
    return Objective(trained, config, scales, Processes())


def gradients(config):
    """Those of a first step, by parameter, before the optimiser uses them."""
    trained, found = model(), {}

    def look(optimizer, *_, **__):
        found.update({name: parameter.grad.clone() for name, parameter in trained.named_parameters()})
        raise InterruptedError

    handle = register_optimizer_step_pre_hook(look)
    try:
        finetune(trained, molecules(), config=replace(config, clip=1e9, start=0.0))
    except InterruptedError:
        return trained, found
    finally:
        handle.remove()


@pytest.mark.parametrize("label", ["energy", "forces"])
def test_predictions_without_noise_are_learned_beside_those_of_samples(label):
    """The gradient is that of the samples and that of the absolute error of the prediction without noise, added."""
    config = replace(CONFIG, batch=10, energy=0.3, forces=0.7, **AS_IN_THE_PAPER)
    learned = replace(config, **{f"{label}_without_noise": 2.0})
    trained, joint = gradients(learned)
    _, samples_alone = gradients(config)
    data = molecules()
    target = labels(data)
    trained.zero_grad()
    missed = (trained(trained.backbone.graph(data), None)[label][0] - target[label]).abs()
    if label == "energy":
        missed = missed / target.atoms_per_system
    else:
        missed = mean_per_system(missed, target.system, target.systems)
    before = fit_offsets_and_measure_errors(model(), LabelledStructures(data), config)[1][
        label
    ]  # the unit of the errors
    (2.0 * config.weights[label] / before * missed.mean()).backward()
    for name, parameter in trained.named_parameters():
        expected = 0 if parameter.grad is None else parameter.grad
        torch.testing.assert_close(joint[name], samples_alone[name] + expected, msg=name)
        if "noise" in name:
            assert not torch.any(torch.as_tensor(expected))
    assert_same(joint, gradients(replace(learned, chunk=1))[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "each"),
    [
        ({}, 4),
        ({"energy_without_noise": 0.0}, 4),
        ({"forces_without_noise": 0.0}, 4),
        ({"energy_without_noise": 0.0, "forces_without_noise": 0.0}, 3),
        ({"energy": 0.0, "forces_without_noise": 0.0}, 3),
        ({"freeze_backbone": True}, 3),
    ],
)
def test_a_pass_without_noise_is_made_only_where_something_is_learned_from_it(change, each):
    """5 structures in batches of 4: the second has one."""
    data, trained = molecules(5), model()
    passed = []
    handle = trained.backbone.register_forward_pre_hook(
        lambda _, given: passed.append(given[0].systems) if trained.training else None
    )
    done = finetune(trained, data, config=replace(CONFIG, steps=3, epochs=None, **change))
    handle.remove()
    assert passed == [4 * each, each, 4 * each]
    assert done.passes == sum(passed)


def test_a_chunk_of_all_samples_is_no_chunk():
    given = {
        chunk: objective(model(), replace(CONFIG, samples=3, chunk=chunk), {"energy": 1.0}).chunk for chunk in (2, 3, 4)
    }
    assert given == {2: 2, 3: None, 4: None}


@pytest.mark.parametrize("offsets", [True, False])
def test_the_zero_of_the_energies_counts_only_where_it_is_not_fitted_in_the_end(offsets):
    """A shift of all energies changes neither the loss nor which weights are kept."""
    config = replace(CONFIG, offsets=offsets, common_energy=0.0, energy=1.0, batch=10)
    data, trained = molecules(), model()
    found = objective(trained, config, {"energy": 1.0, "forces": 1.0})
    target = labels(data)
    draws = found.draw(len(data), torch.Generator().manual_seed(0))
    seen = []
    for shift in (0.0, 0.5):
        trained.backbone.shift_all(shift)
        loss = found.loss(target, target, trained(trained.backbone.graph(data), draws))
        scored = found.scores(trained, data, target, target, common_error_counts=not offsets)
        seen.append((float(loss.total.detach()), scored["valid"]))
    assert (seen[0] == pytest.approx(seen[1], rel=1e-9)) == offsets


def test_scores_of_a_process_without_structures_are_nothing():
    """Of two processes the second has none of one validation structure, and forces alone are learned."""
    found = objective(model(), CONFIG, {"forces": 1.0})
    assert (
        found._score(found.weights, None, labels(molecules(1)), {}, torch.zeros(4, 0), fairness=1.0, common=1.0).total
        == 0
    )
