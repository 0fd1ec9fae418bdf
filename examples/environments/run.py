"""Environments of several turns: PPO of a small model in a guessing game, with a calculator, or on reasoning-gym.

Run as ``trainkit examples run environments --game guess``, or ``python examples/environments/run.py --game guess``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
METRICS = {"guess": ["won"], "calculator": ["right", "tool"], "reasoning": ["first right", "either right"]}


def main(argv: list[str] | None = None) -> None:
    """Run SFT and PPO in an environment, and show what PPO changed."""
    parser = option_parser("environments", __doc__)
    parser.add_argument("--game", choices=METRICS, default="guess", help="the environment (default: guess)")
    parser.add_argument("--steps", type=positive, help="number of PPO steps (default: that of its YAML file)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of its YAML file)")
    options = parser.parse_args(argv)
    game = load_file(HERE / f"{options.game}.py")

    epochs = {"train.epochs": options.sft_epochs}
    sft = run_stage(HERE / f"{options.game}_sft.yaml", options, game.sft(options.seed), epochs)
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    ppo = run_stage(HERE / f"{options.game}_ppo.yaml", options, game.ppo(options.seed), changes)
    rows = _rows(ppo.evaluations, METRICS[options.game])
    show(f"environment: {options.game}", ["before PPO", "after PPO"], rows, [sft, ppo], options)


def _rows(evaluations: Evaluations, metrics: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the metrics of the first and last evaluation side by side, and a few episodes."""
    for name in [*metrics, "reward", "turns"]:
        yield name, evaluations.metrics[0][f"eval/{name}"], evaluations.metrics[-1][f"eval/{name}"]
    episodes = list(zip(evaluations.samples[0], evaluations.samples[-1], strict=True))
    for before, after in episodes[2 :: len(episodes) // 3]:
        yield _line(before["prompt"]), _line(before["output"]), _line(after["output"])


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
