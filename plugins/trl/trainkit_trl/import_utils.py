"""What is installed, as `trl.import_utils` tells it."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
import transformers
from packaging.version import Version

from trainkit_migrate import refusing


def _has(package: str) -> bool:
    return find_spec(package) is not None


def _is_newer(package: str, than: str) -> bool:
    return Version(version(package)) >= Version(than)


is_peft_available = partial(_has, "peft")
is_unsloth_available = partial(_has, "unsloth")
is_diffusers_available = partial(_has, "diffusers")
is_bitsandbytes_available = partial(_has, "bitsandbytes")
is_torchvision_available = partial(_has, "torchvision")
is_rich_available = partial(_has, "rich")
is_pil_available = partial(_has, "PIL")
is_wandb_available = partial(_has, "wandb")
is_accelerate_greater_20_0 = partial(_is_newer, "accelerate", "0.20.0")
is_torch_greater_2_0 = partial(_is_newer, "torch", "2.0")


def is_transformers_greater_than(current_version: str) -> bool:
    """Return whether transformers is newer than a version."""
    return Version(transformers.__version__) > Version(current_version)


def is_xpu_available() -> bool:
    """Return whether torch has an XPU."""
    return torch.xpu.is_available()


def is_npu_available() -> bool:
    """Return whether torch_npu is installed and has a device."""
    return _has("torch_npu") and bool(torch.get_device_module("npu").is_available())


__getattr__ = refusing(__name__)
