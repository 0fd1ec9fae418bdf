"""What the settings of DDPO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure


@torch.no_grad()
def means(trainer: Any, prompt: str) -> Tensor:
    """Return the means of the last step for eight fixed latents and ``prompt`` [8, C, h, w], with moved weights.

    Predicted images are not clipped, so that the means are linear in the network's prediction.
    """
    policy, draws = trainer.policy.eval(), torch.Generator().manual_seed(0)
    trainer.unwrapped.clip = None
    for parameter in trainer.unwrapped.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws).to(parameter))
    device = trainer.accelerator.device
    latents = torch.randn((8, *trainer.unwrapped.pipeline.shape), generator=draws).to(device)
    steps = torch.full((8,), trainer.method.num_steps - 1, device=device)
    condition = trainer.unwrapped.pipeline.encode([prompt] * 8)
    found: Tensor = policy(latents, steps, condition)
    return found


def effect_of_the_prompt(trainer: Any) -> float:
    """Return how far the means for a prompt are from those for the negative prompt."""
    state = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}
    one = means(trainer, "bc")
    trainer.unwrapped.load_state_dict(state)
    return float((one - means(trainer, trainer.method.negative_prompt)).abs().mean())


def error_of_guidance(trainer: Any) -> float:
    """Return how far the means for the prompt "a" are from m + (w − 1) (m − m₋), m₋ being that of the negative one."""
    state = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}

    def mean_for(prompt: str, scale: float) -> Tensor:
        trainer.unwrapped.load_state_dict(state)
        trainer.unwrapped.guidance_scale = scale
        return means(trainer, prompt)

    scale, other = trainer.method.guidance_scale, trainer.method.negative_prompt
    guided, own, against = mean_for("a", scale), mean_for("a", 1.0), mean_for(other, 1.0)
    return float((guided - own - (scale - 1) * (own - against)).abs().max() / guided.abs().max())


def advantage_of_three(trainer: Any) -> float:
    """Return the advantage of the reward 3, of a prompt with the rewards 1, 2 and 3, beside another with 10."""
    return float(trainer.tracker.update(["new"] * 3 + ["other"], [1.0, 2.0, 3.0, 10.0])[2])


def scale_of_the_noise(trainer: Any) -> Tensor:
    """Return the standard deviation of the noise that each step adds [S]."""
    sigmas: Tensor = trainer.denoising.sigmas
    return sigmas


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return 1 + the error of the loss, relative to −min(Aρ, A clip(ρ)), with ratios on both sides of the range."""
    batch, reach = trainer.store.experience.to(trainer.accelerator.device), trainer.method.cliprange
    shift = torch.linspace(-0.3, 0.3, len(batch)).to(batch.old_logprobs)
    batch = replace(batch, old_logprobs=batch.old_logprobs - shift)
    trainer.policy.eval()
    ratio, advantages = shift.exp(), batch.advantages
    each = torch.minimum(ratio * advantages, ratio.clamp(1 - reach, 1 + reach) * advantages)
    return float(1 + (trainer.loss(batch)[0] + each.mean()) / each.abs().mean())


def largest_advantage(trainer: Any) -> float:
    """Return the largest advantage of the collection, in absolute value."""
    return float(trainer.store.experience.advantages.abs().max())


def stored(trainer: Any) -> int:
    """Return the number of rewards that are stored of a prompt which has had six."""
    trainer.tracker.update(["new"] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    return len(trainer.tracker.rewards["new"])


EFFECTS: dict[str, Effect | list[Effect]] = {
    # of eight images, each step but the last, which adds no noise
    "num_steps": Effect("rows", equals={3: 16, 5: 32}),
    "eta": [
        Effect("old_logprobs", falls=(0.2, 0.5, 1.0)),
        Effect(scale_of_the_noise, proportional=(0.2, 0.5, 1.0)),
    ],
    "guidance_scale": Effect(effect_of_the_prompt, proportional=(1.0, 5.0, 10.0)),
    "negative_prompt": Effect(error_of_guidance, equals={"": 0.0, "a": 0.0, "bc": 0.0}),
    # twelve steps, two of them in a pass
    "ddpo_epochs": Effect("collections", equals={1: 6, 2: 3, 3: 2}),
    "cliprange": Effect(loss_by_its_formula, equals={1e-4: 1.0, 0.1: 1.0, 0.2: 1.0}),
    "adv_clip_max": Effect(largest_advantage, equals={0.1: 0.1, 0.5: 0.5}),
    "timestep_fraction": Effect("rows", equals={0.5: 8, 1.0: 16}),
    "buffer_size": Effect(stored, equals={2: 2, 4: 4, 16: 6}),
    # (3 − 2) / sqrt(2/3) among its own rewards, (3 − 4) / sqrt(12.5) among all four
    "min_count": Effect(advantage_of_three, equals={3: 1.224743, 4: -0.282843}),
    "reward_workers": Effect("advantages", same=(0, 2)),
}
# latents have no log-probabilities of tokens; the tests of trainkit-ddpo cover surrogate and advantages
STRUCTURE = (Structure(detached=()),)


def brightness(images: Tensor, **_: Any) -> Tensor:
    """Return the mean of each image's values. [B, C, H, W] -> [B]."""
    return images.flatten(1).mean(1)


PROMPTS = ["a", "bc", "def", "ghab", "ccc", "hg", "e", "fa"]
KIT = Declaration(
    arguments={
        "model_path": {"model_type": "pixel_unet", "image_size": 8, "width": 8, "prompts": PROMPTS},
        "reward_fn": brightness,
        "prompts": PROMPTS,
        "config": {
            "method": {"num_steps": 3, "min_count": 2},
            "optimizer": {"weight_decay": 0.0},
            "rollout": {"num_rollouts": 8, "batch_size": 4},
            "train": {"batch_size": 8},
        },
    },
    # a time limit needs a thread; without one, functions are called in the main thread by default
    contexts={"reward_workers": {"reward.timeout": None}},
    effects=EFFECTS,
    structure=STRUCTURE,
)
