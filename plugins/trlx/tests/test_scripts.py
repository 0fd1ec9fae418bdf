"""Scripts in the manner of trlX's examples: only the word in front of their imports differs. Each learns its task."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import GPT2Config

import trainkit_trlx as trlx
from trainkit.testing import character_tokenizer
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the directory of a tokenizer with a token per letter."""
    path = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer(LETTERS).save_pretrained(path)
    return str(path)


def reward_fn(samples: list[str], prompts: list[str], outputs: list[str], **kwargs: Any) -> list[float]:
    return [float(output.count("a")) for output in outputs]


def small(default: TRLConfig, tokenizer_path: str, tmp_path: Any, lr: float = 3e-3, **train: Any) -> TRLConfig:
    """Return a configuration of trlX at a small size."""
    model = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=len(LETTERS) + 2, n_positions=32)
    sizes = {"batch_size": 16, "seq_length": 16, "eval_interval": 50, "checkpoint_interval": 1000, "tracker": None}
    return default.evolve(
        train={**sizes, "checkpoint_dir": str(tmp_path / "ckpts"), **train},
        model={"model_path": model, "num_layers_unfrozen": -1},
        tokenizer={"tokenizer_path": tokenizer_path},
        optimizer={"kwargs": {"lr": lr}},
        scheduler={"kwargs": {"eta_min": lr}},
    )


@pytest.mark.slow
def test_ilql_with_a_logit_mask_and_a_sweep_over_beta(tokenizer_path: str, tmp_path: Any) -> None:
    """Walks over letters, of which only the next ones are allowed; those that end in a are rewarded."""
    walks = ["abc", "bcd", "cda", "dab", "bcda", "cdab"] * 8
    follows = {"a": "b", "b": "c", "c": "d", "d": "a"}
    tokenizer = character_tokenizer(LETTERS)
    forbidden = torch.ones(len(tokenizer), len(tokenizer), dtype=torch.bool)
    for one, other in follows.items():
        forbidden[tokenizer.convert_tokens_to_ids(one), tokenizer.convert_tokens_to_ids(other)] = False
    forbidden[:, tokenizer.eos_token_id] = False
    config = small(default_ilql_config(), tokenizer_path, tmp_path, total_steps=30, epochs=100).evolve(
        train={"trainer_kwargs": {"logit_mask": forbidden}, "save_best": False},
        method={"gen_kwargs": {"max_new_tokens": 4, "beta": [0, 2]}},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trlx.train(
            samples=[[walk[:1], walk[1:]] for walk in walks],
            rewards=[float(walk[-1] == "a") for walk in walks],
            eval_prompts=["a", "b", "c", "d"],
            metric_fn=lambda samples, **kwargs: {"ends": [float(sample[-1:] == "a") for sample in samples]},
            config=config,
        )
    assert {"eval/metrics/ends@beta=0", "eval/metrics/ends@beta=2"} <= trainer.history.keys()
    text = trainer.tokenizer.decode(trainer.generate(**trainer.tokenizer("a", return_tensors="pt"))[0])
    assert "abcda".startswith(text.replace(tokenizer.eos_token, "").replace(tokenizer.pad_token, "")[:5])


@pytest.mark.slow
def test_sft_on_dialogues_and_on_text(tokenizer_path: str, tmp_path: Any) -> None:
    config = small(default_sft_config(), tokenizer_path, tmp_path, total_steps=60, epochs=100).evolve(
        method={"gen_kwargs": {"max_new_tokens": 3, "do_sample": False}}, train={"save_best": False}
    )
    trainer = trlx.train(samples=[("ab", "cd"), ("ba", "dc")] * 16, eval_prompts=["ab", "ba"], config=config)
    asked = trainer.tokenizer(["ab", "ba"], return_tensors="pt")
    answers = trainer.tokenizer.batch_decode(trainer.generate(**asked), skip_special_tokens=True)
    assert answers == ["abcd", "badc"]
    config.train.checkpoint_dir = str(tmp_path / "text")
    config.train.total_steps = 2
    trlx.train(samples=["abcd", "bc"] * 8, config=config)


def test_functions_that_learn_takes_are_called(tokenizer_path: str, tmp_path: Any) -> None:
    from trainkit_trlx.utils.loading import get_pipeline, get_trainer

    config = small(default_ppo_config(), tokenizer_path, tmp_path, total_steps=2, epochs=20).evolve(
        method={"num_rollouts": 16, "chunk_size": 16, "gen_kwargs": {"max_new_tokens": 4}}
    )
    trainer = get_trainer("acceleratePPOtrainer")(config=config, reward_fn=reward_fn)
    trainer.add_prompt_pipeline(get_pipeline("promptpipeline")(["b", "c"], 8, trainer.tokenizer))
    told: dict[str, list[Any]] = {"log": [], "save": [], "eval": []}
    trainer.learn(log_fn=told["log"].append, save_fn=told["save"].append, eval_fn=told["eval"].append)
    assert len(told["log"]) >= 2
    assert len(told["save"]) == 1
    asked = trainer.tokenizer(["b", "cd"], return_tensors="pt", padding=True)
    ids = trainer.generate(**asked, max_new_tokens=4, min_new_tokens=4, do_sample=True, top_k=0)
    assert (ids.shape, ids.dtype) == ((2, 6), torch.long)


def test_a_script_can_be_run_again(tokenizer_path: str, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = small(default_sft_config(), tokenizer_path, tmp_path, total_steps=1, epochs=1).evolve(
        train={"save_best": False}
    )
    first, second = (trlx.train(samples=["abcd", "bc"] * 8, config=config) for _ in range(2))
    assert [str(trainer.run_dir) for trainer in (first, second)] == [str(tmp_path / "ckpts"), str(tmp_path / "ckpts-2")]
    assert "ckpts holds a run; this one is written to" in caplog.text


def test_arguments_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="neither of reward_fn and samples"):
        trlx.train(config=default_sft_config())
    with pytest.raises(ValueError, match="1 samples and 2 rewards"):
        trlx.train(samples=["a"], rewards=[1.0, 2.0], config=default_ilql_config())
    with pytest.raises(ValueError, match="each of reward_fn and samples"):
        trlx.train(samples=["a"], reward_fn=reward_fn, config=default_ppo_config())
