import pytest
import torch

from pmlip.curvature import REGULARISATION, CurvatureSum


def rows(count, features, seed=0):
    """Rows whose features have very different sizes, as gradients at different sites have."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -3, features, dtype=torch.float64)
    return torch.randn(count, features, generator=generator, dtype=torch.float64) * scale + 0.3 * scale


def summed(given, *, centred=False, pieces=5):
    total = CurvatureSum(given.shape[1], centred=centred)
    for piece in given.chunk(pieces):
        total.add(piece)
    return total.curvature()


def regularised(given):
    h = given.T @ given
    return h + REGULARISATION * torch.trace(h) / len(h) * torch.eye(len(h), dtype=h.dtype)


def lengths(h, given):
    return (given @ torch.linalg.inv(h) * given).sum(1).sqrt()


@pytest.mark.parametrize("count", [6, 20, 300])  # fewer rows than features, and more
@pytest.mark.parametrize("centred", [False, True])
def test_lengths_are_those_of_the_regularised_matrix(count, centred):
    given, others = rows(count, 20), rows(50, 20, seed=1)
    centre = given.mean(0) if centred else torch.zeros(20, dtype=torch.float64)
    expected = lengths(regularised(given - centre), others - centre)
    torch.testing.assert_close(summed(given, centred=centred).length(others), expected, rtol=0.02, atol=1e-6)


def test_the_pieces_do_not_matter():
    given, others = rows(100, 20), rows(5, 20, seed=1)
    torch.testing.assert_close(
        summed(given, pieces=1).length(others), summed(given, pieces=100).length(others), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("count", [8, 300])
def test_rows_can_be_left_out_without_a_new_sum(count):
    given = rows(count, 20)
    left_out = given[:3]
    expected = lengths(regularised(given) - left_out.T @ left_out, left_out)
    torch.testing.assert_close(summed(given).length_left_out(left_out), expected, rtol=0.02, atol=1e-6)


def test_rows_in_single_precision_give_the_same_lengths():
    """Near the training rows and far from them."""
    given, others = rows(300, 200), rows(50, 200, seed=1)
    curvature = summed(given)
    for factor in (1, 1000):
        expected = curvature.length(factor * others)
        torch.testing.assert_close(curvature.length((factor * others).float()), expected, rtol=1e-4, atol=0)


def test_eigenvectors_have_no_entries_whose_products_are_denormal_numbers():
    given = rows(100, 20)
    given[:, 5:10] *= 1e-30
    vectors = summed(given).vectors
    assert float(vectors[vectors != 0].abs().min()) >= 1e-12


def test_a_row_without_parallel_rows_is_long():
    given = rows(100, 20)
    given[:, 7] = 0
    new = torch.zeros(1, 20, dtype=torch.float64)
    new[0, 7] = float(given.norm(dim=1).mean())
    curvature = summed(given)
    assert float(curvature.length(new)) > 10 * float(curvature.length(given).max())
