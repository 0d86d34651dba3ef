"""Work cut to fit: (system, sample) pairs through a model, as many at once as pays and as memory allows."""

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
    """How many atoms go through one pass; found while working unless it is fixed.

    It doubles as long as that makes an atom cheaper by 5 %, and halves when memory runs out.
    """

    atoms: int = 64
    settled: bool = False  # no more doubling
    _measured: int = 0  # atoms of the largest pass so far
    _cost: float = float("inf")  # seconds per atom of that pass

    def record(self, atoms: int, seconds: float) -> None:
        """Learn from a pass, if it was a good deal larger than those before."""
        if self.settled or 2 * atoms < 3 * self._measured:
            return
        cost = seconds / atoms
        if cost > 0.95 * self._cost:
            self.atoms, self.settled = self._measured, True
        else:
            self._measured, self._cost = atoms, cost
            self.atoms = 2 * max(self.atoms, atoms)

    def halve(self, tried: int) -> None:
        """A pass of `tried` atoms ran out of memory."""
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
    """Every system with every row of the noise: outputs (sample, system or atom, ...).

    build(start, stop) makes the graph of those systems; forward(graph, noise) runs it, samples first.
    progress(done, all) is told how many systems are done.
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
                raise MemoryError(f"one sample of one structure of {atoms} atoms does not fit into memory") from error
        else:
            chunk.record(atoms * copies, time.perf_counter() - began)
            done += copies
            continue
        # Only here, after the exception and the tensors it held are gone, is there memory to try again.
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
