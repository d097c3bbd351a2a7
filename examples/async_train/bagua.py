"""Average the models of a torch loop, with Bagua's names: `torchrun --nproc-per-node 2 bagua.py [DATA]`."""

import sys

import torch
from torch import nn

from edgeasync.async_train import AsyncModelAverageAlgorithm, data, init_distributed

root = sys.argv[1] if len(sys.argv) > 1 else "data"
rank, world_size = init_distributed()
transforms = data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
digits = data.MNIST(root, train=True, transform=transform)
part = data.Subset(digits, range(rank, len(digits), world_size))
loader = data.DataLoader(part, batch_size=32, shuffle=True)
test_loader = data.DataLoader(data.MNIST(root, train=False, transform=transform), batch_size=1000)

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=20, warmup_steps=10, checkpoint_dir="ckpt")
model = model.with_bagua([optimizer], algorithm)  # pyright: ignore[reportCallIssue] - torch does not declare it


def accuracy() -> float:
    inputs, targets = next(iter(test_loader))
    with torch.no_grad():
        return float((model(torch.as_tensor(inputs)).argmax(1) == torch.as_tensor(targets)).float().mean())


for epoch in range(20):
    if epoch == 10:
        model.bagua_algorithm.abort(model)  # stop exchanging
        print(f"accuracy of its own model: {accuracy():.2%}")
        model.bagua_algorithm.resume(model)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.as_tensor(inputs)), torch.as_tensor(targets)).backward()
        optimizer.step()
algorithm.stop(model)
print(f"accuracy: {accuracy():.2%}")
