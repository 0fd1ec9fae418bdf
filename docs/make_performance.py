"""Writes the figures of docs/distributed.md from benchmarks/speed.json and gpu.jsonl (``make speed``, ``make gpu``).

They are between two comments of the page, ``<!-- table: measured -->`` and ``<!-- end of table -->``. The charts of
growth are beside the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainkit_report.lines import Line, line_chart

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

from figures import (  # noqa: E402
    GROWTH,
    KINDS,
    Case,
    Row,
    by_system,
    exponents,
    extra_memory,
    machines,
    ratio,
    verdicts,
)

PAGE, FIGURES = DOCS / "distributed.md", DOCS.parent / "benchmarks" / "speed.json"
GPU = FIGURES.with_name("gpu.jsonl")
TABLE = re.compile(r"(<!-- table: measured -->\n).*?(<!-- end of table -->)", flags=re.DOTALL)
DEVICES = {"cpu": "On a CPU", "cuda": "On a CUDA device"}
PACKAGES = {"torch": "torch", "transformers": "transformers", "trl": "TRL", "trlx": "trlX"}
PEERS = {
    "bare": "a loop in plain torch",
    "transformers": "`generate` of transformers",
    "trlx": "trlX",
    "trainkit-frozen": "trainkit, 2 of 6 layers",
}
"""The systems beside TRL, as the page names them."""


def written(text: str, entries: Sequence[dict[str, Any]]) -> str:
    """Return the page with its tables as the figures are."""
    gpu = [json.loads(line) for line in GPU.read_text(encoding="utf-8").splitlines()]
    tables = "\n".join([*(part for entry in entries for part in measured(entry)), *on_a_gpu(gpu)])
    return TABLE.sub(lambda found: f"{found[1]}\n{tables}\n{found[2]}", text)


def measured(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about one machine."""
    about, groups = entry["machine"], by_system(entry["rows"])
    yield f"### {DEVICES[about['device']]}\n"
    yield described(about) + "\n"
    yield from beside_trl(groups)
    yield from beside_others(groups)
    yield from alone(groups)
    yield from grown(entry["growth"], about["device"])
    yield from targets(entry["rows"])


def on_a_gpu(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what ``benchmarks/gpu.py`` measured: training steps beside TRL, the head, and sampling."""
    yield "### Shapes of Qwen2.5 on a GPU\n"
    about, by_name = rows[0], {row["row"]: row for row in rows}
    yield f"{about['card']}; torch {about['torch']}, transformers {about['transformers']}, TRL 1.16; bf16 autocast.\n"
    lines = []
    for name, own in by_name.items():
        found = re.fullmatch(r"(\w+:\S+), (Q\d+)(?:, microbatch (\d+))?, trainkit", name)
        if found is None:
            continue
        rows_of_a_pass = f", {found[3]} rows in a pass" * bool(found[3])
        other = by_name.get(name.replace("trainkit", "trl"))
        seconds = [f"{own['seconds']:.3f}", "", ""]
        if other is not None:
            seconds[1:] = [f"{other['seconds']:.3f}", said(other["seconds"] / own["seconds"])]
        speed = own.get("tokens_per_s", own.get("response_tokens_per_s"))
        share = f"{own['share_of_peak']:.0%}" if "share_of_peak" in own else ""
        memory = [f"{own['peak']:.0f}", f"{other['peak']:.0f}" if other else ""]
        lines.append([f"{Case.read(found[1]).title}{rows_of_a_pass}", found[2], *seconds, f"{speed:,}", share, *memory])
    head = "work | model | trainkit, s | TRL, s | TRL / trainkit | tokens/s | of the peak | trainkit, MB | TRL, MB"
    yield from table(head, lines)
    lines = []
    for name, row in by_name.items():
        if name.startswith("head, "):
            times = [f"{1000 * row[key]:.0f}" for key in ("seconds_bf16", "seconds_float32")]
            what = name.removeprefix("head, ").removesuffix(" tokens").split(", ")
            lines.append([*what, *times, f"{row['gradient_error']:.2%}", f"{row['mb_bf16']:,}"])
    yield "Log-probabilities from the head, forward and backward, and the relative error of its gradient:\n"
    yield from table("model | tokens | bf16, ms | float32, ms | error in bf16 | MB in bf16", lines)
    lines = [
        [
            *name.removeprefix("decode, ").split(", "),
            *(f"{row[key]:,}" for key in ("ms", "least_ms", "tokens_per_s", "peak_mb")),
        ]
        for name, row in by_name.items()
        if name.startswith("decode, ")
    ]
    if lines:
        yield "A step of sampling, beside the time in which its weights and cache are read:\n"
        yield from table("model | responses | prompt + response | ms | at least, ms | tokens/s | MB", lines)


def described(about: dict[str, Any]) -> str:
    """Return the hardware, the versions, the date and the speeds of products."""
    threads = f"{about['threads']} thread{'s' * (about['threads'] != 1)}"
    where = f"{about['hardware']}, {threads}" if about["device"] == "cpu" else about["hardware"]
    versions = [f"{PACKAGES[name]} {version}" for name, version in about["versions"].items()]
    seconds = "Seconds" if about["clock"] == "wall" else "Seconds of processor time"
    products = "; ".join(f"{name} {speed:,.0f}" for name, speed in about["products"].items())
    tried = " The sizes are small: these figures only show that everything runs." * about["small"]
    return (
        f"{where}; {', '.join(versions)}; {about['date']}. {seconds} of a step are medians. Products of matrices, in "
        f"GFLOP/s: {products}.{tried}"
    )


def table(head: str, lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table, if it has rows."""
    if lines:
        columns = head.split(" | ")
        yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
        yield from (f"| {' | '.join(line)} |" for line in lines)
        yield ""


Groups = dict[tuple[str, ...], dict[str, Row]]


def usual(groups: Groups) -> Iterator[tuple[str, str, dict[str, Row], dict[str, Row], dict[str, Row]]]:
    """Yield for each case and model: the case in words, the model, and the rows by system.

    They are those of the backend ``default`` if it was measured, then those of each of ``default`` and ``equal``.
    """
    for case, model, precision in dict.fromkeys(key[:3] for key in groups):
        by_backend = [groups.get((case, model, precision, backend), {}) for backend in ("default", "equal")]
        name = f"{model}, bf16" if precision == "bf16" else model
        yield case, name, by_backend[0] or by_backend[1], *by_backend


def beside_trl(groups: Groups) -> Iterator[str]:
    """Yield the table of what both trainkit and TRL do."""
    lines = []
    for case, model, rows, default, equal in usual(groups):
        if {"trainkit", "trl"} <= rows.keys():
            own, other = rows["trainkit"], rows["trl"]
            times = [said(ratio(systems, "seconds", "trl", "trainkit")) for systems in (default, equal)]
            seconds, memory = [timed(row) for row in (own, other)], [f"{row['peak']:.0f}" for row in (own, other)]
            part = said(ratio(rows, "peak", "trainkit", "trl"))
            lines.append([Case.read(case).title, model, *seconds, *times, *memory, part])
    head = "work | model | trainkit, s | TRL, s | TRL / trainkit | equal products | trainkit, MB | TRL, MB | memory"
    yield from table(head, lines)


def beside_others(groups: Groups) -> Iterator[str]:
    """Yield the table of trainkit beside a loop in torch, transformers and trlX, and of frozen layers."""
    lines = []
    for case, model, rows, default, equal in usual(groups):
        for system in PEERS.keys() & rows.keys() if "trainkit" in rows else []:
            own, other = rows["trainkit"], rows[system]
            times = [said(ratio(systems, "seconds", system, "trainkit")) for systems in (default, equal)]
            part = said(ratio(rows, "peak", "trainkit", system))
            seconds = [timed(row) for row in (own, other)]
            lines.append([Case.read(case).title, model, PEERS[system], *seconds, *times, part])
    yield from table(
        "work | model | other | trainkit, s | other, s | other / trainkit | equal products | memory", sorted(lines)
    )


def alone(groups: Groups) -> Iterator[str]:
    """Yield the table of what is measured of trainkit alone."""
    lines = []
    for case, model, rows, *_ in usual(groups):
        read = Case.read(case)
        if KINDS[read.name].systems == ("trainkit",) and "trainkit" in rows:
            own = rows["trainkit"]
            count = read.fields()["rows"]
            each = f"{1000 * own['seconds'] / count:.1f}"
            lines.append([read.title, model, timed(own), each, f"{own['peak']:.0f}"])
    yield from table("work | model | trainkit, s | ms for each row | trainkit, MB", lines)


def grown(growth: Sequence[Row], device: str) -> Iterator[str]:
    """Yield the table of exponents, with the charts."""
    found = exponents(growth)
    systems = {"trainkit": "trainkit", "trl": "TRL"}
    lines = []
    for what in GROWTH:
        fitted = [found.get((what, system)) for system in systems]
        if any(fitted):
            lines.append([what, *(f"{value:.2f}" for pair in fitted for value in pair or ())])
    if lines:
        yield "Exponents of growth: with 1, a doubling doubles.\n"
        columns = [f"{name}: {figure}" for name in systems.values() for figure in ("time", "memory")]
        yield from table(" | ".join(["doubled", *columns]), [[*line, *[""] * (5 - len(line))] for line in lines])
        for figure, title in CHARTS.items():
            yield f"![{title}]({chart_name(figure, device)})\n"


CHARTS = {"time": "seconds of a step of RLOO", "memory": "MB beyond those before the first step"}


def chart_name(figure: str, device: str) -> str:
    """Return the name of a chart's file."""
    return f"growth-{figure}-{device}.svg"


def charts(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each chart of growth."""
    for figure, title in CHARTS.items():
        lines = []
        for what in GROWTH:
            rows = [row for row in entry["growth"] if (row["what"], row["system"]) == (what, "trainkit")]
            rows.sort(key=lambda row: int(row["size"]))
            values = [row["seconds"] if figure == "time" else extra_memory(row) for row in rows]
            lines += [Line(what, [row["size"] for row in rows], values)] * bool(rows)
        if lines:
            name = chart_name(figure, entry["machine"]["device"])
            yield name, str(line_chart(lines, title=title, x_label="times as large", standalone=True)) + "\n"


def targets(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of targets, and where the time and the memory of those that are missed go."""
    found = list(verdicts(rows))
    lines = [[each.text, f"{each.measured:.2f}", "reached" if each.reached else "missed"] for each in found]
    yield from table("target | measured | ", lines)
    missed = [each for each in found if not each.reached]
    if missed:
        yield "Where the time and the memory of missed targets go, in seconds of a step and MB:\n"
        lines = [
            [each.text.partition(":")[0], row["system"], *profile(row)]
            for each in {_work(each.rows[0]): each for each in missed}.values()
            for row in each.rows
        ]
        yield from table("work | system | phases, s | before the first step, MB | at most, MB", lines)


def _work(row: Row) -> tuple[str, ...]:
    """Return what was done, and with which settings."""
    return row["case"], row["model"], row["precision"], row["backend"]


def profile(row: Row) -> list[str]:
    """Return the seconds of the phases, and the memory before and at most."""
    phases = ", ".join(f"{name} {seconds:.{places(row)}f}" for name, seconds in row["phases"].items())
    return [phases, f"{row['before']:.0f}", f"{row['peak']:.0f}"]


def timed(row: Row) -> str:
    """Return the seconds of a step as text."""
    return f"{row['seconds']:.{places(row)}f}"


def places(row: Row) -> int:
    """Return how many decimals the seconds of a step and of its phases have."""
    return 2 if row["seconds"] >= 1 else 3


def said(value: float | None) -> str:
    """Return a ratio as text."""
    return "" if value is None else f"{value:.2f}"


def main() -> None:
    """Write the page and the charts."""
    entries = machines(FIGURES)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), entries), encoding="utf-8")
    for name, text in (chart for entry in entries for chart in charts(entry)):
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
