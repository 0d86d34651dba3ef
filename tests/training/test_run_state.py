"""The saved state of a run; `test_finetuning.py` tests that runs resume from it."""

from dataclasses import replace

import pytest
import torch

from molecules import CONFIG, model, molecules
from pmlip.tensor_files import CHECKSUM, write_tensors
from pmlip.training.finetuning import finetune
from pmlip.training.run_state import ENTRIES, read_state

pytestmark = pytest.mark.usefixtures("quick_energy_zero")

SHORT = replace(CONFIG, epochs=1)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    finetune(model(), molecules(8), config=SHORT, folder=folder)
    return torch.load(folder / "last.pt", weights_only=True)


@pytest.fixture
def file(stored, tmp_path):
    write_tensors(tmp_path / "last.pt", {name: value for name, value in stored.items() if name != CHECKSUM})
    return tmp_path / "last.pt"


def test_all_entries_are_checked(stored, file):
    assert set(ENTRIES) == set(stored) - {"format", "version", CHECKSUM}
    assert read_state(file, stored["identity"])["step"] == stored["step"]


def test_a_flipped_bit_in_a_weight_is_an_error(stored, file):
    content = bytearray(file.read_bytes())
    content[content.find(stored["model"]["noise.w_z"].numpy().tobytes()) + 3] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"last.pt is damaged; remove it to start again"):
        read_state(file, stored["identity"])


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_state_is_an_error(stored, file, keep):
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ValueError, match=r"last.pt is damaged; remove it to start again") as found:
        read_state(file, stored["identity"])
    assert found.value.__suppress_context__  # torch's advice to load the file unsafely is not shown


@pytest.mark.parametrize("name", ["version", *ENTRIES])
@pytest.mark.parametrize("lost", [True, False])
def test_another_structure_is_one_sentence(stored, file, name, lost):
    changed = {key: value for key, value in stored.items() if key != CHECKSUM and not (lost and key == name)}
    write_tensors(file, changed if lost else changed | {name: "other"})
    with pytest.raises(ValueError, match=r"last.pt (is damaged|was written by another version)"):
        read_state(file, stored["identity"])


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}])
def test_a_foreign_file_is_one_sentence(stored, file, content):
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"last.pt is damaged; remove it to start again"):
        read_state(file, stored["identity"])


@pytest.mark.parametrize("changes", [{"model": {}}, {"averaged": {}}, {"optimizer": {}}])
def test_a_state_that_does_not_fit_is_one_sentence(stored, file, changes):
    write_tensors(file, {name: value for name, value in (stored | changes).items() if name != CHECKSUM})
    with pytest.raises(ValueError, match=r"last.pt does not fit this model: .*; remove it to start again") as found:
        finetune(model(), molecules(8), config=SHORT, folder=file.parent)
    assert "\n" not in str(found.value)
