"""Noise at the sites of a network: its draws, and how layers take it in."""

from pmlip.noise.draws import draw

__all__ = ["draw"]
