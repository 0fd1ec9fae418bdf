"""What models are exported to and served by: names for `trainkit_tools.exporting`, which are read without torch."""

from __future__ import annotations

from typing import Literal

Format = Literal["merged", "gguf", "ollama"]
Server = Literal["transformers", "vllm"]
CONVERTER = "convert_hf_to_gguf.py"
"""The converter of llama.cpp."""
