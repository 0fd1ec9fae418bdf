"""Policies: language models that return numbers aligned with the tokens of sequences."""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.data import Sequences
from trainkit.data.batches import Images, pass_cost
from trainkit.errors import ConfigError, PluginError, describe
from trainkit.functional import (
    allow_logits,
    entropy_from_logits,
    jensen_shannon,
    kl_exact,
    kl_forward,
    masked_sum,
    token_logprobs,
)
from trainkit.models.adapters import HEADS, hub_arguments
from trainkit.models.backend import autocast_dtype
from trainkit.models.critic import OwnCritic, ValueBranch, make_critic
from trainkit.models.experts import ExpertBalance
from trainkit.models.fitting import RowLimit
from trainkit.models.head import at_a_time, read_head, reads_in_blocks
from trainkit.models.images import image_inputs
from trainkit.models.joined import JoinedRows
from trainkit.models.prompts import SharedPrompts, equal_but_for_rounding, why_not_joined, why_not_shared, with_ends
from trainkit.models.trunk import Trunk, tiny_input
from trainkit.models.unloaded import decided, reads_weights
from trainkit.models.value_head import ValueHead, check_head_alone, saved_heads, saved_modules, state_width, under

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

P = TypeVar("P", bound=nn.Module)

TOKENS = {"cuda": 65_536}
"""The most tokens of a pass without gradient, by device type: activations of more would not fit. Others: no limit."""
CHUNK = 2**22
"""The number of logits in memory at a time on CPUs: 16 MB in float32."""


class TokenOutputs(NamedTuple):
    """The outputs of a policy for the response tokens of sequences; [B, T] each, 0 at all other positions.

    Fields that can be None are typed as tensors, so that code which has requested them need not check for None.
    """

    logprobs: Tensor
    """Log-probability of choosing each token, at the sampling temperature."""
    values: Tensor = None  # type: ignore[assignment]
    """Value of the state in which each token was chosen; None without a value head."""
    entropy: Tensor = None  # type: ignore[assignment]
    """Entropy of the distribution from which each token was chosen; None unless requested."""
    divergence: Tensor = None  # type: ignore[assignment]
    """Divergence of that distribution from the reference's, over the whole vocabulary; None without a reference."""
    mean_logits: Tensor = None  # type: ignore[assignment]
    """Mean over the model's vocabulary of its logits after each real token, those of the prompt too, or of an
    encoder-decoder of those from which each response token was chosen; without gradient. None unless requested."""
    head: Mapping[str, Tensor] = {}
    """Outputs of the policy's additional head, by name."""


def response_logprobs(policy: Callable[[Sequences], TokenOutputs], sequences: Sequences) -> Tensor:
    """Return log π of whole responses, EOS included. [B, T] -> [B]."""
    return masked_sum(policy(sequences).logprobs, sequences.response_mask, dim=1)


Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function ``(logits, other_logits, tokens) -> divergences``: [N, V], [N, V], [N] -> [N].

It is called with the logits of the policy and of the frozen model in which N response tokens were chosen, at the
temperature and with the logit mask of the policy. V are the ids that have a probability: those of the tokenizer, also
if the model has more. It may be called several times for the same tokens, so it should be a function of its arguments
alone."""

DIVERGENCES: Mapping[str, Divergence] = {
    "reverse": lambda logits, other_logits, _: kl_exact(logits, other_logits),
    "forward": lambda logits, other_logits, _: kl_forward(logits, other_logits),
    "jensen_shannon": lambda logits, other_logits, _: jensen_shannon(logits, other_logits),
}
"""The divergences that `Policy.forward` knows by name: KL(π‖other), KL(other‖π), and Jensen-Shannon with β = ½."""


class FrozenPolicy(Protocol):
    """The interface of a frozen model that `Policy.forward` needs to compute divergences."""

    @property
    def policy(self) -> Policy:
        """The frozen policy; it has the vocabulary and the kind of architecture of the trained one."""

    def states(self, sequences: Sequences) -> Tensor:
        """Return the inputs of its output head for the response tokens, without gradient. -> [N, D] or [N, V]."""


class _Comparison(NamedTuple):
    """A frozen model, and the divergence from it that is to be computed."""

    reference: FrozenPolicy
    measure: Divergence


class Policy(nn.Module, ABC):
    """A language model as a policy: ``policy(sequences) -> TokenOutputs``. There is a subclass per architecture.

    Where the lower layers are frozen, `through_trunk` computes their output once for sequences that are read often.

    The language-model head runs at response positions only, so no tensor of size [B, T, V] is created. At
    construction, the head's logits are compared with the model's own on a small input. Some models scale or cap the
    logits after the head; for these the policy uses the model's full logits and logs a warning.

    Args:
        model: the language model, trained in place.
        temperature: divides the logits in every computation, as in sampling.
        logit_mask: bool [V] or [V, V] (row: the previous token), True = allowed, as in sampling.
        value_head: whether to add a value head.
        head: an additional head ``head(hidden [N, D], tokens [N]) -> {name: [N]}``. It gets the hidden states in which
            response tokens were chosen, and these tokens; `TokenOutputs.head` has its outputs.
        critic: layers of the value head's own: how many of the model's upper layers it has a trained copy of, or a
            model. None: it reads the states of ``model``.

    Attributes:
        head_alone: whether the model's logits are what its output head gives for the states that `_states` returns.
    """

    logit_mask: Tensor | None
    head_alone: bool
    vocabulary: int | None = None
    """The number of token ids, from 0 on, that have a probability; None: all of the model's. A trainer sets it to those
    of the tokenizer, beyond which heads are padded."""
    row_limit: RowLimit | None = None
    """The most rows of a pass without gradient; None: no limit."""
    needs_mask = True
    """Whether padding at the right has to be masked."""
    one_pass = False
    """Whether each call makes one forward pass, because other processes make it at the same time; with shared prompts
    two, one for the prompts and one for what follows them."""
    can_share_prompts = False
    """Whether `why_not_shared` has found that prompts can be shared."""
    shares_prompts = False
    """Whether the prompt of several rows is run once. It changes results by rounding alone."""
    balance: ExpertBalance | None = None
    """What adds up the loss that balances the experts of a mixture, if the model's config asks for it."""
    joins_rows = False
    """Whether rows are run without padding, as one row (`JoinedRows`). It changes results by rounding alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        logit_mask: Tensor | None = None,
        value_head: bool = False,
        head: nn.Module | None = None,
        critic: int | PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        if model.get_output_embeddings() is None:
            raise ConfigError(f"{type(model).__name__} gives tokens no probabilities; give a language model")
        self.model = model
        self.temperature = temperature
        self.critic = make_critic(model, critic) if value_head else None
        self.value_head: ValueHead | None = None
        if value_head:
            self.value_head = ValueHead(state_width(model.config)) if self.critic is None else self.critic.head()
        self.head = head
        for added in (self.value_head, self.head):
            if added is not None:
                added.to(model.device)
        self.register_buffer("logit_mask", check_logit_mask(logit_mask, model), persistent=False)

    @property
    @abstractmethod
    def has_trunk(self) -> bool:
        """Whether there are frozen lower layers whose output can be computed once and reused."""

    @abstractmethod
    def _through_trunk(self, sequences: Sequences) -> Tensor:
        """Return the output of the frozen lower layers for sequences, [B, ≤ T, D]."""

    @abstractmethod
    def _states(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors for the N states in which response tokens were chosen, row after row.

        These are the inputs of the output head [N, D] (or full logits [N, V], unless `head_alone`), the hidden
        states [N, D], and the previous tokens [N].
        """

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the trained modules; frozen lower layers stay in evaluation mode."""
        super().train(mode)
        for module in self._frozen():
            module.eval()
        return self

    def why_not_joined(self) -> str | None:
        """Return why the rows of this policy cannot be joined; None if they can."""
        return f"{type(self.model).__name__} is not a causal model"

    @abstractmethod
    def why_not_shared(self) -> str | None:
        """Return why the prompts of rows cannot be shared with this model; None if they can."""

    @abstractmethod
    def _frozen(self) -> Iterable[nn.Module]:
        """Return the frozen lower layers. Dropout would change their output at each pass."""

    def forward(
        self,
        sequences: Sequences,
        entropy: bool = False,
        reference: FrozenPolicy | None = None,
        divergence: str | Divergence | None = None,
        *,
        mean_logits: bool = False,
    ) -> TokenOutputs:
        """Return log-probabilities and values of the response tokens, and on request entropies and divergences.

        Rows of similar length share a forward pass where this saves more padding than another pass costs.

        Args:
            sequences: B rows of T tokens.
            entropy: whether to compute ``entropy``.
            reference: a frozen model for ``divergence``, such as ``trainer.reference`` or the result of
                ``trainer.frozen(...)``; without it ``divergence`` is None. The gradient is that of the policy alone.
            divergence: ``"reverse"``, KL(π‖reference), the default; ``"forward"``, KL(reference‖π);
                ``"jensen_shannon"``, with β = ½; or a `Divergence`.
            mean_logits: whether to compute ``mean_logits``.

        Raises:
            PluginError: the divergence is unknown, is given without a reference, or does not return [N].
        """
        against = _comparison(reference, divergence)
        if self.row_limit is None or torch.is_grad_enabled():
            return self._forward(sequences, entropy, against, mean_logits)
        return self.row_limit.without_gradient(
            len(sequences), lambda: self._forward(sequences, entropy, against, mean_logits)
        )

    def _forward(self, sequences: Sequences, entropy: bool, against: _Comparison | None, means: bool) -> TokenOutputs:
        buckets = self._buckets(sequences)
        if len(buckets) == 1:
            return self._read(sequences, entropy, against, means)
        parts = [self._read(sequences.select(rows), entropy, against, means) for rows in buckets]
        names = {name: value for name, value in parts[0]._asdict().items() if isinstance(value, Tensor)}
        outputs = {name: sequences.reunite(buckets, [getattr(part, name) for part in parts]) for name in names}
        head = {name: sequences.reunite(buckets, [part.head[name] for part in parts]) for name in parts[0].head}
        return TokenOutputs(**outputs, head=head)

    def _read(self, sequences: Sequences, entropy: bool, against: _Comparison | None, means: bool) -> TokenOutputs:
        averaged: list[Tensor] = []
        (states, hidden, previous), valued = self._states_and_critics(sequences, averaged if means else None)
        others = None if against is None else against.reference.states(sequences)
        tokens = sequences.input_ids[sequences.response_mask]
        inputs = (states, tokens, previous, others)
        logprobs, entropies, divergences = self._read_states(inputs, entropy, against)
        head = {} if self.head is None else self.head(hidden, tokens)
        return TokenOutputs(
            logprobs=sequences.place(logprobs),
            **({} if self.value_head is None else {"values": sequences.place(self.value_head(valued))}),
            **({"entropy": sequences.place(entropies)} if entropy else {}),
            **({} if against is None else {"divergence": sequences.place(divergences)}),
            **({"mean_logits": averaged[0]} if means else {}),
            head={name: sequences.place(answer) for name, answer in head.items()},
        )

    def _states_and_critics(
        self, sequences: Sequences, means: list[Tensor] | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return what `_states` returns, and the states [N, D] that the value head reads.

        The means of the logits [B, T] are added to ``means``, unless it is None.
        """
        states = self._states(sequences)
        if means is not None:
            means.append(sequences.place(self._mean_logits(states[0])))
        return states, states[1]

    @torch.no_grad()
    def _mean_logits(self, states: Tensor) -> Tensor:
        """Return the means over the vocabulary of the model's logits, from what `_states` returns first. -> [*]."""
        if not self.head_alone:
            return states.float().mean(-1)
        head: Any = self.model.get_output_embeddings()
        if reads_in_blocks(head, states):  # the mean of a linear function is that of the mean of its rows
            mean: Tensor = states.float() @ head.weight.float().mean(0)
            return mean if head.bias is None else mean + head.bias.float().mean()
        rows = states.flatten(0, -2)
        (found,) = in_chunks(lambda part: (head(part).float().mean(-1),), len(head.weight), rows)
        return found.view(states.shape[:-1])

    def _inputs(self, sequences: Sequences) -> dict[str, Any]:
        images = self._reads(sequences.input_ids, sequences.attention_mask, sequences.images)
        return {**inputs_of(sequences, self.needs_mask), **images}

    @property
    def _reads(self) -> Callable[[Tensor, Tensor, Images | None], dict[str, Tensor]]:
        """What returns the model's inputs that are made of images."""
        return partial(image_inputs, self.model)

    def _buckets(self, sequences: Sequences) -> list[Tensor]:
        """Return the rows of each forward pass."""
        cost = self._cost(sequences)
        if cost is None:
            return [every_row(sequences)]
        return self._limited(sequences, sequences.buckets(cost))

    def _limited(self, sequences: Sequences, buckets: list[Tensor]) -> list[Tensor]:
        """Return the rows of each pass: without gradient at most as many as `row_limit` and `TOKENS` allow."""
        if torch.is_grad_enabled():
            return buckets
        most = None if self.row_limit is None else self.row_limit.rows
        if (tokens := TOKENS.get(sequences.input_ids.device.type)) is not None:
            fit = max(tokens // sequences.input_ids.size(1), 1)
            most = fit if most is None else min(most, fit)
        return buckets if most is None else [part for rows in buckets for part in rows.split(most)]

    def _cost(self, sequences: Sequences) -> int | None:
        """Return the cost of one more pass, in tokens; None if no pass may be added."""
        return None if self.one_pass else pass_cost(self.model, sequences.input_ids.device)

    def _shares(self, sequences: Sequences) -> bool:
        """Return whether the prompts of these rows are run apart and shared: not in packed rows, nor above a trunk."""
        free = sequences.trunk is None and sequences.segments is None and self.critic is None
        return self.shares_prompts and free

    @torch.no_grad()
    def through_trunk(self, sequences: Sequences) -> Sequences:
        """Return the sequences with the output of the frozen trunk; unchanged if there is no trunk."""
        if not self.has_trunk or sequences.trunk is not None:
            return sequences
        if self.row_limit is None:
            return self._with_trunk(sequences)
        return self.row_limit.without_gradient(len(sequences), lambda: self._with_trunk(sequences))

    def _with_trunk(self, sequences: Sequences) -> Sequences:
        buckets = self._buckets(sequences)
        parts = [self._through_trunk(sequences.select(rows)) for rows in buckets]
        return replace(sequences, trunk=sequences.reunite(buckets, parts))

    def _read_states(
        self, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], entropy: bool, against: _Comparison | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probabilities [N] of tokens, and on request entropies and divergences [N], in chunks."""
        states, tokens, previous, _ = inputs
        head: Any = self.model.get_output_embeddings()
        if against is None and self.head_alone and reads_in_blocks(head, states):
            logprobs, entropies = read_head(
                head,
                states,
                tokens,
                previous,
                temperature=self.temperature,
                logit_mask=self._mask,
                vocabulary=self.vocabulary,
                entropy=entropy,
            )
            return logprobs, entropies, logprobs.new_empty(0)
        read = partial(self._read_chunk, entropy=entropy, against=against)
        logprobs, entropies, divergences = in_chunks(read, self.model.config.get_text_config().vocab_size, *inputs)
        return logprobs, entropies, divergences

    def _read_chunk(
        self,
        states: Tensor,
        tokens: Tensor,
        previous: Tensor,
        others: Tensor | None,
        entropy: bool,
        against: _Comparison | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, none = self._logits(states, previous), states.new_empty(0)
        divergence = none
        if against is not None and others is not None:
            with torch.no_grad():
                other_logits = against.reference.policy._logits(others, previous)
            divergence = _per_token(against.measure(logits, other_logits, tokens), tokens)
        return token_logprobs(logits, tokens), entropy_from_logits(logits) if entropy else none, divergence

    def _logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return the logits [N, V], in float32, of the distribution that tokens are sampled from."""
        whole = self.model.get_output_embeddings()(states) if self.head_alone else states
        logits = whole[:, : self.vocabulary].float()
        scaled = logits if self.temperature == 1 else logits / self.temperature  # copies all logits
        return allow_logits(scaled, previous, self._mask)

    @property
    def _mask(self) -> Tensor | None:
        """The logit mask, for the tokens that have a probability."""
        return None if self.logit_mask is None else self.logit_mask[..., : self.vocabulary]


Run = Callable[[Mapping[str, Any]], tuple[Tensor, ...]]
"""Runs a model on inputs, and returns outputs [B, T, *]."""


class CausalPolicy(Policy):
    """A causal language model as a policy; the arguments are those of `Policy`.

    Attributes:
        trunk: the frozen lower layers.
    """

    def __init__(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if model.config.is_encoder_decoder:
            raise ConfigError(f"{type(model).__name__} is an encoder-decoder; make its policy with make_policy(model)")
        super().__init__(model, **kwargs)
        self.head_alone = decided(lambda: _head_gives_logits(model), operator.not_)
        self.needs_mask = decided(lambda: needs_mask(model), bool)
        self.trunk = Trunk(model, self.critic.depth if isinstance(self.critic, ValueBranch) else None)
        balances = getattr(model.config.get_text_config(), "output_router_logits", False)
        self.balance = ExpertBalance(model) if balances else None

    @property
    def has_trunk(self) -> bool:
        """Whether there are frozen lower layers whose output can be computed once and reused."""
        return self.trunk.depth > 0

    def _frozen(self) -> Iterable[nn.Module]:
        return self.trunk.frozen

    def _through_trunk(self, sequences: Sequences) -> Tensor:
        if not self._joins(sequences):
            return self.trunk(self.model.base_model, self._inputs(sequences))
        joined, real = self._join(sequences, every=True), sequences.attention_mask
        states = self.trunk(self.model.base_model, joined.inputs())[0, joined.read]
        return states.new_zeros(*real.shape, states.size(-1)).masked_scatter(real.unsqueeze(-1), states)

    def _states(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Return them for each response token t: the state after token t − 1."""
        outputs = self._outputs(sequences, self._run)
        return outputs[0], outputs[-1], sequences.input_ids[:, :-1][sequences.response_mask[:, 1:]]

    def _states_and_critics(
        self, sequences: Sequences, means: list[Tensor] | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        outputs = self._outputs(sequences, self._run if self.critic is None else self._run_with_critic, means)
        previous = sequences.input_ids[:, :-1][sequences.response_mask[:, 1:]]
        return (outputs[0], outputs[-1 if self.critic is None else -2], previous), outputs[-1]

    def _outputs(self, sequences: Sequences, run: Run, means: list[Tensor] | None = None) -> list[Tensor]:
        """Return the outputs of ``run`` [N, *] in which response tokens were chosen.

        The means of the logits [B, T] are added to ``means``, unless it is None.
        """
        chosen = sequences.response_mask[:, 1:]
        if self._joins(sequences):
            return self._joined_outputs(sequences, run, means)
        if self._shares(sequences):
            if means is not None:
                return self._shared_outputs_and_means(sequences, means)
            parts = SharedPrompts.of_rows(sequences)
            return [each[parts.chosen] for each in parts.run(run, self._cost(sequences), self._reads)]
        balance = nullcontext() if self.balance is None else self.balance.recorded(self.model, sequences)
        with self.trunk.known(sequences.trunk), balance:
            outputs = run(self._inputs(sequences))
        if means is not None:
            means.append(self._mean_logits(outputs[0]).masked_fill(~sequences.attention_mask, 0.0))
        return [each[:, :-1][chosen] for each in outputs]

    def _join(self, sequences: Sequences, *, every: bool) -> JoinedRows:
        """Return rows as one; what is read are the states in which response tokens were chosen, or of every token."""
        shared, real = self.shares_prompts and sequences.segments is None, sequences.attention_mask
        if not every:
            return JoinedRows.of_rows(sequences, shared=shared)
        wider = replace(sequences, trunk=None).on_columns(lambda x: F.pad(x, (0, 1)))
        return JoinedRows.of_rows(wider, shared=shared, chosen=F.pad(real, (1, 0)))  # after each one

    def _joined_outputs(self, sequences: Sequences, run: Run, means: list[Tensor] | None) -> list[Tensor]:
        """Return what `_outputs` returns, of rows that are joined."""
        joined, real = self._join(sequences, every=means is not None), sequences.attention_mask
        with self.trunk.known(None if sequences.trunk is None else sequences.trunk[joined.places].unsqueeze(0)):
            outputs = [each[0, joined.read] for each in run(joined.inputs())]
        if means is None:
            return outputs
        averaged = self._mean_logits(outputs[0])
        means.append(torch.zeros(real.shape, dtype=averaged.dtype, device=real.device).masked_scatter(real, averaged))
        responses = F.pad(sequences.response_mask, (0, 1))[:, 1:][real]
        return [each[responses] for each in outputs]

    def _shared_outputs_and_means(self, sequences: Sequences, means: list[Tensor]) -> list[Tensor]:
        """Return the outputs of `_run` in which response tokens were chosen, and add the means of all to ``means``."""
        wider, ends = with_ends(sequences)
        parts, of_prompts = SharedPrompts.of_rows(wider, wider.response_mask | ends), list[Tensor]()

        def run(inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
            outputs = self._run(inputs)
            averaged = self._mean_logits(outputs[0])
            of_prompts.append(averaged)  # the first ones; the others are returned for each row
            return (*outputs, averaged.unsqueeze(-1))

        *outputs, averaged = parts.run(run, self._cost(sequences), self._reads)
        values = torch.cat([of_prompts[0][parts.of], averaged[:, 1:, 0]], 1)
        real = torch.cat([parts.real[parts.of], parts.mask], 1)
        placed = torch.zeros(real.size(0), sequences.input_ids.size(1), dtype=values.dtype, device=values.device)
        means.append(placed.masked_scatter(sequences.attention_mask, values[real]))
        counts = parts.chosen.cumsum(1)
        responses = parts.chosen & (counts < counts[:, -1:])  # all but the ends
        return [each[responses] for each in outputs]

    def _buckets(self, sequences: Sequences) -> list[Tensor]:
        """Return the rows of each forward pass: all if they are joined, or share prompts, which has its own buckets."""
        if not self._joins(sequences) and not self._shares(sequences):
            return super()._buckets(sequences)
        return [every_row(sequences)] if self.one_pass else self._limited(sequences, [every_row(sequences)])

    def _run(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the hidden states [B, T, D], after the full logits unless `head_alone`."""
        if self.head_alone:
            return (hidden_states(self.model, inputs),)
        return logits_and_hidden(self.model, **inputs)

    def _run_with_critic(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return what `_run` returns, and the critic's states [B, T, D]."""
        assert self.critic is not None
        outputs, own = self.critic.states(lambda: self._run(inputs), inputs)
        return (*outputs, own)

    def _joins(self, sequences: Sequences) -> bool:
        """Return whether these rows are joined: only if some state is needed."""
        return self.joins_rows and sequences.acts

    def why_not_shared(self) -> str | None:
        """Return why prompts of this policy cannot be shared; None if they can."""
        if self.has_trunk:
            return "the output of frozen layers is stored for whole rows"
        if self.critic is not None:
            return "the critic has layers of its own"
        return self._keeps_rows() or why_not_shared(self.model, lambda rows, shared: self._states_as(rows, shared))

    def why_not_joined(self) -> str | None:
        """Return why the rows of this policy cannot be joined; None if they can."""

        def states(rows: Sequences, shared: bool | None, of_critic: bool = False) -> Tensor:
            return self._states_as(rows, bool(shared), shared is not None, of_critic)

        fault = self._keeps_rows() or why_not_joined(self.model, states)
        if fault is None and self.critic is not None:
            embeds: Any = self.critic.body if isinstance(self.critic, OwnCritic) else self.model
            with evaluating(self.critic):
                fault = why_not_joined(embeds, partial(states, of_critic=True))
        return fault

    def _keeps_rows(self) -> str | None:
        """Return why something needs the states of whole rows [B, T]; None if nothing does."""
        return None if self.balance is None else "the loss that balances the experts is of whole rows"

    def _states_as(self, rows: Sequences, shared: bool, joined: bool = False, of_critic: bool = False) -> Tensor:
        """Return the states, or those of the critic, of rows that are run in one of the ways."""
        before = self.shares_prompts, self.joins_rows
        self.shares_prompts, self.joins_rows = shared, joined
        try:
            return self._states_and_critics(rows, None)[1] if of_critic else self._states(rows)[1]
        finally:
            self.shares_prompts, self.joins_rows = before


def every_row(sequences: Sequences) -> Tensor:
    """Return the indices of all rows [B]."""
    return torch.arange(len(sequences), device=sequences.input_ids.device)


def _comparison(reference: FrozenPolicy | None, divergence: str | Divergence | None) -> _Comparison | None:
    """Return what to compare with, and how; None without a reference."""
    if reference is None:
        if divergence is not None:
            raise PluginError(f"the divergence {divergence!r} is given without a reference to compare with; give one")
        return None
    if callable(divergence):
        return _Comparison(reference, divergence)
    name = "reverse" if divergence is None else divergence
    if name not in DIVERGENCES:
        raise PluginError(
            f"the divergence is {describe(divergence)}; give {', '.join(DIVERGENCES)}, or a function "
            "(logits, other_logits, tokens) -> [N]"
        )
    return _Comparison(reference, DIVERGENCES[name])


def _per_token(values: Any, tokens: Tensor) -> Tensor:
    """Return the result of a divergence, checked to be one number per token."""
    if not isinstance(values, Tensor) or values.shape != tokens.shape:
        what = f"a tensor {tuple(values.shape)}" if isinstance(values, Tensor) else describe(values)
        raise PluginError(f"the divergence returned {what} for {len(tokens)} tokens; return ({len(tokens)},)")
    return values


def in_chunks(read: Callable[..., tuple[Tensor, ...]], vocabulary: int, *columns: Tensor | None) -> tuple[Tensor, ...]:
    """Compute ``read(*columns)`` for columns [N, *] in chunks of rows, to limit the logits [n, V] in memory.

    Up to twice `CHUNK` logits are computed together and kept for the backward pass. Of more, no more than `CHUNK` are
    in memory at a time, and the backward pass recomputes them. Under autocast the gradients of all chunks are added in
    float32: each chunk has its own rounded copy of the weights, whose gradient is not in 16 bits for long.

    Args:
        read: a function of the rows of a chunk; it returns tensors [n].
        vocabulary: the size V of the vocabulary.
        *columns: the arguments of ``read`` for all rows; the first must not be None.
    """
    assert columns[0] is not None, "its length is the number of rows"
    device = columns[0].device
    size = max(at_a_time(CHUNK, device) // vocabulary, 1)
    if len(columns[0]) <= 2 * size:
        return read(*columns)
    chunks = zip(*(repeat(None) if column is None else column.split(size) for column in columns), strict=False)
    if not torch.is_grad_enabled():
        parts = [read(*chunk) for chunk in chunks]
    else:
        dtype = autocast_dtype(device.type)
        with nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False):
            parts = [checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def load_heads(policy: P, source: object, arguments: Mapping[str, Any] = MappingProxyType({})) -> P:
    """Load the heads of ``source``, if it has any, into the policy or scorer, and return it.

    Args:
        policy: the policy or scorer.
        source: the directory or hub id of an export, which has a file with the heads, or of a model that TRL saved; or
            a live model, whose value head, if it has one, is then trained in place.
        arguments: the arguments of `from_pretrained` with which the model was loaded, for the location on the hub.

    Raises:
        ConfigError: the heads do not fit.
    """
    critic: Any = policy if getattr(policy, "value_head", None) is not None else None
    head = getattr(source, "v_head", None)
    if critic is not None and isinstance(head, ValueHead):
        critic.value_head = head.to(critic.model.device)
    if not isinstance(source, str) or not reads_weights():
        return policy
    hub, where = hub_arguments(arguments), f"{HEADS} of {source!r}"
    saved = saved_heads(source, hub)
    if critic is not None and (values := under("v_head.", saved_modules(source, ("v_head",), hub))):
        critic.value_head = ValueHead.like(values, critic.value_head.width).to(critic.model.device)
    state = policy.state_dict()
    there, here = ({name for name in names if name.startswith("head.")} for names in (saved, state))
    if there and here and there != here:
        raise ConfigError(
            f"{where} holds another head than this policy has: {min(there ^ here)} is in only one of them; use the "
            "settings of the run that exported it, or remove the file to start with a new head"
        )
    if getattr(policy, "critic", None) is None:
        check_head_alone(saved, where)
    saved = {name: tensor for name, tensor in saved.items() if name in state}
    if wrong := [name for name, tensor in saved.items() if tensor.shape != state[name].shape]:
        raise ConfigError(
            f"{where} holds {wrong[0]} of shape {tuple(saved[wrong[0]].shape)}, but in this policy it has shape "
            f"{tuple(state[wrong[0]].shape)}; remove the file to start with a new head"
        )
    policy.load_state_dict({**state, **saved})
    return policy


def hidden_states(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """Return the model's last hidden states [B, T, D] for the inputs of `inputs_of`."""
    if model.base_model is model:
        return logits_and_hidden(model, **inputs)[1]
    states: Tensor = model.base_model(**inputs).last_hidden_state
    return states


def logits_and_hidden(model: PreTrainedModel, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the model's own logits [B, T, V], and the last hidden states [B, T, D] from which they are computed."""
    if model.base_model is model:
        outputs = model(**inputs, output_hidden_states=True)
        return outputs.logits, outputs.hidden_states[-1]
    states: list[Any] = []
    handle = model.base_model.register_forward_hook(lambda _, __, outputs: states.append(outputs))
    try:
        logits: Tensor = model(**inputs).logits
    finally:
        handle.remove()
    return logits, states[0].last_hidden_state


def inputs_of(sequences: Sequences, masked: bool = True) -> dict[str, Any]:
    """Return the model's inputs; without a mask, transformers separates packed samples by their positions.

    Args:
        sequences: the rows.
        masked: whether the model needs a mask for padding at the right (`needs_mask`). Attention is faster without one.
    """
    ids, mask = sequences.input_ids, sequences.attention_mask if sequences.segments is None else None
    if mask is None or masked or not sequences.aligned_left:
        return {"input_ids": ids, "attention_mask": mask, "position_ids": sequences.position_ids, "use_cache": False}
    positions = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    return {"input_ids": ids, "attention_mask": None, "position_ids": positions, "use_cache": False}


@torch.no_grad()
def needs_mask(model: PreTrainedModel) -> bool:
    """Return whether tokens at the right change the model's states, so that padding there has to be masked."""
    a, b, c, *_ = tiny_input(model)["input_ids"][0].tolist() * 3
    rows = Sequences.from_lists([[a, b, c, b], [b]], [[c, a], [c]]).to(model.device)
    try:
        with evaluating(model):
            masked, free = (hidden_states(model, inputs_of(rows, each))[rows.attention_mask] for each in (True, False))
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, NotImplementedError):
        return True
    return not equal_but_for_rounding(free, masked)


def check_logit_mask(mask: Tensor | None, model: PreTrainedModel, vocabulary: int | None = None) -> Tensor | None:
    """Return the mask on the model's device; None for None.

    Raises:
        ConfigError: the mask is not a boolean tensor [V] or [V, V], or some row of it allows no token among the first
            ``vocabulary``.
    """
    if mask is None:
        return None
    vocab = model.config.get_text_config().vocab_size
    mask = torch.as_tensor(mask)
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(vocab,), (vocab, vocab)}:
        raise ConfigError(
            f"logit_mask should be a bool tensor of shape ({vocab},) or ({vocab}, {vocab}); "
            f"given {mask.dtype} {tuple(mask.shape)}"
        )
    if not mask[..., :vocabulary].any(-1).all():
        raise ConfigError("logit_mask allows no token at all after some token; allow at least EOS there")
    return mask.to(model.device)


@torch.no_grad()
def _head_gives_logits(model: PreTrainedModel) -> bool:
    """Return whether the output head, applied to the base model's states, gives the model's logits."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    with evaluating(model):
        full = model(**tiny_input(model)).logits
        alone = head(model.base_model(**tiny_input(model)).last_hidden_state)
    if gives_logits(model, alone, full):
        return True
    warn_of_full_logits(model)
    return False


SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config fields that change the logits after the head."""


def gives_logits(model: PreTrainedModel, alone: Tensor, full: Tensor) -> bool:
    """Return whether ``alone``, the logits of the head alone for a small input, equal the model's logits ``full``."""
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in SCALED) or full.shape != alone.shape:
        return False
    return torch.allclose(full.float(), alone.float(), rtol=1e-4, atol=1e-4)


def warn_of_full_logits(model: PreTrainedModel) -> None:
    """Log a warning that full logits are used."""
    log.warning(
        "%s changes its logits after the head; using full logits, which needs more memory", type(model).__name__
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode within the context, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
