"""The contract of an algorithm: three arrows, and pockets for what lasts longer than a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args

from torch import Tensor, nn

from trainkit.config import MethodConfig, TRLConfig
from trainkit.data import Batch, Rollouts, RolloutStore, Row
from trainkit.errors import ConfigError, describe
from trainkit.metrics import Metrics
from trainkit.rollouts import MetricFn, RewardFn

M = TypeVar("M", bound=MethodConfig)


class Verdict(Enum):
    """What becomes of a step whose gradient is there; a step that is not made is counted, and moves nothing."""

    STEP = "step"
    """Make it."""
    SKIP = "skip"
    """Leave it out."""
    STOP = "stop"
    """Leave it out, and all others on this collection."""


class BaseRLTrainer(ABC, Generic[M]):
    """What an algorithm must say, and may say. `AccelerateRLTrainer` does everything else.

    The arrows: `get_arch` (config → model), `make_experience` (rows → experience, no gradient) and `loss`
    (experience → loss and metrics). An algorithm that learns from scored samples of its own writes `experience`
    instead of `make_experience`. The pockets: `prepare_experience`, `prepare_step`, `judge`, `after_step`,
    `state_dict`.

    Derive as ``class MyTrainer(AccelerateRLTrainer[MyConfig])``; the argument tells which class validates the
    section ``method``.
    """

    method_class: ClassVar[type[MethodConfig]]
    """The class of the section ``method``, taken from the type argument."""
    inputs: ClassVar[tuple[str, ...]] = ("samples",)
    """Which arguments of `trainkit.train` the algorithm learns from: ``("samples",)``, ``("samples", "rewards")``
    or ``("reward_fn", "prompts")``."""

    group: ClassVar[str] = ""
    """The setting of the method that says how many responses to each prompt a collection holds; empty: one."""
    remembers: ClassVar[Mapping[str, Callable[[], Any]]] = {}
    """Attributes that must survive a restart, plain data or tensors, each with what makes its first value."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, MethodConfig):
                    cls.method_class = argument

    @classmethod
    def _unwritten(cls) -> list[str]:
        """What is left to write of what an algorithm must say; `trainkit.register_trainer` refuses a class with any."""
        return sorted(getattr(cls, "__abstractmethods__", ()))

    def __init__(
        self,
        config: TRLConfig[M],
        *,
        reward_fn: RewardFn | None = None,
        metric_fn: MetricFn | None = None,
        logit_mask: Tensor | None = None,
        stop_sequences: list[str] | None = None,
    ) -> None:
        if not isinstance(config.method, self.method_class):
            raise ConfigError(
                f"{type(self).__name__} is configured by {self.method_class.__name__}; the config's method is "
                f"{config.method.name!r} ({type(config.method).__name__})"
            )
        for name, fn in (("reward_fn", reward_fn), ("metric_fn", metric_fn)):
            if fn is not None and not callable(fn):
                raise ConfigError(f"{name} should be a function; given {describe(fn)}")
        if stop_sequences and config.rollout.stop_sequences not in ([], stop_sequences):
            raise ConfigError(
                f"stop_sequences is {stop_sequences} and rollout.stop_sequences {config.rollout.stop_sequences}; "
                "give one of the two"
            )
        if stop_sequences:
            config = config.evolve(rollout={"stop_sequences": stop_sequences})
        self.config = config
        self.reward_fn, self.metric_fn, self.logit_mask = reward_fn, metric_fn, logit_mask
        self.store: RolloutStore[Any] = RolloutStore()
        for name, first in self.remembers.items():
            setattr(self, name, first())

    @property
    def method(self) -> M:
        """The algorithm's own section of the config."""
        return self.config.method

    @property
    def online(self) -> bool:
        """Whether experience comes from sampling the policy."""
        return "prompts" in self.inputs

    @property
    def passes(self) -> int | None:
        """How often one collection of experience is gone over; None: until the run ends.

        Offline algorithms collect once and pass over it ``train.epochs`` times.
        """
        return 1 if self.online else self.epochs

    @property
    def epochs(self) -> int | None:
        """Passes over the dataset; None: as many as ``train.total_steps`` needs."""
        train = self.config.train
        return 1 if train.epochs is None and train.total_steps is None else train.epochs

    @property
    def samples_per_prompt(self) -> int:
        """How many responses to each prompt a collection holds; they stand next to each other in it."""
        return int(getattr(self.method, self.group)) if self.group else 1

    # ------------------------------------------------------------------------------------------ the three arrows

    @abstractmethod
    def get_arch(self, config: TRLConfig[M]) -> nn.Module:
        """The trainable model, on the CPU or any device; called once, under a seeded global generator."""

    @abstractmethod
    def make_experience(self, rows: list[Row]) -> Batch:
        """What `loss` needs about ``rows`` that takes no gradient."""

    def experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        """What `loss` needs about scored rollouts; ``scores`` is [B], or [B, T] for rewards per token."""
        raise NotImplementedError(
            f"{type(self).__name__} does not learn from scored rollouts; it is trained by learn(), from "
            f"{' and '.join(self.inputs)}"
        )

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """A mean over the units that ``batch.weight`` counts, [], and metrics. Runs the trainable model, no other."""

    # ----------------------------------------------------------------------------------------------- the pockets

    def prepare_experience(self, experience: Any) -> Batch:
        """One whole collection, before the first pass over it: whitening, controllers, statistics."""
        return cast(Batch, experience)

    def prepare_step(self, batch: Any) -> Batch:
        """The rows of one step, before they are split into micro-batches: means over them that `loss` needs.

        Called on every process, without gradient, with the weights that the step starts from.
        """
        return cast(Batch, batch)

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """Whether to make a step; ``metrics`` are those of its `loss`, over all micro-batches and processes."""
        return Verdict.STEP

    def after_step(self) -> None:
        """Called after every step that was made: target networks and the like."""

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm must remember beyond the model: plain data and tensors."""
        return {name: getattr(self, name) for name in self.remembers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if state.keys() - self.remembers.keys():
            raise NotImplementedError(f"{type(self).__name__} saves a state and cannot load it; write load_state_dict")
        for name, value in state.items():
            setattr(self, name, value)

    # ------------------------------------------------------------------------------------------------------ loop

    def push_to_store(self, batch: Batch) -> None:
        """Add experience to the rollout store."""
        self.store.push(batch)

    @abstractmethod
    def learn(self) -> None:
        """Train until the config's end."""
