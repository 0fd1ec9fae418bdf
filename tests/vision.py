"""Tiny models that read images, with their processors, made without files or packages besides Pillow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import Gemma3Processor, LlavaProcessor, ProcessorMixin, Qwen2VLProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trainkit.plugins import get_trainer
from trainkit.testing.images import SIGLIP, SIZE, TEXT, idefics_processor, image_tokenizer, pictured, tiny_idefics3
from trainkit.testing.trainers import tiny_trainer

NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


class ImagesOnly(Qwen2VLProcessor):
    """The processor of Qwen without videos, which need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _qwen_processor(**sizes: int) -> ImagesOnly:
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    pixels = Qwen2VLImageProcessorPil(
        patch_size=7, merge_size=2, size={"shortest_edge": 196, "longest_edge": 3136}, **sizes
    )
    return ImagesOnly(pixels, image_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *names))


def _qwen_tokens(tokenizer: Any) -> dict[str, int]:
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _qwen2(tokenizer: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    return {
        "model_type": "qwen2_vl",
        "text_config": {**TEXT, **NO_ENDS, "vocab_size": len(tokenizer), "rope_parameters": rope},
        "vision_config": {
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7,
        },
        **_qwen_tokens(tokenizer),
    }  # fmt: skip


def _qwen2_5(tokenizer: Any) -> dict[str, Any]:
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
              "patch_size": 7, "window_size": 28, "fullatt_block_indexes": [1]}  # fmt: skip
    return {**_qwen2(tokenizer), "model_type": "qwen2_5_vl", "vision_config": vision}


def _qwen3(tokenizer: Any) -> dict[str, Any]:
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
              "patch_size": 7, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
    text = {**_qwen2(tokenizer)["text_config"], "head_dim": 16}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_interleaved": True}
    return {
        **_qwen2(tokenizer),
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
    }


def _llava_processor() -> LlavaProcessor:
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    tokenizer = image_tokenizer("<image>", "<image>")
    return LlavaProcessor(
        pixels, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _llava(tokenizer: Any) -> dict[str, Any]:
    return {
        "model_type": "llava",
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
    }


def _smolvlm(tokenizer: Any) -> dict[str, Any]:
    return {**tiny_idefics3(tokenizer), "model_type": "smolvlm"}


def _gemma_processor() -> Gemma3Processor:
    names = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    tokenizer = image_tokenizer("<start_of_image>", **names)
    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}), tokenizer, image_seq_length=4)


def _gemma(tokenizer: Any) -> dict[str, Any]:
    text = {**TEXT, "vocab_size": len(tokenizer), "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {**SIGLIP, "image_size": SIZE, "patch_size": 7},
        "mm_tokens_per_image": 4,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "image_token_id": tokenizer.image_token_id,
    }


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    "qwen2_vl": (_qwen_processor, _qwen2),
    "qwen2_5_vl": (_qwen_processor, _qwen2_5),
    "qwen3_vl": (_qwen_processor, _qwen3),
    "llava": (_llava_processor, _llava),
    "idefics3": (idefics_processor, tiny_idefics3),
    "smolvlm": (idefics_processor, _smolvlm),
    "gemma3": (_gemma_processor, _gemma),
}


def family(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a processor of a family, and the fields of a tiny model's config."""
    make_processor, fields = FAMILIES[name]
    processor = make_processor()
    return processor, fields(processor.tokenizer)


def vision_trainer(kind: str, method: str, run_dir: Path, text: Any = MappingProxyType({}), **changes: Any) -> Any:
    """Return a tiny trainer of an algorithm, of a model of a family, with prompts or samples that have images.

    ``text`` changes the part of the model's config that is about text.
    """
    processor, fields = family(kind)
    fields = {**fields, "text_config": {**fields["text_config"], **text}}
    data = pictured(get_trainer(method).inputs)
    arguments = {"tokenizer": processor, **data, **changes.pop("arguments", {})}
    return tiny_trainer(method, run_dir, model=fields, arguments=arguments, **changes)
