"""Shared prompts: the prompt of several rows is run once, and each row continues from its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from trainkit.data import Sequences
from trainkit.data.batches import Images
from trainkit.models.backend import autocast_dtype, rounding
from trainkit.models.images import reads_images
from trainkit.models.joined import begins, different_prompts
from trainkit.models.trunk import tiny_input
from trainkit.models.virtual import moved_by_padding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

H = TypeVar("H")

TOLERANCE = 1e-4
"""Largest relative difference between shared and separate rows of a small input that counts as rounding. Models in
float64 have parts that compute in float32."""
FAULTS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError, NotImplementedError)
"""What models raise that cannot run in another way than transformers' own."""
COARSE_TOLERANCE = 0.05
"""The same where products are rounded to 16 bits or to TF32."""


@dataclass(frozen=True)
class SharedPrompts:
    """Rows of prompt and response in two parts: G different prompts, and what follows them in each of B rows.

    Column j of ``chosen`` belongs to the j-th token after the prompt. It was chosen in the last state of the prompt if
    j is 0, else in the state of token j − 1 of ``ids``.
    """

    prompts: Tensor
    """The different prompts, padded on the left [G, P]."""
    real: Tensor
    """bool [G, P]: the tokens of the prompts."""
    of: Tensor
    """The prompt of each row [B]."""
    ids: Tensor
    """What follows the prompt of each row, as far as its states are needed [B, S], S ≥ 1."""
    mask: Tensor
    """bool [B, S]: real tokens."""
    chosen: Tensor
    """bool [B, S + 1]: the response tokens."""
    images: Images | None = None
    """The images of the prompts."""

    @classmethod
    def of_rows(cls, sequences: Sequences, chosen: Tensor | None = None) -> SharedPrompts:
        """Divide sequences [B, T] into their prompts and what follows these.

        Args:
            sequences: the rows.
            chosen: bool [B, T]: the tokens in whose states something is read, after the prompt; by default the response
                tokens.
        """
        unique, of = different_prompts(sequences)
        images = sequences.images
        if images is not None:
            unique, images = unique[:, :-1], replace(images, of=unique[:, -1])
        chosen, lengths, device = sequences.response_mask if chosen is None else chosen, (unique >= 0).sum(1), of.device
        source = torch.arange(unique.size(1), device=device) - (unique.size(1) - lengths.unsqueeze(1))
        total = sequences.input_ids.size(1)
        before = begins(sequences) + lengths[of].unsqueeze(1)  # the column after each prompt
        needed = (chosen * torch.arange(total, device=device)).amax(1, keepdim=True) - before
        places = before + torch.arange(max(int(needed.max()), 1) + 1, device=device)  # [B, S + 1]
        inside, places = places < total, places.clamp(max=total - 1)
        tokens, real, is_chosen = (x.gather(1, places) for x in (sequences.input_ids, sequences.attention_mask, chosen))
        return cls(
            prompts=unique.gather(1, source.clamp(min=0)).clamp(min=0),
            real=source >= 0,
            of=of,
            ids=tokens[:, :-1],
            mask=(real & inside)[:, :-1],
            chosen=is_chosen & inside,
            images=images,
        )

    def prompt_inputs(self) -> dict[str, Any]:
        """Return the model's inputs for the prompts."""
        return {
            "input_ids": self.prompts,
            "attention_mask": self.real,
            "position_ids": (self.real.long().cumsum(1) - 1).clamp(min=0),
            "past_key_values": DynamicCache(),
            "use_cache": True,
        }

    def inputs_after(self, cache: DynamicCache, rows: Tensor, width: int, ends: Tensor) -> dict[str, Any]:
        """Return the model's inputs for the first ``width`` tokens after the prompts, of the rows [b].

        ``cache`` has the keys and values of the prompts; the gradient flows through them. ``ends`` are the positions
        after the prompts [G].
        """
        of = self.of[rows]
        before = self.real[of]
        return {
            "input_ids": self.ids[rows, :width],
            "attention_mask": torch.cat([before, self.mask[rows, :width]], 1),
            "position_ids": ends[of].unsqueeze(1) + torch.arange(width, device=of.device),
            "past_key_values": selected(cache, of),
            "use_cache": True,
        }

    def buckets(self, cost: int) -> list[tuple[Tensor, int]]:
        """Group the rows by the number of tokens after the prompt: the rows [b] and the width of each pass.

        A pass is added where it saves over ``cost`` tokens of padding.
        """
        columns = torch.arange(self.chosen.size(1), device=self.chosen.device)
        ends = (self.chosen * columns).amax(1).clamp(min=1)
        order = ends.argsort(descending=True, stable=True)
        widths = ends[order].tolist()
        starts = [0]
        for index, width in enumerate(widths):
            if (widths[starts[-1]] - width) * (len(widths) - index) > cost:
                starts.append(index)
        if len(starts) == 1:
            return [(self.all_rows, self.ids.size(1))]
        return [(rows, widths[start]) for rows, start in zip(order.tensor_split(starts[1:]), starts, strict=True)]

    def run(
        self,
        model: Callable[[dict[str, Any]], tuple[Tensor, ...]],
        cost: int | None,
        reads: Callable[[Tensor, Tensor, Images | None], dict[str, Tensor]],
    ) -> tuple[Tensor, ...]:
        """Return the model's outputs for the last token of each prompt and the tokens after it, [B, S + 1, *] each.

        The prompts are run once, together. What follows them is run in `buckets`.

        Args:
            model: returns outputs [*, T, *] for inputs.
            cost: that of one more pass, in tokens; None: what follows the prompts is run in one pass.
            reads: returns what the model reads besides for prompts, of their ids, masks and images.
        """
        inputs = {**self.prompt_inputs(), **reads(self.prompts, self.real, self.images)}
        ends = inputs["position_ids"].reshape(-1, *self.prompts.shape).amax((0, 2)) + 1
        firsts, cache, width = [each[:, -1:] for each in model(inputs)], inputs["past_key_values"], self.ids.size(1)
        buckets = [(self.all_rows, width)] if cost is None else self.buckets(cost)
        parts: list[list[Tensor]] = [[] for _ in firsts]
        for rows, tokens in buckets:
            rest = model(self.inputs_after(cache, rows, tokens, ends))
            for part, first, after in zip(parts, firsts, rest, strict=True):
                joined = torch.cat([first.index_select(0, self.of[rows]), after], 1)
                part.append(F.pad(joined, (0, 0, 0, width - tokens)) if tokens < width else joined)
        if len(buckets) == 1:
            return tuple(part[0] for part in parts)
        back = torch.cat([rows for rows, _ in buckets]).argsort()
        return tuple(torch.cat(part).index_select(0, back) for part in parts)

    @property
    def all_rows(self) -> Tensor:
        """The index of each row [B]."""
        return torch.arange(len(self.of), device=self.of.device)


def with_ends(sequences: Sequences) -> tuple[Sequences, Tensor]:
    """Return rows with a column more, and the place after the last token of each. -> rows [B, T + 1], bool [B, T + 1].

    `SharedPrompts.of_rows` reads the states of last tokens as if a token were chosen there.
    """
    wider = replace(sequences, trunk=None).on_columns(lambda x: F.pad(x, (0, 1)))
    ends = begins(sequences).squeeze(1) + sequences.lengths
    return wider, F.one_hot(ends, wider.input_ids.size(1)).bool()


def selected(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """Return a cache with the keys and values of the ``rows`` [b] of another, through which gradients flow."""
    chosen = DynamicCache()
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise TypeError(f"a cache has layers of type {type(layer).__name__}")
        layer_of_rows = DynamicLayer()
        chosen.layers.append(layer_of_rows)
        if layer.keys is None or layer.values is None:  # of a block that does not run, or reads those of another one
            continue
        keys, values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
        layer_of_rows.lazy_initialization(keys, values)
        layer_of_rows.keys, layer_of_rows.values = keys, values
    return chosen


def small_rows(model: PreTrainedModel) -> Sequences:
    """Return four rows of two prompts of different lengths, to compare shared with separate rows."""
    ids = tiny_input(model)["input_ids"][0].tolist()
    a, b, c, d = (ids * 4)[:4]
    rows = [([a, b, c], [d, a]), ([b], [a, c, d, b]), ([a, b, c], [b, c, a, a]), ([a, b, c], [c])]
    return Sequences.from_lists([p for p, _ in rows], [r for _, r in rows]).to(model.device)


def why_not_shared(model: PreTrainedModel, states: Callable[[Sequences, bool], Tensor]) -> str | None:
    """Return why the model cannot continue from shared prompts; None if it can.

    States and gradients of shared and separate rows are compared on a small input. A model fails that needs more of
    earlier tokens than keys and values, such as a recurrent one, or whose keys and values carry no gradient.

    Args:
        model: the model.
        states: returns the states of rows that something is read from; the second argument says whether the prompts
            are shared.
    """
    name, training = type(model).__name__, model.training
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "with activation checkpointing, keys and values are not kept"
    if moved_by_padding(model):
        return f"padding of prompts would move the virtual tokens of {name} out of its sliding windows"
    model.eval()
    try:
        shared, expected = (with_gradient(model, states, shared) for shared in (True, False))
    except FAULTS as error:
        return f"{name} cannot continue from keys and values ({type(error).__name__}: {error})"
    finally:
        model.train(training)
    same = all(map(equal_but_for_rounding, shared, expected))
    return None if same else f"{name} gives other numbers when it continues from a prompt"


def why_not_joined(model: PreTrainedModel, states: Callable[[Sequences, bool | None], Tensor]) -> str | None:
    """Return why the rows of the model cannot be joined; None if they can.

    States and gradients are compared with those of padded rows on a small input, on the device of the model and in the
    precision of the moment. A model fails whose states depend on other texts of the row, such as a recurrent one, or
    whose attention is not transformers' "sdpa".

    Args:
        model: the model.
        states: returns the states of rows that something is read from. The second argument says how they are run:
            None, padded; else joined, and whether the prompts are shared.
    """
    name, training = type(model).__name__, model.training
    if reads_images(model.config):
        return f"the images of {name} have positions of their own"
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return f"the attention of {name} is {getattr(model.config, '_attn_implementation', None)!r}, not 'sdpa'"
    model.eval()
    try:
        expected, separate, shared = (with_gradient(model, states, how) for how in (None, False, True))
    except FAULTS as error:
        return f"{name} cannot run joined rows ({type(error).__name__}: {error})"
    finally:
        model.train(training)
    same = all(map(equal_but_for_rounding, (*separate, *shared), (*expected, *expected)))
    return None if same else f"{name} gives other numbers for joined rows"


def with_gradient(model: PreTrainedModel, states: Callable[[Sequences, H], Tensor], how: H) -> tuple[Tensor, Tensor]:
    """Return ``states(small_rows, how)``, and the gradient of their weighted sum with respect to the embeddings."""
    rows = small_rows(model)
    embedding: Any = model.get_input_embeddings()
    change = embedding.weight.new_zeros(int(rows.input_ids.max()) + 1, embedding.weight.size(1)).requires_grad_()
    handle = embedding.register_forward_hook(lambda _, inputs, embedded: embedded + change[inputs[0]])
    try:
        with torch.enable_grad():
            outputs = states(rows, how)
            weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
            weights = weights.view_as(outputs)
            (gradient,) = torch.autograd.grad((outputs * weights).sum(), change)
    finally:
        handle.remove()
    return outputs.detach(), gradient


def equal_but_for_rounding(values: Tensor, expected: Tensor) -> bool:
    """Return whether numbers of a small input are the same, up to the rounding of products."""
    size, difference = float(expected.abs().max()) or 1.0, float((values - expected).abs().max())
    return difference <= size * tolerance_for(expected)


def tolerance_for(values: Tensor) -> float:
    """Return the relative difference that counts as rounding between numbers like ``values`` of a small input."""
    dtype = autocast_dtype(values.device.type) or values.dtype
    return COARSE_TOLERANCE if rounding(dtype, values.device) > TOLERANCE else TOLERANCE
