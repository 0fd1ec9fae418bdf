"""Configurations of other frameworks: every field has a place, and translations mean what they meant there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit import TRLConfig
from trainkit.cli import app
from trainkit.config.names import setting_paths
from trainkit.config.tree import merged, nest
from trainkit.errors import ConfigError
from trainkit.plugins import get_method_class
from trainkit_migrate import FRAMEWORKS, configured, framework, rewritten, translate

TRLX = {
    "model": "model_path model_arch_type num_layers_unfrozen peft_config model_extra_configs",
    "tokenizer": "tokenizer_path padding_side truncation_side tokenizer_extra_configs",
    "train": "total_steps seq_length epochs batch_size checkpoint_interval eval_interval pipeline trainer "
    "trainer_kwargs project_name run_name entity_name group_name checkpoint_dir rollout_logging_dir save_best "
    "save_optimizer resume_from_checkpoint tracker logging_dir tags seed minibatch_size",
    "method": "name ppo_epochs num_rollouts chunk_size init_kl_coef target horizon gamma lam cliprange cliprange_value "
    "vf_coef scale_reward ref_mean ref_std cliprange_reward num_value_layers_unfrozen tau cql_scale awac_scale alpha "
    "beta steps_for_target_q_sync two_qs start_percentile end_percentile n_improve_steps n_generations_per_prompt",
}
"""The fields of the configuration of trlX, besides arguments of optimizer, schedule and `generate`."""
BASE: dict[str, Any] = {
    "train": {"trainer": "AcceleratePPOTrainer", "total_steps": 10000, "batch_size": 32, "epochs": 100},
    "method": {"name": "PPOConfig", "num_rollouts": 128, "ppo_epochs": 4, "gen_kwargs": {"max_new_tokens": 40}},
    "optimizer": {"name": "adamw", "kwargs": {"lr": 3e-5}},
    "tokenizer": {"truncation_side": "left"},
}


def trlx(**changes: Any) -> dict[str, Any]:
    """Return a configuration of trlX, changed by dotted path (with ``__`` for the dot)."""
    config = BASE
    for path, value in changes.items():
        config = merged(config, nest(path.replace("__", "."), value))
    return config


def test_every_field_of_trlx_has_a_place() -> None:
    known = {f"{section}.{name}" for section, names in TRLX.items() for name in names.split()}
    known |= {"train.orchestrator", "model.tokenizer_path", "model.model_type"}  # of earlier versions
    table = framework("trlx").settings
    told = {path for path in table if path.split(".")[0] in TRLX and "gen_" not in path}
    assert told == known


def test_every_setting_that_a_table_names_exists() -> None:
    methods = {name for method in ("ppo", "ilql", "sft", "rft") for name in get_method_class(method).model_fields}
    sampling = {*TRLConfig(method="ilql").method.sampling.model_fields}
    known = {path for paths in setting_paths().values() for path in paths} | {f"method.{name}" for name in methods}
    for path, setting in framework("trlx").settings.items():
        if setting.to and setting.to.split(".")[0] == "eval":
            assert setting.to.split(".")[1] in sampling, path
        elif setting.to:
            assert setting.to.removesuffix(".*") in known | {f"rollout.{name}" for name in sampling}, path
        else:
            assert setting.convert or setting.part_of or setting.unused or setting.override or setting.refused, path


@table(
    "given, expected",
    [
        # the steps of PPO are those of its collections: 100 epochs of 4 passes over 128 / 32 batches
        ({}, {"train.total_steps": 1600, "train.batch_size": 32, "train.max_grad_norm": None}),
        ({"train__total_steps": 50}, {"train.total_steps": 50}),
        ({"train__checkpoint_interval": 7}, {"train.save_interval": 7}),
        ({"train__tracker": None}, {"train.trackers": []}),
        ({"train__tracker": "tensorboard", "train__tags": ["a"]}, {"train.trackers": ["tensorboard"]}),
        (
            {"train__tracker": "wandb", "train__entity_name": "us", "train__tags": ["a"]},
            {"train.trackers": [{"name": "wandb", "project": "trlx", "entity": "us", "tags": ["a"]}]},
        ),
        ({"method__scale_reward": False}, {"method.scale_reward": "none"}),
        ({"model__num_layers_unfrozen": 2}, {"model.num_layers_unfrozen": 2}),
        (
            {"model__num_layers_unfrozen": 2, "model__peft_config": {"peft_type": "LORA"}},
            {"model.num_layers_unfrozen": -1, "model.peft_config": {"peft_type": "LORA"}},
        ),
        (
            {"model__num_layers_unfrozen": -1, "model__peft_config": {"lora_dropout": 0.1}},
            {"model.disable_dropout": False},
        ),
        ({"method__scale_reward": "running"}, {"method.scale_reward": "running"}),
        ({"method__cliprange_reward": 0}, {"method.cliprange_reward": None}),
        ({"optimizer__kwargs__betas": [0.9, 0.95]}, {"optimizer.kwargs": {"betas": [0.9, 0.95]}, "optimizer.lr": 3e-5}),
        (
            {"scheduler": {"name": "cosine_annealing", "kwargs": {"T_max": 1e12, "eta_min": 0.0}}},
            {"scheduler.name": "CosineAnnealingLR", "scheduler.kwargs": {"T_max": 1e12, "eta_min": 0.0}},
        ),
        (
            {"scheduler": {"name": "cosine_annealing", "kwargs": {"T_max": 9, "eta_min": 3e-5}}},
            {"scheduler.kwargs": {}},
        ),
        (
            {"scheduler": {"name": "cosine_annealing", "kwargs": {"T_max": 10000, "eta_min": 1e-6}}},
            {"scheduler.name": "CosineAnnealingLR", "scheduler.kwargs": {"T_max": 10000, "eta_min": 1e-6}},
        ),
        (
            {"scheduler": {"name": "linear", "kwargs": {"total_iters": 9}}},
            {"scheduler.name": "LinearLR", "scheduler.kwargs": {"total_iters": 9}},
        ),
        # transformers samples from the 50 most likely tokens unless it is told otherwise
        ({}, {"rollout.top_k": 50, "rollout.max_new_tokens": 40, "rollout.num_rollouts": 128}),
        ({"method__gen_kwargs__top_k": 0}, {"rollout.top_k": 0}),
        (
            {"method__gen_kwargs__temperature": [0.5, 1.0]},
            {"rollout.temperature": 0.5, "rollout.eval_kwargs": {"temperature": [0.5, 1.0]}},
        ),
        (  # one setting is swept, and others have their first value
            {"method__gen_kwargs__temperature": [0.5, 1.0], "method__gen_kwargs__top_k": [7, 9]},
            {"rollout.temperature": 0.5, "rollout.top_k": 7, "rollout.eval_kwargs": {"temperature": [0.5, 1.0]}},
        ),
        (
            {
                "method__gen_kwargs": {"do_sample": False, "max_new_tokens": 5},
                "method__gen_experience_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 5},
            },
            {"rollout.top_k": 0, "rollout.eval_kwargs": {"temperature": 0.0, "max_new_tokens": 5}},
        ),
        (
            {"tokenizer__truncation_side": "left", "tokenizer__tokenizer_extra_configs": {"use_fast": True}},
            {"tokenizer.kwargs": {"use_fast": True, "truncation_side": "left"}},
        ),
        # PPO of trlX samples unless do_sample is false
        (
            {"method__gen_kwargs": {"max_new_tokens": 5}, "method__gen_experience_kwargs": {"max_new_tokens": 5}},
            {"rollout.top_k": 50, "rollout.eval_kwargs": {"top_k": 50, "max_new_tokens": 5}},
        ),
    ],
)
def test_a_configuration_of_trlx_means_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = translate("trlx", trlx(**given))
    config = TRLConfig.from_dict(found.config)
    assert not found.refused
    assert config.method.name == "ppo"
    assert config == config.update(expected)


def test_fields_of_trlx_that_are_not_given_have_its_defaults() -> None:
    usual = {"seed": 1000, "checkpoint_dir": "ckpts", "save_best": True, "tracker": "wandb", "project_name": "trlx"}
    short, long = trlx(), trlx(**{f"train__{name}": value for name, value in usual.items()})
    short["train"] = {name: value for name, value in short["train"].items() if name not in usual}
    assert translate("trlx", short).config == translate("trlx", long).config
    assert translate("trlx", short).config["train"]["seed"] == 1000


def test_sizes_per_process_are_multiplied() -> None:
    config = TRLConfig.from_dict(translate("trlx", trlx(), processes=4).config)
    assert (config.train.batch_size, config.rollout.num_rollouts, config.train.total_steps) == (128, 512, 1600)


def test_trainers_of_trlx_are_methods() -> None:
    for trainer, name, method in (
        ("AccelerateILQLTrainer", "ilqlconfig", "ilql"),
        ("accelerateSFTtrainer", "SFTConfig", "sft"),
        ("AccelerateRFTTrainer", "RFTConfig", "rft"),
    ):
        given = {"train": {"trainer": trainer}, "method": {"name": name, "gen_kwargs": {"max_new_tokens": 3}}}
        config = TRLConfig.from_dict(translate("trlx", given).config)
        assert config.method.name == method
        assert config.rollout.max_new_tokens == 3
        if method == "sft":  # generate() is greedy unless it is told to sample
            assert config.rollout.eval_kwargs == {"temperature": 0.0}
        if method == "ilql":
            assert config.rollout.top_k == 20
            given["method"]["gen_kwargs"] |= {"beta": [0, 1, 100]}
            config = TRLConfig.from_dict(translate("trlx", given).config)
            assert config.rollout.eval_kwargs == {"beta": [0, 1, 100]}


@table(
    "given, field, words",
    [
        ({"train__trainer": "NeMoPPOTrainer"}, "train.trainer", "train.sharding"),
        ({"train__trainer": "AccelerateILQLTrainer"}, "method.name", "does not train with 'PPOConfig'"),
        ({"train__trainer_kwargs": {"logit_mask": 1}}, "train.trainer_kwargs", "give logit_mask to train()"),
        ({"train__tracker": "mlflow"}, "train.tracker", "trlX has wandb and tensorboard"),
        (
            {"method__scale_reward": "whiten"},
            "method.scale_reward",
            "knows ignored, none, false, ref, running",
        ),
        ({"method__gen_kwargs__num_beams": 4}, "method.gen_kwargs.num_beams", "beam search"),
        ({"method__gen_kwargs__do_sample": False}, "method.gen_kwargs.do_sample", "remove do_sample: false"),
        (
            {"method__gen_experience_kwargs": {"do_sample": False, "max_new_tokens": 5}},
            "method.gen_experience_kwargs.do_sample",
            "remove do_sample: false",
        ),
        ({"optimizer__name": "adamw_8bit_bnb"}, "optimizer.name", "write adamw"),
        ({"scheduler": {"name": "step"}}, "scheduler", "trlX has cosine_annealing and linear"),
        ({"train__batchsize": 3}, "train.batchsize", "did you mean 'train.batch_size'?"),
        ({"peft": 3}, "peft", "has no such field"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_write(given: dict[str, Any], field: str, words: str) -> None:
    refused = {remark.field: remark.text for remark in translate("trlx", trlx(**given)).refused}
    assert list(refused) == [field]
    assert words in refused[field]


def test_what_a_method_of_the_trainer_does_is_said(tmp_path: Path) -> None:
    given = trlx(method__num_value_layers_unfrozen=2, method__ref_std=2.0)
    assert [remark.field for remark in translate("trlx", given).overrides] == [
        "method.ref_std",
        "method.num_value_layers_unfrozen",
    ]
    (tmp_path / "old.yml").write_text(yaml.safe_dump(given), encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "old.yml")])
    assert result.exit_code == 0, result.output
    told = "method.num_value_layers_unfrozen is set by a trainer of your own: return the number from PPOTrainer.critic"
    assert told in result.stderr
    assert translate("trlx", trlx(method__num_value_layers_unfrozen=0)).overrides == []


def test_fields_without_effect_are_named_and_empty_ones_are_not() -> None:
    without = trlx(train__save_optimizer=False, train__rollout_logging_dir="x", train__logging_dir=None)
    assert [remark.field for remark in translate("trlx", without).remarks] == [
        "train.save_optimizer",
        "train.rollout_logging_dir",
    ]
    plain = trlx(train__save_optimizer=True, train__pipeline="PromptPipeline", method__ref_mean=None, train__tags=[])
    assert translate("trlx", plain).remarks == []


def test_a_file_of_trlx_is_printed_as_one_of_trainkit(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yml", tmp_path / "new.yml"
    old.write_text(yaml.safe_dump(trlx(train__save_optimizer=False)), encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(old), "--processes", "2"])
    assert result.exit_code == 0, result.output
    assert "train.save_optimizer: has no effect" in result.stderr
    new.write_text(result.stdout, encoding="utf-8")
    config = TRLConfig.load_yaml(new)
    assert (config.method.name, config.train.batch_size) == ("ppo", 64)
    old.write_text(yaml.safe_dump(trlx(optimizer__name="adam_8bit_bnb")), encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(old)])
    assert result.exit_code == 1
    assert "optimizer.name has no counterpart: write adam, or give an optimizer of bits" in result.stderr


def test_a_file_that_is_not_of_trlx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yml").write_text("learning_rate: 1\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "x.yml")])
    assert result.exit_code != 0
    assert "its fields are those of several classes" in result.stderr
    with pytest.raises(ConfigError, match="frameworks with a table are trlx"):
        framework("verl")


SCRIPT = """\
import json, trlx
import trlx.utils.logging as logging
from trlx.data.default_configs import (
    TRLConfig,
    default_ppo_config,
)
from trlx import train  # the entry point

def main():
    import trlx
    trlx.train(trlx=1)
"""


def test_imports_of_a_script_are_changed_and_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "ppo.py"
    script.write_text(SCRIPT, encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(script)])
    assert result.exit_code == 0, result.output
    changed = [line for line in result.stdout.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert changed == [
        "+import json, trainkit_trlx as trlx",
        "+import trainkit_trlx.utils.logging as logging",
        "+from trainkit_trlx.data.default_configs import (",
        "+from trainkit_trlx import train  # the entry point",
        "+    import trainkit_trlx as trlx",
    ]
    assert rewritten(SCRIPT).text.count("trainkit_trlx") == len(changed)


def test_names_of_a_script_that_the_adapter_lacks_are_told(tmp_path: Path) -> None:
    script = tmp_path / "ppo.py"
    lines = ("import trlx", "from trlx.data.configs import TRLConfg", "from trlx.sweep import main")
    script.write_text("\n".join(lines), encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(script)])
    assert result.exit_code == 1
    told = "ppo.py:2: trainkit_trlx has no 'TRLConfg' in 'trlx.data.configs'; did you mean 'TRLConfig'?"
    assert told in result.stderr
    assert "ppo.py:3: trainkit_trlx has no module 'sweep'" in result.stderr
    for text, words in (("import torch", "imports none of trlx"), ("def", "cannot read the script")):
        script.write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["migrate", str(script)])
        assert result.exit_code == 2
        assert words in result.stderr


@table("generations, processes, expected", [(32, 1, 128), (100, 1, 200), (4, 2, 128), (40, 2, 160)])
def test_a_collection_of_rft_has_whole_groups(generations: int, processes: int, expected: int) -> None:
    method = {"name": "RFTConfig", "n_generations_per_prompt": generations, "gen_kwargs": {"max_new_tokens": 4}}
    found = translate("trlx", {"train": {"trainer": "AccelerateRFTTrainer"}, "method": method}, processes=processes)
    assert found.config["rollout"]["num_rollouts"] == expected
    assert found.config["method"]["rft_k"] == generations


# ------------------------------------------------------------------------------------------- TRL from 1.0, and others


def fields_of(name: str, cls: str) -> set[str]:
    """The fields that a table has of a class."""
    return {path.partition(".")[2] for path in framework(name).settings if path.startswith(f"{cls}.")}


@table(
    "cls",
    ["SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "CPOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig"],
)
def test_every_field_of_training_arguments_has_a_place(cls: str) -> None:
    from transformers import TrainingArguments

    known = {about.name for about in dataclasses.fields(TrainingArguments)}
    assert known - fields_of("trl1", cls) == set()


@table("name", FRAMEWORKS)
def test_settings_and_functions_that_a_table_names_exist(name: str) -> None:
    known = {path for paths in setting_paths().values() for path in paths}
    sampling = {f"rollout.{field}" for field in TRLConfig(method="ilql").method.sampling.model_fields}
    methods = {
        f"method.{field}" for method in trainkit.available_trainers() for field in get_method_class(method).model_fields
    }
    for path, setting in framework(name).settings.items():
        if setting.to and not setting.to.startswith(("eval.", "--")):
            to = setting.to.removesuffix(".*")
            kwargs = re.fullmatch(r"((?:optimizer|scheduler|model|tokenizer)\.kwargs)(\.\w+)?", to)
            assert (kwargs[1] if kwargs else to) in known | sampling | methods, path
        if setting.convert:
            assert callable(framework(name).function(setting.convert)), path
        if setting.part_of:
            assert setting.part_of in framework(name).settings, path
        about = (setting.convert, setting.part_of, setting.unused, setting.refused, setting.override)
        assert setting.to or any(about), path


@table(
    "given, expected",
    [
        # 2 rows in each of 4 passes on each of 3 processes
        (
            {"SFTConfig": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}},
            {"train.batch_size": 24, "train.microbatch_size": 2, "train.epochs": 3, "train.seq_length": 1024},
        ),
        ({"SFTConfig": {"gradient_accumulation_steps": 4}}, {"train.batch_size": 96, "train.microbatch_size": 8}),
        (
            {"SFTConfig": {"max_steps": 10, "num_train_epochs": 2.0, "warmup_ratio": 0.15}},
            {"train.total_steps": 10, "train.epochs": None, "scheduler.warmup_steps": 2},
        ),
        ({"SFTConfig": {"completion_only_loss": False}}, {"method.train_on_prompts": True}),
        ({"SFTConfig": {"neftune_noise_alpha": 5}}, {"method.neftune_alpha": 5.0}),
        ({"SFTConfig": {"adam_beta2": 0.95}}, {"optimizer.kwargs": {"betas": [0.9, 0.95]}}),
        ({"SFTConfig": {"eval_strategy": "steps", "eval_steps": 5}}, {"train.eval_interval": 5}),
        (  # the project of transformers is that of trackio
            {"SFTConfig": {"report_to": "wandb", "run_name": "a", "project": "b"}},
            {"train.trackers": [{"name": "wandb", "run_name": "a"}]},
        ),
        # either name of the field may be the one that is set
        ({"SFTConfig": {"gradient_checkpointing": True}}, {"train.gradient_checkpointing": True}),
        (
            {"SFTConfig": {"activation_checkpointing": True, "gradient_checkpointing": False}},
            {"train.gradient_checkpointing": True},
        ),
        ({"SFTConfig": {"optim": "sgd", "adam_epsilon": 1e-6}}, {"optimizer.name": "sgd", "optimizer.kwargs": {}}),
        ({"SFTConfig": {"lr_scheduler_type": "constant", "warmup_steps": 5}}, {"scheduler.warmup_steps": 0}),
        ({"SFTConfig": {"save_strategy": "steps", "save_steps": 7}}, {"train.save_interval": 7}),
        (
            {"SFTConfig": {"weight_decay": 0.1}},
            {
                "optimizer.weight_decay": 0.1,
                "optimizer.groups": [{"match": r"bias|(?i:norm)|\bln_", "weight_decay": 0.0}],
            },
        ),
        (
            {"SFTConfig": {"weight_decay": 0.1, "deepspeed": {"zero_optimization": {"stage": 2}}}},
            {"optimizer.weight_decay": 0.1, "optimizer.groups": []},
        ),
        ({"SFTConfig": {"save_steps": 0.5, "max_steps": 9}}, {"train.save_interval": 5}),
        (
            {"SFTConfig": {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}},
            {"train.save_best": {"metric": "eval/loss/total", "mode": "min"}},
        ),
        (
            {"DPOConfig": {"beta": 0.2, "loss_type": ["ipo"], "bf16": True, "max_grad_norm": 0}},
            {
                "method.beta": 0.2,
                "method.loss_type": "ipo",
                "train.mixed_precision": "bf16",
                "train.max_grad_norm": None,
            },
        ),
        (
            {"GRPOConfig": {"num_generations": 4, "beta": 0.1, "loss_type": "dr_grpo", "scale_rewards": False}},
            {"method.group_size": 4, "method.kl_coef": 0.1, "method.average": "constant", "method.scale": "none"},
        ),
        (
            {"GRPOConfig": {"steps_per_generation": 2, "top_k": None, "max_completion_length": 9}},
            {"rollout.num_rollouts": 48, "rollout.top_k": 0, "rollout.max_new_tokens": 9},
        ),
        ({"RLOOConfig": {}}, {"method.rloo_k": 2, "rollout.num_rollouts": 24, "optimizer.lr": 1e-6}),
        ({"RewardConfig": {"center_rewards_coefficient": 0.01}}, {"method.center_coef": 0.01, "optimizer.lr": 1e-4}),
        ({"KTOConfig": {"desirable_weight": 2.0}}, {"method.desirable_weight": 2.0}),
        ({"ORPOConfig": {"beta": 0.2}}, {"method.name": "orpo", "method.beta": 0.2, "train.seq_length": 1024}),
        # the likelihood of TRL has the weight 1, whatever the loss is
        (
            {"CPOConfig": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}},
            {"method.name": "cpo", "method.loss_type": "simpo", "method.simpo_gamma": 1.0, "method.cpo_alpha": 1.0},
        ),
        ({"CPOConfig": {"loss_type": "simpo", "cpo_alpha": 0.0}}, {"method.cpo_alpha": 0.0}),
        (
            {"SFTConfig": {}, "ModelConfig": {"model_name_or_path": "m", "use_peft": True, "lora_r": 4}},
            {"model.model_path": "m", "model.peft_config.r": 4, "model.peft_config.lora_alpha": 32},
        ),
    ],
)
def test_a_configuration_of_trl_means_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = translate("trl1", given, processes=3)
    assert not found.refused
    config = TRLConfig.from_dict(found.config)
    assert config == config.update(expected)


@table("given, expected", [
        # 4 rows in each of 2 passes are a step; 2 steps a collection; 100 responses are 13 steps of 4 passes
        (
            {
                "RLOOConfig": {
                    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 2,
                    "total_episodes": 100, "rloo_k": 2, "kl_coef": 0.03, "non_eos_penalty": True,
                }
            },
            {
                "train.batch_size": 8, "rollout.num_rollouts": 16, "train.total_steps": 52, "method.kl_coef": 0.03,
                "method.missing_eos_score": -1.0, "rollout.max_new_tokens": 53, "rollout.temperature": 0.7,
            },
        ),
        (
            {"OnlineDPOConfig": {"beta": 0.2, "rloo_k": 4}, "OnlineDPOVLLMConfig": {"sync": False}},
            {"method.beta": 0.2, "method.k": 4, "rollout.staleness": 1},
        ),
        # two collections of 8 rows, each an evaluation's distance; a penalty is subtracted
        (
            {"PPOv2Config": {"total_episodes": 16, "num_sample_generations": 2, "non_eos_penalty": True, "gamma": 0.9}},
            {
                "method.ppo_epochs": 4, "method.init_kl_coef": 0.05, "method.vf_coef": 0.1, "method.gamma": 0.9,
                "method.missing_eos_penalty": 1.0, "train.total_steps": 8, "train.eval_interval": 4,
            },
        ),
        # evaluations of transformers' own
        ({"RLOOConfig": {"eval_strategy": "steps", "eval_steps": 7}}, {"train.eval_interval": 7}),
        # sums of log-probabilities, as in both
        (
            {"OnlineDPOConfig": {"loss_type": "ipo", "beta": [0.2], "max_new_tokens": 16}},
            {
                "method.loss_type": "ipo", "method.ipo_length_normalize": False, "method.beta": 0.2,
                "rollout.max_new_tokens": 16, "rollout.temperature": 0.9, "optimizer.lr": 5e-7, "train.epochs": 3,
            },
        ),
    ])  # fmt: skip
def test_a_configuration_of_async_rlhf_means_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = translate("async_rlhf", given)
    assert not found.refused
    config = TRLConfig.from_dict(found.config)
    assert config == config.update(expected)


def test_defaults_that_two_versions_have_differently_are_told() -> None:
    for given, told in (({"beta": 0.2}, True), ({"beta": 0.2, "max_new_tokens": 8}, False)):
        remarks = translate("async_rlhf", {"OnlineDPOConfig": given}).remarks
        assert any("the defaults of async_rlhf" in remark.text for remark in remarks) is told


@table("given, said", [
    ({"ScriptArguments": {"bok": True}}, "write the method best_of_k, whose k is rloo_k"),
    ({"OnlineDPOConfig": {"beta": [0.1, 0.2]}}, "beta is one number"),
    ({"OnlineDPOConfig": {"missing_eos_penalty": 1.0}}, "subtract it in the reward function"),
    ({"PPOv2Config": {"elastic_reset": True, "ema_decay": 0.9}}, "weights are not reset"),
    ({"PPOv2Config": {"non_eos_penalty": True, "penalty_reward_value": 1}}, "write a negative penalty_reward_value"),
    ({"RLOOConfig": {"num_sample_generations": 3}}, "not known without total_episodes"),
    ({"RLOOConfig": {}, "ModelConfig": {"torch_dtype": "auto"}}, "write float32, bfloat16 or float16"),
])  # fmt: skip
def test_what_of_async_rlhf_has_no_counterpart_is_refused(given: dict[str, Any], said: str) -> None:
    (refused,) = translate("async_rlhf", given).refused
    assert said in refused.text


DDPO_PYTORCH = """
run_name: a
seed: 7
logdir: out
num_epochs: 10
save_freq: 5
mixed_precision: bf16
use_lora: true
pretrained: {model: m, revision: v}
sample: {num_steps: 20, eta: 1.0, guidance_scale: 3.0, batch_size: 8, num_batches_per_epoch: 4}
train:
  {batch_size: 4, learning_rate: 0.001, adam_beta1: 0.8, gradient_accumulation_steps: 2, num_inner_epochs: 2, cfg: true,
   clip_range: 0.01, timestep_fraction: 0.5}
prompt_fn: simple_animals
prompt_fn_kwargs: {}
reward_fn: jpeg_compressibility
per_prompt_stat_tracking: {buffer_size: 32, min_count: 8}
"""
"""A configuration of ddpo-pytorch as YAML."""
DDPO_FIELDS = """
run_name seed logdir num_epochs save_freq num_checkpoint_limit mixed_precision allow_tf32 resume_from use_lora
pretrained.model pretrained.revision sample.num_steps sample.eta sample.guidance_scale sample.batch_size
sample.num_batches_per_epoch train.batch_size train.use_8bit_adam train.learning_rate train.adam_beta1
train.adam_beta2 train.adam_weight_decay train.adam_epsilon train.gradient_accumulation_steps train.max_grad_norm
train.num_inner_epochs train.cfg train.adv_clip_max train.clip_range train.timestep_fraction prompt_fn
prompt_fn_kwargs reward_fn per_prompt_stat_tracking.buffer_size per_prompt_stat_tracking.min_count
"""


def test_every_field_of_ddpo_pytorch_has_a_place() -> None:
    assert [*framework("ddpo_pytorch").settings] == DDPO_FIELDS.split()


def test_a_file_of_ddpo_pytorch_means_the_same(tmp_path: Path) -> None:
    result = migrated(tmp_path, DDPO_PYTORCH, "ddpo.yaml")
    assert result.exit_code == 0, result.output
    config = TRLConfig.from_dict(yaml.safe_load(result.stdout))
    method, train, rollout = config.method, config.train, config.rollout
    assert (method.name, method.num_steps, method.guidance_scale, method.cliprange) == ("ddpo", 20, 3.0, 0.01)
    assert (method.ddpo_epochs, method.buffer_size, method.min_count) == (2, 32, 8)
    # 32 images; a step has 8 of them, with 10 denoising steps of each; an epoch has 4 steps in each of 2 passes
    assert (rollout.num_rollouts, rollout.batch_size, train.batch_size, train.microbatch_size) == (32, 8, 80, 4)
    assert (train.total_steps, train.save_interval, train.run_dir) == (80, 40, "out/a")
    assert (config.optimizer.lr, config.optimizer.kwargs["betas"]) == (1e-3, [0.8, 0.999])
    assert (config.model.model_path, config.model.kwargs, config.model.peft_config["r"]) == ("m", {"revision": "v"}, 4)
    assert "--prompts FILE" in result.stderr
    assert "by the option --reward-fn trainkit_ddpo.rewards:jpeg_compressibility" in result.stderr


DDPO_SCRIPT = """
import ml_collections
import os

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 42
    config.logdir = os.environ["HOME"]
    config.sample = sample = ml_collections.ConfigDict()
    sample.num_steps = 20
    sample.batch_size = 8
    return config

def aesthetic():
    config = get_config()
    config.num_epochs = 4
    config.sample.num_batches_per_epoch = 4
    config.train.gradient_accumulation_steps = 8
    config.reward_fn = "aesthetic_score"
    config.per_prompt_stat_tracking = {"buffer_size": 32, "min_count": 16}
    return config

def main(name):
    return globals()[name]()
"""


def test_functions_of_ddpo_pytorch_are_read(tmp_path: Path) -> None:
    result = migrated(tmp_path, DDPO_SCRIPT, "dgx.py")
    assert result.exit_code == 0, result.output
    first, second = (TRLConfig.from_dict(given) for given in yaml.safe_load_all(result.stdout))
    assert (first.method.num_steps, first.rollout.num_rollouts, first.train.total_steps) == (20, 16, 1600)
    # 32 images of 20 steps, 8 of them in a step
    assert (second.rollout.num_rollouts, second.train.batch_size, second.train.total_steps) == (32, 160, 16)
    assert second.method.buffer_size == 32
    assert "dgx.py:8: logdir is computed" in result.stderr
    assert "'aesthetic_score' by the option --reward-fn" in result.stderr
    other = "import trlx\ndef main():\n    config = trlx.f()\n    config.train.batch_size = 3\n"
    assert configured(other) is None
    assert configured("def f():\n    config.seed = 3\n") is None


def test_what_ddpo_pytorch_does_without_a_field_is_said_too() -> None:
    found = translate("ddpo_pytorch", {"sample": {"batch_size": 4}, "per_prompt_stat_tracking": None}, processes=2)
    config = TRLConfig.from_dict(found.config)
    assert (config.method.buffer_size, config.train.seed, config.train.mixed_precision) == (0, 42, "fp16")
    assert (config.rollout.num_rollouts, config.train.batch_size, config.train.total_steps) == (16, 100, 800)
    assert (config.train.save_interval, config.optimizer.lr) == (160, 3e-4)
    given = {"train": {"cfg": False, "use_8bit_adam": True}, "resume_from": "logs/checkpoint_3", "sample": {}}
    assert [remark.field for remark in translate("ddpo_pytorch", given).refused] == [
        "resume_from", "train.use_8bit_adam", "train.cfg",
    ]  # fmt: skip
    off = {"train": {"cfg": False}, "sample": {"guidance_scale": 1.0}, "resume_from": "logs/old", "allow_tf32": True}
    found = translate("ddpo_pytorch", off)
    assert not found.refused
    assert (found.config["train"]["resume"], found.config["train"]["run_dir"]) == ("auto", "logs/old")
    assert [remark.field for remark in found.remarks] == ["allow_tf32"]


# ---------------------------------------------------------------------------------------- DeepSpeed, FSDP, accelerate


@table(
    "given, sharding",
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "zero3"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "zero2"),
        ({"fsdp": "full_shard auto_wrap"}, "fsdp2"),
        ({"fsdp": ["full_shard"]}, "fsdp2"),
        ({"fsdp": True}, "fsdp2"),
        ({"fsdp": ""}, None),
    ],
)
def test_sharding_in_training_arguments_is_taken_over(given: dict[str, Any], sharding: str | None) -> None:
    found = translate("trl1", {"SFTConfig": given})
    assert not found.refused
    assert found.config["train"].get("sharding") == sharding
    assert [remark.field for remark in found.remarks if "docs/distributed.md" in remark.text] == [
        f"SFTConfig.{name}" for name in given if sharding
    ]


@table(
    "given",
    [
        {"deepspeed": "ds.json"},
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}},
        {"fsdp": "full_shard offload"},
        {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["GPT2Block"]}},
    ],
)
@table("name, cls", [("trl1", "GRPOConfig"), ("async_rlhf", "OnlineDPOConfig")])
def test_sharding_without_counterpart_leads_to_the_setting(given: dict[str, Any], name: str, cls: str) -> None:
    (refused,) = translate(name, {cls: given}).refused
    assert refused.field == f"{cls}.{next(iter(given))}"
    assert "train.sharding" in refused.text


@table(
    "given, expected",
    [
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, {"sharding": "none", "mixed_precision": "bf16"}),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 0.5}},
            {"sharding": "zero3", "max_grad_norm": 0.5},
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, {"sharding": "fsdp2"}),
        ({"distributed_type": False, "fsdp_config": {}}, {"sharding": "none"}),
    ],
)
def test_a_file_of_accelerate_is_translated(tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "num_processes": 8, **given}))
    result = CliRunner().invoke(app, ["migrate", str(file)])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {"train": expected}
    assert "torchrun --nproc_per_node=8 -m trainkit.cli train CONFIG.yaml" in result.stderr


def test_a_file_of_accelerate_with_what_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    deepspeed = {"zero_stage": 3, "offload_param_device": "cpu", "deepspeed_config_file": "ds.json", "other": 1}
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed, "num_machines": 2}))
    result = CliRunner().invoke(app, ["migrate", str(file)])
    assert result.exit_code == 1
    for name in ("offload_param_device", "deepspeed_config_file", "other"):
        assert f"deepspeed_config.{name} has no counterpart" in result.stderr


# ---------------------------------------------------------------------------------------- files and scripts of TRL 1.x

FLAT = {
    "model_name_or_path": "m",
    "learning_rate": 1e-5,
    "num_generations": 4,
    "reward_weights": None,
    "dataset_name": "d",
}


def migrated(tmp_path: Path, text: str, name: str, *options: str) -> Any:
    """What the command prints about a file."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    return CliRunner().invoke(app, ["migrate", str(tmp_path / name), *options])


def test_a_file_of_trl_is_recognised_by_its_fields(tmp_path: Path) -> None:
    result = migrated(
        tmp_path, yaml.safe_dump({**FLAT, "epsilon_high": 0.3}), "grpo.yaml", "--config-class", "GRPOConfig"
    )
    assert result.exit_code == 0, result.output
    config = TRLConfig.from_dict(yaml.safe_load(result.stdout))
    assert (config.method.name, config.model.model_path, config.train.batch_size) == ("grpo", "m", 8)
    assert "--samples d, or --prompts d" in result.stderr
    alone = migrated(tmp_path, yaml.safe_dump({"packing": True, "completion_only_loss": True}), "sft.yaml")
    assert yaml.safe_load(alone.stdout)["method"] == {"name": "sft", "packing": True, "train_on_prompts": False}
    unclear = migrated(tmp_path, yaml.safe_dump({"beta": 0.1, "max_length": 3}), "x.yaml")
    assert unclear.exit_code == 2
    assert "--config-class, which may be DPOConfig, KTOConfig" in unclear.stderr
    wrong = migrated(tmp_path, "beta: 1", "x.yaml", "--config-class", "DPOCofig")
    assert "did you mean 'DPOConfig'?" in wrong.stderr
    typo = migrated(tmp_path, "packing: true\npacking_strateg: bfd", "x.yaml", "--config-class", "SFTConfig")
    assert typo.exit_code == 1
    assert "did you mean 'SFTConfig.packing_strategy'?" in typo.stderr


MODERN = """\
from trl import DPOConfig, DPOTrainer
rate = 1e-6
args = DPOConfig("out", learning_rate=rate, gradient_checkpointing=True, fsdp="full_shard", **{"beta": 0.3})
trainer = DPOTrainer(model="gpt2", args=args, train_dataset=pairs, processing_class=tokenizer)
trainer.train()
"""


def test_the_configurations_of_a_script_of_trl_are_printed(tmp_path: Path) -> None:
    result = migrated(tmp_path, MODERN, "dpo.py")
    assert result.exit_code == 0, result.output
    config = TRLConfig.from_dict(yaml.safe_load(result.stdout))
    assert (config.method.name, config.train.run_dir, config.train.sharding) == ("dpo", "out", "fsdp2")
    assert (config.method.beta, config.train.gradient_checkpointing) == (0.3, True)
    for told in (
        "dpo.py:1: trl.DPOTrainer: its place has trainkit_dpo.DPOTrainer",
        "dpo.py:3: DPOConfig.learning_rate is computed; set optimizer.lr",
    ):
        assert told in result.stderr
    assert configured(MODERN.replace("DPOConfig", "TrainingArguments").replace("processing_class", "tokenizer")) is None


def test_a_script_of_async_rlhf_is_recognised(tmp_path: Path) -> None:
    text = "from src.rloo_trainer import MyRLOOTrainer\nfrom src.utils import prepare_deepspeed, repeat_generator\n"
    result = migrated(
        tmp_path, text + "from trl.trainer.rloo_trainer import RLOOConfig\nRLOOConfig(rloo_k=4)\n", "a.py"
    )
    assert result.exit_code == 1, result.output  # repeat_generator has no counterpart
    assert yaml.safe_load(result.stdout)["method"] == {"name": "rloo", "rloo_k": 4, "rloo_epochs": 4}
    assert "a.py:2: src.utils.prepare_deepspeed: its place has train.sharding" in result.stderr
    assert "a.py:2: src.utils.repeat_generator: the loop of trainkit passes over the prompts" in result.stderr


@table(
    "imported, call, expected",
    [
        (
            "PPOv2Config, PPOv2Trainer",
            "PPOv2Config(num_ppo_epochs=2, missing_eos_penalty=1.0)",
            ("ppo", "ppo_epochs", 2),
        ),
        ("RLOOConfig, RLOOTrainer", "RLOOConfig(num_ppo_epochs=2)", ("rloo", "rloo_epochs", 2)),
        ("RLOOConfig, RLOOTrainer", "RLOOConfig(num_generations=4)", ("rloo", "rloo_k", 4)),
        ("OnlineDPOConfig", "OnlineDPOConfig(beta=[0.3], max_new_tokens=4)", ("online_dpo", "beta", 0.3)),
    ],
)
def test_a_script_of_an_online_trainer_is_of_the_version_that_has_its_fields(
    imported: str, call: str, expected: tuple[str, str, Any], tmp_path: Path
) -> None:
    result = migrated(tmp_path, f"from trl import {imported}\n{call}\n", "a.py")
    assert result.exit_code == 0, result.output
    method = yaml.safe_load(result.stdout)["method"]
    assert (method["name"], method[expected[1]]) == (expected[0], expected[2])


def test_a_file_that_may_be_of_grpo_or_rloo_is_told_of(tmp_path: Path) -> None:
    result = migrated(tmp_path, yaml.safe_dump({"num_generations": 4, "max_completion_length": 8}), "a.yaml")
    assert yaml.safe_load(result.stdout)["method"]["name"] == "grpo"
    assert "read as GRPOConfig of TRL 1.x; a file of RLOO needs --config-class RLOOConfig" in result.stderr


@table(
    "given, expected",
    [
        ({"mixed_precision": "bf16"}, {"mixed_precision": "bf16"}),
        ({"mixed_precision": None, "fsdp_plugin": {"version": 2}}, {"mixed_precision": "no", "sharding": "fsdp2"}),
        ({"deepspeed_plugin": {"zero_stage": 3}}, {"sharding": "zero3"}),
    ],
)
def test_arguments_of_the_accelerator_are_settings(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = translate("trl", {"PPOConfig": {"accelerator_kwargs": given}})
    assert not found.refused
    assert {name: found.config["train"].get(name) for name in expected} == expected
    assert all("docs/distributed.md" in remark.text for remark in found.remarks)
    assert len(found.remarks) == ("sharding" in expected)
    (refused,) = translate("trl", {"PPOConfig": {"accelerator_kwargs": {"split_batches": True}}}).refused
    assert "given split_batches" in refused.text


def test_a_script_is_told_what_takes_the_place_of_names_without_counterpart(tmp_path: Path) -> None:
    text = "import trlx\nfrom trlx.sweep import main\nfrom trlx.trainer.nemo_ppo_trainer import NeMoPPOTrainer\n"
    result = migrated(tmp_path, text + "from trlx.models.modeling_ppo import GPTModelBranch\n", "a.py")
    assert result.exit_code == 1
    for told in (
        "a.py:2: trainkit_trlx has no module 'sweep': its place has trainkit sweep",
        "a.py:3: trainkit_trlx has no module 'trainer.nemo_ppo_trainer': trainkit has no NeMo: write Accelerate",
        "a.py:4: trainkit_trlx has no 'GPTModelBranch' in 'trlx.models.modeling_ppo': its place has trainkit.models.",
    ):
        assert told in result.stderr


def test_a_model_and_several_runs_of_a_script_are_told_apart(tmp_path: Path) -> None:
    text = "from trl import ModelConfig, SFTConfig, DPOConfig\nModelConfig('m')\nSFTConfig()\nDPOConfig(beta=0.3)\n"
    result = migrated(tmp_path, text, "two.py")
    assert result.exit_code == 0, result.output
    first, second = (TRLConfig.from_dict(given) for given in yaml.safe_load_all(result.stdout))
    assert (first.method.name, first.model.model_path) == ("sft", "m")
    assert (second.method.name, second.model.model_path) == ("dpo", None)
    parsed = migrated(tmp_path, "from trl import GRPOConfig, TrlParser\nTrlParser(GRPOConfig)\n", "parsed.py")
    assert parsed.exit_code == 0
    assert "makes no configuration; give the YAML file" in parsed.stderr
