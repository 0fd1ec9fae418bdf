"""Mixtures of experts: the loss by which their tokens are spread evenly over the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.functional import entropy_from_logits, to_float64
from trainkit.models.trunk import tiny_input
from trainkit.models.unloaded import decided

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Balance(NamedTuple):
    """What is known of the routers in a pass, as sums over tokens."""

    loss: Tensor
    """The loss that balances the experts, with gradient."""
    entropy: Tensor
    """The entropy of the routers' probabilities."""
    tokens: Tensor
    """The number of tokens."""


class ExpertBalance:
    """Adds up the loss that balances the experts of a mixture over the texts that a policy runs with gradient.

    The loss of a text is E · Σ_e f_e · P_e over the E experts: f_e is how many of its tokens go to expert e, divided by
    their number, and P_e the mean probability of it; both over all layers that are run together, as in transformers. If
    experts are used evenly, it is the number of experts to which a token goes. A text counts by its tokens, also of the
    prompt too.

    Unlike the loss over all texts of a micro-batch, whose gradient depends on how a batch is divided, the one of each
    text can be added up.

    Source: Fedus et al. 2021, Switch Transformers, equations 4 to 6; of each text, DeepSeek-AI 2024, DeepSeek-V3,
    equation 17.

    Args:
        model: a causal language model whose config has ``output_router_logits``.

    Raises:
        ConfigError: the model has no router whose outputs are known, or its own loss is another one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.coefficient = float(model.config.get_text_config().router_aux_loss_coef)
        kinds: Any = getattr(model.base_model, "_can_record_outputs", None) or {}
        self.router: Any = kinds.get("router_logits")
        self.experts: int = getattr(model, "num_experts", 0)
        self.chosen: int = getattr(model, "num_experts_per_tok", 0)
        self._terms: list[Balance] | None = None
        if not (self.router and self.experts and self.chosen and decided(lambda: self._fits(model))):
            raise ConfigError(
                f"output_router_logits is true, and {type(model).__name__} does not balance its experts by the loss of "
                "Switch Transformers; set it to false"
            )

    def _fits(self, model: PreTrainedModel) -> bool:
        inputs = tiny_input(model)
        rows = Sequences.from_lists([[]], inputs["input_ids"].tolist())
        with torch.enable_grad(), self.collected() as terms, self.recorded(model, rows):
            expected = model(**inputs, output_router_logits=True).aux_loss
        return torch.allclose((terms[0].loss / terms[0].tokens).float(), expected.float(), rtol=1e-4)

    @contextmanager
    def collected(self) -> Iterator[list[Balance]]:
        """Yield a list, to which each pass with gradient inside the block adds its balance."""
        self._terms = []
        try:
            yield self._terms
        finally:
            self._terms = None

    @contextmanager
    def recorded(self, model: PreTrainedModel, sequences: Sequences) -> Iterator[None]:
        """Add the losses of the texts of ``sequences``, whose padded rows are run inside the block."""
        terms = self._terms
        if terms is None or not torch.is_grad_enabled():
            yield
            return
        logits: list[Tensor] = []
        routers = [module for module in model.modules() if type(module) is self.router.target_class]
        hooks = [
            each.register_forward_hook(lambda _, __, out: logits.append(out[self.router.index])) for each in routers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        terms.append(self._of_texts(logits, sequences))

    def _of_texts(self, logits: list[Tensor], sequences: Sequences) -> Balance:
        """Return the balance of the texts in rows, from router logits [B·T, E] of each layer."""
        real = sequences.attention_mask
        rows = torch.arange(len(real), device=real.device).unsqueeze(1) * real.size(1)
        text = (rows if sequences.segments is None else rows + sequences.segments).expand_as(real).flatten()
        weight = real.flatten().float()
        counts = probabilities = weight.new_zeros(len(weight) + 1, self.experts)
        entropy = torch.zeros_like(weight)
        for each in logits:
            probability = each.float().softmax(-1)
            entropy += entropy_from_logits(each.detach().float()) * weight / len(logits)
            own = torch.zeros_like(probability).scatter_(1, probability.topk(self.chosen, dim=-1).indices, 1.0)
            counts = counts.index_add(0, text, own * weight.unsqueeze(1))
            probabilities = probabilities.index_add(0, text, probability * weight.unsqueeze(1))
        tokens = weight.new_zeros(len(counts)).index_add(0, text, weight)
        products = (counts * probabilities).sum(1) * self.experts / (tokens.clamp(min=1) * len(logits) ** 2)
        return Balance(*(to_float64(each.sum()) for each in (products, entropy, weight)))


def tokens_of(batch: Any) -> int:
    """Return how many real tokens the sequences of a batch have."""
    if isinstance(batch, Sequences):
        return int(batch.attention_mask.sum())
    return sum(tokens_of(part) for part in batch.parts().values() if hasattr(part, "parts"))
