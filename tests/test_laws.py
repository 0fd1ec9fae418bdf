"""What the loop promises of itself, and the laws of the kit (test_conformance.py) on encoder-decoders and in bf16.

The kit checks every algorithm on one architecture; test_policy.py checks the policy on all architectures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainkit
from trainkit import Verdict
from trainkit.testing import tiny_gpt2, tiny_t5
from trainkit.testing.trainers import tiny_trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    trainer.models.build()
    return {k: v.clone() for k, v in trainer.unwrapped.state_dict().items()}


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# ------------------------------------------------------------------------- one distribution, in bf16 too


@pytest.mark.daily(model=(tiny_gpt2,))
@pytest.mark.parametrize("model", [tiny_gpt2, tiny_t5])
def test_under_autocast_too_sampler_policy_and_reference_speak_of_one_distribution(model: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, model=model(10), train__mixed_precision="bf16")
    trainer.collect()
    assert trainer.recorder.pending["policy/kl"].compute() == 0.0
    rollouts = trainer.collector.collection.rollouts[0]
    torch.testing.assert_close(rollouts.logprobs, trainer.behaviour(rollouts).logprobs, rtol=0, atol=2e-2)


# ---------------------------------------------------------------------------------------------- resuming


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "ppo"])
@pytest.mark.parametrize("at", [1, 3, 4])
def test_resumed_run_ends_bit_equal_to_one_that_never_stopped(name: str, at: int, tmp_path: Path) -> None:
    """Mid-collection, mid-pass and at a boundary, with dropout on."""
    changes = {
        "model": tiny_t5(10, dropout_rate=0.1),
        "model__disable_dropout": False,
        "train__batch_size": 6,
        "train__save_interval": 1,
    }
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    straight.learn()
    tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at).learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    assert resumed.progress.step == straight.progress.step == 6
    assert_same_weights(weights(straight), weights(resumed))
    for a, b in zip(straight.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert straight.state_dict() == resumed.state_dict()


@pytest.mark.parametrize("name", ["dpo", "ppo"])
def test_resuming_a_finished_run_makes_no_step(name: str, tmp_path: Path) -> None:
    first = tiny_trainer(name, tmp_path, train__save_interval=3)
    first.learn()
    again = tiny_trainer(name, tmp_path, train__save_interval=3, train__resume="auto")
    again.learn()
    assert again.progress.step == 6
    assert_same_weights(weights(first), weights(again))


@pytest.mark.daily(name=("ppo",), model=(tiny_gpt2,))
@pytest.mark.parametrize(
    ("name", "model"), [("ppo", tiny_gpt2), ("ppo", tiny_t5), ("rloo", tiny_gpt2), ("rft", tiny_gpt2)]
)
def test_a_loop_of_ones_own_resumes_as_if_it_had_never_stopped(name: str, model: Any, tmp_path: Path) -> None:
    def turns(trainer: Any, count: int) -> Any:
        for _ in range(count):
            rollouts = trainer.generate([p for p in ("ab", "c", "def", "g") for _ in range(trainer.samples_per_prompt)])
            trainer.step(rollouts.queries, rollouts.responses, [float(len(o)) for o in rollouts.outputs])
        return trainer

    fields = model(10)
    straight = turns(tiny_trainer(name, tmp_path / "straight", model=fields), 4)
    turns(tiny_trainer(name, tmp_path / "stopped", model=fields), 2).save()
    resumed = turns(tiny_trainer(name, tmp_path / "stopped", model=fields, train__resume="auto"), 2)
    assert resumed.progress.step == straight.progress.step
    assert_same_weights(weights(straight), weights(resumed))


# ------------------------------------------------------------------------------ steps that are skipped


def judged(trainer: Any, verdicts: dict[int, Verdict]) -> Any:
    """The trainer, judging its steps (from 1) so, and all others to be made."""
    trainer.judge = lambda metrics: verdicts.get(trainer.progress.step + 1, Verdict.STEP)
    return trainer


def remembered(trainer: Any) -> list[Tensor]:
    """All that the optimizer keeps: Adam's step counts and moments."""
    return [value.clone() for state in trainer.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize(("name", "judges"), [("ppo", True), ("sft", False)])
def test_metrics_are_only_reduced_for_a_trainer_that_judges(name: str, judges: bool, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path)
    trainer.collect()
    assert ("train/skipped" in trainer.update(trainer.store.experience)) == judges


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ["dpo", "ppo", "rloo"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_resumed_around_an_early_stop_ends_as_if_it_had_not_been(name: str, at: int, tmp_path: Path) -> None:
    """Before the step that stops a collection in its first pass, right after it, and in the next collection."""
    verdicts = {2: Verdict.STOP, 4: Verdict.SKIP}
    changes = {"train__batch_size": 6, "train__save_interval": 1}
    straight = judged(tiny_trainer(name, tmp_path / "straight", **changes), verdicts)
    straight.learn()
    judged(tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at), verdicts).learn()
    resumed = judged(tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto"), verdicts)
    resumed.learn()
    here, there = asdict(straight.progress), asdict(resumed.progress)
    assert {k: v for k, v in here.items() if k != "seconds"} == {k: v for k, v in there.items() if k != "seconds"}
    assert_same_weights(weights(straight), weights(resumed))
    assert all(torch.equal(a, b) for a, b in zip(remembered(straight), remembered(resumed), strict=True))
    assert straight.progress.step == (6 if name != "dpo" else 2), "offline, a collection is all there is"


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ["ppo", "rft", "rloo"])
def test_epochs_end_a_run_also_if_its_collections_are_stopped_early(name: str, tmp_path: Path) -> None:
    """A collection makes two steps in a pass: those that were skipped are not made on further prompts."""
    seen: list[str] = []

    class Seen:
        @trainkit.hookimpl
        def on_evaluate(self, step: int) -> None:
            seen.append(f"evaluate {step}")

        @trainkit.hookimpl
        def on_save(self, step: int) -> None:
            seen.append(f"save {step}")

    changes = {
        "train__epochs": 4, "train__total_steps": None, "train__eval_interval": 100, "train__save_interval": 100,
        "train__batch_size": tiny_trainer(name, tmp_path / "unused").experience_rows // 2,
    }  # fmt: skip
    trainer = tiny_trainer(name, tmp_path, callbacks=[Seen()], **changes)
    collections = 4 * 8 // trainer.collection_rows
    planned = collections * trainer.passes * 2
    assert trainer.total_steps == planned
    judged(trainer, {1: Verdict.STOP})
    trainer.learn()
    made, left_out = trainer.progress.step, trainer.passes * 2 - 1
    assert trainer.progress.collection + 1 == collections
    # an algorithm may select among the rollouts, and make fewer steps
    if "make_experience" in vars(type(trainer)) or trainer.rows_vary:
        assert 0 < made <= planned - left_out
    else:
        assert (made, trainer.progress.samples) == (planned - left_out, collections * trainer.experience_rows)
    assert seen == ["evaluate 0", f"evaluate {made}", f"save {made}"]
    del trainer
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = tiny_trainer(name, tmp_path, **changes, train__resume="auto")
    again.learn()
    assert again.progress.step == made < planned, "it is finished, with fewer steps than planned"
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before if path.name != "run.lock"} == {
        path: at for path, at in before.items() if path.name != "run.lock"
    }


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ["grpo", "online_dpo", "ppo"])
def test_a_loop_of_ones_own_leaves_the_rest_of_a_stopped_collection_out(name: str, tmp_path: Path) -> None:
    trainer = judged(tiny_trainer(name, tmp_path, train__batch_size=4), {1: Verdict.STOP})
    for steps in (1, 1 + trainer.passes * 2):
        responses = max(8 * 16 // trainer.experience_rows, 8)  # of which 8 rows are made, two steps in a pass
        rollouts = trainer.generate(["ab"] * responses)
        trainer.step(rollouts.queries, rollouts.responses, [float(len(o)) for o in rollouts.outputs])
        assert trainer.progress.step == steps


# --------------------------------------------------------------------------------------- how long a run is


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, 2),  # 16 samples in batches of 8, once
        ({"train__epochs": 3}, 6),
        ({"train__total_steps": 5}, 5),  # as many epochs as that takes
        ({"train__epochs": 1, "train__total_steps": 5}, 2),  # the earlier of the two
        ({"train__epochs": 4, "train__total_steps": 5}, 5),
        ({"train__total_steps": 0}, 0),
    ],
)
def test_epochs_and_total_steps_end_an_offline_run(limits: dict[str, int], steps: int, tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, **{"train__total_steps": None, "train__epochs": None, **limits})
    assert trainer.total_steps == steps
    trainer.learn()
    assert trainer.progress.step == steps


@pytest.mark.daily(name=("dpo", "sft"))
@pytest.mark.parametrize("name", ["dpo", "ilql", "kto", "reward", "sft"])
def test_held_out_samples_are_measured_by_the_loss_however_they_are_split(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path / "a")
    plain = tiny_trainer(name, tmp_path / "b", train__microbatch_size=3, rollout__batch_size=5)
    for each in (trainer, plain):
        assert each.pipeline is not None
        each.eval_samples = list(each.pipeline.rows)
        each.eval_rows = []
    found = trainer.evaluate()
    assert found["eval/loss/total"] == pytest.approx(plain.evaluate()["eval/loss/total"], rel=1e-5)


# ------------------------------------------------------------------------------- exports of encoder-decoders


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ilql", "ppo"])
def test_export_loads_in_transformers_with_equal_logits_and_goes_on_with_its_heads(name: str, tmp_path: Path) -> None:
    """Base-model keys only; heads beside them."""
    from transformers import AutoModelForSeq2SeqLM

    from trainkit.models.trunk import tiny_input

    trainer = tiny_trainer(name, tmp_path / "run", model=tiny_t5(10))
    trainer.learn()
    path = trainer.save_pretrained(tmp_path / "export")
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    inputs = tiny_input(loaded)
    assert torch.equal(loaded(**inputs).logits, trainer.unwrapped.model(**inputs).logits)
    again = tiny_trainer(name, tmp_path / "again", model=tiny_t5(10), model__model_path=str(path))
    assert_same_weights(weights(trainer), weights(again))
