"""What every test has in common: how often chance is tried, and what becomes of tests that are skipped."""

import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.support import size


def pytest_addoption(parser):
    group = parser.getgroup("edgeasync")
    group.addoption(
        "--size",
        choices=size.Repetitions._fields,
        default="quick",
        help="how often tests repeat what they draw at random; those of Ray run at nightly alone",
    )
    group.addoption("--no-skips", action="store_true", help="fail if any test is skipped")


def pytest_configure(config):
    # The tests start hundreds of processes: each would compile the whole package again.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads spin while they wait for each other
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, what tests start would ignore it too
    size.choose(config.getoption("size"))
    settings.register_profile(
        "edgeasync",
        max_examples=size.repetitions("examples of a property"),
        derandomize=True,  # the same examples on every run
        deadline=None,  # no clock in the verdict
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],  # it measures time, and time depends on the machine
    )
    settings.load_profile("edgeasync")


def pytest_xdist_auto_num_workers():
    return len(os.sched_getaffinity(0)) + 1  # tests of processes often wait


def pytest_collection_finish(session):
    gc.freeze()  # thousands of tests live to the end: no need to look for garbage among them


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and session.config.getoption("no_skips") and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    skipped = len(terminalreporter.stats.get("skipped", ()))
    if skipped and config.getoption("no_skips"):
        terminalreporter.write_line(f"--no-skips: {skipped} skipped, so this run has failed", red=True)
    terminalreporter.write_line(f"--size {config.getoption('size')}: {size.repeated()}")
