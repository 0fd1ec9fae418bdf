"""The kit over every registered trainer, over plugins of other kinds, and the kit itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent

import pytest

import common_prompts
import trainkit
from trainkit.errors import ConfigError, RegistryError
from trainkit.plugins import registry
from trainkit.testing.trainers import language_trainers
from trainkit_kit import ConformanceError, check_plugin, check_trainer, conformance
from trainkit_kit.checking import Check
from trainkit_kit.conformance import Case, Report, Result, checks_for, subjects_of
from trainkit_kit.failures import CheckError, require
from trainkit_kit.subjects import Bench, Subject

WHOLE = "ppo"
"""The algorithm for which `make test` runs the whole kit."""
DAILY = ("dpo", "rloo", "sft")
"""Algorithms for which `make test` runs the checks of `LAWS`."""
LAWS = {
    "accumulation", "batch_is_frozen", "context_does_not_count", "eos_is_trained", "first_update", "gradient_reaches",
    "mask_law", "metric_totals", "micro_batches", "packing", "padding_amount", "padding_side", "reference_is_frozen",
    "row_order", "sampled_ids", "weight_counts",
}  # fmt: skip
"""The checks of masks, alignment and exact means."""
LAUNCHING = {"two_processes"}
"""Checks that start processes, which `make test-all` runs."""
SHARING = ("best_of_k", "cpo", "dpo", "grpo", "online_dpo", "orpo", "reward", "rft", "rloo")
"""Algorithms of which several rows have one prompt; their laws hold with separate rows, too."""


def run_kit(name: str, wanted: Callable[[str], bool], subtests: pytest.Subtests) -> None:
    """Run the checks of an algorithm and of its variants, whose names are ``wanted``, each as a subtest."""
    cases = [Case(check, subject) for subject in subjects_of(name) for check in checks_for(subject)]
    chosen = [case for case in cases if wanted(case.check.name.partition("@")[0])]
    assert chosen
    for case in chosen:
        expected = case.check.name in case.subject.declaration.expected_failures
        with subtests.test(case.check.name), pytest.raises(CheckError) if expected else nullcontext():
            case()


@pytest.mark.daily(name=(WHOLE,))
@pytest.mark.parametrize("name", [name for name in trainkit.available_trainers() if name not in DAILY])
def test_the_checks_hold(name: str, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    common_prompts.share(monkeypatch, True)
    run_kit(name, lambda check: check not in LAUNCHING, subtests)


@pytest.mark.parametrize("name", DAILY)
def test_the_laws_hold(name: str, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    common_prompts.share(monkeypatch, True)
    run_kit(name, LAWS.__contains__, subtests)


@pytest.mark.slow
@pytest.mark.parametrize("name", DAILY)
def test_the_other_checks_hold(name: str, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    common_prompts.share(monkeypatch, True)
    run_kit(name, lambda check: check not in LAWS | LAUNCHING, subtests)


@pytest.mark.slow
@pytest.mark.parametrize("name", trainkit.available_trainers())
def test_the_checks_that_start_processes_hold(name: str, subtests: pytest.Subtests) -> None:
    run_kit(name, LAUNCHING.__contains__, subtests)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_the_laws_hold_with_separate_rows(
    name: str, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    common_prompts.share(monkeypatch, False)
    run_kit(name, LAWS.__contains__, subtests)


@pytest.mark.slow
@pytest.mark.parametrize("name", language_trainers())
def test_the_laws_hold_on_joined_rows(name: str, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    common_prompts.join(monkeypatch)
    run_kit(name, LAWS.__contains__, subtests)


@pytest.mark.weekly
@pytest.mark.parametrize("name", language_trainers())
def test_the_other_checks_hold_on_joined_rows(
    name: str, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    common_prompts.join(monkeypatch)
    run_kit(name, lambda check: check not in LAWS | LAUNCHING, subtests)


def test_the_lists_of_this_file_are_complete() -> None:
    assert conformance.all_checks().keys() >= LAWS | LAUNCHING
    assert [name for name in trainkit.available_trainers() if common_prompts.exist(name)] == list(SHARING)


def test_every_check_says_what_it_proves_and_why_it_matters() -> None:
    for check in conformance.all_checks().values():
        assert check.proves.endswith((".", "?")), check.name
        assert len(check.matters) > 20, check.name


# -------------------------------------------------------------------------------------------- observers and samplers


@pytest.fixture
def plugin(install: Callable[..., Path]) -> Iterator[Callable[[str], str]]:
    """``plugin("source of hooks")``: the name of an installed plugin that is gone after the test."""

    def made(source: str) -> str:
        text, kind = (
            "from trainkit import hookimpl\n" + dedent(source),
            "sampler" if "make_sampler" in source else "hooks",
        )
        install("kit-toy", {"kit_toy": "kit_toy_module"}, text, kind=kind)
        return "kit_toy"

    yield made
    sys.modules.pop("kit_toy_module", None)


WRITER = """
    import json

    @hookimpl
    def on_train_begin(trainer):
        trainer.numbers = open(trainer.run_dir / "numbers.txt", "a")

    @hookimpl
    def log_metrics(trainer, step, metrics):
        trainer.numbers.write(json.dumps(metrics) + "\\n")

    @hookimpl
    def on_train_end(trainer):
        trainer.numbers.close()
"""
SAMPLER = """
    from trainkit.rollouts import make_sampler as core

    @hookimpl
    def make_sampler(trainer):
        made = core(trainer.unwrapped.model, trainer.tokenizer, logit_mask=trainer.logit_mask)

        def sampler(rows, queries, settings, seeds, purpose):
            return made(rows, queries, settings, seeds)

        return sampler
"""


def of(kind: str) -> list[str]:
    return [check.name for check in conformance.all_checks().values() if check.kind == kind]


@pytest.mark.slow
def test_a_sound_observer_conforms(plugin: Callable[[str], str]) -> None:
    report = check_plugin(plugin(WRITER))
    assert [result.check.name for result in report.results] == of("observer")


@pytest.mark.slow
def test_a_sound_sampler_conforms(plugin: Callable[[str], str]) -> None:
    report = check_plugin(plugin(SAMPLER))
    assert [result.check.name for result in report.results] == of("sampler")
    assert "_trainkit_kit" not in trainkit.available_trainers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hooks", "check", "seen"),
    [
        ("@hookimpl\ndef on_stepp(step): ...", "observer_hooks_fit", "on_stepp"),
        ("optional = True\n@hookimpl\ndef on_step(): 1 / 0", "observer_hooks_fit", "ZeroDivisionError"),
        (
            "import torch\n@hookimpl\ndef on_step(trainer):\n"
            "    with torch.no_grad(): next(trainer.unwrapped.parameters()).mul_(1.001)",
            "observer_changes_nothing",
            "the weights with the observer and without it differ in model.",
        ),
        (
            "@hookimpl\ndef log_metrics(metrics): metrics.clear()",
            "observer_changes_nothing",
            "it changes the arguments that other hooks get: metrics of log_metrics",
        ),
        (
            "import torch\n@hookimpl\ndef on_step(): torch.rand(1)",
            "observer_draws_nothing",
            "draws from the global generators of torch",
        ),
        (
            "import random\n@hookimpl\ndef on_train_begin(): random.seed(0)",
            "observer_draws_nothing",
            "draws from the global generators of random",
        ),
        (
            "@hookimpl\ndef on_train_begin(trainer): (trainer.run_dir / 'mine').mkdir()",
            "observer_resumes",
            "FileExistsError",
        ),
        (
            "@hookimpl\ndef on_train_begin(trainer): (trainer.run_dir / 'mine').mkdir()",
            "observer_ends_with_the_run",
            "FileExistsError",
        ),
        (
            "place = []\n@hookimpl\ndef on_train_begin(trainer):\n    place.append(trainer.run_dir / 'mine')\n"
            "@hookimpl\ndef on_step(): place[0].write_text('here')",
            "observer_runs_twice",
            "leaves",
        ),
        (
            "opened = {}\n@hookimpl\ndef log_metrics(trainer): opened[id(trainer)] = 1\n"
            "@hookimpl\ndef on_train_end(trainer): del opened[id(trainer)]",
            "observer_on_other_processes",
            "KeyError",
        ),
    ],
)
def test_an_observer_that_does_wrong_fails(plugin: Callable[[str], str], hooks: str, check: str, seen: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_plugin(plugin(hooks), only=[check])
    assert f"{check}: " in str(caught.value)
    assert seen in str(caught.value)


BENT = "            return made(rows, queries, settings, seeds)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instead", "check", "seen"),
    [
        (
            "import random; return made(rows, queries, settings, [seed + random.randrange(9) for seed in seeds])",
            "sampler_generators",
            "global generators of random",
        ),
        (
            "made.calls = getattr(made, 'calls', 0) + 1; "
            "return made(rows, queries, settings, [seed + made.calls for seed in seeds])",
            "sampler_generators",
            "different responses",
        ),
        (
            "settings = settings.model_copy(update={'temperature': 1.0}); return made(rows, queries, settings, seeds)",
            "sampler_distribution",
            "first tokens",
        ),
        (
            "settings = settings.model_copy(update={'temperature': 1.0}); return made(rows, queries, settings, seeds)",
            "sampler_logprobs",
            "at temperature 0.5",
        ),
        (
            "settings = settings.model_copy(update={'temperature': settings.temperature or 1.0}); "
            "return made(rows, queries, settings, seeds)",
            "sampler_greedy",
            "below the likeliest",
        ),
        (
            "settings = settings.model_copy(update={'max_new_tokens': 6}); return made(rows, queries, settings, seeds)",
            "sampler_rollouts",
            "where max_new_tokens is 1",
        ),
        (
            "settings = settings.model_copy(update={'stop_sequences': []}); "
            "return made(rows, queries, settings, seeds)",
            "sampler_stops",
            "holds the stop string",
        ),
        (
            "return made(rows, queries, settings, [sum(seeds) % 2**62 + at for at in range(len(rows))])",
            "sampler_seeds",
            "if another row has another seed",
        ),
        (
            "made.calls = getattr(made, 'calls', 0) + 1; "
            "return made(rows, queries, settings, [seed + made.calls for seed in seeds])",
            "sampler_resumes",
            "differ",
        ),
    ],
)
def test_a_sampler_that_does_wrong_fails(plugin: Callable[[str], str], instead: str, check: str, seen: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_plugin(plugin(SAMPLER.replace(BENT.strip(), instead)), only=[check])
    assert f"{check}: " in str(caught.value)
    assert seen in str(caught.value)


def test_a_sampler_with_an_old_copy_of_the_weights_fails(plugin: Callable[[str], str]) -> None:
    copied = SAMPLER.replace("trainer.unwrapped.model,", "__import__('copy').deepcopy(trainer.unwrapped.model),")
    with pytest.raises(ConformanceError, match="2 failed"):
        check_plugin(plugin(copied), only=["sampler_distribution", "sampler_logprobs"])


def test_a_sampler_without_the_logit_mask_fails(plugin: Callable[[str], str]) -> None:
    with pytest.raises(ConformanceError, match="which the mask forbids"):
        check_plugin(plugin(SAMPLER.replace(", logit_mask=trainer.logit_mask", "")), only=["sampler_mask"])


def test_a_module_may_hold_a_trainer_and_hooks() -> None:
    assert [subject.kind for subject in subjects_of("ddpo")] == ["trainer", "observer"]
    assert [subject.kind for subject in subjects_of("SFT")] == ["trainer"]


# ---------------------------------------------------------------------------------------------------------- the frame


def outcome(function: Callable[[Bench], None], reason: str | None = None) -> Result:
    check = Check("toy", "It holds.", "It matters.", "trainer", function, lambda _: True)
    return conformance._run(check, Subject("sft"), reason)


def passing(bench: Bench) -> None:
    require(True, "never seen")


def failing(bench: Bench) -> None:
    require(False, "3 where 2 is allowed")


def raising(bench: Bench) -> None:
    {}["missing"]


def test_a_check_passes_or_fails_with_what_was_seen() -> None:
    assert outcome(passing).outcome == "passed"
    assert (outcome(failing).outcome, outcome(failing).seen) == ("failed", "3 where 2 is allowed")


def test_what_a_plugin_raises_is_its_failure_and_says_where() -> None:
    found = outcome(raising)
    assert found.outcome == "failed"
    assert found.seen.startswith("KeyError: 'missing' (test_conformance.py, line ")


def test_an_expected_failure_is_none_and_one_that_passes_is_a_failure() -> None:
    assert (outcome(failing, "known").outcome, outcome(failing, "known").seen) == ("expected", "known")
    assert outcome(passing, "known").outcome == "failed"
    assert outcome(passing, "known").seen == "it passes now; remove it from expected_failures (known)"


def test_a_report_counts_and_says_of_each_failure_what_it_proves_and_why_it_matters() -> None:
    report = Report("toy", [outcome(passing), outcome(failing), outcome(failing, "known")])
    first, *rest = str(report).split("\n")
    assert first.startswith("toy: 1 passed, 1 failed, 1 expected in ")
    assert rest == ["", "toy: 3 where 2 is allowed", "  purpose: It holds.", "  matters: It matters."]
    assert str(Report("toy")) == "toy: no checks in 0.0 s"


def test_a_check_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the check 'mask_low' is no check; did you mean 'mask_law'\?"):
        check_trainer("sft", expected_failures={"mask_low": "a slip"})
    with pytest.raises(ConfigError, match="the check 'sampler_seeds' does not apply to 'sft'"):
        check_trainer("sft", only=["sampler_seeds"])


def test_a_plugin_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RegistryError, match=r"no plugin 'stf' is installed; did you mean 'sft'\?"):
        check_plugin("stf")


def test_every_result_is_told_as_it_comes() -> None:
    told: list[Result] = []
    report = check_trainer("sft", only=["schedule", "docstrings"], tell=told.append)
    assert told == report.results
    assert {result.check.name for result in told} == {"schedule", "docstrings"}


PARAMETRIZED = """
from trainkit_kit import parametrize_checks

@parametrize_checks("sft", expected_failures={"schedule": "it never does"})
def test_sft(check):
    if check.check.name in ("schedule", "docstrings"):
        check()
"""


@pytest.mark.slow
def test_as_cases_of_pytest_an_expected_failure_that_passes_fails(tmp_path: Path) -> None:
    (tmp_path / "test_plugin.py").write_text(PARAMETRIZED, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "-k", "schedule or docstrings"]
    found = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "PASSED test_plugin.py::test_sft[docstrings]" in found.stdout
    assert "[XPASS(strict)] it never does" in found.stdout
    assert found.returncode == 1


# -------------------------------------------------------------------------------- what an author may have overlooked

CRITIC = '''
"""Actor and critic on tokens, with a head of its own (Mnih et al. 2016)."""
from dataclasses import dataclass, replace
import torch
from pydantic import Field
from torch import nn
import trainkit
from trainkit.functional import masked_mean, place_scores, zero_masked
from trainkit.metrics import Mean
from trainkit.models import load_heads, load_model, make_policy, state_width

class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, hidden, tokens):
        return {"value": self.out(hidden.detach()).squeeze(-1)}

class Config(trainkit.MethodConfig):
    name: str = "kit_toy"
    """The name."""
    entropy_coef: float = Field(0.01, ge=0)
    """What a nat of entropy is worth."""

@dataclass(frozen=True)
class ToyBatch(trainkit.TokenBatch):
    """Returns [B, T]."""
    returns: torch.Tensor

@trainkit.register_trainer("kit_toy")
class Toy(trainkit.AccelerateRLTrainer[Config]):
    inputs = ("reward_fn", "prompts")

    def get_arch(self, config):
        model = load_model(config.model, self.live_model)
        mask, head = self.logit_mask, Critic(state_width(model.config))
        policy = make_policy(model, temperature=config.rollout.temperature, logit_mask=mask, head=head)
        return load_heads(policy, config.model.model_path)

    def experience(self, rollouts, scores):
        said = self.behaviour(rollouts).logprobs
        return ToyBatch(rollouts.sequences, place_scores(scores, rollouts.sequences.response_mask) + 0 * said)

    def prepare_experience(self, batch):
        mask = batch.sequences.response_mask
        returns = zero_masked(batch.returns, mask).flip(1).cumsum(1).flip(1)
        return replace(batch, returns=zero_masked(returns, mask))

    def loss(self, batch):
        mask = batch.sequences.response_mask
        told = self.policy(batch.sequences, entropy=True)
        missing = zero_masked(batch.returns, mask) - told.head["value"]
        bonus = self.method.entropy_coef * told.entropy
        each = missing**2 - missing.detach() * told.logprobs - bonus
        return masked_mean(each, mask), {"policy/bonus": Mean.of(bonus, mask)}
'''
OF_A_CRITIC = [
    "given_responses", "padding_side", "fields_have_effects", "weight_counts", "mask_law", "export", "gradient_reaches"
]  # fmt: skip


@pytest.fixture
def toy(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``toy(old, new)``: the name of an installed trainer in which a piece of source is another."""
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))

    def made(old: str = "", new: str = "") -> str:
        assert old in CRITIC
        install("kit-toy", {"kit_toy": "kit_toy_trainer"}, CRITIC.replace(old, new) if old else CRITIC)
        return "kit_toy"

    yield made
    sys.modules.pop("kit_toy_trainer", None)


@pytest.mark.slow
def test_a_sound_critic_conforms(toy: Callable[..., str]) -> None:
    assert len(check_trainer(toy(), only=OF_A_CRITIC).results) == len(OF_A_CRITIC)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "check", "seen"),
    [
        ("self.behaviour(rollouts).logprobs", "rollouts.logprobs", "given_responses", "NoneType"),
        (
            "returns=zero_masked(returns, mask)",
            "returns=zero_masked(returns * 0.9 ** torch.arange(mask.size(1)), mask)",
            "padding_side",
            "what prepare_experience makes of rows that are padded on the right and on the left",
        ),
        ("* told.logprobs - bonus", "* told.logprobs", "fields_have_effects", "changes nothing but metrics"),
        (
            "    returns: torch.Tensor",
            "    returns: torch.Tensor\n    lengths = property(lambda self: torch.ones(len(self)))",
            "weight_counts",
            "override the property `lengths`",
        ),
        (
            "load_heads(policy, config.model.model_path)",
            "policy",
            "export",
            "head.out.weight, head.out.bias; give its policy to trainkit.models.load_heads",
        ),
        (
            "each = missing**2 - missing",
            "each = missing.detach()**2 - missing",
            "gradient_reaches",
            "no gradient reaches head.out.bias, head.out.weight",
        ),
        (
            "each = missing**2 - missing",
            "each = 0 * missing**2 - missing",
            "gradient_reaches",
            "the gradient is 0 in all parameters of head.out",
        ),
        (
            "        told = self.policy(",
            "        raise SystemExit(3)\n        told = self.policy(",
            "mask_law",
            "SystemExit: 3",
        ),
    ],
)
def test_a_critic_that_does_wrong_fails(toy: Callable[..., str], old: str, new: str, check: str, seen: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_trainer(toy(old, new), only=[check])
    assert seen in str(caught.value)
