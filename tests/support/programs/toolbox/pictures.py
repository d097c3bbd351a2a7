"""Averages a network for folders of pictures; the environment says which of the ranks this process is.

    python pictures.py DATA SIDE EPOCHS

DATA has a folder of pictures for each class in `train` and in `val`.
"""

import sys

import edgeasync.async_train as toolbox
from edgeasync.async_train import AsyncModelAverager
from edgeasync.async_train.distributed import init_distributed

root, side, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, world_size = init_distributed(backend="nccl")
transforms = toolbox.data.transforms
normalize = transforms.Normalize(mean=[0.4, 0.4, 0.4], std=[0.2, 0.2, 0.2])
pictures = toolbox.data.ImageNet(
    root=root,
    split="train",
    transform=transforms.Compose(
        [
            transforms.RandomResizedCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            normalize,
        ]
    ),
)
part = toolbox.data.Subset(pictures, range(rank, len(pictures), world_size))
loader = toolbox.data.DataLoader(part, batch_size=8, shuffle=True, num_workers=4, pin_memory=True)
held_out = toolbox.data.ImageNet(
    root=root,
    split="val",
    transform=transforms.Compose(
        [transforms.Resize(side + side // 8), transforms.CenterCrop(side), transforms.ToTensor(), normalize]
    ),
)
test_loader = toolbox.data.DataLoader(held_out, batch_size=20, shuffle=False, num_workers=4, pin_memory=True)

device = "cuda" if toolbox.cuda.is_available() else "cpu"
model = toolbox.models.resnet50(pretrained=True).to(device)
optimizer = toolbox.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
loss_fn = toolbox.nn.CrossEntropyLoss()
averager = AsyncModelAverager(
    model=model,
    world_size=world_size,
    rank=rank,
    averaging_frequency=2,
    averaging_policy="adaptive",
    min_averaging_frequency=1,
    max_averaging_frequency=5,
    adaptation_metric="loss_variance",
    communication_backend="nccl",
    device=device,
)
for epoch in range(epochs):
    for inputs, targets in loader:
        loss = averager.train_step(
            inputs=inputs.to(averager.device),
            targets=targets.to(averager.device),
            optimizer=optimizer,
            loss_fn=loss_fn,
        )
    print(f"epoch {epoch}: loss {loss:.4f}, {averager.last_averaging_iteration} steps since the last average")
averager.stop()
print(f"accuracy: {averager.evaluate(test_loader):.2%}")
