"""Small real parts for tests and examples, made without files: a tokenizer, configs of tiny models, declarations."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from trainkit.testing.declarations import Declaration, Effect, Structure, Target, World

__all__ = [
    "Declaration",
    "Effect",
    "Structure",
    "Target",
    "World",
    "character_tokenizer",
    "nudged",
    "tiny_bart",
    "tiny_gpt2",
    "tiny_llama",
    "tiny_t5",
]

EOS, PAD = "<eos>", "<pad>"


def character_tokenizer(characters: str, **special: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of ``characters``, then EOS and PAD. Decoding joins them.

    Args:
        characters: the vocabulary; a character outside it is an error when encoding.
        **special: special tokens that differ from ``eos_token="<eos>", pad_token="<pad>"``, e.g. ``pad_token="<eos>"``
            or ``bos_token="<bos>"`` (which is then added to the vocabulary).
    """
    names: dict[str, str] = {k: v for k, v in {"eos_token": EOS, "pad_token": PAD, **special}.items() if v is not None}
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*characters, EOS, PAD, *names.values()]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def tiny_gpt2(vocab_size: int, **overrides: Any) -> dict[str, Any]:
    """Return the fields of a GPT-2 config of 2 layers × 32, for ``model_path``; a step takes a few milliseconds."""
    return {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        **overrides,
    }


def tiny_llama(vocab_size: int, **overrides: Any) -> dict[str, Any]:
    """Return the fields of a Llama config of 2 layers × 32, for ``model_path``."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **overrides,
    }


def tiny_t5(vocab_size: int, **overrides: Any) -> dict[str, Any]:
    """Return the fields of a T5 config of 2 + 2 layers × 32, for ``model_path``.

    The decoder starts with the last id, which in `character_tokenizer` is padding.
    """
    return {
        "model_type": "t5",
        "vocab_size": vocab_size,
        "num_layers": 2,
        "num_heads": 2,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "decoder_start_token_id": vocab_size - 1,
        "pad_token_id": vocab_size - 1,
        "eos_token_id": None,
        **overrides,
    }


def tiny_bart(vocab_size: int, **overrides: Any) -> dict[str, Any]:
    """Return the fields of a BART config of 2 + 2 layers × 32, for ``model_path``.

    The decoder starts with the last id but one, which in `character_tokenizer` is EOS.
    """
    return {
        "model_type": "bart",
        "vocab_size": vocab_size,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "d_model": 32,
        "max_position_embeddings": 64,
        "decoder_start_token_id": vocab_size - 2,
        "pad_token_id": vocab_size - 1,
        "bos_token_id": None,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        **overrides,
    }


def nudged(trainer: Any, size: float = 0.02) -> Any:
    """Add noise to the weights, so that the policy differs from the one that sampled; return the trainer.

    The buffers of a policy's head, such as the targets of Q, get it as well. Values, Q and targets that are 0 or equal
    at first then differ from each other, and from state to state. The noise is the same in every call.

    Args:
        trainer: the trainer, changed in place.
        size: the standard deviation of the noise.
    """
    trainer.models.build()
    draws, model = torch.Generator().manual_seed(0), trainer.unwrapped
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    head = getattr(model, "head", None)
    kept = [x for x in head.buffers() if x.is_floating_point()] if isinstance(head, nn.Module) else []
    with torch.no_grad():
        for tensor in (*trained, *kept):
            tensor += (size * torch.randn(tensor.shape, generator=draws)).to(tensor.device, tensor.dtype)
    return trainer
