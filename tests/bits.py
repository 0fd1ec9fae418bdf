"""Compares six steps of every algorithm with those of another checkout: final weights, optimizer, metrics, bit by bit.

    python tests/bits.py --out build/bits.json          # in the one checkout
    python tests/bits.py --against build/bits.json      # in the other; exits with 1 if something differs

Each algorithm is trained with its kit variants, with LoRA, frozen layers and an encoder-decoder, online ones also with
staleness and in micro-batches; then a part of the cases by two processes. The cases are read from the file that is
compared with. Seconds are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"HF_HUB_OFFLINE": "1"}

import torch

import trainkit
from trainkit.errors import TrainkitError
from trainkit.plugins import available_trainers, get_trainer
from trainkit.testing import tiny_bart, tiny_llama
from trainkit.testing.declarations import declaration_of
from trainkit.testing.trainers import LETTERS, Letters, language_trainers, tiny_trainer

Case = dict[str, Any]
VOCABULARY = len(LETTERS) + 2
CHANGES: dict[str, Case] = {
    "lora": {"model__peft_config": {"r": 2, "init_lora_weights": "gaussian"}},
    "frozen layers": {"model__num_layers_unfrozen": 1},
    "micro-batches": {"train__microbatch_size": 3},
    "ahead": {"rollout__staleness": 1},
    "resumed": {"train__save_interval": 3},
    "evaluated": {"train__eval_interval": 2},
}
TWICE = ("", "lora", "ahead")
"""The cases that two processes make, too."""


def cases() -> list[Case]:
    """Return what is trained: the name of the algorithm and of the case, the settings and the fields of the model."""
    found = []
    for name in available_trainers():
        cls: Any = get_trainer(name)
        found.append({"name": name, "case": "", "changes": {}, "model": None})
        for variant, settings in declaration_of(cls).variants.items():
            changes = {key.replace(".", "__"): value for key, value in settings.items()}
            found.append({"name": name, "case": f"variant {variant}", "changes": changes, "model": None})
        for case, changes in CHANGES.items() if name in language_trainers() else ():
            if case != "ahead" or "prompts" in cls.inputs:
                found.append({"name": name, "case": case, "changes": changes, "model": None})
        if "reward_fn" in cls.inputs and name in language_trainers():
            found.append({"name": name, "case": "environment", "changes": {}, "model": None})
        for model in (tiny_llama(VOCABULARY), tiny_bart(VOCABULARY)) if name in language_trainers() else ():
            found.append({"name": name, "case": model["model_type"], "changes": {}, "model": model})
    return found


def hash_of(value: Any) -> str:
    """Return a hash of plain data and tensors."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            item = item.detach().cpu().contiguous()
            found.update(f"{item.dtype}{tuple(item.shape)}".encode())
            found.update(item.reshape(-1).view(torch.uint8).numpy().tobytes() if item.numel() else b"")
        elif isinstance(item, dict):
            for key, each in sorted(item.items(), key=lambda pair: str(pair[0])):
                found.update(str(key).encode())
                add(each)
        elif isinstance(item, list | tuple):
            for each in item:
                add(each)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()[:16]


class Metrics:
    """A callback that keeps the metrics of all steps and evaluations."""

    def __init__(self) -> None:
        self.of_steps: list[Any] = []

    @trainkit.hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Keep all but seconds."""
        self.of_steps.append(
            [step, {name: x for name, x in metrics.items() if not name.startswith(("time/", "eval/time"))}]
        )


def train(case: Case, folder: Path) -> dict[str, str]:
    """Return the hashes of a run, or what it was refused with."""
    seen = Metrics()
    given: Any = {"model": case["model"], "callbacks": [seen]}
    if case["case"] == "environment":
        given["arguments"] = {"reward_fn": None, "environment": Letters}
    try:
        trainer = tiny_trainer(case["name"], folder / "run", **given, **case["changes"])
        trainer.learn()
        if case["case"] == "resumed":
            first = folder / "run" / "checkpoints" / "step_00000003"
            trainer = tiny_trainer(case["name"], folder / "again", train__resume=str(first), **given)
            trainer.learn()
    except (TrainkitError, NotImplementedError) as error:
        return {"refused": str(error).split(". ")[0].replace(str(folder), "")}
    optimizer = trainer.optimizer.state_dict()["state"]
    weights = trainer.unwrapped.state_dict()
    return {"weights": hash_of(weights), "optimizer": hash_of(optimizer), "metrics": hash_of(seen.of_steps)}


def main() -> int:
    """Train the cases and write or compare their hashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", help="a part of the names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    expected = None if options.against is None else json.loads(options.against.read_text(encoding="utf-8"))
    if expected is not None:
        todo = [each for each in expected if each["processes"] == world]
    else:
        todo = [{**each, "processes": world} for each in cases() if world == 1 or each["case"] in TWICE]
    todo = [each for each in todo if options.only is None or options.only in each["name"]]
    made, different = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(todo):
            place = Path(os.environ.get("BITS_FOLDER", folder)) / str(index)
            hashes = train(case, place)
            made.append({**case, "hashes": hashes})
            if rank == 0 and expected is not None and hashes != case["hashes"]:
                different += 1
                odd = [key for key in {**hashes, **case["hashes"]} if hashes.get(key) != case["hashes"].get(key)]
                print(
                    f"{case['name']} {case['case']} ({world}): {', '.join(odd)} {hashes.get('refused', '')}", flush=True
                )
        if world == 1:
            print(f"{len(todo)} cases of one process, {different} differ", flush=True)
            with tempfile.TemporaryDirectory() as shared:
                environment = {**os.environ, "BITS_FOLDER": shared}
                part = Path(shared) / "part.json"
                launch = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nproc-per-node",
                    "2",
                    "--master-port",
                    "29655",
                ]
                arguments = [] if options.only is None else ["--only", options.only]
                arguments += ["--out", str(part)] if expected is None else ["--against", str(options.against)]
                ended = subprocess.run([*launch, __file__, *arguments], env=environment, check=False)
                made += json.loads(part.read_text(encoding="utf-8")) if expected is None else []
                different += ended.returncode
        elif rank == 0:
            print(f"{len(todo)} cases of two processes, {different} differ", flush=True)
    if options.out is not None and rank == 0:
        options.out.write_text(json.dumps(made, indent=1), encoding="utf-8")
    if world > 1:
        torch.distributed.destroy_process_group()
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
