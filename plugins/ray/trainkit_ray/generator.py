"""What runs in an actor: a replica of the model, or an engine; and how tensors travel to it and back."""

from __future__ import annotations

import io
import os
import socket
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit import PluginConfig
from trainkit.rollouts import Generated, Replica, Request, ServedModel, Weights, start

Packed = tuple[Any, str, tuple[int, ...]]
"""The bytes of a tensor as a NumPy array, its dtype and its shape. Ray stores arrays without pickling them, and NumPy
has no bfloat16."""
NUMBERS = ("logprobs", "entropy", "hidden")


class Board:
    """References to what one process has stored in Ray, for the others of its machine.

    They are in lists, because Ray replaces a reference by what it refers to.
    """

    def __init__(self) -> None:
        self.held: dict[str, list[Any]] = {}

    def put(self, key: str, references: list[Any]) -> None:
        """Keep references under ``key``."""
        self.held[key] = references

    def get(self, key: str) -> list[Any]:
        """Return what is kept under ``key``."""
        return self.held[key]


class Generator:
    """Samples with a copy of the model.

    Args:
        model: the pickled `trainkit.rollouts.ServedModel`.
        threads: threads of torch.
        device: where it samples.
        engine: what samples.
    """

    def __init__(self, model: bytes, threads: int, device: str, engine: str | PluginConfig) -> None:
        torch.set_num_threads(threads)
        own = engine == "local"
        served = torch.load(io.BytesIO(model), map_location=device if own else "cpu", weights_only=False)
        self.replica = Replica(served, device) if own else Started(engine, served)

    def place(self) -> tuple[str, int]:
        """Return the machine and the process."""
        return socket.gethostname(), os.getpid()

    def load(self, weights: tuple[int, dict[str, Packed]]) -> None:
        """Sample with these weights from now on."""
        version, tensors = weights
        self.replica.load(Weights(version, lambda: ((name, viewed(each)) for name, each in tensors.items())))

    def generate(self, request: Request) -> tuple[Generated, dict[str, Packed]]:
        """Return the responses, with the numbers about their tokens apart."""
        made = self.replica.generate(request)
        numbers = {name: packed(getattr(made, name)) for name in NUMBERS if getattr(made, name) is not None}
        return Generated(made.ids, made.reasons, made.versions), numbers


class Started:
    """An engine in this process, with the interface of `trainkit.rollouts.Replica`."""

    def __init__(self, engine: str | PluginConfig, served: ServedModel) -> None:
        self.engine = start(engine, replace(served, processes=1))

    def load(self, weights: Weights) -> None:
        """Generate with ``weights`` from now on."""
        self.engine.load(weights)

    def generate(self, request: Request) -> Generated:
        """Return the responses."""
        return self.engine.submit(request).result()


def unpacked_answer(answer: tuple[Generated, dict[str, Packed]]) -> Generated:
    """Return what `Generator.generate` returned as one object."""
    made, numbers = answer
    tensors = {name: unpacked(each) for name, each in numbers.items()}
    return Generated(made.ids, made.reasons, made.versions, **tensors)


def packed(tensor: Tensor) -> Packed:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def unpacked(given: Packed) -> Tensor:
    """Return the tensor that was packed; a copy, because what Ray stores cannot be written to."""
    return viewed(given).clone()


def viewed(given: Packed) -> Tensor:
    """Return the tensor that was packed, to be read, in the memory where Ray stores it once for a machine."""
    data, dtype, shape = given
    if not data.size:  # which has no strides that fit another type
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no tensors that cannot be written to
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
