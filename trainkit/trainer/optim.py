"""Optimizer and schedule from the configuration, checked before a model is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from trainkit.config import OptimizerConfig, SchedulerConfig, TRLConfig
from trainkit.errors import ConfigError

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def make_optimizer(config: OptimizerConfig, model: nn.Module, *, scaled: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer over the model's trainable parameters.

    The fused implementation is used where torch has one, because it reads the weights once instead of about a dozen
    times, unless ``kwargs`` choose another. It is not used with ``scaled`` gradients (fp16): a fused step decides by
    itself whether to skip, and does not report it.

    Raises:
        ConfigError: ``kwargs`` contains arguments that the optimizer does not take.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    arguments: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **config.kwargs}
    if not {"fused", "foreach", "differentiable"} & arguments.keys() and not scaled:
        arguments["fused"] = all(p.device.type in ("cpu", "cuda") for p in trained)
    try:
        return OPTIMIZERS[config.name](trained, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.kwargs {config.kwargs} do not fit {config.name!r}: {error}") from error


def make_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    """Return the schedule over ``total_steps`` optimizer steps. Step it after the optimizer (S-54).

    Raises:
        ConfigError: ``kwargs`` contains arguments that the schedule does not take.
    """
    if config.name == "constant" and config.kwargs:
        raise ConfigError(
            f"scheduler.kwargs is {dict(config.kwargs)}, and the schedule 'constant' takes no arguments; remove them, "
            "or give another scheduler.name"
        )
    warmed = "constant_with_warmup" if config.name == "constant" and config.warmup_steps else config.name
    try:
        schedule = get_scheduler(
            warmed,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=max(total_steps, 1),
            scheduler_specific_kwargs=dict(config.kwargs),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.kwargs {config.kwargs} do not fit {config.name!r}: {error}") from error
    return cast(LRScheduler, schedule)


def advance(scheduler: LRScheduler) -> None:
    """Advance the schedule by one step, also after a skipped optimizer step, for which torch would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()


def load(optimizer: Any, scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Restore the state of both. Learning rates and other settings stay as the configuration has them.

    With an unchanged configuration they equal those of the checkpoint. If a change was allowed, the new values apply.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    schedule = cast(LambdaLR, scheduler)
    rates = schedule.base_lrs
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["scheduler"])
    schedule.base_lrs = rates
    for group, setting, rate, shape in zip(optimizer.param_groups, settings, rates, schedule.lr_lambdas, strict=True):
        group.update(setting, lr=rate * shape(schedule.last_epoch))
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def check(config: TRLConfig[Any]) -> None:
    """Build both for one number, so that arguments that do not fit are reported before a model is loaded."""
    make_scheduler(config.scheduler, make_optimizer(config.optimizer, nn.ParameterList([torch.zeros(1)])), 1)
