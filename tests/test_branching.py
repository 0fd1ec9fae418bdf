"""`trainer.branch`: other endings of responses, with the numbers that sampling them at once would have."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit import Rollouts
from trainkit.errors import ConfigError, EpisodeError
from trainkit.rollouts import Turn
from trainkit.testing.trainers import Letters, tiny_trainer

NEW = 6


def made(tmp_path: Path, name: str = "rloo", **changes: Any) -> Any:
    trainer = tiny_trainer(name, tmp_path / "run", rollout__max_new_tokens=NEW, **changes)
    trainer.models.build()
    return trainer


def ids(rollouts: Rollouts) -> list[list[int]]:
    return [response.tolist() for response in rollouts.responses]


def sampled(trainer: Any, count: int = 4, **settings: Any) -> Rollouts:
    rollouts: Rollouts = trainer.sample(trainer.pipeline.take(0, count), **{"min_new_tokens": NEW, **settings})
    return rollouts


def test_tokens_that_are_kept_and_new_ones_have_the_numbers_of_the_policy(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    first, lengths = sampled(trainer), [0, 2, 5, NEW]
    whole = trainer.branch(first, torch.tensor(lengths))
    for one, other, length in zip(ids(first), ids(whole), lengths, strict=True):
        assert other[:length] == one[:length]
        assert len(other) == NEW or other[-1] == trainer.tokenizer.eos_token_id
    assert ids(whole)[3] == ids(first)[3], "nothing is left to sample"
    assert ids(whole)[0] != ids(first)[0]
    expected = trainer.policy(whole.sequences, entropy=True)
    mask = whole.sequences.response_mask
    torch.testing.assert_close(whole.logprobs[mask], expected.logprobs[mask])
    torch.testing.assert_close(whole.entropy[mask], expected.entropy[mask])
    assert whole.outputs == [trainer.tokenizer.decode(each, skip_special_tokens=True) for each in ids(whole)]
    assert whole.terminated.tolist() == [each[-1] == trainer.tokenizer.eos_token_id for each in ids(whole)]


def test_an_ending_depends_on_its_row_its_prefix_and_its_number_alone(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    first, seen = sampled(trainer), trainer.collector.current.seen
    begun = seen.copy()

    def branches(rows: list[int], lengths: list[int]) -> list[list[int]]:
        seen.clear()
        seen.update(begun)
        return ids(trainer.branch(first.select(rows), lengths))

    together = branches([0, 0, 1, 1, 2], [2, 2, 2, 2, 1])
    assert together[0] != together[1], "two endings of one response"
    assert branches([2, 1, 0], [1, 2, 2]) == [together[4], together[2], together[0]]
    assert branches([1], [2]) == [together[2]]


def test_greedy_endings_are_those_of_greedy_responses(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    greedy = sampled(trainer, temperature=0.0, min_new_tokens=0)
    for fixed in (0, NEW):  # endings of equal length are sampled together with the second
        whole = trainer.branch(greedy, [2, 1, 3, 4], temperature=0.0, min_new_tokens=fixed, max_new_tokens=NEW)
        assert ids(whole) == ids(greedy)


def test_a_response_that_has_ended_is_returned_and_a_longer_limit_goes_on(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    eos = trainer.tokenizer.eos_token_id
    rows = trainer.pipeline.take(0, 2)
    short = trainer.sample(rows, max_new_tokens=2, min_new_tokens=2)
    longer = trainer.branch(short, [2, 2], min_new_tokens=NEW)
    assert [each[:2] for each in ids(longer)] == ids(short)
    assert [len(each) for each in ids(longer)] == [NEW, NEW]
    trainer.logit_mask = torch.zeros(len(trainer.tokenizer), dtype=torch.bool).index_fill(0, torch.tensor([eos]), True)
    del trainer.sampling.sampler, trainer.sampling.engine
    over = trainer.sample(rows)
    assert ids(over) == [[eos], [eos]]
    again = trainer.branch(over, [5, 1])
    assert ids(again) == ids(over)
    assert again.terminated.all()


def test_scores_of_endings_are_not_those_of_the_responses_before(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    whole = trainer.branch(sampled(trainer), [1] * 4)
    trainer.score(whole)
    assert [each.judged for each in trainer.collector.current.rollouts] == [None]


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    first = sampled(trainer, 2)
    for lengths in ([1], [1, -1]):
        with pytest.raises(ValueError, match="lengths should be 2 numbers of tokens, from 0 on"):
            trainer.branch(first, lengths)
    trainer.sampling.environment = object()
    with pytest.raises(ConfigError, match=r"were not copied, .* set forks = True in the class of 'rloo'"):
        trainer.branch(first, [1, 1])


# -------------------------------------------------------------------------------------------------------- episodes


class Told(Letters):
    """Answers with letters that depend on what it was told before."""

    def __init__(self, row: Any) -> None:
        super().__init__(row)
        self.heard = list[str]()

    def step(self, output: str) -> Turn:
        self.heard.append(output)
        self.turn += 1
        letter = "abcdefgh"[sum(map(ord, "".join(self.heard))) % 8]
        return Turn(letter, float(len(self.heard)), done=self.turn == 3)


def playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Any = Told) -> Any:
    from trainkit.plugins import get_trainer

    monkeypatch.setattr(get_trainer("rloo"), "forks", True)
    return made(tmp_path, arguments={"environment": environment, "reward_fn": None})


def test_an_episode_goes_on_from_a_copy_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = playing(tmp_path, monkeypatch)
    first = trainer.sample(trainer.pipeline.take(0, 4))
    kept = [0, 1, 2, 3]
    whole = trainer.branch(first, kept)
    for one, other, count in zip(first.turns, whole.turns, kept, strict=True):
        assert other[:count] == one[:count]
        heard = [turn["output"] for turn in other]
        assert [turn["reward"] for turn in other] == [1.0, 2.0, 3.0], "the copy had heard the outputs that are kept"
        for number, turn in enumerate(other[:-1], 1):
            assert turn["observation"] == "abcdefgh"[sum(map(ord, "".join(heard[:number]))) % 8]
    assert ids(whole)[3] == ids(first)[3]
    assert ids(whole)[0] != ids(first)[0]
    mask = whole.sequences.response_mask
    torch.testing.assert_close(whole.logprobs[mask], trainer.policy(whole.sequences).logprobs[mask])
    again = trainer.branch(whole, [3, 2, 1, 0])  # a branch can be branched
    assert [turns[:n] for turns, n in zip(again.turns, (3, 2, 1, 0), strict=True)] == [
        turns[:n] for turns, n in zip(whole.turns, (3, 2, 1, 0), strict=True)
    ]


def test_a_branch_of_an_episode_depends_on_its_row_and_number_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = playing(tmp_path, monkeypatch)
    first, seen = trainer.sample(trainer.pipeline.take(0, 3)), trainer.collector.current.seen
    begun = seen.copy()

    def branches(rows: list[int], lengths: list[int]) -> list[list[int]]:
        seen.clear()
        seen.update(begun)
        return ids(trainer.branch(first.select(rows), lengths))

    together = branches([0, 0, 1, 1, 2], [1, 1, 2, 0, 1])
    assert together[0] != together[1]
    assert branches([2, 1, 0], [1, 2, 1]) == [together[4], together[2], together[0]]
    assert branches([1], [0]) == [together[3]]


def test_environments_of_collections_that_are_sampled_ahead_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing(tmp_path, monkeypatch)
    changes = {"rollout__staleness": 1, "arguments": {"environment": Told, "reward_fn": None}}
    with pytest.raises(
        ConfigError, match=r"'rloo' branches episodes \(forks\), whose environments no checkpoint holds"
    ):
        made(tmp_path, **changes)


class Locked(Letters):
    def __init__(self, row: Any) -> None:
        super().__init__(row)
        self.lock = threading.Lock()


class Refusing(Letters):
    def fork(self) -> Any:
        raise NotImplementedError("the page cannot be opened twice")


class Shared(Letters):
    def fork(self) -> Any:
        return self


class Own(Locked):
    def fork(self) -> Own:
        made = Own({"episode_seed": 0})
        made.draws.setstate(self.draws.getstate())
        made.turn = self.turn
        return made


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            Locked,
            r"fork\(\), by default copy.deepcopy, raised TypeError: cannot pickle .* write fork\(self\) -> a copy",
        ),
        (Refusing, r"raised NotImplementedError: the page cannot be opened twice"),
        (Shared, r"fork\(\) returned .* return another environment in the same state"),
    ],
)
def test_an_environment_that_cannot_be_copied_is_refused(
    environment: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = playing(tmp_path, monkeypatch, environment)
    with pytest.raises(EpisodeError, match=said):
        trainer.sample(trainer.pipeline.take(0, 2))


def test_an_environment_may_copy_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = playing(tmp_path, monkeypatch, Own)
    first = trainer.sample(trainer.pipeline.take(0, 2))
    whole = trainer.branch(first, [1, 1])
    assert [turns[0] for turns in whole.turns] == [turns[0] for turns in first.turns]
    assert [len(turns) for turns in whole.turns] == [2, 2]
