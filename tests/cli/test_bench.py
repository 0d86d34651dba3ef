"""pmlip bench where packages are missing."""

import sys

import pytest
from typer.testing import CliRunner

from pmlip.cli import app
from pmlip.errors import OutputInUseError
from pmlip.locks import locked_folder


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_without_the_benchmark_package_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "pmlip.cli.bench", raising=False)
    monkeypatch.delitem(sys.modules, "pmlip_bench.cli", raising=False)
    monkeypatch.setitem(sys.modules, "pmlip_bench", None)  # importing it is then an error
    result = invoke("speed")
    assert result.exit_code == 1
    assert result.stderr == "error: the benchmarks need: pip install 'pmlip[bench]'\n"


def test_without_a_package_of_a_benchmark_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scoringrules", None)
    result = invoke("speed", "--only", "crps")
    assert result.exit_code == 1
    assert result.stderr == "error: this benchmark needs scoringrules: pip install 'pmlip[bench]'\n"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("numba", "this benchmark needs numba: pip install 'pmlip[bench]'"),
        ("chgnet", "backbone 'chgnet' needs: pip install 'pmlip[chgnet]'"),
    ],
)
def test_a_package_of_the_library_keeps_its_own_message(monkeypatch, missing, message):
    """Only the packages of the extra `bench` are said to be in it."""

    def fail(*_, **__):
        raise ImportError(f"backbone {missing!r} needs: pip install 'pmlip[{missing}]'") from ModuleNotFoundError(
            name=missing
        )

    monkeypatch.setattr("pmlip_bench.speed.run", fail)
    result = invoke("speed")
    assert result.exit_code == 1
    assert result.stderr == f"error: {message}\n"


def test_bad_sizes_are_refused():
    result = invoke("silica", "--methods", "p", "--sizes", "0")
    assert result.exit_code == 2
    assert "sizes are whole numbers of at least 1, separated by commas, got '0'" in result.stderr


def test_a_benchmark_holds_its_folder_while_it_runs(monkeypatch, tmp_path):
    def run(only, out, console, **_):
        with pytest.raises(OutputInUseError), locked_folder(out):
            pass
        raise ValueError("it was held")

    monkeypatch.setattr("pmlip_bench.speed.run", run)
    result = invoke("speed", "--out", str(tmp_path / "out"))
    assert result.stderr == "error: it was held\n"
    assert not (tmp_path / "out").exists()  # nothing was written to it
