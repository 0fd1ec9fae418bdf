"""Names, entry points and hooks: one name means one thing, and a broken plugin hurts only its own runs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trainkit import registry
from trainkit.config import MethodConfig, TRLConfig
from trainkit.errors import PluginError, RegistryError
from trainkit.hookspecs import hookimpl
from trainkit.plugins import PluginInfo, discover, find_plugin, hook_manager, is_imported, load_plugin
from trainkit.registry import available_trainers, get_trainer, register_trainer

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Trainers and modules that a test brings in are gone after it."""
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install("dist", {"name": "module"}, "source of module")``: a distribution, as an installer leaves it."""

    def install(distribution, entries, source=None, version="1.0"):
        home = tmp_path / distribution
        info = home / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {module}" for name, module in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[trainkit]", *lines, ""]))
        if source is not None:
            for module in {*entries.values()}:
                (home / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(home)
        importlib.invalidate_caches()

    return install


def trainer_source(name):
    """A plugin's module: a method config and a trainer class of that name."""
    return f"""
from trainkit.config import MethodConfig
from trainkit.registry import register_trainer

class FakeConfig(MethodConfig):
    name: str = {name!r}

@register_trainer({name!r})
class FakeTrainer:
    method_class = FakeConfig
"""


def method_named(default):
    return type("NamedConfig", (MethodConfig,), {"__annotations__": {"name": str}, "name": default})


def trainer_named(default, class_name="SomeTrainer", module="some_module"):
    return type(class_name, (), {"method_class": method_named(default), "__module__": module})


# ------------------------------------------------------------------------------------------------ register_trainer


def test_a_class_is_registered_under_the_name_given_and_handed_back():
    cls = trainer_named("fake-named")
    assert register_trainer("fake-named")(cls) is cls
    assert get_trainer("fake-named") is cls


def test_a_class_is_registered_under_its_own_name_where_none_is_given():
    cls = trainer_named("fakebare", class_name="FakeBare")
    assert register_trainer(cls) is cls
    assert get_trainer("fakebare") is cls


def test_names_of_trainers_do_not_depend_on_case():
    cls = register_trainer("Fake-CASE")(trainer_named("fake-case"))
    assert get_trainer("fake-case") is get_trainer("FAKE-Case") is cls
    assert "fake-case" in available_trainers()


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


@pytest.mark.parametrize("wrong", ["fake-other", "FAKE-RIGHT"])
def test_a_method_config_of_another_name_is_refused(wrong):
    told = rf"trainer 'fake-right' has a method config whose name is '{wrong}'; write name: str = 'fake-right' in"
    with pytest.raises(RegistryError, match=told):
        register_trainer("fake-right")(trainer_named(wrong))
    assert "fake-right" not in available_trainers()


def test_a_method_config_that_gives_its_name_no_default_is_refused():
    with pytest.raises(RegistryError, match=r"write name: str = 'fake-nameless' in MethodConfig"):
        register_trainer("fake-nameless")(type("Nameless", (), {"method_class": MethodConfig}))


# ------------------------------------------------------------------------------------------------------ discovery


def test_an_installed_plugin_is_known_without_being_imported(install):
    install("fake-grpo", {"Fake-GRPO": "fake_grpo"}, trainer_source("fake-grpo"), version="2.3")
    (plugin,) = [p for p in discover() if p.distribution == "fake-grpo"]
    assert plugin == PluginInfo("fake-grpo", "fake_grpo", "fake-grpo", "2.3")
    assert str(plugin) == "fake-grpo (fake-grpo 2.3, module fake_grpo)"
    assert "fake-grpo" in available_trainers()
    assert not is_imported(plugin)


def test_asking_for_a_trainer_imports_its_plugin_and_only_that(install):
    install("fake-one", {"fake-one": "fake_one"}, trainer_source("fake-one"))
    install("fake-two", {"fake-two": "fake_two"}, trainer_source("fake-two"))
    assert get_trainer("Fake-One").__module__ == "fake_one"
    assert [is_imported(find_plugin(name)) for name in ("fake-one", "fake-two")] == [True, False]


def test_discovered_plugins_are_sorted_by_name(install):
    install("fake-last", {"fake-z": "fake_z", "fake-a": "fake_a"})
    names = [plugin.name for plugin in discover()]
    assert names == sorted(names)
    assert {"fake-z", "fake-a"} <= {*names}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("import fake_dependency_of_nobody", ModuleNotFoundError),
        ("from os import nothing_of_that_name", ImportError),
        ("raise SystemExit(3)", SystemExit),
        ("{}['missing']", KeyError),
        ("def broken(:", SyntaxError),
    ],
)
def test_a_plugin_that_fails_to_import_is_named_with_its_cause_and_others_stay_usable(install, line, cause):
    install("fake-broken", {"fake-bad": "fake_bad"}, line, version="0.7")
    install("fake-sound", {"fake-good": "fake_good"}, trainer_source("fake-good"))
    told = rf"plugin fake-bad \(fake-broken 0\.7, module fake_bad\) failed to import: {cause.__name__}: "
    with pytest.raises(PluginError, match=told) as caught:
        get_trainer("fake-bad")
    assert type(caught.value.__cause__) is cause
    assert "Repair or uninstall the distribution 'fake-broken'" in str(caught.value)
    assert get_trainer("fake-good").__name__ == "FakeTrainer"


def test_a_config_that_names_a_broken_plugin_tells_of_the_plugin(install):
    install("fake-broken", {"fake-bad": "fake_bad"}, "1 / 0")
    with pytest.raises(PluginError, match=r"fake-broken 1\.0.*ZeroDivisionError"):
        TRLConfig(method="fake-bad")


def test_an_entry_point_without_its_module_is_an_error_of_its_distribution(install):
    install("fake-empty", {"fake-gone": "fake_gone"})
    with pytest.raises(PluginError, match=r"fake-empty 1\.0.*No module named 'fake_gone'"):
        load_plugin("fake-gone")


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
        r"fake-shared \(fake-yours 2\.2, module fake_yours\)\. Uninstall all but one"
    )
    with pytest.raises(RegistryError, match=told):
        get_trainer("fake-shared")
    assert not {"fake_mine", "fake_yours"} & {*sys.modules}


def test_a_plugin_that_registers_no_trainer_of_its_name_is_told_what_it_lacks(install):
    install("fake-hooks", {"fake-hooks": "fake_hooks"}, "")
    told = r"'fake-hooks' \(module fake_hooks\) registers no trainer of that name; it needs @register_trainer\(\"fake-h"
    with pytest.raises(RegistryError, match=told):
        get_trainer("fake-hooks")


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


# ---------------------------------------------------------------------------------------------------------- hooks


class Steps:
    """A callback that remembers the steps it was told of."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def on_step(self, step):
        self.seen.append(step)


HOOK_SOURCE = """
from trainkit.hookspecs import hookimpl
seen = []

@hookimpl
def on_step(trainer, step):
    seen.append((trainer, step))
"""


def test_a_module_and_an_object_are_both_told(install):
    install("fake-watch", {"fake-watch": "fake_watch"}, HOOK_SOURCE)
    callback = Steps()
    hook_manager(["fake-watch"], [callback]).hook.on_step(trainer="trainer", step=3)
    assert callback.seen == [3]
    assert sys.modules["fake_watch"].seen == [("trainer", 3)]


def test_a_module_under_two_names_is_told_once(install):
    install("fake-watch", {"fake-watch": "fake_watch", "fake-alias": "fake_watch"}, HOOK_SOURCE)
    hook_manager(["fake-watch", "fake-alias", "FAKE-watch"], []).hook.on_step(trainer="trainer", step=3)
    assert sys.modules["fake_watch"].seen == [("trainer", 3)]


def test_two_objects_of_one_class_are_both_told():
    first, second = Steps(), Steps()
    hook_manager([], [first, second]).hook.on_step(trainer=None, step=1)
    assert first.seen == second.seen == [1]


def test_a_plugin_that_only_trains_needs_no_hooks(install):
    install("fake-quiet", {"fake-quiet": "fake_quiet"}, trainer_source("fake-quiet"))
    manager = hook_manager(["fake-quiet"], [])
    assert [isinstance(plugin, ModuleType) for plugin in manager.get_plugins()] == [True]


def test_a_misspelt_hook_of_a_plugin_is_an_error_that_names_both(install):
    install("fake-typo", {"fake-typo": "fake_typo"}, HOOK_SOURCE.replace("def on_step", "def on_stepp"))
    with pytest.raises(PluginError, match=r"hooks of fake_typo do not fit: unknown hook 'on_stepp'"):
        hook_manager(["fake-typo"], [])


def test_a_misspelt_hook_of_a_callback_is_an_error_that_names_both():
    class Typo(Steps):
        @hookimpl
        def on_evaluated(self, metrics):
            raise AssertionError("never called")

    with pytest.raises(PluginError, match=r"hooks of Typo do not fit: unknown hook 'on_evaluated'"):
        hook_manager([], [Typo()])


def test_a_hook_that_asks_for_what_it_is_not_told_is_an_error():
    class Curious:
        @hookimpl
        def on_step(self, step, loss):
            raise AssertionError("never called")

    with pytest.raises(PluginError, match=r"(?s)hooks of Curious do not fit: .*on_step.*loss"):
        hook_manager([], [Curious()])


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


def test_hooks_of_a_plugin_that_is_not_installed_are_an_error():
    with pytest.raises(RegistryError, match="no plugin 'fake-nowhere' is installed"):
        hook_manager(["fake-nowhere"], [])


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


# ------------------------------------------------------------------------------------------------------- lightness


def test_config_registry_and_plugins_load_without_torch():
    code = "import sys, trainkit.config, trainkit.registry, trainkit.plugins; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
