"""DDPO (Black et al. 2023): each denoising step is an action, trained with PPO's surrogate on its log-probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_ddpo.advantages import PerPromptStatTracker, standardise
    from trainkit_ddpo.config import DDPOConfig
    from trainkit_ddpo.ddim import Noise, ddim_mean, ddim_sigma, gaussian_logprob
    from trainkit_ddpo.hooks import on_evaluate, on_experience
    from trainkit_ddpo.images import ImageRollouts, save_grid, to_pil
    from trainkit_ddpo.latent import LatentPipeline
    from trainkit_ddpo.pipeline import DiffusionPolicy, ImagePipeline
    from trainkit_ddpo.pixel import PixelConfig, PixelPipeline
    from trainkit_ddpo.trainer import Conditions, DDPOBatch, DDPOTrainer, Trajectories

__all__ = [
    "Conditions",
    "DDPOBatch",
    "DDPOConfig",
    "DDPOTrainer",
    "DiffusionPolicy",
    "ImagePipeline",
    "ImageRollouts",
    "LatentPipeline",
    "Noise",
    "PerPromptStatTracker",
    "PixelConfig",
    "PixelPipeline",
    "Trajectories",
    "ddim_mean",
    "ddim_sigma",
    "gaussian_logprob",
    "on_evaluate",
    "on_experience",
    "save_grid",
    "standardise",
    "to_pil",
]
__getattr__, __dir__ = lazy_names(
    __name__, __all__, "config", "advantages", "ddim", "hooks", "images", "latent", "pipeline", "pixel", "trainer"
)
