"""The kit's checks of generation engines: a sound engine passes, and what engines get wrong is found."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from trainkit import register_engine
from trainkit.cli import app
from trainkit.errors import ConfigError, EngineError, RegistryError
from trainkit.plugins import registry
from trainkit.rollouts import Engine, Generated, Replica, Request, ServedModel, Weights
from trainkit_kit import ConformanceError, check_engine, check_plugin, parametrize_checks
from trainkit_kit.conformance import all_checks, subjects_of

CHECKS = [check.name for check in all_checks().values() if check.kind == "engine"]


class Sound(Engine):
    """trainkit's sampler on a copy, in a thread."""

    exact = True

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.replica = Replica(replace(served, model=copy.deepcopy(served.model)))
        self.pool = ThreadPoolExecutor(1)
        self.calls = itertools.count()

    def load(self, weights: Weights) -> None:
        self.pool.submit(self.replica.load, weights).result()

    def submit(self, request: Request) -> Future[Generated]:
        return self.pool.submit(self.generate, request)

    def generate(self, request: Request) -> Generated:
        return self.replica.generate(request)

    def close(self) -> None:
        self.pool.shutdown()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.ENGINES, "classes", dict(registry.ENGINES.classes))


def found(cls: type[Engine], *only: str) -> str:
    """What the kit reports about an engine; empty if it passes."""
    register_engine("kit_toy")(type("Toy", (cls,), {"__module__": __name__}))
    try:
        check_engine("kit_toy", only=only or None)
    except ConformanceError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------- what passes


@pytest.mark.slow
@parametrize_checks("local")
def test_the_engine_of_trainkit_itself_conforms(check: Callable[[], None]) -> None:
    check()


def test_a_sound_engine_passes_a_few_checks() -> None:
    assert found(Sound, "engine_stops", "engine_greedy", "engine_weights") == ""


@pytest.mark.slow
def test_a_sound_engine_conforms() -> None:
    register_engine("kit_toy")(Sound)
    report = check_plugin({"name": "kit_toy"})
    assert [result.check.name for result in report.results] == [
        name for name in CHECKS if name not in ("engine_deaths", "engine_closes")
    ], "it has no processes"


class Unexact(Sound):
    """Random numbers of its own, and no numbers about tokens."""

    exact = False

    def generate(self, request: Request) -> Generated:
        made = super().generate(replace(request, seeds=[seed ^ 0x5555555 for seed in request.seeds]))
        return replace(made, logprobs=None, entropy=None, hidden=None)


@pytest.mark.slow
def test_an_engine_with_other_random_numbers_and_without_log_probabilities_conforms() -> None:
    assert found(Unexact) == ""


def test_the_command_line_checks_engines_and_lists_their_checks() -> None:
    shown = CliRunner().invoke(app, ["plugins", "check", "local", "--list"]).output
    assert [line.split()[0] for line in shown.splitlines()] == [
        name for name in CHECKS if name not in ("engine_refuses_weights", "engine_deaths", "engine_closes")
    ]
    done = CliRunner().invoke(app, ["plugins", "check", "local", "--only", "engine_seeds"])
    assert done.exit_code == 0
    assert "local: 1 passed" in done.output


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(RegistryError, match="'ppo' is no engine"):
        check_engine("ppo")
    with pytest.raises(ConfigError, match="the check 'learns' does not apply to 'local'"):
        check_engine("local", only=["learns"])
    assert [subject.kind for subject in subjects_of("LOCAL")] == ["engine"]


# ------------------------------------------------------------------------------------------------ what is found


def planted(function: Callable[[Any, Request], Generated]) -> type[Engine]:
    """A sound engine whose answers come from ``function(engine, request)``."""
    return type("Planted", (Sound,), {"generate": function, "exact": False, "__module__": __name__})


def with_settings(**changes: Any) -> type[Engine]:
    def generate(engine: Any, request: Request) -> Generated:
        settings = request.settings.model_copy(update={k: v(request.settings) for k, v in changes.items()})
        return Sound.generate(engine, replace(request, settings=settings))

    return planted(generate)


def logprobs_at_temperature_1(engine: Any, request: Request) -> Generated:
    made = Sound.generate(engine, request)
    return replace(made, logprobs=said(engine, request, made, 1.0))


def logprobs_after_top_p(engine: Any, request: Request) -> Generated:
    made = Sound.generate(engine, request)
    return replace(made, logprobs=said(engine, request, made, request.settings.temperature or 1.0, True))


def said(engine: Any, request: Request, made: Generated, temperature: float, cut: bool = False) -> torch.Tensor:
    """The log-probabilities of an answer at a temperature, perhaps after truncation."""
    from trainkit.functional import truncate_logits

    model, parts, given = engine.replica.served.model, [], request.settings
    for query, ids in zip(request.queries, made.ids, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([query + ids])).logits[0, len(query) - 1 : -1] / temperature
        if cut:
            logits = truncate_logits(logits, top_k=given.top_k, top_p=given.top_p, min_p=given.min_p)
        parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts)


def one_generator_for_all(engine: Any, request: Request) -> Generated:
    """As an engine that seeds one generator by the first request of a call."""
    return Sound.generate(engine, replace(request, seeds=[request.seeds[0] + at for at in range(len(request.seeds))]))


def no_seeds(engine: Any, request: Request) -> Generated:
    return Sound.generate(engine, replace(request, seeds=[next(engine.calls) for _ in request.seeds]))


def few_seeds(engine: Any, request: Request) -> Generated:
    """Seeds that lose their last bits, so that neighbours share their random numbers."""
    return Sound.generate(engine, replace(request, seeds=[seed // 256 for seed in request.seeds]))


def old_versions(engine: Any, request: Request) -> Generated:
    made = Sound.generate(engine, request)
    return replace(made, versions=[version - 1 for version in made.versions])


def swapped(engine: Any, request: Request) -> Generated:
    """Responses in another order than the requests, with all that belongs to them."""
    return Sound.generate(engine, replace(request, queries=request.queries[::-1], seeds=request.seeds[::-1]))


def states_of_other_rows(engine: Any, request: Request) -> Generated:
    made = Sound.generate(engine, request)
    return replace(made, hidden=made.hidden.flip(0))  # type: ignore[union-attr]


def without_eos(engine: Any, request: Request) -> Generated:
    """The terminating token is cut, as many servers do."""
    made = Sound.generate(engine, request)
    pairs = zip(made.ids, made.reasons, strict=True)
    ids = [own[:-1] if reason == "stop" and len(own) > 1 else own for own, reason in pairs]
    return replace(made, ids=ids, logprobs=None, entropy=None, hidden=None)


def global_draws(engine: Any, request: Request) -> Generated:
    torch.rand(1)
    return Sound.generate(engine, request)


def other_environment(engine: Any, request: Request) -> Generated:
    os.environ["KIT_TOY"] = str(next(engine.calls))
    return Sound.generate(engine, request)


class Stale(Sound):
    """The version is noted and the weights stay those of the start."""

    exact = False

    def load(self, weights: Weights) -> None:
        if self.replica.version is None:
            super().load(weights)
        self.replica.version = weights.version


class StaleHead(Stale):
    """All weights but one are new."""

    def load(self, weights: Weights) -> None:
        super().load(weights)
        own = self.replica.served.model.state_dict()
        for name, tensor in list(weights.tensors())[:-1]:
            own[name].copy_(tensor.detach())


class Sharing(Sound):
    """It says that it has a copy, and generates with the trained model itself."""

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.replica = Replica(served)


class Casual(Sound):
    """Weights of other names and shapes are loaded as far as they fit."""

    def load(self, weights: Weights) -> None:
        own = self.replica.served.model.state_dict()
        for name, tensor in weights.tensors():
            if name in own:
                part = tuple(slice(size) for size in tensor.shape)
                own[name][part] = tensor.detach()
        self.replica.version = weights.version


class LastAnswer(Sound):
    """Every future gets the answer to the newest request."""

    exact = False

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.waiting: list[Request] = []

    def submit(self, request: Request) -> Future[Generated]:
        self.waiting.append(request)
        return self.pool.submit(self.newest, len(request.queries))

    def newest(self, count: int) -> Generated:
        time.sleep(0.02)
        last = self.waiting[-1]
        cut = slice(min(count, len(last.queries)))
        return self.replica.generate(replace(last, queries=last.queries[cut], seeds=last.seeds[cut]))


class Greedy(Sound):
    """An engine that is said to be exact, with other random numbers."""

    def generate(self, request: Request) -> Generated:
        return super().generate(replace(request, seeds=[seed + 1 for seed in request.seeds]))


BUGS: dict[str, tuple[type[Engine], str, str]] = {
    "log-probabilities at temperature 1": (
        planted(logprobs_at_temperature_1), "engine_logprobs", "they are those at temperature 1"
    ),
    "log-probabilities after top-p": (planted(logprobs_after_top_p), "engine_logprobs", "they are those after trunc"),
    "sampling at temperature 1": (
        with_settings(temperature=lambda s: s.temperature and 1.0), "engine_distribution", "are expected at"
    ),
    "greedy is sampled": (with_settings(temperature=lambda s: s.temperature or 1.0), "engine_greedy", "largest logits"),
    "no repetition penalty": (with_settings(repetition_penalty=lambda _: 1.0), "engine_greedy", "'repetition_penalty'"),
    "no top-k": (with_settings(top_k=lambda _: 0), "engine_truncates", "are sampled; they are excluded"),
    "min-p doubled": (with_settings(min_p=lambda s: s.min_p * 2), "engine_truncates", "are never sampled"),
    "old weights": (Stale, "engine_weights", "logprobs"),
    "one weight is old": (StaleHead, "engine_weights", "logprobs"),
    "weights of the trained model": (Sharing, "engine_weights", "before `load`"),
    "weights that do not fit": (Casual, "engine_refuses_weights", "are loaded without an EngineError"),
    "one generator": (planted(one_generator_for_all), "engine_seeds", "rows in another order get other ids"),
    "no seeds": (planted(no_seeds), "engine_seeds", "two calls with the same seeds"),
    "seeds that lose bits": (planted(few_seeds), "engine_distribution", "χ² test"),
    "other versions": (planted(old_versions), "engine_answers", "with the weights of step"),
    "no stop strings": (with_settings(stop_sequences=lambda _: []), "engine_stops", "went on after the EOS, stop"),
    "no stop tokens": (with_settings(stop_token_ids=lambda _: []), "engine_stops", "went on after the EOS, stop"),
    "no shortest length": (with_settings(min_new_tokens=lambda _: 0), "engine_stops", "min_new_tokens is 2"),
    "one token too many": (with_settings(max_new_tokens=lambda s: s.max_new_tokens + 1), "engine_answers", "tokens as"),
    "one token too few": (
        with_settings(max_new_tokens=lambda s: max(s.max_new_tokens - 1, 1)), "engine_answers", "for its length after"
    ),
    "rows in another order": (planted(swapped), "engine_logprobs", "differ by up to"),
    "greedy rows in another order": (planted(swapped), "engine_greedy", "by trainkit's sampler"),
    "states of other rows": (planted(states_of_other_rows), "engine_logprobs", "hidden with"),
    "without EOS": (planted(without_eos), "engine_answers", "does not end by EOS"),
    "answers of another request": (LastAnswer, "engine_queues", "requests"),
    "draws of the global generator": (planted(global_draws), "engine_leaves_the_process", "global generator of torch"),
    "environment": (planted(other_environment), "engine_leaves_the_process", "environment variables"),
    "said to be exact": (Greedy, "engine_equals_core", "the ids differ from those of trainkit's sampler"),
    "said to be exact in training": (Greedy, "engine_trains", "the weights of a run with the engine and with local"),
}  # fmt: skip


@pytest.mark.daily(bug=("no seeds",))
@pytest.mark.parametrize("bug", BUGS)
def test_what_engines_get_wrong_is_found(bug: str) -> None:
    cls, check, told = BUGS[bug]
    report = found(cls, check)
    assert f"{check}: " in report, "the kit finds nothing"
    assert told in report


# ------------------------------------------------------------------------------------------------------- deaths


class Process(Sound):
    """One with a process that it needs, which does nothing else."""

    exact = False

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    @property
    def pids(self) -> list[int]:
        return [self.process.pid]

    def generate(self, request: Request) -> Generated:
        time.sleep(0.1)
        if self.process.poll() is not None:
            raise EngineError("the process of the engine Process has died")
        return super().generate(request)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        super().close()


class Restarting(Process):
    """It starts its process again, and loads the last weights."""

    def load(self, weights: Weights) -> None:
        tensors = {name: tensor.detach().clone() for name, tensor in weights.tensors()}
        self.last = Weights(weights.version, tensors.items)
        super().load(self.last)

    def generate(self, request: Request) -> Generated:
        time.sleep(0.1)
        if self.process.poll() is not None:
            self.revive()
        return Sound.generate(self, request)

    def revive(self) -> None:
        self.start()
        self.replica.load(self.last)


class Forgetful(Restarting):
    """It starts with other weights."""

    def revive(self) -> None:
        self.start()
        with torch.no_grad():
            for parameter in self.replica.served.model.parameters():
                parameter.mul_(1.5)


class Living(Process):
    """It leaves its process behind."""

    left: list[Any] = []  # noqa: RUF012

    def close(self) -> None:
        self.left.append(self.process)
        Sound.close(self)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Process, Restarting])
def test_a_death_is_told_or_repaired(cls: type[Engine]) -> None:
    assert found(cls, "engine_deaths", "engine_closes") == ""


@pytest.mark.slow
def test_a_restart_with_other_weights_is_found() -> None:
    assert "after the death of a process other ids are sampled" in found(Forgetful, "engine_deaths")


@pytest.mark.slow
def test_a_process_that_is_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit_kit.checks.engines.CLOSING", 0.5)
    assert "1 of 1 processes are alive" in found(Living, "engine_closes")
    for process in Living.left:
        process.kill()
        process.wait()
