"""Random walks: SFT of a small model from random weights, then PPO, RLOO, GRPO or RFT with a reward for short walks.

Run as ``trainkit examples run randomwalks``, or ``python examples/randomwalks/run.py``.
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
    """Run SFT and the online method, and show what the latter changed."""
    parser = option_parser("randomwalks", __doc__)
    methods = ["ppo", "rloo", "grpo", "rft"]
    parser.add_argument("--method", choices=methods, default="ppo", help="the method after SFT (default: ppo)")
    parser.add_argument("--steps", type=positive, help="number of steps after SFT (default: that of the YAML file)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of sft.yaml)")
    options = parser.parse_args(argv)
    task = load_file(HERE / "task.py")

    sft = run_stage(HERE / "sft.yaml", options, task.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    rl = run_stage(HERE / f"{options.method}.yaml", options, task.ppo(options.seed), changes)

    method = options.method.upper()
    show("random walks", [f"before {method}", f"after {method}"], _rows(rl.evaluations), [sft, rl], options)


def _rows(evaluations: Evaluations) -> Iterator[tuple[Any, ...]]:
    """Yield the metrics of the first and last evaluation side by side, and a few walks of each."""
    before, after = evaluations.metrics[0], evaluations.metrics[-1]
    for name in (name for name in after if name.startswith(METRIC)):
        yield f"mean {name.removeprefix('eval/')}", before[name], after[name]
    first, last = _first_of_each_start(evaluations.samples[0]), _first_of_each_start(evaluations.samples[-1])
    for start in list(last)[:: max(len(last) // 3, 1)][:3]:
        yield f"a walk from {start}", _shown(first[start]), _shown(last[start])


def _first_of_each_start(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for sample in samples:
        first.setdefault(sample["prompt"], sample)
    return first


def _shown(sample: dict[str, Any]) -> str:
    return f"{sample['prompt']}{sample['output']}  {sample['optimality']:.2f}"


if __name__ == "__main__":
    main()
