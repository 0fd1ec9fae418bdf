"""The loop for language models: tokenizer, sampler, reference, generation, evaluation and export."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainkit import metrics as m
from trainkit.config import EnvironmentConfig, MethodConfig, SamplingConfig, TRLConfig, sweep
from trainkit.data import (
    Batch,
    Preferences,
    PromptEncoder,
    Prompts,
    Rollouts,
    Row,
    Sequences,
    is_conversation,
    labelled,
    preference_rows,
    prompt_rows,
    sample_rows,
    written_prompts,
)
from trainkit.data.pipeline import EncodedSide, encode_apart, encode_pair, encode_pair_apart, encode_sample, one_output
from trainkit.errors import ConfigError, DataError, PluginError, RegistryError
from trainkit.functional import per_response, place_scores
from trainkit.models import (
    Frozen,
    Policy,
    Reference,
    TokenOutputs,
    context_length,
    load_model,
    load_tokenizer,
    make_policy,
)
from trainkit.models.adapters import HEADS, has_adapter, has_score_head, save_model
from trainkit.models.loading import (
    check_frozen,
    check_trainable,
    eos_ids,
    load_frozen,
    load_frozen_config,
    load_model_config,
    name_eos,
    pad_id,
)
from trainkit.rollouts import (
    EnvironmentMaker,
    Player,
    Purpose,
    Sampler,
    check_maker,
    check_scores,
    check_template,
    make_sampler,
    score,
)
from trainkit.runs import run
from trainkit.seeding import PLACE, Seen, global_rng, placed, response_seeds, turn_seed
from trainkit.trainer import dynamic, generation
from trainkit.trainer.evaluation import on_prompts
from trainkit.trainer.loop import AcceleratedLoop
from trainkit.trainer.returns import checked_batch

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)

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
        config = self.config
        self.environment = None if environment is None else check_maker(environment)
        self._check_environment()
        if self.online and config.rollout.temperature == 0:
            raise ConfigError(
                "rollout.temperature is 0: greedy responses have no distribution to learn on. Give a temperature > 0; "
                "for greedy evaluation set rollout.eval_kwargs.temperature to 0"
            )
        if tokenizer is not None and config.tokenizer.tokenizer_path is not None:
            raise ConfigError(
                f"a tokenizer is given, and tokenizer.tokenizer_path is {config.tokenizer.tokenizer_path!r}; "
                "give one of the two"
            )
        self.tokenizer = load_tokenizer(config, tokenizer)
        self.model_config = model.config if model is not None else load_model_config(config.model)
        check_trainable(config.model, self.model_config, live=model is not None)
        self.apart = bool(self.model_config.is_encoder_decoder)
        """Whether the model reads prompt and response separately, each with its own length limit."""
        if self.apart and not self.encoder_decoders:
            raise ConfigError(
                f"a model of type {self.model_config.model_type!r} is an encoder-decoder, and {config.method.name!r} "
                "trains none; give a model that reads prompt and response as one text"
            )
        refills = type(config.rollout).model_fields["max_refills"].default
        if config.rollout.max_refills != refills and not self._keeps:
            raise ConfigError(
                f"rollout.max_refills is {config.rollout.max_refills}, and {config.method.name!r} trains on everything "
                "that it samples; remove it"
            )
        self.limit = self._length_limit()
        budget = self.limit if self.limit is None or self.apart else self.limit - config.rollout.max_new_tokens
        self.encode = PromptEncoder(self.tokenizer, budget, config.rollout.overlong_prompts, ends=self.apart)
        if self.environment is not None and self.apart:
            raise ConfigError(
                f"a model of type {self.model_config.model_type!r} is an encoder-decoder, which reads one prompt and "
                "writes one output; environments of several turns need a model that reads all of it as one text"
            )
        if (chosen := self.chosen_reference) is not None:
            self._freeze(chosen, "model.reference_path" if isinstance(chosen, str | Mapping) else "reference")

    # ------------------------------------------------------------------------------------------------ construction

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
            raise ConfigError(f"{', '.join(given)} is set, and there is no environment; give one, or remove it")

    def _length_limit(self) -> int | None:
        """Return the largest number of tokens of prompt and response together, or of each if they are read separately.

        It is the smaller of train.seq_length and the model's context.
        """
        context, asked = context_length(self.model_config), self.config.train.seq_length
        if context and asked and asked > context:
            raise ConfigError(f"train.seq_length is {asked}; the model attends to at most {context} tokens")
        vocabulary = self.model_config.get_text_config().vocab_size
        if len(self.tokenizer) > vocabulary:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens and the model {vocabulary}; give the tokenizer that "
                "belongs to the model, or a model with vocab_size to match"
            )
        limit, room = asked or context, self.config.rollout.max_new_tokens
        if limit and self.online and room >= limit:
            what = "the decoder's start token" if self.apart else "a prompt"
            raise ConfigError(
                f"rollout.max_new_tokens is {room}, which leaves no room for {what} within {limit} tokens; lower it"
            )
        return limit

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

    @cached_property
    def unwrapped(self) -> Any:
        """The policy itself, without the wrapper of accelerate."""
        policy, own = super().unwrapped, getattr(self.live_model, "v_head", None)
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
        return policy

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
        return Reference(model)

    def _load_reference(self) -> Frozen:
        return self.frozen_models[0]

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
            ConfigError: the model cannot be loaded, or does not fit the trained one: another vocabulary, a shorter
                context, or only one of them is an encoder-decoder.
        """
        return self._freeze(path_or_model, "frozen()")

    def _freeze(self, source: Any, key: str) -> Frozen:
        """Check the second model that ``source`` is or names, and return it, to be loaded later."""
        check_frozen(self.model_config, load_frozen_config(self.config.model, source, key), key, self.limit)
        made = Frozen(partial(self._load_frozen, source, key, len(self.frozen_models)))
        self.frozen_models.append(made)
        if "_prepared" in vars(self):
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
        model.to(device)
        if not isinstance(source, str | Mapping):
            self._make_equal(model)  # any other is equal on all processes
        with torch.autocast(device.type, enabled=False):
            if isinstance(own, Policy):
                policy = make_policy(model, temperature=own.temperature, logit_mask=own.logit_mask)
            else:  # of a model that scores text
                policy = make_policy(model)
        run.check_frozen(self, policy)
        return policy

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler, which turns prompts into rollouts: that of a plugin's ``make_sampler``, or trainkit's."""
        self._prepared  # noqa: B018  (the sampler reads the model where accelerate has put it)
        made: Any = self.hooks.hook.make_sampler(trainer=self)
        if made is not None and self._steers:
            raise PluginError(
                f"{self.config.method.name!r} changes logits while sampling (steer), and the sampler of a make_sampler "
                "hook does not; remove the hook"
            )
        return self.core_sampler() if made is None else generation.checked_sampler(made)

    def core_sampler(self) -> Sampler:
        """Return trainkit's sampler of this run's model, also for a ``make_sampler`` hook to build on."""
        self._prepared  # noqa: B018  (as above)
        return make_sampler(
            self.unwrapped.model,
            self.tokenizer,
            logit_mask=self.logit_mask,
            skip_special_tokens=self.config.rollout.skip_special_tokens,
            head_alone=getattr(self.unwrapped, "head_alone", False),
            hidden=getattr(self.unwrapped, "value_head", None) is not None,
            steer=self.steer if self._steers else None,
        )

    @property
    def _steers(self) -> bool:
        return getattr(self.steer, "__func__", None) is not AccelerateRLTrainer.steer

    # -------------------------------------------------------------------------------------------------------- data

    def read_prompts(self, prompts: Prompts) -> list[Row]:
        """Return checked rows of ``prompts``; with an environment, they need not have prompts."""
        return self.fit_prompts(prompt_rows(prompts, needed=self.environment is None))

    def fit_prompts(self, rows: list[Row]) -> list[Row]:
        """Return the prompts, as text, that leave room for a response; with an environment, as they were given."""
        if self.environment is None:
            return self.encode.fit(written_prompts(rows, self.tokenizer))
        self._check_templates(rows)
        known = [index for index, row in enumerate(rows) if row.get("prompt") is not None]
        texts = written_prompts([rows[index] for index in known], self.tokenizer)
        kept = (
            self.encode.fit([{**row, "index": index} for row, index in zip(texts, known, strict=True)]) if known else []
        )
        fitting = {row["index"] for row in kept} | {*range(len(rows))} - {*known}
        return [row for index, row in enumerate(rows) if index in fitting]

    def _check_templates(self, rows: list[Row]) -> None:
        """Check that the chat template keeps earlier messages as they are, for each kind of conversation."""
        proven = set()
        for index, row in enumerate(rows):
            if not is_conversation(prompt := row.get("prompt")):
                continue
            kind = repr(
                ([message.get("role") for message in prompt], row.get("tools"), row.get("chat_template_kwargs"))
            )
            if kind not in proven:
                check_template(self.tokenizer, [dict(message) for message in prompt], row, f"prompt {index}")
                proven.add(kind)

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
        if "pairs" in self.inputs:
            rows = preference_rows(samples, self.tokenizer, first=first)
            cut = sum(cut for _, _, cut in self._encode_pairs(rows, first))
        else:
            rated = bool({"rewards", "labels"} & {*self.inputs})
            rows = sample_rows(samples, rewards, self.tokenizer, rated=rated, first=first)
            rows = labelled(rows, first=first) if "labels" in self.inputs else rows
            cut = 0
            for index, row in enumerate(rows, first):
                cut += self._encode_sample(row, f"sample {index}")[2]
        if cut:
            log.warning("%d of %d samples were truncated to %s tokens", cut, len(rows), self.limit)
        return rows

    def _encode_pairs(self, rows: list[Row], first: int = 0) -> list[tuple[EncodedSide, EncodedSide, bool]]:
        encode = encode_pair_apart if self.apart else encode_pair
        return [encode(self.tokenizer, row, self.limit, f"sample {index}") for index, row in enumerate(rows, first)]

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

    # ----------------------------------------------------------------------------------------- for the algorithm

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
            seconds = torch.tensor(self.player.seconds, dtype=torch.float64)
            self.record(
                {
                    "environment/turns": m.Mean.of(turns),
                    "environment/failures": m.Mean.of(rollouts.failed),
                    "time/environment": m.Mean.of(seconds),
                }
            )
        return rollouts

    def steer(self, logits: Tensor, states: Tensor, settings: SamplingConfig) -> Tensor:
        """Return the logits to sample from instead of ``logits`` [b, V]; override it to change what is sampled.

        ``logits`` include the sampling temperature and the logit mask; ``states`` [b, D] are the hidden states from
        which they are computed; ``settings`` is of the class in the method's `sampling`. The log-probabilities and
        entropies of the rollouts are still those of the model.
        """
        return logits

    @property
    def scores_samples(self) -> bool:
        """Whether what is sampled can be scored: there is a reward function or an environment."""
        return self.reward_fn is not None or self.environment is not None

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores of the reward function [B], or [B, T] if it gives rewards per token.

        With an environment, its rewards [B, T], each at the last token of the output that it rewards, plus the scores.
        An algorithm that learns from prompts alone gets scores of 0.
        """
        device = self.accelerator.device
        if self.reward_fn is None and rollouts.rewards is not None:
            return rollouts.rewards.to(device)
        if self.reward_fn is None:
            assert not self.rewarded, "train() and learn() ensure that there is a reward_fn or an environment"
            return torch.zeros(len(rollouts), device=device)
        scores = score(self.reward_fn, rollouts, self.tokenizer).to(device)
        if rollouts.rewards is None:
            return scores
        return rollouts.rewards.to(device) + place_scores(scores, rollouts.sequences.response_mask)

    def make_experience(self, rows: list[Row]) -> Batch:
        """Sample responses, score them and make experience, as online algorithms do. Offline ones override this."""
        rollouts = self.sample(rows)
        scores = self.score(rollouts)
        self._record_scored(rollouts, scores)
        return self._experience(rollouts, scores)

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
    def _keeps(self) -> bool:
        """Whether the algorithm chooses what it trains on."""
        return getattr(self.keep, "__func__", None) is not AccelerateRLTrainer.keep

    def collect_experience(self) -> int:
        """Push the experience of one collection to the store; return the number of this process's prompts."""
        return dynamic.collect(self) if self._keeps else super().collect_experience()

    def _experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        if isinstance(self.unwrapped, Policy):  # the frozen layers run here, and not again
            rollouts = replace(rollouts, sequences=self.unwrapped.through_trunk(rollouts.sequences))
        return checked_batch(self, "experience", self.experience(rollouts, scores))

    def _record_scored(self, rollouts: Rollouts, scores: Tensor) -> None:
        found: m.Metrics = {
            "rollout/length": m.Mean.of(rollouts.sequences.response_mask.sum(1)),
            "rollout/terminated": m.Mean.of(rollouts.terminated),
        }
        if self.rewarded:
            whole = per_response(scores)
            found |= {"reward/mean": m.Mean.of(whole), "reward/std": m.Std.of(whole)}
        self.record(found)

    def encode_samples(self, rows: list[Row]) -> Sequences:
        """Encode sample rows as sequences on the device; outputs and their EOS are marked as responses."""
        encoded = [self._encode_sample(row) for row in rows]
        sequences = Sequences.from_rows(
            [ids for ids, _, _ in encoded], [chosen for _, chosen, _ in encoded], pad_id(self.tokenizer)
        )
        return sequences.to(self.accelerator.device)

    def _encode_sample(self, row: Row, what: str = "the sample") -> tuple[list[int], list[bool], bool]:
        """Return the ids, which of them are outputs, and whether the sample was truncated."""
        if self.apart:
            return encode_apart(self.tokenizer, *one_output(row, what), self.limit, what)
        ids, chosen = encode_sample(self.tokenizer, row, self.limit, what)
        return ids, chosen, ids[-1] != self.tokenizer.eos_token_id

    def encode_preferences(self, rows: list[Row]) -> Preferences:
        """Encode rows of pairs as sequences on the device; prompt and output are tokenised as one text."""
        pairs, fill = self._encode_pairs(rows), pad_id(self.tokenizer)
        chosen, rejected = (
            Sequences.from_rows([ids for ids, _ in side], [mask for _, mask in side], fill)
            for side in ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        )
        return Preferences(chosen, rejected).to(self.accelerator.device)

    @torch.no_grad()
    def behaviour(self, rollouts: Rollouts) -> TokenOutputs:
        """Return the log-probabilities, entropies and values of ``rollouts`` under the policy that sampled them.

        The sampler has computed them, so the policy is not run again if the sampler's numbers equal the policy's. This
        is checked on the first collection, for which the policy is run: cached keys and values may round differently,
        slightly in float32, and too much at lower precision.
        """
        at, seen, sampler = self.progress, _as_sampled(rollouts, self.unwrapped), type(self.sampler).__qualname__
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

    # -------------------------------------------------------------------------------------- generating, by the user

    def settings(self, **overrides: Any) -> SamplingConfig:
        """Return the rollout's sampling settings with ``overrides``.

        Raises:
            ConfigError: a setting does not exist, or its value is not allowed.
        """
        return generation.settings(self.config, overrides)

    def generate(
        self,
        prompts: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
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
            **overrides: sampling settings over those of ``config.rollout``.

        Raises:
            ConfigError: a setting does not exist, its value is not allowed, or the trained model does not generate.
            DataError: prompts are missing, of another type, or too long.
        """
        self._check_generates("generate()")
        given = generation.prompts_as_rows(prompts, input_ids, attention_mask, self.tokenizer.pad_token_id)
        rows = written_prompts(given, self.tokenizer)
        if self.config.train.resume:
            run.begin(self)  # the random numbers follow from the progress of the resumed run
        rows, settings = placed(rows, self.progress.generated), self.settings(**overrides)
        self.progress.generated += len(rows)
        seeds = [turn_seed(seed, 0) for seed in self._seeds(rows, "generate")]
        with self._discarding_records():
            rollouts = self._respond(rows, self._queries(rows), settings, "generate", seeds)
        return replace(rollouts, rows=[{k: v for k, v in row.items() if k != PLACE} for row in rollouts.rows])

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
            prompts: one prompt or several, as for `generate`; rows without a prompt if the environment gives it. None:
                the evaluation prompts.
            **overrides: sampling settings over those of ``config.rollout``.

        Raises:
            ConfigError: there is no environment, or a setting does not exist or its value is not allowed.
            EpisodeError: the environment failed, or returned something invalid.
        """
        if self.environment is None:
            raise ConfigError("play() needs an environment; give environment= to trainkit.train or to the trainer")
        given = self.eval_rows if prompts is None else generation.prompts_as_rows(prompts, None, None)
        rows, settings = self.read_prompts(given), self.settings(**overrides)
        if self.config.train.resume:
            run.begin(self)  # as in `generate`
        rows = placed(rows, self.progress.generated)
        self.progress.generated += len(rows)
        with self._discarding_records():
            return self._sample(rows, settings, "generate", self._seeds(rows, "generate"))

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
        known = [row for row in rows if row.get("prompt") is not None]
        ids = iter([self.encode(row["prompt"]) for row in written_prompts(known, self.tokenizer)])
        return [[] if row.get("prompt") is None else next(ids) for row in rows]

    def _seeds(self, rows: list[Row], purpose: Purpose, seen: Seen | None = None) -> list[int]:
        return response_seeds(self.config.train.seed, purpose, rows, self._queries(rows), seen)

    def _sample(self, rows: list[Row], settings: SamplingConfig, purpose: Purpose, seeds: Sequence[int]) -> Rollouts:
        """Sample a response to each row, or play an episode, for ``purpose``; ``seeds`` are those of the responses."""
        if self.environment is None:
            return self._respond(rows, self._queries(rows), settings, purpose, [turn_seed(seed, 0) for seed in seeds])

        def sample(rows: list[Row], queries: list[list[int]], settings: SamplingConfig, seeds: list[int]) -> Rollouts:
            return self._respond(rows, queries, settings, purpose, seeds)

        eos = eos_ids(self.unwrapped.model, self.tokenizer)
        return self.player(rows, settings, seeds, sample, eos).to(self.accelerator.device)

    def _respond(
        self,
        rows: list[Row],
        queries: list[list[int]],
        settings: SamplingConfig,
        purpose: Purpose,
        seeds: list[int],
    ) -> Rollouts:
        """Sample a response to each of ``queries`` with the run's sampler; ``seeds`` are those of the turn."""
        longest = max(len(query) for query in queries)
        if not self.fits(longest, settings.max_new_tokens):
            raise DataError(
                f"a prompt of {longest} tokens and max_new_tokens {settings.max_new_tokens} do not fit into "
                f"{self.limit} tokens{' each' if self.apart else ''}, the model's context or train.seq_length; lower "
                "max_new_tokens or shorten the prompt"
            )
        sampler = self.sampler
        self.unwrapped.eval()
        with self.accelerator.autocast():
            rollouts = sampler(rows, queries, settings, seeds, purpose)
        return rollouts.to(self.accelerator.device)

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
                ids that were sampled (S-09).

                ``scores``: a number per response, or a list of numbers per response for rewards per token.
            response_masks: which ids of each response were sampled, 1-D bool tensors; the others, e.g. those of a tool,
                are attended to and not trained on. None: all of them.

        Returns:
            The metrics of this step, averaged over its optimizer steps.

        Raises:
            DataError, RewardError: queries, responses and scores do not fit together.
            TypeError: the number of arguments is that of neither form.
        """
        rollouts, scores = generation.step_arguments(self, arguments, response_masks)
        checked = check_scores(scores, rollouts, "step(scores=...)").to(self.accelerator.device)
        run.begin(self)
        self.store.clear()
        self._rollouts = [rollouts]
        self.progress.epoch, self.progress.position, self.progress.stopped = 0, 0, False
        self.progress.prompts = len(rollouts) // self.samples_per_prompt
        self.unwrapped.eval()
        with torch.no_grad(), self.accelerator.autocast():
            self._record_scored(rollouts, checked)
            self.store.push(self._experience(rollouts, checked))
            self._prepare_store()
        self.progress.samples += len(self.store) * self.accelerator.num_processes
        self.hooks.hook.on_experience(trainer=self, experience=self.store.experience, rollouts=self._rollouts)
        for _ in range(self.passes or 1):
            for batch in self._one_pass():
                self.record(self.update(batch))
                self.hooks.hook.on_step(trainer=self, step=self.progress.step)
        self._next_collection()
        return self._log()

    # ------------------------------------------------------------------------------------- evaluating and exporting

    def evaluation(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Generate responses to the evaluation prompts, score and measure them; see `AcceleratedLoop.evaluation`."""
        return on_prompts(self)

    def save_pretrained(self, directory: str | Path | None = None) -> Path:
        """Export for transformers: base-model weights, config and tokenizer; heads are in a separate file (S-19).

        ``AutoModelForCausalLM.from_pretrained(directory)``, of an encoder-decoder ``AutoModelForSeq2SeqLM``, loads
        a model with equal logits.
        """
        return super().save_pretrained(directory)

    def write_model(self, building: Path, target: Path) -> None:
        """Write model, tokenizer and heads so that transformers loads the model; with an adapter, only the adapter."""
        lacking = name_eos(self.unwrapped.model, self.tokenizer)
        save_model(self.unwrapped.model, building, target)
        if lacking and not any(building.rglob("config.json")):  # an adapter, whose base is elsewhere
            log.warning(
                "%s holds an adapter, and the configuration of its base does not name the tokenizer's EOS: merge them "
                "(trainkit merge), or call generate with eos_token_id=%d",
                target,
                self.tokenizer.eos_token_id,
            )
        self.tokenizer.save_pretrained(building)
        state = self.unwrapped.state_dict()
        if heads := {k: v.contiguous() for k, v in state.items() if not k.startswith("model.")}:
            save_file(heads, building / HEADS)

    def model_card(self) -> dict[str, str]:
        """Return the model card's entries: transformers loads language models and adapters, trainkit the heads."""
        task = {"pipeline_tag": "text-generation"} if self.generates and not self.apart else {}
        library = "peft" if has_adapter(self.unwrapped.model) else "transformers"
        return {"library_name": library, **task, "loading": self._loading()}

    def _loading(self) -> str:
        if not self.generates:
            return "from trainkit.models import RewardModel\n\nreward_fn = RewardModel.from_pretrained(directory)"
        cls = f"AutoModelFor{'Seq2SeqLM' if self.apart else 'CausalLM'}"
        code = (
            f"from transformers import {cls}, AutoTokenizer\n\nmodel = {cls}.from_pretrained(directory)\n"
            "tokenizer = AutoTokenizer.from_pretrained(directory)"
        )
        if getattr(self.unwrapped, "value_head", None) is None:
            return code
        headed = f"{cls}WithValueHead"
        return (
            f"{code}\n\n# with its value head\nfrom trainkit.models import {headed}\n\n"
            f"critic = {headed}.from_pretrained(directory)"
        )


def _as_sampled(rollouts: Rollouts, policy: Any) -> TokenOutputs | None:
    """Return the policy's outputs as the sampler computed them; None if it did not compute all of them."""
    head, sequences = getattr(policy, "value_head", None), rollouts.sequences
    if rollouts.logprobs is None or rollouts.entropy is None:
        return None
    if head is None:
        return TokenOutputs(rollouts.logprobs, entropy=rollouts.entropy)
    if rollouts.hidden is None:
        return None
    return TokenOutputs(
        rollouts.logprobs, sequences.place(head(rollouts.hidden[sequences.response_mask])), rollouts.entropy
    )
