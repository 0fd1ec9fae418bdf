"""The model card of an export, ``README.md``: how to load the model, its provenance, evaluation and configuration."""

from __future__ import annotations

import html
import math
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainkit.config import Plain
from trainkit.errors import printable
from trainkit.plain import to_yaml
from trainkit.runs.provenance import said
from trainkit.runs.record import Record, main_metric
from trainkit.security import is_secret

if TYPE_CHECKING:
    from trainkit.runs.view import RunView

P = TypeVar("P")
CARD = "README.md"
ROWS = 10
"""Steps at most of which the card shows the main metric."""
BARS = "▁▂▃▄▅▆▇█"
"""The curve of the main metric is made of these."""
WIDTH = 48
"""Steps at most of the curve."""
OURS = "<!-- Every export by trainkit writes this file anew. Remove this line to keep what you change. -->"
"""The line that marks a model card as written by trainkit, not by hand."""
LIBRARIES = ("torch", "transformers")


def write(trainer: RunView, building: Path, target: Path) -> None:
    """Write the model card of an export into ``building``, replacing any that a library has written there.

    A card in ``target``, the destination of the export, is kept if it was written by hand.
    """
    if written_by_hand(target / CARD):
        (building / CARD).unlink(missing_ok=True)
    else:
        (building / CARD).write_text(model_card(trainer), encoding="utf-8")


def written_by_hand(path: Path) -> bool:
    """Return whether there is a model card at ``path`` that trainkit did not write."""
    return path.exists() and OURS not in path.read_text(encoding="utf-8", errors="replace")


def model_card(trainer: RunView) -> str:
    """Return the text of the model card.

    Equal runs with equal libraries give equal cards, on any machine.
    """
    from huggingface_hub import ModelCardData

    method, kind = trainer.config.method.name, trainer.model_card()
    base, steps = base_model(trainer), trainer.progress.step
    fields = {name: value for name, value in kind.items() if name != "loading" and value}
    front = ModelCardData(base_model=base, tags=["trainkit", method], **fields)  # type: ignore[arg-type]
    parts = [
        f"---\n{front.to_yaml()}\n---\n{OURS}\n",
        f"# A model trained by {_cell(method)}\n",
        f"Trained{f' from `{base}`' * (base is not None)} with trainkit, for {steps} step{'s' * (steps != 1)}.\n",
        _loading(method, kind.get("loading")),
        _table("## Provenance", _facts(trainer)),
        _training(trainer),
        _evaluation(trainer),
        f"## Configuration\n\n{fenced(to_yaml(public_config(trainer.config.to_dict())), 'yaml')}",
    ]
    return "\n".join(part for part in parts if part)


def base_model(trainer: RunView) -> str | None:
    """Return the hub id of the model that the run started from, or None if it has none."""
    live = trainer.live_model
    path = trainer.config.model.model_path if live is None else _name(live)
    named = isinstance(path, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)
    return str(path) if named and not Path(str(path)).exists() else None


def _name(live: Any) -> Any:
    return getattr(getattr(live, "pretrained_model", live), "name_or_path", None)


def public_config(config: Plain) -> Plain:
    """Return a configuration without the settings that tell where a run was or who ran it."""
    train = {name: value for name, value in config["train"].items() if name not in ("run_dir", "resume")}
    loaded = {part: {**config[part], "kwargs": _shared(config[part]["kwargs"])} for part in ("model", "tokenizer")}
    return {**config, **loaded, "train": train}


def _shared(kwargs: Plain) -> Plain:
    return {name: value for name, value in kwargs.items() if name != "cache_dir" and not is_secret(name)}


def _loading(method: str, code: str | None) -> str:
    again = (
        f"To train the model further, set `model.model_path` to this directory or to the id of its repository "
        f"(it was trained with the method {_cell(method)}).\n"
    )
    if code is None:
        return f"## Loading the model\n\n{again}"
    return (
        "## Loading the model\n\n`directory` is this directory, or the id of its repository.\n\n"
        f"{fenced(code, 'python')}\n{again}"
    )


def _facts(trainer: RunView) -> dict[str, str]:
    core, *plugins = trainer.identity.makers
    method = {"method": trainer.config.method.name}
    method |= {f"plugin {plugin['name']}": said(plugin) for plugin in plugins}
    method |= {"trainkit": str(core["version"])}
    method |= {name: version(name) for name in LIBRARIES}
    ended = {"ended early": trainer.progress.stop_reason} if trainer.progress.stop_reason else {}
    return {**method, "steps": str(trainer.progress.step), **ended, "samples": str(trainer.progress.trained)}


def _training(trainer: RunView) -> str:
    """Return a curve and a table of the main metric over the steps so far; empty if none is recorded."""
    series = Record(trainer.run_dir).series if trainer.run_dir is not None else {}
    if (metric := main_metric(series)) is None:
        return ""
    points = [*series[metric].items()]
    shown = {str(step): f"{value:.4g}" for step, value in thinned(points, ROWS)}
    title, line = f"## Training: {_cell(metric)} by step", curve([value for _, value in points])
    return _table(f"{title}\n\n{line}" if line else title, shown)


def thinned(points: list[P], most: int) -> list[P]:
    """Return at most so many of the points, evenly, with the last one."""
    *before, last = points
    return [*before[:: max(math.ceil(len(before) / (most - 1)), 1)], last]


def curve(values: list[float]) -> str:
    """Return the curve of a metric as a line of bars, between its smallest and largest value; empty for less than 3."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 3:
        return ""
    low, high = min(known), max(known)
    places = [int((value - low) / ((high - low) or 1) * (len(BARS) - 1) + 0.5) for value in thinned(known, WIDTH)]
    return f"`{''.join(BARS[place] for place in places)}` from {low:.4g} (lowest) to {high:.4g} (highest bar)"


def _evaluation(trainer: RunView) -> str:
    at, metrics = trainer.progress.evaluated, trainer.progress.evaluation
    numbers = {
        name.removeprefix("eval/"): f"{value:.4g}"
        for name, value in sorted(metrics.items(), key=lambda item: (item[0] != main_metric(sorted(metrics)), item[0]))
        if not name.startswith("eval/time")
    }
    return _table(f"## The last evaluation, after step {at}", numbers) if numbers else ""


def _table(title: str, cells: dict[str, str]) -> str:
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in cells.items()]
    return "\n".join([f"{title}\n", "| | |", "|---|---|", *lines, ""])


def _cell(text: str) -> str:
    """Return ``text`` on one line of Markdown, without any effect as markup or HTML."""
    line = " ".join(printable(text).split())
    return html.escape(re.sub(r"[\\`*\[\]|~!#$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line), quote=False)


def fenced(text: str, language: str) -> str:
    """Return ``text`` as a fenced Markdown block; the fence is longer than any fence in the text."""
    longest = max((len(ticks) for ticks in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"
