"""DDPO: a script in the manner of TRL's example, in which only the word in front of its imports differs."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator

from tables import table
from trainkit.errors import ConfigError, DataError, RewardError
from trainkit_ddpo import PixelPipeline
from trainkit_migrate import framework, translate
from trainkit_trl import (
    DDPOConfig,
    DDPOStableDiffusionPipeline,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
    set_seed,
)
from trainkit_trl.trainer.utils import PerPromptStatTracker

ANIMALS = ["cat", "dog"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pixels() -> PixelPipeline:
    """Return a small model of images of 8 × 8."""
    torch.manual_seed(0)
    return PixelPipeline({"image_size": 8, "width": 8, "prompts": ANIMALS})


def settings(tmp_path: Path, **changes: Any) -> DDPOConfig:
    """Return settings for 4 steps, of which the last adds no noise, and 2 × 4 images an epoch."""
    usual = {
        "mixed_precision": "no", "sample_num_steps": 4, "sample_batch_size": 4, "train_batch_size": 4,
        "train_learning_rate": 1e-3, "logdir": str(tmp_path), "run_name": "run",
    }  # fmt: skip
    return DDPOConfig(**{**usual, **changes})


def brightness(images: Any, prompts: Any, metadata: Any) -> Any:
    return images.flatten(1).mean(1), {"scored": len(prompts)}


def animal() -> tuple[str, dict[str, Any]]:
    return random.choice(ANIMALS), {"legs": 4}


def made(tmp_path: Path, hook: Any = None, reward: Any = brightness, model: Any = None, **changes: Any) -> DDPOTrainer:
    return DDPOTrainer(settings(tmp_path, **changes), reward, animal, model or pixels(), image_samples_hook=hook)


# ------------------------------------------------------------------------------------------------------- the script


@pytest.mark.slow
def test_a_script_in_the_manner_of_trls_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    set_seed(0)
    shown: list[Any] = []

    def prompt_fn() -> tuple[str, dict[str, Any]]:
        return np.random.choice(ANIMALS), {}

    def scorer() -> Any:
        def _fn(images: Any, prompts: Any, metadata: Any) -> Any:
            return images.flatten(1).mean(1), {}

        return _fn

    def image_outputs_logger(image_data: Any, global_step: int, accelerate_logger: Any) -> None:
        result = {}
        images, prompts, _, rewards, _ = image_data[-1]
        for i, image in enumerate(images):
            prompt = prompts[i]
            reward = rewards[i].item()
            result[f"{prompt:.25} | {reward:.2f}"] = image.unsqueeze(0)
        accelerate_logger.log_images(result, step=global_step)
        shown.append((global_step, sum(rewards.tolist()) / len(rewards)))

    config = DDPOConfig(
        num_epochs=10,
        mixed_precision="no",
        train_gradient_accumulation_steps=1,
        sample_num_steps=5,
        sample_guidance_scale=1.5,
        sample_batch_size=8,
        train_batch_size=8,
        sample_num_batches_per_epoch=2,
        train_learning_rate=2e-3,
        train_clip_range=1e-2,
        per_prompt_stat_tracking=True,
        per_prompt_stat_tracking_buffer_size=32,
        tracker_project_name="stable_diffusion_training",
        log_with="tensorboard",
        project_kwargs={"automatic_checkpoint_naming": True, "total_limit": 2, "project_dir": "./save"},
    )
    pipeline = pixels()
    trainer = DDPOTrainer(config, scorer(), prompt_fn, pipeline, image_samples_hook=image_outputs_logger)
    trainer.train()
    assert [step for step, _ in shown] == list(range(0, 20, 2))
    assert shown[-1][1] > shown[0][1] + 0.15
    saved = sorted(path.name for path in Path("save/checkpoints").iterdir())
    assert saved == ["step_00000018", "step_00000020"], "of every epoch but the first, the last two"
    assert len({*trainer.stat_tracker.rewards}) == 2
    events = event_accumulator.EventAccumulator(str(next(Path("save/tensorboard").rglob("events.out*")).parent))
    events.Reload()
    scalars = {*events.Tags()["scalars"]}
    assert {"reward_mean", "reward_std", "approx_kl", "clipfrac", "loss", "epoch"} == scalars
    trainer.save_pretrained("tuned")
    again = PixelPipeline.from_pretrained("tuned")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), pipeline.parameters(), strict=True))


@pytest.mark.slow
def test_epochs_are_collections_and_a_run_resumes_with_the_next(tmp_path: Path) -> None:
    straight = made(tmp_path / "a", save_freq=2, sample_num_steps=2)
    straight.train(4)
    assert straight.first_epoch == 0
    assert straight.trainer.progress.collection == 4
    stopped = made(tmp_path / "b", save_freq=2, sample_num_steps=2)
    stopped.train(3)  # saved after the epochs 2
    del stopped  # it locks its directory
    resumed = made(tmp_path / "b", resume_from=str(tmp_path / "b" / "run" / "checkpoints"), sample_num_steps=2)
    assert resumed.first_epoch == 3
    random.seed(0)
    [animal() for _ in range(3 * 8)]
    resumed.train(4)
    assert resumed.trainer.progress.step == straight.trainer.progress.step == 8
    ours, theirs = (each.trainer.unwrapped.state_dict() for each in (resumed, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_step_returns_the_steps_so_far_and_the_hook_gets_what_was_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def hook(data: Any, step: int, tracker: Any) -> None:
        seen.append((data, step))
        tracker.log_images({"x": data[0][0]}, step=step)
        tracker.log({"mine": 1.0}, step=step)

    trainer = made(tmp_path, hook, train_num_inner_epochs=2)
    assert trainer.step(0, 7) == 7 + 2 * 2
    assert trainer.step(1, 11) == 15
    [(data, first), (_, second)] = seen
    assert (first, second, len(data)) == (7, 11, 2)
    images, prompts, metadata, rewards, told = data[0]
    assert images.shape == (4, 1, 8, 8)
    assert torch.equal(rewards, images.flatten(1).mean(1))
    assert {*prompts} <= {*ANIMALS}
    assert metadata == ({"legs": 4},) * 4
    assert told == {"scored": 4}
    assert caplog.text.count("log_with is not set") == 1
    # 8 images of 3 steps that add noise; a step has 4 images
    assert trainer.trainer.config.train.batch_size == 12
    assert trainer.num_train_timesteps == 3


def test_rewards_that_are_computed_in_threads_stay_with_their_images(tmp_path: Path) -> None:
    """The first of two batches is scored last."""
    calls: list[int] = []

    def slow(images: Any, prompts: Any, metadata: Any) -> Any:
        calls.append(len(calls))
        mine = calls[-1]
        time.sleep(0.2 if mine == 0 else 0.0)
        return images.flatten(1).mean(1), mine

    seen: list[Any] = []
    trainer = made(tmp_path, lambda data, *_: seen.extend(data), slow, async_reward_computation=True, max_workers=2)
    assert trainer.trainer.method.reward_workers == 2
    trainer.step(0, 0)
    assert all(torch.equal(rewards, images.flatten(1).mean(1)) for images, _, _, rewards, _ in seen)
    assert [told for *_, told in seen] == [0, 1]
    rewards, told = trainer.compute_rewards([[torch.ones(2, 1, 8, 8), ("cat", "dog"), ({}, {})]] * 2, is_async=True)
    assert torch.equal(torch.stack(rewards), torch.ones(2, 2))
    assert len(told) == 2


# -------------------------------------------------------------------------------------------------------- the numbers


def test_the_loss_is_the_clipped_surrogate(tmp_path: Path) -> None:
    """max(−A ρ, −A clip(ρ, 1 ± 0.1)): 1; −2.2 beside −2.4; 0.9 beside 0.5; of three a third of −0.3."""
    trainer = made(tmp_path)
    assert trainer.loss(torch.tensor([-1.0]), 1e-4, torch.tensor([1.0])).item() == 1.0
    advantages, ratio = torch.tensor([-1.0, 2.0, -1.0]).double(), torch.tensor([1.0, 1.2, 0.5]).double()
    assert trainer.loss(advantages, 0.1, ratio).item() == pytest.approx((1.0 - 2.2 + 0.9) / 3, abs=1e-12)


def test_the_loss_of_steps_is_that_of_training(tmp_path: Path) -> None:
    """Before an update ρ = 1, so the loss is minus the mean of the clipped advantages."""
    trainer = made(tmp_path, train_adv_clip_max=1.0, sample_guidance_scale=2.0)
    own, policy = trainer.trainer, trainer.trainer.unwrapped
    condition = policy.pipeline.encode(["cat", "dog"])
    latents, logprobs = policy.sample(condition, torch.randn(2, 5, 1, 8, 8), torch.float32)
    timesteps, embeds = policy.timesteps[[1, 1]], torch.cat([policy.pipeline.encode(["", ""]), condition])
    given = (latents[:, 1], timesteps, latents[:, 2])
    loss, approx_kl, clipfrac = trainer.calculate_loss(*given, logprobs[:, 1], torch.tensor([0.5, -3.0]), embeds)
    assert loss.item() == pytest.approx(0.25, abs=1e-5)
    assert approx_kl.item() == pytest.approx(0.0, abs=1e-9)
    assert clipfrac.item() == 0.0
    # of log ρ = 0.1 and −0.2 it is 0.5 · (0.01 + 0.04) / 2; both are outside 1 ± 1e-4
    moved = logprobs[:, 1] - torch.tensor([0.1, -0.2])
    loss, approx_kl, clipfrac = trainer.calculate_loss(*given, moved, torch.tensor([0.5, -3.0]), embeds)
    assert approx_kl.item() == pytest.approx(0.0125, abs=1e-5)
    assert clipfrac.item() == 1.0
    assert loss.item() == pytest.approx((-0.5 * 1.0001 + 0.9999) / 2, abs=1e-5)
    loss.backward()
    assert any(parameter.grad is not None for parameter in own.unwrapped.parameters())
    with pytest.raises(ValueError, match="timesteps should be among"):
        trainer.calculate_loss(latents[:, 1], timesteps + 1, latents[:, 2], logprobs[:, 1], torch.ones(2), embeds)


def test_statistics_of_prompts() -> None:
    """a: 1, 2, 4 has mean 7/3 and variance 14/9; b: 0, 1 has 0.5 and 0.25; all have 1.6 and 1.84."""
    prompts, rewards = ["a", "a", "a", "b", "b"], [1, 2, 4, 0, 1]
    of_a = [(r - 7 / 3) / (math.sqrt(14 / 9) + 1e-6) for r in (1, 2, 4)]
    tracker = PerPromptStatTracker(buffer_size=16, min_count=2)
    found = tracker.update(prompts, rewards)
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx([*of_a, -0.5 / (0.5 + 1e-6), 0.5 / (0.5 + 1e-6)], abs=1e-12)
    assert tracker.get_stats()["b"] == {"mean": 0.5, "std": 0.5, "count": 2}
    of_all = [(r - 1.6) / (math.sqrt(1.84) + 1e-6) for r in (0, 1)]
    assert PerPromptStatTracker(16, 3).update(prompts, rewards).tolist() == pytest.approx([*of_a, *of_all], abs=1e-12)


# ---------------------------------------------------------------------------------------------------- Stable Diffusion


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a Stable Diffusion of tiny configurations, with random weights: images of 8 × 8."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    library: Any = importlib.import_module("diffusers")  # which only slow tests need
    torch.manual_seed(0)
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    size = len(tokens)
    unet = library.UNet2DConditionModel(
        sample_size=4, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = library.AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8), norm_num_groups=2, sample_size=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=size - 1,
    )  # fmt: skip
    pipe = library.StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=8),
        unet=unet,
        scheduler=library.PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    path = tmp_path_factory.mktemp("sd")
    pipe.save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("use_lora", [True, False])
def test_a_pipeline_of_diffusers_is_trained(stable_diffusion: str, use_lora: bool, tmp_path: Path) -> None:
    pipeline = DefaultDDPOStableDiffusionPipeline(stable_diffusion, use_lora=use_lora)
    assert not pipeline.scheduler.config.clip_sample, "latents are not clipped"
    pipeline.set_progress_bar_config(disable=True)
    before = {name: value.clone() for name, value in pipeline.unet.state_dict().items()}
    trainer = made(tmp_path, model=pipeline, sample_guidance_scale=2.0)
    assert trainer.trainer.steps_per_image == 4
    trainer.train(2)
    after = {name.replace("base_layer.", ""): value for name, value in pipeline.unet.state_dict().items()}
    moved = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert all("lora_" in name for name in moved) == use_lora
    pipeline.save_pretrained(str(tmp_path / "tuned"))
    loaded = DefaultDDPOStableDiffusionPipeline(str(tmp_path / "tuned"), use_lora=use_lora)
    loaded.set_progress_bar_config(disable=True)
    made_by = [
        each("cat", num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="pt")
        for each in (pipeline, loaded)
    ]
    torch.testing.assert_close(made_by[0].images, made_by[1].images, atol=1e-4, rtol=0)
    assert len(made_by[0].latents) == 3


@pytest.mark.slow
def test_lora_weights_beside_a_model_of_trl_are_merged(stable_diffusion: str, tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    library: Any = importlib.import_module("diffusers")
    pipe = library.StableDiffusionPipeline.from_pretrained(stable_diffusion, safety_checker=None)
    pipe.save_pretrained(tmp_path / "trl")
    pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, target_modules=["to_q"]))
    pipe.save_lora_weights(tmp_path / "trl", unet_lora_layers=get_peft_model_state_dict(pipe.unet))
    loaded = DefaultDDPOStableDiffusionPipeline(str(tmp_path / "trl"))
    x, at, condition = torch.randn(1, 4, 4, 4), torch.tensor([5]), torch.randn(1, 8, 16)
    found = [each.unet(x, at, encoder_hidden_states=condition).sample for each in (pipe, loaded)]
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)
    assert not [name for name, _ in loaded.unet.named_parameters() if "lora_" in name]


@pytest.mark.slow
def test_a_loss_that_steps_with_the_scheduler_trains_the_same(stable_diffusion: str, tmp_path: Path) -> None:
    """It is that of TRL, written with the parts of the pipeline."""

    class Own(DDPOTrainer):
        def calculate_loss(
            self, latents: Any, timesteps: Any, next_latents: Any, log_probs: Any, advantages: Any, embeds: Any
        ) -> Any:
            with self.autocast():
                noise = self.sd_pipeline.unet(torch.cat([latents] * 2), torch.cat([timesteps] * 2), embeds).sample
            away, towards = noise.chunk(2)
            noise = away + self.config.sample_guidance_scale * (towards - away)
            step = self.sd_pipeline.scheduler_step(noise, timesteps, latents, eta=1.0, prev_sample=next_latents)
            ratio = torch.exp(step.log_probs - log_probs)
            return self.loss(advantages, self.config.train_clip_range, ratio), torch.zeros(()), torch.zeros(())

    found = []
    for cls in (Own, DDPOTrainer):
        pipeline = DefaultDDPOStableDiffusionPipeline(stable_diffusion, use_lora=False)
        trainer = cls(settings(tmp_path / cls.__name__, sample_guidance_scale=2.0), brightness, animal, pipeline)
        trainer.step(0, 0)
        found.append([each.detach().clone() for each in pipeline.unet.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    latents, first = torch.ones(2, 4, 4, 4), pipeline.scheduler.timesteps[[0, 0]]
    step = pipeline.scheduler_step(latents, first, latents, 1.0)
    assert (step.latents.shape, step.log_probs.shape) == ((2, 4, 4, 4), (2,))
    with pytest.raises(ValueError, match="timestep should be among"):
        pipeline.scheduler_step(latents, first + 1, latents, 1.0)


def test_without_diffusers_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install 'trainkit-ddpo\[diffusers\]'; .*PixelPipeline"):
        DefaultDDPOStableDiffusionPipeline("x")


# --------------------------------------------------------------------------------------------------- settings, refusals


def test_every_setting_of_ddpo_has_a_place() -> None:
    told = {path.partition(".")[2] for path in framework("trl").settings if path.startswith("DDPOConfig.")}
    assert told == {field.name for field in dataclasses.fields(DDPOConfig)}


def test_settings_are_translated(tmp_path: Path) -> None:
    trainer = made(
        tmp_path, seed=3, num_epochs=7, num_checkpoint_limit=4, train_gradient_accumulation_steps=2,
        sample_num_batches_per_epoch=4, train_adam_beta2=0.95, train_adam_weight_decay=0.0, train_max_grad_norm=0.5,
        train_num_inner_epochs=2, train_timestep_fraction=0.5, per_prompt_stat_tracking=True, train_adv_clip_max=3.0,
        per_prompt_stat_tracking_min_count=2, negative_prompts="cat", sample_eta=0.5, train_clip_range=0.2,
        tracker_project_name="p", log_with=None, save_freq=3,
    )  # fmt: skip
    config = trainer.trainer.config
    method, train = config.method, config.train
    assert (method.num_steps, method.eta, method.guidance_scale, method.negative_prompt) == (4, 0.5, 5.0, "cat")
    assert (method.ddpo_epochs, method.cliprange, method.adv_clip_max) == (2, 0.2, 3.0)
    assert (method.buffer_size, method.min_count, method.timestep_fraction) == (16, 2, 0.5)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw", 1e-3, 0.0)
    assert config.optimizer.kwargs == {"betas": [0.9, 0.95], "eps": 1e-8}
    assert (train.seed, train.max_grad_norm, train.keep_checkpoints, train.trackers) == (3, 0.5, 4, [])
    assert train.run_dir == str(tmp_path / "run")
    # 16 images; 8 of 2 steps in a step; 2 steps and 2 passes an epoch
    assert (config.rollout.num_rollouts, config.rollout.batch_size) == (16, 4)
    assert (train.batch_size, train.microbatch_size, train.total_steps, train.save_interval) == (16, 4, 28, 12)
    assert made(tmp_path / "b").trainer.method.buffer_size == 0


@table(
    "changes, error, words",
    [
        ({"train_cfg": False}, ConfigError, "guidance is the same in training and sampling"),
        ({"train_use_8bit_adam": True}, ConfigError, "write False; trainkit.train takes an optimizer"),
        ({"log_with": "wandb", "tracker_kwargs": {"wandb": {"mode": 1}}}, ConfigError, r"mode: should be 'online'"),
        ({"project_kwargs": {"iteration": 3}}, ConfigError, "given iteration; checkpoints of trainkit are numbered"),
        ({"resume_from": "save/checkpoint_3"}, ConfigError, "checkpoints of accelerate are not read"),
        ({"log_with": "comet_ml"}, ConfigError, "TRL has wandb and tensorboard"),
        ({"mixed_precision": "fp8"}, ConfigError, "write bf16"),
        ({"sample_eta": 0.0}, ConfigError, r"method\.eta"),
        ({"resume_from": "nowhere"}, ValueError, "'nowhere', where there is no checkpoint of a run of trainkit"),
        ({"train_batch_size": 3}, ValueError, "the 8 images of a collection .* should be a multiple of the 3"),
    ],
)
def test_settings_without_counterpart_are_refused(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words) as caught:
        made(tmp_path, **changes)
    assert str(caught.value).count("DDPOConfig.") <= 1


def test_guidance_may_be_off_in_training_where_it_is_off_in_sampling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert made(tmp_path, train_cfg=False, sample_guidance_scale=0.5).trainer.method.guidance_scale == 1.0
    assert "sample_guidance_scale: guidance is off in sampling and training" in caplog.text


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    config, model = settings(tmp_path), pixels()
    with pytest.raises(ValueError, match="config should be a DDPOConfig; given dict"):
        DDPOTrainer({}, brightness, animal, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reward_function should be a function; given NoneType"):
        DDPOTrainer(config, None, animal, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompt_function is called without arguments, which it does not take"):
        DDPOTrainer(config, brightness, lambda step: ("cat", {}), model)  # type: ignore[arg-type, misc]
    with pytest.raises(ConfigError, match="DDPOTrainer takes no prompts"):
        DDPOTrainer(config, brightness, animal, model, prompts=["cat"])
    with pytest.raises(ConfigError, match="num_epochs of DDPOConfig should be an integer; given None"):
        settings(tmp_path, num_epochs=None)
    with pytest.raises(ValueError, match="train_batch_size should be 1 at least; given 0"):
        made(tmp_path, train_batch_size=0)
    trainer = made(tmp_path / "b")
    with pytest.raises(ValueError, match="epoch and global_step should be integers; given None and 0"):
        trainer.step(None, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epochs should be an integer or None; given 'a'"):
        trainer.train("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a batch is a list of images, prompts and metadata; given 1"):
        trainer.compute_rewards([1])
    with pytest.raises(ValueError, match="pretrained_model_name should be a hub id or a directory; given None"):
        DefaultDDPOStableDiffusionPipeline(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="image_samples_hook should be a function"):
        DDPOTrainer(config, brightness, animal, model, image_samples_hook="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"subclass of trainkit_ddpo\.ImagePipeline"):
        DDPOTrainer(config, brightness, animal, DDPOStableDiffusionPipeline())
    sampling = {"sd_pipeline": model, "scheduler_step": lambda self: None, "__call__": lambda self: None}
    own = type("Own", (DDPOStableDiffusionPipeline,), {**sampling, "__module__": __name__})
    with pytest.raises(ConfigError, match=r"Own overrides __call__, scheduler_step, which trainkit does not call; "):
        DDPOTrainer(config, brightness, animal, own())
    with pytest.raises(ConfigError, match=r"ddpo trains a trainkit_ddpo\.ImagePipeline or a StableDiffusionPipeline"):
        DDPOTrainer(config, brightness, animal, SimpleNamespace())
    with pytest.raises(ValueError, match="prompt_function should return a prompt and its metadata; it returned 'cat'"):
        DDPOTrainer(config, brightness, lambda: "cat", model).step(0, 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match="the model knows 'cat', 'dog'"):
        DDPOTrainer(config, brightness, lambda: ("cow", {}), model).step(0, 0)

    def plain(images: Any, prompts: Any, metadata: Any) -> Any:
        return images.flatten(1).mean(1)

    with pytest.raises(RewardError, match=r"plain.*reward_function should return rewards and their metadata"):
        DDPOTrainer(config, plain, animal, model).step(0, 0)


def test_what_has_no_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made(tmp_path, project_kwargs={"logging_dir": "x"})
    assert "logging_dir has no effect: logs are in the directory of the run" in caplog.text
    assert translate("trl", {"DDPOConfig": dataclasses.asdict(settings(tmp_path))}).remarks == []


# ----------------------------------------------------------------------------------------------------- overriding


def weights(cls: type[DDPOTrainer], tmp_path: Path, **changes: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the weights after an epoch with a guided model, and the trainer."""
    given = {"sample_guidance_scale": 2.0, "train_clip_range": 0.1, **changes}
    trainer = cls(settings(tmp_path, **given), brightness, animal, pixels())
    trainer.step(0, 0)
    return [each.detach().clone() for each in trainer.sd_pipeline.parameters()], trainer


@table("name", ["loss", "calculate_loss", "compute_rewards", "_setup_optimizer"])
def test_a_method_that_calls_that_of_trl_trains_the_same(name: str, tmp_path: Path) -> None:
    calls: list[Any] = []

    def method(self: Any, *given: Any, **named: Any) -> Any:
        calls.append((given, named))
        return getattr(DDPOTrainer, name)(self, *given, **named)

    cls = type("Own", (DDPOTrainer,), {name: method})
    mine, _ = weights(cls, tmp_path / name)
    theirs, _ = weights(DDPOTrainer, tmp_path / f"{name}-usual")
    atol = 1e-4 if name == "_setup_optimizer" else 1e-6  # its AdamW is not fused, and rounds differently
    assert all(torch.allclose(a, b, atol=atol) for a, b in zip(mine, theirs, strict=True))
    given, named = calls[0]
    if name == "compute_rewards":
        assert len(calls) == 1
        assert [(images.shape[0], len(prompts), len(metadata)) for images, prompts, metadata in given[0]] == [
            (4,) * 3
        ] * 2
        assert named == {"is_async": False}
    if name == "calculate_loss":
        assert [each.shape[0] for each in given] == [4, 4, 4, 4, 4, 8]


def test_what_methods_return_is_trained_on(tmp_path: Path) -> None:
    class Own(DDPOTrainer):
        def loss(self, advantages: Any, clip_range: float, ratio: Any) -> Any:
            return super().loss(advantages, clip_range, ratio) * 0

        def compute_rewards(self, prompt_image_pairs: Any, is_async: bool = False) -> Any:
            return zip(*[(torch.arange(4), "mine") for _ in prompt_image_pairs], strict=True)

        def _setup_optimizer(self, trainable_layers_parameters: Any) -> Any:
            return torch.optim.SGD(trainable_layers_parameters, lr=0.5)

    seen: list[Any] = []
    found, trainer = weights(Own, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, pixels().parameters(), strict=True))
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    trainer.image_samples_callback = lambda data, *_: seen.extend(data)
    trainer.step(1, 2)
    assert [(rewards.tolist(), told) for *_, rewards, told in seen] == [([0.0, 1.0, 2.0, 3.0], "mine")] * 2
    trainer.compute_rewards = lambda pairs, is_async: ((torch.ones(3),) * 2, ((),) * 2)
    with pytest.raises(RewardError, match=r"compute_rewards should return rewards of \[4, 4\] images .* \[3, 3\]"):
        trainer.step(2, 4)
    trainer.compute_rewards = lambda pairs, is_async: ((torch.ones(4),) * 2, ((),) * 2)
    trainer.calculate_loss = lambda *_: torch.ones(())
    with pytest.raises(ConfigError, match="calculate_loss should return loss, approx_kl and clipfrac"):
        trainer.step(3, 6)


@pytest.mark.parametrize("name", sorted(DDPOTrainer.not_called))
def test_methods_that_are_not_called_cannot_be_overridden(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Own overrides {name}, which trainkit does not call; "):
        type("Own", (DDPOTrainer,), {name: lambda self: None})


def test_attributes_that_are_not_there_say_what_to_use(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    with pytest.raises(AttributeError, match=r"DDPOTrainer has no attribute 'executor': compute_rew"):
        trainer.executor  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute '_generate_samples': subclass trainkit_ddpo.ImagePipeline"):
        trainer._generate_samples()
    with pytest.raises(AttributeError, match=r"no attribute 'get_trainable_layers': its place has model.peft_config"):
        DDPOStableDiffusionPipeline().get_trainable_layers()
    assert not hasattr(trainer, "unknown")


def test_no_mixed_precision_may_be_none(tmp_path: Path) -> None:
    assert made(tmp_path, mixed_precision=None).trainer.config.train.mixed_precision == "no"
