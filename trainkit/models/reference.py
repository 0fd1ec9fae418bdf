"""Frozen models, with which the trained policy is compared: its start, and further ones such as a teacher."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from trainkit.data import Sequences
from trainkit.errors import ConfigError, describe
from trainkit.models.adapters import adapted, language_model, switch_off, switch_on
from trainkit.models.policy import Policy, TokenOutputs
from trainkit.models.trunk import find_blocks, modules_below, tiny_input
from trainkit.models.unloaded import decided
from trainkit.models.virtual import virtual_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reference:
    """A frozen copy of a policy's current state, without its value head and additional head.

    ``reference(sequences) -> TokenOutputs``. Parameters that are not trained are shared with the policy, not copied:

    * If all parameters are trained, the reference is a full copy.
    * If lower layers are frozen, it is a copy of the upper layers on the shared frozen trunk.
    * If the model has an adapter that does not change the model's outputs yet (a new one), it is the model without
      the adapter, and copies no base weights. If the adapter does change them, its current state is copied.
    * Virtual tokens always change them, new ones too, so they are copied.

    The reference is always in evaluation mode and computes no gradients. It has the policy's temperature and logit
    mask, so the divergence is exactly 0 before the first update.

    Args:
        policy: the policy to copy.

    Attributes:
        policy: the frozen copy.
    """

    def __init__(self, policy: Policy) -> None:
        heads = {name: getattr(policy, name) for name in ("value_head", "head", "critic")}
        for name in heads:
            setattr(policy, name, None)
        shared = [tensor for tensor in policy.parameters() if not tensor.requires_grad]
        try:
            self.policy = copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})
        finally:
            for name, module in heads.items():
                setattr(policy, name, module)
        self.policy.eval().requires_grad_(False)
        if adapted(self.policy.model):
            self._leave_adapter_out()

    def _leave_adapter_out(self) -> None:
        model = self.policy.model
        changes = decided(lambda: _changes_outputs(model))  # it is trained already, or its start changed the weights
        if changes:
            switch_on(model)
            self.policy.requires_grad_(False)
        else:
            switch_off(model)

    @torch.no_grad()
    def __call__(self, sequences: Sequences) -> TokenOutputs:
        """Return the log-probabilities of the response tokens under the reference."""
        outputs: TokenOutputs = self.policy(sequences)
        return outputs

    @torch.no_grad()
    def states(self, sequences: Sequences) -> Tensor:
        """Return the inputs of the output head for the N response tokens. -> [N, D], or full logits [N, V]."""
        return self.policy._states(sequences)[0]


@torch.no_grad()
def _changes_outputs(model: Any) -> bool:
    """Return whether the model's adapter changes its outputs; it is switched off then."""
    probe = tiny_input(model)
    adapted = model(**probe).logits
    switch_off(model)
    return not torch.equal(model(**probe).logits, adapted)


class Frozen:
    """A second model as a frozen policy, such as a teacher: ``frozen(sequences) -> TokenOutputs``.

    `load` loads it. It is always in evaluation mode and computes no gradients. It does not
    start from the output of the trained policy's frozen layers (`Sequences.trunk`), because it has layers of its own.

    Args:
        load: loads the policy.
    """

    def __init__(self, load: Callable[[], Policy]) -> None:
        self._load = load
        self._policy: Policy | None = None

    def load(self) -> Self:
        """Load the policy, once."""
        if self._policy is None:
            self._policy = self._load().eval().requires_grad_(False)
        return self

    @property
    def policy(self) -> Policy:
        """The frozen policy. It must be loaded."""
        if self._policy is None:
            raise RuntimeError("the frozen model is not loaded yet; call load(), as trainer.models.build() does")
        return self._policy

    @property
    def loaded(self) -> bool:
        """Whether the policy has been loaded."""
        return self._policy is not None

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of its weights."""
        return fingerprint(self.policy.state_dict())

    @torch.no_grad()
    def __call__(self, sequences: Sequences) -> TokenOutputs:
        """Return the log-probabilities of the response tokens under the frozen model."""
        outputs: TokenOutputs = self.policy(replace(sequences, trunk=None))
        return outputs

    @torch.no_grad()
    def states(self, sequences: Sequences) -> Tensor:
        """Return the inputs of the output head for the N response tokens. -> [N, D], or full logits [N, V]."""
        return self.policy._states(replace(sequences, trunk=None))[0]


def create_reference_model(model: Any, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """Create a frozen copy, in evaluation mode, of a wrapper or of a transformers or peft model.

    The lowest ``num_shared_layers`` blocks and all modules that run before them, such as the embeddings (and a head
    that is tied to these) or a whole encoder, are shared with ``model``, not copied. Because shared parameters are the
    same tensors, they are frozen in ``model`` too.

    Args:
        model: the model to copy.
        num_shared_layers: the number of shared blocks. 0 shares only the modules before the blocks, -1 shares
            everything; None shares nothing and freezes nothing in ``model``.
        pattern: the name of the blocks, such as ``transformer.h.{layer}``; found automatically without it.

    Raises:
        ConfigError: the model has fewer blocks, or they are not found; or an argument is of another type.
    """
    if not isinstance(model, nn.Module) or not isinstance(num_shared_layers, int | None):
        raise ConfigError(
            "create_reference_model takes a model and a number of layers, or None; given "
            f"{describe(model)} and {describe(num_shared_layers)}"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            "the parameters are partitioned by DeepSpeed (ZeRO-3), so no process can copy them; load the model twice"
        )
    shared = _shared(model, num_shared_layers, pattern)
    for parameter in shared:
        parameter.requires_grad_(False)
    reference = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    return reference.requires_grad_(False).eval()


def _shared(model: Any, count: int | None, pattern: str | None) -> list[nn.Parameter]:
    if count is None:
        if pattern is not None:
            raise ConfigError(f"pattern is {pattern!r}, and nothing is shared; give num_shared_layers")
        return []
    if count == -1:
        return list(model.parameters())
    inner = language_model(model)
    blocks = find_blocks(inner) if pattern is None else _blocks_called(inner, pattern)
    if blocks is None:
        raise ConfigError(
            f"the blocks of {type(inner).__name__} cannot be found; give a pattern such as model.layers.{{layer}}"
        )
    if not 0 <= count <= len(blocks):
        raise ConfigError(
            f"num_shared_layers is {count}, and there are {len(blocks)} layers; give 0 to {len(blocks)}, -1 to share "
            "everything, or None to share nothing"
        )
    if (virtual := virtual_tokens(inner)) is not None:  # all else is frozen
        virtual_ids = {id(parameter) for parameter in virtual.parameters()}
        return [parameter for parameter in inner.parameters() if id(parameter) not in virtual_ids]
    return [p for module in modules_below(inner, blocks, count) for p in module.parameters()]


def _blocks_called(model: PreTrainedModel, pattern: str) -> nn.ModuleList:
    """Return the module list whose name is the pattern's path, or ends in it at a whole name component."""
    path, _, layer = pattern.rpartition(".")
    blocks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and f".{name}".endswith(f".{path}")
    }
    if layer != "{layer}" or len(blocks) != 1:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise ConfigError(
            f"pattern {pattern!r} names {len(blocks)} lists of layers; it should name one of "
            f"{', '.join(f'{name}.{{layer}}' for name in lists)}"
        )
    return next(iter(blocks.values()))


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Compute a short hash of names, shapes and bytes, by which a run recognises the weights it started from.

    Tensors of 16 bits among others in float32 count as float32, because `store_frozen` may have stored them so.
    """
    digest, mixed = hashlib.sha256(), any(tensor.dtype == torch.float32 for tensor in state.values())
    for name, tensor in sorted(state.items()):
        copied = tensor.detach().to("cpu", copy=True)  # numpy() fixes the size of a storage, which FSDP2 lets go of
        copied = copied.float() if mixed and copied.dtype in (torch.bfloat16, torch.float16) else copied
        digest.update(f"{name}{tuple(copied.shape)}{copied.dtype}".encode())
        digest.update(copied.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
