"""The feed of a hub that runs in this process, with an agent."""

import asyncio
import json

import msgspec
import pytest

from edgeasync.core.hub.settings import StopCondition
from edgeasync.durable.keys import HubKeys, KeyPair, fingerprint
from edgeasync.errors import EdgeAsyncError
from edgeasync.protocol.feed import DeviceDetails, FeedUpdate
from edgeasync.runtime.hub_feed import FeedClosedError, FeedSource
from tests.support.parts.hubs import make_agent, make_hub, serve
from tests.support.programs.processes import PATIENCE_S


@pytest.mark.asyncio
async def test_viewers_follow_a_hub_until_it_ends(tmp_path, network):
    hub = make_hub(tmp_path, network)
    with pytest.raises(EdgeAsyncError, match="recovered"):
        hub.feed  # noqa: B018
    agent, joined = make_agent(network), asyncio.Event()
    hub._on_report = lambda report: joined.set() if report.event == "joined" else None
    tasks = [asyncio.create_task(hub.run()), asyncio.create_task(agent.run())]
    async with asyncio.timeout(PATIENCE_S):
        await joined.wait()
        feed = hub.feed
        first = msgspec.json.decode(await feed.whole(), type=FeedUpdate)
        (name,) = [row.id for row in first.devices]
        assert (first.lineage, first.pending) == (hub.core.lineage, None)
        texts = await asyncio.gather(*[feed.after(first.number) for _ in range(3)])
        assert len({id(text) for text in texts}) == 1
        assert json.loads(texts[0])["previous"] == first.number
        details = msgspec.json.decode(await feed.device(name), type=DeviceDetails)
        assert details.device.joined_s is not None
        assert await feed.device("nobody") is None
        assert sum(feed.counters().counts.values()) == 1
        waiting = asyncio.create_task(feed.after(feed.number))
        await asyncio.sleep(0)
        hub.request_stop()
        with pytest.raises(FeedClosedError):
            await waiting
        await tasks[0]
        with pytest.raises(FeedClosedError):
            feed.counters()
        agent.request_stop()
        await tasks[1]


@pytest.mark.asyncio
async def test_after_a_restart_viewers_see_the_curve_from_before(tmp_path, network):
    assert await serve(make_hub(tmp_path, network, stop=StopCondition(updates=5)), make_agent(network))
    hub = make_hub(tmp_path, network)
    resumed = asyncio.Event()
    hub._on_report = lambda report: resumed.set() if report.event == "resumed" else None
    serving = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await resumed.wait()
        update = msgspec.json.decode(await hub.feed.whole(), type=FeedUpdate)
        hub.request_stop()
        await serving
    assert [(point.version, point.loss) for point in update.history][:5] == [(one, 1.0) for one in range(1, 6)]


def test_pending_keys_are_read_again_only_if_the_file_changes(tmp_path, monkeypatch):
    keys = HubKeys.init(tmp_path / "keys")
    source = FeedSource(lambda: 0.0, lambda *_: None, dict, keys)
    assert source.pending_keys() == []
    pair = KeyPair.make()
    keys.knock(pair.public, "10.0.0.7", 1e9)
    (pending,) = source.pending_keys()
    assert (pending.fingerprint, pending.address, pending.seen) == (fingerprint(pair.public), "10.0.0.7", 10**9)
    monkeypatch.setattr(keys, "pending", None)
    assert source.pending_keys() == [pending]
    assert FeedSource(lambda: 0.0, lambda *_: None, dict, None).pending_keys() is None
