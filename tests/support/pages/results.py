"""A record of a benchmark, made by hand."""

import msgspec

from benchmarks.records import Record

MADE = Record(
    benchmark="fold",
    form="short",
    date="2026-11-23",
    seconds=61.5,
    commit="0123456-dirty",
    machine={"cpu": "Some CPU", "cores": 2, "memory": "8 GiB", "system": "Linux 6.1 x86_64"},
    versions={"python": "3.11.7", "numpy": "2.4.0"},
    load={"cores busy": 0.25, "average": 1.5},
    disk={"file system": "ext4", "kind": "NVMe"},
    ratios={"good": 2.5, "short of it": 0.5, "a difference": -0.25, "without target": 12.0},
    targets={"good": 1.0, "short of it": 0.75, "a difference": -0.5},
    figures={"ms": {"one | two": {"ours": 1.25, "theirs": 1234.5}, "three": {"theirs": 7.0}}},
)


def made(**changes):
    """Return the record with some fields changed."""
    return msgspec.structs.replace(MADE, **changes)
