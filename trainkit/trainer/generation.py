"""What generating needs besides the sampler: reading prompts, responses and settings, checks, and decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from trainkit.config import RolloutConfig, SamplingConfig, TRLConfig
from trainkit.data import Rollouts, Row, is_conversation
from trainkit.data.pipeline import as_ids
from trainkit.errors import ConfigError, DataError, PluginError, RewardError, describe
from trainkit.models.loading import eos_ids, pad_id
from trainkit.rollouts import Purpose, Sampler, assemble, check_scores, cut_at_stop, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainkit.trainer.accelerate import AccelerateRLTrainer


def settings(config: TRLConfig[Any], overrides: Mapping[str, Any]) -> SamplingConfig:
    """Return the rollout's sampling settings with ``overrides``, and the settings that only the algorithm has.

    Raises:
        ConfigError: a setting does not exist, or its value is not allowed.
    """
    kind: type[SamplingConfig] = config.method.sampling
    defaults = {name: getattr(config.rollout, name) for name in SamplingConfig.model_fields}
    try:
        return kind(**{**defaults, **overrides})
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, f['loc']))}: {f['msg'].removeprefix('Input ')} (given {describe(f['input'])})"
            for f in error.errors()
        )
        raise ConfigError(f"sampling settings: {faults}. Known: {', '.join(kind.model_fields)}") from error


def prompts_as_rows(
    prompts: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    pad: int | None = None,
    call: str = "generate()",
) -> list[Row]:
    """Return rows from one prompt or several (text, dicts or ids), or from what a tokenizer returns.

    Raises:
        DataError: both or neither are given, there are no prompts, or ids without a mask begin or end with ``pad``;
            the message names ``call``.
    """
    if (prompts is None) == (input_ids is None):
        raise DataError("generate() takes prompts, or input_ids (with their attention_mask); give one of the two")
    if input_ids is not None:
        return _ids_as_rows(input_ids, attention_mask, pad)
    one = isinstance(prompts, str | Mapping) or (isinstance(prompts, Tensor) and prompts.dim() == 1)
    if one or (is_conversation(prompts) and all("role" in message for message in prompts)):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise DataError(f"{call} takes one prompt or a list of prompts; given {describe(prompts)}")
    rows = [dict(p) if isinstance(p, Mapping) else {"prompt": p} for p in prompts]
    if not rows:
        raise DataError("prompts is empty; give at least one prompt")
    return rows


def _ids_as_rows(input_ids: Tensor, attention_mask: Tensor | None, pad: int | None) -> list[Row]:
    """Return a row for each prompt of ``input_ids`` [B, T], without the positions that ``attention_mask`` excludes."""
    if attention_mask is None and pad is not None:
        _refuse_padding(input_ids, pad)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return [{"prompt": ids[keep.bool()]} for ids, keep in zip(input_ids, real, strict=True)]


def _refuse_padding(input_ids: Tensor, pad: int) -> None:
    """Raise a `DataError` if rows begin or end with padding: ids alone do not show which tokens are real."""
    padded = ((input_ids[:, 0] == pad) | (input_ids[:, -1] == pad)).nonzero().flatten().tolist()
    if padded:
        raise DataError(
            f"row {padded[0]} of input_ids begins or ends with the padding id {pad}, and no attention_mask says "
            "whether that is padding or part of the prompt; give attention_mask, as the tokenizer returns it"
        )


def checked_sampler(sampled_by: Any, vocabulary: int) -> Sampler:
    """Wrap what a hook's ``make_sampler`` returned in a sampler that checks its rollouts: ids are < ``vocabulary``.

    Raises:
        PluginError: it cannot be called. The wrapper raises one if the rollouts are not those that were asked for.
    """
    if not callable(sampled_by):
        raise PluginError(
            f"make_sampler returned {describe(sampled_by)}, which cannot be called; return a function (rows, queries, "
            "settings, seeds, purpose) -> Rollouts, or None to leave sampling to trainkit"
        )

    def sampler(
        rows: list[Row],
        queries: list[list[int]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        purpose: Purpose,
        **images: Any,
    ) -> Rollouts:
        rollouts: Rollouts = sampled_by(rows, queries, settings, seeds, purpose, **images)
        if fault := _fault(rollouts, queries, vocabulary):
            raise PluginError(
                f"the sampler {describe(sampled_by)} of a make_sampler hook was asked for {len(queries)} "
                f"responses, and {fault}; trainkit.rollouts.sampler.assemble makes rollouts from token ids"
            )
        return rollouts

    return sampler


def _fault(rollouts: Any, queries: list[list[int]], vocabulary: int) -> str:
    """Return what is wrong with rollouts for ``queries``; empty if nothing is."""
    if not isinstance(rollouts, Rollouts):
        return f"returned {describe(rollouts)} instead of Rollouts"
    if [query.tolist() for query in rollouts.queries] != queries:
        return f"returned {len(rollouts.sequences)} whose prompts are not those that were asked for, in their order"
    if not bool(rollouts.sequences.response_mask.any(1).all()):
        return "returned a response without tokens"
    sampled = rollouts.sequences.input_ids[rollouts.sequences.response_mask]
    if not bool(((sampled >= 0) & (sampled < vocabulary)).all()):
        return f"returned ids outside the vocabulary of {vocabulary}"
    for name in ("terminated", "prompts", "outputs"):
        if len(column := getattr(rollouts, name)) != len(queries):
            return f"returned {len(column)} in the field {name!r}"
    shape = rollouts.sequences.response_mask.shape
    for name in ("logprobs", "entropy", "hidden"):
        tensor = getattr(rollouts, name)
        if tensor is not None and tensor.shape[:2] != shape:
            return f"returned {name!r} of shape {tuple(tensor.shape)} for sequences of shape {tuple(shape)}"
    return ""


STEP_FORMS = "step(rollouts, scores) or step(queries, responses, scores, response_masks=None)"


def step_arguments(
    trainer: AccelerateRLTrainer[Any], arguments: tuple[Any, ...], response_masks: Sequence[Any] | None
) -> tuple[Rollouts, Any]:
    """Return the rollouts and scores that were given to ``trainer.step`` in one of its two forms.

    Raises:
        TypeError: the number of arguments is that of neither form.
        DataError: what is given cannot be trained on.
    """
    sampled = bool(arguments) and isinstance(arguments[0], Rollouts)
    masks = [] if response_masks is None else [response_masks]
    if len(arguments) + len(masks) not in ((2,) if sampled else (3, 4)) or (sampled and masks):
        first = f"of which the first is {describe(arguments[0])}" if arguments else "and needs two at least"
        raise TypeError(f"step() got {len(arguments) + len(masks)} arguments, {first}; call {STEP_FORMS}")
    if not sampled:
        queries, responses, scores, mask = (*arguments, *masks, None)[:4]
        if mask is None and getattr(trainer, "environment", None) is not None:
            raise DataError(
                "step(queries, responses, scores) would train on episodes without the environment's observations, "
                "which are not among the responses; call step(rollouts, scores) with what play() returned, or give "
                "response_masks, which say what the model sampled, and responses with the observations"
            )
        return given_rollouts(trainer, queries, responses, mask), scores
    rollouts, scores = arguments
    if not len(rollouts):
        raise DataError("there are no rollouts; give at least one")
    prompts = [query.tolist() for query in rollouts.queries]
    _check_groups(trainer, prompts)
    return rollouts.to(trainer.accelerator.device), scores


def given_scores(scores: Any, rollouts: Rollouts) -> Tensor:
    """Return the scores that were given to ``step``, [B] or [B, T].

    Raises:
        RewardError: they are not of the form that reward functions return, nor aligned with the sequences [B, T]; or a
            number is not finite, or belongs to a token that is no response token.
    """
    mask = rollouts.sequences.response_mask
    if not isinstance(scores, Tensor) or scores.shape != mask.shape:
        return check_scores(scores, rollouts, "step(scores=...)").to(mask.device)
    rewards = scores.to(mask.device, torch.float32)
    for wrong, why in ((~rewards.isfinite(), "is not finite"), ((rewards != 0) & ~mask, "is at no response token")):
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise RewardError(
                f"step(scores=...) is a tensor of shape {tuple(scores.shape)}, rewards per token, and the reward "
                f"{float(rewards[row, column]):g} of row {row}, token {column}, {why}; give finite rewards where "
                "rollouts.sequences.response_mask is true, and 0 elsewhere"
            )
    return rewards


def given_rollouts(
    trainer: AccelerateRLTrainer[Any],
    queries: Sequence[Any],
    responses: Sequence[Any],
    masks: Sequence[Any] | None = None,
) -> Rollouts:
    """Return rollouts of prompts and responses that the user gives; ``masks`` are those of ``step``.

    Raises:
        DataError: there is not one response per query, a group holds responses to different prompts, or a response is
            not a sequence of token ids.
    """
    if len(queries) != len(responses) or not len(queries):
        raise DataError(
            f"step() takes one response per query; given {len(queries)} queries, {len(responses)} responses"
        )
    for index, response in enumerate(responses):
        if isinstance(response, str) or not len(response):
            raise DataError(
                f"response {index} should be the sampled token ids, at least one; given {describe(response)}"
            )
    ids = [as_ids(response) for response in responses]
    prompts = [trainer.text.encode(query, f"query {i}") for i, query in enumerate(queries)]
    _check_groups(trainer, prompts)
    check_ids(trainer, prompts, ids)
    sampled = None if masks is None else [_mask(mask, row, index) for index, (mask, row) in _paired(masks, ids)]
    trainer.models.build()
    settings, skip = trainer.settings(), trainer.config.rollout.skip_special_tokens
    stops, eos = settings.stop_sequences, {*eos_ids(trainer.unwrapped.model, trainer.tokenizer)}
    eos |= {*settings.stop_token_ids}
    texts = decode(trainer.tokenizer, ids, skip)
    ended = [row[-1] in eos or any(stop in text for stop in stops) for row, text in zip(ids, texts, strict=True)]
    return assemble(
        trainer.tokenizer,
        [{"prompt": query} for query in queries],
        prompts,
        ids,
        sampled=sampled,
        terminated=torch.tensor(ended, device=trainer.accelerator.device),
        logprobs=None,
        stops=stops,
        skip_special_tokens=skip,
    )


def _paired(masks: Sequence[Any], ids: list[list[int]]) -> Iterator[tuple[int, tuple[Any, list[int]]]]:
    if len(masks) != len(ids):
        raise DataError(
            f"there are {len(ids)} responses and {len(masks)} response_masks; give a mask for each response"
        )
    return enumerate(zip(masks, ids, strict=True))


def _mask(mask: Any, ids: list[int], index: int) -> list[bool]:
    """Return a response mask as a list; at least one token was sampled."""
    values = mask.tolist() if isinstance(mask, Tensor) else list(mask)
    if len(values) != len(ids) or not all(value in (0, 1) for value in values) or not any(values):
        raise DataError(
            f"response mask {index} is {describe(mask)} for a response of {len(ids)} tokens; give True or False for "
            "each, True for at least one"
        )
    return [bool(value) for value in values]


def _check_groups(trainer: AccelerateRLTrainer[Any], prompts: list[list[int]]) -> None:
    k = trainer.samples_per_prompt
    if len(prompts) % k:
        raise DataError(
            f"{type(trainer).__name__} compares {k} responses of each prompt, one after the other; given "
            f"{len(prompts)} in all"
        )
    for index, prompt in enumerate(prompts):
        if prompt != prompts[first := index - index % k]:
            raise DataError(
                f"{type(trainer).__name__} compares {k} responses of each prompt, one after the other; query {index} "
                f"differs from query {first}. Order them by prompt, and give each prompt {k} times"
            )


def check_ids(trainer: AccelerateRLTrainer[Any], prompts: list[list[int]], responses: list[list[int]]) -> None:
    """Raise a `DataError` unless the model can read every prompt with its response."""
    read, chosen = trainer.model_config.get_text_config().vocab_size, trainer.sampling.vocabulary
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if min(prompt + response) < 0 or max(prompt) >= read or max(response) >= chosen:
            whose = "the model's" if chosen == read else f"the tokenizer's {chosen} ids, or the model's"
            raise DataError(f"query or response {index} holds ids outside {whose} vocabulary of {read}")
        if not trainer.text.fits(len(prompt), len(response)):
            raise DataError(
                f"query and response {index} have {len(prompt)} and {len(response)} tokens; {trainer.text.what_fits}"
            )


def decode_samples(
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    prompts: Sequence[Tensor],
    samples: Sequence[Tensor],
    prompt_sizes: Sequence[int],
    append_eos_token: bool,
) -> tuple[list[str], list[str], list[str]]:
    """Return (samples, prompts, outputs) as text, with outputs truncated at the first stop string."""
    skip = config.skip_special_tokens
    responses = [_without_padding(s[size:], tokenizer) for s, size in zip(samples, prompt_sizes, strict=True)]
    texts, whole = decode(tokenizer, list(prompts), skip), decode(tokenizer, responses, skip)
    outputs = [cut_at_stop(text, config.stop_sequences) for text in whole]
    if append_eos_token:
        eos = str(tokenizer.eos_token)
        ended = [len(ids) > 0 and int(ids[-1]) == tokenizer.eos_token_id for ids in responses]
        outputs = [
            cut.removesuffix(eos) + eos if cut != text or end else cut
            for cut, text, end in zip(outputs, whole, ended, strict=True)
        ]
    return [prompt + output for prompt, output in zip(texts, outputs, strict=True)], texts, outputs


def _without_padding(ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return a response [T] without the padding at its end, for text alone; one EOS stays where EOS pads too."""
    eos, pad = tokenizer.eos_token_id, pad_id(tokenizer)
    real = (ids != pad).nonzero().flatten()
    end = int(real[-1]) + 1 if len(real) else 0
    return ids[: end + 1] if pad == eos else ids[:end]
