"""The page of real hubs: `hub --page`, `demo --page`, a hub that is killed, and mistakes."""

import json

import pytest

from edgeasync.web.tokens import PageTokens
from tests.support.parts.pages import PageClient
from tests.support.programs.command_line import ADDRESS, CONFIG, mistake
from tests.support.programs.processes import MODEL_TABLE, Commands

pytestmark = pytest.mark.process

HUB = f'[hub]\nbind = "tcp://127.0.0.1:*"\nrun = "run"\n[model]\n{MODEL_TABLE}\n'


@pytest.fixture
def commands(tmp_path):
    with Commands(tmp_path, forks=True) as commands:
        (tmp_path / "hub.toml").write_text(HUB)
        yield commands


def url_of(command, event="page"):
    return command.wait_for(event)["detail"].partition(";")[0].removesuffix("/metrics")


def test_a_hub_that_was_killed_serves_its_page_again_with_the_same_tokens(commands):
    flags = ["hub", "hub.toml", "--page", "127.0.0.1:*", "--page-hosts", "hub.example.org", "--json"]
    tokens = []
    for _ in range(2):
        hub = commands.start(*flags)
        url = url_of(hub).replace("hub.example.org", "127.0.0.1")
        hub.wait_for("listening")
        tokens.append(PageTokens.open(commands.folder / "run"))
        client = PageClient(url, token=tokens[-1].viewer)
        assert client.get("/readyz").status == 200
        assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        assert b"edgeasync_model_version" in client.get("/metrics").body
        hub.kill()
    assert tokens[0] == tokens[1]


def test_metrics_alone_need_no_page(commands):
    hub = commands.start("hub", "hub.toml", "--metrics", "127.0.0.1:*", "--json")
    client = PageClient(url_of(hub, "metrics"))
    assert client.get("/healthz").status == 200
    assert client.get("/").status == 404
    assert "page" not in hub.names()


def test_the_demo_prints_the_url_of_its_page(commands):
    demo = commands.start("demo", "--page", "--seconds", "6", "--run", "demo", "--json")
    client = PageClient(url_of(demo))
    demo.wait_for("joined")
    with client.connect() as connection:
        connection.sendall(b"GET /api/feed HTTP/1.0\r\nHost: localhost\r\n\r\n")
        with connection.makefile("rb") as stream:
            while stream.readline().strip():
                pass
            names = {row[0] for row in json.loads(stream.readline())["devices"]}
            assert names
            assert names <= {f"device-{number}" for number in range(1, 5)}
    assert demo.wait() == 0


def test_beyond_this_machine_a_page_needs_tls_or_a_flag_that_says_so(commands):
    mistake(commands, ADDRESS, "without TLS", "--page-certificate", arguments=["hub", "hub.toml", "--page", "*:1"])


def test_a_resumed_run_opens_its_page_to_a_network_only_if_flags_repeat_that(commands):
    hub = commands.start("hub", "hub.toml", "--page", "*:*", "--page-insecure", "--json")
    hub.wait_for("listening")
    hub.kill()
    mistake(commands, ADDRESS, "--page *:*", "--page-insecure", arguments=["hub", "--resume", "run"])
    again = commands.start("hub", "--resume", "run", "--page", "127.0.0.1:*", "--json")
    again.wait_for("listening")


def test_without_the_extra_one_line_says_what_to_install(commands):
    (commands.folder / "edge.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'starlette' else find(name, *rest)\n"
        "from edgeasync.cli.main import main\nmain()\n"
    )
    hub = commands.start("hub", "hub.toml", "--page", program=("edge.py",))
    assert hub.wait() == CONFIG
    (line,) = hub.stderr.splitlines()
    assert line.startswith(
        "edgeasync: the hub's page and metrics need starlette: pip install 'edgeasync[web]', or "
    )
