"""Critics with layers of their own: a copy of the policy's upper layers, or a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError
from trainkit.models.adapters import has_adapter
from trainkit.models.trunk import Known, find_blocks, first, modules_below, stand_in, tiny_input
from trainkit.models.unloaded import decided
from trainkit.models.value_head import ValueHead, state_width

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = Mapping[str, Any]
"""The arguments of a model's forward pass."""


class Critic(nn.Module):
    """What computes the states [B, T, D] that a value head reads, with layers of its own; `states` returns them.

    Args:
        body: computes the states.

    Attributes:
        width: the width D of the states.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.width = state_width(body.config)

    def head(self) -> ValueHead:
        """Return a new value head."""
        return ValueHead(self.width)

    def states(self, run: Callable[[], Any], inputs: Inputs) -> tuple[Any, Tensor]:
        """Return what ``run`` returns, which runs the policy on ``inputs``, and the critic's states [B, T, D]."""
        return run(), self.body(**inputs).last_hidden_state


class OwnCritic(Critic):
    """A critic that is a model of its own, as in async_rlhf and in TRL's later PPO.

    Args:
        model: a causal language model, whose body alone is used; or a classifier with one label, such as a reward
            model, whose head is the first value head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.config.is_encoder_decoder:
            raise ConfigError(f"{type(model).__name__} is an encoder-decoder, which cannot be a critic of its own")
        super().__init__(model.base_model)
        self._score = [getattr(model, "score", None)]  # a list, so that it is no submodule

    def head(self) -> ValueHead:
        """Return the head of a classifier with one label as a value head; else a new one."""
        (score,) = self._score
        if not isinstance(score, nn.Linear) or score.out_features != 1:
            return ValueHead(self.width)
        bias = torch.zeros_like(score.weight[:, 0]) if score.bias is None else score.bias
        weights = {"summary.weight": score.weight.detach(), "summary.bias": bias.detach()}
        return ValueHead.like(weights, self.width).to(score.weight.device)


class ValueBranch(Critic):
    """A trained copy of a policy's upper layers, and of what follows them, on its lower layers.

    It is the value branch of trlX's ``num_value_layers_unfrozen``. The loss of the values changes the lower layers too,
    as far as these are trained.

    Args:
        model: the policy's language model.
        layers: how many layers are copied.

    Attributes:
        layers: how many layers are copied.

    Raises:
        ConfigError: the model is an encoder-decoder, has an adapter, its layers are not found, or it has too few.
    """

    def __init__(self, model: PreTrainedModel, layers: int) -> None:
        name = type(model).__name__
        if model.config.is_encoder_decoder or has_adapter(model):
            what = "has an adapter" if has_adapter(model) else "is an encoder-decoder"
            raise ConfigError(f"{name} {what}, so the critic can have no layers of its own on it; give 0, or a model")
        if (blocks := find_blocks(model)) is None:
            raise ConfigError(f"the layers of {name} cannot be found, so the critic can have none of its own; give 0")
        if not 1 <= layers < len(blocks):
            raise ConfigError(
                f"the critic should have {layers} layers of its own, and {name} has {len(blocks)}; give 0 to "
                f"{len(blocks) - 1}, or give the critic a model of its own"
            )
        depth = len(blocks) - layers
        super().__init__(_upper(model, blocks, depth))
        self.depth, self.layers, self.tuples = depth, layers, False
        self.below = [blocks]  # a list, so that the policy's layers are not the critic's
        decided(lambda: self._check(model), bool)  # which raises, or returns None

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        """Check on a small input that the copied layers give the policy's states, as they have its weights."""
        outputs: list[Any] = []
        handle = self.below[0][0].register_forward_hook(lambda _, __, output: outputs.append(output))
        inputs, modes = tiny_input(model), (model.training, self.training)
        model.eval(), self.eval()
        try:
            expected = model.base_model(**inputs).last_hidden_state
            self.tuples = isinstance(outputs[0], tuple)
            same = torch.equal(expected, self.states(lambda: model.base_model(**inputs), inputs)[1])
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise ConfigError(f"the upper layers of {type(model).__name__} cannot be run alone: {error}") from error
        finally:
            handle.remove()
            model.train(modes[0]), self.train(modes[1])
        if not same:
            raise ConfigError(
                f"the upper layers of {type(model).__name__} do not give its states when they are run alone, so the "
                "critic can have none of its own; give 0, or a model"
            )

    def states(self, run: Callable[[], Any], inputs: Inputs) -> tuple[Any, Tensor]:
        """Return what ``run`` returns, and the critic's states [B, T, D]."""
        seen: list[Tensor] = []
        place, blocks = find_blocks(self.body), self.below[0]
        assert place is not None
        handle = blocks[self.depth - 1].register_forward_hook(lambda _, __, output: seen.append(first(output)))
        try:
            states = run()
        finally:
            handle.remove()
        with stand_in(place, dict.fromkeys(range(self.depth), Known(seen[-1], self.tuples))):
            return states, self.body(**inputs).last_hidden_state


class NoEmbedding(nn.Module):
    """A replacement for embeddings whose result is not used; it has no weights."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.width, self.dtype = embedding.embedding_dim, embedding.weight.dtype

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros [*, D]."""
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)


def _upper(model: PreTrainedModel, blocks: nn.ModuleList, depth: int) -> Any:
    """Return a copy of the model's body without its lower ``depth`` blocks and without embeddings."""
    below = modules_below(model, blocks, depth)
    replaced: dict[int, Any] = {id(block): nn.Identity() for block in blocks[:depth]}
    replaced |= {id(module): NoEmbedding(module) for module in below if isinstance(module, nn.Embedding)}
    body: Any = copy.deepcopy(model.base_model, replaced)
    body.requires_grad_(True)
    for name, module in model.base_model.named_modules():
        if module in below and id(module) not in replaced:  # their results are not used
            body.get_submodule(name).requires_grad_(False)
    return body


def make_critic(model: PreTrainedModel, source: int | PreTrainedModel | None) -> Critic | None:
    """Return the critic of a policy: None without layers of its own, a `ValueBranch` with
    ``source`` layers, or a model.

    Raises:
        ConfigError: the policy is an encoder-decoder, the critic does not fit it or shares weights with it.
    """
    if source is None or source == 0:
        return None
    if isinstance(source, int):
        return ValueBranch(model, source)
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{type(model).__name__} is an encoder-decoder, whose critic can be no model of its own")
    their_vocabulary, ours = (each.config.get_text_config().vocab_size for each in (source, model))
    if their_vocabulary < ours:
        raise ConfigError(
            f"the critic knows {their_vocabulary} tokens, and the policy {ours}; give one with the same tokenizer"
        )
    trained = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in trained for parameter in source.parameters()):
        raise ConfigError("the critic shares weights with the policy, and both would change them; give a copy")
    return OwnCritic(source).to(model.device)
