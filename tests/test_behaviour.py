"""The old policy: what the sampler saw, where that is what the policy says; else one pass of the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tables import table
from trainkit import hookimpl
from trainkit.data import Rollouts
from trainkit.errors import ConfigError, PluginError
from trainkit.testing import tiny_gpt2, tiny_llama
from trainkit.testing.trainers import tiny_trainer

every_online = pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "online_dpo", "rloo"))]
)
"""Algorithms that ask what the policy said when it sampled."""
MAMBA = {"model_type": "mamba", "vocab_size": 10, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


def passes(trainer: Any) -> list[int]:
    """Counts, from now on, the rows that the policy is asked about outside of updates."""
    seen: list[int] = []

    def count(module: Any, inputs: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            seen.append(len(inputs[0]))

    trainer.unwrapped.register_forward_pre_hook(count, with_kwargs=True)
    return seen


def two_collections(trainer: Any) -> list[int]:
    """The rows that the policy was asked about while the second collection was made."""
    trainer.collect()
    for batch in trainer.store.batches(8, torch.Generator()):
        trainer.update(batch)
    trainer.store.clear()
    trainer.progress.collection += 1
    seen = passes(trainer)
    trainer.collect()
    return seen


@every_online
@table("model", [tiny_gpt2(10), tiny_llama(10)])
def test_after_the_first_collection_the_policy_is_not_run_again(
    name: str, model: dict[str, Any], tmp_path: Path
) -> None:
    trainer = tiny_trainer(name, tmp_path, model=model, rollout__temperature=0.7, rollout__top_k=4)
    assert trainer.progress.sampler_exact is None
    assert two_collections(trainer) == []
    assert trainer.progress.sampler_exact is True


@every_online
def test_what_the_sampler_saw_is_what_the_policy_says_after_updates_too(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, rollout__temperature=0.7, optimizer__lr=0.01)
    two_collections(trainer)
    rollouts = trainer.sample([{"prompt": p} for p in ("a", "bcd", "ef")])
    rollouts = replace(rollouts, hidden=None)
    whole = trainer.unwrapped(rollouts.sequences, entropy=True)
    fresh = trainer.sampling.sample(
        rollouts.rows, trainer.settings(), "train", trainer.sampling.seeds(rollouts.rows, "train")
    )
    said = trainer.behaviour(fresh)
    assert torch.equal(fresh.sequences.input_ids, rollouts.sequences.input_ids)
    for one, two in zip(said, whole, strict=True):
        if two is not None:
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@every_online
def test_a_model_that_samples_by_generate_asks_the_policy(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, model=MAMBA)
    assert sum(two_collections(trainer)) == 16
    assert trainer.progress.sampler_exact is None, "there was nothing to compare"


@every_online
def test_a_sampler_that_is_off_is_noticed(name: str, tmp_path: Path) -> None:
    class Off:
        @trainkit.hookimpl
        def make_sampler(self, trainer: Any) -> Any:
            def sample(*arguments: Any) -> Rollouts:
                rollouts = own(*arguments)
                return replace(rollouts, logprobs=rollouts.logprobs - 1e-3)

            return sample

    honest = tiny_trainer(name, tmp_path / "honest")
    trainer = tiny_trainer(name, tmp_path / "off", callbacks=[Off()])
    own = honest.core_sampler()
    trainer.models.build()
    honest.unwrapped.load_state_dict(trainer.unwrapped.state_dict())
    assert sum(two_collections(trainer)) == 16
    assert trainer.progress.sampler_exact is False


@every_online
def test_another_sampler_than_the_one_that_was_compared_is_compared_anew(name: str, tmp_path: Path) -> None:
    """As when a run is resumed with a plugin's sampler."""
    trainer = tiny_trainer(name, tmp_path)
    assert two_collections(trainer) == []
    assert trainer.progress.sampler == "local"
    trainer.progress.sampler = "ServerSampler"
    seen = passes(trainer)
    trainer.store.clear()
    trainer.collect()
    assert len(seen) > 0
    assert (trainer.progress.sampler, trainer.progress.sampler_exact) == ("local", True)


def test_a_reward_function_judges_as_exactly_in_training_as_in_evaluation(tmp_path: Path) -> None:
    seen: list[bool] = []

    def judge(outputs: list[str], **_: Any) -> list[float]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return [float(len(output)) for output in outputs]

    trainer = tiny_trainer("ppo", tmp_path, train__mixed_precision="bf16", train__eval_interval=3)
    trainer.reward_fn = judge
    trainer.learn()
    assert len(seen) > 2
    assert not any(seen)


def test_a_sampler_of_a_hook_is_refused_by_an_algorithm_that_steers(tmp_path: Path) -> None:
    class Hook:
        @hookimpl
        def make_sampler(self, trainer: Any) -> Any:
            return lambda *_: None

    with pytest.raises(PluginError, match="changes logits while sampling"):
        tiny_trainer("ilql", tmp_path, callbacks=[Hook()]).generate(["a"])


def test_what_is_sampled_does_not_depend_on_what_was_sampled_before(tmp_path: Path) -> None:
    """A second response to a row is another one; those of other rows stay what they are."""
    found = []
    for extra in (0, 1):
        trainer = tiny_trainer("rloo", tmp_path / str(extra))
        rows = trainer.pipeline.take(0, 4)
        again = [trainer.sample(rows[:1]).responses[0].tolist() for _ in range(extra)]
        first, *others = (response.tolist() for response in trainer.sample(rows).responses)
        found.append(((*again, first), others))
    assert found[0][1] == found[1][1]
    assert found[1][0][0] == found[0][0][0]
    assert found[1][0][1] != found[0][0][0]


def test_sampling_settings_of_one_call(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path)
    rows = trainer.pipeline.take(0, 2)
    greedy = [[r.tolist() for r in trainer.sample(rows, temperature=0, max_new_tokens=3).responses] for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert max(map(len, greedy[0])) <= 3
    with pytest.raises(ConfigError, match="sampling settings: heat"):
        trainer.sample(rows, heat=1)


@table("overflow", [False, True])
def test_after_step_is_not_called_where_the_gradient_scaler_skipped_the_step(
    overflow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer("ilql", tmp_path / "run", train__total_steps=1)
    calls: list[int] = []
    monkeypatch.setattr(trainer, "after_step", lambda: calls.append(trainer.progress.step))
    trainer.models.build()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    monkeypatch.setattr(type(trainer.accelerator), "optimizer_step_was_skipped", property(lambda _: overflow))
    trainer.learn()
    assert calls == ([] if overflow else [1])
