"""Take steps of 64 examples with only 16 in memory: `python gradient_accumulation.py [DATA]`."""

import sys

from edgeasync.async_train import AsyncGradientAccumulator, cuda, data, nn, optim

root = sys.argv[1] if len(sys.argv) > 1 else "data"
device = "cuda" if cuda.is_available() else "cpu"
transforms = data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
digits = data.MNIST(root, train=True, download=True, transform=transform)
loader = data.DataLoader(digits, batch_size=16, shuffle=True, num_workers=2, pin_memory=True)
test_loader = data.DataLoader(data.MNIST(root, train=False, transform=transform), batch_size=1000)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer, loss_fn = optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()
accumulator = AsyncGradientAccumulator(model, base_batch_size=16, target_batch_size=64)
updates = 0
for _ in range(20):
    for inputs, targets in loader:
        accumulator.train_step(inputs.to(device), targets.to(device), optimizer=optimizer, loss_fn=loss_fn)
        updates += accumulator.is_update_step()

model.eval()
for inputs, targets in test_loader:
    print(f"{updates} steps, accuracy: {(model(inputs).argmax(axis=1) == targets).mean():.2%}")
