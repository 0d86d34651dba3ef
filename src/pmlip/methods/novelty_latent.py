"""One-pass error bars from the novelty of latent features, which needs no backward pass."""

from collections.abc import Sequence

from ase import Atoms

from pmlip.methods._gaussian import Gaussian, fitted
from pmlip.methods.base import BuiltFrom, Method
from pmlip.methods.novelty import NoveltyWidths

BUILT_FROM = BuiltFrom("deterministic")


class LatentNoveltyWidths(NoveltyWidths):
    name = "novelty-latent"
    kind = "latent"


make = LatentNoveltyWidths


def build(tuned: Sequence[Method], *, train: Sequence[Atoms], valid: Sequence[Atoms]) -> Gaussian:
    return fitted(LatentNoveltyWidths(tuned[0].backbone), train=train, valid=valid)
