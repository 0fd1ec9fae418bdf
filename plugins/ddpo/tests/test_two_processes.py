"""Two processes: adapters have one gradient, and a prompt's rewards are those of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
out = Path(sys.argv[1])
trainer = tiny_trainer(
    "ddpo", out / "run", model__peft_config={"r": 2}, method__min_count=1, rollout__num_rollouts=16,
    method__reward_workers=1, train__total_steps=4, train__eval_interval=2,
)
trainer.learn()
rank = trainer.accelerator.process_index
said = {
    "adapter": [p.double().sum().item().hex() for p in trainer.unwrapped.parameters() if p.requires_grad],
    "rewards": trainer.tracker.state_dict(),
    "own": [[part.prompts, part.scores.tolist()] for part in trainer.collector.collection.rollouts],
    "advantages": trainer.store.experience.advantages.tolist() if len(trainer.store) else [],
}
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_adapters_stay_equal_and_rewards_of_a_prompt_are_counted_together(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    assert first["adapter"] == second["adapter"]
    assert first["rewards"] == second["rewards"]
    assert first["own"] != second["own"]
    assert all(len(rewards) == 2 for rewards in first["rewards"].values()), "sixteen images of eight prompts"
    seen = [
        reward
        for said in (first, second)
        for prompts, scores in said["own"]
        for prompt, reward in zip(prompts, scores, strict=True)
        if reward in first["rewards"][prompt]
    ]
    assert len(seen) == 16
    assert len(list((tmp_path / "run" / "images").iterdir())) == 4, "three evaluations, one collection, written once"
