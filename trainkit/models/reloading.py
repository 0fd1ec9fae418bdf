"""An export, loaded as a user would load it, and compared with the model that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit.errors import printable
from trainkit.models.adapters import ADAPTER_CONFIG, adapter_base, quiet_peft, without_adapter
from trainkit.models.backend import rounding
from trainkit.models.reference import fingerprint
from trainkit.models.trunk import tiny_input
from trainkit.models.unloaded import decided

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERIFIED = 4e9
"""The most bytes of weights with which exports are verified by default."""
QUANTISED = 0.1
"""The largest relative difference for a quantised model, whose kernels depend on how its weights are packed."""


@torch.no_grad()
def fault_of(directory: Path, model: PreTrainedModel, score: Any = None, end: int | None = None) -> str:
    """Load the export in ``directory``, and return how its output differs from the model's; empty if it does not.

    Transformers loads a whole model, and peft an adapter. Both models read a short text in evaluation mode.

    Args:
        directory: the export.
        model: the model that was exported, with its adapter.
        score: what gives the output of the trained model to the text's ids [1, T] instead of ``model``.
        end: the id of the token that ends the text; None: any.
    """
    probe, training = tiny_input(model), model.training
    if end is not None and end < model.config.get_text_config().vocab_size:
        probe["input_ids"][:, -1] = end
    cuda = [model.device.index or 0] if model.device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.autocast(model.device.type, enabled=False), quiet_peft():
        try:
            model.eval()
            expected = decided(lambda: model(**probe).logits if score is None else score(probe["input_ids"]))
            outputs = decided(lambda: _reload(directory, model)(**probe).logits)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            return f"it cannot be loaded: {type(error).__name__}: {printable(str(error))[:300]}"
        finally:
            model.train(training)
    outputs = outputs[:, -expected.size(1) :] if expected.dim() > 2 else outputs.view_as(expected)
    quantised = getattr(model, "is_quantized", False)
    return _difference(outputs, expected, QUANTISED if quantised else rounding(expected.dtype, expected.device) ** 0.5)


def has_left_its_path(model: PreTrainedModel) -> bool:
    """Return whether the frozen weights of a model are not those that its path names, or nothing can be loaded there.

    A model that was trained, resized or merged since it was loaded still has its path. Quantised weights cannot be
    trained, and are not compared.
    """
    if getattr(model, "is_quantized", False):
        return False
    with without_adapter(model):
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        frozen_weights = {name: tensor for name, tensor in model.state_dict().items() if name in frozen}
    try:
        if _are_in_files(frozen_weights, Path(model.name_or_path or "")):
            return False
        saved = _load(model.name_or_path or "", model, torch.device("cpu")).state_dict()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError):
        return True
    return fingerprint(frozen_weights) != fingerprint(
        {name: tensor for name, tensor in saved.items() if name in frozen}
    )


def _are_in_files(weights: Mapping[str, Tensor], directory: Path) -> bool:
    """Return whether the safetensors files of a directory hold all ``weights``, which are compared one at a time.

    If not, the model that transformers makes of the files may have them nevertheless, because it converts some.
    """
    names: set[str] = set()
    for file in [*directory.glob("model.safetensors"), *directory.glob("model-*-of-*.safetensors")]:
        with safe_open(file, framework="pt") as saved:
            for name in weights.keys() & {*saved.keys()}:
                weight = weights[name].cpu()
                if not torch.equal(saved.get_tensor(name).to(weight.dtype), weight):
                    return False
                names.add(name)
    return names == weights.keys()


def _difference(values: Tensor, expected: Tensor, limit: float) -> str:
    off = (values.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
    if float(off) <= limit:
        return ""
    largest = float((values.double() - expected.double()).abs().max())
    return f"loaded again, its outputs differ by up to {largest:.3g} ({float(off):.2%}) from those of the trained model"


def _reload(directory: Path, model: PreTrainedModel) -> Any:
    """Return the model at ``directory`` in evaluation mode, on the device of ``model`` and in its type."""
    if not (directory / ADAPTER_CONFIG).is_file():
        return _load(str(directory), model, model.device).eval()
    from peft import PeftModel

    base = _load(adapter_base(directory) or "", model, model.device)
    return PeftModel.from_pretrained(base, str(directory), autocast_adapter_dtype=False).eval()


def _load(path: str, model: PreTrainedModel, device: torch.device) -> Any:
    """Return the model at ``path`` on a device, quantised as ``model`` is and in its type."""
    arguments: dict[str, Any] = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
    if quantised := getattr(model, "is_quantized", False):
        arguments |= {"device_map": {"": device}, "quantization_config": model.config.quantization_config}
    with torch.random.fork_rng([]):
        loaded: Any = type(model).from_pretrained(path, **arguments)
    return loaded if quantised else loaded.to(device)
