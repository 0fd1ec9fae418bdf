"""An extension of griffe: names in single backquotes in docstrings become links to what they name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path[:0] = [str(Path(__file__).parent)]

import reference  # noqa: E402

NAME = re.compile(r"(?<![`\[])`([A-Za-z_]\w*(?:\.\w+)*)`(?![`\]])")


SHAPE = re.compile(r"(`+.*?`+)|\[[^][`]*\]", flags=re.DOTALL)
"""Code, which stays as it is, or a shape such as [B, *], whose star would begin emphasis."""


class CrossReferences(griffe.Extension):
    """Link every `name` that a public module documents, and every setting; leave all others as code."""

    def __init__(self) -> None:
        self.public: dict[str, str] = {}
        self.settings = {name for name in reference.settings() if "." in name}

    def on_package(self, *, pkg: griffe.Module, loader: Any, **_: Any) -> None:
        """Rewrite the docstrings of a package when it is loaded and its aliases are resolved."""
        loader.resolve_aliases(implicit=True, external=False)
        for module in [*reference.MODULES[1:], "trainkit"]:
            for name in reference.exported(module):
                unloaded = module.partition(".")[0] not in pkg.modules_collection
                if unloaded or (module == "trainkit" and reference.listed_elsewhere(name)):
                    continue
                found = pkg.modules_collection[f"{module}.{name}"]
                if found.has_docstring:
                    self.public.setdefault(found.canonical_path, f"{module}.{name}")
        self._walk(pkg)

    def _walk(self, thing: Any) -> None:
        """Rewrite the docstrings of an object and of its members."""
        if thing.docstring:
            text = SHAPE.sub(
                lambda found: found[0] if found[1] else found[0].replace("*", r"\*"), thing.docstring.value
            )
            thing.docstring.value = NAME.sub(lambda found: self._linked(found[1], thing), text)
        for member in thing.members.values():
            if not member.is_alias:
                self._walk(member)

    def _linked(self, name: str, scope: Any) -> str:
        """Return a name as a link, or as it was."""
        if name in self.settings:
            return f"[`{name}`][{name}]"
        try:
            path = scope.resolve(name)
            path = scope.modules_collection[path].canonical_path
        except (griffe.NameResolutionError, griffe.AliasResolutionError, griffe.CyclicAliasError, KeyError):
            return f"`{name}`"
        public = self.public.get(path)
        return f"[`{name}`][{public}]" if public and public != scope.path else f"`{name}`"
