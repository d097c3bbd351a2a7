"""Training that can be killed at any time, and resumes when the same program is started again."""

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
"""Maximum time in seconds that a loop waits for the hub, which runs in the same process."""

FLOAT32 = {"push": "identity", "model": "identity", "delta": "off"}

KEPT: dict[str, Any] = {"name": "worker", "spool": "full", "keep_optimizer_state": True}
"""Settings of workers that make them resume exactly where they were killed."""

NAMES_KEPT = 10_000
"""Number of checkpoints to keep if a checkpoint is selected by name, so that it is not deleted."""


class FaultTolerantTrainer:
    """Trains a model in this process, and stores everything needed for a restart in a folder.

    The process may be killed at any time. If the same program is started again, training resumes,
    and every example is trained and counted exactly once per epoch. With one worker, the result is
    bit by bit identical to that of an uninterrupted run.

    - `model`: as for `edgeasync.train`, or a `torch.nn.Module`.
    - `checkpoint_dir`: the folder of the run, which `Run.open` reads; it also contains the workers'
      state.
    - `checkpoint_frequency`: updates between two checkpoints. A restart replays the updates since
      the last one.
    - `recovery_strategy`: the model to restart from: `"latest"`, `"best"` (the checkpoint with the
      best evaluation), or a checkpoint's name. Training always continues from the latest position
      in the data.
    - `device`: `"cpu"` or `"cuda"`; by default, the model's current device.
    - `workers`: the number of parallel workers, each with its part of the data.
    - `update_frequency`: batches between two updates.
    - `seed`: the seed for initial values and for the order of examples, unless the model or the
      loader determines them.

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
        self.device = usable(device, model, "FaultTolerantTrainer")  # the device on which the model computes
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
        """Train up to `epochs` epochs, counting those of earlier starts; return the run.

        After that, the model contains the trained values. `batch_size` defaults to the loader's batch
        size, or to 32 without a loader. `evaluate` is held-out data, as for `edgeasync.train`.
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
        """Call `train` in a thread, while the caller's event loop runs."""
        return await asyncio.to_thread(self.train, *args, **kwargs)


def _train_in_a_loop(
    hub: Hub, learner: Learner, loader: Any, epochs: int, *, training: tuple[Any, Any], kept: dict[str, Any]
) -> None:
    """Train a torch module in this thread, which preserves a torch loader's order and workers."""
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
    """Return settings for a reproducible result, including the model to restart from."""
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
    evaluation = {"every": f"{max(1, every // 2)} updates"}  # so that each checkpoint has an evaluation
    return {"policy": policy, "settings": {"codec": FLOAT32, "checkpoint": checkpoint, "evaluation": evaluation}}


def _is_torch_loader(loader: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(loader, torch.utils.data.DataLoader)
