"""Distillation on random walks: SFT of a teacher and of a smaller student, then the student learns from the teacher.

Run as ``trainkit examples run distill_randomwalks``, or ``python examples/distill_randomwalks/run.py``.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.examples import option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
METRIC = "eval/optimality"


def main(argv: list[str] | None = None) -> None:
    """Run the three stages, and show how far the student comes to the teacher."""
    parser = option_parser("distill_randomwalks", __doc__)
    parser.add_argument("--steps", type=positive, help="number of distillation steps (default: that of distill.yaml)")
    parser.add_argument(
        "--teacher-steps", type=positive, help="number of the teacher's SFT steps (default: its YAML's)"
    )
    parser.add_argument("--sft-epochs", type=positive, help="number of the student's SFT epochs (default: its YAML's)")
    options = parser.parse_args(argv)
    task = load_file(HERE / "task.py")

    taught = {"train.total_steps": options.teacher_steps}
    teacher = run_stage(HERE / "teacher.yaml", options, task.teacher(options.seed), taught)
    sft = run_stage(HERE / "sft.yaml", options, task.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {
        "model.model_path": sft.model,
        "model.reference_path": teacher.model,
        "train.total_steps": options.steps,
    }
    student = run_stage(HERE / "distill.yaml", options, task.distill(options.seed), changes)

    metrics = student.evaluations.metrics
    row = ("mean optimality", metrics[0][METRIC], metrics[-1][METRIC], teacher.evaluations.metrics[-1][METRIC])
    columns = ["student before", "student after", "teacher"]
    show("random walks", columns, [row], [teacher, sft, student], options)


if __name__ == "__main__":
    main()
