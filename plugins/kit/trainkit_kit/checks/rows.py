"""Checks of rows: padding, other rows and their order must not change what is learnt from a row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from trainkit.data import Batch, Pipeline
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit_kit.checking import check
from trainkit_kit.checks.tools import (
    apart,
    collected_from,
    floats,
    ids_of,
    left_padded,
    measured,
    nudged,
    only_part,
    require_same_experience,
    require_same_gradient,
    require_same_learning,
    require_same_metrics,
    right_padded,
    sequences_in,
    under_masks,
    weighted,
    widened,
    with_garbage,
)
from trainkit_kit.failures import CheckError, require
from trainkit_kit.subjects import Bench, Subject


def language(subject: Subject) -> bool:
    """Return whether the subject trains language models: only these have masks and padding."""
    return subject.language


def require_same_collection(one: Any, other: Any, what: str) -> None:
    """Fail unless two trainers hold the same experience and metrics of it; ``what`` names the two."""
    require_same_experience(one.store.experience, other.store.experience, f"experience {what}")
    require_same_metrics(
        floats(one.recorder.pending), floats(other.recorder.pending), f"metrics of a collection {what}"
    )


@check(where=language)
def mask_law(bench: Bench) -> None:
    """Check that values at masked positions, even NaN, change neither experience nor loss, gradient or metrics.

    A loss that multiplies by the mask turns a NaN or an infinity in padding into a NaN of the whole model. A
    loss that ignores the mask learns from padding. Advantages that are whitened over padding differ between batches.

    Causes: `x * mask` instead of `masked_fill`, `zero_masked` or `masked_mean`; a mean or a standard deviation without
    a mask; a mask that is applied after `exp` or a division.
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    require(
        any(not sequences.attention_mask.all() for sequences in sequences_in(batch)),
        f"no Sequences of the {type(batch).__name__} has padding, so masks cannot be checked; put tokens, and tensors "
        "about tokens, into a TokenBatch or into a Batch with Sequences in it",
    )
    what, spoilt = "without and with garbage under the mask", with_garbage(batch)
    try:
        require_same_learning(trainer, batch, spoilt, what, rtol=0)
    except CheckError as error:
        raise CheckError(f"{error}; {_leaks(trainer, batch, spoilt)}") from None
    dirty = collected_from(bench, with_garbage)
    require_same_collection(collected_from(bench), dirty, f"prepared {what}")


def _leaks(trainer: Any, batch: Batch, spoilt: Batch) -> str:
    """Return which fields of a batch change the loss by what is under the mask, in words."""
    (clean, found), leaking = measured(trainer, batch), list[str]()
    for name, tensor in batch.flatten().items():
        part = only_part(batch, spoilt, name)
        if tensor is part.flatten()[name]:
            continue
        gradient_, seen = measured(trainer, part)
        try:
            require_same_gradient(clean, gradient_, "gradients", rtol=0)
            require_same_metrics(found, seen, "metrics")
        except CheckError:
            leaking.append(name)
    if not leaking:
        return "no field alone does it, so two of them are combined before they are masked"
    return f"it leaks from the field {', '.join(leaking)}"


@check(where=language)
def padding_amount(bench: Bench) -> None:
    """Check that the number of padding columns changes neither experience nor loss, gradient or metrics.

    A mean over padded columns depends on the longest row in the batch, and so do statistics of a
    collection that include padding.

    Causes: `.mean()` or `.mean(1)` instead of `masked_mean`; `mask.size(1)` or `numel()` as a number of tokens;
    whitening without a mask.
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    what = "without and with five more columns of padding"
    require_same_learning(trainer, batch, widened(batch, 5), what)
    wide = collected_from(bench, lambda experience: widened(experience, 5))
    require_same_collection(collected_from(bench), wide, f"prepared {what}")


@check(where=lambda subject: subject.causal)
def padding_side(bench: Bench) -> None:
    """Check that padding on the left instead of the right changes neither experience nor gradient or metrics.

    Code that finds the first or last tokens of a response by counting columns finds other tokens if prompts differ in
    length, or if rows are padded on the left, as generation pads them.

    Causes: columns counted from the left or the right end, such as `[:, -1]`; a shift by one column without the mask.
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    require_same_learning(trainer, batch, left_padded(batch), "of rows that are padded on the right and on the left")
    usual, turned = collected_from(bench), collected_from(bench, left_padded)
    what = "what prepare_experience makes of rows that are padded on the right and on the left"
    require_same_experience(usual.store.experience, right_padded(turned.store.experience), what)


@check()
def batch_mates(bench: Bench) -> None:
    """Check that a row's experience does not depend on the other rows of its part, which can have any size.

    A collection is made in parts of `rollout.batch_size` rows, which is chosen by memory and may separate the responses
    to one prompt. Statistics that are computed while a part is made change with its size; code that compares
    rows belongs in `prepare_experience`.

    Causes: a statistic in `experience` or `make_experience` that belongs in `prepare_experience`; groups that are read
    where a part may divide them.
    """
    whole = _in_parts_of(bench, 1_000)
    for size in (5, 3):
        parts = _in_parts_of(bench, size)
        require_same_collection(whole, parts, f"made as a whole and in parts of {size} rows")


def _in_parts_of(bench: Bench, size: int) -> Any:
    """Return a trainer after a collection in parts of ``size`` rows; each prompt has a seed for its samples."""
    trainer = bench.trainer(rollout__batch_size=size)
    if trainer.online:
        rows = [{**row, "seed": seed} for seed, row in enumerate(trainer.pipeline.rows)]
        trainer.add_prompt_pipeline(Pipeline(rows, seed=trainer.config.train.seed))
    apart(trainer).collect()
    return trainer


@check()
def row_order(bench: Bench) -> None:
    """Check that the order of a batch's rows does not change the gradient.

    Batches are shuffled, so an algorithm that pairs rows by their position in a batch compares unrelated rows.

    Causes: rows compared by their position in the batch of a step, such as `view(-1, k)` in `loss`; an index into the
    collection.
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    require_same_learning(trainer, batch, batch.select(order), "of a batch and of its rows in another order")


@check()
def rows_are_trained_once(bench: Bench) -> None:
    """Check that no row is in a collection more often than it was sampled, or than it is in the dataset.

    With an index that is wrong after rows were sorted, repeated or permuted, some rows are trained twice and others
    never, and a run learns all the same. An algorithm that draws rows with replacement declares this as an expected
    failure.

    Causes: ``repeat`` instead of ``repeat_interleave``, or the reverse; an index that is applied twice, or to rows in
    another order; rows that fill up a batch and have weight.
    """
    trainer = bench.collected()
    batch = under_masks(weighted(trainer.store.experience))
    columns = [x.reshape(len(x), -1).double() for x in batch.flatten().values()]
    found = max(Counter(map(tuple, torch.cat(columns, dim=1).tolist())).values())
    often = _times(trainer)
    require(
        found <= often,
        f"a row of the {type(batch).__name__} is in a collection {found} times, and no response or sample that it can "
        f"be made of more than {often} times",
    )


def _times(trainer: Any) -> int:
    """Return how often the most frequent of the sampled responses, or of the rows of the dataset, is there."""
    rows = Counter(map(repr, trainer.pipeline.rows))
    rounds = -(-trainer.collection_rows // len(trainer.pipeline.rows)) if trainer.online else 1
    if not isinstance(trainer, AccelerateRLTrainer) or not trainer.online:
        return rounds * max(rows.values())
    parts = trainer.collector.collection.rollouts
    sampled = Counter(ids for part in parts for ids in ids_of(part.sequences))
    return max(sampled.values(), default=trainer.samples_per_prompt * trainer.collection_rows)
