"""Small labelled structures and a tiny perturbed potential, which many tests train on."""

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import pmlip
from conftest import randomise_noise
from pmlip.provenance import Calibration
from pmlip.training.config import FinetuneConfig
from tiny import tiny_backbone

CONFIG = FinetuneConfig(epochs=4, batch=4, samples=3, noise_rate=1e-2, backbone_rate=1e-3, validations=3, tangent=False)


def molecules(count=10, seed=0):
    """Clusters of silicon and oxygen with the forces of springs and an energy per element."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        size = 4 + index % 3
        atoms = Atoms("".join("Si" if i % 3 == 0 else "O" for i in range(size)), 1.3 * random.normal(size=(size, 3)))
        energy = sum({"Si": -100.0, "O": -400.0}[symbol] for symbol in atoms.symbols) + 0.1 * random.normal()
        atoms.calc = SinglePointCalculator(
            atoms, energy=energy, forces=-0.3 * (atoms.positions - atoms.positions.mean(0))
        )
        made.append(atoms)
    return made


def model(seed=0):
    return randomise_noise(pmlip.perturb(tiny_backbone(seed=seed), noise_dim=32))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], msg=name, **(tolerance or {"rtol": 0, "atol": 0}))


WATER = Atoms("OH2", [[0, 0, 0], [0, 0.76, 0.59], [0, -0.76, 0.59]])


def calibration(*, conformal, samples, level=0.95, data=None, **others):
    """How a spread was scaled, with intervals of this factor for this number of samples."""
    return Calibration(
        factor=1.0,
        crps=(0.1, 0.1),
        ssr=(1.0, 1.0),
        level=level,
        conformal=conformal,
        structures=20,
        samples=samples,
        data=data,
        **others,
    )
