"""The findings of the doctor, one per line of its output."""

from typing import Literal, NamedTuple

import msgspec

from edgeasync.errors import EdgeAsyncError

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: its level, what was found, and a remedy unless the level is ok."""

    name: str
    level: Level
    detail: str
    cure: str = ""


class StepFinding(NamedTuple):
    """The finding about a training step, and the size of the model's values in bytes (0 if unknown)."""

    finding: Finding
    model_bytes: int


def ok(name: str, detail: str) -> Finding:
    """Return a finding without problems."""
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, cure: str) -> Finding:
    """Return a finding about a problem that does not prevent training."""
    return Finding(name, "warn", detail, cure)


def fail(name: str, detail: str, cure: str) -> Finding:
    """Return a finding about a problem that prevents training."""
    return Finding(name, "fail", detail, cure)


def told(name: str, error: EdgeAsyncError) -> Finding:
    """Convert an error to a finding: the part after the last `; ` or `: ` becomes the remedy."""
    sentence = " ".join(str(error).split())
    for mark in ("; ", ": "):
        wrong, _, cure = sentence.rpartition(mark)
        if wrong:
            return fail(name, wrong, cure)
    return fail(name, sentence, "correct the file or setting that this line names")
