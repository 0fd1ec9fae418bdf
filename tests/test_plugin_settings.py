"""Plugins with settings: validated with the configuration, recorded, given to an object per run with a state."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainkit.cli import app
from trainkit.config import PluginConfig, TRLConfig
from trainkit.errors import CheckpointError, ConfigError, PluginError, RegistryError
from trainkit.plugins import (
    available_trainers,
    discovery,
    get_hooks,
    hook_manager,
    hookimpl,
    register_hooks,
    register_tracker,
    registry,
)
from trainkit.plugins.probe import probe
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import check_plugin

SOURCE = """
from pydantic import Field
from trainkit import PluginConfig, hookimpl, register_hooks, register_tracker

class CountsConfig(PluginConfig):
    \"\"\"What is counted.\"\"\"

    every: int = Field(2, ge=1)
    \"\"\"Count only steps that this divides.\"\"\"
    label: str = "steps"
    \"\"\"A name for them.\"\"\"

@register_hooks("fake-counts", CountsConfig)
class Counts:
    def __init__(self, settings):
        self.settings, self.counted = settings, 0

    @hookimpl
    def on_step(self, step):
        self.counted += step % self.settings.every == 0

    def state_dict(self):
        return {"counted": self.counted}

    def load_state_dict(self, state):
        self.counted = state["counted"]

class KeepsConfig(PluginConfig):
    \"\"\"What is kept.\"\"\"

    prefix: str
    \"\"\"Which metrics.\"\"\"

@register_tracker("fake-keeps", KeepsConfig)
class Keeps:
    def __init__(self, settings):
        self.settings, self.kept = settings, []

    @hookimpl
    def log_metrics(self, step, metrics):
        self.kept += [(step, name) for name in metrics if name.startswith(self.settings.prefix)]

@register_hooks("fake-plain")
class Plain:
    @hookimpl
    def on_step(self): ...
"""
KINDS = {"fake-counts": "hooks", "fake-keeps": "tracker", "fake-plain": "hooks"}
NAMES = (*KINDS,)


@pytest.fixture
def counts(install: Callable[..., Path]) -> Iterator[Path]:
    """An installed distribution with three plugins in one module: hooks and a tracker with settings, plain hooks."""
    yield install("fake-house", dict.fromkeys(NAMES, "fake_house"), SOURCE, "1.5", kind=KINDS)
    sys.modules.pop("fake_house", None)
    for name in NAMES:
        registry._HOOKS.pop(name, None)


@pytest.fixture(autouse=True)
def _registered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_HOOKS", dict(registry._HOOKS))


def config(plugins: Any = (), trackers: Any = ()) -> TRLConfig[Any]:
    return TRLConfig.from_dict({"method": "sft", "plugins": list(plugins), "train": {"trackers": list(trackers)}})


def faults(plugins: Any = (), trackers: Any = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(plugins, trackers)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# ------------------------------------------------------------------------------------------------- configuration


def test_settings_have_defaults_are_plain_data_and_come_back(counts: Path, tmp_path: Path) -> None:
    made = config(["fake-counts", "fake-plain"], [{"name": "fake-keeps", "prefix": "loss/"}, "tensorboard"])
    assert made.to_dict()["plugins"] == [{"name": "fake-counts", "every": 2, "label": "steps"}, "fake-plain"]
    assert made.to_dict()["train"]["trackers"] == [{"name": "fake-keeps", "prefix": "loss/"}, "tensorboard"]
    made.save_yaml(tmp_path / "config.yaml")
    assert TRLConfig.load_yaml(tmp_path / "config.yaml") == made == TRLConfig.from_dict(made.to_dict())
    assert made.evolve(train={"seed": 3}).plugins == made.plugins
    assert config([made.plugins[0]]).plugins == [made.plugins[0]], "an object of the class of settings is an entry"
    assert config([{"name": "FAKE-Counts", "every": 3}]).plugins[0].name == "fake-counts"  # type: ignore[union-attr]
    assert config([{"name": "fake-plain"}]).plugins == ["fake-plain"]


def test_every_fault_names_the_plugin_its_setting_what_was_given_and_what_is_allowed(counts: Path) -> None:
    found = faults(
        [{"name": "fake-counts", "every": 0}, {"name": "fake-plain", "x": 1, "y": 2}, {"every": 1}, 7, "fake-count"],
        [
            {"name": "fake-keeps"},
            {"name": "fake-keeps", "prefix": "a", "prefx": "b"},
            {"name": "tensorboard", "project": "p"},
        ],
    )
    given = "should be a plugin's name, or a mapping with its 'name' and settings"
    assert found[:3] == [
        "train.trackers.0 (fake-keeps).prefix: required, not given",
        "train.trackers.1 (fake-keeps).prefx: unknown field; did you mean 'prefix'? (given 'b' (str); known: name, "
        "prefix)",
        "train.trackers.2: 'tensorboard' has no settings; remove 'project' "
        "(given {'name': 'tensorboard', 'project': 'p'} (dict))",
    ]
    assert found[3:7] == [
        "plugins.0 (fake-counts).every: should be greater than or equal to 1 (given 0 (int))",
        "plugins.1: 'fake-plain' has no settings; remove 'x', 'y' "
        "(given {'name': 'fake-plain', 'x': 1, 'y': 2} (dict))",
        f"plugins.2: {given} (given {{'every': 1}} (dict))",
        f"plugins.3: {given} (given 7 (int))",
    ]
    assert found[7].startswith("plugins.4: no plugin 'fake-count' is installed; did you mean 'fake-counts'?")


def test_a_plugin_in_the_wrong_place_is_told_where_it_belongs(counts: Path) -> None:
    assert faults(["fake-keeps"], ["fake-counts", "sft"]) == [
        "train.trackers.0: 'fake-counts' is no tracker; name it in plugins (given 'fake-counts' (str))",
        "train.trackers.1: 'sft' is an algorithm; name it in method (given 'sft' (str))",
        "plugins.0: 'fake-keeps' is a tracker; name it in train.trackers (given 'fake-keeps' (str))",
    ]


def test_a_plugin_is_named_once_or_equally(counts: Path) -> None:
    assert len(config(["fake-counts", {"name": "fake-counts", "every": 2}, "fake-plain", "fake-plain"]).plugins) == 2
    (told,) = faults(["fake-counts", {"name": "fake-counts", "every": 3}])
    assert told.startswith("plugins: 'fake-counts' is named twice with different settings; name it once")


def test_an_unusable_plugin_with_settings_is_an_error_with_its_reason(install: Callable[..., Path]) -> None:
    install("fake-bad", {"fake-bad": "fake_bad"}, "1 / 0", "0.3", kind="hooks")
    with pytest.raises(PluginError, match=r"plugin fake-bad \(fake-bad 0\.3, .* ZeroDivisionError"):
        config([{"name": "fake-bad", "x": 1}])


def test_a_disabled_plugin_keeps_its_settings_and_the_run_goes_on_without_it(
    counts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = {"plugins": [{"name": "fake-counts", "evry": 3}], "trackers": [{"name": "fake-keeps"}, "tensorboard"]}
    with discovery.disabled(["fake-house"], "--no-plugin"):
        made = config(**entries)
        assert made.to_dict()["plugins"] == entries["plugins"], "it cannot be validated"
        trainer = tiny_trainer(
            "sft", tmp_path, plugins=entries["plugins"], train__trackers=entries["trackers"], train__total_steps=1
        )
    assert trainer.config.plugins == []
    assert trainer.config.train.trackers == ["tensorboard"]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [
        f"the plugin {name!r} is disabled by --no-plugin; the run goes on without it"
        for name in ("fake-counts", "fake-keeps")
    ]
    assert "fake_house" not in sys.modules


def test_config_prints_the_entry_of_a_plugin_with_what_its_settings_mean(counts: Path) -> None:
    said = CliRunner().invoke(app, ["config", "fake-counts"]).stdout
    assert said.splitlines() == [
        "plugins:",
        "- name: fake-counts",
        "  # Count only steps that this divides.",
        "  every: 2",
        "  # A name for them.",
        "  label: steps",
    ]
    said = CliRunner().invoke(app, ["config", "FAKE-keeps"]).stdout
    assert said.splitlines() == [
        "train:", "  trackers:", "  - name: fake-keeps", "    # Which metrics.", "    prefix:  # required",
    ]  # fmt: skip
    assert CliRunner().invoke(app, ["config", "fake-plain"]).stdout == "plugins:\n- name: fake-plain\n"


# ---------------------------------------------------------------------------------------------------- registering


class Steps:
    @hookimpl
    def on_step(self, step: int) -> None: ...


class Logs(Steps):
    @hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None: ...


class SomeConfig(PluginConfig):
    """Settings."""


def refused(register: Callable[[], Any]) -> str:
    with pytest.raises(RegistryError) as caught:
        register()
    return str(caught.value)


def test_a_class_that_cannot_be_used_is_refused_with_the_reason() -> None:
    class Needs(Steps):
        def __init__(self, settings: Any) -> None: ...

    class HalfSaved(Steps):
        def state_dict(self) -> dict[str, Any]:
            return {}

    class Samples(Logs):
        @hookimpl
        def make_sampler(self) -> None: ...

    told = "cannot be registered as 'fake-it': "
    assert f"object {told}it implements no hook" in refused(lambda: register_hooks("Fake-It")(object))
    assert "a tracker implements the hook log_metrics" in refused(lambda: register_tracker("fake-it")(Steps))
    assert "a tracker exists on the main process only" in refused(lambda: register_tracker("fake-it")(Samples))
    assert "it has one of state_dict and load_state_dict" in refused(lambda: register_hooks("fake-it")(HalfSaved))
    assert "called with no argument, as it has no settings" in refused(lambda: register_hooks("fake-it")(Needs))
    assert "called with the settings as its only" in refused(lambda: register_hooks("fake-it", SomeConfig)(Steps))
    bad: Any = dict
    assert "a class derived from trainkit.PluginConfig; given <class 'dict'>" in refused(
        lambda: register_hooks("fake-it", bad)(Needs)
    )


def test_a_name_belongs_to_one_class_and_to_the_plugin_that_has_it(counts: Path) -> None:
    register_hooks("fake-here")(Steps)
    assert register_hooks("fake-here")(Steps) is Steps, "the same definition again replaces it"
    assert "the plugin name 'fake-here' is taken by test_plugin_settings.Steps" in refused(
        lambda: register_tracker("fake-here")(Logs)
    ).replace("tests.", "")
    assert "belongs to fake-counts (fake-house 1.5, module fake_house)" in refused(
        lambda: register_hooks("fake-counts")(Steps)
    )
    assert "the plugin name 'wandb' belongs to a tracker of accelerate" in refused(
        lambda: register_tracker("wandb")(Logs)
    )


def test_names_of_accelerates_trackers_are_reserved(install: Callable[..., Path]) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert {*LOGGER_TYPE_TO_CLASS} <= discovery.ACCELERATE_TRACKERS
    install("fake-thief", {"wandb": "fake_thief"}, "", version="2.0", kind="tracker")
    (plugin,) = (plugin for plugin in discovery.discover() if plugin.name == "wandb")
    assert plugin.why == "fake-thief 2.0: the name 'wandb' belongs to a tracker of accelerate; choose another"
    assert config([], ["wandb"]).train.trackers == ["wandb"]


def test_a_module_that_fails_leaves_nothing_registered(install: Callable[..., Path]) -> None:
    install(
        "fake-half", {"fake-half": "fake_half"}, SOURCE.replace("fake-counts", "fake-half") + "\n1 / 0", kind="hooks"
    )
    with pytest.raises(PluginError):
        get_hooks("fake-half")
    assert not {"fake-half", "fake-keeps", "fake-plain"} & {*registry._HOOKS}


def test_a_plugin_with_hooks_is_no_algorithm_and_a_probe_needs_no_settings(counts: Path) -> None:
    assert not {*NAMES} & {*available_trainers()}
    found = [plugin for plugin in discovery.discover() if plugin.name in NAMES]
    assert [(plugin.name, plugin.kind) for plugin in found] == [
        ("fake-counts", "hooks"), ("fake-keeps", "tracker"), ("fake-plain", "hooks"),
    ]  # fmt: skip
    assert [plugin.why for plugin in probe(found[1:2])] == [""]


def test_a_misspelt_hook_of_a_registered_class_is_an_error_that_names_the_plugin(install: Callable[..., Path]) -> None:
    source = SOURCE.replace("fake-counts", "fake-slip").replace("on_s", "on_S")
    install("fake-slip", {"fake-slip": "fake_slip"}, source, kind="hooks")
    for ask in (lambda: hook_manager(["fake-slip"], []), lambda: tiny_trainer("sft", Path(), plugins=["fake-slip"])):
        with pytest.raises(PluginError, match=r"hooks of plugin fake-slip \(fake-slip 1\.0, .*unknown hook 'on_Step'"):
            ask()


def test_a_constructor_that_fails_is_an_error_that_names_the_plugin(install: Callable[..., Path]) -> None:
    source = SOURCE.replace("fake-counts", "fake-ctor").replace("settings, 0", "settings, 1 / 0")
    install("fake-ctor", {"fake-ctor": "fake_ctor"}, source, kind="hooks")
    told = r"the hooks of plugin fake-ctor \(fake-ctor 1\.0, module fake_ctor\) cannot be made: ZeroDivisionError"
    with pytest.raises(PluginError, match=told):
        tiny_trainer("sft", Path(), plugins=["fake-ctor"])


# -------------------------------------------------------------------------------------------------------- in a run


def test_a_run_makes_an_object_of_its_own_with_the_settings(counts: Path, tmp_path: Path) -> None:
    entries = {
        "plugins": [{"name": "fake-counts", "every": 3}],
        "train__trackers": [{"name": "fake-keeps", "prefix": "loss/t"}],
    }
    first, second = (tiny_trainer("sft", tmp_path / name, **entries) for name in "ab")
    for trainer in (first, second):
        trainer.learn()
    for trainer in (first, second):
        assert trainer.hooks.made["fake-counts"].counted == 2
        assert trainer.hooks.made["fake-keeps"].kept == [(step, "loss/total") for step in range(1, 7)]
    assert first.hooks.made["fake-counts"] is not second.hooks.made["fake-counts"]
    recorded = TRLConfig.load_yaml(tmp_path / "a" / "config.yaml")
    assert recorded.to_dict()["plugins"] == [{"name": "fake-counts", "every": 3, "label": "steps"}]
    made = [(maker["name"], maker["version"]) for maker in first.identity.makers[2:]]
    assert made == [("fake-counts", "1.5"), ("fake-keeps", "1.5")]


def test_a_failing_hook_of_a_registered_class_names_its_plugin(counts: Path, tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", plugins=["fake-counts"])
    trainer.hooks.made["fake-counts"].counted = "none"
    told = (
        r"on_step of plugin fake-counts \(fake-house 1\.5, .* failed at step 1: TypeError.*optional = True in its class"
    )
    with pytest.raises(PluginError, match=told):
        trainer.learn()


def test_state_survives_a_resume_and_other_settings_may_be_used_then(counts: Path, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"train__save_interval": 2, "train__resume": "auto"}
    entry = {"name": "fake-counts", "every": 1}
    tiny_trainer("sft", tmp_path / "run", plugins=[entry], train__total_steps=4, **saving).learn()
    trainer = tiny_trainer("sft", tmp_path / "run", plugins=[{**entry, "every": 2}], **saving)
    trainer.learn()
    assert trainer.hooks.made["fake-counts"].counted == 4 + 1, "steps 1 to 4, and step 6"
    without = tiny_trainer("sft", tmp_path / "run", train__total_steps=8, **saving)
    without.learn()
    again = tiny_trainer("sft", tmp_path / "run", plugins=[entry], train__total_steps=9, **saving)
    again.learn()
    assert again.hooks.made["fake-counts"].counted == 1, "the checkpoint of a run without it has no state of it"


def test_a_state_that_cannot_be_saved_is_an_error_that_names_the_plugin(counts: Path, tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "a", plugins=["fake-counts"], train__save_interval=1)
    trainer.hooks.made["fake-counts"].state_dict = lambda: 1 / 0
    with pytest.raises(PluginError, match="state_dict of the plugin 'fake-counts' failed: ZeroDivisionError"):
        trainer.learn()
    trainer = tiny_trainer("sft", tmp_path / "b", plugins=["fake-counts"], train__save_interval=1)
    trainer.hooks.made["fake-counts"].state_dict = lambda: {"set": {1}}
    with pytest.raises(CheckpointError, match=r"state 'hooks\.fake-counts\.set' is a set"):
        trainer.learn()


def test_hooks_of_a_script_need_no_distribution(tmp_path: Path) -> None:
    seen: list[int] = []

    @register_hooks("fake-script", SomeConfig)
    class Script:
        def __init__(self, settings: SomeConfig) -> None: ...

        @hookimpl
        def on_step(self, step: int) -> None:
            seen.append(step)

    trainer = tiny_trainer("sft", tmp_path / "run", plugins=["fake-script"], train__total_steps=2)
    trainer.learn()
    assert seen == [1, 2]
    assert trainer.identity.makers[-1] == {"name": "fake-script", "distribution": None, "version": None}
    with discovery.disabled(["fake-script"], "--no-plugin"):
        with pytest.raises(PluginError, match="the plugin 'fake-script' is disabled by --no-plugin"):
            get_hooks("fake-script")
        assert tiny_trainer("sft", tmp_path / "other", plugins=["fake-script"]).config.plugins == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checks"), [("fake-counts", 7), ("fake-logs", 6)])
def test_the_kit_checks_hooks_and_trackers_with_settings(
    name: str, checks: int, counts: Path, install: Callable[..., Path]
) -> None:
    source = SOURCE.replace("fake-keeps", "fake-logs").replace("prefix: str", 'prefix: str = "loss/"')
    source = source.replace("fake-counts", "_fake").replace("fake-plain", "_f2")
    install("fake-logs", {"fake-logs": "fake_logs"}, source, kind="tracker")
    assert len(check_plugin(name).results) == checks
