"""Statistics of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainkit import functional as F
from trainkit import metrics
from trainkit_migrate import refusing

if TYPE_CHECKING:
    from torch import Tensor


class RunningMoments:
    """Mean and unbiased standard deviation of all values so far, as tensors [] of the type of the latest ones."""

    def __init__(self) -> None:
        self._all = metrics.RunningMoments()
        self._dtype = torch.float32

    def update(self, xs: Tensor, reduce: Callable[[Tensor], Tensor] = lambda t: t) -> tuple[Tensor, Tensor]:
        """Add the values ``xs`` of every process, and return mean and standard deviation of these alone: two [].

        ``reduce`` adds a tensor over the processes.
        """
        alone = metrics.RunningMoments()
        for moments in (self._all, alone):
            moments.update(xs, reduce)
        self._dtype = xs.dtype if xs.is_floating_point() else torch.float32
        return self._tensor(alone.mean), self._tensor(alone.std)

    def _tensor(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self._dtype)

    @property
    def count(self) -> float:
        """How many values there were."""
        return self._all.count

    @property
    def mean(self) -> Tensor:
        """The mean. []."""
        return self._tensor(self._all.mean)

    @property
    def std(self) -> Tensor:
        """The unbiased standard deviation; NaN with fewer than two values. []."""
        return self._tensor(self._all.std)

    @property
    def var(self) -> Tensor:
        """The variance, not corrected for the number of values. []."""
        return self._tensor(self._all.m2 / max(self._all.count, 1))

    def state_dict(self) -> dict[str, float]:
        """Return the state, for checkpoints."""
        return self._all.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the state that `state_dict` returned."""
        self._all.load_state_dict(state)


def flatten_dict(d: Mapping[str, Any], parent_key: str = "", sep: str = "/") -> dict[str, Any]:
    """Return nested dictionaries as one, with the keys joined by ``sep``."""
    found: dict[str, Any] = {}
    for key, value in d.items():
        path = f"{parent_key}{sep}{key}" if parent_key else key
        found |= flatten_dict(value, path, sep) if isinstance(value, MutableMapping) else {path: value}
    return found


def get_tensor_stats(xs: Tensor, mask: Tensor, n: Any) -> dict[str, Tensor]:
    """Return mean, min, max and standard deviation of the ``n`` entries of ``mask``; 0 if there are none."""
    if xs.numel() == 0 or int(n) == 0:
        return dict.fromkeys(("mean", "min", "max", "std"), torch.zeros(()))
    keep = mask.bool()
    mean = F.zero_masked(xs, keep).sum() / n
    return {
        "mean": mean,
        "min": torch.where(keep, xs, torch.full_like(xs, torch.inf)).min(),
        "max": torch.where(keep, xs, torch.full_like(xs, -torch.inf)).max(),
        "std": (F.zero_masked((xs - mean) ** 2, keep).sum() / n).sqrt(),
    }


def whiten(xs: Tensor, shift_mean: bool = True, distributed: bool = True, group: Any = None) -> Tensor:
    """Return ``xs`` with mean 0 and variance 1 over all its entries; ``shift_mean=False`` keeps the mean.

    Args:
        xs: numbers [*].
        shift_mean: whether the mean is subtracted.
        distributed: whether they are those of all processes.
        group: the processes; None: all.
    """
    every = torch.ones_like(xs, dtype=torch.bool)
    return F.whiten(xs, every, shift_mean=shift_mean, reduce=partial(_total, group=group, together=distributed))


def _total(x: Tensor, group: Any = None, together: bool = True) -> Tensor:
    """Return the sum of a tensor over processes."""
    if together and torch.distributed.is_initialized():
        torch.distributed.all_reduce(x, group=group)
    return x


def logprobs_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of labels. [B, T, V], [B, T] -> [B, T]."""
    return F.token_logprobs(logits.flatten(0, 1), labels.flatten()).view_as(labels)


def get_global_statistics(xs: Tensor, group: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and number of the values on all processes. [*] -> three []."""
    count = _total(torch.tensor(float(xs.numel()), device=xs.device), group)
    mean = _total(xs.sum(), group) / count
    return mean, _total(((xs - mean) ** 2).sum(), group) / count, count


def gather_dict(obj: dict[str, list[Any]], grad_state: Any = None) -> dict[str, list[Any]]:
    """Return a dictionary of lists joined over all processes.

    Args:
        obj: the lists of this process.
        grad_state: of accelerate; at the end of its loader, the rows that fill up the last batch are removed.
    """
    if not torch.distributed.is_initialized():
        return obj
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, obj)
    joined = {key: [value for each in found for value in each[key]] for key in obj}
    if grad_state is not None and grad_state.end_of_dataloader and grad_state.remainder > 0:
        return {key: values[: grad_state.remainder] for key, values in joined.items()}
    return joined


# ------------------------------------------------------------------------------------------- parts of models


def make_head(n_embd: int, out: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return Linear(n, 2n), ReLU, Linear(2n, out)."""
    return nn.Sequential(nn.Linear(n_embd, n_embd * 2, dtype=dtype), nn.ReLU(), nn.Linear(n_embd * 2, out, dtype=dtype))


def rhasattr(obj: Any, attr: str) -> bool:
    """Return whether an object has an attribute, given by a dotted path."""
    return rgetattr(obj, attr, None) is not None


def rgetattr(obj: Any, attr: str, *args: Any) -> Any:
    """Return an attribute, given by a dotted path; a further argument is returned if there is none."""
    return reduce(lambda found, name: getattr(found, name, *args), attr.split("."), obj)


def findattr(obj: Any, attrs: Iterable[str]) -> Any:
    """Return the first of several attributes that an object has.

    Raises:
        ValueError: it has none of them.
    """
    names = list(attrs)
    for name in names:
        if rhasattr(obj, name):
            return rgetattr(obj, name)
    raise ValueError(f"{type(obj).__name__} has none of {', '.join(names)}")


def hf_get_decoder(model: nn.Module) -> nn.Module:
    """Return the decoder of a language model, without its head."""
    found: nn.Module = findattr(model, ("transformer", "model.decoder", "gpt_neox", "decoder", "model"))
    return found


def hf_get_decoder_final_norm(model: nn.Module) -> nn.Module:
    """Return the norm after the last layer of the decoder of a language model, or of its body."""
    names = ("transformer.ln_f", "model.decoder.final_layer_norm", "model.norm", "decoder.final_layer_norm")
    bodies = ("ln_f", "norm", "final_layer_norm")
    found: nn.Module = findattr(model, (*names, "gpt_neox.final_layer_norm", *bodies))
    return found


def hf_get_decoder_blocks(model: nn.Module) -> Any:
    """Return the layers of the decoder."""
    names = ("h", "layers", "model.layers", "decoder.layers", "transformer.h", "model.decoder.layers")
    return findattr(model, (*names, "gpt_neox.layers", "decoder.block"))


def hf_get_lm_head(model: Any) -> nn.Module:
    """Return the head of a language model."""
    found: nn.Module = model.get_output_embeddings()
    return found


def hf_get_hidden_size(config: Any) -> int:
    """Return the width of the hidden states."""
    return int(findattr(config, ("hidden_size", "n_embd", "d_model")))


def hf_get_num_hidden_layers(config: Any) -> int:
    """Return the number of layers."""
    return int(findattr(config, ("num_hidden_layers", "n_layer")))


def freeze_bottom_causal_layers(model: nn.Module, num_layers_unfrozen: int = 0) -> None:
    """Freeze all layers but the last ``num_layers_unfrozen``; -1 freezes none. Embeddings stay as they are."""
    layers = list(hf_get_decoder_blocks(model))
    if num_layers_unfrozen >= 0:
        for layer in layers[: len(layers) - num_layers_unfrozen]:
            layer.requires_grad_(False)


def freeze_bottom_seq2seq_layers(model: Any, num_layers_unfrozen: int = 0) -> None:
    """Freeze encoder, embeddings, norms, and all layers of the decoder but the last ones; -1 freezes nothing."""
    if num_layers_unfrozen < 0:
        return
    layers = list(model.decoder.block)
    frozen = layers[: len(layers) - num_layers_unfrozen]
    ends = (model.shared, model.decoder.embed_tokens, model.encoder.final_layer_norm, model.decoder.final_layer_norm)
    for part in (*model.encoder.block, *frozen, *ends):
        part.requires_grad_(False)


__getattr__ = refusing(__name__)
