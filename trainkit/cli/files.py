"""Data of files, directories and hub ids, as rows for `trainkit.train`."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import DataError, describe, suggest

TEXT = ("prompt", "completion", "output", "text", "chosen", "rejected", "instruction", "input", "question", "answer")
"""Columns of CSV files that are text, whatever it looks like. Others get the type that all of their values have."""
HUB_ID = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?)(@(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]:%+-]+))?")
"""``owner/name``, with the name of a configuration after ``@`` and of a split after ``:``."""
OTHERS = {
    b"\x1f\x8b": "compressed; decompress it, or end its name with .gz",
    b"\x28\xb5\x2f\xfd": "compressed; decompress it",
    b"PK\x03\x04": "an archive; take the data out of it",
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
}
"""What files are that begin so, and what to do."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes of compressed files."""


def kind_of(path: Path) -> str:
    """Return the suffix of a data file; of a compressed text, such as ``.jsonl.gz``, that of the text."""
    inner = Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else ""
    return inner if inner in READERS and inner != ".parquet" else path.suffix.lower()


def read_data(source: str) -> Sequence[Any]:
    """Read the rows of a data file, of a directory, or of a dataset of the hub.

    Args:
        source: a ``.jsonl`` file (a JSON value per line), a ``.json`` file (a list), a ``.txt`` file (a text per line),
            a ``.csv`` file (columns separated by commas, or by the tabs or semicolons of a first line without commas),
            a ``.parquet`` file, a directory that `datasets` has saved or that holds one such file, whole or
            in parts (``train-00000-of-00002.parquet``), or a hub id. ``owner/name@config:split`` names a configuration
            and a split, which is ``train`` by default. Files of text may be compressed by gzip (``.jsonl.gz``).

    Raises:
        DataError: it is not there, cannot be read, or has another suffix; names the line if one is wrong.
    """
    path = Path(source)
    if read := READERS.get(kind_of(path)):
        try:
            path.open("rb").close()  # libraries say in other words what is wrong
        except (OSError, ValueError) as error:
            raise _unread(path, error) from error
        return read(path)
    if path.is_dir():
        return _directory(path)
    id = HUB_ID.fullmatch(source)
    if path.exists() or path.suffix[1:].isalpha() or not id:
        todo = "; decompress it" if path.suffix.lower() in COMPRESSED else ""
        raise DataError(f"data files are {', '.join(READERS)}, a directory, or a hub id; given {source!r}{todo}")
    if "/" in source and path.parent.is_dir() and not Path(id["id"]).is_dir():
        around = [str(other) for other in path.parent.iterdir()]
        raise DataError(f"there is no {source!r}{suggest(source, around) or '.'}")
    return _of_hub(source, id)


def _text(path: Path) -> str:
    content = b""
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        raise _not_text(path, content) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:  # a ValueError: a NUL in the path
        raise _unread(path, error) from error


def _not_text(path: Path, content: bytes) -> DataError:
    """Return the error for bytes that are not UTF-8, with their line and what they may be."""
    for beginning, what in OTHERS.items():
        if content.startswith(beginning):
            return DataError(f"cannot read {path}: it is {what}")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        at, line = error.start, content.count(b"\n", 0, error.start) + 1
    before = content[:at].rpartition(b"\n")[2][-60:].decode(errors="replace")[-20:]
    return DataError(f"cannot read {path}, line {line}: not UTF-8 (after {before!r}); save it as UTF-8")


def _unread(path: Path, error: Exception) -> DataError:
    around: list[str] = []
    if isinstance(error, FileNotFoundError) and path.parent.is_dir():
        around = [str(other) for other in path.parent.iterdir()]
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
    return DataError(f"cannot read {path}: {reason}{suggest(str(path), around)}")


def text_lines(path: Path) -> list[str]:
    """Return the lines of a text file, which may be compressed."""
    text = _text(path)
    return text.removesuffix("\n").split("\n") if text else []


def _json_lines(path: Path) -> list[Any]:
    return [_json(line, path, at) for at, line in enumerate(text_lines(path), start=1) if line.strip()]


def _json_list(path: Path) -> list[Any]:
    rows = _json(_text(path), path)
    if not isinstance(rows, list):
        raise DataError(f"{path} should hold a list of rows; it holds {describe(rows)}. A row per line is .jsonl")
    return rows


def _json(text: str, path: Path, line: int | None = None) -> Any:
    """Return the value of a file, or of one of its lines."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        at, why = line, str(error)
        if isinstance(error, json.JSONDecodeError):
            at = line or error.lineno
            near = f"before {text[error.pos : error.pos + 20]!r}" if error.pos < len(text) else "which is the end"
            why = f"{error.msg}: column {error.colno}, {near}" if text.strip() else "it is empty"
        where = f"{path}, line {at}" if at else str(path)
        expected = "every line should be an object or a string" if line else "the file should be a list of objects or "
        expected += "" if line else "strings; a row per line is .jsonl"
        if line == 1 and text.rstrip() in "[{":
            expected += " (a list of rows over several lines is .json)"
        raise DataError(f"{where}: not JSON ({why}); {expected}") from error


def _csv(path: Path) -> list[Any]:
    from pyarrow import ArrowException, csv, string

    text = _text(path)  # it also says which line is not UTF-8
    header = text.partition("\n")[0]
    separators = [each for each in "\t;" if each in header and "," not in header]
    types = dict.fromkeys(TEXT, string())
    options = csv.ConvertOptions(column_types=types, strings_can_be_null=False)
    parse = csv.ParseOptions(delimiter=next(iter(separators), ","), newlines_in_values=True)
    reading = csv.ReadOptions(use_threads=False)  # with several threads, errors do not name the row
    try:
        return _rows(csv.read_csv(io.BytesIO(text.encode()), reading, parse, options), path)
    except (OSError, ArrowException) as error:
        raise _unread(path, error) from error


def _rows(table: Any, path: Path) -> list[Any]:
    """Return the rows of a table of pyarrow, whose columns have different names."""
    if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
        raise DataError(f"{path} has several columns {twice[0]!r}; give each a name of its own")
    return list(table.to_pylist())


def _parquet(path: Path) -> list[Any]:
    from pyarrow import ArrowException, parquet

    try:
        return _rows(parquet.read_table(path), path)
    except (OSError, ArrowException) as error:
        raise _unread(path, error) from error


def _directory(path: Path) -> Sequence[Any]:
    """Return the rows of a dataset that `datasets` has saved, or of the one file of a directory, whole or in parts."""
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        from datasets import load_from_disk

        return _split(_tried(lambda: load_from_disk(str(path)), str(path)), str(path), "train")
    files = sorted(file for file in path.iterdir() if kind_of(file) in READERS)
    names = {re.sub(r"(-\d+-of-\d+)?\.\w+(\.gz)?$", "", file.name) for file in files}
    if not files:
        below = sorted({str(file.parent) for file in path.glob("*/*") if kind_of(file) in READERS})[:20]
        hint = f"; name a directory below: {', '.join(below)}" if below else ""
        raise DataError(
            f"the directory {str(path)!r} has no data: no saved dataset, and no {', '.join(READERS)} file{hint}"
        )
    if len(names) > 1:  # such as splits
        raise DataError(f"{str(path)!r} has several data files; name one: {', '.join(map(str, files[:20]))}")
    return [row for file in files for row in READERS[kind_of(file)](file)]


def _of_hub(source: str, id: re.Match[str]) -> Sequence[Any]:
    from datasets import load_dataset

    split = id["split"] or "train"
    return _split(_tried(lambda: load_dataset(id["id"], id["config"], split=split), source), source, split)


def _tried(load: Callable[[], Any], source: str) -> Any:
    try:
        return load()
    except Exception as error:  # of datasets, huggingface_hub, requests and pyarrow
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{source!r} cannot be loaded as a dataset: {type(error).__name__}: {reason}. Give a file or directory "
            "that is there, or a hub id: owner/name, owner/name@config:split"
        ) from error


def _split(loaded: Any, source: str, split: str) -> Sequence[Any]:
    """Return the dataset, or its split."""
    if not hasattr(loaded, "keys"):
        return list(loaded)
    if split not in loaded:
        raise DataError(f"{source!r} has no split {split!r}; it has {', '.join(loaded)}. Give the directory of one")
    return list(loaded[split])


READERS: dict[str, Callable[[Path], Sequence[Any]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": text_lines,
}
"""The functions that read files, by suffix."""
