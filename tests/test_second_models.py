"""Second models: divergences from a frozen one, a chosen reference, and distillation by an algorithm of a stranger."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import pytest
import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import trainkit
import trainkit.models.policy as module
from tables import table
from test_policy import GEMMA2, PeakMemory
from test_processes import succeed
from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch
from trainkit.data import Sequences, batches
from trainkit.errors import CheckpointError, ConfigError, PluginError
from trainkit.functional import jensen_shannon, kl_exact, kl_forward, masked_mean
from trainkit.metrics import Mean, Metrics
from trainkit.models import AutoModelForCausalLMWithValueHead, Frozen, Policy, make_policy
from trainkit.plugins import registry
from trainkit.runs.checkpoint import read_state
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import LETTERS, PAIRS, tiny_trainer
from trainkit_kit import check_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V = len(LETTERS) + 2
SHARP = {"initializer_range": 0.2}
TEACHER = tiny_gpt2(V, n_embd=16, **SHARP)
"""A model of another width, whose distributions differ clearly from the policy's."""


def make(fields: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    kind = AutoModelForSeq2SeqLM if fields["model_type"] == "t5" else AutoModelForCausalLM
    return kind.from_config(AutoConfig.for_model(**fields)).eval()


def saved(path: Path, fields: dict[str, Any], seed: int = 0) -> str:
    make(fields, seed).save_pretrained(path)
    return str(path)


def batch(vocab: int = V) -> Sequences:
    ids = torch.randint(0, vocab, (3, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return Sequences.from_lists([ids[0][:2], ids[1][:4], ids[2][:1]], [ids[0][2:], ids[1][4:7], ids[2][1:6]])


def frozen(model: PreTrainedModel, **settings: Any) -> Frozen:
    return Frozen(lambda: make_policy(model, **settings)).load()


# ---------------------------------------------------------------------------------------------------- divergences


def squares(logits: Tensor, other_logits: Tensor, tokens: Tensor) -> Tensor:
    """A function of one's own: the squared difference of the log-probabilities of the chosen token."""
    ours, theirs = (z.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for z in (logits, other_logits))
    return (ours - theirs) ** 2


FORMULAS: dict[Any, Callable[..., Tensor]] = {
    None: lambda p, q, _: kl_exact(p, q),
    "reverse": lambda p, q, _: kl_exact(p, q),
    "forward": lambda p, q, _: kl_forward(p, q),
    "jensen_shannon": lambda p, q, _: jensen_shannon(p, q),
    squares: squares,
}
NO_REPEATS = (torch.arange(V) < len(LETTERS)).unsqueeze(0) & ~torch.eye(V, dtype=torch.bool)
PAIRS_OF_MODELS = {
    "gpt2": (tiny_gpt2(V, **SHARP), tiny_llama(V, **SHARP)),
    "full logits": ({**GEMMA2, "vocab_size": V}, TEACHER),
    "t5": (tiny_t5(V), tiny_t5(V, d_model=16)),
}


def full_logits(policy: Policy, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """The logits [N, V] in which response tokens are chosen, from the model itself, in float64; and those tokens."""
    tokens = sequences.input_ids[sequences.response_mask]
    states, _, previous = policy._states(sequences)
    logits = policy.model.get_output_embeddings()(states) if policy.head_alone else states
    if policy.logit_mask is not None:
        logits = logits.masked_fill(~policy.logit_mask[previous], -torch.inf)
    return logits.double() / policy.temperature, tokens


def allowed(sequences: Sequences) -> Sequences:
    """The sequences with tokens that `NO_REPEATS` allows: 0, 1, 2 and so on, in turn."""
    return replace(sequences, input_ids=(sequences.attention_mask.cumsum(1) - 1) % len(LETTERS))


@table(
    "kind, divergence, chunk, mask",
    [
        (kind, divergence, (V, 4 * V, 2**22)[(i + j) % 3], (None, NO_REPEATS)[(i + j // 2) % 2])
        for i, kind in enumerate(PAIRS_OF_MODELS)
        for j, divergence in enumerate(FORMULAS)
    ],
)
def test_divergences_and_their_gradients_are_those_of_all_logits_at_once(
    kind: str, divergence: Any, chunk: int, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of one token, of four, and at once; compared with float64.

    Gradients are sums, so the rounding of their elements is proportional to the terms and not to the element, whose
    terms may cancel: it is compared with the largest element of the parameter. Each of m additions after one another
    rounds by at most 2⁻²⁴. Of the models here, m is below 2¹¹: twice, forward and backward, the inner dimensions of the
    products (249 in a layer of GPT-2: 32, 16, 9, 32, 32, 128; 918 in the 4 of T5), then V and the 15 tokens. Found were
    22 · 2⁻²⁴.
    """
    monkeypatch.setattr(module, "CHUNK", chunk)
    own, other = PAIRS_OF_MODELS[kind]
    settings: dict[str, Any] = {"temperature": 0.7, "logit_mask": mask}
    policy, teacher, sequences = make_policy(make(own), **settings), frozen(make(other, 1), **settings), batch()
    sequences = sequences if mask is None else allowed(sequences)
    told = policy(sequences, reference=teacher, divergence=divergence)
    told.divergence.sum().backward()
    found = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    logits, tokens = full_logits(policy, sequences)
    expected = FORMULAS[divergence](logits, full_logits(teacher.policy, sequences)[0], tokens)
    expected.sum().backward()
    torch.testing.assert_close(told.divergence[sequences.response_mask].double(), expected, rtol=1e-4, atol=1e-6)
    assert not told.divergence[~sequences.response_mask].any()
    assert (expected > 1e-4).any()
    for gradient, parameter in zip(found, policy.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=2**-13 * float(parameter.grad.abs().max()))
    assert all(p.grad is None for p in teacher.policy.parameters())


@table("divergence", ["reverse", squares])
def test_rows_that_are_read_by_length_have_the_divergences_that_they_have_together(
    divergence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, teacher = make_policy(make(tiny_gpt2(V, **SHARP))), frozen(make(TEACHER))
    together = policy(batch(), reference=teacher, divergence=divergence).divergence
    monkeypatch.setitem(batches.PASS_COST, "cpu", batches.PassCost(0))
    assert len(batch().buckets(0)) == 3
    apart = policy(batch(), reference=teacher, divergence=divergence).divergence
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-6)


def peak(vocab: int, divergence: str, full: bool) -> int:
    """Bytes at the peak of a forward and backward pass over 256 response tokens."""
    policy, teacher = make_policy(make(tiny_gpt2(vocab))), frozen(make(tiny_gpt2(vocab), 1))
    policy.head_alone = teacher.policy.head_alone = not full
    ids = torch.randint(0, vocab, (8, 33), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = Sequences.from_lists([row[:1] for row in ids], [row[1:] for row in ids])
    with PeakMemory() as memory:
        policy(sequences, reference=teacher, divergence=divergence).divergence.sum().backward()
    return memory.peak


@pytest.mark.daily(divergence=("jensen_shannon",))
@pytest.mark.parametrize("divergence", ["reverse", "forward", "jensen_shannon"])
def test_peak_memory_of_a_divergence_does_not_grow_with_the_vocabulary(
    divergence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both vocabularies fill more than a chunk: beyond the weights' own gradient, the larger needs no more."""
    monkeypatch.setattr(module, "CHUNK", 2**17)
    small, large = 1_024, 8_192
    gradient, logits = (rows * 4 * (large - small) for rows in (32, 256))
    grown = peak(large, divergence, full=False) - peak(small, divergence, full=False)
    assert grown < 4 * gradient, f"{grown / gradient:.1f} times the gradient of the head"
    seen = peak(large, divergence, full=True) - peak(small, divergence, full=True)
    assert seen > 2 * logits, "the measure sees [B, T, V] where it is made"


def test_divergences_that_cannot_be_computed_are_refused() -> None:
    policy, teacher = make_policy(make(tiny_gpt2(V))), frozen(make(TEACHER))
    with pytest.raises(PluginError, match="'forward' is given without a reference to compare with"):
        policy(batch(), divergence="forward")
    with pytest.raises(PluginError, match=r"'revers' \(str\); give reverse, forward, jensen_shannon, or a function"):
        policy(batch(), reference=teacher, divergence="revers")
    with pytest.raises(PluginError, match=r"returned a tensor \(15, 10\) for 15 tokens; return \(15,\)"):
        policy(batch(), reference=teacher, divergence=lambda logits, *_: logits)
    with pytest.raises(PluginError, match=r"returned 0\.5 \(float\) for 15 tokens"):
        policy(batch(), reference=teacher, divergence=lambda *_: 0.5)


@table("kind", ["gpt2", "t5"])
def test_another_model_does_not_start_from_the_policys_frozen_layers(kind: str) -> None:
    """The trunk's output belongs to the policy's model; another model of the same shape would take it for its own."""
    fields = {"gpt2": tiny_gpt2(V, **SHARP), "t5": tiny_t5(V)}[kind]
    model = make(fields)
    lower = model.transformer.h[0] if kind == "gpt2" else model.get_encoder()
    for each in (model.get_input_embeddings(), lower, *([model.transformer.wpe] if kind == "gpt2" else [])):
        each.requires_grad_(False)
    policy, other = make_policy(model), make(fields, 1).requires_grad_(False)
    teacher, sequences = frozen(other), batch()
    known = policy.through_trunk(sequences)
    assert known.trunk is not None
    expected = make_policy(other)(sequences).logprobs
    assert torch.equal(teacher(known).logprobs, expected)
    told = policy(known, reference=teacher).divergence
    torch.testing.assert_close(told, policy(sequences, reference=teacher).divergence)


# ------------------------------------------------------------------------------------------------- a chosen reference


def told_by(model: PreTrainedModel, sequences: Sequences, temperature: float = 1.0) -> Tensor:
    with torch.no_grad():
        return make_policy(model, temperature=temperature)(replace(sequences, trunk=None)).logprobs


@pytest.mark.daily(unfrozen=(1,))
@pytest.mark.parametrize("unfrozen", [-1, 1])
def test_ppo_compares_with_the_chosen_reference(unfrozen: int, tmp_path: Path) -> None:
    """With frozen layers too, whose output is kept with the sequences; at the sampling temperature."""
    path = saved(tmp_path / "other", TEACHER)
    changes = {"model__reference_path": path, "model__num_layers_unfrozen": unfrozen, "rollout__temperature": 0.7}
    trainer = tiny_trainer("ppo", tmp_path / "run", **changes)
    rollouts = trainer.sample([{"prompt": prompt} for prompt in ("a", "bcd", "ef")])
    rollouts = replace(rollouts, sequences=trainer.unwrapped.through_trunk(rollouts.sequences))
    made = trainer.experience(rollouts, trainer.score(rollouts))
    assert (made.sequences.trunk is not None) == (unfrozen == 1)
    torch.testing.assert_close(made.ref_logprobs, told_by(make(TEACHER), made.sequences, 0.7))
    trainer.learn()
    assert torch.equal(trainer.reference(made.sequences).logprobs, made.ref_logprobs)
    (first, *_) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["policy/kl_per_token"] > 0.1


@table("source", ["path", "live"])
def test_dpo_compares_with_the_chosen_reference(source: str, tmp_path: Path) -> None:
    live = make(TEACHER)
    live.save_pretrained(tmp_path / "other")
    trainer = tiny_trainer(
        "dpo",
        tmp_path / "run",
        arguments={"reference": live} if source == "live" else {},
        model__reference_path=str(tmp_path / "other") if source == "path" else None,
        train__total_steps=1,
    )
    trainer.collect()
    batch, model = trainer.store.experience, trainer.reference.policy.model
    assert (model is live) == (source == "live")
    expected = told_by(make(TEACHER), batch.chosen).sum(1)
    torch.testing.assert_close(batch.ref_chosen, expected)
    trainer.learn()
    assert not any(p.requires_grad for p in model.parameters())


def test_train_takes_a_reference_as_a_path_as_fields_and_as_a_model(tmp_path: Path) -> None:
    live = make(TEACHER)
    arguments: dict[str, Any] = {"samples": PAIRS, "tokenizer": character_tokenizer(LETTERS)}
    settings: dict[str, Any] = {"train": {"total_steps": 1, "trackers": [], "save_interval": 0}}
    for index, reference in enumerate((saved(tmp_path / "other", TEACHER), TEACHER, live.config, live)):
        settings["train"]["run_dir"] = str(tmp_path / str(index))
        trainer = trainkit.train(tiny_gpt2(V), reference=reference, config=settings, **arguments)
        assert trainer.reference.policy.model.config.n_embd == 16
        assert (trainer.config.model.reference_path is None) == (reference is live)
    assert trainer.reference.policy.model is live
    settings["model"] = {"reference_path": "other"}
    with pytest.raises(ConfigError, match=r"a live reference is given, and model\.reference_path is 'other'"):
        trainkit.train(tiny_gpt2(V), reference=live, config=settings, **arguments)
    with pytest.raises(ConfigError, match="reference should be a hub id, a directory"):
        trainkit.train(tiny_gpt2(V), reference=3, config=settings, **arguments)  # type: ignore[arg-type]


REFERENCE_FREE = {"method__reference_free": True}


@table(
    "name, changes",
    [("sft", {}), ("ilql", {}), ("rft", {}), ("reward", {}), ("orpo", {}), ("cpo", {}), ("dpo", REFERENCE_FREE)],
)
def test_a_reference_for_an_algorithm_without_one_is_refused(name: str, changes: Any, tmp_path: Path) -> None:
    match = f"model.reference_path is given, and '{name}' with these settings compares with no reference; remove it"
    with pytest.raises(ConfigError, match=re.escape(match)):
        tiny_trainer(name, tmp_path, model__reference_path=TEACHER, **changes)
    with pytest.raises(ConfigError, match=f"^reference is given, and '{name}' with these settings"):
        tiny_trainer(name, tmp_path, arguments={"reference": make(TEACHER)}, **changes)


def test_a_reference_for_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    """Of images no reference is compared with; a trainer that makes its own reference can make no other."""
    with pytest.raises(ConfigError, match=r"model\.reference_path"):
        tiny_trainer("ddpo", tmp_path, model__reference_path=TEACHER)
    with pytest.raises(ConfigError, match="'ddpo' with these settings compares with no reference"):
        tiny_trainer("ddpo", tmp_path, arguments={"reference": make(TEACHER)})

    class WithReference(trainkit.get_trainer("ddpo")):  # type: ignore[misc]
        needs_reference = True

    with pytest.raises(ConfigError, match="'ddpo' can only compare with the start of its model; remove it"):
        WithReference(tiny_trainer("ddpo", tmp_path).config, reference=make(TEACHER))


def test_second_models_that_do_not_fit_are_refused_at_construction(tmp_path: Path) -> None:
    def fault(source: Any, **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            tiny_trainer("ppo", tmp_path, model__reference_path=source, **changes)
        return str(caught.value)

    assert "model.reference_path has a vocabulary of 12 tokens and the trained model one of 10" in fault(tiny_gpt2(12))
    assert "is an encoder-decoder and the trained model reads prompt and response as one" in fault(tiny_t5(V))
    short = fault(tiny_gpt2(V, n_positions=16))
    assert "attends to at most 16 tokens, and the run's sequences may have" in short
    assert "set train.seq_length to 16 or less" in short
    tiny_trainer("ppo", tmp_path, model__reference_path=tiny_gpt2(V, n_positions=16), train__seq_length=16)
    assert f"model.reference_path is '{tmp_path / 'none'}', and there is no" in fault(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"reference should be a hub id, a directory.* given 3 \(int\)"):
        tiny_trainer("ppo", tmp_path, arguments={"reference": 3})
    with pytest.raises(ConfigError, match=r"a reference is given, and model\.reference_path is"):
        tiny_trainer("ppo", tmp_path, arguments={"reference": make(TEACHER)}, model__reference_path=TEACHER)


def test_a_second_model_with_another_tokenizer_is_refused_at_construction(tmp_path: Path) -> None:
    """The vocabularies have the same size. Only padding may differ; a model without a tokenizer is not checked."""

    def beside(name: str, letters: str, **special: str) -> str:
        character_tokenizer(letters, **special).save_pretrained(tmp_path / name)
        return saved(tmp_path / name, TEACHER)

    fault = (
        r"the tokenizer of '.*other' \(model\.reference_path\) differs from the run's in 2 tokens: 'a' has "
        "the id 1 there and the id 0 here.* Give a model with the same tokenizer"
    )
    other = beside("other", "bacdefgh")
    with pytest.raises(ConfigError, match=fault):
        tiny_trainer("ppo", tmp_path / "run", model__reference_path=other)
    with pytest.raises(ConfigError, match=r"\(frozen\(\)\) differs from the run's in 2 tokens"):
        tiny_trainer("ppo", tmp_path / "run").frozen(other)
    with pytest.raises(ConfigError, match="in 2 tokens: 'h' has no token there and the id 7 here"):
        tiny_trainer("ppo", tmp_path / "run", model__reference_path=beside("few", "abcdefgi"))
    for name, letters, special in (("same", LETTERS, {}), ("padding", LETTERS, {"pad_token": "<other>"})):
        tiny_trainer("ppo", tmp_path / "run", model__reference_path=beside(name, letters, **special))
    (tmp_path / "same" / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the tokenizer '.*same' \(model\.reference_path\) cannot be loaded"):
        tiny_trainer("ppo", tmp_path / "run", model__reference_path=str(tmp_path / "same"))


def test_a_reference_that_shares_trained_weights_is_refused(tmp_path: Path) -> None:
    live = make(tiny_gpt2(V))
    trainer = tiny_trainer("ppo", tmp_path, arguments={"reference": live})
    trainer.live_model = live
    with pytest.raises(ConfigError, match="reference shares weights with the trained model, and would change with it"):
        trainer.collect()
    assert all(p.requires_grad for p in live.parameters())


def test_an_adapter_as_a_reference_is_merged_and_the_policys_adapter_is_not_added_to_it(tmp_path: Path) -> None:
    lora = {"r": 2, "target_modules": "all-linear"}
    base = saved(tmp_path / "base", tiny_gpt2(V, **SHARP))
    tuned = tiny_trainer("sft", tmp_path / "sft", model__model_path=base, model__peft_config=lora, optimizer__lr=0.1)
    tuned.learn()
    trainer = tiny_trainer(
        "ppo",
        tmp_path / "ppo",
        model__model_path=base,
        model__peft_config=lora,
        model__reference_path=str(tuned.save_pretrained(tmp_path / "adapter")),
    )
    sequences = batch()
    expected = told_by(tuned.unwrapped.model, sequences)
    trainer.models.build()
    torch.testing.assert_close(trainer.reference(sequences).logprobs, expected, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in trainer.reference.policy.state_dict())
    assert (expected - trainer.unwrapped(sequences).logprobs).abs().max() > 0.1


def test_settings_that_name_the_trained_models_repository_do_not_apply_to_the_reference(tmp_path: Path) -> None:
    """`subfolder` says where the trained model is; `attn_implementation` how both are computed."""
    saved(tmp_path / "repository" / "inner", tiny_gpt2(V))
    trainer = tiny_trainer(
        "ppo",
        tmp_path / "run",
        model__model_path=str(tmp_path / "repository"),
        model__reference_path=saved(tmp_path / "other", TEACHER),
        model__kwargs={"subfolder": "inner", "attn_implementation": "eager"},
        model__dtype="bfloat16",
    )
    trainer.models.build()
    model = trainer.reference.policy.model
    assert (model.config.n_embd, model.config._attn_implementation, model.dtype) == (16, "eager", torch.bfloat16)


def test_a_chosen_reference_is_part_of_the_runs_fingerprint(tmp_path: Path) -> None:
    """Of a path, the setting cannot tell that other weights are there now; of a live model, there is no setting."""
    path = saved(tmp_path / "other", TEACHER, seed=1)
    changes = {"train__save_interval": 1, "train__total_steps": 2}
    named = {**changes, "model__reference_path": path}
    tiny_trainer("ppo", tmp_path / "named", **named).learn()
    tiny_trainer("ppo", tmp_path / "live", **changes, arguments={"reference": make(TEACHER, 1)}).learn()
    again = {"train__resume": "auto"}
    tiny_trainer("ppo", tmp_path / "named", **named, **again).learn()
    tiny_trainer("ppo", tmp_path / "live", **changes, **again, arguments={"reference": make(TEACHER, 1)}).learn()
    saved(tmp_path / "other", TEACHER, seed=2)
    with pytest.raises(CheckpointError, match=r"a run with another frozen model: \w{16} there, \w{16} here"):
        tiny_trainer("ppo", tmp_path / "named", **named, **again).learn()
    other = {"reference": make(TEACHER, 2)}
    with pytest.raises(CheckpointError, match="a run with another frozen model"):
        tiny_trainer("ppo", tmp_path / "live", **changes, **again, arguments=other).learn()
    with pytest.raises(CheckpointError, match="a run with another initial model"):
        tiny_trainer("ppo", tmp_path / "live", **changes, **again).learn()
    drifting = tiny_trainer("ppo", tmp_path / "live", **changes, **again, arguments={**other, "allow_drift": True})
    drifting.learn()
    assert any("frozen model" in line for line in drifting.run.resumption.messages)


# ------------------------------------------------------------------------------------------------- distillation


class DistilConfig(MethodConfig):
    """Settings of on-policy distillation."""

    name: str = "distil"
    """The name."""
    teacher: str | dict[str, Any] = Field(TEACHER)
    """The teacher."""
    divergence: Literal["reverse", "jensen_shannon"] = "reverse"
    """What is minimised."""


class LateConfig(DistilConfig):
    """The same settings."""

    name: str = "late"
    """The name."""


D = TypeVar("D", bound=DistilConfig)


class Distillation(AccelerateRLTrainer[D]):
    """loss = mean divergence of the policy from a teacher, on responses of the policy. Agarwal et al. 2023."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    teacher: Any

    def experience(self, rollouts: Rollouts, scores: Tensor) -> TokenBatch:
        """Return the responses; scores are not learnt from."""
        return TokenBatch(rollouts.sequences)

    def loss(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """Return the mean divergence over response tokens. -> []."""
        sequences, mask = batch.sequences, batch.sequences.response_mask
        found = self.policy(sequences, reference=self.teacher, divergence=self.method.divergence).divergence
        return masked_mean(found, mask), {"loss/divergence": Mean.of(found, mask)}


class DistilTrainer(Distillation[DistilConfig]):
    """With a teacher that is asked for at construction."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = self.frozen(self.method.teacher)


class LateTrainer(Distillation[LateConfig]):
    """With a teacher that is first asked for when the first collection is made."""

    @cached_property
    def teacher(self) -> Frozen:
        """The teacher."""
        return self.frozen(self.method.teacher)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> TokenBatch:
        """Return the responses, and record how likely the teacher finds them."""
        mask = rollouts.sequences.response_mask
        self.record({"rollout/teacher": Mean.of(self.teacher(rollouts.sequences).logprobs, mask)})
        return super().experience(rollouts, scores)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register them for a test. Plugins that are loaded meanwhile stay registered."""
    trainkit.register_trainer("distil")(DistilTrainer)
    trainkit.register_trainer("late")(LateTrainer)
    yield
    for name in ("distil", "late"):
        registry._TRAINERS.pop(name)


BOTH = pytest.mark.parametrize("name", ["distil", "late"])


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("at", [1, 2, 3])
def test_distillation_resumes_bit_equal(name: str, at: int, tmp_path: Path) -> None:
    """Also in the middle of a collection, which has two steps."""
    changes: dict[str, Any] = {"train__save_interval": 1, "model__num_layers_unfrozen": 1}
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    straight.learn()
    tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at).learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    ours, theirs = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert straight.teacher.fingerprint == resumed.teacher.fingerprint


@pytest.mark.daily(name=("late",))
@BOTH
def test_a_run_does_not_resume_with_another_teacher(name: str, tmp_path: Path) -> None:
    """The path is the same, the weights are others. A teacher that is made late is recognised when it is made."""
    changes = {"method__teacher": saved(tmp_path / "teacher", TEACHER, 1), "train__save_interval": 2}
    tiny_trainer(name, tmp_path / "run", **changes, train__total_steps=2).learn()
    saved(tmp_path / "teacher", TEACHER, 2)
    with pytest.raises(CheckpointError, match=r"another frozen model: \w{16} there, \w{16} here"):
        tiny_trainer(name, tmp_path / "run", **changes, train__resume="auto").learn()
    allowed = tiny_trainer(
        name, tmp_path / "run", **changes, train__resume="auto", arguments={"allow_drift": True}, train__total_steps=3
    )
    allowed.learn()
    assert allowed.progress.step == 3


@pytest.mark.daily(name=("late",))
@BOTH
def test_a_checkpoint_from_before_the_teacher_was_used_can_be_resumed_from(name: str, tmp_path: Path) -> None:
    """As a run that was stopped before its first collection was complete leaves one."""
    path = tiny_trainer(name, tmp_path / "stopped").save()
    assert len(read_state(path, "loop")["frozen"]) == (name == "distil")
    resumed = tiny_trainer(name, tmp_path / "resumed", train__resume=str(path))
    resumed.learn()
    assert resumed.teacher.loaded


def test_a_teacher_is_loaded_with_the_policy_and_not_at_construction(tmp_path: Path) -> None:
    trainer = tiny_trainer("distil", tmp_path, rollout__temperature=0.7, arguments={"logit_mask": NO_REPEATS})
    assert not trainer.teacher.loaded
    trainer.models.build()  # makes the model
    assert trainer.teacher.loaded
    assert trainer.teacher.policy.temperature == 0.7
    assert torch.equal(trainer.teacher.policy.logit_mask, NO_REPEATS)
    rollouts = trainer.sample([{"prompt": "ab"}])
    assert trainer.teacher(rollouts.sequences).logprobs.isfinite().all()


def test_random_second_models_are_seeded_and_differ_from_each_other(tmp_path: Path) -> None:
    def two(seed: int) -> list[str]:
        trainer = tiny_trainer("distil", tmp_path, train__seed=seed)
        torch.rand(seed)  # the global generator has no effect
        trainer.models.build()
        return [trainer.teacher.fingerprint, trainer.frozen(TEACHER).fingerprint]

    assert two(1) == two(1)
    assert len({*two(1), *two(2)}) == 4


def test_a_policy_or_a_wrapper_can_be_frozen_and_keeps_its_adapter(tmp_path: Path) -> None:
    trainer, sequences = tiny_trainer("distil", tmp_path), batch()
    model = make(tiny_gpt2(V, **SHARP))
    adapted = AutoModelForCausalLMWithValueHead.from_pretrained(model, peft_config={"r": 2})
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter.add_(0.3 * ("lora_B" in name))
    expected = told_by(model, sequences)
    for given in (adapted, make_policy(model, temperature=3.0, value_head=True)):
        made = trainer.frozen(given).load()
        assert torch.equal(made(sequences).logprobs, expected)
        assert made(sequences).values is None
    assert not any(p.requires_grad for p in model.parameters())


def test_what_cannot_be_frozen_is_refused_at_once(tmp_path: Path) -> None:
    trainer = tiny_trainer("distil", tmp_path)
    for wrong in (None, 3, tmp_path):
        with pytest.raises(ConfigError, match=r"frozen\(\) should be a hub id, a directory, the fields of a model"):
            trainer.frozen(wrong)
    with pytest.raises(ConfigError, match=r"frozen\(\) is .*none., and there is no "):
        trainer.frozen(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"frozen\(\) has a vocabulary of 9 tokens"):
        trainer.frozen(tiny_gpt2(9))
    with pytest.raises(ConfigError, match=r"frozen\(\) shares weights with the trained model"):
        trainer.frozen(trainer.models.load_policy()).load()


@pytest.mark.slow
def test_the_kit_does_not_take_a_named_reference_for_the_models_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dpo", "rloo"):
        defaults = {"model": {"reference_path": TEACHER}}
        monkeypatch.setattr(trainkit.get_trainer(name).method_class, "section_defaults", defaults)
    checks = ["sampling_distribution", "first_update", "reference_is_frozen", "adapter", "kl_pulls_back", "reported_kl"]
    assert len(check_trainer("rloo", only=checks).results) == len(checks)
    checks = ["reference_is_frozen", "resume_every_step", "adapter"]
    assert len(check_trainer("dpo", only=checks).results) == len(checks)


TWO = """
import json
import sys
from pathlib import Path
import torch
from test_second_models import TEACHER, DistilTrainer, LateTrainer, make
import trainkit
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
trainkit.register_trainer("distil")(DistilTrainer)
trainkit.register_trainer("late")(LateTrainer)
out, said = Path(sys.argv[1]), {}
for name in ("distil", "late"):
    run = {"train__save_interval": 2, "train__microbatch_size": 2}
    tiny_trainer(name, out / name, **run, train__total_steps=3).learn()
    trainer = tiny_trainer(name, out / name, **run, train__resume="auto")
    trainer.learn()
    said[name] = [p.double().sum().item().hex() for p in trainer.unwrapped.parameters()]
    said[f"{name} teacher"] = trainer.teacher.fingerprint
rank = trainer.accelerator.process_index
trainer = tiny_trainer("ppo", out / "live", arguments={"reference": make(TEACHER, rank)})  # another on each process
trainer.learn()
said["live"] = [trainer.reference.fingerprint, *(p.double().sum().item().hex() for p in trainer.unwrapped.parameters())]
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_second_models_are_the_same_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    succeed(TWO, 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
