from dataclasses import replace

import numpy as np
import pytest
import torch

from pmlip.nbody import initial, simulate
from pmlip.nbody.data import NBodyConfig, Trajectories, cache_folder, load, read_public

SMALL = NBodyConfig(
    train=12, valid=5, test=4, out_of_distribution=3, steps=(10, 30), out_of_distribution_steps=(40, 60)
)


def same(a: Trajectories, b: Trajectories) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_data_are_the_simulated_trajectories(tmp_path):
    data = load("train", SMALL, cache=tmp_path)
    x, v, q = initial(12, seed=0)
    positions, velocities = simulate(x, v, q, steps=(10, 30))
    for given, expected in zip(
        vars(data).values(), (positions[0], velocities[0], q, positions[1], velocities[1]), strict=True
    ):
        assert given.dtype == torch.float32
        np.testing.assert_allclose(given, expected, rtol=1e-6)


def test_splits_and_settings_do_not_share_files_or_trajectories(tmp_path):
    sizes = {name: len(load(name, SMALL, cache=tmp_path)) for name in ("train", "valid", "test", "out_of_distribution")}
    assert sizes == {"train": 12, "valid": 5, "test": 4, "out_of_distribution": 3}
    assert not torch.isin(
        load("valid", SMALL, cache=tmp_path).positions, load("train", SMALL, cache=tmp_path).positions
    ).any()
    load("train", replace(SMALL, seed=1), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_the_second_time_it_comes_from_the_file(tmp_path, monkeypatch):
    first = load("test", SMALL, cache=tmp_path)
    monkeypatch.setattr("pmlip.nbody.data.simulate", None)
    assert same(load("test", SMALL, cache=tmp_path), first)


@pytest.mark.parametrize("keep", [0, 0.5, 0.95])
def test_a_file_cut_short_is_made_again_with_a_note(tmp_path, keep):
    first = load("test", SMALL, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.warns(UserWarning, match="is damaged; the trajectories are simulated again"):
        again = load("test", SMALL, cache=tmp_path)
    assert same(again, first)
    assert same(load("test", SMALL, cache=tmp_path), first)


def test_a_smaller_training_set_is_a_prefix(tmp_path):
    data = load("train", SMALL, cache=tmp_path)
    assert torch.equal(data.first(7).target, data.target[:7])
    with pytest.raises(ValueError, match="count must lie between 1 and 12, the number of trajectories, got count=13"):
        data.first(13)


def test_a_reversed_trajectory_obeys_the_same_law(tmp_path):
    """Started at its target with turned velocities, the simulation comes back to where it was, to within a step."""
    data = load("train", SMALL, cache=tmp_path).with_reversed()
    assert len(data) == 24
    back = data.part(12, 24)
    elapsed = SMALL.steps[1] - SMALL.steps[0]
    positions, _ = simulate(
        *(array.double().numpy() for array in (back.positions, back.velocities, back.charges)), steps=(elapsed,)
    )
    np.testing.assert_allclose(positions[0], back.target, atol=5e-3)
    assert torch.equal(back.target, data.part(0, 12).positions)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="unknown split 'val'; allowed: train, valid, test, out_of_distribution"):
        load("val", SMALL)


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PMLIP_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


@pytest.fixture
def public(tmp_path):
    """Files of the public generator's form: every 10th step of 4 trajectories."""
    x, v, q = initial(4, seed=9)
    positions, velocities = simulate(x, v, q, steps=range(10, 60, 10))
    for kind, array in (("loc", positions), ("vel", velocities)):
        np.save(tmp_path / f"{kind}_train_charged5_initvel1small.npy", array.transpose(1, 0, 3, 2))
    np.save(tmp_path / "charges_train_charged5_initvel1small.npy", q[..., None])
    return tmp_path, positions, velocities, q


def test_files_of_the_public_generator(public):
    folder, positions, velocities, q = public
    data = read_public(folder, "train", frames=(1, 3))
    np.testing.assert_allclose(data.positions, positions[1], rtol=1e-6)
    np.testing.assert_allclose(data.velocities, velocities[1], rtol=1e-6)
    np.testing.assert_allclose(data.charges, q)
    np.testing.assert_allclose(data.target, positions[3], rtol=1e-6)
    np.testing.assert_allclose(data.target_velocities, velocities[3], rtol=1e-6)


def test_public_files_that_do_not_fit_are_refused(public):
    folder, *_ = public
    with pytest.raises(FileNotFoundError, match=r"expected one file loc_valid_charged\*.npy in .*, found: none"):
        read_public(folder, "valid")
    with pytest.raises(
        ValueError, match=r"frames must be two increasing numbers between 0 and 4, got frames=\(30, 40\)"
    ):
        read_public(folder, "train")
    np.save(folder / "vel_train_charged5_initvel1small.npy", np.zeros((4, 5, 5, 3)))
    with pytest.raises(ValueError, match=r"must be \(trajectory, frame, 3, particle\)"):
        read_public(folder, "train", frames=(1, 3))
