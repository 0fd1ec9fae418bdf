"""The shardings ``zero2`` and ``zero3``: DeepSpeed divides what is trained among the processes."""

from __future__ import annotations

import importlib.util
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainkit import Sharding, TRLConfig, register_sharding
from trainkit.errors import ConfigError
from trainkit.models import Policy, Scorer

SHOWN = ("dpo", "ppo", "reward", "rloo", "sft")
"""The algorithms whose runs are compared with those of replicated processes, in the tests of this distribution."""

BUCKET = 50_000_000
"""Elements of the buffer in which gradients are exchanged: 200 MB. DeepSpeed's default is ten times as large."""


class ZeRO(Sharding):
    """What both stages have in common. DeepSpeed's engine runs the model and steps the optimizer.

    Source: Rajbhandari et al. 2020, *ZeRO: memory optimizations toward training trillion parameter models*.
    """

    stage: ClassVar[int]
    """The stage of ZeRO."""
    policy: Any
    """DeepSpeed's engine."""

    def check(self, config: TRLConfig[Any]) -> None:
        """Check the algorithm, the precision, and that DeepSpeed is installed.

        Raises:
            ConfigError: DeepSpeed is not installed; or runs of this kind are not compared with replicated ones.
        """
        name = f"train.sharding is 'zero{self.stage}'"
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(f"{name}, and DeepSpeed is not installed: pip install 'trainkit-deepspeed[deepspeed]'")
        if config.method.name not in SHOWN:
            raise ConfigError(
                f"{name}, with which {', '.join(SHOWN)} are shown to be trained as without it, and "
                f"{config.method.name!r} is not; set train.sharding to 'fsdp2'"
            )
        if config.train.mixed_precision not in (None, "no"):
            raise ConfigError(
                f"{name}, which is shown to train at float32, and train.mixed_precision is "
                f"{config.train.mixed_precision!r}; set it to 'no', or train.sharding to 'fsdp2'"
            )

    def prepare(
        self, model: nn.Module, make: Callable[[nn.Module], Any], frozen: Sequence[nn.Module] = ()
    ) -> tuple[nn.Module, Any]:
        """Return DeepSpeed's engine of the model, and its optimizer; frozen models stay whole."""
        deepspeed = _imported(self.accelerator.device)
        self.model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made, zero, *_ = deepspeed.initialize(
            model=model, optimizer=make(model), config=self._settings(), dist_init_required=False
        )
        self.policy, self.zero = made, zero
        self.optimizer = Optimizer(self, trained)
        return self.policy, self.optimizer

    def _settings(self) -> dict[str, Any]:
        """Return the configuration of DeepSpeed: one micro-batch per step, because trainkit counts them itself."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage, "overlap_comm": False, "reduce_bucket_size": BUCKET},
            "steps_per_print": 2**62,
        }

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which DeepSpeed makes gradients complete only if this is the last micro-batch."""
        self.policy.set_gradient_accumulation_boundary(last)
        return torch.enable_grad()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of ``loss``; the gradients of all processes are averaged."""
        self.policy.backward(loss, scale_wrt_gas=False)

    def clip(self, limit: float | None) -> Tensor:
        """Let the step clip the gradient to the norm ``limit``; None: not at all. Return its norm before. -> []."""
        self.zero.clip_grad = limit or 0.0  # DeepSpeed's step divides by (norm + 1e-6) / limit if that is above 1
        groups = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in self._norms()])
        whole: Tensor = torch.where(groups < 0, torch.nan, groups).norm()  # DeepSpeed gives −1 if it is not finite
        return whole

    @abstractmethod
    def _norms(self) -> list[Any]:
        """Return the norms of the groups of gradients, over all processes."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the gradient, whether or not a step was made with it."""

    @property
    @abstractmethod
    def flat(self) -> list[Tensor]:
        """This process's parts of the parameters, each group of them as one tensor, as the optimizer has them."""

    @abstractmethod
    def linked(self) -> None:
        """Let DeepSpeed find a new state of the optimizer."""

    @abstractmethod
    def part(self, whole: Tensor, parameter: Any, key: str) -> None:
        """Set this process's part of the optimizer's state of a parameter to that of ``unsharded``."""

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state that the optimizer would have on replicated processes, with whole tensors."""
        state: dict[str, Any] = optimizer.state_dict()
        return state


class Optimizer:
    """The optimizer as the loop uses it.

    Args:
        sharding: how the model is divided.
        trained: the trained parameters, in their order in the optimizer.
    """

    def __init__(self, sharding: ZeRO, trained: list[nn.Parameter]) -> None:
        self.sharding, self.trained = sharding, trained
        self.optimizer: torch.optim.Optimizer = sharding.zero.optimizer
        """The optimizer of torch, of this process's parts."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its settings."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Make a step."""
        self.sharding.policy.step()

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.sharding.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as an optimizer of whole parameters has it, on the main process. All processes call it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        groups = [{**settings[0], "params": [*range(len(self.trained))]}]
        held = [self.optimizer.state[flat] for flat in self.sharding.flat if flat in self.optimizer.state]
        if not held:
            return {"state": {}, "param_groups": groups}
        parts, others = _parts_and_others(held[0], self.sharding.flat[0])
        gathered: dict[int, dict[str, Tensor]] = {}
        for index, parameter in enumerate(self.trained):
            for key in parts:
                whole = safe_get_full_optimizer_state(parameter, key)
                if self.sharding.accelerator.is_main_process:
                    state = gathered.setdefault(index, {k: torch.as_tensor(v).clone() for k, v in others.items()})
                    state[key] = whole.detach().to("cpu", copy=True).reshape(_shape(parameter))
        return {"state": gathered, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of whole tensors."""
        given = state["state"]
        for group in self.param_groups:
            group.update({k: v for k, v in state["param_groups"][0].items() if k != "params"})
        self.optimizer.state.clear()
        if not given:
            return
        keys, others = _parts_and_others(*next((each, self.trained[index]) for index, each in given.items()))
        for flat in self.sharding.flat:
            self.optimizer.state[flat] = {
                **{key: torch.as_tensor(value).clone() for key, value in others.items()},
                **{key: torch.zeros_like(flat) for key in keys},
            }
        self.sharding.linked()
        for index, values in given.items():
            for key in keys:
                self.sharding.part(values[key].to(self.sharding.flat[0].device), self.trained[index], key)


def _parts_and_others(state: Mapping[str, Any], like: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the keys of what the state has for each element, and the other items, such as the number of steps."""
    size = getattr(like, "ds_numel", like.numel())
    parts = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim() and value.numel() == size]
    return parts, {key: value for key, value in state.items() if key not in parts}


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of a whole parameter."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


@register_sharding("zero2")
class ZeRO2(ZeRO):
    """Each process has all weights, and a part of the gradients and of the optimizer's state."""

    stage = 2

    @contextmanager
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Do nothing, because every process has the weights; at the end, give changed ones to the optimizer."""
        yield
        if write:
            self.zero.refresh_fp32_params()

    def _norms(self) -> list[Any]:
        return [self.zero.scaled_global_norm()]

    def forget(self) -> None:
        """Forget the gradient."""
        self.zero.zero_grad()
        for held in (self.zero.averaged_gradients, self.zero.all_grad_tensors):
            held.update(dict.fromkeys(held))

    @property
    def flat(self) -> list[Tensor]:
        """This process's parts, one for each group of parameters."""
        return list(self.zero.single_partition_of_fp32_groups)

    def linked(self) -> None:
        """Let DeepSpeed find a new state."""
        self.zero._hp_optimizer_states_linked = False
        self.zero._lazy_init_hp_params_optimizer_state()

    def part(self, whole: Tensor, parameter: Any, key: str) -> None:
        """Set this process's part of a state."""
        from deepspeed.utils import safe_set_full_optimizer_state

        if parameter._hp_mapping is not None:
            safe_set_full_optimizer_state(parameter, whole, key)


@register_sharding("zero3")
class ZeRO3(ZeRO):
    """Each process has a part of the weights, of the gradients and of the optimizer's state."""

    stage = 3
    _depth = 0
    _writes = False

    def prepare(
        self, model: nn.Module, make: Callable[[nn.Module], Any], frozen: Sequence[nn.Module] = ()
    ) -> tuple[nn.Module, Any]:
        """Return DeepSpeed's engine of the model, and its optimizer; frozen models stay whole."""
        made = super().prepare(model, make, frozen)
        self._together(True)
        return made

    def _together(self, together: bool) -> None:
        """Make each call of the policy one pass, because all processes make it together; or as many as are fastest."""
        if isinstance(self.model, Policy | Scorer):
            self.model.one_pass = together

    @contextmanager
    def unsharded(self, *, write: bool = False) -> Iterator[None]:
        """Gather all parameters on every process, and let go of them at the end."""
        self._writes |= write
        self._depth += 1
        try:
            with nullcontext() if self._depth > 1 else self._gathered():
                yield
        finally:
            self._depth -= 1

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        import deepspeed

        hooks = self.zero.parameter_offload
        with deepspeed.zero.GatheredParameters([*self.model.parameters()], modifier_rank=0):
            hooks._remove_module_hooks()
            hooks.forward_hooks, hooks.backward_hooks = [], []
            self._together(False)
            try:
                yield
            finally:
                self._together(True)
                hooks.setup_zero_stage3_hooks()
        if self._writes:
            self.zero.refresh_fp32_params()
        self._writes = False

    def _norms(self) -> list[Any]:
        norms: list[Any] = self.zero._get_norm_groups()
        return norms

    def forget(self) -> None:
        """Forget the gradient."""
        self.zero.zero_grad()
        self.zero.averaged_gradients = {}

    @property
    def flat(self) -> list[Tensor]:
        """This process's parts, one for each of DeepSpeed's groups of parameters."""
        return list(self.zero.fp32_partitioned_groups_flat)

    def linked(self) -> None:
        """Do nothing: DeepSpeed reads the state where it is."""

    def part(self, whole: Tensor, parameter: Any, key: str) -> None:
        """Set this process's part of a state, whose end is filled up so that all parts are equally long."""
        from deepspeed.utils import safe_set_local_optimizer_state

        size = parameter.partition_numel()
        padded = nn.functional.pad(whole.flatten(), (0, size * self.accelerator.num_processes - whole.numel()))
        safe_set_local_optimizer_state(parameter, padded[size * self.accelerator.process_index :][:size], key)


def _imported(device: torch.device) -> Any:
    """Return DeepSpeed, which talks over the processes of torch.distributed that there are."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)  # DeepSpeed's calls
    import deepspeed

    if device.type == "cpu":  # compiled at the start, which takes minutes; torch's own collectives do the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed
