"""Functions of `trl.core`."""

from __future__ import annotations

import random
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from trainkit import functional as F
from trainkit_migrate import refusing

if TYPE_CHECKING:
    from torch import Tensor


WANDB_PADDING = -1
"""What `stack_dicts` pads with."""


def top_k_top_p_filtering(
    logits: Tensor, top_k: int = 0, top_p: float = 1.0, filter_value: float = -torch.inf, min_tokens_to_keep: int = 1
) -> Tensor:
    """Return logits [B, V] with ``filter_value`` but for the ``top_k`` largest, and of these the ``top_p`` of the mass.

    Raises:
        ValueError: more than one token should be kept in any case.
    """
    if min_tokens_to_keep != 1:
        raise ValueError(f"min_tokens_to_keep should be 1; given {min_tokens_to_keep}; raise top_k or top_p instead")
    kept = F.truncate_logits(logits, top_k=int(top_k), top_p=top_p)
    return kept.masked_fill(kept == -torch.inf, filter_value)


@torch.no_grad()
def respond_to_batch(model: Any, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return ``txt_len`` sampled tokens after each query, whatever they are. [B, P] -> [B, ``txt_len``].

    EOS ends nothing; `PPOTrainer.generate` samples responses that end.

    Args:
        model: a model whose first output are the logits.
        queries: token ids of one length, without padding.
        txt_len: the number of tokens.
        top_k: of how many tokens the most likely are sampled from; 0: of all.
        top_p: the mass of the tokens that are sampled from.
    """
    ids = queries
    for _ in range(txt_len):
        logits = top_k_top_p_filtering(model(ids)[0][:, -1].float(), top_k, top_p)
        ids = torch.cat([ids, logits.softmax(-1).multinomial(1)], dim=1)
    return ids[:, queries.shape[1] :]


def set_seed(seed: int) -> None:
    """Seed `random`, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class LengthSampler:
    """Draws lengths from ``min_value`` to ``max_value - 1``, by the random numbers of NumPy.

    Raises:
        ValueError: there is no such length.
    """

    def __init__(self, min_value: int, max_value: int) -> None:
        if not (isinstance(min_value, int) and isinstance(max_value, int) and min_value < max_value):
            raise ValueError(f"lengths are integers from min_value to max_value - 1; given {min_value}, {max_value}")
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        """Return a length."""
        return int(np.random.choice(self.values))


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean over the mask: of all entries, 0 if it selects none, or along an axis."""
    if axis is None:
        return F.masked_mean(values, mask.bool())
    found: Tensor = (values * mask).sum(axis=axis) / mask.sum(axis=axis)  # type: ignore[call-overload]
    return found


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance over the mask.

    Raises:
        ValueError: the mask selects nothing, or a single entry, which has no unbiased variance.
    """
    count = mask.sum()
    if count < (2 if unbiased else 1):
        raise ValueError(f"the mask selects {int(count)} entries, of which there is no variance; raise mini_batch_size")
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return values with mean 0 and variance 1 over the mask, and 0 elsewhere; keep the mean without ``shift_mean``."""
    return F.whiten(values, mask.bool(), shift_mean=shift_mean)


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """Return values with mean 0 and variance 1; keep the mean without ``shift_mean``."""
    return F.whiten(values, torch.ones_like(values, dtype=torch.bool), shift_mean=shift_mean)


def logprobs_from_logits(logits: Tensor, labels: Tensor, gather: bool = True) -> Tensor:
    """Return the log-probabilities of labels [B, T], or of all tokens [B, T, V]."""
    if not gather:
        return logits.log_softmax(dim=-1)
    return F.token_logprobs(logits.flatten(0, -2), labels.flatten()).view_as(labels)


entropy_from_logits = F.entropy_from_logits


def clip_by_value(x: Tensor, tensor_min: Any, tensor_max: Any) -> Tensor:
    """Return ``x`` between two tensors or numbers."""
    return torch.max(torch.min(x, torch.as_tensor(tensor_max)), torch.as_tensor(tensor_min))


def flatten_dict(nested: Mapping[str, Any], sep: str = "/") -> dict[str, Any]:
    """Return nested dictionaries as one, with the keys joined by ``sep``.

    Raises:
        ValueError: a key contains ``sep``.
    """
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if sep in key:
            raise ValueError(f"the key {key!r} contains the separator {sep!r}")
        if isinstance(value, MutableMapping):
            found |= {f"{key}{sep}{inner}": each for inner, each in flatten_dict(value, sep).items()}
        else:
            found[key] = value
    return found


def stack_dicts(stats_dicts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the flattened tensors of several dictionaries, padded with -1 and stacked by their keys."""
    return {
        key: pad_sequence([each[key].flatten() for each in stats_dicts], batch_first=True, padding_value=WANDB_PADDING)
        for key in stats_dicts[0]
    }


def add_suffix(input_dict: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """Return the dictionary with a suffix after each key."""
    return {f"{key}{suffix}": value for key, value in input_dict.items()}


def pad_to_size(tensor: Tensor, size: int, dim: int = 1, padding: int = 50256) -> Tensor:
    """Return the tensor [B, T] padded on the right to ``size``."""
    missing = size - tensor.size()[dim]
    return torch.nn.functional.pad(tensor, (0, missing), "constant", padding) if missing else tensor


def convert_to_scalar(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return statistics with tensors and arrays of one entry as numbers."""
    found = dict(stats)
    for key, value in stats.items():
        if isinstance(value, torch.Tensor | np.ndarray) and int(np.prod(value.shape)) == 1:
            found[key] = value.item()
    return found


def stats_to_np(stats_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return statistics with tensors as arrays of NumPy."""
    found = {}
    for key, value in stats_dict.items():
        tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        if isinstance(tensor, torch.Tensor):
            tensor = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        found[key] = float(tensor) if isinstance(tensor, int | float) else tensor
    return found


def average_torch_dicts(list_of_dicts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means of the tensors of several dictionaries by their keys."""
    return {key: torch.stack([each[key] for each in list_of_dicts]).mean(0) for key in list_of_dicts[0]}


__getattr__ = refusing(__name__)
