"""Damaged files: reading one succeeds, or raises an error of one line."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pmlip

STORED = Path(__file__).parents[1] / "checkpoints"
LONGEST = 600  # characters of a message


def structures():
    made = []
    for index in range(3):
        atoms = bulk("NaCl", "rocksalt", a=5.6)
        atoms.rattle(0.1, seed=index)
        atoms.calc = SinglePointCalculator(atoms, energy=-7.0 + index, forces=np.full((2, 3), 0.1))
        made.append(atoms)
    return made


def save(file):
    """A file of structures in the format that its name says."""
    original = structures()
    if file.suffix == ".npz":
        named = {"energies": [-7.0, -6.0, -5.0], "cells": [atoms.cell.array for atoms in original]}
        np.savez(file, symbols=["Na", "Cl"], positions=[atoms.positions for atoms in original], **named)
    else:
        write(file, original)


@st.composite
def damages(draw):
    """A function that damages bytes: flips a bit, cuts the end off, or inserts bytes."""
    place = draw(st.floats(0, 1, exclude_max=True))
    kind = draw(st.sampled_from(["flip", "truncate", "insert", "overwrite"]))
    bit, more = draw(st.integers(0, 7)), draw(st.binary(min_size=1, max_size=12))

    def damage(content):
        at = int(place * len(content))
        if kind == "flip":
            return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        if kind == "truncate":
            return content[:at]
        return content[:at] + more + content[at + (len(more) if kind == "overwrite" else 0) :]

    return damage


def assert_readable_or_refused(read, file):
    try:
        return read(file)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < LONGEST
    assert "weights_only" not in message
    assert "allow_pickle" not in message
    return None


@pytest.mark.parametrize("suffix", ["extxyz", "npz", "traj", "db", "extxyz.gz"])
def test_structures(suffix, tmp_path):
    file = tmp_path / f"data.{suffix}"
    save(file)
    whole = file.read_bytes()

    @settings(max_examples=200)
    @given(damage=damages())
    def check(damage):
        file.write_bytes(damage(whole))
        if file.stat().st_size:
            assert_readable_or_refused(pmlip.read_structures, file)
        assert os.listdir(tmp_path) == [file.name]  # noqa: PTH208  names alone are wanted

    check()


def test_text_inside_a_compressed_file(tmp_path):
    """Damage before the compression, which no checksum of the compressed file shows."""
    save(tmp_path / "data.extxyz")
    whole = (tmp_path / "data.extxyz").read_bytes()

    @settings(max_examples=200)
    @given(damage=damages())
    def check(damage):
        (tmp_path / "data.extxyz.gz").write_bytes(gzip.compress(damage(whole), 1))
        assert_readable_or_refused(pmlip.read_structures, tmp_path / "data.extxyz.gz")

    check()


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("version", [4, 5, 6])
def test_checkpoints(version, tmp_path):
    """From format 6 on, a file that loads holds what was written."""
    file, x = tmp_path / "model.pt", torch.linspace(-1, 1, 12).reshape(4, 3)
    whole = (STORED / f"format-{version}.pt").read_bytes()
    expected = torch.load(STORED / f"format-{version}-outputs.pt", weights_only=True)

    @settings(max_examples=400)
    @given(damage=damages())
    def check(damage):
        file.write_bytes(damage(whole))
        loaded = assert_readable_or_refused(lambda path: pmlip.load(path, backbone=network()), file)
        if loaded is not None and version >= 6:
            outputs = torch.stack([loaded(x, noise=e) for e in loaded.draw(3)])
            torch.testing.assert_close(outputs, expected)

    check()
