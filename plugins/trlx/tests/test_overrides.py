"""What a user replaces of a class of trlX, in any way, is called with what trlX gives it, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, T5Config
from trlx_runs import DIALOGUES, enter, rewards, run, small, untrained, weights

import trainkit_trlx as trlx
from tables import table
from trainkit.errors import CheckpointError, ConfigError, DataError
from trainkit.models import ValueHead
from trainkit_migrate import framework
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from trainkit_trlx.data.ilql_types import ILQLBatch
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.data.ppo_types import PPORLBatch
from trainkit_trlx.models.modeling_ilql import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLHeads
from trainkit_trlx.models.modeling_ppo import (
    AutoModelForCausalLMWithHydraValueHead,
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
)
from trainkit_trlx.pipeline.offline_pipeline import DialogStore, ILQLRolloutStorage, PromptPipeline
from trainkit_trlx.pipeline.ppo_pipeline import PPORolloutStorage
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_ilql_trainer import AccelerateILQLTrainer
from trainkit_trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from trainkit_trlx.trainer.accelerate_rft_trainer import AccelerateRFTTrainer
from trainkit_trlx.trainer.accelerate_sft_trainer import AccelerateSFTTrainer
from trainkit_trlx.trainer.computed import NAMES, SETTINGS
from trainkit_trlx.utils.modeling import make_head


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------- the settings of a method

METHODS: dict[str, tuple[Any, Callable[[], TRLConfig]]] = {
    "ppo": (PPOConfig, default_ppo_config),
    "ilql": (ILQLConfig, default_ilql_config),
}


def with_own(base: Any, default: Any, way: str, monkeypatch: pytest.MonkeyPatch, **own: Any) -> TRLConfig:
    """Return a small configuration whose method has other functions, which are put into it in a way."""
    config = small(default)
    if way == "subclass":
        cls = register_method(type(f"Mine{base.__name__}", (base,), own))
        config.method = cls(**{**vars(config.method), "name": cls.__name__})
    for name, function in own.items():
        if way == "class":
            monkeypatch.setattr(base, name, function)
        elif way == "object":
            setattr(config.method, name, function.__get__(config.method))
    return config


@table("way", ["subclass", "object", "class"])
@table("name", METHODS)
def test_a_loss_of_the_settings_is_trained(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inherited one of what it gets is the one that is trained otherwise."""
    enter(tmp_path, monkeypatch)
    base, default = METHODS[name]
    usual, inherited = run(small(default)), base.loss
    factors, calls = [1.0], list[Any]()

    def loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        loss, stats = inherited(self, *args, **kwargs)
        return loss * factors[-1], {**stats, "mine": {"factor": factors[-1]}}

    config = with_own(base, default, way, monkeypatch, loss=loss)
    same = run(config)
    torch.testing.assert_close(weights(same), weights(usual), atol=1e-6, rtol=0)
    assert set(same.history["mine/factor"].values()) == {1.0}
    args, kwargs = calls[-1]
    if name == "ppo":
        tensors = "logprobs values old_logprobs old_values advantages returns mask"
        assert (args, " ".join(kwargs)) == ((), tensors)
        assert len({tensor.shape for tensor in kwargs.values()}) == 1
        assert (kwargs["mask"].dtype, kwargs["advantages"].requires_grad) == (torch.int64, False)
    else:
        ((logits, (qs, target_qs, values)), labels) = args
        assert isinstance(labels, ILQLBatch)
        assert [x.dim() for x in (logits, *qs, *target_qs, values)] == [3] * 6
    factors.append(0.0)
    torch.testing.assert_close(weights(run(config)), weights(untrained(default)))


@table("way", ["subclass", "object", "class"])
def test_advantages_and_returns_of_the_settings_are_trained_on(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    calls: list[Any] = []

    def own(self: Any, values: Any, rewards: Any, response_length: int, use_whitening: bool = True) -> Any:
        calls.append((values, rewards, response_length, use_whitening, self.gamma))
        return torch.full_like(values, 2.0), values + 3.0

    trainer = run(with_own(PPOConfig, default_ppo_config, way, monkeypatch, get_advantages_and_returns=own))
    for values, given, length, whitens, gamma in calls:
        assert values.shape == given.shape == (2, length)
        assert (whitens, gamma) == (True, 1)
    first = min(trainer.history["loss/policy"])
    assert trainer.history["loss/policy"][first] == pytest.approx(-2, abs=1e-5)  # at a ratio of 1
    assert trainer.history["loss/value"][first] == pytest.approx(4.5, abs=1e-5)  # half of 3 squared


def test_settings_of_ones_own_are_read_where_the_user_reads_them() -> None:
    """They may change while the trainer trains; those of trlX may not."""
    seen: list[float] = []

    @register_method
    @dataclass
    class Annealed(PPOConfig):
        share: float = 1.0

        def loss(self, *args: Any, **kwargs: Any) -> Any:
            loss, stats = super().loss(*args, **kwargs)
            seen.append(self.share)
            return loss * self.share, stats

    @register_trainer
    class Annealing(AcceleratePPOTrainer):
        change = "share"

        def post_backward_callback(self) -> None:
            setattr(self.config.method, self.change, 0.5)

    config = small(default_ppo_config, train={"trainer": "Annealing", "total_steps": 4})
    config = TRLConfig.from_dict({**config.to_dict(), "method": {**vars(config.method), "name": "Annealed"}})
    trainer = run(config)
    assert trainer.config.method.share == 0.5
    assert sorted(set(seen)) == [0.5, 1.0]
    Annealing.change = "gamma"
    with pytest.raises(ConfigError, match="the configuration was changed after the model was loaded"):
        run(config)


def test_heads_of_a_method_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Mine\.heads would not be called, as in trlX since 0\.4: derive"):
        type("Mine", (ILQLConfig,), {"heads": lambda self, hidden_size, vocab_size: None})


def test_a_method_without_settings_of_trlx_is_refused() -> None:
    @register_method
    class Bare(MethodConfig):
        pass

    config = small(default_ppo_config)
    config.method = Bare("Bare")
    with pytest.raises(ConfigError, match=r"method is a Bare, .*; derive it from PPOConfig, .*, or derive the trainer"):
        AcceleratePPOTrainer(config)


# --------------------------------------------------------------------------------------------------------- trainers


@table("way", ["subclass", "mixin", "object", "class"])
def test_a_method_of_a_trainer_may_be_replaced_in_any_way(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called is called, and what is not is refused."""
    enter(tmp_path, monkeypatch)
    inherited, calls = AcceleratePPOTrainer.loss, list[Any]()

    def loss(self: Any, batch: Any) -> Any:
        calls.append(batch)
        return inherited(self, batch)

    def trained(name: str, function: Any) -> None:
        if way in ("subclass", "mixin"):
            own = {name: function}
            bases = (AcceleratePPOTrainer,) if way == "subclass" else (type("Mixed", (), own), AcceleratePPOTrainer)
            trainer = type("Mine", bases, own if way == "subclass" else {})(small(default_ppo_config), rewards)
        elif way == "class":
            monkeypatch.setattr(AcceleratePPOTrainer, name, function)
            trainer = AcceleratePPOTrainer(small(default_ppo_config), rewards)
        else:
            trainer = AcceleratePPOTrainer(small(default_ppo_config), rewards)
            setattr(trainer, name, function.__get__(trainer))
        trainer.add_prompt_pipeline(["b", "c"] * 4)
        trainer.learn()

    trained("loss", loss)
    assert calls
    with pytest.raises(ConfigError, match=r"generate.* would not be used: change method"):
        trained("generate", lambda self, *_, **__: None)


@table("name", ["max_length", "num_mb", "ref_std", "prompt_iterator", "log_rollouts", "eval_dataloader", "decode"])
def test_an_attribute_that_would_not_be_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    trainer = AcceleratePPOTrainer(small(default_ppo_config), rewards)
    with pytest.raises(ConfigError, match=rf"{name} of AcceleratePPOTrainer (would not be used|is trainkit's).*: \w+"):
        setattr(trainer, name, 3)


def test_names_of_the_adapter_cannot_be_taken() -> None:
    """They are all those of its trainers that trainers of trlX do not have."""
    trlx_has = {path.rpartition(".")[2] for path in framework("trlx").names if ".trainer." in path}
    for cls in (AcceleratePPOTrainer, AccelerateILQLTrainer, AccelerateSFTTrainer, AccelerateRFTTrainer):
        ours = {name for name in dir(cls) if not name.startswith("_")} - trlx_has
        assert ours - {*SETTINGS, "store", "eval_pipeline"} <= {*NAMES}, cls
    for name, words in (
        ("refresh", "the adapter has this name"),
        ("n_inner_epochs", r"set config\.method\.ppo_epochs"),
    ):
        with pytest.raises(ConfigError, match=rf"Mine\.{name} would not be used: {words}"):
            type("Mine", (AcceleratePPOTrainer,), {name: 3})


def test_make_experience_of_an_encoder_decoder_is_called() -> None:
    t5 = T5Config(vocab_size=10, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=7)

    @register_trainer
    class OfEncoders(AccelerateILQLTrainer):
        def make_experience_seq2seq(self, samples: Any, rewards: Any, max_length: int = 2048) -> None:
            self.given = (len(samples), max_length)
            super().make_experience_seq2seq(samples, rewards, max_length)

    config = small(default_ilql_config, train={"trainer": "OfEncoders"})
    assert run(config.evolve(model={"model_path": t5, "model_arch_type": "seq2seq"})).given == (16, 16)


def test_a_loss_of_ones_own_gets_as_many_rows_as_in_trlx() -> None:
    """A whole batch, unless there is a minibatch_size; trainkit would divide this one by its tokens."""
    rows: list[int] = []

    @register_trainer
    class Counting(AccelerateSFTTrainer):
        def loss(self, batch: Any) -> Any:
            rows.append(len(batch["input_ids"]))
            return super().loss(batch)

    changes = {"trainer": "Counting", "batch_size": 300, "seq_length": 16, "total_steps": 1, "minibatch_size": None}
    trlx.train(samples=[["a", "bcdefghabcdefg"]] * 300, config=small(default_sft_config, train=changes))
    assert rows == [300]


def test_a_checkpoint_is_loaded_by_its_name_in_trlx_also_with_other_settings() -> None:
    trainer = run(small(default_sft_config, train={"checkpoint_interval": 1}))
    config = small(default_sft_config, optimizer={"kwargs": {"lr": 1e-3}})
    with pytest.raises(CheckpointError, match=r"(?s)optimizer\.lr.*allow_drift=True"):
        loaded(config)
    again = loaded(config, allow_drift=True)
    assert again.iter_count == 1
    assert trainer.iter_count == 2
    with pytest.raises(ConfigError, match=r"load\(\) takes the directory alone, and is given strict"):
        again.load("run/checkpoint_1", strict=False)


def loaded(config: TRLConfig, **kwargs: Any) -> Any:
    trainer = AccelerateSFTTrainer(config)
    trainer.make_experience(DIALOGUES, 16)
    trainer.load("run/checkpoint_1", **kwargs)
    return trainer


# ----------------------------------------------------------------------------------------------------------- models


def ours(cls: Any, trainer: Any, default: Any, head: tuple[str, Any] | None = None) -> Any:
    """Return a trainer whose get_arch returns a model of a class, perhaps with another head."""

    def get_arch(self: Any, config: TRLConfig) -> Any:
        model = cls.from_config(config.model.model_path)
        if head is not None:
            setattr(model, *head)
        return model

    return type("Mine", (trainer,), {"get_arch": get_arch})(small(default))


MODELS = {
    "forward of a value head's": (AutoModelForCausalLMWithHydraValueHead, "forward", AcceleratePPOTrainer),
    "generate of it": (AutoModelForCausalLMWithValueHead, "generate", AcceleratePPOTrainer),
    "the frozen branch of it": (AutoModelForCausalLMWithHydraValueHead, "forward_hydra", AcceleratePPOTrainer),
    "forward of ILQL's": (AutoModelForCausalLMWithILQLHeads, "forward", AccelerateILQLTrainer),
    "the targets of it": (AutoModelForCausalLMWithILQLHeads, "sync_target_q_heads", AccelerateILQLTrainer),
    "save_pretrained of it": (AutoModelForCausalLMWithILQLHeads, "save_pretrained", AccelerateILQLTrainer),
}


@table("case", MODELS)
def test_a_model_whose_functions_would_not_be_called_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    base, name, trainer = MODELS[case]
    default = default_ppo_config if trainer is AcceleratePPOTrainer else default_ilql_config
    cls = type("MyModel", (base,), {name: lambda self, *_, **__: None})
    with pytest.raises(ConfigError, match=rf"MyModel\.{name} would not be called: .*derive the trainer from"):
        ours(cls, trainer, default)
    assert ours(type("MyModel", (base,), {"helper": lambda self: 1}), trainer, default).model is not None


def test_a_head_of_ones_own_is_trained_or_refused() -> None:
    class Doubled(ValueHead):
        def forward(self, states: Any) -> Any:
            return super().forward(states) * 2

    head = Doubled(16, start="normal")
    trainer = ours(AutoModelForCausalLMWithValueHead, AcceleratePPOTrainer, default_ppo_config, ("v_head", head))
    assert trainer.model.v_head is head
    plain = make_head(16, 1)
    with pytest.raises(ConfigError, match=r"(?s)v_head of the model is .*; give a trainkit\.models.*ValueHead"):
        ours(AutoModelForCausalLMWithValueHead, AcceleratePPOTrainer, default_ppo_config, ("v_head", plain))

    class Heads(ILQLHeads):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    heads = ("ilql_heads", Heads(16, 10, two_qs=True, alpha=0.1))
    with pytest.raises(ConfigError, match=r"Heads\.forward would not be called"):
        ours(AutoModelForCausalLMWithILQLHeads, AccelerateILQLTrainer, default_ilql_config, heads)
    deeper = ILQLHeads(16, 10, two_qs=True, alpha=0.1)
    deeper.q_heads[0][1] = torch.nn.GELU()
    with pytest.raises(ConfigError, match=r"(?s)a head of ilql_heads is .*, and trainkit's are Linear, ReLU, Linear"):
        _ = ours(
            AutoModelForCausalLMWithILQLHeads, AccelerateILQLTrainer, default_ilql_config, ("ilql_heads", deeper)
        ).model


# ----------------------------------------------------------------------------------------------------------- stores


def test_the_store_of_rollouts_may_be_of_a_class_of_ones_own() -> None:
    calls: list[str] = []

    class Recording(PPORolloutStorage):
        def push(self, exps: Any) -> None:
            calls.append("push")
            super().push(exps)

        def __getitem__(self, index: int) -> Any:
            calls.append("item")
            return super().__getitem__(index)

        def export_history(self, location: str, only_text: bool = True) -> None:
            calls.append(f"export to {Path(location).parent}")
            super().export_history(location, only_text)

        def create_loader(self, batch_size: int, shuffle: bool, **_: Any) -> Any:
            calls.append(f"loader of {batch_size}")
            loader = super().create_loader(batch_size, shuffle)
            return [replace(batch, rewards=batch.rewards * 0 + 5.0) for batch in loader]

    @register_trainer
    class Storing(AcceleratePPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.store = Recording(self.tokenizer.pad_token_id, "left")

        def loss(self, batch: Any) -> Any:
            assert set(batch.rewards.unique().tolist()) <= {0.0, 5.0}
            return super().loss(batch)

    config = small(default_ppo_config, train={"trainer": "Storing", "rollout_logging_dir": "rollouts"})
    trainer = run(config)
    assert {"push", "item", "loader of 4", "export to rollouts"} <= {*calls}
    files = [file for file in trainer.rollout_logging_dir.iterdir() if file.name != "config.json"]
    assert [len(json.loads(file.read_text())) for file in files] == [8]


@table("default", [default_sft_config, default_ilql_config])
def test_samples_of_a_store_of_ones_own_are_those_of_its_loader(
    default: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    offline = default is default_sft_config
    base, trainer = (DialogStore, AccelerateSFTTrainer) if offline else (ILQLRolloutStorage, AccelerateILQLTrainer)

    class Half(base):  # type: ignore[misc, valid-type]
        def create_loader(self, batch_size: int) -> Any:
            return list(super().create_loader(batch_size, shuffle=False))[:2]

    class Mine(trainer):  # type: ignore[misc, valid-type]
        def make_experience(self, samples: Any, *args: Any) -> None:
            super().make_experience(samples, *args)
            made = Half([], self.tokenizer) if offline else Half(*[[]] * 6)
            vars(made).update(vars(self.store))
            self.store = made

    made = Mine(small(default, train={"epochs": 1, "total_steps": 100}))
    made.make_experience(DIALOGUES, *([] if offline else [[0.0, 1.0] * 8]), 16)
    made.learn()
    assert made.iter_count == 2


def test_rewards_of_a_store_are_trained_on_as_they_are() -> None:
    """Those of each token, and without normalising them again; changes within the store count."""
    trainer = AccelerateILQLTrainer(small(default_ilql_config, train={"minibatch_size": None}))
    trainer.make_experience(DIALOGUES[:4], [0.0, 1.0] * 2, 16)
    store = trainer.store
    store.rewards = [torch.arange(len(each)) + 2.0 for each in store.rewards]
    seen: list[Any] = []
    trainer.loss = lambda batch: (seen.append(batch), AccelerateILQLTrainer.loss(trainer, batch))[1]
    trainer.learn()
    real = seen[0].dones[:, :-1].bool()
    expected = (torch.arange(real.shape[1]) + 2.0).expand_as(seen[0].rewards)
    assert torch.equal(seen[0].rewards[real], expected[real])


def test_a_store_that_is_none_is_refused() -> None:
    trainer = AccelerateILQLTrainer(small(default_ilql_config))
    trainer.store = ["a"]
    with pytest.raises(DataError, match=r"given \['a'\] \(list\); it has no create_loader: derive it from BaseRoll"):
        trainer.learn()
    store = ILQLRolloutStorage(*[[torch.ones(2)]] * 6)
    store.push([store[0]])
    assert (len(store), len(store.dones)) == (2, 2)  # type: ignore[attr-defined]


def test_a_loader_without_end_is_refused() -> None:
    class Endless(PromptPipeline):
        def create_loader(self, *_: Any, **__: Any) -> Any:
            return iter(int, 1)

    class Texts(PromptPipeline):
        def create_loader(self, *_: Any, **__: Any) -> Any:
            return [["a"]]

    trainer = AcceleratePPOTrainer(small(default_ppo_config), rewards)
    with pytest.raises(
        DataError, match=r"Endless\.create_loader returned .*, which has no length; return a DataLoader"
    ):
        trainer.add_prompt_pipeline(Endless(["a"], 4, trainer.tokenizer))
    with pytest.raises(
        DataError, match=r"Texts\.create_loader gave \['a'\].*; return .* have input_ids, attention_mask"
    ):
        trainer.add_prompt_pipeline(Texts(["a"], 4, trainer.tokenizer))


def test_prompts_of_a_pipeline_are_read_as_they_are_there() -> None:
    trainer = AcceleratePPOTrainer(small(default_ppo_config), rewards)
    pipeline = PromptPipeline(["a", {"prompt": "b", "kind": 1}, "c"], 4, trainer.tokenizer)
    pipeline.prompts[1] |= {"kind": 2}
    pipeline.prompts[2] |= {"input_ids": trainer.tokenizer("dd").input_ids}
    trainer.add_prompt_pipeline(pipeline)
    rows = trainer.trainer.pipeline.rows
    assert [(row["prompt"], row.get("kind")) for row in rows] == [("a", None), ("b", 2), ("dd", None)]


# --------------------------------------------------------------------------------------------------- the configuration


def test_arguments_of_generate_that_are_removed_are_not_used() -> None:
    trainer = AcceleratePPOTrainer(small(default_ppo_config, method={"gen_kwargs": {"temperature": 0.5}}), rewards)
    del trainer.generate_kwargs["temperature"]
    trainer.generate_kwargs["max_new_tokens"] = 3
    assert (trainer.trainer.settings().temperature, trainer.trainer.settings().max_new_tokens) == (1.0, 3)


CHANGES: dict[str, tuple[Any, dict[str, Any], Callable[[Any], Any], Any]] = {
    "gamma": ("method", {"gamma": 0.0}, lambda t: (t.make_experience(4), t.trainer.method.gamma)[1], 0.0),
    "cliprange": (
        "method",
        {"cliprange": 0.125},
        lambda t: (t.make_experience(4), t.loss(next(iter(t.store.create_loader(4, False)))), t.method.cliprange)[2],
        0.125,
    ),
    "chunk_size": ("method", {"chunk_size": 2}, lambda t: t.trainer.config.rollout.batch_size, 2),
    "kwargs": ("optimizer", {"kwargs": {"lr": 0.25}}, lambda t: t.opt.param_groups[0]["lr"], 0.25),
    "total_steps": ("train", {"total_steps": 1}, lambda t: t.total_steps, 1),
    "ppo_epochs": ("method", {"ppo_epochs": 3}, lambda t: t.n_inner_epochs, 3),
    "init_kl_coef": ("method", {"init_kl_coef": 0.5}, lambda t: t.kl_ctl.value, 0.5),
    "seq_length": ("train", {"seq_length": 12}, lambda t: (t.max_length, t.trainer.limit), (12, 12)),
    "model_path": (
        "model",
        {"model_path": GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10)},
        lambda t: t.model.config.n_embd,
        8,
    ),
    "n_layer": ("model.model_path", {"n_layer": 2}, lambda t: len(t.model.base_model.transformer.h), 2),
    "truncation_side": ("tokenizer", {"truncation_side": "left"}, lambda t: t.tokenizer.truncation_side, "left"),
    "checkpoint_dir": ("train", {"checkpoint_dir": "other"}, lambda t: t.save_pretrained().parent.name, "other"),
    "gen_kwargs": ("method", {"gen_kwargs": {"max_new_tokens": 2}}, lambda t: t.trainer.settings().max_new_tokens, 2),
}  # fmt: skip


@table("case", CHANGES)
def test_a_configuration_may_be_changed_until_the_model_is_loaded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is called first follows it; afterwards what would not is refused."""
    enter(tmp_path, monkeypatch)
    section, changes, read, expected = CHANGES[case]
    trainer = AcceleratePPOTrainer(small(default_ppo_config), rewards)
    trainer.add_prompt_pipeline(["b", "c"] * 4)
    vars(attrgetter(section)(trainer.config)).update(changes)
    assert read(trainer) == expected
    _ = trainer.model
    trainer.config.method.gamma = 0.25
    for call in (trainer.learn, trainer.evaluate, lambda: trainer.make_experience(4), lambda: trainer.loss(rollout())):
        with pytest.raises(ConfigError, match="changed after the model was loaded"):
            call()


def rollout() -> PPORLBatch:
    numbers = torch.zeros(1, 1)
    return PPORLBatch(numbers.long(), numbers.long(), numbers, numbers, numbers)
