"""trainkit's sampler on a copy of the trained model: what an engine needs to generate anywhere else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from trainkit.models.backend import use_fast_exact_matmul
from trainkit.rollouts.engines import Request, ServedModel, Weights
from trainkit.rollouts.sampler import Generated

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Replica:
    """A copy of the served model with trainkit's sampler, in another thread, process or machine than the training.

    On the same kind of device, and with as many threads of torch, its answers are bit-equal to those of the engine
    ``local``. It sets the library for matrix products of this process (`trainkit.models.backend`), as a trainer does.

    Args:
        served: the model, which becomes the replica's own: give a copy.
        device: where it generates.
    """

    def __init__(self, served: ServedModel, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        use_fast_exact_matmul(self.device, one_library=served.options.get("beside_training", False))
        self.served = replace(served, model=served.model.to(self.device).eval())
        self.sampler = self.served.sampler()
        self.version: int | None = None
        """The version of the weights; None before any were loaded."""

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copy ``weights`` into the model, if all of them fit.

        Raises:
            EngineError: as `ServedModel.fitting`; nothing is changed then.
        """
        tensors, state = self.served.fitting(weights), self.served.model.state_dict()
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
        self.version = weights.version

    def generate(self, request: Request) -> Generated:
        """Return the responses, with their tensors on the CPU."""
        assert self.version is not None, "an engine loads weights before it generates"
        with self._autocast():
            images = None if request.images is None else request.images.to(self.device)
            responses = self.sampler.generate(
                request.queries, request.settings, request.seeds, self.version, images=images
            )
        logprobs, entropy, hidden = (
            None if x is None else x.cpu() for x in (responses.logprobs, responses.entropy, responses.hidden)
        )
        return replace(responses, logprobs=logprobs, entropy=entropy, hidden=hidden)

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward passes, which accelerate enters in the training process."""
        dtype = PRECISIONS.get(self.served.mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)
