"""Sampling with a model in training."""

from trainkit.models import unwrap_model_for_generation

__all__ = ["unwrap_model_for_generation"]
