"""The curvature H = sum of g g^T of vectors g, and lengths measured by its inverse.

H is regularised by `floor` = regularisation * (trace of H) / (length of g). It is stored by its largest eigenvectors,
which is accurate as long as the eigenvalues left out are small against the floor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

REGULARISATION = 1e-4  # of novelty; anything from 1e-2 to 1e-6 gives nearly the same result
NEGLIGIBLE = 0.01  # eigenvalues below this fraction of the floor are left out
SMALLEST_ENTRY = 1e-12  # of an eigenvector; below, products become denormal numbers, which are ten times as slow


@dataclass(frozen=True, eq=False)
class Curvature:
    """H + floor I by eigenvectors; all other directions have the eigenvalue `floor`."""

    centre: Tensor  # (feature,) subtracted from each vector first
    vectors: Tensor  # (rank, feature), orthonormal
    values: Tensor  # (rank,) eigenvalues of H + floor I
    floor: float

    def check(self) -> None:
        """Raise ValueError unless the sizes agree and all values can be used."""
        rank, size = len(self.values), len(self.centre)
        if self.centre.dim() != 1 or self.values.dim() != 1 or self.vectors.shape != (rank, size):
            raise ValueError(
                f"a curvature of {size} features and rank {rank} has eigenvectors of shape {tuple(self.vectors.shape)}"
            )
        finite = all(bool(part.isfinite().all()) for part in (self.centre, self.vectors, self.values))
        if not finite or not bool((self.values > 0).all()) or not 0 < self.floor < float("inf"):
            raise ValueError("a curvature must be finite and positive")

    def whitened(self, rows: Tensor) -> Tensor:
        """Vectors w with w_i . w_j = g_i^T (H + floor I)^-1 g_j, for rows g (row, feature), in their precision."""
        vectors = self.vectors.to(rows)
        centred = rows - self.centre.to(rows)
        inside = centred @ vectors.T
        # subtract vectors, not squared lengths, which would cancel
        outside = centred - inside @ vectors
        return torch.cat([inside / self.values.to(rows).sqrt(), outside / self.floor**0.5], 1)

    def length(self, rows: Tensor) -> Tensor:
        """sqrt(g^T (H + floor I)^-1 g) of each row g."""
        return self.whitened(rows).double().square().sum(1).sqrt()

    def length_left_out(self, rows: Tensor) -> Tensor:
        """The length of each row if H did not contain these rows, which are part of it."""
        # with A = H + floor I and B the rows: B (A - B^T B)^-1 B^T = L (I - L)^-1, where L = B A^-1 B^T
        whitened = self.whitened(rows.double())
        values, vectors = torch.linalg.eigh(whitened @ whitened.T)
        values = values.clamp(0, 1 - 1e-9)
        return (vectors.square() @ (values / (1 - values))).sqrt()


class CurvatureSum:
    """Adds up the curvature of any number of vectors, in memory for at most as many vectors as they have entries."""

    def __init__(self, features: int, *, centred: bool, regularisation: float = REGULARISATION) -> None:
        self._features, self._centred, self._regularisation = features, centred, regularisation
        self._rows: list[Tensor] = []
        self._count = 0
        self._sum = torch.zeros(features, dtype=torch.float64)
        self._matrix: Tensor | None = None  # replaces the rows as soon as it takes less memory

    def add(self, rows: Tensor) -> None:
        rows = rows.double().cpu()
        self._count += len(rows)
        self._sum += rows.sum(0)
        if self._matrix is not None:
            self._matrix.addmm_(rows.T, rows)
            return
        self._rows.append(rows)
        if self._count > self._features:
            stacked = torch.cat(self._rows)
            self._matrix, self._rows = stacked.T @ stacked, []

    def curvature(self) -> Curvature:
        centre = self._sum / self._count if self._centred else torch.zeros_like(self._sum)
        if self._matrix is None:
            # the eigenvalues of B^T B and of B B^T agree, and B B^T is smaller
            rows = torch.cat(self._rows) - centre
            values, left = torch.linalg.eigh(rows @ rows.T)
            scale = values.clamp(min=values[-1].item() * 1e-14).sqrt()
            vectors = (left / scale).T @ rows
        else:
            values, right = torch.linalg.eigh(self._matrix - self._count * torch.outer(centre, centre))
            vectors = right.T
        trace = float(values.clamp(min=0).sum())
        floor = max(self._regularisation * trace / self._features, torch.finfo(torch.float32).tiny)
        large = values > max(NEGLIGIBLE * floor, 1e-12 * values[-1].item())
        vectors = vectors[large].float()
        vectors = vectors.masked_fill(vectors.abs() < SMALLEST_ENTRY, 0)
        return Curvature(centre.float(), vectors, (values[large] + floor).float(), floor)
