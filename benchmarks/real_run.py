"""Draw how runs of the example `word_problems` with an instruct model learnt, and print the table of its page.

Run as ``python benchmarks/real_run.py DIRECTORY ... --figure docs/first-real-run.svg`` with the run directories of
``make examples-real``, one for each seed. It trains nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

WINDOW = 5
"""Steps over which the results of sampled answers are averaged."""
KIND = "pretrained_"


def lines_of(run: Path, stage: str) -> list[dict[str, Any]]:
    """Return the records of a stage by step."""
    return [json.loads(line) for line in (run / f"{KIND}{stage}" / "metrics.jsonl").read_text().splitlines()]


def values(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a metric."""
    having = [line for line in lines if name in line]
    return [line["step"] for line in having], [line[name] for line in having]


def row(run: Path) -> str:
    """Return the row of a seed: right results before, after SFT and after GRPO."""
    (_, before), (_, after) = (values(lines_of(run, stage), "eval/result") for stage in ("sft", "grpo"))
    shown = [before[0], before[-1], after[-1]]
    return f"| {run.name} | {' | '.join(f'{value:.0%}' for value in shown)} |"


def draw(runs: list[Path], figure: Path) -> None:
    """Draw the results of sampled answers, averaged over steps, and of greedy answers to held-out problems."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "trainkit", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    _, axes = plt.subplots(figsize=(7, 3.2))
    for index, run in enumerate(runs):
        lines = lines_of(run, "grpo")
        steps, sampled = values(lines, "reward_fn/result")
        means = [statistics.mean(sampled[max(0, at + 1 - WINDOW) : at + 1]) for at in range(len(sampled))]
        axes.plot(steps, means, color=f"C{index}", label=f"{run.name}: sampled")
        axes.plot(*values(lines, "eval/result"), "o--", color=f"C{index}", label=f"{run.name}: held out, greedy")
    axes.set(xlabel="step of GRPO", ylabel="right results", ylim=(0, 1))
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    plt.tight_layout()
    plt.savefig(figure, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="a run directory for each seed")
    parser.add_argument("--figure", type=Path, default=Path("docs/first-real-run.svg"))
    given = parser.parse_args()
    print("| run | before | after SFT | after GRPO |\n|---|---|---|---|")
    print("\n".join(map(row, given.runs)))
    draw(given.runs, given.figure)
