"""Randomness keyed by purpose: what is drawn depends on the seed and the place in the run, on nothing drawn before.

So evaluation cannot disturb training, resuming needs no generator states, and the caller's global generators
are left as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed from the run's seed, a purpose such as ``"sample"``, and places such as rank and step (F-14)."""
    state = np.random.SeedSequence([seed, crc32(purpose.encode()), *keys]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generator(seed: int, purpose: str, *keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator on ``device`` for one purpose at one place."""
    return torch.Generator(device).manual_seed(derive_seed(seed, purpose, *keys))


@contextmanager
def global_rng(seed: int, purpose: str, *keys: int, device: torch.device) -> Iterator[None]:
    """Within, torch's global generators are seeded for one purpose; afterwards they are as before.

    For what takes no generator: the initialisation of weights, and dropout.
    """
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(seed, purpose, *keys))
        yield
