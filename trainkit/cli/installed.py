"""Commands that distributions bring: listed without being imported, and made when they are called."""

from __future__ import annotations

from difflib import get_close_matches
from types import FunctionType
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from trainkit.cli.console import ExplainedErrors
from trainkit.errors import PluginError, RegistryError, TrainkitError, describe
from trainkit.plugins.commands import OWN, Command, installed_commands
from trainkit.plugins.discovery import how_to_install
from trainkit.plugins.guard import error_text

COMPLETION = ("install_completion", "show_completion")
"""Options that every app of typer has, and that are those of the whole command line here."""


class WithInstalled(ExplainedErrors):
    """The commands of the core, and those of installed distributions."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.suggest_commands = False  # typer would look among those of the core alone

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands that can be used."""
        return [*self.commands, *(command.name for command in self._installed(ctx) if not command.why)]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command; None if there is none.

        Raises:
            RegistryError: distributions name it that may not.
        """
        if name in self.commands:
            return self.commands[name]
        commands = [command for command in self._installed(ctx) if command.name == name]
        usable = [command for command in commands if not command.why]
        if commands and not usable and not ctx.resilient_parsing:
            if name in OWN:
                raise RegistryError(f"{_missing(name)}; {commands[0].why}")
            raise RegistryError(
                f"the command {name!r} cannot be used: {'; '.join(dict.fromkeys(c.why for c in commands))}"
            )
        return _Installed(usable[0]) if usable else None

    def everything(self) -> dict[str, Any]:
        """Import and return all commands that can be used, by name."""
        return {
            **self.commands,
            **{each.name: _made(each) for each in installed_commands(self.commands) if not each.why},
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments begin with.

        Raises:
            RegistryError: distributions name it that may not.
            typer.BadParameter: there is none; names what to install, or commands with similar names.
        """
        try:
            return super().resolve_command(ctx, args)
        except TrainkitError:
            raise
        except Exception as error:
            name = args[0] if args else ""
            near = get_close_matches(name, sorted({*self.list_commands(ctx), *OWN}))
            if name in OWN:
                error.message = _missing(name)  # type: ignore[attr-defined]
            elif near:
                reason, _, hint = error.message.partition(". ")  # type: ignore[attr-defined]
                meant = ", ".join(map(repr, near))
                error.message = f"{reason.rstrip('.')}. Did you mean {meant}? {hint}".rstrip()  # type: ignore[attr-defined]
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, and those that cannot be used with the reason."""
        super().format_commands(ctx, formatter)
        if refused := [command for command in self._installed(ctx) if command.why]:
            with formatter.section("Commands that cannot be used"):
                formatter.write_dl([(command.name, command.why) for command in refused])

    def _installed(self, ctx: Any) -> list[Command]:
        """Return the installed commands, which are looked for once in a command line."""
        if __name__ not in ctx.meta:
            ctx.meta[__name__] = installed_commands(self.commands)
        return ctx.meta[__name__]  # type: ignore[no-any-return]


class _Installed(TyperCommand):
    """A command in the list, which is imported when it is called."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.name, help=command.help, rich_markup_mode=None)
        self.found = command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command, and return its context."""
        return _made(self.found).make_context(info_name, args, parent, **extra)


def _made(command: Command) -> Any:
    """Return the command of what an entry point names.

    Raises:
        PluginError: it cannot be imported, or is neither a function nor an app of typer; names the distribution.
    """
    try:
        loaded = command.load()
        if isinstance(loaded, FunctionType):
            app = typer.Typer(rich_markup_mode=None)
            app.command(command.name)(loaded)
        elif isinstance(loaded, typer.Typer):
            app = loaded
        else:
            raise TypeError(f"it should be a function or a typer.Typer; given {describe(loaded)}")
        command_of_app: Any = get_command(app)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may even call sys.exit()
        raise PluginError(
            f"the command {command.name!r} of {command} cannot be used: {error_text(error)}. Repair or uninstall the "
            f"distribution {command.distribution!r}; other commands are not affected"
        ) from error
    command_of_app.params = [each for each in command_of_app.params if each.name not in COMPLETION]
    return command_of_app


def _missing(name: str) -> str:
    return f"{name!r} is in {OWN[name][0]}, which is not installed: {how_to_install(OWN[name][0])}"
