"""How the trained model is divided among the processes: not at all, or by FSDP2."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trainkit.errors import ConfigError
from trainkit.models.policy import Policy


class Sharding(ABC):
    """The interface of a way to divide the trained model, its gradients and the optimizer's state among processes.

    Args:
        accelerator: the processes.
    """

    policy: nn.Module
    """The model as the loss calls it, once `prepare` was called."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @abstractmethod
    def prepare(self, model: nn.Module, make: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
        """Divide ``model``, which is the same on all processes; return it with the optimizer that ``make`` makes."""

    @abstractmethod
    def whole(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Return a context in which every process has the whole model and may run it as often as it wants.

        All processes enter and leave it together. It can be nested.

        Args:
            write: whether changes of the weights in it remain. They have to be the same on all processes.
        """

    @abstractmethod
    def passes(self, own: int) -> int:
        """Return how many micro-batches each process has to run, if this process has ``own`` of them."""

    @abstractmethod
    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which processes exchange gradients only if this is the last micro-batch."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of ``loss``; the gradients of all processes are averaged."""
        self.accelerator.backward(loss)

    def clip(self, limit: float | None) -> Tensor:
        """Clip the gradient to the norm ``limit``; None: not at all. Return its norm before. -> []."""
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), math.inf if limit is None else limit)
        return whole_tensor(torch.as_tensor(norm).detach())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` with whole tensors. All processes call it."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def own_part(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return the part of a state as `optimizer_state` returns it that this process keeps."""
        return state


class Replicated(Sharding):
    """Every process has the whole model; gradients are averaged by DDP."""

    def prepare(self, model: nn.Module, make: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
        """Return model and optimizer as accelerate prepares them."""
        self.policy, optimizer = self.accelerator.prepare(model, make(model))
        return self.policy, optimizer

    def whole(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def passes(self, own: int) -> int:
        """Return ``own``: processes may run different numbers of micro-batches."""
        return own

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which DDP exchanges gradients only if this is the last micro-batch."""
        return torch.enable_grad() if last else self.accelerator.no_sync(self.policy)


class FSDP2(Sharding):
    """Every process has a part of each tensor: ``torch.distributed.fsdp.fully_shard`` on each block, then on the model.

    A block is gathered when it runs. Forward and backward passes of the loss are therefore made by all processes
    together: equally many micro-batches, each in one pass.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._depth = 0
        self._writes = False

    def prepare(self, model: nn.Module, make: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
        """Shard the model, and return it with the optimizer of its shards."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        accelerator = self.accelerator
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        root: Any = fully_shard(model, mesh=mesh)
        root._get_fsdp_state()._lazy_init()  # the sampler may run blocks before the root, which each would be a root then
        self.policy = model
        self._parts: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._alone(True)
        return model, accelerator.prepare_optimizer(make(model))

    @contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        """Gather all parameters on every process, and let go of them at the end."""
        self._writes |= write
        if self._depth == 0:
            self._gather()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._let_go()

    def _gather(self) -> None:
        self._shards = dict(self.policy.named_parameters())
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self._alone(False)
        # hooks by which FSDP lets the whole parameters go whenever a state dict is made or loaded
        self._hooks = [
            (hooks, dict(hooks))
            for module in self.policy.modules()
            for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
            if hooks
        ]
        for hooks, _ in self._hooks:
            hooks.clear()

    @torch.no_grad()
    def _let_go(self) -> None:
        if self._writes:
            for name, parameter in self.policy.named_parameters():
                shard = self._shards[name]
                shard.to_local().copy_(_distributed(parameter.detach(), shard).to_local())
        self._writes = False
        for hooks, before in self._hooks:
            hooks.update(before)
        for part in self._parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
        self._alone(True)
        self._shards, self._hooks = {}, []

    def _alone(self, together: bool) -> None:
        """Make each call of the policy one pass, because all processes make it together; or as many as are fastest."""
        for module in self.policy.modules():
            if isinstance(module, Policy):
                module.one_pass = together

    def passes(self, own: int) -> int:
        """Return the largest number of micro-batches of a process."""
        most = torch.tensor([own], device=self.accelerator.device)
        return int(self.accelerator.gather(most).max())

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which gradients are exchanged only if this is the last micro-batch."""
        self._parts[-1 if self._parts[0] is not self.policy else 0].set_requires_gradient_sync(last)
        return torch.enable_grad()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's ``state_dict`` with whole tensors, gathered one at a time."""
        state = optimizer.state_dict()
        gathered = {
            key: {name: whole_tensor(value) for name, value in values.items()} for key, values in state["state"].items()
        }
        return {**state, "state": gathered}

    def own_part(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return the state with this process's part of each tensor."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def part(value: Any, parameter: Tensor) -> Any:
            fits = isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
            return _distributed(value.to(parameter.device), parameter) if fits else value

        parts = {
            key: {name: part(value, parameters[key]) for name, value in values.items()}
            for key, values in state["state"].items()
        }
        return {**state, "state": parts}


def make_sharding(name: str, accelerator: Accelerator) -> Sharding:
    """Return the sharding that `train.sharding` names."""
    return FSDP2(accelerator) if name == "fsdp2" and accelerator.num_processes > 1 else Replicated(accelerator)


def whole_tensor(tensor: Any) -> Any:
    """Return a sharded tensor whole, and anything else unchanged. All processes call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _distributed(whole: Tensor, like: Any) -> Any:
    """Return this process's part of ``whole``, which every process has, divided as ``like`` is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the models in ``model``, outermost first, as transformers and diffusers name them.

    Raises:
        ConfigError: a model names blocks, and has none of them.
    """
    found: list[nn.Module] = []
    for module in model.modules():
        names = set(getattr(module, "_no_split_modules", None) or ())
        blocks = [each for each in module.modules() if type(each).__name__ in names]
        if names and not blocks:
            raise ConfigError(
                f"train.sharding divides a model block by block, and the blocks of {type(module).__name__} "
                f"({', '.join(sorted(names))}) are not found; set it to 'none'"
            )
        found += [block for block in blocks if all(block is not other for other in found)]
    return found
