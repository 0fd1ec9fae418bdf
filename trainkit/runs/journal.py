"""The lines of a run: ``metrics.jsonl`` and ``samples.jsonl`` in its directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.plugins import hookimpl

if TYPE_CHECKING:
    from trainkit.data import Rollouts
    from trainkit.runs.view import RunView

log = logging.getLogger(__name__)

Sample = dict[str, Any]


def is_recorded(number: int) -> bool:
    """Return whether the rollouts of a collection are written: of the first ten, every tenth to 100, and so on."""
    return (number + 1) % int(10 ** (len(str(number + 1)) - 1)) == 0


class JsonLines:
    """``metrics.jsonl``, and ``samples.jsonl`` with every evaluated sample and the rollouts of some collections."""

    @hookimpl
    def on_train_begin(self, trainer: RunView) -> None:
        """Remove the lines written after the checkpoint that this run resumes from: they will be written again."""
        at = trainer.progress.step or -1  # the evaluation before the first step is made again
        for name in ("metrics.jsonl", "health.jsonl"):
            _keep_lines(trainer.run_dir, name, lambda line: line["step"] <= at)
        # rollouts are collected after the checkpoint of their step, evaluations before
        _keep_lines(trainer.run_dir, "samples.jsonl", lambda line: line["step"] <= at - (line["kind"] == "rollout"))

    @hookimpl
    def log_metrics(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        """Append a line of metrics."""
        append(trainer.run_dir, "metrics.jsonl", [{"step": step, **metrics}])

    @hookimpl
    def on_evaluate(self, trainer: RunView, step: int, samples: list[Sample]) -> None:
        """Append a line per evaluated sample, without its tensors."""
        plain = [{key: value for key, value in sample.items() if not isinstance(value, Tensor)} for sample in samples]
        records = [{"step": step, "kind": "evaluation", **sample} for sample in plain]
        append(trainer.run_dir, "samples.jsonl", records)

    @hookimpl
    def on_experience(self, trainer: RunView, rollouts: list[Rollouts], experience: Any) -> None:
        """Append a line for each rollout of a collection that `is_recorded`, on this process."""
        if not is_recorded(trainer.collector.collection.number):
            return
        at = {"step": trainer.progress.step, "kind": "rollout"}
        records = [{**at, **record} for part in rollouts for record in _records(part)]
        advantages = _advantages(experience)
        if len(advantages) == len(records):  # an algorithm may make other rows than one for each response
            records = [{**record, "advantage": value} for record, value in zip(records, advantages, strict=True)]
        append(trainer.run_dir, "samples.jsonl", records)


def append(run_dir: Path | None, name: str, records: list[dict[str, Any]]) -> None:
    """Append records to a file of the run's directory, a line each; do nothing without a directory."""
    if run_dir is None:
        return
    with (run_dir / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, default=_plain) + "\n" for record in records)


def _plain(value: Any) -> Any:
    """Return what JSON has no form for, as a list, a number, or text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _keep_lines(run_dir: Path | None, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the lines of a file that are not ``wanted``, and an incomplete last line.

    Lines that cannot be read are moved to ``NAME.corrupt``, with a warning.
    """
    if run_dir is None or not (run_dir / name).exists():
        return
    lines = (run_dir / name).read_bytes().splitlines(keepends=True)
    kept: list[bytes] = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue
        try:
            if wanted(json.loads(line)):
                kept.append(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning(
                "line %d of %s cannot be read (%s); it is moved to %s.corrupt", number, run_dir / name, error, name
            )
            with (run_dir / f"{name}.corrupt").open("ab") as aside:
                aside.write(line)
    if len(kept) < len(lines):
        (run_dir / f".{name}").write_bytes(b"".join(kept))
        (run_dir / f".{name}").replace(run_dir / name)


def _records(part: Rollouts) -> Iterator[dict[str, Any]]:
    """Yield what is known about each rollout; a plugin's own rollouts may have texts alone."""
    columns, judged, turns = (getattr(part, name, None) for name in ("columns", "judged", "turns"))
    for index, (prompt, output) in enumerate(zip(part.prompts, part.outputs, strict=True)):
        yield {
            "prompt": prompt,
            "output": output,
            **(judged[index] if judged else {}),
            **({"columns": {name: values[index] for name, values in columns.items()}} if columns else {}),
            **({"episode": turns[index]} if turns else {}),
        }


def _advantages(experience: Any) -> list[float]:
    """Return the advantage of each row: of advantages per token, the mean over those of the response."""
    found, sequences = (getattr(experience, name, None) for name in ("advantages", "sequences"))
    if not isinstance(found, Tensor):
        return []
    if found.dim() == 1:
        return [float(value) for value in found]
    mask = getattr(sequences, "response_mask", None)
    return (
        []
        if mask is None
        else [float(value) for value in found.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)]
    )
