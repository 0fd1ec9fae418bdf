"""Sweeps of trlX: the settings that its file names are searched, by runs of a script of trlX."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from typer.testing import CliRunner

from trainkit.cli import app
from trainkit.runs import Record
from trainkit.testing import character_tokenizer

SCRIPT = """
import json
import sys

from transformers import GPT2Config

import trainkit_trlx as trlx
from trainkit_trlx.data.default_configs import TRLConfig, default_ppo_config

default_config = default_ppo_config().evolve(
    train=dict(batch_size=4, seq_length=16, total_steps=2, eval_interval=2, checkpoint_interval=100, tracker=None),
    model=dict(model_path=GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10), num_layers_unfrozen=-1),
    tokenizer=dict(tokenizer_path="letters"),
    method=dict(num_rollouts=4, chunk_size=4, gen_kwargs=dict(max_new_tokens=4)),
)


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams)
    assert isinstance(config.method.ppo_epochs, int)

    def reward_fn(samples, **kwargs):
        return [float(sample.count("a")) for sample in samples]

    return trlx.train(reward_fn=reward_fn, prompts=["b", "c"], config=config)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
"""
SWEEP = {
    "tune_config": {"mode": "max", "metric": "reward/mean", "search_alg": "random", "num_samples": 2},
    "optimizer.kwargs.lr": {"strategy": "loguniform", "values": [1e-5, 1e-2]},
    "method.ppo_epochs": {"strategy": "randint", "values": [1, 4]},
}


@pytest.mark.slow
def test_a_script_is_run_with_the_settings_of_each_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    character_tokenizer("abcdefgh").save_pretrained("letters")
    Path("script.py").write_text(dedent(SCRIPT), encoding="utf-8")
    Path("ppo_sweep.yml").write_text(yaml.safe_dump(SWEEP), encoding="utf-8")
    told = CliRunner().invoke(app, ["sweep", "ppo_sweep.yml", "--script", "script.py"])
    assert told.exit_code == 0, told.output
    best = yaml.safe_load(Path("sweeps/ppo_sweep/best.yaml").read_text(encoding="utf-8"))
    assert best.keys() == {"optimizer.kwargs.lr", "method.ppo_epochs"}
    rates = set()
    for number in range(2):
        run = Record(Path(f"sweeps/ppo_sweep/trial_{number:04}/seed_1"))
        rates.add(run.setting("optimizer", "lr"))
        assert (run.step, run.setting("train", "seed")) == (2, 1)
    assert len(rates) == 2
    assert best["optimizer.kwargs.lr"] in rates
