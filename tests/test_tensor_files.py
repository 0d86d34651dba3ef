import pytest
import torch

import pmlip
from pmlip.tensor_files import CHECKSUM, check_sum, checksum, read_tensors, write_tensors

CONTENT = {
    "state": {"a": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)},
    "sizes": [1, 2],
    "name": "p",
    "none": None,
    "by_number": {1: 0.5, 8: float("nan")},
}


def replaced(**changes):
    return {**CONTENT, **changes}


@pytest.mark.parametrize(
    "other",
    [
        replaced(name="q"),
        replaced(none=False),
        replaced(sizes=[2, 1]),
        replaced(sizes=[1.0, 2]),
        replaced(by_number={1: 0.5, 9: float("nan")}),
        replaced(state={**CONTENT["state"], "a": torch.arange(6.0).reshape(3, 2)}),
        replaced(state={**CONTENT["state"], "a": torch.arange(6.0).reshape(2, 3).view(torch.int32)}),
        replaced(state={**CONTENT["state"], "a": torch.nextafter(CONTENT["state"]["a"], torch.tensor(9.0))}),
        replaced(more=0),
    ],
)
def test_the_checksum_depends_on_every_entry(other):
    assert checksum(other) != checksum(CONTENT)


def test_the_checksum_depends_on_content_alone():
    """Not on the order of keys, nor on how a tensor lies in memory."""
    columns = torch.arange(6.0).reshape(2, 3).T.contiguous().T
    state = {"scalar": torch.tensor(1.5), "a": columns, "empty": torch.zeros(0, 3)}
    assert checksum(dict(reversed(replaced(state=state).items()))) == checksum(CONTENT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_tensors_of_any_type_have_a_checksum(dtype):
    assert checksum(torch.ones(3).to(dtype)) != checksum(torch.tensor([1, 1, 0]).to(dtype))


def test_content_survives_a_file(tmp_path):
    write_tensors(tmp_path / "file.pt", CONTENT)
    read = read_tensors(tmp_path / "file.pt")
    check_sum("file.pt", read, required=True)
    read.pop(CHECKSUM)
    check_sum("file.pt", read, required=False)
    assert checksum(read) == checksum(CONTENT)
    with pytest.raises(pmlip.CheckpointError, match=r"^file.pt is damaged: its content does not match its checksum"):
        check_sum("file.pt", read, required=True)


def test_the_advice_of_torch_to_load_unsafely_reaches_nobody(tmp_path):
    class Anything:
        pass

    globals()["Anything"] = Anything
    Anything.__qualname__ = "Anything"
    torch.save({"one": Anything()}, tmp_path / "file.pt")
    with pytest.raises(pmlip.CheckpointError, match="is damaged or was not written by pmlip") as found:
        read_tensors(tmp_path / "file.pt")
    assert found.value.__cause__ is None
    assert found.value.__suppress_context__  # a traceback does not show the error of torch either
