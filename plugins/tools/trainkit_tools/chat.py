"""Talking to a model, or to two side by side, on a terminal or through a pipe."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.console import RemoteCode, lines, message
from trainkit.cli.inference import Best, MaxNewTokens, Model, Seed, Temperature, TopP, load_model
from trainkit.errors import ConfigError, TrainkitError, printable, suggest

if TYPE_CHECKING:
    from trainkit.trainer.inference import Tried
    from trainkit_tools.conversation import Conversation

Ask = Callable[..., str]
"""Gets a conversation and ``tell``, and returns the answer."""
COMMANDS = {
    "/again": "another answer to the last message",
    "/image PATH": "put an image into the next message",
    "/reset": "forget the conversation",
    "/system TEXT": "begin a new conversation with this system prompt; without TEXT, with none",
    "/help": "list the commands",
    "/quit": "end the chat, as Ctrl-D does; Ctrl-C ends an answer",
}
"""What lines that begin with a slash do."""


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="RUN|MODEL", help="A second model, whose answers are shown beside.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = None,
    best: Best = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Print a model's answers to what is typed; of a run, with its settings. /help lists commands.

    Conversations are written with the tokenizer's chat template. A model without one continues each line as text.
    Lines may also come through a pipe. A line that ends with a backslash is continued by the next one.
    """
    from trainkit_tools.conversation import Conversation

    seed = secrets.randbelow(2**31) if seed is None else seed
    given = [model] if compare is None else [model, compare]
    chats = [
        _begin(load_model(each, best, temperature, top_p, max_new_tokens, seed, None, trust_remote_code), system)
        for each in given
    ]
    tell(f"{' and '.join(given)}, seed {seed}. /help lists commands")
    for line in _messages(_lines()):
        try:
            if line.strip() == "/again":
                _answer(Conversation.again, chats, given)
            elif line.startswith("/"):
                if _command(line, chats):
                    return
            elif line.strip():
                _answer(partial(Conversation.answer, message=line), chats, given)
        except TrainkitError as error:
            tell(message(error))


def tell(text: str) -> None:
    """Print what the chat itself says, to standard error."""
    typer.echo(lines(text), err=True)


def _begin(tried: Tried, system: str | None) -> Conversation:
    from trainkit_tools.conversation import Conversation

    made = Conversation(tried, system)
    if not made.has_template:
        tell(
            f"the tokenizer of {tried.source.model!r} has no chat template: each line is continued as text, and "
            "nothing is remembered"
        )
    return made


def _lines() -> Iterator[str]:
    """Yield the lines that are typed at a prompt, or come through a pipe, until the end of the input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  (lets input() edit lines and remember them)

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _messages(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, as one with those that follow where they end with a backslash."""
    text = ""
    for line in lines:
        if line.endswith("\\"):
            text += line[:-1] + "\n"
        else:
            yield text + line
            text = ""
    if text:
        yield text


def _command(line: str, chats: list[Conversation]) -> bool:
    """Do what a line that begins with a slash says; return whether the chat ends."""
    name, _, rest = line.partition(" ")
    if name == "/quit":
        return True
    if name == "/help":
        tell("\n".join(f"{command:<14}{what}" for command, what in COMMANDS.items()))
    elif name in ("/reset", "/system"):
        for each in chats:
            each.begin(each.system if name == "/reset" else rest.strip())
        tell("a new conversation begins")
    elif name == "/image":
        for each in chats:
            each.show(rest.strip())
        tell("the next message has the image")
    else:
        known = [command.split()[0] for command in COMMANDS]
        raise ConfigError(f"there is no command {name!r}{suggest(name, known)}; known are {', '.join(known)}")
    return False


def _answer(ask: Ask, chats: list[Conversation], names: list[str]) -> None:
    """Print the answers: one as it is written; two side by side on a terminal, otherwise one after the other."""
    if len(chats) > 1 and sys.stdout.isatty():
        _side_by_side(ask, chats, names)
    else:
        for each, name in zip(chats, names, strict=True):
            if len(chats) > 1:
                typer.echo(f"[{printable(name)}]")
            ask(each, tell=lambda text: typer.echo(lines(text), nl=False))
            typer.echo()
    for each, name in zip(chats, names, strict=True):
        if each.dropped:
            tell(f"({name} did not read the oldest {each.dropped} messages: its context has no room for them)")


def _side_by_side(ask: Ask, chats: list[Conversation], names: list[str]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    texts = [""] * len(chats)

    def shown() -> Any:
        table = Table.grid(expand=True)
        for _ in chats:
            table.add_column(ratio=1)
        table.add_row(*(Panel(Text(t), title=Text(printable(n))) for t, n in zip(texts, names, strict=True)))
        return table

    with Live(shown(), console=Console(), auto_refresh=False) as live:
        for at, each in enumerate(chats):

            def add(text: str, at: int = at) -> None:
                texts[at] += lines(text)
                live.update(shown(), refresh=True)

            ask(each, tell=add)
        live.vertical_overflow = "visible"  # at the end, also what the terminal has no lines for
