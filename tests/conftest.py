"""One thread per test: the models are tiny, and threads that wait for each other cost more."""

from __future__ import annotations

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
