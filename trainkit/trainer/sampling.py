"""Sampling in a run: the engine or sampler with the weights that it has to sample with, responses and episodes."""

from __future__ import annotations

import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.config import SamplingConfig, TRLConfig
from trainkit.data import Rollouts, Row
from trainkit.data.pipeline import id_count
from trainkit.errors import ConfigError, DataError, PluginError
from trainkit.models.loading import eos_ids
from trainkit.plugins.hooks import entry_name
from trainkit.rollouts import (
    Engine,
    EngineSampler,
    EnvironmentMaker,
    Player,
    Purpose,
    Request,
    Sampler,
    ServedModel,
    Weights,
)
from trainkit.rollouts.engines import Ability, engine_class, start
from trainkit.rollouts.episodes import Sample
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.runs.saving import trained
from trainkit.seeding import Seen, episode_seeds, response_seeds, turn_seed
from trainkit.trainer import generation
from trainkit.trainer.models import Models
from trainkit.trainer.recording import Recorder
from trainkit.trainer.sharding import whole_tensor
from trainkit.trainer.text import Text

if TYPE_CHECKING:
    from trainkit.trainer.ahead import AsyncCollector


class Sampling:
    """What samples responses to prompts, and plays episodes.

    Args:
        config: the run's configuration.
        text: prompts as token ids.
        models: the model that is sampled from.
        parallel: the processes.
        recorder: knows the collection that a thread samples ahead of its turn.
        progress: the version of the weights.
        environment: makes the environment of an episode; None: responses are sampled.
        forks: whether the episodes of training can be branched.
        logit_mask: returns the mask, bool [V] or [V, V], True = allowed; None: all tokens are.
        steer: changes the logits that are sampled from; None: nothing does.
        make_sampler: returns the sampler of a plugin's hook; None: there is none.

    Raises:
        ConfigError: the engine cannot do what the run needs.
    """

    def __init__(
        self,
        config: TRLConfig[Any],
        text: Text,
        models: Models,
        parallel: Parallel,
        recorder: Recorder,
        progress: Progress,
        *,
        environment: EnvironmentMaker | None,
        forks: bool,
        logit_mask: Callable[[], Tensor | None],
        steer: Callable[[Tensor, Tensor, SamplingConfig], Tensor] | None,
        make_sampler: Callable[[], Any],
    ) -> None:
        self.config, self.text, self.models, self.parallel = config, text, models, parallel
        self.recorder, self.progress, self.environment, self.forks = recorder, progress, environment, forks
        self._logit_mask, self.steer, self._make_sampler = logit_mask, steer, make_sampler
        self.ahead: AsyncCollector | None = None
        """The collections that are sampled ahead of their turn; None: none are."""
        self._check_engine()

    @property
    def vocabulary(self) -> int:
        """The number of token ids, from 0 on, that may be sampled and have a probability: those of the tokenizer.

        They are all of the model's if the engine cannot exclude the others, to which a head may be padded.
        """
        size = int(self.text.model_config.get_text_config().vocab_size)
        return min(size, id_count(self.text.tokenizer)) if "logit_mask" in self.engine_class.abilities else size

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler, which turns prompts into rollouts: that of a plugin's ``make_sampler``, or the engine's."""
        self.models.check_built("the sampler")  # which reads the model where accelerate has put it
        from_hook: Any = self._make_sampler()
        name = entry_name(self.config.rollout.engine)
        if from_hook is None:
            return EngineSampler(
                self.engine,
                vocabulary=self.vocabulary,
                device=self.parallel.device,
                skip_special_tokens=self.config.rollout.skip_special_tokens,
            )
        if self.steer is not None:
            raise PluginError(
                f"{self.config.method.name!r} changes logits while sampling (steer), and the sampler of a make_sampler "
                "hook does not; remove the hook"
            )
        if name != "local":
            raise PluginError(
                f"rollout.engine is {name!r}, and a make_sampler hook provides a sampler, which replaces it; remove "
                "the hook, or set rollout.engine to 'local'"
            )
        return generation.checked_sampler(from_hook, self.vocabulary)

    @cached_property
    def engine(self) -> Engine:
        """The generation engine that `rollout.engine` names; it is started when it is first used."""
        return self._started_engine()

    def _started_engine(self) -> Engine:
        """Return this process's engine; one with a copy of the model is made on all processes together."""
        if self.parallel.world == 1 or not self.engine_class.own_copy:
            return self._start()
        made = self.parallel.sync_errors(lambda: None if self.joins else self._start())
        addresses = self.parallel.gather([None if made is None else made.address])
        address = addresses[self._owners[self.parallel.rank]]
        return self.parallel.sync_errors(lambda: made or self._start(address))

    def _start(self, address: Any = None) -> Engine:
        served = replace(self.served, address=address)
        with self.models.as_trained():
            engine = start(self.config.rollout.engine, served)
        weakref.finalize(self, engine.close)  # also at the end of the process
        return engine

    @cached_property
    def _owners(self) -> list[int]:
        """For each process, the one whose engine it uses; first read on all processes together."""
        shared = self.engine_class.shared
        if shared is None:
            return list(range(self.parallel.world))
        places = self.parallel.gather([socket.gethostname() if shared == "machine" else ""])
        return [places.index(place) for place in places]

    @property
    def joins(self) -> bool:
        """Whether responses come from the engine of another process, which gives it the weights."""
        return self._owners[self.parallel.rank] != self.parallel.rank

    @property
    def engine_class(self) -> type[Engine]:
        """The class of the engine."""
        return engine_class(self.config.rollout.engine)

    @property
    def served(self) -> ServedModel:
        """The model that an engine generates with."""
        return ServedModel(
            self.models.unwrapped.model,
            self.text.tokenizer,
            eos_ids(self.models.unwrapped.model, self.text.tokenizer),
            limit=self.text.limit,
            mixed_precision=self.parallel.accelerator.mixed_precision,
            options={
                "logit_mask": self._logit_mask(),
                "skip_special_tokens": self.config.rollout.skip_special_tokens,
                "head_alone": getattr(self.models.unwrapped, "head_alone", False),
                "hidden": getattr(self.models.unwrapped, "value_head", None) is not None
                and getattr(self.models.unwrapped, "critic", None) is None,
                "beside_training": self.ahead is not None,
                **({} if self.steer is None else {"steer": self.steer}),
            },
            processes=self.parallel.world,
            divided=self.parallel.sharding.keeps_sharded,
        )

    def core_sampler(self) -> Sampler:
        """Return trainkit's sampler of this run's model, also for a ``make_sampler`` hook to build on."""
        self.models.build()
        return self.served.sampler()

    def _check_engine(self) -> None:
        """Raise a `ConfigError` if the run needs something of its engine that the engine cannot do."""
        entry = self.config.rollout.engine
        name, needed, engine = entry_name(entry), dict[Ability, str](), self.engine_class
        if self.text.is_encoder_decoder:
            needed["encoder_decoder"] = f"generate with a model of type {self.text.model_config.model_type!r}"
        if self._logit_mask() is not None:
            needed["logit_mask"] = "obey the run's logit_mask"
        if self.steer is not None:
            needed["steer"] = f"sample from logits that {self.config.method.name!r} changes (steer)"
        for ability, what in needed.items():
            if ability not in engine.abilities:
                raise ConfigError(f"the engine {name!r} cannot {what}; set rollout.engine to 'local'")
        engine.check(None if isinstance(entry, str) else entry, self.parallel.world)

    @cached_property
    def player(self) -> Player:
        """What plays episodes with the environment."""
        assert self.environment is not None, "only with an environment"
        rollout = self.config.rollout
        limits = [limit for limit in (self.text.limit, rollout.max_episode_tokens) if limit is not None]
        return Player(
            self.environment,
            self.text.tokenizer,
            self.text.query,
            self.text.images,
            self.config.environment,
            max_turns=rollout.max_turns,
            max_tokens=min(limits, default=None),
            skip_special_tokens=rollout.skip_special_tokens,
        )

    def seeds(self, rows: list[Row], purpose: Purpose, seen: Seen | None = None) -> list[int]:
        """Return the seeds of the responses to rows; see `trainkit.seeding.response_seeds`."""
        return response_seeds(self.config.train.seed, purpose, rows, self.text.queries(rows), seen)

    def sample(
        self,
        rows: list[Row],
        settings: SamplingConfig,
        purpose: Purpose,
        seeds: Sequence[int],
        sampler: Sampler | None = None,
    ) -> Rollouts:
        """Sample a response to each row, or play an episode, for ``purpose``; ``seeds`` are those of the responses."""
        if self.environment is None:
            return self.respond(
                rows, self.text.queries(rows), settings, purpose, [turn_seed(seed, 0) for seed in seeds], sampler
            )

        seeds_of_episodes = episode_seeds(self.config.train.seed, purpose, rows, self.text.queries(rows))
        rows = [
            {**self.text.numbered(row), "episode_seed": seed} for row, seed in zip(rows, seeds_of_episodes, strict=True)
        ]
        forks = self.forks and purpose == "train"
        played = self.player(rows, settings, seeds, *self.of_turns(settings, purpose, sampler), forks=forks)
        return played.to(self.parallel.device)

    def of_turns(
        self, settings: SamplingConfig, purpose: Purpose, sampler: Sampler | None = None
    ) -> tuple[Sample, list[int]]:
        """Return what samples the outputs of episodes, and the token ids that end one."""

        def sample(rows: list[Row], queries: list[list[int]], settings: SamplingConfig, seeds: list[int]) -> Rollouts:
            return self.respond(rows, queries, settings, purpose, seeds, sampler)

        self.models.build()
        return sample, [*eos_ids(self.models.unwrapped.model, self.text.tokenizer), *settings.stop_token_ids]

    def respond(
        self,
        rows: list[Row],
        queries: list[list[int]],
        settings: SamplingConfig,
        purpose: Purpose,
        seeds: list[int],
        sampler: Sampler | None = None,
    ) -> Rollouts:
        """Sample a response to each of ``queries`` with the run's sampler, or another; seeds are those of the turn."""
        longest = max(len(query) for query in queries)
        if not self.text.fits(longest, settings.max_new_tokens):
            raise DataError(
                f"a prompt of {longest} tokens and max_new_tokens {settings.max_new_tokens} do not fit into "
                f"{self.text.limit} tokens{' each' if self.text.is_encoder_decoder else ''}, the model's context or "
                "train.seq_length; lower max_new_tokens or shorten the prompt"
            )
        sampler, images = sampler or self._ready_sampler(), self.text.images(rows)
        extra = {} if images is None else {"images": images.to(self.parallel.device)}
        with self.parallel.accelerator.autocast():
            rollouts = sampler(rows, queries, settings, seeds, purpose, **extra)
        return rollouts.to(self.parallel.device)

    @contextmanager
    def of_reference(self, reference: Any) -> Iterator[Sampler]:
        """Let every process sample from the reference inside the block, by the sampler that is yielded."""
        with self.parallel.sharding.unsharded():
            yield replace(self.served, model=reference.policy.model).sampler()

    def _ready_sampler(self) -> Sampler:
        """Return the sampler, with the weights that it has to sample with."""
        sampler = self._idle_sampler()
        if isinstance(sampler, EngineSampler) and not sampler.generates_with(self._weights_now):
            self.give_weights()
        return sampler

    def _idle_sampler(self) -> Sampler:
        """Return the sampler when no collection is sampled ahead, and the model as it samples."""
        self.models.build()
        sampler = self.sampler
        if self._weights_ahead is None:  # otherwise the policy is trained at the same time
            self.models.unwrapped.eval()
            if self.ahead is not None:  # the engine gets newer weights when their collections are complete
                self.ahead.wait()
        return sampler

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let every process sample inside the block: give its engine the weights, or gather the model."""
        self.models.build()  # all processes together
        with nullcontext() if self.samples_apart else self.parallel.sharding.unsharded():
            self._idle_sampler()
            self.give_weights()
            yield

    @property
    def samples_apart(self) -> bool:
        """Whether responses are sampled by engines that have copies of a model that stays divided."""
        divided = self.parallel.sharding.keeps_sharded and self.engine_class.own_copy
        return divided and self.steer is None and isinstance(self.sampler, EngineSampler)  # it steers by trained heads

    @property
    def weights(self) -> Weights:
        """The weights of the language model as they are now."""
        model = self.models.unwrapped.model
        changes = sum(tensor._version for tensor in (*model.parameters(), *model.buffers()))
        return Weights(self.progress.step, lambda: self._lent(trained(model)), changes)

    def _lent(self, tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors for an engine, which may keep them; of divided ones, gathered copies one by one."""
        if not self.parallel.sharding.divides:
            return tensors.items()
        return ((name, whole_tensor(tensor.detach()).to("cpu", copy=True)) for name, tensor in tensors.items())

    def begin(self, parts: list[list[Row]], seen: Seen) -> None:
        """Send the requests of several calls of `sample` to an engine that can answer them at the same time.

        Args:
            parts: the rows of each call.
            seen: counts of the responses of the collection so far, by the position of their row.
        """
        sampler = self.sampler
        if len(parts) < 2 or self.environment is not None or not isinstance(sampler, EngineSampler):
            return  # the requests of episodes are not known before
        if not sampler.engine.own_copy:
            return
        seen, settings = Counter(seen), self.text.settings()
        for rows in parts:
            seeds = [turn_seed(seed, 0) for seed in self.seeds(rows, "train", seen)]
            sampler.begin(Request(self.text.queries(rows), seeds, settings, "train", self.text.images(rows)))

    @property
    def _weights_ahead(self) -> Weights | None:
        """The weights of the collection that this thread samples ahead of its turn, beside the training; else None."""
        return getattr(self.recorder.collection, "weights", None)

    def start_engine(self) -> None:
        """Start the engine now, if it copies the model: before that is divided."""
        if self.engine_class.own_copy:
            vars(self)["engine"] = self._started_engine()

    @property
    def copies_model(self) -> bool:
        """Whether this process makes a copy of the model at the start: that of its engine."""
        return self.engine_class.own_copy and not self.joins

    @property
    def _weights_now(self) -> Weights:
        """The weights of the collection that this thread samples, or else those of this moment."""
        return self.weights if self._weights_ahead is None else self._weights_ahead

    def give_weights(self) -> None:
        """Give the engines the weights to sample with, on all processes together, also one that samples nothing."""
        sampler = self.sampler
        if not isinstance(sampler, EngineSampler):
            return
        weights, together = self._weights_now, self.parallel.world > 1 and sampler.engine.own_copy
        stale = not sampler.generates_with(weights)
        if together:  # no process has a request under way after this
            stale = any(self.parallel.gather([stale]))
        if stale:
            load = partial(sampler.use, self.own(weights) if together else weights)
            self.parallel.sync_errors(load) if together else load()

    def rest(self) -> None:
        """Let an engine that does not generate beside the training release its memory until it samples again."""
        if self.ahead is None and isinstance(sampler := vars(self).get("sampler"), EngineSampler):
            sampler.rest()

    def own(self, weights: Weights) -> Weights:
        """Return ``weights``, without tensors if another process loads them; on all processes together."""
        if not self.joins:
            return weights
        for _ in weights.tensors() if self.parallel.sharding.divides else ():
            pass  # they are gathered by all processes together
        return replace(weights, tensors=tuple)
