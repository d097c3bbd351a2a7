"""A device enrols by a token, once, and trains under its own key ever after."""

import time

import pytest
import zmq

from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.durable.keys import PENDING_MAX, PENDING_S, KeyPair, Token, fingerprint
from edgeasync.errors import ConfigError, StorageError
from edgeasync.protocol.messages import Enrol, Enrolled, Hello, Ping, Refuse, StatusRequest
from edgeasync.runtime.access import Access
from edgeasync.runtime.agent import Agent
from tests.support.command_line import ACCESS, CONFIG, FILES, assert_told
from tests.support.keyed import ask, client, denied, enrolled, is_welcome, start_hub
from tests.support.processes import free_address, until

pytestmark = pytest.mark.process


def issue(keys, address, name="pi-1", now_s=None):
    return keys.issue_token(name, (address,), time.time() if now_s is None else now_s)


def temporary(token):
    return KeyPair.of(token.secret), token.hub


def start_agent(commands, *flags, state="state"):
    return commands.start(
        "agent", "--data", commands.data("d.npz"), "--state", commands.folder / state, "--json", *flags
    )


# -- a device, from its token to training -------------------------------------------------------------------------


def test_one_command_enrols_and_trains_and_the_next_start_needs_no_token(commands, keys):
    hub, address = start_hub(commands, keys)
    token = issue(keys, address)
    agent = start_agent(commands, "--enrol", token.text())
    assert agent.wait_for("enrolled")["detail"] == "as pi-1"
    assert hub.wait_for("joined")["device"] == "pi-1"
    agent.wait_for("joined")
    agent.signal(15)
    assert agent.wait() == 0
    again = start_agent(commands)
    again.wait_for("joined")
    hub.wait_for("rejoined", device="pi-1")
    assert ask(address, keys)["denied"] == {}


def test_a_settings_file_may_keep_the_token_that_enrolled_the_device(commands, keys):
    hub, address = start_hub(commands, keys)
    (commands.folder / "agent.toml").write_text(f'[agent]\nenrol = "{issue(keys, address).text()}"\n')
    for event in ("joined", "rejoined"):
        agent = start_agent(commands, "agent.toml")
        hub.wait_for(event, device="pi-1")
        agent.signal(15)
        assert agent.wait() == 0
    assert ask(address, keys)["denied"] == {}


def test_a_settings_file_may_have_a_device_knock(commands, keys):
    _, address = start_hub(commands, keys, "--knocking")
    lines = f'hub = "{address}"\nhub_key = "{keys.pair().public.hex()}"\ndevice_id = "pi-1"\n'
    (commands.folder / "agent.toml").write_text(f"[agent]\n{lines}")
    agent = start_agent(commands, "agent.toml")
    (one,) = until(keys.pending, "the knock is noted")
    keys.accept(fingerprint(one.key), "pi-1")
    agent.wait_for("joined")
    agent.signal(15)
    assert agent.wait() == 0
    start_agent(commands, "agent.toml").wait_for("joined")


def test_several_agents_of_a_board_share_its_key(commands, keys):
    hub, address = start_hub(commands, keys)
    enrolling = start_agent(commands, "--enrol", issue(keys, address).text())
    enrolling.wait_for("joined")
    enrolling.signal(15)
    enrolling.wait()
    start_agent(commands, "--device-id", "pi-1/7").wait_for("joined")
    assert hub.wait_for("joined", count=2)["device"] == "pi-1/7"


def test_the_secret_key_never_leaves_the_device(commands, keys):
    hub, address = start_hub(commands, keys)
    token = issue(keys, address)
    agent = start_agent(commands, "--enrol", token.text())
    agent.wait_for("joined")
    secret = DeviceKeys(commands.folder / "state").own().secret
    words = (secret.hex(), token.secret.hex(), token.text())
    for text in (*agent.lines, *hub.lines, agent.stderr, hub.stderr):
        assert not any(word in text for word in words)
    for path in commands.folder.rglob("*"):
        if path.is_file() and path.name != "device.key":
            content = path.read_bytes()
            assert secret not in content, path
            assert not any(word.encode() in content for word in words), path


@pytest.mark.parametrize("own", ["another", "the token's", None])
def test_a_hub_that_no_token_names_is_told(commands, keys, own):
    """The settings' hub takes the place of the token's: a card with both wrong would wait for ever in silence."""
    nowhere, here = "tcp://127.0.0.1:9", free_address()
    flags = {"another": ("--hub", here), "the token's": ("--hub", nowhere, "--hub", here), None: ()}[own]
    agent = start_agent(commands, "--enrol", issue(keys, nowhere).text(), *flags)
    agent.wait_for("waiting")
    told = [event["detail"] for event in agent.events if event["event"] == "warning"]
    wanted = f"hub {here} stands in for the address that the token names, {nowhere}"
    assert told == ([wanted] if own == "another" else [])


def test_enrolling_waits_for_the_hub(commands, keys):
    address = free_address()
    agent = start_agent(commands, "--enrol", issue(keys, address).text())
    assert address in agent.wait_for("waiting")["detail"]
    start_hub(commands, keys, bind=address)
    agent.wait_for("joined")


def test_a_lost_answer_does_not_cost_the_token(commands, keys):
    """The hub has taken the key, and the device does not know: the same command again finds out."""
    _, address = start_hub(commands, keys)
    token = issue(keys, address)
    state = DeviceKeys(commands.folder / "state")
    assert not state.begin(token)
    assert keys.use_token(KeyPair.of(token.secret).public, state.own().public, time.time()) == "pi-1"
    agent = start_agent(commands, "--enrol", token.text())
    agent.wait_for("joined")
    agent.kill()
    start_agent(commands, "--device-id", "pi-1/1").wait_for("joined")


def test_a_board_that_is_enrolled_again_takes_its_name_over(commands, keys):
    """The card was lost: another key, the same name. The old key is out."""
    _, address = start_hub(commands, keys)
    old = start_agent(commands, "--enrol", issue(keys, address).text(), state="old")
    old.wait_for("joined")
    old.kill()
    start_agent(commands, "--enrol", issue(keys, address).text(), state="new").wait_for("joined")
    assert start_agent(commands, state="old").wait() == ACCESS
    assert denied(address, keys, "revoked") == {"revoked": 1}


# -- what a token is not good for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [StatusRequest(), Ping(b"s" * 16, 0.0, 0), Hello((3,), "pi-1", b"s" * 16, 1)])
def test_under_a_token_nothing_but_a_key_may_be_said(commands, keys, message):
    _, address = start_hub(commands, keys)
    token = issue(keys, address)
    with client(address, *temporary(token)) as device:
        device.say(message)
        device.ended()
        assert not device.socket.poll(0)
    status = ask(address, keys)
    assert status["denied"] == {"token": 1}
    assert status["devices"] == []


def test_a_key_with_a_payload_is_none(commands, keys):
    _, address = start_hub(commands, keys)
    with client(address, *temporary(issue(keys, address))) as device:
        device.say(Enrol(b"k" * 32), b"more", version=3)
        device.ended()
    assert keys.allow_list().entries.keys() == {"owner"}


def test_a_token_counts_once(commands, keys):
    _, address = start_hub(commands, keys)
    token, first, second = issue(keys, address), KeyPair.make(), KeyPair.make()
    watched = zmq.EVENT_HANDSHAKE_SUCCEEDED
    with client(address, *temporary(token)) as one, client(address, *temporary(token), events=watched) as two:
        two.let_in()  # once the token is used, its temporary key lets nobody in
        one.say(Enrol(first.public), version=3)
        assert one.hear() == Enrolled("pi-1")
        two.say(Enrol(second.public), version=3)
        assert two.hear().code == "not_allowed"
    with client(address, *temporary(token)) as three:
        three.say(Enrol(second.public), version=3)
        three.ended()
    assert keys.allow_list().entries["pi-1"].key == first.public
    with client(address, first, token.hub) as device:
        assert is_welcome(device.join("pi-1"))


def test_a_connection_asks_to_be_enrolled_once(commands, keys):
    """Red before: the hub went to its folder of keys as often as it was asked."""
    _, address = start_hub(commands, keys)
    token, own = issue(keys, address), KeyPair.make().public
    with client(address, *temporary(token)) as device:
        device.say(Enrol(own))
        assert device.hear() == Enrolled("pi-1")
        device.say(Enrol(own))
        device.ended()
    assert denied(address, keys, "token")["token"] == 1


def test_a_token_that_has_expired_lets_nobody_in(commands, keys):
    _, address = start_hub(commands, keys)
    token = issue(keys, address, now_s=time.time() - 601)
    with client(address, *temporary(token)) as device:
        device.say(Enrol(b"k" * 32), version=3)
        device.ended()
    assert denied(address, keys, "token") == {"token": 1}
    assert keys.allow_list().entries.keys() == {"owner"}


def test_a_token_takes_nobody_elses_key(commands, keys):
    _, address = start_hub(commands, keys)
    owner = keys.allow_list().entries["owner"].key
    token = issue(keys, address)
    for key in (owner, keys.pair().public):
        with client(address, *temporary(token)) as device:
            device.say(Enrol(key), version=3)
            answer = device.hear()
            assert isinstance(answer, Refuse)
            assert answer.code == "not_allowed"
    assert keys.allow_list().entries.keys() == {"owner"}


def test_an_enrolled_key_enrols_nobody(commands, keys):
    """`Enrol` from a device that is in is no message of a device."""
    pair = enrolled(keys)
    _, address = start_hub(commands, keys)
    with client(address, pair, keys.pair().public) as device:
        assert is_welcome(device.join("pi-1"))
        device.say(Enrol(b"k" * 32), version=3)
        assert device.hear().code == "malformed"
    assert keys.allow_list().entries.keys() == {"owner", "pi-1"}


def test_an_agent_says_that_a_token_counts_no_more(commands, keys):
    _, address = start_hub(commands, keys)
    used, expired = issue(keys, address), issue(keys, address, name="pi-2", now_s=time.time() - 601)
    start_agent(commands, "--enrol", used.text()).wait_for("joined")
    for token, state in ((used, "other"), (expired, "third")):
        agent = start_agent(commands, "--enrol", token.text(), state=state)
        assert agent.wait() == ACCESS
        assert "was used, or has expired" in agent.stderr
        assert token.text() not in agent.stderr


def test_an_agent_says_that_the_token_is_of_another_hub(commands, keys):
    _, address = start_hub(commands, keys)
    real = issue(keys, address)
    agent = start_agent(commands, "--enrol", Token(real.secret, KeyPair.make().public, "pi-1", (address,)).text())
    assert agent.wait() == ACCESS
    assert "another key" in agent.stderr


# -- without a token: a device knocks -----------------------------------------------------------------------------


def test_a_device_knocks_and_is_let_in_by_a_person(commands, keys):
    hub, address = start_hub(commands, keys, "--knocking")
    agent = start_agent(commands, "--hub", address, "--hub-key", keys.pair().public.hex(), "--device-id", "pi-1")
    shown = fingerprint(DeviceKeys(commands.folder / "state").own().public)
    told = agent.wait_for("waiting")["detail"]
    assert told.endswith(f"waits until the hub's operator lets it in by 'edgeasync keys accept {shown} pi-1'")
    (one,) = until(keys.pending, "the knock is noted")
    assert (fingerprint(one.key), one.address) == (shown, "127.0.0.1")
    listed = commands.run("keys", "pending", "--keys", keys.folder, "--json")
    assert shown in listed.stdout
    assert commands.run("keys", "accept", shown, "pi-1", "--keys", keys.folder).returncode == 0
    agent.wait_for("joined")
    assert agent.names() == ["started", "waiting", "joined"], "one line says what happens"
    assert hub.wait_for("joined")["device"] == "pi-1"
    assert commands.run("keys", "pending", "--keys", keys.folder, "--json").stdout == ""


def test_without_being_asked_a_hub_notes_nobody(commands, keys):
    _, address = start_hub(commands, keys)
    with client(address, KeyPair.make(), keys.pair().public) as stranger:
        stranger.ended()
    denied(address, keys, "unknown_key")
    assert keys.pending() == []


def test_who_knocks_is_bounded_and_who_was_refused_stays_so(keys):
    for number in range(PENDING_MAX):
        assert keys.knock(bytes([number]) * 32, "10.0.0.1", 100.0 + number)
    assert not keys.knock(b"\xff" * 32, "10.0.0.2", 200.0)
    assert keys.knock(bytes(32), "10.0.0.3", 200.0), "who is in the list may come again"
    assert len(keys.pending()) == PENDING_MAX
    keys.refuse(fingerprint(bytes(32)))
    keys.knock(bytes(32), "10.0.0.3", 300.0)
    assert [one.refused for one in keys.pending() if one.key == bytes(32)] == [True]
    assert keys.knock(b"\xff" * 32, "10.0.0.2", 100.0 + PENDING_S + 1)
    with pytest.raises(StorageError, match="has knocked"):
        keys.accept("0000-0000-0000-0000-0000", "pi-1")


def test_knocks_are_noted_now_and_then(keys):
    noted, now_s = [], [1000.0]
    access = Access(keys, print, print, lambda key, address: noted.append(address), lambda: now_s[0])
    for step in range(40):
        now_s[0] += 0.1
        assert not access.lets_in(bytes([step]) * 32, f"10.0.0.{step}")
    assert len(noted) <= 9


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes(commands, keys):
    data, token = commands.data("d.npz"), issue(keys, "tcp://127.0.0.1:1").text()
    agent = ("agent", "--data", data, "--state", commands.folder / "state")
    assert_told(commands.run(*agent, "--enrol", token[:-3]), CONFIG, "not a whole one")
    assert_told(commands.run(*agent, "--enrol", token, "--device-id", "pi-2"), CONFIG, "pi-1")
    assert_told(
        commands.run("keys", "enrol", "owner", "--address", "tcp://h:1", "--keys", keys.folder), FILES, "operator"
    )
    with pytest.raises(ConfigError, match="keys"):
        Agent(identity=DeviceIdentity("pi-1", "0" * 32, 1), make_trainer=None, enrol=token)
