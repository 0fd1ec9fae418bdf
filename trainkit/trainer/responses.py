"""Responses and episodes that the user asks for: `generate`, `best_of` and `play`; training is not affected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from trainkit.config import SamplingConfig
from trainkit.data import Prompts, Rollouts, Row, prompt_rows, written_prompts
from trainkit.data.columns import check_prompt_columns, row_without, without
from trainkit.errors import ConfigError, DataError
from trainkit.rollouts import RewardFn, score
from trainkit.runs.view import RunView
from trainkit.seeding import PLACE, placed, turn_seed
from trainkit.trainer import generation
from trainkit.trainer.best import check_best, choose_best
from trainkit.trainer.recording import Recorder
from trainkit.trainer.sampling import Sampling
from trainkit.trainer.scoring import Scoring
from trainkit.trainer.text import Text


class Responder:
    """Samples responses, and plays episodes, when the user asks for them.

    Args:
        algorithm: its reference is sampled from, and its `score` called.
        view: the run, whose progress numbers the responses.
        text: prompts as token ids.
        sampling: samples responses.
        scoring: whether there are rewards, and the environment.
        recorder: forgets the metrics.
    """

    def __init__(
        self, algorithm: Any, view: RunView, text: Text, sampling: Sampling, scoring: Scoring, recorder: Recorder
    ) -> None:
        self.algorithm, self.view = algorithm, view
        self.text, self.sampling, self.scoring, self.recorder = text, sampling, scoring, recorder

    def check_generates(self, call: str) -> None:
        """Raise a `ConfigError` if the trained model scores text and generates none."""
        if not self.algorithm.generates:
            raise ConfigError(
                f"{self.algorithm.method.name!r} trains a model that scores text and generates none, so {call} has no "
                "use; evaluate on eval_samples"
            )

    def generate(
        self,
        prompts: Any,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        reference: bool,
        overrides: dict[str, Any],
    ) -> Rollouts:
        """Sample responses; see `AccelerateRLTrainer.generate`."""
        self.check_generates("generate()")
        rows = generation.prompts_as_rows(prompts, input_ids, attention_mask, self.text.tokenizer.pad_token_id)
        rows, settings = self._with_prompts(rows, "generate()"), self.text.settings(**overrides)
        rows = self._next_places(rows)
        seeds = [turn_seed(seed, 0) for seed in self.sampling.seeds(rows, "generate")]
        with self.recorder.discarding(), self.sampling.ready():
            of = self.sampling.of_reference(self.algorithm.reference) if reference else nullcontext()
            with of as sampler:
                rollouts = self.sampling.respond(rows, self.text.queries(rows), settings, "generate", seeds, sampler)
        return replace(rollouts, rows=[{k: v for k, v in row.items() if k != PLACE} for row in rollouts.rows])

    def best_of(
        self, prompts: Any, n: int, keep: int, reward_fn: RewardFn | None, overrides: dict[str, Any]
    ) -> tuple[Rollouts, Tensor]:
        """Sample ``n`` responses to each prompt and return the best; see `AccelerateRLTrainer.best_of`."""
        self.check_generates("best_of()")
        settings = self.text.settings(**overrides)
        check_best(n, keep, reward_fn, settings, scored=self.scoring.available)
        rows = generation.prompts_as_rows([] if prompts is None else prompts, None, None, call="best_of()")
        rows = self._with_prompts(rows, "best_of()") if self.scoring.environment is None else self._as_episodes(rows)
        rows = [row for row in self._next_places(rows) for _ in range(n)]
        with self.recorder.discarding(), self.sampling.ready():
            return self.best(rows, settings, self.sampling.seeds(rows, "generate"), n, keep, reward_fn)

    def best(
        self,
        rows: Sequence[Row],
        settings: SamplingConfig,
        seeds: Sequence[int],
        n: int,
        keep: int,
        reward_fn: RewardFn | None = None,
    ) -> tuple[Rollouts, Tensor]:
        """Sample a response to each row [B·n], and return the best of each n, with their scores [B·keep]."""

        def sample(part: Sequence[Row], seeds: Sequence[int]) -> Rollouts:
            return self.sampling.sample(list(part), settings, "generate", seeds)

        def scored(rollouts: Rollouts) -> Tensor:
            if reward_fn is None:
                return self.algorithm.score(rollouts)  # type: ignore[no-any-return]
            numbered = replace(rollouts, rows=[self.text.numbered(row) for row in rollouts.rows])
            step = self.view.progress.step
            scores = score(reward_fn, numbered, self.text.tokenizer, self.view.config.reward, step=step)
            return scores.to(self.view.parallel.device)

        return choose_best(rows, seeds, n, keep, self.view.config.rollout.batch_size, sample, scored)

    def play(self, prompts: Any, overrides: dict[str, Any]) -> Rollouts:
        """Play an episode for each prompt; see `AccelerateRLTrainer.play`."""
        if self.scoring.environment is None:
            raise ConfigError("play() needs an environment; give environment= to trainkit.train or to the trainer")
        rows = self.algorithm.eval_rows
        if prompts is None and not rows:
            raise DataError("play() plays the evaluation prompts, and there are none; give rows: play([{}, {}])")
        if prompts is not None:
            rows = generation.prompts_as_rows(prompts, None, None, call="play()")
        rows, settings = self._as_episodes(rows), self.text.settings(**overrides)
        rows = self._next_places(rows)
        with self.recorder.discarding(), self.sampling.ready():
            return self.sampling.sample(rows, settings, "generate", self.sampling.seeds(rows, "generate"))

    def _with_prompts(self, rows: list[Row], call: str) -> list[Row]:
        """Return rows with their prompts as text or ids; raise a `DataError` if one has none."""
        for index, row in enumerate(rows):
            if row.get("prompt") is None:
                instead = "give it under the key 'prompt'"
                if self.scoring.environment is not None:
                    instead = (
                        "the environment of this run gives the prompt: call play(rows), which plays episodes with it"
                    )
                raise DataError(f"{call} needs prompts, and row {index} has none; {instead}")
            check_prompt_columns(row_without(row, self.view.config.data.ignore_columns), f"prompt {index}")
        return written_prompts(rows, self.text.tokenizer)

    def _as_episodes(self, rows: Prompts) -> list[Row]:
        """Return checked rows for episodes."""
        rows = without(rows, self.view.config.data.ignore_columns)
        return self.algorithm.fit_prompts(prompt_rows(rows, needed=False, replayed=True))  # type: ignore[no-any-return]

    def _next_places(self, rows: list[Row]) -> list[Row]:
        """Return rows with the next places among all that were generated; their random numbers follow from these."""
        if self.view.config.train.resume:
            self.view.run.begin()  # the random numbers follow from the progress of the resumed run
        first = self.view.progress.generated
        self.view.progress.generated += len(rows)
        return placed(rows, first)
