"""What all tests share."""

from __future__ import annotations

import os

import torch

# Small tensors on shared cores: threads that wait for one another cost more than they give.
torch.set_num_threads(1)

# What was measured on this machine must not move what is tested.
os.environ["OFFLOAD_MACHINE"] = os.devnull
