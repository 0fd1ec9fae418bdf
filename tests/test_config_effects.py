"""No dead knobs: changing any field of any section, or of any algorithm's own, changes something that can be seen."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import trainkit
from trainkit.config import TRLConfig
from trainkit.errors import TrainkitError
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import LETTERS, character_tokenizer, tiny_trainer

DROPOUT = tiny_gpt2(10, resid_pdrop=0.2, embd_pdrop=0.2)
LONG = "abcdefgh" * 8

SECTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    # field: (another value, what else must hold for it to matter)
    "model.model_path": (tiny_gpt2(10, n_embd=16), {}),
    "model.dtype": ("bfloat16", {}),
    "model.num_layers_unfrozen": (1, {}),
    "model.peft_config": ({"r": 4, "target_modules": "all-linear"}, {}),
    "model.disable_dropout": (False, {"model.model_path": DROPOUT}),
    "model.kwargs": ({"attn_implementation": "eager"}, {}),
    "optimizer.name": ("sgd", {}),
    "optimizer.lr": (1e-4, {}),
    "optimizer.weight_decay": (0.5, {}),
    "optimizer.kwargs": ({"eps": 1e-2}, {}),
    "scheduler.name": ("linear", {}),
    "scheduler.warmup_steps": (3, {}),
    "scheduler.kwargs": (
        {"min_lr_rate": 0.5}, {"scheduler.name": "cosine_with_min_lr", "scheduler.kwargs": {"min_lr_rate": 0.1}}
    ),
    "rollout.max_new_tokens": (3, {}),
    "rollout.temperature": (0.5, {}),
    "rollout.top_k": (2, {}),
    "rollout.top_p": (0.3, {}),
    "rollout.min_p": (0.9, {}),
    "rollout.repetition_penalty": (3.0, {}),
    "rollout.stop_sequences": (["a"], {}),
    "rollout.num_rollouts": (8, {}),
    "rollout.batch_size": (4, {}),
    "rollout.overlong_prompts": ("truncate", {"train.seq_length": 8}),
    "rollout.skip_special_tokens": (False, {}),
    "rollout.eval_kwargs": ({"temperature": [0, 1]}, {}),
    "train.seed": (7, {}),
    "train.total_steps": (3, {}),
    "train.epochs": (1, {"train.total_steps": 100, "train.epochs": 4}),
    "train.batch_size": (4, {}),
    "train.microbatch_size": (2, {}),
    "train.seq_length": (8, {}),
    "train.max_grad_norm": (1e-3, {}),
    "train.mixed_precision": ("bf16", {}),
    "train.eval_interval": (2, {}),
    "train.save_interval": (2, {}),
    "train.keep_checkpoints": (1, {"train.save_interval": 2}),
    "train.save_best": (True, {}),
    "train.run_dir": ("elsewhere", {}),
    "train.resume": ("auto", {"train.run_dir": "used"}),
    "train.trackers": (["tensorboard"], {}),
    "plugins": (["no-such-plugin"], {}),
}  # fmt: skip
METHOD_CONTEXT: dict[str, dict[str, Any]] = {
    "ilql.awac_weight_max": {
        "method.awac_weight_max": 4.0,
        "method.beta_awac": 100.0,
        "method.alpha": 1.0,
        "optimizer.lr": 0.03,
    },
    "rft.pool_size": {"method.pool_size": 2},
    "ppo.horizon": {"method.target": 0.01, "method.horizon": 50},
    "ppo.cliprange": {"method.cliprange": 1e-4},
    "ppo.cliprange_value": {"method.cliprange_value": 1e-3},
    "ppo.cliprange_reward": {"method.cliprange_reward": 0.5},
    "ppo.target_kl": {"optimizer.lr": 0.03},
    "dpo.ipo_length_normalize": {"method.loss_type": "ipo"},
    "online_dpo.ipo_length_normalize": {"method.loss_type": "ipo"},
    "ddpo.adv_clip_max": {"method.adv_clip_max": 0.5},
    "ddpo.buffer_size": {"method.buffer_size": 1, "method.min_count": 1},
    "ppo.ratio_threshold": {"method.ratio_threshold": 2.1, "optimizer.lr": 0.1},
}


def observe(name: str, root: Path, changes: dict[str, Any]) -> Any:
    """Everything a run leaves behind that does not depend on the clock; the message, if it is refused."""
    run_dir = root / str(changes.get("train.run_dir", "run"))
    if "train.run_dir" in changes and changes["train.run_dir"] == "used":
        run_dir.mkdir(parents=True)
        (run_dir / "config.yaml").write_text("{}", encoding="utf-8")
    calls = 0
    try:
        trainer = tiny_trainer(
            name, run_dir, **{"train.eval_interval": 3, **{k: v for k, v in changes.items() if k != "train.run_dir"}}
        )
        if trainer.eval_rows:
            trainer.add_eval_pipeline(["a", "bc", "ghab"])
        honest = trainer.loss
        threads = watch_reward_threads(trainer)

        def counted(batch: Any) -> Any:
            nonlocal calls
            calls += 1
            return honest(batch)

        trainer.loss = counted  # type: ignore[method-assign]
        trainer.learn()
    except TrainkitError as error:
        return str(error)
    digest = hashlib.sha256()
    for key, tensor in trainer.unwrapped.state_dict().items():
        digest.update(key.encode() + tensor.float().numpy().tobytes() + str(tensor.dtype).encode())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if "time" not in k and "second" not in k} for line in lines]
    files = sorted(str(p.relative_to(root)) for p in run_dir.rglob("*") if p.is_dir())
    samples = (run_dir / "samples.jsonl").read_text()
    config = getattr(trainer.unwrapped.model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    return digest.hexdigest(), json.dumps(metrics), samples, files, calls, attention, threads


def watch_reward_threads(trainer: Any) -> set[bool]:
    """Filled, as the run goes, with whether the reward function was called in the main thread."""
    seen: set[bool] = set()
    honest = trainer.reward_fn

    def watched(**given: Any) -> Any:
        seen.add(threading.current_thread() is threading.main_thread())
        return honest(**given)

    if honest is not None:
        trainer.reward_fn = watched
    return seen


def mutated(cls: Any, field: str, value: Any) -> Any:
    """Another allowed value of a method's field, found from its type."""
    annotation = cls.model_fields[field].annotation
    if get_origin(annotation) is Literal:
        return next(choice for choice in get_args(annotation) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}a"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.1
    assert value is None, f"teach the test to change {field}"
    return 0.01


def method_fields() -> list[tuple[str, str]]:
    """(algorithm, field) of every field but the name."""
    found = []
    for name in trainkit.available_trainers():
        fields = trainkit.get_trainer(name).method_class.model_fields
        found += [(name, field) for field in fields if field != "name"]
    return found


@pytest.mark.parametrize(("name", "field"), method_fields())
def test_every_field_of_every_method_has_an_effect(name: str, field: str, tmp_path: Path) -> None:
    context = {"train.total_steps": 12, **METHOD_CONTEXT.get(f"{name}.{field}", {})}
    cls = trainkit.get_trainer(name).method_class
    start = context.get(f"method.{field}", cls.model_fields[field].default)
    before = observe(name, tmp_path / "before", context)
    after = observe(name, tmp_path / "after", {**context, f"method.{field}": mutated(cls, field, start)})
    assert isinstance(before, tuple), before
    assert before != after


def test_the_table_of_sections_is_complete() -> None:
    fields = set()
    for section, info in TRLConfig.model_fields.items():
        inner = getattr(info.annotation, "model_fields", None)
        if section not in ("method", "tokenizer"):  # the tokenizer's have a test of their own
            fields |= {f"{section}.{f}" for f in inner} if inner else {section}
    assert fields == set(SECTIONS)


@pytest.mark.parametrize("field", SECTIONS)
def test_every_field_of_every_section_has_an_effect(field: str, tmp_path: Path) -> None:
    value, context = SECTIONS[field]
    method = "ppo"
    before = observe(method, tmp_path / "before", context)
    after = observe(method, tmp_path / "after", {**context, field: value})
    assert before != after


def test_the_tokenizers_fields_have_an_effect(tmp_path: Path) -> None:
    character_tokenizer(LETTERS).save_pretrained(tmp_path / "a")
    character_tokenizer(LETTERS + "x").save_pretrained(tmp_path / "b")
    base = {"model": {"model_path": tiny_gpt2(11)}, "tokenizer": {"tokenizer_path": str(tmp_path / "a")}}
    config = trainkit.default_config("sft").evolve(**base)

    def tokenizer(config: TRLConfig[Any]) -> Any:
        return trainkit.get_trainer("sft")(config).tokenizer

    assert len(tokenizer(config)) == 10
    assert len(tokenizer(config.update({"tokenizer.tokenizer_path": str(tmp_path / "b")}))) == 11
    assert tokenizer(config.update({"tokenizer.kwargs.eos_token": "h"})).eos_token == "h"
