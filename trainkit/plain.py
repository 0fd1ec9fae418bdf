"""Plain data as YAML, which is read within bounds: no file takes more than about a second, whoever wrote it.

``${NAME}`` in a value stands for an environment variable, ``${NAME:-text}`` for the variable or, if it is not set or
empty, the text; ``$${`` stands for the characters ``${``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from trainkit.errors import ConfigError, describe, suggest
from trainkit.security import is_secret, names_secret

BYTES = 128 * 1024
"""The largest document."""
VALUES = 5_000
"""The most keys and values of a document; what an alias repeats is counted each time."""
DEPTH = 32
"""The most levels of nesting."""
DIGITS = 100
"""The most characters of a number."""
_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_]\w*)(:-(?P<default>[^{}]*))?\}|\$\{")

Key = tuple[str, ...]
"""The keys that lead to a value, those of lists as digits."""


def read_yaml(path: Path, doubled: list[str] | None = None) -> dict[str, Any]:
    """Read plain data from a YAML file, with YAML 1.2's floats (``1e-5``).

    Args:
        path: the file.
        doubled: gets a sentence for each key that is given again, of which the last counts; None: that is an error.

    Raises:
        ConfigError: the file cannot be read, does not hold a mapping, or as `parse_yaml`.
    """
    return read_yaml_lines(path, doubled)[0]


def read_yaml_lines(path: Path, doubled: list[str] | None = None) -> tuple[dict[str, Any], dict[Key, int]]:
    """Read plain data as `read_yaml`, and the line of each key and item of it.

    Raises:
        ConfigError: as `read_yaml`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the path
        around = (
            [*map(str, path.parent.iterdir())] if isinstance(error, FileNotFoundError) and path.parent.is_dir() else []
        )
        reason = f"{getattr(error, 'strerror', error)}{suggest(str(path), around)}"
        raise ConfigError(f"cannot read the config {str(path)!r}: {reason}") from None
    if len(content) > BYTES:
        raise ConfigError(f"{path} is larger than {BYTES} bytes, the most that a config may have; make it smaller")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is not valid YAML: it is not UTF-8 ({path}:{line}); save it as UTF-8") from error
    data, lines = _parse(text, str(path), path, doubled)
    if not isinstance(data, dict):
        held = "is empty" if data is None else f"holds {describe(data)}"
        raise ConfigError(f"{path} should hold a mapping of sections, such as `method: ppo`; it {held}")
    return data, lines


def parse_yaml(text: str, source: str = "the text") -> Any:
    """Parse YAML text; only plain data can be built, no other objects.

    Args:
        text: the text.
        source: what it is, for error messages, which do not quote the text: it may contain secrets.

    Raises:
        ConfigError: it is not valid YAML, names an environment variable that is not set or not allowed there, or
            exceeds `BYTES`, `VALUES`, `DEPTH` or `DIGITS`.
    """
    return _parse(text, source)[0]


def _parse(
    text: str, source: str, file: Path | None = None, doubled: list[str] | None = None
) -> tuple[Any, dict[Key, int]]:
    try:
        if len(text) > BYTES:
            raise yaml.YAMLError(f"it is longer than {BYTES} characters")
        loader = _Loader(text, doubled)
        node = loader.get_single_node()
        return (None, {}) if node is None else (loader.construct_document(node), _lines(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (0, 0) if mark is None else (mark.line + 1, mark.column + 1)
        place = f" ({file}:{line}, column {column})" if file else f" in line {line}, column {column}"
        place *= mark is not None
        reason = ", ".join(filter(None, (error.context, error.problem)))
        place += next((f"; {todo}" for words, todo in _REMEDIES.items() if words in reason), "")
        fault = "has a variable that cannot be used" if isinstance(error, _VariableError) else "is not valid YAML"
        raise ConfigError(f"{source} {fault}: {reason[:300]}{place}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):  # PyYAML's, for !!int x and the like
        raise ConfigError(f"{source} is not valid YAML: a date, a character or a tagged value is impossible") from None


_REMEDIES = {
    "'\\t'": "YAML is indented with spaces, not with tabs",
    "cannot start any token": "put text that begins with this character in quotes",
    "undefined alias": "put text that begins with * in quotes",
    "mapping values are not allowed": "indent the line as the one before it, and put text with a colon in quotes",
    "could not find expected ':'": "write a colon after the key of the line before",
    "expected <block end>": "indent the line as those above it that it belongs with",
    "<stream end>": "a bracket or quote is not closed",
    "expected a single document": "remove the line ---; a file is one configuration",
    "expected '<document start>'": "YAML is written as key: value",
}
"""What to do, by words of PyYAML's messages."""


def _lines(node: yaml.Node, key: Key = ()) -> dict[Key, int]:
    """Return the line of each key and item below a node."""
    lines: dict[Key, int] = {}
    if isinstance(node, yaml.MappingNode):
        children = [(str(name.value), name, value) for name, value in node.value]
    else:
        items = node.value if isinstance(node, yaml.SequenceNode) else []
        children = [(str(index), value, value) for index, value in enumerate(items)]
    for name, at, value in children:
        lines |= {(*key, name): at.start_mark.line + 1, **_lines(value, (*key, name))}
    return lines


class _VariableError(yaml.MarkedYAMLError):
    """An environment variable that is not set, not allowed, or not well formed."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader within bounds.

    It also reads ``1e-5`` as a number, as YAML 1.2 does, and rejects duplicate keys, or tells of them.
    """

    def __init__(self, stream: str, doubled: list[str] | None = None) -> None:
        super().__init__(stream)
        self._doubled = doubled
        self._depth = self._values = 0
        self._repeats: dict[int, int] = {}
        """The number of values of each finished node, by the node's id."""

    def fetch_flow_collection_start(self, kind: Any) -> None:
        if self.flow_level >= DEPTH:  # before the scanner looks ahead for a thousand brackets
            raise _refusal(f"it is nested in more than {DEPTH} levels", self.get_mark())
        super().fetch_flow_collection_start(kind)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias, before = self.check_event(yaml.AliasEvent), self._values
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > DEPTH:
            raise _refusal(f"it is nested in more than {DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and not is_alias and "${" in node.value:
            if parent is not None and index is None:  # a key, which names no variable
                node.value = node.value.replace("$${", "${")
            else:
                self._expand(node, secret=isinstance(index, yaml.ScalarNode) and is_secret(index.value))
        if is_alias and id(node) not in self._repeats:
            raise _refusal("an alias refers to a value that contains it", mark)
        self._values += self._repeats[id(node)] if is_alias else 1
        if self._values > VALUES:
            raise _refusal(f"it has more than {VALUES} values, those that aliases repeat included", mark)
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > DIGITS:
            raise _refusal(f"a number has {len(node.value)} characters; at most {DIGITS} are read", mark)
        if not is_alias:
            self._repeats[id(node)] = self._values - before
        return node

    def _expand(self, node: yaml.ScalarNode, secret: bool) -> None:
        """Replace the environment variables in a value; a plain one then gets the type of what stands there."""

        def value(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            problem = ""
            if match[0] == "$${":
                return "${"
            if name is None:
                problem = "${ begins none; write ${NAME}, ${NAME:-text}, or $${ for ${"
            elif names_secret(name) and not secret:
                problem = f"${{{name}}} names a secret, and the value of this setting is shown and saved"
            elif name not in os.environ and default is None:
                problem = f"{name} is not set; set it, or write ${{{name}:-a default}}"
            if problem:
                raise _VariableError(problem=problem, problem_mark=node.start_mark)
            return os.environ.get(name, "") or default or ""

        node.value = _VARIABLE.sub(value, node.value)
        if node.style is None:
            node.tag = self.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal("a key should be text", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key is None or isinstance(key, bool):
                raise _refusal(f"the key stands for {key} in YAML; put it in quotes", key_node.start_mark)
            line = key_node.start_mark.line + 1
            if key in seen and self._doubled is None:
                raise _refusal(f"the key {key!r} is given twice, first in line {seen[key]}", key_node.start_mark)
            if key in seen and self._doubled is not None:
                self._doubled.append(f"{key!r} is given in line {seen[key]} and again in line {line}, which counts")
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def to_yaml(plain: Any) -> str:
    """Return plain data as YAML, with keys in their order."""
    return str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that also quotes strings such as ``12e4``, which `_Loader` would read as numbers."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    text = text.replace("${", "$${")
    rare_breaks = any(mark in text for mark in "\x85\u2028\u2029")  # unless escaped, read back as plain line breaks
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if rare_breaks else None)


_Dumper.add_representer(str, _represent_text)
