"""Exchange often during warm-up, and alert at a threshold: `python warm_up_and_monitor.py [DATA]`."""

import sys

from edgeasync.async_train import AsyncTrainer, AsyncTrainingMonitor, data, nn, optim

root = sys.argv[1] if len(sys.argv) > 1 else "data"
transforms = data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
digits = data.MNIST(root, train=True, transform=transform)
test_loader = data.DataLoader(data.MNIST(root, train=False, transform=transform), batch_size=1000)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trainer = AsyncTrainer(model, warm_up_epochs=2, warm_up_sync_frequency=5, regular_sync_frequency=10, workers=2)
monitor = AsyncTrainingMonitor(
    trainer,
    divergence_metrics=["loss_variance", "gradient_norm"],
    alert_threshold=0.5,
    remediation_strategy="increase_sync_frequency",
)
monitor.on_alert(lambda alert: print("alert:", alert.detail))
run = trainer.train(digits, epochs=50, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss())
frequencies = sorted(map(int, set(run.history["local_steps"])))
print(f"{len(monitor.alerts)} alerts, exchanges after {frequencies} steps")
for inputs, targets in test_loader:
    print(f"accuracy: {(model(inputs).argmax(axis=1) == targets).mean():.2%}")
