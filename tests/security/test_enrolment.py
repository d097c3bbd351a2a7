"""A device enrols by a token, once, and trains under its own key ever after."""

import time

import pytest
import zmq

from edgeasync.durable.allow_list import AllowList, read_key
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import PENDING_MAX, PENDING_S, KeyPair, Token, fingerprint
from edgeasync.errors import ConfigError, StorageError
from edgeasync.net.allow_list_reader import AllowListReader
from edgeasync.protocol.messages import Enrol, Enrolled, Hello, Ping, Refuse, StatusRequest
from tests.support.parts.agents import agent_parts
from tests.support.programs.command_line import ACCESS, CONFIG, FILES, assert_told
from tests.support.programs.processes import free_address, until
from tests.support.security.keyed import ask, client, denied, enrolled, is_welcome, start_hub

pytestmark = pytest.mark.process


FIELD = 2**255 - 19
LOW_ORDER = (
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    FIELD - 1,
    FIELD,
    FIELD + 1,
)
WEAK = [(one + high).to_bytes(32, "little") for one in LOW_ORDER for high in (0, 1 << 255)]
"""All encodings of points of low order: the shared secret is known without either of the two."""


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


@pytest.mark.parametrize("own", ["another", "the token's", None])
def test_a_hub_that_no_token_names_is_told(commands, keys, own):
    """The settings' hub takes the place of the token's: a card with both wrong would wait for ever in silence."""
    nowhere, here = "tcp://127.0.0.1:9", free_address()
    flags = {"another": ("--hub", here), "the token's": ("--hub", nowhere, "--hub", here), None: ()}[own]
    agent = start_agent(commands, "--enrol", issue(keys, nowhere).text(), *flags)
    agent.wait_for("waiting")
    told = [event["detail"] for event in agent.events if event["event"] == "warning"]
    wanted = f"using hub {here} from the settings instead of {nowhere} from the token"
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


@pytest.mark.parametrize("message", [StatusRequest(), Ping(b"s" * 16, 0.0, 0), Hello("pi-1", b"s" * 16, 1)])
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
        device.say(Enrol(b"k" * 32), b"more")
        device.ended()
    assert keys.allow_list().entries.keys() == {"owner"}


def test_a_token_counts_once(commands, keys):
    _, address = start_hub(commands, keys)
    token, first, second = issue(keys, address), KeyPair.make(), KeyPair.make()
    watched = zmq.EVENT_HANDSHAKE_SUCCEEDED
    with client(address, *temporary(token)) as one, client(address, *temporary(token), events=watched) as two:
        two.let_in()  # once the token is used, its temporary key lets nobody in
        one.say(Enrol(first.public))
        assert one.hear() == Enrolled("pi-1")
        two.say(Enrol(second.public))
        assert two.hear().code == "not_allowed"
    with client(address, *temporary(token)) as three:
        three.say(Enrol(second.public))
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
        device.say(Enrol(b"k" * 32))
        device.ended()
    assert denied(address, keys, "token") == {"token": 1}
    assert keys.allow_list().entries.keys() == {"owner"}


def test_a_token_takes_nobody_elses_key(commands, keys):
    _, address = start_hub(commands, keys)
    owner = keys.allow_list().entries["owner"].key
    token = issue(keys, address)
    for key in (owner, keys.pair().public):
        with client(address, *temporary(token)) as device:
            device.say(Enrol(key))
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
        device.say(Enrol(b"k" * 32))
        assert device.hear().code == "malformed"
    assert keys.allow_list().entries.keys() == {"owner", "pi-1"}


def test_an_agent_says_that_a_token_counts_no_more(commands, keys):
    _, address = start_hub(commands, keys)
    used, expired = issue(keys, address), issue(keys, address, name="pi-2", now_s=time.time() - 601)
    start_agent(commands, "--enrol", used.text()).wait_for("joined")
    for token, state in ((used, "other"), (expired, "third")):
        agent = start_agent(commands, "--enrol", token.text(), state=state)
        assert agent.wait() == ACCESS
        assert "was used before or has expired" in agent.stderr
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
    assert told.endswith(f"ask the hub's operator to run 'edgeasync keys accept {shown} pi-1'")
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


def some_key(number):
    return bytes([number + 1, 7]) * 16


def test_false_knocks_hide_no_honest_device(keys):
    """The address with most keys loses its oldest one, whether it knocked before or after the honest device."""
    for number in range(PENDING_MAX):
        keys.knock(some_key(number), "10.0.0.1", 100.0 + number)
    keys.knock(some_key(200), "10.0.0.2", 200.0)
    for number in range(PENDING_MAX, 2 * PENDING_MAX):
        keys.knock(some_key(number), "10.0.0.1", 300.0 + number)
    found = {one.key for one in keys.pending()}
    assert some_key(200) in found
    assert len(found) == PENDING_MAX
    assert found - {some_key(200)} == {some_key(number) for number in range(PENDING_MAX + 1, 2 * PENDING_MAX)}


def test_addresses_of_one_ipv6_network_count_as_one(keys):
    keys.knock(some_key(200), "2001:db8:1::5", 0.0)
    for number in range(PENDING_MAX):
        keys.knock(some_key(number), f"2001:db8:2::{number:x}", 100.0 + number)
    assert [one.key for one in keys.pending()][:2] == [some_key(200), some_key(1)]


def test_of_addresses_with_one_key_each_the_oldest_key_goes(keys):
    for number in range(PENDING_MAX + 1):
        keys.knock(some_key(number), f"10.0.1.{number}", 100.0 + number)
    keys.knock(some_key(1), "10.0.1.1", 500.0)
    keys.knock(some_key(200), "10.0.2.1", 501.0)
    assert {some_key(0), some_key(2)}.isdisjoint(one.key for one in keys.pending())
    assert {some_key(1), some_key(200)} <= {one.key for one in keys.pending()}


def test_who_was_refused_stays_so_and_takes_no_place(keys):
    refused = some_key(200)
    keys.knock(refused, "10.0.0.3", 100.0)
    keys.refuse(fingerprint(refused))
    keys.knock(refused, "10.0.0.3", 300.0)
    for number in range(PENDING_MAX):
        keys.knock(some_key(number), f"10.0.1.{number}", 300.0)
    pending = {one.key: one.refused for one in keys.pending()}
    assert pending == {refused: True} | {some_key(number): False for number in range(PENDING_MAX)}
    keys.knock(some_key(201), "10.0.0.2", 100.0 + PENDING_S + 250.0)
    assert [one.key for one in keys.pending()] == [some_key(201)], "who has not come for a day is forgotten"
    with pytest.raises(StorageError, match="no pending key has this fingerprint"):
        keys.accept("0000-0000-0000-0000-0000", "pi-1")


def test_the_list_of_who_knocked_can_be_cleared(commands, keys):
    for number in range(3):
        keys.knock(some_key(number), "10.0.0.1", time.time())
    keys.refuse(fingerprint(some_key(1)))
    told = commands.run("keys", "pending", "--clear", "--keys", keys.folder, "--json")
    assert (told.returncode, told.stdout) == (0, '{"cleared":2}\n')
    assert [(one.key, one.refused) for one in keys.pending()] == [(some_key(1), True)]


# -- clocks, weak keys, and secrets on a command line -------------------------------------------------------------


def test_a_hub_never_lets_a_token_in_again_that_it_saw_expire(keys):
    now_s, seen = [1000.0], []
    token = issue(keys, "tcp://127.0.0.1:1", now_s=1000.0)
    public = temporary(token)[0].public
    access = AllowListReader(keys, print, print, on_expired=lambda: seen.append(now_s[0]), now_s=lambda: now_s[0])
    assert access.lets_in(public, "10.0.0.1")
    now_s[0] += 601.0
    access.watch(Loop())
    now_s[0] -= 601.0
    assert not access.lets_in(public, "10.0.0.1")
    assert seen == [1601.0], "it is told once"
    keys.spend_expired(1601.0)
    assert not AllowListReader(keys, print, print, now_s=lambda: now_s[0]).lets_in(public, "10.0.0.1"), (
        "nor after a restart"
    )


class Loop:
    def call_later(self, *_):
        pass


def test_a_running_hub_records_a_token_that_expires(commands, keys):
    start_hub(commands, keys)
    keys.issue_token("pi-1", ("tcp://127.0.0.1:1",), time.time(), valid_s=0.3)
    until(lambda: [one for one in keys.tokens() if one.used], "the token is recorded as used")


@pytest.mark.parametrize("key", WEAK, ids=[key.hex()[:6] + key.hex()[-4:] for key in WEAK])
def test_keys_of_low_order_are_refused(commands, keys, key):
    token = issue(keys, "tcp://127.0.0.1:1")
    assert keys.use_token(temporary(token)[0].public, key, time.time()) is None
    keys.knock(key, "10.0.0.1", 0.0)
    assert keys.pending() == []
    with pytest.raises(ValueError, match="is weak"):
        read_key(key.hex())
    with pytest.raises(ConfigError, match="not a complete token"):
        Token.read(Token(b"s" * 32, key, "pi-1", ()).text())
    told = commands.run("keys", "enrol", "pi-1", "--key", key.hex(), "--keys", keys.folder)
    assert_told(told, CONFIG, "is weak")
    listed = AllowList(f"pi-1 device {key.hex()}\n")
    assert listed.entries == {}
    assert "is weak" in listed.trouble


def test_a_token_is_read_from_standard_input(commands, keys):
    _, address = start_hub(commands, keys)
    agent = start_agent(commands, "--enrol", "-")
    agent.tell(issue(keys, address).text())
    agent.wait_for("joined")


def test_standard_input_without_a_token_is_told(commands):
    done = commands.run("agent", "--data", commands.data("d.npz"), "--enrol", "-")
    assert_told(done, CONFIG, "standard input has no token")


def test_knocks_are_noted_now_and_then(keys):
    noted, now_s = [], [1000.0]
    access = AllowListReader(
        keys, print, print, on_knock=lambda key, address: noted.append(address), now_s=lambda: now_s[0]
    )
    for step in range(40):
        now_s[0] += 0.1
        assert not access.lets_in(bytes([step]) * 32, f"10.0.0.{step}")
    assert len(noted) <= 9


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes(commands, keys):
    data, token = commands.data("d.npz"), issue(keys, "tcp://127.0.0.1:1").text()
    agent = ("agent", "--data", data, "--state", commands.folder / "state")
    assert_told(commands.run(*agent, "--enrol", token[:-3]), CONFIG, "not a complete token")
    assert_told(commands.run(*agent, "--enrol", token, "--device-id", "pi-2"), CONFIG, "pi-1")
    assert_told(
        commands.run("keys", "enrol", "owner", "--address", "tcp://h:1", "--keys", keys.folder), FILES, "operator"
    )
    with pytest.raises(ConfigError, match="set state"):
        agent_parts(None, enrol=token)
