"""For torch-sim: a model whose outputs include uncertainties.

model = TorchSimModel(pmlip.load("p-chgnet.pt"), samples=8)
torch_sim.integrate(system=structures, model=model, ...)
"""

from typing import Any

import torch
from ase.stress import voigt_6_to_full_3x3_stress
from torch import Tensor

from pmlip.methods.base import Method
from pmlip.unfamiliar import Watch

try:
    from torch_sim.io import state_to_atoms
    from torch_sim.models.interface import ModelInterface
    from torch_sim.state import SimState
except ImportError as error:
    raise ImportError("torch-sim models need: pip install 'pmlip[torchsim]'") from error


class TorchSimModel(ModelInterface):
    """Predicts the mean over all noise, with energy_uncertainty (system,) and forces_uncertainty (atom, 3).

    If the model knows its training set, the outputs also hold novelty (system,) and atom_novelty (atom,). With
    samples=0, one pass gives the prediction without noise, novelty, and error bars of the forces from novelty.

    Every step draws the same samples from the seed. So the energy of perturbed models and ensembles is as smooth a
    function of the positions as the energy of the backbone.
    """

    def __init__(self, model: Method, *, samples: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.model, self.samples, self.seed = model, model.prediction_samples(samples), seed
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._watch = Watch(model)
        self._compute_forces = self._compute_stress = True

    def forward(self, state: Any, **_: Any) -> dict[str, Tensor]:
        given = state if isinstance(state, SimState) else SimState(**state)
        structures, outputs = state_to_atoms(given), dict[str, Tensor]()
        found = self.model.novelty(structures) if self.model.training_features else None
        self._watch.look(structures, found)
        if found is not None:
            outputs |= {"novelty": found.structure, "atom_novelty": found.atom}
        if self.samples:
            drawn, mean = self.model.sample_with_mean(structures, samples=self.samples, seed=self.seed)
            spread, calibration = drawn.spread, self.model.calibration
            energy_factor = calibration.energy_factor if calibration else 1.0
            outputs |= {"energy_uncertainty": energy_factor * spread.energy, "forces_uncertainty": spread.forces}
        else:
            assert found is not None
            mean = found.predicted
            outputs["forces_uncertainty"] = found.sigma[:, None].expand(-1, 3)
        outputs |= {"energy": mean.energy, "forces": mean.forces}
        if "stress" in mean:
            outputs["stress"] = torch.stack([_full(voigt) for voigt in mean.stress])
        return {name: value.to(given.positions) for name, value in outputs.items()}


def _full(voigt: Tensor) -> Tensor:
    return torch.from_numpy(voigt_6_to_full_3x3_stress(voigt.numpy()))
