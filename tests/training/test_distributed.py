"""A single process; `test_finetuning.py` runs two."""

import pytest
import torch

from pmlip.training.distributed import Processes


def test_a_single_process_has_the_whole_batch():
    alone = Processes.start("cpu")
    assert (alone.rank, alone.count, alone.device.type) == (0, 1, "cpu")
    assert list(range(5))[alone.share] == [0, 1, 2, 3, 4]
    values = torch.randn(2, 5)
    assert alone.gather_batch(values, 5) is values
    assert alone.sum_terms({"energy": 1.5}) == {"energy": 1.5}
    assert alone.broadcast("value") == "value"
    alone.stop()


def test_the_shares_of_several_processes_make_the_batch():
    shares = [list(range(7))[Processes(rank=rank, count=3).share] for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]


def test_noise_differs_between_processes():
    zero, one = (Processes(rank=rank, count=2) for rank in range(2))
    per_system, seeds = torch.randn(3, 5, 2), torch.tensor([7, 2**62 - 1, 0])
    assert torch.equal(zero.share_of_draws(per_system), per_system[:, 0::2])
    assert torch.equal(one.share_of_draws(per_system), per_system[:, 1::2])
    assert zero.share_of_draws(seeds).tolist() == [7, 2**62 - 1, 0]
    assert one.share_of_draws(seeds).tolist() == [8, 2**62, 0]  # zero stands for no noise


def test_processes_of_torchrun_get_their_own_devices(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"torchrun assigns a device to each process: pass device='cuda'"):
        Processes.start("cuda:1")
