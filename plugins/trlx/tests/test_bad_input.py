"""What cannot be used is refused with what was given, what is allowed, and what to do."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from trlx_runs import enter, rewards, small

import trainkit_trlx as trlx
from tables import table
from trainkit.errors import CheckpointError, ConfigError, DataError, RewardError
from trainkit_migrate import framework, instead
from trainkit_trlx.data import default_configs
from trainkit_trlx.data.configs import KINDS, TrainConfig, TRLConfig
from trainkit_trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from trainkit_trlx.data.method_configs import get_method
from trainkit_trlx.models.modeling_ppo import PPOConfig
from trainkit_trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from trainkit_trlx.trainer.accelerate_sft_trainer import AccelerateSFTTrainer
from trainkit_trlx.trainer.computed import ABSENT
from trainkit_trlx.utils.loading import get_pipeline, get_trainer


class Case:
    """Calls of trlX at a small size, in a directory that has a tokenizer."""

    def config(self, default: Callable[[], TRLConfig], **changes: Any) -> TRLConfig:
        return small(default, train={"total_steps": 1, "eval_interval": 1, "minibatch_size": None}).evolve(**changes)

    def ppo(self, settings: dict[str, Any] | None = None, **given: Any) -> Any:
        config = self.config(default_ppo_config, **(settings or {}))
        return trlx.train(**{"reward_fn": rewards, "prompts": ["b", "c"] * 2, "config": config, **given})

    def ilql(self, settings: dict[str, Any] | None = None, **given: Any) -> Any:
        config = self.config(default_ilql_config, **(settings or {}))
        return trlx.train(**{"samples": ["ab", "bc"] * 2, "rewards": [1.0, 0.0] * 2, "config": config, **given})

    def masked(self, mask: Any) -> Any:
        return self.ilql({"train": {"trainer_kwargs": {"logit_mask": mask}}}, eval_prompts=["a"])

    def sampled(self, **gen_kwargs: Any) -> Any:
        return self.ppo({"method": {"gen_kwargs": gen_kwargs}})

    def made(self, **given: Any) -> Any:
        return AcceleratePPOTrainer(self.config(default_ppo_config), reward_fn=rewards, **given)

    def learn(self, **functions: Any) -> Any:
        trainer = AcceleratePPOTrainer(self.config(default_ppo_config), reward_fn=rewards)
        trainer.add_prompt_pipeline(["b", "c"])
        trainer.learn(**functions)

    def file(self, text: str) -> TRLConfig:
        Path("config.yml").write_text(text, encoding="utf-8")
        return TRLConfig.load_yaml("config.yml")


def plain(without: str = "", **extra: Any) -> dict[str, Any]:
    """Return the default configuration of PPO as plain data, without a section or a field, and with others."""
    config = default_ppo_config().to_dict()
    section, _, name = without.partition(".")
    if name:
        del config[section][name]
    elif section:
        del config[section]
    for path, value in extra.items():
        section, _, name = path.partition("__")
        if name:
            config[section][name] = value
        else:
            config[section] = value
    return config


def changed(**settings: Any) -> Callable[[Case], Any]:
    return lambda _: TRLConfig.from_dict(plain(**settings))


CASES: dict[str, tuple[Callable[[Case], Any], type[Exception], str]] = {
    # configurations
    "a setting with a typing error": (
        changed(train__batchsize=1),
        ConfigError,
        r"train\.batchsize is no setting; did you mean 'batch_size'\?; train has total_steps",
    ),
    "the same in evolve": (
        lambda t: t.config(default_ppo_config, train={"batchsize": 1}),
        ConfigError,
        r"train\.batchsize is no setting",
    ),
    "the same in update": (
        lambda _: TRLConfig.update(plain(), {"train.batchsize": 1}),
        ConfigError,
        r"'train\.batchsize' is not present in the config.*did you mean 'train\.batch_size'",
    ),
    "a setting of an earlier version": (
        changed(train__orchestrator="PPOOrchestrator"),
        ConfigError,
        r"train\.orchestrator is no setting: trainers sample by themselves.*remove it",
    ),
    "the same as an argument of a class": (
        lambda _: TrainConfig(**{**plain()["train"], "orchestrator": "PPOOrchestrator"}),
        ConfigError,
        r"train\.orchestrator is no setting: trainers sample by themselves",
    ),
    "an argument of a method's class": (
        lambda _: PPOConfig(**plain()["method"], num_topk_samples=1),
        ConfigError,
        r"method\.num_topk_samples is no setting; method has name, ppo_epochs",
    ),
    "a place of an earlier version": (
        changed(model__tokenizer_path="gpt2"),
        ConfigError,
        r"write tokenizer\.tokenizer_path",
    ),
    "a setting of TRL": (
        changed(train__push_to_hub_if_best=True),
        ConfigError,
        r"train\.push_to_hub_if_best is no setting; train has",
    ),
    "a setting is missing": (
        lambda _: TRLConfig.from_dict(plain("method.gamma")),
        ConfigError,
        r"method lacks gamma; add them, or begin with a configuration of data\.default_configs",
    ),
    "a section is missing": (
        lambda t: t.file(yaml.safe_dump({"train": {}, "method": {"name": "PPOConfig"}})),
        ConfigError,
        r"the section model is missing.*a configuration has method, model, tokenizer, optimizer, scheduler, train",
    ),
    "an unknown section": (changed(trian={}), ConfigError, r"'trian' is no section; did you mean 'train'\?"),
    "an empty file": (lambda t: t.file(""), ConfigError, r"a configuration has the sections method, model.*given None"),
    "a section that is a number": (changed(train=3), ConfigError, r"train should be a mapping of settings; given 3"),
    "an update that is a number": (
        lambda _: TRLConfig.update(plain(), {"train": 3}),
        ConfigError,
        r"train should be changed by a mapping of settings; given 3",
    ),
    "a method without name": (
        lambda _: TRLConfig.from_dict(plain("method.name")),
        ConfigError,
        r"method\.name should say which method.*add it",
    ),
    "a configuration that is a dict": (
        lambda t: t.ppo(config=plain()),
        ConfigError,
        r"write TRLConfig\.from_dict\(config\)",
    ),
    # names
    "an unknown method": (
        lambda _: get_method("ppocnfig"),
        ConfigError,
        r"method\.name is 'ppocnfig'.*did you mean 'ppoconfig'\?; known are ilqlconfig",
    ),
    "an unknown trainer": (
        lambda _: get_trainer("PPOTrainer"),
        ConfigError,
        r"train\.trainer is 'PPOTrainer'.*did you mean 'accelerateppotrainer'\?; known are",
    ),
    "an unknown pipeline": (
        lambda _: get_pipeline("PPOPipeline"),
        ConfigError,
        r"train\.pipeline is 'PPOPipeline'.*did you mean 'promptpipeline'\?; known are",
    ),
    "a trainer of another method": (
        lambda t: t.ppo({"train": {"trainer": "AccelerateILQLTrainer"}}),
        ConfigError,
        r"'AccelerateILQLTrainer', which does not train with 'PPOConfig'",
    ),
    "an argument that the trainer does not take": (
        lambda t: t.ppo({"train": {"trainer_kwargs": {"logitmask": 1}}}),
        ConfigError,
        r"'logitmask'; did you mean 'logit_mask'\?; the trainer takes reward_fn",
    ),
    "an argument of an earlier version": (
        lambda t: t.ppo(split_token="|"),
        ConfigError,
        r"train\(\) has no split_token: give samples as lists of messages",
    ),
    "an argument that train never had": (
        lambda t: t.ppo(promts=[]),
        ConfigError,
        r"no promts: it takes model_path, rew",
    ),
    "an argument that the class does not take": (
        lambda t: t.made(stop_sequence=["a"]),
        ConfigError,
        r"AcceleratePPOTrainer has 'stop_sequence'; did you mean 'stop_sequences'\?; the trainer takes",
    ),
    "an attribute that a trainer has not": (
        lambda t: t.made().kl_ctrl,
        AttributeError,
        r"AcceleratePPOTrainer has no attribute 'kl_ctrl'; did you mean 'kl_ctl'\?",
    ),
    "an attribute that trlX's trainers have": (
        lambda t: t.made().mean_kl,
        AttributeError,
        r"AcceleratePPOTrainer has no attribute 'mean_kl': history\['policy/kl'\] has the KL of each collection$",
    ),
    "text in the place of ids": (
        lambda t: t.made().generate("abc"),
        DataError,
        r"token ids should be integers \[B, T\], as tokenizer\(texts, padding=True.*given 'abc'",
    ),
    "text in the place of ids to decode": (
        lambda t: t.made().decode(["a"], ["b"]),
        DataError,
        r"token ids should be integers \[T\]; given 'a'",
    ),
    "a batch that is none": (
        lambda t: t.made().loss({"input_ids": 1}),
        ConfigError,
        r"loss\(\) takes a batch with query_tensors, response_tensors, .*, and query_tensors, .* is missing",
    ),
    "rollouts that are none": (
        lambda t: t.made().push_to_store([{"query": 1}]),
        DataError,
        r"push_to_store\(\) takes a list of PPORLElement; given \{'query': 1\}",
    ),
    "arguments of save_pretrained": (
        lambda t: t.made().save_pretrained("saved", max_shard_size="1GB", state_dict={}),
        ConfigError,
        r"save_pretrained\(\) takes the directory alone, and is given state_dict",
    ),
    "samples for a trainer of rollouts": (
        lambda t: t.ppo(reward_fn=None, samples=["ab"] * 4),
        ConfigError,
        r"'AcceleratePPOTrainer', which learns from reward_fn and prompts; given samples\. Give these, or name another",
    ),
    "no rewards": (
        lambda t: t.ilql(rewards=None),
        ConfigError,
        r"'AccelerateILQLTrainer', which learns from samples and rewards; given samples",
    ),
    "a length that is none": (
        lambda t: AccelerateSFTTrainer(t.config(default_sft_config)).make_experience(["ab"], "long"),
        ConfigError,
        r"the longest sample should be a number of tokens; given 'long'",
    ),
    "a sample in the place of samples": (
        lambda t: AccelerateSFTTrainer(t.config(default_sft_config)).make_experience("ab", 3),
        DataError,
        r"samples should be a list of strings or dialogues; given 'ab'",
    ),
    # functions
    "a reward function of other arguments": (
        lambda t: t.ppo(reward_fn=lambda texts: [0.0]),
        RewardError,
        r"reward_fn takes texts, and there is none: it is called with samples, prompts, outputs, tokenizer, by name",
    ),
    "a reward function of positions": (
        lambda t: t.ppo(reward_fn=lambda a, b, c: [0.0]),
        RewardError,
        r"reward_fn takes a, b, c, and there is none",
    ),
    "a reward function without result": (
        lambda t: t.ppo(reward_fn=lambda samples: None),
        RewardError,
        r"returned None.*return one finite number per sample",
    ),
    "a reward function with one result": (
        lambda t: t.ppo(reward_fn=lambda samples: [1.0]),
        RewardError,
        r"returned 1 scores for 4 samples",
    ),
    "a reward function that is none": (
        lambda t: t.ppo(reward_fn=3),
        ConfigError,
        r"reward_fn should be a function of samples, prompts and outputs; given 3",
    ),
    "a metric function of other arguments": (
        lambda t: t.ppo(metric_fn=lambda texts: {}),
        RewardError,
        r"metric_fn takes texts, and there is none",
    ),
    "a metric function that returns a list": (
        lambda t: t.ppo(metric_fn=lambda samples: [0.0]),
        RewardError,
        r"returned \[0\.0\].*return a dict of name",
    ),
    "a log function without arguments": (
        lambda t: t.learn(log_fn=lambda: None),
        ConfigError,
        r"log_fn is called with one argument, the metrics by their names; given",
    ),
    "a save function that is a path": (
        lambda t: t.learn(save_fn="saved"),
        ConfigError,
        r"save_fn is called with one argument, the directory of the checkpoint; given 'saved'",
    ),
    "an evaluation function of two arguments": (
        lambda t: t.learn(eval_fn=lambda a, b: None),
        ConfigError,
        r"eval_fn is called with one argument, the metrics of the evaluation",
    ),
    # data
    "no prompts": (lambda t: t.ppo(prompts=[]), DataError, "prompts is empty; give at least one"),
    "prompts without prompt": (
        lambda t: t.ppo(prompts=["b", {"text": "b"}]),
        DataError,
        r"prompt 1 is \{'text': 'b'\}.*strings, or dicts with a 'prompt'",
    ),
    "prompts that are numbers": (lambda t: t.ppo(prompts=[1, 2]), DataError, r"prompt 0 is 1 \(int\)"),
    "a single prompt": (lambda t: t.ppo(prompts="bc"), DataError, r"prompts should be a list of strings.*given 'bc'"),
    "a pipeline without prompts": (
        lambda t: AcceleratePPOTrainer(t.config(default_ppo_config), reward_fn=rewards).add_prompt_pipeline(3),
        DataError,
        r"prompts should be a list.*given 3",
    ),
    "a text in the place of samples": (
        lambda t: t.ilql(samples="ab", rewards=[1.0, 0.0]),
        DataError,
        r"samples should be a list, with an entry for each sample; given 'ab'",
    ),
    "a number in the place of rewards": (
        lambda t: t.ilql(rewards=1.0),
        DataError,
        r"rewards should be a list, with an entry for each sample; given 1\.0",
    ),
    "samples that are numbers": (
        lambda t: t.ilql(samples=[1, 2], rewards=[1.0, 2.0]),
        DataError,
        r"sample 0 should be text, \(prompt, output\)",
    ),
    "samples with an odd number of turns": (
        lambda t: t.ilql(samples=[["a", "b", "c"]], rewards=[1.0]),
        DataError,
        "sample 0 has 3 turns; turns alternate prompt, output",
    ),
    "fewer rewards than samples": (
        lambda t: t.ilql(rewards=iter([1.0])),
        DataError,
        "there are 4 samples and 1 rewards; give one reward for each",
    ),
    "rewards that are words": (
        lambda t: t.ilql(rewards=["good"] * 4),
        DataError,
        "reward 0 should be a finite number; given 'good'",
    ),
    "a dataset that is no pair": (
        lambda t: t.ilql(dataset=["a", "b", "c"]),
        ConfigError,
        r"dataset should be \(samples, rewards\); given 3 items",
    ),
    "nothing to learn from": (
        lambda t: t.ppo(reward_fn=None),
        ConfigError,
        r"neither of reward_fn and samples is given; give train\(\) reward_fn",
    ),
    "both kinds of data": (lambda t: t.ppo(samples=["a"]), ConfigError, "each of reward_fn and samples is given"),
    "a mask of another shape": (
        lambda t: t.masked(torch.zeros(3, 3, dtype=torch.bool)),
        ConfigError,
        r"of shape \(10,\) or \(10, 10\); given torch\.bool \(3, 3\)",
    ),
    "a mask of the opposite sense": (
        lambda t: t.masked(~torch.zeros(10, 10, dtype=torch.bool)),
        ConfigError,
        r"True = forbidden, as in trlX; if it should mean allowed, give ~logit_mask",
    ),
    "a mask that is none": (
        lambda t: t.masked("letters"),
        ConfigError,
        r"logit_mask should be a bool tensor of shape \[V, V\], .* True = forbidden; given 'letters'",
    ),
    "a mask that is not square": (
        lambda t: t.masked(torch.zeros(3, 10, dtype=torch.bool)),
        ConfigError,
        r"logit_mask should be a bool tensor of shape \[V, V\], .*; given torch\.bool \(3, 10\)",
    ),
    "a mask to be added": (
        lambda t: t.masked(torch.eye(10) * -9),
        ConfigError,
        r"given torch\.float32 with other values than 0 and 1; write what is forbidden, such as",
    ),
    # settings without counterpart
    "a checkpoint that is not there": (
        lambda t: t.ppo({"train": {"resume_from_checkpoint": "nowhere"}}),
        CheckpointError,
        r"no intact checkpoint at or under nowhere; look for directories step_\*",
    ),
    "a model that is not there": (
        lambda t: t.ppo({"model": {"model_path": "./nowhere"}}),
        ConfigError,
        r"there is no directory 'nowhere'\. Give a hub id, or a local directory",
    ),
    "an optimizer of 8 bits": (
        lambda t: t.ppo({"optimizer": {"name": "adamw_8bit_bnb"}}),
        ConfigError,
        r"optimizer\.name: write adamw, or give an optimizer of bitsandbytes",
    ),
    "an unknown optimizer": (
        lambda t: t.ppo({"optimizer": {"name": "lion"}}),
        ConfigError,
        r"optimizer\.name: given 'lion'.*trainkit knows adam",
    ),
    "an unknown schedule": (
        lambda t: t.ppo({"scheduler": {"name": "cosine"}}),
        ConfigError,
        r"given 'cosine'; trlX has cosine_annealing and linear",
    ),
    "an unknown tracker": (
        lambda t: t.ppo({"train": {"tracker": "comet"}}),
        ConfigError,
        r"train\.tracker: given 'comet'; trlX has wandb and tensorboard",
    ),
    "beam search": (lambda t: t.sampled(num_beams=4), ConfigError, r"method\.gen_kwargs\.num_beams: trainkit samples"),
    "greedy rollouts": (
        lambda t: t.sampled(do_sample=False),
        ConfigError,
        r"method\.gen_kwargs\.do_sample: .*remove do_sample: false",
    ),
    "an argument of generate with a typing error": (
        lambda t: t.sampled(max_new_token=4),
        ConfigError,
        r"no such field; did you mean 'method\.gen_kwargs\.max_new_tokens'",
    ),
    **{
        f"{section}.{name} of another type": (
            lambda t, section=section, name=name: t.ppo({section: {name: [3]}}),
            ConfigError,
            rf"{section}\.{name} should be .*; given \[3\] \(list\)",
        )
        for section, name in (
            *(path.split(".") for path in KINDS),
            ("model", "model_path"),
        )
    },
    "an argument that a model does not take": (
        lambda t: t.ppo({"model": {"model_extra_configs": {"unheard": 1}}}),
        ConfigError,
        r"unexpected keyword argument 'unheard'\. Leave it out",
    ),
    "a store that is none": (
        lambda t: setattr(made := t.made(), "store", []) or made.learn(),
        ConfigError,
        r"store should be a PPORolloutStorage or derive from it; given \[\] \(list\)",
    ),
    "no room for prompts": (
        lambda t: t.ppo({"train": {"seq_length": 3}}),
        ConfigError,
        r"leaves no room for a prompt within 3 tokens; lower it",
    ),
}


@table("name", CASES)
def test_what_cannot_be_used_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, error, words = CASES[name]
    enter(tmp_path, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # dataset= is deprecated
        with pytest.raises(error, match=words):
            call(Case())


@table("eval_interval", [1, 100])
def test_a_mask_is_refused_before_anything_is_trained_or_sampled(
    eval_interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    mask = {"logit_mask": torch.zeros(3, 3, dtype=torch.bool)}
    with pytest.raises(ConfigError, match=r"of shape \(10,\) or \(10, 10\); given torch\.bool \(3, 3\)"):
        Case().ilql({"train": {"trainer_kwargs": mask, "eval_interval": eval_interval}})  # without prompts
    assert not [*Path().rglob("samples.jsonl"), *Path().rglob("metrics.jsonl")]


@table(
    "module, words",
    [
        ("sweep", "its place has trainkit sweep"),
        ("reference", "its place has trainkit compare"),
        ("models.modeling_nemo_ppo", r"no NeMo: use trlx\.models\.modeling_ppo.*train\.sharding"),
        ("trainer.nemo_ppo_trainer", r"no NeMo: write AcceleratePPOTrainer.*train\.sharding"),
        ("trainer.nemo.gpt", r"no NeMo.*train\.sharding"),
        ("ray_tune.wandb", "trainkit sweep"),
        ("orchestrator.ppo_orchestrator", "trainers sample and score by themselves"),
    ],
)
def test_a_module_that_is_lacking_says_what_to_use_instead(module: str, words: str) -> None:
    with pytest.raises(ImportError, match=rf"No module named 'trainkit_trlx\..*{words}"):
        importlib.import_module(f"trainkit_trlx.{module}")


ATTRIBUTES = {
    "": "config reward_fn metric_fn train_mode logit_mask stop_sequences max_length mb_size num_mb mb_count "
    "accelerator model opt scheduler tokenizer nth_evaluation generate_sweep_kwarg generate_kwargs "
    "generate_experience_kwargs store eval_dataloader eval_pipeline total_steps iter_count n_inner_epochs "
    "repeat_interleave",
    "ppo": "log_rollouts ref_model kl_ctl running_moments ref_mean ref_std run_id rollout_logging_dir prompt_iterator "
    "train_dataloader n_updates_per_batch mean_kl",
    "ilql": "ilql train_dataloader",
    "rft": "epoch_count generations_per_prompt prompt_dataloader",
}
"""The attributes that the methods of trlX's trainers set."""


@table("method", ["ppo", "ilql", "sft", "rft"])
def test_attributes_of_trlx_exist_or_say_what_to_read(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch)
    config = Case().config(getattr(default_configs, f"default_{method}_config"))
    trainer = get_trainer(config.train.trainer)(config, **({"reward_fn": rewards} if method in ("ppo", "rft") else {}))
    for name in f"{ATTRIBUTES['']} {ATTRIBUTES.get(method, '')}".split():
        if name in ABSENT:
            with pytest.raises(AttributeError, match=f"no attribute '{name}': "):
                getattr(trainer, name)
        else:
            assert hasattr(trainer, name), name


@table("path", [path for path, name in framework("trlx").names.items() if name.kind != "mapped"])
def test_a_name_that_is_lacking_says_what_to_use_instead(path: str) -> None:
    module, _, name = path.replace("trlx", "trainkit_trlx", 1).rpartition(".")
    with pytest.raises((ImportError, AttributeError, NotImplementedError), match=re.escape(instead("trlx", path)[:40])):
        getattr(importlib.import_module(module), name)()  # functions that are lacking say it when they are called


def test_a_module_that_trlx_has_not_either_is_not_found() -> None:
    for module in ("sweeps", "models.nothing"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(f"trainkit_trlx.{module}")


def test_arguments_of_generate_without_effect_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter(tmp_path, monkeypatch)
    monkeypatch.setattr("trainkit_trlx.data.configs._said", set())
    trainer = AcceleratePPOTrainer(Case().config(default_ppo_config), reward_fn=rewards)
    asked = trainer.tokenizer(["b"], return_tensors="pt")
    for _ in range(2):
        trainer.generate(**asked, pad_token_id=9, max_new_tokens=2)
    assert caplog.text.count("generate(): pad_token_id: has no effect") == 1
    with pytest.raises(ConfigError, match="num_beams: trainkit samples"):
        trainer.generate(**asked, num_beams=2)


@pytest.mark.parametrize("metric", ["reward", "length"])
def test_without_reward_function_the_best_is_that_of_the_metric_reward(
    metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Evaluations give 1, 3 and 2, so that the second one, at step 1, is exported; other metrics do not count."""
    enter(tmp_path, monkeypatch)
    monkeypatch.setattr("trainkit_trlx.data.configs._said", set())
    values = iter([1.0, 3.0, 2.0])
    config = Case().config(default_sft_config, train={"total_steps": 2, "epochs": 4})
    trlx.train(
        samples=["ab", "bc"] * 4, eval_prompts=["a"], metric_fn=lambda **_: {metric: next(values)}, config=config
    )
    mark = Path("run/best/trainkit.json")
    if metric == "reward":
        assert '"step": 1' in mark.read_text(encoding="utf-8")
        assert "save_best" not in caplog.text
    else:
        assert not mark.exists()
        assert caplog.text.count("train.save_best has no effect: evaluations are compared by the reward function") == 1


def test_without_metric_function_the_best_is_told_to_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter(tmp_path, monkeypatch)
    monkeypatch.setattr("trainkit_trlx.data.configs._said", set())
    trlx.train(samples=["ab", "bc"] * 4, config=Case().config(default_sft_config))
    assert caplog.text.count("train.save_best: has no effect") == 1


def test_an_architecture_that_the_model_has_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter(tmp_path, monkeypatch)
    Case().ppo({"model": {"model_arch_type": "seq2seq"}})
    assert caplog.text.count("model.model_arch_type is 'seq2seq', and the model is trained as 'causal'") == 1
