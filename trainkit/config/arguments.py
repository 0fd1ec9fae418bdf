"""The arguments of optimizers, schedules and adapters, and what they take.

The libraries, whose import takes seconds, are imported when such arguments are given.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from trainkit.config.names import dotted
from trainkit.errors import suggest

Arguments = dict[str, dict[str, str]]
"""What values arguments take, in words, by their names, by what takes them; empty words: it cannot be told."""

OPTIMIZERS = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adamax": "Adamax",
    "asgd": "ASGD",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
}
"""The classes in `torch.optim`."""
SCHEDULES = {
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "cosine_with_restarts": "get_cosine_with_hard_restarts_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "warmup_stable_decay": "get_wsd_schedule",
}
"""The functions in `transformers.optimization`; ``constant`` takes no arguments."""
TORCH_SCHEDULES = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LinearLR", "MultiStepLR",
    "PolynomialLR", "StepLR",
)  # fmt: skip
"""The classes in `torch.optim.lr_scheduler` whose rates follow from the first rate and the step alone."""
OWN = {"self", "params", "lr", "weight_decay", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
"""Arguments that other settings have, or that the trainer gives."""
NULL = ", or null"
"""The end of what is said of an argument that may be None."""


IDLE = (
    "resume_download", "low_cpu_mem_usage", "_fast_init", "mirror", "offload_state_dict", "torchscript",
    "use_legacy_cache",
)  # fmt: skip
"""Arguments of `from_pretrained` of transformers 4 that changed no result; transformers 5 does without them."""
GONE = {
    **dict.fromkeys(
        ("from_tf", "from_flax"),
        "transformers 5 reads no weights of TensorFlow and Flax; convert them with transformers 4 by "
        "from_pretrained(path, {}=True).save_pretrained(directory), and give the directory",
    ),
    "is_trainable": "load the adapter by peft.PeftModel.from_pretrained(model, path, is_trainable=True), and give that "
    "model as an object",
    "output_loading_info": "the model alone is loaded; leave {} out",
}
"""Arguments of `from_pretrained` that there are no more, and what to do instead."""
BITS = ("load_in_8bit", "load_in_4bit")


def present_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `from_pretrained` of transformers 4 by the names and in the form that transformers 5 has.

    Raises:
        ValueError: one has no counterpart, or is given twice.
    """
    for name in GONE.keys() & {name for name, value in given.items() if value}:
        raise ValueError(f"{name} is given; {GONE[name].format(name)}")
    found = {name: value for name, value in given.items() if name not in (*IDLE, *GONE)}
    if found.pop("use_flash_attention_2", False):
        _set_once(found, "attn_implementation", "flash_attention_2", "use_flash_attention_2")
    bits = {name: found.pop(name) for name in [*found] if name.startswith(("load_in_", "bnb_4bit_", "llm_int8_"))}
    asked = next((name for name in BITS if bits.get(name)), None)
    if asked is not None:
        _set_once(found, "quantization_config", bits, asked)
    elif lone := [name for name in bits if name not in BITS]:
        raise ValueError(f"{lone[0]} is given without load_in_8bit or load_in_4bit; leave it out, or give one of them")
    return found


def unknown_advice(error: Exception) -> str:
    """Return what to do about an argument that a model does not take, if the error is of one."""
    return "Leave it out, or give a field of the model's configuration" if "unexpected keyword" in str(error) else ""


def _set_once(found: dict[str, Any], name: str, value: Any, old: str) -> None:
    """Set an argument that another one stands for, unless it is given too with another value."""
    if found.setdefault(name, value) not in (None, value):
        raise ValueError(f"{old} and {name} are given, which are one setting; give {name} alone")
    found[name] = value


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> None:
    """Check further arguments of an optimizer.

    Raises:
        ValidationError: it does not take one of them, or not this value.
    """
    if arguments:
        _check(arguments, name, _optimizers(), f"argument of torch.optim.{OPTIMIZERS[name]}")


def check_schedule(name: str, arguments: Mapping[str, Any]) -> None:
    """Check further arguments of a schedule.

    Raises:
        ValidationError: it does not take one of them, or not this value.
    """
    if arguments:
        _check(arguments, name, _schedules(), f"argument of the schedule {name!r}")


def check_adapter(fields: Mapping[str, Any]) -> None:
    """Check the type of an adapter, and its fields.

    Raises:
        ValidationError: peft has no such type, or the type no such field, or the field does not take this value.
    """
    types, kind = _adapters(), str(fields.get("peft_type", "LORA"))
    if kind.upper() not in types:
        reason = f"unknown type of adapter{suggest(kind.upper(), types)}; known: {', '.join(sorted(types))}"
        raise _refused([("peft_type", kind, reason)])
    _check(fields, kind.upper(), {kind.upper(): types[kind.upper()]}, f"field of peft's {kind.upper()}")


def _check(values: Mapping[str, Any], taker: str, arguments: Arguments, what: str) -> None:
    """Check the arguments that are given to one of those that take some."""
    parameters = arguments[taker]
    listed = f"known: {', '.join(parameters)}" if parameters else "there are none; remove it"
    faults = [
        (
            name,
            value,
            f"should be {parameters[name]}"
            if name in parameters
            else f"no {what}{_meant(name, parameters, arguments)}; {listed}",
        )
        for name, value in values.items()
        if name not in parameters or not _takes(parameters[name], value)
    ]
    if faults:
        raise _refused(faults)


def _meant(name: str, known: Iterable[str], arguments: Arguments) -> str:
    """Return what an unknown argument may have meant: another framework's name, a similar one, or that of another."""
    candidates = [*[path.rpartition(".")[2] for path in dotted(name)], name]
    if matching := [each for each in candidates if each in known]:
        return f"; did you mean {matching[0]!r}?"
    others = [f"{taker!r} takes {each}" for each in candidates for taker, taken in arguments.items() if each in taken]
    return suggest(name, known) or (f"; {others[0]}" if others else "")


def _takes(kind: str, value: Any) -> bool:
    """Return whether an argument that takes ``kind`` takes the value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not kind:
        return not kind or kind.endswith(NULL)
    if kind.startswith("a number"):
        return is_number
    if kind.startswith("true"):
        return isinstance(value, bool)
    if kind.startswith("a list of"):
        count, numbers = int(kind.split()[3]), value if isinstance(value, list | tuple) else ()
        return len(numbers) == count and all(_takes("a number", number) for number in numbers)
    return repr(value) in kind.removeprefix("one of ").removesuffix(NULL).split(", ")


def _refused(faults: list[tuple[str, Any, str]]) -> ValidationError:
    details = [
        InitErrorDetails(type=PydanticCustomError("argument", "{reason}", {"reason": reason}), loc=(name,), input=value)
        for name, value, reason in faults
    ]
    return ValidationError.from_exception_data("arguments", details)


@cache
def _optimizers() -> Arguments:
    import torch

    return {name: _parameters(getattr(torch.optim, cls)) for name, cls in OPTIMIZERS.items()}


@cache
def _schedules() -> Arguments:
    from torch.optim import lr_scheduler
    from transformers import optimization

    makers = {name: getattr(optimization, function) for name, function in SCHEDULES.items()}
    makers |= {name: getattr(lr_scheduler, name) for name in TORCH_SCHEDULES}
    return {"constant": {}, **{name: _parameters(maker) for name, maker in makers.items()}}


@cache
def _adapters() -> Arguments:
    """Return the fields of each type's dataclass."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return {
        kind.value: {field.name: _kind(field.type, None) for field in dataclasses.fields(cls)}
        for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }


def _parameters(maker: Any) -> dict[str, str]:
    parameters = inspect.signature(maker).parameters.items()
    return {name: _kind(each.annotation, each.default) for name, each in parameters if name not in OWN}


def _kind(annotation: Any, default: Any) -> str:
    """Return what an argument takes according to its type or default, in words; empty for other types."""
    if annotation is inspect.Parameter.empty:
        annotation = type(default)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    inner = re.fullmatch(r"Optional\[(.*)\]", text)
    null = NULL if inner or text.endswith("| None") else ""
    text = (inner[1] if inner else text).removesuffix("| None").strip()
    names = set(re.findall(r"\w+", text))
    if text.startswith("Literal["):
        return f"one of {text[8:-1]}{null}"
    if "float" in names and text.lower().startswith("tuple[") and isinstance(default, tuple):
        return f"a list of {len(default)} numbers{null}"
    if names and names <= {"int", "float", "torch", "Tensor", "Union"}:
        return f"a number{null}"
    return f"true or false{null}" if names == {"bool"} else ""
