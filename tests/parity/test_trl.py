"""Beside TRL: the same model, data, order and settings give the same losses for 20 steps.

Run by ``make parity``, which installs TRL apart from everything else. Dropout is off, weights are float32, and both
sides see the same tokens: one letter is one token, so that how texts are joined makes no difference.
"""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

STEPS, ROWS = 20, 8
LETTERS = "abcdefghijkl"
OPTIMIZER = {"lr": 5e-4, "weight_decay": 0.01, "kwargs": {"betas": [0.9, 0.99], "eps": 1e-6}}
TOLERANCE = 1e-4
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # TRL's SFT trains with what the model has


def words(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(2, 9))) for _ in range(count)]


SAMPLES = [{"prompt": p, "completion": c} for p, c in zip(words(40, 1), words(40, 2), strict=True)]
PAIRS = [
    {"prompt": p, "chosen": c, "rejected": r + ("a" if r == c else "")}
    for p, c, r in zip(words(40, 1), words(40, 2), words(40, 3), strict=True)
]


def saved(auto: str, path: Path, seed: int = 0, scale: int = 4, **fields: Any) -> str:
    """A model of random weights, and a tokenizer that adds no tokens by itself, saved."""
    import transformers

    from trainkit.testing import character_tokenizer, tiny_gpt2

    tokenizer = character_tokenizer(LETTERS)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**tiny_gpt2(len(tokenizer), **NO_DROPOUT, **fields))
    model = getattr(transformers, auto).from_config(config)
    with torch.no_grad():  # random weights say next to nothing; larger ones make every loss a different number
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    return saved("AutoModelForCausalLM", tmp_path / "model")


class Watch:
    """A callback that notes the losses of a run, and its estimates of the KL if there are any."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.kl: list[float] = []

    @trainkit.hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Keep the loss of one step."""
        if "loss/total" in metrics:
            self.losses.append(metrics["loss/total"])
            self.kl.append(metrics.get("policy/kl", 0.0))


def ours(
    method: dict[str, Any], path: str, samples: list[dict[str, Any]], run_dir: Path, watch: Watch | None = None
) -> tuple[list[float], Any]:
    """Losses of a run, and the order in which it saw the samples."""
    watch = watch or Watch()
    trainer = trainkit.train(
        path,
        samples=samples,
        callbacks=[watch],
        config={
            "method": method,
            "optimizer": OPTIMIZER,
            "train": {
                "batch_size": ROWS, "total_steps": STEPS, "epochs": None, "max_grad_norm": 1.0, "run_dir": str(run_dir),
                "save_interval": 0, "trackers": [],
            },
        },
    )  # fmt: skip
    return watch.losses, order(trainer)


def order(trainer: Any) -> list[int]:
    """Indices of the samples in the order of the steps: as the collection holds them, shuffled anew in each pass."""
    from trainkit.seeding import generator

    stream, seed = trainer.pipeline.order(0), trainer.config.train.seed
    seen: list[int] = []
    for epoch in range(-(-STEPS * ROWS // len(stream))):
        shuffled = torch.randperm(len(stream), generator=generator(seed, "order", 0, epoch))
        seen += [stream[index] for index in shuffled.tolist()]
    return seen


def theirs(kind: str, path: str, samples: list[dict[str, Any]], out: Path, **settings: Any) -> list[float]:
    """Losses of a run of TRL's trainer on samples in their order."""
    import trl
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer

    losses: list[float] = []
    home: Any = trl if hasattr(trl, f"{kind}Trainer") else import_module(f"trl.experimental.{kind.lower()}")

    class InOrder(getattr(home, f"{kind}Trainer")):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
            return loss

    arguments = getattr(home, f"{kind}Config")(
        output_dir=str(out), per_device_train_batch_size=ROWS, max_steps=STEPS, learning_rate=OPTIMIZER["lr"],
        lr_scheduler_type="constant", weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-6,
        max_grad_norm=1.0, use_cpu=True, bf16=False, fp16=False, save_strategy="no", report_to="none", seed=1,
        optim="adamw_torch", disable_tqdm=True, **settings,
    )  # fmt: skip
    model: Any = path
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    trainer = InOrder(model=model, args=arguments, train_dataset=Dataset.from_list(samples), processing_class=tokenizer)
    trainer.train()
    return losses


RECORD: dict[str, Any] = {}
"""Takes what is printed of the running test."""


@pytest.fixture(autouse=True)
def _recorded(record_property: Any) -> None:
    RECORD["property"] = record_property


def assert_follow(mine: list[float], trl: list[float]) -> None:
    RECORD["property"]("losses", f"{trl[0]:.3f} to {trl[-1]:.3f}")
    RECORD["property"]("difference", max(abs(a - b) for a, b in zip(mine, trl, strict=True)))
    assert len(mine) == len(trl) == STEPS
    assert max(trl) - min(trl) > 0.05, "the losses move, so that agreeing says something"
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(trl), rtol=0, atol=TOLERANCE)


def test_sft_follows_trl(model_path: str, tmp_path: Path) -> None:
    losses, seen = ours({"name": "sft"}, model_path, SAMPLES, tmp_path / "ours")
    assert_follow(losses, theirs("SFT", model_path, [SAMPLES[i] for i in seen], tmp_path / "trl"))


@pytest.mark.parametrize(
    ("mine", "trl"),
    [
        ({"loss_type": "sigmoid"}, {"loss_type": "sigmoid"}),
        ({"loss_type": "hinge"}, {"loss_type": "hinge"}),
        ({"loss_type": "ipo", "beta": 0.5}, {"loss_type": "ipo", "beta": 0.5}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"loss_type": "robust", "label_smoothing": 0.1}),
        ({"loss_type": "aot"}, {"loss_type": "aot"}),
        ({"loss_type": "aot_unpaired", "label_smoothing": 0.1}, {"loss_type": "aot_unpaired", "label_smoothing": 0.1}),
        ({"loss_type": "exo_pair", "label_smoothing": 0.1}, {"loss_type": "exo_pair", "label_smoothing": 0.1}),
        *(
            ({"loss_type": name, "beta": beta}, {"loss_type": name, "beta": beta})
            for name, beta in {
                **dict.fromkeys(("nca_pair", "bco_pair", "apo_zero", "apo_down", "discopop"), 0.1),
                "sigmoid_norm": 1.0,
                "sppo_hard": 0.5,
            }.items()
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_dpo_follows_trl(mine: dict[str, Any], trl: dict[str, Any], model_path: str, tmp_path: Path) -> None:
    """TRL's sigmoid has no label smoothing any more, and its kto_pair is gone; ours stand in the plugin's tests."""
    losses, seen = ours({"name": "dpo", **mine}, model_path, PAIRS, tmp_path / "ours")
    assert_follow(losses, theirs("DPO", model_path, [PAIRS[i] for i in seen], tmp_path / "trl", **trl))


@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing": 0.1},
        {"loss_type": "hinge"},
        {"loss_type": "ipo", "beta": 0.5, "cpo_alpha": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ],
    ids=lambda settings: str(settings.get("loss_type", "sigmoid")),
)
def test_cpo_and_simpo_follow_trl(settings: dict[str, Any], model_path: str, tmp_path: Path) -> None:
    """Chosen outputs have one length, so that the mean of their tokens is that of the pairs."""
    pairs = [{**row, "chosen": (row["chosen"] * 5)[:5]} for row in PAIRS]
    losses, seen = ours({"name": "cpo", **settings}, model_path, pairs, tmp_path / "ours")
    assert_follow(losses, theirs("CPO", model_path, [pairs[i] for i in seen], tmp_path / "trl", **settings))


LABELLED = [{**row, "label": index % 3 > 0} for index, row in enumerate(SAMPLES)]
WEIGHTS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.8}


@pytest.mark.parametrize("settings", [{}, WEIGHTS], ids=["defaults", "weights"])
def test_kto_follows_trl(settings: dict[str, Any], model_path: str, tmp_path: Path) -> None:
    """Every step has all samples: TRL shifts the outputs within a batch, ours within the dataset."""
    rows, watch = LABELLED[:ROWS], Watch()
    losses, _ = ours({"name": "kto", **settings}, model_path, rows, tmp_path / "ours", watch)
    assert max(watch.kl) > 0.1, "the estimate of the KL is not always 0"
    assert_follow(losses, theirs("KTO", model_path, rows * STEPS, tmp_path / "trl", **settings))


@pytest.mark.parametrize("settings", [{}, WEIGHTS], ids=["defaults", "weights"])
def test_kto_without_a_kl_follows_trl(settings: dict[str, Any], model_path: str, tmp_path: Path) -> None:
    losses, seen = ours({"name": "kto", "reference_point": "zero", **settings}, model_path, LABELLED, tmp_path / "ours")
    rows = [LABELLED[i] for i in seen]
    trl = theirs("KTO", model_path, rows, tmp_path / "trl", loss_type="apo_zero_unpaired", **settings)
    assert_follow(losses, trl)


@pytest.mark.parametrize("centre", [None, 0.1])
def test_reward_modelling_follows_trl(centre: float | None, tmp_path: Path) -> None:
    path = saved("AutoModelForSequenceClassification", tmp_path / "model", num_labels=1, pad_token_id=0)
    method = {"name": "reward", **({} if centre is None else {"center_coef": centre})}
    losses, seen = ours(method, path, PAIRS, tmp_path / "ours")
    rows = [PAIRS[i] for i in seen]
    assert_follow(losses, theirs("Reward", path, rows, tmp_path / "trl", center_rewards_coefficient=centre))


# ------------------------------------------------------------------------------------------------------ distillation

Steps = list[list[tuple[list[int], list[int]]]]
"""Prompt and response ids of the rows of each step."""


class WatchRows(Watch):
    """A callback that notes the rows of each step as well, for runs of one step per collection."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Steps = []

    @trainkit.hookimpl
    def on_experience(self, experience: Any) -> None:
        """Keep the ids of the rows."""
        found = experience.sequences
        self.rows.append([(q.tolist(), r.tolist()) for q, r in zip(found.queries, found.responses, strict=True)])


def their_distillation(
    path: str, teacher: str, steps: Steps, out: Path, beta: float, temperature: float
) -> list[float]:
    """Losses of TRL's distillation on given responses. Prompts have one token, because TRL pads them on the left."""
    import trl
    from datasets import Dataset
    from torch.nn.utils.rnn import pad_sequence

    losses: list[float] = []

    class Given(trl.DistillationTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            rows = steps[self.state.global_step]
            prompts = torch.tensor([query for query, _ in rows])
            completions = [torch.tensor(response) for _, response in rows]
            mask = pad_sequence([torch.ones_like(each) for each in completions], batch_first=True)
            return {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": pad_sequence(completions, batch_first=True),
                "completion_mask": mask,
                "num_items_in_batch": mask.sum().float(),
            }

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    arguments = trl.DistillationConfig(
        output_dir=str(out), per_device_train_batch_size=ROWS, max_steps=STEPS, learning_rate=OPTIMIZER["lr"],
        lr_scheduler_type="constant", weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-6,
        max_grad_norm=1.0, use_cpu=True, bf16=False, fp16=False, save_strategy="no", report_to="none", seed=1,
        optim="adamw_torch", disable_tqdm=True, gradient_accumulation_steps=1, gradient_checkpointing=False, beta=beta,
        temperature=temperature,
    )  # fmt: skip
    dataset: Any = Dataset.from_list([{"prompt": LETTERS[0]}] * STEPS * ROWS)
    Given(model=path, teacher_model=teacher, args=arguments, train_dataset=dataset).train()
    return losses


DIVERGENCES: dict[str, tuple[dict[str, Any], float]] = {
    "reverse": ({"divergence": "reverse"}, 1.0),
    "forward": ({"divergence": "forward"}, 0.0),
    "jensen_shannon": ({"divergence": "jensen_shannon", "beta": 0.3}, 0.3),
}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("method", "temperature"), [("distill", 0.7), ("distill_offline", 1.0), ("gkd", 0.7)])
def test_distillation_follows_trl(method: str, temperature: float, name: str, model_path: str, tmp_path: Path) -> None:
    """On responses of the policy at temperature 0.7, which TRL is given, on samples, and on both in turn."""
    teacher = saved("AutoModelForCausalLM", tmp_path / "teacher", seed=1, scale=12)
    (settings, beta), watch = DIVERGENCES[name], WatchRows()
    samples = [(prompt, output) for prompt, output in zip(LETTERS * 4, words(48, 2), strict=True)]
    trainer = trainkit.train(
        model_path,
        reference=teacher,
        **({"prompts": list(LETTERS)} if method == "distill" else {"samples": samples}),
        callbacks=[watch],
        config={
            "method": {"name": method, **settings},
            "optimizer": OPTIMIZER,
            "rollout": {"max_new_tokens": 8, "num_rollouts": ROWS, "temperature": temperature},
            "train": {
                "batch_size": ROWS, "total_steps": STEPS, "epochs": None, "max_grad_norm": 1.0,
                "run_dir": str(tmp_path / "ours"), "eval_interval": 0, "save_interval": 0, "trackers": [],
            },
        },
    )  # fmt: skip
    rows = given_rows(trainer, samples) if method == "distill_offline" else watch.rows
    assert_follow(watch.losses, their_distillation(model_path, teacher, rows, tmp_path / "trl", beta, temperature))


def given_rows(trainer: Any, samples: list[tuple[str, str]]) -> Steps:
    """The ids of samples in the order of the steps, with EOS."""
    ids = [(trainer.tokenizer(p)["input_ids"], trainer.tokenizer(o)["input_ids"]) for p, o in samples]
    rows = [(p, [*o, trainer.tokenizer.eos_token_id]) for p, o in (ids[index] for index in order(trainer))]
    return [rows[at : at + ROWS] for at in range(0, STEPS * ROWS, ROWS)]


# ------------------------------------------------------------------------------------------------------------- GRPO

GROUP, LONGEST, PASSES = 4, 6, 4
"""Responses to a prompt, their largest length, and passes over a collection, which is one step in each."""
PROMPTS = [word[:2] for word in words(40, 1)]
"""Prompts of one length: TRL pads them on the left, and gives GPT-2 no positions that start behind the padding."""


def vowels(outputs: list[str], **_: Any) -> list[float]:
    """A reward whose deviation is large: beside it, it makes no difference that TRL adds 1e-4 to it, and not 1e-6."""
    return [100.0 * sum(letter in "aei" for letter in output) + 10 * len(output) for output in outputs]


def few(outputs: list[str], **_: Any) -> list[float]:
    """The same, smaller, for advantages that are not divided by a deviation."""
    return [reward / 100 for reward in vowels(outputs)]


def two(outputs: list[str], **_: Any) -> dict[str, list[float]]:
    """Two rewards of different sizes."""
    return {"score": vowels(outputs), "vowels": vowels(outputs), "letters": [3.0 * len(output) for output in outputs]}


class Rollouts:
    """A callback that keeps the prompts, responses and rewards of every collection, as token ids and by name."""

    def __init__(self) -> None:
        self.collections: list[tuple[list[list[int]], list[list[int]], list[dict[str, Any]]]] = []

    @trainkit.hookimpl
    def on_experience(self, trainer: Any, rollouts: list[Any]) -> None:
        """Keep one collection."""
        (found,) = rollouts
        ids = ([row.tolist() for row in rows] for rows in (found.sequences.queries, found.sequences.responses))
        self.collections.append((*ids, found.judged))  # type: ignore[arg-type]


def sampled(method: dict[str, Any], path: str, run_dir: Path) -> tuple[list[float], Rollouts]:
    """Losses of our run, and what it sampled."""
    watch, rollouts = Watch(), Rollouts()
    trainkit.train(
        path,
        prompts=PROMPTS,
        reward_fn=two if "reward_weights" in method else few if method.get("scale") == "none" else vowels,
        callbacks=[watch, rollouts],
        config={
            "method": {"name": "grpo", "group_size": GROUP, "grpo_epochs": PASSES, **method},
            "optimizer": {**OPTIMIZER, "lr": 1e-3},
            "rollout": {"num_rollouts": 2 * ROWS, "batch_size": 2 * ROWS, "max_new_tokens": LONGEST},
            "train": {
                "batch_size": 2 * ROWS, "total_steps": STEPS, "max_grad_norm": 1.0, "run_dir": str(run_dir),
                "save_interval": 0, "eval_interval": 0, "trackers": [],
            },
        },
    )  # fmt: skip
    return watch.losses, rollouts


def replayed(path: str, out: Path, rollouts: Rollouts, **settings: Any) -> list[float]:
    """Losses of TRL's trainer on the same responses with the same scores."""
    import trl
    from datasets import Dataset

    losses: list[float] = []
    left = iter(rollouts.collections)

    class Watched(trl.GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        queries, responses, rewards = next(left)
        logprobs = [[0.0] * len(response) for response in responses]  # of the sampler; not used
        return {"prompt_ids": queries, "completion_ids": responses, "logprobs": logprobs, "rewards": rewards}

    def given(name: str, prompts: list[str], completions: list[str], rewards: list[Any], **_: Any) -> list[float]:
        return [each[name] for each in rewards]

    functions = [
        partial(given, name) for name in (("vowels", "letters") if "reward_weights" in settings else ("reward",))
    ]
    for function in functions:
        function.__name__ = str(function.args[0])  # type: ignore[attr-defined]

    arguments = trl.GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=2 * ROWS, num_generations=GROUP, num_iterations=PASSES,
        steps_per_generation=1, max_completion_length=LONGEST, max_steps=STEPS, learning_rate=1e-3,
        lr_scheduler_type="constant", weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-6,
        max_grad_norm=1.0, use_cpu=True, bf16=False, fp16=False, save_strategy="no", report_to="none", seed=1,
        optim="adamw_torch", disable_tqdm=True, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    trainer = Watched(
        model=path,
        args=arguments,
        reward_funcs=functions,
        rollout_func=replay,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
    )
    trainer.train()
    return losses


SEQUENCE = {"average": "responses", "ratio_level": "sequence", "cliprange": 0.1, "cliprange_high": 0.15}
GRPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # without TRL's weight for k3, the ratio, which is that of DeepSeek-V3.2
    "grpo": (
        {"average": "responses", "kl_coef": 0.1}, {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}
    ),
    "dr_grpo": (
        {"average": "constant", "scale": "none"}, {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}
    ),
    "dapo": ({"cliprange_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0}),
    "dapo of a batch": ({"scale": "batch"}, {"loss_type": "dapo", "scale_rewards": "batch", "beta": 0.0}),
    "gdpo": (
        {"reward_weights": {"vowels": 1.0, "letters": 0.5}},
        {
            "loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5],
            "beta": 0.0,
        },
    ),
    "gspo": (
        SEQUENCE,
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15,
            "beta": 0.0,
        },
    ),
    # in TRL, epsilon_high is the largest weight itself, and there is no smallest one
    "cispo": (
        {"surrogate": "cispo", "cliprange": 1.0, "cliprange_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GRPO)
def test_grpo_follows_trl(case: str, model_path: str, tmp_path: Path) -> None:
    """TRL gets the responses and scores of our run; it computes advantages, ratios and losses from them."""
    mine, trl = GRPO[case]
    losses, rollouts = sampled(mine, model_path, tmp_path / "ours")
    assert_follow(losses, replayed(model_path, tmp_path / "trl", rollouts, **trl))
