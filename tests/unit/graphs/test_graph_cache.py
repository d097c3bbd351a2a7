"""Graphs kept by their fingerprints: found again, verified, few, and never worth failing for."""

import os

import pytest

from edgeasync.graphs.graph_cache import GRAPHS_MAX, GraphCache
from edgeasync.protocol.graph import fingerprint_of

GRAPHS = [f"graph {number}".encode() for number in range(GRAPHS_MAX + 2)]
NAMES = [fingerprint_of(graph) for graph in GRAPHS]


class Bench:
    def __init__(self, folder):
        self.folder = folder / "graphs"
        self.cache = GraphCache(self.folder)
        self.warnings = []

    def find(self, number):
        return self.cache.find(NAMES[number], self.warnings.append)

    def keep(self, number, at_s=None):
        self.cache.keep(NAMES[number], GRAPHS[number], self.warnings.append)
        if at_s is not None:
            os.utime(self.folder / f"{NAMES[number]}.onnx", (at_s, at_s))

    @property
    def held(self):
        return {number for number, name in enumerate(NAMES) if (self.folder / f"{name}.onnx").exists()}


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_what_is_kept_is_found_again(bench):
    assert bench.find(0) is None
    bench.keep(0)
    assert bench.find(0) == GRAPHS[0]
    assert Bench(bench.folder.parent).find(0) == GRAPHS[0]
    assert bench.find(1) is None
    assert bench.warnings == []


def test_those_unused_for_longest_make_way(bench):
    for number in range(GRAPHS_MAX):
        bench.keep(number, at_s=1000 + number)
    assert bench.find(0) == GRAPHS[0], "which is a use"
    bench.keep(GRAPHS_MAX)
    assert bench.held == {0, 2, 3, GRAPHS_MAX}
    assert bench.warnings == []


@pytest.mark.parametrize("content", [b"", b"graph 1", b"graph 0?"])
def test_a_damaged_graph_is_deleted(bench, content):
    bench.keep(0)
    (bench.folder / f"{NAMES[0]}.onnx").write_bytes(content)
    assert bench.find(0) is None
    assert "damaged" in bench.warnings[0]
    assert bench.held == set()
    assert bench.find(0) is None
    assert len(bench.warnings) == 1


def test_a_folder_that_is_none_costs_warnings(bench):
    bench.folder.write_text("")
    bench.keep(0)
    assert bench.find(0) is None
    assert ["downloads the graph again" in bench.warnings[0], "cannot be read" in bench.warnings[1]] == [
        True,
        True,
    ]
    assert len(bench.warnings) == 2
