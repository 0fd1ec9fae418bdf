"""Trainers of one's own train on two processes as on one; with the loop of trlX, gradients are averaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.testing import character_tokenizer

SCRIPT = """
import json, os, sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import trainkit_trlx as trlx
from trainkit.errors import ConfigError
from trainkit_trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from trainkit_trlx.data.method_configs import register_method
from trainkit_trlx.models.modeling_ilql import ILQLConfig
from trainkit_trlx.pipeline.offline_pipeline import DialogStore, tokenize_dialogue
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import AccelerateRLTrainer
from trainkit_trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from trainkit_trlx.trainer.accelerate_sft_trainer import AccelerateSFTTrainer
from trainkit_trlx.utils.modeling import whiten

torch.set_num_threads(1)
world, said = int(os.environ.get("WORLD_SIZE", 1)), {}


@register_trainer
class Mine(AcceleratePPOTrainer):
    def make_experience(self, num_rollouts=1024, iter_count=0):
        super().make_experience(num_rollouts, iter_count)

    def loss(self, batch):
        loss, stats = super().loss(batch)
        return loss, {**stats, "mine": 1.0}


@register_method
class OwnILQL(ILQLConfig):
    def loss(self, outputs, labels):
        loss, stats = super().loss(outputs, labels)
        return loss, stats


@register_trainer
class Around(AccelerateSFTTrainer):
    def loss(self, batch):
        out = self.model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        return out.loss, {}


@register_trainer
class Plain(AccelerateRLTrainer):
    def get_arch(self, config):
        return AutoModelForCausalLM.from_config(config.model.model_path)

    def loss(self, batch):
        loss = self.model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        return loss, {"loss": loss.item()}

    def make_experience(self, samples, seq_length):
        dialogues = [tokenize_dialogue(each, self.tokenizer, seq_length) for each in samples]
        self.store = DialogStore(dialogues, self.tokenizer)


def config(default, trainer, **method):
    return default().evolve(
        train=dict(seq_length=16, batch_size=4 // world, epochs=9, total_steps=4, eval_interval=4, trainer=trainer,
                   tracker=None, checkpoint_interval=9, checkpoint_dir=f"{trainer}-{world}"),
        model=dict(model_path=GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10), num_layers_unfrozen=-1),
        tokenizer=dict(tokenizer_path="letters"), optimizer=dict(kwargs=dict(lr=3e-3)),
        method=dict(gen_kwargs=dict(max_new_tokens=4), **method),
    )


def numbers(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().norm().item()


settings = config(default_ppo_config, "Mine", num_rollouts=8 // world, chunk_size=8 // world, ppo_epochs=2)
trainer = trlx.train(
    reward_fn=lambda samples, **_: [float(sample.count("a")) for sample in samples],
    prompts=["b", "c"] * 4,
    config=settings,
)
said["ppo"] = numbers(trainer.model)
settings = config(default_ilql_config, "AccelerateILQLTrainer")
settings.method = OwnILQL(**{**vars(settings.method), "name": "OwnILQL"})
trainer = trlx.train(samples=[["a", "bc"], ["b", "cd"]] * 8, rewards=[0.0, 1.0] * 8, config=settings)
said["ilql"] = numbers(trainer.model)
trainer = trlx.train(samples=[["a", "bc"], ["b", "cd"]] * 8, config=config(default_sft_config, "Around"))
said["around"] = numbers(trainer.model)
trainer = trlx.train(
    samples=[["a", "bc"], ["b", "cd"]] * 8, eval_prompts=["a"] * 3, config=config(default_sft_config, "Plain"),
    metric_fn=lambda samples, **_: {"count": [float(len(samples))] * len(samples)},
)
said["plain"] = numbers(trainer.accelerator.unwrap_model(trainer.model))
said["white"] = whiten(torch.arange(4.0).chunk(world)[int(os.environ.get("RANK", 0))])[0].item()
said["count"] = trainer.evaluate()["metrics/count"]
if world > 1:
    divided = dict(trainer_kwargs=dict(sharding="fsdp2"), checkpoint_dir="divided")
    settings = config(default_sft_config, "Around").evolve(train=divided)
    try:
        trlx.train(samples=[["a", "bc"], ["b", "cd"]] * 8, config=settings)
    except ConfigError as error:
        said["sharded"] = str(error)
with open(f"said-{world}-{os.environ.get('RANK', 0)}.json", "w") as file:  # lines of processes can run together
    json.dump(said, file)
"""


def run(directory: Path, *command: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, *command, "script.py"],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        cwd=directory, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    world = 2 if command else 1
    return [json.loads((directory / f"said-{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.slow
def test_trainers_of_ones_own_train_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    character_tokenizer("abcdefgh").save_pretrained(tmp_path / "letters")
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    (alone,), both = run(tmp_path), run(tmp_path, *launch)
    white = [said.pop("white") for said in (alone, *both)]
    assert both[0] == both[1]
    for name in ("ppo", "ilql", "around"):
        assert both[0][name] == pytest.approx(alone[name], rel=1e-6), name
    assert white[0] == white[1] == pytest.approx(-1.5 / (5 / 3) ** 0.5)  # 0 to 3: mean 1.5, variance 5 / 3
    assert both[0]["sharded"].startswith("model of Around is divided among processes; read it within")
    assert white[2] == pytest.approx(0.5 / (5 / 3) ** 0.5)
    assert both[0]["count"] == alone["count"] == 3  # the responses of both processes, each once
