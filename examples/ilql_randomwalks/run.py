"""Random walks offline: ILQL is trained on walks with rewards, and sampling weighted by advantage finds short walks.

Run as ``trainkit examples run ilql_randomwalks``, or ``python examples/ilql_randomwalks/run.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
METRIC = "eval/optimality"


def main(argv: list[str] | None = None) -> None:
    """Train once, and show how the weight of the advantage in sampling changes the walks."""
    parser = option_parser("ilql_randomwalks", __doc__)
    parser.add_argument("--steps", type=positive, help="number of steps (default: that of ilql.yaml)")
    options = parser.parse_args(argv)
    data = load_file(HERE / "task.py").ilql(options.seed)

    stage = run_stage(HERE / "ilql.yaml", options, data, {"train.total_steps": options.steps})
    show("random walks, offline", ["before", "after"], _rows(stage.evaluations, data["rewards"]), [stage], options)


def _rows(evaluations: Evaluations, rewards: list[float]) -> Iterator[tuple[Any, ...]]:
    """Yield the mean optimality of the data, and of the first and last evaluation for each β; a walk for each β."""
    yield "mean optimality of the data", "", sum(rewards) / len(rewards)
    before, after = evaluations.metrics[0], evaluations.metrics[-1]
    for name in (name for name in after if name.startswith(METRIC)):
        yield f"mean {name.removeprefix('eval/')}", before[name], after[name]
    for first, last in zip(
        *map(_first_of_each_setting, (evaluations.samples[0], evaluations.samples[-1])), strict=True
    ):
        yield f"a walk at {last['setting']}", _shown(first), _shown(last)


def _first_of_each_setting(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({sample["setting"]: sample for sample in reversed(samples)}.values())[::-1]


def _shown(sample: dict[str, Any]) -> str:
    return f"{sample['prompt']}{sample['output']}  {sample['optimality']:.2f}"


if __name__ == "__main__":
    main()
