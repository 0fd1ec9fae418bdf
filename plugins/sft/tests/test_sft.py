"""SFT: what is trained, and that it learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import trainkit
from tables import table
from trainkit import Sequences
from trainkit.errors import ConfigError
from trainkit.models import check_packing, make_policy
from trainkit.testing import tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import PROMPTS, SAMPLES, tiny_trainer
from trainkit_sft import best_fit
from trainkit_sft.noise import embedding_noise

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def test_loss_equals_the_cross_entropy_of_output_tokens(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    batch = trainer.make_experience(trainer.pipeline.take(0, 8))
    trainer.models.build()
    loss, found = trainer.loss(batch)
    logits = trainer.unwrapped.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    labels = batch.input_ids.masked_fill(~batch.response_mask, -100)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert found["loss/nll"].compute() == pytest.approx(expected.item(), abs=1e-6)


def test_temperature_of_sampling_does_not_change_the_likelihood(tmp_path: Path) -> None:
    losses = []
    for temperature in (1.0, 0.3):
        trainer = tiny_trainer("sft", tmp_path / str(temperature), rollout__temperature=temperature)
        trainer.models.build()
        losses.append(trainer.loss(trainer.make_experience(trainer.pipeline.take(0, 8)))[0].item())
    assert losses[0] == losses[1]


def test_prompts_are_trained_too_if_so_set(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, method__train_on_prompts=True)
    batch = trainer.make_experience(trainer.pipeline.take(0, 8))
    assert torch.equal(batch.response_mask[:, 1:], batch.attention_mask[:, 1:])
    assert not batch.response_mask[:, 0].any()


# ---------------------------------------------------------------------------------------------------------- packing


@given(st.lists(st.integers(1, 20)), st.integers(20, 50))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int], size: int) -> None:
    """Nothing is dropped. Two rows that would fit into one are never both there."""
    packs = best_fit(lengths, size)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    filled = sorted(sum(lengths[index] for index in pack) for pack in packs)
    assert all(length <= size for length in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > size


def test_each_sample_goes_where_it_leaves_the_least_room() -> None:
    """7 -> 7; 5 -> 5; 4 fits 5 (1 left) and not 7; 3 fits 7 (0 left)."""
    assert best_fit([3, 4, 5, 7], 10) == [[3, 0], [2, 1]]


SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", tiny_gpt2(50)),
    "llama": ("llama", tiny_llama(50)),
    "qwen2 with a window": ("qwen2", {**SMALL, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "mistral with a window": ("mistral", {**SMALL, **WINDOW}),
    "gemma2 with a window": ("gemma2", {**SMALL, **WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3 with a window": (
        "gemma3_text",
        {**SMALL, **WINDOW, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def language_model(name: str, fields: dict[str, Any], attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{k: v for k, v in fields.items() if k != "model_type"})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


def loss_and_gradient(model: PreTrainedModel, sequences: Sequences) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = -make_policy(model)(sequences).logprobs.sum() / sequences.weight
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


@table(
    "name, fields, attention",
    [
        *((*each, "sdpa") for each in MODELS.values()),
        (*MODELS["llama"], "eager"),
        (*MODELS["gemma3 with a window"], "eager"),
    ],
)
def test_packed_rows_have_the_loss_and_the_gradient_of_their_samples(
    name: str, fields: dict[str, Any], attention: str
) -> None:
    """Samples are longer than the windows. In float64, but for some norms; eager attention is in float32."""
    if name == "gemma2" and attention == "sdpa":
        attention = "eager"  # it has no other
    model = language_model(name, fields, attention)
    model = model.double() if attention == "sdpa" else model
    check_packing(model)
    draws = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 50, (n,), generator=draws).tolist() for n in (9, 3, 7, 2, 12, 5)]
    samples = Sequences.from_lists([row[: len(row) // 2] for row in rows], [row[len(row) // 2 :] for row in rows])
    packed = samples.packed([3, 1, 2])
    assert packed.input_ids.shape == (3, 19)
    assert packed.position_ids[0].tolist() == [*range(9), *range(3), *range(7)]
    assert packed.weight == samples.weight
    (loss, gradient), (loss_packed, gradient_packed) = (loss_and_gradient(model, s) for s in (samples, packed))
    assert loss_packed.item() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(gradient_packed, gradient, rtol=0, atol=1e-8 if attention == "sdpa" else 1e-6)


UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {"vocab_size": 50, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}, "change the"),
    "opt": (
        "opt",
        {
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
        },
        "change the states",
    ),
    "bloom": ("bloom", {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 2}, "change the states"),
}


@table("name, fields, said", UNFIT.values())
def test_a_model_in_which_samples_would_see_each_other_is_refused(name: str, fields: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be trained on packed rows: .*{said}.*method.packing to false$"):
        check_packing(language_model(name, fields, "eager"))


def test_a_model_that_counts_positions_over_the_row_is_refused() -> None:
    model = language_model("gpt2", tiny_gpt2(50), "sdpa")
    embed = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda at: embed(torch.arange(at.size(1)).expand_as(at))
    with pytest.raises(ConfigError, match="a packed sample has other states than the same sample alone"):
        check_packing(model)


def run(run_dir: Path, **changes: Any) -> Any:
    packing = {"method__packing": True, "train__seq_length": 16, "train__batch_size": 2, "train__total_steps": None}
    return tiny_trainer("sft", run_dir, **{**packing, **changes})


def test_a_run_on_packed_rows_sees_every_sample_once_an_epoch_and_says_how_full_they_are(tmp_path: Path) -> None:
    plain = tiny_trainer("sft", tmp_path / "plain")
    tokens = int(plain.make_experience(plain.pipeline.rows).weight)
    found: list[float] = []

    class Watch:
        @trainkit.hookimpl
        def log_metrics(self, metrics: dict[str, float]) -> None:
            found.append(metrics["rows/filled"])

    trainer = run(tmp_path / "packed", train__epochs=3, callbacks=[Watch()])
    assert sorted(s["turns"] for row in trainer.pipeline.rows for s in row["samples"]) == sorted(map(list, SAMPLES))
    rows = len(trainer.pipeline)
    assert rows < len(SAMPLES) / 2
    trainer.learn()
    assert trainer.progress.step == len(found) == 3 * -(-rows // 2)
    assert trainer.progress.tokens == 3 * tokens
    assert sum(found) / len(found) > 0.8


def test_packed_and_unpacked_samples_have_one_gradient_whatever_the_micro_batches(tmp_path: Path) -> None:
    plain, packed = tiny_trainer("sft", tmp_path / "plain"), run(tmp_path / "packed")

    def gradient(trainer: Any, size: int | None) -> Tensor:
        whole = trainer.make_experience(list(trainer.pipeline.rows))
        trainer.models.build()
        trainer.optimizer.zero_grad()
        for batch in whole.split(size):
            (trainer.loss(batch)[0] * batch.weight / whole.weight).backward()
        return torch.cat([p.grad.flatten().clone() for p in trainer.unwrapped.parameters()])

    expected = gradient(plain, None)
    for size in (None, 1, 2):
        torch.testing.assert_close(gradient(packed, size), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.daily(at=(2,))
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_run_on_packed_rows_with_noise_resumes_as_if_it_had_never_stopped(at: int, tmp_path: Path) -> None:
    changes = {"method__neftune_alpha": 5.0, "train__save_interval": 1}
    straight = run(tmp_path / "straight", train__total_steps=5, **changes)
    straight.learn()
    run(tmp_path / "stopped", train__total_steps=at, **changes).learn()
    resumed = run(tmp_path / "stopped", train__total_steps=5, train__resume="auto", **changes)
    resumed.learn()
    expected, found = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


# ---------------------------------------------------------------------------------------------------------- NEFTune


def noise_on(model: PreTrainedModel, sequences: Sequences, alpha: float) -> Tensor:
    """What the noise adds to the embeddings [B, T, D]."""
    seen: list[Tensor] = []
    policy = make_policy(model)
    model.train()
    for amount in (0.0, alpha):
        with embedding_noise(policy, amount):
            handle = model.get_input_embeddings().register_forward_hook(lambda _, __, out: seen.append(out.detach()))
            policy(sequences)
            handle.remove()
    return seen[1] - seen[0]


@table("pack", [False, True])
def test_noise_is_uniform_by_the_samples_own_length_and_nothing_on_padding(pack: bool) -> None:
    """Of samples of 4 and 9 tokens at width 32, α = 5: 5 / sqrt(4 · 32) = .4419 and 5 / sqrt(9 · 32) = .2946."""
    model = language_model("gpt2", tiny_gpt2(50), "sdpa").train()
    rows = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [1] * 16]
    samples = Sequences.from_lists([row[:1] for row in rows], [row[1:] for row in rows])
    torch.manual_seed(0)
    noise = noise_on(model, samples.packed([2, 1]) if pack else samples, 5.0)
    short, long = (noise[0, :4], noise[0, 4:13]) if pack else (noise[0, :4], noise[1, :9])
    assert 0.42 < short.abs().max() <= 0.4420
    assert 0.28 < long.abs().max() <= 0.2947
    assert short.abs().mean().item() == pytest.approx(0.2210, rel=0.15)
    assert not noise[0, 13 if pack else 4 :].any()


def test_evaluation_and_generating_hear_no_noise_and_no_hook_stays(tmp_path: Path) -> None:
    quiet, noisy = (tiny_trainer("sft", tmp_path / f"{a}", method__neftune_alpha=a) for a in (0.0, 15.0))
    for trainer in (quiet, noisy):
        trainer.add_eval_samples(SAMPLES)
    assert quiet.evaluate()["eval/loss/nll"] == noisy.evaluate()["eval/loss/nll"]
    assert quiet.generate(list(PROMPTS)).outputs == noisy.generate(list(PROMPTS)).outputs
    batch = noisy.make_experience(noisy.pipeline.take(0, 8))
    losses = [trainer.update(batch)["loss/nll"].compute() for trainer in (quiet, noisy)]
    assert abs(losses[0] - losses[1]) > 1e-3
    modules = list(noisy.unwrapped.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@table(
    "changes, said",
    [
        ({"method__packing": True}, "cannot be trained on packed rows: an encoder-decoder reads"),
        ({"method__train_on_prompts": True}, "train_on_prompts is for decoder-only models"),
        ({"method__neftune_alpha": 5.0}, "neftune_alpha is for decoder-only models"),
    ],
)
def test_encoder_decoders_are_told_what_they_cannot_do(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, model=tiny_t5(10), train__seq_length=16, **changes)
    with pytest.raises(ConfigError, match=said):
        trainer.learn()


def test_noise_on_joined_rows_is_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, method__neftune_alpha=5.0, train__padding_free=True)
    with pytest.raises(ConfigError, match=re.escape("the noise of method.neftune_alpha needs whole rows")):
        trainer.learn()


def test_packing_without_a_length_is_refused(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    trainer.text.limit = None
    with pytest.raises(ConfigError, match=re.escape("fills rows of train.seq_length tokens")):
        trainer.add_samples(SAMPLES)
