"""Models with several adapters: one is trained, and one, or the model without any, is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, TrainingArguments

from tables import table
from trainkit import Sequences
from trainkit.errors import ConfigError
from trainkit.functional import masked_sum
from trainkit.testing import character_tokenizer
from trainkit_trl import DPOTrainer, KTOConfig, KTOTrainer, set_seed

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
PAIRS = [{"prompt": "a", "chosen": "cd", "rejected": "ef"}, {"prompt": "b", "chosen": "e", "rejected": "fg"}] * 4
LABELLED = [{"prompt": p, "completion": c, "label": x} for p, c, x in (("a", "cd", True), ("b", "e", False))] * 4


def adapted(*names: str, integrated: bool = False) -> tuple[Any, Any]:
    """Return a model with adapters that change its outputs, the first of which is active, and its tokenizer."""
    set_seed(0)
    tokenizer = character_tokenizer("abcdefgh")
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=len(tokenizer), n_positions=32,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    for name in names:
        if integrated:
            model.add_adapter(lora, name)
        elif isinstance(model, PeftModel):
            model.add_adapter(name, lora)
        else:
            model = get_peft_model(model, lora, adapter_name=name)
    model.set_adapter(names[0])
    return model, tokenizer


def logps(model: Any, sequences: Any) -> torch.Tensor:
    """Return the sum of log π over the response tokens of each row, from the logits of a model of peft."""
    ids, chosen = sequences.input_ids, sequences.response_mask
    with torch.no_grad():
        logs = model(ids, attention_mask=sequences.attention_mask).logits[:, :-1].log_softmax(-1)
    picked = torch.zeros_like(chosen, dtype=logs.dtype)
    picked[:, 1:] = logs.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return masked_sum(picked, chosen, dim=1)


def of_adapter(model: Any, name: str | None, sequences: Any) -> torch.Tensor:
    """Return log π of a model of peft with another adapter active, or with none."""
    if name is None:
        with model.disable_adapter():
            return logps(model, sequences)
    before = model.active_adapter
    model.set_adapter(name)
    found = logps(model, sequences)
    model.set_adapter(before)
    return found


def trainer_of(kind: Any, model: Any, tokenizer: Any, tmp_path: Path, **given: Any) -> Any:
    usual: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "report_to": "none", "save_strategy": "no",
    }  # fmt: skip
    args = TrainingArguments(**usual) if kind is DPOTrainer else KTOConfig(**usual)
    return kind(model, args=args, train_dataset=PAIRS if kind is DPOTrainer else LABELLED, tokenizer=tokenizer, **given)


@table(
    "kind, trained, reference",
    [(DPOTrainer, "own", "other"), (DPOTrainer, "own", None), (DPOTrainer, None, None), (KTOTrainer, "own", "other")],
)
def test_the_reference_is_the_adapter_that_is_named(
    kind: Any, trained: str | None, reference: str | None, tmp_path: Path
) -> None:
    model, tokenizer = adapted("third", "own", "other") if trained else adapted("own", "other", "third")
    rows = Sequences.from_lists([tokenizer.encode("ab"), tokenizer.encode("c")], [tokenizer.encode("cd"), [1, 2, 3]])
    expected, policy = of_adapter(model, reference, rows), of_adapter(model, "own", rows)
    assert not torch.allclose(expected, policy, atol=1e-3)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer = trainer_of(
        kind, model, tokenizer, tmp_path, model_adapter_name=trained, ref_adapter_name=reference
    )  # fmt: skip
    trainer.trainer.models.build()

    def of_reference() -> torch.Tensor:
        found: torch.Tensor = masked_sum(trainer.trainer.reference(rows).logprobs, rows.response_mask, dim=1)
        return found

    torch.testing.assert_close(of_reference(), expected, atol=1e-5, rtol=0)
    trainer.train()
    torch.testing.assert_close(of_reference(), expected, atol=1e-5, rtol=0)
    after = dict(model.named_parameters())
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if ".own." in name}
    assert model.active_adapter == "own"
    trainer.save_model(str(tmp_path / "saved"))
    base, _ = adapted("own", "other", "third")
    base.load_adapter(str(tmp_path / "saved"), "saved")
    torch.testing.assert_close(of_adapter(base, "saved", rows), of_adapter(model, "own", rows))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_adapters_of_a_model_of_transformers_are_named_too(tmp_path: Path) -> None:
    model, tokenizer = adapted("default", "other", integrated=True)
    rows = Sequences.from_lists([tokenizer.encode("ab")], [tokenizer.encode("cd")])
    model.set_adapter("other")
    expected = logps(model, rows)
    trainer = trainer_of(DPOTrainer, model, tokenizer, tmp_path, ref_adapter_name="other")
    trainer.trainer.models.build()
    assert model.active_adapters() == ["default"]
    found = masked_sum(trainer.trainer.reference(rows).logprobs, rows.response_mask, dim=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@table(
    "names, given, said",
    [
        (
            ("one", "two"),
            {"ref_adapter_name": "two"},
            "'default', and the model has the adapters one, two",
        ),
        (
            ("one", "two"),
            {"model_adapter_name": "one", "ref_adapter_name": "one"},
            "load the adapter twice",
        ),
        (("one",), {"model_adapter_name": "train"}, r"model.load_adapter\(path, adapter_name='train'\)"),
    ],
)
def test_names_of_adapters_that_do_not_fit_are_refused(
    names: tuple[str, ...], given: dict[str, str], said: str, tmp_path: Path
) -> None:
    model, tokenizer = adapted(*names)
    with pytest.raises(ConfigError, match=said):
        trainer_of(DPOTrainer, model, tokenizer, tmp_path, **given)


def test_another_reference_makes_the_name_of_an_adapter_meaningless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = adapted("default", "other")
    other, _ = adapted("default")
    trainer = trainer_of(
        DPOTrainer, model, tokenizer, tmp_path, ref_model=other.unload(), ref_adapter_name="other"
    )  # fmt: skip
    assert "ref_adapter_name has no effect: ref_model is the reference" in caplog.text
    rows = Sequences.from_lists([tokenizer.encode("ab")], [tokenizer.encode("cd")])
    trainer.trainer.models.build()
    found = masked_sum(trainer.trainer.reference(rows).logprobs, rows.response_mask, dim=1)
    torch.testing.assert_close(found, of_adapter(model, None, rows), atol=1e-5, rtol=0)
