import pytest
import torch

from pmlip.samples import Outputs, Samples, mean_per_system

SYSTEM = torch.tensor([0, 0, 1])


def make(count=5, **options):
    generator = torch.Generator().manual_seed(0)
    named = {"energy": torch.randn(count, 2, generator=generator), "forces": torch.randn(count, 3, 3)}
    return Samples(named, SYSTEM, **options)


def test_reads_as_a_mapping_and_by_attribute():
    samples = make()
    assert dict(samples).keys() == {"energy", "forces"}
    assert samples["energy"] is samples.energy
    assert samples.count == 5
    assert samples.systems == 2
    assert samples.atoms_per_system.tolist() == [2, 1]


def test_mean_and_spread_are_those_of_the_samples():
    samples = make()
    torch.testing.assert_close(samples.mean.forces, samples.forces.mean(0))
    torch.testing.assert_close(samples.spread.energy, samples.energy.std(0, correction=1))
    assert isinstance(samples.mean, Outputs)


def test_a_subset_keeps_the_first_samples():
    samples = make()
    assert torch.equal(samples.subset(2).forces, samples.forces[:2])
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=f"samples must be 1 to 5, .* got samples={wrong}"):
            samples.subset(wrong)


@pytest.mark.parametrize(
    ("samples", "message"),
    [(make(count=1), "at least 2 samples, got samples=1"), (make(trained=False), "never trained")],
)
def test_a_spread_that_means_nothing_is_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        _ = samples.spread


def test_an_output_that_is_not_there_is_refused():
    with pytest.raises(KeyError, match="no output 'stress'; there are: energy, forces"):
        _ = make().stress


def test_mean_per_system_weighs_entries_alike():
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0], [10.0, 20.0]])
    assert mean_per_system(values, SYSTEM, 2).tolist() == [4.0, 15.0]


def test_samples_can_be_scaled_about_another_mean():
    samples = make()
    centre = Outputs({name: value + 1 for name, value in samples.mean.items()}, SYSTEM)
    scaled = samples.scaled(1.0, energy=0.5, mean=centre)
    torch.testing.assert_close(scaled.energy - centre.energy, 0.5 * (samples.energy - centre.energy))
    torch.testing.assert_close(scaled.spread.energy, 0.5 * samples.spread.energy)
    torch.testing.assert_close(scaled.forces, samples.forces)


def test_scaling_keeps_the_mean():
    samples = Samples({"forces": torch.randn(5, 4, 3, dtype=torch.float64)}, torch.tensor([0, 0, 1, 1]))
    scaled = samples.scaled(1.7)
    assert torch.allclose(scaled.mean.forces, samples.mean.forces)
    assert torch.allclose(scaled.spread.forces, 1.7 * samples.spread.forces)
