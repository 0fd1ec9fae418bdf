"""Rows that are token ids already: what they are read as, and what is refused; templates of what is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tables import table
from trainkit.data import Completions, output_spans, preference_rows, recognise, sample_rows
from trainkit.errors import ConfigError, DataError
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_t5
from trainkit.testing.trainers import tiny_trainer

tokenizer = character_tokenizer("abcdefgh#:")


def test_rows_of_token_ids_are_recognised_unless_they_have_text() -> None:
    assert recognise({"input_ids": [1]}) == "tokenised"
    assert recognise({"input_ids_chosen": [1], "input_ids_rejected": [2]}) == "tokenised preference"
    assert recognise({"input_ids": [1], "text": "a"}) == "language modelling"
    assert recognise({"input_ids": [1], "prompt": "a"}) == "prompt-only"


@table(
    "row, ids, outputs",
    [
        # the first token follows nothing
        ({"input_ids": [1, 2, 3]}, [1, 2, 3], [False, True, True]),
        ({"input_ids": torch.tensor([1, 2, 3]), "labels": [-100, -100, 3]}, [1, 2, 3], [False, False, True]),
        # padding on either side is removed
        ({"input_ids": [0, 1, 2, 0], "attention_mask": [0, 1, 1, 0]}, [1, 2], [False, True]),
    ],
)
def test_labels_say_what_is_trained_on(row: Any, ids: list[int], outputs: list[bool]) -> None:
    assert sample_rows([row], None, tokenizer) == [{"input_ids": ids, "outputs": outputs}]


@table(
    "row, words",
    [
        ({"input_ids": [1, 2], "labels": [-100]}, r"sample 0: labels has 1 numbers, and there are 2 tokens"),
        ({"input_ids": [1, 99]}, r"sample 0: input_ids has the id 99; ids of this tokenizer are 0 to 1\d"),
        ({"input_ids": [1, -1]}, "has the id -1"),
        ({"input_ids": "abc"}, "input_ids should be a list of int; given 'abc'"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "label 0 is 2, and the token there 1; .* not shifted"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "has no token to train on"),
        ({"input_ids": [1]}, "has no token to train on"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "attention_mask should be 1 for tokens that are read"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "has no tokens"),
        ({"inputs_ids": [1, 2]}, r"expected here: .* input_ids \(tokenised\)"),
    ],
)
def test_wrong_rows_of_token_ids_are_refused(row: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        sample_rows([row], None, tokenizer)


def test_the_loss_is_that_of_the_labels(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    trainer.add_samples([{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": [5, 6]}])
    batch = trainer.make_experience(list(trainer.pipeline.rows))
    labels = torch.tensor([[-100, -100, 3, 4], [-100, 6, -100, -100]])
    trainer.models.build()
    logits = trainer.unwrapped.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert trainer.loss(batch)[0].item() == pytest.approx(expected.item(), abs=1e-6)


def test_outputs_of_a_tokenised_pair_follow_their_common_beginning(tmp_path: Path) -> None:
    rows = [{"input_ids_chosen": [1, 2, 3, 4], "input_ids_rejected": [1, 2, 5], "attention_mask_chosen": [1] * 4}]
    assert [*preference_rows(rows, tokenizer)[0]] == ["input_ids_chosen", "input_ids_rejected"]
    trainer = tiny_trainer("dpo", tmp_path)
    trainer.add_samples(rows)
    pairs = trainer.encode_preferences(list(trainer.pipeline.rows))
    assert pairs.chosen.response_mask.tolist() == [[False, False, True, True]]
    assert pairs.rejected.responses[0].tolist() == [5]
    with pytest.raises(DataError, match="the same chosen and rejected output"):
        trainer.add_samples([{"input_ids_chosen": [1, 2], "input_ids_rejected": [1, 2]}])


def test_only_a_model_that_scores_whole_sides_reads_one_of_a_single_token(tmp_path: Path) -> None:
    row = {"input_ids_chosen": [1], "input_ids_rejected": [1, 5, 6]}
    with pytest.raises(DataError, match="sample 0 has a side without output; remove it"):
        tiny_trainer("dpo", tmp_path / "dpo").add_samples([row])
    trainer = tiny_trainer("reward", tmp_path / "reward", train__seq_length=2)
    trainer.add_samples([row])
    pairs = trainer.make_experience(list(trainer.pipeline.rows))
    assert (pairs.chosen.input_ids.tolist(), pairs.rejected.input_ids.tolist()) == ([[1]], [[1, 5]])
    trainer.models.build()
    assert trainer.loss(pairs)[0].isfinite()


def test_other_columns_are_kept_and_models_that_read_apart_are_refused(tmp_path: Path) -> None:
    pair = {"input_ids_chosen": [1, 2], "input_ids_rejected": [1, 3], "margin": 2.0}
    trainer = tiny_trainer("reward", tmp_path / "reward")
    trainer.add_samples([pair])
    assert trainer.make_experience(list(trainer.pipeline.rows)).margins.tolist() == [2.0]
    trainer = tiny_trainer("sft", tmp_path / "t5", model=tiny_t5(10))
    with pytest.raises(DataError, match="sample 0 has token ids, and an encoder-decoder reads"):
        trainer.add_samples([{"input_ids": [1, 2]}])


# -------------------------------------------------------------------------------------------------------- templates


def test_outputs_are_found_in_text_and_in_ids() -> None:
    assert output_spans("a#:b#:cd", "#:") == [(6, 8)]
    assert output_spans([1, 9, 8, 2, 3], [9, 8]) == [(3, 5)]
    assert output_spans("q:a#:bq:c#:d", "#:", "q:") == [(5, 6), (11, 12)]
    assert output_spans("abc", "#:") == []
    assert output_spans("abc#:", "#:") == []


def test_texts_become_turns_and_ids_become_labels() -> None:
    assert Completions("#:")("ab#:cd") == ("ab#:", "cd")
    assert Completions("#:", "a:")({"text": "a:b#:ca:d#:e"}) == ("a:b#:", "c", "a:d#:", "e")
    ids = tokenizer.encode("a#:b")
    by_ids = Completions(tokenizer.encode("#:"), tokenizer=tokenizer)
    assert by_ids({"input_ids": ids}) == {"input_ids": ids, "labels": [-100] * 3 + ids[3:]}
    assert by_ids("a#:b")["labels"][3:] == [ids[3], tokenizer.eos_token_id]  # EOS comes with the text
    with pytest.raises(DataError, match="nothing follows the response_template '#:'"):
        Completions("#:")("abc")
    for wrong in (("", None), ("#:", ""), ([1], None)):
        with pytest.raises(ValueError, match="template is"):
            Completions(*wrong)


def test_a_run_learns_what_follows_a_template(tmp_path: Path) -> None:
    trainer = trainkit.train(
        tiny_gpt2(len(tokenizer)),
        samples=["a#:bc", "d#:ef"],
        formatting_func=Completions("#:"),
        tokenizer=tokenizer,
        config={
            "optimizer": {"lr": 1e-2},
            "train": {"epochs": 40, "run_dir": str(tmp_path), "trackers": []},
            "rollout": {"max_new_tokens": 4},
        },
    )
    assert trainer.generate(["a#:", "d#:"], temperature=0).outputs == ["bc", "ef"]


def test_a_loop_of_ones_own_learns_from_samples(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, train__total_steps=30, optimizer__lr=1e-2)
    first = trainer.learn_from([("a", "bc")] * 8)
    for _ in range(20):
        last = trainer.learn_from([{"input_ids": tokenizer.encode("abc"), "labels": [-100, *tokenizer.encode("bc")]}])
    assert last["loss/nll"] < first["loss/nll"] / 2
    assert trainer.progress.step == 21
    with pytest.raises(ConfigError, match=r"call step\(queries, responses, scores\)"):
        tiny_trainer("ppo", tmp_path / "ppo").learn_from(["a"])


class Halves:
    """A `Shape` that keeps the second half of each row."""

    lost = "rows lose their first half"

    def __call__(self, *sides: Any) -> tuple[Any, ...]:
        return tuple((ids[len(ids) // 2 :], mask[len(ids) // 2 :]) for ids, mask in sides)


def test_rows_may_be_shaped_by_another_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer("dpo", tmp_path / "dpo")
    trainer.text.shape = Halves()
    trainer.add_samples([{"prompt": "abcd", "chosen": "ef", "rejected": "f"}])
    pairs = trainer.encode_preferences(list(trainer.pipeline.rows))
    texts = [trainer.tokenizer.decode(each.input_ids[0]) for each in (pairs.chosen, pairs.rejected)]
    assert texts == ["def<eos>", "df<eos>"]  # of abcdef<eos> and abcdf<eos>
    assert pairs.rejected.response_mask.tolist() == [[False, True, True]]
    assert "1 of 1 samples were truncated to 64 tokens: rows lose their first half" in caplog.text
    trainer = tiny_trainer("sft", tmp_path / "sft")
    trainer.text.shape = Halves()
    trainer.add_samples([("abc", "d")])
    assert trainer.make_experience(list(trainer.pipeline.rows)).input_ids.tolist() == [
        trainer.tokenizer.encode("cd<eos>")
    ]
    with pytest.raises(DataError, match="sample 0 has 66 tokens, and together at most 64 fit; shorten it"):
        trainer.add_samples([("abc", "d" * 128)])
