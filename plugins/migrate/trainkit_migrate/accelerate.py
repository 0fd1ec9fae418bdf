"""Values of files of accelerate that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings
from trainkit_migrate.training_arguments import sharding

REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")


def implied(_config: Settings, _context: Context) -> Settings:
    """Return nothing: a file of accelerate says nothing about the algorithm."""
    return {}


def distributed(value: Any, context: Context) -> Settings:
    """Return the sharding of the kind of distribution."""
    name = str(value).upper()
    if name in ("NO", "FALSE", *REPLICATED):  # YAML reads NO as false
        return {"train.sharding": "none"}
    if name == "FSDP":
        return {"train.sharding": "fsdp2"}
    if name == "DEEPSPEED":
        return {} if context.get("deepspeed_config") else {"train.sharding": "zero2"}
    raise RefusedError(f"given {value!r}; write train.sharding: fsdp2, zero2 or zero3 (docs/distributed.md)")


def zero(value: Any, context: Context) -> Settings:
    """Return the sharding of a stage of ZeRO."""
    context.remarks.append(
        "it is train.sharding, by trainkit-deepspeed; fsdp2 trains every algorithm (docs/distributed.md)"
    )
    return {"train.sharding": sharding(value, context)}


def clipping(value: Any, _context: Context) -> Settings:
    """Return the norm at which gradients are clipped; ``auto`` leaves it to the other configuration."""
    return {} if value == "auto" else {"train.max_grad_norm": value or None}


def strategy(value: Any, _context: Context) -> Settings:
    """Return the sharding of a strategy of FSDP."""
    name = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}.get(str(value), str(value))
    return {"train.sharding": "none" if name == "NO_SHARD" else "fsdp2"}


def launch(value: Any, context: Context) -> Settings:
    """Say how the processes are started."""
    machines = context.get("num_machines", 1)
    nodes = ""
    if machines > 1:
        address = context.get("main_process_ip", "HOST")
        port = context.get("main_process_port", 29500)
        nodes = f"--nnodes={machines} --node_rank=RANK --master_addr={address} --master_port={port} "
    each = value // machines
    context.remarks.append(f"start with: torchrun {nodes}--nproc_per_node={each} -m trainkit.cli train CONFIG.yaml")
    return {}
