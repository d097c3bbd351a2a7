"""Package your own policies and codec. Install it on the hub, and for its codec on every agent.

pip install examples/own_policy
edgeasync policies krum
edgeasync hub examples/own_policy/hub.toml
"""

from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgeasync.policies import Plugin, RowCombiner, Staleness


class Hinge(Plugin, frozen=True):
    """Count an update fully up to `free` versions of staleness, and ever less beyond."""

    paper = "FedAsync, Xie et al. 2019 (arXiv:1903.03934)"
    free: Annotated[float, Meta(ge=0.0, le=1e6)] = 4.0
    """Versions up to which an update counts fully."""
    slope: Annotated[float, Meta(ge=0.0, le=1e6)] = 10.0
    """How fast the weight falls beyond `free`."""

    def __call__(self, staleness: Staleness) -> float:
        return 1.0 / (1.0 + self.slope * max(0.0, staleness.versions - self.free))


class Krum(RowCombiner, frozen=True):
    """Use only the update that is nearest to its neighbours."""

    paper = "Blanchard et al. 2017 (NIPS)"
    faulty: Annotated[int, Meta(ge=0, le=1000)] = 1
    """Most devices that may send arbitrary updates."""

    def combine(self, rows: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        apart = np.array([[float(np.add.reduce((one - other) ** 2)) for other in rows] for one in rows])
        neighbours = max(1, len(rows) - self.faulty - 2)
        nearest = np.sort(apart, axis=1)[:, 1 : 1 + neighbours].sum(axis=1)
        out[:] = rows[nearest.argmin()]


class Bytes:
    """Encode each value in one byte, in steps of 1/127 of the largest absolute value."""

    needs_feedback = True

    def nbytes(self, length: int) -> int:
        return 4 + length

    def encode(self, values: npt.NDArray[np.float32]) -> bytes:
        step = np.array([max(float(np.abs(values).max()) / 127, 1e-30)], np.float32)
        levels = np.rint(values / step).astype(np.int8)
        return bytes(step.data) + bytes(levels.data)

    def decode(self, coded: npt.NDArray[np.uint8], length: int) -> npt.NDArray[np.float32]:
        step, levels = coded[:4].view(np.float32), coded[4 : 4 + length].view(np.int8)
        return np.multiply(levels, step, dtype=np.float32)
