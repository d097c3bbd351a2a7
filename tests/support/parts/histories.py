"""Rows of a run's history."""

import msgspec

from edgeasync.durable.history import UpdateRow, read_rows

NAMES = ("left", "right", "middle")


def update(row, metrics=None, **changes):
    fields = (row, 2 * row, 0.5 * row, row, row, NAMES[row % 3], row // 3, "applied", 1.0 / row, 0, 16, 64, 400)
    return msgspec.structs.replace(UpdateRow(*fields, metrics=metrics), **changes)


def updates(first, last):
    return [update(row) for row in range(first, last + 1)]


def numbers(disk):
    rows = read_rows(disk)
    assert not rows.trouble
    return [row.row for row in rows.updates]
