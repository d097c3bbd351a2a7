"""Creates the trainer of an `Agent`'s device from data and a model, or from the user's trainer."""

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
    """The user's settings for training on an agent's devices.

    - `model`: the model to train; `None` means the hub's model.
    - `initial`: a function that creates the initial parameters; `None` means the hub's parameters.
    - `local`: a function that changes the hub's settings of local training.
    - `loss`: the loss that the hub's training graph must have; a graph with another is rejected.
    - `validation`: data, a function, or the fraction of the device's data to hold out.
    - `epochs`: the number of passes over the data between two exchanges.
    - `passes`: the number of passes after which the device takes no more steps.
    """

    model: object
    initial: MakeInitial | None
    local: Callable[[LocalTraining], LocalTraining]
    loss: LossSetting | None
    validation: object
    epochs: float | None
    passes: int | None


class TrainerFactory:
    """Creates a device's trainer once the hub has announced the model, and creates evaluators."""

    def __init__(self, section: AgentSection, part: Share, own: OwnTraining) -> None:
        self._section = section
        self._own = own
        self.part, self._validation = hold_back(part, own.validation, section.seed)
        """The device's data without the validation data, or the user's trainer."""
        self._trainer: Any = None
        self._prepared: Prepared | None = None

    def make_trainer(self, agent: AgentRuntime, welcome: Welcome) -> Trainer:
        """Create the trainer; with validation data, each update reports the validation loss."""
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
            batch_size = getattr(trainer, "batch_size", None) or local.batch_size  # fixed in some graphs
            accumulates = self._prepared is None or self._prepared.accumulates
            batches = local.accumulation_steps if accumulates else 1
            local = replace(local, batch_size=batch_size, accumulation_steps=batches)
            agent.training.local_steps = local.steps_of(self._own.epochs, len(part))
        if self._own.passes is None:
            return trainer
        fixed = getattr(trainer, "batch_size", None) or 1  # some graphs accept only full batches
        return PassesTrainer(trainer, self._own.passes * (len(part) // fixed * fixed))

    def _check_loss(self, found: str | None) -> None:
        loss = self._own.loss
        if loss is not None and found is not None and kind_of(loss) != found:
            wanted = kind_of(loss)
            raise ConfigError(
                f"the hub's model has the loss {found}, but this device uses {wanted}; use the same loss on both"
            )

    def _watch_own(self, agent: AgentRuntime, welcome: Welcome) -> None:
        """If there are validation data, make each update report the validation loss."""
        if self._validation is not None:
            evaluate = self.evaluator(self._validation, "validation", welcome)
            agent.training.validate = lambda vector: evaluate(vector).loss

    def evaluator(self, data: object, name: str, welcome: Welcome) -> Evaluator:
        """Create an evaluator from data or a function; raises `ConfigError` or `DataError`."""
        if self._prepared is not None:
            return self._prepared.evaluator(data, name)
        if callable(data):
            return evaluator_of(data, welcome.spec)
        model = read_plan(welcome.settings).model if welcome.settings else CodeModel()
        if not isinstance(model, CodeModel | ShippedModel):
            return NumpyEvaluator(model, as_dataset(data, name))
        trainer = self._trainer
        if isinstance(model, CodeModel) or trainer is None:
            raise ConfigError(
                f"this model cannot be evaluated on data: pass {name} as a function of the named arrays"
            )
        dataset = as_dataset(data, name)
        return lambda vector: trainer.evaluate(vector, dataset)
