"""Training the upper layers only: what is frozen is shared with the reference and runs once per sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import trainkit
from tables import table
from trainkit.config import ModelConfig
from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models import CausalPolicy, Reference, load_model
from trainkit.models.trunk import Trunk, freeze_below
from trainkit.testing import tiny_gpt2, tiny_llama
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import trunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

L = 3
TRAINERS = [name for name in trainkit.available_trainers() if name != "ddpo"]  # of language models
ONLINE = ("best_of_k", "distill", "grpo", "online_dpo", "ppo", "rft", "rloo", "xpo")
LLAMA = tiny_llama(20, num_hidden_layers=L)
SHAPES = {
    "gpt2": tiny_gpt2(20, n_layer=L),
    "llama": LLAMA,
    **{name: {**LLAMA, "model_type": name} for name in ("qwen2", "gpt_neox", "opt", "gemma", "gemma2", "mixtral")},
}
FROZEN_DROPOUT = tiny_gpt2(10, n_layer=L, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name])).eval()


def some_sequences() -> Sequences:
    return Sequences.from_lists([[1, 2], [3], [4, 5, 6]], [[7, 8, 9], [1, 2, 3, 4], [5]])


@table("name, unfrozen", [(name, (i + more) % (L + 1)) for i, name in enumerate(SHAPES) for more in (0, 1)])
def test_exactly_the_upper_layers_and_what_follows_them_stay_trainable(name: str, unfrozen: int) -> None:
    model = make(name)
    freeze_below(model, unfrozen)
    blocks = Trunk(model).blocks
    assert blocks is not None
    for index, block in enumerate(blocks):
        assert {p.requires_grad for p in block.parameters()} == {index >= L - unfrozen}
    assert not any(p.requires_grad for p in model.get_input_embeddings().parameters())
    inside = {id(p) for block in blocks for p in block.parameters()}
    after = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    assert any("norm" in n or "ln_f" in n for n in after), "the last norm is trained"
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight.requires_grad is not tied


@table("name, unfrozen", [(name, (i + more) % L) for i, name in enumerate(SHAPES) for more in (0, 1)])
def test_going_on_from_the_trunk_is_bit_equal_to_running_the_whole_model(name: str, unfrozen: int) -> None:
    model = make(name)
    freeze_below(model, unfrozen)
    policy, sequences = CausalPolicy(model, value_head=True), some_sequences()
    assert policy.trunk.depth == L - unfrozen
    cached = policy.through_trunk(sequences)
    assert cached.trunk is not None
    whole, parts = (policy(s, entropy=True) for s in (sequences, cached))
    assert torch.equal(whole.logprobs, parts.logprobs)
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.entropy, parts.entropy)
    assert policy.through_trunk(cached) is cached, "the trunk does not run again"


@table("unfrozen", [1, 2])
def test_the_trunk_runs_once_for_reference_and_all_passes(unfrozen: int, tmp_path: Path) -> None:
    """Counted in the run: per collection one pass of a frozen block over the sequences, beside the sampler's."""
    trainer = tiny_trainer("ppo", tmp_path, model=tiny_gpt2(10, n_layer=L), model__num_layers_unfrozen=unfrozen)
    calls = {"frozen": 0, "trained": 0}
    trainer.models.build()
    assert trainer.unwrapped.trunk.blocks is not None
    first, last = trainer.unwrapped.trunk.blocks[0], trainer.unwrapped.trunk.blocks[-1]
    trainer.collect()
    for name, block in (("frozen", first), ("trained", last)):
        block.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    for batch in trainer.store.batches(8, torch.Generator()):
        trainer.update(batch)
    assert calls == {"frozen": 0, "trained": 2}


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ONLINE)
@table("model", [tiny_gpt2(10, n_layer=L), tiny_llama(10, num_hidden_layers=L), FROZEN_DROPOUT])
def test_gradients_with_the_cached_trunk_are_those_without(name: str, model: dict[str, Any], tmp_path: Path) -> None:
    """Dropout in the layers below too: the trunk never leaves evaluation mode.

    The trunk was computed for other rows together than those of the loss (in pairs, the best and the worst of more
    responses), and the order of the additions in a product may depend on its number of rows. So gradients may differ by
    rounding: relative to their largest element by at most 2⁻²⁴ for each of m additions after one another. Forward in 3
    layers and backward in one, with inner dimensions of products of at most 32, 16, 10, 32, 32 and 128, and over 160
    tokens, m is below 2¹¹.
    """
    dropout = model is FROZEN_DROPOUT
    trainer = tiny_trainer(
        name, tmp_path, model=model, model__num_layers_unfrozen=1, model__disable_dropout=not dropout
    )
    trainer.collect()
    batch = trainer.store.experience
    found = []
    parts = {name: part for name, part in batch.parts().items() if isinstance(part, Sequences)}
    for trial in (batch, replace(batch, **{name: replace(part, trunk=None) for name, part in parts.items()})):
        trainer.unwrapped.train()
        torch.manual_seed(3)
        trainer.optimizer.zero_grad()
        trainer.loss(trial)[0].backward()
        found.append({n: p.grad.clone() for n, p in trainer.unwrapped.named_parameters() if p.grad is not None})
    assert all(part.trunk is not None for part in parts.values())
    assert found[0].keys() == found[1].keys() == {n for n, p in trainer.unwrapped.named_parameters() if p.requires_grad}
    for key, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][key], rtol=0, atol=2**-13 * float(gradient.abs().max()))


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ONLINE)
@table("unfrozen, model", list(zip([-1, 0, 1, L - 1, L], [SHAPES["gpt2"], LLAMA] * 3, strict=False)))
def test_kl_is_exactly_zero_before_the_first_update(
    name: str, unfrozen: int, model: dict[str, Any], tmp_path: Path
) -> None:
    """Golden 10.12."""
    settings = {"model": {**model, "vocab_size": 10}, "model__num_layers_unfrozen": unfrozen}
    trainer = tiny_trainer(name, tmp_path, **settings, rollout__temperature=0.7)
    trainer.collect()
    measured = ("policy/kl", "policy/kl_per_token")
    found = {name: metric.compute() for name, metric in trainer.recorder.pending.items() if name in measured}
    own = trainer.needs_reference and trainer.chosen_reference is None
    assert found == ({"policy/kl": 0.0, "policy/kl_per_token": 0.0} if own else {})


@table("name, unfrozen", [(name, i % 5 - 1) for i, name in enumerate(SHAPES)])
def test_the_reference_shares_the_memory_of_what_is_frozen_and_of_nothing_else(name: str, unfrozen: int) -> None:
    """By address, and by what training does to it."""
    model = make(name)
    if unfrozen >= 0:
        freeze_below(model, unfrozen)
    policy, sequences = CausalPolicy(model), some_sequences()
    reference = Reference(policy)
    for (key, own), copied in zip(policy.named_parameters(), reference.policy.parameters(), strict=True):
        assert (own.data_ptr() == copied.data_ptr()) is not own.requires_grad, key
        assert not copied.requires_grad
    before = reference(policy.through_trunk(sequences)).logprobs
    assert torch.equal(policy(sequences).logprobs, before)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    policy(sequences).logprobs.sum().backward()
    optimizer.step()
    assert torch.equal(reference(policy.through_trunk(sequences)).logprobs, before)
    assert not torch.equal(policy(sequences).logprobs, before)


def test_divergences_of_the_whole_vocabulary_come_from_the_same_pass() -> None:
    """KL(π‖π_ref) by hand from both models' logits, and its gradient."""
    policy, sequences = CausalPolicy(make("llama"), temperature=0.7), some_sequences()
    reference, mask = Reference(policy), sequences.response_mask
    assert policy(sequences, reference=reference).divergence.abs().max() == 0
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    said = policy(sequences, reference=reference).divergence
    logits = [
        m.model(sequences.input_ids, attention_mask=sequences.attention_mask).logits[:, :-1][mask[:, 1:]].double() / 0.7
        for m in (policy, reference.policy)
    ]
    p, q = (x.log_softmax(-1) for x in logits)
    torch.testing.assert_close(said[mask].double(), (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-6)
    assert (said[~mask] == 0).all()
    assert (said[mask] > 0).all()
    assert torch.autograd.grad(said.sum(), policy.model.lm_head.weight)[0].abs().sum() > 0


def test_a_trunk_frozen_by_hand_is_used_and_one_below_a_trained_embedding_is_not() -> None:
    model = make("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    assert CausalPolicy(model).trunk.depth == 1
    model.model.embed_tokens.requires_grad_(True)
    policy = CausalPolicy(model)
    assert policy.trunk.depth == 0
    assert policy.through_trunk(some_sequences()).trunk is None


def test_modules_that_a_pass_makes_are_left_out(tmp_path: Path) -> None:
    """CodeGen makes its softmax in every pass; it has no name in the model."""
    model = {"model_type": "codegen", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "rotary_dim": 4}
    trainer = tiny_trainer("ppo", tmp_path, model={**model, "vocab_size": 10}, model__num_layers_unfrozen=1)
    trainer.learn()
    assert trainer.progress.step == 6


def test_a_trunk_with_dropout_is_found_in_training_mode() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FROZEN_DROPOUT)).train()
    freeze_below(model, 1)
    assert CausalPolicy(model).trunk.depth == L - 1
    assert model.training


def test_blocks_that_hand_on_more_than_a_hidden_state_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """The whole model is run instead, with the same result."""

    class Talkative(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block
            self.calls = 0

        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            Talkative.heard = hidden_states.sum()  # what another block reads
            return self.block(hidden_states, **kwargs)

    class Listening(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            heard, Talkative.heard = Talkative.heard, None
            return self.block(hidden_states * (1 + heard), **kwargs)

    model = make("llama")
    model.model.layers[0] = Talkative(model.model.layers[0])
    model.model.layers[2] = Listening(model.model.layers[2])
    freeze_below(model, 1)
    assert CausalPolicy(model).trunk.depth == 0
    assert "frozen layers cannot be reused (TypeError" in caplog.text


@table("name", ["ppo", "sft", "reward"])
def test_more_layers_than_the_model_has_are_refused_at_the_door(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_layers_unfrozen is 9.* 2 layers.*0 to 2, or -1"):
        tiny_trainer(name, tmp_path, model__num_layers_unfrozen=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_run_with_frozen_layers_resumes_bit_equal_from_checkpoints_without_them(
    name: str, at: int, tmp_path: Path
) -> None:
    changes = {"model__num_layers_unfrozen": 1, "train__save_interval": 1, "train__batch_size": 6}
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    straight.learn()
    tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at).learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    a, b = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []
    saved = load_file(tmp_path / "straight" / "checkpoints" / "step_00000006" / "model.safetensors")
    frozen = {key for key, p in straight.unwrapped.named_parameters() if not p.requires_grad}
    assert frozen
    assert not frozen & saved.keys()


def trained_offline(name: str, path: Path, **changes: Any) -> tuple[Any, int]:
    """Return a trainer after its run, and how often the lowest block ran after the collection was made."""
    model = tiny_llama(20, num_hidden_layers=L)
    trainer = tiny_trainer(name, path, model=model, model__num_layers_unfrozen=1, train__total_steps=6, **changes)
    trainer.begin()
    if not len(trainer.store):
        trainer.collect()
    trainer.store.experience  # noqa: B018  (rows that are promised are made)
    calls: list[int] = []
    trainer.unwrapped.trunk.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    trainer.learn()
    return trainer, len(calls)


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.unwrapped.parameters()]


@pytest.mark.daily(name=("dpo",))
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "ilql", "reward"])
def test_offline_the_trunk_runs_once_and_the_run_ends_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, calls = trained_offline(name, tmp_path / "kept")
    assert kept.progress.keeps_trunk
    assert calls == 0
    monkeypatch.setattr(trunk, "SHARE", 0)
    usual, calls = trained_offline(name, tmp_path / "usual")
    assert not usual.progress.keeps_trunk
    assert calls >= 6
    assert caplog.text.count("it is not kept, and they are run in every pass") == 1
    assert all(map(torch.equal, weights(kept), weights(usual)))


@pytest.mark.daily(name=("dpo",))
@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_a_run_that_resumes_keeps_the_trunk_if_it_did_so_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, _ = trained_offline(name, tmp_path / "whole", train__save_interval=2)
    (tmp_path / "whole" / "model").rename(tmp_path / "export")
    cut = sorted((tmp_path / "whole" / "checkpoints").glob("step_*"))[0]
    monkeypatch.setattr(trunk, "SHARE", 0)  # less memory than at the start of the run
    resumed, calls = trained_offline(name, tmp_path / "resumed", train__resume=str(cut))
    assert resumed.progress.keeps_trunk
    assert calls == 0
    assert all(map(torch.equal, weights(usual), weights(resumed)))


@table(
    "name, changes, keeps",
    [
        ("sft", {"train__total_steps": 2, "train__epochs": 1}, False),  # read once
        ("dpo", {"train__total_steps": 2, "train__epochs": 1}, True),  # the reference starts from it, too
        ("dpo", {"train__total_steps": 2, "train__epochs": 1, "method__reference_free": True}, False),
        ("sft", {"method__neftune_alpha": 5.0}, False),  # noise is added below
    ],
)
def test_the_trunk_is_kept_where_it_is_read_again(
    name: str, changes: dict[str, Any], keeps: bool, tmp_path: Path
) -> None:
    trainer = tiny_trainer(name, tmp_path, model=LLAMA, model__num_layers_unfrozen=1, **changes)
    trainer.collect()
    flat = trainer.store.experience.flatten()
    assert any(key.endswith("trunk") for key in flat) is keeps


LORA = {"r": 2, "target_modules": ["embed_tokens"]}


@table(
    "peft",
    [
        LORA,
        {**LORA, "target_modules": r".*(embed_tokens|layers\.2\..*q_proj)"},
        {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [2], "trainable_token_indices": [1, 2]},
        {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [2], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_adapters_below_frozen_blocks_are_trained(peft: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_llama(10, num_hidden_layers=L)
    trainer = tiny_trainer("sft", tmp_path, model=model, model__peft_config=peft, train__total_steps=2)
    trainer.models.build()
    before = {name: p.clone() for name, p in trainer.unwrapped.named_parameters() if p.requires_grad}
    trainer.learn()
    moved = {name for name, p in trainer.unwrapped.named_parameters() if name in before and (p != before[name]).any()}
    assert any("embed_tokens" in name for name in moved)


def test_layers_of_a_live_model_with_an_adapter_are_not_frozen_around_it(tmp_path: Path) -> None:
    """Below the unfrozen layers the adapter would silently be frozen, too."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10)))
    model.add_adapter(LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="num_layers_unfrozen is 1, and the live model has an adapter"):
        load_model(ModelConfig(num_layers_unfrozen=1), model)
