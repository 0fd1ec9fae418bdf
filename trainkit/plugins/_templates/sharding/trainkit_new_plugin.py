"""new_plugin: a sharding that keeps blocks gathered between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainkit import FSDP2, TRLConfig, register_sharding
from trainkit.errors import ConfigError


@register_sharding("new_plugin")
class NewPlugin(FSDP2):
    """FSDP2 whose blocks are gathered once for a pass, not twice: faster, with the weights of all blocks in memory.

    It is ZeRO stage 2 of Rajbhandari et al. 2020: gradients and the optimizer's state are divided.
    """

    def check(self, config: TRLConfig[Any]) -> None:
        """Refuse what this sharding was not tried with."""
        if config.model.peft_config is not None:
            raise ConfigError(
                "new_plugin was not tried with model.peft_config; remove it, or set train.sharding to fsdp2"
            )

    def prepare(
        self, model: nn.Module, make: Callable[[nn.Module], Any], frozen: Sequence[nn.Module] = ()
    ) -> tuple[nn.Module, Any]:
        """Divide the models, as FSDP2 does."""
        prepared = super().prepare(model, make, frozen)
        self.keep_blocks()
        return prepared

    @contextmanager
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Gather all parameters on every process inside the block."""
        with super().unsharded(write=write):
            yield
        if not self.gathered:
            self.keep_blocks()

    def keep_blocks(self) -> None:
        """Let no block be divided again before the backward pass."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False, recurse=False)
