"""What surrounds the README's lines in the script that its commands run: a small job before, and its result after."""

import dataclasses  # noqa: F401  for the README's lines
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from splittune import SplitConfig  # noqa: F401  for the README's lines

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.CrossEntropyLoss()
dataset = TensorDataset(torch.randn(29, 6).double(), torch.randint(3, (29,)))
loader = DataLoader(dataset, batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(1))
# the README's lines stand here
torch.save(model.state_dict(), f"state{os.environ.get('RANK', '')}.pt")
if torch.distributed.is_initialized():  # as the README says
    torch.distributed.destroy_process_group()
    # DistributedDataParallel holds the group on, and gloo's threads may abort Python's own farewell (pytorch #179291)
    os._exit(0)
