"""Devices of an agent evaluate a model as their data or their trainer allows it."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgeasync.config import to_table
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.sdk.trainer_factory import OwnTraining, TrainerFactory
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.plan import CodeModel, LocalTraining, ShippedModel, TrainingPlan

MODEL = SoftmaxModel(inputs=4, classes=2)
DATA = Dataset.of(np.eye(4), [0, 1, 0, 1])
OWN = OwnTraining(
    model=None, initial=None, local=LocalTraining, loss=None, validation=None, epochs=None, passes=None
)


@pytest.mark.parametrize("model", [CodeModel(), ShippedModel(), None])
def test_a_trainer_of_the_users_own_needs_a_function(model):
    settings = {} if model is None else to_table(TrainingPlan(model=model))
    welcome = SimpleNamespace(settings=settings, spec=MODEL.spec)
    training = TrainerFactory(AgentSection(), SimpleNamespace(spec=MODEL.spec), OWN)
    with pytest.raises(ConfigError, match="pass evaluate as a function of the named arrays"):
        training.evaluator(DATA, "evaluate", welcome)
    assert training.evaluator(lambda _: 0.5, "evaluate", welcome)(MODEL.initial(0)).loss == 0.5


def test_a_model_in_numpy_evaluates_itself():
    welcome = SimpleNamespace(settings=to_table(TrainingPlan(model=MODEL)), spec=MODEL.spec)
    found = TrainerFactory(AgentSection(), DATA, OWN).evaluator(DATA, "evaluate", welcome)(MODEL.initial(0))
    assert found.loss == pytest.approx(np.log(2))
