"""`train.sharding`: runs sharded by FSDP2 equal replicated ones; checkpoints are read by other numbers of processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import forking
from trainkit import TRLConfig
from trainkit.errors import ConfigError
from trainkit.testing import tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.sharding import Replicated, blocks_of
from trainkit_kit import check_plugin

SCRIPT = Path(__file__).parent / "sharded.py"
LORA = {"r": 4, "target_modules": "all-linear"}
PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}
EXPERTS = {**tiny_llama(10), "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTRAL = {**EXPERTS, "model_type": "mixtral", "num_local_experts": 4}
QWEN3 = {**EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16}
CONDITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ppo", "dpo")},
    "adapter": ("ppo", {"model__peft_config": LORA}),
    "adapter and images": ("ddpo", {"model__peft_config": {"r": 2, "target_modules": ["to_q", "to_v"]}}),
    "adapter and pairs": ("dpo", {"model__peft_config": LORA}),
    "adapter and no reference": ("sft", {"model__peft_config": LORA}),
    "prefix": ("ppo", {"model__peft_config": PREFIX}),
    "prompt": ("dpo", {"model__peft_config": PROMPT}),
    "frozen layers": ("ppo", {"model__num_layers_unfrozen": 1}),
    "frozen layers and groups": ("rloo", {"model__num_layers_unfrozen": 1}),
    "encoder-decoder": ("rloo", {"model": tiny_t5(10)}),
    "llama": ("grpo", {"model": tiny_llama(10)}),
    "experts": ("rloo", {"model": MIXTRAL, "train__microbatch_size": 3}),
    "untied embeddings": ("ppo", {"model": tiny_gpt2(10, tie_word_embeddings=False)}),
    "chosen reference": ("rloo", {"model__reference_path": tiny_gpt2(10)}),
    "small micro-batches": ("ppo", {"train__microbatch_size": 1}),
    "unequal micro-batches": ("sft", {"train__microbatch_size": 3}),
    "pairs without a reference": ("orpo", {}),
    "no clipping": ("dpo", {"train__max_grad_norm": None}),
    "clipping": ("dpo", {"train__max_grad_norm": 0.01}),
    "activations computed again": ("ppo", {"train__gradient_checkpointing": True}),
    "activations of an adapter computed again": (
        "dpo",
        {"train__gradient_checkpointing": True, "model__peft_config": LORA, "model": tiny_llama(10)},
    ),
    "several turns": ("ppo", {"game": True, "rollout__max_new_tokens": 4}),
    "sampled ahead": ("rloo", {"rollout__staleness": 1}),
    "layers of the critic": ("_test_branch", {}),
    "layers of the critic on frozen ones": ("_test_branch", {"model__num_layers_unfrozen": 1}),
    "critic of its own": ("_test_critic", {}),
    "shared prompts": ("rloo", {"train__share_prompts": True, "train__microbatch_size": 3}),
    "joined rows": ("rloo", {"train__padding_free": True, "train__share_prompts": True, "train__microbatch_size": 3}),
    "shared prompts of pairs": ("dpo", {"train__share_prompts": True}),
    "shared prompts of a reward model": ("reward", {"train__share_prompts": True}),
}
COPY = {"rollout__engine": "_test_copy", "divided": True}
DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "reward": ("reward", {"divided": True}),
    **{name: (name, COPY) for name in ("dpo", "ppo", "online_dpo")},
    "pairs and frozen layers": ("dpo", {"model__num_layers_unfrozen": 1, **COPY}),
    "unequal micro-batches": ("kto", {"train__microbatch_size": 1, **COPY}),
    "adapter": ("ppo", {"model__peft_config": LORA, **COPY}),
    "prefix": ("ppo", {"model__peft_config": PREFIX, **COPY}),
    "prompt": ("dpo", {"model__peft_config": PROMPT, **COPY}),
    "frozen layers": ("ppo", {"model__num_layers_unfrozen": 1, **COPY}),
    "chosen reference": ("grpo", {"method__kl_coef": 0.1, "model__reference_path": tiny_gpt2(10), **COPY}),
    "encoder-decoder": ("rloo", {"model": tiny_t5(10), **COPY}),
    "experts": ("dpo", {"model": QWEN3, **COPY}),
    "several turns": ("ppo", {"game": True, "rollout__max_new_tokens": 4, **COPY}),
    "sampled ahead": ("rloo", {"rollout__staleness": 1, **COPY}),
    "dynamic sampling": ("_test_dapo", COPY),
    "layers of the critic": ("_test_branch", COPY),
    "critic of its own": ("_test_critic", COPY),
    "shared prompts": ("grpo", {"train__share_prompts": True, "train__microbatch_size": 3, **COPY}),
    "joined rows": ("dpo", {"train__padding_free": True, "train__microbatch_size": 3, **COPY}),
}
"""Runs in which no process ever has the whole model; the kit trains every algorithm so."""


def require_equal(cases: dict[str, tuple[str, dict[str, Any]]], root: Path, within: float = 1e-5) -> None:
    forking.run(SCRIPT, 2, "equal", str(root), json.dumps(cases), limit=400)
    off = json.loads((root / "equal.json").read_text())
    assert off.keys() == cases.keys()
    assert {case: by for case, by in off.items() if by > within} == {}


def test_sharded_runs_equal_replicated_ones(tmp_path: Path) -> None:
    require_equal({"ppo": ("ppo", {"train__total_steps": 2, "rollout__num_rollouts": 8})}, tmp_path)


@pytest.mark.slow
def test_models_and_settings_are_trained_in_shards_as_in_replicas(tmp_path: Path) -> None:
    require_equal(CONDITIONS, tmp_path)


@pytest.mark.slow
def test_runs_whose_model_stays_divided_equal_replicated_ones(tmp_path: Path) -> None:
    require_equal(DIVIDED, tmp_path)


LOW = {"train__mixed_precision": "bf16", "replicated": {"model__dtype": "bfloat16"}}
"""Weights are gathered in bfloat16, and all processes hold them so, with float32 copies."""
IN_BF16: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, LOW) for name in ("ppo", "dpo", "reward", "ilql")},
    "prompt": ("ppo", {"model__peft_config": PROMPT, **LOW}),
    "frozen layers": ("ppo", {"model__num_layers_unfrozen": 1, **LOW}),
    "small micro-batches": ("sft", {"train__microbatch_size": 1, **LOW}),
    "activations computed again": ("ppo", {"train__gradient_checkpointing": True, **LOW}),
    "joined rows": ("rloo", {"train__padding_free": True, **LOW}),
    "layers of the critic": ("_test_branch", {**LOW, **COPY}),
    "chosen reference": ("dpo", {"model__reference_path": tiny_gpt2(10), **LOW}),
}


FEW = ("dpo", "small micro-batches", "layers of the critic")


@pytest.mark.parametrize(
    "few", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.weekly)]
)
def test_runs_in_bf16_end_near_replicated_ones_with_float32_copies(few: bool, tmp_path: Path) -> None:
    """Six steps of up to 1e-3 for each weight; gradients are rounded to bfloat16 before they are added up."""
    low = str(tmp_path / "low")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(10)))
    model.bfloat16().float().save_pretrained(low)
    cases = {case: (name, {"model__model_path": low, **given}) for case, (name, given) in IN_BF16.items()}
    cases = {case: given for case, given in cases.items() if (case in FEW) == few}
    require_equal(cases, tmp_path, within=1e-3)


@pytest.mark.slow
def test_a_run_in_bf16_that_is_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    usual = {"train__sharding": "fsdp2", "train__mixed_precision": "bf16", "train__save_interval": 2}
    ends = []
    for steps in ((4,), (2, 4)):
        for total in steps:
            settings = {**usual, "place": f"of-{len(steps)}", "train__total_steps": total}
            resumed = {"train__resume": "auto"} if total != steps[0] else {}
            forking.run(SCRIPT, 2, "run", str(tmp_path), "ppo", json.dumps({**settings, **resumed}))
        ends.append(torch.load(tmp_path / "ppo-2.pt"))
    assert any("resumed from" in line for line in ends[1]["resumed"])
    require_same(ends[0]["end"], ends[1]["end"])


@pytest.mark.slow
def test_models_that_one_process_loads_from_files_are_trained_as_in_replicas(tmp_path: Path) -> None:
    """With a value head, an adapter that is merged into its base, a score head; as the model and as the reference."""

    def trained(name: str, **changes: Any) -> str:
        trainer = tiny_trainer(name, tmp_path / f"{name}-{len(changes)}", **changes)
        trainer.learn()
        return str(trainer.run_dir / "model")

    critic, score, low = trained("ppo"), trained("reward"), str(tmp_path / "low")
    AutoModelForCausalLM.from_pretrained(critic, dtype=torch.bfloat16).save_pretrained(low)
    stored = {"model__model_path": low, **LOW}
    adapter = trained("sft", model__model_path=critic, model__peft_config=LORA)
    cases = {
        "value head": ("ppo", {"model__model_path": critic}),
        "value head, a new adapter": ("ppo", {"model__model_path": critic, "model__peft_config": LORA}),
        "merged adapter": ("sft", {"model__model_path": adapter}),
        "score head": ("reward", {"model__model_path": score}),
        "reference": ("dpo", {"model__reference_path": critic}),
    }
    require_equal(cases, tmp_path)
    in_bf16 = {
        "base": ("ppo", {"model__peft_config": LORA, **stored, **COPY}),
        "reference": ("dpo", stored),
    }
    require_equal(in_bf16, tmp_path / "bf16", within=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"train__sharding": "fsdp2", "train__save_async": True, "rollout__engine": "_test_copy"}),
        ("rloo", {"train__sharding": "fsdp2", "rollout__staleness": 1, "model__peft_config": LORA}),
        ("rft", {}),
    ],
    ids=["ppo-saving-beside-divided", "rloo-ahead-adapter", "rft-replicated"],
)
def test_checkpoints_of_two_processes_are_read_by_one_and_four(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The same bits of weights and optimizer after reading; the same weights, up to rounding, three steps later."""
    usual = {"train__save_interval": 3, "rollout__num_rollouts": 16, **settings}
    forking.run(SCRIPT, 2, "run", str(tmp_path), name, json.dumps({**usual, "train__total_steps": 5}))
    before = torch.load(tmp_path / f"{name}-2.pt")
    ends = {}
    for processes in (4, 1, 2):
        place = f"by-{processes}"
        shutil.copytree(tmp_path / "run", tmp_path / place)
        longer = {**usual, "place": place, "train__total_steps": 8, "train__resume": "auto"}
        forking.run(SCRIPT, processes, "run", str(tmp_path), name, json.dumps(longer))
        there = torch.load(tmp_path / f"{name}-{processes}.pt")
        require_same(before["end"], there["begin"])
        assert any("processes: 2 there" in line for line in there["resumed"]) == (processes != 2)
        ends[processes] = there["end"]["weights"]
    for processes in (4, 1):
        assert max(float((ends[processes][key] - ends[2][key]).abs().max()) for key in ends[2]) < 1e-5


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same bits of weights and of the optimizer's state."""
    assert [key for key in one["weights"] if not one["weights"][key].equal(other["weights"][key])] == []
    left, right = one["optimizer"], other["optimizer"]
    assert left.keys() == right.keys()
    differ = [(key, name) for key in left for name in left[key] if not left[key][name].equal(right[key][name])]
    assert differ == []


@pytest.mark.slow
def test_the_kit_finds_nothing() -> None:
    """Every trainer with clipping, accumulation, `judge`; NaN on one process; checkpoints; unequal draws."""
    check_plugin("fsdp2")


def test_an_unknown_sharding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.sharding: .*'fsdp3'.*"):
        TRLConfig(method="sft", train={"sharding": "fsdp3"})


def test_one_process_is_not_sharded_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="trainkit"):
        trainer = tiny_trainer("sft", tmp_path, train__sharding="fsdp2")
    assert isinstance(trainer.sharding, Replicated)
    assert "train.sharding is 'fsdp2', and the run has one process, which holds the whole model" in caplog.text


def test_a_model_whose_blocks_are_not_found_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    assert blocks_of(model) == []
    model._no_split_modules = ["Block"]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"the blocks of Linear \(Block\) are not found"):
        blocks_of(model)
