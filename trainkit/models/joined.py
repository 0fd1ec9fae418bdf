"""Passes without padding: the tokens of all rows are one row, in which each text attends to itself alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.data import Sequences


@dataclass(frozen=True)
class JoinedRows:
    """The N tokens of S texts, one after the other, as far as their states are needed.

    The texts are the rows, or the samples of packed rows. If prompts are shared, they are the G different prompts, and
    then what follows the prompt in each row, whose keys are those of its prompt and its own.
    """

    ids: Tensor
    """Token ids [N]."""
    positions: Tensor
    """Positions [N], counted from 0 in every text, or from the end of its prompt."""
    queries: Tensor
    """Where the queries of each text begin, and the number of them all: int32 [S + 1]."""
    keys: Tensor
    """The same of the keys: int32 [S + 1]."""
    key_index: Tensor | None
    """The token of each key [K]; None: the keys are the tokens."""
    read: Tensor
    """The states in which the chosen tokens were chosen, row after row, as indices of the tokens."""

    @classmethod
    def of_rows(cls, sequences: Sequences, *, shared: bool, chosen: Tensor | None = None) -> JoinedRows:
        """Join sequences [B, T].

        Args:
            sequences: the rows.
            shared: whether each prompt is there once; the rows must not be packed then.
            chosen: bool [B, T]: the tokens in whose states something is read; by default the response tokens.
        """
        chosen = sequences.response_mask if chosen is None else chosen
        after = chosen.flip(1).cumsum(1).flip(1) - chosen.long()  # the chosen tokens behind each column
        needed = sequences.attention_mask & (after > 0)
        return (_with_prompts if shared else _separate)(sequences, needed, chosen)

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of a model: one row [1, N], and this layout for `attend`."""
        # transformers takes a mask of four dimensions as it is, and makes none [1, 1, N, N]; `attend` ignores it
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.ids.device)
        row = {"input_ids": self.ids.unsqueeze(0), "position_ids": self.positions.unsqueeze(0)}
        return {**row, "attention_mask": mask, "use_cache": False, "joined": self}

    @cached_property
    def spans(self) -> list[tuple[slice, slice]]:
        """The queries and the keys of each text."""
        ends = zip(pairwise(self.queries.tolist()), pairwise(self.keys.tolist()), strict=True)
        return [(slice(*queries), slice(*keys)) for queries, keys in ends]

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, of a text."""
        longest = torch.stack([self.queries.diff().max(), self.keys.diff().max()])
        queries, keys = longest.tolist()
        return queries, keys


def _separate(sequences: Sequences, needed: Tensor, chosen: Tensor) -> JoinedRows:
    rows = torch.arange(len(sequences), device=needed.device).unsqueeze(1).expand_as(needed)[needed]
    begins = F.pad(rows.diff() != 0, (1, 0), value=True)
    if sequences.segments is not None:
        begins |= F.pad(sequences.segments[needed].diff() != 0, (1, 0), value=True)
    ends = F.pad(begins.nonzero().squeeze(1), (0, 1), value=len(rows)).int()
    return JoinedRows(
        ids=sequences.input_ids[needed],
        positions=sequences.position_ids[needed],
        queries=ends,
        keys=ends,
        key_index=None,
        read=_places(needed)[:, :-1][chosen[:, 1:]],
    )


def _with_prompts(sequences: Sequences, needed: Tensor, chosen: Tensor) -> JoinedRows:
    unique, of = different_prompts(sequences)
    real = unique >= 0
    lengths = real.sum(1)  # [G]
    first = lengths.cumsum(0) - lengths  # the first token of each prompt
    own = needed & ~sequences.prompt_mask
    follows = own.sum(1)  # [B]
    some = follows > 0  # of a response of one token no state but the prompt's is needed
    before, rest = lengths[of][some], follows[some]
    queries, keys = torch.cat([lengths, rest]), torch.cat([lengths, before + rest])
    ends = F.pad(queries.cumsum(0), (1, 0)).int()
    ends_of_keys = F.pad(keys.cumsum(0), (1, 0)).int()
    text = torch.repeat_interleave(torch.arange(len(keys), device=keys.device), keys)
    column = torch.arange(len(text), device=keys.device) - ends_of_keys[text]
    common, begin = F.pad(before, (len(lengths), 0)), torch.cat([first, first[of][some]])
    in_prompt = column < common[text]
    places = _places(own) + lengths.sum()
    in_prompts = first[of].unsqueeze(1) + sequences.position_ids
    columns = torch.arange(unique.size(1), device=unique.device).expand_as(unique)
    return JoinedRows(
        ids=torch.cat([unique[real], sequences.input_ids[own]]),
        positions=torch.cat([columns[real], sequences.position_ids[own]]),
        queries=ends,
        keys=ends_of_keys,
        key_index=torch.where(in_prompt, begin[text] + column, ends[text] + column - common[text]),
        read=torch.where(sequences.prompt_mask, in_prompts, places)[:, :-1][chosen[:, 1:]],
    )


def different_prompts(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return the different prompts of rows, -1 in the padding at their right [G, P], and the prompt of each row [B]."""
    width, total = int(sequences.prompt_mask.sum(1).max()), sequences.input_ids.size(1)
    columns = begins(sequences) + torch.arange(width, device=sequences.input_ids.device)
    ids = sequences.prompt_ids.gather(1, columns.clamp(max=total - 1)).masked_fill(columns >= total, -1)
    unique, of = torch.unique(ids, dim=0, return_inverse=True)
    return unique, of


def begins(sequences: Sequences) -> Tensor:
    """Return the column of the first real token of each row [B, 1]: 0, unless rows are padded on the left."""
    return sequences.attention_mask.int().argmax(1, keepdim=True)


def _places(mask: Tensor) -> Tensor:
    """Return the index of each True among all, row after row; that of others means nothing. [B, T] -> [B, T]."""
    return (mask.flatten().cumsum(0) - 1).view_as(mask)


# ------------------------------------------------------------------------------------------------------------ attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    joined: JoinedRows,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
) -> Tensor:
    """Return causal attention within each text. [1, H, N, D], [1, K, N, D], [1, K, N, D] -> [1, N, H, D].

    Args:
        query: of all tokens.
        key: of all tokens; H is a multiple of the number of its heads.
        value: as ``key``.
        joined: where texts begin.
        scaling: of the products; None: 1/√D.
        dropout: the probability with which weights are set to 0.
        sliding_window: to how many tokens, itself included, a token attends at most; None: to all before it.
    """
    if joined.key_index is not None:
        key, value = key[:, :, joined.key_index], value[:, :, joined.key_index]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        return _by_kernel(query, key, value, joined, scaling, sliding_window)
    texts = [
        F.scaled_dot_product_attention(
            query[:, :, queries],
            key[:, :, keys],
            value[:, :, keys],
            _window(queries, keys, sliding_window, query.device),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.size(1) != key.size(1),
        )
        for queries, keys in joined.spans
    ]
    return torch.cat(texts, 2).transpose(1, 2).contiguous()


def _window(queries: slice, keys: slice, width: int | None, device: torch.device) -> Tensor:
    """Return the mask of a text, of whose keys the last ones are those of its queries: bool [queries, keys]."""
    tokens, all_keys = queries.stop - queries.start, keys.stop - keys.start
    mask = torch.ones(tokens, all_keys, dtype=torch.bool, device=device).tril(all_keys - tokens)
    return mask if width is None else mask.triu(all_keys - tokens - width + 1)


@cache
def _kernel() -> tuple[Callable[..., Any], bool, bool]:
    """Return torch's attention of texts of any lengths, whether it has windows, and whether it has grouped queries."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn, "window_size" in parameters, "enable_gqa" in parameters


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, joined: JoinedRows, scaling: float | None, width: int | None
) -> Tensor:
    kernel, has_windows, has_groups = _kernel()
    groups = query.size(1) // key.size(1)
    if groups > 1 and not has_groups:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if width is not None and not has_windows:
        raise NotImplementedError("torch's kernel for texts of any lengths has no windows here")
    left = -1 if width is None else width - 1
    causal: dict[str, Any] = {"window_size": (left, 0)} if has_windows else {"is_causal": True}
    if groups > 1 and has_groups:
        causal["enable_gqa"] = True
    columns = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    found: Tensor = kernel(*columns, joined.queries, joined.keys, *joined.longest, scale=scaling, **causal)
    return found.unsqueeze(0)
