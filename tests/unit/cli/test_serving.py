"""What an error that nobody expected leaves behind: the last events, in the folder or on standard error."""

import signal

import pytest

from edgeasync.cli.serving import LAST_EVENTS_FILE, LINES_SHOWN, ending_signals, serve
from edgeasync.core.engine.recorder import EVENTS_KEPT
from edgeasync.errors import EdgeAsyncError, StorageError
from edgeasync.runtime.agent import AgentRuntime
from tests.support.parts.agents import agent_parts


class Failing:
    """A service that ends by an error."""

    def __init__(self, error, events=EVENTS_KEPT):
        self.error, self.events = error, events

    async def run(self):
        raise self.error

    def request_stop(self):
        pass

    def last_events(self):
        return [f"event {number}" for number in range(self.events)]


@pytest.fixture(autouse=True)
def _signals():
    """Put back the signal handlers that `serve` takes for itself."""
    kept = {number: signal.getsignal(number) for number in ending_signals()}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), EdgeAsyncError("a defect")], ids=lambda error: type(error).__name__
)
def test_an_unexpected_error_shows_the_newest_events_and_writes_all(tmp_path, capsys, error):
    with pytest.raises(type(error)):
        serve(Failing(error), 60.0, int, tmp_path)
    written = (tmp_path / LAST_EVENTS_FILE).read_text().splitlines()
    assert written == Failing(error).last_events()
    first, *shown = capsys.readouterr().err.splitlines()
    assert first == f"edgeasync: the last events before the error; all are in {tmp_path / LAST_EVENTS_FILE}:"
    assert shown == written[-LINES_SHOWN:]


@pytest.mark.parametrize("folder", [None, "gone"])
def test_without_a_folder_all_are_shown(tmp_path, capsys, folder):
    with pytest.raises(ZeroDivisionError):
        serve(Failing(ZeroDivisionError()), 60.0, int, folder and tmp_path / folder)
    assert len(capsys.readouterr().err.splitlines()) == 1 + EVENTS_KEPT


@pytest.mark.parametrize("service", [Failing(StorageError("the disk is full")), Failing(OSError(), events=0)])
def test_a_mistake_or_an_error_before_the_first_event_shows_none(tmp_path, capsys, service):
    with pytest.raises(type(service.error)):
        serve(service, 60.0, int, tmp_path)
    assert (capsys.readouterr().err, list(tmp_path.iterdir())) == ("", [])


def test_an_agent_has_them(tmp_path, capsys):
    def on_report(report):
        raise ZeroDivisionError

    agent = AgentRuntime(*agent_parts(print, hub="tcp://127.0.0.1:9"), on_report=on_report)
    with pytest.raises(ZeroDivisionError):
        serve(agent, 60.0, int, tmp_path)
    written = (tmp_path / LAST_EVENTS_FILE).read_text()
    assert " s begin\n" in written
    assert "    Connect()" in written
    assert "state_id=..." in written
    assert "Report(event='waiting'" in written
