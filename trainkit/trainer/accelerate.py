"""The loop for language models: policy, reference, experience from what is sampled, evaluation and export."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainkit import metrics as m
from trainkit.config import MethodConfig, TRLConfig
from trainkit.data import (
    Batch,
    Rollouts,
    Row,
    Sequences,
)
from trainkit.errors import ConfigError, RegistryError
from trainkit.functional import (
    effective_sample_size,
    exact,
    importance_ratios,
    masked_ratios,
    masked_sum,
    per_response,
    repetition,
    truncated_ratios,
)
from trainkit.models import (
    Frozen,
    Policy,
    Reference,
    Scorer,
    TokenOutputs,
    load_model,
    make_policy,
)
from trainkit.models.adapters import BASE, HEADS, bare, has_adapter, has_score_head, save_model
from trainkit.models.loading import (
    check_frozen,
    check_tokens,
    check_trains_weights,
    count_virtual,
    load_frozen,
    load_frozen_config,
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
from trainkit.rollouts import EngineSampler
from trainkit.rollouts.replica import PRECISIONS
from trainkit.runs import run
from trainkit.runs.health import Health
from trainkit.seeding import global_rng
from trainkit.trainer import collecting, generation, sharing, stored
from trainkit.trainer.evaluation import on_prompts
from trainkit.trainer.loop import AcceleratedLoop
from trainkit.trainer.returns import checked_batch
from trainkit.trainer.text import TextTrainer

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)

SAMPLER_TOLERANCE = 1e-4
"""Largest difference between log-probabilities of sampler and policy that counts as rounding in float32."""


class AccelerateRLTrainer(TextTrainer[M]):
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

    def __init__(self, config: TRLConfig[M], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        rollout = self.config.rollout
        if rollout.max_refills != type(rollout).model_fields["max_refills"].default and not self.keeps:
            raise ConfigError(
                f"rollout.max_refills is {rollout.max_refills}, and {config.method.name!r} trains on everything that "
                "it samples; remove it"
            )
        sharing.check(self)
        if self.config.rollout.staleness:
            self.ahead = collecting.Ahead(self)
        if (chosen := self.chosen_reference) is not None:
            self._freeze(chosen, "model.reference_path" if isinstance(chosen, str | Mapping) else "reference")
        self._equal_scores_told = self._drops_told = False
        self.checks_memory = True
        """Whether it is still open if the output of frozen layers of an offline collection fits into memory."""

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
            policy.vocabulary = self.vocabulary
            # offline, the policy itself has none: it is applied at evaluations alone
            check_logit_mask(self.logit_mask, policy.model, self.vocabulary)
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
        if not self.sharding.stays_divided or self.models.built:  # otherwise, when it is divided
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

    # ----------------------------------------------------------------------------------------- for the algorithm

    def make_experience(self, rows: list[Row]) -> Batch:
        """Sample responses, score them and make experience, as online algorithms do. Offline ones override this."""
        return self._experience(*self.sample_and_score(rows))

    def _begin_sampling(self, parts: list[list[Row]]) -> None:
        if type(self).sample_and_score is AccelerateRLTrainer.sample_and_score:
            super()._begin_sampling(parts)

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
    def stays_divided(self) -> bool:
        """Whether the model is divided among the processes also while experience is made."""
        usual = self.scores_rollouts and type(self).sample_and_score is AccelerateRLTrainer.sample_and_score
        return super().stays_divided or (usual and self._samples_apart)

    def _experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        if isinstance(self.unwrapped, Policy):  # the frozen layers run here, and not again
            rollouts = replace(rollouts, sequences=self.unwrapped.through_trunk(rollouts.sequences))
        return checked_batch(self, "experience", self.experience(rollouts, scores))

    def fill_store(self) -> None:
        """Fill the store with one collection of experience; log once per run if equal scores teach nothing."""
        super().fill_store()
        self.collected_rows = 0
        if not self.rewarded:
            return
        scores = torch.cat([torch.zeros(0, device=self.accelerator.device), *self._collection.scores])
        if self.samples_per_prompt > 1:
            self.record({"reward/equal_in_group": m.Mean.of(~self._differ(scores))})
        if not self._equal_scores_told:
            self._tell_equal_scores(scores)

    def _differ(self, scores: Tensor) -> Tensor:
        """Return for each prompt whether the scores of its responses differ. [B] -> bool [prompts]."""
        groups = scores.view(len(scores) // self.samples_per_prompt, self.samples_per_prompt)
        return (groups != groups[:, :1]).any(1)

    def _tell_equal_scores(self, scores: Tensor) -> None:
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
        self._equal_scores_told = True
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

        If they were sampled with older weights, `rollout.correction` is set, or the model `stays_divided`, the numbers
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
        if self.correction != "none" or self.ahead is not None or self.stays_divided:
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
                "rollout/kept_mass": m.Mean(exact(masked_sum(weights, mask)), exact(masked_sum(ratios, mask))),
                "rollout/effective_sample_size": m.Mean(exact(size), exact(mask.sum())),
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
        return not self.config.rollout.staleness and self.engine_class.exact and not self.stays_divided

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
                ids that were sampled (S-09).

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
