"""Text in a run: the tokenizer, prompts and samples, and the sampling of responses and episodes."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainkit import metrics as m
from trainkit.config import EnvironmentConfig, MethodConfig, SamplingConfig, TRLConfig, sweep
from trainkit.data import (
    Preferences,
    PromptEncoder,
    Prompts,
    Rollouts,
    Row,
    Sequences,
    is_conversation,
    labelled,
    prompt_rows,
    sample_rows,
    unrendered,
    written_prompts,
)
from trainkit.data.chat import SETTINGS, STARTS
from trainkit.data.columns import is_given, without
from trainkit.data.formats import check_list, preference_row
from trainkit.data.pipeline import (
    IDS,
    EncodedSide,
    EqualSidesError,
    encode_pair_within,
    encode_within,
    id_count,
    lost_by_truncation,
)
from trainkit.data.tokenised import PAIR_COLUMNS
from trainkit.errors import ConfigError, DataError, PluginError, printable
from trainkit.functional import per_response, place_scores
from trainkit.models import load_tokenizer
from trainkit.models.loading import (
    balances_experts,
    check_trainable,
    coming_eos,
    count_virtual,
    eos_ids,
    load_model_config,
    pad_id,
)
from trainkit.plugins.hooks import name_of
from trainkit.rollouts import (
    Engine,
    EngineSampler,
    EnvironmentMaker,
    Player,
    Purpose,
    Request,
    RewardFn,
    Sampler,
    ServedModel,
    Weights,
    check_maker,
    score,
)
from trainkit.rollouts.engines import Ability, engine_class, start
from trainkit.rollouts.rewards import FURTHER, check_keywords, numbers_of
from trainkit.runs import run, saving
from trainkit.runs.fingerprints import Fingerprints, of_maker, of_tokenizer
from trainkit.seeding import PLACE, SEEDED, Seen, episode_seeds, placed, response_seeds, turn_seed
from trainkit.trainer import generation
from trainkit.trainer.best import check_best, choose_best
from trainkit.trainer.loop import AcceleratedLoop
from trainkit.trainer.settings import check_distribution, check_length
from trainkit.trainer.sharding import whole_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)


class TextTrainer(AcceleratedLoop[M]):
    """A trainer with a tokenizer, prompts and samples of text, a sampler and, if it is given, an environment.

    Args:
        config: the run's configuration.
        model: a live model, instead of ``config.model.model_path``; it is trained in place.
        tokenizer: a live tokenizer, instead of the one that the config names.
        environment: makes the environment of an episode from a row; see `trainkit.rollouts.Environment`.
        **kwargs: those of `AcceleratedLoop`.

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
        config = self.config
        self._unread: set[str] = set()  # columns that a warning has named
        self.environment = None if environment is None else check_maker(environment)
        self._check_environment()
        if self.online:
            check_distribution(config)
        if tokenizer is not None and config.tokenizer.tokenizer_path is not None:
            raise ConfigError(
                f"a tokenizer is given, and tokenizer.tokenizer_path is {config.tokenizer.tokenizer_path!r}; "
                "give one of the two"
            )
        self.tokenizer = load_tokenizer(config, tokenizer)
        STARTS[self.tokenizer] = self.began
        self.model_config = model.config if model is not None else load_model_config(config.model)
        check_trainable(config.model, self.model_config, live=model is not None)
        if balances_experts(self.model_config) and self.parallel.is_main:
            log.warning(
                "the loss that balances the experts of a mixture (router_aux_loss_coef) is not added to that of %s",
                config.method.name,
            )
        self.apart = bool(self.model_config.is_encoder_decoder)
        """Whether the model reads prompt and response separately, each with its own length limit."""
        if self.apart and not self.encoder_decoders:
            raise ConfigError(
                f"a model of type {self.model_config.model_type!r} is an encoder-decoder, and {config.method.name!r} "
                "trains none; give a model that reads prompt and response as one text"
            )
        self.ends = coming_eos(config.model, model, self.model_config) if self.generates else []
        """Token ids at which responses end, besides the tokenizer's EOS; outputs of samples end there too."""
        self._check_engine()
        self.limit = self._length_limit()
        budget = self.limit if self.limit is None or self.apart else self.limit - config.rollout.max_new_tokens
        self.encode = PromptEncoder(self.tokenizer, budget, config.rollout.overlong_prompts, ends=self.apart)
        if self.environment is not None and self.apart:
            raise ConfigError(
                f"a model of type {self.model_config.model_type!r} is an encoder-decoder, which reads one prompt and "
                "writes one output; environments of several turns need a model that reads all of it as one text"
            )

    # --------------------------------------------------------------------------------------------------------- lengths

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

    def _length_limit(self) -> int | None:
        """Return the largest number of tokens of prompt and response together, or of each if they are read separately.

        It is the smaller of train.seq_length and the model's context.
        """
        virtual = count_virtual(self.config.model, self.live_model)
        vocabulary, ids = self.model_config.get_text_config().vocab_size, id_count(self.tokenizer)
        if ids > vocabulary:
            known = f"{len(self.tokenizer)} tokens"
            known += "" if ids == len(self.tokenizer) else f", the largest with the id {ids - 1},"
            raise ConfigError(
                f"the tokenizer has {known} and the model {vocabulary}; give the tokenizer that belongs to the model, "
                "or a model with vocab_size to match"
            )
        return check_length(self.config, self.model_config, virtual, online=self.online)

    @property
    def vocabulary(self) -> int:
        """The number of token ids, from 0 on, that may be sampled and have a probability: those of the tokenizer.

        They are all of the model's if the engine cannot exclude the others, to which a head may be padded.
        """
        own = int(self.model_config.get_text_config().vocab_size)
        return min(own, id_count(self.tokenizer)) if "logit_mask" in self.engine_class.abilities else own

    def fits(self, prompt: int, response: int) -> bool:
        """Return whether the model can read so many tokens: together, or apart with a start token (S-44)."""
        if self.limit is None:
            return True
        return max(prompt, response + 1) <= self.limit if self.apart else prompt + response <= self.limit

    @property
    def what_fits(self) -> str:
        """The length limit in words, for error messages."""
        if self.limit is None:
            return "any number fits"
        each = f"a prompt of {self.limit} and a response of {self.limit - 1} tokens fit"
        return f"at most {each}" if self.apart else f"together at most {self.limit} fit"

    # ------------------------------------------------------------------------------------------------------------ data

    def read_prompts(self, prompts: Prompts) -> list[Row]:
        """Return checked rows of ``prompts``; with an environment, they need not have prompts."""
        prompts = without(prompts, self.config.data.ignore_columns)
        rows = prompt_rows(prompts, needed=self.environment is None)
        self._check_functions(rows)
        if not self.scores_samples and self.metric_fn is None:  # otherwise they get the columns
            self._tell_unread(rows, {"prompt", *SEEDED}, "prompts")
        fitting = self.fit_prompts(rows)
        self._tell_unrendered(rows, "prompt")
        return fitting

    def _check_functions(self, rows: list[Row]) -> None:
        """Raise a `ConfigError` if reward or metric function do not take the keywords that they will be called with."""
        if self.environment is not None or getattr(self.score, "__func__", None) is not TextTrainer.score:
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
            return self.encode.fit(written_prompts(rows, self.tokenizer))
        for index, row in enumerate(rows):
            if is_conversation(prompt := row.get("prompt")):
                self.player.check_template(prompt, row, f"prompt {index}")
        known = [index for index, row in enumerate(rows) if row.get("prompt") is not None]
        texts = written_prompts([rows[index] for index in known], self.tokenizer)
        kept = (
            self.encode.fit([{**row, "index": index} for row, index in zip(texts, known, strict=True)]) if known else []
        )
        fitting = {row["index"] for row in kept} | {*range(len(rows))} - {*known}
        return [row for index, row in enumerate(rows) if index in fitting]

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
        samples = without(samples, self.config.data.ignore_columns)
        if "pairs" in self.inputs:
            rows, cut = self._read_pairs(samples, first)
        else:
            needed = bool({"rewards", "labels"} & {*self.inputs})
            rows = sample_rows(
                samples, rewards, self.tokenizer, rated=needed, first=first, columns=self.columns, ends=self.ends
            )
            rows = labelled(rows, first=first) if "labels" in self.inputs else rows
            cut = sum(self._encode_sample(row, f"sample {index}")[2] for index, row in enumerate(rows, first))
            self.check_samples(rows, first=first)
        own = {"prompt", "chosen", "rejected"} if "pairs" in self.inputs else {"turns", "outputs"}
        if not any("turns" in row or "chosen" in row for row in rows):
            own |= {IDS, *PAIR_COLUMNS}
        rated = [kind.removesuffix("s") for kind in self.inputs if kind in ("rewards", "labels")]
        self._tell_unread(rows, {*own, *rated}, "samples")
        self._tell_unrendered(samples, "sample")
        if cut and self.parallel.is_main:
            log.warning("%d of %d samples were truncated to %s tokens: %s", cut, len(rows), self.limit, self._lost)
        return rows

    def _tell_unrendered(self, given: Iterable[Any], what: str) -> None:
        """Log what the chat template leaves out of the text of conversations; each part once."""
        found: Counter[str] = Counter()
        for index, row in enumerate(given):
            found.update(unrendered(row, self.tokenizer, f"{what} {index}"))
        new = {name: count for name, count in found.items() if f"unrendered {name}" not in self._unread}
        self._unread |= {f"unrendered {name}" for name in new}
        if new and self.parallel.is_main:
            named = ", ".join(f"{name} of {count}" for name, count in new.items())
            log.warning(
                "the chat template does not render everything that the %ss say (%s), so the model does not see it; "
                "use a template that does (tokenizer.chat_template), or remove it",
                what,
                named,
            )

    def _tell_unread(self, rows: Iterable[Row], read: set[str], what: str) -> None:
        """Log which columns of the rows are neither ``read`` nor read by the algorithm; each once."""
        found = dict.fromkeys(name for row in rows for name, value in row.items() if is_given(value))
        known = {*read, *SETTINGS, *self.columns, *self._unread}
        new = [str(name) for name in found if name not in known]
        self._unread |= {*new}
        if new and self.parallel.is_main:
            columns, name = f"column{'s' * (len(new) > 1)} {', '.join(map(repr, new))}", self.config.method.name
            log.warning("%s does not read the %s of the %s", name, columns, what)

    @property
    def _lost(self) -> str:
        """What truncated samples lose, in words."""
        return lost_by_truncation(self.tokenizer, pairs="pairs" in self.inputs, apart=self.apart)

    def _read_pairs(self, samples: Iterable[Any], first: int) -> tuple[list[Row], int]:
        """Return pairs as rows, and how many are truncated; skip those whose sides are equal, and log which.

        Raises:
            EqualSidesError: no other pair is left.
            DataError: a pair cannot be used.
        """
        check_list(samples, "sample")
        rows, cut, equal, index = dict[int, Row](), 0, list[int](), first - 1
        for index, sample in enumerate(samples, first):
            try:
                what = f"sample {index}"
                row = preference_row(sample, what, self.tokenizer, columns=self.columns, ends=self.ends)
                cut += self._encode_pair(row, what)[2]
                rows[index] = row
            except EqualSidesError:
                equal.append(index)
        if index < first:
            raise DataError("samples is empty; give at least one pair")
        if equal:
            self._tell_equal(equal, index + 1 - first)
        if not rows:
            raise EqualSidesError(
                f"all {len(equal)} pairs have the same chosen and rejected output{self._within_limit}; give pairs that "
                "differ"
            )
        for index, row in rows.items() if equal else ():
            self.check_samples([row], first=index)
        if not equal:
            self.check_samples([*rows.values()], first=first)
        return [*rows.values()], cut

    @property
    def _within_limit(self) -> str:
        return "" if self.limit is None else f" within {self.limit} tokens"

    def _tell_equal(self, equal: list[int], count: int) -> None:
        """Log which pairs are skipped, of ``count``."""
        if self.parallel.is_main:
            log.warning(
                "%d of %d pairs are skipped, because chosen and rejected are the same%s: sample%s %s",
                len(equal),
                count,
                self._within_limit,
                "s" if len(equal) > 1 else "",
                ", ".join(map(str, equal[:20])) + (", ..." if len(equal) > 20 else ""),
            )

    def _encode_pair(self, row: Row, what: str = "the sample") -> tuple[EncodedSide, EncodedSide, bool]:
        return encode_pair_within(self.tokenizer, row, self.limit, what, apart=self.apart, ends=self.ends)

    def encode_samples(self, rows: list[Row]) -> Sequences:
        """Encode sample rows as sequences on the device; outputs and their EOS are marked as responses."""
        encoded = [self._encode_sample(row) for row in rows]
        sequences = Sequences.from_rows(
            [ids for ids, _, _ in encoded], [chosen for _, chosen, _ in encoded], pad_id(self.tokenizer)
        )
        return sequences.to(self.accelerator.device)

    def _encode_sample(self, row: Row, what: str = "the sample") -> tuple[list[int], list[bool], bool]:
        """Return the ids, which of them are outputs, and whether the sample was truncated."""
        return encode_within(self.tokenizer, row, self.limit, what, apart=self.apart, ends=self.ends)

    def encode_preferences(self, rows: list[Row]) -> Preferences:
        """Encode rows of pairs as sequences on the device; prompt and output are tokenised as one text."""
        pairs, fill = [self._encode_pair(row) for row in rows], pad_id(self.tokenizer)
        chosen, rejected = (
            Sequences.from_rows([ids for ids, _ in side], [mask for _, mask in side], fill)
            for side in ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        )
        return Preferences(chosen, rejected).to(self.accelerator.device)

    def add_eval_pipeline(self, prompts: Prompts) -> None:
        """Set the prompts of evaluations, after checking that they leave room for responses."""
        self._check_generates("eval_prompts")
        super().add_eval_pipeline(prompts)
        longest = max(len(ids) for ids in self._queries(self.eval_rows))
        for _, overrides in sweep(self.config.rollout.eval_kwargs):
            room = self.settings(**overrides).max_new_tokens
            if not self.fits(longest, room):
                raise DataError(
                    f"the longest evaluation prompt has {longest} tokens, and rollout.eval_kwargs asks for {room} new "
                    f"ones; {self.what_fits}. Lower max_new_tokens there"
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

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler, which turns prompts into rollouts: that of a plugin's ``make_sampler``, or the engine's."""
        self.models.build()  # the sampler reads the model where accelerate has put it
        made: Any = self.hooks.hook.make_sampler(trainer=self)
        name = name_of(self.config.rollout.engine)
        if made is None:
            return EngineSampler(
                self.engine,
                vocabulary=self.vocabulary,
                device=self.accelerator.device,
                skip_special_tokens=self.config.rollout.skip_special_tokens,
            )
        if self._steers:
            raise PluginError(
                f"{self.config.method.name!r} changes logits while sampling (steer), and the sampler of a make_sampler "
                "hook does not; remove the hook"
            )
        if name != "local":
            raise PluginError(
                f"rollout.engine is {name!r}, and a make_sampler hook provides a sampler, which replaces it; remove "
                "the hook, or set rollout.engine to 'local'"
            )
        return generation.checked_sampler(made, self.vocabulary)

    @cached_property
    def engine(self) -> Engine:
        """The generation engine that `rollout.engine` names; it is started when it is first used."""
        self.models.build()  # it has started the engine if the model is divided for good
        return vars(self).get("engine") or self._started_engine()

    def _started_engine(self) -> Engine:
        served = self.served
        with self.models.as_trained():
            made = start(self.config.rollout.engine, served)
        weakref.finalize(self, made.close)  # also at the end of the process
        return made

    @property
    def engine_class(self) -> type[Engine]:
        """The class of the engine."""
        return engine_class(self.config.rollout.engine)

    @property
    def served(self) -> ServedModel:
        """The model that an engine generates with."""
        return ServedModel(
            self.unwrapped.model,
            self.tokenizer,
            eos_ids(self.unwrapped.model, self.tokenizer),
            limit=self.limit,
            mixed_precision=self.accelerator.mixed_precision,
            options={
                "logit_mask": self.logit_mask,
                "skip_special_tokens": self.config.rollout.skip_special_tokens,
                "head_alone": getattr(self.unwrapped, "head_alone", False),
                "hidden": getattr(self.unwrapped, "value_head", None) is not None
                and getattr(self.unwrapped, "critic", None) is None,
                "beside_training": self.ahead is not None,
                **({"steer": self.steer} if self._steers else {}),
            },
            process=self.parallel.rank,
            processes=self.parallel.world,
            divided=self.sharding.stays_divided,
        )

    def core_sampler(self) -> Sampler:
        """Return trainkit's sampler of this run's model, also for a ``make_sampler`` hook to build on."""
        self.models.build()
        return self.served.sampler()

    def _check_engine(self) -> None:
        """Raise a `ConfigError` if the run needs something of its engine that the engine cannot do."""
        entry = self.config.rollout.engine
        name, needed, engine = name_of(entry), dict[Ability, str](), self.engine_class
        if self.apart:
            needed["encoder_decoder"] = f"generate with a model of type {self.model_config.model_type!r}"
        if self.logit_mask is not None:
            needed["logit_mask"] = "obey the run's logit_mask"
        if self._steers:
            needed["steer"] = f"sample from logits that {self.config.method.name!r} changes (steer)"
        for ability, what in needed.items():
            if ability not in engine.abilities:
                raise ConfigError(f"the engine {name!r} cannot {what}; set rollout.engine to 'local'")
        engine.check(None if isinstance(entry, str) else entry, self.parallel.world)

    @property
    def _steers(self) -> bool:
        return getattr(self.steer, "__func__", None) is not TextTrainer.steer

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
        rollouts = self._sample(rows, self.settings(**overrides), "train", self._seeds(rows, "train", self._seen))
        self._rollouts.append(replace(rollouts, hidden=None))  # kept for the hooks, longer than the experience
        if rollouts.turns is not None and rollouts.failed is not None:
            turns = torch.tensor([float(len(turns)) for turns in rollouts.turns])
            self._sampling.playing += self.player.seconds
            self.record({"environment/turns": m.Mean.of(turns), "environment/failures": m.Mean.of(rollouts.failed)})
        return rollouts

    def _begin_sampling(self, parts: list[list[Row]]) -> None:
        """Send the requests of several calls of `sample` to an engine that can answer them at the same time.

        Nothing is sent if the requests are not known before the calls: those of episodes, and of algorithms with a
        sampling of their own.
        """
        usual = {name: getattr(TextTrainer, name) for name in ("sample", "_sample", "_respond", "_seeds")}
        changed = any(getattr(type(self), name) is not method for name, method in usual.items())
        sampler = self.sampler
        if len(parts) < 2 or self.environment is not None or changed or not isinstance(sampler, EngineSampler):
            return
        if not sampler.engine.own_copy:
            return
        self._use_weights(sampler)
        seen, settings = Counter(self._seen), self.settings()
        for rows in parts:
            seeds = [turn_seed(seed, 0) for seed in self._seeds(rows, "train", seen)]
            sampler.begin(Request(self._queries(rows), seeds, settings, "train"))

    def _use_weights(self, sampler: EngineSampler) -> None:
        """Load the weights of the collection that is sampled into the engine, or else those of this moment."""
        snapshot = self._sampling.weights
        sampler.use(self.weights if snapshot is None else snapshot)

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
            replace(rollouts, rows=[self._numbered(row) for row in rollouts.rows]),
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

    @cached_property
    def player(self) -> Player:
        """What plays episodes with the environment."""
        assert self.environment is not None, "only with an environment"
        rollout = self.config.rollout
        limits = [limit for limit in (self.limit, rollout.max_episode_tokens) if limit is not None]
        return Player(
            self.environment,
            self.tokenizer,
            self.encode,
            self.config.environment,
            max_turns=rollout.max_turns,
            max_tokens=min(limits, default=None),
            skip_special_tokens=rollout.skip_special_tokens,
        )

    def _queries(self, rows: list[Row]) -> list[list[int]]:
        """Return the prompts' token ids; none for a row whose environment gives the prompt."""
        read = [tuple(id(row.get(name)) for name in ("prompt", *SETTINGS)) for row in rows]  # the same for a group
        different = {key: row for key, row in zip(read, rows, strict=True) if row.get("prompt") is not None}
        written = written_prompts([*different.values()], self.tokenizer)
        ids = dict(zip(different, [self.encode(row["prompt"]) for row in written], strict=True))
        return [[*ids.get(key, ())] for key in read]

    def _seeds(self, rows: list[Row], purpose: Purpose, seen: Seen | None = None) -> list[int]:
        return response_seeds(self.config.train.seed, purpose, rows, self._queries(rows), seen)

    def _sample(self, rows: list[Row], settings: SamplingConfig, purpose: Purpose, seeds: Sequence[int]) -> Rollouts:
        """Sample a response to each row, or play an episode, for ``purpose``; ``seeds`` are those of the responses."""
        if self.environment is None:
            return self._respond(rows, self._queries(rows), settings, purpose, [turn_seed(seed, 0) for seed in seeds])

        def sample(rows: list[Row], queries: list[list[int]], settings: SamplingConfig, seeds: list[int]) -> Rollouts:
            return self._respond(rows, queries, settings, purpose, seeds)

        own = episode_seeds(self.config.train.seed, purpose, rows, self._queries(rows))
        rows = [{**self._numbered(row), "episode_seed": seed} for row, seed in zip(rows, own, strict=True)]
        eos = [*eos_ids(self.unwrapped.model, self.tokenizer), *settings.stop_token_ids]
        return self.player(rows, settings, seeds, sample, eos).to(self.accelerator.device)

    def _numbered(self, row: Row) -> Row:
        """Return a row without its index if prompts were dropped: it is then not the index in the user's list."""
        if PLACE not in row or self.config.rollout.overlong_prompts != "drop":
            return row
        return {**row, PLACE: row[PLACE]._replace(row=None)}

    def fill_store(self) -> None:
        """Fill the store with one collection; log a warning if all of its episodes failed."""
        super().fill_store()
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

    def _respond(
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
        if not self.fits(longest, settings.max_new_tokens):
            raise DataError(
                f"a prompt of {longest} tokens and max_new_tokens {settings.max_new_tokens} do not fit into "
                f"{self.limit} tokens{' each' if self.apart else ''}, the model's context or train.seq_length; lower "
                "max_new_tokens or shorten the prompt"
            )
        sampler = sampler or self._ready_sampler()
        with self.accelerator.autocast():
            rollouts = sampler(rows, queries, settings, seeds, purpose)
        return rollouts.to(self.accelerator.device)

    def _reference_sampler(self) -> Sampler:
        """Return trainkit's sampler of the reference."""
        if self.sharding.stays_divided:
            raise ConfigError("the reference is divided among the processes, and none can sample from it alone")
        return replace(self.served, model=self.reference.policy.model).sampler()

    def _ready_sampler(self) -> Sampler:
        """Return the sampler, with the weights that it has to sample with."""
        sampler = self.sampler
        if self._sampling.weights is None:  # otherwise the policy is trained at the same time
            self.unwrapped.eval()
            if self.ahead is not None:  # the engine gets newer weights when their collections are complete
                self.ahead.wait()
        if isinstance(sampler, EngineSampler):
            self._use_weights(sampler)
        return sampler

    @contextmanager
    def _sampling_model(self) -> Iterator[None]:
        """Let every process sample inside the block: give its engine the weights, or gather the model."""
        self.models.build()
        with nullcontext() if self._samples_apart else super()._sampling_model():
            self._ready_sampler()  # all processes together, also one that samples nothing
            yield

    @property
    def _samples_apart(self) -> bool:
        """Whether responses are sampled by engines that have copies of a model that stays divided."""
        if not self.sharding.stays_divided or not self.engine_class.own_copy or self._steers:  # with the trained heads
            return False
        return isinstance(self.sampler, EngineSampler)

    @property
    def _copies_model(self) -> bool:
        """Whether every process makes a copy of the model at the start: that of its engine."""
        return self.generates and self.engine_class.own_copy

    def _before_dividing(self, reference: Any) -> None:
        """Do what needs whole models: start the engine, which copies the model."""
        super()._before_dividing(reference)
        if self._copies_model:
            vars(self)["engine"] = self._started_engine()

    @property
    def weights(self) -> Weights:
        """The weights of the language model as they are now."""
        model = self.unwrapped.model
        changes = sum(tensor._version for tensor in (*model.parameters(), *model.buffers()))
        return Weights(self.progress.step, lambda: self._lent(saving.trained(model)), changes)

    def _lent(self, tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors for an engine, which may keep them; of divided ones, gathered copies one by one."""
        if not self.sharding.divides:
            return tensors.items()
        return ((name, whole_tensor(tensor.detach()).to("cpu", copy=True)) for name, tensor in tensors.items())

    # ----------------------------------------------------------------------------------------------------- by the user

    def settings(self, **overrides: Any) -> SamplingConfig:
        """Return the rollout's sampling settings with ``overrides``.

        A stop string that is a special token is a stop token too, because decoded text may not have it.

        Raises:
            ConfigError: a setting does not exist, or its value is not allowed.
        """
        found = generation.settings(self.config, overrides)
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        for stop in found.stop_sequences if self.config.rollout.skip_special_tokens else ():
            if stop not in special and (inside := [token for token in special if token in stop]):
                raise ConfigError(
                    f"sampling settings: the stop string {stop!r} holds the special token {inside[0]!r}, and the text "
                    f"of responses has none; give {inside[0]!r} alone, or set rollout.skip_special_tokens to false"
                )
        if stops := [special[stop] for stop in found.stop_sequences if stop in special]:
            found = found.model_copy(update={"stop_token_ids": [*dict.fromkeys([*found.stop_token_ids, *stops])]})
        vocabulary = self.model_config.get_text_config().vocab_size
        if outside := [token for token in found.stop_token_ids if token >= vocabulary]:
            raise ConfigError(
                f"sampling settings: stop_token_ids holds {outside[0]}, and the model has {vocabulary} tokens; remove "
                "it. For responses of a fixed length, set min_new_tokens to max_new_tokens"
            )
        return found

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
        seeds = [turn_seed(seed, 0) for seed in self._seeds(rows, "generate")]
        with self.recorder.discarding(), self._sampling_model():
            sampler = self._reference_sampler() if reference else None
            rollouts = self._respond(rows, self._queries(rows), settings, "generate", seeds, sampler)
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
        with self.recorder.discarding(), self._sampling_model():
            return choose_best(self, rows, settings, self._seeds(rows, "generate"), n, keep, reward_fn)

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
        with self.recorder.discarding(), self._sampling_model():
            return self._sample(rows, settings, "generate", self._seeds(rows, "generate"))

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
