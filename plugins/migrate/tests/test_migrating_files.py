"""Files as they are published: what is printed for each means the same, and runs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit import TRLConfig
from trainkit.cli import app
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit_migrate import rewritten

FILES = Path(__file__).parent / "files"
PAIRS = [{"prompt": p, "chosen": "aab", "rejected": "ba"} for p in "abababab"]
SAMPLES = [{"prompt": p, "output": "aab"} for p in "abababab"]
ONLINE: dict[str, Any] = {"prompts": ["a", "b"] * 4, "reward_fn": lambda outputs, **_: [len(o) / 9 for o in outputs]}
DATA: dict[str, dict[str, Any]] = {
    "sft": {"samples": SAMPLES},
    "dpo": {"samples": PAIRS},
    "ilql": {"samples": [(row["prompt"], row["output"]) for row in SAMPLES], "rewards": [1.0, 0.0] * 4},
    **dict.fromkeys(("ppo", "rft", "grpo", "rloo", "online_dpo"), ONLINE),
}
"""What each method is run with: eight rows."""
HERE = {
    "tokenizer.tokenizer_path": None, "rollout.engine": "local", "train.sharding": "none", "train.trackers": [],
    "train.mixed_precision": "no",
}  # fmt: skip
"""What the test changes, besides the model and the directory."""


def migrated(name: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["migrate", str(FILES / name), *options])


PUBLISHED: list[Any] = [
    # 100 epochs of 4 passes over 16 / 8 batches are more than 6 steps; the lowest rate of the cosine is the first
    (
        "trlx_ppo.yml", [], 0,
        {"train.batch_size": 8, "rollout.num_rollouts": 16, "method.ppo_epochs": 4, "train.max_grad_norm": None,
         "rollout.top_k": 0, "rollout.top_p": 0.7, "rollout.overlong_prompts": "truncate_right",
         "model.num_layers_unfrozen": 2},
        [1.412e-4] * 6,
    ),
    # one epoch of 8 / 4 batches
    ("trlx_ilql.yml", [], 0, {"rollout.top_k": 20, "rollout.eval_kwargs": {"beta": 1}}, [5e-5] * 2),
    # two epochs of 8 / 4 batches; a period of 10^12 steps is constant
    ("trlx_sft.yml", [], 0, {"rollout.top_k": 0, "train.seq_length": 24}, [1e-4] * 4),
    # transformers samples from the 50 most likely tokens
    (
        "trlx_rft.yml", [], 0,
        {"method.rft_k": 4, "rollout.top_k": 50, "rollout.temperature": 0.7,
         "rollout.overlong_prompts": "truncate_right",
         "optimizer.lr": 3e-5, "train.total_steps": 4, "train.epochs": 2},
        None,
    ),
    # 2 rows in each of 2 passes; the script of 0.8 cuts at 512 tokens; half a cosine over 3 steps
    (
        "trl08_sft.yaml", [], 0,
        {"train.batch_size": 4, "train.microbatch_size": 2, "train.seq_length": 512,
         "model.disable_dropout": False},
        [1e-4, 0.75e-4, 0.25e-4],
    ),
    # the rate of TrainingArguments, 5e-5, falls linearly to 0; DPOTrainer switches dropout off
    (
        "trl08_dpo.yaml", [], 0,
        {"method.beta": 0.05, "train.seq_length": 40, "train.batch_size": 4, "model.disable_dropout": True},
        [5e-5, 5e-5 * 2 / 3, 5e-5 / 3],
    ),
    # 2 rows in each of 4 passes on each of 2 processes
    (
        "trl1_sft.yaml", ["--processes", "2"], 0,
        {"train.batch_size": 16, "method.packing": True, "train.epochs": 1, "optimizer.lr": 2e-4,
         "model.peft_config.r": 32, "model.peft_config.lora_alpha": 16, "model.disable_dropout": False},
        None,
    ),
    # a collection is per_device_train_batch_size * steps_per_generation, which is the passes of a step: 4 * 2
    (
        "trl1_grpo.yaml", [], 0,
        {"method.group_size": 4, "method.kl_coef": 0.001, "rollout.num_rollouts": 8, "train.batch_size": 8,
         "rollout.temperature": 0.9, "rollout.top_k": 0, "rollout.max_new_tokens": 8},
        [3e-6] * 3,
    ),
    # 4 steps of which 2 warm up: shares 0, 1/2, 1 and 1/2 of the rate
    (
        "trl1_dpo.yaml", ["--config-class", "DPOConfig"], 0, {"train.batch_size": 2, "train.seq_length": 32},
        [0.0, 2.5e-7, 5e-7, 2.5e-7],
    ),
    (
        "trl1_script.py", [], 0, {"train.batch_size": 2, "train.seq_length": 32},
        [1e-5 * (8 - step) / 8 for step in range(8)],
    ),
    # 2 rows in each of 2 passes
    (
        "axolotl_lora.yml", [], 0,
        {"train.batch_size": 4, "train.microbatch_size": 2, "method.packing": True, "train.seq_length": 32,
         "model.peft_config.target_modules": "all-linear", "scheduler.warmup_steps": 10, "optimizer.lr": 2e-4},
        None,
    ),
    (
        "axolotl_dpo.yml", [], 1, {"method.beta": 0.2, "train.batch_size": 4, "train.microbatch_size": 1},
        [5e-6, 5e-6 * 2 / 3, 5e-6 / 3],
    ),
    ("accelerate_zero2.yaml", [], 0, {"train.max_grad_norm": 1.0, "train.sharding": "zero2"}, None),
    ("accelerate_ddp.yaml", [], 0, {"train.mixed_precision": "no", "train.sharding": "none"}, None),
    (
        "deepspeed_zero1.json", ["--processes", "2"], 0,
        {"train.batch_size": 16, "train.microbatch_size": 2, "optimizer.lr": 3e-5, "scheduler.warmup_steps": 20,
         "train.max_grad_norm": 0.5, "train.sharding": "zero2", "train.mixed_precision": "bf16"},
        None,
    ),
    ("deepspeed_zero3.json", [], 0, {"train.sharding": "zero3"}, None),
    # 24 prompts in steps of 2 * 3 prompts, each with a pair of 4 responses; sampled one collection ahead
    (
        "async_online_dpo.yml", [], 0,
        {"train.batch_size": 6, "rollout.num_rollouts": 24, "method.k": 4, "rollout.staleness": 1,
         "rollout.engine": "vllm", "train.save_interval": 1, "rollout.temperature": 0.7},
        [5e-6, 3.75e-6, 2.5e-6, 1.25e-6],
    ),
    # 16 responses in steps of 2 * 4
    (
        "async_rloo.yml", ["--config-class", "RLOOConfig"], 0,
        {"train.batch_size": 8, "rollout.num_rollouts": 8, "method.rloo_epochs": 1, "method.kl_coef": 0.05,
         "method.missing_eos_score": -1.0, "rollout.max_new_tokens": 8},
        [3e-6, 1.5e-6],
    ),
]  # fmt: skip
"""Files, options of the command, its exit code, settings of the result, and the learning rates of a run."""


@table("name, options, code, expected, rates", PUBLISHED)
def test_a_published_file_means_the_same(
    name: str, options: list[str], code: int, expected: dict[str, Any], rates: list[float] | None
) -> None:
    result = migrated(name, *options)
    assert result.exit_code == code, result.output
    config = TRLConfig.from_dict({"method": "sft", **yaml.safe_load(result.stdout)})
    assert config == config.update(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "rates"), [(row[0], row[1], row[4]) for row in PUBLISHED])
def test_a_published_file_runs(name: str, options: list[str], rates: list[float] | None, tmp_path: Path) -> None:
    config = TRLConfig.from_dict({"method": "sft", **yaml.safe_load(migrated(name, *options).stdout)})
    config = config.update({**HERE, "train.run_dir": str(tmp_path / "run")})
    trainer = trainkit.train(
        tiny_gpt2(4, n_positions=512), tokenizer=character_tokenizer("ab"), config=config, **DATA[config.method.name]
    )
    assert trainer.progress.step > 0
    if rates is not None:
        steps = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
        assert [step["train/lr"] for step in steps if "train/lr" in step] == pytest.approx(rates)


@table("side", ["right", "left"])
def test_long_prompts_of_trlx_lose_the_same_side(side: str, tmp_path: Path) -> None:
    """trlX calls its tokenizer with ``truncation=True`` and the length that leaves room for a response."""
    given = yaml.safe_load((FILES / "trlx_ppo.yml").read_text(encoding="utf-8"))
    given["tokenizer"]["truncation_side"] = side
    (tmp_path / "trlx.yml").write_text(yaml.safe_dump(given), encoding="utf-8")
    printed = yaml.safe_load(CliRunner().invoke(app, ["migrate", str(tmp_path / "trlx.yml")]).stdout)
    tokenizer, prompt = character_tokenizer("ab"), "a" * 40 + "b" * 40
    here = {**HERE, "train.run_dir": str(tmp_path / "run"), "model.model_path": tiny_gpt2(4, n_positions=512)}
    config = TRLConfig.from_dict(printed).update(here)
    trainer: Any = trainkit.get_trainer("ppo")(config, tokenizer=tokenizer, reward_fn=ONLINE["reward_fn"])
    room = given["train"]["seq_length"] - given["method"]["gen_kwargs"]["max_new_tokens"]
    theirs = character_tokenizer("ab")
    theirs.truncation_side = side
    assert trainer.text.encode(prompt) == theirs(prompt, truncation=True, max_length=room)["input_ids"]


def test_remarks_say_what_a_file_does_not() -> None:
    for name, told in (
        ("accelerate_zero2.yaml", "deepspeed_config.zero_stage: stage 1 becomes zero2"),
        ("deepspeed_zero1.json", "zero_optimization.stage: stage 1 becomes zero2"),
        ("axolotl_dpo.yml", "optimizer has no counterpart: given 'paged_adamw_8bit'"),
        ("axolotl_dpo.yml", "not given: bf16 is 'auto' by default: it is taken as bf16"),
        ("deepspeed_zero1.json", "scheduler: the rate rises linearly, in DeepSpeed logarithmically"),
        ("axolotl_dpo.yml", "val_set_size has no counterpart: samples are not split"),
        ("axolotl_lora.yml", "datasets: data are an option of the command: --samples teknium/GPT4-LLM-Cleaned"),
        ("axolotl_lora.yml", "datasets: type: alpaca has no effect: give rows with the columns"),
    ):
        assert f"{name}: {told}" in migrated(name).stderr


AXOLOTL = {"base_model": "m", "learning_rate": 1e-4}
SCHEDULED = {"type": "WarmupLR", "params": {"warmup_type": "linear"}}


@table(
    "given, expected",
    [
        # what axolotl does without a field: HyperparametersConfig and _set_base_training_args of its source
        (
            AXOLOTL,
            {"train.epochs": 1, "train.batch_size": 1, "train.seq_length": 512, "train.mixed_precision": "bf16",
             "train.keep_checkpoints": 4, "train.seed": 42, "scheduler.name": "cosine", "optimizer.weight_decay": None},
        ),
        ({**AXOLOTL, "max_steps": 50}, {"scheduler.warmup_steps": 2, "train.total_steps": 50, "train.epochs": None}),
        ({**AXOLOTL, "max_steps": 1000}, {"scheduler.warmup_steps": 30}),
        ({**AXOLOTL, "max_steps": 9000}, {"scheduler.warmup_steps": 100}),
        ({**AXOLOTL, "warmup_steps": 5, "max_steps": 9000}, {"scheduler.warmup_steps": 5}),
        ({**AXOLOTL, "bf16": "auto", "fp16": True}, {"train.mixed_precision": "fp16"}),
        ({**AXOLOTL, "bf16": True, "fp16": True}, {"train.mixed_precision": "bf16"}),
        ({**AXOLOTL, "bf16": False}, {"train.mixed_precision": "no"}),
        (
            {**AXOLOTL, "cosine_min_lr_ratio": 0.2},
            {"scheduler.name": "cosine_with_min_lr", "scheduler.kwargs": {"min_lr_rate": 0.2}},
        ),
        (
            {**AXOLOTL, "adapter": "lora", "lora_r": 4, "peft_use_dora": True, "deepspeed": None, "fsdp_config": None},
            {"model.peft_config": {"peft_type": "LORA", "r": 4, "use_dora": True}},
        ),
        (
            {**AXOLOTL, "rl": "simpo", "simpo_gamma": 1.5, "cpo_alpha": 0.5, "rl_beta": 2.0, "hub_model_id": "me/it"},
            {"method.name": "cpo", "method.loss_type": "simpo", "method.simpo_gamma": 1.5, "method.cpo_alpha": 0.5,
             "method.beta": 2.0, "train.push_to_hub": "me/it"},
        ),
        ({**AXOLOTL, "rl": "simpo"}, {"method.cpo_alpha": 1.0}),  # the default of TRL's CPOConfig
        ({**AXOLOTL, "rl": "kto", "kto_desirable_weight": 0.2}, {"method.name": "kto", "method.desirable_weight": 0.2}),
        ({**AXOLOTL, "reward_model": True}, {"method.name": "reward"}),
        ({**AXOLOTL, "use_tensorboard": True}, {"train.trackers": ["tensorboard"]}),
        # DeepSpeed: Adam is AdamW, rates of the schedule count before that of the optimizer, nothing is clipped
        (
            {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}},
            {"optimizer.name": "adamw", "optimizer.lr": 1e-4, "train.max_grad_norm": None},
        ),
        (
            {"zero_optimization": {}, "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            {"optimizer.name": "adam"},
        ),
        ({"zero_optimization": {}, "scheduler": SCHEDULED}, {"scheduler.name": "constant", "optimizer.lr": None}),
        (
            {"zero_optimization": {}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 90}}},
            {"scheduler.name": "linear", "scheduler.warmup_steps": 1000, "train.total_steps": 90, "optimizer.lr": 1e-3},
        ),
        (
            {"zero_optimization": {}, "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7}}},
            {"scheduler.name": "cosine_with_min_lr", "scheduler.warmup_steps": 7,
             "scheduler.kwargs": {"min_lr_rate": 1e-4}},
        ),
    ],
)  # fmt: skip
def test_fields_of_axolotl_and_deepspeed_mean_what_they_mean_there(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "given.json").write_text(json.dumps(given), encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "given.json")])
    assert result.exit_code == 0, result.stderr
    printed = yaml.safe_load(result.stdout)
    found = {path: printed.get(path.split(".")[0], {}).get(path.split(".")[1]) for path in expected}
    assert found == expected


def test_a_file_that_two_versions_of_trl_could_have_is_said_to_be_of_the_newer(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("packing: true\ndataset_text_field: text\n", encoding="utf-8")
    newer = CliRunner().invoke(app, ["migrate", str(tmp_path / "sft.yaml")])
    assert "read as SFTConfig of TRL 1.x; a file of TRL 0.8 needs --config-class SftScriptArguments" in newer.stderr
    options = ["--config-class", "SftScriptArguments"]
    older = CliRunner().invoke(app, ["migrate", str(tmp_path / "sft.yaml"), *options])
    lengths = [yaml.safe_load(each.stdout)["train"]["seq_length"] for each in (newer, older)]
    assert lengths == [1024, 512]


@table(
    "name, lines",
    [
        (
            "trlx_script.py",
            ["3: trainkit_trlx has no 'default_nemo_1_3b_config' in 'trlx.data.default_configs': trainkit has no NeMo",
             "6: optimizer.name has no counterpart: write adamw",
             "11: train.trainer has no counterpart: trainkit has no NeMo", "12: num_beams has no counterpart"],
        ),
        (
            "trl08_script.py",
            ["6: TrainingArguments.optim has no counterpart: given 'paged_adamw_32bit'",
             "8: DPOTrainer.loss_type has no counterpart: given 'bco_pair'"],
        ),
    ],
)  # fmt: skip
def test_settings_of_a_script_that_its_run_would_refuse_are_told(name: str, lines: list[str]) -> None:
    result = migrated(name)
    assert result.exit_code == 1
    told = [line.partition(f"{name}:")[2] for line in result.stderr.splitlines()]
    assert [each[: len(line)] for each, line in zip(told, lines, strict=True)] == lines


@table(
    "text, told",
    [
        # a mapping of paths, sections, classes; of a section with parts that are computed, what is written out
        (
            'trlx.train(config={"optimizer": {"name": "adamw_8bit_bnb"}})',
            "optimizer.name has no counterpart: write adamw",
        ),
        ('hparams = {"train.trainer": "NeMoILQLTrainer"}', "train.trainer has no counterpart"),
        ("PPOConfig(num_rollouts=n, gen_kwargs={'num_beams': 2, 'top_k': k})", "method.gen_kwargs.num_beams has no"),
        ("OptimizerConfig(name='adamw', kwargs=dict(lr=1e-3))", ""),
        ("TrainConfig(tracker=None, seq_length=n, trainer_kwargs={'a': 1})", ""),
        ("MyConfig(num_beams=4, trainer='NeMoPPOTrainer')", ""),
    ],
)
def test_settings_are_found_where_a_script_writes_them(text: str, told: str) -> None:
    assert ("; ".join(rewritten(f"import trlx\n{text}\n").refused)).startswith(f"2: {told}" if told else "")
    assert bool(rewritten(f"import trlx\n{text}\n").refused) == bool(told)


def test_modules_below_those_without_counterpart_have_their_advice() -> None:
    script = "from trlx.ray_tune.wandb import log_trials\nimport trlx.trainer.nemo_ppo_trainer as nemo\n"
    first, second = rewritten(script).refused
    assert "write the search space as a sweep of trainkit" in first
    assert "trainkit has no NeMo" in second
    for module, told in (
        ("trainkit_trlx.ray_tune.wandb", "start it with trainkit sweep"),
        ("trainkit_trlx.sweep.x", "trainkit sweep"),
        ("trainkit_trl.commands.cli", "trainkit train"),
        ("trainkit_trl.no_such_module", "Coming from TRL"),
    ):
        with pytest.raises(ImportError, match=told):
            importlib.import_module(module)


@table(
    "name, text, told",
    [
        ("a.yml", "", "it is empty"),
        ("a.yml", "- 1\n", "it holds"),
        ("a.yml", "a: [1", "is not valid YAML"),
        ("a.yml", "actor: 1\n", "is of no framework that is known; given actor"),
        ("a.yml", "method: ppo\n", "is a configuration of trainkit already; trainkit config check FILE checks it"),
        ("a.json", "", "is not valid JSON"),
        ("a.json", "[]", "should hold a mapping"),
        ("a.json", '{"zero_optimization": ', "is not valid JSON"),
        ("a.toml", "a = 1", "which ends in '.toml'"),
        ("a.py", "def f(:", "cannot read the script"),
        ("a.py", "\0", "cannot read the script"),
        ("a.py", "", "the script imports none of trlx, trl"),
    ],
)
def test_what_cannot_be_read_is_answered_with_one_message(name: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / name)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert told in result.stderr
    if name != "a.py" and "already" not in told:
        assert "trainkit migrate reads configurations of trlX, TRL" in result.stderr


@table(
    "text, field",
    [
        ("method: {name: ppoconfig}\ntrain: 3\n", "train has no counterpart: should be a mapping"),
        ("method: {name: ppoconfig}\ntrain: {batch_size: [1]}\nscheduler: cosine\n", "scheduler has no counterpart"),
        ("packing: true\npacking_strategy: bfd\nper_device_train_batch_size: many\n", "per_device_train_batch_size"),
        ("zero_optimization: {stage: two}\n", "zero_optimization.stage has no counterpart: given 'two'"),
        ("base_model: m\ndatasets: 3\n", "datasets has no counterpart: given 3"),
    ],
)
def test_values_of_another_type_are_named(text: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", str(tmp_path / "a.yml")])
    assert result.exit_code == 1, result.output
    assert field in result.stderr


def test_a_sweep_of_trlx_is_left_to_the_command_that_runs_it() -> None:
    result = CliRunner().invoke(app, ["migrate", str(FILES / "trlx_sweep.yml")])
    assert result.exit_code == 2
    assert "trlx_sweep.yml --script SCRIPT.py" in " ".join(result.stderr.split())


# ------------------------------------------------------------------------------------------------------ async_rlhf

SHARED = """
output_global_parent_dir: results
dataset_test_split: test
num_mini_batches: 1
stop_token: eos
save_strategy: steps
save_steps: 0.25
hub_strategy: all_checkpoints
logging_steps: 100
"""
GSM8K = """
dataset_name: openai/gsm8k
bf16: True
torch_dtype: bfloat16
model_name_or_path: realtreetune/rho-1b-sft-GSM8K
sft_model_path: realtreetune/rho-1b-sft-GSM8K
"""
ASYNC = {
    "rloo": ("RLOOConfig", 1, """
output_dir: rloo_pythia410m_tldr6.9b
max_length: 512
fp16: True
torch_dtype: float16
total_episodes: 131072
response_length: 53
num_ppo_epochs: 1
learning_rate: 3.0e-6
per_device_train_batch_size: 16
gradient_accumulation_steps: 32
model_name_or_path: mnoukhov/pythia410m-sft-tldr
sft_model_path: mnoukhov/pythia410m-sft-tldr
local_rollout_forward_batch_size: 32
non_eos_penalty: True
num_sample_generations: 5
"""),
    "online_dpo": ("OnlineDPOConfig", 3, GSM8K + """
output_dir: onlinedpo_rho1b_gsm8k
single: False
sync: False
vllm: True
rloo_k: 8
temperature: 0.7
beta: 0.1
max_grad_norm: 1.0
total_episodes: 73728
response_length: 512
num_ppo_epochs: 1
learning_rate: 5.0e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 6
local_rollout_forward_batch_size: 48
non_eos_penalty: False
num_sample_generations: 0
"""),
    "ppo": ("PPOv2Config", 1, GSM8K + """
output_dir: ppo_pythia410m_gsm8k
temperature: 0.6
kl_coef: 1e-4
num_ppo_epochs: 1
total_episodes: 131072
response_length: 400
num_ppo_epochs: 2
learning_rate: 1.0e-6
per_device_train_batch_size: 1
gradient_accumulation_steps: 64
local_rollout_forward_batch_size: 16
non_eos_penalty: True
num_sample_generations: 5
"""),
}  # fmt: skip
"""The fields of the three configurations that the page names, the class and the processes that read them."""
OWN = {"rollout.engine": {"name": "vllm", "urls": ["http://localhost:8000"]}, "train.eval_interval": 128}
"""What the page adds to the configuration of online DPO: where the server is, and an evaluation per checkpoint."""


@table("name", [*ASYNC])
def test_configurations_of_async_rlhf_are_those_of_the_page(name: str, tmp_path: Path) -> None:
    cls, processes, text = ASYNC[name]
    (tmp_path / "a.yml").write_text(SHARED + text, encoding="utf-8")
    result = migrated(str(tmp_path / "a.yml"), "--config-class", cls, "--processes", str(processes))
    assert result.exit_code == 0, result.stderr
    page = (Path(__file__).parents[3] / "docs/coming-from-trl.md").read_text(encoding="utf-8")
    shown = TRLConfig.from_dict(yaml.safe_load(page.partition(f"`{name}.yaml`:\n\n```yaml\n")[2].partition("```")[0]))
    found = TRLConfig.from_dict(yaml.safe_load(result.stdout))
    assert (found.update(OWN) if name == "online_dpo" else found) == shown


def test_of_a_key_that_is_given_twice_the_last_counts(tmp_path: Path) -> None:
    """As where these files are read: by PyYAML, and by json."""
    (tmp_path / "a.yml").write_text(ASYNC["ppo"][2], encoding="utf-8")
    result = migrated(str(tmp_path / "a.yml"), "--config-class", "PPOv2Config")
    assert "a.yml: 'num_ppo_epochs' is given in line 11 and again in line 14, which counts" in result.stderr
    (tmp_path / "a.json").write_text('{"train_batch_size": 1, "train_batch_size": 4, "zero_optimization": {}}')
    result = migrated(str(tmp_path / "a.json"))
    assert "a.json: 'train_batch_size' is given twice; the second counts" in result.stderr
    assert yaml.safe_load(result.stdout)["train"]["batch_size"] == 4
