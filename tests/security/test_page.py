"""The page under attack: each attempt is refused or harmless, and the hub trains on."""

import asyncio
import contextlib
import http.client
import socket
import ssl
from pathlib import Path

import pytest

from edgeasync import Agent, Hub
from edgeasync.core.engine.token_bucket import Rate
from edgeasync.net.status import fetch_events
from edgeasync.web import connection, guard, listener
from edgeasync.web.tokens import PageTokens
from tests.support.parts.pages import PageClient, read_answer
from tests.support.parts.small_runs import ANYWHERE, DATA, MODEL
from tests.support.programs.processes import PATIENCE_S, until

TLS = Path(__file__).parents[1] / "support/security/tls"
NAME = "hub.example.org"
WAIT = asyncio.wait


class Fleet:
    """A hub with a page whose reading needs a token, and a device that trains."""

    def __init__(self, hub, folder):
        self.hub = hub
        self.tokens = PageTokens.open(folder)
        self.viewer = PageClient(f"http://127.0.0.1:{hub.page.rpartition(':')[2]}", token=self.tokens.viewer)
        self.stranger = PageClient(self.viewer.url.geturl())

    @property
    def refused(self):
        """What the page refused so far, by reason."""
        text = self.viewer.get("/metrics").body.decode()
        lines = [line.split('"') for line in text.splitlines() if line.startswith("edgeasync_page_refused_total{")]
        return {line[1]: float(line[2].strip("} ")) for line in lines}

    def trains_on(self):
        """Wait for more updates."""
        before = self.hub.status()["updates_applied"]
        until(lambda: self.hub.status()["updates_applied"] > before, "another update")


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setattr("edgeasync.web.metrics.FRESH_S", 0.0)
    page = {"page": {"bind": "127.0.0.1:*", "hosts": [NAME]}}
    with (
        Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, settings=page) as hub,
        Agent(hub.address, DATA, name="pump", state=tmp_path / "pump"),
    ):
        fleet = Fleet(hub, tmp_path / "run")
        fleet.trains_on()
        yield fleet
        fleet.trains_on()


def test_reading_needs_a_token(fleet):
    assert fleet.viewer.get("/metrics").status == 200
    refused = fleet.stranger.get("/metrics")
    assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert "page-viewer.token" in refused.json["error"]
    assert str(fleet.tokens.folder) not in refused.json["error"]
    assert fleet.stranger.get("/metrics", token="x" * 43).status == 401
    assert fleet.refused["token"] == 2


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/feed"])
def test_another_name_for_the_page_is_refused(fleet, path):
    """DNS rebinding: a site's name is made to point to this machine."""
    refused = fleet.viewer.get(path, host="evil.example")
    assert refused.status == 421
    assert "--page-hosts" in refused.json["error"]
    assert fleet.viewer.get("/metrics", host=f"{NAME}:443").status == 200


def test_another_site_is_refused(fleet):
    refused = fleet.viewer.get("/metrics", headers={"Origin": "http://evil.example"})
    assert refused.status == 403
    assert "access-control-allow-origin" not in refused.headers
    assert fleet.viewer.request("OPTIONS", "/metrics", headers={"Origin": "http://evil.example"}).status == 403


def test_a_revoked_token_ends_its_feed_and_is_refused_without_a_restart(fleet):
    old, (viewer, operator) = fleet.tokens, fleet.tokens.files
    head = f"GET /api/feed HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {old.viewer}\r\n\r\n"
    with fleet.viewer.connect() as follower:
        follower.sendall(head.encode())
        assert follower.recv(12) == b"HTTP/1.1 200"
        viewer.unlink()
        while follower.recv(1 << 16):  # until the hub ends the feed
            pass
    assert fleet.viewer.get("/metrics").status == 401
    fleet.tokens = PageTokens.open(fleet.tokens.folder)
    assert fleet.tokens.viewer != old.viewer
    assert fleet.tokens.operator == old.operator
    fleet.viewer.token = fleet.tokens.viewer
    assert fleet.viewer.get("/metrics").status == 200
    operator.write_text("chosen-by-ansible-1234\n")
    until(
        lambda: fleet.viewer.get("/metrics", token=old.operator).status == 401, "the end of the operator's token"
    )
    assert fleet.viewer.get("/metrics", token="chosen-by-ansible-1234").status == 200


def test_while_a_token_is_damaged_none_is_accepted_and_the_hub_warns(fleet):
    good = fleet.tokens.files[1].read_text()
    fleet.tokens.files[1].write_text("")
    until(lambda: fleet.viewer.get("/metrics").status == 401, "the end of all tokens")
    assert fleet.viewer.get("/metrics", token=" ").status == 401
    until(lambda: "accepts no token" in warnings(fleet.hub), "a warning")
    fleet.tokens.files[1].write_text(good)
    until(lambda: fleet.viewer.get("/metrics").status == 200, "both tokens")


def test_a_token_in_a_url_is_refused_even_if_it_is_right(fleet):
    assert fleet.stranger.get(f"/metrics?token={fleet.tokens.viewer}").status == 400
    assert fleet.viewer.get(f"/{fleet.tokens.viewer}").status == 400


def test_every_answer_forbids_frames_foreign_scripts_and_guessing(fleet):
    answers = [
        fleet.viewer.get("/metrics"), fleet.stranger.get("/metrics"), fleet.viewer.get("/none"),
        fleet.viewer.get("/healthz"), fleet.viewer.get("/", host="x"), fleet.viewer.request("POST", "/metrics"),
    ]  # fmt: skip
    for answer in answers:
        assert answer.headers["content-security-policy"] == guard.POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "server" not in answer.headers


ODD = ["<script>alert(1)</script>", "\x1b[31mred", "\u202etxt.exe", "x" * 10_000, "%00", "../../etc/passwd", "//x"]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_names_come_back_as_json_or_not_at_all(fleet, text):
    quoted = "".join(f"%{byte:02x}" for byte in text.encode())
    for path in (f"/{quoted}", f"/api/devices/{quoted}"):
        answer = fleet.viewer.get(path)
        assert 400 <= answer.status < 500
        assert text.encode() not in answer.body
    answer = fleet.viewer.get("/metrics", headers={"X": text.encode("unicode_escape").decode()})
    assert answer.status in (200, 400)


BROKEN = [
    b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 20,
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
    b"GET /" + b"a" * 100_000, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"GET * HTTP/1.1\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_request_costs_its_sender_the_connection(fleet, content, caplog):
    with fleet.stranger.connect() as attacker, contextlib.suppress(ConnectionError):
        attacker.sendall(content)
        assert read_answer(attacker).status >= 400
    assert not caplog.records  # else anybody could fill the hub's log


def test_what_follows_a_long_body_is_not_read(fleet):
    with fleet.viewer.connect() as attacker, contextlib.suppress(ConnectionError):
        attacker.sendall(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        answer = read_answer(attacker)
        assert (answer.status, answer.headers["connection"]) == (405, "close")
        while attacker.send(b"x" * 65_536):  # until the hub has closed the connection
            pass


def test_a_thousand_connections_leave_room_for_an_honest_one(fleet, monkeypatch):
    monkeypatch.setattr(listener.Rates, "take", lambda *_: True)  # as if each came from another address
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            attacker = stack.enter_context(fleet.stranger.connect())
            attacker.sendall(b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"")
        assert fleet.viewer.get("/metrics").status == 200
        fleet.trains_on()
        assert fleet.refused["connections"] > 0


def test_an_address_that_connects_too_often_has_to_wait(fleet, monkeypatch):
    monkeypatch.setattr(listener, "ADDRESS_RATE", Rate(10.0, 20.0))
    refused = 0
    for _ in range(150):
        with fleet.stranger.connect() as attacker:
            attacker.settimeout(PATIENCE_S)
            attacker.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                refused += attacker.recv(12) != b"HTTP/1.1 200"
    assert refused > 0
    until(lambda: _refused(fleet).get("rate"), "the address's turn")


def _refused(fleet):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return fleet.refused
    return {}


def test_many_requests_on_one_connection_end_it(fleet, monkeypatch):
    monkeypatch.setattr(listener, "ADDRESS_RATE", Rate(1.0, 100.0))
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with fleet.stranger.connect() as attacker, contextlib.suppress(ConnectionError):
        for _ in range(2000):
            attacker.sendall(request)
        received = b""
        while part := attacker.recv(65_536):
            received += part
        assert b"HTTP/1.1 429" in received


def test_a_connection_that_sends_no_request_is_closed(fleet, monkeypatch):
    monkeypatch.setattr(listener, "IDLE_S", 0.3)
    with fleet.stranger.connect() as first, fleet.stranger.connect() as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        for attacker in (first, slow):
            attacker.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionError):
                assert attacker.recv(1) == b""


def test_a_client_that_does_not_read_is_disconnected(fleet, monkeypatch):
    monkeypatch.setattr(connection, "STALLED_S", 0.2)
    monkeypatch.setattr("edgeasync.web.metrics.HubMetrics.render", _long)
    with fleet.viewer.connect() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {fleet.tokens.viewer}\r\n\r\n"
        slow.sendall(head.encode())
        fleet.trains_on()
        monkeypatch.undo()
        until(lambda: fleet.refused.get("slow"), "the end of the slow client")


def test_a_viewer_that_does_not_read_neither_delays_the_others_nor_stays(fleet, monkeypatch):
    """Every update is a megabyte here, as of a large fleet that changes."""
    monkeypatch.setattr(connection, "STALLED_S", 0.2)
    text = b'{"lineage":"","number":1,"text":"' + b"x" * (1 << 20) + b'"}'

    async def update(*_):
        await asyncio.sleep(0)
        return text

    monkeypatch.setattr("edgeasync.runtime.hub_feed.HubFeed.whole", update)
    monkeypatch.setattr("edgeasync.runtime.hub_feed.HubFeed.after", update)
    head = f"GET /api/feed HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {fleet.tokens.viewer}\r\n\r\n"
    with fleet.viewer.connect() as stuck, fleet.viewer.connect() as other:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for one in (stuck, other):
            one.sendall(head.encode())
        with other.makefile("rb") as stream:
            for _ in range(100):
                stream.readline()
        until(lambda: fleet.refused.get("slow"), "the end of the viewer that is stuck")
        with other.makefile("rb") as stream:
            assert stream.readline()


async def _long(_):
    return b"x" * 50_000_000


def test_with_a_certificate_the_page_speaks_only_tls(tmp_path, caplog):
    tables = {"page": {"bind": "127.0.0.1:*", "certificate": TLS / "certificate.pem", "key": TLS / "key.pem"}}
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE, settings=tables) as hub:
        assert hub.page.startswith("https://127.0.0.1:")
        assert PageClient(hub.page, trusted=TLS / "certificate.pem").get("/healthz").status == 200
        for content in (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 600, b""):
            with PageClient(hub.page).connect() as plain, contextlib.suppress(ConnectionError):
                plain.sendall(content)
                plain.shutdown(socket.SHUT_WR)
                assert b"HTTP" not in plain.recv(100)
    assert not caplog.records


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path):
    files = {name: tmp_path / f"{name}.pem" for name in ("certificate", "key")}
    for name, file in files.items():
        file.write_bytes((TLS / f"{name}.pem").read_bytes())
    tables = {"page": {"bind": "127.0.0.1:*", **files}}
    with Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, settings=tables) as hub:
        old, new = (PageClient(hub.page, trusted=TLS / name) for name in ("certificate.pem", "renewed.pem"))
        assert old.get("/healthz").status == 200
        with pytest.raises(ssl.SSLError):
            new.get("/healthz")
        files["certificate"].write_bytes((TLS / "renewed.pem").read_bytes())
        until(lambda: accepts(old) and "uses the old certificate" in warnings(hub), "a warning")
        files["key"].write_bytes((TLS / "other_key.pem").read_bytes())
        until(lambda: accepts(new), "the new certificate")
        assert not accepts(old)


def warnings(hub):
    """Return what a hub has warned of, as one text."""
    return str([event.detail for event in fetch_events(hub.address, 0, PATIENCE_S).events])


def accepts(client):
    try:
        return client.get("/healthz").status == 200
    except ssl.SSLError:
        return False


def test_clients_that_do_not_read_delay_the_end_of_a_hub_by_half_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr("edgeasync.web.metrics.HubMetrics.render", _long)
    waited = []

    async def wait(tasks, **options):
        waited.append(options.get("timeout"))
        return await WAIT(tasks, **options)

    with contextlib.ExitStack() as stack:
        settings = {"page": {"bind": "127.0.0.1:*"}}
        with Hub(MODEL, run=tmp_path, bind=ANYWHERE, settings=settings) as hub:
            client = PageClient(hub.page)
            for _ in range(5):
                stuck = stack.enter_context(client.connect())
                stuck.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert stuck.recv(12) == b"HTTP/1.1 200"
            monkeypatch.setattr(listener.asyncio, "wait", wait)
        monkeypatch.undo()
    assert waited.count(listener.CLOSE_S) == 1
