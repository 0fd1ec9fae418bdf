"""No dead knobs: changing any field of any section changes something that can be seen.

Of an algorithm's own fields the kit says so, by its check `fields_have_effects`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainkit
from trainkit.config import TRLConfig
from trainkit.errors import TrainkitError
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import LETTERS, character_tokenizer, tiny_trainer
from trainkit_kit.checks.traces import Course

DROPOUT = tiny_gpt2(10, resid_pdrop=0.2, embd_pdrop=0.2)
LONG = "abcdefgh" * 8

SECTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    # field: (another value, what else must hold for it to matter)
    "model.model_path": (tiny_gpt2(10, n_embd=16), {}),
    "model.reference_path": (tiny_gpt2(10, n_embd=16), {}),
    "model.dtype": ("bfloat16", {}),
    "model.num_layers_unfrozen": (1, {}),
    "model.peft_config": ({"r": 4, "target_modules": "all-linear"}, {}),
    "model.disable_dropout": (False, {"model.model_path": DROPOUT}),
    "model.kwargs": ({"attn_implementation": "eager"}, {}),
    "optimizer.name": ("sgd", {}),
    "optimizer.lr": (1e-4, {}),
    "optimizer.weight_decay": (0.5, {}),
    "optimizer.kwargs": ({"eps": 1e-2}, {}),
    "scheduler.name": ("linear", {}),
    "scheduler.warmup_steps": (3, {}),
    "scheduler.kwargs": (
        {"min_lr_rate": 0.5}, {"scheduler.name": "cosine_with_min_lr", "scheduler.kwargs": {"min_lr_rate": 0.1}}
    ),
    "rollout.max_new_tokens": (3, {}),
    "rollout.temperature": (0.5, {}),
    "rollout.top_k": (2, {}),
    "rollout.top_p": (0.3, {}),
    "rollout.min_p": (0.9, {}),
    "rollout.repetition_penalty": (3.0, {}),
    "rollout.stop_sequences": (["a"], {}),
    "rollout.stop_token_ids": ([0, 1, 2], {}),
    "rollout.min_new_tokens": (4, {}),
    "rollout.num_rollouts": (8, {}),
    "rollout.batch_size": (4, {}),
    "rollout.overlong_prompts": ("truncate", {"train.seq_length": 8}),
    "rollout.skip_special_tokens": (False, {}),
    "rollout.eval_kwargs": ({"temperature": [0, 1]}, {}),
    "train.seed": (7, {}),
    "train.health": ("stop", {"model.model_path": DROPOUT, "model.disable_dropout": False}),  # the first ratio is not 1
    "train.total_steps": (3, {}),
    "train.epochs": (1, {"train.total_steps": 100, "train.epochs": 4}),
    "train.batch_size": (4, {}),
    "train.microbatch_size": (2, {}),
    "train.seq_length": (8, {}),
    "train.max_grad_norm": (1e-3, {}),
    "train.mixed_precision": ("bf16", {}),
    "train.eval_interval": (2, {}),
    "train.save_interval": (2, {}),
    "train.keep_checkpoints": (1, {"train.save_interval": 2}),
    "train.save_best": (True, {}),
    "train.run_dir": ("elsewhere", {}),
    "train.resume": ("auto", {"train.run_dir": "used"}),
    "train.trackers": (["tensorboard"], {}),
    "plugins": (["no-such-plugin"], {}),
}  # fmt: skip


ELSEWHERE = {
    "data.ignore_columns":
        "test_dropped.py::test_a_column_that_changes_what_is_learnt_is_refused_until_it_is_ignored",
    "data.image_urls": "test_images.py::test_images_are_fetched_if_the_run_may",
    "model.freeze_vision": "test_images.py::test_what_is_trained_is_what_the_settings_say",
    "environment.workers": "test_environments.py::test_coroutines_run_at_the_same_time",
    "environment.timeout": "test_environments.py::test_a_timeout_says_so",
    "environment.on_error": "test_environments.py::test_an_episode_that_fails_can_end_with_a_reward_and_is_counted",
    "environment.fail_reward": "test_environments.py::test_an_episode_that_fails_can_end_with_a_reward_and_is_counted",
    "reward.timeout":
        "test_reward_calls.py::test_a_call_that_takes_too_long_is_an_error_that_names_function_prompts_step_and_setting",
    "reward.retries": "test_reward_calls.py::test_a_run_with_failures_that_pass_equals_one_without",
    "reward.retry_on": "test_reward_calls.py::test_other_errors_and_wrong_answers_are_not_repeated",
    "reward.on_nonfinite": "test_nonfinite.py::test_what_is_trained_on_has_finite_scores_and_groups_are_whole",
    "rollout.max_turns":
        "test_environments.py::test_an_episode_is_truncated_at_the_limit_of_turns_and_its_algorithm_hears_it",
    "rollout.max_episode_tokens": "test_environments.py::test_an_episode_is_truncated_at_the_limit_of_tokens",
    "rollout.max_refills": "test_dynamic.py::test_a_collection_that_cannot_be_filled_is_trained_on_with_one_line",
    "optimizer.groups": "test_optimizers.py::test_groups_of_parameters_have_their_own_rates_and_decays",
    "train.padding_free": "test_joined.py::test_one_pass_runs_the_tokens_that_are_needed",
    "train.compile": "test_compiling.py::test_a_compiled_run_ends_with_the_same_weights",
    "train.deterministic": "test_backend.py::test_kernels_can_be_deterministic",
    "train.share_prompts": "test_shared_prompts.py::test_a_run_with_shared_prompts_ends_with_the_same_weights",
    "train.gradient_checkpointing":
        "test_memory.py::test_activations_that_are_computed_again_give_the_same_gradient",
    "train.timeout": "reliability/test_distributed.py::test_g2_one_process_that_hangs_ends_both",
    "train.verify_export":
        "test_exports.py::test_an_export_that_is_not_what_was_trained_is_an_error_that_keeps_a_checkpoint",
    "train.on_save_error": "test_checkpoint.py::test_a_run_goes_on_without_the_checkpoint_that_could_not_be_written",
    "train.push_to_hub": "test_publishing.py::test_a_run_publishes_its_model_when_it_ends",
    "train.save_async": "test_saving.py::test_the_training_goes_on_while_a_checkpoint_is_written",
    "train.sharding": "test_sharding.py::test_sharded_runs_equal_replicated_ones",
    "rollout.engine": "test_staleness.py::test_an_engine_with_a_copy_of_the_weights_ends_with_the_same_bits",
    "rollout.staleness":
        "test_staleness.py::test_collection_c_is_sampled_with_the_weights_after_collection_c_minus_1_minus_s",
    "rollout.correction": "test_staleness.py::test_importance_weights_scale_the_gradients_of_their_tokens",
    "rollout.correction_level": "test_staleness.py::test_responses_with_one_ratio_have_one_weight",
    "rollout.correction_cap": "test_staleness.py::test_importance_weights_scale_the_gradients_of_their_tokens",
}  # fmt: skip
"""Fields that need certain columns or models, an environment, an engine, older weights, an algorithm that keeps, or a
reward function that fails, and the tests that show their effect."""


def observe(root: Path, changes: dict[str, Any]) -> Any:
    """Everything a run leaves behind that does not depend on the clock; the message, if it is refused."""
    run_dir = root / str(changes.get("train.run_dir", "run"))
    if "train.run_dir" in changes and changes["train.run_dir"] == "used":
        run_dir.mkdir(parents=True)
        (run_dir / "config.yaml").write_text("{}", encoding="utf-8")
    try:
        trainer = tiny_trainer(
            "ppo", run_dir, **{"train.eval_interval": 3, **{k: v for k, v in changes.items() if k != "train.run_dir"}}
        )
        trainer.add_eval_pipeline(["a", "bc", "ghab"])
        course = Course(trainer).learn()
    except TrainkitError as error:
        return str(error)
    files = sorted(str(p.relative_to(root)) for p in run_dir.rglob("*") if p.is_dir())
    return course.notes, files, trainer.unwrapped.model.config._attn_implementation


def test_the_table_of_sections_is_complete() -> None:
    fields = set()
    for section, info in TRLConfig.model_fields.items():
        inner = getattr(info.annotation, "model_fields", None)
        if section not in ("method", "tokenizer"):  # the tokenizer's have a test of their own
            fields |= {f"{section}.{f}" for f in inner} if inner else {section}
    assert fields == set(SECTIONS) | set(ELSEWHERE)
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("field", SECTIONS)
def test_every_field_of_every_section_has_an_effect(field: str, tmp_path: Path) -> None:
    value, context = SECTIONS[field]
    before = observe(tmp_path / "before", context)
    after = observe(tmp_path / "after", {**context, field: value})
    assert before != after


def test_the_tokenizers_fields_have_an_effect(tmp_path: Path) -> None:
    character_tokenizer(LETTERS).save_pretrained(tmp_path / "a")
    character_tokenizer(LETTERS + "x").save_pretrained(tmp_path / "b")
    base = {"model": {"model_path": tiny_gpt2(11)}, "tokenizer": {"tokenizer_path": str(tmp_path / "a")}}
    config = trainkit.default_config("sft").evolve(**base)

    def tokenizer(config: TRLConfig[Any]) -> Any:
        return trainkit.get_trainer("sft")(config).tokenizer

    assert len(tokenizer(config)) == 10
    assert len(tokenizer(config.update({"tokenizer.tokenizer_path": str(tmp_path / "b")}))) == 11
    assert tokenizer(config.update({"tokenizer.kwargs.eos_token": "h"})).eos_token == "h"
