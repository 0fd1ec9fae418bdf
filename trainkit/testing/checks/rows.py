"""Checks about rows: what stands beside a row, behind it and before it must not change what is learnt from it."""

from __future__ import annotations

import torch

from trainkit.testing.checks.tools import gradient, require_close, widened, with_garbage
from trainkit.testing.conformance import Bench, Subject, check, require


def language(subject: Subject) -> bool:
    """Masks and padding are about token sequences."""
    return subject.language


@check(where=language)
def mask_law(bench: Bench) -> None:
    """What stands under a mask changes neither loss nor gradient, not even NaN.

    A loss that multiplies by the mask turns a NaN or an infinity of padding into a NaN of the whole model, and one
    that forgets it learns from padding (S-15, S-56).
    """
    trainer = bench.collected()
    batch = trainer.store.experience
    require(not batch.lengths.eq(batch.lengths[0]).all(), "all rows have one length, so nothing is padded")
    clean, dirty = gradient(trainer, batch), gradient(trainer, with_garbage(batch))
    require_close(clean, dirty, "gradients with and without garbage under the mask", rtol=0, atol=1e-7)


@check(where=language)
def padding_amount(bench: Bench) -> None:
    """How much padding rows have changes neither loss nor gradient.

    A mean over padded columns depends on the longest row that happens to be in the batch (S-38, S-56).
    """
    trainer = bench.collected()
    batch = trainer.store.experience
    one, other = gradient(trainer, batch), gradient(trainer, widened(batch, 5))
    require_close(one, other, "gradients with five more columns of padding and without")


@check()
def row_order(bench: Bench) -> None:
    """The order of a batch's rows changes nothing.

    An algorithm that pairs rows by their place in a batch, which is shuffled, compares what does not belong together.
    """
    trainer = bench.collected()
    batch = trainer.store.experience
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    one, other = gradient(trainer, batch), gradient(trainer, batch.select(order))
    require_close(one, other, "gradients of a batch and of its rows in another order")
