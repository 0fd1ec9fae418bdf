"""Methods of TRL's PPO that a subclass overrides: they are called with what TRL gives them, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, T5Config, T5ForConditionalGeneration

from tables import table
from trainkit.errors import ConfigError, DataError
from trainkit.testing import character_tokenizer
from trainkit_trl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)

pytestmark = pytest.mark.filterwarnings("ignore:there is no dataset")
QUERIES = [torch.tensor([1, 2]), torch.tensor([3])]
RESPONSES = [torch.tensor([4, 5, 6]), torch.tensor([6, 1])]
SCORES = [torch.tensor(1.0), torch.tensor(-1.0)]
TOKENIZER = character_tokenizer("abcdefgh")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(cls: type[PPOTrainer] = PPOTrainer, **changes: Any) -> Any:
    """Return a trainer whose reference differs from its model."""
    set_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=len(TOKENIZER), n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = AutoModelForCausalLMWithValueHead.from_pretrained(AutoModelForCausalLM.from_config(config))
    reference = create_reference_model(model)
    for parameter in model.pretrained_model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    usual = {"batch_size": 2, "mini_batch_size": 2, "learning_rate": 1e-3, "ppo_epochs": 2}
    return cls(PPOConfig(**{**usual, **changes}), model, reference, TOKENIZER)


def trained(cls: type[PPOTrainer] = PPOTrainer, **changes: Any) -> tuple[dict[str, Any], list[torch.Tensor], Any]:
    """Return the statistics of a step, and the weights after it."""
    trainer = made(cls, **changes)
    stats = trainer.step(QUERIES, RESPONSES, SCORES)
    return stats, [parameter.detach().clone() for parameter in trainer.model.parameters()], trainer


def calling(name: str) -> tuple[type[PPOTrainer], list[Any]]:
    """Return a class that overrides a method, calls that of TRL, and keeps what it was given and returned."""
    calls: list[Any] = []

    def method(self: Any, *given: Any, **named: Any) -> Any:
        found = getattr(PPOTrainer, name)(self, *given, **named)
        calls.append((given, named, found))
        return found

    return type("Own", (PPOTrainer,), {name: method}), calls


@table(
    "name, changes, times",
    [
        ("compute_rewards", {}, 1),
        ("_kl_penalty", {"kl_penalty": "abs"}, 2),
        ("compute_advantages", {"whiten_rewards": True}, 1),
        ("loss", {}, 2),
        ("train_minibatch", {"max_grad_norm": 0.1}, 2),
        ("train_minibatch", {"mini_batch_size": 1, "gradient_accumulation_steps": 2}, 4),
        ("record_step_stats", {}, 1),
        ("_step_safety_checker", {}, 1),
    ],
)
def test_a_method_that_calls_that_of_trl_trains_the_same(name: str, changes: dict[str, Any], times: int) -> None:
    cls, calls = calling(name)
    usual = {**changes, "mini_batch_size": 2, "gradient_accumulation_steps": 1}
    stats, weights, _ = trained(cls, **changes)
    expected, theirs, _ = trained(**({**usual} if name == "train_minibatch" else changes))
    assert len(calls) == times
    accumulates = "gradient_accumulation_steps" in changes  # rows of different lengths are weighted differently there
    for mine, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-3 if accumulates else 2e-6, rtol=0)
    assert stats["objective/kl"] == pytest.approx(expected["objective/kl"], abs=1e-5)
    assert stats["ppo/mean_scores"] == 0.0
    if not accumulates:
        for key in ("ppo/loss/policy", "ppo/loss/value", "ppo/mean_non_score_reward", "ppo/policy/approxkl"):
            if name not in ("train_minibatch", "loss") or key != "ppo/policy/approxkl":  # TRL's is another estimate
                assert stats[key] == pytest.approx(expected[key], abs=1e-5), key


def test_methods_get_what_trl_gives_them() -> None:
    """Columns belong to the tokens after the first; masks are 0 and 1; the penalty gets rows."""
    shapes = {}
    for name in ("compute_rewards", "_kl_penalty", "compute_advantages", "loss", "train_minibatch"):
        cls, calls = calling(name)
        trained(cls)
        shapes[name] = [tuple(each.shape) for each in calls[0][0]]
        assert all(mask.dtype == torch.long for mask in calls[0][0] if not mask.is_floating_point())
    assert shapes == {
        "compute_rewards": [(2,), (2, 4), (2, 4), (2, 4)],
        "_kl_penalty": [(4,), (4,)],
        "compute_advantages": [(2, 4)] * 3,
        "loss": [(2, 4), (2, 4), (2, 4, 10), *[(2, 4)] * 5],
        "train_minibatch": [*[(2, 4)] * 3, (2, 4, 10), *[(2, 4)] * 4],
    }
    cls, calls = calling("record_step_stats")
    trained(cls)
    told = {*calls[0][1]}
    assert told == {
        "kl_coef", "scores", "logprobs", "ref_logprobs", "non_score_reward", "train_stats", "masks", "queries",
        "responses", "kls",
    }  # fmt: skip
    assert calls[0][1]["train_stats"]["loss/policy"].shape == (1,)


def test_what_methods_return_is_trained_on() -> None:
    class Still(PPOTrainer):
        def loss(self, *args: Any) -> Any:
            policy, value, stats = super().loss(*args)
            return policy * 0, value * 0, {**stats, "mine": torch.tensor(3.0)}

    stats, weights, trainer = trained(Still)
    theirs = made()
    assert all(torch.equal(a, b) for a, b in zip(weights, theirs.model.parameters(), strict=True))
    assert stats["ppo/mine"] == 3.0

    class Rewarded(PPOTrainer):
        def compute_rewards(self, scores: Any, logprobs: Any, ref_logprobs: Any, masks: Any) -> Any:
            return masks * 7.0, masks * 0.5  # two tensors, as in TRL 0.7

        def compute_advantages(self, values: Any, rewards: Any, mask: Any) -> Any:
            assert rewards[mask.bool()].unique().tolist() == [7.0]
            return values * 0, mask * 2.0, mask * 4.0

        def record_step_stats(self, kl_coef: float, **data: Any) -> Any:
            return {**super().record_step_stats(kl_coef, **data), "own/mean": data["kls"].mean()}

    stats, _, trainer = trained(Rewarded)
    assert stats["ppo/mean_non_score_reward"] == 0.5
    assert stats["ppo/returns/mean"] == 4.0
    assert stats["ppo/policy/advantages"].tolist() == [2.0] * 5
    assert stats["own/mean"] == pytest.approx(stats["objective/kl"] / 4, rel=1.0)
    trainer.compute_rewards = lambda scores, logprobs, *_: (logprobs[:, 1:], logprobs)
    with pytest.raises(DataError, match=r"compute_rewards should return tensors of the shape \(2, 4\).* \(2, 3\)"):
        trainer.step(QUERIES, RESPONSES, SCORES)
    trainer.compute_rewards = lambda *_: 3
    with pytest.raises(DataError, match="compute_rewards should return 2 or 3 tensors, as TRL's does; it returned 3"):
        trainer.step(QUERIES, RESPONSES, SCORES)


@table(
    "name, returned, words",
    [
        ("loss", torch.zeros(()), "loss should return two tensors and statistics, as TRL's; it returned"),
        ("loss", (torch.zeros(()), torch.zeros(()), None), "loss should return a dictionary of statistics"),
        (
            "train_minibatch",
            None,
            "train_minibatch should return a dictionary of statistics, as TRL's does; given None",
        ),
        ("compute_advantages", (1, 2), "compute_advantages should return 3 tensors, as TRL's does"),
    ],
)
def test_what_a_method_should_return_is_told(name: str, returned: Any, words: str) -> None:
    trainer = made()
    setattr(trainer, name, lambda *_: returned)
    with pytest.raises(DataError, match=words):
        trainer.step(QUERIES, RESPONSES, SCORES)


def test_early_stopping_ends_a_step_that_a_script_trains() -> None:
    cls, calls = calling("train_minibatch")
    trained(cls, early_stopping=True, target_kl=1e-9, ppo_epochs=4)
    assert len(calls) == 2, "the first epoch moves the policy from itself"


def test_saving_calls_what_is_overridden(tmp_path: Path) -> None:
    class Own(PPOTrainer):
        def create_model_card(self, path: Any, model_name: Any = "mine") -> None:
            super().create_model_card(path, model_name)

        def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> Any:
            return [dataset]

    trainer = made(Own)
    trainer.save_pretrained(tmp_path / "saved")
    assert "# mine" in (tmp_path / "saved" / "README.md").read_text("utf-8")
    set_seed(1)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(trainer.model.pretrained_model)
    assert Own(trainer.config, model, None, TOKENIZER, dataset="any").dataloader == ["any"]


@pytest.mark.parametrize("name", sorted(PPOTrainer.not_called))
def test_methods_that_are_not_called_cannot_be_overridden(name: str) -> None:
    words = f"overrides {name}, which trainkit does not call; "
    with pytest.raises(ConfigError, match=words):
        type("Own", (PPOTrainer,), {name: lambda self: None})
    mixed = type("Mixed", (), {name: lambda self: None})
    with pytest.raises(ConfigError, match=words):
        type("Own", (mixed, PPOTrainer), {})


def test_what_cannot_be_given_is_refused_when_the_trainer_is_made() -> None:
    cls, _ = calling("compute_rewards")
    with pytest.raises(ConfigError, match=r"kl_penalty is 'full'.* set kl_penalty to kl, abs or mse"):
        made(cls, kl_penalty="full")
    cls, _ = calling("loss")
    config = T5Config(
        vocab_size=10, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(T5ForConditionalGeneration(config))
    with pytest.raises(ConfigError, match=r"no encoder-decoders; override loss of trainkit_ppo.PPOTrainer"):
        cls(PPOConfig(batch_size=2, mini_batch_size=2), model, None, TOKENIZER)
    trainer = made()
    with pytest.raises(ConfigError, match="overrides batched_forward_pass"):
        trainer.batched_forward_pass = lambda *_: None


def test_a_controller_of_ones_own_sets_the_penalty() -> None:
    class Doubling:
        value = 0.5

        def update(self, current: float, n_steps: int) -> None:
            self.value *= 2

    trainer = made()
    with pytest.raises(ConfigError, match=r"kl_ctl should have value and update\(current, n_steps\), .* given None"):
        trainer.kl_ctl = None
    trainer.kl_ctl = Doubling()
    stats = trainer.step(QUERIES, RESPONSES, SCORES)
    assert stats["objective/kl_coef"] == 0.5
    assert trainer.kl_ctl.value == 1.0
