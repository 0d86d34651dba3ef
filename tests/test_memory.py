import platform
import subprocess
import sys

import pytest

from pmlip import memory

# Blocks of 48 MB taken and freed thirty times: how often does the system have to give out a page?
PROBE = """
import ctypes, resource, runpy, sys
if {keep}:
    runpy.run_path(sys.argv[1])["keep_freed_memory"]()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 48 * 2**20
for _ in range(30):
    blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, size)
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def page_faults(*, keep):
    run = [sys.executable, "-c", PROBE.format(keep=keep), memory.__file__]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_taken_again_without_asking_the_system():
    assert page_faults(keep=True) < page_faults(keep=False) / 4
