"""The data structures of a run: rows, batches of named tensors, sequences, rollouts.

Shapes: B rows, T tokens (prompt then response, padded on the right). Masks are boolean, ``True`` = counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any, ClassVar, NamedTuple, NoReturn, Self
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.errors import describe
from trainkit.seeding import PLACE

Row = dict[str, Any]
"""One record of a dataset: ``{"prompt": ..., **columns}`` online, ``{"prompt": ..., "output": ...}`` offline."""


def is_given(value: Any) -> bool:
    """Return whether a cell holds something: neither None nor NaN, which fill tables, nor an empty text or list."""
    empty = value is None or (isinstance(value, float) and math.isnan(value))
    return not empty and not (isinstance(value, str | list | tuple | Mapping) and not value)


class PassCost(NamedTuple):
    """The fixed cost of one more forward pass, as the number of tokens that cost as much."""

    tokens: int
    """At least so many."""
    parameters: int = 0
    """With a model of P parameters so many / P tokens more, because a token of a small model costs little."""
    most: int = 512
    """At most so many more."""


PASS_COST = {"cpu": PassCost(48, 80_000_000)}
"""The cost by kind of device. On CPUs, 50 was measured with 27 million parameters, 130 to 200 with 0.9 million, and 400
and more with 0.2 million."""
OTHER_PASS_COST = PassCost(4096)
"""The same for other devices, where launching the kernels costs as much as the arithmetic of many tokens."""
COPIED = 8
"""How many copied pairs of keys and values of a token count as one more token that the model runs."""
SHOWN = 20
"""Responses that a notebook shows of rollouts."""
BATCH_CLASSES: dict[str, type[Batch]] = {}
"""All defined subclasses of `Batch` by qualified name; a checkpoint may contain no others."""


@dataclass(frozen=True)
class Batch:
    """A frozen dataclass whose fields are tensors (or batches) with the same first dimension B.

    Subclass it to name the tensors of an algorithm's experience. Any subclass can be shuffled, split, padded,
    saved and moved between devices without further code.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        BATCH_CLASSES[f"{cls.__module__}.{cls.__qualname__}"] = cls

    unit: ClassVar[str] = "rows"
    """The name of what `weight` counts, for messages."""

    def parts(self) -> dict[str, Tensor | Batch]:
        """Return the fields by name, without those that are None."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in every.items() if value is not None}

    def __len__(self) -> int:
        return len(next(iter(self.parts().values())))

    @property
    def weight(self) -> Tensor:
        """The number of units that ``loss`` averages over []: rows here, response tokens in `TokenBatch`."""
        return torch.tensor(float(len(self)))

    @property
    def lengths(self) -> Tensor:
        """Tokens per row [B], by which micro-batches are bucketed: of the longest of its batches; 1 without batches."""
        lengths = [part.lengths for part in self.parts().values() if isinstance(part, Batch)]
        return torch.stack(lengths).amax(0) if lengths else torch.ones(len(self), dtype=torch.long)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with ``fn`` applied to every tensor."""
        return type(self)(**{k: v.map(fn) if isinstance(v, Batch) else fn(v) for k, v in self.parts().items()})

    def on_columns(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with ``fn`` applied to every tensor [B, T, *]; images, which have no columns, are kept."""
        parts = self.parts().items()
        return type(self)(
            **{k: v.on_columns(fn) if isinstance(v, Batch) else fn(v) if v.dim() > 1 else v for k, v in parts}
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on ``device``; a copy to a GPU is made from pinned memory, and nothing waits for it."""
        gpu = torch.device(device).type == "cuda"
        return self.map(lambda x: (x.pin_memory() if gpu and x.is_cpu else x).to(device, non_blocking=gpu))

    def select(self, rows: Tensor) -> Self:
        """Return the rows at the indices ``rows`` [N], without columns that are padding in all of them."""
        return self.take(rows).trim()

    def take(self, rows: Tensor) -> Self:
        """Return the rows at the indices ``rows`` [N], with all columns.

        Override it in a batch whose tensors do not have rows as their first dimension.
        """
        return type(self)(
            **{k: v.take(rows) if isinstance(v, Batch) else v[rows.to(v.device)] for k, v in self.parts().items()}
        )

    def trim(self) -> Self:
        """Return the batch without columns that are padding in every row."""
        return type(self)(**{k: v.trim() if isinstance(v, Batch) else v for k, v in self.parts().items()})

    @property
    def follows(self) -> Tensor:
        """Whether a row has the prompt of the row before it, bool [B]; False for batches without prompts."""
        return torch.zeros(len(self), dtype=torch.bool)

    def groups(
        self, size: int | None, tokens: int | None = None, *, together: int = 1, shared: bool = False
    ) -> list[Tensor]:
        """Return the row indices [b] of micro-batches by length: at most ``size`` rows and about ``tokens`` tokens.

        None is no limit. Where the tokens are limited, the micro-batches have about equally many. Up to ``together``
        adjacent rows with the same prompt stay adjacent; a micro-batch may end between them. With ``shared``, a prompt
        that a micro-batch has several times counts once, because the model runs it once.
        """
        padded = 0 if tokens is None or not len(self) else len(self) * int(self.lengths.max())
        if (size is None or len(self) <= size) and (tokens is None or padded <= tokens):
            return [torch.arange(len(self))]
        group = self._prompts(together)
        longest = self.lengths.new_zeros(len(self)).scatter_reduce(0, group, self.lengths, "amax")[group]
        order = longest.argsort(descending=True, stable=True)
        lengths, common = self.shared_lengths if shared else (self.lengths, torch.zeros_like(self.lengths))
        rows = list(zip(group[order].tolist(), lengths[order].tolist(), common[order].tolist(), strict=True))
        starts, total = _starts(rows, size, tokens)
        if tokens is not None and len(starts) > 1:  # as many parts of about the same size, which need less memory
            mean = math.ceil(total / len(starts))
            for most in (mean, mean + max(length + common for _, length, common in rows)):
                evenly, _ = _starts(rows, size, min(tokens, most))
                if len(evenly) == len(starts):
                    return list(order.tensor_split(evenly[1:]))
        return [torch.arange(len(self))] if len(starts) == 1 else list(order.tensor_split(starts[1:]))

    def _prompts(self, together: int) -> Tensor:
        """Return which rows stay together [B]: equal numbers for at most ``together`` adjacent rows of a prompt."""
        if together == 1:
            return torch.arange(len(self), device=self.lengths.device)
        group, count = [-1], 0
        for follows in self.follows.tolist():
            count = count + 1 if follows and count < together else 1
            group.append(group[-1] + (count == 1))
        return torch.tensor(group[1:], dtype=torch.long, device=self.lengths.device)

    @property
    def shared_lengths(self) -> tuple[Tensor, Tensor]:
        """Where prompts are shared, the tokens that each row adds to a micro-batch, and those of its prompt [B] ×2.

        A prompt counts once for the adjacent rows that have it. Copies of its keys and values count as `COPIED` tokens.
        """
        return self.lengths, torch.zeros_like(self.lengths)

    def split(
        self, size: int | None, tokens: int | None = None, *, together: int = 1, shared: bool = False
    ) -> list[Self]:
        """Split the batch into the micro-batches of `groups`."""
        groups = self.groups(size, tokens, together=together, shared=shared)
        return [self] if len(groups) == 1 else [self.select(rows) for rows in groups]

    @classmethod
    def cat(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the rows of ``batches``; columns are padded on the right with 0 / False to the widest."""
        joined: dict[str, Any] = {}
        for name, first in batches[0].parts().items():
            column: list[Any] = [batch.parts()[name] for batch in batches]
            joined[name] = type(first).cat(column) if isinstance(first, Batch) else _cat_padded(column)
        return cls(**joined)

    def flatten(self, prefix: str = "") -> dict[str, Tensor]:
        """Return all tensors by dotted name."""
        flat: dict[str, Tensor] = {}
        for name, value in self.parts().items():
            flat |= value.flatten(f"{prefix}{name}.") if isinstance(value, Batch) else {f"{prefix}{name}": value}
        return flat


_SIZES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The numbers of parameters of models."""


def pass_cost(model: nn.Module, device: torch.device) -> int:
    """Return the fixed cost of one more forward pass of a model on a device, in tokens."""
    cost = PASS_COST.get(device.type, OTHER_PASS_COST)
    if not cost.parameters:
        return cost.tokens
    if model not in _SIZES:  # counting takes longer than a small batch needs otherwise
        _SIZES[model] = max(sum(parameter.numel() for parameter in model.parameters()), 1)
    return cost.tokens + min(cost.parameters // _SIZES[model], cost.most)


@dataclass(frozen=True)
class _Counted:
    """The padded size of a micro-batch of which rows share prompts."""

    rows: int = 0
    own: int = 0
    """The most tokens that a row adds."""
    prompts: int = 0
    common: int = 0
    """The most tokens of a prompt."""
    last: int = -1
    """The prompt of the last row."""

    def with_row(self, prompt: int, separate: int, common: int) -> _Counted:
        """Return the size with one more row."""
        prompts = self.prompts + (prompt != self.last)
        return _Counted(self.rows + 1, max(self.own, separate), prompts, max(self.common, common), prompt)

    @property
    def tokens(self) -> int:
        """Tokens that the model runs."""
        return self.rows * self.own + self.prompts * self.common


def _starts(rows: Sequence[tuple[int, int, int]], size: int | None, tokens: int | None) -> tuple[list[int], int]:
    """Return where micro-batches start that are filled in turn, and the tokens of all of them.

    Args:
        rows: the prompt of each row, the tokens that it adds, and those of its prompt.
        size: the most rows, or None.
        tokens: the most tokens, which a single row may exceed, or None.
    """
    starts, counted, total = [0], _Counted(), 0
    for index, row in enumerate(rows):
        longer = counted.with_row(*row)
        full = size is not None and index - starts[-1] >= size
        if index > starts[-1] and (full or (tokens is not None and longer.tokens > tokens)):
            starts.append(index)
            total += counted.tokens
            longer = _Counted().with_row(*row)
        counted = longer
    return starts, total + counted.tokens


def _cat_padded(tensors: list[Tensor], width: int = 0) -> Tensor:
    if tensors[0].dim() >= 2:
        width = max(width, *(x.size(1) for x in tensors))
        tensors = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.size(1))) for x in tensors]
    return torch.cat(tensors)


IMAGE_INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
"""What models read of images besides token ids, by the names of their arguments."""


@dataclass(frozen=True)
class Images(Batch):
    """What a model reads of the images of B rows besides token ids, in G sets; rows with the same images share a set.

    Of the tensors of `IMAGE_INPUTS`, each set has some rows, those of one set after those of another.
    """

    of: Tensor
    """The set of each row [B]; -1: the row has no images."""
    counts: Tensor
    """How many rows of each of `IMAGE_INPUTS` each set has [G, 3]."""
    pixel_values: Tensor | None = None
    pixel_attention_mask: Tensor | None = None
    image_grid_thw: Tensor | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Tensor]]) -> Images | None:
        """Return the images of rows, None if no row has any; rows that share a set have the same object.

        Args:
            rows: for every row its `IMAGE_INPUTS` by name; empty if it has no images.
        """
        sets = [*{id(row): row for row in rows if row}.values()]
        places = {id(each): place for place, each in enumerate(sets)}
        of = torch.tensor([places.get(id(row), -1) for row in rows], dtype=torch.long)
        counts = [[len(each[name]) if name in each else 0 for name in IMAGE_INPUTS] for each in sets]
        inputs = {name: _cat_ragged([each[name] for each in sets]) for name in IMAGE_INPUTS if sets and name in sets[0]}
        return cls(of, torch.tensor(counts), **inputs) if sets else None

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Images:
        """Return the images of rows that have none."""
        return cls(torch.full((rows,), -1, device=device), torch.zeros(0, 3, dtype=torch.long, device=device))

    @property
    def inputs(self) -> dict[str, Tensor]:
        """`IMAGE_INPUTS` by name, those of one row after those of another; empty if no row has images."""
        return self._inputs_of(self.of[self.of >= 0])

    def _inputs_of(self, sets: Tensor) -> dict[str, Tensor]:
        """Return the rows of `IMAGE_INPUTS` that some sets [N] have, by name."""
        given = {name: value for name in IMAGE_INPUTS if (value := getattr(self, name)) is not None}
        if torch.equal(sets, torch.arange(len(self.counts), device=sets.device)) or not len(sets):
            return given if len(sets) else {}
        counts, order = self.counts.t().tolist(), sets.tolist()
        parts = {name: given[name].split(counts[IMAGE_INPUTS.index(name)]) for name in given}
        return {name: torch.cat([each[place] for place in order]) for name, each in parts.items()}

    def on_columns(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the images, which have no columns."""
        return self

    def take(self, rows: Tensor) -> Self:
        """Return the images of the rows at the indices ``rows`` [N], without sets that none of them has."""
        of = self.of[rows.to(self.of.device)]
        kept = of[of >= 0].unique()
        places = torch.full((len(self.counts) + 1,), -1, device=of.device)
        places[kept] = torch.arange(len(kept), device=of.device)
        return type(self)(places[of], self.counts[kept], **self._inputs_of(kept))

    @classmethod
    def cat(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the images of rows; other dimensions are padded with 0 to the largest."""
        firsts = accumulate((len(batch.counts) for batch in batches), initial=0)
        of = [torch.where(batch.of < 0, -1, batch.of + first) for batch, first in zip(batches, firsts, strict=False)]
        some = [batch for batch in batches if len(batch.counts)]
        names = [name for name in IMAGE_INPUTS if some and getattr(some[0], name) is not None]
        inputs = {name: _cat_ragged([getattr(batch, name) for batch in some]) for name in names}
        return cls(torch.cat(of), torch.cat([batch.counts for batch in batches]), **inputs)


def _cat_ragged(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors [N, *], padded with 0 to the largest size of each other dimension."""
    sizes = [max(each) for each in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    lacking = [[size - own for size, own in zip(sizes, each.shape[1:], strict=True)] for each in tensors]
    return torch.cat(
        [
            F.pad(tensor, [width for size in reversed(more) for width in (0, size)]) if any(more) else tensor
            for tensor, more in zip(tensors, lacking, strict=True)
        ]
    )


@dataclass(frozen=True)
class Sequences(Batch):
    """Prompts and responses as token ids, padded on the right. Fields are [B, T]."""

    unit: ClassVar[str] = "tokens"
    input_ids: Tensor
    """Token ids; those in padding are ignored."""
    attention_mask: Tensor
    """bool: real tokens, which come before all padding in every row."""
    response_mask: Tensor
    """bool: tokens that were chosen by the policy (terminating EOS included) and are trained on."""
    trunk: Tensor | None = None
    """The output of the policy's frozen lower layers [B, T, D], stored so that these layers need not run again."""
    segments: Tensor | None = None
    """For packed rows: the sample that each token belongs to, numbered from 1 in every row; 0 in padding [B, T]. A
    sample attends only to itself, and its positions begin at 0."""
    images: Images | None = None
    """The images that tokens of the rows stand for; None: there are none."""

    def __post_init__(self) -> None:
        if self.attention_mask.dtype != torch.bool or self.response_mask.dtype != torch.bool:
            raise TypeError("masks are boolean, True = counts; use mask.bool()")

    @classmethod
    def from_lists(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int = 0) -> Self:
        """Build sequences [B, T] from token ids; the masks follow from the lengths, never from the ids."""
        pairs = list(zip(prompts, responses, strict=True))
        return cls.from_rows(
            [[*p, *r] for p, r in pairs], [[False] * len(p) + [True] * len(r) for p, r in pairs], pad_id
        )

    @classmethod
    def from_rows(cls, ids: Sequence[Sequence[int]], chosen: Sequence[Sequence[bool]], pad_id: int = 0) -> Self:
        """Build sequences [B, T] from rows of token ids and masks of the response tokens."""
        width = max((len(row) for row in ids), default=0)
        shape = (len(ids), width)
        lengths = torch.tensor([len(row) for row in ids], dtype=torch.long).unsqueeze(1)
        padded = [[*row, *[pad_id] * (width - len(row))] for row in ids]
        masks = [[*row, *[False] * (width - len(row))] for row in chosen]
        return cls(
            torch.tensor(padded, dtype=torch.long).reshape(shape),
            torch.arange(width) < lengths,
            torch.tensor(masks, dtype=torch.bool).reshape(shape),
        )

    @classmethod
    def cat(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the rows of ``batches``, as `Batch.cat`; some may have no images."""
        if any(batch.images is not None for batch in batches):
            ids = [batch.input_ids for batch in batches]
            no_images = [Images.none(len(each), each.device) for each in ids]
            batches = [
                replace(batch, images=batch.images or none) for batch, none in zip(batches, no_images, strict=True)
            ]
        return super().cat(batches)

    @property
    def position_ids(self) -> Tensor:
        """Positions [B, T] counted over real tokens, so that padding on either side changes nothing.

        In packed rows they are counted over each sample, and padding tokens are at position 0.
        """
        if self.segments is None:
            return (self.attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        columns = torch.arange(self.segments.size(1), device=self.segments.device).expand_as(self.segments)
        before = F.pad(self.segments, (1, 0))[:, :-1]
        begins = (self.segments != before) | ~self.attention_mask
        return columns - (columns * begins).cummax(1).values

    @cached_property
    def acts(self) -> bool:
        """Whether a response token was chosen in the state of a token."""
        return bool(self.response_mask[:, 1:].any())

    @property
    def aligned_left(self) -> bool:
        """Whether all rows begin in the first column, one ends in the last, and all padding is behind rows."""
        real = self.attention_mask
        if not real.numel():
            return False
        return bool((real[:, :-1] >= real[:, 1:]).all() & real[:, 0].all() & real[:, -1].any())

    def buckets(self, cost: int) -> list[Tensor]:
        """Group rows of similar length, as indices [b]; adds a bucket where it saves over ``cost`` padding tokens."""
        if self.input_ids.numel() <= cost:
            return [torch.arange(len(self), device=self.input_ids.device)]
        columns = torch.arange(1, self.input_ids.size(1) + 1, device=self.input_ids.device)
        ends = (self._used * columns).amax(1)
        order = ends.argsort(descending=True, stable=True)
        starts, width, rows = [0], 0, len(self)
        for index, end in enumerate(ends[order].tolist()):
            width = width or end
            if (width - end) * (rows - index) > cost:
                starts.append(index)
                width = end
        if len(starts) == 1:
            return [torch.arange(rows, device=order.device)]
        return list(order.tensor_split(starts[1:]))

    def reunite(self, buckets: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        """Join values of each bucket's rows [b, ≤ T, *] in the original order of the rows, padded. -> [B, T, *]."""
        return _cat_padded(list(parts), self.input_ids.size(1))[torch.cat(list(buckets)).argsort()]

    def place(self, values: Tensor) -> Tensor:
        """Place values of the response tokens, row after row [N], at their positions; 0 elsewhere. -> [B, T]."""
        mask = self.response_mask
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)

    def packed(self, counts: Sequence[int], pad_id: int = 0) -> Self:
        """Pack the rows: row i of the result holds ``counts[i]`` of them one after the other, marked in `segments`."""
        assert self.images is None, "rows with images are not packed"
        rows = zip(self.input_ids, self.attention_mask, self.response_mask, strict=True)
        parts = [(ids[real].tolist(), chosen[real].tolist()) for ids, real, chosen in rows]
        ends = list(accumulate(counts, initial=0))
        groups = [parts[start:end] for start, end in pairwise(ends)]
        joined = type(self).from_rows(
            [[token for ids, _ in group for token in ids] for group in groups],
            [[keep for _, chosen in group for keep in chosen] for group in groups],
            pad_id,
        )
        segments = [torch.tensor([n for n, (ids, _) in enumerate(group, 1) for _ in ids]) for group in groups]
        return replace(joined, segments=torch.nn.utils.rnn.pad_sequence(segments, batch_first=True)).to(
            self.input_ids.device
        )

    @property
    def weight(self) -> Tensor:
        """Response tokens []."""
        return self.response_mask.sum().float()

    @property
    def lengths(self) -> Tensor:
        """Real tokens per row [B]."""
        return self.attention_mask.sum(1)

    @property
    def shared_lengths(self) -> tuple[Tensor, Tensor]:
        """The tokens of each row after its prompt and copies of the prompt's keys and values; those of the prompt."""
        common = self.prompt_mask.sum(1)
        return self.lengths - common + common // COPIED, common

    def trim(self) -> Self:
        """Return the batch without columns that are padding in every row."""
        width = self._width()
        return self.on_columns(lambda x: x[:, :width])

    @property
    def _used(self) -> Tensor:
        """bool [B, T]: real tokens, and positions after the last one whose state is needed."""
        return self.attention_mask | self.response_mask

    def _width(self) -> int:
        used = self._used.any(0).nonzero()
        return int(used[-1]) + 1 if len(used) else 0

    @property
    def prompt_mask(self) -> Tensor:
        """bool [B, T]: the real tokens before the first response token."""
        return self.attention_mask & (self.response_mask.cumsum(1) == 0)

    @property
    def follows(self) -> Tensor:
        """Whether a row has the prompt of the row before it, bool [B]."""
        ids = self.prompt_ids
        if self.images is not None:
            ids = torch.cat([ids, self.images.of.unsqueeze(1)], 1)
        return torch.cat([ids.new_zeros(1, dtype=torch.bool), (ids[1:] == ids[:-1]).all(1)])[: len(self)]

    @property
    def prompt_ids(self) -> Tensor:
        """The token ids of the prompts, and -1, which is no token id, at all other positions [B, T]."""
        return self.input_ids.masked_fill(~self.prompt_mask, -1)

    @property
    def queries(self) -> list[Tensor]:
        """The prompt of each row as a 1-D tensor of ids: the tokens before the first response token."""
        return [ids[keep] for ids, keep in zip(self.input_ids, self.prompt_mask, strict=True)]

    @property
    def responses(self) -> list[Tensor]:
        """The response of each row as a 1-D tensor of ids."""
        return [ids[keep] for ids, keep in zip(self.input_ids, self.response_mask, strict=True)]


@dataclass(frozen=True)
class TokenBatch(Batch):
    """Per-token experience: ``sequences`` and further fields, of which those with two dimensions are [B, T].

    Losses are averaged over response tokens.
    """

    unit: ClassVar[str] = "tokens"
    sequences: Sequences

    @property
    def weight(self) -> Tensor:
        """Response tokens []."""
        return self.sequences.weight

    @property
    def lengths(self) -> Tensor:
        """Real tokens per row [B]."""
        return self.sequences.lengths

    @property
    def follows(self) -> Tensor:
        """Whether a row has the prompt of the row before it, bool [B]."""
        return self.sequences.follows

    @property
    def shared_lengths(self) -> tuple[Tensor, Tensor]:
        """Those of the sequences."""
        return self.sequences.shared_lengths

    def trim(self) -> Self:
        """Return the batch without columns that are padding in every row."""
        width = self.sequences._width()
        return self.on_columns(lambda x: x[:, :width])


@dataclass(frozen=True)
class Preferences(Batch):
    """B pairs of responses of which one is preferred; losses are averaged over pairs."""

    unit: ClassVar[str] = "pairs"
    chosen: Sequences
    """The preferred response of each pair, with its prompt."""
    rejected: Sequences
    """The other response of each pair, with the same prompt."""

    @property
    def lengths(self) -> Tensor:
        """Tokens per pair [B], both sequences counted with the length of the longer one."""
        return 2 * torch.maximum(self.chosen.lengths, self.rejected.lengths)

    @property
    def shared_lengths(self) -> tuple[Tensor, Tensor]:
        """The tokens of each pair, of which its prompt counts once if both sides have it; 0."""
        sides = self.chosen.shared_lengths, self.rejected.shared_lengths
        separate, common = (torch.maximum(*each) for each in zip(*sides, strict=True))
        return torch.where(self.common, 2 * separate + common, self.lengths), torch.zeros_like(separate)

    @property
    def common(self) -> Tensor:
        """bool [B]: both sides of a pair have the same prompt, as token ids."""
        chosen, rejected = self.both.prompt_ids.chunk(2)
        return (chosen == rejected).all(1)

    @property
    def both(self) -> Sequences:
        """All sequences, for one forward pass: the chosen ones, then the rejected ones [2B, T]."""
        if (images := self.chosen.images) is None:
            return Sequences.cat([self.chosen, self.rejected])
        both = Sequences.cat([replace(side, images=None) for side in (self.chosen, self.rejected)])
        return replace(both, images=replace(images, of=images.of.repeat(2)))  # the sides have the same


@dataclass(frozen=True)
class Rollouts:
    """The result of sampling for B prompts: token ids for training, and text for logs and reward functions."""

    rows: list[Row]
    """The row each response belongs to, with its prompt under ``"prompt"`` and any further columns."""
    sequences: Sequences
    """Prompt and response ids [B, T]. Tokens of an environment stand between response tokens, and are not in the
    response mask."""
    logprobs: Tensor | None
    """Log-probabilities [B, T] with which the response tokens were sampled (at the sampling temperature), else 0.
    None if unknown."""
    terminated: Tensor
    """bool [B]: the response ended by EOS, a stop token or a stop string, or the episode by its environment, not by a
    limit."""
    prompts: list[str]
    """Prompt text."""
    outputs: list[str]
    """Response text, truncated before the stop string that ended it; of an episode, its outputs and observations."""
    entropy: Tensor | None = None
    """Entropy [B, T] of the distribution each response token was chosen from (at the sampling temperature, under the
    logit mask, before it was restricted), else 0. None if unknown."""
    hidden: Tensor | None = None
    """The last hidden state [B, T, D] in which each response token was chosen, else 0: the input of a value head. None
    unless requested from the sampler."""
    rewards: Tensor | None = None
    """An environment's rewards [B, T], each at the last token of the output that it rewards, else 0. None without an
    environment."""
    turns: list[list[dict[str, Any]]] | None = None
    """For every episode its turns, each a dict with ``output``, ``observation`` and ``reward``. None without an
    environment."""
    versions: Tensor | None = None
    """The number of optimizer steps [B] after which the weights were that each response was sampled with. None if
    unknown, with responses that were not sampled by trainkit."""
    failed: Tensor | None = None
    """bool [B]: the environment failed, and the episode ended with that turn. None without an environment."""
    moments: list[list[Any]] | None = None
    """For every episode its state before each of its outputs, from which it can be branched. None unless the algorithm
    declares ``forks``."""
    judged: list[dict[str, Any]] | None = None
    """For every response its ``reward``, and what else the reward function returned, by name. None before they are
    scored."""

    def __len__(self) -> int:
        return len(self.rows)

    def _repr_html_(self) -> str:
        """Return a table of the first prompts and outputs, for notebooks."""
        from trainkit.tables import table

        columns, count = ["prompt", "output", "ended"], len(self)
        ended = ["yes" if end else "truncated" for end in self.terminated.tolist()]
        cells: list[Sequence[object]] = [self.prompts, self.outputs, ended]
        if self.rewards is not None:
            columns, cells = [*columns, "reward"], [*cells, self.rewards.sum(1).tolist()]
        caption = (
            f"the first {SHOWN} of {count} responses" if count > SHOWN else f"{count} response{'s' * (count != 1)}"
        )
        return table(islice(zip(*cells, strict=True), SHOWN), columns, caption=caption)

    def to(self, device: torch.device | str) -> Self:
        """Return the rollouts with their tensors on ``device``."""
        names = ("sequences", "terminated", "logprobs", "entropy", "hidden", "rewards", "versions", "failed")
        tensors = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})

    def select(self, rows: Sequence[int]) -> Self:
        """Return the rollouts at the indices ``rows``; widths stay as they are."""
        index = torch.tensor(list(rows), dtype=torch.long)

        def chosen(value: Any) -> Any:
            if isinstance(value, Batch):
                return value.take(index)
            return value[index.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in rows]

        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: chosen(value) for name, value in every.items() if value is not None})

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate rollouts; tensors are padded on the right to the widest. A field that one lacks is None."""

        def joined(values: list[Any]) -> Any:
            if any(value is None for value in values):
                return None
            if isinstance(values[0], Batch):
                return type(values[0]).cat(values)
            return _cat_padded(values) if isinstance(values[0], Tensor) else [row for value in values for row in value]

        return cls(**{field.name: joined([getattr(part, field.name) for part in parts]) for field in fields(cls)})

    @property
    def samples(self) -> list[str]:
        """Prompt and response text together."""
        return [prompt + output for prompt, output in zip(self.prompts, self.outputs, strict=True)]

    @property
    def queries(self) -> list[Tensor]:
        """Prompt ids, one 1-D tensor per row."""
        return self.sequences.queries

    @property
    def responses(self) -> list[Tensor]:
        """Response ids, one 1-D tensor per row."""
        return self.sequences.responses

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The further columns of the rows, each as a list; None where a row has no such column."""
        return columns_of(self.rows)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of reward and metric functions besides the columns; copies that the functions may change."""
        text = {"samples": self.samples, "prompts": list(self.prompts), "outputs": list(self.outputs)}
        return text if self.turns is None else {**text, "turns": copy.deepcopy(self.turns)}


GIVEN = ("samples", "prompts", "outputs", "tokenizer", "turns", "episode_seed")
"""The arguments of reward and metric functions besides the columns; columns must have other names."""


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the columns of rows except the text, each as a list; None where a row has no such column."""
    text = {"turns", "outputs"}  # of a sample
    names = dict.fromkeys(
        name for row in rows for name in row if name not in ("prompt", PLACE, *(text if text <= row.keys() else ()))
    )
    return {name: [row.get(name) for row in rows] for name in names}


def check_fields(
    batch: Batch, refuse: Callable[[str, Any, str], NoReturn], prefix: str = ""
) -> list[tuple[str, Tensor]]:
    """Check that the fields have the same first dimension, and return all tensors, also of batches within the batch.

    It calls ``refuse(field, value, expected)`` with what does not fit, which raises an error.

    A class that overrides `take` selects its rows itself, so its fields may have any; the same holds for `trim` and
    columns.
    """
    cls, first, rows = type(batch), "", 0
    tensors: list[tuple[str, Tensor]] = []
    for name, part in batch.parts().items():
        field = prefix + name
        if isinstance(part, Batch):
            own, inner = len(part), check_fields(part, refuse, f"{field}.")
            tensors += [] if isinstance(part, Images) else inner
        elif isinstance(part, Tensor) and part.dim():
            tensors.append((field, part))
            own = part.size(0)
        else:
            refuse(field, part, "a tensor [B, ...] or a batch")
        if not first:
            first, rows = field, own
        elif own != rows and cls.take is Batch.take:
            refuse(field, part, f"{rows} rows, the first dimension of {first!r}")
    if cls.trim is TokenBatch.trim or cls.trim is Sequences.trim:
        _check_columns(batch, tensors, refuse)
    return tensors


def _check_columns(batch: Any, tensors: list[tuple[str, Tensor]], refuse: Callable[[str, Any, str], NoReturn]) -> None:
    """Check that tensors with two or more dimensions are [B, T, ...] like the sequences."""
    alone = isinstance(batch, Sequences)
    sequences = batch if alone else batch.sequences
    if not isinstance(sequences, Sequences):
        refuse("sequences", sequences, "Sequences")
    ids = sequences.input_ids
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        refuse(next(field for field, tensor in tensors if tensor is ids), ids, "token ids, which are integers")
    for field, tensor in tensors:
        if (tensor.size(1) != ids.size(-1)) if tensor.dim() > 1 else alone:
            expected = f"[B, T, ...] like its sequences, {tuple(ids.shape)}: column t belongs to token t"
            refuse(field, tensor, f"{expected}, and nothing is shifted by one")


def shown(value: object) -> str:
    """Return how messages name ``value``: tensors and batches by their shape."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Batch):
        return f"a {type(value).__name__} of {len(value)} rows"
    if isinstance(value, tuple) and value:
        return f"a tuple of {' and '.join(shown(part) for part in value)}"
    return describe(value)
