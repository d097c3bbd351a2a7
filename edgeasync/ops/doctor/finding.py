"""A line of the doctor's."""

from typing import Literal, NamedTuple

import msgspec

from edgeasync.errors import EdgeAsyncError

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """Something that was looked at: how it is, and what to do unless that is well."""

    name: str
    level: Level
    detail: str
    cure: str = ""


class StepFinding(NamedTuple):
    """What there is to say of a step, and the bytes of the model's values, 0 if it is not known."""

    finding: Finding
    model_bytes: int


def ok(name: str, detail: str) -> Finding:
    """Return that all is well."""
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, cure: str) -> Finding:
    """Return something that a device can train with, if it must."""
    return Finding(name, "warn", detail, cure)


def fail(name: str, detail: str, cure: str) -> Finding:
    """Return something that keeps a device from training."""
    return Finding(name, "fail", detail, cure)


def told(name: str, error: EdgeAsyncError) -> Finding:
    """Return an error's sentence as what is wrong, and what to do."""
    sentence = " ".join(str(error).split())
    for mark in ("; ", ": "):
        wrong, _, cure = sentence.rpartition(mark)
        if wrong:
            return fail(name, wrong, cure)
    return fail(name, sentence, "correct what the line names")
