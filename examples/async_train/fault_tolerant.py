"""Train; after a kill, run the same command to continue: `python fault_tolerant.py [DATA]`."""

import sys

from edgeasync.async_train import FaultTolerantTrainer, data, nn, optim

root = sys.argv[1] if len(sys.argv) > 1 else "data"
transforms = data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
digits = data.MNIST(root, train=True, transform=transform)
test_loader = data.DataLoader(data.MNIST(root, train=False, transform=transform), batch_size=1000)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trainer = FaultTolerantTrainer(model, checkpoint_dir="ckpt", checkpoint_frequency=1000, recovery_strategy="latest")
print("training", flush=True)
trainer.train(digits, epochs=20, optimizer=optim.Adam(lr=0.001), loss_fn=nn.CrossEntropyLoss())
for inputs, targets in test_loader:
    print(f"accuracy: {(model(inputs).argmax(axis=1) == targets).mean():.2%}")
