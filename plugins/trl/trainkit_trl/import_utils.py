"""What is installed, as `trl.import_utils` tells it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import transformers
from packaging.version import Version

from trainkit_migrate import refusing


def _has(package: str) -> bool:
    return find_spec(package) is not None


def _is_newer(package: str, than: str) -> bool:
    try:
        return Version(version(package)) >= Version(than)
    except PackageNotFoundError:
        return False


def is_peft_available() -> bool:
    """Return whether peft is installed."""
    return _has("peft")


def is_unsloth_available() -> bool:
    """Return whether unsloth is installed."""
    return _has("unsloth")


def is_diffusers_available() -> bool:
    """Return whether diffusers is installed."""
    return _has("diffusers")


def is_bitsandbytes_available() -> bool:
    """Return whether bitsandbytes is installed."""
    return _has("bitsandbytes")


def is_torchvision_available() -> bool:
    """Return whether torchvision is installed."""
    return _has("torchvision")


def is_rich_available() -> bool:
    """Return whether rich is installed."""
    return _has("rich")


def is_pil_available() -> bool:
    """Return whether Pillow is installed."""
    return _has("PIL")


def is_wandb_available() -> bool:
    """Return whether wandb is installed."""
    return _has("wandb")


def is_accelerate_greater_20_0() -> bool:
    """Return whether accelerate is 0.20.0 or newer."""
    return _is_newer("accelerate", "0.20.0")


def is_transformers_greater_than(current_version: str) -> bool:
    """Return whether transformers is newer than a version."""
    return Version(transformers.__version__) > Version(current_version)


def is_torch_greater_2_0() -> bool:
    """Return whether torch is 2.0 or newer."""
    return Version(torch.__version__) >= Version("2.0")


def is_xpu_available() -> bool:
    """Return whether torch has an XPU."""
    return torch.xpu.is_available()


def is_npu_available() -> bool:
    """Return whether torch_npu is installed and has a device."""
    return _has("torch_npu") and bool(torch.get_device_module("npu").is_available())


__getattr__ = refusing(__name__)
