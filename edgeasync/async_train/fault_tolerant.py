"""Training that may be killed at any moment: started again by the same call, it continues where it stood."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from edgeasync import SGD, Agent, Dataset, Hub, Policy, Run, data, join
from edgeasync.async_train import given
from edgeasync.async_train.optim import Optimizer
from edgeasync.policies.aggregation import SynchronousAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.staleness import ConstantStaleness

PATIENCE_S = 86_400.0
"""How long a loop waits for the hub of its own process, which answers as soon as it can."""

FLOAT32 = {"push": "identity", "model": "identity", "delta": "off"}

BATCH_SIZE = 32

NAMES_KEPT = 10_000
"""How many checkpoints stay where one of them is asked for by its name: so none is dropped."""


class FaultTolerantTrainer:
    """Trains a model in this process, and keeps all that a restart needs in a folder.

    Killed at any moment and started again by the same call, it continues: every example is trained and counted once
    an epoch. With one worker the result is that of an undisturbed run, to the bit.

    - `model`: as for `edgeasync.train`, or a `torch.nn.Module`.
    - `checkpoint_dir`: the folder of the run, which `Run.open` reads. The workers' own state lies in it, too.
    - `checkpoint_frequency`: updates between two checkpoints. A restart replays what came since the last one.
    - `recovery_strategy`: the model that a restart begins with. `"latest"`: the one where it stood. `"best"`: that of
      the checkpoint with the best evaluation. Or a checkpoint's name. The place in the data is where it stood.
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
        workers: int = 1,
        update_frequency: int = 16,
        seed: int = 0,
    ) -> None:
        self.model = model
        self._folder, self._workers, self._seed = Path(checkpoint_dir).expanduser(), workers, seed
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
        loader, torch = dataset if dataloader is None else dataloader, given.is_torch(self.model)
        loops = torch and self._workers == 1 and _is_torch_loader(loader)
        examples = None if loops else _as_dataset(given.as_data(dataset, dataloader))
        own = _torch_model(self.model, loss_fn, optimizer) if torch else self.model
        rules = {**self._rules, "seed": self._seed, "evaluate": evaluate}
        if not torch:
            rules |= {"loss": given.as_loss(loss_fn), "input_shape": _shape_of(examples)}
        with Hub(own, run=self._folder, bind="tcp://127.0.0.1:*", **rules) as hub:
            if examples is None:
                self._train_in_a_loop(hub.address, loader, epochs, optimizer, loss_fn)
            else:
                with Agent(
                    hub.address,
                    examples,
                    model=own if torch or hasattr(own, "gradient") and hasattr(own, "parameters") else None,
                    workers=self._workers,
                    name="worker",
                    state=self._folder / "workers",
                    spool="full",
                    optimizer=None if torch else given.as_stages(optimizer),
                    batch_size=batch_size or given.batch_size_of(loader, BATCH_SIZE),
                    keep_optimizer_state=True,
                    passes=epochs,
                    seed=self._seed,
                ) as agent:
                    agent.wait()
            hub.finish(f"{epochs} epochs")
            hub.wait()
        return _give_back(self.model, Run.open(self._folder))

    async def train_async(self, *args: Any, **kwargs: Any) -> Run:
        """Do what `train` does, in a thread, while the caller's loop runs."""
        return await asyncio.to_thread(self.train, *args, **kwargs)

    def _train_in_a_loop(self, address: str, loader: Any, epochs: int, optimizer: Any, loss_fn: Any) -> None:
        """Train a torch module here: so a loader of torch stays what it is, with its own order and workers."""
        import torch  # noqa: PLC0415 - who has a module has it

        module, ours = self.model, given.as_optimizer(optimizer or SGD(learning_rate=0.05))
        used = ours.for_torch(module.parameters()) if isinstance(ours, Optimizer) else ours
        compute = loss_fn or torch.nn.functional.cross_entropy
        with join(
            address,
            module,
            used,
            name="worker",
            state=self._folder / "workers",
            keep_optimizer_state=True,
            alone_steps_max=0,
            timeout_s=PATIENCE_S,
        ) as session:
            module.train()
            for _ in range(epochs):
                for inputs, targets in session.batches(loader):
                    used.zero_grad()
                    loss = compute(module(inputs), targets)
                    loss.backward()
                    session.note(loss.item(), len(targets))
                    used.step()


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
        monitor=Monitor(watch=(), clip=0.0),
    )
    evaluation = {"every": f"{max(1, every // 2)} updates"}  # so that a checkpoint's model has been evaluated
    return {"policy": policy, "settings": {"codec": FLOAT32, "checkpoint": checkpoint, "evaluation": evaluation}}


def _as_dataset(found: Any) -> Dataset:
    if isinstance(found, Dataset):
        return found
    return Dataset.of(*found) if isinstance(found, tuple) else data.load(found)


def _shape_of(examples: Dataset | None) -> tuple[int, ...] | None:
    """Return the shape of an example; of several inputs layers have none."""
    shape = None if examples is None else getattr(examples.features, "shape", None)
    return None if shape is None else tuple(shape[1:])


def _torch_model(module: Any, loss_fn: Any, optimizer: Any) -> Any:
    from edgeasync import torch  # noqa: PLC0415 - who has a module has it

    return torch.model(module, loss_fn, given.as_maker(optimizer))


def _is_torch_loader(loader: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(loader, torch.utils.data.DataLoader)


def _give_back(model: Any, run: Run) -> Run:
    """Put a run's values into a model that holds its own; return the run."""
    if given.is_torch(model):
        from edgeasync import torch  # noqa: PLC0415 - who has a module has it

        torch.load(model, run)
    elif hasattr(model, "load_state_dict"):
        model.load_state_dict(run.arrays)
    return run
