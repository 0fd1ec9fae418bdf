"""Hooks in a run: an observer that raises is named, may be optional, and keeps no other from hearing of the end."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from trainkit import hookimpl
from trainkit.errors import HookError, NonFiniteError, PluginError
from trainkit.plugins import hook_manager
from trainkit.testing.trainers import tiny_trainer

OBSERVER = """
from trainkit import hookimpl
optional = {optional}
heard = []

{hooks}
"""
HOOK = """
@hookimpl
def {hook}({arguments}):
    heard.append("{hook}")
    {body}
"""

Observe = Callable[..., tuple[dict[str, Any], list[str], str]]


@pytest.fixture(params=["plugin", "callback"])
def observe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observe]:
    """``observe(on_step="1 / 0")``: what makes `tiny_trainer` have an observer with these hooks, what it hears, and
    how errors call it. The hooks are a plugin's, installed as an installer leaves it, or a callback's."""

    def observe(*, optional: bool = False, **bodies: str) -> tuple[dict[str, Any], list[str], str]:
        hooks = "".join(HOOK.format(hook=h, arguments="trainer", body=b) for h, b in bodies.items())
        home = tmp_path / "site"
        info = home / "fake_watch-1.5.dist-info"
        info.mkdir(parents=True)
        kind = "samplers" if "make_sampler" in bodies else "hooks"
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-watch\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[trainkit.{kind}]\nfake-watch = fake_watch\n")
        (home / "fake_watch.py").write_text(OBSERVER.format(optional=optional, hooks=hooks))
        monkeypatch.syspath_prepend(home)
        importlib.invalidate_caches()
        if request.param == "plugin":
            module = importlib.import_module("fake_watch")
            name = "plugin fake-watch (fake-watch 1.5, module fake_watch)"
            return {"plugins": ["fake-watch"]}, module.heard, name
        module = importlib.import_module("fake_watch")
        methods = {hook: staticmethod(getattr(module, hook)) for hook in bodies}
        watch = type("Watch", (), {"optional": optional, **methods})
        return {"callbacks": [watch()]}, module.heard, "callback Watch"

    yield observe
    sys.modules.pop("fake_watch", None)


class Hears:
    """A callback that remembers of what it was told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    @hookimpl
    def on_step(self, step: int) -> None:
        self.heard.append(f"step {step}")

    @hookimpl
    def on_train_end(self) -> None:
        self.heard.append("end")


def test_an_observer_that_raises_stops_the_run_with_its_name_hook_step_and_cause(
    observe: Observe, tmp_path: Path
) -> None:
    how, _, name = observe(on_step="if trainer.progress.step == 2: {}['missing']")
    trainer = tiny_trainer("sft", tmp_path / "run", **how)
    with pytest.raises(PluginError) as caught:
        trainer.learn()
    place = "module" if name.startswith("plugin") else "class"
    assert str(caught.value) == (
        f"the hook on_step of {name} failed at step 2: KeyError: 'missing'. Repair it, remove it, or write "
        f"optional = True in its {place}: runs then go on without it"
    )
    assert type(caught.value.__cause__) is KeyError
    assert trainer.progress.step == 2


def test_an_optional_observer_that_raises_is_said_once_told_nothing_more_and_the_run_goes_on(
    observe: Observe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tiny_trainer("sft", tmp_path / "plain")
    plain.learn()
    how, heard, name = observe(optional=True, on_train_begin="pass", on_step="1 / 0", on_train_end="pass")
    trainer = tiny_trainer("sft", tmp_path / "run", **how)
    trainer.learn()
    assert heard == ["on_train_begin", "on_step"]
    assert trainer.done
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == [
        f"the hook on_step of {name} failed at step 1: ZeroDivisionError: division by zero. It is optional: the "
        "run goes on and does not call it again"
    ]
    for one, other in zip(plain.unwrapped.parameters(), trainer.unwrapped.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("observe", ["plugin"], indirect=True)
def test_a_provider_that_raises_stops_the_run_also_where_it_is_optional(observe: Observe, tmp_path: Path) -> None:
    how, heard, name = observe(optional=True, on_train_begin="1 / 0", make_sampler="raise OSError('no server')")
    trainer = tiny_trainer("ppo", tmp_path / "run", **how)
    with pytest.raises(HookError, match=r"make_sampler of .*OSError: no server\. .* is never optional") as caught:
        trainer.learn()
    assert name in str(caught.value)
    assert heard == ["on_train_begin", "make_sampler"], "that it is not told anything more does not change the sampler"


@pytest.mark.parametrize("observe", ["callback"], indirect=True)
def test_all_others_hear_of_the_end_when_one_fails_then_and_the_directory_is_let_go(
    observe: Observe, tmp_path: Path
) -> None:
    how, _, name = observe(on_train_end="raise OSError('gone')")
    before, after = Hears(), Hears()
    callbacks = [before, *how.pop("callbacks", []), after]
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=callbacks, **how)
    with pytest.raises(HookError, match=r"on_train_end of .* failed at step 6: OSError: gone") as caught:
        trainer.learn()
    assert name in str(caught.value)
    assert before.heard[-1] == after.heard[-1] == "end"
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.parametrize("observe", ["callback"], indirect=True)
def test_an_error_of_the_run_is_not_hidden_by_one_of_the_end(
    observe: Observe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how, _, name = observe(on_train_end="raise OSError('gone')")
    trainer = tiny_trainer("sft", tmp_path / "run", **how)
    honest = trainer.loss
    trainer.loss = lambda batch: (honest(batch)[0] * torch.nan, honest(batch)[1])
    with pytest.raises(NonFiniteError):
        trainer.learn()
    assert f"the hook on_train_end of {name} failed at step 0: OSError: gone" in caplog.text


@pytest.mark.parametrize("observe", ["plugin"], indirect=True)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_passes_through_an_optional_observer(
    stop: type[BaseException], observe: Observe, tmp_path: Path
) -> None:
    how, heard, _ = observe(optional=True, on_step=f"raise {stop.__name__}", on_train_end="pass")
    with pytest.raises(stop):
        tiny_trainer("sft", tmp_path / "run", **how).learn()
    assert heard == ["on_step", "on_train_end"]


def test_an_observer_that_sets_another_off_is_not_blamed_for_its_error(tmp_path: Path) -> None:
    class Asks:
        optional = True

        @hookimpl
        def on_step(self, trainer: Any) -> None:
            trainer.evaluate()

    class Fails:
        @hookimpl
        def on_evaluate(self) -> None:
            raise ValueError("no")

    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[Asks(), Fails()])
    with pytest.raises(HookError, match=r"^the hook on_evaluate of callback Fails failed at step 1: ValueError: no"):
        trainer.learn()


@pytest.mark.parametrize("observe", ["callback"], indirect=True)
@pytest.mark.parametrize("optional", [True, False])
def test_an_observer_that_raises_a_hook_error_of_its_own_is_named_and_may_be_optional(
    optional: bool, observe: Observe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how, heard, name = observe(
        optional=optional, on_step="from trainkit.errors import HookError; raise HookError('mine') from OSError('x')"
    )
    trainer = tiny_trainer("sft", tmp_path / "run", **how)
    told = f"the hook on_step of {name} failed at step 1: HookError: mine. "
    if optional:
        trainer.learn()
        assert trainer.done
        assert heard == ["on_step"]
        assert told in caplog.text
    else:
        with pytest.raises(HookError) as caught:
            trainer.learn()
        assert str(caught.value).startswith(told)


def test_a_wrapper_around_the_hooks_of_others_is_refused() -> None:
    class Around:
        @trainkit.hookimpl(wrapper=True)
        def make_sampler(self) -> Iterator[None]:
            yield

    with pytest.raises(PluginError, match=r"make_sampler of callback Around is a wrapper .* mark it with @trainkit"):
        hook_manager([], [Around()])


def test_a_callback_need_not_be_hashable() -> None:
    @dataclass
    class Counts:
        steps: int = 0

        @hookimpl
        def on_step(self) -> None:
            self.steps += 1

    counts = Counts()
    hook_manager([], [counts]).hook.on_step(trainer=None, step=1)
    assert counts.steps == 1


def test_optional_is_true_or_false() -> None:
    class Perhaps(Hears):
        optional = "perhaps"

    with pytest.raises(PluginError, match=r"optional of callback Perhaps .* True or False, and is 'perhaps' \(str\)"):
        hook_manager([], [Perhaps()])


def test_an_observer_that_changes_the_metrics_it_is_told_changes_nothing_else(tmp_path: Path) -> None:
    class Forges:
        @hookimpl
        def log_metrics(self, metrics: dict[str, float]) -> None:
            metrics.clear()

        @hookimpl
        def on_evaluate(self, metrics: dict[str, float]) -> None:
            metrics["eval/reward"] = 99.0

    trainer = tiny_trainer("ppo", tmp_path / "run", callbacks=[Forges()], train__save_best=True, train__eval_interval=3)
    trainer.learn()
    assert trainer.progress.best <= 6, "a letter of at most 6 counts 1"
    assert trainer.progress.evaluation["eval/reward"] <= 6
    assert trainer.evaluate()["eval/reward"] <= 6
