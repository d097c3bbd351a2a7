"""Damaged requests to the page of a live hub: each is answered or its connection ends, and the hub stays alive."""

import contextlib
import socket
from random import Random

import pytest

from edgeasync import Hub
from edgeasync.web import listener
from edgeasync.web.tokens import PageTokens
from tests.fuzz.mutations import mutated
from tests.support.parts.pages import PageClient
from tests.support.parts.small_runs import ANYWHERE, MODEL
from tests.support.programs.processes import PATIENCE_S
from tests.support.size import repetitions

pytestmark = pytest.mark.gate


def requests_of(token):
    """Return one valid request of each kind, except for those that do not end."""
    common = f" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
    json = "Content-Type: application/json\r\nContent-Length: 15\r\n\r\n" + '{"name": "fan"}'
    lines = [
        "GET /", "GET /page.js", "GET /metrics", "GET /api/models/newest", "GET /api/devices/pump%2F1",
        "HEAD /api/feed", "POST /api/devices/pump/release",
    ]  # fmt: skip
    chunked = "Transfer-Encoding: chunked\r\n\r\nf\r\n" + '{"name": "fan"}' + "\r\n0\r\n\r\n"
    return [f"{line}{common}\r\n".encode() for line in lines] + [
        f"POST /api/pending/0000/accept{common}{body}".encode() for body in (json, chunked)
    ]


def test_damaged_requests_do_a_page_no_harm(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(listener.Rates, "take", lambda *_: True)
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE, settings={"page": {"bind": "127.0.0.1:*"}}) as hub:
        client, random = PageClient(hub.page), Random(1)
        valid = requests_of(PageTokens.open(tmp_path).operator)
        for _ in range(repetitions("cases of a reader of bytes")):
            with client.connect() as attacker, contextlib.suppress(ConnectionError):
                attacker.settimeout(PATIENCE_S)
                attacker.sendall(mutated(random, valid))
                attacker.shutdown(socket.SHUT_WR)
                while attacker.recv(65_536):
                    pass
        assert client.get("/readyz").status == 200
        assert hub.status()["devices"] == []
    assert not caplog.records
