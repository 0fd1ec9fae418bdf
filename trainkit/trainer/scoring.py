"""The scores of responses: calls of the reward function, scores that are not finite, and metrics."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.config import TRLConfig
from trainkit.data import Rollouts
from trainkit.errors import DataError, RewardError, printable
from trainkit.functional import per_response, place_scores, repetition
from trainkit.rollouts import EnvironmentMaker, Record, name_of, score
from trainkit.rollouts.rewards import FURTHER, numbers_of
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.collection import Collection
from trainkit.trainer.recording import Recorder
from trainkit.trainer.text import Text

log = logging.getLogger(__name__)

ScoredRollouts = tuple[Rollouts, Tensor]
"""Rollouts, and their scores [B] or [B, T]."""


class Scoring:
    """Scores responses, on all processes together.

    Args:
        algorithm: its configuration; its `reward_fn` is called.
        text: the tokenizer.
        parallel: the processes.
        recorder: gets the metrics of rewards and responses.
        progress: the step at which the reward function is called.
        environment: makes the environments of episodes, which have rewards; None: responses have none of their own.
        current: returns the collection that this thread samples.
    """

    def __init__(
        self,
        algorithm: BaseRLTrainer[Any],
        text: Text,
        parallel: Parallel,
        recorder: Recorder,
        progress: Progress,
        *,
        environment: EnvironmentMaker | None,
        current: Callable[[], Collection],
    ) -> None:
        self.algorithm, self.text, self.parallel = algorithm, text, parallel
        self.recorder, self.progress, self.environment, self._current = recorder, progress, environment, current
        self._warned_of_drops = self._warned_of_equal_scores = False

    @property
    def config(self) -> TRLConfig[Any]:
        """The run's configuration."""
        return self.algorithm.config

    @property
    def available(self) -> bool:
        """Whether responses can be scored: there is a reward function or an environment."""
        return self.algorithm.reward_fn is not None or self.environment is not None

    @property
    def source(self) -> str:
        """What gives the scores, for messages."""
        reward_fn = self.algorithm.reward_fn
        return "the environment" if reward_fn is None else name_of(reward_fn)

    # -------------------------------------------------------------------------------------------------------- scoring

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [B], or [B, T] if there are rewards per token. Hooks get them with the rollouts."""
        scores = self._score(rollouts)
        sampled = self._current().rollouts
        for index, each in enumerate(sampled):
            if each.rows is rollouts.rows:
                sampled[index] = replace(each, judged=self.judged(rollouts, scores))
        return scores

    def judged(self, rollouts: Rollouts, scores: Tensor) -> list[dict[str, Any]] | None:
        """Return what the last call of the reward function said about each response, and its score [B] or [B, T]."""
        if not self.available:
            return None
        finite = [score if math.isfinite(score) else None for score in per_response(scores).tolist()]
        columns = {"reward": finite, **(self._current().extras if self.algorithm.reward_fn is not None else {})}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _score(self, rollouts: Rollouts) -> Tensor:
        device, reward_fn, collection = self.parallel.device, self.algorithm.reward_fn, self._current()
        if reward_fn is None and rollouts.rewards is not None:
            return rollouts.rewards.to(device)
        if reward_fn is None:
            if self.algorithm.rewarded:  # a loop of the caller's own, which `learn` has not checked
                raise self._missing()
            return torch.zeros(len(rollouts), device=device)
        weights, started, extras = collection.weights, time.perf_counter(), dict[str, list[Any]]()
        scores = score(
            reward_fn,
            replace(rollouts, rows=[self.text.numbered(row) for row in rollouts.rows]),
            self.text.tokenizer,
            self.config.reward,
            step=self.progress.step if weights is None else weights.version,
            alone=weights is None,
            extras=extras,
        ).to(device)
        collection.extras = extras
        numbers = {name: torch.tensor(numbers_of(values), dtype=torch.float64) for name, values in extras.items()}
        self.recorder.record({f"{FURTHER}{name}": m.Mean.of(values) for name, values in numbers.items() if len(values)})
        collection.reward_seconds += time.perf_counter() - started
        if rollouts.rewards is None:
            return scores
        return rollouts.rewards.to(device) + place_scores(scores, rollouts.sequences.response_mask)

    def _missing(self) -> DataError:
        if self.environment is not None:
            return DataError("the rollouts are no episodes of the environment; give those of play()")
        inputs = self.algorithm.inputs
        lacking = "environment" if "environment" in inputs else "reward_fn"
        return DataError(f"{self.config.method.name!r} learns from {' and '.join(inputs)}; give {lacking}")

    # ------------------------------------------------------------------------------------- scores that are not finite

    def clipped(self, parts: list[ScoredRollouts]) -> list[ScoredRollouts]:
        """Return rollouts with infinite scores set to the largest and the smallest finite score of all processes.

        Raises:
            RewardError: there is no finite score.
        """
        device = self.parallel.device
        per_part = [s if s.dim() == 1 else s[rollouts.sequences.response_mask.to(s.device)] for rollouts, s in parts]
        values = torch.cat([torch.zeros(0, device=device), *per_part])
        finite = values[values.isfinite()]
        ends = torch.stack([finite.max(), -finite.min()]) if len(finite) else torch.full((2,), -math.inf, device=device)
        high, low = self.parallel.max(ends.double()).tolist()

        def check() -> None:
            if high == -math.inf:
                raise self._none_finite("collection")

        self.parallel.sync_errors(check)
        self.count("reward/clipped", len(values) - len(finite))
        clipped = [(rollouts, scores.nan_to_num(posinf=high, neginf=-low)) for rollouts, scores in parts]
        recorded = self._current().scores
        recorded[len(recorded) - len(clipped) :] = [per_response(scores) for _, scores in clipped]
        return clipped

    def made_finite(self, records: list[Record]) -> list[Record]:
        """Return the records of an evaluation with every reward finite, or None if it is not and `drop_row` is set.

        Raises:
            RewardError: no reward is finite, and infinite ones are to be clipped.
        """
        policy = self.config.reward.on_nonfinite
        rewards = [record["reward"] for record in records if "reward" in record]
        finite = [reward for reward in rewards if math.isfinite(reward)]
        if len(finite) == len(rewards):
            return records
        if policy == "clip" and not finite:
            raise self._none_finite("evaluation")
        low, high = min(finite, default=0.0), max(finite, default=0.0)

        def settled(reward: float) -> float | None:
            if policy == "clip":
                return min(max(reward, low), high)
            return reward if math.isfinite(reward) else None

        return [{**record, "reward": settled(record["reward"])} for record in records]

    def _none_finite(self, what: str) -> RewardError:
        return RewardError(
            f"{self.source}: no score of the {what} after step {self.progress.step} is finite, so there is none that "
            "reward.on_nonfinite 'clip' could set infinite ones to; look at the reward function"
        )

    def usable(self, scores: Tensor) -> Tensor:
        """Return which responses can be trained on: those of groups with finite scores. [B, *] -> bool [B]."""
        k = self.algorithm.samples_per_prompt
        finite = scores.isfinite().flatten(1).all(1) if scores.dim() > 1 else scores.isfinite()
        return finite.view(-1, k).all(1).repeat_interleave(k)

    def drop_unusable(self, collection: Collection) -> int:
        """Return and record how many responses of all processes have no usable score; log it the first time."""
        if self.config.reward.on_nonfinite != "drop_row":
            return 0
        k = self.algorithm.samples_per_prompt
        collection.scores = [scores[self.usable(scores)] for scores in collection.scores]
        self.count("reward/dropped", collection.dropped)
        dropped = sum(self.parallel.gather([collection.dropped]))
        if dropped and not self._warned_of_drops and self.parallel.is_main:
            self._warned_of_drops = True
            log.warning(
                "step %d: %d of %d responses are dropped, because %s not finite. Further ones are not logged: the "
                "metric reward/dropped is their number in a collection",
                self.progress.step,
                dropped,
                collection.taken * k,
                "their scores are" if k == 1 else f"a score of the {k} responses to their prompt is",
            )
        return dropped

    # -------------------------------------------------------------------------------------------------------- metrics

    def count(self, name: str, number: int) -> None:
        """Record a number of this process as a metric that is the sum over all processes; once in a collection."""
        share = torch.tensor(1 / self.parallel.world, dtype=torch.float64)
        self.recorder.record({name: m.Mean(torch.tensor(float(number), dtype=torch.float64), share)})

    def record_scored(self, rollouts: Rollouts, scores: Tensor) -> None:
        """Record the lengths and repetition of responses, and their scores [B] or [B, T]."""
        mask = rollouts.sequences.response_mask
        metrics: m.Metrics = {
            "rollout/length": m.Mean.of(mask.sum(1)),
            "rollout/terminated": m.Mean.of(rollouts.terminated),
            "rollout/repetition": m.Mean.of(repetition(rollouts.sequences.input_ids, mask)),
        }
        if self.algorithm.rewarded:
            each = per_response(scores)
            self._current().scores.append(each)
            finite = each[each.isfinite()]
            metrics |= {"reward/mean": m.Mean.of(finite), "reward/std": m.Std.of(finite)}
        self.recorder.record(metrics)

    def agree_on_names(self) -> None:
        """Let every process record the same metrics of what the reward function returns besides scores.

        Which of it are numbers may differ between processes, and metrics are summed by their names.
        """
        if self.algorithm.reward_fn is None or self.parallel.world == 1:
            return
        here = [name for name in self.recorder.recorded if name.startswith(FURTHER)]
        nothing = torch.zeros((), dtype=torch.float64)
        elsewhere = {*self.parallel.gather(here)} - {*here}
        self.recorder.record({name: m.Mean(nothing, nothing) for name in elsewhere})

    def record_collection(self, collection: Collection) -> None:
        """Record the seconds of the calls for a collection; log a warning if its scores or episodes teach nothing."""
        if self.algorithm.reward_fn is not None:
            self._record_seconds("time/reward", collection.reward_seconds)
        if self.environment is not None:
            self._record_seconds("time/environment", collection.environment_seconds)
            if self.config.environment.on_error != "raise":
                self._warn_of_failures(collection)
        if not self.algorithm.rewarded:
            return
        scores = torch.cat([torch.zeros(0, device=self.parallel.device), *collection.scores])
        if self.algorithm.samples_per_prompt > 1:
            self.recorder.record({"reward/equal_in_group": m.Mean.of(~self._differ(scores))})
        if not self._warned_of_equal_scores:
            self._warn_of_equal_scores(scores)

    def _record_seconds(self, name: str, seconds: float) -> None:
        self.recorder.record({name: m.Mean.of(torch.tensor(seconds, dtype=torch.float64))})

    def _warn_of_failures(self, collection: Collection) -> None:
        """Log that all episodes of the collection failed, with the error of the first, if they did."""
        parts = collection.rollouts
        failures = [turns[-1]["error"] for part in parts for turns in part.turns or [] if "error" in turns[-1]]
        counts = self.parallel.gather([(len(failures), sum(len(part) for part in parts), failures[:1])])
        failed, played = sum(count for count, _, _ in counts), sum(count for _, count, _ in counts)
        if 0 < failed == played and self.parallel.is_main:
            reason = printable(next(first[0] for _, _, first in counts if first))
            log.warning("step %d: all %d episodes of the collection failed: %s", self.progress.step, played, reason)

    def _differ(self, scores: Tensor) -> Tensor:
        """Return for each prompt whether the scores of its responses differ. [B] -> bool [prompts]."""
        k = self.algorithm.samples_per_prompt
        groups = scores.view(len(scores) // k, k)
        return (groups != groups[:, :1]).any(1)

    def _warn_of_equal_scores(self, scores: Tensor) -> None:
        """Log that the scores of all groups, or of all responses, of a collection are equal, if they are. [B]."""
        k, none = self.algorithm.samples_per_prompt, scores.new_full((), -torch.inf)
        differ = self._differ(scores).any().float()
        ends = (scores.max(), -scores.min()) if len(scores) else (none, none)
        # every process takes part, also one without scores
        extremes = self.parallel.max(torch.stack([differ, differ.new_tensor(len(scores)), *ends]).double())
        different, most, high, low = extremes.tolist()
        equal = not different if k > 1 else high == -low
        if not equal or most * self.parallel.world < 2:
            return
        self._warned_of_equal_scores = True
        log.warning(
            "%s: %s have equal scores in the whole collection (the first has %g), so they say nothing about which is "
            "better; check the reward function, or give prompts that are neither too easy nor too hard",
            self.config.method.name,
            f"the {k} responses to each prompt" if k > 1 else "all responses",
            float(scores[0]) if len(scores) else high,
        )
