"""The reference policy: what the trained one must not drift from."""

from __future__ import annotations

import copy
import hashlib
from functools import cached_property

import torch

from trainkit.data import Sequences
from trainkit.models.policy import CausalPolicy, TokenOutputs


class Reference:
    """A frozen full copy of a policy, without its value head: ``reference(sequences) -> TokenOutputs``.

    Always in evaluation mode, never with a gradient. Temperature and logit mask are the policy's, so that the
    divergence is exactly 0 before the first update.
    """

    def __init__(self, policy: CausalPolicy) -> None:
        head, policy.value_head = policy.value_head, None
        try:
            self.policy = copy.deepcopy(policy)
        finally:
            policy.value_head = head
        self.policy.eval().requires_grad_(False)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of names, shapes and bytes, by which a run recognises the weights it started from."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.policy.state_dict().items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def __call__(self, sequences: Sequences) -> TokenOutputs:
        """Log-probabilities of the response tokens under the reference."""
        outputs: TokenOutputs = self.policy(sequences)
        return outputs
