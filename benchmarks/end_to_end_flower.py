"""Flower's side of the end-to-end benchmark: runs in an environment of its own, with flwr and numpy alone.

`python end_to_end_flower.py server PORT LENGTH` is FedAvg behind `start_server`: it prints how many updates it has
aggregated, after every round. `... client PORT LENGTH` is a NumPyClient that adds noise to what it receives.
"""

import logging
import sys
from typing import Any

import flwr  # type: ignore[import-not-found]
import numpy as np


class Counted(flwr.server.strategy.FedAvg):  # type: ignore[misc]
    """FedAvg that prints the number of updates so far."""

    updates = 0

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Aggregate and count."""
        aggregated = super().aggregate_fit(server_round, results, failures)
        self.updates += len(results)
        print("updates", self.updates, flush=True)
        return aggregated


class Noisy(flwr.client.NumPyClient):  # type: ignore[misc]
    """A client whose training adds noise."""

    def __init__(self, length: int) -> None:
        self._noise = (1e-3 * np.random.default_rng().standard_normal(length)).astype(np.float32)

    def fit(self, parameters: Any, config: Any) -> Any:  # noqa: ARG002
        """Return the parameters with noise."""
        np.negative(self._noise, out=self._noise)
        return [parameters[0] + self._noise], 1, {}


def main() -> None:
    """Run a server or a client, as the arguments say."""
    role, port, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.getLogger("flwr").setLevel(logging.ERROR)
    address = f"127.0.0.1:{port}"
    if role == "client":
        flwr.client.start_client(server_address=address, client=Noisy(length).to_client())
        return
    initial = [np.random.default_rng(0).standard_normal(length).astype(np.float32)]
    strategy = Counted(
        fraction_evaluate=0.0,
        min_fit_clients=4,
        min_available_clients=4,
        initial_parameters=flwr.common.ndarrays_to_parameters(initial),
    )
    flwr.server.start_server(
        server_address=address, config=flwr.server.ServerConfig(num_rounds=10**9), strategy=strategy
    )


if __name__ == "__main__":
    main()
