"""What a plugin returns is checked where it returns it, and its class when it is registered."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor

from tables import table
from trainkit import AcceleratedLoop, AccelerateRLTrainer, MethodConfig, Verdict, register_trainer
from trainkit.data import Batch, Sequences, TokenBatch
from trainkit.errors import PluginError, RegistryError
from trainkit.metrics import Mean, Std
from trainkit.plugins.contract import METHODS
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.returns import checked_batch, checked_loss

ROOT = Path(__file__).parents[1]

ONE = torch.ones(())
NAMED = re.escape('; expected a dict of metrics by name, such as {"policy/ratio": Mean.of(ratio, mask)}')
ALIGNED = r": column t belongs to token t, and nothing is shifted by one$"


def changed(algorithm: str, folder: Path, method: str, change: Callable[[Any], Any], **settings: Any) -> Any:
    """Return a tiny trainer whose ``method`` returns ``change(what it returned)``."""
    trainer = tiny_trainer(algorithm, folder / "run", **settings)
    right = getattr(trainer, method)
    setattr(trainer, method, lambda *given: change(right(*given)))
    return trainer


# ------------------------------------------------------------------------------------------------------------- loss

LOSSES: dict[str, tuple[Callable[[Tensor, Any], Any], str]] = {
    "nothing": (lambda loss, _: None, r"None \(NoneType\); expected a tuple of the loss \[\] and a dict of metrics$"),
    "alone": (
        lambda loss, _: loss,
        r"a tensor of shape \(\); expected a tuple of the loss \[\] and a dict of metrics$",
    ),
    "three": (
        lambda loss, found: (loss, found, loss),
        r"a tuple of a tensor of shape \(\) and \{'loss/nll.* and a tensor of shape \(\); expected a tuple of the loss",
    ),
    "list": (lambda loss, found: [loss, found], r"\[tensor.*\(list\); expected a tuple of the loss"),
    "swapped": (lambda loss, found: (found, loss), r"\{'loss/nll.*\(dict\) as the loss; expected a loss of shape \(\)"),
    "per row": (
        lambda loss, found: (loss.expand(8), found),
        r"a tensor of shape \(8,\) as the loss; expected a loss of shape \(\), the mean over the units that batch",
    ),
    "one element": (
        lambda loss, found: (loss.view(1), found),
        r"a tensor of shape \(1,\) as the loss; expected a loss",
    ),
    "a number": (lambda loss, found: (loss.item(), found), r"[0-9.]+ \(float\) as the loss; expected a loss of shape"),
    "detached": (
        lambda loss, found: (loss.detach(), found),
        r"a loss without gradient; expected one that is computed from self\.policy\(\.\.\.\), without detach\(\)",
    ),
    "metrics none": (lambda loss, _: (loss, None), rf"None \(NoneType\) as the metrics{NAMED}$"),
    "metrics pairs": (lambda loss, _: (loss, [("a", ONE)]), rf"\[.*\] \(list\) as the metrics{NAMED}$"),
    "metric number": (
        lambda loss, found: (loss, {**found, "loss/mine": loss.item()}),
        rf"[0-9.]+ \(float\) as the metric 'loss/mine'{NAMED}$",
    ),
    "metric tensor": (
        lambda loss, found: (loss, {"loss/mine": loss.detach()}),
        rf"a tensor of shape \(\) as the metric 'loss/mine'{NAMED}$",
    ),
    "metric unnamed": (lambda loss, _: (loss, {0: Mean.of(ONE)}), rf"Mean\(.*\(Mean\) as the metric 0{NAMED}$"),
    "metric of rows": (
        lambda loss, _: (loss, {"loss/mine": Mean(torch.ones(8), ONE)}),
        r"a Mean with a tensor of shape \(8,\) as the metric 'loss/mine'; expected Mean\.of\(values\)$",
    ),
    "metric of floats": (
        lambda loss, _: (loss, {"loss/mine": Std(ONE, 0.5, ONE)}),  # type: ignore[arg-type]
        r"a Std with 0\.5 \(float\) as the metric 'loss/mine'; expected Std\.of\(values\)$",
    ),
}


@table("wrong, told", LOSSES.values())
def test_a_wrong_return_of_loss_is_an_error(wrong: Callable[[Tensor, Any], Any], told: str, trainer: Any) -> None:
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(PluginError, match=rf"(?s)^'sft': loss returned {told}"):
        checked_loss(trainer, wrong(loss, {"loss/nll": Mean.of(ONE)}))


@table("case", ["nothing", "per row", "metric number"])
def test_a_wrong_return_of_loss_is_told_before_the_weights_move(case: str, tmp_path: Path) -> None:
    wrong, told = LOSSES[case]
    trainer = changed("sft", tmp_path, "loss", lambda right: wrong(*right))
    trainer.models.build()
    before = [p.detach().clone() for p in trainer.unwrapped.parameters()]
    with pytest.raises(PluginError, match=rf"(?s)^'sft': loss returned {told}"):
        trainer.learn()
    assert trainer.progress.step == 0
    assert all(torch.equal(p, old) for p, old in zip(trainer.unwrapped.parameters(), before, strict=True))


def test_a_loss_needs_no_gradient_in_evaluations_and_its_shape_is_checked_there(tmp_path: Path) -> None:
    trainer = changed("reward", tmp_path, "loss", lambda right: (right[0].detach(), right[1]))
    assert "eval/loss/total" in trainer.evaluate()
    trainer = changed("reward", tmp_path, "loss", lambda right: (right[0].expand(2), right[1]))
    with pytest.raises(PluginError, match=r"'reward': loss returned a tensor of shape \(2,\) as the loss"):
        trainer.evaluate()


def test_a_loss_that_is_not_finite_is_no_wrong_return(tmp_path: Path) -> None:
    trainer = changed("sft", tmp_path, "loss", lambda right: (right[0] * torch.nan, right[1]), train__total_steps=1)
    trainer.judge = lambda metrics: Verdict.SKIP
    trainer.learn()
    assert trainer.progress.step == 1


@table(
    "given, told",
    [
        ({"mine/a": 1.0}, rf"1\.0 \(float\) as the metric 'mine/a'{NAMED}$"),
        (None, rf"None \(NoneType\) as the metrics{NAMED}$"),
        ({"mine/a": torch.ones(3)}, rf"a tensor of shape \(3,\) as the metric 'mine/a'{NAMED}$"),
    ],
)
def test_metrics_that_are_recorded_are_checked_at_the_call(given: Any, told: str, tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    with pytest.raises(PluginError, match=rf"^'sft': record was called with {told}"):
        trainer.record(given)


@table("given, said", [(None, r"None \(NoneType\)"), (True, r"True \(bool\)"), ("skip", r"'skip' \(str\)")])
def test_what_judge_returns_is_a_verdict(given: Any, said: str, tmp_path: Path) -> None:
    trainer = changed("ppo", tmp_path, "judge", lambda _: given)
    expected = r"expected Verdict\.STEP, Verdict\.SKIP or Verdict\.STOP$"
    with pytest.raises(PluginError, match=rf"^'ppo': judge returned {said}; {expected}"):
        trainer.learn()
    assert trainer.progress.step == 0


# ------------------------------------------------------------------------------------------------------- experience

PLACES = ("experience", "make_experience", "prepare_experience", "prepare_step")
"""The methods that return batches."""


@table("method", PLACES)
def test_experience_that_is_no_batch_is_an_error_of_the_method(method: str, tmp_path: Path) -> None:
    trainer = changed("ppo", tmp_path, method, lambda batch: None)
    with pytest.raises(PluginError, match=rf"^'ppo': {method} returned None \(NoneType\); expected a Batch, such as "):
        trainer.learn()
    assert trainer.progress.step == 0


def test_fields_of_other_shapes_are_an_error_of_the_method(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    def change(batch: Any) -> Any:
        name, field = next((name, field) for name, field in batch.parts().items() if isinstance(field, Tensor))
        found.update(kind=type(batch).__name__, name=name, t=field.size(1))
        return replace(batch, **{name: field[:, 1:]})

    trainer = changed("ppo", tmp_path, "prepare_step", change, rollout__num_rollouts=8)
    with pytest.raises(PluginError) as caught:
        trainer.learn()
    told = rf"^'ppo': prepare_step returned a {found['kind']} whose field '{found['name']}' is a tensor of shape "
    shapes = rf"\(8, {found['t'] - 1}\); expected \[B, T, \.\.\.\] like its sequences, \(8, {found['t']}\){ALIGNED}"
    assert re.search(told + shapes, str(caught.value)), str(caught.value)


def test_what_held_out_samples_become_is_checked(tmp_path: Path) -> None:
    trainer = changed("reward", tmp_path, "make_experience", lambda batch: replace(batch, margins=batch.margins[1:]))
    told = r"^'reward': make_experience returned a RewardBatch whose field 'margins' is a tensor of shape \(7,\)"
    with pytest.raises(PluginError, match=told):
        trainer.evaluate()
    trainer = changed("reward", tmp_path, "prepare_step", lambda batch: None)
    with pytest.raises(PluginError, match=r"^'reward': prepare_step returned None"):
        trainer.evaluate()


def test_what_step_makes_of_given_responses_is_checked(tmp_path: Path) -> None:
    trainer = changed("ppo", tmp_path, "prepare_experience", lambda batch: None)
    rollouts = trainer.generate(["a"] * 16)
    with pytest.raises(PluginError, match=r"^'ppo': prepare_experience returned None"):
        trainer.step(rollouts.queries, rollouts.responses, [1.0] * 16)


@dataclass(frozen=True)
class Pairs(Batch):
    one: Any
    other: Any = None


@dataclass(frozen=True)
class PerToken(TokenBatch):
    inner: Any
    scores: Any = None


@dataclass(frozen=True)
class Shared(Batch):
    """Rows that share what is stored once."""

    index: Tensor
    kept: Tensor

    def take(self, rows: Tensor) -> Self:
        used, index = self.index[rows].unique(return_inverse=True)
        return type(self)(index, self.kept[used])


@dataclass(frozen=True)
class Wide(TokenBatch):
    """Fields with columns of their own."""

    table: Tensor

    def trim(self) -> Self:
        return replace(self, sequences=self.sequences.trim())


def sequences(rows: int = 2, columns: int = 3) -> Sequences:
    return Sequences.from_lists([[1]] * rows, [[2] * (columns - 1)] * rows)


X = torch.zeros(2, 3)

RIGHT: dict[str, Batch] = {
    "rows of any further shape": Pairs(torch.zeros(2), torch.zeros(2, 5, 7)),
    "sequences": sequences(),
    "no rows": PerToken(Sequences.from_lists([], []), torch.zeros(0)),
    "pairs of other lengths": Pairs(sequences(2, 3), sequences(2, 5)),
    "hidden states": replace(sequences(), trunk=torch.zeros(2, 3, 4)),
    "rows and tokens": PerToken(sequences(), X, torch.zeros(2)),
    "rows that are stored once": Pairs(torch.zeros(4), Shared(torch.tensor([0, 0, 1, 1]), torch.zeros(2, 9))),
    "columns of its own": Wide(sequences(), torch.zeros(2, 9)),
}
TENSOR = r"expected a tensor \[B, \.\.\.\] or a batch$"
NO_BATCH = "expected a Batch, such as a dataclass derived from TokenBatch$"
FIELD = r"a PerToken whose field 'inner' is a tensor of shape"
WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, rf"None \(NoneType\); {NO_BATCH}"),
    "fields alone": (Pairs(ONE).parts(), rf"\{{'one'.*\(dict\); {NO_BATCH}"),
    "a list of batches": ([sequences()], rf"\[[\s\S]*\(list\); {NO_BATCH}"),
    "two": ((sequences(), ONE), rf"a tuple of a \w+ of 2 rows and a tensor of shape \(\); {NO_BATCH}"),
    "a column too few": (
        PerToken(sequences(), X[:, 1:]),
        rf"{FIELD} \(2, 2\); expected \[B, T, \.\.\.\] like its sequences, \(2, 3\){ALIGNED}",
    ),
    "a column too many": (
        PerToken(sequences(), torch.zeros(2, 4)),
        rf"{FIELD} \(2, 4\); expected \[B, T, \.\.\.\] like its sequences, \(2, 3\){ALIGNED}",
    ),
    "a row too few": (PerToken(sequences(), X[1:]), rf"{FIELD} \(1, 3\); expected 2 rows, the first dimension of 'seq"),
    "a mean": (PerToken(sequences(), ONE), rf"{FIELD} \(\); {TENSOR}"),
    "a list": (Pairs(torch.zeros(2), [1, 2]), rf"a Pairs whose field 'other' is \[1, 2\] \(list\); {TENSOR}"),
    "a number": (Pairs(3.0), rf"a Pairs whose field 'one' is 3\.0 \(float\); {TENSOR}"),
    "a shorter batch": (
        Pairs(torch.zeros(4), sequences(2)),
        r"a Pairs whose field 'other' is a Sequences of 2 rows; expected 4 rows, the first dimension of 'one'$",
    ),
    "a wrong batch in it": (
        Pairs(torch.zeros(2), PerToken(sequences(), X[:, 1:])),
        r"a Pairs whose field 'other\.inner' is a tensor of shape \(2, 2\); expected .* sequences, \(2, 3\)",
    ),
    "rows stored once, but too few": (
        Pairs(torch.zeros(4), Shared(torch.tensor([0, 1]), torch.zeros(2, 9))),
        r"a Pairs whose field 'other' is a Shared of 2 rows; expected 4 rows, the first dimension of 'one'$",
    ),
    "longer sequences in it": (
        PerToken(sequences(), sequences(2, 4)),
        r"a PerToken whose field 'inner\.input_ids' is a tensor of shape \(2, 4\); expected .* sequences, \(2, 3\)",
    ),
    "ids for sequences": (
        PerToken(X, X),  # type: ignore[arg-type]
        r"a PerToken whose field 'sequences' is a tensor of shape \(2, 3\); expected Sequences$",
    ),
    "hidden states": (
        replace(sequences(), trunk=torch.zeros(2, 2, 4)),
        r"a Sequences whose field 'trunk' is a tensor of shape \(2, 2, 4\); expected .* sequences, \(2, 3\)",
    ),
    "flat ids": (
        Sequences(torch.ones(2), torch.ones(2).bool(), torch.ones(2).bool()),
        r"a Sequences whose field 'input_ids' is a tensor of shape \(2,\); expected",
    ),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_trainer("sft", tmp_path_factory.mktemp("returns"))


@table("batch", RIGHT.values())
def test_a_right_batch_is_returned_as_it_is(batch: Batch, trainer: Any) -> None:
    assert checked_batch(trainer, "make_experience", batch) is batch


@table("batch, told", WRONG.values())
def test_a_wrong_batch_is_an_error(batch: Any, told: str, trainer: Any) -> None:
    with pytest.raises(PluginError, match=rf"^'sft': make_experience returned {told}"):
        checked_batch(trainer, "make_experience", batch)


# ------------------------------------------------------------------------------------------------------ registration


class WrongConfig(MethodConfig):
    """Settings with a number of responses."""

    name: str = "fake-returns"
    wrong_k: int = 2


class Good(AccelerateRLTrainer[WrongConfig]):
    """A class with all that is needed."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")

    def experience(self, rollouts: Any, scores: Any) -> Batch:
        return sequences()

    def loss(self, batch: Any) -> Any:
        return None


def derived(**members: Any) -> type:
    return type(Good)("Derived", (Good,), {"__module__": __name__, **members})


@table(
    "group, told",
    [
        (
            "wrong_n",
            r"'wrong_n' \(str\); did you mean 'wrong_k'\?; it names the setting of the method with the number of",
        ),
        (4, r"4 \(int\); it names the setting of the method .*, one of name, wrong_k$"),
        (["wrong_k"], r"\['wrong_k'\] \(list\)"),
        (None, r"None \(NoneType\)"),
    ],
)
def test_a_group_that_names_no_setting_is_refused(group: Any, told: str) -> None:
    with pytest.raises(RegistryError, match=rf"^Derived cannot be registered as 'fake-returns': group is {told}"):
        register_trainer("fake-returns")(derived(group=group))


@table(
    "remembers, told",
    [
        ({"seen": []}, r"has \[\] \(list\) for 'seen'; give a function that returns the initial value, such as list"),
        ({"seen": list, "beta": 0.1}, r"has 0\.1 \(float\) for 'beta'; give a function"),
        (["seen"], r"is \['seen'\] \(list\); it is a dict of the attributes to save, each with a function"),
    ],
)
def test_initial_values_that_are_no_functions_are_refused(remembers: Any, told: str) -> None:
    with pytest.raises(RegistryError, match=rf"^Derived cannot be registered as 'fake-returns': remembers {told}"):
        register_trainer("fake-returns")(derived(remembers=remembers))


def nothing(self: Any, *_: Any) -> None: ...


MISSPELT = {
    "prepare_experiance": "prepare_experience",
    "prepare_experience_": "prepare_experience",
    "prepare_steps": "prepare_step",
    "prepaer_step": "prepare_step",
    "after_steps": "after_step",
    "afterstep": "after_step",
    "load_statedict": "load_state_dict",
    "experience_row": "experience_rows",
    "get_archs": "get_arch",
}


@table("name, meant", MISSPELT.items())
def test_a_misspelt_method_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    told = (
        rf"^Derived cannot be registered as 'fake-returns': Derived\.{name} overrides nothing; did you mean '{meant}'"
    )
    with pytest.raises(RegistryError, match=rf"{told}\?\. Rename it; if it is a method"):
        register_trainer("fake-returns")(derived(**{name: nothing}))


@table("kind", [property, classmethod, staticmethod, torch.no_grad()])
def test_misspelt_methods_are_found_under_decorators(kind: Any) -> None:
    def experience_row(*_: Any) -> int:
        return 1

    with pytest.raises(RegistryError, match=r"Derived\.experience_row overrides nothing"):
        register_trainer("fake-returns")(derived(experience_row=kind(experience_row)))


def test_a_misspelling_of_a_method_that_is_needed_is_said_instead_of_its_absence() -> None:
    class Derived(AccelerateRLTrainer[WrongConfig]):
        inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
        experiance, loss = nothing, nothing

    with pytest.raises(RegistryError, match=r"Derived\.experiance overrides nothing.*did you mean 'experience'"):
        register_trainer("fake-returns")(Derived)


def test_a_misspelt_method_of_a_base_is_found_and_named_with_its_class() -> None:
    mixin = type("Mixin", (), {"after_steps": nothing, "__module__": __name__})
    cls = type(Good)("Derived", (mixin, Good), {"__module__": __name__})
    with pytest.raises(RegistryError, match=r"fake-returns': Mixin\.after_steps overrides nothing"):
        register_trainer("fake-returns")(cls)


class HasBoth(Good):
    """Names near those of the contract, beside the methods of these names."""

    def prepare_steps(self, batches: Sequence[Any]) -> list[Any]:
        return [self.prepare_step(batch) for batch in batches]

    def prepare_step(self, batch: Any) -> Any:
        return batch


class Unlike(Good):
    """Names that are the contract's, short, private or far from it."""

    after_steps: ClassVar[int] = 1

    def generated(self) -> None: ...

    def evaluate(self) -> Mapping[str, float]:  # type: ignore[override]
        return {}

    def judges(self) -> None: ...

    def _after_step(self) -> None: ...

    def prepare(self) -> None: ...

    def prepare_everything(self) -> None: ...

    def after_step(self) -> None: ...


@table("cls", [Good, HasBoth, Unlike, derived(group="wrong_k", remembers={"seen": list})])
def test_a_class_without_faults_is_registered(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.plugins.registry._TRAINERS", {})
    assert register_trainer("fake-returns")(cls) is cls


def test_the_methods_that_names_are_compared_with_are_those_of_the_documented_contract() -> None:
    page = (ROOT / "docs/write-an-algorithm.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?m)^\| `trainkit\.\w+` \| purpose \|\n(?:\|.*\n)+", page)
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {"loss", "group", "write_model"} <= named
    known = {name: inspect.getattr_static(AccelerateRLTrainer, name) for name in named}
    called = {name for name, value in known.items() if isinstance(value, property) or inspect.isroutine(value)}
    assert called == {*METHODS}
    assert len(METHODS) == len(called)
    assert all(hasattr(AcceleratedLoop, name) for name in METHODS if name not in ("steer", "keep", "keeps"))
