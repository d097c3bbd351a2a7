"""A Flower app of the end-to-end benchmark, which a SuperLink and SuperNodes run in an environment of their own.

The server is FedAvg. After every round, it appends the number of updates so far to the file `counts` of the run's
configuration. A client adds noise to the model.
"""

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from flwr.serverapp import ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]

client = ClientApp()
server = ServerApp()


@client.train()  # type: ignore[untyped-decorator]
def train(message: Any, context: Any) -> Any:  # noqa: ARG001
    """Return the model with noise."""
    (model,) = message.content["arrays"].to_numpy_ndarrays()
    noise = (1e-3 * np.random.default_rng().standard_normal(model.size)).astype(np.float32)
    metrics = MetricRecord({"num-examples": 1, "loss": 1.0})
    return Message(
        content=RecordDict({"arrays": ArrayRecord([model + noise]), "metrics": metrics}), reply_to=message
    )


class Counted(FedAvg):  # type: ignore[misc]
    """FedAvg that counts updates."""

    def __init__(self, path: Path) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4)
        self._path = path
        self._updates = 0

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Aggregate and count."""
        replies = list(replies)
        self._updates += len(replies)
        with self._path.open("a") as file:
            file.write(f"{self._updates}\n")
        return super().aggregate_train(server_round, replies)


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Any, context: Any) -> None:
    """Train for ever."""
    length, path = int(context.run_config["length"]), Path(context.run_config["counts"])
    initial = ArrayRecord([np.random.default_rng(0).standard_normal(length).astype(np.float32)])
    Counted(path).start(grid=grid, initial_arrays=initial, num_rounds=10**6)
