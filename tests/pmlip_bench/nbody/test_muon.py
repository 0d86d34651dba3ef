import pytest
import torch
from torch import nn

from pmlip_bench.nbody.muon import Muon, orthogonalised


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_orthogonalised_matrices_keep_their_directions_and_lose_their_sizes(shape):
    matrices = random(3, *shape)
    out = orthogonalised(matrices)
    singular = torch.linalg.svdvals(out)
    assert (singular > 0.6).all()
    assert (singular < 1.3).all()
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ out @ vh.mT  # diagonal, if the singular vectors are the same
    assert torch.allclose(inner, torch.diag_embed(inner.diagonal(dim1=1, dim2=2)), atol=1e-4)


def test_matrices_of_a_stack_do_not_feel_each_other_nor_their_scale():
    matrices = random(2, 8, 12)
    alone = orthogonalised(1000 * matrices[:1])
    assert torch.allclose(orthogonalised(matrices)[:1], alone, atol=1e-5)
    assert (orthogonalised(torch.zeros(1, 8, 12)) == 0).all()


def test_a_step_moves_all_directions_alike_and_decays_the_weights():
    matrix, untouched = nn.Parameter(random(8, 8)), nn.Parameter(random(8, 8))
    before = matrix.detach().clone()
    optimizer = Muon([{"params": [matrix, untouched], "weight_decay": 0.5}], lr=0.1)
    steep = torch.diag(torch.logspace(0, -2, 8))  # a gradient that is a hundred times steeper along its first direction
    matrix.grad = steep
    optimizer.step()
    moved = (1 - 0.1 * 0.5) * before - matrix.detach()
    sizes = torch.linalg.svdvals(moved) / (0.1 * 0.2 * 8**0.5)
    assert sizes.max() / sizes.min() < 2
    assert torch.equal(untouched, random(8, 8))


def test_it_finds_the_solution_of_an_unevenly_steep_problem():
    target, scales = random(8, 8), torch.logspace(0, -1, 8)
    matrix = nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([matrix], lr=0.2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=300)
    for _ in range(300):
        optimizer.zero_grad()
        ((matrix - target) * scales).square().sum().backward()
        optimizer.step()
        schedule.step()
    assert (matrix - target).abs().max() < 0.1


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"matrices only, got a parameter of shape \(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)
