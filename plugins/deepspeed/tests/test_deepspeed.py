"""The shardings zero2 and zero3: what they refuse, and two processes that train as replicated ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from trainkit.errors import ConfigError
from trainkit.plugins import get_sharding
from trainkit.testing import tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import check_plugin
from trainkit_kit.launching import launch

LORA = {"r": 4, "target_modules": "all-linear"}
STAGES = pytest.mark.parametrize("stage", ["zero2", "zero3"])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adapter": ("ppo", {"model__peft_config": LORA}),
    "frozen layers": ("rloo", {"model__num_layers_unfrozen": 1}),
    "llama": ("dpo", {"model": tiny_llama(10)}),
    "encoder-decoder": ("rloo", {"model": tiny_t5(10)}),
    "untied embeddings": ("ppo", {"model": tiny_gpt2(10, tie_word_embeddings=False)}),
    "chosen reference": ("rloo", {"model__reference_path": tiny_gpt2(10)}),
    "no clipping": ("reward", {"train__max_grad_norm": None}),
    "sgd with momentum": ("sft", {"optimizer__name": "sgd", "optimizer__kwargs": {"momentum": 0.9}}),
    "sampled ahead": ("rloo", {"rollout__staleness": 1}),
}


def checked(stage: str, name: str, place: Path, **changes: Any) -> None:
    get_sharding(stage).made(Accelerator(), None).check(tiny_trainer(name, place, **changes).config)


@STAGES
def test_without_deepspeed_a_run_is_told_what_to_install(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"'{stage}', and DeepSpeed is not installed: pip install 'trainkit-deep"):
        checked(stage, "sft", tmp_path)


@STAGES
def test_what_is_not_shown_is_refused(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"and 'ilql' is not; set train\.sharding to 'fsdp2'"):
        checked(stage, "ilql", tmp_path)
    with pytest.raises(ConfigError, match=r"at float32, and train\.mixed_precision is 'bf16'"):
        checked(stage, "sft", tmp_path, train__mixed_precision="bf16")
    checked(stage, "sft", tmp_path)


@pytest.mark.engines
@STAGES
def test_the_kit_finds_nothing(stage: str) -> None:
    check_plugin(stage)  # raises if a check fails


@pytest.mark.engines
@STAGES
def test_runs_end_as_those_of_replicated_processes(stage: str, tmp_path: Path) -> None:
    given = {"what": "ends", "sharding": stage, "cases": CASES}
    for said in launch(stage, tmp_path / "runs", given, 300.0):
        for case, found in said.items():
            for name, tensor in found["replicated"].items():
                off = float((tensor - found["divided"][name]).abs().max()) if tensor.numel() else 0.0
                assert off <= 1e-5, f"{case}: {name}"
