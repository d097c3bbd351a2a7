"""Commands that the fork server starts: they end as children of the tests would."""

import signal

import psutil

from tests.support.programs.processes import until


def test_the_pid_of_a_command_that_has_ended_is_kept_until_its_exit_code_is_read(commands):
    command = commands.start("keys", "--help")
    process = psutil.Process(command.pid)
    until(lambda: process.status() == psutil.STATUS_ZOMBIE, "the end")
    command.kill()
    until(lambda: not process.is_running(), "the pid's end")
    assert command.wait() == 0


def test_a_command_that_is_killed_ends_with_the_signal(commands):
    hub, _ = commands.hub(commands.settings())
    hub.signal(signal.SIGKILL)
    assert hub.wait() == -signal.SIGKILL
