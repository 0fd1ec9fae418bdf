"""The tables of names of other frameworks: what they promise of the adapters and of trainkit is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from tables import table
from trainkit.cli import app
from trainkit.config.names import setting_paths
from trainkit_migrate import FRAMEWORKS, framework
from trainkit_migrate.tables import Name

SIGNATURES = tomllib.loads((Path(__file__).parent / "signatures.toml").read_text(encoding="utf-8"))


def names(kind: str) -> Iterator[Any]:
    """The names of all frameworks of which this becomes."""
    for each in FRAMEWORKS:
        for path, name in framework(each).names.items():
            if name.kind == kind:
                yield path, name


@cache
def resolve(path: str) -> Any:
    """What a dotted path names, importing what has to be imported."""
    found: Any = importlib.import_module(path.split(".")[0])
    for at, part in enumerate(path.split(".")[1:], start=1):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            importlib.import_module(".".join(path.split(".")[: at + 1]))
        found = getattr(found, part)
    return found


def test_mapped_names_are_at_the_same_path_in_the_adapter() -> None:
    missing = []
    for path, name in names("mapped"):
        try:
            resolve(name.text)
        except (ImportError, AttributeError):
            missing.append(path)
    assert missing == []


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


@table("path, name", [*names("equivalent")])
def test_equivalents_exist(path: str, name: Name) -> None:
    assert path
    words = name.text.split()
    if len(words) > 1:
        commands: Any = command_line()
        assert words[0] == "trainkit"
        assert words[1] in commands.everything()
    elif name.text.startswith("trainkit"):
        assert resolve(name.text) is not None
    else:
        assert name.text in {path for paths in setting_paths().values() for path in paths}


def test_what_is_refused_says_what_to_do() -> None:
    for _, name in (*names("refused"), *names("without effect")):
        assert len(name.text.split()) >= 4, name.text
        assert name.text[0].islower() or name.text.split()[0].isidentifier(), name.text


def test_no_name_is_listed_twice() -> None:
    for each in ("trlx", "trl", "async_rlhf"):
        text = (
            Path(inspect.getfile(importlib.import_module("trainkit_migrate"))).parent / f"{each}_names.toml"
        ).read_text()
        data = tomllib.loads(text)
        mapped = [f"{path}.{name}" for path, found in data.pop("mapped", {}).items() for name in found]
        others = [path for entries in data.values() for path in entries]
        assert len({*mapped, *others}) == len(mapped) + len(others)


@table(
    "module, name, said",
    [
        ("trainkit_trl.core", "randn_tensor", "write torch.randn"),
        ("trainkit_trl.trainer.utils", "DPODataCollatorWithPadding", "remove data_collator"),
        ("trainkit_trlx.models.modeling_ppo", "GPTModelBranch", "its place has trainkit.models.Reference"),
        ("trainkit_trlx.utils.modeling", "get_delta_model_class", "write model.peft_config"),
        ("trainkit_trl", "GRPOTrainer", "it is of TRL 1.0 to .*: its place has trainkit_grpo.GRPOTrainer"),
        ("trainkit_trl.core", "PPOConfig", "it is at trainkit_trl.PPOConfig"),
        ("trainkit_trl", "PPOTraner", "did you mean 'PPOTrainer'\\? The tables of names on the page Coming from TRL"),
        ("trainkit_trl.trainer.kto_trainer", "_tokenize", "the tables of names on the page Coming from TRL"),
    ],
)
def test_importing_a_name_that_an_adapter_lacks_says_what_to_do(module: str, name: str, said: str) -> None:
    with pytest.raises(ImportError, match=f"{module} has no '{name}': .*{said}"):
        exec(f"from {module} import {name}", {})
    found = importlib.import_module(module)
    with pytest.raises(AttributeError, match=f"{module} has no '{name}': .*{said}"):
        getattr(found, name)
    assert getattr(found, name, None) is None


@table("path, name", [each for each in framework("trl").names.items() if each[1].kind != "mapped"])
def test_every_name_that_the_adapter_of_trl_lacks_says_what_to_use(path: str, name: Name) -> None:
    """Of modules, of names in them, and of attributes of classes, also when they are read of the class."""
    place, _, last = path.replace("trl", "trainkit_trl", 1).rpartition(".")
    with pytest.raises((ImportError, AttributeError), match=re.escape(name.text)):
        getattr(resolve(place), last)


MODULES = sorted({path.rpartition(".")[0] for path, _ in names("mapped") if path.startswith("trl.")})


def test_every_module_of_trl_says_what_to_use_instead_of_what_it_lacks() -> None:
    bare = []
    for path in MODULES:
        try:
            module = importlib.import_module(path.replace("trl", "trainkit_trl", 1))
        except ModuleNotFoundError:  # a class
            continue
        try:
            module.nothing_of_that_name  # noqa: B018
        except AttributeError as error:
            bare += [path] if "Coming from TRL" not in str(error) else []
    assert bare == []


@pytest.mark.parametrize("module", ["trainer.online_dpo_trainer", "trainer.sft_config", "trainer.judges", "data_utils"])
def test_modules_of_later_versions_say_what_to_use(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{module}': later than TRL 0.8[:,]"):
        importlib.import_module(f"trainkit_trl.{module}")


# ---------------------------------------------------------------------------------------------------- signatures


def parameters(text: str) -> dict[str, Any]:
    """The parameters of a signature that is written as in a definition, with their defaults; `...`: required."""
    made = ast.parse(f"def f({text}): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    given = made.args
    required: list[Any] = [...] * (len(given.args) - len(given.defaults))
    found = dict(zip((a.arg for a in given.args), [*required, *map(ast.literal_eval, given.defaults)], strict=True))
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return found | {a.arg: ... if value is None else ast.literal_eval(value) for a, value in named}


def own(path: str) -> dict[str, inspect.Parameter]:
    """The parameters of what the adapter has at a path, without `self`."""
    about = next(framework(each) for each in ("trlx", "trl") if framework(each).package == path.split(".")[0])
    found = resolve(path.replace(about.package, about.adapter, 1))
    parent = resolve(path.replace(about.package, about.adapter, 1).rpartition(".")[0])
    given = dict(inspect.signature(found).parameters)
    if inspect.isclass(parent) and not isinstance(
        inspect.getattr_static(parent, found.__name__), classmethod | staticmethod
    ):
        given.pop(next(iter(given)))  # self
    return given


def same(default: Any, peer: Any) -> bool:
    """Whether two defaults are the same; what is empty may be None, a tuple or made by a factory."""
    if default is inspect.Parameter.empty or peer is ...:
        return peer is ...
    if isinstance(peer, list | dict):
        return default is None or "factory" in repr(default) or list(default) == list(peer)
    return bool(default == peer)


MAPPED = {path for each in FRAMEWORKS for path, name in framework(each).names.items() if name.kind == "mapped"}


@table("path", [path for path in SIGNATURES if path in MAPPED or path.rpartition(".")[0] in MAPPED])
def test_signatures_are_those_of_the_framework(path: str) -> None:
    versions = [SIGNATURES[path]] if isinstance(SIGNATURES[path], str) else SIGNATURES[path]
    given = own(path)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values())
    plain = [name for name, parameter in given.items() if parameter.kind not in (2, 4)]
    for text in versions:
        assert [name for name in parameters(text) if name not in given and not open_ended] == []
    faults = []
    for text in versions:
        peer = parameters(text)
        differ = {n: given[n].default for n in peer if n in given and not same(given[n].default, peer[n])}
        differ.pop("exp_name", None)  # the name of the script
        in_order = [name for name in plain if name in peer] == [name for name in peer if name in given]
        first = plain[: len(peer)] == list(peer)[: len(plain)]
        more = [n for n in plain if n not in peer and given[n].default is inspect.Parameter.empty]
        faults.append({} if in_order and first and not differ and not more else {"differ": differ, "own": plain})
    assert {} in faults, faults
