"""How new weights travel to the workers of a server without files: in buckets, which both map or which are broadcast.

The trainer copies as many tensors as fit into a bucket, and the workers load them from there, until all are loaded. On
the machine of the trainer the bucket is memory that the workers map: CUDA IPC if both use one GPU, and a file in memory
on CPUs. Elsewhere it is broadcast: by NCCL from a GPU, by gloo from a CPU.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

BUCKET = 200 * 2**20
"""The bytes of a bucket; more if a tensor is larger, less if all are smaller."""

Piece = tuple[str, str, list[int]]
"""A tensor in a bucket: its name, dtype and shape."""


def bucket_size(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of a bucket for ``tensors``."""
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return max(*sizes, min(sum(sizes), BUCKET), 16)


def filled(tensors: Mapping[str, Tensor], bucket: Tensor) -> Iterator[tuple[list[Piece], int]]:
    """Copy tensors into ``bucket``, as many as fit at a time; yield what is in it and how many bytes that are."""
    pieces, used = list[Piece](), 0
    for name, tensor in tensors.items():
        if used + tensor.nbytes > bucket.numel():
            yield pieces, used
            pieces, used = [], 0
        bucket[used : used + tensor.nbytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        pieces.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        used += tensor.nbytes
    if pieces:
        yield pieces, used


def unpacked(bucket: Tensor, pieces: list[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the tensors in ``bucket``; vLLM keeps some until it has all parts of a layer."""
    at = 0
    for name, kind, shape in pieces:
        dtype: torch.dtype = getattr(torch, kind)
        size = prod(shape) * dtype.itemsize
        yield name, bucket[at : at + size].clone().view(dtype).reshape(shape)
        at += size


class Shared:
    """A bucket that other processes can map: those on the same GPU, or for ``device`` CPU those of the same machine.

    Raises:
        OSError, RuntimeError: the system has no such memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._file: Any = None
        if device.type == "cuda":
            self.bucket = torch.empty(size, dtype=torch.uint8, device=device)
            handle = reduce_tensor(self.bucket)[1][7:]
            self.told: dict[str, Any] = {
                "gpu": _uuid(device),
                "handle": [each.hex() if isinstance(each, bytes) else each for each in handle],
            }
            return
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory (memfd_create)")
        self._file = os.fdopen(os.memfd_create("trainkit-weights"), "r+b")
        self._file.truncate(size)
        self.bucket = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8)
        self.told = {"path": f"/proc/{os.getpid()}/fd/{self._file.fileno()}"}

    def close(self) -> None:
        """Release the memory, once no other process maps it."""
        del self.bucket
        if self._file is not None:
            self._file.close()
        elif torch.cuda.is_available():
            torch.cuda.ipc_collect()


class Broadcast:
    """A bucket that is sent to all workers of a group."""

    told = None

    def __init__(self, size: int, device: torch.device, group: Any) -> None:
        self.bucket, self.group = torch.empty(size, dtype=torch.uint8, device=device), group

    def close(self) -> None:
        """Release the memory."""
        del self.bucket


def mapped(told: Mapping[str, Any], size: int, device: torch.device) -> Tensor:
    """Return the bucket that another process has described by `Shared.told`, for a worker on ``device``.

    Raises:
        OSError, RuntimeError, ValueError: this process cannot map it.
    """
    if "path" in told:
        with open(told["path"], "r+b") as file:  # nothing is written, but torch has no tensors that are read only
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    if device.type != "cuda" or _uuid(device) != told["gpu"]:
        raise RuntimeError(f"the trainer is on the GPU {told['gpu']}, and a worker on another device")
    handle = [bytes.fromhex(each) if isinstance(each, str) else each for each in told["handle"]]
    shape = (torch.Tensor, torch.Size([size]), (1,), 0, torch.UntypedStorage, torch.uint8, device.index)
    bucket: Tensor = rebuild_cuda_tensor(*shape, *handle)
    return bucket


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def store_at(address: str, port: int, rank: int, size: int, seconds: float) -> Any:
    """Return the store by which the processes of a group find each other; the first one, rank 0, holds it.

    Raises:
        RuntimeError: it cannot be reached.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    limit = timedelta(seconds=seconds)
    return TCPStore(address, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)


def group_of(store: Any, rank: int, size: int, gpu: bool, seconds: float) -> Any:
    """Return the group of trainer (rank 0) and workers, made by all of them together.

    Raises:
        RuntimeError: they cannot reach each other.
    """
    limit = timedelta(seconds=seconds)
    if not gpu:
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, size, limit)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, rank, size, options)
