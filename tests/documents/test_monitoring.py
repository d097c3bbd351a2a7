"""devices/monitoring uses metrics that a hub has, and promtool accepts its files."""

import json
import re
import shutil
import subprocess

import pytest

from edgeasync import Agent, Hub
from edgeasync.web.metric_tables import DEVICE_METRICS, HUB_METRICS
from tests.support.pages.documents import ROOT
from tests.support.parts.pages import PageClient
from tests.support.parts.small_runs import ANYWHERE, DATA, MODEL

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "devices/monitoring"
ROWS = {row.shown_name: row for row in HUB_METRICS + DEVICE_METRICS}
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
(GROUP,) = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"]
RULES = GROUP["rules"]
OF_PROCESS = {"process_cpu_seconds_total", "process_open_fds", "process_resident_memory_bytes"}
OF_PROMETHEUS = {"job", "instance"}
USE = re.compile(r"\b((?:edgeasync|process)_\w+)(?:\{([^}]*)\})?")

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's prometheus")


def expressions():
    """Return every expression of the dashboard and the alerts, with variables replaced."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [each.replace("$__rate_interval", "5m") for each in panels] + [rule["expr"] for rule in RULES]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_uses_metrics_and_labels_that_there_are(expression):
    used = USE.findall(expression)
    assert used or expression.startswith("up{")
    for name, labels in used:
        if name not in OF_PROCESS:
            known = OF_PROMETHEUS | {ROWS[name].label}
            assert set(re.findall(r"(\w+)\s*[=!]", labels)) <= known
            assert (ROWS[name].kind == "counter") == bool(re.search(rf"(rate|increase)\({name}", expression))


def test_most_metrics_are_shown():
    shown = {name for expression in expressions() for name, _ in USE.findall(expression)}
    assert set(ROWS) - shown <= {
        "edgeasync_build_info", "edgeasync_journal_entries_total", "edgeasync_journal_syncs_total",
        "edgeasync_device_examples_per_second", "edgeasync_device_received_bytes_total",
        "edgeasync_device_sent_bytes_total", "edgeasync_device_updates_applied_total",
        "edgeasync_device_updates_rejected_total",
    }  # fmt: skip


def test_every_alert_says_what_to_do_and_has_a_test():
    tested = (FOLDER / "alerts.test.yml").read_text("utf-8")
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
    untested = {rule["alert"] for rule in RULES if f"alertname: {rule['alert']}\n        exp_alerts" not in tested}
    assert untested == {"EdgeasyncDevicesQuarantined", "EdgeasyncDevicesNeverJoined"}  # like EdgeasyncDevicesLost


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) == 23


@promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts.test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(arguments):
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_understands_the_expressions_of_the_dashboard(tmp_path):
    rules = [{"record": f"a:b{place}", "expr": each} for place, each in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_finds_no_fault_with_the_metrics_of_a_hub(tmp_path):
    settings = {"metrics": {"bind": "127.0.0.1:*", "devices": ["*"]}}
    with (
        Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, settings=settings) as hub,
        Agent(hub.address, DATA, state=tmp_path / "device"),
    ):
        hub.wait_for(1)
        text = PageClient(hub.page).get("/metrics").body
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert b"edgeasync_device_pace_ratio{" in text
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
