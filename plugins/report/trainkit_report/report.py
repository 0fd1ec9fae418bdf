"""A report of runs: one page of HTML with their curves, evaluations, samples, findings and configuration."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeGuard

from markupsafe import Markup, escape

from trainkit.errors import DataError, printable
from trainkit.runs.health import CHECKS, found_in
from trainkit.runs.provenance import said
from trainkit.runs.record import Record, main_metric
from trainkit.tables import number
from trainkit_report.charts import Bars, histogram, horizontal_bars
from trainkit_report.comparison import Comparison
from trainkit_report.groups import Group, differing, grouped, name_of, spread
from trainkit_report.lines import Line, line_chart, mean
from trainkit_report.page import TEMPLATES, render

LARGEST = 1_000_000
"""Bytes of a report at most. Curves get fewer points, and fewer samples are shown, until it is that small."""
DETAIL = ((150, 8, 1500, 90), (100, 8, 1000, 90), (60, 6, 600, 60), (40, 4, 300, 30), (25, 2, 150, 12))
"""Points of a curve, samples of a run, characters of a text, and charts, from the most to the least."""
GROUPS, EVALUATIONS = 12, 25
"""Groups of runs, and rows of a table of evaluations at most."""
FIRST = ("eval", "reward", "loss", "policy")
"""The groups of metrics that come first."""
NOT_SET = "(not set)"
WHOLE = ("collect", "update", "evaluation")
"""The phases of a run. Others, such as `reward`, are parts of ``collect``."""
NAMED = 4
"""Groups that the heading names at most."""
MEASURED = 6
"""Measures of samples at most whose distribution is shown."""


@dataclass(frozen=True)
class Chart:
    """A chart with its caption; how its values go; and what is wrong with them."""

    name: str
    svg: Markup
    change: str = ""
    note: str = ""


def report(
    runs: Sequence[Record],
    title: str | None = None,
    comparison: Comparison | None = None,
    *,
    template: str = "run.html",
    **further: Any,
) -> str:
    """Return the report of runs as HTML of at most 1 MB, without references to other files or addresses.

    Runs that differ by their seed alone are one curve with a band.

    Args:
        runs: at least one, with metrics, as `trainkit_report.groups.runs_at` returns them.
        title: the heading; None for the names of the runs.
        comparison: shown first.
        template: the name of the template.
        **further: what this needs besides.

    Raises:
        ConfigError, DataError: a run cannot be read, or there are too many different ones.
    """
    groups = grouped(runs)
    if len(groups) > GROUPS:
        raise DataError(
            f"{len(groups)} runs with different configurations are given, and a report shows at most {GROUPS}; "
            "name fewer (runs that differ by their seed alone count as one)"
        )
    title = title or _title(groups)
    for detail in DETAIL:
        facts = _facts(groups, comparison, *detail)
        page = render(TEMPLATES / template, title=printable(title), groups=groups, **(facts | further))
        if len(page.encode()) <= LARGEST:
            break
    return page


def _title(groups: Sequence[Group]) -> str:
    names = [group.name for group in groups]
    return ", ".join(names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more"])


def _facts(
    groups: Sequence[Group], comparison: Comparison | None, points: int, samples: int, characters: int, most: int
) -> dict[str, Any]:
    """Return what the template shows of runs."""
    charts, left_out = curves(groups, points, most)
    everything = [run.path for group in groups for run in group.runs]
    runs = [(name_of([run], everything), run) for group in groups for run in group.runs]
    return {
        "comparison": comparison,
        "runs": [_row(name, run) for name, run in runs],
        "differences": _differences(groups),
        "charts": charts,
        "left_out": left_out,
        "evaluations": [_evaluations(group) for group in groups],
        "samples": [_samples(group, samples, characters) for group in groups],
        "distributions": [_distributions(group) for group in groups],
        "findings": [(name, found_in(run)) for name, run in runs],
        "timing": [_timing(group) for group in groups],
        "long": any(len(run.series[name]) > points for group in groups for run in group.runs for name in run.series),
        "configs": [(group, config_lines(group.runs[0])) for group in groups],
        "starts": _starts(runs),
        "unknown": [name for name, run in runs if not run.starts],
        "number": number,
        "shown": shown,
        "moment": moment,
        "known": known,
        "cell": cell,
        "checks": CHECKS,
        "live": False,
    }


# ----------------------------------------------------------------------------------------------------------- facts


def _row(name: str, run: Record) -> dict[str, Any]:
    """Return the row of a run in the first table."""
    metric = main_metric(run.series)
    values = list(run.series[metric].values()) if metric else [math.nan]
    total = run.setting("train", "total_steps")
    return {
        "run": name,
        "method": run.method,
        "seed": run.setting("train", "seed"),
        "steps": f"{run.step:,}{f' of {total:,}' if isinstance(total, int) else ''}",
        "state": run.state,
        "begun": moment(run.starts[0].get("time")) if run.starts else "",
        "time": lasted(sum(phases(run)[name] for name in WHOLE)),
        "metric": metric or "no metrics yet",
        "first": number(values[0]) if metric else "",
        "value": number(values[-1]) if metric else "",
        "found": len(found_in(run)),
    }


def _starts(runs: Iterable[tuple[str, Record]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the starts of the runs, each with the run's name, by the versions they were made with."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, run in runs:
        for start in run.starts:
            made = [f"{maker['name']}: {said(maker)}" for maker in start.get("makers") or []]
            libraries = [f"{library} {version}" for library, version in (start.get("versions") or {}).items()]
            found.setdefault("; ".join([*made, ", ".join(libraries)]), []).append((name, start))
    return found


def _differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """Return the settings in which the groups differ, with the value in each."""
    first = groups[0].runs[0]
    paths = dict.fromkeys(path for group in groups[1:] for path, *_ in differing(first, group.runs[0]))
    rows = [(path, [_setting(group.runs[0], path) for group in groups]) for path in paths]
    return sorted(rows, key=lambda row: NOT_SET in row[1])


def _setting(run: Record, path: str) -> Any:
    value: Any = run.config
    for name in path.split("."):
        value = value.get(name, NOT_SET) if isinstance(value, dict) else NOT_SET
    return value


def curves(groups: Sequence[Group], points: int, most: int) -> tuple[dict[str, list[Chart]], list[str]]:
    """Return charts of the metrics by the first part of their names, and the metrics that are skipped."""
    names = [name for group in groups for name in group.metrics if not name.startswith(("time/", "eval/time"))]
    best = main_metric(names)
    ordered = sorted(dict.fromkeys(names), key=lambda name: (name != best, *_rank(name)))
    charts: dict[str, list[Chart]] = {}
    series = [each for group in groups for run in group.runs for each in run.series.values()]
    span = [step for each in series for step in (next(iter(each)), next(reversed(each)))]
    for name in ordered[:most]:
        lines = [group.line(name, points) or Line(group.name, [], []) for group in groups]
        lost = sum(group.not_finite(name) for group in groups)
        note = f"{lost} value{'s are' if lost > 1 else ' is'} not finite" if lost else ""
        drawn = Chart(name, line_chart(lines, title=name, span=span), _change(groups, name), note)
        charts.setdefault(name.partition("/")[0], []).append(drawn)
    return charts, ordered[most:]


def _change(groups: Sequence[Group], name: str) -> str:
    """Return the first and the last value of a metric, if there is one run."""
    runs = [run for group in groups for run in group.runs]
    known = list(filter(math.isfinite, runs[0].series.get(name, {}).values())) if len(runs) == 1 else []
    return f"{number(known[0])} → {number(known[-1])}" if len(known) > 1 else ""


def _rank(name: str) -> tuple[int, str]:
    part = name.partition("/")[0]
    return (FIRST.index(part) if part in FIRST else len(FIRST), part)


def known(value: float, digits: int = 4) -> str:
    """Return a number as text; empty if it is NaN."""
    return "" if math.isnan(value) else f"{value:.{digits}g}"


def _evaluations(group: Group) -> dict[str, Any]:
    """Return the table of evaluations: a row per step, the mean over the seeds and their deviation in each cell."""
    names = [name for name in group.metrics if name.startswith("eval/") and not name.startswith("eval/time")]
    names.sort(key=main_metric(names).__ne__)
    steps = sorted({step for run in group.runs for name in names for step in run.series.get(name, {})})
    if len(steps) > EVALUATIONS:
        kept = [steps[at * (len(steps) - 1) // (EVALUATIONS - 1)] for at in range(EVALUATIONS)]
    else:
        kept = steps
    rows = []
    for step in kept:
        found = [[run.series.get(name, {}).get(step) for run in group.runs] for name in names]
        rows.append((step, [cell([value for value in values if value is not None]) for values in found]))
    return {"group": group.name, "names": names, "rows": rows, "all": len(steps)}


def cell(values: Sequence[float]) -> str:
    """Return the mean of values, and their deviation if there are several."""
    if not values:
        return ""
    deviation = f" ± {spread(values):.2g}" if len(values) > 1 else ""
    return f"{number(sum(values) / len(values))}{deviation}"


def phases(run: Record) -> dict[str, float]:
    """Return the seconds of each phase of a run, over all steps and evaluations; parts of ``collect`` follow it."""
    found = dict.fromkeys(WHOLE, 0.0)
    for name, values in run.series.items():
        if name.startswith(("time/", "eval/time")):
            phase = "evaluation" if name.startswith("eval/time") else name.removeprefix("time/")
            found[phase] = found.get(phase, 0.0) + sum(filter(math.isfinite, values.values()))
    parts = [name for name in found if name not in WHOLE]
    return {name: found[name] for name in (WHOLE[0], *parts, *WHOLE[1:])}


def _timing(group: Group) -> dict[str, Any]:
    """Return a chart of the time of each phase, as the mean over the seeds, with its share of the whole."""
    known = [phases(run) for run in group.runs]
    totals = {name: mean(each[name] for each in known if name in each) for part in known for name in part}
    whole = sum(totals[name] for name in WHOLE)
    totals = {name: seconds for name, seconds in totals.items() if seconds}
    texts = [f"{lasted(seconds)} ({seconds / whole:.0%})" for seconds in totals.values()] if whole else ()
    names = [name if name in WHOLE else f"– {name}" for name in totals]
    chart = horizontal_bars(Bars("seconds", list(totals.values())), names, title="Time by phase", texts=texts)
    return {"group": group.name, "whole": lasted(whole) if whole else "", "svg": chart}


def lasted(seconds: float) -> str:
    """Return a time as text: 0.52 s, 12.3 min, 4.5 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def moment(time: Any) -> str:
    """Return a time of the ISO format as people write it, in UTC; any other text as it is."""
    try:
        return f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (TypeError, ValueError):
        return shown(time)


def config_lines(run: Record) -> list[tuple[str, str]]:
    """Return the lines of a run's configuration, each with where its value is set; directories are skipped."""
    lines = (run.path / "config.yaml").read_text(encoding="utf-8", errors="replace").splitlines()
    parts = [line.partition("  # ") for line in map(printable, lines)]
    return [(text, re.sub(r"^.*?([^/\\]+[/\\][^/\\]+:\d+)$", r"\1", place)) for text, _, place in parts]


# --------------------------------------------------------------------------------------------------------- samples


def _samples(group: Group, most: int, characters: int) -> dict[str, Any]:
    """Return samples of a group's first run: of the last evaluation beside the first one, and of a collection."""
    first, last = group.runs[0].evaluated()
    before = dict(_numbered(first))
    rows = [
        {
            "prompt": shown(sample.get("prompt", ""), characters),
            "images": thumbnails(sample),
            "before": changed(_text(was, characters), _text(sample, characters), "del") if was else None,
            "after": changed(_text(was, characters), _text(sample, characters), "ins")
            if was
            else _text(sample, characters),
            "was": measures(was) if was else {},
            "measures": measures(sample),
        }
        for key, sample in chosen(list(_numbered(last)), most)
        for was in [before.get(key)]
    ]
    collected = group.runs[0].collected()
    rollouts = [
        {
            "prompt": shown(each.get("prompt", ""), characters),
            "images": thumbnails(each),
            "output": _text(each, characters),
            "measures": measures(each),
        }
        for _, each in chosen(list(_numbered(collected)), most)
    ]
    steps = [part[0].get("step") if part else None for part in (first, last)]
    seed = group.seeds[0] if len(group.runs) > 1 else None
    ranked = len(last) > most and all(map(_is_rewarded, last))
    return {
        "group": group.name,
        "rows": rows,
        "all": len(last),
        "first": steps[0],
        "last": steps[1],
        "ranked": ranked,
        "seed": seed,
        "rollouts": rollouts,
        "collected": len(collected),
        "collected_at": collected[0].get("step") if collected else None,
    }


def _numbered(samples: Iterable[dict[str, Any]]) -> Iterable[tuple[tuple[str, int], dict[str, Any]]]:
    """Yield samples with what tells them apart in an evaluation: the prompt and setting, and which of these it is."""
    counts: dict[str, int] = {}
    for sample in samples:
        name = json.dumps([sample.get("prompt"), sample.get("setting")])
        counts[name] = counts.get(name, -1) + 1
        yield (name, counts[name]), sample


def chosen(samples: list[Any], most: int) -> list[Any]:
    """Return at most ``most`` samples: those with the highest and lowest rewards, or the first without rewards."""
    if len(samples) <= most or not all(_is_rewarded(sample) for _, sample in samples):
        return samples[:most]
    ranked = sorted(samples, key=lambda pair: -pair[1]["reward"])
    return [*ranked[: most - most // 2], *ranked[-(most // 2) :]]


def _is_rewarded(sample: dict[str, Any]) -> bool:
    return is_number(sample.get("reward"))


def measures(sample: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of a sample, the reward first, as text."""
    found = {name: value for name, value in sample.items() if is_number(value) and name != "step"}
    return {name: number(found[name]) for name in sorted(found, key=lambda name: (name != "reward", name))}


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number, NaN included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(sample: dict[str, Any], characters: int) -> str:
    return shown(sample.get("output", ""), characters)


def shown(value: Any, characters: int = 300) -> str:
    """Return a value as text of at most ``characters`` characters, with visible control characters but line breaks."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = "\n".join(map(printable, text.split("\n")))
    return text if len(text) <= characters else f"{text[:characters]}… ({len(text) - characters} more characters)"


def thumbnails(sample: Mapping[str, Any]) -> list[str]:
    """Return the images of a prompt, as the run has recorded them; none that is not small."""
    columns = sample.get("columns")
    images = columns.get("images") if isinstance(columns, Mapping) else None
    some = [image for image in images if isinstance(image, str)] if isinstance(images, list) else []
    return [image for image in some if len(image) <= 20_000 and re.fullmatch(r"data:image/jpeg;base64,[\w+/=]+", image)]


def changed(before: str, after: str, mark: str) -> Markup:
    """Return ``before`` with what is gone as ``<del>``, or ``after`` with what is new as ``<ins>``.

    Texts of several words are compared by words, others by characters.
    """
    pattern = r"\s+|\w+|[^\w\s]" if re.search(r"\s", before.strip() + after.strip()) else r"(?s)."
    a, b = re.findall(pattern, before), re.findall(pattern, after)
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    parts = []
    for operation, start, end, there, to in matcher.get_opcodes():
        text = escape("".join(a[start:end] if mark == "del" else b[there:to]))
        parts.append(text if operation == "equal" or not text else Markup("<{0}>{1}</{0}>").format(Markup(mark), text))
    return Markup().join(parts)


def _distributions(group: Group) -> dict[str, Any]:
    """Return histograms of what was measured of the samples of the first and the last evaluation."""
    pairs = [run.evaluated() for run in group.runs]
    first, last = ([sample for pair in pairs for sample in pair[at]] for at in (0, 1))
    names = sorted({name for sample in last for name, value in sample.items() if is_number(value) and name != "step"})
    names = sorted(names, key=lambda name: name != "reward")[:MEASURED]
    charts = []
    for name in names:
        kinds = [("last", last), *([("first", first)] if first else [])]
        bars = [Bars(kind, [float(s[name]) for s in part if is_number(s.get(name))]) for kind, part in kinds]
        charts.append(Chart(name, histogram(bars, title=f"Distribution of {name}", x_label=name)))
    return {
        "group": group.name,
        "charts": charts,
        "names": ["last evaluation", *(["first evaluation"] if first else [])],
    }
