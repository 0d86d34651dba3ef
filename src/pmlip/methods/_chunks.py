"""Runs (system, sample) pairs through a model in chunks, sized for speed and to fit in memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmlip.memory import is_out_of_memory
from pmlip.samples import join


@dataclass
class ChunkSize:
    """Number of atoms per pass, tuned at run time unless `settled`.

    It doubles as long as doubling lowers the time per atom by at least 5 %, and halves when memory runs out.
    """

    atoms: int = 64
    settled: bool = False  # no more doubling
    _measured: int = 0  # atoms of the largest pass so far
    _cost: float = float("inf")  # seconds per atom of that pass

    def record(self, atoms: int, seconds: float) -> None:
        """Update the size from the time of a pass; ignores passes less than 1.5 times the largest so far."""
        if self.settled or 2 * atoms < 3 * self._measured:
            return
        cost = seconds / atoms
        if cost > 0.95 * self._cost:
            self.atoms, self.settled = self._measured, True
        else:
            self._measured, self._cost = atoms, cost
            self.atoms = 2 * max(self.atoms, atoms)

    def halve(self, tried: int) -> None:
        """Halve the size after a pass of `tried` atoms ran out of memory."""
        self.atoms, self.settled = max(1, tried // 2), True


def run_in_chunks(
    build: Callable[[int, int], Any],
    forward: Callable[[Any, Tensor], Mapping[str, Tensor]],
    *,
    sizes: Sequence[int],
    noise: Tensor,
    chunk: ChunkSize,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Outputs (sample, system or atom, ...) of every system with every row of the noise.

    build(start, stop) makes the graph of systems start to stop - 1. forward(graph, noise) returns outputs with the
    sample axis first. progress(done, total) counts systems.
    """
    parts, start = [], 0
    while start < len(sizes):
        stop, atoms = start + 1, sizes[start]
        while stop < len(sizes) and (atoms + sizes[stop]) * len(noise) <= chunk.atoms:
            atoms += sizes[stop]
            stop += 1
        parts.append(_run_group(build, forward, sizes, start, stop, noise, chunk))
        start = stop
        if progress:
            progress(start, len(sizes))
    return join(parts, axis=1)


def _run_group(
    build: Callable[[int, int], Any],
    forward: Callable[[Any, Tensor], Mapping[str, Tensor]],
    sizes: Sequence[int],
    start: int,
    stop: int,
    noise: Tensor,
    chunk: ChunkSize,
) -> Mapping[str, Tensor]:
    graph, atoms = build(start, stop), sum(sizes[start:stop])
    parts: list[Mapping[str, Tensor]] = []
    done = 0
    while done < len(noise):
        copies = max(1, min(len(noise) - done, chunk.atoms // atoms))
        began = time.perf_counter()
        try:
            parts.append(forward(graph, noise[done : done + copies]))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if copies == 1 and stop - start == 1:
                raise MemoryError(f"one sample of one structure of {atoms} atoms does not fit in memory") from error
        else:
            chunk.record(atoms * copies, time.perf_counter() - began)
            done += copies
            continue
        # Retry outside the except block: the exception holds tensors, and their memory is free only now.
        chunk.halve(atoms * copies)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if copies == 1:
            middle = (start + stop) // 2
            halves = [
                _run_group(build, forward, sizes, first, last, noise[done:], chunk)
                for first, last in ((start, middle), (middle, stop))
            ]
            parts.append(join(halves, axis=1))
            break
    return join(parts, axis=0)
