import copy
import math

import numpy as np
import pytest
import torch
from ase import Atoms

import pmlip
from molecules import molecules
from pmlip import methods, novelty
from pmlip.structures.atoms import StructureError
from tiny import tiny_backbone

BACKBONE = tiny_backbone()


def fitted(*, train=100, valid=40, kind="gradients", backbone=BACKBONE):
    made = methods.make("deterministic", backbone)
    data = molecules(train + valid)
    made.fit_novelty(data[:train], valid=data[train:], kinds=[kind])
    return made


@pytest.mark.parametrize("kind", novelty.KINDS)
class TestBothKinds:
    @pytest.fixture(scope="class")
    @classmethod
    def models(cls):
        return {kind: fitted(kind=kind) for kind in novelty.KINDS}

    @pytest.fixture
    def made(self, models, kind):
        return models[kind]

    def test_most_structures_like_those_of_training_are_below_one(self, made, kind):
        found = made.novelty(molecules(60, seed=1))
        assert 0.8 < float((found.structure < 1).double().mean()) < 1
        assert 0.85 < float((found.atom < 1).double().mean()) < 1

    def test_other_structures_are_far_above_one(self, made, kind):
        for factor in (0.4, 0.3):
            squeezed = [Atoms(atoms.numbers, factor * atoms.positions) for atoms in molecules(10, seed=1)]
            assert float(made.novelty(squeezed).structure.min()) > 1.5

    def test_the_prediction_comes_along(self, made, kind):
        data = molecules(5)
        found, expected = made.novelty(data), made.predict(data)
        torch.testing.assert_close(found.predicted.forces, expected.forces)
        torch.testing.assert_close(found.predicted.energy, expected.energy)
        assert found.atom.shape == found.sigma.shape == found.system.shape

    def test_a_batch_gives_what_single_structures_give(self, made, kind):
        data = molecules(5, seed=2)
        together = made.novelty(data)
        for index, atoms in enumerate(data):
            alone = made.novelty(atoms)
            torch.testing.assert_close(alone.atom, together.atom[together.system == index])
            torch.testing.assert_close(alone.structure, together.structure[[index]])

    def test_an_unknown_element_is_infinitely_novel(self, made, kind):
        known = molecules(1)[0]
        other = known.copy()
        other.symbols[2] = "N"
        found = made.novelty([known, other])
        assert found.structure.isinf().tolist() == [False, True]
        for values in (found.atom, found.sigma):
            assert values.isinf().nonzero().flatten().tolist() == [len(known) + 2]

    def test_save_and_load(self, made, kind, tmp_path):
        made.save(tmp_path / "model.pt")
        loaded = pmlip.load(tmp_path / "model.pt", backbone=BACKBONE)
        given, expected = (some.novelty(molecules(3, seed=3), kind=kind) for some in (loaded, made))
        assert torch.equal(given.atom, expected.atom)
        assert torch.equal(given.sigma, expected.sigma)


def test_gamma_is_what_its_formula_says():
    data, test = molecules(30), molecules(5, seed=1)
    made = fitted(train=30, valid=0)
    training = made.training_features["gradients"]

    def features(structures):
        return novelty.features(BACKBONE, BACKBONE.graph(structures), "gradients")[0].double()

    numbers, known = (np.concatenate([atoms.numbers for atoms in some]) for some in (data, test))
    expected = torch.zeros(len(known), dtype=torch.float64)
    for number in (8, 14):
        rows = features(data)[torch.from_numpy(numbers == number)]
        h = rows.T @ rows
        h += 1e-4 * torch.trace(h) / len(h) * torch.eye(len(h))
        own = features(test)[torch.from_numpy(known == number)]
        expected[torch.from_numpy(known == number)] = (own @ torch.linalg.inv(h) * own).sum(1).sqrt()
    found = made.novelty(test)
    torch.testing.assert_close(found.atom * training.atom_quantile, expected, rtol=0.02, atol=1e-6)
    squares = torch.bincount(found.system, expected.square()) / torch.bincount(found.system)
    torch.testing.assert_close(found.structure * training.structure_quantile, squares.sqrt(), rtol=0.02, atol=1e-6)


def test_few_held_out_structures_leave_the_scale_to_the_training_set():
    few, many = fitted(valid=5), fitted(valid=40)
    few, many = (made.training_features["gradients"] for made in (few, many))
    assert few.scaled_on == novelty.LEFT_OUT
    assert many.scaled_on == "40 held-out structures"
    assert few.structure_quantile == pytest.approx(many.structure_quantile, rel=0.5)


def test_error_bars_follow_errors_that_grow_with_novelty():
    training = fitted().training_features["gradients"]
    novelties = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    random = torch.randn(4000, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    learned = training.with_error_bars(novelties, 0.2 * novelties[:, None] ** 1.3 * random)
    torch.testing.assert_close(learned.sigma(novelties), 0.2 * novelties**1.3, rtol=0.1, atol=0)


def test_without_labels_there_are_no_error_bars():
    made = methods.make("deterministic", BACKBONE)
    bare = [atoms.copy() for atoms in molecules(30)]
    made.fit_novelty(bare[:10], valid=bare[10:], kinds=["gradients"])
    found = made.novelty(bare[0])
    assert bool(found.atom.isfinite().all())
    assert bool(found.sigma.isnan().all())


@pytest.mark.parametrize("name", [name for name in methods.available() if name != "confidence"])
def test_every_method_has_a_novelty_trained_or_not(name):
    """Without noise, all of them are the same potential."""
    made, data = methods.make(name, BACKBONE), molecules(12)
    made.fit_novelty(data[:10], valid=data[10:])
    for kind in novelty.KINDS:
        expected = fitted(train=10, valid=2, kind=kind).novelty(data)
        torch.testing.assert_close(made.novelty(data, kind=kind).structure, expected.structure)


def test_further_fine_tuning_forgets_the_features():
    made = fitted()
    pmlip.finetune(made, molecules(4), config=pmlip.FinetuneConfig(steps=1))
    with pytest.raises(ValueError, match=r"no training features.*call model.fit_novelty"):
        made.novelty(molecules(1))


@pytest.fixture(scope="module")
def two_kinds():
    """A direct-force potential with both kinds of features."""
    made, data = methods.make("deterministic", BACKBONE), molecules(140)
    made.fit_novelty(data[:100], valid=data[100:])
    return made


@pytest.fixture
def passes(monkeypatch):
    """The passes of the tiny potential, "forward" and "backward", in their order."""
    seen = []

    def counted(name, function):
        return lambda *args, **options: seen.append(name) or function(*args, **options)

    monkeypatch.setattr(type(BACKBONE), "forward", counted("forward", type(BACKBONE).forward))
    monkeypatch.setattr(torch.autograd, "grad", counted("backward", torch.autograd.grad))
    return seen


def squeezed(atoms, factor=0.4):
    return Atoms(atoms.numbers, factor * atoms.positions)


def test_latent_features_find_unusual_structures_and_site_gradients_measure_them(two_kinds, passes):
    ordinary = [atoms for atoms in molecules(20, seed=1) if not two_kinds.novelty(atoms, kind="latent").unusual[0]]
    mixed = [ordinary[0], squeezed(ordinary[1]), *ordinary[2:5], squeezed(ordinary[5], 0.5)]
    latent, gradients = (two_kinds.novelty(mixed, kind=kind) for kind in ("latent", "gradients"))
    passes.clear()
    found = two_kinds.novelty(mixed)
    assert passes == ["forward", "forward", "backward"]
    assert found.kinds == ["latent", "gradients", "latent", "latent", "latent", "gradients"]
    for index, kind in enumerate(found.kinds):
        own, expected = found.system == index, {"latent": latent, "gradients": gradients}[kind]
        for name in ("structure", "largest"):
            torch.testing.assert_close(getattr(found, name)[index], getattr(expected, name)[index])
        for name in ("atom", "sigma"):
            torch.testing.assert_close(getattr(found, name)[own], getattr(expected, name)[own])
    for name in ("energy", "forces"):
        assert torch.equal(found.predicted[name], latent.predicted[name])
    assert found.outside.tolist() == (latent.outside | (latent.unusual & gradients.outside)).tolist()
    assert "by site gradients and" in found.explain(1, mixed[1])
    assert "by site gradients" not in found.explain(0, mixed[0])


def test_an_ordinary_batch_costs_one_forward_pass(two_kinds, passes):
    ordinary = [atoms for atoms in molecules(20, seed=1) if not two_kinds.novelty(atoms, kind="latent").unusual[0]]
    passes.clear()
    found = two_kinds.novelty(ordinary[:10])
    assert passes == ["forward"]
    assert found.kinds == ["latent"] * 10


@pytest.mark.parametrize("latent", [0.8, 1.2, 2.0])
@pytest.mark.parametrize("gradients", [0.8, 2.0])
def test_a_structure_is_outside_if_either_kind_says_so(two_kinds, latent, gradients):
    predicted = two_kinds.predict(molecules(1))

    def measured(kind, structure):
        training = two_kinds.training_features[kind]
        gamma = structure * training.structure_quantile
        return training.novelty(torch.full((len(predicted.forces),), gamma), predicted)

    first = measured("latent", latent)
    found = novelty.combined(first, measured("gradients", gradients)) if latent > 1 else first
    assert first.unusual.tolist() == [latent > 1]
    assert found.outside.tolist() == [latent > 1.5 or (latent > 1 and gradients > 1.5)]
    assert float(found.structure[0]) == pytest.approx(gradients if latent > 1 else latent)


@pytest.mark.parametrize("kind", novelty.KINDS)
def test_a_single_kind_measures_all_structures(kind):
    found = fitted(kind=kind).novelty([squeezed(molecules(1)[0]), molecules(1)[0]])
    assert found.kinds == [kind] * 2
    assert found.latent is None


def test_gradients_that_are_no_number_name_the_structure_of_the_whole_list(two_kinds, monkeypatch):
    def broken(backbone, graph, sites):
        return torch.full((len(graph.numbers), 32), torch.nan), backbone(graph)

    monkeypatch.setitem(novelty._FEATURES, "gradients", broken)
    ordinary = molecules(1)[0]
    with pytest.raises(StructureError, match=r"structure 2 .* novelty is NaN"):
        two_kinds.novelty([ordinary, ordinary, squeezed(ordinary)])


def test_a_lone_atom_is_infinitely_novel_where_all_features_come_from_neighbours():
    training = fitted().training_features["gradients"]
    assert math.isinf(float(training.lengths(torch.zeros(1, 32), torch.tensor([8]))[0]))


def test_structures_without_neighbours():
    apart, ordinary = Atoms("OSi", [[0, 0, 0], [20, 0, 0]]), molecules(1)[0]
    edges_only = pmlip.perturb(BACKBONE, sites=BACKBONE.sites()[:2])
    edges_only.fit_novelty(molecules(10), kinds=["gradients"])
    found = edges_only.novelty([apart, ordinary])
    assert found.structure.isinf().tolist() == [True, False]
    assert found.outside[0]
    assert "or no neighbours" in found.explain(0, apart)
    assert bool(found.predicted.forces.isfinite().all())
    both = fitted().novelty([apart, ordinary])  # sites on nodes have a gradient without neighbours too
    assert bool(both.structure.isfinite().all())


def test_training_structures_without_neighbours():
    apart = Atoms("OSi", [[0, 0, 0], [20, 0, 0]])
    made = methods.make("deterministic", BACKBONE)
    made.fit_novelty([apart.copy() for _ in range(3)] + molecules(10))
    for kind in novelty.KINDS:
        assert bool(made.novelty([apart, *molecules(3)], kind=kind).atom.isfinite().all())


@pytest.mark.parametrize("kind", novelty.KINDS)
def test_features_of_a_wider_network_are_refused(kind):
    model = methods.make("deterministic", tiny_backbone(width=12))
    model.training_features = fitted(kind=kind).training_features
    with pytest.raises(ValueError, match=r"have \d+ features per atom, but this model has \d+; fit them again"):
        model.novelty(molecules(1))


@pytest.mark.parametrize(
    ("train", "kind", "message"),
    [
        (0, None, "a training set of at least 2, got 0"),
        (1, None, "a training set of at least 2, got 1"),
        (4, "latents", r"kind must be one of gradients, latent, got kind='latents'; did you mean 'latent'\?"),
    ],
)
def test_bad_input_is_refused(train, kind, message):
    with pytest.raises(ValueError, match=message):
        novelty.fit(BACKBONE, molecules(4)[:train], kind=kind)


def test_features_of_other_layers_are_refused():
    model = pmlip.perturb(BACKBONE, sites=["message.0"])
    model.training_features = fitted().training_features
    with pytest.raises(ValueError, match=r"come from the layers message.0.0, .* but this model has message.0.0; fit"):
        model.novelty(molecules(1))


def test_gradients_that_are_no_number_are_refused():
    broken = copy.deepcopy(BACKBONE)
    with torch.no_grad():
        broken.module.energy.weight[:] = torch.nan
    with pytest.raises(StructureError, match=r"structure 0 .* novelty is NaN; check for overlapping atoms"):
        novelty.fit(broken, molecules(4), kind="gradients")
    made = fitted()
    with torch.no_grad():
        made.backbone.module.energy.weight[:] = torch.nan
    with pytest.raises(StructureError, match="is NaN or infinite"):
        made.novelty(molecules(2))


def test_progress_counts_structures():
    seen = []
    data = molecules(12)
    novelty.fit(BACKBONE, data[:10], valid=data[10:], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (22, 22)  # ten are also left out one by one
    assert seen == sorted(seen)


def test_every_element_of_held_out_structures_may_be_new():
    data = molecules(30)
    other = [Atoms("N3", atoms.positions[:3]) for atoms in data]
    with pytest.raises(ValueError, match="each structure has an element that the training set lacks"):
        novelty.fit(BACKBONE, data, valid=other)


def test_error_bars_in_one_pass_need_known_elements():
    data = molecules(30)
    made = methods.make("novelty", BACKBONE)
    made.fit_widths(data[20:], train=data[:20])
    assert float(made.sample(data, samples=8).spread.forces.min()) > 0
    other = data[0].copy()
    other.symbols[0] = "N"
    with pytest.raises(ValueError, match=r"the training set holds no N, so the error bars .* use `predict`"):
        made.sample(other)
    assert bool(made.predict(other).forces.isfinite().all())
