"""The command line, a thin layer over `trainkit.train`. Heavy modules are imported inside the commands that need them.

Exit codes: 0 success; 1 an error that trainkit explains, printed without its traceback; 2 wrong usage of the command
line itself; 130 interrupted, 143 ended by SIGTERM and 129 by SIGHUP, after saving if the run saves checkpoints.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from trainkit.errors import ConfigError, DataError, PluginError, TrainkitError, describe, printable, suggest
from trainkit.examples import find_examples
from trainkit.plugins import PluginInfo, load_file, load_function
from trainkit.plugins.templates import Kind

if TYPE_CHECKING:
    from trainkit.config import PluginConfig, TRLConfig
    from trainkit.testing.conformance import Result

TRACEBACK = "TRAINKIT_TRACEBACK"
NO_PLUGIN = "--no-plugin"


class _ExplainedErrors(TyperGroup):
    """A command group that prints the message of a `TrainkitError` instead of its traceback.

    An error of another process is printed by that process.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TrainkitError as error:
            if ctx.params.get("traceback"):
                raise
            if not error.elsewhere:
                typer.echo(_message(error), err=True)
            raise typer.Exit(1) from error


def _message(error: TrainkitError) -> str:
    """Return the text of an error for the console."""
    hint = f"\n({TRACEBACK}=1 shows the traceback)" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {_lines(error)}{hint}"


def _lines(text: object) -> str:
    """Return ``text`` without control characters, except for line breaks: it may quote data and user code."""
    return "\n".join(map(printable, str(text).split("\n")))


app = typer.Typer(
    cls=_ExplainedErrors,
    help="RLHF and post-training with algorithms as plugins.",
    epilog="Exit codes: 0 success, 1 an error that trainkit explains, 2 wrong usage, 130 interrupted, 143 by SIGTERM, "
    "129 by SIGHUP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help is faster
)
examples_app = typer.Typer(help="List and run the examples that come with trainkit.", no_args_is_help=True)
app.add_typer(examples_app, name="examples")
plugins_app = typer.Typer(help="List the installed plugins (the default), and check them.")
app.add_typer(plugins_app, name="plugins")


def main() -> None:
    """Run the command line; the console script calls this."""
    app(prog_name="trainkit")


def _print_version(asked: bool) -> None:
    if asked:
        from trainkit import __version__

        typer.echo(f"trainkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar=TRACEBACK, help="Show the traceback of errors, not only the message.")
    ] = False,
) -> None:
    pass


RemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let code that comes with the model run. Read it first.",
    ),
]
StrictPlugins = Annotated[
    bool, typer.Option("--strict-plugins", help="End with an error if an installed plugin is broken or shadowed.")
]

# --------------------------------------------------------------------------------------------------------- train


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The configuration file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. train.seed=2 optimizer.lr=1e-5.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION", help="A function that returns arguments of trainkit.train; may take `seed`."
        ),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, .jsonl or .txt.")] = None,
    samples: Annotated[Path | None, typer.Option(metavar="FILE", help="Samples to learn from, .jsonl or .txt.")] = None,
    eval_prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts for evaluations.")] = None,
    reward_fn: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="The reward function.")] = None,
    environment: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="The environment: a class or function of a row.")
    ] = None,
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="Resume even if settings that affect training have changed.")
    ] = False,
    trust_remote_code: RemoteCode = False,
    no_plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Disable this plugin or distribution; repeatable. Same as TRAINKIT_DISABLE_PLUGINS=NAME,NAME.",
        ),
    ] = None,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Train with a configuration.

    FILE.py:FUNCTION may also be module:FUNCTION. Code is imported only if an option names it, never from the
    configuration. The options for data and reward override what the task returns.
    """
    from trainkit.api import train as run
    from trainkit.config import TRLConfig
    from trainkit.plugins import disabled, discover
    from trainkit.plugins.discovery import unknown_disabled
    from trainkit.plugins.hooks import name_of

    with disabled(no_plugin or [], NO_PLUGIN):
        settled: TRLConfig[Any] = TRLConfig.load_yaml(config).update(parse_overrides(overrides or []))
        for by, message in unknown_disabled(map(name_of, [*settled.plugins, *settled.train.trackers])):
            if by == NO_PLUGIN:
                raise ConfigError(f"{message}; `trainkit plugins` shows what is installed")
        if strict_plugins:
            _require_sound(discover())
        arguments = {} if task is None else _task_arguments(task, settled)
        files = {"prompts": prompts, "samples": samples, "eval_prompts": eval_prompts}
        arguments |= {name: read_data(path) for name, path in files.items() if path is not None}
        if reward_fn is not None:
            arguments["reward_fn"] = load_function(reward_fn)
        if environment is not None:
            arguments["environment"] = load_function(environment)
        if allow_drift:
            arguments["allow_drift"] = True
        run(config=settled, trust_remote_code=trust_remote_code, **arguments)


def parse_overrides(overrides: list[str]) -> dict[str, Any]:
    """Parse overrides such as ``["train.seed=2"]`` into changes by dotted path; values are YAML.

    Raises:
        ConfigError: an override is not of the form key=value, or its value is not YAML.
    """
    from trainkit.plain import parse_yaml

    changes: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not key or not equals:
            raise ConfigError(f"given {override!r}; an override is section.field=value, e.g. train.seed=2")
        changes[key] = parse_yaml(value, f"the value of the override {key!r}")
    return changes


def _task_arguments(reference: str, config: TRLConfig[Any]) -> dict[str, Any]:
    """Call the task's function and return its result, checked to be arguments of `trainkit.train`."""
    from trainkit.api import train as run

    function = load_function(reference)
    arguments = function(**_seed_argument(reference, function, config.train.seed))
    allowed = [name for name in inspect.signature(run).parameters if name not in ("config", "trust_remote_code")]
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"--task {reference} returned {describe(arguments)}; return a dict of arguments of trainkit.train: "
            f"{', '.join(allowed)}"
        )
    for name in arguments:
        if name not in allowed:
            raise ConfigError(
                f"--task {reference} returned {name!r}, which trainkit.train does not take from a task"
                f"{suggest(str(name), allowed)}; known: {', '.join(allowed)}"
            )
    return dict(arguments)


def _seed_argument(reference: str, function: Callable[..., Any], seed: int) -> dict[str, int]:
    """Return ``{"seed": seed}`` if the function has a parameter ``seed``, else an empty dict."""
    parameters = inspect.signature(function).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in variadic]
    if others := [name for name in needed if name != "seed"]:
        raise ConfigError(
            f"--task {reference} cannot be called without {', '.join(others)}; only `seed` is passed to a "
            "task. Give its other parameters defaults"
        )
    return {"seed": seed} if "seed" in parameters else {}


def read_data(path: Path) -> list[Any]:
    """Read the rows of a ``.jsonl`` file (one JSON value per line) or of a ``.txt`` file (one text per line).

    Raises:
        DataError: the file cannot be read, has another suffix, or has a line that is not JSON; names the line.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise DataError(f"data files are .jsonl (an object or string per line) or .txt (a text per line); given {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason} at {error.start})"
        raise DataError(f"cannot read {path}: {reason}") from error
    return lines if path.suffix == ".txt" else [_json_line(path, at, line) for at, line in enumerate(lines, start=1)]


def _json_line(path: Path, at: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {at}: not JSON ({error}); every line should be an object or a string") from error


# ------------------------------------------------------------------------------------------------------ examples


@examples_app.command("list")
def list_examples() -> None:
    """List the examples with a description of each."""
    found = find_examples()
    width = max(map(len, found), default=0)
    for name, path in found.items():
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        typer.echo(f"{name:<{width}}  {about.partition(chr(10))[0]}")


@examples_app.command("run", context_settings={"allow_interspersed_args": False})
def run_example(
    name: Annotated[str, typer.Argument(help="The example's name.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Arguments for it.")] = None,
) -> None:
    """Run an example; arguments after its name (`--seed 2`, `--help`) are passed to it."""
    found = find_examples()
    if name not in found:
        raise ConfigError(f"there is no example {name!r}{suggest(name, found)}; known: {', '.join(found) or 'none'}")
    try:
        load_file(found[name]).main(arguments or [])
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise ConfigError(
                f"{error}; install what the examples need: pip install 'trainkit[examples]'"
            ) from error.__cause__
        raise


# ------------------------------------------------------------------------------------------- plugins and configs


@app.command("new-plugin")
def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in configurations, e.g. my-algo.")],
    kind: Annotated[Kind, typer.Option(help="An algorithm, a tracker, or a sampler.")] = Kind.TRAINER,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The new directory; by default ./trainkit-NAME.")
    ] = None,
) -> None:
    """Create a plugin from a template. The directory can be installed, checked and run, for you to change."""
    from trainkit.plugins import templates

    names, files = templates.new_plugin(name, kind, out)
    folder = str(out or names.distribution)
    extra = "" if kind is Kind.TRAINER else "[dev]"  # their example needs an algorithm, another distribution
    commands = (
        ["pip", "install", "-e", f"{folder}{extra}"],
        ["trainkit", "plugins", "check", names.plugin],
        ["python", f"{folder}/example.py"],
    )
    typer.echo("\n".join([*map(str, files), "", "next:", *(f"  {shlex.join(command)}" for command in commands)]))


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="An exported adapter, e.g. runs/x/model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the whole model.")],
    base: Annotated[
        str | None, typer.Option(metavar="PATH", help="The base model, if it has moved since the adapter was saved.")
    ] = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Merge an adapter into its base model. The whole model is saved with its tokenizer and heads."""
    from trainkit.models.loading import merge_export

    merge_export(adapter, out, base, trust_remote_code=trust_remote_code)
    typer.echo(f"{out}: load it with transformers, or give it as model.model_path")


@plugins_app.callback(invoke_without_command=True)
def _plugins(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        list_plugins()


@plugins_app.command(
    "list",
    epilog="Exit code: 0, whatever the plugins' state, unless --strict-plugins is given; scripts can read the state "
    "from --json.",
)
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    try_imports: Annotated[
        bool, typer.Option("--probe", help="Import each in a process of its own, for at most two minutes.")
    ] = False,
    strict_plugins: StrictPlugins = False,
) -> None:
    """List the installed plugins and their states; none is imported in this process.

    ok: can be used. broken: its import fails. blocked: disabled, or made for another version of trainkit. shadowed:
    its name is also used by trainkit or by another plugin. Without --probe, a plugin is shown as broken if reading its
    source reveals it, or if the last --probe has found it, and neither its files nor what is installed has changed.
    """
    from dataclasses import asdict

    from trainkit.plugins import discover
    from trainkit.plugins.discovery import unknown_disabled
    from trainkit.plugins.verdicts import recalled, remember

    for _, message in unknown_disabled():
        typer.echo(f"warning: {printable(message)}", err=True)
    found = discover()
    if try_imports:
        from trainkit.plugins.probe import probe

        found = probe(found)
        remember(found)
    else:
        found = recalled(found)
    rows = [{key: printable(value) for key, value in asdict(plugin).items()} for plugin in found]
    typer.echo(json.dumps(rows, indent=2) if as_json else plugins_table(rows))
    if strict_plugins:
        _require_sound(found)


def _require_sound(plugins: Iterable[PluginInfo]) -> None:
    """Raise a `PluginError` if a plugin is broken, or two have one name."""
    if faults := [f"{plugin.name}: {plugin.why}" for plugin in plugins if plugin.state in ("broken", "shadowed")]:
        raise PluginError(f"--strict-plugins, and not all plugins can be used: {'; '.join(faults)}")


def plugins_table(rows: list[dict[str, str]]) -> str:
    """Return a table with one line per plugin, followed by the reasons why some cannot be used."""
    columns = ("name", "kind", "distribution", "version", "api", "state", "origin")
    table = [columns, *(tuple(row[column] or "-" for column in columns) for row in rows)]
    widths = [max(len(line[at]) for line in table) for at in range(len(columns))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    refused = [f"{row['name']} is {row['state']}: {row['why']}" for row in rows if row["why"]]
    return "\n".join([*lines, *([""] if refused else []), *refused])


@plugins_app.command("check", epilog="Exit code: 0 if all checks pass, 1 if one fails.")
def check_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An algorithm or another plugin.")],
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only this check; repeatable.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the checks that apply, without running them.")] = False,
    expect_failure: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK=WHY", help="A check that is expected to fail, with the reason; repeatable."),
    ] = None,
) -> None:
    """Check a plugin in short training runs of tiny models: an algorithm, hooks, or a sampler.

    Each check is printed with what it proves. A failed check is followed by what was observed and why it matters.
    """
    from trainkit.testing.conformance import ConformanceError, checks_for, subjects_of
    from trainkit.testing.conformance import check_plugin as run

    checks = [each for subject in subjects_of(name) for each in checks_for(subject)]
    width = max(len(each.name) for each in checks)
    if show:
        for each in checks:
            typer.echo(f"{each.name:<{width}}  {each.proves}")
        return

    def tell(result: Result) -> None:
        mark = _mark(result.outcome != "failed")
        typer.echo(f"{mark} {result.check.name:<{width}}  {result.seconds:5.1f} s  {result.check.proves}")

    try:
        report = run(name, only=only or None, expected_failures=_expected_failures(expect_failure or []), tell=tell)
    except ConformanceError as error:
        typer.echo(f"\n{_lines(error)}")
        raise typer.Exit(1) from None
    typer.echo(f"\n{_lines(report)}")


def _expected_failures(given: list[str]) -> dict[str, str]:
    """Return the checks of ``--expect-failure`` with their reasons."""
    found = {}
    for text in given:
        check, _, why = text.partition("=")
        if not check or not why.strip():
            raise ConfigError(f"--expect-failure is {text!r}; give CHECK=WHY, the check's name and why it fails")
        found[check] = why
    return found


def _mark(good: bool) -> str:
    """Return a tick or a cross, or + or - if the console's encoding lacks them."""
    marks = "✓✗".encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii")
    return (marks if "?" not in marks else "+-")[0 if good else 1]


@app.command("config")
def show_config(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="An algorithm's name, or that of another plugin.")],
) -> None:
    """Print an algorithm's defaults, or the entry of another plugin with its settings, as YAML with comments."""
    from trainkit.config import default_config
    from trainkit.plugins import get_hooks, is_registered
    from trainkit.plugins.discovery import is_installed
    from trainkit.plugins.registry import PARTS, available_parts, get_part

    name = method.lower()
    if part := next((part for part in PARTS if name in available_parts(part)), None):
        section, key = part.key.split(".")
        head = [f"{section}:", f"  {key}:\n    name: {name}"]
        typer.echo(entry_yaml(head, get_part(part, name).settings), nl=False)
        return
    hooks = get_hooks(method) if is_installed(method.lower(), "") else None
    if hooks is None or is_registered(method):
        typer.echo(annotated_yaml(default_config(method)), nl=False)
    else:
        head = ["train:", f"  trackers:\n  - name: {name}"] if hooks.tracker else [f"plugins:\n- name: {name}"]
        typer.echo(entry_yaml(head, hooks.settings), nl=False)


def entry_yaml(head: list[str], settings: type[PluginConfig] | None) -> str:
    """Return the entry of a plugin in a configuration as YAML, with comments that describe its settings.

    Args:
        head: its first lines, one piece for each level that its settings are indented; the last one has the name.
        settings: the class of its settings; None if it has none.
    """
    from trainkit.plain import to_yaml
    from trainkit.security import hidden

    lines, indent = list(head), "  " * len(head)
    for field, about in (settings.model_fields if settings else {}).items():
        if field != "name":
            lines += _comment(about.description, indent)
            given = (
                f"{field}:  # required\n"
                if about.is_required()
                else to_yaml(hidden({field: about.get_default(call_default_factory=True)}))
            )
            lines += textwrap.indent(given, indent).splitlines()
    return "\n".join(lines) + "\n"


def annotated_yaml(config: TRLConfig[Any]) -> str:
    """Return the configuration as YAML, with a comment above every field that describes it."""
    lines: list[str] = []
    section: Any = None
    for line in str(config).splitlines():
        field = re.match(r"( {2})?(\w+):", line)
        if field is None:  # inside a list, or deeper than a field
            lines.append(line)
            continue
        indent, name = field[1] or "", field[2]
        if not indent:
            section = getattr(config, name)
            lines.append("")
        owner = type(section if indent else config)
        described = getattr(owner, "model_fields", {}).get(name)
        lines += _comment(described and described.description, indent)
        lines.append(line)
    return "\n".join(lines).lstrip("\n") + "\n"


def _comment(text: str | None, indent: str) -> list[str]:
    """Return the lines of a comment in YAML; none if there is no text."""
    return textwrap.wrap(text or "", width=100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


if __name__ == "__main__":  # accelerate launch -m trainkit.cli train ...
    main()
