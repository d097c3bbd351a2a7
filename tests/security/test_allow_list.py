"""The allow-list: people may edit it, and an invalid line is an error."""

import pytest

from edgeasync.durable.allow_list import Allowed, AllowList
from edgeasync.errors import StorageError

KEYS = [bytes([number]) * 32 for number in range(1, 5)]


def test_others_may_read_the_allow_list_but_not_write_it(keys):
    keys.allow_list_file.chmod(0o644)
    assert "owner" in keys.allow_list().entries
    keys.allow_list_file.chmod(0o664)
    with pytest.raises(StorageError, match="other users may have changed it"):
        keys.allow_list()


def test_a_persons_own_words_survive_every_edit():
    text = f"# ours\n\n  pi-1 device   {KEYS[0].hex()}  # in the hall\npi-2\tdevice {KEYS[1].hex()}"
    listed = AllowList(text).with_entry(Allowed("pi-3", "device", KEYS[2])).revoking("pi-1")
    assert listed.text.startswith("# ours\n\n")
    assert "# in the hall" in listed.text
    assert listed.entries == {
        "pi-1": Allowed("pi-1", "revoked", KEYS[0]),
        "pi-2": Allowed("pi-2", "device", KEYS[1]),
        "pi-3": Allowed("pi-3", "device", KEYS[2]),
    }


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (f"pi-2 device {KEYS[1].hex()} and more", "NAME ROLE KEY"),
        ("pi-2 device", "NAME ROLE KEY"),
        (f"pi-2 king {KEYS[1].hex()}", "role"),
        (f"pi-2 device {KEYS[1].hex()[:-1]}", "64 hexadecimal"),
        (f"pi/2 device {KEYS[1].hex()}", "name"),
        (f"{'x' * 65} device {KEYS[1].hex()}", "name"),
        (f"pi-1 device {KEYS[1].hex()}", "already used in line 1"),
        (f"pi-2 device {KEYS[0].hex()}", "belongs to pi-1"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, hint):
    listed = AllowList(f"pi-1 device {KEYS[0].hex()}\n{line}\n")
    assert listed.entries.keys() == {"pi-1"}
    assert listed.unreadable.keys() == {2}
    assert hint in listed.trouble


def test_a_key_has_one_name():
    listed = AllowList("").with_entry(Allowed("pi-1", "device", KEYS[0]))
    with pytest.raises(StorageError, match="belongs to pi-1"):
        listed.with_entry(Allowed("pi-2", "device", KEYS[0]))
