"""The functions and masks that users give, as trainkit takes them, and what calls those of `learn`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch

from trainkit.errors import ConfigError, describe, suggest


def taking(
    function: Callable[..., Any] | None, what: str, separator: Callable[[], str] = str
) -> Callable[..., Any] | None:
    """Return a function that is called with those of its arguments alone that ``function`` takes.

    Functions for trlX need not take the tokenizer or further columns: it did not pass them everywhere.

    Args:
        function: takes its arguments by their names.
        what: the argument that the function is, for messages.
        separator: returns what stands between prompt and output in a sample.

    Raises:
        ConfigError: it is no function.
    """
    if function is None:
        return None
    if not callable(function):
        raise ConfigError(f"{what} should be a function of samples, prompts and outputs; given {describe(function)}")
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    whole = any(each.kind is each.VAR_KEYWORD for each in parameters)
    needed = [each.name for each in parameters if each.default is each.empty and each.name in named]

    @wraps(function)
    def called(**given: Any) -> Any:
        if between := separator():
            pairs = zip(given["prompts"], given["outputs"], strict=True)
            given["samples"] = [f"{prompt}{between}{output}" for prompt, output in pairs]
        if missing := [name for name in needed if name not in given]:
            raise TypeError(
                f"{what} takes {', '.join(missing)}, and there is none: it is called with {', '.join(given)}, by name "
                "(and with the columns of prompts that are dicts); rename its arguments"
            )
        return _single(function(**(given if whole else {name: given[name] for name in named if name in given})))

    return called


def _single(scores: Any) -> Any:
    """Return scores that are lists of one number each as numbers of whole samples, as trlX takes them."""
    if not isinstance(scores, list | tuple | np.ndarray | torch.Tensor):
        return scores
    rows = [each.detach().float().cpu() if isinstance(each, torch.Tensor) else each for each in scores]
    numbers = [np.asarray(each) for each in rows]
    single = bool(numbers) and all(each.shape == (1,) and each.dtype.kind in "iufb" for each in numbers)
    return [each.item() for each in numbers] if single else scores


def prefixed(metric_fn: Callable[..., Any] | None, separator: Callable[[], str] = str) -> Callable[..., Any] | None:
    """Return a metric function whose metrics have ``metrics/`` before their names, as trlX logs them."""
    called = taking(metric_fn, "metric_fn", separator)
    if metric_fn is None or called is None:
        return None

    @wraps(metric_fn)
    def measured(**given: Any) -> Any:
        found = called(**given)
        if not isinstance(found, Mapping):
            return found  # refused by trainkit
        return {f"metrics/{name}": values for name, values in found.items()}

    return measured


def forbidding(logit_mask: Any) -> Any:
    """Return a mask of trlX, in which True forbids, as one of trainkit, in which True allows; None for None.

    Raises:
        ConfigError: it is no table of booleans, or forbids all tokens somewhere, so that it probably has the opposite
            sense.
    """
    if logit_mask is None:
        return None
    allowed = "a bool tensor of shape [V, V], a row for each previous token, or [V]; True = forbidden"
    try:
        given = torch.as_tensor(logit_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"logit_mask should be {allowed}; given {describe(logit_mask)}: {error}") from error
    if given.dim() not in (1, 2) or given.shape[0] != given.shape[-1]:
        raise ConfigError(f"logit_mask should be {allowed}; given {given.dtype} {tuple(given.shape)}")
    forbidden = given.bool()
    if not torch.equal(forbidden.to(given.dtype), given):
        raise ConfigError(
            f"logit_mask should be {allowed}; given {given.dtype} with other values than 0 and 1; write what is "
            "forbidden, such as scores < 0"
        )
    if forbidden.all(-1).any():
        raise ConfigError(
            "logit_mask is True at every token after some token, and True = forbidden, as in trlX; if it should mean "
            "allowed, give ~logit_mask, else leave at least EOS False there"
        )
    return ~forbidden


def known_arguments(trainer: Any, given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return further arguments of a trainer class.

    Raises:
        ConfigError: it does not take one of them; ``where`` says where it stands.
    """
    classes = (*trainer.__mro__, *getattr(trainer, "trainer_class", object).__mro__)
    taken = [each for cls in classes for each in inspect.signature(cls.__init__).parameters.values()]
    known = dict.fromkeys(each.name for each in taken if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL))
    allowed = [name for name in known if name not in ("self", "config", "outer")]
    for name in given:
        if name not in allowed:
            said = suggest(name, allowed)
            raise ConfigError(f"{where} has {name!r}{said}; the trainer takes {', '.join(allowed)}")
    return given


def taking_one(function: Any, what: str, argument: str) -> Any:
    """Return a function that `learn` calls, if it takes one argument.

    Raises:
        ConfigError: it is no function, or takes other arguments.
    """
    if function is None:
        return None
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is called with one argument, {argument}; given {describe(function)}: {error}"
        ) from error
    return function
