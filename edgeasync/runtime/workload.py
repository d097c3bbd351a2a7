"""The work of a device: how its trainer is made, and which model its hub has to have."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen, Welcome
from edgeasync.training.trainer import CoroutineTrainer, Trainer

MakeTrainer = Callable[[Welcome], Trainer | CoroutineTrainer]
MakeInitial = Callable[[ParameterSpec], Vector]


class Workload(NamedTuple):
    """The work of a device, for `AgentRuntime`.

    - `make_trainer` is called in the training thread with the hub's first welcome, and again if its settings
      change.
    - `initial` makes the parameters that the device begins with, where the hub's model is the base of its first
      update. The training thread calls it with the hub's spec; once an update was answered it has no meaning.
    - `examples` is how many the device has, 0 if nobody knows.
    - `fingerprint` is the only model that the device accepts.
    - `parameters` are the arrays of the device's own model, in any order, and `frozen` is the checksum of those of
      its arrays that do not travel: the hub refuses a device whose arrays differ.
    - With `trains_at_rest` it takes the steps of `alone_steps_max` also when the hub asks for rest.
    """

    make_trainer: MakeTrainer
    initial: MakeInitial | None = None
    examples: int = 0
    fingerprint: str | None = None
    parameters: Sequence[Parameter] = ()
    frozen: Frozen | None = None
    trains_at_rest: bool = False
