"""Shared prompts in a run: whether rows with the same prompt run it once, decided for each collection."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from trainkit.data import Sequences
from trainkit.data.batches import COPIED, pass_cost
from trainkit.errors import ConfigError
from trainkit.models.prompts import different_prompts
from trainkit.models.unloaded import decided, reads_weights
from trainkit.plugins.hooks import name_of

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    Trainer = AccelerateRLTrainer[Any]

log = logging.getLogger(__name__)

GAIN = 0.9
"""Prompts are shared where at most this part of the tokens is left to run."""
SHARDED = ("none", "fsdp2")
"""The ways to divide a model under which sharing is tested."""
SEEN = 16
"""Pairs by which the lengths in a dataset are judged."""


def has_common_prompts(trainer: Trainer) -> bool:
    """Return whether several rows of the algorithm have the same prompt: groups of responses, or pairs."""
    return trainer.samples_per_prompt > 1 or "pairs" in trainer.inputs


def check(trainer: Trainer) -> None:
    """Check `train.share_prompts` before a model is loaded.

    Raises:
        ConfigError: it is true, and the algorithm has no prompts to share.
    """
    if trainer.config.train.share_prompts and not has_common_prompts(trainer):
        raise ConfigError(
            f"train.share_prompts is true, and {trainer.config.method.name!r} has one row for each prompt; remove it"
        )


def prepare(trainer: Trainer, policy: Any) -> None:
    """Find out whether a policy or scorer can share prompts, before it is divided, and mark it.

    Raises:
        ConfigError: it cannot, and `train.share_prompts` is true.
    """
    train = trainer.config.train
    if train.share_prompts is False or not has_common_prompts(trainer) or not hasattr(policy, "why_not_shared"):
        return
    if not reads_weights():  # a pass without data shares nothing
        return
    with trainer.models.as_trained():
        fault = decided(policy.why_not_shared)
    way = name_of(train.sharding)
    if fault is None and trainer.sharding.keeps_sharded and way not in SHARDED:
        fault = f"it is not tested with train.sharding {way!r}"
    policy.can_share_prompts = fault is None
    if fault is not None and train.share_prompts:
        raise ConfigError(f"train.share_prompts is true, and prompts cannot be shared: {fault}; remove it")
    if fault is not None and trainer.parallel.is_main:
        log.info("prompts are run once for each row, not shared: %s", fault)


def decide(trainer: Trainer, seen: Sequences | None) -> None:
    """Decide whether the prompts of a collection are shared, on all processes alike.

    Args:
        trainer: the trainer.
        seen: some rows of the collection in this process; None if it has none.
    """
    policy, asked = trainer.unwrapped, trainer.config.train.share_prompts
    shares = getattr(policy, "can_share_prompts", False) and asked is not False
    if shares and asked is None:
        counted = torch.zeros(4, dtype=torch.float64)
        if seen is not None and len(seen):
            prompts, _ = different_prompts(seen)
            counted += torch.tensor(
                [len(seen), len(prompts), int(seen.prompt_mask.sum()), int(seen.lengths.sum())], dtype=torch.float64
            )
        shares = pays(trainer, *trainer.reduce(counted.to(trainer.accelerator.device).float()).tolist())
    trainer.progress.shares_prompts = shares
    apply(trainer)


def pays(trainer: Trainer, rows: float, prompts: float, prompt_tokens: float, tokens: float) -> bool:
    """Return whether sharing leaves clearly less to run of a micro-batch.

    Args:
        trainer: the trainer.
        rows: rows that were counted.
        prompts: different prompts among them.
        prompt_tokens: tokens of the rows' prompts.
        tokens: tokens of the rows.
    """
    if not rows or prompts == rows:
        return False
    size = trainer.updater.most[0]
    prompt, whole = prompt_tokens / rows, tokens / rows
    if "pairs" in trainer.inputs and size is not None:
        size *= 2  # a pair is two rows
    most = trainer.updater.tokens_of_a_micro_batch / whole if size is None else size
    in_micro = min(max(most, 1.0), rows)
    separate = in_micro * whole
    different = max(math.ceil(in_micro * prompts / rows), 1)
    shared = different * prompt + in_micro * (whole - prompt + prompt / COPIED)
    return shared + pass_cost(trainer.unwrapped, trainer.accelerator.device) <= GAIN * separate


def apply(trainer: Trainer) -> None:
    """Set whether the models of the run share prompts in the current collection."""
    reference = trainer.models.reference
    compared = [each.policy for each in trainer.models.frozen if each.loaded]
    for policy in (trainer.unwrapped, getattr(reference, "policy", None), *compared):
        if getattr(policy, "can_share_prompts", False):
            policy.shares_prompts = trainer.progress.shares_prompts
