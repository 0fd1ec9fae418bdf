"""What runs inside vLLM's workers: log-probabilities at the sampling temperature, and loading of weights.

vLLM imports this module by its name (``--worker-extension-cls trainkit_vllm.worker.WorkerExtension``) and adds the
methods of the class to its worker. They are called over HTTP by ``/collective_rpc``, or by ``LLM.collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


class WorkerExtension:
    """Methods that trainkit adds to a worker of vLLM. Their names begin with ``trainkit``, so that none is hidden."""

    def trainkit_describe(self) -> dict[str, Any]:
        """Return what the worker serves; from now on it computes log-probabilities at the sampling temperature.

        The names and shapes are those of the checkpoint that the worker has loaded: inside the worker, the tensors are
        fused and laid out in other ways.
        """
        worker: Any = self
        _at_temperature(worker.model_runner.sampler)
        model = worker.model_config
        return {
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "limit": model.max_model_len,
            "shapes": shapes_in(checkpoint(model.model)),
            "adapters": worker.vllm_config.lora_config is not None,
        }

    def trainkit_load(self, directory: str) -> None:
        """Load the tensors of the safetensors files in ``directory``; other tensors keep their values."""
        worker: Any = self
        worker.reload_weights(weights_iterator=_tensors(Path(directory)))

    def trainkit_load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors of this process, which stay where they are; others keep their values."""
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(tensors.items()))


def _at_temperature(sampler: Any) -> None:
    """Make vLLM's sampler compute its log-probabilities at each row's temperature, before truncation.

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
    if "forward" in vars(sampler):  # it is described for the second time
        return
    forward = sampler.forward

    def forward_at_temperature(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
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
