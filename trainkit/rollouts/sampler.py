"""Samplers: from prompts to rollouts. Only this module and `decoding` use left padding and key-value caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
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
from trainkit.data.batches import Images
from trainkit.data.pipeline import id_count
from trainkit.errors import ConfigError, OutOfMemoryError
from trainkit.functional import allow_logits, penalise_repetition, running_sums, truncate_logits
from trainkit.models.compiling import uncompiled
from trainkit.models.fitting import first_line, out_of_memory, release, rows_that_fit
from trainkit.models.head import kernels_on
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

READ_EVERY = {"cuda": 8}
"""After how many tokens the host looks which rows have ended, by the type of device; it waits for the device then."""

UNCHANGED = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
"""The settings with which tokens are sampled by the model's own probabilities, for which there is a kernel."""

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
        other rows nor from earlier calls. If prompts have images, they are given as ``images``, `Images` of the rows.
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
    the batch; if memory does not suffice for all rows at a time, the next ones take their places. The random numbers of
    a row follow from its seed alone.

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
        images: Images | None = None,
    ) -> Rollouts:
        """Sample a response to each of ``queries``; token t of response b is drawn with number t of ``seeds[b]``."""
        responses = self.generate(queries, settings, seeds, images=images)
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
            images=images,
        )

    @torch.no_grad()
    def generate(
        self,
        queries: list[list[int]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        version: int = 0,
        watch: Callable[[Tensor, Tensor], None] | None = None,
        images: Images | None = None,
    ) -> Generated:
        """Return a response to each of ``queries`` as token ids; of half as many at a time if memory does not suffice.

        Args:
            queries: the prompts as token ids.
            settings: the sampling settings.
            seeds: a seed for each response.
            version: that of the weights.
            watch: called with the indices [b] of responses and the next token [b] of each, when these are chosen. All
                are then sampled at once.
            images: those of the prompts.

        Raises:
            OutOfMemoryError: one response does not fit into memory.
        """
        columns, more = max(map(len, queries), default=0) + settings.max_new_tokens, settings.max_new_tokens // 4
        fit, fit_with_more = (rows_that_fit(self.model, each) for each in (columns, columns + more))
        while True:
            most = len(queries)
            if watch is None:
                most = min(each for each in (most, self.most, fit) if each is not None)
                if most < len(queries) and fit_with_more is not None:  # of rows that take the places of others
                    most = min(most, fit_with_more)
            draws = uniforms(torch.tensor(seeds, device=self.model.device), settings.max_new_tokens + 1)
            responses = _Responses(self, queries, settings, draws, watch)
            try:
                with packed(self.model), uncompiled(self.model), self.decoder.casting():
                    if self.fault and images is not None:
                        raise ConfigError(
                            f"{type(self.model).__name__} cannot be sampled from with images, because it has no "
                            f"key-value cache that can be used ({self.fault}); give another model"
                        )
                    if self.fault:
                        _by_generate(self.decoder, queries, responses, most)
                    elif queries:
                        self._by_steps(queries, responses, most, images)
                return responses.generated(version)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or watch is not None:
                    raise
                fault = first_line(error)
            if most == 1:
                raise OutOfMemoryError(
                    f"a response of {settings.max_new_tokens} tokens to a prompt of {max(map(len, queries))} does not "
                    f"fit into memory ({fault}). Lower rollout.max_new_tokens, or set model.dtype to bfloat16"
                )
            self.most = most // 2
            release()
            log.warning("%d responses at a time do not fit into memory; sampling %d at a time", most, self.most)

    def _by_steps(self, queries: list[list[int]], responses: _Responses, most: int, images: Images | None) -> None:
        """Sample all responses, at most so many at a time, one token of each per step."""
        begun, room = 0, responses.room - 1  # the last token is not read
        if most < len(queries):  # columns of rows that end later than others, and of longer prompts
            room += responses.room // 4 + max(map(len, queries)) - max(map(len, queries[:most]))
        every = 1 if responses.watch else READ_EVERY.get(self.model.device.type, 1)

        def begin(count: int, room: int) -> Any:
            nonlocal begun
            part = slice(begun, begun + count)
            own = {} if images is None else {"images": images.take(torch.arange(len(queries))[part])}
            active, logits, hidden = self.decoder.prefill(queries[part], room, **own)
            active.rows += begun
            active.last = responses.extend(active.rows, active.last, logits, hidden)
            begun += len(active.rows)
            return active

        active = begin(most, room)
        for step in count(1):
            if step % every == 0 or active.room == 0:
                alive = responses.going_on(active.rows)
                left, waiting = int(alive.sum()), begun < len(queries)
                if left == 0 and not waiting:
                    break
                if left == 0:
                    active = begin(most, room)
                    continue
                if left <= len(alive) * SHRINK_AT or active.room == 0:
                    active.keep(alive.nonzero().squeeze(-1))
                    if waiting and active.joins:
                        active.join(begin(most - left, 0))
                    elif active.room == 0:
                        active.align()
            logits, hidden = self.decoder.next(active)
            active.last = responses.extend(active.rows, active.last, logits, hidden)


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
        count, device, self.watch = len(queries), draws.device, watch
        self.sampler, self.settings, self.room = sampler, settings, settings.max_new_tokens
        eos = [*eos_ids(sampler.model, sampler.tokenizer), *settings.stop_token_ids]
        self.eos = torch.tensor([each for each in eos if each < sampler.vocabulary], dtype=torch.long, device=device)
        self.special = {*sampler.tokenizer.all_special_ids}  # they may have no text
        plain = sampler.steer is None and all(getattr(settings, name) == off for name, off in UNCHANGED.items())
        plain &= not (settings.temperature == 0 and settings.min_new_tokens)
        self.kernels = kernels_on(device.type) if plain else None
        self.draws = draws.t().contiguous()  # [R + 1, B]: a step reads and writes one row of each of these tensors
        self.tokens = torch.zeros(self.draws.shape, dtype=torch.long, device=device)
        self.logprobs, self.entropy = torch.zeros_like(self.draws), torch.zeros_like(self.draws)
        self.hidden: Tensor | None = None  # [R + 1, B, D], if requested
        self.lengths = torch.zeros(count, dtype=torch.long, device=device)  # the terminating token included
        self.alive = torch.ones(count, dtype=torch.bool, device=device)
        self.stopped = set[int]()  # the rows with a stop string
        self.searched = [0] * count  # the number of tokens in which stop strings have been looked for
        self.seen: Tensor | None = None  # bool [B, V], tokens that have occurred, if they are penalised
        if settings.repetition_penalty != 1:
            self.seen = torch.zeros((count, vocabulary(sampler.model)), dtype=torch.bool)
            for row, query in zip(self.seen, queries, strict=True):
                row[sampler.decoder.prefix or query] = True
            self.seen = self.seen.to(device)

    def extend(self, rows: Tensor, previous: Tensor, logits: Tensor, hidden: Tensor | None) -> Tensor:
        """Choose the next token of ``rows`` [b], and store it in those that go on; return the tokens [b].

        Args:
            rows: the indices [b] of these rows among the B rows.
            previous: the previous tokens [b].
            logits: the model's logits [b, V].
            hidden: the states [b, D] that the logits come from.

        Returns:
            The chosen tokens; of rows that have ended the previous ones, as an EOS that ended a row may be padding.
        """
        lengths, alive = self.lengths[rows], self.alive[rows]
        at = lengths, rows
        tokens, self.logprobs[at], self.entropy[at] = self._choose(rows, previous, logits, hidden, self.draws[at])
        self.tokens[at] = tokens  # behind the end of a response it is ignored
        if self.sampler.keeps_states and hidden is not None:
            if self.hidden is None:
                self.hidden = hidden.new_zeros((*self.tokens.shape, hidden.size(-1)))
            self.hidden[at] = hidden
        if self.seen is not None:
            self.seen[rows, tokens] = True
        if self.watch is not None:
            self.watch(rows[alive], tokens[alive])
        goes_on = alive & torch.isin(tokens, self.eos, invert=True) & (lengths < self.room - 1)
        self.lengths[rows], self.alive[rows] = lengths + alive, goes_on
        return torch.where(goes_on, tokens, previous)

    def _choose(
        self, rows: Tensor, previous: Tensor, logits: Tensor, hidden: Tensor | None, draws: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, their log-probabilities and the entropies of their distributions, all [b]."""
        temperature, sampler = self.settings.temperature, self.sampler
        if self.kernels is not None:
            least = self.settings.min_new_tokens
            early = (self.lengths[rows] < least, self.eos) if least else ()
            inputs = (logits, draws, temperature, sampler.vocabulary, sampler.logit_mask, previous, *early)
            tokens, logprobs, entropies = self.kernels.choose(*inputs)
            return tokens, logprobs, entropies
        logits = logits[:, : sampler.vocabulary].float()  # a head may be padded beyond the tokens of the tokenizer
        plain = _TokenDistribution(self._scale(logits, previous))
        tokens = self._restrict(plain, rows, previous, logits, hidden).draw(draws, temperature)
        return tokens, *plain.logprobs_and_entropy(tokens)

    def _scale(self, logits: Tensor, previous: Tensor) -> Tensor:
        scaled = logits if self.settings.temperature in (0, 1) else logits / self.settings.temperature
        return allow_logits(scaled, previous, self.sampler.logit_mask)

    def _restrict(
        self,
        plain: _TokenDistribution,
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
        if settings.min_new_tokens and _may(short := self.lengths[rows] < settings.min_new_tokens):
            going_on = scores.index_fill(-1, self.eos, -torch.inf)
            short &= going_on.isfinite().any(-1)  # a mask may force EOS
            scores = torch.where(short.unsqueeze(-1), going_on, scores)
        scores = truncate_logits(scores, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p)
        return plain if scores is plain.scores else _TokenDistribution(scores)

    def going_on(self, rows: Tensor) -> Tensor:
        """Look for stop strings in ``rows`` [b], and return which of them go on, bool [b]."""
        if self.settings.stop_sequences:
            self._stop(rows.tolist())
        return self.alive[rows]

    def _stop(self, rows: list[int]) -> None:
        """End rows behind the first token since the last call that completes a stop string."""
        lengths, begins = self.lengths.tolist(), self.searched.copy()
        # the last token completes it, so it is in the last tokens if each is a character, or one of the parts of one
        span = PARTS * (max(map(len, self.settings.stop_sequences)) + 2) - 1
        rows = [row for row in rows if lengths[row] > begins[row]]
        first = max(min((begins[row] for row in rows), default=0) - span, 0)
        recent = self.tokens[first : max(lengths)].t().tolist()
        last = [recent[row][max(begins[row] - span - first, 0) : lengths[row] - first] for row in rows]
        for row, tokens, stopped in zip(rows, last, self._have_stop(last), strict=True):
            if stopped or (begins[row] > span and not self.special.isdisjoint(tokens)):
                whole = self.tokens[: lengths[row], row].tolist()
                texts = [whole[:end] for end in range(begins[row] + 1, len(whole) + 1)]
                ends = [len(text) for text, stopped in zip(texts, self._have_stop(texts), strict=True) if stopped]
                if ends:
                    self.lengths[row], self.alive[row] = ends[0], False
                    self.stopped.add(row)
            self.searched[row] = lengths[row]

    def _have_stop(self, tokens: list[list[int]]) -> list[bool]:
        """Return of each list of tokens whether there is a stop string in its text."""
        texts = decode(self.sampler.tokenizer, tokens, self.sampler.skip_special_tokens)
        return [any(stop in text for stop in self.settings.stop_sequences) for text in texts]

    def generated(self, version: int) -> Generated:
        """Return the sampled responses."""
        lengths, computed = self.lengths.tolist(), not self.sampler.fault
        taken = torch.arange(self.room + 1, device=self.lengths.device) < self.lengths.unsqueeze(1)  # [B, R + 1]
        ids = [row[:length] for row, length in zip(self.tokens.t().tolist(), lengths, strict=True)]
        ends = {*self.eos.tolist()}
        return Generated(
            ids,
            ["stop" if row in self.stopped or own[-1] in ends else "length" for row, own in enumerate(ids)],
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
        if _may(~possible):  # rounding may select a token of probability 0
            token = torch.where(possible, token, self.scores.argmax(-1, keepdim=True))
        return token.squeeze(-1)

    def logprobs_and_entropy(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log softmax(scores)[token], and the entropy H = log Σ exp(z) − Σ softmax(z)·z. [b] -> [b], [b]."""
        total = self.weights.sum(-1)
        log_total, chosen = total.log(), self.shifted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        finite = self.shifted.clamp_(min=-1e4)  # 0 * -inf is NaN
        mean: Tensor = torch.linalg.vecdot(self.weights, finite) / total
        return chosen - log_total, log_total - mean


def _may(mask: Tensor) -> bool:
    """Return whether an element may be True; on a CUDA device without waiting for it."""
    return mask.is_cuda or bool(mask.any())


# --------------------------------------------------------------------------------- models that only generate() can run


def _by_generate(decoder: Decoder, queries: list[list[int]], responses: _Responses, most: int) -> None:
    """Sample all responses with the model's own ``generate``, at most so many at a time.

    They are grouped by prompt length, so that nothing is padded.
    """
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
    for members in (own[begin : begin + most] for own in groups.values() for begin in range(0, len(own), most)):
        rows = torch.tensor(members, device=model.device)
        ids = torch.tensor([queries[row] for row in members], device=model.device)
        start = {"decoder_input_ids": torch.tensor([prefix] * len(members), device=model.device)} if prefix else {}
        with _no_settings(model), _seen_states(model, responses.sampler.steer is not None) as states:
            model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                **start,
                generation_config=settings,
                logits_processor=LogitsProcessorList([_Chooser(responses, rows, states)]),
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

    def __init__(self, responses: _Responses, rows: Tensor, states: list[Tensor]) -> None:
        self.responses, self.rows, self.states = responses, rows, states

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return logits [b, V] that are 0 at the token sampled from ``scores`` [b, V] and −inf elsewhere."""
        states = self.states[0] if self.states else None
        tokens = self.responses.extend(self.rows, input_ids[:, -1], scores, states)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.unsqueeze(-1), 0.0)


class _Ended(StoppingCriteria):
    """Tells ``generate`` which responses have ended, by EOS, a stop token or a stop string."""

    def __init__(self, responses: _Responses, rows: Tensor) -> None:
        self.responses, self.rows = responses, rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return bool [b], True for responses that have ended."""
        return ~self.responses.going_on(self.rows)


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
    images: Images | None = None,
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
        images: those of the prompts.
    """
    if sampled is None:
        sampled = [[True] * len(response) for response in responses]
    sequences = Sequences.from_rows(
        [[*query, *response] for query, response in zip(queries, responses, strict=True)],
        [[False] * len(query) + [*chosen] for query, chosen in zip(queries, sampled, strict=True)],
        pad_id(tokenizer),
    )
    sequences = replace(sequences, images=images).to(terminated.device)
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
