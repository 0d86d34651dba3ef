import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

import pmlip
from conftest import randomise_noise
from molecules import molecules
from pmlip.methods.p import perturb
from pmlip.noise.injection import Site
from tiny import tiny_backbone


@pytest.fixture
def model():
    return randomise_noise(pmlip.perturb(tiny_backbone()))


ETHANOL, WATER = molecule("CH3CH2OH"), molecule("H2O")


def test_samples_have_named_axes(model):
    out = model.sample([ETHANOL, WATER], samples=4)
    assert out.energy.shape == (4, 2)
    assert out.forces.shape == (4, 12, 3)
    assert out.energy.dtype == torch.float64
    assert out.system.tolist() == [0] * 9 + [1] * 3
    point = model.predict(WATER)
    assert point.energy.shape == (1,)
    assert point.forces.shape == (3, 3)


@pytest.mark.parametrize("kind", ["plain", "orthogonal", "antithetic"])
def test_more_samples_keep_the_first_ones(model, kind):
    few, many = (model.sample(ETHANOL, samples=samples, seed=4, kind=kind) for samples in (3, 40))
    torch.testing.assert_close(many.energy[:3], few.energy, rtol=1e-12, atol=1e-12)


def test_predict_is_the_backbone_at_z_zero(model):
    backbone = tiny_backbone()
    expected = backbone(backbone.graph([WATER]))["energy"]
    torch.testing.assert_close(model.predict(WATER).energy, expected.detach())
    torch.testing.assert_close(model(model.backbone.graph([WATER]))["energy"][0], expected)


def test_in_training_every_system_may_have_its_own_noise(model):
    noise = torch.randn(3, 2, 128, dtype=torch.float64)
    together = model(model.backbone.graph([ETHANOL, WATER]), noise)
    alone = model(model.backbone.graph([WATER]), noise[:, 1])
    torch.testing.assert_close(together["energy"][:, 1], alone["energy"][:, 0])


def test_training_the_noise_alone_leaves_the_prediction(model):
    before = model.predict(ETHANOL)
    with torch.no_grad():
        for parameter in model.noise_parameters():
            parameter.add_(1.0)
    assert torch.equal(model.predict(ETHANOL).forces, before.forces)


def test_a_predicted_nan_is_refused_and_named(model):
    with torch.no_grad():
        model.backbone.module.embedding.weight[8] = torch.nan
    with pytest.raises(ValueError, match=r"structure 1 \(H2O\): the predicted energy of sample 0 is NaN"):
        model.sample([molecule("CH4"), WATER], samples=2)


def test_errors_name_the_structure_as_it_was_given_not_as_it_was_chunked(model):
    chgnet = pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    assert chgnet
    potential = pmlip.perturb(pmlip.load_backbone("chgnet"))
    lonely = Atoms("SiO", [[0, 0, 0], [9, 0, 0]])
    with pytest.raises(ValueError, match="structure 3 "):
        potential.predict([bulk("Si"), bulk("Cu"), bulk("Al"), lonely], chunk_atoms=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.sample([], samples=2), "the list is empty"),
        (lambda model: model.sample(WATER, samples=0), "at least 1 sample"),
        (lambda model: model.sample(WATER, samples=1).spread, "at least 2 samples, got samples=1"),
        (
            lambda model: model.sample(WATER, samples=2, chunk_atoms=0),
            "chunk_atoms must be at least 1, got chunk_atoms=0",
        ),
        (lambda model: model(model.backbone.graph([WATER, WATER]), torch.zeros(2, 5, 128)), r"got \(2, 5, 128\)"),
        (lambda model: model(model.backbone.graph([WATER]), torch.zeros(128)), r"must have shape \(sample, 128\)"),
        (lambda model: model.sample(WATER, samples=2, kind="sobol"), "unknown kind of draw 'sobol'"),
    ],
)
def test_bad_input_is_refused(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


@pytest.mark.parametrize(("scale", "share"), [(0.05, 0.1), (0.5, 0.5)])
def test_samples_agree_about_the_zero_of_energies_once_it_is_fitted(scale, share):
    """What is common to all structures and linear or quadratic in z goes; forces, and the prediction at z = 0, stay."""
    potential = randomise_noise(pmlip.perturb(tiny_backbone(), noise_dim=4), scale=scale)
    structures = [molecule(name) for name in ("H2O", "CH4", "NH3", "C2H6")]
    before, point = potential.sample(structures, samples=64), potential.predict(structures)

    def common(drawn):
        """How far the samples are from z = 0 in what their energies have in common, root mean square."""
        return ((drawn.energy - point.energy) / drawn.atoms_per_system).mean(1).square().mean().sqrt()

    potential.fit_energy_zero(structures, curved=False)
    straight = potential.sample(structures, samples=64)
    potential.fit_energy_zero(structures)
    after = potential.sample(structures, samples=64)
    assert common(after) < share * common(straight)
    assert common(straight) < common(before)
    torch.testing.assert_close(after.forces, before.forces)
    torch.testing.assert_close(potential.predict(structures).energy, point.energy)
    folded = potential.fold(sample=5)
    torch.testing.assert_close(folded(folded.graph(structures))["energy"].detach(), after.energy[5])


def test_the_mean_over_all_noise_is_told_by_few_samples():
    """Where the response is nearly linear, 8 samples and two more passes tell it better than the mean of 64 does."""
    model = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.02)
    drawn, mean = model.sample_with_mean([ETHANOL, WATER], samples=8, seed=2)
    torch.testing.assert_close(drawn.forces, model.sample([ETHANOL, WATER], samples=8, seed=2).forces)
    truth = model.sample([ETHANOL, WATER], samples=4000, seed=5, kind="antithetic").mean
    many = model.sample([ETHANOL, WATER], samples=64, seed=3).mean
    for name in ("energy", "forces"):
        assert (mean[name] - truth[name]).norm() < (many[name] - truth[name]).norm()
    assert model.passes(8) == 10


def test_sites_given_by_name_are_the_sites_of_the_adapter():
    backbone = tiny_backbone()
    own = perturb(backbone)
    named = perturb(backbone, sites=[site.name for site in own.sites])
    assert named.sites == own.sites


def test_novelty_refuses_sites_whose_rows_belong_to_unknown_atoms():
    backbone = tiny_backbone()
    other = next(name for name, layer in backbone.module.named_modules() if isinstance(layer, torch.nn.Linear))
    with pytest.raises(ValueError, match=r"rows are 'pixel', allowed: .*node"):
        perturb(backbone, sites=[Site(other, rows="pixel")]).fit_novelty(molecules())
