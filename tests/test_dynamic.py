"""Dynamic sampling: `keep` chooses groups, and the loop samples on until the collection is full."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from researchers.dapo import DapoTrainer
from tables import table
from trainkit import Rollouts, register_trainer
from trainkit.errors import ConfigError, DataError, PluginError, RegistryError
from trainkit.functional import per_response
from trainkit.testing.trainers import tiny_trainer


def picky(outputs: list[str], **_: Any) -> list[float]:
    """A reward that is the same for all responses to many prompts."""
    return [float(output.count("a") > 1) for output in outputs]


def trainer_at(place: Path, **changes: Any) -> Any:
    arguments = {"reward_fn": changes.pop("reward_fn", picky)}
    return tiny_trainer("_test_dapo", place, arguments=arguments, **changes)


def positions(trainer: Any) -> list[int]:
    return [row["__place__"].position for rollouts in trainer.collector.collection.rollouts for row in rollouts.rows]


def test_a_collection_is_filled_with_the_groups_that_are_kept_in_the_order_of_the_stream(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path)
    trainer.collect()
    assert len(trainer.store) == 16
    used = positions(trainer)
    assert used == sorted(used)
    assert all(used[i : i + 4] == [used[i]] * 4 for i in range(0, 16, 4))
    assert used[-1] == trainer.progress.taken - 1 > 3, "no prompt is sampled beyond the last that was needed"
    groups = trainer.store.experience.advantages.view(-1, 4)
    assert bool((groups.std(1) > 0.9).all()), "every group that is trained on has different rewards"
    kept = trainer.recorder.pending["rollout/kept"].compute()
    assert kept == pytest.approx(4 / trainer.progress.taken)
    assert trainer.recorder.pending["rollout/length"].count == 4 * trainer.progress.taken, (
        "of everything that was sampled"
    )


def test_what_is_kept_does_not_depend_on_parts_and_the_stream_goes_on_after_it(tmp_path: Path) -> None:
    found = []
    for size in (4, 6, 100):
        trainer = trainer_at(tmp_path / str(size), rollout__batch_size=size)
        trainer.collect()
        batch = trainer.store.experience
        found.append((positions(trainer), [response.tolist() for response in batch.sequences.responses]))
    assert found[0] == found[1] == found[2]
    taken = trainer.progress.taken
    trainer.store.clear()
    trainer.learn()
    assert trainer.progress.cursor > taken > 4, "rows of the stream that were used, not those that were kept"


def test_a_collection_that_cannot_be_filled_is_trained_on_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_at(tmp_path, rollout__max_refills=0, train__total_steps=2, method__k=8, rollout__num_rollouts=32)
    with caplog.at_level(logging.WARNING):
        trainer.learn()
    lines = [record.getMessage() for record in caplog.records if "prompts sampled within" in record.getMessage()]
    assert lines
    assert "of 4 prompts sampled within rollout.max_refills 0, and 4 were wanted; it goes on with" in lines[0]
    assert trainer.progress.step == 2


def test_nothing_kept_is_an_error(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, reward_fn=lambda outputs, **_: [1.0] * len(outputs), rollout__max_refills=2)
    with pytest.raises(DataError, match=r"trains on 0 of 12 prompts sampled in 3 rounds, which leaves nothing"):
        trainer.learn()


@table("dense", [False, True])
def test_scores_per_token_stay_with_their_tokens(dense: bool, tmp_path: Path) -> None:
    def reward(outputs: list[str], **_: Any) -> list[Any]:
        return [[float(c == "a") for c in output] if dense else float(output.count("a")) for output in outputs]

    trainer = trainer_at(tmp_path, reward_fn=reward, rollout__batch_size=4)
    seen: list[Tensor] = []
    honest = trainer.experience

    def experience(rollouts: Rollouts, scores: Tensor) -> Any:
        totals = torch.tensor([float(output.count("a")) for output in rollouts.outputs])
        assert torch.equal(per_response(scores), totals)
        seen.append(scores)
        return honest(rollouts, scores)

    trainer.experience = experience
    trainer.collect()
    assert {scores.dim() for scores in seen} == {2 if dense else 1}


RETURNED = {
    "a list": (lambda n: [True] * n, r"keep returned \[True.*; return a bool tensor of shape \(8,\)"),
    "floats": (lambda n: torch.ones(n), r"keep returned a torch.float32 tensor of shape \(8,\)"),
    "one per group": (lambda n: torch.ones(n // 4, dtype=torch.bool), r"a torch.bool tensor of shape \(2,\)"),
    "a cut group": (lambda n: torch.arange(n) % 2 == 0, "kept some of the 4 responses to a prompt and not the others"),
}


@table("returned, said", RETURNED.values())
def test_what_keep_returns_is_checked(returned: Any, said: str, tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path)
    trainer.keep = lambda rollouts, scores: returned(len(rollouts))
    with pytest.raises(PluginError, match=said):
        trainer.collect()


def test_max_refills_needs_an_algorithm_that_keeps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_refills is 3, and 'rloo' trains on everything that it samples"):
        tiny_trainer("rloo", tmp_path, rollout__max_refills=3)


def test_keep_beside_a_make_experience_that_does_not_call_it_is_refused() -> None:
    with pytest.raises(RegistryError, match="overrides keep and make_experience"):

        @register_trainer("_test_dapo")
        class Both(DapoTrainer):
            def make_experience(self, rows: Any) -> Any:
                return super().make_experience(rows)


@pytest.mark.daily(stop=(1,))
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_run_that_keeps_resumes_exactly(stop: int, tmp_path: Path) -> None:
    changes = {"train__save_interval": 1, "train__batch_size": 8}
    straight = trainer_at(tmp_path / "a", **changes)
    straight.learn()
    trainer_at(tmp_path / "b", **changes, train__total_steps=stop).learn()
    resumed = trainer_at(tmp_path / "b", **changes, train__resume="auto")
    resumed.learn()
    assert straight.progress.cursor == resumed.progress.cursor
    for one, other in zip(straight.unwrapped.parameters(), resumed.unwrapped.parameters(), strict=True):
        assert torch.equal(one, other)


DAPO = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from test_dynamic import trainer_at

torch.set_num_threads(1)
trainer = trainer_at(Path(sys.argv[1]) / "run", rollout__batch_size=4, optimizer__kwargs={"eps": 1e-4})
trainer.learn()
if trainer.accelerator.is_main_process:
    torch.save([trainer.unwrapped.state_dict(), trainer.progress.cursor], Path(sys.argv[1]) / "end.pt")
"""


@pytest.mark.slow
def test_two_processes_keep_what_one_keeps(tmp_path: Path) -> None:
    from test_processes import succeed

    ends = []
    for processes in (1, 2):
        place = tmp_path / str(processes)
        place.mkdir()
        succeed(DAPO, processes, str(place), str(Path(__file__).parent))
        ends.append(torch.load(place / "end.pt", weights_only=False))
    assert ends[0][1] == ends[1][1], "they have used the same prompts"
    for key, tensor in ends[0][0].items():
        torch.testing.assert_close(tensor, ends[1][0][key], rtol=0, atol=1e-5)


def test_epochs_end_when_the_prompts_are_used_up_however_many_were_kept(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, train__total_steps=None, train__epochs=3, train__batch_size=16)
    trainer.learn()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = [line["rollout/kept"] for line in lines if "rollout/kept" in line]
    assert kept
    assert all(0 < part < 1 for part in kept)
    assert trainer.progress.cursor + trainer.progress.taken >= 3 * 8, "the last collection is used"
    assert trainer.progress.step < trainer.total_steps == 6, "the steps of a run that keeps everything"
