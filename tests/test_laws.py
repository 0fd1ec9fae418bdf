"""The laws of the house over every registered trainer, where they go beyond the kit's checks (test_conformance.py):
other models, and what the loop promises of itself."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import common_prompts
import trainkit
from trainkit import Verdict
from trainkit.data import Sequences
from trainkit.models import CausalPolicy, load_model
from trainkit.models.trunk import tiny_input
from trainkit.testing import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.checks.tools import gradient, stepped, widened, with_garbage
from trainkit.testing.trainers import language_trainers, tiny_trainer

TRAINERS = trainkit.available_trainers()
ONLINE = [name for name in TRAINERS if "prompts" in trainkit.get_trainer(name).inputs]
LANGUAGE = language_trainers()
SAMPLING = [name for name in ONLINE if name in LANGUAGE]
all_trainers = pytest.mark.parametrize("name", TRAINERS)
BOTH_SIDES = {name for name in LANGUAGE if trainkit.get_trainer(name).encoder_decoders}
"""Algorithms that train encoder-decoders too."""


@pytest.fixture(autouse=True, params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["", "separate"])
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every law holds with prompts shared wherever they can be, and with separate rows."""
    common_prompts.share(monkeypatch, request.param)


def own(*_: Any, **__: Any) -> None:
    """The model that a trainer of other than language models is tested on."""


def on_models(names: list[str], *models: Any) -> Any:
    """Every algorithm on the causal models, and on encoder-decoders those that train them; others on their own."""
    text = product([name for name in names if name in LANGUAGE], models)
    pairs = [pair for pair in text if pair[0] in BOTH_SIDES or pair[1] not in (tiny_t5, tiny_bart)]
    pairs += [(name, own) for name in names if name not in LANGUAGE]
    return pytest.mark.parametrize(("name", "model"), pairs)


def differs(item: Any) -> bool:
    """Return whether a case is another one than with shared prompts: rows are separate, and could share prompts."""
    given = item.callspec.params
    shareable = common_prompts.exist(given.get("name", "sft")) and given.get("model") not in (own, tiny_t5, tiny_bart)
    return given["shares"] or shareable


pytestmark = pytest.mark.only.with_args(differs)  # a call with a function would decorate it

DROPOUT: dict[Any, dict[str, float]] = {
    own: {},
    tiny_gpt2: {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    tiny_llama: {"attention_dropout": 0.1},
    tiny_t5: {"dropout_rate": 0.1},
    tiny_bart: {"dropout": 0.1, "attention_dropout": 0.1},
}


def weights(trainer: Any) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in trainer.unwrapped.state_dict().items()}


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def collected(name: str, run_dir: Path, **changes: Any) -> Any:
    """A trainer after one collection and, online, one pass over it, so that old and new policy differ."""
    trainer = tiny_trainer(name, run_dir, **changes)
    trainer.collect()
    return trainer


# --------------------------------------------------------------------------------------------- law 1: masks


@on_models(LANGUAGE, tiny_llama, tiny_t5, tiny_bart)
def test_values_under_the_mask_change_neither_loss_nor_gradient(name: str, model: Any, tmp_path: Path) -> None:
    trainer = collected(name, tmp_path, model=model(10))
    batch = trainer.store.experience
    assert not batch.lengths.eq(batch.lengths[0]).all(), "the law is only tested on ragged rows"
    clean, dirty = gradient(trainer, batch), gradient(trainer, with_garbage(batch))
    torch.testing.assert_close(clean, dirty, rtol=0, atol=1e-7)


@on_models(LANGUAGE, tiny_t5)
def test_the_amount_of_padding_changes_nothing(name: str, model: Any, tmp_path: Path) -> None:
    trainer = collected(name, tmp_path, model=model(10))
    batch = trainer.store.experience
    torch.testing.assert_close(gradient(trainer, batch), gradient(trainer, widened(batch, 5)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", [tiny_gpt2, tiny_llama])
def test_logprobs_depend_neither_on_padding_side_nor_on_batch_mates(model: Any) -> None:
    config = trainkit.default_config("sft").update({"model.model_path": model(12)})
    policy = CausalPolicy(load_model(config.model), value_head=True)
    row = Sequences.from_lists([[1, 2]], [[3, 4, 5]])
    right = Sequences.cat([row, Sequences.from_lists([[6] * 4], [[7] * 5])])
    left = Sequences(
        torch.tensor([[9, 9, 9, 1, 2, 3, 4, 5]]),
        torch.tensor([[False] * 3 + [True] * 5]),
        torch.tensor([[False] * 5 + [True] * 3]),
    )
    alone = policy(row)
    for other, at in ((policy(right), slice(2, 5)), (policy(left), slice(5, 8))):
        torch.testing.assert_close(other.logprobs[0, at], alone.logprobs[0, 2:5], rtol=0, atol=1e-5)
        torch.testing.assert_close(other.values[0, at], alone.values[0, 2:5], rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------ law 3: exact normalisation


@on_models(LANGUAGE, tiny_t5)
@pytest.mark.parametrize("size", [1, 3])
def test_gradient_is_the_same_for_every_microbatch_size(name: str, model: Any, size: int, tmp_path: Path) -> None:
    """S-11, S-62: rows of different length, sizes that do not divide the batch."""
    trainer = collected(name, tmp_path, model=model(10), train__microbatch_size=size, train__max_grad_norm=None)
    batch = trainer.store.experience
    whole = gradient(trainer, batch)
    torch.testing.assert_close(stepped(trainer, batch)[0], whole, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------- law 5 and 6: on policy


@on_models(SAMPLING, tiny_llama, tiny_bart)
def test_before_the_first_update_kl_is_exactly_zero_and_the_ratio_one(name: str, model: Any, tmp_path: Path) -> None:
    """Also with dropout configured, and at a temperature other than 1 (S-08, S-17)."""
    trainer = collected(name, tmp_path, model=model(10, **DROPOUT[model]), rollout__temperature=0.7)
    found = trainer._pending
    _, at_loss = trainer.loss(trainer.store.experience)
    if "policy/kl" in found:
        assert found["policy/kl"].compute() == 0.0
    if "policy/ratio" in at_loss:
        assert at_loss["policy/ratio"].compute() == pytest.approx(1.0, abs=1e-6)


@on_models(SAMPLING, tiny_gpt2, tiny_t5)
def test_under_autocast_too_sampler_policy_and_reference_speak_of_one_distribution(
    name: str, model: Any, tmp_path: Path
) -> None:
    trainer = collected(name, tmp_path, model=model(10), train__mixed_precision="bf16")
    own = trainer.needs_reference and trainer.chosen_reference is None
    assert ("policy/kl" in trainer._pending) == own
    assert not own or trainer._pending["policy/kl"].compute() == 0.0
    rollouts = trainer._rollouts[0]
    torch.testing.assert_close(rollouts.logprobs, trainer.behaviour(rollouts).logprobs, rtol=0, atol=2e-2)


@on_models(SAMPLING, tiny_llama, tiny_t5)
def test_the_samplers_logprobs_are_the_policys(name: str, model: Any, tmp_path: Path) -> None:
    """F-02: one distribution, at the sampling temperature, whatever top-k and top-p cut."""
    trainer = tiny_trainer(
        name, tmp_path, model=model(10), rollout__temperature=0.7, rollout__top_k=4, rollout__top_p=0.9
    )
    rollouts = trainer.sample([{"prompt": p} for p in ("a", "bcd", "ef")])
    torch.testing.assert_close(rollouts.logprobs, trainer.behaviour(rollouts).logprobs, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------- law 7: resume


@pytest.mark.daily(name=("ddpo", "dpo", "ppo"))
@on_models(LANGUAGE, tiny_t5)
@pytest.mark.parametrize("at", [1, 3, 4])
def test_resumed_run_ends_bit_equal_to_one_that_never_stopped(name: str, model: Any, at: int, tmp_path: Path) -> None:
    """Mid-collection, mid-pass and at a boundary, with dropout on."""
    changes = {
        "model": model(10, **DROPOUT[model]),
        "model__disable_dropout": False,
        "train__batch_size": 6,
        "train__save_interval": 1,
    }
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    straight.learn()
    tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at).learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    assert resumed.progress.step == straight.progress.step == 6
    assert_same_weights(weights(straight), weights(resumed))
    for a, b in zip(straight.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert straight.state_dict() == resumed.state_dict()


@pytest.mark.daily(name=("dpo", "ppo"))
@all_trainers
def test_resuming_a_finished_run_makes_no_step(name: str, tmp_path: Path) -> None:
    first = tiny_trainer(name, tmp_path, train__save_interval=3)
    first.learn()
    again = tiny_trainer(name, tmp_path, train__save_interval=3, train__resume="auto")
    again.learn()
    assert again.progress.step == 6
    assert_same_weights(weights(first), weights(again))


@pytest.mark.daily(name=("ppo",))
@on_models(SAMPLING, tiny_gpt2, tiny_t5)
def test_a_loop_of_ones_own_resumes_as_if_it_had_never_stopped(name: str, model: Any, tmp_path: Path) -> None:
    def turns(trainer: Any, count: int) -> Any:
        for _ in range(count):
            rollouts = trainer.generate([p for p in ("ab", "c", "def", "g") for _ in range(trainer.samples_per_prompt)])
            trainer.step(rollouts.queries, rollouts.responses, [float(len(o)) for o in rollouts.outputs])
        return trainer

    fields = model(10)
    straight = turns(tiny_trainer(name, tmp_path / "straight", model=fields), 4)
    turns(tiny_trainer(name, tmp_path / "stopped", model=fields), 2).save()
    resumed = turns(tiny_trainer(name, tmp_path / "stopped", model=fields, train__resume="auto"), 2)
    assert resumed.progress.step == straight.progress.step
    assert_same_weights(weights(straight), weights(resumed))


# ------------------------------------------------------------------------------ steps that are skipped


def judged(trainer: Any, verdicts: dict[int, Verdict]) -> Any:
    """The trainer, judging its steps (from 1) so, and all others to be made."""
    trainer.judge = lambda metrics: verdicts.get(trainer.progress.step + 1, Verdict.STEP)
    return trainer


def remembered(trainer: Any) -> list[Tensor]:
    """All that the optimizer keeps: Adam's step counts and moments."""
    return [value.clone() for state in trainer.optimizer.state.values() for value in state.values()]


@all_trainers
def test_metrics_are_only_reduced_for_a_trainer_that_judges(name: str, tmp_path: Path) -> None:
    trainer = collected(name, tmp_path)
    found = trainer.update(trainer.store.experience)
    assert ("train/skipped" in found) == (type(trainer).judge is not trainkit.BaseRLTrainer.judge)


@pytest.mark.daily(name=("ppo",))
@all_trainers
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_resumed_around_an_early_stop_ends_as_if_it_had_not_been(name: str, at: int, tmp_path: Path) -> None:
    """Before the step that stops a collection in its first pass, right after it, and in the next collection."""
    verdicts = {2: Verdict.STOP, 4: Verdict.SKIP}
    changes = {"train__batch_size": 6, "train__save_interval": 1}
    straight = judged(tiny_trainer(name, tmp_path / "straight", **changes), verdicts)
    straight.learn()
    judged(tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at), verdicts).learn()
    resumed = judged(tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto"), verdicts)
    resumed.learn()
    here, there = asdict(straight.progress), asdict(resumed.progress)
    assert {k: v for k, v in here.items() if k != "seconds"} == {k: v for k, v in there.items() if k != "seconds"}
    assert_same_weights(weights(straight), weights(resumed))
    assert all(torch.equal(a, b) for a, b in zip(remembered(straight), remembered(resumed), strict=True))
    assert straight.progress.step == (6 if name in ONLINE else 2), "offline, a collection is all there is"


@pytest.mark.daily(name=("ppo", "rft", "rloo"))
@pytest.mark.parametrize("name", ONLINE)
def test_epochs_end_a_run_also_if_its_collections_are_stopped_early(name: str, tmp_path: Path) -> None:
    """A collection makes two steps in a pass: those that were skipped are not made on further prompts."""
    seen: list[str] = []

    class Seen:
        @trainkit.hookimpl
        def on_evaluate(self, step: int) -> None:
            seen.append(f"evaluate {step}")

        @trainkit.hookimpl
        def on_save(self, step: int) -> None:
            seen.append(f"save {step}")

    changes = {
        "train__epochs": 4, "train__total_steps": None, "train__eval_interval": 100, "train__save_interval": 100,
        "train__batch_size": tiny_trainer(name, tmp_path / "unused").experience_rows // 2,
    }  # fmt: skip
    trainer = tiny_trainer(name, tmp_path, callbacks=[Seen()], **changes)
    collections = 4 * 8 // trainer.collection_rows
    planned = collections * trainer.passes * 2
    assert trainer.total_steps == planned
    judged(trainer, {1: Verdict.STOP})
    trainer.learn()
    made, left_out = trainer.progress.step, trainer.passes * 2 - 1
    assert trainer.progress.collection + 1 == collections
    # an algorithm may select among the rollouts, and make fewer steps
    if "make_experience" in vars(type(trainer)) or trainer.rows_vary:
        assert 0 < made <= planned - left_out
    else:
        assert (made, trainer.progress.samples) == (planned - left_out, collections * trainer.experience_rows)
    assert seen == ["evaluate 0", f"evaluate {made}", f"save {made}"]
    del trainer
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = tiny_trainer(name, tmp_path, **changes, train__resume="auto")
    again.learn()
    assert again.progress.step == made < planned, "it is finished, with fewer steps than planned"
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before if path.name != "run.lock"} == {
        path: at for path, at in before.items() if path.name != "run.lock"
    }


@pytest.mark.parametrize("name", SAMPLING)
def test_a_loop_of_ones_own_leaves_the_rest_of_a_stopped_collection_out(name: str, tmp_path: Path) -> None:
    trainer = judged(tiny_trainer(name, tmp_path, train__batch_size=4), {1: Verdict.STOP})
    for steps in (1, 1 + trainer.passes * 2):
        responses = max(8 * 16 // trainer.experience_rows, 8)  # of which 8 rows are made, two steps in a pass
        rollouts = trainer.generate(["ab"] * responses)
        trainer.step(rollouts.queries, rollouts.responses, [float(len(o)) for o in rollouts.outputs])
        assert trainer.progress.step == steps


# --------------------------------------------------------------------------------------- how long a run is


@pytest.mark.daily(name=("ilql", "sft"))
@pytest.mark.parametrize("name", [n for n in TRAINERS if n not in ONLINE])
@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, 2),  # 16 samples in batches of 8, once
        ({"train__epochs": 3}, 6),
        ({"train__total_steps": 5}, 5),  # as many epochs as that takes
        ({"train__epochs": 1, "train__total_steps": 5}, 2),  # the earlier of the two
        ({"train__epochs": 4, "train__total_steps": 5}, 5),
        ({"train__total_steps": 0}, 0),
    ],
)
def test_epochs_and_total_steps_end_an_offline_run(
    name: str, limits: dict[str, int], steps: int, tmp_path: Path
) -> None:
    trainer = tiny_trainer(name, tmp_path, **{"train__total_steps": None, "train__epochs": None, **limits})
    assert trainer.total_steps == steps
    trainer.learn()
    assert trainer.progress.step == steps


# ------------------------------------------------------------------------------------------------- exports


@pytest.mark.daily(name=("ilql", "ppo", "sft"))
@on_models(LANGUAGE, tiny_t5)
def test_export_loads_in_transformers_with_equal_logits(name: str, model: Any, tmp_path: Path) -> None:
    """S-19: base-model keys only; heads beside them."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    trainer = tiny_trainer(name, tmp_path / "run", model=model(10))
    trainer.learn()
    path = trainer.save_pretrained(tmp_path / "export")
    kind = AutoModelForSeq2SeqLM if model in (tiny_t5, tiny_bart) else AutoModelForCausalLM
    loaded, info = kind.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    inputs = tiny_input(loaded)
    assert torch.equal(loaded(**inputs).logits, trainer.unwrapped.model(**inputs).logits)


@pytest.mark.daily(name=("ilql", "ppo"))
@on_models(LANGUAGE, tiny_t5)
def test_training_on_from_an_export_takes_the_heads_along(name: str, model: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path / "run", model=model(10))
    trainer.learn()
    path = trainer.save_pretrained()
    again = tiny_trainer(name, tmp_path / "again", model=model(10), model__model_path=str(path))
    assert_same_weights(weights(trainer), weights(again))


OFFLINE = [name for name in TRAINERS if "samples" in trainkit.get_trainer(name).inputs]


@pytest.mark.parametrize("name", OFFLINE)
def test_held_out_samples_are_measured_by_the_loss_however_they_are_split(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path / "a")
    plain = tiny_trainer(name, tmp_path / "b", train__microbatch_size=3, rollout__batch_size=5)
    for each in (trainer, plain):
        assert each.pipeline is not None
        each.eval_samples = list(each.pipeline.rows)
        each.eval_rows = []
    found = trainer.evaluate()
    assert found["eval/loss/total"] == pytest.approx(plain.evaluate()["eval/loss/total"], rel=1e-5)
