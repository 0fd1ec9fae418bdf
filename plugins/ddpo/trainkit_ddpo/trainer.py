"""The trainer of DDPO: samples images, scores them, and trains on (image, step) rows with the clipped surrogate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from trainkit import AcceleratedLoop, Batch, Collector, Row, TRLConfig, register_trainer
from trainkit.errors import ConfigError, DataError
from trainkit.functional import clipped_surrogate
from trainkit.metrics import Mean, Metrics, Std
from trainkit.models import check_adapter_dropout, disable_dropout
from trainkit.seeding import PLACE, Seen, placed, response_seeds, uniforms
from trainkit_ddpo.adapters import add_adapter, cast
from trainkit_ddpo.advantages import PerPromptStatTracker, standardise
from trainkit_ddpo.config import DDPOConfig
from trainkit_ddpo.ddim import Steps
from trainkit_ddpo.evaluation import evaluate
from trainkit_ddpo.images import ImageRollouts, as_ids
from trainkit_ddpo.pipeline import DiffusionPolicy
from trainkit_ddpo.scoring import RewardCaller
from trainkit_ddpo.source import Source, open_source

log = logging.getLogger(__name__)

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
USED = {
    "rollout": ("num_rollouts", "batch_size", "overlong_prompts"),
    "model": ("model_path", "dtype", "peft_config", "disable_dropout", "kwargs"),
    "tokenizer": (),
    "reward": ("timeout", "retries", "retry_on"),
}
"""Settings of the shared sections that DDPO uses; the other settings of these sections must have their defaults."""


@dataclass(frozen=True)
class Trajectories(Batch):
    """Sampled denoising trajectories, one row per image, before the rewards of the collection are known."""

    latents: Tensor
    """Latents from noise to image [B, S + 1, C, h, w], in the dtype they are stored in."""
    logprobs: Tensor
    """Log-probability of each step [B, S]."""
    condition: Tensor
    """Conditioning input of the network [B, *]."""


@dataclass(frozen=True)
class Conditions(Batch):
    """Conditioning input of each row, stored once per image."""

    image: Tensor
    """Index into ``kept`` of the image of each row [B]."""
    kept: Tensor
    """Conditioning input of each image [N, *]."""

    @property
    def rows(self) -> Tensor:
        """Conditioning input of each row [B, *]."""
        return self.kept[self.image]

    def take(self, rows: Tensor) -> Self:
        """Return the rows at the indices ``rows``, without the images that they do not use."""
        used, image = self.image[rows.to(self.image.device)].unique(return_inverse=True)
        return type(self)(image, self.kept[used])

    @classmethod
    def cat(cls, batches: Sequence[Self]) -> Self:
        """Concatenate the rows and the images of ``batches``."""
        starts = accumulate((len(batch.kept) for batch in batches), initial=0)
        image = torch.cat([batch.image + start for batch, start in zip(batches, starts, strict=False)])
        return cls(image, torch.cat([batch.kept for batch in batches]))

    def flatten(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the conditioning input of each row under the name of the field."""
        return {prefix.removesuffix("."): self.rows}


@dataclass(frozen=True)
class DDPOBatch(Batch):
    """Denoising steps of images, one row per (image, step)."""

    latents: Tensor
    """Latents before the step [B, C, h, w]."""
    next_latents: Tensor
    """Latents after the step [B, C, h, w]."""
    steps: Tensor
    """Index of the step, from 0 [B]."""
    old_logprobs: Tensor
    advantages: Tensor
    condition: Conditions

    @property
    def lengths(self) -> Tensor:
        """Number of positions of a latent, which determines the size of micro-batches [B]."""
        return torch.full((len(self),), self.latents[0, 0].numel())


class ImageCollector(Collector):
    """Collects trajectories, and waits for the rewards of their images, which are scored meanwhile."""

    algorithm: DDPOTrainer

    def push_experience(self) -> None:
        """Push the trajectories of one collection to the store, and wait for their rewards.

        An error of the reward function is then one of collecting, before anything is computed from the collection.
        """
        self.algorithm.begin_scoring()
        super().push_experience()
        self.algorithm.wait_for_rewards()


@register_trainer("ddpo")
class DDPOTrainer(AcceleratedLoop[DDPOConfig]):
    """Trainer of DDPO: loss = mean max(−A ρ, −A clip(ρ, 1 − ε, 1 + ε)) over (image, step) rows."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    collector_class: ClassVar[type[Collector]] = ImageCollector

    def __init__(self, config: TRLConfig[DDPOConfig], **kwargs: Any) -> None:
        text = [name for name in ("tokenizer", "logit_mask", "stop_sequences") if kwargs.pop(name, None) is not None]
        if text:
            raise ConfigError(f"{text[0]} applies to text, and ddpo makes images; remove it")
        _refuse_unused(config)
        check_adapter_dropout(config.model)
        super().__init__(config, **kwargs)
        self.source: Source = open_source(self.config.model, self.live_model)
        self.denoising: Steps = self.source.noise(self.method.num_steps).steps(self.method.eta)
        if not len(self.denoising.trained):
            raise ConfigError(
                f"method.num_steps is {self.method.num_steps}, and none of these steps adds noise, so no step can be "
                "trained; give more steps"
            )
        self.source.check(self.method.negative_prompt, "method.negative_prompt")
        self.tracker = PerPromptStatTracker(self.method.buffer_size, self.method.min_count)
        self._promised: list[Callable[[], Tensor]] = []
        self._warned_of_equal = False

    # -------------------------------------------------------------------------------------------------- the model

    def get_arch(self, config: TRLConfig[DDPOConfig]) -> DiffusionPolicy:
        """Return the policy over the image model: its network trainable or with an adapter, everything else frozen."""
        half = HALF.get(self.accelerator.mixed_precision)
        pipeline = self.source.load().prepare(half)
        network = pipeline.network
        if config.model.peft_config is not None:
            if half is not None:
                cast(network, half)
            add_adapter(network, config.model.peft_config)
        elif not any(parameter.requires_grad for parameter in network.parameters()):
            raise ConfigError(
                "no parameter of the live model's network is trainable; unfreeze parameters, or set model.peft_config"
            )
        if config.model.disable_dropout:
            disable_dropout(network)
        method = config.method
        return DiffusionPolicy(
            pipeline.eval(),
            self.denoising,
            guidance_scale=method.guidance_scale,
            negative_prompt=method.negative_prompt,
        )

    def write_model(self, building: Path, target: Path) -> None:
        """Write the image model; an adapter is merged into its weights."""
        self.unwrapped.pipeline.save_pretrained(building)

    def model_card(self) -> dict[str, str]:
        """Return the entries of the model card, with those of the image model."""
        return {"pipeline_tag": "text-to-image", **self.unwrapped.pipeline.card()}

    # ---------------------------------------------------------------------------------------------------- the data

    @property
    def passes(self) -> int:
        """Passes over each collection: `ddpo_epochs`, TRL's inner epochs."""
        return self.method.ddpo_epochs

    @property
    def steps_per_image(self) -> int:
        """Number of (image, step) rows per image."""
        return max(round(len(self.denoising.trained) * self.method.timestep_fraction), 1)

    @property
    def experience_rows(self) -> int:
        """Number of (image, step) rows of one collection, on all processes together."""
        return super().experience_rows * self.steps_per_image

    def fit_prompts(self, rows: list[Row]) -> list[Row]:
        """Return the prompts; if one is too long, raise, truncate or drop it as `rollout.overlong_prompts` says.

        Raises:
            DataError: a prompt is not text, not one of the model's prompts or too long; or no prompt is left.
        """
        overlong = self.config.rollout.overlong_prompts
        for index, row in enumerate(rows):
            if not isinstance(row["prompt"], str):
                raise DataError(f"prompt {index} is a conversation, and ddpo needs text; give a string")
            self.source.check(row["prompt"], f"prompt {index}")
        long = [index for index, row in enumerate(rows) if not self.source.fits(row["prompt"])]
        if long and overlong == "error":
            raise DataError(
                f"prompt {long[0]} has more tokens than the text encoder accepts; shorten it, or set "
                "rollout.overlong_prompts to 'truncate' or 'drop'"
            )
        if long:
            verb = "dropped" if overlong == "drop" else "truncated"
            log.warning(
                "%d of %d prompts were %s: they have more tokens than the text encoder accepts",
                len(long),
                len(rows),
                verb,
            )
        kept = [row for index, row in enumerate(rows) if overlong != "drop" or index not in set(long)]
        if not kept:
            raise DataError(
                f"all {len(rows)} prompts have more tokens than the text encoder accepts, so none is left; shorten them"
            )
        return kept

    # ---------------------------------------------------------------------------------------------- the experience

    def begin_scoring(self) -> None:
        """Begin a collection, of which nothing is scored yet."""
        self._promised, self.reward_caller.seconds = [], []

    def wait_for_rewards(self) -> None:
        """Wait for the rewards of all images of the collection.

        Raises:
            RewardError: the reward function failed.
        """
        self._promised = [promised().clone for promised in self._promised]

    def make_experience(self, rows: list[Row]) -> Trajectories:
        """Return the trajectories of images for ``rows``, and start scoring them. [B, S + 1, C, h, w]."""
        rollouts, trajectories = self.draw(rows, self._seeds(rows, "train", self.collector.collection.seen))
        self._promised.append(self.reward_caller.submit(rollouts, self.progress.step))
        self.collector.collection.rollouts.append(replace(rollouts, images=rollouts.images.cpu()))
        return trajectories

    @cached_property
    def reward_caller(self) -> RewardCaller:
        """The caller of the reward function."""
        assert self.reward_fn is not None, "train() and learn() ensure that an online trainer has a reward_fn"
        return RewardCaller(self.reward_fn, self.method.reward_workers, self.config.reward)

    def _seeds(self, rows: list[Row], purpose: str, seen: Seen | None = None) -> list[int]:
        return response_seeds(self.config.train.seed, purpose, rows, as_ids(rows), seen)

    @torch.no_grad()
    def draw(self, rows: list[Row], seeds: Sequence[int]) -> tuple[ImageRollouts, Trajectories]:
        """Sample images for ``rows``, each from its seed, and return them with their trajectories."""
        device = self.accelerator.device
        self.models.build()
        policy: DiffusionPolicy = self.unwrapped.eval()
        shape = (self.method.num_steps + 1, *policy.pipeline.shape)
        draws = [torch.randn(shape, generator=torch.Generator(device).manual_seed(s), device=device) for s in seeds]
        with self.accelerator.autocast():
            condition = policy.pipeline.encode([row["prompt"] for row in rows])
            latents, logprobs = policy.sample(condition, torch.stack(draws), self.kept)
            images = policy.pipeline.decode(latents[:, -1])
        return ImageRollouts(rows, images.float()), Trajectories(latents, logprobs, condition)

    @property
    def kept(self) -> torch.dtype:
        """The dtype that latents are stored in: that of the network's computation."""
        return HALF.get(self.accelerator.mixed_precision, torch.float32)

    def prepare_experience(self, experience: Trajectories) -> DDPOBatch:
        """Wait for the rewards, compute advantages, and return the images as (image, step) rows."""
        scores = [promised() for promised in self._promised]
        self._promised = []
        self.record({"time/reward": Mean.of(torch.tensor(sum(self.reward_caller.seconds), dtype=torch.float64))})
        collection = self.collector.collection
        parts = zip(collection.rollouts, scores, strict=True)
        collection.rollouts = [replace(part, scores=rewards) for part, rewards in parts]
        rewards = torch.cat(scores)
        self.record({"reward/mean": Mean.of(rewards), "reward/std": Std.of(rewards)})
        rows = [row for part in collection.rollouts for row in part.rows]
        limit, steps = self.method.adv_clip_max, self._trained_steps(rows)
        image = torch.arange(len(experience)).unsqueeze(1).expand_as(steps).flatten()
        at = steps.flatten()
        return DDPOBatch(
            experience.latents[image, at],
            experience.latents[image, at + 1],
            at,
            experience.logprobs[image, at],
            self.advantages(rows, rewards).clamp(-limit, limit)[image],
            Conditions(image, experience.condition),
        )

    def advantages(self, rows: list[Row], rewards: Tensor) -> Tensor:
        """Return rewards standardised over all processes, per prompt if `buffer_size` > 0. [B] -> [B].

        They are ordered by the positions of the rows, so that the stored rewards do not depend on the processes.
        """
        mine = [(row.get(PLACE, (0,)), row["prompt"]) for row in rows]
        every = self.gather([(*key, reward) for key, reward in zip(mine, rewards.tolist(), strict=True)])
        order = sorted(range(len(every)), key=lambda index: every[index][0])
        names, values = [every[index][1] for index in order], [every[index][2] for index in order]
        self._warn_of_equal(values)
        found = self.tracker.update(names, values) if self.method.buffer_size else standardise(values)
        start = self.accelerator.process_index * len(mine)
        place = {index: at for at, index in enumerate(order)}
        return torch.tensor([found[place[start + index]] for index in range(len(mine))], dtype=torch.float32)

    def _warn_of_equal(self, rewards: list[float]) -> None:
        """Log, once, that all rewards of a collection are equal."""
        if self._warned_of_equal or len(rewards) < 2 or len({*rewards}) > 1 or not self.accelerator.is_main_process:
            return
        self._warned_of_equal = True
        log.warning(
            "ddpo: all images of the collection have the reward %g, so the rewards say nothing about which is better; "
            "check the reward function",
            rewards[0],
        )

    def _trained_steps(self, rows: list[Row]) -> Tensor:
        """Choose for each image a random subset of its steps with σ > 0, without replacement. -> [B, K]."""
        trained = self.denoising.trained
        seeds = torch.tensor(self._seeds(rows, "timesteps"))
        return trained[uniforms(seeds, len(trained)).argsort(1)[:, : self.steps_per_image]]

    # ---------------------------------------------------------------------------------------------------- the loss

    def loss(self, batch: DDPOBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over (image, step) rows. -> []."""
        mean = self.policy(batch.latents, batch.steps, batch.condition.rows)
        log_ratio = self.unwrapped.logprobs(mean, batch.next_latents, batch.steps) - batch.old_logprobs
        ratio, limit = log_ratio.exp(), self.method.cliprange
        loss = clipped_surrogate(ratio, batch.advantages, cliprange=limit).mean()
        return loss, {
            "policy/ratio": Mean.of(ratio),
            "policy/approx_kl": Mean.of(0.5 * log_ratio**2),
            "policy/clipfrac": Mean.of((ratio - 1).abs() > limit),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the stored rewards of each prompt."""
        return {"rewards": self.tracker.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stored rewards of each prompt."""
        self.tracker.load_state_dict(state["rewards"])

    # ---------------------------------------------------------------------------------------------------- the user

    def step(self, prompts: Any) -> dict[str, float]:
        """Learn from images for these prompts, in a loop of your own: one collection with all its passes.

        Args:
            prompts: as for `trainkit.train`; each process gives prompts of its own, equally many.

        Returns:
            The metrics of this call, averaged over its optimizer steps.

        Raises:
            DataError: a prompt cannot be used.
            RewardError: the reward function failed.
        """
        rows = self.read_prompts(prompts)
        self.begin()
        at, size = self.progress, self.config.rollout.batch_size
        rows = placed(rows, at.cursor + self.accelerator.process_index * len(rows))

        def push() -> None:
            self.begin_scoring()
            at.prompts = len(rows)
            for start in range(0, len(rows), size):
                self.store.push(self.make_experience(rows[start : start + size]))
            at.cursor += len(rows) * self.accelerator.num_processes

        return self.learn_collection(push, self.passes)

    def generate(self, prompts: Any) -> ImageRollouts:
        """Generate images for one or several prompts: strings, or dicts with a ``prompt``. Training is not affected.

        Every call gives other images, unless a prompt has a column ``seed``, which determines its image.
        """
        rows = self.read_prompts([prompts] if isinstance(prompts, str | Mapping) else prompts)
        if self.config.train.resume:
            self.begin()  # the sampled images depend on the state of the resumed run
        seeds = self._seeds(placed(rows, self.progress.generated), "generate")
        self.progress.generated += len(rows)
        return self.draw(rows, seeds)[0]

    def evaluation(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Sample images for the evaluation prompts, from the same noise each time; return metrics and records."""

        def images(rows: list[Row], seeds: Sequence[int]) -> ImageRollouts:
            return self.draw(rows, seeds)[0]

        return evaluate(self, images, None if self.reward_fn is None else self.reward_caller)


def _refuse_unused(config: TRLConfig[Any]) -> None:
    """Raise a `ConfigError` if a setting is given that applies only to text."""
    given = [
        f"{section}.{name}"
        for section, used in USED.items()
        for name, field in type(getattr(config, section)).model_fields.items()
        if name not in used and getattr(getattr(config, section), name) != field.default
    ]
    given += ["train.seq_length"] if config.train.seq_length is not None else []
    if given:
        verbs = ("is set, but does", "it") if len(given) == 1 else ("are set, but do", "them")
        raise ConfigError(f"{' and '.join(given)} {verbs[0]} not apply to images, which ddpo makes; remove {verbs[1]}")
