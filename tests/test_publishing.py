"""Publishing models on the hub, here one on loopback: what arrives, what is sent again, what is refused before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fake_hub import Hub
from hubs import XetHub, served_hub, serving
from tables import table
from trainkit.cli import app
from trainkit.errors import ConfigError, HubError
from trainkit.runs.hub import push
from trainkit.testing.trainers import tiny_trainer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with served_hub(monkeypatch) as served:
        yield served


def sent(hub: Hub, kind: str) -> list[str]:
    return [call for call, _ in hub.calls if call.startswith(kind)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, whose model is exported."""
    path = tmp_path_factory.mktemp("published") / "run"
    tiny_trainer("sft", path, train__total_steps=2, train__eval_interval=1).learn()
    return path


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_a_run_is_published_byte_by_byte_with_its_card_configuration_and_metrics(hub: Hub, run: Path) -> None:
    result = CliRunner().invoke(app, ["push", str(run), "someone/model"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{hub.url}/someone/model\n"
    assert hub.repos == {"someone/model": "private"}
    arrived = dict(hub.files["someone/model@main"])
    config = yaml.safe_load(arrived.pop("config.yaml"))
    assert arrived.pop("metrics.jsonl") == (run / "metrics.jsonl").read_bytes()
    assert arrived == files(run / "model")
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= arrived.keys()
    assert config["train"]["total_steps"] == 2
    assert {token for call, token in hub.calls if call.startswith("POST")} == {"Bearer hf_canary"}
    assert {token for call, token in hub.calls if call.startswith("PUT")} == {""}


def test_it_holds_no_secret_and_no_path_of_the_run(hub: Hub, run: Path) -> None:
    config = run / "config.yaml"
    whole = yaml.safe_load(config.read_text())
    whole["model"]["kwargs"] = {"token": "canary", "revision": "main"}
    plugin = [{"name": "mine", "api_key": "canary"}]
    copy = run.parent / "copy"
    (copy / "model").mkdir(parents=True)
    (copy / "config.yaml").write_text(yaml.safe_dump({**whole, "plugins": plugin}))
    save_file(load_file(run / "model" / "model.safetensors"), copy / "model" / "model.safetensors")
    (copy / "model" / ".hidden").write_text("hidden")
    push(copy / "model", "someone/model")
    arrived = hub.files["someone/model@main"]
    assert sorted(arrived) == ["config.yaml", "model.safetensors"]
    assert b"canary" not in arrived["config.yaml"]
    assert yaml.safe_load(arrived["config.yaml"])["plugins"] == [{"name": "mine", "api_key": "**********"}]
    assert str(run.parent).encode() not in arrived["config.yaml"]


@pytest.mark.parametrize("status", [403, 0])
def test_an_upload_that_failed_is_continued_without_sending_again_what_has_arrived(
    hub: Hub, run: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an answer, or by a connection that is cut."""
    export = run.parent / f"shards{status}"
    export.mkdir()
    tensors = load_file(run / "model" / "model.safetensors")
    for at, name in enumerate(sorted(tensors)[:3]):
        save_file({name: tensors[name] + at}, export / f"model-{at}.safetensors")
    (export / "config.json").write_text("{}")
    (export / "README.md").write_text("---\ntags: [trainkit]\n---\n")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of huggingface_hub, before it tries again

    def fail_after_one(call: str) -> int | None:
        return status if call.startswith("PUT") and hub.blobs else None

    hub.fails = fail_after_one
    result = CliRunner().invoke(app, ["push", str(export), "someone/model", "--public"])
    assert result.exit_code == 1
    assert "HubError: 'someone/model' could not be published on http://127.0.0.1" in result.stderr
    assert f"To try again: trainkit push {export} someone/model --public" in result.stderr
    assert len(hub.blobs) >= 1
    assert hub.files == {}
    arrived = set(hub.blobs)
    hub.fails = lambda call: None
    hub.calls.clear()
    result = CliRunner().invoke(app, ["push", str(export), "someone/model", "--public"])
    assert (result.exit_code, result.stderr) == (0, ""), "no progress bars, except on terminals"
    assert hub.files["someone/model@main"] == files(export)
    again = {call.rpartition("/")[2] for call in sent(hub, "PUT")}
    assert again == set(hub.blobs) - arrived
    assert again
    assert hub.repos == {"someone/model": "public"}


def test_a_commit_that_is_refused_leaves_the_weights_there(hub: Hub, run: Path) -> None:
    hub.fails = lambda call: 500 if "/commit/" in call else None
    with pytest.raises(HubError, match="500 Internal Server Error"):
        push(run / "model", "someone/model")
    hub.fails = lambda call: None
    push(run / "model", "someone/model")
    assert len(sent(hub, "PUT")) == len(hub.blobs) == 1
    assert hub.files["someone/model@main"]["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_blocks_of_xet_that_have_arrived_are_not_sent_again(run: Path, tmp_path: Path) -> None:
    """The default protocol, in processes of its own: its client keeps a cache for as long as a process runs."""
    with serving(XetHub()) as hub:
        given = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_canary", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        given |= {"HF_XET_DATA_XORB_COMPRESSION_POLICY": "none", "HF_HUB_DISABLE_XET": "0"}
        command = [sys.executable, "-m", "trainkit.cli", "push", str(run), "someone/model"]
        outcomes = []
        for refused, status in (("xet-write-token", 404), ("shards", 403), ("/commit/", 403), ("nothing", 0)):
            hub.fails = lambda call, refused=refused, status=status: status if refused in call else None  # type: ignore[misc]
            done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
            outcomes.append((done.returncode, "set HF_HUB_DISABLE_XET=1" in done.stderr))
    assert outcomes == [(1, True), (1, False), (1, False), (0, False)], "a hub without Xet is told what to set"
    assert len(sent(hub, "POST /v1/xorbs/")) == 1
    assert hub.files["someone/model@main"]["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    assert {token for call, token in hub.calls if call.startswith("POST /v1/xorbs/")} == {"Bearer storage"}


@pytest.mark.parametrize(
    ("status", "said"), [(401, "is the token valid"), (403, "does the token have the right to write there")]
)
def test_a_token_that_is_refused_is_told(hub: Hub, run: Path, status: int, said: str) -> None:
    hub.fails = lambda call: status if "create" in call else None
    with pytest.raises(HubError, match=rf"{status} .*{said}"):
        push(run / "model", "other/model")


def test_an_adapter_of_a_directory_is_told(
    hub: Hub, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for base in (str(run / "model"), "owner/base"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        push(tmp_path, "someone/adapter")
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} is an adapter of {run / 'model'}, a directory that nobody else has. To publish the whole model: "
        f"trainkit export {tmp_path} merged, then trainkit push merged someone/adapter"
    ]


def test_a_repository_keeps_its_visibility_which_is_told(hub: Hub, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.repos["someone/model"] = "public"
    assert push(run / "model", "someone/model") == f"{hub.url}/someone/model"
    assert "someone/model is there already and is public, not private; it stays public" in caplog.text
    assert hub.repos == {"someone/model": "public"}


def test_a_branch_is_made(hub: Hub, run: Path) -> None:
    result = CliRunner().invoke(app, ["push", str(run / "model"), "someone/model", "--revision", "step2"])
    assert result.stdout == f"{hub.url}/someone/model/tree/step2\n", result.output
    assert "POST /api/models/someone/model/branch/step2" in sent(hub, "POST")
    assert hub.files.keys() == {"someone/model@step2"}


def test_a_run_publishes_its_model_when_it_ends(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", train__total_steps=1, train__push_to_hub="someone/model")
    assert hub.calls == []
    trainer.learn()
    assert f"the model is published as {hub.url}/someone/model" in caplog.text
    arrived = hub.files["someone/model@main"]
    assert {name: arrived[name] for name in files(tmp_path / "run" / "model")} == files(tmp_path / "run" / "model")
    assert trainer.push_to_hub(private=False) == f"{hub.url}/someone/model"
    assert trainer.push_to_hub("someone/other", private=False) == f"{hub.url}/someone/other"
    assert hub.repos == {"someone/model": "private", "someone/other": "public"}


def test_a_run_whose_model_cannot_be_published_is_not_lost(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fails = lambda call: 503
    trainer = tiny_trainer("sft", tmp_path / "run", train__total_steps=1, train__push_to_hub="someone/model")
    trainer.learn()
    export = tmp_path / "run" / "model"
    assert f"the run has ended and its model is saved in {export}. 'someone/model' could not be" in caplog.text
    assert f"To try again: trainkit push {export} someone/model" in caplog.text
    caplog.clear()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    trainer.learn()
    assert "without a token of the hub" in caplog.text
    assert f"To publish it: trainkit push {export} someone/model" in caplog.text


@table(
    "setting, said",
    [
        ("model", "train.push_to_hub"),
        ("a/b/c", "train.push_to_hub"),
        ("someone/-model", "Repo id must use alphanumeric chars"),
    ],
)
def test_an_id_that_is_none_is_refused_before_the_model_loads(
    hub: Hub, setting: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("sft", tmp_path / "run", train__push_to_hub=setting)
    assert hub.calls == []


def test_what_hinders_every_request_is_told_before_the_model_loads(
    hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot be published while HF_HUB_OFFLINE is set"):
        tiny_trainer("sft", tmp_path / "run", train__push_to_hub="someone/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="without a token of the hub; run `hf auth login`, or set HF_TOKEN"):
        tiny_trainer("sft", tmp_path / "run", train__push_to_hub="someone/model")
    result = CliRunner().invoke(app, ["push", str(run), "someone/model"])
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: 'someone/model' cannot be published without a token")
    assert hub.calls == []


@table(
    "given, told",
    [
        (["rnu"], "there is no directory 'rnu'"),
        (["run", "--best"], "has no run/best, which train.save_best writes"),
        (["run/model", "--best"], "is the directory of no run"),
        (["."], "holds neither a model"),
        (["unfinished"], "has no unfinished/model"),
    ],
)
def test_only_an_export_is_published(
    hub: Hub, run: Path, given: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    Path("unfinished").mkdir(exist_ok=True)
    Path("unfinished/config.yaml").write_text("method: sft\n")
    result = CliRunner().invoke(app, ["push", given[0], "someone/model", *given[1:]])
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert hub.calls == []
