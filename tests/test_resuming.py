"""A run goes on where it stood, also longer or changed on the way, and never quietly as another one.

Runs that are killed, damaged or signalled are those of the battery: `tests/reliability/`.
"""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from runs import full, only_new_garbage, resumed_at, snapshot, steps_logged
from tables import table
from trainkit.errors import CheckpointError, ConfigError
from trainkit.runs import checkpoint
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import Letters, tiny_trainer


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """With dropout, from within a pass and between collections; the battery resumes at every step."""
    assert resumed_at("ppo", (2, 6), tmp_path) == 2


def test_a_finished_run_can_be_made_longer_and_its_export_is_the_new_one(tmp_path: Path) -> None:
    for steps in (2, 4):
        trainer = full("ppo", tmp_path / "run", train__total_steps=steps, train__resume="auto")
        trainer.learn()
    straight = full("ppo", tmp_path / "straight", train__total_steps=4)
    straight.learn()
    for file in ("model.safetensors", "trainkit.json"):
        assert (tmp_path / "run" / "model" / file).read_bytes() == (tmp_path / "straight/model" / file).read_bytes()
    assert json.loads((tmp_path / "run" / "model" / "trainkit.json").read_text()) == {"method": "ppo", "step": 4}


def test_a_run_that_died_between_its_last_step_and_its_export_exports_when_resumed(tmp_path: Path) -> None:
    full("sft", tmp_path, train__total_steps=2).learn()
    export = (tmp_path / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "model")
    full("sft", tmp_path, train__total_steps=2, train__resume="auto").learn()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == export


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO of 4 steps with all its checkpoints, which hold a collection."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    full("ppo", run_dir, train__total_steps=4).learn()
    return run_dir


@pytest.fixture
def a_run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_where_no_checkpoint_is_whole_the_run_does_not_quietly_start_anew(a_run: Path) -> None:
    for path in (a_run / "checkpoints").iterdir():
        (path / "loop.safetensors").unlink()
    before = (a_run / "metrics.jsonl").read_text()
    for _ in range(2):  # the second time they have been set aside already
        with pytest.raises(
            CheckpointError, match=r"no checkpoint under .* is intact \(step_00000001-.*so the run cannot"
        ):
            full("ppo", a_run, train__total_steps=4, train__resume="auto").learn()
    assert (a_run / "metrics.jsonl").read_text() == before


# ------------------------------------------------------------------------------------------------------- drift


def drifted(run_dir: Path, **changes: Any) -> Any:
    trainer = full("ppo", run_dir, **{"train__total_steps": 4, "train__resume": "auto", **changes})
    trainer.run.allow_drift = True
    return trainer


def rates_of(trainer: Any) -> list[float]:
    used: list[float] = []
    trainer.models.build()
    trainer.optimizer.optimizer.register_step_pre_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
    trainer.learn()
    return used


def test_allowed_drift_is_told_and_takes_effect(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"optimizer__lr": 0.5, "optimizer__weight_decay": 0.1, "optimizer__kwargs": {"eps": 1e-3}}
    trainer = drifted(a_run, **changes, train__total_steps=6)
    rates = rates_of(trainer)
    assert rates == [0.5, 0.5], "the steps after the resumed one, at the new rate"
    group = trainer.optimizer.param_groups[0]
    assert (group["weight_decay"], group["eps"]) == (0.1, 1e-3)
    said = capsys.readouterr().out
    assert f"resumed from {a_run / 'checkpoints' / 'step_00000004'} at step 4\n" in said
    assert "  changed: optimizer.lr: 0.001 -> 0.5\n" in said
    assert "total_steps" not in said, "that may change anyway"
    assert trainkit.TRLConfig.load_yaml(a_run / "config.yaml").optimizer.lr == 0.5


def test_a_fixed_price_of_divergence_follows_the_configuration_and_a_steered_one_the_checkpoint(a_run: Path) -> None:
    fixed = drifted(a_run, method__init_kl_coef=0.5)
    fixed.begin()
    assert fixed.kl.coef == 0.5
    del fixed
    steered = drifted(a_run, method__init_kl_coef=0.5, method__target=6.0)
    steered.begin()
    assert steered.kl.coef != 0.5


def test_the_optimizer_keeps_its_memory_when_its_rate_changes(a_run: Path) -> None:
    trainer = drifted(a_run, optimizer__lr=0.5)
    trainer.begin()
    saved = checkpoint.read_state(a_run / "checkpoints" / "step_00000004", "loop")["optimizer"]["state"]
    for index, found in enumerate(trainer.optimizer.state.values()):
        assert found["step"] == 4
        assert torch.equal(found["exp_avg"], saved[index]["exp_avg"])


def test_a_new_schedule_goes_on_at_the_step_where_the_run_stands(a_run: Path) -> None:
    """Linear over 8 steps: after 4 of them half of the rate is left."""
    trainer = drifted(a_run, scheduler__name="linear", optimizer__lr=1.0, train__total_steps=8)
    assert rates_of(trainer) == [0.5, 0.375, 0.25, 0.125]


def test_a_longer_run_follows_the_longer_schedule_from_the_first_step_on(tmp_path: Path) -> None:
    changes = {"scheduler__name": "linear", "optimizer__lr": 1.0}
    full("sft", tmp_path, train__total_steps=2, **changes).learn()
    longer = full("sft", tmp_path, train__total_steps=4, train__resume="auto", **changes)
    longer.begin()
    assert longer.optimizer.param_groups[0]["lr"] == 0.5


@table(
    "changes, said",
    [
        ({"optimizer__name": "sgd"}, r"another method or optimizer: optimizer\.name: 'adamw' -> 'sgd'"),
        (
            {"model": {**tiny_gpt2(10), "n_embd": 64}},
            r"does not fit this model: .* in the checkpoint, and \(.*64.*\) in the model",
        ),
        ({"model": {**tiny_gpt2(10), "n_layer": 1}}, r"model: model\.transformer\.h\.1\..* is only in the checkpoint"),
    ],
)
def test_what_cannot_be_continued_is_refused_also_where_drift_is_allowed(
    changes: dict[str, Any], said: str, a_run: Path
) -> None:
    before = snapshot(a_run)
    with pytest.raises(CheckpointError, match=f"(?s){said}"):
        drifted(a_run, **changes).learn()
    assert snapshot(a_run) == before


ROWS = [{"prompt": letter, "answer": n} for n, letter in enumerate("abcd")]
ODD = {"samples": [("ab", "c"), ("cd", "e")] * 8, "rewards": [0.0, 1.0] * 8}
OTHER_DATA: list[tuple[str, dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (
        "ppo",
        {"prompts": ROWS},
        [
            ({"prompts": [*ROWS[:3], {"prompt": "e", "answer": 3}]}, "'prompt'"),
            ({"prompts": [{"prompt": "b", "answer": 0}, {"prompt": "a", "answer": 1}, *ROWS[2:]]}, "'prompt'"),
            ({"prompts": [*ROWS[:3], {"prompt": "d", "answer": 4}]}, "'answer'"),
            ({"tokenizer": character_tokenizer("hgfedcba")}, "the tokenizer"),
        ],
    ),
    (
        "ilql",
        ODD,
        [({"samples": [("ab", "c"), ("cd", "f")] * 8}, "'[a-z]+'"), ({"rewards": [0.0, 0.5] * 8}, "'reward'")],
    ),
]


@table("name, before, others", OTHER_DATA)
def test_a_run_does_not_go_on_with_other_data_unless_that_is_allowed(
    name: str, before: dict[str, Any], others: list[tuple[dict[str, Any], str]], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"train__save_interval": 1, "train__total_steps": 1, "train__eval_interval": 0}
    tiny_trainer(name, tmp_path, arguments=before, **changes).learn()
    changes |= {"train__total_steps": 2, "train__resume": "auto"}
    tiny_trainer(name, tmp_path, arguments=before, **changes).begin()
    for now, said in others:
        with pytest.raises(CheckpointError, match=f"a run with other data.*\n  data: (the column )?{said}.* changed\n"):
            tiny_trainer(name, tmp_path, arguments={**before, **now}, **changes).learn()
    allowed = tiny_trainer(name, tmp_path, arguments={**before, **others[0][0], "allow_drift": True}, **changes)
    allowed.learn()
    assert allowed.progress.step == 2
    assert any("changed: data: " in line for line in allowed.run.resumption.messages)


def test_another_environment_is_refused(tmp_path: Path) -> None:
    class Others(Letters):
        """The same game."""

    changes: dict[str, Any] = {"train__save_interval": 1, "train__total_steps": 1, "rollout__max_new_tokens": 4}
    given: dict[str, Any] = {"reward_fn": None, "environment": Letters}
    tiny_trainer("ppo", tmp_path, arguments=given, **changes).learn()
    with pytest.raises(CheckpointError, match="data: the environment changed"):
        tiny_trainer(
            "ppo", tmp_path, arguments={**given, "environment": Others}, **changes, train__resume="auto"
        ).begin()


def test_another_method_is_refused_also_where_drift_is_allowed(a_run: Path) -> None:
    trainer = full("rloo", a_run, train__total_steps=4, train__resume="auto")
    trainer.run.allow_drift = True
    with pytest.raises(CheckpointError, match=r"another method or optimizer: method\.name: 'ppo' -> 'rloo'"):
        trainer.learn()


def test_another_batch_size_goes_on_with_the_rows_that_are_left(a_run: Path) -> None:
    """After step 4 one batch of 6 of the second pass over 16 rows is made: two of 3."""
    trainer = drifted(a_run, train__batch_size=3)
    trainer.begin()
    assert (trainer.progress.epoch, trainer.progress.position) == (1, 2)


# --------------------------------------------------------------------------------------- one directory, one run


def test_a_checkpoint_of_another_run_does_not_go_on_in_a_directory_that_holds_one(a_run: Path, tmp_path: Path) -> None:
    full("ppo", tmp_path / "other", train__total_steps=1).learn()
    before = snapshot(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"other already holds a run, and train\.resume names a checkpoint of another"
    ):
        full("ppo", tmp_path / "other", train__resume=str(a_run)).learn()
    assert snapshot(tmp_path / "other") == before


def test_going_back_within_a_run_drops_what_was_logged_after(a_run: Path) -> None:
    path = a_run / "checkpoints" / "step_00000002"
    full("ppo", a_run, train__resume=str(path), train__total_steps=3).learn()
    assert steps_logged(a_run) == [1, 2, 3]


def test_a_run_that_starts_over_logs_the_first_evaluation_once(tmp_path: Path) -> None:
    """It was killed before its first checkpoint."""
    for _ in range(2):
        trainer = full("ppo", tmp_path, train__total_steps=1, train__resume="auto", train__eval_interval=1)
        trainer.learn()
        shutil.rmtree(tmp_path / "checkpoints")
    assert steps_logged(tmp_path) == [0, 1, 1], "evaluation, step, evaluation"
    kinds = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert kinds == sorted(kinds)
    assert kinds.count(1) == 8


def test_trackers_of_a_loop_that_the_user_drives_are_closed_with_it(tmp_path: Path, monkeypatch: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    closed: list[bool] = []
    honest = SummaryWriter.close
    monkeypatch.setattr(SummaryWriter, "close", lambda self: (closed.append(True), honest(self)))
    with only_new_garbage():
        trainer = tiny_trainer("ppo", tmp_path, train__trackers=["tensorboard"])
        rollouts = trainer.generate(["a", "b"])
        trainer.step(rollouts.queries, rollouts.responses, [0.0, 1.0])
        assert not closed
        del trainer, rollouts
        gc.collect()
    assert closed
