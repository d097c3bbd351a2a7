"""A device's workload: how its trainer is created, and which model it accepts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.protocol.messages import Frozen, Welcome
from edgeasync.training.trainer import CoroutineTrainer, Trainer

MakeTrainer = Callable[[Welcome], Trainer | CoroutineTrainer]
MakeInitial = Callable[[ParameterSpec], Vector]


class Workload(NamedTuple):
    """What a device trains. It is an argument of `AgentRuntime`.

    - `make_trainer` is called in the training thread with the hub's first `Welcome`, and again if
      the hub's settings have changed.
    - `initial` returns the device's own initial parameters, which it trains its first update from.
      The training thread calls it with the hub's spec. It has no effect once the hub has answered
      an update of the device.
    - `examples` is the device's number of examples, or 0 if unknown.
    - `fingerprint` identifies the only model that the device accepts.
    - `parameters` are the arrays of the device's own model, in any order, and `frozen` is the
      checksum of its frozen arrays. The hub refuses a device whose arrays differ from the hub's
      arrays.
    - If `trains_at_rest` is true, the device takes local steps, up to `alone_steps_max`, even while
      the hub lets the fleet idle.
    """

    make_trainer: MakeTrainer
    initial: MakeInitial | None = None
    examples: int = 0
    fingerprint: str | None = None
    parameters: Sequence[Parameter] = ()
    frozen: Frozen | None = None
    trains_at_rest: bool = False
