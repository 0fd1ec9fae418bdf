"""Bugs of the loop: classes that a trainer derives from before it derives from the loop.

This module is copied beside the plugin that has the bug, and imports nothing of the tests.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import save_file

from trainkit import AccelerateRLTrainer, Sequences, Verdict
from trainkit.functional import at_last, per_response
from trainkit.models import Reference
from trainkit.seeding import generator
from trainkit.trainer import optim

Loop = AccelerateRLTrainer[Any]


# ------------------------------------------------------------------------------------------------ how a step is made


class MeansOfMeans(Loop):
    """Every micro-batch counts alike, however many tokens it has."""

    def micro_batches(self, batch: Any) -> Any:
        self.parts = super().micro_batches(batch)
        return self.parts

    def _backward(self, micro: Any, share: Any) -> Any:
        loss, found = self.measure(micro)
        self.accelerator.backward(loss / len(self.parts))
        return found


class MicroBatchesSummed(Loop):
    """The gradient is the sum of those of the micro-batches, each of a mean."""

    def _backward(self, micro: Any, share: Any) -> Any:
        loss, found = self.measure(micro)
        self.accelerator.backward(loss)
        return found


class MeansOfRanks(Loop):
    """Each process normalises by what it holds itself, and reports that alone."""

    def reduce(self, x: Any) -> Any:
        return x


class ClippedOnce(Loop):
    """An iterator over the parameters is exhausted after the first step, and nothing is clipped any more."""

    def _make_step(self, found: Any) -> Any:
        self.exhaustible = getattr(self, "exhaustible", self.policy.parameters())
        clip = self.accelerator.clip_grad_norm_
        self.sharding.clip = lambda limit: clip(self.exhaustible, limit or torch.inf).detach()  # type: ignore[method-assign]
        return super()._make_step(found)


class GuardThatSteps(Loop):
    """A step that is skipped has its gradient set to zero, and the optimizer makes it all the same."""

    def _judged(self, found: Any) -> Any:
        if super()._judged(found) is not Verdict.STEP:
            for parameter in self.unwrapped.parameters():
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        return Verdict.STEP


class ScheduleFirst(Loop):
    """The schedule moves before the optimizer: the first rate is skipped, and the last step wasted."""

    def _make_step(self, found: Any) -> Any:
        optim.advance(self.scheduler)
        self.scheduler.last_epoch -= 1  # the loop moves it once more, to where it is
        return super()._make_step(found)


class GlobalRandomness(Loop):
    """Training draws from Python's global generator, which everybody shares and no checkpoint holds."""

    def measure(self, micro: Any) -> Any:
        loss, found = super().measure(micro)
        return loss * (1 + 0.01 * random.random()), found


# ------------------------------------------------------------------------------------------------ saving and resuming


class OptimizerForgotten(Loop):
    """Adam's moments are not loaded."""

    def load_loop_state(self, state: Any) -> None:
        fresh = copy.deepcopy(self.optimizer.state_dict())
        super().load_loop_state({**state, "optimizer": fresh})


class PositionForgotten(Loop):
    """A resumed run begins its collection again."""

    def load_loop_state(self, state: Any) -> None:
        super().load_loop_state({**state, "progress": {**state["progress"], "epoch": 0, "position": 0}})


class CursorForgotten(Loop):
    """A resumed run reads the prompts from the first one on."""

    def load_loop_state(self, state: Any) -> None:
        super().load_loop_state({**state, "progress": {**state["progress"], "cursor": 0}})


class SamplerForgotten(Loop):
    """Responses are drawn from one generator for the whole run, of which no checkpoint knows."""

    def _sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any) -> Any:
        if purpose == "train":
            self.draws = getattr(self, "draws", None) or generator(self.config.train.seed, "own")
            seeds = torch.randint(1 << 30, (len(rows),), generator=self.draws).tolist()
        return super()._sample(rows, settings, purpose, seeds)


class ScheduleForgotten(Loop):
    """A resumed run begins its schedule again."""

    def load_loop_state(self, state: Any) -> None:
        super().load_loop_state({**state, "scheduler": copy.deepcopy(self.scheduler.state_dict())})


class ExportedWrapper(Loop):
    """The export has the names of the wrapper, of which transformers knows none, so it starts from random weights."""

    def write_model(self, building: Any, target: Any) -> None:
        super().write_model(building, target)
        weights = {name: tensor.clone() for name, tensor in self.unwrapped.state_dict().items()}
        save_file(weights, building / "model.safetensors", {"format": "pt"})


# -------------------------------------------------------------------------------------------- sampling and comparing


class AdvantagesOfIntegers(Loop):
    """Notes the type of the rewards, for the trainer to have its advantages in."""

    def score(self, rollouts: Any) -> Any:
        given = self.reward_fn

        def noted(**columns: Any) -> Any:
            scores = given(**columns)
            self.kind = torch.as_tensor(scores).dtype
            return scores

        self.reward_fn = noted
        try:
            return super().score(rollouts)
        finally:
            self.reward_fn = given


class OneSeedForAll(Loop):
    """Samples are drawn by the index of the row in the call, which is the same on all processes."""

    def _sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any) -> Any:
        return super()._sample(rows, settings, purpose, range(len(rows)))


class DrawnByRank(Loop):
    """The process's number is added to the seed of a sample."""

    def _sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any) -> Any:
        rank = self.accelerator.process_index
        return super()._sample(rows, settings, purpose, [seed ^ rank for seed in seeds])


class ShuffledApart(Loop):
    """A step has as many rows of each process, which the process has chosen among its own."""

    def _one_pass(self) -> Any:
        at, size = self.progress, self.config.train.batch_size // self.accelerator.num_processes
        order = generator(self.config.train.seed, "order", at.collection, at.epoch)
        for batch in self.store.batches(size, order, start=at.position):
            if at.stopped:
                return
            at.position += 1
            if at.position * size >= len(self.store):
                at.epoch, at.position = at.epoch + 1, 0
            yield batch


class ObservationsDropped(Loop):
    """Experience is made of prompts and outputs."""

    def _experience(self, rollouts: Any, scores: Any) -> Any:
        pairs = ([ids.tolist() for ids in side] for side in (rollouts.queries, rollouts.responses))
        sequences = Sequences.from_lists(*pairs)
        bare = replace(rollouts, sequences=sequences, logprobs=None, entropy=None, hidden=None)
        return super()._experience(bare, per_response(scores))


class ObservationsTrained(Loop):
    """The response is everything after the prompt."""

    def _experience(self, rollouts: Any, scores: Any) -> Any:
        sequences = rollouts.sequences
        whole = replace(sequences, response_mask=sequences.attention_mask & ~sequences.prompt_mask)
        bare = replace(rollouts, sequences=whole, logprobs=None, entropy=None, hidden=None)
        return super()._experience(bare, scores)


class LastTurnPaid(Loop):
    """The reward of an episode is that of its last turn."""

    def score(self, rollouts: Any) -> Any:
        scores = super().score(rollouts)
        return scores if scores.dim() == 1 else at_last(scores, rollouts.sequences.response_mask)


class StaleSampler(Loop):
    """The sampler keeps a copy of the model, as it was at first."""

    @cached_property
    def sampler(self) -> Any:
        trained = self.unwrapped.model
        self.unwrapped.model = copy.deepcopy(trained)
        try:
            return AccelerateRLTrainer.sampler.func(self)
        finally:
            self.unwrapped.model = trained


class EvaluationDraws(Loop):
    """Samples are drawn by the number of samples before them, those of evaluations included."""

    drawn = 0

    def _sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any) -> Any:
        self.drawn += len(rows)
        return super()._sample(rows, settings, purpose, range(self.drawn - len(rows), self.drawn))


class ReferenceInTrainMode(Loop):
    """The reference draws dropout."""

    def make_reference(self, model: Any) -> Any:
        reference = super().make_reference(model)
        reference.policy.train()
        return reference


class ReferenceSkipsABlock(Loop):
    """The reference goes on from the embeddings with the second block."""

    def make_reference(self, model: Any) -> Reference:
        reference = super().make_reference(model)
        del reference.policy.model.transformer.h[0]
        return reference


class ReferenceMoves(Loop):
    """The reference shares the embeddings with the policy, which trains them."""

    def make_reference(self, model: Any) -> Reference:
        reference = super().make_reference(model)
        reference.policy.model.set_input_embeddings(model.model.get_input_embeddings())
        return reference


class AdapterStaysOn(Loop):
    """The reference of an adapted model has the adapter switched on, which is trained."""

    def make_reference(self, model: Any) -> Any:
        reference = super().make_reference(model)
        if hasattr(model.model, "peft_config"):
            reference.policy = model
        return reference


class RowsChanged(Loop):
    """Rows of the dataset are changed while they are used, so the second use finds them changed."""

    def make_experience(self, rows: Any) -> Any:
        found = super().make_experience(rows)
        for row in self.pipeline.rows:
            row["prompt"] = row["prompt"][:1]
        return found


class SampledWithDropout(Loop):
    """The model samples in training mode, and what is trained says something else."""

    def _sample(self, *args: Any) -> Any:
        self.sampler  # noqa: B018  (and the reference beside it are made of the model as it is)
        module = self.unwrapped
        module.eval = lambda: module.train()
        try:
            return super()._sample(*args)
        finally:
            del module.eval
            module.eval()
