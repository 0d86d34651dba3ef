"""The paper's first benchmark: where five charged particles are after a thousand steps."""

from pmlip.nbody.simulate import initial, simulate

__all__ = ["initial", "simulate"]
