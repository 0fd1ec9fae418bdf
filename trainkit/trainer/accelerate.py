"""The loop for language models: tokenizer, sampler, reference, generation, evaluation and export."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainkit import metrics as m
from trainkit.config import MethodConfig, SamplingConfig, TRLConfig, sweep
from trainkit.data import (
    Batch,
    Preferences,
    PromptEncoder,
    Prompts,
    Rollouts,
    Row,
    Sequences,
    preference_rows,
    sample_rows,
    written_prompts,
)
from trainkit.data.pipeline import EncodedSide, encode_apart, encode_pair, encode_pair_apart, encode_sample, one_output
from trainkit.errors import ConfigError, DataError, PluginError
from trainkit.functional import per_response
from trainkit.models import Policy, Reference, TokenOutputs, context_length, load_model, load_tokenizer, make_policy
from trainkit.models.adapters import HEADS, has_adapter, has_score_head, save_model
from trainkit.models.loading import check_trainable, load_model_config, name_eos, pad_id
from trainkit.rollouts import Purpose, Sampler, check_scores, make_sampler, score
from trainkit.runs import run
from trainkit.seeding import PLACE, Seen, placed, response_seeds, turn_seed
from trainkit.trainer import generation
from trainkit.trainer.evaluation import on_prompts
from trainkit.trainer.loop import AcceleratedLoop

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
            reward_fn: scores samples; see `trainkit.rollouts.rewards.score`.
            metric_fn: measures samples at evaluation; see `trainkit.rollouts.rewards.metrics`.
            logit_mask: bool [V] or [V, V] (row: the previous token), True = allowed; applied when sampling, and when
                training if the algorithm learns from what it sampled.
            stop_sequences: strings that end a response, unless the config gives them.
            callbacks: objects with ``@hookimpl`` methods.
            allow_drift: resume even if settings that affect training differ from those of the checkpoint.

    Raises:
        ConfigError, DataError, PluginError: raised at construction, before a model is loaded.
    """

    sample_format: ClassVar[Literal["completion", "preference"]] = "completion"
    """Format of offline samples: prompts with outputs, or pairs ``{"prompt", "chosen", "rejected"}``."""
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
        **kwargs: Any,
    ) -> None:
        super().__init__(config, model=model, **kwargs)
        config = self.config
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
        self.limit = self._length_limit()
        budget = self.limit if self.limit is None or self.apart else self.limit - config.rollout.max_new_tokens
        self.encode = PromptEncoder(self.tokenizer, budget, config.rollout.overlong_prompts, ends=self.apart)

    # ------------------------------------------------------------------------------------------------ construction

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

    def fit_prompts(self, rows: list[Row]) -> list[Row]:
        """Return the prompts, as text, that leave room for a response."""
        return self.encode.fit(written_prompts(rows, self.tokenizer))

    def default_prompts(self) -> list[Any]:
        """Return the tokenizer's beginning token for each rollout; every response then starts from it."""
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
        if self.sample_format == "preference":
            rows = preference_rows(samples, self.tokenizer, first=first)
            cut = sum(cut for _, _, cut in self._encode_pairs(rows, first))
        else:
            rows = sample_rows(samples, rewards, self.tokenizer, rated="rewards" in self.inputs, first=first)
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
        longest = max(len(self.encode(row["prompt"])) for row in self.eval_rows)
        for _, overrides in sweep(self.config.rollout.eval_kwargs):
            room = self.settings(**overrides).max_new_tokens
            if not self.fits(longest, room):
                raise DataError(
                    f"the longest evaluation prompt has {longest} tokens, and rollout.eval_kwargs asks for {room} new "
                    f"ones; {self.what_fits}. Lower max_new_tokens there"
                )

    # ----------------------------------------------------------------------------------------- for the algorithm

    def sample(self, rows: list[Row], **overrides: Any) -> Rollouts:
        """Sample one response per row for training, at the rollout's settings with ``overrides``.

        The random numbers of a response follow from the run's seed, the row's position in the stream of prompts and
        the number of the response among those to this row in the collection (`trainkit.seeding.response_seeds`).

        Args:
            rows: those that `make_experience` gets, or copies of them (``{**row, "prompt": ...}``).
            **overrides: sampling settings over those of ``config.rollout``, e.g. ``temperature=0``.
        """
        rollouts = self._sample(rows, self.settings(**overrides), "train", self._seeds(rows, "train", self._seen))
        self._rollouts.append(replace(rollouts, hidden=None))  # kept for the hooks, longer than the experience
        return rollouts

    def steer(self, logits: Tensor, states: Tensor, settings: SamplingConfig) -> Tensor:
        """Return the logits to sample from instead of ``logits`` [b, V]; override it to change what is sampled.

        ``logits`` include the sampling temperature and the logit mask; ``states`` [b, D] are the hidden states from
        which they are computed; ``settings`` is of the class in the method's `sampling`. The log-probabilities and
        entropies of the rollouts are still those of the model.
        """
        return logits

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the reward function's scores [B], or [B, T] if it gives rewards per token."""
        assert self.reward_fn is not None, "train() and learn() ensure that an online trainer has a reward_fn"
        return score(self.reward_fn, rollouts, self.tokenizer).to(self.accelerator.device)

    def make_experience(self, rows: list[Row]) -> Batch:
        """Sample responses, score them and make experience, as online algorithms do. Offline ones override this."""
        rollouts = self.sample(rows)
        return self._experience(rollouts, self.score(rollouts))

    def _experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        whole = per_response(scores)
        self.record(
            {
                "reward/mean": m.Mean.of(whole),
                "reward/std": m.Std.of(whole),
                "rollout/length": m.Mean.of(rollouts.sequences.response_mask.sum(1)),
                "rollout/terminated": m.Mean.of(rollouts.terminated),
            }
        )
        if isinstance(self.unwrapped, Policy):  # the frozen layers run here, and not again
            rollouts = replace(rollouts, sequences=self.unwrapped.through_trunk(rollouts.sequences))
        return self.experience(rollouts, scores)

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
        with self._discarding_records():
            rollouts = self._sample(rows, settings, "generate", self._seeds(rows, "generate"))
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

    def _seeds(self, rows: list[Row], purpose: Purpose, seen: Seen | None = None) -> list[int]:
        queries = [self.encode(row["prompt"]) for row in rows]
        return response_seeds(self.config.train.seed, purpose, rows, queries, seen)

    def _sample(self, rows: list[Row], settings: SamplingConfig, purpose: Purpose, seeds: Sequence[int]) -> Rollouts:
        """Sample rollouts for ``purpose``; ``seeds`` are those of the responses."""
        queries = [self.encode(row["prompt"]) for row in rows]
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
            rollouts = sampler(rows, queries, settings, [turn_seed(seed, 0) for seed in seeds], purpose)
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

    def step(self, queries: Sequence[Any], responses: Sequence[Any], scores: Any) -> dict[str, float]:
        """Learn from responses that you scored yourself: one collection with all its passes and optimizer steps.

        Args:
            queries: prompts, as text or token ids, one per response.
            responses: the sampled token ids, 1-D tensors, as `generate` gave them; never text, which need not
                encode to the ids that were sampled (S-09).
            scores: a number per response, or a list of numbers per response for rewards per token.

        Returns:
            The metrics of this step, averaged over its optimizer steps.

        Raises:
            DataError, RewardError: queries, responses and scores do not fit together.
        """
        rollouts = generation.given_rollouts(self, queries, responses)
        checked = check_scores(scores, rollouts, "step(scores=...)").to(self.accelerator.device)
        run.begin(self)
        self.store.clear()
        self._rollouts = [rollouts]
        self.progress.epoch, self.progress.position, self.progress.stopped = 0, 0, False
        self.progress.prompts = len(rollouts) // self.samples_per_prompt
        self.unwrapped.eval()
        with torch.no_grad(), self.accelerator.autocast():
            self.store.push(self._experience(rollouts, checked))
            self.store.experience = self.prepare_experience(self.store.experience)
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
