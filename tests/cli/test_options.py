import pytest
import typer

from pmlip.cli import load_command
from pmlip.cli.options import as_flags, exit_on_error
from pmlip.errors import RunFailedError


@pytest.fixture(scope="module")
def params():
    return load_command("finetune").params


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("pass missing=True to allow them", "pass --missing to allow them"),
        ("pass offsets=False.", "pass --no-offsets."),
        ("pass it as weights=PATH with trust=True", "pass it as --weights PATH with --trust"),
        ("pass energy_key=..., forces_key=...", "pass --energy-key ..., --forces-key ..."),
        ("pass energy_key='my energy'", "pass --energy-key my energy"),
        ("another folder (folder=...), or", "another folder (--out ...), or"),
        ("pass noise_rate=... and start=0", "pass --noise-rate ... and --start 0"),
        ("got steps=7 and epochs=4", "got --steps 7 and --epochs 4"),
        ("at least 2 samples, got samples=1", "at least 2 samples, got --samples 1"),
        ("backbone_rate=1e-05; noise_rate=0.5", "--backbone-rate 1e-05; --noise-rate 0.5"),
    ],
)
def test_arguments_become_flags(params, message, expected):
    assert as_flags(message, params) == expected


@pytest.mark.parametrize(
    "message",
    [
        "hand one in with sites=...",  # no option of this command
        "vacuum and pbc=True",
        "runs/seed=3/model.pt is damaged",  # a path
        "seed=3.extxyz is empty",
        "seed=3/train.extxyz is empty",
        "made with other settings (seed = 3, now 4)",
        "as_json=False",  # a flag that has no opposite
        "train=...",  # an argument of the command, not an option
    ],
)
def test_other_text_stays(params, message):
    assert as_flags(message, params) == message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("samples=1 is too few"), 2),
        (FileNotFoundError("samples=1 is too few"), 2),
        (MemoryError("samples=1 is too few"), 1),
        (ImportError("samples=1 is too few"), 1),
        (RunFailedError("samples=1 is too few"), 1),
    ],
)
def test_errors_are_one_sentence_and_an_exit_code(params, capsys, error, code):
    with pytest.raises(typer.Exit) as ended, exit_on_error(params):
        raise error
    assert ended.value.exit_code == code
    assert capsys.readouterr().err == "error: --samples 1 is too few\n"


def test_a_mistake_in_the_code_keeps_its_traceback():
    with pytest.raises(TypeError), exit_on_error():
        raise TypeError
