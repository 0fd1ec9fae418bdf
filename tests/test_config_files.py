"""Configurations of files and command lines: every fault at once with its place, precedence, variables, comparison."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from tables import table
from trainkit import MethodConfig, TRLConfig, available_trainers, default_config, get_trainer
from trainkit.cli import app
from trainkit.cli.training import parse_overrides
from trainkit.config import arguments, read_config
from trainkit.config.schema import json_schema
from trainkit.errors import ConfigError, PluginError, RegistryError
from trainkit.plain import parse_yaml, to_yaml
from trainkit.plugins import get_method_class, register_trainer
from trainkit.plugins.registry import settings_alone
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import ConformanceError, check_plugin


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(text: str, *overrides: str) -> list[str]:
    """What is said of a configuration, line by line, without its heading."""
    Path("run.yaml").write_text(dedent(text), encoding="utf-8")
    try:
        read_config(Path("run.yaml"), parse_overrides([*overrides]))
    except ConfigError as error:
        return [line.removeprefix("  ") for line in str(error).splitlines()[1:]]
    return []


# ---------------------------------------------------------------------------------------------------------- mistakes

M = "method: ppo\n"
MISTAKES: list[tuple[str, str]] = [
    # the file, and how the line about it begins; ~ stands for anything, @ for the name of the file
    ("methd: ppo", "method: required, not given"),
    ("method: pppo", "method@1): no plugin 'pppo' is installed; did you mean 'ppo'?"),
    ("method: {name: ppo, gama: 1}", "method.gama@1): unknown field; did you mean 'gamma'?"),
    ("method: {name: ppo, gamma: 2}", "method.gamma@1): should be less than or equal to 1 (given 2 (int))"),
    ("method: {name: ppo, kl_coef: 0.1}", "method.kl_coef@1): unknown field; did you mean~init_kl_coef"),
    ("method: {name: ppo, clip_range: 0.1}", "method.clip_range@1): unknown field; did you mean~cliprange"),
    (
        "method: {name: ppo, scale_reward: rms}",
        "method.scale_reward@1): should be 'none', 'running' or 'ref'",
    ),
    ("method: {name: dpo, loss_type: sigmiod}", "method.loss_type@1): ~did you mean 'sigmoid'?"),
    ("method: [ppo]", "method@1): should be a method's name, or a mapping with its 'name'"),
    (M + "modle: {}", "modle@2): unknown field; did you mean 'model'?"),
    (M + "learning_rate: 1e-5", "learning_rate@2): unknown field; did you mean optimizer.lr?"),
    (M + "output_dir: x", "output_dir@2): unknown field; did you mean train.run_dir?"),
    (M + "lr: 1", "lr@2): unknown field; did you mean optimizer.lr?"),
    (M + "gen_kwargs: {}", "gen_kwargs@2): unknown field; did you mean rollout?"),
    (
        "method: ppo\nmodel:\n  model_path: ./gone/x",
        "model.model_path@3): there is no directory 'gone'. Give a directory",
    ),
    (M + "model:\n  reference_path: /gone", "model.reference_path@3): there is no directory '/gone'"),
    (M + "model: {model_path: 3}", "model.model_path@2): should be a hub id or directory"),
    (
        "method: ppo\nmodel: {dtype: bf16}",
        "model.dtype@2): should be 'float32', 'bfloat16' or 'float16'; did",
    ),
    (M + "model: {num_layers_unfrozen: -2}", "model.num_layers_unfrozen@2): should be greater than"),
    (M + "model: {kwargs: {dtype: x}}", "model.dtype"),
    (M + "model: {kwargs: {torch_dtype: auto}}", "model.dtype"),
    (M + "model: {dtype: float16, kwargs: {torch_dtype: bfloat16}}", "model@2): bfloat16 and float16 are given"),
    (
        "method: ppo\nmodel: {peft_config: {lora_alhpa: 1}}",
        "model.peft_config.lora_alhpa@2): no field of~alpha'",
    ),
    (M + "model: {peft_config: {peft_type: LORRA}}", "model.peft_config.peft_type@2): ~mean 'LORA'"),
    (M + "model: {peft_config: {}, num_layers_unfrozen: 2}", "model@2): peft_config freezes"),
    (
        "method: ppo\ntokenizer: {tokenizer_path: ../gone}",
        "tokenizer.tokenizer_path@2): there is no directory '../gone'",
    ),
    (M + "tokenizer: {path: x}", "tokenizer.path@2): unknown field~known: tokenizer_path, chat_template, kwargs"),
    (M + "data: {ignore_columns: id}", "data.ignore_columns@2): should be a list; write [id]"),
    (M + "optimizer: {lr: 0}", "optimizer.lr@2): should be greater than 0 (given 0 (int))"),
    (M + "optimizer: {lr: small}", "optimizer.lr@2): should be a valid number"),
    (M + "optimizer:\n  name: adamw8bit", "optimizer.name@3): should be~did you mean 'adam"),
    (M + "optimizer:\n  kwargs: {betaz: 1}", "optimizer.kwargs.betaz@3): no argument of~'betas'"),
    (
        "method: ppo\noptimizer:\n  kwargs: {momentum: 1}",
        "optimizer.kwargs.momentum@3): no argument of~AdamW",
    ),
    (M + "optimizer: {kwargs: {lr: 1}}", "optimizer.kwargs@2): lr has a field of its own"),
    (M + "scheduler: {name: cosin}", "scheduler.name@2): should be~did you mean 'cosine'?"),
    (
        "method: ppo\nscheduler: {kwargs: {min_lr: 1}}",
        "scheduler.kwargs.min_lr@2): no argument of~'constant'",
    ),
    (M + "scheduler: {name: polynomial, kwargs: {powr: 1}}", "scheduler.kwargs.powr@2): ~'power'"),
    (M + "scheduler: {warmup_steps: 0.1}", "scheduler.warmup_steps@2): should be a valid integer"),
    (
        "method: ppo\nrollout: {temprature: 1}",
        "rollout.temprature@2): unknown field; did you mean 'temperature'",
    ),
    (M + "rollout: {top_p: 0}", "rollout.top_p@2): should be greater than 0"),
    (
        "method: ppo\nrollout: {engine: vlm}",
        "rollout.engine@2): there is no engine 'vlm'; did you mean 'vllm'?",
    ),
    (M + "rollout: {stop_sequences: ['']}", "rollout.stop_sequences@2): an empty stop string"),
    (M + "rollout: {chunk_size: 4}", "rollout.chunk_size@2): ~did you mean rollout.batch_size?"),
    (M + "environment: {fail_reward: 1}", "environment@2): fail_reward has an effect only if"),
    (M + "reward: {retry_on: [OSError]}", "reward@2): retry_on has an effect only if retries"),
    (M + "train:\n  lr: 1", "train.lr@3): unknown field; did you mean optimizer.lr?"),
    (
        "method: ppo\ntrain:\n  max_steps: 5",
        "train.max_steps@3): unknown field; ~train.total_steps",
    ),
    (M + "train: {mixed_precision: bf61}", "train.mixed_precision@2): should be~'bf16'?"),
    (
        "method: ppo\ntrain: {trackers: [tensorbord]}",
        "train.trackers.0@2): there is no tracker~'tensorboard'?",
    ),
    (
        "method: ppo\ntrain: {trackers: [early_stop]}",
        "train.trackers.0@2): 'early_stop' is no tracker; name it",
    ),
    (
        "method: ppo\ntrain: {sharding: fsdp}",
        "train.sharding@2): there is no sharding 'fsdp'; did you mean 'fsdp2'",
    ),
    (M + "train: {resume: runs/gone}", "train.resume@2): there is no such checkpoint"),
    (M + "train: {resume: auto}", "train@2): resume 'auto' looks into run_dir, which is not set"),
    (
        "method: ppo\nplugins: [earlystop]",
        "plugins.0@2): no plugin 'earlystop' is installed; did you mean 'early",
    ),
    (
        "method: ppo\nplugins: [{name: early_stop, patiense: 1}]",
        "plugins.0 (early_stop).patiense@2): ~'patience'",
    ),
    ("method: PPOConfig", "method@1): no plugin 'ppoconfig' is installed; did you mean 'ppo'?"),
    ("trainer: AcceleratePPOTrainer", "trainer@1): unknown field; did you mean method?"),
    ("method: ppo\ntokenizer: {path: gpt2}", "tokenizer.path@2): unknown field; did you mean 'tokenizer_path'?"),
    ("method: ppo\noptimizer: {name: AdamW}", "optimizer.name@2): ~did you mean 'adamw'?"),
    ("method: ppo\ntrain: {trackers: wandb}", "train.trackers@2): should be a list; write [wandb]"),
    ("method: ppo\nmodel: gpt2", "model@2): should be a mapping, with a setting and its value in each line"),
    ("method: ppo\ndatasets: [{path: a.jsonl}]", "datasets@2): unknown field; did you mean --samples?"),
    ("method: {name: grpo, group_size: 1}", "method.group_size@1): ~give at least 2"),
    # of people who come from other frameworks
    ("train: {seed: 1}", "method: required, not given; name an algorithm: bco, best_of_k, cpo"),
    ("method: {ppo: {gamma: 0.9}}", "method@1): ~write name: ppo, with the settings beside it"),
    ("method: early_stop", "method@1): 'early_stop' is a plugin with hooks; name it in plugins"),
    (
        "method: {name: PPOConfig}\ntrain: {total_steps: 5}",
        "method@1): this is a configuration of trlX; trainkit migrate",
    ),
    (
        "method: {name: grpo, beta: 0.04}",
        "method.beta@1): unknown field; the weight of the KL divergence is method.kl_c",
    ),
    (M + "gamma: 0.9", "gamma@2): unknown field; did you mean method.gamma?"),
    (M + "train:\n  seed:3", "train@2): ~write a colon and a space: seed: 3"),
    (M + "train:\n- seed: 3", "train@2): should be a mapping, ~and without '- '"),
    (M + "train: {seed: true}", "train.seed@2): should be a number, not true or false (given True (bool))"),
    (M + "train: {run_dir: None}", "train.run_dir@2): should be null, which is None in YAML"),
    (M + "train: {run_dir: ~/runs/x}", "train.run_dir@2): ~ and $NAME are not expanded; ~${HOME}"),
    (M + "train: {run_dir: $HOME/x}", "train.run_dir@2): ~ and $NAME are not expanded"),
    (M + "train: {mixed_precision: bf16-mixed}", "train.mixed_precision@2): ~did you mean 'bf16'?"),
    (M + "train: {trackers: none}", "train.trackers@2): should be a list; write [] for none"),
    (M + "train:\n  trackers: {name: wandb}", "train.trackers@3): should be a list; write '- ' before its first line"),
    (M + "train: {trackers: [{wandb: {project: x}}]}", "train.trackers.0@2): ~write name: wandb, with the settings"),
    (M + "train: {save_strategy: steps}", "train.save_strategy@2): unknown field; did you mean train.save_interval?"),
    (
        M + "train: {activation_checkpointing: true}",
        "train.activation_checkpointing@2): unknown field; did you mean train.gradient_checkpointing?",
    ),
    (M + "train: {warmup_ratio: 0.1}", "train.warmup_ratio@2): unknown field; warm-up is given in steps: scheduler"),
    (M + "train: {pipeline: PromptPipeline}", "train.pipeline@2): unknown field; trainkit tokenises prompts"),
    (M + "train: {push_to_hub: mine}", "train.push_to_hub@2): should be the id of a repository, owner/name"),
    (M + "wandb_project: x", "wandb_project@2): unknown field; trackers have settings of their own"),
    (M + "data: {path: a.jsonl}", "data.path@2): unknown field; ~give --samples or --prompts"),
    (M + "reward_fn: a.py:f", "reward_fn@2): unknown field; did you mean --reward-fn?"),
    (M + "optimizer: adamw", "optimizer@2): ~write {name: adamw}"),
    (M + "optimizer: {name: paged_adamw_32bit}", "optimizer.name@2): ~did you mean 'adamw'?"),
    (M + "optimizer: {lr: .inf}", "optimizer.lr@2): should be a finite number"),
    (M + "optimizer: {kwargs: {betas: 0.9}}", "optimizer.kwargs.betas@2): should be a list of 2 numbers (given 0.9 ("),
    (M + "optimizer: {kwargs: {eps: '1e-8'}}", "optimizer.kwargs.eps@2): should be a number (given '1e-8' (str))"),
    (M + "optimizer: {name: adam, kwargs: {momentum: 0.9}}", "optimizer.kwargs.momentum@2): ~'sgd' takes momentum"),
    (M + "scheduler: {name: constant_with_warmup}", "scheduler.name@2): ~did you mean 'constant'?"),
    (M + "scheduler: {name: cosine, kwargs: {min_lr: 1}}", "scheduler.kwargs.min_lr@2): ~'cosine_with_min_lr' takes"),
    (M + "scheduler: {name: cosine_with_min_lr}", "scheduler@2): cosine_with_min_lr needs kwargs"),
    (M + "model: {dtype: half}", "model.dtype@2): ~did you mean 'float16'?"),
    (M + "model: {model_path: ''}", "model.model_path@2): should be a path or hub id without spaces around it"),
    (M + "model: {model_path: 'https://hub.example/owner/name'}", "model.model_path@2): is an address; ~: owner/name"),
    (M + "model: {model_path: {hidden_size: 4}}", "model.model_path@2): the fields of a model config need model_type"),
    (M + "model: {peft_config: lora}", "model.peft_config@2): ~write {peft_type: lora}"),
    (
        M + "model: {peft_config: {lora_r: 8}}",
        "model.peft_config.lora_r@2): no field of peft's LORA; did you mean 'r'?",
    ),
    (M + "model: {peft_config: {r: '8'}}", "model.peft_config.r@2): should be a number (given '8' (str))"),
    (M + "model: {peft_config: {bias: nope}}", "model.peft_config.bias@2): should be one of 'none', 'all', 'lora_on"),
    (M + "rollout: {num_beams: 4}", "rollout.num_beams@2): unknown field; trainkit samples"),
]


def begins(line: str, expected: str) -> bool:
    """Whether the line begins with what is expected, where ~ stands for anything."""
    first, *others = expected.split("~")
    return line.startswith(first) and all(other in line for other in others)


@table("text, expected", MISTAKES)
def test_a_mistake_is_told_with_key_line_and_what_to_write(text: str, expected: str, at: Path) -> None:
    lines = told(text)
    expected = expected.replace("@", " (run.yaml:")
    assert any(begins(line, expected) for line in lines), lines


@table(
    "text, words",
    [
        ("", "it is empty"),
        ("- method: ppo", "should hold a mapping of sections, such as `method: ppo`; it holds"),
        (
            "method: ppo\ntrain:\n  seed: 3\n total_steps: 5",
            "(run.yaml:4, column 2); indent the line as those above it",
        ),
        ("method: ppo\ntrain: {seed: 3\n", "(run.yaml:3, column 1); a bracket or quote is not closed"),
        (
            "method: ppo\ntrain:\n  seed: 3\n  seed: 4",
            "the key 'seed' is given twice, first in line 3 (run.yaml:4, column",
        ),
        ("method: ppo\non: 1", "the key stands for True in YAML; put it in quotes (run.yaml:2, column 1)"),
        ("method: ppo\nmodel: {model_path: @x}", "put text that begins with this character in quotes"),
        ("method:\n\tname: ppo", "(run.yaml:2, column 1); YAML is indented with spaces, not with tabs"),
    ],
)
def test_files_that_are_no_configuration_are_told(text: str, words: str, at: Path) -> None:
    (at / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_config(Path("run.yaml"))
    assert words in str(error.value)


def test_a_section_without_settings_is_as_if_it_were_not_there(at: Path) -> None:
    (at / "run.yaml").write_text("method: ppo\ntrain:\n  # seed: 2\nmodel:\n", encoding="utf-8")
    assert read_config(at / "run.yaml") == default_config("ppo")


@table(
    "arguments, words",
    [
        (["train", "train.seed=2"], "give the file first: CONFIG.yaml train.seed=2"),
        (["train", "--config", "run.yaml"], "given without an option: trainkit train CONFIG.yaml"),
        (["train", "run.yaml", "--dataset_name", "a.jsonl"], "Give --samples"),
        (["train", "run.yaml", "--model", "gpt2"], "model.model_path=gpt2"),
        (["config", "check", "rum.yaml"], "No such file or directory; did you mean 'run.yaml'?"),
        (["train", "run.yaml", "--num_processes", "2"], "Processes are started by torchrun"),
        (["train", "run.yaml", "--report_to", "wandb"], "train.trackers='[wandb]'"),
        (["train", "run.yaml", "--bf16"], "train.mixed_precision=bf16"),
        (["train", "run.yaml", "-lr", "1e-5"], "optimizer.lr=1e-5"),
        (["train", "run.yaml", "--trainer.max_epochs", "3"], "train.epochs=3"),
        (["train", "ppo"], "'ppo' is no file; write one with trainkit config show ppo > ppo.yaml"),
        (["train", "run"], "'run' is a directory; give its file: run/config.yaml"),
        (["run.yaml"], "Give trainkit train run.yaml"),
        (["validate", "run.yaml"], "Give trainkit config check"),
        (["sft", "--model", "x"], "trainkit config show sft prints one"),
        (["config", "validate", "run.yaml"], "No such command 'validate'"),
    ],
)
def test_command_lines_of_other_frameworks_are_told_what_to_write(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("method: ppo", encoding="utf-8")
    Path("run").mkdir()
    Path("run/config.yaml").write_text("method: ppo", encoding="utf-8")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_files_in_another_encoding_are_said_to_be_so(at: Path) -> None:
    Path("run.yaml").write_bytes("method: ppo\n# größer\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"it is not UTF-8 \(run.yaml:2\); save it as UTF-8"):
        read_config(Path("run.yaml"))


def test_the_fields_of_a_section_are_listed_once(at: Path) -> None:
    first, second = told(M + "train: {a1: 1, a2: 2}\n")
    assert "known: seed, total_steps" in first
    assert second.endswith("known: as above)")


def test_all_faults_are_told_at_once_those_of_overrides_and_paths_included(at: Path) -> None:
    overrides = ("train.sede=1", "optimizer.lr=-1")
    lines = told("method: {name: ppo, gama: 1}\nmodel: {model_path: ./gone/x}\n", *overrides)
    places = sorted(line.partition(":")[0] if "run.yaml" not in line else line[:24] for line in lines)
    assert len(lines) == 4
    assert places[2:] == ["optimizer.lr (command line)", "train.sede (command line)"]
    result = CliRunner().invoke(app, ["config", "check", "run.yaml", *overrides])
    assert result.exit_code == 2
    assert [line.removeprefix("  ") for line in result.stderr.splitlines()[1:]] == lines


def test_names_of_other_frameworks_are_known_also_if_the_method_is_not(at: Path) -> None:
    lines = told("method: pppo\nkl_coef: 1\nlearning_rate: 1\n")
    assert lines[0].startswith("method (run.yaml:1): no plugin 'pppo' is installed")
    assert lines[1].startswith("kl_coef (run.yaml:2): unknown field (given 1 (int)")
    assert lines[2].startswith("learning_rate (run.yaml:3): unknown field; did you mean optimizer.lr?")


def test_options_of_other_frameworks_are_said_to_be_overrides(at: Path) -> None:
    Path("run.yaml").write_text(M + "", encoding="utf-8")
    for option, expected in (
        (["--learning-rate", "1e-5"], "optimizer.lr=1e-5"),
        (["--output_dir=x"], "train.run_dir=x"),
        (["--seed", "3"], "train.seed=3"),
        (["--train.seed=4"], "train.seed=4"),
        (["--per_device_train_batch_size"], "train.microbatch_size=VALUE"),
    ):
        result = CliRunner().invoke(app, ["train", "run.yaml", *option])
        assert result.exit_code == 2
        assert expected in result.stderr
    assert "override" not in CliRunner().invoke(app, ["train", "run.yaml", "--sneed"]).stderr


# ---------------------------------------------------------------------------------------------- precedence and places

FIELDS: dict[tuple[str, str], list[Any]] = {
    ("optimizer", "lr"): [1e-4, 2e-4, 3e-4],
    ("optimizer", "weight_decay"): [0.1, 0.2, 0.3],
    ("train", "total_steps"): [11, 12, 13],
    ("train", "seed"): [21, 22, 23],
    ("train", "epochs"): [2, 3, 4],
    ("rollout", "temperature"): [0.5, 0.6, 0.7],
}


@table("seed", range(8))
def test_the_command_line_precedes_the_file_the_method_and_the_default(seed: int, at: Path) -> None:
    draw = random.Random(seed)
    methods = draw.sample(available_trainers(), 2)
    named = draw.random() < 0.5  # whether the command line names another method
    data: dict[str, Any] = {"method": methods[0]}
    overrides: dict[str, Any] = {"method.name": methods[1]} if named else {}
    expected = {}
    own = default_config(methods[named])
    for (section, field), values in FIELDS.items():
        key = f"{section}.{field}"
        usual = getattr(getattr(own, section), field)
        expected[key] = (usual, "method" if field in own.method.section_defaults.get(section, {}) else "default")
        if draw.random() < 0.5:
            data.setdefault(section, {})[field] = expected_value = draw.choice(values)
            expected[key] = (expected_value, "run.yaml")
        if draw.random() < 0.5:
            overrides[key] = draw.choice(values)
            expected[key] = (overrides[key], "command line")
    Path("run.yaml").write_text(json.dumps(data, indent=1), encoding="utf-8")
    config = read_config(Path("run.yaml"), overrides)
    assert config.method.name == methods[named]
    for key, (value, place) in expected.items():
        section, field = key.split(".")
        assert getattr(getattr(config, section), field) == value, key
        assert config.place(section, field).partition(":")[0] == place, key
    assert config.place("method", "name") == ("command line" if named else "run.yaml:2")


def test_places_are_kept_by_changes_and_shown_in_the_file_of_a_run(at: Path) -> None:
    Path("run.yaml").write_text("method: sft\ntrain:\n  total_steps: 1\n  seed: 3\n", encoding="utf-8")
    config = read_config(Path("run.yaml"), {"train.seed": 4}).evolve(optimizer={"lr": 0.5})
    places = [config.place("train", "total_steps"), config.place("train", "seed"), config.place("optimizer", "lr")]
    assert places == ["run.yaml:3", "command line", "Python"]
    assert config.place("train", "batch_size") == "default"
    assert config == TRLConfig.from_dict(config.to_dict()), "places are no part of a comparison"
    text = config.placed_yaml()
    assert "  seed: 4  # command line\n" in text
    assert "  batch_size: 32  # default\n" in text
    assert TRLConfig.from_dict(parse_yaml(text)) == config
    trainer = tiny_trainer("sft", Path("out"), train__total_steps=0)
    trainer.learn()
    assert "total_steps: 0  # Python\n" in Path("out/config.yaml").read_text(encoding="utf-8")


def test_show_prints_where_values_come_from(at: Path) -> None:
    Path("run.yaml").write_text(M + "rollout:\n  top_k: 5\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["config", "run.yaml", "train.seed=9"])
    assert result.exit_code == 0, result.output
    for line in (
        "  top_k: 5  # run.yaml:3",
        "  seed: 9  # command line",
        "  lr: 3.0e-05  # method",
        "  top_p: 1.0  # def",
    ):
        assert line in result.stdout


def test_mistyped_commands_and_files_are_not_taken_for_methods(at: Path) -> None:
    Path("a.yaml").write_text("method: ppo\n", encoding="utf-8")
    for command, message in (
        (["chek", "a.yaml"], "No such command 'chek'. Did you mean 'check'"),
        (["diff", "a.yaml", "b.yaml"], "cannot read the config 'b.yaml': No such file or directory"),
        (["b.yml"], "cannot read the config 'b.yml': No such file or directory"),
        (["pppo"], "no plugin 'pppo' is installed; did you mean 'ppo'?"),
    ):
        result = CliRunner().invoke(app, ["config", *command])
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


def test_diff_prints_the_settings_that_differ(at: Path) -> None:
    Path("a.yaml").write_text(M + "train: {seed: 2}\n", encoding="utf-8")
    Path("b.yaml").write_text(M + "model: {peft_config: {r: 4}}\ntrain: {seed: 3}\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["config", "diff", "a.yaml", "b.yaml"])
    assert result.stdout.splitlines() == ['model.peft_config: null -> {"r": 4}', "train.seed: 2 -> 3"]
    same = CliRunner().invoke(app, ["config", "diff", "ppo", "ppo"])
    assert (same.exit_code, same.stdout) == (0, "")


# --------------------------------------------------------------------------------------------- environment variables


@table(
    "text, value",
    [
        ("${SEED}", 7),
        ("'${SEED}'", "7"),
        ("${GONE:-0.5}", 0.5),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY}", None),
        ("runs/${NAME}/${SEED}", "runs/a b/7"),
        ("$${NAME}", "${NAME}"),
        ("'$$${NAME}'", "$${NAME}"),
        ("$NAME $5", "$NAME $5"),
    ],
)
def test_variables_of_the_environment_are_expanded(text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, known in (("SEED", "7"), ("NAME", "a b"), ("EMPTY", "")):
        monkeypatch.setenv(name, known)
    monkeypatch.delenv("GONE", raising=False)
    assert parse_yaml(f"a: {text}") == {"a": value}
    assert parse_yaml(f"- {text}") == [value]
    assert parse_yaml(text) == value


@table(
    "text, message",
    [
        (
            "seed: ${GONE}",
            "a variable that cannot be used: GONE is not set; .*GONE:-a default.* in line 1",
        ),
        ("seed: ${1x}", r"\$\{ begins none; write"),
        ("seed: ${GONE", r"\$\{ begins none; write"),
        ("run_dir: ${HF_TOKEN}", r"\$\{HF_TOKEN\} names a secret"),
        ("run_dir: ${AWS_SECRET_ACCESS_KEY:-x}", "names a secret"),
    ],
)
def test_variables_that_are_unknown_or_secret_are_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.delenv("GONE", raising=False)
    with pytest.raises(ConfigError, match=message) as found:
        parse_yaml(text)
    assert "canary" not in str(found.value)


def test_a_secret_setting_may_take_a_secret_variable(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_canary")
    Path("run.yaml").write_text(M + "model: {kwargs: {token: '${MY_TOKEN}'}}\n", encoding="utf-8")
    config = read_config(Path("run.yaml"))
    assert config.model.kwargs["token"] == "hf_canary"
    assert "canary" not in config.placed_yaml()


def test_keys_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "b")
    assert parse_yaml("'${A}': 1") == {"${A}": 1}
    for key in ("${A}", "$${A}", "$$${", "${"):
        assert parse_yaml(to_yaml({key: {key: [key]}})) == {key: {key: [key]}}


# ------------------------------------------------------------------------------------------------------------- schema


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from nodes(value)


def test_the_schema_has_every_setting_with_its_description_and_all_that_it_refers_to() -> None:
    schema = json_schema(available_trainers())
    assert json.loads(json.dumps(schema)) == schema
    parts = schema["$defs"]
    for node in nodes(schema):
        if isinstance(reference := node.get("$ref"), str):
            assert reference.removeprefix("#/$defs/") in parts
    for section, about in TRLConfig.model_fields.items():
        if section in ("method", "plugins"):
            continue
        fields = parts[about.annotation.__name__]["properties"]  # type: ignore[union-attr]
        assert set(fields) == set(about.annotation.model_fields)  # type: ignore[union-attr]
        assert all("description" in field for field in fields.values()), section
    names, *choices = schema["properties"]["method"]["anyOf"]
    assert names["enum"] == available_trainers()
    own = {parts[choice["$ref"].removeprefix("#/$defs/")]["properties"]["name"]["const"] for choice in choices}
    assert own == set(available_trainers())


def test_schedules_are_the_functions_that_transformers_has_for_them() -> None:
    for name, made in arguments.SCHEDULES.items():
        assert transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION[transformers.SchedulerType(name)].__name__ == made


# ------------------------------------------------------------------------------------------------- packages of plugins

LAZY = """
from trainkit.plugins import lazy_names
__all__ = ["ApartConfig", "ApartTrainer"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
"""
SETTINGS = '''
from pydantic import Field
from trainkit_sft.config import SFTConfig

class ApartConfig(SFTConfig):
    """Settings."""

    name: str = "apart"
    """The name."""
    reach: int = Field(1, ge=0)
    """How far."""
'''
TRAINER = """
from trainkit import get_trainer, register_trainer
from trainkit_apart.config import ApartConfig

class Base(get_trainer("sft")):
    pass

@register_trainer("apart")
class ApartTrainer(Base):
    method_class = ApartConfig
"""


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a stranger's package of three modules: with this ``__init__`` and this trainer."""
    from trainkit.plugins import registry

    def install(init: str, trainer: str) -> None:
        package = tmp_path / "trainkit_apart"
        package.mkdir()
        for name, text in (("__init__", init), ("config", SETTINGS), ("trainer", trainer)):
            (package / f"{name}.py").write_text(text, encoding="utf-8")
        info = tmp_path / "trainkit_apart-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: trainkit-apart\nVersion: 1.0\nRequires-Dist: trainkit-rl\n"
        )
        (info / "entry_points.txt").write_text("[trainkit.trainers]\napart = trainkit_apart\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    registry._TRAINERS.pop("apart", None)
    for module in [name for name in sys.modules if name.partition(".")[0] == "trainkit_apart"]:
        del sys.modules[module]


def test_the_settings_of_a_package_are_read_from_its_module_config(apart: Callable[[str, str], None]) -> None:
    apart(LAZY, TRAINER)
    assert "apart" in available_trainers()
    settings = get_method_class("Apart")
    assert settings.__module__ == "trainkit_apart.config"
    assert "trainkit_apart.trainer" not in sys.modules
    assert TRLConfig.from_dict({"method": {"name": "apart", "reach": 3}}).method.reach == 3
    assert get_trainer("apart").method_class is settings


def test_a_module_that_fails_by_an_attribute_is_no_module_without_the_name(apart: Callable[[str, str], None]) -> None:
    apart(LAZY, f"import math\nmath.gone\n{TRAINER}")
    with pytest.raises(PluginError, match=r"trainkit_apart.trainer failed: AttributeError: .*'gone'"):
        get_trainer("apart")


def test_the_kit_finds_settings_that_are_not_the_trainers(apart: Callable[[str, str], None]) -> None:
    apart(LAZY, TRAINER.replace("method_class = ApartConfig", "method_class = type('ApartConfig', (ApartConfig,), {})"))
    with pytest.raises(ConformanceError, match=r"trainkit_apart.config has the settings .*, and the trainer has"):
        check_plugin("apart", only=["settings_alone"])


@pytest.mark.slow
def test_the_kit_finds_settings_that_import_torch(apart: Callable[[str, str], None]) -> None:
    apart(f"import torch\n{LAZY}", TRAINER)
    with pytest.raises(ConformanceError, match=r"importing trainkit_apart.config alone imports torch"):
        check_plugin("apart", only=["settings_alone"])


@table("name", [name for name in available_trainers() if not name.startswith("_")])
def test_the_settings_of_built_in_algorithms_are_read_alone(name: str) -> None:
    assert settings_alone(name) is get_trainer(name).method_class


@table("name", ["check", "diff", "schema", "show"])
def test_an_algorithm_cannot_have_the_name_of_a_command(name: str) -> None:
    arrows = dict.fromkeys(("get_arch", "make_experience", "loss"), lambda *_: None)
    settings = type("Config", (MethodConfig,), {"__annotations__": {"name": str}, "name": name})
    with pytest.raises(RegistryError, match=f"the name '{name}' is a command of `trainkit config`"):
        register_trainer(name)(type("Trainer", (), {"method_class": settings, **arrows}))
