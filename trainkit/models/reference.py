"""The reference policy: what the trained one must not drift from."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models.adapters import has_adapter, language_model, switch_off, switch_on
from trainkit.models.policy import Policy, TokenOutputs
from trainkit.models.trunk import find_blocks, modules_below, tiny_input


class Reference:
    """A policy as it is now, frozen, without its further heads: ``reference(sequences) -> TokenOutputs``.

    Parameters that are not trained are shared with the policy, not copied. So with everything trained it is a full
    copy; with frozen lower layers, a copy of the upper ones on the shared trunk; with an adapter, the model without
    it, where a new adapter changes nothing (else the adapter as it is now).

    Always in evaluation mode, never with a gradient. Temperature and logit mask are the policy's, so that the
    divergence is exactly 0 before the first update.
    """

    def __init__(self, policy: Policy) -> None:
        heads, policy.value_head, policy.head = (policy.value_head, policy.head), None, None
        shared = [tensor for tensor in policy.parameters() if not tensor.requires_grad]
        try:
            self.policy = copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})
        finally:
            policy.value_head, policy.head = heads
        self.policy.eval().requires_grad_(False)
        if has_adapter(self.policy.model):
            self._leave_adapter_out()

    @torch.no_grad()
    def _leave_adapter_out(self) -> None:
        model, probe = self.policy.model, tiny_input(self.policy.model)
        adapted = model(**probe).logits
        switch_off(model)
        if not torch.equal(model(**probe).logits, adapted):  # one that goes on, or changes the weights
            switch_on(model)
            self.policy.requires_grad_(False)

    @torch.no_grad()
    def __call__(self, sequences: Sequences) -> TokenOutputs:
        """Log-probabilities of the response tokens under the reference."""
        outputs: TokenOutputs = self.policy(sequences)
        return outputs


def create_reference_model(model: Any, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """A frozen copy in evaluation mode, of a wrapper or of a model of transformers or peft.

    What is shared is one tensor in memory, so it is frozen in ``model`` too: the blocks below ``num_shared_layers`` and
    all that runs before them, such as the embeddings (and a head that is tied to these), or a whole encoder.

    Args:
        model: what to refer to, as it is now.
        num_shared_layers: how many blocks, from 0 (what runs before them is) to all of them; -1 shares everything;
            None shares nothing and freezes nothing.
        pattern: where the blocks are, if they are not to be looked for: ``transformer.h.{layer}``.

    Raises:
        ConfigError: there are fewer blocks, or none are found.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            "the parameters are DeepSpeed's (ZeRO-3), and no process has them whole; load the model twice"
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
    return [p for module in modules_below(inner, blocks, count) for p in module.parameters()]


def _blocks_called(model: PreTrainedModel, pattern: str) -> nn.ModuleList:
    """The module list whose blocks are called so: the whole of the last parts of their names (S-25)."""
    path, _, layer = pattern.rpartition(".")
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and f".{name}".endswith(f".{path}")
    }
    if layer != "{layer}" or len(found) != 1:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise ConfigError(
            f"pattern {pattern!r} names {len(found)} lists of layers; it should name one of "
            f"{', '.join(f'{name}.{{layer}}' for name in lists)}"
        )
    return next(iter(found.values()))


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """A short hash of names, shapes and bytes, by which a run recognises the weights it started from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
