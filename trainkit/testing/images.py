"""A tiny model that reads images, with its processor and rows with images; needs Pillow."""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers import Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from trainkit.testing import character_tokenizer, tiny_llama

LETTERS = "abcdefghrgb? \n"
SIZE = 28
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255)}
TEMPLATE = (
    "{% for message in messages %}{{ bos_token if loop.first }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ eos_token }}{% endgeneration %}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endif %}{% endfor %}"
)
TEXT = {
    name: value
    for name, value in tiny_llama(0).items()
    if name not in ("model_type", "bos_token_id", "eos_token_id", "vocab_size")
}


def picture(colour: str, width: int = SIZE, height: int = SIZE) -> Image.Image:
    """Return an image of one colour."""
    return Image.new("RGB", (width, height), COLOURS[colour])


def image_tokenizer(placeholder: str, *special: str, **named: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `LETTERS` and further tokens, whose chat template writes a placeholder for an image."""
    letters = character_tokenizer(LETTERS, bos_token="<bos>")
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters._tokenizer, extra_special_tokens=named, **names)
    tokenizer.add_tokens([*special], special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    return tokenizer


SIGLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": SIZE, "patch_size": 14}  # fmt: skip


def idefics_processor() -> Idefics3Processor:
    """Return a processor that reads an image as one part, or a larger one as five."""
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = image_tokenizer("<image>", "<image>", "<fake_token_around_image>", "<global-img>", *places)
    edge = {"longest_edge": SIZE}
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIZE}, max_image_size=edge)
    return Idefics3Processor(pixels, tokenizer, image_seq_len=1)


def tiny_idefics3(tokenizer: Any) -> dict[str, Any]:
    """Return the fields of the config of a two-layer Idefics3."""
    return {
        "model_type": "idefics3",
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": 0},
        "vision_config": SIGLIP,
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": 0,
    }


def asked(colour: str, question: str = "a?", **size: int) -> dict[str, Any]:
    """Return a prompt about an image of one colour."""
    return {"prompt": [{"role": "user", "content": question}], "images": [picture(colour, **size)]}


PROMPTS = [asked("r"), asked("g", "abc?"), asked("b"), asked("r", "b?", height=56)]
PROMPTS += [
    {"prompt": [{"role": "user", "content": "ab"}]},
    asked("b", "?"),
    asked("g"),
    asked("r", "h", width=56),
]
SAMPLES = [
    {**prompt, "completion": [{"role": "assistant", "content": "rgb"[i % 3] * (1 + i % 2)}]}
    for i, prompt in enumerate(PROMPTS * 2)
]
PAIRS = [
    {
        **prompt,
        "chosen": [{"role": "assistant", "content": "rgb"[i % 3]}],
        "rejected": [{"role": "assistant", "content": "ad"}],
    }
    for i, prompt in enumerate(PROMPTS * 2)
]


def pictured(inputs: tuple[str, ...]) -> dict[str, Any]:
    """Return prompts and samples with images, for an algorithm that learns from ``inputs``."""
    return {"prompts": PROMPTS, "samples": PAIRS if "pairs" in inputs else SAMPLES}
