"""Checks of exact means: how the rows of a step are divided changes neither its gradient nor its metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.data import Batch, Sequences
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import variants
from trainkit_kit.checks.tools import (
    RUN,
    flat_gradient,
    floats,
    gradient,
    nudged,
    require_close,
    require_close_state,
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
from trainkit_kit.failures import require
from trainkit_kit.launching import launch, on_cpu
from trainkit_kit.subjects import Bench

SIZES = (1, 2, 3, 5)
"""Sizes of micro-batches; most do not divide a batch, so that the last micro-batch is smaller."""
NUDGE = 0.02
"""How far the policy is moved in either direction: an estimate that is cut off at 0 is above 0 in one of them."""
SAME = 1e-5
"""Largest difference of weights after six steps that counts as rounding."""


@check()
def micro_batches(bench: Bench) -> None:
    """Check that a step has the same gradient, however its rows are divided into micro-batches.

    If the means of micro-batches are averaged, short rows and the last rows count more. If they are added, the
    gradient of the loss, or of the critic alone, grows with the number of micro-batches. Losses that compare
    every row with all other rows instead of its own counterpart change, too.

    Causes: `loss` is no mean over the units that `weight` counts; a statistic, such as whitening, inside of `loss`; [B]
    and [B, 1] that broadcast to [B, B].
    """
    for sign, sizes in ((1, SIZES[::2]), (-1, SIZES[1::2])):
        whole = nudged(bench.collected(), sign * NUDGE)
        batch = whole.store.experience
        exact = gradient(whole, batch)
        for size in sizes:
            trainer = bench.trainer(train__microbatch_size=size, train__max_grad_norm=None)
            if size == SIZES[-1]:  # of experience that is made in micro-batches, too
                trainer.collect()
                batch = trainer.store.experience
            found, _ = stepped(nudged(trainer, sign * NUDGE), batch)
            what = f"gradients of a step as a whole and in micro-batches of {size}"
            require_same_gradient(exact, found, what, model=trainer.unwrapped)


@check()
def accumulation(bench: Bench) -> None:
    """Check that two unequal parts of a step, each weighted by its `weight`, together have the whole gradient.

    `weight` must count the units that `loss` averages over. What needs the whole step, e.g. a mean in the loss's
    denominator, belongs in `prepare_step`. Otherwise accumulating gradients trains another loss.

    Causes: a `weight` that counts rows while `loss` averages over tokens, or the reverse; rows without weight in the
    mean; a mean over the step that is not in `prepare_step`.
    """
    trainer = nudged(bench.collected())
    batch = trainer.store.experience
    whole = gradient(trainer, batch)
    with torch.no_grad():
        prepared = trainer.prepare_step(batch)
    require(len(prepared) == len(batch), f"prepare_step made {len(prepared)} rows from {len(batch)}")
    for part in map(prepared.select, unequal(prepared)):
        share = part.weight / prepared.weight
        (trainer.loss(part.to(trainer.accelerator.device))[0] * share.to(trainer.accelerator.device)).backward()
    found = flat_gradient(trainer.unwrapped)
    what = "gradients of a whole step and of two parts of it, weighted by batch.weight"
    require_same_gradient(whole, found, what, model=trainer.unwrapped)


@check()
def weight_counts(bench: Bench) -> None:
    """Check that `weight` counts what `unit` names, adds up over rows, and is what the loop averages by.

    `weight` is the denominator of every mean over micro-batches and processes: if it counts rows and the loss averages
    over tokens, short responses contribute too much to the gradient. `lengths` must count all tokens of a row;
    otherwise micro-batches of a given number of tokens need more memory than planned.

    Causes: `TokenBatch` for a loss over responses: set `unit` and override `weight`; a weight that leaves out rows
    which the loss averages over.
    """
    trainer = bench.collected()
    batch = trainer.store.experience
    whole, each = batch.weight.cpu(), torch.stack([row.weight.cpu() for row in _rows(batch)])
    require(whole.shape == (), f"the weight of a batch has the shape {tuple(whole.shape)}; it must be a scalar, []")
    require(whole > 0, "the weight of a whole collection is 0, so no step would be made on it")
    require(bool((each >= 0).all()), f"the weight of a row is {float(each.min())}")
    require_close(each.sum(), whole, "the sum of the weights of a batch's rows and the weight of the batch")
    _require_unit(batch, each)
    with torch.no_grad():
        prepared = trainer.prepare_step(batch)
    require_close(prepared.weight.cpu(), whole, "the weights of a step's rows after prepare_step and before")
    _require_lengths(batch)
    counted = trainer.updater.measure(prepared.to(trainer.accelerator.device))[1]["loss/total"].count
    require_close(counted.cpu().float(), whole.float(), "what the metric loss/total counts, and the batch's weight")
    before = trainer.progress.tokens
    trainer.update(batch)
    seen = trainer.progress.tokens - before
    require(seen == int(whole), f"a step counted {seen} {batch.unit}; its weight is {float(whole):g}")


def _rows(batch: Any) -> list[Any]:
    return [batch.select(torch.tensor([row])) for row in range(len(batch))]


def _require_unit(batch: Any, each: Tensor) -> None:
    if batch.unit in ("rows", "pairs"):
        require(bool((each <= 1).all()), f"the unit is {batch.unit}, and a row has the weight {float(each.max()):g}")
    tokens = [_response_tokens(row) for row in _rows(batch)] if batch.unit == "tokens" else []
    if any(tokens):
        counts = torch.tensor(tokens, dtype=each.dtype)
        require(
            bool((each <= counts).all()), f"the unit is tokens, and rows of {tokens} have the weights {each.tolist()}"
        )
        alike = len(set(tokens)) > 1 and len(set(each.tolist())) == 1
        require(
            not alike, f"the unit is tokens, and rows of {min(tokens)} to {max(tokens)} all weigh {float(each[0]):g}"
        )


def _require_lengths(batch: Any) -> None:
    lengths = batch.lengths.cpu()
    for sequences in sequences_in(batch):
        real = sequences.attention_mask.sum(1).cpu()
        require(
            bool((lengths >= real).all()),
            f"by lengths, rows of the {type(batch).__name__} have {lengths.tolist()} tokens, and a sequence in them "
            f"has {real.tolist()}; the size of micro-batches depends on it: override the property `lengths`",
        )


def _response_tokens(batch: Batch) -> int:
    if isinstance(batch, Sequences):
        return int(batch.response_mask.sum())
    return sum(_response_tokens(part) for part in batch.parts().values() if isinstance(part, Batch))


@check()
def metric_totals(bench: Bench) -> None:
    """Check that each metric of the loss, merged from micro-batches of any size, is that of the whole batch.

    In a mean of means a micro-batch of two tokens counts as much as one of a thousand. Metrics are totals and
    counts, `Mean.of(values, mask)`, and every micro-batch must have the same ones. Where there are
    ``rewards/accuracies``, they are the share of the rows whose ``rewards/margins`` are positive.

    Causes: `Mean.of(values)` without the mask; a metric that only some micro-batches have; a number of Python; an
    accuracy of log-probabilities beside margins of rewards.
    """
    trainer = nudged(bench.collected())
    with torch.no_grad():
        prepared = trainer.prepare_step(trainer.store.experience)
        whole = floats(trainer.updater.measure(prepared.to(trainer.accelerator.device))[1])
        for size in SIZES:
            parts = [trainer.updater.measure(part.to(trainer.accelerator.device))[1] for part in prepared.split(size)]
            for part in parts:
                odd = sorted(part.keys() ^ whole.keys())
                require(not odd, f"not all micro-batches of {size} have the metric {', '.join(odd)}")
            together = floats(m.merge(*parts))
            require_same_metrics(whole, together, f"metrics of a batch as a whole and in micro-batches of {size}")
            for one in map(floats, parts if size == 1 and "rewards/margins" in whole else ()):
                margin, accuracy = one["rewards/margins"], one.get("rewards/accuracies", math.nan)
                right = math.isnan(accuracy) or math.isnan(margin) or margin == 0 or accuracy == (margin > 0)
                require(right, f"rewards/accuracies of a row is {accuracy:g}, and rewards/margins is {margin:g}")


@check(where=lambda subject: not subject.online and subject.language)
def sampling_settings_do_not_count(bench: Bench) -> None:
    """Check that what is learnt from a dataset does not depend on how responses are sampled for evaluations.

    Online, the temperature is part of the policy, whose ratios are those of the distribution that has sampled.
    A dataset was not sampled at that temperature.

    Causes: `make_policy` with the temperature of `rollout`; a `get_arch` that was copied from an online algorithm.
    """
    trainers = [nudged(bench.collected(rollout__temperature=temperature)) for temperature in (1.0, 0.5)]
    one, other = (gradient(trainer, trainer.store.experience) for trainer in trainers)
    what = "gradients with a rollout.temperature of 1 and of 0.5"
    require_same_gradient(one, other, what, model=trainers[0].unwrapped)


@check(where=lambda subject: subject.installed)
def two_processes(bench: Bench) -> None:
    """Check that two processes train as one does: same gradient, metrics, samples, state and weights after six steps.

    Gradients are exchanged only if `loss` calls `policy`, not a module inside it. Whitening by the moments of
    one process's rows differs from whitening by those of all rows. A mean of the processes' means is another
    mean. Processes that sample with the same seed sample the same responses twice. What depends on
    the order of `gather`, or on a number of rows that is one process's, differs between one process and two. So do two
    processes that divide the model (`train.sharding: fsdp2`): a loss, or an experience, that reads weights by itself or
    does not call the model equally often on all processes fails there. Two processes that are resumed end with the same
    bits. With the settings of a variant they neither divide the model nor are resumed.

    Causes: `self.unwrapped` or `self.policy.module` in `loss`; statistics without `reduce=self.reduce`; an order of
    rows that depends on the process; a seed without the rank.
    """
    trainer = nudged(bench.collected(train__max_grad_norm=None), NUDGE)
    batch, state = trainer.store.experience, trainer.state_dict()
    places = [weights(trainer), weights(nudged(trainer, -2 * NUDGE))]
    given = {
        "weights": places,
        "state": state,
        "batch": batch,
        "settings": bench.subject.settings,
        "variant": bench.subject.variant,
    }
    folder = bench.place()
    said = launch(bench.subject.name, folder, given)
    for at, place in enumerate(places):
        trainer.unwrapped.load_state_dict(place)
        trainer.load_state_dict(state)
        gradient_alone, found = stepped(trainer, batch)
        _require_one_step(trainer, gradient_alone, floats(found), [each["steps"][at] for each in said])
    if bench.subject.language:
        _require_one_collection(bench.trainer(), [each["run"]["collection"] for each in said])
    if bench.subject.online:
        _require_other_samples(*[each["drawn"] for each in said])
    _require_one_run(folder / "run", [each["run"] for each in said])
    for each in said if "resumed" in said[0] else ():
        what = "of two processes that are resumed and of two that never stopped"
        require_same_weights(each["run"]["weights"], each["resumed"]["weights"], f"the weights {what}")
        require_same_state(each["run"]["state"], each["resumed"]["state"], f"the state_dicts {what}")
    with on_cpu():  # as the two processes are
        alone = bench.learnt(**RUN)
    _require_run_of_one_process(weights(alone), said[0]["run"]["weights"])
    what = "the state_dicts after a run of one process and of two"
    require_close_state(alone.state_dict(), said[0]["run"]["state"], what)
    if "sharded" in said[0]:
        _require_same_in_shards(said[0]["run"]["weights"], said[0]["sharded"])


def _require_one_step(trainer: Any, alone: Tensor, found: dict[str, float], said: list[dict[str, Any]]) -> None:
    one, other = (each["gradient"] for each in said)
    require(torch.equal(one, other), "two processes do not exchange their gradients; loss must call self.policy")
    what = "gradients of a step by one process and by two that share its rows"
    require_same_gradient(alone.cpu(), one, what, model=trainer.unwrapped)
    require_same_metrics(found, said[0]["metrics"], "metrics of a step by one process and by two")


def _require_one_collection(trainer: Any, said: list[dict[str, Any]]) -> None:
    made, prepared = (type(said[0][key]).cat([each[key] for each in said]) for key in ("made", "prepared"))
    with torch.no_grad():
        alone = trainer.prepare_experience(made)
    require_same_rows(alone, prepared, "experience prepared by one process and by two from the same rows")
    found, both = floats(trainer.recorder.pending), said[0]["metrics"]
    require_same_metrics(
        {name: found[name] for name in both}, both, "metrics of a collection prepared by one process and by two"
    )


def _require_other_samples(one: Batch, other: Batch) -> None:
    left, right = under_masks(one).flatten(), under_masks(other).flatten()
    same = all(torch.equal(left[name], right[name]) for name in left)
    require(not same, "two processes draw the same samples; include the process's rank in the seed")


def _require_run_of_one_process(alone: dict[str, Tensor], both: dict[str, Tensor]) -> None:
    off = {name: float((alone[name] - both[name]).abs().max()) for name in alone if alone[name].numel()}
    worst = max(off, key=lambda name: off[name])
    require(
        off[worst] <= SAME,
        f"the weights after a run of one process and of two differ by up to {off[worst]:.2g}, in {worst}; rows must be "
        "in the order of their prompts, equally many for each (or set rows_vary), and nothing may depend on the number "
        "of processes",
    )


def _require_same_in_shards(whole: dict[str, Tensor], sharded: dict[str, Tensor]) -> None:
    off = {name: float((whole[name] - sharded[name]).abs().max()) for name in whole if whole[name].numel()}
    worst = max(off, key=lambda name: off[name])
    require(
        off[worst] <= SAME,
        f"the weights of two processes that divide the model (fsdp2) and of two that do not differ by up to "
        f"{off[worst]:.2g}, in {worst}; loss may read the model by self.policy(...) alone",
    )


def _require_one_run(run_dir: Path, said: list[dict[str, Any]]) -> None:
    one, other = said
    require_same_weights(one["weights"], other["weights"], "the weights that two processes end with")
    require_same_state(one["state"], other["state"], "the state_dicts that two processes end with")
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    logged = [line["step"] for line in lines if "train/lr" in line]
    require(logged == list(range(1, one["steps"] + 1)), f"a run of {one['steps']} steps logged the steps {logged}")
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    due = [f"step_{step:08d}" for step in range(1, one["steps"] + 1) if step % 3 == 0 or step == one["steps"]]
    require(saved == due, f"two processes saved the checkpoints {', '.join(saved)} instead of {', '.join(due)}")


@check(where=lambda subject: "packing" in subject.method_fields)
def packing(bench: Bench) -> None:
    """Check that samples packed into one row have the same loss and gradient as in rows of their own.

    A packed sample that attends to the sample before it, or whose positions continue from there, is learnt as another
    text. The first token after a boundary must not be predicted from the tokens before the boundary. No packed row is
    longer than `train.seq_length`, also if this is hardly more than the longest sample. All this is so with each switch
    at another value, too, such as one that trains on prompts.

    Causes: segments that are dropped when rows are packed; positions that are not counted from 0 in each sample; an
    index into the sorted samples that is used for the samples in their order.
    """
    for settings in variants(bench):
        if "method.packing" not in settings:
            _require_packed(bench.under(**settings))


def _require_packed(bench: Bench) -> None:
    longest = int(bench.collected().store.experience.lengths.max())
    tight = bench.collected(method__packing=True, train__seq_length=longest + 1).store.experience
    require(
        int(tight.lengths.max()) <= longest + 1,
        f"with train.seq_length {longest + 1}, a packed row has {int(tight.lengths.max())} tokens",
    )
    trainers = [nudged(bench.collected(method__packing=packed)) for packed in (False, True)]
    apart, together = (trainer.store.experience for trainer in trainers)
    require(len(together) < len(apart), f"{len(apart)} samples are packed into {len(together)} rows")
    require_close(together.weight, apart.weight, "weights of packed samples and of samples in rows of their own")
    losses = [
        trainer.updater.measure(trainer.store.experience.to(trainer.accelerator.device))[0] for trainer in trainers
    ]
    require_close(losses[0].detach(), losses[1].detach(), "losses of samples in rows of their own and packed")
    found = [gradient(trainer, trainer.store.experience) for trainer in trainers]
    require_same_gradient(found[0], found[1], "gradients of samples in rows of their own and packed")
