"""What trainkit's trainers do for those of trlX: they call its methods where a subclass overrides them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from trainkit import hookimpl
from trainkit.errors import ConfigError, describe
from trainkit.metrics import Mean
from trainkit_trlx.data.configs import say_once
from trainkit_trlx.utils.modeling import flatten_dict

if TYPE_CHECKING:
    from torch import Tensor


class Bridge:
    """Stands before a trainer of trainkit in the order of inheritance.

    Args:
        config: the configuration of trainkit.
        outer: the trainer with the interface of trlX.
        **kwargs: arguments of trainkit's trainer.
    """

    if TYPE_CHECKING:
        tokenizer: Any
        progress: Any
        online: bool
        passes: int | None
        parallel: Any

    from_store = False
    """Whether collections are what `make_experience` of the user puts into the store."""

    def __init__(self, config: Any, *, outer: Any, **kwargs: Any) -> None:
        self.outer, self.evaluating = outer, False
        super().__init__(config, **kwargs)  # type: ignore[call-arg]

    def as_trlx(self, batch: Any) -> Any:
        """Return a batch of experience as trlX has it."""
        raise NotImplementedError

    def from_trlx(self, batch: Any) -> Any:
        """Return a batch of trlX as experience."""
        raise NotImplementedError

    def experience_of(self, batch: Any) -> Any:
        """Return the experience that a batch of trlX was made of, or if it was changed, that of its fields."""
        known = getattr(batch, "experience", None)
        return known if known is not None and _equal(batch, self.as_trlx(known)) else self.from_trlx(batch)

    def loss(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss and the metrics of a batch; those of the user if they have a loss of their own."""
        if not self.outer.has_own_loss:
            return self.measured_loss(self.of_method(batch))
        given = self.as_trlx(batch)
        given.experience = batch
        return checked_loss(self.outer, self.outer.loss(given), batch.weight)

    def of_method(self, batch: Any) -> Any:
        """Return experience with what the user's functions of the settings of the method make of it."""
        return batch

    def loss_of_method(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and the statistics of the user's `loss` of the settings, called with what trlX gives it."""
        raise NotImplementedError

    def measured_loss(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss and the metrics that trainkit computes."""
        return cast(Any, super()).loss(batch)  # type: ignore[no-any-return]

    def score(self, rollouts: Any) -> Tensor:
        """Return the scores; reward functions see the EOS of finished responses in training, not in evaluations."""
        if not self.evaluating:
            eos = str(self.tokenizer.eos_token)
            ended = zip(rollouts.outputs, rollouts.terminated.tolist(), strict=True)
            texts = [text.removesuffix(eos) + eos if end else text for text, end in ended]
            rollouts = replace(rollouts, outputs=texts)
        return cast(Any, super()).score(rollouts)  # type: ignore[no-any-return]

    def evaluation(self) -> Any:
        """Return the metrics of an evaluation, and its responses."""
        self.evaluating = True
        try:
            return cast(Any, super()).evaluation()
        finally:
            self.evaluating = False

    def evaluate(self) -> Any:
        """Evaluate as the subclass does."""
        return self.outer.evaluate()

    def measured(self) -> dict[str, float]:
        """Evaluate as trainkit does."""
        return cast(Any, super()).evaluate()  # type: ignore[no-any-return]

    def compared(self, found: Mapping[str, float]) -> float | None:
        """Return the reward of an evaluation, or ``reward`` of the metric function; None if there is neither."""
        names = ("eval/reward", "eval/metrics/reward")
        values = [value for name in names for key, value in found.items() if key == name or key.startswith(f"{name}@")]
        if not values:
            say_once(
                "train.save_best has no effect: evaluations are compared by the reward function or by reward of "
                f"metric_fn, and have {', '.join(sorted(found))}"
            )
        return values[0] if values else None

    def update(self, batch: Any) -> Any:
        """Make a step, then call the methods of trlX that follow a pass over the store, and all passes over it."""
        metrics = cast(Any, super()).update(batch)
        if self.progress.position == 0:
            self.outer.post_backward_callback()
            if not self.online or self.progress.epoch == self.passes:  # an epoch of samples is one pass
                self.outer.post_epoch_callback()
            self.outer.refresh()
        return metrics

    def write_model(self, building: Path, target: Path) -> None:
        """Write an export; the best one is at ``best_checkpoint/hf_model`` too."""
        cast(Any, super()).write_model(building, target)
        if target.name == "best":
            link = target.parent / "best_checkpoint" / "hf_model"
            link.parent.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                link.symlink_to(Path("..") / "best")


def checked_loss(outer: Any, given: Any, weight: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """Return the loss [] and the statistics of a trainer of one's own, which count ``weight`` units.

    Raises:
        ConfigError: it returned something else.
    """
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise ConfigError(
            f"{type(outer).__name__}.loss returned {describe(given)}; return (loss, stats), a tensor [] and a dict of "
            "numbers by name"
        )
    numbers = {}
    for name, value in flatten_dict(given[1]).items():
        with suppress(TypeError, ValueError):  # such as histograms, which trlX passed on to wandb
            numbers[str(name)] = float(value)
    count = weight.double().cpu()
    return given[0], {name: Mean(torch.tensor(value).double() * count, count) for name, value in numbers.items()}


def _equal(one: Any, other: Any) -> bool:
    """Return whether two batches of trlX have the same tensors."""
    ours, theirs = (dict(each) if hasattr(each, "keys") else vars(each) for each in (one, other))
    tensors = {name: value for name, value in theirs.items() if isinstance(value, torch.Tensor)}
    return all(name in ours and torch.equal(ours[name], value) for name, value in tensors.items())


class Observer:
    """Calls the functions that `learn` of trlX takes, and writes what trlX wrote.

    Args:
        outer: the trainer.
    """

    def __init__(self, outer: Any) -> None:
        self.outer = outer
        self.log_fn: Callable[[dict[str, float]], Any] | None = None
        self.save_fn: Callable[[str], Any] | None = None
        self.eval_fn: Callable[[dict[str, float]], Any] | None = None

    @hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Call ``log_fn`` with the metrics."""
        if self.log_fn is not None:
            self.log_fn(self.outer.named(metrics))

    @hookimpl
    def on_experience(self, trainer: Any, rollouts: list[Any]) -> None:
        """Write the rollouts of a collection to ``train.rollout_logging_dir``, those of the main process."""
        directory = self.outer.rollout_logging_dir
        if directory is None or not rollouts or trainer.from_store or not trainer.parallel.is_main:
            return
        rows = [
            {"query_tensor": query.tolist(), "response_tensor": response.tolist()}
            for part in rollouts
            for query, response in zip(part.queries, part.responses, strict=True)
        ]
        (Path(directory) / f"epoch-{time.time()}.json").write_text(json.dumps(rows), encoding="utf-8")

    @hookimpl
    def on_save(self, trainer: Any, step: int, path: Path) -> None:
        """Export the model beside a checkpoint of the run, and call ``save_fn`` with the checkpoint's directory."""
        if path.parent == trainer.run_dir / "checkpoints":
            name = f"checkpoint_{step:0{len(str(trainer.total_steps))}d}"
            self.outer.save_pretrained(str(trainer.run_dir / name / "hf_model"))
        if self.save_fn is not None:
            self.save_fn(str(path))

    @hookimpl
    def on_evaluate(self, metrics: dict[str, float]) -> None:
        """Call ``eval_fn`` with the metrics of the evaluation."""
        if self.eval_fn is not None:
            self.eval_fn(self.outer.named(metrics))
