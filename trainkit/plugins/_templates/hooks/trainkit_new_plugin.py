"""new_plugin: a plugin with hooks that ends a run when an evaluation reaches a goal."""

from __future__ import annotations

from typing import Any

from trainkit import AcceleratedLoop, EvalMetric, PluginConfig, TRLConfig, hookimpl, register_hooks


class NewPluginConfig(PluginConfig):
    """The settings of new_plugin."""

    metric: EvalMetric = "eval/reward"
    """The metric of evaluations to watch, as it is logged."""
    goal: float | None = None
    """End the run when the metric is at least this; None: keep the best value in checkpoints alone."""

    def check(self, config: TRLConfig[Any]) -> None:
        """Raise a ConfigError if the run has no evaluations, or none at the setting that `metric` names."""
        config.check_metric(self.metric, "new_plugin")


@register_hooks("new_plugin", NewPluginConfig)
class NewPlugin:
    """The hooks. A run makes one on each process; what it should remember, it saves in checkpoints."""

    def __init__(self, settings: NewPluginConfig) -> None:
        self.settings, self.best = settings, float("-inf")

    @hookimpl
    def on_evaluate(self, trainer: AcceleratedLoop[Any], step: int, metrics: dict[str, float]) -> None:
        """Compare the metric with the goal. All processes have the same metrics, so all of them stop."""
        value = metrics[self.settings.metric]
        self.best = max(self.best, value)
        if self.settings.goal is not None and value >= self.settings.goal:
            trainer.stop(f"new_plugin: {self.settings.metric} is {value:.4g} after step {step}")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.best = state["best"]
