"""The loop for language models: policy, reference, experience from what is sampled, evaluation and export."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from trainkit import metrics as m
from trainkit.config import EnvironmentConfig, MethodConfig, SamplingConfig, TRLConfig, sweep
from trainkit.data import (
    Batch,
    Preferences,
    Prompts,
    Rollouts,
    Row,
    Sequences,
    prompt_rows,
    written_prompts,
)
from trainkit.data.columns import without
from trainkit.errors import ConfigError, DataError, RegistryError, printable
from trainkit.functional import (
    effective_sample_size,
    importance_ratios,
    masked_ratios,
    masked_sum,
    per_response,
    place_scores,
    repetition,
    to_float64,
    truncated_ratios,
)
from trainkit.models import (
    Frozen,
    Policy,
    Reference,
    Scorer,
    TokenOutputs,
    load_model,
    load_tokenizer,
    make_policy,
)
from trainkit.models.adapters import BASE, HEADS, bare, has_adapter, has_score_head, save_model
from trainkit.models.loading import (
    balances_experts,
    check_frozen,
    check_tokens,
    check_trainable,
    check_trains_weights,
    coming_eos,
    count_virtual,
    load_frozen,
    load_frozen_config,
    load_model_config,
    name_eos,
    reads_more,
)
from trainkit.models.policy import check_logit_mask
from trainkit.models.reloading import fault_of, has_left_its_path
from trainkit.models.reward import name_padding
from trainkit.models.rope import fix_rope
from trainkit.models.stored import store_frozen
from trainkit.models.virtual import virtual_tokens
from trainkit.plugins.hooks import name_of
from trainkit.rollouts import Engine, EngineSampler, EnvironmentMaker, RewardFn, Sampler, check_maker, score
from trainkit.rollouts.engines import engine_class
from trainkit.rollouts.replica import PRECISIONS
from trainkit.rollouts.rewards import FURTHER, check_keywords, numbers_of
from trainkit.runs import run
from trainkit.runs.fingerprints import Fingerprints, of_maker, of_tokenizer
from trainkit.runs.health import Health
from trainkit.seeding import PLACE, SEEDED, global_rng, placed, turn_seed
from trainkit.trainer import collecting, generation, sharing, stored
from trainkit.trainer.best import check_best, choose_best
from trainkit.trainer.evaluation import on_prompts
from trainkit.trainer.loop import AcceleratedLoop
from trainkit.trainer.returns import checked_batch
from trainkit.trainer.sampling import Sampling
from trainkit.trainer.settings import check_distribution
from trainkit.trainer.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)

SAMPLER_TOLERANCE = 1e-4
"""Largest difference between log-probabilities of sampler and policy that counts as rounding in float32."""


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
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of samples that the algorithm reads, besides those of their format. Others are named in a warning, as are
    those of prompts if there is no reward function, metric function or environment to get them."""

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
        super().__init__(config, model=model, **kwargs)
        self.environment = None if environment is None else check_maker(environment)
        self.text = self._make_text(model, tokenizer)
        """Prompts and samples as token ids."""
        self.sampling = Sampling(
            self.config,
            self.text,
            self.models,
            self.parallel,
            self.recorder,
            self.progress,
            environment=self.environment,
            logit_mask=lambda: self.logit_mask,
            steer=self.steer if self._steers else None,
            make_sampler=lambda: self.hooks.hook.make_sampler(trainer=self),
        )
        """What samples responses, and plays episodes."""
        self.health = self._make_health()
        if self.environment is not None and self.text.is_encoder_decoder:
            raise ConfigError(
                f"a model of type {self.text.model_config.model_type!r} is an encoder-decoder, which reads one prompt "
                "and writes one output; environments of several turns need a model that reads all of it as one text"
            )
        rollout = self.config.rollout
        if rollout.max_refills != type(rollout).model_fields["max_refills"].default and not self.keeps:
            raise ConfigError(
                f"rollout.max_refills is {rollout.max_refills}, and {config.method.name!r} trains on everything that "
                "it samples; remove it"
            )
        sharing.check(self)
        if self.config.rollout.staleness:
            self.ahead = self.sampling.ahead = collecting.AsyncCollector(self)
        if (chosen := self.chosen_reference) is not None:
            self._freeze(chosen, "model.reference_path" if isinstance(chosen, str | Mapping) else "reference")
        self._warned_of_equal_scores = self._warned_of_drops = False
        self.checks_memory = True
        """Whether it is still open if the output of frozen layers of an offline collection fits into memory."""

    def _make_text(self, live: Any, tokenizer: Any) -> Text:
        """Return the run's text, after checking that tokenizer, model and environment suit the algorithm."""
        config, name = self.config, self.config.method.name
        self._check_environment()
        if self.online:
            check_distribution(config)
        if tokenizer is not None and config.tokenizer.tokenizer_path is not None:
            raise ConfigError(
                f"a tokenizer is given, and tokenizer.tokenizer_path is {config.tokenizer.tokenizer_path!r}; "
                "give one of the two"
            )
        tokenizer = load_tokenizer(config, tokenizer)
        model_config = live.config if live is not None else load_model_config(config.model)
        check_trainable(config.model, model_config, live=live is not None)
        if balances_experts(model_config) and self.parallel.is_main:
            log.warning(
                "the loss that balances the experts of a mixture (router_aux_loss_coef) is not added to that of %s",
                name,
            )
        if model_config.is_encoder_decoder and not self.encoder_decoders:
            raise ConfigError(
                f"a model of type {model_config.model_type!r} is an encoder-decoder, and {name!r} trains none; give a "
                "model that reads prompt and response as one text"
            )
        return Text(
            config,
            self.parallel,
            tokenizer=tokenizer,
            model_config=model_config,
            virtual=count_virtual(config.model, live),
            ends=coming_eos(config.model, live, model_config) if self.generates else [],
            inputs=self.inputs,
            columns=self.columns,
            began=self.began,
        )

    @property
    def missing_rewards(self) -> list[str]:
        """What is missing for rewards, among reward_fn and environment."""
        if "environment" in self.inputs:
            return ["environment"] if self.environment is None else []
        return [] if self.environment is not None else super().missing_rewards

    def _check_environment(self) -> None:
        """Raise a `ConfigError` if settings of environments have no effect, or the algorithm uses no environment."""
        name, config = self.config.method.name, self.config
        if self.environment is not None and not self.rewarded:
            raise ConfigError(
                f"{name!r} learns from {' and '.join(self.inputs)}, not from the rewards of an environment"
            )
        if self.environment is not None:
            return
        given = [
            f"environment.{key}" for key, value in config.environment if value != getattr(EnvironmentConfig(), key)
        ]
        for key in ("max_turns", "max_episode_tokens"):
            if getattr(config.rollout, key) != type(config.rollout).model_fields[key].default:
                given.append(f"rollout.{key}")
        if given:
            are, them = ("is", "it") if len(given) == 1 else ("are", "them")
            raise ConfigError(
                f"{' and '.join(given)} {are} set, and there is no environment; give one, or remove {them}"
            )

    # ------------------------------------------------------------------------------------------------ construction

    def _finish(self, policy: Any) -> None:
        """Check a new policy, and set what it needs to know of the run."""
        own = getattr(self.live_model, "v_head", None)
        if own is not None and getattr(policy, "value_head", None) is not own:
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
        self._fix_rope(policy)
        if isinstance(policy, Policy) and reads_more(self.model_config) and not reads_more(policy.model.config):
            log.warning(
                "of the %s, which reads more than text, the language model alone is loaded and trained (%s), and "
                "exports hold it alone",
                self.model_config.model_type,
                type(bare(policy.model)).__name__,
            )
        sharing.prepare(self, policy)
        if has_adapter(policy.model):
            self._store_frozen(policy.model, path, self.model_config)

    @property
    def _copies_model(self) -> bool:
        """Whether every process makes a copy of the model at the start: that of its engine."""
        return self.generates and self.sampling.copies_model

    def _before_dividing(self, reference: Any) -> None:
        """Do what needs whole models: start the engine, which copies the model."""
        super()._before_dividing(reference)
        if self.generates:
            self.sampling.start_engine()

    def _store_frozen(self, model: Any, path: Any, config: Any, beside: nn.Module | None = None) -> None:
        """Keep frozen weights in 16 bits if the checkpoint at ``path`` and the run's precision are of the same ones."""
        dtype = PRECISIONS.get(self.accelerator.mixed_precision)
        if isinstance(path, str) and dtype is not None and config.dtype == dtype:
            store_frozen(model, dtype, beside)

    def _fix_rope(self, policy: Any) -> None:
        """Let the numbers of a row not depend on its neighbours' lengths."""
        if self.limit is not None:
            fix_rope(policy, self.limit + count_virtual(self.config.model, self.live_model))

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
        made = Reference(model)
        path = self.config.model.model_path if self.live_model is None else None
        self._store_frozen(made.policy.model, path, self.model_config, model)
        return made

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
        return self._freeze(path_or_model, "frozen()")

    def _freeze(self, source: Any, key: str) -> Frozen:
        """Check the second model that ``source`` is or names, and return it, to be loaded later."""
        check_frozen(self.model_config, load_frozen_config(self.config.model, source, key), key, self.limit)
        check_tokens(self.tokenizer, self.config.model, source, key)
        made = Frozen(partial(self._load_frozen, source, key, len(self.models.frozen)))
        self.models.frozen.append(made)
        if self.models.built:
            made.policy  # noqa: B018  (loads it, on all processes together)
        return made

    def _load_frozen(self, source: Any, key: str, index: int) -> Policy:
        own, device = self.unwrapped, self.accelerator.device
        with global_rng(self.config.train.seed, "frozen", index, device=device):
            model = load_frozen(self.config.model, source, key)
        trained = {id(parameter) for parameter in own.parameters() if parameter.requires_grad}
        if any(id(parameter) in trained for parameter in model.parameters()):
            raise ConfigError(
                f"the model of {key} shares weights with the trained model, and would change with it; give a copy"
            )
        if not self.sharding.keeps_sharded or self.models.built:  # otherwise, when it is divided
            model.to(device)
            if not isinstance(source, str | Mapping):
                self.parallel.make_equal(model)  # any other is equal on all processes
        with torch.autocast(device.type, enabled=False), self.models.as_trained():
            if isinstance(own, Policy):
                policy = make_policy(model, temperature=own.temperature, logit_mask=own.logit_mask)
                policy.vocabulary = own.vocabulary
            else:  # of a model that scores text
                policy = make_policy(model)
            policy.row_limit = self.row_limit
        self._fix_rope(policy)
        self._store_frozen(model.requires_grad_(False), source, load_frozen_config(self.config.model, source, key))
        run.check_frozen(self, policy)
        sharing.prepare(self, policy)
        return policy

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
        if not self.scores_samples and self.metric_fn is None:  # otherwise they get the columns
            self.text.warn_unread(rows, {"prompt", *SEEDED}, "prompts")
        fitting = self.fit_prompts(rows)
        self.text.warn_unrendered(rows, "prompt")
        return fitting

    def _check_functions(self, rows: list[Row]) -> None:
        """Raise a `ConfigError` if reward or metric function do not take the keywords that they will be called with."""
        if self.environment is not None or getattr(self.score, "__func__", None) is not AccelerateRLTrainer.score:
            return
        columns = dict.fromkeys(str(name) for row in rows for name in row if name not in ("prompt", PLACE))
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
        return self.text.read_samples(samples, rewards, first, self.check_samples)

    def encode_samples(self, rows: list[Row]) -> Sequences:
        """Encode sample rows as sequences on the device; outputs and their EOS are marked as responses."""
        return self.text.encode_samples(rows)

    def encode_preferences(self, rows: list[Row]) -> Preferences:
        """Encode rows of pairs as sequences on the device; prompt and output are tokenised as one text."""
        return self.text.encode_preferences(rows)

    def add_eval_pipeline(self, prompts: Prompts) -> None:
        """Set the prompts of evaluations, after checking that they leave room for responses."""
        self._check_generates("eval_prompts")
        super().add_eval_pipeline(prompts)
        longest = max(len(ids) for ids in self.text.queries(self.eval_rows))
        for _, overrides in sweep(self.config.rollout.eval_kwargs):
            room = self.settings(**overrides).max_new_tokens
            if not self.text.fits(longest, room):
                raise DataError(
                    f"the longest evaluation prompt has {longest} tokens, and rollout.eval_kwargs asks for {room} new "
                    f"ones; {self.text.what_fits}. Lower max_new_tokens there"
                )

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the data, the tokenizer and the environment."""
        made = {} if self.environment is None else {"the environment": of_maker(self.environment)}
        return {**super().fingerprints, "the tokenizer": self._tokenizer_seen, **made}

    @cached_property
    def _tokenizer_seen(self) -> str:
        return of_tokenizer(self.tokenizer)

    # -------------------------------------------------------------------------------------------------------- sampling

    @property
    def _steers(self) -> bool:
        return getattr(self.steer, "__func__", None) is not AccelerateRLTrainer.steer

    def steer(self, logits: Tensor, states: Tensor, settings: SamplingConfig) -> Tensor:
        """Return the logits to sample from instead of ``logits`` [b, V]; override it to change what is sampled.

        ``logits`` include the sampling temperature and the logit mask; ``states`` [b, D] are the hidden states from
        which they are computed; ``settings`` is of the class in the method's `sampling`. The log-probabilities and
        entropies of the rollouts are still those of the model.
        """
        return logits

    def sample(self, rows: list[Row], **overrides: Any) -> Rollouts:
        """Sample one response per row for training, at the rollout's settings with ``overrides``; or play an episode.

        The random numbers of a response follow from the run's seed, the row's position in the stream of prompts and
        the number of the response among those to this row in the collection (`trainkit.seeding.response_seeds`).

        Args:
            rows: those that `make_experience` gets, or copies of them (``{**row, "prompt": ...}``).
            **overrides: sampling settings over those of ``config.rollout``, e.g. ``temperature=0``.
        """
        rollouts = self.sampling.sample(
            rows, self.settings(**overrides), "train", self.sampling.seeds(rows, "train", self._seen)
        )
        self._rollouts.append(replace(rollouts, hidden=None))  # kept for the hooks, longer than the experience
        if rollouts.turns is not None and rollouts.failed is not None:
            turns = torch.tensor([float(len(turns)) for turns in rollouts.turns])
            self._sampling.playing += self.sampling.player.seconds
            self.record({"environment/turns": m.Mean.of(turns), "environment/failures": m.Mean.of(rollouts.failed)})
        return rollouts

    @property
    def sampler(self) -> Sampler:
        """What turns prompts into rollouts: the sampler of a plugin's ``make_sampler``, or the engine's."""
        return self.sampling.sampler

    @property
    def engine(self) -> Engine:
        """The generation engine that `rollout.engine` names; it is started when it is first used."""
        return self.sampling.engine

    @property
    def engine_class(self) -> type[Engine]:
        """The class of the engine."""
        return engine_class(self.config.rollout.engine)

    def core_sampler(self) -> Sampler:
        """Return trainkit's sampler of this run's model, also for a ``make_sampler`` hook to build on."""
        return self.sampling.core_sampler()

    @contextmanager
    def _sampling_model(self) -> Iterator[None]:
        """Let every process sample inside the block: give its engine the weights, or gather the model."""
        with self.sampling.ready():
            yield

    @property
    def scores_samples(self) -> bool:
        """Whether what is sampled can be scored: there is a reward function or an environment."""
        return self.reward_fn is not None or self.environment is not None

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores of the reward function [B], or [B, T] if it gives rewards per token.

        With an environment, its rewards [B, T], each at the last token of the output that it rewards, plus the scores.
        Some are infinite or NaN if the function returned them and `reward.on_nonfinite` deals with them.
        An algorithm that learns from prompts alone gets scores of 0.
        """
        scores = self._score(rollouts)
        for at, kept in enumerate(self._rollouts):  # what the hooks get
            if kept.rows is rollouts.rows:
                self._rollouts[at] = replace(kept, judged=self._judge(rollouts, scores))
        return scores

    def _judge(self, rollouts: Rollouts, scores: Tensor) -> list[dict[str, Any]] | None:
        """Return what the last call of the reward function said about each response, and its score [B] or [B, T]."""
        if not self.scores_samples:
            return None
        finite = [score if math.isfinite(score) else None for score in per_response(scores).tolist()]
        known = {"reward": finite, **(self._sampling.told if self.reward_fn is not None else {})}
        return [dict(zip(known, values, strict=True)) for values in zip(*known.values(), strict=True)]

    def _score(self, rollouts: Rollouts) -> Tensor:
        device = self.accelerator.device
        if self.reward_fn is None and rollouts.rewards is not None:
            return rollouts.rewards.to(device)
        if self.reward_fn is None:
            if self.rewarded:  # a loop of the caller's own, which `learn` has not checked
                name = self.config.method.name
                if self.environment is not None:
                    raise DataError("the rollouts are no episodes of the environment; give those of play()")
                raise DataError(f"{name!r} learns from {' and '.join(self.inputs)}; give {self.missing_rewards[0]}")
            return torch.zeros(len(rollouts), device=device)
        weights, started, told = self._sampling.weights, time.perf_counter(), dict[str, list[Any]]()
        scores = score(
            self.reward_fn,
            replace(rollouts, rows=[self.text.numbered(row) for row in rollouts.rows]),
            self.tokenizer,
            self.config.reward,
            step=self.progress.step if weights is None else weights.version,
            alone=weights is None,
            told=told,
        ).to(device)
        self._sampling.told = told
        numbers = {name: torch.tensor(numbers_of(values), dtype=torch.float64) for name, values in told.items()}
        self.record({f"{FURTHER}{name}": m.Mean.of(values) for name, values in numbers.items() if len(values)})
        self._sampling.seconds.append(time.perf_counter() - started)
        if rollouts.rewards is None:
            return scores
        return rollouts.rewards.to(device) + place_scores(scores, rollouts.sequences.response_mask)

    # ----------------------------------------------------------------------------------------- for the algorithm

    def make_experience(self, rows: list[Row]) -> Batch:
        """Sample responses, score them and make experience, as online algorithms do. Offline ones override this."""
        return self._experience(*self.sample_and_score(rows))

    def _begin_sampling(self, parts: list[list[Row]]) -> None:
        """Let the engine begin with what several calls of `sample` will ask, if those are not overridden."""
        usual = {name: getattr(AccelerateRLTrainer, name) for name in ("sample", "sample_and_score")}
        if all(getattr(type(self), name) is method for name, method in usual.items()):
            self.sampling.begin(parts, self._seen)

    def sample_and_score(self, rows: list[Row]) -> tuple[Rollouts, Tensor]:
        """Sample a response to each row, and return the rollouts with their scores [B] or [B, T]."""
        rollouts = self.sample(rows)
        scores = self.score(rollouts)
        self._record_scored(rollouts, scores)
        return replace(rollouts, judged=self._judge(rollouts, scores)), scores

    def keep(self, rollouts: Rollouts, scores: Tensor) -> Tensor:
        """Return which responses to train on, bool [B]; a group is kept whole or not at all.

        If an algorithm overrides it, the loop samples further prompts until the collection is full of responses that
        are kept, or `rollout.max_refills` is reached. It is called before any experience is made, and runs no model.

        Args:
            rollouts: responses, those to one prompt adjacent.
            scores: their scores [B], or [B, T] for rewards per token.
        """
        return torch.ones(len(rollouts), dtype=torch.bool, device=self.accelerator.device)

    @property
    def keeps(self) -> bool:
        """Whether the algorithm chooses what it trains on, so that the loop calls `keep`.

        By default, whether it overrides `keep`. An algorithm that does so with some of its settings only overrides this
        too.
        """
        return getattr(self.keep, "__func__", None) is not AccelerateRLTrainer.keep

    def collect_experience(self) -> None:
        """Push the experience of one collection to the store."""
        if not self.scores_rollouts:
            super().collect_experience()
            return
        if self.ahead is None:
            parts = collecting.sampled(self, self._collection)
            first = list(islice(parts, 1))
            self._decide_sharing(first)
            for rollouts, scores in chain(first, parts):
                self.store.push(self._experience(rollouts, scores))
            return
        self._collection = self.ahead.turn()
        staleness = torch.tensor(float(self._collection.staleness))
        self.recorder.pending = m.merge(
            self.recorder.pending, self._collection.records, {"rollout/staleness": m.Mean.of(staleness)}
        )
        self._decide_sharing(self._collection.parts)
        for rollouts, scores in self._collection.parts:
            self.store.push(self._experience(rollouts, scores))
        self._collection.parts = []

    def load_loop_state(self, state: dict[str, Any]) -> None:
        """Restore what `loop_state` returned."""
        super().load_loop_state(state)
        sharing.apply(self)

    def _decide_sharing(self, parts: Sequence[tuple[Rollouts, Tensor]]) -> None:
        sharing.decide(self, parts[0][0].sequences if parts else None)

    def begin_experience(self, rows: list[Row]) -> None:
        """Decide whether the output of frozen layers is kept, and by some pairs whether prompts are shared."""
        if not self.online:
            stored.begin(self, len(rows))
        pairs = "pairs" in self.inputs and bool(rows)
        sharing.decide(self, self.encode_preferences(rows[: sharing.SEEN]).both if pairs else None)

    def through_trunk(self, batch: B) -> B:
        """Return a batch of an offline collection whose sequences have the output of the frozen lower layers.

        These layers then run once for all passes. It is unchanged if no layer is frozen, or the output is not kept. The
        loop calls it on what `make_experience` returns; an algorithm that asks the reference calls it before.
        """
        return stored.with_trunk(self, batch) if self.collected_rows else batch

    @property
    def scores_rollouts(self) -> bool:
        """Whether experience is made of scored rollouts, and not by an own `make_experience`."""
        own = getattr(self.make_experience, "__func__", None) is not AccelerateRLTrainer.make_experience
        return self.online and not own

    @property
    def keeps_sharded(self) -> bool:
        """Whether the model is divided among the processes also while experience is made."""
        usual = self.scores_rollouts and type(self).sample_and_score is AccelerateRLTrainer.sample_and_score
        return super().keeps_sharded or (usual and self.sampling.samples_apart)

    def _experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        if isinstance(self.unwrapped, Policy):  # the frozen layers run here, and not again
            rollouts = replace(rollouts, sequences=self.unwrapped.through_trunk(rollouts.sequences))
        return checked_batch(self, "experience", self.experience(rollouts, scores))

    def fill_store(self) -> None:
        """Fill the store with one collection of experience; log once per run if equal scores teach nothing."""
        super().fill_store()
        self._record_calls()
        self.collected_rows = 0
        if not self.rewarded:
            return
        scores = torch.cat([torch.zeros(0, device=self.accelerator.device), *self._collection.scores])
        if self.samples_per_prompt > 1:
            self.record({"reward/equal_in_group": m.Mean.of(~self._differ(scores))})
        if not self._warned_of_equal_scores:
            self._warn_of_equal_scores(scores)

    def _record_calls(self) -> None:
        """Record the seconds of reward function and environment; log a warning if all episodes failed."""
        if self.reward_fn is not None:
            self.record({"time/reward": m.Mean.of(torch.tensor(sum(self._collection.seconds), dtype=torch.float64))})
        if self.environment is None:
            return
        self.record({"time/environment": m.Mean.of(torch.tensor(self._collection.playing, dtype=torch.float64))})
        if self.config.environment.on_error == "raise":
            return
        failures = [turns[-1]["error"] for part in self._rollouts for turns in part.turns or [] if "error" in turns[-1]]
        mine = [(len(failures), sum(len(part) for part in self._rollouts), failures[:1])]
        counts = self.gather(mine)
        failed, played = sum(count for count, _, _ in counts), sum(count for _, count, _ in counts)
        if 0 < failed == played and self.parallel.is_main:
            reason = printable(next(first[0] for _, _, first in counts if first))
            log.warning("step %d: all %d episodes of the collection failed: %s", self.progress.step, played, reason)

    def _differ(self, scores: Tensor) -> Tensor:
        """Return for each prompt whether the scores of its responses differ. [B] -> bool [prompts]."""
        groups = scores.view(len(scores) // self.samples_per_prompt, self.samples_per_prompt)
        return (groups != groups[:, :1]).any(1)

    def _warn_of_equal_scores(self, scores: Tensor) -> None:
        """Log that the scores of all groups, or of all responses, of a collection are equal, if they are. [B]."""
        k, none = self.samples_per_prompt, scores.new_full((), -torch.inf)
        differ = self._differ(scores).any().float()
        ends = (scores.max(), -scores.min()) if len(scores) else (none, none)
        # every process takes part, also one without scores
        found = self.max(torch.stack([differ, differ.new_tensor(len(scores)), *ends]).double())
        different, most, high, low = found.tolist()
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

    def _record_scored(self, rollouts: Rollouts, scores: Tensor) -> None:
        mask = rollouts.sequences.response_mask
        found: m.Metrics = {
            "rollout/length": m.Mean.of(mask.sum(1)),
            "rollout/terminated": m.Mean.of(rollouts.terminated),
            "rollout/repetition": m.Mean.of(repetition(rollouts.sequences.input_ids, mask)),
        }
        if self.rewarded:
            whole = per_response(scores)
            self._sampling.scores.append(whole)
            whole = whole[whole.isfinite()]
            found |= {"reward/mean": m.Mean.of(whole), "reward/std": m.Std.of(whole)}
        self.record(found)

    @torch.no_grad()
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
        if self.ahead is not None and not self.corrections:
            sampled = rollouts.logprobs, rollouts.entropy
            if sampled[0] is not None and sampled[1] is not None:
                return TokenOutputs(sampled[0], entropy=sampled[1])
        at = self.progress
        if self.correction != "none" or self.ahead is not None or self.keeps_sharded:
            trusted = self.correction == "sampler" and self._samples_newest and at.step > 0
            seen = _as_sampled(rollouts, self.unwrapped) if trusted else None
            return self._proximal(rollouts) if seen is None else seen
        seen, sampler = _as_sampled(rollouts, self.unwrapped), self._sampler_name
        if at.sampler != sampler:
            at.sampler, at.sampler_exact = sampler, None
        if at.sampler_exact and at.step > 0 and seen is not None:
            return seen
        outputs: TokenOutputs = self.unwrapped(rollouts.sequences, entropy=True)
        if at.sampler_exact is not False and seen is not None:
            off = (seen.logprobs - outputs.logprobs).abs().max() > SAMPLER_TOLERANCE
            at.sampler_exact = not bool(self.reduce(off.float()))
            if not at.sampler_exact:
                log.info("the sampler's log-probabilities differ from the policy's; the policy is run to compute them")
        return outputs

    def _proximal(self, rollouts: Rollouts) -> TokenOutputs:
        """Return what the policy computes for ``rollouts`` now, and record how far the sampler is from it."""
        outputs: TokenOutputs = self.unwrapped(rollouts.sequences, entropy=True)
        if rollouts.logprobs is None and self.config.rollout.correction == "auto" and self.correction != "none":
            self.correction = "none"
            if self.parallel.is_main:
                log.warning(
                    "the engine %r gives no log-probabilities, so rollouts are trained on as if they were sampled with "
                    "the newest weights",
                    self._sampler_name,
                )
        if rollouts.logprobs is not None:
            gap = rollouts.logprobs - outputs.logprobs
            self.record({"policy/sampler_kl": m.Mean.of(gap, rollouts.sequences.response_mask)})
        if self.correction == "sampler":
            return outputs._replace(logprobs=self._sampler_logprobs(rollouts))
        return outputs

    def _sampler_logprobs(self, rollouts: Rollouts) -> Tensor:
        if rollouts.logprobs is None:
            raise ConfigError(
                f"rollout.correction {self.correction!r} needs the log-probabilities with which responses were "
                f"sampled, and {self._sampler_name!r} gives none; set rollout.correction to 'none'"
            )
        return rollouts.logprobs

    @torch.no_grad()
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
        if not self._weighs:
            return torch.ones_like(policy.logprobs)
        rollout, mask = self.config.rollout, rollouts.sequences.response_mask
        ratios = importance_ratios(policy.logprobs, self._sampler_logprobs(rollouts), mask, level=self.correction_level)
        correct = truncated_ratios if self.correction == "decoupled" else masked_ratios
        weights = correct(ratios, rollout.correction_cap)
        size = effective_sample_size(weights, mask)
        self.record(
            {
                "rollout/kept_mass": m.Mean(
                    to_float64(masked_sum(weights, mask)), to_float64(masked_sum(ratios, mask))
                ),
                "rollout/effective_sample_size": m.Mean(to_float64(size), to_float64(mask.sum())),
            }
        )
        return weights

    @property
    def correction_level(self) -> str:
        """Whether importance weights are those of a ``token`` or a ``sequence``: `rollout.correction_level`.

        An algorithm whose loss has one ratio per response overrides it.
        """
        return self.config.rollout.correction_level

    @cached_property
    def correction(self) -> str:
        """The correction of this run: `rollout.correction`, or what ``auto`` stands for."""
        rollout = self.config.rollout
        if rollout.correction != "auto":
            return rollout.correction
        exact = rollout.staleness == 0 and self.engine_class.exact
        return "decoupled" if not exact and "decoupled" in self.corrections else "none"

    @property
    def _samples_newest(self) -> bool:
        """Whether trainkit's sampler samples with the newest weights, in this process."""
        return not self.config.rollout.staleness and self.engine_class.exact and not self.keeps_sharded

    @property
    def _weighs(self) -> bool:
        return self.correction in ("decoupled", "masked")

    def _make_health(self) -> Health:
        """Return what watches the metrics; it knows what is usual with this configuration."""
        rollout, precision = self.config.rollout, self.accelerator.mixed_precision
        uncorrected = rollout.staleness > 0 and not self.corrections
        starts = (self.correction != "sampler" or self._samples_newest) and not uncorrected
        return Health(starts_on_policy=starts, half_precision=precision != "no")

    def _check_collecting(self) -> None:
        """Raise a `ConfigError` if settings of engine, staleness and correction do not suit the algorithm."""
        rollout, name = self.config.rollout, self.config.method.name
        given = self._collecting_settings()
        if not self.online and set(given) - {"rollout.engine"}:  # evaluations and generate() use the engine
            raise ConfigError(
                f"{' and '.join(given)} cannot be set with {name!r}, which learns from {' and '.join(self.inputs)} and "
                "samples nothing to train on; remove it"
            )
        if rollout.staleness and not self.scores_rollouts:
            raise ConfigError(
                f"rollout.staleness is {rollout.staleness}, and {name!r} makes its experience while it samples "
                "(make_experience), with the newest weights; set it to 0"
            )
        if self.rewarded and self.config.reward.on_nonfinite != "error" and not self.scores_rollouts:
            raise ConfigError(
                f"reward.on_nonfinite is {self.config.reward.on_nonfinite!r}, and {name!r} makes its experience while "
                "it scores (make_experience); set it to 'error'"
            )
        if rollout.correction not in ("auto", "none", *self.corrections):
            raise ConfigError(
                f"rollout.correction is {rollout.correction!r}, and {name!r} supports "
                f"{' and '.join(self.corrections) or 'none'}; choose one of them, or 'auto'"
            )
        if (weighing := [key for key in given if key.startswith("rollout.correction_")]) and not self._weighs:
            raise ConfigError(
                f"{' and '.join(weighing)} cannot be set with the correction {self.correction!r}, which has no "
                "importance weights; set rollout.correction to 'decoupled' or 'masked', or remove it"
            )
        uncorrected = self.online and self.correction == "none" and rollout.correction == "auto"
        if uncorrected and (rollout.staleness or not self.engine_class.exact) and self.parallel.is_main:
            log.warning(
                "%s corrects for no difference between the weights that sample and those that are trained; its "
                "rollouts are trained on as if they were sampled with the newest weights",
                name,
            )

    @property
    def _sampler_name(self) -> str:
        sampler = self.sampler
        return name_of(self.config.rollout.engine) if isinstance(sampler, EngineSampler) else type(sampler).__qualname__

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
        if self.ahead is not None:
            raise ConfigError(
                f"rollout.staleness is {self.config.rollout.staleness}, and step() trains on the rollouts that it is "
                "given; set it to 0"
            )
        rollouts, scores = generation.step_arguments(self, arguments, response_masks)
        checked = generation.given_scores(scores, rollouts)
        run.begin(self)
        self.store.clear()
        self._begin_own_collection(rollouts=[rollouts])
        self.progress.prompts = len(rollouts) // self.samples_per_prompt
        with self.inference():
            self._record_scored(rollouts, checked)
            self._decide_sharing([(rollouts, checked)])
            self.store.push(self._experience(rollouts, checked))
            self._prepare_store()
        return self._learn_from_store(self.passes or 1)

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
        self._check_generates("generate()")
        given = generation.prompts_as_rows(prompts, input_ids, attention_mask, self.tokenizer.pad_token_id)
        rows, settings = self._with_prompts(given, "generate()"), self.settings(**overrides)
        rows = self._next_places(rows)
        seeds = [turn_seed(seed, 0) for seed in self.sampling.seeds(rows, "generate")]
        with self.recorder.discarding(), self.sampling.ready():
            sampler = self.sampling.reference_sampler(self.reference) if reference else None
            rollouts = self.sampling.respond(rows, self.text.queries(rows), settings, "generate", seeds, sampler)
        return replace(rollouts, rows=[{k: v for k, v in row.items() if k != PLACE} for row in rollouts.rows])

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
            reward_fn: scores the responses instead of the run's reward function and environment. Rewards per token are
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
        self._check_generates("best_of()")
        settings = self.settings(**overrides)
        check_best(self, n, keep, reward_fn, settings)
        given = generation.prompts_as_rows([] if prompts is None else prompts, None, None, call="best_of()")
        rows = self._with_prompts(given, "best_of()") if self.environment is None else self._as_episodes(given)
        rows = [row for row in self._next_places(rows) for _ in range(n)]
        with self.recorder.discarding(), self.sampling.ready():
            return choose_best(self, rows, settings, self.sampling.seeds(rows, "generate"), n, keep, reward_fn)

    def _with_prompts(self, given: list[Row], call: str) -> list[Row]:
        """Return rows with their prompts as text or ids; raise a `DataError` if one has none."""
        for index, row in enumerate(given):
            if row.get("prompt") is None:
                raise DataError(f"{call} needs prompts, and row {index} has none; {self._instead_of_prompts}")
        return written_prompts(given, self.tokenizer)

    def _as_episodes(self, given: Prompts) -> list[Row]:
        """Return checked rows for episodes."""
        given = without(given, self.config.data.ignore_columns)
        return self.fit_prompts(prompt_rows(given, needed=False, replayed=True))

    def _next_places(self, rows: list[Row]) -> list[Row]:
        """Return rows with the next places among all that were generated; their random numbers follow from these."""
        if self.config.train.resume:
            run.begin(self)  # the random numbers follow from the progress of the resumed run
        first = self.progress.generated
        self.progress.generated += len(rows)
        return placed(rows, first)

    @property
    def _instead_of_prompts(self) -> str:
        if self.environment is None:
            return "give it under the key 'prompt'"
        return "the environment of this run gives the prompt: call play(rows), which plays episodes with it"

    def _check_generates(self, given: str) -> None:
        if not self.generates:
            raise ConfigError(
                f"{self.config.method.name!r} trains a model that scores text and generates none, so {given} has no "
                "use; evaluate on eval_samples"
            )

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
        if self.environment is None:
            raise ConfigError("play() needs an environment; give environment= to trainkit.train or to the trainer")
        if prompts is None and not self.eval_rows:
            raise DataError("play() plays the evaluation prompts, and there are none; give rows: play([{}, {}])")
        given = self.eval_rows if prompts is None else generation.prompts_as_rows(prompts, None, None, call="play()")
        rows, settings = self._as_episodes(given), self.settings(**overrides)
        rows = self._next_places(rows)
        with self.recorder.discarding(), self.sampling.ready():
            return self.sampling.sample(rows, settings, "generate", self.sampling.seeds(rows, "generate"))

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
        return on_prompts(self)

    def save_pretrained(self, directory: str | Path | None = None) -> Path:
        """Export for transformers: base-model weights, config and tokenizer; heads are in a separate file.

        ``AutoModelForCausalLM.from_pretrained(directory)``, of an encoder-decoder ``AutoModelForSeq2SeqLM``, loads
        a model with equal logits.
        """
        return super().save_pretrained(directory)

    def write_model(self, building: Path, target: Path) -> None:
        """Write model, tokenizer and heads so that transformers loads the model; with an adapter, only the adapter."""
        model = self.unwrapped.model
        lacking = name_eos(model, self.tokenizer)
        other = self._before_its_end(model)
        if has_adapter(model) and model.name_or_path and (other or self._has_left_its_path(model)):
            log.warning(
                "the model below the adapter is not the one at %s%s; it is saved beside the adapter, in %s",
                model.name_or_path,
                ", whose padding token is EOS, so that transformers would score the token before it" if other else "",
                target / BASE,
            )
            model.name_or_path = ""
        save_model(model, building, target)
        if lacking and not any(building.rglob("config.json")):  # an adapter, whose base is elsewhere
            log.warning(
                "%s holds an adapter, and the configuration of its base does not name the tokenizer's EOS: %scall "
                "generate with eos_token_id=%d",
                target,
                "" if virtual_tokens(self.unwrapped.model) else "merge them (trainkit merge), or ",
                self.tokenizer.eos_token_id,
            )
        self.tokenizer.save_pretrained(building)
        state = self.unwrapped.state_dict()
        if heads := {k: v.contiguous() for k, v in state.items() if not k.startswith("model.")}:
            save_file(heads, building / HEADS)

    def _before_its_end(self, model: Any) -> bool:
        """Name the padding token of a classifier; return whether it was one by which texts end before their EOS."""
        own = self.unwrapped
        classifies = isinstance(own, Scorer) and own.head is None and own.reads_last
        return classifies and name_padding(model.config, self.tokenizer)

    def _has_left_its_path(self, model: Any) -> bool:
        return self.live_model is not None and has_left_its_path(model)

    def export_fault(self, directory: Path) -> str:
        """Load the export that `write_model` wrote, and return how it differs from the trained model; empty if not.

        Of a classifier, the scores are compared with those that training computes.
        """
        own, classifier = self.unwrapped, None
        if isinstance(own, Scorer) and own.head is None:
            classifier = partial(_scores, own)
        with self.models.as_trained():
            return fault_of(directory, own.model, classifier, self.tokenizer.eos_token_id)

    def model_card(self) -> dict[str, str]:
        """Return the model card's entries: transformers loads language models and adapters, trainkit the heads."""
        task = {"pipeline_tag": "text-generation"} if self.generates and not self.text.is_encoder_decoder else {}
        library = "peft" if has_adapter(self.unwrapped.model) else "transformers"
        return {"library_name": library, **task, "loading": self._loading()}

    def _loading(self) -> str:
        if not self.generates:
            return "from trainkit.models import RewardModel\n\nreward_fn = RewardModel.from_pretrained(directory)"
        cls = f"AutoModelFor{'Seq2SeqLM' if self.text.is_encoder_decoder else 'CausalLM'}"
        code = (
            f"from transformers import {cls}, AutoTokenizer\n\nmodel = {cls}.from_pretrained(directory)\n"
            "tokenizer = AutoTokenizer.from_pretrained(directory)"
        )
        if has_adapter(self.unwrapped.model):
            code = code.replace(f"{cls}, ", "").replace(f"{cls}.", f"AutoPeft{cls[4:]}.")
            code = f"from peft import AutoPeft{cls[4:]}\n{code}"
        if getattr(self.unwrapped, "value_head", None) is None:
            return code
        headed = f"{cls}WithValueHead"
        return (
            f"{code}\n\n# with its value head\nfrom trainkit.models import {headed}\n\n"
            f"critic = {headed}.from_pretrained(directory)"
        )


def _scores(scorer: Scorer, ids: Tensor) -> Tensor:
    """Return the scores of texts as training computes them. [B, T] -> [B]."""
    sequences = Sequences.from_lists(ids.tolist(), [[]] * len(ids), 0)
    scores: Tensor = scorer(sequences.to(ids.device))
    return scores


def _as_sampled(rollouts: Rollouts, policy: Any) -> TokenOutputs | None:
    """Return the policy's outputs as the sampler computed them; None if it did not compute all of them."""
    head, sequences = getattr(policy, "value_head", None), rollouts.sequences
    if rollouts.logprobs is None or rollouts.entropy is None:
        return None
    if head is None:
        return TokenOutputs(rollouts.logprobs, entropy=rollouts.entropy)
    if rollouts.hidden is None or getattr(policy, "critic", None) is not None:
        return None
    return TokenOutputs(
        rollouts.logprobs, sequences.place(head(rollouts.hidden[sequences.response_mask])), rollouts.entropy
    )
