"""Checkpoints: directories of safetensors and JSON files. Reading one executes no code.

Of a tensor that is divided among processes, each writes its part. A checkpoint is built in a temporary directory, its
manifest last, and renamed into place. So a directory with the name of a checkpoint is complete, whenever a process
dies.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Size, Tensor, cat, dtype

from trainkit.data import Batch
from trainkit.data.batches import BATCH_CLASSES, check_fields, shown
from trainkit.errors import CheckpointError, describe
from trainkit.models.reference import fingerprint
from trainkit.security import hidden, is_secret
from trainkit.version import __version__

log = logging.getLogger(__name__)

SCHEMA = 3
MANIFEST = "manifest.json"
OLD = ".old"
DEEPEST = 200
"""Levels of lists and mappings in the JSON of a checkpoint; plain state has about three for each of its own."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SafetensorError)
"""The errors of reading a state: JSON may be of another form, or nested too deep."""
State = dict[str, Any]


class Packed(NamedTuple):
    """A copy of nested state, as `write_state` writes it."""

    text: str
    """JSON."""
    tensors: dict[str, Tensor]
    """Tensors in the memory of the CPU, by name."""


class Packer:
    """Nested state, split into plain data for JSON and tensors for safetensors.

    Args:
        copied: whether all tensors are copied, so that they may change before they are written.
    """

    def __init__(self, *, copied: bool = False) -> None:
        self.copied = copied
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[int, Size, tuple[int, ...], dtype], str] = {}
        self._stored: set[int] = set()

    def pack(self, value: Any, path: str = "") -> Any:
        """Return ``value`` as data for JSON; store its tensors in `tensors` by their path, tied ones once.

        Of a tensor that is divided among processes, a ``DTensor``, it stores the part of this process.

        Raises:
            CheckpointError: a value is neither plain data nor a batch nor a tensor; names its path.
        """
        if hasattr(value, "to_local"):
            return {"part": self._put(value.to_local().detach(), path)}
        if isinstance(value, Tensor):
            return {"tensor": self._put(value.detach(), path)}
        if isinstance(value, Batch):
            kind = type(value)
            return {"batch": f"{kind.__module__}.{kind.__qualname__}", "fields": self.pack(value.parts(), path)}
        if isinstance(value, Mapping):
            items = [
                [_plain_key(key, path), self.pack(item, f"{path}.{key}".lstrip("."))] for key, item in value.items()
            ]
            return {"dict": items}
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{path}.{i}".lstrip(".")) for i, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CheckpointError(
            f"state {path!r} is a {type(value).__name__}; state_dicts hold plain data and tensors only"
        )

    def _put(self, tensor: Tensor, path: str) -> str:
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and same in self._names:
            return self._names[same]
        while path in self.tensors:  # equal paths: {"a.b": x, "a": {"b": y}} or {1: x, "1": y}
            path += "'"
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in self._stored
        alone &= not (self.copied and tensor.device.type == "cpu")
        self.tensors[path] = tensor.cpu().contiguous() if alone else tensor.cpu().contiguous().clone()
        self._stored.add(storage.data_ptr())
        self._names[same] = path
        return path


def is_plain(value: Any) -> bool:
    """Return whether `Packer.pack` can pack a value."""
    try:
        Packer().pack(value)
    except CheckpointError:
        return False
    return True


def _plain_key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    raise CheckpointError(f"state {path!r} has the key {describe(key)}; keys are text or numbers")


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `Packer.pack` was given."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(unpack(item, tensors) for item in value["tuple"])
    if "batch" in value:
        if value["batch"] not in BATCH_CLASSES:
            raise CheckpointError(f"no loaded plugin defines {value['batch']}; add its plugin to plugins")
        return _batch(BATCH_CLASSES[value["batch"]], unpack(value["fields"], tensors))
    return {key: unpack(item, tensors) for key, item in value["dict"]}


def _batch(cls: type[Batch], columns: State) -> Batch:
    """Return the batch with these columns; raise a CheckpointError if ``cls`` has others."""
    known = {each.name: each.default is MISSING for each in fields(cls)}
    if unknown := sorted(columns.keys() - known):
        raise CheckpointError(f"{cls.__name__} has no column {unknown[0]!r}; its columns are {', '.join(known)}")
    if missing := [name for name, required in known.items() if required and name not in columns]:
        raise CheckpointError(f"the column {missing[0]!r} of {cls.__name__} is missing")
    return cls(**columns)


def _as_json(packer: Packer, state: State) -> str:
    try:
        plain = packer.pack(state)
        _check_depth(plain)
    except (ValueError, RecursionError) as error:
        deep = f"a state is nested more than {DEEPEST // 3} levels deep; keep flatter data in it"
        raise CheckpointError(deep) from error
    return json.dumps(plain)


def digest(state: State) -> str:
    """Return a hash of nested state.

    Raises:
        CheckpointError: as `Packer.pack`.
    """
    packer = Packer()
    hash = hashlib.sha256(_as_json(packer, state).encode())
    hash.update(fingerprint(packer.tensors).encode())
    return hash.hexdigest()


def pack(state: State) -> Packed:
    """Return a copy of nested state, to be written later.

    Raises:
        CheckpointError: as `Packer.pack`.
    """
    packer = Packer(copied=True)
    return Packed(_as_json(packer, state), packer.tensors)


def write_state(directory: Path, name: str, state: State | Packed) -> None:
    """Write nested state as ``<name>.json`` and ``<name>.safetensors``."""
    if isinstance(state, Packed):
        text, tensors = state
    else:
        packer = Packer()
        text, tensors = _as_json(packer, state), packer.tensors
    (directory / f"{name}.json").write_text(text, encoding="utf-8")
    save_file(tensors, directory / f"{name}.safetensors")
    (directory / f"{name}.safetensors").chmod(0o644)


def read_state(directory: Path, name: str) -> State:
    """Read what `write_state` wrote.

    Raises:
        CheckpointError: a file is missing or not readable; names the file.
    """
    try:
        plain = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
        state: State = unpack(plain, load_file(directory / f"{name}.safetensors"))
    except (*UNREADABLE, CheckpointError) as error:
        raise CheckpointError(f"{directory / name}.*: {error}") from error
    return state


class Divided:
    """A tensor of which each process wrote a part, along the first dimension.

    Args:
        parts: for each process, the file and the name of its part.
    """

    def __init__(self, parts: Sequence[tuple[Any, str]]) -> None:
        self.parts = parts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shapes = [file.get_slice(name).get_shape() for file, name in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def whole(self) -> Tensor:
        """Read all parts, and return the whole tensor."""
        return cat([file.get_tensor(name) for file, name in self.parts])


def whole(value: Any) -> Any:
    """Return a divided tensor whole, and anything else unchanged."""
    return value.whole() if isinstance(value, Divided) else value


def read_parts(directory: Path, name: str) -> State:
    """Return the state of which each process wrote its part as ``<name>-<process>``; divided tensors as `Divided`.

    Raises:
        CheckpointError: as `read_state`.
    """
    stems = sorted(path.with_suffix("") for path in directory.glob(f"{name}-*.json"))
    try:
        plain = [json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")) for stem in stems]
        files = [safe_open(stem.with_suffix(".safetensors"), "pt") for stem in stems]
        state: State = _joined(plain, files)
    except UNREADABLE as error:
        raise CheckpointError(f"{directory / name}-*: {error}") from error
    return state


def _joined(values: Sequence[Any], files: Sequence[Any]) -> Any:
    """Return what `Packer.pack` was given on each process; what is not divided, of the first one."""
    first = values[0]
    if not isinstance(first, dict):
        return first
    if "part" in first:
        return Divided([(file, value["part"]) for file, value in zip(files, values, strict=True)])
    if "tensor" in first:
        return files[0].get_tensor(first["tensor"])
    items = [value["dict"] for value in values]
    return {same[0][0]: _joined([item for _, item in same], files) for same in zip(*items, strict=True)}


def path_of(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of ``step``."""
    return root / f"step_{step:08d}"


def building_directory(root: Path, step: int) -> Path:
    """Create and return a temporary directory beside the checkpoints, to build the one of ``step`` in."""
    directory = root / f".tmp-{step}-{uuid.uuid4().hex[:8]}"
    directory.mkdir(parents=True)
    return directory


def commit(building: Path, step: int, keep: int) -> Path:
    """Write the manifest of a built directory, rename it into place, and remove old checkpoints; return its path.

    Everything is flushed to disk before the rename, so an incomplete directory never has the name of a checkpoint.
    """
    root, target = building.parent, path_of(building.parent, step)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(building.iterdir())}
    libraries = {name: version(name) for name in ("torch", "transformers", "accelerate", "safetensors")}
    manifest = {"schema": SCHEMA, "step": step, "libraries": {"trainkit": __version__, **libraries}, "files": files}
    manifest["sha256"] = _manifest_sha256(manifest)
    (building / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*building.iterdir(), building]:
        _fsync(path)
    if target.exists():  # saved by a run that was then resumed from an earlier step
        shutil.rmtree(target.with_suffix(OLD), ignore_errors=True)
        target.rename(target.with_suffix(OLD))  # still found there if the process dies before the next line
    building.rename(target)
    _fsync(root)
    others = [path for path in checkpoints(root) if path != target]
    kept = [path for path in reversed(others) if path.suffix != OLD][: keep - 1]
    for path in others:
        if path not in kept:  # one rename, so that a half-removed directory never has the name
            path.rename(root / f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    remove_leftovers(root)
    return target


def remove_leftovers(root: Path) -> None:
    """Remove what a killed process was building or removing under ``root``."""
    for leftover in root.glob(".tmp-*"):
        if leftover.is_symlink() or leftover.is_file():
            leftover.unlink()  # a link, not what it points to
        else:
            shutil.rmtree(leftover)


def move_in(building: Path, target: Path, last: str) -> None:
    """Move the files of a finished directory into another, replacing files of the same name.

    The file ``last`` is removed first and moved last: where it is present, all files belong together.
    """
    if not target.exists():
        building.rename(target)
        return
    (target / last).unlink(missing_ok=True)
    for path in sorted(building.iterdir(), key=lambda path: (path.name == last, path.name)):
        if path.is_dir():
            move_in(path, target / path.name, last)
        else:
            path.replace(target / path.name)
    building.rmdir()


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoint directories under ``root``, oldest step first. They are found by scanning the directory."""
    paths = [path for path in root.glob("step_*") if path.is_dir() and path.suffix in ("", OLD)]
    return sorted(paths, key=lambda path: (path.stem, path.suffix == ""))


def newest_whole(root: Path) -> Path | None:
    """Return the newest intact checkpoint, or None. Rename damaged ones to ``*.corrupt``, with a warning for each."""
    for path in reversed(checkpoints(root)):
        fault = find_fault(path)
        if fault is None:
            return path
        log.warning("checkpoint %s is not intact (%s); renamed to *.corrupt, trying the one before it", path, fault)
        path.rename(path.with_name(f"{path.name}-{uuid.uuid4().hex[:4]}.corrupt"))
    return None


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it is intact.

    It is if every file matches the manifest, and the experience in it has the columns of its class, which fit together.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            return f"schema {manifest['schema']}; this version of trainkit reads schema {SCHEMA}"
        if manifest["sha256"] != _manifest_sha256(manifest):
            return f"{MANIFEST} has changed since it was written"
        for name, entry in manifest["files"].items():
            if Path(name).name != name:
                return f"{MANIFEST} names {name!r}, which is not a file of the checkpoint"
            if (path / name).stat().st_size != entry["bytes"] or _sha256(path / name) != entry["sha256"]:
                return f"{name} has changed since it was written"
            if name.endswith(".json"):
                _check_depth(json.loads((path / name).read_text(encoding="utf-8")))
        for stem in (
            name.removesuffix(".json") for name in manifest["files"] if re.fullmatch(r"store-\d+\.json", name)
        ):
            _check_store(path, stem)
    except CheckpointError as error:
        return str(error)
    except UNREADABLE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_store(path: Path, stem: str) -> None:
    """Raise a CheckpointError if the experience in a file has other columns than its class, or they do not fit.

    A class that no loaded plugin defines is no damage; the error of loading it names the class.
    """
    text = (path / f"{stem}.json").read_text(encoding="utf-8")
    if set(re.findall(r'"batch": "([^"]*)"', text)) - BATCH_CLASSES.keys():
        return
    batch = read_state(path, stem).get("experience")
    if not isinstance(batch, Batch):
        raise CheckpointError(f"{stem}.json holds {describe(batch)} as experience, which is no batch")

    def refuse(field: str, value: Any, expected: str) -> NoReturn:
        kind = type(batch).__name__
        raise CheckpointError(f"the column {field!r} of {kind} in {stem} is {shown(value)}; expected {expected}")

    check_fields(batch, refuse)


def _check_depth(value: Any, left: int = DEEPEST) -> None:
    """Raise a ValueError if plain data are nested deeper than what `Packer` makes."""
    if left == 0:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(item, left - 1)


def config_drift(saved: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Return one line per value that differs between two plain configs, except secrets."""
    lines, saved, now = [], hidden(saved), hidden(now)
    for key in dict.fromkeys([*saved, *now]):
        if is_secret(key):
            continue
        here, old, new = f"{path}{key}", saved.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += config_drift(old, new, f"{here}.")
        elif old != new:
            lines.append(f"{here}: {old!r} -> {new!r}")
    return lines


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_sha256(manifest: State) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
