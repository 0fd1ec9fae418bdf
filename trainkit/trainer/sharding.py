"""How the trained model is divided among the processes: not at all, or by FSDP2."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from trainkit.config import PluginConfig, TRLConfig
from trainkit.errors import ConfigError
from trainkit.models.images import readers_of_images, reads_images
from trainkit.models.policy import Policy
from trainkit.models.reward import Scorer
from trainkit.plugins import get_sharding
from trainkit.plugins.hooks import entry_name
from trainkit.runs import checkpoint
from trainkit.runs.resharding import divided_like, local
from trainkit.trainer.master_weights import follow, low_precision

log = logging.getLogger(__name__)

NONE = "none"
"""The name of replicated processes in configurations."""


class Sharding(ABC):
    """The interface of a way to divide the trained model, its gradients and the optimizer's state among processes.

    Derive from it, and register the class with `register_sharding`. It is made before the model. All of its methods are
    called by all processes together.

    Args:
        accelerator: the processes.
        config: its settings, of the class that it is registered with; None if it has no settings.
    """

    divides: ClassVar[bool] = True
    """Whether processes hold parts of the weights, whose memory may be released when `unsharded` ends."""
    keeps_sharded: ClassVar[bool] = False
    """Whether the model need not be gathered outside of training steps either: processes run it together, also without
    a gradient, and each writes its parts of weights and optimizer state, as ``DTensor``, into checkpoints."""
    images: ClassVar[bool] = False
    """If it `keeps_sharded`: whether one process may read images in a pass and another none."""
    repeats: ClassVar[bool] = False
    """Whether a process can make the passes of a step again, because none waits for others before `exchange`."""
    masters: ClassVar[bool] = False
    """Whether the optimizer may have float32 copies of weights of lower precision (`MasterWeights`)."""
    gathered = False
    """Whether `unsharded` is entered now."""
    policy: nn.Module
    """The model as the loss calls it, once `prepare` was called."""

    def __init__(self, accelerator: Accelerator, config: PluginConfig | None = None) -> None:
        self.accelerator, self.config = accelerator, config

    def check(self, config: TRLConfig[Any]) -> None:  # noqa: B027  (most can train with any)
        """Check that runs with this configuration can be trained so; it is called before a model is loaded.

        Raises:
            ConfigError: they cannot; says why, and what to change.
        """

    @abstractmethod
    def prepare(
        self, model: nn.Module, make: Callable[[nn.Module], Any], frozen: Sequence[nn.Module] = ()
    ) -> tuple[nn.Module, Any]:
        """Divide the trained model, and return it as the loss calls it, with its optimizer.

        Args:
            model: the model, which is the same on all processes. If the sharding `keeps_sharded`, it is in the memory
                of the CPU.
            make: makes the optimizer of a model.
            frozen: models that it is compared with, such as the reference, which may be divided, too; `unsharded`
                gathers them. They may share parameters with ``model``.
        """

    @abstractmethod
    def unsharded(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Return a context in which every process has the whole model and may run it as often as it wants.

        All processes enter and leave it together. It can be nested.

        Args:
            write: whether changes of the weights in it remain. They have to be the same on all processes.
        """

    def collected(self) -> AbstractContextManager[None]:
        """Return a context in which the main process has the whole trained model, for an export."""
        return self.unsharded()

    def passes(self, own: int) -> int:
        """Return how many micro-batches each process has to run, if this one has ``own`` of them: the most of any."""
        most = torch.tensor([own], device=self.accelerator.device)
        return int(self.accelerator.gather(most).max())

    @abstractmethod
    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which processes exchange gradients only if this is the last micro-batch."""

    def exchange(self) -> None:  # noqa: B027  (gradients are exchanged in the last pass)
        """Average the gradients of all processes after the last pass, where `repeats` and steps may be made again."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of ``loss``; the gradients of all processes are averaged."""
        self.accelerator.backward(loss)

    def clip(self, limit: float | None) -> Tensor:
        """Clip the gradient to the norm ``limit``; None: not at all. Return its norm before. -> []."""
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), math.inf if limit is None else limit)
        whole: Tensor = whole_tensor(torch.as_tensor(norm).detach())
        return whole

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's ``state_dict``. All processes call it.

        If the sharding `keeps_sharded`, its tensors may be divided. Otherwise they are whole on the main process,
        in the memory of the CPU, and the others may return an empty state.
        """
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def own_part(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return the part that this process keeps of a state with whole tensors; some may be still to be read."""
        state["state"] = {
            key: {name: checkpoint.whole(value) for name, value in values.items()}
            for key, values in state["state"].items()
        }
        return state


class Replicated(Sharding):
    """Every process has the whole model; gradients are averaged by DDP.

    Where `train.microbatch_size` is ``auto``, they are averaged by `exchange` instead: a process that is out of memory
    in a pass makes it again, and DDP would let the others wait. So are the float32 gradients of weights of lower
    precision, which DDP does not support, and those of a model that reads images, of which a process may have none.
    """

    divides = False
    repeats = True
    masters = True
    averages_manually = False
    """Whether processes make the passes of a step without each other."""

    def check(self, config: TRLConfig[Any]) -> None:
        """Set whether gradients are averaged by `exchange`; every configuration can be trained."""
        self.averages_manually = config.train.microbatch_size == "auto"

    def prepare(
        self, model: nn.Module, make: Callable[[nn.Module], Any], frozen: Sequence[nn.Module] = ()
    ) -> tuple[nn.Module, Any]:
        """Return model and optimizer as accelerate prepares them."""
        self.averages_manually = self.averages_manually or bool(low_precision(model.parameters()))
        network: Any = getattr(model, "model", None)
        self.averages_manually |= isinstance(network, PreTrainedModel) and reads_images(network.config)
        if self.averages_manually:
            self.policy = self.accelerator.prepare_model(model, evaluation_mode=True)  # without DDP
            return self.policy, self.accelerator.prepare_optimizer(make(model))
        self.policy, optimizer = self.accelerator.prepare(model, make(model))
        return self.policy, optimizer

    def unsharded(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def passes(self, own: int) -> int:
        """Return ``own``: processes may run different numbers of micro-batches."""
        return own

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which DDP exchanges gradients only if this is the last micro-batch."""
        return torch.enable_grad() if last or self.averages_manually else self.accelerator.no_sync(self.policy)

    def exchange(self) -> None:
        """Average the gradients of all processes, if DDP does not; one that a process lacks counts as 0."""
        if not self.averages_manually or self.accelerator.num_processes == 1:
            return
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        has = torch.tensor([float(each.grad is not None) for each in trained], device=self.accelerator.device)
        for parameter, count in zip(trained, self.accelerator.reduce(has, "sum").tolist(), strict=True):
            if count:
                none = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                own = none if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(own, "mean")


class FSDP2(Sharding):
    """Every process has a part of each tensor: ``torch.distributed.fsdp.fully_shard`` on each block, then on the model.

    A block is gathered when it runs. Unless the model is `unsharded`, forward and backward passes are therefore made by
    all processes together: equally many micro-batches, each in one pass. What reads images is no block, because a
    process may have none in a pass; it is gathered with the rest of the model.

    Under `bf16` the weights of language models are gathered in bfloat16, and gradients are reduced in float32, as are
    the parts, so that no casts of whole weights are made and kept.
    """

    keeps_sharded = True
    images = True

    def __init__(self, accelerator: Accelerator, config: PluginConfig | None = None) -> None:
        super().__init__(accelerator, config)
        self._models: list[nn.Module] = []
        """The trained model, and those that are compared with it."""
        self._borrowed: list[Borrowed] = []
        self._depth = 0
        self._writes = False

    @property
    def gathered(self) -> bool:  # type: ignore[override]
        """Whether `unsharded` is entered now."""
        return self._depth > 0

    @property
    def _parts(self) -> list[Any]:
        """The modules that are gathered as a unit each, every model before its blocks."""
        from torch.distributed.fsdp import FSDPModule

        return [module for model in self._models for module in model.modules() if isinstance(module, FSDPModule)]

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))

    def prepare(
        self, model: nn.Module, make: Callable[[nn.Module], Any], frozen: Sequence[nn.Module] = ()
    ) -> tuple[nn.Module, Any]:
        """Shard the models block by block, each moved to the device as it is, and make the optimizer of the shards.

        A frozen model keeps its embeddings and head whole, because a divergence in a loss reads it not by `forward`.
        Of blocks that it has in common with the trained model, it borrows the shards.

        Raises:
            ConfigError: the blocks of a model are not found.
        """
        from torch.distributed.fsdp import register_fsdp_forward_method

        self.policy = model
        self._models = [model, *frozen]
        replaced: dict[int, tuple[Tensor, Tensor]] = {}
        blocks = [blocks_of(each) for each in self._models]
        self._borrowed = [
            found for other, own in zip(frozen, blocks[1:], strict=True) for found in borrowed(blocks[0], own)
        ]
        borrowing = {each.block for each in self._borrowed}
        low = self._low
        for block in blocks[0]:
            self._shard(block, {}, low)
            for each in self._borrowed:
                each.follow()  # so that nothing holds the whole parameters any more
        for network, parts in readers_of_images(model):
            network.get_input_embeddings().register_forward_hook(partial(_touching, parts))
        heads = [head for name in HEADS_APART if isinstance(head := getattr(model, name, None), nn.Module)]
        for head in heads:
            self._shard(head, {})
            head.register_forward_hook(_no_views, prepend=True)
        root = self._shard(model, replaced, low)
        root._get_fsdp_state()._lazy_init()  # a block that runs before it, in the sampler, would become a root
        register_fsdp_forward_method(model, THROUGH_TRUNK) if hasattr(model, THROUGH_TRUNK) else None
        for other, own in zip(frozen, blocks[1:], strict=True):
            self._prepare_frozen(other, [block for block in own if block not in borrowing], replaced, low)
        for each in self._borrowed:
            each.attach(self)
        self._together(True)
        return model, self.accelerator.prepare_optimizer(make(model))

    def _prepare_frozen(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        replaced: dict[int, tuple[Tensor, Tensor]],
        low: torch.dtype | None,
    ) -> None:
        for block in blocks:
            self._shard(block, {}, low)
        self._make_equal(model, replaced)
        for parameter in model.parameters() if low is not None else ():
            if parameter.dtype == torch.float32 and not hasattr(parameter, "to_local"):
                parameter.data = parameter.data.to(low)

    @property
    def _low(self) -> torch.dtype | None:
        """The type in which weights of language models are gathered; None: that of the parts."""
        language = isinstance(self.policy, Policy | Scorer) and self.accelerator.mixed_precision == "bf16"
        return torch.bfloat16 if language else None

    def _shard(
        self, module: nn.Module, replaced: dict[int, tuple[Tensor, Tensor]], low: torch.dtype | None = None
    ) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._make_equal(module, replaced)
        policy = MixedPrecisionPolicy(low, low and torch.float32, cast_forward_inputs=False)
        return fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)

    def _make_equal(self, module: nn.Module, replaced: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Move what is not sharded to the device, with the values that the main process has.

        Args:
            module: the module.
            replaced: tensors without memory, by their id, and what is in their place; several modules may have one.
        """
        device = self.accelerator.device
        places: Any = [held for each in module.modules() for held in (each._parameters, each._buffers)]
        for held in places:
            for name, tensor in held.items():
                if tensor is None or hasattr(tensor, "to_local"):
                    continue
                if tensor.is_meta and id(tensor) not in replaced:
                    made = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                    replaced[id(tensor)] = tensor, made
                held[name] = tensor = replaced[id(tensor)][1] if tensor.is_meta else tensor
                tensor.data = tensor.data.to(device)
                broadcast(tensor.data)

    @contextmanager
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
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
        self._together(False)
        self._undo = [undo for model in self._models for module in model.modules() for undo in _made_plain(module)]

    @torch.no_grad()
    def _let_go(self) -> None:
        if self._writes:
            for name, parameter in self.policy.named_parameters():
                shard: Any = self._shards[name]
                follow(local(shard), local(divided_like(shard, parameter.detach())))
        self._writes = False
        for undo in self._undo:
            undo()
        for part in self._parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
        self._together(True)
        self._shards, self._undo = {}, []

    def _together(self, together: bool) -> None:
        """Make each call of a model one pass, because all processes make it together; or as many as are fastest."""
        for model in self._models:
            if isinstance(model, Policy | Scorer):
                model.one_pass = together
        for each in self._borrowed:
            each.follow()

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Gather the trained model, a tensor at a time, in the memory of the main process's CPU."""
        if self.gathered:
            yield
            return
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.policy.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, name))
        undo: list[Callable[[], None]] = []
        for same in places.values():
            module, name = same[0]
            shard: Any = module._parameters[name]
            whole = whole_tensor(shard.detach()).cpu()
            if self.accelerator.is_main_process:
                found = nn.Parameter(whole, requires_grad=shard.requires_grad)
                for module, name in same:
                    module._parameters[name] = found
                    undo.append(partial(module._parameters.__setitem__, name, shard))
            del whole
        if self.accelerator.is_main_process:
            undo += [each for module in self.policy.modules() for each in _made_plain(module)]
        try:
            yield
        finally:
            for each in undo:
                each()

    def passes(self, own: int) -> int:
        """Return the most micro-batches of any process; ``own``, while every process has the whole model."""
        return own if self.gathered else super().passes(own)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which gradients are exchanged only if this is the last micro-batch."""
        policy: Any = self.policy
        policy.set_requires_gradient_sync(last)
        return torch.enable_grad()

    def own_part(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return the state with this process's part of each tensor, which are read one at a time."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def part(value: Any, parameter: Tensor) -> Any:
            undivided = checkpoint.whole(value)
            fits = isinstance(undivided, Tensor) and undivided.shape == parameter.shape and undivided.dim() > 0
            return divided_like(parameter, undivided) if fits else undivided

        parts = {
            key: {name: part(value, parameters[key]) for name, value in values.items()}
            for key, values in state["state"].items()
        }
        return {**state, "state": parts}


class Borrowed:
    """A block of a frozen model that has parameters of a block of the trained model: those of an adapter's base, or of
    frozen layers. It gathers that block when it runs.

    Args:
        block: the block of the frozen model.
        own: the block of the trained model.
        places: where each parameter is: module and name in ``block``, module and name in ``own``.
    """

    def __init__(self, block: nn.Module, own: Any, places: Sequence[tuple[nn.Module, str, nn.Module, str]]) -> None:
        self.block, self.own, self.places = block, own, places

    def follow(self) -> None:
        """Take the parameters as the trained model has them now, sharded or whole."""
        for module, name, own, its in self.places:
            module._parameters[name] = own._parameters[its]

    def attach(self, sharding: FSDP2) -> None:
        """Gather the block of the trained model whenever this one runs, unless it is gathered already."""

        def before(*_: Any) -> None:
            if not sharding.gathered:
                self.own.unshard()
                self.follow()

        def after(*_: Any) -> None:
            if not sharding.gathered:
                self.own.reshard()
                self.follow()

        self.block.register_forward_pre_hook(before)
        self.block.register_forward_hook(after, always_call=True)


def borrowed(blocks: Sequence[nn.Module], others: Sequence[nn.Module]) -> Iterator[Borrowed]:
    """Yield those of ``others``, blocks of a frozen model, that have parameters of ``blocks`` of the trained one."""
    known = {
        id(parameter): (block, module, name)
        for block in blocks
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    for other in others:
        found = [
            (module, name, *known[id(parameter)])
            for module in other.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in known
        ]
        if found:
            yield Borrowed(other, found[0][2], [(module, name, own, its) for module, name, _, own, its in found])


HEADS_APART = ("value_head", "head")
"""Modules of a policy or scorer beside its language model, which compute in the type of their own weights."""
THROUGH_TRUNK = "through_trunk"
"""The method of a policy, beside `forward`, that runs the model."""
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of a module in which FSDP has hooks: they gather parameters, and let go of them."""


def _made_plain(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Take FSDP off a module whose parameters are gathered, so that it is what it was before; yield how to undo it.

    Otherwise it could neither be copied nor saved, and each pass would go through hooks.
    """
    from torch.distributed.fsdp import FSDPModule

    held: dict[str, Any] = vars(module)
    made: Any = type(module)
    if issubclass(made, FSDPModule):
        yield partial(setattr, module, "__class__", made)
        cast(Any, module).__class__ = next(base for base in made.__mro__ if not issubclass(base, FSDPModule))
    own = {key: held.pop(key) for key in [*held] if key.startswith("__composable_api") or key == THROUGH_TRUNK}
    yield partial(held.update, own)
    for hooks in (held[name] for name in HOOKS):
        before = dict(hooks)
        taken = {key: hooks.pop(key) for key in _of_fsdp(hooks)}
        yield partial(_put_back, hooks, before, taken)


def _of_fsdp(hooks: Mapping[int, Any]) -> list[int]:
    """Return the keys of the hooks that FSDP has registered; torch wraps those of state dicts."""
    places = {key: str(getattr(getattr(hook, "hook", hook), "__module__", "")) for key, hook in hooks.items()}
    return [key for key, place in places.items() if place.startswith("torch.distributed.fsdp")]


def _put_back(hooks: dict[int, Any], before: dict[int, Any], taken: dict[int, Any]) -> None:
    """Add the hooks ``taken``, at their places in ``before``."""
    now = dict(hooks)
    hooks.clear()
    hooks.update({key: hook for key, hook in before.items() if key in now or key in taken})
    hooks.update(now)


def make_sharding(entry: str | PluginConfig, accelerator: Accelerator) -> Sharding:
    """Return the sharding that `train.sharding` names; of a single process it has no effect, which is logged.

    Raises:
        ConfigError: the sharding cannot be made.
    """
    name = entry_name(entry)
    if accelerator.num_processes == 1 and name != NONE:
        log.warning("train.sharding is %r, and the run has one process, which holds the whole model", name)
        return Replicated(accelerator)
    kind = get_sharding(name)
    settings = kind.settings(name=name) if isinstance(entry, str) and kind.settings else entry
    sharding: Sharding = kind.made(accelerator, None if isinstance(settings, str) else settings)
    return sharding


def whole_tensor(tensor: Any) -> Any:
    """Return a sharded tensor whole, and anything else unchanged. All processes call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the models in ``model``, outermost first, as transformers and diffusers name them.

    Raises:
        ConfigError: a model names blocks, and has none of them.
    """
    found: list[nn.Module] = []
    apart = {each for _, parts in readers_of_images(model) for part in parts for each in part.modules()}
    for module in model.modules():
        names = set(getattr(module, "_no_split_modules", None) or ())
        blocks = [each for each in module.modules() if type(each).__name__ in names]
        if names and not blocks:
            raise ConfigError(
                f"train.sharding divides a model block by block, and the blocks of {type(module).__name__} "
                f"({', '.join(sorted(names))}) are not found; set it to 'none'"
            )
        found += [block for block in blocks if block not in apart and all(block is not other for other in found)]
    return found


def _no_views(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return outputs of which none is a view, as one that is changed in place would lose the hooks of FSDP2."""
    return tree_map(lambda each: each.clone() if isinstance(each, Tensor) and each._base is not None else each, outputs)


def _touching(parts: list[nn.Module], _: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Return an output that has all trained parameters of ``parts`` in its graph: their gradient is 0, and not None.

    Processes exchange the gradients of the same parameters in every pass.
    """
    trained = [each for part in parts for each in part.parameters() if each.requires_grad]
    return output + 0 * sum(each.flatten()[:1] for each in trained) if trained and torch.is_grad_enabled() else output
