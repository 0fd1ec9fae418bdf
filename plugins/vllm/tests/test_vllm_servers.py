"""The engine vllm with a real server on loopback: what it samples, its weights, episodes, deaths, other models."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import trainkit
from trainkit.config import SamplingConfig
from trainkit.errors import ConfigError, EngineError
from trainkit.rollouts import Generated, Request
from trainkit.testing import nudged, tiny_llama
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit.conformance import checks_for, subjects_of
from trainkit_vllm import launch, transfer
from trainkit_vllm.client import DiedError
from trainkit_vllm.launch import Started
from trainkit_vllm.transfer import Shared, filled
from vision import vision_trainer

pytestmark = pytest.mark.engines

MODEL = tiny_llama(10, hidden_size=64, intermediate_size=128, max_position_embeddings=256)
"""vLLM's kernels need heads of 32."""
EXTRA = {"enable_lora": True, "max_lora_rank": 8, "block_size": 32}  # for the tests of adapters and of the cache
[KIT] = subjects_of({"name": "vllm", "kv_cache": 0.25, "concurrency": 64, "arguments": EXTRA}, MODEL)
CHECKS = {each.name: each for each in checks_for(KIT)}
LAST = ("engine_deaths", "engine_closes")
QUERIES = [[at % 8, *range(at % 5)] for at in range(24)]


def trainer(path: Path, engine: Any, method: str = "rloo", **changes: Any) -> Any:
    """Return a trainer on a tiny model."""
    return tiny_trainer(method, path, **{"model": MODEL, **changes}, rollout__engine=engine)


@pytest.fixture
def home() -> Any:
    """The running engine of the kit with its weights, also if another run has loaded others into its server."""
    KIT.serving.load()
    return KIT.serving


@pytest.fixture
def url(home: Any) -> str:
    return str(home.engine.servers[0].url)


def ask(engine: Any, queries: list[list[int]], seeds: Any = None, **settings: Any) -> Generated:
    made = Request(queries, seeds or range(len(queries)), SamplingConfig(**settings), "generate")
    answer: Generated = engine.submit(made).result()
    return answer


@torch.no_grad()
def policy_logprobs(model: Any, queries: list[list[int]], responses: list[list[int]], temperature: float) -> Tensor:
    found = []
    for query, ids in zip(queries, responses, strict=True):
        logits = model(input_ids=torch.tensor([[*query, *ids]])).logits[0, len(query) - 1 : -1]
        found.append((logits / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in LAST])
def test_the_engine_conforms(name: str) -> None:
    CHECKS[name].run(KIT)


# -------------------------------------------------------------------------------------------------------- weights


def test_log_probabilities_of_greedy_responses_are_those_at_temperature_1(home: Any) -> None:
    made = ask(home.engine, QUERIES, max_new_tokens=8, temperature=0)
    assert made.logprobs is not None
    assert (made.logprobs - policy_logprobs(home.model, QUERIES, made.ids, 1.0)).abs().max() < 1e-4


def test_frozen_weights_are_loaded_once(home: Any) -> None:
    block = [name for name, _ in home.model.named_parameters() if "layers.1" in name]
    layer = [home.model.get_parameter(name) for name in block if "q_proj" not in name]  # which vLLM joins with others
    home.model.requires_grad_(False)
    try:
        with torch.no_grad():
            for parameter in layer:
                parameter.requires_grad_().mul_(1.2)
        home.load()
        made = ask(home.engine, QUERIES, max_new_tokens=8)
    finally:
        home.model.requires_grad_(True)
    assert [*home.engine.given] == block
    assert made.logprobs is not None
    assert (made.logprobs - policy_logprobs(home.model, QUERIES, made.ids, 1.0)).abs().max() < 1e-4


def changed(home: Any) -> None:
    with torch.no_grad():
        for parameter in home.model.parameters():
            parameter.mul_(1.03)


def require_loaded(home: Any) -> None:
    made = ask(home.engine, QUERIES, max_new_tokens=8)
    assert made.logprobs is not None
    assert (made.logprobs - policy_logprobs(home.model, QUERIES, made.ids, 1.0)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("way", "death"), [("shared", None), ("network", "during a call"), ("network", "before a call"), ("files", None)]
)
def test_weights_travel_in_each_way_and_again_to_a_server_that_dies_meanwhile(
    way: str, death: str | None, home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, buckets = home.engine.servers[0], []
    send = server._send

    def noted(*given: Any) -> None:
        buckets.append(given[1])
        send(*given)
        if death is not None and len(buckets) == 2:
            worker = psutil.Process(home.engine.pids[-1])
            worker.kill()
            if death == "before a call":  # which vLLM never answers, and closes its port before the first look
                while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)

    monkeypatch.setattr(transfer, "BUCKET", 40_000)
    monkeypatch.setattr(launch, "LOOK", 8.0 if death == "before a call" else launch.LOOK)
    monkeypatch.setattr(server, "_send", noted)
    monkeypatch.setattr(home.engine, "ways", [way])
    monkeypatch.setattr(home.engine, "restarts", 0)
    changed(home)
    home.load()
    require_loaded(home)
    assert (len(buckets) > 3) == (way != "files"), "in parts, of which some end within a layer that vLLM joins"
    assert home.engine.restarts == (0 if death is None else 1)


def test_a_way_that_the_system_forbids_is_left_with_one_line_or_is_an_error_by_name(
    home: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def elsewhere(self: Any, size: int, device: Any) -> None:
        made(self, size, device)
        self.told["path"] = "/proc/1/nowhere"

    made = Shared.__init__
    monkeypatch.setattr(Shared, "__init__", elsewhere)
    monkeypatch.setattr(home.engine, "ways", ["shared"])
    with pytest.raises(EngineError, match=r"by rollout\.engine\.transfer 'shared' \(FileNotFoundError.*; set"):
        home.load()
    monkeypatch.setattr(home.engine, "ways", ["shared", "network", "files"])
    for _ in range(2):
        changed(home)
        home.load()
        require_loaded(home)
    assert home.engine.ways == ["network", "files"]
    lines = [line for line in caplog.messages if "they are sent by 'network' from now on" in line]
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["a part of a layer", "a tensor of another shape"])
def test_a_load_that_was_not_finished_leaves_nothing_to_the_next(kind: str, home: Any) -> None:
    """As by a trainer that is killed meanwhile, whose server goes on."""
    server, tensors = home.engine.servers[0], {n: p.detach() + 1 for n, p in home.model.named_parameters()}
    kept = {name: tensor for name, tensor in tensors.items() if "q_proj" in name}
    if kind == "a tensor of another shape":
        kept = {"model.layers.0.self_attn.q_proj.weight": torch.ones(3, 3)}
    bucket = Shared(transfer.bucket_size(kept), torch.device("cpu"))
    bucket.bucket[:16] = 7
    server._agreed("trainkit_begin", bucket.bucket.numel(), bucket.told, [7] * 16)
    for pieces, used in filled(kept, bucket.bucket):
        server.request("POST", "/collective_rpc", {"method": "trainkit_take", "args": [pieces, used]})
    bucket.close()
    changed(home)
    home.load()
    require_loaded(home)


def test_weights_that_another_run_has_loaded_are_noticed(home: Any, url: str, tmp_path: Path) -> None:
    other = trainer(tmp_path, {"name": "vllm", "urls": [url]})
    other.sample(other.pipeline.take(0, 2))
    with pytest.raises(EngineError, match=r"this run has loaded \S+. Does another run use the server"):
        ask(home.engine, [[1, 2]])
    other.sampling.engine.close()


# ----------------------------------------------------------------------------------------------------------- runs


def test_a_run_learns_with_the_weights_of_every_step(url: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, {"name": "vllm", "urls": [url]}, "ppo")
    made.learn()
    assert made.progress.step == 6
    rows = made.pipeline.take(0, 8)
    rollouts = made.sample(rows, temperature=0.7)
    assert made.sampling.engine.loads >= 2
    assert rollouts.versions is not None
    assert rollouts.versions.tolist() == [6] * 8
    ids = [row[mask].tolist() for row, mask in zip(*_masked(rollouts), strict=True)]
    expected = policy_logprobs(made.unwrapped.model, made.text.queries(rows), ids, 0.7)
    found = rollouts.logprobs[rollouts.sequences.response_mask]
    assert (found - expected).abs().max() < 1e-4
    made.sampling.engine.close()


WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
"""Heads of 32."""


def sample_images(path: Path, mode: str) -> None:
    """Sample prompts with images, and train on them, in servers or in this process."""
    engine = {"name": "vllm", "mode": mode, "kv_cache": 0.25, "concurrency": 16}
    made = nudged(vision_trainer("idefics3", "grpo", path, rollout__engine=engine, text=WIDE), 0.1)
    rows = [row for row in made.pipeline.take(0, 8) for _ in range(2)]
    token = made.text.model_config.image_token_id
    for _ in range(2):  # with the first weights and others, of which nothing of the first may be left
        rollouts = made.sample(rows)
        mask = rollouts.sequences.response_mask
        with torch.no_grad():
            logprobs = made.unwrapped(rollouts.sequences).logprobs[mask]
        assert (logprobs - rollouts.logprobs[mask]).abs().max() < 1e-4
        assert not (rollouts.sequences.input_ids[mask] == token).any()
        images = rollouts.sequences.images
        others = replace(rollouts.sequences, images=replace(images, pixel_values=images.pixel_values.flip(-1) * 0.5))
        with torch.no_grad():
            assert (made.unwrapped(others).logprobs[mask] - logprobs).abs().max() > 0.1
            for parameter in made.unwrapped.parameters():
                parameter.mul_(1.05)
    made.learn()
    assert made.progress.step == made.config.train.total_steps
    made.sampling.engine.close()


def test_prompts_with_images_are_sampled_as_the_policy_reads_them(tmp_path: Path) -> None:
    sample_images(tmp_path / "server", "server")
    _alone(
        tmp_path, "from test_vllm_servers import sample_images", f"sample_images(Path({str(tmp_path)!r}), 'process')"
    )


def _alone(path: Path, imports: str, code: str) -> str:
    """Run code in a process of its own, and return what it prints: vLLM there initialises torch.distributed."""
    (path / "script.py").write_text(
        f"import sys\nsys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        f"from pathlib import Path\nimport torch\n{imports}\n"
        f"if __name__ == '__main__':\n{textwrap.indent(textwrap.dedent(code), '    ')}\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(path / "script.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _masked(rollouts: Any) -> tuple[Tensor, Tensor]:
    return rollouts.sequences.input_ids, rollouts.sequences.response_mask


class Noted:
    """Notes with which weights the collections were sampled, and the metrics."""

    def __init__(self) -> None:
        self.versions: list[list[int]] = []
        self.logged: list[dict[str, float]] = []

    @trainkit.hookimpl
    def on_experience(self, rollouts: Any) -> None:
        self.versions.append(sorted({int(version) for part in rollouts for version in part.versions}))

    @trainkit.hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)


@pytest.mark.parametrize("method", ["ppo", "rloo"])
def test_collections_are_sampled_beside_the_training(method: str, url: str, tmp_path: Path) -> None:
    noted, changes = Noted(), {"method__ppo_epochs": 1} if method == "ppo" else {}
    made = trainer(
        tmp_path,
        {"name": "vllm", "urls": [url]},
        method,
        callbacks=[noted],
        rollout__staleness=1,
        train__total_steps=10,
        optimizer__lr=0.01,
        **changes,
    )
    made.learn()
    assert made.progress.step == 10
    assert made.correction.kind == "decoupled"
    assert noted.versions == [[0], [0], [2], [4], [6]]
    steps = [found for found in noted.logged if "rollout/staleness" in found]
    assert [found["rollout/staleness"] for found in steps] == [0, 1, 1, 1, 1]
    assert steps[0]["rollout/effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert 0.2 < steps[-1]["rollout/effective_sample_size"] < 0.99999
    loads = made.sampling.engine.loads
    assert loads >= 4, "the log-probabilities of the fourth weights are compared while others are trained"
    made.sampling.engine.close()


class Echo:
    """Repeats what it was told, in episodes of three turns with long prompts."""

    def __init__(self, row: Any) -> None:
        self.turns = 0

    def reset(self) -> str:
        return "abcdefgh" * 9

    def step(self, output: str) -> Any:
        from trainkit.rollouts import Turn

        self.turns += 1
        return Turn("abcd" * 9, float(len(output)), done=self.turns == 3)


def test_episodes_of_several_turns_reuse_the_prefix_cache(url: str, tmp_path: Path) -> None:
    arguments = {"reward_fn": None, "environment": Echo, "prompts": [{} for _ in range(4)]}
    made = trainer(tmp_path, {"name": "vllm", "urls": [url]}, arguments=arguments, train__seq_length=256)
    hits = cached(url)
    made.learn()
    assert made.progress.step == 6
    made.sampling.engine.close()
    assert cached(url) > hits


def cached(url: str) -> float:
    """Return the number of tokens of prompts that the server has found in its prefix cache."""
    from trainkit_vllm.client import Server

    status, content = Server(url, 10).request("GET", "/metrics")
    assert status == 200
    lines = [line for line in content.decode().splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    return sum(float(line.split()[-1]) for line in lines)


def test_an_adapter_alone_is_loaded_and_is_exact(home: Any, url: str, tmp_path: Path) -> None:
    adapter = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}
    made = trainer(tmp_path, {"name": "vllm", "urls": [url]}, model__peft_config=adapter)
    made.models.build()
    inner, state = made.unwrapped.model, home.model.state_dict()
    inner.load_state_dict({_wrapped(inner, name): tensor for name, tensor in state.items()}, strict=False)
    made.learn()
    written = [path.name for path in made.sampling.engine.loaded[0].iterdir()]
    assert sorted(written) == ["adapter_config.json", "adapter_model.safetensors"]
    rows = made.pipeline.take(0, 8)
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    rollouts = made.sample(rows, temperature=0.7)
    ids = [row[mask].tolist() for row, mask in zip(*_masked(rollouts), strict=True)]
    found = rollouts.logprobs[rollouts.sequences.response_mask]
    queries = made.text.queries(rows)
    assert (found - policy_logprobs(inner, queries, ids, 0.7)).abs().max() < 1e-4
    assert (found - policy_logprobs(home.model, queries, ids, 0.7)).abs().max() > 1e-2, "the adapter has an effect"
    made.sampling.engine.close()


def _wrapped(model: Any, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{module}.base_layer.{leaf}" if f"{module}.base_layer.{leaf}" in model.state_dict() else name


def sleeping(local: Any, told: list[list[Any]]) -> None:
    """Let vLLM for CPUs sleep as on a GPU: it forgets its weights. Note what it is called for."""
    from vllm import LLM

    def wrapped(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            inspect.signature(getattr(LLM, name)).bind(local.llm, *args, **kwargs)
            made = method(*args, **kwargs)
            if name == "sleep":
                local.llm.collective_rpc("reset_weights")
            if name != "collective_rpc":
                told.append([name, *kwargs.values()])
            elif args[0] == "trainkit_load_tensors":
                told.append(["load", len(kwargs["args"][0])])
            return made

        return call

    local.level = 2
    for name in ("sleep", "wake_up", "collective_rpc"):
        setattr(local.llm, name, wrapped(name, getattr(local.llm, name)))


def test_vllm_in_the_process_of_the_trainer_samples_the_same(home: Any, tmp_path: Path) -> None:
    torch.save(home.model.state_dict(), tmp_path / "weights.pt")
    imports = """
from test_vllm_servers import MODEL, QUERIES, ask, policy_logprobs, sleeping, trainer
from trainkit.errors import EngineError
"""
    code = f"""
    changes = {{"rollout__num_rollouts": 16, "rollout__batch_size": 4, "model__num_layers_unfrozen": 1}}
    made = trainer(Path({str(tmp_path / "run")!r}), {{"name": "vllm", "mode": "process", "kv_cache": 0.25}}, **changes)
    made.models.build()
    made.unwrapped.model.load_state_dict(torch.load({str(tmp_path / "weights.pt")!r}))
    before = torch.get_rng_state()
    made.sampling.engine.load(made.sampling.weights)
    assert torch.equal(before, torch.get_rng_state()), "the global generator is unchanged"
    answer = ask(made.sampling.engine, QUERIES, max_new_tokens=12, temperature=1.7, top_p=0.8)
    off = answer.logprobs - policy_logprobs(made.unwrapped.model, QUERIES, answer.ids, 1.7)
    assert off.abs().max() < 1e-4
    print("ids", answer.ids)
    local, lists, told = made.sampling.engine.local, [], []
    generate_all = local.generate_all
    def noted(queries, parameters):
        lists.append(len(queries))
        told.append(["generate"])
        return generate_all(queries, parameters)
    local.generate_all = noted
    sleeping(local, told)
    made.learn()
    trained, all_of_them = told[0][1], len(made.unwrapped.model.state_dict())
    assert told[:2] == [["load", trained], ["generate"]] and trained < all_of_them, told
    awake = [["wake_up", ["weights"]], ["load", all_of_them], ["wake_up", ["kv_cache"]]]
    asleep = [at for at, call in enumerate(told) if call == ["sleep", 2]]
    assert len(asleep) == told.count(["wake_up", ["weights"]]) + 1 >= 2, "once for each collection"
    for at in asleep[:-1]:
        assert told[at + 1 : at + 4] == awake and told[at + 4] == ["generate"], told[at:]
    assert local.asleep
    local.llm.wake_up()
    local.asleep = False
    try:
        made.sampling.engine._check_logprobs(0, made.unwrapped.model)
        raise SystemExit("the weights were not forgotten")
    except EngineError as error:
        assert "computes other log-probabilities" in str(error)
    made.sampling.rest()
    assert max(lists) == 16, "one list for the four calls of the sampler of a collection"
    assert made.progress.step == 6
    assert not [*made.sampling.engine.directory.glob("weights-*")], "weights are copied from memory, without files"
    made.sample(made.pipeline.take(0, 2))
    made.sampling.engine._check_logprobs(0, made.unwrapped.model)
    made.sampling.engine.close()
"""
    expected = ask(home.engine, QUERIES, max_new_tokens=12, temperature=1.7, top_p=0.8).ids
    assert f"ids {expected}" in _alone(tmp_path, imports, code)


def test_vllm_in_an_actor_of_ray_conforms() -> None:
    inner = {"name": "vllm", "mode": "process", "kv_cache": 0.25, "concurrency": 64, "arguments": {"block_size": 32}}
    [subject] = subjects_of({"name": "ray", "engine": inner}, MODEL)
    assert not subject.engine_class.exact
    assert subject.engine_class.abilities == KIT.engine_class.abilities
    try:
        for name in ("engine_logprobs", "engine_weights", "engine_deaths"):
            CHECKS[name].run(subject)
    finally:
        subject.stop()


# --------------------------------------------------------------------------------------------------------- faults


def test_aborted_responses_are_an_error(home: Any, url: str) -> None:
    from trainkit_vllm.client import Server

    stop = threading.Event()

    def abort() -> None:
        while not stop.is_set():
            Server(url, 10).post("/abort_requests", {})
            time.sleep(0.01)

    thread = threading.Thread(target=abort)
    thread.start()
    settings, rows = SamplingConfig(max_new_tokens=250), [{"prompt": "bc"}] * 32
    try:
        with pytest.raises(EngineError, match=r"ended response \d+ for the reason 'abort'"):
            home.sampler(rows, [[1, 2]] * 32, settings, range(32), "train")
    finally:
        stop.set()
        thread.join()


def test_a_server_of_another_model_is_refused(url: str, tmp_path: Path) -> None:
    engine = {"name": "vllm", "urls": [url]}
    wide = trainer(tmp_path / "a", engine, model=tiny_llama(10, hidden_size=32, max_position_embeddings=256))
    with pytest.raises(EngineError, match=rf"'vllm' at {url} serves another model: .* has the shape"):
        wide.learn()
    deep = trainer(tmp_path / "b", engine, model={**MODEL, "num_hidden_layers": 3})
    with pytest.raises(EngineError, match=r"serves another model: it has no tensor 'model.layers.2"):
        deep.learn()
    long = trainer(tmp_path / "c", engine, model={**MODEL, "max_position_embeddings": 512})
    with pytest.raises(EngineError, match="reads at most 256 tokens, and the run up to 512; start it with --max-model"):
        long.learn()
    alike = trainer(
        tmp_path / "d", engine, model={**MODEL, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    )
    with pytest.raises(EngineError, match=r"other log-probabilities than the trained model: they differ by"):
        alike.learn()


def test_settings_that_vllm_understands_otherwise_end_the_run(home: Any) -> None:
    with pytest.raises(ConfigError, match="applies min_p before top_p"):
        ask(home.engine, [[1]], min_p=0.1, top_p=0.5)


def test_a_killed_server_is_started_again_and_its_requests_sent_again(
    home: Any, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request([[at % 8, 1] for at in range(64)], range(64), SamplingConfig(max_new_tokens=40), "generate")
    expected = home.engine.submit(request).result().ids
    under_way = home.engine.submit(request)
    os.kill(home.engine.pids[-1], signal.SIGKILL)
    assert under_way.result().ids == expected
    assert home.engine.submit(request).result().ids == expected
    assert home.engine.restarts == 1
    assert sum("it is started again, with the weights of step" in line for line in caplog.messages) == 1
    CHECKS["engine_deaths"].run(KIT)  # it trains the model meanwhile, whose weights are not loaded: an error


def test_a_server_that_dies_too_often_is_an_error(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise DiedError("the engine died: for a reason")

    monkeypatch.setattr(home.engine, "restarts", 3)
    monkeypatch.setattr(Started, "generate", die)
    monkeypatch.setattr(Started, "alive", False)
    with pytest.raises(EngineError, match=r"died: for a reason.*rollout.engine.restarts allows 3"):
        ask(home.engine, [[1, 2]] * 8, max_new_tokens=200)


def test_nothing_is_left_of_a_server_that_was_closed() -> None:
    CHECKS["engine_closes"].run(KIT)


# ----------------------------------------------------------------------------------------------- several processes

BEGIN = """
import json, os, signal, time
from pathlib import Path
import torch
import trainkit
from test_vllm_servers import MODEL, Sampled, trainer
from trainkit.config import SamplingConfig
from trainkit.errors import EngineError
from trainkit.rollouts import Request

def note(**what):
    with Path(f"said-{os.environ['RANK']}").open("a") as file:
        print(json.dumps(what), file=file)
"""


class Sampled:
    """Notes what was sampled: prompt, ids, and the log-probability of the first token."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    @trainkit.hookimpl
    def on_experience(self, rollouts: Any) -> None:
        for part in rollouts:
            ids, mask = part.sequences.input_ids, part.sequences.response_mask
            for row, each, chosen, numbers in zip(part.rows, ids, mask, part.logprobs, strict=True):
                self.rows.append([row["prompt"], each[chosen].tolist(), numbers[chosen].tolist()])


def launched(script: str, path: Path, kill: tuple[int, ...] = ()) -> list[list[dict[str, Any]]]:
    """Run a script in two processes, of which those in ``kill`` are killed; return what each has noted."""
    (path / "script.py").write_text(BEGIN + script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    pair = []
    for rank in range(2):
        own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (path / f"errors-{rank}").open("wb") as told:
            pair.append(subprocess.Popen([sys.executable, "script.py"], cwd=path, env=own, stdout=told, stderr=told))
    try:
        codes = [process.wait(900) for process in pair]
    finally:
        for process in pair:
            process.kill()
            process.wait()
    wanted = [-signal.SIGKILL if rank in kill else 0 for rank in range(2)]
    assert codes == wanted, [(path / f"errors-{rank}").read_text()[-3000:] for rank in range(2)]
    return [[json.loads(line) for line in (path / f"said-{rank}").read_text().splitlines()] for rank in range(2)]


TWO = """
sampled = Sampled()
made = trainer(Path("run"), {"name": "vllm", "urls": [URL]}, callbacks=[sampled])
made.learn()
note(rows=sampled.rows, joins=made.sampling.joins, loads=made.sampling.engine.loads)
made.sampling.engine.close()
torch.distributed.destroy_process_group()
"""


def test_two_processes_share_a_server_and_sample_what_one_does(url: str, tmp_path: Path) -> None:
    """One process loads weights; responses, log-probabilities and weights are those of a run of one process."""
    (tmp_path / "two").mkdir()
    [[first], [other]] = launched(TWO.replace("URL", repr(url)), tmp_path / "two")
    assert (first["joins"], other["joins"]) == (False, True)
    sampled = Sampled()
    one = trainer(tmp_path / "one", {"name": "vllm", "urls": [url]}, callbacks=[sampled])
    one.learn()
    assert first["loads"] == other["loads"] == one.sampling.engine.loads >= 3
    one.sampling.engine.close()
    expected, found = sorted(sampled.rows), sorted(first["rows"] + other["rows"])
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    numbers = [torch.tensor([number for row in rows for number in row[2]]) for rows in (found, expected)]
    assert torch.allclose(*numbers, rtol=0, atol=1e-4)
    weights = [load_file(tmp_path / run / "model" / "model.safetensors") for run in ("two/run", "one")]
    for name, tensor in weights[1].items():
        assert torch.allclose(weights[0][name], tensor, rtol=0, atol=1e-5), name


DIVIDED = """
class Kills:
    @trainkit.hookimpl
    def on_experience(self, trainer):
        engine = trainer.sampling.engine
        if engine.loads == 1 and engine.pids:
            os.kill(engine.pids[0], signal.SIGKILL)

def refused():
    raise AssertionError("the model is gathered")

changes = {"train__total_steps": 3, "train__sharding": "fsdp2", "callbacks": [Kills()]}
made = trainer(Path("run"), {"name": "vllm", "kv_cache": 0.25}, **changes)
made.sharding._gather = refused
begin = made.sampling._start
def noted(*arguments):
    note(device=made.models.unwrapped.model.device.type)
    return begin(*arguments)
made.sampling._start = noted
made.learn()
engine, rank, gather = made.sampling.engine, made.parallel.rank, made.parallel.gather
note(restarts=engine.restarts, tag=engine.loaded[1], loads=engine.loads, directory=str(engine.directory))
queries = [[at % 8, 1, 2] for at in range(64)]
request = Request(queries, range(64), SamplingConfig(max_new_tokens=40, temperature=2.0), "generate")
ids, pids = engine.submit(request).result().ids, gather(engine.pids)
if rank == 1:  # the first process, which starts the server again, waits meanwhile
    under_way = engine.submit(request)
    time.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    assert under_way.result().ids == ids == engine.submit(request).result().ids  # the first may have ended before
assert gather([ids])[0] == ids
note(restarts=engine.restarts, server=str(engine))
made.parallel.accelerator.wait_for_everyone()
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        engine.submit(request).result()
except EngineError as error:
    note(error=str(error))
os._exit(0)
"""


def test_processes_that_divide_the_model_share_the_server_that_the_first_starts(tmp_path: Path) -> None:
    """The first process starts it again when it dies; without that process it ends. No process has the whole model."""
    first, other = launched(DIVIDED, tmp_path, kill=(0,))
    assert [first[0]["device"], other[0]["device"]] == ["cpu", "meta"], "only the first has the weights whole"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    off = [line["policy/sampler_kl"] for line in lines if "policy/sampler_kl" in line]
    assert len(off) >= 2, "after the first weights, and after later ones"
    assert max(map(abs, off)) < 1e-5
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert first[1] == {**other[1], "restarts": 1}, "the same tag, and the other process has restarted nothing"
    assert first[2] == {**other[2], "restarts": 2}, "the same server"
    assert other[3]["error"].endswith("ended with the process that had started it")
    assert not Path(first[1]["directory"]).exists()
