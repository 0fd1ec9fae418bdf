"""A check: a function with its reason, which is run on a plugin."""

from __future__ import annotations

import inspect
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit.errors import NonFiniteError
from trainkit_kit.failures import CheckError
from trainkit_kit.probing import probed_once
from trainkit_kit.repeating import difference_at_start
from trainkit_kit.subjects import PARTS, Bench, Kind, Subject

Condition = Callable[[Subject], bool]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: tiny models are slower on several, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Check:
    """One thing that a plugin must do right."""

    name: str
    proves: str
    """What the check verifies, in a sentence."""
    matters: str
    """Why it matters: what goes wrong in a plugin that fails."""
    kind: Kind
    function: Callable[[Bench], None]
    where: Condition
    causes: str = ""
    """What usually looks like this, for a plugin that fails; empty if what was seen says it."""

    def run(self, subject: Subject, folder: Path | None = None) -> None:
        """Run the check on ``subject``, without printing what the plugin prints.

        Raises:
            CheckError: the check failed. Other exceptions of the plugin are passed on.
        """
        quiet = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
        with tempfile.TemporaryDirectory() as made, quiet[0], quiet[1], one_thread(), probed_once():
            bench = Bench(subject, folder or Path(made))
            try:
                self.function(bench)
            except NonFiniteError as error:
                raise CheckError(f"{error}; the probe is a trainer with {bench.probe}") from error
            except CheckError as error:
                if subject.kind not in PARTS and (told := difference_at_start(bench)):
                    raise CheckError(f"{told}. Checks that compare trainers fail by it, as this one: {error}") from None
                raise


CHECKS: dict[str, Check] = {}
"""All checks that are registered, by name, in the order in which they run."""

OF_VARIANTS = {
    "accumulation", "context_does_not_count", "credit_follows_scores", "credit_of_scores",
    "first_update", "keep_chooses", "kl_pulls_back", "labels_decide", "mask_law", "metric_totals", "micro_batches",
    "padding_amount", "reference_counts_in_every_row", "reference_is_frozen", "reported_kl",
    "sides_of_pairs", "time_has_a_direction", "two_processes", "weight_counts",
}  # fmt: skip
"""Checks that are also run for the variants that an algorithm declares: those of what is learnt in a step."""


def check(
    *, kind: Kind = "trainer", where: Condition = lambda _: True
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Make a check of a function. Its docstring says what it verifies and, in the paragraphs below, why it matters.

    A last paragraph that begins with "Causes:" says what usually looks like this.
    """

    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        text, _, causes = (inspect.getdoc(function) or "").partition("\n\nCauses: ")
        proves, _, matters = text.partition("\n\n")
        name = function.__name__
        proves, matters, causes = (" ".join(part.split()) for part in (proves, matters, causes))
        CHECKS[name] = Check(name, proves, matters, kind, function, where, causes)
        return function

    return register
