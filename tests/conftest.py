"""What all tests share."""

from __future__ import annotations

import torch

# Small tensors on shared cores: threads that wait for one another cost more than they give.
torch.set_num_threads(1)
