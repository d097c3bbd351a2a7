"""Combiners merge the updates of a fold into one vector.

They work elementwise, so each slice of the vectors can be combined separately.
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgeasync.config import Section
from edgeasync.parameters import Vector
from edgeasync.plugins import Plugin

Rows = npt.NDArray[np.float32]


@runtime_checkable
class Combiner(Protocol):
    """Merges several vectors into one.

    If `robust` is true, the hub calls `combine` with the same slice of every update. Otherwise, the
    hub does not call it and sums the weighted updates. A slice may have any length. If `whole` is
    true, `combine` is first called with all trained values of each update, and then with all
    statistics. If `centred` is true, `robust` must be true, too. Such a combiner, for example
    `CentredClipCombiner`, also works with a single update. The hub stores its centre, which has one
    number per trained value.

    >>> from typing import ClassVar
    >>> import numpy as np
    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Plugin
    >>> class Middle(Plugin, frozen=True):
    ...     robust: ClassVar[bool] = True
    ...     centred: ClassVar[bool] = False
    ...     whole: ClassVar[bool] = False
    ...     def combine(self, rows, out):
    ...         out[:] = (rows.min(axis=0) + rows.max(axis=0)) / 2
    >>> policy = Policy(combine=Middle())
    """

    robust: ClassVar[bool]
    """Whether the combiner is more than a weighted sum. If so, all devices have the same share."""

    centred: ClassVar[bool]
    """Whether updates are compared with a centre."""

    whole: ClassVar[bool]
    """Whether the combiner compares whole updates, as Krum compares the distances between them. The
    hub then needs memory for a copy of each update.
    """

    def combine(self, rows: Rows, out: Vector) -> None:
        """Combine float32 `rows` of shape (k, n) into `out` (n,); `rows` may be overwritten.

        Each row is an update multiplied by its weight and by k, so that the mean of the rows equals
        the weighted sum of the updates.
        """


class RowCombiner(Plugin, frozen=True):
    """Base class for your own combiner; a subclass only needs `combine`.

    `combine` receives two or more whole updates.

    >>> from typing import Annotated
    >>> import numpy as np
    >>> from msgspec import Meta
    >>> from edgeasync import Policy
    >>> from edgeasync.policies import RowCombiner
    >>> class Krum(RowCombiner, frozen=True):
    ...     faulty: Annotated[int, Meta(ge=0)] = 1
    ...     def combine(self, rows, out):
    ...         apart = ((rows[:, None] - rows) ** 2).sum(axis=2)  # row to row
    ...         nearest = np.sort(apart, axis=1)[:, : max(2, len(rows) - self.faulty - 1)]
    ...         out[:] = rows[nearest.sum(axis=1).argmin()]
    >>> policy = Policy(combine=Krum(faulty=2))
    """

    robust: ClassVar[bool] = True
    centred: ClassVar[bool] = False
    whole: ClassVar[bool] = True


class MeanCombiner(Section, frozen=True, tag_field="kind", tag="mean"):
    """The weighted mean, for a fleet whose devices are trusted."""

    paper: ClassVar[str] = ""
    robust: ClassVar[bool] = False
    centred: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def combine(self, rows: Rows, out: Vector) -> None:
        """Write the mean of the rows, which are summed in order."""
        out[:] = rows[0]
        for row in rows[1:]:
            np.add(out, row, out=out)
        np.multiply(out, np.float32(1.0 / len(rows)), out=out)


class MedianCombiner(Section, frozen=True, tag_field="kind", tag="median"):
    """The median of every coordinate. It tolerates faults in fewer than half of the devices."""

    paper: ClassVar[str] = "Yin et al. 2018 (arXiv:1803.01498)"
    robust: ClassVar[bool] = True
    centred: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def combine(self, rows: Rows, out: Vector) -> None:
        """Write each coordinate's median: the middle value, or the mean of the middle two."""
        _mean_of_middle(rows, (len(rows) - 1) // 2, out)


class TrimmedMeanCombiner(Section, frozen=True, tag_field="kind", tag="trimmed_mean"):
    """The mean of every coordinate, computed without the lowest and highest values."""

    paper: ClassVar[str] = "Yin et al. 2018 (arXiv:1803.01498)"
    robust: ClassVar[bool] = True
    centred: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    trim: Annotated[float, Meta(gt=0.0, lt=0.5)] = 0.1
    """Share of the values that is removed at each end (lowest and highest). The number of values is
    rounded up. At least one value remains.
    """

    def combine(self, rows: Rows, out: Vector) -> None:
        """Write each coordinate's mean without its lowest and highest values."""
        _mean_of_middle(rows, min(math.ceil(self.trim * len(rows) - 1e-9), (len(rows) - 1) // 2), out)


class CentredClipCombiner(Section, frozen=True, tag_field="kind", tag="centred_clip"):
    """The mean of the updates, after each update's distance from a centre is clipped.

    The centre c is a moving average of past folds. An update x is replaced by `c + (x - c) min(1, r
    / |x - c|)`, so its distance from the centre is at most `r`. This also works with a single
    update.
    """

    paper: ClassVar[str] = "Karimireddy, He and Jaggi 2021 (arXiv:2012.10333)"
    robust: ClassVar[bool] = True
    centred: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    radius: Annotated[float, Meta(gt=0.0, le=1e9)] = 0.5
    """Radius `r`, as a multiple of the median norm of the voters' latest updates."""
    momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Weight of the old centre in the moving average when a fold updates the centre."""

    def shares(self, distances: Sequence[float], norm_usual: float) -> list[float]:
        """Return factors from 0 to 1 that scale the difference of each update from the centre."""
        most = self.radius * norm_usual
        return [1.0 if distance <= most else most / distance for distance in distances]

    def combine(self, rows: Rows, out: Vector) -> None:
        """Write the mean of rows that are already clipped."""
        MeanCombiner().combine(rows, out)

    def move(self, centre: Vector, folded: Vector) -> None:
        """Move the centre towards the folded update; `folded` may be overwritten."""
        np.multiply(centre, np.float32(self.momentum), out=centre)
        np.multiply(folded, np.float32(1.0 - self.momentum), out=folded)
        np.add(centre, folded, out=centre)


def _mean_of_middle(rows: Rows, trimmed: int, out: Vector) -> None:
    rows.sort(axis=0)
    MeanCombiner().combine(rows[trimmed : len(rows) - trimmed], out)
