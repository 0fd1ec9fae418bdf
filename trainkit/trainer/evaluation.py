"""Evaluation: responses to fixed prompts, scored and measured, at one or several sampling settings."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from trainkit import metrics as m
from trainkit.config import sweep
from trainkit.data import Batch, RolloutStore
from trainkit.data.batches import columns_of
from trainkit.errors import DataError
from trainkit.functional import per_response
from trainkit.rollouts import Record, means, measure
from trainkit.runs import run
from trainkit.seeding import placed
from trainkit.trainer.returns import checked_batch
from trainkit.trainer.scoring import dealt_with

if TYPE_CHECKING:
    from trainkit.data import Rollouts, Row
    from trainkit.trainer.accelerate import AccelerateRLTrainer
    from trainkit.trainer.loop import AcceleratedLoop

    Trainer = AccelerateRLTrainer[Any]


def evaluate(trainer: AcceleratedLoop[Any]) -> dict[str, float]:
    """Measure the model on the evaluation prompts and the held-out samples; see `AcceleratedLoop.evaluate`."""
    if not trainer.eval_rows and not trainer.eval_samples:
        raise DataError(
            "there are no evaluation prompts and no held-out samples; give eval_prompts or eval_samples, or call "
            "add_eval_pipeline(prompts)"
        )
    trainer.models.build()  # all processes must make it together, also one without rows
    found: dict[str, float] = {}
    samples: list[Record] = []
    unchanged = nullcontext() if trainer.row_limit is None else trainer.row_limit.unchanged()
    with unchanged, trainer.recorder.discarding(), trainer.run_state.stop.interruptible(trainer._runs_alone):
        if trainer.eval_rows:
            with trainer._sampling_model():
                found, samples = trainer.evaluation()
        if trainer.eval_samples:
            with trainer.inference():
                found |= held_out(trainer)
    at, hook = trainer.progress, trainer.hooks.hook
    at.evaluated, at.evaluation = at.step, dict(found)
    if trainer.parallel.is_main:
        hook.log_metrics(trainer=trainer, step=at.step, metrics=dict(found))
    run.report_findings(trainer, trainer.health.evaluated(found))
    hook.on_evaluate(trainer=trainer, step=at.step, metrics=dict(found), samples=samples)
    return found


def evaluate_if(trainer: AcceleratedLoop[Any], due: bool) -> None:
    """Evaluate if an evaluation is due and the run has data for it, and keep the best model."""
    if due and (trainer.eval_rows or trainer.eval_samples) and trainer.config.train.eval_interval:
        run.keep_best(trainer, trainer.evaluate())


def on_prompts(trainer: Trainer) -> tuple[dict[str, float], list[Record]]:
    """Return means over all evaluation prompts, and a record per response. A swept setting is a suffix of each name."""
    found: dict[str, float] = {}
    samples: list[Record] = []
    for suffix, overrides in sweep(trainer.config.rollout.eval_kwargs):
        started = time.perf_counter()
        part, records = _evaluate_at(trainer, overrides)
        part["time"] = time.perf_counter() - started
        found |= {f"eval/{name}{suffix}": value for name, value in part.items()}
        samples += [{**record, **({"setting": suffix[1:]} if suffix else {})} for record in records]
    return found, samples


@torch.no_grad()
def held_out(trainer: AcceleratedLoop[Any]) -> dict[str, float]:
    """Return the loss and metrics over the held-out samples as ``eval/<name>``: exact means over all processes."""
    held = trainer.held_out = _experience(trainer) if trainer.held_out is None else trainer.held_out
    experience = checked_batch(trainer, "prepare_step", trainer.prepare_step(held))

    def measured(micro: Batch) -> m.Metrics:
        trainer.run_state.stop.progressed()
        return trainer.updater.measure(micro.to(trainer.accelerator.device))[1]

    found = m.merge(*trainer.updater.each_together(trainer.updater.micro_batches(experience), measured))
    return {f"eval/{name}": value for name, value in m.compute(found, trainer.reduce).items()}


def prepare_held_out(trainer: AcceleratedLoop[Any]) -> None:
    """Make the experience of the held-out samples, if evaluations will need it; inside `inference`."""
    if trainer.eval_samples and trainer.config.train.eval_interval and trainer.held_out is None:
        with trainer.recorder.discarding():
            trainer.held_out = _experience(trainer)


def _experience(trainer: AcceleratedLoop[Any]) -> Batch:
    """Return the experience of this process's part of the held-out samples."""
    accelerator, size = trainer.accelerator, trainer.config.rollout.batch_size
    rows = trainer.eval_samples[accelerator.process_index :: accelerator.num_processes]
    store = RolloutStore[Any]()
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    for made in trainer.updater.each_together(parts, trainer.make_experience):
        store.push(checked_batch(trainer, "make_experience", made))
    return cast(Batch, store.experience)


def _evaluate_at(trainer: Trainer, overrides: dict[str, Any]) -> tuple[dict[str, float], list[Record]]:
    accelerator, size = trainer.accelerator, trainer.config.rollout.batch_size
    rows, shard = placed(trainer.eval_rows), slice(accelerator.process_index, None, accelerator.num_processes)
    # over all processes' rows, so that none repeats; as `generate` does, which can then repeat a response by its seed
    seeds = trainer.sampling.seeds(rows, "generate")[shard]
    mine, settings = rows[shard], trainer.settings(**overrides)
    records: list[Record] = []
    aggregates: list[tuple[int, dict[str, float]]] = []

    def measure_mine() -> None:
        for start in range(0, len(mine), size):
            trainer.run_state.stop.progressed()
            part = slice(start, start + size)
            with trainer.run_state.stop.interruptible(trainer._samples_alone):
                rollouts = trainer.sampling.sample(mine[part], settings, "evaluate", seeds[part])
                whole, each = _measure(trainer, rollouts, mine[part])
            records.extend(each)
            aggregates.append((len(rollouts), whole))

    trainer.parallel.sync_errors(measure_mine)
    records = trainer.parallel.sync_errors(lambda: dealt_with(trainer, trainer.gather(records)))
    return means(records, trainer.gather(aggregates)), records


def _measure(trainer: Trainer, rollouts: Rollouts, asked: list[Row]) -> tuple[dict[str, float], list[Record]]:
    """Return the metrics of the rollouts as a whole, and one record per response, with columns added by the sampler."""
    given = columns_of(asked)
    known: dict[str, list[Any]] = {name: column for name, column in rollouts.columns.items() if name not in given}
    known |= {"prompt": rollouts.prompts, "output": rollouts.outputs}
    if given:
        known["columns"] = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    known["length"] = [float(len(response)) for response in rollouts.responses]
    if trainer.scores_samples:
        known["reward"] = per_response(trainer.score(rollouts)).tolist()
        known |= trainer._sampling.told
    if rollouts.turns is not None and rollouts.failed is not None:
        known["turns"] = [float(len(turns)) for turns in rollouts.turns]
        known["failed"] = rollouts.failed.float().tolist()
        known["episode"] = rollouts.turns
    return measure(trainer.metric_fn, rollouts, known)
