"""What Prometheus reads of a hub."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgeasync import Agent, Hub
from edgeasync.web.metric_tables import DEVICE_METRICS, HUB_METRICS
from edgeasync.web.metrics import HubMetrics
from tests.support.parts.small_runs import ANYWHERE, DATA, MODEL
from tests.support.programs.processes import until


@pytest.fixture
def hub(tmp_path):
    """A hub with two devices."""
    with (
        Hub(MODEL, run=tmp_path, bind=ANYWHERE) as hub,
        Agent(hub.address, DATA, name="pump-1", state=tmp_path / "pump-1"),
        Agent(hub.address, DATA, name="fan/2", state=tmp_path / "fan"),
    ):
        until(lambda: len(hub.status()["devices"]) == 2 and hub.status()["updates_applied"] > 4, "updates")
        yield hub


def metrics_of(hub, *patterns, refused=()):
    metrics = HubMetrics(hub._running, patterns, viewers=lambda: 3, refused=lambda: Counter(refused))
    return metrics, lambda: asyncio.run_coroutine_threadsafe(metrics.render(), hub._loop).result(60).decode()


def samples(text):
    """Return the samples of the text, and check that no series comes twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def test_the_metrics_are_those_of_the_status(hub):
    _, render = metrics_of(hub, refused={"host": 7})
    found, status = samples(render()), hub.status()
    assert found["edgeasync_devices", (("state", "training"),)] == 2
    assert found["edgeasync_devices", (("state", "lost"),)] == 0
    assert 4 < found["edgeasync_updates_applied_total", ()] <= status["updates_applied"]
    assert found["edgeasync_received_bytes_total", ()] > 0
    assert found["edgeasync_messages_accepted_total", (("kind", "push"),)] > 4
    assert found["edgeasync_loss", ()] > 0
    assert found["edgeasync_disk_failing", ()] == 0
    assert found["edgeasync_page_viewers", ()] == 3
    assert found["edgeasync_page_refused_total", (("reason", "host"),)] == 7
    assert ("edgeasync_evaluation_accuracy_ratio", ()) not in found
    assert found["process_resident_memory_bytes", ()] > 1e6
    assert not [name for name, _ in found if name.startswith("edgeasync_device_")]


def test_every_metric_of_the_table_is_in_the_output(hub):
    _, render = metrics_of(hub, "*")
    text = render()
    for row in HUB_METRICS + DEVICE_METRICS:
        assert f"# TYPE {row.shown_name} {row.kind}\n" in text
        assert f"# HELP {row.shown_name} {row.words}\n" in text


def test_devices_have_series_of_their_own_only_if_a_pattern_names_them(hub):
    _, render = metrics_of(hub, "pump-*", "none")
    devices = {dict(labels).get("device") for name, labels in samples(render()) if "_device_" in name}
    assert devices == {"pump-1"}


def test_scrapers_share_what_is_less_than_a_second_old(hub, monkeypatch):
    now_s = [0.0]
    # Only the clock of this module, because the hub would stop with that of the process.
    monkeypatch.setattr("edgeasync.web.metrics.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    _, render = metrics_of(hub)
    first = render()
    until(
        lambda: hub.status()["updates_applied"] > samples(first)["edgeasync_updates_applied_total", ()], "updates"
    )
    assert render() == first
    now_s[0] = 1.0
    assert render() != first


@pytest.mark.parametrize("row", HUB_METRICS + DEVICE_METRICS, ids=lambda row: row.name)
def test_names_follow_the_conventions_of_prometheus(row):
    assert row.name.startswith("edgeasync_")
    assert not row.name.endswith(("_total", "_count", "_sum", "_percent", "_ms", "_mb"))
    assert row.label in ("", "device", "kind", "reason", "state", "version")
    assert not row.words.endswith(".")
