"""Sampling with a model in training."""

from trainkit.migrating import refusing
from trainkit.models import unwrap_model_for_generation

__all__ = ["unwrap_model_for_generation"]

__getattr__ = refusing(__name__)
