"""Noise on embeddings during training (NEFTune)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainkit.models import Policy


@contextmanager
def embedding_noise(policy: Policy, alpha: float) -> Iterator[None]:
    """Add noise U(−1, 1) · α / sqrt(L · D) to the embeddings of a sample of L tokens; none to padding.

    NEFTune: Jain et al. 2023, algorithm 1. The noise is added within the context, and in training mode only. It is
    sampled for each forward pass from the global generator, as dropout is, so it depends on how a batch is divided
    into micro-batches. Each packed sample has its own L. Within the context rows are padded: joined ones lack their
    last tokens, and so L.

    Args:
        policy: the policy whose input embeddings get the noise.
        alpha: α; 0 adds none.
    """
    model = policy.model
    if not alpha or not model.training:
        yield
        return
    lengths: list[Tensor] = []

    def enter(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        lengths[:] = [_lengths(inputs["attention_mask"], inputs["position_ids"])]

    def add(_: Any, __: Any, embedded: Tensor) -> Tensor:
        scale = torch.where(lengths[0] > 0, alpha / (lengths[0].clamp(min=1) * embedded.size(-1)).sqrt(), 0.0)
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * scale.unsqueeze(-1).to(embedded.dtype)

    handles = [
        model.base_model.register_forward_pre_hook(enter, with_kwargs=True),
        model.get_input_embeddings().register_forward_hook(add),
    ]
    before = policy.needs_mask, policy.joins_rows
    policy.needs_mask, policy.joins_rows = True, False  # the mask tells padding from tokens
    try:
        yield
    finally:
        policy.needs_mask, policy.joins_rows = before
        for handle in handles:
            handle.remove()


def _lengths(mask: Tensor | None, positions: Tensor) -> Tensor:
    """Return the length of the sample that each token belongs to; 0 for padding. -> [B, T]."""
    if mask is not None:
        return mask.sum(1, keepdim=True) * mask
    begins = positions == 0
    sample = begins.long().cumsum(1) - 1
    counts = torch.zeros_like(positions).scatter_add_(1, sample, torch.ones_like(positions))
    each = counts.gather(1, sample)
    return each * (each > 1)  # no sample is of one token, and every token of packed padding is one
