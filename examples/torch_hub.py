"""Run a hub for the joined loops: `python torch_hub.py ADDRESS torch|lightning|huggingface FOLDER`."""

# pyright: reportMissingImports=false

import contextlib
import sys
from typing import Any

import torch
from torch import nn

import edgeasync


def make_module(loop: str) -> Any:
    """Return a module whose arrays have the names and shapes of that loop's model."""
    if loop == "huggingface":
        from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - large

        config = BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=12,
        )
        return BertForSequenceClassification(config)
    layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    return nn.ModuleDict({"layers": layers}) if loop == "lightning" else layers


address, loop, folder = sys.argv[1:]
torch.manual_seed(0)
model = edgeasync.torch.model(make_module(loop))
with contextlib.suppress(KeyboardInterrupt), edgeasync.Hub(model, run=folder, bind=address) as hub:
    print(hub.address, flush=True)
    hub.wait()
