"""What the settings of RFT do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure


def sampled_in_a_run(trainer: Any) -> int:
    """Return the number of collections of a run for which responses are sampled."""
    honest, calls = trainer.sample, list[int]()

    def sample(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return honest(*args, **kwargs)

    trainer.sample = sample
    trainer.learn()
    return len(calls)


def kept_in_visits(trainer: Any, visits: int) -> list[int]:
    """Return how many of eleven responses with the scores 0 to 10 are kept in each of the next visits."""
    trainer.pools, trainer.visits = {"[1]": {f"[{i}]": float(i) for i in range(11)}}, {}
    return [len(trainer.improve(["[1]"])) for _ in range(visits)]


def kept_in_the_first_visit(trainer: Any) -> int:
    """Return how many of eleven responses are kept in the first visit."""
    return kept_in_visits(trainer, 1)[0]


def kept_in_the_last_visit(trainer: Any) -> int:
    """Return how many of eleven responses are kept in the last visit before the thresholds begin again."""
    return kept_in_visits(trainer, trainer.method.n_improve_steps)[-1]


def length_of_a_schedule(trainer: Any) -> int:
    """Return after how many visits the thresholds begin again."""
    kept = kept_in_visits(trainer, 12)
    return next(visit for visit in range(1, 12) if kept[visit] == kept[0])


def largest_pool(trainer: Any) -> int:
    """Return the number of responses in the largest pool after a run."""
    trainer.learn()
    return max(len(pool) for pool in trainer.pools.values())


def old_ones_that_stay(trainer: Any) -> int:
    """Return how many responses of a full pool are left after two better ones came: the oldest leave."""
    x = trainer.experience(trainer.sample([{"prompt": "a"}] * 2), torch.tensor([1.0, 2.0]))
    old = {str([0] * (20 + i)): 0.0 for i in range(trainer.method.pool_size)}
    trainer.pools = {str(x.sequences.queries[0].tolist()): old}
    trainer.prepare_experience(x)
    (pool,) = trainer.pools.values()
    return len(old.keys() & pool.keys())


def oldest_that_comes_again(trainer: Any) -> int:
    """Return 1 if the oldest response of a full pool stays when it is sampled again before another one, 0 if not."""
    x = trainer.experience(trainer.sample([{"prompt": prompt} for prompt in "aa"]), torch.tensor([1.0, 2.0]))
    again, other = (str(response.tolist()) for response in x.sequences.responses)
    assert again != other, "two responses of the tiny run are equal"
    old = {again: 1.0, **{str([0] * (20 + i)): 0.0 for i in range(trainer.method.pool_size - 1)}}
    trainer.pools = {str(x.sequences.queries[0].tolist()): old}
    trainer.prepare_experience(x)
    (pool,) = trainer.pools.values()
    return int(again in pool)


LONG = {"train.total_steps": 10}
ONE_KIND = {"method.start_percentile": 0.5, "method.end_percentile": 0.5}
EFFECTS: dict[str, Effect | list[Effect]] = {
    "rft_k": Effect("responses", equals={2: 2, 4: 4, 8: 8}),
    "n_improve_steps": [
        Effect(sampled_in_a_run, falls=(1, 2, 4), under={**ONE_KIND, **LONG}),
        Effect(length_of_a_schedule, equals={2: 2, 3: 3, 6: 6}, under={"method.start_percentile": 0.1}),
    ],
    # the lowest score is never kept; at the percentile p, those from 10p on
    "start_percentile": Effect(kept_in_the_first_visit, equals={0.0: 10, 0.5: 6, 0.9: 2}),
    "end_percentile": Effect(kept_in_the_last_visit, equals={0.1: 10, 0.5: 6, 0.9: 2}),
    "pool_size": [
        Effect(largest_pool, equals={1: 1, 4: 4, 8: 8}, under=LONG),
        Effect(old_ones_that_stay, equals={2: 0, 4: 2, 8: 6}),
        Effect(oldest_that_comes_again, equals={4: 1, 8: 1}),
    ],
}
# a prompt whose responses all have one score is compared with other prompts, which the tests of trainkit-rft cover
STRUCTURE = (Structure(scores="group", surrogate="none", detached=()),)
KIT = Declaration(
    # short enough for thresholds to rise and for a second growth step
    arguments={"config": {"method": {"n_improve_steps": 2}}},
    effects=EFFECTS,
    structure=STRUCTURE,
)
