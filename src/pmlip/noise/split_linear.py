"""Linear layer on concatenated inputs [a[i], b[j], c, ...] without materialising the concatenation.

Each table is multiplied by its columns of the weight matrix first and gathered afterwards. This saves work, because a
table of nodes or bonds has far fewer rows than there are edges or angles.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class SplitInput:
    """Several tables whose gathered rows are concatenated along the feature axis."""

    # (table, function that gathers its rows); None instead of the function: the table itself
    parts: tuple[tuple[Tensor, Callable[[Tensor], Tensor] | None], ...]

    def concatenated(self) -> Tensor:
        values = [table if gather is None else gather(table) for table, gather in self.parts]
        rows = torch.broadcast_shapes(*(value.shape[:-1] for value in values))
        return torch.cat([value.expand(*rows, -1) for value in values], -1)

    def square(self) -> "SplitInput":
        return SplitInput(tuple((table.square(), gather) for table, gather in self.parts))


def split_input(*parts: tuple[Tensor, Tensor | None]) -> SplitInput:
    """Build a SplitInput from tables (row, feature), each with the row indices to gather; None: all rows in order."""
    return SplitInput(tuple((table, None if index is None else _Rows(index)) for table, index in parts))


@dataclass(frozen=True)
class _Rows:
    index: Tensor

    def __call__(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.index)


def linear(x: Tensor | SplitInput, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b."""
    if isinstance(x, Tensor):
        return functional.linear(x, weight, bias)
    columns = weight.split([table.shape[-1] for table, _ in x.parts], dim=1)
    terms: list[Tensor] = []
    for (table, gather), block in zip(x.parts, columns, strict=True):
        term = functional.linear(table, block, None if terms else bias)
        terms.append(term if gather is None else gather(term))
    return sum(terms[1:], start=terms[0])


class SplitLinear(nn.Linear):
    """Linear layer that also accepts a `SplitInput`."""

    def forward(self, x: Tensor | SplitInput) -> Tensor:
        return linear(x, self.weight, self.bias)
