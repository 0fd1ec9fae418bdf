"""The reference policy: what the trained one must not drift from."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from trainkit.data import Sequences
from trainkit.models.adapters import has_adapter, switch_off, switch_on
from trainkit.models.policy import Policy, TokenOutputs
from trainkit.models.trunk import tiny_input


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


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """A short hash of names, shapes and bytes, by which a run recognises the weights it started from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
