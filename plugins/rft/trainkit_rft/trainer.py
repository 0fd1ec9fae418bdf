"""The trainer of RFT: experience and loss."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainkit import AccelerateRLTrainer, Rollouts, Row, Sequences, TokenBatch, register_trainer
from trainkit.data import Images
from trainkit.functional import nll, per_response
from trainkit.metrics import Mean, Metrics, Std
from trainkit.models import different_prompts
from trainkit.rollouts import assemble
from trainkit.seeding import PLACE
from trainkit_rft.config import RFTConfig


@dataclass(frozen=True)
class RFTRows(TokenBatch):
    """Responses with their scores [B]; prompts without sampled responses have an empty response."""

    scores: Tensor
    positions: Tensor
    """Positions [B] of the prompts in the stream of prompts."""


def threshold(scores: list[float], percentile: float) -> float:
    """Return the least score that is not below the quantile.

    s ≥ quantile is the same as s ≥ this score, and here nothing is interpolated: a rounded quantile may be above the
    scores that it equals, which then would not be kept.
    """
    rank = round(percentile * (len(scores) - 1), 9)  # 0.55 · 20 is above 11 in float64
    return sorted(scores)[ceil(rank)]


def select(scores: list[list[float]], percentiles: list[float]) -> list[list[bool]]:
    """Return which scores s of each prompt are kept: s ≥ quantile(s, p) and s > min s, p its percentile.

    If all responses to a prompt have the same score, they are kept if it is at least the median of all scores.
    """
    median, kept = threshold([score for row in scores for score in row], 0.5), []
    for row, p in zip(scores, percentiles, strict=True):
        least, limit = min(row), threshold(row, p)
        kept.append([s >= limit and s > least if least < max(row) else s >= median for s in row])
    return kept


def share(kept: list[tuple[str, str]], rank: int, world: int, batch_size: int) -> list[tuple[str, str]]:
    """Return every ``world``-th of the (prompt, response) pairs, from ``rank`` on; equally many in every process.

    Before, they are filled up to a multiple of ``batch_size`` with a prompt without a response, which has no weight in
    the loss. Minibatches are then the same for every number of processes that divides ``batch_size``.
    """
    filled = [*kept, *[(kept[0][0], "[]")] * (-len(kept) % batch_size)]
    return filled[rank::world]


def written(sequences: Sequences) -> list[list[int]]:
    """Return the ids after each prompt; those of an environment, which are not trained on, as the negative ~id."""
    after = sequences.attention_mask & ~sequences.prompt_mask
    signed = torch.where(sequences.response_mask, sequences.input_ids, ~sequences.input_ids)
    return [ids[keep].tolist() for ids, keep in zip(signed, after, strict=True)]


@dataclass(frozen=True)
class Picture:
    """What a model reads of the images of a prompt."""

    name: str
    """A hash of it; empty without images."""
    inputs: dict[str, Tensor]


def pictures(sequences: Sequences) -> list[Picture]:
    """Return what the model reads of the images of each prompt; prompts with the same have the same object."""
    if sequences.images is None:
        return [Picture("", {})] * len(sequences)
    images, found = sequences.images.to(torch.device("cpu")), {-1: Picture("", {})}
    for row, of in enumerate(images.of.tolist()):
        if of not in found:
            inputs = images.take(torch.tensor([row])).inputs
            content = b"".join(each[each != 0].numpy().tobytes() for each in inputs.values())  # without padding
            found[of] = Picture(sha256(content).hexdigest(), inputs)
    return [found[of] for of in images.of.tolist()]


def ids_of(prompt: str) -> list[int]:
    """Return the token ids of a prompt as it is named in pools."""
    ids: list[int] = json.loads(prompt[: prompt.index("]") + 1])
    return ids


def place(row: Row) -> int:
    """Return a row's position in the stream of prompts; 0 for one that is not of the stream."""
    return row[PLACE].position if PLACE in row else 0


def epoch(row: Row) -> int:
    """Return how often the stream has passed all prompts before a row; 0 for one that is not of the stream."""
    return row[PLACE].epoch if PLACE in row else 0


@register_trainer("rft")
class RFTTrainer(AccelerateRLTrainer[RFTConfig]):
    """Trainer of RFT: loss = −mean log π(y_t | prompt, y_<t) over the responses that reach their prompt's threshold."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "rft_k"
    rows_vary = True
    remembers: ClassVar[dict[str, Any]] = {"visits": dict, "pools": dict}
    visits: dict[str, int]  # by prompt (its token ids and a hash of its images); a visit is a step of its schedule
    pools: dict[str, dict[str, float]]  # scores by response, latest last; the same on all processes

    @property
    def experience_rows(self) -> int:
        """Rows of a collection, an upper bound: whole pools. A schedule over the run needs ``train.total_steps``."""
        return self.collection_rows * max(self.method.rft_k, self.method.pool_size)

    def sample_and_score(self, rows: list[Row]) -> tuple[Rollouts, Tensor]:
        """Return scored responses to prompts at a growth step, then the other prompts, with an empty response."""
        grow = [epoch(row) % self.method.n_improve_steps == 0 for row in rows]
        new, rest = ([row for row, now in zip(rows, grow, strict=True) if now is wanted] for wanted in (True, False))
        parts, scores = [], [torch.zeros(len(rest), device=self.accelerator.device)]
        if new:
            parts.append(self.sample(new))
            scores.insert(0, per_response(self.score(parts[0])))
            self.collector.current.scores.append(scores[0])  # the loop tells if all are equal
        found = scores[0][scores[0].isfinite()] if new else scores[0][:0]
        self.record({"reward/mean": Mean.of(found), "reward/std": Std.of(found)})
        if rest:
            parts.append(self.unsampled(rest))
        return Rollouts.cat(parts), torch.cat(scores)

    def unsampled(self, rows: list[Row]) -> Rollouts:
        """Return rows with empty responses."""
        return assemble(
            self.tokenizer,
            rows,
            self.text.queries(rows),
            [[] for _ in rows],
            terminated=torch.zeros(len(rows), dtype=torch.bool, device=self.accelerator.device),
            logprobs=None,
            stops=[],
            skip_special_tokens=True,
            images=self.text.images(rows),
        )

    def experience(self, rollouts: Rollouts, scores: Tensor) -> RFTRows:
        """Return rollouts with their scores [B]; rewards per token are summed."""
        positions = torch.tensor([place(row) for row in rollouts.rows], device=scores.device)
        return RFTRows(rollouts.sequences, per_response(scores), positions)

    def prepare_experience(self, experience: RFTRows) -> Sequences:
        """Add new responses to the pools, and return this process's share of those that reach the thresholds [B, T]."""
        x = experience
        seen = pictures(x.sequences)
        prompts = [f"{query.tolist()}{each.name}" for query, each in zip(x.sequences.queries, seen, strict=True)]
        answers = [str(part) for part in written(x.sequences)]
        found = self.gather(list(zip(x.positions.tolist(), prompts, answers, x.scores.tolist(), strict=True)))
        shown = dict(self.gather([*{name: each.inputs for name, each in zip(prompts, seen, strict=True)}.items()]))
        found.sort(key=lambda item: item[0])  # an order that does not depend on the number of processes
        for _, query, response, score in found:
            if response != "[]":
                others = [item for item in self.pools.get(query, {}).items() if item[0] != response]
                self.pools[query] = dict([*others, (response, score)][-self.method.pool_size :])
        pooled = [query for query in dict.fromkeys(query for _, query, *_ in found) if query in self.pools]
        kept = self.improve(pooled) if pooled else []  # a prompt of which every response was dropped has no pool
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = share(kept, rank, world, self.config.train.batch_size) if kept else []
        queries, responses = [ids_of(prompt) for prompt, _ in mine], [json.loads(response) for _, response in mine]
        images = Images.of_rows([shown[prompt] for prompt, _ in mine])
        rows = Sequences.from_rows(
            [query + [max(i, ~i) for i in response] for query, response in zip(queries, responses, strict=True)],
            [[False] * len(q) + [i >= 0 for i in response] for q, response in zip(queries, responses, strict=True)],
        )
        return replace(rows, images=images)

    def improve(self, queries: list[str]) -> list[tuple[str, str]]:
        """Visit the prompts, and return the (prompt, response) pairs of their pools that reach the thresholds."""
        method, pools = self.method, [self.pools[query] for query in queries]
        first, last = method.start_percentile, method.end_percentile
        schedule = torch.linspace(first, last, method.n_improve_steps, dtype=torch.float64).tolist()
        percentiles = [schedule[self.visits.get(query, 0) % method.n_improve_steps] for query in queries]
        kept = [keep for row in select([list(pool.values()) for pool in pools], percentiles) for keep in row]
        self.visits |= {query: self.visits.get(query, 0) + 1 for query in queries}
        pooled = [(query, *item) for query, pool in zip(queries, pools, strict=True) for item in pool.items()]
        good, scores = torch.tensor(kept), torch.tensor([score for *_, score in pooled])
        self.record({"pool/kept": Mean.of(good), "pool/kept_reward": Mean.of(scores, good)})
        return [(query, response) for (query, response, _), keep in zip(pooled, kept, strict=True) if keep]

    def prepare_step(self, batch: Sequences) -> Sequences:
        """Return the rows of a step, those of a prompt beside each other, so that micro-batches can share prompts."""
        _, prompt = different_prompts(batch)
        return batch.take(prompt.argsort(stable=True))

    def loss(self, batch: Sequences) -> tuple[Tensor, Metrics]:
        """Return the negative log-likelihood of the responses, a mean over their tokens. -> []."""
        logprobs = self.policy(batch).logprobs
        return nll(logprobs, batch.response_mask), {"loss/nll": Mean.of(-logprobs, batch.response_mask)}
