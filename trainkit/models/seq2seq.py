"""Encoder-decoders as policies: the encoder reads the prompt, the decoder chooses the response."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models.policy import Policy, evaluating, gives_logits, warn_of_full_logits
from trainkit.models.trunk import find_blocks, tiny_input


class Seq2SeqPolicy(Policy):
    """An encoder-decoder as a policy; the arguments are those of `Policy`.

    The encoder reads each row up to its first response token. The decoder reads its start token (and a first token
    that the model forces, if it has one) and then the response, so the first response token is an action like the
    others (S-03, S-23, S-41).

    Attributes:
        scale: what the decoder's states are multiplied with before the head reads them, as T5 does.
    """

    def __init__(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not model.config.is_encoder_decoder:
            raise ConfigError(f"{type(model).__name__} is no encoder-decoder; make its policy with make_policy(model)")
        super().__init__(model, **kwargs)
        self.prefix = decoder_prefix(model)
        scale = _head_scale(model)
        self.head_alone, self.scale = scale is not None, scale or 1.0
        self.encoder_frozen = _is_frozen(model.get_encoder())
        self.frozen = [model.get_encoder()] if self.encoder_frozen else []
        self.frozen += takewhile(_is_frozen, find_blocks(model) or [])

    @property
    def has_trunk(self) -> bool:
        """Whether the encoder is frozen, so that its output can be kept; the decoder's lower layers run again."""
        return self.encoder_frozen

    def _frozen(self) -> Iterable[nn.Module]:
        return self.frozen

    def _through_trunk(self, sequences: Sequences) -> Tensor:
        return encode(self.model, *_prompts(sequences))

    def _states(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        ids, mask = _prompts(sequences)
        response = _Responses.of(sequences, self.prefix)
        before = encode(self.model, ids, mask) if sequences.trunk is None else sequences.trunk[:, : ids.size(1)]
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


def decoder_prefix(model: PreTrainedModel) -> list[int]:
    """What the decoder reads before it chooses: its start token, and the first token that the model forces, if any.

    Raises:
        ConfigError: the model does not say which token its decoder starts with.
    """
    places = (getattr(model, "generation_config", None), model.config)

    def known(name: str) -> int | None:
        found = (getattr(place, name, None) for place in places)
        return next((token for token in found if isinstance(token, int)), None)

    start, forced = known("decoder_start_token_id"), known("forced_bos_token_id")
    start = known("bos_token_id") if start is None else start
    if start is None:
        raise ConfigError(
            f"{type(model).__name__} does not say which token its decoder starts with; set decoder_start_token_id in "
            "the model's config (T5 starts with padding, BART with EOS)"
        )
    return [start] if forced is None else [start, forced]


def encode(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """What the encoder says about prompts [B, P], of which ``mask`` says what is real. -> [B, P, D]."""
    states: Tensor = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    return states


def _decode(model: PreTrainedModel, before: Tensor, mask: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """The decoder's last states [B, R, D] over ``ids`` [B, R], after an encoder that said ``before`` [B, P, D]."""
    states: Tensor = model.get_decoder()(
        input_ids=ids,
        attention_mask=real,
        encoder_hidden_states=before,
        encoder_attention_mask=mask,
        use_cache=False,
    ).last_hidden_state
    return states


def _before(sequences: Sequences) -> Tensor:
    """bool [B, T]: real tokens before the first response token."""
    return sequences.attention_mask & (sequences.response_mask.cumsum(1) == 0)


def _prompts(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """What stands before each row's first response token, as ids and bool mask [B, P]."""
    prompt = _before(sequences)
    width = int(prompt.sum(1).max())
    return sequences.input_ids[:, :width], prompt[:, :width]


@dataclass(frozen=True)
class _Responses:
    """What the decoder reads, and where it chooses: the prefix of K tokens, then each response but for its last."""

    input_ids: Tensor  # [B, K + R − 1]
    real: Tensor  # bool, as input_ids
    chosen: Tensor  # bool [B, R]: whether the next token is one that the policy chose
    start: int  # K − 1, the state in which the first response token is chosen

    @classmethod
    def of(cls, sequences: Sequences, prefix: list[int]) -> _Responses:
        """From rows of prompt and response."""
        device, total = sequences.input_ids.device, sequences.input_ids.size(1)
        begins = _before(sequences).sum(1, keepdim=True)
        used = sequences.attention_mask | sequences.response_mask
        ends = (used * torch.arange(1, total + 1, device=device)).amax(1, keepdim=True)
        places = begins + torch.arange(int((ends - begins).max()), device=device)  # [B, R]
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
        """Those of ``values`` [B, K + R − 1, *] that stand where a response token is chosen. -> [N, *]."""
        return values[:, self.start :][self.chosen]


def _is_frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


@torch.no_grad()
def _head_scale(model: PreTrainedModel) -> float | None:
    """The factor between the decoder's states and what the head makes the model's logits of; None if there is none."""
    head, probe = model.get_output_embeddings(), tiny_input(model)
    ids, mask = probe["input_ids"], probe["attention_mask"].bool()
    with evaluating(model):
        full = model(**probe).logits
        decoder = model.get_decoder()(input_ids=ids, encoder_hidden_states=encode(model, ids, mask), use_cache=False)
        hidden = getattr(decoder, "last_hidden_state", None)
        if isinstance(head, nn.Module) and isinstance(hidden, Tensor):
            scales: tuple[float, ...] = (1.0, hidden.size(-1) ** -0.5)
            found = next((scale for scale in scales if gives_logits(model, head(hidden * scale), full)), None)
            if found is not None:
                return found
    warn_of_full_logits(model)
    return None
