"""Every class that trains in one process, with every argument: `python one_process.py DATA`."""

import sys
import threading

import edgeasync.async_train as toolbox
from edgeasync.async_train import (
    AsyncGradientAccumulator,
    AsyncTrainer,
    AsyncTrainingMonitor,
    AsyncWorker,
    FaultTolerantTrainer,
    ParameterServer,
)
from edgeasync.async_train.data import DataLoader

nn, optim = toolbox.nn, toolbox.optim
transforms = toolbox.data.transforms
transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.3,), (0.35,))])
digits = toolbox.data.MNIST(root=sys.argv[1], train=True, download=True, transform=transform)
test_loader = DataLoader(
    toolbox.data.MNIST(root=sys.argv[1], train=False, download=True, transform=transform), batch_size=100
)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def tell(name, model):
    right = sum(int((model(inputs).argmax(axis=1) == targets).sum()) for inputs, targets in test_loader)
    print(f"{name}: {right / len(test_loader.dataset):.2%}", flush=True)


model = network()
server = ParameterServer(
    model=model,
    port=0,
    update_rule="async_sgd",
    staleness_policy="adaptive_lr",
    staleness_lr_factor=0.9,
    max_staleness=10,
    checkpoint_dir="server",
    checkpoint_frequency=100,
)
server.start()


def work(number):
    loader = DataLoader(toolbox.data.Subset(digits, range(number, len(digits), 2)), batch_size=32, shuffle=True)
    worker = AsyncWorker(server_address=server.hub.address, local_batch_size=32, update_frequency=1, device="cuda")
    worker.train(
        dataloader=loader,
        epochs=10,
        optimizer=optim.SGD(lr=0.02, momentum=0.9),
        loss_fn=nn.CrossEntropyLoss(),
        metrics=["accuracy", "loss"],
        log_frequency=100,
    )


workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for worker in workers:
    worker.start()
server.wait_for_workers(2)
tell("server", model)
server.stop()

for name, arguments in {
    "accumulated": {"accumulation_steps": 2},
    "accumulated by size": {"base_batch_size": 16, "target_batch_size": 32, "adaptive_accumulation": True},
}.items():
    accumulator = AsyncGradientAccumulator(model=network(), device="cuda", **arguments)
    optimizer, loss_fn = optim.SGD(lr=0.02, momentum=0.9), nn.CrossEntropyLoss()
    losses = []
    for _ in range(10):
        for inputs, targets in DataLoader(digits, batch_size=16, shuffle=True):
            loss = accumulator.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=loss_fn)
            if accumulator.is_update_step():
                losses.append(loss)
    assert len(losses) == accumulator.steps
    tell(name, accumulator.model)

trainer = FaultTolerantTrainer(
    model=network(),
    checkpoint_dir="kept",
    checkpoint_frequency=1000,
    recovery_strategy="latest",
    device="cuda",
)
trainer.train(dataset=digits, epochs=10, optimizer=optim.Adam(lr=0.002), loss_fn=nn.CrossEntropyLoss())
tell("fault-tolerant", trainer.model)

model = network()
monitor = AsyncTrainingMonitor(
    model=model,
    divergence_metrics=["loss_variance", "gradient_norm"],
    alert_threshold=0.5,
    remediation_strategy="increase_sync_frequency",
)
warm = AsyncTrainer(model=model, warm_up_epochs=2, warm_up_sync_frequency=10, regular_sync_frequency=20)
warm.train(dataset=digits, epochs=40, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss())
tell("warm-up", model)
