"""Callbacks: which are accepted, and which events are dropped while they are busy."""

import threading

import numpy as np
import pytest

from edgeasync import Agent, callbacks
from edgeasync.callbacks import SaveBest
from edgeasync.errors import ConfigError
from edgeasync.sdk.callbacks import Callbacks
from tests.support.parts.events import best
from tests.support.programs.processes import PATIENCE_S


def test_an_agent_refuses_what_never_happens_there():
    with pytest.raises(ConfigError, match="the callback SaveBest has none of these methods"):
        Agent("tcp://127.0.0.1:5555", (np.eye(2), [0, 1]), callbacks=[SaveBest("best")])
    with pytest.raises(
        ConfigError, match=r"the callback SaveBest is a class; pass an instance: SaveBest\(\.\.\.\)"
    ):
        Callbacks([SaveBest])


@pytest.mark.asyncio
async def test_of_best_models_that_wait_only_the_newest_is_told():
    told, both_wait = [], threading.Event()

    class Watch:
        def on_join(self, _):
            both_wait.wait(PATIENCE_S)

        def on_best(self, event):
            told.append(event.arrays["a"].tolist())

    async with Callbacks([Watch(), told.append]) as waiting:
        waiting.tell(callbacks.JoinEvent(time_s=0.0, device="a"))
        waiting.tell(best({"a": np.zeros(1)}))
        waiting.tell(best({"a": np.ones(1)}))
        both_wait.set()
    assert told[1:] == [[1.0]], "after the join; and a function is told of no models"
