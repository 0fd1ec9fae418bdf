"""The arguments of optimizers, schedules and adapters, and what they take, read from the sources of the libraries.

Nothing of these libraries is imported, which takes seconds. What was read is kept by the library's version.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from trainkit.config.names import dotted
from trainkit.errors import suggest
from trainkit.plugins.cache import read_cache, write_cache

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


def check_optimizer(name: str, given: Mapping[str, Any]) -> None:
    """Check further arguments of an optimizer.

    Raises:
        ValidationError: it does not take one of them, or not this value.
    """
    _check(given, name, _read("torch", _optimizers), f"argument of torch.optim.{OPTIMIZERS[name]}")


def check_schedule(name: str, given: Mapping[str, Any]) -> None:
    """Check further arguments of a schedule.

    Raises:
        ValidationError: it does not take one of them, or not this value.
    """
    known = {**_read("transformers", _schedules), **_read("torch", _torch_schedules), "constant": {}}
    _check(given, name, known, f"argument of the schedule {name!r}")


def check_adapter(given: Mapping[str, Any]) -> None:
    """Check the type of an adapter, and its fields.

    Raises:
        ValidationError: peft has no such type, or the type no such field, or the field does not take this value.
    """
    types, kind = _read("peft", _adapters), str(given.get("peft_type", "LORA"))
    if not types:
        return
    if kind.upper() not in types:
        reason = f"unknown type of adapter{suggest(kind.upper(), types)}; known: {', '.join(sorted(types))}"
        raise _refused([("peft_type", kind, reason)])
    _check(given, kind.upper(), {kind.upper(): types[kind.upper()]}, f"field of peft's {kind.upper()}")


def _check(given: Mapping[str, Any], taker: str, arguments: Arguments, what: str) -> None:
    """Check the arguments that are given to one of those that take some."""
    if (known := arguments.get(taker)) is None:  # its source cannot be read; making it will tell
        return
    listed = f"known: {', '.join(known)}" if known else "there are none; remove it"
    faults = [
        (
            name,
            value,
            f"should be {known[name]}" if name in known else f"no {what}{_meant(name, known, arguments)}; {listed}",
        )
        for name, value in given.items()
        if name not in known or not _takes(known[name], value)
    ]
    if faults:
        raise _refused(faults)


def _meant(name: str, known: Iterable[str], arguments: Arguments) -> str:
    """Return what an unknown argument may have meant: another framework's name, a similar one, or that of another."""
    own = [*[path.rpartition(".")[2] for path in dotted(name)], name]
    if found := [each for each in own if each in known]:
        return f"; did you mean {found[0]!r}?"
    others = [f"{taker!r} takes {each}" for each in own for taker, taken in arguments.items() if each in taken]
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
def _read(package: str, reader: Callable[[Path], Arguments]) -> Arguments:
    """Return what ``reader`` finds in the folder of the package; nothing if there is no source that can be read."""
    try:
        spec, key = find_spec(package), f"{package} {version(package)}"
    except (ValueError, PackageNotFoundError):
        return {}
    if spec is None or not spec.origin:
        return {}
    mine = Path(__file__).stat().st_mtime_ns  # also read anew by another version of this module
    key = f"{key} {reader.__name__} {spec.origin} {mine}"
    known = read_cache("arguments")
    if key not in known:
        try:
            known[key] = reader(Path(spec.origin).parent)
        except (OSError, SyntaxError, ValueError, StopIteration):
            return {}
        write_cache("arguments", known)
    return dict(known[key])


def _optimizers(folder: Path) -> Arguments:
    files = {name: folder / "optim" / f"{name}.py" for name in OPTIMIZERS}
    hidden = {name: file.with_name(f"_{file.name}") for name, file in files.items() if not file.exists()}
    return {name: _constructors({**files, **hidden}[name])[made] for name, made in OPTIMIZERS.items()}


def _torch_schedules(folder: Path) -> Arguments:
    found = _constructors(folder / "optim" / "lr_scheduler.py")
    return {name: found[name] for name in TORCH_SCHEDULES}


def _constructors(file: Path) -> Arguments:
    """Return the arguments of the classes of a module."""
    return {
        node.name: _parameters(each)
        for node in _parsed(file)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    }


def _schedules(folder: Path) -> Arguments:
    functions = {node.name: node for node in _parsed(folder / "optimization.py") if isinstance(node, ast.FunctionDef)}
    return {name: _parameters(functions[made]) for name, made in SCHEDULES.items() if made in functions}


def _parameters(function: ast.FunctionDef) -> dict[str, str]:
    taken = function.args
    plain = [*taken.posonlyargs, *taken.args]
    defaults = [None] * (len(plain) - len(taken.defaults)) + taken.defaults + taken.kw_defaults
    arguments = zip([*plain, *taken.kwonlyargs], defaults, strict=True)
    return {each.arg: _kind(each.annotation, default) for each, default in arguments if each.arg not in OWN}


def _kind(annotation: ast.expr | None, default: ast.expr | None) -> str:
    """Return what an argument takes according to its type or default, in words; empty for other types."""
    value = default.value if isinstance(default, ast.Constant) else None
    text = type(value).__name__ if annotation is None else ast.unparse(annotation)
    inner = re.fullmatch(r"Optional\[(.*)\]", text)
    null = NULL if inner or text.endswith("| None") else ""
    text = (inner[1] if inner else text).removesuffix("| None").strip()
    names = set(re.findall(r"\w+", text))
    if text.startswith("Literal["):
        return f"one of {text[8:-1]}{null}"
    if "float" in names and text.lower().startswith("tuple[") and isinstance(default, ast.Tuple):
        return f"a list of {len(default.elts)} numbers{null}"
    if names and names <= {"int", "float", "Tensor", "Union"}:
        return f"a number{null}"
    return f"true or false{null}" if names == {"bool"} else ""


def _adapters(folder: Path) -> Arguments:
    """Return the fields of each type's dataclass, those of its base classes included."""
    homes: dict[str, Path] = {}
    for file in (folder / "config.py", *sorted(folder.glob("tuners/*.py")), *sorted(folder.glob("tuners/*/config.py"))):
        for name in re.findall(r"^class (\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            homes.setdefault(name, file)

    def fields(name: str) -> Iterator[tuple[str, str]]:
        for node in _parsed(homes[name]) if name in homes else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                for base in node.bases:
                    yield from fields(base.id if isinstance(base, ast.Name) else "")
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        yield each.target.id, _kind(each.annotation, None)

    return {
        kind: dict(fields(made))
        for file in sorted(folder.glob("tuners/*/__init__.py"))
        for kind, made in _registered(file)
    }


def _registered(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the type and the dataclass of each method that a module registers."""
    for node in (each for statement in _parsed(file) for each in ast.walk(statement)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "register_peft_method":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name, made = given.get("name"), given.get("config_cls")
            if isinstance(name, ast.Constant) and isinstance(made, ast.Name):
                yield str(name.value).upper(), made.id


@cache
def _parsed(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body
