"""Decoders: they run a model on prompts, then on one token per step, with a key-value cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from trainkit.data.batches import Images
from trainkit.models.backend import autocast_dtype, dtype_of_attention, register_attention, rounding
from trainkit.models.compiling import uncompiled
from trainkit.models.fitting import first_line, out_of_memory, release
from trainkit.models.images import image_inputs
from trainkit.models.seq2seq import decoder_prefix, encode
from trainkit.models.stored import Casts
from trainkit.models.unloaded import decided
from trainkit.models.virtual import count_of, moved_by_padding
from trainkit.rollouts.graphs import FixedStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

WORTH_A_GRAPH = 8
"""A step is captured as a graph if at least so many follow: capturing takes about as long as two steps."""

GRAPHED = frozenset({"cuda"})
"""The types of devices on which steps are made in fixed shapes, so that graphs can replay them."""

UNFIT = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)
"""Exceptions that a model may raise if it does not support the cache."""


class _Preallocated(DynamicLayer):
    """Keys and values of one layer in buffers with room for the whole responses, so that a step does not copy them."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room, self.rows, self.length = room, 0, 0
        self.buffers: list[Tensor] = []
        """Keys and values [S, H, R, D] of at most S rows, of which the first ``rows`` are used."""
        self.at: Tensor | None = None
        """The column to write to, in a `FixedStep`; all columns are then returned."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of new tokens [b, H, S, D] and return all keys and values so far."""
        if autocast_dtype(key_states.device.type):  # otherwise attention would cast all of them in each step
            dtype = dtype_of_attention(key_states)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        states = key_states, value_states
        if self.at is not None:
            keys, values = (buffer[: len(key_states)] for buffer in self.buffers)
            keys.index_copy_(2, self.at, key_states)
            values.index_copy_(2, self.at, value_states)
            return keys, values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rows, self.buffers = len(key_states), [self._buffer(each, len(each)) for each in states]
        start, self.length = self.length, self.length + key_states.size(-2)
        for buffer, new in zip(self.buffers, states, strict=True):
            buffer[: self.rows, :, start : self.length] = new
        return self._view()

    def _buffer(self, like: Tensor, rows: int) -> Tensor:
        heads, size = like.size(1), like.size(3)
        if like.is_cuda:  # the kernel for texts of any lengths reads tokens one after the other; CPUs heads
            return like.new_empty((rows, self.room, heads, size)).transpose(1, 2)
        return like.new_empty((rows, heads, self.room, size))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep, repeat or drop rows, in place unless there are more than ever; what is not written is not copied."""
        if not self.is_initialized:
            return
        for index, buffer in enumerate(self.buffers):
            kept = buffer[beam_idx, :, : self.length]
            if len(kept) > len(buffer):
                buffer = self.buffers[index] = self._buffer(kept, len(kept))
            buffer[: len(kept), :, : self.length] = kept
        self.rows = len(beam_idx)
        self._view()

    def align(self, length: int, first: int) -> None:
        """Move the columns so that there are ``length``, by those behind the ``first`` ones."""
        kept = min(self.length, length) - first
        for buffer in self.buffers:
            columns = buffer[: self.rows, :, self.length - kept : self.length].clone()
            buffer[: self.rows, :, length - kept : length] = columns
        self.rewind(length)

    def join(self, other: _Preallocated, first: int) -> None:
        """Add the rows of a cache with no more columns, which are aligned at the end but for the ``first`` ones."""
        begin, self.rows = self.rows, self.rows + other.rows
        for buffer, more in zip(self.buffers, other._view(), strict=True):
            rows, own = buffer[begin : self.rows, :, : self.length], more.size(2) - first
            rows.zero_()  # a masked NaN would still be one in the attention's product
            rows[:, :, :first] = more[:, :, :first]
            rows[:, :, self.length - own :] = more[:, :, first:]
        self._view()

    def rewind(self, length: int) -> None:
        """Have the first ``length`` columns, which are in the buffers."""
        self.length = length
        self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[: self.rows, :, : self.length] for buffer in self.buffers)
        return self.keys, self.values


@dataclass
class Active:
    """The rows that are still being sampled: b of the B rows, all tensors on the model's device."""

    rows: Tensor  # [b] the index of each among the B rows
    real: Tensor  # bool [b, *], False for padding of the prompts
    padded: bool  # whether any row has padding
    last: Tensor  # [b] the previous token
    cache: DynamicCache | EncoderDecoderCache
    room: int  # the number of tokens that the cache has room for
    joins: ClassVar[bool] = False  # whether other rows may be added

    def keep(self, at: Tensor) -> None:
        """Keep only the rows at the indices ``at``."""
        self.rows, self.real, self.last = self.rows[at], self.real[at], self.last[at]
        self.padded = not bool(self.real.all())
        self.cache.reorder_cache(at)  # type: ignore[arg-type]


class Decoder(Protocol):
    """Runs a model on prompts, then on one token per step."""

    model: PreTrainedModel
    hidden: bool
    """Whether it returns the hidden states that the logits are computed from."""

    @property
    def prefix(self) -> list[int]:
        """The tokens that the decoder of an encoder-decoder starts with; empty for causal models."""
        ...

    def casting(self) -> AbstractContextManager[object]:
        """Return the context in which responses are sampled."""
        ...

    def prefill(self, queries: list[list[int]], room: int) -> tuple[Any, Tensor, Tensor | None]:
        """Run the model on the prompts; return the `Active` rows and, as `next`, the first token's logits and states.

        A prompt that occurs several times is run once. The cache gets room for ``room`` tokens more.
        """
        ...

    def next(self, active: Any) -> tuple[Tensor, Tensor | None]:
        """Return the next token's logits [b, V], and if ``hidden`` the states [b, D] they come from."""
        ...

    def whole(self, query: list[int], response: list[int]) -> Tensor:
        """Return the logits [T + 1, V] after the query and after each of T response tokens, without a cache."""
        ...


def _distinct(
    queries: list[list[int]], device: torch.device, images: Images | None = None
) -> tuple[list[list[int]], Tensor, Images | None]:
    """Return the distinct queries, for each row the index of its query [B], and the images of the queries."""
    keys = [(*query, -1 - image) for query, image in zip(queries, _sets(images, len(queries)), strict=True)]
    places = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    use = torch.tensor([places[key] for key in keys], device=device)
    if images is not None:
        images = replace(images, of=torch.tensor([-1 - key[-1] for key in places], device=device))
    return [list(key[:-1]) for key in places], use, images


def _sets(images: Images | None, rows: int) -> list[int]:
    """Return which images rows have, as `Images.of`."""
    sets: list[int] = [-1] * rows if images is None else images.of.tolist()
    return sets


def _read_once(
    active: Active, rows: int, use: Tensor, outputs: tuple[Tensor, Tensor | None]
) -> tuple[Any, Tensor, Tensor | None]:
    """Repeat the results of distinct prompts for all rows."""
    logits, hidden = outputs
    if len(active.rows) < rows:
        active.keep(use)
        logits, hidden = logits[use], None if hidden is None else hidden[use]
    active.rows = torch.arange(rows, device=use.device)
    return active, logits, hidden


def _cache(config: PreTrainedConfig, room: int) -> DynamicCache:
    """Return the model's cache, with plain layers preallocated; sliding and recurrent layers are not changed."""
    cache = DynamicCache(config=config)
    cache.layers = [_Preallocated(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _foreign_hooks(module: Any) -> bool:
    """Return whether a module has hooks, other than those by which transformers returns hidden states."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks) or hasattr(
        module, "_hf_hook"
    )


# ------------------------------------------------------------------------------------------------- causal models


@dataclass
class _ActiveText(Active):
    """Prompts are padded on the left; ``real`` is [b, P + room], True for all response tokens."""

    lengths: Tensor  # [b] real tokens so far
    width: int  # tokens so far, padding included
    before: int  # virtual tokens, which are in the cache, and neither in ``real`` nor in lengths and width
    fixed: dict[int, FixedStep] = field(default_factory=dict)  # steps of b rows
    plain: set[int] = field(default_factory=set)  # there is no memory for a graph of so many rows
    shift: Tensor | None = None  # [b] positions beyond lengths, after images; None: there are none

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return all(type(layer) is _Preallocated for layer in self.cache.layers)

    def keep(self, at: Tensor) -> None:
        if len(at) > len(self.rows):  # in other buffers
            self.fixed = {}
        self.rewind()
        super().keep(at)
        self.lengths = self.lengths[at]
        self.shift = None if self.shift is None else self.shift[at]

    def rewind(self) -> None:
        """Let plain layers of the cache have the tokens so far, which are in their buffers."""
        for layer in self.cache.layers:
            if isinstance(layer, _Preallocated) and layer.is_initialized:
                layer.rewind(self.before + self.width)

    def align(self, width: int = 0) -> None:
        """Drop columns of padding, of all rows that are kept, but have at least ``width``."""
        columns, self.width = self.width + self.room, max(int(self.lengths.max()), width)
        for layer in self.cache.layers:
            layer.align(self.before + self.width, self.before)  # type: ignore[union-attr]
        self.room = columns - self.width
        self.real = torch.arange(columns, device=self.real.device) >= (self.width - self.lengths).unsqueeze(1)
        self.padded = not bool(self.real.all())

    def join(self, other: _ActiveText) -> None:
        """Add other rows, of which the prompts have been read."""
        self.align(other.width)
        for layer, more in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.join(more, self.before)  # type: ignore[union-attr]
        if self.shift is not None or other.shift is not None:
            shifts = [each.lengths.new_zeros(()) if each.shift is None else each.shift for each in (self, other)]
            self.shift = torch.cat([s.expand_as(e.lengths) for s, e in zip(shifts, (self, other), strict=True)])
        for name in ("rows", "last", "lengths"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        self.align(self.width)


@dataclass
class CausalDecoder:
    """A causal language model, run step by step."""

    model: PreTrainedModel
    fill: int
    """The token id used as padding."""
    head_alone: bool
    hidden: bool
    graphed: bool | None = field(default=None, init=False)
    """Whether steps of fixed shapes give the logits of the model's own steps; found out at the first one."""
    casts: Casts | None = field(default=None, init=False)
    """Of the weights, under autocast, where steps may be graphs, while responses are sampled."""

    @property
    def prefix(self) -> list[int]:
        """Empty: the response continues the prompt."""
        return []

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Do as `Decoder` describes."""
        kind = self.model.device.type
        dtype = autocast_dtype(kind) if kind in GRAPHED and self.graphed is not False else None
        self.casts = None if dtype is None else Casts(self.model, dtype)
        try:
            yield
        finally:
            self.casts = None

    def prefill(
        self, queries: list[list[int]], room: int, images: Images | None = None
    ) -> tuple[_ActiveText, Tensor, Tensor | None]:
        """Do as `Decoder` describes; ``images`` are those of the prompts."""
        device = self.model.device
        distinct, use, images = _distinct(queries, device, images)
        width = max(map(len, distinct))
        ids = torch.tensor([[self.fill] * (width - len(query)) + query for query in distinct], device=device)
        lengths = torch.tensor([len(query) for query in distinct], device=device)
        real = torch.arange(width + room, device=device) >= (width - lengths).unsqueeze(1)
        before = count_of(self.model)
        padded, cache = min(map(len, distinct)) < width, _cache(self.model.config, before + width + room)
        rows = use.new_zeros(len(distinct))
        active = _ActiveText(rows, real, padded, ids[:, -1], cache, room, lengths, width, before)
        inputs = {"position_ids": (real[:, :width].cumsum(-1) - 1).clamp_(min=0)}
        inputs |= image_inputs(self.model, ids, real[:, :width], images)
        positions = inputs.pop("position_ids")
        if positions.dim() > 2:  # those of tokens after an image continue from the largest in it
            active.shift = positions.amax((0, 2)) + 1 - lengths
        return _read_once(active, len(queries), use, self._forward(ids, real[:, :width], positions, cache, **inputs))

    def next(self, active: _ActiveText) -> tuple[Tensor, Tensor | None]:
        """Do as `Decoder` describes."""
        logits, hidden = self._by_graph(active) or self._own(active)
        active.lengths, active.width, active.room = active.lengths + 1, active.width + 1, active.room - 1
        return logits, hidden

    def _own(self, active: _ActiveText) -> tuple[Tensor, Tensor | None]:
        """Make the model's own step."""
        real = active.real[:, : active.width + 1] if active.padded else None
        positions = active.lengths if active.shift is None else active.lengths + active.shift
        return self._forward(active.last.unsqueeze(1), real, positions.unsqueeze(1), active.cache)

    def _by_graph(self, active: _ActiveText) -> tuple[Tensor, Tensor | None] | None:
        """Make a step of fixed shapes, and return what it returns; None if the model has to make its own.

        The first one is compared with the model's own, from which it differs by rounding.
        """
        rows, why = len(active.rows), ""
        few = rows not in active.fixed and active.room <= WORTH_A_GRAPH
        plain = self.graphed is False or rows in active.plain or active.shift is not None
        if plain or few or self.model.device.type not in GRAPHED:
            return None
        try:
            if rows not in active.fixed:
                active.fixed[rows] = self._fixed(active)
            replayed = active.fixed[rows].play(active.last, active.lengths, active.width)
            if self.graphed is None:
                active.rewind()
                expected = self._own(active)
                why = _difference_of_steps(replayed[0], expected[0], rounding(self._dtype, self.model.device))
        except UNFIT as error:
            why = first_line(error)
            if out_of_memory(error):  # for these rows; fewer may leave room
                log.info("steps of %d rows are not replayed as graphs: %s", rows, why)
                active.plain.add(rows)
        if why:
            active.fixed.pop(rows, None)
            active.rewind()
            if rows in active.plain:
                release()
            else:
                log.info("the steps of %s are not replayed as graphs: %s", type(self.model).__name__, why)
                self.graphed = False
            return None
        self.graphed = True
        return replayed

    def _fixed(self, active: _ActiveText) -> FixedStep:
        """Return a step of fixed shapes for the active rows.

        Raises:
            ValueError: it may differ from the model's own.
        """
        self._check_plain(active)
        if count_of(self.model):
            raise ValueError("it has virtual tokens")
        if self.model.config._attn_implementation != "sdpa":
            raise ValueError(f"its attention is {self.model.config._attn_implementation}")
        for layer in active.cache.layers:
            for buffer in layer.buffers:  # type: ignore[union-attr]
                buffer[:, :, active.width :] = 0.0  # a masked NaN would still be one in the attention's product
        register_attention()
        step = partial(self._forward, cache=active.cache)
        return FixedStep(step, len(active.rows), self.model.device, list(active.cache.layers))

    @property
    def _dtype(self) -> torch.dtype:
        """The precision in which the model computes."""
        return autocast_dtype(self.model.device.type) or self.model.dtype

    def _check_plain(self, active: _ActiveText) -> None:
        """Refuse models of which more than calls of torch on plain caches would have to be made again.

        Raises:
            ValueError: its cache has other layers, or it has hooks.
        """
        if not all(type(layer) is _Preallocated for layer in active.cache.layers):
            raise ValueError("its cache has layers that are not plain")
        if any(_foreign_hooks(module) for module in self.model.modules()):
            raise ValueError("it has hooks")

    def whole(self, query: list[int], response: list[int]) -> Tensor:
        """Do as `Decoder` describes."""
        ids = torch.tensor([[*query, *response]], device=self.model.device)
        logits: Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return logits[0, len(query) - 1 :].float()

    def _forward(
        self,
        ids: Tensor,
        real: Tensor | None,
        positions: Tensor,
        cache: DynamicCache | EncoderDecoderCache,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Do as `next` does for the tokens ``ids`` [b, S]. ``real`` is None without padding, which is faster.

        It is [b, W], or a mask [*, *, 1, *] of attention. The model gets ``more``, too.
        """
        inputs = {"input_ids": ids, "attention_mask": real, "position_ids": positions, "past_key_values": cache, **more}
        with nullcontext() if self.casts is None else self.casts.used():
            if self.head_alone:
                state = self.model.base_model(**inputs, use_cache=True).last_hidden_state[:, -1]
                return self.model.get_output_embeddings()(state), state if self.hidden else None
            outputs = self.model(**inputs, use_cache=True, logits_to_keep=1, output_hidden_states=self.hidden)
            return outputs.logits[:, -1], outputs.hidden_states[-1][:, -1] if self.hidden else None


# ---------------------------------------------------------------------------------------------- encoder-decoders


@dataclass
class _ActivePair(Active):
    """Prompts are padded on the right, ``real`` is [b, P]; the decoder's tokens need no padding."""

    states: Tensor  # [b, P, D] the output of the encoder

    def keep(self, at: Tensor) -> None:
        super().keep(at)
        self.states = self.states[at]


@dataclass
class Seq2SeqDecoder:
    """An encoder-decoder: the encoder runs once, the decoder step by step."""

    model: PreTrainedModel
    fill: int
    """The token id used as padding."""
    hidden: bool

    def casting(self) -> AbstractContextManager[object]:
        """Do as `Decoder` describes."""
        return nullcontext()

    @property
    def prefix(self) -> list[int]:
        """The decoder's start token, and a forced first one."""
        return decoder_prefix(self.model)

    def prefill(self, queries: list[list[int]], room: int) -> tuple[_ActivePair, Tensor, Tensor | None]:
        """Do as `Decoder` describes."""
        device, prefix = self.model.device, self.prefix
        distinct, use, _ = _distinct(queries, device)
        width = max(map(len, distinct))
        ids = torch.tensor([query + [self.fill] * (width - len(query)) for query in distinct], device=device)
        lengths = torch.tensor([len(query) for query in distinct], device=device)
        real = torch.arange(width, device=device) < lengths.unsqueeze(1)
        start = torch.tensor([prefix] * len(distinct), device=device)
        config: Any = self.model.get_decoder().config
        cache = EncoderDecoderCache(_cache(config, len(prefix) + room), DynamicCache(config=config))
        padded, states = not bool(real.all()), encode(self.model, ids, real)
        active = _ActivePair(use.new_zeros(len(distinct)), real, padded, start[:, -1], cache, room, states)
        return _read_once(active, len(queries), use, self._forward(start, active))

    def next(self, active: _ActivePair) -> tuple[Tensor, Tensor | None]:
        """Do as `Decoder` describes."""
        active.room -= 1
        return self._forward(active.last.unsqueeze(1), active)

    def whole(self, query: list[int], response: list[int]) -> Tensor:
        """Do as `Decoder` describes."""
        device = self.model.device
        ids, start = (torch.tensor([tokens], device=device) for tokens in (query, [*self.prefix, *response]))
        logits: Tensor = self.model(input_ids=ids, decoder_input_ids=start, use_cache=False).logits
        return logits[0, len(self.prefix) - 1 :].float()

    def _forward(self, ids: Tensor, active: _ActivePair) -> tuple[Tensor, Tensor | None]:
        """Do as `next` does for the decoder's tokens ``ids`` [b, S]."""
        outputs = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=active.states),
            attention_mask=active.real if active.padded else None,
            decoder_input_ids=ids,
            past_key_values=active.cache,
            use_cache=True,
            output_hidden_states=self.hidden,
        )
        hidden = outputs.decoder_hidden_states[-1][:, -1] if self.hidden else None
        return outputs.logits[:, -1], hidden


# ------------------------------------------------------------------------------------ checking the steps


TRIES = 3
"""How often a model is probed before its steps are said to differ; with some tokens rounding is larger than usual."""

NOISE = 4.0
"""How much farther than full passes cached steps may be from what the model computes in float64."""


@torch.no_grad()
def stepping_fault(decoder: Decoder, tokens: Sequence[int]) -> str:
    """Return why a model cannot be sampled from step by step; an empty string if it can.

    Two prompts of different lengths are run for a few steps, while rows are repeated, reordered and removed. The logits
    must equal those of full forward passes over each row alone; or, in the last of three tries with other tokens, be
    about as near as these to those in float64.

    Args:
        decoder: runs the model.
        tokens: the ids of ordinary tokens, of which some are chosen; special ones may be untrained.
    """
    model, why = decoder.model, ""
    if moved_by_padding(model):
        return "padding of prompts would move virtual tokens out of its sliding windows"
    training = model.training
    model.eval()
    try:
        with torch.autocast(model.device.type, enabled=False), uncompiled(model):
            for attempt in range(TRIES):
                chosen = iter(Random(attempt).choices(tokens, k=16))
                probe = partial(_difference, decoder, chosen, by_noise=attempt == TRIES - 1)
                if not (why := decided(probe)):
                    break
    except UNFIT as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.train(training)
    return why


@torch.no_grad()
def _difference(decoder: Decoder, tokens: Iterator[int], *, by_noise: bool) -> str:
    """Return how cached steps differ from full passes for some tokens; empty if they do not, or by noise at most."""
    queries, model = [[*islice(tokens, 3)], [*islice(tokens, 5)]], decoder.model
    rows: list[tuple[list[int], list[int]]] = [(query, []) for query in queries]
    active, logits, _ = decoder.prefill(queries, 4)
    steps = [(rows, logits)]
    for keep in ([1, 0, 1], [2, 1], [0]):  # the last row left has no padding
        active.keep(torch.tensor(keep, device=model.device))
        rows = [(rows[at][0], [*rows[at][1], next(tokens)]) for at in keep]
        active.last = torch.tensor([response[-1] for _, response in rows], device=model.device)
        steps.append((rows, decoder.next(active)[0]))

    def passes() -> list[Tensor]:
        outputs: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        for query, response in (row for rows, _ in reversed(steps) for row in rows):  # the longest first
            if (tuple(query), tuple(response)) not in outputs:
                for length, logits in enumerate(decoder.whole(query, response)):
                    outputs[tuple(query), tuple(response[:length])] = logits
        return [torch.stack([outputs[tuple(query), tuple(response)] for query, response in rows]) for rows, _ in steps]

    def farthest(outputs: Iterable[Tensor], expected: list[Tensor]) -> float:
        return max(map(_apart, outputs, expected))

    cached, full, dtype = [logits for _, logits in steps], passes(), autocast_dtype(model.device.type) or model.dtype
    allowed = rounding(dtype, model.device) ** 0.5
    if (off := farthest(cached, full)) <= allowed:
        return ""
    if by_noise:
        with suppress(*UNFIT), _in_float64(model):  # not every model can be run in it, and it needs memory
            exact = passes()
            if farthest(cached, exact) <= NOISE * farthest(full, exact):
                return ""
    return f"cached steps differ from full forward passes by {off:.1%}"


@contextmanager
def _in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute in float64 within the context."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    originals = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, originals, strict=True):
            tensor.data = data


def _apart(values: Tensor, expected: Tensor) -> float:
    """Return the distance of ``values`` [b, V] from ``expected`` [b, V], relative to the spread of these."""
    values, expected = values.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float(((values - expected).norm() / spread.clamp(min=1e-6)).nan_to_num(torch.inf))


LIKELIEST = 8
"""The number of tokens of a step whose log-probabilities are compared."""


def _difference_of_steps(logits: Tensor, expected: Tensor, rounding: float) -> str:
    """Return how the logits [b, V] of a step differ from the model's own; empty if it is by rounding.

    The whole row may differ by √rounding of its spread. A column that a wrong mask hides or shows can change less than
    that, so the log-probabilities of the likeliest tokens are compared too: by 3 √rounding, 0.26 in bfloat16.
    """
    if (apart := _apart(logits, expected)) > rounding**0.5:
        return f"their logits differ by {apart:.1%}"
    likeliest = expected.topk(min(LIKELIEST, expected.size(-1))).indices
    both = [each.float().log_softmax(-1).gather(-1, likeliest) for each in (logits, expected)]
    most = float((both[0] - both[1]).abs().max())
    return "" if most <= 3 * rounding**0.5 else f"their log-probabilities differ by {most:.2g}"


def vocabulary(model: PreTrainedModel) -> int:
    """Return the size of the model's vocabulary."""
    return int(model.config.get_text_config().vocab_size)
