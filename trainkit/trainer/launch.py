"""How the processes of a run were launched: what accelerate makes of it, or why it is refused."""

from __future__ import annotations

import atexit
import os
import time

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import str_to_bool

from trainkit.errors import ConfigError

SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
"""Ways to launch that are refused, by the variable that accelerate's launcher sets; on CPUs it ignores them itself."""


def make_accelerator(mixed_precision: str) -> Accelerator:
    """An accelerator; one process may hold several trainers, one after another, at different precisions.

    Raises:
        ConfigError: it was launched in a way that would not train what the configuration says.
    """
    sharded = [name for flag, name in SHARDED.items() if str_to_bool(os.environ.get(flag, "false"))]
    if sharded:
        raise ConfigError(
            f"accelerate was told to use {' and '.join(sharded)}, which divides the model among processes; sampling "
            "and checkpoints need the whole model in each. Launch with 'accelerate launch --multi_gpu'"
        )
    state = AcceleratorState._shared_state
    if state and state.get("_mixed_precision") not in (None, mixed_precision):
        AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=mixed_precision)
    _check_processes(int(accelerator.num_processes))
    if accelerator.num_processes > 1 and dist.get_backend() == "gloo":
        atexit.unregister(_let_go)
        atexit.register(_let_go)
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"accelerate was told to accumulate over {accelerator.gradient_accumulation_steps} steps, which would "
            "divide the gradient; leave that out and set train.microbatch_size, which gives the exact gradient"
        )
    return accelerator


def _let_go() -> None:
    """Leave gloo's threads the time to let go of the last collective's tensors, for which they need the interpreter.

    A thread that asks for it while the interpreter ends aborts the process: "terminate called without an active
    exception" (pytorch#179291).
    """
    time.sleep(0.2)


def _check_processes(used: int) -> None:
    environment = os.environ
    launched = int(environment.get("WORLD_SIZE", "1"))
    if launched != used:
        raise ConfigError(
            f"{launched} processes were launched, and accelerate takes each for a run of its own; launch with "
            "'accelerate launch', or on CPUs set ACCELERATE_USE_CPU=true"
        )
    alone = "WORLD_SIZE" not in environment and "MASTER_ADDR" in environment and used == 1
    if alone and str_to_bool(environment.get("ACCELERATE_USE_CPU", "false")):
        raise ConfigError(
            "'accelerate launch --cpu' starts one process, however many are asked for. For several on CPUs set "
            "ACCELERATE_USE_CPU=true and launch with 'accelerate launch --multi_gpu --num_processes N'"
        )
