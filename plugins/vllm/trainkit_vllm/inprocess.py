"""vLLM inside the process of the trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import EngineError
from trainkit.rollouts import Generated
from trainkit_vllm.client import ADAPTER, Answer
from trainkit_vllm.launch import EXTENSION

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""What vLLM reads when it is imported or started; variables that are set take precedence, except the first two."""


class Awaited(Future[Generated]):
    """A result that is computed, with others, when it is asked for.

    Args:
        compute: sets it.
    """

    def __init__(self, compute: Callable[[], None]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> Generated:
        """Return the result."""
        if not self.done():
            self._compute()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error; None if there is a result."""
        if not self.done():
            self._compute()
        return super().exception(timeout)


class InProcess:
    """vLLM in this process, with the interface of `trainkit_vllm.client.Server`.

    Args:
        arguments: those of ``vllm.LLM``, among them the directory of the model.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        os.environ.update({name: os.environ.get(name, value) for name, value in [*ENVIRONMENT.items()][2:]})
        os.environ.update(dict([*ENVIRONMENT.items()][:2]))
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # a setting decides
        with _own_threads(), _own_generator():
            from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

            self.llm: Any = LLM(
                **{
                    "distributed_executor_backend": "uni",
                    "disable_log_stats": True,
                    "worker_extension_cls": EXTENSION,
                    **arguments,
                }
            )
        self.adapter: Any = None
        adapters = arguments.get("enable_lora", False)
        self.level = 0 if not arguments.get("enable_sleep_mode") else 1 if adapters else 2
        """What it forgets while it sleeps: 0: it does not sleep; 1: keys and values, weights go to the CPU; 2: both."""
        self.asleep = False

    def __str__(self) -> str:
        return "'vllm' in this process"

    def describe(self, excluded: Sequence[int] = ()) -> dict[str, Any]:
        """Return what is served, as `trainkit_vllm.worker.WorkerExtension.trainkit_describe` returns it."""
        found: dict[str, Any] = self.llm.collective_rpc("trainkit_describe", args=(list(excluded),))[0]
        return found

    def load_adapter(self, directory: Path) -> None:
        """Load the adapter in ``directory``."""
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]

        self.llm.llm_engine.add_lora(LoRARequest(ADAPTER, 1, str(directory), load_inplace=True))
        self.adapter = LoRARequest(ADAPTER, 1, str(directory))

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights from the memory of this process, or of its GPU."""
        self.llm.collective_rpc("trainkit_load_tensors", args=(tensors,))

    @contextmanager
    def loading(self, tag: str) -> Iterator[None]:
        """Tag what is loaded in the block; if it sleeps, wake it up, with keys and values after the block.

        Raises:
            EngineError: the prefix cache may hold what the earlier weights computed.
        """
        if self.asleep:
            torch.cuda.empty_cache()  # what training has released is still torch's
            self.llm.wake_up(tags=["weights"])
        with _own_generator():
            yield
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.update_weight_version(tag)
        if not self.llm.reset_prefix_cache():
            raise EngineError(f"the engine {self} did not clear its prefix cache after new weights were loaded")

    def rest(self) -> bool:
        """Sleep until weights are loaded; return whether it sleeps."""
        if self.level and not self.asleep:
            self.llm.sleep(level=self.level)
            self.asleep = True
        return self.asleep

    def generate_all(self, prompts: Sequence[Any], parameters: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Return a response to each of ``prompts``, of `for_engine`, sampled with vLLM's ``parameters`` of each."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found, unused-ignore]

        assert not self.asleep, "it would wait for ever"
        engine, names, outputs = self.llm.llm_engine, [str(index) for index in range(len(prompts))], dict[str, Any]()
        with _own_generator():
            try:
                for name, prompt, given in zip(names, prompts, parameters, strict=True):
                    settings = SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)
                    engine.add_request(name, prompt, settings, lora_request=self.adapter)
                while engine.has_unfinished_requests():
                    outputs |= {output.request_id: output for output in engine.step() if output.finished}
            except BaseException:
                engine.abort_request(names)
                raise
        return [_answer(outputs[name].outputs[0]) for name in names]

    def close(self) -> None:
        """Release the model and the cache."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None


def _answer(output: Any) -> Answer:
    ids = [int(token) for token in output.token_ids]
    known = output.logprobs or [{}] * len(ids)
    values = [row[token].logprob if token in row else math.nan for token, row in zip(ids, known, strict=True)]
    return Answer(ids, str(output.finish_reason), {span.version for span in output.weight_versions or []}, values)


@contextmanager
def _own_generator() -> Iterator[None]:
    """Restore torch's global generator, which vLLM seeds and uses."""
    with torch.random.fork_rng():
        yield


@contextmanager
def _own_threads() -> Iterator[None]:
    """Restore ``torch.set_num_threads``, which vLLM replaces when it starts, and the number of threads."""
    function, count = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = function
        torch.set_num_threads(count)
