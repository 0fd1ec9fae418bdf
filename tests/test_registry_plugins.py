"""Names, entry points and hooks: one name means one thing, and a broken plugin hurts only its own runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tables import table
from trainkit.config import MethodConfig, TRLConfig
from trainkit.errors import PluginError, RegistryError, TrainkitError
from trainkit.plugins import (
    PluginInfo,
    available_trainers,
    discover,
    find_plugin,
    get_engine,
    get_hooks,
    get_sharding,
    get_trainer,
    hook_manager,
    hookimpl,
    load_plugin,
    register_trainer,
    registry,
)
from trainkit.plugins import discovery as plugins
from trainkit.plugins.discovery import GROUPS, OF_OLD_GROUP
from trainkit.plugins.probe import probe
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import AccelerateRLTrainer, BaseRLTrainer
from trainkit.trainer.loop import AcceleratedLoop

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Trainers and modules that a test brings in are gone after it."""
    before, modules = registry._TRAINERS, set(sys.modules)
    monkeypatch.setattr(registry, "_TRAINERS", dict(before))
    yield
    stay = {name: cls for name, cls in registry._TRAINERS.items() if cls.__module__.startswith("trainkit_")}
    before |= stay  # modules that a test was the first to import stay imported
    for name in set(sys.modules) - modules:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def anew(install):
    """``anew()(...)``: `install` for a row of a table, where nothing that earlier rows installed is left."""
    path = [*sys.path]

    def anew():
        for home in sys.path[: len(sys.path) - len(path)]:
            shutil.rmtree(home)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.startswith("fake_")]:
            del sys.modules[name]
        for name in [name for name in registry._TRAINERS if name.startswith("fake-")]:
            del registry._TRAINERS[name]
        return install

    return anew


def call(code, *homes):
    """What the code prints in a process of its own that sees the distributions in ``homes``."""
    path = os.pathsep.join(map(str, [*homes, ROOT, *sys.path]))
    script, env = textwrap.dedent(code), {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout


def trainer_source(name):
    """A plugin's module: a method config and a trainer class of that name."""
    return f"""
from trainkit.config import MethodConfig
from trainkit.plugins import register_trainer

class FakeConfig(MethodConfig):
    name: str = {name!r}

@register_trainer({name!r})
class FakeTrainer:
    method_class = FakeConfig

    def get_arch(self, config): ...
    def make_experience(self, rows): ...
    def loss(self, batch): ...
"""


def method_named(default):
    return type("NamedConfig", (MethodConfig,), {"__annotations__": {"name": str}, "name": default})


def trainer_named(default, class_name="SomeTrainer", module="some_module"):
    arrows = dict.fromkeys(("get_arch", "make_experience", "loss"), lambda *_: None)
    return type(class_name, (), {"method_class": method_named(default), "__module__": module, **arrows})


# ------------------------------------------------------------------------------------------------ register_trainer


def test_a_class_is_registered_under_its_own_name_where_none_is_given():
    cls = trainer_named("fakebare", class_name="FakeBare")
    assert register_trainer(cls) is cls
    assert get_trainer("fakebare") is cls


def test_names_of_trainers_do_not_depend_on_case():
    cls = register_trainer("Fake-CASE")(trainer_named("fake-case"))
    assert get_trainer("fake-case") is get_trainer("FAKE-Case") is cls
    assert "fake-case" in available_trainers()


def test_a_subclass_of_a_trainer_may_name_another_method_config():
    class FirstConfig(MethodConfig):
        name: str = "fake-first"

    class SecondConfig(FirstConfig):
        name: str = "fake-second"

    class First(BaseRLTrainer[FirstConfig]): ...

    class Second(First):
        method_class = SecondConfig

    class Third(Second): ...

    assert (First.method_class, Second.method_class, Third.method_class) == (FirstConfig, SecondConfig, SecondConfig)


def test_a_name_taken_by_another_class_is_an_error_that_names_both():
    first = register_trainer("fake-taken")(trainer_named("fake-taken", "First", "one"))
    with pytest.raises(RegistryError, match=r"name 'fake-taken' is taken by one\.First; give two\.Second another"):
        register_trainer("FAKE-taken")(trainer_named("fake-taken", "Second", "two"))
    assert get_trainer("fake-taken") is first


def test_running_the_same_definition_again_replaces_the_class():
    register_trainer("fake-again")(trainer_named("fake-again"))
    again = register_trainer("fake-again")(trainer_named("fake-again"))
    assert get_trainer("fake-again") is again


def test_a_class_without_a_method_config_is_refused_with_the_way_to_write_one():
    with pytest.raises(RegistryError, match=r"'fake-plain': it names no method config\. Derive it as class Plain\("):
        register_trainer("fake-plain")(type("Plain", (), {}))
    assert "fake-plain" not in available_trainers()


@table("base", [AccelerateRLTrainer, AcceleratedLoop])
@table("inputs", [("reward_fn", "prompts"), ("samples",)])
@table("left_out", ["get_arch", "make_experience", "experience", "loss", "write_model", None])
def test_a_trainer_that_misses_an_arrow_is_refused_with_its_name(base, inputs, left_out):
    written = {"get_arch", "make_experience", "loss", "write_model"} - {left_out}
    if base is AccelerateRLTrainer:
        written -= {"get_arch", "write_model"}
        if "prompts" in inputs:  # sampling and scoring are there
            written = written - {"make_experience"} | {"experience"} - {left_out}
    given = {"method_class": method_named("fake-arrows"), "inputs": inputs, "__module__": "some_module"}
    cls = type(base)("Arrows", (base,), {**given, **dict.fromkeys(written, lambda *_: None)})
    needed = {"loss", "experience" if base is AccelerateRLTrainer and "prompts" in inputs else "make_experience"}
    needed |= {"get_arch", "write_model"} if base is AcceleratedLoop else set()
    if left_out not in needed:
        assert register_trainer("fake-arrows")(cls) is registry._TRAINERS.pop("fake-arrows")
        return
    with pytest.raises(RegistryError, match=rf"cannot be registered as 'fake-arrows': it does not define {left_out}\b"):
        register_trainer("fake-arrows")(cls)
    assert "fake-arrows" not in registry._TRAINERS


def test_an_online_trainer_may_make_its_experience_whole():
    given = {
        "method_class": method_named("fake-whole"),
        "inputs": ("reward_fn", "prompts"),
        "__module__": "some_module",
    }
    arrows = dict.fromkeys(("make_experience", "loss"), lambda *_: None)
    cls = type(AccelerateRLTrainer)("Whole", (AccelerateRLTrainer,), given | arrows)
    assert register_trainer("fake-whole")(cls) is cls


def test_all_arrows_that_a_class_misses_are_named_with_what_they_are_from_and_to():
    told = (
        r"Bare cannot be registered as 'fake-bare': it does not define get_arch \(configuration → model\) and "
        r"make_experience \(rows → experience\) and loss \(experience → loss and metrics\); write it in the class"
    )
    with pytest.raises(RegistryError, match=told):
        register_trainer("fake-bare")(type("Bare", (), {"method_class": method_named("fake-bare")}))


@table("wrong", ["fake-other", "FAKE-RIGHT"])
def test_a_method_config_of_another_name_is_refused(wrong):
    told = rf"trainer 'fake-right' has a method config whose name is '{wrong}'; write name: str = 'fake-right' in"
    with pytest.raises(RegistryError, match=told):
        register_trainer("fake-right")(trainer_named(wrong))
    assert "fake-right" not in available_trainers()


def test_a_method_config_that_gives_its_name_no_default_is_refused():
    with pytest.raises(
        RegistryError, match=r"write name: str = 'fake-nameless' in a class derived from MethodConfig, and make"
    ):
        register_trainer("fake-nameless")(type("Nameless", (), {"method_class": MethodConfig}))


# ------------------------------------------------------------------------------------------------------ discovery


def test_an_installed_plugin_is_known_without_being_imported(install):
    requires = ["trainkit-rl>=0.1,<1", "trainkit-rl[examples]>=9; extra == 'more'", "trainkit-other>=5", "numpy"]
    install("fake-grpo", {"Fake-GRPO": "fake_grpo"}, trainer_source("fake-grpo"), "2.3", requires)
    (plugin,) = [p for p in discover() if p.distribution == "fake-grpo"]
    assert plugin == PluginInfo("fake-grpo", "trainer", "fake_grpo", "fake-grpo", "2.3")
    assert str(plugin) == "fake-grpo (fake-grpo 2.3, module fake_grpo)"
    assert "fake-grpo" in available_trainers()
    assert "fake_grpo" not in sys.modules


def test_asking_for_a_trainer_imports_its_plugin_and_only_that(install):
    install("fake-one", {"fake-one": "fake_one"}, trainer_source("fake-one"))
    install("fake-two", {"fake-two": "fake_two"}, trainer_source("fake-two"))
    assert get_trainer("Fake-One").__module__ == "fake_one"
    assert {"fake_one", "fake_two"} & {*sys.modules} == {"fake_one"}


@table(
    "line, cause",
    [
        ("import fake_dependency_of_nobody", ModuleNotFoundError),
        ("from os import nothing_of_that_name", ImportError),
        ("raise SystemExit(3)", SystemExit),
        ("{}['missing']", KeyError),
        ("exec('def broken(:')", SyntaxError),
    ],
)
def test_a_plugin_that_fails_to_import_is_named_with_its_cause_and_others_stay_usable(anew, line, cause):
    install = anew()
    install("fake-broken", {"fake-bad": "fake_bad"}, line, version="0.7")
    install("fake-sound", {"fake-good": "fake_good"}, trainer_source("fake-good"))
    told = rf"plugin fake-bad \(fake-broken 0\.7, module fake_bad\) failed to import: {cause.__name__}: "
    with pytest.raises(PluginError, match=told):
        TRLConfig(method="fake-bad")
    with pytest.raises(PluginError, match=told) as caught:
        get_trainer("fake-bad")
    assert type(caught.value.__cause__) is cause
    assert "Repair or uninstall the distribution 'fake-broken', or disable it" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert get_trainer("fake-good").__name__ == "FakeTrainer"


def test_interrupting_an_import_is_no_fault_of_the_plugin(install):
    install("fake-slow", {"fake-slow": "fake_slow"}, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_plugin("fake-slow")


def test_what_a_plugin_registered_before_it_failed_does_not_look_usable_afterwards(install):
    install("fake-half", {"fake-half": "fake_half"}, trainer_source("fake-half") + "1 / 0\n")
    for _ in range(2):
        with pytest.raises(PluginError, match="ZeroDivisionError"):
            get_trainer("fake-half")


def test_a_plugin_that_takes_the_name_of_a_registered_trainer_fails_with_both_named(install):
    first = register_trainer("fake-first")(trainer_named("fake-first"))
    install("fake-greedy", {"fake-greedy": "fake_greedy"}, trainer_source("fake-first"))
    told = r"fake-greedy 1\.0.*taken by some_module\.SomeTrainer; give fake_greedy\.FakeTrainer another"
    with pytest.raises(PluginError, match=told) as caught:
        get_trainer("fake-greedy")
    assert isinstance(caught.value.__cause__, RegistryError)
    assert get_trainer("fake-first") is first


def test_a_name_claimed_by_two_distributions_is_an_error_that_names_both(install):
    install("fake-mine", {"fake-shared": "fake_mine"}, trainer_source("fake-shared"), version="1.1")
    install("fake-yours", {"Fake-Shared": "fake_yours"}, trainer_source("fake-shared"), version="2.2")
    told = (
        r"'fake-shared' is claimed twice: fake-shared \(fake-mine 1\.1, module fake_mine\); "
        r"fake-shared \(fake-yours 2\.2, module fake_yours\)\. Uninstall all but one, or disable it by its distribution"
    )
    with pytest.raises(RegistryError, match=told):
        get_trainer("fake-shared")
    assert not {"fake_mine", "fake_yours"} & {*sys.modules}


def test_an_unknown_name_lists_what_is_installed_or_registered_and_suggests_the_nearest(install):
    install("fake-grpo", {"fake-grpo": "fake_grpo"})
    register_trainer("fake-here")(trainer_named("fake-here"))
    with pytest.raises(
        RegistryError, match=r"no plugin 'fake-gppo' is installed; did you mean 'fake-grpo'\?"
    ) as caught:
        get_trainer("Fake-GPPO")
    (listed,) = [part for part in str(caught.value).split("; ") if part.startswith("available: ")]
    assert {"fake-grpo", "fake-here"} <= {*listed.removeprefix("available: ").partition(". ")[0].split(", ")}
    with pytest.raises(RegistryError, match=r"did you mean 'fake-here'\?"):
        get_trainer("fake-her")


def test_a_name_like_no_other_is_suggested_nothing():
    with pytest.raises(RegistryError, match=r"no plugin 'qqqqqqqq' is installed; available: "):
        find_plugin("qqqqqqqq")


# ------------------------------------------------------------------------------------------- what is told of them


def found(distribution):
    return {plugin.name: plugin for plugin in discover() if plugin.distribution == distribution}


def test_the_built_in_names_are_those_of_trainkits_own_distributions():
    owners, kinds = {}, {}
    for path in (ROOT / "plugins").glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        for kind, group in GROUPS.items():
            names = project.get("entry-points", {}).get(group, {})
            owners |= dict.fromkeys(names, project["name"])
            kinds |= dict.fromkeys(names, kind)
    assert owners == plugins.BUILT_IN
    installed = {plugin.name: plugin for plugin in discover()}
    assert {name: (installed[name].kind, installed[name].why) for name in kinds} == {
        n: (k, "") for n, k in kinds.items()
    }
    others = {name: kind for name, kind in kinds.items() if kind != "trainer"}
    engines, shardings = dict.fromkeys(("ray", "vllm"), "engine"), dict.fromkeys(("zero2", "zero3"), "sharding")
    assert others == {"early_stop": "hooks", **engines, **shardings}


OBSERVES = "import trainkit\n@trainkit.hookimpl\ndef on_step(step): ...\n"
PROVIDES = "from trainkit import hookimpl as hook\n@hook(tryfirst=True)\ndef make_sampler(trainer): ...\n"
LOGS = """
import trainkit

@trainkit.register_tracker("fake-kind")
class Logs:
    @trainkit.hookimpl
    def log_metrics(self, metrics): ...
"""
ASKS = {
    "trainer": get_trainer,
    "engine": get_engine,
    "sharding": get_sharding,
    "tracker": lambda name: TRLConfig.from_dict({"method": "sft", "train": {"trackers": [name]}}),
    "hooks": get_hooks,
    "sampler": lambda name: hook_manager([name], []),
}


@table("kind", [*GROUPS])
def test_a_plugin_is_of_the_kind_of_its_group_and_is_named_where_that_kind_is(anew, kind):
    install = anew()
    install("fake-kind", {"fake-kind": "fake_kind"}, "raise RuntimeError('imported')", kind=kind)
    assert [(plugin.kind, plugin.why) for plugin in found("fake-kind").values()] == [(kind, "")]
    assert "fake_kind" not in sys.modules
    assert ("fake-kind" in available_trainers()) == (kind == "trainer")
    hooked = ("tracker", "hooks", "sampler")
    for other, ask in ASKS.items():
        fits = other == kind or (other in hooked and kind in (*hooked, "trainer")[: 3 if other == "tracker" else 4])
        told = "RuntimeError: imported" if fits else r"'fake-kind' is |there is no|is no "
        with pytest.raises(TrainkitError, match=told):
            ask("fake-kind")


@table(
    "kind, source, told",
    [
        (
            "hooks",
            LOGS,
            "is a tracker, and its entry point is in the group 'trainkit.hooks'; write it into 'trainkit.tr",
        ),
        ("tracker", OBSERVES, "is a plugin with hooks, and its entry point is in the group 'trainkit.trackers'"),
        ("sampler", OBSERVES, "is a plugin with hooks, and its entry point is in the group 'trainkit.samplers'"),
        (
            "hooks",
            PROVIDES,
            "is a sampler, and its entry point is in the group 'trainkit.hooks'; write it into 'trainkit.s",
        ),
        ("trainer", LOGS, "is a tracker, and its entry point is in the group 'trainkit.trainers'"),
        ("trainer", "", 'registers no trainer of that name; it needs @register_trainer("fake-kind")'),
        ("engine", "", 'registers no engine of that name; it needs @register_engine("fake-kind")'),
        ("sharding", "", 'registers no sharding of that name; it needs @register_sharding("fake-kind")'),
        ("tracker", "", 'registers no tracker of that name; it needs @register_tracker("fake-kind")'),
        (
            "hooks",
            "",
            'no hooks of that name; it needs @register_hooks("fake-kind") or functions marked @trainkit.hookimpl',
        ),
        ("sampler", "", 'it needs @register_hooks("fake-kind") or a function make_sampler marked @trainkit.hookimpl'),
    ],
)
def test_a_plugin_in_the_group_of_another_kind_is_told_the_right_one(anew, kind, source, told):
    install = anew()
    install("fake-kind", {"fake-kind": "fake_kind"}, source, "0.3", kind=kind)
    for _ in range(2):  # also when its module is imported already
        with pytest.raises((RegistryError, PluginError), match=r"fake-kind \(fake-kind 0\.3, ") as caught:
            (ASKS["hooks"] if kind == "tracker" else ASKS[kind])("fake-kind")
        assert told in str(caught.value)
    registry._HOOKS.pop("fake-kind", None)


def test_a_plugin_of_the_group_that_all_kinds_had_is_told_what_to_write(install):
    home = install(
        "fake-old", {"fake-older": "fake_old", "fake-elder": "fake_old"}, trainer_source("fake-older"), "0.9"
    )
    entry_points = home / "fake_old-0.9.dist-info" / "entry_points.txt"
    entry_points.write_text("[trainkit]\nfake-older = fake_old\nfake-elder = fake_old\n")
    why = f"fake-old 0.9: {OF_OLD_GROUP}"
    for part in ("'trainkit'", '[project.entry-points."trainkit.trainers"]', *GROUPS.values()):
        assert part in why
    assert {plugin.why for plugin in found("fake-old").values()} == {why}
    for ask in (find_plugin, *ASKS.values(), lambda name: TRLConfig(method=name)):
        with pytest.raises(PluginError, match=re.escape(f"the plugin 'fake-older' cannot be used: {why}")):
            ask("fake-older")
        with pytest.raises(TrainkitError, match=re.escape(f". fake-elder, fake-older: {why}")) as caught:
            ask("fake-oldest")
        assert str(caught.value).count("fake-old 0.9") == 1
    assert "fake_old" not in sys.modules
    entry_points.write_text(entry_points.read_text() + "[trainkit.trainers]\nfake-older = fake_old\n")
    os.utime(home)
    assert {plugin.name: plugin.why for plugin in found("fake-old").values()} == {"fake-older": "", "fake-elder": why}


@table("entry", ["fake_it:Trainer", "fake_it [extra]", "fake_it."])
def test_an_entry_point_that_is_no_module_cannot_be_used(anew, entry):
    install = anew()
    install("fake-it", {"fake-it": entry}, version="0.4")
    plugin = found("fake-it")["fake-it"]
    assert plugin.why.startswith(f"fake-it 0.4: its entry point is fake-it = {entry!r}; the value must be a module")
    assert "\n" not in plugin.why
    with pytest.raises(PluginError, match=re.escape(f"the plugin 'fake-it' cannot be used: {plugin.why}")):
        get_trainer("fake-it")


def test_metadata_that_cannot_be_read_break_their_own_distribution_alone(install):
    for name in ("fake-lines", "fake-needs"):
        install(name, {name: name.replace("-", "_")}, trainer_source(name), requires=["trainkit-rl >> 1"])
    lines = Path(sys.path[1]) / "fake_lines-1.0.dist-info" / "entry_points.txt"
    lines.write_text("[trainkit.hooks]\nnot an entry\n")
    (unread,) = found("fake-lines").values()
    assert (unread.name, unread.kind) == ("fake-lines", "?")
    assert unread.why.startswith("fake-lines 1.0: its entry points cannot be read (")
    needs = found("fake-needs")["fake-needs"]
    assert needs.why.startswith("fake-needs 1.0: its requirement on trainkit cannot be read: ")
    for name in ("fake-lines", "fake-needs"):
        with pytest.raises(PluginError, match=f"{name} 1.0: its "):
            load_plugin(name)
    install("fake-sound", {"fake-good": "fake_good"}, trainer_source("fake-good"))
    assert {"fake-lines", "fake-needs", "fake-good"} & {*available_trainers()} == {"fake-good"}
    assert get_trainer("fake-good").__module__ == "fake_good"


def test_a_disabled_plugin_is_disabled_whatever_else_stands_against_it(install, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "fake-it")
    install(
        "fake-it", {"sft": "fake_it", "fake-a": "fake_it:f", "fake-b": "fake_gone"}, None, requires=["trainkit-rl >> 1"]
    )
    assert [plugin.why for plugin in found("fake-it").values()] == [
        "fake-it 1.0: disabled by TRAINKIT_DISABLE_PLUGINS"
    ] * 3


def test_a_distribution_without_name_or_version_is_listed(install):
    home = install("fake-bare", {"fake-bare": "fake_bare"}, OBSERVES, kind="hooks")
    (home / "fake_bare-1.0.dist-info" / "METADATA").unlink()
    assert str(find_plugin("fake-bare")) == "fake-bare (? ?, module fake_bare)"


def test_of_two_copies_of_a_distribution_the_first_on_the_path_counts(install, tmp_path):
    home = install("fake-copy", {"fake-copy": "fake_copy"}, OBSERVES, version="1.0", kind="hooks")
    shutil.move(home, tmp_path / "elsewhere")
    install("fake-copy", {"fake-copy": "fake_copy"}, OBSERVES, version="2.0", kind="hooks")
    sys.path.append(str(tmp_path / "elsewhere"))
    assert find_plugin("fake-copy").version == "2.0"


# ------------------------------------------------------------------------------------------------ versions and names


@table(
    "requires, unfit",
    [
        ([], ""),
        (["trainkit-rl"], ""),
        (["Trainkit_RL (>=0.3)"], ""),
        (["trainkit-rl>=0.3", "trainkit-rl<0.5", "trainkit-other>=9"], ""),
        (["trainkit-rl>=0.3", "trainkit-rl<0.4"], "<0.4"),
        (["trainkit-rl~=0.3.0"], "~=0.3.0"),
        (["trainkit-rl>=0.5 ; python_version >= '3'"], ">=0.5"),
        (["trainkit-rl>=0.5 ; python_version < '3'"], ""),
        (["trainkit-rl>=0.4"], ">=0.4"),
    ],
)
def test_a_plugin_made_for_another_trainkit_cannot_be_used(anew, monkeypatch, requires, unfit):
    install = anew()
    monkeypatch.setattr(plugins, "__version__", "0.4.0.dev1")
    install("fake-old", {"fake-old": "fake_old"}, trainer_source("fake-old"), "7", requires)
    plugin = found("fake-old")["fake-old"]
    assert ("fake-old" in available_trainers()) == (not unfit)
    if not unfit:
        assert get_trainer("fake-old").__module__ == "fake_old"
        return
    told = f"fake-old 7: it requires trainkit {unfit}, and this is trainkit 0.4.0.dev1; install another version"
    assert plugin.why == told
    with pytest.raises(PluginError, match=re.escape(told)):
        get_trainer("fake-old")
    assert "fake_old" not in sys.modules


@table("line", ["trainkit", "trainkit>=0.1,<0.2", "Trainkit[all]"])
def test_a_plugin_that_requires_the_other_project_of_the_name_is_told_the_right_one(anew, line):
    install = anew()
    install("fake-old", {"fake-old": "fake_old"}, trainer_source("fake-old"), requires=[line])
    with pytest.raises(
        PluginError, match=r"fake-old 1\.0: it requires '\w+', which is another project; write trainkit-rl"
    ):
        get_trainer("fake-old")


def test_a_stranger_that_claims_a_built_in_name_is_refused_and_the_built_in_works(install):
    install("fake-thief", {"SFT": "fake_thief", "fake-own": "fake_thief"}, trainer_source("fake-own"), version="6.6")
    stolen = found("fake-thief")["sft"]
    assert stolen.why == "fake-thief 6.6: the name 'sft' belongs to trainkit's own trainkit-sft; choose another"
    assert find_plugin("sft").distribution == "trainkit-sft"
    assert get_trainer("fake-own").__module__ == "fake_thief"


def test_a_built_in_name_is_not_a_strangers_where_the_built_in_is_not_installed(install, monkeypatch):
    monkeypatch.setitem(plugins.BUILT_IN, "fake-own", "trainkit-fake-own")
    with pytest.raises(
        RegistryError, match=r"no plugin 'fake-own' is installed.*It is in trainkit-fake-own: pip install"
    ):
        get_trainer("fake-own")
    with pytest.raises(RegistryError, match="It is in trainkit-fake-own: pip install"):
        get_engine("fake-own")
    install("fake-thief", {"fake-own": "fake_thief"}, trainer_source("fake-own"))
    told = (
        r"'fake-own' cannot be used: fake-thief 1\.0: the name 'fake-own' belongs to trainkit's own trainkit-fake-own"
    )
    with pytest.raises(RegistryError, match=told):
        get_trainer("fake-own")
    with pytest.raises(RegistryError, match="'fake-own' belongs to trainkit's own trainkit-fake-own"):
        register_trainer("fake-own")(trainer_named("fake-own"))
    assert "fake-own" not in available_trainers()


@pytest.mark.slow
def test_a_built_in_is_not_shadowed_by_a_decorator_that_runs_first(install):
    home = install("fake-early", {"fake-early": "fake_early"}, trainer_source("ppo"), version="0.2")
    code = """
        import trainkit
        try:
            trainkit.get_trainer("fake-early")
        except trainkit.errors.PluginError as error:
            print(error)
        print(trainkit.get_trainer("ppo").__module__)
    """
    told = call(code, home)
    assert told.count("\n") == 2
    assert "plugin fake-early (fake-early 0.2, module fake_early) failed to import: RegistryError: the trainer " in told
    assert "name 'ppo' belongs to trainkit's own trainkit-ppo, whose module alone may register it" in told
    assert told.endswith("\ntrainkit_ppo.trainer\n")


def test_the_name_of_an_installed_plugin_may_be_registered_by_its_own_package_alone(install):
    install("fake-mine", {"fake-mine": "fake_mine"}, trainer_source("fake-mine"), version="1.1")
    told = r"'fake-mine' belongs to fake-mine \(fake-mine 1\.1, module fake_mine\), whose module alone may register it"
    with pytest.raises(RegistryError, match=told):
        register_trainer("fake-mine")(trainer_named("fake-mine"))
    inner = trainer_named("fake-mine", module="fake_mine.trainers")
    assert register_trainer("fake-mine")(inner) is inner


def test_a_disabled_distribution_owns_no_name(install, monkeypatch):
    install("fake-house", {"fake-mine": "fake_mine"}, trainer_source("fake-mine"))
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "fake-house")
    cls = trainer_named("fake-mine")
    assert register_trainer("fake-mine")(cls) is get_trainer("fake-mine") is cls
    assert "fake-mine" in available_trainers()


def test_two_that_claim_one_name_name_each_other_until_one_is_disabled_by_its_distribution(install, monkeypatch):
    install("fake-mine", {"fake-shared": "fake_mine"}, trainer_source("fake-shared"), version="1.1")
    install("fake_Yours", {"fake-shared": "fake_yours"}, trainer_source("fake-shared"), version="2.2")
    mine, yours = (found(name)["fake-shared"] for name in ("fake-mine", "fake_Yours"))
    assert mine.why == (
        "fake-mine 1.1: the name 'fake-shared' is claimed by fake_Yours 2.2 (module fake_yours) too; uninstall or "
        "disable one of them"
    )
    assert "claimed by fake-mine 1.1 (module fake_mine) too" in yours.why
    assert "fake-shared" not in available_trainers()
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", " FAKE-yours ,")
    assert [found(name)["fake-shared"].disabled for name in ("fake-mine", "fake_Yours")] == [False, True]
    assert get_trainer("fake-shared").__module__ == "fake_mine"


# ------------------------------------------------------------------------------------------------------- disabled


@table("given", ["fake-off", "FAKE-OFF", "fake.house", "other, fake_house"])
def test_a_disabled_method_is_an_error_that_says_what_disabled_it(anew, monkeypatch, given):
    install = anew()
    install("fake-house", {"fake-off": "fake_off"}, "1 / 0", version="0.9")
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", given)
    told = "the plugin 'fake-off' cannot be used: fake-house 0.9: disabled by TRAINKIT_DISABLE_PLUGINS"
    asks = (get_trainer, find_plugin, lambda name: hook_manager([name], []), lambda name: TRLConfig(method=name))
    for ask in asks if given == "fake-off" else asks[:1]:
        with pytest.raises(PluginError, match=told):
            ask("fake-off")
    assert "fake-off" not in available_trainers()


def test_a_trainer_that_is_there_already_can_be_disabled(install, monkeypatch):
    install("fake-house", {"fake-off": "fake_off"}, trainer_source("fake-off"))
    get_trainer("fake-off")
    with plugins.disabled(["Fake-House"], "--no-plugin"):
        with pytest.raises(PluginError, match=r"'fake-off' cannot be used: fake-house 1\.0: disabled by --no-plugin"):
            get_trainer("fake-off")
        assert "fake-off" not in available_trainers()
    register_trainer("fake-here")(trainer_named("fake-here"))
    with plugins.disabled(["fake-here"], "--no-plugin"):
        with pytest.raises(PluginError, match="the trainer 'fake-here' is disabled by --no-plugin"):
            get_trainer("fake-here")
        assert "fake-here" not in available_trainers()
    assert get_trainer("fake-off").__module__ == "fake_off"


def test_a_name_that_disables_nothing_is_told_with_the_nearest(install, monkeypatch):
    install("fake-house", {"fake-off": "fake_off"}, OBSERVES, kind="hooks")
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "fake-of,fake-off,gone")
    unknown = "which is not an installed plugin or distribution"
    told = [
        f"TRAINKIT_DISABLE_PLUGINS names 'fake-of', {unknown}; did you mean 'fake-off'?",
        f"TRAINKIT_DISABLE_PLUGINS names 'gone', {unknown}",
    ]
    assert plugins.without_disabled([]) == ([], told)
    usable, messages = plugins.without_disabled(["fake-off", "gone", "sft"])
    assert usable == ["sft"]
    assert messages == [
        told[0],
        "the plugin 'fake-off' is disabled by TRAINKIT_DISABLE_PLUGINS; the run goes on without it",
        "the plugin 'gone' is disabled by TRAINKIT_DISABLE_PLUGINS; the run goes on without it",
    ]


def test_all_names_what_is_not_of_trainkit(install, monkeypatch):
    """E4, also where one cannot be imported."""
    install("fake-house", {"fake-off": "fake_off"}, "1 / 0")
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "all")
    disabled = {plugin.name: plugin.disabled for plugin in discover()}
    assert [disabled[name] for name in ("fake-off", "ppo", "sft", "early_stop")] == [True, False, False, False]
    with pytest.raises(PluginError, match=r"fake-house 1\.0: disabled by TRAINKIT_DISABLE_PLUGINS"):
        get_trainer("fake-off")
    assert plugins.without_disabled(["sft", "fake-off"]) == (
        ["sft"], ["the plugin 'fake-off' is disabled by TRAINKIT_DISABLE_PLUGINS; the run goes on without it"],
    )  # fmt: skip
    register_trainer("fake-here")(trainer_named("fake-here"))
    assert get_trainer("fake-here") is not None, "what a script registers is no installed plugin"


@table("given, used", [("", set()), ("fake-a", {"fake-a"}), ("Fake_Two, gone", {"fake-b"})])
def test_only_what_is_named_is_loaded_besides_trainkits_own(anew, monkeypatch, given, used):
    install = anew()
    install("fake-one", {"fake-a": "fake_a"}, OBSERVES, kind="hooks")
    install("fake-two", {"fake-b": "fake_b"}, OBSERVES, kind="hooks")
    monkeypatch.setenv("TRAINKIT_LOAD_PLUGINS", given)
    disabled = {plugin.name for plugin in discover() if plugin.disabled}
    assert {"fake-a", "fake-b", "ppo"} - disabled == {*used, "ppo"}
    for name in {"fake-a", "fake-b"} - used:
        with pytest.raises(PluginError, match="disabled by TRAINKIT_LOAD_PLUGINS"):
            find_plugin(name)
    usable, told = plugins.without_disabled(["fake-a", "fake-b", "sft"])
    assert {*usable} == {*used, "sft"}
    assert any("TRAINKIT_LOAD_PLUGINS names 'gone'" in line for line in told) == ("gone" in given)


# ---------------------------------------------------------------------------------------------------------- hooks


class Steps:
    """A callback that remembers the steps it was told of."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def on_step(self, step):
        self.seen.append(step)


HOOK_SOURCE = """
from trainkit.plugins import hookimpl
seen = []

@hookimpl
def on_step(trainer, step):
    seen.append((trainer, step))
"""


def test_a_module_and_an_object_are_both_told(install):
    install("fake-watch", {"fake-watch": "fake_watch"}, HOOK_SOURCE, kind="hooks")
    callback = Steps()
    hook_manager(["fake-watch"], [callback]).hook.on_step(trainer="trainer", step=3)
    assert callback.seen == [3]
    assert sys.modules["fake_watch"].seen == [("trainer", 3)]


def test_a_module_under_two_names_is_told_once(install):
    install("fake-watch", {"fake-watch": "fake_watch", "fake-alias": "fake_watch"}, HOOK_SOURCE, kind="hooks")
    hook_manager(["fake-watch", "fake-alias", "FAKE-watch"], []).hook.on_step(trainer="trainer", step=3)
    assert sys.modules["fake_watch"].seen == [("trainer", 3)]


def test_a_plugin_that_only_trains_needs_no_hooks(install):
    install("fake-quiet", {"fake-quiet": "fake_quiet"}, trainer_source("fake-quiet"))
    manager = hook_manager(["fake-quiet"], [])
    assert [isinstance(plugin, ModuleType) for plugin in manager.get_plugins()] == [True]


def test_a_plugin_that_is_a_trainer_alone_may_stand_among_the_plugins_of_a_run(tmp_path):
    assert tiny_trainer("sft", tmp_path, plugins=["rloo"]).config.plugins == ["rloo"]


def test_a_misspelt_hook_of_a_plugin_is_an_error_that_names_both(install):
    install(
        "fake-typo", {"fake-typo": "fake_typo"}, HOOK_SOURCE.replace("def on_step", "def on_stepp"), "0.3", kind="hooks"
    )
    told = r"plugin fake-typo \(fake-typo 0\.3, module fake_typo\)"
    near = "unknown hook 'on_stepp'; did you mean 'on_step'"
    with pytest.raises(PluginError, match=rf"hooks of {told} do not fit: {near}"):
        hook_manager(["fake-typo"], [])


@table(
    "hook, told",
    [
        ("def on_stepp(step): ...", "unknown hook 'on_stepp'; did you mean 'on_step'"),
        ("def on_step(step, loss): ...", "on_step takes 'loss'; it may take trainer, step"),
        ("def on_step(step=None): ...", "on_step takes 'step' with a default or as keyword-only, and would not be"),
        ("def on_step(*, step): ...", "on_step takes 'step' with a default or as keyword-only, and would not be"),
        ("def on_step(*, loss): ...", "on_step takes 'loss' with a default or as keyword-only, and would not be"),
        ("def on_step(*args): ...", "on_step takes *args, and would be given nothing; name the arguments"),
        ("def on_step(**all): ...", "on_step takes **all, and would be given nothing; name the arguments"),
        ("async def on_step(step): ...", "on_step is async, and hooks are not awaited; write def"),
        ("def on_step(step): yield", "on_step is a generator, whose body would never run; remove yield"),
    ],
)
def test_a_hook_whose_signature_does_not_fit_is_an_error_of_its_plugin(anew, hook, told):
    install = anew()
    install(
        "fake-sign", {"fake-sign": "fake_sign"}, f"import trainkit\n@trainkit.hookimpl\n{hook}", "1.2", kind="hooks"
    )
    with pytest.raises(PluginError) as caught:
        hook_manager(["fake-sign"], [])
    message = str(caught.value)
    assert message.startswith("the hooks of plugin fake-sign (fake-sign 1.2, module fake_sign) do not fit: ")
    assert told in message
    assert "\n" not in message


def test_a_hook_may_have_defaults_of_its_own():
    class Bound(Steps):
        @hookimpl
        def on_evaluate(self, metrics, key="reward"):
            self.seen.append(metrics[key])

    callback = Bound()
    hook_manager([], [callback]).hook.on_evaluate(trainer=None, step=1, metrics={"reward": 2.0}, samples=[])
    assert callback.seen == [2.0]


def test_a_callback_without_hooks_is_an_error_that_lists_them():
    class Unmarked:
        def on_step(self, step):
            raise AssertionError("never called")

    hooks = "log_metrics, make_sampler, on_evaluate, on_experience, on_save, on_step, on_train_begin, on_train_end"
    with pytest.raises(PluginError, match=rf"callback Unmarked implements no hook; mark its methods.*Hooks: {hooks}$"):
        hook_manager([], [Unmarked()])


def test_a_class_in_place_of_an_object_is_an_error():
    with pytest.raises(PluginError, match=r"callback Steps is a class; give an object, Steps\(\.\.\.\)"):
        hook_manager([], [Steps])


def test_the_same_object_twice_is_an_error():
    callback = Steps()
    with pytest.raises(PluginError, match=r"hooks of Steps do not fit: .*already registered"):
        hook_manager([], [callback, callback])


def test_the_first_sampler_offered_is_taken():
    class Offers:
        def __init__(self, sampler):
            self.sampler = sampler

        @hookimpl
        def make_sampler(self, trainer):
            return self.sampler

    hook = hook_manager([], [Offers("one"), Offers(None)]).hook
    assert hook.make_sampler(trainer=None) == "one"
    assert hook_manager([], [Steps()]).hook.make_sampler(trainer=None) is None


# ----------------------------------------------------------------------------------------------------------- probe


@table(
    "source, why",
    [
        ("raise ImportError('two\\nlines')", "ImportError: two lines"),
        ("import os; os._exit(0)", "its import ended the process with exit code 0"),
        ("import os; os.kill(os.getpid(), 11)", "its import ended the process by SIGSEGV"),
        ("import time; time.sleep(60)", "its import did not end within 1 s"),
        (
            "x = 1",
            'registers no trainer of that name; it needs @register_trainer("fake-probe")',
        ),
        (OBSERVES.replace("on_step", "on_stepp"), "unknown hook 'on_stepp'"),
        (
            trainer_source("fake-probe").replace("def loss", "def lost"),
            "it does not define loss (experience → loss and metrics)",
        ),
    ],
)
def test_a_probe_tells_why_a_plugin_cannot_be_used_and_survives_it(anew, source, why):
    install = anew()
    kind = "hooks" if "hookimpl" in source else "trainer"
    install("fake-probe", {"fake-probe": "fake_probe"}, "import trainkit\n" + source, "0.5", kind=kind)
    (plugin,) = found("fake-probe").values()
    assert plugin.why == ""
    (probed,) = probe([plugin], timeout=1 if "sleep" in source else 60)
    assert probed.why.startswith("fake-probe 0.5: ")
    assert why in probed.why
    assert "\n" not in probed.why
    assert "fake_probe" not in sys.modules


def test_a_probe_finds_sound_plugins_sound_whatever_they_print_and_imports_no_other(install, tmp_path, capfd):
    noise = "import os, threading, time\nos.write(1, b'noise')\nos.write(2, b'noise')\nprint('{}')\n"
    thread = "threading.Thread(target=time.sleep, args=(600,)).start()\n"
    install("fake-loud", {"fake-loud": "fake_loud"}, noise + thread + trainer_source("fake-loud"))
    install("fake-watch", {"fake-watch": "fake_watch"}, HOOK_SOURCE, kind="hooks")
    assert {"fake-loud", "fake-watch"} & {*available_trainers()} == {"fake-loud"}
    trace = tmp_path / "imported"
    touch = f"open({str(trace)!r}, 'w')\n"
    install("fake-old", {"fake-old": "fake_old"}, touch + HOOK_SOURCE, requires=["trainkit-rl>=99"], kind="hooks")
    given = [*found("fake-loud").values(), *found("fake-watch").values(), *found("fake-old").values()]
    assert [bool(plugin.why) for plugin in probe(given)] == [False, False, True]
    assert not trace.exists()
    assert capfd.readouterr() == ("", "")
