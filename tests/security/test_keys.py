"""Key files, the allow-list, tokens, and the command `keys`."""

import json
import os
import stat

import pytest

from edgeasync.durable.allow_list import Allowed
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import TOKEN_S, HubKeys, KeyPair, Token, fingerprint, operator_keys
from edgeasync.errors import ConfigError, StorageError
from tests.support.programs.command_line import ADDRESS as ADDRESS_WRONG
from tests.support.programs.command_line import CONFIG, FILES, assert_told, run_command

KEYS = [bytes([number]) * 32 for number in range(1, 5)]
ADDRESS = ("tcp://127.0.0.1:5555",)


def run_json(folder, *arguments):
    told = run_command(folder, *arguments, "--json")
    assert told.returncode == 0, told
    return [json.loads(line) for line in told.stdout.splitlines()]


# -- files of secrets ---------------------------------------------------------------------------------------------


def test_only_their_owner_can_read_what_is_made(tmp_path):
    old = os.umask(0)
    try:
        keys = HubKeys.init(tmp_path / "keys")
        keys.issue_token("pi-1", ADDRESS, 0.0)
        keys.remember_addresses(ADDRESS)
        keys.make_operator("anna")
        DeviceKeys(tmp_path / "state").own()
    finally:
        os.umask(old)
    for path in [*(tmp_path / "keys").rglob("*"), tmp_path / "keys", *(tmp_path / "state" / "keys").rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_folder_that_others_can_enter_is_refused(keys):
    keys.folder.chmod(0o750)
    with pytest.raises(StorageError, match="chmod 700"):
        keys.pair()


@pytest.mark.parametrize("read", [lambda folder: HubKeys(folder).pair(), operator_keys])
def test_a_folder_that_is_only_read_is_not_made(tmp_path, read):
    with pytest.raises(StorageError, match=r"wrong: no such folder; .*'edgeasync keys init', or set the right"):
        read(tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_keys_are_made_once(keys):
    public = keys.pair().public
    with pytest.raises(StorageError, match="already"):
        HubKeys.init(keys.folder)
    assert keys.pair().public == public


def test_no_secret_is_shown():
    pair = KeyPair.make()
    token = Token(pair.secret, KEYS[0], "pi-1", ADDRESS)
    for text in (repr(pair), str(pair), repr(token), f"{token}"):
        assert pair.secret.hex() not in text
        assert repr(pair.secret)[2:-1] not in text
        assert token.text() not in text


def test_an_operators_keys_lead_to_the_hub(keys):
    pair, hub = operator_keys(keys.folder)
    assert hub == keys.pair().public
    assert keys.allow_list().by_key()[pair.public].role == "operator"
    pair, hub = operator_keys(keys.make_operator("anna"))
    assert hub == keys.pair().public
    assert keys.allow_list().by_key()[pair.public] == Allowed("anna", "operator", pair.public)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda keys: keys.allow("owner", "device", KEYS[1]), "owner is an operator; revoke it first, or choose"),
        (lambda keys: keys.accept(fingerprint(KEYS[1]), "owner"), "owner is an operator"),
        (lambda keys: keys.issue_token("owner", ADDRESS, 0.0), "owner is an operator"),
        (lambda keys: keys.allow("pi-1", "operator", KEYS[1]), "pi-1 is a device; revoke it first, or choose"),
        (lambda keys: keys.make_operator("pi-1"), "pi-1 is a device"),
    ],
    ids=["a key", "a knock", "a token", "an operator's key", "an operator"],
)
def test_a_name_keeps_its_role_until_it_is_revoked(keys, change, hint):
    """Else a slip takes the key of a device that works, or of the operator."""
    keys.allow("pi-1", "device", KEYS[0])
    keys.knock(KEYS[1], "192.0.2.1", 0.0)
    before = keys.allow_list_file.read_bytes()
    with pytest.raises(StorageError, match=hint):
        change(keys)
    assert keys.allow_list_file.read_bytes() == before
    assert not (keys.folder / "operators").exists()
    assert [one.key for one in keys.pending()] == [KEYS[1]]
    keys.revoke("owner")
    keys.revoke("pi-1")
    change(keys)


@pytest.mark.parametrize("name", ["anna", "owner"])
@pytest.mark.parametrize("fails", ["the list", "the folder"])
def test_a_new_key_for_an_operator_that_cannot_be_written_leaves_the_old_one_in_force(
    keys, name, fails, monkeypatch
):
    folder = keys.make_operator(name)
    before, files = operator_keys(folder), sorted(folder.iterdir())
    if fails == "the list":

        def full(*_):
            raise StorageError("the disk is full")

        monkeypatch.setattr(keys, "_write", full)
    else:
        folder.chmod(0o755)
    with pytest.raises(StorageError, match="full" if fails == "the list" else "755"):
        keys.make_operator(name)
    folder.chmod(0o700)
    assert operator_keys(folder) == before
    assert keys.allow_list().entries[name] == Allowed(name, "operator", before[0].public)
    assert sorted(folder.iterdir()) == files


def test_a_token_makes_no_device_of_an_operator(keys):
    token = KeyPair.of(keys.issue_token("anna", ADDRESS, 0.0).secret).public
    pair, _ = operator_keys(keys.make_operator("anna"))
    assert keys.use_token(token, KEYS[0], 1.0) is None
    assert keys.allow_list().entries["anna"] == Allowed("anna", "operator", pair.public)


def test_a_new_key_for_the_owner_lies_where_the_old_one_lay(keys):
    before, _ = operator_keys(keys.folder)
    assert keys.make_operator("owner") == keys.folder
    pair, hub = operator_keys(keys.folder)
    assert pair.public != before.public
    assert hub == keys.pair().public
    assert keys.allow_list().entries["owner"] == Allowed("owner", "operator", pair.public)


# -- tokens -------------------------------------------------------------------------------------------------------


def test_a_token_comes_back_from_its_text(keys):
    token = keys.issue_token("pi-1", ADDRESS, 0.0)
    assert Token.read(f" {token.text()}\n") == token
    assert token.hub == keys.pair().public
    assert (token.name, token.addresses) == ("pi-1", ADDRESS)
    assert token.text().replace("_", "").replace("-", "").isalnum()


def test_a_token_that_was_not_copied_whole_is_told_without_being_quoted(keys):
    text = keys.issue_token("pi-1", ADDRESS, 0.0).text()
    for wrong in ("", "x", text[:-1], text[:-2] + "AA", text[3:], text + "A", text.swapcase()):
        with pytest.raises(ConfigError) as told:
            Token.read(wrong)
        assert len(wrong) < 8 or wrong not in str(told.value)


def test_a_token_counts_once(keys):
    token = KeyPair.of(keys.issue_token("pi-1", ADDRESS, 100.0).secret).public
    assert keys.use_token(token, KEYS[0], 100.0 + TOKEN_S) == "pi-1"
    assert keys.allow_list().by_key()[KEYS[0]] == Allowed("pi-1", "device", KEYS[0])
    assert keys.use_token(token, KEYS[1], 101.0) is None
    assert KEYS[1] not in keys.allow_list().by_key()


def test_a_token_that_has_expired_counts_no_more(keys):
    token = KeyPair.of(keys.issue_token("pi-1", ADDRESS, 100.0).secret).public
    assert keys.use_token(token, KEYS[0], 100.1 + TOKEN_S) is None
    assert keys.use_token(token, KEYS[0], 100.0) is None, "a clock that goes back does not change that"
    assert keys.allow_list().entries.keys() == {"owner"}


def test_a_token_for_a_card_counts_for_as_long_as_it_says(keys):
    day_s = 86_400.0
    first, late = (keys.issue_token("pi-1", ADDRESS, 0.0, valid_s=day_s) for _ in range(2))
    keys.issue_token("pi-2", ADDRESS, day_s)
    assert keys.use_token(KeyPair.of(first.secret).public, KEYS[0], day_s) == "pi-1"
    assert keys.use_token(KeyPair.of(late.secret).public, KEYS[1], day_s + 0.1) is None
    told = run_json(keys.folder.parent, "keys", "enrol", "pi-3", "--keys", keys.folder, "--address", *ADDRESS,
                    "--valid-hours", "24")  # fmt: skip
    assert told[0]["expires_s"] == day_s
    for hours in ("0", "-1", "169", "nan"):
        told = run_command(
            keys.folder,
            "keys",
            "enrol",
            "pi-4",
            "--keys",
            keys.folder,
            "--valid-hours",
            hours,
            *["--address", *ADDRESS],
        )
        assert_told(told, CONFIG, "at most 168")


def test_a_name_that_is_shut_out_has_no_token_left(keys):
    """Else a token that lies on a lost card would let its finder in under the name of the board that was lost."""
    keys.allow("pi-1", "device", KEYS[0])
    tokens = {name: KeyPair.of(keys.issue_token(name, ADDRESS, 0.0).secret).public for name in ("pi-1", "pi-2")}
    assert keys.revoke("pi-1") == 1
    assert keys.use_token(tokens["pi-1"], KEYS[1], 1.0) is None
    assert keys.allow_list().entries["pi-1"].role == "revoked"
    told = run_command(keys.folder, "keys", "revoke", "pi-2", "--keys", keys.folder)
    assert (told.returncode, told.stdout) == (0, "pi-2: its token is revoked\n")
    assert keys.use_token(tokens["pi-2"], KEYS[1], 1.0) is None
    with pytest.raises(StorageError, match="pi-2 is not in the allow-list"):
        keys.revoke("pi-2")


def test_by_a_token_no_other_key_is_taken(keys):
    """A key that has a name, the hub's own, or a token's cannot be brought by a token."""
    token = KeyPair.of(keys.issue_token("pi-1", ADDRESS, 0.0).secret).public
    owner = keys.allow_list().entries["owner"].key
    for key in (owner, keys.pair().public, token):
        assert keys.use_token(token, key, 1.0) is None
    assert keys.use_token(token, KEYS[0], 1.0) == "pi-1"


def test_the_hub_keeps_no_secret_of_a_token(keys):
    token = keys.issue_token("pi-1", ADDRESS, 0.0)
    kept = b"".join(path.read_bytes() for path in keys.folder.iterdir())
    assert token.secret not in kept
    assert token.secret.hex().encode() not in kept


def test_a_token_gives_a_name_another_key(keys):
    keys.allow("pi-1", "device", KEYS[0])
    token = KeyPair.of(keys.issue_token("pi-1", ADDRESS, 0.0).secret).public
    assert KEYS[0] in keys.allow_list().by_key()
    assert keys.use_token(token, KEYS[1], 1.0) == "pi-1"
    assert keys.allow_list().entries["pi-1"].key == KEYS[1]
    assert KEYS[0] not in keys.allow_list().by_key()


def test_fingerprints_differ_and_can_be_read_aloud():
    assert len({fingerprint(key) for key in KEYS}) == len(KEYS)
    assert all(len(part) == 4 for part in fingerprint(KEYS[0]).split("-"))


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_from_init_to_revoke(tmp_path):
    flags = ("--keys", tmp_path / "keys")
    (made,) = run_json(tmp_path, "keys", "init", *flags, "--address", "tcp://hub.example:5555")
    assert HubKeys(tmp_path / "keys").pair().public.hex() == made["hub_key"]
    (issued,) = run_json(tmp_path, "keys", "enrol", "pi-1", *flags)
    token = Token.read(issued["token"])
    assert (token.name, token.addresses) == ("pi-1", ("tcp://hub.example:5555",))
    (entry,) = run_json(tmp_path, "keys", "enrol", "pi-2", "--key", KEYS[0].hex(), *flags)
    assert (entry["name"], entry["role"], entry["fingerprint"]) == ("pi-2", "device", fingerprint(KEYS[0]))
    listed = {line["name"]: line["role"] for line in run_json(tmp_path, "keys", "list", *flags)}
    assert listed == {"owner": "operator", "pi-2": "device", "pi-1": "token"}
    run_json(tmp_path, "keys", "revoke", "pi-2", *flags)
    assert HubKeys(tmp_path / "keys").allow_list().entries["pi-2"].role == "revoked"


def test_what_people_see_has_the_token_on_a_line_of_its_own(tmp_path):
    run_command(tmp_path, "keys", "init", "--address", "tcp://hub.example:5555")
    first, second = run_command(tmp_path, "keys", "enrol", "pi-1").stdout.splitlines()
    assert Token.read(first).name == "pi-1"
    assert "edgeasync agent (or peer) --enrol" in second


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("enrol", "pi-1"), CONFIG, "--address"),
        (("enrol", "pi/1"), CONFIG, "invalid name"),
        (("enrol", "pi-1", "--key", "abc"), CONFIG, "64 hexadecimal"),
        (("enrol", "pi-1", "--role", "king"), CONFIG, "device, operator"),
        (
            ("enrol", "pi-1", "--key", "2a" * 32, "--valid-hours", "24"),
            CONFIG,
            "--valid-hours applies to tokens only",
        ),
        (
            ("enrol", "anna", "--role", "operator", "--valid-hours", "24"),
            CONFIG,
            "--valid-hours applies to tokens only",
        ),
        (("enrol", "pi-1", "--key", "2a" * 32, "--address", "here"), ADDRESS_WRONG, "'here' is not an address"),
        (("enrol", "anna", "--role", "operator", "--address", "here"), ADDRESS_WRONG, "is not an address"),
        (("enrol", "pi-1", "--address", "tcp://a b:5"), ADDRESS_WRONG, "'tcp://a b:5' is not an address"),
        (("revoke", "pi-1"), FILES, "not in the allow-list"),
        (("init",), FILES, "already"),
    ],
)
def test_mistakes(tmp_path, arguments, code, hint):
    run_command(tmp_path, "keys", "init")
    assert_told(run_command(tmp_path, "keys", *arguments), code, hint)


@pytest.mark.parametrize("flags", [("--key", KEYS[0].hex()), ("--role", "operator"), ()])
def test_whatever_is_enrolled_the_addresses_are_remembered(keys, flags):
    told = run_json(
        keys.folder.parent, "keys", "enrol", "pi-1", *flags, "--keys", keys.folder, "--address", *ADDRESS
    )
    assert told[0]["name"] == "pi-1"
    assert keys.addresses() == ADDRESS


@pytest.mark.parametrize("arguments", [("pi-1", "--key", "zzz"), ("owner",), ("owner", "--key", KEYS[0].hex())])
def test_an_enrolment_that_is_refused_remembers_no_address(keys, arguments):
    keys.remember_addresses(ADDRESS)
    told = run_command(
        keys.folder.parent, "keys", "enrol", *arguments, "--keys", keys.folder, "--address", "tcp://other:2"
    )
    assert told.returncode
    assert keys.addresses() == ADDRESS


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "enrol", "pi-1", "--address", "tcp://h:1"),
        ("keys", "pending"),
        ("keys", "revoke", "pi-1"),
        ("status", "--keys", "keys"),
    ],
)
def test_without_keys_the_command_says_how_to_make_them(tmp_path, arguments):
    (tmp_path / "keys").mkdir(mode=0o700)
    assert_told(run_command(tmp_path, *arguments), FILES, "keys init")


def test_while_a_line_is_broken_nobody_new_is_let_in(tmp_path):
    run_command(tmp_path, "keys", "init")
    keys = HubKeys(tmp_path / ".config/edgeasync/keys")
    with keys.allow_list_file.open("a") as file:
        file.write("pi-9 device\n")
    before = keys.allow_list_file.read_bytes()
    for arguments in (("enrol", "pi-1", "--key", KEYS[0].hex()), ("list",)):
        assert_told(run_command(tmp_path, "keys", *arguments), FILES, "line 4")
    assert keys.allow_list_file.read_bytes() == before


def test_a_broken_line_stops_no_revocation(tmp_path):
    run_command(tmp_path, "keys", "init")
    keys = HubKeys(tmp_path / ".config/edgeasync/keys")
    keys.allow("pi-1", "device", KEYS[0])
    with keys.allow_list_file.open("ab") as file:
        file.write(b"pi-9 device\npi-1 device twice\npi-8 device # k\xfcche\n")
    assert run_command(tmp_path, "keys", "revoke", "pi-1").returncode == 0
    listed = keys.read_allow_list()
    assert listed.entries["pi-1"].role == "revoked"
    assert listed.unreadable.keys() == {5, 7}
    told = run_command(tmp_path, "keys", "revoke", "pi-9")
    assert (told.returncode, "now a comment" in told.stdout) == (0, True)
    assert keys.read_allow_list().unreadable.keys() == {7}
    assert keys.allow_list_file.read_bytes().endswith(
        b"# pi-9 device\n# pi-1 device twice\npi-8 device # k\xfcche\n"
    )
    assert_told(run_command(tmp_path, "keys", "revoke", "pi-7"), FILES, "line 7")
