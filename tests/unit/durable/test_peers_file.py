"""The file of peers: what is wrong with one is said, with what to do."""

import pytest

from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, own_entry, read_first_peers, read_peers
from edgeasync.errors import ConfigError

KEYS = [KeyPair.make().public for _ in range(2)]


def entry(number=0, **changed):
    fields = {"name": f"pi-{number}", "address": f"tcp://10.0.0.{number}:5600", "key": KEYS[number].hex()}
    return PeerEntry(**(fields | changed)).text()


def written(tmp_path, *entries):
    path = tmp_path / "peers.toml"
    path.write_text(f"peer = [{', '.join(entries)}]")
    return path


def test_an_entry_is_read_as_it_is_printed(tmp_path):
    path = written(tmp_path, entry(0), entry(1))
    peers = read_peers(path)
    assert own_entry(path, peers, "pi-1", KEYS[1]).address == "tcp://10.0.0.1:5600"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry(0), entry(1, name="pi-0")], "duplicate name pi-0"),
        ([entry(0), entry(1, key=KEYS[0].hex())], "duplicate key"),
        ([entry(0), entry(1, address="tcp://10.0.0.0:5600")], "duplicate address"),
        ([entry(0).replace(KEYS[0].hex(), "00")], "64 hexadecimal digits"),
        ([entry(0).replace("pi-0", "../pi")], "peer"),
        ([entry(0).replace("key", "keys")], "keys"),
        (["{name = "], "not valid TOML"),
        ([entry(0).replace("pi-0", f"pi-{n}").replace("0.0:5", f"0.{n}:5") for n in range(65)], "64|duplicate"),
    ],
)
def test_mistakes(tmp_path, entries, said):
    with pytest.raises(ConfigError, match=said):
        read_peers(written(tmp_path, *entries))


def test_a_device_that_is_not_there_is_told_what_to_write(tmp_path):
    path = written(tmp_path, entry(0))
    peers = read_peers(path)
    with pytest.raises(ConfigError, match=f'{{name = "pi-1", .*{KEYS[1].hex()}'):
        own_entry(path, peers, "pi-1", KEYS[1])
    with pytest.raises(ConfigError, match=f"differs from this device's key; .*{KEYS[1].hex()}"):
        own_entry(path, peers, "pi-0", KEYS[1])


def test_a_device_without_a_file_is_told_what_to_write_into_one(tmp_path):
    path = tmp_path / "peers.toml"
    with pytest.raises(
        ConfigError, match="no such file; create it with the same content on every device: "
    ) as told:
        read_first_peers(path, "pi-1", KEYS[1])
    path.write_text(str(told.value).partition("every device: ")[2])
    assert own_entry(path, read_first_peers(path, "pi-1", KEYS[1]), "pi-1", KEYS[1]).name == "pi-1"
