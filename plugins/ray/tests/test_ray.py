"""The engine ray: what is refused without Ray, and on a cluster of this machine the bits of `local`, deaths, ends."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import faults
import trainkit
import trainkit_ray
from tables import table
from trainkit import TRLConfig
from trainkit.errors import ConfigError, EngineError
from trainkit.rollouts import Request
from trainkit.testing import tiny_t5
from trainkit.testing.trainers import count_first_letters, tiny_trainer
from trainkit_kit import check_engine
from trainkit_ray import RayConfig
from trainkit_ray.cluster import speaks_grpc
from trainkit_ray.generator import packed, unpacked, viewed

# --------------------------------------------------------------------------------------------------- without Ray


def test_a_run_without_ray_is_told_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainkit_ray.cluster, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install 'trainkit-ray\[ray\]'"):
        tiny_trainer("rloo", tmp_path, rollout__engine="ray")


def test_ray_is_imported_only_where_it_is_used() -> None:
    """So that `trainkit plugins`, and runs with other engines, neither need it nor wait for it."""
    for path in Path(trainkit_ray.__file__).parent.glob("*.py"):
        assert not re.search(r"^(import|from) ray\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_an_algorithm_that_changes_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the engine 'ray' cannot sample from logits that 'ilql' changes"):
        tiny_trainer("ilql", tmp_path, rollout__engine="ray")


def test_what_the_engine_in_the_actors_cannot_do_is_refused(tmp_path: Path) -> None:
    engine = {"name": "ray", "engine": {"name": "vllm", "mode": "process"}}
    with pytest.raises(ConfigError, match=r"the engine 'ray' cannot generate with a model of type 't5'"):
        tiny_trainer("rloo", tmp_path, rollout__engine=engine, model=tiny_t5(10))


@table(
    "settings, told",
    [
        ({"actors": 0}, "rollout.engine.actors: should be greater than or equal to 1"),
        ({"address": "10.0.0.1"}, "rollout.engine.address: should be host:port of the head node"),
        ({"address": "ray://10.0.0.1:10001"}, "should be host:port of the head node"),
        ({"cpus": 2}, "cpus has no effect without address"),
        ({"threads": 0}, "rollout.engine.threads: should be greater than or equal to 1"),
        ({"actor": 2}, "rollout.engine.actor: unknown field; did you mean 'actors'?"),
        ({"engine": "ray"}, "should be what samples in an actor, e.g. 'local'; given 'ray' itself"),
        ({"engine": "rey"}, "there is no engine 'rey'; did you mean 'ray'?"),
        ({"engine": {"name": "vllm", "mod": "process"}}, "rollout.engine.engine.mod: unknown field"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    given = {"method": {"name": "rloo"}, "model": {"model_path": "none"}}
    with pytest.raises(ConfigError) as caught:
        TRLConfig.from_dict({**given, "rollout": {"engine": {"name": "ray", **settings}}})
    assert told in str(caught.value)


def test_an_address_is_a_host_with_a_port_or_auto() -> None:
    for address in ("10.0.0.1:6379", "head:6379", "auto", None):
        assert RayConfig(name="ray", address=address).address == address


@table(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).bfloat16(),
        torch.randn(5).half(),
        torch.randn(3, 4, dtype=torch.float64).T,
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
    ],
)
def test_tensors_travel_with_their_bits_dtype_and_shape(tensor: Tensor) -> None:
    found = unpacked(packed(tensor))
    assert found.equal(tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)


def test_a_tensor_is_packed_without_a_copy() -> None:
    tensor = torch.zeros(4)
    data, _, _ = packed(tensor)
    tensor.fill_(1.0)
    assert data.any()


# ------------------------------------------------------------------------------------------ on a cluster of two actors

TWO = {"name": "ray", "actors": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster that stays between the tests, as if another engine of this process used it."""
    from trainkit_ray import cluster

    cluster.enter(None)
    yield
    cluster.leave([])


def start(code: str, *arguments: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    command, both = [sys.executable, "-c", code, *arguments], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, text=True, env={**os.environ, **variables}, **both)


LEARNER = """
import sys, time
from pathlib import Path
from threading import Thread
from trainkit.testing.trainers import tiny_trainer
trainer = tiny_trainer("rloo", Path("run"), rollout__engine={"name": "ray", "actors": 2})
trainer.generate(["a"])
print(*trainer.sampling.engine.pids, flush=True)
time.sleep(600)
"""


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def alive(pids: set[int]) -> set[int]:
    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return {pid for pid in pids if lives(pid)}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[int], set[int]]:
    """The actors, and all processes, of a learner that was killed by SIGKILL when they sampled."""
    learner = start(LEARNER, cwd=tmp_path_factory.mktemp("killed"))
    assert learner.stdout is not None
    actors = {*map(int, learner.stdout.readline().split())}
    everything = descendants(learner.pid)
    learner.kill()
    learner.communicate(timeout=60)
    assert len(actors) == 2
    assert actors < everything
    return actors, everything


def left(pids: set[int], seconds: float) -> set[int]:
    """Those of the processes that are alive after so many seconds; none as soon as there are none."""
    ends = time.monotonic() + seconds
    while (found := alive(pids)) and time.monotonic() < ends:
        time.sleep(0.2)
    return found


@pytest.mark.engines
def test_the_actors_of_a_learner_that_is_killed_end_at_once(killed: tuple[set[int], set[int]]) -> None:
    assert left(killed[0], 30) == set()


@pytest.mark.engines
def test_the_engine_conforms() -> None:
    report = check_engine(TWO)
    assert {"engine_equals_core", "engine_deaths", "engine_closes"} <= {result.check.name for result in report.results}


def ended(name: str, place: Path, engine: Any, **changes: Any) -> Any:
    """A trainer after two collections."""
    usual = {"optimizer__lr": 0.01, "rollout__num_rollouts": 8, "rollout__batch_size": 4, "train__total_steps": 6}
    trainer = tiny_trainer(name, place, rollout__engine=engine, **{**usual, **changes})
    trainer.learn()
    return trainer


def require_equal(one: Any, other: Any) -> None:
    left, right = one.unwrapped.state_dict(), other.unwrapped.state_dict()
    assert [key for key in left if not left[key].equal(right[key])] == []


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ppo", {"train__mixed_precision": "bf16"}),
        ("ppo", {"rollout__temperature": 0.7, "rollout__top_p": 0.9}),
        ("rloo", {"model": tiny_t5(10)}),
        ("online_dpo", {}),
        ("ppo", {"rollout__staleness": 1}),
    ],
    ids=["ppo-bf16", "ppo", "rloo-t5", "online_dpo", "ppo-ahead"],
)
def test_a_run_ends_with_the_bits_of_local(name: str, changes: dict[str, Any], cluster: None, tmp_path: Path) -> None:
    one, other = (ended(name, tmp_path / str(at), at, **changes) for at in ("local", "ray"))
    require_equal(one, other)
    assert one.progress.sampler_exact == other.progress.sampler_exact
    assert len(other.sampling.engine.pids) == 1


@pytest.mark.engines
def test_requests_go_to_all_actors_and_threads_are_those_of_the_learner(cluster: None, tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path, rollout__engine=TWO)
    trainer.generate(["a"])
    for _ in range(3):
        trainer.generate(["a"])
    assert [seat.turns for seat in trainer.sampling.engine.seats] == [2, 2]
    assert len({*trainer.sampling.engine.pids}) == 2
    assert str(trainer.sampling.engine) == "'ray' (2 actors on this machine)"
    assert threads(trainer) == torch.get_num_threads()
    other = tiny_trainer("rloo", tmp_path, rollout__engine={"name": "ray", "threads": 3})
    other.generate(["a"])
    assert threads(other) == 3


@pytest.mark.engines
def test_actors_read_weights_where_ray_stores_them_once_for_a_machine(cluster: None, tmp_path: Path) -> None:
    import ray

    def permissions(_: Any, given: Any) -> str:
        at = viewed(given).data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            if first <= at < last:
                return line.split()[1]
        return ""

    trainer = tiny_trainer("rloo", tmp_path, rollout__engine=TWO)
    trainer.generate(["a"])
    stored = ray.put(packed(torch.ones(1 << 20)))
    found = ray.get([seat.actor.__ray_call__.remote(permissions, stored) for seat in trainer.sampling.engine.seats])
    assert all(each.endswith("s") for each in found), f"memory that processes share, {found}"


def threads(trainer: Any) -> int:
    import ray

    found: int = ray.get(trainer.sampling.engine.seats[0].actor.__ray_call__.remote(lambda _: torch.get_num_threads()))
    return found


@pytest.mark.engines
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_with_an_actor_that_is_killed_ends_as_one_without(
    sent: signal.Signals, cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of the second collection, after the weights were sent."""
    calls: list[int] = []

    def reward(outputs: list[str], **rest: Any) -> list[float]:
        calls.append(len(outputs))
        if len(calls) == 3:
            os.kill(made[0].sampling.engine.pids[0], sent)
        return count_first_letters(outputs)

    made: list[Any] = []
    changes: dict[str, Any] = {"optimizer__lr": 0.01, "rollout__num_rollouts": 8, "rollout__batch_size": 4}
    trainer = tiny_trainer("rloo", tmp_path / "ray", rollout__engine=TWO, arguments={"reward_fn": reward}, **changes)
    made.append(trainer)
    with caplog.at_level(logging.WARNING, logger="trainkit_ray"):
        trainer.learn()
    told = [record.getMessage() for record in caplog.records if record.name == "trainkit_ray"]
    assert len(told) == trainer.sampling.engine.restarts == 1
    assert "of the engine 'ray' (2 actors on this machine) has died and is replaced (restart 1 of 3)" in told[0]
    straight = tiny_trainer("rloo", tmp_path / "local", **changes)
    straight.learn()
    require_equal(trainer, straight)


class Ends:
    """Sends its own process SIGTERM after a step, as a scheduler would."""

    @trainkit.hookimpl
    def on_step(self, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.engines
def test_a_run_that_is_stopped_while_actors_sample_ahead_goes_on_to_the_bits_of_local(
    cluster: None, tmp_path: Path
) -> None:
    """B11."""
    changes = {"rollout__staleness": 1, "train__save_interval": 100, "method__ppo_epochs": 1}
    straight = ended("ppo", tmp_path / "local", "local", **changes)
    with pytest.raises(SystemExit) as stopped:
        ended("ppo", tmp_path / "ray", TWO, callbacks=[Ends()], **changes)
    assert stopped.value.code == 143
    resumed = ended("ppo", tmp_path / "ray", TWO, train__resume="auto", **changes)
    assert resumed.progress.step == 6
    require_equal(straight, resumed)


@pytest.mark.engines
@pytest.mark.parametrize("mode", ["storm", "generators"])
def test_runs_whose_learner_or_actors_are_killed_again_and_again_end_with_the_bits_of_local(
    mode: str, cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1 and B2, with staleness 1. The runs join the cluster of the test, so that they begin sooner."""
    import ray

    engine = {"name": "ray", "cpus": 0, "max_restarts": 9, "address": ray.get_runtime_context().gcs_address}
    settings = {"rollout__staleness": 1, "method__ppo_epochs": 1, "rollout__engine": engine}
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    given = {"kills": 2, "settings": settings, **({"seed": 7} if mode == "storm" else {})}
    found = faults.killed(mode, ["ppo"], tmp_path, timeout=300, **given)["ppo"]
    assert found["kills"] == 2


@pytest.mark.engines
def test_one_death_more_than_max_restarts_is_an_error_with_its_cause(cluster: None, tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    trainer = tiny_trainer("rloo", tmp_path, rollout__engine={"name": "ray", "max_restarts": 0})
    trainer.generate(["a"])
    os.kill(trainer.sampling.engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"lost actor 1, and 0 were replaced before \(max_restarts\)") as caught:
        trainer.generate(["a"])
    assert isinstance(caught.value.__cause__, RayActorError)


@pytest.mark.engines
def test_an_exception_in_an_actor_and_an_answer_that_is_not_finite_are_errors(cluster: None, tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path, rollout__engine="ray")
    trainer.generate(["a"])
    future = trainer.sampling.engine.submit(Request([[99]], [1], trainer.settings(), "generate"))
    with pytest.raises(EngineError, match=r"'ray' \(1 actor on this machine\) failed in actor 1: IndexError") as caught:
        future.result(60)
    assert isinstance(caught.value.__cause__, IndexError)
    assert trainer.generate(["a"]).outputs, "the actor lives on"

    with torch.no_grad():
        next(trainer.unwrapped.model.parameters()).fill_(torch.nan)
    with pytest.raises(EngineError, match="returned logprobs that are not finite"):
        trainer.generate(["a"])


@pytest.mark.engines
def test_a_place_that_an_actor_does_not_get_is_an_error(cluster: None, tmp_path: Path) -> None:
    engine = {"name": "ray", "gpus": 64, "timeout": 3}
    with pytest.raises(EngineError, match=r"has not started actor 1 within 3 s; Ray has to find 64 GPUs"):
        tiny_trainer("rloo", tmp_path, rollout__engine=engine).generate(["a"])


@pytest.mark.engines
def test_engines_of_one_process_share_a_cluster_and_no_other(cluster: None, tmp_path: Path) -> None:
    import ray

    one, other = (tiny_trainer("rloo", tmp_path, rollout__engine="ray") for _ in range(2))
    assert one.generate(["a"]).outputs == other.generate(["a"]).outputs
    one.sampling.engine.close()
    assert ray.is_initialized()
    assert other.generate(["a"]).outputs
    address = ray.get_runtime_context().gcs_address
    with pytest.raises(EngineError, match="another engine of this process uses the cluster of this machine"):
        tiny_trainer("rloo", tmp_path, rollout__engine={"name": "ray", "address": address}).generate(["a"])


@pytest.mark.engines
def test_an_address_where_nothing_listens_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(
        EngineError, match=rf"cannot be reached: nothing listens at {address} \(ConnectionRefusedError"
    ) as caught:
        tiny_trainer("rloo", tmp_path, rollout__engine={"name": "ray", "address": address}).generate(["a"])
    assert isinstance(caught.value.__cause__, OSError)
    assert time.monotonic() - started < 10


@table("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_server_at_the_address_is_told_from_ray(answer: bytes, tmp_path: Path) -> None:
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        thread = Thread(target=serve)
        thread.start()
        assert speaks_grpc(address) is False
        thread.join()


# ---------------------------------------------------------------------------------------------------- other processes

HEAD = """
import sys, ray
ray.init(address="local", include_dashboard=False, num_cpus=2)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
print(sum(node["Alive"] for node in ray.nodes()), flush=True)
"""
JOINS = """
import sys, ray
from pathlib import Path
from threading import Thread
from trainkit.testing.trainers import tiny_trainer
engine = {"name": "ray", "actors": 2, "address": sys.argv[1]}
made = [tiny_trainer("rloo", Path("unused"), rollout__engine=each) for each in (engine, "local")]
one, other = (trainer.generate(["a", "bc"]).outputs for trainer in made)
assert one == other, (one, other)
assert ray.available_resources().get("CPU", 0) == 0, "each actor has reserved a CPU"
made[0].sampling.engine.close()
assert not ray.is_initialized()
"""


@pytest.mark.engines
def test_a_cluster_at_an_address_is_joined_and_left_running(tmp_path: Path) -> None:
    head = start(HEAD, cwd=tmp_path)
    assert head.stdout is not None
    try:
        address = head.stdout.readline().strip()
        with start(JOINS, address, cwd=tmp_path, RAY_AUTH_MODE="token") as joined:
            assert joined.wait(120) == 0
        told, _ = head.communicate("\n", timeout=60)
        assert told.strip() == "1", "the cluster is alive"
    finally:
        head.kill()


TORCHRUN = """
import sys
from pathlib import Path
from threading import Thread
import torch
from trainkit.testing.trainers import tiny_trainer
address = sys.argv[1] if sys.argv[1:] else None
for engine, sharding in (("local", "none"), ("ray", "none"), ("ray", "fsdp2")):
    entry = {"name": "ray", "address": address} if engine == "ray" else engine
    changes = {"rollout__engine": entry, "train__total_steps": 4, "optimizer__lr": 0.01}
    changes["optimizer__kwargs"] = {"eps": 1e-4}  # weights that cannot change the loss would move by the rounding of 0
    if sharding == "fsdp2":
        changes["rollout__staleness"] = 1
    trainer = tiny_trainer("rloo", Path("run") / engine / sharding, train__sharding=sharding, **changes)
    trainer.learn()
    if sharding == "none" and trainer.accelerator.is_main_process:
        torch.save(trainer.unwrapped.state_dict(), f"{engine}.pt")
    if engine == "ray":
        trainer.generate(["a", "b"])
        held = trainer.parallel.gather([trainer.sampling.engine.loaded.hex()])
        models = trainer.parallel.gather([trainer.sampling.engine._packed.hex()])
        assert address is None or len({*held}) == len({*models}) == 1, "stored once for the machine"
        trainer.accelerator.wait_for_everyone()
        trainer.sampling.engine.close()
    if sharding == "fsdp2":
        changes["rollout__engine"] = "local"
        alone = tiny_trainer("rloo", Path("run") / "alone", **changes)
        alone.learn()
        with trainer.sharding.unsharded():
            for name, tensor in alone.unwrapped.state_dict().items():
                torch.testing.assert_close(trainer.unwrapped.state_dict()[name], tensor, rtol=0.0, atol=1e-5)
torch.distributed.destroy_process_group()
"""


@pytest.mark.engines
@pytest.mark.parametrize("joins", [False, True])
def test_each_of_two_processes_has_actors_of_its_own(joins: bool, tmp_path: Path) -> None:
    """Also if they divide the model: actors keep copies of the weights, which the processes release.

    In a cluster that they join, one process stores the model and its weights for the actors of both.
    """
    head = start(HEAD, cwd=tmp_path) if joins else None
    address = [] if head is None or head.stdout is None else [head.stdout.readline().strip()]
    (tmp_path / "script.py").write_text(TORCHRUN)
    port = random.Random(os.getpid()).randrange(20000, 30000)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}", "script.py", *address]
    try:
        done = subprocess.run(
            [sys.executable, *launcher],
            cwd=tmp_path,
            env={**os.environ, "ACCELERATE_USE_CPU": "true", **({"RAY_AUTH_MODE": "token"} if joins else {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        if head is not None:
            head.kill()
            head.communicate()
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (torch.load(tmp_path / f"{engine}.pt") for engine in ("local", "ray"))
    assert [key for key in one if not one[key].equal(other[key])] == []


@pytest.mark.engines
def test_a_ray_that_the_user_initialised_is_used_and_not_shut_down(tmp_path: Path) -> None:
    code = """
import ray
from pathlib import Path
from threading import Thread
from trainkit.testing.trainers import tiny_trainer
ray.init(address="local", include_dashboard=False, num_cpus=1)
trainer = tiny_trainer("rloo", Path("unused"), rollout__engine="ray")
trainer.generate(["a"])
trainer.sampling.engine.close()
assert ray.is_initialized()
"""
    with start(code, cwd=tmp_path) as done:
        assert done.wait(180) == 0


@pytest.mark.engines
def test_nothing_is_left_of_a_learner_that_was_killed(killed: tuple[set[int], set[int]]) -> None:
    """The last test, because Ray's own helpers look for their parent once in a minute or two."""
    assert left(killed[1], 180) == set()
