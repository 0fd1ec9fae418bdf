"""Passes without padding: the tokens of all rows are one row, in which each text attends to itself alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
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
    places: tuple[Tensor, Tensor]
    """The row and the column of each token [N] each; of a shared prompt in the first of its rows."""
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
        row = {"input_ids": self.ids.unsqueeze(0), "position_ids": self.positions.unsqueeze(0)}
        return {**row, "attention_mask": no_mask(self.ids.device), "use_cache": False, "joined": self}

    @cached_property
    def spans(self) -> list[tuple[slice, slice]]:
        """The queries and the keys of each text."""
        ends = zip(pairwise(self.queries.tolist()), pairwise(self.keys.tolist()), strict=True)
        return [(slice(*queries), slice(*keys)) for queries, keys in ends]

    @cached_property
    def blocks(self) -> dict[int | None, Any]:
        """Masks of FlexAttention, by the width of the window, for all layers of a pass."""
        return {}

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, of a text."""
        longest = torch.stack([self.queries.diff().max(), self.keys.diff().max()])
        queries, keys = longest.tolist()
        return queries, keys


@dataclass(frozen=True)
class FilledColumns:
    """Of each of b rows of a cache with W columns, the columns that are filled; the last is that of the one query."""

    begins: Tensor
    """The first column of each row [b]."""
    counts: Tensor
    """The number of columns of each row [b]."""

    def mask(self, width: int, window: int | None) -> Tensor:
        """Return which of ``width`` columns each query attends to: bool [b, 1, 1, W]."""
        ends = (self.begins + self.counts).unsqueeze(1)
        first = self.begins.unsqueeze(1) if window is None else torch.maximum(self.begins.unsqueeze(1), ends - window)
        columns = torch.arange(width, device=ends.device)
        return ((columns >= first) & (columns < ends))[:, None, None]


def no_mask(device: torch.device) -> Tensor:
    """Return a mask that transformers takes as it is, for it has four dimensions; `attend` ignores it."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _separate(sequences: Sequences, needed: Tensor, chosen: Tensor) -> JoinedRows:
    rows, columns = needed.nonzero(as_tuple=True)
    places = rows, columns
    begins = F.pad(rows.diff() != 0, (1, 0), value=True)
    if sequences.segments is not None:
        begins |= F.pad(sequences.segments[places].diff() != 0, (1, 0), value=True)
    ends = F.pad(begins.nonzero().squeeze(1), (0, 1), value=len(rows)).int()
    return JoinedRows(
        ids=sequences.input_ids[places],
        positions=sequences.position_ids[places],
        queries=ends,
        keys=ends,
        key_index=None,
        places=places,
        read=_places(needed)[:, :-1][chosen[:, 1:]],
    )


def _with_prompts(sequences: Sequences, needed: Tensor, chosen: Tensor) -> JoinedRows:
    unique, of = different_prompts(sequences)
    every = torch.arange(len(of), device=of.device)
    none = every.new_full((len(unique),), len(of))
    source = none.scatter_reduce(0, of, every, "amin")  # the first row of each prompt
    in_source, columns = sequences.prompt_mask[source].nonzero(as_tuple=True)
    lengths = sequences.prompt_mask[source].sum(1)  # [G]
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
    rows, after = own.nonzero(as_tuple=True)
    places = torch.cat([source[in_source], rows]), torch.cat([columns, after])
    in_rows = _places(own) + lengths.sum()
    in_prompts = first[of].unsqueeze(1) + sequences.position_ids
    return JoinedRows(
        ids=sequences.input_ids[places],
        positions=sequences.position_ids[places],
        queries=ends,
        keys=ends_of_keys,
        key_index=torch.where(in_prompt, begin[text] + column, ends[text] + column - common[text]),
        places=places,
        read=torch.where(sequences.prompt_mask, in_prompts, in_rows)[:, :-1][chosen[:, 1:]],
    )


def different_prompts(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return the different prompts of rows, -1 in the padding at their right [G, P], and the prompt of each row [B].

    Those of rows with images have the number of these, in `Images.of`, in a further column.
    """
    width, total = int(sequences.prompt_mask.sum(1).max()), sequences.input_ids.size(1)
    columns = begins(sequences) + torch.arange(width, device=sequences.input_ids.device)
    ids = sequences.prompt_ids.gather(1, columns.clamp(max=total - 1)).masked_fill(columns >= total, -1)
    if sequences.images is not None:
        ids = torch.cat([ids, sequences.images.of.unsqueeze(1)], 1)
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
    joined: JoinedRows | FilledColumns,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
) -> Tensor:
    """Return causal attention within each text. [1, H, N, D], [1, K, N, D], [1, K, N, D] -> [1, N, H, D].

    To filled columns of a cache it is [b, H, 1, D], [b, K, W, D], [b, K, W, D] -> [b, 1, H, D].

    Args:
        query: of all tokens.
        key: of all tokens; H is a multiple of the number of its heads.
        value: as ``key``.
        joined: where texts begin.
        scaling: of the products; None: 1/√D.
        dropout: the probability with which weights are set to 0.
        sliding_window: to how many tokens, itself included, a token attends at most; None: to all before it.
    """
    if isinstance(joined, FilledColumns):
        return _to_filled(query, key, value, joined, scaling, dropout, sliding_window)
    if joined.key_index is not None:
        key, value = key[:, :, joined.key_index], value[:, :, joined.key_index]
    if _has_kernel(query, dropout) and not _serves(query, sliding_window):
        return _by_flex(query, key, value, joined, scaling, sliding_window)
    if _has_kernel(query, dropout):
        query, key, value = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        ends = joined.queries, joined.keys
        return _by_kernel(query, key, value, *ends, joined.longest, scaling, sliding_window).unsqueeze(0)
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


def _to_filled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    filled: FilledColumns,
    scaling: float | None,
    dropout: float,
    width: int | None,
) -> Tensor:
    rows, heads, _, size = query.shape
    if _has_kernel(query, dropout) and _serves(query, width) and "seqused_k" in _kernel()[1]:
        columns, places = key.size(2), torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        query, key, value = (each.transpose(1, 2).reshape(-1, *each.shape[1::2]) for each in (query, key, value))
        begins, used = F.pad(filled.begins, (0, 1)).int() + places * columns, filled.counts.int()
        return _by_kernel(query, key, value, places, begins, (1, columns), scaling, width, seqused_k=used).unsqueeze(1)
    query = query.reshape(rows, key.size(1), -1, size)  # the queries that share keys as those of several tokens
    found = F.scaled_dot_product_attention(query, key, value, filled.mask(key.size(2), width), dropout, scale=scaling)
    return found.reshape(rows, 1, heads, -1)


def _window(queries: slice, keys: slice, width: int | None, device: torch.device) -> Tensor:
    """Return the mask of a text, of whose keys the last ones are those of its queries: bool [queries, keys]."""
    tokens, all_keys = queries.stop - queries.start, keys.stop - keys.start
    mask = torch.ones(tokens, all_keys, dtype=torch.bool, device=device).tril(all_keys - tokens)
    return mask if width is None else mask.triu(all_keys - tokens - width + 1)


def _has_kernel(query: Tensor, dropout: float) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout


def _serves(query: Tensor, width: int | None) -> bool:
    """Return whether torch's kernel for texts of any lengths has heads of this size, and windows if there are some."""
    size, (kernel, has) = query.size(-1), _kernel()
    return kernel is not None and size <= 256 and size % 8 == 0 and (width is None or "window_size" in has)


def _by_flex(
    query: Tensor, key: Tensor, value: Tensor, joined: JoinedRows, scaling: float | None, width: int | None
) -> Tensor:
    """Return attention as FlexAttention computes it, compiled where it can be. [1, *, N, D] each -> [1, N, H, D]."""
    attention, make_mask = _flex(query.is_cuda)
    if width not in joined.blocks:  # one for all layers
        left, right = (_to_the_end(ends, each.size(2)) for ends, each in ((joined.queries, query), (joined.keys, key)))

        def attends(_: Tensor, __: Tensor, q: Tensor, k: Tensor) -> Tensor:
            behind = right[1][k] - left[1][q]
            near = behind >= 0 if width is None else (behind >= 0) & (behind < width)
            return near & (right[0][k] == left[0][q])

        joined.blocks[width] = make_mask(attends, None, None, query.size(2), key.size(2), device=query.device)
    grouped = query.size(1) != key.size(1)
    found: Tensor = attention(query, key, value, block_mask=joined.blocks[width], scale=scaling, enable_gqa=grouped)
    return found.transpose(1, 2).contiguous()


@cache
def _flex(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return FlexAttention, and what makes its masks; without compiling both hold all scores of a head at a time."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def _to_the_end(ends: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return of each of ``count`` tokens its text, and how many tokens of the text are at or behind it; [N] each."""
    text = torch.repeat_interleave(ends.diff(), output_size=count)
    return text, ends[1:][text] - torch.arange(count, device=ends.device)


@cache
def _kernel() -> tuple[Any, Collection[str]]:
    """Return torch's attention of texts of any lengths, and the names of its parameters; None where it is missing."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, ()
    return varlen_attn, inspect.signature(varlen_attn).parameters.keys()


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest: tuple[int, int],
    scaling: float | None,
    width: int | None,
    **more: Any,
) -> Tensor:
    """Return attention as torch's kernel does it. [N, H, D], [K, *, D], [K, *, D] -> [N, H, D]."""
    kernel, has = _kernel()
    groups = query.size(1) // key.size(1)
    if groups > 1 and "enable_gqa" not in has:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = longest[0] > 1  # the last key is that of the last query; without a window, groups share what is read
    window = -1 if width is None else width - 1, 0 if causal else -1
    more |= {"window_size": window} if "window_size" in has else {"is_causal": causal}
    if groups > 1 and "enable_gqa" in has:
        more["enable_gqa"] = True
    found: Tensor = kernel(query, key, value, queries, keys, *longest, scale=scaling, **more)
    return found
