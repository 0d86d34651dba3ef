"""The memory of the process."""

import ctypes
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # names and numbers of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees; without effect where the C library is not glibc's.

    A training step on a CPU frees and takes hundreds of megabytes. By default glibc hands them back to the system,
    which clears every page before it gives it out again: a part of the time of a step that is worth saving.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # large blocks from the heap too, which never shrinks and grows by 64 MB
    for name, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, 64 * 2**20)):
        libc.mallopt(name, value)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or Python ran out of memory."""
    import torch  # here, since the command line imports this module before it knows that it needs torch

    # on a CPU torch raises a plain RuntimeError, and only its text tells
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
