"""`trainkit chat`, `trainkit generate` and `trainkit eval`: models that are tried without training."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit.cli import app
from trainkit.data.chat import PLAIN_TEMPLATE
from trainkit.errors import ConfigError
from trainkit.runs.exports import find_model
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_t5
from trainkit.testing.trainers import LETTERS, PROMPTS, Letters, tiny_trainer
from trainkit.trainer.inference import Estimate, load_tried, respond
from trainkit_tools.conversation import Conversation

REWARD = "from trainkit.testing.trainers import Letters, count_first_letters\n"


def told(*arguments: str, code: int = 0, typed: str | None = None) -> Any:
    result = CliRunner().invoke(app, list(arguments), input=typed)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with runs that have ended, by their algorithm; `lora` is one of PPO."""
    folder = tmp_path_factory.mktemp("runs")
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "ppo": ("ppo", {"train__save_best": True, "rollout__eval_kwargs": {"temperature": [0, 0.7]}}),
        "ilql": ("ilql", {"rollout__eval_kwargs": {"beta": 4.0}}),
        "lora": ("ppo", {"model__peft_config": {"r": 2}}),
        "reward": ("reward", {}),
        "game": ("ppo", {"arguments": {"environment": Letters, "reward_fn": None}, "rollout__max_turns": 3}),
    }
    for name, (method, changes) in kinds.items():
        tiny_trainer(method, folder / name, train__total_steps=2, train__eval_interval=2, **changes).learn()
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "n": at}) + "\n" for at, prompt in enumerate(PROMPTS))
    )
    (folder / "plain.txt").write_text("\n".join(PROMPTS))
    return folder


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template and a context of 128 characters, in the directory of no run."""
    folder = tmp_path_factory.mktemp("talker")
    characters = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = character_tokenizer(characters)
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(folder)
    fields = tiny_gpt2(len(tokenizer), n_positions=128)
    AutoModelForCausalLM.from_config(GPT2Config(**{**fields, "eos_token_id": tokenizer.eos_token_id})).save_pretrained(
        folder
    )
    return folder


# ---------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.slow
@table("teacher", [None, "gone"])  # a live model, which the configuration does not name
def test_a_student_answers_without_its_teacher(teacher: str | None, runs: Path, tmp_path: Path) -> None:
    tiny_trainer("distill", tmp_path / "student", train__total_steps=1).learn()
    config = yaml.safe_load((tmp_path / "student" / "config.yaml").read_text())
    config["model"]["reference_path"] = teacher
    (tmp_path / "student" / "config.yaml").write_text(yaml.safe_dump(config))
    given = ("--prompts", str(runs / "plain.txt"), "--out", str(tmp_path / "answers.jsonl"))
    told("generate", str(tmp_path / "student"), *given)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == len(PROMPTS)


@table("name", ["ppo", "ilql", "lora", "game"])
def test_the_numbers_of_a_run_are_exactly_those_of_its_last_evaluation(name: str, runs: Path, tmp_path: Path) -> None:
    paid = ("--environment", "Letters") if name == "game" else ("--reward-fn", "count_first_letters")
    out = tmp_path / "samples.jsonl"
    given = (
        "--prompts",
        str(runs / "plain.txt"),
        paid[0],
        f"{runs / 'reward.py'}:{paid[1]}",
        "--out",
        str(out),
        "--json",
    )
    found = json.loads(told("eval", str(runs / name), *given).stdout)
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if "eval/length" in line][-1]
    expected = {key: value for key, value in last.items() if key.startswith("eval/") and "time" not in key}
    assert expected
    assert {key: found["metrics"][key] for key in expected} == expected
    assert found["step"] == 2
    recorded = [json.loads(line) for line in (runs / name / "samples.jsonl").read_text().splitlines()]
    outputs = [line["output"] for line in recorded if line.get("kind") == "evaluation" and line["step"] == 2]
    assert outputs
    assert outputs == [json.loads(line)["output"] for line in out.read_text().splitlines()][: len(outputs)]


def test_an_evaluation_tells_means_intervals_and_the_best_and_worst_responses(runs: Path) -> None:
    arguments = ("--prompts", str(runs / "plain.txt"), "--reward-fn", f"{runs / 'reward.py'}:count_first_letters")
    text = told("eval", str(runs / "ppo"), *arguments).stdout
    assert "after step 2 of ppo: 16 responses" in text
    assert "95 % interval" in text
    assert "reward@temperature=0 " in text
    assert text.index("best:") < text.index("worst:")


def test_a_mean_has_the_interval_of_student() -> None:
    # of 1, 2, 3: deviation 1; t(0.975, 2) = 4.302653, times 1/√3
    found = Estimate.of([1.0, 2.0, 3.0])
    assert (found.mean, found.std) == (2.0, 1.0)
    assert found.half == pytest.approx(4.302653 / 3**0.5, abs=1e-6)


def test_an_evaluation_needs_prompts_and_something_to_measure_with(runs: Path) -> None:
    assert "give --prompts, or --lm-eval TASKS" in told("eval", str(runs / "ppo"), code=2).stderr
    prompts = ("--prompts", str(runs / "plain.txt"))
    assert "give --reward-fn, --metric-fn" in told("eval", str(runs / "ppo"), *prompts, code=2).stderr


def test_the_task_of_the_run_gives_prompts_and_functions(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        REWARD + "def task(seed): return {'reward_fn': count_first_letters, 'eval_prompts': ['a', 'bc'], 'samples': []}"
    )
    given = ("--task", f"{tmp_path / 'task.py'}:task", "--json")
    assert json.loads(told("eval", str(runs / "lora"), *given).stdout)["responses"] == 2


def test_without_lm_eval_its_installation_is_told(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert 'pip install "trainkit-rl[eval]"' in told("eval", str(runs / "lora"), "--lm-eval", "arc_easy", code=2).stderr


def test_tasks_are_passed_to_lm_eval_with_the_model(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    names = {"lm_eval": {}, "lm_eval.models": {}, "lm_eval.models.huggingface": {}, "lm_eval.tasks": {}}
    for name in [*names, "lm_eval.utils"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    known = ["arc_easy", "letters"]
    double: Any = sys.modules
    double["lm_eval"].simple_evaluate = lambda **given: calls.append(given) or {"results": {"letters": {"acc": 1.0}}}
    double["lm_eval.models.huggingface"].HFLM = SimpleNamespace
    double["lm_eval.tasks"].TaskManager = lambda include_path: SimpleNamespace(
        all_tasks=known, match_tasks=lambda names: [name for name in names if name in known], path=include_path
    )
    double["lm_eval.utils"].make_table = lambda results: f"table of {', '.join(results['results'])}"
    (tmp_path / "own.yaml").write_text("task: letters\n")
    tasks = ("eval", str(runs / "lora"), "--batch-size", "3", "--lm-eval")
    assert "table of letters" in told(*tasks, f"arc_easy,{tmp_path / 'own.yaml'}").stdout
    assert calls[0]["tasks"] == ["arc_easy", "letters"]
    assert calls[0]["task_manager"].path == [str(tmp_path)]
    assert calls[0]["model"].batch_size == 3
    assert calls[0]["random_seed"] == load_tried(str(runs / "lora")).trainer.config.train.seed
    assert "no task 'arc_esy'; did you mean 'arc_easy'?" in told(*tasks, "arc_esy", code=2).stderr


@pytest.mark.slow
@pytest.mark.needs("lm_eval")
def test_lm_eval_evaluates_a_task_of_ones_own(runs: Path, tmp_path: Path) -> None:
    """With the harness itself, which `make extras` installs: documents whose right choice is the likelier one."""
    tried = load_tried(str(runs / "lora"))
    rows = [{"text": text, "choices": ["a", "b"], "answer": 0} for text in ("ab", "ba", "aab", "bb")]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "letters.yaml").write_text(
        "task: letters\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.json'}}}}}\n"
        "doc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc}]\n"
    )
    given = ("eval", str(runs / "lora"), "--lm-eval", str(tmp_path / "letters.yaml"), "--json")
    command = [sys.executable, "-m", "trainkit.cli", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout[done.stdout.index("{") :])
    trainer = tried.trainer
    likelier = []
    for row in rows:
        ids = torch.tensor([trainer.tokenizer(row["text"], add_special_tokens=False).input_ids])
        with torch.no_grad():
            logits = trainer.unwrapped.model(ids).logits[0, -1]
        a, b = (trainer.tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
        likelier.append(float(logits[a] > logits[b]))
    assert report["lm_eval"]["letters"]["acc,none"] == pytest.approx(sum(likelier) / len(likelier))


# ---------------------------------------------------------------------------------------------------------- generating


def test_responses_have_the_columns_of_their_prompts_and_do_not_depend_on_the_batch(runs: Path, tmp_path: Path) -> None:
    made = []
    for size in ("1", "5"):
        out = tmp_path / f"{size}.jsonl"
        given = ("--prompts", str(runs / "prompts.jsonl"), "--out", str(out), "--batch-size", size)
        told("generate", str(runs / "ppo"), *given, "--samples-per-prompt", "2")
        made.append([json.loads(line) for line in out.read_text().splitlines()])
    assert made[0] == made[1]
    assert [(row["prompt"], row["n"]) for row in made[0]] == [(p, n) for n, p in enumerate(PROMPTS) for _ in range(2)]
    assert {row["finish_reason"] for row in made[0]} <= {"stop", "length"}
    assert any(first["output"] != second["output"] for first, second in zip(made[0][::2], made[0][1::2], strict=True))


def test_a_file_that_was_begun_is_continued_with_the_same_responses(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    given = ("generate", str(runs / "ppo"), "--prompts", str(runs / "prompts.jsonl"), "--out", str(out))
    told(*given)
    whole = out.read_text()
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:7])  # cut off while it was written
    assert "8 responses to 8 prompts, of which 3 were there" in told(*given).stdout
    assert out.read_text() == whole
    assert "of which 8 were there" in told(*given).stdout


def test_a_file_of_other_prompts_or_settings_is_not_continued(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    given = ("generate", str(runs / "ppo"), "--out", str(out), "--prompts")
    told(*given, str(runs / "prompts.jsonl"))
    whole = out.read_text()
    assert "begun with other prompts (line 1)" in told(*given, str(runs / "plain.txt"), code=1).stderr
    assert "begun with seed" in told(*given, str(runs / "prompts.jsonl"), "--seed", "5", code=1).stderr
    out.write_text("nonsense\n")
    assert "out.jsonl, line 1: not a JSON object" in told(*given, str(runs / "prompts.jsonl"), code=1).stderr
    out.write_text(whole)
    out.with_name("out.jsonl.settings.json").write_text("{")
    assert "settings.json: not a JSON object" in told(*given, str(runs / "prompts.jsonl"), code=1).stderr
    out.with_name("out.jsonl.settings.json").unlink()
    assert "is not of this command" in told(*given, str(runs / "prompts.jsonl"), code=1).stderr
    assert out.read_text() == whole


def test_prompts_with_a_column_that_is_written_are_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "finish_reason": "b"}\n')
    given = ("--prompts", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out.jsonl"))
    assert "a column 'finish_reason'" in told("generate", str(runs / "ppo"), *given, code=1).stderr


def test_a_prompt_that_is_too_long_can_be_given_again_with_shorter_answers(talker: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a" * 100}))
    given = ("--prompts", str(tmp_path / "rows.jsonl"))
    out = ("--out", str(tmp_path / "out.jsonl"))
    said = "has 100 tokens, and at most 64 leave room for the response. Shorten it, or lower max_new_tokens\n"
    assert told("generate", str(talker), *given, *out, code=1).stderr.endswith(said)
    assert "1 responses" in told("generate", str(talker), *given, *out, "--max-new-tokens", "5").stdout
    (tmp_path / "reward.py").write_text(REWARD)
    reward = ("--reward-fn", f"{tmp_path / 'reward.py'}:count_first_letters")
    assert told("eval", str(talker), *given, *reward, code=1).stderr.endswith(said)


@table("name, text", [("data.csv", "prompt\nab\nc\n"), ("data.txt", "ab\nc\n")])
def test_prompts_come_from_every_kind_of_file(name: str, text: str, runs: Path, tmp_path: Path) -> None:
    """All kinds are read by `read_data`, which has tests of its own."""
    (tmp_path / name).write_text(text)
    out, prompts = tmp_path / "out.jsonl", ("--prompts", str(tmp_path / name))
    told("generate", str(runs / "ppo"), *prompts, "--out", str(out))
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["ab", "c"]
    reward = ("--reward-fn", f"{runs / 'reward.py'}:count_first_letters")
    assert "4 responses" in told("eval", str(runs / "ppo"), *prompts, *reward).stdout  # 2 temperatures


def test_an_encoder_decoder_of_no_run_generates(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.save_pretrained(tmp_path)
    fields = {**tiny_t5(len(tokenizer)), "eos_token_id": tokenizer.eos_token_id}
    T5ForConditionalGeneration(T5Config(**fields)).save_pretrained(tmp_path)
    found = list(respond(load_tried(str(tmp_path), settings={"max_new_tokens": 4}), ["ab", "c"]))
    assert [each.row["prompt"] for each in found] == ["ab", "c"]


# ------------------------------------------------------------------------------------------------------------- talking


def test_answers_come_piece_by_piece_and_are_those_of_generate(runs: Path) -> None:
    tried, pieces = load_tried(str(runs / "ppo"), settings={"temperature": 0}), list[str]()
    whole = Conversation(tried).answer("ab", pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == whole == next(respond(tried, ["ab"])).output


def test_lines_of_a_pipe_are_answered_and_commands_obeyed(talker: Path) -> None:
    given = ("chat", str(talker), "--seed", "1", "--max-new-tokens", "5", "--system", "Be short.")
    first = told(*given, typed="hello\nagain\n/quit\nnever\n")
    assert told(*given, typed="hello\nagain\n").stdout == first.stdout
    result = told(*given, typed="hello\n/reset\n/system\n/help\n/rest\n")
    assert first.stdout.startswith(result.stdout)
    assert result.stderr.count("a new conversation begins") == 2
    assert "/system TEXT" in result.stderr
    assert "there is no command '/rest'; did you mean '/reset'?" in result.stderr


def test_the_last_message_is_answered_again_and_lines_are_continued(talker: Path) -> None:
    chat = Conversation(load_tried(str(talker), settings={"max_new_tokens": 8}, seed=1))
    with pytest.raises(ConfigError, match="no message yet"):
        chat.again(lambda _: None)
    answers = {chat.answer("one\ntwo", lambda _: None), *(chat.again(lambda _: None) for _ in range(3))}
    assert len(answers) > 1
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    given = ("chat", str(talker), "--seed", "1", "--max-new-tokens", "8")
    result = told(*given, typed="/again\none\\\ntwo\n/again\n")
    assert "there is no message yet" in result.stderr
    chat.tried.trainer.config, chat.turn = load_tried(str(talker), seed=1).trainer.config, 0
    chat.begin(None)
    expected = [chat.answer("one\ntwo", lambda _: None), chat.again(lambda _: None)]
    assert result.stdout.replace("\n", "") == "".join(expected).replace("\n", "")


def test_a_conversation_remembers_and_drops_its_oldest_messages_when_the_context_is_full(talker: Path) -> None:
    chat = Conversation(load_tried(str(talker), settings={"max_new_tokens": 8}, seed=1), "s")
    chat.answer("one", lambda _: None)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert not chat.dropped
    chat.answer("x" * 60, lambda _: None)
    assert chat.dropped == 2
    assert chat.messages[0]["content"] == "x" * 60
    result = told("chat", str(talker), "--max-new-tokens", "8", typed="one\n" + "x" * 70 + "\n" + "x" * 300 + "\n")
    assert "did not read the oldest 2 messages" in result.stderr
    assert "the message has 3" in result.stderr
    assert "lower --max-new-tokens" in result.stderr


def test_an_interrupted_answer_is_remembered_as_far_as_it_was_told(talker: Path) -> None:
    chat, pieces = Conversation(load_tried(str(talker), settings={"max_new_tokens": 20}, seed=1)), list[str]()

    def tell(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    assert chat.answer("one", tell) == "".join(pieces)
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(pieces)}


def test_a_model_without_template_says_so_once_and_has_no_system_prompt(runs: Path) -> None:
    result = told("chat", str(runs / "ppo"), typed="ab\nc\n/system x\n")
    assert result.stderr.count("has no chat template: each line is continued") == 1
    assert "no place for a system prompt" in result.stderr
    assert "no place for a system prompt" in told("chat", str(runs / "ppo"), "--system", "x", code=2).stderr


def test_two_models_are_compared_one_after_the_other_in_a_pipe(runs: Path) -> None:
    first, second = str(runs / "ppo"), str(runs / "ilql")
    result = told("chat", first, "--compare", second, "--seed", "1", typed="ab\n")
    assert [line for line in result.stdout.splitlines() if line.startswith("[")] == [f"[{first}]", f"[{second}]"]


def test_control_characters_of_a_model_do_not_reach_the_terminal(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "answer", lambda self, message, tell: tell("a\x1b[31m\nb") or "")
    assert told("chat", str(talker), typed="x\n").stdout == "a [31m\nb\n"


@pytest.mark.slow
def test_a_terminal_has_two_answers_side_by_side_and_ends_with_ctrl_d(runs: Path) -> None:
    first, second = "ppo", "ilql"
    command = [sys.executable, "-m", "trainkit.cli", "chat", first, "--compare", second, "--seed", "1"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=runs, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        try:
            os.close(theirs)
            _seen(ours, "> ")
            os.write(ours, b"ab\n")
            shown = _seen(ours, "> ")
            os.write(ours, b"\x04")
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(ours)
    tops = [line for line in shown.splitlines() if "─ ppo ─" in line]
    assert len(tops) > 2, "the answers appear while they are written"
    assert all("─ ilql ─" in line for line in tops)


def _seen(terminal: int, wanted: str) -> str:
    """Read what a program writes to its terminal until ``wanted`` is at the end."""
    found, end = "", time.monotonic() + 60
    while not found.replace("\r", "").endswith(wanted):
        assert select.select([terminal], [], [], end - time.monotonic())[0], f"{wanted!r} was not written: {found}"
        found += os.read(terminal, 65536).decode("utf-8", "replace")
    return found


# --------------------------------------------------------------------------------------- what is no model that writes


def test_a_directory_that_is_not_there_is_told_and_the_nearest_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    name = f"{runs.name}/ppo/modle"
    expected = f"there is no directory '{name}'; did you mean '{runs.name}/ppo/model'?"
    for command in (("chat", name), ("generate", name, "--prompts", "p.txt", "--out", "o.jsonl")):
        (runs.parent / "p.txt").write_text("a")
        assert expected in told(*command, code=2).stderr
    config = ("train", f"{runs}/ppo/config.yaml", f"model.model_path={name}", "--prompts", "p.txt")
    assert expected in told(*config, code=2).stderr
    with pytest.raises(ConfigError, match=re.escape(expected)):
        trainkit.train(name, prompts=["a"], reward_fn=len)  # type: ignore[arg-type]


def test_a_reward_model_and_a_diffusion_pipeline_are_told_to_be_such(runs: Path, tmp_path: Path) -> None:
    for name in ("reward", "reward/model"):
        assert "is a reward model, which scores text" in told("chat", str(runs / name), code=2).stderr
    shutil.copytree(runs / "reward" / "model", tmp_path / "moved")
    assert "is a reward model, which scores text" in told("chat", str(tmp_path / "moved"), code=2).stderr
    classifier = AutoModelForSequenceClassification.from_config(GPT2Config(**tiny_gpt2(10), num_labels=1))
    classifier.save_pretrained(tmp_path / "classifier")
    assert "is a reward model, which scores text" in told("chat", str(tmp_path / "classifier"), code=2).stderr
    (runs / "images").mkdir()
    (runs / "images" / "config.yaml").write_text("method: ddpo\n")
    (runs / "images" / "model").mkdir()
    (runs / "images" / "model" / "config.json").write_text("{}")
    assert "a model of 'ddpo', which generates no text" in told("chat", str(runs / "images"), code=2).stderr
    (tmp_path / "model_index.json").write_text('{"_class_name": "DDPMPipeline"}')
    assert "a diffusion pipeline (DDPMPipeline): it makes images" in told("chat", str(tmp_path), code=2).stderr


def test_a_run_without_export_and_a_directory_without_model_say_what_to_give(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "ppo", run)
    assert find_model(str(run), best=True).model == str(run / "best")
    shutil.rmtree(run / "model")
    error = told("chat", str(run), code=2).stderr
    assert "it ended at step 2 of 2, before the export" in error
    assert "Its best export so far: --best" in error
    shutil.rmtree(run / "best")
    assert "train.save_best writes" in told("chat", str(run), "--best", code=2).stderr
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    assert f"give the run '{run}'" in told("chat", str(run / "checkpoints" / "step-2"), code=2).stderr
    assert "holds neither a model" in told("chat", str(tmp_path), code=2).stderr
    assert "is the directory of no run" in told("chat", str(runs / "ppo" / "model"), "--best", code=2).stderr


def test_an_export_away_from_its_run_is_a_plain_model_and_says_so(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "ilql" / "model", tmp_path / "moved")
    assert "is an export of 'ilql' without the configuration" in told("chat", str(tmp_path / "moved"), typed="").stderr
    assert not load_tried(str(runs / "ilql" / "model")).notes
