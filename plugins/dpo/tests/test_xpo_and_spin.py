"""SPIN and XPO: what they learn from and what they refuse, golden numbers, and responses of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from trainkit.errors import ConfigError, DataError
from trainkit.testing.trainers import tiny_trainer
from trainkit_dpo import SPINBatch, xpo_loss


def test_an_algorithm_learns_from_samples_and_from_responses_to_their_prompts(tmp_path: Path) -> None:
    tiny = tiny_trainer("spin", tmp_path)
    samples = [("ab", "c"), ("e", "gh"), ("d", "a"), ("hg", "b")]
    given: dict[str, Any] = {"config": tiny.config, "tokenizer": tiny.tokenizer}
    trainer = trainkit.train(samples=samples, **given)
    assert trainer.progress.step == 6
    assert [row["prompt"] for row in trainer.eval_rows] == [prompt for prompt, _ in samples][: len(trainer.eval_rows)]
    trainer.store.clear()
    trainer.collect()
    batch = trainer.store.experience
    assert isinstance(batch, SPINBatch)
    assert batch.common.all(), "the policy answers to the prompts of the samples"
    sides = [
        [(trainer.tokenizer.decode(q), trainer.tokenizer.decode(r, skip_special_tokens=True)) for q, r in pairs]
        for pairs in (zip(s.queries, s.responses, strict=True) for s in (batch.chosen, batch.rejected))
    ]
    assert {*sides[0]} == {*samples}
    assert {*sides[1]} != {*samples}
    for wrong, said in (
        ({"samples": samples, "prompts": ["a"]}, "prompts and samples are both given"),
        ({"prompts": ["a"]}, "learns from samples and prompts; given prompts. Add samples"),
        ({"samples": samples, "reward_fn": lambda **_: [0.0]}, "given reward_fn and samples. Remove reward_fn"),
    ):
        with pytest.raises(ConfigError, match=said):
            trainkit.train(method="spin", **{**given, **wrong})
    for sample in ("a", ("a", "b", "c", "d")):
        with pytest.raises(
            DataError, match=r"sample 1 has \d turns, and the algorithm samples a response to the prompt"
        ):
            tiny.add_samples([("a", "b"), sample])
    with pytest.raises(ConfigError, match=r"prompts are given, .* give samples \(add_samples\)"):
        tiny.add_prompt_pipeline(["a"])


def test_the_loss_of_xpo_equals_the_golden_numbers() -> None:
    """β x of .2 and −.1, and no preference, with α log π of −.02 each."""
    ratios, sign = torch.tensor([2.0, 1.0, 5.0]).double(), torch.tensor([1.0, -1.0, 0.0]).double()
    found = xpo_loss(ratios, torch.full((3,), -2.0).double(), sign, beta=0.1, alpha=0.01)
    expected = [0.5981388693 - 0.02, 0.7443966600 - 0.02, -0.02]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_other_side_of_xpo_is_sampled_from_the_reference(tmp_path: Path) -> None:
    """Its policy has moved far; scores are compared within a prompt, and metrics are of the better and the worse."""
    trainer = tiny_trainer("xpo", tmp_path, method__alpha=0.05)
    trainer.models.build()
    for parameter in trainer.unwrapped.parameters():
        parameter.data.mul_(3)
    trainer.collect()
    batch, found = trainer.store.experience, trainer.recorder.pending
    assert torch.equal(batch.own.input_ids[:, 0], batch.other.input_ids[:, 0])
    own, other = (
        [trainer.tokenizer.decode(ids, skip_special_tokens=True) for ids in side.responses]
        for side in (batch.own, batch.other)
    )
    scores = [torch.tensor(trainer.reward_fn(outputs=side)) for side in (own, other)]
    assert batch.sign.tolist() == (scores[0] - scores[1]).sign().tolist()
    assert found["reward/mean"].compute() == pytest.approx(float(scores[0].mean()))
    assert found["reward/reference"].compute() == pytest.approx(float(scores[1].mean()))
    with torch.no_grad():
        likely = [
            (model(batch.other).logprobs * batch.other.response_mask).sum(1).mean()
            for model in (trainer.unwrapped, trainer.reference)
        ]
        _, told = trainer.loss(batch)
    assert likely[1] > likely[0] + 1
    assert told["logps/reference"].compute() == pytest.approx(float(likely[0]), rel=1e-5)
    decided = batch.sign != 0
    assert told["rewards/margins"].count == int(decided.sum()) < len(batch)
    assert found["rollout/ties"].compute() == pytest.approx(float((~decided).float().mean()))


def test_a_score_of_the_reference_that_is_not_a_number_gives_no_preference(tmp_path: Path) -> None:
    calls: list[int] = []

    def every_second_call_is_nan(outputs: list[str], **_: Any) -> list[float]:
        calls.append(len(outputs))
        return [float("nan") if len(calls) % 2 == 0 else float(len(output)) for output in outputs]

    changes = {"reward__on_nonfinite": "drop_row", "rollout__batch_size": 16, "method__alpha": 0.05}
    trainer = tiny_trainer("xpo", tmp_path, arguments={"reward_fn": every_second_call_is_nan}, **changes)
    trainer.collect()
    batch = trainer.store.experience
    assert (batch.sign == 0).all()
    loss, found = trainer.loss(batch)
    assert float(loss.detach()) == pytest.approx(0.05 * found["logps/reference"].compute(), rel=1e-5)
