"""`trainkit estimate`: what is counted without data equals what a run holds; arithmetic of large models; what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tables import table
from trainkit import TRLConfig, default_config
from trainkit.cli import app
from trainkit.errors import ConfigError
from trainkit.models import backend
from trainkit.models.loading import load_model_config
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama
from trainkit.testing.trainers import tiny_trainer
from trainkit_tools.estimate import size
from trainkit_tools.estimates import Lengths, Need, choose, depth, measure, measuring, plan
from trainkit_tools.estimates.tracing import Counter, held, tensors_of

LORA = {"r": 4, "target_modules": "all-linear"}
GB = 1e9
WIDE: dict[str, Any] = {"n_embd": 64, "n_positions": 128}


def of(name: str, **changes: Any) -> TRLConfig[Any]:
    """A configuration with a tiny model."""
    given = {"model.model_path": tiny_gpt2(10, **WIDE), "train.microbatch_size": 4, "rollout.max_new_tokens": 100}
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return default_config(name).update(given | changes)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {"model__num_layers_unfrozen": 1}),
    ("sft", {}),
    ("sft", {"model__peft_config": LORA}),
    ("ppo", {}),
    ("dpo", {"model__model_path": tiny_llama(10)}),
    ("dpo", {"optimizer__name": "sgd"}),
    ("reward", {}),
]


@pytest.mark.parametrize(
    ("name", "changes"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_weights_gradients_and_optimizer_are_those_of_a_run(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    need = measure(of(name, **changes))
    given = {"model__model_path": tiny_gpt2(10, **WIDE), **changes}
    trainer = tiny_trainer(name, tmp_path, **given)
    gradients: dict[int, int] = {}
    trainer.models.build()
    inner = trainer.optimizer.optimizer
    trained = [parameter for parameter in trainer.unwrapped.parameters() if parameter.requires_grad]
    trainer.collect()
    batch = trainer.store.experience
    inner.register_step_pre_hook(lambda *_: gradients.update(held(p.grad for p in trained if p.grad is not None)))
    trainer.update(batch)
    own = held(tensors_of(trainer.unwrapped))
    state = held(x for each in inner.state.values() for x in each.values() if isinstance(x, torch.Tensor))
    reference = held(tensors_of(trainer.reference.policy), own) if trainer.needs_reference else {}
    assert need.weights == sum(own.values())
    assert need.gradients >= sum(gradients.values())  # a weight that no loss reaches has none
    assert need.optimizer == sum(state.values())
    assert need.reference == sum(reference.values())
    assert (need.parameters, need.trained) == (
        sum(p.numel() for p in trainer.unwrapped.parameters()),
        sum(p.numel() for p in trained),
    )


@pytest.mark.daily(name=("dpo",), again=(False,))
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["sft", "packed", "dpo", "reward"])
def test_a_pass_without_data_needs_what_the_same_pass_with_data_needs(name: str, again: bool, tmp_path: Path) -> None:
    changes = {"train__gradient_checkpointing": again, "train__seq_length": 64}
    if name == "packed":
        name, changes["method__packing"] = "sft", True
    need = measure(of(name, **changes), device="cuda")
    long = "abcdefgh" * 20
    pair = {"prompt": "a", "chosen": long, "rejected": long[1:]}
    samples: list[Any] = [("a", long)] * 8 if name == "sft" else [pair] * 8
    trainer = tiny_trainer(
        name, tmp_path, model__model_path=tiny_gpt2(10, **WIDE), arguments={"samples": samples}, **changes
    )
    trainer.collect()
    batch = trainer.store.experience.take(torch.arange(4))
    trainer.policy.train()

    def run() -> None:
        trainer.updater.measure(batch)[0].backward()

    counter = Counter()
    with counter:
        run()  # makes what stays, such as masks
        trainer.unwrapped.zero_grad()
        first, peak = counter.most(run), counter.most(run)
    assert need.first == pytest.approx(first, rel=0.1)  # it makes the gradients
    assert need.update == pytest.approx(peak, rel=0.1)
    assert need.again(4) == pytest.approx(need.update, rel=0.1)


@pytest.mark.daily(shared=(True,))
@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_prompt_is_counted_once(shared: bool, tmp_path: Path) -> None:
    length: dict[str, Any] = {"rollout__max_new_tokens": 20, "rollout__min_new_tokens": 20}
    changes = {"train__share_prompts": shared, "method__group_size": 4, **length}
    need = measure(of("grpo", rollout__num_rollouts=4, **changes), prompt=60, device="cuda")
    trainer = tiny_trainer(
        "grpo", tmp_path, model__model_path=tiny_gpt2(10, **WIDE), rollout__num_rollouts=4,
        arguments={"prompts": ["abcdef" * 10]}, **changes,
    )  # fmt: skip
    trainer.collect()
    assert trainer.progress.shares_prompts is shared
    batch, counter = trainer.store.experience, Counter()
    trainer.policy.train()
    with counter:
        trainer.updater.measure(batch)[0].backward()
        peak = counter.most(lambda: trainer.updater.measure(batch)[0].backward())
    assert need.update == pytest.approx(peak, rel=0.15)


def test_recomputed_activations_need_less() -> None:
    plain, again = (measure(of("sft", train__gradient_checkpointing=on)).update for on in (False, True))
    assert again < 0.7 * plain


PERIODIC: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 10, "num_hidden_layers": 12, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
    "max_position_embeddings": 64, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""Every third block attends to all tokens, the others to eight."""
SPARSE: dict[str, Any] = {
    **tiny_llama(10), "model_type": "qwen3_moe", "num_hidden_layers": 9, "moe_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "mlp_only_layers": [0, 1],
}  # fmt: skip
"""The first two blocks are dense, the others mixtures of experts."""
SIX = tiny_gpt2(10, n_layer=6)
EIGHT = tiny_llama(10, num_hidden_layers=8)
DEEP = [
    ("grpo", EIGHT, {"train__mixed_precision": "bf16"}, 5),
    ("ppo", tiny_gpt2(10, n_layer=10), {"model__num_layers_unfrozen": 2}, 9),
    ("sft", EIGHT, {"model__peft_config": LORA, "train__gradient_checkpointing": True}, 5),
    ("dpo", EIGHT, {"model__dtype": "bfloat16"}, 5),
    ("grpo", PERIODIC, {}, 9),
    ("sft", SPARSE, {"model__dtype": "bfloat16"}, 7),
    ("sft", EIGHT, {"model__peft_config": {**LORA, "target_modules": ["q_proj"], "layers_to_transform": [6]}}, None),
    ("sft", tiny_gpt2(10, n_layer=5), {}, None),
    ("sft", SIX, {}, 5),
]
"""With the blocks of both shallow models together; None if there are none."""


@pytest.mark.daily(model=(SIX,))
@pytest.mark.parametrize(("name", "model", "changes", "blocks"), DEEP)
def test_a_deep_model_needs_what_shallow_ones_say(
    name: str, model: dict[str, Any], changes: dict[str, Any], blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of(name, model__model_path=model, rollout__max_new_tokens=20, train__seq_length=40, **changes)
    found = depth.shallow(config)
    counts = (
        None
        if found is None
        else sum(load_model_config(each.model).num_hidden_layers for each in (found.less, found.more))
    )
    assert counts == blocks
    quick = measure(config)
    monkeypatch.setattr(measuring, "shallow", lambda _: None)
    whole = measure(config)
    assert quick.facts() == whole.facts()
    assert quick.again(2) == whole.again(2)


LLAMA_7B = Need(
    parameters=7 * 10**9, trained=7 * 10**9, weights=28 * 10**9, gradients=28 * 10**9, optimizer=56 * 10**9,
    reference=28 * 10**9, block=800 * 10**6, verify=None, root=10**9, reference_root=10**9, leaves=False, step=0,
    lengths=Lengths(2048, 1024), rows=8, batch=128, first=38 * 10**9, update=10 * 10**9, experience=2 * 10**9,
    prefill=8 * 10**9, decoding=9 * 10**9, cache=8 * 10**9,
    again=lambda rows: rows * 10**9 + 2 * 10**9,
)  # fmt: skip
"""A model of 7B weights in float32, with P = 7e9: 4 P bytes of weights, 4 P of gradients, 8 P of Adam's moments."""


@pytest.mark.slow
def test_attention_is_counted_in_the_precision_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bf16, a CPU without matrix units computes it in float32, and a GPU does not."""
    monkeypatch.setattr(backend, "_has_matrix_units", lambda: False)
    config = of("rloo", train__mixed_precision="bf16", train__seq_length=128)
    assert measure(config, device="cpu").cache == 2 * measure(config, device="cuda").cache


def totals(need: Need, sharding: str, processes: int) -> dict[str, float]:
    return {phase.name: phase.total / GB for phase in plan(need, sharding, processes).phases}


def test_7b_on_8_gpus_by_arithmetic() -> None:
    """docs/distributed.md#memory: replicated 112 GB; divided 14 GB, with what is gathered and a reference."""
    alone = totals(LLAMA_7B, "none", 8)
    assert alone["update"] == pytest.approx(28 + 28 + 56 + 28 + 10)
    offloaded = replace(LLAMA_7B, leaves=True)  # the reference, after its only pass, if the model is not divided
    assert totals(offloaded, "none", 8)["update"] == pytest.approx(28 + 28 + 56 + 10)
    assert totals(offloaded, "none", 8)["experience"] == alone["experience"]
    assert totals(offloaded, "fsdp2", 8) == totals(LLAMA_7B, "fsdp2", 8)
    only = replace(LLAMA_7B, batch=64, first=33 * 10**9, verify=True)  # gradients are made while activations go
    assert totals(only, "none", 8)["update"] == pytest.approx(28 + 33 + 56 + 28)
    assert totals(only, "none", 8)["saving"] == pytest.approx(28 + 28 + 56 + 28)  # the export, loaded again
    assert totals(only, "fsdp2", 8) == totals(LLAMA_7B, "fsdp2", 8)
    shared = totals(LLAMA_7B, "fsdp2", 8)
    # 112 / 8, the reference's 28 / 8 and its root 1, two blocks 1.6 and the root 1, the gradients of one 0.8 and 1
    assert shared["update"] == pytest.approx(14 + 3.5 + 1 + 2.6 + 1.8 + 10)
    # the whole weights and their part, the moments' part, the whole reference and its part, and the pass
    assert shared["sampling"] == pytest.approx(28 + 3.5 + 7 + 28 + 3.5 + 9)
    assert choose(LLAMA_7B, 8, 80 * GB) is None  # sampling needs 79 GB of 72
    assert choose(LLAMA_7B, 8, 90 * GB) == plan(LLAMA_7B, "fsdp2", 8)


def test_70b_on_64_gpus_by_arithmetic() -> None:
    """docs/distributed.md#memory: 280 * 4 / 64 = 17.5 GB, two blocks of 3.5, one gradient, the root twice: 45 GB."""
    need = Need(
        parameters=70 * 10**9, trained=70 * 10**9, weights=280 * 10**9, gradients=280 * 10**9, optimizer=560 * 10**9,
        reference=0, block=3500 * 10**6, verify=None, root=8400 * 10**6, reference_root=0, leaves=False, step=0,
        lengths=Lengths(4096, 4095), rows=4, batch=256, first=80 * 10**9, update=80 * 10**9,
        experience=0, prefill=0, decoding=0, cache=0,
        again=lambda rows: rows * 20 * 10**9,
    )  # fmt: skip
    assert totals(need, "fsdp2", 64)["update"] == pytest.approx(17.5 + 7 + 3.5 + 2 * 8.4 + 80)
    found = choose(need, 64, 80 * GB)
    assert found is not None
    assert (found.sharding, found.rows) == ("fsdp2", 1)  # 44.8 + 20 GB; with two rows 84.8 of 72
    assert choose(need, 8, 80 * GB) is None


# ------------------------------------------------------------------------------------------------ the command line


def run(tmp_path: Path, *arguments: str, **changes: Any) -> Any:
    file = tmp_path / "run.yaml"
    file.write_text(str(of("sft", **changes)), encoding="utf-8")
    return CliRunner().invoke(app, ["estimate", str(file), *arguments])


@pytest.mark.slow
def test_the_command_prints_phases_and_what_fits(tmp_path: Path) -> None:
    result = run(tmp_path, "--gpus", "8", "--memory", "80GiB")
    assert result.exit_code == 0, result.output
    for told in ("update", "step", "saving", "train.sharding=none train.microbatch_size=4"):
        assert told in result.output


def test_the_command_counts_the_parts_of_each_phase_and_says_what_fits(tmp_path: Path) -> None:
    data = json.loads(run(tmp_path, "--json", "--memory", "1GB").stdout)
    phase = data["plan"]["phases"]["update"]
    assert phase["total"] == sum(value for part, value in phase.items() if part != "total")
    assert data["fits"]["microbatch_size"] == 4


def test_nothing_fits_is_said_and_is_an_exit_code(tmp_path: Path) -> None:
    result = run(tmp_path, "--memory", "1KB")
    assert result.exit_code == 1
    assert "nothing fits into 1 x 0.0 GB" in result.output
    assert "train.gradient_checkpointing=true" in result.output


@table(
    "arguments, told",
    [
        (["model.model_path=nowhere/at-all"], "nowhere"),
        (["--memory", "much"], "--memory is 'much'; give a number with a unit, such as 80GiB"),
        (["--prompt-tokens", "4"], "'sft' learns from samples"),
        (["--prompt-tokens", "4", "--data", "x.jsonl"], "give one of them"),
        (["--data", "x.jsonl"], "x.jsonl"),
        (["--memory", "0GB"], "give a number with a unit"),
        (["train.sharding=zero3"], "train.sharding is 'zero3', of which no memory is estimated"),
    ],
)
def test_bad_input_is_an_error_and_never_a_number(arguments: list[str], told: str, tmp_path: Path) -> None:
    result = run(tmp_path, *arguments)
    assert result.exit_code in (1, 2)
    assert told in f"{result.output}{result.exception}"
    assert "most:" not in result.output


@table(
    "name, rows, tokens",
    [
        ("rloo", [{"prompt": "abc"}, {"prompt": "a"}], {"tokens": 3 + 100, "chosen": 100}),
        ("sft", [{"prompt": "a", "output": "bcd"}, {"prompt": "abc", "output": "b"}], {"tokens": 5, "chosen": 4}),
        ("dpo", [{"prompt": "a", "chosen": "bc", "rejected": "bcde"}], {"tokens": 6, "chosen": 5}),
    ],
)
def test_sequences_are_as_long_as_the_longest_of_the_data(
    name: str, rows: list[dict[str, str]], tokens: dict[str, int], tmp_path: Path
) -> None:
    character_tokenizer("abcdefgh").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "run.yaml").write_text(str(of(name, tokenizer__tokenizer_path=str(tmp_path / "tokenizer"))))
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    result = CliRunner().invoke(app, ["estimate", str(tmp_path / "run.yaml"), "--json", "--data", str(data)])
    assert {key: json.loads(result.stdout)["model"][key] for key in tokens} == tokens


def test_sizes_have_units() -> None:
    assert (size("80GiB"), size("24 GB"), size("512")) == (80 * 2**30, 24e9, 512)


def test_a_prompt_that_leaves_no_room_is_an_error() -> None:
    with pytest.raises(ConfigError, match="give at most 28"):
        measure(of("ppo"), prompt=64)
