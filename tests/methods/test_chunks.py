import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pmlip.methods._chunks import ChunkSize, run_in_chunks


class Machine:
    """A model that multiplies, on a machine where only so many atoms fit into memory."""

    def __init__(self, sizes, memory):
        self.sizes, self.memory, self.passes = sizes, memory, []

    def build(self, start, stop):
        return range(start, stop)

    def forward(self, graph, noise):
        atoms = len(noise) * sum(self.sizes[i] for i in graph)
        self.passes.append(atoms)
        if atoms > self.memory:
            raise torch.OutOfMemoryError("no more memory")
        systems = torch.tensor([float(i + 1) for i in graph])
        rows = torch.cat([torch.full((self.sizes[i],), float(i + 1)) for i in graph])
        return {"energy": noise * systems, "forces": (noise * rows)[..., None].expand(-1, -1, 3)}


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    samples=st.integers(1, 9),
    chunk=st.integers(1, 80),
    memory=st.integers(9, 80),
)
def test_results_do_not_depend_on_chunks_or_memory(sizes, samples, chunk, memory):
    machine = Machine(sizes, memory)
    noise = torch.arange(1.0, samples + 1)[:, None]
    size = ChunkSize(chunk, settled=True)
    outputs = run_in_chunks(machine.build, machine.forward, sizes=sizes, noise=noise, chunk=size)
    system = torch.repeat_interleave(torch.arange(1.0, len(sizes) + 1), torch.tensor(sizes))
    assert torch.equal(outputs["energy"], noise * torch.arange(1.0, len(sizes) + 1))
    assert torch.equal(outputs["forces"][..., 2], noise * system)
    fits = [atoms for atoms in machine.passes if atoms <= memory]
    assert sum(fits) == samples * sum(sizes)  # nothing that fitted was done twice
    assert len(machine.passes) - len(fits) <= 10  # and what did not fit was not tried for long


def test_what_never_fits_is_said():
    machine = Machine([20], memory=10)
    with pytest.raises(MemoryError, match="one sample of one structure of 20 atoms"):
        run_in_chunks(machine.build, machine.forward, sizes=[20], noise=torch.ones(3, 1), chunk=ChunkSize())


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_running_out_of_memory_on_a_cpu_is_recognised(error):
    calls = []

    def forward(graph, noise):
        calls.append(len(noise))
        if len(noise) > 2:
            raise error
        return {"energy": noise}

    chunk = ChunkSize(8, settled=True)
    run_in_chunks(lambda start, stop: None, forward, sizes=[1], noise=torch.ones(8, 1), chunk=chunk)
    assert calls == [8, 4, 2, 2, 2, 2]
    assert chunk.atoms == 2


def test_other_errors_pass_through():
    def forward(graph, noise):
        raise RuntimeError("index out of range")

    with pytest.raises(RuntimeError, match="index out of range"):
        run_in_chunks(lambda start, stop: None, forward, sizes=[1], noise=torch.ones(8, 1), chunk=ChunkSize())


@pytest.mark.parametrize("size", [20, 40, 60, 100, 200])
def test_a_chunk_grows_while_that_pays(size, monkeypatch):
    """Where a pass costs the same whatever it holds, all samples end up in one pass, for structures of any size."""
    machine, clock = Machine([size] * 8, memory=10**9), iter(range(10**6))
    monkeypatch.setattr("pmlip.methods._chunks.time.perf_counter", lambda: next(clock))
    run_in_chunks(machine.build, machine.forward, sizes=machine.sizes, noise=torch.ones(32, 1), chunk=ChunkSize())
    assert machine.passes[-1] >= 32 * size


def test_a_chunk_stops_growing_when_it_no_longer_pays():
    """With a fixed cost of 1 s and 0.1 s per atom, an atom of a pass of 256 is only 4 % cheaper than in one of 128."""
    chunk = ChunkSize(64)
    while not chunk.settled:
        chunk.record(chunk.atoms, 1 + 0.1 * chunk.atoms)
    assert chunk.atoms == 128
    chunk.record(1000, 1e-9)
    assert chunk.atoms == 128


def test_a_smaller_pass_tells_nothing():
    chunk = ChunkSize(64)
    chunk.record(64, 1.0)
    chunk.record(10, 100.0)
    assert not chunk.settled
    assert chunk.atoms == 128
