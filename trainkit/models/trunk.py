"""The frozen trunk: the lower blocks of a model of which only the upper blocks are trained.

The trunk's output for a sequence never changes, so it is computed once. The reference, and every pass of the update,
start from this output. This works for any model whose blocks are in one module list: blocks are replaced temporarily.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedConfig

from trainkit.errors import ConfigError
from trainkit.models.images import reads_images
from trainkit.models.unloaded import decided

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def depth_of(config: PreTrainedConfig) -> int | None:
    """Return the number of transformer blocks, of an encoder-decoder those of the decoder; None if it is not given."""
    text = config.get_text_config()
    names = ("num_decoder_layers", "decoder_layers") if config.is_encoder_decoder else ()
    counts = (getattr(text, name, None) for name in (*names, "num_hidden_layers"))
    return next((depth for depth in counts if depth is not None), None)


def find_blocks(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the model's transformer blocks, of an encoder-decoder those of the decoder; None if they are not found.

    These are the first module list with the length that the config gives.
    """
    depth = depth_of(model.config)
    apart = model.config.is_encoder_decoder or reads_images(model.config)
    root = model.get_decoder() if apart else model.base_model
    lists = (module for module in root.modules() if isinstance(module, nn.ModuleList))
    return next((blocks for blocks in lists if len(blocks) == depth), None)


def freeze_below(model: PreTrainedModel, unfrozen: int) -> None:
    """Freeze the embeddings and all blocks except the top ``unfrozen``; what follows the blocks stays trainable.

    A head that is tied to the embeddings is frozen with them. The blocks of an encoder-decoder are those of the
    decoder; its encoder is frozen.

    Raises:
        ConfigError: the model has fewer blocks, its blocks are not found, or nothing would be trained.
    """
    blocks = find_blocks(model)
    if blocks is None:
        raise ConfigError(
            f"model.num_layers_unfrozen is {unfrozen}, but the blocks of {type(model).__name__} cannot be found; "
            "set it to -1, or freeze parameters of a live model yourself"
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
            f"model.num_layers_unfrozen is {unfrozen}, and in {type(model).__name__} nothing follows the layers, so "
            f"nothing would be trained; give 1 to {len(blocks)}, or -1 to train everything"
        )


class Trunk:
    """The blocks below the first trained block, and the modules that run before them: embeddings and their dropout.

    Args:
        model: the language model.
        at_most: the largest depth; None: as many blocks as are frozen.

    Attributes:
        depth: the number of blocks in the trunk; 0 if a parameter before them is trained, or if the model's output is
            not reproduced from the trunk's output.
        frozen: the modules of the trunk.
    """

    def __init__(self, model: PreTrainedModel, at_most: int | None = None) -> None:
        self.blocks = find_blocks(model)
        self.depth, self.frozen, self.tuples = 0, [], False
        if self.blocks is None:
            return
        frozen = [not any(p.requires_grad for p in block.parameters()) for block in self.blocks]
        depth = frozen.index(False) if False in frozen else len(frozen)
        depth = depth if at_most is None else min(depth, at_most)
        below = modules_below(model, self.blocks, depth) if depth else []
        if depth and not any(p.requires_grad for module in below for p in module.parameters()):
            self.depth, self.frozen = depth, below
            self.depth, self.tuples = decided(lambda: self._checked(model), lambda found: not found[0])

    @torch.no_grad()
    def __call__(self, base: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the input of the first trained block, [B, T, D]; the blocks above the trunk are not run."""
        assert self.blocks is not None
        states: list[Tensor] = []
        handle = self.blocks[self.depth - 1].register_forward_hook(lambda _, __, output: states.append(first(output)))
        above = range(self.depth, len(self.blocks))
        try:
            with stand_in(self.blocks, {index: _Skip(self.tuples) for index in above}):
                base(**inputs)
        finally:
            handle.remove()
        return states[0]

    def known(self, hidden: Tensor | None) -> AbstractContextManager[None]:
        """Return a context with `given` output; None: the trunk is run."""
        return nullcontext() if hidden is None else self.given(hidden)

    @contextmanager
    def given(self, hidden: Tensor) -> Iterator[None]:
        """Use ``hidden`` [B, T, D] as the trunk's output within the context, instead of running the trunk."""
        assert self.blocks is not None
        state = Known(hidden, self.tuples)
        with stand_in(self.blocks, dict.fromkeys(range(self.depth), state)):
            yield

    @torch.no_grad()
    def _checked(self, model: PreTrainedModel) -> tuple[int, bool]:
        """Return ``depth``, 0 unless the upper blocks, applied to the trunk's output, give the output; and `tuples`."""
        training, inputs, fault = model.training, tiny_input(model), "its output differs"
        model.eval()
        try:
            if self._goes_on(model, inputs):
                return self.depth, self.tuples
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"  # blocks that pass each other more than a hidden state
        finally:
            model.train(training)
        log.warning(
            "%s: the output of its frozen layers cannot be reused (%s); they are run in every pass",
            type(model).__name__,
            fault,
        )
        return 0, self.tuples

    def _goes_on(self, model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
        assert self.blocks is not None
        outputs: list[Any] = []
        handle = self.blocks[0].register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            whole = model.base_model(**inputs).last_hidden_state
        finally:
            handle.remove()
        self.tuples = isinstance(outputs[0], tuple)
        state = self(model.base_model, inputs)
        model.base_model(**{**inputs, "input_ids": inputs["input_ids"].flip(1)})  # clears any state of the first pass
        with self.given(state):
            return torch.equal(whole, model.base_model(**inputs).last_hidden_state)


class Known(nn.Module):
    """A replacement for a block of the trunk, which returns the trunk's output for any input."""

    def __init__(self, hidden: Tensor, as_tuple: bool) -> None:
        super().__init__()
        self.hidden, self.as_tuple = hidden, as_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the trunk's output."""
        return (self.hidden,) if self.as_tuple else self.hidden


class _Skip(nn.Module):
    """A replacement for a block, which returns its input."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the input."""
        return (hidden_states,) if self.as_tuple else hidden_states


@contextmanager
def stand_in(blocks: nn.ModuleList, others: Mapping[int, nn.Module]) -> Iterator[None]:
    """Replace blocks by the modules ``others``, by index, within the context; nothing is registered or copied."""
    modules = dict(blocks._modules)
    try:
        blocks._modules.update({str(index): other for index, other in others.items()})
        yield
    finally:
        blocks._modules.update(modules)


def modules_below(model: PreTrainedModel, blocks: nn.ModuleList, depth: int) -> list[nn.Module]:
    """Return the first ``depth`` blocks, and the modules that run before or between them.

    A forward pass on a small input shows which modules these are. The whole encoder of an encoder-decoder is included,
    and all that reads images.
    """
    names = {module: name for name, module in model.named_modules()}
    called = decided(lambda: [names[module] for module in _called_below(model, blocks, depth)])
    encoder = [model.get_encoder()] if model.config.is_encoder_decoder else []
    if reads_images(model.config):
        encoder = [each for each in model.base_model.children() if each is not model.get_decoder()]
    return [*encoder, *(model.get_submodule(name) for name in called), *blocks[:depth]]


@torch.no_grad()
def _called_below(model: PreTrainedModel, blocks: nn.ModuleList, depth: int) -> list[nn.Module]:
    """Return the modules that run before the block ``depth``, and neither are in a block nor contain the blocks."""
    within = {id(inner) for block in blocks for inner in block.modules()}
    within |= {id(module) for module in model.modules() if any(inner is blocks for inner in module.modules())}
    outside = {id(module) for module in model.modules()} - within  # others are made in the pass
    called: list[nn.Module] = []
    reached = False

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal reached
        reached = reached or (depth < len(blocks) and module is blocks[depth])
        if not reached and id(module) in outside:  # also a layer with an adapter, which is a module in it
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
    return called


def first(output: Any) -> Tensor:
    """Return the hidden state that a block returns, alone or first in a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def tiny_input(model: PreTrainedModel) -> dict[str, Any]:
    """Return an input of four tokens, for test passes through a model; for an encoder-decoder, on both sides.

    The padding token is avoided: some models, such as transformers' classifiers, take it for the end of the text.
    """
    text = model.config.get_text_config()
    tokens = [token for token in range(min(text.vocab_size, 5)) if token != getattr(text, "pad_token_id", None)]
    ids = torch.tensor([tokens[:4]], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    return {**inputs, "decoder_input_ids": ids} if model.config.is_encoder_decoder else inputs
