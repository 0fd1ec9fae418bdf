"""Scripts of other frameworks: their imports changed to those of adapters, or the configurations that they make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError, suggest
from trainkit_migrate.tables import FRAMEWORKS, Framework, advice, framework, generation, instead
from trainkit_migrate.translation import translate, translate_sampling

OBJECTS = ("callbacks", "data_collator", "trainer_kwargs")
"""Fields of which the adapters take some values: hooks, collators that say what is trained on, a logit mask."""


@dataclass
class Rewritten:
    """A script whose imports are changed."""

    text: str
    """The source."""
    refused: list[str] = field(default_factory=list)
    """Names and settings without counterpart, each after its line."""


def rewritten(text: str) -> Rewritten:
    """Return a script with its imports of another framework changed to those of the adapter.

    Raises:
        SyntaxError: it is not Python.
        ConfigError: it imports no framework that has an adapter, or the adapter is not installed.
    """
    found, lines, before = Rewritten(text), text.splitlines(keepends=True), text
    adapted = {name: framework(name) for name in FRAMEWORKS if framework(name).adapter}
    for name, about in adapted.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[number] = _changed(lines[number], about)
                found.refused += _missing(node, name)
        if "".join(lines) != found.text:
            refused = _refused_settings(ast.parse(text), name)
            found.refused += sorted(refused, key=lambda each: int(each.partition(":")[0]))
            found.text = "".join(lines)
    found.text = "".join(lines)
    if found.text == before:
        raise ConfigError(f"the script imports none of {', '.join(about.package for about in adapted.values())}")
    return found


@dataclass
class Configured:
    """The configurations that a script of a framework without adapter makes, and what else is to be changed in it."""

    framework: str
    """The framework."""
    configs: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """The fields of each, by the class that has them."""
    changes: list[str] = field(default_factory=list)
    """What becomes of the names that it imports and of values that it computes, each after its line."""
    refused: int = 0
    """How many of the names have no counterpart."""


def configured(text: str) -> Configured | None:
    """Return the configurations in a script; None if it is of no framework without adapter.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(text)
    imported = {path: line for line, path in _imported(tree)}
    adapted = {path for name in FRAMEWORKS if framework(name).adapter for path in framework(name).names}
    modern = any(isinstance(node, ast.keyword) and node.arg == "processing_class" for node in ast.walk(tree))
    made = list[tuple[int, Configured]]()
    for name in FRAMEWORKS:
        about = framework(name)
        known = [path for path in imported if path in about.names]
        if about.adapter or not (set(known) - adapted or (modern and known)):
            continue
        found = Configured(name)
        for path in known:
            found.changes.append(f"{imported[path]}: {path}: {instead(name, path)}")
            found.refused += about.names[path].kind == "refused"
        _read_calls(tree, about, found)
        fields = [f"{cls}.{each}" for sections in found.configs for cls, given in sections.items() for each in given]
        made.append((sum(each in about.settings for each in fields), found))
    if made:  # names that two frameworks have are those of the one that has most of the fields
        return max(made, key=lambda each: each[0])[1]
    return _read_functions(tree, imported)


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def _read_functions(tree: ast.Module, imported: Iterable[str]) -> Configured | None:
    """Return the configurations that functions of ddpo-pytorch make by assignments; None if there are none."""
    packages = {path.split(".")[0] for path in imported}
    if packages & {framework(name).package for name in FRAMEWORKS} - {""}:
        return None
    found, made = Configured("ddpo_pytorch"), dict[str, dict[str, Any]]()
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and (given := _read_assignments(function, made, found)):
            made[function.name] = given
    known = framework("ddpo_pytorch").settings
    found.configs = [_nested(given) for given in made.values()]
    return found if any("." in path and path in known for given in made.values() for path in given) else None


def _read_assignments(function: ast.FunctionDef, made: Mapping[str, Any], found: Configured) -> dict[str, Any]:
    """Return the literals that are assigned to fields of ``config``, by their paths; say which others are.

    Args:
        function: a function.
        made: what functions before it have assigned, by their names; this one may begin with it.
        found: where fields that are computed are added.
    """
    given, names = dict[str, Any](), {"config": ""}
    for node in (each for each in ast.walk(function) if isinstance(each, ast.Assign)):
        called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        given |= made.get(called, {})
        heads = [ast.unparse(target).partition(".") for target in node.targets]
        path = next((f"{names[head]}{rest}" for head, _, rest in heads if head in names and rest), "")
        if not path:
            continue
        if called.endswith("ConfigDict"):  # a section, which may have a name of its own
            names |= {head: f"{path}." for head, _, rest in heads if not rest}
            continue
        try:
            given[path] = ast.literal_eval(node.value)
        except ValueError:
            setting = framework("ddpo_pytorch").settings.get(path)
            to = f"; set {setting.to}" if setting and setting.to else ""
            found.changes.append(f"{node.lineno}: {path} is computed{to}")
    return given


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields by their dotted paths as sections."""
    found: dict[str, Any] = {}
    for path, value in given.items():
        *sections, name = path.split(".")
        here = found
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value
    return found


def _read_calls(tree: ast.AST, about: Framework, found: Configured) -> None:
    """Collect the fields of configurations, as far as their values are written in the script."""
    methods = getattr(about.functions, "METHODS", {})
    classes = {path.partition(".")[0] for path in about.settings}
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Call)
            or (name := getattr(node.func, "id", getattr(node.func, "attr", ""))) not in classes
        ):
            continue
        given = _read_arguments(node, name, about, found)
        last = found.configs[-1] if found.configs else None
        if last is None or (name in methods and last.keys() & methods.keys()):
            found.configs.append({name: given})
        else:
            last[name] = given


def _read_arguments(call: ast.Call, cls: str, about: Framework, found: Configured) -> dict[str, Any]:
    """Return the fields that a call gives as literals; say which others it gives."""
    first = "output_dir" if f"{cls}.output_dir" in about.settings else "model_name_or_path"
    named = [(first, value) for value in call.args[:1]] + [(keyword.arg, keyword.value) for keyword in call.keywords]
    if len(call.args) > 1:
        found.changes.append(f"{call.lineno}: {cls} is given fields without names; name them")
    given: dict[str, Any] = {}
    for field_name, value in named:
        try:
            literal = ast.literal_eval(value)
        except ValueError:
            setting = about.settings.get(f"{cls}.{field_name}")
            to = f"; set {setting.to}" if setting and setting.to else ""
            found.changes.append(f"{call.lineno}: {cls}.{field_name or '**'} is computed{to}")
            continue
        given |= {field_name: literal} if field_name else literal
    return given


def _refused_settings(tree: ast.AST, name: str) -> Iterator[str]:
    """Yield the settings that a script writes out and a run of the adapter would refuse, each after its line."""
    about, seen = framework(name), set[int]()
    homes = {path.partition(".")[0] for path in about.settings}
    sections = getattr(about.functions, "SECTIONS", {each: each for each in homes})
    for node in ast.walk(tree):
        given: dict[str, ast.expr] = {}
        cls = _called(node)
        if isinstance(node, ast.Call) and cls in sections:
            given = {f"{sections[cls]}.{each.arg}": each.value for each in node.keywords if each.arg}
        elif isinstance(node, ast.Call) and cls == "evolve":  # of a configuration, with a mapping for each section
            changes = [(section, _items(each)) for section, each in _sections(node, homes)]
            given = {f"{section}.{key.value!s}": value for section, items in changes for key, value in items}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            path = ".".join(ast.unparse(node.targets[0]).split(".")[-2:])
            given = {path: node.value} if path in about.settings else {}
        elif isinstance(node, ast.Dict):
            keys = [(key.value, value) for key, value in _items(node) if str(key.value).split(".")[0] in homes]
            given = {str(path): value for path, value in keys}
        if given and id(node) not in seen:
            parts = {id(each): each for each in ast.walk(node)}
            seen |= {at for at, each in parts.items() if not (isinstance(each, ast.Call) and _called(each) in sections)}
            yield from _refused_of(given, about, name)
    for node in ast.walk(tree):
        if id(node) not in seen and isinstance(node, ast.Dict | ast.Call):
            yield from _refused_sampling(node)


def _sections(node: ast.Call, homes: set[str]) -> list[tuple[str, ast.Dict | ast.Call]]:
    """Return the sections that a call changes, with their mappings."""
    given = [(str(each.arg), each.value) for each in node.keywords if each.arg in homes]
    return [(name, value) for name, value in given if isinstance(value, ast.Dict) or _called(value) == "dict"]  # type: ignore[misc]


def _called(node: ast.AST) -> str:
    """Return the name of what a call calls, without its module; empty of other nodes."""
    called = node.func if isinstance(node, ast.Call) else None
    return str(getattr(called, "id", getattr(called, "attr", "")))


def _refused_of(given: Mapping[str, ast.expr], about: Framework, name: str) -> Iterator[str]:
    settled, computed = dict[str, Any](), list[str]()
    for path, value in given.items():
        try:
            settled[path] = _literal(value)
        except ValueError:
            computed.append(path)
    for path in computed:
        setting = about.settings.get(path)
        if setting and setting.refused and not setting.unless and path.rpartition(".")[2] not in OBJECTS:
            yield f"{given[path].lineno}: {path} has no counterpart: {setting.refused}"
    parts = {about.settings[path].part_of for path in computed if path in about.settings}
    for remark in translate(name, _nested(settled), rows=1).refused:
        path = next((path for path in given if remark.field == path or remark.field.startswith(f"{path}.")), "")
        if (
            remark.field not in parts
            and path
            and path.rpartition(".")[2] not in OBJECTS
            and _known(remark.field, about)
        ):
            yield f"{given[path].lineno}: {remark.field} has no counterpart: {remark.text}"


def _known(path: str, about: Framework) -> bool:
    """Return whether a table has a field; fields of a user's own method are not in it."""
    return any(each in about.settings for each in (path, f"{path.rpartition('.')[0]}.*"))


def _refused_sampling(node: ast.Dict | ast.Call) -> Iterator[str]:
    """Yield the arguments of `generate` that are refused, in a mapping of them or a call of a trainer."""
    given = dict[str, ast.expr]()
    if isinstance(node, ast.Dict) or ast.unparse(node.func) == "dict":
        given = {str(key.value): value for key, value in _items(node)}
        given = given if given.keys() <= generation().settings.keys() else {}
    elif ast.unparse(node.func).lower().endswith("trainer.generate"):
        given = {str(each.arg): each.value for each in node.keywords if each.arg in generation().settings}
    for field_name, value in given.items():
        try:
            literal = _literal(value)
        except ValueError:
            continue
        for remark in translate_sampling({field_name: literal}).refused:
            yield f"{value.lineno}: {remark.field} has no counterpart: {remark.text}"


def _items(node: ast.Dict | ast.Call) -> list[tuple[ast.Constant, ast.expr]]:
    """Return the items of a mapping whose keys are written out."""
    if isinstance(node, ast.Call):
        return [(ast.Constant(each.arg), each.value) for each in node.keywords if each.arg]
    return [(key, value) for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)]


def _literal(node: ast.expr) -> Any:
    """Return the value of an expression; of mappings, the items that are written out.

    Raises:
        ValueError: it is computed.
    """
    if not (isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "dict")):
        return ast.literal_eval(node)
    found = {}
    for key, value in _items(node):
        with suppress(ValueError):
            found[key.value] = _literal(value)
    return found


def _changed(line: str, about: Framework) -> str:
    """Return a line of an import statement with the package of the adapter; the name that it binds stays."""
    package, adapter = about.package, about.adapter
    line = re.sub(rf"^(\s*from\s+){package}\b", rf"\1{adapter}", line)
    line = re.sub(rf"(\bimport\s+(?:.*,\s*)?){package}(?=\s*(?:,|$|#))", rf"\1{adapter} as {package}", line)
    return re.sub(rf"(\bimport\s+){package}\.(\S+)(?=\s+as\b)", rf"\1{adapter}.\2", line)


def _missing(node: ast.Import | ast.ImportFrom, peer: str) -> Iterator[str]:
    """Yield what an import asks for that the adapter of a framework does not have."""
    about = framework(peer)
    asked = [(node.module or "", [alias.name for alias in node.names])] if isinstance(node, ast.ImportFrom) else []
    asked += [(alias.name, []) for alias in node.names] if isinstance(node, ast.Import) else []
    for module, names in asked:
        if module.split(".")[0] != about.package:
            continue
        known = _names(module.replace(about.package, about.adapter, 1))
        if known is None:
            reasons = [each for name in names if (each := instead(peer, f"{module}.{name}"))] or advice(peer, module)
            yield f"{node.lineno}: {about.adapter} has no module {module.partition('.')[2]!r}{_because(reasons)}"
            continue
        for name in names:
            said = instead(peer, f"{module}.{name}")  # also of a function that says so when it is called
            if said or (name != "*" and name not in known and _names(f"{about.adapter}.{name}") is None):
                why = _because([said]) or suggest(name, known)
                yield f"{node.lineno}: {about.adapter} has no {name!r} in {module!r}{why}"


def _because(said: list[str]) -> str:
    return "".join(f": {each}" for each in dict.fromkeys(said) if each)


@cache
def _names(module: str) -> frozenset[str] | None:
    """Return the names that a module of an adapter defines or imports, read from its source; None if there is none."""
    package, _, inside = module.partition(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ConfigError(
            f"{distribution} is not installed, which has the names of the script; pip install {distribution}"
        )
    place = Path(next(iter(spec.submodule_search_locations))).joinpath(*inside.split(".") if inside else ())
    files = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
    if not files:
        return None
    found: set[str] = set()
    for node in ast.parse(files[0].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)
