"""Bugs planted in the product, to see whether the checkers would notice: a test of the test.

A mutant is a method with a few words changed. It names the words, so that one that has come to nothing, because
the code has changed, fails as loudly as one that is not noticed.
"""

import inspect
import sys
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from edgeasync.core.device import DeviceCore
from edgeasync.core.hub import HubCore
from edgeasync.core.hub_exchange import HubExchange
from edgeasync.core.membership import Membership


@dataclass(frozen=True)
class Change:
    """Words of a method, and what stands there instead."""

    owner: type
    method: str
    old: str
    new: str


MUTANTS = {
    "a duplicate is applied again": (
        Change(HubCore, "_push_arrived", "push.seq <= member.seq_last", "push.seq < member.seq_last"),
        Change(HubCore, "_check_sequence", "push.seq != member.seq_last + 1", "push.seq > member.seq_last + 1"),
    ),
    "the hub believes a device that greets again about what was answered": (
        Change(Membership, "greet", "member.steps_total = 0", "member.seq_last = hello.seq_answered"),
    ),
    "a device numbers an unanswered push anew": (
        Change(DeviceCore, "_agree_on_seq", "seq_last <= push.seq <= seq_last + 1", "push.seq == seq_last + 1"),
        Change(DeviceCore, "_agree_on_seq", "if push.seq > seq_last:", "if push.seq > 0:"),
    ),
    "a device takes any answer for that to its push": (
        Change(DeviceCore, "_acknowledged", " or ack.seq != self._push.seq", ""),
    ),
    "an answer says applied where the update waits": (
        Change(HubCore, "_push_arrived", "Ack(push.seq, outcome)", "Ack(push.seq, Applied(self.version))"),
    ),
    "updates that wait are dropped with a device": (
        Change(HubCore, "_lose", "if member.peer:", "if not self.judge._contributions.clear():"),
    ),
    "a payload is not checked": (
        Change(HubExchange, "_push", "wire.checksum(payload) != push.checksum", "False"),
        Change(HubExchange, "_push", "len(payload) != push.payload_bytes", "False"),
    ),
    "a lease is not renewed by what a device says": (
        Change(HubCore, "_touch", "self.members.renew(member, now_s)", "pass"),
    ),
    "a device that was lost is not woken": (Change(HubCore, "_touch", "if not member.live:", "if False:"),),
    "a device does not say again what was not answered": (
        Change(DeviceCore, "tick", "effects += self._speak(now_s)", "self._wait(now_s)"),
    ),
}  # fmt: skip


def _mutated(owner, method, changes):
    function = inspect.unwrap(vars(owner)[method])
    source = textwrap.dedent(inspect.getsource(function))
    for change in changes:
        if source.count(change.old) != 1:
            raise LookupError(f"{owner.__name__}.{method} has not just one {change.old!r}: mend the mutant")
        source = source.replace(change.old, change.new)
    names = {}
    exec(compile(source, inspect.getsourcefile(function), "exec"), vars(sys.modules[owner.__module__]), names)
    return names[method]


@contextmanager
def planted(name):
    """Plant a bug for a while."""
    with ExitStack() as stack:
        methods = {}
        for change in MUTANTS[name]:
            methods.setdefault((change.owner, change.method), []).append(change)
        for (owner, method), changes in methods.items():
            mutant = _mutated(owner, method, changes)
            stack.callback(setattr, owner, method, vars(owner)[method])
            setattr(owner, method, mutant)
        yield
