import shutil
from dataclasses import replace

import pytest
import torch

from contract import rotation
from pmlip.nbody.data import Trajectories
from pmlip.nbody.egnn import EGNNConfig
from pmlip.nbody.p_egnn import PEGNN
from pmlip_bench.nbody.methods import BLIP, PBLIP, Deterministic, Ensemble, MCDropout, leave_one_out, parameter_table
from pmlip_bench.nbody.training import DivergedError, Recipe, _gradient, train

SMALL = EGNNConfig(layers=2, width=8)


def data(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(count, 5, 3, generator=generator) for _ in range(2))
    q = (torch.rand(count, 5, generator=generator) < 0.5).float() * 2 - 1
    return Trajectories(x, v, q, x + 0.7 * v + 0.1 * torch.randn(count, 5, 3, generator=generator), v)


def pegnn(**options):
    torch.manual_seed(0)
    return PEGNN(SMALL, **options)


def test_samples_are_functions_of_their_number_and_not_of_the_batch(monkeypatch):
    method, all_of_it = pegnn(), data()
    for parameter in method.network.noise_parameters():
        torch.nn.init.normal_(parameter)
    out = method.sample(all_of_it, samples=6, seed=3)
    assert out.positions.shape == (6, 200, 3)
    assert out.systems == 40
    monkeypatch.setattr("pmlip.nbody.p_egnn.CHUNK", 20)
    again = method.sample(all_of_it.part(4, 9), samples=4, seed=3)
    torch.testing.assert_close(again.positions, out.positions[:4, 20:45])


def test_an_ensemble_gives_what_its_members_give():
    torch.manual_seed(0)
    members = [Deterministic(SMALL) for _ in range(4)]
    alone = [member.sample(data(), samples=1).positions[0] for member in members]
    triples = leave_one_out(members)
    assert len(triples) == 4
    for left_out, triple in enumerate(triples):
        out = triple.sample(data(), samples=3)
        expected = torch.stack([alone[i] for i in range(4) if i != left_out])
        torch.testing.assert_close(out.positions, expected)


def test_an_ensemble_of_p_takes_the_samples_of_its_members_in_turn():
    torch.manual_seed(0)
    members = [PEGNN(SMALL, start=0.5) for _ in range(3)]
    ensemble = Ensemble(members)
    drawn = ensemble.sample(data(), samples=5, seed=1).positions
    for number, member in enumerate(members):
        alone = member.sample(data(), samples=5, seed=1).positions
        torch.testing.assert_close(drawn[number::3], alone[number::3])
    plain = [member.run(data(), [None]) for member in members]
    torch.testing.assert_close(ensemble.run(data(), [None])[0], torch.cat(plain).mean(0))


def test_blip_repeats_for_a_seed_and_is_equivariant_only_without_its_noise():
    """The noise of BLIP belongs to rows, not to the structure: the same draw turned is another draw."""
    torch.manual_seed(0)
    method, batch = BLIP(SMALL), data(6)
    matrix = torch.from_numpy(rotation()).float()
    turned = replace(batch, positions=batch.positions @ matrix.T, velocities=batch.velocities @ matrix.T)
    with torch.no_grad():
        for layer in method.network.layers:
            layer.position[-1].weight.mul_(300)
        once, again = (method.sample(batch, samples=3, seed=5).positions for _ in range(2))
        assert torch.equal(once, again)
        assert not torch.allclose(once[0], once[1])
        torch.testing.assert_close(
            method.run(turned, [None]), method.run(batch, [None]) @ matrix.T, rtol=1e-4, atol=1e-5
        )
        # alpha is invariant, so with equal random numbers in equal places even a BLIP sample would turn along;
        # it does here, because the rows keep their order, and does not when the particles are relabelled
        order = torch.tensor([1, 0, 2, 3, 4])
        relabelled = Trajectories(*(array[:, order] for array in vars(batch).values()))
        moved = method.run(relabelled, method.draw(1, seed=5))
        assert not torch.allclose(moved[0][:, order], method.run(batch, method.draw(1, seed=5))[0], atol=1e-3)


def test_blip_under_noise_has_both_noises_and_trains_both():
    torch.manual_seed(0)
    method, batch = PBLIP(SMALL), data(6)
    once, again = (method.sample(batch, samples=3, seed=5).positions for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.allclose(once[0], once[1])  # the weights alone, at zero noise weights
    done = train(method, data(), Recipe(shrink=0.0, epochs=3, batch=20, average=0.0), seed=0).method
    assert done.network.trained
    e, generator = done.draw(2, seed=0)[0], done.draw(2, seed=0)[1]
    mixed = [e, (generator[0], e[1])]  # the same weights twice, another z
    weights = [torch.Generator().manual_seed(3) for _ in range(2)]
    outputs = done.run(batch, [(z, g) for (z, _), g in zip(mixed, weights, strict=True)])
    assert not torch.allclose(outputs[0], outputs[1])
    plain = done.network(batch.positions[None], batch.velocities[None], batch.charges[None])
    torch.testing.assert_close(done.run(batch, [None]), plain)


def test_dropout_repeats_for_a_seed_and_can_be_left_out():
    torch.manual_seed(0)
    method, batch = MCDropout(SMALL), data(6)
    once, again = (method.sample(batch, samples=3, seed=5).positions for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.allclose(once[0], once[1])
    plain = method.network(batch.positions, batch.velocities, batch.charges)
    torch.testing.assert_close(method.run(batch, [None])[0], plain)


def test_training_lowers_the_loss_and_repeats():
    recipe = Recipe(shrink=0.0, epochs=30, batch=20, learning_rate=1e-2)
    runs = [train(pegnn(), data(), recipe, seed=1, points=3) for _ in range(2)]
    start = pegnn().loss(data(), torch.Generator(), 4).item()
    first, second = (list(run.method.parameters()) for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    curve = runs[0].curve
    assert [point["epoch"] for point in curve] == [10, 20, 30]
    assert curve[-1]["loss"] < curve[0]["loss"] < 0.5 * start
    assert runs[0].passes == 30 * 40 * 4
    other = train(pegnn(), data(), recipe, seed=2)
    assert not torch.equal(next(other.method.parameters()), first[0])


def test_the_best_on_the_way_is_kept_if_asked():
    recipe = Recipe(shrink=0.0, epochs=30, batch=20, learning_rate=1e-2)
    seen = []

    def watch(method):
        seen.append([parameter.detach().clone() for parameter in method.parameters()])
        return {"crps": [3.0, 1.0, 2.0, 2.0, 0.5][len(seen) - 1]}

    kept = train(pegnn(), data(), replace(recipe, patience=1), seed=1, points=5, watch=watch)
    assert len(kept.curve) == len(seen) == 4  # the second judgement without a better one is the last
    assert all(torch.equal(a, b) for a, b in zip(kept.method.parameters(), seen[1], strict=True))
    with pytest.raises(ValueError, match="patience=1 needs validation scores; pass watch"):
        train(pegnn(), data(), replace(recipe, patience=1), seed=1)


def test_a_training_that_diverges_says_so():
    with pytest.raises(DivergedError, match="NaN or infinite in 2 of 2 steps of epoch"):
        train(Deterministic(SMALL), data(), Recipe(learning_rate=1e6, clip=1e6, epochs=30, batch=20), seed=0)


def test_a_step_without_a_gradient_is_left_out():
    class Stumbling(Deterministic):
        calls = 0

        def loss(self, batch, generator, samples):
            self.calls += 1
            return super().loss(batch, generator, samples) * (torch.nan if self.calls == 3 else 1)

    done = train(Stumbling(SMALL), data(), Recipe(epochs=5, batch=20), seed=0)
    assert done.skipped == 1
    assert all(parameter.isfinite().all() for parameter in done.method.parameters())


def test_averaging_can_be_left_out():
    recipe = Recipe(shrink=0.0, epochs=2, batch=20, average=0.0)
    method = Deterministic(SMALL)
    done = train(method, data(), recipe, seed=0)
    for kept, last in zip(done.method.parameters(), method.parameters(), strict=True):
        torch.testing.assert_close(kept, last)


def test_weight_decay_spares_the_noise_unless_told():
    """While all noise weights are zero no gradient reaches W_z, so in the first step only the decay can move it."""
    for decay_noise in (False, True):
        recipe = Recipe(shrink=0.0, epochs=1, batch=40, weight_decay=10.0, decay_noise=decay_noise, average=0.0)
        method = train(pegnn(), data(), recipe, seed=0).method
        shrunk = float(method.network.noise.w_z.detach().diag().mean()) < 1
        assert shrunk == decay_noise


def test_few_samples_early_and_many_late():
    recipe = Recipe(shrink=0.0, epochs=4, batch=20, samples=(2, 6))
    assert train(pegnn(), data(), recipe, seed=0).passes == 2 * 40 * 2 + 2 * 40 * 6


def test_larger_sets_are_passed_fewer_times():
    recipe = Recipe(epochs=100, shrink=0.5)
    assert [recipe.epochs_for(size) for size in (250, 1000, 4000)] == [200, 100, 50]


def test_large_sets_are_learned_with_muon_in_half_the_passes():
    recipe = Recipe(epochs=100, shrink=0.0, many=3000)
    assert recipe.at(2999) == Recipe(epochs=100, shrink=0.0)
    assert recipe.at(3000) == Recipe(epochs=50, shrink=0.0, orthogonal=True)


def test_muon_moves_the_matrices_and_adamw_the_rest():
    method, before = pegnn(start=0.1), pegnn(start=0.1)
    done = train(method, data(), Recipe(shrink=0.0, epochs=2, batch=20, orthogonal=True, average=0.0), seed=0).method
    moved = {name: value - before.get_parameter(name) for name, value in done.named_parameters()}
    unmoved = {name for name, step in moved.items() if not bool(step.any())}
    assert all("layers.1.node" in name for name in unmoved)  # the last update of h reaches no output
    name = next(name for name in moved if name.endswith("edge.second.weight"))
    singular = torch.linalg.svdvals(moved[name].detach())
    assert singular.min() > 0.3 * singular.max()  # a step of AdamW has directions in which it hardly moves


def test_sharpness_aware_steps_take_the_gradient_at_the_worst_point_near_by():
    """For a loss that is a parabola along one weight, w^2, the gradient at w + rho is 2 (w + rho)."""

    class Parabola(Deterministic):
        def loss(self, batch, generator, samples):
            return self.network.embedding.bias[0] ** 2

    method = Parabola(SMALL)
    with torch.no_grad():
        method.network.embedding.bias[0] = 3.0
    _gradient(method, data(4), 1, torch.Generator(), Recipe(sharpness=0.5))
    assert float(method.network.embedding.bias.grad[0]) == pytest.approx(7.0)
    assert float(method.network.embedding.bias.detach()[0]) == pytest.approx(3.0)


def test_variants_the_paper_leaves_untested():
    batch = data(6)
    order = torch.tensor([1, 0, 2, 3, 4])
    relabelled = Trajectories(*(array[:, order] for array in vars(batch).values()))
    torch.manual_seed(0)
    own = PEGNN(SMALL, particles=5, start=0.5)
    shared = PEGNN(SMALL, start=0.5)
    for method, equivariant in ((shared, True), (own, False)):
        outputs = [method.sample(part, samples=3).positions.unflatten(1, (-1, 5)) for part in (batch, relabelled)]
        assert torch.allclose(outputs[1], outputs[0][:, :, order], atol=1e-5) == equivariant
    assert len(PEGNN(SMALL, every_layer=True).network.sites) == 2 * len(shared.network.sites)
    assert shared.network.trained
    assert not PEGNN(SMALL).network.trained


def test_the_frame_of_the_centre_of_mass_changes_no_error():
    moving = data()
    resting = moving.at_rest(1.0)
    assert float(resting.velocities.mean(1).abs().max()) < 1e-6
    drift = moving.velocities.mean(1, keepdim=True)
    prediction = torch.randn(40, 5, 3)
    torch.testing.assert_close(prediction - resting.target, (prediction + drift) - moving.target)


def test_the_table_of_parameters_is_the_papers():
    assert parameter_table() == [
        ("EGNN", 134_020, 1.0),
        ("EGNN ensemble (K = 3)", 402_060, 3.0),
        ("P-EGNN", 151_428, pytest.approx(1.13, abs=0.005)),
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BLIP(SMALL, beta=-1.0), "must not be negative, got beta=-1"),
        (
            lambda: train(pegnn(), data(), Recipe(batch=20, samples=(1, 4)), seed=0),
            r"at least 2 samples, got samples=\(1, 4\)",
        ),
        (lambda: Deterministic(SMALL).sample(data(), samples=3), "has one sample, got samples=3"),
        (
            lambda: Ensemble([Deterministic(SMALL)] * 3).sample(data(), samples=2),
            "ensemble of 3 members has 3 samples, got samples=2",
        ),
        (lambda: leave_one_out([Deterministic(SMALL)] * 2), "at least 3 members, got 2"),
        (lambda: train(pegnn(), data(), Recipe(batch=100), seed=0), "batch=100 is larger than the training set of 40"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at the gradient of BLIP's alpha
def test_a_compiled_network_trains_alike(monkeypatch):
    """With noise, and with random numbers drawn inside."""
    ends = []
    for compile_from in (1000, 1):
        monkeypatch.setattr("pmlip_bench.nbody.training.COMPILE_FROM", compile_from)
        torch.manual_seed(0)
        method = PBLIP(EGNNConfig(layers=1, width=8))
        done = train(method, data(), Recipe(shrink=0.0, epochs=8, batch=20), seed=0)
        assert (method.network._compiled_call_impl is not None) == (compile_from == 1)
        ends.append(done.method.sample(data(), samples=3).positions)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-4)
