"""What this process does with its memory."""

import platform
import subprocess
import sys

import pytest

BLOCKS = """
import ctypes, resource, sys
from edgeasync.host.host_info import prepare_for_service
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
if sys.argv[1] == "keep":
    prepare_for_service()
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(1 << 20) for _ in range(8)]
    for block in blocks:
        libc.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_freed_models_cost_no_page_faults_when_they_are_needed_again():
    def faults(how):
        return int(subprocess.run([sys.executable, "-c", BLOCKS, how], capture_output=True, check=True).stdout)

    assert faults("keep") < 100
    assert faults("leave") > 1000, "else there is nothing to do"
