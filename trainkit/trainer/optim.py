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
    except (TypeError, ValueError, LookupError) as error:
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


def described(state: Mapping[str, Any], model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the trained parameters in the optimizer's order, and of those that it has a state of."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"parameters": names, "with_state": [name for index, name in enumerate(names) if index in state["state"]]}


def check_state(state: Mapping[str, Any], told: Mapping[str, list[str]], model: nn.Module) -> None:
    """Check that the optimizer's state in a checkpoint is whole, and that of the parameters of ``model``, in order.

    Args:
        state: the state; its tensors may be still to be read.
        told: what `described` returned when the checkpoint was written.
        model: the model.

    Raises:
        ValueError: a parameter, or its state, is missing, is another one, or has another shape; names it.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = described(state, model)
    for key, what in (("parameters", "trained parameters"), ("with_state", "optimizer's states of parameters")):
        if told[key] != found[key]:
            odd = sorted({*told[key]} ^ {*found[key]})
            raise ValueError(f"the {what} differ {f'in {odd[0]}' if odd else 'in their order'}")
    if unknown := [index for index in state["state"] if index not in range(len(trained))]:
        raise ValueError(f"the optimizer's states of parameters differ in {unknown[0]!r}, which is no parameter")
    for index, values in state["state"].items():
        name, parameter = trained[index]
        for key, value in values.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and shape != tuple(parameter.shape):
                raise ValueError(
                    f"the optimizer's {key} of {name} is {shape}, and the parameter {tuple(parameter.shape)}"
                )


def check(config: TRLConfig[Any]) -> None:
    """Build both for one number, so that arguments that do not fit are reported before a model is loaded."""
    make_scheduler(config.scheduler, make_optimizer(config.optimizer, nn.ParameterList([torch.zeros(1)])), 1)
