"""The sampler: prompts in, rollouts out. The only place with left padding, caches and stop rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Row, Sequences
from trainkit.functional import allow_logits, token_logprobs, truncate_logits
from trainkit.models.loading import pad_id
from trainkit.models.policy import check_logit_mask

SHRINK_AT = 0.75
"""Rows that have ended leave the batch once no more than this share is left: fewer rows against a copy of the cache."""


class Sampler(Protocol):
    """What `make_sampler` may return: samples one response per prompt."""

    def __call__(
        self, rows: list[Row], queries: list[list[int]], settings: SamplingConfig, generator: torch.Generator
    ) -> Rollouts:
        """Rollouts for ``queries`` (token ids, one list per row), drawn with ``generator`` alone."""
        ...


class _Preallocated(DynamicLayer):
    """Keys and values of one layer in a buffer with room for the whole response: a step writes, it does not copy."""

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room, self.length = room, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states of new tokens [B, H, S, D]; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [
                states.new_empty((*states.shape[:2], self.room, states.size(-1)))
                for states in (key_states, value_states)
            ]
        start, self.length = self.length, self.length + key_states.size(-2)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self.length] = states
        return self._view()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep, repeat or drop rows; what is not yet written is not copied."""
        chosen = []
        for buffer in self.buffers:
            kept = buffer.new_empty((len(indices), *buffer.shape[1:]))
            kept[:, :, : self.length] = buffer[indices, :, : self.length]
            chosen.append(kept)
        self.buffers = chosen
        self._view()

    def _view(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)
        return self.keys, self.values


@dataclass
class _Active:
    """The rows that are still being sampled: b of the B rows, all tensors on the model's device."""

    rows: Tensor  # [b] which of the B rows each is
    alive: Tensor  # bool [b]; rows that have ended stay until enough have
    attention_mask: Tensor  # bool [b, P + tokens so far], left-padded
    last: Tensor  # [b] the token before the one to be chosen
    cache: DynamicCache

    def keep(self, at: Tensor) -> None:
        """Go on with the rows at the indices ``at`` alone."""
        self.rows, self.alive, self.last = self.rows[at], self.alive[at], self.last[at]
        self.attention_mask = self.attention_mask[at]
        self.cache.batch_select_indices(at)


@dataclass
class _Sampled:
    """What has been sampled of all B rows, with room for R tokens."""

    tokens: Tensor  # [B, R]
    logprobs: Tensor  # [B, R]
    lengths: Tensor  # [B] tokens, the terminating one included
    terminated: Tensor  # bool [B]

    @classmethod
    def empty(cls, count: int, room: int, device: torch.device) -> _Sampled:
        """Nothing yet."""
        return cls(
            torch.zeros((count, room), dtype=torch.long, device=device),
            torch.zeros((count, room), device=device),
            torch.zeros(count, dtype=torch.long, device=device),
            torch.zeros(count, dtype=torch.bool, device=device),
        )


class CausalSampler:
    """Samples from a causal language model with a key-value cache, one token a step for the whole batch.

    A prompt that occurs several times runs once; the cache is allocated once; rows that have ended leave the batch.
    The randomness of a row does not depend on when others end.

    The log-probabilities it returns are those of the distribution that is trained on: at the sampling temperature
    and under the logit mask, before ``top_k`` and ``top_p`` cut it (F-02).

    Args:
        model: the language model, unwrapped.
        tokenizer: turns tokens into the text that stop strings and reward functions read.
        logit_mask: bool [V] or [V, V], True = allowed.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        logit_mask: Tensor | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.logit_mask = check_logit_mask(logit_mask, model)
        self.skip_special_tokens = skip_special_tokens

    @torch.no_grad()
    def __call__(
        self, rows: list[Row], queries: list[list[int]], settings: SamplingConfig, generator: torch.Generator
    ) -> Rollouts:
        """Rollouts for ``queries``, one response each; ``generator`` lives on the model's device."""
        room, device = settings.max_new_tokens, self.model.device
        # numbers in [0, 1) that decide every token, drawn ahead, so that no row depends on when others end
        uniforms = torch.rand((len(queries), room), generator=generator, device=device)
        eos = torch.tensor(eos_ids(self.model, self.tokenizer), device=device)
        sampled = _Sampled.empty(len(queries), room, device)
        active, logits = self._prefill(queries, room)
        for step in range(room):
            self._choose(active, logits, settings, uniforms[active.rows, step], sampled, step)
            self._end_rows(active, sampled, eos, settings.stop_sequences)
            left = int(active.alive.sum())
            if left == 0 or step == room - 1:
                break
            if left <= len(active.rows) * SHRINK_AT:
                active.keep(active.alive.nonzero().squeeze(-1))
            logits = self._next_logits(active)
        return self._finish(sampled, rows, queries, settings.stop_sequences)

    def _prefill(self, queries: list[list[int]], room: int) -> tuple[_Active, Tensor]:
        """The state after every prompt has been read, and the logits of the first token [B, V]."""
        device = self.model.device
        distinct = {tuple(query): i for i, query in reversed(list(enumerate(dict.fromkeys(map(tuple, queries)))))}
        unique = sorted(distinct, key=distinct.__getitem__)
        use = torch.tensor([distinct[tuple(query)] for query in queries], device=device)
        width = max(len(query) for query in unique)
        fill = pad_id(self.tokenizer)
        ids = torch.tensor([[fill] * (width - len(query)) + list(query) for query in unique], device=device)
        lengths = torch.tensor([[len(query)] for query in unique], device=device)
        mask = torch.arange(width, device=device) >= width - lengths
        cache = _cache(self.model, width + room)
        logits = self._forward(ids, mask, cache)
        if len(unique) < len(queries):
            cache.batch_select_indices(use)
            logits, mask, ids = logits[use], mask[use], ids[use]
        everyone = torch.arange(len(queries), device=device)
        return _Active(everyone, torch.ones_like(use, dtype=torch.bool), mask, ids[:, -1], cache), logits

    def _next_logits(self, active: _Active) -> Tensor:
        active.attention_mask = torch.cat([active.attention_mask, active.alive.unsqueeze(1)], dim=1)
        return self._forward(active.last.unsqueeze(1), active.attention_mask, active.cache)

    def _forward(self, ids: Tensor, attention_mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the next token [b, V] in float32, feeding ``ids`` [b, S] into the cache."""
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.size(1) :]
        outputs = self.model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = outputs.logits[:, -1].float()
        return logits

    def _choose(
        self, active: _Active, logits: Tensor, settings: SamplingConfig, uniforms: Tensor, sampled: _Sampled, step: int
    ) -> None:
        """Choose a token for every active row and write it down."""
        scores = allow_logits(logits / (settings.temperature or 1.0), active.last, self.logit_mask)
        token = _draw(scores, settings, uniforms)
        rows = active.rows[active.alive]
        sampled.tokens[rows, step] = token[active.alive]
        sampled.logprobs[rows, step] = token_logprobs(scores, token)[active.alive]
        sampled.lengths[rows] = step + 1
        active.last = token

    def _end_rows(self, active: _Active, sampled: _Sampled, eos: Tensor, stops: list[str]) -> None:
        """Mark the rows that their last token ended: by EOS, or by completing a stop string."""
        ended = torch.isin(active.last, eos)
        if stops:
            so_far = [sampled.tokens[row, : sampled.lengths[row]] for row in active.rows]
            texts = decode(self.tokenizer, so_far, self.skip_special_tokens)
            ended |= torch.tensor([any(stop in text for stop in stops) for text in texts], device=ended.device)
        sampled.terminated[active.rows[ended & active.alive]] = True
        active.alive = active.alive & ~ended

    def _finish(self, sampled: _Sampled, rows: list[Row], queries: list[list[int]], stops: list[str]) -> Rollouts:
        tokens, lengths = sampled.tokens.tolist(), sampled.lengths.tolist()
        taken = torch.arange(sampled.tokens.size(1), device=sampled.lengths.device) < sampled.lengths.unsqueeze(1)
        return assemble(
            self.tokenizer,
            rows,
            queries,
            [row[:length] for row, length in zip(tokens, lengths, strict=True)],
            terminated=sampled.terminated,
            logprobs=sampled.logprobs[taken],
            stops=stops,
            skip_special_tokens=self.skip_special_tokens,
        )


def _cache(model: PreTrainedModel, room: int) -> DynamicCache:
    """The model's cache, its plain layers preallocated; sliding and recurrent layers stay transformers' own."""
    cache = DynamicCache(config=model.config)
    cache.layers = [_Preallocated(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _draw(scores: Tensor, settings: SamplingConfig, uniforms: Tensor) -> Tensor:
    """One token per row from logits [b, V], by inverting the distribution at ``uniforms`` [b]."""
    if settings.temperature == 0:
        return scores.argmax(-1)
    kept = truncate_logits(scores, top_k=settings.top_k, top_p=settings.top_p)
    mass = kept.softmax(-1).cumsum(-1)
    chosen = (mass <= (uniforms * mass[:, -1]).unsqueeze(-1)).sum(-1)
    last = (mass < mass[:, -1:]).sum(-1)  # the last token with any mass, should rounding reach past it
    return torch.minimum(chosen, last)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's EOS and those of the model's generation config, of which chat models have several (S-65)."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = more if isinstance(more, list) else [] if more is None else [more]
    return sorted({tokenizer.eos_token_id, *more})


def assemble(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    queries: list[list[int]],
    responses: list[list[int]],
    *,
    terminated: Tensor,
    logprobs: Tensor | None,
    stops: list[str],
    skip_special_tokens: bool,
) -> Rollouts:
    """Rollouts from token ids: sequences with masks from the lengths, and text cut at stop strings.

    Args:
        tokenizer: decodes.
        rows: one per response, with the prompt's text if it has one.
        queries: prompt ids.
        responses: response ids, the terminating token included.
        terminated: bool [B].
        logprobs: sampling log-probabilities of all response tokens, row after row [N]; None if unknown.
        stops: strings at which text is cut.
        skip_special_tokens: leave special tokens out of the text.
    """
    sequences = Sequences.from_lists(queries, responses, pad_id(tokenizer)).to(terminated.device)
    mask, aligned = sequences.response_mask, None
    if logprobs is not None:
        aligned = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, logprobs)
    texts = [row["prompt"] if isinstance(row.get("prompt"), str) else None for row in rows]
    decoded = decode(
        tokenizer, [q for q, text in zip(queries, texts, strict=True) if text is None], skip_special_tokens
    )
    unknown = iter(decoded)
    return Rollouts(
        rows=rows,
        sequences=sequences,
        logprobs=aligned,
        terminated=terminated,
        prompts=[next(unknown) if text is None else text for text in texts],
        outputs=[cut_at_stop(text, stops) for text in decode(tokenizer, responses, skip_special_tokens)],
    )


def decode(tokenizer: PreTrainedTokenizerBase, ids: Any, skip_special_tokens: bool) -> list[str]:
    """Text of several responses."""
    return list(tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens)) if len(ids) else []


def cut_at_stop(text: str, stops: list[str]) -> str:
    """``text`` before the first of the stop strings, without trailing blanks there; unchanged if there is none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)].rstrip() if found else text
