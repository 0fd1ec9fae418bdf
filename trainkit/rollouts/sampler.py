"""Samplers: from prompts to rollouts. Only this module and `decoding` use left padding and key-value caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Row, Sequences
from trainkit.data.pipeline import id_count
from trainkit.errors import OutOfMemoryError
from trainkit.functional import allow_logits, penalise_repetition, running_sums, truncate_logits
from trainkit.models.compiling import uncompiled
from trainkit.models.fitting import first_line, out_of_memory, release, rows_that_fit
from trainkit.models.loading import eos_ids, pad_id
from trainkit.models.policy import check_logit_mask
from trainkit.rollouts.decoding import CausalDecoder, Decoder, Seq2SeqDecoder, stepping_fault, vocabulary
from trainkit.rollouts.packing import packed
from trainkit.seeding import uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

SHRINK_AT = 0.75
"""Ended rows are removed from the batch once at most this share of rows is left; removing them copies the cache."""


Purpose = Literal["train", "evaluate", "generate"]
"""What responses are sampled for: a collection of experience, an evaluation, or a call of ``generate``."""


class Sampler(Protocol):
    """The interface of the object that `make_sampler` returns: samples one response per prompt."""

    def __call__(
        self,
        rows: list[Row],
        queries: list[list[int]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        purpose: Purpose,
    ) -> Rollouts:
        """Sample a response to each of ``queries`` (token ids, one list per row).

        Every random number of response b follows from ``seeds[b]``, below 2⁶³, and from nothing else: neither from the
        other rows nor from earlier calls.
        """
        ...


Steer = Callable[[Tensor, Tensor, SamplingConfig], Tensor]
"""``steer(logits, states, settings)`` returns the logits to sample from instead of ``logits`` [b, V], which are divided
by the sampling temperature and masked by the logit mask, as are ids that are no tokens; they are computed from
``states`` [b, D]."""


PARTS = 4
"""The most tokens of a character: those of its bytes."""
Reason = Literal["stop", "length"]
"""Why a response ends: by EOS, a stop token or a stop string, or because it has ``max_new_tokens``."""


@dataclass(frozen=True)
class Generated:
    """B responses as token ids, N tokens in all, and what is known about the tokens."""

    ids: list[list[int]]
    """The token ids of each response, the terminating token included."""
    reasons: list[Reason]
    """Why each response ends."""
    versions: list[int]
    """The version of the weights that each response was sampled with."""
    logprobs: Tensor | None = None
    """Log-probabilities [N] of the tokens, response after response: at the sampling temperature and under the logit
    mask, before any other sampling setting is applied. None if unknown."""
    entropy: Tensor | None = None
    """Entropies [N] of these distributions; None if unknown."""
    hidden: Tensor | None = None
    """The hidden states [N, D] that the tokens were chosen from; None unless they are needed and known."""

    @classmethod
    def cat(cls, parts: Sequence[Generated]) -> Generated:
        """Return the responses of all parts, which know the same about their tokens."""
        if len(parts) == 1:
            return parts[0]
        lists = ([each for part in parts for each in getattr(part, name)] for name in ("ids", "reasons", "versions"))
        tensors = ([getattr(part, name) for part in parts] for name in ("logprobs", "entropy", "hidden"))
        ids, reasons, versions = lists
        return cls(ids, reasons, versions, *(None if each[0] is None else torch.cat(each) for each in tensors))


class TokenSampler:
    """Samples from a language model with a key-value cache, one token per step for the whole batch.

    A prompt that occurs several times is run once. The cache is allocated once. Rows that have ended are removed from
    the batch. The random numbers of a row follow from its seed alone.

    Ids beyond those of the tokenizer, to which a head may be padded, are not sampled.

    The log-probabilities and entropies that it returns are those of the distribution that training uses: at the
    sampling temperature and under the logit mask, before ``min_new_tokens``, ``repetition_penalty``, ``steer``,
    ``top_k``, ``top_p`` and ``min_p`` are applied.

    At construction a few tokens are run through the model. If cached steps differ from full forward passes, for
    example because recurrent states cannot be padded, the model is run by its own ``generate`` instead, and the sampler
    chooses the tokens; log-probabilities, entropies and states are then None.

    Args:
        decoder: runs the model.
        tokenizer: decodes tokens to the text for stop strings and reward functions.
        logit_mask: bool [V] or [V, V], True = allowed.
        skip_special_tokens: omit special tokens from the text.
        steer: changes the logits that tokens are sampled from, given the hidden states.
        beside_training: whether another thread may train at the same time.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        *,
        logit_mask: Tensor | None = None,
        skip_special_tokens: bool = True,
        steer: Steer | None = None,
        beside_training: bool = False,
    ) -> None:
        model = decoder.model
        self.decoder, self.model, self.tokenizer = decoder, model, tokenizer
        self.steer, self.keeps_states = steer, decoder.hidden
        self.most: int | None = None
        """How many responses at a time have fitted into memory, once there were too many; None: any number has."""
        decoder.hidden = decoder.hidden or steer is not None
        self.vocabulary = min(id_count(tokenizer), vocabulary(model))
        mask = check_logit_mask(logit_mask, model, self.vocabulary)
        self.logit_mask = None if mask is None else mask[..., : self.vocabulary]
        self.skip_special_tokens, self.beside_training = skip_special_tokens, beside_training
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ordinary = [token for token in range(self.vocabulary) if token not in special]
        self.fault = stepping_fault(decoder, ordinary or range(self.vocabulary))
        if self.fault:
            log.warning(
                "%s cannot be sampled from with a key-value cache (%s); its own generate() is used, which is slower",
                type(model).__name__,
                self.fault,
            )

    def __call__(
        self,
        rows: list[Row],
        queries: list[list[int]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        purpose: Purpose = "generate",
    ) -> Rollouts:
        """Sample a response to each of ``queries``; token t of response b is drawn with number t of ``seeds[b]``."""
        responses = self.generate(queries, settings, seeds)
        return assemble(
            self.tokenizer,
            rows,
            queries,
            responses.ids,
            terminated=torch.tensor([reason == "stop" for reason in responses.reasons], device=self.model.device),
            logprobs=responses.logprobs,
            entropy=responses.entropy,
            hidden=responses.hidden,
            stops=settings.stop_sequences,
            skip_special_tokens=self.skip_special_tokens,
        )

    @torch.no_grad()
    def generate(
        self,
        queries: list[list[int]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        version: int = 0,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Generated:
        """Return a response to each of ``queries`` as token ids; of half as many at a time if memory does not suffice.

        Args:
            queries: the prompts as token ids.
            settings: the sampling settings.
            seeds: a seed for each response.
            version: that of the weights.
            watch: called with the indices [b] of responses and the next token [b] of each, when these are chosen. All
                are then sampled at once.

        Raises:
            OutOfMemoryError: one response does not fit into memory.
        """
        while True:
            most = len(queries)
            if watch is None:
                fit = rows_that_fit(self.model, max(map(len, queries), default=0) + settings.max_new_tokens)
                most = min(each for each in (most, self.most, fit) if each is not None)
            parts: list[Generated] = []
            try:
                for start in range(0, len(queries), most):
                    part = slice(start, start + most)
                    parts.append(self._generate(queries[part], settings, seeds[part], version, watch))
                return Generated.cat(parts)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or watch is not None:
                    raise
                fault = first_line(error)
            if (tried := min(most, len(queries))) == 1:
                raise OutOfMemoryError(
                    f"a response of {settings.max_new_tokens} tokens to a prompt of {max(map(len, queries))} does not "
                    f"fit into memory ({fault}). Lower rollout.max_new_tokens, or set model.dtype to bfloat16"
                )
            self.most = tried // 2
            release()
            log.warning("%d responses at a time do not fit into memory; sampling %d at a time", tried, self.most)

    def _generate(
        self,
        queries: list[list[int]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        version: int,
        watch: Callable[[Tensor, Tensor], None] | None,
    ) -> Generated:
        draws = uniforms(torch.tensor(seeds, device=self.model.device), settings.max_new_tokens)
        responses = _Responses(self, queries, settings, draws, watch)
        with packed(self.model), uncompiled(self.model):
            if self.fault:
                _by_generate(self.decoder, queries, responses)
                return responses.generated(version)
            active, logits, hidden = self.decoder.prefill(queries, responses.room)
            for step in range(responses.room):
                tokens, alive = responses.extend(step, active.rows, active.last, logits, hidden)
                left, rows = int(alive.sum()), len(active.rows)
                if left == 0 or step == responses.room - 1:
                    break
                # an EOS that ended a row may equal padding
                active.last = tokens if left == rows else torch.where(alive, tokens, active.last)
                if left <= rows * SHRINK_AT:
                    active.keep(alive.nonzero().squeeze(-1))
                logits, hidden = self.decoder.next(active)
        return responses.generated(version)


class CausalSampler(TokenSampler):
    """Samples from a causal language model.

    Args:
        model: the language model, unwrapped.
        tokenizer: as for `TokenSampler`.
        head_alone: whether the model's logits are its output head applied to its trunk (`Policy.head_alone`).
        hidden: return the hidden states from which tokens were chosen, which a value head takes.
        **kwargs: those of `TokenSampler`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        head_alone: bool = False,
        hidden: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(CausalDecoder(model, pad_id(tokenizer), head_alone, hidden), tokenizer, **kwargs)


class Seq2SeqSampler(TokenSampler):
    """Samples from an encoder-decoder: the encoder runs once per distinct prompt, the decoder once per token.

    Args:
        model: the encoder-decoder, unwrapped.
        tokenizer: as for `TokenSampler`.
        hidden: return the decoder's hidden states from which tokens were chosen, which a value head takes.
        **kwargs: those of `TokenSampler`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, hidden: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(Seq2SeqDecoder(model, pad_id(tokenizer), hidden), tokenizer, **kwargs)


def make_sampler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, head_alone: bool = False, **kwargs: Any
) -> TokenSampler:
    """Return the sampler for the model's architecture; the arguments are those of `CausalSampler`."""
    if model.config.is_encoder_decoder:
        return Seq2SeqSampler(model, tokenizer, **kwargs)
    return CausalSampler(model, tokenizer, head_alone=head_alone, **kwargs)


# ------------------------------------------------------------------------------------------------ choosing tokens


class _Responses:
    """The responses to B prompts while they are sampled, at most R tokens each; chooses their tokens."""

    def __init__(
        self,
        sampler: TokenSampler,
        queries: list[list[int]],
        settings: SamplingConfig,
        draws: Tensor,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        (count, self.room), device, self.watch = draws.shape, draws.device, watch
        self.sampler, self.settings = sampler, settings
        self.eos = torch.tensor([*eos_ids(sampler.model, sampler.tokenizer), *settings.stop_token_ids], device=device)
        special = sampler.tokenizer.all_special_ids  # they may have no text
        self.special = torch.tensor(special, dtype=torch.long, device=device)
        self.draws = draws.t().contiguous()  # [R, B]: a step reads and writes one row of each of these tensors
        self.tokens = torch.zeros((self.room, count), dtype=torch.long, device=device)
        self.logprobs = torch.zeros((self.room, count), device=device)
        self.entropy = torch.zeros((self.room, count), device=device)
        self.hidden: Tensor | None = None  # [R, B, D], if requested
        self.taken = torch.zeros((self.room, count), dtype=torch.bool, device=device)  # the terminating token included
        self.alive = torch.ones(count, dtype=torch.bool, device=device)
        self.seen: Tensor | None = None  # bool [B, V], tokens that have occurred, if they are penalised
        if settings.repetition_penalty != 1:
            self.seen = torch.zeros((count, vocabulary(sampler.model)), dtype=torch.bool)
            for row, query in zip(self.seen, queries, strict=True):
                row[sampler.decoder.prefix or query] = True
            self.seen = self.seen.to(device)

    def extend(
        self, step: int, rows: Tensor, previous: Tensor, logits: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Choose and store the next token of ``rows`` [b].

        Tokens stored after the end of a response are ignored.

        Args:
            step: the number of tokens that the responses have already.
            rows: the indices [b] of these rows among the B rows, in ascending order.
            previous: the previous tokens [b].
            logits: the model's logits [b, V], in float32.
            hidden: the states [b, D] that the logits come from.

        Returns:
            The chosen tokens [b], and which of these responses go on, bool [b].
        """
        logits = logits[:, : self.sampler.vocabulary]  # a head may be padded beyond the tokens of the tokenizer
        every = len(rows) == len(self.alive)
        at: Any = step if every else (step, rows)  # indexing by ``rows`` is slow
        plain = _TokenDistribution(self._scale(logits, previous))
        odds = self._restrict(plain, step, rows, previous, logits, hidden)
        tokens = odds.draw(self.draws[at], self.settings.temperature)
        self.tokens[at] = tokens
        self.logprobs[at], self.entropy[at] = plain.logprobs_and_entropy(tokens)
        if self.sampler.keeps_states and hidden is not None:
            if self.hidden is None:
                self.hidden = hidden.new_zeros((*self.tokens.shape, hidden.size(-1)))
            self.hidden[at] = hidden
        if self.seen is not None:
            self.seen[rows, tokens] = True
        alive = self.alive if every else self.alive[rows]
        if self.watch is not None:
            self.watch(rows[alive], tokens[alive])
        self.taken[at] = alive
        goes_on = alive & ~self._ended(step, rows, tokens)
        if every:
            self.alive = goes_on
        else:
            self.alive[rows] = goes_on
        return tokens, goes_on

    def _scale(self, logits: Tensor, previous: Tensor) -> Tensor:
        scaled = logits if self.settings.temperature in (0, 1) else logits / self.settings.temperature
        return allow_logits(scaled, previous, self.sampler.logit_mask)

    def _restrict(
        self,
        plain: _TokenDistribution,
        step: int,
        rows: Tensor,
        previous: Tensor,
        logits: Tensor,
        hidden: Tensor | None,
    ) -> _TokenDistribution:
        """Return the distribution to sample from: ``plain``, changed and truncated by the settings."""
        scores, settings = plain.scores, self.settings
        if self.seen is not None:
            seen = self.seen[rows, : logits.size(-1)]
            penalised = penalise_repetition(logits, seen, settings.repetition_penalty)
            scores = self._scale(penalised, previous)
        if self.sampler.steer is not None:
            assert hidden is not None, "hidden states are requested if there is something to steer"
            padding = vocabulary(self.sampler.model) - scores.size(-1)
            whole = pad(scores, (0, padding), value=-torch.inf) if padding else scores
            scores = self.sampler.steer(whole, hidden, settings)[:, : logits.size(-1)]
        if step < settings.min_new_tokens:
            going_on = scores.index_fill(-1, self.eos[self.eos < scores.size(-1)], -torch.inf)
            scores = torch.where(going_on.isfinite().any(-1, keepdim=True), going_on, scores)  # a mask may force EOS
        scores = truncate_logits(scores, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p)
        return plain if scores is plain.scores else _TokenDistribution(scores)

    def _ended(self, step: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return bool [b]: the rows whose last token is EOS or a stop token, or completes a stop string."""
        ended, stops = (tokens.unsqueeze(-1) == self.eos).any(-1), self.settings.stop_sequences
        if not stops:
            return ended
        # the last token completes it, so it is in the last tokens if each is a character, or one of the parts of one
        begin = max(step + 1 - PARTS * (max(map(len, stops)) + 2), 0)
        last = self.tokens[begin : step + 1, rows]
        stopped = self._has_stop(last)
        if begin and (unsure := stopped | torch.isin(last, self.special).any(0)).any():
            stopped[unsure] = self._has_stop(self.tokens[: step + 1, rows[unsure]])
        return ended | stopped

    def _has_stop(self, tokens: Tensor) -> Tensor:
        """Return bool [b]: in the text of which of the columns [*, b] there is a stop string."""
        texts = decode(self.sampler.tokenizer, tokens.t(), self.sampler.skip_special_tokens)
        has_stop = [any(stop in text for stop in self.settings.stop_sequences) for text in texts]
        return torch.tensor(has_stop, dtype=torch.bool, device=tokens.device)

    def generated(self, version: int) -> Generated:
        """Return the sampled responses."""
        lengths, alive, taken = self.taken.sum(0).tolist(), self.alive.tolist(), self.taken.t()
        computed = not self.sampler.fault
        return Generated(
            [row[:length] for row, length in zip(self.tokens.t().tolist(), lengths, strict=True)],
            ["length" if goes_on else "stop" for goes_on in alive],
            [version] * len(lengths),
            logprobs=self.logprobs.t()[taken] if computed else None,
            entropy=self.entropy.t()[taken] if computed else None,
            hidden=None if self.hidden is None else self.hidden.transpose(0, 1)[taken],
        )


class _TokenDistribution:
    """The distributions softmax(``scores``) [b, V]; exponentials are computed once."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        self.shifted = scores - scores.amax(-1, keepdim=True)  # [b, V], the largest 0
        self.weights = self.shifted.exp()

    def draw(self, uniforms: Tensor, temperature: float) -> Tensor:
        """Sample one token per row by inverse-transform sampling at ``uniforms`` [b]; greedy at temperature 0. [b]."""
        if temperature == 0:
            return self.scores.argmax(-1)
        mass = running_sums(self.weights)
        at = uniforms.unsqueeze(-1) * mass[:, -1:]
        token = torch.searchsorted(mass, at, right=True).clamp_(max=mass.size(-1) - 1)
        possible = self.weights.gather(-1, token) > 0
        if not possible.all():  # rounding may select a token of probability 0
            token = torch.where(possible, token, self.scores.argmax(-1, keepdim=True))
        return token.squeeze(-1)

    def logprobs_and_entropy(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log softmax(scores)[token], and the entropy H = log Σ exp(z) − Σ softmax(z)·z. [b] -> [b], [b]."""
        total = self.weights.sum(-1)
        log_total, chosen = total.log(), self.shifted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        finite = self.shifted.clamp_(min=-1e4)  # 0 * -inf is NaN
        mean: Tensor = torch.linalg.vecdot(self.weights, finite) / total
        return chosen - log_total, log_total - mean


# --------------------------------------------------------------------------------- models that only generate() can run


def _by_generate(decoder: Decoder, queries: list[list[int]], responses: _Responses) -> None:
    """Sample all responses with the model's own ``generate``, grouped by prompt length so that nothing is padded."""
    model, prefix = decoder.model, decoder.prefix
    groups: dict[int, list[int]] = {}
    for row, query in enumerate(queries):
        groups.setdefault(len(query), []).append(row)
    settings = GenerationConfig(
        max_new_tokens=responses.room,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
        disable_compile=True,
        decoder_start_token_id=prefix[0] if prefix else None,
    )
    for width, members in groups.items():
        rows = torch.tensor(members, device=model.device)
        ids = torch.tensor([queries[row] for row in members], device=model.device)
        start = {"decoder_input_ids": torch.tensor([prefix] * len(members), device=model.device)} if prefix else {}
        with _no_settings(model), _seen_states(model, responses.sampler.steer is not None) as states:
            model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                **start,
                generation_config=settings,
                logits_processor=LogitsProcessorList([_Chooser(responses, rows, len(prefix) or width, states)]),
                stopping_criteria=StoppingCriteriaList([_Ended(responses, rows)]),
            )


@contextmanager
def _no_settings(model: PreTrainedModel) -> Iterator[None]:
    """Remove the model's own generation settings within the context; they would fill in settings not given here."""
    settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings


@contextmanager
def _seen_states(model: PreTrainedModel, seen: bool) -> Iterator[list[Tensor]]:
    """Yield a list that holds the states [b, D] of the model's newest logits within the context, if ``seen``."""
    newest: list[Tensor] = []

    def note(_: Any, __: Any, outputs: Any) -> None:
        newest[:] = [outputs.last_hidden_state[:, -1]]

    core = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    handle = core.register_forward_hook(note) if seen else None
    try:
        yield newest
    finally:
        if handle is not None:
            handle.remove()


class _Chooser(LogitsProcessor):
    """Makes ``generate`` choose the token that the sampler has chosen."""

    def __init__(self, responses: _Responses, rows: Tensor, width: int, states: list[Tensor]) -> None:
        self.responses, self.rows, self.width, self.states = responses, rows, width, states

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return logits [b, V] that are 0 at the token sampled from ``scores`` [b, V] and −inf elsewhere."""
        step = input_ids.size(1) - self.width
        states = self.states[0] if self.states else None
        tokens, _ = self.responses.extend(step, self.rows, input_ids[:, -1], scores.float(), states)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.unsqueeze(-1), 0.0)


class _Ended(StoppingCriteria):
    """Tells ``generate`` which responses have ended, by EOS, a stop token or a stop string."""

    def __init__(self, responses: _Responses, rows: Tensor) -> None:
        self.responses, self.rows = responses, rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return bool [b], True for responses that have ended."""
        return ~self.responses.alive[self.rows]


# ---------------------------------------------------------------------------------------------------- ids and text


def assemble(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    queries: list[list[int]],
    responses: list[list[int]],
    *,
    terminated: Tensor,
    logprobs: Tensor | None,
    entropy: Tensor | None = None,
    hidden: Tensor | None = None,
    versions: Tensor | None = None,
    sampled: Sequence[Sequence[bool]] | None = None,
    stops: list[str],
    skip_special_tokens: bool,
) -> Rollouts:
    """Build rollouts from token ids: sequences with masks from the lengths, and text truncated at stop strings.

    Args:
        tokenizer: decodes the ids.
        rows: one per response, with the prompt's text if it has one.
        queries: prompt ids.
        responses: the ids after the prompt, the terminating token included.
        terminated: bool [B].
        logprobs: sampling log-probabilities of all response tokens, row after row [N]; None if unknown.
        entropy: entropies [N] of the distributions that they were sampled from; None if unknown.
        hidden: hidden states [N, D] from which they were chosen; None if unknown.
        versions: the version of the weights that each was sampled with [B]; None if unknown.
        sampled: which ids of ``responses`` the policy has sampled; the others, e.g. an environment's, are attended to
            and not trained on. None: all of them.
        stops: strings at which text is truncated.
        skip_special_tokens: omit special tokens from the text.
    """
    if sampled is None:
        sampled = [[True] * len(response) for response in responses]
    sequences = Sequences.from_rows(
        [[*query, *response] for query, response in zip(queries, responses, strict=True)],
        [[False] * len(query) + [*chosen] for query, chosen in zip(queries, sampled, strict=True)],
        pad_id(tokenizer),
    ).to(terminated.device)
    texts = [row["prompt"] if isinstance(row.get("prompt"), str) else None for row in rows]
    decoded = decode(
        tokenizer, [q for q, text in zip(queries, texts, strict=True) if text is None], skip_special_tokens
    )
    unknown = iter(decoded)
    return Rollouts(
        rows=rows,
        sequences=sequences,
        logprobs=placed_at(sequences.response_mask, logprobs),
        entropy=placed_at(sequences.response_mask, entropy),
        hidden=placed_at(sequences.response_mask, hidden),
        terminated=terminated,
        versions=versions,
        prompts=[next(unknown) if text is None else text for text in texts],
        outputs=[cut_at_stop(text, stops) for text in decode(tokenizer, responses, skip_special_tokens)],
    )


def placed_at(mask: Tensor, values: Tensor | None) -> Tensor | None:
    """Place values [N, *] at the N selected positions of ``mask`` [B, T]; 0 elsewhere. -> [B, T, *]."""
    if values is None:
        return None
    values = values.to(mask.device)
    placed = values.new_zeros((*mask.shape, *values.shape[1:]))
    placed[mask] = values
    return placed


def decode(tokenizer: PreTrainedTokenizerBase, ids: Any, skip_special_tokens: bool) -> list[str]:
    """Decode several responses to text."""
    return list(tokenizer.batch_decode(ids, skip_special_tokens=skip_special_tokens)) if len(ids) else []


def cut_at_stop(text: str, stops: list[str]) -> str:
    """Return ``text`` up to its first stop string, without trailing whitespace; unchanged if it has none."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)].rstrip() if places else text
