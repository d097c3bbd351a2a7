"""The progress bar in a terminal, and plain lines elsewhere."""

import io

from rich.console import Console

from edgeasync import callbacks
from edgeasync.callbacks import Progress
from tests.support.parts.events import END, evaluation, update


def shown(events, *, terminal, **options):
    text = io.StringIO()
    bar = Progress(console=Console(file=text, force_terminal=terminal, force_jupyter=False, width=120), **options)
    for event in events:
        bar(event)
    return text.getvalue()


JOINS = [callbacks.JoinEvent(time_s=0.0, device=name) for name in "ab"]
EVENTS = [*JOINS, *map(update, range(1, 6)), update(6, outcome="stale"), evaluation(0.1, 0.875), END]


def test_without_a_terminal_there_is_a_plain_line_now_and_then():
    assert shown(EVENTS, terminal=False) == "5 updates, version 0, loss 0.5, accuracy 87.5%, 2 devices\n"
    assert shown(EVENTS, terminal=False, every_s=0.0).count("\n") == len(EVENTS)


def test_in_a_terminal_the_line_changes():
    text = shown([*EVENTS, *EVENTS], terminal=True, updates=5)
    assert "5 updates, version 0, loss 0.5, accuracy 87.5%, 2 devices" in text
    assert "\x1b[" in text
    assert "━" in text
