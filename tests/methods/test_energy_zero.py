import numpy as np
import torch

from pmlip.methods._energy_zero import fit_curvature, fit_slope


def test_the_few_directions_in_which_a_function_is_curved_are_found():
    """A quadratic function of 128 variables that is curved in 8 directions only, and a line."""
    random = np.random.default_rng(0)
    axes, sizes = random.normal(size=(8, 128)), random.normal(size=8)
    curvature, slope = torch.tensor(axes.T @ np.diag(sizes) @ axes), torch.tensor(random.normal(size=128))

    def gradient(e):
        return e.double() @ curvature + slope

    torch.testing.assert_close(fit_curvature(gradient, 128), curvature)
    torch.testing.assert_close(fit_slope(gradient, 128), slope)


def test_the_parabola_is_the_best_for_normal_draws():
    """f = x^3 + x^4: of the mean of its derivatives, 3 for the slope and 12 for the curvature."""

    def gradient(e):
        return 3 * e.double() ** 2 + 4 * e.double() ** 3

    assert abs(float(fit_slope(gradient, 1)) - 3) < 2  # from 32 draws
    assert abs(float(fit_curvature(gradient, 1)) - 12) < 1e-5  # the rule is exact for these
