"""Optimizer and schedule from the configuration, checked before a model is loaded."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainkit.config import OptimizerConfig, SchedulerConfig, TRLConfig
from trainkit.config.arguments import OPTIMIZERS, TORCH_SCHEDULES
from trainkit.config.places import differences
from trainkit.errors import ConfigError, describe
from trainkit.trainer.master_weights import low_precision, with_masters

ENDLESS = ("constant", *TORCH_SCHEDULES)
"""Schedules that do not end with the run."""
MakeOptimizer = (
    Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    | Callable[[list[nn.Parameter], list[str]], torch.optim.Optimizer]
)
"""Makes an optimizer of parameters, or of parameters and their names."""
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
"""Makes a schedule of an optimizer."""


def make_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    *,
    scaled: bool = False,
    masters: bool = True,
    given: torch.optim.Optimizer | MakeOptimizer | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer over the model's trainable parameters; that of the user, ``given``, if there is one.

    The fused implementation is used where torch has one, because it reads the weights once instead of about a dozen
    times, unless ``kwargs`` choose another. It is not used with ``scaled`` gradients (fp16): a fused step decides by
    itself whether to skip, and does not report it. With ``masters``, weights of lower precision than float32 have
    `MasterWeights`.

    Raises:
        ConfigError: ``kwargs`` contains arguments that the optimizer does not take, or the user's optimizer has other
            parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if given is not None:
        return _checked(given if isinstance(given, torch.optim.Optimizer) else _made(given, model), model)
    cls, arguments = getattr(torch.optim, OPTIMIZERS[config.name]), dict[str, Any](config.kwargs)
    arguments |= {"lr": config.lr, "weight_decay": config.weight_decay}
    chosen = {"fused", "foreach", "differentiable"} & arguments.keys()
    if "fused" in inspect.signature(cls).parameters and not (chosen or scaled):
        arguments["fused"] = all(p.device.type in ("cpu", "cuda") for p in trained)
    try:
        optimizer: torch.optim.Optimizer = (with_masters(cls) if masters and low_precision(trained) else cls)(
            _groups(config, model), **arguments
        )
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"optimizer.kwargs {config.kwargs} do not fit {config.name!r}: {error}") from error
    return optimizer


def _groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of trained parameters: those of the configuration, after that of all others."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups, usual = list[dict[str, Any]](), {"lr": config.lr, "weight_decay": config.weight_decay}
    for index, group in enumerate(config.groups):
        names = [name for name in named if re.search(group.match, name)]
        if not names:
            every = [name for name, p in model.named_parameters() if p.requires_grad]
            taken = any(re.search(group.match, name) for name in every)
            raise ConfigError(
                f"optimizer.groups[{index}].match is {group.match!r}, and "
                + ("all parameters that match are in groups before it; " if taken else "no trained parameter matches; ")
                + f"there are {len(every)}, such as {every[0]} and {every[-1]}"
            )
        own = {"lr": group.lr, "weight_decay": group.weight_decay}
        settings = {key: usual[key] if value is None else value for key, value in own.items()}
        groups.append({"params": [named.pop(name) for name in names], **settings, "match": group.match})
    return [{"params": list(named.values())}, *groups] if named else groups


def _made(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that a function of the user makes of the trained parameters, and of their names if it asks.

    A class of torch asks for parameters alone: only arguments without a default count.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in inspect.signature(make).parameters.values() if p.kind in kinds and p.default is p.empty]
    parameters, names = [p for _, p in named], [name for name, _ in named]
    function: Any = make
    made: torch.optim.Optimizer = function(parameters, names) if len(needed) > 1 else function(parameters)
    return made


def _checked(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the user, checked to have the model's trained parameters and no others."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer should be one of torch, or make one of parameters; given {describe(optimizer)}")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    hint = "give a function that makes it of parameters: optimizer=lambda parameters: torch.optim.Adam(parameters)"
    if missing := [name for key, name in trained.items() if key not in held]:
        raise ConfigError(f"the optimizer does not have {missing[0]}, which is trained; {hint}")
    if held - trained.keys():
        raise ConfigError(f"the optimizer has {len(held - trained.keys())} parameters that are not trained; {hint}")
    return optimizer


def make_scheduler(
    config: SchedulerConfig,
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    given: LRScheduler | MakeScheduler | None = None,
) -> LRScheduler:
    """Return the schedule over ``total_steps`` optimizer steps, or that of the user, ``given``.

    Step it after the optimizer.

    Raises:
        ConfigError: ``kwargs`` contains arguments that the schedule does not take, or the user's schedule is of another
            optimizer or needs more than steps.
    """
    if given is not None:
        scheduler = given if isinstance(given, LRScheduler) else given(optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(f"scheduler should be one of torch that needs steps alone; given {describe(scheduler)}")
        if scheduler.optimizer is not optimizer:
            raise ConfigError("the scheduler is of another optimizer; give both, or a function that makes it")
        return scheduler
    if config.name in TORCH_SCHEDULES:
        return _of_torch(config, optimizer)
    if config.name == "constant" and config.kwargs:
        raise ConfigError(
            f"scheduler.kwargs is {dict(config.kwargs)}, and the schedule 'constant' takes no arguments; remove them, "
            "or give another scheduler.name"
        )
    warmed = "constant_with_warmup" if config.name == "constant" and config.warmup_steps else config.name
    try:
        from transformers import get_scheduler  # it imports all of transformers and peft

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


def _of_torch(config: SchedulerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return a schedule of torch, after the warm-up, as factors of the first rate that follow from the step alone.

    The factors are those of the schedule for an optimizer that does nothing, so there is no further state to save.
    """
    try:
        return LambdaLR(optimizer, [_rates(config, group["lr"]) for group in optimizer.param_groups])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.kwargs {config.kwargs} do not fit {config.name!r}: {error}") from error


def _rates(config: SchedulerConfig, lr: float) -> Callable[[int], float]:
    """Return the factors of a warm-up and then of a schedule of torch, as a function of the step."""
    optimizer, warmup = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr), config.warmup_steps
    schedule = getattr(lr_scheduler, config.name)(optimizer, **config.kwargs)
    rates: list[float] = [optimizer.param_groups[0]["lr"] / lr]

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        while len(rates) <= step - warmup:
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"] / lr)
        return rates[step - warmup]

    return factor


def advance(scheduler: LRScheduler) -> None:
    """Advance the schedule by one step, without the warnings of torch's for skipped optimizer steps and for fp16.

    With fp16 accelerate replaces the optimizer's method `step`, which torch reports as a mistake.
    """
    with warnings.catch_warnings():
        for message in ("Detected call of `lr_scheduler.step", "Seems like `optimizer.step"):
            warnings.filterwarnings("ignore", message=message)
        scheduler.step()


def load_state(optimizer: Any, scheduler: LRScheduler, state: Mapping[str, Any], *, of_user: bool = False) -> None:
    """Restore the state of both. Learning rates and other settings stay as the configuration has them.

    With an unchanged configuration they equal those of the checkpoint. If a change was allowed, the new values apply.
    With a schedule ``of_user`` they are those of the checkpoint.
    """
    if of_user:  # its rates are its own
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        return
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    schedule = cast(LambdaLR, scheduler)
    rates = schedule.base_lrs
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["scheduler"])
    schedule.base_lrs = rates
    for group, setting, rate, shape in zip(optimizer.param_groups, settings, rates, schedule.lr_lambdas, strict=True):
        group.update(setting, lr=rate * shape(schedule.last_epoch))
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def described(
    state: Mapping[str, Any], model: nn.Module, optimizer: Any, *, of_user: bool = False
) -> dict[str, list[str]]:
    """Return the names of the trained parameters in the optimizer's order, and of those that it has a state of.

    An optimizer ``of_user`` is told by its class.
    """
    names = [name for name, _ in _trained(model, optimizer)]
    kind = {"class": [type(optimizer).__qualname__]} if of_user else {}
    return {
        "parameters": names,
        "with_state": [name for index, name in enumerate(names) if index in state["state"]],
        **kind,
    }


def _trained(model: nn.Module, optimizer: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters in the order of the optimizer; those of the model's if it has parts of them."""
    trained = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return [trained[key] for key in held] if trained.keys() == set(held) else list(trained.values())


def check_state(
    state: Mapping[str, Any], told: Mapping[str, list[str]], model: nn.Module, optimizer: Any, *, of_user: bool = False
) -> None:
    """Check that the optimizer's state in a checkpoint is whole, and that of the parameters of ``model``, in order.

    Args:
        state: the state; its tensors may be still to be read.
        told: what `described` returned when the checkpoint was written.
        model: the model.
        optimizer: the optimizer.
        of_user: whether it is one of the user.

    Raises:
        ValueError: a parameter, or its state, is missing, is another one, or has another shape; names it.
    """
    trained, here = _trained(model, optimizer), described(state, model, optimizer, of_user=of_user)
    if told.get("class") != here.get("class"):
        before, now = (" ".join(each.get("class", ["that of the configuration"])) for each in (told, here))
        raise ValueError(f"the optimizer was {before}, and is {now}")
    for key, what in (("parameters", "trained parameters"), ("with_state", "optimizer's states of parameters")):
        if told[key] != here[key]:
            different = sorted({*told[key]} ^ {*here[key]})
            raise ValueError(f"the {what} differ {f'in {different[0]}' if different else 'in their order'}")
    if unknown := [index for index in state["state"] if index not in range(len(trained))]:
        raise ValueError(f"the optimizer's states of parameters differ in {unknown[0]!r}, which is no parameter")
    for index, values in state["state"].items():
        name, parameter = trained[index]
        for key, value in values.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and not _fits(shape, tuple(parameter.shape)):
                raise ValueError(
                    f"the optimizer's {key} of {name} is {shape}, and the parameter {tuple(parameter.shape)}"
                )


def _fits(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Return whether a state has the shape of its parameter, or 1 in some dimensions, as Adafactor's."""
    return len(shape) == len(of) and all(size in (1, whole) for size, whole in zip(shape, of, strict=True))


def check_given(config: TRLConfig[Any], optimizer: Any, scheduler: Any, *, replicated: bool) -> None:
    """Check that an optimizer or a schedule of the user does not contradict the configuration.

    Raises:
        ConfigError: it is of another type, settings of the configuration would have no effect, or the model is not
            ``replicated``.
    """
    defaults = type(config.method).section_defaults
    for name, value in (("optimizer", optimizer), ("scheduler", scheduler)):
        if value is None:
            continue
        if not (callable(value) or isinstance(value, torch.optim.Optimizer | LRScheduler)):
            raise ConfigError(f"{name} should be one of torch, or a function that makes it; given {describe(value)}")
        section = getattr(config, name)
        usual = type(section)(**defaults.get(name, {}))
        if changed := [f"{name}.{key}" for key, *_ in differences(usual.model_dump(), section.model_dump())]:
            raise ConfigError(
                f"{name} is given as an object, and {', '.join(changed)} would have no effect; remove one of the two"
            )
    if optimizer is not None and not replicated:
        raise ConfigError(
            "an optimizer is given as an object, and train.sharding divides its parameters; name it in optimizer.name, "
            "or set train.sharding to none"
        )


def check_settings(config: TRLConfig[Any]) -> None:
    """Build both for one number, so that arguments that do not fit are reported before a model is loaded."""
    ungrouped = config.optimizer.model_copy(update={"groups": []})  # of parameters that have no names yet
    make_scheduler(config.scheduler, make_optimizer(ungrouped, nn.ParameterList([torch.zeros(1)])), 1)
