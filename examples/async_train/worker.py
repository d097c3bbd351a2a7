"""Train on a part of the data for parameter_server.py: `python worker.py [DATA] --part 0`, and `--part 1`."""

import argparse
import logging

from edgeasync.async_train import AsyncWorker, data, nn, optim

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="?", default="data", help="a folder with MNIST's files")
parser.add_argument("--server", default="127.0.0.1:5000")
parser.add_argument("--part", type=int, default=0)
parser.add_argument("--parts", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.9)
given = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.getLogger("edgeasync.async_train").setLevel(logging.INFO)

transforms = data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
digits = data.MNIST(given.data, train=True, transform=transform)
part = data.Subset(digits, range(given.part, len(digits), given.parts))
test_loader = data.DataLoader(data.MNIST(given.data, train=False, transform=transform), batch_size=100)

worker = AsyncWorker(server_address=given.server, local_batch_size=32, update_frequency=4, device="cpu")
worker.train(
    dataset=part,
    epochs=20,
    optimizer=optim.SGD(lr=given.lr, momentum=given.momentum),
    loss_fn=nn.CrossEntropyLoss(),
    metrics=["accuracy", "loss"],
    log_frequency=100,
)
print(f"accuracy: {worker.evaluate(test_loader):.2%}")
