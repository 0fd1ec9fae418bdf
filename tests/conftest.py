"""What all tests share: one thread, reproducible property tests, processes played by threads, fake distributions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "trainkit", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trainkit")
torch.set_num_threads(1)

Reduce = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="session")
def in_lockstep() -> Callable[[Callable[[Any, Reduce], Any], Sequence[Any]], list[Any]]:
    """``run(fn, shards)``: ``fn(shard, reduce)`` for every shard at once, ``reduce`` summing over the shards."""

    def run(fn: Callable[[Any, Reduce], Any], shards: Sequence[Any]) -> list[Any]:
        barrier, slots = Barrier(len(shards), timeout=30), [torch.zeros(())] * len(shards)

        def reduce_as(rank: int) -> Reduce:
            def reduce(x: torch.Tensor) -> torch.Tensor:
                slots[rank] = x
                barrier.wait()  # everyone has given
                total = torch.stack(slots).sum(0)
                barrier.wait()  # everyone has taken
                return total

            return reduce

        with ThreadPoolExecutor(len(shards)) as pool:
            return list(pool.map(lambda rank: fn(shards[rank], reduce_as(rank)), range(len(shards))))

    return run


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``install("dist", {"name": "module"}, "source of module")``: a distribution, as an installer leaves it."""

    def install(
        distribution: str,
        entries: Mapping[str, str],
        source: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> Path:
        home = tmp_path / distribution
        info = home / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*metadata, *(f"Requires-Dist: {line}" for line in requires), ""]))
        lines = [f"{name} = {module}" for name, module in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[trainkit]", *lines, ""]))
        if source is not None:
            for module in {*entries.values()}:
                (home / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(home)
        importlib.invalidate_caches()
        return home

    return install
