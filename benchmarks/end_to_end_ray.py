"""Ray's side of the end-to-end benchmark: runs in an environment of its own, with ray and numpy alone.

An actor holds the model in memory. Four worker actors send it their updates and get the model back. The program
prints its processes' ids once all run, then the number of updates so far, ten times a second.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import ray


class ParameterServer:
    """Adds each update to the model, with a quarter of its weight."""

    def __init__(self, length: int) -> None:
        self._model = np.random.default_rng(0).standard_normal(length).astype(np.float32)
        self._updates = 0

    def exchange(self, update: Any) -> Any:
        """Add an update; return the model."""
        if update is not None:
            self._model = self._model + 0.25 * update
            self._updates += 1
        return self._model

    def look(self) -> tuple[int, int]:
        """Return this process's id and the number of updates."""
        return os.getpid(), self._updates


class Worker:
    """Trains by adding noise."""

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def run(self, server: Any, length: int) -> None:
        """Exchange for ever."""
        noise = (1e-3 * np.random.default_rng().standard_normal(length)).astype(np.float32)
        model = ray.get(server.exchange.remote(None))
        while True:
            trained = model + noise
            np.negative(noise, out=noise)
            model = ray.get(server.exchange.remote(trained - model))


def main() -> None:
    """Start the actors and print what they do."""
    length, clients = int(sys.argv[1]), int(sys.argv[2])
    ray.init(num_cpus=clients + 2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    actor: Any = ray.remote
    server = actor(ParameterServer).remote(length)
    workers = [actor(Worker).remote() for _ in range(clients)]
    pids = {
        "server": ray.get(server.look.remote())[0],
        "clients": ray.get([each.pid.remote() for each in workers]),
    }
    print("processes", json.dumps(pids), flush=True)
    running = [worker.run.remote(server, length) for worker in workers]
    while running:
        print("updates", ray.get(server.look.remote())[1], flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
