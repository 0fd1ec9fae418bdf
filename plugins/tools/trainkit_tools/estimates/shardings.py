"""What each phase of a run holds on a device, replicated and divided by FSDP2, and what fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainkit.models.reloading import VERIFIED
from trainkit.trainer.offloading import SMALLEST
from trainkit_tools.estimates.measuring import Need

FREE = 0.1
"""The part of a device's memory that is left for what is not counted: the context of the device, fragments."""
SHARDINGS = ("none", "fsdp2")


@dataclass(frozen=True)
class Phase:
    """Bytes on one device in one phase of a run."""

    name: str
    weights: float = 0.0
    """Weights, those that are gathered included."""
    gradients: float = 0.0
    optimizer: float = 0.0
    reference: float = 0.0
    passes: float = 0.0
    """Activations, logits, and whatever else a pass or a step needs at most at a time."""
    cache: float = 0.0
    """Keys and values of responses that are sampled."""

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.passes + self.cache


@dataclass(frozen=True)
class Plan:
    """The phases of a run on each of so many devices."""

    sharding: str
    processes: int
    rows: int
    """Rows of a micro-batch."""
    phases: tuple[Phase, ...]

    @property
    def largest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def plan(need: Need, sharding: str, processes: int) -> Plan:
    """Return what each process holds with a sharding, ``none`` or ``fsdp2``.

    If a step is one micro-batch, its pass makes the gradients while activations go, unless the model is divided: then
    all of both are counted.

    FSDP2 gathers two blocks at a time, with the gradient of one, and what is in no block: embeddings and head. While
    the engine `local` samples, every process has the whole weights besides its part.
    """
    divided = sharding == "fsdp2" and processes > 1
    share = processes if divided else 1
    weights, gradients = need.weights / share, need.gradients / share
    optimizer, reference = need.optimizer / share, need.reference / share
    trained = need.gradients / max(need.weights, 1)
    gathered = need.narrow * (2 * need.block + need.root) if divided else 0
    unreduced = trained * (need.block + need.root) if divided else 0
    root = need.narrow * need.reference_root if divided else 0
    offloaded = need.leaves and not divided and need.reference >= SMALLEST
    stays = 0 if offloaded else reference + root
    alone = not divided and need.rows * processes >= need.batch
    passes = max(need.first - need.gradients, 0) if alone else need.update
    verify = need.weights <= VERIFIED if need.verify is None else need.verify
    phases = [
        Phase("update", weights + gathered, gradients + unreduced, optimizer, stays, passes),
        Phase("step", weights, gradients, optimizer, stays, need.step / share),
        Phase("saving", weights + (need.weights if verify and not divided else 0), 0, optimizer, stays),
    ]
    whole = need.narrow * need.weights if divided and need.sampling else 0
    compared = need.narrow * need.reference if divided and need.sampling else root
    if need.experience:
        phases.append(
            Phase("experience", weights + (whole or gathered), 0, optimizer, reference + compared, need.experience)
        )
    if need.sampling:
        passes = need.sampling - need.cache
        phases.append(Phase("sampling", weights + whole, 0, optimizer, reference + compared, passes, need.cache))
    return Plan(sharding if divided else "none", processes, need.rows, tuple(phases))


def choose(need: Need, processes: int, memory: float) -> Plan | None:
    """Return the plan that fits into devices of ``memory`` bytes; None if none does.

    A model that fits whole is not divided; of the sizes of a micro-batch, the largest that fits is taken, from that of
    ``need`` in halves.
    """
    return next((each for each in _plans(need, processes) if each.largest.total <= (1 - FREE) * memory), None)


def _plans(need: Need, processes: int) -> Iterator[Plan]:
    needs = list(_halves(need))
    for sharding in SHARDINGS if processes > 1 else SHARDINGS[:1]:
        for each in needs:
            yield plan(each, sharding, processes)


def _halves(need: Need) -> Iterator[Need]:
    rows = need.rows
    yield need
    while rows > 1:
        rows //= 2
        yield need.with_rows(rows)
