"""What a peer wrote reaches a terminal as text: no escape code, no line of its own."""

import io
import json
import logging
import threading
import unicodedata

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edgeasync.cli import main
from edgeasync.cli.demo import Show
from edgeasync.cli.output import Printer, event_line, print_table, visible
from edgeasync.cli.serving import log_to_stderr
from edgeasync.cli.status import View, describe_status
from edgeasync.errors import RefusedError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Refuse
from edgeasync.protocol.status import EndedAlarm
from tests.support.parts.statuses import alarm, device, status
from tests.support.programs.processes import Commands

CLEAR, TITLE, CSI, TURNED = "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x9b31m", "\u202egnp.exe"
EVIL = f"full{CLEAR}{TITLE}{CSI}{TURNED}\r\nedgeasync: all is well\x7f\x00\udc9b[bold]"


def is_harmless(text):
    """Whether each of its lines is something that a terminal only shows."""
    return not any(unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp") for each in text.replace("\n", ""))


def harmless_line(text):
    return is_harmless(text) and text.count("\n") == 1


def test_escape_codes_become_text_that_can_be_seen():
    assert visible("\x1b[31mred\r\n\x9b\u202e\x7f") == r"\x1b[31mred\r\n\x9b\u202e\x7f"


@pytest.mark.parametrize(
    "text", ["", "the hub is full; try again", "größe 3 µs — 15 °C", "温室-3", "a\u00a0b", "\\x1b"]
)
def test_what_a_person_may_write_stays_as_it_is(text):
    assert visible(text) == text


@given(st.text(st.characters()))
def test_no_text_at_all_passes_with_a_control_character(text):
    assert is_harmless(visible(text))
    assert "\n" not in visible(text)


def test_events_and_tables_are_lines_of_text(capsys):
    Printer(json=False).event("waiting", detail=EVIL)
    assert harmless_line(capsys.readouterr().out)
    assert is_harmless(event_line("joined", {"device": EVIL}))
    print_table(Printer(json=False), [("run", "trouble"), ("first", EVIL)])
    out = capsys.readouterr().out
    assert is_harmless(out)
    assert out.count("\n") == 2


def test_json_is_as_it_was(capsys):
    Printer(json=True).event("waiting", detail="\x1b[2J\r\n")
    out = capsys.readouterr().out
    assert harmless_line(out)
    assert json.loads(out)["detail"] == "\x1b[2J\r\n"


def test_an_error_is_one_line_of_text(monkeypatch, capsys):
    def refuse(**_):
        raise RefusedError(EVIL)

    monkeypatch.setattr(main, "app", refuse)
    assert main.run_command() == RefusedError.exit_code
    assert harmless_line(capsys.readouterr().err)


def test_a_status_is_text_and_no_markup():
    evil = device(EVIL, why=EVIL, push_codec=EVIL, pace_percent=50, pace_reason=EVIL, machine=EVIL, software=EVIL)
    alarms, past = [alarm("", EVIL), alarm(EVIL, EVIL)], [EndedAlarm(EVIL, EVIL, 1.0, 2.0)]
    told = status([evil], address=EVIL, lineage=EVIL, disk_trouble=EVIL, alarms=alarms, alarms_past=past)
    console = Console(width=1000, file=io.StringIO(), force_terminal=True, color_system=None)
    for view in (View(), View(device=EVIL)):
        console.print(describe_status(told, view, console, 50))
    text = console.file.getvalue()
    for code in ("\x1b[1m", "\x1b[0m"):  # what rich itself writes for headings
        text = text.replace(code, "")
    assert is_harmless(text)
    assert text.count("[bold]") == 18


def test_the_demo_shows_text(capsys):
    Show(Printer(json=False), 2).event("lost", device=EVIL, detail=EVIL)
    assert harmless_line(capsys.readouterr().out)


def test_the_log_is_text_but_for_the_lines_of_a_traceback(capsys):
    logger = logging.getLogger("edgeasync.test_terminal")
    handlers = logging.getLogger().handlers[:]
    try:
        log_to_stderr("warning")
        logger.warning("from a peer: %s", EVIL)
        assert harmless_line(capsys.readouterr().err)
        logger.error("it failed", exc_info=RefusedError(EVIL))
        told = capsys.readouterr().err
        assert is_harmless(told)
        assert "RefusedError: full" in told
    finally:
        logging.getLogger().handlers[:] = handlers


@pytest.mark.process
def test_the_log_is_text_without_a_level_too(capsys, monkeypatch):
    """A hub's messages about a model's file contain names from the file."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr(None)
    logging.getLogger("edgeasync").warning("model.onnx: %s", EVIL)
    logging.getLogger("edgeasync").info("model.onnx: nothing")
    told = capsys.readouterr().err
    assert harmless_line(told)
    assert told.startswith("model.onnx: full")


def test_a_hub_that_refuses_an_agent_writes_nothing_to_its_terminal(tmp_path):
    context = zmq.Context()
    hub = context.socket(zmq.ROUTER)
    hub.bind("tcp://127.0.0.1:*")

    def refuse():
        peer, *_ = hub.recv_multipart()
        hub.send_multipart([peer, wire.encode(Refuse("retired_state", EVIL.replace("\udc9b", "")))])

    answering = threading.Thread(target=refuse)
    answering.start()
    try:
        with Commands(tmp_path) as commands:
            address = hub.get_string(zmq.LAST_ENDPOINT)
            told = commands.run("agent", "--hub", address, "--data", commands.data("data.npz"), "--state", "state")
    finally:
        answering.join()
        context.destroy(0)
    assert told.returncode == RefusedError.exit_code
    assert is_harmless(told.stdout)
    assert harmless_line(told.stderr)
    assert r"\x1b[2J" in told.stderr
