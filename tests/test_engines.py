"""Generation engines: how a run names one, what it refuses, and what the sampler above it makes of its answers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit import PluginConfig, TRLConfig, hookimpl, register_engine
from trainkit.cli import app
from trainkit.errors import CheckpointError, ConfigError, EngineError, PluginError, RegistryError
from trainkit.plain import parse_yaml
from trainkit.plugins import discover, get_engine, get_hooks, hook_manager, registry
from trainkit.plugins.probe import probe
from trainkit.rollouts import Engine, Generated, Replica, Request, ServedModel, Weights
from trainkit.rollouts.engines import EngineSampler
from trainkit.testing import tiny_llama, tiny_t5
from trainkit.testing.trainers import Letters, tiny_trainer

ONLINE = ("ppo", "rloo", "grpo", "rft", "online_dpo", "best_of_k", "distill", "xpo", "spin")


class CopiesConfig(PluginConfig):
    """Settings of an engine."""

    threads: int = Field(1, ge=1)
    """A setting."""


class Copies(Engine):
    """A stranger's engine: the core's sampler on a copy of the model, which `load` alone changes."""

    exact = True
    made: list[Copies] = []  # noqa: RUF012

    def __init__(self, config: CopiesConfig | None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.replica = Replica(replace(served, model=copy.deepcopy(served.model)))
        self.loaded: list[int] = []
        self.closed = 0
        self.spoil: Callable[[Generated], Any] = lambda answer: answer
        Copies.made.append(self)

    def load(self, weights: Weights) -> None:
        self.replica.load(weights)
        self.loaded.append(weights.version)

    def submit(self, request: Request) -> Future[Generated]:
        done: Future[Generated] = Future()
        done.set_result(self.spoil(self.replica.generate(request)))
        return done

    def close(self) -> None:
        self.closed += 1


class Able(Copies):
    """One that runs encoder-decoders and obeys masks too."""

    abilities = frozenset(("encoder_decoder", "logit_mask"))


class Plain(Copies):
    """One without settings."""


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engines of this file are registered, and gone after each test."""
    monkeypatch.setattr(registry.ENGINES, "classes", dict(registry.ENGINES.classes))
    monkeypatch.setattr(Copies, "made", [])
    register_engine("Copies", CopiesConfig)(Copies)
    register_engine("able")(Able)
    register_engine("plain")(Plain)
    yield
    Copies.made.clear()


def config(engine: Any, **sections: Any) -> TRLConfig[Any]:
    given = {"method": {"name": "rloo"}, "model": {"model_path": "gpt2"}, "rollout": {"engine": engine}}
    return TRLConfig.from_dict({**given, **sections})


# ---------------------------------------------------------------------------------------------------------- its name


def test_an_engine_is_a_name_or_a_mapping_with_its_settings() -> None:
    assert config("local").rollout.engine == "local"
    assert config("LOCAL").rollout.engine == "local"
    assert config("plain").rollout.engine == "plain"
    assert config({"name": "plain"}).rollout.engine == "plain"
    assert config("copies").rollout.engine == CopiesConfig(name="copies", threads=1)
    given = config({"name": "Copies", "threads": 2})
    assert given.rollout.engine == CopiesConfig(name="copies", threads=2)
    assert TRLConfig.from_dict(given.to_dict()) == given
    assert given.update({"rollout.engine.threads": 3}).rollout.engine == CopiesConfig(name="copies", threads=3)
    assert given.update({"rollout.engine": {"name": "plain"}}).rollout.engine == "plain", "settings are not mixed"


@table(
    "engine, told",
    [
        ("plian", "rollout.engine: there is no engine 'plian'; did you mean 'plain'?; rollout.engine names able,"),
        ("rloo", "rollout.engine: 'rloo' is no engine; rollout.engine names able, copies, local, plain"),
        ("early_stop", "rollout.engine: 'early_stop' is no engine"),
        ({"name": "copies", "threads": 0}, "rollout.engine.threads: should be greater than or equal to 1 (given 0"),
        ({"name": "copies", "thread": 1}, "rollout.engine.thread: unknown field; did you mean 'threads'?"),
        ({"threads": 1}, "should be the name of a generation engine, or a mapping with its 'name' and settings"),
        (3, "rollout.engine: should be the name of a generation engine"),
        ({"name": "local", "threads": 1}, "rollout.engine: 'local' has no settings; remove 'threads'"),
        ({"name": "plain", "threads": 1}, "rollout.engine: 'plain' has no settings; remove 'threads'"),
    ],
)
def test_a_wrong_engine_is_refused_with_what_is_allowed(engine: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(engine)
    assert told in str(caught.value)


@table("name", ["copies", "local"])
def test_an_engine_is_neither_hooks_nor_an_algorithm(name: str) -> None:
    told = f"'{name}' is a generation engine; name it in rollout.engine"
    with pytest.raises(ConfigError, match=f"plugins.0: {told}"):
        config("local", plugins=[name])
    with pytest.raises(ConfigError, match=f"method: {told}"):
        config("local", method={"name": name})
    for ask in (lambda: get_hooks(name), lambda: hook_manager([name], []), lambda: trainkit.get_trainer(name)):
        with pytest.raises(RegistryError, match=told):
            ask()


ENGINE = """
from trainkit import register_engine
from trainkit.rollouts import Engine

@register_engine("fake-engine")
class FakeEngine(Engine):
    def load(self, weights): ...
    def submit(self, request): ...
"""


def test_an_installed_engine_is_imported_when_it_is_named_and_listed_as_one(install: Callable[..., Path]) -> None:
    install("fake-dist", {"fake-engine": "fake_engine_module"}, ENGINE, kind="engine")
    (found,) = (plugin for plugin in discover() if plugin.name == "fake-engine")
    assert (found.kind, found.why) == ("engine", "")
    shown = CliRunner().invoke(app, ["plugins"]).output.splitlines()
    assert any(line.split()[:3] == ["fake-engine", "engine", "fake-dist"] for line in shown)
    with pytest.raises(ConfigError, match=r"rollout\.engine names able, copies, fake-engine, local, plain"):
        config("nope")
    with pytest.raises(RegistryError, match="is a generation engine"):
        hook_manager(["fake-engine"], [])
    assert config("fake-engine").rollout.engine == "fake-engine"
    assert get_engine("Fake-Engine").made.__name__ == "FakeEngine"


@pytest.mark.slow
def test_a_probe_of_an_installed_engine_imports_it(install: Callable[..., Path]) -> None:
    install("fake-dist", {"fake-engine": "fake_engine_module"}, ENGINE, kind="engine")
    assert [plugin.why for plugin in probe([p for p in discover() if p.name == "fake-engine"])] == [""]


def test_the_command_line_prints_the_entry_of_an_engine() -> None:
    shown = CliRunner().invoke(app, ["config", "copies"]).output
    assert shown == "rollout:\n  engine:\n    name: copies\n    # A setting.\n    threads: 1\n"
    assert TRLConfig.from_dict({**config("local").to_dict(), **parse_yaml(shown)}).rollout.engine == CopiesConfig(
        name="copies"
    )


def test_an_installed_engine_that_is_disabled_or_fails_is_an_error(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fake-dist", {"fake-engine": "fake_broken_engine"}, ENGINE + "\n1 / 0", kind="engine")
    with pytest.raises(PluginError, match=r"plugin fake-engine \(fake-dist 1\.0, .*ZeroDivisionError"):
        config("fake-engine")
    assert "fake-engine" not in registry.ENGINES.classes
    for name in ("fake-engine", "copies"):
        monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", name)
        with pytest.raises(PluginError, match="disabled by TRAINKIT_DISABLE_PLUGINS"):
            get_engine(name)


def test_a_class_that_is_no_engine_is_not_registered() -> None:
    class Half(Engine):
        def load(self, weights: Weights) -> None: ...

    bad: Any = dict
    for cls, settings, told in (
        (object, None, "object cannot be registered as 'fake': it does not derive from trainkit.rollouts.Engine"),
        (Half, None, "it does not define submit; write it in the class"),
        (Copies, bad, "its settings should be a class derived from trainkit.PluginConfig; given <class 'dict'>"),
    ):
        with pytest.raises(RegistryError) as caught:
            register_engine("Fake", settings)(cls)
        assert told in str(caught.value)
    for name, told in (
        ("local", "the name 'local' belongs to trainkit's own engine"),
        ("ppo", "the engine name 'ppo' belongs to trainkit's own trainkit-ppo"),
        ("wandb", "the engine name 'wandb' belongs to a tracker of accelerate"),
        ("copies", "the engine name 'copies' is taken by"),
    ):
        with pytest.raises(RegistryError, match=told):
            register_engine(name)(Plain)
    assert register_engine("plain")(Plain) is Plain, "the same definition again replaces it"


# ------------------------------------------------------------------------------------------- what a run cannot have


def test_what_an_engine_cannot_do_is_refused_before_it_is_made(tmp_path: Path) -> None:
    mask = {"logit_mask": torch.ones(10, dtype=torch.bool)}
    for name, changes, told in (
        ("rloo", {"model": tiny_t5(10)}, "the engine 'copies' cannot generate with a model of type 't5'"),
        ("rloo", {"arguments": mask}, "the engine 'copies' cannot obey the run's logit_mask"),
        ("ilql", {}, r"the engine 'copies' cannot sample from logits that 'ilql' changes \(steer\)"),
    ):
        with pytest.raises(ConfigError, match=told + "; set rollout.engine to 'local'"):
            tiny_trainer(name, tmp_path, rollout__engine="copies", **changes)
    assert Copies.made == []
    with pytest.raises(ConfigError, match="the engine 'able' cannot sample from logits"):
        tiny_trainer("ilql", tmp_path, rollout__engine="able")
    for changes in ({"model": tiny_t5(10)}, {"arguments": mask}):
        tiny_trainer("rloo", tmp_path, rollout__engine="able", **changes)


def test_what_an_engine_itself_refuses_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    class Picky(Copies):
        @classmethod
        def check(cls, config: PluginConfig | None, processes: int) -> None:
            assert isinstance(config, CopiesConfig)
            raise ConfigError(f"{config.threads} threads, {processes} process")

    register_engine("picky", CopiesConfig)(Picky)
    with pytest.raises(ConfigError, match="2 threads, 1 process"):
        tiny_trainer("rloo", tmp_path, rollout__engine={"name": "picky", "threads": 2})


def test_a_hooks_sampler_and_another_engine_exclude_each_other(tmp_path: Path) -> None:
    class Hook:
        @hookimpl
        def make_sampler(self, trainer: Any) -> Any:
            return lambda *_: None

    with pytest.raises(PluginError, match=r"rollout\.engine is 'copies', and a make_sampler hook provides a sampler"):
        tiny_trainer("rloo", tmp_path, rollout__engine="copies", callbacks=[Hook()]).generate(["a"])
    assert Copies.made == []


# ----------------------------------------------------------------------------------------------- what it answers


@pytest.fixture
def plain(tmp_path: Path) -> Any:
    """A trainer with the engine `plain`, which has answered once."""
    trainer = tiny_trainer("rloo", tmp_path, rollout__engine="plain")
    trainer.generate(["a"])
    return trainer


def asked(trainer: Any, spoil: Callable[[Generated], Any], **settings: Any) -> str:
    """What is said when an engine spoils its answer to four prompts."""
    Copies.made[-1].spoil = spoil
    with pytest.raises(EngineError) as caught:
        trainer.generate(["a", "bc", "def", "gh"], **{"max_new_tokens": 4, **settings})
    return str(caught.value)


def changed(**columns: Any) -> Callable[[Generated], Generated]:
    """An answer with other columns; a function of the answer gives a column."""
    return lambda made: replace(made, **{k: v(made) if callable(v) else v for k, v in columns.items()})


@table(
    "spoil, told",
    [
        (lambda made: None, "returned None (NoneType); the future result of submit should be a Generated"),
        (changed(ids=lambda made: made.ids[:3]), "returned 3 ids for 4 requests"),
        (changed(reasons=lambda made: made.reasons * 2), "returned 8 reasons for 4 requests"),
        (changed(versions=[0]), "returned 1 versions for 4 requests"),
        (changed(versions=[0, 0, 7, 0]), "sampled response 2 with the weights of step 7; those of 0 are loaded"),
        (changed(reasons=["stop", "abort"] * 2), "ended response 1 for the reason 'abort'"),
        (changed(reasons=["length"] * 4, ids=[[0] * 4, [0] * 5, [0], [0]]), "returned 5 tokens as response 1"),
        (changed(reasons=["length"] * 4, ids=[[0] * 4, [], [0], [0]]), "returned 0 tokens as response 1"),
        (changed(reasons=["length"] * 4, ids=[[0] * 4, [0] * 3, [0], [0]]), "ended response 1 for its length after 3"),
        (
            changed(reasons=["length"] * 4, ids=[[0] * 4, [0, 0, 0, 10], [0] * 4, [0] * 4]),
            "returned ids outside the vocabulary of 10 in response 1",
        ),
        (
            changed(reasons=["stop"] * 4, ids=[[0, 8], [8, 0, 8], [8], [8]]),
            "went on after the EOS, stop token or stop string of",
        ),
        (
            changed(reasons=["stop"] * 4, ids=[[0, 0]] * 4),
            "gave the reason 'stop' for response 0, which does not end by EOS, a stop token or a stop string",
        ),
        (
            changed(reasons=["length"] * 4, ids=[[0, 0, 0, 8]] * 4),
            "gave the reason 'length' for response 0, which ends by EOS, a stop token or a stop string",
        ),
        (changed(logprobs=lambda made: made.logprobs.log()), "returned logprobs that are not finite"),
        (changed(entropy=lambda made: made.entropy / 0), "returned entropy that are not finite"),
        (changed(logprobs=lambda made: made.logprobs[1:]), "returned logprobs of shape"),
        (changed(logprobs=lambda made: made.logprobs.unsqueeze(1)), "returned logprobs of shape"),
        (changed(logprobs=lambda made: made.logprobs.tolist()), "… (list) for "),
        (changed(hidden=lambda made: made.logprobs), "returned hidden of shape"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(
    spoil: Callable[[Generated], Any], told: str, plain: Any
) -> None:
    said = asked(plain, spoil)
    assert said.startswith("the engine Plain ")
    assert told in said


def test_the_sampler_of_a_run_is_that_of_its_engine(plain: Any, tmp_path: Path) -> None:
    assert isinstance(plain.sampler, EngineSampler)
    assert plain.sampler.engine is plain.sampling.engine
    usual = tiny_trainer("rloo", tmp_path)
    usual.models.build()
    assert str(usual.sampling.engine) == "'local'"


def test_ending_too_early_or_too_late_is_refused(plain: Any) -> None:
    nothing = {"logprobs": None, "entropy": None}
    early = changed(ids=[[0, 8]] * 4, reasons=["stop"] * 4, **nothing)
    assert "ended response 0 by token 2; min_new_tokens is 2" in asked(plain, early, min_new_tokens=2)
    late = changed(ids=[[0, 1, 2, 3]] * 4, reasons=["length"] * 4, **nothing)
    told = asked(plain, late, stop_sequences=["bc"])
    assert "went on after the EOS, stop token or stop string of response 0" in told
    ended = changed(ids=[[0, 1, 2]] * 4, reasons=["length"] * 4)
    told = asked(plain, ended, stop_sequences=["bc"], max_new_tokens=3)
    assert "gave the reason 'length' for response 0, which ends by EOS, a stop token or a stop string" in told


def test_numbers_about_tokens_may_be_unknown(plain: Any) -> None:
    Copies.made[-1].spoil = changed(logprobs=None, entropy=None)
    rollouts = plain.generate(["a", "bc"])
    assert rollouts.logprobs is None
    plain.learn()
    assert plain.progress.sampler_exact is None, "there was nothing to compare"


def test_an_engine_that_fails_is_named_with_the_cause(plain: Any, tmp_path: Path) -> None:
    def fail(_: Generated) -> Any:
        raise ConnectionResetError("gone")

    class Deaf(Copies):
        def load(self, weights: Weights) -> None:
            raise OSError("no room")

    class Dead(Copies):
        def __init__(self, config: Any, served: ServedModel) -> None:
            raise OSError("no room")

    register_engine("deaf")(Deaf)
    register_engine("dead")(Dead)
    Copies.made[-1].spoil = fail
    with pytest.raises(EngineError, match="Plain could not answer 2 requests: ConnectionResetError: gone") as caught:
        plain.generate(["a", "b"])
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    for name, told in (("deaf", "Deaf could not load the weights"), ("dead", "the engine 'dead' could not be started")):
        with pytest.raises(EngineError, match=f"{told}: OSError: no room") as caught:
            tiny_trainer("rloo", tmp_path, rollout__engine=name).generate(["a"])
        assert isinstance(caught.value.__cause__, OSError)


# ------------------------------------------------------------------------------------------------------ the weights


def test_weights_are_loaded_only_when_they_have_changed_and_an_engine_is_closed_with_its_trainer(
    tmp_path: Path,
) -> None:
    trainer = tiny_trainer("rloo", tmp_path, rollout__engine="plain", rollout__batch_size=4)
    trainer.generate(["a"])
    (engine,) = Copies.made
    trainer.generate(["b"])
    trainer.evaluate()
    assert engine.loaded == [0]
    with torch.no_grad():  # by hand, at the same step
        next(trainer.unwrapped.model.parameters()).mul_(1.5)
    trainer.generate(["a"])
    assert engine.loaded == [0, 0]
    for mine, own in zip(engine.replica.served.model.parameters(), trainer.unwrapped.model.parameters(), strict=True):
        assert mine.equal(own)
    trainer.learn()
    assert engine.loaded == [0, 0, 2, 4], "16 rollouts in four parts, two steps of 8 a collection"
    assert engine.closed == 0
    del trainer
    gc.collect()
    assert engine.closed == 1


class Rests(Copies):
    """One that forgets its weights while the run trains."""

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.told: list[str] = []

    def rest(self) -> bool:
        self.told.append("rest")
        for tensor in self.replica.served.model.state_dict().values():
            tensor.zero_()
        return True

    def load(self, weights: Weights) -> None:
        super().load(weights)
        self.told.append("load")

    def submit(self, request: Request) -> Future[Generated]:
        self.told.append(request.purpose)
        return super().submit(request)


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_rests_while_the_run_trains_and_gets_weights_before_it_samples(
    staleness: int, tmp_path: Path
) -> None:
    register_engine("rests")(Rests)
    changes = {"train__eval_interval": 2, "train__total_steps": 4, "rollout__staleness": staleness}
    one, other = (
        tiny_trainer("rloo", tmp_path / engine, rollout__engine=engine, **changes) for engine in ("rests", "local")
    )
    one.learn()
    other.learn()
    for name, tensor in other.unwrapped.state_dict().items():
        assert torch.equal(one.unwrapped.state_dict()[name], tensor), name
    told = one.sampling.engine.told
    assert told.count("rest") == (0 if staleness else 4), "before each step, unless it samples beside them"
    assert {"train", "evaluate"} < {*told}
    for before, after in pairwise(told):
        assert before != "rest" or after in ("rest", "load"), told


def test_weights_that_do_not_fit_are_refused_with_their_name(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path, rollout__engine="plain")
    trainer.models.build()
    served, own = trainer.sampling.served, dict(trainer.sampling.weights.tensors())
    name, tensor = next(iter(own.items()))

    def told(tensors: dict[str, Tensor]) -> str:
        with pytest.raises(EngineError) as caught:
            served.fitting(Weights(5, tensors.items))
        return str(caught.value)

    assert served.fitting(trainer.sampling.weights).keys() == own.keys()
    assert told({k: v for k, v in own.items() if k != name}) == f"the weights of step 5 lack {name}, which is trained"
    assert told({**own, "other": tensor}) == "the weights of step 5 have other, which the model has not"
    assert f"{name} of step 5 is (9, 32), torch.float32; that of the model is (10, 32), torch.float32" == told(
        {**own, name: tensor[:9]}
    )
    assert "torch.float64; that of the model" in told({**own, name: tensor.double()})


@table("engine", ["local", "plain"])
def test_rollouts_and_episodes_have_the_version_that_they_were_sampled_with(engine: str, tmp_path: Path) -> None:
    arguments = {"environment": Letters, "reward_fn": None}
    changes = {"rollout__engine": engine, "train__total_steps": 1, "rollout__num_rollouts": 8}
    trainer = tiny_trainer("rloo", tmp_path, arguments=arguments, **changes)
    assert trainer.play(["a", "b"]).versions.tolist() == [0, 0]
    trainer.learn()
    assert trainer.play(["a", "b"]).versions.tolist() == trainer.generate(["a", "b"]).versions.tolist() == [1, 1]


# --------------------------------------------------------------------------------------------------------- training


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ONLINE)
def test_an_engine_with_the_cores_sampler_trains_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """On a copy of the model, of which the loop has to keep the weights."""
    ended = []
    for engine in ("local", "able"):
        changes = {"rollout__temperature": 0.8, "rollout__top_k": 6, "optimizer__lr": 0.01, "rollout__num_rollouts": 8}
        trainer = tiny_trainer(name, tmp_path / engine, rollout__engine=engine, train__total_steps=6, **changes)
        trainer.learn()
        ended.append(trainer)
    one, other = (trainer.unwrapped.state_dict() for trainer in ended)
    assert [key for key in one if not one[key].equal(other[key])] == []
    assert len({*Copies.made[-1].loaded}) > 1
    assert ended[0].progress.sampler_exact == ended[1].progress.sampler_exact


@pytest.mark.slow
@pytest.mark.parametrize("model", [tiny_llama(10), tiny_t5(10)], ids=["llama", "t5"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_other_models_and_precisions_train_to_the_same_bits(model: Any, precision: str, tmp_path: Path) -> None:
    ended = []
    for engine in ("local", "able"):
        changes = {"rollout__engine": engine, "train__mixed_precision": precision, "train__total_steps": 3}
        trainer = tiny_trainer("ppo", tmp_path / engine, model=model, **changes)
        trainer.learn()
        ended.append(trainer.unwrapped.state_dict())
    assert [key for key in ended[0] if not ended[0][key].equal(ended[1][key])] == []


def test_a_run_is_resumed_with_the_same_engine_and_may_have_other_settings_of_it(tmp_path: Path) -> None:
    changes = {"train__save_interval": 1, "train__total_steps": 1, "rollout__num_rollouts": 8}
    tiny_trainer("rloo", tmp_path, rollout__engine={"name": "copies", "threads": 1}, **changes).learn()
    further = {**changes, "train__total_steps": 2, "train__resume": "auto"}
    with pytest.raises(CheckpointError, match=r"rollout\.engine"):
        tiny_trainer("rloo", tmp_path, rollout__engine="local", **further).learn()
    resumed = tiny_trainer("rloo", tmp_path, rollout__engine={"name": "copies", "threads": 2}, **further)
    resumed.learn()
    straight = tiny_trainer("rloo", tmp_path / "straight", rollout__num_rollouts=8, train__total_steps=2)
    straight.learn()
    one, other = resumed.unwrapped.state_dict(), straight.unwrapped.state_dict()
    assert [key for key in one if not one[key].equal(other[key])] == []
    assert Copies.made[-1].loaded == [1], "the weights are those of the checkpoint"
