"""ORPO, CPO and KTO in the manner of TRL 0.8's examples, and their losses beside its formulas."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    HfArgumentParser,
    T5Config,
    TrainingArguments,
)

from tables import table
from trainkit.errors import ConfigError
from trainkit.testing import character_tokenizer, tiny_t5
from trainkit_migrate import framework
from trainkit_trl import (
    CPOConfig,
    CPOTrainer,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    set_seed,
)

PAIRS = Dataset.from_dict({"prompt": ["a", "b"] * 4, "chosen": ["cd", "efg"] * 4, "rejected": ["ef", "c"] * 4})
LABELLED = Dataset.from_dict(
    {"prompt": ["a", "a", "b", "b"] * 4, "completion": ["cd", "ef", "ef", "cd"] * 4, "label": [True, False] * 8}
)
TRAINERS = {ORPOTrainer: ORPOConfig, CPOTrainer: CPOConfig, KTOTrainer: KTOConfig}


def made(**fields: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    set_seed(0)
    tokenizer = character_tokenizer("abcdefgh")
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=len(tokenizer), n_positions=32,
        pad_token_id=tokenizer.pad_token_id, **fields,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), tokenizer


def arguments(kind: Any, tmp_path: Path, *more: str) -> Any:
    """Return arguments as they are read from a command line."""
    given = ["--output_dir", str(tmp_path / "out"), "--per_device_train_batch_size", "4", "--learning_rate", "1e-2"]
    given += ["--max_steps", "30", "--report_to", "none", "--save_strategy", "no", *more]
    return HfArgumentParser(kind).parse_args_into_dataclasses(given)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer_class", "more", "settings"),
    [
        (ORPOTrainer, ["--beta", "0.5"], {"beta": 0.5}),
        (CPOTrainer, ["--label_smoothing", "0.1"], {"loss_type": "sigmoid", "label_smoothing": 0.1}),
        (CPOTrainer, ["--loss_type", "ipo"], {"loss_type": "ipo", "cpo_alpha": None}),
    ],
)
def test_pairs_are_learnt(trainer_class: Any, more: list[str], settings: dict[str, Any], tmp_path: Path) -> None:
    model, tokenizer = made()
    args = arguments(TRAINERS[trainer_class], tmp_path, "--max_length", "16", "--max_prompt_length", "8", *more)
    trainer = trainer_class(model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS, tokenizer=tokenizer)
    config = trainer.trainer.config
    assert {name: getattr(config.method, name) for name in settings} == settings
    assert (config.train.seq_length, config.train.batch_size, config.model.disable_dropout) == (16, 4, True)
    before = trainer.evaluate()
    assert trainer.train().global_step == 30
    after = trainer.evaluate()
    assert after["eval_rewards/accuracies"] == 1.0
    assert after["eval_loss"] < before["eval_loss"]
    trainer.save_model()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.n_layer == 1


def test_the_loss_of_orpo_is_that_of_trl_in_float64(tmp_path: Path) -> None:
    """β log σ of the log odds ratio, by the formula of TRL 0.8.6, which is subtracted from the likelihood."""
    model, tokenizer = made()
    args = arguments(ORPOConfig, tmp_path, "--beta", "0.2")
    trainer = ORPOTrainer(model, args=args, train_dataset=PAIRS, tokenizer=tokenizer)
    chosen, rejected = torch.tensor([[-1.0, -0.1, -3.0], [-2.0, -0.5, -0.01]], dtype=torch.float64)
    losses, good, bad, ratio, odds = trainer.odds_ratio_loss(chosen, rejected)
    log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    expected = torch.sigmoid(log_odds).log()
    torch.testing.assert_close(losses, 0.2 * expected, rtol=1e-9, atol=1e-12)
    assert (ratio, odds) == pytest.approx((expected.mean().item(), log_odds.mean().item()))
    torch.testing.assert_close(torch.stack([good, bad]), 0.2 * torch.stack([chosen, rejected]))


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
def test_the_losses_of_cpo_are_those_of_trl(loss_type: Any, smoothing: float, expected: Any, tmp_path: Path) -> None:
    model, tokenizer = made()
    args = CPOConfig(str(tmp_path), loss_type=loss_type, label_smoothing=smoothing, max_steps=1, report_to="none")
    trainer = CPOTrainer(model, args, train_dataset=PAIRS, tokenizer=tokenizer)
    chosen = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    losses, good, bad = trainer.cpo_loss(chosen, torch.zeros_like(chosen))
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(good, 0.1 * chosen)
    assert not bad.any()


@table("trainer_class", [ORPOTrainer, CPOTrainer])
def test_the_loss_of_a_batch_has_the_metrics_of_trl(trainer_class: Any, tmp_path: Path) -> None:
    model, tokenizer = made()
    args = arguments(TRAINERS[trainer_class], tmp_path)
    trainer = trainer_class(model, args=args, train_dataset=PAIRS, tokenizer=tokenizer)
    batch = next(trainer.get_train_dataloader())
    loss, found = trainer.get_batch_loss_metrics(model, batch)
    both = trainer.concatenated_inputs(batch)
    logits = model(both["concatenated_input_ids"], attention_mask=both["concatenated_attention_mask"]).logits
    sums, means = (
        trainer.get_batch_logps(logits, both["concatenated_labels"], average).detach().chunk(2)
        for average in (False, True)
    )
    preference = -trainer.odds_ratio_loss(*means)[0] if trainer_class is ORPOTrainer else trainer.cpo_loss(*sums)[0]
    torch.testing.assert_close(found["nll_loss"], -means[0].mean())
    torch.testing.assert_close(loss.detach(), (preference - means[0]).mean())
    names = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "nll_loss"}
    assert names <= found.keys()
    assert trainer.compute_loss(model, batch).item() == pytest.approx(loss.item())
    held_out = trainer.evaluation_loop([batch], "").metrics
    assert held_out["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


@table("trainer_class, t5", [(DPOTrainer, False), (ORPOTrainer, False), (CPOTrainer, False), (DPOTrainer, True)])
def test_the_means_of_logits_are_logged_as_in_trl(trainer_class: Any, t5: bool, tmp_path: Path) -> None:
    """They are means over all tokens and the vocabulary; those of padding, which TRL has, do not count."""
    model, tokenizer = made()
    if t5:
        fields = {name: value for name, value in tiny_t5(len(tokenizer)).items() if name != "model_type"}
        model = AutoModelForSeq2SeqLM.from_config(T5Config(**fields))
    kind = TRAINERS.get(trainer_class, TrainingArguments)
    args = arguments(kind, tmp_path, "--max_steps", "1", "--logging_steps", "1", "--per_device_train_batch_size", "8")
    trainer = trainer_class(model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS, tokenizer=tokenizer)
    expected = {}
    for side in ("chosen", "rejected"):
        texts = [(tokenizer.encode(row["prompt"]), [*tokenizer.encode(row[side]), tokenizer.eos_token_id])
                 for row in PAIRS]  # fmt: skip
        logits = []
        for prompt, output in texts:
            ids = torch.tensor([prompt if t5 else prompt + output])
            labels = {"labels": torch.tensor([output])} if t5 else {}
            with torch.no_grad():
                logits.append(trainer.model(input_ids=ids, **labels).logits.flatten(0, 1))
        expected[f"eval_logits/{side}"] = torch.cat(logits).mean().item()
    found = trainer.evaluate()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    trainer.train()
    logged = next(each for each in trainer.state.log_history if "logits/chosen" in each)
    assert logged["logits/rejected"] == pytest.approx(expected["eval_logits/rejected"], rel=1e-4, abs=1e-6)


def test_kto_learns_from_labels(tmp_path: Path) -> None:
    model, tokenizer = made()
    args = arguments(KTOConfig, tmp_path, "--desirable_weight", "1.5", "--beta", "0.5")
    reference, _ = made()
    trainer = KTOTrainer(model, reference, args, LABELLED, LABELLED, tokenizer)
    method = trainer.trainer.config.method
    assert (method.name, method.beta, method.desirable_weight, method.undesirable_weight) == ("kto", 0.5, 1.5, 1.0)
    assert trainer.trainer.config.model.disable_dropout
    assert trainer.ref_model is trainer.trainer.reference
    trainer.train()
    assert trainer.evaluate()["eval_rewards/accuracies"] == 1.0
    with pytest.raises(ValueError, match="args should be a KTOConfig"):
        KTOTrainer(model, args=TrainingArguments(str(tmp_path)), train_dataset=LABELLED, tokenizer=tokenizer)  # type: ignore[arg-type]


def test_the_metrics_of_kto_have_the_names_and_the_margin_of_trl(tmp_path: Path) -> None:
    model, tokenizer = made()
    more = ["--max_steps", "1", "--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    args = arguments(KTOConfig, tmp_path, *more)
    trainer = KTOTrainer(
        model, args=args, train_dataset=LABELLED, eval_dataset=LABELLED, tokenizer=tokenizer
    )  # fmt: skip
    trainer.train()
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
    for split in ("train", "eval"):
        line = next(each for each in trainer.state.log_history if f"{split}/kl" in each)
        assert {f"{split}/{name}" for name in names} <= line.keys()
        margin = line[f"{split}/rewards/chosen"] - line[f"{split}/rewards/rejected"]
        assert line[f"{split}/rewards/margins"] == pytest.approx(margin)
    found = trainer.evaluate()
    margin = found["eval_rewards/chosen"] - found["eval_rewards/rejected"]
    assert found["eval_rewards/margins"] == pytest.approx(margin)


def test_dropout_of_an_adapter_is_switched_off_as_in_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = made()
    adapter = LoraConfig(r=2, lora_dropout=0.5, target_modules=["c_attn"], fan_in_fan_out=True)
    args = arguments(ORPOConfig, tmp_path, "--max_steps", "2")
    trainer = ORPOTrainer(model, args=args, train_dataset=PAIRS, tokenizer=tokenizer, peft_config=adapter)
    trainer.train()
    assert {module.p for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    assert any("lora_A" in name for name, _ in trainer.model.named_parameters())
    assert "disable_dropout switches it off" in caplog.text


@table("trainer_class", [ORPOTrainer, KTOTrainer])
def test_evaluations_sample_responses_to_held_out_prompts(
    trainer_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = made()
    data = LABELLED if trainer_class is KTOTrainer else PAIRS
    more = ["--generate_during_eval", "true", "--per_device_eval_batch_size", "2", "--max_steps", "1"]
    args = arguments(TRAINERS[trainer_class], tmp_path, *more)
    trainer = trainer_class(model, args=args, train_dataset=data, eval_dataset=data, tokenizer=tokenizer)
    assert "not of the reference" in caplog.text
    assert trainer.evaluate()["eval_loss"] > 0
    rows = [
        json.loads(line) for line in next((tmp_path / "out").rglob("samples.jsonl")).read_text("utf-8").splitlines()
    ]
    assert [row["prompt"] for row in rows] == [*dict.fromkeys(row["prompt"] for row in data)][:2]


def test_a_loss_that_trl_refuses_is_refused(tmp_path: Path) -> None:
    model, tokenizer = made()
    args = CPOConfig(str(tmp_path), max_steps=1, report_to="none", loss_type="kto_pair")
    with pytest.raises(ConfigError, match="write sigmoid"):
        CPOTrainer(model, args=args, train_dataset=PAIRS, tokenizer=tokenizer)


def test_every_argument_and_field_has_a_place() -> None:
    table = framework("trl").settings

    def told(section: str) -> set[str]:
        return {path.partition(".")[2] for path in table if path.startswith(f"{section}.")}

    for trainer_class, config_class in TRAINERS.items():
        assert told(trainer_class.section) == {*inspect.signature(trainer_class.__init__).parameters} - {"self"}
        fields = {field.name for field in dataclasses.fields(config_class)}
        assert told(config_class.__name__) == fields - told("TrainingArguments")
