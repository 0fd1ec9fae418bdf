"""Virtual tokens, peft's prompt, prefix and P-tuning: equal to peft, and trained by all trainers of language models."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit.cli import app
from trainkit.config import ModelConfig, SamplingConfig
from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models import (
    AutoModelForCausalLMWithValueHead,
    CausalPolicy,
    Reference,
    RewardModel,
    check_packing,
    create_reference_model,
    has_adapter,
    load_model,
    make_peft_config,
    make_policy,
    unwrap_model_for_generation,
    with_adapter,
    without_adapter,
)
from trainkit.models.adapters import quiet_peft
from trainkit.models.virtual import virtual_tokens
from trainkit.rollouts.decoding import CausalDecoder, stepping_fault
from trainkit.rollouts.sampler import CausalSampler
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer

TRAINERS = [name for name in trainkit.available_trainers() if name != "ddpo"]  # of language models
COMPARING = ["dpo", "grpo", "ppo", "rloo"]
KINDS: dict[str, dict[str, Any]] = {
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
    "projected prefix": {
        "peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2, "prefix_projection": True, "encoder_hidden_size": 8
    },
    "prompt": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
    "sampled prompt": {
        "peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2, "prompt_tuning_init": "SAMPLE_VOCAB"
    },
    "p": {"peft_type": "P_TUNING", "num_virtual_tokens": 3},
    "p with lstm": {"peft_type": "P_TUNING", "num_virtual_tokens": 2, "encoder_reparameterization_type": "LSTM"},
}  # fmt: skip
PLAIN = ["prefix", "prompt", "p"]
MISTRAL = {**tiny_llama(10), "model_type": "mistral", "sliding_window": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": tiny_gpt2(10),
    "grouped queries": tiny_llama(10, num_key_value_heads=1),
    "opt": {
        "model_type": "opt", "vocab_size": 10, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 16, "dropout": 0.0,
    },
    "sliding window": MISTRAL,
}  # fmt: skip
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()


def plain(fields: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()


def prompted(fields: dict[str, Any], kind: str) -> Any:
    """Return a model with virtual tokens, as `trainkit.train` makes it."""
    model = load_model(ModelConfig(peft_config=KINDS[kind]), plain(fields))
    assert virtual_tokens(model) is not None
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8).unsqueeze(0)).logits


def peft_model(model: Any, config: Any) -> Any:
    import peft

    with quiet_peft():
        return peft.get_peft_model(model, config)


def loaded_by_peft(path: Path, base: Any = None) -> Any:
    import peft

    with quiet_peft():
        if base is None:
            return peft.AutoPeftModelForCausalLM.from_pretrained(path)
        return peft.PeftModel.from_pretrained(base, path)


def push(model: Any) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter))


# ---------------------------------------------------------------------------------------------- equal to peft


@table("kind", KINDS)
def test_logits_and_gradients_are_those_of_peft(kind: str) -> None:
    """In float64. GPT-2 alone computes all of them in float64: the norms of others are in float32."""
    base = plain(tiny_gpt2(10)).double()
    config = make_peft_config({**KINDS[kind], "task_type": "CAUSAL_LM"})
    theirs = peft_model(copy.deepcopy(base), copy.deepcopy(config))
    ours = with_adapter(base, config)
    [encoder], [own] = theirs.prompt_encoder.values(), ours.prompt_encoder.values()
    encoder.load_state_dict(own.state_dict())
    encoder.double(), own.double()
    expected = theirs(IDS, attention_mask=REAL.long()).logits[:, -5:][REAL]
    found = base(IDS, attention_mask=REAL.long()).logits[REAL]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours(IDS, attention_mask=REAL.long()).logits[REAL], expected, rtol=0, atol=1e-12)
    gradients = (
        torch.autograd.grad(out.sin().sum(), list(each.parameters()))
        for out, each in ((expected, encoder), (found, own))
    )
    for theirs_, ours_ in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=0, atol=1e-12)
        assert ours_.abs().max() > 1e-4


@table("name, kind", list(zip([*MODELS, *MODELS], PLAIN * 3, strict=False)))
def test_models_of_several_architectures_read_what_peft_reads(name: str, kind: str) -> None:
    """The check at construction compares logits and gradients; longer padded rows are compared here."""
    model = plain(MODELS[name])
    config = make_peft_config(KINDS[kind])
    theirs, ours = peft_model(copy.deepcopy(model), copy.deepcopy(config)), with_adapter(model, config)
    theirs.prompt_encoder.load_state_dict(ours.prompt_encoder.state_dict())
    ids, real = torch.arange(20).view(2, 10) % 10, torch.arange(10) < torch.tensor([[10], [6]])
    with torch.no_grad():
        expected, found = (each(ids, attention_mask=real.long()).logits[:, -10:][real] for each in (theirs, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@table(
    "name, kind, full",
    [
        ("gpt2", "prefix", False),
        ("gpt2", "prompt", True),
        ("grouped queries", "prefix", True),
        ("grouped queries", "p", False),
        ("opt", "prompt", False),
    ],
)
def test_policy_and_sampler_compute_one_distribution(name: str, kind: str, full: bool) -> None:
    """Also from prompts of different lengths, which the sampler pads on the left, and of which two are the same."""
    model = prompted(MODELS[name], kind)
    push(model)
    policy = CausalPolicy(model).eval()
    policy.head_alone = not full or name == "opt"  # its whole model does not run what `base_model` is
    assert policy.trunk.depth == 0, "the output of frozen layers depends on trained tokens"
    sampler = CausalSampler(model, character_tokenizer("abcdefgh"), head_alone=policy.head_alone, hidden=True)
    assert sampler.fault == ""
    queries = [[1, 2, 3, 4], [5], [1, 2, 3, 4], [6, 7]]
    with torch.no_grad():
        rollouts = sampler([{}] * 4, queries, SamplingConfig(max_new_tokens=6), range(4))
        found = policy(rollouts.sequences, entropy=True)
    mask = rollouts.sequences.response_mask
    torch.testing.assert_close(found.logprobs[mask], rollouts.logprobs[mask], rtol=0, atol=2e-5)
    torch.testing.assert_close(found.entropy[mask], rollouts.entropy[mask], rtol=0, atol=2e-5)
    for row in range(4):
        alone = policy(rollouts.sequences.select(torch.tensor([row]))).logprobs[0]
        torch.testing.assert_close(alone, found.logprobs[row, : len(alone)], rtol=0, atol=2e-5)


@table("kind", PLAIN[:2])
def test_before_sliding_windows_prompts_are_not_padded(kind: str) -> None:
    """Padding on the left would be between virtual tokens and prompt, and count in the window."""
    model = prompted(MISTRAL, kind)
    push(model)
    policy, queries = CausalPolicy(model).eval(), [[1, 2, 3, 4], [5], [6, 7]]
    sampler = CausalSampler(model, character_tokenizer("abcdefgh"))
    assert "sliding windows" in sampler.fault
    settings = SamplingConfig(max_new_tokens=6, temperature=0)
    with torch.no_grad():
        together = sampler([{}] * 3, queries, settings, range(3)).sequences
        for row, query in enumerate(queries):
            ids = together.input_ids[row, together.attention_mask[row]].tolist()
            for end in range(len(query), len(ids)):
                assert ids[end] == int(model(torch.tensor([ids[:end]])).logits[0, -1].argmax())
        alone = [policy(together.select(torch.tensor([row]))).logprobs[0] for row in range(3)]
    for row, found in enumerate(alone):
        torch.testing.assert_close(policy(together).logprobs[row, : len(found)], found, rtol=0, atol=2e-5)


@table("kind", PLAIN)
def test_rows_that_begin_later_than_others_read_the_virtual_tokens(kind: str) -> None:
    model = prompted(tiny_gpt2(10), kind)
    push(model)
    sampler, queries = CausalSampler(model, character_tokenizer("abcdefgh")), [[1], [2, 3, 4], [5, 6], [1], [7, 2]] * 4
    found = []
    for sampler.most in (None, 4):
        found.append(sampler.generate(queries, SamplingConfig(max_new_tokens=12), range(20)))
    assert found[0].ids == found[1].ids
    torch.testing.assert_close(found[0].logprobs, found[1].logprobs)


@table("kind", PLAIN)
def test_the_models_own_generate_continues_after_the_virtual_tokens(kind: str) -> None:
    model = prompted(tiny_gpt2(10), kind)
    push(model)
    assert stepping_fault(CausalDecoder(model, 0, True, False), range(10)) == ""
    ids, left = torch.tensor([[1, 2, 3], [0, 4, 5]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    with torch.no_grad():
        written = model.generate(ids, attention_mask=left, max_new_tokens=5, do_sample=False, eos_token_id=None,
                                 pad_token_id=0)  # fmt: skip
        for row, start in ((0, 0), (1, 1)):
            for end in range(3, 8):
                expected = int(model(written[row : row + 1, start:end]).logits[0, -1].argmax())
                assert int(written[row, end]) == expected


# -------------------------------------------------------------------------------------------------- trainers


@pytest.mark.daily(name=("ppo",), kind=("prompt",))
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", TRAINERS)
def test_only_the_virtual_tokens_are_trained(name: str, kind: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, model__peft_config=KINDS[kind])
    trainer.models.build()
    before = {key: tensor.clone() for key, tensor in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    moved = {key for key, tensor in trainer.unwrapped.state_dict().items() if not torch.equal(tensor, before[key])}
    assert any("virtual_tokens" in key for key in moved)
    assert all("virtual_tokens" in key or not key.startswith("model.") for key in moved), "heads are trained beside it"


@pytest.mark.daily(name=("ppo",), kind=("prefix",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COMPARING)
def test_the_reference_is_the_policy_with_its_first_virtual_tokens(name: str, kind: str, tmp_path: Path) -> None:
    """Before the first update the divergence is exactly 0, though the model without them computes something else."""
    penalty = {"method__kl_coef": 0.05} if name == "grpo" else {}  # without it there is no reference
    trainer = tiny_trainer(name, tmp_path, model__peft_config=KINDS[kind], optimizer__lr=1e-1, **penalty)
    probe = Sequences.from_lists([[0, 1], [2]], [[3, 4], [5, 6, 7]])
    trainer.models.build()  # it is made when it is first used
    reference = Reference(trainer.unwrapped) if trainer.reference is None else trainer.reference

    def divergence() -> torch.Tensor:
        with torch.no_grad():
            return trainer.unwrapped(probe, reference=reference).divergence[probe.response_mask]

    assert (divergence() == 0).all()
    told = reference(probe).logprobs
    shared = dict(reference.policy.named_parameters())
    for key, parameter in trainer.unwrapped.named_parameters():
        if key in shared:
            assert (shared[key].data_ptr() == parameter.data_ptr()) is not parameter.requires_grad
    trainer.learn()
    reference.policy.shares_prompts = False  # as when it was read first
    assert torch.equal(reference(probe).logprobs, told)
    assert (divergence() > 0).all()


@pytest.mark.daily(kind=("prefix",))
@pytest.mark.parametrize("kind", PLAIN)
def test_a_chosen_reference_can_have_virtual_tokens(kind: str, tmp_path: Path) -> None:
    tiny_trainer("sft", tmp_path / "run", model__peft_config=KINDS[kind]).learn()
    saved = str(tmp_path / "run" / "model")
    trainer = tiny_trainer("dpo", tmp_path / "more", model__model_path=saved + "/base", model__reference_path=saved)
    trainer.learn()
    torch.testing.assert_close(
        logits(trainer.reference.policy.model), logits(loaded_by_peft(Path(saved)))[:, -8:], rtol=0, atol=1e-6
    )
    assert not any(parameter.requires_grad for parameter in trainer.reference.policy.parameters())


@table("kind", PLAIN)
def test_a_model_with_virtual_tokens_is_copied_sent_and_taken_apart(kind: str) -> None:
    """Ray's engine sends it to other processes."""
    model = prompted(tiny_gpt2(10), kind)
    push(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    expected = logits(model)
    push(model)
    for each in copies:
        assert torch.equal(logits(each), expected)
        assert has_adapter(each)
    expected = logits(model)
    with without_adapter(model):
        assert not has_adapter(model)
        assert torch.equal(logits(model), logits(plain(tiny_gpt2(10))))
    assert has_adapter(model)
    assert torch.equal(logits(model), expected)


def test_a_chosen_reference_can_be_the_model_without_virtual_tokens(tmp_path: Path) -> None:
    """It is what trlX compares with."""
    plain(tiny_gpt2(10)).save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    changes = {"model__model_path": base, "model__peft_config": KINDS["prefix"]}
    trainer = tiny_trainer("ppo", tmp_path / "run", **changes, model__reference_path=base)
    trainer.collect()
    assert trainer.recorder.pending["policy/kl"].compute() > 0
    assert virtual_tokens(trainer.reference.policy.model) is None


@pytest.mark.daily(name=("ppo",), kind=("prefix",))
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", ["ppo", "sft", "dpo"])
def test_the_gradient_does_not_depend_on_micro_batches(name: str, kind: str, tmp_path: Path) -> None:
    ends = []
    for size in (3, 8):
        trainer = tiny_trainer(
            name, tmp_path / str(size), model__peft_config=KINDS[kind], optimizer__name="sgd", optimizer__lr=1.0,
            train__microbatch_size=size, train__total_steps=1, train__max_grad_norm=None,
        )  # fmt: skip
        trainer.learn()
        ends.append(virtual_tokens(trainer.unwrapped.model).values().detach())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefix", "prompt", "p with lstm"])
@pytest.mark.parametrize("name", ["ppo", "sft", "dpo", "rloo", "ilql"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_run_resumes_bit_equal(name: str, kind: str, at: int, tmp_path: Path) -> None:
    changes = {"model__peft_config": KINDS[kind], "train__save_interval": 1, "train__batch_size": 6}
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    straight.learn()
    tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at).learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    a, b = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []
    saved = load_file(tmp_path / "straight" / "checkpoints" / "step_00000006" / "model.safetensors")
    assert all("virtual_tokens" in key or not key.startswith("model.") for key in saved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAIN)
def test_an_engine_with_a_copy_of_the_model_trains_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    import researchers.copying  # noqa: F401  (registers the engine)

    ends = []
    for engine in ("local", "_test_copy"):
        trainer = tiny_trainer("ppo", tmp_path / engine, model__peft_config=KINDS[kind], rollout__engine=engine)
        trainer.learn()
        ends.append(trainer.unwrapped.state_dict())
    assert [key for key in ends[0] if not torch.equal(ends[0][key], ends[1][key])] == []


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.daily(base=("path",), kind=("projected prefix",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ["random", "path"])
def test_an_export_is_loaded_by_peft_and_trained_further(kind: str, base: str, tmp_path: Path) -> None:
    model: Any = tiny_gpt2(10)
    if base == "path":
        plain(model).save_pretrained(tmp_path / "base")
        model = str(tmp_path / "base")
    run = tmp_path / "run"
    trainer = tiny_trainer("ppo", run, model__model_path=model, model__peft_config=KINDS[kind], optimizer__lr=0.01)
    trainer.learn()
    trained, export = logits(trainer.unwrapped.model), run / "model"
    assert (export / "base").is_dir() is (base == "random")
    assert set(load_file(export / "adapter_model.safetensors")) == {"prompt_embeddings"}
    loaded = loaded_by_peft(export)
    torch.testing.assert_close(logits(loaded)[:, -8:], trained, rtol=0, atol=1e-6)
    assert "AutoPeftModelForCausalLM" in (export / "README.md").read_text()

    again = tiny_trainer("ppo", tmp_path / "again", model__model_path=str(export), optimizer__lr=0.01)
    again.models.build()
    torch.testing.assert_close(logits(again.unwrapped.model), trained, rtol=0, atol=1e-6)
    assert torch.equal(again.unwrapped.value_head.summary.weight, trainer.unwrapped.value_head.summary.weight)
    again.collect()
    assert again.recorder.pending["policy/kl"].compute() == 0.0
    again.learn()
    further = logits(again.unwrapped.model)
    assert not torch.equal(further, trained)
    once_more = loaded_by_peft(tmp_path / "again" / "model")
    torch.testing.assert_close(logits(once_more)[:, -8:], further, rtol=0, atol=1e-6)


def test_a_reward_model_of_virtual_tokens_scores_as_it_was_trained(tmp_path: Path) -> None:
    trainer = tiny_trainer("reward", tmp_path, model__peft_config=KINDS["prefix"], optimizer__lr=0.05)
    trainer.learn()
    scorer = RewardModel.from_pretrained(tmp_path / "model")
    texts = ["abcd", "hgfe"]
    rows = Sequences.from_lists(scorer._encode(texts, None, None), [[], []], 9)
    with torch.no_grad():
        expected = trainer.unwrapped.eval()(rows)
    torch.testing.assert_close(torch.tensor(scorer(texts)), expected, rtol=0, atol=1e-6)
    assert scorer.limit == 64 - 3 or scorer.limit < 64


def test_an_export_is_not_merged(tmp_path: Path) -> None:
    tiny_trainer("sft", tmp_path / "run", model__peft_config=KINDS["prefix"]).learn()
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run" / "model"), str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "virtual tokens (PREFIX_TUNING), which cannot be merged" in done.output
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ live models


@pytest.mark.daily(kind=("prompt",))
@pytest.mark.parametrize("kind", PLAIN)
def test_a_live_peft_model_is_trained_in_place(kind: str, tmp_path: Path) -> None:
    live = peft_model(plain(tiny_gpt2(10)), make_peft_config(KINDS[kind]))
    given = logits(live)[:, -8:]
    trainer = tiny_trainer("ppo", tmp_path, optimizer__lr=0.01)
    trainer.live_model = live
    trainer.learn()
    trained = logits(live)
    assert trained.shape == given.shape
    assert not torch.allclose(trained, given, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(trainer.reference.policy.model), given, rtol=0, atol=1e-6)
    live.save_pretrained(tmp_path / "saved")
    loaded = loaded_by_peft(tmp_path / "saved", plain(tiny_gpt2(10)))
    torch.testing.assert_close(logits(loaded)[:, -8:], trained, rtol=0, atol=1e-6)
    with live.disable_adapter():
        torch.testing.assert_close(logits(live), logits(plain(tiny_gpt2(10))), rtol=0, atol=1e-6)
    assert torch.equal(logits(live), trained)


@pytest.mark.daily(kind=("p",))
@pytest.mark.parametrize("kind", PLAIN)
def test_a_wrapper_with_a_value_head_reads_the_virtual_tokens(kind: str, tmp_path: Path) -> None:
    plain(tiny_gpt2(10)).save_pretrained(tmp_path / "base")
    wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "base", peft_config=KINDS[kind]).eval()
    assert wrapper.is_peft_model
    found, _, values = wrapper(IDS, attention_mask=REAL)
    assert found.shape == (2, 5, 10)
    assert values.shape == (2, 5)
    policy = make_policy(wrapper.pretrained_model.get_base_model())
    rows = Sequences.from_lists([[1], [6]], [[2, 3, 4, 5], [7, 8]])
    expected = found[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    mask = rows.response_mask[:, 1:]
    torch.testing.assert_close(policy(rows).logprobs[:, 1:][mask], expected[mask], rtol=0, atol=1e-5)
    assert wrapper.generate(input_ids=IDS[:1], max_new_tokens=4, pad_token_id=0).shape[1] > 5

    reference = create_reference_model(wrapper, num_shared_layers=1)
    trainer = tiny_trainer("ppo", tmp_path / "run", optimizer__lr=0.01)
    trainer.live_model = wrapper
    trainer.learn()
    assert not torch.allclose(wrapper(IDS, attention_mask=REAL)[0][REAL], found[REAL], rtol=0, atol=1e-4)
    torch.testing.assert_close(reference(IDS, attention_mask=REAL)[0][REAL], found[REAL], rtol=0, atol=1e-6)
    wrapper.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved").eval()
    for one, other in zip(loaded(IDS)[::2], wrapper.eval()(IDS)[::2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with unwrap_model_for_generation(wrapper, trainer.accelerator, is_peft_model=True) as bare:
        torch.testing.assert_close(bare(IDS)[0], plain(tiny_gpt2(10))(IDS).logits, rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------- what is refused


@table(
    "fields, message",
    [
        ({"peft_type": "PROMPT_TUNING"}, "num_virtual_tokens is None; give PROMPT_TUNING at least 1"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 0}, "num_virtual_tokens is 0; give"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 64}, "64 virtual tokens .* attends to at most 64"),
        ({"peft_type": "CARTRIDGE", "num_virtual_tokens": 3}, "trains PREFIX_TUNING, PROMPT_TUNING, P_TUNING"),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "r": 2}, "r: no field of peft's PROMPT_TUNING"),
        ({**KINDS["p with lstm"], "encoder_dropout": 0.1}, r"encoder_dropout is 0\.1, and model\.disable_dropout"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_a_model_is_loaded(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trainkit.models.loading._load", load)
    with pytest.raises(ConfigError, match=message):
        tiny_trainer("sft", tmp_path, model=tiny_gpt2(10, n_positions=64), model__peft_config=fields)


def test_virtual_tokens_take_their_room_in_the_context(tmp_path: Path) -> None:
    model = tiny_gpt2(10, n_positions=64)
    assert tiny_trainer("sft", tmp_path, model=model, model__peft_config=KINDS["prefix"]).limit == 61
    with pytest.raises(ConfigError, match=r"seq_length is 62; .* at most 61 tokens besides 3 virtual ones"):
        tiny_trainer("sft", tmp_path, model=model, model__peft_config=KINDS["prefix"], train__seq_length=62)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is an encoder-decoder, and .* train causal language models"):
        tiny_trainer("ppo", tmp_path, model=tiny_t5(10), model__peft_config=KINDS["prefix"])


def test_classifiers_are_refused(tmp_path: Path) -> None:
    classifier = {**tiny_llama(10), "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    with pytest.raises(ConfigError, match="is no language model"):
        tiny_trainer("reward", tmp_path, model=classifier, model__peft_config=KINDS["prefix"])


def test_frozen_layers_are_refused_together_with_virtual_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        trainkit.default_config("sft").evolve(model={"peft_config": KINDS["prompt"], "num_layers_unfrozen": 1})
    tiny_trainer("sft", tmp_path / "run", model__peft_config=KINDS["prompt"]).learn()
    saved = str(tmp_path / "run" / "model")
    with pytest.raises(ConfigError, match=r"virtual tokens .* model\.num_layers_unfrozen asks"):
        tiny_trainer("sft", tmp_path, model__model_path=saved, model__num_layers_unfrozen=1)
    with pytest.raises(ConfigError, match=r"virtual tokens .* model\.peft_config asks"):
        tiny_trainer("sft", tmp_path, model__model_path=saved, model__peft_config={"r": 2})
    with pytest.raises(ConfigError, match="already has an adapter"):
        load_model(ModelConfig(peft_config={"r": 2}), prompted(tiny_gpt2(10), "prompt"))


def checkpointing(model: Any) -> None:
    """Enable it: before transformers 5.23 by its other name."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


@table("kind", PLAIN)
def test_gradient_checkpointing_is_refused(kind: str) -> None:
    """With it, layers of transformers drop the cache in training, and the virtual tokens would have no effect."""
    model = prompted(tiny_llama(10), kind)
    checkpointing(model)
    with pytest.raises(ConfigError, match="gradient checkpointing is enabled"):
        model.train()(IDS)
    live = plain(tiny_llama(10))
    checkpointing(live)
    with pytest.raises(ConfigError, match="gradient checkpointing is enabled"):
        load_model(ModelConfig(peft_config=KINDS[kind]), live)


def test_packed_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="put before a row, not before each of its samples"):
        check_packing(prompted(tiny_llama(10), "prefix"))


def test_a_model_that_reads_no_cache_as_peft_expects_is_refused() -> None:
    """A recurrent model."""
    fields = {"model_type": "mamba", "vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    with pytest.raises(ConfigError, match="Please specify `num_attention_heads`"):
        prompted(fields, "prompt")
    config = {"num_virtual_tokens": 3, "num_attention_heads": 2, "peft_type": "PROMPT_TUNING"}
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot be trained with peft_type 'PROMPT_TUNING'"):
        load_model(ModelConfig(peft_config=config), plain(fields))


def test_layers_of_a_critic_are_refused() -> None:
    with pytest.raises(ConfigError, match="has an adapter"):
        CausalPolicy(prompted(tiny_gpt2(10), "prefix"), value_head=True, critic=1)


def test_the_wrapper_takes_no_reward_adapter_beside_virtual_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beside it, and this model has virtual tokens"):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            plain(tiny_gpt2(10)), peft_config=KINDS["prompt"], reward_adapter=str(tmp_path)
        )
