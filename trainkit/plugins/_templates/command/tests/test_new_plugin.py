"""Tests of new_plugin: what the command prints."""

from pathlib import Path

from typer.testing import CliRunner

from trainkit.cli import app
from trainkit.testing.trainers import tiny_trainer


def test_the_best_step_of_a_run_is_printed(tmp_path: Path) -> None:
    """Check the printed step and value of a run, and the exit code without one."""
    trainer = tiny_trainer("rloo", tmp_path / "run", train__total_steps=2, train__eval_interval=1)
    trainer.learn()
    rewards = trainer.history["eval/reward"]
    step = max(rewards, key=lambda at: rewards[at])
    done = CliRunner().invoke(app, ["new-plugin", str(tmp_path / "run")])
    assert f"eval/reward is best at step {step}: {rewards[step]:.4g}" in done.output
    assert CliRunner().invoke(app, ["new-plugin", str(tmp_path)]).exit_code != 0
