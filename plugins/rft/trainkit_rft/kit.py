"""What the settings of RFT do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

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


def trained_in_a_run(trainer: Any) -> int:
    """Return the number of rows that the collections of a run have together."""
    honest, rows = trainer.prepare_experience, list[int]()

    def prepare(experience: Any) -> Any:
        batch = honest(experience)
        rows.append(int(batch.response_mask.any(1).sum()))
        return batch

    trainer.prepare_experience = prepare
    trainer.learn()
    return sum(rows)


def largest_pool(trainer: Any) -> int:
    """Return the number of responses in the largest pool after a run."""
    trainer.learn()
    return max(len(pool) for pool in trainer.pools.values())


LONG = {"train.total_steps": 10}
ONE_KIND = {"method.start_percentile": 0.5, "method.end_percentile": 0.5}
EFFECTS: dict[str, Effect | list[Effect]] = {
    "rft_k": Effect("responses", rises=(2, 4, 8)),
    "n_improve_steps": Effect(sampled_in_a_run, falls=(1, 2, 4), under={**ONE_KIND, **LONG}),
    "start_percentile": Effect("rows", falls=(0.0, 0.9)),
    "end_percentile": Effect(trained_in_a_run, falls=(0.1, 0.95), under={"method.n_improve_steps": 2, **LONG}),
    "pool_size": Effect(largest_pool, rises=(1, 4, 8), under=LONG),
}
# a prompt whose responses all have one score is compared with other prompts, which the tests of trainkit-rft cover
STRUCTURE = (Structure(scores="group", surrogate="none", detached=()),)
KIT = Declaration(
    # short enough for thresholds to rise and for a second growth step
    arguments={"config": {"method": {"n_improve_steps": 2}}},
    effects=EFFECTS,
    structure=STRUCTURE,
)
