import copy

import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from hypothesis import given
from hypothesis import strategies as st

import pmlip
from conftest import randomise_noise
from molecules import molecules
from pmlip import tangent
from pmlip.methods._tangents import LEARNED, TANGENT, TOLERANCE, add_tangents, best_scales
from pmlip.scores import fair_crps
from tiny import tiny_backbone

WIDTH = 0.05
STRANGE = [molecule(name) for name in ("C2H6", "CH3SH", "H2CO")]  # elements and distances that `molecules` lacks


def with_tangent(**options):
    model = randomise_noise(pmlip.perturb(tiny_backbone(), noise_dim=4), scale=0.1)
    model.fit_tangent(molecules(6), **options)
    model.tangent.width.fill_(WIDTH)
    return model


@pytest.fixture(scope="module")
def model():
    return with_tangent()


def tangent_part(model, structures, *, samples=3, seed=0):
    plain = copy.deepcopy(model)
    plain.tangent = None
    found, learned = (one.sample(structures, samples=samples, seed=seed) for one in (model, plain))
    return {name: found[name].double() - learned[name].double() for name in found}


def test_directions_have_the_inverse_curvature_as_covariance(model):
    own = model.tangent
    identity = torch.eye(own.dim, dtype=torch.float64)
    root = torch.stack([own.direction(draw) for draw in identity[:50]])
    h = own.vectors.double().T @ torch.diag(own.values.double() - own.floor) @ own.vectors.double()
    h += own.floor * identity
    torch.testing.assert_close(root @ h @ root.T, identity[:50, :50], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cover", ["all", "shifts", "shifts+all"])
def test_the_tangent_part_is_the_derivative_along_the_direction(cover):
    """And not a finite change: central differences of the weights, of small steps in double precision."""
    model = with_tangent(cover=cover)
    draw, step = model.draw(1)[0, model.noise.dim :], 1e-5
    sides = []
    for sign in (1, -1):
        with model.tangent.changed(model.backbone) as groups, torch.no_grad():
            weights = [weight for group in groups for weight in group]
            before = [weight.clone() for weight in weights]
            change = model.tangent.sketch(groups).spread(sign * step * WIDTH * model.tangent.direction(draw))
            for weight, part in zip(weights, change, strict=True):
                weight.add_(part)
            sides.append(model.predict(STRANGE))
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
    found = tangent_part(model, STRANGE, samples=1)
    expected = (sides[0].forces - sides[1].forces) / (2 * step)
    torch.testing.assert_close(found["forces"][0], expected, rtol=1e-3, atol=1e-5)
    slope = (sides[0].energy - sides[1].energy) / (2 * step)
    atoms = torch.tensor([len(one) for one in STRANGE])
    common = (slope - found["energy"][0]) / atoms  # one offset per atom for all structures
    torch.testing.assert_close(common, common[:1].expand_as(common), rtol=1e-3, atol=1e-5)


def test_samples_agree_with_the_training_energies():
    """Labels near the model's energies leave little freedom. Without energies, only the forces limit the samples."""
    model = randomise_noise(pmlip.perturb(tiny_backbone(), noise_dim=4), scale=0.1)
    structures = molecules(6)
    predicted = model.predict(structures).energy
    spreads = []
    for near in (True, False):
        train = [atoms.copy() for atoms in structures]
        for number, atoms in enumerate(train):
            energy = {"energy": float(predicted[number]) + 1e-3 * (-1) ** number} if near else {}
            atoms.calc = SinglePointCalculator(atoms, forces=structures[number].get_forces(), **energy)
        model.fit_tangent(train)
        spreads.append(float(tangent_part(model, structures, samples=16)["energy"].std(0).mean()))
    assert spreads[0] < 0.1 * spreads[1]


def test_it_is_small_where_the_model_was_trained_and_large_elsewhere(model):
    inside, outside = (tangent_part(model, given, samples=16)["forces"] for given in (molecules(6), STRANGE))
    assert float(outside.square().mean().sqrt()) > 10 * float(inside.square().mean().sqrt())


def test_it_leaves_the_mean_energy_of_the_training_structures(model):
    train = molecules(6)
    sizes = torch.tensor([len(atoms) for atoms in train])
    common, elsewhere = (
        (tangent_part(model, given)["energy"] / counts).mean(1).abs()
        for given, counts in ((train, sizes), (STRANGE, torch.tensor([len(atoms) for atoms in STRANGE])))
    )
    assert float(common.max()) < 1e-3 * float(elsewhere.max())


def test_a_sample_is_one_function(model):
    """It depends on no other structure, sample, chunk or training mode."""
    together = model.sample(STRANGE, samples=5, seed=3)
    for index, atoms in enumerate(STRANGE):
        alone = model.sample(atoms, samples=2, seed=3, chunk_atoms=1)
        torch.testing.assert_close(alone.energy, together.energy[:2, [index]])
        torch.testing.assert_close(alone.forces, together.forces[:2, together.system == index])


def test_the_mean_has_no_tangent_part(model):
    plain = copy.deepcopy(model)
    plain.tangent = None
    for one, expected in zip(
        model.sample_with_mean(STRANGE, samples=8)[1].values(),
        plain.sample_with_mean(STRANGE, samples=8)[1].values(),
        strict=True,
    ):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(model.predict(STRANGE).forces, plain.predict(STRANGE).forces)
    assert (model.passes(8), plain.passes(8)) == (30, 10)


def test_a_member_is_the_sample(model):
    calculator = pmlip.PMLIPCalculator(model, samples=3, seed=5)
    drawn = model.sample(STRANGE[0], samples=3, seed=5)
    for number, member in enumerate(calculator.members()):
        atoms = STRANGE[0].copy()
        atoms.calc = member
        np.testing.assert_allclose(atoms.get_forces(), drawn.forces[number], rtol=1e-9, atol=1e-12)
        assert atoms.get_potential_energy() == pytest.approx(float(drawn.energy[number, 0]))


def test_a_folded_sample_leaves_it_out_and_the_model_says_so(model):
    plain = copy.deepcopy(model)
    plain.tangent = None
    folded = model.fold(sample=2)
    expected = plain.sample(STRANGE, samples=3).forces[2]
    torch.testing.assert_close(folded(folded.graph(STRANGE))["forces"].detach(), expected)
    assert not model.members_are_whole
    assert plain.members_are_whole


def test_propagate_includes_it(model):
    def energy(calculator):
        atoms = STRANGE[0].copy()
        atoms.calc = calculator
        return atoms.get_potential_energy()

    values = pmlip.propagate(energy, model, samples=3, seed=1).values
    np.testing.assert_allclose(values, model.sample(STRANGE[0], samples=3, seed=1).energy[:, 0], rtol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, "file"])
def test_it_is_part_of_the_model(model, copied, tmp_path):
    if copied == "file":
        model.save(tmp_path / "model.pt")
        other = pmlip.load(tmp_path / "model.pt", backbone=tiny_backbone())
    else:
        other = copied(model)
    for name, value in model.sample(STRANGE, samples=3).items():
        torch.testing.assert_close(other.sample(STRANGE, samples=3)[name], value, rtol=1e-9, atol=1e-9)


def test_the_fit_leaves_the_potential_as_it_was():
    model = randomise_noise(pmlip.perturb(tiny_backbone(), noise_dim=4))
    first = next(iter(model.backbone.parameters())).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    model.fit_tangent(molecules(3))
    model.sample(STRANGE, samples=2)
    assert not first.requires_grad
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_few_probes_estimate_the_curvature_of_all_components(monkeypatch):
    train = molecules(6)
    monkeypatch.setattr(tangent, "MOST_PROBES", 10**6)
    exact = tangent.fit(tiny_backbone(), train)
    monkeypatch.setattr(tangent, "MOST_PROBES", 8)
    estimated = tangent.fit(tiny_backbone(), train)
    assert float(estimated.floor) == pytest.approx(float(exact.floor), rel=0.2)
    assert float(estimated.values[-1]) == pytest.approx(float(exact.values[-1]), rel=0.5)
    monkeypatch.setattr(tangent, "PROBES_IN_ALL", 6 * 5)
    seen = []
    force_rows = tangent._force_rows

    def counted(*arguments, probes, **more):
        seen.append(probes)
        return force_rows(*arguments, probes=probes, **more)

    monkeypatch.setattr(tangent, "_force_rows", counted)
    tangent.fit(tiny_backbone(), train)
    assert seen == [5] * 6  # larger training sets take fewer probes for each structure


@pytest.mark.parametrize("cover", ["all", "sites", "sites+readout"])  # direct forces do not depend on the readout
def test_only_the_covered_weights_change(cover):
    model = with_tangent(cover=cover)
    names = [name for name, _ in tangent.weights_of(model.backbone)]
    chosen = [name for name, use in zip(names, model.tangent.covered.tolist(), strict=True) if use]
    assert chosen
    inside = {"sites": ("message", "update"), "readout": ("energy",), "all": ("message", "update", "force")}
    wanted = {"sites+readout": inside["sites"]}.get(cover, inside.get(cover))
    assert all(any(f".{part}." in name for name in chosen) for part in wanted)
    assert not any("reference" in name for name in chosen)


def test_structures_without_labels_do_not_narrow_the_samples():
    labelled, other = molecules(4), [atoms.copy() for atoms in STRANGE]
    directions = [tangent.fit(tiny_backbone(), train).values for train in (labelled, labelled + other)]
    torch.testing.assert_close(*directions)


def test_a_training_that_ends_without_tangent_samples_is_not_lost():
    model = pmlip.perturb(tiny_backbone())
    with pytest.warns(UserWarning, match="the model has no tangent samples: .* need training structures with forces"):
        add_tangents(model, [atoms.copy() for atoms in STRANGE])
    assert model.tangent is None


def test_two_groups_of_weights_change_the_training_forces_equally():
    backbone = tiny_backbone()
    train = molecules(4)
    tangents = tangent.fit(backbone, train, cover="shifts+all")
    squares = torch.zeros(2, dtype=torch.float64)
    with tangents.changed(backbone) as groups:
        for atoms in train:
            forces = backbone(backbone.graph([atoms]))["forces"]
            for component in forces.flatten():
                for number, group in enumerate(groups):
                    found = torch.autograd.grad(component, group, retain_graph=True, materialize_grads=True)
                    squares[number] += sum(float(gradient.double().square().sum()) for gradient in found)
    balanced = squares * tangents.scales.square()
    assert float(balanced[0] / balanced[1]) == pytest.approx(1, rel=0.5)  # the fit uses random combinations of forces


def test_bad_input_is_refused():
    backbone = tiny_backbone()
    with pytest.raises(ValueError, match=r"cover must be one of all, sites, readout.*did you mean 'sites'"):
        tangent.fit(backbone, molecules(2), cover="site")
    with pytest.raises(ValueError, match="need training structures"):
        tangent.fit(backbone, [])
    with pytest.raises(ValueError, match=r"no weight changes the forces \(cover='readout'\)"):
        tangent.fit(backbone, molecules(2), cover="readout")


@given(spread=st.floats(0.3, 3), share=st.floats(0.1, 3), seed=st.integers(0, 5))
def test_the_tangent_part_is_the_largest_that_the_data_allow(spread, share, seed):
    generator = torch.Generator().manual_seed(seed)
    learned, other = (torch.randn(16, 400, generator=generator, dtype=torch.float64) for _ in range(2))
    learned, other = spread * learned, share * other
    error = torch.randn(400, generator=generator, dtype=torch.float64)
    factor, scale = best_scales(learned, other, error)

    def crps(factor, scale):
        return float(fair_crps(factor * learned + scale * other, error).mean())

    unit = float(error.square().mean().sqrt() / other.square().mean().sqrt())
    lowest = min(crps(one, two * unit) for one in LEARNED for two in TANGENT)
    assert crps(factor, scale) <= (1 + TOLERANCE) * lowest
    larger = [two * unit for two in TANGENT if two * unit > scale * 1.001]
    assert all(crps(one, two) > (1 + TOLERANCE) * lowest for one in LEARNED for two in larger)


def test_calibration_scales_both_parts():
    model, valid = with_tangent(), molecules(16)[6:]
    for atoms, error in zip(valid, torch.randn(len(valid), 1, generator=torch.Generator().manual_seed(0)), strict=True):
        atoms.calc.results["forces"] = model.predict(atoms).forces.numpy() + 0.03 * float(error)
    before = float(model.tangent.width)
    found = pmlip.calibrate(model, valid, samples=16)
    assert float(model.tangent.width) != before
    assert found.crps[1] < 1.02 * found.crps[0]
