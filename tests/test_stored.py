"""Frozen weights in the precision of their checkpoint: nothing that is computed changes, and the memory is smaller."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tables import table
from trainkit.models.adapters import add_adapter, make_peft_config
from trainkit.models.loading import auto_class
from trainkit.models.stored import StoredLinear, store_frozen
from trainkit.testing import tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer

LORA = {"r": 4, "target_modules": "all-linear"}
GATED = {**tiny_t5(10), "feed_forward_proj": "gated-gelu"}
"""One whose last products transformers keeps in float32."""
BF16 = {"train__mixed_precision": "bf16", "train__total_steps": 2}


def checkpoint(fields: dict[str, Any], place: Path, dtype: torch.dtype = torch.bfloat16) -> str:
    """A model in bfloat16, as most are published, or in another precision."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields)
    auto_class(config).from_config(config).to(dtype).save_pretrained(place)
    return str(place)


def float32(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}


@table(
    "fields, adapter, kept",
    [
        (tiny_gpt2(10), LORA, ("wte", "wpe", "ln_", "lora")),
        (tiny_gpt2(10, n_embd=320, n_head=5), LORA, ("wte", "wpe", "ln_", "lora")),
        (tiny_llama(10, tie_word_embeddings=True), {**LORA, "use_dora": True}, ("embed_tokens", "norm", "lora")),
        (tiny_llama(10, attention_bias=True), LORA, ("embed_tokens", "norm", "lora")),
        (tiny_llama(10), {"peft_type": "IA3"}, ("embed_tokens", "norm", "ia3")),
        (GATED, LORA, ("shared", "relative_attention_bias", "layer_norm", "lora", ".wo.", "lm_head")),
    ],
)
def test_logits_and_gradients_of_an_adapter_have_the_same_bits(
    fields: dict[str, Any], adapter: dict[str, Any], kept: tuple[str, ...], tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(checkpoint(fields, tmp_path))
    low = auto_class(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    add_adapter(low, make_peft_config(adapter))
    for parameter in low.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    high = copy.deepcopy(low)
    store_frozen(low, torch.bfloat16)
    assert {name for name in float32(low) if not any(part in name for part in kept)} == set()
    assert all(parameter.dtype == torch.float32 for parameter in low.parameters() if parameter.requires_grad)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    inputs |= {"decoder_input_ids": inputs["input_ids"]} if config.is_encoder_decoder else {}
    for model in (low, pickle.loads(pickle.dumps(low))):
        for autocast in (True, False):
            found = []
            for each in (model, high):
                each.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = each(**inputs).logits
                logits.float().log_softmax(-1)[..., 1].sum().backward()
                found.append([logits.detach(), *(p.grad for p in each.parameters() if p.requires_grad)])
            assert len(found[0]) > 2
            assert all(map(torch.equal, *found)), autocast


def test_weights_that_would_be_rounded_stay_as_they_are(tmp_path: Path) -> None:
    path = checkpoint(tiny_llama(10, tie_word_embeddings=True), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.requires_grad_(False)
    first, second = (layer.mlp for layer in model.model.layers)
    with torch.no_grad():
        first.up_proj.weight[0, 0] = 1 + 2.0**-10
    second.down_proj.requires_grad_(True)
    beside = nn.ModuleList([second.gate_proj])
    store_frozen(model, torch.bfloat16, beside)
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert plain == {
        "lm_head",  # tied to the embeddings
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
    }
    assert type(first.down_proj) is StoredLinear


def size(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


@pytest.mark.daily(case=("adapter",))
@pytest.mark.parametrize(
    "case",
    ["adapter", "adapter of pairs", *("all weights", "upper layers", "chosen reference"), "rounded", "rounded choice"],
)
def test_a_run_has_the_same_bits_and_less_memory(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio of the first update is 1 and the divergence 0; exports are the same files."""
    rounded = case.startswith("rounded")
    path = checkpoint(tiny_llama(10), tmp_path / "base", torch.float32 if rounded else torch.bfloat16)
    name, settings = {
        "adapter": ("ppo", {"model__peft_config": LORA}),
        "adapter of pairs": ("dpo", {"model__peft_config": LORA}),
        "all weights": ("ppo", {}),
        "upper layers": ("ppo", {"model__num_layers_unfrozen": 1}),
        "chosen reference": ("dpo", {"model__reference_path": path}),
        "rounded": ("ppo", {}),
        "rounded choice": ("dpo", {"model__reference_path": path}),
    }[case]
    runs, sizes, lines, files, starts = [], [], [], [], []
    for place in ("stored", "float32"):
        trainer = tiny_trainer(name, tmp_path / place, model__model_path=path, **BF16, **settings)
        trainer.learn()
        runs.append({key: value.float() for key, value in trainer.unwrapped.state_dict().items()})
        starts.append((trainer.identity.start, [each.fingerprint for each in trainer.models.frozen]))
        sizes.append((size(trainer.unwrapped), size(trainer.reference.policy)))
        lines.append([json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()])
        found = sorted((trainer.run_dir / "model").rglob("*.safetensors"))
        files.append({file.name: file.read_bytes() for file in found})
        monkeypatch.setattr("trainkit.trainer.frozen.store_frozen", lambda *_, **__: None)
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(value, runs[1][key]) for key, value in runs[0].items())
    assert files[0] == files[1]
    shared = "adapter" not in case
    assert (starts[0] == starts[1]) is (shared and not rounded)
    assert sizes[0][0] == sizes[1][0] if shared else sizes[0][0] < 0.75 * sizes[1][0]
    assert sizes[0][1] < 0.8 * sizes[1][1]
    if name == "ppo":
        assert lines[0][0]["policy/ratio"] == 1
        assert lines[0][0]["policy/approx_kl"] == lines[0][0]["policy/kl"] == 0


@table(
    "settings",
    [
        {"train__mixed_precision": "no"},
        {"model__dtype": "bfloat16"},
        {"model__model_path": tiny_llama(10)},
    ],
)
def test_other_bases_are_as_they_were(settings: dict[str, Any], tmp_path: Path) -> None:
    """In float32 products need float32 weights; weights in `model.dtype` and random ones have no other precision."""
    path = checkpoint(tiny_llama(10), tmp_path / "base")
    changes = {"model__model_path": path, "model__peft_config": LORA, **BF16, **settings}
    trainer = tiny_trainer("sft", tmp_path / "run", **changes)
    trainer.models.build()
    assert not any(isinstance(module, StoredLinear) for module in trainer.unwrapped.modules())


def test_a_live_model_is_not_changed(tmp_path: Path) -> None:
    path = checkpoint(tiny_llama(10), tmp_path / "base")
    live, second = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    trainer = tiny_trainer("dpo", tmp_path / "run", arguments={"model": live}, model__model_path=None, **BF16)
    trainer.frozen(second)
    trainer.models.build()
    assert any(isinstance(module, StoredLinear) for module in trainer.reference.policy.modules())
    for model in (live, second):
        assert float32(model) == {name for name, _ in model.named_parameters()}


def test_weights_that_a_pass_also_reads_in_float32_are_not_rounded(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(tiny_llama(10), tmp_path, torch.float32))
    model.requires_grad_(False)
    stored = copy.deepcopy(model)
    store_frozen(stored, torch.bfloat16, rounds=True)
    assert float32(stored) < float32(model)
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda _, __, output: output * mlp.down_proj.weight[:, 0].float())
    store_frozen(model, torch.bfloat16, rounds=True)
    assert type(mlp.down_proj) is nn.Linear
    assert float32(model) == {name for name, _ in model.named_parameters()}
