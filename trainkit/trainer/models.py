"""The models of a run: the policy, its reference, further frozen models, the optimizer and the schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit.config import TRLConfig
from trainkit.errors import ConfigError
from trainkit.models.adapters import bare
from trainkit.models.compiling import compile_blocks
from trainkit.models.fitting import RowLimit
from trainkit.models.policy import Policy
from trainkit.models.recomputing import recompute_activations, recompute_mlps
from trainkit.models.reference import Frozen
from trainkit.models.unloaded import Trial, as_trained, loaded_by_some
from trainkit.plugins.hooks import entry_name
from trainkit.runs.parallel import Parallel
from trainkit.seeding import global_rng
from trainkit.trainer import optim
from trainkit.trainer.master_weights import low_precision
from trainkit.trainer.sharding import FSDP2, Replicated

log = logging.getLogger(__name__)


class Models:
    """The models of a run, with the optimizer and the schedule. `build` makes them once, on all processes together.

    Args:
        config: the run's configuration.
        parallel: the processes, and how they divide the policy.
        live: returns a model object of the user, which is trained in place; None: the configuration names the model.
        row_limit: the most rows of a micro-batch, for the passes of the policy; None: no limit.
        optimizer: the user's optimizer, or a function that makes it; None: that of the configuration.
        scheduler: the same of the schedule.
        make_policy: makes the policy from the configuration, with the global generator seeded.
        finish: checks a new policy, and sets what it needs to know of the run.
        make_reference: makes the reference of a new policy; returns None if the algorithm has none.
        before_dividing: called with the reference before models are divided for good.
        copied: whether this process makes a copy of the policy at the start; called on all processes together.
        total_steps: returns the number of optimizer steps of the run, 0 if it is not known; read for the schedule.

    Raises:
        ConfigError: the settings of optimizer and schedule, or what the user gave, do not fit each other.
    """

    def __init__(
        self,
        config: TRLConfig[Any],
        parallel: Parallel,
        *,
        live: Callable[[], Any],
        row_limit: RowLimit | None,
        optimizer: torch.optim.Optimizer | optim.MakeOptimizer | None,
        scheduler: LRScheduler | optim.MakeScheduler | None,
        make_policy: Callable[[TRLConfig[Any]], nn.Module],
        finish: Callable[[Any], None],
        make_reference: Callable[[nn.Module], Any],
        before_dividing: Callable[[Any], None],
        copied: Callable[[], bool],
        total_steps: Callable[[], int],
    ) -> None:
        self.config, self.parallel, self._live = config, parallel, live
        self.row_limit, self._total_steps = row_limit, total_steps
        self._given_optimizer, self._given_scheduler = optimizer, scheduler
        self._make_policy, self._finish, self._make_reference = make_policy, finish, make_reference
        self._before_dividing, self._copied = before_dividing, copied
        self._unwrapped: Any = None
        self.built = False
        """Whether `build` has made the models."""
        self.policy: Any = None
        """The policy as the loss calls it, so that gradients are synchronised."""
        self.optimizer: Any = None
        """The optimizer, as accelerate has prepared it."""
        self.reference: Any = None
        """What the policy is compared with; None: nothing."""
        self.frozen: list[Frozen] = []
        """Further models, frozen: a reference that the user chose, teachers."""
        optim.check_settings(config)
        if config.optimizer.groups and not isinstance(parallel.sharding, Replicated | FSDP2):
            raise ConfigError(
                f"optimizer.groups is set, and with train.sharding {entry_name(config.train.sharding)!r} all "
                "parameters have one learning rate; remove it, or set train.sharding to 'none' or 'fsdp2'"
            )
        attention = config.model.kwargs.get("attn_implementation")
        whole = config.model.dtype == "float32" and parallel.accelerator.mixed_precision == "no"
        if whole and isinstance(attention, str) and attention.startswith("flash_attention"):
            raise ConfigError(
                f"model.kwargs.attn_implementation is {attention!r}, which computes in 16 bits, and the run computes "
                "in float32; set train.mixed_precision to bf16, or model.dtype to bfloat16"
            )
        if config.train.compile and parallel.sharding.keeps_sharded:
            raise ConfigError(
                f"train.compile is true, and with train.sharding {entry_name(config.train.sharding)!r} blocks are "
                "gathered when they run, which is not built for compiled ones; set one of the two to its default"
            )
        optim.check_given(config, optimizer, scheduler, replicated=type(parallel.sharding) is Replicated)

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of the run; 0 if it is not known."""
        return self._total_steps()

    @property
    def unwrapped(self) -> Any:
        """The policy itself, without the wrapper of accelerate. `build` must have been called."""
        if self._unwrapped is None:
            raise not_built("the policy")
        return self._unwrapped

    def load_policy(self) -> Any:
        """Load the policy on this process, without reference and optimizer, and return it; once."""
        if self._unwrapped is None:
            self._unwrapped = self._loaded()
        return self._unwrapped

    def _loaded(self) -> Any:
        with global_rng(self.config.train.seed, "model", device=self.parallel.device), self.as_trained():
            policy = self._make_policy(self.config)
        asked = getattr(getattr(getattr(policy, "model", None), "config", None), "output_router_logits", False)
        if asked and getattr(policy, "balance", None) is None:
            raise ConfigError(
                f"output_router_logits is true, and a {type(policy).__name__} does not add the loss that balances the "
                "experts of a mixture; set it to false"
            )
        if asked and self.config.train.compile:
            raise ConfigError(
                "train.compile and output_router_logits are true, and the loss that balances the experts of a mixture "
                "is not built for compiled models; set one of the two to false"
            )
        if recomputed := self.config.train.gradient_checkpointing:
            (recompute_mlps if recomputed == "mlp" else recompute_activations)(policy)
        if isinstance(policy, Policy):
            policy.row_limit = self.row_limit
        self._finish(policy)
        return policy

    def build(self) -> None:
        """Load and prepare all models and make the optimizer, on all processes together; later calls do nothing."""
        if self.built:
            return
        divided = self.parallel.sharding.keeps_sharded
        with loaded_by_some(self._copied() or self.parallel.is_main) if divided else nullcontext():
            policy = self.load_policy()
            if not divided:  # otherwise each block is moved and made equal when it is divided
                policy = policy.to(self.parallel.device)
                self.parallel.make_equal(policy)  # as DDP will do, but before the reference is made
            with self.as_trained():
                reference = self._make_reference(policy)  # before the weights can move
            for frozen in self.frozen:
                frozen.load()
        if divided:
            self._before_dividing(reference)
        self._warn_of_low_precision(policy)
        scaled = self.parallel.accelerator.scaler is not None
        make = partial(
            optim.make_optimizer,
            self.config.optimizer,
            scaled=scaled,
            masters=self.parallel.sharding.masters,
            given=self._given_optimizer,
        )
        compared = [each.policy for each in ([] if reference is None else [reference]) + self.frozen]
        if self.config.train.compile:
            for each in dict.fromkeys([policy, *compared]):
                self._compile(each)
        wrapped, optimizer = self.parallel.sharding.prepare(policy, make, list(dict.fromkeys(compared)))
        self.use(wrapped, optimizer, reference)

    def _compile(self, policy: Any) -> None:
        model: Any = getattr(policy, "model", None)
        fault = f"a {type(policy).__name__} has no language model"
        if hasattr(model, "base_model"):
            with self.parallel.accelerator.autocast():
                fault = compile_blocks(model) or ""
        if fault:
            raise ConfigError(f"train.compile is true, and the model cannot be compiled: {fault}; remove it")

    def use(self, policy: nn.Module, optimizer: Any = None, reference: Any = None) -> None:
        """Use models that are made and prepared already, instead of those that `build` makes."""
        self.policy, self.optimizer, self.reference, self.built = policy, optimizer, reference, True

    def check_built(self, what: str) -> None:
        """Raise a `RuntimeError` if ``what`` is not made yet: `build` has not been called."""
        if not self.built:
            raise not_built(what)

    def as_trained(self) -> AbstractContextManager[None]:
        """Return a context in which models are loaded, and run as in training to find out what they are like.

        They are run in float32, which shows smaller differences, unless their attention may need less, and then in the
        precision of training.
        """
        live = self._live()
        config = getattr(bare(live), "config", None) if live is not None else None
        attention = getattr(config, "_attn_implementation", None) or self.config.model.kwargs.get("attn_implementation")
        accelerator = self.parallel.accelerator
        precisions = [nullcontext] if attention in (None, "eager", "sdpa", "flex_attention") else []
        if not precisions or accelerator.mixed_precision != "no":
            precisions.append(accelerator.autocast)
        divided = self.parallel.sharding.keeps_sharded and not self.built
        return as_trained(Trial(self.parallel.device, tuple(precisions), divided))

    def _warn_of_low_precision(self, policy: nn.Module) -> None:
        """Log that steps are made in the precision of the weights, if that is low and the optimizer has no copies."""
        without = self._of_user or type(self.parallel.sharding) is FSDP2
        low = low_precision(policy.parameters())
        if self.parallel.is_main and without and low:
            log.warning(
                "the weights are %s, and %s makes its steps on them, so changes of less than half of their precision "
                "are lost; set model.dtype to float32, and train.mixed_precision to bf16",
                str(low[0].dtype).removeprefix("torch."),
                "train.sharding 'fsdp2'" if self._given_optimizer is None else "the given optimizer",
            )

    # ------------------------------------------------------------------------------------- the optimizer and its state

    @cached_property
    def scheduler(self) -> LRScheduler:
        """The learning-rate schedule, over the run's steps. `build` must have been called."""
        ends = self._given_scheduler is None and self.config.scheduler.name not in optim.ENDLESS
        if ends and not self.total_steps:
            raise ConfigError(
                f"the schedule {self.config.scheduler.name!r} ends at the run's last step, which is not known; "
                "set train.total_steps"
            )
        return optim.make_scheduler(self.config.scheduler, self._inner, self.total_steps, self._given_scheduler)

    @property
    def learning_rate(self) -> float:
        """That of the next step; of the parameters that are in no group, if some are."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def rates_of_groups(self) -> dict[str, float]:
        """The learning rates of the next step of the groups in `optimizer.groups`, by their ``match``."""
        return {group["match"]: float(group["lr"]) for group in self.optimizer.param_groups if "match" in group}

    @property
    def _inner(self) -> Any:
        """The optimizer without the wrapper of accelerate, which is no torch optimizer."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def _of_user(self) -> bool:
        """Whether the optimizer is one that the user gave, or made."""
        return self._given_optimizer is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, schedule and gradient scaler; checkpoints have the weights apart."""
        optimizer, scaler = self.parallel.sharding.optimizer_state(self.optimizer), self.parallel.accelerator.scaler
        return {
            "optimizer": optimizer,
            "optimized": optim.described(optimizer, self.unwrapped, self._inner, of_user=self._of_user),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def check_state(self, state: Any) -> None:
        """Raise a `ValueError` if what `state_dict` returned does not fit the policy; names what is different."""
        optim.check_state(state["optimizer"], state["optimized"], self.unwrapped, self._inner, of_user=self._of_user)

    def load_state_dict(self, state: Any, step: int) -> None:
        """Restore what `state_dict` returned after ``step``; log a warning if the learning rate jumps."""
        optimizer_state = self.parallel.sharding.own_part(state["optimizer"], self.optimizer)
        before: list[float] = state["scheduler"]["_last_lr"]
        of_user = self._given_scheduler is not None
        optim.load_state(self.optimizer, self.scheduler, {**state, "optimizer": optimizer_state}, of_user=of_user)
        if (now := self.scheduler.get_last_lr()) != before and self.parallel.is_main:
            rates = [" and ".join(dict.fromkeys(f"{rate:.3g}" for rate in each)) for each in (now, before)]
            log.warning(
                "after step %d the learning rate jumps to %s, from %s in the run so far: it follows from optimizer.lr, "
                "scheduler and train.total_steps, which have changed. With scheduler.name 'constant' it does not "
                "depend on the last step",
                step,
                *rates,
            )
        if self.parallel.accelerator.scaler is not None and state["scaler"] is not None:
            self.parallel.accelerator.scaler.load_state_dict(state["scaler"])


def not_built(what: str) -> RuntimeError:
    """Return the error of reading ``what`` before it is made."""
    return RuntimeError(f"{what} is not made yet; call trainer.models.build(), on all processes, as learn() does")
