"""The output of frozen lower layers in an offline collection: whether it is kept with the rows, which use it again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from trainkit.data import Batch, Sequences

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    Trainer = AccelerateRLTrainer[Any]

B = TypeVar("B", bound=Batch)

log = logging.getLogger(__name__)

SHARE = 0.5
"""The largest part of the available memory that the output may take, counted twice, because joining rows copies it."""


def begin(trainer: Trainer, rows: int) -> None:
    """Begin a collection of ``rows`` rows in this process: decide whether their output would be used again.

    It is by a second pass, or by the reference, if that is the model's start. A run that resumes does what it did.
    """
    policy = trainer.unwrapped
    again = trainer.passes != 1 or (trainer.needs_reference and trainer.chosen_reference is None)
    keeps = bool(rows) and again and getattr(policy, "has_trunk", False) and not trainer.sharding.keeps_sharded
    recorded = trainer.run_state.recorded_trunk
    trainer.progress.keeps_trunk = keeps if recorded is None else recorded
    trainer.collected_rows, trainer.run_state.recorded_trunk = rows, None
    trainer.checks_memory = recorded is None


def with_trunk(trainer: Trainer, batch: B) -> B:
    """Return a batch of the collection at hand whose sequences have the output of the frozen layers, if it is kept."""
    if trainer.progress.keeps_trunk and trainer.checks_memory:
        _check(trainer, batch)
    return _each(batch, trainer.unwrapped.through_trunk) if trainer.progress.keeps_trunk else without_trunk(batch)


def _check(trainer: Trainer, batch: Batch) -> None:
    """Give up keeping the output, for the whole collection, if it does not fit into memory; log it."""
    parameter = next(trainer.unwrapped.parameters())
    width = trainer.unwrapped.model.config.get_text_config().hidden_size
    tokens = sum(part.input_ids.size(1) for part in _sequences(batch)) * trainer.collected_rows
    needed, free = 2 * tokens * width * parameter.element_size(), psutil.virtual_memory().available
    if needed <= SHARE * free:
        return
    trainer.progress.keeps_trunk = False
    trainer.store.change(without_trunk)
    log.warning(
        "the output of the frozen layers for all %d rows would take about %.1f GB, and %.1f GB are available; it is "
        "not kept, and they are run in every pass",
        trainer.collected_rows,
        needed / 1e9,
        free / 1e9,
    )


def _each(batch: B, change: Any) -> B:
    """Return the batch with ``change`` applied to all its sequences."""
    if isinstance(batch, Sequences):
        return change(batch)  # type: ignore[no-any-return]
    parts = batch.parts()
    return type(batch)(**{k: _each(v, change) if isinstance(v, Batch) else v for k, v in parts.items()})


def without_trunk(batch: B) -> B:
    """Return a batch whose sequences do not have the output of the frozen layers."""
    return _each(batch, _without)


def _without(sequences: Sequences) -> Sequences:
    parts: dict[str, Any] = {name: value for name, value in sequences.parts().items() if name != "trunk"}
    return sequences if sequences.trunk is None else type(sequences)(**parts)


def _sequences(batch: Batch) -> list[Sequences]:
    """Return the sequences in a batch."""
    if isinstance(batch, Sequences):
        return [batch]
    return [found for part in batch.parts().values() if isinstance(part, Batch) for found in _sequences(part)]
