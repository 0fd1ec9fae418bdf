"""The frozen trunk: the lower blocks of a model of which only the upper ones are trained.

What the trunk says about a sequence never changes, so it is computed once; the reference and every pass of the
update go on from there. Works on any model whose blocks stand in one module list, by standing in for blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedConfig, PreTrainedModel

from trainkit.errors import ConfigError

log = logging.getLogger(__name__)


def depth_of(config: PreTrainedConfig) -> int | None:
    """How many transformer blocks are counted: a causal model's, and of an encoder-decoder the decoder's."""
    text = config.get_text_config()
    names = ("num_decoder_layers", "decoder_layers") if config.is_encoder_decoder else ()
    found = (getattr(text, name, None) for name in (*names, "num_hidden_layers"))
    return next((depth for depth in found if depth is not None), None)


def find_blocks(model: PreTrainedModel) -> nn.ModuleList | None:
    """The model's transformer blocks, of an encoder-decoder the decoder's: the first module list that is as long as
    the config says; None without one."""
    depth = depth_of(model.config)
    root = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    lists = (module for module in root.modules() if isinstance(module, nn.ModuleList))
    return next((blocks for blocks in lists if len(blocks) == depth), None)


def freeze_below(model: PreTrainedModel, unfrozen: int) -> None:
    """Leave only the top ``unfrozen`` blocks, and what follows them, trainable: embeddings and lower blocks are frozen.

    A head that is tied to the embeddings is frozen with them. The blocks of an encoder-decoder are the decoder's
    (S-59); its encoder is frozen.

    Raises:
        ConfigError: the model has fewer blocks, none that can be found, or nothing that would be trained.
    """
    blocks = find_blocks(model)
    if blocks is None:
        raise ConfigError(
            f"model.num_layers_unfrozen is {unfrozen}, and the blocks of {type(model).__name__} cannot be found; "
            "leave it at -1, or freeze parameters of a live model yourself"
        )
    if unfrozen > len(blocks):
        raise ConfigError(
            f"model.num_layers_unfrozen is {unfrozen}; {type(model).__name__} has {len(blocks)} layers. "
            f"Give 0 to {len(blocks)}, or -1 to train everything"
        )
    for module in modules_below(model, blocks, len(blocks) - unfrozen):
        module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.num_layers_unfrozen is {unfrozen}, and in {type(model).__name__} nothing follows the layers that "
            f"could be trained; give 1 to {len(blocks)}, or -1 to train everything"
        )


class Trunk:
    """The blocks below the first that is trained, and what runs before them: embeddings and their dropout.

    Args:
        model: the language model.

    Attributes:
        depth: how many blocks it has; 0 if a trainable parameter comes before any of them, or if standing in for
            the blocks does not give what the model gives.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks = find_blocks(model)
        self.depth, self.frozen, self.tuples = 0, [], False
        if self.blocks is None:
            return
        frozen = [not any(p.requires_grad for p in block.parameters()) for block in self.blocks]
        depth = frozen.index(False) if False in frozen else len(frozen)
        below = modules_below(model, self.blocks, depth) if depth else []
        if depth and not any(p.requires_grad for module in below for p in module.parameters()):
            self.depth, self.frozen = depth, below
            self._check(model)

    @torch.no_grad()
    def __call__(self, base: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """What the first trained block reads, [B, T, D]: the trunk's own work and no block above."""
        assert self.blocks is not None
        found: list[Tensor] = []
        handle = self.blocks[self.depth - 1].register_forward_hook(lambda _, __, output: found.append(_first(output)))
        above = range(self.depth, len(self.blocks))
        try:
            with stand_in(self.blocks, {index: _Skip(self.tuples) for index in above}):
                base(**inputs)
        finally:
            handle.remove()
        return found[0]

    @contextmanager
    def given(self, hidden: Tensor) -> Iterator[None]:
        """Within, the model does not run the trunk: its first trained block reads ``hidden`` [B, T, D]."""
        assert self.blocks is not None
        known = _Known(hidden, self.tuples)
        with stand_in(self.blocks, dict.fromkeys(range(self.depth), known)):
            yield

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        """Set ``depth`` to 0 unless trunk and upper blocks, one after the other, give what the whole model gives."""
        training, inputs, fault = model.training, tiny_input(model), "it says something else then"
        model.eval()
        try:
            if self._goes_on(model, inputs):
                return
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"  # blocks that hand each other more than a hidden state
        finally:
            model.train(training)
        self.depth = 0
        log.warning(
            "%s cannot go on from its frozen layers (%s); they are run in every pass", type(model).__name__, fault
        )

    def _goes_on(self, model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
        assert self.blocks is not None
        outputs: list[Any] = []
        handle = self.blocks[0].register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            whole = model.base_model(**inputs).last_hidden_state
        finally:
            handle.remove()
        self.tuples = isinstance(outputs[0], tuple)
        known = self(model.base_model, inputs)
        model.base_model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)})  # nothing is left of the first
        with self.given(known):
            return torch.equal(whole, model.base_model(**inputs).last_hidden_state)


class _Known(nn.Module):
    """Stands in for a block of the trunk: gives the trunk's output, whatever it reads."""

    def __init__(self, hidden: Tensor, as_tuple: bool) -> None:
        super().__init__()
        self.hidden, self.as_tuple = hidden, as_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The trunk's output."""
        return (self.hidden,) if self.as_tuple else self.hidden


class _Skip(nn.Module):
    """Stands in for a block: gives what it reads."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Its input."""
        return (hidden_states,) if self.as_tuple else hidden_states


@contextmanager
def stand_in(blocks: nn.ModuleList, others: Mapping[int, nn.Module]) -> Iterator[None]:
    """Within, the modules ``others`` stand at their indices in ``blocks``; nothing is registered or copied."""
    own = dict(blocks._modules)
    try:
        blocks._modules.update({str(index): other for index, other in others.items()})
        yield
    finally:
        blocks._modules.update(own)


@torch.no_grad()
def modules_below(model: PreTrainedModel, blocks: nn.ModuleList, depth: int) -> list[nn.Module]:
    """The first ``depth`` blocks, and the modules without children that run before or between them, in a tiny pass."""
    outside = {id(inner) for block in blocks for inner in block.modules()}
    called: list[nn.Module] = []
    reached = False

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal reached
        reached = reached or (depth < len(blocks) and module is blocks[depth])
        if not reached and id(module) not in outside and not list(module.children()):
            called.append(module)

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        nonlocal reached
        reached = reached or (depth == len(blocks) and module is blocks[-1])

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        model.base_model(**tiny_input(model))
    finally:
        for handle in handles:
            handle.remove()
    encoder = [model.get_encoder()] if model.config.is_encoder_decoder else []
    return [*encoder, *called, *blocks[:depth]]


def _first(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def tiny_input(model: PreTrainedModel) -> dict[str, Any]:
    """Four tokens, to see what a model does; for an encoder-decoder, on both sides.

    None is the padding token, which some models, such as transformers' classifiers, take for the end of the text.
    """
    text = model.config.get_text_config()
    tokens = [token for token in range(min(text.vocab_size, 5)) if token != getattr(text, "pad_token_id", None)]
    ids = torch.tensor([tokens[:4]], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    return {**inputs, "decoder_input_ids": ids} if model.config.is_encoder_decoder else inputs
