"""Virtual tokens: the trained parameters of peft's prompt and prefix tuning, in front of every row that a model reads.

A model reads them as keys and values of its attention layers, which are in its cache before the first token. Policies,
samplers and references call the model as one without virtual tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from trainkit.errors import ConfigError
from trainkit.models.backend import rounding
from trainkit.models.trunk import tiny_input
from trainkit.models.unloaded import decided, loads_weights

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

KINDS = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")
"""The types of peft whose trained parameters are virtual tokens."""
PLACE = "virtual_tokens"
"""The name of the virtual tokens among the modules of a model's body."""
WEIGHTS = "adapter_model.safetensors"
"""The file of a saved adapter with its tensors."""


class VirtualTokens(nn.Module):
    """The n virtual tokens of a model. They are trained; all weights of the model are frozen.

    * `PREFIX_TUNING` (Li & Liang 2021): the parameters are the keys and values of each layer, or with
      ``prefix_projection`` what a small network computes them from.
    * `PROMPT_TUNING` (Lester et al. 2021) and `P_TUNING` (Liu et al. 2021): the parameters are embeddings, or a network
      that computes them. The model reads them once per pass, not once per row: under causal attention no virtual token
      depends on the tokens after it.

    Args:
        config: their configuration, as peft has completed it for the model.
        encoder: peft's module with the parameters.
        names: the names of the positional arguments of the model's body.

    Attributes:
        enabled: whether the model reads them.
    """

    def __init__(self, config: PeftConfig, encoder: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.config: Any = config
        self.encoder: Any = encoder
        self.names, self.enabled = names, True

    @property
    def count(self) -> int:
        """The number n of virtual tokens."""
        return int(self.config.num_virtual_tokens)

    def values(self) -> Tensor:
        """Return the embeddings of the virtual tokens [n, D], or the keys and values of all layers [n, *]."""
        tokens = torch.arange(self.count, device=self.encoder.embedding.weight.device).unsqueeze(0)
        encode = self.encoder.embedding if self.config.inference_mode else self.encoder  # loaded: the network is gone
        values: Tensor = encode(tokens)[0]
        return values

    def forward(self, body: Any, cache: Cache, rows: int) -> None:
        """Put keys and values of the virtual tokens into an empty cache, for each of ``rows`` rows.

        Args:
            body: the model's body, which reads embeddings.
            cache: the cache.
            rows: the number of rows that are read next.
        """
        by_layer = self._as_prefix(body) if self.config.peft_type == "PREFIX_TUNING" else self._read(body)
        for layer, states in enumerate(by_layer):
            keys, values = (each.expand(rows, -1, -1, -1) for each in states)
            cache.update(keys, values, layer)

    def _as_prefix(self, body: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values [1, H, n, D / H] of each layer: the parts of peft's vector of each virtual token."""
        device = body.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else body.dtype
        heads = self.config.num_attention_heads
        parts = self.values().to(dtype).view(1, self.count, 2 * self.config.num_layers, heads, -1)
        parts = parts.permute(2, 0, 3, 1, 4)
        return zip(parts[0::2], parts[1::2], strict=True)

    def _read(self, body: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values [1, H, n, D / H] of each layer, after the model has read the embeddings."""
        read: Any = DynamicCache()
        embeddings = self.values().to(body.dtype).unsqueeze(0)
        outputs = body.forward(inputs_embeds=embeddings, past_key_values=read, use_cache=True)  # not behind themselves
        last = read.layers[-1]  # FSDP2 gathers a block for its backward pass when the gradient of its output is known
        last.keys = last.keys + 0 * outputs.last_hidden_state[0, 0, 0]
        return ((layer.keys, layer.values) for layer in read.layers)


def _read_behind(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]] | None:
    """Return the inputs of a model's body with the virtual tokens in the cache; a hook before its forward pass.

    The given mask and positions are those of the tokens alone, and of earlier ones in the cache.
    """
    virtual: VirtualTokens = getattr(body, PLACE)
    if not virtual.enabled:
        return None
    if body.training and getattr(body, "gradient_checkpointing", False):
        raise ConfigError(_checkpointing(body))
    inputs = {**dict(zip(virtual.names, args, strict=False)), **kwargs}
    tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    cache = inputs.get("past_key_values")
    inputs["past_key_values"] = cache = DynamicCache() if cache is None else cache
    if not cache.get_seq_length():
        virtual(body, cache, len(tokens))
    if (mask := inputs.get("attention_mask")) is not None:
        inputs["attention_mask"] = torch.cat([mask.new_ones((*mask.shape[:-1], virtual.count)), mask], -1)
    for name in ("position_ids", "cache_position"):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name] + virtual.count
    return (), inputs


def _checkpointing(body: Any) -> str:
    return (
        f"gradient checkpointing is enabled in {type(body).__name__}, and its layers then read no cache, in which the "
        "virtual tokens are; call gradient_checkpointing_disable() (of a quantised model, give "
        "use_gradient_checkpointing=False), or train an adapter such as LORA"
    )


def virtual_tokens(model: Any) -> VirtualTokens | None:
    """Return the virtual tokens of a transformers model; None if it has none."""
    tokens: VirtualTokens | None = getattr(_body(model), PLACE, None)
    return tokens


def _body(model: Any) -> Any:
    """Return the module of a language model that reads the cache: its body, or the decoder in it (OPT)."""
    return model.get_decoder() if hasattr(model, "get_decoder") else None


def count_of(model: Any) -> int:
    """Return how many virtual tokens a model of transformers or peft, or one in a wrapper, has."""
    model = getattr(model, "pretrained_model", model)
    if getattr(model, "_is_prompt_learning", False):
        return int(model.active_peft_config.num_virtual_tokens)
    virtual = virtual_tokens(model)
    return 0 if virtual is None else virtual.count


def moved_by_padding(model: Any) -> bool:
    """Return whether padding on the left of prompts moves virtual tokens out of the model's sliding windows."""
    layers = DynamicCache(config=model.config).layers if count_of(model) else []
    return any(type(layer) is not DynamicLayer for layer in layers)


def is_virtual(config: Any) -> bool:
    """Return whether a configuration of peft is of virtual tokens."""
    return str(getattr(config.peft_type, "value", config.peft_type)) in KINDS


def check_prompt_learning(config: PeftConfig) -> None:
    """Check a configuration of peft that puts tokens before the prompt.

    Raises:
        ConfigError: it is of a type that is not trained, or has no virtual tokens.
    """
    kind = getattr(config.peft_type, "value", config.peft_type)
    if not is_virtual(config):
        raise ConfigError(
            f"model.peft_config.peft_type is {kind!r}, which puts tokens before the prompt; of these types trainkit "
            f"trains {', '.join(KINDS)}, and also adapters within the model's layers, such as LORA"
        )
    count = getattr(config, "num_virtual_tokens", None)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"model.peft_config.num_virtual_tokens is {count}; give {kind} at least 1 virtual token")


def attach(peft_model: Any) -> PreTrainedModel:
    """Put the virtual tokens of a `peft.PeftModel` into its base model, which is returned; both share the parameters.

    The ``peft_model`` then runs its base model, which reads the virtual tokens. Its logits are those of the tokens of
    its input alone.

    Raises:
        ConfigError: the model does not give the logits and gradients that peft computes.
    """
    model: Any = peft_model.get_base_model()
    if virtual_tokens(model) is not None:
        return model  # type: ignore[no-any-return]
    config = peft_model.active_peft_config
    check_model(model)
    body, encoder = _body(model), peft_model.prompt_encoder[peft_model.active_adapter]
    virtual = VirtualTokens(config, encoder, tuple(inspect.signature(body.forward).parameters))
    fault = decided(lambda: _fault(peft_model, model, virtual)) if _can_run(model) else ""
    if fault:
        raise ConfigError(
            f"{type(model).__name__} cannot be trained with peft_type {config.peft_type.value!r}: {fault}. Train "
            "another type of adapter, such as LORA"
        )
    _put(body, virtual)
    peft_model.forward = model.forward
    peft_model.prepare_inputs_for_generation = peft_model.base_model_prepare_inputs_for_generation
    peft_model.disable_adapter = _SwitchedOff(virtual)
    return model  # type: ignore[no-any-return]


def check_model(model: Any) -> None:
    """Check that the model is a causal language model that reads a cache in training.

    Raises:
        ConfigError: it is none, or its gradient checkpointing is enabled.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        what = "is an encoder-decoder" if model.config.is_encoder_decoder else "is no language model"
        raise ConfigError(
            f"{name} {what}, and {', '.join(KINDS)} train causal language models; give it an adapter within its "
            "layers, such as LORA"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(_checkpointing(model))


def _put(body: nn.Module, virtual: VirtualTokens) -> None:
    setattr(body, PLACE, virtual)
    body.register_forward_pre_hook(_read_behind, with_kwargs=True)


@contextmanager
def taken_out(model: PreTrainedModel, virtual: VirtualTokens) -> Iterator[None]:
    """Remove the virtual tokens from the model within the context."""
    body = _body(model)
    _take_out(body)
    try:
        yield
    finally:
        _put(body, virtual)


def _take_out(body: nn.Module) -> None:
    delattr(body, PLACE)
    for key in [key for key, hook in body._forward_pre_hooks.items() if hook is _read_behind]:
        del body._forward_pre_hooks[key]
        body._forward_pre_hooks_with_kwargs.pop(key, None)


class _SwitchedOff:
    """``disable_adapter`` of a `peft.PeftModel`: a context in which the model does not read the virtual tokens."""

    def __init__(self, virtual: VirtualTokens) -> None:
        self.virtual = virtual

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.virtual.enabled = self.virtual.enabled, False
        try:
            yield
        finally:
            self.virtual.enabled = before


# ------------------------------------------------------------------------------------------ comparing with peft


def _can_run(model: PreTrainedModel) -> bool:
    """Return whether the model has weights, or another process runs it."""
    return model.device.type != "meta" or not loads_weights()


def _fault(peft_model: Any, model: Any, virtual: VirtualTokens) -> str:
    """Return how the model with virtual tokens differs from peft's; an empty string if it does not."""
    probe, training = tiny_input(model), model.training
    peft_model.eval()
    try:
        expected = _results(lambda: peft_model(**probe).logits[:, -probe["input_ids"].size(1) :], virtual)
        _put(_body(model), virtual)
        try:
            results = _results(lambda: model(**probe).logits, virtual)
        finally:
            _take_out(_body(model))
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        peft_model.train(training)
    for name, value in expected.items():
        off = float((results[name] - value).norm() / value.norm().clamp(min=1e-12))
        if not off <= rounding(model.dtype, model.device) ** 0.5:
            return f"{name} differ by {off:.1%} from what peft computes"
    return ""


def _results(run: Callable[[], Tensor], virtual: VirtualTokens) -> Mapping[str, Tensor]:
    """Return the logits of a small input, and the gradient of their weighted sum by the trained parameters."""
    with torch.enable_grad(), torch.autocast(virtual.encoder.embedding.weight.device.type, enabled=False):
        logits = run().double()
        trained = [parameter for parameter in virtual.parameters() if parameter.requires_grad]
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits)
        gradients = torch.autograd.grad((logits * weights).sum(), trained) if trained else ()
    results = {"logits": logits.detach()}
    return {**results, "gradients": torch.cat([each.flatten().double() for each in gradients])} if trained else results


# ------------------------------------------------------------------------------------------------------- files


def saved_count(path: str, **hub: Any) -> int:
    """Return the number of virtual tokens that are saved at a directory or hub id; 0 if there are none."""
    config = saved_config(path, **hub)
    return 0 if config is None else int(config.num_virtual_tokens)


def saved_config(path: str, **hub: Any) -> Any:
    """Return the configuration of the virtual tokens that are saved at a directory or hub id; None if there are none.

    Raises:
        ConfigError: tokens are saved there that are not supported.
    """
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(path, **hub)
    if not config.is_prompt_learning:
        return None
    check_prompt_learning(config)
    config.task_type = "CAUSAL_LM"
    return config


def load_virtual(model: PreTrainedModel, path: str, config: PeftConfig, **hub: Any) -> Any:
    """Return a `peft.PeftModel` of the model with saved virtual tokens.

    What is saved are the embeddings, or the keys and values, without a network that has computed them.

    Args:
        model: the base model.
        path: the directory or hub id of the saved virtual tokens.
        config: their configuration.
        **hub: arguments for hub ids.
    """
    from peft import get_peft_model
    from peft.utils import load_peft_weights

    config.inference_mode = True
    adapted: Any = get_peft_model(model, config)
    if loads_weights():
        [encoder] = adapted.prompt_encoder.values()
        encoder.embedding.load_state_dict({"weight": load_peft_weights(path, device="cpu", **hub)["prompt_embeddings"]})
    attach(adapted)
    return adapted


@torch.no_grad()
def save_virtual(virtual: VirtualTokens, directory: Path, base: str) -> None:
    """Save virtual tokens as peft does; ``base`` is the path of their base model."""
    config = copy.copy(virtual.config)
    config.inference_mode, config.base_model_name_or_path = True, base
    if hasattr(config, "tokenizer_kwargs"):
        config.tokenizer_kwargs = None  # of a text that the tokens began with; it may hold a token of the hub
    config.save_pretrained(directory)
    save_file({"prompt_embeddings": virtual.values().detach().cpu().contiguous()}, directory / WEIGHTS)
