"""Free memory under cgroup limits."""

import pytest

from edgeasync.training.free_memory import free_bytes
from tests.support.boards.fake_sys import FakeSys


@pytest.fixture
def fake(tmp_path):
    return FakeSys(tmp_path)


def test_free_memory_is_what_the_tightest_group_leaves_but_for_its_cache(tmp_path):
    fake = FakeSys(tmp_path)
    fake.write("proc/self/cgroup", "0::/outer/inner\n")
    for group, limit, used in (("outer", 300, 250), ("outer/inner", "max", 240)):
        fake.write(f"sys/fs/cgroup/{group}/memory.max", str(limit if limit == "max" else limit << 20))
        fake.write(f"sys/fs/cgroup/{group}/memory.current", str(used << 20))
        fake.write(f"sys/fs/cgroup/{group}/memory.stat", f"anon 1\ninactive_file {30 << 20}\n")
    assert free_bytes(tmp_path) == 80 << 20
    fake.write("proc/self/cgroup", "9:name=systemd:/x\n7:cpu,memory:/box\n")
    fake.write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", str(100 << 20))
    fake.write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", str(60 << 20))
    fake.write("sys/fs/cgroup/memory/box/memory.stat", f"cache 5\ntotal_inactive_file {10 << 20}\n")
    assert free_bytes(tmp_path) == 50 << 20
