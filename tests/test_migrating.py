"""Configurations of other frameworks: every field has a place, and translations mean what they meant there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trainkit import TRLConfig, default_config
from trainkit.cli import app
from trainkit.config.names import dotted, settings
from trainkit.config.tree import merged, nest
from trainkit.errors import ConfigError
from trainkit.migrating import framework, rewritten, translate
from trainkit.plugins import get_method_class

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
}


def trlx(**changes: Any) -> dict[str, Any]:
    """Return a configuration of trlX, changed by dotted path (with ``__`` for the dot)."""
    config = BASE
    for path, value in changes.items():
        config = merged(config, nest(path.replace("__", "."), value))
    return config


def test_every_field_of_trlx_has_a_place() -> None:
    known = {f"{section}.{name}" for section, names in TRLX.items() for name in names.split()}
    table = framework("trlx").settings
    told = {path for path in table if path.split(".")[0] in TRLX and "gen_" not in path}
    assert told == known


def test_every_setting_that_a_table_names_exists() -> None:
    methods = {name for method in ("ppo", "ilql", "sft", "rft") for name in get_method_class(method).model_fields}
    sampling = {*TRLConfig(method="ilql").method.sampling.model_fields}
    known = {path for paths in settings().values() for path in paths} | {f"method.{name}" for name in methods}
    for path, setting in framework("trlx").settings.items():
        if setting.to and setting.to.split(".")[0] == "eval":
            assert setting.to.split(".")[1] in sampling, path
        elif setting.to:
            assert setting.to.removesuffix(".*") in known | {f"rollout.{name}" for name in sampling}, path
        else:
            assert setting.convert or setting.part_of or setting.unused or setting.override or setting.refused, path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # the steps of PPO are those of its collections: 100 epochs of 4 passes over 128 / 32 batches
        ({}, {"train.total_steps": 1600, "train.batch_size": 32, "train.max_grad_norm": None}),
        ({"train__total_steps": 50}, {"train.total_steps": 50}),
        ({"train__checkpoint_interval": 7}, {"train.save_interval": 7}),
        ({"train__tracker": None}, {"train.trackers": []}),
        ({"train__tracker": "tensorboard", "train__tags": ["a"]}, {"train.trackers": ["tensorboard"]}),
        (
            {"train__tracker": "wandb", "train__entity_name": "us", "train__tags": ["a"]},
            {"train.trackers": [{"name": "wandb", "entity": "us", "tags": ["a"]}]},
        ),
        ({"method__scale_reward": False}, {"method.scale_reward": "none"}),
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
        (
            {
                "method__gen_kwargs": {"do_sample": False, "max_new_tokens": 5},
                "method__gen_experience_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 5},
            },
            {"rollout.top_k": 0, "rollout.eval_kwargs": {"top_k": 50, "temperature": 0.0, "max_new_tokens": 5}},
        ),
    ],
)
def test_a_configuration_of_trlx_means_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = translate("trlx", trlx(**given))
    config = TRLConfig.from_dict(found.config)
    assert not found.refused
    assert config.method.name == "ppo"
    assert config == config.update(expected)


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


@pytest.mark.parametrize(
    ("given", "field", "words"),
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
    assert "optimizer.name has no counterpart: write adam; trainkit.train takes an optimizer of bits" in result.stderr


def test_a_file_that_is_not_of_trlx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yml").write_text("learning_rate: 1\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "x.yml")])
    assert result.exit_code != 0
    assert "should have the sections of trlX" in str(result.output) + str(result.exception)
    with pytest.raises(ConfigError, match="frameworks with a table are trlx"):
        framework("axolotl")


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


def test_fields_of_trlx_are_known_to_messages_about_typing_errors() -> None:
    assert dotted("checkpoint_interval") == ["train.save_interval"]
    assert dotted("n_generations_per_prompt") == ["method.rft_k"]
    with pytest.raises(ConfigError, match=r"did you mean train\.run_dir"):
        default_config("ppo").evolve(train={"checkpoint_dir": "x"})
