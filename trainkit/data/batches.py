"""What flows through a run: rows, batches of named tensors, sequences, rollouts.

Shapes: B rows, T tokens (prompt then response, padded on the right). Masks are boolean, ``True`` = counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

Row = dict[str, Any]
"""One record of a dataset: ``{"prompt": ..., **columns}`` online, ``{"prompt": ..., "output": ...}`` offline."""


BATCH_CLASSES: dict[str, type[Batch]] = {}
"""Every `Batch` class that has been defined, by its full name: the only ones a checkpoint may hold."""


@dataclass(frozen=True)
class Batch:
    """A frozen dataclass whose fields are tensors (or batches) with one first dimension B.

    Subclass it to name the tensors of an algorithm's experience. The store shuffles, splits, pads, saves and
    moves any subclass; nothing else needs to be written.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        BATCH_CLASSES[f"{cls.__module__}.{cls.__qualname__}"] = cls

    unit: ClassVar[str] = "rows"
    """What `weight` counts, for people."""

    def parts(self) -> dict[str, Tensor | Batch]:
        """The fields by name, without those that are None."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in every.items() if value is not None}

    def __len__(self) -> int:
        return len(next(iter(self.parts().values())))

    @property
    def weight(self) -> Tensor:
        """How many units the mean in ``loss`` averages over []: rows here, response tokens in `TokenBatch`."""
        return torch.tensor(float(len(self)))

    @property
    def lengths(self) -> Tensor:
        """Tokens per row [B], by which micro-batches are bucketed."""
        return torch.ones(len(self), dtype=torch.long)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The batch with ``fn`` applied to every tensor."""
        return type(self)(**{k: v.map(fn) if isinstance(v, Batch) else fn(v) for k, v in self.parts().items()})

    def to(self, device: torch.device | str) -> Self:
        """The batch on ``device``."""
        return self.map(lambda x: x.to(device))

    def select(self, rows: Tensor) -> Self:
        """The rows at the indices ``rows`` [N], without columns that are padding in all of them."""
        return self.take(rows).trim()

    def take(self, rows: Tensor) -> Self:
        """The rows at the indices ``rows`` [N], with all columns; for a batch to say that its tensors are no rows."""
        return type(self)(
            **{k: v.take(rows) if isinstance(v, Batch) else v[rows.to(v.device)] for k, v in self.parts().items()}
        )

    def trim(self) -> Self:
        """The batch without columns that are padding in every row."""
        return type(self)(**{k: v.trim() if isinstance(v, Batch) else v for k, v in self.parts().items()})

    def groups(self, size: int | None, tokens: int | None = None) -> list[Tensor]:
        """The rows of micro-batches, as indices [b]: ``size`` each, or else about ``tokens`` tokens; of like length."""
        if size is None and tokens is None:
            return [torch.arange(len(self))]
        order = self.lengths.argsort(descending=True, stable=True)
        starts, lengths = [0], self.lengths[order].tolist()
        for index in range(1, len(self)):
            room = size or max((tokens or 0) // max(lengths[starts[-1]], 1), 1)
            if index - starts[-1] >= room:
                starts.append(index)
        return [torch.arange(len(self))] if len(starts) == 1 else list(order.tensor_split(starts[1:]))

    def split(self, size: int | None, tokens: int | None = None) -> list[Self]:
        """Micro-batches of `groups`."""
        found = self.groups(size, tokens)
        return [self] if len(found) == 1 else [self.select(rows) for rows in found]

    @classmethod
    def cat(cls, batches: Sequence[Self]) -> Self:
        """All rows of ``batches``; columns are padded on the right with 0 / False to the widest."""
        joined: dict[str, Any] = {}
        for name, first in batches[0].parts().items():
            column: list[Any] = [batch.parts()[name] for batch in batches]
            joined[name] = type(first).cat(column) if isinstance(first, Batch) else _cat_padded(column)
        return cls(**joined)

    def flatten(self, prefix: str = "") -> dict[str, Tensor]:
        """All tensors under dotted names."""
        flat: dict[str, Tensor] = {}
        for name, value in self.parts().items():
            flat |= value.flatten(f"{prefix}{name}.") if isinstance(value, Batch) else {f"{prefix}{name}": value}
        return flat


def _cat_padded(tensors: list[Tensor], width: int = 0) -> Tensor:
    if tensors[0].dim() >= 2:
        width = max(width, *(x.size(1) for x in tensors))
        tensors = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.size(1))) for x in tensors]
    return torch.cat(tensors)


@dataclass(frozen=True)
class Sequences(Batch):
    """Prompts and responses as token ids, padded on the right. Fields are [B, T]."""

    unit: ClassVar[str] = "tokens"
    input_ids: Tensor
    """Token ids; whatever stands in padding never matters."""
    attention_mask: Tensor
    """bool: real tokens. A prefix of every row."""
    response_mask: Tensor
    """bool: tokens that were chosen by the policy (terminating EOS included) and are trained on."""
    trunk: Tensor | None = None
    """What a policy's frozen lower layers say about them [B, T, D], so that they need not run again."""
    segments: Tensor | None = None
    """Of packed rows: which sample each token belongs to, counted from 1 in every row; 0 in padding [B, T]. A sample
    attends to itself alone, and its positions begin at 0."""

    def __post_init__(self) -> None:
        if self.attention_mask.dtype != torch.bool or self.response_mask.dtype != torch.bool:
            raise TypeError("masks are boolean, True = counts; use mask.bool()")

    @classmethod
    def from_lists(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int = 0) -> Self:
        """Sequences [B, T] from token ids; the masks come from the lengths, never from the ids (F-01)."""
        pairs = list(zip(prompts, responses, strict=True))
        return cls.from_rows(
            [[*p, *r] for p, r in pairs], [[False] * len(p) + [True] * len(r) for p, r in pairs], pad_id
        )

    @classmethod
    def from_rows(cls, ids: Sequence[Sequence[int]], chosen: Sequence[Sequence[bool]], pad_id: int = 0) -> Self:
        """Sequences [B, T] from whole rows of ids and, for each, which tokens are responses."""
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

    @property
    def position_ids(self) -> Tensor:
        """Positions [B, T] counted over real tokens, so that padding on either side changes nothing (F-02).

        In packed rows they are counted over each sample; each token of padding is at 0, as a sample of its own.
        """
        if self.segments is None:
            return (self.attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        columns = torch.arange(self.segments.size(1), device=self.segments.device).expand_as(self.segments)
        before = F.pad(self.segments, (1, 0))[:, :-1]
        begins = (self.segments != before) | ~self.attention_mask
        return columns - (columns * begins).cummax(1).values

    def buckets(self, cost: int) -> list[Tensor]:
        """Rows of like length together, as indices [b]: a bucket more wherever it saves over ``cost`` padded tokens."""
        columns = torch.arange(1, self.input_ids.size(1) + 1, device=self.input_ids.device)
        ends = (self._used * columns).amax(1)
        order = ends.argsort(descending=True, stable=True)
        starts, width = [0], 0
        for index, end in enumerate(ends[order].tolist()):
            width = width or end
            if (width - end) * (len(self) - index) > cost:
                starts.append(index)
                width = end
        if len(starts) == 1:
            return [torch.arange(len(self), device=order.device)]
        return list(order.tensor_split(starts[1:]))

    def reunite(self, buckets: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        """What is known of each bucket's rows [b, ≤ T, *], padded, in the order of the rows. -> [B, T, *]."""
        return _cat_padded(list(parts), self.input_ids.size(1))[torch.cat(list(buckets)).argsort()]

    def place(self, values: Tensor) -> Tensor:
        """What is known of the response tokens, row after row [N], at their places; 0 elsewhere. -> [B, T]."""
        mask = self.response_mask
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)

    def packed(self, counts: Sequence[int], pad_id: int = 0) -> Self:
        """The rows put one after the other, ``counts[i]`` of them in row i, told apart by `segments`."""
        rows = zip(self.input_ids, self.attention_mask, self.response_mask, strict=True)
        parts = [(ids[real].tolist(), chosen[real].tolist()) for ids, real, chosen in rows]
        ends = list(accumulate(counts, initial=0))
        groups = [parts[start:end] for start, end in pairwise(ends)]
        joined = type(self).from_rows(
            [[token for ids, _ in group for token in ids] for group in groups],
            [[keep for _, chosen in group for keep in chosen] for group in groups],
            pad_id,
        )
        lengths = [torch.tensor([len(ids) for ids, _ in group]) for group in groups]
        segments = [torch.arange(1, len(each) + 1).repeat_interleave(each) for each in lengths]
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

    def trim(self) -> Self:
        """Without the columns that are padding in every row."""
        width = self._width()
        return self.map(lambda x: x[:, :width])

    @property
    def _used(self) -> Tensor:
        """bool [B, T]: a state may be asked for behind the last real token, where nothing stands."""
        return self.attention_mask | self.response_mask

    def _width(self) -> int:
        used = self._used.any(0).nonzero()
        return int(used[-1]) + 1 if len(used) else 0

    @property
    def queries(self) -> list[Tensor]:
        """The prompt of each row as a 1-D tensor of ids."""
        prompt = self.attention_mask & ~self.response_mask
        return [ids[keep] for ids, keep in zip(self.input_ids, prompt, strict=True)]

    @property
    def responses(self) -> list[Tensor]:
        """The response of each row as a 1-D tensor of ids."""
        return [ids[keep] for ids, keep in zip(self.input_ids, self.response_mask, strict=True)]


@dataclass(frozen=True)
class TokenBatch(Batch):
    """Experience about tokens: ``sequences`` and further fields, those with two dimensions being [B, T] like it.

    Its unit of averaging is the response token.
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

    def trim(self) -> Self:
        """Without the columns that are padding in every row."""
        width = self.sequences._width()
        return self.map(lambda x: x[:, :width] if x.dim() >= 2 else x)


@dataclass(frozen=True)
class Preferences(Batch):
    """Pairs of responses of which one is preferred; the unit of averaging is the pair. [B] pairs."""

    unit: ClassVar[str] = "pairs"
    chosen: Sequences
    """The preferred one of each pair, with its prompt."""
    rejected: Sequences
    """The other one, with the same prompt."""

    @property
    def lengths(self) -> Tensor:
        """Tokens that a pair takes up, both sides being as wide as the longer [B]."""
        return 2 * torch.maximum(self.chosen.lengths, self.rejected.lengths)

    @property
    def both(self) -> Sequences:
        """All sequences, for one pass through a model: the chosen ones, then the rejected ones [2B, T]."""
        return Sequences.cat([self.chosen, self.rejected])


@dataclass(frozen=True)
class Rollouts:
    """What the sampler returns for B prompts: ids that are trained on, and text for people and reward functions."""

    rows: list[Row]
    """The row each response belongs to, with its prompt under ``"prompt"`` and any further columns."""
    sequences: Sequences
    """Prompt and response ids [B, T]."""
    logprobs: Tensor | None
    """Log-probabilities [B, T] with which the response tokens were sampled (at the sampling temperature), else 0.
    None if somebody else sampled them."""
    terminated: Tensor
    """bool [B]: the response ended by EOS or a stop string rather than by the length limit."""
    prompts: list[str]
    """Prompt text."""
    outputs: list[str]
    """Response text, cut before the stop string that ended it."""
    entropy: Tensor | None = None
    """Entropy [B, T] of the distribution each response token was chosen from (at the sampling temperature, under the
    logit mask, before it was restricted), else 0. None if the sampler did not see it."""
    hidden: Tensor | None = None
    """The last hidden state [B, T, D] in which each response token was chosen, else 0: what a value head reads. None
    unless the sampler was asked for it."""

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str) -> Self:
        """The rollouts with their tensors on ``device``."""
        names = ("sequences", "terminated", "logprobs", "entropy", "hidden")
        known = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self, **{name: value.to(device) for name, value in known.items()})

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
        """What reward and metric functions get beside the columns; theirs to change."""
        return {"samples": self.samples, "prompts": list(self.prompts), "outputs": list(self.outputs)}


GIVEN = ("samples", "prompts", "outputs", "tokenizer")
"""What reward and metric functions get beside the columns, which therefore must have other names."""


def columns_of(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The columns of rows beside the prompt, each as a list; None where a row has no such column."""
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {name: [row.get(name) for row in rows] for name in names}
