"""The configuration, the registries, the stores and the formulas that scripts of trlX use by name."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, T5Config

import trainkit_trlx
from tables import table
from trainkit.errors import ConfigError
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit_trlx.data.configs import TRLConfig, merge
from trainkit_trlx.data.default_configs import (
    default_ilql_config,
    default_nemo_20b_config,
    default_ppo_config,
    default_rft_config,
    default_sft_config,
)
from trainkit_trlx.data.ilql_types import ILQLBatch, flatten_dataclass, unflatten_dataclass
from trainkit_trlx.data.method_configs import MethodConfig, get_method, register_method
from trainkit_trlx.data.ppo_types import PPORLElement
from trainkit_trlx.models import modeling_ilql
from trainkit_trlx.models.modeling_base import PreTrainedModelWrapper
from trainkit_trlx.models.modeling_ilql import ILQLConfig, ILQLHeads
from trainkit_trlx.models.modeling_ppo import (
    AdaptiveKLController,
    AutoModelForCausalLMWithHydraValueHead,
    AutoModelForCausalLMWithValueHead,
    FixedKLController,
    PPOConfig,
)
from trainkit_trlx.pipeline import MiniBatchIterator
from trainkit_trlx.pipeline.offline_pipeline import (
    DialogStore,
    ILQLRolloutStorage,
    PromptPipeline,
    tokenize_dialogue,
)
from trainkit_trlx.pipeline.ppo_pipeline import PPORolloutStorage, ppo_collate_fn
from trainkit_trlx.trainer.accelerate_ilql_trainer import make_experience
from trainkit_trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from trainkit_trlx.utils import logging as trlx_logging
from trainkit_trlx.utils import significant, to_device, tree_map
from trainkit_trlx.utils.loading import get_pipeline, get_trainer
from trainkit_trlx.utils.modeling import (
    findattr,
    flatten_dict,
    freeze_bottom_causal_layers,
    freeze_bottom_seq2seq_layers,
    gather_dict,
    get_global_statistics,
    get_tensor_stats,
    hf_get_decoder,
    hf_get_decoder_blocks,
    hf_get_decoder_final_norm,
    hf_get_hidden_size,
    hf_get_lm_head,
    hf_get_num_hidden_layers,
)

# ------------------------------------------------------------------------------------------------- configurations


def test_configurations_are_changed_as_in_trlx(tmp_path: Path) -> None:
    config = default_ppo_config()
    config.train.seed = 3
    config.method.gen_kwargs["max_new_tokens"] = 5  # type: ignore[attr-defined]
    sampling = {"top_k": 3}
    evolved = config.evolve(method={"gamma": 0.5, "gen_experience_kwargs": sampling}, model={"peft_config": {"r": 2}})
    assert evolved.to_dict()["method"] | {"gamma": 0.5} == evolved.to_dict()["method"]
    assert (evolved.method.gen_experience_kwargs, evolved.train.seed) == ({"top_k": 3}, 3)  # type: ignore[attr-defined]
    assert (config.method.gamma, config.model.peft_config) == (1, None)  # type: ignore[attr-defined]
    for base in (config, config.to_dict()):
        updated = TRLConfig.update(base, {"method.gamma": 0.25, "train": {"batch_size": 4}})
        assert (updated.method.gamma, updated.train.batch_size, config.train.batch_size) == (0.25, 4, 32)  # type: ignore[attr-defined]
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump({**config.to_dict(), "optimizer": {"name": "adamw", "kwargs": {"lr": 1}}}))
    assert TRLConfig.load_yaml(str(file)).optimizer.kwargs == {"lr": 1}
    names: set[str] = set()
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, names) == {"a": {"b": 3, "c": 2}}
    assert names == {"a", "b"}
    plain = config.to_dict()
    plain["train"]["seed"] = 9
    assert config.train.seed == 3
    assert '"seed": 3' in str(config)


@table(
    "changes, words",
    [
        ({"trian.seed": 1}, "'trian' is not present in the config.*did you mean 'train'"),
        ({"train.batchsize": 1}, "'train.batchsize'.*did you mean 'train.batch_size'"),
        ({"method": {"gama": 1}}, "'method.gama'.*did you mean 'method.gamma'"),
    ],
)
def test_changes_of_fields_that_do_not_exist_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TRLConfig.update(default_ppo_config(), changes)


def test_a_method_of_ones_own_may_take_other_arguments_than_its_fields() -> None:
    class Doubled(MethodConfig):
        def __init__(self, half: float) -> None:
            super().__init__("Doubled")
            self.whole = 2 * half

    assert Doubled(half=2.0).whole == 4.0
    with pytest.raises(ConfigError, match=r"method\.third is no setting; method has name"):
        Doubled(third=2.0)  # type: ignore[call-arg]


@table("default", [default_ppo_config, default_ilql_config, default_sft_config, default_rft_config])
def test_the_defaults_of_trlx_are_configurations_of_trainkit(default: Any) -> None:
    config = default()
    config.train.tracker = None
    found = config.translated()
    assert found.optimizer.lr == config.optimizer.kwargs["lr"]
    assert found.scheduler.name == "constant"
    assert found.train.total_steps == min(config.train.total_steps, 1600 if default is default_ppo_config else 1000)


def test_settings_without_counterpart_are_refused_and_those_without_effect_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = default_ppo_config().evolve(train={"tracker": None, "logging_dir": "logs"})
    config.translated()
    config.translated()
    assert caplog.text.count("train.logging_dir: has no effect") == 1
    with pytest.raises(ConfigError, match=r"optimizer\.name: write adam"):
        config.evolve(optimizer={"name": "adam_8bit_bnb"}).translated()
    with pytest.raises(NotImplementedError, match=r"train\.sharding"):
        default_nemo_20b_config()


# ------------------------------------------------------------------------------------------------------ registries


def test_registries_are_those_of_trlx() -> None:
    assert get_method("ppoconfig") is PPOConfig
    assert get_trainer("AcceleratePPOTrainer") is get_trainer("accelerateppotrainer")
    assert get_pipeline("promptpipeline") is PromptPipeline
    for find, words in (
        (get_trainer, "acceleratertftrainer"),
        (get_pipeline, "promptpipelin"),
        (get_method, "ppoconfg"),
    ):
        with pytest.raises(ValueError, match="did you mean"):
            find(words)
    with pytest.raises(NotImplementedError, match="NeMo"):
        get_trainer("NeMoPPOTrainer")

    @register_method("Mine")
    class Mine(MethodConfig):
        pass

    assert get_method("mine") is Mine


# -------------------------------------------------------------------------------------------------------- formulas


def ppo() -> PPOConfig:
    config = default_ppo_config().method
    assert isinstance(config, PPOConfig)
    return config


def test_ppo_loss_has_its_golden_numbers() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    values = torch.tensor([[0.5, 0.4, 0.3], [0.1, 0.2, 0.0]])
    rewards = torch.tensor([[0.1, 0.0, 1.0], [-0.2, 0.5, 0.0]])
    advantages, returns = ppo().get_advantages_and_returns(values, rewards, 3, use_whitening=False)
    torch.testing.assert_close(advantages, torch.tensor([[0.53675, 0.565, 0.7], [0.185, 0.3, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.03675, 0.965, 1.0], [0.285, 0.5, 0.0]]))
    white, _ = ppo().get_advantages_and_returns(values, rewards, 3)
    expected = torch.tensor([[0.588196, 0.694969, 1.205212], [-0.741269, -0.306618, -1.440490]])
    torch.testing.assert_close(white, expected, atol=1e-5, rtol=0)
    over_tokens = torch.tensor([[0.378842, 0.513631, 1.157758], [-1.299465, -0.750765, 0.0]])
    loss, stats = ppo().loss(
        logprobs=torch.tensor([[-1, -2, -0.5], [-1.5, -0.2, -3]]),
        values=values + torch.tensor([[0.3, -0.1, 0.5], [0, -0.4, 1]]),
        old_logprobs=torch.tensor([[-1.1, -1.5, -0.5], [-1.4, -0.3, -2]]),
        old_values=values,
        advantages=over_tokens,
        returns=returns,
        mask=mask,
    )
    golden = {
        "losses/policy_loss": 0.023511,
        "losses/value_loss": 0.132985,
        "losses/total_loss": 0.156496,
        "policy/clipfrac": 0.0,
        "policy/approx_kl": 0.024342,
        "ratio": 0.944342,
        "padding_percentage": 1 / 6,
        "values/mean": 0.36,
        "values/min": -0.2,
        "values/max": 0.8,
        "values/std": 0.392938,
        "values/values_error": 0.2125,
        "values/values_mape_error": 0.621183,
        "values/clipfrac": 0.4,
        "old_values/mean": 0.3,
        "old_values/min": 0.1,
        "old_values/max": 0.5,
        "old_values/std": 0.141421,
        "returns/mean": 0.75735,
        "returns/min": 0.285,
        "returns/max": 1.03675,
        "returns/std": 0.306400,
    }
    assert {name: stats[name] for name in golden} == pytest.approx(golden, abs=1e-5)
    assert loss.item() == pytest.approx(0.156496, abs=1e-5)


def test_ilql_loss_has_its_golden_numbers() -> None:
    method = default_ilql_config().method
    assert isinstance(method, ILQLConfig)
    method.beta, method.two_qs = 0.5, True
    q1, q2 = torch.sin(torch.arange(24.0)).reshape(2, 3, 4), torch.cos(torch.arange(24.0)).reshape(2, 3, 4)
    labels = ILQLBatch(
        input_ids=torch.tensor([[2, 0, 1, 3], [2, 1, 3, 0]]),
        attention_mask=torch.ones(2, 4),
        rewards=torch.tensor([[0.0, 0, 1], [0, -1, 0]]),
        states_ixs=torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]]),
        actions_ixs=torch.tensor([[0, 1, 2], [0, 1, 0]]),
        dones=torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
    )
    logits, vs = torch.arange(32.0).reshape(2, 4, 4) / 10, (torch.arange(8.0) / 8).reshape(2, 4, 1)
    loss, stats = method.loss((logits, ((q1, q2), (q1 / 2, q2 / 2), vs)), labels)
    golden = {"loss_q": 2.526194, "loss_v": 0.078869, "loss_cql": 2.831347, "loss_awac": 1.130888, "loss": 4.019085}
    assert {name: stats[f"losses/{name}"] for name in golden} == pytest.approx(golden, abs=1e-5)
    assert loss.item() == pytest.approx(4.019085, abs=1e-5)


def test_targets_of_ilql_move_by_alpha() -> None:
    heads = ILQLHeads(4, 5, two_qs=True, alpha=0.25)
    qs, targets, vs = heads(torch.randn(2, 3, 4), torch.tensor([[0, 1, 2]] * 2), torch.tensor([[0, 1]] * 2))
    assert [len(qs), len(targets), tuple(qs[0].shape), tuple(vs.shape)] == [2, 2, (2, 2, 5), (2, 3, 1)]
    torch.nn.init.constant_(heads.q_heads[0][2].weight, 2.0)
    torch.nn.init.constant_(heads.target_q_heads[0][2].weight, 1.0)
    heads.sync_target_q_heads()
    assert heads.target_q_heads[0][2].weight.unique().tolist() == [1.25]
    assert not any(parameter.requires_grad for parameter in heads.target_q_heads.parameters())


@table("unfrozen", [-1, 0, 1, 2])
def test_the_frozen_branch_is_the_model_before_training(unfrozen: int) -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=12, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = AutoModelForCausalLMWithHydraValueHead.from_config(config, num_layers_unfrozen=unfrozen)
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids, return_dict=True)
    assert before.value.shape == (1, 3)
    assert torch.equal(before.logits, model.forward_hydra(ids, return_dict=True).logits)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    (model(ids, return_dict=True).logits.logsumexp(-1).sum() + model(ids, return_dict=True).value.sum()).backward()
    torch.optim.SGD(trained, 0.1).step()
    assert torch.equal(before.logits, model.forward_hydra(ids))
    if unfrozen:
        assert not torch.equal(before.logits, model(ids)[0])
    assert model.base_model is model.pretrained_model
    assert model.get_compatible_forward_kwargs(input_ids=1, odd=2) == {"input_ids": 1}
    with pytest.raises(ConfigError, match="has 2; give 0 to 1"):
        AutoModelForCausalLMWithHydraValueHead.from_config(config, num_value_layers_unfrozen=2)


def test_a_value_branch_has_layers_of_its_own() -> None:
    """Values are those of a head on a trained copy of the top layer; they begin as those of the model's own layer."""
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=12)
    model = AutoModelForCausalLMWithValueHead.from_config(config, num_value_layers_unfrozen=1).eval()
    torch.nn.init.normal_(model.v_head.summary.weight)
    ids = torch.tensor([[1, 2, 3]])
    own = model.base_model.transformer(ids).last_hidden_state
    torch.testing.assert_close(model(ids, return_dict=True).value, model.v_head(own))
    for parameter in model.critic.parameters():
        parameter.data += 0.1
    changed = model(ids, attention_mask=torch.ones_like(ids), return_dict=True)
    assert not torch.allclose(changed.value, model.v_head(own))
    torch.testing.assert_close(changed.logits, model.base_model(ids).logits)


def test_the_layers_of_the_critic_and_the_deviation_of_the_reference_are_taken_over(tmp_path: Path) -> None:
    fields = tiny_gpt2(10)
    character_tokenizer("abcdefgh").save_pretrained(tmp_path / "tokenizer")
    config = default_ppo_config().evolve(
        method={"num_value_layers_unfrozen": 1, "scale_reward": "ref", "ref_mean": 1.0, "ref_std": 2.0},
        model={"model_path": GPT2Config(**{**fields, "model_type": "gpt2"})},
        tokenizer={"tokenizer_path": str(tmp_path / "tokenizer")},
        train={"checkpoint_dir": str(tmp_path / "run"), "tracker": None, "seq_length": 64},
    )
    trainer = AcceleratePPOTrainer(config, reward_fn=lambda **_: [0.0])
    trainer.models.build()
    assert trainer.unwrapped.critic is not None
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert trainer.scaled(torch.tensor([[1.0], [7.0]]), mask).tolist() == [[0.5], [3.5]]


def test_a_checkpoint_of_trlx_is_loaded_with_its_value_head(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=12)
    base, head = AutoModelForCausalLM.from_config(config), modeling_ilql.make_head(8, 1)
    state = {f"base_model.{name}": tensor for name, tensor in base.state_dict().items()}
    state |= {f"v_head.{name}": tensor for name, tensor in head.state_dict().items()}
    config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = AutoModelForCausalLMWithHydraValueHead.from_pretrained(str(tmp_path), num_layers_unfrozen=-1).eval()
    ids = torch.tensor([[1, 2, 3]])
    states = base.eval()(ids, output_hidden_states=True)
    torch.testing.assert_close(model(ids, return_dict=True).logits, states.logits)
    torch.testing.assert_close(model(ids, return_dict=True).value, head(states.hidden_states[-1]).squeeze(-1))
    assert torch.equal(model.forward_hydra(ids), model(ids)[0])


def test_sampling_is_steered_by_the_heads_of_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=12, eos_token_id=11)
    made = modeling_ilql.AutoModelForCausalLMWithILQLHeads.from_config(config).eval()
    config.save_pretrained(tmp_path)
    torch.save(made.state_dict(), tmp_path / "pytorch_model.bin")
    model = modeling_ilql.AutoModelForCausalLMWithILQLHeads.from_pretrained(str(tmp_path)).eval()
    ids, mask = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    given = {"temperature": 0, "top_k": 12, "max_new_tokens": 5, "pad_token_id": 0}
    greedy = model.base_model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=5, pad_token_id=0)
    plain = model.generate(ids, mask, beta=0, **given)
    assert torch.equal(plain, greedy[:, : plain.shape[1]])
    forbidden = torch.ones(12, 12, dtype=torch.bool)
    forbidden[range(12), [(n + 1) % 11 for n in range(12)]] = False  # the next number
    walked = model.generate(ids, mask, logit_mask=forbidden, **given)
    assert walked[:, 3:].tolist() == [[3, 4, 5, 6, 7], [6, 7, 8, 9, 10]]
    assert model.generate(ids[:1], mask[:1], logit_mask=forbidden, **given).shape == (1, 8)
    logits, _, targets, vs, _ = model(ids[1:])
    steered = logits[:, -1].log_softmax(-1) + 50 * (torch.minimum(*targets)[:, -1] - vs[:, -1])
    assert model.generate(ids[1:], beta=50, **{**given, "max_new_tokens": 1})[0, -1] == steered.argmax()


def test_an_encoder_decoder_is_steered_from_its_start_token() -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = modeling_ilql.AutoModelForSeq2SeqLMWithILQLHeads.from_config(config).eval()
    ids = torch.tensor([[3, 4, 5, 1], [6, 7, 1, 0]])
    mask = (ids != 0).long()
    greedy = model.base_model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
    plain = model.generate(ids, mask, beta=0, temperature=0, top_k=0, max_new_tokens=6)
    assert torch.equal(plain, greedy[:, : plain.shape[1]])
    logits, _, targets, vs, *_ = model(ids[:1], mask[:1], torch.tensor([[0]]))
    steered = logits[:, -1].log_softmax(-1) + 50 * (torch.minimum(*targets)[:, -1] - vs[:, -1])
    assert model.generate(ids[:1], mask[:1], beta=50, temperature=0, max_new_tokens=1)[0, -1] == steered.argmax()


def test_controllers_have_their_golden_numbers() -> None:
    for current, expected in ((12, 0.201024), (6, 0.2), (3, 0.198976), (6.6, 0.200512)):
        controller = AdaptiveKLController(0.2, 6, 10000)
        controller.update(current, 256)
        assert controller.value == pytest.approx(expected, abs=1e-6)
    fixed = FixedKLController(0.2)
    fixed.update(12, 256)
    assert fixed.value == 0.2


def test_statistics_and_rounding() -> None:
    stats = get_tensor_stats(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0]), 2)
    assert {name: float(value) for name, value in stats.items()} == {"mean": 1.5, "min": 1, "max": 2, "std": 0.5}
    assert {float(value) for value in get_tensor_stats(torch.zeros(2), torch.zeros(2), 0).values()} == {0.0}
    assert flatten_dict({"a": {"b": 1}, "c": 2}) == {"a/b": 1, "c": 2}
    assert (significant(0.012345), significant(123.456), significant(0), significant("a")) == (0.0123, 123, 0, "a")


# ----------------------------------------------------------------------------------------------------------- stores


@table(
    "dialogue, side, length, expected",
    [
        (["ab", "cd"], "right", 10, [(False, "ab"), (True, "cd</s>")]),
        ("cd", "right", 10, [(False, "<s>"), (True, "cd</s>")]),
        (["ab", "cd", "e", "fgh"], "right", 5, [(False, "ab"), (True, "cd"), (False, "e")]),
        (["ab", "cd", "e", "fgh"], "left", 5, [(False, "e"), (True, "fgh</s>")]),
        (["ab", "cdef"], "left", 3, [(False, "<s>"), (True, "f</s>")]),
        (["", "cdef"], "right", 4, [(False, "<s>"), (True, "cde")]),
    ],
)
def test_dialogues_are_tokenised_and_cut(dialogue: Any, side: str, length: int, expected: Any) -> None:
    tokenizer = character_tokenizer("abcdefgh")
    tokenizer.truncation_side = side
    start, end = tokenizer.bos_token or tokenizer.eos_token, tokenizer.eos_token
    found = [(m.is_output, tokenizer.decode(list(m.tokens))) for m in tokenize_dialogue(dialogue, tokenizer, length)]
    assert found == [(out, text.replace("<s>", start).replace("</s>", end)) for out, text in expected]


def test_a_dialogue_needs_as_many_outputs_as_prompts() -> None:
    with pytest.raises(ValueError, match="given 3 messages"):
        tokenize_dialogue(["a", "b", "c"], character_tokenizer("abc"))


def test_rollouts_are_padded_exported_and_cleared(tmp_path: Path) -> None:
    store = PPORolloutStorage(0, "left")
    for query, response in (([5, 6], [7]), ([5], [7, 8])):
        numbers = torch.arange(float(len(response)))
        store.push([PPORLElement(torch.tensor(query), torch.tensor(response), numbers, numbers, numbers)])
    (batch,) = store.create_loader(2, shuffle=False)
    assert batch.query_tensors.tolist() == [[5, 6], [0, 5]]
    assert batch.response_tensors.tolist() == [[7, 0], [7, 8]]
    assert ppo_collate_fn("right", 0, store.history).query_tensors.tolist() == [[5, 6], [5, 0]]
    store.export_history(str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())[0] == {"query_tensor": [5, 6], "response_tensor": [7]}
    ((first, second),) = MiniBatchIterator(store.create_loader(2, shuffle=False), 1, 2)
    assert (len(first.query_tensors), second.response_tensors.tolist()) == (1, [[7, 8]])
    store.clear_history()
    assert len(store) == 0


def test_samples_of_ilql_are_padded_with_zeros() -> None:
    columns = [[torch.ones(2), torch.ones(3)] for _ in range(6)]
    (batch,) = ILQLRolloutStorage(*columns).create_loader(2, shuffle=False)
    assert batch.dones.tolist() == [[1, 1, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="one list of the same length for each of input_ids"):
        ILQLRolloutStorage(*columns[:5], columns[5][:1])


def test_stores_give_padded_batches() -> None:
    tokenizer = character_tokenizer("abcdefgh")
    store = DialogStore([tokenize_dialogue(d, tokenizer) for d in (["ab", "c"], ["a", "bcd"])], tokenizer)
    (batch,) = store.create_loader(2)
    assert batch["labels"].shape == batch["input_ids"].shape
    assert ((batch["labels"] == -100) | (batch["labels"] == batch["input_ids"])).all()
    assert (batch["labels"] != -100).sum() == len("c") + len("bcd") + 2  # with EOS
    rows = [{"prompt": "abc", "goal": 1}, {"prompt": "d", "goal": 2}]
    pipeline = PromptPipeline(rows, 2, tokenizer)
    (prompts,) = pipeline.create_loader(2)
    assert prompts["attention_mask"].sum(1).tolist() == [2, 1]
    assert prompts["goal"] == [1, 2]
    assert rows[0] == {"prompt": "abc", "goal": 1}


def test_samples_of_ilql_have_their_reward_on_the_last_action() -> None:
    tokenizer = character_tokenizer("abcdefgh")
    store = make_experience([["ab", "cd", "e", "f"], ["a", "b"]], [3.0, 1.0], tokenizer, verbose=False)
    first, second = store
    assert tokenizer.decode(first.input_ids) == f"abcdef{tokenizer.eos_token}"
    assert first.actions_ixs.tolist() == [1, 2, 4, 5]  # before c, d, f and EOS
    assert (first.states_ixs.tolist(), first.dones.tolist()) == ([1, 2, 4, 5, 6], [1, 1, 1, 1, 0])
    # (3 - 2) / sqrt(2 + 1e-8), by the unbiased variance of 3 and 1, which is 2
    assert first.rewards.tolist() == pytest.approx([0, 0, 0, 2**-0.5])
    assert second.rewards.tolist() == pytest.approx([0, -(2**-0.5)])
    (batch,) = store.create_loader(2, shuffle=False)
    assert (batch.rewards.shape, batch.states_ixs.shape) == ((2, 4), (2, 5))
    given = ILQLBatch(*flatten_dataclass(ILQLBatch)(batch))
    assert unflatten_dataclass(ILQLBatch)(flatten_dataclass(ILQLBatch)(given)).dones is batch.dones


def test_layers_are_frozen_from_below() -> None:
    config = GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=12)
    for unfrozen, expected in ((-1, 3), (0, 0), (1, 1), (3, 3)):
        model = AutoModelForCausalLM.from_config(config)
        freeze_bottom_causal_layers(model, unfrozen)
        blocks = hf_get_decoder_blocks(model)
        assert [block.ln_1.weight.requires_grad for block in blocks] == [False] * (3 - expected) + [True] * expected
    assert hf_get_decoder(model) is model.transformer
    assert hf_get_decoder_final_norm(model) is model.transformer.ln_f
    assert hf_get_lm_head(model) is model.lm_head
    assert (hf_get_hidden_size(config), hf_get_num_hidden_layers(config)) == (8, 3)
    with pytest.raises(ValueError, match="has none of absent"):
        findattr(model, ("absent",))
    config = T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    t5 = AutoModelForSeq2SeqLM.from_config(config)
    freeze_bottom_seq2seq_layers(t5, 0)  # trlX froze no layer of the decoder then
    assert not any(parameter.requires_grad for block in t5.decoder.block for parameter in block.parameters())
    t5 = AutoModelForSeq2SeqLM.from_config(config)
    freeze_bottom_seq2seq_layers(t5, 1)
    assert [block.layer[0].layer_norm.weight.requires_grad for block in t5.decoder.block] == [False, True]
    assert not t5.shared.weight.requires_grad


def test_logging_helpers_are_those_of_trlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRLX_NO_ADVISORY_WARNINGS", raising=False)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = trlx_logging.get_logger("mine")
    trlx_logging.add_handler(handler)
    trlx_logging.disable_propagation()
    try:
        trlx_logging.enable_explicit_format()
        logger.warning_advice("first")
        trlx_logging.reset_format()
        monkeypatch.setenv("TRLX_NO_ADVISORY_WARNINGS", "1")
        logger.warning_advice("not shown")
        logger.warning("second", ranks=[])
        logger.warning("elsewhere", ranks=["1"])
    finally:
        trlx_logging.enable_propagation()
        trlx_logging.remove_handler(handler)
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\[.*\] \[WARNING\] \[.*:\d+:\w+\] \[RANK 0\] first", first)
    assert second == "[RANK 0] second"
    with pytest.raises(ValueError, match="is no handler of this package"):
        trlx_logging.remove_handler(handler)
    assert trlx_logging.get_log_levels_dict()["warning"] == trlx_logging.WARNING


def test_progress_bars_are_shown_until_they_are_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(trlx_logging.tqdm(range(3), desc="shown")) == [0, 1, 2]
    trlx_logging.disable_progress_bar()
    try:
        assert list(trlx_logging.tqdm(range(3), desc="hidden")) == [0, 1, 2]
        assert not trlx_logging.is_progress_bar_enabled()
    finally:
        trlx_logging.enable_progress_bar()
    told = capsys.readouterr().err
    assert "shown" in told
    assert "hidden" not in told


def test_metrics_are_logged_by_the_names_of_trlx(tmp_path: Path) -> None:
    """The tracker and the functions of learn get them; the directory of the run has the names of trainkit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    character_tokenizer("abcdefgh").save_pretrained(tmp_path / "letters")
    config = default_ppo_config().evolve(
        train={"tracker": "tensorboard", "seq_length": 16, "total_steps": 2, "checkpoint_dir": str(tmp_path / "run")},
        model={"model_path": GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10), "num_layers_unfrozen": -1},
        tokenizer={"tokenizer_path": str(tmp_path / "letters")},
        method={"gen_kwargs": {"max_new_tokens": 4}, "num_rollouts": 8, "chunk_size": 8},
    )
    trainer = AcceleratePPOTrainer(
        config.evolve(train={"batch_size": 8}), reward_fn=lambda samples: [1.0] * len(samples)
    )
    trainer.add_prompt_pipeline(["b", "c"] * 4)
    trainer.add_eval_pipeline(["b"])
    logged: list[dict[str, float]] = []
    evaluated: list[dict[str, float]] = []
    trainer.learn(log_fn=logged.append, eval_fn=evaluated.append)
    ours = {
        *("losses/total_loss", "losses/policy_loss", "losses/value_loss", "policy/sqrt_kl", "policy/kl_per_token"),
        *("policy/approx_kl", "policy/clipfrac", "ratio", "kl_ctl_value", "values/values_error"),
        *("rollout_scores/mean", "rollout_scores/std", "learning_rate_group_0"),
        *("rollout_scores/running_mean", "rollout_scores/running_std", "time/rollout_time", "time/rollout_score"),
        *(f"{name}/{of}" for name in ("values", "old_values", "returns") for of in ("mean", "min", "max", "std")),
        *("values/clipfrac", "values/values_mape_error", "padding_percentage"),
    }
    step = next(metrics for metrics in logged if "losses/total_loss" in metrics)
    assert ours - step.keys() == set()
    assert step["rollout_scores/running_mean"] == step["rollout_scores/mean"] == 1.0
    assert {"reward/mean", "time/generate"} <= evaluated[0].keys()
    assert {"loss/total", "reward/mean", "eval/reward"} <= trainer.history.keys()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {*ours, "reward/mean"} - {*events.Tags()["scalars"]} == set()
    assert [event.value for event in events.Scalars("reward/mean")] == [1.0] * len(evaluated)
    with pytest.raises(ConfigError, match="log_names should be 'trlx' or 'trainkit'; given 'trl'"):
        AcceleratePPOTrainer(config, reward_fn=lambda samples: [], log_names="trl")
    usual = AcceleratePPOTrainer(config, reward_fn=lambda samples: [], log_names="trainkit")
    assert usual.named({"loss/total": 1.0}) == {"loss/total": 1.0}


def test_models_take_the_arguments_of_trlx_in_its_order() -> None:
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=12)
    base = AutoModelForCausalLM.from_config(config)
    model = AutoModelForCausalLMWithValueHead(base, {"peft_type": "LORA", "r": 2}, 0).eval()
    assert (model.peft_type, AutoModelForCausalLMWithValueHead.from_config(config).peft_type) == ("LORA", None)
    ids, mask = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    places = torch.tensor([[1, 0, 1], [0, 1, 2]])
    plain = model(ids, mask, None, places, return_dict=True).logits
    torch.testing.assert_close(plain, model(input_ids=ids, attention_mask=mask, position_ids=places)[0])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert not torch.allclose(model(ids, mask, None, places)[0], plain)
    torch.testing.assert_close(model(ids, mask, None, places, ignore_peft_adapter=True)[0], plain)
    with pytest.raises(TypeError, match="give the others by name"):
        model(ids, mask, None, places, None)


def test_models_of_ilql_have_what_those_of_trlx_have(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=12)
    model = modeling_ilql.AutoModelForCausalLMWithILQLHeads.from_config(config, two_qs=False, alpha=0.5)
    assert isinstance(model, PreTrainedModelWrapper)
    assert (model.two_qs, model.alpha, model.peft_type, model.is_loaded_in_8bit) == (False, 0.5, None, False)
    assert (model.ilql_heads.hidden_size, model.ilql_heads.vocab_size) == (8, 12)
    assert {"input_ids", "attention_mask"} <= {*model.forward_kwargs}
    assert model.get_compatible_forward_kwargs(input_ids=1, odd=2) == {"input_ids": 1}
    torch.nn.init.normal_(model.ilql_heads.v_head[2].weight)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    again = modeling_ilql.AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path, None, two_qs=False)
    assert torch.equal(again.ilql_heads.v_head[2].weight, model.ilql_heads.v_head[2].weight)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, model.base_model.lm_head.weight)
    with pytest.raises(ConfigError, match="a live model is given, and load_in_8bit would say how to load one"):
        modeling_ilql.AutoModelForCausalLMWithILQLHeads.from_pretrained(model.base_model, load_in_8bit=True)


def test_trees_hold_dataclasses() -> None:
    batch = ILQLBatch(*[torch.ones(1)] * 6)
    tree = tree_map(lambda x: x + 1, {"a": [batch, torch.zeros(1)]})
    assert (type(tree["a"][0]), tree["a"][0].rewards.item(), tree["a"][1].item()) == (ILQLBatch, 2.0, 1.0)
    assert to_device(batch, "cpu").dones.device.type == "cpu"


def test_statistics_of_one_process_are_those_of_its_values() -> None:
    mean, variance, count = get_global_statistics(torch.tensor([1.0, 3.0]))
    assert (float(mean), float(variance), float(count)) == (2, 1, 2)
    assert gather_dict({"a": [1]}) == {"a": [1]}


def test_the_sharding_of_trainkit_is_an_argument_of_the_trainer(tmp_path: Path) -> None:
    character_tokenizer("abcdefgh").save_pretrained(tmp_path / "letters")
    config = default_ppo_config().evolve(
        train={"tracker": None, "seq_length": 16, "total_steps": 1, "checkpoint_dir": str(tmp_path / "run")},
        model={"model_path": GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10), "num_layers_unfrozen": -1},
        tokenizer={"tokenizer_path": str(tmp_path / "letters")},
        method={"gen_kwargs": {"max_new_tokens": 4}},
    )
    trainer = AcceleratePPOTrainer(config, reward_fn=lambda samples: [0.0] * len(samples), sharding="fsdp2")
    assert trainer.trainer.config.train.sharding == "fsdp2"


VIRTUAL = [{"peft_type": kind, "num_virtual_tokens": 3} for kind in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")]


@pytest.mark.daily(default=(default_ppo_config,), given=VIRTUAL[:1])
@pytest.mark.parametrize("given", VIRTUAL, ids=lambda given: str(given["peft_type"]))
@pytest.mark.parametrize("default", [default_ppo_config, default_ilql_config, default_sft_config])
def test_prompts_and_prefixes_are_trained(default: Any, given: dict[str, Any], tmp_path: Path) -> None:
    character_tokenizer("abcdefgh").save_pretrained(tmp_path / "letters")
    config = default().evolve(
        train={"tracker": None, "seq_length": 16, "total_steps": 2, "checkpoint_dir": str(tmp_path / "run")},
        model={"model_path": GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10), "num_layers_unfrozen": -1},
        tokenizer={"tokenizer_path": str(tmp_path / "letters")},
        method={"gen_kwargs": {"max_new_tokens": 4}},
    )
    config.model.peft_config = {**given, "task_type": "CAUSAL_LM"}
    online = default is default_ppo_config
    trainer = trainkit_trlx.train(
        **({"reward_fn": lambda samples, **_: [float(len(each)) for each in samples]} if online else {}),
        **({"prompts": ["a", "b"] * 8} if online else {"samples": [["a", "bc"], ["b", "cd"]] * 16}),
        **({"rewards": [0.0, 1.0] * 16} if default is default_ilql_config else {}),
        eval_prompts=["a"],
        config=config,
    )
    trained = [name for name, p in trainer.unwrapped.named_parameters() if p.requires_grad and name[:6] == "model."]
    assert trained
    assert all("virtual_tokens" in name for name in trained)


@table("given", VIRTUAL)
def test_model_classes_read_virtual_tokens(given: dict[str, Any]) -> None:
    """Logits, values, Q and V are those of the tokens; the frozen branch has the virtual tokens of the beginning."""
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=12, eos_token_id=11)
    ids, mask = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    model = AutoModelForCausalLMWithHydraValueHead.from_config(config, peft_config=given, num_layers_unfrozen=1).eval()
    before = model(ids, return_dict=True)
    assert (before.logits.shape, before.value.shape) == ((2, 3, 12), (2, 3))
    assert torch.equal(before.logits, model.forward_hydra(ids))
    trained = [parameter for parameter in model.base_model.parameters() if parameter.requires_grad]
    model(ids)[0][..., 0].sum().backward()
    torch.optim.SGD(trained, 0.1).step()
    assert not torch.equal(before.logits, model(ids)[0])
    assert torch.equal(before.logits, model.forward_hydra(ids, return_dict=False))
    assert {parameter.numel() for parameter in trained} != set()

    heads = modeling_ilql.AutoModelForCausalLMWithILQLHeads.from_config(config, peft_config=given).eval()
    logits, qs, _, vs, _ = heads(ids)
    assert (logits.shape, qs[0].shape, vs.shape) == ((2, 3, 12), (2, 3, 12), (2, 3, 1))
    chosen = {"temperature": 0, "top_k": 12, "max_new_tokens": 5, "pad_token_id": 0}
    plain = heads.generate(ids, mask, beta=0, **chosen)
    for end in range(3, plain.shape[1]):
        assert plain[1, end] == heads(plain[1:, :end])[0][0, -1].argmax() or 11 in plain[1, 3:end]
        assert plain[0, end] == heads(plain[:1, 1:end])[0][0, -1].argmax() or 11 in plain[0, 3:end]
