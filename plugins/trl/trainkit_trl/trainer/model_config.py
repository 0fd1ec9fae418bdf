"""Which model a script of TRL loads, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from trainkit_migrate import refusing
from trainkit_trl.arguments import checked
from trainkit_trl.core import flatten_dict


@checked
@dataclass
class ModelConfig:
    """Arguments for loading a model: a name or directory, its precision, and an adapter or quantisation.

    Raises:
        ValueError: an argument is unknown or of another type, or both 8 and 4 bits are asked for.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    torch_dtype: str | None = field(default=None, metadata={"choices": ["auto", "bfloat16", "float16", "float32"]})
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int | None = 16
    lora_alpha: int | None = 32
    lora_dropout: float | None = 0.05
    lora_target_modules: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str | None = "nf4"
    use_bnb_nested_quant: bool = False

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both True; choose one")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]  # such as all-linear

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments."""
        return flatten_dict(asdict(self))


__getattr__ = refusing(__name__)
