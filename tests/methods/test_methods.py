"""Every method of an uncertainty answers to the same interface."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import pmlip
from molecules import molecules
from pmlip import methods
from pmlip.methods.deterministic import Deterministic
from pmlip.methods.p_ensemble import PEnsemble
from pmlip.spread_fit import best_width
from pmlip.structures.labels import labels
from pmlip.training.config import FinetuneConfig
from pmlip.training.finetuning import finetune
from tiny import tiny_backbone

CONFIG = FinetuneConfig(epochs=10, batch=4, samples=3, noise_rate=1e-2, backbone_rate=3e-3, validations=2)
ALL = [name for name in methods.available() if name != "confidence"]  # which needs Orb-v3's head

pytestmark = pytest.mark.usefixtures("quick_energy_zero")


def train(name, **options):
    data = molecules(16)
    made = methods.make(name, tiny_backbone(), **options)
    finetune(made, data[:10], valid=data[10:], config=CONFIG)
    return made, data


@pytest.mark.parametrize("name", ALL)
class TestEveryMethod:
    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls):
        return {}

    @pytest.fixture
    def method(self, trained, name):
        if name not in trained:
            trained[name] = train(name, **({"share": 0.1} if name == "mc-dropout" else {}))  # of so few units
        return trained[name]

    def test_training_makes_it_better(self, method, name):
        made, data = method
        before = methods.make(name, tiny_backbone()).predict(data).forces - labels(data).forces
        after = made.predict(data).forces - labels(data).forces
        assert float(after.abs().mean()) < 0.8 * float(before.abs().mean())

    def test_the_mean_comes_with_the_same_samples(self, method, name):
        made, data = method
        count = made.fixed_samples or 6
        drawn, mean = made.sample_with_mean(data[:3], samples=count, seed=2)
        plain = made.sample(data[:3], samples=count, seed=2)
        assert drawn.count == count
        for output in plain:
            torch.testing.assert_close(drawn[output], plain[output])
            assert mean[output].shape == plain.mean[output].shape
        if made.one_pass:  # a Gaussian is around what it predicts
            torch.testing.assert_close(mean.forces, made.predict(data[:3]).forces)
        elif name in ("p", "p-ensemble"):
            assert not torch.allclose(mean.forces, plain.mean.forces)
            truth = made.sample(data[:3], samples=3000, seed=9).mean.forces
            assert (mean.forces - truth).norm() < (plain.mean.forces - truth).norm()
        else:
            torch.testing.assert_close(mean.forces, plain.mean.forces)

    def test_samples_repeat_for_a_seed_and_have_a_spread(self, method):
        made, data = method
        count = made.fixed_samples or 5
        once, again = (made.sample(data[:2], samples=count, seed=2) for _ in range(2))  # one pass
        for output, value in once.items():
            assert value.shape[0] == count
            assert torch.equal(value, again[output])
        many = data * 20  # more than one pass, and sizes of passes are learned from the clock
        torch.testing.assert_close(*(made.sample(many, samples=count, seed=2).forces for _ in range(2)))
        if count > 1:
            assert float(once.spread.forces.min()) > 0
            assert float(once.spread.energy.min()) > 0

    def test_prediction_without_noise_is_one_function(self, method):
        made, data = method
        together = made.predict(data[:3])
        for index in range(3):
            alone = made.predict(data[index])
            torch.testing.assert_close(alone.forces, together.forces[together.system == index])
            torch.testing.assert_close(alone.energy, together.energy[[index]])

    def test_save_and_load(self, method, tmp_path):
        made, data = method
        made.save(tmp_path / "model.pt")
        loaded = pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone())
        assert type(loaded) is type(made)
        count = made.fixed_samples or 4
        given, expected = (m.sample(data[:2], samples=count) for m in (loaded, made))
        for output, value in expected.items():
            assert torch.equal(given[output], value)

    def test_evaluation_does_not_ask_which_it_is(self, method):
        made, data = method
        scores = pmlip.evaluate(made, data[10:], samples=6).scores
        assert scores["forces"]["crps"] <= scores["forces"]["mae"] + 1e-9
        assert ("ssr" in scores["forces"]) == (made.fixed_samples != 1)


def test_single_precision_stays_what_it_is(tmp_path):
    """Some methods have a buffer in double precision."""
    data = molecules(12)
    made = methods.make("constant", tiny_backbone(dtype=torch.float32))
    finetune(made, data[:8], valid=data[8:], config=CONFIG)
    made.save(tmp_path / "model.pt")
    loaded = pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone(dtype=torch.float32))
    assert torch.equal(loaded.predict(data[:3]).forces, made.predict(data[:3]).forces)
    assert loaded.predict(data[:3]).forces.dtype == torch.float32


def test_structures_of_different_passes_have_different_noise():
    made, data = train("constant")
    drawn = made.sample([data[0]] * 60, samples=3).forces.unflatten(1, (60, -1))
    assert len(drawn.flatten(2)[0].unique(dim=0)) == 60


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match=r"ensemble has no option 'member'; allowed: members; did you mean 'members'"):
        methods.make("ensemble", tiny_backbone(), member=3)
    with pytest.raises(ValueError, match=r"a whole number of members, at least 2, got members=2\.5"):
        methods.make("ensemble", tiny_backbone(), members=2.5)
    with pytest.raises(ValueError, match="deterministic has no option 'beta'; allowed: none"):
        methods.make("deterministic", tiny_backbone(), beta=1.0)


def test_a_spread_is_not_learned_from_one_sample():
    with pytest.raises(ValueError, match="a spread is learned from at least 2 samples, got samples=1"):
        finetune(methods.make("p", tiny_backbone()), molecules(4), config=FinetuneConfig(samples=1))


def test_names_of_methods():
    rivals = {"deterministic", "ensemble", "blip", "mc-dropout", "constant", "force-scaled", "confidence"}
    assert {"p", "p-ensemble", "novelty", "novelty-latent"} | rivals == set(methods.available())
    with pytest.raises(ValueError, match=r"unknown method 'blib'; allowed: .*; did you mean 'blip'\?"):
        methods.make("blib", tiny_backbone())


def test_members_of_an_ensemble_differ_and_are_deterministic_runs():
    """Member k is the deterministic fine-tuning with seed k."""
    ensemble, data = train("ensemble", members=2)
    alone, _ = train("deterministic")
    out = ensemble.sample(data, samples=2)
    torch.testing.assert_close(out.forces[0], alone.predict(data).forces)
    assert not torch.allclose(out.forces[0], out.forces[1])
    with pytest.raises(ValueError, match="an ensemble of 2 members has exactly 2 samples, got samples=5"):
        ensemble.sample(data, samples=5)
    with pytest.raises(ValueError, match="at least 2, got members=1"):
        methods.make("ensemble", tiny_backbone(), members=1)


def test_samples_of_a_p_ensemble_are_those_of_its_members_in_turn():
    made, data = train("p-ensemble", members=2)
    drawn = made.sample(data, samples=5, seed=3).forces
    torch.testing.assert_close(drawn[:2], made.sample(data, samples=2, seed=3).forces)
    for number, part in enumerate(made.parts()):
        torch.testing.assert_close(drawn[number::2], part.sample(data, samples=5, seed=3).forces[number::2])
    torch.testing.assert_close(made.sample_number(3, data, seed=3).forces, drawn[3])
    made.learner().forget_tangents()
    plain = made.sample(data, samples=4, seed=3).forces[3]
    torch.testing.assert_close(Deterministic(made.member(3, seed=3)).predict(data).forces, plain)
    assert not torch.allclose(plain, drawn[3])


def test_an_ensemble_of_trained_models_owns_copies_of_them():
    parts = [methods.make("p", tiny_backbone()) for _ in range(2)]
    for seed, part in enumerate(parts):
        part.randomise(0.5, seed=seed)
    made, data = PEnsemble.of(parts), molecules(3)
    before = made.sample(data, samples=4).forces
    torch.testing.assert_close(before[1], parts[1].sample(data, samples=2).forces[1])
    parts[1].randomise(0.5, seed=7)
    torch.testing.assert_close(made.sample(data, samples=4).forces, before)


def test_an_ensemble_that_was_not_trained_has_no_spread():
    with pytest.raises(ValueError, match="was never trained"):
        methods.make("ensemble", tiny_backbone()).spread_samples(3)


def test_ensembles_of_two_seeds_share_no_member():
    data = molecules(16)
    members = []
    for seed in (0, 1):
        ensemble = methods.make("ensemble", tiny_backbone(), members=2)
        finetune(ensemble, data[:10], config=replace(CONFIG, seed=seed))
        members += list(ensemble.sample(data, samples=2).forces)
    for first, second in itertools.combinations(members, 2):
        assert not torch.allclose(first, second)


def test_blip_starts_nearly_deterministic_and_is_held_to_its_prior():
    backbone, data = tiny_backbone(), molecules(6)
    start = methods.make("blip", backbone)
    plain = start.predict(data).forces
    samples = start.sample(data, samples=8)
    assert 0 < float(samples.spread.forces.mean()) < 0.05 * float(plain.abs().mean())
    weak, strong = methods.make("blip", backbone, beta=0.0), methods.make("blip", backbone, beta=10.0)
    for made in (weak, strong):
        finetune(made, data, config=CONFIG)
    spreads = [float(made.sample(data, samples=8).spread.forces.mean()) for made in (weak, strong)]
    assert spreads[1] > 1.2 * spreads[0]
    with pytest.raises(ValueError, match="must not be negative, got beta=-1"):
        methods.make("blip", backbone, beta=-1.0)


def test_one_unit_near_zero_does_not_decide_the_width():
    random = np.random.default_rng(0)
    units = random.uniform(0.5, 2, 1500)
    errors = 0.1 * units * random.normal(size=1500)
    assert best_width(errors, units) == pytest.approx(0.1, rel=0.05)
    assert best_width(np.append(errors, 1e-4), np.append(units, 1e-8)) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("name", ["constant", "force-scaled"])
def test_trivial_widths_are_those_with_the_smallest_crps(name):
    made, data = train(name)
    held_out = data[10:]

    def crps(factor):
        scaled = methods.make(name, tiny_backbone())
        scaled.load_state_dict(made.state_dict())
        scaled.widths *= factor
        return pmlip.evaluate(scaled, held_out, samples=400).scores["forces"]["crps"]

    best = crps(1.0)
    assert best < crps(0.5)
    assert best < crps(2.0)


def test_a_finished_gaussian_is_trained_without_its_noise():
    made, data = train("constant")
    made.train()
    draws = made.draw(2)
    outputs = made(made.backbone.graph(data[:2]), draws)
    assert torch.equal(outputs["forces"][0], outputs["forces"][1])
    made.eval()
    outputs = made(made.backbone.graph(data[:2]), draws)
    assert not torch.equal(outputs["forces"][0], outputs["forces"][1])


def test_without_a_number_there_are_the_usual_samples_or_all_there_are():
    assert methods.make("ensemble", tiny_backbone(), members=2).sample(molecules(2)).count == 2
    assert methods.make("blip", tiny_backbone()).sample(molecules(2)).count == 16


def test_a_trained_blip_can_be_copied():
    made = methods.make("blip", tiny_backbone())
    finetune(made, molecules(8), config=replace(CONFIG, offsets=False, epochs=1))
    given, expected = (some.sample(molecules(2), samples=2) for some in (copy.deepcopy(made), made))
    assert torch.equal(given.forces, expected.forces)


def test_the_one_member_of_a_deterministic_model_is_its_backbone():
    made = methods.make("deterministic", tiny_backbone())
    assert made.member(0) is made.backbone
    with pytest.raises(ValueError, match="one sample, number 0, got number=1"):
        made.member(1)


def test_trivial_widths_need_validation_data():
    with pytest.raises(
        ValueError, match=r"this method fits its widths to validation data; pass structures as valid=\.\.\."
    ):
        finetune(methods.make("constant", tiny_backbone()), molecules(), config=CONFIG)


def test_force_scaled_widths_grow_with_the_forces():
    made, data = train("force-scaled")
    spread = made.sample(data, samples=400).spread.forces.square()
    forces = made.predict(data)
    for index in range(len(data)):
        own = forces.system == index
        ratio = float(spread[own].mean().sqrt() / forces.forces[own].square().mean().sqrt())
        assert ratio == pytest.approx(float(made.widths[1]), rel=0.1)


def test_confidence_needs_the_head_that_orb_v3_has():
    with pytest.raises(ValueError, match="tiny:test has no confidence head; only Orb-v3 has one"):
        methods.make("confidence", tiny_backbone())


@pytest.mark.parametrize("name", ALL)
def test_the_draw_of_a_sample_does_not_depend_on_how_many_are_drawn(name):
    made = methods.make(name, tiny_backbone())
    count = made.fixed_samples or 5
    drawn = made.draw(count, seed=3)
    for number in range(count):
        assert torch.equal(made.draw_number(number, seed=3), drawn[number : number + 1])


@pytest.mark.parametrize("name", ["p", "p-ensemble"])
def test_the_last_sample_costs_no_more_than_the_first(name):
    """All before it would need terabytes."""
    made = methods.make(name, tiny_backbone())
    assert made.draw_number(2**31 - 1).shape == made.draw_number(0).shape
    assert made.member(2**31 - 1).module is not None
    assert made.sample_number(2**31 - 1, molecules(1)).forces.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_samples_beyond_all_limits_are_refused(name):
    made, data = methods.make(name, tiny_backbone()), molecules(2)
    with pytest.raises(ValueError, match=r"samples are numbered from 0 to 2147483647, got number=2147483648"):
        made.sample_number(2**31, data)
    with pytest.raises(ValueError, match=r"samples=1000000000"):
        made.sample(data, samples=10**9)
    if made.fixed_samples is None:
        with pytest.raises(ValueError, match=r"a seed must be an integer from 0 to 2\^32 - 1, got seed=10000000000"):
            made.sample(data, samples=3, seed=10**10)
