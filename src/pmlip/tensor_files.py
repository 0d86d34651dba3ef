"""Files of tensors and plain values, with a checksum of their content.

Reading a file executes no code from it (`weights_only=True`). Writing is atomic.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pmlip.atomic_files import atomic_write
from pmlip.errors import CheckpointError

CHECKSUM = "checksum"


def write_tensors(path: str | Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        torch.save({**content, CHECKSUM: checksum(content)}, file)


def read_tensors(path: str | Path) -> Any:
    """The content of a file written by `torch.save`; raises CheckpointError if torch cannot read it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about types of storage that only a damaged file names
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch raises a different type for every way a file can be broken
        # without the error of torch, which advises to load the file with weights_only=False
        raise CheckpointError(f"{path} is damaged or was not written by pmlip") from None


def check_sum(path: str | Path, content: Mapping[str, Any], *, required: bool) -> None:
    """Raise CheckpointError unless the content of a file matches its checksum.

    required: whether the file must have a checksum; files of older formats have none.
    """
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    if (required or CHECKSUM in content) and content.get(CHECKSUM) != checksum(rest):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum; use another copy")


def checksum(content: Any) -> str:
    """SHA-256 of nested plain values and tensors: the type of each entry, its size, and its value.

    The order of keys in a mapping does not matter.
    """
    digest = hashlib.sha256()
    _add(digest, content)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)} ".encode())
        for key in sorted(value, key=repr):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        digest.update(f"sequence {len(value)} ".encode())
        for entry in value:
            _add(digest, entry)
    else:
        text = repr(value)
        digest.update(f"{type(value).__name__} {len(text)} {text} ".encode("utf-8", "surrogatepass"))
