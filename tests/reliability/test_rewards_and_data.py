"""Area C of the battery: what a reward function may do to a run, and which data are refused before the first step."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tenacity
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainkit
from test_checkpoint import failing, saved_steps
from test_laws import assert_same_weights, weights
from test_reward_calls import drawing, flaky
from test_rewards import ACCEPTED, DENSE, REFUSED, scored, spoil
from trainkit.data import PromptEncoder, prompt_rows
from trainkit.errors import DataError, NonFiniteError, RewardError, TrainkitError
from trainkit.testing import EOS, character_tokenizer, tiny_gpt2, tiny_llama
from trainkit.testing.trainers import LETTERS, count_first_letters, tiny_trainer

ROOT = Path(__file__).parents[2]
SCORED = ("ppo", "rloo", "grpo", "online_dpo", "best_of_k", "rft")
"""Algorithms of language models that call a reward function once for each response that they train on."""


def of_samples(drawn: int, full: bool) -> list[str]:
    """PPO, RLOO and one that is drawn; all that call a reward function for the whole rule."""
    return [*SCORED] if full else [*SCORED[:2], random.Random(drawn).choice(SCORED[2:])]


# ------------------------------------------------------------------------------------------------ reward functions


def test_c1_reward_raises(tmp_path: Path, figure: Callable[[str], None], full: bool, drawn: int) -> None:
    """A reward that raises is named with step and rows; no step is made of it, and the run resumes bit for bit."""
    names = of_samples(drawn, full)
    for name in names:
        changes = {"train__save_interval": 100, "train__total_steps": 12, "rollout__batch_size": 4}
        straight = tiny_trainer(name, tmp_path / name / "straight", **changes)
        straight.learn()
        stopped = tiny_trainer(name, tmp_path / name / "stopped", **changes)
        kept: list[Any] = []
        update = stopped.update

        def noted(batch: Any, update: Any = update, kept: Any = kept, trainer: Any = stopped) -> Any:
            found = update(batch)
            kept[:] = [weights(trainer)]
            return found

        stopped.update = noted
        stopped.reward_fn = failing(6, count_first_letters)
        said = (
            r"^after step \d+: .*fails \(.*\) raised ValueError: not today \(called with 4 samples of the prompts? \d"
        )
        with pytest.raises(RewardError, match=said):
            stopped.learn()
        assert_same_weights(weights(stopped), kept[0])
        assert saved_steps(tmp_path / name / "stopped") == [f"step_{stopped.progress.step:08d}"]
        assert 0 < stopped.progress.step < 12
        again = tiny_trainer(name, tmp_path / name / "stopped", **changes, train__resume="auto")
        again.learn()
        assert_same_weights(weights(again), weights(straight))
    figure(f"{len(names)} of {len(names)} algorithms ({', '.join(names)}) resumed to the same bits")


def test_c2_transient_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None], full: bool, drawn: int
) -> None:
    """A reward of which one call in three fails gives, with retries, the run without failures, bit for bit."""
    waits: list[float] = []
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=waits.append))  # they take no time here
    names = of_samples(drawn, full)
    for name in names:
        ends = []
        for reward_fn in (drawing, flaky(drawing)):
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            given = {"reward__retries": 3, "rollout__batch_size": 4, "arguments": {"reward_fn": reward_fn}}
            trainer = tiny_trainer(name, tmp_path / name / str(len(ends)), **given)
            trainer.learn()
            ends.append(weights(trainer))
        assert_same_weights(*ends)
    assert len(waits) >= len(names)
    assert min(waits) >= 1
    figure(f"{len(waits)} failures with waits of {min(waits):.1f} s and more, 0 differences in {len(names)} runs")


HANGS = """
import asyncio, json, sys, time
from pathlib import Path
from trainkit.errors import TrainkitError
from trainkit.testing.trainers import tiny_trainer

begun = []

def function(**_):
    begun.append(time.monotonic())
    time.sleep(1000)

async def coroutine(**_):
    begun.append(time.monotonic())
    await asyncio.sleep(1000)

async def blocks_its_loop(**_):
    begun.append(time.monotonic())
    time.sleep(1000)

async def waits_for_a_thread(**_):
    begun.append(time.monotonic())
    await asyncio.to_thread(time.sleep, 1000)

class Environment:
    def __init__(self, row): ...
    def step(self, output):
        begun.append(time.monotonic())
        time.sleep(1000)

class AsyncEnvironment(Environment):
    async def step(self, output):
        begun.append(time.monotonic())
        await asyncio.sleep(1000)

which, root = sys.argv[1:]
place = Path(root) / which
if "Environment" in which:
    arguments, limit = {"environment": globals()[which], "reward_fn": None}, "environment__timeout"
else:
    arguments, limit = {"reward_fn": globals()[which]}, "reward__timeout"
trainer = tiny_trainer("ppo", place, arguments=arguments, **{limit: 2.0})
try:
    trainer.learn()
except TrainkitError as error:
    (Path(root) / f"{which}.json").write_text(json.dumps([time.monotonic() - min(begun), str(error)]))
    raise
"""
WHO_HANGS = {
    **{
        name: f"after step 0: {name} (__main__) took longer than reward.timeout, 2 s"
        for name in ("function", "coroutine", "blocks_its_loop", "waits_for_a_thread")
    },
    **{name: f"{name}, prompt" for name in ("Environment", "AsyncEnvironment")},
}


def test_c3_reward_hangs(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """A reward or environment that sleeps 1000 s is a clear error after its limit of 2 s, and the process ends."""
    commands = [[sys.executable, "-c", HANGS, name, str(tmp_path)] for name in WHO_HANGS]
    running = [subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(300) for process in running] == [1] * len(running), "exit codes"
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in WHO_HANGS}
    took = [seconds for seconds, _ in found.values()]
    figure(f"{len(took)} of {len(WHO_HANGS)} ended, the slowest after {max(took):.1f} s")
    assert max(took) < 5
    assert min(took) > 1.5
    for name, (_, said) in found.items():
        assert said.startswith(WHO_HANGS[name]), said
        assert "timeout, 2 s" in said


FORMS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "scalar": (lambda n: 1.0, False),
    "None": (lambda n: None, False),
    "str": (lambda n: "1" * n, False),
    "nested": (lambda n: [[[1.0]]] * n, False),
    "2-D": (lambda n: torch.zeros(n, 2), False),
    "column [B, 1]": (lambda n: np.zeros((n, 1)), False),
    "wrong length": (lambda n: [1.0] * (n - 1), False),
    "dict": (lambda n: dict.fromkeys(range(n), 1.0), False),
    "None among numbers": (lambda n: [1.0] * (n - 1) + [None], False),
    "str among numbers": (lambda n: [1.0] * (n - 1) + ["1"], False),
    "numpy": (lambda n: np.ones(n), True),
    "numpy float16": (lambda n: np.ones(n, dtype=np.float16), True),
    "tensor": (lambda n: torch.ones(n), True),
    "tensor with a gradient": (lambda n: torch.ones(n, requires_grad=True), True),
    "bool": (lambda n: [True] * n, True),
    "int": (lambda n: [3] * n, True),
    "tuple": (lambda n: (1.0,) * n, True),
}


def test_c4_forms_of_rewards(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """Rewards of documented forms train; every other form is one error that names function, expected and got."""
    said = r"^after step 0: .*odd \(.*\) returned .*; return one finite number per sample \(list, tuple, NumPy array or"
    for form, (make, accepted) in FORMS.items():

        def odd(outputs: list[str], make: Any = make, **_: Any) -> Any:
            return make(len(outputs))

        trainer = tiny_trainer("ppo", tmp_path / form, arguments={"reward_fn": odd}, train__total_steps=1)
        if accepted:
            trainer.learn()
            assert trainer.progress.step == 1
        else:
            before = weights(trainer)
            with pytest.raises(RewardError, match=said) as caught:
                trainer.learn()
            assert caught.value.__cause__ is None
            assert_same_weights(before, weights(trainer))
    for value in (*ACCEPTED.values(), *DENSE.values()):
        assert scored(value).isfinite().all()
    for value, _ in REFUSED.values():
        with pytest.raises(RewardError, match=r"(?s)judge \(test_rewards\).*return one finite number per sample"):
            scored(copy.deepcopy(value) if isinstance(value, list) else value)
    documented = (ROOT / "docs/guides/reinforcement-learning.md").read_text()
    for word in ("list, tuple, NumPy array or tensor `[B]`", "1-D array or 1-D tensor per sample", "booleans"):
        assert word in documented
    count = len(FORMS) + len(ACCEPTED) + len(DENSE) + len(REFUSED)
    figure(f"{len(FORMS)} of {len(FORMS)} forms in a run, {count} of {count} in all")


ODD = st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38, 3.4e38, 1e39]) | st.floats()


def test_c5_not_finite_rewards(tmp_path: Path, figure: Callable[[str], None], full: bool) -> None:
    """NaN, inf and 1e38 are an error by default, left out or clipped by setting; the weights are always finite."""
    ended = dict.fromkeys(("error", "drop_row", "clip"), 0)
    refused, whole = 0, 0
    assert trainkit.default_config("ppo").reward.on_nonfinite == "error"

    def check(policy: str) -> None:
        @settings(max_examples=60 if full else 8, database=None)
        @given(st.lists(ODD, min_size=4, max_size=8), st.sampled_from(SCORED[:2]))
        def law(values: list[float], name: str) -> None:
            nonlocal refused, whole
            whole += 1
            place = tmp_path / f"{policy}-{whole}"

            def odd(outputs: list[str], **_: Any) -> list[float]:
                return [values[i % len(values)] for i in range(len(outputs))]

            changes = {} if policy == "error" else {"reward__on_nonfinite": policy}
            trainer = tiny_trainer(name, place, arguments={"reward_fn": odd}, train__total_steps=2, **changes)
            before = weights(trainer)
            try:
                trainer.learn()
                ended[policy] += 1
            except (RewardError, NonFiniteError):  # a finite 1e38 may have an infinite square
                refused += 1
            exported = (place / "model").exists()
            assert exported == (trainer.progress.step == 2)
            trainer.progress.step or assert_same_weights(before, weights(trainer))
            assert not exported or policy != "error" or all(abs(value) < 3.5e38 for value in values)
            assert all(tensor.isfinite().all() for tensor in weights(trainer).values())

        law()

    for policy in ended:
        check(policy)
    assert ended["drop_row"]
    assert ended["clip"]
    ends = ", ".join(f"{policy} {count}" for policy, count in ended.items())
    figure(f"weights finite in {whole} of {whole} runs; trained to the end: {ends}, refused {refused}")


NAN = """
from pathlib import Path
from trainkit.testing import character_tokenizer
from trainkit.testing.trainers import LETTERS

def nothing(outputs, **_):
    print("SCORED")
    return [float("nan")] * len(outputs)

def task():
    return {"reward_fn": nothing, "prompts": ["a", "b"], "tokenizer": character_tokenizer(LETTERS)}
"""


def test_c6_no_usable_reward(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """Three collections in a row without a usable reward end the run, and the process by a code that is not 0."""
    (tmp_path / "task.py").write_text(NAN, encoding="utf-8")
    trainer = tiny_trainer("rloo", tmp_path / "run", reward__on_nonfinite="drop_row", rollout__batch_size=16)
    trainer.config.update({"train.total_steps": 50}).save_yaml(tmp_path / "config.yaml")
    command = [sys.executable, "-m", "trainkit.cli", "train", "config.yaml", "--task", "task.py:task"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "COLUMNS": "500"}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    collections = done.stdout.count("SCORED")
    figure(f"exit code {done.returncode} after {collections} collections")
    assert done.returncode == 1
    assert "3 collections in a row have no response with a usable score" in " ".join(done.stderr.split())
    assert collections == 3
    assert not (tmp_path / "run" / "model").exists()


def test_c7_reward_changes_its_inputs(tmp_path: Path, figure: Callable[[str], None], full: bool, drawn: int) -> None:
    """A reward that changes all it is given, columns and tensors included, leaves the training bit-equal."""

    def honest(outputs: list[str], meta: list[Any], ids: list[Any], **_: Any) -> list[float]:
        return [len(o) % 3 + len(m["facts"]) + float(t.sum()) for o, m, t in zip(outputs, meta, ids, strict=True)]

    def spoiling(outputs: list[str], meta: list[Any], ids: list[Any], **rest: Any) -> list[float]:
        found = honest(outputs, meta, ids)
        for tensor in ids:
            tensor.fill_(7)
        spoil(outputs=outputs, meta=meta, **rest)
        return found

    names, tensors = of_samples(drawn, full), 0
    for name in names:
        ends = []
        for fn in (honest, spoiling):
            rows = [{"prompt": p, "meta": {"facts": []}, "ids": torch.arange(2)} for p in ("a", "bc", "def", "b")]
            trainer = tiny_trainer(name, tmp_path / name / fn.__name__)
            trainer.add_prompt_pipeline(rows)
            trainer.reward_fn = fn
            trainer.learn()
            ends.append(weights(trainer))
            assert [row["ids"].tolist() for row in rows] == [[0, 1]] * 4
        assert_same_weights(*ends)
        tensors += len(ends[0])
    figure(f"0 of {tensors} tensors differ in {', '.join(names)}")


# --------------------------------------------------------------------------------------------------------- data

ALL_LETTERS = f"{LETTERS} \n\0"


def tried(name: str, place: Path, model: Any = None, **given: Any) -> Any:
    """A trainer on these arguments that has learnt, or the error that it ended with and how far it was."""
    arguments = {key: given.pop(key) for key in ("prompts", "samples", "tokenizer") if key in given}
    try:
        trainer = tiny_trainer(name, place, model=model, arguments=arguments, **given)
    except TrainkitError as error:
        return error
    trainer.learn()
    return trainer


def blank_tokenizer() -> Any:
    return character_tokenizer(ALL_LETTERS)


PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ("", "prompt 1 is empty"),
    "None": (None, "prompt 1 should be a string.*None"),
    "int": (7, r"prompt 1 should be a string.*7 \(int\)"),
    "surrogate": ("a\ud800", "prompt 1 contains a character that cannot be encoded"),
    "a character that the tokenizer lacks": ("ü", "prompt 1 'ü' .*cannot be encoded by the tokenizer"),
    "1 MB": ("a" * 2**20, "prompt 1 has 1048576 tokens, and at most 58 leave room"),
    "blank": ("  ", ""),
    "a line break": ("\n", ""),
    "NUL": ("a\0b", ""),
}
"""What is refused, with the error; what is kept, as the tokens that it has (docs/data.md)."""


def test_c8_odd_prompts(tmp_path: Path, figure: Callable[[str], None], full: bool) -> None:
    """Odd prompts and samples are refused before the first step with the number of their row, or kept as documented."""
    model = tiny_gpt2(len(blank_tokenizer()))
    kept, cases = 0, 0
    for case, (prompt, said) in PROMPTS.items():
        for name in ("ppo", "sft"):
            cases += 1
            data: dict[str, Any] = {"prompts": ["a", prompt, "b"]}
            row = said.replace("prompt 1", "sample 1")
            if name == "sft":
                data = {"prompts": ["a"], "samples": [("a", "b"), (prompt, "b"), ("b", "b")]}
                row = "sample 1 " if said else ""
                if case == "1 MB":
                    row = "sample 1 has no output within the first 64 tokens"
            ended = tried(name, tmp_path / name / case, model, tokenizer=blank_tokenizer(), **data)
            if said:
                assert isinstance(ended, DataError), (case, name, ended)
                with pytest.raises(DataError, match=said if name == "ppo" else row):
                    raise ended
                assert not (tmp_path / name / case).exists(), "refused before the run begins"
            else:
                assert ended.progress.step == 6
                kept += 1
    texts, told = 0, []

    @settings(max_examples=500 if full else 50, database=None)
    @given(st.text())
    def any_text(text: str) -> None:
        nonlocal texts
        texts += 1
        try:
            (row,) = PromptEncoder(blank_tokenizer_once, None).fit(prompt_rows([text]))
        except DataError as error:
            told.append(str(error))
        else:
            assert len(PromptEncoder(blank_tokenizer_once, None)(row["prompt"])) == len(text) > 0

    blank_tokenizer_once = blank_tokenizer()
    any_text()
    assert all("prompt 0" in line for line in told)
    figure(f"{cases} of {cases} cases, {kept} of them kept; {texts} texts refused by number or kept whole")


def test_c9_long_prompts(tmp_path: Path, figure: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """A prompt beyond the context is found before the first step: an error, or truncated or dropped, and counted."""
    rows = ["a", "ab" * 40, "c", "cd" * 30]
    told: list[str] = []
    for kind, model in (("gpt2", tiny_gpt2(10)), ("llama", tiny_llama(10))):
        error = tried("ppo", tmp_path / kind / "error", model, prompts=rows)
        with pytest.raises(DataError, match=r"prompt 1 has 80 tokens, and at most 58 leave room for the response"):
            raise error
        assert not (tmp_path / kind / "error").exists()
        for policy, kept in (("truncate", 4), ("drop", 2)):
            caplog.clear()
            trainer = tried("ppo", tmp_path / kind / policy, model, prompts=rows, rollout__overlong_prompts=policy)
            assert trainer.progress.step == 6
            assert len(trainer.pipeline) == kept
            (line,) = {line for line in caplog.messages if "of 4 prompts were" in line}  # of training and evaluation
            told.append(line)
        assert told[-2:] == [
            "2 of 4 prompts were truncated to their end: more than 58 tokens",
            "2 of 4 prompts were dropped: more than 58 tokens",
        ]
        caplog.clear()
        trainer = tried("sft", tmp_path / kind / "sft", model, prompts=["a"], samples=[("a", "b" * 90), ("a", "b")])
        assert trainer.progress.step == 6
        (line,) = {line for line in caplog.messages if "1 of 2 samples were truncated to 64 tokens" in line}
        told.append(line)
    figure(f"{len(told)} counts told and 2 errors, of 4 policies with GPT-2 and Llama")


CASES: dict[str, tuple[str, dict[str, Any], int | str]] = {
    "no prompts": ("ppo", {"prompts": []}, "prompts is empty; give at least one"),
    "no samples": ("sft", {"samples": [], "prompts": ["a"]}, "samples is empty; give at least one"),
    "one prompt": ("ppo", {"prompts": ["a"]}, 6),
    "one sample": ("sft", {"samples": [("a", "b")], "prompts": ["a"]}, 6),
    "fewer prompts than a batch": ("rloo", {"prompts": ["a", "b"]}, 6),
    "fewer samples than a batch": ("sft", {"train__batch_size": 32}, 6),
    "a missing column of prompts": (
        "ppo", {"prompts": [{"promt": "a"}]},
        r"prompt 0 has the columns promt; expected here: prompt .*\"prompt\": row\[\"promt\"\]",
    ),
    "a missing column of samples": (
        "sft", {"samples": [{"prompt": "a", "completon": "b"}]}, r"sample 0 .*\"completion\": row\[\"completon\"\]",
    ),
    "a missing column of pairs": (
        "dpo", {"samples": [{"prompt": "a", "chosen": "b", "rejectd": "c"}]},
        r"sample 0 .*without rejected.*\"rejected\": row\[\"rejectd\"\]",
    ),
    "a sample without output": ("sft", {"samples": [("a", "")], "prompts": ["a"]}, "sample 0 is empty"),
    "a sample of which no output fits": (
        "sft", {"samples": [("a" * 20, "b")], "prompts": ["a"], "train__seq_length": 16},
        "sample 0 has no output within the first 16 tokens",
    ),
    "an identical pair": (
        "dpo", {"samples": [{"prompt": "a", "chosen": "b", "rejected": "b"}]},
        "all 1 pairs have the same chosen and rejected output",
    ),
    "no steps online": ("ppo", {"train__total_steps": 0}, 0),
    "no steps offline": ("sft", {"train__total_steps": 0}, 0),
}  # fmt: skip
"""The algorithm, what differs, and the steps that are made or the error before the first."""


def test_c10_odd_datasets(tmp_path: Path, figure: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """Empty and tiny datasets, missing columns and zero steps are a precise error, or as many steps as asked for."""
    for case, (name, data, expected) in CASES.items():
        caplog.clear()
        ended = tried(name, tmp_path / case, **copy.deepcopy(data))
        if isinstance(expected, str):
            assert isinstance(ended, DataError), (case, ended)
            with pytest.raises(DataError, match=f"(?s){expected}"):
                raise ended
            assert not (tmp_path / case).exists()
        else:
            assert ended.progress.step == ended.total_steps == expected
            assert (tmp_path / case / "model" / "model.safetensors").exists()
            assert ("nothing is trained" in caplog.text) == (expected == 0)
    figure(f"{len(CASES)} of {len(CASES)} cases")


def test_c11_special_tokens(tmp_path: Path, figure: Callable[[str], None], full: bool) -> None:
    """Tokenizers without pad or with pad = EOS work, without EOS or template say what to set; EOS is trained once."""
    rows, cases = 0, 0
    for tokens in ({}, {"pad_token": None}, {"pad_token": EOS}):
        for name in ("ppo", "sft", "dpo"):
            cases += 1
            made = character_tokenizer(LETTERS, **tokens)
            trainer = tried(name, tmp_path / f"{tokens}-{name}", tokenizer=made, rollout__max_new_tokens=12)
            assert trainer.progress.step == 6
            trainer.store.clear()
            trainer.collect()
            batch = trainer.store.experience
            eos = made.eos_token_id
            parts = {
                "ppo": lambda b: [b.sequences], "sft": lambda b: [b], "dpo": lambda b: [b.chosen, b.rejected]
            }[name](batch)  # fmt: skip
            for part in parts:
                ends = ((part.input_ids == eos) & part.response_mask).sum(1)
                assert (ends <= 1).all()
                assert name == "ppo" or (ends == 1).all()
                rows += int((ends == 1).sum())
    says = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    refused: dict[str, tuple[str, dict[str, Any], str]] = {
        "no EOS": (
            "ppo", {"tokenizer": character_tokenizer(LETTERS, eos_token=None)},
            "has no EOS token, so no response can end; set tokenizer.kwargs.eos_token",
        ),
        "no template for prompts": (
            "ppo", {"prompts": [{"prompt": [says[0]]}]}, "prompt 0 is a conversation, and the tokenizer has no chat "
            "template to write it with. Set tokenizer.chat_template",
        ),
        "no template for samples": (
            "sft", {"samples": [{"messages": [*says]}], "prompts": ["a"]},
            "sample 0 is a conversation, and the tokenizer has no chat template to write it with. Set tokenizer.",
        ),
    }  # fmt: skip
    for case, (name, data, said) in refused.items():
        cases += 1
        with pytest.raises(DataError, match=said):
            raise tried(name, tmp_path / case, **data)
    figure(f"{cases} of {cases} cases; of {rows} responses that end, {rows} have one trained EOS")
