"""The driver runs an engine's actions in order, and its ticks when they are due."""

import asyncio
import time

import pytest

from edgeasync.host.completion import Completion
from edgeasync.runtime.engine_driver import EngineDriver
from tests.support.programs.processes import PATIENCE_S

pytestmark = pytest.mark.asyncio


class Engine:
    """Does what it is told, and notes it."""

    def __init__(self):
        self.done, self.due_s, self.errors = [], None, []
        self.ending = Completion("Test")
        self.driver = EngineDriver(self.ending, self.tick, lambda: self.due_s, self.errors.append)
        self.ticked = asyncio.Event()
        self.ending.begin()
        self.driver.begin()

    def tick(self):
        self.done.append("tick")
        self.due_s = None
        self.ticked.set()


async def test_what_an_action_hands_over_runs_after_it_and_before_the_loop_goes_on():
    engine = Engine()

    def first():
        engine.driver.do_next(lambda: engine.done.append("second"))
        engine.done.append("first")

    engine.driver.do(first)
    assert engine.done == ["first", "second"]


async def test_an_error_is_told_and_ends_nothing_else():
    engine = Engine()

    def first():
        engine.driver.do_next(lambda: engine.done.append("second"))
        raise ZeroDivisionError

    engine.driver.do(first)
    assert [type(error) for error in engine.errors] == [ZeroDivisionError]
    assert engine.done == ["second"]


async def test_nothing_runs_after_the_end():
    engine = Engine()

    def first():
        engine.driver.do_next(lambda: engine.done.append("second"))
        engine.ending.reach("stopped")

    engine.driver.do(first)
    engine.driver.do(lambda: engine.done.append("third"))
    assert engine.done == []


async def test_a_thread_hands_over_and_an_idle_loop_runs_it():
    engine, ran = Engine(), asyncio.Event()
    await asyncio.to_thread(engine.driver.do_next, ran.set)
    async with asyncio.timeout(PATIENCE_S):
        await ran.wait()


async def test_a_deadline_that_moves_to_a_later_time_causes_no_tick_before_it():
    engine = Engine()
    engine.due_s = time.monotonic()
    engine.driver.do(lambda: None)
    engine.due_s = due_s = time.monotonic() + 0.05
    engine.driver.do(lambda: None)
    async with asyncio.timeout(PATIENCE_S):
        await engine.ticked.wait()
    assert time.monotonic() >= due_s
    assert engine.done == ["tick"]


async def test_a_deadline_that_moves_to_an_earlier_time_is_kept():
    engine = Engine()
    engine.due_s = time.monotonic() + 3600.0
    engine.driver.do(lambda: None)
    engine.due_s = time.monotonic()
    engine.driver.do(lambda: None)
    async with asyncio.timeout(PATIENCE_S):
        await engine.ticked.wait()


async def test_without_a_deadline_there_is_no_timer():
    engine = Engine()
    engine.due_s = time.monotonic()
    engine.driver.do(lambda: None)
    engine.due_s = None
    engine.driver.do(lambda: None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.done == []
