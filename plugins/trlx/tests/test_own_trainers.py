"""Trainers of one's own, as trlX's documentation shows them: registered by name, with methods of trlX overridden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config
from trlx_runs import DIALOGUES, enter, rewards, run, small, untrained, weights

import trainkit_trlx as trlx
from tables import table
from trainkit.errors import ConfigError, DataError
from trainkit.testing import character_tokenizer
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.default_configs import (
    default_ilql_config,
    default_ppo_config,
    default_rft_config,
    default_sft_config,
)
from trainkit_trlx.data.ilql_types import ILQLBatch, ILQLSeq2SeqBatch
from trainkit_trlx.data.method_configs import register_method
from trainkit_trlx.data.ppo_types import PPORLBatch, PPORLElement
from trainkit_trlx.models.modeling_ppo import AutoModelForCausalLMWithHydraValueHead, PPOConfig
from trainkit_trlx.pipeline.offline_pipeline import DialogStore, tokenize_dialogue
from trainkit_trlx.pipeline.ppo_pipeline import PPORolloutStorage
from trainkit_trlx.trainer import BaseRLTrainer, register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import AccelerateRLTrainer
from trainkit_trlx.trainer.accelerate_ilql_trainer import AccelerateILQLTrainer
from trainkit_trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from trainkit_trlx.trainer.accelerate_rft_trainer import AccelerateRFTTrainer
from trainkit_trlx.trainer.accelerate_sft_trainer import AccelerateSFTTrainer
from trainkit_trlx.utils import to_device
from trainkit_trlx.utils.loading import get_trainer
from trainkit_trlx.utils.modeling import logprobs_of_labels


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


TRAINERS = {
    "ppo": (AcceleratePPOTrainer, default_ppo_config, PPORLBatch),
    "ilql": (AccelerateILQLTrainer, default_ilql_config, ILQLBatch),
    "sft": (AccelerateSFTTrainer, default_sft_config, None),
    "rft": (AccelerateRFTTrainer, default_rft_config, None),
}


@table("method", TRAINERS)
def test_a_loss_of_ones_own_is_trained(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets batches of trlX; the inherited loss of these is the one that is trained otherwise."""
    enter(tmp_path, monkeypatch)
    base, default, kind = TRAINERS[method]
    batches: list[Any] = []

    @register_trainer
    class Mine(base):  # type: ignore[misc, valid-type]
        factor = 1.0

        def loss(self, batch: Any) -> Any:
            batches.append(batch)
            loss, stats = super().loss(batch)
            return loss * self.factor, {**stats, "mine": 7}

    usual = run(small(default))
    same = run(small(default, train={"trainer": "Mine"}))
    assert isinstance(same, AccelerateRLTrainer)
    torch.testing.assert_close(weights(same), weights(usual), atol=1e-6, rtol=0)
    assert batches
    assert kind is None or isinstance(batches[0], kind)
    assert set(same.history["mine"].values()) == {7.0}
    Mine.factor = 0.0
    torch.testing.assert_close(weights(run(small(default, train={"trainer": "mine"}))), weights(untrained(default)))


def test_statistics_of_ppo_are_those_of_its_loss_on_the_batch() -> None:
    """`PPOConfig.loss` has golden numbers; what `learn` logs is averaged over micro-batches."""
    sampling = {"max_new_tokens": 6, "eos_token_id": [0, 3]}
    config = small(default_ppo_config, method={"gen_kwargs": sampling, "num_rollouts": 8, "chunk_size": 8})
    trainer: Any = AcceleratePPOTrainer(config, reward_fn=rewards)
    trainer.add_prompt_pipeline(["b", "c", "bc", "d"] * 2)
    trainer.make_experience(8)
    trainer.store.history[0].values += 0.4  # beyond the clipping range
    batch = next(iter(trainer.store.create_loader(8, shuffle=False)))
    tokens = torch.cat([batch.query_tensors, batch.response_tensors], 1)
    mask = batch.logprobs != 0  # EOS is the padding token too
    real = torch.cat([batch.query_tensors != trainer.tokenizer.pad_token_id, mask], 1)
    logits, *_, values = trainer.model(tokens, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0))
    begin = batch.query_tensors.shape[1] - 1
    advantages, returns = trainer.config.method.get_advantages_and_returns(batch.values, batch.rewards, mask.shape[1])
    _, expected = trainer.config.method.loss(
        logprobs=logprobs_of_labels(logits[:, :-1], tokens[:, 1:])[:, begin:],
        values=values[:, begin:-1],
        old_logprobs=batch.logprobs,
        old_values=batch.values,
        advantages=advantages,
        returns=returns,
        mask=mask,
    )
    assert 0 < expected["padding_percentage"] < 1
    assert expected["values/std"] != expected["old_values/std"]
    _, stats = trainer.loss(batch)
    whitened = ("losses/policy_loss", "losses/total_loss")  # over padding there
    compared = [name for name in expected if name not in whitened]
    assert {name: stats[name] for name in compared} == pytest.approx({n: expected[n] for n in compared}, abs=1e-5)


def test_statistics_of_ilql_are_those_of_its_loss_on_the_batch() -> None:
    trainer: Any = AccelerateILQLTrainer(small(default_ilql_config, method={"beta": 0.5}))
    trainer.make_experience([["a", "bc"], ["b", "cde"]] * 2, [0.0, 1.0, 2.0, 3.0], 16)
    batch = next(iter(trainer.store.create_loader(4)))
    for name, parameter in trainer.model.ilql_heads.named_parameters():  # they begin with zeros
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    arguments = ("input_ids", "attention_mask", "actions_ixs", "states_ixs")
    logits, qs, target_qs, vs, *_ = trainer.model(**{name: getattr(batch, name) for name in arguments})
    _, expected = trainer.config.method.loss((logits, (qs, target_qs, vs)), batch)
    _, stats = trainer.loss(batch)
    assert {"qvalues/0/min", "qvalues/1/std", "awac_weight/max", "values/mean", "losses/loss_q"} <= expected.keys()
    assert {name: stats[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_statistics_of_rft_are_those_of_all_responses_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)
    trainer = run(small(default_rft_config))
    pools = [score for pool in trainer.trainer.pools.values() for score in pool.values()]
    logged = [trainer.trainer.history[f"trlx/{name}"] for name in ("scores_mean", "len_samples_selected")]
    assert [*logged[0].values()][-1] == pytest.approx(sum(pools) / len(pools))
    assert [*logged[1].values()][-1] <= len(pools)
    assert trainer.named({"trlx/scores_mean": 1.0, "loss/total": 2.0}) == {"scores_mean": 1.0, "loss": 2.0}


def test_responses_of_an_encoder_decoder_begin_with_its_start_token() -> None:
    """As in trlX, where decoder inputs are responses; numbers are those of the tokens after it."""
    t5 = T5Config(vocab_size=10, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=7)
    seq2seq = {"model_path": t5, "model_arch_type": "seq2seq"}

    @register_trainer
    class Apart(AcceleratePPOTrainer):
        def loss(self, batch: PPORLBatch) -> Any:
            assert (batch.response_tensors[:, 0] == 7).all()
            assert batch.response_tensors.shape[1] == batch.rewards.shape[1] + 1
            return super().loss(batch)

    usual = run(small(default_ppo_config).evolve(model=seq2seq))
    same = run(small(default_ppo_config, train={"trainer": "Apart"}).evolve(model=seq2seq))
    torch.testing.assert_close(weights(same), weights(usual), atol=1e-6, rtol=0)
    engine = same.trainer
    same.make_experience(4)
    batch = next(iter(same.store.create_loader(4, shuffle=False)))
    again = engine.as_trlx(engine.from_trlx(batch))
    assert torch.equal(again.response_tensors, batch.response_tensors)
    torch.testing.assert_close(again.rewards, batch.rewards)


def test_batches_of_ilql_have_the_decoder_inputs_of_an_encoder_decoder() -> None:
    """They begin with the start token, so that every token of an output is an action."""
    t5 = T5Config(vocab_size=10, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=7)
    seq2seq = {"model_path": t5, "model_arch_type": "seq2seq"}
    compared: list[Any] = []

    @register_trainer
    class OfT5(AccelerateILQLTrainer):
        def loss(self, batch: ILQLSeq2SeqBatch) -> Any:
            names = ("input_ids", "attention_mask", "decoder_input_ids", "actions_ixs", "states_ixs")
            logits, qs, target_qs, vs, *_ = self.model(**{name: getattr(batch, name) for name in names})
            _, expected = self.config.method.loss((logits, (qs, target_qs, vs)), batch)  # type: ignore[attr-defined]
            loss, stats = super().loss(batch)
            compared.append((stats, expected))
            return loss, stats

    usual = run(small(default_ilql_config).evolve(model=seq2seq))
    same = run(small(default_ilql_config, train={"trainer": "OfT5"}).evolve(model=seq2seq))
    torch.testing.assert_close(weights(same), weights(usual), atol=1e-6, rtol=0)
    for stats, expected in compared:
        assert {name: stats[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    engine = same.trainer
    batch = engine.as_trlx(engine.make_experience(engine.pipeline.take(0, 4)))
    again = engine.as_trlx(engine.from_trlx(batch))
    assert all(torch.equal(getattr(again, name), value) for name, value in vars(batch).items())
    with pytest.raises(
        ConfigError, match="samples of an encoder-decoder are not kept as token ids; override make_experience"
    ):
        _ = same.store


def test_push_to_store_of_ones_own_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)
    pushed: list[int] = []

    @register_trainer
    class Pushing(AcceleratePPOTrainer):
        def push_to_store(self, data: Any) -> None:
            pushed.append(len(data))
            super().push_to_store(data)

    trainer = run(small(default_ppo_config, train={"trainer": "Pushing", "total_steps": 2}))
    assert set(pushed) == {trainer.config.method.num_rollouts}


@table("store", [False, True])
def test_a_run_that_is_resumed_ends_as_one_that_was_not_stopped(
    store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)

    def loss(self: Any, batch: Any) -> Any:
        loss, stats = super(type(self), self).loss(batch)
        return loss, {**stats, "mine": 1.0}

    def make_experience(self: Any, num_rollouts: int = 1024, iter_count: int = 0) -> None:
        super(type(self), self).make_experience(num_rollouts, iter_count)

    methods = {"make_experience": make_experience} if store else {"loss": loss}
    register_trainer(type("Resumed", (AcceleratePPOTrainer,), methods))
    train = {"trainer": "Resumed", "total_steps": 6, "checkpoint_interval": 3}
    whole = run(small(default_ppo_config, train=train))

    def fail(metrics: dict[str, float]) -> None:
        if metrics.get("losses/total_loss") is not None and trainer.iter_count == 5:
            raise KeyboardInterrupt

    config = small(default_ppo_config, train={**train, "checkpoint_dir": "again"})
    trainer = get_trainer("resumed")(config=config, reward_fn=rewards)
    trainer.add_prompt_pipeline(["b", "c"] * 4)
    with pytest.raises(KeyboardInterrupt):
        trainer.learn(log_fn=fail)
    where = "auto" if store else "again/checkpoint_3"  # trlX's name of a checkpoint
    resumed = run(config.evolve(train={"resume_from_checkpoint": where}))
    assert torch.equal(weights(resumed), weights(whole))
    ours, theirs = resumed.running_moments, whole.running_moments
    assert (ours.count, ours.mean, ours.std) == (theirs.count, theirs.mean, theirs.std)


def test_methods_of_a_trainer_of_ones_own_are_called_as_in_trlx() -> None:
    """Collections are those of its make_experience, which may change what is in the store."""
    calls: list[Any] = []

    @register_method
    class MineConfig(PPOConfig):
        pass

    @register_trainer("Own")
    class Mine(AcceleratePPOTrainer):
        def get_arch(self, config: TRLConfig) -> Any:
            calls.append(("get_arch", config.model.num_layers_unfrozen))
            return super().get_arch(config)

        def prepare_learning(self) -> None:
            calls.append("prepare_learning")

        def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
            super().make_experience(num_rollouts, iter_count)
            for element in self.store.history:
                element.rewards = element.rewards * 0 + 3
            calls.append(("make_experience", num_rollouts, iter_count, len(self.store)))

        def loss(self, batch: PPORLBatch) -> Any:
            assert set(batch.rewards.unique().tolist()) <= {0.0, 3.0}
            return super().loss(batch)

        def post_backward_callback(self) -> None:
            calls.append(("post_backward_callback", self.iter_count))

        def post_epoch_callback(self) -> None:
            calls.append("post_epoch_callback")

        def evaluate(self) -> Any:
            found = super().evaluate()
            calls.append(("evaluate", found["reward/mean"] == found["eval/reward"]))
            return found

        def save_pretrained(self, directory: str | None = None, **kwargs: Any) -> Any:
            calls.append(("save_pretrained", str(directory)))
            return super().save_pretrained(directory, **kwargs)

    config = small(default_ppo_config, train={"trainer": "own", "total_steps": 8, "eval_interval": 8})
    config.method = MineConfig(**{**vars(config.method), "name": "MineConfig"})
    trainer = run(config)
    kinds = [call if isinstance(call, str) else call[0] for call in calls]
    assert kinds == [
        *("get_arch", "prepare_learning", "evaluate", "make_experience"),
        *("post_backward_callback", "post_backward_callback", "post_epoch_callback", "make_experience"),
        *("post_backward_callback", "post_backward_callback", "post_epoch_callback", "evaluate", "save_pretrained"),
    ]
    assert [call[1:] for call in calls if call[0] == "make_experience"] == [(8, 0, 8), (8, 4, 8)]
    assert ("evaluate", True) in calls
    loaded = AutoModelForCausalLM.from_pretrained("run/checkpoint_8/hf_model")
    assert torch.equal(loaded.transformer.wte.weight, trainer.model.base_model.transformer.wte.weight)
    best = AutoModelForCausalLM.from_pretrained("run/best_checkpoint/hf_model")
    assert (best.config.n_embd, trainer.iter_count) == (16, 8)


def test_the_store_of_sft_has_strings_as_they_are_trained_on() -> None:
    trainer = AccelerateSFTTrainer(small(default_sft_config))
    trainer.make_experience(["abc", "cb"], 16)
    rows = trainer.trainer.make_experience(trainer.trainer.pipeline.take(0, 2))
    trained = [ids[real].tolist() for ids, real in zip(rows.input_ids, rows.attention_mask, strict=True)]
    assert sorted(trained) == sorted(item["input_ids"] for item in trainer.store)
    assert trained[0][-1] == trainer.tokenizer.eos_token_id


def test_an_epoch_of_samples_is_one_pass() -> None:
    calls: list[tuple[str, int]] = []

    @register_trainer
    class Epochs(AccelerateSFTTrainer):
        def post_backward_callback(self) -> None:
            calls.append(("pass", self.iter_count))

        def post_epoch_callback(self) -> None:
            calls.append(("epoch", self.iter_count))

    trainer = run(small(default_sft_config, train={"trainer": "Epochs", "epochs": 2, "total_steps": 100}))
    assert calls == [("pass", 4), ("epoch", 4), ("pass", 8), ("epoch", 8)]
    assert (trainer.n_inner_epochs, trainer.total_steps) == (1, 8)


def test_rollouts_can_be_made_and_pushed_before_training() -> None:
    trainer = AcceleratePPOTrainer(small(default_ppo_config, train={"minibatch_size": None}), reward_fn=rewards)
    with pytest.raises(ConfigError, match="needs prompts; call add_prompt_pipeline"):
        trainer.make_experience(4)
    trainer.add_prompt_pipeline(["b", "c"] * 2)
    trainer.make_experience(4, 0)
    mine = list(trainer.store.history)
    pad, one = torch.tensor([trainer.tokenizer.pad_token_id]), mine[0]
    long = {
        "query_tensor": torch.cat([pad, one.query_tensor]),
        "response_tensor": torch.cat([one.response_tensor, pad]),
    }
    padded = PPORLElement(**{**vars(one), **long})
    trainer.push_to_store([padded, mine[1]])  # trlX pads the prompts and responses of what it stores
    same = [trainer.trainer.from_trlx([each]).sequences.input_ids for each in (padded, one)]
    assert torch.equal(*same)
    with pytest.raises(
        DataError, match=r"rollout 0 has \d logprobs, \d values, 0 rewards and \d tokens; give one of each"
    ):
        trainer.trainer.from_trlx([replace(one, rewards=one.rewards[:0])])
    assert len(trainer.store) == 6
    assert len({element.response_tensor.tolist().__repr__() for element in mine}) > 1
    batch = next(iter(trainer.store.create_loader(6, shuffle=False)))
    loss, stats = trainer.loss(batch)
    assert {"losses/total_loss", "losses/policy_loss", "losses/value_loss", "ratio"} <= stats.keys()
    assert stats["ratio"] == pytest.approx(1)
    assert stats["losses/total_loss"] == pytest.approx(loss.item())
    trainer.accelerator.backward(loss)
    assert all(p.grad is not None for p in trainer.model.parameters() if p.requires_grad)
    trainer.opt.zero_grad()
    trainer.learn()  # 6 rollouts of the store and 8 further ones, of which 4 are a step
    assert (trainer.iter_count, len(trainer.store)) == (2, 0)
    assert trainer.progress.samples == 14


@table("default", [default_sft_config, default_ilql_config])
def test_samples_that_are_pushed_to_the_store_are_trained_on(
    default: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    made = AccelerateSFTTrainer if default is default_sft_config else AccelerateILQLTrainer
    trainer = made(small(default, train={"epochs": 1, "total_steps": 100}))
    with pytest.raises(ConfigError, match="has no store"):
        trainer.push_to_store([])
    trainer.make_experience(DIALOGUES, *([[0.0, 1.0] * 8] if default is default_ilql_config else []), 3)
    longest = max(len(item["input_ids"] if default is default_sft_config else item.input_ids) for item in trainer.store)
    assert (len(trainer.store), longest) == (16, 3)  # cut from 4 tokens, EOS included
    trainer.push_to_store([*trainer.store][:4])
    trainer.learn()
    assert trainer.iter_count == 5


@table("method", ["loss", "make_experience"])
def test_tokens_that_are_the_padding_token_too_stay(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that begins with EOS, which pads, keeps it, also if its rewards are changed."""
    enter(tmp_path, monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained("letters")
    tokenizer.pad_token = None
    tokenizer.save_pretrained("letters")
    eos = tokenizer.eos_token
    ratios: list[float] = []

    def loss(self: Any, batch: Any) -> Any:
        if method == "loss":
            batch.rewards = batch.rewards + 1.0
        loss, stats = super(type(self), self).loss(batch)
        ratios.append(stats["ratio"])
        assert (batch.query_tensors[:, :2] == tokenizer.eos_token_id).all()
        return loss, stats

    def make_experience(self: Any, num_rollouts: int = 1024, iter_count: int = 0) -> None:
        super(type(self), self).make_experience(num_rollouts, iter_count)

    made = {"loss": loss, **({"make_experience": make_experience} if method == "make_experience" else {})}
    register_trainer(type("Padded", (AcceleratePPOTrainer,), made))
    config = small(default_ppo_config, train={"trainer": "Padded", "total_steps": 1, "minibatch_size": None})
    trlx.train(reward_fn=rewards, prompts=[f"{eos}{eos}b", f"{eos}{eos}c"] * 4, config=config)
    assert ratios == [pytest.approx(1)]  # the prompt is that of the old log-probabilities


def test_a_collection_without_rollouts_is_refused() -> None:
    class Idle(AcceleratePPOTrainer):
        def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
            pass

    trainer = Idle(small(default_ppo_config), reward_fn=rewards)
    trainer.add_prompt_pipeline(["b", "c"])
    with pytest.raises(DataError, match=r"Idle\.make_experience put nothing into the store; call push_to_store"):
        trainer.learn()


def test_the_configuration_may_be_changed_until_training() -> None:
    trainer = AcceleratePPOTrainer(small(default_ppo_config), reward_fn=rewards)
    assert isinstance(trainer.config, TRLConfig)
    method: Any = trainer.config.method
    assert (method.chunk_size, method.gen_kwargs["max_new_tokens"], trainer.iter_count) == (4, 4, 0)
    trainer.add_prompt_pipeline(["b", "c"] * 4)
    trainer.add_eval_pipeline(["b"])
    trainer.config.train.total_steps = 3
    trainer.generate_kwargs["max_new_tokens"] = 2
    trainer.learn()
    assert (trainer.iter_count, trainer.history["rollout/length"][1] <= 2) == (3, True)
    assert (trainer.kl_ctl.value, trainer.opt.param_groups[0]["lr"]) == (0.001, 1e-2)
    trainer.kl_ctl.value = 0.5
    assert trainer.trainer.kl.coef == 0.5
    trainer.config.train.total_steps = 4
    with pytest.raises(ConfigError, match="changed after the model was loaded"):
        trainer.learn()
    for name in ("opt", "total_steps", "kl_ctl", "model", "scheduler", "n_inner_epochs"):
        with pytest.raises(
            ConfigError, match=f"{name} of AcceleratePPOTrainer is trainkit's and cannot be set: .*set|give|over"
        ):
            setattr(trainer, name, 3)


def test_functions_and_stop_sequences_may_be_set_before_training() -> None:
    trainer = AcceleratePPOTrainer(small(default_ppo_config))
    trainer.add_prompt_pipeline(["b", "c"] * 4)
    trainer.add_eval_pipeline(["b"])
    seen: list[str] = []

    def reward_fn(outputs: list[str]) -> list[float]:
        seen.extend(outputs)
        return [0.0] * len(outputs)

    trainer.reward_fn = reward_fn
    trainer.metric_fn = lambda samples: {"count": float(len(samples))}
    trainer.stop_sequences = ["a", "b", "c", "d"]
    trainer.learn()
    assert not {*"abcd"} & {*"".join(output.removesuffix(trainer.tokenizer.eos_token) for output in seen)}
    assert trainer.history["eval/metrics/count"][2] == 1.0


def test_an_adapter_is_added_to_a_model_of_ones_own() -> None:
    class Mine(AccelerateSFTTrainer):
        def get_arch(self, config: TRLConfig) -> Any:
            return AutoModelForCausalLM.from_config(config.model.model_path)

    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2}
    for made in (Mine, AccelerateSFTTrainer):
        trainer = made(small(default_sft_config).evolve(model={"peft_config": adapter}))
        trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        assert trained
        assert all("lora" in name for name in trained)


OVERRIDES = {
    "create_train_dataloader": "derive from AccelerateRLTrainer",
    "setup_model": "override get_arch",
    "setup_optimizer": r"give optimizer=",
    "setup_scheduler": r"give scheduler=",
    "decode": "reward_fn and metric_fn",
    "generate": "gen_kwargs",
    "generate_eval": "gen_kwargs",
    "save": "save_fn",
}


@table("name", OVERRIDES)
def test_an_override_that_would_not_be_called_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Mine\.{name} would not be used: .*{OVERRIDES[name]}"):
        type("Mine", (AcceleratePPOTrainer,), {name: lambda self: None})


def test_rollouts_of_rft_are_made_by_trainkit() -> None:
    with pytest.raises(ConfigError, match=r"make_experience would not be used: change reward_fn"):
        type("Mine", (AccelerateRFTTrainer,), {"make_experience": lambda self: None})


# ------------------------------------------------------------------------------------------- trainers with trlX's loop


def test_a_trainer_on_the_base_class_has_the_loop_of_trlx() -> None:
    calls: list[str] = []
    losses: list[float] = []

    @register_trainer
    class Plain(AccelerateRLTrainer):
        def get_arch(self, config: TRLConfig) -> Any:
            return AutoModelForCausalLM.from_config(config.model.model_path)

        def loss(self, batch: Any) -> Any:
            calls.append(f"loss of {len(batch['input_ids'])}")
            labels = batch["labels"].masked_fill(~batch["attention_mask"].bool(), -100)
            loss = self.model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
            return loss, {"loss": loss.item()}

        def make_experience(self, samples: Any, seq_length: int) -> None:
            dialogues = [tokenize_dialogue(each, self.tokenizer, seq_length) for each in samples]
            self.store = DialogStore(dialogues, self.tokenizer)

        def post_epoch_callback(self) -> None:
            calls.append("post_epoch_callback")

    config = small(default_sft_config, train={"trainer": "Plain", "total_steps": 6, "checkpoint_interval": 4})
    trainer = run(config)
    assert calls[:9] == ["loss of 2"] * 8 + ["post_epoch_callback"]
    assert (trainer.iter_count, trainer.nth_evaluation, len(calls)) == (6, 4, 13)
    texts = trainer.decode(*[trainer.tokenizer(["ab"], return_tensors="pt").input_ids] * 2)
    assert texts == (["ab"], ["ab"], [""])
    for step in (4, 6):
        AutoModelForCausalLM.from_pretrained(f"run/checkpoint_{step}/hf_model")
    again = get_again(config)
    again.learn(log_fn=lambda stats: losses.append(stats.get("loss", 0.0)))
    assert (again.iter_count, len([loss for loss in losses if loss])) == (7, 1)


def get_again(config: TRLConfig) -> Any:
    """Return a trainer that resumes after step 6 and makes one more."""
    config.train.resume_from_checkpoint, config.train.total_steps = "run/checkpoint_6", 7
    trainer = trlx.trainer.plain(config)  # type: ignore[attr-defined]
    trainer.make_experience(DIALOGUES, 16)
    return trainer


def test_a_trainer_on_the_base_class_may_sample_as_ppo_of_trlx_does() -> None:
    """It prepares its own model, and makes rollouts with generate, decode and the frozen branch of the model."""
    told: list[str] = []

    @register_trainer
    class Sampling(AccelerateRLTrainer):
        def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
            super().__init__(config, **kwargs)
            self.store = PPORolloutStorage(self.tokenizer.pad_token_id, self.tokenizer.padding_side)
            self.model, self.opt, self.scheduler = self.accelerator.prepare(self.model, self.opt, self.scheduler)
            self.generate_kwargs = {**self.generate_kwargs, "do_sample": True}

        def get_arch(self, config: TRLConfig) -> Any:
            return AutoModelForCausalLMWithHydraValueHead.from_config(config.model.model_path, num_layers_unfrozen=1)

        def loss(self, batch: PPORLBatch) -> Any:
            batch = to_device(batch, self.accelerator.device)
            method: Any = self.config.method
            length = batch.rewards.shape[1]
            advantages, returns = method.get_advantages_and_returns(batch.values, batch.rewards, length)
            ids = torch.cat([batch.query_tensors, batch.response_tensors], 1)
            mask = ids.ne(self.tokenizer.pad_token_id)
            outputs = self.model(ids, mask.long(), return_dict=True, position_ids=None)
            part = slice(batch.query_tensors.shape[1] - 1, batch.query_tensors.shape[1] - 1 + length)
            return method.loss(
                logprobs=logprobs_of_labels(outputs.logits[:, :-1], ids[:, 1:])[:, part],
                values=outputs.value[:, :-1][:, part],
                old_logprobs=batch.logprobs,
                old_values=batch.values,
                advantages=advantages,
                returns=returns,
                mask=mask[:, 1:][:, part],
            )

        def prepare_learning(self) -> None:
            self.make_experience(8)
            self.n_inner_epochs, self.total_steps = 2, 6
            self.eval_dataloader = self.eval_pipeline.create_loader(4)

        def post_epoch_callback(self) -> None:
            self.store.clear_history()
            self.make_experience(8, self.iter_count)

        def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
            told.append(f"{num_rollouts} after {iter_count}")
            while len(self.store) < num_rollouts:
                asked = next(self.prompt_iterator)
                samples = self.generate(asked["input_ids"], asked["attention_mask"])
                texts = self.decode(asked["input_ids"], samples, append_eos_token=True)
                assert self.reward_fn is not None
                scores = self.reward_fn(**dict(zip(("samples", "prompts", "outputs"), texts, strict=True)))
                mask = samples.ne(self.tokenizer.pad_token_id).long()
                start = asked["input_ids"].shape[1]
                with torch.no_grad():
                    logits, *_, values = self.model(samples, mask)
                    theirs = self.model.forward_hydra(samples, mask, return_dict=True).logits
                ours, ref = (
                    logprobs_of_labels(each[:, :-1], samples[:, 1:])[:, start - 1 :] for each in (logits, theirs)
                )
                rows = zip(
                    asked["input_ids"], samples[:, start:], ours, values[:, start - 1 : -1], ours - ref, strict=True
                )
                for (query, response, logprobs, value, ratio), score in zip(rows, scores, strict=True):
                    reward = -0.1 * ratio
                    reward[-1] += score
                    self.push_to_store([PPORLElement(query, response, logprobs, value, reward)])

    config = small(default_ppo_config, train={"trainer": "Sampling", "total_steps": 6, "eval_interval": 6})
    before = {}

    def log_fn(stats: dict[str, float]) -> None:
        before.update(stats)

    trainer = get_trainer("Sampling")(config=config, reward_fn=rewards, stop_sequences=["h"])
    trainer.add_prompt_pipeline(["b", "c"] * 4)
    trainer.add_eval_pipeline(["b", "c"])
    trainer.learn(log_fn=log_fn)
    assert (trainer.iter_count, told) == (6, ["8 after 0", "8 after 4"])
    assert {"losses/total_loss", "reward/mean", "learning_rate_group_0"} <= before.keys()
    assert sorted(path.name for path in Path("run").iterdir()) == ["best_checkpoint", "checkpoint_6"]


def test_what_a_trainer_on_the_base_class_lacks_is_named() -> None:
    class Nothing(AccelerateRLTrainer):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing has no get_arch\(config\)"):
        Nothing(small(default_sft_config))

    class Empty(Nothing):
        def get_arch(self, config: TRLConfig) -> Any:
            return AutoModelForCausalLM.from_config(config.model.model_path)

    with pytest.raises(ConfigError, match=r"Empty has nothing to train on: fill self\.store in make_experience"):
        Empty(small(default_sft_config)).learn()
    with pytest.raises(ConfigError, match=r"train\.minibatch_size is 3, and train\.batch_size 4"):
        Empty(small(default_sft_config, train={"minibatch_size": 3}))


def test_a_trainer_with_a_loop_of_its_own_is_run() -> None:
    @register_trainer
    class Bare(BaseRLTrainer):
        def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
            super().__init__(config, **kwargs)
            self.tokenizer = character_tokenizer("abcdefgh")

        def make_experience(self, samples: Any, seq_length: int) -> None:
            self.given = (samples, seq_length)

        def learn(self, *_: Any) -> None:
            self.learnt = True

    trainer = trlx.train(samples=DIALOGUES, config=small(default_sft_config, train={"trainer": "bare"}))
    assert (trainer.given, trainer.learnt, trainer.train_mode) == ((DIALOGUES, 16), True, False)
    with pytest.raises(NotImplementedError, match=r"BaseRLTrainer has no learn\(\)"):
        BaseRLTrainer(small(default_sft_config)).learn()
