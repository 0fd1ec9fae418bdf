"""The two processes of the kit: they find what this process finds, say why they failed, and never stay.

And launches by accelerate that are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tables import table
from trainkit.errors import ConfigError
from trainkit.plugins import registry
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import CheckError
from trainkit_kit.conformance import Case, all_checks
from trainkit_kit.launching import launch
from trainkit_kit.subjects import Subject

ALONE = """
from trainkit import AccelerateRLTrainer, MethodConfig, register_trainer
from trainkit.functional import nll

class AloneConfig(MethodConfig):
    name: str = "alone"

@register_trainer("alone")
class AloneTrainer(AccelerateRLTrainer[AloneConfig]):
    def make_experience(self, rows):
        return self.encode_samples(rows)

    def loss(self, batch):
        return nll(self.unwrapped(batch).logprobs, batch.response_mask), {}
"""
"""What accelerate has wrapped, and exchanges gradients of, is not what is called."""


@pytest.mark.slow
def test_a_plugin_that_is_only_on_the_path_is_found_and_its_gradients_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "site" / "trainkit_alone-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: trainkit-alone\nVersion: 1.0\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text("[trainkit.trainers]\nalone = trainkit_alone\n", encoding="utf-8")
    (tmp_path / "site" / "trainkit_alone.py").write_text(ALONE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))
    subject = Subject("alone")
    assert subject.installed
    with pytest.raises(CheckError, match=r"do not exchange their gradients; loss must call self\.policy"):
        Case(all_checks()["two_processes"], subject)()


@pytest.mark.slow
def test_what_a_process_fails_by_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"(?s)process 0 ended with 1: .*process 1 ended .*KeyError: 'settings'"):
        launch("sft", tmp_path / "job", {})


def test_processes_that_do_not_end_in_time_are_ended(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"(?s)within 0 s:\nprocess 0 did not end: .*process 1 did not end"):
        launch("sft", tmp_path / "job", {}, 0.0)


@table(
    "variables, said",
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "configured to use FSDP, which would divide the model"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "configured to use DeepSpeed"),
        ({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "True"}, "starts one process, however many"),
        ({"WORLD_SIZE": "2"}, "2 processes were launched"),
    ],
)
def test_a_launch_that_would_not_train_as_it_says_is_refused(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("sft", tmp_path)
