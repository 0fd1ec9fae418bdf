"""Policies of encoder-decoders: the encoder reads the prompt, the decoder generates the response."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models.joined import begins, different_prompts
from trainkit.models.policy import Policy, evaluating, gives_logits, warn_of_full_logits
from trainkit.models.trunk import find_blocks, tiny_input
from trainkit.models.unloaded import decided

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Seq2SeqPolicy(Policy):
    """An encoder-decoder as a policy; the arguments are those of `Policy`.

    The encoder reads each row up to its first response token. The decoder reads its start token, then a forced first
    token if the model has one, then the response. So the first response token is an action like the others.

    Attributes:
        scale: the factor by which the decoder's states are multiplied before the head, as in T5.
    """

    def __init__(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not model.config.is_encoder_decoder:
            raise ConfigError(f"{type(model).__name__} is no encoder-decoder; make its policy with make_policy(model)")
        super().__init__(model, **kwargs)
        self.prefix = decoder_prefix(model)
        scale = decided(lambda: _head_scale(model))
        self.head_alone, self.scale = scale is not None, scale or 1.0
        self.encoder_frozen = _is_frozen(model.get_encoder())
        self.frozen = [model.get_encoder()] if self.encoder_frozen else []
        self.frozen += takewhile(_is_frozen, find_blocks(model) or [])

    @property
    def has_trunk(self) -> bool:
        """Whether the encoder is frozen and its output reused; frozen decoder layers run in every pass."""
        return self.encoder_frozen

    def _frozen(self) -> Iterable[nn.Module]:
        return self.frozen

    def _through_trunk(self, sequences: Sequences) -> Tensor:
        return encode(self.model, *_prompts(sequences))

    def _states(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        ids, mask = _prompts(sequences)
        response = _Responses.of(sequences, self.prefix)
        before = self._encoded(sequences) if sequences.trunk is None else sequences.trunk[:, : ids.size(1)]
        previous = response.at_actions(response.input_ids)
        if self.head_alone:
            hidden = response.at_actions(_decode(self.model, before, mask, response.input_ids, response.real))
            return hidden if self.scale == 1 else hidden * self.scale, hidden, previous
        outputs = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=before),
            attention_mask=mask,
            decoder_input_ids=response.input_ids,
            decoder_attention_mask=response.real,
            output_hidden_states=True,
            use_cache=False,
        )
        logits, hidden = outputs.logits, outputs.decoder_hidden_states[-1]
        return response.at_actions(logits), response.at_actions(hidden), previous

    def _encoded(self, sequences: Sequences) -> Tensor:
        """Return the encoder's states of the rows' prompts [B, P, D]; it reads a prompt of several rows once."""
        if not self._shares(sequences):
            return encode(self.model, *_prompts(sequences))
        prompts, of = different_prompts(sequences)
        return encode(self.model, prompts.clamp(min=0), prompts >= 0).index_select(0, of)

    def why_not_shared(self) -> str | None:
        """Return why the prompts of rows cannot be shared with this model; None if they can."""
        return "the output of the frozen encoder is stored for whole rows" if self.has_trunk else None


def decoder_prefix(model: PreTrainedModel) -> list[int]:
    """Return the tokens that the decoder reads before the response: its start token, and a forced first token if any.

    Raises:
        ConfigError: the model's config names no start token.
    """
    places = (getattr(model, "generation_config", None), model.config)

    def known(name: str) -> int | None:
        tokens = (getattr(place, name, None) for place in places)
        return next((token for token in tokens if isinstance(token, int)), None)

    start, forced = known("decoder_start_token_id"), known("forced_bos_token_id")
    start = known("bos_token_id") if start is None else start
    if start is None:
        raise ConfigError(
            f"{type(model).__name__} does not say which token its decoder starts with; set decoder_start_token_id in "
            "the model's config (T5 starts with padding, BART with EOS)"
        )
    return [start] if forced is None else [start, forced]


def encode(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the encoder's states for prompts [B, P], whose ``mask`` is True at real tokens. -> [B, P, D]."""
    states: Tensor = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    return states


def _decode(model: PreTrainedModel, before: Tensor, mask: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return the decoder's last states [B, R, D] for ``ids`` [B, R] and the encoder's states ``before`` [B, P, D]."""
    states: Tensor = model.get_decoder()(
        input_ids=ids,
        attention_mask=real,
        encoder_hidden_states=before,
        encoder_attention_mask=mask,
        use_cache=False,
    ).last_hidden_state
    return states


def _before(sequences: Sequences) -> Tensor:
    """Return the mask, bool [B, T], of the real tokens before the first response token."""
    return sequences.attention_mask & (sequences.response_mask.cumsum(1) == 0)


def _prompts(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return what precedes the first response token of each row: ids [B, P] and a bool mask [B, P]."""
    prompt = _before(sequences)
    places = begins(sequences) + torch.arange(int(prompt.sum(1).max()), device=prompt.device)
    inside, places = places < prompt.size(1), places.clamp(max=prompt.size(1) - 1)
    return sequences.input_ids.gather(1, places), prompt.gather(1, places) & inside


@dataclass(frozen=True)
class _Responses:
    """The decoder's inputs (a prefix of K tokens, then each response except its last token) and its actions."""

    input_ids: Tensor  # [B, K + R − 1]
    real: Tensor  # bool, as input_ids
    chosen: Tensor  # bool [B, R]: whether each token was chosen by the policy
    start: int  # K − 1, the index of the state in which the first response token is chosen

    @classmethod
    def of(cls, sequences: Sequences, prefix: list[int]) -> _Responses:
        """Extract the responses from rows of prompt and response, and put the decoder's prefix before each."""
        device, total = sequences.input_ids.device, sequences.input_ids.size(1)
        prompt = _before(sequences)
        at = begins(sequences) + prompt.sum(1, keepdim=True)
        used = sequences.attention_mask | sequences.response_mask
        ends = (used * torch.arange(1, total + 1, device=device)).amax(1, keepdim=True)
        places = at + torch.arange(int((ends - at).max()), device=device)  # [B, R]
        inside, places = places < total, places.clamp(max=total - 1)
        tokens, real, chosen = (
            x.gather(1, places) for x in (sequences.input_ids, sequences.attention_mask, sequences.response_mask)
        )
        first = torch.tensor([prefix], device=device).expand(len(sequences), -1)
        return cls(
            torch.cat([first, tokens[:, :-1]], 1),
            torch.cat([torch.ones_like(first, dtype=torch.bool), (real & inside)[:, :-1]], 1),
            chosen & inside,
            len(prefix) - 1,
        )

    def at_actions(self, values: Tensor) -> Tensor:
        """Return those of ``values`` [B, K + R − 1, *] at the positions where a response token is chosen. -> [N, *]."""
        return values[:, self.start : self.start + self.chosen.size(1)][self.chosen]


def _is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


@torch.no_grad()
def _head_scale(model: PreTrainedModel) -> float | None:
    """Return the factor on the decoder's states for which the head gives the model's logits; None if there is none."""
    head, probe = model.get_output_embeddings(), tiny_input(model)
    ids, mask = probe["input_ids"], probe["attention_mask"].bool()
    with evaluating(model):
        full = model(**probe).logits
        decoder = model.get_decoder()(input_ids=ids, encoder_hidden_states=encode(model, ids, mask), use_cache=False)
        hidden = getattr(decoder, "last_hidden_state", None)
        if isinstance(head, nn.Module) and isinstance(hidden, Tensor):
            scales: tuple[float, ...] = (1.0, hidden.size(-1) ** -0.5)
            right = next((scale for scale in scales if gives_logits(model, head(hidden * scale), full)), None)
            if right is not None:
                return right
    warn_of_full_logits(model)
    return None
