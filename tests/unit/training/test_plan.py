"""Training plans that a hub sends to its devices."""

import pytest

from edgeasync.config import to_table
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.plan import LocalTraining, TrainingPlan, read_plan

MLP = MlpModel(inputs=6, hidden=(8,), classes=3)


@pytest.mark.parametrize(
    "local",
    [LocalTraining(batch_size=64), LocalTraining(accumulation_steps=4, micro_batch_size="auto", metrics=("f1",))],
)
def test_a_device_reads_the_plan_that_its_hub_sends(local):
    plan = TrainingPlan(model=MLP, local=local)
    assert read_plan(to_table(plan)) == plan
