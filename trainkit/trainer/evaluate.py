"""Evaluation: responses to fixed prompts, scored and measured, and the loss on held-out samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from trainkit import metrics as m
from trainkit.config import TRLConfig, sweep
from trainkit.data import Batch, Rollouts, RolloutStore, Row
from trainkit.data.batches import columns_of
from trainkit.errors import ConfigError, DataError, suggest
from trainkit.functional import per_response
from trainkit.rollouts import Record, means, measure
from trainkit.runs.view import RunView
from trainkit.seeding import placed
from trainkit.trainer.returns import checked_batch
from trainkit.trainer.sampling import Sampling
from trainkit.trainer.scoring import Scoring
from trainkit.trainer.text import Text


class Evaluator:
    """Measures the model on evaluation prompts and held-out samples; training is not affected.

    Args:
        algorithm: has the prompts and samples, and evaluates on prompts.
        view: the run; hooks get the metrics.
        inference: returns a context in which the model is run without gradient.
        sampling_model: returns a context in which every process samples with the model.

    Raises:
        ConfigError: `train.save_best` is true, and evaluations have no rewards.
    """

    def __init__(
        self,
        algorithm: Any,
        view: RunView,
        inference: Callable[[], AbstractContextManager[None]],
        sampling_model: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.algorithm, self.view, self.plan = algorithm, view, view.plan
        self.collector, self.updater, self.recorder = view.collector, view.updater, view.recorder
        self._inference, self._sampling_model = inference, sampling_model
        self.held_out: Batch | None = None
        """The experience of the held-out samples, made at the first evaluation."""
        if self.config.train.save_best is True and not algorithm.rewarded and algorithm.metric_fn is None:
            raise ConfigError(
                f"train.save_best compares rewards of evaluations, and {self.config.method.name!r} has none; set it to "
                "false, or name a metric: {metric: eval/loss/total, mode: min}"
            )

    @property
    def config(self) -> TRLConfig[Any]:
        """The run's configuration."""
        return self.view.config

    @property
    def due(self) -> bool:
        """Whether the step that was just made is followed by an evaluation."""
        interval = self.config.train.eval_interval
        return self.plan.done or (interval > 0 and self.view.progress.step % interval == 0)

    @property
    def missing(self) -> bool:
        """Whether the evaluation of the last step was not made: before the first one, or because of an error."""
        at = self.view.progress
        return self.plan.total_steps > 0 if at.step == 0 else self.due and at.evaluated != at.step

    def evaluate_if(self, due: bool) -> None:
        """Evaluate if an evaluation is due and the run has data for it, and keep the best model."""
        data = self.algorithm.eval_rows or self.algorithm.eval_samples
        if due and data and self.config.train.eval_interval:
            self.view.run.keep_best(self.algorithm.evaluate())

    def evaluate(self) -> dict[str, float]:
        """Return means by name; see `AcceleratedLoop.evaluate`."""
        view, algorithm = self.view, self.algorithm
        if not algorithm.eval_rows and not algorithm.eval_samples:
            raise DataError(
                "there are no evaluation prompts and no held-out samples; give eval_prompts or eval_samples, or call "
                "add_eval_pipeline(prompts)"
            )
        view.models.build()  # all processes must make it together, also one without rows
        metrics: dict[str, float] = {}
        samples: list[Record] = []
        row_limit = view.models.row_limit
        unchanged = nullcontext() if row_limit is None else row_limit.unchanged()
        interruptible = view.run.stop.interruptible(self.collector.runs_alone)
        with unchanged, self.recorder.discarding(), interruptible:
            if algorithm.eval_rows:
                with self._sampling_model():
                    metrics, samples = algorithm.evaluation()
            if algorithm.eval_samples:
                with self._inference():
                    metrics |= self.on_held_out()
        at, hook = view.progress, view.hooks.hook
        at.evaluated, at.evaluation = at.step, dict(metrics)
        if view.parallel.is_main:
            hook.log_metrics(trainer=view, step=at.step, metrics=dict(metrics))
        view.run.report_findings(view.health.evaluated(metrics))
        hook.on_evaluate(trainer=view, step=at.step, metrics=dict(metrics), samples=samples)
        return metrics

    def compared(self, metrics: Mapping[str, float]) -> float | None:
        """Return by what `train.save_best` compares an evaluation; see `AcceleratedLoop.compared`."""
        setting = self.config.train.save_best
        name, sign = "eval/reward", 1
        if not isinstance(setting, bool):
            name, sign = setting.metric, -1 if setting.mode == "min" else 1
        values = [value for key, value in metrics.items() if key == name or key.startswith(f"{name}@")]
        if not values and not (setting is True and self.algorithm.rewarded):
            raise ConfigError(
                f"train.save_best compares {name!r}, which is no metric of this run's evaluations"
                f"{suggest(name, metrics)}; they have {', '.join(sorted(metrics))}"
            )
        return sign * values[0] if values else None

    # ---------------------------------------------------------------------------------------------- held-out samples

    @torch.no_grad()
    def on_held_out(self) -> dict[str, float]:
        """Return the loss and metrics over the held-out samples as ``eval/<name>``: exact means over all processes."""
        if self.held_out is None:
            self.held_out = self._experience()
        experience = checked_batch(self.algorithm, "prepare_step", self.algorithm.prepare_step(self.held_out))

        def measured(micro: Batch) -> m.Metrics:
            self.view.run.stop.progressed()
            measures: m.Metrics = self.updater.measure(micro.to(self.view.parallel.device))[1]
            return measures

        metrics = m.merge(*self.updater.each_together(self.updater.micro_batches(experience), measured))
        return {f"eval/{name}": value for name, value in m.compute(metrics, self.view.parallel.reduce).items()}

    def prepare_held_out(self) -> None:
        """Make the experience of the held-out samples, if evaluations will need it; inside `inference`."""
        if self.algorithm.eval_samples and self.config.train.eval_interval and self.held_out is None:
            with self.recorder.discarding():
                self.held_out = self._experience()

    def _experience(self) -> Batch:
        """Return the experience of this process's part of the held-out samples."""
        parallel, size = self.view.parallel, self.config.rollout.batch_size
        rows = self.algorithm.eval_samples[parallel.rank :: parallel.world]
        store = RolloutStore[Any]()
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        for experience in self.updater.each_together(parts, self.algorithm.make_experience):
            store.push(checked_batch(self.algorithm, "make_experience", experience))
        return cast(Batch, store.experience)


class RolloutEvaluator(Evaluator):
    """Evaluates a language model on prompts, too.

    Args:
        *parts: those of `Evaluator`.
        text: the sampling settings.
        sampling: samples responses.
        scoring: scores them.
    """

    def __init__(self, *parts: Any, text: Text, sampling: Sampling, scoring: Scoring) -> None:
        super().__init__(*parts)
        self.text, self.sampling, self.scoring = text, sampling, scoring

    def on_prompts(self) -> tuple[dict[str, float], list[Record]]:
        """Return means over all evaluation prompts, and a record per response.

        A swept setting is a suffix of each name.
        """
        metrics: dict[str, float] = {}
        samples: list[Record] = []
        for suffix, overrides in sweep(self.config.rollout.eval_kwargs):
            started = time.perf_counter()
            part, records = self._evaluate_at(overrides)
            part["time"] = time.perf_counter() - started
            metrics |= {f"eval/{name}{suffix}": value for name, value in part.items()}
            samples += [{**record, **({"setting": suffix[1:]} if suffix else {})} for record in records]
        return metrics, samples

    def _evaluate_at(self, overrides: dict[str, Any]) -> tuple[dict[str, float], list[Record]]:
        parallel, stop, size = self.view.parallel, self.view.run.stop, self.config.rollout.batch_size
        rows, shard = placed(self.algorithm.eval_rows), slice(parallel.rank, None, parallel.world)
        # over all processes' rows, so that none repeats; as `generate` does, which can repeat a response by its seed
        seeds = self.sampling.seeds(rows, "generate")[shard]
        mine, settings = rows[shard], self.text.settings(**overrides)
        records: list[Record] = []
        aggregates: list[tuple[int, dict[str, float]]] = []

        def measure_mine() -> None:
            for start in range(0, len(mine), size):
                stop.progressed()
                part = slice(start, start + size)
                with stop.interruptible(self.collector.samples_alone):
                    rollouts = self.sampling.sample(mine[part], settings, "evaluate", seeds[part])
                    whole, each = self._measure(rollouts, mine[part])
                records.extend(each)
                aggregates.append((len(rollouts), whole))

        parallel.sync_errors(measure_mine)
        records = parallel.sync_errors(lambda: self.scoring.made_finite(parallel.gather(records)))
        return means(records, parallel.gather(aggregates)), records

    def _measure(self, rollouts: Rollouts, rows: list[Row]) -> tuple[dict[str, float], list[Record]]:
        """Return the metrics of the rollouts as a whole, and a record per response, with the sampler's columns."""
        columns = columns_of(rows)
        record: dict[str, list[Any]] = {
            name: values for name, values in rollouts.columns.items() if name not in columns
        }
        record |= {"prompt": rollouts.prompts, "output": rollouts.outputs}
        if columns:
            record["columns"] = [
                dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
            ]
        record["length"] = [float(len(response)) for response in rollouts.responses]
        if self.scoring.available:
            record["reward"] = per_response(self.algorithm.score(rollouts)).tolist()
            record |= self.collector.current.extras
        if rollouts.turns is not None and rollouts.failed is not None:
            record["turns"] = [float(len(turns)) for turns in rollouts.turns]
            record["failed"] = rollouts.failed.float().tolist()
            record["episode"] = rollouts.turns
        return measure(self.algorithm.metric_fn, rollouts, record)
