"""Options, and what a run leaves out. tests/README.md explains the sizes."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import size

EVERYTHING = ".venv/bin/pip install -e '.[dev,oracle]' && .venv/bin/python -m pytest --size gate"
LONG = pytest.StashKey[int]()
"""How many tests were left out because they are marked `gate`."""


def pytest_addoption(parser):
    group = parser.getgroup("edgeasync")
    group.addoption(
        "--size",
        choices=size.Repetitions._fields,
        default="quick",
        help="which tests run if no path is given, and how many random examples they draw [default: quick]",
    )
    group.addoption("--no-skips", action="store_true", help="fail if any test is skipped")


def pytest_configure(config):
    # The tests start hundreds of processes: each would compile the whole package again.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads spin while they wait for each other
    # Tests send these signals to processes that inherit what is ignored here: nohup ignores SIGHUP, and a shell
    # ignores SIGINT in background jobs.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = config.getoption("size")
    if chosen != "quick" and config.args_source is config.ArgsSource.TESTPATHS:
        config.args = ["tests"]
    size.choose(chosen)
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


def pytest_collection_modifyitems(config, items):
    """At the size `quick`, leave out tests that are marked `gate`, unless their file is named."""
    if config.getoption("size") != "quick":
        return
    begin = config.invocation_params.dir
    named = {(begin / argument.partition("::")[0]).resolve() for argument in config.args}
    long = [item for item in items if item.get_closest_marker("gate") and item.path not in named]
    if long:
        config.hook.pytest_deselected(items=long)
        config.stash[LONG] = len(long)
        names = {item.nodeid for item in long}
        items[:] = [item for item in items if item.nodeid not in names]


def pytest_collection_finish(session):
    gc.freeze()  # thousands of tests live to the end: no need to look for garbage among them


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Fail for skipped tests if that was asked for; as the last line, say what was left out."""
    config = session.config
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist
        config.workeroutput["long"] = config.stash.get(LONG, 0)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", ())) if reporter else 0
    if forbidden := skipped and config.getoption("no_skips"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    yield
    if reporter and forbidden:
        reporter.write_line(f"--no-skips: {skipped} skipped, so this run has failed", red=True)
    if reporter and (line := left_out(config)):
        reporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Record how many tests a pytest-xdist worker left out. Every worker collects all tests."""
    node.config.stash[LONG] = getattr(node, "workeroutput", {}).get("long", 0)


def left_out(config):
    """Return a line that names what this run left out and how to run it, or an empty one."""
    chosen = config.getoption("size")
    if chosen != "quick":
        never = size.never_at(chosen)
        return f"left out, run by --size nightly: {', '.join(never)}" if never else ""
    long = config.stash.get(LONG, 0)
    if config.args_source is not config.ArgsSource.TESTPATHS:
        return f"left out: {long} tests marked 'gate'; run them: --size gate" if long else ""
    tests = Path(__file__).parent
    run = {Path(path).parts[1] for path in config.getini("testpaths")} - {"integration"}
    folders = sorted(path.name for path in tests.iterdir() if [*path.glob("test_*.py")] and path.name not in run)
    return (
        f"left out: {', '.join(folders)} and {long} tests marked 'gate' (tests/README.md); run them: {EVERYTHING}"
    )
