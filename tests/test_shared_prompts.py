"""Shared prompts: rows with the same prompt run it once, and every number is that of separate rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import trainkit
from passes import MODELS, V, make, padded_on_the_left, results, rows, with_turns
from tables import table
from trainkit.data import Preferences, Sequences, batches
from trainkit.errors import ConfigError
from trainkit.models import Reference, make_policy, prompts
from trainkit.models.policy import Policy
from trainkit.models.prompts import SharedPrompts, why_not_shared
from trainkit.models.reward import Scorer
from trainkit.testing import tiny_t5
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import sharing

if TYPE_CHECKING:
    pass

GROUPED = ("rloo", "grpo", "online_dpo", "best_of_k")
PAIRED = ("dpo", "reward")


def assert_same(policy: Policy, sequences: Sequences, tolerance: float, **wanted: Any) -> None:
    (one, gradients), (other, others) = (results(policy, sequences, shared, **wanted) for shared in (True, False))
    for name, part in one._asdict().items():
        if isinstance(part, Tensor):
            torch.testing.assert_close(part, getattr(other, name), rtol=tolerance, atol=tolerance, msg=name)
    assert {*gradients} == {*others}
    largest = max(float(gradient.abs().max()) for gradient in others.values())
    for name, gradient in gradients.items():
        off = float((gradient - others[name]).abs().max()) / largest
        assert off <= tolerance, f"{name}: {off}"


@table(
    "name, sequences",
    [
        *product(("gpt2", "llama"), (rows, with_turns, padded_on_the_left)),
        *zip([*MODELS][2:], [rows, with_turns, padded_on_the_left] * 4, strict=False),
    ],
)
def test_outputs_and_gradients_are_those_of_separate_rows(name: str, sequences: Callable[[], Sequences]) -> None:
    policy = make_policy(make(name), temperature=0.7, value_head=True)
    assert policy.why_not_shared() is None
    assert_same(policy, sequences(), 1e-5, entropy=True)


def test_they_are_equal_to_1e_12_in_float64() -> None:
    policy = make_policy(make("gpt2", torch.float64), value_head=True)
    policy.double()
    sequences = rows()
    found = []
    for shared in (True, False):
        policy.shares_prompts = shared
        states = policy._states(sequences)[0]
        weights = torch.linspace(-1, 1, states.numel(), dtype=torch.float64).view_as(states)
        found.append([states, *torch.autograd.grad((states * weights).sum(), list(policy.model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_logit_masks_adapters_and_divergences_are_the_same() -> None:
    allowed = torch.ones(V, V, dtype=torch.bool)
    allowed[:, 3] = False
    policy = make_policy(make("llama"), temperature=1.3, logit_mask=allowed)
    reference = Reference(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    reference.policy.shares_prompts = True
    assert_same(policy, rows().map(lambda x: x.clamp(min=4) if x.dtype == torch.long else x), 1e-5, reference=reference)
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False), policy.model)
    assert_same(policy, rows().map(lambda x: x.clamp(min=4) if x.dtype == torch.long else x), 1e-5)


@table("kind", ["PREFIX_TUNING", "PROMPT_TUNING"])
def test_virtual_tokens_stand_before_shared_prompts(kind: str, tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path, model__peft_config={"peft_type": kind, "num_virtual_tokens": 3})
    trainer.models.build()
    policy = trainer.unwrapped
    assert policy.can_share_prompts
    assert_same(policy, rows().map(lambda x: x % 8 if x.dtype == torch.long else x), 1e-5, entropy=True)


def test_micro_batches_that_cut_a_group_sum_to_the_same_gradient() -> None:
    policy, sequences = make_policy(make("llama")), rows()
    whole = results(policy, sequences, shared=True)[1]
    policy.zero_grad()
    weights = torch.linspace(-1, 1, sequences.input_ids.numel()).view_as(sequences.input_ids)
    for index in ([0, 3], [1], [2, 4, 5]):
        part = torch.tensor(index)
        (policy(sequences.take(part)).logprobs.double() * weights[part]).sum().backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-5)


def test_the_first_divergence_is_zero() -> None:
    policy = make_policy(make("gpt2"))
    reference = Reference(policy)
    policy.shares_prompts = reference.policy.shares_prompts = True
    found, same = policy(rows(), reference=reference), reference(rows())
    assert torch.equal(found.logprobs, same.logprobs)
    assert found.divergence.abs().max() < 1e-6


def test_every_prompt_runs_once_and_its_response_without_the_last_token() -> None:
    policy, seen = make_policy(make("gpt2")), list[tuple[int, ...]]()
    policy.model.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))
    policy.shares_prompts = True
    policy(rows())
    assert seen == [(3, 9), (6, 6)], "three prompts of at most 9 tokens; six responses of at most 7, one state given"
    seen.clear()
    policy.shares_prompts = False
    policy(rows())
    assert seen == [(6, 16)]


def test_an_encoder_reads_every_prompt_once_and_gives_the_same() -> None:
    torch.manual_seed(0)
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**tiny_t5(V))).eval()
    policy, seen = make_policy(model, value_head=True), list[int]()
    assert policy.why_not_shared() is None
    assert_same(policy, rows(), 1e-5, entropy=True)
    handle = model.get_encoder().register_forward_hook(lambda *call: seen.append(len(call[2].last_hidden_state)))
    policy.shares_prompts = True
    policy(rows())
    handle.remove()
    assert seen == [3]


@table("name, made", [("gpt2", padded_on_the_left), ("llama", rows)])
def test_scores_of_pairs_are_the_same(name: str, made: Callable[[], Sequences]) -> None:
    scorer, sequences = Scorer(make(name)), made()
    assert scorer.why_not_shared() is None
    found = []
    for shared in (True, False):
        scorer.shares_prompts = shared
        scorer.zero_grad()
        scores = scorer(sequences)
        (scores * torch.arange(1.0, 7)).sum().backward()
        found.append([scores.detach(), *[p.grad.clone() for p in scorer.parameters() if p.grad is not None]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_memory_for_the_backward_pass_falls_and_never_rises() -> None:
    policy = make_policy(make("llama"))

    def kept(sequences: Sequences, shared: bool) -> int:
        storages: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        policy.shares_prompts = shared
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            total = policy(sequences).logprobs.sum()
        bytes_kept = sum(storages.values())
        del total
        return bytes_kept

    same = [1] * 24
    group = Sequences.from_lists([same] * 4, [[2] * 8] * 4)
    assert kept(group, shared=True) < 0.6 * kept(group, shared=False)
    assert kept(group.take(torch.tensor([0])), shared=True) <= 1.1 * kept(group.take(torch.tensor([0])), shared=False)


# --------------------------------------------------------------------------------------------- where it is not exact


def test_a_cache_without_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, own = make_policy(make("llama")), prompts.selected

    def detached(cache: Any, chosen: Tensor) -> Any:
        found = own(cache, chosen)
        for layer in found.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return found

    monkeypatch.setattr(prompts, "selected", detached)
    with torch.no_grad():
        policy.shares_prompts = True
        shared = policy(rows()).logprobs
        policy.shares_prompts = False
        torch.testing.assert_close(shared, policy(rows()).logprobs)  # every forward check passes
    assert policy.why_not_shared() == "LlamaForCausalLM gives other numbers when it continues from a prompt"


def test_recurrent_models_are_named() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4)
    policy = make_policy(AutoModelForCausalLM.from_config(config).train())
    fault = policy.why_not_shared()
    assert policy.model.training, "the checks of a policy leave its mode as it was"
    assert fault is not None
    assert fault.startswith("MambaForCausalLM cannot continue from keys and values (")


def test_what_stores_whole_rows_is_named() -> None:
    model = make("gpt2")
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert why_not_shared(model, lambda *_: pytest.fail("not run")) == (
        "with activation checkpointing, keys and values are not kept"
    )
    own = make_policy(make("gpt2"), value_head=True, critic=1)
    assert own.why_not_shared() == "the critic has layers of its own"
    frozen = make("gpt2")
    for parameter in frozen.base_model.parameters():
        parameter.requires_grad_(False)
    assert make_policy(frozen).why_not_shared() == "the output of frozen layers is stored for whole rows"


def test_packed_rows_and_rows_on_a_trunk_stay_whole() -> None:
    policy = make_policy(make("gpt2"))
    policy.shares_prompts = True
    packed = rows().packed([2, 2, 2])
    expected = policy(packed).logprobs
    policy.shares_prompts = False
    assert torch.equal(policy(packed).logprobs, expected)


# ------------------------------------------------------------------------------------------------------------- in runs


def trained(name: str, folder: Path, share: bool | None, **settings: Any) -> Any:
    trainer = tiny_trainer(name, folder, train__share_prompts=share, train__total_steps=2, **settings)
    trainer.learn()
    return trainer


@pytest.mark.daily(name=("rloo", "dpo"))
@pytest.mark.parametrize("name", [*GROUPED, *PAIRED])
def test_a_run_with_shared_prompts_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    settings = {"train__microbatch_size": 3, "optimizer__name": "sgd", "optimizer__lr": 0.1}  # Adam divides by rounding
    one, other = (trained(name, tmp_path / str(share), share, **settings) for share in (True, False))
    assert (one.progress.shares_prompts, other.progress.shares_prompts) == (True, False)
    for (key, tensor), (_, expected) in zip(
        one.unwrapped.state_dict().items(), other.unwrapped.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=2e-5, msg=key)


def test_a_reference_shares_as_the_policy_does_and_the_decision_is_in_checkpoints(tmp_path: Path) -> None:
    trainer = trained("rloo", tmp_path / "one", True)
    assert trainer.unwrapped.shares_prompts
    assert trainer.reference.policy.shares_prompts
    path = trainer.save()
    again = tiny_trainer("rloo", tmp_path / "two", train__share_prompts=True, train__total_steps=2)
    again.load(path)
    assert again.progress.shares_prompts
    assert again.unwrapped.shares_prompts


@table(
    "counted, size, shares",
    [
        ((32, 8, 32 * 32, 32 * 96), None, True),  # RLOO: 8 × 4, 32 + 64
        ((64, 8, 64 * 128, 64 * 192), None, True),
        ((2, 1, 2 * 32, 2 * 96), None, False),  # too little work for one more pass
        ((32, 16, 32 * 4, 32 * 96), None, False),  # short prompts
        ((32, 8, 32 * 32, 32 * 96), 1, False),  # every micro-batch has one row
        ((32, 32, 32 * 128, 32 * 192), None, False),  # no prompt twice
        ((0, 0, 0, 0), None, False),
    ],
)
def test_prompts_are_shared_where_it_pays(
    counted: tuple[int, ...], size: int | None, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "GAIN", 0.9)
    monkeypatch.setitem(batches.PASS_COST, "cpu", batches.PassCost(128))
    trainer = tiny_trainer("rloo", tmp_path, train__microbatch_size=size)
    trainer.models.build()
    assert trainer.sharing.pays(*counted) is shares


def test_micro_batches_hold_more_rows_where_prompts_count_once() -> None:
    group = Sequences.from_lists([[1] * 64] * 8, [[2] * 16] * 8)
    assert [len(part) for part in group.groups(None, 320, together=8)] == [4, 4]
    assert [len(part) for part in group.groups(None, 320, together=8, shared=True)] == [8]
    pairs = Preferences(group, group)
    assert [len(part) for part in pairs.groups(None, 480)] == [3, 3, 2]
    assert [len(part) for part in pairs.groups(None, 480, shared=True)] == [4, 4]
    other = Sequences.from_lists([[3] * 64] * 8, [[2] * 16] * 8)
    assert Preferences(group, other).common.tolist() == [False] * 8
    assert [len(part) for part in Preferences(group, other).groups(None, 480, shared=True)] == [3, 3, 2]


def test_the_parts_of_rows_are_those_of_their_lists() -> None:
    parts = SharedPrompts.of_rows(Sequences.from_lists([[1, 2, 3], [4], [1, 2, 3]], [[5, 6], [7, 8, 9], []]))
    assert [ids[real].tolist() for ids, real in zip(parts.prompts, parts.real, strict=True)] == [[1, 2, 3], [4]]
    assert parts.of.tolist() == [0, 1, 0]
    assert parts.real.tolist() == [[True] * 3, [False, False, True]], "padded on the left"
    assert parts.ids[0, :1].tolist() == [5]
    assert parts.ids[1, :2].tolist() == [7, 8]
    assert parts.chosen.tolist() == [[True, True, False], [True, True, True], [False] * 3]


def test_asking_for_it_where_it_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"share_prompts is true, and 'ppo' has one row for each prompt; remove it"):
        tiny_trainer("ppo", tmp_path, train__share_prompts=True)
    frozen = tiny_trainer("rloo", tmp_path, train__share_prompts=True, model__num_layers_unfrozen=1)
    with pytest.raises(ConfigError, match="prompts cannot be shared: the output of frozen layers is stored for whole"):
        frozen.models.build()
    usual = trainkit.TRLConfig.from_dict({"method": "rloo"})
    assert usual.train.share_prompts is None
