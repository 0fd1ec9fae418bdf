"""DDPO: images for prompts of a function, rewards of another one, and training on the steps that made them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import trainkit
from trainkit import functional as F
from trainkit import get_trainer, hookimpl
from trainkit.errors import ConfigError, RewardError, describe
from trainkit.metrics import Mean, Metrics
from trainkit.runs import free_directory
from trainkit_migrate import refusing, translate
from trainkit_trl.arguments import check_takes, refuse_unknown
from trainkit_trl.core import set_seed
from trainkit_trl.models.modeling_sd_base import DDPOStableDiffusionPipeline
from trainkit_trl.overriding import overridden
from trainkit_trl.trainer.base import BaseTrainer
from trainkit_trl.trainer.ddpo_config import DDPOConfig
from trainkit_trl.trainer.tracking import take_trackers

log = logging.getLogger(__name__)
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "init_lora_weights": "gaussian"}
"""The adapter of TRL, on the attention of the network."""
Trainer: Any = get_trainer("ddpo")
BY_LOSS = "override calculate_loss or loss, which every step calls"
STATISTICS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "approx_kl": "policy/approx_kl",
    "clipfrac": "policy/clipfrac",
    "loss": "loss/total",
}
"""The names of TRL for metrics of trainkit."""


class DDPOTrainer(BaseTrainer):
    """DDPO on images for the prompts of a function. ``trainer`` is the trainer of trainkit that computes.

    Methods of TRL that a subclass overrides are called with what TRL gives them: `compute_rewards`, `calculate_loss`,
    `loss` and `_setup_optimizer`. Those in ``not_called`` cannot be overridden.

    Args:
        config: the settings.
        reward_function: called with images [B, C, H, W] from 0 to 1, their prompts, and the metadata of these; returns
            a number per image, and metadata of its own.
        prompt_function: returns a prompt and its metadata.
        sd_pipeline: a `DefaultDDPOStableDiffusionPipeline`, a ``StableDiffusionPipeline`` of diffusers, or a
            `trainkit_ddpo.ImagePipeline`; trained in place.
        image_samples_hook: called in the main process with the images of a collection before it is trained on: a list
            of [images, prompts, their metadata, rewards, metadata of these] for each batch, the step, and a tracker.
        log_names: by which names trackers get metrics: those of TRL, ``"trl"``, or ``"trainkit"``.
        **unknown: other arguments are errors.

    Raises:
        ValueError: an argument has another type than it should have, or the images of a collection are no whole number
            of steps.
        ConfigError: a setting or the pipeline has no counterpart in trainkit, or a method is overridden that is not
            called; says what to write instead.
    """

    kept: ClassVar[tuple[str, ...]] = ("config", "sd_pipeline")
    followed: ClassVar[tuple[str, ...]] = ("num_epochs", "save_freq")
    not_called: ClassVar[Mapping[str, str]] = {
        "_generate_samples": "subclass trainkit_ddpo.ImagePipeline for a model that samples otherwise",
        "_train_batched_samples": BY_LOSS,
        "_config_check": "check the configuration before you make the trainer",
        "_save_model_hook": "checkpoints are trainkit's; override save_pretrained for what is exported",
        "_load_model_hook": "checkpoints are trainkit's; load the model before you make the trainer",
    }
    card: ClassVar[dict[str, str]] = {
        "library_name": "diffusers\npipeline_tag: text-to-image",
        "tag": "ddpo",
        "text": "A diffusion model, fine-tuned on rewards of its images by DDPO.",
    }

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: Callable[[Tensor, tuple[str, ...], tuple[Any, ...]], Any],
        prompt_function: Callable[[], tuple[str, Any]],
        sd_pipeline: Any,
        image_samples_hook: Callable[[Any, Any, Any], Any] | None = None,
        log_names: str = "trl",
        **unknown: Any,
    ) -> None:
        refuse_unknown(DDPOTrainer, unknown)
        _check(config, reward_function, prompt_function, image_samples_hook)
        self.config, self.sd_pipeline = config, sd_pipeline
        self.reward_fn, self.prompt_fn = reward_function, prompt_function
        self.image_samples_callback = image_samples_hook
        model, adapter = _model(sd_pipeline)
        own = self.overrides("_setup_optimizer")
        settled = _translated(config, own_optimizer=own).evolve(model={"peft_config": adapter})
        given = {"optimizer": self._setup_optimizer} if own else {}
        scored = _named(self._scored, reward_function)
        self._trackers, left = take_trackers(settled.train.trackers, log_names)
        settled = settled.evolve(train={"trackers": left})
        hooks = [_Shown(self), *self._trackers]
        self.trainer: Any = DDPO(settled, owner=self, model=model, reward_fn=scored, callbacks=hooks, **given)
        declared = max(int(config.sample_num_steps * config.train_timestep_fraction), 1)
        rows = settled.train.batch_size // declared * self.trainer.steps_per_image  # without steps that add no noise
        self.trainer.config = settled.evolve(train={"batch_size": rows})
        if isinstance(sd_pipeline, DDPOStableDiffusionPipeline):
            sd_pipeline._export = self.save_pretrained
            sd_pipeline.scheduler.set_timesteps(config.sample_num_steps)
        self._told: dict[int, Any] = {}
        self._global_step, self._nowhere = 0, _Nowhere(self)
        set_seed(config.seed + self.accelerator.process_index)  # for the function of prompts
        if settled.train.resume:
            self.trainer.begin()
        self.trainer.models.build()
        self.first_epoch = int(self.trainer.progress.collection)
        self.keep_settings()

    @property
    def accelerator(self) -> Any:
        """The accelerator."""
        return self.trainer.accelerator

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.trainer.optimizer

    @property
    def autocast(self) -> Callable[[], Any]:
        """What makes a context with the precision of the run."""
        made: Callable[[], Any] = self.accelerator.autocast
        return made

    def _setup_optimizer(self, trainable_layers_parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the configuration, for subclasses that return another."""
        config = self.config
        return torch.optim.AdamW(
            trainable_layers_parameters,
            lr=config.train_learning_rate,
            betas=(config.train_adam_beta1, config.train_adam_beta2),
            weight_decay=config.train_adam_weight_decay,
            eps=config.train_adam_epsilon,
        )

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
        """Train for ``epochs``, or ``config.num_epochs``; a resumed run makes those that it lacks.

        Raises:
            ValueError: ``epochs`` is no integer.
        """
        if not isinstance(epochs, int | None):
            raise ValueError(f"epochs should be an integer or None; given {epochs!r}")
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
            ValueError: an argument is no integer.
        """
        self.check_settings()
        if not (isinstance(epoch, int) and isinstance(global_step, int)):
            raise ValueError(f"epoch and global_step should be integers; given {epoch!r} and {global_step!r}")
        prompts = [self._drawn(index) for index in range(self._images)]
        self._told, self._global_step, before = {}, global_step, self.trainer.progress.step
        self.trainer.step(prompts)
        if epoch and self.config.save_freq and epoch % self.config.save_freq == 0:
            self.trainer.save()
        return int(global_step + self.trainer.progress.step - before)

    @property
    def _images(self) -> int:
        return int(self.config.sample_batch_size * self.config.sample_num_batches_per_epoch)

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

        `step` calls it with one batch at a time, in threads if ``config.async_reward_computation`` is set; where a
        subclass overrides it, with all batches of a collection, as TRL does.

        Args:
            prompt_image_pairs: images, prompts and metadata of each batch.
            is_async: whether the batches are scored at the same time, in ``config.max_workers`` threads.

        Raises:
            ValueError: a batch is something else.
        """
        batches = prompt_image_pairs if isinstance(prompt_image_pairs, list | tuple) else [prompt_image_pairs]
        if odd := [each for each in batches if not isinstance(each, list | tuple) or len(each) < 3]:
            raise ValueError(f"a batch is a list of images, prompts and metadata; given {describe(odd[0])}")
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

    def told(self, metadata: Sequence[Any]) -> None:
        """Keep what `compute_rewards` has told of each batch of a collection, for the hook of the script."""
        self._told = dict(enumerate(metadata))

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

        `step` calls it if it, or `loss`, is overridden; otherwise trainkit's trainer computes the same.

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
        """Return the clipped surrogate, mean max(−A ρ, −A clip(ρ, 1 ± ε)). [B], [B] -> []."""
        return F.clipped_surrogate(ratio, advantages, cliprange=clip_range).mean()

    def create_model_card(self, path: str | Path, model_name: str | None = "TRL DDPO Model") -> None:
        """Write a model card, README.md, to a directory."""
        super().create_model_card(path, model_name)


class DDPO(Trainer):  # type: ignore[misc]
    """trainkit's DDPO with what a `DDPOTrainer` overrides.

    Args:
        *args: those of trainkit's trainer.
        owner: the `DDPOTrainer`.
        **kwargs: those of trainkit's trainer.
    """

    def __init__(self, *args: Any, owner: DDPOTrainer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner = owner
        self.negative: Tensor | None = None
        """The encoded negative prompt [1, *], once it was needed."""

    def begin_scoring(self) -> None:
        """Begin a collection, which the owner scores if it has its own `compute_rewards`."""
        if self.owner.overrides("compute_rewards"):
            self.reward_caller = Together(self.owner)
        super().begin_scoring()

    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss and metrics, of the owner if it has its own."""
        if not self.owner.overrides("loss", "calculate_loss"):
            usual: tuple[Tensor, Metrics] = super().loss(batch)
            return usual
        embeds = batch.condition.rows
        if self.unwrapped.guidance_scale != 1:
            embeds = torch.cat([self._negative().to(embeds).expand_as(embeds), embeds])
        timesteps = self.unwrapped.timesteps[batch.steps]
        given = (batch.latents, timesteps, batch.next_latents, batch.old_logprobs, batch.advantages, embeds)
        found = self.owner.calculate_loss(*given)
        if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], Tensor)):
            raise ConfigError(
                f"calculate_loss should return loss, approx_kl and clipfrac; it returned {describe(found)}"
            )
        loss, approx_kl, clipfrac = (torch.as_tensor(each).reshape(()) for each in found)
        count = len(batch)
        return loss, {
            "policy/approx_kl": Mean.of(approx_kl.expand(count)),
            "policy/clipfrac": Mean.of(clipfrac.expand(count)),
        }

    def _negative(self) -> Tensor:
        if self.negative is None:
            with torch.no_grad():
                self.negative = self.unwrapped.pipeline.encode([self.unwrapped.negative_prompt])
        return self.negative


class Together:
    """Scores all batches of a collection in one call, of `DDPOTrainer.compute_rewards`."""

    def __init__(self, owner: DDPOTrainer) -> None:
        self.owner = owner
        self.seconds: list[float] = []
        """How long scoring has taken; not measured."""
        self._batches: list[Any] = []
        self._found: Sequence[Any] | None = None

    def submit(self, rollouts: Any, step: int) -> Callable[[], Tensor]:
        """Keep a batch, and return what gives its rewards."""
        index = len(self._batches)
        metadata = tuple(row["metadata"] for row in rollouts.rows)
        self._batches.append([rollouts.images.clone(), tuple(rollouts.prompts), metadata])
        return lambda: self._rewards()[index]

    def _rewards(self) -> Sequence[Tensor]:
        if self._found is None:
            found = self.owner.compute_rewards(self._batches, is_async=self.owner.config.async_reward_computation)
            rewards, told = (tuple(each) for each in found)
            rewards = tuple(torch.as_tensor(each).cpu().float().flatten() for each in rewards)
            wanted = [len(images) for images, *_ in self._batches]
            if [len(each) for each in rewards] != wanted:
                raise RewardError(
                    f"compute_rewards should return rewards of {wanted} images in a batch each; it returned "
                    f"{[len(each) for each in rewards]}"
                )
            self._found = rewards
            self.owner.told(told)
        return self._found


class _Shown:
    """Calls the hook of a script, and gives trackers the metrics by TRL's names."""

    def __init__(self, owner: DDPOTrainer) -> None:
        self.owner = owner

    @hookimpl
    def on_experience(self, rollouts: list[Any]) -> None:
        """Show the images of a collection."""
        self.owner._show(rollouts)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Log those that TRL has by its names."""
        theirs, trainer = (
            {name: metrics[ours] for name, ours in STATISTICS.items() if ours in metrics},
            self.owner.trainer,
        )
        for each in self.owner._trackers if theirs else ():
            each.log(trainer, {**theirs, "epoch": float(trainer.progress.collection)})


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


OF_PIPELINES = (
    "__call__", "scheduler_step", "get_trainable_layers", "save_checkpoint", "load_checkpoint", "save_pretrained",
)  # fmt: skip
"""Methods of pipelines that trainkit does not call."""


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
    if found := overridden(given, *OF_PIPELINES):
        raise ConfigError(
            f"{type(given).__name__} overrides {', '.join(found)}, which trainkit does not call; change its "
            "sd_pipeline, or give an object of a subclass of trainkit_ddpo.ImagePipeline, which samples as it says"
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
    for name, function, *arguments in (
        ("reward_function", reward_function, "images", "prompts", "metadata"),
        ("prompt_function", prompt_function),
        ("image_samples_hook", hook, "data", "step", "tracker"),
    ):
        if function is None and name != "image_samples_hook":
            raise ValueError(f"{name} should be a function; given NoneType")
        check_takes(name, function, *arguments)
    for name in ("sample_batch_size", "sample_num_batches_per_epoch", "sample_num_steps", "train_batch_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} should be 1 at least; given {getattr(config, name)}")
    images = config.sample_batch_size * config.sample_num_batches_per_epoch
    step = config.train_batch_size * config.train_gradient_accumulation_steps
    if images % step:
        raise ValueError(
            f"the {images} images of a collection (sample_batch_size times sample_num_batches_per_epoch) should be a "
            f"multiple of the {step} of a step (train_batch_size times train_gradient_accumulation_steps)"
        )


def _translated(config: DDPOConfig, *, own_optimizer: bool) -> trainkit.TRLConfig[Any]:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    given = {**asdict(config), "mixed_precision": config.mixed_precision or "no"}
    settings = translate("trl", {"DDPOConfig": given}, processes=processes).accepted("settings of TRL", log.warning)
    if config.allow_tf32 and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    if own_optimizer:
        del settings["optimizer"]
    train = settings["train"]
    if train.get("resume") == "auto" and not [*Path(train["run_dir"]).glob("checkpoints/step_*")]:
        raise ValueError(f"resume_from is {config.resume_from!r}, where there is no checkpoint of a run of trainkit")
    if processes == 1 and not train.get("resume"):
        train["run_dir"] = free_directory(train["run_dir"])
    return trainkit.default_config("ddpo").evolve(**settings)


__getattr__ = refusing(__name__)
