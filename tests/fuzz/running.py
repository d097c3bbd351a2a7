"""Runs cases of a target. A case is found again by its target, the seed and its number."""

import contextlib
import signal
import time
import traceback
from random import Random
from typing import NamedTuple

from tests.fuzz.mutations import mutated

CASE_S = 1.0
"""How long a case may take where time is looked at."""

CHECK_EVERY = 500


class Finding(NamedTuple):
    """A case that shows a defect: its number, its bytes, and what happened."""

    number: int
    content: bytes
    what: str


class Result(NamedTuple):
    """What a run came to; `taken` is how many of its cases were taken for valid."""

    cases: int
    taken: int
    slowest_s: float
    findings: list[Finding]


class HungError(BaseException):
    """A case has not ended in time. No `Exception`, so that nothing takes it for an error of its own."""


def run(target, name, seed, cases, *, first=0, seconds=None, timed=False, findings_max=5):
    """Try cases until they are done, or the time is over. With `timed` one that takes too long is a finding."""
    began_s, number, taken, slowest_s, findings = time.monotonic(), first, 0, 0.0, []
    while number < first + cases and len(findings) < findings_max:
        if seconds is not None and time.monotonic() > began_s + seconds:
            break
        content = mutated(Random(f"{name}/{seed}/{number}"), target.inputs)
        begin_s = time.monotonic()
        accepted, what = attempt(target, content, timed=timed)
        slowest_s = max(slowest_s, time.monotonic() - begin_s)
        taken += accepted
        number += 1
        if not what and number % CHECK_EVERY == 0:
            what = complaint(target.check)
        if what:
            findings.append(Finding(number - 1, content, what))
    if what := complaint(target.check):
        findings.append(Finding(number - 1, b"", what))
    return Result(number - first, taken, slowest_s, findings)


def attempt(target, content, *, timed=False):
    """Try one case; return whether it was taken, and what is wrong with that, if anything is."""
    try:
        with limited(CASE_S) if timed else contextlib.nullcontext():
            return bool(target.attempt(content)), ""
    except target.refusals:
        return False, ""
    except HungError:
        return False, f"took longer than {CASE_S:g} s\n{traceback.format_exc()}"
    except Exception:  # noqa: BLE001 - any other error is what is looked for
        return False, traceback.format_exc()


def complaint(check):
    """Return what a check has found, or nothing."""
    try:
        check()
    except Exception:  # noqa: BLE001
        return traceback.format_exc()
    return ""


@contextlib.contextmanager
def limited(seconds):
    """Raise `HungError` in the main thread when what is done here takes too long."""

    def interrupt(*_):
        raise HungError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
