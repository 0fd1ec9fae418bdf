"""Estimating the memory of a run before it is started."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.console import WithOverrides
from trainkit.cli.training import parse_overrides
from trainkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from trainkit_tools.estimates import Need, Plan

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
PARTS = ("weights", "gradients", "optimizer", "reference", "passes", "cache", "total")


def estimate(
    file: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. train.microbatch_size=2.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of all machines, one process each.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of one device, e.g. 80GiB.")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt. Without it, what leaves room for the response.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Prompts or samples, of which the longest is counted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the memory that a run needs on each device by phase, and the sharding and micro-batch that fit.

    Only the model's configuration is read, no weights. Without data, sequences are taken to be as long as they may be.
    """
    limit = None if memory is None else size(memory)
    if data is not None and prompt_tokens is not None:
        raise ConfigError("--data and --prompt-tokens are given, and both say how long prompts are; give one of them")
    from trainkit.config import read_config
    from trainkit.plugins.hooks import entry_name

    config: Any = read_config(file, parse_overrides(overrides or []))
    sharding = entry_name(config.train.sharding)
    if sharding not in ("none", "fsdp2"):
        raise ConfigError(f"train.sharding is {sharding!r}, of which no memory is estimated; set it to none or fsdp2")
    with _garbage_kept():
        from trainkit.plugins import get_trainer
        from trainkit.trainer.launch import with_precision
        from trainkit_tools.estimates import choose, measure, plan

        low = getattr(get_trainer(config.method.name), "low_by_default", False)
        config = with_precision(config, "no" if gpus is None else "bf16", low=low)
        longest = {"prompt": prompt_tokens} if data is None else longest_of(data, config)
        need = measure(config, **longest, device="cpu" if gpus is None else "cuda")
        planned = plan(need, sharding, gpus or 1)
        fits = None if limit is None else choose(need, gpus or 1, limit)
    advice = "" if limit is None else _advice(need, fits, gpus or 1, limit)
    if as_json:
        typer.echo(json.dumps(_plain(need, planned, fits, limit), indent=2))
    else:
        _show(need, planned, advice)
    if limit is not None and fits is None:
        raise typer.Exit(1)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Look for no garbage: among what is imported there is none, but much to look through."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def longest_of(source: str, config: Any) -> dict[str, int]:
    """Return the most tokens that a row, its prompt and its output have, by the arguments of `measure`.

    Raises:
        DataError: training refuses rows, or there are none.
        ConfigError: neither a tokenizer nor a model is named.
    """
    from trainkit_tools.data import read_rows, reading_of
    from trainkit_tools.inspection import inspect

    reading, _ = reading_of(config, rows := read_rows(source), True, False)
    if reading.tokenizer is None:
        raise ConfigError("--data is counted in tokens; set model.model_path or tokenizer.tokenizer_path")
    found = inspect(rows, reading)
    if found.faults or not found.lengths:
        message = found.faults[0].message if found.faults else "it has no rows"
        raise DataError(f"--data {source}: {message}; trainkit data check {source} names all faults")
    if getattr(config.method, "packing", False):
        return {}  # packed rows are full
    most = {name: lengths.most for name, lengths in found.lengths.items()}
    if reading.kind == "prompts":
        return {"prompt": most["prompt"]}
    return {"tokens": most["whole"], "chosen": max(most.get(name, 0) for name in ("output", "chosen", "rejected"))}


def size(text: str) -> float:
    """Return the bytes that a text such as ``80GiB`` means.

    Raises:
        ConfigError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS or not float(found[1]):
        raise ConfigError(f"--memory is {text!r}; give a number with a unit, such as 80GiB or 24GB")
    return float(found[1]) * UNITS[found[2].upper()]


def _advice(need: Need, fits: Plan | None, processes: int, limit: float) -> str:
    """Return which settings fit, or that none does."""
    from trainkit_tools.estimates.shardings import FREE, SHARDINGS, plan

    where = f"{processes} x {limit / 1e9:.1f} GB"
    if fits is not None:
        return (
            f"fits into {where}: train.sharding={fits.sharding} train.microbatch_size={fits.rows}, with "
            f"{fits.largest.total / 1e9:.2f} GB in the phase {fits.largest.name!r} and {FREE:.0%} left free"
        )
    smallest = plan(need.with_rows(1), SHARDINGS[processes > 1], processes).largest
    return (
        f"nothing fits into {where}, of which {FREE:.0%} are left free: with train.sharding={SHARDINGS[processes > 1]} "
        f"and train.microbatch_size=1 the phase {smallest.name!r} needs {smallest.total / 1e9:.2f} GB. Set "
        "train.gradient_checkpointing=true, shorten sequences, train an adapter (model.peft_config), or use more GPUs"
    )


def _plain(need: Need, planned: Plan, fits: Plan | None, limit: float | None) -> dict[str, Any]:
    def plain(each: Plan) -> dict[str, Any]:
        phases = {phase.name: {part: round(getattr(phase, part)) for part in PARTS} for phase in each.phases}
        return {
            "sharding": each.sharding,
            "processes": each.processes,
            "microbatch_size": each.rows,
            "phases": phases,
            "largest": each.largest.name,
        }

    found = {"model": need.facts(), "plan": plain(planned)}
    return found if limit is None else {**found, "fits": None if fits is None else plain(fits)}


def _show(need: Need, planned: Plan, advice: str) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"GB on each of {planned.processes} device{'s' * (planned.processes > 1)}, train.sharding={planned.sharding}, "
        f"micro-batches of {planned.rows} x {need.lengths.tokens} tokens"
    )
    table = Table("phase", *PARTS, title=title)
    for phase in planned.phases:
        table.add_row(phase.name, *(f"{getattr(phase, part) / 1e9:.3f}" for part in PARTS))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{need.parameters:,} weights, {need.trained:,} of them trained")
    console.print(table)
    console.print(f"most: {planned.largest.total / 1e9:.3f} GB in the phase {planned.largest.name!r}")
    console.print(
        "not counted: Python and its libraries, the context of a GPU; padding; fragments, of which glibc on "
        "CPUs may keep a third more"
    )
    if advice:
        console.print(advice)


app = typer.Typer(rich_markup_mode=None)
app.command(cls=WithOverrides, epilog="Exit code: 1 if --memory is given and nothing fits, else 0.")(estimate)
