import os
from pathlib import Path

import hypothesis
import pytest
import torch

from pmlip.methods import _energy_zero
from pmlip.methods.p import Potential
from pmlip.noise.injection import noisy_layers

# A timing must not decide a test, and a run must not depend on luck.
hypothesis.settings.register_profile("pmlip", deadline=None, derandomize=True)
hypothesis.settings.load_profile("pmlip")


# Every process of pytest-xdist has a core to itself, and so have the processes it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def two_threads():
    """Two threads of torch, also where each process of the tests has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quick_energy_zero():
    """Fit the energy offset of each sample roughly, for a whole module.

    With CHGNet the full fit takes longer than all else in a short fine-tuning.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PAIRS_FOR_SLOPE", "CURVED_DIRECTIONS"):
            patch.setattr(_energy_zero, name, 2)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data and weights that are not part of the project; tests that need them skip where they are absent."""
    folder = Path(os.environ.get("PMLIP_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs the folder of shared data and weights: set PMLIP_SHARED ({folder} is absent)")
    return folder


def randomise_noise(model, *, scale=0.3, seed=0):
    """Random non-zero noise weights: at the start every property of the noise would hold trivially."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in [model.noise.w_z, *(layer.noise_weight for layer in noisy_layers(model.backbone))]:
        with torch.no_grad():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(scale * draw / parameter.shape[1] ** 0.5)
    if isinstance(model, Potential):
        torch.nn.init.normal_(model.energy_zero, std=0.01, generator=generator)  # eV per atom
        torch.nn.init.normal_(model.energy_curvature, std=0.01, generator=generator)
    return model
