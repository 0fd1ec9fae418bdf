"""Checkpoints: state comes back as it was, a save is whole or did not happen, and damage is never loaded."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import trainkit
from tables import table
from trainkit.data import Batch, Sequences, TokenBatch
from trainkit.data.batches import BATCH_CLASSES
from trainkit.errors import CheckpointError, ConfigError, EpisodeError, HookError, RewardError
from trainkit.models import CausalPolicy
from trainkit.runs import checkpoint, find_fault, newest_whole, read_state, write_state
from trainkit.runs.checkpoint import MANIFEST, Packer, unpack
from trainkit.runs.saving import Checkpoints
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import SAMPLES, Letters, count_first_letters, tiny_trainer

# ------------------------------------------------------------------------------------------- state there and back


def there_and_back(state: Any, directory: Path) -> Any:
    """Through the files, as one value of a state."""
    write_state(directory, "state", {"value": state})
    return read_state(directory, "state")["value"]


def assert_equal(a: Any, b: Any) -> None:
    """The same types and values all the way down; tensors by dtype and bits."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


KEYS = st.text(max_size=3) | st.integers()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
TENSORS = st.lists(st.integers(0, 9), max_size=3).map(torch.tensor)
STATES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=10,
)


@given(STATES)
def test_nested_plain_data_and_tensors_come_back_as_they_were(state: Any) -> None:
    packer = Packer()
    packed = json.loads(json.dumps(packer.pack(state)))
    assert_equal(unpack(packed, packer.tensors), state)


def test_files_bring_back_what_was_written(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -2.5, float("inf"), 10**30, True, None, "é\ud83d"],
        "dict": {0: "int", "0": "text", None: "none", 1.5: "float", "": {}},
        "tuple": ((), (1, (2, [3, (4,)]))),
        "like our own": {"tensor": "a", "dict": [["b", 1]], "tuple": [1], "batch": "x"},
        "tensors": {
            "bool": torch.tensor([True, False]),
            "int64": torch.tensor([2**62]),
            "uint8": torch.tensor([255], dtype=torch.uint8),
            "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
            "float64": torch.tensor([1 / 3], dtype=torch.float64),
            "scalar": torch.tensor(7.0),
            "empty": torch.zeros(0, 3),
            "also empty": torch.zeros(0, 3),
        },
    }
    assert_equal(there_and_back(state, tmp_path), state)


def test_nan_keeps_its_bits(tmp_path: Path) -> None:
    found = there_and_back({"plain": float("nan"), "tensor": torch.tensor([float("nan"), -0.0])}, tmp_path)
    assert found["plain"] != found["plain"]
    assert found["tensor"].view(torch.int32).tolist() == torch.tensor([float("nan"), -0.0]).view(torch.int32).tolist()


def test_tied_tensors_are_stored_once_and_both_names_come_back(tmp_path: Path) -> None:
    tied = torch.rand(4, 4)
    write_state(tmp_path, "state", {"embedding": tied, "head": tied, "again": [tied.detach()]})
    assert list(load_file(tmp_path / "state.safetensors")) == ["embedding"]
    found = read_state(tmp_path, "state")
    assert_equal(found, {"embedding": tied, "head": tied, "again": [tied]})


def test_views_of_one_storage_come_back_as_what_they_showed(tmp_path: Path) -> None:
    """Equal address, shape and type do not make tensors equal: a transpose has all three."""
    base = torch.arange(16.0).reshape(4, 4)
    state = {
        "base": base,
        "transpose": base.T,
        "flat": base.view(16),
        "row": base[1],
        "corner": base[:2, :2],
        "column": base[:, 0],
        "expanded": base[0, :1].expand(3),
        "bits": base.view(torch.int32),
    }
    assert_equal(there_and_back(state, tmp_path), state)
    assert_equal(there_and_back(dict(reversed(state.items())), tmp_path), dict(reversed(state.items())))


def test_a_view_is_stored_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    write_state(tmp_path, "state", {"row": torch.zeros(1000, 4)[0]})
    assert (tmp_path / "state.safetensors").stat().st_size < 200


def test_names_that_meet_in_their_path_do_not_overwrite_each_other(tmp_path: Path) -> None:
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)},
        "": torch.tensor(5),
        ".": torch.tensor(6),
    }
    assert_equal(there_and_back(state, tmp_path), state)


def test_gradients_stay_behind(tmp_path: Path) -> None:
    found = there_and_back({"w": torch.nn.Parameter(torch.ones(2))}, tmp_path)["w"]
    assert type(found) is Tensor
    assert not found.requires_grad


@dataclass(frozen=True)
class Experience(TokenBatch):
    scores: Tensor


@dataclass(frozen=True)
class Pair(Batch):
    left: Experience
    right: Sequences


def experience() -> Experience:
    return Experience(Sequences.from_lists([[1], [2, 3]], [[4, 5], [6]]), torch.tensor([0.5, -1.0]))


def test_batches_come_back_as_their_own_class(tmp_path: Path) -> None:
    batch = Pair(experience(), experience().sequences)
    found = there_and_back([batch], tmp_path)[0]
    assert type(found) is Pair
    assert type(found.left) is Experience
    assert_equal(found.flatten(), batch.flatten())


def test_a_batch_class_that_nobody_has_defined_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, "state", {"experience": experience()})
    monkeypatch.delitem(BATCH_CLASSES, f"{__name__}.Experience")
    with pytest.raises(CheckpointError, match=rf"state\.\*: no loaded plugin defines {__name__}\.Experience"):
        read_state(tmp_path, "state")


def test_only_batches_can_be_named_as_classes(tmp_path: Path) -> None:
    """A file that asks for any other object gets none, importable or not."""
    write_state(tmp_path, "state", {})
    for name in ("os.system", "builtins.eval", "trainkit.data.batches.Rollouts"):
        (tmp_path / "state.json").write_text(json.dumps({"batch": name, "fields": {"dict": [["command", "x"]]}}))
        with pytest.raises(CheckpointError, match=f"no loaded plugin defines {name}"):
            read_state(tmp_path, "state")


def test_a_batch_class_with_other_fields_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path, "state", {"experience": experience()})
    monkeypatch.setitem(BATCH_CLASSES, f"{__name__}.Experience", Pair)
    with pytest.raises(CheckpointError, match=r"state\.\*: Pair has no column 'scores'; its columns are left, right"):
        read_state(tmp_path, "state")


@table(
    "value, said",
    [
        (object(), "state 'method.deep.1' is a object"),
        ({1, 2}, "state 'method.deep.1' is a set"),
        (b"bytes", "state 'method.deep.1' is a bytes"),
        (np.float32(1.0), "state 'method.deep.1' is a float32"),
        (np.zeros(2), "state 'method.deep.1' is a ndarray"),
        (torch.Generator(), "state 'method.deep.1' is a Generator"),
        (lambda: None, "state 'method.deep.1' is a function"),
        ({"x": Path("a")}, "state 'method.deep.1.x' is a PosixPath"),
        ({(1, 2): 3}, r"state 'method.deep.1' has the key \(1, 2\) \(tuple\); keys are text or numbers"),
        ({b"k": 3}, r"state 'method.deep.1' has the key b'k' \(bytes\)"),
    ],
)
def test_what_is_no_plain_data_is_refused_with_its_path(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        write_state(tmp_path, "state", {"method": {"deep": [0, value]}})
    assert list(tmp_path.iterdir()) == []


@table("file, damage", [*product(["state.json", "state.safetensors"], ["missing", "empty", "garbage", "cut"])])
def test_state_that_cannot_be_read_is_an_error_that_names_it(file: str, damage: str, tmp_path: Path) -> None:
    write_state(tmp_path, "state", {"a": torch.ones(3), "b": [1, 2]})
    hurt(tmp_path / file, damage)
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'state'}.*: ")):
        read_state(tmp_path, "state")


# ---------------------------------------------------------------------------------------------- a directory of them


def save(root: Path, step: int, keep: int = 2) -> Path:
    """A small checkpoint: what a run writes, without a run."""
    building = checkpoint.building_directory(root, step)
    write_state(building, "model", {"weight": torch.full((8,), float(step))})
    write_state(building, "loop", {"step": step})
    return checkpoint.commit(building, step, keep)


def step_of(path: Path) -> int:
    """The step that a checkpoint says it is of; its model must agree."""
    step = read_state(path, "loop")["step"]
    assert read_state(path, "model")["weight"].tolist() == [step] * 8
    return int(step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_is_safetensors_and_json_with_a_manifest_of_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    manifest = json.loads((path / MANIFEST).read_text())
    assert names(path) == ["loop.json", "loop.safetensors", MANIFEST, "model.json", "model.safetensors"]
    assert sorted(manifest["files"]) == [name for name in names(path) if name != MANIFEST]
    assert manifest["step"] == 3
    assert {"trainkit", "torch", "transformers"} <= manifest["libraries"].keys()
    assert find_fault(path) is None


@pytest.mark.daily(name=("sft",))
@pytest.mark.parametrize("name", trainkit.available_trainers())
def test_a_run_leaves_no_pickle_and_nothing_that_is_not_listed(name: str, tmp_path: Path) -> None:
    """Every file parses as JSON or as safetensors, in checkpoints of every algorithm."""
    tiny_trainer(name, tmp_path, train__save_interval=2, train__total_steps=2).learn()
    (path,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    listed = json.loads((path / MANIFEST).read_text())["files"]
    assert set(names(path)) == {*listed, MANIFEST}
    for file in path.iterdir():
        assert file.suffix in (".json", ".safetensors")
        assert load_file(file) is not None if file.suffix == ".safetensors" else json.loads(file.read_text())


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    honest_open, honest_save = io.open, checkpoint.save_file

    def noted_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode:
            written.append(Path(file).name)
        return honest_open(file, mode, *args, **kwargs)

    def noted_save(tensors: Any, path: Path) -> None:
        written.append(path.name)
        honest_save(tensors, path)

    monkeypatch.setattr(io, "open", noted_open)
    monkeypatch.setattr(checkpoint, "save_file", noted_save)
    save(tmp_path, 1)
    assert written == ["model.json", "model.safetensors", "loop.json", "loop.safetensors", MANIFEST]


@table("keep", [1, 2, 3])
def test_retention_keeps_the_newest(keep: int, tmp_path: Path) -> None:
    for step in (1, 2, 5, 10, 11):
        save(tmp_path, step, keep)
    assert [step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [1, 2, 5, 10, 11][-keep:]
    assert len(names(tmp_path)) == keep


@table("keep", [1, 2])
def test_retention_never_lets_the_newly_written_one_go(keep: int, tmp_path: Path) -> None:
    """A run that was resumed from before its newest checkpoint writes one that is not the newest by its number."""
    for step in (1, 9):
        save(tmp_path, step, 2)
    assert step_of(save(tmp_path, 5, keep)) == 5
    assert [step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [5, 9][:keep]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    first = save(tmp_path, 4)
    (first / "mark").touch()
    again = save(tmp_path, 4)
    assert again == first
    assert names(tmp_path) == ["step_00000004"]
    assert not (again / "mark").exists()


def test_leftovers_of_killed_saves_are_removed_by_the_next(tmp_path: Path) -> None:
    for step in (2, 3):
        write_state(checkpoint.building_directory(tmp_path, step), "model", {"weight": torch.ones(2)})
    assert newest_whole(tmp_path) is None
    save(tmp_path, 4)
    assert names(tmp_path) == ["step_00000004"]


# -------------------------------------------------------------------------------------------- killed while saving


class Killed(BaseException):
    """As sudden as a signal: no handler of errors catches it."""


class Killer:
    """Ends the process, so to speak, at the n-th operation that changes files; a write is killed half done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.at = self.count = 0

    @contextmanager
    def armed(self, at: int) -> Iterator[None]:
        self.at, self.count = at, 0
        with self.patch.context() as patch:
            for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "chmod", "fsync"):
                patch.setattr(os, name, self.before(getattr(os, name)))
            patch.setattr(io, "open", self.opening(io.open))
            patch.setattr(checkpoint, "save_file", self.halfway(checkpoint.save_file))
            yield

    def strikes(self) -> bool:
        self.count += 1
        return self.count == self.at

    def before(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.strikes():
                raise Killed
            return operation(*args, **kwargs)

        return run

    def opening(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            opened = operation(file, mode, *args, **kwargs)
            if set(mode) & set("wax+") and self.strikes():
                opened.write('{"dict": [["st')
                opened.close()
                raise Killed
            return opened

        return run

    def halfway(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensors: Any, path: Path) -> None:
            operation(tensors, path)
            if self.strikes():
                os.truncate(path, path.stat().st_size // 2)
                raise Killed

        return run


def killed_at_every_operation(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Path], then: Callable[[Path], Any]
) -> list[Path]:
    """What ``then(root)`` leaves when killed at its 1st, 2nd ... last operation, and last when not killed at all."""
    killer, left = Killer(monkeypatch), []
    while True:
        root = make()
        try:
            with killer.armed(at=len(left) + 1):
                then(root)
        except Killed:
            left.append(root)
        else:
            return [*left, root]


@pytest.mark.daily(before=((1, 2), (1, 3)))
@pytest.mark.parametrize(("before", "keep"), [((), 1), ((1,), 1), ((1, 2), 1), ((3,), 1), ((1, 3), 2)], ids=str)
def test_a_save_killed_at_any_operation_leaves_a_whole_checkpoint(
    before: tuple[int, ...], keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1, B10: also when it replaces a checkpoint of the same step, and while old ones are let go."""
    monkeypatch.setattr(checkpoint, "version", lambda library: "0")  # looking these up takes most of the time
    template, count = tmp_path / "template", iter(range(1000))
    template.mkdir()
    for step in before:
        save(template, step)

    def make() -> Path:
        return Path(shutil.copytree(template, tmp_path / str(next(count))))

    left = killed_at_every_operation(monkeypatch, make, lambda root: save(root, 3, keep))
    assert len(left) >= 17, "a directory, 5 files, 2 modes, 7 flushes, a rename: 16 places to be killed at"
    found = [newest_whole(root) for root in left]
    steps = [None if path is None else step_of(path) for path in found]
    # what was there before, then from some operation on the new one; nothing in between
    switch = steps.index(3)
    assert set(steps[:switch]) <= {max(before, default=None)}
    assert set(steps[switch:]) == {3}
    for root in left:
        assert not list(root.glob("*.corrupt")), "a kill is no damage"
        save(root, 4, 1)
        assert names(root) == ["step_00000004"]


def test_a_kill_while_setting_a_broken_one_aside_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(100))

    def make() -> Path:
        root = tmp_path / str(next(count))
        save(root, 1)
        hurt(save(root, 2) / "loop.json", "garbage")
        return root

    for root in killed_at_every_operation(monkeypatch, make, newest_whole):
        path = newest_whole(root)
        assert path is not None
        assert step_of(path) == 1


# -------------------------------------------------------------------------------------------------------- damage


def hurt(file: Path, how: str) -> None:
    whole = file.read_bytes()
    kinds: dict[str, bytes] = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "almost whole": whole[: len(whole) * 99 // 100],
        "longer": whole + b"\0",
        "garbage": b"\x80\x04garbage",
        "other JSON": b'{"schema": 1, "files": [], "sha256": null}',
        "a list": b"[1, 2]",
        "zeros": b"\0" * len(whole),
    }
    if how == "missing":
        file.unlink()
    elif how == "a directory":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(kinds[how])


DATA = ("loop.json", "loop.safetensors", "model.json", "model.safetensors")
FILES = (*DATA, MANIFEST)
DAMAGES = (
    "missing", "empty", "cut", "almost whole", "longer", "garbage", "other JSON", "a list", "zeros", "a directory",
)  # fmt: skip


@table("file, damage", [*product([MANIFEST], DAMAGES), *zip(cycle(DATA), DAMAGES, strict=False)])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    file: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B4, B6."""
    save(tmp_path, 1)
    hurt(save(tmp_path, 2) / file, damage)
    with caplog.at_level(logging.WARNING):
        path = newest_whole(tmp_path)
    assert path is not None
    assert step_of(path) == 1
    aside, whole = names(tmp_path)[::-1]
    assert whole == "step_00000001"
    assert re.fullmatch(r"step_00000002-[0-9a-f]{4}\.corrupt", aside)
    (message,) = caplog.messages
    assert re.search(r"step_00000002 is not intact \(.+\); renamed to \*\.corrupt, trying the one before", message)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """B5: at 20 random places of each file, and at 300 of the manifest, which no other file vouches for."""
    path, chance = save(tmp_path, 1), random.Random(5)
    for name in FILES:
        whole = (path / name).read_bytes()
        for bit in chance.sample(range(8 * len(whole)), 300 if name == MANIFEST else 20):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(flipped)
            assert find_fault(path) is not None, f"bit {bit} of {name}"
        (path / name).write_bytes(whole)
    assert find_fault(path) is None


def test_the_walk_back_passes_several_broken_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    for step in (2, 3):
        hurt(tmp_path / f"step_{step:08d}" / "model.safetensors", "cut")
    path = newest_whole(tmp_path)
    assert path is not None
    assert step_of(path) == 1


def test_a_checkpoint_of_another_schema_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = save(tmp_path, 1), checkpoint.SCHEMA
    monkeypatch.setattr(checkpoint, "SCHEMA", now + 1)
    assert find_fault(path) == f"schema {now}; this version of trainkit reads schema {now + 1}"


def sealed(path: Path) -> None:
    """Let the manifest of a checkpoint say what its files are now."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {
        name: {"bytes": (path / name).stat().st_size, "sha256": checkpoint._sha256(path / name)}
        for name in manifest["files"]
    }
    manifest["sha256"] = checkpoint._manifest_sha256(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


@table("depth", [300, 5_000, 100_000])
def test_json_that_is_nested_too_deep_is_damage(depth: int, tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / "loop.json").write_text("[" * depth + "]" * depth)
    sealed(path)
    found = newest_whole(tmp_path)
    assert found is not None
    assert step_of(found) == 1
    assert len(list(tmp_path.glob("step_00000002-*.corrupt"))) == 1


def test_a_state_that_is_nested_too_deep_is_not_written(tmp_path: Path) -> None:
    state: Any = {}
    for _ in range(100):
        state = {"in": state}
    with pytest.raises(CheckpointError, match="a state is nested more than 66 levels deep"):
        write_state(tmp_path, "loop", state)
    state = {"in": "not too deep"}
    for _ in range(60):
        state = {"in": state}
    write_state(tmp_path, "loop", state)
    assert read_state(tmp_path, "loop") == state


def test_leftovers_that_are_links_are_removed_and_what_they_point_to_is_not(tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "data").write_text("kept")
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / ".tmp-1-link").symlink_to(kept, target_is_directory=True)
    (root / ".tmp-1-nowhere").symlink_to(tmp_path / "nowhere")
    (root / ".tmp-1-file").write_text("")
    checkpoint.remove_leftovers(root)
    assert list(root.iterdir()) == []
    assert (kept / "data").read_text() == "kept"


# -------------------------------------------------------------------------------------------- resuming a real run


def weights(trainer: Any) -> dict[str, Tensor]:
    trainer.models.build()
    return {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


CHANGES: dict[str, Any] = {"train__save_interval": 1, "train__total_steps": 4}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps whose last two checkpoints are on disk; tests copy it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    tiny_trainer("ppo", run_dir, **CHANGES).learn()
    return run_dir


@pytest.fixture
def a_run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def resumed(run_dir: Path, **changes: Any) -> Any:
    return tiny_trainer("ppo", run_dir, **{**CHANGES, "train__resume": "auto", **changes})


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_ends_bit_equal(a_run: Path) -> None:
    honest = resumed(a_run)
    honest.learn()
    hurt(a_run / "checkpoints" / "step_00000004" / "store-00000.safetensors", "zeros")
    again = resumed(a_run)
    again.learn()
    assert again.progress.step == 4
    assert_same_weights(weights(again), weights(honest))
    assert sorted(path.name.split("-")[0] for path in (a_run / "checkpoints").iterdir()) == [
        "step_00000003", "step_00000004", "step_00000004",
    ]  # fmt: skip


def without_a_state(state: Any) -> None:
    state["optimizer"]["state"].pop(3)


def with_a_further_state(state: Any) -> None:
    state["optimizer"]["state"][99] = state["optimizer"]["state"][0]


def of_another_shape(state: Any) -> None:
    values = state["optimizer"]["state"][0]
    values["exp_avg"] = values["exp_avg"][:-1].clone()


def of_another_order(state: Any) -> None:
    state["optimized"]["parameters"].reverse()


def without(part: str, key: str) -> Callable[[Any], None]:
    return lambda state: state[part].pop(key)


def with_one_more(part: str) -> Callable[[Any], None]:
    return lambda state: state[part].update(surprise=1)


@table(
    "change, said",
    [
        (without_a_state, "the optimizer's states of parameters differ in model.transformer"),
        (with_a_further_state, "the optimizer's states of parameters differ in 99, which is no parameter"),
        (of_another_shape, r"the optimizer's exp_avg of .*wte.weight is \(9, 32\), and the parameter \(10, 32\)"),
        (of_another_order, "the trained parameters differ in their order"),
        (without("progress", "cursor"), "cursor of its progress is missing"),
        (with_one_more("progress"), "surprise of its progress is unknown"),
        (without("scheduler", "last_epoch"), "last_epoch of its scheduler is missing"),
        (without("optimizer", "state"), "state"),
    ],
)
def test_a_checkpoint_that_lacks_a_part_of_the_loop_is_refused_before_anything_changes(
    change: Callable[[Any], None], said: str, finished: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "run")) / "checkpoints" / "step_00000004"
    state = read_state(path, "loop")
    change(state)
    write_state(path, "loop", state)
    sealed(path)
    trainer = tiny_trainer("ppo", tmp_path / "other", **CHANGES)
    before = weights(trainer)
    with pytest.raises(CheckpointError, match=f"does not fit this model: .*{said}"):
        trainer.load(path)
    assert_same_weights(weights(trainer), before)
    assert trainer.progress.step == 0


def moved(store: Any, **columns: Any) -> None:
    """Columns that another file has."""
    found = {name: column for name, column in {**store.parts(), **columns}.items() if column is not None}
    object.__setattr__(store, "parts", lambda: found)


@table(
    "change, said",
    [
        (lambda store: moved(store, advantages=None), "the column 'advantages' of PPOBatch is missing"),
        (lambda store: moved(store, surprise=store.returns), "PPOBatch has no column 'surprise'"),
        (
            lambda store: moved(store, returns=store.returns[:-1]),
            r"the column 'returns' .* is a tensor of shape \(15, \d+\); expected 16 rows",
        ),
        (
            lambda store: moved(store, returns=store.returns[:, 1:]),
            r"the column 'returns' .* is a tensor of shape \(16, \d+\); expected \[B, T, ...\] like its sequences",
        ),
        (
            lambda store: moved(store, sequences=replace(store.sequences, input_ids=store.returns)),
            "the column 'sequences.input_ids' .* expected token ids, which are integers",
        ),
        (
            lambda store: moved(store.sequences, response_mask=store.sequences.input_ids),
            "masks are boolean, True = counts",
        ),
    ],
)
def test_a_checkpoint_whose_store_has_other_columns_is_set_aside(
    change: Callable[[Any], None], said: str, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a_run = Path(shutil.copytree(finished, tmp_path / "run"))
    path = a_run / "checkpoints" / "step_00000004"
    store = read_state(path, "store-00000")["experience"]
    change(store)
    write_state(path, "store-00000", {"experience": store})
    sealed(path)
    with caplog.at_level("WARNING", logger="trainkit"):
        trainer = resumed(a_run)
        trainer.begin()
    assert trainer.progress.step == 3
    assert re.search(f"step_00000004 is not intact .*{said}", caplog.text)
    assert not path.exists()


def test_a_checkpoint_of_a_plugin_that_is_not_loaded_is_not_set_aside(
    a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(BATCH_CLASSES, "trainkit_ppo.trainer.PPOBatch")
    with pytest.raises(CheckpointError, match=r"no loaded plugin defines trainkit_ppo\.trainer\.PPOBatch"):
        resumed(a_run).begin()
    assert (a_run / "checkpoints" / "step_00000004").exists()


def test_lines_that_cannot_be_read_are_set_aside_and_the_run_goes_on(
    a_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    honest = (a_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    bad = [b'{"step": \n', b"[1]\n", b"\xff\xfe\n", b'{"loss": 1}\n', b"[" * 100_000 + b"\n", b"\n"]
    ((a_run / "metrics.jsonl").write_bytes(b"".join([*honest[:2], *bad, *honest[2:], b'{"step": 1, "cut'])),)
    with caplog.at_level("WARNING", logger="trainkit"):
        longer = resumed(a_run, train__total_steps=5)
        longer.learn()
    lines = (a_run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert lines[: len(honest)] == honest
    assert json.loads(lines[-1])["step"] == 5
    assert (a_run / "metrics.jsonl.corrupt").read_bytes() == b"".join(bad)
    assert sum("metrics.jsonl cannot be read" in message for message in caplog.messages) == len(bad)
    assert "line 3 of" in caplog.text


CHANGED: dict[str, Any] = {
    "train__seed": 2,
    "train__batch_size": 4,
    "train__max_grad_norm": 0.5,
    "train__mixed_precision": "bf16",
    "train__seq_length": 32,
    "optimizer__name": "sgd",
    "optimizer__lr": 0.5,
    "scheduler__warmup_steps": 1,
    "rollout__temperature": 0.5,
    "rollout__num_rollouts": 8,
    "rollout__batch_size": 4,
    "method__gamma": 0.9,
    "method__ppo_epochs": 2,
    "model__disable_dropout": False,
}
"""What the course of training depends on."""


def test_a_changed_configuration_is_refused_with_every_difference(a_run: Path) -> None:
    """B8."""
    before = (a_run / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match="was made with another configuration") as caught:
        resumed(a_run, **CHANGED, optimizer__kwargs={"momentum": 0.5}, train__keep_checkpoints=1).learn()
    differences = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    assert {"optimizer.lr: 0.001 -> 0.5", "method.gamma: 1.0 -> 0.9", "train.seed: 1 -> 2"} < {*differences}
    keys = {line.partition(": ")[0] for line in differences}
    assert keys == {"optimizer.kwargs.momentum", *(key.replace("__", ".") for key in CHANGED)}
    assert (a_run / "config.yaml").read_text() == before, "a refused configuration leaves no trace"
    with pytest.raises(CheckpointError, match=r"another configuration.*\n  train\.batch_size: 8 -> 4\n"):
        resumed(a_run, train__batch_size=4).learn()


def test_what_the_course_of_training_does_not_depend_on_may_change(a_run: Path, tmp_path: Path) -> None:
    longer = tiny_trainer("ppo", tmp_path / "longer", train__total_steps=6)
    longer.learn()
    moved = resumed(
        Path(shutil.move(a_run, tmp_path / "moved")),
        train__total_steps=6,
        train__save_interval=3,
        train__eval_interval=5,
        train__keep_checkpoints=5,
        train__microbatch_size=8,
        train__save_best=True,
        train__trackers=["tensorboard"],
    )
    moved.learn()
    assert moved.progress.step == 6
    assert_same_weights(weights(moved), weights(longer))


def test_another_initial_model_under_the_same_name_is_refused(tmp_path: Path) -> None:
    """The reference would be another: the configuration cannot tell, the weights can."""

    def save_model(seed: int) -> None:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(10))).save_pretrained(tmp_path / "model")

    changes = {"model__model_path": str(tmp_path / "model"), "train__save_interval": 1, "train__total_steps": 1}
    save_model(1)
    tiny_trainer("ppo", tmp_path / "run", **changes).learn()
    save_model(2)
    with pytest.raises(CheckpointError, match="belongs to a run with another initial model"):
        tiny_trainer("ppo", tmp_path / "run", **changes, train__resume="auto").learn()
    save_model(1)
    tiny_trainer("ppo", tmp_path / "run", **changes, train__resume="auto").learn()


def test_a_path_to_a_checkpoint_a_run_or_its_checkpoints_is_resumed_from(a_run: Path, tmp_path: Path) -> None:
    for index, (path, step) in enumerate(
        [(a_run, 4), (a_run / "checkpoints", 4), (a_run / "checkpoints" / "step_00000003", 3)]
    ):
        trainer = tiny_trainer("ppo", tmp_path / str(index), **CHANGES)
        trainer.load(path)
        assert trainer.progress.step == step


def test_a_path_that_is_not_whole_is_an_error_and_stays_as_it_is(a_run: Path, tmp_path: Path) -> None:
    """Whoever names a checkpoint wants that one, not the one before."""
    path = a_run / "checkpoints" / "step_00000004"
    hurt(path / "model.safetensors", "cut")
    with pytest.raises(CheckpointError, match=r"step_00000004 is not intact: model\.safetensors has changed"):
        tiny_trainer("ppo", tmp_path / "other", **CHANGES, train__resume=str(path)).learn()
    assert path.is_dir()


@table("where", ["nowhere", "empty", "checkpoint without manifest"])
def test_a_path_without_a_checkpoint_is_an_error(where: str, a_run: Path, tmp_path: Path) -> None:
    path = {"checkpoint without manifest": a_run / "checkpoints" / "step_00000004"}.get(where, tmp_path / where)
    if where == "empty":
        path.mkdir()
    if where == "checkpoint without manifest":
        (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"no intact checkpoint at or under {re.escape(str(path))}"):
        tiny_trainer("ppo", tmp_path / "other", **CHANGES, train__resume=str(path)).learn()


def test_a_directory_that_holds_a_run_is_not_written_over(a_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in a_run.rglob("*")}
    with pytest.raises(ConfigError, match=r"already holds a run; set train\.resume to 'auto'"):
        tiny_trainer("ppo", a_run, **CHANGES).learn()
    assert {path: path.stat().st_mtime_ns for path in a_run.rglob("*")} == before


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", trainkit.available_trainers())
def test_a_trainer_that_has_trained_can_go_back_to_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Whatever it holds from then: experience, counters, the optimizer's memory."""
    straight = tiny_trainer(name, tmp_path / "straight", train__save_interval=1, train__keep_checkpoints=9)
    straight.learn()
    end = weights(straight)
    straight.load(tmp_path / "straight" / "checkpoints" / "step_00000003")
    for batch in straight.collector.minibatches():
        straight.update(batch)
        if straight.progress.step == straight.total_steps:
            break
    assert_same_weights(weights(straight), end)


# --------------------------------------------------------------------------------------- disks that refuse to save


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within, the kernel refuses to let any file grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_takes_no_more_is_an_error_that_names_the_place(
    a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: whoever writes the file that no longer fits, and whatever else finds no space."""
    trainer = resumed(a_run)
    trainer.save()
    root = a_run / "checkpoints"
    before = names(root)

    def unchanged() -> bool:
        """What was there is there, and nothing else takes up space."""
        return names(root) == before and newest_whole(root) == root / "step_00000004"

    for size in (100, 20_000):  # for our own files, for those of safetensors
        with (
            files_of_at_most(size),
            pytest.raises(CheckpointError, match=rf"cannot save a checkpoint under {root}: .*File too large.* MB free"),
        ):
            trainer.save()
        assert unchanged(), size
    for operation in ("save_file", "_fsync", "json.dumps", "os.rename", "os.mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(f"trainkit.runs.checkpoint.{operation}", full_disk)
            with pytest.raises(CheckpointError, match=rf"under {root}: .*No space left on device") as caught:
                trainer.save()
        assert isinstance(caught.value.__cause__, OSError)
        assert unchanged(), operation
    trainer.save()
    assert unchanged()


def test_a_place_that_cannot_be_made_is_an_error_that_names_it(a_run: Path, tmp_path: Path) -> None:
    trainer = resumed(a_run)
    trainer.load(a_run)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "a" / "b", Path("/proc/checkpoints"), tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError, match=rf"cannot save a checkpoint under {place}: .*MB needed, \d+ MB free"):
            trainer.save(place)
    with pytest.raises(CheckpointError, match=r"cannot save a checkpoint under .*null byte"):
        trainer.save(tmp_path / "a\0b")


def test_an_export_that_cannot_be_written_is_an_error_that_says_how_much_room_it_needs(
    a_run: Path, tmp_path: Path
) -> None:
    trainer = resumed(a_run)
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "a", Path("/proc/model")):
        with pytest.raises(CheckpointError, match=rf"cannot export the model to {place}: .*MB needed, \d+ MB free"):
            trainer.save_pretrained(place)


@pytest.mark.daily(asynchronous=(False,))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_goes_on_without_the_checkpoint_that_could_not_be_written(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        @trainkit.hookimpl
        def on_step(self, step: int) -> None:
            if step == 2:
                monkeypatch.setattr(checkpoint, "save_file", full_disk)
            if step == 4:
                monkeypatch.undo()

    settings: dict[str, Any] = {"train__save_interval": 1, "train__total_steps": 6, "train__keep_checkpoints": 9}
    settings |= {"train__on_save_error": "continue", "train__save_async": asynchronous}
    trainer = tiny_trainer("sft", tmp_path, callbacks=[Fails()], **settings)
    with caplog.at_level("ERROR", logger="trainkit"):
        trainer.learn()
    assert trainer.progress.step == 6
    saved = set(saved_steps(tmp_path))
    assert saved <= {f"step_{step:08d}" for step in (1, 4, 5, 6)}
    assert {"step_00000006", *([] if asynchronous else ["step_00000001"])} <= saved  # a thread may still write it at 2
    told = [message for message in caplog.messages if "No space left on device" in message]
    assert told
    assert all("The run goes on (train.on_save_error)" in message for message in told)
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


# -------------------------------------------------------------------------------------- reward functions that fail


FAILS: dict[str, Any] = {"train__save_interval": 100, "train__total_steps": 6, "train__batch_size": 8}
"""Checkpoints that are not due before the end."""


def saved_steps(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "checkpoints").glob("*"))


def failing(at: int, honest: Any) -> Any:
    """``honest``, whose call ``at`` raises."""
    calls = 0

    def fails(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise ValueError("not today")
        return honest(*given, **named)

    return fails


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ppo", {"method__ppo_epochs": 2, "rollout__batch_size": 4}),
        ("rloo", {"rollout__batch_size": 4, "rollout__staleness": 1}),
        ("rft", {"method__rft_k": 2, "rollout__batch_size": 4}),
    ],
)
def test_an_error_within_a_collection_leaves_a_checkpoint_of_the_last_step(
    name: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C1: the second collection is half scored when the function fails; the resumed run samples it again."""
    settings = {**FAILS, **settings}
    straight = tiny_trainer(name, tmp_path / "straight", **settings)
    straight.learn()
    stopped = tiny_trainer(name, tmp_path / "stopped", **settings)
    already = 4 * settings.get("rollout__staleness", 0)
    stopped.reward_fn = failing(6 + already, count_first_letters)
    with pytest.raises(
        RewardError, match=r"^after step [1-5]: .* raised ValueError: not today \(called with 4 samples"
    ):
        stopped.learn()
    step = stopped.progress.step
    assert saved_steps(tmp_path / "stopped") == [f"step_{step:08d}"]
    assert f"the run ends with an error after step {step}; saved " in caplog.text
    again = tiny_trainer(name, tmp_path / "stopped", **settings, train__resume="auto")
    again.learn()
    assert_same_weights(weights(again), weights(straight))


@pytest.mark.daily(name=("sft",))
@pytest.mark.parametrize(
    ("name", "method"), [("sft", "loss"), ("ppo", "loss"), ("ppo", "prepare_step"), ("ppo", "judge")]
)
def test_an_error_within_a_step_leaves_a_checkpoint_of_the_step_before(name: str, method: str, tmp_path: Path) -> None:
    """In the middle of a pass: the minibatch at hand is made again."""
    settings = {**FAILS, "train__microbatch_size": 4, **({"method__ppo_epochs": 2} if name == "ppo" else {})}
    straight = tiny_trainer(name, tmp_path / "straight", **settings)
    straight.learn()
    stopped = tiny_trainer(name, tmp_path / "stopped", **settings)
    setattr(stopped, method, failing(6 if method == "loss" else 3, getattr(stopped, method)))
    with pytest.raises(ValueError, match="not today"):
        stopped.learn()
    assert saved_steps(tmp_path / "stopped") == ["step_00000002"]
    again = tiny_trainer(name, tmp_path / "stopped", **settings, train__resume="auto")
    again.learn()
    assert_same_weights(weights(again), weights(straight))


@pytest.mark.parametrize("method", ["after_step", "prepare_experience"])
def test_a_state_that_is_half_changed_is_not_saved(method: str, tmp_path: Path) -> None:
    stopped = tiny_trainer("ppo", tmp_path, method__ppo_epochs=1, **FAILS)
    if method == "after_step":
        kind = type("Follows", (type(stopped),), {"after_step": failing(2, lambda self: None)})
        stopped = kind(stopped.config, tokenizer=stopped.tokenizer, reward_fn=count_first_letters)
        stopped.add_prompt_pipeline(["a", "bc"])
    else:
        stopped.prepare_experience = failing(2, stopped.prepare_experience)
    with pytest.raises(ValueError, match="not today"):
        stopped.learn()
    assert not saved_steps(tmp_path)


def test_an_error_in_an_evaluation_is_made_up_for_after_resuming(tmp_path: Path) -> None:
    settings = {**FAILS, "train__eval_interval": 3}

    def learnt(place: str, reward_fn: Any, **changes: Any) -> Any:
        trainer = tiny_trainer("ppo", tmp_path / place, **settings, **changes)
        trainer.add_eval_pipeline(["a", "b"])
        trainer.reward_fn = reward_fn
        return trainer

    def fails_in_evaluation(prompts: list[str], **given: Any) -> list[float]:
        if len(prompts) == 2 and stopped.progress.step == 3:
            raise ValueError("not today")
        return count_first_letters(**given)

    straight = learnt("straight", count_first_letters)
    straight.learn()
    stopped = learnt("stopped", fails_in_evaluation)
    with pytest.raises(RewardError, match=r"after step 3: .* not today"):
        stopped.learn()
    assert saved_steps(tmp_path / "stopped") == ["step_00000003"]
    again = learnt("stopped", count_first_letters, train__resume="auto")
    again.learn()
    assert_same_weights(weights(again), weights(straight))
    found = []
    for place in ("straight", "stopped"):
        lines = [json.loads(line) for line in (tmp_path / place / "metrics.jsonl").read_text().splitlines()]
        found.append([(line["step"], line["eval/reward"]) for line in lines if "eval/reward" in line])
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [0, 3, 6]


def test_an_environment_or_a_hook_that_fails_leaves_a_checkpoint_too(tmp_path: Path) -> None:
    class Fails(Letters):
        def step(self, output: str) -> Any:
            return step(self, output)

    step = failing(40, Letters.step)  # of the second collection
    arguments = {"environment": Fails, "reward_fn": None}
    trainer = tiny_trainer("ppo", tmp_path / "a", arguments=arguments, method__ppo_epochs=1, **FAILS)
    with pytest.raises(EpisodeError, match="not today"):
        trainer.learn()
    assert saved_steps(tmp_path / "a") == ["step_00000002"]

    class Hook:
        @trainkit.hookimpl
        def on_step(self, step: int) -> None:
            if step == 2:
                raise ValueError("not today")

    with pytest.raises(HookError, match="not today"):
        tiny_trainer("ppo", tmp_path / "b", callbacks=[Hook()], **FAILS).learn()
    assert saved_steps(tmp_path / "b") == ["step_00000002"]


def test_no_checkpoint_is_left_that_is_not_wanted_or_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(place: str, at: int, **changes: Any) -> list[str]:
        trainer = tiny_trainer("ppo", tmp_path / place, **{**FAILS, "method__ppo_epochs": 1, **changes})
        trainer.reward_fn = failing(at, count_first_letters)
        with pytest.raises(RewardError, match="not today"):
            trainer.learn()
        return saved_steps(tmp_path / place)

    assert ends("none", 3, train__save_interval=0) == []
    assert ends("before the first step", 1) == []
    assert ends("wanted", 3) == ["step_00000002"]
    saves: list[int] = []
    honest = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self: [saves.append(self.view.progress.step), honest(self)][1])
    assert ends("there", 3, train__save_interval=2) == ["step_00000002"]
    assert saves == [2]


def test_weights_that_are_not_finite_are_not_left_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer("ppo", tmp_path, **{**FAILS, "method__ppo_epochs": 1})

    def breaks(**given: Any) -> list[float]:
        if trainer.progress.step == 2:
            next(trainer.unwrapped.parameters()).data.fill_(torch.nan)
            raise ValueError("not today")
        return count_first_letters(**given)

    trainer.reward_fn = breaks
    with pytest.raises(RewardError, match="not today"):
        trainer.learn()
    assert saved_steps(tmp_path) == []
    assert "the run ends with an error after step 2, which cannot be saved: after step 2 the weights" in caplog.text


# ---------------------------------------------------------------------------------------------------------- best/


class Remember:
    """The weights after each step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, Tensor]] = {}

    @trainkit.hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        self.at[0] = weights(trainer)

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        self.at[step] = weights(trainer)


def trained_with_rewards(run_dir: Path, rewards: list[float], **changes: Any) -> Remember:
    """A run whose evaluation after step n gives ``rewards[n]``."""
    seen = Remember()
    trainer = tiny_trainer(
        "ppo", run_dir, callbacks=[seen], train__eval_interval=1, train__total_steps=len(rewards) - 1, **changes
    )
    trainer.reward_fn = lambda outputs, **_: [rewards[trainer.progress.step]] * len(outputs)
    trainer.learn()
    return seen


def best(run_dir: Path) -> dict[str, Tensor]:
    """What transformers reads from the export."""
    return AutoModelForCausalLM.from_pretrained(run_dir / "best").state_dict()


@pytest.mark.daily(winner=(1,))
@pytest.mark.parametrize(
    ("rewards", "winner"),
    [([-5.0, -4.0, -4.5, -4.0], 1), ([0.0, 1.0, 2.0, 3.0], 3), ([2.0, 1.0, 2.0, 2.0], 0)],
    ids=["first of two", "last", "that of the start"],
)
def test_best_is_the_export_of_the_highest_evaluation(rewards: list[float], winner: int, tmp_path: Path) -> None:
    seen = trained_with_rewards(tmp_path, rewards, train__save_best=True)
    expected = {k.removeprefix("model."): v for k, v in seen.at[winner].items() if k.startswith("model.")}
    assert_same_weights(best(tmp_path), expected)


@pytest.mark.slow
def test_best_is_judged_at_the_first_value_of_a_sweep(tmp_path: Path) -> None:
    """At the first value the second evaluation is the best, at the other the last."""
    rewards = {1: [0.0, 3.0, 1.0, 2.0], 6: [0.0, 1.0, 2.0, 3.0]}  # by the longest response and step
    seen = Remember()
    trainer = tiny_trainer(
        "ppo", tmp_path, callbacks=[seen], rollout__eval_kwargs={"max_new_tokens": [1, 6]}, train__eval_interval=1,
        train__total_steps=3, train__save_best=True,
    )  # fmt: skip

    def judge(outputs: list[str], **_: Any) -> list[float]:
        longest = 1 if max(map(len, outputs)) <= 1 else 6
        return [rewards[longest][trainer.progress.step]] * len(outputs)

    trainer.reward_fn = judge
    trainer.learn()
    expected = {k.removeprefix("model."): v for k, v in seen.at[1].items() if k.startswith("model.")}
    assert_same_weights(best(tmp_path), expected)


@pytest.mark.daily(mode=("min",))
@pytest.mark.parametrize(("mode", "winner"), [("max", 1), ("min", 2)])
def test_best_may_be_judged_by_any_metric(mode: str, winner: int, tmp_path: Path) -> None:
    """By a number of the metric function, while the reward says another one."""
    seen, values = Remember(), [0.0, 3.0, -1.0, 2.0]
    trainer = tiny_trainer(
        "ppo", tmp_path, callbacks=[seen], train__eval_interval=1, train__total_steps=3,
        train__save_best={"metric": "eval/quality", "mode": mode},
    )  # fmt: skip
    trainer.metric_fn = lambda **_: {"quality": values[trainer.progress.step]}
    trainer.reward_fn = lambda outputs, **_: [float(trainer.progress.step)] * len(outputs)
    trainer.learn()
    expected = {k.removeprefix("model."): v for k, v in seen.at[winner].items() if k.startswith("model.")}
    assert_same_weights(best(tmp_path), expected)


def test_best_of_offline_training_is_that_of_its_loss_or_of_the_metric_functions_reward(tmp_path: Path) -> None:
    losses: list[float] = []

    class Losses:
        @trainkit.hookimpl
        def on_evaluate(self, metrics: dict[str, float]) -> None:
            losses.append(metrics["eval/loss/total"])

    seen, settings = Remember(), {"train__eval_interval": 1, "train__total_steps": 4, "optimizer__lr": 0.3}
    lowest = {"metric": "eval/loss/total", "mode": "min"}
    trainer = tiny_trainer("sft", tmp_path / "loss", callbacks=[seen, Losses()], train__save_best=lowest, **settings)
    trainer.add_eval_samples(SAMPLES[:4])
    trainer.learn()
    winner = losses.index(min(losses))
    expected = {k.removeprefix("model."): v for k, v in seen.at[winner].items() if k.startswith("model.")}
    assert_same_weights(best(tmp_path / "loss"), expected)

    seen, values = Remember(), [0.0, 1.0, 4.0, 2.0, 2.0]
    usual = tiny_trainer("sft", tmp_path / "reward", **settings)
    config = usual.config.evolve(train={"save_best": True})
    trainer = type(usual)(config, tokenizer=usual.tokenizer, callbacks=[seen], metric_fn=lambda outputs, **_: {
        "reward": [values[trainer.progress.step]] * len(outputs)
    })  # fmt: skip
    trainer.add_samples(SAMPLES)
    trainer.add_eval_pipeline(["a", "b"])
    trainer.learn()
    assert '"eval/reward": 4.0' in (tmp_path / "reward" / "metrics.jsonl").read_text(encoding="utf-8")
    expected = {k.removeprefix("model."): v for k, v in seen.at[2].items() if k.startswith("model.")}
    assert_same_weights(best(tmp_path / "reward"), expected)


def test_a_metric_of_the_best_that_evaluations_do_not_have_is_told(tmp_path: Path) -> None:
    lacking = {"metric": "eval/los/total", "mode": "min"}
    trainer = tiny_trainer("sft", tmp_path / "run", train__eval_interval=1, train__save_best=lacking)
    trainer.add_eval_samples(SAMPLES[:4])
    with pytest.raises(ConfigError, match=r"did you mean 'eval/loss/total'\?; they have eval/"):
        trainer.learn()
    with pytest.raises(ConfigError, match=r"or name a metric: \{metric: eval/loss/total, mode: min\}"):
        tiny_trainer("sft", tmp_path / "other", train__eval_interval=1, train__save_best=True)
    with pytest.raises(ConfigError, match=r"train\.save_best.*mode"):
        tiny_trainer("sft", tmp_path / "other", train__save_best={"metric": "eval/loss/total"})


def test_a_resumed_run_remembers_the_best_so_far(tmp_path: Path) -> None:
    seen = trained_with_rewards(tmp_path, [0.0, 3.0], train__save_best=True, train__save_interval=1)
    trained_with_rewards(
        tmp_path, [9.0, 9.0, 1.0, 2.0], train__save_best=True, train__save_interval=1, train__resume="auto"
    )
    expected = {k.removeprefix("model."): v for k, v in seen.at[1].items() if k.startswith("model.")}
    assert_same_weights(best(tmp_path), expected)


def test_a_checkpoint_holds_the_heads_and_an_export_too(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, train__save_interval=1, train__total_steps=1)
    trainer.learn()
    assert isinstance(trainer.unwrapped, CausalPolicy)
    saved = read_state(tmp_path / "checkpoints" / "step_00000001", "model")
    assert_same_weights(saved, weights(trainer))
