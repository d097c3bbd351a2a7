"""Train digits as in torch's tutorials: in one process, on all data."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from edgeasync.data import load_digits

digits = load_digits()
x, y = torch.tensor(digits.x), torch.tensor(digits.y)
torch.manual_seed(0)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True)

module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(module.parameters(), lr=0.003)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)

for epoch in range(10):
    module.train()
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    schedule.step()
    module.eval()
    with torch.no_grad():
        accuracy = float((module(x[1400:]).argmax(1) == y[1400:]).float().mean())
    print(f"epoch {epoch}, accuracy: {accuracy:.4f}")
