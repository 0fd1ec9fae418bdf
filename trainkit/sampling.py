"""The sampler: prompts in, rollouts out. The only place with left padding, caches and stop rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Row, Sequences
from trainkit.functional import allow_logits, token_logprobs, truncate_logits
from trainkit.models.loading import pad_id
from trainkit.models.policy import check_logit_mask


class Sampler(Protocol):
    """What `make_sampler` may return: samples one response per prompt."""

    def __call__(
        self, rows: list[Row], queries: list[list[int]], settings: SamplingConfig, generator: torch.Generator
    ) -> Rollouts:
        """Rollouts for ``queries`` (token ids, one list per row), drawn with ``generator`` alone."""
        ...


@dataclass
class _State:
    """A batch in the middle of being sampled; B rows, all tensors on the model's device."""

    attention_mask: Tensor  # [B, P + steps so far], left-padded
    lengths: Tensor  # [B] sampled tokens, the terminating one included
    terminated: Tensor  # bool [B]
    alive: Tensor  # bool [B]
    tokens: list[Tensor]  # one [B] per step
    logprobs: list[Tensor]  # one [B] per step


class CausalSampler:
    """Samples from a causal language model with a key-value cache, one token a step for the whole batch.

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
        state, ids = self._start(queries)
        eos = torch.tensor(eos_ids(self.model, self.tokenizer), device=ids.device)
        cache = DynamicCache(config=self.model.config)
        for _ in range(settings.max_new_tokens):
            logits = self._next_logits(ids, state, cache)
            scores = allow_logits(logits / (settings.temperature or 1.0), ids[:, -1], self.logit_mask)
            token = _draw(scores, settings, generator)
            state.tokens.append(token)
            state.logprobs.append(token_logprobs(scores, token))
            state.lengths += state.alive
            self._end_rows(state, token, eos, settings.stop_sequences)
            if not state.alive.any():
                break
            state.attention_mask = torch.cat([state.attention_mask, state.alive.unsqueeze(1)], dim=1)
            ids = token.unsqueeze(1)
        return self._finish(state, rows, queries, settings.stop_sequences)

    def _start(self, queries: list[list[int]]) -> tuple[_State, Tensor]:
        device, width = self.model.device, max(len(q) for q in queries)
        fill = pad_id(self.tokenizer)
        ids = torch.tensor([[fill] * (width - len(q)) + q for q in queries], device=device)
        lengths = torch.tensor([[len(q)] for q in queries], device=device)
        real = torch.arange(width, device=device) >= width - lengths
        count = len(queries)
        ones = torch.ones(count, dtype=torch.bool, device=device)
        return _State(real, torch.zeros(count, dtype=torch.long, device=device), ~ones, ones.clone(), [], []), ids

    def _next_logits(self, ids: Tensor, state: _State, cache: DynamicCache) -> Tensor:
        """Logits of the next token [B, V] in float32, feeding ``ids`` into the cache."""
        positions = (state.attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.size(1) :]
        outputs = self.model(
            input_ids=ids,
            attention_mask=state.attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = outputs.logits[:, -1].float()
        return logits

    def _end_rows(self, state: _State, token: Tensor, eos: Tensor, stops: list[str]) -> None:
        """Mark the rows that this token ended: by EOS, or by completing a stop string."""
        ended = torch.isin(token, eos)
        if stops:
            texts = self._decode([row[:n] for row, n in zip(torch.stack(state.tokens, 1), state.lengths, strict=True)])
            ended |= torch.tensor([any(stop in text for stop in stops) for text in texts], device=token.device)
        state.terminated |= ended & state.alive
        state.alive = state.alive & ~ended

    def _finish(self, state: _State, rows: list[Row], queries: list[list[int]], stops: list[str]) -> Rollouts:
        lengths = state.lengths.tolist()
        responses = [row[:n] for row, n in zip(torch.stack(state.tokens, 1).tolist(), lengths, strict=True)]
        sampled = torch.arange(len(state.tokens), device=state.lengths.device) < state.lengths.unsqueeze(1)
        return assemble(
            self.tokenizer,
            rows,
            queries,
            responses,
            terminated=state.terminated,
            logprobs=torch.stack(state.logprobs, 1)[sampled],
            stops=stops,
            skip_special_tokens=self.skip_special_tokens,
        )

    def _decode(self, ids: Any) -> list[str]:
        return decode(self.tokenizer, ids, self.skip_special_tokens)


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


def _draw(scores: Tensor, settings: SamplingConfig, generator: torch.Generator) -> Tensor:
    """One token per row from logits [B, V]; the likeliest at temperature 0. -> [B]."""
    if settings.temperature == 0:
        return scores.argmax(-1)
    kept = truncate_logits(scores, top_k=settings.top_k, top_p=settings.top_p)
    return torch.multinomial(kept.softmax(-1), 1, generator=generator).squeeze(-1)


def cut_at_stop(text: str, stops: list[str]) -> str:
    """``text`` before the first of the stop strings, without trailing blanks there; unchanged if there is none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)].rstrip() if found else text
