"""The settings and the loss of ILQL, its heads, and its sampling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils.generic import ModelOutput

from trainkit.models import state_width
from trainkit_trlx.data.ilql_types import ILQLBatch, ILQLSeq2SeqBatch
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.models.modeling_base import HEADS, PreTrainedModelWrapper, arguments, load, under
from trainkit_trlx.overrides import remembered
from trainkit_trlx.utils.modeling import flatten_dict, get_tensor_stats, logprobs_of_labels, make_head

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AutoModelForCausalLMWithILQLHeads",
    "AutoModelForSeq2SeqLMWithILQLHeads",
    "CausalILQLOutput",
    "ILQLBatch",
    "ILQLConfig",
    "ILQLHeads",
    "ILQLSeq2SeqBatch",
    "Seq2SeqILQLOutput",
    "batched_index_select",
    "topk_mask",
]


def topk_mask(xs: Tensor, k: int) -> Tensor:
    """Return ``xs`` with -inf in place of all but the k largest of the last dimension; ties are kept. [*, V]."""
    if k <= 0 or k > xs.shape[-1]:
        return xs
    least = torch.topk(xs, k, dim=-1).values[..., -1:]
    return torch.where(xs < least, torch.full_like(xs, -torch.inf), xs)


def batched_index_select(x: Tensor, idxs: Tensor, dim: int) -> Tensor:
    """Return the elements of each row at its indices. [B, T, D], [B, N] -> [B, N, D] with ``dim`` 1."""
    shape = list(x.shape)
    shape[dim] = idxs.shape[1]
    view = [1] * x.dim()
    view[0], view[dim] = idxs.shape[0], idxs.shape[1]
    return x.gather(dim, idxs.view(view).expand(shape))


@remembered
class ILQLHeads(nn.Module):
    """V, one or two Q, and their targets, with the names of trlX.

    Args:
        hidden_size: D.
        vocab_size: V.
        two_qs: whether there are two Q.
        alpha: the share of Q in an update of its target.
        dtype: the type of the weights.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, two_qs: bool, alpha: float, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, self.two_qs, self.alpha = hidden_size, vocab_size, two_qs, alpha
        self.v_head = make_head(hidden_size, 1, dtype)
        self.q_heads = nn.ModuleList(make_head(hidden_size, vocab_size, dtype) for _ in range(2 if two_qs else 1))
        self.target_q_heads = copy.deepcopy(self.q_heads).requires_grad_(False)

    def forward(
        self, hs: Tensor, states_ixs: Tensor | None = None, actions_ixs: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return Q and target Q of the actions [B, A, V], and V of the states [B, A + 1, 1].

        Args:
            hs: hidden states [B, T, D].
            states_ixs: [B, A + 1]; all positions if they are not given.
            actions_ixs: [B, A].
        """
        states = hs if states_ixs is None else batched_index_select(hs, states_ixs, 1)
        actions = hs if actions_ixs is None else batched_index_select(hs, actions_ixs, 1)
        qs, targets = (tuple(head(actions) for head in heads) for heads in (self.q_heads, self.target_q_heads))
        return qs, targets, self.v_head(states)

    @torch.no_grad()
    def sync_target_q_heads(self) -> None:
        """Move the targets towards Q: alpha · Q + (1 − alpha) · target."""
        for target, q in zip(self.target_q_heads.parameters(), self.q_heads.parameters(), strict=True):
            target.lerp_(q, self.alpha)


@dataclass
@register_method
class ILQLConfig(MethodConfig):
    """Settings of ILQL."""

    tau: float
    gamma: float
    cql_scale: float
    awac_scale: float
    alpha: float
    beta: float
    steps_for_target_q_sync: int
    two_qs: bool
    gen_kwargs: dict[str, Any]

    def loss(self, outputs: Any, labels: ILQLBatch | ILQLSeq2SeqBatch) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, Q + V + cql_scale · CQL + awac_scale · AWAC, and its statistics. Snell et al. 2022.

        Args:
            outputs: ``(logits, (qs, target_qs, vs))``: [B, T, V] or [B, A, V], the Q of actions [B, A, V], the V of
                states [B, A + 1, 1].
            labels: a batch with ``input_ids``, ``actions_ixs``, ``dones`` and ``rewards``.
        """
        logits, (qs, target_qs, vs) = outputs
        tokens = getattr(labels, "decoder_input_ids", labels.input_ids)[:, 1:]
        actions = tokens.gather(1, labels.actions_ixs)
        if logits.shape[1] != actions.shape[1]:
            logits = batched_index_select(logits, labels.actions_ixs, 1)
        dones, vs = labels.dones.to(vs.dtype), vs.squeeze(-1)
        mask = dones[:, :-1]
        count = mask.sum().clamp(min=1)

        def chosen(q: Tensor) -> Tensor:
            return q.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

        def mean(x: Tensor) -> Tensor:
            found: Tensor = (x * mask).sum() / count
            return found

        target = torch.stack([chosen(q) for q in target_qs]).amin(0).detach()
        goal = (labels.rewards + self.gamma * vs[:, 1:] * dones[:, 1:]).detach()
        v = vs[:, :-1]
        loss_q = mean(torch.stack([(chosen(q) - goal) ** 2 for q in qs]).sum(0))
        weight = torch.where(target >= v, self.tau, 1 - self.tau)
        loss_v = mean(weight * (target - v) ** 2)
        loss_cql = mean(torch.stack([-logprobs_of_labels(q, actions) for q in qs]).sum(0))
        awac_weight = (self.beta * (target - v)).exp().detach()
        loss_awac = mean(-logprobs_of_labels(logits, actions) * awac_weight)
        loss = loss_q + loss_v + self.cql_scale * loss_cql + self.awac_scale * loss_awac
        losses = {"loss": loss, "loss_q": loss_q, "loss_v": loss_v, "loss_cql": loss_cql, "loss_awac": loss_awac}
        with torch.no_grad():
            stats = {
                "losses": {name: value.item() for name, value in losses.items()},
                "values": get_tensor_stats(v, mask, count),
                "qvalues": {str(i): get_tensor_stats(chosen(q), mask, count) for i, q in enumerate(qs)},
                "awac_weight": get_tensor_stats(awac_weight, mask, count),
            }
        return loss, {name: float(value) for name, value in flatten_dict(stats).items()}


@dataclass
class CausalILQLOutput(ModelOutput):
    """Logits [B, T, V], V of the states, Q and target Q of the actions, and the states and cache of transformers."""

    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    value: Tensor | None = None
    qs: tuple[Tensor, ...] | None = None
    target_qs: tuple[Tensor, ...] | None = None


@dataclass
class Seq2SeqILQLOutput(CausalILQLOutput):
    """The same of the decoder of an encoder-decoder, and the encoder's outputs."""

    encoder_outputs: Any = None


@remembered
class AutoModelForCausalLMWithILQLHeads(PreTrainedModelWrapper):
    """A causal language model with the heads of ILQL, for checkpoints of trlX and loops of one's own.

    Args:
        base_model: the language model.
        two_qs: whether there are two Q; in `from_pretrained`, saved heads decide it if it is not given.
        alpha: the share of Q in an update of its target.
        peft_config: an adapter to add to the language model.
    """

    transformers_parent_class: ClassVar[Any] = AutoModelForCausalLM
    supported_args = ("two_qs", "alpha")
    supported_modules = ("ilql_heads",)

    def __init__(self, base_model: Any, *, two_qs: bool = True, alpha: float = 0.99, peft_config: Any = None) -> None:
        super().__init__(base_model, peft_config)
        config = self.config.get_text_config(decoder=True)
        self.two_qs, self.alpha = two_qs, alpha
        self.ilql_heads = ILQLHeads(state_width(config), config.vocab_size, two_qs, alpha, self.base_model.dtype)

    @classmethod
    def arguments_of(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return how many Q the heads of a checkpoint have."""
        heads = under(HEADS, state_dict)
        return {"two_qs": any(name.startswith("q_heads.1.") for name in heads)} if heads else {}

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the heads from a state dictionary that may have them.

        Raises:
            ConfigError: they do not fit.
        """
        if heads := under(HEADS, state_dict):
            load(self.ilql_heads, heads, "the heads of the checkpoint")

    def _runs(self, inputs: dict[str, Any]) -> Any:
        """Return the outputs of the language model for those of the inputs that are given."""
        given = {name: value for name, value in inputs.items() if value is not None}
        return self.base_model(**given, output_hidden_states=True, return_dict=True)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        actions_ixs: Tensor | None = None,
        states_ixs: Tensor | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Return logits [B, T, V], Q and target Q of the actions, V of the states, and the cache.

        They are a tuple in this order or, with ``return_dict``, a `CausalILQLOutput`.
        """
        outputs = self._runs(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
            }
        )
        states, cache = outputs.hidden_states, outputs.get("past_key_values")
        qs, targets, vs = self.ilql_heads(states[-1], states_ixs, actions_ixs)
        if return_dict:
            return CausalILQLOutput(outputs.logits, cache, states, vs, qs, targets)
        return outputs.logits, qs, targets, vs, cache

    def sync_target_q_heads(self) -> None:
        """Move the targets towards Q."""
        self.ilql_heads.sync_target_q_heads()

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        beta: float = 1,
        max_new_tokens: int = 32,
        max_length: int = 1024,
        temperature: float = 1,
        top_k: int = 20,
        logit_mask: Tensor | None = None,
        pad_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> Tensor:
        """Sample with logits that are steered by the advantage: log π + β (min target Q − V). [B, P] -> [B, P + R].

        Args:
            input_ids: the prompts, padded on the left.
            attention_mask: which of their ids are real; by default all but those of padding.
            position_ids: without effect: positions follow from the mask.
            past_key_values: a cache of the prompts.
            beta: the weight of the advantage.
            max_new_tokens: the longest response.
            max_length: the longest prompt and response together.
            temperature: divides the steered scores; 0: greedy.
            top_k: how many of the likeliest tokens remain.
            logit_mask: bool [V, V] (row: the previous token), True = forbidden.
            pad_token_id: fills up responses that have ended; by default that of the configuration, or EOS.
            eos_token_id: ends a response; by default that of the configuration.
        """
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        pad = next((each for each in (pad_token_id, self.config.pad_token_id, eos) if each is not None), 0)
        mask = (input_ids != pad if attention_mask is None else attention_mask).long()
        takes = "position_ids" in arguments(self.base_model).parameters

        def step(fed: Tensor, mask: Tensor, cache: Any) -> Any:
            return self(fed, mask, _positions(mask)[:, -fed.shape[1] :] if takes else None, cache)

        length = min(max_new_tokens, max_length - input_ids.shape[1])
        choice = _Choice(beta, temperature, top_k, logit_mask, pad, eos)
        return choice.continued(step, input_ids, mask, past_key_values, length)


@remembered
class AutoModelForSeq2SeqLMWithILQLHeads(AutoModelForCausalLMWithILQLHeads):
    """An encoder-decoder with the heads of ILQL on its decoder."""

    transformers_parent_class = AutoModelForSeq2SeqLM

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        past_key_values: Any = None,
        encoder_outputs: Any = None,
        actions_ixs: Tensor | None = None,
        states_ixs: Tensor | None = None,
        return_dict: bool = False,
        decoder_attention_mask: Tensor | None = None,
    ) -> Any:
        """Return the logits of the decoder, Q and target Q of actions, V of states, the cache, and encoder states.

        They are a tuple in this order or, with ``return_dict``, a `Seq2SeqILQLOutput`.
        """
        outputs = self._runs(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "decoder_input_ids": decoder_input_ids,
                "decoder_attention_mask": decoder_attention_mask,
                "encoder_outputs": encoder_outputs,
                "past_key_values": past_key_values,
            }
        )
        states, cache = outputs.decoder_hidden_states, outputs.get("past_key_values")
        qs, targets, vs = self.ilql_heads(states[-1], states_ixs, actions_ixs)
        encoded = (outputs.encoder_last_hidden_state,)
        if return_dict:
            return Seq2SeqILQLOutput(outputs.logits, cache, states, vs, qs, targets, encoded)
        return outputs.logits, qs, targets, vs, cache, encoded

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        past_key_values: Any = None,
        encoder_outputs: Any = None,
        beta: float = 1,
        max_new_tokens: int = 32,
        max_length: int = 1024,
        temperature: float = 1,
        top_k: int = 20,
        logit_mask: Tensor | None = None,
        pad_token_id: int | None = None,
        eos_token_id: int | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Sample from the decoder. The arguments are those of causal models, and of the decoder. [B, P] -> [B, S + R].

        Args:
            input_ids: the prompts.
            attention_mask: which of their ids are real.
            decoder_input_ids: what the decoder continues [B, S]; by default its start token.
            past_key_values: a cache of the decoder.
            encoder_outputs: of the encoder, if it has run.
            beta: as of causal models, and all further arguments.
            max_new_tokens: the longest continuation.
            max_length: another bound of it.
            temperature: divides the steered scores.
            top_k: how many of the likeliest tokens remain.
            logit_mask: True = forbidden.
            pad_token_id: fills up responses that have ended.
            eos_token_id: ends a response.
            decoder_attention_mask: which of ``decoder_input_ids`` are real.
        """
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        pad = self.config.pad_token_id if pad_token_id is None else pad_token_id
        mask = (input_ids != pad if attention_mask is None else attention_mask).long()
        if encoder_outputs is None:
            encoder_outputs = self.base_model.get_encoder()(input_ids=input_ids, attention_mask=mask)
        start = torch.full_like(input_ids[:, :1], self.config.decoder_start_token_id)
        start = start if decoder_input_ids is None else decoder_input_ids

        def step(fed: Tensor, real: Tensor, cache: Any) -> Any:
            return self(None, mask, fed, cache, encoder_outputs, decoder_attention_mask=real)

        choice = _Choice(beta, temperature, top_k, logit_mask, pad, eos)
        real = torch.ones_like(start) if decoder_attention_mask is None else decoder_attention_mask.long()
        return choice.continued(step, start, real, past_key_values, min(max_new_tokens, max_length))


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@dataclass(frozen=True)
class _Choice:
    """How tokens are chosen by logits and heads."""

    beta: float
    temperature: float
    top_k: int
    logit_mask: Tensor | None
    pad: int
    eos: int | None

    def continued(self, step: Callable[..., Any], ids: Tensor, mask: Tensor, cache: Any, length: int) -> Tensor:
        """Return the ids with up to ``length`` further ones; ``step(ids, mask, cache)`` runs the model."""
        finished, fed = torch.zeros_like(ids[:, 0], dtype=torch.bool), ids
        for _ in range(length):
            logits, _, targets, vs, cache, *_ = step(fed, mask, cache)
            advantage = torch.stack([target[:, -1] for target in targets]).amin(0) - vs[:, -1]
            chosen = self._token(logits[:, -1].float(), advantage.float(), ids[:, -1])
            chosen = torch.where(finished, torch.full_like(chosen, self.pad), chosen)
            ids, fed = torch.cat([ids, chosen.unsqueeze(1)], 1), chosen.unsqueeze(1)
            mask = torch.cat([mask, (~finished).long().unsqueeze(1)], 1)
            finished = finished | (chosen == self.eos)
            if finished.all():
                break
        return ids

    def _token(self, logits: Tensor, advantage: Tensor, previous: Tensor) -> Tensor:
        """Return a token for each row: [B, V], [B, V], [B] -> [B]."""
        if self.logit_mask is not None:
            logits = logits.masked_fill(self.logit_mask.to(logits.device).bool()[previous], -torch.inf)
        scores = topk_mask(logits.log_softmax(-1) + self.beta * advantage, self.top_k)
        if self.temperature == 0:
            return scores.argmax(-1)
        return torch.multinomial((scores / self.temperature).softmax(-1), 1).squeeze(-1)
