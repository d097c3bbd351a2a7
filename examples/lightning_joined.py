"""Join Lightning's Trainer to a hub: `python lightning_joined.py tcp://HUB:5555 NAME STATE_FOLDER`."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import sys
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edgeasync
from edgeasync.data import load_digits


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        inputs, targets = batch
        self.log("accuracy", (self.layers(inputs).argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)]


digits = load_digits()
x, y = torch.tensor(digits.x), torch.tensor(digits.y)
torch.manual_seed(0)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True)
held_out = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=397)

module = Digits()
trainer = lightning.Trainer(
    max_epochs=10,
    gradient_clip_val=1.0,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
address, name, state = sys.argv[1:]
with edgeasync.join(address, module, name=name, state=state) as session:
    trainer.fit(module, session.batches(loader), held_out)
print(f"step {session.steps}, {trainer.global_step} here, accuracy: {trainer.callback_metrics['accuracy']:.4f}")
