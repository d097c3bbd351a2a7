"""Training plans that a hub sends to its devices."""

from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.plan import LocalTraining, TrainingPlan, read_plan

MLP = MlpModel(inputs=6, hidden=(8,), classes=3)


def test_an_older_agent_reads_a_plan_that_needs_nothing_newer():
    plan = TrainingPlan(model=MLP, local=LocalTraining(batch_size=64))
    assert plan.table()["local"].keys() == {"batch_size", "optimizer", "keep_optimizer_state"}, "those of 0.1"
    newer = LocalTraining(accumulation_steps=4, micro_batch_size="auto", metrics=("f1",))
    for local in (plan.local, newer):
        told = TrainingPlan(model=MLP, local=local)
        assert read_plan(told.table()) == told
