"""Monitors that are alarmed for no reason, so that all that alarms lead to happens often."""

import math
from dataclasses import dataclass
from typing import ClassVar

from edgeasync.policies import Evidence, Plugin
from edgeasync.policies.monitor import DisagreementDetector, Monitor, NotFiniteDetector


@dataclass(frozen=True)
class Whim:
    """Alarmed now and then: where a loss, which tells an update's number, is a multiple of `every`."""

    every: int
    scope: str
    remedy: str = "alert"
    count_max: int = 1
    patient: bool = False

    def cause(self, update, fleet):
        told = update.loss is not None and math.isfinite(update.loss)
        return Evidence("a whim", {"loss": update.loss}) if told and round(update.loss) % self.every == 0 else None


class LossLost(Plugin, frozen=True):
    """Goes back whenever an update that counts has a loss that is not finite."""

    scope: ClassVar[str] = "fleet"
    remedy: ClassVar[str] = "rollback"
    count_max: ClassVar[int] = 1
    patient: ClassVar[bool] = False

    def cause(self, update, fleet):
        return None if update.finite else Evidence("its loss is not finite")


WARNING = Monitor(detectors=(NotFiniteDetector(count_max=1), Whim(5, "device")), calm_updates=2)
ROLLBACK = Monitor(
    detectors=(
        Whim(11, "fleet", "rollback"),
        Whim(7, "device"),
        Whim(13, "fleet", "increase_frequency"),
        DisagreementDetector(),
    ),
    calm_updates=3,
)
