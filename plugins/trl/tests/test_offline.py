"""Scripts in the manner of TRL's examples for SFT, DPO and reward modelling: only the word of their imports differs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    Adafactor,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    HfArgumentParser,
    T5Config,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from tables import table
from trainkit.errors import ConfigError, TrainkitError
from trainkit.testing import character_tokenizer
from trainkit_migrate import framework, translate
from trainkit_trl import (
    ConstantLengthDataset,
    DataCollatorForCompletionOnlyLM,
    DpoScriptArguments,
    DPOTrainer,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    ModelConfig,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    RichProgressCallback,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
    set_seed,
    setup_chat_format,
)
from trainkit_trl.extras.dataset_formatting import get_formatting_func_from_dataset

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
    assert trainer.ref_model is trainer.trainer.reference
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


@table(
    "loss_type, smoothing, expected",
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
    """Log-ratios (.5, -1), (-1, .5), KLs 0: chosen 1 - sigmoid(.05), ..., rejected 1 - sigmoid(.1), ..."""
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
    with pytest.raises(ValueError, match=r"logits are of \(2, 4\) tokens, and labels \(2, 3\)"):
        DPOTrainer.get_batch_logps(torch.zeros(2, 4, 5), found["concatenated_labels"])
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
    assert trainer.evaluate()["eval_accuracy"] == 1.0


@pytest.mark.parametrize("adapter", [False, True])
def test_a_reward_model_with_several_labels_has_the_loss_of_trl(
    adapter: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mean of −log σ(rewards of chosen − rewards of rejected) over pairs and labels; pairs may share a prefix."""
    model, tokenizer = made(AutoModelForSequenceClassification, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model.config.num_labels, model.score = 2, torch.nn.Linear(32, 2, bias=False)
    sides = [([1, 2, 3], [1, 4]), ([1, 5], [1, 5, 6, 7])]
    rows = [
        {"input_ids_chosen": good, "attention_mask_chosen": [1] * len(good), "input_ids_rejected": bad,
         "attention_mask_rejected": [1] * len(bad)} for good, bad in sides
    ]  # fmt: skip
    with torch.no_grad():
        rewards = [[model(torch.tensor([ids])).logits[0] for ids in pair] for pair in sides]
    expected = -torch.stack([torch.nn.functional.logsigmoid(good - bad) for good, bad in rewards]).mean()
    args = arguments(tmp_path, RewardConfig, save_strategy="steps", save_steps=4)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="SEQ_CLS") if adapter else None
    trainer = RewardTrainer(model, args, tokenizer=tokenizer, train_dataset=rows, peft_config=lora)
    assert "the model has 2 labels, and the loss is a mean over them" in caplog.text
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert trainer.predict(rows).metrics["test_accuracy"] == 1.0
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert (tmp_path / "out/checkpoint-4" / name).exists()


@pytest.mark.parametrize("shared", [False, True])
def test_a_side_of_a_single_token_is_trained_on(shared: bool, tmp_path: Path) -> None:
    model, tokenizer = made(AutoModelForSequenceClassification, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    sides = [([1], [1, 4]), ([2, 3], [5]), ([6], [7]), ([1, 2, 3], [1, 2, 4])]
    rows = [{"input_ids_chosen": good, "input_ids_rejected": bad} for good, bad in sides]
    with torch.no_grad():
        margins = torch.cat([model(torch.tensor([a])).logits - model(torch.tensor([b])).logits for a, b in sides])
    expected = -torch.nn.functional.logsigmoid(margins).mean()
    args = arguments(tmp_path, RewardConfig, gradient_checkpointing=False)
    trainer = RewardTrainer(model, args, tokenizer=tokenizer, train_dataset=rows)
    trainer.trainer.models.build()
    trainer.trainer.unwrapped.shares_prompts = shared
    batch = trainer.trainer.make_experience(trainer.trainer.pipeline.rows)
    assert trainer.trainer.loss(batch)[0].item() == pytest.approx(expected.item(), abs=1e-6)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), abs=1e-6)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __init__(self, row: Any) -> None:
        self.row = row

    def __iter__(self) -> Any:
        while True:
            yield dict(self.row)


PAIR = {"prompt": "a", "chosen": "cd", "rejected": "ef", "more": 1}


@table(
    "cls, kind, row, given",
    [
        (SFTTrainer, TrainingArguments, {"text": "abc"}, {"dataset_text_field": "text"}),
        (SFTTrainer, TrainingArguments, {"text": "abc"}, {"dataset_text_field": "text", "packing": True}),
        (SFTTrainer, TrainingArguments, {"text": "abc"}, {"formatting_func": lambda rows: rows["text"]}),
        (SFTTrainer, TrainingArguments, {"input_ids": [1, 2, 3]}, {}),
        (DPOTrainer, TrainingArguments, PAIR, {}),
        (ORPOTrainer, ORPOConfig, PAIR, {}),
        (KTOTrainer, KTOConfig, {"prompt": "a", "completion": "b", "label": True}, {}),
    ],
)
def test_a_dataset_may_be_without_end(cls: Any, kind: Any, row: Any, given: Any, tmp_path: Path) -> None:
    model, tokenizer = made()
    data = {"train_dataset": Endless(row), "tokenizer": tokenizer}
    assert cls(model, args=arguments(tmp_path, kind), **data, **given).train().global_step == 4
    with pytest.raises(ValueError, match="a stream, whose length is not known; set max_steps in args"):
        cls(model, args=arguments(tmp_path, kind, max_steps=-1), **data, **given)


def test_a_dataset_of_torch_has_rows_by_their_indices(tmp_path: Path) -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"input_ids": [1, 2, 3 + index]}

    model, tokenizer = made()
    trainer = SFTTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=Rows(), tokenizer=tokenizer)
    assert [row["input_ids"] for row in trainer.trainer.pipeline.rows] == [[1, 2, 3], [1, 2, 4]]
    assert trainer.evaluate(Rows())["eval_loss"] > 0


def test_special_tokens_of_texts_are_those_of_dataset_kwargs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By default EOS ends each text, which is said; `dataset_kwargs` are those of TRL, which adds none."""
    model, tokenizer = made()
    ids, eos = tokenizer.encode("abc"), tokenizer.eos_token_id
    data = {"train_dataset": [{"text": "abc"}] * 4, "tokenizer": tokenizer, "dataset_text_field": "text"}

    def trained(**given: Any) -> Any:
        caplog.clear()
        trainer = SFTTrainer(model, arguments(tmp_path), **{**data, **given})
        rows = list(trainer.trainer.pipeline.rows)
        sequences = trainer.trainer.make_experience(rows[:1])
        return sequences.input_ids[0, : int(sequences.lengths[0])].tolist()

    assert trained() == [*ids, eos]
    assert caplog.text.count("EOS is added to the end of each text") == 1
    assert trained(dataset_kwargs={"add_special_tokens": False}) == ids
    assert "EOS is added" not in caplog.text
    packed = {"packing": True, "max_seq_length": 32}
    assert trained(**packed) == [*ids, eos] * 4
    assert trained(**packed, dataset_kwargs={"append_concat_token": False}) == ids * 4
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)}] * 4
    whole = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": None}
    assert trained(**whole, train_dataset=rows) == ids
    for wrong, words in (
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "has no input_ids"),
        ({"dataset_kwargs": {"odd": 1}}, "dataset_kwargs has odd; it may have add_special_tokens, append"),
        ({"dataset_kwargs": {"add_special_tokens": False},
          "data_collator": DataCollatorForCompletionOnlyLM("b", tokenizer=tokenizer)}, "leave out data_collator"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            trained(**wrong)


def test_an_encoder_decoder_is_trained_on_token_ids(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(LETTERS)
    config = T5Config(
        d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2, vocab_size=len(tokenizer), pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config)
    trainer = IterativeSFTTrainer(model, arguments(tmp_path, max_steps=30), tokenizer)
    read, written = ([torch.tensor(tokenizer.encode(text))] * 4 for text in ("ab", "cde"))
    given = {"input_ids": read, "attention_mask": [torch.ones_like(each) for each in read], "labels": written}
    first = trainer.step(**given)["loss/nll"]
    for _ in range(20):
        last = trainer.step(**given)["loss/nll"]
    assert last < 0.5 * first
    with pytest.raises(ValueError, match="is what an encoder-decoder reads; give labels too"):
        trainer.step(input_ids=read)


def test_a_model_is_loaded_with_the_type_of_its_weights(tmp_path: Path) -> None:
    model, tokenizer = made()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for given, expected in (("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)):
        trainer = DPOTrainer(
            str(tmp_path / "model"), args=arguments(tmp_path), train_dataset=PAIRS, tokenizer=tokenizer,
            model_init_kwargs={"torch_dtype": given},
        )  # fmt: skip
        assert trainer.model.dtype == expected


def test_every_argument_of_transformers_that_trl_knew_is_taken() -> None:
    """Those that transformers no longer has are in the table too: each is translated, refused or without effect."""
    known = {path.partition(".")[2] for path in framework("trl").settings if path.startswith("TrainingArguments.")}
    newer = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # than the oldest transformers
    assert known - newer <= {field.name for field in fields(RewardConfig)}
    assert RewardConfig("out", report_to="none", sharded_ddp="", past_index=-1).fp16_opt_level == "O1"


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


@table(
    "changes, words",
    [
        ({"tf32": False, "optim": "adamw_8bit"}, "as an object an optimizer of another library, such as bitsandbytes"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing"),
        ({"lr_scheduler_type": "cosine_warmup_with_min_lr"}, "trainkit knows constant, linear"),
        ({"data_seed": 3}, "data_seed"),
    ],
)
def test_arguments_without_counterpart_are_refused(changes: Any, words: str, tmp_path: Path) -> None:
    model, tokenizer = made()
    with pytest.raises(ConfigError, match=words):
        DPOTrainer(model, args=arguments(tmp_path, **changes), train_dataset=PAIRS, tokenizer=tokenizer)


def test_sharding_is_taken_over_with_the_launch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = made()
    args = arguments(tmp_path, fsdp=True)
    trainer = DPOTrainer(model, args=args, train_dataset=PAIRS, tokenizer=tokenizer)
    assert trainer.trainer.config.train.sharding == "fsdp2"
    assert any("docs/distributed.md" in line for line in caplog.messages)
    args = arguments(tmp_path, fsdp=True, fsdp_config={"cpu_ram_efficient_loading": True})
    with pytest.raises(ConfigError, match=r"given cpu_ram_efficient_loading.*train\.sharding: fsdp2"):
        DPOTrainer(model, args=args, train_dataset=PAIRS, tokenizer=tokenizer)


@table(
    "name, value, words",
    [
        ("optimizers", (object(), None), "should be one of torch"),
        ("callbacks", [object()], "hookimpl"),
        ("compute_metrics", print, "metrics of the method"),
        ("data_collator", print, "trainkit makes the batches"),
    ],
)
def test_arguments_of_trainers_are_refused_with_what_to_write(name: str, value: Any, words: str, tmp_path: Any) -> None:
    model, tokenizer = made()
    with pytest.raises(TrainkitError, match=words):
        DPOTrainer(model, args=arguments(tmp_path), train_dataset=PAIRS, tokenizer=tokenizer, **{name: value})


def test_epochs_become_steps_and_only_what_differs_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = made()
    known = {field.name for field in fields(TrainingArguments)}
    recomputing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    args = arguments(
        tmp_path, max_steps=-1, num_train_epochs=1.5, gradient_accumulation_steps=1, eval_strategy="epoch",
        save_strategy="epoch", warmup_steps=0, max_grad_norm=0, bf16=False, **{recomputing: True},
    )  # fmt: skip
    trainer = DPOTrainer(model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS, tokenizer=tokenizer)
    train = trainer.trainer.config.train
    assert (train.total_steps, train.epochs, train.eval_interval, train.save_interval) == (3, None, 2, 2)
    assert (train.max_grad_norm, train.keep_checkpoints) == (None, 1_000_000)
    assert train.gradient_checkpointing
    assert [line for line in caplog.messages if ": has no effect" in line] == []


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
    saving = arguments(tmp_path, save_strategy="steps", save_steps=2)
    first = DPOTrainer(model, args=saving, train_dataset=PAIRS, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="has no checkpoint to resume from; leave resume_from_checkpoint out"):
        first.train(resume_from_checkpoint=True)
    first.train()
    first.save_state()
    for directory in (tmp_path / "out", tmp_path / "out" / "checkpoint-4"):
        state = TrainerState.load_from_json(str(directory / "trainer_state.json"))
        assert (state.global_step, state.max_steps, state.num_train_epochs) == (4, 4, 2)  # of 8 rows, 4 at a time
        assert state.log_history[:4] == first.state.log_history[:4]
    model, _ = made()
    longer = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=6, lr_scheduler_type="constant")
    again = DPOTrainer(model, args=longer, train_dataset=PAIRS, tokenizer=tokenizer)
    again.trainer.run.allow_drift = True
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert len([each for each in again.state.log_history if "loss" in each]) == 6
    assert again.state.log_history[:4] == first.state.log_history[:4]


@table("adapter, decayed", [(False, None), (True, ["lora_A", "lora_B"])])
def test_weight_decay_spares_what_it_spares_in_transformers(adapter: bool, decayed: Any, tmp_path: Path) -> None:
    model, tokenizer = made()
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True) if adapter else None
    args = arguments(tmp_path, weight_decay=0.1)
    trainer = DPOTrainer(model, args=args, train_dataset=PAIRS, tokenizer=tokenizer, peft_config=lora)
    held = {id(each) for group in trainer.optimizer.param_groups if group["weight_decay"] for each in group["params"]}
    names = {name for name, each in trainer.model.named_parameters() if id(each) in held}
    if adapter:
        assert {part for name in names for part in decayed if part in name} == {*decayed}
        assert len(trainer.optimizer.param_groups) == 1
    else:
        every = {name for name, _ in trainer.model.named_parameters()}  # without the head, whose weights are tied
        assert names == every & {*Trainer.get_decay_parameter_names(None, trainer.model)}  # type: ignore[arg-type]
        assert 0 < len(names) < len(every)


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


@table("optim, name", [("adafactor", "Adafactor"), ("sgd", "SGD"), ("adamw_torch", "AdamW")])
def test_optimizers_are_those_of_transformers(optim: str, name: str, tmp_path: Path) -> None:
    model, tokenizer = made()
    args = arguments(tmp_path, max_steps=2, optim=optim, lr_scheduler_type="cosine_with_restarts")
    data = Dataset.from_dict({"text": ["ab", "cd"]})
    trainer = SFTTrainer(model, args, train_dataset=data, tokenizer=tokenizer, dataset_text_field="text")
    inner = trainer.optimizer.optimizer
    assert (type(inner).__name__, isinstance(inner, Adafactor)) == (name, optim == "adafactor")
    assert trainer.trainer.config.scheduler.name == "cosine_with_restarts"
    trainer.train()


@pytest.mark.daily(adapter=(False,))
@pytest.mark.parametrize("adapter", [False, True])
def test_the_best_evaluation_is_loaded_at_the_end(adapter: bool, tmp_path: Path) -> None:
    """Overfitting to texts that the held-out ones contradict, the first evaluation after a step is the best."""
    model, tokenizer = made()
    learnt, contrary = (Dataset.from_dict({"text": [text] * 8}) for text in ("abab", "baba"))
    args = arguments(
        tmp_path, max_steps=40, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=20,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    peft = {"peft_config": LoraConfig(r=4, target_modules=["c_fc"], modules_to_save=["wte"])} if adapter else {}
    trainer = SFTTrainer(model, args, train_dataset=learnt, eval_dataset=contrary, tokenizer=tokenizer,
                         dataset_text_field="text", **peft)  # fmt: skip
    trainer.train()
    losses = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    assert losses[-1] > min(losses) + 0.005
    assert trainer.state.best_metric == min(losses)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "best")
    trainer.trainer.config = trainer.trainer.config.evolve(train={"save_best": False})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-4)
    assert trainer.trainer.config.train.keep_checkpoints == 1_000_000


def test_which_evaluation_is_the_best_is_that_of_transformers() -> None:
    """Losses are better if they are lower, other metrics if they are higher, unless ``greater_is_better`` says so."""
    for given, expected in (
        ({}, {"metric": "eval/loss/total", "mode": "min"}),
        ({"metric_for_best_model": "rewards/accuracies"}, {"metric": "eval/rewards/accuracies", "mode": "max"}),
        (
            {"metric_for_best_model": "eval_logps/chosen", "greater_is_better": False},
            {"metric": "eval/logps/chosen", "mode": "min"},
        ),
    ):
        fields = {"TrainingArguments": {"load_best_model_at_end": True, **given}, "DPOTrainer": {}}
        assert translate("trl", fields, rows=8).config["train"]["save_best"] == expected
    fields = {"TrainingArguments": {"save_strategy": "best", "max_steps": 2}, "DPOTrainer": {}}
    assert translate("trl", fields).config["train"]["save_best"]["mode"] == "min"


def test_the_dropout_of_an_adapter_is_switched_off_by_dpo(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = made()
    config = LoraConfig(r=4, lora_dropout=0.05, task_type="CAUSAL_LM", fan_in_fan_out=True)
    given = {"args": arguments(tmp_path), "train_dataset": PAIRS, "tokenizer": tokenizer, "peft_config": config}
    trainer = DPOTrainer(model, **given)
    assert "lora_dropout is 0.05, and disable_dropout switches it off" in caplog.text
    assert trainer.trainer.config.model.peft_config.get("lora_dropout", 0.0) == 0.0
    assert config.lora_dropout == 0.05, "the object of the script stays as it is"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_of_the_model_is_merged_by_dpo_and_trained_by_sft(tmp_path: Path) -> None:
    model, tokenizer = made()
    adapted = get_peft_model(
        model, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True)
    )
    new = LoraConfig(r=4, task_type="CAUSAL_LM", fan_in_fan_out=True)
    ids = torch.tensor([tokenizer.encode("abc")])
    before = adapted.eval()(ids).logits
    data = Dataset.from_dict({"text": ["ab"]})
    sft = SFTTrainer(adapted, arguments(tmp_path), train_dataset=data, tokenizer=tokenizer, dataset_text_field="text",
                     peft_config=new)  # fmt: skip
    assert {p.shape[0] for n, p in sft.model.named_parameters() if "lora_A" in n} == {2}
    dpo = DPOTrainer(adapted, args=arguments(tmp_path), train_dataset=PAIRS, tokenizer=tokenizer, peft_config=new)
    assert {p.shape[0] for n, p in dpo.model.named_parameters() if "lora_A" in n} == {4}
    torch.testing.assert_close(dpo.model.eval()(ids).logits, before)


def test_predictions_are_shares_of_both_sides(tmp_path: Path) -> None:
    model, tokenizer = made(AutoModelForSequenceClassification)
    row = {"input_ids_chosen": tokenizer.encode("ab"), "input_ids_rejected": tokenizer.encode("cde"), "margin": [0.5]}
    data = Dataset.from_list([row] * 5)
    args = arguments(tmp_path, RewardConfig, per_device_eval_batch_size=2)
    trainer = RewardTrainer(model, args, tokenizer=tokenizer, train_dataset=data)
    found = trainer.predict(data)
    assert found.predictions.shape == (5, 2)
    scores = [model.eval()(torch.tensor([row[name]])).logits for name in list(row)[:2]]
    expected = torch.cat(scores, dim=1).softmax(1)
    torch.testing.assert_close(torch.tensor(found.predictions[:1]), expected, atol=1e-4, rtol=0)
    assert found.metrics["test_accuracy"] == float(expected[0, 0] > expected[0, 1])
    batch = trainer.data_collator([{**row, **{f"attention_mask_{side}": [1] * len(row[f"input_ids_{side}"])
                                              for side in ("chosen", "rejected")}}])  # fmt: skip
    assert trainer.compute_loss(model, batch).isfinite()


@table("form", ["texts", "ids", "stream"])
def test_with_packing_a_long_text_becomes_several_rows_and_no_token_is_lost(form: str, tmp_path: Path) -> None:
    model, tokenizer = made()
    texts = [("abcdefgh: #" * 17)[start : start + 180] for start in range(4)] + ["ab"]
    whole = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    given = {"ids": {"input_ids": whole}}.get(form, {"text": texts})
    rows = Dataset.from_dict(given)
    rows = rows.to_iterable_dataset() if form == "stream" else rows
    named = {} if form == "ids" else {"dataset_text_field": "text"}
    args = arguments(tmp_path, max_steps=4)
    trainer = SFTTrainer(model, args, train_dataset=rows, tokenizer=tokenizer, packing=True, max_seq_length=16, **named)
    if form == "stream":
        assert trainer.train().global_step == 4
        return
    found = trainer.trainer
    packs = found.make_experience([*found.pipeline.rows])
    assert packs.input_ids.size(1) <= 16
    assert len(packs) == 49  # 12 of each text, of 15 new tokens but for the first token, and "ab" with its EOS
    trained = sorted(packs.input_ids[packs.response_mask].tolist())
    assert trained == sorted(token for ids in whole for token in ids[1:])


def test_rows_of_one_length_know_their_epochs(tmp_path: Path) -> None:
    """Their rows are not packed again; without max_steps an endless dataset ends after its epoch."""
    model, tokenizer = made()
    rows = ConstantLengthDataset(tokenizer, [{"text": "abcdefg"}] * 4, dataset_text_field="text", infinite=True,
                                 seq_length=8)  # fmt: skip
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=2, save_strategy="epoch", dataloader_drop_last=True)
    trainer = SFTTrainer(model, args, train_dataset=rows, tokenizer=tokenizer, packing=True)
    assert len(rows) == 4
    assert not rows.infinite
    assert trainer.train_dataset is rows
    assert not trainer.trainer.config.method.packing
    assert trainer.train().global_step == 2
    SFTTrainer(model, arguments(tmp_path), train_dataset=rows, tokenizer=tokenizer, packing=True)
    assert rows.infinite


def test_conversations_are_texts_by_the_template_of_the_tokenizer() -> None:
    tokenizer = character_tokenizer("ab<|im_start>d\nuserti c")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name in ("messages", "conversations"):
        data = Dataset.from_dict({name: [turns, turns]})
        function = get_formatting_func_from_dataset(data, tokenizer)
        assert function is not None
        assert (function(data[0]), function(data[0:2])) == ("uaab", ["uaab"] * 2)
    data = Dataset.from_list([{"prompt": "a", "completion": "b"}])
    function = get_formatting_func_from_dataset(data, tokenizer)
    assert function is not None
    assert (function(data[0]), function(data[0:1])) == ("uaab", ["uaab"])
    assert get_formatting_func_from_dataset(Dataset.from_dict({"text": ["a"]}), tokenizer) is None


def test_a_chat_format_gets_tokens_of_the_model() -> None:
    model, tokenizer = made()
    before = len(tokenizer)
    setup_chat_format(model, tokenizer, resize_to_multiple_of=16)
    assert len(tokenizer) == before + 2
    assert model.get_input_embeddings().weight.shape[0] == 16 * -(-len(tokenizer) // 16)
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected
    with pytest.raises(ValueError, match="format should be 'chatml'; given 'alpaca'"):
        setup_chat_format(model, tokenizer, format="alpaca")  # type: ignore[arg-type]


def test_arguments_of_the_command_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("beta: 0.5\nlora_target_modules: [all-linear]\nuse_peft: true\n", encoding="utf-8")
    parser = TrlParser((DpoScriptArguments, ModelConfig))
    own, config = parser.parse_args_and_config(["--config", str(file), "--beta", "0.2"])
    assert (own.beta, own.max_length, config.lora_target_modules) == (0.2, 512, "all-linear")
    adapter = get_peft_config(config)
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (16, 32, 0.05)
    assert get_quantization_config(config) is None
    assert get_peft_config(ModelConfig()) is None
    (only,) = TrlParser(ModelConfig).parse_args_and_config(["--lora_r", "4"])
    assert only.lora_r == 4
    for content, words in (("beat: 1", "has beat; arguments are"), ("- 1", "should be a mapping")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            TrlParser(DpoScriptArguments).parse_args_and_config(["--config", str(file)])
    with pytest.raises(ValueError, match="choose one"):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)


@table("packing, eval_packing, long", [(False, True, 3), (True, False, 1), (True, None, 3), (False, None, 1)])
def test_held_out_texts_are_packed_as_they_are_asked_to_be(
    packing: bool, eval_packing: bool | None, long: int, tmp_path: Path
) -> None:
    """A text of 20 tokens and EOS, of which 8 fit, becomes rows of 8, 8 and 7 with an overlap of 1, or is truncated."""
    model, tokenizer = made()
    given: list[Any] = []

    def text_of(row: Any) -> Any:
        given.append(row["text"])
        return row["text"]

    data = Dataset.from_dict({"text": ["ab"]}), Dataset.from_dict({"text": ["abcdefgh" * 2 + "abcd"]})
    trainer = SFTTrainer(
        model, arguments(tmp_path), train_dataset=data[0], eval_dataset=data[1], tokenizer=tokenizer,
        formatting_func=text_of, packing=packing, eval_packing=eval_packing, max_seq_length=8,
    )  # fmt: skip
    assert [type(each) for each in given] == [str if each else list for each in (packing, long == 3)]
    rows = trainer.trainer.make_experience(trainer.trainer.eval_samples)
    assert rows.attention_mask.sum(1).tolist() == ([8, 8, 7] if long == 3 else [8])
    assert int(rows.response_mask.sum()) == (20 if long == 3 else 7)  # every token after the first
    assert trainer.evaluate()["eval_loss"] > 0
    again = trainer.evaluate(data[1])["eval_loss"]
    assert again == trainer.evaluate()["eval_loss"]


def test_attributes_that_are_not_there_say_what_there_is(tmp_path: Path) -> None:
    model, tokenizer = made()
    trainer: Any = DPOTrainer(model, args=arguments(tmp_path), train_dataset=PAIRS, tokenizer=tokenizer)
    for name, said in (
        ("acelerator", "did you mean 'accelerator'?"),
        ("tokenize_row", "trainkit makes the batches"),
        ("hooks", "trainer.trainer.hooks is it"),
        ("_tag_names", "private names of TRL are not there"),
        ("quite_something", "it has add_callback, compute_loss, concatenated_forward, "),
    ):
        assert not hasattr(trainer, name)
        with pytest.raises(AttributeError, match=rf"DPOTrainer has no attribute '{name}': {re.escape(said)}"):
            getattr(trainer, name)
    for name, said in (("kto_loss", "override loss of trainkit_kto"), ("tokenize_row", "trainkit makes the batches")):
        with pytest.raises(AttributeError, match=rf"KTOTrainer has no attribute '{name}': {said}"):
            getattr(KTOTrainer, name)


def test_the_display_of_progress_is_a_callback_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(RichProgressCallback(), TrainerCallback)
    assert "RichProgressCallback has no effect" in caplog.text
