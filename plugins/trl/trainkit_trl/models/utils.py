"""Sampling with a model in training, and chat formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainkit.models import unwrap_model_for_generation
from trainkit_migrate import refusing

__all__ = ["ChatMlSpecialTokens", "setup_chat_format", "unwrap_model_for_generation"]


@dataclass
class ChatMlSpecialTokens:
    """The special tokens of ChatML, and what begins a turn."""

    bos_token: str = "<|im_start|>"
    eos_token: str = "<|im_end|>"
    pad_token: str = "<|im_end|>"

    @property
    def system(self) -> str:
        """What a turn of the system begins with."""
        return f"{self.bos_token}system"

    @property
    def user(self) -> str:
        """What a turn of the user begins with."""
        return f"{self.bos_token}user"

    @property
    def assistant(self) -> str:
        """What a turn of the model begins with."""
        return f"{self.bos_token}assistant"

    @property
    def chat_template(self) -> str:
        """The template of a conversation."""
        turn = f"'{self.bos_token}' + message.role + '\\n' + message.content + '{self.eos_token}\\n'"
        ending = f"{{% if add_generation_prompt %}}{{{{ '{self.assistant}\\n' }}}}{{% endif %}}"
        return f"{{% for message in messages %}}{{{{ {turn} }}}}{{% endfor %}}{ending}"


def setup_chat_format(
    model: Any, tokenizer: Any, format: Literal["chatml"] | None = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Give a tokenizer the special tokens and the template of ChatML, and a model rows for them. Return both.

    Args:
        model: the model, changed in place.
        tokenizer: the tokenizer, changed in place.
        format: ``"chatml"``.
        resize_to_multiple_of: what the number of rows is rounded up to a multiple of.

    Raises:
        ValueError: the format is another one.
    """
    if format != "chatml":
        raise ValueError(f"format should be 'chatml'; given {format!r}; set tokenizer.chat_template for another one")
    chat = ChatMlSpecialTokens()
    tokenizer.add_special_tokens(
        {"bos_token": chat.bos_token, "eos_token": chat.eos_token, "pad_token": chat.pad_token}
    )
    tokenizer.chat_template = chat.chat_template
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config is not None else ():
            setattr(config, name, getattr(tokenizer, name))
    return model, tokenizer


__getattr__ = refusing(__name__)
