"""Average the models of several processes: `torchrun --nproc-per-node 2 model_averaging.py [DATA]`.

Without torch, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process.
"""

import argparse

from edgeasync.async_train import AsyncModelAverager, data, init_distributed, nn, optim

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="?", default="data", help="a folder with MNIST's files")
parser.add_argument("--averaging-policy", default="adaptive")
given = parser.parse_args()

rank, world_size = init_distributed(backend="nccl")
transforms = data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
digits = data.MNIST(given.data, train=True, transform=transform)
part = data.Subset(digits, range(rank, len(digits), world_size))
loader = data.DataLoader(part, batch_size=32, shuffle=True, num_workers=2, pin_memory=True)
test_loader = data.DataLoader(data.MNIST(given.data, train=False, transform=transform), batch_size=100)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer, loss_fn = optim.SGD(model.parameters(), lr=0.05, momentum=0.9), nn.CrossEntropyLoss()
with AsyncModelAverager(
    model,
    world_size,
    rank,
    communication_backend="nccl",
    averaging_policy=given.averaging_policy,
    averaging_frequency=5,
    averaging_interval_s=0.02,
    min_averaging_frequency=3,
    max_averaging_frequency=10,
    adaptation_metric="loss_variance",
    checkpoint_dir="ckpt",
) as averager:
    for epoch in range(30):
        if epoch == 10:
            averager.abort()  # stop exchanging
            print(f"accuracy of its own model: {averager.evaluate(test_loader):.2%}")
            averager.resume()
        for inputs, targets in loader:
            x, y = inputs.to(averager.device), targets.to(averager.device)
            averager.train_step(x, y, optimizer=optimizer, loss_fn=loss_fn)
    print(f"{averager.last_averaging_iteration} steps since the last averaging")
print(f"accuracy: {averager.evaluate(test_loader):.2%}")
