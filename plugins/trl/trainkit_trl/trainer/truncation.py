"""How trainers on pairs and on labelled samples truncate what is too long: by the rule of TRL 0.8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import ConfigError, DataError

Side = tuple[list[int], list[bool]]
"""The token ids of a prompt with an output, and a mask of the output's tokens."""
Part = tuple[list[int], list[int]]
"""The token ids of a prompt and of its output."""
MODES = ("keep_end", "keep_start")
USUAL = 128
"""``max_prompt_length``, and of encoder-decoders that of outputs, if it is not given."""


@dataclass
class Truncation:
    """Token ids as TRL trains on them: with BOS, if the tokenizer has one, and no longer than ``max_length``.

    Where a prompt and the longer of its outputs have more than ``max_length`` tokens, BOS and EOS included, the prompt
    keeps ``max_prompt_length`` of its tokens; if that is not enough, the outputs keep their first ``max_length −
    max_prompt_length``. An encoder-decoder reads the first tokens of both.

    Source: ``DPOTrainer.tokenize_row`` and, ``outside``, ``_process_tokens`` of KTO in TRL 0.8.6. Unlike there, BOS and
    EOS are not written twice.
    """

    tokenizer: Any
    max_length: int
    mode: str = "keep_end"
    max_prompt_length: int = USUAL
    max_target_length: int = USUAL
    """The most tokens of an output of an encoder-decoder."""
    outside: bool = False
    """Whether BOS and EOS are added to what was truncated, so that they are always there."""
    apart: bool = False
    """Whether the model is an encoder-decoder."""

    @property
    def lost(self) -> str:
        """What rows lose, in words."""
        end = "end" if self.apart or self.mode == "keep_start" else "beginning"
        return f"prompts lose their {end}, to max_prompt_length ({self.max_prompt_length}), then outputs their end"

    def __call__(self, *sides: Side) -> tuple[Side, ...]:
        """Return a sample, or both sides of a pair, truncated.

        Raises:
            DataError: they are too long, and ``max_prompt_length`` leaves no room for an output.
        """
        starts, chosen = [mask.index(True) for _, mask in sides], [mask[mask.index(True) :] for _, mask in sides]
        parts = [(ids[:start], ids[start:]) for (ids, _), start in zip(sides, starts, strict=True)]
        if self.apart:
            parts = [(self._first(prompt), self._first(output, output=True)) for prompt, output in parts]
        else:
            bos = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
            parts = [(prompt if prompt[:1] == bos else [*bos, *prompt], output) for prompt, output in parts]
            parts = self._around(parts, len(bos)) if self.outside else self._within(parts, self.max_length)
        return tuple(
            ([*prompt, *output], [False] * len(prompt) + [*mask, True][: len(output)])
            for (prompt, output), mask in zip(parts, chosen, strict=True)
        )

    def _around(self, parts: list[Part], first: int) -> list[Part]:
        """Return prompts, without their ``first`` tokens, and outputs in what BOS and EOS leave, and then with both."""
        eos, found = self.tokenizer.eos_token_id, []
        bare = [(prompt[first:], output[:-1] if output[-1] == eos else output) for prompt, output in parts]
        for (prompt, output), (before, whole) in zip(self._within(bare, self.max_length - 2), parts, strict=True):
            found.append(([*before[:first], *prompt], output if output == whole else [*output, eos]))
        return found

    def _within(self, parts: list[Part], room: int) -> list[Part]:
        """Return prompts and outputs, each prompt with the longest output in ``room`` tokens if they can be."""
        longest, most = max(len(output) for _, output in parts), self.max_prompt_length
        found = []
        for prompt, output in parts:
            if len(prompt) + longest > room:
                if most >= room:
                    raise DataError(
                        f"a row has {len(prompt) + longest} tokens, max_length leaves {room}, and max_prompt_length "
                        f"{most} of these to the prompt, so that none is left for an output; set max_prompt_length"
                    )
                prompt = prompt[:most] if self.mode == "keep_start" else prompt[-most:]
            if len(prompt) + longest > room:
                output = output[: room - most]
            found.append((prompt, output))
        return found

    def _first(self, ids: list[int], *, output: bool = False) -> list[int]:
        """Return the first ids of those of an encoder-decoder, and EOS if they end with it, as its tokenizer does."""
        most = self.max_target_length if output else self.max_prompt_length
        if len(ids) <= most:
            return ids
        return [*ids[: most - 1], ids[-1]] if ids[-1] == self.tokenizer.eos_token_id else ids[:most]


def truncation(
    given: Mapping[str, Any], tokenizer: Any, max_length: int, *, outside: bool = False, apart: bool = False
) -> Truncation:
    """Return the truncation that the arguments of a trainer, or of its configuration, choose.

    Args:
        given: ``truncation_mode``, ``max_prompt_length``, and ``max_target_length`` or ``max_completion_length``.
        tokenizer: the tokenizer.
        max_length: the most tokens of a row; of an encoder-decoder, of prompt and output each.
        outside: as in `Truncation`.
        apart: as there.

    Raises:
        ConfigError: the mode is unknown, or a length is below 1.
    """
    mode = given.get("truncation_mode") or "keep_end"
    if mode not in MODES:
        raise ConfigError(f"truncation_mode should be 'keep_end' or 'keep_start'; given {mode!r}")
    lengths = {name: given.get(name) for name in ("max_prompt_length", "max_target_length", "max_completion_length")}
    for name, value in lengths.items():
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"{name} should be 1 at least; given {value!r}")
    prompt, *outputs = lengths.values()
    output = next((value for value in outputs if value is not None), USUAL)
    prompt = USUAL if prompt is None else prompt
    if apart:
        prompt, output = min(prompt, max_length), min(output, max_length - 1)  # the decoder reads a start token, too
    return Truncation(tokenizer, max_length, mode, prompt, output, outside, apart)
