"""Decoding steps of fixed shapes, which CUDA graphs replay without the model's Python code and without launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainkit.models.joined import FilledColumns, no_mask

WARMUP = 2
"""Steps before a graph is captured: libraries make their workspaces in the first ones."""

Step = Callable[..., tuple[Tensor, Tensor | None]]


class FixedStep:
    """A step of b rows whose inputs and results stay where they are; on a CUDA device a graph of it.

    Attention is to the columns that each row has filled, of all that the cache has room for, so shapes do not depend on
    the number of tokens so far. A graph reads the weights where they are, and under autocast `Casts` of them, which
    live as long as responses are sampled.

    Args:
        step: the model's step ``step(ids [b, 1], mask [1, 1, 1, 1], positions [b, 1], joined=...)``, which writes keys
            and values at the column `at`, and attends by what is given as ``joined``.
        rows: b.
        device: the model's device.
        layers: the layers of the cache, with the attribute ``at``.
    """

    def __init__(self, step: Step, rows: int, device: torch.device, layers: list[Any]) -> None:
        self.ids = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.step, self.layers = step, layers
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: tuple[Tensor, Tensor | None] | None = None

    def play(self, last: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
        """Make the step for the tokens ``last`` [b] at the positions ``lengths`` [b], which are written at ``width``.

        The results are overwritten by the next call.
        """
        self.ids.copy_(last.unsqueeze(1))
        self.positions.copy_(lengths.unsqueeze(1))
        self.at.fill_(width)
        if self.ids.device.type != "cuda":
            return self._run()
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        assert self.results is not None
        self.graph.replay()
        return self.results

    def _run(self) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers:
            layer.at = self.at
        try:
            filled = FilledColumns(self.at - self.positions.squeeze(1), self.positions.squeeze(1) + 1)
            return self.step(self.ids, no_mask(self.ids.device), self.positions, joined=filled)
        finally:
            for layer in self.layers:
                layer.at = None

    def _capture(self) -> None:
        """Record the graph. Every run writes the same values at the same column, so it can be made several times."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARMUP):
                self._run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may train
            self.results = self._run()
        self.graph = graph
