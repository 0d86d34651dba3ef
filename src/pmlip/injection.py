"""The former place of `pmlip.noise.injection`: folded MACE models, which are pickles, name it."""

from pmlip.noise.injection import ShiftedRadial, vanish_with_input

__all__ = ["ShiftedRadial", "vanish_with_input"]
