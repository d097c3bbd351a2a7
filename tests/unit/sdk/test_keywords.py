"""Keywords that several functions of the SDK take are those of the settings."""

import pydoc
from typing import get_type_hints

import pytest

from edgeasync import Agent, Hub, train, train_async
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.errors import ConfigError
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.sdk.keywords import (
    AgentKeywords,
    DeviceKeywords,
    TrainingKeywords,
    check_keywords,
)
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.plan import LocalTraining

MODEL = SoftmaxModel(inputs=4, classes=2)
DATA = ([[0.0] * 4], [0])


def test_an_agent_takes_the_keys_of_its_file():
    """An editor completes them; what has an argument of its own in `Agent` is not among them."""
    arguments = {"hub", "data", "device_id", "trainer"}
    keys = {*AgentSection.__struct_fields__, *DeviceLimits.__struct_fields__} - arguments
    assert set(DeviceKeywords.__annotations__) == keys
    assert set(get_type_hints(AgentKeywords)) > keys


def test_training_takes_the_keys_of_local_training_and_of_a_graph():
    """In Python the data say what is compared: there is no `target`."""
    keys = {*LocalTraining.__struct_fields__, *GraphSettings.__struct_fields__} - {"target"}
    assert set(get_type_hints(TrainingKeywords)) == keys


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda _: train(MODEL, DATA, batch_siz=3), r"^train\(\) got .* 'batch_siz'; did you mean batch_size\?$"),
        (lambda _: train(MODEL, DATA, wrkers=3), r"^train\(\) got .* 'wrkers'; did you mean workers\?$"),
        (lambda run: Hub(MODEL, run=run, optimiser=3), r"^Hub\(\) got .* 'optimiser'; did you mean optimizer\?$"),
        (lambda run: Hub(MODEL, run=run, knocking=True), r"'knocking'; use settings={'hub': {'knocking': ...}}$"),
        (lambda run: Hub(MODEL, run=run, colour=3), r"^Hub\(\) got an unexpected keyword argument 'colour'$"),
    ],
)
def test_an_unknown_keyword_is_told_as_in_any_call(tmp_path, call, told):
    with pytest.raises(TypeError, match=told):
        call(tmp_path)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"treads": 3}, "unknown key `treads`; did you mean threads"),
        ({"device_id": "pi"}, "device_id is not a setting of Agent: pass name"),
        ({"throttle": 70}, "throttle is 70; pass a dict of"),
        ({"state": 3}, "state is 3; pass the path of a folder"),
    ],
)
def test_a_keyword_of_an_agent_is_a_key_of_its_file(keywords, told):
    with pytest.raises(ConfigError, match=told):
        Agent(data=DATA, **keywords)


@pytest.mark.parametrize(
    ("called", "kind"),
    [(train, TrainingKeywords), (train_async, TrainingKeywords), (Hub, TrainingKeywords), (Agent, AgentKeywords)],
)
def test_help_shows_every_keyword(called, kind):
    text = pydoc.plain(pydoc.render_doc(called))
    for name in get_type_hints(kind):
        assert f" {name}: " in text
    check_keywords(dict.fromkeys(get_type_hints(kind)), called, called.__name__)
