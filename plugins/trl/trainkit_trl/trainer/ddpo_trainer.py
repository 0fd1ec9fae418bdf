"""DDPO: images for prompts of a function, rewards of another one, and training on the steps that made them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trainkit
from trainkit import functional as F
from trainkit import get_trainer, hookimpl
from trainkit.errors import ConfigError
from trainkit.runs import free_directory
from trainkit_migrate import translate
from trainkit_trl.core import set_seed
from trainkit_trl.models.modeling_sd_base import DDPOStableDiffusionPipeline
from trainkit_trl.trainer.ddpo_config import DDPOConfig

log = logging.getLogger(__name__)
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "init_lora_weights": "gaussian"}
"""The adapter of TRL, on the attention of the network."""


class DDPOTrainer:
    """DDPO on images for the prompts of a function. ``trainer`` is the trainer of trainkit that computes.

    Args:
        config: the settings.
        reward_function: called with images [B, C, H, W] from 0 to 1, their prompts, and the metadata of these; returns
            a number per image, and metadata of its own.
        prompt_function: returns a prompt and its metadata.
        sd_pipeline: a `DefaultDDPOStableDiffusionPipeline`, a ``StableDiffusionPipeline`` of diffusers, or a
            `trainkit_ddpo.ImagePipeline`; trained in place.
        image_samples_hook: called in the main process with the images of a collection before it is trained on: a list
            of [images, prompts, their metadata, rewards, metadata of these] for each batch, the step, and a tracker.

    Raises:
        ValueError: an argument has another type than it should have, or the images of a collection are no whole number
            of steps.
        ConfigError: a setting or the pipeline has no counterpart in trainkit; says what to write instead.
    """

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: Callable[[Tensor, tuple[str, ...], tuple[Any, ...]], Any],
        prompt_function: Callable[[], tuple[str, Any]],
        sd_pipeline: Any,
        image_samples_hook: Callable[[Any, Any, Any], Any] | None = None,
    ) -> None:
        _check(config, reward_function, prompt_function, image_samples_hook)
        self.config, self.sd_pipeline = config, sd_pipeline
        self.reward_fn = self.reward_function = reward_function
        self.prompt_fn = self.prompt_function = prompt_function
        self.image_samples_callback = self.image_samples_hook = image_samples_hook
        model, adapter = _model(sd_pipeline)
        settled = _translated(config).evolve(model={"peft_config": adapter})
        scored = _named(self._scored, reward_function)
        make: Any = get_trainer("ddpo")
        self.trainer = make(settled, model=model, reward_fn=scored, callbacks=[_Shown(self)])
        declared = max(int(config.sample_num_steps * config.train_timestep_fraction), 1)
        rows = settled.train.batch_size // declared * self.trainer.steps_per_image  # without steps that add no noise
        self.trainer.config = settled.evolve(train={"batch_size": rows})
        if isinstance(sd_pipeline, DDPOStableDiffusionPipeline):
            sd_pipeline._export = self.save_pretrained
        self._told: dict[int, Any] = {}
        self._global_step, self._nowhere = 0, _Nowhere(self)
        set_seed(config.seed + self.accelerator.process_index)  # for the function of prompts
        if settled.train.resume:
            self.trainer.begin()
        self.first_epoch = int(self.trainer.progress.collection)

    @property
    def accelerator(self) -> Any:
        """The accelerator."""
        return self.trainer.accelerator

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.trainer.optimizer

    @property
    def stat_tracker(self) -> Any:
        """The statistics of the rewards of each prompt."""
        return self.trainer.tracker

    @property
    def num_train_timesteps(self) -> int:
        """How many denoising steps of an image are trained on."""
        return int(self.trainer.steps_per_image)

    # --------------------------------------------------------------------------------------------------- training

    def train(self, epochs: int | None = None) -> None:
        """Train for ``epochs``, or ``config.num_epochs``; a resumed run makes those that it lacks."""
        global_step = int(self.trainer.progress.step)
        for epoch in range(self.first_epoch, self.config.num_epochs if epochs is None else epochs):
            global_step = self.step(epoch, global_step)

    def step(self, epoch: int, global_step: int) -> int:
        """Sample images, score them, and train on them; save a checkpoint every ``config.save_freq`` epochs.

        Args:
            epoch: the number of the collection.
            global_step: the optimizer steps before it.

        Returns:
            ``global_step`` and the optimizer steps of this collection.

        Raises:
            RewardError: the reward function failed, or returned something else than it should.
        """
        prompts = [self._drawn(index) for index in range(self._images)]
        self._told, self._global_step, before = {}, global_step, self.trainer.progress.step
        self.trainer.step(prompts)
        if epoch and self.config.save_freq and epoch % self.config.save_freq == 0:
            self.trainer.save()
        return int(global_step + self.trainer.progress.step - before)

    @property
    def _images(self) -> int:
        return self.config.sample_batch_size * self.config.sample_num_batches_per_epoch

    def _drawn(self, index: int) -> dict[str, Any]:
        found = self.prompt_fn()
        if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[0], str):
            raise ValueError(f"prompt_function should return a prompt and its metadata; it returned {found!r}")
        return {"prompt": found[0], "metadata": found[1], "batch": index // self.config.sample_batch_size}

    def _scored(self, images: Tensor, prompts: list[str], metadata: list[Any], batch: list[int], **_: Any) -> Any:
        rewards, told = self.compute_rewards([[images, tuple(prompts), tuple(metadata)]])
        self._told[batch[0]] = told[0]
        return rewards[0]

    def compute_rewards(self, prompt_image_pairs: Sequence[Any], is_async: bool = False) -> tuple[Any, Any]:
        """Return the rewards [B] of each batch, and the metadata of the reward function for each.

        `step` calls it with one batch at a time, in threads if ``config.async_reward_computation`` is set.

        Args:
            prompt_image_pairs: images, prompts and metadata of each batch.
            is_async: whether the batches are scored at the same time, in ``config.max_workers`` threads.
        """
        if is_async:
            with ThreadPoolExecutor(self.config.max_workers) as pool:
                found = list(pool.map(self._rewarded, prompt_image_pairs))
        else:
            found = [self._rewarded(pair) for pair in prompt_image_pairs]
        return tuple(rewards for rewards, _ in found), tuple(told for _, told in found)

    def _rewarded(self, pair: Any) -> tuple[Tensor, Any]:
        found = self.reward_fn(*pair[:3])
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"reward_function should return rewards and their metadata, such as (rewards, {{}}); it returned "
                f"{type(found).__name__}"
            )
        return torch.as_tensor(found[0]), found[1]

    def _show(self, rollouts: list[Any]) -> None:
        """Call the hook of the script with the images of a collection."""
        if self.image_samples_callback is None or not self.accelerator.is_main_process:
            return
        data = [
            [each.images, tuple(each.prompts), tuple(row["metadata"] for row in each.rows), each.scores,
             self._told.get(index)]
            for index, each in enumerate(rollouts)
        ]  # fmt: skip
        opened = (each.opened(self.trainer) for each in self.trainer.hooks.get_plugins() if hasattr(each, "opened"))
        self.image_samples_callback(data, self._global_step, next(filter(None, opened), self._nowhere))

    # ------------------------------------------------------------------------------------------------- the parts

    def calculate_loss(
        self,
        latents: Tensor,
        timesteps: Tensor,
        next_latents: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        embeds: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of denoising steps, ½ mean (log ρ)², and the share of ρ outside 1 ± ε.

        `step` does not call it: trainkit's trainer computes a step.

        Args:
            latents: latents before the step [B, C, h, w].
            timesteps: t of the step [B].
            next_latents: latents after it [B, C, h, w].
            log_probs: their log-probabilities when they were sampled [B].
            advantages: advantages [B], which are clipped.
            embeds: encoded prompts [B, *]; under guidance after as many negative ones [2 B, *], in whose place that of
                the configuration is used.

        Raises:
            ValueError: a timestep is none of those of sampling.
        """
        policy, limit = self.trainer.unwrapped, self.config.train_adv_clip_max
        same = timesteps.unsqueeze(1) == policy.timesteps
        if not bool(same.any(1).all()):
            raise ValueError(f"timesteps should be among {policy.timesteps.tolist()}; given {timesteps.tolist()}")
        steps, condition = same.int().argmax(1), embeds if policy.guidance_scale == 1 else embeds.chunk(2)[1]
        mean = self.trainer.policy(latents, steps, condition)
        log_ratio = policy.logprobs(mean, next_latents, steps) - log_probs
        ratio, clip_range = log_ratio.exp(), self.config.train_clip_range
        loss = self.loss(advantages.clamp(-limit, limit), clip_range, ratio)
        return loss, 0.5 * (log_ratio**2).mean(), ((ratio - 1).abs() > clip_range).float().mean()

    def loss(self, advantages: Tensor, clip_range: float, ratio: Tensor) -> Tensor:
        """Return the clipped surrogate, mean max(−A ρ, −A clip(ρ, 1 ± ε)). [B], [B] -> []. `step` does not call it."""
        return F.clipped_surrogate(ratio, advantages, cliprange=clip_range).mean()

    # ------------------------------------------------------------------------------------------------------ saving

    def create_model_card(self, path: str | Path, model_name: str | None = "TRL DDPO Model") -> None:
        """Write a model card, README.md, to a directory."""
        text = (
            f"---\nlibrary_name: diffusers\npipeline_tag: text-to-image\ntags:\n- trainkit\n- ddpo\n---\n\n"
            f"# {model_name}\n\nA diffusion model, fine-tuned on rewards of its images by DDPO.\n"
        )
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "README.md").write_text(text, encoding="utf-8")

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model with a model card; an adapter is merged into its weights."""
        self.trainer.save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Publish what `save_pretrained` writes."""
        return self.trainer.push_to_hub(repo_id, **kwargs)


class _Shown:
    """Calls the hook of a script."""

    def __init__(self, owner: DDPOTrainer) -> None:
        self.owner = owner

    @hookimpl
    def on_experience(self, rollouts: list[Any]) -> None:
        """Show the images of a collection."""
        self.owner._show(rollouts)


class _Nowhere:
    """What hooks get in place of a tracker if ``log_with`` is not set."""

    def __init__(self, owner: DDPOTrainer) -> None:
        self.owner, self._said = owner, False

    def log_images(self, values: Any, step: int | None = None, **_: Any) -> None:
        """Say, once, where images are."""
        if not self._said:
            self._said = True
            where = self.owner.trainer.run_dir / "images"
            log.warning("log_with is not set, so no tracker gets the images of the hook; some are written to %s", where)

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        """Log numbers where those of trainkit are."""
        trainer = self.owner.trainer
        trainer.hooks.hook.log_metrics(trainer=trainer, step=trainer.progress.step, metrics=values)


def _model(given: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the model that trainkit trains in place, and the adapter of it that is trained.

    Raises:
        ConfigError: it is a pipeline of the script's own that wraps none of diffusers.
    """
    if not isinstance(given, DDPOStableDiffusionPipeline):
        return given, None
    if (model := getattr(given, "sd_pipeline", None)) is None:
        raise ConfigError(
            f"{type(given).__name__} has no attribute sd_pipeline, a pipeline of diffusers; for other models give an "
            "object of a subclass of trainkit_ddpo.ImagePipeline"
        )
    return model, LORA if given.use_lora else None


def _named(call: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Return a function that has the name of another one, for error messages."""

    def scored(**given: Any) -> Any:
        return call(**given)

    scored.__name__ = scored.__qualname__ = getattr(function, "__name__", type(function).__name__)
    return scored


def _check(config: Any, reward_function: Any, prompt_function: Any, hook: Any) -> None:
    if not isinstance(config, DDPOConfig):
        raise ValueError(f"config should be a DDPOConfig; given {type(config).__name__}")
    for name, given in {"reward_function": reward_function, "prompt_function": prompt_function}.items():
        if not callable(given):
            raise ValueError(f"{name} should be a function; given {type(given).__name__}")
    if hook is not None and not callable(hook):
        raise ValueError(f"image_samples_hook should be a function; given {type(hook).__name__}")
    images = config.sample_batch_size * config.sample_num_batches_per_epoch
    step = config.train_batch_size * config.train_gradient_accumulation_steps
    if images % step:
        raise ValueError(
            f"the {images} images of a collection (sample_batch_size times sample_num_batches_per_epoch) should be a "
            f"multiple of the {step} of a step (train_batch_size times train_gradient_accumulation_steps)"
        )


def _translated(config: DDPOConfig) -> trainkit.TRLConfig[Any]:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    found = translate(
        "trl",
        {"DDPOConfig": {**asdict(config), "mixed_precision": config.mixed_precision or "no"}},
        processes=processes,
    )
    if found.refused:
        raise ConfigError("settings of TRL without counterpart:\n  " + "\n  ".join(map(str, found.refused)))
    for remark in found.remarks:
        log.warning("%s", remark)
    if config.allow_tf32 and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    train = found.config["train"]
    if train.get("resume") == "auto" and not [*Path(train["run_dir"]).glob("checkpoints/step_*")]:
        raise ValueError(f"resume_from is {config.resume_from!r}, where there is no checkpoint of a run of trainkit")
    if processes == 1 and not train.get("resume"):
        train["run_dir"] = free_directory(train["run_dir"])
    return trainkit.default_config("ddpo").evolve(**found.config)
