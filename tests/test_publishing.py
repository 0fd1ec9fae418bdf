"""Publishing models on the hub, here one on loopback: what arrives, what is sent again, what is refused before."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_hub import Hub
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from trainkit.cli import app
from trainkit.errors import ConfigError, DataError, HubError
from trainkit.runs.hub import find_export, push
from trainkit.testing.trainers import tiny_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of huggingface_hub's httpx


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another protocol, of another server
        monkeypatch.setenv("HF_TOKEN", "hf_canary")
        yield served
        served.shutdown()
        thread.join()


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
    (export / "README.md").write_text("---\ntags: [trainkit]\n---\n")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of huggingface_hub, before it tries again

    def fail_after_one(call: str) -> int | None:
        return status if call.startswith("PUT") and hub.blobs else None

    hub.fails = fail_after_one
    result = CliRunner().invoke(app, ["push", str(export), "someone/model", "--public"])
    assert result.exit_code == 1
    assert "HubError: 'someone/model' could not be published on http://127.0.0.1" in result.stderr
    assert f"To continue: trainkit push {export} someone/model --public" in result.stderr
    assert len(hub.blobs) >= 1
    assert hub.files == {}
    arrived = set(hub.blobs)
    hub.fails = lambda call: None
    hub.calls.clear()
    assert CliRunner().invoke(app, ["push", str(export), "someone/model", "--public"]).exit_code == 0
    assert hub.files["someone/model@main"] == files(export)
    again = {call.rpartition("/")[2] for call in sent(hub, "PUT")}
    assert again == set(hub.blobs) - arrived
    assert again
    assert hub.repos == {"someone/model": "public"}
