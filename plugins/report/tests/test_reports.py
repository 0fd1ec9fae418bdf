"""Reports and comparisons of runs, and the charts in them."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tables import table
from trainkit.cli import app
from trainkit.errors import DataError
from trainkit.runs.record import Record
from trainkit.runs.student import quantile, within
from trainkit_report.charts import Bars, histogram, horizontal_bars, text_chart
from trainkit_report.comparison import Paired, compare
from trainkit_report.groups import grouped, runs_at
from trainkit_report.lines import Line, line_chart
from trainkit_report.report import LARGEST, changed, chosen, lasted, report
from written import EVIL, Page, write_run

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def reported(*paths: Path) -> str:
    return report(runs_at(paths))


# --------------------------------------------------------------------------------------------------------- reports


def test_a_report_refers_to_nothing_outside_and_escapes_everything(tmp_path: Path) -> None:
    run = write_run(tmp_path / f"run{EVIL.split('/')[0]}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, f"eval/{EVIL}": 1.0, EVIL: math.nan}) + "\n")
    (run / "health.jsonl").write_text(json.dumps({"step": 3, "check": "kl", "message": EVIL}) + "\n")
    page = reported(run)
    read = Page(page)
    assert "script" not in read.tags
    assert "img" not in read.tags
    assert [address for address in read.addresses if not address.startswith(("#", "data:,"))] == []
    assert "<script>alert(1)" in read.text  # shown as text
    assert "\x1b" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_a_report_has_every_part(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    start = {"time": "2026-01-02T03:04:05+00:00", "step": 0, "versions": {"torch": "2.13.0"}, "device": "cpu"}
    (run / "starts.jsonl").write_text(json.dumps({**start, "processes": 2, "makers": []}) + "\n")
    text = re.sub(r"\s+", " ", Page(reported(run)).text)
    for part in ("Curves", "Evaluations", "Samples", "Distributions", "Health", "Timing", "Configuration", "Versions"):
        assert f" {part} " in text
    assert "eval/reward" in text
    chosen = "those with the highest and the lowest rewards"
    assert f"8 of 12 samples of the evaluation at step 20 ({chosen}), beside those at step 0" in text
    assert "Nothing found in run" in text
    assert "project/ppo.yaml:1" in text
    assert "somebody" not in text  # the directory of who ran it
    assert "torch 2.13.0" in text
    assert "begun time metric first last" in re.sub(r"<[^>]+>", " ", reported(run)).replace("  ", " ")
    assert "2026-01-02 03:04 UTC" in text
    assert "update: 10 s (98%)" in reported(run)  # 20 steps of 0.5 s, and two evaluations of 0.1 s


def test_runs_of_equal_names_are_told_apart_everywhere(tmp_path: Path) -> None:
    for side, lr in (("low", 1e-3), ("high", 0.1)):
        for seed in (1, 2):
            run = write_run(tmp_path / side / f"seed{seed}", seed=seed, lr=lr)
            start = {"time": "2026-01-02T03:04:05+00:00", "step": 0, "versions": {"torch": "2.13.0"}, "device": "cpu"}
            (run / "starts.jsonl").write_text(json.dumps({**start, "processes": 1}) + "\n")
    text = re.sub(r"\s+", " ", Page(report(runs_at([tmp_path]))).text)
    for name in ("low/seed1", "low/seed2", "high/seed1", "high/seed2"):
        assert text.count(name) == 3, name  # of the runs, their findings and their starts
    assert text.count("torch 2.13.0") == 1
    assert "high (2 seeds), seed 1: 8 of 12 samples" in text


def test_settings_that_all_have_come_before_those_of_a_method(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.1)
    config = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(config.replace("name: ppo", "beta: 0.1\n  name: dpo"))
    page = reported(first, second)
    assert page.index('scope="row">optimizer.lr') < page.index('scope="row">method.beta')
    assert '<td class="soft">(not set)</td>' in page


def test_runs_that_differ_by_their_seed_are_one_curve_with_a_band(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / "low" / f"seed{seed}", seed=seed, gain=seed)
        write_run(tmp_path / "high" / f"seed{seed}", seed=seed, lr=0.1)
    groups = grouped(runs_at([tmp_path]))
    assert [group.name for group in groups] == ["high (3 seeds)", "low (3 seeds)"]
    line = groups[1].line("eval/reward", 100)
    assert line is not None
    assert list(line.x) == [0, 20]
    assert list(line.y) == [2.0, 3.0]  # the mean of the gains 1, 2 and 3
    assert (list(line.low), list(line.high)) == ([1.0, 2.0], [3.0, 4.0])
    assert groups[1].final("eval/reward") == {1: 2.0, 2: 3.0, 3: 4.0}
    text = Page(report(runs_at([tmp_path]))).text
    assert "optimizer.lr" in text
    assert "3 ± 1" in text


@pytest.mark.slow
def test_a_report_of_100_000_lines_is_small(tmp_path: Path) -> None:
    metrics = [{"step": step, **{f"part{at}/x": math.sin(step / 9 + at) for at in range(5)}} for step in range(100_000)]
    page = reported(write_run(tmp_path / "run", metrics=metrics, steps=100_000))
    assert len(page.encode()) <= LARGEST


@pytest.mark.slow
def test_a_report_with_too_many_curves_and_long_samples_stays_within_a_megabyte(tmp_path: Path) -> None:
    metrics = [{"step": step, **{f"m/{at}": step * at for at in range(120)}} for step in range(500)]
    for group in range(8):
        run = write_run(tmp_path / f"run{group}", metrics=metrics, lr=group + 1)
        rows = [{"step": 0, "kind": "evaluation", "prompt": "é" * 5000, "output": "ü" * 50_000, "reward": 1.0}] * 50
        (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report(runs_at([tmp_path]))
    assert len(page.encode()) <= LARGEST
    assert "Not shown: m/" in Page(page).text


def test_values_that_are_not_finite_are_gaps_and_are_told(tmp_path: Path) -> None:
    values = [0.1, math.nan, 0.3, math.inf, -math.inf, 0.6, 0.7]
    metrics = [{"step": step, "loss/total": value} for step, value in enumerate(values)]
    run = write_run(tmp_path / "run", metrics=metrics, samples=False)
    page = reported(run)
    assert "3 values are not finite" in page
    paths = re.findall(r'class="line s0" d="([^"]*)"', page)
    assert len(paths) == 1  # 0.6 to 0.7; the two others are points
    assert "nan" not in "".join(paths)


@table(
    "make, says",
    [
        (lambda path: None, "there is no directory"),
        (lambda path: path.write_text("x"), "is a file; give the directory of a run"),
        (lambda path: path.mkdir(), "is no run and holds none"),
        (lambda path: write_run(path, metrics=[], samples=False), "no metrics have been recorded"),
        (lambda path: write_run(path, metrics=[{"step": 1}], samples=False), "no metrics have been recorded"),
        (lambda path: foreign(path), "names no method"),
        (lambda path: broken(path), r"metrics.jsonl, line 2: not a JSON object"),
    ],
)
def test_what_cannot_be_reported_is_told_in_a_sentence(tmp_path: Path, make: Any, says: str) -> None:
    make(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert re.search(says, result.stderr)
    assert not (tmp_path / "run" / "report.html").exists()


def foreign(path: Path) -> None:
    write_run(path)
    (path / "config.yaml").write_text("learning_rate: 3\n")


def broken(path: Path) -> None:
    write_run(path)
    (path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1}\nnonsense\n{"step": 2}\n')


def test_a_run_that_was_killed_while_it_wrote_is_reported_and_one_without_samples_and_evaluations(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 21, "reward')
    (run / "run.lock").write_text("{}")
    page = reported(run)
    assert "killed" in Page(page).text
    assert '"step": 21' not in page
    alone = write_run(tmp_path / "alone", metrics=[{"step": 1, "loss/total": 1.0}], samples=False)
    text = Page(reported(alone)).text
    assert "alone was not evaluated" in text
    assert "alone has no samples of evaluations" in text
    assert "alone: no versions are recorded" in text


def test_the_command_writes_the_report_into_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(run), "--title", "Ours & theirs"])
    assert result.exit_code == 0, result.output
    assert "<title>Ours &amp; theirs</title>" in (run / "report.html").read_text()
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "no" / "x.html")])
    assert "cannot write" in result.stderr


def test_times_samples_and_changes_are_told_briefly() -> None:
    assert [*map(lasted, (0.0123, 119, 150, 43_200))] == ["0.0123 s", "119 s", "2.5 min", "12 h"]
    samples = [(("p", at), {"reward": at}) for at in range(10)]
    assert [sample["reward"] for _, sample in chosen(samples, 4)] == [9, 8, 1, 0]
    assert chosen([(("p", 0), {"length": 3})], 4) == [(("p", 0), {"length": 3})]
    assert changed("a red <b> fox", "a blue <b> fox", "ins") == "a <ins>blue</ins> &lt;b&gt; fox"
    assert changed("a red <b> fox", "a blue <b> fox", "del") == "a <del>red</del> &lt;b&gt; fox"
    assert changed("abc", "abd", "ins") == "ab<ins>d</ins>"


# ----------------------------------------------------------------------------------------------------- comparisons


def test_student_and_the_paired_test_are_those_of_scipy() -> None:
    from scipy import stats

    for freedom in (1, 2, 3, 4, 7, 10, 29):
        for t in (0.0, 0.1, 1.0, 2.5, 12.0):
            assert within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-12)
        assert quantile(0.95, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-10)
    a, b = [0.31, 0.52, 0.44, 0.61], [0.42, 0.55, 0.61, 0.70]
    test = Paired([y - x for x, y in zip(a, b, strict=True)])
    theirs = stats.ttest_rel(b, a)
    assert test.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert test.interval == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-9)
    assert Paired([0.0, 0.0]).p == 1.0
    assert math.isnan(Paired([0.1 + 0.2, 0.3]).p)  # equal but for rounding: nothing is known of the spread
    assert Paired([1.0, 2.0]).p == pytest.approx(1 - 2 / math.pi * math.atan(3))  # t = 3, one degree of freedom
    assert math.isnan(Paired([1.0]).p)
    assert math.isnan(Paired([]).mean)


def seeds(path: Path, gains: list[float], **given: Any) -> list[Record]:
    for seed, gain in enumerate(gains):
        write_run(path / f"seed{seed}", seed=seed, gain=gain, samples=False, **given)
    return runs_at([path])


def test_a_verdict_needs_seeds_in_common(tmp_path: Path) -> None:
    a = seeds(tmp_path / "a", [0.0, 0.1, 0.2, 0.1])
    b = seeds(tmp_path / "b", [0.5, 0.61, 0.7, 0.59], lr=0.1)
    assert compare(a, b).verdict().startswith("eval/reward of b (4 seeds) is higher than of a (4 seeds): +0.5")
    assert compare(b, a).verdict().startswith("eval/reward of a (4 seeds) is lower than of b (4 seeds): -0.5")
    assert compare(a, a).verdict().startswith("No difference shown")
    assert list(compare(a, b).notes())[-1].endswith("with 4 seeds it can only show large ones.")
    c = seeds(tmp_path / "c", [1.0, 1.1, 1.2, 1.1], lr=0.3)  # each by 1 above a
    assert "by +1 with each of 4 seeds, so the spread over seeds is not known" in compare(a, c).verdict()
    assert "one seed in common" in compare(a[:1], b).verdict()
    assert "no seed in common" in compare(a[:1], b[1:]).verdict()
    assert [path for path, *_ in compare(a, b).settings] == ["optimizer.lr"]
    found = compare(a[1:], b[:3])  # a side is named by its own runs
    assert (found.first.name, found.second.name) == ("a (3 seeds)", "b (3 seeds)")
    assert len(found.paired("eval/reward").differences) == 2


def test_runs_of_different_methods_are_compared_by_what_they_share(tmp_path: Path) -> None:
    a, b = seeds(tmp_path / "a", [0.0]), seeds(tmp_path / "b", [0.0], method="ilql", steps=30)
    notes = " ".join(compare(a, b).notes())
    assert "The methods differ" in notes
    assert "20 and 30" in notes
    alone = runs_at([write_run(tmp_path / "c", metrics=[{"step": 1, "loss/nll": 1.0}])])
    with pytest.raises(DataError, match="no metric in common"):
        compare(a, alone)
    with pytest.raises(DataError, match=r"no metric 'eval/rewrad' is in both; did you mean 'eval/reward'\?"):
        compare(a, b, "eval/rewrad")


def test_one_side_of_a_comparison_differs_by_its_seed_alone(tmp_path: Path) -> None:
    runs = [*seeds(tmp_path / "a", [0.0]), *seeds(tmp_path / "b", [0.0], lr=0.1)]
    with pytest.raises(DataError, match=r"differ in optimizer.lr \(0.001 and 0.1\)"):
        compare(runs, runs)


def test_compare_prints_settings_curves_values_and_a_verdict(tmp_path: Path) -> None:
    seeds(tmp_path / "a", [0.0, 0.1])
    seeds(tmp_path / "b", [0.5, 0.61], lr=0.1)
    sides = [str(tmp_path / "a"), os.path.relpath(tmp_path / "b")]
    result = CliRunner().invoke(app, ["compare", *sides, "--out", str(tmp_path / "both.html")])
    assert result.exit_code == 0, result.output
    for said in ("optimizer.lr: 0.001 -> 0.1", "eval/reward", "1.05 ± 0.071", "+0.505", "paired t test over 2 seeds"):
        assert said in result.output
    assert "paired t test over 2 seeds" in Page((tmp_path / "both.html").read_text()).text
    page = (tmp_path / "both.html").read_text()
    assert "1.05 ± 0.071" in page
    assert "<details><summary>1 metric of training" in page
    plain = json.loads(CliRunner().invoke(app, ["compare", *sides, "--json"]).stdout)
    assert plain["settings"] == {"optimizer.lr": [0.001, 0.1]}
    assert plain["metrics"]["eval/reward"]["difference"] == pytest.approx(0.505)


# ---------------------------------------------------------------------------------------------------------- charts


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=80), st.text(max_size=12))
@example([(1e306, 0.0), (0.0, -1.3e126)], "")  # a point beyond the axis is a gap
def test_charts_of_any_numbers_are_well_formed(points: list[tuple[float, float]], name: str) -> None:
    name = "".join(character for character in name if character.isprintable())
    finite = [(x, y) for x, y in points if math.isfinite(x)]
    line = Line(name, [x for x, _ in finite], [y for _, y in finite])
    bars = Bars(name, [y for _, y in points])
    charts = [
        line_chart([line, line], title=name, standalone=True),
        histogram([bars], title=name),
        horizontal_bars(bars, [name] * len(points), title=name),
    ]
    for chart in charts:
        svg = ElementTree.fromstring(chart)
        numbers = re.findall(r'(?<= [xy]=")[^"]*|(?<= d=")[^"]*', chart)
        assert "nan" not in " ".join(numbers)
        assert "inf" not in " ".join(numbers)
        assert svg.get("aria-label", "").startswith(name)
    list(text_chart([line], "A"))


def test_all_curves_of_a_report_have_the_same_steps(tmp_path: Path) -> None:
    metrics = [{"step": step, "a/x": step, **({"a/y": step} if step == 3 else {})} for step in range(11)]
    page = reported(write_run(tmp_path / "run", metrics=metrics, samples=False))
    assert len(re.findall(r'x="460" y="\d+">10</text>', page)) == 2  # the last step is at the right end of both


def test_twelve_series_look_different_and_bins_of_whole_numbers_hold_equally_many() -> None:
    chart = line_chart([Line(str(at), [0, 1], [at, at]) for at in range(12)], title="t")
    assert len(set(re.findall(r'class="(line [^"]*)"', chart))) == 12
    chart = histogram([Bars("a", [2, 3, 3, 5]), Bars("b", [2])], title="t")
    assert re.findall(r"<title>([^<]*)</title>", chart) == ["a: 25% at 2", "a: 50% at 3", "a: 25% at 5", "b: 100% at 2"]
    lengths = histogram([Bars("a", list(range(100)))], title="t")
    assert set(re.findall(r"a: (\d+)%", lengths)) == {"5"}
