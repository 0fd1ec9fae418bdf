"""What SECURITY.md promises: secrets stay secret, code of others needs a flag, no file hurts by its form."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit import PluginConfig, TRLConfig, hookimpl, register_tracker
from trainkit.cli import app
from trainkit.config import ModelConfig
from trainkit.errors import ConfigError, describe
from trainkit.plain import BYTES, DEPTH, DIGITS, VALUES, parse_yaml, read_yaml
from trainkit.plugins import registry
from trainkit.runs import checkpoint
from trainkit.security import MASK, Secret, guarded, hidden, is_secret
from trainkit.testing import character_tokenizer
from trainkit.testing.trainers import LETTERS, tiny_trainer

CANARY = "canary-7f3a"


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def everything(root: Path) -> bytes:
    """Every byte of every file under a directory, and the names of the files."""
    files = [path for path in root.rglob("*") if path.is_file()]
    assert files
    return b"".join(str(path).encode() + path.read_bytes() for path in files)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with a model of 10 tokens and its tokenizer."""
    place = str(tmp_path / "start")
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=10, n_layer=1, n_head=2, n_embd=16, n_positions=32, bos_token_id=None, eos_token_id=8)
    ).save_pretrained(place)
    character_tokenizer(LETTERS).save_pretrained(place)
    return place


# ---------------------------------------------------------------------------------------------- what a secret is


@table("names, secret", [
        ("token hf_token use_auth_token hub_token auth_token access_token password db_password secret client_secret "
         "api_key openai_api_key apikey API_KEY api-key HF_TOKEN WANDB_API_KEY", True),
        ("pad_token eos_token bos_token image_token additional_special_tokens tokens token_id max_new_tokens "
         "correction_level keys key secretary", False),
    ])  # fmt: skip
def test_names_say_what_is_secret(names: str, secret: bool) -> None:
    assert {name: is_secret(name) for name in names.split()} == dict.fromkeys(names.split(), secret)


KEYS = st.sampled_from(["token", "api_key", "password", "pad_token", "a", "b"])
LEAVES = st.sampled_from([CANARY, 7, True, None, "", "x"])
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@given(st.dictionaries(KEYS, PLAIN))
def test_neither_a_dump_nor_a_message_shows_a_secret_and_everything_else_stays(plain: dict[str, Any]) -> None:
    def keep(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: keep(item) for key, item in value.items() if not is_secret(key)}
        return [keep(item) for item in value] if isinstance(value, list) else value

    assert keep(hidden(plain)) == keep(plain) == keep(guarded(plain))
    assert hidden(hidden(plain)) == hidden(plain) == hidden(guarded(plain))
    secrets = {key: item for key, item in plain.items() if is_secret(key)}
    for shown in (json.dumps(hidden(secrets)), repr(guarded(secrets)), describe(secrets, 10_000)):
        assert CANARY not in shown
        assert "7" not in shown
    assert hidden({"token": [True, None, ""]}) == {"token": [True, None, ""]}, "flags and nothing are no secrets"


def test_a_guarded_secret_is_the_text_itself_for_whoever_uses_it() -> None:
    secret = guarded({"token": CANARY})["token"]
    assert secret == CANARY == f"{secret}" == str(secret) == copy.deepcopy(secret) == pickle.loads(pickle.dumps(secret))
    assert isinstance(copy.deepcopy(secret), Secret)
    assert repr(secret) == repr(MASK)
    assert guarded({"password": 1234}) == {"password": "1234"}


# ------------------------------------------------------------------------------------- secrets in a configuration


class KeyedConfig(PluginConfig):
    """Settings with secrets."""

    api_key: str = ""
    """A secret by its name."""
    phrase: SecretStr = SecretStr("")
    """A secret by its type."""
    rank: int = 1
    """No secret."""


class Keyed:
    """A tracker that notes the secrets that it is given."""

    given: list[tuple[str, str]] = []  # noqa: RUF012

    def __init__(self, settings: KeyedConfig) -> None:
        self.given.append((settings.api_key, settings.phrase.get_secret_value()))

    @hookimpl
    def log_metrics(self) -> None:
        """Do nothing."""


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The tracker ``my-keyed``; what it was given."""
    monkeypatch.setattr(registry, "_HOOKS", dict(registry._HOOKS))
    monkeypatch.setattr(Keyed, "given", [])
    register_tracker("my-keyed", KeyedConfig)(Keyed)
    return Keyed.given


def keyed_config(**others: Any) -> TRLConfig[Any]:
    entry = {"name": "my-keyed", "api_key": f"{CANARY}-1", "phrase": f"{CANARY}-2"}
    return TRLConfig.from_dict(
        {
            "method": "sft",
            "model": {"kwargs": {"token": f"{CANARY}-3", "revision": "main", "deep": [{"my_api_key": f"{CANARY}-4"}]}},
            "tokenizer": {"kwargs": {"use_auth_token": f"{CANARY}-5", "pad_token": "<pad>", "password": 1234567}},
            "train": {"trackers": [entry], **others},
        }
    )


def test_a_configuration_uses_its_secrets_and_shows_none(keyed: Any, tmp_path: Path) -> None:
    config = keyed_config()
    assert config.model.kwargs["token"] == f"{CANARY}-3"
    assert config.tokenizer.kwargs == {"token": f"{CANARY}-5", "pad_token": "<pad>", "password": "1234567"}
    config.save_yaml(tmp_path / "config.yaml")
    saved = (tmp_path / "config.yaml").read_text()
    for shown in (saved, str(config), repr(config), repr(config.train), repr(config.model.kwargs), f"{config.train!r}"):
        assert CANARY not in shown
        assert "1234567" not in shown
    assert config.to_dict()["train"]["trackers"] == [{"name": "my-keyed", "api_key": MASK, "phrase": MASK, "rank": 1}]
    assert config.to_dict()["model"]["kwargs"] == {"token": MASK, "revision": "main", "deep": [{"my_api_key": MASK}]}
    assert TRLConfig.from_dict(config.to_dict(secrets=True)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_changed_copies_keep_secrets(keyed: Any) -> None:
    for changed in (keyed_config().evolve(train={"seed": 3}), keyed_config().update({"train.seed": 3})):
        assert changed == keyed_config(seed=3)
        assert changed.train.trackers[0].phrase.get_secret_value() == f"{CANARY}-2"  # type: ignore[union-attr]


@table("token", [f"{CANARY}\n", f" {CANARY}", f"{CANARY}\x00", f"{CANARY}é"])
def test_a_token_that_a_library_would_quote_in_its_error_is_refused(token: str) -> None:
    """A header with a line break is an error of HTTP libraries that shows the header."""
    with pytest.raises(ConfigError, match="the token has a space, a line break") as caught:
        TRLConfig.from_dict({"method": "sft", "model": {"kwargs": {"token": token}}})
    assert CANARY not in str(caught.value)


def test_the_token_of_the_hub_has_one_name() -> None:
    assert ModelConfig(kwargs={"hf_token": "x"}).kwargs == {"token": "x"}
    assert ModelConfig(kwargs={"token": True}).kwargs == {"token": True}
    assert ModelConfig(kwargs={"token": MASK, "hf_token": "x"}).kwargs == {"token": "x"}, "given again"
    assert ModelConfig(kwargs={"token": MASK}).kwargs == {"token": MASK}
    with pytest.raises(ValidationError, match="token and hf_token are given, which are one setting"):
        ModelConfig(kwargs={"hf_token": "x", "token": "y"})


WRONG: dict[str, dict[str, Any]] = {
    "beside": {"train": {"trackers": [{"name": "my-keyed", "api_key": CANARY, "rank": "x", "more": 1}]}},
    "itself": {"train": {"trackers": [{"name": "my-keyed", "api_key": [CANARY]}]}},
    "typed": {"train": {"trackers": [{"name": "my-keyed", "api_key": {"b": CANARY}, "phrase": {"token": CANARY}}]}},
    "no settings": {"train": {"trackers": [{"name": "tensorboard", "api_key": CANARY}]}},
    "not installed": {"plugins": [{"name": "no-such", "password": CANARY}]},
    "no name": {"plugins": [{"password": CANARY}]},
    "twice": {"train": {"trackers": [{"name": "my-keyed", "api_key": CANARY}, {"name": "my-keyed", "api_key": "x"}]}},
    "two names": {"model": {"kwargs": {"token": CANARY, "hf_token": CANARY}}},
    "dtype": {"model": {"kwargs": {"token": CANARY, "dtype": "int8"}}},
    "wrong place": {"model": {"token": CANARY}},
    "wrong section": {"model": [{"kwargs": {"token": CANARY}}]},
    "engine": {"rollout": {"engine": {"name": "vllm", "arguments": {"api_key": CANARY}, "mode": 1}}},
    "no such engine": {"rollout": {"engine": {"name": "vlm", "api_key": CANARY}}},
}


@table("wrong", WRONG)
def test_errors_about_a_configuration_show_no_secret(keyed: Any, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"method": "sft", **WRONG[wrong]}))
    for fails in (
        lambda: TRLConfig.from_dict({"method": "sft", **WRONG[wrong]}),
        lambda: TRLConfig.load_yaml(tmp_path / "config.yaml"),
        lambda: TRLConfig(method="sft").evolve(**WRONG[wrong]),
    ):
        with pytest.raises(ConfigError) as caught:
            fails()
        assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_errors_of_single_sections_show_no_secret(keyed: Any) -> None:
    for fails in (
        lambda: ModelConfig(kwargs={"token": CANARY, "dtype": "x"}),
        lambda: ModelConfig(token=CANARY),
        lambda: KeyedConfig(name="my-keyed", api_key=CANARY, rank="x", more={"token": CANARY}),
    ):
        with pytest.raises(ValidationError) as caught:
            fails()
        assert CANARY not in str(caught.value)


@table("begin, end", [("'", ""), ("[", ""), ("{", ""), ("", ": x")])
def test_errors_of_yaml_say_where_and_quote_nothing(tmp_path: Path, begin: str, end: str) -> None:
    (tmp_path / "bad.yaml").write_text(f"method: sft\nmodel:\n  kwargs:\n    token: {begin}{CANARY}{end}\n")
    found = cli("--traceback", "train", str(tmp_path / "bad.yaml"))
    assert isinstance(found.exception, ConfigError)
    assert "bad.yaml is not valid YAML" in str(found.exception)
    assert re.search(r"\(\S+bad\.yaml:[45], column \d+\)", str(found.exception))
    assert CANARY not in "".join(traceback.format_exception(found.exception))


def test_errors_of_overrides_name_the_setting_and_not_its_value(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("method: sft\n")
    for override in (f"model.kwargs.token=[{CANARY}", f"model.token={CANARY}", f"model.kwargs={{token: {CANARY}"):
        found = cli("train", str(tmp_path / "config.yaml"), override)
        assert found.exit_code == 2
        assert "model." in found.stderr
        assert CANARY not in found.output


def test_defaults_that_come_from_the_environment_are_not_printed(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_HOOKS", dict(registry._HOOKS))
    monkeypatch.setenv("FAKE_HIDES_API_KEY", CANARY)
    install("fake-hides", {"fake-hides": "fake_hides"}, HIDES, kind="tracker")
    found = cli("config", "fake-hides")
    assert found.exit_code == 0, found.output
    assert f"api_key: '{MASK}'" in found.stdout
    assert CANARY not in found.stdout
    sys.modules.pop("fake_hides", None)


HIDES = """
import os
import re
from pydantic import Field
from trainkit import PluginConfig, hookimpl, register_tracker

class HidesConfig(PluginConfig):
    \"\"\"A secret.\"\"\"

    api_key: str = Field(default_factory=lambda: os.environ["FAKE_HIDES_API_KEY"])
    \"\"\"The secret.\"\"\"

@register_tracker("fake-hides", HidesConfig)
class Hides:
    def __init__(self, settings): ...

    @hookimpl
    def log_metrics(self): ...
"""


# ------------------------------------------------------------------------------------------------ secrets of a run


def test_no_file_of_a_run_has_a_secret(
    keyed: list[Any], model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with a resumed run."""
    monkeypatch.setenv("HF_TOKEN", f"{CANARY}-hub")
    entry = {"name": "my-keyed", "api_key": f"{CANARY}-1", "phrase": f"{CANARY}-2"}
    for steps in (2, 3):
        trainer = tiny_trainer(
            "sft", tmp_path / "run", arguments={"tokenizer": None}, train__resume="auto", train__save_interval=1,
            train__total_steps=steps, train__trackers=["tensorboard", entry], train__eval_interval=1,
            model__model_path=model, model__kwargs={"use_auth_token": f"{CANARY}-3"},
            tokenizer__kwargs={"hf_token": f"{CANARY}-4", "password": f"{CANARY}-5", "x": {"api_key": f"{CANARY}-6"}},
        )  # fmt: skip
        trainer.learn()
        print(trainer.config, repr(trainer.config))
    assert trainer.run.resumption.messages
    assert keyed == [(f"{CANARY}-1", f"{CANARY}-2")] * 2
    assert CANARY.encode() not in everything(tmp_path / "run")
    assert (tmp_path / "run" / "tensorboard").is_dir()
    assert (tmp_path / "run" / "model" / "tokenizer_config.json").is_file()
    assert CANARY not in "".join(capfd.readouterr())


def test_a_secret_is_no_drift_and_old_checkpoints_do_not_show_theirs() -> None:
    before = {"model": {"kwargs": {"token": CANARY, "a": 1}}, "train": {"trackers": [{"name": "x", "api_key": CANARY}]}}
    for now in ({"token": MASK, "a": 1}, {"token": f"{CANARY}-2", "a": 1}, {"a": 1}):
        lines = checkpoint.config_drift(before, {"model": {"kwargs": now}, "train": {"trackers": [{"name": "x"}]}})
        assert lines == [f"train.trackers: [{{'name': 'x', 'api_key': {MASK!r}}}] -> [{{'name': 'x'}}]"]


def test_text_that_only_looks_like_a_mask_is_itself() -> None:
    config = TRLConfig.from_dict({"method": "sft", "rollout": {"stop_sequences": [MASK]}})
    assert config.settled() == config
    assert config.to_dict()["rollout"]["stop_sequences"] == [MASK]


def test_a_run_takes_the_place_of_masks_before_anything_uses_them(
    keyed: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = {"name": "my-keyed", "api_key": MASK, "phrase": MASK}
    with pytest.raises(ConfigError, match=r"train.trackers.api_key \(my-keyed\): set MY_KEYED_API_KEY"):
        tiny_trainer("sft", tmp_path / "run", train__trackers=[entry])
    assert keyed == []
    monkeypatch.setenv("MY_KEYED_API_KEY", "from the environment")
    monkeypatch.setenv("MY_KEYED_PHRASE", "too")
    trainer = tiny_trainer("sft", tmp_path / "run", train__trackers=[entry])
    assert keyed == [("from the environment", "too")]
    assert "from the environment" not in repr(trainer.config) + str(trainer.config)


# ---------------------------------------------------------------------------------------------------- remote code

CODE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel

Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()

class FarConfig(GPT2Config):
    model_type = "far"

class Far(GPT2LMHeadModel):
    config_class = FarConfig
"""


@pytest.fixture
def far(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """A directory whose model needs code that lies beside it, and the file that this code makes."""
    ran = tmp_path / "ran"
    fields = json.loads((Path(model) / "config.json").read_text())
    code = {"AutoConfig": "far.FarConfig", "AutoModelForCausalLM": "far.Far"}
    changed = {**fields, "model_type": "far", "architectures": ["Far"], "auto_map": code}
    (Path(model) / "config.json").write_text(json.dumps(changed))
    (Path(model) / "far.py").write_text(CODE.format(marker=str(ran)))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(str(prompt)) or "y")
    yield model, ran
    assert asked == [], "nobody is asked on the terminal"
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def run_far(model: str, place: Path, trust: bool = False, **settings: Any) -> Any:
    config = {
        "method": "sft",
        "model": {"model_path": model, **settings},
        "train": {"batch_size": 2, "total_steps": 2, "save_interval": 1, "trackers": [], "run_dir": str(place)},
    }
    samples = ["abcd", "bcda", "cdab", "dabc"]
    if place.exists():
        config = {**yaml.safe_load((place / "config.yaml").read_text())}
        config["train"] |= {"resume": "auto", "total_steps": 3}
    return trainkit.train(config=config, samples=samples, **({"trust_remote_code": True} if trust else {}))


def test_code_of_a_model_runs_only_with_the_flag_of_the_call(far: tuple[str, Path], tmp_path: Path) -> None:
    model, ran = far
    with pytest.raises(ConfigError, match="allow it with --trust-remote-code"):
        run_far(model, tmp_path / "run")
    for settings_given in ({"kwargs": {"trust_remote_code": True}}, {"kwargs": {"config": {"trust_remote_code": 1}}}):
        with pytest.raises(ConfigError, match=r"model\.kwargs.*trust_remote_code would run code.*--trust-remote-code"):
            run_far(model, tmp_path / "run", **settings_given)
    assert not ran.exists()

    trainer = run_far(model, tmp_path / "run", trust=True)
    assert ran.exists()
    assert type(trainer.unwrapped.model).__name__ == "Far"
    assert trainer.config.model.kwargs == trainer.config.tokenizer.kwargs == {"trust_remote_code": True}

    ran.unlink()
    with pytest.raises(ConfigError, match="--trust-remote-code"):  # its own config.yaml is a configuration, too
        run_far(model, tmp_path / "run")
    assert not ran.exists()
    assert run_far(model, tmp_path / "run", trust=True).progress.step == 3


def test_the_command_line_and_its_tasks_need_the_flag_too(far: tuple[str, Path], tmp_path: Path) -> None:
    model, ran = far
    (tmp_path / "task.py").write_text("def sft(): return {'samples': ['abcd', 'bcda']}\n"
                                      "def trusts(): return {**sft(), 'trust_remote_code': True}\n")  # fmt: skip
    (tmp_path / "far.yaml").write_text(
        f"method: sft\nmodel: {{model_path: {model}}}\n"
        f"train: {{batch_size: 2, total_steps: 1, trackers: [], run_dir: {tmp_path / 'run'}}}\n"
    )
    train = ("train", str(tmp_path / "far.yaml"), "--task", f"{tmp_path / 'task.py'}:sft")
    for arguments in (train, (*train, "model.kwargs.trust_remote_code=true"), (*train, "model.kwargs.trust=1")):
        found = cli(*arguments)
        assert found.exit_code == 2
        assert "--trust-remote-code" in found.stderr
    assert "which trainkit.train does not take from a task" in cli(*train[:-1], f"{train[-1][:-3]}trusts").stderr
    assert not ran.exists()
    found = cli(*train, "--trust-remote-code")
    assert found.exit_code == 0, found.output
    assert ran.exists()


@table(
    "setting, value",
    [
        ("model.kwargs.weights_only", False),
        ("model.kwargs.use_kernels", True),
        ("model.kwargs.allow_all_kernels", True),
        ("model.kwargs.attn_implementation", "someone/kernel"),
        ("model.kwargs.attn_implementation", {"text_config": "someone/kernel"}),
        ("model.kwargs.custom_pipeline", "someone/pipeline"),
        ("model.peft_config.megatron_config", {"a": 1}),
        ("model.model_path._attn_implementation", "someone/kernel"),
        ("tokenizer.kwargs.trust_remote_code", "yes"),
        ("rollout.engine.arguments.trust_remote_code", True),
        ("rollout.engine.arguments.trust-remote", True),
    ],
)
def test_every_setting_that_runs_code_of_others_is_refused_by_its_name(setting: str, value: Any) -> None:
    config = with_engine().update({setting: value})
    with pytest.raises(ConfigError, match=f"{setting.split('.')[-1]} would run code that comes with a model"):
        config.settled()
    config.settled(trust_remote_code=True)


def with_engine() -> TRLConfig[Any]:
    return TRLConfig.from_dict(
        {"method": "ppo", "model": {"model_path": {"model_type": "gpt2"}}, "rollout": {"engine": {"name": "vllm"}}}
    )


def test_settings_like_those_that_run_code_of_others_are_allowed() -> None:
    with_engine().settled()
    with_engine().update({"model.kwargs.attn_implementation": "eager", "model.kwargs.weights_only": True}).settled()


# ----------------------------------------------------------------------------------------------------------- YAML

PAIRS = "a: &a {x: 1}\n"
BOMBS = {
    "laughs": "\n".join([f"a0: &a0 [{'x,' * 10}]", *(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]" for i in range(1, 9))]),
    "mappings": PAIRS + "\n".join(f"a{i}: &a{i} {{p: *a{i - 1 or ''}, q: *a{i - 1 or ''}}}" for i in range(1, 30)),
    "an alias in itself": "a: &a [*a]",
    "an alias in its mapping": "a: &a {b: [*a]}",
    "merges": PAIRS + "b: {<<: [*a, *a]}",
    "flow": "[" * 50_000,
    "blocks": "- " * 50_000 + "x",
    "nested mappings": "{a: " * 30_000,
    "keys of keys": "? " * 50_000,
    "digits": f"a: {'1' * 100_000}",
    "digits of a float": f"a: {'1' * 100_000}e5",
    "digits of a hexadecimal": f"a: 0x{'f' * 100_000}",
    "digits of base 60": f"a: {'1:' * 50_000}1",
    "digits behind a tag": f"a: !!int '{'1' * 5_000}'",
    "values": f"[{'a,' * 60_000}]",
    "keys": "\n".join(f"k{i}:" for i in range(15_000)),
    "bytes": f"a: {'x' * BYTES}",
    "a tag of Python": "!!python/object/apply:os.system [ls]",
    "an unknown tag": f"%TAG !a! {'b' * 100_000}\n--- !a!c d",
    "a list as a key": "? [a]\n: b",
    "a date": "a: 2001-99-99",
    "a character": r'a: "\UFFFFFFFF"',
    "a NUL": "a\0b",
    "no integer": "a: !!int x",
    "no number": "a: !!float ''",
    "no boolean": "a: !!bool x",
    "no time": "a: !!timestamp x",
    "documents": "--- a\n" * 20_000,
    "directives": "%A b\n" * 25_000,
}


@table("bomb", BOMBS)
def test_a_malicious_file_is_refused_within_a_second_in_one_line(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMBS[bomb])
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        TRLConfig.load_yaml(tmp_path / "bomb.yaml")
    assert time.process_time() - begun < 2, "seconds of the CPU; half of it on a machine that is not busy"
    assert str(caught.value).startswith(str(tmp_path / "bomb.yaml"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@table(
    "text",
    [
        "method: ppo\ntrain:\n" + "".join(f"  batch_sizf{i}: 1\n" for i in range(2_400)),
        "method: ppo\n? " + "m" * 100_000 + "\n: 1",
        "method: " + "x" * 100_000,
        f"method: ppo\nplugins: [{','.join(f'p{i}' for i in range(2_400))}]",
        f"method: ppo\ntrain: {{trackers: [{','.join(f'p{i}' for i in range(2_400))}]}}",
        f"method: ppo\nrollout: {{stop_sequences: [{'1,' * 4_800}]}}",
    ],
)
def test_a_configuration_with_thousands_of_faults_is_refused_as_quickly(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    TRLConfig(method="ppo")  # imports the plugin
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        TRLConfig.load_yaml(tmp_path / "bad.yaml")
    assert time.process_time() - begun < 3, "seconds of the CPU: the discovery of plugins, and what explains the faults"
    assert len(str(caught.value)) < 50_000


def test_what_is_within_the_bounds_is_read() -> None:
    deep = "[" * (DEPTH - 1) + "]" * (DEPTH - 1)
    assert parse_yaml(f"a: {deep}")["a"] == eval(deep)
    assert parse_yaml(f"a: {'1' * DIGITS}") == {"a": int("1" * DIGITS)}
    assert parse_yaml(f"a: '{'1' * 5000}'") == {"a": "1" * 5000}, "text"
    assert len(parse_yaml(f"[{'a,' * (VALUES - 1)}]")) == VALUES - 1
    assert parse_yaml("a: &a [1]\nb: [*a, *a]") == {"a": [1], "b": [[1], [1]]}


@given(st.text(alphabet="ab10:-?{}[],&*!|>'\"%@#\n .e_<=~\\x", max_size=60))
@settings(max_examples=200)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):  # and no other error
        parse_yaml(text)


def test_a_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("a\0b"), Path("x" * 300), Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"cannot read the config|larger than"):
            read_yaml(path)


def test_overrides_have_the_same_bounds(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("method: sft\n")
    for override, says in (
        (f"train.seed={'1' * 5_000}", "override 'train.seed' is not valid YAML: a number has 5000 characters"),
        (f"train.seed={'[' * 5_000}", "nested in more than 32 levels"),
        (f"{'a.' * 5_000}b=1", "a setting has at most 32 parts"),
    ):
        found = cli("train", str(tmp_path / "config.yaml"), override)
        assert found.exit_code == 2
        assert says in found.stderr
        assert len(found.stderr) < 1000


# ---------------------------------------------------------------------------------------------------------- paths


def test_the_default_directory_of_a_run_is_under_runs_whatever_the_method_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))
    sft = trainkit.get_trainer("sft")

    class OutConfig(sft.method_class):  # type: ignore[misc, name-defined]
        """A name that leads out."""

        name: str = "../../out"
        """The name."""

    class Out(sft):  # type: ignore[misc, valid-type]
        """The same algorithm."""

        method_class = OutConfig

    trainkit.register_trainer("../../out")(Out)
    trainer = tiny_trainer("../../out", tmp_path, train__run_dir=None, train__total_steps=1)
    trainer.learn()
    assert trainer.run_dir.parent == Path("runs")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_plugin_cannot_be_called_what_is_no_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["../x"], ["/abs"], ["a\0b"], ["x" * 300], ["a", "--out", "x" * 300]):
        found = cli("new-plugin", *arguments)
        assert found.exit_code == 2, found.output
        assert "ConfigError" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_names_only_files_of_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    tiny_trainer("sft", tmp_path / "run", train__total_steps=1, train__save_interval=1).learn()
    path = checkpoint.newest_whole(tmp_path / "run" / "checkpoints")
    assert path is not None
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["files"]["../../../outside"] = {"bytes": 0, "sha256": "x"}
    manifest["sha256"] = checkpoint._manifest_sha256(manifest)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    assert "which is not a file of the checkpoint" in str(checkpoint.find_fault(path))


# -------------------------------------------------------------------------------------------------------- network
