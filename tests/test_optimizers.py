"""Optimizers and schedules by name, and as objects of the user."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.optim import lr_scheduler

import trainkit
from tables import table
from trainkit import TRLConfig
from trainkit.config.arguments import OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES
from trainkit.config.sections import OptimizerConfig, SchedulerConfig
from trainkit.errors import ConfigError
from trainkit.testing.trainers import SAMPLES, tiny_trainer
from trainkit.trainer.optim import check_given, make_scheduler


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.models.build()
    return {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}


def require_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()


def resumed(place: Path, **settings: Any) -> tuple[Any, Any]:
    """A run of four steps, and one that resumes it after two."""
    settings = {"train__total_steps": 4, "train__save_interval": 2, **settings}
    whole = tiny_trainer("sft", place / "whole", **settings)
    whole.learn()
    half = str(next((place / "whole").glob("**/step_*2")))
    later = tiny_trainer("sft", place / "later", train__resume=half, **settings)
    later.learn()
    return whole, later


def test_the_names_are_those_that_arguments_are_known_of() -> None:
    optimizers = get_args(OptimizerConfig.model_fields["name"].annotation)
    assert set(optimizers) == set(OPTIMIZERS)
    schedules = get_args(SchedulerConfig.model_fields["name"].annotation)
    assert set(schedules) == {"constant", *SCHEDULES, *TORCH_SCHEDULES}


@pytest.mark.daily(name=("adafactor",))
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_each_optimizer_of_torch_trains_and_resumes_bit_exactly(name: str, tmp_path: Path) -> None:
    lr = {"adadelta": 1.0, "adafactor": 0.05}.get(name, 1e-2)
    whole, later = resumed(tmp_path, optimizer__name=name, optimizer__lr=lr, optimizer__weight_decay=0.01)
    assert type(whole.optimizer.optimizer) is getattr(torch.optim, OPTIMIZERS[name])
    require_equal(weights(whole), weights(later))
    begun = weights(tiny_trainer("sft", tmp_path / "begun"))
    assert any(not torch.equal(tensor, begun[name]) for name, tensor in weights(whole).items())


ARGUMENTS: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 3},
    "CosineAnnealingLR": {"T_max": 5, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {"start_factor": 0.2, "total_iters": 4},
    "MultiStepLR": {"milestones": [2, 5], "gamma": 0.1},
    "PolynomialLR": {"total_iters": 6, "power": 2.0},
    "StepLR": {"step_size": 3, "gamma": 0.5},
}


@table("name", TORCH_SCHEDULES)
def test_schedules_of_torch_have_the_rates_of_torch_after_the_warm_up(name: str) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))], lr=0.3)

    theirs = getattr(lr_scheduler, name)(optimizer(), **ARGUMENTS[name])
    config = SchedulerConfig(name=name, kwargs=ARGUMENTS[name], warmup_steps=2)
    ours = make_scheduler(config, optimizer(), 0)
    assert ours.get_last_lr() == [0.0]
    for _ in range(2):
        ours.optimizer.step()
        ours.step()
    for _ in range(12):
        assert ours.get_last_lr() == pytest.approx(theirs.get_last_lr(), rel=1e-12)
        for each in (ours, theirs):
            each.optimizer.step()
            each.step()


def test_schedules_of_transformers_by_name() -> None:
    """A cosine with two restarts is back at its peak in the middle; a stable rate is constant until it decays."""
    parameter = torch.nn.Parameter(torch.zeros(1))

    def rates(name: str, **kwargs: Any) -> list[Any]:
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        made = make_scheduler(SchedulerConfig(name=name, kwargs=kwargs), optimizer, 8)
        found: list[Any] = []
        for _ in range(8):
            found += made.get_last_lr()
            optimizer.step()
            made.step()
        return found

    half = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert rates("cosine_with_restarts", num_cycles=2) == pytest.approx([*half, *half])
    stable = rates("warmup_stable_decay", num_decay_steps=4)
    assert stable[:5] == [1.0] * 5
    assert stable[5] > stable[6] > stable[7]


@pytest.mark.slow
def test_a_schedule_of_torch_resumes_bit_exactly(tmp_path: Path) -> None:
    schedule = {"scheduler__name": "StepLR", "scheduler__kwargs": {"step_size": 1, "gamma": 0.5}}
    whole, later = resumed(tmp_path, **schedule, optimizer__lr=1e-2)
    require_equal(weights(whole), weights(later))
    assert later.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 16)


@table(
    "section, given, said",
    [
        ("optimizer", {"name": "nadm"}, "did you mean 'nadam'"),
        ("optimizer", {"name": "lbfgs"}, "optimizer.name"),
        ("optimizer", {"name": "rmsprop", "kwargs": {"betas": [0.9, 0.99]}}, "no argument of torch.optim.RMSprop"),
        ("scheduler", {"name": "StepLR"}, r"StepLR needs kwargs: \{step_size: ...\}; add it"),
        ("scheduler", {"name": "steplr", "kwargs": {"step_size": 2}}, "did you mean 'StepLR'"),
        ("scheduler", {"name": "CosineAnnealingLR", "kwargs": {"T_max": 5, "tmax": 1}}, "no argument of the schedule"),
        ("scheduler", {"name": "ReduceLROnPlateau"}, "scheduler.name"),
    ],
)
def test_what_does_not_fit_is_refused(section: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TRLConfig.from_dict({"method": "sft", section: given})


# ------------------------------------------------------------------------------------------------------------ objects


def trainer_with(place: Path, **arguments: Any) -> Any:
    usual = tiny_trainer("sft", place)
    sections = {name: getattr(usual.config, name).model_dump() for name in ("model", "train")}
    config: TRLConfig[Any] = TRLConfig(method="sft").evolve(**sections)
    settings = {"total_steps": 4, "save_interval": 2, **arguments.pop("train", {})}
    made = type(usual)(config.evolve(train=settings), tokenizer=usual.tokenizer, **arguments)
    made.add_samples(SAMPLES)
    return made


def grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, in another order than the model's."""
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return torch.optim.NAdam([{"params": others, "lr": 1e-2}, {"params": matrices, "weight_decay": 0.1}], lr=3e-3)


halved = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)


def test_an_optimizer_and_a_schedule_of_the_user_train_and_resume_bit_exactly(tmp_path: Path) -> None:
    whole = trainer_with(tmp_path / "whole", optimizer=grouped, scheduler=halved)
    whole.learn()
    assert [group["lr"] for group in whole.optimizer.param_groups] == pytest.approx([1e-2 / 16, 3e-3 / 16])
    half = str(next((tmp_path / "whole").glob("**/step_*2")))
    resume = {"train": {"resume": half}}
    later = trainer_with(tmp_path / "later", optimizer=grouped, scheduler=halved, **resume)
    later.learn()
    require_equal(weights(whole), weights(later))
    other = trainer_with(tmp_path / "other", optimizer=torch.optim.SGD, **resume)
    with pytest.raises(trainkit.errors.TrainkitError, match="the optimizer was NAdam, and is SGD"):
        other.learn()
    none = trainer_with(tmp_path / "none", **resume)
    with pytest.raises(trainkit.errors.TrainkitError, match="was NAdam, and is that of the configuration"):
        none.learn()


GROUPS = [{"match": "value_head", "lr": 0.3}, {"match": r"\.bias$", "lr": 0.05, "weight_decay": 0.5}]


def test_groups_of_parameters_have_their_own_rates_and_decays(tmp_path: Path) -> None:
    """By SGD, of which a step is −rate · (gradient + decay · weight); a parameter is in its first group."""
    usual = {"optimizer__name": "sgd", "optimizer__lr": 0.1, "train__max_grad_norm": None, "train__total_steps": 1}
    whole = tiny_trainer("ppo", tmp_path / "whole", **usual)
    grouped = tiny_trainer("ppo", tmp_path / "grouped", optimizer__groups=GROUPS, **usual)
    begun = weights(whole)
    for trainer in (whole, grouped):
        trainer.learn()
    rates = {name: values[1] for name, values in grouped.history.items() if name.startswith("train/lr")}
    assert rates == {"train/lr": 0.1, "train/lr/value_head": 0.3, r"train/lr/\.bias$": 0.05}
    kinds = set()
    for name, end in weights(grouped).items():
        gradient = (begun[name] - weights(whole)[name]) / 0.1
        bias = name.endswith(".bias") and "value_head" not in name
        rate, decay = (0.3, 0.0) if "value_head" in name else (0.05, 0.5) if bias else (0.1, 0.0)
        torch.testing.assert_close(end, begun[name] - rate * (gradient + decay * begun[name]), rtol=1e-4, atol=1e-6)
        kinds.add(rate)
    assert kinds == {0.3, 0.05, 0.1}


@table("changes", [{"scheduler__name": "cosine"}, {"model__dtype": "bfloat16"}, {"train__sharding": "fsdp2"}])
def test_a_run_with_groups_resumes_bit_exactly(changes: dict[str, Any], tmp_path: Path) -> None:
    groups = [{"match": "wte|wpe", "lr": 1e-3}, {"match": r"\.weight$", "weight_decay": 0.1}]
    require_equal(*map(weights, resumed(tmp_path, optimizer__lr=1e-2, optimizer__groups=groups, **changes)))


@table(
    "groups, said",
    [
        (
            [{"match": "value_head"}],
            r"groups\[0\].match is 'value_head', and no trained parameter matches; there are \d+, such as model",
        ),
        (
            [{"match": "wte"}, {"match": "wte.weight"}],
            r"groups\[1\].* all parameters that match are in groups before it",
        ),
        ([{"match": "("}], "it is no regular expression: missing"),
        ([{"match": "wte", "lr": 0}], "greater than 0"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("sft", tmp_path, optimizer__groups=groups).models.build()


def test_a_function_may_ask_for_the_names_of_the_parameters(tmp_path: Path) -> None:
    def make(parameters: list[torch.nn.Parameter], names: list[str]) -> torch.optim.Optimizer:
        sides = {
            side: [p for p, name in zip(parameters, names, strict=True) if ("wte" in name) == side] for side in (0, 1)
        }
        return torch.optim.SGD([{"params": sides[0]}, {"params": sides[1], "lr": 0.5}], lr=0.1)

    trainer = trainer_with(tmp_path, optimizer=make)
    trainer.models.build()
    (embedding,) = trainer.optimizer.param_groups[1]["params"]
    assert embedding is trainer.unwrapped.model.get_input_embeddings().weight


def test_an_optimizer_over_a_live_model_is_stepped(tmp_path: Path) -> None:
    model = tiny_trainer("sft", tmp_path / "usual").models.load_policy().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = trainkit.train(
        model,
        samples=SAMPLES,
        tokenizer=tiny_trainer("sft", tmp_path / "again").tokenizer,
        config={"method": "sft", "train": {"total_steps": 3, "batch_size": 8, "run_dir": str(tmp_path / "run")}},
        optimizer=optimizer,
        scheduler=schedule,
    )
    assert trainer.optimizer.optimizer is optimizer
    assert schedule.get_last_lr() == pytest.approx([1e-2 / 8])


@table(
    "arguments, said",
    [
        ({"optimizer": 3}, "optimizer should be one of torch, or a function that makes it; given 3"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters[1:])}, "does not have model.*, which is trained"),
        ({"optimizer": lambda _: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}, "does not have model"),
        (
            {"optimizer": lambda given: torch.optim.SGD([*given, torch.nn.Parameter(torch.ones(1))])},
            "has 1 parameters that are not trained",
        ),
        ({"optimizer": lambda _: None}, "should be one of torch, or make one of parameters; given None"),
        ({"scheduler": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer)}, "that needs steps alone"),
        (
            {"scheduler": lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1)},
            "the scheduler is of another optimizer",
        ),
    ],
)
def test_objects_that_do_not_fit_are_refused(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_with(tmp_path / "run", **arguments).learn()


def test_settings_that_an_object_replaces_are_refused(tmp_path: Path) -> None:
    usual = tiny_trainer("sft", tmp_path / "run", scheduler__warmup_steps=2)
    given = {"optimizer": torch.optim.SGD, "tokenizer": usual.tokenizer}
    with pytest.raises(ConfigError, match=r"optimizer is given as an object, and optimizer.lr would have no effect"):
        type(usual)(usual.config, **given)
    with pytest.raises(ConfigError, match=r"scheduler is given as an object, and scheduler.warmup_steps would have"):
        type(usual)(usual.config, scheduler=halved, tokenizer=usual.tokenizer)
    with pytest.raises(ConfigError, match=r"or set train\.sharding to none"):
        check_given(TRLConfig(method="sft"), torch.optim.SGD, None, replicated=False)
