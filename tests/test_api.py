"""The one call: what decides the kind of training, what it takes, and what it refuses before a model is loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tables import table
from trainkit.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    PluginError,
    RegistryError,
    RewardError,
    TrainkitError,
)
from trainkit.plugins import get_trainer
from trainkit.testing import character_tokenizer, tiny_gpt2

TOKENIZER = character_tokenizer("abcdefgh")
MODEL = tiny_gpt2(len(TOKENIZER))
PROMPTS = ["a", "bc", "def", "g"]


def reward(outputs: list[str], **_: Any) -> list[float]:
    return [float(output.count("a")) for output in outputs]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "rollout": {"max_new_tokens": 4, "num_rollouts": 8},
        "train": {
            "batch_size": 8, "total_steps": 2, "epochs": None, "eval_interval": 0,
            "run_dir": str(tmp_path / "run"), "trackers": [],
        },
    }  # fmt: skip


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is an error: what is refused, is refused before."""
    from transformers import AutoModelForCausalLM

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded before the input was checked")

    for name in ("from_config", "from_pretrained"):
        monkeypatch.setattr(AutoModelForCausalLM, name, refuse)


# ------------------------------------------------------------------------------------------------------- dispatch


def test_reward_fn_and_prompts_train_online_by_ppo(config: Any) -> None:
    trainer = trainkit.train(MODEL, reward, prompts=PROMPTS, config=config, tokenizer=TOKENIZER)
    assert type(trainer) is get_trainer("ppo")
    assert trainer.progress.step == 2


def test_samples_train_by_sft(config: Any) -> None:
    trainer = trainkit.train(MODEL, samples=["abc", ("a", "b")], config=config, tokenizer=TOKENIZER)
    assert type(trainer) is get_trainer("sft")
    assert trainer.progress.step == 2


def test_samples_with_rewards_train_by_ilql(config: Any) -> None:
    trainer = trainkit.train(MODEL, samples=["abc", "ab"], rewards=[1.0, 0.0], config=config, tokenizer=TOKENIZER)
    assert type(trainer) is get_trainer("ilql")
    assert trainer.progress.step == 2


def test_dataset_is_samples_and_rewards(config: Any) -> None:
    with pytest.warns(FutureWarning, match="samples= and rewards="):
        trainer = trainkit.train(MODEL, dataset=(["abc", "ab"], [1, 0]), config=config, tokenizer=TOKENIZER)
    assert [row["reward"] for row in trainer.pipeline.rows] == [1.0, 0.0]


def test_method_may_be_a_string(config: Any) -> None:
    trainer = trainkit.train(MODEL, samples=["abc"], method="SFT", config=config, tokenizer=TOKENIZER)
    assert trainer.config.method.name == "sft"


@table(
    "arguments, named",
    [
        ({}, ["reward_fn", "samples"]),
        ({"reward_fn": reward, "samples": ["a"]}, ["reward_fn", "samples"]),
        ({"reward_fn": reward, "rewards": [1.0]}, ["reward_fn", "rewards"]),
        ({"prompts": ["a"], "samples": ["a"]}, ["prompts", "samples"]),
        ({"rewards": [1.0]}, ["rewards", "samples"]),
        ({"prompts": ["a"]}, ["prompts", "reward_fn"]),
        ({"samples": ["a"], "method": "ppo"}, ["ppo", "reward_fn", "samples"]),
        ({"reward_fn": reward, "prompts": ["a"], "method": "sft"}, ["sft", "samples", "reward_fn"]),
        ({"samples": ["a"], "rewards": [1.0], "method": "sft"}, ["sft", "rewards"]),
        ({"samples": ["a"], "method": "sft", "config": {"method": "ppo"}}, ["sft", "ppo"]),
        ({"dataset": (["a"], [1.0]), "samples": ["a"]}, ["dataset", "samples"]),
        ({"dataset": ["a"]}, ["dataset"]),
    ],
)
@pytest.mark.usefixtures("no_model_is_loaded")
def test_contradictory_arguments_raise_naming_both(arguments: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        trainkit.train(MODEL, tokenizer=TOKENIZER, **arguments)
    assert all(name in str(error.value) for name in named)


# ---------------------------------------------------------------------------------------------- models and prompts


def model_forms(tmp_path: Path) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**{k: v for k, v in MODEL.items() if k != "model_type"})
    live = GPT2LMHeadModel(config)
    live.save_pretrained(tmp_path / "saved")
    return {"fields": MODEL, "config": config, "model": live, "directory": str(tmp_path / "saved")}


@table("form", ["fields", "config", "model", "directory"])
def test_model_path_takes(form: str, config: Any, tmp_path: Path) -> None:
    config["train"] |= {"run_dir": str(tmp_path / "run"), "total_steps": 1}
    given = model_forms(tmp_path)[form]
    trainer = trainkit.train(given, samples=["abc"], config=config, tokenizer=TOKENIZER)
    assert trainer.unwrapped.model.config.n_embd == 32
    assert (trainer.unwrapped.model is given) == (form == "model")


def test_a_model_config_gives_the_same_weights_as_its_fields(config: Any, tmp_path: Path) -> None:
    runs = []
    for form in ("fields", "config"):
        changed = copy.deepcopy(config)
        changed["train"]["run_dir"] = str(tmp_path / form)
        given = model_forms(tmp_path)[form]
        trainer = trainkit.train(given, samples=["abc"], config=changed, tokenizer=TOKENIZER)
        runs.append(trainer.unwrapped.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))


def prompt_forms() -> dict[str, Any]:
    import datasets

    return {
        "strings": PROMPTS,
        "dicts": [{"prompt": p, "answer": p.upper()} for p in PROMPTS],
        "dataset": datasets.Dataset.from_list([{"prompt": p, "answer": p.upper()} for p in PROMPTS]),
        "iterable": ({"prompt": p, "answer": p.upper()} for p in PROMPTS),
    }


@table("form", ["strings", "dicts", "dataset", "iterable"])
def test_prompts_may_be(form: str, config: Any, tmp_path: Path) -> None:
    config["train"] |= {"run_dir": str(tmp_path / "run"), "total_steps": 1}
    config["method"] = {"ppo_epochs": 1}
    seen: list[dict[str, Any]] = []

    def spy(samples: Any, prompts: Any, outputs: Any, tokenizer: Any, **columns: Any) -> list[float]:
        assert tokenizer is TOKENIZER
        assert samples == [p + o for p, o in zip(prompts, outputs, strict=True)]
        seen.append({"prompts": prompts, **columns})
        return [1.0] * len(samples)

    trainkit.train(MODEL, spy, prompts=prompt_forms()[form], config=config, tokenizer=TOKENIZER)
    assert set(seen[0]["prompts"]) == set(PROMPTS)
    if form != "strings":
        assert seen[0]["answer"] == [p.upper() for p in seen[0]["prompts"]]


def test_without_prompts_responses_start_from_the_beginning_token(config: Any) -> None:
    tokenizer = character_tokenizer("abc", bos_token="<bos>")
    trainer = trainkit.train(tiny_gpt2(len(tokenizer)), reward, config=config, tokenizer=tokenizer)
    assert {tuple(q.tolist()) for q in trainer.generate(["<bos>"]).queries} == {(tokenizer.bos_token_id,)}
    with pytest.raises(DataError, match="no prompts"):
        trainkit.train(MODEL, reward, config=config, tokenizer=TOKENIZER)


def test_the_callers_arguments_are_not_changed(config: Any) -> None:
    prompts = [{"prompt": p, "x": [1]} for p in PROMPTS]
    before = copy.deepcopy((prompts, config, MODEL))
    trainkit.train(MODEL, reward, prompts=prompts, eval_prompts=prompts, config=config, tokenizer=TOKENIZER)
    assert before == (prompts, config, MODEL)


# ----------------------------------------------------------------------------------------------- what comes back


def test_the_trainer_generates_evaluates_and_exports(config: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config["rollout"]["eval_kwargs"] = {"temperature": [0.5, 1.0]}
    trainer = trainkit.train(
        MODEL, reward, prompts=PROMPTS, eval_prompts=["a", "b"], config=config, tokenizer=TOKENIZER,
        metric_fn=lambda outputs, **_: {"letters": [len(o) for o in outputs], "whole": 7.0},
        stop_sequences=["h"],
    )  # fmt: skip
    found = trainer.evaluate()
    assert {"eval/reward@temperature=0.5", "eval/letters@temperature=1.0", "eval/whole@temperature=0.5"} <= set(found)
    assert found["eval/whole@temperature=1.0"] == 7.0
    rollouts = trainer.generate(["ab", "c"], max_new_tokens=2)
    assert [len(r) <= 2 for r in rollouts.responses] == [True, True]
    assert "h" not in "".join(trainer.generate(["ab"] * 50).outputs)
    assert AutoModelForCausalLM.from_pretrained(trainer.save_pretrained(tmp_path / "out")).config.n_embd == 32
    with pytest.raises(ConfigError, match="max_new_tokens"):
        trainer.generate(["a"], max_new_token=3)


def test_a_metric_may_not_take_the_name_of_another_number(config: Any) -> None:
    trainer = trainkit.train(MODEL, reward, prompts=PROMPTS, config=config, tokenizer=TOKENIZER)
    trainer.metric_fn = lambda outputs, **_: {"reward": [0.0] * len(outputs)}
    with pytest.raises(RewardError, match="'reward'"):
        trainer.evaluate()


def test_an_export_that_fails_leaves_the_older_one(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainkit.train(MODEL, samples=["abc"], config=config, tokenizer=TOKENIZER)
    path = trainer.save_pretrained(tmp_path / "out")
    before = sorted(p.name for p in path.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.tokenizer, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.save_pretrained(path)
    assert sorted(p.name for p in path.iterdir()) == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_exporting_into_a_directory_keeps_what_else_is_there(config: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = trainkit.train(MODEL, samples=["abc"], config=config, tokenizer=TOKENIZER)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for _ in range(2):
        path = trainer.save_pretrained(tmp_path / "mine")
    assert (path / "thesis.txt").read_text() == "years of work"
    assert AutoModelForCausalLM.from_pretrained(path).config.n_embd == 32


def test_what_does_not_fit_the_model_is_said_when_generating_and_stepping(config: Any) -> None:
    trainer = make_trainer(config)
    with pytest.raises(DataError, match="do not fit into 64"):
        trainer.generate(["a"], max_new_tokens=64)
    with pytest.raises(DataError, match="vocabulary of 10"):
        trainer.step(["a"], [torch.tensor([10])], [1.0])
    with pytest.raises(DataError, match="at most 64 fit"):
        trainer.step(["a"], [torch.zeros(64, dtype=torch.long)], [1.0])


def test_config_may_be_a_yaml_file_and_a_section_an_object(config: Any, tmp_path: Path) -> None:
    trainkit.TRLConfig.from_dict({**config, "method": "sft"}).save_yaml(tmp_path / "sft.yaml")
    trainer = trainkit.train(MODEL, samples=["abc"], config=str(tmp_path / "sft.yaml"), tokenizer=TOKENIZER)
    assert trainer.progress.step == 2
    method = trainkit.default_config("ppo").update({"method.gamma": 0.9}).method
    config["train"]["run_dir"] = str(tmp_path / "other")
    arguments = {"prompts": PROMPTS, "tokenizer": TOKENIZER}
    trainer = trainkit.train(MODEL, reward, config={**config, "method": method}, **arguments)
    assert trainer.method.gamma == 0.9
    config["train"]["run_dir"] = str(tmp_path / "third")
    trainer = trainkit.train(MODEL, reward, config={**config, "method": {"gamma": 0.8}}, method="ppo", **arguments)
    assert trainer.method.gamma == 0.8


# ------------------------------------------------------------------------------------------------- bad input

BAD: dict[str, tuple[dict[str, Any], type[TrainkitError], str]] = {
    "unknown method": ({"method": "pppo"}, RegistryError, "did you mean 'ppo'"),
    "unknown plugin": ({"config": {"plugins": ["nothing"]}}, ConfigError, "no plugin 'nothing'"),
    "config typo": ({"config": {"train": {"batchsize": 3}}}, ConfigError, "train.batchsize.*did you mean 'batch_size'"),
    "method typo": ({"config": {"method": {"name": "ppo", "gama": 1}}}, ConfigError, "method.gama.*'gamma'"),
    "no prompts": ({"prompts": []}, DataError, "prompts is empty"),
    "empty prompt": ({"prompts": ["a", ""]}, DataError, "prompt 1 is empty"),
    "no text": ({"prompts": ["a", None]}, DataError, "prompt 1 should be a string"),
    "one string": ({"prompts": "abc"}, DataError, r"Write \[prompt\]"),
    "reserved column": ({"prompts": [{"prompt": "a", "outputs": 1}]}, DataError, "column 'outputs'"),
    "long prompt": ({"prompts": ["a", "ab" * 40]}, DataError, "prompt 1 has 80 tokens, and at most 24"),
    "no eos": ({"tokenizer": character_tokenizer("abcdefgh", eos_token=None)}, DataError, "no EOS token"),
    "no tokenizer": ({"tokenizer": None}, ConfigError, "tokenizer.tokenizer_path"),
    "no such model": ({"model_path": "./nowhere"}, ConfigError, "./nowhere"),
    "no model": ({"model_path": None}, ConfigError, "model.model_path"),
    "bad seq_length": ({"config": {"train": {"seq_length": 100}}}, ConfigError, "at most 64 tokens"),
    "no room": ({"config": {"rollout": {"max_new_tokens": 64}}}, ConfigError, "no room for a prompt"),
    "greedy": ({"config": {"rollout": {"temperature": 0}}}, ConfigError, "rollout.temperature is 0"),
    "greedy by top_k": ({"config": {"rollout": {"top_k": 1}}}, ConfigError, "rollout.top_k is 1: .* are the same"),
    "optimizer": ({"config": {"optimizer": {"kwargs": {"beta": 1}}}}, ConfigError, "optimizer.kwargs"),
    "constant": ({"config": {"scheduler": {"kwargs": {"x": 1}}}}, ConfigError, "argument of the schedule 'constant'"),
    "scheduler": ({"config": {"scheduler": {"name": "linear", "kwargs": {"x": 1}}}}, ConfigError, "scheduler.kwargs"),
    "callback": ({"callbacks": [object()]}, PluginError, "implements no hook"),
    "small vocabulary": ({"model_path": tiny_gpt2(9)}, ConfigError, "10 tokens and the model 9"),
    "long evaluation": (
        {"config": {"rollout": {"eval_kwargs": {"max_new_tokens": 64}}}}, DataError, "at most 64 fit"
    ),
    "method of a strange type": ({"config": {"method": 5}}, ConfigError, "section of the config is a mapping"),
    "reward_fn": ({"reward_fn": 3}, ConfigError, "reward_fn should be a function"),
    "one callback": ({"callbacks": object()}, ConfigError, r"Write \[callback\]"),
    "two learning rates": ({"config": {"optimizer": {"kwargs": {"lr": 1}}}}, ConfigError, "field of its own"),
    "two tokenizers": ({"config": {"tokenizer": {"tokenizer_path": "x"}}}, ConfigError, "one of the two"),
    "unsteerable": (
        {"config": {"method": {"name": "ppo", "target": 1, "init_kl_coef": 0}}}, ConfigError, "init_kl_coef of 0"
    ),
    "tracker": ({"config": {"train": {"trackers": ["tensorbord"]}}}, ConfigError, "tensorboard"),
}  # fmt: skip


@table("case", BAD)
@pytest.mark.usefixtures("no_model_is_loaded")
def test_bad_input_is_one_clear_error_before_a_model_is_loaded(case: str, tmp_path: Path) -> None:
    changes, kind, message = BAD[case]
    arguments = {"model_path": MODEL, "reward_fn": reward, "prompts": PROMPTS, "tokenizer": TOKENIZER, **changes}
    config = {"train": {"trackers": [], "run_dir": str(tmp_path / "run")}}
    for section, values in changes.get("config", {}).items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    arguments["config"] = config
    if "model_path" not in changes or changes["model_path"]:
        config.setdefault("rollout", {})
        config["rollout"] = {"max_new_tokens": 40, **config["rollout"]}
    with pytest.raises(kind, match=message) as error:
        trainkit.train(**arguments)
    assert type(error.value) is kind
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_pad_works_because_padding_never_matters(config: Any) -> None:
    tokenizer = character_tokenizer("abcdefgh", pad_token=None)
    assert tokenizer.pad_token is None
    trainer = trainkit.train(tiny_gpt2(len(tokenizer)), reward, prompts=PROMPTS, config=config, tokenizer=tokenizer)
    assert trainer.progress.step == 2


def test_a_bad_reward_leaves_the_run_and_its_last_checkpoint_whole(config: Any, tmp_path: Path) -> None:
    config["train"] |= {"total_steps": 12, "save_interval": 4}
    calls = 0

    def fails_later(outputs: list[str], **_: Any) -> Any:
        nonlocal calls
        calls += 1
        return reward(outputs) if calls < 3 else [float("nan")] * 8

    arguments = {"model_path": MODEL, "prompts": PROMPTS, "tokenizer": TOKENIZER}
    with pytest.raises(RewardError, match=r"fails_later.*finite"):
        trainkit.train(reward_fn=fails_later, config=config, **arguments)
    straight = copy.deepcopy(config)
    straight["train"]["run_dir"] = str(tmp_path / "straight")
    config["train"]["resume"] = "auto"
    ends = [trainkit.train(reward_fn=reward, config=c, **arguments).unwrapped.state_dict() for c in (config, straight)]
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


def test_a_reward_function_that_raises_is_named_and_chained(config: Any) -> None:
    def broken(**_: Any) -> list[float]:
        raise KeyError("lost")

    with pytest.raises(RewardError, match=r"broken.*KeyError.*lost") as error:
        trainkit.train(MODEL, broken, prompts=PROMPTS, config=config, tokenizer=TOKENIZER)
    assert isinstance(error.value.__cause__, KeyError)


def test_a_learning_rate_that_explodes_stops_the_run(config: Any) -> None:
    config["optimizer"] = {"lr": 1e30, "name": "sgd"}
    config["train"] |= {"max_grad_norm": None, "total_steps": 20}
    with pytest.raises(NonFiniteError, match="not moved"):
        trainkit.train(MODEL, samples=["abc", "def"], config=config, tokenizer=TOKENIZER)


# ------------------------------------------------------------------------------------------------ the user's loop


def make_trainer(config: Any) -> Any:
    settled = trainkit.TRLConfig.from_dict({**config, "method": "ppo", "model": {"model_path": MODEL}})
    return get_trainer("ppo")(settled, tokenizer=TOKENIZER)


def test_generate_score_and_step_is_a_loop_of_ones_own(config: Any) -> None:
    trainer = make_trainer(config)
    for _ in range(2):
        rollouts = trainer.generate(PROMPTS)
        found = trainer.step(rollouts.queries, rollouts.responses, [len(o) for o in rollouts.outputs])
    assert trainer.progress.step == 8
    assert {"reward/mean", "policy/kl", "loss/policy"} <= set(found)


@table(
    "queries, responses, scores, kind, message",
    [
        (["a"], [], [1.0], DataError, "1 queries, 0 responses"),
        (["a"], ["bc"], [1.0], DataError, "sampled token ids"),
        (["a"], [torch.tensor([], dtype=torch.long)], [1.0], DataError, "at least one"),
        (["a"], [torch.tensor([0.5])], [1.0], DataError, "integer tensor"),
        ([""], [torch.tensor([1])], [1.0], DataError, "query 0 is empty"),
        (["a"], [torch.tensor([1])], [1.0, 2.0], RewardError, "2 scores for 1"),
        (["a"], [torch.tensor([1])], None, RewardError, "None"),
        (["a"], [torch.tensor([1])], [float("nan")], RewardError, "finite"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_step(
    queries: Any, responses: Any, scores: Any, kind: Any, message: str, config: Any
) -> None:
    trainer = make_trainer(config)
    with pytest.raises(kind, match=message):
        trainer.step(queries, responses, scores)
    assert trainer.progress.step == 0


def test_an_offline_algorithm_says_that_it_does_not_step(config: Any) -> None:
    settled = trainkit.TRLConfig.from_dict({**config, "method": "sft", "model": {"model_path": MODEL}})
    trainer = get_trainer("sft")(settled, tokenizer=TOKENIZER)
    with pytest.raises(NotImplementedError, match="samples"):
        trainer.step(["a"], [torch.tensor([1])], [1.0])
    with pytest.raises(DataError, match="samples"):
        trainer.learn()


def test_held_out_samples_of_an_online_algorithm_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="learns from what it samples"):
        trainkit.train(MODEL, reward, prompts=PROMPTS, eval_samples=["ab"], tokenizer=TOKENIZER, config=config)
