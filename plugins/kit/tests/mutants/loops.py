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
from trainkit.trainer import Progress, optim
from trainkit.trainer.collect import RolloutCollector
from trainkit.trainer.models import Models
from trainkit.trainer.sampling import Sampling
from trainkit.trainer.update import Updater

Loop = AccelerateRLTrainer[Any]


# ------------------------------------------------------------------------------------------------ how a step is made


class WithUpdater(Loop):
    """A loop whose steps are made by another updater."""

    updater_class: type[Updater]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.updater.__class__ = self.updater_class


class WithSampling(Loop):
    """A loop that samples in another way."""

    sampling_class: type[Sampling]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampling.__class__ = self.sampling_class


class WithModels(Loop):
    """A loop whose models, optimizer and schedule are restored in another way."""

    models_class: type[Models]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.models.__class__ = self.models_class


class WithProgress(Loop):
    """A loop whose progress is restored in another way."""

    progress_class: type[Progress]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.progress.__class__ = self.progress_class


class WithCollector(Loop):
    """A loop that collects in another way."""

    collector_class: type[RolloutCollector]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.collector.__class__ = self.collector_class


class MeansOfMeans(WithUpdater):
    """Every micro-batch counts alike, however many tokens it has."""

    class updater_class(Updater):
        def micro_batches(self, batch: Any) -> Any:
            self.parts = super().micro_batches(batch)
            return self.parts

        def _backward(self, micro: Any, share: Any) -> Any:
            loss, found = self.measure(micro)
            self.parallel.accelerator.backward(loss / len(self.parts))
            return found


class MicroBatchesSummed(WithUpdater):
    """The gradient is the sum of those of the micro-batches, each of a mean."""

    class updater_class(Updater):
        def _backward(self, micro: Any, share: Any) -> Any:
            loss, found = self.measure(micro)
            self.parallel.accelerator.backward(loss)
            return found


class MeansOfRanks(Loop):
    """Each process normalises by what it holds itself, and reports that alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parallel.reduce = lambda x: x  # type: ignore[method-assign]


class ClippedOnce(WithUpdater):
    """An iterator over the parameters is exhausted after the first step, and nothing is clipped any more."""

    class updater_class(Updater):
        def _make_step(self, found: Any) -> Any:
            self.exhaustible = getattr(self, "exhaustible", self.models.policy.parameters())
            clip = self.parallel.accelerator.clip_grad_norm_
            self.parallel.sharding.clip = lambda limit: clip(self.exhaustible, limit or torch.inf).detach()  # type: ignore[method-assign]
            return super()._make_step(found)


class GuardThatSteps(WithUpdater):
    """A step that is skipped has its gradient set to zero, and the optimizer makes it all the same."""

    class updater_class(Updater):
        def _judged(self, found: Any) -> Any:
            if super()._judged(found) is not Verdict.STEP:
                for parameter in self.models.unwrapped.parameters():
                    parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
            return Verdict.STEP


class ScheduleFirst(WithUpdater):
    """The schedule moves before the optimizer: the first rate is skipped, and the last step wasted."""

    class updater_class(Updater):
        def _make_step(self, found: Any) -> Any:
            optim.advance(self.models.scheduler)
            self.models.scheduler.last_epoch -= 1  # the loop moves it once more, to where it is
            return super()._make_step(found)


class GlobalRandomness(WithUpdater):
    """Training draws from Python's global generator, which everybody shares and no checkpoint holds."""

    class updater_class(Updater):
        def measure(self, micro: Any) -> Any:
            loss, found = super().measure(micro)
            return loss * (1 + 0.01 * random.random()), found


# ------------------------------------------------------------------------------------------------ saving and resuming


class OptimizerForgotten(WithModels):
    """Adam's moments are not loaded."""

    class models_class(Models):
        def load_state_dict(self, state: Any, step: int) -> None:
            super().load_state_dict({**state, "optimizer": copy.deepcopy(self.optimizer.state_dict())}, step)


class PositionForgotten(WithProgress):
    """A resumed run begins its collection again."""

    class progress_class(Progress):
        def become(self, other: Progress) -> None:
            super().become(replace(other, epoch=0, position=0))


class CursorForgotten(WithProgress):
    """A resumed run reads the prompts from the first one on."""

    class progress_class(Progress):
        def become(self, other: Progress) -> None:
            super().become(replace(other, cursor=0))


class SamplerForgotten(WithSampling):
    """Responses are drawn from one generator for the whole run, of which no checkpoint knows."""

    class sampling_class(Sampling):
        def sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any, *more: Any) -> Any:
            if purpose == "train":
                self.draws = getattr(self, "draws", None) or generator(self.config.train.seed, "own")
                seeds = torch.randint(1 << 30, (len(rows),), generator=self.draws).tolist()
            return super().sample(rows, settings, purpose, seeds, *more)


class ScheduleForgotten(WithModels):
    """A resumed run begins its schedule again."""

    class models_class(Models):
        def load_state_dict(self, state: Any, step: int) -> None:
            super().load_state_dict({**state, "scheduler": copy.deepcopy(self.scheduler.state_dict())}, step)


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


class OneSeedForAll(WithSampling):
    """Samples are drawn by the index of the row in the call, which is the same on all processes."""

    class sampling_class(Sampling):
        def sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any, *more: Any) -> Any:
            return super().sample(rows, settings, purpose, range(len(rows)), *more)


class DrawnByRank(WithSampling):
    """The process's number is added to the seed of a sample."""

    class sampling_class(Sampling):
        def sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any, *more: Any) -> Any:
            return super().sample(rows, settings, purpose, [seed ^ self.parallel.rank for seed in seeds], *more)


class ShuffledApart(WithCollector):
    """A step has as many rows of each process, which the process has chosen among its own."""

    class collector_class(RolloutCollector):
        def one_pass(self) -> Any:
            at, size = self.progress, self.config.train.batch_size // self.parallel.world
            order = generator(self.config.train.seed, "order", at.collection, at.epoch)
            for batch in self.store.batches(size, order, start=at.position):
                if at.stopped:
                    return
                at.position += 1
                if at.position * size >= len(self.store):
                    at.epoch, at.position = at.epoch + 1, 0
                yield batch


class ObservationsDropped(WithCollector):
    """Experience is made of prompts and outputs."""

    class collector_class(RolloutCollector):
        def experience(self, rollouts: Any, scores: Any) -> Any:
            pairs = ([ids.tolist() for ids in side] for side in (rollouts.queries, rollouts.responses))
            sequences = Sequences.from_lists(*pairs)
            bare = replace(rollouts, sequences=sequences, logprobs=None, entropy=None, hidden=None)
            return super().experience(bare, per_response(scores))


class ObservationsTrained(WithCollector):
    """The response is everything after the prompt."""

    class collector_class(RolloutCollector):
        def experience(self, rollouts: Any, scores: Any) -> Any:
            sequences = rollouts.sequences
            whole = replace(sequences, response_mask=sequences.attention_mask & ~sequences.prompt_mask)
            bare = replace(rollouts, sequences=whole, logprobs=None, entropy=None, hidden=None)
            return super().experience(bare, scores)


class LastTurnPaid(Loop):
    """The reward of an episode is that of its last turn."""

    def score(self, rollouts: Any) -> Any:
        scores = super().score(rollouts)
        return scores if scores.dim() == 1 else at_last(scores, rollouts.sequences.response_mask)


class StaleSampler(WithSampling):
    """The sampler keeps a copy of the model, as it was at first."""

    class sampling_class(Sampling):
        @cached_property
        def sampler(self) -> Any:
            policy = self.models.unwrapped
            trained = policy.model
            policy.model = copy.deepcopy(trained)
            try:
                return Sampling.sampler.func(self)  # type: ignore[attr-defined]
            finally:
                policy.model = trained


class EvaluationDraws(WithSampling):
    """Samples are drawn by the number of samples before them, those of evaluations included."""

    class sampling_class(Sampling):
        drawn = 0

        def sample(self, rows: Any, settings: Any, purpose: Any, seeds: Any, *more: Any) -> Any:
            self.drawn += len(rows)
            return super().sample(rows, settings, purpose, range(self.drawn - len(rows), self.drawn), *more)


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


class SampledWithDropout(WithSampling):
    """The model samples in training mode, and what is trained says something else."""

    class sampling_class(Sampling):
        def sample(self, *args: Any) -> Any:
            self.models.build()
            self.sampler  # noqa: B018  (and the reference beside it are made of the model as it is)
            module = self.models.unwrapped
            module.eval = lambda: module.train()
            try:
                return super().sample(*args)
            finally:
                del module.eval
                module.eval()
