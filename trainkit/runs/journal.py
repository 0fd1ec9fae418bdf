"""The lines of a run: ``metrics.jsonl``, ``samples.jsonl`` and ``newest.jsonl`` in its directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.data.batches import is_given
from trainkit.data.images import IMAGE_COLUMNS, given_images, thumbnail, with_images
from trainkit.plugins import hookimpl

if TYPE_CHECKING:
    from trainkit.data import Rollouts, Sequences
    from trainkit.runs.view import RunView

log = logging.getLogger(__name__)

Sample = dict[str, Any]
NEWEST = 64
"""Rollouts that ``newest.jsonl`` has at most."""


def is_recorded(number: int) -> bool:
    """Return whether the rollouts of a collection are written: of the first ten, every tenth to 100, and so on."""
    return (number + 1) % int(10 ** (len(str(number + 1)) - 1)) == 0


class JsonLines:
    """``metrics.jsonl``, and ``samples.jsonl`` with every evaluated sample and the rollouts of some collections.

    ``newest.jsonl`` has the first rollouts of the newest collection, token by token.
    """

    @hookimpl
    def on_train_begin(self, trainer: RunView) -> None:
        """Remove the lines written after the checkpoint that this run resumes from: they will be written again."""
        at = trainer.progress.step or -1  # the evaluation before the first step is made again
        for name in ("metrics.jsonl", "health.jsonl"):
            _keep_lines(trainer.run_dir, name, lambda line: line["step"] <= at)
        # rollouts are collected after the checkpoint of their step, evaluations before
        for name in ("samples.jsonl", "newest.jsonl"):
            _keep_lines(trainer.run_dir, name, lambda line: line["step"] <= at - (line["kind"] == "rollout"))

    @hookimpl
    def log_metrics(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        """Append a line of metrics."""
        append(trainer.run_dir, "metrics.jsonl", [{"step": step, **metrics}])

    @hookimpl
    def on_evaluate(self, trainer: RunView, step: int, samples: list[Sample]) -> None:
        """Append a line per evaluated sample, without its tensors."""
        plain = [{key: value for key, value in sample.items() if not isinstance(value, Tensor)} for sample in samples]
        records = [{"step": step, "kind": "evaluation", **sample} for sample in plain]
        append(trainer.run_dir, "samples.jsonl", _small(records))

    @hookimpl
    def on_experience(self, trainer: RunView, rollouts: list[Rollouts], experience: Any) -> None:
        """Append a line for each rollout of a collection that `is_recorded`, and replace those of the newest one.

        The rollouts are those of this process.
        """
        if not rollouts or trainer.run_dir is None:
            return
        recorded, count = is_recorded(trainer.collector.collection.number), sum(map(len, rollouts))
        at = {"step": trainer.progress.step, "kind": "rollout"}
        known = islice(chain.from_iterable(map(_records, rollouts)), None if recorded else NEWEST)
        records = _small([{**at, **record} for record in known])
        advantages = _advantages(experience)
        if len(advantages) == count:  # an algorithm may make other rows than one for each response
            records = [{**each, "advantage": value} for each, value in zip(records, advantages, strict=False)]
        if recorded:
            append(trainer.run_dir, "samples.jsonl", records)
        tokens = islice(_tokens(trainer, rollouts, experience, count), NEWEST)
        newest = [{**each, "tokens": of_each} for each, of_each in zip(records, tokens, strict=False)]
        append(trainer.run_dir, ".newest.jsonl", newest or records[:NEWEST], mode="w")
        (trainer.run_dir / ".newest.jsonl").replace(trainer.run_dir / "newest.jsonl")


def append(run_dir: Path | None, name: str, records: list[dict[str, Any]], mode: str = "a") -> None:
    """Append records to a file of the run's directory, a line each; do nothing without a directory."""
    if run_dir is None:
        return
    with (run_dir / name).open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(record, default=_plain) + "\n" for record in records)


def _plain(value: Any) -> Any:
    """Return what JSON has no form for, as a list, a number, or text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _keep_lines(run_dir: Path | None, name: str, keeps: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the lines of a file that are not ``keeps``, and an incomplete last line.

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
            if keeps(json.loads(line)):
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


def _small(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records with thumbnails in the place of images; those of responses to one prompt are made once."""
    made: dict[int, list[str]] = {}
    for at, record in enumerate(records):
        columns = record.get("columns") or {}
        if images := given_images(columns):
            known = next(columns[name] for name in IMAGE_COLUMNS if is_given(columns.get(name)))
            small = made.get(id(known)) or made.setdefault(id(known), [thumbnail(image) for image in images])
            records[at] = {**record, "columns": with_images(columns, small)}
    return records


def _advantages(experience: Any) -> list[float]:
    """Return the advantage of each row: of advantages per token, the mean over those of the response."""
    advantages, sequences = (getattr(experience, name, None) for name in ("advantages", "sequences"))
    if not isinstance(advantages, Tensor):
        return []
    if advantages.dim() == 1:
        return [float(value) for value in advantages]
    mask = getattr(sequences, "response_mask", None)
    return (
        []
        if mask is None
        else [float(value) for value in advantages.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)]
    )


def _tokens(trainer: RunView, rollouts: list[Rollouts], experience: Any, count: int) -> Iterator[dict[str, list[Any]]]:
    """Yield what is known of the tokens of each response: text, log-probability, advantage, KL from the reference."""
    sequences, tokenizer = getattr(experience, "sequences", None), getattr(trainer, "tokenizer", None)
    if tokenizer is None:
        return
    if sequences is None or len(sequences) != count:  # other rows than one for each response
        parts = [(part.sequences, {"logprob": part.logprobs}) for part in rollouts]
    else:
        logprobs, advantages = (getattr(experience, name, None) for name in ("old_logprobs", "advantages"))
        reference = trainer.collector.collection.ref_logprobs if trainer.needs_reference else None
        kl = None if logprobs is None or reference is None else logprobs - reference
        parts = [(sequences, {"logprob": logprobs, "advantage": advantages, "kl": kl})]
    for of_part, known in parts:
        yield from _of_tokens(tokenizer, of_part, known)


def _of_tokens(
    tokenizer: Any, sequences: Sequences, known: Mapping[str, Tensor | None]
) -> Iterator[dict[str, list[Any]]]:
    """Yield columns of the response tokens of the first rows; values [B] are those of all tokens of a response."""
    mask = sequences.response_mask[:NEWEST]
    columns: dict[str, Sequence[Any]] = {"text": _texts(tokenizer, sequences.input_ids[:NEWEST][mask].tolist())}
    for name, values in known.items():
        if values is not None:
            wide = values[:NEWEST] if values.dim() > 1 else values[:NEWEST, None].expand_as(mask)
            columns[name] = [float(f"{value:.4g}") for value in wide[mask].tolist()]
    end = 0
    for length in mask.sum(1).tolist():
        start, end = end, end + length
        yield {name: list(values[start:end]) for name, values in columns.items()}


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token as text, with the space before it, which some tokenizers remove at the beginning of a text."""
    first = tokenizer.decode(ids[:1])
    texts = {each: tokenizer.decode([ids[0], each])[len(first) :] for each in set(ids)}
    return [texts[each] for each in ids]
