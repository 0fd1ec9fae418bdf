"""The lines of a run: ``metrics.jsonl`` and ``samples.jsonl`` in its directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.plugins import hookimpl

if TYPE_CHECKING:
    from trainkit.data import Rollouts
    from trainkit.trainer.loop import AcceleratedLoop

    Trainer = AcceleratedLoop[Any]

log = logging.getLogger(__name__)

Sample = dict[str, Any]

FEW = 4
"""The number of rollouts of a collection that are written."""


class JsonLines:
    """``metrics.jsonl``, and ``samples.jsonl`` with every evaluated sample and the first rollouts of collections."""

    @hookimpl
    def on_train_begin(self, trainer: Trainer) -> None:
        """Remove the lines written after the checkpoint that this run resumes from: they will be written again."""
        at = trainer.progress.step or -1  # the evaluation before the first step is made again
        for name in ("metrics.jsonl", "health.jsonl"):
            _keep_lines(trainer.run_dir, name, lambda line: line["step"] <= at)
        # rollouts are collected after the checkpoint of their step, evaluations before
        _keep_lines(trainer.run_dir, "samples.jsonl", lambda line: line["step"] <= at - (line["kind"] == "rollout"))

    @hookimpl
    def log_metrics(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Append a line of metrics."""
        append(trainer.run_dir, "metrics.jsonl", [{"step": step, **metrics}])

    @hookimpl
    def on_evaluate(self, trainer: Trainer, step: int, samples: list[Sample]) -> None:
        """Append a line per evaluated sample, without its tensors."""
        plain = [{key: value for key, value in sample.items() if not isinstance(value, Tensor)} for sample in samples]
        records = [{"step": step, "kind": "evaluation", **sample} for sample in plain]
        append(trainer.run_dir, "samples.jsonl", records)

    @hookimpl
    def on_experience(self, trainer: Trainer, rollouts: list[Rollouts]) -> None:
        """Append a line for each of the first few rollouts of a collection."""
        step = trainer.progress.step
        records = [
            {"step": step, "kind": "rollout", "prompt": prompt, "output": output}
            for prompt, output in islice(_texts(rollouts), FEW)
        ]
        episodes = chain.from_iterable(getattr(part, "turns", None) or [] for part in rollouts)
        for record, turns in zip(records, episodes, strict=False):
            record["episode"] = turns
        append(trainer.run_dir, "samples.jsonl", records)


def append(run_dir: Path | None, name: str, records: list[dict[str, Any]]) -> None:
    """Append records to a file of the run's directory, a line each; do nothing without a directory."""
    if run_dir is None:
        return
    with (run_dir / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


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


def _texts(rollouts: Iterable[Rollouts]) -> Iterator[tuple[str, str]]:
    return chain.from_iterable(zip(part.prompts, part.outputs, strict=True) for part in rollouts)
