"""The command line, a thin layer over `trainkit.train`. Heavy modules are imported inside the commands that need them.

Exit codes: 0 success; 1 an error that trainkit explains, printed without its traceback; 2 wrong usage of the command
line, or a configuration that is not valid; 130 interrupted, 143 ended by SIGTERM and 129 by SIGHUP, after saving if the
run saves checkpoints.
"""

from __future__ import annotations

import gc
from typing import Annotated, Any

import typer

from trainkit.cli import (
    configs,
    examples,
    inference,
    plugins,
    runs,
    training,
)
from trainkit.cli.console import WithOverrides
from trainkit.cli.installed import WithInstalled
from trainkit.errors import TRACEBACK
from trainkit.version import __version__

PLAIN: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}  # plain help is faster

app = typer.Typer(
    cls=WithInstalled,
    help="RLHF and post-training with algorithms as plugins.",
    epilog="Exit codes: 0 success, 1 an error that trainkit explains, 2 wrong usage or configuration, 130 interrupted, "
    "143 by SIGTERM, 129 by SIGHUP.",
    pretty_exceptions_enable=False,
    **PLAIN,
)


def _print_version(asked: bool) -> None:
    if asked:
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


app.command(cls=WithOverrides)(training.train)
app.command("new-plugin")(plugins.new_plugin)
app.command("runs")(runs.list_runs)
app.command()(inference.generate)
app.command("eval")(inference.evaluate)

of_configs = typer.Typer(
    cls=configs.ShowByDefault,
    help="Show, check and compare configurations; `trainkit config ppo` is short for `trainkit config show ppo`.",
    **PLAIN,
)
of_configs.command("show", cls=WithOverrides)(configs.show_config)
of_configs.command("check", cls=WithOverrides, epilog="Exit code: 0 if it is valid, 2 if not.")(configs.check_config)
of_configs.command("diff")(configs.diff_configs)
of_configs.command("schema")(configs.print_schema)
app.add_typer(of_configs, name="config")

of_examples = typer.Typer(help="List and run the examples that come with trainkit.", **PLAIN)
of_examples.command("list")(examples.list_examples)
of_examples.command("run", context_settings={"allow_interspersed_args": False})(examples.run_example)
app.add_typer(of_examples, name="examples")

of_plugins = typer.Typer(
    help="List the installed plugins (the default), and check them.",
    callback=plugins.list_by_default,
    invoke_without_command=True,
)
of_plugins.command("list", epilog=plugins.EXIT_OF_LIST)(plugins.list_plugins)
of_plugins.command("check", epilog="Exit code: 0 if all checks pass, 1 if one fails.")(plugins.check_plugin)
app.add_typer(of_plugins, name="plugins")


def main() -> None:
    """Run the command line; the console script calls this."""
    try:
        app(prog_name="trainkit")
    finally:
        gc.freeze()  # Python looks for garbage before it ends: with torch and transformers, for a second
