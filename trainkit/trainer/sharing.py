"""How the models of a run pass over rows: without padding or not, and whether rows share their prompts."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from trainkit.data import Sequences
from trainkit.data.batches import COPIED, pass_cost
from trainkit.errors import ConfigError
from trainkit.models.joined import different_prompts
from trainkit.models.unloaded import decided, reads_weights
from trainkit.plugins.hooks import entry_name
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.models import Models
from trainkit.trainer.update import Updater

log = logging.getLogger(__name__)

GAIN = 0.9
"""Prompts are shared where at most this part of the tokens is left to run."""
SHARDED = ("none", "fsdp2")
"""The ways to divide a model under which sharing is tested."""


class PromptSharing:
    """Decides whether rows are joined (`train.padding_free`), and for each collection whether prompts are shared.

    Args:
        algorithm: its configuration, `inputs` and `samples_per_prompt` are read.
        models: the models that share prompts.
        parallel: the processes.
        updater: the size of micro-batches.
        progress: keeps the decision.

    Raises:
        ConfigError: `train.share_prompts` is true, and the algorithm has no prompts to share.
    """

    def __init__(
        self,
        algorithm: BaseRLTrainer[Any],
        models: Models,
        parallel: Parallel,
        updater: Updater,
        progress: Progress,
    ) -> None:
        self.algorithm, self.models = algorithm, models
        self.parallel, self.updater, self.progress = parallel, updater, progress
        if algorithm.config.train.share_prompts and not self.has_common_prompts:
            raise ConfigError(
                f"train.share_prompts is true, and {algorithm.method.name!r} has one row for each prompt; remove it"
            )

    @property
    def has_common_prompts(self) -> bool:
        """Whether several rows of the algorithm have the same prompt: groups of responses, or pairs."""
        return self.algorithm.samples_per_prompt > 1 or "pairs" in self.algorithm.inputs

    def prepare(self, policy: Any) -> None:
        """Find out whether a policy or scorer can join rows and share prompts, before it is divided, and mark it.

        Raises:
            ConfigError: it cannot, and `train.padding_free` or `train.share_prompts` is true.
        """
        if not reads_weights():  # a pass without data shares nothing
            return
        self._join_rows(policy)
        train, sharding = self.algorithm.config.train, self.parallel.sharding
        if train.share_prompts is False or not self.has_common_prompts or not hasattr(policy, "why_not_shared"):
            return
        joins = getattr(policy, "joins_rows", False)
        with self.models.as_trained():
            fault = None if joins else decided(policy.why_not_shared, bool)
        way = entry_name(train.sharding)
        if fault is None and sharding.keeps_sharded and way not in SHARDED:
            fault = f"it is not tested with train.sharding {way!r}"
        policy.can_share_prompts = fault is None
        if fault is not None and train.share_prompts:
            raise ConfigError(f"train.share_prompts is true, and prompts cannot be shared: {fault}; remove it")
        if fault is not None and self.parallel.is_main:
            log.info("prompts are run once for each row, not shared: %s", fault)

    def _join_rows(self, policy: Any) -> None:
        asked = self.algorithm.config.train.padding_free
        if asked is False or (asked is None and not self._joins_by_default):
            return
        fault: str | None = f"a {type(policy).__name__} has no passes without padding"
        if hasattr(policy, "why_not_joined"):
            with self.models.as_trained():
                fault = decided(policy.why_not_joined, bool)
            policy.joins_rows = fault is None
        if fault is not None and asked:
            raise ConfigError(f"train.padding_free is true, and rows cannot be joined: {fault}; remove it")
        if fault is not None and self.parallel.is_main:
            log.info("rows are padded to one length: %s", fault)

    @property
    def _joins_by_default(self) -> bool:
        """Whether the attention to texts of any lengths is a fast kernel: that of CUDA in 16 bits."""
        low = self.parallel.accelerator.mixed_precision in ("bf16", "fp16")
        return self.parallel.device.type == "cuda" and (low or self.algorithm.config.model.dtype != "float32")

    def decide(self, rows: Sequences | None) -> None:
        """Decide whether the prompts of a collection are shared, on all processes alike.

        Args:
            rows: some rows of the collection in this process; None if it has none.
        """
        asked = self.algorithm.config.train.share_prompts
        shares = getattr(self.models.unwrapped, "can_share_prompts", False) and asked is not False
        if shares and asked is None:
            counts = torch.zeros(4, dtype=torch.float64)
            if rows is not None and len(rows):
                prompts, _ = different_prompts(rows)
                counts += torch.tensor(
                    [len(rows), len(prompts), int(rows.prompt_mask.sum()), int(rows.lengths.sum())], dtype=torch.float64
                )
            shares = self.pays(*self.parallel.reduce(counts.to(self.parallel.device).float()).tolist())
        self.progress.shares_prompts = shares
        self.apply()

    def pays(self, rows: float, prompts: float, prompt_tokens: float, tokens: float) -> bool:
        """Return whether sharing leaves clearly less to run of a micro-batch.

        Args:
            rows: rows that were counted.
            prompts: different prompts among them.
            prompt_tokens: tokens of the rows' prompts.
            tokens: tokens of the rows.
        """
        if not rows or prompts == rows:
            return False
        size = self.updater.most[0]
        prompt, whole = prompt_tokens / rows, tokens / rows
        if "pairs" in self.algorithm.inputs and size is not None:
            size *= 2  # a pair is two rows
        most = self.updater.tokens_of_a_micro_batch / whole if size is None else size
        in_micro = min(max(most, 1.0), rows)
        separate = in_micro * whole
        different = max(math.ceil(in_micro * prompts / rows), 1)
        shared = different * prompt + in_micro * (whole - prompt + prompt / COPIED)
        return shared + pass_cost(self.models.unwrapped, self.parallel.device) <= GAIN * separate

    def apply(self) -> None:
        """Set whether the models of the run share prompts in the current collection."""
        compared = [each.policy for each in self.models.frozen if each.loaded]
        for policy in (self.models.unwrapped, getattr(self.models.reference, "policy", None), *compared):
            if getattr(policy, "can_share_prompts", False):
                policy.shares_prompts = self.progress.shares_prompts
