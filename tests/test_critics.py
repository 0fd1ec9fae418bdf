"""Critics with layers of their own: a copy of the policy's upper layers, and a model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2ForSequenceClassification

import trainkit
from tables import table
from trainkit import get_trainer
from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models import Policy, Reference, load_heads, make_policy
from trainkit.models.critic import ValueBranch
from trainkit.testing import tiny_bart, tiny_gpt2, tiny_llama
from trainkit.testing.trainers import PROMPTS, tiny_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_of(fields: dict[str, Any], seed: int = 0) -> Any:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**fields)
    made: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return made.from_config(config, attn_implementation="eager").eval()


ROWS = Sequences.from_lists([[1, 2], [3]], [[4, 5, 6], [7, 1]])


def with_values(policy: Policy) -> Policy:
    """Give the value head weights, which are 0 at first."""
    assert policy.value_head is not None
    torch.manual_seed(1)
    torch.nn.init.normal_(policy.value_head.summary.weight)
    return policy.eval()


@table("fields", [tiny_gpt2(10, n_layer=3), tiny_llama(10, num_hidden_layers=3)])
@table("unfrozen", [-1, 1])
def test_a_new_branch_gives_the_values_of_the_policys_own_states(fields: dict[str, Any], unfrozen: int) -> None:
    """Its layers are copies. Frozen lower layers are run once, also where the branch begins below the trained ones."""
    from trainkit.models.trunk import freeze_below

    model = model_of(fields)
    if unfrozen >= 0:
        freeze_below(model, unfrozen)
    branched = with_values(make_policy(model, value_head=True, critic=2))
    plain = make_policy(model, value_head=True)
    plain.value_head = branched.value_head
    plain.eval()
    for rows in (ROWS, branched.through_trunk(ROWS)):
        torch.testing.assert_close(branched(rows).values, plain(ROWS).values)
        torch.testing.assert_close(branched(rows).logprobs, plain(ROWS).logprobs)
    assert branched.has_trunk == (unfrozen >= 0)


def test_a_branch_is_its_own_layers_on_the_policys_lower_ones() -> None:
    """After its weights have changed: head(norm(own block 2(block 1(block 0(x))))), computed here by hand."""
    model = model_of(tiny_gpt2(10, n_layer=3))
    policy = with_values(make_policy(model, value_head=True, critic=1))
    assert isinstance(policy.critic, ValueBranch)
    trained = [name for name, p in policy.critic.named_parameters() if p.requires_grad]
    assert trained
    assert all(name.startswith(("body.h.2.", "body.ln_f.")) for name in trained)
    with torch.no_grad():
        for parameter in policy.critic.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    body: Any = policy.critic.body
    inputs = {"input_ids": ROWS.input_ids, "attention_mask": ROWS.attention_mask, "position_ids": ROWS.position_ids}
    lower = model(**inputs, output_hidden_states=True).hidden_states[2]
    upper: Any = copy.deepcopy(model)
    upper.transformer.h[2].load_state_dict(body.h[2].state_dict())
    upper.transformer.ln_f.load_state_dict(body.ln_f.state_dict())
    by_hand = upper(**inputs, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(lower, upper(**inputs, output_hidden_states=True).hidden_states[2])
    assert policy.value_head is not None
    expected = ROWS.place(policy.value_head(by_hand[:, :-1][ROWS.response_mask[:, 1:]]))
    torch.testing.assert_close(policy(ROWS).values, expected)
    torch.testing.assert_close(policy(ROWS).logprobs, make_policy(model)(ROWS).logprobs)


def test_the_loss_of_values_changes_the_lower_layers_and_the_branch_but_not_the_policys_upper_layers() -> None:
    model = model_of(tiny_gpt2(10, n_layer=3))
    policy = with_values(make_policy(model, value_head=True, critic=1))
    policy(ROWS).values.square().sum().backward()
    blocks: Any = model.transformer.h
    assert blocks[0].attn.c_attn.weight.grad.abs().sum() > 0
    assert blocks[2].attn.c_attn.weight.grad is None
    assert policy.critic is not None
    assert all(p.grad is not None for p in policy.critic.parameters() if p.requires_grad)


def test_a_critic_of_its_own_gives_the_values_of_its_states() -> None:
    model, other = model_of(tiny_gpt2(10)), model_of(tiny_llama(10), seed=3)
    policy = with_values(make_policy(model, value_head=True, critic=other))
    states = other.base_model(
        input_ids=ROWS.input_ids, attention_mask=ROWS.attention_mask, position_ids=ROWS.position_ids
    ).last_hidden_state
    assert policy.value_head is not None
    expected = ROWS.place(policy.value_head(states[:, :-1][ROWS.response_mask[:, 1:]]))
    found = policy(ROWS)
    torch.testing.assert_close(found.values, expected)
    found.values.square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_classifier_as_a_critic_begins_with_its_own_head() -> None:
    torch.manual_seed(0)
    fields = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 10, "bos_token_id": 8, "eos_token_id": 8}
    config = GPT2Config.from_dict({**fields, "num_labels": 1, "pad_token_id": 9})
    classifier = GPT2ForSequenceClassification(config).eval()
    policy = make_policy(model_of(tiny_gpt2(10)), value_head=True, critic=classifier).eval()
    scores = classifier.score(
        classifier.transformer(input_ids=ROWS.input_ids, attention_mask=ROWS.attention_mask).last_hidden_state
    )[..., 0]
    expected = ROWS.place(scores[:, :-1][ROWS.response_mask[:, 1:]])
    torch.testing.assert_close(policy(ROWS).values, expected)
    assert not [name for name, _ in policy.named_parameters() if "score" in name]


def test_a_reference_has_no_critic() -> None:
    policy = make_policy(model_of(tiny_gpt2(10)), value_head=True, critic=1)
    assert Reference(policy).policy.critic is None
    assert policy.critic is not None


@table(
    "fields, critic, said",
    [
        (tiny_gpt2(10), 2, "GPT2LMHeadModel has 2; give 0 to 1, or give the critic a model of its own"),
        (tiny_gpt2(10), -1, "should have -1 layers"),
        (tiny_bart(10), 1, "is an encoder-decoder"),
        (tiny_gpt2(10), tiny_gpt2(8), "the critic knows 8 tokens, and the policy 10"),
        (tiny_bart(10), tiny_gpt2(10), "is an encoder-decoder, whose critic can be no model of its own"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(fields: dict[str, Any], critic: Any, said: str) -> None:
    given = model_of(critic) if isinstance(critic, dict) else critic
    with pytest.raises(ConfigError, match=said):
        make_policy(model_of(fields), value_head=True, critic=given)
    model = model_of(tiny_gpt2(10))
    with pytest.raises(ConfigError, match="shares weights"):
        make_policy(model, value_head=True, critic=model)


def trainer_of(directory: Path, resume: str | None = None, **settings: Any) -> Any:
    """PPO with a value branch of one layer."""

    class Branched(get_trainer("ppo")):  # type: ignore[misc]
        def critic(self, model: PreTrainedModel) -> int:
            return 1

    made = tiny_trainer("ppo", directory, train__total_steps=4, train__resume=resume, **settings)
    trainer = Branched(made.config, tokenizer=made.tokenizer, reward_fn=made.reward_fn)
    trainer.add_prompt_pipeline(list(PROMPTS))
    return trainer


def test_a_run_with_a_branch_resumes_bit_exactly_and_is_exported_with_it(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", train__save_interval=2)
    whole.models.build()
    before = {name: p.clone() for name, p in whole.unwrapped.critic.named_parameters()}
    whole.learn()
    after = dict(whole.unwrapped.critic.named_parameters())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    half = next((tmp_path / "whole").glob("**/*2"))
    resumed = trainer_of(tmp_path / "resumed", resume=str(half), train__save_interval=2)
    resumed.learn()
    for name, tensor in whole.unwrapped.state_dict().items():
        assert torch.equal(tensor, resumed.unwrapped.state_dict()[name]), name
    export = whole.save_pretrained(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(export)
    loaded = load_heads(make_policy(model, value_head=True, critic=1), str(export)).eval()
    torch.testing.assert_close(loaded(ROWS).values, whole.unwrapped.eval()(ROWS).values)
    with pytest.raises(ConfigError, match="holds a critic with layers of its own"):
        load_heads(make_policy(model, value_head=True), str(export))
    with pytest.raises(ConfigError, match="holds a critic with layers of its own"):
        trainkit.models.AutoModelForCausalLMWithValueHead.from_pretrained(str(export))
