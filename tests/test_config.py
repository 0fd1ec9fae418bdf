"""The configuration: checked as a whole, plain in and out, changed only by making another."""

from __future__ import annotations

import copy
import math
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tables import table
from trainkit.config import (
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    PluginConfig,
    RolloutConfig,
    SamplingConfig,
    Section,
    TrainConfig,
    TRLConfig,
    default_config,
)
from trainkit.config.names import dotted
from trainkit.errors import ConfigError
from trainkit.plain import parse_yaml, read_yaml
from trainkit.plugins import available_trainers, get_trainer, register_trainer, registry
from trainkit.plugins.discovery import BUILT_IN
from trainkit_kit.checks.fields import is_number


class ToyConfig(MethodConfig):
    """A method with a bounded number, an optional one and a free-form field."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"lr": 3e-4, "kwargs": {"betas": [0.9, 0.95]}},
        "rollout": {"num_rollouts": 64},
    }

    name: str = "config-toy"
    """The name."""
    gamma: float = Field(1.0, ge=0, le=1)
    """The discount."""
    target: float | None = None
    """The target."""
    extra: dict[str, Any] = Field({})
    """Anything."""


class OtherSampling(SamplingConfig):
    """Sampling with a number of the method's own."""

    reach: int = Field(1, ge=0)
    """How far."""


class OtherConfig(MethodConfig):
    """A method with other numbers."""

    sampling: ClassVar[type[SamplingConfig]] = OtherSampling

    name: str = "config-other"
    """The name."""
    beta: float = 0.1
    """The temperature of the preference."""


@pytest.fixture(autouse=True, scope="module")
def _toy_methods():
    """Two trainers, registered while the tests of this module run."""
    for method in (ToyConfig, OtherConfig):
        arrows = dict.fromkeys(("get_arch", "make_experience", "loss"), lambda *_: None)
        register_trainer(method.model_fields["name"].default)(type("Trainer", (), {"method_class": method, **arrows}))
    yield
    for name in ("config-toy", "config-other"):
        del registry._TRAINERS[name]


def toy(**sections):
    return TRLConfig[Any].from_dict({"method": "config-toy", **sections})


def faults(make):
    """What the error says, line by line, without its heading."""
    with pytest.raises(ConfigError) as caught:
        make()
    heading, *lines = str(caught.value).splitlines()
    assert heading == f"{len(lines)} fault{'s' if len(lines) > 1 else ''} in the config:"
    return [line.removeprefix("  ") for line in lines]


def fault(make):
    (line,) = faults(make)
    return line


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["1e5", "12e4", "1E-5", ".5e3", "0x1f", "1_000", "yes", "no", "null", "~", "2024-01-01", "1:30"])
    | st.sampled_from(
        ["", " a ", "a: b", "# a", "- a", "a\nb", "\t", "é", "\x85", "\u2028", "\x00", ".inf", "<<", "=", "${A}", "$${"]
    )
)
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
FREE_FORM = st.dictionaries(st.text(max_size=6), PLAIN, max_size=3)
MODELS = FREE_FORM.map(lambda fields: {"model_type": "gpt2", **fields})
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False)
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"betas": st.lists(NUMBERS, min_size=2, max_size=2), "eps": NUMBERS, "amsgrad": st.booleans()}
)
PATHS = st.text(min_size=1, max_size=8).filter(
    lambda text: text == text.strip() and text[0] not in "~$" and text.lower() != "none"
)


@st.composite
def configs(draw):
    return toy(
        method={"name": "config-toy", "gamma": draw(st.floats(0, 1)), "extra": draw(FREE_FORM)},
        model={"model_path": draw(st.none() | PATHS | MODELS), "kwargs": draw(FREE_FORM)},
        optimizer={"lr": draw(st.floats(0, exclude_min=True, allow_infinity=False)), "kwargs": draw(ARGUMENTS)},
        rollout={"stop_sequences": draw(st.lists(st.text(min_size=1, max_size=4), max_size=2))},
        train={"seed": draw(st.integers(0, 2**40)), "run_dir": draw(st.none() | PATHS)},
    )


# -------------------------------------------------------------------------------------------------- round trips


@settings(max_examples=20)
@given(configs())
def test_a_config_is_the_same_after_round_trips_through_plain_data_and_yaml_copies_and_no_change(config):
    assert TRLConfig.from_dict(config.to_dict()) == config
    assert TRLConfig.from_dict(parse_yaml(str(config))) == config  # whatever its strings look like
    assert config.evolve() == config == config.update({})
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config
        assert type(same.method) is ToyConfig


def test_a_config_is_the_same_after_a_round_trip_through_a_file(tmp_path):
    config = toy(train={"run_dir": "12e4", "total_steps": 7}, model={"model_path": "größer/模型"})
    config.save_yaml(tmp_path / "config.yaml")
    assert TRLConfig.load_yaml(str(tmp_path / "config.yaml")) == config


def test_a_parametrised_config_pickles():
    config = TRLConfig[ToyConfig](method="config-toy", train=TrainConfig(seed=5))
    assert pickle.loads(pickle.dumps(config)) == config == toy(train={"seed": 5})


def test_infinity_stays_infinity_in_plain_data():
    method = {"name": "config-toy", "target": math.inf, "extra": {"cap": math.inf}}
    config = toy(method=method, optimizer={"kwargs": {"eps": -math.inf}})
    plain = config.to_dict()
    assert plain["method"] == {"gamma": 1.0, **method}
    assert plain["optimizer"]["kwargs"]["eps"] == -math.inf
    assert TRLConfig.from_dict(parse_yaml(str(config))) == config


@table(
    "text, number",
    [("1e-5", 1e-5), ("-2E3", -2000.0), ("1.5e+2", 150.0), (".5e1", 5.0), ("+1.e2", 100.0), ("1.0e-3", 0.001)],
)
def test_exponents_are_numbers_in_typed_and_in_free_form_fields(tmp_path, text, number):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"method: {{name: config-toy, target: {text}, extra: {{eps: {text}}}}}\noptimizer: {{kwargs: {{eps: {text}}}}}"
    )
    config = TRLConfig.load_yaml(path)
    assert (config.method.target, config.method.extra, config.optimizer.kwargs["eps"]) == (
        number,
        {"eps": number},
        number,
    )


@table("text", ["'1e-5'", "1e-5s", "e5", "1e", "v1e5", "1e5.5"])
def test_what_is_no_number_stays_text(text):
    assert parse_yaml(f"a: {text}") == {"a": text.strip("'")}


# -------------------------------------------------------------------------------------- files that cannot be read


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config '.*nowhere.yaml': No such file"):
        TRLConfig.load_yaml(tmp_path / "nowhere.yaml")


@table("text", [b"a: [1", b"a: b: c", b"\xff\xfe\xfd", b"!!python/object/apply:os.getcwd []"])
def test_text_that_is_not_plain_yaml_is_refused_with_its_file(tmp_path, text):
    (tmp_path / "bad.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml is not valid YAML"):
        read_yaml(tmp_path / "bad.yaml")


@table("text, given", [("", "is empty"), ("- a", r"holds \['a'\] \(list\)")])
def test_yaml_that_holds_no_mapping_is_refused(tmp_path, text, given):
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"should hold a mapping of sections, such as `method: ppo`; it {given}"):
        read_yaml(tmp_path / "list.yaml")


def test_a_config_that_is_no_mapping_is_refused():
    with pytest.raises(ConfigError, match=r"a config is a mapping of sections; given 'config-toy' \(str\)"):
        TRLConfig.from_dict("config-toy")


# -------------------------------------------------------------------------------------------------------- faults


def test_every_fault_is_told_at_once_with_its_path_what_was_given_and_what_is_allowed():
    lines = faults(
        lambda: toy(
            method={"name": "config-toy", "gamma": 1.5, "gama": 1},
            optimizer={"lr": -1, "name": "adan"},
            rollout={"eval_kwargs": {"temperature": -1}},
            train={"sede": 2, "batch_size": "many"},
            trian={},
        )
    )
    assert sorted(lines) == sorted(
        [
            "method.gamma: should be less than or equal to 1 (given 1.5 (float))",
            "method.gama: unknown field; did you mean 'gamma'? (given 1 (int); known: name, gamma, target, extra)",
            "optimizer.lr: should be greater than 0 (given -1 (int))",
            "optimizer.name: should be 'adamw', 'adam', 'sgd', 'adafactor', 'adagrad', 'adadelta', 'adamax', 'asgd', "
            "'nadam', 'radam' or 'rmsprop'; did you mean 'adam'? (given 'adan' (str))",
            "rollout.eval_kwargs.temperature: should be greater than or equal to 0 (given -1 (int))",
            "train.batch_size: should be a valid integer, unable to parse string as an integer (given 'many' (str))",
            "train.sede: unknown field; did you mean 'seed'? (given 2 (int); known: "
            + ", ".join(TrainConfig.model_fields)
            + ")",
            "trian: unknown field; did you mean 'train'? (given {} (dict); known: "
            + ", ".join(TRLConfig.model_fields)
            + ")",
        ]
    )


def test_an_unknown_method_is_told_together_with_the_other_faults():
    unknown, rate = faults(lambda: TRLConfig(method={"name": "config-tou"}, optimizer={"lr": 0}))
    assert unknown.startswith("method: no plugin 'config-tou' is installed; did you mean 'config-toy'?")
    assert "config-other, config-toy" in unknown
    assert unknown.endswith("(given {'name': 'config-tou'} (dict))")
    assert rate == "optimizer.lr: should be greater than 0 (given 0 (int))"


def test_a_method_is_required():
    told = fault(lambda: TRLConfig(train={"seed": 1}))
    assert told.startswith("method: required, not given; name an algorithm: bco, best_of_k, ")


@table("method", [3, None, [], {}, {"gamma": 1}, {"name": 3}])
def test_a_method_without_a_name_is_refused(method):
    told = fault(lambda: TRLConfig(method=method))
    assert told.startswith("method: should be a method's name, or a mapping with its 'name' (given ")


def test_a_config_for_one_method_takes_no_other():
    assert "instance of ToyConfig" in fault(lambda: TRLConfig[ToyConfig](method="config-other"))


def test_one_wrong_model_path_is_one_fault():
    allowed = "should be a hub id or directory, the fields of a model config, or None"
    for field in ("model_path", "reference_path"):
        assert fault(lambda: toy(model={field: 3})) == f"model.{field}: {allowed} (given 3 (int))"  # noqa: B023


@table("key", [True, 7, None, "self"])
def test_a_section_with_a_strange_name_is_an_unknown_field(key):
    told = fault(lambda: TRLConfig.from_dict({"method": "config-toy", key: {}}))
    assert told.startswith(f"{key}: unknown field")


def test_resuming_by_itself_needs_a_run_directory():
    assert fault(lambda: toy(train={"resume": "auto"})).startswith(
        "train: resume 'auto' looks into run_dir, which is not set; set train.run_dir"
    )
    assert toy(train={"resume": "auto", "run_dir": "runs/a"}).train.resume == "auto"
    assert toy(train={"resume": "runs/a/step-3"}).train.run_dir is None


def test_an_empty_stop_string_is_refused():
    assert fault(lambda: toy(rollout={"stop_sequences": ["a", ""]})).startswith(
        "rollout.stop_sequences: an empty stop string would end every response at once"
    )


# -------------------------------------------------------------------------------------------------- eval_kwargs


def test_one_setting_of_evaluation_may_be_swept():
    settings = {"temperature": [0, 0.7, 1.0], "max_new_tokens": 8, "stop_sequences": ["\n", "."]}
    assert toy(rollout={"eval_kwargs": settings}).rollout.eval_kwargs == settings


@table(
    "settings, line",
    [
        (
            {"top_k": [1, 2], "top_p": [0.5, 1]},
            "rollout.eval_kwargs: one setting may be a list of values to sweep; given: top_k, top_p",
        ),
        ({"top_k": []}, "rollout.eval_kwargs: the list of values for top_k is empty; give at least one"),
        (
            {"top_p": [0.5, 1.5]},
            "rollout.eval_kwargs.top_p: should be less than or equal to 1 (given 1.5 (float))",
        ),
        (
            {"temprature": 0},
            "rollout.eval_kwargs.temprature: unknown field; did you mean 'temperature'? (given 0 (int); known: "
            + ", ".join(SamplingConfig.model_fields)
            + ")",
        ),
    ],
)
def test_wrong_settings_of_evaluation_are_refused(settings, line):
    assert fault(lambda: toy(rollout={"eval_kwargs": settings})).startswith(line)


# --------------------------------------------------------------------------------------------- evolve and update


def test_evolve_changes_the_leaves_it_names_and_no_others():
    base = toy(train={"batch_size": 8}, method={"name": "config-toy", "gamma": 0.5})
    changed = base.evolve(train={"seed": 2}, method={"target": 6.0})
    expected = base.to_dict()
    expected["train"]["seed"] = 2
    expected["method"]["target"] = 6.0
    assert changed.to_dict() == expected


def test_update_goes_by_dotted_path_to_the_leaf():
    base = toy()
    changed = base.update({"train.seed": 2, "optimizer.kwargs.eps": 1e-6, "method.extra.deep.er": 1, "train.epochs": 3})
    expected = base.to_dict()
    expected["train"] |= {"seed": 2, "epochs": 3}
    expected["optimizer"]["kwargs"]["eps"] = 1e-6
    expected["method"]["extra"] = {"deep": {"er": 1}}
    assert changed.to_dict() == expected


def test_making_another_config_leaves_the_first_and_the_given_data_alone():
    base = toy()
    before, changes = base.to_dict(), {"kwargs": {"betas": [0.1, 0.2]}}
    changed = base.evolve(optimizer=changes)
    base.update({"optimizer.kwargs": {"eps": 1}, "train.trackers": []})
    assert changes == {"kwargs": {"betas": [0.1, 0.2]}}
    assert base.to_dict() == before
    changes["kwargs"]["betas"].append(0.3)
    assert changed.optimizer.kwargs == {"betas": [0.1, 0.2]}


def test_changing_plain_data_changes_no_config():
    config = toy()
    before = config.to_dict()
    plain = config.to_dict()
    plain["optimizer"]["kwargs"]["betas"].clear()
    plain["train"].clear()
    assert config.to_dict() == before


def test_changing_what_a_config_was_made_of_changes_no_config():
    given_data = {"method": {"name": "config-toy", "extra": {"list": [1]}}, "train": {"trackers": []}}
    by_dict, by_words = TRLConfig.from_dict(given_data), TRLConfig(**given_data)
    given_data["method"]["extra"]["list"].append(2)
    given_data["train"]["trackers"].append("wandb")
    for config in (by_dict, by_words):
        assert config.method.extra == {"list": [1]}
        assert config.train.trackers == []


def test_configs_share_no_defaults():
    toy().optimizer.kwargs["betas"].append(0.0)
    toy().train.trackers.append("wandb")
    assert toy().optimizer.kwargs == {"betas": [0.9, 0.95]}
    assert toy().train.trackers == ["tensorboard"]
    assert ToyConfig.section_defaults["optimizer"]["kwargs"] == {"betas": [0.9, 0.95]}


def test_a_base_of_none_takes_a_value_and_a_mapping_and_gives_way_to_none_again():
    base = toy()
    assert base.update({"method.target": 6}).update({"method.target": None}) == base
    tiny = base.update({"model.model_path.model_type": "gpt2", "model.model_path.n_layer": 2})
    assert tiny.model.model_path == {"model_type": "gpt2", "n_layer": 2}
    assert tiny.evolve(model={"model_path": None}) == base


def test_fields_of_a_model_merge_and_another_architecture_replaces_them():
    tiny = toy(model={"model_path": {"model_type": "gpt2", "n_layer": 2}})
    assert tiny.update({"model.model_path.n_embd": 8}).model.model_path == {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 8,
    }
    llama = {"model_type": "llama", "hidden_size": 8}
    assert tiny.evolve(model={"model_path": llama}).model.model_path == llama
    assert tiny.evolve(model={"model_path": "gpt2"}).model.model_path == "gpt2"
    compared = toy(model={"reference_path": {"model_type": "gpt2", "n_layer": 2}})
    assert compared.evolve(model={"reference_path": llama}).model.reference_path == llama


def test_a_section_given_as_a_model_replaces_the_section():
    base = toy(train={"seed": 7, "batch_size": 4})
    assert base.evolve(train=TrainConfig(batch_size=2)).train == TrainConfig(batch_size=2)


@table(
    "path, line",
    [
        ("trian.seed", "trian: unknown field; did you mean 'train'?"),
        ("train.sede", "train.sede: unknown field; did you mean 'seed'?"),
        ("method.gama", "method.gama: unknown field; did you mean 'gamma'?"),
        ("rollout.eval_kwargs.topk", "rollout.eval_kwargs.topk: unknown field; did you mean 'top_k'?"),
        ("train.seed.low", "train.seed: should be a valid integer (given {'low': 1} (dict))"),
        ("train", "train: should be a mapping, with a setting and its value in each line (given 1 (int))"),
        ("train.", "train.: unknown field"),
    ],
)
def test_a_misspelt_path_is_an_error_at_its_depth(path, line):
    assert fault(lambda: toy().update({path: 1})).startswith(line)


def test_naming_another_method_replaces_its_section_and_keeps_the_others():
    base = toy(method={"name": "config-toy", "gamma": 0.5}, train={"seed": 7})
    for changed in (
        base.evolve(method="config-other"),
        base.evolve(method={"name": "config-other"}),
        base.evolve(method=OtherConfig()),
        base.update({"method": "config-other"}),
        base.update({"method.name": "config-other"}),
    ):
        assert changed.method == OtherConfig()
        assert (changed.train, changed.optimizer) == (base.train, base.optimizer)


@table("flip", [False, True])
def test_a_change_may_name_another_method_and_its_numbers_in_any_order(flip):
    changes = [("method", "config-other"), ("method.beta", 0.5)]
    assert toy().update(dict(changes[::-1] if flip else changes)).method == OtherConfig(beta=0.5)


def test_numbers_of_the_old_method_do_not_survive_a_new_one():
    told = fault(lambda: toy().update({"method": "config-other", "method.gamma": 0.5}))
    assert told == "method.gamma: unknown field (given 0.5 (float); known: name, beta)"


@table("name", ["config-toy", "Config-TOY"])
def test_naming_the_same_method_keeps_its_numbers(name):
    base = toy(method={"name": "config-toy", "gamma": 0.5})
    for changed in (
        base.evolve(method=name),
        base.evolve(method={"name": name}),
        base.update({"method": name}),
    ):
        assert changed == base


# ---------------------------------------------------------------------------------------------- section defaults


def test_a_method_is_given_as_name_mapping_or_instance():
    assert TRLConfig(method="config-toy") == TRLConfig(method={"name": "config-toy"}) == TRLConfig(method=ToyConfig())
    assert default_config("Config-Toy") == toy()
    assert default_config("CONFIG-TOY").method.name == "config-toy"


def test_the_methods_own_defaults_apply_where_nothing_is_given():
    config = default_config("config-toy")
    assert (config.optimizer.lr, config.rollout.num_rollouts) == (3e-4, 64)
    assert config.optimizer.kwargs == {"betas": [0.9, 0.95]}
    assert config.optimizer.weight_decay == OptimizerConfig().weight_decay
    assert default_config("config-other").optimizer == OptimizerConfig()


def test_what_is_given_stands_above_the_methods_own_defaults():
    config = toy(optimizer={"lr": 1e-3, "kwargs": {"eps": 1e-6}}, rollout={"num_rollouts": 128})
    assert (config.optimizer.lr, config.rollout.num_rollouts) == (1e-3, 128)  # also where it is the field's default
    assert config.optimizer.kwargs == {"betas": [0.9, 0.95], "eps": 1e-6}
    assert toy(optimizer=OptimizerConfig()).optimizer == OptimizerConfig()


def test_a_whole_config_is_read_back_without_the_methods_own_defaults_coming_in():
    plain = toy(optimizer=OptimizerConfig()).to_dict()
    assert TRLConfig.from_dict(plain).optimizer.lr == OptimizerConfig().lr


# --------------------------------------------------------------------------------------------- frozen, described


@table("section", [*TRLConfig.model_fields])
def test_no_section_can_be_assigned(section):
    with pytest.raises(ConfigError, match=rf"frozen.* config = config\.evolve\({section}=None\)"):
        setattr(toy(), section, None)


@table("name", [name for name in TRLConfig.model_fields if name != "plugins"])
def test_no_field_of_a_section_can_be_assigned(name):
    section = getattr(toy(), name)
    for field in type(section).model_fields:
        with pytest.raises(ConfigError, match=rf"frozen.* config = config\.evolve\({name}=dict\({field}=None\)"):
            setattr(section, field, None)
        with pytest.raises(ConfigError, match="frozen"):
            delattr(section, field)


def test_what_to_write_instead_of_an_assignment_is_told():
    config = toy()
    with pytest.raises(ConfigError) as raised:
        config.train.seed = 3  # type: ignore[misc]
    assert str(raised.value) == (
        "TrainConfig is frozen, and 'seed' cannot be assigned. Make a changed copy: "
        "config = config.evolve(train=dict(seed=3))"
    )
    assert eval("config.evolve(train=dict(seed=3))").train.seed == 3
    with pytest.raises(ConfigError, match=r"TRLConfig.* is frozen.*evolve\(train=\.\.\.\)$"):
        config.train = TRLConfig(method="config-other").train  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"evolve\(model=dict\(kwargs=\{'token': '\*+'\}\)\)"):
        config.model.kwargs = {"token": "hf_secret"}  # type: ignore[misc]


def test_evaluation_knows_the_sampling_settings_of_its_method_and_no_others():
    settings = {"reach": [0, 1, 2], "top_k": 3}
    config = TRLConfig[Any](method="config-other", rollout={"eval_kwargs": settings})
    assert config.rollout.eval_kwargs == settings
    assert TRLConfig.from_dict(config.to_dict()) == config
    told = fault(lambda: TRLConfig[Any](method="config-other", rollout={"eval_kwargs": {"reach": [0, -1]}}))
    assert told == "rollout.eval_kwargs.reach: should be greater than or equal to 0 (given -1 (int))"
    told = fault(lambda: TRLConfig[Any](method="config-other", rollout={"eval_kwargs": {"raech": 1}}))
    assert told.startswith("rollout.eval_kwargs.raech: unknown field; did you mean 'reach'? (given 1 (int); known: ")
    assert fault(lambda: toy(rollout={"eval_kwargs": {"reach": 1}})).startswith("rollout.eval_kwargs.reach: unknown")


def test_faults_of_the_method_and_of_its_sampling_settings_are_told_together():
    with pytest.raises(ConfigError) as error:
        TRLConfig[Any](method={"name": "config-other", "beta": "x"}, rollout={"eval_kwargs": {"reach": -1}})
    assert all(f"{path}: " in str(error.value) for path in ("method.beta", "rollout.eval_kwargs.reach"))


def sections(cls):
    """The class and those of trainkit that are derived from it."""
    own = (each for each in cls.__subclasses__() if each.__module__.startswith("trainkit.config"))
    return {cls}.union(*map(sections, own))


def test_every_field_of_every_section_says_what_it_is_for():
    found = sections(Section) - sections(PluginConfig) | {TRLConfig}  # a name of a plugin says what it is
    assert {type(getattr(toy(), name)) for name in {*TRLConfig.model_fields} - {"method", "plugins"}} < found
    for section in found:
        assert section.__doc__
        assert [name for name, field in section.model_fields.items() if not (field.description or "").strip()] == []


def test_a_config_prints_as_the_yaml_it_is_read_from():
    text = str(toy(train={"seed": 11}))
    assert text.startswith("method:\n  name: config-toy\n")
    assert parse_yaml(text) == toy(train={"seed": 11}).to_dict()


def test_a_key_given_twice_in_yaml_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("train:\n  seed: 1\n  seed: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'seed' is given twice"):
        TRLConfig.load_yaml(tmp_path / "twice.yaml")


def test_an_unquoted_no_of_yaml_is_no_mixed_precision() -> None:
    assert TrainConfig.model_validate(parse_yaml("mixed_precision: no")).mixed_precision == "no"


def test_a_rollout_section_made_on_its_own_may_hold_a_methods_sampling_settings() -> None:
    rollout = RolloutConfig(eval_kwargs={"beta": [0, 1]})
    assert TRLConfig(method="ilql", rollout=rollout).rollout.eval_kwargs == {"beta": [0, 1]}
    with pytest.raises(ConfigError, match="beta"):
        TRLConfig(method="ppo", rollout=rollout)


# ------------------------------------------------------------------------------------------- settings of the built-ins

ALGORITHMS = [name for name in available_trainers() if name in BUILT_IN]


@table("name", ALGORITHMS)
def test_no_number_of_a_built_in_may_be_negative_but_a_score(name):
    fields = get_trainer(name).method_class.model_fields
    for field in [each for each in fields if is_number(fields[each]) and each != "missing_eos_score"]:
        with pytest.raises(ConfigError, match=rf"method\.{field}: .*\(given -1"):
            default_config(name).update({f"method.{field}": -1})


COMPARED = {"rloo": "rloo_k", "grpo": "group_size", "online_dpo": "k", "best_of_k": "k"}


@table("name, field", COMPARED.items())
def test_a_group_of_one_response_is_refused_with_the_reason(name, field):
    said = rf"method\.{field}: the responses to one prompt are compared with each other.*give at least 2 \(given 1"
    with pytest.raises(ConfigError, match=said):
        default_config(name).update({f"method.{field}": 1})
    with pytest.raises(ConfigError, match=rf"method\.{field}: should be a valid integer"):
        default_config(name).update({f"method.{field}": "several"})


def test_algorithms_that_do_not_compare_responses_may_sample_one():
    """RFT compares with the pool of earlier responses."""
    grouped = {name for name in ALGORITHMS if get_trainer(name).group}
    assert grouped == {*COMPARED, "rft"}
    assert default_config("rft").update({"method.rft_k": 1}).method.rft_k == 1


@table("name", ["dtype", "torch_dtype"])
@table("value", ["bfloat16", "object"])
def test_a_dtype_among_the_arguments_of_the_model_is_its_dtype(name: str, value: str) -> None:
    import torch

    given: Any = {"kwargs": {name: torch.bfloat16 if value == "object" else value, "revision": "x"}}
    written = default_config("sft").evolve(model={"dtype": "float32"})
    for made in (
        default_config("sft").evolve(model=given),
        TRLConfig.from_dict({"method": {"name": "sft"}, "model": given}),
        written.evolve(model=given),
        written.update({f"model.kwargs.{name}": given["kwargs"][name], "model.kwargs.revision": "x"}),
        written.evolve(model=ModelConfig(**given)),
    ):
        assert (made.model.dtype, made.model.kwargs) == ("bfloat16", {"revision": "x"})
    assert written.evolve(model={"kwargs": {name: None}}).model.dtype == "float32"
    with pytest.raises(ConfigError, match=r"bfloat16 and float32 are given as dtype and in kwargs; give model.dtype"):
        TRLConfig.from_dict({"method": {"name": "sft"}, "model": {**given, "dtype": "float32"}})


# ---------------------------------------------------------------------------------------------- names in error messages


@table(
    "method, section, name, hint",
    [
        ("ppo", "method", "gen_kwargs", "did you mean rollout?"),
        ("ppo", "method", "chunk_size", "did you mean rollout.batch_size?"),
        ("ppo", "train", "checkpoint_interval", "did you mean train.save_interval?"),
        ("ppo", "train", "minibatch_size", "did you mean train.microbatch_size?"),
        ("ppo", "train", "trainer_kwargs", "give logit_mask to train()"),
        ("ppo", "method", "ref_std", "scale_reward 'ref'"),
        ("ppo", "method", "adap_kl_ctrl", ""),
        ("grpo", "train", "num_generations", "did you mean method.group_size?"),
        ("grpo", "method", "num_iterations", "did you mean method.grpo_epochs?"),
        ("grpo", "rollout", "max_completion_length", "did you mean rollout.max_new_tokens?"),
        ("grpo", "rollout", "vllm_gpu_memory_utilization", "kv_cache"),
        ("rloo", "method", "reward_weights", "weigh the rewards there"),
        ("rloo", "train", "total_episodes", ""),
        ("rloo", "method", "penalty_reward_value", ""),
        ("sft", "train", "dataset_num_proc", "tokenizers have threads of their own"),
        ("sft", "train", "deepspeed", "did you mean train.sharding?"),
        ("sft", "train", "fsdp", "did you mean train.sharding?"),
        ("sft", "train", "fsdp_config", "did you mean train.sharding?"),
        ("sft", "train", "deepspeed_config", "did you mean train.sharding?"),
        ("sft", "train", "zero_stage", "did you mean train.sharding?"),
        ("sft", "train", "prepare_deepspeed", "did you mean train.sharding?"),
        ("sft", "train", "distributed_type", "did you mean train.sharding?"),
        ("sft", "train", "load_best_model_at_end", "did you mean train.save_best?"),
        ("dpo", "train", "precompute_ref_log_probs", "are always computed once"),
        ("dpo", "model", "ref_adapter_name", "for another one give ref_model"),
    ],
)
def test_names_of_other_frameworks_are_known_to_messages(method: str, section: str, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{name}.*{re.escape(hint)}"):
        TRLConfig.from_dict(
            {"method": method, section: {name: 1} if section != "method" else {"name": method, name: 1}}
        )


@table("value, meant", [("full_shard", "fsdp2"), ("deepspeed", "zero3 or zero2")])
def test_names_of_other_frameworks_for_shardings_are_known(value: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"elsewhere {meant} is called so"):
        TRLConfig(method="sft", train={"sharding": value})


def test_fields_of_trlx_are_known_to_messages_about_typing_errors() -> None:
    assert dotted("checkpoint_interval") == ["train.save_interval"]
    assert dotted("n_generations_per_prompt") == ["method.rft_k"]
    with pytest.raises(ConfigError, match=r"did you mean train\.run_dir"):
        default_config("ppo").evolve(train={"checkpoint_dir": "x"})
