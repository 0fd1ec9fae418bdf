"""Exports end where training ended: transformers' ``generate`` stops at the EOS that was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
)
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit.cli import app
from trainkit.config import ModelConfig
from trainkit.errors import CheckpointError, ConfigError, NonFiniteError
from trainkit.models import RewardModel, load_model, reloading
from trainkit.testing import character_tokenizer, tiny_llama
from trainkit.testing.trainers import PAIRS, SHORT, tiny_trainer
from trainkit_tools.merging import merge_export

OLD = 3
"""The EOS that the model was made with; the tokenizer's is another."""


pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
FIELDS = {"model_type": "gpt2", "vocab_size": 10, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": OLD}


def named(directory: Path) -> tuple[Any, Any]:
    config, generation = (
        json.loads((directory / name).read_text(encoding="utf-8"))["eos_token_id"]
        for name in ("config.json", "generation_config.json")
    )
    return config, generation


def test_an_export_names_the_eos_of_the_tokenizer_and_generate_stops_there(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", model=FIELDS)
    eos = trainer.tokenizer.eos_token_id
    directory = trainer.save_pretrained(tmp_path / "export")
    assert named(directory) == (eos, [OLD, eos])  # training ended at the model's own EOS too
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():  # prefers EOS to everything
        loaded.lm_head.weight.zero_()
        loaded.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(eos), 10).float())
    assert loaded.generate(torch.tensor([[1, 2]]), max_new_tokens=5, do_sample=False).tolist() == [[1, 2, eos]]
    assert AutoTokenizer.from_pretrained(directory).eos_token_id == eos


def test_an_export_of_an_export_is_the_same(tmp_path: Path) -> None:
    first = tiny_trainer("sft", tmp_path / "run", model=FIELDS).save_pretrained(tmp_path / "first")
    again = tiny_trainer("sft", tmp_path / "again", model__model_path=str(first))
    assert named(again.save_pretrained(tmp_path / "second")) == named(first)


@table("merged", [False, True])
def test_what_is_saved_of_an_adapters_base_names_it_too(merged: bool, tmp_path: Path) -> None:
    lora = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}
    trainer = tiny_trainer("sft", tmp_path / "run", model=FIELDS, model__peft_config=lora)
    directory = trainer.save_pretrained(tmp_path / "adapter")
    if merged:
        merge_export(directory, tmp_path / "whole")
    (base,) = [tmp_path / "whole"] if merged else [path.parent for path in directory.glob("*/config.json")]
    assert named(base) == (trainer.tokenizer.eos_token_id, [OLD, trainer.tokenizer.eos_token_id])


def test_an_adapter_whose_base_is_elsewhere_says_that_the_base_names_another_eos(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GPT2Config(**FIELDS)).save_pretrained(tmp_path / "base")
    lora = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}
    path = str(tmp_path / "base")
    trainer = tiny_trainer("sft", tmp_path / "run", model__model_path=path, model__peft_config=lora)
    trainer.save_pretrained(tmp_path / "adapter")
    assert "does not name the tokenizer's EOS" in caplog.text
    merge_export(tmp_path / "adapter", tmp_path / "whole")
    assert named(tmp_path / "whole") == (trainer.tokenizer.eos_token_id, [OLD, trainer.tokenizer.eos_token_id])


@table("save_interval", [0, 10])
def test_weights_that_are_not_finite_are_not_exported(save_interval: int, tmp_path: Path) -> None:
    """With and without checkpoints: the last step was too long, and no loss follows that would say so."""

    class Breaks:
        @trainkit.hookimpl
        def on_step(self, trainer: Any, step: int) -> None:
            if step == trainer.total_steps:
                next(trainer.unwrapped.parameters()).data[0].fill_(torch.nan)

    trainer = tiny_trainer("sft", tmp_path, train__save_interval=save_interval, train__eval_interval=0)
    trainer.hooks.register(Breaks())
    with pytest.raises(NonFiniteError, match=r"the weights are not finite in model\..*nothing was saved or exported"):
        trainer.learn()
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".tmp-*"))


TOKENIZER = character_tokenizer("abcdefgh")
PROBE = torch.arange(4).unsqueeze(0)
TIED = tiny_llama(len(TOKENIZER), tie_word_embeddings=True)
LORA = {"r": 2, "target_modules": ["q_proj"]}
PARAMETERS = {"target_modules": [], "target_parameters": ["q_proj.weight", "gate_proj.weight"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "both": {**LORA, "target_modules": ["embed_tokens", "lm_head"]},
    "saved head, tied": {**LORA, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tokens": {"peft_type": "TRAINABLE_TOKENS", "token_indices": [1, 2]},
}
MORE_ADAPTERS: dict[str, dict[str, Any]] = {
    "head": {**LORA, "target_modules": ["q_proj", "lm_head"]},
    "embeddings": {**LORA, "target_modules": ["embed_tokens"]},
    "dora": {**LORA, "target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "pissa": {**LORA, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": "pissa"},
    "randlora": {"peft_type": "RANDLORA", "r": 4, "randlora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "both, tied": {**ADAPTERS["both"], "ensure_weight_tying": True},
    "embeddings and layers": {**LORA, "target_modules": ["q_proj", "embed_tokens"]},
    "saved embeddings, tied": {**LORA, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved both": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens beside layers": {**LORA, "trainable_token_indices": [1, 2]},
    "dora of embeddings": {**LORA, "target_modules": ["embed_tokens"], "use_dora": True},
    "olora of the head": {**LORA, "target_modules": ["lm_head"], "init_lora_weights": "olora"},
    "parameters": {"r": 2, **PARAMETERS},
    "biases": {**LORA, "bias": "all"},
    "ia3 of the head": {"peft_type": "IA3", "target_modules": ["k_proj", "lm_head"], "feedforward_modules": []},
    "loha of the head": {"peft_type": "LOHA", "r": 2, "target_modules": ["q_proj", "lm_head"]},
    "norms": {"peft_type": "LN_TUNING", "target_modules": ["norm", "input_layernorm"]},
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(PROBE).logits
    return found


def saved(directory: Path, fields: dict[str, Any]) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(directory)
    return str(directory)


def trained(model: Any, run: Path, peft: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Train for two steps, as a user would, at a rate at which a lost adapter shows."""
    return trainkit.train(
        model,
        samples=[("a", "bcd"), ("b", "cde")],
        tokenizer=TOKENIZER,
        config={
            "method": {"name": "sft"},
            "model": {"peft_config": peft, "kwargs": kwargs.pop("kwargs", {})},
            "optimizer": {"lr": 0.1},
            "train": {"batch_size": 2, **SHORT, "total_steps": 2, "verify_export": True, "run_dir": str(run)},
        },
        **kwargs,
    )


def check_reloaded(trainer: Any, run: Path) -> None:
    """peft loads the export, ``trainkit export`` merges it, and training goes on from it: all from what was trained."""
    expected = logits(trainer.unwrapped.model)
    loaded = AutoPeftModelForCausalLM.from_pretrained(run / "model", dtype=expected.dtype)
    torch.testing.assert_close(logits(loaded), expected)
    assert CliRunner().invoke(app, ["export", str(run), str(run / "merged")]).exit_code == 0
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    again = load_model(ModelConfig(model_path=str(run / "model"), peft_config=LORA))
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4, check_dtype=False)


def check_adapter(peft: dict[str, Any], tmp_path: Path) -> None:
    base = saved(tmp_path / "base", TIED)
    trainer = trained(base, tmp_path / "run", peft)
    assert not torch.allclose(logits(trainer.unwrapped.model), logits(AutoModelForCausalLM.from_pretrained(base)))
    check_reloaded(trainer, tmp_path / "run")


@table("kind", list(ADAPTERS))
def test_an_adapter_on_tied_embeddings_is_reloaded_and_merged_as_it_was_trained(kind: str, tmp_path: Path) -> None:
    check_adapter(ADAPTERS[kind], tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@table("kind", list(MORE_ADAPTERS))
def test_any_other_adapter_is_reloaded_and_merged_as_it_was_trained(kind: str, tmp_path: Path) -> None:
    check_adapter(MORE_ADAPTERS[kind], tmp_path)


def changed(model: Any, how: str, place: Path) -> Any:
    if how == "resized":
        model.resize_token_embeddings(model.config.vocab_size + 3)
    if how == "trained and merged":
        peft = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        trained(model, place)
        model = get_peft_model(model, peft).merge_and_unload()
    return model


@pytest.mark.daily(how=("unchanged", "trained and merged"))
@pytest.mark.parametrize("how", ["unchanged", "trained and merged", "resized"])
def test_the_base_of_an_adapter_is_saved_where_it_is_no_longer_what_its_path_names(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "base", TIED))
    model = changed(model, how, tmp_path / "before")
    peft = {**LORA, "trainable_token_indices": [1]}
    trainer = trained(model, tmp_path / "run", peft)
    assert (tmp_path / "run" / "model" / "base").is_dir() is (how != "unchanged")
    assert ("is not the one at" in caplog.text) is (how != "unchanged")
    check_reloaded(trainer, tmp_path / "run")


FUSED = {**tiny_llama(len(TOKENIZER)), "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@table(
    "fields, dtype, size, built",
    [
        (TIED, torch.float32, "5GB", False),
        (FIELDS, torch.bfloat16, "5GB", False),
        (tiny_llama(len(TOKENIZER)), torch.float32, "10KB", False),
        (FUSED, torch.float32, "5GB", True),  # transformers splits fused experts in files
    ],
)
def test_a_base_is_compared_with_its_files_without_building_it(
    fields: dict[str, Any], dtype: torch.dtype, size: str, built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).to(dtype)
    model.save_pretrained(tmp_path / "base", max_shard_size=size)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    gpt2 = fields is FIELDS
    model.add_adapter(LoraConfig(target_modules=["c_attn" if gpt2 else "q_proj"], fan_in_fan_out=gpt2))
    loads, load = list[str](), reloading._load
    monkeypatch.setattr(reloading, "_load", lambda path, *given: (loads.append(path), load(path, *given))[1])
    assert not reloading.has_left_its_path(model)
    assert bool(loads) is built
    weight = model.get_input_embeddings().weight.data
    number = weight[-1, -1].item()
    weight[-1, -1] += 1
    assert reloading.has_left_its_path(model)
    weight[-1, -1] = number
    next((tmp_path / "base").glob("*.safetensors")).write_bytes(b"damaged")
    assert reloading.has_left_its_path(model)


def test_adapters_on_fused_experts_are_exported_and_trained_on(tmp_path: Path) -> None:
    peft = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
    trainer = trained(FUSED, tmp_path / "run", peft)
    check_reloaded(trainer, tmp_path / "run")


@table("verified", [True, False])
def test_an_export_that_is_not_what_was_trained_is_an_error_that_keeps_a_checkpoint(
    verified: bool, tmp_path: Path
) -> None:
    """Another process writes other weights to the path of the base during the run."""
    base = saved(tmp_path / "base", TIED)

    class Overwrites:
        @trainkit.hookimpl
        def on_step(self, trainer: Any, step: int) -> None:
            if step == trainer.total_steps:
                saved(tmp_path / "base", {**TIED, "initializer_range": 0.5})

    where = {"model__model_path": base, "train__verify_export": None if verified else False}
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[Overwrites()], model__peft_config=LORA, **where)
    if not verified:
        trainer.learn()
        return
    with pytest.raises(CheckpointError, match=r"was not exported .*differ by up to .*train\.verify_export=false"):
        trainer.learn()
    assert not (tmp_path / "run" / "model").exists()
    assert not list((tmp_path / "run").glob(".tmp-*"))
    resumed = tiny_trainer("sft", tmp_path / "run", model__peft_config=LORA, train__resume="auto", **where)
    saved(tmp_path / "base", TIED)
    resumed.learn()
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.slow
def test_loading_an_export_draws_no_random_numbers(tmp_path: Path) -> None:
    peft = {**LORA, "lora_dropout": 0.5}
    settings = {"model__peft_config": peft, "model__disable_dropout": False, "train__eval_interval": 2}
    best = {"train__save_best": {"metric": "eval/loss/total", "mode": "min"}}
    weights = []
    for verified in (True, False):
        run = tmp_path / str(verified)
        trainer = tiny_trainer("reward", run, model=TIED, train__verify_export=verified, **settings, **best)
        trainer.learn()
        weights.append(torch.cat([p.flatten() for p in trainer.unwrapped.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.daily(peft=(None,))
@pytest.mark.parametrize("peft", [None, LORA])
def test_a_reward_classifier_whose_padding_is_eos_scores_the_last_token(
    peft: dict[str, Any] | None, tmp_path: Path
) -> None:
    tokenizer = character_tokenizer("abcdefgh", pad_token="<eos>")
    eos = tokenizer.eos_token_id
    fields = {**tiny_llama(len(tokenizer)), "num_labels": 1, "pad_token_id": eos}
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields))
    classifier.save_pretrained(tmp_path / "base")
    trainer = tiny_trainer(
        "reward",
        tmp_path / "run",
        arguments={"tokenizer": tokenizer, "samples": PAIRS},
        train__verify_export=True,
        model__model_path=str(tmp_path / "base"),
        model__peft_config=peft,
        optimizer__lr=0.1,
    )
    trainer.learn()
    export = tmp_path / "run" / "model"
    expected = trainer.reward_model(["abc"])
    auto_class = AutoModelForSequenceClassification if peft is None else AutoPeftModelForSequenceClassification
    loaded = auto_class.from_pretrained(export, num_labels=1).eval()
    ids = torch.tensor([[*tokenizer("abc")["input_ids"], eos]])
    with torch.no_grad():
        assert loaded(input_ids=ids).logits.flatten().tolist() == pytest.approx(expected, rel=1e-4)
        with pytest.raises(ValueError, match="no padding token"):  # it would take the token before EOS for the last
            loaded(input_ids=torch.cat([ids, ids]))
    RewardModel.from_pretrained(export).save_pretrained(tmp_path / "whole")
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    assert whole(ids).logits.flatten().tolist() == pytest.approx(expected, rel=1e-4)


class Bytes(nn.Linear):
    """A linear layer with weights of eight bits and one scale."""

    def quantise(self) -> None:
        scale = self.weight.detach().abs().max() / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((self.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


class BytesConfig(QuantizationConfigMixin):
    def __init__(self, **_: Any) -> None:
        self.quant_method = "bytes"


class BytesQuantizer(HfQuantizer):
    is_trainable = is_serializable = True

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for module in model.model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Bytes
                module.quantise()

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        for module in model.modules():
            if type(module) is Bytes:
                module.weight = nn.Parameter(module.weight * module.scale)
                module.__class__ = nn.Linear
                del module.scale
        return model


@pytest.fixture
def quantising() -> Iterator[dict[str, Any]]:
    """The arguments of `from_pretrained` for eight bits, by a quantiser that transformers knows during the test."""
    auto.AUTO_QUANTIZER_MAPPING["bytes"] = BytesQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["bytes"] = BytesConfig
    yield {"quantization_config": {"quant_method": "bytes"}}
    del auto.AUTO_QUANTIZER_MAPPING["bytes"], auto.AUTO_QUANTIZATION_CONFIG_MAPPING["bytes"]


def test_a_second_stage_on_a_quantised_base_merges_into_dequantised_weights(
    quantising: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = saved(tmp_path / "base", tiny_llama(len(TOKENIZER)))
    first = trained(base, tmp_path / "first", LORA, kwargs=quantising)
    assert first.unwrapped.model.is_quantized
    second = trained(str(tmp_path / "first" / "model"), tmp_path / "second", LORA, kwargs=quantising)
    assert "are dequantised" in caplog.text
    check_reloaded(second, tmp_path / "second")


def test_all_weights_of_a_quantised_model_are_not_trained(quantising: dict[str, Any], tmp_path: Path) -> None:
    base = saved(tmp_path / "base", tiny_llama(len(TOKENIZER)))
    with pytest.raises(ConfigError, match=r"quantised, so they cannot be trained; give model\.peft_config"):
        trained(base, tmp_path / "run", kwargs=quantising)


def test_an_adapter_of_float32_is_merged_in_float32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AutoModelForCausalLM.from_pretrained(saved(tmp_path / "base", TIED)).bfloat16().save_pretrained(tmp_path / "half")
    trainer = trained(str(tmp_path / "half"), tmp_path / "run", LORA)
    check_reloaded(trainer, tmp_path / "run")
    assert "the merged weights are torch.float32" in caplog.text
