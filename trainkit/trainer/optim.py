"""Optimizer and schedule from the configuration; checked at the door."""

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
    """The optimizer over the model's trainable parameters.

    Fused where torch can do that, which reads the weights once and not a dozen times, unless ``kwargs`` choose.
    Not with ``scaled`` gradients (fp16): a fused step decides by itself whether to skip, and does not say so.

    Raises:
        ConfigError: ``kwargs`` holds what the optimizer does not take.
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
    """The schedule over ``total_steps`` optimizer steps; it is to be stepped after the optimizer (S-54).

    Raises:
        ConfigError: ``kwargs`` holds what the schedule does not take.
    """
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
    """Move the schedule on by one step, also past one that was left out, which torch takes for a mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()


def load(optimizer: Any, scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Take over the state of both; rates and other settings stay as the configuration has them.

    In a run that goes on unchanged they are the same. Where a change was allowed, the new ones hold.
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
    """Build both for one number, so that arguments that do not fit are said before a model is loaded."""
    make_scheduler(config.scheduler, make_optimizer(config.optimizer, nn.ParameterList([torch.zeros(1)])), 1)
