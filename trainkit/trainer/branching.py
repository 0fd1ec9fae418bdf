"""Other endings: sampling goes on after some tokens of responses, or after some outputs of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainkit.config import SamplingConfig
from trainkit.data import Rollouts
from trainkit.errors import ConfigError, describe
from trainkit.rollouts import Purpose, assemble
from trainkit.seeding import Seen, branch_seeds, turn_seed
from trainkit.trainer.sampling import Sampling


def branch(
    sampling: Sampling,
    rollouts: Rollouts,
    lengths: Sequence[int],
    settings: SamplingConfig,
    purpose: Purpose,
    seen: Seen,
) -> Rollouts:
    """Sample another ending of each response; see `AccelerateRLTrainer.branch`."""
    if sampling.text.is_encoder_decoder:
        raise ConfigError("responses of an encoder-decoder cannot be continued from a token within them")
    if len(lengths) != len(rollouts) or min(lengths, default=0) < 0:
        units = "tokens" if sampling.environment is None else "outputs"
        raise ValueError(f"lengths should be {len(rollouts)} numbers of {units}, from 0 on; given {describe(lengths)}")
    if sampling.environment is not None:
        return _episodes(sampling, rollouts, lengths, settings, purpose, seen)
    limit = settings.max_new_tokens
    prefixes = [_Part(rollouts, row, min(length, limit)) for row, length in enumerate(lengths)]
    going = [part for part in prefixes if len(part.ids) < limit and not part.complete]
    endings = dict(zip((part.row for part in going), _endings(sampling, going, settings, purpose, seen), strict=True))
    pairs = [[part, endings[part.row]] if part.row in endings else [part] for part in prefixes]
    return assemble(
        sampling.text.tokenizer,
        [*rollouts.rows],  # another list: scores belong to the rollouts of a list
        [part.query for part in prefixes],
        [[token for part in pair for token in part.ids] for pair in pairs],
        terminated=torch.tensor([pair[-1].complete for pair in pairs], device=rollouts.terminated.device),
        logprobs=_of_tokens("logprobs", pairs),
        entropy=_of_tokens("entropy", pairs),
        hidden=_of_tokens("hidden", pairs),
        versions=rollouts.versions,
        stops=settings.stop_sequences,
        skip_special_tokens=sampling.config.rollout.skip_special_tokens,
        images=rollouts.sequences.images,
    )


def _episodes(
    sampling: Sampling,
    rollouts: Rollouts,
    lengths: Sequence[int],
    settings: SamplingConfig,
    purpose: Purpose,
    seen: Seen,
) -> Rollouts:
    """Play each episode on after so many of its outputs."""
    if rollouts.moments is None:
        name = sampling.config.method.name
        raise ConfigError(
            f"the environments of these episodes were not copied, so that they cannot be branched; set forks = True in "
            f"the class of {name!r}, and give episodes that were sampled for training"
        )
    pairs = zip(rollouts.moments, lengths, strict=True)
    going = {row: kept[: length + 1] for row, (kept, length) in enumerate(pairs) if length < len(kept)}
    rest = [row for row in range(len(rollouts)) if row not in going]
    over = replace(rollouts.select(rest), judged=None)
    if not going:
        return over
    last = [kept[-1] for kept in going.values()]
    seeds = branch_seeds(
        sampling.config.train.seed,
        purpose,
        [moment.episode.row for moment in last],
        [moment.script.prompt for moment in last],
        [moment.script.ids for moment in last],
        seen,
    )
    played = sampling.player.branch([*going.values()], settings, seeds, *sampling.of_turns(settings, purpose))
    order = torch.tensor([*going, *rest]).argsort().tolist()
    return Rollouts.cat([played.to(sampling.parallel.device), over]).select(order)


class _Part:
    """The first ``count`` tokens of a response."""

    def __init__(self, rollouts: Rollouts, row: int, count: int) -> None:
        self.rollouts, self.row, self.count = rollouts, row, count
        sequences = rollouts.sequences
        self.mask = sequences.response_mask[row]
        self.query: list[int] = sequences.input_ids[row][sequences.prompt_mask[row]].tolist()
        whole: list[int] = sequences.input_ids[row][self.mask].tolist()
        self.ids = whole[:count]
        self.complete = bool(rollouts.terminated[row]) and len(whole) <= count
        """Whether these are all tokens of a response that has ended."""

    def of_tokens(self, name: str) -> Tensor | None:
        """Return the field ``name`` of the tokens [N, *]; None if it is unknown."""
        values: Tensor | None = getattr(self.rollouts, name)
        return None if values is None else values[self.row][self.mask][: self.count]


def _of_tokens(name: str, pairs: list[list[_Part]]) -> Tensor | None:
    """Return the field ``name`` of the tokens of all parts [N, *]; None if it is not known of all."""
    values = [part.of_tokens(name) for pair in pairs for part in pair]
    known = [value for value in values if value is not None]
    return torch.cat(known) if known and len(known) == len(values) else None


def _endings(
    sampling: Sampling, prefixes: list[_Part], settings: SamplingConfig, purpose: Purpose, seen: Seen
) -> list[_Part]:
    """Sample what follows each prefix, up to the limit of the whole response.

    All are sampled in one call, and cut, if the limits allow it; otherwise those of equal length are.
    """
    rows = [part.rollouts.rows[part.row] for part in prefixes]
    queries, ids = [part.query for part in prefixes], [part.ids for part in prefixes]
    seeds = branch_seeds(sampling.config.train.seed, purpose, rows, queries, ids, seen)
    limit, shortest = settings.max_new_tokens, min(map(len, ids), default=0)
    longest = max((len(part.query + part.ids) for part in prefixes), default=0)
    together = not settings.min_new_tokens and sampling.text.fits(longest, limit - shortest)
    calls: dict[int, list[int]] = {}
    for index, prefix in enumerate(ids):
        calls.setdefault(shortest if together else len(prefix), []).append(index)
    endings: dict[int, _Part] = {}
    for start, members in calls.items():
        changes = {"max_new_tokens": limit - start, "min_new_tokens": max(settings.min_new_tokens - start, 0)}
        sampled = sampling.respond(
            [rows[index] for index in members],
            [queries[index] + ids[index] for index in members],
            settings.model_copy(update=changes),
            purpose,
            [turn_seed(seeds[index], 0) for index in members],
        )
        for at, index in enumerate(members):
            endings[index] = _Part(sampled, at, limit - len(ids[index]))
    return [endings[index] for index in range(len(prefixes))]
