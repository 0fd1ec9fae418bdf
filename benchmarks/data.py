"""How long `trainkit data check` takes for rows of a given length, after imports, with a byte-level BPE tokenizer."""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainkit.cli.files import read_data
from trainkit_tools.inspection import Reading, inspect, usual_kind


def sentence(words: list[str], count: int) -> str:
    """Return so many random words."""
    return " ".join(random.choices(words, k=count))


def trained_tokenizer(words: list[str]) -> PreTrainedTokenizerBase:
    """Return a tokenizer of 8,000 tokens, most of them whole words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([sentence(words, 50) for _ in range(2000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def rows_of(kind: str, words: list[str], tokens: int) -> dict[str, Any]:
    """Return a row of about so many tokens."""
    if kind == "samples":
        return {"prompt": sentence(words, tokens // 2), "completion": f" {sentence(words, tokens // 2)}"}
    sides = {side: f" {sentence(words, tokens // 4)}" for side in ("chosen", "rejected")}
    return {"prompt": sentence(words, tokens // 2), **sides}


def main() -> None:
    """Write data, and print the seconds of reading and of checking them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=50)
    given = parser.parse_args()
    random.seed(0)
    words = ["".join(random.choices(string.ascii_lowercase, k=random.randint(2, 8))) for _ in range(3000)]
    tokenizer = trained_tokenizer(words)
    for kind in ("samples", "pairs"):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "data.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(rows_of(kind, words, given.tokens))}\n" for _ in range(given.rows))
            start, used = time.perf_counter(), time.process_time()
            rows = read_data(str(path))
            found = inspect(rows, Reading(usual_kind(rows), tokenizer=tokenizer, limit=1024))
        mean, wall, cpu = found.lengths["whole"].mean, time.perf_counter() - start, time.process_time() - used
        print(f"{kind}: {found.rows} rows of {mean:.0f} tokens in {wall:.1f} s, {cpu:.1f} s of the processors")


if __name__ == "__main__":
    main()
