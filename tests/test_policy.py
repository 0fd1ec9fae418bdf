"""The policy: what its head computes, where, and how much of it is alive."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import common_prompts
import trainkit.models.head as head
import trainkit.models.policy as module
from tables import table
from trainkit.config import ModelConfig, SamplingConfig
from trainkit.data import Sequences, batches
from trainkit.functional import entropy_from_logits, token_logprobs
from trainkit.models import CausalPolicy, Policy, Reference, load_model, make_policy
from trainkit.models.rope import fix_rope
from trainkit.rollouts.sampler import make_sampler
from trainkit.testing import character_tokenizer, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit.checks.tools import gradient as gradient_of
from trainkit_kit.checks.tools import left_padded, stepped, widened, with_garbage

GEMMA2 = {
    **tiny_llama(50),
    "model_type": "gemma2",
    "head_dim": 16,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 5.0,
    "sliding_window": 8,
}


def make(fields: dict[str, Any], **changes: Any) -> CausalPolicy:
    torch.manual_seed(0)
    return CausalPolicy(AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval(), **changes)


def batch(vocab: int = 50) -> Sequences:
    ids = torch.randint(0, vocab, (3, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return Sequences.from_lists([ids[0][:2], ids[1][:4], ids[2][:1]], [ids[0][2:], ids[1][4:7], ids[2][1:6]])


BOTH_WAYS = {**tiny_llama(50), "model_type": "gemma3_text", "head_dim": 16, "use_bidirectional_attention": True}


@table(
    "fields, left, masked",
    [(tiny_llama(50), False, False), (tiny_gpt2(50), False, False), (tiny_llama(50), True, True), (BOTH_WAYS, 0, True)],
)
def test_padding_is_masked_where_it_could_be_seen(fields: dict[str, Any], left: bool, masked: bool) -> None:
    """At the right of a causal model it cannot, and kernels for attention without a mask are faster."""
    policy, seen = make(fields), list[bool]()
    policy.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"] is not None), with_kwargs=True
    )
    found = policy(left_padded(batch()) if left else batch())
    assert seen == [masked]
    policy.needs_mask = True
    torch.testing.assert_close(found, policy(left_padded(batch()) if left else batch()))
    policy.needs_mask = masked
    policy(widened(batch(), 3))
    assert seen[-1], "a column of padding alone has no position that a token has, and there may be none for it"


# ------------------------------------------------------------------------------------- the laws, on four architectures

DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": tiny_gpt2(10, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "llama": tiny_llama(10, attention_dropout=0.1),
    "t5": tiny_t5(10, dropout_rate=0.1),
    "bart": tiny_bart(10, dropout=0.1, attention_dropout=0.1),
}
"""The architectures of the laws, with dropout configured."""
every_architecture = table("name", DROPOUT)
with_shared_prompts_and_without = table("shares", [True, False])


def lively(name: str, **settings: Any) -> Policy:
    """A policy in which every token matters to log-probabilities and values."""
    torch.manual_seed(0)
    kind: Any = AutoModelForSeq2SeqLM if name in ("t5", "bart") else AutoModelForCausalLM
    policy = make_policy(kind.from_config(AutoConfig.for_model(**DROPOUT[name])), value_head=True, **settings).eval()
    for parameter in policy.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    assert policy.why_not_shared() is None
    return policy


def ragged() -> Sequences:
    """Rows of several lengths; the first, the second and the last have one prompt."""
    ids = torch.randint(0, 8, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    a, b, c = ids[:6], ids[6:8], ids[8:11]
    return Sequences.from_lists([a, a, b, c, c, a], [ids[at : at + n] for at, n in enumerate((3, 7, 1, 4, 6, 2), 11)])


LAYOUTS: dict[str, Callable[[Sequences], list[Sequences]]] = {
    "more padding": lambda rows: [widened(rows, 5)],
    "padding on the left": lambda rows: [left_padded(rows)],
    "padding on both sides": lambda rows: [widened(left_padded(rows), 2)],
    "garbage under the mask": lambda rows: [with_garbage(widened(rows, 2))],
    "every row alone": lambda rows: [rows.take(torch.tensor([row])) for row in range(len(rows))],
    "micro-batches": lambda rows: [rows.take(torch.tensor(part)) for part in ([0, 1, 2], [3], [4, 5])],
}


def said(policy: Policy, parts: list[Sequences], shares: bool) -> tuple[Tensor, Tensor]:
    """What a policy says of all response tokens of micro-batches [3, N], and the gradient of its weighted sum."""
    policy.shares_prompts = shares
    policy.zero_grad()
    weights, found = torch.linspace(-1, 1, sum(int(part.response_mask.sum()) for part in parts)), list[Tensor]()
    for part in parts:
        outputs, mask = policy(part, entropy=True), part.response_mask
        numbers = (outputs.logprobs, outputs.entropy, outputs.values)
        assert not any(each[~mask].any() for each in numbers)
        own, weights = weights.split([int(mask.sum()), len(weights) - int(mask.sum())])
        found.append(torch.stack([each[mask] for each in numbers]))
        (found[-1] * own).sum().backward()
    whole = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return torch.cat(found, 1).detach(), whole


@with_shared_prompts_and_without
@every_architecture
def test_numbers_and_gradients_of_a_row_follow_from_its_tokens_alone(name: str, shares: bool) -> None:
    """Log-probabilities, entropies and values; not from padding, batch mates or micro-batches."""
    policy, rows = lively(name, temperature=0.7), ragged()
    numbers, whole = said(policy, [rows], shares)
    assert numbers.std(1).min() > 0.01
    for layout, change in LAYOUTS.items():
        found, own = said(policy, change(rows), shares)
        assert (found - numbers).abs().max() < 2e-5 * numbers.abs().max(), layout
        assert (own - whole).abs().max() < 2e-5 * whole.abs().max(), layout


@with_shared_prompts_and_without
@every_architecture
def test_a_sampler_says_of_its_tokens_what_the_policy_says(name: str, shares: bool) -> None:
    """At the temperature and under the mask, whatever top-k and top-p cut, before the weights are moved."""
    mask = torch.rand(10, 10, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[:, 8] = True  # EOS
    policy = lively(name, temperature=0.7, logit_mask=mask)
    sampler = make_sampler(policy.model, character_tokenizer("abcdefgh"), logit_mask=mask, hidden=True)
    assert not sampler.fault
    queries = [query.tolist() for query in ragged().queries]
    settings = SamplingConfig(max_new_tokens=6, temperature=0.7, top_k=6, top_p=0.9)
    rollouts = sampler([{} for _ in queries], queries, settings, range(6))
    policy.shares_prompts = shares
    told, real = policy(rollouts.sequences, entropy=True), rollouts.sequences.response_mask
    assert policy.value_head is not None
    assert rollouts.hidden is not None
    torch.testing.assert_close(rollouts.logprobs, told.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(rollouts.entropy, told.entropy, rtol=0, atol=2e-5)
    torch.testing.assert_close(policy.value_head(rollouts.hidden[real]), told.values[real], rtol=1e-4, atol=2e-5)


@with_shared_prompts_and_without
@every_architecture
def test_a_new_reference_has_the_bits_of_the_policy(name: str, shares: bool) -> None:
    policy, rows = lively(name, temperature=0.7), ragged()
    reference = Reference(policy)
    policy.shares_prompts = reference.policy.shares_prompts = shares
    with torch.no_grad():
        told, same = policy(rows, reference=reference), reference(rows)
    assert torch.equal(told.logprobs, same.logprobs)
    assert told.divergence.abs().max() < 1e-6
    assert same.values is None


@table("name, shares", [("gpt2", True), ("llama", False), ("t5", True), ("bart", False)])
def test_before_the_first_update_kl_is_exactly_zero_and_a_step_has_the_gradient_of_the_whole_batch(
    name: str, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run with dropout configured, at a temperature other than 1, in micro-batches that leave a rest."""
    common_prompts.share(monkeypatch, shares)
    settings = {"rollout__temperature": 0.7, "train__microbatch_size": 3, "train__max_grad_norm": None}
    trainer = tiny_trainer("rloo", tmp_path, model=DROPOUT[name], **settings)
    trainer.collect()
    assert trainer.unwrapped.shares_prompts is shares
    assert trainer.recorder.pending["policy/kl"].compute() == 0.0
    rollouts, batch = trainer.collector.collection.rollouts[0], trainer.store.experience
    torch.testing.assert_close(rollouts.logprobs, trainer.unwrapped(rollouts.sequences).logprobs, rtol=0, atol=1e-5)
    whole = gradient_of(trainer, batch)
    assert (stepped(trainer, batch)[0] - whole).abs().max() < 1e-4 * whole.abs().max()


# ------------------------------------------------------------------------------------------------------ the head alone


@table("fields", [tiny_gpt2(50), tiny_llama(50), GEMMA2])
@table("chunk", [50, 250, 2**22])
def test_outputs_and_gradients_are_those_of_full_logits(
    fields: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of one token, of five, and at once."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    policy, sequences = make(fields, temperature=0.7), batch()
    said = policy(sequences, entropy=True)
    (said.logprobs.sum() + said.entropy.sum()).backward()
    found = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    model, mask = policy.model, sequences.response_mask
    logits = model(sequences.input_ids, attention_mask=sequences.attention_mask).logits[:, :-1][mask[:, 1:]] / 0.7
    logprobs, entropy = token_logprobs(logits, sequences.input_ids[mask]), entropy_from_logits(logits)
    torch.testing.assert_close(said.logprobs[mask], logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(said.entropy[mask], entropy, rtol=1e-4, atol=1e-5)
    (logprobs.sum() + entropy.sum()).backward()
    for gradient, parameter in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


@table("fields", [tiny_gpt2(50), tiny_llama(50), GEMMA2])
def test_rows_that_go_through_the_model_by_length_say_what_they_say_together(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make(fields, value_head=True)
    lengths = [3, 9, 3, 12, 4, 12, 1, 8]
    ids = torch.randint(0, 50, (8, 14), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = Sequences.from_lists(
        [row[:2] for row in ids], [r[2 : 2 + n] for r, n in zip(ids, lengths, strict=True)]
    )
    found, calls = [], list[int]()
    policy.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    for cost, passes in ((10**6, 1), (8, 3), (0, 6)):
        monkeypatch.setitem(batches.PASS_COST, "cpu", batches.PassCost(cost))
        assert len(sequences.buckets(cost)) == passes
        policy.zero_grad()
        calls.clear()
        said = policy(sequences, entropy=True)
        assert len(calls) == passes
        (said.logprobs.sum() + said.entropy.sum() + said.values.sum()).backward()
        found.append([*said[:3], *(p.grad.clone() for p in policy.parameters())])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


@table("fields", [tiny_gpt2(50), GEMMA2, tiny_t5(50), tiny_bart(50)])
@table("hooked, shared", [(False, True), (True, True), (False, False)])
def test_means_of_logits_are_those_of_the_models_own(
    fields: dict[str, Any], hooked: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every token, those of the prompt too, or of the outputs of an encoder-decoder; nothing else changes."""
    apart = fields["model_type"] in ("t5", "bart")
    torch.manual_seed(0)
    kind: Any = AutoModelForSeq2SeqLM if apart else AutoModelForCausalLM
    policy, rows = (
        make_policy(kind.from_config(AutoConfig.for_model(**fields)).eval()),
        Sequences.cat([batch(), ragged()]),
    )
    policy.shares_prompts = shared
    if hooked:  # then the rows of the head are not read
        policy.model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits + 1)
    monkeypatch.setitem(batches.PASS_COST, "cpu", batches.PassCost(0))  # each length has a pass of its own
    outputs = policy(rows, mean_logits=True)
    expected = torch.zeros(rows.input_ids.shape)
    for at, (ids, real, chosen) in enumerate(zip(rows.input_ids, rows.attention_mask, rows.response_mask, strict=True)):
        labels = {"labels": ids[None, chosen]} if apart else {}
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None, real & ~chosen] if apart else ids[None, real], **labels).logits
        expected[at, chosen if apart else real] = logits[0].mean(-1)
    torch.testing.assert_close(outputs.mean_logits, expected, atol=1e-5, rtol=1e-4)
    assert not outputs.mean_logits.requires_grad
    torch.testing.assert_close(outputs.logprobs, policy(rows).logprobs, atol=1e-5, rtol=1e-4)
    assert policy(rows).mean_logits is None


def test_a_bucket_more_is_made_where_it_saves_more_than_it_costs() -> None:
    sequences = Sequences.from_lists([[1]] * 6, [[2] * n for n in (9, 3, 9, 3, 3, 8)])
    assert [rows.tolist() for rows in sequences.buckets(17)] == [[0, 2, 5], [1, 3, 4]]  # 3 rows × 6 columns saved
    assert [rows.tolist() for rows in sequences.buckets(18)] == [[0, 1, 2, 3, 4, 5]]
    assert [rows.tolist() for rows in sequences.buckets(3)] == [[0, 2], [5], [1, 3, 4]]
    left = sequences.map(lambda x: x.flip(1))
    assert len(left.buckets(0)) == 1, "padding on the left cannot be cut off"


SMALL = {"vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
LONG = {"rope_type": "longrope", "long_factor": [9.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 1e4,
        "original_max_position_embeddings": 16}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
LAYERS = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LONG}
ROPES: dict[str, dict[str, Any]] = {
    "phi3": {"model_type": "phi3", "rope_parameters": LONG, "original_max_position_embeddings": 16},
    "llama": {"model_type": "llama", "rope_parameters": DYNAMIC},
    "gemma3": {"model_type": "gemma3_text", "rope_parameters": LAYERS, "head_dim": 8, "sliding_window": 64,
               "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


OF_LAYERS = [("gemma3", 40)] if version("transformers") >= "5.23" else []  # older ones fail to make such ropes


@table("name, limit", [("phi3", 12), ("phi3", 40), ("llama", 40), *OF_LAYERS])
def test_rotary_positions_do_not_follow_the_longest_row(name: str, limit: int, tmp_path: Path) -> None:
    """Of a length limit beyond the original context the long factors are used for all rows."""
    trainer = tiny_trainer("ppo", tmp_path, model={**SMALL, **ROPES[name]}, train__seq_length=limit)
    trainer.models.build()
    policy, ids = trainer.unwrapped, [3, 4, 5, 6, 7, 8, 9, 3]
    alone = Sequences.from_lists([ids[:4]], [ids[4:]])
    both = Sequences.from_lists([ids[:4], ids], [ids[4:], (ids * 5)[: limit - len(ids)]])
    for model in (policy, trainer.reference.policy):
        with torch.no_grad():
            together, single = model(both).logprobs[0, :8], model(alone).logprobs[0]
            torch.testing.assert_close(together, single, rtol=0, atol=1e-5)
            again = model(alone).logprobs[0]
        assert torch.equal(again, single)
    assert "rope_type" in str(policy.model.config.to_dict())


def test_it_is_told_if_rotary_positions_are_not_those_of_short_rows(caplog: pytest.LogCaptureFixture) -> None:
    for limit, told in ((12, False), (40, True)):
        fix_rope(load_model(ModelConfig(model_path={**SMALL, **ROPES["phi3"]})), limit)
        assert ("are those of a row of 40 tokens" in caplog.text) == told


def test_a_model_that_caps_its_logits_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not make(GEMMA2).head_alone
    assert "full logits" in caplog.text
    assert make(tiny_llama(50)).head_alone


@table("grad", [True, False])
def test_no_more_logits_are_alive_than_a_chunk(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at every call of the head, forwards and in the recomputation backwards."""
    vocab, chunk = 997, 997 * 3
    monkeypatch.setattr(module, "CHUNK", chunk)
    policy, sequences = make(tiny_gpt2(vocab)), batch(vocab)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watch(_: Any, __: Any, logits: torch.Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(logits))
        most = max(most, sum(kept.numel() for ref in alive if (kept := ref()) is not None))

    policy.model.get_output_embeddings().register_forward_hook(watch)
    with torch.set_grad_enabled(grad):
        said = policy(sequences).logprobs
        if grad:
            said.sum().backward()
    assert len(alive) == 5 * (2 if grad else 1), "15 response tokens in chunks of 3, computed again backwards"
    assert most <= chunk
    assert sum(ref() is not None for ref in alive) == 0


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages that operations make, and the most that were alive at a time; backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return made

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


def peak(vocab: int, full: bool) -> int:
    """Bytes at the peak of a forward and backward pass over 256 response tokens."""
    policy = make(tiny_gpt2(vocab))
    policy.head_alone = not full
    ids = torch.randint(0, vocab, (8, 33), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = Sequences.from_lists([row[:1] for row in ids], [row[1:] for row in ids])
    with PeakMemory() as memory:
        policy(sequences, entropy=True).logprobs.sum().backward()
    return memory.peak


def test_peak_memory_does_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both vocabularies fill more than a chunk: beyond the weights' own gradient, the larger needs no more."""
    monkeypatch.setattr(head, "BLOCK", 2**18)
    monkeypatch.setattr(head, "KEPT", 2**18)
    small, large = 2_048, 16_384
    gradient, logits = (rows * 4 * (large - small) for rows in (32, 256))
    grown = peak(large, full=False) - peak(small, full=False)
    assert grown < 3 * gradient, f"{grown / gradient:.1f} times the gradient of the head"
    seen = peak(large, full=True) - peak(small, full=True)
    assert seen > 2 * logits, "the measure sees [B, T, V] where it is made"


def test_a_state_asked_for_behind_the_last_token_stays_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a critic asks for the value of where a cut response stands; also where rows are divided by length."""
    policy, plain = make(tiny_gpt2(50), value_head=True), batch()
    torch.nn.init.normal_(policy.value_head.summary.weight)
    pad = torch.nn.functional.pad
    real = plain.attention_mask
    asked = Sequences(pad(plain.input_ids, (0, 1)), pad(real, (0, 1)), pad(real, (1, 0)) & ~pad(real, (0, 1)))
    together = policy(asked).values
    monkeypatch.setitem(batches.PASS_COST, "cpu", batches.PassCost(0))
    assert len(asked.buckets(0)) == 3
    torch.testing.assert_close(policy(asked).values, together, rtol=1e-4, atol=1e-5)
    assert (together[asked.response_mask] != 0).all()


def test_gpt2s_gelu_is_run_in_one_kernel_and_is_the_same_function(tmp_path: Any) -> None:
    fields = tiny_gpt2(50)
    torch.manual_seed(0)
    slow = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    slow.save_pretrained(tmp_path)
    for path in (str(tmp_path), fields):
        fast = load_model(ModelConfig(model_path=path))
        assert fast.config.activation_function == "gelu_pytorch_tanh"
        fast.load_state_dict(slow.state_dict())
        ids = batch().input_ids
        torch.testing.assert_close(fast(ids).logits, slow(ids).logits, rtol=0, atol=1e-6)


class CountingHead(nn.Module):
    """Answers with the token's id, and with its state's first feature."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        return {"token": tokens.float(), "feature": hidden[:, 0]}


def test_a_further_head_reads_the_states_in_which_response_tokens_were_chosen() -> None:
    """Rows of several lengths, in one pass and in passes by length; the reference has no such head."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(12)))
    sequences = Sequences.from_lists([[1, 2], [3], [4, 5, 6, 7, 8]], [[3, 4], [5, 6, 7, 8, 9], [1]])
    policy = make_policy(model, head=CountingHead()).eval()
    together = policy(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(batches.PASS_COST, "cpu", batches.PassCost(0))
        apart = policy(sequences)
    ids = sequences.input_ids.float() * sequences.response_mask
    assert torch.equal(together.head["token"], ids)
    assert torch.equal(apart.head["token"], ids)
    hidden = model.base_model(sequences.input_ids, attention_mask=sequences.attention_mask).last_hidden_state[1, 2, 0]
    torch.testing.assert_close(together.head["feature"][1, 3], hidden)  # token 3 was chosen in the state after token 2
    torch.testing.assert_close(apart.head["feature"], together.head["feature"])
    assert Reference(policy)(sequences).head == {}
