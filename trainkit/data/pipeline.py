"""Rows in an order whose state is one integer, and their token ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trainkit.data.batches import Row
from trainkit.errors import DataError, describe
from trainkit.seeding import PLACE, Place, generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

T = TypeVar("T")


class Pipeline:
    """An endless stream over ``rows``, reshuffled every epoch from the seed alone.

    Position ``p`` of the stream is row ``order(epoch)[p % len]`` with ``epoch = p // len``: the whole state of the
    stream is one integer.

    Args:
        rows: the dataset, a sequence (such as a list or a `datasets.Dataset`); it is indexed lazily, not copied.
        seed: fixes every epoch's order.
        shuffle: if False, every epoch has the given order.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int = 0, shuffle: bool = True) -> None:
        if len(rows) == 0:
            raise DataError("there are no rows to train on; give at least one")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, epoch: int) -> list[int]:
        """Return the row indices in the order of one epoch."""
        if self._order[0] != epoch:
            shuffled = torch.randperm(len(self), generator=generator(self.seed, "data", epoch))
            self._order = (epoch, shuffled.tolist() if self.shuffle else list(range(len(self))))
        return self._order[1]

    def take(self, start: int, count: int, *, rank: int = 0, world: int = 1) -> list[Row]:
        """Return rows ``start`` to ``start + count``, with their `PLACE`; on process ``rank``, every world-th."""
        taken = []
        for position in range(start + rank, start + count, world):
            epoch, at = divmod(position, len(self))
            index = self.order(epoch)[at]
            taken.append({**self.rows[index], PLACE: Place(position, epoch, index)})
        return taken


WINDOW = 256
"""Rows that a `Stream` reads ahead."""


class Stream:
    """Rows of an iterable without a length, in its own order, read during training; it restarts when it ends.

    Position ``p`` is the p-th row of the stream. To resume at a position, the rows before it are read again.

    Args:
        source: yields the same rows whenever it is iterated over. Its `set_epoch`, which a `datasets.IterableDataset`
            has, is called before each epoch.
        read: converts rows of the source, given with the index of the first one, to checked rows for training.
        one_to_one: whether ``read`` returns one row per source row, so that rows can be skipped without calling it.
    """

    def __init__(
        self, source: Iterable[Any], read: Callable[[list[Any], int], list[Row]], *, one_to_one: bool = True
    ) -> None:
        self.source, self.read, self.one_to_one = source, read, one_to_one
        self._rows: Iterator[Row] = self._from(0)
        self._at = 0

    def take(self, start: int, count: int, *, rank: int = 0, world: int = 1) -> list[Row]:
        """Return rows ``start`` to ``start + count``, with their `PLACE`; on process ``rank``, every world-th."""
        if start < self._at or (start > self._at and self.one_to_one):
            self._rows, self._at = self._from(start if self.one_to_one else 0), start if self.one_to_one else 0
        for _ in range(start - self._at):
            next(self._rows)
        taken = [{**row, PLACE: Place(p)} for p, row in enumerate(islice(self._rows, count), start)]
        self._at = start + count
        return taken[rank::world]

    def check(self) -> None:
        """Read and check the first rows; they are not consumed."""
        self._rows = chain([next(self._rows)], self._rows)

    def _from(self, skip: int) -> Iterator[Row]:
        """Yield the rows, starting after the first ``skip`` rows of the source."""
        epoch = 0
        while True:
            if hasattr(self.source, "set_epoch"):
                self.source.set_epoch(epoch)
            samples = iter(self.source)
            index = sum(1 for _ in islice(samples, skip))
            skip -= index
            usable = skip > 0 or index > 0
            while window := list(islice(samples, WINDOW)):
                rows = self.read(window, index)
                usable = usable or bool(rows)
                yield from rows
                index += len(window)
            if not index:
                raise DataError("samples is an empty stream; give at least one sample")
            if not usable:
                raise DataError("no sample of the stream can be trained on; the log says why each was skipped")
            epoch += 1


def is_stream(rows: object) -> bool:
    """Return whether ``rows`` has no length and can be iterated over repeatedly, as a `datasets.IterableDataset`."""
    return isinstance(rows, Iterable) and not isinstance(rows, Iterator) and not hasattr(rows, "__len__")


REMEMBERED = 4096
"""How many prompts a `PromptEncoder` caches the ids of."""


class PromptEncoder:
    """Encodes prompts as token ids that leave room for the response.

    Args:
        tokenizer: what it writes before a text, mostly BOS, is written once; what it writes after it is not.
        budget: the maximum number of tokens of a prompt; None: no limit.
        overlong: how to handle longer prompts; ``"truncate"`` keeps the *end* of a prompt, after its BOS, and
            ``"truncate_right"`` its beginning.
        ends: also write what the tokenizer writes after a text, mostly EOS, for prompts that an encoder reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        budget: int | None,
        overlong: Literal["error", "truncate", "truncate_right", "drop"] = "error",
        ends: bool = False,
    ) -> None:
        self.tokenizer, self.budget, self.overlong, self.ends = tokenizer, budget, overlong, ends
        self.advice = ""
        """What to do about a prompt that is too long; empty: the settings of a run are named."""
        self._known: dict[str, list[int]] = {}  # prompts recur with every sample and every epoch

    def __call__(self, prompt: Any, what: str = "the prompt", *, may_drop: bool = False) -> list[int]:
        """Return the token ids of a prompt, which is text, or ids that are used unchanged.

        Args:
            prompt: the prompt.
            what: names it in errors.
            may_drop: it is one of a list of prompts, from which ``overlong="drop"`` would remove it.

        Raises:
            DataError: the prompt is not text, or has no tokens or too many; ``what`` names it.
        """
        ids = self._whole(prompt, what)
        if self.budget is not None and self.budget < 1:
            raise DataError("rollout.max_new_tokens leaves no room for a prompt within the model's context; lower it")
        if self.budget is None or len(ids) <= self.budget:
            return ids
        if self.overlong.startswith("truncate"):
            first, last = beginning(self.tokenizer, ids), self._ending(ids)
            if first + last < self.budget:
                return self._cut(ids, self.budget, first, last)
            raise DataError(
                f"{what} has special tokens, which truncation keeps ({first + last}), and may have no more than "
                f"{self.budget} tokens; lower rollout.max_new_tokens, or raise train.seq_length"
            )
        ways = "'truncate' or 'drop'" if may_drop else "'truncate'"
        room = "are read" if self.ends else "leave room for the response"
        advice = self.advice or (
            f"Shorten it, {'' if self.ends else 'lower rollout.max_new_tokens, '}raise train.seq_length if that is the "
            f"limit, or set rollout.overlong_prompts to {ways}"
        )
        raise DataError(f"{what} has {len(ids)} tokens, and at most {self.budget} {room}. {advice}")

    def _whole(self, prompt: Any, what: str) -> list[int]:
        """Return all token ids of a prompt, however many they are."""
        if isinstance(prompt, str) or not isinstance(prompt, Tensor | Sequence):
            check_text(prompt, what)
            if prompt not in self._known:
                if len(self._known) >= REMEMBERED:
                    self._known.clear()
                self._known[prompt] = self._encode(prompt, what)
            ids = list(self._known[prompt])
        else:
            ids = as_ids(prompt)
        if not ids:
            raise DataError(f"{what} {describe(prompt)} has no tokens; give text that the tokenizer keeps")
        return ids

    def _cut(self, ids: list[int], count: int, first: int, last: int) -> list[int]:
        """Return ``count`` ids, with the special tokens that are ``first`` and ``last``."""
        if self.overlong == "truncate":
            return _end_of(ids, first, count)
        return [*ids[: count - last], *ids[len(ids) - last :]]

    def _ending(self, ids: list[int]) -> int:
        """Return how many of the last tokens of a prompt are those that the tokenizer writes after a text."""
        written: list[int] = self.tokenizer("")["input_ids"] if self.ends else []
        most = min(len(ids), len(written))
        return next((at for at in range(most) if ids[-1 - at] != written[-1 - at]), most)

    def _encode(self, prompt: str, what: str) -> list[int]:
        """Return the tokenizer's ids; what it writes before and after a text is left out where the text has it."""
        bare = encode_text(self.tokenizer, prompt, what)
        if not bare:
            return []
        ids = _tokenize(self.tokenizer, prompt, what, add_special_tokens=True)
        before, after = _written_around(self.tokenizer, ids, bare)
        ids = bare if bare[: len(before)] == before else [*before, *bare]
        return [*ids, *after] if self.ends and bare[-len(after) :] != after else ids

    def fit(self, rows: Sequence[Row]) -> list[Row]:
        """Check all prompts and return the rows that fit; log how many were too long."""
        kept, overlong = [], 0
        for index, row in enumerate(rows):
            too_long = self.budget is not None and len(self._whole(row["prompt"], f"prompt {index}")) > self.budget
            overlong += too_long
            if too_long and self.overlong == "drop":
                continue
            self(row["prompt"], f"prompt {index}", may_drop=True)
            kept.append(row)
        if not kept:
            raise DataError(
                f"all {len(rows)} prompts are longer than {self.budget} tokens and were dropped; none is left"
            )
        if overlong:
            rest = "beginning" if self.overlong == "truncate_right" else "end"
            verb = "dropped" if self.overlong == "drop" else f"truncated to their {rest}"
            log.warning("%d of %d prompts were %s: more than %s tokens", overlong, len(rows), verb, self.budget)
        return kept


def _written_around(tokenizer: PreTrainedTokenizerBase, ids: list[int], bare: list[int]) -> tuple[list[int], list[int]]:
    """Return what the tokenizer has written in ``ids`` before and after ``bare``, the tokens of the text itself."""
    added = len(ids) - len(bare)
    starts = [at for at in range(added + 1) if ids[at : at + len(bare)] == bare]
    if not starts:  # the tokens of the text depend on the special ones
        return ids[:added], []
    at = added - 1 if added - 1 in starts and ids[-1] == tokenizer.eos_token_id else starts[-1]  # EOS may be BOS too
    return ids[:at], ids[at + len(bare) :]


def beginning(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """Return how many of the first tokens are BOS, or what else the tokenizer writes before a text."""
    written: list[int] = tokenizer("")["input_ids"]
    most = min(len(ids), len(written))
    same = next((at for at in range(most) if ids[at] != written[at]), most)
    return same or int(len(ids) > 0 and ids[0] == tokenizer.bos_token_id)


def _end_of(ids: list[T], first: int, count: int) -> list[T]:
    """Return the ``first`` items and the last ones, ``count`` in all; the last ones alone if ``first`` leaves none."""
    return [*ids[:first], *ids[len(ids) - count + first :]] if first < count else ids[-count:]


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of token ids: the largest one and 1, because there may be gaps, so that it has fewer tokens."""
    size = len(tokenizer)
    if _ID_COUNTS.get(tokenizer, (0, 0))[0] != size:  # it reads the whole vocabulary
        _ID_COUNTS[tokenizer] = size, max(tokenizer.get_vocab().values(), default=-1) + 1
    return _ID_COUNTS[tokenizer][1]


_ID_COUNTS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, int]] = WeakKeyDictionary()
"""By tokenizer, its number of tokens and of ids."""


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, what: str = "the text") -> list[int]:
    """Return the token ids of text; no special tokens are added."""
    return _tokenize(tokenizer, text, what, add_special_tokens=False)


SPACES = "▁Ġ"
"""How tokens write a space."""
NEIGHBOURS = ("\n", ".", "a", "1")
"""Texts before which a text can stand that continues another one; at least one does not merge with it."""


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase, text: str, after: int | None = None, what: str = "the text"
) -> list[int]:
    """Return the token ids of text that follows other text, without the space that some tokenizers begin a text with.

    Args:
        tokenizer: the tokenizer.
        text: the text.
        after: the id of the token before it, because a space may be written after special tokens; None: not special.
        what: names the text in errors.
    """
    ids = encode_text(tokenizer, text, what)
    spaces = len(text) - len(text.lstrip(f" {SPACES}"))
    begins = "".join(map(str, tokenizer.convert_ids_to_tokens(ids[: spaces + 1])))  # a few tokenizers have bytes
    if len(begins) - len(begins.lstrip(SPACES)) <= spaces:
        return ids
    added = tokenizer.added_tokens_decoder
    for before in [added[after].content] if after in added else NEIGHBOURS:
        try:
            alone, whole = (encode_text(tokenizer, part, what) for part in (before, before + text))
        except DataError:  # the vocabulary lacks it
            continue
        rest = whole[len(alone) :]
        if rest and whole[: len(alone)] == alone and tokenizer.unk_token_id not in {*alone, *rest} - {*ids}:
            return rest
    return ids


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, what: str, *, add_special_tokens: bool) -> list[int]:
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers have no exception class of their own
        raise DataError(f"{what} {describe(text)} cannot be encoded by the tokenizer: {error}") from error
    return ids


def check_text(text: Any, what: str, expected: str = "text") -> None:
    """Raise a DataError unless ``text`` is a non-empty string that can be encoded as UTF-8."""
    if not isinstance(text, str):
        raise DataError(f"{what} should be {expected}; given {describe(text)}")
    if not text:
        raise DataError(f"{what} is empty; give some text, or remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} contains a character that cannot be encoded: {error}; remove it") from error


IDS = "input_ids"
"""The column with the token ids of a row that is tokenised already; of pairs there are two, by side."""
SIDES = ("chosen", "rejected")
"""The sides of a pair."""
EncodedSide = tuple[list[int], list[bool]]
"""The token ids of a prompt with an output, and a mask of the output's tokens."""


class Shape(Protocol):
    """Another rule for the token ids of samples and pairs than truncation to a length: `trainkit.trainer.text.Text`."""

    lost: str
    """What rows that are too long lose, in words."""

    def __call__(self, *sides: EncodedSide) -> tuple[EncodedSide, ...]:
        """Return a sample, or both sides of a pair, as they are trained on; none is longer than the length limit."""


class EqualSidesError(DataError):
    """The sides of a pair are the same, as text, as tokens, or after truncation, so that it shows no preference."""


class NoOutputError(DataError):
    """Truncation leaves nothing of a sample's outputs."""


def encode_pair(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    limit: int | None,
    what: str = "the sample",
    *,
    ends: Collection[int] = (),
    scored: bool = False,
) -> tuple[EncodedSide, EncodedSide, bool]:
    """Encode both sides of a pair row; return them, and whether they were truncated to ``limit`` tokens.

    A pair that is too long loses the beginning of its prompt after BOS, the same part on both sides, so that the
    prompts stay equal. An output that is still too long loses its end and its EOS, or with the
    ``truncation_side`` ``"left"`` of the tokenizer its beginning; a first token that nothing precedes is not trained.
    ``ends`` are as for `encode_joint`. With ``scored``, for a model that scores whole sides and predicts no token, a
    tokenised side may be a single token, which nothing precedes.

    Raises:
        EqualSidesError: both sides have the same tokens.
        DataError: a text has no tokens, or a side has no output, or loses all of it.
    """
    if "chosen" in row:
        chosen, rejected = (
            encode_joint(tokenizer, row["prompt"], row[side], f"{what}: {side}", ends=ends) for side in SIDES
        )
    else:
        chosen, rejected = pair_sides(row)
    single = scored and not (any(chosen[1]) and any(rejected[1]))
    room = 0 if limit is None else max(len(ids) for ids, _ in (chosen, rejected)) - limit
    if room > 0:
        sides = chosen, rejected
        prompt = min(len(mask) - sum(mask) for _, mask in sides)
        kept = min(prompt, *(beginning(tokenizer, ids) for ids, _ in sides))
        gone = min(room, prompt - max(kept, 1))  # at least one prompt token stays
        chosen, rejected = (
            _cut(tokenizer, _end_of(ids, kept, len(ids) - gone), _end_of(mask, kept, len(ids) - gone), limit)
            for ids, mask in sides
        )
    check_sides(chosen, rejected, what, limit if room > 0 else None, single=single)
    return chosen, rejected, room > 0


def check_sides(
    chosen: EncodedSide, rejected: EncodedSide, what: str, limit: int | None = None, *, single: bool = False
) -> None:
    """Check that both sides of a pair have an output, and that they differ.

    Args:
        chosen: the one side.
        rejected: the other side.
        what: names the pair in errors.
        limit: the number of tokens to which they were truncated; None: they were not.
        single: whether a side need not have an output, because it was a single token.

    Raises:
        EqualSidesError: both sides have the same tokens.
        DataError: a side has no output.
    """
    same = chosen == rejected
    if same or not (single or (any(chosen[1]) and any(rejected[1]))):
        error = EqualSidesError if same else DataError
        raise error(
            f"{what} has {'the same tokens as chosen and as rejected' if same else 'a side without output'}"
            f"{'; remove it' if limit is None else f' within {limit} tokens; raise train.seq_length, or remove it'}"
        )


def pair_sides(row: Row) -> tuple[EncodedSide, EncodedSide]:
    """Return both sides of a tokenised pair; what follows their common beginning is output.

    At least one token is common, since nothing precedes the first one, and at least one of each side is output.
    """
    sides = [row[f"{IDS}_{side}"] for side in SIDES]
    most = min(map(len, sides)) - 1
    at = next((i for i in range(most) if sides[0][i] != sides[1][i]), most)
    chosen, rejected = ((ids, [i >= max(at, 1) for i in range(len(ids))]) for ids in sides)
    return chosen, rejected


def _cut(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool], limit: int | None) -> EncodedSide:
    """Return at most ``limit`` tokens with their mask, those of the side that ``truncation_side`` leaves."""
    if limit is None or len(ids) <= limit:
        return ids, mask
    if tokenizer.truncation_side == "right":
        return ids[:limit], mask[:limit]
    first = beginning(tokenizer, ids)
    mask = _end_of(mask, first, limit)
    return _end_of(ids, first, limit), [False, *mask[1:]]  # nothing precedes the first token, so it is not trained


def encode_pair_apart(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    limit: int | None,
    what: str = "the sample",
    *,
    ends: Collection[int] = (),
) -> tuple[EncodedSide, EncodedSide, bool]:
    """Do as `encode_pair` does, for a model that reads prompt and output separately (`encode_apart`).

    Raises:
        EqualSidesError: both sides have the same tokens.
        DataError: a text has no tokens.
    """
    _check_text_row(row, "chosen", what)
    chosen, rejected = (
        encode_apart(tokenizer, row["prompt"], row[side], limit, f"{what}: {side}", ends=ends) for side in SIDES
    )
    if chosen[:2] == rejected[:2]:
        within = f" within {limit} tokens" if chosen[2] else ""
        raise EqualSidesError(f"{what} has the same tokens as chosen and as rejected{within}; remove it")
    return chosen[:2], rejected[:2], chosen[2] or rejected[2]


def encode_joint(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    output: str,
    what: str = "the sample",
    *,
    ends: Collection[int] = (),
) -> EncodedSide:
    """Tokenise a prompt and an output as one text; return the token ids and a mask of the output's tokens.

    A token that spans the end of the prompt and the beginning of the output belongs to the output. If it is the
    first of all tokens, so that nothing would precede the output, the two are tokenised separately. BOS comes first if
    the tokenizer adds it and the text does not have it. EOS is appended to the output unless that ends with EOS, or
    with one of ``ends``, further token ids at which responses end.

    Raises:
        DataError: the prompt or the output has no tokens.
    """
    encode = PromptEncoder(tokenizer, None)
    ids = encode(prompt + output, what)
    count = _output_tokens(tokenizer, prompt, output, what)
    if count == len(ids):
        ids = encode(prompt, what)
        alone = encode_continuation(tokenizer, output, ids[-1], what)
        ids, count = [*ids, *alone], len(alone)
    if not count:
        raise DataError(f"{what} has an output without tokens, {describe(output)}; give text that the tokenizer keeps")
    if ids[-1] not in (tokenizer.eos_token_id, *ends):
        ids, count = [*ids, tokenizer.eos_token_id], count + 1
    return ids, [False] * (len(ids) - count) + [True] * count


def encode_apart(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    output: str,
    limit: int | None,
    what: str = "the sample",
    *,
    ends: Collection[int] = (),
) -> tuple[list[int], list[bool], bool]:
    """Tokenise a prompt for an encoder and an output for a decoder; return ids, output mask and whether truncated.

    The prompt is encoded as the tokenizer does, special tokens included. EOS is appended to the output as in
    `encode_joint`. Each may have ``limit`` tokens, the decoder's start token included: a longer prompt loses its
    beginning after BOS, a longer output its end, or with the ``truncation_side`` ``"left"`` of the tokenizer its
    beginning.

    Raises:
        DataError: the prompt or the output has no tokens.
    """
    query = PromptEncoder(tokenizer, None, ends=True)(prompt, what)
    response = encode_text(tokenizer, output, what)
    if not response:
        raise DataError(f"{what} has an output without tokens, {describe(output)}; give text that the tokenizer keeps")
    if response[-1] not in (tokenizer.eos_token_id, *ends):
        response = [*response, tokenizer.eos_token_id]
    cut = limit is not None and (len(query) > limit or len(response) >= limit)
    if limit is not None:
        right = tokenizer.truncation_side == "right"
        query = query if len(query) <= limit else _end_of(query, beginning(tokenizer, query), limit)
        response = response[: limit - 1] if right else response[1 - limit :]
    return [*query, *response], [False] * len(query) + [True] * len(response), cut


def one_output(row: Row, what: str = "the sample") -> tuple[str, str]:
    """Return the prompt and the output of a sample row.

    Raises:
        DataError: the row has no prompt, or several outputs.
    """
    _check_text_row(row, "turns", what)
    if row["outputs"] != [False, True]:
        raise DataError(
            f"{what} has {len(row['turns'])} turns, and an encoder-decoder reads one prompt and writes one output; "
            "give (prompt, output), with earlier turns in the prompt's text"
        )
    prompt, output = row["turns"]
    return prompt, output


def _check_text_row(row: Row, text: str, what: str) -> None:
    """Raise a `DataError` if a row for an encoder-decoder is tokenised, so that it lacks the column ``text``."""
    if text not in row:
        raise DataError(
            f"{what} has token ids, and an encoder-decoder reads prompt and output apart; give both as text"
        )


def _output_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, output: str, what: str) -> int:
    """Return how many of the last tokens of ``prompt + output`` contain text of the output."""
    text = prompt + output
    if not tokenizer.is_fast:  # no offsets: compare with the tokens of the prompt alone
        whole, alone = encode_text(tokenizer, text, what), encode_text(tokenizer, prompt, what)
        agree = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), len(alone))
        return len(whole) - agree
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    size = len(prompt)
    return sum([end > size for _, end in ends])


def encode_sample(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    limit: int | None,
    what: str = "the sample",
    *,
    ends: Collection[int] = (),
) -> tuple[list[int], list[bool]]:
    """Encode a sample row; return the token ids and a mask of the response tokens.

    Turns are encoded one by one, as in generation, so ids at a turn's boundary are the same in training and in
    inference. EOS, or one of ``ends`` as in `encode_joint`, ends the last output and is trained on, unless `cut_sample`
    cuts it off. A row that is tokenised already is returned as it is, up to ``limit``.

    Raises:
        DataError: a turn has no tokens, or no response token is left within ``limit``.
    """
    if "turns" not in row:  # it is tokenised, and used as it is
        return cut_sample(tokenizer, row[IDS], row["outputs"], limit, what)
    encoder = PromptEncoder(tokenizer, None)
    ids: list[int] = []
    chosen: list[bool] = []
    for text, is_output in zip(row["turns"], row["outputs"], strict=True):
        turn = encode_continuation(tokenizer, text, ids[-1], what) if ids else encoder._encode(text, what)
        if not turn:
            raise DataError(f"{what} holds {describe(text)}, which has no tokens; give text that the tokenizer keeps")
        if not ids and is_output:  # the first token has no predecessor, so it can only be predicted from BOS
            first = beginning(tokenizer, turn)
            if not first and tokenizer.bos_token_id is not None:
                turn = [tokenizer.bos_token_id, *turn]
            ids, turn = turn[: first or 1], turn[first or 1 :]
            chosen = [False] * len(ids)
        ids += turn
        chosen += [is_output] * len(turn)
    if ids[-1] not in (tokenizer.eos_token_id, *ends) or not chosen[-1]:
        ids.append(tokenizer.eos_token_id)
        chosen.append(True)
    return cut_sample(tokenizer, ids, chosen, limit, what)


def cut_sample(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], chosen: list[bool], limit: int | None, what: str = "the sample"
) -> EncodedSide:
    """Return the first ``limit`` tokens of a sample, or BOS and the last ones if the tokenizer truncates on the left.

    Raises:
        NoOutputError: no response token is left.
    """
    ids, chosen = _cut(tokenizer, ids, chosen, limit)
    if not any(chosen):
        raise NoOutputError(
            f"{what} has no output within the first {limit} tokens; shorten its prompt, raise train.seq_length, or set "
            "the tokenizer's truncation_side to 'left'"
        )
    return ids, chosen


def encode_within(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    limit: int | None,
    what: str = "the sample",
    *,
    is_encoder_decoder: bool = False,
    ends: Collection[int] = (),
) -> tuple[list[int], list[bool], bool]:
    """Encode a sample row within ``limit`` tokens, as `encode_apart` does if the model reads prompt and output apart.

    Return the token ids, a mask of the response tokens, and whether the sample was truncated.
    """
    if is_encoder_decoder:
        return encode_apart(tokenizer, *one_output(row, what), limit, what, ends=ends)
    whole, mask = encode_sample(tokenizer, row, None, what, ends=ends)
    ids, chosen = cut_sample(tokenizer, whole, mask, limit, what)
    return ids, chosen, len(ids) < len(whole)


def encode_pair_within(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    limit: int | None,
    what: str = "the sample",
    *,
    is_encoder_decoder: bool = False,
    ends: Collection[int] = (),
    scored: bool = False,
) -> tuple[EncodedSide, EncodedSide, bool]:
    """Encode a pair row by `encode_pair`, or `encode_pair_apart` if the model reads prompt and output apart."""
    if is_encoder_decoder:
        return encode_pair_apart(tokenizer, row, limit, what, ends=ends)
    return encode_pair(tokenizer, row, limit, what, ends=ends, scored=scored)


def lost_by_truncation(tokenizer: PreTrainedTokenizerBase, *, pairs: bool, is_encoder_decoder: bool) -> str:
    """Return what truncated samples lose, in words."""
    side = tokenizer.truncation_side
    end = "end" if side == "right" else "beginning"
    if pairs or is_encoder_decoder:
        which = "outputs" if is_encoder_decoder else "outputs that are still too long"
        what = f"prompts lose their beginning, and {which} their {end}"
    else:
        what = f"they lose their {end}"
    return f"{what} (the tokenizer's truncation_side is {side!r})"


def as_ids(value: Tensor | Sequence[int]) -> list[int]:
    """Return token ids, given as a 1-D tensor or a sequence, as a list of int.

    Raises:
        DataError: ``value`` is something else.
    """
    if isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point():
        return [int(i) for i in value.tolist()]
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(i, int) for i in value):
        return list(value)
    raise DataError(f"token ids should be a 1-D integer tensor or a list of int; given {describe(value)}")
