"""The model classes of trlX: what they return, save and load, with adapters and with branches, and its checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftType, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
)

from tables import table
from trainkit.errors import ConfigError
from trainkit.models import AutoModelForCausalLMWithValueHead as PlainModel
from trainkit.testing import character_tokenizer
from trainkit_trlx.data.configs import ModelConfig, TokenizerConfig, TRLConfig
from trainkit_trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from trainkit_trlx.models.modeling_ilql import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    ILQLBatch,
)
from trainkit_trlx.models.modeling_ppo import (
    AutoModelForCausalLMWithHydraValueHead,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithHydraValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from trainkit_trlx.trainer.accelerate_ilql_trainer import AccelerateILQLTrainer
from trainkit_trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from trainkit_trlx.trainer.accelerate_sft_trainer import AccelerateSFTTrainer
from trainkit_trlx.utils import OptimizerName, SchedulerName, get_optimizer_class, get_scheduler_class
from trainkit_trlx.utils.modeling import (
    RunningMoments,
    hf_get_decoder,
    hf_get_decoder_blocks,
    hf_get_decoder_final_norm,
    hf_get_hidden_size,
    hf_get_lm_head,
    hf_get_num_hidden_layers,
    make_head,
)

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
V, D, LAYERS = 40, 16, 3
ENDS = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0}
GPT = {"n_layer": LAYERS, "n_embd": D, "n_head": 2, **ENDS}
WIDTHS = {"num_hidden_layers": LAYERS, "hidden_size": D, "num_attention_heads": 2, **ENDS}
T5 = {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 32, "num_layers": LAYERS, "num_heads": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**GPT),
    "gptj": GPTJConfig(rotary_dim=4, **GPT),
    "gpt_bigcode": GPTBigCodeConfig(**GPT),
    "gpt_neox": GPTNeoXConfig(intermediate_size=32, **WIDTHS),
    "opt": OPTConfig(ffn_dim=32, word_embed_proj_dim=D, pad_token_id=1, **WIDTHS),
    "bloom": BloomConfig(n_layer=LAYERS, hidden_size=D, n_head=2, **ENDS),
    "llama": LlamaConfig(intermediate_size=32, **WIDTHS),
    "t5": T5Config(decoder_start_token_id=0, **T5),
    "flan_t5": T5Config(decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **T5),
}
CAUSAL = [name for name in CONFIGS if not CONFIGS[name].is_encoder_decoder]
SEQ2SEQ = [name for name in CONFIGS if CONFIGS[name].is_encoder_decoder]
VALUE = ((AutoModelForCausalLMWithValueHead, CAUSAL), (AutoModelForSeq2SeqLMWithValueHead, SEQ2SEQ))
HYDRA = ((AutoModelForCausalLMWithHydraValueHead, CAUSAL), (AutoModelForSeq2SeqLMWithHydraValueHead, SEQ2SEQ))
ILQL = ((AutoModelForCausalLMWithILQLHeads, CAUSAL), (AutoModelForSeq2SeqLMWithILQLHeads, SEQ2SEQ))
CASES = [(cls, name) for cls, names in (*VALUE, *HYDRA, *ILQL) for name in names]
KINDS = {
    "ppo": (AutoModelForCausalLMWithHydraValueHead, AutoModelForSeq2SeqLMWithHydraValueHead),
    "ilql": (AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads),
}
TRAINERS: dict[str, tuple[Any, Callable[[], TRLConfig]]] = {
    "ppo": (AcceleratePPOTrainer, default_ppo_config),
    "ilql": (AccelerateILQLTrainer, default_ilql_config),
    "sft": (AccelerateSFTTrainer, default_sft_config),
}


@pytest.fixture
def directory(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that makes the directory of a small model of random weights, with a tokenizer."""

    def make(name: str) -> str:
        torch.manual_seed(0)
        auto = AutoModelForSeq2SeqLM if CONFIGS[name].is_encoder_decoder else AutoModelForCausalLM
        auto.from_config(copy.deepcopy(CONFIGS[name])).save_pretrained(tmp_path / name)
        character_tokenizer("abcdefgh").save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


def inputs(name: str) -> dict[str, Tensor]:
    """Return a prompt, and of an encoder-decoder the beginning of an output."""
    found = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    if CONFIGS[name].is_encoder_decoder:
        found |= {"decoder_input_ids": torch.tensor([[0, 9]]), "decoder_attention_mask": torch.ones(1, 2).long()}
    return found


def step(model: Any, given: dict[str, Tensor]) -> None:
    """Change what is trained by a step of an arbitrary loss."""
    outputs = model(**given, return_dict=True)
    loss = outputs.logits.logsumexp(-1).mean() + getattr(outputs, "value", outputs.logits).sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


# -------------------------------------------------------------------------------------------- outputs and saving


@pytest.mark.daily(cls=(KINDS["ppo"][1], KINDS["ilql"][0]), name=("gpt2", "t5"))
@pytest.mark.parametrize(("cls", "name"), CASES)
def test_a_model_runs_samples_and_is_loaded_as_it_was_saved(
    cls: Any, name: str, directory: Any, tmp_path: Path
) -> None:
    model = cls.from_pretrained(directory(name))
    found = model(**inputs(name), return_dict=True)
    length = 2 if CONFIGS[name].is_encoder_decoder else 4
    assert found.logits.shape == (1, length, V)
    assert found.value.shape[:2] == (1, length)
    plain = model(**inputs(name))
    assert torch.equal(plain[0], found.logits)
    assert isinstance(plain, tuple)
    if "ILQL" not in cls.__name__:
        assert torch.equal(plain[-1], found.value)
        given = inputs(name) if name in CAUSAL else {"input_ids": inputs(name)["input_ids"]}
        model.generate(**given, return_dict=True, max_new_tokens=2)
        last = model.v_head[-1]
    else:
        assert model.generate(**inputs(name), max_new_tokens=2).shape[1] <= length + 2
        last = model.ilql_heads.q_heads[0][2]
    last.bias = nn.Parameter(torch.full_like(last.bias, 600.25))
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = cls.from_pretrained(str(tmp_path / "saved"))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert model.state_dict(heads_only=True) if hasattr(model, "v_head") else True
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size = 7
    assert cls.from_config(config).base_model.get_output_embeddings().out_features == 7


@pytest.mark.daily(name=("gpt2", "t5"), unfrozen=(2,))
@pytest.mark.parametrize("unfrozen", [-1, 2])
@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_states_and_logits_of_the_frozen_branch_are_those_of_the_model(
    name: str, unfrozen: int, directory: Any
) -> None:
    cls = KINDS["ppo"][CONFIGS[name].is_encoder_decoder]
    model = cls.from_pretrained(directory(name), num_layers_unfrozen=unfrozen)
    states = "decoder_hidden_states" if CONFIGS[name].is_encoder_decoder else "hidden_states"
    with torch.no_grad():
        found = model(**inputs(name), return_dict=True, output_hidden_states=True)
        frozen = model.forward_hydra(**inputs(name), return_dict=True, output_hidden_states=True)
    assert torch.equal(found.logits, frozen.logits)
    assert torch.equal(found[states][-1], frozen[states][-1])
    if name in CAUSAL:
        assert torch.equal(model.frozen_head.get_output_embeddings()(found[states][-1]), frozen.logits)
    assert not any(parameter.requires_grad for parameter in model.frozen_head.parameters())


def test_positions_are_left_out_where_a_model_takes_none(directory: Any) -> None:
    for name in ("bloom", "gpt2"):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(directory(name))
        expected = model(**inputs(name))[0]
        assert torch.equal(model(**inputs(name), position_ids=torch.arange(4).unsqueeze(0))[0], expected)


@table("name", list(CONFIGS))
def test_parts_of_models_are_found(name: str) -> None:
    config = CONFIGS[name]
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config)
    assert len(hf_get_decoder_blocks(model)) == LAYERS
    assert "Norm" in type(hf_get_decoder_final_norm(model)).__name__
    assert any(block is hf_get_decoder_blocks(model)[0] for block in hf_get_decoder(model).modules())
    assert hf_get_lm_head(model).out_features == V
    assert (hf_get_hidden_size(config), hf_get_num_hidden_layers(config)) == (D, LAYERS)


# ------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.daily(saved=(True,))
@pytest.mark.parametrize(
    ("kind", "name", "saved"),
    [("ppo", "t5", True), ("ilql", "llama", True), ("ppo", "llama", False), ("ilql", "t5", False)],
)
def test_an_adapter_is_saved_alone_and_loaded_with_its_heads(
    kind: str, name: str, saved: bool, directory: Any, tmp_path: Path
) -> None:
    task = "SEQ_2_SEQ_LM" if CONFIGS[name].is_encoder_decoder else "CAUSAL_LM"
    whole = {"llama": ["lm_head"], "t5": ["final_layer_norm"]}[name] if saved else None
    cls = KINDS[kind][CONFIGS[name].is_encoder_decoder]
    config = LoraConfig(task_type=task, r=2, modules_to_save=whole)
    model = cls.from_pretrained(directory(name), peft_config=config)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # the first one leaves what is below a layer of zeros
        step(model, inputs(name))
    trained = ("lora", "v_head", "modules_to_save")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]) != any(word in key for word in trained), key
    model.save_pretrained(str(tmp_path / "saved"))
    files = {file.name for file in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert not {"model.safetensors", "config.json"} & files
    loaded = cls.from_pretrained(str(tmp_path / "saved"))
    for one, other in zip(model(**inputs(name))[:1], loaded(**inputs(name))[:1], strict=True):
        assert torch.equal(one, other)
    values = [each(**inputs(name), return_dict=True).value for each in (model, loaded)]
    assert torch.equal(*values)


def test_the_frozen_model_is_the_one_without_the_adapter(directory: Any, tmp_path: Path) -> None:
    for name in ("gpt2", "t5"):
        cls = KINDS["ppo"][name == "t5"]
        model = cls.from_pretrained(directory(name), peft_config={"peft_type": PeftType.LORA, "r": 2})
        before = model(**inputs(name))[0]
        step(model, inputs(name))
        assert torch.equal(model.forward_hydra(**inputs(name)), before)
        assert not torch.equal(model(**inputs(name))[0], before)
        assert model.frozen_head is None
        model.save_pretrained(str(tmp_path / f"{name}-adapter"))
        loaded = cls.from_pretrained(str(tmp_path / f"{name}-adapter"))
        assert torch.equal(loaded.forward_hydra(**inputs(name)), before)


@pytest.mark.daily(kind_and_name=("ppo gpt2",))
@pytest.mark.parametrize("kind_and_name", ["ppo gpt2", "ppo t5", "ilql gpt2", "ilql t5", "sft gpt2"])
def test_the_model_of_a_trainer_is_what_it_trains(kind_and_name: str, directory: Any) -> None:
    """It has the weights of the policy, adapter and heads; the adapter alone is trained, and can be switched off."""
    kind, name = kind_and_name.split()
    cls, default = TRAINERS[kind]
    path, arch = directory(name), "seq2seq" if name == "t5" else "causal"
    config = default()
    task = "SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM"
    config.model = ModelConfig(path, arch, peft_config=LoraConfig(task_type=task, r=2))
    config.tokenizer = TokenizerConfig(path)
    config.train.tracker, config.train.seq_length = None, 128
    trainer = cls(config)
    model, before = trainer.model, trainer.model(**inputs(name), return_dict=True).logits
    assert any("lora" in key for key in model.state_dict())
    for _ in range(2):
        step(model, inputs(name))
    changed = model(**inputs(name), return_dict=True).logits
    assert not torch.equal(changed, before)
    policy = trainer.unwrapped
    assert torch.equal(policy.model(**inputs(name)).logits, changed)
    if kind == "ppo":
        assert model.v_head is policy.value_head
    elif kind == "ilql":
        assert model.ilql_heads.v_head[2].weight is policy.head.v.summary.weight
        policy.head.sync(1.0)
        assert torch.equal(model.ilql_heads.target_q_heads[1][0].weight, policy.head.q[1].hidden.weight)
    policy.model.disable_adapters()
    assert torch.equal(model(**inputs(name), return_dict=True).logits, before)


# ------------------------------------------------------------------------------------------- checkpoints of trlX


def branch_of_trlx(model: Any, layers: int, head: nn.Module) -> dict[str, Tensor]:
    """Return the weights of trlX's ModelBranch on a model: its upper layers, the norm after them, and a head."""
    state = hf_get_decoder_blocks(model)[-layers:].state_dict()
    norm = hf_get_decoder_final_norm(model).state_dict()
    return {
        **{f"decoder_blocks.{key}": tensor for key, tensor in state.items()},
        **{f"final_norm.{key}": tensor for key, tensor in norm.items()},
        **{f"lm_head.{key}": tensor for key, tensor in head.state_dict().items()},
    }


def write(path: Path, config: PreTrainedConfig, state: dict[str, Tensor]) -> str:
    """Write a checkpoint as trlX did: a configuration, and all weights in one file."""
    path.mkdir()
    config.save_pretrained(path)
    torch.save(state, path / "pytorch_model.bin")
    return str(path)


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{key}": tensor.clone() for key, tensor in state.items()}


@pytest.mark.daily(name=("llama",))
@pytest.mark.parametrize("name", CAUSAL)
def test_values_of_a_checkpoint_are_those_of_its_branch(name: str, tmp_path: Path) -> None:
    """The branch was trained away from the model: values are those of a model that has its layers, and of the head."""
    torch.manual_seed(0)
    config, ids = CONFIGS[name], torch.tensor([[5, 6, 7, 8], [9, 5, 4, 3]])
    base = AutoModelForCausalLM.from_config(config).eval()
    trained, head = copy.deepcopy(base), make_head(D, 1)
    with torch.no_grad():
        for part in (*hf_get_decoder_blocks(trained)[-2:], hf_get_decoder_final_norm(trained)):
            for parameter in part.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        values = head(trained(ids, output_hidden_states=True).hidden_states[-1]).squeeze(-1)
    state = {**under("base_model.", base.state_dict()), **under("v_head.", branch_of_trlx(trained, 2, head))}
    path = write(tmp_path / "trlx", config, state)
    for given in ({}, {"num_value_layers_unfrozen": 2}):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(path, **given)
        torch.testing.assert_close(model(ids)[-1], values)
        torch.testing.assert_close(model(ids)[0], base(ids).logits)
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "saved"))
    torch.testing.assert_close(loaded(ids)[-1], values)
    with pytest.raises(ConfigError, match="is 1, and the value head of the checkpoint has 2 layers of its own; give 2"):
        AutoModelForCausalLMWithValueHead.from_pretrained(path, num_value_layers_unfrozen=1)
    with pytest.raises(ConfigError, match="holds a critic with layers of its own"):
        PlainModel.from_pretrained(str(tmp_path / "saved"))


def test_a_trainer_goes_on_with_the_critic_of_a_checkpoint(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=10, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    base, critic, head = (*(AutoModelForCausalLM.from_config(config).eval() for _ in range(2)), make_head(16, 1))
    state = {**under("base_model.", base.state_dict()), **under("v_head.", branch_of_trlx(critic, 1, head))}
    path = write(tmp_path / "trlx", config, state)
    character_tokenizer("abcdefgh").save_pretrained(path)
    given = default_ppo_config().evolve(
        model={"model_path": path, "num_layers_unfrozen": -1}, tokenizer={"tokenizer_path": path},
        train={"tracker": None, "seq_length": 16, "checkpoint_dir": str(tmp_path / "run")},
        method={"gen_kwargs": {"max_new_tokens": 4}},
    )  # fmt: skip
    trainer = AcceleratePPOTrainer(given, reward_fn=lambda samples: [0.0] * len(samples))
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(trainer.model(ids)[-1], AutoModelForCausalLMWithValueHead.from_pretrained(path)(ids)[-1])
    assert torch.equal(trainer.unwrapped.critic.body.h[1].ln_1.weight, critic.transformer.h[1].ln_1.weight)


def test_the_frozen_branch_of_a_checkpoint_stays_that_of_its_start(tmp_path: Path) -> None:
    """Its head too, which is tied to the embeddings in the model that was trained; it is a trainer's reference."""
    config, ids = CONFIGS["gpt2"], torch.tensor([[5, 6, 7]])
    start = AutoModelForCausalLM.from_config(config).eval()
    trained = copy.deepcopy(start)
    with torch.no_grad():
        for parameter in (*trained.transformer.h[-1].parameters(), trained.transformer.wte.weight):
            parameter += 0.1 * torch.rand_like(parameter)
    compared = copy.deepcopy(trained)
    compared.transformer.h[-1], compared.transformer.ln_f = start.transformer.h[-1], start.transformer.ln_f
    compared.set_output_embeddings(start.lm_head)
    state = {**under("base_model.", trained.state_dict()), **under("v_head.", make_head(D, 1).state_dict())}
    state |= under("frozen_head.", branch_of_trlx(start, 1, start.lm_head))
    path = write(tmp_path / "trlx", config, state)
    model = AutoModelForCausalLMWithHydraValueHead.from_pretrained(path, num_layers_unfrozen=1)
    torch.testing.assert_close(model.forward_hydra(ids), compared(ids).logits)
    torch.testing.assert_close(model(ids)[0], trained(ids).logits)
    given = default_ppo_config().evolve(model={"model_path": path, "num_layers_unfrozen": 1}, train={"tracker": None})
    given.tokenizer.tokenizer_path = path
    character_tokenizer("abcdefgh").save_pretrained(path)
    trainer = AcceleratePPOTrainer(given, reward_fn=lambda samples: [0.0] * len(samples))
    torch.testing.assert_close(trainer.model(ids)[0], trained(ids).logits)
    torch.testing.assert_close(trainer.ref_model(ids).logits, compared(ids).logits)
    torch.testing.assert_close(trainer.model.forward_hydra(ids), compared(ids).logits)
    with pytest.raises(ConfigError, match="num_layers_unfrozen is 0, and the frozen branch of the checkpoint has 1"):
        AutoModelForCausalLMWithHydraValueHead.from_pretrained(path, num_layers_unfrozen=0)


def test_an_adapter_of_trlx_is_loaded_with_its_head(directory: Any, tmp_path: Path) -> None:
    """trlX wrote the adapter as peft does, and the heads alone into pytorch_model.bin."""
    path, ids = directory("llama"), torch.tensor([[5, 6, 7]])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(task_type="CAUSAL_LM", r=2))
    head = make_head(D, 1)
    nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    adapted.save_pretrained(str(tmp_path / "trlx"))
    torch.save(under("v_head.", head.state_dict()), tmp_path / "trlx" / "pytorch_model.bin")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "trlx"))
    states = adapted(ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model(ids)[-1], head(states).squeeze(-1))


def test_a_trainer_of_ilql_goes_on_with_the_heads_of_a_checkpoint(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=10)
    made = AutoModelForCausalLMWithILQLHeads.from_config(config)
    path = write(tmp_path / "trlx", config, made.state_dict())
    character_tokenizer("abcdefgh").save_pretrained(path)
    given = default_ilql_config().evolve(
        model={"model_path": path}, tokenizer={"tokenizer_path": path},
        train={"tracker": None, "seq_length": 16, "checkpoint_dir": str(tmp_path / "run")},
    )  # fmt: skip
    state = AccelerateILQLTrainer(given).model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in made.state_dict().items())


@pytest.mark.daily(kind=("ppo",))
@pytest.mark.parametrize("kind", ["ppo", "ilql", "sft"])
def test_a_trainer_goes_on_with_an_adapter_of_trlx(kind: str, directory: Any, tmp_path: Path) -> None:
    path = directory("llama")
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(task_type="CAUSAL_LM", r=2))
    nn.init.normal_(made.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    heads = AutoModelForCausalLMWithILQLHeads(AutoModelForCausalLM.from_pretrained(path)).ilql_heads
    made.save_pretrained(str(tmp_path / "trlx"))
    state = (
        under("ilql_heads.", heads.state_dict()) if kind == "ilql" else under("v_head.", make_head(D, 1).state_dict())
    )
    torch.save(state, tmp_path / "trlx" / "pytorch_model.bin")
    cls, default = TRAINERS[kind]
    given = default().evolve(
        model={"model_path": str(tmp_path / "trlx"), "num_layers_unfrozen": -1}, tokenizer={"tokenizer_path": path},
        train={"tracker": None, "seq_length": 64, "checkpoint_dir": str(tmp_path / "run")},
    )  # fmt: skip
    trainer = cls(given)
    expected = made(**inputs("llama")).logits
    trainer.models.build()
    torch.testing.assert_close(trainer.unwrapped.model(**inputs("llama")).logits, expected)
    assert any(parameter.requires_grad for parameter in trainer.unwrapped.model.parameters())
    if kind != "sft":
        found = trainer.model.state_dict()
        tensor = state["ilql_heads.v_head.0.weight"] if kind == "ilql" else state["v_head.0.weight"]
        name = "ilql_heads.v_head.0.weight" if kind == "ilql" else "v_head.hidden.weight"
        assert torch.equal(found[name], tensor)


@table(
    "change, words",
    [
        (lambda state: state.pop("base_model.transformer.h.0.ln_1.bias"), "it lacks transformer.h.0.ln_1.bias; give"),
        (lambda state: state.update({"base_model.extra": torch.ones(1)}), "it also has extra; give"),
        (lambda state: state.update({"base_model.transformer.wpe.weight": torch.ones(1)}), "size mismatch"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    config = CONFIGS["gpt2"]
    state = under("base_model.", AutoModelForCausalLM.from_config(config).state_dict())
    state["base_model.transformer.h.0.attn.bias"] = torch.ones(1)  # earlier versions of transformers saved this mask
    AutoModelForCausalLMWithValueHead.from_pretrained(write(tmp_path / "whole", config, state))
    change(state)
    with pytest.raises(ConfigError, match=words):
        AutoModelForCausalLMWithValueHead.from_pretrained(write(tmp_path / "trlx", config, state))


# ------------------------------------------------------------------------------------------------------ utilities


def test_moments_are_tensors_of_the_type_of_their_values() -> None:
    moments, seen = RunningMoments(), []
    for values in (torch.arange(100.0).double(), torch.ones(100).double(), torch.arange(10.0).double().exp()):
        seen.append(values)
        mean, std = moments.update(values)
        assert torch.isclose(mean, values.mean(), atol=1e-6)
        assert torch.isclose(std, values.std(), atol=1e-6)
    every = torch.cat(seen)
    assert torch.isclose(moments.mean, every.mean(), atol=1e-6)
    assert torch.isclose(moments.std, every.std(), atol=1e-6)
    assert torch.isclose(moments.var, every.var(correction=0))
    assert moments.count == 210
    assert moments.update(torch.tensor([1, 2]))[0].dtype == torch.float32


def test_classes_of_optimizers_and_schedules_are_found_by_name() -> None:
    assert get_optimizer_class("adamw") is torch.optim.AdamW  # type: ignore[arg-type]
    assert get_optimizer_class(OptimizerName.SGD) is torch.optim.SGD
    assert get_scheduler_class("cosine_annealing") is torch.optim.lr_scheduler.CosineAnnealingLR  # type: ignore[arg-type]
    assert get_scheduler_class(SchedulerName.LINEAR) is torch.optim.lr_scheduler.LinearLR
    with pytest.raises(ValueError, match="'lion' is no optimizer of trlX; it has adam, adamw"):
        get_optimizer_class("lion")  # type: ignore[arg-type]


def test_eight_bits_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(ImportError, match=r"adamw_8bit_bnb needs bitsandbytes.*pip install bitsandbytes"):
        get_optimizer_class(OptimizerName.ADAMW_8BIT_BNB)


def test_the_batch_of_ilql_is_where_its_loss_is() -> None:
    assert ILQLBatch.__module__ == "trainkit_trlx.data.ilql_types"
