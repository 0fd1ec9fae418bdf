"""What a run was made by is in its checkpoints and in the cards of its exports."""

from __future__ import annotations

import html
import importlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel, PreTrainedTokenizerBase

import trainkit
from trainkit.config import TRLConfig
from trainkit.errors import printable
from trainkit.models import AutoModelForCausalLMWithValueHead, RewardModel
from trainkit.plugins import registry
from trainkit.runs import Record, checkpoint, provenance
from trainkit.runs.card import OURS, _cell, curve, fenced
from trainkit.testing import tiny_t5
from trainkit.testing.trainers import tiny_trainer

PPO = next(p for p in trainkit.plugins.discovery.discover() if p.name == "ppo")
SAVING: dict[str, Any] = {"train__total_steps": 2, "train__save_interval": 1, "train__resume": "auto"}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``install("1.5")``: the plugin fake-watch in that version, in the place of another."""

    def install(version: str) -> None:
        home = tmp_path / "site"
        shutil.rmtree(home, ignore_errors=True)
        info = home / f"fake_watch-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-watch\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[trainkit.hooks]\nfake-watch = fake_watch\n")
        (home / "fake_watch.py").write_text("import trainkit\n@trainkit.hookimpl\ndef on_step(): pass\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path / "site")
    yield install
    sys.modules.pop("fake_watch", None)


EVIL = ["<script>alert(1)</script>", "</table>", "a|b", "[x](http://y)", "![x](y)", "*b*", "_b_", "`c`", "\\|", "&lt;"]


def saved_makers(run_dir: Path) -> Any:
    path = checkpoint.newest_whole(run_dir / "checkpoints")
    assert path is not None
    return checkpoint.read_state(path, "loop")["makers"]


def resumed(run_dir: Path, name: str = "sft", **changes: Any) -> list[str]:
    """What a run says of the checkpoint that it goes on from, after the line about where it is."""
    trainer = tiny_trainer(name, run_dir, **{**SAVING, "train__total_steps": 3, **changes})
    trainer.learn()
    assert trainer.done
    return list(trainer.run.resumption.messages[1:])


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_records_trainkit_and_the_plugins_with_distribution_and_version(
    install: Callable[[str], None], tmp_path: Path
) -> None:
    install("1.5")
    tiny_trainer("ppo", tmp_path / "run", **SAVING, plugins=["Fake-Watch"]).learn()
    assert saved_makers(tmp_path / "run") == [
        {"name": "trainkit", "distribution": "trainkit-rl", "version": trainkit.__version__},
        {"name": "ppo", "distribution": "trainkit-ppo", "version": PPO.version},
        {"name": "fake-watch", "distribution": "fake-watch", "version": "1.5"},
    ]


def test_resuming_with_another_version_of_a_plugin_says_so_and_goes_on(
    install: Callable[[str], None], tmp_path: Path
) -> None:
    install("1.5")
    tiny_trainer("sft", tmp_path / "run", **SAVING, plugins=["fake-watch"]).learn()
    install("2.0")
    said = resumed(tmp_path / "run", plugins=["fake-watch"])
    assert said == ["  changed: plugin fake-watch: fake-watch 1.5 -> fake-watch 2.0"]
    assert resumed(tmp_path / "run", plugins=["fake-watch"]) == [], "the newest checkpoint is of the new version"


def test_resuming_without_a_plugin_or_with_one_more_says_so(install: Callable[[str], None], tmp_path: Path) -> None:
    install("1.5")
    tiny_trainer("sft", tmp_path / "run", **SAVING).learn()
    assert resumed(tmp_path / "run", plugins=["fake-watch"]) == [
        "  changed: plugin fake-watch: not in that run -> fake-watch 1.5"
    ]
    assert resumed(tmp_path / "run", train__total_steps=4) == [
        "  changed: plugin fake-watch: fake-watch 1.5 -> not in this run"
    ]


def test_resuming_with_another_version_of_trainkit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__version__", "0.1.99")
    tiny_trainer("sft", tmp_path / "run", **SAVING).learn()
    monkeypatch.undo()
    assert resumed(tmp_path / "run") == [
        f"  changed: trainkit: trainkit-rl 0.1.99 -> trainkit-rl {trainkit.__version__}"
    ]


def test_a_trainer_of_a_notebook_is_recorded_without_a_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft: Any = trainkit.get_trainer("sft")
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))

    class NotebookConfig(sft.method_class):  # type: ignore[misc]
        name: str = "notebook"

    class NotebookTrainer(sft):  # type: ignore[misc]
        pass

    NotebookTrainer.method_class = NotebookConfig
    trainkit.register_trainer("notebook")(NotebookTrainer)
    tiny_trainer("notebook", tmp_path / "run", **SAVING).learn()
    assert saved_makers(tmp_path / "run")[1] == {"name": "notebook", "distribution": None, "version": None}
    assert "| plugin notebook | no distribution |" in (tmp_path / "run" / "model" / "README.md").read_text()


def test_a_checkpoint_without_the_record_is_resumed_from_and_said_to_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = checkpoint.write_state

    def without_record(directory: Path, name: str, state: dict[str, Any]) -> None:
        honest(directory, name, {key: value for key, value in state.items() if key != "makers"})

    monkeypatch.setattr(checkpoint, "write_state", without_record)
    tiny_trainer("sft", tmp_path / "run", **SAVING).learn()
    monkeypatch.undo()
    assert resumed(tmp_path / "run") == ["  changed: the checkpoint does not record which plugins it was made with"]


# ---------------------------------------------------------------------------------------------------------- cards


def section(card: str, title: str) -> dict[str, str]:
    """The rows of the table under a heading."""
    (body,) = (part for part in card.split("\n## ")[1:] if part.startswith(title))
    rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def block(card: str, language: str) -> str:
    return card.partition(f"```{language}\n")[2].partition("\n```")[0]


def loaded(directory: Path) -> dict[str, Any]:
    """What the card's code makes."""
    found: dict[str, Any] = {"directory": str(directory)}
    exec(block((directory / "README.md").read_text(encoding="utf-8"), "python"), found)
    return found


def test_a_card_says_what_made_the_model_and_reads_on_the_hub(install: Callable[[str], None], tmp_path: Path) -> None:
    install("1.5")
    trainer = tiny_trainer(
        "ppo", tmp_path / "run", plugins=["fake-watch"], train__total_steps=2, train__eval_interval=2
    )
    trainer.learn()
    card = ModelCard.load(tmp_path / "run" / "model" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["trainkit", "ppo"],
    }
    made = section(card.text, "Provenance")
    assert made["plugin ppo"] == f"trainkit-ppo {PPO.version}"
    assert made["plugin fake-watch"] == "fake-watch 1.5"
    assert made["trainkit"] == trainkit.__version__
    assert (made["steps"], made["samples"]) == ("2", "16")
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reward = next(line["eval/reward"] for line in reversed(logged) if "eval/reward" in line)
    numbers = section(card.text, "The last evaluation, after step 2")
    assert numbers == {"length": numbers["length"], "reward": f"{reward:.4g}"}, "and no times"
    config = TRLConfig.from_dict(yaml.safe_load(block(card.text, "yaml")))
    assert config == trainer.config.update({"train.run_dir": None})


def test_a_card_says_nothing_of_the_machine_or_of_who_ran_it(tmp_path: Path) -> None:
    secrets = {"token": "hf_secret", "cache_dir": "/home/me"}
    trainer = tiny_trainer("sft", tmp_path / "run", tokenizer__kwargs=secrets, train__resume="auto")
    card = (trainer.save_pretrained() / "README.md").read_text()
    for private in (str(tmp_path), "hf_secret", "/home/me", "run_dir", "resume"):
        assert private not in card


def test_equal_runs_have_equal_cards(tmp_path: Path) -> None:
    cards = []
    for place in ("here", "there"):
        trainer = tiny_trainer("sft", tmp_path / place, train__total_steps=2, train__eval_interval=1)
        trainer.learn()
        cards.append((tmp_path / place / "model" / "README.md").read_bytes())
    assert cards[0] == cards[1]


def test_the_last_evaluation_survives_a_restart(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**SAVING, "train__eval_interval": 2}
    tiny_trainer("ppo", tmp_path / "run", **changes).learn()
    before = (tmp_path / "run" / "model" / "README.md").read_bytes()
    shutil.rmtree(tmp_path / "run" / "model")
    tiny_trainer("ppo", tmp_path / "run", **changes).learn()
    assert (tmp_path / "run" / "model" / "README.md").read_bytes() == before


def test_a_card_shows_the_main_metric_over_the_run(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path / "run", train__total_steps=4, train__eval_interval=2)
    trainer.add_eval_pipeline(["a", "b"])
    trainer.learn()
    rewards = Record(tmp_path / "run").series["eval/reward"]
    assert list(rewards) == [0, 2, 4]
    table = "\n".join(f"| {step} | {value:.4g} |" for step, value in rewards.items())
    assert (
        f"## Training: eval/reward by step\n\n{curve([*rewards.values()])}\n\n| | |\n|---|---|\n{table}\n"
        in (tmp_path / "run" / "model" / "README.md").read_text()
    )


def test_a_curve_is_a_line_of_bars() -> None:
    assert curve([0.0, 2.0, math.nan, 1.0]) == "`▁█▅` from 0 (lowest) to 2 (highest bar)"
    assert curve([1.0, 1.0]) == ""
    long = [float(step) for step in range(1000)]
    assert curve(long).split("`")[1] == "".join(sorted(curve(long).split("`")[1]))
    assert 40 <= len(curve(long).split("`")[1]) <= 48


def test_every_start_of_a_run_is_recorded_with_its_versions(tmp_path: Path) -> None:
    tiny_trainer("sft", tmp_path, **SAVING).learn()
    tiny_trainer("sft", tmp_path, **{**SAVING, "train__total_steps": 4}).learn()
    tiny_trainer("sft", tmp_path, **{**SAVING, "train__total_steps": 4}).learn()  # there is nothing left to do
    starts = Record(tmp_path).starts
    assert [start["step"] for start in starts] == [0, 2]
    assert starts[0]["versions"]["torch"] == version("torch")
    assert starts[0]["makers"][0] == {
        "name": "trainkit",
        "distribution": "trainkit-rl",
        "version": trainkit.__version__,
    }
    assert (starts[0]["device"], starts[0]["processes"]) == ("cpu", 1)


def test_the_code_of_a_card_loads_a_language_model_and_its_value_head(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path / "run")
    found = loaded(trainer.save_pretrained())
    assert isinstance(found["model"], GPT2LMHeadModel)
    assert isinstance(found["tokenizer"], PreTrainedTokenizerBase)
    assert isinstance(found["critic"], AutoModelForCausalLMWithValueHead)
    assert "critic" not in loaded(tiny_trainer("sft", tmp_path / "sft").save_pretrained())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_the_code_of_a_card_loads_an_adapter_over_its_base(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", model__peft_config={"r": 2})
    directory = trainer.save_pretrained()
    assert ModelCard.load(directory / "README.md").data.library_name == "peft"
    assert loaded(directory)["model"].active_adapters == ["default"]


@pytest.mark.slow
def test_the_code_of_a_card_loads_a_reward_model(tmp_path: Path) -> None:
    directory = tiny_trainer("reward", tmp_path / "run").save_pretrained()
    assert isinstance(loaded(directory)["reward_fn"], RewardModel)
    assert "pipeline_tag" not in ModelCard.load(directory / "README.md").data.to_dict()


@pytest.mark.slow
def test_the_code_of_a_card_loads_an_encoder_decoder(tmp_path: Path) -> None:
    directory = tiny_trainer("sft", tmp_path / "run", model=tiny_t5(10)).save_pretrained()
    assert loaded(directory)["model"].config.is_encoder_decoder


@pytest.mark.slow
def test_the_code_of_a_card_loads_an_image_model(tmp_path: Path) -> None:
    trainer = tiny_trainer("ddpo", tmp_path / "run")
    directory = trainer.save_pretrained()
    assert type(loaded(directory)["pipeline"]) is type(trainer.unwrapped.pipeline)
    assert ModelCard.load(directory / "README.md").data.pipeline_tag == "text-to-image"


def test_a_model_of_the_hub_is_named_as_the_base_and_a_directory_is_not(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run")
    first = trainer.save_pretrained(tmp_path / "first")
    model = GPT2LMHeadModel.from_pretrained(first)
    for name, base in (("somebody/tiny-gpt2", "somebody/tiny-gpt2"), (str(first), None), ("", None)):
        trainer.live_model = model
        model.name_or_path = name
        assert ModelCard.load(trainer.save_pretrained(tmp_path / "second") / "README.md").data.base_model == base


def test_a_card_that_somebody_wrote_stays_and_one_of_ours_is_written_anew(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", train__total_steps=1)
    directory = trainer.save_pretrained(tmp_path / "out")
    assert OURS in (directory / "README.md").read_text()
    trainer.learn()
    trainer.save_pretrained(directory)
    assert section((directory / "README.md").read_text(), "Provenance")["steps"] == "1"
    (directory / "README.md").write_text("# My model\n")
    trainer.save_pretrained(directory)
    assert (directory / "README.md").read_text() == "# My model\n"


def test_a_configuration_cannot_end_its_block() -> None:
    text = "template: |\n  ```\n  ````python\n"
    assert fenced(text, "yaml") == f"`````yaml\n{text.rstrip()}\n`````\n"


@given(st.text(alphabet=st.characters(exclude_characters=" "), min_size=1) | st.sampled_from(EVIL))
def test_what_a_card_is_told_has_no_effect_as_markup_or_html(text: str) -> None:
    """Rendered as GitHub and the hub do, a cell shows its characters and nothing else."""
    cell = _cell(text)
    shown = " ".join(printable(text).split())
    assert html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell)) == shown
    assert not re.search(r"[<>]|(?<!\\)[|`*\[\]~!#$]|&(?!(amp|lt|gt);)", re.sub(r"\\\\", "", cell))
    assert cell.isprintable()


def test_metrics_cannot_write_into_the_card_of_a_model(tmp_path: Path) -> None:
    names = [*EVIL, "two\nlines\n# heading", "red\x1b[31m"]
    trainer = tiny_trainer(
        "ppo", tmp_path / "run", train__total_steps=2, train__eval_interval=2,
        arguments={"metric_fn": lambda outputs, **_: dict.fromkeys(names, 1.0)},
    )  # fmt: skip
    trainer.learn()
    trainer.progress.stop_reason = "</td><img src=x>"
    card = (trainer.save_pretrained() / "README.md").read_text(encoding="utf-8")
    outside = card.replace(OURS, "").replace(block(card, "yaml"), "")
    assert "<" not in outside
    assert "\n# heading" not in card
    assert "\x1b" not in card
    assert r"| \[x\](http://y) | 1 |" in card
    assert r"| a\|b | 1 |" in card
    assert "| &lt;script&gt;alert(1)&lt;/script&gt; | 1 |" in card
    assert "| ended early | &lt;/td&gt;&lt;img src=x&gt; |" in card
