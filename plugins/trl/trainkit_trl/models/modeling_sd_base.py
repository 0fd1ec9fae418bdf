"""Stable Diffusion pipelines that DDPO trains. diffusers is imported only when one is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers.utils.hub import cached_file

from trainkit_ddpo import ddim_mean, gaussian_logprob
from trainkit_migrate import refusing
from trainkit_trl.arguments import refuse_unknown
from trainkit_trl.overriding import Advising, lacking

PARTS = ("sd_pipeline", "unet", "vae", "tokenizer", "scheduler", "text_encoder")
LORA_WEIGHTS, EXPORTED = "pytorch_lora_weights.safetensors", "trainkit.json"


@dataclass
class DDPOPipelineOutput:
    """Images, and how they came about."""

    images: Any
    """The images."""
    latents: list[torch.Tensor]
    """The latents after each step [B, C, h, w]."""
    log_probs: list[torch.Tensor] | None
    """None: `DDPOTrainer` computes log-probabilities as it samples what it trains on."""


@dataclass
class DDPOSchedulerOutput:
    """A denoising step."""

    latents: torch.Tensor
    """The latents after the step [B, C, h, w]."""
    log_probs: torch.Tensor
    """Their log-probabilities [B]."""


class DDPOStableDiffusionPipeline(metaclass=Advising):
    """A pipeline that `DDPOTrainer` trains: ``sd_pipeline``, an object of diffusers.

    For models that diffusers does not have, subclass `trainkit_ddpo.ImagePipeline`, and give the object to
    `DDPOTrainer`.
    """

    sd_pipeline: Any
    use_lora: bool = False
    _export: Callable[[str | Path], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> DDPOPipelineOutput:
        """Return images for prompts; the arguments are those of the pipeline of diffusers."""
        latents: list[torch.Tensor] = []

        def keep(_pipe: Any, _index: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            latents.append(tensors["latents"])
            return tensors

        found = self.sd_pipeline(*args, callback_on_step_end=keep, **kwargs)
        return DDPOPipelineOutput(found.images, latents, None)

    @property
    def unet(self) -> Any:
        """The network, which is trained in place."""
        return self.sd_pipeline.unet

    @property
    def vae(self) -> Any:
        """The autoencoder."""
        return self.sd_pipeline.vae

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.sd_pipeline.tokenizer

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self.sd_pipeline.scheduler

    @property
    def text_encoder(self) -> Any:
        """The text encoder."""
        return self.sd_pipeline.text_encoder

    @property
    def autocast(self) -> Any:
        """What makes the context that the network runs in; None: the precision of the run."""
        return nullcontext if self.use_lora else None

    def __getattr__(self, name: str) -> Any:
        said = "" if "sd_pipeline" in vars(self) else "it wraps sd_pipeline, a pipeline of diffusers, which is not set"
        raise lacking(type(self), name, said if name in PARTS else "")

    def scheduler_step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor,
        sample: torch.Tensor,
        eta: float = 0.0,
        use_clipped_model_output: bool = False,
        generator: torch.Generator | None = None,
        prev_sample: torch.Tensor | None = None,
    ) -> DDPOSchedulerOutput:
        """Make a denoising step, or return the log-probability of one.

        Args:
            model_output: what the network predicts [B, C, h, w].
            timestep: t of each row, among those of the scheduler [B].
            sample: the latents before the step [B, C, h, w].
            eta: the scale of the noise, above 0 for a log-probability.
            use_clipped_model_output: False.
            generator: draws the noise.
            prev_sample: the latents after the step [B, C, h, w]; None: they are sampled.

        Raises:
            ValueError: the scheduler has no timesteps yet, ``timestep`` is none of them, ``generator`` is given with
                ``prev_sample``, or ``use_clipped_model_output`` is set.
        """
        from trainkit_ddpo.latent import scheduled_noise

        if use_clipped_model_output or (generator is not None and prev_sample is not None):
            raise ValueError("use_clipped_model_output is not supported, nor generator together with prev_sample")
        if self.scheduler.num_inference_steps is None:
            raise ValueError("the scheduler has no timesteps; call scheduler.set_timesteps, or make a DDPOTrainer")
        steps = scheduled_noise(self.scheduler.config, self.scheduler.num_inference_steps).steps(eta)
        same = timestep.cpu().reshape(-1, 1) == steps.timesteps
        if not bool(same.any(1).all()):
            raise ValueError(f"timestep should be among {steps.timesteps.tolist()}; given {timestep.tolist()}")
        at, noise = same.int().argmax(1), steps.noise
        alpha, previous, sigma = (
            each[at].to(sample.device).expand(len(sample)) for each in (steps.alphas, steps.previous, steps.sigmas)
        )
        mean = ddim_mean(sample, model_output, alpha, previous, sigma, prediction=noise.prediction, clip=noise.clip)
        if prev_sample is None:
            drawn = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            prev_sample = mean + sigma.to(mean).view(-1, 1, 1, 1) * drawn
        return DDPOSchedulerOutput(prev_sample.to(sample.dtype), gaussian_logprob(prev_sample.detach(), mean, sigma))

    def set_progress_bar_config(self, *args: Any, **kwargs: Any) -> None:
        """Set the progress bar of the pipeline of diffusers."""
        self.sd_pipeline.set_progress_bar_config(*args, **kwargs)

    def save_pretrained(self, output_dir: str | Path) -> None:
        """Write the pipeline in diffusers' format, with an adapter merged into its weights."""
        (self._export or self.sd_pipeline.save_pretrained)(output_dir)


class DefaultDDPOStableDiffusionPipeline(DDPOStableDiffusionPipeline):
    """A Stable Diffusion 1 or 2 pipeline of diffusers with a DDIM scheduler.

    Args:
        pretrained_model_name: the hub id, or a directory. LoRA weights that TRL saved there are merged into the model.
        pretrained_model_revision: the revision on the hub.
        use_lora: whether `DDPOTrainer` trains a LoRA adapter, and not the whole network.
        **unknown: other arguments are errors.

    Raises:
        ImportError: diffusers is not installed.
    """

    def __init__(
        self,
        pretrained_model_name: str,
        *,
        pretrained_model_revision: str = "main",
        use_lora: bool = True,
        **unknown: Any,
    ) -> None:
        refuse_unknown(DefaultDDPOStableDiffusionPipeline, unknown)
        if not isinstance(pretrained_model_name, str | Path):
            raise ValueError(
                f"pretrained_model_name should be a hub id or a directory; given {pretrained_model_name!r}"
            )
        try:
            import diffusers
        except ImportError as error:
            raise ImportError(
                "Stable Diffusion needs diffusers: pip install 'trainkit-ddpo[diffusers]'; DDPOTrainer also takes a "
                "model in pixels, trainkit_ddpo.PixelPipeline, which needs nothing more"
            ) from error
        name, revision, library = pretrained_model_name, pretrained_model_revision, cast(Any, diffusers)
        self.sd_pipeline = library.StableDiffusionPipeline.from_pretrained(name, revision=revision, safety_checker=None)
        given = self.sd_pipeline.scheduler.config
        clips = given.get("clip_sample", False)  # the default of DDIM is that of models in pixels
        self.sd_pipeline.scheduler = library.DDIMScheduler.from_config(given, clip_sample=clips)
        self.pretrained_model, self.pretrained_revision, self.use_lora = name, revision, use_lora
        if _has(name, LORA_WEIGHTS, revision) and not _has(name, EXPORTED, revision):  # trainkit merges its own
            self.sd_pipeline.load_lora_weights(name, weight_name=LORA_WEIGHTS, revision=revision)
            self.sd_pipeline.fuse_lora()
            self.sd_pipeline.unload_lora_weights()


def _has(name: str, file: str, revision: str) -> bool:
    found = cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found is not None


__getattr__ = refusing(__name__)
