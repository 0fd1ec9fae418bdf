"""Checking datasets: what training would make of their rows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.console import RemoteCode, WithOverrides, complete_method, lines, mark
from trainkit.cli.files import kind_of, read_data, text_lines
from trainkit.cli.training import parse_overrides
from trainkit.errors import ConfigError, DataError, PluginError, RegistryError, printable
from trainkit.plugins import load_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.config import TRLConfig
    from trainkit_tools.inspection import Found, Inspection, Lengths, Part, Reading

EXIT_OF_CHECK = (
    "Exit code: 1 if training would refuse the data, or with --strict if anything else is found; 2 if the settings are "
    "not valid; else 0."
)
SHOWN = 10
"""Faults that are printed."""
LONGEST = 2000
"""Characters of a piece of the example that are printed."""
WIDTH = 40
"""The length of the longest bar of a histogram."""
MEANINGS = {
    "truncated": "truncated",
    "dropped": "too long and dropped (rollout.overlong_prompts is 'drop')",
    "empty": "with an output of nothing but blanks and EOS",
    "equal": "with the same chosen and rejected output, which are skipped",
    "duplicate": "the same as a row before",
    "contradictory": "the same as a row before but for the label, or for chosen and rejected, which are swapped",
}
"""What is said of rows that training accepts and may not be meant."""
NOTES = {
    "repeated prompt": "with the prompt of a row before and another output",
    "no prompt": "without a prompt, which the environment gives",
    "apart": "with answers that the chat template writes differently when others follow: each is a row of its own",
}
"""What is said of rows that are as common as not, and no fault even if checks are strict."""
BLOCKS = " ▁▂▃▄▅▆▇█"
"""Bars of a histogram within a line."""
LOST = {"no room": "no room for an output"}
"""What is said of rows that are refused because of truncation."""


def check_data(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A file, a directory, or a hub id, as for trainkit train.", show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. train.seq_length=512 data.ignore_columns=[id]."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The algorithm to learn from it.", autocompletion=complete_method),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A directory or hub id, whose tokenizer and context count."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A configuration, for its settings.")] = None,
    environment: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="The environment that gets the rows; it may give their prompts."),
    ] = None,
    row: Annotated[int | None, typer.Option(metavar="N", min=0, help="The row to show, from 0.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with exit code 1 if anything is found.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Print what training would make of data: format, columns, lengths, truncation, repetition, and faults of all rows.

    A method decides what the rows are for: samples, samples with labels, pairs, or prompts. Without one, the format of
    the first row does. Without a model, lengths are in characters and words.
    """
    rows = read_rows(source)
    played = environment is not None and load_function(environment) is not None
    settled, named = _settle(config, method, model, overrides or [], rows, played)
    settled = settled.settled(trust_remote_code=trust_remote_code)
    reading, why = reading_of(settled, rows, named, played)
    if row is not None and row >= len(rows):
        are = "is" if len(rows) == 1 else "are"
        raise ConfigError(f"--row is {row}, and there {are} {_rows(len(rows))}; rows are numbered from 0")
    from trainkit_tools.inspection import inspect

    with _progress(len(rows)) as progress:
        found = inspect(rows, reading, shown=row, progress=progress)
    warnings = _warnings(found)
    failed = bool(found.faults) or (strict and bool(warnings))
    if as_json:
        told = {"source": source, "read_as": why, "passed": not failed, "warnings": warnings}
        typer.echo(json.dumps({**told, **asdict(found)}, indent=2))
    else:
        for line in _report(found, why, source, row, strict):
            typer.echo(line, color=_coloured() or None)
    if failed:
        raise typer.Exit(1)


def read_rows(source: str) -> Sequence[Any]:
    """Return the rows; of a file with lines that are not JSON, the error names them all."""
    try:
        return read_data(source)
    except DataError as error:
        try:
            wrong = wrong_lines(Path(source))
        except DataError:
            wrong = []
        if len(wrong) < 2:
            raise
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        named = ", ".join(map(str, wrong[:SHOWN]))
        raise DataError(f"{error}\n{len(wrong)} lines are not JSON: {named}{more}") from error


def row_lines(path: Path) -> list[int]:
    """Return the number of each row's line; none of a file that has not a row per line."""
    by_line = kind_of(path) if path.is_file() else ""
    if by_line not in (".jsonl", ".txt"):
        return []
    return [at for at, line in enumerate(text_lines(path), start=1) if by_line == ".txt" or line.strip()]


def wrong_lines(path: Path) -> list[int]:
    """Return the numbers of the lines of a ``.jsonl`` file that are not JSON; none of another file."""
    wrong = []
    for at, line in enumerate(text_lines(path) if kind_of(path) == ".jsonl" and path.is_file() else [], start=1):
        try:
            json.loads(line.strip() or "null")
        except (ValueError, RecursionError):
            wrong.append(at)
    return wrong


# ----------------------------------------------------------------------------------------------- how the rows are read


def _settle(
    file: Path | None, method: str | None, model: str | None, overrides: list[str], rows: Sequence[Any], played: bool
) -> tuple[TRLConfig[Any], bool]:
    """Return the configuration whose settings count, and whether its method is named, or else follows from the data."""
    from trainkit.config import MethodConfig, TRLConfig, default_config, read_config
    from trainkit.config.tree import merged, nest

    changes = parse_overrides(overrides)
    named = changes.get("method.name") or changes.get("method")
    if model is not None and (other := changes.setdefault("model.model_path", model)) != model:
        raise ConfigError(f"--model is {model!r} and model.model_path={other!r}; give one of the two")
    if file is not None:
        settled = read_config(file, changes)
        if method is not None and method.lower() != settled.method.name:
            raise ConfigError(
                f"--method is {method!r} and the method of {file} is {settled.method.name!r}; give one of the two"
            )
        return settled, True
    if method is not None or isinstance(named, str):
        return default_config(method or str(named)).update(changes), True
    usual = _usual(rows, changes.get("data.ignore_columns"), played)
    if _trainer(usual, needed=False) is not None:
        return default_config(usual).update(changes), False
    sections: dict[str, Any] = {}
    for key, value in changes.items():
        sections = merged(sections, nest(key, value))
    return TRLConfig(method=MethodConfig(name=usual), **sections), False  # the format says enough


def _trainer(name: str, *, needed: bool) -> Any:
    """Return the trainer class of a method; None if it is not needed and cannot be used."""
    from trainkit.plugins import get_trainer

    try:
        return get_trainer(name)
    except (PluginError, RegistryError):
        if needed:
            raise
        return None


def _usual(rows: Sequence[Any], ignored: Any, played: bool) -> str:
    """Return the method of `trainkit.train` for such rows, with an environment if they are ``played``."""
    from trainkit.api import usual_method
    from trainkit_tools.inspection import usual_kind

    ignored = ignored if isinstance(ignored, list) else []
    given = ["prompts", "reward_fn"] if played or usual_kind(rows, ignored) == "prompts" else ["samples"]
    return usual_method(given, rows, {"data": {"ignore_columns": ignored}})


def reading_of(config: TRLConfig[Any], rows: Sequence[Any], named: bool, played: bool) -> tuple[Reading, str]:
    """Return how the rows are read, and in words as what, and why; ``played``: there is an environment."""
    from trainkit_tools.inspection import Reading, kind_of, usual_kind

    name, ignored = config.method.name, tuple(config.data.ignore_columns)
    trainer = _trainer(name, needed=named)
    inputs = () if trainer is None else trainer.inputs_for(config.method)
    kind = kind_of(inputs) if inputs else "prompts" if played else usual_kind(rows, ignored)
    scored = not inputs or bool({"reward_fn", "environment"} & {*inputs})
    if played and not (scored and kind == "prompts"):
        raise ConfigError(f"method {name!r} learns from {' and '.join(inputs)}, not from an environment; remove it")
    why = f"method {name!r} learns from {' and '.join(inputs)}"
    if not named and not played:
        why = f"the format of the first row; {name!r} is the method for it if none is named"
    why = f"{f'samples with {kind}' if kind in ('labels', 'rewards') else kind} ({why})"
    reading = Reading(
        kind=kind,
        columns=tuple(getattr(trainer, "columns", ())),
        ignored=ignored,
        scored=scored,
        answered={"samples", "prompts"} <= {*inputs},
        needed=not (played or "environment" in inputs),
        check=getattr(trainer, "check_samples", None) if _is_checked(trainer) else None,
        omitted=_own_checks(name, trainer),
        **(
            _limits(config, kind, getattr(trainer, "generates", True))
            if trainer is None or hasattr(trainer, "columns")
            else {}
        ),
    )
    return reading, why


def _own_checks(name: str, trainer: Any) -> tuple[str, ...]:
    """Return in words what only training checks: what the algorithm's class adds to the reading of data."""
    if trainer is None:
        return (f"what {name!r} checks itself of its samples: it cannot be used here",)
    if not hasattr(trainer, "columns"):
        return (f"lengths in tokens: {name!r} has its own way to read text",)
    reads = next(base for base in trainer.__mro__ if "read_samples" in vars(base))
    if reads.__module__.partition(".")[0] != "trainkit":
        return (f"what {name!r} checks itself of its samples",)
    return ()


def _is_checked(trainer: Any) -> bool:
    """Return whether the algorithm's class has a check of its own, besides its way to read samples."""
    own = next((base for base in getattr(trainer, "__mro__", ()) if "check_samples" in vars(base)), None)
    return own is not None and own.__module__.partition(".")[0] != "trainkit"


def _limits(config: TRLConfig[Any], kind: str, generates: bool) -> dict[str, Any]:
    """Return the tokenizer and what follows from the model, as far as a model or tokenizer is named."""
    from trainkit.models import load_tokenizer
    from trainkit.models.loading import coming_eos, count_virtual, length_limit, load_model_config

    if not isinstance(config.tokenizer.tokenizer_path or config.model.model_path, str):
        return {}
    tokenizer, is_encoder_decoder, limit, ends = load_tokenizer(config), False, config.train.seq_length, list[int]()
    if config.model.model_path is not None:
        model = load_model_config(config.model)
        is_encoder_decoder, limit = (
            bool(model.is_encoder_decoder),
            length_limit(model, limit, count_virtual(config.model)),
        )
        ends = coming_eos(config.model, None, model) if generates else ends
    if kind == "prompts" and limit is not None and not is_encoder_decoder:
        limit -= config.rollout.max_new_tokens
        if limit < 1:
            raise ConfigError(
                f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, which leaves no room for a prompt within "
                f"{limit + config.rollout.max_new_tokens} tokens; lower it"
            )
    overlong = config.rollout.overlong_prompts
    return {
        "tokenizer": tokenizer,
        "limit": limit,
        "is_encoder_decoder": is_encoder_decoder,
        "ends": tuple(ends),
        "overlong": overlong,
    }


# ---------------------------------------------------------------------------------------------------------- the report


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal; yield a function that moves it by a number of rows."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda count: bar.advance(task, count)


def _coloured() -> bool:
    """Return whether the output is a terminal that shows colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _warnings(found: Inspection) -> list[str]:
    """Return what training accepts and may not be meant, in sentences."""
    warnings = []
    for name, meaning in MEANINGS.items():
        if name in found.findings:
            some = found.findings[name]
            lost = f", which removes {found.tokens_lost} tokens: {found.lost}" if name == "truncated" else ""
            warnings.append(f"{_rows(some.count)} {meaning}{lost} ({_indices(some)})")
    for name, some in found.findings.items():
        kind, _, part = name.partition(" ")
        if kind == "unrendered":
            warnings.append(
                f"{_rows(some.count)} with {part} that the chat template does not render ({_indices(some)})"
            )
    unread = [name for name, uses in found.columns.items() if "not read" in uses]
    if unread:
        warnings.append(f"nothing reads the column{'s' * (len(unread) > 1)} {', '.join(map(repr, unread))}")
    return warnings


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def _indices(some: Found, line_of: Sequence[int] = ()) -> str:
    """Return the numbers of the first rows, and the line of one alone."""
    first = some.rows[:SHOWN]
    more = f" and {some.count - len(first)} more" if some.count > len(first) else ""
    at = f", line {line_of[first[0]]}" if line_of and some.count == 1 else ""
    return f"row{'s' * (some.count > 1)} {', '.join(map(str, first))}{more}{at}"


def _report(found: Inspection, why: str, source: str, asked: int | None, strict: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    forms = ", ".join(f"{count} {form}" for form, count in found.formats.items())
    yield printable(f"{source}: {_rows(found.rows)}{f': {forms}' if forms else ''}")
    yield f"read as {why}"
    if found.labels:
        yield "labels: " + ", ".join(f"{count} {label}" for label, count in found.labels.items())
    if found.rewards:
        least, mean, most = found.rewards
        yield f"rewards: {least:.4g} to {most:.4g}, mean {mean:.4g}"
    yield from _columns(found)
    yield from _lengths(found)
    yield from _example(found, asked)
    yield ""
    warnings = _warnings(found)
    yield from (printable(f"! {sentence}") for sentence in warnings)
    for name, meaning in NOTES.items():
        if some := found.findings.get(name):
            yield f"  {_rows(some.count)} {meaning} ({_indices(some)})"
    if found.faults:
        yield from _faults(found, row_lines(Path(source)))
        return
    yield f"{mark(True)} training accepts all rows{', as far as they are checked' * bool(found.omitted)}"
    if strict and warnings:
        yield f"{mark(False)} with --strict, what is marked by ! is a fault"


def _columns(found: Inspection) -> Iterator[str]:
    if not found.columns:
        return
    yield ""
    yield "columns:"
    wide = max(map(len, map(printable, found.columns)))
    for name, uses in found.columns.items():
        yield f"  {printable(name):{wide}}  " + "; ".join(f"{_rows(count)}: {use}" for use, count in uses.items())


def _lengths(found: Inspection) -> Iterator[str]:
    yield from [""] if found.omitted else []
    for each in found.omitted:
        yield f"omitted: {printable(each)}"
    if not found.lengths:
        return
    yield ""
    room = "leave room for the response" if found.kind == "prompts" else "are read of a row"
    yield f"lengths in {found.unit}" + (f" (at most {found.limit} {room}):" if found.limit else ":")
    yield from _table(found.lengths)
    if found.words:
        yield "lengths in words:"
        yield from _table(found.words)
    name = "whole" if "whole" in found.lengths else next(iter(found.lengths))
    yield ""
    yield from _histogram(name, found.lengths[name])


def _table(distributions: dict[str, Lengths]) -> Iterator[str]:
    """Yield the lines of a table of lengths, each with a small histogram from the shortest to the longest."""
    bars = _can_print(BLOCKS)
    yield f"  {'':8} {'min':>7} {'median':>7} {'mean':>7} {'95 %':>7} {'max':>7}{'  min to max' * bars}"
    for name, lengths in distributions.items():
        numbers = (lengths.least, lengths.median, lengths.mean, lengths.percentile_95, lengths.most)
        cells = [f"{number:7.4g}" if number < 1e4 else f"{number:7.0f}" for number in numbers]
        most = max(lengths.counts)
        shape = "".join(BLOCKS[-(-(len(BLOCKS) - 1) * count // most)] for count in lengths.counts)
        yield f"  {name:8} {' '.join(cells)}{f'  {shape}' * bars}"


def _can_print(text: str) -> bool:
    return "?" not in text.encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii")


def _histogram(name: str, lengths: Lengths) -> Iterator[str]:
    """Yield the bars of a histogram of the lengths of rows."""
    block = "█" if _can_print("█") else "#"
    ends = [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(lengths.bounds)]
    wide, most = max(map(len, ends)), max(lengths.counts)
    yield f"  {name}:"
    for end, count in zip(ends, lengths.counts, strict=True):
        bar = block * (-(-WIDTH * count // most))
        yield f"  {end:>{wide}} {bar}{' ' * bool(bar)}{count}"


def _example(found: Inspection, asked: int | None) -> Iterator[str]:
    if found.example_row is None:
        if asked is not None:
            yield ""
            yield f"row {asked} is refused, so it is not shown"
        return
    yield ""
    how = "green and bold" if _coloured() else "in [[ ]]"
    yield f"row {found.example_row}, with what is trained on {how}:"
    for side, parts in found.example.items():
        yield f"  {side}:"
        yield "".join(map(_part, parts))


def _part(part: Part) -> str:
    text, trained = part
    cut = f" ... ({len(text) - LONGEST} more characters) ... "
    text = lines(text if len(text) <= LONGEST else text[: LONGEST // 2] + cut + text[-LONGEST // 2 :])
    if _coloured():
        return typer.style(text, fg="green", bold=True) if trained else typer.style(text, dim=True)
    return f"[[{text}]]" if trained else text


def _faults(found: Inspection, line_of: Sequence[int]) -> Iterator[str]:
    """Yield what training refuses; the rows of some files have lines of their own."""
    from trainkit_tools.inspection import EXPECTED_AS

    which = f"{found.refused} of {_rows(found.rows)}" if found.refused else "the data"
    yield f"{mark(False)} training refuses {which}; expected are {EXPECTED_AS[found.kind]}"
    for name, meaning in LOST.items():
        if some := found.findings.get(name):
            yield f"  {_rows(some.count)} with {meaning} within {found.limit} tokens ({_indices(some)})"
    for fault in found.faults[:SHOWN]:
        yield lines(f"  {f'{_indices(fault, line_of)}: ' if fault.rows else ''}{fault.message}")
    if len(found.faults) > SHOWN:
        rest = found.faults[SHOWN:]
        yield f"  and {len(rest)} more kinds of faults, of {sum(each.count for each in rest)} rows; --json prints them"


app = typer.Typer(help="Check datasets before training.", no_args_is_help=True, rich_markup_mode=None)
app.callback()(lambda: None)  # a group, though it has one command
app.command("check", cls=WithOverrides, epilog=EXIT_OF_CHECK)(check_data)
