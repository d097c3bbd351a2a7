"""What a device of an `Agent` trains: its data by the hub's model or one of its own, or a trainer of the user."""

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError
from edgeasync.losses import LossSetting, kind_of
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSection
from edgeasync.runtime.device import planned_trainer
from edgeasync.runtime.workload import MakeInitial
from edgeasync.sdk.models import Prepared, as_dataset, evaluator_of, prepare_as
from edgeasync.sdk.shares import Share, hold_back
from edgeasync.training.evaluation import Evaluator, NumpyEvaluator
from edgeasync.training.passes import PassesTrainer
from edgeasync.training.plan import CodeModel, LocalTraining, ShippedModel, read_plan
from edgeasync.training.trainer import Trainer


class OwnTraining(NamedTuple):
    """What an agent's user decides about how its devices train.

    - `model`: what a device trains on its data; `None` means what the hub's welcome says.
    - `initial` makes the parameters that it begins with, if not the hub's.
    - `local` changes the hub's settings of local training.
    - Another `loss` of the hub's graph is refused.
    - `validation` are data or a function, or the share of its own data that is kept back.
    - `epochs` are its passes over its data between two exchanges. After `passes` it takes no more steps.
    """

    model: object
    initial: MakeInitial | None
    local: Callable[[LocalTraining], LocalTraining]
    loss: LossSetting | None
    validation: object
    epochs: float | None
    passes: int | None


class TrainerFactory:
    """Makes the trainer of a device once its hub has said what to train, and evaluates that model."""

    def __init__(self, section: AgentSection, part: Share, own: OwnTraining) -> None:
        self._section = section
        self._own = own
        self.part, self._validation = hold_back(part, own.validation, section.seed)
        """The device's data without what is kept back, or a trainer of the user's own."""
        self._trainer: Any = None
        self._prepared: Prepared | None = None

    def make_trainer(self, agent: AgentRuntime, welcome: Welcome) -> Trainer:
        """Return the trainer, and let each update tell the loss on the validation data, if there are some."""
        part = self.part
        if not isinstance(part, Dataset):
            self._watch_own(agent, welcome)
            return part
        chosen: list[LocalTraining] = []

        def own(local: LocalTraining) -> LocalTraining:
            chosen.append(self._own.local(local))
            return chosen[-1]

        if self._own.model is None:
            trainer = planned_trainer(self._section, welcome, agent.graph, part, own)
            self._check_loss(getattr(trainer, "loss", None))
        else:
            local = own(read_plan(welcome.settings).local if welcome.settings else LocalTraining())
            if self._section.micro_batch_size is not None:
                local = replace(local, micro_batch_size=self._section.micro_batch_size)
            self._prepared = prepare_as(self._own.model, welcome.spec, local)
            trainer = self._prepared.make_trainer(part, self._section.seed, self._section.cores_used)
        self._trainer = trainer
        self._watch_own(agent, welcome)
        if self._own.epochs is not None:
            local = chosen[-1]
            batch_size = getattr(trainer, "batch_size", None) or local.batch_size  # a graph may have a fixed one
            accumulates = self._prepared is None or self._prepared.accumulates
            batches = local.accumulation_steps if accumulates else 1
            local = replace(local, batch_size=batch_size, accumulation_steps=batches)
            agent.training.local_steps = local.steps_of(self._own.epochs, len(part))
        if self._own.passes is None:
            return trainer
        fixed = getattr(trainer, "batch_size", None) or 1  # of a graph that takes full batches alone
        return PassesTrainer(trainer, self._own.passes * (len(part) // fixed * fixed))

    def _check_loss(self, found: str | None) -> None:
        loss = self._own.loss
        if loss is not None and found is not None and kind_of(loss) != found:
            wanted = kind_of(loss)
            raise ConfigError(f"the hub's model has the loss {found}, this device {wanted}: give both the same")

    def _watch_own(self, agent: AgentRuntime, welcome: Welcome) -> None:
        """Let each update tell the loss of this device's own parameters, if it can measure that."""
        if self._validation is not None:
            evaluate = self.evaluator(self._validation, "validation", welcome)
            agent.training.validate = lambda vector: evaluate(vector).loss

    def evaluator(self, data: object, name: str, welcome: Welcome) -> Evaluator:
        """Return what evaluates a vector on data, or by a function; raises `ConfigError` and `DataError`."""
        if self._prepared is not None:
            return self._prepared.evaluator(data, name)
        if callable(data):
            return evaluator_of(data, welcome.spec)
        model = read_plan(welcome.settings).model if welcome.settings else CodeModel()
        if not isinstance(model, CodeModel | ShippedModel):
            return NumpyEvaluator(model, as_dataset(data, name))
        trainer = self._trainer
        if isinstance(model, CodeModel) or trainer is None:
            raise ConfigError(f"only Python code can evaluate this: give {name} a function of the named arrays")
        dataset = as_dataset(data, name)
        return lambda vector: trainer.evaluate(vector, dataset)
