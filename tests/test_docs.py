"""The documents are true: their code runs, their configurations load, and what they name is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

import trainkit
from pages import (
    ALGORITHM_READMES,
    DOCUMENTS,
    LAUNCH,
    NOT_RUN,
    PAGES,
    README,
    STANDS_FOR,
    STARTED,
    Reader,
    Table,
    blocks,
    commands,
    name_of,
    prose,
    spans,
    tables,
)
from tables import table
from trainkit.cli import app
from trainkit.cli.configs import ShowByDefault
from trainkit.config import TRLConfig
from trainkit.plain import parse_yaml
from trainkit.plugins import hookspecs, registry
from trainkit.plugins.commands import GROUP as COMMANDS
from trainkit.plugins.discovery import GROUPS
from trainkit.testing.trainers import tiny_trainer

ROOT = Path(__file__).parents[1]
SECTIONS = [name for name in TRLConfig.model_fields if name != "plugins"]


RUN_ALONE = {"README.md", "docs/getting-started.md", "plugins/ddpo/README.md"}
"""Pages that have tests of their own, here and beside the plugin."""
LAUNCHING = (
    "docs/distributed.md",
    "docs/kit.md",
    "docs/runs.md",
    "docs/write-an-algorithm.md",
    "plugins/sweep/README.md",
    "examples/README.md",
)
"""Pages with commands of `LAUNCH`."""


# ------------------------------------------------------------------------------------------------ reading Markdown


def tables_about(start: str) -> Iterator[tuple[Path, Table]]:
    """The tables, of all documents, whose first header cell is a dotted name that begins so."""
    for document in DOCUMENTS:
        yield from ((document, table) for table in tables(document) if table.header.startswith(start))


def resolve(path: str) -> Any:
    """What a dotted path names, importing what has to be imported."""
    found: Any = importlib.import_module(path.split(".")[0])
    for at, part in enumerate(path.split(".")[1:], start=1):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            importlib.import_module(".".join(path.split(".")[: at + 1]))
        found = getattr(found, part)
    return found


# ------------------------------------------------------------------------------------------------- the code runs


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """``reader()`` follows pages in an empty directory. Trainers and imported files of the pages go again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in trainkit.available_trainers():
        trainkit.get_trainer(name)  # a module registers once in a process, so not in the copy that goes afterwards
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))
    before = set(sys.modules)
    yield lambda **given: Reader(tmp_path, monkeypatch, **given)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def execute(reader: Callable[..., Reader]) -> Callable[[Path], Any]:
    """``execute(document)``: its files, Python blocks and quick commands in order, in one module."""
    return lambda document: reader().follow(document)


def test_the_readme_runs_and_its_model_learns_what_it_says(execute: Callable[[Path], Any]) -> None:
    found = execute(README)
    assert found.trainer.evaluate()["eval/reward"] > 6  # of 8 letters; about 1 before training


def test_the_page_to_begin_with_runs_and_its_models_learn_what_it_says(execute: Callable[[Path], Any]) -> None:
    found = execute(STARTED)
    assert found.tuned.generate(["a", "b", "c", "d"], temperature=0).outputs == ["bcd", "cde", "def", "efg"]
    assert found.player.progress.step == 3 * 4 * 2  # collections, PPO epochs, batches of 12 in 24
    assert (Path("played") / "model.safetensors").is_file()
    assert found.trainer.progress.step == 40


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
@pytest.mark.parametrize(
    "document",
    sorted(
        {*map(name_of, [*PAGES, *ALGORITHM_READMES]), "CONTRIBUTING.md", "examples/README.md", "plugins/kit/README.md"}
        - RUN_ALONE
    ),
)
def test_the_pages_run(document: str, execute: Callable[[Path], Any]) -> None:
    execute(ROOT / document)


@pytest.mark.slow
@pytest.mark.parametrize("document", LAUNCHING)
def test_the_launches_of_pages_run(document: str, reader: Callable[..., Reader]) -> None:
    reader(launches=True).follow(ROOT / document)


def test_the_pages_with_launches_are_listed() -> None:
    def launches(document: Path) -> bool:
        found = (command for block in blocks(document, "console") for command in commands(block))
        return any(re.match(LAUNCH, c) and not any(re.match(p, c) for p in NOT_RUN) for c in found)

    assert [name_of(document) for document in DOCUMENTS if launches(document)] == [*LAUNCHING]


def test_every_exception_from_running_is_used() -> None:
    shown = [command for document in DOCUMENTS for b in blocks(document, "console") for command in commands(b)]
    assert [p for p in NOT_RUN if not any(re.match(p, command) for command in shown)] == []
    assert [p for p, _ in STANDS_FOR if not any(re.search(p, command) for command in shown)] == []


# ------------------------------------------------------------------------------------- configurations and commands


def test_whole_configurations_load(subtests: pytest.Subtests) -> None:
    shown = [(d, b) for d in DOCUMENTS for b in blocks(d, "yaml") if re.search(r"^method:", b.text, flags=re.MULTILINE)]
    for document, block in shown:
        if block.file != "old.yaml":  # of the page about migrating: it has the names of another framework
            with subtests.test(f"{name_of(document)}:{block.line}"):
                config = TRLConfig.from_dict(parse_yaml(block.text))
                assert TRLConfig.from_dict(parse_yaml(str(config))) == config


def test_settings_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        for span in spans(prose(document)):
            if match := re.match(rf"({'|'.join(SECTIONS)})\.(?!yaml)(\w+)", span):
                section = TRLConfig.model_fields[match[1]].annotation
                known = {"name"} if match[1] == "method" else section.model_fields
                assert match[2] in known, f"{span} in {name_of(document)}"


def test_the_table_of_sections_is_complete() -> None:
    (table,) = (table for table in tables(ROOT / "docs/config.md") if table.header == "section")
    named = {row[0].strip("`"): spans(row[1]) for row in table.rows}
    assert list(named) == list(TRLConfig.model_fields)
    for section in set(SECTIONS) - {"method"}:
        assert resolve(named[section][0]) is TRLConfig.model_fields[section].annotation


def test_commands_exist_with_their_options() -> None:
    whole: Any = typer.main.get_command(app)
    everything = whole.everything()
    for document in DOCUMENTS:
        shown = "".join(block.text for language in ("console", "") for block in blocks(document, language))
        lines = shown.replace("\\\n", " ").splitlines() + spans(prose(document))
        for line in (line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?trainkit ", line)):
            command, words = whole, shlex.split(line, comments=True)[1:]
            if words and words[0] in everything:
                command = everything[words.pop(0)]
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            if isinstance(command, ShowByDefault) and words and not words[0].startswith("-"):
                command = command.commands["show"]
            known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
            own = words if command.name != "run" else []  # what follows an example's name is the example's
            assert {word for word in own if word.startswith("--")} <= known, line
            assert not hasattr(command, "commands") or set(words) <= known, line


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = (document.read_text(encoding="utf-8") for document in DOCUMENTS)
    named = {name for text in texts for name in re.findall(r"(?:^\$ |`)make ([\w-]+)", text, flags=re.MULTILINE)}
    assert {"demo", "test"} <= named <= set(targets)


# ------------------------------------------------------------------------------------------------ names and links


def test_files_and_names_exist(tmp_path: Path) -> None:
    """Of links `make docs` reports those that lead nowhere."""
    trainer = tiny_trainer("ppo", tmp_path)
    trainer.models.build()
    for document in DOCUMENTS:
        for span in spans(prose(document)):
            if span in {*GROUPS.values(), COMMANDS}:
                continue
            if re.fullmatch(r"(trainkit|plugins|examples|docs|tests|benchmarks)/[\w./]*", span):
                assert (ROOT / span).exists(), f"{span} in {name_of(document)}"
            elif (match := re.match(r"trainkit(?:_\w+)?(?:\.\w+)+", span)) and not span.endswith(".py"):
                resolve(match[0])
            elif match := re.match(r"trainer\.(\w+)", span):
                assert hasattr(trainer, match[1]), f"{span} in {name_of(document)}"


def test_what_the_pages_import_exists() -> None:
    """The blocks themselves run in slow tests; a name that has moved is found here."""
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and re.match(r"trainkit(_|\.|$)", node.module or ""):
                    for name in node.names:
                        resolve(f"{node.module}.{name.name}")


def test_the_contract_names_what_exists(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    trainer.models.build()
    listed = [name for _, table in tables_about("trainkit.AccelerateRLTrainer") for name in table.names]
    assert [name for name in listed if not hasattr(trainer, name)] == []
    abstract = trainkit.BaseRLTrainer.__abstractmethods__ - {"learn"}
    optional = {"experience", "prepare_experience", "judge", "after_step", "state_dict", "load_state_dict"}
    assert abstract | optional | {"inputs", "passes", "needs_reference"} <= set(listed)
    for path, cls in (("trainkit.MethodConfig", trainkit.MethodConfig), ("trainkit.Batch", trainkit.Batch)):
        ((_, table),) = tables_about(path)
        assert all(hasattr(cls, name) for name in table.names)


def test_the_page_about_the_architecture_lists_all_modules() -> None:
    listed: dict[str, set[str]] = {}
    for shown in tables(ROOT / "docs/architecture.md"):
        if shown.header == "package":
            listed |= {spans(name)[0]: {*spans(re.sub(r"\(.*?\)", "", modules))} for name, modules in shown.rows}
    packages = [path.parent for path in (ROOT / "trainkit").rglob("__init__.py")]
    assert listed == {
        ".".join(package.relative_to(ROOT).parts): {path.stem for path in package.glob("[!_]*.py")}
        for package in packages
    }


def test_the_table_of_hooks_is_complete() -> None:
    ((_, table),) = tables_about("trainkit.plugins.hookspecs")
    specified = {name for name, value in vars(hookspecs).items() if hasattr(value, "trainkit_spec")}
    assert set(table.names) == specified


@table("name", trainkit.__all__)
def test_public_names_resolve_and_are_described(name: str) -> None:
    value = getattr(trainkit, name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        assert vars(value).get("__doc__") or value.__doc__
    else:
        homes = [module for key, module in sys.modules.items() if key.startswith("trainkit.") and name in vars(module)]
        assert any(name in documented_assignments(module) for module in homes)


def documented_assignments(module: ModuleType) -> set[str]:
    """Names of a module that are assigned and then described by a string."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        target.id
        for statement, after in pairwise(body)
        if isinstance(statement, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


# ------------------------------------------------------------------------------------------------- the algorithms


def trainers_of(document: Path) -> list[str]:
    """The trainers of a plugin, from its entry points."""
    project = tomllib.loads((document.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["entry-points"]["trainkit.trainers"])


def test_the_readme_lists_every_algorithm() -> None:
    (table,) = (table for table in tables(README) if table.header == "name")
    assert sorted(table.names) == sorted(name for path in ALGORITHM_READMES for name in trainers_of(path))


@table("document", ALGORITHM_READMES)
def test_a_plugins_settings_are_listed_with_their_defaults(document: Path) -> None:
    methods = [trainkit.get_trainer(name).method_class for name in trainers_of(document)]
    found = [table for table in tables(document) if table.header.startswith("trainkit_")]
    assert [resolve(table.header) for table in found] == methods
    for settings, method in zip(found, methods, strict=True):
        listed = {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in settings.rows}
        assert listed == {name: field.default for name, field in method.model_fields.items()}


@table("plugin", ["early_stop", "ray", "vllm"])
def test_the_settings_of_other_plugins_are_listed_with_their_defaults(plugin: str) -> None:
    ((_, table),) = tables_about(f"trainkit_{plugin}.")
    listed = {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in table.rows}
    fields = resolve(table.header).model_fields
    assert listed == {name: field.default for name, field in fields.items() if name != "name"}


@table("document", ALGORITHM_READMES)
def test_a_plugins_suggestions_are_listed(document: Path) -> None:
    suggested: dict[str, dict[str, Any]] = {}
    for name in trainers_of(document):
        for section, fields in trainkit.get_trainer(name).method_class.section_defaults.items():
            suggested.setdefault(section, {}).update(fields)
    listed: dict[str, dict[str, Any]] = {}
    for section, field, value in re.findall(r"`(\w+)\.(\w+): ([^`]+)`", prose(document)):
        listed.setdefault(section, {})[field] = parse_yaml(value)
    assert listed == suggested


FURTHER = {"grpo": {"method__kl_coef": 0.1, "method__dynamic_sampling": True}}
"""Settings with which an algorithm has metrics that it does not have by default."""


@pytest.mark.slow
@table("document", ALGORITHM_READMES)
def test_a_plugins_metrics_are_listed(document: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for name in trainers_of(document):
        tiny_trainer(name, tmp_path / name, **FURTHER.get(name, {})).learn()
        written = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8")
        lines += [json.loads(line) for line in written.splitlines()]
    logged = {name for line in lines for name in line if not re.match(r"step$|time/|train/|eval/", name)}
    listed = {name for table in tables(document) for name in table.names if "/" in name}
    assert listed == logged - ({"loss/total"} - listed)


def test_the_changelog_begins_with_the_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert first is not None
    assert first[1] == trainkit.__version__
