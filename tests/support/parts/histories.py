"""Rows of a run's history."""

from edgeasync.durable.history import UpdateRow, read_rows

NAMES = ("left", "right", "middle")


def update(row, metrics=None):
    name = NAMES[row % 3]
    fields = (row, 2 * row, 0.5 * row, row, row, row // 3, "applied", 1.0 / row, 0, 16, 64, 400)
    return name, UpdateRow(*fields, metrics=metrics)


def updates(first, last):
    return [update(row) for row in range(first, last + 1)]


def pairs(rows):
    return list(zip(rows.devices, rows.updates, strict=True))


def numbers(disk):
    rows = read_rows(disk)
    assert not rows.trouble
    return [row.row for row in rows.updates]
