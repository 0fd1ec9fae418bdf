"""Decoding steps of fixed shapes, which CUDA graphs replay without the model's Python code and without launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARMUP = 2
"""Steps before a graph is captured: libraries make their workspaces in the first ones."""

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class FixedStep:
    """A step of b rows whose inputs and results stay where they are; on a CUDA device a graph of it.

    The step attends to all columns that the cache has room for. Those that are not written yet are masked, so shapes do
    not depend on the number of tokens so far. A graph reads the weights where they are, and under autocast `Casts` of
    them, which live as long as the response is sampled.

    Args:
        step: the model's step ``step(ids [b, 1], mask [b, 1, 1, W], positions [b, 1])``; W is the room of the cache. It
            writes keys and values at the column `at`.
        real: which columns are no padding, bool [b, W].
        width: the number of columns written so far.
        layers: the layers of the cache, with the attribute ``at``.
    """

    def __init__(self, step: Step, real: Tensor, width: int, layers: list[Any]) -> None:
        rows, device = len(real), real.device
        self.ids = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.mask = real[:, None, None].clone()
        self.mask[..., width:] = False
        self.at = torch.full((1,), width, device=device)
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
        self.mask[..., width] = True
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
            return self.step(self.ids, self.mask, self.positions)
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
