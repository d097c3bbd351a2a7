"""Join the loop of torch_loop.py to a hub: `python torch_joined.py tcp://HUB:5555 NAME STATE_FOLDER`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edgeasync
from edgeasync.data import load_digits

digits = load_digits()
x, y = torch.tensor(digits.x), torch.tensor(digits.y)
torch.manual_seed(0)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True)

module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(module.parameters(), lr=0.003)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)

address, name, state = sys.argv[1:]
with edgeasync.join(address, module, optimizer, name=name, state=state, also=[schedule]) as session:
    for epoch in range(10):
        module.train()
        for inputs, targets in session.batches(loader):
            loss = nn.functional.cross_entropy(module(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        module.eval()
        with torch.no_grad():
            accuracy = float((module(x[1400:]).argmax(1) == y[1400:]).float().mean())
        print(f"epoch {epoch}, step {session.steps}, accuracy: {accuracy:.4f}", flush=True)
