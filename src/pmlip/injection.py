"""Alias of `pmlip.noise.injection`: older pickles of folded MACE models import from here."""

from pmlip.noise.injection import ShiftedRadial, vanish_with_input

__all__ = ["ShiftedRadial", "vanish_with_input"]
