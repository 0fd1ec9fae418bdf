"""Word problems: SFT on a few worked answers, then GRPO with a reward for the result and for the form.

Run as ``trainkit examples run word_problems``, or ``python examples/word_problems/run.py``. The model has two layers
and random weights; with ``--model`` it is an instruct model, such as the one that ``smollm2.py`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def main(argv: list[str] | None = None) -> None:
    """Run SFT and GRPO, and show what each changed."""
    parser = option_parser("word_problems", __doc__)
    parser.add_argument("--model", help="an instruct model, by its directory or hub id (default: two layers)")
    parser.add_argument(
        "--train", choices=["lora", "whole"], help="an adapter, or all weights (default: an adapter with --model)"
    )
    parser.add_argument("--steps", type=positive, help="number of GRPO steps (default: that of the file)")
    parser.add_argument("--sft-steps", type=positive, help="number of SFT steps (default: that of the file)")
    options = parser.parse_args(argv)
    task, kind = load_file(HERE / "task.py"), "pretrained_" if options.model else ""
    lora = options.train == "lora" if options.train else bool(options.model)
    whole = bool(options.model) and not lora

    def given(model: Any, steps: int | None, lr_of_whole: float) -> dict[str, Any]:
        return {
            "model.model_path": model,
            "model.peft_config": LORA if lora else None,
            "train.total_steps": steps,
            "optimizer.lr": lr_of_whole if whole else None,
        }

    changes = given(options.model, options.sft_steps, 1e-4)
    sft = run_stage(HERE / f"{kind}sft.yaml", options, task.sft(options.seed, options.model), changes)
    changes = given(sft.model, options.steps, 2e-5)
    grpo = run_stage(HERE / f"{kind}grpo.yaml", options, task.grpo(options.seed, options.model), changes)
    columns = ["before", "after SFT", "after GRPO"]
    show("held-out problems", columns, _rows(sft.evaluations, grpo.evaluations), [sft, grpo], options)


def _rows(sft: Evaluations, grpo: Evaluations) -> Iterator[tuple[Any, ...]]:
    """Yield both parts of the reward, and a few answers, before SFT and after each stage."""
    moments = [(each.metrics[at], each.samples[at]) for each, at in ((sft, 0), (sft, -1), (grpo, -1))]
    for name in ("result", "form"):
        yield name, *(metrics[f"eval/{name}"] for metrics, _ in moments)
    for at in range(2):
        yield f"answer {at + 1}", *(samples[at]["output"][:60] for _, samples in moments)


if __name__ == "__main__":
    main()
