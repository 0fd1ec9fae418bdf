"""What reward functions see, where long texts are cut, and what the tokenizer of a trainer is like, as in trlX."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, GPT2Config, T5Config

import trainkit_trlx as trlx
from tables import table
from trainkit import hookimpl
from trainkit.errors import DataError
from trainkit.testing import character_tokenizer
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.default_configs import (
    default_ilql_config,
    default_ppo_config,
    default_rft_config,
    default_sft_config,
)
from trainkit_trlx.pipeline import BasePipeline, register_datapipeline
from trainkit_trlx.pipeline.offline_pipeline import PromptPipeline
from trainkit_trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer

EOS = str(character_tokenizer("abcdefgh").eos_token)
GPT2 = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10, n_positions=32)
T5 = T5Config(vocab_size=10, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)


def small(default: Callable[[], TRLConfig], directory: Path, side: str = "right", **changes: Any) -> TRLConfig:
    """Return a configuration in which prompts have 4 tokens at most, and samples 8."""
    tokenizer = character_tokenizer("abcdefgh")
    tokenizer.save_pretrained(directory / "letters")
    sizes = {"batch_size": 8, "seq_length": 8, "total_steps": 1, "epochs": 1, "eval_interval": 1, "tracker": None}
    method: dict[str, Any] = {"gen_kwargs": {"max_new_tokens": 4}}
    if default is default_ppo_config:
        method |= {"num_rollouts": 8, "chunk_size": 4}
    return (
        default()
        .evolve(
            train={**sizes, "checkpoint_dir": str(directory / "run")},
            model={"model_path": GPT2, "num_layers_unfrozen": -1},
            tokenizer={"tokenizer_path": str(directory / "letters"), "truncation_side": side},
            method=method,
        )
        .evolve(**changes)
    )


@table(
    "default, side, kept",
    [
        (default_ppo_config, "right", "abcd"),
        (default_ppo_config, "left", "cdef"),
        (default_rft_config, "right", "abcd"),
        (default_rft_config, "left", "cdef"),
    ],
)
def test_long_prompts_keep_the_side_that_trlx_keeps(
    default: Any, side: str, kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reward functions see the prompts as they are cut, with their columns."""
    seen: list[tuple[str, str, int]] = []

    def reward_fn(samples: list[str], prompts: list[str], number: list[int], **_: Any) -> list[float]:
        assert all(sample.startswith(prompt) for sample, prompt in zip(samples, prompts, strict=True))
        seen.extend(zip(prompts, samples, number, strict=True))
        return [float(len(sample)) for sample in samples]

    prompts = [{"prompt": "abcdef", "number": 3}, {"prompt": "gh", "number": 4}] * 4
    trlx.train(reward_fn=reward_fn, prompts=prompts, config=small(default, tmp_path, side))
    assert {(prompt, number) for prompt, _, number in seen} == {(kept, 3), ("gh", 4)}
    lost = "end" if side == "right" else "beginning"
    assert f"4 of 8 prompts were truncated to 4 tokens: they lose their {lost}" in caplog.text


@table(
    "default, side, kept",
    [
        (default_sft_config, "right", "abcdefga"),
        (default_sft_config, "left", f"cdefgah{EOS}"),
        (default_ilql_config, "right", "abcdefga"),
        (default_ilql_config, "left", f"cdefgah{EOS}"),
    ],
)
def test_long_samples_keep_the_side_that_trlx_keeps(default: Any, side: str, kept: str, tmp_path: Path) -> None:
    """With "left", an answer after a long prompt is not lost. Prompts of evaluations have 4 tokens at most."""
    prompts: list[str] = []
    config = small(default, tmp_path, side, train={"save_best": False})

    def metric_fn(prompts: list[str], **_: Any) -> dict[str, list[float]]:
        seen.extend(prompts)
        return {"length": [float(len(prompt)) for prompt in prompts]}

    seen = prompts
    trainer = trlx.train(
        samples=[["abcdefg", "ah"]] * 8,
        rewards=[0.0, 1.0] * 4 if default is default_ilql_config else None,
        eval_prompts=["abcdef"],
        metric_fn=metric_fn,
        config=config,
    )
    batch = trainer.trainer.store.experience
    ids = getattr(batch, "sequences", batch).input_ids[0]
    assert trainer.tokenizer.decode(ids) == kept
    assert set(prompts) == {"abcd" if side == "right" else "cdef"}


def test_finished_rollouts_end_with_eos_and_evaluations_do_not(tmp_path: Path) -> None:
    trained: list[str] = []
    evaluated: list[str] = []

    class Told:
        ended: list[bool] = []  # noqa: RUF012
        texts: list[str] = []  # noqa: RUF012

        @hookimpl
        def on_experience(self, rollouts: list[Any]) -> None:
            self.ended.extend(end for part in rollouts for end in part.terminated.tolist())
            self.texts.extend(text for part in rollouts for text in part.outputs)

    def reward_fn(outputs: list[str], **_: Any) -> list[float]:
        (trained if len(outputs) == 4 else evaluated).extend(outputs)
        return [0.0] * len(outputs)

    config = small(default_ppo_config, tmp_path, method={"num_rollouts": 64}, train={"total_steps": 8})
    config.train.trainer_kwargs = {"callbacks": [Told()]}
    trainer = trlx.train(
        reward_fn=reward_fn, prompts=["b", "c"] * 4, eval_prompts=["b"] * 3, stop_sequences=["a"], config=config
    )
    assert trained == [text + EOS * end for text, end in zip(Told.texts, Told.ended, strict=True)]
    assert {*Told.ended} == {True, False}
    assert evaluated
    assert EOS not in "".join(evaluated)
    ids = torch.tensor([[3, 4, trainer.tokenizer.eos_token_id]])
    texts = trainer.decode(ids[:, :1], ids, append_eos_token=True)
    assert texts == trainer.decode([ids[0, :1]], [ids[0]], [1], append_eos_token=True)
    assert texts[2][0].endswith(EOS)


def test_samples_of_an_encoder_decoder_have_a_separator(tmp_path: Path) -> None:
    seen: list[str] = []

    def reward_fn(samples: list[str], prompts: list[str], outputs: list[str]) -> list[float]:
        seen.extend(samples)
        assert samples == [f"{prompt}<sep>{output}" for prompt, output in zip(prompts, outputs, strict=True)]
        return [0.0] * len(samples)

    config = small(default_ppo_config, tmp_path, model={"model_path": T5, "model_arch_type": "seq2seq"})
    trainer = trlx.train(reward_fn=reward_fn, prompts=["abcdefgh", "b"] * 4, config=config)
    assert seen
    asked = trainer.tokenizer(["b"], return_tensors="pt")
    ids = trainer.generate(**asked, max_new_tokens=2, min_new_tokens=2)
    assert (ids.shape, ids[0, 0].item()) == ((1, 3), 0)  # the token that its decoder starts with
    samples, prompts, outputs = trainer.decode(asked.input_ids, ids[:, 1:])
    assert samples == [f"{prompts[0]}<sep>{outputs[0]}"]


@table("score", [[0.5], torch.tensor([0.5]), np.array([0.5]), torch.tensor(0.5)])
def test_a_list_of_one_number_scores_a_whole_response(score: Any, tmp_path: Path) -> None:
    config = small(default_ppo_config, tmp_path, method={"init_kl_coef": 0.0})
    trainer = AcceleratePPOTrainer(config, reward_fn=lambda samples: [score] * len(samples))
    trainer.add_prompt_pipeline(["b", "c"])
    trainer.make_experience(4)
    assert [each.rewards.tolist() for each in trainer.store] == [
        [0.0] * (len(each.rewards) - 1) + [0.5] for each in trainer.store
    ]


@table("side", ["left", "right"])
def test_the_tokenizer_pads_as_that_of_trlx(side: str, tmp_path: Path) -> None:
    """GPT-2 has no padding token: EOS pads, as in trlX."""
    config = small(default_ppo_config, tmp_path, tokenizer={"padding_side": side})
    path = tmp_path / "letters"
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    trainer = AcceleratePPOTrainer(config, reward_fn=lambda samples: [0.0] * len(samples))
    tokenizer = trainer.tokenizer
    assert (tokenizer.pad_token, tokenizer.padding_side, tokenizer.truncation_side) == (EOS, side, "right")
    asked = tokenizer(["b", "cdb"], padding=True, return_tensors="pt")
    assert asked.attention_mask[0].tolist() == ([0, 0, 1] if side == "left" else [1, 0, 0])
    found = trainer.generate(**asked, min_new_tokens=2, max_new_tokens=2, num_return_sequences=2)
    assert found.shape == (4, 5)
    whole = trainer.generate(**tokenizer(["abcdefg"], return_tensors="pt"), min_new_tokens=1)
    assert tokenizer.decode(whole[0, :7]) == "abcdefg"  # one token is generated, and nothing is cut
    assert whole.shape == (1, 8)
    with pytest.raises(DataError, match="a prompt has 8 tokens, and at most 7 leave room for a response"):
        trainer.generate(**tokenizer(["abcdefgh"], return_tensors="pt"))


@table("default", [default_sft_config, default_ilql_config])
def test_without_prompts_evaluations_begin_with_the_beginning_token(default: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    def metric_fn(samples: list[str], **_: Any) -> dict[str, float]:
        seen.extend(samples)
        return {"reward": float(len(samples))}

    given = {} if default is default_sft_config else {"rewards": [0.0, 1.0] * 4}
    trainer = trlx.train(samples=[["a", "b"]] * 8, metric_fn=metric_fn, config=small(default, tmp_path), **given)
    assert len(seen) == 16  # 8 before training, as many as a batch has, and 8 after it
    assert trainer.history["eval/metrics/reward"] == {0: 8.0, 1: 8.0}


def test_a_pipeline_of_ones_own_gives_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Numbers(BasePipeline):
        def __getitem__(self, index: int) -> int:
            return 3 + index

        def __len__(self) -> int:
            return 2

        def create_loader(self, batch_size: int, shuffle: bool, prep_fn: Any = None, num_workers: int = 0) -> Any:
            def collate(items: list[int]) -> dict[str, Any]:
                ids = torch.tensor([[9, item] for item in items])
                return {"input_ids": ids, "attention_mask": ids != 9, "number": [item - 3 for item in items]}

            return DataLoader(self, batch_size, shuffle=shuffle, collate_fn=collate, num_workers=num_workers)

    @register_datapipeline
    class Numbered(PromptPipeline):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "number": index}

    trainer = AcceleratePPOTrainer(small(default_ppo_config, tmp_path), reward_fn=lambda samples: [0.0] * len(samples))
    trainer.add_prompt_pipeline(Numbers())
    assert [row["number"] for row in trainer.trainer.pipeline.rows] == [0, 1]
    assert [trainer.tokenizer(row["prompt"]).input_ids for row in trainer.trainer.pipeline.rows] == [[3], [4]]
    assert "Numbers.create_loader is called once for all passes, and trainkit makes batches of its own" in caplog.text
    seen: list[tuple[str, int]] = []

    def reward_fn(prompts: list[str], number: list[int], **_: Any) -> list[float]:
        seen.extend(zip(prompts, number, strict=True))
        return [0.0] * len(prompts)

    config = small(default_ppo_config, tmp_path, train={"pipeline": "Numbered"})
    trlx.train(reward_fn=reward_fn, prompts=["abcdef", "b"], config=config)
    assert {*seen} == {("abcd", 0), ("b", 1)}
    assert "train.pipeline" not in caplog.text


def test_rollouts_are_written_as_by_trlx(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config = small(
        default_ppo_config, tmp_path, train={"total_steps": 8, "rollout_logging_dir": str(tmp_path / "logs")}
    )
    trlx.train(reward_fn=lambda samples: [0.0] * len(samples), prompts=["b", "c"] * 4, config=config)
    (directory,) = (tmp_path / "logs").iterdir()
    assert directory.name.startswith("run-")
    assert json.loads((directory / "config.json").read_text())["train"]["total_steps"] == 8
    files = [json.loads(file.read_text()) for file in directory.glob("epoch-*.json")]
    assert [len(rows) for rows in files] == [8]  # one collection, of four passes
    assert files[0][0].keys() == {"query_tensor", "response_tensor"}
    assert "rollout_logging_dir" not in caplog.text
