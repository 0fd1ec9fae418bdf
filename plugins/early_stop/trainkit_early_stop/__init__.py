"""Early stopping: ends a run when a metric of its evaluations no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trainkit import AcceleratedLoop, EvalMetric, PluginConfig, TRLConfig, hookimpl, register_hooks
from trainkit.errors import ConfigError, suggest


class EarlyStopConfig(PluginConfig):
    """When a run ends."""

    metric: EvalMetric = "eval/reward"
    """The metric of evaluations to watch, as it is logged, such as `eval/reward` or `eval/loss/total`."""
    mode: Literal["max", "min"] = "max"
    """Whether higher (`max`) or lower (`min`) values are better."""
    patience: int = Field(3, ge=1)
    """End the run after this many evaluations in succession without an improvement."""
    min_delta: float = Field(0.0, ge=0)
    """A value is an improvement if it is better than the best one so far by more than this."""

    def check(self, config: TRLConfig[Any]) -> None:
        """Raise a ConfigError if the run has no evaluations, or none at the setting that `metric` names."""
        config.check_metric(self.metric, "early_stop")


@register_hooks("early_stop", EarlyStopConfig)
class EarlyStop:
    """Ends a run after `patience` evaluations without an improvement. Its state is saved in checkpoints."""

    def __init__(self, settings: EarlyStopConfig) -> None:
        self.settings = settings
        self.best: float | None = None
        """The best value so far; None before the first evaluation, or if all values were NaN."""
        self.waited = 0
        """Evaluations since the best value."""
        self.seen = -1
        """Step of the last evaluation that was counted."""

    @hookimpl
    def on_train_begin(self, trainer: AcceleratedLoop[Any]) -> None:
        """Check that there is something to evaluate on."""
        if not (trainer.eval_rows or trainer.eval_samples):
            raise ConfigError(
                "early_stop watches evaluations, and this run has none; give eval_prompts or eval_samples"
            )

    @hookimpl
    def on_evaluate(self, trainer: AcceleratedLoop[Any], step: int, metrics: dict[str, float]) -> None:
        """Compare the metric with the best value; end the run if patience is exhausted. Each step counts once."""
        name, patience = self.settings.metric, self.settings.patience
        if name not in metrics:
            raise ConfigError(
                f"early_stop watches {name!r}, which is no metric of this run's evaluations{suggest(name, metrics)}; "
                f"they have {', '.join(sorted(metrics))}"
            )
        if step == self.seen:
            return
        self.seen = step
        if self._improved(metrics[name]):
            self.best, self.waited = metrics[name], 0
        else:
            self.waited += 1
        if self.waited >= patience:
            best = "none of its values is a number" if self.best is None else f"the best value is {self.best:.4g}"
            trainer.stop(f"early_stop: {name} has not improved in {self.waited} evaluations; {best}")

    def _improved(self, value: float) -> bool:
        """Return whether ``value`` is better than the best one by more than `min_delta`; NaN never is."""
        if self.best is None:
            return value == value
        gain = value - self.best if self.settings.mode == "max" else self.best - value
        return gain > self.settings.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the evaluations since."""
        return {"best": self.best, "waited": self.waited, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.waited, self.seen = state["best"], state["waited"], state["seen"]
