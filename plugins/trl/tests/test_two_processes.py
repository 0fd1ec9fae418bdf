"""Two processes: each calls the methods that a subclass overrides with its own rows, and both train one model."""

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
from transformers import AutoModelForCausalLM, GPT2Config
from trainkit.testing import character_tokenizer
from trainkit_trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed

torch.set_num_threads(1)
set_seed(0)
tokenizer = character_tokenizer("abcdefgh")
config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=len(tokenizer), n_positions=32)
model = AutoModelForCausalLMWithValueHead.from_pretrained(AutoModelForCausalLM.from_config(config))
calls = []

class Own(PPOTrainer):
    def compute_rewards(self, scores, *args):
        calls.append(scores.tolist())
        return super().compute_rewards(scores, *args)

    def gather_stats(self, stats):
        calls.append("gathered")
        return super().gather_stats(stats)

class OwnLoss(PPOTrainer):
    def loss(self, *args):
        return super().loss(*args)

rows = [{"query": text, "input_ids": torch.tensor(tokenizer.encode(text))} for text in ("a", "bc", "d", "ef")]
collator = lambda rows: {name: [row[name] for row in rows] for name in rows[0]}
settings = PPOConfig(batch_size=2, mini_batch_size=1, learning_rate=1e-2)
trainer = Own(settings, model, None, tokenizer, dataset=rows, data_collator=collator)
for batch in trainer.dataloader:
    responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=4)
    scores = [torch.tensor(float(ids.sum())) for ids in responses]
    stats = trainer.step(batch["input_ids"], responses, scores)
    trainer.log_stats(stats, batch, scores)
try:
    OwnLoss(settings, model, None, tokenizer, dataset=rows, data_collator=collator)
    refused = ""
except ValueError as error:
    refused = str(error)
weights = [parameter.double().sum().item().hex() for parameter in model.parameters()]
said = {"weights": weights, "calls": calls, "mean": stats["env/reward_mean"], "refused": refused}
(Path(sys.argv[1]) / f"said-{trainer.accelerator.process_index}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_each_process_calls_what_is_overridden_and_both_train_one_model(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)], cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert [len(each["calls"]) for each in (first, second)] == [2, 2]
    assert first["mean"] == second["mean"] == sum(first["calls"][0] + second["calls"][0]) / 4
    assert "loss and train_minibatch can be overridden in one process" in first["refused"]
