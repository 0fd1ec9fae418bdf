"""Mixtures of experts: the loss that balances them is that of transformers for each text, and is added up exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tables import table
from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models import make_policy
from trainkit.models.experts import ExpertBalance
from trainkit.testing import tiny_llama
from trainkit.testing.trainers import tiny_trainer

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def mixture(kind: str = "mixtral", tokens: int = 11, **fields: Any) -> dict[str, Any]:
    names = ("num_local_experts", "num_experts")
    widths = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return {
        **tiny_llama(tokens),
        "model_type": kind,
        **dict.fromkeys(names, 4),
        "num_experts_per_tok": 2,
        **widths,
        **ASKED,
        **fields,
    }


def model_of(fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "phimoe"])
def test_the_loss_of_each_text_is_that_of_transformers(kind: str) -> None:
    """Padded on either side, in packed rows, and with gradients to the routers."""
    model = model_of(mixture(kind, 10))
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 1, 1]]
    expected: Any = 0.0
    for text in texts:
        inputs = {"input_ids": torch.tensor([text]), "attention_mask": torch.ones(1, len(text), dtype=torch.long)}
        expected = expected + len(text) / 10 * model(**inputs, output_router_logits=True).aux_loss
    expected.backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    policy = make_policy(model)
    assert isinstance(policy.balance, ExpertBalance)
    rows = [
        Sequences.from_lists([text[:1] for text in texts], [text[1:] for text in texts]),
        Sequences.from_lists([text[:1] for text in texts], [text[1:] for text in texts]).packed([2, 1]),
    ]
    for sequences in rows[: 1 if kind == "gpt_oss" else 2]:  # whose attention does not tell packed texts apart
        model.zero_grad()
        with policy.balance.collected() as terms:
            policy(sequences)
        (own,) = terms
        mean = own.loss / own.tokens
        assert 0 < own.entropy / own.tokens <= math.log(4)
        torch.testing.assert_close(mean.float(), expected.detach(), rtol=1e-4, atol=1e-5)
        mean.backward()
        for name, parameter in model.named_parameters():
            if name in gradient:
                torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-3, atol=1e-6, msg=name)


def trained(name: str, place: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], float]:
    usual = {"optimizer__name": "sgd", "optimizer__lr": 0.5, "train__total_steps": 2, "model": mixture()}
    trainer = tiny_trainer(name, place, **{**usual, **changes})
    trainer.learn()
    weights = {key: value.clone() for key, value in trainer.unwrapped.state_dict().items()}
    return weights, [*trainer.history.get("router/balance", {0: 0.0}).values()][-1]


@pytest.mark.daily(name=("sft",))
@pytest.mark.parametrize("name", ["sft", "dpo", "rloo", "ppo", "kto"])
def test_the_gradient_does_not_depend_on_the_micro_batch(name: str, tmp_path: Path) -> None:
    whole, balance = trained(name, tmp_path / "whole")
    assert 2 <= balance < 8
    for size, more in ((1, {}), (3, {"train__gradient_checkpointing": True})):
        parts, same = trained(name, tmp_path / str(size), train__microbatch_size=size, **more)
        assert same == pytest.approx(balance, rel=1e-3)
        for key, value in parts.items():
            torch.testing.assert_close(value, whole[key], rtol=1e-3, atol=2e-5, msg=key)
    without, _ = trained(
        name, tmp_path / "without", model=mixture(output_router_logits=False, router_aux_loss_coef=0.0)
    )
    routers = [key for key in whole if "gate.weight" in key]
    assert routers
    assert all((whole[key] - without[key]).abs().max() > 1e-3 for key in routers)


def test_experts_are_used_more_evenly(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, model=mixture(router_aux_loss_coef=5.0), train__total_steps=12)
    trainer.learn()
    first, *_, last = trainer.history["router/balance"].values()
    assert 2 <= last < first


@table(
    "name, changes, said",
    [
        ("reward", {}, "a Scorer does not add the loss that balances"),
        ("sft", {"train__compile": True}, "train.compile and output_router_logits are true"),
        ("sft", {"model": mixture("llama")}, "does not balance its experts"),
    ],
)
def test_what_does_not_add_it_refuses_it(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_trainer(name, tmp_path, **{"model": mixture(), **changes}).models.build()
