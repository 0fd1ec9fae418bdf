"""Dataset formats: how the columns of a row decide its format, and what the row is read as.

========================  =========================================  =========================================
format                    columns                                    read as
========================  =========================================  =========================================
language modelling        ``text``, or ``messages``                  a sample
... of ShareGPT           ``conversations``                          a sample
prompt-completion         ``prompt`` and ``completion`` or           a sample
                          ``output``
... of Alpaca             ``instruction``, ``output``, and mostly    a sample
                          ``input``
unpaired preference       these and ``label``, true or false         a sample with the reward 1 or 0
preference                ``prompt``, ``chosen``, ``rejected``       a pair
... with implicit prompt  ``chosen``, ``rejected`` with a common     a pair
                          beginning
tokenised                 ``input_ids``, and mostly                  a sample
                          ``attention_mask``, ``labels``
tokenised preference      ``input_ids_chosen``,                      a pair
                          ``input_ids_rejected``
prompt-only               ``prompt``                                 a prompt
========================  =========================================  =========================================

The values are text, or conversations: lists of ``{"role": ..., "content": ...}`` or, as in ShareGPT, ``{"from": ...,
"value": ...}``, which the tokenizer's chat template renders as text. Further columns are kept, unless they show that a
row is not what it is read as (`trainkit.data.columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainkit.data.batches import GIVEN, Row, is_given
from trainkit.data.chat import SETTINGS, Chat, is_conversation, plain_messages
from trainkit.data.columns import (
    KNOWN,
    STEPWISE,
    check_columns,
    check_images,
    check_prompt_columns,
    listed,
    row_without,
)
from trainkit.data.images import IMAGE_COLUMNS, READERS, given_images, with_images
from trainkit.data.pipeline import IDS, SIDES, EqualSidesError, check_text, is_stream
from trainkit.data.tokenised import COLUMNS as TOKENISED
from trainkit.data.tokenised import PAIR_COLUMNS as TOKENISED_PAIR
from trainkit.data.tokenised import tokenised_pair, tokenised_row
from trainkit.errors import DataError, describe
from trainkit.seeding import SEEDED, check_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
Prompts = Iterable[Prompt]
"""The prompts of `trainkit.train`: strings, lists of messages, or dicts with one of these under ``prompt``."""
Format = Literal[
    "language modelling",
    "prompt-completion",
    "unpaired preference",
    "preference",
    "implicit preference",
    "tokenised",
    "tokenised preference",
    "prompt-only",
]

OUTPUTS = ("completion", "output")
"""The allowed names of the column with an output."""
EXPECTED = {
    "sample": (
        "text | messages | conversations (language modelling), prompt and completion or output | instruction, input, "
        "output (prompt-completion) | input_ids (tokenised)"
    ),
    "pair": (
        "prompt, chosen, rejected (preference) | chosen, rejected with a common beginning (implicit prompt) | "
        "input_ids_chosen, input_ids_rejected (tokenised)"
    ),
    "prompt": "prompt (prompt-only)",
}
"""The expected columns, by what the row is read as."""
ALPACA = ("instruction", "input", "output")
"""The columns of Alpaca's rows, in which ``input`` may be empty or missing."""
ALPACA_PROMPT = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
"""The text of an Alpaca row's prompt, for tokenizers without a chat template."""


def plain(value: Any) -> Any:
    """Return a scalar of NumPy or torch as a Python number, anything else unchanged."""
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0 else value


def finite(value: Any) -> float | None:
    """Return ``value`` (Python's, NumPy's, or a tensor []) as a float, or None if float32 cannot hold it."""
    value = plain(value)
    is_finite = isinstance(value, bool | int | float) and abs(value) <= torch.finfo(torch.float32).max  # false for NaN
    return float(value) if is_finite else None


def _is_label(value: Any) -> bool:
    """Return whether ``value`` is a label: true or false, 1 or 0, of Python, NumPy or torch."""
    return finite(value) in (0.0, 1.0)


def recognise(row: Mapping[str, Any]) -> Format | None:
    """Return the format of a row by its columns; None if no format has them."""
    sides = {"chosen", "rejected"} & row.keys()
    if sides:
        whole: Format = "preference" if "prompt" in row else "implicit preference"
        return whole if len(sides) == 2 else None
    read = columns_read(row)
    if len(read) > 1:
        return "unpaired preference" if _is_label(row.get("label")) else "prompt-completion"
    if read:
        return "language modelling"
    if row.keys() >= {f"{IDS}_{side}" for side in SIDES}:
        return "tokenised preference"
    if IDS in row and "prompt" not in row:
        return "tokenised"
    return "prompt-only" if "prompt" in row and not row.keys() >= STEPWISE else None


def columns_read(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that a row is read from as a sample: an output, with its prompt if there is one."""
    if {"instruction", "output"} <= row.keys() and "prompt" not in row:
        return ALPACA
    output = next((name for name in (*OUTPUTS, "messages", "conversations", "text") if name in row), None)
    if output is None:
        return ()
    return ("prompt", output) if output in OUTPUTS and "prompt" in row else (output,)


# ---------------------------------------------------------------------------------------------------------- prompts


def prompt_rows(prompts: Prompts, *, needed: bool = True, replayed: bool = False, first: int = 0) -> list[Row]:
    """Return prompts as rows ``{"prompt": ..., **columns}``; the caller's dicts are copied, not changed.

    A prompt is text or a conversation, or a dict with one of them under ``prompt``. Unless prompts are ``needed``, a
    dict may lack it: an environment gives the prompt. Rows that are ``replayed`` may have ``episode_seed``.
    ``first`` is the index of the first prompt in error messages.

    Raises:
        DataError: there are no prompts, or one is not text, is empty or cannot be encoded, or its columns show that it
            is no prompt; names its index.
    """
    if callable(prompts):
        raise DataError(
            f"prompts should be a list, so that a run can be resumed; given {describe(prompts)}. Call it beforehand: "
            "[prompt_function() for _ in range(1000)], or where it returns pairs "
            '[{"prompt": prompt, **columns} for prompt, columns in (prompt_function() for _ in range(1000))]'
        )
    check_list(prompts, "prompt")
    rows = []
    for index, prompt in enumerate(prompts, first):
        row: Row = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        if "prompt" not in row and needed:
            raise _wrong(row, "prompt", f"prompt {index}")
        check_prompt_columns(row, f"prompt {index}")
        if is_conversation(row.get("prompt")):
            row["prompt"] = plain_messages(row["prompt"], f"prompt {index}", images=True)
        elif needed or row.get("prompt") is not None:
            check_text(row["prompt"], f"prompt {index}", "a string, or a dict with the key 'prompt'")
        if taken := [name for name in row if name in GIVEN and not (replayed and name == "episode_seed")]:
            raise DataError(
                f"prompt {index} has a column {taken[0]!r}, and trainkit gives reward functions or environments "
                f"{', '.join(GIVEN)} itself; rename the column"
            )
        for column in SEEDED:
            check_seed(row.get(column), f"prompt {index}", column)
        rows.append(row)
    if not rows:
        raise DataError("prompts is empty; give at least one prompt")
    return rows


def written_prompts(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, first: int = 0) -> list[Row]:
    """Render the conversations among the rows as text that ends where the assistant's answer begins.

    Their images are then in the column ``images``. ``first`` is the index of the first row in error messages.
    """
    return [_written(row, tokenizer, f"prompt {index}") for index, row in enumerate(rows, first)]


def _written(row: Row, tokenizer: PreTrainedTokenizerBase, what: str) -> Row:
    check_images(row, tokenizer in READERS, what)
    prompt, images = row.get("prompt"), given_images(row, what)
    if not is_conversation(prompt):
        return with_images(row, images) if images else row
    chat = Chat(tokenizer, row, what)
    return _illustrated({**row, "prompt": chat.prompt(prompt)}, chat, prompt)


def _illustrated(row: Row, chat: Chat, messages: Sequence[Mapping[str, Any]]) -> Row:
    """Return a row of rendered messages with their images."""
    images = chat.images(messages) if chat.reads_images else None
    if images and "apart" in row:
        raise DataError(
            f"{chat.what} has images, and answers that the chat template writes differently when others follow; give "
            "each of these answers in a row of its own"
        )
    return row if images is None else with_images(row, images)


# ---------------------------------------------------------------------------------------------------------- samples


def sample_rows(
    samples: Iterable[Any],
    rewards: Iterable[Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    rated: bool = False,
    first: int = 0,
    columns: Collection[str] = (),
    ends: Collection[int] = (),
) -> list[Row]:
    """Return samples as rows ``{"turns": [text, ...], "outputs": [bool, ...]}``, with ``"reward"`` if given.

    Those that are tokenised become ``{"input_ids": [int, ...], "outputs": [bool, ...]}``. A row whose chat template
    writes answers differently when others follow has a row for each of these in ``"apart"``; see `taken_apart`.

    A sample is text (all of it is an output), alternating turns ``(prompt, output)`` or ``[prompt, output, prompt,
    output ...]``, a conversation, or a dict of a format that is read as a sample, whose other keys are kept.

    Args:
        samples: the samples.
        rewards: one number per sample.
        tokenizer: its chat template renders conversations.
        rated: whether every sample needs a reward: a column ``reward``, or the label of an unpaired preference.
        first: the index of the first sample in error messages.
        columns: further columns that the caller reads.
        ends: token ids at which responses end, besides EOS; they end outputs in conversations.

    Raises:
        DataError: there are no samples, one has another form or a column of another form that nothing reads, or the
            number of rewards differs; names its index.
    """
    check_list(samples, "sample")
    rows = [
        sample_row(sample, f"sample {index}", tokenizer, rated=rated, columns=columns, ends=ends)
        for index, sample in enumerate(samples, first)
    ]
    if not rows:
        raise DataError("samples is empty; give at least one sample")
    parted = [index for index, row in enumerate(rows, first) if "apart" in row]
    if parted and (rated or rewards is not None):
        raise DataError(
            f"sample {parted[0]} has answers that the chat template writes differently when others follow, so that "
            "each has to be trained on by itself, and one reward or label for all of them; give samples with one "
            "answer, as prompt and completion"
        )
    if rewards is not None:
        return _rewarded(rows, list(rewards))
    if rated and (missing := [index for index, row in enumerate(rows) if "reward" not in row]):
        label = rows[missing[0]].get("label")
        reason = (
            f"its label is {describe(label)}, and labels are true or false, or 1 and 0; " if is_given(label) else ""
        )
        raise DataError(
            f"sample {first + missing[0]} has no reward; {reason}give rewards, one per sample, or a column 'label' or "
            "'reward'"
        )
    return rows


def labelled(rows: list[Row], *, first: int = 0) -> list[Row]:
    """Return rated samples with a ``label``, a bool, in the place of their reward.

    Raises:
        DataError: a reward is neither 1 nor 0; names its index.
    """
    for index, row in enumerate(rows, first):
        if "turns" not in row:
            raise DataError(
                f"sample {index} has token ids; outputs are compared with those of other prompts here: give prompt and "
                "completion as text"
            )
        if not _is_label(row["reward"]):
            raise DataError(f"sample {index}: label should be true or false, or 1 or 0; given {row['reward']:g}")
    return [{**{k: v for k, v in row.items() if k != "reward"}, "label": bool(row["reward"])} for row in rows]


def prompted(rows: list[Row], *, first: int = 0) -> list[Row]:
    """Return samples with the ``prompt`` of each, the text before its output, to which the policy answers itself.

    Raises:
        DataError: a sample has no prompt, several outputs, or token ids; names its index.
    """
    for index, row in enumerate(rows, first):
        if row["outputs"] != [False, True] or "turns" not in row:
            what = f"{len(row['turns'])} turns" if "turns" in row else "token ids"
            raise DataError(
                f"sample {index} has {what}, and the algorithm samples a response to the prompt of each sample; give "
                "(prompt, output), with earlier turns in the prompt, or an algorithm that learns from samples alone"
            )
    return [{**row, "prompt": row["turns"][0]} for row in rows]


def check_both_labels(good: int, bad: int) -> None:
    """Raise a `DataError` unless there are samples labelled true, ``good`` many, and false, ``bad`` many."""
    if not good or not bad:
        raise DataError(
            f"all {good + bad} samples are labelled {bool(good)}, and the algorithm needs desirable samples (label "
            "True) and undesirable ones (False). Add samples with the other label, or train on the desirable ones with "
            "method 'sft'"
        )


def _rewarded(rows: list[Row], rewards: list[Any]) -> list[Row]:
    if any("reward" in row for row in rows):
        raise DataError("rewards are given, and the samples have labels or rewards too; give one of the two")
    if len(rewards) != len(rows):
        raise DataError(f"there are {len(rows)} samples and {len(rewards)} rewards; give one reward per sample")
    read = [finite(reward) for reward in rewards]
    if None in read:
        index = read.index(None)
        raise DataError(f"reward {index} should be a finite number; given {describe(rewards[index])}")
    return [{**row, "reward": reward} for row, reward in zip(rows, read, strict=True)]


def sample_row(
    sample: Any,
    what: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    rated: bool = False,
    columns: Collection[str] = (),
    ends: Collection[int] = (),
) -> Row:
    """Return one sample as a row of `sample_rows`."""
    if is_conversation(sample):
        chat = Chat(tokenizer, {}, what, ends=ends)
        return _illustrated(_spans({}, *chat.samples(sample)), chat, sample)
    if not isinstance(sample, Mapping):
        return _turns({}, list(sample) if isinstance(sample, list | tuple) else [sample], what)
    form, names = recognise(sample), columns_read(sample)
    if form == "tokenised":
        check_columns(sample, (*TOKENISED, *columns), what)
        row = tokenised_row(sample, what, tokenizer)
        return _rated(row, labelled=False, what=what) if rated else row
    if form not in ("language modelling", "prompt-completion", "unpaired preference"):
        raise _wrong(sample, "sample", what)
    if form == "unpaired preference" and not rated:
        raise _wrong(sample, "sample", what, ' if row["label"]')
    parts = _alpaca(sample, what, tokenizer) if names == ALPACA else [_cell(sample, name, what) for name in names]
    talk = is_conversation(parts[-1])
    also = (*(("text",) if names == ALPACA else ()), *_images_read(tokenizer))  # Alpaca's has the whole text, too
    check_columns(sample, (*names, *also, *(SETTINGS if talk else ()), *columns), what)
    kept = {key: value for key, value in sample.items() if key not in names}
    if rated:
        kept = _rated(kept, form == "unpaired preference", what)
    _check_alike(what, *parts)
    if talk:
        asked, chat = parts[0] if len(parts) > 1 else [], Chat(tokenizer, sample, what, ends=ends)
        whole = [*asked, *parts[-1]]
        return _illustrated(_spans(kept, *chat.samples(whole, first=len(asked))), chat, whole)
    row = _turns(kept, parts, what)
    return with_images(row, given_images(sample, what)) if _images_read(tokenizer) else row


def _images_read(tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    """Return the columns with images, if the model reads them."""
    return IMAGE_COLUMNS if tokenizer is not None and tokenizer in READERS else ()


def _cell(row: Mapping[str, Any], name: str, what: str) -> Any:
    """Return the text or the conversation in a column of a sample."""
    cell = row[name]
    if is_conversation(cell):
        return cell
    if name in ("messages", "conversations"):
        hint = "; if it is JSON in text, convert it by json.loads" if isinstance(cell, str) else ""
        raise DataError(
            f"{what}: {name} should be a list of messages, dicts with 'role' and 'content'; given "
            f"{describe(cell)}{hint}"
        )
    check_text(cell, f"{what}: {name}", "text, or a list of messages")
    return cell


def _rated(columns: Row, labelled: bool, what: str) -> Row:
    """Return the columns of a sample that needs a reward, with what its reward or label gives in the place of both."""
    reward, has_reward = columns.get("reward"), is_given(columns.get("reward"))
    if has_reward and labelled:
        raise DataError(f"{what} has a reward and a label; list one of the two in data.ignore_columns")
    if has_reward and finite(reward) is None:
        raise DataError(f"{what}: reward should be a finite number; given {describe(reward)}")
    kept = {key: value for key, value in columns.items() if key != "reward" and not (labelled and key == "label")}
    return {**kept, "reward": finite(columns["label"] if labelled else reward)} if has_reward or labelled else kept


def _alpaca(row: Mapping[str, Any], what: str, tokenizer: PreTrainedTokenizerBase | None) -> list[Any]:
    """Return prompt and output of an Alpaca row: messages if the tokenizer has a chat template, otherwise text."""
    texts = [row[name] for name in ALPACA if name != "input" or row.get(name)]
    for text in texts:
        check_text(text, what)
    *asked, output = texts
    if tokenizer is not None and tokenizer.chat_template:
        return [[{"role": "user", "content": "\n".join(asked)}], [{"role": "assistant", "content": output}]]
    instruction, *context = asked
    paired = ", paired with an input that provides further context" if context else ""
    return [ALPACA_PROMPT.format(paired, instruction, f"### Input:\n{context[0]}\n\n" if context else ""), output]


def _turns(columns: Row, turns: list[Any], what: str) -> Row:
    if not turns:
        raise DataError(f"{what} has no turns; give text, or (prompt, output)")
    if len(turns) > 1 and len(turns) % 2:
        raise DataError(f"{what} has {len(turns)} turns; turns alternate prompt, output, and the last is an output")
    for turn in turns:
        if not isinstance(turn, str):
            raise DataError(
                f"{what} should be text, (prompt, output), a list of messages, or a dict with 'prompt' and 'output'; "
                f"it holds {describe(turn)}"
            )
        check_text(turn, what)
    return {**columns, "turns": turns, "outputs": [len(turns) == 1 or i % 2 == 1 for i in range(len(turns))]}


def _spans(columns: Row, *samples: list[tuple[str, bool]]) -> Row:
    """Return the last of ``samples`` as a row, which has the others as a list in ``"apart"``."""
    *others, row = [
        {**columns, "turns": [text for text, _ in spans], "outputs": [is_output for _, is_output in spans]}
        for spans in samples
    ]
    return {**row, "apart": others} if others else row


def taken_apart(row: Row) -> list[Row]:
    """Return a row of `sample_rows` as the rows that are trained on: those in ``"apart"``, and the rest of it."""
    return [*row.get("apart", ()), {key: value for key, value in row.items() if key != "apart"}]


# ------------------------------------------------------------------------------------------- what is not rendered


def unrendered(row: Any, tokenizer: PreTrainedTokenizerBase, what: str) -> list[str]:
    """Return which parts of a row's conversations the tokenizer's chat template leaves out of their text.

    They are ``tools``, or keys of messages; see `Chat.unrendered`. The row is one that has been read without an error.
    """
    if is_conversation(row):
        return Chat(tokenizer, {}, what).unrendered(row, first=0)
    if not isinstance(row, Mapping):
        return []
    sides = ("chosen", "rejected") if "chosen" in row else columns_read(row)[-1:]
    talks = [row[name] for name in sides or ("prompt",) if is_conversation(row.get(name))]
    asked = row.get("prompt") if sides and is_conversation(row.get("prompt")) else ()
    chat, first = Chat(tokenizer, row, what), len(asked or ()) if sides else None
    return [*dict.fromkeys(name for talk in talks for name in chat.unrendered([*(asked or ()), *talk], first))]


# ------------------------------------------------------------------------------------------------------------ pairs


def preference_rows(
    samples: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    first: int = 0,
    columns: Collection[str] = (),
    ends: Collection[int] = (),
) -> list[Row]:
    """Return pairs as rows ``{"prompt": text, "chosen": text, "rejected": text, **columns}``, or with token ids.

    Without a column ``prompt``, the prompt is the common beginning of both sides: messages, or text up to a word's end.
    ``columns`` and ``ends`` are as for `sample_rows`.

    Raises:
        DataError: there are no pairs, one has another form or a column of another form that nothing reads, or its sides
            are the same; names its index.
    """
    check_list(samples, "sample")
    rows = [
        preference_row(sample, f"sample {index}", tokenizer, columns=columns, ends=ends)
        for index, sample in enumerate(samples, first)
    ]
    if not rows:
        raise DataError("samples is empty; give at least one pair")
    return rows


def preference_row(
    sample: Any,
    what: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    columns: Collection[str] = (),
    ends: Collection[int] = (),
) -> Row:
    """Return one pair as a row of `preference_rows`.

    Raises:
        EqualSidesError: its sides are the same.
        DataError: as `preference_rows`.
    """
    form = recognise(sample) if isinstance(sample, Mapping) else None
    if form == "tokenised preference":
        check_columns(sample, (*TOKENISED_PAIR, *columns), what)
        return tokenised_pair(sample, what, tokenizer)
    if form not in ("preference", "implicit preference"):
        raise _wrong(sample, "pair", what)
    prompt, sides = sample.get("prompt"), [sample["chosen"], sample["rejected"]]
    talk = is_conversation(sides[0])
    read = (*(SETTINGS if talk else ()), *_images_read(tokenizer), *columns)
    check_columns(sample, ("prompt", "chosen", "rejected", *read), what)
    _check_alike(what, *([] if form == "implicit preference" else [prompt]), *sides)
    if sides[0] == sides[1]:
        raise EqualSidesError(f"{what} has the same text as chosen and as rejected, which is no preference; remove it")
    if form == "implicit preference":
        at = _common_messages(*sides) if talk else _common_text(what, *sides)
        if not at:
            raise DataError(f"{what}: chosen and rejected have no common beginning; give their prompt as a column")
        prompt, sides = sides[0][:at], [side[at:] for side in sides]
    images = given_images(sample, what) if _images_read(tokenizer) else []
    if talk:
        chat, asked = Chat(tokenizer, sample, what, ends=ends), prompt
        prompt, sides = chat.outputs(asked, *sides)
        images = chat.images(asked) if chat.reads_images else images
    row = {**sample, "prompt": prompt, "chosen": sides[0], "rejected": sides[1]}
    row = with_images(row, images) if images else row
    for name in ("prompt", "chosen", "rejected"):
        check_text(row[name], f"{what}: {name}")
    return row


def _common_messages(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Count the common messages at the beginning, leaving at least one of each."""
    most = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(most) if chosen[i] != rejected[i]), most)


def _common_text(what: str, chosen: Any, rejected: Any) -> int:
    """Count the common characters at the beginning, leaving at least one of each; ends at a word's end if possible."""
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        check_text(text, f"{what}: {name}")
    most = min(len(chosen), len(rejected)) - 1
    at = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    words = (i for i in range(at, 0, -1) if chosen[i] == rejected[i] == " " or chosen[i - 1] in "\n\t")
    return next(words, at)


# ---------------------------------------------------------------------------------------------- shared helpers


class Formatted:
    """A stream with ``formatting_func`` applied to each row, every time it is iterated over.

    Raises:
        DataError: the function raised an exception, or returned None or a list that holds no messages; names the row.
    """

    def __init__(self, rows: Iterable[Any], formatting_func: Callable[[Any], Any]) -> None:
        self.rows, self.formatting_func = rows, formatting_func

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the underlying stream, for one that shuffles."""
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for index, row in enumerate(self.rows):
            try:
                text = self.formatting_func(row)
            except Exception as error:
                raise DataError(
                    f"formatting_func raised {type(error).__name__} at sample {index}, {describe(row)}: {error}"
                ) from error
            if text is None:
                raise DataError(
                    f"formatting_func returned None for sample {index}, {describe(row)}; return text, "
                    "(prompt, output), messages, or a dict of a format"
                )
            if isinstance(text, list) and not is_conversation(text):
                raise DataError(
                    f"formatting_func returned a list for sample {index}, {describe(text)}; it is called with one row "
                    "and returns one sample: a text, a tuple (prompt, output) of turns, messages, or a dict of a format"
                )
            yield text


def formatted(rows: Any, formatting_func: Callable[[Any], Any] | None) -> Any:
    """Apply ``formatting_func`` to the rows: at once, or to those of a stream as they are read."""
    rows = listed(rows)
    if formatting_func is None:
        return list(rows) if isinstance(rows, Iterator) else rows
    check_list(rows, "sample")
    texts = Formatted(rows, formatting_func)
    return texts if is_stream(rows) else list(texts)


def are_rated(samples: Any, ignored: Collection[str] = ()) -> bool:
    """Return whether the first sample, without the columns ``ignored``, has a reward or a label."""
    first = _first(samples, ignored)
    return recognise(first) == "unpaired preference" or is_given(first.get("reward"))


def first_format(samples: Any, ignored: Collection[str] = ()) -> Format | None:
    """Return the format of the first sample without the columns ``ignored``; None if it is not a dict of a format."""
    return recognise(_first(samples, ignored))


def _first(samples: Any, ignored: Collection[str]) -> Mapping[str, Any]:
    """Return the first sample without the columns ``ignored``; an empty dict if it is no dict."""
    if isinstance(samples, str | Mapping) or not isinstance(samples, Iterable):
        return {}
    first = row_without(next(iter(samples), None), ignored)
    return first if isinstance(first, Mapping) else {}


def check_list(samples: Any, kind: str) -> None:
    """Raise a DataError if ``samples`` is a single sample or prompt, by ``kind``, or several splits."""
    if isinstance(samples, Mapping) and samples and all(hasattr(part, "column_names") for part in samples.values()):
        raise DataError(
            f"{kind}s is a dataset with the splits {', '.join(map(str, samples))}; give one of them: "
            f"{kind}s=dataset[{next(iter(samples))!r}]"
        )
    if isinstance(samples, str | Mapping):
        forms = "a list of strings or dicts" if kind == "prompt" else "a list"
        raise DataError(f"{kind}s should be {forms}; given {describe(samples)}. Write [{kind}]")


def _check_alike(what: str, *parts: Any) -> None:
    """Raise a DataError if text and conversations are mixed."""
    if len({is_conversation(part) for part in parts}) > 1:
        kinds = ", ".join("a conversation" if is_conversation(part) else describe(part, 30) for part in parts)
        raise DataError(
            f"{what} mixes text and messages: {kinds}. Give all as text, or all as lists of messages. A "
            "prompt that the messages repeat can be listed in data.ignore_columns"
        )


def _wrong(row: Any, expected: str, what: str, condition: str = "") -> DataError:
    """Return the error for a row that cannot be read as ``expected``, with the expected columns and code that helps."""
    form = recognise(row) if isinstance(row, Mapping) else None
    what_it_is = f"has the columns {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"is {describe(row)}"
    sides = [side for side in ("chosen", "rejected") if isinstance(row, Mapping) and side not in row]
    stepwise = isinstance(row, Mapping) and row.keys() >= STEPWISE
    lacks = f", without {sides[0]}" if len(sides) == 1 else ""
    name = "prompts" if expected == "prompt" else "samples"
    return DataError(
        f"{what} {what_it_is}{f', which is {form}' if form else ''}{lacks}; expected here: {EXPECTED[expected]}. "
        f"{KNOWN['completions'].capitalize() + '. ' if stepwise else _advice(form, expected)}For example:\n"
        f"    {name} = [{_example(row, 'prompt-only' if stepwise else form, expected)} for row in {name}{condition}]\n"
        f"    trainkit.train(..., {name}={name})"
    )


def _advice(form: Format | None, expected: str) -> str:
    if expected == "prompt":
        return "Rows without a prompt need an environment, which gives it. "
    if form == "prompt-only":
        return "Prompts without outputs are for prompts=, with a reward_fn. "
    if form in ("preference", "implicit preference") and expected == "sample":
        return "Pairs are for preference methods, such as method='dpo'. "
    if form == "unpaired preference":
        return (
            "This method would train on samples labelled False as on the others; kto learns from labels, and ilql uses "
            "them as rewards. If the column means something else, list it in data.ignore_columns: ['label']. "
        )
    return ""


def _example(row: Any, form: Format | None, expected: str) -> str:
    """Return an expression that makes a row of the wanted form."""
    if not isinstance(row, Mapping):
        return {"sample": '{"text": row}', "prompt": '{"prompt": row}'}.get(
            expected, '{"prompt": row[0], "chosen": row[1], "rejected": row[2]}'
        )
    at = {name: f'row["{name}"]' for name in row}
    texts = [at[name] for name, value in row.items() if isinstance(value, str) or is_conversation(value)]
    names = {"sample": ["prompt", "completion"], "prompt": ["prompt"], "pair": ["prompt", "chosen", "rejected"]}[
        expected
    ]
    if form == "preference":
        texts = [at["prompt"], at["chosen"]]
    elif form == "implicit preference":
        names, texts = ["messages" if is_conversation(row["chosen"]) else "text"], [at["chosen"]]
    elif form == "language modelling" and "messages" in row and expected == "prompt":
        texts = ['row["messages"][:-1]']
    if expected == "sample" and len(texts) == 1 and names[0] == "prompt":
        names = ["text"] if form != "prompt-only" else names
    values = [*texts, *['row["..."]'] * len(names)][: len(names)]
    return "{" + ", ".join(f'"{name}": {value}' for name, value in zip(names, values, strict=True)) + "}"
