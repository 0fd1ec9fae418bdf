"""The accelerator of a run, and the ways of launching processes that are refused."""

from __future__ import annotations

import atexit
import logging
import os
import time
from datetime import timedelta
from functools import cache
from typing import Any, Literal, TypeVar

import accelerate.optimizer
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, str_to_bool

from trainkit.config import MethodConfig, TRLConfig
from trainkit.errors import ConfigError
from trainkit.plugins import get_sharding
from trainkit.plugins.hooks import entry_name

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)

# accelerate asks in each step whether the package lomo-optim is installed, which takes longer than a small Adam step
accelerate.optimizer.is_lomo_available = cache(accelerate.optimizer.is_lomo_available)

_first: dict[str, float] = {}
"""The timeout with which the processes of this one's group were connected."""

SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
"""Ways of launching that are refused, by the variable that accelerate's launcher sets. It ignores them on CPUs."""


def default_precision() -> Literal["no", "bf16"]:
    """Return the precision of forward passes where the configuration gives none."""
    on_cpu = str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "false"))
    has_bf16 = not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "no"


def with_precision(
    config: TRLConfig[M], usual: Literal["no", "bf16"], *, low: bool, given: bool = False
) -> TRLConfig[M]:
    """Return the configuration with the precisions that it leaves open, so that the run is resumed with them.

    Weights are then in bfloat16 where passes are by default, and the optimizer has float32 copies of them. The base of
    an adapter keeps the precision of its checkpoint instead, which exports contain.

    Args:
        config: the configuration.
        usual: the precision of passes on the device, `default_precision`.
        low: whether the trainer's models may be in 16 bits by default.
        given: whether the user gave the model or the optimizer, which are used as they are.
    """
    model, train = config.model, config.train
    low &= usual == "bf16" and train.mixed_precision is None and model.peft_config is None and not given
    low = low and get_sharding(entry_name(train.sharding)).made.masters
    left_open: dict[str, Any] = {}
    if model.dtype is None:
        left_open["model"] = {"dtype": "bfloat16" if low else "float32"}
    if train.mixed_precision is None and usual != "no":
        left_open["train"] = {"mixed_precision": usual}
    return config.evolve(**left_open) if left_open else config


def make_accelerator(mixed_precision: str, timeout: float) -> Accelerator:
    """Return an accelerator. A process may make several trainers, one after another, at different precisions.

    Args:
        mixed_precision: the precision of forward passes.
        timeout: seconds that processes wait for each other; that of the first trainer of a process applies.

    Raises:
        ConfigError: the processes were launched in a way that contradicts the configuration, or their device has no
            passes of this precision.
    """
    sharded = [name for flag, name in SHARDED.items() if str_to_bool(os.environ.get(flag, "false"))]
    if sharded:
        raise ConfigError(
            f"accelerate is configured to use {' and '.join(sharded)}, which would divide the model without trainkit's "
            "sampling, checkpoints and checks; remove that from accelerate's configuration, launch with 'accelerate "
            "launch --multi_gpu', and set train.sharding to 'fsdp2' to divide the model"
        )
    state = AcceleratorState._shared_state
    if state and state.get("_mixed_precision") not in (None, mixed_precision):
        AcceleratorState._reset_state()
    waiting = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    try:
        accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[waiting])
    except ValueError as error:
        if f"{mixed_precision} mixed precision" not in str(error):
            raise
        raise ConfigError(
            f"train.mixed_precision is {mixed_precision!r}, and this device cannot compute so ({error}); set it to 'no'"
        ) from error
    _check_processes(int(accelerator.num_processes))
    applied = _first.setdefault("timeout", timeout)
    if accelerator.num_processes > 1 and applied != timeout:
        log.warning("train.timeout is %g, and the processes are connected with %g, which applies", timeout, applied)
    if accelerator.num_processes > 1 and dist.get_backend() == "gloo":
        atexit.unregister(_let_go)
        atexit.register(_let_go)
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"accelerate is configured to accumulate over {accelerator.gradient_accumulation_steps} steps, which would "
            "divide the gradient; remove that setting and set train.microbatch_size, which gives the exact gradient"
        )
    return accelerator


def _let_go() -> None:
    """Wait until gloo's threads have released the last collective's tensors, for which they need the interpreter.

    A thread that asks for it while the interpreter ends aborts the process: "terminate called without an active
    exception" (pytorch#179291).
    """
    time.sleep(0.2)


def _check_processes(used: int) -> None:
    environment = os.environ
    launched = int(environment.get("WORLD_SIZE", "1"))
    if launched != used:
        raise ConfigError(
            f"{launched} processes were launched, and accelerate treats each as a separate run; launch with "
            "'accelerate launch', or on CPUs set ACCELERATE_USE_CPU=true"
        )
    alone = "WORLD_SIZE" not in environment and "MASTER_ADDR" in environment and used == 1
    if alone and str_to_bool(environment.get("ACCELERATE_USE_CPU", "false")):
        raise ConfigError(
            "'accelerate launch --cpu' starts one process, however many are asked for. For several on CPUs set "
            "ACCELERATE_USE_CPU=true and launch with 'accelerate launch --multi_gpu --num_processes N'"
        )
