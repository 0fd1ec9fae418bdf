"""The cases of ``speed.py``, the file that keeps its figures, and the targets that these are compared with.

``docs/make_performance.py`` reads the same file. This module imports neither torch nor trainkit.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, Literal, NamedTuple

Row = dict[str, Any]
"""Medians of one system in one case, with what identifies them: the fields of `KEY`."""

KEY = ("case", "model", "precision", "backend", "system")
SAME = ("device", "hardware", "threads", "clock", "small")
"""What has to be the same for figures of several runs to be in one file; so have the versions, as far as known."""
ONLINE = re.compile(r"(\d+)x(\d+),(\d+)\+(\d+)")
OFFLINE = re.compile(r"(\d+)x(\d+)(?:\.\.(\d+))?")


GROWTH = {"batch": "prompts", "length": "tokens", "vocabulary": "tokens", "k": "responses to a prompt"}
"""What ``growth.py`` doubles, and what of it there is."""


@dataclass(frozen=True)
class Kind:
    """What is measured in all cases of a name: its title, the systems, and the shape if a case names none."""

    title: str
    systems: tuple[str, ...]
    shape: str


KINDS = {
    "generate": Kind("Generation", ("trainkit", "transformers", "bare"), "32x1,32+64"),
    "rloo": Kind("RLOO", ("trainkit", "trl", "bare"), "8x4,32+64"),
    "grpo": Kind("GRPO", ("trainkit", "trl"), "8x4,32+64"),
    "online-dpo": Kind("online DPO", ("trainkit", "trl"), "16x2,32+64"),
    "ppo": Kind("PPO", ("trainkit", "bare", "trlx"), "32x1,32+64"),
    "ppo-frozen": Kind("PPO, frozen layers", ("trainkit", "trainkit-frozen"), "32x1,32+64"),
    "rft": Kind("RFT", ("trainkit",), "8x4,32+64"),
    "sft": Kind("SFT", ("trainkit", "trl", "bare"), "8x256"),
    "sft-packed": Kind("SFT, packed", ("trainkit",), "16x128"),
    "reward": Kind("Reward model", ("trainkit", "trl"), "8x32..256"),
    "dpo": Kind("DPO", ("trainkit", "trl"), "8x32..256"),
    "dpo-3": Kind("DPO, 3 epochs", ("trainkit", "trl"), "8x32..256"),
    "ilql": Kind("ILQL", ("trainkit",), "8x32..256"),
}


@dataclass(frozen=True)
class Case:
    """A kind and a shape, written ``rloo:8x4,32+64`` or ``sft:8x32..256``.

    The shape of a case that samples is PROMPTSxK,PROMPT+NEW: prompts of a step, responses to each, tokens of a prompt
    and of a response. That of a case on samples is ROWSxTOKENS, or ROWSxSHORTEST..LONGEST; a row may be a pair.
    """

    name: str
    shape: str

    @classmethod
    def read(cls, text: str) -> Case:
        """Return the case that is written so.

        Raises:
            ValueError: there is no such kind, or the shape has another form.
        """
        name, _, shape = text.partition(":")
        if name not in KINDS:
            raise ValueError(f"there is no case {name!r}; there are {', '.join(KINDS)}")
        case = cls(name, shape or KINDS[name].shape)
        if case.form.fullmatch(case.shape) is None:
            example = f"{name}:{KINDS[name].shape}"
            raise ValueError(f"the case {text!r} has no shape of its kind; write it as {example!r}")
        return case

    @property
    def form(self) -> re.Pattern[str]:
        """The form of the shape."""
        return ONLINE if "+" in KINDS[self.name].shape else OFFLINE

    def __str__(self) -> str:
        return f"{self.name}:{self.shape}"

    @property
    def title(self) -> str:
        """The case in words."""
        shape = self.shape.replace("x", " × ").replace("+", " + ").replace("..", " to ").replace(",", ", ")
        return f"{KINDS[self.name].title}, {shape}"

    def fields(self, *, small: bool = False) -> dict[str, int]:
        """Return the sizes as fields of `Work`; with ``small`` fewer rows and tokens."""
        found = self.form.fullmatch(self.shape)
        assert found is not None, "read has checked it"
        numbers = [int(part) for part in found.groups(default=found[2])]
        if self.form is ONLINE:
            prompts, samples, prompt, new = (2, int(found[2]), 8, 8) if small else numbers
            return {"rows": prompts * samples, "samples": samples, "prompt": prompt, "new": new}
        rows, shortest, longest = (2, 12, 12 if numbers[1] == numbers[2] else 16) if small else numbers
        return {"rows": rows, "shortest": shortest, "longest": longest}


@dataclass(frozen=True)
class Part:
    """A part of the table: a case with the models, precisions and backends that it is measured with."""

    case: str
    models: tuple[str, ...] = ("S", "M")
    precisions: tuple[str, ...] = ("float32",)
    backends: tuple[str, ...] = ("default", "equal")


GRID = tuple(
    Part(f"rloo:{32 // k}x{k},{prompt}+64", ("M",), backends=("equal",))
    for prompt in (32, 128, 512)
    for k in (4, 8, 16)
)[1:]  # the first is measured with both backends
TABLE = (
    Part("generate:32x1,32+64"),
    Part("rloo:8x4,32+64"),
    *(Part(f"rloo:{shape}", ("M",), backends=("equal",)) for shape in ("8x8,128+64", "4x8,512+128")),
    *GRID,
    Part("rloo:8x4,32+64", ("M50k",), backends=("default",)),
    Part("rloo:8x4,32+64", ("M",), ("bf16",), ("default",)),
    Part("grpo:8x4,32+64"),
    *(Part(f"grpo:{shape}", ("M",), backends=("equal",)) for shape in ("8x8,128+64", "4x8,512+128")),
    Part("online-dpo:16x2,32+64"),
    Part("ppo:32x1,32+64", backends=("default",)),
    Part("ppo:64x1,32+64", ("G",), backends=("default",)),
    Part("ppo-frozen:32x1,32+64", ("M",), backends=("default",)),
    Part("rft:8x4,32+64", backends=("default",)),
    Part("sft:8x256"),
    Part("sft:8x256", ("M",), ("bf16",), ("default",)),
    Part("sft:8x32..256"),
    Part("sft:8x256", ("M50k",), backends=("default",)),
    Part("reward:8x32..256"),
    Part("dpo:8x32..256"),
    Part("dpo:8x32..256", ("M",), ("bf16",), ("default",)),
    Part("dpo-3:8x32..256"),
    Part("ilql:8x32..256", backends=("default",)),
)
"""What is measured unless cases are named."""


@dataclass(frozen=True)
class Target:
    """A bound on the ratio ``over`` / ``under`` of a figure: at least ``bound`` with ``least``, else at most."""

    case: str
    models: tuple[str, ...]
    figure: Literal["seconds", "peak"]
    over: str
    under: str
    bound: float
    least: bool = False
    backend: str | None = None
    """None: every backend that is measured."""
    precision: str = "float32"


def _beside_trl(case: str, models: tuple[str, ...], bound: float, most: float = 0.0, **kwargs: Any) -> Iterator[Target]:
    """Yield targets: TRL needs at least ``bound`` times trainkit's time, trainkit at most ``most`` of its memory."""
    yield Target(case, models, "seconds", "trl", "trainkit", bound, least=True, **kwargs)
    if most:
        yield Target(case, models, "peak", "trainkit", "trl", most, **kwargs)


BOTH = ("S", "M")
TARGETS = (
    *(
        target
        for shape, bound in (("8x4,32+64", 1.8), ("8x8,128+64", 2.5), ("4x8,512+128", 3.0))
        for name in ("rloo", "grpo")
        for target in _beside_trl(f"{name}:{shape}", ("M",), bound, 0.6, backend="equal")
    ),
    Target("ppo:32x1,32+64", BOTH, "seconds", "trainkit", "bare", 1.05),
    Target("generate:32x1,32+64", ("S",), "seconds", "trainkit", "bare", 1.10),
    Target("generate:32x1,32+64", ("M",), "seconds", "trainkit", "bare", 1.05),
    *_beside_trl("sft:8x32..256", BOTH, 1.3),
    *_beside_trl("reward:8x32..256", BOTH, 1.3),
    *_beside_trl("dpo:8x32..256", BOTH, 1.35),
    *_beside_trl("dpo-3:8x32..256", BOTH, 1.6),
    *_beside_trl("rloo:8x4,32+64", ("M50k",), 1.3, 0.4),
    *_beside_trl("sft:8x256", ("M50k",), 1.3, 0.4),
    *_beside_trl("rloo:8x4,32+64", ("M",), 1.8, precision="bf16"),
    Target("ppo-frozen:32x1,32+64", ("M",), "seconds", "trainkit", "trainkit-frozen", 1.8, least=True),
)


def by_system(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[str, Row]]:
    """Return the rows by case, model, precision and backend, and then by system."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in KEY[:-1]), {})[row["system"]] = row
    return found


def ratio(systems: dict[str, Row], figure: str, over: str, under: str) -> float | None:
    """Return the ratio of a figure of two systems; None if one of them was not measured."""
    return systems[over][figure] / systems[under][figure] if {over, under} <= systems.keys() else None


class Verdict(NamedTuple):
    """What was measured of a target."""

    text: str
    """The target in words."""
    measured: float
    reached: bool
    rows: tuple[Row, Row]
    """The figures of its two systems, trainkit's first."""


def verdicts(rows: Iterable[Row]) -> Iterator[Verdict]:
    """Yield the verdict on each target whose systems were measured."""
    found = by_system(rows)
    for target in TARGETS:
        for (case, model, precision, backend), systems in found.items():
            measured = ratio(systems, target.figure, target.over, target.under)
            if (
                measured is None
                or (target.case, target.precision) != (case, precision)
                or model not in target.models
                or target.backend not in (None, backend.replace("shared", "equal"))  # they hold for "shared" too
            ):
                continue
            sign = "≥" if target.least else "≤"
            figure = {"seconds": "time", "peak": "memory"}[target.figure]
            setting = {"default": "", "equal": ", equal products", "shared": ", products and attention shared"}[backend]
            what = f"{Case.read(case).title}, {model}{', bf16' * (precision == 'bf16')}{setting}"
            text = f"{what}: {figure} of {target.over} / {target.under} {sign} {target.bound:g}"
            both = sorted((systems[name] for name in (target.over, target.under)), key=_after_trainkit)
            reached = measured >= target.bound if target.least else measured <= target.bound
            yield Verdict(text, measured, reached, (both[0], both[1]))


def _after_trainkit(row: Row) -> bool:
    return row["system"] != "trainkit"


def exponents(growth: Iterable[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the exponents of time and of memory by what grows and system, for those with two sizes or more."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in growth:
        found.setdefault((row["what"], row["system"]), []).append(row)
    return {
        key: (slope(rows, [row["seconds"] for row in rows]), slope(rows, [extra_memory(row) for row in rows]))
        for key, rows in found.items()
        if len(rows) > 1
    }


def extra_memory(row: Row) -> float:
    """Return the MB that a process needed beyond what it had before its first step; at least 1."""
    return max(float(row["peak"] - row["before"]), 1.0)


def slope(rows: Iterable[Row], values: Iterable[float]) -> float:
    """Return the exponent e of value ∝ sizeᵉ, by least squares on logarithms."""
    return statistics.linear_regression([log(row["size"]) for row in rows], [log(value) for value in values]).slope


class MachineError(Exception):
    """A file has figures of another machine."""


@dataclass
class Figures:
    """The figures of one machine, in a file that may have those of another device too."""

    path: Path | None
    machine: dict[str, Any]
    """The device, the hardware, versions and speeds of products."""
    rows: list[Row] = field(default_factory=list)
    growth: list[Row] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, machine: dict[str, Any]) -> Figures:
        """Return the figures of a file, to which those of this run are added; without a path none.

        Raises:
            MachineError: it has figures of the same kind of device from another machine or with other versions.
        """
        known = machines(path) if path is not None and path.exists() else []
        figures = cls(path, machine)
        for entry in known:
            if entry["machine"]["device"] != machine["device"]:
                figures.others.append(entry)
                continue
            for name, theirs, ours in _differences(entry["machine"], machine):
                raise MachineError(
                    f"{path} has figures with {name} {theirs}, and these are with {ours}; "
                    "give another file with --json, or remove it"
                )
            figures.rows, figures.growth = entry["rows"], entry["growth"]
            machine["versions"] = {**entry["machine"]["versions"], **machine["versions"]}
        return figures

    def add(self, rows: Iterable[Row], growth: Iterable[Row] = ()) -> None:
        """Add rows, which replace those of the same key, and write the file."""
        self.rows = _replaced(self.rows, rows, KEY)
        self.growth = _replaced(self.growth, growth, ("what", "system", "size"))
        if self.path is None:
            return
        entry = {"machine": self.machine, "rows": self.rows, "growth": self.growth}
        entries = sorted([*self.others, entry], key=lambda each: str(each["machine"]["device"]))
        self.path.write_text(json.dumps({"machines": entries}, indent=1) + "\n", encoding="utf-8")


def machines(path: Path) -> list[dict[str, Any]]:
    """Return what a file has for each machine: ``machine``, ``rows`` and ``growth``."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["machines"]
    return found


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from ((name, theirs[name], ours[name]) for name in SAME if theirs[name] != ours[name])
    before, now = theirs["versions"], ours["versions"]
    yield from ((name, before[name], now[name]) for name in before.keys() & now.keys() if before[name] != now[name])


def _replaced(known: list[Row], new: Iterable[Row], key: tuple[str, ...]) -> list[Row]:
    rows = {tuple(row[name] for name in key): row for row in known}
    rows |= {tuple(row[name] for name in key): row for row in new}
    return list(rows.values())
