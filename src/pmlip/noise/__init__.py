"""Noise for a network: random draws, the layers that add them, and the learnable noise matrix W_z."""

from pmlip.noise.draws import draw

__all__ = ["draw"]
