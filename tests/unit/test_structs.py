"""Types that several threads may read for the first time."""

import subprocess
import sys

from tests.support.pages.documents import ROOT

READERS = """
import sys, threading
from edgeasync.config import Section, convert

sys.setswitchinterval(1e-6)
for _ in range(300):
    names = {f"key{number}": int for number in range(20)}
    Inner = type("Inner", (Section,), {"__annotations__": names, "__module__": "__main__"}, frozen=True)
    outer = {"__annotations__": {"inner": "Inner"}, "__module__": "__main__"}
    Outer = type("Outer", (Section,), outer, frozen=True)
    both = threading.Barrier(2)

    def read():
        both.wait()
        convert({"inner": dict.fromkeys(names, 1)}, Outer, where="")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_two_threads_read_a_type_for_the_first_time_and_nothing_crashes():
    """A process of its own: msgspec crashed."""
    ended = subprocess.run([sys.executable, "-c", READERS], cwd=ROOT, check=False, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
