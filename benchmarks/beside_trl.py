"""Trains the same model on the same data with trainkit and with TRL for equal seconds of one core, and compares them.

``python benchmarks/beside_trl.py train CASE SYSTEM SEED`` trains once, ``evaluate`` measures what all runs have saved,
and ``report`` draws the figure of docs/beside-trl.md and prints its tables. The page says where the data come from.

A run counts seconds of its process on one thread, from its first step. It begins no step that would end after the
budget if it took as long as the one before. Loading, saving and evaluating are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

ROWS = {"dpo": 8, "grpo": 16, "reward": 8}
"""Pairs, or responses, of a step."""
GROUP, NEW, LONGEST = 8, 40, 128
"""Responses to a prompt, their length at most, and the tokens of a prompt with its longer answer at most."""
HELD_OUT = 50
"""Word problems of an evaluation."""
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
LR = 3e-4
BETA = 0.1
SYSTEMS = ("trainkit", "trl")
METHODS: dict[str, dict[str, Any]] = {"dpo": {"beta": BETA}, "grpo": {"group_size": GROUP}, "reward": {}}
"""Settings of trainkit's methods."""
OF_PAIRS = ("accuracies", "margins")
"""What both systems log of the pairs of a step, before the step."""


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def ids_of(tokenizer: Any, row: dict[str, Any], side: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt, and those of an answer with the token that ends it."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    return prompt, [*tokenizer(row[side][0]["content"])["input_ids"], tokenizer.eos_token_id]


def pairs(file: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the pairs of a file with at most `LONGEST` tokens on each side."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    sides = ("chosen", "rejected")
    return [row for row in rows if max(sum(map(len, ids_of(tokenizer, row, side))) for side in sides) <= LONGEST]


def word_problems() -> Any:
    """Return the task of the example."""
    from trainkit.plugins import load_file

    return load_file(Path(__file__).parents[1] / "examples/word_problems/task.py")


def of_pairs(metrics: dict[str, float]) -> dict[str, float]:
    """Return the numbers of `OF_PAIRS` among the metrics of a step; TRL's reward models name them otherwise."""
    named = {"accuracies": "accuracy", "margins": "margin"}
    return {name: metrics.get(f"rewards/{name}", metrics.get(named[name], 0.0)) for name in OF_PAIRS}


class Run:
    """One run: its data in the order of its seed, its clock, and what it writes.

    Args:
        options: those of ``train``.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.case, self.system, self.seed = options.case, options.system, options.seed
        self.model, self.budget, self.files = str(options.model), options.seconds, options
        self.directory = options.out / f"{self.case}-{self.system}-{self.seed}"
        self.directory.mkdir(parents=True)
        self.began = self.last = math.nan
        self.right: list[float] = []

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The pairs, or the word problems."""
        if self.case != "grpo":
            return pairs(self.files.pairs, tokenizer_of(self.model))
        asked: list[dict[str, Any]] = word_problems().split(1, 200)[2]
        return asked

    def ordered(self) -> list[dict[str, Any]]:
        """Return the rows in the order in which trainkit takes them."""
        from trainkit.data import Pipeline
        from trainkit.seeding import generator

        order = Pipeline(self.rows, seed=self.seed).order(0)
        if self.case != "grpo":
            shuffled = torch.randperm(len(order), generator=generator(self.seed, "order", 0, 0))
            order = [order[at] for at in shuffled.tolist()]
        return [self.rows[at] for at in order]

    def reward(self, outputs: list[str], answer: list[int], **_: Any) -> list[float]:
        """Return the rewards of sampled answers, and keep how many of them are right."""
        scores: dict[str, list[float]] = word_problems().reward(outputs, answer)
        self.right += scores["result"]
        return scores["score"]

    def begin(self) -> None:
        """Start the clock."""
        self.began = self.last = time.process_time()

    def step(self, save: Callable[[str], Any], **metrics: float) -> bool:
        """Record a step, save the adapter at the end, and return whether the budget is used."""
        now = time.process_time()
        taken, seconds = now - self.last, now - self.began
        if self.case == "grpo":
            metrics, self.right = {"right": statistics.mean(self.right)}, []
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        line = {"seconds": seconds, "taken": taken, "peak_mib": peak, **metrics}
        over = seconds + taken > self.budget
        with (self.directory / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        if over:
            save(str(self.directory / "adapter"))
        self.last = now
        return over


def with_trainkit(run: Run) -> None:
    """Train with trainkit."""
    import trainkit

    class Watch:
        @trainkit.hookimpl
        def on_train_begin(self, trainer: Any) -> None:
            """Load the model before the clock starts."""
            trainer.models.build()
            run.begin()

        @trainkit.hookimpl
        def log_metrics(self, trainer: Any, metrics: dict[str, float]) -> None:
            """Record a step."""
            if run.step(trainer.save_pretrained, **of_pairs(metrics)):
                trainer.stop("the budget is used")

    data: dict[str, Any] = (
        {"prompts": run.rows, "reward_fn": run.reward} if run.case == "grpo" else {"samples": run.rows}
    )
    config = {
        "method": {"name": run.case, **METHODS[run.case]},
        "model": {"peft_config": LORA},
        "optimizer": {"lr": LR},
        "rollout": {"max_new_tokens": NEW, "num_rollouts": ROWS["grpo"]} if run.case == "grpo" else {},
        "train": {
            "batch_size": ROWS[run.case], "total_steps": 10**6, "eval_interval": 0, "save_interval": 0, "trackers": [],
            "seed": run.seed, "mixed_precision": "no", "verify_export": False, "run_dir": str(run.directory / "run"),
        },
    }  # fmt: skip
    trainkit.train(run.model, **data, config=config, callbacks=[Watch()])


def with_trl(run: Run) -> None:
    """Train with TRL."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.begin()

        def on_log(self, _: Any, __: Any, control: Any, logs: dict[str, float], **___: Any) -> None:
            if "loss" in logs:
                control.should_training_stop = run.step(trainer.save_model, **of_pairs(logs))

    def reward(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        return run.reward([messages[0]["content"] for messages in completions], answer)

    own: dict[str, dict[str, Any]] = {
        "dpo": {"beta": BETA, "train_sampling_strategy": "sequential"},
        "grpo": {"num_generations": GROUP, "max_completion_length": NEW, "shuffle_dataset": False},
        "reward": {"train_sampling_strategy": "sequential"},
    }
    arguments = {
        "output_dir": str(run.directory / "run"), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS[run.case], "max_steps": 10**6, "learning_rate": LR,
        "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none", "logging_steps": 1,
        "disable_tqdm": True, "dataloader_pin_memory": False, "model_init_kwargs": {"dtype": "float32"},
        "seed": run.seed, **own[run.case],
    }  # fmt: skip
    shared = {"model": run.model, "train_dataset": Dataset.from_list(run.ordered()), "callbacks": [Watch()]}
    kind = "SEQ_CLS" if run.case == "reward" else "CAUSAL_LM"
    shared |= {"peft_config": LoraConfig(task_type=kind, **LORA)}
    makers: dict[str, Callable[[], Any]] = {
        "dpo": lambda: DPOTrainer(args=DPOConfig(**arguments), **shared),
        "grpo": lambda: GRPOTrainer(args=GRPOConfig(**arguments), reward_funcs=reward, **shared),
        "reward": lambda: RewardTrainer(args=RewardConfig(**arguments, max_length=None), **shared),
    }
    trainer: Any = makers[run.case]()
    trainer.train()


# ----------------------------------------------------------------------------------------------------- evaluating


@torch.no_grad()
def log_likelihoods(model: Any, tokenizer: Any, rows: list[dict[str, Any]], side: str) -> torch.Tensor:
    """Return log π of the answers of one side. [N]."""
    found = []
    for row in rows:
        prompt, answer = ids_of(tokenizer, row, side)
        logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1)).sum())
    return torch.stack(found)


@torch.no_grad()
def right_answers(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """Return the share of greedy answers to word problems that are right."""
    prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    made = model.generate(**given, max_new_tokens=NEW, do_sample=False)[:, given["input_ids"].shape[1] :]
    outputs = tokenizer.batch_decode(made, skip_special_tokens=True)
    return float(statistics.mean(word_problems().parts(outputs, [row["answer"] for row in rows])["result"]))


@torch.no_grad()
def rewards(directory: Path, start: Path, tokenizer: Any, rows: list[dict[str, Any]], side: str) -> torch.Tensor:
    """Return the rewards that a saved reward model gives to the answers of one side. [N]."""
    from peft import PeftConfig, PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, dtype=torch.float32)
    config = PeftConfig.from_pretrained(directory)
    if (head := directory / "heads.safetensors").exists():  # trainkit's; TRL's is in the adapter
        base.score.weight.copy_(load_file(head)["head.weight"])
        config.task_type = None  # that of language models, which the adapter is for
    model = PeftModel.from_pretrained(base, directory, config=config).eval()
    inputs = [torch.tensor([[*chain(*ids_of(tokenizer, row, side))]]) for row in rows]
    return torch.cat([model(ids, attention_mask=torch.ones_like(ids)).logits[0] for ids in inputs])


def of_margins(margins: torch.Tensor) -> dict[str, float]:
    """Return the share of pairs in order, the mean margin, and the mean loss −log σ(margin) of margins [N]."""
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    return {"accuracy": float((margins > 0).float().mean()), "margin": float(margins.mean()), "loss": float(loss)}


def evaluate(options: argparse.Namespace) -> None:
    """Measure the start and all saved adapters of a case that have not been measured."""
    file = options.out / f"{options.case}.json"
    scores = json.loads(file.read_text()) if file.exists() else {}
    tokenizer = tokenizer_of(str(options.model))
    measure = measuring(options, tokenizer)
    scores["start"] = scores.get("start") or measure(None)
    for adapter in sorted(options.out.glob(f"{options.case}-*-*/adapter")):
        if (name := adapter.parent.name) not in scores:
            scores[name] = measure(adapter)
            print(name, scores[name], flush=True)
            file.write_text(json.dumps(scores, indent=1) + "\n")


def measuring(options: argparse.Namespace, tokenizer: Any) -> Callable[[Path | None], dict[str, float]]:
    """Return what measures an adapter of a case, or, given None, the start."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sides = ("chosen", "rejected")
    held_out = [] if options.case == "grpo" else pairs(options.pairs, tokenizer)
    untrained = {"accuracy": 0.5, "margin": 0.0, "loss": math.log(2)}

    def of_reward_model(adapter: Path | None) -> dict[str, float]:
        if adapter is None:
            return untrained
        chosen, rejected = (rewards(adapter, options.model, tokenizer, held_out, side) for side in sides)
        return of_margins(chosen - rejected)

    def language_model(adapter: Path | None) -> Any:
        base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        return (base if adapter is None else PeftModel.from_pretrained(base, adapter)).eval()

    def ratios(adapter: Path | None) -> torch.Tensor:
        model = language_model(adapter)
        chosen, rejected = (log_likelihoods(model, tokenizer, held_out, side) for side in sides)
        return chosen - rejected

    start = ratios(None) if options.case == "dpo" else torch.zeros(())

    def of_dpo(adapter: Path | None) -> dict[str, float]:
        return untrained if adapter is None else of_margins(BETA * (ratios(adapter) - start))

    def of_problems(adapter: Path | None) -> dict[str, float]:
        rows = word_problems().split(1, 200)[0][:HELD_OUT]
        return {"right": right_answers(language_model(adapter), tokenizer, rows)}

    return {"dpo": of_dpo, "grpo": of_problems, "reward": of_reward_model}[options.case]


# ------------------------------------------------------------------------------------------------------ reporting

SHOWN = {
    "grpo": ("right", "right", "GRPO: right sampled answers"),
    "dpo": ("margins", "margin", "DPO: margin of the next pairs"),
    "reward": ("margins", "margin", "reward model: margin of the next pairs"),
}
"""What is drawn of a case: the name of a step's number, that of the held-out data, and the title."""
WINDOW = 3
"""Steps over which lines are averaged."""


def runs_of(out: Path, case: str, system: str) -> list[tuple[str, list[dict[str, float]]]]:
    """Return the names of the runs of a system, and their steps."""
    found = sorted(out.glob(f"{case}-{system}-*/steps.jsonl"))
    return [(path.parent.name, [json.loads(line) for line in path.read_text().splitlines()]) for path in found]


def rows_of(out: Path, case: str) -> Iterator[str]:
    """Yield the rows of a case: of each system the steps, seconds for one, memory, and held-out results by seed."""
    scores = json.loads((out / f"{case}.json").read_text())
    for system in SYSTEMS:
        runs = runs_of(out, case, system)
        taken = statistics.median(step["taken"] for _, steps in runs for step in steps[1:])
        peak = max(steps[-1]["peak_mib"] for _, steps in runs)
        counts = ", ".join(str(len(steps)) for _, steps in runs)
        measured = [
            f"{scores['start'][name]:.3g} → " + ", ".join(f"{scores[run][name]:.3g}" for run, _ in runs)
            for name in scores["start"]
        ]
        yield f"| {case} | {system} | {counts} | {taken:.1f} | {peak / 1024:.1f} | {' | '.join(measured)} |"


def report(options: argparse.Namespace) -> None:
    """Print a table for each case, and draw the figure."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "trainkit", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    _, axes = plt.subplots(1, len(SHOWN), figsize=(4.2 * len(SHOWN), 3.2))
    for (case, (each, held_out, title)), panel in zip(SHOWN.items(), axes, strict=True):
        scores = json.loads((options.out / f"{case}.json").read_text())
        names = " | ".join(f"{name}, held out" for name in scores["start"])
        print(f"| case | system | steps | s per step | GiB | {names} |")
        print("|---|---|---|---|---|" + "---|" * len(scores["start"]))
        print("\n".join(rows_of(options.out, case)))
        panel.plot(0, scores["start"][held_out], "ks", label="held out, start")
        for color, system in enumerate(SYSTEMS):
            for at, (run, steps) in enumerate(runs_of(options.out, case, system)):
                values = [step[each] for step in steps]
                means = [statistics.mean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]
                seconds = [step["seconds"] for step in steps]
                panel.plot(seconds, means, f"C{color}", marker=".", lw=1, label=None if at else system)
                ends = {"marker": "*", "ms": 9, "label": None if at else f"held out, {system}"}
                panel.plot(seconds[-1], scores[run][held_out], f"C{color}", ls="", **ends)
        panel.set(xlabel="seconds of one core", title=title)
        panel.grid(alpha=0.3)
    axes[1].legend(fontsize="small", loc="upper left")
    plt.tight_layout()
    plt.savefig(options.figure, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/beside-trl"), help="where runs and results are")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("train", "evaluate"):
        given = commands.add_parser(command)
        given.add_argument("case", choices=ROWS)
        given.add_argument("--model", type=Path, required=True, help="the model that runs start from")
        given.add_argument("--pairs", type=Path, help="of dpo: a file of pairs; of evaluate: held-out pairs")
        if command == "train":
            given.add_argument("system", choices=SYSTEMS)
            given.add_argument("seed", type=int)
            given.add_argument("--seconds", type=float, required=True, help="the budget")
    commands.add_parser("report").add_argument("--figure", type=Path, default=Path("docs/beside-trl.svg"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "evaluate":
        evaluate(options)
    elif options.command == "report":
        report(options)
    else:
        run = Run(options)
        with_trainkit(run) if run.system == "trainkit" else with_trl(run)
