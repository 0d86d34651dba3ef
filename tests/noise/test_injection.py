import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from e3nn.nn import FullyConnectedNet
from torch import nn
from torch.utils.checkpoint import checkpoint

import pmlip
from conftest import randomise_noise
from perturbed_mlp import MLP, X, ddp_worker, make
from pmlip.noise.injection import find_sites, noisy_layers, vanish_with_input


class CheckpointedMLP(MLP):
    reentrant = False

    def forward(self, x):
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def assert_same(first, second, seed=0):
    for e in first.draw(3, seed=seed):
        torch.testing.assert_close(first(X, noise=e), second(X, noise=e), rtol=1e-12, atol=1e-12)


# what the noise does


def test_starts_as_the_module_it_was_made_from():
    module = MLP().double()
    model = pmlip.perturb(module, noise_dim=4, sites=["first", "second"])
    for e in (None, *model.draw(3)):
        assert torch.equal(model(X, noise=e), module(X))


def test_noise_is_a_shift_of_the_bias():
    """h = W x + b + W_noise W_z e, written out by hand."""
    model = make()
    e = model.draw(1, seed=5)[0]
    by_hand = copy.deepcopy(model.backbone)
    for layer in noisy_layers(by_hand):
        with torch.no_grad():
            layer.bias += layer.noise_weight @ model.noise.w_z @ e
    torch.testing.assert_close(model(X, noise=e), by_hand(X))
    assert not torch.allclose(model(X, noise=e), model(X))


def test_each_system_of_a_batch_gets_its_own_noise():
    model = make()
    e = model.draw(2)
    system = torch.tensor([0, 0, 1, 0, 1, 1])
    together = model(X, noise=e, rows={"row": system})
    for index in range(2):
        torch.testing.assert_close(together[system == index], model(X[system == index], noise=e[index]))


def test_axes_between_rows_and_features_share_the_noise_of_their_row():
    model = make()
    e, x = model.draw(4), torch.randn(4, 4, 5, dtype=torch.float64)
    together = model(x, noise=e, rows={"row": torch.arange(4)})
    for row in range(4):
        torch.testing.assert_close(together[row], model(x[row], noise=e[row]))
    leading = model(x[None], noise=e[:3, None].expand(-1, 4, -1), rows={"row": None})  # (sample, system) noise
    torch.testing.assert_close(leading[2], model(x, noise=e[2]))


def test_the_module_handed_in_is_left_untouched():
    module = MLP()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = randomise_noise(pmlip.perturb(module, sites="first"))
    model(X.float(), noise=model.draw(1)[0]).sum().backward()
    assert type(module.first[0]) is nn.Linear
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_every_noise_weight_gets_a_gradient_from_the_start():
    model = pmlip.perturb(MLP(), noise_dim=4, sites=["first", "second"])
    model(X.float(), noise=model.draw(1)[0]).square().sum().backward()
    assert all(layer.noise_weight.grad.abs().sum() > 0 for layer in noisy_layers(model))
    assert model.noise.w_z.grad is not None


# what it survives


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_deepcopy_and_pickle(copied):
    model = make()
    model(X, noise=model.draw(1)[0])
    twin = copied(model)
    assert_same(model, twin)
    with torch.no_grad():
        twin.noise.w_z.zero_()  # the copy's own, so its noise is gone and the original's is not
    e = model.draw(1)[0]
    torch.testing.assert_close(twin(X, noise=e), twin(X))
    assert not torch.allclose(model(X, noise=e), model(X))


def test_state_dict_round_trip():
    model, other = make(), make(seed=9)
    other.load_state_dict(model.state_dict())
    assert_same(model, other)


def test_weights_of_the_original_stay_loadable():
    module = MLP().double()
    model = make()
    weights = [layer.noise_weight.clone() for layer in noisy_layers(model)]
    missing, unexpected = model.backbone.load_state_dict(module.state_dict(), strict=False)
    assert missing == ["first.0.noise_weight", "second.2.noise_weight"]
    assert not unexpected
    assert torch.equal(model(X), module(X))
    assert all(torch.equal(a, b.noise_weight) for a, b in zip(weights, noisy_layers(model), strict=True))


def test_an_incomplete_perturbed_state_is_refused():
    model = make()
    state = model.state_dict()
    del state["backbone.first.0.noise_weight"]
    with pytest.raises(RuntimeError, match=r"first\.0\.noise_weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize("part", ["whole", "backbone"])
def test_compile(part):
    """Compiled once, it follows the noise from call to call, and gives the same gradient."""
    model, eager = make(), make()
    e = model.draw(3)
    if part == "whole":
        compiled = torch.compile(model, backend="aot_eager")
    else:
        model.backbone.compile(backend="aot_eager")
        compiled = model
    torch.testing.assert_close(compiled(X), eager(X))
    for row in e:
        torch.testing.assert_close(compiled(X, noise=row), eager(X, noise=row))
    system = torch.tensor([0, 0, 1, 0, 1, 1])
    for pair in (e[:2], e[1:]):
        torch.testing.assert_close(
            compiled(X, noise=pair, rows={"row": system}), eager(X, noise=pair, rows={"row": system})
        )
    compiled(X, noise=e[0]).sum().backward()
    eager(X, noise=e[0]).sum().backward()
    for given, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(given.grad, expected.grad)


@dataclass
class Result:
    value: torch.Tensor


class CheckpointedToDataclass(CheckpointedMLP):
    def forward(self, x):
        return Result(super().forward(x))


def test_activation_checkpointing_with_outputs_in_a_dataclass():
    plain, checkpointed = make(), make(CheckpointedToDataclass)
    e = plain.draw(2)
    plain(X, noise=e[0]).sum().backward()
    out = checkpointed(X, noise=e[0]).value
    checkpointed(X, noise=e[1])
    out.sum().backward()
    for given, expected in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(given.grad, expected.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, monkeypatch):
    """Layers run again in the backward pass with the noise of their own forward pass, whatever ran in between."""
    monkeypatch.setattr(CheckpointedMLP, "reentrant", reentrant)
    plain, checkpointed = make(), make(CheckpointedMLP)
    checkpointed.load_state_dict(plain.state_dict())
    e = plain.draw(3)
    x = X.clone().requires_grad_()  # what reentrant checkpointing needs to see a gradient at all
    for model in (plain, checkpointed):
        first, second = model(x, noise=e[0]).sum(), model(x, noise=e[1]).square().sum()
        model(x, noise=e[2])
        (first + second).backward()
    for given, expected in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(given.grad, expected.grad)


def test_several_models_in_one_process_and_in_one_ensemble():
    models = nn.ModuleList([make(), make(seed=1)])
    e = models[0].draw(2)
    alone = [make()(X, noise=e[0]), make(seed=1)(X, noise=e[1])]
    models[0].noise.set_draw(e[0])
    models[1].noise.set_draw(e[1])
    for model, expected in zip(models, alone, strict=True):  # each still has its own noise in force
        torch.testing.assert_close(model.backbone(X), expected)
    assert len(models.state_dict()) == 2 * len(models[0].state_dict())


def test_distributed_data_parallel(tmp_path):
    """Two processes, half the batch each: the gradient of the whole batch."""
    torch.multiprocessing.spawn(ddp_worker, args=(str(tmp_path),), nprocs=2)
    model = make()
    e = model.draw(2)
    halves = [model(X[3 * rank : 3 * rank + 3], noise=e[rank]).square().mean() for rank in range(2)]
    (sum(halves) / 2).backward()
    for given, parameter in zip(torch.load(tmp_path / "gradients.pt"), model.parameters(), strict=True):
        torch.testing.assert_close(given, parameter.grad)


def test_noise_is_gone_after_the_call_and_after_the_backward_pass():
    model, e = make(), make().draw(1)[0]
    plain = model(X)
    assert torch.equal(model.backbone(X), plain)
    out = model(X, noise=e)
    assert torch.equal(model.backbone(X), plain)
    out.sum().backward()
    assert torch.equal(model.backbone(X), plain)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(X[:, :2], noise=e)
    assert torch.equal(model.backbone(X), plain)


# fold


def test_fold_is_the_sample_as_a_plain_module():
    model = make()
    folded = model.fold(sample=2, seed=3)
    assert type(folded) is MLP
    assert {type(part) for part in folded.modules()} == {type(part) for part in MLP().modules()}
    assert folded.state_dict().keys() == MLP().state_dict().keys()
    torch.testing.assert_close(folded(X), model(X, noise=model.draw(3, seed=3)[2]), rtol=1e-12, atol=1e-13)
    pickle.loads(pickle.dumps(folded))


def test_fold_gives_a_bias_to_a_layer_without_one():
    module = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Tanh()).double()
    model = randomise_noise(pmlip.perturb(module, sites="0"))
    torch.testing.assert_close(model.fold(sample=0)(X), model(X, noise=model.draw(1)[0]))


def test_subclasses_of_linear_keep_what_they_do():
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    module = nn.Sequential(Doubling(5, 3)).double()
    model = randomise_noise(pmlip.perturb(module, sites="0"))
    assert isinstance(model.backbone[0], Doubling)
    torch.testing.assert_close(model(X), module(X))


# layers of e3nn


def radial(**options):
    torch.manual_seed(0)
    net = FullyConnectedNet([5, 16, 3], torch.nn.functional.silu).double()
    return net, randomise_noise(pmlip.perturb(net, sites="layer0"), **options)


def test_e3nn_layers_start_as_they_were_and_fold():
    net, model = radial(scale=0.0)
    torch.testing.assert_close(model(X, noise=model.draw(1)[0]), net(X))
    net, model = radial()
    e = model.draw(2)
    assert not torch.allclose(model(X, noise=e[1]), net(X))
    torch.testing.assert_close(model.fold(sample=1)(X), model(X, noise=e[1]))
    torch.testing.assert_close(copy.deepcopy(model.fold(sample=1))(X), model(X, noise=e[1]))


def test_e3nn_layers_keep_mapping_zero_to_zero():
    """At the cutoff all radial features are zero; noise must not put a message there."""
    _, model = radial(scale=2.0)
    e = model.draw(1)[0]
    shrinking = torch.tensor([1e-1, 1e-2, 1e-3, 0.0], dtype=torch.float64)[:, None] * X[0]
    messages = model(shrinking, noise=e).detach().norm(dim=-1)
    assert bool((messages.diff() < 0).all())
    assert float(messages[-1]) == 0


def test_the_envelope_is_smooth_at_zero_and_one_far_away():
    x = torch.zeros(1, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(vanish_with_input(x).sum(), x)
    assert not gradient.any()
    assert float(vanish_with_input(torch.ones(1, 5))) == pytest.approx(1)


def test_an_envelope_of_ones_own():
    module = nn.Sequential(nn.Linear(5, 3)).double()
    site = pmlip.Site("0", envelope=vanish_with_input)
    model = randomise_noise(pmlip.perturb(module, sites=[site]))
    zero = torch.zeros(1, 5, dtype=torch.float64)
    torch.testing.assert_close(model(zero, noise=model.draw(1)[0]), module(zero))
    with pytest.raises(ValueError, match="has an envelope"):
        model.fold(sample=0)


# choosing sites


@pytest.mark.parametrize(
    ("sites", "found"),
    [
        ("first", ["first.0"]),
        ("second", ["second.2"]),  # past the norm and the dropout
        ("*.4", ["second.4"]),
        ("first.*", ["first.0", "first.2"]),  # a star stays between two dots, and passes over the activation
        ("*", ["first.0", "second.2"]),
        (["first.0", "second"], ["first.0", "second.2"]),
        (["first", "first.0"], ["first.0"]),
        (lambda name, module: isinstance(module, nn.Linear), ["first.0", "first.2", "second.2", "second.4"]),
    ],
)
def test_sites_by_name_pattern_or_function(sites, found):
    assert [site.name for site in find_sites(MLP(), sites)] == found


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ("frist.0", r"no module matches site 'frist.0'; candidates: first.0"),
        (lambda name, module: False, r"selected no module; candidates: first.0, first.2"),
        ([], "no sites were given; candidates"),
        ("first.1", r"'first.1' \(SiLU\) is not and does not contain a layer"),
        (None, "MLP has no adapter"),
    ],
)
def test_sites_that_match_nothing_are_refused(sites, message):
    with pytest.raises(ValueError, match=message):
        pmlip.perturb(MLP(), sites=sites)


def test_bad_arguments_are_refused():
    for dim in (0, 64.5):
        with pytest.raises(ValueError, match=f"noise_dim must be a whole number, at least 1, got {dim}"):
            pmlip.perturb(MLP(), noise_dim=dim, sites="first")
    with pytest.raises(ValueError, match="perturbed already"):
        pmlip.perturb(make(), sites="first")
    with pytest.raises(ValueError, match="perturbed already"):
        pmlip.perturb(make().backbone, sites="first")
    with pytest.raises(ValueError, match="numbered from 0"):
        make().fold(sample=-1)


def test_an_index_of_the_wrong_length_is_refused():
    model = make()
    with pytest.raises(ValueError, match=r"site 'first.0' has 6 rows, but the system index of its 'row' rows has 3"):
        model(X, noise=model.draw(2), rows={"row": torch.tensor([0, 1, 1])})
