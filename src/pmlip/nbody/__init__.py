"""The paper's first benchmark: the positions of five charged particles after a thousand steps."""

from pmlip.nbody.data import read_public
from pmlip.nbody.simulate import initial, simulate

__all__ = ["initial", "read_public", "simulate"]
