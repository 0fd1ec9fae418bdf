"""Runs of the adapter at a small size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

import trainkit_trlx as trlx
from trainkit.testing import character_tokenizer
from trainkit_trlx.data import method_configs
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.default_configs import default_ppo_config, default_rft_config

DIALOGUES = [["a", "bc"], ["b", "cd"]] * 8


def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with a tokenizer, and with methods that no other test sees; each row has its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(method_configs, "_METHODS", dict(method_configs._METHODS))
    character_tokenizer("abcdefgh").save_pretrained("letters")


def small(default: Callable[[], TRLConfig], **changes: Any) -> TRLConfig:
    sizes = {"batch_size": 4, "seq_length": 16, "total_steps": 2, "epochs": 9, "eval_interval": 2, "tracker": None}
    method: dict[str, Any] = {"gen_kwargs": {"max_new_tokens": 4}}
    if default is default_ppo_config:
        method |= {"num_rollouts": 8, "chunk_size": 4, "ppo_epochs": 2}
    if default is default_rft_config:
        method |= {"n_generations_per_prompt": 4}
    return (
        default()
        .evolve(
            train={**sizes, "checkpoint_dir": "run", "minibatch_size": 2},
            model={"model_path": GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10, n_positions=32)},
            tokenizer={"tokenizer_path": "letters"},
            optimizer={"kwargs": {"lr": 1e-2}},
            method=method,
        )
        .evolve(model={"num_layers_unfrozen": -1}, **changes)
    )


def rewards(samples: list[str], **_: Any) -> list[float]:
    return [float(sample.count("a")) for sample in samples]


def run(config: TRLConfig) -> Any:
    """Train with the data of the method, and evaluate on two prompts."""
    offline = {"samples": DIALOGUES, **({"rewards": [0.0, 1.0] * 8} if hasattr(config.method, "cql_scale") else {})}
    online = {"reward_fn": rewards, "prompts": ["b", "c"] * 4}
    given = online if hasattr(config.method, "chunk_size") or hasattr(config.method, "n_improve_steps") else offline
    return trlx.train(**given, eval_prompts=["b", "c"], config=config)


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.trainer.models.unwrapped.parameters()])


def untrained(default: Callable[[], TRLConfig]) -> Any:
    return run(small(default, optimizer={"kwargs": {"lr": 1e-30, "weight_decay": 0.0}}))
