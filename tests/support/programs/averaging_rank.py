"""One rank of `AsyncModelAverager`: it runs until it is killed, and tells each average as a line of JSON."""

import json
import sys
import time

import numpy as np

from edgeasync.async_train import AsyncModelAverager, init_distributed, nn, optim

STEP_S = 0.01


def tell(event, **details):
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


def main():
    rank, world_size = init_distributed(backend="nccl")
    model = nn.Sequential(nn.Linear(4, 2))
    averager = AsyncModelAverager(
        model, world_size, rank, averaging_frequency=4, checkpoint_dir=sys.argv[1] if rank == 0 else None
    )
    x, y, optimizer, loss_fn = np.eye(4), np.array([0, 1, 0, 1]), optim.SGD(lr=0.01), nn.CrossEntropyLoss()
    known, steps = None, 0
    with averager:
        while True:
            averager.train_step(x, y, optimizer=optimizer, loss_fn=loss_fn)
            steps += 1
            version = averager.communication.session.version
            if version != known:
                tell("averaged", version=version, steps=steps)
                known = version
            elif steps % 20 == 0:
                tell("trained", steps=steps)
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
