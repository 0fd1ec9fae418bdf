"""What identifies a run: when it began, and the weights, data and plugins that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainkit.data import Pipeline
from trainkit.models.reference import fingerprint
from trainkit.runs import provenance
from trainkit.runs.fingerprints import Fingerprints, of_rows
from trainkit.runs.record import first_start
from trainkit.runs.saving import trained

if TYPE_CHECKING:
    from trainkit.runs.view import RunView


class Identity:
    """What a checkpoint and the run that resumes from it have in common.

    Args:
        run: the run.
        plugins: the names of the plugins that it is made with, besides its algorithm.
    """

    def __init__(self, run: RunView, plugins: Iterable[str]) -> None:
        self._run, self._plugins = run, list(plugins)
        self.others: dict[str, Callable[[], str]] = {}
        """Functions that return further fingerprints than those of the data, by what these are of."""
        self._data: tuple[Any, Fingerprints] | None = None
        """The data whose fingerprints are known, and these."""

    @cached_property
    def began(self) -> datetime:
        """When the run began; if it is resumed, when its first process did. All processes read it together."""
        config = self._run.config.train
        return self._run.parallel.on_main(lambda: first_start(config.run_dir, config.resume))

    @cached_property
    def makers(self) -> list[provenance.Maker]:
        """Provenance for checkpoints and model cards: distributions and versions of trainkit and the plugins."""
        return provenance.makers(self._run.config.method.name, self._plugins)

    @cached_property
    def start(self) -> str | None:
        """Fingerprint of the weights that the run started from and that checkpoints do not hold; it never changes.

        `read_whole` has computed it if the model is divided. The models must be built.
        """
        with self._run.parallel.sharding.unsharded():
            return self._of_start(self._run.models.reference)

    def read_whole(self, reference: Any) -> None:
        """Compute the fingerprints of weights before models are divided for good."""
        parallel = self._run.parallel
        self.start = parallel.on_main(lambda: self._of_start(reference))
        for frozen in self._run.models.frozen:
            frozen.fingerprint = parallel.on_main(lambda frozen=frozen: frozen.fingerprint)  # type: ignore[misc]

    def _of_start(self, reference: Any) -> str | None:
        """Return a fingerprint of the initial weights that checkpoints need and do not hold; None if there are none.

        They are the reference's if it is the model's start, otherwise the frozen ones.
        """
        if self._run.needs_reference and self._run.chosen_reference is None:
            return fingerprint(reference.policy.state_dict())
        policy = self._run.models.unwrapped
        changing = trained(policy)
        frozen = {name: tensor for name, tensor in policy.state_dict().items() if name not in changing}
        return fingerprint(frozen) if frozen else None

    @property
    def data(self) -> Fingerprints:
        """Fingerprints of the data by column, and of `others`; a stream, which is read during training, has none."""
        pipeline = self._run.pipeline
        if self._data is None or self._data[0] is not pipeline:
            self._data = pipeline, of_rows(pipeline.rows) if isinstance(pipeline, Pipeline) else {}
        return {**self._data[1], **{name: read() for name, read in self.others.items()}}

    def state(self) -> dict[str, Any]:
        """Return what is compared between a checkpoint and the run that resumes from it."""
        return {
            "config": self._run.config.to_dict(),
            "reference": self.start,
            "frozen": [each.fingerprint for each in self._run.models.frozen],
            "processes": self._run.parallel.world,
            "makers": self.makers,
            "data": self.data,
        }
