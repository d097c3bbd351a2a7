"""Serve a model to the workers of worker.py: `python parameter_server.py [DATA]`."""

import argparse

from edgeasync.async_train import ParameterServer, data, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="?", default="data", help="a folder with MNIST's files")
parser.add_argument("--port", type=int, default=5000)
parser.add_argument("--staleness-policy", default="adaptive_lr")
parser.add_argument("--workers", type=int, default=2)
given = parser.parse_args()

transforms = data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
test_loader = data.DataLoader(data.MNIST(given.data, train=False, transform=transform), batch_size=1000)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

server = ParameterServer(
    model,
    port=given.port,
    update_rule="async_sgd",
    staleness_policy=given.staleness_policy,
    staleness_lr_factor=0.9,
    max_staleness=10,
    checkpoint_dir="ckpt",
    checkpoint_frequency=100,
)
server.start()
server.wait_for_workers(given.workers)
server.stop()
for inputs, targets in test_loader:
    print(f"accuracy: {(model(inputs).argmax(axis=1) == targets).mean():.2%}")
