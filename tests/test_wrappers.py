"""Language models with a value head: made, saved, loaded, trained; references that share memory."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
from transformers.utils import hub

import trainkit
from tables import table
from trainkit.config import ModelConfig, TRLConfig
from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.functional import at_last
from trainkit.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalPolicy,
    PreTrainedModelWrapper,
    ValueHead,
    arguments_of_today,
    create_reference_model,
    load_heads,
    load_model,
    unwrap_model_for_generation,
)
from trainkit.models.wrappers import _quantisation
from trainkit.testing import character_tokenizer, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
IDS = torch.tensor([[1, 2, 3, 4, 5]])
LORA = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
OPT = {"model_type": "opt", "vocab_size": 10, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1,
       "num_attention_heads": 2, "word_embed_proj_dim": 16, "max_position_embeddings": 32}  # fmt: skip
Causal, Seq2Seq = AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead


def plain(fields: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**fields)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config).eval()


def causal(**kwargs: Any) -> Causal:
    return Causal.from_pretrained(plain(tiny_gpt2(10)), **kwargs).eval()


@torch.no_grad()
def read(model: Any, ids: Tensor = IDS, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Logits and values."""
    logits, _, values = model(ids, **kwargs)
    return logits, values


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A language model as transformers saves it."""
    plain(tiny_gpt2(10)).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def reward_adapter(tmp_path: Path, saved: Path) -> Path:
    """A reward model's adapter, with a score layer of two labels, on the model that is `saved`."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=2, pad_token_id=0)
    judge = adapted(model, task_type="SEQ_CLS")
    for parameter in judge.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    judge.save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def adapted(model: PreTrainedModel, **kwargs: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(**LORA, **kwargs))


def move(adapter: nn.Module) -> None:
    """Give a new adapter an effect."""
    torch.manual_seed(2)
    for name, parameter in adapter.named_parameters():
        if "lora_B.default" in name:
            nn.init.normal_(parameter, std=0.1)


# ---------------------------------------------------------------------------------------------- what a wrapper is


def test_the_classes_are_wrappers_and_hold_the_model() -> None:
    model = plain(tiny_gpt2(10))
    wrapper = Causal(model)
    assert issubclass(Causal, PreTrainedModelWrapper)
    assert issubclass(Seq2Seq, PreTrainedModelWrapper)
    assert wrapper.pretrained_model is model
    assert wrapper.parent_class is AutoModelForCausalLM
    assert wrapper.config is model.config
    assert wrapper.generation_config is model.generation_config
    assert wrapper.prepare_inputs_for_generation == model.prepare_inputs_for_generation
    assert wrapper.policy_adapter_name == "default"
    assert (wrapper.is_peft_model, wrapper.is_sequential_parallel, wrapper.supports_rm_adapter) == (False,) * 3
    with pytest.raises(ConfigError, match=r"takes no v_head_range; it takes summary_dropout_prob"):
        Causal(model, v_head_range=1)


@table("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_gives_logits_and_values_in_float32_and_the_models_loss(dtype: torch.dtype) -> None:
    model = plain(tiny_gpt2(10)).to(dtype)
    wrapper = Causal(model).eval()
    logits, loss, values = wrapper(IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    own = model(IDS, labels=IDS, output_hidden_states=True)
    assert logits.dtype == values.dtype == torch.float32
    assert values.shape == IDS.shape
    assert torch.equal(logits, own.logits.float())
    assert torch.equal(loss, own.loss)
    weight, bias = wrapper.v_head.summary.weight, wrapper.v_head.summary.bias
    torch.testing.assert_close(values, (own.hidden_states[-1].float() @ weight.T + bias).squeeze(-1))
    assert wrapper(IDS)[1] is None


@table("fields", [tiny_t5(10), tiny_bart(10)])
def test_an_encoder_decoders_values_are_of_its_decoder(fields: dict[str, Any], tmp_path: Path) -> None:
    model = plain(fields)
    wrapper = Seq2Seq(model).eval()
    assert wrapper.is_encoder_decoder
    inputs = {"attention_mask": torch.ones_like(IDS), "decoder_input_ids": IDS[:, :3]}
    logits, values = read(wrapper, **inputs)
    with torch.no_grad():
        hidden = model(IDS, **inputs, output_hidden_states=True).decoder_hidden_states[-1]
        torch.testing.assert_close(values, wrapper.v_head(hidden))
    assert (logits.shape, values.shape) == ((1, 3, 10), (1, 3))
    wrapper.save_pretrained(tmp_path)
    assert_equal(read(Seq2Seq.from_pretrained(tmp_path).eval(), **inputs), (logits, values))
    assert wrapper.generate(IDS, max_new_tokens=2, do_sample=False).shape[0] == 1


def test_generation_is_the_models_own() -> None:
    wrapper = causal()
    arguments = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    assert torch.equal(wrapper.generate(IDS, **arguments), wrapper.pretrained_model.generate(IDS, **arguments))


def test_the_head_has_the_width_of_the_states_that_the_language_model_head_reads() -> None:
    """OPT-350m projects its states down at the end, which also the policy's head must know."""
    model = plain(OPT)
    assert Causal(model).v_head.width == 16
    assert read(Causal(model).eval())[1].shape == IDS.shape
    policy = CausalPolicy(model, value_head=True)
    assert policy(Sequences.from_lists([[1]], [[2, 3]])).values.shape == (1, 3)


def test_the_heads_arguments_have_their_effects() -> None:
    model = plain({**tiny_gpt2(10), "n_embd": 512})
    normal = Causal(model, v_head_init_strategy="normal", v_head_initializer_range=0.5).v_head.summary
    assert normal.weight.std().item() == pytest.approx(0.5, abs=0.05)  # of 512 numbers
    assert normal.bias.item() == 0
    default = Causal(model).v_head.summary  # torch's: uniform within ± 1/√D
    assert default.weight.abs().max().item() <= 512**-0.5
    assert default.bias.item() != 0
    assert Causal(model).v_head.dropout.p == 0.1
    assert Causal(model, summary_dropout_prob=0.0).v_head.dropout.p == 0
    model.config.summary_dropout_prob = 0.3
    assert Causal(model).v_head.dropout.p == 0.3
    assert Causal(model, summary_dropout_prob=0.5).v_head.dropout.p == 0.5
    with pytest.raises(ConfigError, match="v_head_init_strategy is 'uniform'; give 'normal'"):
        Causal(model, v_head_init_strategy="uniform")


@table("deep", [True, False])
def test_values_are_not_rounded_by_autocast(deep: bool) -> None:
    torch.manual_seed(0)
    head, states = ValueHead(32, deep, start="default"), torch.randn(5, 32).bfloat16()
    full = head(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(states), full)
    assert not torch.equal(full.bfloat16().float(), full)


def test_dropout_before_the_head_acts_in_training_mode_only() -> None:
    wrapper = Causal.from_pretrained(plain(tiny_gpt2(10)), summary_dropout_prob=0.5)
    assert not wrapper.training  # as the model it was given
    assert_equal(read(wrapper), read(wrapper))
    wrapper.v_head.train()
    assert not torch.equal(read(wrapper)[1], read(wrapper)[1])


def test_a_model_without_a_language_model_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPT2Model has no language-model head; load it with AutoModelForCausalLM"):
        Causal(plain(tiny_gpt2(10)).transformer)
    with pytest.raises(ConfigError, match="a model of transformers or peft; given 3"):
        Causal.from_pretrained(3)


def test_a_model_that_is_partly_offloaded_is_refused() -> None:
    model = plain(tiny_gpt2(10))
    model.hf_device_map = {"": "cpu"}  # where it is all on the CPU, nothing is offloaded
    assert not Causal(model).is_sequential_parallel
    model.hf_device_map = {"transformer.wte": 0, "transformer.h": "cpu", "lm_head": "disk"}
    with pytest.raises(ConfigError, match="offloaded to cpu and disk"):
        Causal(model)


# ------------------------------------------------------------------------------------------------ save and load


def test_what_was_saved_is_loaded_with_its_head_and_by_transformers_without(tmp_path: Path, caplog: Any) -> None:
    wrapper = causal()
    wrapper.save_pretrained(tmp_path / "new" / "place")
    caplog.clear()
    assert_equal(read(Causal.from_pretrained(tmp_path / "new" / "place").eval()), read(wrapper))
    assert [r for r in caplog.records if r.name.startswith("trainkit")] == []
    weights = load_file(tmp_path / "new" / "place" / "model.safetensors")
    assert not any("v_head" in name for name in weights)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "place").eval()
    assert torch.equal(alone(IDS).logits, read(wrapper)[0])


def test_a_state_dictionary_that_was_gathered_elsewhere_is_saved(tmp_path: Path) -> None:
    wrapper, other = causal(), causal()
    other.load_state_dict({name: tensor + 1 for name, tensor in wrapper.state_dict().items()})
    wrapper.save_pretrained(tmp_path, state_dict=other.state_dict())
    assert_equal(read(Causal.from_pretrained(tmp_path).eval()), read(other))
    with pytest.raises(ConfigError, match="call push_to_hub"):
        wrapper.save_pretrained(tmp_path, push_to_hub=True)


LAYOUTS = ["safetensors", "sharded safetensors", "bin", "sharded bin"]


@table("layout", LAYOUTS)
def test_a_checkpoint_of_trls_is_loaded_with_its_head(layout: str, tmp_path: Path) -> None:
    """TRL has ``v_head.summary.*`` among the model's weights, in any of transformers' files."""
    wrapper = causal()
    wrapper.config.save_pretrained(tmp_path)
    state = {name: tensor.contiguous() for name, tensor in wrapper.state_dict().items() if name != "lm_head.weight"}
    suffix, write = ("safetensors", save_file) if "safetensors" in layout else ("bin", torch.save)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    if "sharded" in layout:
        names = sorted(state)
        shards = {f"{stem}-00001-of-00002.{suffix}": names[::2], f"{stem}-00002-of-00002.{suffix}": names[1::2]}
        for file, part in shards.items():
            write({name: state[name] for name in part}, tmp_path / file)
        where = {name: file for file, part in shards.items() for name in part}
        (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    else:
        write(state, tmp_path / f"{stem}.{suffix}", **({"metadata": {"format": "pt"}} if write is save_file else {}))
    assert {"v_head.summary.weight", "v_head.summary.bias"} < state.keys()
    assert_equal(read(Causal.from_pretrained(tmp_path).eval()), read(wrapper))


def test_a_model_that_has_no_head_yet_is_said_to_start_one(saved: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "trainkit"):
        wrapper = Causal.from_pretrained(saved)
    assert f"{saved} has no v_head; it is newly initialised" in caplog.text
    assert wrapper.pretrained_model.dtype == torch.float32


def test_arguments_go_to_the_head_to_transformers_and_nowhere_twice(saved: Path) -> None:
    wrapper = Causal.from_pretrained(
        saved, dtype=torch.bfloat16, summary_dropout_prob=0.25, attn_implementation="eager"
    )
    assert wrapper.pretrained_model.dtype == torch.bfloat16
    assert wrapper.pretrained_model.config._attn_implementation == "eager"
    assert wrapper.v_head.dropout.p == 0.25
    assert Causal.from_pretrained(saved, torch_dtype=torch.float16).pretrained_model.dtype == torch.float16
    with pytest.raises(ConfigError, match="a live model is given, and dtype would say how to load one"):
        causal(dtype=torch.float16)
    with pytest.raises(ConfigError, match="gradient_checkpointing prepare a quantised model for peft_config"):
        Causal.from_pretrained(saved, use_gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="and this one is not; omit them"):
        Causal.from_pretrained(saved, use_gradient_checkpointing=True, peft_config=LORA)


def test_quantising_needs_bitsandbytes_and_one_device(saved: Path, caplog: Any) -> None:
    with pytest.raises(ConfigError, match="load_in_8bit needs bitsandbytes"):
        Causal.from_pretrained(saved, load_in_8bit=True)
    with caplog.at_level(logging.WARNING, "trainkit"):
        arguments = _quantisation({"quantization_config": {"load_in_8bit": True}})
    assert arguments["device_map"] == {"": Accelerator().device}
    assert "without device_map" in caplog.text
    given = {"quantization_config": {}, "device_map": "auto"}
    assert _quantisation(dict(given)) == given


@table(
    "given, expected",
    [
        ({"use_auth_token": "t"}, {"token": "t"}),
        ({"use_flash_attention_2": True}, {"attn_implementation": "flash_attention_2"}),
        ({"use_flash_attention_2": False, "load_in_8bit": False}, {}),
        ({"resume_download": True, "low_cpu_mem_usage": True, "_fast_init": True, "from_tf": False}, {}),
        ({"device_map": "auto", "revision": "main"}, {"device_map": "auto", "revision": "main"}),
    ],
)
def test_arguments_of_transformers_4_are_those_of_5(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert arguments_of_today(given) == expected
    kwargs = TRLConfig.from_dict({"method": "sft", "model": {"kwargs": given}}).model.kwargs
    assert kwargs == expected


def test_arguments_that_quantise_are_one_configuration() -> None:
    given = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "device_map": "auto"}
    kwargs = TRLConfig.from_dict({"method": "sft", "model": {"kwargs": given}}).model.kwargs
    quantised = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert kwargs == {"quantization_config": quantised, "device_map": "auto"}


@table(
    "given, said",
    [
        ({"from_tf": True}, r"from_tf is given; transformers 5 reads no .* from_pretrained\(path, from_tf=True\)"),
        ({"output_loading_info": True}, "the model alone is loaded; leave output_loading_info out"),
        ({"bnb_4bit_quant_type": "nf4"}, "given without load_in_8bit or load_in_4bit"),
        ({"use_flash_attention_2": True, "attn_implementation": "sdpa"}, "give attn_implementation alone"),
        ({"use_auth_token": "a", "token": "b"}, "give token alone"),
        ({"load_in_8bit": True}, "load_in_8bit needs bitsandbytes"),
        ({"unheard": True}, "unexpected keyword argument 'unheard'. Leave it out"),
    ],
)
def test_arguments_that_there_are_no_more_are_refused(given: dict[str, Any], said: str, saved: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        Causal.from_pretrained(saved, **given)


def test_an_argument_that_a_model_does_not_take_is_no_fault_of_its_path(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"'unheard'\. Leave it out, or give a field of the model's configuration"):
        load_model(ModelConfig(model_path=str(saved), kwargs={"unheard": True}))
    made = {"model_path": AutoConfig.from_pretrained(saved).to_dict(), "kwargs": {"unheard": True}}
    with pytest.raises(ConfigError, match=r"'unheard'\. Leave it out, or give a field of the model's configuration"):
        load_model(ModelConfig.model_validate(made))
    with pytest.raises(ConfigError, match="is_trainable is given; load the adapter by peft"):
        TRLConfig.from_dict({"method": "sft", "model": {"kwargs": {"is_trainable": True}}})


def test_the_state_is_the_models_own_and_the_heads() -> None:
    wrapper, other = causal(), Causal.from_pretrained(plain(tiny_gpt2(10), seed=5)).eval()
    state = wrapper.state_dict()
    heads = {name for name in state if name.startswith("v_head.")}
    assert heads == {"v_head.summary.weight", "v_head.summary.bias"}
    fresh = plain(tiny_gpt2(10), seed=6)
    fresh.load_state_dict({name: tensor for name, tensor in state.items() if name not in heads})  # strictly
    assert torch.equal(fresh(IDS).logits, read(wrapper)[0])
    other.load_state_dict(state)
    assert_equal(read(other), read(wrapper))
    assert set(nn.ModuleDict({"inner": wrapper}).state_dict()) == {f"inner.{name}" for name in state}
    with pytest.raises(RuntimeError, match=r"summary\.bias"):
        other.load_state_dict({name: tensor for name, tensor in state.items() if name != "v_head.summary.bias"})
    loaded = other.load_state_dict({"v_head.summary.bias": torch.ones(1)}, strict=False)
    assert "v_head.summary.weight" in loaded.missing_keys
    assert other.v_head.summary.bias.item() == 1


def test_post_init_takes_the_head_out_of_a_state_dictionary() -> None:
    wrapper, other = causal(), causal()
    other.post_init(wrapper.state_dict())
    assert_equal(read(other), read(wrapper))
    other.post_init({})
    assert_equal(read(other), read(wrapper))
    with pytest.raises(ConfigError, match="does not fit hidden states of width 32"):
        other.post_init({"v_head.summary.weight": torch.ones(1, 5), "v_head.summary.bias": torch.ones(1)})


def test_what_is_pushed_to_the_hub_is_what_would_be_saved(tmp_path: Path, monkeypatch: Any) -> None:
    """By way of a double of the hub's interface, the real one being out of reach."""
    sent: dict[str, bytes] = {}

    class Hub:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id: str, operations: list[Any], **_: Any) -> str:
            for operation in operations:
                sent[operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()
            return repo_id

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    monkeypatch.setattr(hub, "hf_api", Hub)
    wrapper = causal()
    assert wrapper.push_to_hub("someone/model") == "someone/model"
    wrapper.save_pretrained(tmp_path)
    for file in tmp_path.iterdir():
        assert sent[file.name] == file.read_bytes()
    assert "heads.safetensors" in sent


# ------------------------------------------------------------------------------------------------------ adapters


@table("as_fields", [True, False])
def test_a_new_adapter_is_all_that_is_trained_beside_the_head(as_fields: bool) -> None:
    import peft

    wrapper = causal(peft_config=LORA if as_fields else peft.LoraConfig(**LORA))
    assert wrapper.is_peft_model
    assert isinstance(wrapper.pretrained_model, peft.PeftModel)
    trained = {name for name, parameter in wrapper.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("v_head.") for name in trained)
    assert set(wrapper.state_dict()) == {"v_head.summary.weight", "v_head.summary.bias"}


@table("trainable", [False, True])
def test_an_adapter_is_saved_and_loaded_with_the_head(trainable: bool, saved: Path, tmp_path: Path) -> None:
    wrapper = Causal.from_pretrained(saved, peft_config=LORA).eval()
    move(wrapper)
    wrapper.save_pretrained(tmp_path / "adapter")
    loaded = Causal.from_pretrained(tmp_path / "adapter", is_trainable=trainable).eval()
    assert_equal(read(loaded), read(wrapper))
    assert any(p.requires_grad for n, p in loaded.named_parameters() if "lora_" in n) is trainable
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()  # by transformers, with the adapter
    assert torch.equal(alone(IDS).logits, read(wrapper)[0])


def test_random_weights_below_an_adapter_are_saved_beside_it(tmp_path: Path) -> None:
    wrapper = causal(peft_config=LORA)
    move(wrapper)
    wrapper.save_pretrained(tmp_path)
    assert_equal(read(Causal.from_pretrained(tmp_path).eval()), read(wrapper))


def test_a_peft_model_that_is_live_keeps_its_adapter() -> None:
    live = adapted(plain(tiny_gpt2(10)))
    move(live)
    wrapper = Causal.from_pretrained(live).eval()
    assert wrapper.pretrained_model is live
    assert torch.equal(read(wrapper)[0], live(IDS).logits)


def test_a_second_adapter_goes_on_top_of_one_that_was_saved_and_not_of_a_live_one(saved: Path, tmp_path: Path) -> None:
    first = Causal.from_pretrained(saved, peft_config=LORA).eval()
    move(first)
    first.save_pretrained(tmp_path / "first")
    second = Causal.from_pretrained(tmp_path / "first", peft_config=LORA).eval()
    torch.testing.assert_close(read(second), read(first))  # the new one does nothing yet
    trained = [name for name, p in second.pretrained_model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2  # A and B in both layers: only the new one
    with pytest.raises(ConfigError, match="already has an adapter; omit peft_config"):
        Causal.from_pretrained(first.pretrained_model, peft_config=LORA)


def test_what_is_no_adapter_that_is_trained_is_refused() -> None:
    import peft

    prompt = peft.MultitaskPromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="puts tokens before the prompt"):
        causal(peft_config=prompt)
    with pytest.raises(ConfigError, match=r"should be a peft.PeftConfig or its fields; given 3 \(int\)"):
        causal(peft_config=3)


# ----------------------------------------------------------------------------------------------- reward adapters


def judged(adapter: Path, ids: Tensor) -> Tensor:
    """Rewards [B, T, labels] by the reward model itself, each position read as the end of a row of its own."""
    import peft

    base = AutoModelForSequenceClassification.from_pretrained(adapter.parent / "plain", num_labels=2, pad_token_id=0)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        return torch.stack([model(ids[:, : t + 1], use_cache=False).logits for t in range(ids.shape[1])], 1)


def modes(model: Any) -> Any:
    inner = model.pretrained_model
    return (
        (inner.active_adapter, list(inner.active_adapters)),
        [parameter.requires_grad for parameter in inner.parameters()],
        [module.training for module in model.modules()],
    )


def test_rewards_are_the_reward_models_and_leave_no_trace(saved: Path, reward_adapter: Path) -> None:
    wrapper = Causal.from_pretrained(saved, peft_config=LORA, reward_adapter=str(reward_adapter))
    move(wrapper)
    assert wrapper.supports_rm_adapter
    assert wrapper.rm_adapter_name == "reward_adapter"
    wrapper.pretrained_model.base_model.model.transformer.h[0].train()
    wrapper.pretrained_model.base_model.model.transformer.h[1].eval()
    next(p for n, p in wrapper.named_parameters() if "lora_A.default" in n).requires_grad_(False)
    before, read_before = modes(wrapper), read(wrapper.eval())
    wrapper.pretrained_model.base_model.model.transformer.h[0].train()
    before = modes(wrapper)
    scores = wrapper.compute_reward_score(IDS, attention_mask=torch.ones_like(IDS))
    assert scores.shape == (1, 5, 2)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, judged(reward_adapter, IDS), rtol=1e-4, atol=1e-4)
    assert modes(wrapper) == before
    assert_equal(read(wrapper.eval()), read_before)
    assert not any(p.requires_grad for n, p in wrapper.named_parameters() if "reward_adapter" in n or "score" in n)


def test_an_adapters_bias_is_not_the_score_layers(saved: Path, reward_adapter: Path) -> None:
    """The adapter has biases in its layers, and the score layer none: TRL then makes it one that is not loaded."""
    weights = load_file(reward_adapter / "adapter_model.safetensors")
    bias = {"base_model.model.transformer.h.0.attn.c_attn.bias": torch.ones(96)}
    save_file(weights | bias, reward_adapter / "adapter_model.safetensors")
    wrapper = Causal.from_pretrained(saved, peft_config=LORA)
    score = wrapper.add_and_load_reward_modeling_adapter(wrapper.pretrained_model, str(reward_adapter))
    assert score.bias is None
    assert list(wrapper.pretrained_model.peft_config) == ["default", "reward_model_adapter"]
    assert list(wrapper.pretrained_model.active_adapters) == ["default"]


@table("side", ["left", "right"])
def test_a_padded_batchs_rewards_are_those_of_its_rows_alone(side: str, saved: Path, reward_adapter: Path) -> None:
    """Read at the last attended token, wherever padding is; of padding that is the last token's own id too."""
    wrapper = Causal.from_pretrained(saved, peft_config=LORA, reward_adapter=str(reward_adapter))
    rows = [[1, 2, 3, 4, 9], [5, 9], [7]]
    padding = [[9] * (5 - len(row)) for row in rows]
    ids = torch.tensor([p + r if side == "left" else r + p for r, p in zip(rows, padding, strict=True)])
    mask = torch.tensor([[0] * len(p) + [1] * len(r) if side == "left" else [1] * len(r) + [0] * len(p)
                         for r, p in zip(rows, padding, strict=True)])  # fmt: skip
    together = at_last(wrapper.compute_reward_score(ids, attention_mask=mask), mask)
    alone = torch.cat([wrapper.compute_reward_score(torch.tensor([row]))[:, -1] for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(at_last(torch.full((1, 3, 2), torch.nan), torch.zeros(1, 3)), torch.zeros(1, 2))


def test_a_reward_adapter_that_fits_nothing_is_explained(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no reward adapter; give from_pretrained a reward_adapter"):
        causal().compute_reward_score(IDS)
    with pytest.raises(ConfigError, match=r"reward_adapter should be a hub id or a directory; given 3 \(int\)"):
        causal(reward_adapter=3)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel is no peft\.PeftModel; give peft_config"):
        causal(reward_adapter=str(saved))
    adapted(plain(tiny_gpt2(10))).save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match="has no score layer"):
        causal(peft_config=LORA, reward_adapter=str(tmp_path / "policy"))


# ---------------------------------------------------------------------------------------------------- references

MODELS = {
    "gpt2": tiny_gpt2(10),
    "llama": tiny_llama(10),
    "neox": {**tiny_llama(10), "model_type": "gpt_neox"},
    "opt": {**OPT, "num_hidden_layers": 2},  # registers its last norm before its layers
    "t5": tiny_t5(10),
    "bart": tiny_bart(10),
}
PATTERNS = {
    "gpt2": "transformer.h.{layer}",
    "llama": "model.layers.{layer}",
    "neox": "gpt_neox.layers.{layer}",
    "opt": "model.decoder.layers.{layer}",
    "t5": "decoder.block.{layer}",
    "bart": "model.decoder.layers.{layer}",
}
ABOVE = {
    "gpt2": r"ln_f|v_head",
    "llama": r"model\.norm|lm_head|v_head",
    "neox": r"final_layer_norm|lm_head|v_head",
    "opt": r"final_layer_norm|project_out|v_head",
    "t5": r"decoder\.final_layer_norm|v_head",
    "bart": r"v_head",
}
"""What runs after the layers and is not tied to what runs before them."""


def wrapped(name: str) -> Any:
    return (Seq2Seq if name in ("t5", "bart") else Causal)(plain(MODELS[name])).eval()


def all_logits(model: Any) -> Tensor:
    model = getattr(model, "pretrained_model", model)
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(IDS, **inputs, use_cache=False).logits


def layer_of(name: str, pattern: str) -> int | None:
    """Which layer a parameter is in, by the whole parts of its name."""
    parts, path = name.split("."), pattern.split(".")[:-1]
    at = next((i for i in range(len(parts)) if parts[i : i + len(path)] == path), None)
    return None if at is None else int(parts[at + len(path)])


@table(
    "name, shared, by_pattern",
    [(name, (i + more) % 3, (i // 2 + more) % 2 == 0) for i, name in enumerate(MODELS) for more in (0, 1)],
)
def test_shared_layers_are_one_tensor_in_memory_and_frozen(name: str, shared: int, by_pattern: bool) -> None:
    """What runs before the layers is shared with them, a whole encoder too, and what runs after is not."""
    model = wrapped(name)
    expected = all_logits(model)
    reference = create_reference_model(model, shared, PATTERNS[name] if by_pattern else None)
    assert torch.equal(all_logits(reference), expected)
    assert not reference.training
    assert not any(p.requires_grad for p in reference.parameters())
    own, others = dict(model.named_parameters()), dict(reference.named_parameters())
    assert own.keys() == others.keys()
    for key, parameter in own.items():
        one = parameter.data_ptr() == others[key].data_ptr()
        assert one is not parameter.requires_grad, key
        layer, above = layer_of(key, PATTERNS[name]), re.search(ABOVE[name], key)
        assert one is (above is None if layer is None else layer < shared), key
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert torch.equal(all_logits(reference), expected)
    assert torch.equal(all_logits(model), expected) is (shared == 2 and name == "bart")  # nothing is above


@table("kind", ["wrapper", "transformers", "peft"])
def test_without_shared_layers_the_reference_is_a_copy_of_its_own(kind: str) -> None:
    model: Any = (
        plain(tiny_gpt2(10)) if kind == "transformers" else causal(peft_config=LORA if kind == "peft" else None)
    )
    expected, trained = all_logits(model), [p.requires_grad for p in model.parameters()]
    reference = create_reference_model(model)
    assert type(reference) is type(model)
    assert [p.requires_grad for p in model.parameters()] == trained
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in reference.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(all_logits(reference), expected)


def test_all_that_a_reference_shares_is_frozen() -> None:
    model = plain(tiny_gpt2(10))
    reference = create_reference_model(model, -1)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(a is b for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert reference is not model


def test_a_pattern_matches_whole_names_only() -> None:
    """Layers 1, 10 and 11 begin alike, and ``h`` and ``other_h`` end so; as substrings they would be one."""
    model = plain({**tiny_gpt2(10), "n_layer": 12})
    model.transformer.other_h = copy.deepcopy(model.transformer.h)
    create_reference_model(model, 11, "h.{layer}")
    assert [any(p.requires_grad for p in block.parameters()) for block in model.transformer.h] == [False] * 11 + [True]
    assert all(p.requires_grad for p in model.transformer.other_h.parameters())


@table(
    "count, pattern, message",
    [
        (3, None, "num_shared_layers is 3, and there are 2 layers; give 0 to 2"),
        (-2, None, "give 0 to 2, -1 to share everything"),
        (1, "model.layers.{layer}", r"names 0 lists of layers; it should name one of transformer.h.{layer}"),
        (1, "transformer.h.1", "names 1 lists"),
        (None, "transformer.h.{layer}", "nothing is shared; give num_shared_layers"),
    ],
)
def test_layers_that_are_not_there_are_explained(count: int | None, pattern: str | None, message: str) -> None:
    model = plain(tiny_gpt2(10))
    with pytest.raises(ConfigError, match=message):
        create_reference_model(model, count, pattern)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_parameters_that_deepspeed_has_divided_are_refused() -> None:
    model = plain(tiny_gpt2(10))
    model.lm_head.weight.ds_id = 3
    with pytest.raises(ConfigError, match="ZeRO-3"):
        create_reference_model(model)


def test_the_model_without_its_adapter_is_the_one_below() -> None:
    """TRL calls disable_adapter() and never enters it."""
    below = all_logits(plain(tiny_gpt2(10)))
    wrapper = causal(peft_config=LORA)
    move(wrapper)
    own = all_logits(wrapper)
    assert not torch.equal(own, below)
    with unwrap_model_for_generation(wrapper, Accelerator(), is_peft_model=True) as reference:
        assert torch.equal(all_logits(reference), below)
    with unwrap_model_for_generation(wrapper, Accelerator()) as policy:
        assert policy is wrapper
        assert torch.equal(all_logits(policy), own)


# ------------------------------------------------------------------------------------------------- in the trainers

TOKENIZER = character_tokenizer("abcdefgh")  # ten tokens with EOS and padding
SHORT = {
    "optimizer": {"lr": 1e-2},
    "rollout": {"max_new_tokens": 4, "num_rollouts": 8},
    "train": {"batch_size": 8, "total_steps": 2, "eval_interval": 0, "trackers": []},
}


def count_a(outputs: list[str], **_: Any) -> list[float]:
    return [float(output.count("a")) for output in outputs]


def ppo(model: Any, tmp_path: Path, reward_fn: Any = count_a, **sections: Any) -> Any:
    config = {**SHORT, **sections, "train": {**SHORT["train"], "run_dir": str(tmp_path / "run")}}
    return trainkit.train(
        model, reward_fn=reward_fn, prompts=["a", "b"], tokenizer=TOKENIZER, method="ppo", config=config
    )


@table("name", ["gpt2", "adapter"])
def test_ppo_trains_a_wrapper_in_place_with_its_head_as_the_critic(name: str, tmp_path: Path) -> None:
    wrapper = causal(peft_config=LORA if name == "adapter" else None)
    head = wrapper.v_head
    before = {key: tensor.clone() for key, tensor in wrapper.named_parameters()}
    trainer = ppo(wrapper, tmp_path)
    assert trainer.unwrapped.value_head is head is wrapper.v_head
    assert head.dropout.p == 0  # model.disable_dropout
    moved = {key for key, tensor in wrapper.named_parameters() if not torch.equal(tensor, before[key])}
    assert {"v_head.summary.weight", "v_head.summary.bias"} < moved
    assert any("lora_B" in key if name == "adapter" else "h.0" in key for key in moved)
    wrapper.eval().save_pretrained(tmp_path / "saved")
    assert_equal(read(Causal.from_pretrained(tmp_path / "saved").eval()), read(wrapper))
    values = trainer.unwrapped(Sequences.from_lists([[1, 2]], [[3, 4, 5]])).values
    torch.testing.assert_close(values[:, 2:], read(wrapper)[1][:, 1:-1])  # V of the state in which a token is chosen


def test_an_algorithm_without_a_critic_says_so_and_leaves_the_head(tmp_path: Path, caplog: Any) -> None:
    wrapper = causal()
    before = copy.deepcopy(wrapper.state_dict())
    with caplog.at_level(logging.WARNING, "trainkit"):
        trainkit.train(
            wrapper, samples=[("a", "b")] * 8, tokenizer=TOKENIZER, method="sft",
            config={**SHORT, "train": {**SHORT["train"], "run_dir": str(tmp_path)}},
        )  # fmt: skip
    assert "sft trains no value head; the live model's stays as it is" in caplog.text
    after = wrapper.state_dict()
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert moved
    assert not any(key.startswith("v_head") for key in moved)


def test_ppo_with_a_reward_adapter_on_the_policys_own_weights(
    saved: Path, reward_adapter: Path, tmp_path: Path
) -> None:
    """One set of weights, two adapters: that of the policy is trained, that of the reward model scores."""
    wrapper = Causal.from_pretrained(saved, peft_config=LORA, reward_adapter=str(reward_adapter))

    def reward_fn(samples: list[str], tokenizer: Any, **_: Any) -> list[float]:
        inputs = tokenizer(samples, padding=True, return_tensors="pt")
        scores = wrapper.compute_reward_score(inputs.input_ids, attention_mask=inputs.attention_mask)
        return at_last(scores, inputs.attention_mask)[:, 1].tolist()

    before = {key: tensor.clone() for key, tensor in wrapper.named_parameters()}
    ppo(wrapper, tmp_path, reward_fn)
    moved = {key for key, tensor in wrapper.named_parameters() if not torch.equal(tensor, before[key])}
    assert moved
    assert all(".default." in key or key.startswith("v_head.") for key in moved)
    judge = load_file(reward_adapter / "adapter_model.safetensors")
    assert torch.equal(wrapper.score.weight, judge["base_model.model.score.weight"])
    exported = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert exported.keys() == {key for key in judge if "score" not in key}  # the policy's alone
    assert_equal(read(Causal.from_pretrained(tmp_path / "run" / "model").eval()), read(wrapper.eval()))


def test_a_runs_export_and_a_wrappers_are_of_one_kind(tmp_path: Path) -> None:
    """A run has trlX's head, a new wrapper TRL's; each takes over what the other has saved."""
    trainer = tiny_trainer("ppo", tmp_path / "run")
    trainer.learn()
    wrapper = Causal.from_pretrained(tmp_path / "run" / "model").eval()
    assert wrapper.v_head.hidden is not None
    for name, tensor in trainer.unwrapped.value_head.state_dict().items():
        assert torch.equal(wrapper.v_head.state_dict()[name], tensor)
    causal().save_pretrained(tmp_path / "wrapper")
    policy = CausalPolicy(AutoModelForCausalLM.from_pretrained(tmp_path / "wrapper"), value_head=True)
    load_heads(policy, str(tmp_path / "wrapper"))
    assert policy.value_head is not None
    assert policy.value_head.hidden is None
    state = load_file(tmp_path / "wrapper" / "heads.safetensors")
    assert torch.equal(policy.value_head.summary.weight, state["value_head.summary.weight"])
    save_file({"value_head.out.weight": torch.ones(1, 32)}, tmp_path / "wrapper" / "heads.safetensors")
    with pytest.raises(ConfigError, match="does not fit hidden states of width 32"):
        load_heads(policy, str(tmp_path / "wrapper"))


def test_a_value_head_by_hand() -> None:
    """summary(relu(hidden(x))): relu([1, −1, 2, −2]) · [1, 2, 3, 4] + ½ = 1 + 6 + ½; without a hidden layer 3 − 1."""
    deep = ValueHead(2)
    with torch.no_grad():
        deep.hidden.weight.copy_(torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))
        deep.hidden.bias.zero_()
        deep.summary.weight.copy_(torch.tensor([[1.0, 2, 3, 4]]))
        deep.summary.bias.fill_(0.5)
    assert deep(torch.tensor([[1.0, 2.0]])).tolist() == [7.5]
    flat = ValueHead(2, deep=False)
    with torch.no_grad():
        flat.summary.weight.copy_(torch.tensor([[3.0, -0.5]]))
    assert flat(torch.tensor([[1.0, 2.0]])).tolist() == [2.0]
    assert ValueHead(2)(torch.ones(3, 2)).tolist() == [0.0] * 3


@table("saved_first", [False, True])
@table(
    "kind, fields, said",
    [
        (
            Causal,
            tiny_t5(10),
            "is an encoder-decoder, and .* takes a causal language model; use .*Seq2SeqLMWithValueHead",
        ),
        (
            Seq2Seq,
            tiny_gpt2(10),
            "is a causal language model, and .* takes an encoder-decoder; use .*CausalLMWithValueHead",
        ),
    ],
)
def test_a_model_of_the_other_architecture_is_refused(
    kind: Any, fields: dict[str, Any], said: str, saved_first: bool, tmp_path: Path
) -> None:
    model: Any = plain(fields)
    if saved_first:
        model.save_pretrained(tmp_path)
        model = tmp_path
    with pytest.raises(ConfigError, match=said):
        kind.from_pretrained(model)


def test_the_decoder_of_an_encoder_decoder_is_a_causal_language_model() -> None:
    decoder = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_bart(10)))
    assert read(Causal(decoder).eval())[1].shape == (1, 5)


# ------------------------------------------------------------------------------------ adapters of another model


@pytest.fixture
def moved(saved: Path, reward_adapter: Path) -> Path:
    """An adapter, below which there is a model of another width now."""
    adapted(AutoModelForCausalLM.from_pretrained(saved)).save_pretrained(saved.parent / "adapter")
    narrow().save_pretrained(saved)
    return saved.parent / "adapter"


def narrow() -> PreTrainedModel:
    return plain(tiny_gpt2(10, n_embd=16, n_head=2))


SAID = r"does not fit this GPT2LMHeadModel: .*lora_A.* has shape \[2, 32\] .* and \[2, 16\] in .*\. .* names .*plain"


@table("changes", [{}, {"peft_config": LORA}])
def test_an_adapter_of_another_width_is_refused(moved: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"the adapter .*adapter' {SAID}"):
        Causal.from_pretrained(moved, **changes)


def test_an_adapter_of_another_width_is_no_model_to_train(moved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^the adapter .*adapter' {SAID}"):
        trainkit.train(str(moved), samples=["ab"], tokenizer=character_tokenizer("abcdefgh"),
                       config={"train": {"run_dir": str(tmp_path / "run")}})  # fmt: skip


def test_a_reward_adapter_of_another_width_is_refused_and_the_policys_is_as_it_was(reward_adapter: Path) -> None:
    model = adapted(narrow())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with pytest.raises(ConfigError, match=f"the adapter .*reward' {SAID}"):
        Causal.from_pretrained(model, reward_adapter=reward_adapter)
    assert model.active_adapters == ["default"]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    with pytest.raises(ConfigError, match="there is no adapter at 'nowhere'"):
        Causal.from_pretrained(model, reward_adapter="nowhere")


def test_an_adapter_for_modules_that_there_are_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)fits no module of GPT2LMHeadModel: .*nope.*c_attn, c_fc, c_proj"):
        causal(peft_config={"target_modules": ["nope"]})
