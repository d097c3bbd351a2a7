"""The page's data and orders, over HTTP, of a hub in this process."""

import contextlib
import json
import time

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from edgeasync import Agent, Hub
from edgeasync.durable.keys import HubKeys, KeyPair, fingerprint
from edgeasync.protocol.feed import DeviceDetails, FeedUpdate
from edgeasync.web import api
from edgeasync.web.feed_stream import number_of
from edgeasync.web.tokens import PageTokens
from tests.support.parts.pages import PageClient
from tests.support.parts.small_runs import ANYWHERE, DATA, MODEL
from tests.support.programs.processes import PATIENCE_S, until

PAGE = {"page": {"bind": "127.0.0.1:*"}}


def operator(hub, folder):
    return PageClient(hub.page, token=PageTokens.open(folder).operator)


@pytest.fixture
def hub(tmp_path):
    """A hub without keys, and a device that trains."""
    with (
        Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, settings=PAGE, evaluate=DATA) as hub,
        Agent(hub.address, DATA, name="pump/1", state=tmp_path / "pump"),
    ):
        until(lambda: hub.status()["updates_applied"], "an update")
        yield hub


@contextlib.contextmanager
def feed_of(client):
    """Open the feed, and yield a function that returns the next line."""
    with client.connect() as connection:
        token = f"Authorization: Bearer {client.token}\r\n" if client.token else ""
        connection.sendall(f"GET /api/feed HTTP/1.1\r\nHost: localhost\r\n{token}\r\n".encode())
        with connection.makefile("rb") as stream:
            while stream.readline().strip():
                pass

            def line():
                """Return the next line of the body, whose chunks need not end with lines."""
                found = b""
                while not found.endswith(b"\n"):
                    size = int(stream.readline(), 16)
                    assert size, "the feed has ended"
                    found += stream.read(size)
                    stream.readline()
                return found

            yield line


def test_the_feed_begins_whole_and_continues_with_changes(hub):
    with feed_of(PageClient(hub.page)) as line:
        first = msgspec.json.decode(line(), type=FeedUpdate)
        assert first.previous == 0
        assert [row.id for row in first.devices] == ["pump/1"]
        number = first.number
        for _ in range(2):
            update = msgspec.json.decode(line(), type=FeedUpdate)
            assert (update.previous, update.number) == (number, number + 1)
            number = update.number
        assert update.summary.updates_applied > first.summary.updates_applied
        assert b"edgeasync_page_viewers 1.0" in PageClient(hub.page).get("/metrics").body


def test_the_number_of_updates_is_that_of_the_last_line():
    line = b'{"lineage":"%s","number":%d,"time":0,"text":"{\\"number\\":9}"}'
    assert number_of(line % (b"ab12", 7)) == 7
    assert number_of(line % (b"ab12", 7) + b"\n" + line % (b"ab12", 80)) == 80


def test_a_viewer_who_leaves_is_forgotten(hub):
    with feed_of(PageClient(hub.page)) as line:
        line()
    until(
        lambda: b"edgeasync_page_viewers 0.0" in PageClient(hub.page).get("/metrics").body, "the end of the feed"
    )


def test_there_is_a_limit_for_viewers(hub, monkeypatch):
    monkeypatch.setattr(api, "VIEWERS_MAX", 1)
    with feed_of(PageClient(hub.page)) as line:
        line()
        refused = PageClient(hub.page).get("/api/feed")
        assert (refused.status, refused.json["error"]) == (503, "1 viewers follow this hub already; close a page")


@pytest.mark.parametrize("path", ["/api/devices/pump/1", "/api/devices/pump%2F1"])
def test_the_details_of_a_device(hub, path):
    details = msgspec.json.decode(PageClient(hub.page).get(path).body, type=DeviceDetails)
    assert details.device.id == "pump/1"
    assert "joined" in {event.event for event in details.events}


@pytest.mark.parametrize("name", ["fan", "pump", "pump/1/2", "%00", "..%2f", "x" * 65, "%3Cscript%3E", "a%0d%0ab"])
def test_an_unknown_device_is_not_found(hub, name):
    assert PageClient(hub.page).get(f"/api/devices/{name}").status == 404
    assert operator(hub, hub.path).request("POST", f"/api/devices/{name}/release").status == 404


def test_models_can_be_downloaded(hub):
    client = PageClient(hub.page)
    until(lambda: client.get("/api/models/best").status == 200, "an evaluation")
    for name in ("newest", "best"):
        answer = client.get(f"/api/models/{name}")
        assert answer.headers["content-disposition"].startswith('attachment; filename="')
        assert load(answer.body)["layer0.weight"].dtype == np.float32
    assert client.request("HEAD", "/api/models/newest").body == b""


def test_an_operator_excludes_and_releases_a_device_and_the_hub_reports_it(hub):
    client = operator(hub, hub.path)
    assert client.request("POST", "/api/devices/pump%2F1/quarantine").json["order"] == "quarantine"
    assert hub.status()["devices"][0]["state"] == "quarantined"
    client.request("POST", "/api/devices/pump/1/release")
    assert hub.status()["devices"][0]["state"] != "quarantined"
    details = client.get("/api/devices/pump/1").json
    names = [event["event"] for event in details["events"]]
    assert names.index("excluded") < names.index("released")


@pytest.mark.parametrize("path", ["devices/pump/1/quarantine", "devices/pump/1/release", "pending/x/refuse"])
def test_orders_need_the_operators_token(hub, path):
    client, tokens = PageClient(hub.page), PageTokens.open(hub.path)
    assert client.request("POST", f"/api/{path}").status == 401
    assert client.request("POST", f"/api/{path}", token=tokens.viewer).status == 403
    assert client.get(f"/api/{path}", token=tokens.operator).status in (404, 405)
    assert hub.status()["devices"][0]["state"] == "training"


def test_an_order_that_is_not_confirmed_in_time_says_so(hub, monkeypatch):
    monkeypatch.setattr("edgeasync.runtime.local_orders.ANSWER_S", 0.01)
    monkeypatch.setattr("edgeasync.runtime.local_orders.LocalOrders.accepts", lambda *_: True)
    answer = operator(hub, hub.path).request("POST", "/api/devices/pump/1/release")
    assert answer.status == 504
    assert "look at the device's state" in answer.json["error"]


def test_an_order_that_waits_does_not_delay_the_end_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("edgeasync.runtime.local_orders.ANSWER_S", 10 * PATIENCE_S)
    monkeypatch.setattr("edgeasync.runtime.local_orders.LocalOrders.accepts", lambda *_: True)
    with contextlib.ExitStack() as stack:
        with Hub(MODEL, run=tmp_path, bind=ANYWHERE, settings=PAGE) as hub:
            client = operator(hub, hub.path)
            waiting = stack.enter_context(client.connect())
            head = f"Host: localhost\r\nAuthorization: Bearer {client.token}\r\n\r\n"
            waiting.sendall(f"POST /api/devices/pump/release HTTP/1.1\r\n{head}".encode())
            until(lambda: hub._running.orders._waiting, "the order")
        waiting.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            assert waiting.recv(1) == b""


def test_a_hub_without_keys_has_none_to_accept(hub):
    answer = operator(hub, hub.path).request("POST", "/api/pending/x/refuse")
    assert (answer.status, answer.json["error"].startswith("this hub has no keys")) == (409, True)


@pytest.fixture
def keyed(tmp_path):
    """A hub with keys, of which two more ask for admission."""
    keys = HubKeys.init(tmp_path / "keys")
    pending = [KeyPair.make().public for _ in range(2)]
    for key in pending:
        keys.knock(key, "192.0.2.9", time.time())
    with Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, keys=keys.folder, settings=PAGE) as hub:
        yield hub, keys, [fingerprint(key) for key in pending]


def accept(client, shown, body):
    return client.request("POST", f"/api/pending/{shown}/accept", body=body)


def test_an_operator_accepts_and_refuses_keys_and_the_hub_reports_it(keyed):
    hub, keys, (first, second) = keyed
    client = operator(hub, keys.folder)
    with feed_of(client) as line:
        assert {one["fingerprint"] for one in json.loads(line())["pending"]} == {first, second}
        assert accept(client, first, b'{"name": "fan"}').json == {"fingerprint": first, "name": "fan"}
        assert client.request("POST", f"/api/pending/{second}/refuse").status == 200
        assert keys.allow_list().entries["fan"].role == "device"
        assert [one.refused for one in keys.pending()] == [True]
        events = until(lambda: json.loads(line())["events"], "the events")
    found = {event["event"]: event for event in events}
    assert found["admitted"]["device"] == "fan"
    assert first in found["admitted"]["detail"]
    assert second in found["refused"]["detail"]


BODIES = [b"", b"{}", b"[]", b'{"name": 1}', b'{"name": "fan", "role": "operator"}', b'{"name": "fan"', b"\xff"]


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_is_not_a_name_is_refused(keyed, body):
    hub, keys, (first, _) = keyed
    answer = accept(operator(hub, keys.folder), first, body)
    assert (answer.status, answer.json["error"]) == (400, 'the body must be {"name": NAME}')


@pytest.mark.parametrize("name", ["", "-", "a b", "<b>", "owner", "x" * 65, "fan/1", "a\\u0000"])
def test_a_name_that_may_not_be_is_refused_with_the_sentence_of_the_command(keyed, name):
    hub, keys, (first, _) = keyed
    answer = accept(operator(hub, keys.folder), first, f'{{"name": "{name}"}}'.encode())
    assert answer.status == 409
    assert "invalid name" in answer.json["error"] or "owner is an operator" in answer.json["error"]
    assert len(keys.pending()) == 2


def test_an_unknown_key_is_refused(keyed):
    hub, keys, _ = keyed
    answer = accept(operator(hub, keys.folder), "0000", b'{"name": "fan"}')
    assert (answer.status, "no pending key has this fingerprint" in answer.json["error"]) == (409, True)


def test_a_body_that_is_too_large_or_too_slow_is_refused(keyed, monkeypatch):
    hub, keys, (first, _) = keyed
    client = operator(hub, keys.folder)
    assert accept(client, first, b'{"name": "' + b"x" * 2000 + b'"}').status == 413
    monkeypatch.setattr(api, "BODY_S", 0.05)
    head = (
        f"POST /api/pending/{first}/accept HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client.token}\r\n"
    )
    assert client.say(f"{head}Content-Length: 20\r\n\r\n".encode()).status == 408


def test_feeds_end_before_the_hub_does(tmp_path):
    with contextlib.ExitStack() as stack:
        with Hub(MODEL, run=tmp_path, bind=ANYWHERE, settings=PAGE) as hub:
            connection = stack.enter_context(PageClient(hub.page).connect())
            connection.settimeout(PATIENCE_S)
            connection.sendall(b"GET /api/feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
        received = b""
        while part := connection.recv(65_536):
            received += part
    assert received.endswith(b"\r\n0\r\n\r\n")  # a complete answer
