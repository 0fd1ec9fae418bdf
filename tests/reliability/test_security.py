"""Area F of the battery: what files of others, names, secrets and texts may do."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import test_security
import trainkit
from test_security import BOMBS, CANARY, everything, run_far
from trainkit.errors import CheckpointError, ConfigError, TrainkitError
from trainkit.models import AutoModelForCausalLMWithValueHead, RewardModel
from trainkit.runs import checkpoint
from trainkit.runs.card import _cell, fenced
from trainkit.runs.console import Console, excerpt
from trainkit.security import MASK, file_name
from trainkit.testing.trainers import tiny_trainer

model, far = test_security.model, test_security.far  # fixtures

# ------------------------------------------------------------------------------------------- code of others


def is_pickle(content: bytes) -> bool:
    """Whether the bytes, or an archive of torch, would be unpickled to something."""
    if content.startswith(b"PK"):
        return True
    try:
        return bool([*pickletools.genops(content)])
    except Exception:
        return False


def malicious(marker: Path) -> bytes:
    """A pickle that makes a directory when it is read."""
    return f"cos\nmkdir\n(V{marker}\ntR.".encode()


def test_f1_pickles(tmp_path: Path, figure: Callable[[str], None], full: bool) -> None:
    """Checkpoints hold no pickle, and a malicious one in place of any file of theirs is never executed."""
    marker, scanned, planted, refused = tmp_path / "executed", 0, 0, 0
    pickle.loads(malicious(marker))
    assert marker.exists(), "it would be executed by who unpickles it"
    assert is_pickle(malicious(marker))
    marker.rmdir()
    for name in trainkit.available_trainers() if full else ("ppo", "rloo", "sft"):
        changes = {"train__save_interval": 1, "train__total_steps": 2, "train__keep_checkpoints": 9}
        place = tmp_path / name
        tiny_trainer(name, place, **changes).learn()
        found = [path for path in place.rglob("*") if path.is_file()]
        scanned += len(found)
        assert [path for path in found if is_pickle(path.read_bytes())] == []
        newest = checkpoint.newest_whole(place / "checkpoints")
        assert newest is not None
        kept = {path: path.read_bytes() for path in newest.rglob("*") if path.is_file()}
        for path, vouched in ((path, vouched) for path in kept for vouched in (False, True)):
            planted += 1
            for other, content in kept.items():
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_bytes(content)
            path.write_bytes(malicious(marker))
            if vouched and path.name != checkpoint.MANIFEST:  # the manifest says that the file is as it should be
                manifest = json.loads(kept[newest / checkpoint.MANIFEST])
                entry = manifest["files"][str(path.relative_to(newest))]
                entry.update(bytes=path.stat().st_size, sha256=checkpoint._sha256(path))
                manifest["sha256"] = checkpoint._manifest_sha256(manifest)
                (newest / checkpoint.MANIFEST).write_text(json.dumps(manifest))
            try:
                tiny_trainer(name, place, **changes, train__resume="auto").learn()
            except TrainkitError:
                refused += 1
            assert not marker.exists()
            for aside in (place / "checkpoints").glob("*.corrupt*"):
                aside.rename(tmp_path / f"{name}-{planted}-{aside.name}")
    figure(f"0 of {planted} planted pickles executed, 0 pickles in {scanned} files")


def test_f2_remote_code(far: tuple[str, Path], tmp_path: Path, figure: Callable[[str], None]) -> None:
    """Code that comes with a model runs only with the flag of the call, by no configuration, and nobody is asked."""
    place, ran = far
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": place}))
    (tmp_path / "task.py").write_text("def sft(): return {'samples': ['abcd', 'bcda']}\n"
                                      "def trusts(): return {**sft(), 'trust_remote_code': True}\n")  # fmt: skip
    (tmp_path / "far.yaml").write_text(
        f"method: sft\nmodel: {{model_path: {place}}}\n"
        f"train: {{batch_size: 2, total_steps: 1, trackers: [], run_dir: {tmp_path / 'run'}}}\n"
    )
    train = ("train", str(tmp_path / "far.yaml"), "--task", f"{tmp_path / 'task.py'}:sft")

    def shell(*arguments: str) -> None:
        found = test_security.cli(*arguments)
        if found.exit_code:
            raise ConfigError(found.stderr)

    trusted = {"kwargs": {"trust_remote_code": True}}
    ways: dict[str, Callable[[], object]] = {
        "the default": lambda: run_far(place, tmp_path / "a"),
        "a configuration": lambda: run_far(place, tmp_path / "a", **trusted),
        "a nested setting": lambda: run_far(place, tmp_path / "a", kwargs={"config": {"trust_remote_code": 1}}),
        "a file of somebody": lambda: shell(*train),
        "an override": lambda: shell(*train, "model.kwargs.trust_remote_code=true"),
        "an abbreviated override": lambda: shell(*train, "model.kwargs.trust=1"),
        "a task": lambda: shell(*train[:-1], f"{train[-1][:-3]}trusts"),
        "a merge of an adapter": lambda: shell("export", str(tmp_path / "adapter"), str(tmp_path / "out")),
        "a reward model": lambda: RewardModel.from_pretrained(place),
        "a value head": lambda: AutoModelForCausalLMWithValueHead.from_pretrained(place),
    }
    for way in ways.values():
        with pytest.raises(ValueError, match=r"trust.remote.code|custom code"):
            way()
        assert not ran.exists()
    run_far(place, tmp_path / "trusted", trust=True)
    assert ran.exists(), "with the flag it runs"
    ran.unlink()
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        run_far(place, tmp_path / "trusted")  # what it resumes from was trusted
    assert not ran.exists()
    figure(f"0 of {len(ways) + 1} ways run it without the flag")


# ------------------------------------------------------------------------------------------------ names and YAML


BAD_NAMES = ["..", "../x", "/abs", "a\0b", "con", "x" * 300, ".", "", "~", "a/../..", "\\", "é" * 200]


def test_f3_names(tmp_path: Path, figure: Callable[[str], None], full: bool) -> None:
    """A name of which a path is made stays in its directory; a run directory that cannot be is an error."""
    root, names = Path("/root-of-runs"), 0

    @settings(max_examples=500 if full else 50, database=None)
    @given(st.text() | st.sampled_from(BAD_NAMES))
    def confined(name: str) -> None:
        nonlocal names
        names += 1
        made = root / file_name(name)
        assert made.parent == root == Path(os.path.normpath(made)).parent
        assert 1 <= len(made.name.encode()) <= 100
        assert file_name(made.name) == made.name

    confined()
    for name in BAD_NAMES:
        assert Path(os.path.normpath(root / file_name(name))).parent == root
    (tmp_path / "file").touch()
    refused = 0
    for name in ("a\0b", "x" * 300, "file/below"):
        refused += 1
        with pytest.raises(ConfigError, match=r"cannot be used: .*; give another train\.run_dir"):
            tiny_trainer("sft", tmp_path / name).learn()
        with pytest.raises(CheckpointError, match=r"train\.resume is .*, which cannot be read|no intact checkpoint"):
            tiny_trainer("sft", tmp_path / "run", train__resume=str(tmp_path / name)).learn()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "checkpoints").mkdir(parents=True)
    (tmp_path / "real" / "checkpoints" / "step_00000000").symlink_to(outside)
    changes = {"train__save_interval": 1, "train__keep_checkpoints": 1}
    tiny_trainer("sft", tmp_path / "linked", **changes).learn()
    assert (tmp_path / "real" / "model" / "model.safetensors").exists()
    assert [path.name for path in outside.iterdir()] == ["thesis.txt"]
    figure(f"{names} drawn and {len(BAD_NAMES)} bad names confined, {refused} directories refused, a link not followed")


LIMITED = """
import resource, sys, time

resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
from trainkit import TRLConfig
from trainkit.errors import ConfigError

TRLConfig(method="sft")
begun = time.process_time()
try:
    TRLConfig.load_yaml(sys.argv[1])
except ConfigError as error:
    print(time.process_time() - begun, str(error)[:300].replace("\\n", " "))
    sys.exit(7)
"""
"""Reads a configuration with at most 1 GiB of memory and 10 s of the CPU; 7: refused."""


def test_f5_malicious_yaml(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """Tags of Python, bombs, env blocks, import paths and globs in YAML do nothing, in bounded time and memory."""
    ran = tmp_path / "ran"
    files = {
        "python object": f"method: !!python/object/apply:os.system ['touch {ran}']",
        "python name": "method: !!python/name:os.system",
        "aliases": BOMBS["laughs"],
        "mappings of aliases": BOMBS["mappings"],
        "nesting": BOMBS["flow"],
        "an env block": f"method: sft\nenv: {{LD_PRELOAD: {ran}, PYTHONSTARTUP: {ran}}}",
        "an import path": "method: os.system\nplugins: ['os:system', 'subprocess.run']",
        "a reward function": "method: ppo\nreward: {function: 'os.system'}",
        "a glob": f"method: sft\nmodel: {{model_path: '/**/*/**/*'}}\nplugins: ['{'*' * 5000}']",
        "a template": "method: sft\nplugins: ['{% for i in range(10**10) %}x{% endfor %}', '${HOME}', '$(touch ran)']",
    }
    seconds = []
    for name, text in files.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 7, (name, done.stdout, done.stderr[-1000:])
        seconds.append(float(done.stdout.split()[0]))
        assert seconds[-1] < 3, (name, seconds[-1])
        assert not ran.exists()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".yaml"] * len(files)
    figure(f"{len(seconds)} of {len(files)} files refused within 1 GiB, the slowest in {max(seconds):.2f} s of the CPU")


# -------------------------------------------------------------------------------------------- secrets and network


HOUSE = """
import copy, hashlib
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from pydantic import SecretStr
from trainkit import PluginConfig, hookimpl, register_engine, register_hooks, register_tracker
from trainkit.rollouts import Engine, Replica

class HouseConfig(PluginConfig):
    \"\"\"Secrets of all kinds.\"\"\"

    api_key: str
    \"\"\"By name.\"\"\"
    phrase: SecretStr = SecretStr("")
    \"\"\"By type.\"\"\"
    arguments: dict[str, Any] = {}
    \"\"\"Nested.\"\"\"

def note(settings):
    print("GIVEN", settings.name, hashlib.sha256(settings.api_key.encode()).hexdigest()[:8], settings)

@register_tracker("fake-tracks", HouseConfig)
class Tracks:
    def __init__(self, settings):
        note(settings)

    @hookimpl
    def log_metrics(self): ...

@register_hooks("fake-hooks", HouseConfig)
class Hooks(Tracks):
    @hookimpl
    def on_step(self): ...

@register_engine("fake-engine", HouseConfig)
class Copies(Engine):
    exact = True

    def __init__(self, config, served):
        super().__init__(config, served)
        note(config)
        self.replica = Replica(replace(served, model=copy.deepcopy(served.model)))

    def load(self, weights):
        self.replica.load(weights)

    def submit(self, request):
        done = Future()
        done.set_result(self.replica.generate(request))
        return done
"""
TASK = """
def ppo():
    return {"reward_fn": lambda outputs, **_: [float(len(o)) for o in outputs], "prompts": list("abcd")}
"""


def train_in(place: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`trainkit train` in a process of its own, in a directory."""
    paths = os.pathsep.join([str(place / "house"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "trainkit.cli", "train", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": paths, "TRAINKIT_TRACEBACK": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert CANARY not in done.stdout + done.stderr
    return done


def settings_of(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "api_key": f"{CANARY}-{name}",
        "phrase": f"{CANARY}-{name}-phrase",
        "arguments": {"deep": [{"password": f"{CANARY}-{name}-deep"}]},
    }


def test_f4_secrets(install: Callable[..., Path], model: str, tmp_path: Path, figure: Callable[[str], None]) -> None:
    """No file and no line of a run, its card and trackers included, has a secret, and resuming needs it again."""
    names = ("fake-tracks", "fake-hooks", "fake-engine")
    kinds = dict(zip(names, ("tracker", "hooks", "engine"), strict=True))
    install("house", dict.fromkeys(names, "fake_house"), HOUSE, kind=kinds)
    tokenizer = {name: f"{CANARY}-{name}" for name in ("hf_token", "password", "secret", "some_api_key")}
    config = {
        "method": "ppo",
        "model": {"model_path": model, "kwargs": {"token": f"{CANARY}-model"}},
        "tokenizer": {"kwargs": {**tokenizer, "more": {"api_key": f"{CANARY}-more"}}},
        "rollout": {"max_new_tokens": 4, "num_rollouts": 4, "engine": settings_of("fake-engine")},
        "plugins": [settings_of("fake-hooks")],
        "train": {
            "batch_size": 4, "total_steps": 2, "save_interval": 1, "eval_interval": 1, "save_best": True,
            "run_dir": "run", "trackers": ["tensorboard", settings_of("fake-tracks")],
        },
    }  # fmt: skip
    (tmp_path / "secret.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "task.py").write_text(TASK)
    run = tmp_path / "run"
    environment = {"WANDB_API_KEY": f"{CANARY}-wandb", "HF_TOKEN": f"{CANARY}-hub"}

    first = train_in(tmp_path, "secret.yaml", "--task", "task.py:ppo", **environment)
    assert first.returncode == 0, first.stderr
    told = sorted(line.split()[1:3] for line in first.stdout.splitlines() if line.startswith("GIVEN"))
    assert [name for name, _ in told] == sorted(names), "all of them were given their secrets"
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints", "best", "model"} <= {
        path.name for path in run.iterdir()
    }
    assert CANARY.encode() not in everything(run)
    assert MASK in (run / "config.yaml").read_text()
    assert (run / "model" / "README.md").is_file()

    # what was saved does not do in its place
    again = ("run/config.yaml", "train.resume=auto", "train.total_steps=3", "--task", "task.py:ppo")
    lacking = train_in(tmp_path, *again, HF_TOKEN="")
    assert lacking.returncode == 1
    for line in (
        "model.kwargs.token: set HF_TOKEN in the environment, or give it again",
        "tokenizer.kwargs.password: give it again",
        "train.trackers.api_key (fake-tracks): set FAKE_TRACKS_API_KEY in the environment, or give it again",
        "rollout.engine.arguments.deep.password (fake-engine): set FAKE_ENGINE_PASSWORD in the environment",
    ):
        assert line in lacking.stderr

    # given again, or taken from the environment
    over = [f"tokenizer.kwargs.{key}={CANARY}-again" for key in ("password", "secret", "some_api_key", "more.api_key")]
    for arguments, variables in (
        (("secret.yaml", *again[1:]), {}),
        (
            (*again[:2], "train.total_steps=4", *again[3:], *over),
            {
                f"FAKE_{kind}_{key}": f"{CANARY}-{kind}"
                for kind in ("TRACKS", "HOOKS", "ENGINE")
                for key in ("API_KEY", "PHRASE", "PASSWORD")
            },
        ),
    ):
        done = train_in(tmp_path, *arguments, **environment, **variables)
        assert done.returncode == 0, done.stderr
        assert "resumed from" in done.stdout
        assert "changed:" not in done.stdout, "a secret is no drift"
        assert done.stdout.count("GIVEN") == 3
        assert CANARY.encode() not in everything(run)
    assert f"GIVEN fake-tracks {told[2][1]}" not in done.stdout, "those of the environment"
    files = sum(path.is_file() for path in run.rglob("*"))
    secrets = len(set(re.findall(f"{CANARY}[a-z-]*", (tmp_path / "secret.yaml").read_text()))) + len(environment)
    figure(f"0 of {secrets} secrets in {files} files and the output of 4 processes")


LISTENER = """
import sys

ASKED = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")
asked = []
sys.addaudithook(lambda event, arguments: asked.append((event, arguments)) if event in ASKED else None)

if "--connect" in sys.argv:
    import socket

    socket.socket().connect_ex(("127.0.0.1", 9))
    socket.getaddrinfo("localhost", 80)
else:
    from trainkit.cli import main

    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
print("CONNECTIONS", len(asked), asked)
"""


def test_f6_network(model: str, tmp_path: Path, figure: Callable[[str], None]) -> None:
    """Training, evaluating, events, checkpoints, exports and resuming connect to nothing, with the hub switched on."""
    (tmp_path / "listen.py").write_text(LISTENER)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(
        f"method: ppo\nmodel: {{model_path: {model}}}\nrollout: {{max_new_tokens: 4, num_rollouts: 4}}\n"
        "train: {batch_size: 4, total_steps: 2, eval_interval: 1, save_interval: 1, save_best: true, run_dir: run, "
        "resume: auto}\n"
    )
    online = {name: value for name, value in os.environ.items() if not name.endswith(("_OFFLINE", "TELEMETRY"))}

    def listen(*arguments: str) -> str:
        command = [sys.executable, "listen.py", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=online, capture_output=True, text=True, timeout=300, check=True
        ).stdout

    assert "CONNECTIONS 2 " in listen("--connect"), "the hook hears"
    train = ("train", "run.yaml", "--task", "task.py:ppo")
    found = [listen(*train), listen(*train, "train.total_steps=3")]
    assert "resumed from" in found[1]
    counts = [int(re.findall(r"CONNECTIONS (\d+)", text)[-1]) for text in found]
    figure(f"{sum(counts)} connections in {len(counts)} processes")
    assert counts == [0, 0]


# ----------------------------------------------------------------------------------------------------------- texts

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HOSTILE = (
    "<script>alert(1)</script>", "</table><b>x", "[red]x[/red]", "\x1b[31mred\x1b[2J", "\x1b]0;title\x07", "\x9b2J",
    "\u202excod", "=cmd|' /C calc'!A0", "| a | b |", "```\nx", "`x`", "$(x)", "\r\n# heading", "![x](http://x/y.png)",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=8), min_size=1, max_size=4).map("".join)


def test_f7_hostile_texts(tmp_path: Path, figure: Callable[[str], None], full: bool) -> None:
    """Markup, escapes and HTML in texts have no effect in cards and on the console; no HTML or CSV file is written."""
    drawn = 0

    @settings(max_examples=500 if full else 50, database=None)
    @given(TEXTS, TEXTS)
    def inert(one: str, other: str) -> None:
        nonlocal drawn
        drawn += 1
        cell = _cell(one)
        assert not CONTROL.search(cell)
        assert "\n" not in cell
        assert "<" not in cell
        assert not re.search(r"(?<!\\)[|\[\]`$!]", cell)
        block = fenced(one, "text").split("\n")
        assert not any(line.startswith(block[0].removesuffix("text")) for line in block[1:-2])
        shown = excerpt(one, other)
        assert not CONTROL.search(shown)
        written = rich.console.Console(file=io.StringIO(), record=True, width=10_000)
        console = Console(written)
        console._say(shown)
        assert written.export_text().rstrip("\n").rstrip() == shown.rstrip()

    inert()

    def metric(outputs: list[str], **_: Any) -> dict[str, float]:
        return {text: float(index) for index, text in enumerate(HOSTILE)}

    columns = {"train__eval_interval": 1, "train__save_best": True, "train__trackers": ["tensorboard"]}
    trainer = tiny_trainer("ppo", tmp_path / "run", arguments={"metric_fn": metric}, **columns)
    trainer.learn()
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    evaluation = card.partition("## The last evaluation")[2].partition("## Configuration")[0]
    assert not CONTROL.search(card.replace("\n", ""))
    assert "<script" not in card
    assert "</table" not in card
    lines = [line for line in evaluation.splitlines() if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not CONTROL.search(metrics.replace("\n", ""))
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert not kinds & {".html", ".htm", ".csv", ".tsv", ".xlsx"}
    figure(f"{drawn} drawn pairs of texts and {len(lines)} lines of a card, {len(HOSTILE)} hostile names of metrics")
