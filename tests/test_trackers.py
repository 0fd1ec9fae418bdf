"""Trackers: what is written where, what the console shows, and that neither can be hurt or hurt others."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import logging as transformers_logging

from tables import table
from trainkit import hookimpl
from trainkit.errors import ConfigError, HookError
from trainkit.runs import Record, default_trackers
from trainkit.runs import console as console_module
from trainkit.runs.console import Console, clock, count, excerpt, short_number
from trainkit.runs.journal import is_recorded
from trainkit.runs.trackers import AccelerateTracker, flatten
from trainkit.testing.trainers import tiny_trainer
from trainkit_report.report import report

EVIL = "\x1b[31mred\x1b]0;title\x07 [bold]x[/bold]\n\r\x9b2J\u202e"


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    output = rich.console.Console(
        file=text, force_terminal=terminal, width=100, height=40, color_system=None, legacy_windows=False
    )
    return Console(output, interval=0.0), text


def stub_trainer(**more: Any) -> Any:
    train = SimpleNamespace(total_steps=10)
    config = SimpleNamespace(method=SimpleNamespace(name="toy"), train=train)
    progress = SimpleNamespace(step=0, tokens=0, seconds=0.0, trained=0, stop_reason="")
    return SimpleNamespace(
        config=config,
        run=SimpleNamespace(learning=True, resumption=SimpleNamespace(messages=[])),
        updater=SimpleNamespace(unit="tokens"),
        total_steps=10,
        done=False,
        run_dir=Path("runs/toy"),
        progress=progress,
        **more,
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class FailsAt:
    """A callback that ends the run with an error."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def on_step(self, step: int) -> None:
        if step == self.step:
            raise RuntimeError("the end")


# --------------------------------------------------------------------------------------------------------- files


def test_samples_hold_every_evaluated_one_and_the_rollouts_of_collections(tmp_path: Path) -> None:
    # 16 rollouts a collection, 4 epochs of 2 minibatches = 8 steps; 10 steps are two collections
    trainer = tiny_trainer("ppo", tmp_path / "run", train__total_steps=10, train__eval_interval=5)
    trainer.learn()
    samples = read(tmp_path / "run" / "samples.jsonl")
    places = [(s["kind"], s["step"]) for s in samples]
    assert [p for p in places if p[0] == "rollout"] == [("rollout", 0)] * 16 + [("rollout", 8)] * 16
    assert [p for p in places if p[0] == "evaluation"] == [
        ("evaluation", step) for step in (0, 5, 10) for _ in range(8)
    ]
    assert all(isinstance(s["prompt"], str) and isinstance(s["output"], str) for s in samples)
    assert all("reward" in s for s in samples)
    steps = [m["step"] for m in read(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]


def judged(outputs: list[str], level: list[int], **_: Any) -> dict[str, list[Any]]:
    length = [float(len(output)) for output in outputs]
    scores = [a * b for a, b in zip(length, level, strict=True)]
    return {"score": scores, "words": length, "why": ["long"] * len(length)}


@table(
    "method, changes",
    [
        ("grpo", {}),
        ("ppo", {}),  # advantages per token
        ("grpo", {"rollout__staleness": 1}),
        ("grpo", {"reward__on_nonfinite": "drop_row"}),  # groups are put together anew
        ("rft", {}),  # experience of other rows than the rollouts
    ],
)
def test_recorded_rollouts_have_rewards_by_part_columns_and_advantages(
    method: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    prompts = [{"prompt": letter, "level": at, "tags": {letter}} for at, letter in enumerate("abcd", 1)]
    usual = {"train__total_steps": 2, "train__eval_interval": 2, "rollout__num_rollouts": 8}
    given = {"reward_fn": judged, "prompts": prompts}
    trainer = tiny_trainer(method, tmp_path / "run", arguments=given, **{**usual, **changes})
    trainer.add_eval_pipeline(prompts)
    trainer.learn()
    lines = read(tmp_path / "run" / "samples.jsonl")
    rollouts = [line for line in lines if line["kind"] == "rollout" and line["step"] == 0]
    assert len(rollouts) >= 8 or method == "rft"
    for line in rollouts if method != "rft" else [line for line in rollouts if line.get("reward")]:
        level = line["columns"]["level"]
        assert line["reward"] == level * line["words"] == level * len(line["output"])
        assert (line["why"], line["columns"]["tags"]) == ("long", str({line["prompt"]}))
        assert isinstance(line.get("advantage", 0.0), float)
    if method == "grpo":
        groups = [rollouts[at : at + trainer.samples_per_prompt] for at in range(0, 8, trainer.samples_per_prompt)]
        assert all(len({line["prompt"] for line in group}) == 1 for group in groups)
        assert all(abs(sum(line["advantage"] for line in group)) < 1e-5 for group in groups)
    newest = read(tmp_path / "run" / "newest.jsonl")
    assert [line for line in lines if line["kind"] == "rollout"][-1]["step"] == newest[0]["step"]
    for line in newest:
        of_tokens = line["tokens"]
        assert "".join(of_tokens["text"]).replace("<eos>", "").replace("<pad>", "") == line["output"]
        assert all(len(values) == len(of_tokens["text"]) for values in of_tokens.values())
        assert ("kl" in of_tokens) == (method == "ppo")  # grpo has no reference
        assert max(of_tokens["logprob"]) < 0
        if "advantage" in line:
            mean = sum(of_tokens["advantage"]) / len(of_tokens["advantage"])
            assert mean == pytest.approx(line["advantage"], abs=1e-3)
    evaluated = [line for line in lines if line["kind"] == "evaluation"]
    levels = {(line["prompt"], line["columns"]["level"]) for line in evaluated}
    assert levels == {(row["prompt"], row["level"]) for row in prompts}
    assert "eval/level" not in read(tmp_path / "run" / "metrics.jsonl")[0]  # a column is no measure
    page = report([Record(tmp_path / "run")])
    assert "rollouts that were trained on after step" in page


def test_ever_fewer_collections_are_recorded() -> None:
    recorded = [number + 1 for number in range(1000) if is_recorded(number)]
    assert recorded == [*range(1, 10), *range(10, 100, 10), *range(100, 1001, 100)]


# ------------------------------------------------------------------------------------------------ accelerate's


def test_tensorboard_gets_metrics_at_their_steps_the_config_and_samples_in_one_run(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    trainer = tiny_trainer(
        "ppo", tmp_path / "run", train__total_steps=3, train__eval_interval=3, train__trackers=["tensorboard"]
    )
    trainer.learn()
    folder = tmp_path / "run" / "tensorboard"
    assert len(list(folder.iterdir())) == 1, "one event file, and no directory that would look like another run"
    events = EventAccumulator(str(folder)).Reload()
    logged = read(tmp_path / "run" / "metrics.jsonl")
    for key in ("loss/total", "reward/mean", "eval/reward"):
        expected = [(m["step"], pytest.approx(m[key], rel=1e-6)) for m in logged if key in m]
        assert [(e.step, e.value) for e in events.Scalars(key)] == expected
        assert expected
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert (
        "| step | prompt | output |"
        in events.Tensors("eval/samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    )


def test_any_tracker_of_accelerate_is_opened_fed_and_closed_also_when_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Recorder(GeneralTracker):
        name = "clearml"
        requires_logging_directory = False
        tracker = None

        def __init__(self, run_name: str, **arguments: str) -> None:
            super().__init__()
            seen.append(("open", run_name, arguments))

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            seen.append(("config", values))

        def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
            seen.append(("log", step, "loss/total" in values))

        def finish(self) -> None:
            seen.append(("close",))

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "clearml", Recorder)
    run_dir = tmp_path / "run"
    trainer = tiny_trainer("sft", run_dir, callbacks=[FailsAt(2)], train__trackers=["clearml", "clearml"])
    with pytest.raises(HookError, match=r"callback FailsAt .*: the end"):
        trainer.learn()
    trainer.evaluate()  # the run is over: its tracker stays closed
    assert [entry[0] for entry in seen] == ["open", "config", "log", "log", "close"]
    assert seen[0] == ("open", "clearml", {"project_name": "trainkit", "task_name": "run"})
    assert seen[2:4] == [("log", 1, True), ("log", 2, True)]
    assert seen[1][1]["train.batch_size"] == 8
    assert {type(value) for value in seen[1][1].values()} <= {bool, int, float, str}


def test_flatten_gives_dotted_scalars() -> None:
    nested = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}, "g": True, "h": 0.5}
    assert flatten(nested) == {"a.b": 1, "a.c.d": "None", "e": "[1, 2]", "f": "{}", "g": True, "h": 0.5}


def test_unknown_tracker_is_refused_before_a_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*did you mean 'tensorboard'.*wandb"):
        tiny_trainer("sft", tmp_path / "run", train__trackers=["tensorbord"])
    assert not (tmp_path / "run").exists()


def test_a_tracker_is_made_once_however_often_it_is_named() -> None:
    made = default_trackers(["tensorboard", "tensorboard"])
    assert [type(tracker).__name__ for tracker in made] == ["Console", "JsonLines", "TensorBoard"]
    assert isinstance(made[2], AccelerateTracker)


# -------------------------------------------------------------------------------------------------- progress bars


def test_progress_bars_are_off_while_a_run_lasts_and_back_afterwards(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks:
        @hookimpl
        def on_step(self) -> None:
            seen.append(transformers_logging.is_progress_bar_enabled())

    before = transformers_logging.is_progress_bar_enabled()
    tiny_trainer("sft", tmp_path / "run", callbacks=[Looks()], train__total_steps=1).learn()
    assert seen == [False]
    assert transformers_logging.is_progress_bar_enabled() == before


# ------------------------------------------------------------------------------------------------------- console


def test_lines_say_beginning_steps_evaluations_and_end(tmp_path: Path) -> None:
    shown, text = console()
    changes: dict[str, Any] = {"train__total_steps": 10, "train__eval_interval": 5}
    tiny_trainer("ppo", tmp_path / "run", callbacks=[shown], **changes).learn()
    lines = text.getvalue().splitlines()
    assert lines[0] == f"ppo  10 steps  {tmp_path / 'run'}"
    assert [line for line in lines if "evaluation" in line] == [lines[1], lines[7], lines[13]]
    assert lines[1].startswith("step  0/10  evaluation  reward ")
    training = lines[2:7] + lines[8:13]
    numbers = r"reward +\d\.\d\d ± \d\.\d\d +kl +\S+  entropy +\S+  clip +\S+  loss +\S+"
    pattern = rf"step +\d+/10  {numbers}  +\d+\S* tok/s  left 0:\d\d"
    assert all(re.fullmatch(pattern, line) for line in training[1:])
    assert len({line.index("kl") for line in training}) == 1, "lines stand below each other"
    rewards = [re.findall(r"reward +(\S+)", line)[0] for line in training]
    assert rewards[0] == rewards[7], "a collection's reward stays until the next collection"
    history = [line.split() for line in lines[14:-1]]
    assert history[0] == ["step", "reward", "length"]
    assert [row[0] for row in history[1:]] == ["0", "5", "10"]
    assert [f"reward {row[1]}  length {row[2]}" for row in history[1:]] == [
        re.findall(r"evaluation  (.*)  sample", line)[0] for line in lines if "evaluation" in line
    ]
    assert lines[-1].startswith("step 10/10  done after 0:0")
    assert len(lines) == 19


def test_lines_show_the_metrics_that_there_are(tmp_path: Path) -> None:
    shown, text = console()
    tiny_trainer("sft", tmp_path / "run", callbacks=[shown], train__total_steps=2).learn()
    assert re.match(r"step 2/2  nll +\d\.\d\d  loss +\d\.\d\d  +\d+\S* tok/s", text.getvalue().splitlines()[2])
    assert "reward" not in text.getvalue()


def test_lines_come_by_time_and_a_failed_run_is_said_to_have_stopped(tmp_path: Path) -> None:
    shown, text = console()
    shown.interval = 3600.0
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[FailsAt(2), shown])
    with pytest.raises(HookError):
        trainer.learn()
    lines = text.getvalue().splitlines()
    assert len(lines) == 2  # beginning and end
    assert lines[-1].startswith("step 2/6  stopped after")


def test_the_table_is_shown_on_a_terminal_and_gone_after_an_error(tmp_path: Path) -> None:
    shown, text = console(terminal=True)
    trainer = tiny_trainer("ppo", tmp_path / "run", callbacks=[FailsAt(3), shown], train__eval_interval=2)
    before = sys.stdout, sys.stderr
    with pytest.raises(HookError):
        trainer.learn()
    drawn = text.getvalue()
    assert (sys.stdout, sys.stderr) == before
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l"), "the cursor is back"
    for label in ("progress", "reward", "kl", "entropy", "clip", "loss", "pace", "evaluation", "sample", "step 3/6"):
        assert label in drawn
    assert "stopped after" in drawn.splitlines()[-1]


@table("terminal", [False, True])
def test_samples_cannot_control_the_terminal(terminal: bool) -> None:
    shown, text = console(terminal=terminal)
    trainer = stub_trainer()
    shown.on_train_begin(trainer)
    shown.on_evaluate(step=1, metrics={"eval/reward": 1.0}, samples=[{"prompt": EVIL, "output": EVIL}])
    shown.on_train_end(trainer)
    drawn = text.getvalue()
    assert "[bold]x[/bold]" in drawn, "markup is shown, not obeyed"
    for control in ("\x1b[31m", "\x1b]0;", "\x07", "\x9b", "\u202e"):
        assert control not in drawn


@given(terminal=st.booleans(), name=st.text() | st.just(EVIL))
def test_names_of_metrics_and_the_text_of_a_run_cannot_control_the_terminal(terminal: bool, name: str) -> None:
    tracker, text = console(terminal=terminal)
    trainer = stub_trainer()
    tracker.on_train_begin(trainer)
    tracker.log_metrics(trainer, 1, {"loss/total": 1.0, name: 1.0})
    tracker.on_evaluate(1, {f"eval/{name}": 1.0}, [{"prompt": name, "output": name}])
    body = tracker._table() if terminal else ""
    tracker._stop_live()
    tracker.output.file = shown = io.StringIO()
    if terminal:
        tracker.output.print(body)
    else:
        shown.write(text.getvalue())
    assert {c for c in shown.getvalue() if not c.isprintable()} <= {"\n"}


def test_an_output_without_unicode_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    shown = Console(rich.console.Console(file=file, force_terminal=False), interval=0.0)
    trainer = stub_trainer()
    shown.on_train_begin(trainer)
    shown.log_metrics(trainer, 1, {"reward/mean": 1.0, "reward/std": 0.5})
    shown.on_evaluate(step=1, metrics={}, samples=[{"prompt": "ä", "output": "\ud800"}])
    assert b"reward  1.00 ? 0.50" in raw.getvalue()


def test_a_loop_that_the_user_drives_has_lines_instead_of_the_table() -> None:
    shown, text = console(terminal=True)
    trainer = stub_trainer()
    trainer.run.learning = False
    shown.log_metrics(trainer, 1, {"loss/total": 1.0})
    shown.on_evaluate(step=1, metrics={"eval/reward": 1.0}, samples=[{"prompt": "a", "output": "b"}])
    shown.on_train_end(trainer)
    assert text.getvalue() == "", "outside a run it is silent"
    shown.on_train_begin(trainer)
    shown.log_metrics(trainer, 11, {"loss/total": 1.0})
    shown.on_evaluate(step=11, metrics={"eval/reward": 1.0}, samples=[])
    assert text.getvalue().splitlines() == [
        "toy  runs/toy", "step 11  loss  1.00", "step 11  evaluation  reward 1.00",
    ]  # fmt: skip


def test_a_loop_that_begins_before_learn_has_an_end_from_when_learn_drives_it(tmp_path: Path) -> None:
    shown, text = console()
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[shown], train__total_steps=2)
    trainer.begin()
    trainer.learn()
    lines = text.getvalue().splitlines()
    assert lines[0] == f"sft  {tmp_path / 'run'}"
    assert [line[:8] for line in lines[1:3]] == ["step 1/2", "step 2/2"]


# ------------------------------------------------------------------------------------------------ the history


def history_of(count: int, *, terminal: bool = False, names: tuple[str, ...] = ("reward",)) -> list[str]:
    shown, text = console(terminal=terminal)
    trainer = stub_trainer()
    trainer.run.learning = not terminal
    shown.on_train_begin(trainer)
    for step in range(count):
        shown.on_evaluate(step=step, metrics={f"eval/{name}": float(step) for name in (*names, "time")}, samples=[])
    text.truncate(0)
    text.seek(0)
    shown.on_train_end(trainer)
    return text.getvalue().splitlines()[:-1]


def test_the_evaluations_stay_in_the_scrollback_of_a_terminal(tmp_path: Path) -> None:
    shown, text = console(terminal=True)
    tiny_trainer("ppo", tmp_path / "run", callbacks=[shown], train__total_steps=4, train__eval_interval=2).learn()
    after = text.getvalue().rpartition("\x1b[?25h")[2].splitlines()  # what is printed when the live table has ended
    rows = [line.split() for line in after if line.strip()]
    assert [row[0] for row in rows] == ["step", "0", "2", "4", "step"]
    logged = [m for m in read(tmp_path / "run" / "metrics.jsonl") if "eval/reward" in m]
    assert [row[1:] for row in rows[1:4]] == [
        [short_number(m["eval/reward"]), short_number(m["eval/length"])] for m in logged
    ]


def test_many_evaluations_are_thinned_out_evenly_with_the_first_and_the_last() -> None:
    head, *rows, note = history_of(58)
    steps = [int(row.split()[0]) for row in rows]
    assert (head.split(), len(steps), steps[0], steps[-1]) == (["step", "reward"], 20, 0, 57)
    assert {after - before for before, after in itertools.pairwise(steps)} == {3}
    assert note == "not shown, in metrics.jsonl: 38 evaluations between these"
    assert len(history_of(20)) == 21, "twenty are shown, and no note"


def test_metrics_that_do_not_fit_a_terminal_are_counted_and_in_a_pipe_all_are_shown() -> None:
    names = tuple(f"metric_number_{index}" for index in range(12))
    lines = history_of(2, terminal=True, names=names)
    assert all(len(line) <= 100 for line in lines)
    assert (len(lines[0].split()), lines[-1]) == (6, "not shown, in metrics.jsonl: 7 metrics")
    assert history_of(2, names=names)[0].split() == ["step", *names]


def test_a_metric_that_an_evaluation_lacks_leaves_its_cell_empty_and_a_resumed_run_keeps_the_history(
    tmp_path: Path,
) -> None:
    changes = {"train__eval_interval": 2, "train__save_interval": 2, "train__resume": "auto"}
    tiny_trainer("ppo", tmp_path / "run", train__total_steps=2, **changes).learn()
    shown, text = console()
    extra = {"metric_fn": lambda outputs, **_: {"more": 1.0}}
    tiny_trainer(
        "ppo", tmp_path / "run", callbacks=[shown], train__total_steps=4, arguments=extra, **changes
    ).learn()  # fmt: skip
    lines = text.getvalue().splitlines()
    table = [line.split() for line in lines[-5:-1]]
    assert [row[0] for row in table] == ["step", "0", "2", "4"]
    assert [len(row) for row in table] == [4, 3, 3, 4]


@table(
    "name, changes, trained",
    [
        ("dpo", {"train__total_steps": 2}, 16),  # of a dataset of more
        ("sft", {"train__epochs": 2, "train__total_steps": None}, 2 * 16),
        ("ppo", {"train__total_steps": 10}, 10 * 8),  # two collections of 16, in four passes each
    ],
)
def test_samples_are_those_that_steps_were_made_on(
    tmp_path: Path, name: str, changes: dict[str, Any], trained: int
) -> None:
    shown, text = console()
    trainer = tiny_trainer(name, tmp_path / "run", callbacks=[shown], **changes)
    trainer.learn()
    assert trainer.progress.trained == trained
    end = text.getvalue().splitlines()[-1]
    assert f"  {trained} samples  " in end
    assert ("  16 pairs" in end) == (name == "dpo")


def test_log_handlers_follow_a_captured_stream_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, other, replacement = io.StringIO(), io.StringIO(), io.StringIO()
    handlers = [logging.StreamHandler(captured), logging.StreamHandler(other)]
    logger = logging.getLogger("trainkit.test_trackers")
    for handler in handlers:
        logger.addHandler(handler)
    monkeypatch.setattr(sys, "stderr", replacement)
    moved = console_module._move_log_handlers([captured])
    logger.warning("hello")
    for handler in handlers:
        logger.removeHandler(handler)
    assert moved == [(handlers[0], captured)]
    assert [stream.getvalue() for stream in (captured, other, replacement)] == ["", "hello\n", "hello\n"]


def test_numbers_counts_times_and_excerpts_are_short() -> None:
    short = {
        0.0: "0.00", 0.834: "0.83", -12.34: "-12.3", 345.6: "346", 4123: "4.1k", 2.5e6: "2.5M", 3e-5: "3e-5",
        -2e-12: "-2e-12", float("nan"): "nan", float("inf"): "inf",
    }  # fmt: skip
    assert {value: short_number(value) for value in short} == short
    assert [count(16.0), count(4123)] == ["16", "4.1k"]
    assert [clock(5), clock(83.4), clock(3723)] == ["0:05", "1:23", "1:02:03"]
    assert excerpt("what is\nit?", "a\tb") == "what is it? → a b"
    cut = excerpt("p" * 100 + "end", "begin" + "o" * 100)
    assert "ppend → begin" in cut, "the end of the prompt and the beginning of the output"
    assert len(cut) <= 24 + 3 + 60


def test_lines_written_after_the_checkpoint_of_a_killed_run_are_not_written_twice(tmp_path: Path) -> None:
    """Killed at step 5, resumed from step 4: the files end like those of a run that never stopped."""

    class Killed(BaseException):
        pass

    class Kill:
        @hookimpl
        def on_step(self, step: int) -> None:
            if step == 5:
                raise Killed

    def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        return [{k: v for k, v in line.items() if "time" not in k} for line in found]

    changes = {
        "train__save_interval": 2,
        "train__eval_interval": 1,
        "rollout__num_rollouts": 8,
        "method__ppo_epochs": 2,
    }
    tiny_trainer("ppo", tmp_path / "straight", **changes).learn()
    with pytest.raises(Killed):
        tiny_trainer("ppo", tmp_path / "killed", callbacks=[Kill()], **changes).learn()
    with (tmp_path / "killed" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "cut o')
    tiny_trainer("ppo", tmp_path / "killed", train__resume="auto", **changes).learn()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert lines(tmp_path / "killed", name) == lines(tmp_path / "straight", name)
