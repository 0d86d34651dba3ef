"""The learnable part of the noise, z = W_z e, and the draw that is set while layers run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Noise(nn.Module):
    """The learnable W_z of one perturbed model, and the draw e in force while its layers run.

    All noisy layers of a model hold the same `Noise`; two models never share one. `Perturbed` puts a draw in force for
    the call, and once more for its backward pass, in which activation checkpointing runs layers again.
    """

    draw: Tensor | None  # (noise,) for one system, or (system, noise); more leading axes where rows are systems
    rows: Mapping[str, Tensor | None]  # kind of row -> system of each row; None: the leading axes are the systems

    def __init__(self, dim: int) -> None:
        super().__init__()
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"noise_dim must be a whole number, at least 1, got {dim}")
        # The identity, never zero: with W_z = W_noise = 0 every gradient would vanish for ever.
        self.w_z = nn.Parameter(torch.eye(dim))
        self.set_draw(None)

    @property
    def dim(self) -> int:
        return self.w_z.shape[0]

    def set_draw(self, draw: Tensor | None, rows: Mapping[str, Tensor | None] | None = None) -> None:
        """Put a draw in force for the layers that run next; None means z = 0."""
        if draw is not None:
            if draw.shape[-1] != self.dim:
                raise ValueError(
                    f"noise must have shape ({self.dim},) or (system, {self.dim}), got {tuple(draw.shape)}"
                )
            draw = draw.to(self.w_z)
        self.draw, self.rows = draw, rows or {}

    def shift(self, weight: Tensor, rows: str) -> Tensor | None:
        """W_noise z for each row of a layer: (out,), or (row, out) when several systems are in force.

        Where the leading axes of a layer's input are the systems (None), (*systems, out).
        """
        if self.draw is None:
            return None
        shift = functional.linear(functional.linear(self.draw, self.w_z), weight)
        if shift.dim() == 1:
            return shift
        if rows not in self.rows:
            raise ValueError(
                f"noise for {len(shift)} systems needs the system index of each {rows!r} row; "
                f"given: {', '.join(self.rows) or 'none'}. Pass rows={{{rows!r}: index}}"
            )
        index = self.rows[rows]
        return shift if index is None else shift.index_select(0, index)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}mixing" in state_dict:  # what W_z was called before format 4
            state_dict[f"{prefix}w_z"] = state_dict.pop(f"{prefix}mixing")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle takes the weights along, not the draw that happens to be in force.
        return {**self.__dict__, "draw": None, "rows": {}}
