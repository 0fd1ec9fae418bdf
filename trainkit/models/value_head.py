"""The value head, for policies and for the model classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from trainkit.errors import ConfigError
from trainkit.models.adapters import HEADS


class ValueHead(nn.Module):
    """A head for values V(s) of hidden states, [*, D] -> [*].

    It applies dropout, then (if deep) Linear(D, 2D) and ReLU, then a linear layer with one output. The deep head has
    trlX's shape, the other TRL's. Values are computed in the type of the head's weights, also under autocast, and
    returned in float32.

    Args:
        width: D.
        deep: whether there is a hidden layer.
        dropout: the dropout probability for elements of the hidden state, in training mode.
        start: the initialisation of the last layer: `zero`, so that all values are 0 at first; `normal`, with standard
            deviation ``std`` and a zero bias; or torch's `default`.
        std: the standard deviation of `normal`.
    """

    def __init__(
        self,
        width: int,
        deep: bool = True,
        *,
        dropout: float = 0.0,
        start: Literal["zero", "normal", "default"] = "zero",
        std: float = 0.2,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(width, 2 * width) if deep else None
        self.summary = nn.Linear(2 * width if deep else width, 1)
        if start != "default":
            nn.init.zeros_(self.summary.bias)
            nn.init.normal_(self.summary.weight, std=std) if start == "normal" else nn.init.zeros_(self.summary.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values of the hidden states."""
        with torch.autocast(states.device.type, enabled=False):
            states = self.dropout(states.to(self.summary.weight.dtype))
            if self.hidden is not None:
                states = self.hidden(states).relu()
            values: Tensor = self.summary(states).squeeze(-1)
            return values.float()

    def __getitem__(self, place: int) -> nn.Module:
        """Return a layer by its place, as of trlX's head, which is a sequence: Linear, ReLU, Linear."""
        layers = (self.summary,) if self.hidden is None else (self.hidden, nn.ReLU(), self.summary)
        return layers[place]

    @property
    def width(self) -> int:
        """The width D of the hidden states."""
        return (self.summary if self.hidden is None else self.hidden).in_features

    @classmethod
    def like(cls, state: Mapping[str, Tensor], width: int, dropout: float = 0.0) -> Self:
        """Create a head with the shape and the weights of a state dictionary.

        Raises:
            ConfigError: the dictionary is not of a value head, or of one with another width than ``width``.
        """
        head = cls(width, "hidden.weight" in state, dropout=dropout)
        try:
            head.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"the saved value head does not fit hidden states of width {width}: {error}; "
                "give the model it belongs to, or remove the head to start with a new one"
            ) from error
        return head


def state_width(config: PreTrainedConfig) -> int:
    """Return the width of the hidden states that the language-model head of the model, or of its decoder, reads."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "word_embed_proj_dim", None) or text.hidden_size)  # OPT-350m projects them at the end


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of a state dictionary that begin with a prefix, with the prefix removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def find_file(path: str, name: str, hub: Mapping[str, Any]) -> str | None:
    """Return the local path of a file in a directory or a hub repository; None if there is no such file."""
    quiet: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    return cached_file(path, name, **hub, **quiet)


def saved_heads(path: str, hub: Mapping[str, Any]) -> dict[str, Tensor]:
    """Load the heads of the export at a directory or hub id, `value_head.*` and `head.*`; empty if it has none."""
    file = find_file(path, HEADS, hub)
    return {} if file is None else load_file(file)


def check_head_alone(heads: Mapping[str, Tensor], where: str) -> None:
    """Check that saved heads read a policy's own states.

    Raises:
        ConfigError: they belong to a critic with layers of its own.
    """
    if any(name.startswith("critic.") for name in heads):
        raise ConfigError(
            f"{where} holds a critic with layers of its own, and the value head alone would read other states; use the "
            "trainer that exported it, or remove the file to start with a new head"
        )


def saved_modules(path: str, modules: tuple[str, ...], hub: Mapping[str, Any]) -> dict[str, Tensor]:
    """Load modules, such as ``v_head.*``, from a directory or hub id: from the file of the heads, or the model's as TRL
    saves it.
    """
    look: Callable[[str], str | None] = partial(find_file, path, hub=hub)
    if heads := saved_heads(path, hub):
        named = {name.replace("value_head.", "v_head.", 1): tensor for name, tensor in heads.items()}
        return {name: tensor for name, tensor in named.items() if name.split(".")[0] in modules}
    for weights in ("model.safetensors", "pytorch_model.bin"):
        files = [look(weights)]
        if listed := look(f"{weights}.index.json"):
            where = json.loads(Path(listed).read_text("utf-8"))["weight_map"]
            files = [look(name) for name in sorted({where[key] for key in where if key.split(".")[0] in modules})]
        if listed or any(files):  # the other format would hold the same
            return {key: tensor for file in files if file for key, tensor in _read(file, modules).items()}
    return {}


def _read(file: str, modules: tuple[str, ...]) -> dict[str, Tensor]:
    """Load the tensors of a file that belong to the modules."""
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys() if key.split(".")[0] in modules}  # noqa: SIM118
    state = torch.load(file, map_location="cpu", weights_only=True)
    return {key: tensor for key, tensor in state.items() if key.split(".")[0] in modules}
