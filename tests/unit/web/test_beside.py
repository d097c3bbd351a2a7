"""A hub runs with or without its page, and says what a page needs."""

import asyncio
import subprocess
import sys

import pytest

from edgeasync import Hub
from edgeasync.config import FilePath
from edgeasync.errors import AddressError, ConfigError
from edgeasync.runtime.hub_settings import HubSection, RunSettings
from edgeasync.runtime.page_settings import MetricsSection, PageSection
from edgeasync.web import beside
from edgeasync.web.beside import prepare_page
from edgeasync.web.server import PageServer
from tests.support.parts.pages import PageClient
from tests.support.parts.small_runs import ANYWHERE, MODEL

HERE = "127.0.0.1:*"


def settings(tmp_path, page=None, metrics=None, **more):
    hub = HubSection(run=FilePath(tmp_path / "run"))
    return RunSettings(hub=hub, page=PageSection(bind=page, **more), metrics=MetricsSection(bind=metrics))


def test_without_a_page_nothing_is_prepared_and_no_folder_is_made(tmp_path):
    assert prepare_page(settings(tmp_path)) is None
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("useless", [{"insecure": True}, {"hosts": ("hub.example.org",)}])
def test_settings_of_a_page_without_an_address_are_refused(tmp_path, useless):
    with pytest.raises(ConfigError, match="has settings, but the hub serves neither; set bind"):
        prepare_page(settings(tmp_path, **useless))


def test_without_the_extra_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "PACKAGES", ("prometheus_client", "no_such_package"))
    with pytest.raises(ConfigError, match=r"need no_such_package: pip install 'edgeasync\[web\]'"):
        prepare_page(settings(tmp_path, metrics=HERE))


@pytest.mark.parametrize("binds", [{"page": "*:1"}, {"metrics": "192.0.2.1:1"}, {"page": "hub.example.org:1"}])
def test_beyond_this_machine_a_page_needs_tls_or_must_be_insecure(tmp_path, binds):
    with pytest.raises(AddressError, match=r"without TLS, .*--page-certificate.*--page-insecure"):
        prepare_page(settings(tmp_path, **binds))
    assert prepare_page(settings(tmp_path, **binds, insecure=True)) is not None


def test_a_hub_serves_its_page_and_its_metrics_while_it_runs(tmp_path):
    tables = {"page": {"bind": HERE}, "metrics": {"bind": HERE}}
    with Hub(MODEL, run=tmp_path, bind=ANYWHERE, settings=tables) as hub:
        page, metrics = PageClient(hub.page), PageClient(hub._urls["metrics"])
        for client in (page, metrics):
            assert client.get("/healthz").body == b"ok\n"
            assert client.get("/readyz").body == b"ready\n"
            assert b"edgeasync_model_version 0.0" in client.get("/metrics").body
        assert metrics.get("/").status == 404
    with pytest.raises(ConnectionError):
        page.connect()


def test_a_port_that_is_in_use_ends_the_hub_with_one_line(tmp_path):
    with (
        Hub(MODEL, run=tmp_path / "a", bind=ANYWHERE, settings={"page": {"bind": HERE}}) as first,
        pytest.raises(AddressError, match=r"cannot listen on this address: .* set bind of \[page\] \(--page\)"),
        Hub(MODEL, run=tmp_path / "b", bind=ANYWHERE, settings={"page": {"bind": first.page.partition("//")[2]}}),
    ):
        pass


def test_a_hub_without_a_page_imports_nothing_of_it(tmp_path):
    program = (
        "import sys; from edgeasync import Hub; from edgeasync.training.numpy_models import SoftmaxModel\n"
        f"with Hub(SoftmaxModel(inputs=2, classes=2), run={str(tmp_path / 'run')!r}, bind={ANYWHERE!r}): pass\n"
        f"print([n for n in {beside.PACKAGES!r} + ('edgeasync.web.server',) if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_until_the_hub_has_read_its_run_it_is_alive_but_not_ready(tmp_path):
    """A hub that replays a long journal answers probes, and asks others to try again."""

    class Reading:
        recovered = False

    async def ask():
        server = PageServer(Reading(), prepare_page(settings(tmp_path, page=HERE)))
        await server.open()
        client = PageClient(server.urls["page"])
        answers = [await asyncio.to_thread(client.get, path) for path in ("/healthz", "/readyz", "/metrics")]
        await server.close()
        return answers

    alive, ready, metrics = asyncio.run(ask())
    assert (alive.status, ready.status, metrics.status) == (200, 503, 503)
    assert "try again in a second" in metrics.json["error"]
    assert metrics.headers["retry-after"] == "1"
