"""Scripts in the manner of TRL's examples for SFT, DPO and reward modelling: only the word of their imports differs."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    HfArgumentParser,
    TrainingArguments,
)

from trainkit.errors import ConfigError
from trainkit.migrating import framework
from trainkit.testing import character_tokenizer
from trainkit_trl import (
    DataCollatorForCompletionOnlyLM,
    DPOTrainer,
    IterativeSFTTrainer,
    RewardConfig,
    RewardTrainer,
    SFTTrainer,
    set_seed,
)

LETTERS = "abcdefgh: #\n"
TRAINERS = (SFTTrainer, DPOTrainer, RewardTrainer, IterativeSFTTrainer)


def made(kind: Any = AutoModelForCausalLM, **fields: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    set_seed(0)
    tokenizer = character_tokenizer(LETTERS)
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=len(tokenizer), n_positions=32, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, **fields,
    )  # fmt: skip
    return kind.from_config(config), tokenizer


def arguments(tmp_path: Path, kind: Any = TrainingArguments, **changes: Any) -> Any:
    usual = {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    return kind(**{**usual, "report_to": "none", "max_steps": 4, "save_strategy": "no", **changes})


PAIRS = Dataset.from_dict({"prompt": ["a", "b"] * 4, "chosen": ["cd", "ef"] * 4, "rejected": ["ef", "cd"] * 4})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_sft_learns_texts_and_keeps_a_history(tmp_path: Path) -> None:
    model, tokenizer = made()
    data = Dataset.from_dict({"text": ["abcd", "efgh"] * 8, "other": [1] * 16})
    args = arguments(tmp_path, max_steps=60, eval_strategy="steps", eval_steps=30, warmup_steps=2)
    before = weights(model)
    trainer = SFTTrainer(
        model, args, train_dataset=data, eval_dataset=data, tokenizer=tokenizer, dataset_text_field="text",
        max_seq_length=16,
    )  # fmt: skip
    config = trainer.trainer.config
    assert (config.train.batch_size, config.train.total_steps, config.scheduler.name) == (4, 60, "linear")
    assert (config.scheduler.warmup_steps, config.train.eval_interval, config.train.save_interval) == (2, 30, 0)
    assert config.optimizer.kwargs == {"betas": [0.9, 0.999], "eps": 1e-8}
    found = trainer.train()
    assert found.global_step == 60
    assert trainer.state.log_history[-1]["train_loss"] == found.training_loss
    assert {"loss", "learning_rate", "grad_norm"} <= trainer.state.log_history[1].keys()
    assert trainer.evaluate()["eval_loss"] < 0.7  # nothing tells which of two texts begins: log 2 / 5 tokens at best
    assert trainer.model is model
    assert any(not torch.equal(before[name], value) for name, value in weights(model).items())
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    ids = torch.tensor([tokenizer.encode("a")])
    written = model.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids))
    assert tokenizer.decode(written[0]) == "abcd"


def test_only_completions_are_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = made()
    data = Dataset.from_dict({"question": ["a", "b", "c"], "answer": ["d", "e", "f"]})

    def formatting_prompts_func(example: dict[str, list[str]]) -> list[str]:
        texts = [f"# {q}\n: {a}" for q, a in zip(example["question"], example["answer"], strict=True)]
        return [*texts[:2], "abc"]

    trainer = SFTTrainer(
        model, arguments(tmp_path), data_collator=DataCollatorForCompletionOnlyLM("\n:", tokenizer=tokenizer),
        train_dataset=data, tokenizer=tokenizer, formatting_func=formatting_prompts_func, max_seq_length=16,
    )  # fmt: skip
    assert "1 samples are skipped" in caplog.text
    assert [row["turns"] for row in trainer.trainer.pipeline.rows] == [["# a\n:", " d"], ["# b\n:", " e"]]
    with pytest.raises(ValueError, match="set packing=False"):
        SFTTrainer(model, data_collator=trainer.data_collator, packing=True)
    with pytest.raises(ValueError, match="give dataset_text_field"):
        SFTTrainer(model, arguments(tmp_path), train_dataset=data, tokenizer=tokenizer)


def test_dropout_is_that_of_trl(tmp_path: Path) -> None:
    """SFT and reward modelling keep the dropout of the model; DPO switches it off, unless it is told not to."""
    for switched, expected in ((True, 0.0), (False, 0.1)):
        model, tokenizer = made()
        trainer = DPOTrainer(
            model, args=arguments(tmp_path), train_dataset=PAIRS, tokenizer=tokenizer, disable_dropout=switched
        )
        assert trainer.model.transformer.drop.p == expected
    model, tokenizer = made()
    sft = SFTTrainer(model, arguments(tmp_path), train_dataset=Dataset.from_dict({"text": ["ab"]}),
                     tokenizer=tokenizer, dataset_text_field="text")  # fmt: skip
    assert sft.model.transformer.drop.p == 0.1


def test_dpo_learns_which_side_is_chosen(tmp_path: Path) -> None:
    model, tokenizer = made()
    args = arguments(tmp_path, max_steps=15, remove_unused_columns=False)
    trainer = DPOTrainer(model, None, beta=0.1, args=args, train_dataset=PAIRS, eval_dataset=PAIRS,
                         tokenizer=tokenizer, max_length=16, max_prompt_length=8)  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    loss, found = trainer.get_batch_loss_metrics(model, batch)
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)  # policy and reference are equal: log 2
    assert found["rewards/accuracies"] == 0.5
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_rewards/accuracies"] == 1.0
    assert found["eval_loss"] < 0.5
    loop = trainer.evaluation_loop(trainer.get_train_dataloader(), "evaluation")
    assert loop.num_samples == len(PAIRS)
    assert loop.metrics["eval_loss"] == pytest.approx(found["eval_loss"], abs=1e-5)
    own, others = trainer.get_batch_samples(model, batch)
    assert len(own) == len(others) == len(batch["chosen_input_ids"])
    assert all(text.startswith(tuple(PAIRS["prompt"])) for text in [*own, *others])
    trainer.log({"own": 2.0})
    assert trainer.state.log_history[-1]["own"] == 2.0
    loss, mine = trainer.get_batch_metrics(model, batch, "eval")
    assert mine["eval_rewards/margins"].item() == pytest.approx(found["eval_rewards/margins"], abs=1e-5)
    assert loss.item() == pytest.approx(found["eval_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "expected"),
    [
        # beta .1, margins (2, -1, 0): -log sigmoid(.1 x); with smoothing -.9 log sigmoid(.1 x) - .1 log sigmoid(-.1 x)
        ("sigmoid", 0.0, [0.598139, 0.744397, 0.693147]),
        ("sigmoid", 0.1, [0.618139, 0.734397, 0.693147]),
        ("hinge", 0.0, [0.8, 1.1, 1.0]),
        ("ipo", 0.0, [9.0, 36.0, 25.0]),
    ],
)
def test_losses_of_pairs_are_those_of_trl(loss_type: Any, smoothing: float, expected: Any, tmp_path: Path) -> None:
    model, tokenizer = made()
    trainer = DPOTrainer(model, args=arguments(tmp_path), loss_type=loss_type, label_smoothing=smoothing,
                         train_dataset=PAIRS, tokenizer=tokenizer)  # fmt: skip
    zeros, chosen = torch.zeros(3), torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    losses, good, bad = trainer.dpo_loss(chosen, zeros.double(), zeros, zeros)
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(good, 0.1 * chosen)
    assert not bad.any()


def test_the_loss_kto_pair_is_the_mean_of_both_sides(tmp_path: Path) -> None:
    """F-12: log-ratios (.5, -1), (-1, .5), KLs 0: chosen 1 - sigmoid(.05), ..., rejected 1 - sigmoid(.1), ..."""
    model, tokenizer = made()
    trainer = DPOTrainer(model, args=arguments(tmp_path), loss_type="kto_pair", train_dataset=PAIRS,
                         tokenizer=tokenizer)  # fmt: skip
    given = [[-1.0, -4.0], [-2.0, -3.0], [-1.5, -3.0], [-1.0, -3.5]]
    losses, _, _ = trainer.dpo_loss(*(torch.tensor(each, dtype=torch.float64) for each in given))
    expected = [(0.487503 + 0.475021) / 2, (0.524979 + 0.512497) / 2]
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_concatenated_inputs_are_padded_to_the_longer_side() -> None:
    batch = {
        "chosen_input_ids": torch.tensor([[1, 2, 3]]), "chosen_labels": torch.tensor([[-100, 2, 3]]),
        "rejected_input_ids": torch.tensor([[1, 4]]), "rejected_labels": torch.tensor([[-100, 4]]),
    }  # fmt: skip
    found = DPOTrainer.concatenated_inputs(batch, padding_value=9)
    assert found["concatenated_input_ids"].tolist() == [[1, 2, 3], [1, 4, 9]]
    assert found["concatenated_labels"].tolist() == [[-100, 2, 3], [-100, 4, -100]]
    # logits of 0 over 5 tokens: log(1/5) each, two labels and one
    logps = DPOTrainer.get_batch_logps(torch.zeros(2, 3, 5), found["concatenated_labels"])
    torch.testing.assert_close(logps, torch.tensor([2.0, 1.0]) * -1.609438)


def test_reward_modelling_learns_from_token_ids(tmp_path: Path) -> None:
    model, tokenizer = made(AutoModelForSequenceClassification)
    good, bad = tokenizer.encode("ab"), tokenizer.encode("cde")
    row = {"input_ids_chosen": good, "attention_mask_chosen": [1] * len(good), "input_ids_rejected": bad,
           "attention_mask_rejected": [1] * len(bad), "chosen": "ab", "rejected": "cde"}  # fmt: skip
    data = Dataset.from_list([row] * 8)
    parsed: Any = HfArgumentParser(RewardConfig).parse_args_into_dataclasses(  # type: ignore[arg-type]
        ["--output_dir", str(tmp_path / "out"), "--evaluation_strategy", "steps", "--eval_steps", "5", "--max_steps",
         "10", "--learning_rate", "1e-2", "--max_length", "16", "--report_to", "none", "--save_strategy", "no",
         "--warmup_ratio", "0.2"]
    )[0]  # fmt: skip
    trainer = RewardTrainer(model=model, args=parsed, tokenizer=tokenizer, train_dataset=data, eval_dataset=data)
    config = trainer.trainer.config
    assert (config.train.eval_interval, config.train.seq_length, config.scheduler.warmup_steps) == (5, 16, 2)
    inputs = {name: torch.tensor([value]) for name, value in row.items() if not isinstance(value, str)}
    loss, outputs = trainer.compute_loss(model, {**inputs, "margin": torch.tensor([1.0])}, return_outputs=True)
    margin = outputs["rewards_chosen"] - outputs["rewards_rejected"] - 1
    assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(margin).item(), abs=0.3)  # dropout differs
    trainer.train()
    assert trainer.evaluate()["eval_rewards/accuracies"] == 1.0


def test_iterative_sft_trains_on_what_step_is_given(tmp_path: Path) -> None:
    model, tokenizer = made()
    trainer = IterativeSFTTrainer(model, arguments(tmp_path, max_steps=40), tokenizer, max_length=16)
    ids = [torch.tensor(tokenizer.encode("abcd"))] * 4
    labels = [torch.cat([torch.tensor([-100]), each[1:]]) for each in ids]
    first = trainer.step(input_ids=ids, attention_mask=[torch.ones_like(each) for each in ids], labels=labels)
    for _ in range(20):
        last = trainer.step(texts=["abcd"] * 4)
    assert last["loss/nll"] < 0.5 < first["loss/nll"]
    assert trainer.state.global_step == 21
    for wrong, words in (
        ({}, "either input_ids or texts"),
        ({"input_ids": ids, "texts": ["a"]}, "either input_ids or texts"),
        ({"input_ids": ids, "labels": labels[:1]}, "one length"),
        ({"texts": "a"}, "texts should be a list"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer.step(**wrong)
    with pytest.raises(ConfigError, match=r"args\.max_steps"):
        IterativeSFTTrainer(model, arguments(tmp_path, max_steps=-1), tokenizer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tf32": False, "optim": "adamw_8bit"}, "an optimizer of bitsandbytes"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing"),
        ({"dataloader_drop_last": True}, "the last, smaller batch"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}, "the last one"),
        ({"lr_scheduler_type": "cosine_warmup_with_min_lr"}, "trainkit knows linear"),
        ({"data_seed": 3}, "data_seed"),
    ],
)
def test_arguments_without_counterpart_are_refused(changes: Any, words: str, tmp_path: Path) -> None:
    model, tokenizer = made()
    with pytest.raises(ConfigError, match=words):
        DPOTrainer(model, args=arguments(tmp_path, **changes), train_dataset=PAIRS, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_config", "deepspeed", "parallelism_config"])
def test_divided_models_lead_to_sharding(name: str) -> None:
    about = framework("trl").settings[f"TrainingArguments.{name}"].refused or ""
    assert "train.sharding" in about
    assert "docs/scale.md" in about


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("optimizers", (object(), None), "should be one of torch"),
        ("callbacks", [object()], "hookimpl"),
        ("compute_metrics", print, "metrics of the method"),
        ("data_collator", print, "trainkit makes the batches"),
    ],
)
def test_arguments_of_trainers_are_refused_with_what_to_write(name: str, value: Any, words: str, tmp_path: Any) -> None:
    model, tokenizer = made()
    with pytest.raises(ConfigError, match=words):
        DPOTrainer(model, args=arguments(tmp_path), train_dataset=PAIRS, tokenizer=tokenizer, **{name: value})


def test_epochs_become_steps_and_only_what_differs_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = made()
    args = arguments(
        tmp_path, max_steps=-1, num_train_epochs=1.5, gradient_accumulation_steps=1, eval_strategy="epoch",
        save_strategy="epoch", activation_checkpointing=True, warmup_steps=0, max_grad_norm=0, bf16=False,
    )  # fmt: skip
    trainer = DPOTrainer(model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS, tokenizer=tokenizer)
    train = trainer.trainer.config.train
    assert (train.total_steps, train.epochs, train.eval_interval, train.save_interval) == (3, None, 2, 2)
    assert (train.max_grad_norm, train.keep_checkpoints) == (None, 1_000_000)
    told = [line for line in caplog.messages if ": has no effect" in line]
    assert [line.partition(":")[0] for line in told] == ["TrainingArguments.gradient_checkpointing"]


def test_every_argument_has_a_place() -> None:
    table = framework("trl").settings
    known = {path.partition(".")[2] for path in table if path.startswith("TrainingArguments.")}
    own = {"max_length"}
    assert {field.name for field in dataclasses.fields(RewardConfig)} - own <= known
    for trainer in TRAINERS:
        told = {path.partition(".")[2] for path in table if path.startswith(f"{trainer.section}.")}
        assert told == {*inspect.signature(trainer.__init__).parameters} - {"self"}, trainer.section


def test_a_run_resumes_where_it_was_saved(tmp_path: Path) -> None:
    model, tokenizer = made()
    DPOTrainer(
        model, args=arguments(tmp_path, save_strategy="steps", save_steps=2), train_dataset=PAIRS, tokenizer=tokenizer
    ).train()
    model, _ = made()
    longer = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=6, lr_scheduler_type="constant")
    again = DPOTrainer(model, args=longer, train_dataset=PAIRS, tokenizer=tokenizer)
    again.trainer.allow_drift = True
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert len([each for each in again.state.log_history if "loss" in each]) == 2


def test_an_optimizer_and_its_schedule_are_stepped(tmp_path: Path) -> None:
    model, tokenizer = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    trainer = SFTTrainer(
        model, arguments(tmp_path, max_steps=2), train_dataset=Dataset.from_dict({"text": ["ab", "cd"]}),
        tokenizer=tokenizer, dataset_text_field="text", optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()
    assert trainer.optimizer is optimizer or trainer.optimizer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(("optim", "name"), [("adafactor", "adafactor"), ("sgd", "sgd"), ("adamw_torch", "adamw")])
def test_optimizers_are_named(optim: str, name: str, tmp_path: Path) -> None:
    model, tokenizer = made()
    args = arguments(tmp_path, max_steps=2, optim=optim, lr_scheduler_type="cosine_with_restarts")
    data = Dataset.from_dict({"text": ["ab", "cd"]})
    trainer = SFTTrainer(model, args, train_dataset=data, tokenizer=tokenizer, dataset_text_field="text")
    assert trainer.trainer.config.optimizer.name == name
    assert trainer.trainer.config.scheduler.name == "cosine_with_restarts"
    trainer.train()
