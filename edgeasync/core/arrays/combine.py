"""Combines scaled updates slice by slice, and computes the norm of an update."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.core.arrays.squares import ROW, square_sum_of
from edgeasync.parameters import CHUNK, ParameterSpec, Vector
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.codecs import Source


def norm_of(update: Source, trained: int | None = None, origin: Vector | None = None) -> float:
    """Return the L2 norm of the first `trained` values of an update.

    If `origin` is passed, return the norm of their difference from `origin`. The norm is not finite
    if any value of the whole update is not finite, or if the sum of `ROW` squares overflows.
    """
    length = update.length
    trained = length if trained is None else trained
    if trained == length <= ROW and origin is None:
        values = update.read(0, length, np.empty(length, np.float32))
        return math.sqrt(np.vdot(values, values))  # unlike dot, vdot never warns
    square_sum = rest = 0.0
    scratch = np.empty(min(CHUNK, length), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # no warning for a peer's values
        for start in (*range(0, trained, CHUNK), *range(trained, length, CHUNK)):
            stop = min(start + CHUNK, trained if start < trained else length)
            values = update.read(start, stop, scratch)
            if origin is not None:
                values = np.subtract(values, origin[start:stop], out=scratch[: stop - start])
            if start < trained:
                square_sum += square_sum_of(values)
            else:
                rest += square_sum_of(values)
    return math.sqrt(square_sum) if math.isfinite(rest) else math.nan


class Term(msgspec.Struct, frozen=True):
    """An update, and the factor by which it is scaled.

    A robust combiner first sums the updates that have the same `row`. If `row` is -1, the update
    has a row of its own.
    """

    update: Source
    scale: float
    row: int = -1


class Mixer:
    """Sums scaled updates or passes them to a robust combiner, chunk by chunk."""

    def __init__(self, policy: PolicySet, spec: ParameterSpec) -> None:
        self._combine = policy.combine
        self._differences = spec.trained_length if policy.aggregate.update == "delta" else 0
        """The number of leading values of an update that are differences from the current model.
        The other values are plain values.
        """
        self._scratch = np.empty(min(CHUNK, spec.length), np.float32)
        self._rows: npt.NDArray[np.float32] = np.empty((0, 0), np.float32)

    def distances(self, terms: Sequence[Term], current: Vector, centre: Vector) -> list[float]:
        """Return the distance of each update from a centre, considering only trained values.

        The distance is infinite if the sum overflows. The values are added in numpy's own order, so
        that a replay on another machine computes the same bits.
        """
        found = []
        for term in terms:
            square_sum = 0.0
            with np.errstate(over="ignore"):
                for start in range(0, len(centre), CHUNK):
                    at = slice(start, min(start + CHUNK, len(centre)))
                    values = self._delta(term, current, at)
                    apart = np.subtract(values, centre[at], out=self._scratch[: values.size])
                    square_sum += float(np.add.reduce(np.multiply(apart, apart, dtype=np.float64)))
            found.append(math.sqrt(square_sum))
        return found

    def mix(self, terms: Sequence[Term], current: Vector, at: slice, target: Vector) -> Vector:
        """Combine the values of the terms in the slice `at`, in order; write them to `target`.

        The slice has at most `CHUNK` values, which are either all trained or all statistics.
        `current` is the model to which the updates are added. Return the slice of `target`.
        """
        total = target[at]
        if self._combine.robust and not self._combine.centred and len(terms) > 1:
            self._mix_side_by_side(terms, current, at, target)
            return total
        for position, term in enumerate(terms):
            values = self._delta(term, current, at)
            if position:
                np.add(total, np.multiply(values, term.scale, out=self._scratch[: values.size]), out=total)
            else:
                np.multiply(values, term.scale, out=total)
        return total

    def _mix_side_by_side(self, terms: Sequence[Term], current: Vector, at: slice, target: Vector) -> None:
        """Combine all rows at once.

        Work in slices that are short enough for all rows together to have at most `CHUNK` values.
        """
        count = _rows_of(terms)
        width = max(1, CHUNK // count)
        if self._rows.shape != (count, width):
            self._rows = np.empty((count, width), np.float32)
        for start in range(at.start, at.stop, width):
            part = slice(start, min(start + width, at.stop))
            rows = self._rows[:, : part.stop - part.start]
            self._fill(rows, terms, current, part)
            self._combine.combine(rows, target[part])

    def mix_whole(self, terms: Sequence[Term], current: Vector, at: slice, target: Vector) -> None:
        """Combine the slice `at`, of any length, in one call of a whole-update combiner."""
        rows = np.empty((_rows_of(terms), at.stop - at.start), np.float32)
        for start in range(at.start, at.stop, CHUNK):
            part = slice(start, min(start + CHUNK, at.stop))
            self._fill(rows[:, part.start - at.start : part.stop - at.start], terms, current, part)
        self._combine.combine(rows, target[at])

    def _fill(self, rows: npt.NDArray[np.float32], terms: Sequence[Term], current: Vector, part: slice) -> None:
        """Write the values of the terms in a slice to the rows of the terms.

        The values are scaled so that the mean of the rows equals the sum of the scaled updates.
        """
        count, begun = len(rows), set[int]()
        for position, term in enumerate(terms):
            place = position if term.row < 0 else term.row
            values = self._delta(term, current, part)
            if place in begun:
                scaled = np.multiply(values, term.scale * count, out=self._scratch[: values.size])
                np.add(rows[place], scaled, out=rows[place])
            else:
                np.multiply(values, term.scale * count, out=rows[place])
            begun.add(place)

    def _delta(self, term: Term, current: Vector, at: slice) -> Vector:
        """Return the values that an update adds to a slice of the current model.

        The returned array may be a scratch vector.
        """
        values = term.update.read(at.start, at.stop, self._scratch)
        if at.start < self._differences:
            return values
        return np.subtract(values, current[at], out=self._scratch[: at.stop - at.start])


def _rows_of(terms: Sequence[Term]) -> int:
    """Return the number of rows that the terms need."""
    return 1 + max(position if term.row < 0 else term.row for position, term in enumerate(terms))
