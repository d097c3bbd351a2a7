"""How a hub or an agent ends: the first reason wins, and every error can be raised by a task."""

import asyncio

import pytest

from edgeasync.errors import EdgeAsyncError
from edgeasync.host.completion import Completion

pytestmark = pytest.mark.asyncio


def nothing():
    pass


async def test_the_first_reason_or_error_counts():
    ending = Completion("Hub")
    assert not ending.begun
    ending.begin()
    assert ending.begun
    assert not ending.reached
    ending.reach("finished")
    ending.reach("stopped")
    ending.fail(OSError("too late"))
    assert await ending.wait(nothing) == "finished"
    failed = Completion("Agent")
    failed.begin()
    failed.fail(OSError("first"))
    failed.reach("finished")
    with pytest.raises(OSError, match="first"):
        await failed.wait(nothing)


async def test_it_begins_once():
    ending = Completion("Hub")
    ending.begin()
    with pytest.raises(EdgeAsyncError, match=r"Hub.run\(\) was called before; create another Hub"):
        ending.begin()


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
async def test_an_error_that_a_task_cannot_raise_is_wrapped(error):
    ending = Completion("Hub")
    ending.begin()
    ending.fail(error)
    with pytest.raises(EdgeAsyncError, match=f"raised {type(error).__name__}") as caught:
        await ending.wait(nothing)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [None, OSError("disk")])
async def test_who_is_cancelled_hurries_and_waits_for_the_end(error):
    ending, hurried = Completion("Hub"), []
    ending.begin()
    waiting = asyncio.ensure_future(ending.wait(lambda: hurried.append(True)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert (hurried, waiting.done()) == ([True], False)
    if error is None:
        ending.reach("stopped")
    else:
        ending.fail(error)
    with pytest.raises(asyncio.CancelledError) as caught:
        await waiting
    assert caught.value.__cause__ is error


async def test_who_is_cancelled_twice_waits_for_nothing():
    ending = Completion("Hub")
    ending.begin()
    waiting = asyncio.ensure_future(ending.wait(nothing))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ending.reached
