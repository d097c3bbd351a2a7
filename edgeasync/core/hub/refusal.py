"""The error with which the core refuses a message."""

from edgeasync.errors import EdgeAsyncError
from edgeasync.protocol.messages import SECONDS_MAX, RefusalCode, Refuse

MALFORMED = "{} is in quarantine because it sent too many malformed messages; see the hub's events"
"""The message for a device in quarantine."""


class RefusalError(EdgeAsyncError):
    """The hub refuses a message; `refuse` is the answer to its sender."""

    def __init__(
        self, code: RefusalCode, sentence: str, retry_after_s: float | None = None, *, rest: bool = False
    ) -> None:
        super().__init__(sentence)
        retry_s = None if retry_after_s is None else min(retry_after_s, SECONDS_MAX)
        self.refuse = Refuse(code, sentence[:1024], retry_s, rest)
