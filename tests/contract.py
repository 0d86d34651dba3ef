"""What every backbone must satisfy. A test module subclasses `BackboneContract` and says what to test it on.

Noise weights are random and not zero in every test but those about the start.
"""

import copy

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator

import pmlip
from conftest import randomise_noise
from pmlip import losses, novelty
from pmlip.noise.injection import noisy_layers
from pmlip.structures.atoms import system_index


def rotation(seed=0):
    q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.linalg.det(q)


def rotated(atoms, matrix):
    turned = atoms.copy()
    turned.set_cell(atoms.cell.array @ matrix.T)
    turned.positions = atoms.positions @ matrix.T
    return turned


def pair_across(distance):
    """Two atoms at this distance, and a third between them so that neither is ever alone."""
    return Atoms("SiOSi", [[0, 0, 0], [distance / 2, 1.2, 0], [distance, 0, 0]], cell=[30, 30, 30], pbc=True)


class BackboneContract:
    """Subclasses give the fixture `backbone` (class-scoped) and may change what follows."""

    energy_tolerance = 2e-6  # eV per atom; single precision
    force_tolerance = 2e-4  # eV/Å
    noise_scale = 0.3  # of the random noise weights
    sites_have_bias = True  # whether the layers that noise enters can hold a folded sample
    calculator_needs_cell = True  # whether the package's own calculator cannot take a molecule without a cell
    cutoffs: tuple[float, ...]  # Å, the distances at which the backbone's graphs change

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, backbone):
        return randomise_noise(pmlip.perturb(backbone), scale=cls.noise_scale)

    @pytest.fixture(scope="class")
    @classmethod
    def structures(cls):
        """One atom in its cell, a molecule without a cell, two crystals, and a molecule without any angle."""
        structures = [bulk("Cu"), molecule("CH3CH2OH"), bulk("NaCl", "rocksalt", a=5.6, cubic=True), bulk("Si")]
        structures.append(molecule("N2"))
        for seed, atoms in enumerate(structures):
            atoms.rattle(0.05, seed=seed)
        return structures

    def assert_same(self, given, expected, atoms):
        torch.testing.assert_close(given["energy"], expected["energy"], rtol=0, atol=self.energy_tolerance * atoms)
        torch.testing.assert_close(given["forces"], expected["forces"], rtol=0, atol=self.force_tolerance)

    # the start

    def test_starts_as_the_backbone(self, backbone, structures):
        start = pmlip.perturb(backbone)
        with torch.no_grad():
            plain = backbone(backbone.graph(structures))
        samples = start.sample(structures, samples=2)
        for outputs in (start.predict(structures), {name: value[1] for name, value in samples.items()}):
            self.assert_same(outputs, plain, atoms=8)
        assert not start.trained

    def test_an_untrained_spread_is_refused(self, backbone, structures):
        samples = pmlip.perturb(backbone).sample(structures[:1], samples=2)
        with pytest.raises(ValueError, match="never trained"):
            _ = samples.spread

    # agreement with the package itself

    def test_agrees_with_its_own_calculator(self, backbone, structures):
        outputs = pmlip.perturb(backbone).predict(structures)
        calculator = copy.deepcopy(backbone).calculator()
        for index, atoms in enumerate(structures):
            atoms = atoms.copy()
            if self.calculator_needs_cell and atoms.cell.rank < 3:
                atoms.center(vacuum=12)
            atoms.calc = calculator
            forces = outputs.forces[outputs.system == index].numpy()
            assert float(outputs.energy[index]) == pytest.approx(
                float(atoms.get_potential_energy()), abs=self.energy_tolerance * len(atoms)
            )
            np.testing.assert_allclose(forces, atoms.get_forces(), atol=self.force_tolerance)
            if "stress" in outputs and structures[index].cell.rank == 3:
                np.testing.assert_allclose(outputs.stress[index].numpy(), atoms.get_stress(), atol=1e-5)

    def test_stress_without_a_cell_is_not_a_number(self, model, structures):
        outputs = model.predict(structures)
        if "stress" in outputs:
            no_cell = torch.tensor([atoms.cell.rank < 3 for atoms in structures])
            assert bool((outputs.stress.isnan().all(-1) == no_cell).all())

    def test_references_can_be_shifted(self, backbone, structures):
        """Plain, perturbed, folded and the package's own energies shift alike, by what each element was given."""
        shifted = copy.deepcopy(backbone)
        shifted.shift_references({14: 0.5, 11: -2.0})
        moved = {number: value - backbone.references()[number] for number, value in shifted.references().items()}
        assert {number: value for number, value in moved.items() if value} == pytest.approx(
            {14: 0.5, 11: -2.0}, abs=1e-4
        )
        silicon, salt = structures[3], structures[2]
        model = randomise_noise(pmlip.perturb(shifted), scale=self.noise_scale)
        for atoms, expected in ((silicon, 1.0), (salt, -8.0)):
            before = float(pmlip.perturb(backbone).predict(atoms).energy)
            assert float(model.predict(atoms).energy) - before == pytest.approx(expected, abs=1e-4)
            copied = atoms.copy()
            copied.calc = copy.deepcopy(shifted).calculator()
            assert float(copied.get_potential_energy()) - before == pytest.approx(expected, abs=1e-4)

    # sample k is one function

    def test_a_sample_does_not_depend_on_batch_or_chunks(self, model, structures):
        together = model.sample(structures, samples=5, chunk_atoms=10**6)
        for index, atoms in enumerate(structures):
            alone = model.sample(atoms, samples=3, chunk_atoms=1)
            mine = {"energy": together.energy[:3, [index]], "forces": together.forces[:3, together.system == index]}
            self.assert_same(alone, mine, atoms=len(atoms))

    def test_samples_differ(self, model, structures):
        spread = model.sample(structures, samples=4).spread
        assert bool((spread.energy > 10 * self.energy_tolerance).all())

    def test_fold_is_the_sample(self, model, backbone, structures):
        samples = model.sample(structures, samples=3, seed=7)
        folded = model.fold(sample=2, seed=7)
        with torch.no_grad():
            outputs = folded(folded.graph(structures))
        self.assert_same(outputs, {"energy": samples.energy[2], "forces": samples.forces[2]}, atoms=8)
        assert type(folded.module) is type(backbone.module)
        # a radial layer of e3nn has no bias that could hold a sample: it keeps the shift beside its weights
        layers = () if self.sites_have_bias else model.sites
        more = folded.state_dict().keys() - backbone.state_dict().keys()
        assert more == {f"module.{site.name}.shift" for site in layers}

    def load(self, path, backbone):
        return pmlip.load(path)

    def test_save_and_load(self, model, backbone, structures, tmp_path):
        model.save(tmp_path / "model.pt")
        loaded = self.load(tmp_path / "model.pt", backbone)
        given, expected = loaded.sample(structures, samples=2), model.sample(structures, samples=2)
        self.assert_same(given, expected, atoms=8)

    # physics

    def test_force_is_minus_the_gradient(self, model, structures):
        if not model.backbone.conservative:
            pytest.skip("forces of this backbone are not gradients")
        double = copy.deepcopy(model).double()
        atoms, step = structures[2], 1e-4
        moved = [atoms.copy(), atoms.copy()]
        moved[0].positions[1, 2] += step
        moved[1].positions[1, 2] -= step
        energy = double.sample(moved, samples=2).energy
        force = double.sample(atoms, samples=2).forces[:, 1, 2]
        torch.testing.assert_close(force, -(energy[:, 0] - energy[:, 1]) / (2 * step), rtol=1e-5, atol=1e-6)

    def test_stress_is_the_strain_derivative(self, model, structures):
        if not model.backbone.conservative or "stress" not in model.predict(structures[2]):
            pytest.skip("this backbone has no stress that is a gradient")
        double = copy.deepcopy(model).double()
        atoms, step = structures[2], 1e-5
        strained = []
        for sign in (1, -1):
            strained.append(atoms.copy())
            strain = np.eye(3)
            strain[0, 1] = strain[1, 0] = sign * step / 2
            strained[-1].set_cell(atoms.cell.array @ strain, scale_atoms=True)
        energy = double.sample(strained, samples=2).energy
        shear = (energy[:, 0] - energy[:, 1]) / (2 * step) / atoms.get_volume()
        torch.testing.assert_close(double.sample(atoms, samples=2).stress[:, 0, 5], shear, rtol=1e-4, atol=1e-7)

    def test_translation_and_permutation(self, model, structures):
        atoms = structures[2]
        order = np.random.default_rng(0).permutation(len(atoms))
        moved = atoms[order]
        moved.positions += [3.0, -7.0, 11.0]
        given, expected = model.sample(moved, samples=2), model.sample(atoms, samples=2)
        self.assert_same(
            given, {"energy": expected.energy, "forces": expected.forces[:, torch.from_numpy(order)]}, atoms=8
        )

    def test_rotation_at_fixed_noise(self, model, structures, record_property):
        matrix = rotation()
        turned = [rotated(atoms, matrix) for atoms in structures]
        given, expected = model.sample(turned, samples=3), model.sample(structures, samples=3)
        forces = expected.forces @ torch.from_numpy(matrix).to(expected.forces).T
        record_property("rotation_error", float((given.forces - forces).abs().max()))
        if model.backbone.equivariant:
            self.assert_same(given, {"energy": expected.energy, "forces": forces}, atoms=8)

    def test_energy_is_continuous_at_the_cutoffs(self, model):
        if not self.cutoffs:
            pytest.skip("this backbone has no distance at which its graph changes")
        double = copy.deepcopy(model).double()
        for cutoff in self.cutoffs:
            energy = double.sample([pair_across(cutoff + step) for step in (-1e-6, 1e-6)], samples=3).energy
            torch.testing.assert_close(energy[:, 0], energy[:, 1], rtol=0, atol=1e-5)

    # novelty

    def test_site_gradients_are_the_derivative_by_a_shift(self, backbone, structures):
        """The gradients of all atoms add up to dE/d(shift), here by finite differences along one direction."""
        model = randomise_noise(pmlip.perturb(backbone, noise_dim=1), scale=0.3).double()
        torch.nn.init.ones_(model.noise.w_z)
        step = 1e-4
        direction = torch.cat([layer.noise_weight.detach()[:, 0] for layer in noisy_layers(model.backbone)])
        for atoms in structures[:3]:
            graph = model.backbone.graph([atoms])
            with torch.no_grad():
                plus, minus = (model(graph, torch.tensor([[z]]))["energy"][0] for z in (step, -step))
            slope = (plus - minus) / (2 * step) - len(atoms) * model.energy_zero.detach()[0]
            gradients, _ = novelty.features(model.backbone, graph, "gradients")
            torch.testing.assert_close(gradients.sum(0) @ direction, slope[0], rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("kind", novelty.KINDS)
    def test_features_of_an_atom(self, backbone, structures, kind):
        """They depend on nothing but the atom's surroundings, and the prediction is the same."""
        double = copy.deepcopy(backbone).double()
        together, outputs = novelty.features(double, double.graph(structures), kind)
        with torch.no_grad():
            plain = double(double.graph(structures))
        self.assert_same(outputs, plain, atoms=8)
        system = system_index(structures)
        for index, atoms in enumerate(structures):
            alone, _ = novelty.features(double, double.graph([atoms]), kind)
            torch.testing.assert_close(alone, together[system == index], rtol=1e-5, atol=1e-7)
        if backbone.equivariant:
            turned, _ = novelty.features(double, double.graph([rotated(a, rotation()) for a in structures]), kind)
            torch.testing.assert_close(turned, together, rtol=1e-4, atol=1e-6)

    # tangent samples

    def test_tangent_samples(self, backbone, structures):
        """They are the derivative by the weights, the same in every batch, and potentials where the backbone is one."""
        model = randomise_noise(pmlip.perturb(backbone, noise_dim=4), scale=self.noise_scale).double()
        crystal, others = structures[2], structures[2:]
        labelled = crystal.copy()
        labelled.calc = SinglePointCalculator(labelled, forces=np.full((len(labelled), 3), 0.1))
        model.fit_tangent([labelled])
        plain = copy.deepcopy(model)
        plain.tangent = None
        together = model.sample(others, samples=2)
        alone = model.sample(crystal, samples=2)
        mine = together.system == 0
        torch.testing.assert_close(alone.energy, together.energy[:, [0]], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(alone.forces, together.forces[:, mine], rtol=1e-4, atol=1e-6)
        change = alone.forces[1] - plain.sample(crystal, samples=2).forces[1]
        assert float(change.abs().max()) > 1e-6
        step = 1e-6 / float(model.tangent.direction(model.draw(2)[1, 4:]).norm())
        moved = [self._along_the_tangent(model, sign * step, crystal).forces for sign in (1, -1)]
        torch.testing.assert_close(change, (moved[0] - moved[1]) / (2 * step), rtol=1e-3, atol=1e-4)
        if model.backbone.conservative:
            nearby = [crystal.copy(), crystal.copy()]
            nearby[0].positions[1, 2] += 1e-5
            nearby[1].positions[1, 2] -= 1e-5
            energy = model.sample(nearby, samples=2).energy
            slope = (energy[:, 0] - energy[:, 1]) / 2e-5
            torch.testing.assert_close(alone.forces[:, 1, 2], -slope, rtol=1e-4, atol=1e-5)

    @staticmethod
    def _along_the_tangent(model, step, atoms):
        """The prediction with the weights moved by this fraction of the direction of sample 1."""
        moved, own = copy.deepcopy(model), model.tangent
        direction = float(own.width) * own.direction(model.draw(2)[1, model.noise.dim :])
        with own.changed(moved.backbone) as groups, torch.no_grad():
            weights = [weight for group in groups for weight in group]
            for weight, part in zip(weights, own.sketch(groups).spread(step * direction), strict=True):
                weight.add_(part)
            return moved.predict(atoms)

    # training

    def test_two_passes_give_the_joint_gradient(self, model, structures):
        double = copy.deepcopy(model).double()
        graph = double.backbone.graph(structures)
        target = double.predict(structures)
        label = pmlip.Outputs({"energy": target.energy + 0.1, "forces": target.forces.double() + 0.05}, target.system)
        noise = torch.randn(4, len(structures), model.noise.dim, generator=torch.Generator().manual_seed(0))
        gradients = []
        for chunk in (None, 1, 3):
            double.zero_grad()
            losses.backpropagate(
                lambda piece: double(graph, piece), noise, lambda out: losses.crps_loss(out, label), chunk=chunk
            )
            gradients.append([p.grad.clone() for p in double.parameters() if p.grad is not None])
        for joint, one, three in zip(*gradients, strict=True):
            torch.testing.assert_close(one, joint, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(three, joint, rtol=1e-6, atol=1e-9)
        assert double.noise.w_z.grad.abs().sum() > 0

    def test_a_missing_cell_does_not_spoil_the_gradient(self, model, structures):
        trained = copy.deepcopy(model)
        outputs = trained(trained.backbone.graph(structures), trained.draw(2))
        label = pmlip.Outputs(
            {name: value[0].detach().double() + 0.1 for name, value in outputs.items()}, system_index(structures)
        )
        losses.crps_loss(outputs, label, weights=dict.fromkeys(outputs, 1.0)).total.backward()
        assert all(bool(p.grad.isfinite().all()) for p in trained.parameters() if p.grad is not None)

    def test_learns_by_fine_tuning(self, backbone, structures, tmp_path):
        """Two steps on crystals that are labelled by the potential itself, with other forces."""
        taught = []
        for atoms in (structures[2], structures[3]):
            point = pmlip.perturb(backbone).predict(atoms)
            taught.append(atoms.copy())
            results = {"energy": float(point.energy) + 1.0, "forces": point.forces.numpy() * 1.1 + 0.02}
            taught[-1].calc = SinglePointCalculator(taught[-1], **results)
        tuned = pmlip.perturb(backbone, noise_dim=4)
        config = pmlip.FinetuneConfig(steps=2, batch=2, samples=2, energy=0.0)  # energies would take a minute
        done = pmlip.finetune(tuned, taught, config=config)
        assert done.steps == 2
        assert tuned.trained
        tuned.save(tmp_path / "tuned.pt")
        given = self.load(tmp_path / "tuned.pt", backbone).sample(taught, samples=2)
        self.assert_same(given, tuned.sample(taught, samples=2), atoms=8)
        assert bool((given.spread.forces > 0).any())

    def test_noise_is_gone_after_the_call(self, model, structures):
        plain = model.predict(structures)
        model.sample(structures, samples=1, seed=3)
        with torch.no_grad():
            self.assert_same(model.backbone(model.backbone.graph(structures)), plain, atoms=8)

    def test_leaves_states_as_they_were(self, backbone, model, structures):
        before = {name: value.clone() for name, value in backbone.state_dict().items()}
        dtype, threads, random = torch.get_default_dtype(), torch.get_num_threads(), torch.random.get_rng_state()
        trained = copy.deepcopy(model)
        trained.train()
        part = next(iter(trained.backbone.children()))
        part.eval()
        trained.sample(structures, samples=2)
        copy.deepcopy(backbone).double().calculator()
        assert trained.training
        assert not part.training
        assert torch.get_default_dtype() == dtype
        assert torch.get_num_threads() == threads
        assert bool((torch.random.get_rng_state() == random).all())
        assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
