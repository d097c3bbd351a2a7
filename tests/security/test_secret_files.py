"""Files of secrets: permissions, symlinks and overwriting."""

import os

import pytest

from edgeasync.durable.keys import HubKeys
from edgeasync.durable.secret_files import read_secret, write_secret
from edgeasync.errors import StorageError
from tests.support.programs.command_line import FILES, assert_told, run_command

KEYS = [bytes([number]) * 32 for number in range(1, 5)]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_that_others_can_touch_is_refused(keys, mode):
    (keys.folder / "hub.key").chmod(mode)
    with pytest.raises(StorageError, match=r"hub\.key: other users may have read it"):
        keys.pair()


def test_links_are_never_followed(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    target.chmod(0o600)
    (tmp_path / "secret").symlink_to(target)
    with pytest.raises(StorageError, match="not a regular file; replace it"):
        read_secret(tmp_path / "secret")
    with pytest.raises(StorageError):
        write_secret(tmp_path / "secret", b"new")
    write_secret(tmp_path / "secret", b"new", replace=True)
    assert target.read_bytes() == b"mine"
    assert not (tmp_path / "secret").is_symlink()
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="link"):
        HubKeys.init(tmp_path / "folder")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_a_secrets_place_is_refused(tmp_path, make):
    make(tmp_path / "secret", 0o700)
    with pytest.raises(StorageError, match="not a regular file; replace it"):
        read_secret(tmp_path / "secret")


def test_a_secret_is_not_written_over_another(tmp_path):
    write_secret(tmp_path / "secret", b"first")
    with pytest.raises(StorageError, match="it was not changed"):
        write_secret(tmp_path / "secret", b"second")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert read_secret(tmp_path / "secret") == b"first"


@pytest.mark.parametrize("time_s", ["nan", "inf", "-inf", "1e400", "1e30", "-1"])
@pytest.mark.parametrize(("file", "command"), [("pending", "pending"), ("tokens", "list")])
def test_a_time_that_is_none_is_damage(keys, file, command, time_s):
    write_secret(keys.folder / file, f"{KEYS[0].hex()} pi-1 {time_s} new\n".encode())
    for flags in ((), ("--json",)):
        told = run_command(keys.folder, "keys", command, "--keys", keys.folder, *flags)
        assert_told(told, FILES, f"{file}: damaged; delete it")
