"""Shapes and colours: drawn images, questions about them, and a tiny model that reads images, made from parts."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SIZE, PATCH, WIDTH = 28, 14, 64
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("cross", "square", "triangle")
IMAGE = "<image>"
WORDS = (*COLOURS, *SHAPES, "colour", "shape", "?", IMAGE, "<eos>", "<pad>")
TRAINED, HELD_OUT = 2000, 200

TEXT = {
    "model_type": "llama",
    "vocab_size": len(WORDS),
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "projection_dim": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": PATCH,
    "initializer_range": 0.1,
}
MODEL = {
    "model_type": "llava",
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": WORDS.index(IMAGE),
    "vision_feature_layer": -1,
    "initializer_range": 0.1,
}


def processor() -> LlavaProcessor:
    """Return what reads words and images of 28 × 28 pixels: four patches, each of which is a token."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"extra_special_tokens": [IMAGE]})
    pixels = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    return LlavaProcessor(
        pixels, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def draw(colour: str, shape: str, draws: np.random.Generator) -> Image.Image:
    """Return a shape near the middle, in a shade of a colour, on a dark ground."""
    image = Image.new("RGB", (SIZE, SIZE), (int(draws.integers(0, 40)),) * 3)
    (x, y), radius = (SIZE // 2 + draws.integers(-1, 2, 2)).tolist(), int(draws.integers(9, 12))
    box, third = (x - radius, y - radius, x + radius, y + radius), radius // 3
    fill = tuple(np.clip(COLOURS[colour] + draws.integers(-25, 25, 3), 0, 255).tolist())
    pen = ImageDraw.Draw(image)
    if shape == "cross":
        pen.rectangle((x - radius, y - third, x + radius, y + third), fill=fill)
        pen.rectangle((x - third, y - radius, x + third, y + radius), fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
    return image


def problems(seed: int, count: int) -> list[dict[str, Any]]:
    """Return questions about images, with their answers."""
    draws, rows = np.random.default_rng(seed), []
    for _ in range(count):
        colour, shape = str(draws.choice([*COLOURS])), str(draws.choice(SHAPES))
        question, answer = [("colour", colour), ("shape", shape)][int(draws.integers(2))]
        rows.append({"prompt": f"{IMAGE} {question} ?", "images": [draw(colour, shape, draws)], "answer": answer})
    return rows


def reward(outputs: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each answer that is right, else 0."""
    return [float(output.strip() == right) for output, right in zip(outputs, answer, strict=True)]


def metric(outputs: list[str], answer: list[str], **_: Any) -> dict[str, list[float]]:
    """Return the accuracy."""
    return {"accuracy": reward(outputs, answer)}


def grpo(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for GRPO."""
    return {
        "prompts": problems(seed, TRAINED),
        "eval_prompts": problems(1000 + seed, HELD_OUT),
        "reward_fn": reward,
        "metric_fn": metric,
        "tokenizer": processor(),
    }
