"""Checks about exact means: how the rows of a step are divided changes neither its gradient nor its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.data import Batch, Sequences
from trainkit.testing.checks.tools import (
    flat_gradient,
    floats,
    gradient,
    nudged,
    require_close,
    require_same_gradient,
    require_same_metrics,
    require_same_rows,
    require_same_state,
    require_same_weights,
    sequences_in,
    stepped,
    under_masks,
    unequal,
    weights,
)
from trainkit.testing.conformance import Bench, check, require
from trainkit.testing.launching import launch

SIZES = (1, 2, 3, 5)
"""Rows of a micro-batch; most do not divide a batch, so that the last one is shorter."""


@check()
def micro_batches(bench: Bench) -> None:
    """A step has one gradient, however its rows are divided into micro-batches.

    Where the means of micro-batches are averaged, short rows and the last rows weigh more (S-62); where they are added,
    the gradient grows with their number, of the whole loss or of the critic alone (S-11). Losses that set every row
    against every other one instead of its own (S-37) change with them too.
    """
    whole = nudged(bench.collected())
    exact = gradient(whole, whole.store.experience)
    for size in SIZES:
        trainer = nudged(bench.collected(train__microbatch_size=size, train__max_grad_norm=None))
        found, _ = stepped(trainer, trainer.store.experience)
        require_same_gradient(exact, found, f"gradients of a step as a whole and in micro-batches of {size}")


@check()
def accumulation(bench: Bench) -> None:
    """Two unequal parts of a step, each weighted by its `weight`, have together the gradient of the whole.

    `weight` must count what the mean in `loss` is taken over, and what must be known of a whole step, as a mean in the
    loss's denominator, belongs into `prepare_step`; otherwise accumulating gradients trains another loss (S-11, S-62).
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    whole = gradient(trainer, batch)
    with torch.no_grad():
        prepared = trainer.prepare_step(batch)
    require(len(prepared) == len(batch), f"prepare_step made {len(prepared)} rows of {len(batch)}")
    for part in map(prepared.select, unequal(prepared)):
        share = part.weight / prepared.weight
        (trainer.loss(part.to(trainer.accelerator.device))[0] * share.to(trainer.accelerator.device)).backward()
    found = flat_gradient(trainer)
    require_same_gradient(whole, found, "gradients of a whole step and of two parts of it, weighted by batch.weight")


@check()
def weight_counts(bench: Bench) -> None:
    """`weight` counts over rows: it is what `unit` says, that of parts adds up, and the loop goes by it.

    It is the denominator of every mean over micro-batches and processes: a weight of rows under a loss that averages
    over tokens gives short responses too much of the gradient (S-62). And `lengths` counts all that a row takes up,
    or micro-batches of so many tokens are larger than the memory they were to fit into.
    """
    trainer = bench.collected()
    batch = trainer.store.experience
    whole, each = batch.weight.cpu(), torch.stack([row.weight.cpu() for row in _rows(batch)])
    require(whole.shape == (), f"the weight of a batch has the shape {tuple(whole.shape)}; it is one number")
    require(whole > 0, "the weight of a whole collection is 0, so that no step would be made on it")
    require(bool((each >= 0).all()), f"the weight of a row is {float(each.min())}")
    require_close(each.sum(), whole, "the weights of a batch's rows together, and of the batch")
    _require_unit(batch, each)
    with torch.no_grad():
        prepared = trainer.prepare_step(batch)
    require_close(prepared.weight.cpu(), whole, "the weights of a step's rows after prepare_step and before")
    _require_lengths(batch)
    counted = trainer.measure(prepared.to(trainer.accelerator.device))[1]["loss/total"].count
    require_close(counted.cpu().float(), whole.float(), "what the metric loss/total counts, and the batch's weight")
    before = trainer.progress.tokens
    trainer.update(batch)
    seen = trainer.progress.tokens - before
    require(seen == int(whole), f"a step counted {seen} {batch.unit}, and its weight is {float(whole):g}")


def _rows(batch: Any) -> list[Any]:
    return [batch.select(torch.tensor([row])) for row in range(len(batch))]


def _require_unit(batch: Any, each: Tensor) -> None:
    if batch.unit in ("rows", "pairs"):
        require(bool((each <= 1).all()), f"the unit is {batch.unit}, and a row weighs {float(each.max()):g}")
    tokens = [_response_tokens(row) for row in _rows(batch)] if batch.unit == "tokens" else []
    if any(tokens):
        counts = torch.tensor(tokens, dtype=each.dtype)
        require(bool((each <= counts).all()), f"the unit is tokens, and a row of {tokens} weighs {each.tolist()}")
        alike = len(set(tokens)) > 1 and len(set(each.tolist())) == 1
        require(not alike, f"the unit is tokens, and rows of {min(tokens)} to {max(tokens)} weigh {float(each[0]):g}")


def _require_lengths(batch: Any) -> None:
    lengths = batch.lengths.cpu()
    for sequences in sequences_in(batch):
        real = sequences.attention_mask.sum(1).cpu()
        require(
            bool((lengths >= real).all()),
            f"lengths says that rows of the {type(batch).__name__} have {lengths.tolist()} tokens, and a sequence in "
            f"them has {real.tolist()}; train.microbatch_tokens goes by it: override the property `lengths`",
        )


def _response_tokens(batch: Batch) -> int:
    if isinstance(batch, Sequences):
        return int(batch.response_mask.sum())
    return sum(_response_tokens(part) for part in batch.parts().values() if isinstance(part, Batch))


@check()
def metric_totals(bench: Bench) -> None:
    """Every metric of the loss, put together from micro-batches of any size, is that of the whole batch.

    A mean of means gives a micro-batch of two tokens the say of one of a thousand (S-56). Metrics are totals and
    counts, `Mean.of(values, mask)` of what they are means of; and every micro-batch has the same ones.
    """
    trainer = nudged(bench.collected())
    with torch.no_grad():
        prepared = trainer.prepare_step(trainer.store.experience)
        whole = floats(trainer.measure(prepared.to(trainer.accelerator.device))[1])
        for size in SIZES:
            parts = [trainer.measure(part.to(trainer.accelerator.device))[1] for part in prepared.split(size)]
            for part in parts:
                odd = sorted(part.keys() ^ whole.keys())
                require(not odd, f"only some micro-batches of {size} have the metric {', '.join(odd)}")
            together = floats(m.merge(*parts))
            require_same_metrics(whole, together, f"metrics of a batch as a whole and in micro-batches of {size}")


@check(where=lambda subject: subject.installed)
def two_processes(bench: Bench) -> None:
    """Two processes train as one does: one gradient, one set of metrics, one set of weights, and samples of their own.

    Gradients are exchanged only if `loss` calls `policy`, and not what is inside it (S-48). Moments of one process's
    rows whiten by other numbers than those of all (S-10), a mean over means of processes is another mean (S-38, S-62),
    and processes that sample with one seed sample the same twice (S-55).
    """
    trainer = nudged(bench.collected(train__max_grad_norm=None))
    batch = trainer.store.experience
    given = {"weights": weights(trainer), "state": trainer.state_dict(), "batch": batch}
    folder = bench.place()
    said = launch(bench.subject.name, folder, given)
    alone, found = stepped(trainer, batch)
    _require_one_step(alone, floats(found), [each["step"] for each in said])
    if bench.subject.language:
        _require_one_collection(bench.trainer(), [each["run"]["collection"] for each in said])
    if bench.subject.online:
        _require_other_samples(*[each["drawn"] for each in said])
    _require_one_run(folder / "run", [each["run"] for each in said])


def _require_one_step(alone: Tensor, found: dict[str, float], said: list[dict[str, Any]]) -> None:
    one, other = (each["gradient"] for each in said)
    require(torch.equal(one, other), "two processes do not exchange their gradients; loss must call self.policy")
    require_same_gradient(alone.cpu(), one, "gradients of a step by one process and by two that share its rows")
    require_same_metrics(found, said[0]["metrics"], "metrics of a step by one process and by two")


def _require_one_collection(trainer: Any, said: list[dict[str, Any]]) -> None:
    made, prepared = (type(said[0][key]).cat([each[key] for each in said]) for key in ("made", "prepared"))
    with torch.no_grad():
        alone = trainer.prepare_experience(made)
    require_same_rows(alone, prepared, "experience that one process prepares and two do, of the same rows")
    found, both = floats(trainer._pending), said[0]["metrics"]
    require_same_metrics(
        {name: found[name] for name in both}, both, "metrics of a collection that one process prepares and two do"
    )


def _require_other_samples(one: Batch, other: Batch) -> None:
    left, right = under_masks(one).flatten(), under_masks(other).flatten()
    same = all(torch.equal(left[name], right[name]) for name in left)
    require(not same, "two processes draw the same samples; seed what is drawn by the process's rank, too")


def _require_one_run(run_dir: Path, said: list[dict[str, Any]]) -> None:
    one, other = said
    require_same_weights(one["weights"], other["weights"], "the weights that two processes end with")
    require_same_state(one["state"], other["state"], "the state_dicts that two processes end with")
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    logged = [line["step"] for line in lines if "train/lr" in line]
    require(logged == list(range(1, one["steps"] + 1)), f"a run of {one['steps']} steps logged the steps {logged}")
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    due = [f"step_{step:08d}" for step in range(1, one["steps"] + 1) if step % 3 == 0 or step == one["steps"]]
    require(saved == due, f"two processes saved {', '.join(saved)}; due were {', '.join(due)}")


@check(where=lambda subject: "packing" in subject.method_fields)
def packing(bench: Bench) -> None:
    """Samples that are packed into one row have the loss and the gradient that they have in rows of their own.

    A packed sample that attends to the one before it, or whose positions go on from there, is learnt as another text;
    and the first token behind a boundary must not be predicted from what stands before it.
    """
    trainers = [nudged(bench.collected(method__packing=packed)) for packed in (False, True)]
    apart, together = (trainer.store.experience for trainer in trainers)
    require(len(together) < len(apart), f"{len(apart)} samples are packed into {len(together)} rows")
    require_close(together.weight, apart.weight, "weights of packed samples and of samples in rows of their own")
    losses = [trainer.measure(trainer.store.experience.to(trainer.accelerator.device))[0] for trainer in trainers]
    require_close(losses[0].detach(), losses[1].detach(), "losses of samples in rows of their own and packed")
    found = [gradient(trainer, trainer.store.experience) for trainer in trainers]
    require_same_gradient(found[0], found[1], "gradients of samples in rows of their own and packed")
