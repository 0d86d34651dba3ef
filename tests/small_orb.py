"""The true architectures of Orb-v3 at reduced width, with random weights."""

import pytest
import torch

pytest.importorskip("orb_models", reason="backbone 'orb' is not installed")
from orb_models.forcefield import pretrained
from orb_models.forcefield.atomic_system import SystemConfig

from pmlip.backbones.orb import OrbBackbone

WIDTHS = {"latent_dim": 32, "base_mlp_hidden_dim": 64, "head_mlp_hidden_dim": 32, "num_message_passing_steps": 3}


def small(kind, **options):
    torch.manual_seed(0)
    make = getattr(pretrained, f"orb_v3_{kind}_architecture")
    module = make(device="cpu", system_config=SystemConfig(radius=6.0, max_num_neighbors=120), **WIDTHS, **options)
    return OrbBackbone(module.eval(), f"orb-v3-{kind}-inf-omat")
