"""What the settings of DDPO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure


@torch.no_grad()
def means(trainer: Any, prompt: str) -> Tensor:
    """Return the means of the last step for eight fixed latents and ``prompt`` [8, C, h, w], with moved weights."""
    policy, draws = trainer.policy.eval(), torch.Generator().manual_seed(0)
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


def effect_against_a(trainer: Any) -> float:
    """Return how far the means for the prompt "a" are from those without guidance."""
    state = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}
    one = means(trainer, "a")
    trainer.unwrapped.load_state_dict(state)
    trainer.unwrapped.guidance_scale = 1.0
    return float((one - means(trainer, "a")).abs().mean())


def advantage_of_three(trainer: Any) -> float:
    """Return the advantage of the reward 3, of a prompt with the rewards 1, 2 and 3, beside another with 10."""
    return float(trainer.tracker.update(["new"] * 3 + ["other"], [1.0, 2.0, 3.0, 10.0])[2])


def stored(trainer: Any) -> int:
    """Return the number of rewards that are stored of a prompt which has had six."""
    trainer.tracker.update(["new"] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    return len(trainer.tracker.rewards["new"])


EFFECTS: dict[str, Effect | list[Effect]] = {
    "num_steps": Effect("rows", rises=(3, 5)),
    "eta": Effect("old_logprobs", falls=(0.2, 0.5, 1.0)),
    "guidance_scale": Effect(effect_of_the_prompt, rises=(1.0, 5.0, 10.0)),
    "negative_prompt": Effect(effect_against_a, rises=("a", "")),
    "ddpo_epochs": Effect("collections", falls=(1, 2, 4)),
    "cliprange": Effect("gradient of network", rises=(1e-6, 10.0)),
    "adv_clip_max": Effect("size of advantages", rises=(0.1, 0.5, 5.0)),
    "timestep_fraction": Effect("rows", rises=(0.4, 1.0)),
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
