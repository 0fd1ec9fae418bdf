"""What algorithms declare for the kit: built-ins declare every setting, and wrong declarations are told."""

from __future__ import annotations

import importlib
import inspect
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from researchers import distillation, dr_grpo
from tables import table
from trainkit.errors import PluginError
from trainkit.plugins import available_trainers, get_trainer
from trainkit.plugins.discovery import BUILT_IN
from trainkit.testing import Declaration, Effect, Structure, World, nudged
from trainkit.testing.declarations import declaration_of
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import ConformanceError, check_trainer
from trainkit_kit.checks.effects import unproven, unproven_settings
from trainkit_kit.subjects import Subject

ALGORITHMS = [name for name in available_trainers() if name in BUILT_IN]


PARTS = {"clipped_surrogate(": "surrogate", "leave_one_out(": "baseline", "whiten(": "whitened"}
"""Functions of the library, and the part of the structure that an algorithm which calls one has."""


WITHOUT_SCORES = {"sft", "dpo", "orpo", "cpo", "distill_offline", "gkd", "spin"}
"""Built-ins that learn from samples, or from pairs without margins."""


@table("name", ALGORITHMS)
def test_a_built_in_declares_its_settings_and_its_structure(name: str) -> None:
    kit = declaration_of(get_trainer(name))
    assert {*kit.effects} == Subject(name).method_fields - {"name"}
    assert unproven(Subject(name)) == {}
    declared = {part for each in kit.structure for part, value in vars(each).items() if value}
    declared |= {"detached" for each in kit.structure if each.detached == ()}
    of_text = {"surrogate"} if Subject(name).language else set()
    compared = {"scores"} if Subject(name).language and name not in WITHOUT_SCORES else set()
    assert declared >= {"detached"} | of_text | compared
    assert ("scores" in declared) == bool(compared)
    if of_text:
        source = inspect.getsource(get_trainer(name))
        for call, part in PARTS.items():
            found = any(getattr(each, part) not in (None, "none") for each in kit.structure)
            assert found == (call in source), f"{part} of {name}"


PLACES = {
    "beside": ("class A: ...", "KIT = Declaration(variants={'beside': {}})", ["beside"]),
    "its own": ("KIT = Declaration(variants={'own': {}})\nclass A: ...", None, ["own"]),
    "its own, and another beside": (
        "KIT = Declaration(variants={'own': {}})\nclass A: ...", "KIT = Declaration(variants={'beside': {}})", ["own"]
    ),
    "by class": ("class A: ...", "KIT = {'A': Declaration(variants={'a': {}}), 'B': Declaration()}", ["a"]),
    "of a base class": ("class B: ...\nclass A(B): ...", "KIT = {'B': Declaration(variants={'b': {}})}", ["b"]),
    "of another class": ("class A: ...", "KIT = {'B': Declaration(variants={'b': {}})}", []),
    "none": ("class A: ...", "", []),
    "no module": ("class A: ...", None, []),
}  # fmt: skip


def imported(place: str, kit: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class `A` of a package in ``folder`` with a module `kit`."""
    package = folder / "fake_declared"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, source in (("trainer", place), ("kit", kit)):
        if source is not None:
            (package / f"{name}.py").write_text(f"from trainkit.testing import Declaration\n{source}\n")
    for name in [name for name in sys.modules if name.startswith("fake_declared")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("fake_declared.trainer").A


@table("case", PLACES)
def test_a_declaration_is_found(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place, kit, variants = PLACES[case]
    with pytest.MonkeyPatch.context() as monkeypatch:
        cls = imported(place, kit, tmp_path_factory.mktemp("found"), monkeypatch)
        assert [*declaration_of(cls).variants] == variants


@pytest.mark.parametrize("kit", ["KIT = [Declaration()]", "KIT = {'A': Declaration}"])
def test_what_is_no_declaration_is_refused(kit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = imported("class A: ...", kit, tmp_path, monkeypatch)
    with pytest.raises(PluginError, match=r"KIT of fake_declared\.kit is .*; it should be a trainkit\.testing"):
        declaration_of(cls)


def test_an_effect_is_said_in_one_way_and_compares_values() -> None:
    with pytest.raises(ValueError, match="one of rises, falls, same, equals, linear and proportional; given none of"):
        Effect("loss")
    with pytest.raises(ValueError, match="given rises and same"):
        Effect("loss", rises=(0, 1), same=(0, 1))
    with pytest.raises(ValueError, match=r"falls of an Effect should be at least two values; given \(1,\)"):
        Effect("loss", falls=(1,))
    with pytest.raises(ValueError, match=r"linear of an Effect should be at least three values; given \(0, 1\)"):
        Effect("loss", linear=(0, 1))
    assert Effect("loss", equals={1: 2.0}).values == (1,)
    assert (Effect("loss", linear=(0, 1, 2)).way, Effect("loss", proportional=(0, 1)).values) == ("linear", (0, 1))


def twice(trainer: Any) -> float:
    """Return a number that is known."""
    return 2.0 * float(trainer.method.cliprange)


def squared(trainer: Any) -> float:
    """Return the square of a setting."""
    return float(trainer.method.cliprange) ** 2


def shifted(trainer: Any) -> float:
    """Return a setting and a hundredth."""
    return float(trainer.method.cliprange) + 0.01


def loss_size(_: Any) -> float:
    """Return a number that no setting changes."""
    return 4.0


def one(_: Any) -> float:
    """Return one."""
    return 1.0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a setting": ({"clipranges": Effect("loss", rises=(0.1, 0.2))}, "which is no setting; did you mean 'cliprange'"),
    "a quantity": ({"cliprange": Effect("unclip", rises=(0.1, 0.2))}, "no quantity 'unclip'; did you mean 'unclipped'"),
    "whose credit": ({"k": Effect("credit of truncate", rises=(2, 4))}, "no quantity 'credit of truncate'; did you me"),
    "a direction": (
        {"k": Effect("responses", falls=(2, 4))},
        "the values 2: 2, 4: 4; it is declared to fall",
    ),
    "no effect": ({"k": Effect("responses", same=(2, 4))}, "2: 2, 4: 4; it is declared not to change"),
    "a number": (
        {"cliprange": Effect(twice, equals={0.1: 0.3})},
        r"gives twice the values 0.1: 0.2 \(Return a number that is known.\); the declared ones are 0.3",
    ),
    "a line": (
        {"cliprange": Effect(squared, linear=(0.1, 0.2, 0.3))},
        r"declared to be linear, and at 0.2 it is 0.01 away from that, of 0.05; a weight that is applied twice",
    ),
    "a proportion": (
        {"cliprange": Effect(squared, proportional=(0.1, 0.3))},
        "declared to be proportional, and at 0.1 it is 0.02 away from that, of 0.03",
    ),
    "a line above 0": (
        {"cliprange": Effect(shifted, proportional=(0.1, 0.3))},
        "declared to be proportional, and at 0.1 it is 0.006667 away from that",
    ),
    "another setting": (
        {"cliprange": Effect(loss_size, equals={0.1: 5.0, 0.3: 5.0})},
        r"It is wrong at all values, so the fault may be in a part that method\.cliprange does not change",
    ),
    "a line that is flat": (
        {"cliprange": Effect(one, linear=(0.1, 0.2, 0.3))},
        "declared to be linear, and does not change",
    ),
    "an output": ({"cliprange": Effect("slope of value", equals={0.1: 0.0})}, "no output 'value'; did you mean 'value"),
}


@pytest.mark.daily(wrong=("a setting", "a direction"))
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_declaration_is_told(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    effects, said = WRONG[wrong]
    monkeypatch.setattr(dr_grpo, "KIT", Declaration(effects=effects), raising=False)
    with pytest.raises(ConformanceError, match=said):
        check_trainer("_test_dr_grpo", only=["effects_as_declared"])


@pytest.mark.slow
def test_a_structure_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dr. GRPO compares with the mean of the whole group: a score of 1 more is (k − 1) / k more."""
    structure = (Structure(baseline="leave_one_out", under={"rollout.max_new_tokens": 6}),)
    monkeypatch.setattr(dr_grpo, "KIT", Declaration(structure=structure), raising=False)
    told = r"raises its own advantage by 0\.5000 in groups of 2, 0\.6667 in groups of 3, 0\.7500 in groups of 4"
    with pytest.raises(ConformanceError, match=told):
        check_trainer("_test_dr_grpo", only=["own_score_left_out"])


def likelihood(world: World) -> torch.Tensor:
    """Return −log π, a mean over tokens, which no policy gradient is."""
    return -world.logprobs[world.mask].mean()


FALSE = {
    "scores of a collection": (Structure(scores="collection"), "nothing changes in rows of other prompts"),
    "scores of a row": (Structure(scores="row"), r"what is learnt from \d+ other rows changes"),
    "nothing clipped": (Structure(surrogate="none"), r"has no gradient at \d+ of \d+ logprobs at which it had one"),
    "detached": (Structure(detached=("logprobs",)), "a part of the loss is declared to be detached there"),
    "an output": (Structure(detached=("logprob",)), "no output 'logprob' with a gradient; did you mean 'logprobs'"),
    "a discount": (Structure(discount=("clip_range", 1.0)), "names 'clip_range', which is no setting; did you mean"),
    "a sum to come": (Structure(discount=(1.0, 1.0)), r"should change by \[0\.\d+, 0, 0, 0, 0, 0\]: γ is 1 and λ 1"),
    "a loss": (Structure(gradient=likelihood), "the gradient differs from that of likelihood: after the tokens"),
    "a size": (
        Structure(gradient="policy", baseline="leave_one_out"), r"its size is 0\.08333 in groups of 2, 0\.1111 in gr"
    ),
    "a penalty": (Structure(gradient="policy", penalty="kl_coef"), "names the penalty 'kl_coef', which is no setting"),
    "a metric": (Structure(unbiased=("policy/ratios",)), "names the metric 'policy/ratios', which is not there; did"),
    "an estimate": (Structure(unbiased=("policy/ratio",)), r"policy/ratio is 1 over all responses .* exactly 0\.\d+"),
}  # fmt: skip
CHECKS = {
    "scores": "scores_count_where_declared",
    "surrogate": "nothing_is_clipped",
    "discount": "discounted_as_declared",
    "gradient": "gradient_in_expectation",
    "unbiased": "estimates_as_declared",
}
"""The check that measures a part of a structure."""


@pytest.mark.daily(false=("an output", "a loss"))
@pytest.mark.parametrize("false", FALSE)
def test_a_false_structure_is_told(false: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dr. GRPO compares within groups, clips the ratio and detaches nothing."""
    structure, said = FALSE[false]
    monkeypatch.setattr(dr_grpo, "KIT", Declaration(structure=[structure]), raising=False)
    only = next((check for part, check in CHECKS.items() if getattr(structure, part)), "gradient_is_that_of_the_loss")
    with pytest.raises(ConformanceError, match=said):
        check_trainer("_test_dr_grpo", only=[only])


@pytest.mark.slow
def test_scores_of_a_group_that_do_not_count_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its baseline, an advantage is the own score."""
    structure = (Structure(scores="group"),)
    monkeypatch.setattr(dr_grpo, "KIT", Declaration(structure=structure), raising=False)
    monkeypatch.setattr(dr_grpo.DrGRPOTrainer, "prepare_experience", lambda self, experience: experience)
    with pytest.raises(ConformanceError, match="nothing changes in the other responses of its group"):
        check_trainer("_test_dr_grpo", only=["scores_count_where_declared"])


@pytest.mark.slow
def test_a_model_of_unseeded_weights_is_not_reported_as_a_fault_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = distillation.DistillationTrainer.__init__

    def unseeded(self: Any, *args: Any, **kwargs: Any) -> None:
        honest(self, *args, **kwargs)
        draws = torch.Generator().manual_seed(torch.seed())
        with torch.no_grad():
            for parameter in self.teacher.load().policy.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draws))

    monkeypatch.setattr(distillation.DistillationTrainer, "__init__", unseeded)
    with torch.random.fork_rng():
        told = r"micro_batches: the weights of teacher \(.*\) differ between two trainers of one seed; make models in"
        with pytest.raises(ConformanceError, match=told):
            check_trainer("_test_distillation", only=["micro_batches"])


def test_settings_without_a_declared_number_are_listed_with_the_lines_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    effects = {"cliprange": Effect("unclipped", rises=(0.1, 0.2))}
    monkeypatch.setattr(dr_grpo, "KIT", Declaration(effects=effects), raising=False)
    assert unproven_settings(Subject("_test_dr_grpo")) == (
        "unproven: method.k (nothing is declared), method.cliprange (only a direction is declared)\n"
        "  Write into researchers.dr_grpo, or into the module kit beside it, and correct the values:\n\n"
        "    from trainkit.testing import Declaration, Effect\n"
        "    KIT = Declaration(effects={\n"
        '        "k": Effect("loss", equals={4: ..., 5: ...}),\n'
        '        "cliprange": Effect("gradient", linear=(0.2, 0.2828, 0.3464)),\n'
        "    })"
    )
    proven = Declaration(effects={"k": Effect("responses", equals={2: 2})}, structure=[Structure(surrogate="token")])
    monkeypatch.setattr(dr_grpo, "KIT", proven, raising=False)
    assert unproven_settings(Subject("_test_dr_grpo")) == ""


def test_a_weight_without_a_declaration_that_is_applied_twice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip range of Dr. GRPO multiplies its loss here, and is as large as it was for the surrogate."""
    honest = dr_grpo.DrGRPOTrainer.loss

    def weighted(power: int) -> Any:
        def loss(self: Any, batch: Any) -> Any:
            found, metrics = honest(self, batch)
            values = self.policy(batch.sequences).logprobs.mean()
            return found + self.method.cliprange**power * values, metrics

        return loss

    monkeypatch.setattr(dr_grpo, "clipped_surrogate", lambda ratio, advantages, cliprange: -ratio * advantages)
    monkeypatch.setattr(dr_grpo.DrGRPOTrainer, "loss", weighted(1))
    check_trainer("_test_dr_grpo", only=["weights_count_once"])
    monkeypatch.setattr(dr_grpo.DrGRPOTrainer, "loss", weighted(2))
    with pytest.raises(
        ConformanceError, match=r"by the square of method\.cliprange: as much from 0\.2 to 0\.2828 as to"
    ):
        check_trainer("_test_dr_grpo", only=["weights_count_once"])


def test_the_probes_of_a_loss_have_heads_that_all_differ(tmp_path: Path) -> None:
    """Q of ILQL is 0 at first, and so are its targets: the lower of two is then the higher, and V a constant."""
    trainer = nudged(tiny_trainer("ilql", tmp_path), 0.1)
    trainer.collect()
    head = trainer.policy(trainer.store.experience.sequences).head
    mask = trainer.store.experience.sequences.response_mask
    table = torch.stack([head[name][mask] for name in ("values", "q0", "q1", "target_q", "cql")])
    assert all((one - other).abs().min() > 0 for one, other in combinations(table, 2))
    targets = [torch.cat([x.flatten() for x in each.buffers()]) for each in trainer.unwrapped.head.target_q]
    assert (targets[0] - targets[1]).abs().min() > 0
