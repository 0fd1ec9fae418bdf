"""Columns of rows that nothing reads, and which of them are errors because they would change what is learnt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from trainkit.data.batches import is_given
from trainkit.data.chat import is_conversation
from trainkit.data.images import IMAGE_COLUMNS, MEDIA
from trainkit.errors import DataError, edits

STEPWISE = {"completions", "labels"}
"""The columns of stepwise supervision, besides the prompt: the steps of an output, and which of them are right."""
KNOWN = {
    **dict.fromkeys(("instruction", "question", "query"), "if it is the prompt, rename it to 'prompt'"),
    **dict.fromkeys(
        ("prompt", "completion", "output", "text", "messages", "conversations", "chosen", "rejected", "input"),
        "it belongs to another format than the columns that are read",
    ),
    **dict.fromkeys(("system", "history"), "write it into the prompt or the messages"),
    **dict.fromkeys(("tools", "chat_template_kwargs"), "a chat template reads it, and the row is text"),
    **dict.fromkeys(MEDIA, "training is on text alone, or on text and images with a model that reads them"),
    "completions": "stepwise supervision is not supported; make samples of its steps",
}
"""Columns of known formats, here and in other systems, and what to know if one of them is not read."""
TRUTHS = ("true", "false", "1", "0")
"""What labels are if they are text, in lower case."""
LOGPS = ("reference_*_logps", "ref_*_logps")
"""Patterns of columns with the log-probabilities of a reference."""


def listed(rows: Any) -> Any:
    """Return rows that can be had by index alone, as those of a torch `Dataset`, as a list; anything else as it is.

    Python iterates over such an object until it raises IndexError, which many never do.
    """
    by_index = hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not isinstance(rows, Iterable)
    return [rows[index] for index in range(len(rows))] if by_index else rows


def without(rows: Any, ignored: Collection[str]) -> Any:
    """Return rows without the columns ``ignored``; what is no list of rows is returned as it is given."""
    rows = listed(rows)
    if not ignored or isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        return rows
    return [row_without(row, ignored) for row in rows]


def row_without(row: Any, ignored: Collection[str]) -> Any:
    """Return a row without the columns ``ignored``; unchanged if it is no mapping."""
    return {key: value for key, value in row.items() if key not in ignored} if isinstance(row, Mapping) else row


def check_columns(row: Mapping[str, Any], read: Collection[str], what: str) -> None:
    """Raise a `DataError` if a column that is not ``read`` is, or is one edit from, a column of a known format."""
    for name, value in row.items():
        if name not in read and is_given(value) and (hint := why_refused(str(name), row)):
            named = ", ".join(column for column in read if column in row)
            raise _unread(str(name), f"is not read (read: {named})", hint, what)


def check_prompt_columns(row: Mapping[str, Any], what: str) -> None:
    """Raise a `DataError` if a column shows that the row is not the prompt it is read as.

    Whether the model reads images is checked later, by `check_images`. Other columns are used: reward functions, metric
    functions and environments get them.
    """
    for name, value in row.items():
        if name not in IMAGE_COLUMNS and near(str(name), MEDIA) and is_given(value):
            raise _unread(str(name), "the model does not see", KNOWN["image"], what)
        typo = "prompt" not in row and near(str(name), ("prompt",))
        if typo and value and (isinstance(value, str) or is_conversation(value)):
            raise _unread(str(name), "is no prompt", "did you mean 'prompt'?", what)
    if all(is_given(row.get(name)) for name in STEPWISE):
        raise _unread("completions", "has 'labels'", KNOWN["completions"], what)


def check_images(row: Mapping[str, Any], reads_images: bool, what: str) -> None:
    """Raise a `DataError` if a prompt has images, and the model reads none."""
    for name in IMAGE_COLUMNS:
        if not reads_images and is_given(row.get(name)):
            raise _unread(name, "the model does not see", KNOWN[name], what)


def _unread(name: str, why: str, hint: str, what: str) -> DataError:
    """Return the error for a column that is not read, with what to do."""
    convert = "convert the rows by a formatting_func" if what.startswith("sample") else "convert the rows"
    return DataError(
        f"{what} has the column {name!r}, which {why}; {hint}{'' if hint.endswith('?') else '.'} Rename it, {convert}, "
        f"or, if it should have no effect, list it in data.ignore_columns: [{name!r}]"
    )


def why_refused(name: str, row: Mapping[str, Any]) -> str | None:
    """Return what to know about a column that must not be unread; None if it may be."""
    if name in KNOWN:
        return KNOWN[name]
    label = row.get("label") if name == "label" and "chosen" not in row else None
    if isinstance(label, str) and label.strip().lower() in TRUTHS:
        return "it is a truth value as text, and labels are true or false, or 1 and 0"
    if any(fnmatchcase(name, pattern) for pattern in LOGPS):
        return "log-probabilities of the reference are computed here, with the model in model.reference_path"
    meant = [column for column in near(name, tuple(KNOWN)) if column not in row]
    return f"did you mean {meant[0]!r}?" if meant else None


@lru_cache(1024)
def near(name: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of ``columns`` that ``name`` is or is one edit from, whatever its case."""
    return tuple(column for column in columns if _is_near(name.lower(), column))


def _is_near(name: str, column: str) -> bool:
    """Return whether one letter is added, omitted or replaced, or two are swapped; 'test' is not near 'text'."""
    count = edits(name, column)
    swapped = count == 2 and sorted(name) == sorted(column)
    return count == 0 or ((count == 1 or swapped) and (len(column) > 4 or len(name) != len(column)))
