"""Commands to systemd, and errors if it fails or is missing."""

import pytest

from edgeasync.errors import StorageError
from edgeasync.ops.service import systemd
from edgeasync.ops.service.systemd import Systemd, wait_until

FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> asked
case "$*" in
*show*) printf 'ActiveState=active\\nStatusText=joined tcp://hub:5555: a = b\\n' ;;
*stop*refused* | *restart*refused*) echo "Access
denied" >&2; exit 4 ;;
*silent* | *reset-failed*) exit 3 ;;
esac
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Put commands that note what they are asked in place of systemd's; return a function that tells it."""
    for name in ("systemctl", "systemd-sysusers", "userdel"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    return lambda: (tmp_path / "asked").read_text().splitlines()


@pytest.mark.parametrize(("of_user", "systemctl"), [(False, "systemctl"), (True, "systemctl --user")])
def test_what_systemd_is_asked(asked, of_user, systemctl):
    manager = Systemd(of_user=of_user)
    manager.reload()
    manager.start("a.service")
    manager.stop("a.service")
    manager.make_user()
    assert asked() == [
        f"{systemctl} daemon-reload",
        f"{systemctl} restart --no-block a.service",
        f"{systemctl} stop a.service",
        f"{systemctl} reset-failed a.service",
        "systemd-sysusers ",
    ]


def test_a_state_is_read_line_by_line(asked):
    assert Systemd(of_user=False).status("a.service") == {
        "ActiveState": "active",
        "StatusText": "joined tcp://hub:5555: a = b",
    }


def test_a_refusal_is_one_line_and_what_is_not_there_to_remove_is_no_error(asked):
    manager = Systemd(of_user=False)
    with pytest.raises(
        StorageError, match=r"^systemctl stop refused.service: Access denied; check that systemd runs"
    ):
        manager.stop("refused.service")
    with pytest.raises(StorageError, match=r"restart --no-block silent.service: exit code 3;"):
        manager.start("silent.service")
    manager.remove_user("silent")


def test_a_machine_without_systemd_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StorageError, match="needs systemd, so start the program by hand"):
        Systemd(of_user=False).reload()


def test_a_wait_has_an_end(monkeypatch):
    monkeypatch.setattr(systemd, "ASK_S", 0.0)
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 60.0)
    assert not wait_until(lambda: False, 0.0)
