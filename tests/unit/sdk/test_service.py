"""What runs until it ends: a start that comes to nothing leaves nothing running."""

import asyncio
import threading

import pytest

from edgeasync.sdk.service import Service


class Endless(Service):
    """Is never ready, and ends when it is asked to."""

    def __init__(self):
        super().__init__()
        self._asked = asyncio.Event()

    async def _serve(self):
        if not self._stopping:
            await self._asked.wait()
        return "stopped"

    def _request_stop(self):
        self._asked.set()


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_start_that_is_interrupted_ends_what_it_began(monkeypatch):
    service, before = Endless(), threading.active_count()
    monkeypatch.setattr(service._ready, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        service.start()
    assert threading.active_count() == before
    assert service.wait(0) == "stopped"


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_ends_what_it_began():
    service = Endless()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), service:
            pass
    assert await asyncio.to_thread(service.wait, 0) == "stopped"
