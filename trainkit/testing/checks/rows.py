"""Checks about rows: what stands beside a row, behind it and before it must not change what is learnt from it."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.testing.checks.tools import (
    collected_from,
    floats,
    gradient,
    left_padded,
    measured,
    nudged,
    require_same_experience,
    require_same_gradient,
    require_same_metrics,
    right_padded,
    sequences_in,
    widened,
    with_garbage,
)
from trainkit.testing.conformance import Bench, Subject, check, require


def language(subject: Subject) -> bool:
    """Masks and padding are about token sequences."""
    return subject.language


def require_same_collection(one: Any, other: Any, what: str) -> None:
    """Fail unless two trainers hold the same experience, and the same metrics of it; ``what`` says which two."""
    require_same_experience(one.store.experience, other.store.experience, f"experience {what}")
    require_same_metrics(floats(one._pending), floats(other._pending), f"metrics of a collection {what}")


@check(where=language)
def mask_law(bench: Bench) -> None:
    """What stands under a mask changes neither experience nor loss, gradient or metrics, not even NaN.

    A loss that multiplies by the mask turns a NaN or an infinity of padding into a NaN of the whole model (S-15), one
    that forgets it learns from padding, and advantages that are whitened over padding are others in every batch (S-10).
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    require(
        any(not sequences.attention_mask.all() for sequences in sequences_in(batch)),
        f"no Sequences of the {type(batch).__name__} has padding, so nothing can be seen of masks; tokens, and what is "
        "said of them, belong into a TokenBatch or a Batch with Sequences in it",
    )
    (clean, found), (dirty, seen) = measured(trainer, batch), measured(trainer, with_garbage(batch))
    require_same_gradient(clean, dirty, "gradients without and with garbage under the mask", rtol=0)
    require_same_metrics(found, seen, "metrics of a batch without and with garbage under the mask")
    spoilt = collected_from(bench, with_garbage)
    require_same_collection(bench.collected(), spoilt, "prepared without and with garbage under the mask")


@check(where=language)
def padding_amount(bench: Bench) -> None:
    """How much padding rows have changes neither experience nor loss, gradient or metrics.

    A mean over padded columns depends on the longest row that happens to be in the batch (S-38, S-56), and so do
    statistics of a collection that are taken over them (S-10).
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    (one, found), (other, seen) = measured(trainer, batch), measured(trainer, widened(batch, 5))
    require_same_gradient(one, other, "gradients without and with five more columns of padding")
    require_same_metrics(found, seen, "metrics of a batch without and with five more columns of padding")
    wide = collected_from(bench, lambda experience: widened(experience, 5))
    require_same_collection(bench.collected(), wide, "prepared without and with five more columns of padding")


@check(where=lambda subject: subject.causal)
def padding_side(bench: Bench) -> None:
    """Where a row stands within its columns changes nothing: padded on the left it has the gradient it has otherwise.

    What takes the first tokens of a response, or its last one, by counting columns takes others wherever prompts differ
    in length or come padded on the left, as generation pads them.
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    (one, found), (other, seen) = measured(trainer, batch), measured(trainer, left_padded(batch))
    require_same_gradient(one, other, "gradients of rows that are padded on the right and on the left")
    require_same_metrics(found, seen, "metrics of rows that are padded on the right and on the left")
    usual, turned = bench.collected(), collected_from(bench, left_padded)
    what = "what prepare_experience makes of rows that are padded on the right and on the left"
    require_same_experience(usual.store.experience, right_padded(turned.store.experience), what)


@check()
def batch_mates(bench: Bench) -> None:
    """A row's experience does not depend on the rows that go through with it: parts of a collection have any size.

    `rollout.batch_size` is set by what fits into memory, and may cut the responses to one prompt apart. Statistics that
    are taken while a part is made change with it (S-10); what compares rows belongs into `prepare_experience`.
    """
    whole = _in_parts_of(bench, 1_000)
    for size in (5, 3):
        parts = _in_parts_of(bench, size)
        require_same_collection(whole, parts, f"made as a whole and in parts of {size} rows")


def _in_parts_of(bench: Bench, size: int) -> Any:
    """A trainer after a collection in parts of ``size`` rows, whose samples follow from each prompt's own seed."""
    trainer = bench.trainer(rollout__batch_size=size)
    if trainer.online:
        rows = [{**row, "seed": seed} for seed, row in enumerate(trainer.pipeline.rows)]
        trainer.add_prompt_pipeline(rows)
    trainer.collect()
    return trainer


@check()
def row_order(bench: Bench) -> None:
    """The order of a batch's rows changes nothing.

    An algorithm that pairs rows by their place in a batch, which is shuffled, compares what does not belong together.
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    one, other = gradient(trainer, batch), gradient(trainer, batch.select(order))
    require_same_gradient(one, other, "gradients of a batch and of its rows in another order")
