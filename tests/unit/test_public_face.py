"""The names scripts may rely on; adding one is a decision, losing one breaks somebody."""

import edgeasync

NAMES = """
Adam Agent CodecSettings Dataset DeviceFolder DeviceIdentity EdgeAsyncError GradientTrainer Hub
HubCoreSettings Limits
Liveness OnnxTrainer Parameter ParameterSpec Policy Run SGD StepResult Stop StopCondition Trainer Vector batches
dirichlet fetch_status from_iterable iid load load_model train train_async
"""


def test_the_public_names_are_these():
    assert sorted(edgeasync.__all__) == sorted(NAMES.split())


def test_every_public_name_is_there():
    assert all(hasattr(edgeasync, name) for name in NAMES.split())
