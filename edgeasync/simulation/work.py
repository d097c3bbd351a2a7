"""Running local steps on a simulated device."""

from collections.abc import Callable


class Work:
    """Running local steps: how many are done, and how long they took, up to `since_s`."""

    __slots__ = ("changes", "finish", "local_steps", "overlap", "since_s", "spent_s", "steps_done")

    def __init__(self, local_steps: int, now_s: float, finish: Callable[[int], None], *, overlap: bool) -> None:
        self.local_steps = local_steps
        self.overlap = overlap
        self.finish = finish
        self.changes = 0
        self.steps_done = 0.0
        self.spent_s = 0.0
        self.since_s = now_s
