"""Memory of the process: allocator settings and out-of-memory errors."""

import ctypes
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_MAX of glibc's malloc.h


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory; no effect if the C library is not glibc.

    A training step on a CPU frees and allocates hundreds of megabytes. By default, glibc returns freed memory to the
    system, which clears every page before the next use. This costs a noticeable part of each step.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # allocate large blocks on the heap too; never shrink the heap, and grow it by 64 MB at a time
    for name, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, 64 * 2**20)):
        libc.mallopt(name, value)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch or Python ran out of memory."""
    import torch  # imported here, because the command line imports this module even if it does not need torch

    # on a CPU, torch raises a plain RuntimeError that only its text identifies
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
