"""The loop for language models: policy, reference, experience from what is sampled, evaluation and export."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from trainkit import metrics as m
from trainkit.config import MethodConfig, SamplingConfig, TRLConfig, sweep
from trainkit.data import Batch, Preferences, Prompts, Rollouts, Row, Sequences, prompt_rows, prompted
from trainkit.data.batches import columns_of
from trainkit.data.columns import without
from trainkit.errors import ConfigError, DataError, RegistryError
from trainkit.models import Frozen, Policy, Reference, TokenOutputs, load_model, make_policy
from trainkit.models.adapters import bare, has_adapter, has_score_head
from trainkit.models.loading import check_trains_weights, reads_more
from trainkit.models.policy import check_logit_mask
from trainkit.plugins.hooks import entry_name
from trainkit.rollouts import EnvironmentMaker, RewardFn, Sampler, check_maker
from trainkit.rollouts.engines import engine_class
from trainkit.rollouts.rewards import check_keywords
from trainkit.runs.fingerprints import of_maker, of_tokenizer
from trainkit.runs.health import Health
from trainkit.seeding import SEEDED
from trainkit.trainer import generation
from trainkit.trainer.base import overridden
from trainkit.trainer.branching import branch
from trainkit.trainer.collect import RolloutCollector
from trainkit.trainer.correction import Correction
from trainkit.trainer.evaluate import RolloutEvaluator
from trainkit.trainer.export import Exporter
from trainkit.trainer.frozen import FrozenModels
from trainkit.trainer.loop import AcceleratedLoop
from trainkit.trainer.responses import Responder
from trainkit.trainer.sampling import Sampling
from trainkit.trainer.scoring import Scoring
from trainkit.trainer.settings import check_distribution, check_environment
from trainkit.trainer.sharing import PromptSharing
from trainkit.trainer.text import Text, make_text
from trainkit.trainer.trunk import TrunkCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)


class AccelerateRLTrainer(AcceleratedLoop[M]):
    """The loop for language models: everything about training them except the algorithm.

    Args:
        config: the run's configuration.
        model: a live model, instead of ``config.model.model_path``; it is trained in place.
        tokenizer: a live tokenizer, instead of the one that the config names.
        **kwargs: those of `AcceleratedLoop` and `BaseRLTrainer`:
            reference: a live model to compare with, instead of the trained model's start; it is frozen in place.
            reward_fn: scores samples; see `trainkit.rollouts.rewards.score`.
            environment: makes the environment of an episode from a row; see `trainkit.rollouts.Environment`.
            metric_fn: measures samples at evaluation; see `trainkit.rollouts.rewards.metrics`.
            logit_mask: bool [V] or [V, V] (row: the previous token), True = allowed; applied when sampling, and when
                training if the algorithm learns from what it sampled.
            stop_sequences: strings that end a response, unless the config gives them.
            callbacks: objects with ``@hookimpl`` methods.
            allow_drift: resume even if settings that affect training differ from those of the checkpoint.

    Raises:
        ConfigError, DataError, PluginError: raised at construction, before a model is loaded.
    """

    generates: ClassVar[bool] = True
    """Whether the trained model generates text. If it scores text instead, evaluations have no prompts."""
    encoder_decoders: ClassVar[bool] = True
    """Whether encoder-decoders can be trained; if not, they are refused at construction."""
    environments: ClassVar[bool] = True
    """Whether an environment may take the place of the reward function: whether experience can be of several turns."""
    forks: ClassVar[bool] = False
    """Whether it calls `branch` for episodes; their environments are then copied before every output."""
    images: ClassVar[bool] = True
    """Whether prompts and samples may have images, if the model reads any; if not, such rows are refused."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of samples that the algorithm reads, besides those of their format. Others are named in a warning, as are
    those of prompts if there is no reward function, metric function or environment to get them."""

    low_by_default = True

    corrections: ClassVar[tuple[str, ...]] = ()
    """The values of `rollout.correction`, besides ``"none"``, that the algorithm supports: ``"sampler"`` if its loss
    has the ratio to the log-probabilities that `behaviour` returns, ``"decoupled"`` and ``"masked"`` if it multiplies
    advantages by `importance_weights`."""

    @classmethod
    def _unwritten(cls) -> list[str]:
        """Return the methods that are not implemented yet.

        Offline, `make_experience` is one of them; online, `experience` is, unless `make_experience` is overridden.
        """
        left = super()._unwritten()
        if cls.make_experience is not AccelerateRLTrainer.make_experience:
            if cls.keep is not AccelerateRLTrainer.keep:
                raise RegistryError(
                    f"{cls.__qualname__} overrides keep and make_experience, and keep is not called by its own "
                    "make_experience; override experience instead, which gets what was kept"
                )
            return left
        if "prompts" not in cls.inputs:
            return sorted([*left, "make_experience"])
        return left if cls.experience is not AcceleratedLoop.experience else sorted([*left, "experience"])

    def __init__(
        self,
        config: TRLConfig[M],
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        environment: EnvironmentMaker | None = None,
        **kwargs: Any,
    ) -> None:
        self.environment = None if environment is None else check_maker(environment)
        self._given_tokenizer = tokenizer
        super().__init__(config, model=model, **kwargs)

    def _make_parts(self) -> None:
        """Make the parts of a trainer of language models, in the order in which they need each other."""
        check_environment(self.config, self.environment, self.inputs if self.environments else ())
        if self.online:
            check_distribution(self.config)
        self.text = self._make_text()
        """Prompts and samples as token ids."""
        self.sampling = self._make_sampling()
        """What samples responses, and plays episodes."""
        if {"images", "logit_mask"} & self.sampling.engine_class.abilities:  # others train on text alone
            self.logit_mask = self.text.without_images(self.logit_mask)
        self.scoring = Scoring(
            self,
            self.text,
            self.parallel,
            self.recorder,
            self.progress,
            environment=self.environment,
            current=lambda: self.collector.current,
        )
        """What scores them."""
        self.sharing = PromptSharing(self, self.models, self.parallel, self.updater, self.progress)
        """Whether rows with the same prompt run it once."""
        self.collector: RolloutCollector = self._make_collector()
        """What fills the store."""
        self.evaluator: RolloutEvaluator = RolloutEvaluator(
            self,
            self,
            self.inference,
            self._sampling_model,
            text=self.text,
            sampling=self.sampling,
            scoring=self.scoring,
        )
        """What measures the model."""
        self.correction = self._make_correction()
        """What corrects for rollouts of other weights."""
        precision, on_policy = self.accelerator.mixed_precision, self.correction.starts_on_policy
        self.health = Health(starts_on_policy=on_policy, half_precision=precision != "no")
        self.exporter = Exporter(self.models, self.text, generates=self.generates, live=self.live_model is not None)
        """What writes exports."""
        self.responder = Responder(self, self, self.text, self.sampling, self.scoring, self.recorder)
        """What samples responses when the user asks for it."""
        self.frozen_models = FrozenModels(self, self.models, self.text, self.sharing)
        """What makes the models that the policy is compared with."""
        if (chosen := self.chosen_reference) is not None:
            self.frozen_models.add(chosen, "model.reference_path" if isinstance(chosen, str | Mapping) else "reference")

    def _make_text(self) -> Text:
        text = make_text(
            self.config,
            self.parallel,
            model=self.live_model,
            tokenizer=self._given_tokenizer,
            generates=self.generates,
            encoder_decoders=self.encoder_decoders,
            why_no_images=self._why_no_images,
            inputs=self.inputs,
            columns=self.columns,
            began=self.identity.began,
        )
        self.identity.others["the tokenizer"] = cache(lambda: of_tokenizer(text.tokenizer))
        if self.environment is not None:
            self.identity.others["the environment"] = lambda: of_maker(self.environment)
        if self.environment is not None and text.is_encoder_decoder:
            raise ConfigError(
                f"a model of type {text.model_config.model_type!r} is an encoder-decoder, which reads one prompt and "
                "writes one output; environments of several turns need a model that reads all of it as one text"
            )
        return text

    @property
    def _why_no_images(self) -> str | None:
        """Why rows may have no images in this run, and what to do; None if they may."""
        rollout, train = self.config.rollout, self.config.train
        if not self.images:
            return f"{self.config.method.name!r} learns from text alone; give another method"
        if "images" not in engine_class(rollout.engine).abilities:
            return f"the engine {entry_name(rollout.engine)!r} reads text alone; set rollout.engine to 'local'"
        if self.parallel.sharding.keeps_sharded and not self.parallel.sharding.images:
            name = entry_name(train.sharding)
            return f"train.sharding {name!r} needs the same passes in all processes; set it to 'none'"
        return None

    def _make_sampling(self) -> Sampling:
        return Sampling(
            self.config,
            self.text,
            self.models,
            self.parallel,
            self.recorder,
            self.progress,
            environment=self.environment,
            forks=self.forks,
            logit_mask=lambda: self.logit_mask,
            steer=self.steer if overridden(self.steer, AccelerateRLTrainer.steer) else None,
            make_sampler=lambda: self.hooks.hook.make_sampler(trainer=self),
        )

    def _make_collector(self) -> RolloutCollector:
        return RolloutCollector(
            self,
            self,
            self.inference,
            self._before_offloading,
            sampling=self.sampling,
            scoring=self.scoring,
            sharing=self.sharing,
            trunk=TrunkCache(self, self.models, self.run.resumption, self.store, self.progress),
            encode_pairs=self.encode_preferences,
            scores_rollouts=lambda: self._scores_rollouts,
            samples_as_usual=lambda: self._samples_as_usual,
        )

    def _make_correction(self) -> Correction:
        correction = Correction(
            self.config,
            self.corrections,
            lambda: self.correction_level,
            self.models,
            self.sampling,
            self.parallel,
            self.recorder,
            self.progress,
            lambda: self.collector.keeps_sharded,
        )
        correction.check(online=self.online)
        return correction

    @property
    def _missing_inputs(self) -> list[str]:
        """What is missing of what the algorithm learns from."""
        missing = super()._missing_inputs
        if self.environment is None and "environment" not in self.inputs:
            return missing
        others = [name for name in missing if name != "reward_fn"]
        return others if self.environment is not None else [*others, "environment"]

    # ------------------------------------------------------------------------------------------------ construction

    def _finish(self, policy: Any) -> None:
        """Check a new policy, and set what it needs to know of the run."""
        head = getattr(self.live_model, "v_head", None)
        if head is not None and getattr(policy, "value_head", None) is not head:
            log.warning("%s trains no value head; the live model's stays as it is", self.config.method.name)
        path = self.config.model.model_path if self.live_model is None else None
        if isinstance(policy, Policy) and isinstance(path, str) and has_score_head(Path(path)):
            log.warning(
                "%s is a reward model, of which %s takes the language model alone: its score head is not loaded. To "
                "learn from its scores give it as reward_fn=RewardModel.from_pretrained(path)",
                path,
                self.config.method.name,
            )
        check_trains_weights(self.config.model, policy.model)
        if isinstance(policy, Policy):
            policy.vocabulary = self.sampling.vocabulary
            # offline, the policy itself has none: it is applied at evaluations alone
            check_logit_mask(self.logit_mask, policy.model, self.sampling.vocabulary)
        self.frozen_models.fix_rope(policy)
        if isinstance(policy, Policy) and reads_more(self.model_config) and not reads_more(policy.model.config):
            log.warning(
                "of the %s, which reads more than text, the language model alone is loaded and trained (%s), and "
                "exports hold it alone",
                self.model_config.model_type,
                type(bare(policy.model)).__name__,
            )
        self.sharing.prepare(policy)
        if has_adapter(policy.model):
            self.frozen_models.store_trained(policy)

    @property
    def _copies_model(self) -> bool:
        """Whether this process makes a copy of the model at the start: that of its engine."""
        return self.generates and self.sampling.copies_model

    def _before_dividing(self, reference: Any) -> None:
        """Do what needs whole models: start the engine, which copies the model."""
        super()._before_dividing(reference)
        if self.generates:
            self.sampling.start_engine()

    def get_arch(self, config: TRLConfig[M]) -> nn.Module:
        """Return the language model: online with the sampling temperature and the logit mask, offline without them.

        Algorithms whose policy has heads override this method.
        """
        model = load_model(config.model, self.live_model)
        if not self.online:
            return make_policy(model)
        return make_policy(model, temperature=config.rollout.temperature, logit_mask=self.logit_mask)

    def make_reference(self, model: Any) -> Reference:
        """Return a frozen copy of the policy as it is now; parameters that are not trained are shared with it."""
        return self.frozen_models.copy(model)

    def _load_reference(self) -> Frozen:
        return self.models.frozen[0]

    def frozen(self, path_or_model: Any) -> Frozen:
        """Return a second model, frozen, such as a teacher: ``frozen(sequences) -> TokenOutputs``.

        It has the policy's temperature and logit mask, is in evaluation mode, and takes no part in training. Call this
        in ``__init__``, or on every process where the model is first needed. The weights are loaded with those of the
        policy, or now if those are loaded already. Their fingerprint is part of the run's: a run that resumes with
        other weights is refused.

        Args:
            path_or_model: a hub id, a local directory, or the fields of a model config, loaded in ``model.dtype`` with
                ``model.kwargs``. Random weights are seeded by ``train.seed`` and the number of the call; an adapter is
                merged. Or a live model or policy, with its adapter if it has one; it is frozen in place.

        Raises:
            ConfigError: the model cannot be loaded, or does not fit the trained one: another vocabulary, other tokens
                in the tokenizer saved with it, a shorter context, or only one of them is an encoder-decoder.
        """
        return self.frozen_models.add(path_or_model, "frozen()")

    # ------------------------------------------------------------------------------------------------------------ data

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run."""
        return self.text.tokenizer  # type: ignore[no-any-return]

    @property
    def model_config(self) -> PreTrainedConfig:
        """The config of the model that is trained."""
        return self.text.model_config

    @property
    def limit(self) -> int | None:
        """The most tokens of prompt and response together, or of each if they are read separately; None: no limit."""
        return self.text.limit

    def read_prompts(self, prompts: Prompts) -> list[Row]:
        """Return checked rows of ``prompts``; with an environment, they need not have prompts."""
        prompts = without(prompts, self.config.data.ignore_columns)
        rows = prompt_rows(prompts, needed=self.environment is None)
        self._check_functions(rows)
        if not self.scoring.available and self.metric_fn is None:  # otherwise they get the columns
            self.text.warn_unread(rows, {"prompt", *SEEDED}, "prompts")
        fitting = self.fit_prompts(rows)
        self.text.warn_unrendered(rows, "prompt")
        return fitting

    def _check_functions(self, rows: list[Row]) -> None:
        """Raise a `ConfigError` if reward or metric function do not take the keywords that they will be called with."""
        if self.environment is not None or overridden(self.score, AccelerateRLTrainer.score):
            return
        columns = dict.fromkeys(map(str, columns_of(rows)))
        usual = ("samples", "prompts", "outputs")
        if self.reward_fn is not None:
            check_keywords(self.reward_fn, "reward function", (*usual, "tokenizer"), columns)
        if self.metric_fn is not None:
            check_keywords(self.metric_fn, "metric function", usual, columns)

    def fit_prompts(self, rows: list[Row]) -> list[Row]:
        """Return the prompts, as text, that leave room for a response; with an environment, as they were given."""
        if self.environment is None:
            return self.text.fit(rows)
        return self.text.fit_episodes(rows, self.sampling.player.check_template)

    def default_prompts(self) -> list[Any]:
        """Return the tokenizer's beginning token for each rollout; every response then starts from it.

        With an environment, return empty rows: the environment gives the prompts.
        """
        if self.environment is not None:
            return [{} for _ in range(self.config.rollout.num_rollouts // self.samples_per_prompt)]
        bos = self.tokenizer.bos_token
        if bos is None:
            raise DataError(
                "no prompts are given, and the tokenizer has no beginning token to start responses from; give prompts"
            )
        return [bos] * self.config.rollout.num_rollouts

    def read_samples(
        self, samples: Iterable[Any], rewards: Iterable[Any] | None = None, *, first: int = 0
    ) -> list[Row]:
        """Return samples as rows; each is encoded once to check that it can be."""
        rows = self.text.read_samples(samples, rewards, first, self.check_samples)
        if not self.online:
            return rows
        self._check_functions(rows)
        return self.text.fit(prompted(rows, first=first))

    @property
    def _one_to_one(self) -> bool:
        return super()._one_to_one and not self.tokenizer.chat_template  # which may take conversations apart

    def encode_samples(self, rows: list[Row]) -> Sequences:
        """Encode sample rows as sequences on the device; outputs and their EOS are marked as responses."""
        return self.text.encode_samples(rows)

    def encode_preferences(self, rows: list[Row]) -> Preferences:
        """Encode rows of pairs as sequences on the device; prompt and output are tokenised as one text."""
        return self.text.encode_preferences(rows)

    def add_eval_pipeline(self, prompts: Prompts) -> None:
        """Set the prompts of evaluations, after checking that they leave room for responses."""
        self.responder.check_generates("eval_prompts")
        super().add_eval_pipeline(prompts)
        longest = max(len(ids) for ids in self.text.queries(self.eval_rows))
        for _, overrides in sweep(self.config.rollout.eval_kwargs):
            room = self.settings(**overrides).max_new_tokens
            if not self.text.fits(longest, room):
                raise DataError(
                    f"the longest evaluation prompt has {longest} tokens, and rollout.eval_kwargs asks for {room} new "
                    f"ones; {self.text.what_fits}. Lower max_new_tokens there"
                )

    # -------------------------------------------------------------------------------------------------------- sampling

    def steer(self, logits: Tensor, states: Tensor, settings: SamplingConfig) -> Tensor:
        """Return the logits to sample from instead of ``logits`` [b, V]; override it to change what is sampled.

        ``logits`` include the sampling temperature and the logit mask; ``states`` [b, D] are the hidden states from
        which they are computed; ``settings`` is of the class in the method's `sampling`. The log-probabilities and
        entropies of the rollouts are still those of the model.
        """
        return logits

    def sample(self, rows: list[Row], *, reference: bool = False, **overrides: Any) -> Rollouts:
        """Sample one response per row for training, at the rollout's settings with ``overrides``; or play an episode.

        The random numbers of a response follow from the run's seed, the row's position in the stream of prompts and
        the number of the response among those to this row in the collection (`trainkit.seeding.response_seeds`).

        Args:
            rows: those that `make_experience` gets, or copies of them (``{**row, "prompt": ...}``).
            reference: whether the reference is sampled from instead of the policy.
            **overrides: sampling settings over those of ``config.rollout``, e.g. ``temperature=0``.
        """
        collection = self.collector.current
        with self.sampling.of_reference(self.reference) if reference else nullcontext() as sampler:
            seeds = self.sampling.seeds(rows, "train", collection.seen)
            rollouts = self.sampling.sample(rows, self.settings(**overrides), "train", seeds, sampler)
        collection.rollouts.append(
            replace(rollouts, hidden=None, moments=None)
        )  # kept for the hooks, longer than the experience
        if rollouts.turns is not None and rollouts.failed is not None:
            turns = torch.tensor([float(len(turns)) for turns in rollouts.turns])
            collection.environment_seconds += self.sampling.player.seconds
            self.record({"environment/turns": m.Mean.of(turns), "environment/failures": m.Mean.of(rollouts.failed)})
        return rollouts

    def branch(self, rollouts: Rollouts, lengths: Sequence[int] | Tensor, **overrides: Any) -> Rollouts:
        """Sample another ending of each response, which goes on after the first ``lengths[b]`` of its tokens.

        Of episodes, ``lengths`` counts outputs: each is played on after so many, with a copy of the environment as it
        was then (`trainkit.rollouts.Environment.fork`). The class of the trainer declares ``forks``.

        The tokens before it keep their log-probabilities. For several endings of one response, give it several times
        (``rollouts.select``). A response or an episode that has ended within these is returned as it is.

        The random numbers of an ending follow from the run's seed, its row, the tokens that are kept, and the number of
        the ending among those of both in the collection. The other responses of the call have no effect.

        Args:
            rollouts: responses that were sampled for training.
            lengths: how many tokens of each response, or outputs of each episode, are kept [B].
            **overrides: sampling settings over those of ``config.rollout``. ``max_new_tokens`` and ``min_new_tokens``
                count the tokens that are kept, unless they are those of each output of an episode; stop strings are
                looked for in the ending.

        Raises:
            ConfigError: the responses are those of an encoder-decoder, or the episodes were sampled without ``forks``.
            EpisodeError: an environment cannot be copied, or fails.
            ValueError: ``lengths`` has another number of elements, or a negative one.
        """
        counts = [int(length) for length in lengths]
        return branch(self.sampling, rollouts, counts, self.settings(**overrides), "train", self.collector.current.seen)

    @property
    def sampler(self) -> Sampler:
        """What turns prompts into rollouts: the sampler of a plugin's ``make_sampler``, or the engine's."""
        return self.sampling.sampler

    def core_sampler(self) -> Sampler:
        """Return trainkit's sampler of this run's model, also for a ``make_sampler`` hook to build on."""
        return self.sampling.core_sampler()

    @contextmanager
    def _sampling_model(self) -> Iterator[None]:
        """Let every process sample inside the block: give its engine the weights, or gather the model."""
        with self.sampling.ready():
            yield

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores of the reward function [B], or [B, T] if it gives rewards per token.

        With an environment, its rewards [B, T], each at the last token of the output that it rewards, plus the scores.
        Some are infinite or NaN if the function returned them and `reward.on_nonfinite` deals with them.
        An algorithm that learns from prompts alone gets scores of 0.
        """
        return self.scoring.score(rollouts)

    # ----------------------------------------------------------------------------------------- for the algorithm

    def make_experience(self, rows: list[Row]) -> Batch:
        """Sample responses, score them and make experience, as online algorithms do. Offline ones override this."""
        return self.collector.experience(*self.sample_and_score(rows))

    def sample_and_score(self, rows: list[Row]) -> tuple[Rollouts, Tensor]:
        """Sample a response to each row, and return the rollouts with their scores [B] or [B, T]."""
        sampled = self.collector.current.rollouts
        before = len(sampled)
        rollouts = self.sample(rows)
        # hooks see what is scored, if that is made of several
        sampled[before:] = [replace(rollouts, hidden=None, moments=None)]
        scores = self.score(rollouts)
        self.scoring.record_scored(rollouts, scores)
        return replace(rollouts, judged=self.scoring.judged(rollouts, scores)), scores

    def through_trunk(self, batch: B) -> B:
        """Return a batch of an offline collection whose sequences have the output of the frozen lower layers.

        These layers then run once for all passes. It is unchanged if no layer is frozen, or the output is not kept. The
        loop calls it on what `make_experience` returns; an algorithm that asks the reference calls it before.
        """
        return self.collector.trunk.add_to(batch)

    @property
    def _scores_rollouts(self) -> bool:
        """Whether experience is made of scored rollouts, and not by an own `make_experience`."""
        return self.online and not overridden(self.make_experience, AccelerateRLTrainer.make_experience)

    @property
    def _samples_as_usual(self) -> bool:
        """Whether the algorithm overrides neither `sample` nor `sample_and_score`."""
        usual = AccelerateRLTrainer
        return type(self).sample is usual.sample and type(self).sample_and_score is usual.sample_and_score

    def behaviour(self, rollouts: Rollouts) -> TokenOutputs:
        """Return the log-probabilities, entropies and values of ``rollouts`` under the policy that sampled them.

        The sampler has computed them, so the policy is not run again if the sampler's numbers equal the policy's. This
        is checked on the first collection, for which the policy is run: cached keys and values may round differently,
        slightly in float32, and too much at lower precision.

        If they were sampled with older weights, `rollout.correction` is set, or the model `keeps_sharded`, the numbers
        are those of the newest weights before this collection; with the correction ``sampler``, the log-probabilities
        are the sampler's, and so is the rest after the first collection if trainkit's sampler has the newest weights,
        whatever the precision. An algorithm without corrections, which only reports them, gets the numbers of the older
        weights that sampled.
        """
        return self.correction.behaviour(rollouts)

    def importance_weights(self, rollouts: Rollouts, policy: TokenOutputs) -> Tensor:
        """Return the weights of response tokens in the loss, by which it corrects for other weights of the sampler.

        1 for all tokens, unless the correction is ``decoupled`` or ``masked``. An algorithm that names them in
        `corrections` multiplies the advantages by these weights, after any whitening.

        Args:
            rollouts: the rollouts.
            policy: what `behaviour` returned for them.

        Returns:
            Tensor [B, T], without gradient.
        """
        return self.correction.importance_weights(rollouts, policy)

    @property
    def correction_level(self) -> str:
        """Whether importance weights are those of a ``token`` or a ``sequence``: `rollout.correction_level`.

        An algorithm whose loss has one ratio per response overrides it.
        """
        return self.config.rollout.correction_level

    # ------------------------------------------------------------------------------------- the loop, by the user

    @overload
    def step(self, rollouts: Rollouts, scores: Any, /) -> dict[str, float]: ...
    @overload
    def step(
        self,
        queries: Sequence[Any],
        responses: Sequence[Any],
        scores: Any,
        /,
        response_masks: Sequence[Any] | None = None,
    ) -> dict[str, float]: ...
    def step(self, *arguments: Any, response_masks: Sequence[Any] | None = None) -> dict[str, float]:
        """Learn from responses that you scored yourself: one collection with all its passes and optimizer steps.

        ``step(rollouts, scores)`` takes what `generate` or `play` returned, with the sampler's log-probabilities.
        ``step(queries, responses, scores, response_masks=None)`` takes token ids, as TRL's trainer did.

        Args:
            *arguments: ``rollouts``: as `generate` returned them.

                ``queries``: prompts, as text or token ids, one per response.

                ``responses``: the token ids after the prompts, 1-D tensors; never text, which need not encode to the
                ids that were sampled.

                ``scores``: a number per response, or a list of numbers per response for rewards per token; with
                ``rollouts`` also a tensor [B, T] of rewards per token, aligned with ``rollouts.sequences`` and 0 where
                there is no response token, such as ``rollouts.rewards``.
            response_masks: which ids of each response were sampled, 1-D bool tensors; the others, e.g. those of a tool,
                are attended to and not trained on. None: all of them, which is an error with an environment.

        Returns:
            The metrics of this step, averaged over its optimizer steps.

        Raises:
            DataError, RewardError: queries, responses and scores do not fit together.
            TypeError: the number of arguments is that of neither form.
        """
        if self.config.rollout.staleness:
            raise ConfigError(
                f"rollout.staleness is {self.config.rollout.staleness}, and step() trains on the rollouts that it is "
                "given; set it to 0"
            )
        rollouts, scores = generation.step_arguments(self, arguments, response_masks)
        checked = generation.given_scores(scores, rollouts)

        def push() -> None:
            self.progress.prompts = len(rollouts) // self.samples_per_prompt
            self.scoring.record_scored(rollouts, checked)
            self.collector.decide_sharing([(rollouts, checked)])
            self.store.push(self.collector.experience(rollouts, checked))

        return self.learn_collection(push, self.passes or 1, rollouts=[rollouts])

    # ----------------------------------------------------------------------------------------------------- by the user

    def settings(self, **overrides: Any) -> SamplingConfig:
        """Return the rollout's sampling settings with ``overrides``; see `Text.settings`.

        Raises:
            ConfigError: a setting does not exist, or its value is not allowed.
        """
        return self.text.settings(**overrides)

    def generate(
        self,
        prompts: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        reference: bool = False,
        **overrides: Any,
    ) -> Rollouts:
        """Sample responses to one prompt or several: strings, dicts with a ``prompt``, or token ids.

        What a tokenizer returns works too: ``trainer.generate(**tokenizer(texts, return_tensors="pt",
        padding=True))``. Every call draws new random numbers, the same on all processes; a column ``seed`` of a prompt
        decides its response instead. Training is not affected.

        Args:
            prompts: the prompts.
            input_ids: [B, P] instead of prompts.
            attention_mask: [B, P], which of ``input_ids`` are real.
            reference: whether the frozen reference is sampled from instead of the trained model.
            **overrides: sampling settings over those of ``config.rollout``.

        Raises:
            AttributeError: the algorithm keeps no reference.
            ConfigError: a setting does not exist, its value is not allowed, or the trained model does not generate.
            DataError: prompts are missing, of another type, or too long.
        """
        return self.responder.generate(prompts, input_ids, attention_mask, reference, overrides)

    def best_of(
        self, prompts: Any, n: int, *, keep: int = 1, reward_fn: RewardFn | None = None, **overrides: Any
    ) -> tuple[Rollouts, Tensor]:
        """Sample ``n`` responses to each prompt, and return the best with their scores; training is not affected.

        Each response has random numbers of its own; the first to each prompt is the one that `generate` would return.
        With an environment they are episodes, as of `play`. Every process samples and scores all of them.

        Args:
            prompts: one prompt or several, as for `generate`, or as for `play` if there is an environment.
            n: the number of responses to each prompt.
            keep: how many of them are returned, the best first. Of equal scores the response that was sampled first is
                better.
            reward_fn: scores the responses instead of the run's reward function and environment. Scoring per token are
                summed.
            **overrides: sampling settings over those of ``config.rollout``.

        Returns:
            The rollouts [B·keep], those to one prompt one after the other, and their scores [B·keep].

        Raises:
            ConfigError: ``n`` or ``keep`` is not allowed, there is no reward function, or a setting is not allowed;
                with temperature 0 all responses would be the same.
            DataError: as in `generate`.
            EpisodeError: as in `play`.
            RewardError: the scores are not finite numbers, one for each response.
        """
        return self.responder.best_of(prompts, n, keep, reward_fn, overrides)

    def generate_eval(self, prompts: Any = None, **overrides: Any) -> Rollouts:
        """Sample responses as `generate` does, with the settings of evaluations (the first value of a swept one)."""
        (_, first), *_ = sweep(self.config.rollout.eval_kwargs)
        return self.generate(prompts, **{**first, **overrides})

    def play(self, prompts: Any = None, **overrides: Any) -> Rollouts:
        """Play an episode with the environment for each prompt, and return the episodes; training is not affected.

        Args:
            prompts: one prompt or several, as for `generate`; rows without a prompt if the environment gives it. A row
                may have the ``episode_seed`` of another episode, which is then the seed of this one, too. None: the
                evaluation prompts.
            **overrides: sampling settings over those of ``config.rollout``.

        Raises:
            ConfigError: there is no environment, or a setting does not exist or its value is not allowed.
            DataError: there are no rows, or they are no prompts.
            EpisodeError: the environment failed, or returned something invalid.
        """
        return self.responder.play(prompts, overrides)

    def decode(
        self,
        prompts: Sequence[Tensor],
        samples: Sequence[Tensor],
        prompt_sizes: Sequence[int] | None = None,
        append_eos_token: bool = False,
    ) -> tuple[list[str], list[str], list[str]]:
        """Decode token ids to (samples, prompts, outputs), with outputs truncated at the first stop string.

        Args:
            prompts: prompt ids, one 1-D tensor each.
            samples: prompt and response ids, one 1-D tensor each.
            prompt_sizes: how many ids of each sample are its prompt; the prompts' lengths without it.
            append_eos_token: append the text of EOS to outputs that were truncated or that EOS ended.
        """
        sizes = [len(p) for p in prompts] if prompt_sizes is None else prompt_sizes
        return generation.decode_samples(self.tokenizer, self.config.rollout, prompts, samples, sizes, append_eos_token)

    # ------------------------------------------------------------------------------------- evaluating and exporting

    def evaluation(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Generate responses to the evaluation prompts, score and measure them; see `AcceleratedLoop.evaluation`."""
        return self.evaluator.on_prompts()

    def write_model(self, building: Path, target: Path) -> None:
        """Write model, tokenizer and heads so that transformers loads the model; with an adapter, only the adapter."""
        self.exporter.write(building, target)

    def export_fault(self, directory: Path) -> str:
        """Load the export that `write_model` wrote, and return how it differs from the trained model; empty if not.

        Of a classifier, the scores are compared with those that training computes.
        """
        return self.exporter.fault(directory)

    def model_card(self) -> dict[str, str]:
        """Return the model card's entries: transformers loads language models and adapters, trainkit the heads."""
        return self.exporter.card()
