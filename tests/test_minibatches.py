"""Minibatches over processes: the same rows on any number of processes, in equal shares."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tables import table
from trainkit import Batch
from trainkit.data import RolloutStore, Sequences, shuffled
from trainkit.runs.progress import Progress
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.minibatches import Layout, Minibatches, minibatches, share


@dataclass(frozen=True)
class Numbered(Batch):
    number: Tensor


class Processes:
    """Threads that gather from each other, as processes do."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier, self.given = world, threading.Barrier(world), dict[int, Any]()
        self.gathered = 0

    def run(self, experience: list[Numbered], each: int, steps: list[Tensor]) -> list[list[list[int]]]:
        def one(rank: int, gather: Any) -> list[list[int]]:
            store = RolloutStore[Numbered]()
            store.push(experience[rank])
            made = minibatches(store, steps, Layout(each, self.world, rank), gather)
            return [batch.number.tolist() for batch in made]

        return self.call(one)

    def call(self, function: Any) -> list[Any]:
        """Call ``function(rank, gather)`` in all processes."""
        found: dict[int, Any] = {}

        def one(rank: int) -> None:
            def gather(items: Any) -> list[Any]:
                self.gathered += 1
                self.given[rank] = items
                self.barrier.wait()
                gathered = [item for other in range(self.world) for item in self.given[other]]
                self.barrier.wait()
                return gathered

            found[rank] = function(rank, gather)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(self.world)]


def divided(prompts: int, each: int, world: int) -> list[Numbered]:
    """The rows of ``prompts``, numbered in order, as processes hold them that take every world-th prompt."""
    rows = torch.arange(prompts * each).view(prompts, each)
    return [Numbered(rows[rank::world].flatten()) for rank in range(world)]


@table("prompts, each, size", [(16, 1, 8), (8, 4, 8), (8, 4, 16), (8, 3, 8), (12, 2, 16)])
@table("together", [False, True])
def test_minibatches_have_the_same_rows_on_any_number_of_processes(
    prompts: int, each: int, size: int, together: bool
) -> None:
    order = shuffled(prompts * each, torch.Generator().manual_seed(3), together=each if together else 1)
    steps = list(order.split(size))
    for world in (1, 2, 4):
        found = Processes(world).run(divided(prompts, each, world), each, steps)
        for step, rows in enumerate(steps):
            parts = [found[rank][step] for rank in range(world)]
            assert sorted(row for part in parts for row in part) == sorted(rows.tolist())
            assert {len(part) for part in parts} == {len(rows) // world}


def test_rows_are_sent_only_to_processes_that_have_too_few_of_their_own() -> None:
    held = divided(8, 1, 2)
    processes = Processes(2)
    even = torch.tensor([0, 1, 2, 3]), torch.tensor([7, 5, 4, 6])
    assert processes.run(held, 1, list(even)) == [[[0, 2], [4, 6]], [[1, 3], [7, 5]]]
    assert processes.gathered == 0
    odd = torch.tensor([0, 2, 4, 6]), torch.tensor([1, 3, 5, 7])
    assert processes.run(held, 1, list(odd)) == [[[0, 2], [5, 7]], [[4, 6], [1, 3]]]
    assert processes.gathered == 4, "once by each for each step"


def test_a_share_is_of_ones_own_rows_first() -> None:
    parts = share(torch.tensor([5, 1, 0, 2, 4, 6]), torch.tensor([1, 1, 0, 0, 0, 0]), 2)
    assert [part.tolist() for part in parts] == [[0, 2, 4], [5, 1, 6]]


@table("each, kept, asked", [(1, 9, 4), (3, 9, 4), (2, 1, 8), (2, 9, 99), (2, 9, 0)])
def test_what_is_replayed_does_not_depend_on_the_number_of_processes(each: int, kept: int, asked: int) -> None:
    prompts, found = 8, {}
    for world in (1, 2, 4):

        def one(rank: int, gather: Any, world: int = world) -> list[list[list[int]]]:
            algorithm = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(seed=3)), rows_vary=False)
            parallel, progress = SimpleNamespace(world=world, rank=rank, gather=gather), Progress()
            batches: Any = Minibatches(algorithm, None, None, parallel, progress, None)  # type: ignore[arg-type]
            earlier, made = list[Numbered](), list[list[list[int]]]()
            for progress.collection in range(3):
                progress.prompts = prompts // world
                first = divided(prompts, each, world)[rank].number + 100 * progress.collection
                rows = batches.replay(Numbered(first), earlier, collections=kept, prompts=asked).number
                assert progress.prompts == len(rows) // each
                assert len(earlier) == min(kept, progress.collection + 1)
                made.append(rows.view(-1, each).tolist())
            return made

        parts = Processes(world).call(one)
        found[world] = [
            [group for groups in zip(*step, strict=True) for group in groups] for step in zip(*parts, strict=True)
        ]
    assert found[1] == found[2] == found[4]
    for number, groups in enumerate(found[1]):
        assert len(groups) == prompts + min(asked, prompts * min(number, kept))
        assert groups[:prompts] == (torch.arange(prompts * each) + 100 * number).view(-1, each).tolist()
        assert len({str(group) for group in groups}) == len(groups), "each is drawn once"
        assert all(number - kept <= group[0] // 100 < number for group in groups[prompts:])


def test_rows_of_a_group_are_shuffled_together() -> None:
    draws = torch.Generator().manual_seed(0)
    order = shuffled(12, draws, together=3).tolist()
    assert [order[i : i + 3] for i in range(0, 12, 3)] != [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert all(order[i : i + 3] == list(range(order[i], order[i] + 3)) for i in range(0, 12, 3))
    assert sorted(shuffled(10, draws, together=4).tolist()) == list(range(10)), "the last group has two rows"
    plain = torch.Generator().manual_seed(7)
    assert torch.equal(shuffled(9, plain), torch.randperm(9, generator=torch.Generator().manual_seed(7)))


def test_rows_of_one_prompt_are_adjacent_in_minibatches_and_micro_batches(tmp_path: Any) -> None:
    trainer = tiny_trainer("rloo", tmp_path, train__batch_size=6, train__microbatch_size=3)
    trainer.collect()
    trainer.progress.prompts = 4
    seen: list[list[list[int]]] = []
    for batch in trainer.collector.one_pass():
        seen.append([query.tolist() for query in batch.sequences.queries])
        micros = [query.tolist() for micro in trainer.updater.micro_batches(batch) for query in micro.sequences.queries]
        assert changes(micros) == len({str(query) for query in micros}) - 1, "k adjacent rows, though sorted by length"
    assert [len(rows) for rows in seen] == [6, 6, 4]
    assert changes([query for rows in seen for query in rows]) == 3


def changes(items: list[Any]) -> int:
    return sum(one != other for one, other in pairwise(items))


def test_groups_of_micro_batches_keep_rows_of_a_prompt_together_up_to_their_number() -> None:
    prompts, responses = [[1]] * 4 + [[2]] * 2, [[3], [3] * 5, [3], [3], [3] * 2, [3] * 2]
    batch = Sequences.from_lists(prompts, responses)
    assert batch.follows.tolist() == [False, True, True, True, False, True]
    assert [rows.tolist() for rows in batch.groups(2)] == [[1, 4], [5, 0], [2, 3]]
    assert [rows.tolist() for rows in batch.groups(2, together=2)] == [[0, 1], [4, 5], [2, 3]]
    assert [rows.tolist() for rows in batch.groups(3, together=4)] == [[0, 1, 2], [3, 4, 5]]
    assert Sequences.from_lists([], []).follows.tolist() == []


def test_unequal_numbers_of_rows_are_refused(tmp_path: Any) -> None:
    from trainkit.errors import PluginError

    trainer = tiny_trainer("sft", tmp_path)
    trainer.collect()
    trainer.parallel.gather = lambda items: [*items, 5]
    with pytest.raises(PluginError, match=r"'sft' made 16 and 5 rows of experience on 1 processes; prepare_experience"):
        next(trainer.collector.one_pass())
