"""An exported adapter, merged into its base model."""

from __future__ import annotations

import logging
import shutil
from functools import reduce
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from trainkit.errors import ConfigError
from trainkit.models.adapters import ADAPTER_CONFIG, HEADS, adapter_base, merge_adapter
from trainkit.models.loading import auto_class, code_advice, name_eos
from trainkit.security import TRUST

log = logging.getLogger(__name__)


def merge_export(adapter: Path, out: Path, base: str | None = None, *, trust_remote_code: bool = False) -> None:
    """Merge an exported adapter into its base model, and write the full model to ``out``.

    Beside it are the tokenizer, the processor of images and heads. It is written in the type of the adapter if that is
    more precise than the base model's.

    Args:
        adapter: the directory of the export.
        out: a new or empty directory.
        base: the base model's directory or hub id, instead of the one that the adapter names.
        trust_remote_code: whether Python code that comes with the base model may run.

    Raises:
        ConfigError: there is no adapter, ``out`` is not empty, or the base model cannot be loaded.
    """
    base_path = base or adapter_base(adapter)
    if not (adapter / ADAPTER_CONFIG).is_file() or base_path is None:
        raise ConfigError(f"{adapter} holds no {ADAPTER_CONFIG}; give an export of a run with model.peft_config")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; give a new directory")
    code = {TRUST: trust_remote_code}
    try:
        model = auto_class(AutoConfig.from_pretrained(base_path, **code)).from_pretrained(
            base_path, dtype="auto", **code
        )
        merged = merge_adapter(_as_trained(model, adapter), adapter)
        tokenizer = AutoTokenizer.from_pretrained(adapter, **code)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        advice = code_advice(error) or "Give the path of its base model as --base"
        raise ConfigError(f"the adapter {adapter} cannot be merged into {base_path!r}: {error}. {advice}") from error
    name_eos(merged, tokenizer)
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name in (HEADS, PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
        if (adapter / name).exists():
            shutil.copy2(adapter / name, out)


def _as_trained(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Return the base model in the type of the adapter, in which it was trained, if that is more precise."""
    from peft.utils import load_peft_weights

    dtypes = [tensor.dtype for tensor in load_peft_weights(str(adapter), device="cpu").values()]
    dtype = reduce(torch.promote_types, [each for each in dtypes if each.is_floating_point], model.dtype)
    if dtype == model.dtype or getattr(model, "is_quantized", False):
        return model
    log.warning("the merged weights are %s, as those of the adapter; the base model's are %s", dtype, model.dtype)
    whole: nn.Module = model
    return cast("PreTrainedModel", whole.to(dtype))
