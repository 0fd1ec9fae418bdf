"""The base class of all algorithms: three methods to implement, and optional methods for everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from trainkit.config import MethodConfig, RewardFunctionConfig, TRLConfig
from trainkit.data import Batch, Rollouts, RolloutStore, Row
from trainkit.errors import ConfigError, PluginError, describe
from trainkit.metrics import Metrics
from trainkit.plugins.contract import wrong_inputs
from trainkit.rollouts import MetricFn, RewardFn

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)


class Verdict(Enum):
    """What to do with a step whose gradient has been computed. A skipped step is counted, and changes no weights."""

    STEP = "step"
    """Make the step."""
    SKIP = "skip"
    """Skip the step."""
    STOP = "stop"
    """Skip the step and all remaining steps on this collection."""


def overridden(method: Callable[..., Any], usual: Callable[..., Any]) -> bool:
    """Return whether a bound method is not ``usual``, the function of a base class."""
    return getattr(method, "__func__", None) is not usual


def checked_inputs(cls: type[BaseRLTrainer[Any]], method: MethodConfig) -> tuple[str, ...]:
    """Return what a trainer class learns from with the settings ``method``.

    Raises:
        PluginError: `inputs_for` returned something that cannot be trained on, or turned an online algorithm into an
            offline one, or the reverse.
    """
    inputs = cls.inputs_for(method)
    if fault := wrong_inputs(inputs):
        raise PluginError(f"{method.name!r}: inputs_for: {fault}")
    if ("prompts" in inputs) != ("prompts" in cls.inputs):
        raise PluginError(
            f"{method.name!r}: inputs_for returned {inputs!r}, and inputs is {cls.inputs!r}; an algorithm is online, "
            "with prompts, or offline, with samples"
        )
    return inputs


class BaseRLTrainer(ABC, Generic[M]):
    """The interface of an algorithm. `AccelerateRLTrainer` implements everything else.

    An algorithm implements three methods: `get_arch` (config → model), `make_experience` (rows → experience, without
    gradient) and `loss` (experience → loss and metrics). An algorithm that samples responses and learns from their
    scores implements `experience` instead of `make_experience`. Optional methods: `prepare_experience`,
    `prepare_step`, `judge`, `after_step` and `state_dict`.

    Derive as ``class MyTrainer(AccelerateRLTrainer[MyConfig])``. The type argument is the class that validates the
    section ``method``.

    Args:
        config: the run's configuration; the attribute ``config`` has its secrets in place of masks.
        reward_fn: the reward function, if there is one.
        metric_fn: the metric function, if there is one.
        logit_mask: bool [V], or [V, V] with a row per previous token; True = allowed.
        stop_sequences: strings that end a response.
        trust_remote_code: whether Python code that comes with a model or tokenizer may run.

    Raises:
        ConfigError: the arguments are invalid, a secret is missing, or the configuration would run such code itself.
    """

    method_class: ClassVar[type[MethodConfig]]
    """The class of the section ``method``, taken from the type argument."""
    inputs: ClassVar[tuple[str, ...]] = ("samples",)
    """What the algorithm learns from. Online: ``("reward_fn", "prompts")``, where an environment may take the place of
    the reward function; ``("environment", "prompts")``; or ``("prompts",)``, without rewards. Offline:
    ``("samples",)``; ``("samples", "rewards")``, a number per sample; ``("samples", "labels")``, true or false per
    sample; or ``("samples", "pairs")``, samples that are pairs of ``chosen`` and ``rejected``. Both:
    ``("samples", "prompts")``, with or without ``"reward_fn"``, learns from samples and from responses to their
    prompts. In a trainer they are those of `inputs_for`."""

    group: ClassVar[str] = ""
    """Name of the method's setting for the number of responses to each prompt in a collection; empty: one response."""
    rows_vary: ClassVar[bool] = False
    """Whether `prepare_experience` makes different numbers of rows for different prompts. If not, its rows are in the
    order of the prompts, equally many for each. If so, row i of process r counts as row i·W + r of the rows of all W
    processes, and minibatches are the same for every W only if those are."""
    remembers: ClassVar[Mapping[str, Callable[[], Any]]] = {}
    """Attributes to save in checkpoints, plain data or tensors, each with a function that makes its initial value."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in vars(cls).get("__orig_bases__", ()):  # not a parent's: a subclass may set method_class instead
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, MethodConfig):
                    cls.method_class = argument

    @classmethod
    def _unwritten(cls) -> list[str]:
        """Return the methods that are not implemented yet; `trainkit.register_trainer` refuses a class with any."""
        return sorted(getattr(cls, "__abstractmethods__", ()))

    def __init__(
        self,
        config: TRLConfig[M],
        *,
        reward_fn: RewardFn | None = None,
        metric_fn: MetricFn | None = None,
        logit_mask: Tensor | None = None,
        stop_sequences: list[str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        config = config.settled(trust_remote_code=trust_remote_code)
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
        self.inputs = checked_inputs(type(self), config.method)  # type: ignore[misc]
        self.reward_fn, self.metric_fn, self.logit_mask = reward_fn, metric_fn, logit_mask
        self._check_reward_settings()
        self.store: RolloutStore[Any] = RolloutStore()
        for name, first in self.remembers.items():
            setattr(self, name, first())

    def _check_reward_settings(self) -> None:
        """Raise a `ConfigError` if settings of the calls of the reward function are given, and there is none."""
        changed = [
            f"reward.{key}" for key, value in self.config.reward if value != getattr(RewardFunctionConfig(), key)
        ]
        if not changed or self.reward_fn is not None:
            return
        are, them = ("is", "it") if len(changed) == 1 else ("are", "them")
        why = "there is no reward function; give one, or"
        if "reward_fn" not in self.inputs:
            why = f"{self.config.method.name!r} learns from {' and '.join(self.inputs)}, without a reward function;"
        raise ConfigError(f"{' and '.join(changed)} {are} set, and {why} remove {them}")

    @property
    def method(self) -> M:
        """The section ``method`` of the config, the algorithm's own settings."""
        return self.config.method

    @property
    def online(self) -> bool:
        """Whether experience comes from sampling the policy."""
        return "prompts" in self.inputs

    @property
    def rewarded(self) -> bool:
        """Whether it learns from the rewards of what it samples, by a reward function or an environment."""
        return bool({"reward_fn", "environment"} & {*self.inputs})

    @property
    @abstractmethod
    def passes(self) -> int | None:
        """How many times one collection of experience is iterated over; None: until the run ends.

        By default, offline algorithms collect once and iterate over the collection ``train.epochs`` times.
        """

    @property
    def samples_per_prompt(self) -> int:
        """Number of responses to each prompt in a collection, where they are adjacent rows."""
        return int(getattr(self.method, self.group)) if self.group else 1

    @property
    @abstractmethod
    def experience_rows(self) -> int:
        """Rows of experience that one collection makes, at most, over all processes."""

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm compares with a reference.

        It is a frozen copy of the model as it was before the first update, unless the user chooses another model.
        """
        return False

    @property
    def reference_makes_experience(self) -> bool:
        """Whether `make_experience` runs the reference and no other model, and nothing else asks the reference.

        Experience of a dataset is then made when the first pass comes to its rows, with weights that have moved, unless
        `prepare_experience` is overridden. On an accelerator, the weights of the reference are moved to the CPU in
        between; later reads move them back.
        """
        return False

    @property
    def keeps(self) -> bool:
        """Whether the algorithm chooses what it trains on, so that the loop calls `keep`.

        By default, whether it overrides `keep`. An algorithm that does so with some of its settings only overrides this
        too.
        """
        return overridden(self.keep, BaseRLTrainer.keep)

    @classmethod
    def inputs_for(cls, method: M) -> tuple[str, ...]:  # noqa: ARG003  (for those that override it)
        """Return what the algorithm learns from with the settings ``method``; by default `inputs`.

        Override it if a setting adds a reward function, such as a coefficient of rewards. With the default settings it
        returns `inputs`.
        """
        return cls.inputs

    # ----------------------------------------------------------------------------------- the three methods to implement

    @abstractmethod
    def get_arch(self, config: TRLConfig[M]) -> nn.Module:
        """Return the trainable model, on the CPU or any device. Called once, with the global generator seeded."""

    @abstractmethod
    def make_experience(self, rows: list[Row]) -> Batch:
        """Return what `loss` needs to know about ``rows``, computed without gradient."""

    def experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        """Return what `loss` needs to know about scored rollouts. ``scores``: [B], or [B, T] for rewards per token."""
        raise NotImplementedError(
            f"{type(self).__name__} does not learn from scored rollouts; it is trained by learn(), from "
            f"{' and '.join(self.inputs)}"
        )

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss [], a mean over the units that ``batch.weight`` counts, and metrics.

        It runs no model but the policy, which may compute its divergence from a frozen one.
        """

    # ------------------------------------------------------------------------------------------------ optional methods

    def through_trunk(self, batch: B) -> B:
        """Return a batch of an offline collection with what frozen layers make of it, if that is kept.

        The loop calls it on what `make_experience` returns.
        """
        return batch

    def keep(self, rollouts: Rollouts, scores: Tensor) -> Tensor:
        """Return which responses to train on, bool [B]; a group is kept whole or not at all.

        If an algorithm overrides it, the loop samples further prompts until the collection is full of responses that
        are kept, or `rollout.max_refills` is reached. It is called before any experience is made, and runs no model.

        Args:
            rollouts: responses, those to one prompt adjacent.
            scores: their scores [B], or [B, T] for rewards per token.
        """
        return torch.ones(len(rollouts), dtype=torch.bool, device=scores.device)

    def prepare_experience(self, experience: Any) -> Batch:
        """Prepare a whole collection before the first pass over it: whitening, controllers, statistics."""
        return cast(Batch, experience)

    def prepare_step(self, batch: Any) -> Batch:
        """Prepare the rows of one step, before they are split into micro-batches: means over them that `loss` needs.

        Called on every process, without gradient, with the weights at the start of the step.
        """
        return cast(Batch, batch)

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """Return whether to make a step. ``metrics``: those of its `loss`, over all micro-batches and processes."""
        return Verdict.STEP

    def after_step(self) -> None:
        """Update what follows the weights, e.g. a target network. Called after every step that was made."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the algorithm must save besides the model: plain data and tensors."""
        return {name: getattr(self, name) for name in self.remembers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
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
        """Train until the configured steps or epochs are used up."""
