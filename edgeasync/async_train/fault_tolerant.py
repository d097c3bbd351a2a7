"""Training that may be killed at any moment: started again by the same call, it continues where it stood."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from edgeasync import SGD, Agent, Hub, Policy, Run, join
from edgeasync.async_train import adapters
from edgeasync.async_train.cuda import provider_of, usable
from edgeasync.async_train.data import as_dataset
from edgeasync.async_train.hub_model import as_hub_model, has_own_code
from edgeasync.async_train.learners import Learner, learner_of
from edgeasync.async_train.optim import Optimizer
from edgeasync.async_train.watching import watched
from edgeasync.policies.aggregation import SynchronousAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.staleness import ConstantStaleness

PATIENCE_S = 86_400.0
"""How long a loop waits for the hub of its own process, which answers as soon as it can."""

FLOAT32 = {"push": "identity", "model": "identity", "delta": "off"}

KEPT: dict[str, Any] = {"name": "worker", "spool": "full", "keep_optimizer_state": True}
"""How each worker resumes exactly where it was."""

NAMES_KEPT = 10_000
"""How many checkpoints stay where one of them is asked for by its name: so that it stays."""


class FaultTolerantTrainer:
    """Trains a model in this process, and keeps all that a restart needs in a folder.

    Killed at any moment and started again by the same call, it continues: every example is trained and counted
    once an epoch. With one worker the result is that of an undisturbed run, to the bit.

    - `model`: as for `edgeasync.train`, or a `torch.nn.Module`.
    - `checkpoint_dir`: the folder of the run, which `Run.open` reads. The workers' own state lies in it, too.
    - `checkpoint_frequency`: updates between two checkpoints. A restart replays what came since the last one.
    - `recovery_strategy`: the model that a restart begins with. `"latest"`: the one where it stood. `"best"`: that
      of the checkpoint with the best evaluation. Or a checkpoint's name. The place in the data is where it stood.
    - `device`: where it computes, `"cpu"` or `"cuda"`; by default where the model is.
    - `workers`: how many train at the same time, each on its share of the data.
    - `update_frequency`: batches between two updates.
    - `seed`: of the first values and of the order of examples, where edgeasync draws them.

    >>> import tempfile
    >>> import numpy as np
    >>> from edgeasync import nn
    >>> from edgeasync.async_train import FaultTolerantTrainer
    >>> trainer = FaultTolerantTrainer(nn.Linear(4, 2), checkpoint_dir=tempfile.mkdtemp())
    >>> run = trainer.train((np.eye(4), [0, 1, 0, 1]), epochs=3)
    >>> int(run.history["examples"].sum())
    12
    """

    def __init__(
        self,
        model: Any,
        checkpoint_dir: str | Path,
        checkpoint_frequency: int = 1000,
        recovery_strategy: str = "latest",
        *,
        device: object = None,
        workers: int = 1,
        update_frequency: int = 16,
        seed: int = 0,
    ) -> None:
        self.model, self._workers, self._seed = model, workers, seed
        self.device = usable(device, model, "FaultTolerantTrainer")  # where it computes
        self._folder = Path(checkpoint_dir).expanduser().absolute()
        self._rules = _rules(self._folder, checkpoint_frequency, recovery_strategy, update_frequency)

    def train(
        self,
        dataset: Any = None,
        epochs: int = 1,
        optimizer: Any = None,
        loss_fn: Any = None,
        *,
        dataloader: Any = None,
        batch_size: int | None = None,
        evaluate: object = None,
    ) -> Run:
        """Train for this number of epochs, those of earlier starts included; return the run.

        Afterwards the model has the trained values. `batch_size` is by default the loader's, or 32. `evaluate` is
        held-out data, as for `edgeasync.train`.
        """
        loader = dataset if dataloader is None else dataloader
        loops = adapters.is_torch(self.model) and self._workers == 1 and _is_torch_loader(loader)
        examples = None if loops else as_dataset(adapters.as_data(dataset, dataloader))
        own, how = as_hub_model(self.model, examples, optimizer, loss_fn, self.device)
        how |= {"run": self._folder, "bind": "tcp://127.0.0.1:*", "evaluate": evaluate, "seed": self._seed}
        with Hub(own, **watched(self.model, how | self._rules)) as hub:
            kept: dict[str, Any] = KEPT | {"state": self._folder / "workers"}
            if examples is None:
                learner = learner_of(self.model, self.device)
                _train_in_a_loop(hub, learner, loader, epochs, training=(optimizer, loss_fn), kept=kept)
            else:
                kept |= {
                    "workers": self._workers,
                    "seed": self._seed,
                    "passes": epochs,
                    "provider": provider_of(self.device),
                    "batch_size": batch_size or adapters.batch_size_of(loader),
                }
                kept |= {"model": own} if has_own_code(self.model) else {}
                stages = None if adapters.is_torch(self.model) else adapters.as_stages(optimizer)
                with Agent(hub.address, examples, optimizer=stages, **kept) as agent:
                    agent.wait()
            hub.finish(f"{epochs} epochs")
            hub.wait()
        run = Run.open(self._folder)
        adapters.put_back(self.model, run.arrays)
        return run

    async def train_async(self, *args: Any, **kwargs: Any) -> Run:
        """Do what `train` does, in a thread, while the caller's loop runs."""
        return await asyncio.to_thread(self.train, *args, **kwargs)


def _train_in_a_loop(
    hub: Hub, learner: Learner, loader: Any, epochs: int, *, training: tuple[Any, Any], kept: dict[str, Any]
) -> None:
    """Train a torch module here: so a loader of torch stays what it is, with its own order and workers."""
    import torch

    optimizer, loss_fn = training
    module, used = learner.participant, adapters.as_optimizer(optimizer or SGD(learning_rate=0.05))
    used = used.for_torch(module.parameters()) if isinstance(used, Optimizer) else used
    loss = loss_fn or torch.nn.functional.cross_entropy
    with join(hub.address, module, used, alone_steps_max=0, timeout_s=PATIENCE_S, **kept) as session:
        for _ in range(epochs):
            for inputs, targets in session.batches(loader):
                learner.train(inputs, targets, used, loss, session)


def _rules(folder: Path, every: int, recovery: str, local_steps: int) -> dict[str, Any]:
    """Return what makes the result independent of time, and says what a restart begins with."""
    checkpoint: dict[str, Any] = {"every": f"{every} updates"}
    if recovery not in ("latest", "best"):
        checkpoint["keep"] = NAMES_KEPT
    if any(folder.glob("checkpoint-*")):
        checkpoint["recovery"] = recovery
    policy = Policy(
        staleness=ConstantStaleness(),
        aggregate=SynchronousAggregator(),
        optimizer=(SGD(learning_rate=1.0),),
        frequency=FixedFrequency(local_steps=local_steps),
        monitor=Monitor(detectors=(), clip=0.0),
    )
    evaluation = {"every": f"{max(1, every // 2)} updates"}  # so that a checkpoint's model has been evaluated
    return {"policy": policy, "settings": {"codec": FLOAT32, "checkpoint": checkpoint, "evaluation": evaluation}}


def _is_torch_loader(loader: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(loader, torch.utils.data.DataLoader)
