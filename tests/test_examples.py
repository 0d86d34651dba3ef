"""The examples, each run as a reader would run it, with a CHGNet whose samples differ."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import pmlip
from conftest import randomise_noise

pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.pt"
    randomise_noise(pmlip.perturb(pmlip.load_backbone("chgnet")), scale=3).save(path)
    return path


@pytest.fixture
def run(model, monkeypatch, capsys):
    def run(name):
        monkeypatch.setattr(sys, "argv", [name, str(model)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def number(text, pattern):
    return float(re.search(pattern, text)[1])


@pytest.mark.slow
def test_energies_of_two_polymorphs_differ_by_less_than_they_are_uncertain(run):
    text = run("polymorph_energies.py")
    assert number(text, r"± ([\d.]+) meV per SiO2") < number(text, r"which is wrong: ± ([\d.]+)")


@pytest.mark.slow
def test_the_vibrations_of_quartz_are_where_they_should_be(run):
    lines = run("vibrations.py").splitlines()[1:]
    frequencies = [float(line.split("±")[0]) for line in lines]
    assert len(frequencies) == 27
    assert 25 < frequencies[-1] < 40  # stretching of Si-O: 36 THz
    assert sum(abs(frequency) < 2 for frequency in frequencies) >= 3  # translations


@pytest.mark.slow
def test_the_bulk_modulus_stands_beside_that_of_dft(run):
    text = run("bulk_modulus.py")
    reference = number(text, r"PBE ([\d.]+) GPa")
    assert 150 < reference < 220  # with the atoms fixed, so far above the 35 GPa of quartz that relaxes
    assert abs(number(text, r"fixed: ([\d.]+)") - reference) < 0.4 * reference


@pytest.mark.slow
def test_the_energy_does_not_drift(run):
    slopes = [float(slope) for slope in re.findall(r"([+-][\d.]+) meV/atom per ps", run("nve_drift.py"))]
    assert len(slopes) == 2
    assert max(map(abs, slopes)) < 5  # of some 40 meV/atom of kinetic energy
