"""The engine vllm with a real server on loopback: what it samples, its weights, episodes, deaths, other models."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainkit.config import SamplingConfig
from trainkit.errors import ConfigError, EngineError
from trainkit.functional import truncate_logits
from trainkit.rollouts import Generated, Request, Weights
from trainkit.testing import tiny_llama
from trainkit.testing.trainers import tiny_trainer

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MODEL = tiny_llama(10, hidden_size=64, max_position_embeddings=256)  # vLLM's kernels need heads of 32
EOS = 8


def trainer(path: Path, engine: Any, method: str = "rloo", **changes: Any) -> Any:
    """Return a trainer on a tiny model, whose distribution is far from uniform."""
    made = tiny_trainer(method, path, **{"model": MODEL, **changes}, rollout__engine=engine)
    with torch.no_grad():
        for parameter in made.unwrapped.model.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                parameter.mul_(4)
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A trainer that has started a server, with adapters and a cache of small blocks."""
    extra = {"enable_lora": True, "max_lora_rank": 8, "block_size": 32}
    engine = {"name": "vllm", "kv_cache": 0.25, "concurrency": 64, "arguments": extra}
    made = trainer(tmp_path_factory.mktemp("home"), engine)
    yield made
    made.engine.close()


@pytest.fixture
def url(home: Any) -> str:
    return str(home.engine.servers[0].url)


@pytest.fixture
def engine(home: Any) -> Any:
    """The engine of `home`, with its weights, also if another run has loaded others."""
    home.engine.load(home.weights)
    home.sampler.weights = home.weights
    return home.engine


def ask(engine: Any, queries: list[list[int]], seeds: Any = None, **settings: Any) -> Generated:
    made = Request(queries, seeds or range(len(queries)), SamplingConfig(**settings), "generate")
    answer: Generated = engine.submit(made).result()
    return answer


@torch.no_grad()
def logits_of(home: Any, ids: list[int]) -> Tensor:
    """The policy's logits of the token after each of ``ids`` [T, V]."""
    found: Tensor = home.unwrapped.model(input_ids=torch.tensor([ids])).logits[0]
    return found


def policy_logprobs(home: Any, queries: list[list[int]], responses: list[list[int]], temperature: float) -> Tensor:
    found = []
    for query, ids in zip(queries, responses, strict=True):
        logprobs = (logits_of(home, [*query, *ids])[len(query) - 1 : -1] / temperature).log_softmax(-1)
        found.append(logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0])
    return torch.cat(found)


QUERIES = [[at % 8, *range(at % 5)] for at in range(24)]

# ------------------------------------------------------------------------------------------------------- sampling


def test_greedy_responses_are_those_of_the_core(home: Any, engine: Any) -> None:
    core = home.served.sampler().generate(QUERIES, SamplingConfig(max_new_tokens=8, temperature=0), [0] * 24)
    made = ask(engine, QUERIES, max_new_tokens=8, temperature=0)
    clear = 0
    for query, ids, expected in zip(QUERIES, made.ids, core.ids, strict=True):
        best = logits_of(home, [*query, *expected])[len(query) - 1 : -1].topk(2).values
        if bool((best[:, 0] - best[:, 1] > 1e-3).all()):
            clear += 1
            assert ids == expected
    assert clear >= 12
    assert torch.allclose(
        made.logprobs if made.logprobs is not None else torch.zeros(()),
        policy_logprobs(home, QUERIES, made.ids, 1.0),
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 0.8},
        {"temperature": 0.8, "top_k": 3},
        {"temperature": 0.8, "min_p": 0.3, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 6, "repetition_penalty": 1.5},
    ],
)
def test_log_probabilities_are_those_of_the_policy_before_truncation(
    home: Any, engine: Any, settings: dict[str, Any]
) -> None:
    made = ask(engine, QUERIES, max_new_tokens=12, **settings)
    assert made.logprobs is not None
    expected = policy_logprobs(home, QUERIES, made.ids, settings["temperature"])
    assert (made.logprobs - expected).abs().max() < 1e-4


def test_a_response_follows_from_its_seed_alone(engine: Any) -> None:
    first = ask(engine, QUERIES, range(100, 124), max_new_tokens=12)
    again = ask(engine, QUERIES[::-1], list(range(100, 124))[::-1], max_new_tokens=12)
    assert first.ids == again.ids[::-1], "in another order, with others under way"
    assert ask(engine, QUERIES, range(200, 224), max_new_tokens=12).ids != first.ids
    largest = ask(engine, [[1]], [2**63 - 1], max_new_tokens=4)
    assert largest.ids == ask(engine, [[1]], [2**63 - 1], max_new_tokens=4).ids


@pytest.mark.parametrize("settings", [{"temperature": 1.3}, {"temperature": 1.3, "top_p": 0.8, "top_k": 6}])
def test_first_tokens_are_as_frequent_as_the_policy_says(home: Any, engine: Any, settings: dict[str, Any]) -> None:
    from scipy.stats import chisquare

    count = 10_000
    generator = torch.Generator().manual_seed(7)
    seeds = torch.randint(2**62, (count,), generator=generator).tolist()
    made = ask(engine, [[1, 2, 3]] * count, seeds, max_new_tokens=1, **settings)
    logits = logits_of(home, [1, 2, 3])[-1:] / settings["temperature"]
    expected = (
        truncate_logits(logits, top_p=settings.get("top_p", 1.0), top_k=settings.get("top_k", 0))
        .double()
        .softmax(-1)[0]
    )
    seen = torch.bincount(torch.tensor([ids[0] for ids in made.ids]), minlength=10)
    assert int(seen[expected == 0].sum()) == 0
    kept = expected > 0
    assert chisquare(seen[kept].numpy(), (expected[kept] * count).numpy()).pvalue > 1e-4


def test_responses_end_by_eos_by_stop_strings_and_at_their_length(home: Any, engine: Any) -> None:
    made = ask(engine, QUERIES * 4, range(96), max_new_tokens=12)
    assert {"stop", "length"} == {*made.reasons}
    for ids, reason in zip(made.ids, made.reasons, strict=True):
        assert EOS not in ids[:-1]
        assert (ids[-1] == EOS) == (reason == "stop")
        assert reason == "stop" or len(ids) == 12
    text = ask(engine, QUERIES * 4, range(96), max_new_tokens=12, stop_sequences=["ab", "h"]).ids
    written = home.tokenizer.batch_decode(text, skip_special_tokens=True)
    assert any(line.endswith("ab") for line in written)
    assert all("ab" not in line[:-1] and "h" not in line[:-1] for line in written)
    home.sampler(home.pipeline.take(0, 2), [[1], [2]], SamplingConfig(stop_sequences=["h"]), [5, 6], "train")


# -------------------------------------------------------------------------------------------------------- weights


def test_every_answer_has_the_version_of_the_weights(home: Any, engine: Any) -> None:
    tensors = dict(home.weights.tensors())
    before = ask(engine, [[1, 2]], [3], temperature=0)
    assert before.versions == [home.progress.step]
    engine.load(Weights(41, lambda: {name: tensor * 1.5 for name, tensor in tensors.items()}.items()))
    other = ask(engine, [[1, 2]], [3], temperature=0)
    assert other.versions == [41]
    assert other.logprobs is not None
    assert before.logprobs is not None
    assert abs(float(other.logprobs[0] - before.logprobs[0])) > 1e-3
    engine.load(home.weights)
    assert ask(engine, [[1, 2]], [3], temperature=0).ids == before.ids


def test_a_part_of_the_weights_can_be_loaded(home: Any, engine: Any) -> None:
    tensors = {name: tensor for name, tensor in home.weights.tensors() if "layers.1" in name}
    scaled = {name: tensor * 1.2 for name, tensor in tensors.items()}
    engine.load(Weights(5, scaled.items))
    model = home.unwrapped.model
    with torch.no_grad():
        model.load_state_dict(scaled, strict=False)
        try:
            made = ask(engine, QUERIES, max_new_tokens=8)
            assert made.logprobs is not None
            assert (made.logprobs - policy_logprobs(home, QUERIES, made.ids, 1.0)).abs().max() < 1e-4
        finally:
            model.load_state_dict(tensors, strict=False)


def test_weights_of_other_shapes_are_refused_before_they_are_sent(home: Any, engine: Any) -> None:
    wrong = {name: tensor[:1] for name, tensor in home.weights.tensors()}
    with pytest.raises(EngineError, match=r"at http://127.0.0.1:\d+ serves another model: .* has the shape"):
        engine.load(Weights(9, wrong.items))
    engine.load(home.weights)
    assert ask(engine, [[1, 2]]).versions == [home.progress.step], "the server still answers"


def test_weights_that_another_run_has_loaded_are_noticed(home: Any, engine: Any, url: str, tmp_path: Path) -> None:
    other = trainer(tmp_path, {"name": "vllm", "urls": [url]})
    other.sample(other.pipeline.take(0, 2))
    with pytest.raises(EngineError, match=r"this run has loaded \S+-0. Does another run use the server"):
        ask(engine, [[1, 2]])
    other.engine.close()


# ----------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("method", ["ppo", "rloo"])
def test_a_run_learns_with_the_weights_of_every_step(method: str, home: Any, url: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, {"name": "vllm", "urls": [url]}, method)
    made.learn()
    assert made.progress.step == 6
    rows = made.pipeline.take(0, 8)
    rollouts = made.sample(rows, temperature=0.7)
    assert made.engine.loads >= 2
    assert rollouts.versions is not None
    assert rollouts.versions.tolist() == [6] * 8
    with torch.no_grad():
        ids = [row[mask].tolist() for row, mask in zip(*_masked(rollouts), strict=True)]
        queries = made._queries(rows)
        expected = policy_logprobs(made, queries, ids, 0.7)
    found = rollouts.logprobs[rollouts.sequences.response_mask]
    assert (found - expected).abs().max() < 1e-4
    made.engine.close()


def _masked(rollouts: Any) -> tuple[Tensor, Tensor]:
    return rollouts.sequences.input_ids, rollouts.sequences.response_mask


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


def test_episodes_of_several_turns_reuse_the_prefix_cache(home: Any, url: str, tmp_path: Path) -> None:
    arguments = {"reward_fn": None, "environment": Echo, "prompts": [{} for _ in range(4)]}
    made = trainer(tmp_path, {"name": "vllm", "urls": [url]}, arguments=arguments, train__seq_length=256)
    hits = cached(url)
    made.learn()
    assert made.progress.step == 6
    made.engine.close()
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
    home.engine.load(home.weights)
    made = trainer(tmp_path, {"name": "vllm", "urls": [url]}, model__peft_config=adapter)
    state = {name: tensor for name, tensor in home.unwrapped.model.state_dict().items()}
    inner = made.unwrapped.model
    inner.load_state_dict({_wrapped(inner, name): tensor for name, tensor in state.items()}, strict=False)
    made.learn()
    written = [path.name for path in made.engine.loaded[0].iterdir()]
    assert sorted(written) == ["adapter_config.json", "adapter_model.safetensors"]
    rows = made.pipeline.take(0, 8)
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    rollouts = made.sample(rows, temperature=0.7)
    ids = [row[mask].tolist() for row, mask in zip(*_masked(rollouts), strict=True)]
    found = rollouts.logprobs[rollouts.sequences.response_mask]
    queries = made._queries(rows)
    assert (found - policy_logprobs(made, queries, ids, 0.7)).abs().max() < 1e-4
    assert (found - policy_logprobs(home, queries, ids, 0.7)).abs().max() > 1e-2, "the adapter has an effect"
    made.engine.close()


def _wrapped(model: Any, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{module}.base_layer.{leaf}" if f"{module}.base_layer.{leaf}" in model.state_dict() else name


def test_vllm_in_the_process_of_the_trainer_samples_the_same(home: Any, engine: Any, tmp_path: Path) -> None:
    """It is run in a process of its own, because it initialises torch.distributed."""
    home.tokenizer.save_pretrained(tmp_path / "tokenizer")
    torch.save(home.unwrapped.model.state_dict(), tmp_path / "weights.pt")
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_vllm_servers import MODEL, QUERIES, ask, policy_logprobs, trainer
if __name__ == "__main__":
    made = trainer(Path({str(tmp_path / "run")!r}), {{"name": "vllm", "mode": "process", "kv_cache": 0.25}})
    made.unwrapped.model.load_state_dict(torch.load({str(tmp_path / "weights.pt")!r}))
    before = torch.get_rng_state()
    made.engine.load(made.weights)
    assert torch.equal(before, torch.get_rng_state()), "the global generator is unchanged"
    answer = ask(made.engine, QUERIES, max_new_tokens=12, temperature=1.7, top_p=0.8)
    off = answer.logprobs - policy_logprobs(made, QUERIES, answer.ids, 1.7)
    assert off.abs().max() < 1e-4
    print("ids", answer.ids)
    made.learn()
    assert made.progress.step == 6
    made.sample(made.pipeline.take(0, 2))
    made.engine._check_logprobs(0)
    made.engine.close()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = ask(engine, QUERIES, max_new_tokens=12, temperature=1.7, top_p=0.8).ids
    assert f"ids {expected}" in done.stdout


# --------------------------------------------------------------------------------------------------------- faults


def test_aborted_responses_are_an_error(home: Any, engine: Any, url: str) -> None:
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


def test_a_server_of_another_model_is_refused(home: Any, url: str, tmp_path: Path) -> None:
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


def test_settings_that_vllm_understands_otherwise_end_the_run(engine: Any) -> None:
    with pytest.raises(ConfigError, match="applies min_p before top_p"):
        ask(engine, [[1]], min_p=0.1, top_p=0.5)


def worker_of(url: str) -> int:
    """Return the process of the worker of the server at ``url``."""
    port = url.rpartition(":")[2]
    lines = subprocess.run(["ps", "-eww", "-o", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in lines.splitlines()[1:]]
    children: dict[str, list[tuple[str, str]]] = {}
    for pid, parent, args in rows:
        children.setdefault(parent, []).append((pid, args))
    servers = [pid for pid, _, args in rows if f"--port {port}" in args and "guard.py" not in args]
    waiting, found = servers, []
    while waiting:
        for pid, args in children.get(waiting.pop(), []):
            waiting.append(pid)
            if "Worker" in args:
                found.append(int(pid))
    assert found
    return found[0]


def test_a_killed_server_is_started_again_and_its_requests_sent_again(
    home: Any, engine: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = {name: tensor * 1.1 for name, tensor in home.weights.tensors()}
    engine.load(Weights(77, scaled.items))
    queries, settings = [[1, 2]] * 600, SamplingConfig(max_new_tokens=200)
    expected = ask(engine, queries, range(600), max_new_tokens=200)
    future = engine.submit(Request(queries, range(600), settings, "train"))
    time.sleep(0.1)
    os.kill(worker_of(url), signal.SIGKILL)
    again: Generated = future.result()
    assert again.ids == expected.ids
    assert again.versions == [77] * 600, "with the weights that were loaded last, not those of the files"
    assert again.logprobs is not None
    assert expected.logprobs is not None
    assert torch.allclose(again.logprobs, expected.logprobs, atol=1e-4)
    assert engine.restarts == 1
    assert sum("it is started again, with the weights of step 77" in line for line in caplog.messages) == 1


def test_a_server_that_dies_too_often_is_an_error(home: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "restarts", 3)
    os.kill(worker_of(engine.servers[0].url), signal.SIGKILL)
    with pytest.raises(EngineError, match=r"died: .*rollout.engine.restarts allows 3"):
        ask(engine, [[1, 2]] * 8, max_new_tokens=200)
