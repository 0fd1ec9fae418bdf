"""What runs inside vLLM's workers: log-probabilities at the sampling temperature, and loading of weights.

vLLM imports this module by its name (``--worker-extension-cls trainkit_vllm.worker.WorkerExtension``) and adds the
methods of the class to its worker. They are called over HTTP by ``/collective_rpc``, or by ``LLM.collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit_vllm.transfer import Piece, group_of, mapped, store_at, unpacked


class WorkerExtension:
    """Methods that trainkit adds to a worker of vLLM. Their names begin with ``trainkit``, so that none is hidden."""

    def trainkit_describe(self, excluded: Sequence[int] = ()) -> dict[str, Any]:
        """Return what the worker serves; from now on it computes log-probabilities at the sampling temperature.

        The tokens ``excluded`` are not sampled, and have no probability. The names and shapes are those of the
        checkpoint that the worker has loaded: inside the worker, the tensors are fused and laid out in other ways.
        """
        worker: Any = self
        _at_temperature(worker.model_runner.sampler, excluded)
        model, parallel = worker.model_config, worker.parallel_config
        return {
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "limit": model.max_model_len,
            "shapes": shapes_in(checkpoint(model.model)),
            "adapters": worker.vllm_config.lora_config is not None,
            "workers": parallel.world_size * parallel.data_parallel_size,
        }

    def trainkit_load(self, directory: str) -> None:
        """Load the tensors of the safetensors files in ``directory``; other tensors keep their values."""
        worker: Any = self
        worker.reload_weights(weights_iterator=_tensors(Path(directory)))

    def trainkit_load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors of this process, which stay where they are; others keep their values."""
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(tensors.items()))

    def trainkit_join(self, address: str, port: int, size: int, gpu: bool, seconds: float) -> str:
        """Join a group whose first process is the trainer; return what prevents it, or an empty string."""
        worker: Any = self
        parallel = worker.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        try:
            worker.trainkit_group = group_of(store_at(address, port, rank, size, seconds), rank, size, gpu, seconds)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def trainkit_begin(self, size: int, told: dict[str, Any] | None, token: list[int]) -> str:
        """Prepare to take buckets of ``size`` bytes; return what prevents it, or an empty string.

        Args:
            size: the bytes of a bucket.
            told: `trainkit_vllm.transfer.Shared.told`; None: buckets are broadcast in the group.
            token: what a shared bucket begins with.
        """
        worker: Any = self
        try:
            if told is None:
                device = worker.device if worker.trainkit_group.name() == "nccl" else "cpu"
                bucket = torch.empty(size, dtype=torch.uint8, device=device)
            else:
                bucket = mapped(told, size, worker.device)
                if bucket[: len(token)].tolist() != token:
                    return "a worker maps other memory than the trainer's"
        except (OSError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        worker.trainkit_bucket, worker.trainkit_broadcasts = bucket, told is None
        _begin_reload(worker)
        return ""

    def trainkit_take(self, pieces: list[Piece], used: int) -> None:
        """Load the tensors of a bucket, which has ``used`` bytes."""
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found, unused-ignore]

        worker: Any = self
        if worker.trainkit_broadcasts:
            worker.trainkit_group.broadcast(worker.trainkit_bucket[:used], 0).wait()
        with set_current_vllm_config(worker.vllm_config):
            worker.model_runner.get_model().load_weights(unpacked(worker.trainkit_bucket, pieces))
        if worker.device.type == "cuda":
            torch.cuda.synchronize()  # the trainer overwrites the bucket

    def trainkit_finish(self) -> None:
        """Use the weights that were taken; others keep their values."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found, unused-ignore]
            finalize_layerwise_reload,
        )

        worker: Any = self
        del worker.trainkit_bucket
        runner = worker.model_runner
        with set_current_vllm_config(worker.vllm_config):
            finalize_layerwise_reload(runner.get_model(), worker.model_config)
        for what in ("lora_state", "encoder_cache", "mm_cache"):  # as `reload_weights`
            getattr(runner, f"reset_{what}")()


def _begin_reload(worker: Any) -> None:
    """Let the worker's model wait for new weights; undo what remains of a reload that was not finished.

    vLLM would load what that has left, such as a tensor of another shape, together with the new weights.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found, unused-ignore]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found, unused-ignore]
        get_layerwise_info,
    )

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
            for layer in model.modules():
                info = get_layerwise_info(layer)
                info.loaded_weights.clear()
                info.load_numel = 0
            finalize_layerwise_reload(model, worker.model_config)
        initialize_layerwise_reload(model)


def _at_temperature(sampler: Any, excluded: Sequence[int]) -> None:
    """Make vLLM's sampler compute its log-probabilities at each row's temperature, before truncation.

    The tokens ``excluded`` have none.

    Raises:
        RuntimeError: it is another sampler than the one that this is written for; says how to get that one.
    """
    from vllm.v1.sample.sampler import Sampler  # type: ignore[import-not-found, unused-ignore]

    if type(sampler) is not Sampler:
        raise RuntimeError(
            f"vLLM samples with {type(sampler).__module__}.{type(sampler).__qualname__}; start it without speculative "
            "decoding and with VLLM_USE_V2_MODEL_RUNNER=0 in its environment"
        )
    if sampler.logprobs_mode != "raw_logprobs":
        raise RuntimeError(f"vLLM is started with --logprobs-mode {sampler.logprobs_mode}; remove the option")
    sampler.trainkit_excluded = list(excluded)
    if "forward" in vars(sampler):  # it is described for the second time
        return
    forward = sampler.forward

    def forward_at_temperature(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if sampler.trainkit_excluded:
            logits[:, sampler.trainkit_excluded] = -torch.inf
        temperature = sampling_metadata.temperature  # [B], 0 for greedy rows; None if all rows are greedy

        def compute(scores: Tensor) -> Tensor:
            scores = scores.float()
            if temperature is not None:
                scores = scores / temperature.where(temperature > 1e-5, 1.0).unsqueeze(1)
            return scores.log_softmax(-1)

        sampler.compute_logprobs = compute
        try:
            return forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            del sampler.compute_logprobs  # log-probabilities of prompts are computed with it, too

    sampler.forward = forward_at_temperature


def checkpoint(model: str) -> Path:
    """Return the directory of ``model``, which is a directory or the id of a model in the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors"]))


def shapes_in(directory: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in the safetensors files of ``directory``, by name."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the safetensors files in ``directory``, one after the other."""
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
