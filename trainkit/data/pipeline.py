"""Rows in an order that one integer describes, and their token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from trainkit.data.batches import Row
from trainkit.errors import DataError, describe
from trainkit.seeding import generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class Pipeline:
    """An endless stream over ``rows``, shuffled anew each epoch from the seed alone.

    Position ``p`` of the stream is row ``order(epoch)[p % len]`` with ``epoch = p // len``: the whole state of the
    stream is one integer.

    Args:
        rows: the dataset; kept as it is and indexed lazily if it is a sequence (a `datasets.Dataset` too).
        seed: fixes every epoch's order.
        shuffle: False keeps the given order in every epoch.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int = 0, shuffle: bool = True) -> None:
        if len(rows) == 0:
            raise DataError("there are no rows to train on; give at least one")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, epoch: int) -> list[int]:
        """Row indices in the order of one epoch."""
        if self._order[0] != epoch:
            shuffled = torch.randperm(len(self), generator=generator(self.seed, "data", epoch))
            self._order = (epoch, shuffled.tolist() if self.shuffle else list(range(len(self))))
        return self._order[1]

    def take(self, start: int, count: int, *, rank: int = 0, world: int = 1) -> list[Row]:
        """Positions ``start`` to ``start + count``, of which process ``rank`` of ``world`` gets every world-th."""
        positions = range(start + rank, start + count, world)
        return [self.rows[self.order(p // len(self))[p % len(self)]] for p in positions]


WINDOW = 256
"""Rows that a `Stream` reads ahead."""


class Stream:
    """Rows of an iterable without a length, in its own order, read while training; after its end, from its beginning.

    Position ``p`` is the p-th row that comes out. To go on from a position, what comes before it is read once more.

    Args:
        source: gives the same rows whenever it is gone over; a `datasets.IterableDataset` that shuffles is told the
            epoch.
        read: given rows of the source and the index of the first of them -> rows to train on, checked.
        one_to_one: ``read`` gives a row for each, so that those before a position need not be read to skip them.
    """

    def __init__(
        self, source: Iterable[Any], read: Callable[[list[Any], int], list[Row]], *, one_to_one: bool = True
    ) -> None:
        self.source, self.read, self.one_to_one = source, read, one_to_one
        self._rows: Iterator[Row] = self._from(0)
        self._at = 0

    def take(self, start: int, count: int, *, rank: int = 0, world: int = 1) -> list[Row]:
        """Positions ``start`` to ``start + count``, of which process ``rank`` of ``world`` gets every world-th."""
        if start < self._at or (start > self._at and self.one_to_one):
            self._rows, self._at = self._from(start if self.one_to_one else 0), start if self.one_to_one else 0
        for _ in range(start - self._at):
            next(self._rows)
        taken = list(islice(self._rows, count))
        self._at = start + count
        return taken[rank::world]

    def check(self) -> None:
        """Read the first rows, as they will be read."""
        self._rows = chain([next(self._rows)], self._rows)

    def _from(self, skip: int) -> Iterator[Row]:
        """The rows from the one on before which ``skip`` rows of the source stand."""
        epoch = 0
        while True:
            if hasattr(self.source, "set_epoch"):
                self.source.set_epoch(epoch)
            given = iter(self.source)
            index = sum(1 for _ in islice(given, skip))
            skip -= index
            while window := list(islice(given, WINDOW)):
                yield from self.read(window, index)
                index += len(window)
            if not index:
                raise DataError("samples is an empty stream; give at least one sample")
            epoch += 1


def is_stream(rows: object) -> bool:
    """Whether ``rows`` can be gone over again and has no length, as a `datasets.IterableDataset`."""
    return isinstance(rows, Iterable) and not isinstance(rows, Iterator) and not hasattr(rows, "__len__")


REMEMBERED = 4096
"""Prompts whose ids a `PromptEncoder` keeps at hand."""


class PromptEncoder:
    """Prompts as token ids that leave room for the response.

    Args:
        tokenizer: its own beginning token is added, once, and no end token.
        budget: most tokens a prompt may have; None: no limit.
        overlong: what to do with longer ones; ``"truncate"`` keeps a prompt's *end* (S-44).
        ends: add the tokenizer's end token too, if it has the habit: so an encoder reads prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        budget: int | None,
        overlong: Literal["error", "truncate", "drop"] = "error",
        ends: bool = False,
    ) -> None:
        self.tokenizer, self.budget, self.overlong, self.ends = tokenizer, budget, overlong, ends
        self._known: dict[str, list[int]] = {}  # prompts come again with every sample and every epoch

    def __call__(self, prompt: Any, what: str = "the prompt") -> list[int]:
        """Token ids of a prompt: text, or ids that are taken as they are.

        Raises:
            DataError: no text, no tokens, or too many; ``what`` names it.
        """
        if isinstance(prompt, str) or not isinstance(prompt, Tensor | Sequence):
            check_text(prompt, what)
            if prompt not in self._known:
                if len(self._known) >= REMEMBERED:
                    self._known.clear()
                self._known[prompt] = self._encode(prompt, what)
            ids = list(self._known[prompt])
        else:
            ids = as_ids(prompt)
        if self.budget is not None and self.budget < 1:
            raise DataError("rollout.max_new_tokens leaves no room for a prompt within the model's context; lower it")
        if not ids:
            raise DataError(f"{what} {describe(prompt)} has no tokens; give text that the tokenizer keeps")
        if self.budget is None or len(ids) <= self.budget:
            return ids
        if self.overlong == "truncate":
            return ids[-self.budget :]
        room = "are read" if self.ends else "leave room for the response"
        raise DataError(
            f"{what} has {len(ids)} tokens, and at most {self.budget} {room}. Shorten it, "
            f"{'' if self.ends else 'lower rollout.max_new_tokens, '}raise train.seq_length if it is what limits, "
            "or set rollout.overlong_prompts to 'truncate' or 'drop'"
        )

    def _encode(self, prompt: str, what: str) -> list[int]:
        """The tokenizer's ids, without the EOS it may append unless that is asked for, and neither a second BOS nor a
        second EOS where the text spells one out."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        bare = encode_text(self.tokenizer, prompt, what)
        if not bare:
            return []
        ids = _tokenize(self.tokenizer, prompt, what, add_special_tokens=True)
        ended = ids[-len(bare) - 1 :] == [*bare, eos]
        ids = ids[:-1] if ended else ids
        ids = bare if bare[0] == bos and ids == [bos, *bare] else ids
        return [*ids, eos] if ended and self.ends and bare[-1] != eos else ids

    def fit(self, rows: Sequence[Row]) -> list[Row]:
        """The rows whose prompts fit, every one of them checked; how many did not is logged."""
        kept, overlong = [], 0
        whole = PromptEncoder(self.tokenizer, None, ends=self.ends)
        for index, row in enumerate(rows):
            too_long = self.budget is not None and len(whole(row["prompt"], f"prompt {index}")) > self.budget
            overlong += too_long
            if too_long and self.overlong == "drop":
                continue
            self(row["prompt"], f"prompt {index}")
            kept.append(row)
        if not kept:
            raise DataError(
                f"all {len(rows)} prompts are longer than {self.budget} tokens and were dropped; none is left"
            )
        if overlong:
            verb = "dropped" if self.overlong == "drop" else "cut to their end"
            log.warning("%d of %d prompts were %s: more than %s tokens", overlong, len(rows), verb, self.budget)
        return kept


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, what: str = "the text") -> list[int]:
    """Token ids of text in the middle of a sequence: no special tokens are added."""
    return _tokenize(tokenizer, text, what, add_special_tokens=False)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, what: str, *, add_special_tokens: bool) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers raise nothing more special
        raise DataError(f"{what} {describe(text)} cannot be encoded by the tokenizer: {error}") from error
    return ids


def check_text(text: Any, what: str) -> None:
    """Raise a `DataError` unless ``text`` is a string with something in it that UTF-8 can hold."""
    if not isinstance(text, str):
        raise DataError(f"{what} should be a string, or a dict with the key 'prompt'; given {describe(text)}")
    if not text:
        raise DataError(f"{what} is empty; give text to go on from, or leave it out")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds a character that is no text: {error}; remove it") from error


EncodedSide = tuple[list[int], list[bool]]
"""Token ids of a prompt with an output, and which of them are the output's."""


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, row: Row, limit: int | None, what: str = "the sample"
) -> tuple[EncodedSide, EncodedSide, bool]:
    """Both sides of a pair row, chosen and rejected, and whether something was cut at ``limit`` tokens.

    What is too long loses the beginning of the prompt, the same of both sides, so that they answer to one prompt; an
    output that is longer still loses its end, EOS with it (S-36).

    Raises:
        DataError: a text has no tokens, or the sides have the same ones, or one loses its whole output.
    """
    chosen, rejected = (
        encode_joint(tokenizer, row["prompt"], row[side], f"{what}: {side}") for side in ("chosen", "rejected")
    )
    room = 0 if limit is None else max(len(ids) for ids, _ in (chosen, rejected)) - limit
    if room > 0:
        first = min(room, *(mask.index(True) - 1 for _, mask in (chosen, rejected)))  # a state to choose in is left
        cut = slice(first, first + (limit or 0))
        chosen, rejected = ((ids[cut], mask[cut]) for ids, mask in (chosen, rejected))
    same = chosen == rejected
    if same or not (any(chosen[1]) and any(rejected[1])):
        raise DataError(
            f"{what} has {'the same tokens as chosen and as rejected' if same else 'a side without output'}"
            f"{f' within {limit} tokens; raise train.seq_length, or leave it out' if room > 0 else '; leave it out'}"
        )
    return chosen, rejected, room > 0


def encode_pair_apart(
    tokenizer: PreTrainedTokenizerBase, row: Row, limit: int | None, what: str = "the sample"
) -> tuple[EncodedSide, EncodedSide, bool]:
    """As `encode_pair`, for a model that reads prompt and output apart (`encode_apart`).

    Raises:
        DataError: a text has no tokens, or the sides have the same ones.
    """
    chosen, rejected = (
        encode_apart(tokenizer, row["prompt"], row[side], limit, f"{what}: {side}") for side in ("chosen", "rejected")
    )
    if chosen[:2] == rejected[:2]:
        within = f" within {limit} tokens" if chosen[2] else ""
        raise DataError(f"{what} has the same tokens as chosen and as rejected{within}; leave it out")
    return chosen[:2], rejected[:2], chosen[2] or rejected[2]


def encode_joint(tokenizer: PreTrainedTokenizerBase, prompt: str, output: str, what: str = "the sample") -> EncodedSide:
    """Token ids of a prompt and an output that are tokenised as one text, and which of them are the output's.

    A token that reaches from the prompt into the output is the output's; where it would be the first of all, and the
    output have nothing to follow, the two are tokenised apart. The tokenizer's beginning token comes first, where it
    adds one and the text does not; EOS ends the output, where it does not (S-36).

    Raises:
        DataError: the prompt or the output has no tokens.
    """
    encode = PromptEncoder(tokenizer, None)
    ids = encode(prompt + output, what)
    count = _output_tokens(tokenizer, prompt, output, what)
    if count == len(ids):
        alone = encode_text(tokenizer, output, what)
        ids, count = [*encode(prompt, what), *alone], len(alone)
    if not count:
        raise DataError(f"{what} has an output without tokens, {describe(output)}; give text that the tokenizer keeps")
    if ids[-1] != tokenizer.eos_token_id:
        ids, count = [*ids, tokenizer.eos_token_id], count + 1
    return ids, [index >= len(ids) - count for index in range(len(ids))]


def encode_apart(
    tokenizer: PreTrainedTokenizerBase, prompt: str, output: str, limit: int | None, what: str = "the sample"
) -> tuple[list[int], list[bool], bool]:
    """Token ids of a prompt that an encoder reads and the output of a decoder, which are the output's, whether cut.

    The prompt is as the tokenizer makes it, special tokens included; EOS ends the output, where it does not. Each has
    ``limit`` tokens to itself, the decoder's start token included: a longer prompt loses its beginning, a longer
    output its end (S-44).

    Raises:
        DataError: the prompt or the output has no tokens.
    """
    query = PromptEncoder(tokenizer, None, ends=True)(prompt, what)
    response = encode_text(tokenizer, output, what)
    if not response:
        raise DataError(f"{what} has an output without tokens, {describe(output)}; give text that the tokenizer keeps")
    if response[-1] != tokenizer.eos_token_id:
        response = [*response, tokenizer.eos_token_id]
    cut = limit is not None and (len(query) > limit or len(response) >= limit)
    if limit is not None:
        query, response = query[-limit:], response[: limit - 1]
    return [*query, *response], [False] * len(query) + [True] * len(response), cut


def one_output(row: Row, what: str = "the sample") -> tuple[str, str]:
    """The prompt and the output of a sample row.

    Raises:
        DataError: it has no prompt, or several outputs.
    """
    if row["outputs"] != [False, True]:
        raise DataError(
            f"{what} has {len(row['turns'])} turns, and an encoder-decoder reads one prompt and writes one output; "
            "give (prompt, output), with earlier turns in the prompt's text"
        )
    prompt, output = row["turns"]
    return prompt, output


def _output_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, output: str, what: str) -> int:
    """How many of the last tokens of ``prompt + output`` hold text of the output."""
    text = prompt + output
    if not tokenizer.is_fast:  # no offsets: what the whole begins with as the prompt alone does
        whole, alone = encode_text(tokenizer, text, what), encode_text(tokenizer, prompt, what)
        agree = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), len(alone))
        return len(whole) - agree
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return sum(end > len(prompt) for _, end in ends)


def encode_sample(
    tokenizer: PreTrainedTokenizerBase, row: Row, limit: int | None, what: str = "the sample"
) -> tuple[list[int], list[bool]]:
    """Token ids of a sample row, and which of them are responses.

    Turns are encoded one by one, as they are when generating, so ids at a turn's boundary are the same in training
    and in use. EOS ends the last output and is trained, unless the sample was cut at ``limit`` tokens (S-35).

    Raises:
        DataError: a turn has no tokens, or no response token is left within ``limit``.
    """
    encoder = PromptEncoder(tokenizer, None)
    ids: list[int] = []
    chosen: list[bool] = []
    for text, is_output in zip(row["turns"], row["outputs"], strict=True):
        turn = encoder(text, what) if not ids and not is_output else encode_text(tokenizer, text, what)
        if not turn:
            raise DataError(f"{what} holds {describe(text)}, which has no tokens; give text that the tokenizer keeps")
        if not ids and is_output:  # nothing precedes the first token, so it can only be chosen after BOS
            missing = tokenizer.bos_token_id not in (None, turn[0])
            ids, turn = ([tokenizer.bos_token_id], turn) if missing else (turn[:1], turn[1:])
            chosen = [False]
        ids += turn
        chosen += [is_output] * len(turn)
    if ids[-1] != tokenizer.eos_token_id or not chosen[-1]:
        ids.append(tokenizer.eos_token_id)
        chosen.append(True)
    ids, chosen = ids[:limit], chosen[:limit]
    if not any(chosen):
        raise DataError(
            f"{what} has no output within the first {limit} tokens; shorten its prompt or raise train.seq_length"
        )
    return ids, chosen


def as_ids(value: Tensor | Sequence[int]) -> list[int]:
    """Token ids as a list of int, from a 1-D tensor or a sequence.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point():
        return [int(i) for i in value.tolist()]
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(i, int) for i in value):
        return list(value)
    raise DataError(f"token ids should be a 1-D integer tensor or a list of int; given {describe(value)}")
