"""Scripts in the manner of TRL's examples with `PPOTrainer.step`: only the word in front of their imports differs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing import event_accumulator
from transformers import AutoModelForCausalLM, GPT2Config

from tables import table
from trainkit.errors import ConfigError
from trainkit.testing import character_tokenizer
from trainkit_migrate import framework, translate
from trainkit_trl import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)
from trainkit_trl.core import convert_to_scalar, flatten_dict, masked_mean, masked_var, masked_whiten, stats_to_np
from trainkit_trl.models.modeling_value_head import ValueHead
from trainkit_trl.trainer.ppo_trainer import _say_once

LETTERS = "abcdefgh"
pytestmark = pytest.mark.filterwarnings("ignore:there is no dataset")


def collator(data: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in data] for key in data[0]}


@pytest.fixture
def made() -> tuple[Any, Any, Any]:
    """Return a model with a value head, a tokenizer, and a dataset of queries."""
    set_seed(0)
    tokenizer = character_tokenizer(LETTERS)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=len(tokenizer), n_positions=32)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(AutoModelForCausalLM.from_config(config))
    rows = [{"query": text, "label": 0} for text in ("b", "cd", "e", "fg") * 8]
    dataset = Dataset.from_list(rows).map(lambda row: {"input_ids": tokenizer.encode(row["query"])})
    dataset.set_format(type="torch")
    return model, tokenizer, dataset


def settings(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> PPOConfig:
    monkeypatch.chdir(tmp_path)
    return PPOConfig(**{"batch_size": 16, "mini_batch_size": 8, "learning_rate": 3e-3, "init_kl_coef": 0.0, **changes})


def test_arguments_that_end_responses_have_their_counterparts(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other tokens end responses besides EOS; an id that no token has does not, and a remark says so once."""
    model, tokenizer, _ = made
    _say_once.cache_clear()  # another test of this process may have caused the remark
    trainer = PPOTrainer(settings(tmp_path, monkeypatch), model, None, tokenizer)
    queries = [torch.tensor(tokenizer.encode("ab"))] * 8
    for _ in range(2):
        fixed = trainer.generate(queries, return_prompt=False, min_new_tokens=6, max_new_tokens=6, eos_token_id=-1)
    assert [len(response) for response in fixed] == [6] * 8
    assert caplog.text.count("no token has this id") == 1
    for _ in range(2):
        fixed = trainer.generate(queries, return_prompt=False, min_new_tokens=3, max_new_tokens=3, eos_token_id=100_000)
    assert [len(response) for response in fixed] == [3] * 8
    ends = [tokenizer.eos_token_id, *tokenizer.encode("ab")]
    ended = trainer.generate(queries, return_prompt=False, max_new_tokens=16, eos_token_id=ends)
    assert all(int(response[-1]) in ends and not set(response[:-1].tolist()) & set(ends) for response in ended)
    for name, value in {"bad_words_ids": [[1]], "num_return_sequences": 4, "min_length": 5}.items():
        with pytest.raises(ConfigError, match=name):
            trainer.generate(queries, **{name: value})


def test_the_loop_of_ppo_learns(made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, dataset = made
    config = settings(tmp_path, monkeypatch, adap_kl_ctrl=False)
    ref_model = create_reference_model(model)
    ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)
    generation_kwargs = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.eos_token_id,
    }
    length_sampler = LengthSampler(5, 7)
    means = []
    for _ in range(12):
        for batch in ppo_trainer.dataloader:
            query_tensors = batch["input_ids"]
            response_tensors = ppo_trainer.generate(
                query_tensors, return_prompt=False, length_sampler=length_sampler, **generation_kwargs
            )
            batch["response"] = [tokenizer.decode(response) for response in response_tensors]
            rewards = [torch.tensor(float(text.count("a"))) for text in batch["response"]]
            stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
            ppo_trainer.log_stats(stats, batch, rewards)
            means.append(stats["env/reward_mean"])
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 1.5
    assert {"objective/kl", "ppo/loss/total", "ppo/mean_scores", "ppo/policy/clipfrac"} <= stats.keys()
    assert ppo_trainer.kl_ctl.value == 0.0
    ppo_trainer.save_pretrained(tmp_path / "tuned")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "tuned"))
    assert torch.equal(loaded.v_head.summary.weight, model.v_head.summary.weight)


def test_responses_come_with_their_queries_or_without(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, _ = made
    trainer = PPOTrainer(settings(tmp_path, monkeypatch), model, None, tokenizer)
    queries = [torch.tensor([1, 2]), torch.tensor([3])]
    whole = trainer.generate(queries, max_new_tokens=4)
    assert [ids[: len(query)].tolist() for ids, query in zip(whole, queries, strict=True)] == [[1, 2], [3]]
    alone = trainer.generate(queries, return_prompt=False, max_new_tokens=4)
    assert all(1 <= len(ids) <= 4 for ids in alone)
    assert trainer.generate(queries[0], max_new_tokens=4).dim() == 2
    with pytest.raises(ValueError, match=r"a query is a tensor \[P\]"):
        trainer.generate(torch.ones(2, 2))
    with pytest.raises(ConfigError, match="beam search"):
        trainer.generate(queries, num_beams=2)


@table(
    "changes, words",
    [
        ({"queries": [torch.tensor([1])] * 3}, r"Batch size \(16\) does not match number of examples"),
        ({"scores": [1.0] * 16}, "Elements in scores must be tensors"),
        ({"responses": torch.ones(16, 2)}, "responses must be a list of tensors"),
        ({"scores": [torch.ones(2)] * 16}, "0- or 1-dimensional"),
    ],
)
def test_wrong_arguments_of_step_are_told(
    changes: dict[str, Any], words: str, made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, _ = made
    trainer = PPOTrainer(settings(tmp_path, monkeypatch), model, None, tokenizer)
    given = {name: [torch.tensor([1, 2])] * 16 for name in ("queries", "responses")}
    with pytest.raises(ValueError, match=words):
        trainer.step(**{**given, "scores": [torch.tensor(1.0)] * 16, **changes})


def test_masked_tokens_of_responses_are_not_trained_on(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, _ = made
    trainer = PPOTrainer(settings(tmp_path, monkeypatch, batch_size=2, mini_batch_size=2), model, None, tokenizer)
    queries, responses = [torch.tensor([1]), torch.tensor([2])], [torch.tensor([3, 4, 5]), torch.tensor([4, 5])]
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
    stats = trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor([2.0])], response_masks=masks)
    assert stats["ppo/mean_scores"] == 1.5
    assert stats["tokens/responses_len_mean"] in (2.0, 2.5)


def test_settings_are_translated_or_refused(made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, _ = made
    config = settings(
        tmp_path, monkeypatch, mini_batch_size=4, gradient_accumulation_steps=2, target=3.0, use_score_scaling=True,
        score_clip=2.0, early_stopping=True, target_kl=0.5, max_grad_norm=0.3, init_kl_coef=0.1,
    )  # fmt: skip
    trainer = PPOTrainer(config, model, None, tokenizer)
    found = trainer.trainer.config
    method, train = found.method, found.train
    assert (train.batch_size, train.microbatch_size, found.rollout.num_rollouts) == (8, 4, 16)
    assert (method.target, method.scale_reward, method.cliprange_reward) == (3.0, "running", 2.0)
    assert (method.target_kl, train.max_grad_norm, found.optimizer.name) == (0.5, 0.3, "adam")
    assert trainer.kl_ctl.value == 0.1
    given = {"tracker_kwargs": {"wandb": {"name": "first", "tags": ["a"]}}, "project_kwargs": {"logging_dir": "logs"}}
    found = translate("trl", {"PPOConfig": {"log_with": "wandb", **given}}).config["train"]
    wandb = {"name": "wandb", "project": "trl", "run_name": "first", "tags": ["a"]}
    assert (found["trackers"], found["run_dir"]) == ([wandb], "logs")
    logging = settings(tmp_path, monkeypatch, project_kwargs={"logging_dir": "logs"})
    for name in ("logs", "logs-2"):
        made = PPOTrainer(logging, model, None, tokenizer).trainer
        made.begin()
        assert made.run_dir.name == name
    with pytest.raises(ConfigError, match=r"PPOConfig\.project_kwargs: given total_limit; PPOTrainer saves nothing"):
        PPOTrainer(settings(tmp_path, monkeypatch, project_kwargs={"total_limit": 2}), model, None, tokenizer)
    with pytest.raises(ValueError, match="should be a multiple of mini_batch_size"):
        PPOConfig(batch_size=10, mini_batch_size=4)
    with pytest.raises(ValueError, match="config should be a PPOConfig"):
        PPOTrainer(None, model, None, tokenizer)
    with pytest.raises(ConfigError, match="optimizer should be one of torch"):
        PPOTrainer(config, model, None, tokenizer, optimizer=object())


QUERIES, RESPONSES = [torch.tensor([1]), torch.tensor([2])], [torch.tensor([3, 4]), torch.tensor([4])]


def test_a_schedule_advances_once_per_step_and_the_last_gradient_can_be_read(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has four optimizer steps; the rates are 0.04, 0.02 and 0.01."""
    model, tokenizer, _ = made
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.04)
    lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    config = settings(tmp_path, monkeypatch, batch_size=2, mini_batch_size=1, ppo_epochs=2, vf_coef=1.0)
    trainer = PPOTrainer(config, model, None, tokenizer, optimizer=optimizer, lr_scheduler=lr_scheduler)
    rates = []
    for _ in range(2):
        rates.append(trainer.step(QUERIES, RESPONSES, [torch.ones(1)] * 2)["ppo/learning_rate"])
    assert rates == pytest.approx([0.04, 0.02])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert trainer.trainer.progress.step == 8
    assert trainer.lr_scheduler is lr_scheduler
    assert trainer.optimizer.optimizer is optimizer
    gradients = [parameter.grad for parameter in model.parameters()]
    assert any(bool(gradient.any()) for gradient in gradients if gradient is not None)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.step(QUERIES, RESPONSES, [torch.ones(1)] * 2)
    for parameter in model.parameters():
        parameter.grad.fill_(1e6)  # belongs to the step that was made, not to the next
    trainer.step(QUERIES, RESPONSES, [torch.ones(1)] * 2)
    moved = [(new - old).abs().max() for new, old in zip(model.parameters(), before, strict=True)]
    assert max(moved).item() < 1


def test_layers_that_the_reference_shares_have_no_gradient(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, _ = made
    config = settings(tmp_path, monkeypatch, batch_size=2, mini_batch_size=2)
    trainer = PPOTrainer(config, model, None, tokenizer, num_shared_layers=1)
    trainer.step(QUERIES, RESPONSES, [torch.ones(1)] * 2)
    without = {name for name, each in model.named_parameters() if each.grad is None}
    assert "pretrained_model.transformer.h.0.attn.c_attn.weight" in without
    assert not {name for name in without if ".h.1." in name or "v_head" in name or "ln_f" in name}
    assert all(each.grad is None for each in trainer.ref_model.parameters())


def test_logged_statistics_have_the_names_of_trl(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that `step` has logged by names of trainkit are not logged again; a script's own are."""
    model, tokenizer, _ = made
    trainer = PPOTrainer(settings(tmp_path, monkeypatch, batch_size=2, mini_batch_size=2), model, None, tokenizer)
    rewards = [torch.tensor(1.0), torch.tensor([2.0])]
    stats = trainer.step(QUERIES, RESPONSES, rewards)
    assert stats["tokens/queries_dist"].tolist() == [1.0, 1.0]
    stats |= {"mine/words": 7, "mine/tensor": torch.tensor([2.5]), "mine/text": "a"}
    for _ in range(2):
        trainer.log_stats(stats, {}, rewards)
    assert caplog.text.count("log_stats(): the batch has no 'query', 'response'; it has nothing") == 1
    assert stats["env/reward_mean"] == 1.5
    assert stats["env/reward_dist"].tolist() == [1.0, 2.0]
    [run] = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    logged = {name: value for line in lines for name, value in line.items()}
    assert logged["mine/words"] == 7
    assert logged["mine/tensor"] == 2.5
    assert {"objective/kl", "ppo/loss/policy", "ppo/policy/approxkl", "env/reward_mean", "policy/kl"} <= logged.keys()
    assert sum("policy/kl" in line for line in lines) == 1
    trainer.config.log_with = "wandb"
    tables: list[Any] = []
    tracker = SimpleNamespace(log_table=lambda *given, **named: tables.append((given, named)))
    trainer.trainer.hooks.register(type("Opened", (), {"opened": lambda self, trainer: tracker})())
    trainer.log_stats(stats, {"query": ["a", "b"], "response": ["c", "d"]}, rewards)
    wanted = {"columns": ["query", "response", "reward"], "data": [["a", "c", 1.0], ["b", "d", 2.0]], "step": 4}
    assert tables == [(("game_log",), wanted)]
    with pytest.raises(ValueError, match="the batch has no 'response'; it has query; add it, or give columns_to_log"):
        trainer.log_stats(stats, {"query": ["a", "b"]}, rewards)


@table("names, theirs, ours", [("trl", True, False), ("trainkit", False, True)])
def test_trackers_get_the_names_that_are_chosen(
    names: str, theirs: bool, ours: bool, made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script adds is logged in any case."""
    model, tokenizer, _ = made
    config = settings(tmp_path, monkeypatch, batch_size=2, mini_batch_size=2, log_with="tensorboard")
    trainer = PPOTrainer(config, model, None, tokenizer, log_names=names)
    rewards = [torch.tensor(1.0), torch.tensor([2.0])]
    trainer.log_stats({**trainer.step(QUERIES, RESPONSES, rewards), "mine/words": 7}, {}, rewards)
    events = event_accumulator.EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    events.Reload()
    found = {*events.Tags()["scalars"]}
    assert {"env/reward_mean", "mine/words"} <= found
    assert ("ppo/loss/policy" in found, "loss/policy" in found) == (theirs, ours)
    with pytest.raises(ConfigError, match="log_names should be 'trl' or 'trainkit'; given 'trlx'"):
        PPOTrainer(config, model, None, tokenizer, log_names="trlx")


def test_what_trl_checks_is_checked(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer, _ = made
    monkeypatch.chdir(tmp_path)
    _say_once.cache_clear()
    with pytest.warns(UserWarning, match=r"there is no dataset, .*: give step\(\) batch_size queries"):
        trainer = PPOTrainer(PPOConfig(), model, None, tokenizer)
    told = "learning_rate=1.41e-05, which was 1e-05 in 0.7, batch_size=128, which was 256 in 0.7, mini_batch_size=128"
    assert told in caplog.text
    assert (trainer.config.world_size, trainer.config.global_batch_size, trainer.dataset) == (1, 128, None)
    assert trainer.data_collator([{"input_ids": [1, 2]}, {"input_ids": [1]}])["input_ids"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"lr_scheduler should be one of torch.optim; given int"):
        PPOTrainer(PPOConfig(), model, None, tokenizer, lr_scheduler=3)
    with pytest.raises(ValueError, match="push_to_hub_if_best_kwargs has no repo_id"):
        PPOConfig(push_to_hub_if_best_kwargs={"private": True})
    assert (trainer.is_distributed, len(trainer.model_params), trainer.running.mean) == (False, 30, 0.0)
    with pytest.raises(AttributeError, match=r"PPOTrainer has no attribute 'current_step': use trainer"):
        trainer.current_step  # noqa: B018
    with pytest.raises(ConfigError, match="PPOTrainer is not loaded from a directory; load the model from it"):
        PPOTrainer.from_pretrained("tuned")


def test_a_repository_without_an_owner_is_that_of_the_token(
    made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, _ = made
    trainer = PPOTrainer(settings(tmp_path, monkeypatch), model, None, tokenizer)
    pushed: list[Any] = []
    trainer.trainer.push_to_hub = lambda repo, **kwargs: pushed.append((repo, kwargs))
    monkeypatch.setattr("huggingface_hub.whoami", lambda token: {"name": "me"})
    trainer.push_to_hub("tuned", private=False)
    trainer.push_to_hub("them/tuned")
    assert pushed == [("me/tuned", {"private": False}), ("them/tuned", {})]
    monkeypatch.setattr("huggingface_hub.whoami", lambda token: 1 / 0)
    with pytest.raises(ConfigError, match=r"the owner of 'tuned' is not known .* write owner/tuned"):
        trainer.push_to_hub("tuned")


@pytest.mark.daily(kind=("PROMPT_TUNING",))
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING"])
def test_prompts_and_prefixes_are_trained(kind: str, made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the model with the first virtual tokens, so that the first KL is 0."""
    wrapper, tokenizer, _ = made
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        wrapper.pretrained_model, peft_config={"peft_type": kind, "num_virtual_tokens": 3}
    )
    config = settings(tmp_path, monkeypatch, batch_size=2, mini_batch_size=1)
    trainer = PPOTrainer(config, model, None, tokenizer)
    trained = [parameter for parameter in model.pretrained_model.parameters() if parameter.requires_grad]
    before = [parameter.clone() for parameter in trained]
    queries = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=4)
    stats = trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor(0.0)])
    assert stats["objective/kl"] == 0
    assert len(trained) == 1
    assert not torch.equal(before[0], trained[0])


def test_every_setting_of_ppo_has_a_place() -> None:
    told = {path.partition(".")[2] for path in framework("trl").settings if path.startswith("PPOConfig.")}
    assert told == set(PPOConfig.__dataclass_fields__)


def test_a_value_head_is_made_of_a_configuration() -> None:
    head = ValueHead(GPT2Config(n_embd=8, summary_first_dropout=0.1), summary_dropout_prob=0.0)
    assert head(torch.ones(2, 3, 8)).shape == (2, 3, 1)
    assert ValueHead(GPT2Config(n_embd=8)).dropout.p == 0.1


def test_functions_of_core() -> None:
    values, mask = torch.tensor([[0.53675, 0.565, 0.7], [0.185, 0.3, 9.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    white = masked_whiten(values, mask)
    expected = torch.tensor([[0.378842, 0.513631, 1.157758], [-1.299465, -0.750765, 0.0]])
    torch.testing.assert_close(white, expected, atol=1e-5, rtol=0)
    assert masked_mean(values, mask).item() == pytest.approx(0.45735)
    assert masked_var(values, mask).item() == pytest.approx(values[mask.bool()].var().item())
    with pytest.raises(ValueError, match="raise mini_batch_size"):
        masked_var(values, torch.zeros(2, 3))
    assert flatten_dict({"a": {"b": 1}}) == {"a/b": 1}
    with pytest.raises(ValueError, match="contains the separator"):
        flatten_dict({"a/b": 1})
    assert convert_to_scalar({"a": torch.tensor([2.0]), "b": torch.ones(2)})["a"] == 2.0
    assert stats_to_np({"a": torch.ones(2, dtype=torch.bfloat16), "b": 1})["a"].dtype.name == "float32"
