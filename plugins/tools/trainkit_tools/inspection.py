"""What training would make of a dataset: its columns, lengths and truncation, and the rows that it would refuse.

Rows are read, encoded and truncated by the functions that training uses (`trainkit.data.formats`,
`trainkit.data.pipeline`), each row by itself, so that all faults are found and not the first alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainkit.data.batches import Row, is_given
from trainkit.data.chat import PLAIN_TEMPLATE, SETTINGS, is_conversation
from trainkit.data.columns import STEPWISE, check_images, row_without, why_refused
from trainkit.data.formats import (
    ALPACA,
    EXPECTED,
    check_both_labels,
    columns_read,
    first_format,
    labelled,
    preference_rows,
    prompt_rows,
    prompted,
    recognise,
    sample_rows,
    taken_apart,
    unrendered,
    written_prompts,
)
from trainkit.data.images import IMAGE_COLUMNS, READERS, expanded
from trainkit.data.pipeline import (
    IDS,
    SIDES,
    EncodedSide,
    EqualSidesError,
    NoOutputError,
    PromptEncoder,
    encode_pair_within,
    encode_within,
    lost_by_truncation,
    pair_sides,
)
from trainkit.data.tokenised import COLUMNS, PAIR_COLUMNS
from trainkit.errors import DataError
from trainkit.seeding import SEEDED
from trainkit_tools.ahead import TokenizerAhead

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["samples", "rewards", "labels", "pairs", "prompts"]
"""What rows are read as: samples, samples with rewards or labels, pairs of samples, or prompts."""
KINDS: tuple[Kind, ...] = ("pairs", "labels", "rewards", "samples", "prompts")
EXPECTED_AS: dict[Kind, str] = {
    "samples": EXPECTED["sample"],
    "rewards": f"{EXPECTED['sample']}, and label or reward",
    "labels": f"{EXPECTED['sample']}, and label",
    "pairs": EXPECTED["pair"],
    "prompts": EXPECTED["prompt"],
}
"""The expected columns, by what the rows are read as."""
CHUNK = 1000
"""Rows that are encoded at once."""
SHOWN = 20
"""Rows whose indices are kept of a finding."""
DIFFERENT = 100
"""Different faults whose messages are kept."""
BARS = 12
"""Bars of a histogram."""
TOKENISED = (*COLUMNS, *PAIR_COLUMNS)
"""Columns of rows that are tokenised already."""


def kind_of(inputs: Collection[str]) -> Kind:
    """Return what the rows are for an algorithm that learns from ``inputs``."""
    return next(kind for kind in KINDS if kind in inputs)


def usual_kind(rows: Sequence[Any], ignored: Collection[str] = ()) -> Kind:
    """Return what rows are read as if no algorithm is named, by the format of the first row."""
    kinds: dict[str, Kind] = {
        "preference": "pairs",
        "implicit preference": "pairs",
        "tokenised preference": "pairs",
        "unpaired preference": "labels",
        "prompt-only": "prompts",
    }
    return kinds.get(first_format(rows, ignored) or "", "samples")


@dataclass(frozen=True)
class Reading:
    """How rows are read: the settings of a run that decide what becomes of them."""

    kind: Kind = "samples"
    """What the rows are."""
    columns: tuple[str, ...] = ()
    """Columns that the algorithm reads besides those of the formats."""
    ignored: tuple[str, ...] = ()
    """Columns that are removed from all rows, `data.ignore_columns`."""
    scored: bool = True
    """Whether a reward function or an environment gets the columns of prompts."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Without it, lengths are characters, and nothing is truncated."""
    limit: int | None = None
    """The largest number of tokens of a sample, or of a prompt that leaves room for the response."""
    is_encoder_decoder: bool = False
    """Whether the model reads prompt and output separately."""
    ends: tuple[int, ...] = ()
    """Token ids at which responses end, besides the tokenizer's EOS."""
    overlong: Literal["error", "truncate", "truncate_right", "drop"] = "error"
    """How prompts are handled that are too long, `rollout.overlong_prompts`."""
    needed: bool = True
    """Whether rows that are prompts need one; an environment may give it."""
    answered: bool = False
    """Whether the algorithm samples responses to the prompts of samples."""
    check: Callable[[Sequence[Row]], None] | None = None
    """Raises a `DataError` for rows that the algorithm refuses though their formats are right."""
    omitted: tuple[str, ...] = ()
    """What else training checks, in words."""

    @property
    def reads_images(self) -> bool:
        """Whether the model reads images."""
        return self.tokenizer is not None and self.tokenizer in READERS


@dataclass
class Found:
    """Rows with something in common."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    """The indices of the first of them."""
    message: str = ""
    """What is wrong with the first of them, if training refuses them."""

    def add(self, index: int) -> None:
        """Count one row more."""
        self.count += 1
        if len(self.rows) < SHOWN:
            self.rows.append(index)


@dataclass(frozen=True)
class Lengths:
    """The distribution of a length, before truncation."""

    least: int
    median: float
    mean: float
    percentile_95: float
    most: int
    bounds: list[int]
    """The limits of the histogram's bars, one more than there are bars; a bar includes its lower one alone."""
    counts: list[int]
    """The rows of each bar."""


Numbered = tuple[int, Row]
"""A row with its index."""
Part = tuple[str, bool]
"""A piece of a text, and whether it is trained on."""


@dataclass
class Inspection:
    """What training would make of the rows. Rows are numbered from 0."""

    rows: int = 0
    kind: Kind = "samples"
    formats: dict[str, int] = field(default_factory=dict)
    """The number of rows of each format."""
    columns: dict[str, dict[str, int]] = field(default_factory=dict)
    """By column, how many rows it is used in, by what becomes of it."""
    unit: str = "tokens"
    """What lengths are counted in: tokens, or characters without a tokenizer."""
    limit: int | None = None
    """The largest number of tokens; None if it is not known or there is none."""
    lengths: dict[str, Lengths] = field(default_factory=dict)
    """Lengths of prompts and outputs, and of both together."""
    words: dict[str, Lengths] = field(default_factory=dict)
    """The same in words, without a tokenizer."""
    lost: str = ""
    """What truncated rows lose, in words."""
    tokens_lost: int = 0
    """Tokens that truncation removes, of all rows."""
    labels: dict[str, int] = field(default_factory=dict)
    """How many rows are labelled true and false."""
    rewards: list[float] = field(default_factory=list)
    """The least, the mean and the largest reward; empty if nothing is learnt from rewards."""
    faults: list[Found] = field(default_factory=list)
    """What training refuses, with the rows it is true of; of the whole dataset if there are none."""
    refused: int = 0
    """Rows that training refuses."""
    findings: dict[str, Found] = field(default_factory=dict)
    """Rows with what training accepts and may not be meant, and where truncation leaves nothing to learn, by name."""
    example: dict[str, list[Part]] = field(default_factory=dict)
    """The text of one row after truncation, by side of a pair, in pieces."""
    example_row: int | None = None
    """The index of that row."""
    omitted: list[str] = field(default_factory=list)
    """What is not checked, in words."""


def inspect(
    rows: Sequence[Any], reading: Reading, *, shown: int | None = None, progress: Callable[[int], None] | None = None
) -> Inspection:
    """Return what training would make of the rows.

    Args:
        rows: the rows, as `trainkit.train` takes them.
        reading: how they are read.
        shown: the index of the row to return as an example; None: the first that is not refused.
        progress: called with the number of rows that have been read since the last call.
    """
    return _Inspector(reading, shown).run(rows, progress)


class _Inspector:
    """Reads rows in chunks; the texts of the next chunk are encoded in another thread."""

    def __init__(self, reading: Reading, shown: int | None) -> None:
        self.reading, self.shown = reading, shown
        self.found = Inspection(kind=reading.kind, limit=reading.limit, omitted=[*reading.omitted])
        self.lengths: dict[str, list[int]] = {}
        self.words: dict[str, list[int]] = {}
        self.scales = ((self.lengths, len), (self.words, _count_words))  # without a tokenizer
        self.kept: list[Row] = []  # for the algorithm's own check
        self.columns: dict[str, Counter[str]] = {}
        self.formats: Counter[str] = Counter()
        self.labels: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.faults: dict[str, Found] = {}
        self.seen: dict[Any, Any] = {}  # the label, by prompt and outputs
        self.asked: set[Any] = set()
        self._uses: dict[Any, tuple[str, dict[Any, str]]] = {}
        self._plain: PreTrainedTokenizerBase | None = None
        self.sides: dict[str, Any] = {"is_encoder_decoder": reading.is_encoder_decoder, "ends": reading.ends}
        self.eos = "" if reading.tokenizer is None else str(reading.tokenizer.eos_token)
        self.ahead: Any = None
        self.measured: int | None = None  # the index of the last row that was accepted
        if reading.tokenizer is None:
            self.found.unit = "characters"
            self.found.omitted.append("tokens, truncation and the chat template, which need the tokenizer of a model")
        else:
            self.ahead = TokenizerAhead(
                reading.tokenizer, offsets=reading.kind == "pairs" and not reading.is_encoder_decoder
            )
            lost = lost_by_truncation(
                reading.tokenizer, pairs=reading.kind == "pairs", is_encoder_decoder=reading.is_encoder_decoder
            )
            side = "end" if reading.overlong == "truncate_right" else "beginning"
            self.found.lost = f"prompts lose their {side}" if reading.kind == "prompts" else lost
            self.prompts = [
                PromptEncoder(self.ahead, limit, reading.overlong, ends=reading.is_encoder_decoder)
                for limit in (None, reading.limit)
            ]

    def run(self, rows: Sequence[Any], progress: Callable[[int], None] | None) -> Inspection:
        found = self.found
        found.rows = len(rows)
        with ThreadPoolExecutor(1) as pool:
            chunks = self._chunks(rows, pool)
            following = next(chunks, None)
            while following is not None:
                (count, read, encodings), following = following, next(chunks, None)
                if self.ahead is not None:
                    self.ahead.use(encodings.result())
                for index, row in read:
                    self._measure(index, row)
                if self.reading.check is not None:
                    self.kept += [row for _, row in read]
                if progress is not None:
                    progress(count)
        found.formats, found.labels = dict(self.formats.most_common()), dict(self.labels)
        found.columns = {name: dict(uses) for name, uses in self.columns.items()}
        found.lengths = {name: _distribution(lengths) for name, lengths in self.lengths.items()}
        found.words = {name: _distribution(lengths) for name, lengths in self.words.items()}
        if self.rewards:
            found.rewards = [min(self.rewards), math.fsum(self.rewards) / len(self.rewards), max(self.rewards)]
        found.faults = [*self._whole(rows), *self.faults.values()]
        return found

    def _chunks(self, rows: Sequence[Any], pool: ThreadPoolExecutor) -> Iterator[tuple[int, list[Numbered], Any]]:
        """Yield the number of rows in a chunk, those that can be read, and their encodings, in progress."""
        for first in range(0, len(rows), CHUNK):
            given = range(first, min(first + CHUNK, len(rows)))
            read = [(index, row) for index in given for row in self._converted(index, rows[index])]
            texts = [text for _, row in read for text in self._texts(row)]
            yield len(given), read, pool.submit(self.ahead.encoded, texts) if self.ahead is not None else None

    # ------------------------------------------------------------------------------------------------------- reading

    def _converted(self, index: int, raw: Any) -> list[Row]:
        """Return the row as it is before it is encoded, in a list; an empty one if it is refused."""
        row = row_without(raw, self.reading.ignored) if self.reading.ignored else raw
        talk = is_conversation(row) or (isinstance(row, Mapping) and any(map(is_conversation, row.values())))
        self._note_columns(raw, row, talk)
        try:
            rows = [part for row in self._rows([row], index, talk) for part in taken_apart(row)]
            if len(rows) > 1:
                self._find("apart", index)
            if talk and self.reading.tokenizer is not None:
                self._note_unrendered(index, unrendered(row, self.reading.tokenizer, f"row {index}"))
            return rows
        except EqualSidesError:
            self._find("equal", index)
            return []
        except DataError as error:
            self._refuse(index, error)
            return []

    def _note_unrendered(self, index: int, names: list[str]) -> None:
        for name in names:
            self._find(f"unrendered {name}", index)

    def _rows(self, rows: list[Any], first: int, talk: bool) -> list[Row]:
        """Do what the trainer does to read rows: see `trainkit.trainer.text.AccelerateRLTrainer.read_samples`."""
        reading = self.reading
        tokenizer = self._plain_tokenizer() if talk and reading.tokenizer is None else reading.tokenizer
        if reading.kind == "prompts":
            made = prompt_rows(rows, needed=reading.needed, first=first)
            for index, row in enumerate(made, first):
                check_images(row, reading.reads_images, f"prompt {index}")
            made = made if tokenizer is None else written_prompts(made, tokenizer, first=first)
            return self._illustrated(made, first, "prompt")
        if reading.kind == "pairs":
            made = preference_rows(rows, tokenizer, first=first, columns=reading.columns, ends=reading.ends)
            return self._illustrated(made, first, "sample")
        rated = reading.kind in ("rewards", "labels")
        made = sample_rows(rows, None, tokenizer, rated=rated, first=first, columns=reading.columns, ends=reading.ends)
        made = self._illustrated(made, first, "sample")
        made = labelled(made, first=first) if reading.kind == "labels" else made
        return prompted(made, first=first) if reading.answered else made

    def _illustrated(self, rows: list[Row], first: int, name: str) -> list[Row]:
        """Return rows whose placeholders are as long as their images, if a model reads these."""
        tokenizer = self.reading.tokenizer
        if tokenizer is None or not self.reading.reads_images:
            return rows
        return [expanded(tokenizer, row, f"{name} {index}")[0] for index, row in enumerate(rows, first)]

    def _plain_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return a tokenizer with the plain chat template, by which conversations are checked without a model."""
        if self._plain is None:
            from tokenizers import Tokenizer, models
            from transformers import PreTrainedTokenizerFast

            whole = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
            self._plain = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<eos>")
            self._plain.chat_template, self.eos = PLAIN_TEMPLATE, "<eos>"
        return self._plain

    def _note_columns(self, raw: Any, row: Any, talk: bool) -> None:
        """Count the row's format, and what becomes of its columns."""
        if not isinstance(row, Mapping):
            self.formats["messages" if is_conversation(row) else "text" if isinstance(row, str) else "turns"] += 1
            return
        key = tuple(raw), talk, repr(row["label"]) if "label" in row else None  # what the format follows from
        if key not in self._uses:
            uses = {name: _use(name, row, self.reading, talk) for name in raw}
            self._uses[key] = recognise(row) or "no known format", uses
        form, uses = self._uses[key]
        self.formats[form] += 1
        for name, use in uses.items():
            if is_given(raw[name]):
                self.columns.setdefault(str(name), Counter())[use] += 1

    def _refuse(self, index: int, error: DataError) -> None:
        message = str(error)
        alike = (
            message.replace(f"sample {index}", "sample").replace(f"prompt {index}", "prompt").partition("; given ")[0]
        )
        if alike not in self.faults and len(self.faults) >= DIFFERENT:
            alike = "others"
            message = "other faults"
        self.faults.setdefault(alike, Found(message=message)).add(index)
        self.found.refused += 1

    def _whole(self, rows: Sequence[Any]) -> Iterator[Found]:
        """Yield what training refuses of the whole dataset."""
        try:
            if not len(rows):
                self._rows([], 0, talk=False)
            if self.reading.kind == "labels" and self.labels:
                check_both_labels(self.labels["true"], self.labels["false"])
            equal, dropped = self.found.findings.get("equal", Found()), self.found.findings.get("dropped")
            if len(rows) and equal.count == len(rows):
                raise DataError(f"all {len(rows)} pairs have the same chosen and rejected output; give others")
            if dropped is not None and dropped.count == len(rows):
                raise DataError(f"all {len(rows)} prompts are longer than {self.reading.limit} tokens and are dropped")
            if self.reading.check is not None and not self.found.refused:
                self.reading.check(self.kept)
            elif self.reading.check is not None:
                self.found.omitted.append("what the method checks itself of its samples, until all rows are accepted")
        except DataError as error:
            yield Found(message=str(error))

    # ----------------------------------------------------------------------------------------------------- measuring

    def _texts(self, row: Row) -> list[str]:
        """Return the texts that are encoded of a row."""
        if self.reading.kind == "prompts":
            return [] if row.get("prompt") is None else [row["prompt"]]
        if _is_tokenised(row):
            return []
        if self.reading.kind != "pairs":
            return list(row["turns"])
        sides = [row["chosen"], row["rejected"]]
        return [row["prompt"], *sides] if self.reading.is_encoder_decoder else [row["prompt"] + side for side in sides]

    def _measure(self, index: int, row: Row) -> None:
        """Encode the row, and count what is found in it."""
        kind = self.reading.kind
        measure = {"prompts": self._measure_prompt, "pairs": self._measure_pair}.get(kind, self._measure_sample)
        if kind != "prompts" and _is_tokenised(row) and self.ahead is None:
            measure = self._measure_ids
        try:
            measure(index, row)
        except EqualSidesError:
            self._find("equal", index)
            return
        except DataError as error:
            if isinstance(error, NoOutputError) and self.measured == index:  # others of its answers have room
                self._find("truncated", index)
                return
            self._refuse(index, error)
            return
        self.measured = index
        self._note_repeated(index, row)
        if kind == "labels":
            self.labels["true" if row["label"] else "false"] += 1
        elif kind == "rewards":
            self.rewards.append(row["reward"])

    def _find(self, name: str, index: int) -> None:
        self.found.findings.setdefault(name, Found()).add(index)

    def _note_cut(self, index: int, lost: int) -> None:
        if lost:
            self._find("truncated", index)
            self.found.tokens_lost += lost

    def _shows(self, index: int) -> bool:
        """Return whether the row is the example."""
        if wanted := self._wants(index):
            self.found.example_row = index
        return wanted

    def _measure_ids(self, index: int, row: Row) -> None:
        """Note the lengths of a tokenised row, without a tokenizer."""
        self.found.unit = "tokens"
        if self.reading.kind == "pairs":
            (ids, mask), (_, others) = pair_sides(row)
            prompt, chosen, rejected = len(ids) - sum(mask), sum(mask), sum(others)
            _note(self.lengths, prompt=prompt, chosen=chosen, rejected=rejected, whole=prompt + max(chosen, rejected))
        else:
            trained = sum(row["outputs"])
            _note_sides(self.lengths, len(row[IDS]) - trained, trained, asked=True)

    def _measure_sample(self, index: int, row: Row) -> None:
        turns, outputs = row.get("turns", []), row["outputs"] if "turns" in row else []
        parts = list(zip(turns, outputs, strict=True))
        if self.ahead is None:
            for lengths, size in self.scales:
                sizes = [sum(size(text) for text, out in parts if out == side) for side in (False, True)]
                _note_sides(lengths, *sizes, asked=not all(outputs))
        else:
            whole, mask, _ = encode_within(self.ahead, row, None, f"sample {index}", **self.sides)
            trained = sum(mask)
            _note_sides(self.lengths, len(mask) - trained, trained, asked=not outputs or not all(outputs))
            ids, chosen = self._within(index, row, whole, mask)
            self._note_cut(index, len(whole) - len(ids))
            parts = self._pieces(ids, chosen) if self._wants(index) else []
        if self._shows(index):
            shown = len(self.found.example)
            self.found.example[f"sample, row {shown + 1}" if shown else "sample"] = parts
        if not all(self._says(text) for text, out in zip(turns, outputs, strict=True) if out):
            self._find("empty", index)

    def _within(self, index: int, row: Row, whole: list[int], mask: list[bool]) -> EncodedSide:
        """Return ids and mask of a sample after truncation."""
        limit = self.reading.limit
        if limit is None or len(whole) < limit:
            return whole, mask
        try:
            return encode_within(self.ahead, row, limit, f"sample {index}", **self.sides)[:2]
        except DataError:
            if self.measured != index:
                self._find("no room", index)
            raise

    def _measure_pair(self, index: int, row: Row) -> None:
        given: Any = [row.get(name) for name in ("prompt", "chosen", "rejected")]
        prompt, chosen, rejected = given
        if self.ahead is None:
            for lengths, size in self.scales:
                asked, good, bad = map(size, (prompt, chosen, rejected))
                _note(lengths, prompt=asked, chosen=good, rejected=bad, whole=asked + max(good, bad))
            parts = {"chosen": [(prompt, False), (chosen, True)], "rejected": [(prompt, False), (rejected, True)]}
        else:
            *whole, _ = encode_pair_within(self.ahead, row, None, f"sample {index}", **self.sides)
            (ids, mask), (others, other_mask) = whole
            _note(
                self.lengths,
                prompt=len(ids) - sum(mask),
                chosen=sum(mask),
                rejected=sum(other_mask),
                whole=max(len(ids), len(others)),
            )
            sides = self._pair_within(index, row, whole)
            self._note_cut(index, sum(len(side[0]) for side in whole) - sum(len(side[0]) for side in sides))
            wanted = zip(("chosen", "rejected"), sides, strict=True) if self._wants(index) else ()
            parts = {name: self._pieces(*side) for name, side in wanted}
        if self._shows(index):
            self.found.example = parts
        if not (_is_tokenised(row) or (self._says(chosen) and self._says(rejected))):
            self._find("empty", index)

    def _pair_within(self, index: int, row: Row, whole: list[EncodedSide]) -> list[EncodedSide]:
        """Return both sides after truncation."""
        limit = self.reading.limit
        if limit is None or max(len(ids) for ids, _ in whole) < limit:
            return whole
        return list(encode_pair_within(self.ahead, row, limit, f"sample {index}", **self.sides)[:2])

    def _measure_prompt(self, index: int, row: Row) -> None:
        prompt = row.get("prompt")
        if prompt is None:
            self._find("no prompt", index)
            parts = []
        elif self.ahead is None:
            for lengths, size in self.scales:
                _note(lengths, prompt=size(prompt))
            parts = [(prompt, False)]
        else:
            whole = self.prompts[0](prompt, f"prompt {index}")
            _note(self.lengths, prompt=len(whole))
            overlong, limit = self.reading.overlong, self.reading.limit
            if limit is not None and len(whole) > limit and not overlong.startswith("truncate"):
                self._find("dropped" if overlong == "drop" else "no room", index)
                if overlong == "drop":
                    return
            ids = self.prompts[1](prompt, f"prompt {index}", may_drop=True)
            self._note_cut(index, len(whole) - len(ids))
            parts = [(self._decode(ids), False)] if self._wants(index) else []
        if (prompt is not None or index == self.shown) and self._shows(index):
            self.found.example["prompt"] = parts

    def _wants(self, index: int) -> bool:
        return index == self.shown or (self.shown is None and self.found.example_row in (None, index))

    def _says(self, text: str) -> bool:
        """Return whether an output is more than blanks and EOS."""
        return bool(text.replace(self.eos, "").strip() if self.eos else text.strip())

    def _pieces(self, ids: list[int], mask: list[bool]) -> list[Part]:
        """Return the text of token ids, in pieces that are trained on or not."""
        starts = [at for at in range(len(mask)) if not at or mask[at] != mask[at - 1]]
        pieces, before = [], ""
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            text, alone = self._decode(ids[:end]), self._decode(ids[start:end])
            pieces.append((text[len(before) :] if text.startswith(before) else alone, mask[start]))
            before = text
        return pieces

    def _decode(self, ids: list[int]) -> str:
        assert self.reading.tokenizer is not None
        return str(self.reading.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    # ---------------------------------------------------------------------------------------------------- repetition

    def _note_repeated(self, index: int, row: Row) -> None:
        """Count rows that are the same as one before, or differ only in the output or the label."""
        asked, answers, label = self._learnt(row)
        key = asked, answers
        if key in self.seen:
            self._find("duplicate" if self.seen[key] == label else "contradictory", index)
        elif self.reading.kind == "pairs" and (asked, answers[::-1]) in self.seen:
            self._find("contradictory", index)
        elif asked and asked in self.asked:
            self._find("repeated prompt", index)
        self.seen.setdefault(key, label)
        self.asked.add(asked)

    def _learnt(self, row: Row) -> tuple[Any, tuple[Any, ...], Any]:
        """Return prompt, outputs and label of a row; of a prompt, its other columns in the place of outputs."""
        if self.reading.kind == "pairs" and _is_tokenised(row):
            (ids, mask), (others, _) = pair_sides(row)
            start = mask.index(True)
            return tuple(ids[:start]), (tuple(ids[start:]), tuple(others[start:])), None
        if self.reading.kind == "pairs":
            return row["prompt"], (row["chosen"], row["rejected"]), None
        if self.reading.kind == "prompts":
            return row.get("prompt"), tuple((name, repr(row[name])) for name in sorted(row) if name != "prompt"), None
        start = row["outputs"].index(True)
        rating = row.get("label", row.get("reward")) if self.reading.kind in ("labels", "rewards") else None
        parts = row["turns"] if "turns" in row else row[IDS]
        return tuple(parts[:start]), tuple(parts[start:]), rating


def _is_tokenised(row: Row) -> bool:
    return "turns" not in row and "chosen" not in row


def _count_words(text: str) -> int:
    return len(text.split())


def _note(lengths: dict[str, list[int]], **found: int) -> None:
    for name, length in found.items():
        lengths.setdefault(name, []).append(length)


def _note_sides(lengths: dict[str, list[int]], prompt: int, output: int, *, asked: bool) -> None:
    """Note the lengths of a sample, which has a prompt only if it is ``asked``."""
    _note(lengths, **({"prompt": prompt} if asked else {}), output=output, whole=prompt + output)


def _distribution(lengths: list[int]) -> Lengths:
    values = np.asarray(lengths)
    least, most = int(values.min()), int(values.max())
    width = -(-(most - least + 1) // BARS)  # whole numbers, the same for each bar
    bounds = [*range(least, most + 1, width)]
    bounds.append(bounds[-1] + width)
    counts, _ = np.histogram(values, bins=bounds)
    return Lengths(
        least=least,
        median=float(np.median(values)),
        mean=round(float(values.mean()), 2),
        percentile_95=round(float(np.percentile(values, 95)), 2),
        most=most,
        bounds=bounds,
        counts=counts.tolist(),
    )


def _use(name: Any, row: Mapping[str, Any], reading: Reading, talk: bool) -> str:
    """Return what becomes of a column of a row, which lacks those that are ignored; ``talk``: it has conversations."""
    if name not in row:
        return "removed by data.ignore_columns"
    roles = _roles(row, reading)
    if name in roles:
        return roles[name]
    if name in reading.columns:
        return "read by the method"
    if talk and name in SETTINGS:
        return "given to the chat template"
    if name in IMAGE_COLUMNS:
        return "read by the model's processor" if reading.reads_images else "refused"
    if reading.kind == "prompts":
        kept = "given to reward functions, metric functions and environments" if reading.scored else "not read"
        return "refused" if _refused_of_prompt(name, row, reading.needed) else kept
    return "refused" if why_refused(str(name), row) else "not read"


def _refused_of_prompt(name: Any, row: Mapping[str, Any], needed: bool) -> bool:
    """Return whether a prompt with such a column is refused, whatever the text of the prompt."""
    together = {"prompt", name, *(STEPWISE if name in STEPWISE else ())} & row.keys()
    try:
        prompt_rows([dict.fromkeys(together, "text")], needed=needed)
    except DataError:
        return True
    return False


def _roles(row: Mapping[str, Any], reading: Reading) -> dict[Any, str]:
    """Return the columns that the row's format has, and what they are."""
    if reading.kind == "prompts":
        return {"prompt": "prompt", **dict.fromkeys(SEEDED, "seed")}
    if recognise(row) in ("tokenised", "tokenised preference"):
        used = {name: "token ids" if name.startswith(IDS) else name.replace("_", " ") for name in TOKENISED}
        return {name: use for name, use in used.items() if name.endswith(SIDES) == (reading.kind == "pairs")}
    if reading.kind == "pairs":
        return {name: name for name in ("prompt", "chosen", "rejected")}
    *asked, output = columns_read(row) or (None,)
    spoken = {"messages": "messages; those of the assistant are output", "text": "output, all of it"}
    spoken["conversations"] = spoken["messages"]
    roles: dict[Any, str] = {**dict.fromkeys(asked, "prompt"), output: spoken.get(str(output), "output")}
    if (*asked, output) == ALPACA:
        roles["text"] = "not read; it repeats prompt and output"
    if recognise(row) == "unpaired preference":
        roles["label"] = {"labels": "label", "rewards": "reward"}.get(reading.kind, "refused")
    elif reading.kind in ("labels", "rewards"):
        roles["reward"] = {"labels": "label", "rewards": "reward"}[reading.kind]
    return roles
