"""A device's work: how its trainer is made, and which model it accepts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen, Welcome
from edgeasync.training.trainer import CoroutineTrainer, Trainer

MakeTrainer = Callable[[Welcome], Trainer | CoroutineTrainer]
MakeInitial = Callable[[ParameterSpec], Vector]


class Workload(NamedTuple):
    """The work of a device, for `AgentRuntime`.

    - `make_trainer` is called in the training thread with the hub's first welcome, and again if the
      hub's settings change.
    - `initial` returns the device's own initial parameters, from which it trains its first update.
      The training thread calls it with the hub's spec. It has no effect once an update was
      answered.
    - `examples` is the device's number of examples, 0 if unknown.
    - `fingerprint` identifies the only model that the device accepts.
    - `parameters` are the arrays of the device's own model, in any order. `frozen` is the checksum
      of its frozen arrays. The hub refuses a device whose arrays differ.
    - With `trains_at_rest`, the device takes the steps of `alone_steps_max` even while the hub lets
      the fleet idle.
    """

    make_trainer: MakeTrainer
    initial: MakeInitial | None = None
    examples: int = 0
    fingerprint: str | None = None
    parameters: Sequence[Parameter] = ()
    frozen: Frozen | None = None
    trains_at_rest: bool = False
