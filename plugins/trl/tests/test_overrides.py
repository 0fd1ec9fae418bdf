"""Methods of TRL's trainers on samples that a script overrides: they are called, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing import event_accumulator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    TrainerCallback,
    TrainingArguments,
)

from tables import table
from trainkit import hookimpl
from trainkit.errors import ConfigError, PluginError
from trainkit.testing import character_tokenizer
from trainkit_ddpo import PixelPipeline
from trainkit_trl import (
    AutoModelForCausalLMWithValueHead,
    CPOConfig,
    CPOTrainer,
    DDPOConfig,
    DDPOTrainer,
    DPOTrainer,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTTrainer,
    set_seed,
)

TEXTS = Dataset.from_dict({"text": ["abcd", "efgh"] * 4})
PAIRS = Dataset.from_dict({"prompt": ["a", "b"] * 4, "chosen": ["cd", "efg"] * 4, "rejected": ["ef", "c"] * 4})
LABELLED = Dataset.from_dict({"prompt": ["a", "b"] * 4, "completion": ["cd", "efg"] * 4, "label": [True, False] * 4})
TOKENS = Dataset.from_list(
    [{"input_ids_chosen": [1, 2, 3], "attention_mask_chosen": [1] * 3, "input_ids_rejected": [1, 4],
      "attention_mask_rejected": [1] * 2}] * 8
)  # fmt: skip
CONFIGS = {RewardTrainer: RewardConfig, KTOTrainer: KTOConfig, ORPOTrainer: ORPOConfig, CPOTrainer: CPOConfig}
EVERY = (SFTTrainer, DPOTrainer, RewardTrainer, ORPOTrainer, CPOTrainer, KTOTrainer)


def made(cls: Any, tmp_path: Path, changes: dict[str, Any] | None = None, **given: Any) -> Any:
    """Return a trainer of a class with a small model and its data."""
    set_seed(0)
    tokenizer = character_tokenizer("abcdefgh")
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=len(tokenizer), n_positions=32, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    base = next(each for each in EVERY if issubclass(cls, each))
    kind: Any = AutoModelForSequenceClassification if base is RewardTrainer else AutoModelForCausalLM
    usual = {"max_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "save_strategy": "no"}
    args = CONFIGS.get(base, TrainingArguments)(
        str(tmp_path / "out"), **{"report_to": "none", **usual, **(changes or {})}
    )
    data = {SFTTrainer: TEXTS, RewardTrainer: TOKENS, KTOTrainer: LABELLED}.get(base, PAIRS)
    given = {"train_dataset": data, "eval_dataset": data, **given}
    if base is SFTTrainer:
        given.setdefault("dataset_text_field", "text")
    return cls(model=kind.from_config(config), args=args, tokenizer=tokenizer, **given)


def tripled(base: Any) -> Any:
    class Tripled(base):  # type: ignore[misc]
        steps = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            type(self).steps += torch.is_grad_enabled()
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            return (3 * loss, outputs) if return_outputs else 3 * loss

    return Tripled


@table("base", [SFTTrainer, RewardTrainer, DPOTrainer, ORPOTrainer, CPOTrainer])
def test_compute_loss_of_a_subclass_is_trained_on(base: Any, tmp_path: Path) -> None:
    """Three times the loss has three times the gradient, and is otherwise that of trainkit."""
    found, cls = [], tripled(base)
    for each in (base, cls):
        trainer = made(each, tmp_path, {"eval_strategy": "steps", "eval_steps": 2})
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer.train()
        found.append({name: value for line in reversed(trainer.state.log_history) for name, value in line.items()})
    plain, other = found
    for name in ("loss", "grad_norm"):
        assert other[name] == pytest.approx(3 * plain[name], rel=1e-4)
    assert cls.steps == 2
    of_base = {name for name in plain if name.removeprefix("eval_").startswith(("rewards/", "logps/", "eval_loss"))}
    assert of_base <= other.keys()
    rescaled = 3 if base in (SFTTrainer, RewardTrainer) else 1  # TRL's prediction_step of pairs calls no compute_loss
    assert other["eval_loss"] == pytest.approx(rescaled * plain["eval_loss"], rel=1e-4)


LOSSES: list[tuple[Any, str]] = [
    *((base, name) for base in (DPOTrainer, ORPOTrainer, CPOTrainer)
      for name in ("get_batch_loss_metrics", "get_batch_metrics", "concatenated_forward", "concatenated_inputs",
                   "get_batch_logps", "store_metrics", "prediction_step")),
    (DPOTrainer, "dpo_loss"),
    (ORPOTrainer, "odds_ratio_loss"),
    (CPOTrainer, "cpo_loss"),
    (RewardTrainer, "prediction_step"),
    (SFTTrainer, "prediction_step"),
]  # fmt: skip


@table("base, name", LOSSES)
def test_methods_of_the_loss_are_called_with_what_trl_gives_them(base: Any, name: str, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return getattr(super(cls, self), name)(*args, **kwargs)

    cls = type("Own", (base,), {name: spy, "__module__": __name__})
    trainer = made(cls, tmp_path, {"eval_strategy": "steps", "eval_steps": 2})
    trainer.train()
    assert calls
    if name == "prediction_step":
        assert {"eval_loss", "train_loss"} <= {key for line in trainer.state.log_history for key in line}
    if name in ("prediction_step", "get_batch_loss_metrics", "get_batch_metrics", "concatenated_forward"):
        model, inputs = calls[0][:2]
        assert model is trainer.model
        assert all(isinstance(value, torch.Tensor | bool) for value in inputs.values())


def test_the_loss_of_dpo_is_that_of_an_overridden_dpo_loss(tmp_path: Path) -> None:
    class Own(DPOTrainer):
        def dpo_loss(self, chosen: Any, rejected: Any, *references: Any, **_: Any) -> Any:
            assert [each.shape for each in references] == [chosen.shape] * 2
            return 0 * chosen + 7.0, chosen.detach(), rejected.detach()

    trainer = made(Own, tmp_path)
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["loss"] == 7.0
    assert line["rewards/chosen"] == pytest.approx(line["logps/chosen"])


def test_a_column_that_batches_lack_is_told(tmp_path: Path) -> None:
    class Weighted(DPOTrainer):
        def get_batch_loss_metrics(self, model: Any, batch: Any, train_eval: Any = "train") -> Any:
            loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
            return (loss * batch["weight"]).mean(), metrics

    trainer = made(Weighted, tmp_path, train_dataset=[{**pair, "weight": 2.0} for pair in PAIRS])
    with pytest.raises(ConfigError, match=r"a batch has no 'weight'; it has chosen_input_ids, .* decode its ids"):
        trainer.train()


def test_log_of_a_subclass_gets_and_changes_what_is_logged(tmp_path: Path) -> None:
    class Own(SFTTrainer):
        def log(self, logs: Any) -> None:
            super().log({**logs, "perplexity": 2.0} if "loss" in logs else logs)

    trainer = made(Own, tmp_path)
    trainer.train()
    assert [line["perplexity"] for line in trainer.state.log_history if "loss" in line] == [2.0, 2.0]
    assert trainer.trainer.history["perplexity"] == {1: 2.0, 2: 2.0}


def test_trackers_get_what_log_gives_by_the_names_of_transformers(tmp_path: Path) -> None:
    class Own(DPOTrainer):
        def log(self, logs: Any) -> None:
            super().log({name: value for name, value in logs.items() if name != "grad_norm"} | {"own": 1.0})

    changes = {"report_to": "tensorboard", "eval_strategy": "steps", "eval_steps": 2}
    trainer = made(Own, tmp_path, changes)
    trainer.train()
    events = event_accumulator.EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    events.Reload()
    found = {*events.Tags()["scalars"]}
    assert {"train/loss", "train/rewards/accuracies", "train/own", "eval/loss", "eval/rewards/accuracies"} <= found
    assert "train/grad_norm" not in found
    assert [each.step for each in events.Scalars("train/loss")] == [1, 2]
    assert trainer.trainer.config.train.trackers == []
    trainer = made(DPOTrainer, tmp_path / "ours", changes, log_names="trainkit")
    trainer.train()
    events = event_accumulator.EventAccumulator(str(next((tmp_path / "ours").rglob("events.out*")).parent))
    events.Reload()
    found = {*events.Tags()["scalars"]}
    assert {"loss/total", "train/grad_norm", "eval/loss/total"} <= found
    assert "train/loss" not in found
    with pytest.raises(ConfigError, match="log_names should be 'trl' or 'trainkit'; given 'trlx'"):
        made(DPOTrainer, tmp_path, log_names="trlx")


def test_optimizer_and_schedule_of_a_subclass_are_stepped(tmp_path: Path) -> None:
    class Own(DPOTrainer):
        def create_optimizer(self) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            assert num_training_steps == 2
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    trainer = made(Own, tmp_path)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.5, 0.25]


def test_what_a_subclass_changes_of_the_usual_optimizer_counts(tmp_path: Path) -> None:
    class Own(SFTTrainer):
        def create_optimizer(self) -> Any:
            made = super().create_optimizer()
            made.param_groups[0]["lr"] = 0.25
            return made

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return super().create_scheduler(num_training_steps, optimizer)

    trainer = made(Own, tmp_path)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.25, 0.125]


def test_evaluate_of_a_subclass_is_that_of_the_run(tmp_path: Path) -> None:
    class Own(SFTTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().evaluate(*args, **kwargs), "eval_own": 5.0}

    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "own"}
    trainer = made(Own, tmp_path, changes)
    trainer.train()
    assert trainer.trainer.progress.best == 5.0
    assert trainer.evaluate()["eval_own"] == 5.0


def test_every_checkpoint_has_a_model_that_save_model_writes(tmp_path: Path) -> None:
    written = []

    class Own(SFTTrainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            written.append((Path(output_dir).name, _internal_call))
            super().save_model(output_dir, _internal_call)

    trainer = made(Own, tmp_path, {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2})
    trainer.train()
    assert written == [("checkpoint-1", True), ("checkpoint-2", True), ("checkpoint-3", True)]
    assert sorted(each.name for each in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out/checkpoint-3")
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight)
    resumed = made(SFTTrainer, tmp_path, {"max_steps": 3, "save_strategy": "steps", "save_steps": 1})
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert torch.equal(loaded.lm_head.weight, resumed.model.lm_head.weight)


REFUSED = [
    "visualize_samples", "_trl_activate_neftune", "prepare_model_inputs", "training_step", "evaluation_loop",
    "prediction_loop", "_save_checkpoint", "_save", "get_train_dataloader",
    "get_eval_dataloader", "get_test_dataloader", "data_collator", "create_optimizer_and_scheduler", "_prepare_inputs",
    "_inner_training_loop", "_maybe_log_save_evaluate", "_get_train_sampler", "num_examples", "floating_point_ops",
    "hyperparameter_search", "call_model_init",
]  # fmt: skip


@table(
    "base, name",
    [
        *((base, name) for base in EVERY for name in REFUSED),
        *((base, "tokenize_row") for base in (DPOTrainer, ORPOTrainer, CPOTrainer, KTOTrainer)),
        *((DPOTrainer, name) for name in ("compute_reference_log_probs", "get_batch_samples", "null_ref_context")),
        *((KTOTrainer, name) for name in ("compute_loss", "kto_loss", "forward", "compute_reference_log_probs")),
    ],
)
def test_methods_that_are_not_called_are_refused_with_the_class(base: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Own overrides {name}, which trainkit does not call; \w+"):
        type("Own", (base,), {name: lambda self: None, "__module__": __name__})


@table("name", ["train", "predict", "push_to_hub", "save_metrics", "log_metrics", "helper"])
def test_methods_that_scripts_call_may_be_overridden(name: str) -> None:
    type("Own", (RewardTrainer,), {name: lambda self: None, "__module__": __name__})


@table(
    "given, words",
    [({"packing": True}, "compute_loss, and method.packing"), ({"neftune_noise_alpha": 5.0}, "method.neftune_alpha")],
)
def test_what_a_loss_of_ones_own_would_lose_is_refused(given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        made(tripled(SFTTrainer), tmp_path, **given)


def test_arguments_that_change_after_they_were_read_are_refused(tmp_path: Path) -> None:
    trainer = made(DPOTrainer, tmp_path)
    assert trainer.args.device.type == "cpu", "what transformers adds by itself is no change"
    trainer.args.learning_rate = 3.0
    with pytest.raises(ConfigError, match=r"args.learning_rate was 0.01 when DPOTrainer was made, .* and is 3.0; set"):
        trainer.train()


def test_settings_that_change_after_they_were_read_are_refused(tmp_path: Path) -> None:
    ppo, ddpo = of_any_class(PPOTrainer, tmp_path), of_any_class(DDPOTrainer, tmp_path)
    iterative = of_any_class(IterativeSFTTrainer, tmp_path)
    ppo.config.cliprange, ddpo.config.train_learning_rate, iterative.args.weight_decay = 0.5, 1.0, 0.5
    tokens = [torch.tensor([1, 2])] * 2
    with pytest.raises(ConfigError, match=r"config.cliprange was 0.2 when PPOTrainer was made, .* and is 0.5; set it"):
        ppo.step(tokens, tokens, [torch.tensor(1.0)] * 2)
    with pytest.raises(ConfigError, match=r"config.train_learning_rate was 0.0003 when DDPOTrainer was made"):
        ddpo.train()
    with pytest.raises(ConfigError, match=r"args.weight_decay was 0.0 when IterativeSFTTrainer was made"):
        iterative.step(texts=["ab"])
    ddpo.config.train_learning_rate, ddpo.config.num_epochs = 3e-4, 1
    ddpo.train()
    assert ddpo.trainer.progress.collection == 1


def test_a_loss_of_ones_own_needs_a_single_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(environ={"WORLD_SIZE": "2"})  # accelerate would wait for the second process
    monkeypatch.setattr("trainkit_trl.trainer.calling.os", seen)
    with pytest.raises(ConfigError, match="overrides compute_loss, which is called in a single process alone"):
        made(tripled(DPOTrainer), tmp_path)


def test_several_sets_of_held_out_samples_are_measured_by_their_names(tmp_path: Path) -> None:
    sets = {"one": PAIRS.select(range(2)), "two": PAIRS.select(range(1, 4))}
    changes = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "two_loss", "save_strategy": "best"}
    trainer = made(DPOTrainer, tmp_path, changes, eval_dataset=sets)
    trainer.train()
    found = trainer.evaluate()
    assert trainer.trainer.progress.best == pytest.approx(-found["eval_two_loss"])
    for name, dataset in sets.items():
        alone = trainer.evaluate(dataset, metric_key_prefix="own")
        assert alone["own_loss"] == pytest.approx(found[f"eval_{name}_loss"])
        assert f"eval_{name}_rewards/accuracies" in found
    lines = trainer.state.log_history
    end = next(at for at, line in enumerate(lines) if "train_loss" in line)
    kept = [{name for name in line if name.endswith("loss")} for line in lines[:end]]
    assert kept[-3:] == [{"loss"}, {"eval_one_loss"}, {"eval_two_loss"}], "each is an entry of its own"
    assert [line["epoch"] for line in lines[:end] if "loss" in line] == [0.5, 1.0]  # 4 of 8 pairs each
    assert trainer.evaluate(sets)["eval_one_loss"] == pytest.approx(found["eval_one_loss"])


@table("returned, words", [(None, "it returned None"), (torch.ones(4), r"it returned a tensor of shape \(4,\)")])
def test_a_loss_that_is_no_number_is_told(returned: Any, words: str, tmp_path: Path) -> None:
    cls = type("Own", (SFTTrainer,), {"compute_loss": lambda *_: returned, "__module__": __name__})
    with pytest.raises(ConfigError, match=f"the loss of Own should be a tensor with one number; {words}"):
        made(cls, tmp_path).train()


def test_a_method_that_is_set_after_the_trainer_is_made_is_refused(tmp_path: Path) -> None:
    trainer = made(DPOTrainer, tmp_path)
    with pytest.raises(ConfigError, match="compute_loss is read when DPOTrainer is made; override it in a subclass"):
        trainer.compute_loss = print
    with pytest.raises(ConfigError, match="DPOTrainer overrides training_step, which trainkit does not call"):
        trainer.training_step = print


def test_a_method_that_is_set_on_the_class_is_called_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, usual = list[str](), DPOTrainer.dpo_loss

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        calls.append("dpo_loss")
        return usual(self, *given, **named)

    monkeypatch.setattr(DPOTrainer, "dpo_loss", counted)
    made(DPOTrainer, tmp_path).train()
    assert len(calls) >= 2
    monkeypatch.setattr(PPOTrainer, "_kl_penalty", staticmethod(counted))
    assert of_any_class(PPOTrainer, tmp_path).overrides("_kl_penalty")
    monkeypatch.setattr(DPOTrainer, "tokenize_row", print, raising=False)
    with pytest.raises(ConfigError, match="DPOTrainer overrides tokenize_row, which trainkit does not call; trainkit"):
        made(DPOTrainer, tmp_path)


def test_iterative_training_calls_compute_loss(tmp_path: Path) -> None:
    class Own(IterativeSFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            return 0 * super().compute_loss(model, inputs) + 5

    tokenizer = character_tokenizer("abcdefgh")
    size = len(tokenizer)
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=size))
    trainer = Own(model, TrainingArguments(str(tmp_path), max_steps=2, report_to="none"), tokenizer)
    assert trainer.step(texts=["ab"] * 4)["loss/total"] == 5


# ------------------------------------------------------------------------------------------------------- attributes

TRAINER = """
accelerator add_callback args callback_handler can_return_loss compute_metrics compute_objective control current_flos
call_model_init create_model_card data_collator deepspeed eval_dataset evaluate floating_point_ops
get_optimizer_cls_and_kwargs hp_name hp_search_backend hp_space hub_model_id hyperparameter_search init_hf_repo
is_deepspeed_enabled is_fsdp_enabled is_fsdp_xla_enabled is_in_train is_local_process_zero is_model_parallel
is_world_process_zero label_names label_smoother lr_scheduler metrics_format model model_init model_wrapped num_examples
neftune_hook_handle objective optimizer place_model_on_device pop_callback predict preprocess_logits_for_metrics
push_in_progress remove_callback state store_flos tokenizer train_dataset
"""
"""Public attributes that transformers' Trainer sets, and methods that no trainer of TRL overrides."""
OF_PAIRS = """beta generate_during_eval is_encoder_decoder label_pad_token_id max_length max_prompt_length padding_value
truncation_mode use_dpo_data_collator """
OF_ADAPTERS = "is_peft_model model_adapter_name precompute_ref_log_probs ref_adapter_name ref_model "
OWN = {
    SFTTrainer: "dataset_batch_size dataset_num_proc neftune_noise_alpha",
    RewardTrainer: "use_reward_data_collator",
    DPOTrainer: OF_PAIRS + OF_ADAPTERS + "dataset_num_proc label_smoothing loss_type max_target_length reference_free",
    KTOTrainer: OF_PAIRS + OF_ADAPTERS + "desirable_weight max_completion_length undesirable_weight",
    CPOTrainer: OF_PAIRS + "decoder_start_token_id label_smoothing loss_type max_target_length pad_token_id",
    ORPOTrainer: OF_PAIRS + "decoder_start_token_id max_completion_length pad_token_id",
    IterativeSFTTrainer: "is_encoder_decoder is_peft_model max_length optimize_device_cache truncation_mode",
    PPOTrainer: """accelerator config current_device data_collator dataloader dataset is_distributed is_encoder_decoder
        is_peft_model kl_ctl lr_scheduler model model_params optimizer optional_peft_ctx ref_model running tokenizer""",
    DDPOTrainer: """accelerator autocast config first_epoch image_samples_callback num_train_timesteps optimizer
        prompt_fn reward_fn sd_pipeline stat_tracker""",
}
"""Public attributes that trainers of TRL 0.7.2 and 0.8.6 set, besides those of transformers."""
LACKING = {
    IterativeSFTTrainer: "tr_loss " + TRAINER,
    PPOTrainer: "compare_step current_step highest_reward is_using_text_environment push_to_hub_kwargs",
    DDPOTrainer: "executor neg_prompt_embed trainable_layers",
}
"""Further ones, which trainkit need not have; by default those of transformers."""
READ = {
    PPOTrainer: {"dataloader", "kl_ctl"},
    DDPOTrainer: {"first_epoch", "image_samples_callback", "prompt_fn", "reward_fn"},
}
"""Attributes that count when they are set."""


def of_any_class(cls: Any, tmp_path: Path) -> Any:
    if cls in EVERY:
        return made(cls, tmp_path)
    set_seed(0)
    tokenizer = character_tokenizer("abcdefgh")
    if cls is DDPOTrainer:
        config = DDPOConfig(sample_num_steps=4, mixed_precision="no", logdir=str(tmp_path), save_freq=0)
        pixels = PixelPipeline({"image_size": 8, "width": 8, "prompts": ["cat"]})
        return cls(config, lambda images, *_: (images.flatten(1).mean(1), {}), lambda: ("cat", {}), pixels)
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=len(tokenizer)))
    if cls is IterativeSFTTrainer:
        return cls(model, TrainingArguments(str(tmp_path), max_steps=2, report_to="none"), tokenizer)
    config = PPOConfig(batch_size=2, mini_batch_size=2, project_kwargs={"project_dir": str(tmp_path / "ppo")})
    return cls(config, AutoModelForCausalLMWithValueHead.from_pretrained(model), None, tokenizer, dataset=[0, 1])


@table("cls", [*OWN])
def test_every_attribute_is_there_or_says_what_to_use_and_is_used_or_refused_where_it_is_set(
    cls: Any, tmp_path: Path
) -> None:
    trainer, said, taken = of_any_class(cls, tmp_path), dict[str, str](), set[str]()
    for name in (OWN[cls] + " " + LACKING.get(cls, TRAINER)).split():
        try:
            getattr(trainer, name)
        except AttributeError as error:
            said[name] = str(error)
        try:
            setattr(trainer, name, getattr(trainer, name, None))
            taken.add(name)
        except ConfigError:
            pass
    assert not said.keys() & OWN[cls].split()
    unheard = [name for name, text in said.items() if "it has" in text or "did you mean" in text]
    assert unheard == [], "what is said of names that nobody has heard of"
    methods = {name for name in taken if callable(getattr(cls, name, None))}
    assert taken - methods == READ.get(cls, set())


def test_attributes_of_arguments_are_what_the_trainer_made_of_them(tmp_path: Path) -> None:
    trainer = made(DPOTrainer, tmp_path, max_length=20, precompute_ref_log_probs=True)
    found = (trainer.max_length, trainer.max_prompt_length, trainer.padding_value, trainer.is_peft_model)
    assert found == (20, 128, trainer.tokenizer.pad_token_id, False)
    assert trainer.precompute_ref_log_probs
    assert not trainer.is_encoder_decoder
    for name in ("max_length", "args", "train_dataset"):
        with pytest.raises(ConfigError, match=f"{name} is read when DPOTrainer is made; give it to the constructor"):
            setattr(trainer, name, None)
    with pytest.raises(ConfigError, match="model of DPOTrainer cannot be set; give its constructor what it is made of"):
        trainer.model = None
    with pytest.raises(ConfigError, match="label_names of DPOTrainer would not be used; the loss and the metrics are"):
        trainer.label_names = []
    with pytest.raises(ConfigError, match="optimizer of DPOTrainer would not be used; give optimizers, or override"):
        trainer.create_optimizer()


class Counting:
    """Counts optimizer steps."""

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def on_step(self) -> None:
        self.steps += 1


def test_callbacks_that_are_added_are_called_and_those_removed_are_not(tmp_path: Path) -> None:
    kept, removed = Counting(), Counting()
    trainer = made(SFTTrainer, tmp_path, callbacks=[removed])
    assert trainer.pop_callback(Counting) is removed
    assert trainer.pop_callback(Counting) is None
    trainer.add_callback(Counting)
    trainer.remove_callback(Counting)
    trainer.add_callback(kept)
    trainer.train()
    assert (kept.steps, removed.steps) == (2, 0)
    with pytest.raises(ConfigError, match="callbacks of transformers are not called; give objects with methods"):
        trainer.add_callback(TrainerCallback())
    with pytest.raises(PluginError, match="callback object implements no hook"):
        trainer.add_callback(object())
