"""Writes the tables of docs/coming-from-*.md from plugins/migrate/ and trainkit/config/names.toml: ``make tables``.

A table is between two comments of a page, ``<!-- table: NAME -->`` and ``<!-- end of table -->``. With ``NAME without
OTHER``, the fields that the framework OTHER has with the same meaning are left out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from trainkit.config.names import known_names, setting_paths
from trainkit_migrate import FRAMEWORKS, Framework, Setting, framework

PAGES = sorted(Path(__file__).parent.glob("coming-from-*.md"))
TABLE = re.compile(r"(<!-- table: ([\w-]+)(?: without ([\w-]+))? -->\n).*?(<!-- end of table -->)", flags=re.DOTALL)
KINDS = ("mapped", "equivalent", "without effect", "refused")
HEAD = "| {} | | in trainkit |\n|---|---|---|\n"


def written(text: str) -> str:
    """Return a page with its tables as they are in the sources."""
    return TABLE.sub(lambda match: f"{match[1]}{table(match[2], match[3])}{match[4]}", text)


def table(name: str, without: str | None = None) -> str:
    """Return the tables of a framework, or that of the names that are common among frameworks."""
    if name == "names":
        return common_names()
    if name not in FRAMEWORKS:
        return ""
    about, others = framework(name), rows(framework(without)) if without else {}
    return "\n" + "".join([*counts(about), *fields(about, others), *names(about)]) + "\n"


# ---------------------------------------------------------------------------------------------------------- fields


def counts(about: Framework) -> Iterator[str]:
    """Yield how many fields and names are mapped, and so on; a field that several classes have counts once."""
    every: dict[str, list[str]] = {
        "fields": [kind for _, kind, _ in rows(about)],
        "names": [each.kind for each in about.names.values()],
    }
    yield f"| {about.title}, {about.version} | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 1)}\n"
    for what, kinds in every.items():
        if kinds:
            found = Counter(kinds)
            yield f"| {what} | {' | '.join(str(found[kind]) for kind in KINDS)} |\n"
    yield "\n"


def rows(about: Framework) -> dict[tuple[str, str, str], list[str]]:
    """Return the rows of fields: name, kind and text, with the classes or sections that have them."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for path, setting in about.settings.items():
        home, _, field = path.rpartition(".")
        found[field, setting.kind, described(setting, about)].append(home)
    return found


def fields(about: Framework, others: Container[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a table of the fields of each class or section, and of those that several have, without other rows."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row, homes in rows(about).items():
        if row not in others:
            field, kind, text = row
            groups[tuple(homes)].append(f"| `{field}` | {kind} | {text} |\n")
    for classes, lines in sorted(groups.items(), key=lambda each: len(each[0])):
        yield f"### {', '.join(map(heading, classes))}\n\n{HEAD.format('field')}{''.join(lines)}\n"


def heading(home: str) -> str:
    """Return the name of a class or section; of one inside another, both."""
    outer, _, inner = home.rpartition(".")
    return f"`{inner}` of `{outer}`" if outer else f"`{inner}`" if inner else "Others"


def described(setting: Setting, about: Framework) -> str:
    """Return what becomes of a field, in words."""
    said = [setting.refused or setting.unused or ""]
    if setting.part_of:
        said = [f"read with `{setting.part_of.rpartition('.')[2]}`"]
    elif setting.convert:
        first = (about.function(setting.convert).__doc__ or "").partition("\n")[0].rstrip(".")
        said = [re.sub(r"^(Return|Say (that|which|how)?) ?", "", first)]
    elif setting.to:
        said = [target(setting.to)]
        said += [f"`{theirs}` is {value_text(ours)}" for theirs, ours in setting.values.items() if theirs != ours]
    return cell("; ".join([*filter(None, said), *([setting.note] if setting.note else [])]))


def target(path: str) -> str:
    """Return a setting as documents name it."""
    section, _, field = path.removesuffix(".*").partition(".")
    inside = {"method": "`{}` in `method`", "eval": "`{}` in `rollout.eval_kwargs`"}
    if section == "rollout" and field not in setting_paths():  # a sampling setting of one method
        return f"`{field}` in `rollout`"
    return inside.get(section, f"`{section}.{{}}`").format(field)


def value_text(value: object) -> str:
    """Return a value of trainkit, or what to do where there is none."""
    return f"refused: {value[1]}" if isinstance(value, list) else f"`{value}`"


def cell(text: str) -> str:
    """Return a text for a cell of a table, with settings in backquotes and links to pages."""
    known = "|".join(re.escape(path) for paths in setting_paths().values() for path in paths if "." in path)
    text = re.sub(rf"(?<![`\w.])((?:{known})(?:\.\w+)*)\b(?![`\w])", r"`\1`", text)
    text = re.sub(r"(?<!\[)docs/([\w/-]*?)([\w-]+)\.md", r"[\2](\1\2.md)", text)
    return text.replace("|", "\\|")


# ----------------------------------------------------------------------------------------------------------- names


def names(about: Framework) -> Iterator[str]:
    """Yield tables of public names: those of the adapter by their modules, then the others."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, name in about.names.items():
        if name.kind == "mapped":
            homes[path.rpartition(".")[0]].append(path.rpartition(".")[2])
    if homes:
        yield "### Names that the adapter has\n\n| module or class | names |\n|---|---|\n"
        yield from (f"| `{home}` | {listed(found)} |\n" for home, found in homes.items())
        yield "\n"
    others = {path: name for path, name in about.names.items() if name.kind != "mapped"}
    if others:
        yield f"### Other names\n\n{HEAD.format('name')}"
        for path, name in others.items():
            text = f"`{name.text}`" if name.kind == "equivalent" else cell(name.text)
            yield f"| `{path}` | {name.kind} | {text} |\n"
        yield "\n"


def listed(found: Iterable[str]) -> str:
    """Return names in backquotes."""
    return ", ".join(f"`{name}`" for name in found)


def common_names() -> str:
    """Return the table of names.toml: what settings are called elsewhere."""
    groups: dict[str, list[str]] = defaultdict(list)
    for other, own in known_names().items():
        groups[own].append(other)
    lines = [f"| {listed(others)} | {option(own)} |\n" for own, others in groups.items()]
    return f"\n| other names | trainkit |\n|---|---|\n{''.join(lines)}\n"


def option(own: str) -> str:
    """Return a setting, or an option of the command."""
    return f"the option `{own}`" if own.startswith("--") else target(own) if "." in own else f"`{own}`"


def main() -> None:
    """Write the tables of every page."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
