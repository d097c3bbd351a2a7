"""Bases kept on disk: resumed, verified, locked between agents, and few enough."""

import os

import numpy as np
import pytest

from edgeasync.errors import StorageError
from edgeasync.graphs.base_cache import SYNC_BYTES, BaseCache
from edgeasync.protocol import wire
from edgeasync.protocol.graph import Base, fingerprint_of

NBYTES = 100_000
CONTENTS = [np.random.default_rng(number).bytes(NBYTES) for number in range(4)]
BASES = [Base(fingerprint_of(content), NBYTES) for content in CONTENTS]
CHECKSUMS = [wire.checksum(content) for content in CONTENTS]


class Bench:
    """Agents of one user; each has its own view of the folder, as each process has."""

    def __init__(self, folder):
        self.folder = folder / "bases"
        self.warnings = []
        self._caches = []

    def agent(self, bytes_max=10 * NBYTES):
        self._caches.append(BaseCache(self.folder, bytes_max, self.warnings.append))
        return self._caches[-1]

    def give(self, cache, number, *, start=0, end=NBYTES, content=None):
        cache.append(BASES[number], start, (content or CONTENTS[number])[start:end])

    def keep(self, number, *, used_s=None, **options):
        """Download a base; then end the agent."""
        cache = self.agent(**options)
        assert cache.find(BASES[number]) == 0
        self.give(cache, number)
        assert cache.finish(BASES[number], CHECKSUMS[number])
        cache.close()
        if used_s is not None:
            os.utime(self.path(number), (used_s, used_s))

    def path(self, number):
        return self.folder / BASES[number].file_name

    @property
    def held(self):
        return {number for number in range(len(BASES)) if self.path(number).exists()}

    def close(self):
        for cache in self._caches:
            cache.close()


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.close()


def test_what_is_downloaded_is_found_by_all_agents(bench):
    bench.keep(0)
    assert bench.path(0).read_bytes() == CONTENTS[0]
    assert [bench.agent().find(BASES[0]) for _ in range(3)] == [NBYTES] * 3, "at the same time"
    assert bench.agent().find(BASES[1]) == 0
    assert bench.warnings == []
    assert bench.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("end", [1, NBYTES // 3, NBYTES - 1])
def test_a_download_continues_in_the_next_agent(bench, end):
    first = bench.agent()
    assert first.find(BASES[0]) == 0
    bench.give(first, 0, end=end)
    assert first.find(BASES[0]) == end, "after a cut"
    first.close()
    second = bench.agent()
    assert second.find(BASES[0]) == end
    bench.give(second, 0, start=end)
    assert second.finish(BASES[0], CHECKSUMS[0])
    assert second.find(BASES[0]) == NBYTES


def test_an_agent_killed_before_it_verified_has_the_base(bench):
    first = bench.agent()
    assert first.find(BASES[0]) == 0
    bench.give(first, 0)
    first.close()
    assert bench.agent().find(BASES[0]) == NBYTES
    assert bench.held == {0}


def test_parts_of_a_base_follow_each_other(bench):
    cache = bench.agent()
    with pytest.raises(StorageError, match="interrupted"):
        bench.give(cache, 0)
    assert cache.find(BASES[0]) == 0
    for number, start in ((0, 1), (1, 0)):
        with pytest.raises(StorageError, match="interrupted"):
            bench.give(cache, number, start=start)
    with pytest.raises(StorageError, match="interrupted"):
        cache.finish(BASES[0], CHECKSUMS[0])


# -- other agents ----------------------------------------------------------------------------------------------


def test_one_agent_downloads_and_the_others_wait(bench):
    first, second = bench.agent(), bench.agent()
    assert first.find(BASES[0]) == 0
    bench.give(first, 0, end=50)
    assert second.find(BASES[0]) is None
    assert second.find(BASES[1]) == 0, "another base"
    second.close()
    first.close()
    assert second.find(BASES[0]) == 50, "the first was killed"
    assert first.find(BASES[0]) is None
    bench.give(second, 0, start=50)
    assert second.finish(BASES[0], CHECKSUMS[0])
    assert first.find(BASES[0]) == NBYTES


def test_those_unused_for_longest_make_way(bench):
    for number, used_s in enumerate((1000, 3000, 2000)):
        bench.keep(number, used_s=used_s)
    user = bench.agent()
    assert user.find(BASES[0]) == NBYTES
    os.utime(bench.path(0), (1, 1))
    bench.keep(3, bytes_max=3 * NBYTES)
    assert bench.held == {0, 1, 3}, "the oldest is used, so the second oldest was deleted"
    assert user.find(BASES[0]) == NBYTES


def test_a_use_counts(bench):
    bench.keep(0, used_s=1000)
    bench.keep(1, used_s=2000)
    user = bench.agent()
    assert user.find(BASES[0]) == NBYTES
    user.close()
    bench.keep(2, bytes_max=2 * NBYTES)
    assert bench.held == {0, 2}


def test_abandoned_downloads_make_way_too(bench):
    abandoned = bench.agent()
    assert abandoned.find(BASES[0]) == 0
    bench.give(abandoned, 0, end=NBYTES - 1)
    bench.keep(1, bytes_max=NBYTES)
    assert len(list(bench.folder.iterdir())) == 2, "not while an agent downloads it"
    abandoned.close()
    bench.keep(2, bytes_max=NBYTES)
    assert [file.name for file in bench.folder.iterdir()] == [BASES[2].file_name]


def test_a_base_cannot_be_overwritten_by_mistake(bench):
    """A program that shortens a mapped file ends those that read it; one that replaces it does not."""
    bench.keep(0)
    assert bench.path(0).stat().st_mode & 0o777 == 0o400
    copied = bench.path(1)
    copied.write_bytes(CONTENTS[1])
    assert bench.agent().find(BASES[1]) == NBYTES
    assert copied.stat().st_mode & 0o777 == 0o400


# -- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:50] + b"!" + b[51:], lambda b: b + b"!", lambda _: b""]
)
def test_a_damaged_base_is_downloaded_again(bench, damage):
    bench.keep(0)
    bench.path(0).chmod(0o600)
    bench.path(0).write_bytes(damage(CONTENTS[0]))
    assert bench.agent().find(BASES[0]) == 0
    assert "damaged" in bench.warnings[0]
    bench.close()
    bench.keep(0)
    assert bench.agent().find(BASES[0]) == NBYTES


@pytest.mark.parametrize("content", [CONTENTS[1], CONTENTS[0] + b"!"])
def test_a_damaged_download_begins_again(bench, content):
    bench.folder.mkdir()
    (bench.folder / f"{BASES[0].file_name}.part").write_bytes(content)
    bench.keep(0)
    assert bench.held == {0}


def test_what_a_hub_forges_is_not_kept(bench):
    cache = bench.agent()
    assert cache.find(BASES[0]) == 0
    bench.give(cache, 0, content=CONTENTS[1])
    assert not cache.finish(BASES[0], CHECKSUMS[1]), "the hub sent what it meant to send"
    assert cache.find(BASES[0]) == 0
    bench.give(cache, 0, content=CONTENTS[1])
    with pytest.raises(StorageError, match="damaged"):
        cache.finish(BASES[0], CHECKSUMS[0])
    assert cache.find(BASES[0]) == 0
    assert bench.held == set()


def test_a_long_download_is_synced_on_its_way(bench, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    content = bytes(3 * SYNC_BYTES + 1)
    base = Base(fingerprint_of(content), len(content))
    cache = bench.agent(bytes_max=len(content))
    assert cache.find(base) == 0
    for start in range(0, len(content), SYNC_BYTES // 4):
        cache.append(base, start, content[start : start + SYNC_BYTES // 4])
    assert len(synced) == 3


def test_a_folder_that_is_none_is_named(bench):
    bench.folder.write_text("")
    with pytest.raises(StorageError, match=r"bases: cannot store the hub's base: .*\[agent\] base_cache"):
        bench.agent().find(BASES[0])
