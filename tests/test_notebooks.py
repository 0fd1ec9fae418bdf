"""What a notebook shows: trainers, histories, responses and errors, in a real shell of IPython."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from trainkit.errors import TRACEBACK, ConfigError
from trainkit.runs.history import COLUMNS, ROWS, History
from trainkit.testing.trainers import tiny_trainer

EVIL = "<script>alert(1)</script>&"


class Cells(HTMLParser):
    """The rows of a table, and every element in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.open = tag
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.open in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = tiny_trainer("rloo", tmp_path_factory.mktemp("notebook") / "run", train__eval_interval=2)
    trainer.learn()
    return trainer


def test_a_history_has_every_metric_of_the_run(trained: Any) -> None:
    lines = [json.loads(line) for line in (trained.run_dir / "metrics.jsonl").read_text().splitlines()]
    frame = trained.history.to_pandas()
    assert list(frame.index) == trained.history.steps == [0, 1, 2, 3, 4, 5, 6]
    assert frame.index.name == "step"
    recorded = {(line["step"], name): value for line in lines for name, value in line.items() if name != "step"}
    assert {(step, name) for name in frame for step in frame.index[frame[name].notna()]} == recorded.keys()
    assert all(frame[name][step] == value for (step, name), value in recorded.items())
    assert repr(trained.history) == f"History({len(frame.columns)} metrics, steps 0 to 6)"


def test_a_notebook_shows_the_evaluations_of_a_history(trained: Any) -> None:
    shown = Cells(trained.history._repr_html_())
    assert shown.rows[0][:2] == ["step", "eval/reward"]
    evaluated = trained.history["eval/reward"]
    assert [row[:2] for row in shown.rows[1:]] == [[str(step), f"{value:.4g}"] for step, value in evaluated.items()]
    assert len(evaluated) == 4


def test_a_history_shows_the_newest_metrics_where_nothing_is_evaluated() -> None:
    series = {
        name: {step: float(step) for step in range(1, 100)} for name in ("time/x", "loss/total", *map(str, range(9)))
    }
    rows = Cells(History(series)._repr_html_()).rows
    assert rows[0][:2] == ["step", "loss/total"]
    assert [len(row) for row in rows] == [1 + COLUMNS] * (1 + ROWS)
    assert rows[-1][0] == "99"
    assert "History(0 metrics)" in History({})._repr_html_()
    assert History({}).to_pandas().empty
    with pytest.raises(ConfigError, match="no metrics yet to plot"):
        History({}).plot()


def test_a_plot_has_a_chart_of_every_metric(trained: Any) -> None:
    charts = trained.history.plot().axes
    assert [chart.get_title() for chart in charts] == ["eval/reward", "reward/mean", "loss/total", "policy/kl"]
    assert dict(charts[0].lines[0].get_xydata().tolist()) == trained.history["eval/reward"]
    assert len(trained.history.plot("loss/total").axes) == 1
    with pytest.raises(ConfigError, match=r"no metric is called 'loss/totl'.*did you mean 'loss/total'"):
        trained.history.plot("loss/totl")


def test_a_notebook_shows_where_a_trainer_is(trained: Any, tmp_path: Path) -> None:
    facts = dict(Cells(trained._repr_html_()).rows)
    assert facts["method"] == "rloo"
    assert facts["run"] == str(trained.run_dir)
    assert (facts["step"], facts["state"]) == ("6 of 6", "done")
    assert facts["eval/reward"] == f"{trained.progress.evaluation['eval/reward']:.4g}"
    assert "evaluated after step 6" in facts

    fresh = tiny_trainer("sft", tmp_path / EVIL.replace("/", ""))
    assert dict(Cells(fresh._repr_html_()).rows)["state"] == "not begun"
    assert "script" not in Cells(fresh._repr_html_()).tags
    assert "unwrapped" not in vars(fresh), "showing it loads no model"
    assert len(fresh.history) == 0
    assert not (tmp_path / EVIL.replace("/", "")).exists()


def test_a_notebook_watches_a_run_from_before_its_first_step(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path / "run", train__total_steps=2)
    page = trainer.watch()
    try:

        def read() -> str:
            with urlopen(page.url) as answer:
                return str(answer.read().decode())

        assert page.url in page._repr_html_()
        assert "there is no directory" in read()
        trainer.learn()
        assert "2 of 2" in read()
    finally:
        page.close()
    with pytest.raises(ConfigError, match=r"set train\.run_dir"):
        tiny_trainer("rloo", tmp_path / "run", train__run_dir=None).watch()


def test_a_notebook_shows_responses_as_a_table(trained: Any) -> None:
    rollouts = trained.generate(["a", "bc"])
    rows = Cells(rollouts._repr_html_()).rows
    assert rows[0] == ["prompt", "output", "ended"]
    assert [row[:2] for row in rows[1:]] == [
        list(pair) for pair in zip(rollouts.prompts, rollouts.outputs, strict=True)
    ]
    assert {row[2] for row in rows[1:]} <= {"yes", "truncated"}
    evil = replace(rollouts, outputs=[EVIL, "two\nlines" + "x" * 10_000])
    shown = Cells(evil._repr_html_())
    assert "script" not in shown.tags
    assert shown.rows[1][1] == EVIL
    assert shown.rows[2][1].startswith("two\nlines")
    assert len(shown.rows[2][1]) == 2000
    many = trained.generate(["a"] * 25)
    assert "the first 20 of 25 responses" in many._repr_html_()
    assert len(Cells(many._repr_html_()).rows) == 21


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv(TRACEBACK, "0")
    made = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}), colors="nocolor")
    yield made
    made.restore_sys_module_state()
    InteractiveShell.clear_instance()


def shown(shell: Any, cell: str) -> str:
    from IPython.utils.capture import capture_output

    with capture_output() as captured:
        shell.run_cell(cell)
    return captured.stdout + captured.stderr


def test_an_error_in_a_cell_is_one_paragraph_with_the_line_of_the_cell(shell: Any) -> None:
    cell = "import trainkit\n\ndef begin():\n    return trainkit.train('gpt2', method='sft')\n\nbegin()"
    assert shown(shell, cell).splitlines() == [
        "line 6: begin()",
        "line 4 in begin: return trainkit.train('gpt2', method='sft')",
        "ConfigError: there is nothing to learn from; give reward_fn with prompts, an environment, samples with "
        "rewards, or samples",
    ]
    shell.run_cell("import os; os.environ['TRAINKIT_TRACEBACK'] = '1'", silent=True)
    assert "_check_combination" in shown(shell, "%tb")
    assert "_check_combination" in shown(shell, cell)


def test_an_error_of_a_reward_function_in_a_cell_names_its_line(shell: Any, tmp_path: Path) -> None:
    shell.user_ns["path"] = tmp_path / "run"
    told = shown(
        shell,
        "from trainkit.testing.trainers import tiny_trainer\n"
        "trainer = tiny_trainer('rloo', path)\n"
        "def pay(outputs, **_):\n"
        "    return [1 / 0 for _ in outputs]\n"
        "trainer.reward_fn = pay\n"
        "trainer.learn()\n",
    ).splitlines()
    at = told.index("line 6: trainer.learn()")
    assert told[at + 1].startswith("line 4 in pay: return [1 / 0 for _ in outputs]")
    assert told[-2].startswith("RewardError: ")
    assert "ZeroDivisionError: division by zero" in told[-2]
    assert told[-1] == "(%env TRAINKIT_TRACEBACK=1, and %tb, show the traceback)"


def test_a_cell_shows_a_trainer_by_its_table(shell: Any, trained: Any) -> None:
    shell.user_ns["trainer"] = trained
    formats, _ = shell.display_formatter.format(trained)
    assert formats["text/html"] == trained._repr_html_()
