"""The registry of trainers, and the base class of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkit.errors import ConfigError, describe
from trainkit_migrate import refusing
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.method_configs import registering
from trainkit_trlx.pipeline import BaseRolloutStore

_TRAINERS: dict[str, Any] = {}

__all__ = ["BaseRLTrainer", "BaseRolloutStore", "TRLConfig", "register_trainer"]


def register_trainer(name: Any) -> Any:
    """Register a trainer under its lower-case class name, or under a given name: ``@register_trainer("Name")``."""
    return registering(name, _TRAINERS, __name__)


@register_trainer
class BaseRLTrainer:
    """What every trainer has: its arguments, a store, and `learn`, which a trainer implements.

    Args:
        config: the configuration.
        reward_fn: scores samples.
        metric_fn: measures samples at evaluations.
        logit_mask: bool [V, V] (row: the previous token), True = forbidden, unlike in trainkit.
        stop_sequences: strings that end a response.
        train_mode: kept as an attribute; nothing reads it, in trlX neither.

    Raises:
        ConfigError: ``config`` is no `TRLConfig`.
    """

    store: Any = None
    eval_pipeline: Any = None

    def __init__(
        self,
        config: TRLConfig,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        logit_mask: Any = None,
        stop_sequences: list[str] | None = None,
        train_mode: bool = False,
    ) -> None:
        if not isinstance(config, TRLConfig):
            raise ConfigError(
                f"config should be a TRLConfig; given {describe(config)}; write TRLConfig.from_dict(config)"
            )
        self.config, self.reward_fn, self.metric_fn = config, reward_fn, metric_fn
        self.logit_mask, self.stop_sequences, self.train_mode = logit_mask, stop_sequences, train_mode

    def push_to_store(self, data: Any) -> None:
        """Add items to the store.

        Raises:
            ConfigError: the trainer has no store yet.
        """
        if self.store is None:
            raise ConfigError(
                f"{type(self).__name__} has no store; set self.store, such as to a PPORolloutStorage, or call "
                "make_experience"
            )
        self.store.push(data)

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Set the prompts of evaluations."""
        self.eval_pipeline = eval_pipeline

    def learn(
        self,
        log_fn: Callable[[dict[str, float]], Any] | None = None,
        save_fn: Callable[[str], Any] | None = None,
        eval_fn: Callable[[dict[str, float]], Any] | None = None,
    ) -> None:
        """Train to the end. A trainer implements it.

        Args:
            log_fn: called with the metrics whenever they are logged.
            save_fn: called with the directory of every checkpoint.
            eval_fn: called with the metrics of every evaluation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no learn(); write it, or derive from AccelerateRLTrainer")


__getattr__ = refusing(__name__)
