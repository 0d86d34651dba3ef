"""The noise z = W_z e of a model: the learnable matrix W_z and the current draw e."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Noise(nn.Module):
    """The learnable matrix W_z of one perturbed model and the current draw e.

    All noisy layers of a model share one `Noise`; two models never share one. `Perturbed` sets the draw for the forward
    pass and again for the backward pass, because activation checkpointing runs layers again there.
    """

    draw: Tensor | None  # (noise,), (system, noise), or (*systems, noise) if `rows` gives None
    rows: Mapping[str, Tensor | None]  # kind of row -> system of each row; None: leading axes are the systems

    def __init__(self, dim: int) -> None:
        super().__init__()
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"noise_dim must be a whole number, at least 1, got {dim}")
        # Not zero: with W_z = W_noise = 0 all gradients would stay zero.
        self.w_z = nn.Parameter(torch.eye(dim))
        self.set_draw(None)

    @property
    def dim(self) -> int:
        return self.w_z.shape[0]

    def set_draw(self, draw: Tensor | None, rows: Mapping[str, Tensor | None] | None = None) -> None:
        """Set the draw that the layers use from now on; None means z = 0."""
        if draw is not None:
            if draw.shape[-1] != self.dim:
                raise ValueError(
                    f"noise must have shape ({self.dim},) or (system, {self.dim}), got {tuple(draw.shape)}"
                )
            draw = draw.to(self.w_z)
        self.draw, self.rows = draw, rows or {}

    def shift(self, weight: Tensor, rows: str) -> Tensor | None:
        """Return W_noise z: (out,) for a draw of one system, (row, out) for several; None if no draw is set.

        If `self.rows[rows]` is None, the leading axes of the layer's input are the systems: (*systems, out).
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
        if f"{prefix}mixing" in state_dict:  # the name of W_z before checkpoint format 4
            state_dict[f"{prefix}w_z"] = state_dict.pop(f"{prefix}mixing")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles hold the weights, not the current draw.
        return {**self.__dict__, "draw": None, "rows": {}}
