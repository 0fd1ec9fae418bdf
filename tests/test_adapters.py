"""Adapters through peft: for every trainer, from the config to the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit.cli import app
from trainkit.config import ModelConfig
from trainkit.errors import CheckpointError, ConfigError
from trainkit.models import CausalPolicy, Reference, load_model
from trainkit.models.adapters import save_model
from trainkit.testing import tiny_gpt2, tiny_llama
from trainkit.testing.trainers import tiny_trainer

TRAINERS = [name for name in trainkit.available_trainers() if name != "ddpo"]  # of language models
ONLINE = ("best_of_k", "distill", "grpo", "online_dpo", "ppo", "rft", "rloo", "xpo")
LORA = {"r": 4, "target_modules": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": {"r": 2, "use_dora": True, "target_modules": "all-linear"},
    "ia3": {"peft_type": "IA3", "target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "some layers": {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "saved module": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "pissa": {"r": 2, "init_lora_weights": "pissa", "target_modules": ["q_proj"]},
}
PROBE = torch.arange(8).unsqueeze(0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROBE).logits


@pytest.mark.daily(name=("ppo", "sft"))
@pytest.mark.parametrize("name", TRAINERS)
def test_only_the_adapter_is_trained(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, model__peft_config=LORA)
    trainer.models.build()
    before = {key: tensor.clone() for key, tensor in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    moved = {key for key, tensor in trainer.unwrapped.state_dict().items() if not torch.equal(tensor, before[key])}
    assert moved
    assert all("lora_" in key or not key.startswith("model.") for key in moved), "heads are trained beside it"
    assert any("lora_B" in key for key in moved)


@pytest.mark.daily(name=("ppo",), kind=("lora", "pissa"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ONLINE)
def test_kl_is_exactly_zero_before_the_first_update(name: str, kind: str, tmp_path: Path) -> None:
    """Also where the new adapter takes a part of the weights over, so that the model without it is another."""
    trainer = tiny_trainer(name, tmp_path, model=tiny_llama(10), model__peft_config=KINDS[kind])
    trainer.collect()
    own = trainer.needs_reference and trainer.chosen_reference is None
    assert ("policy/kl" in trainer.recorder.pending) == own
    assert not own or trainer.recorder.pending["policy/kl"].compute() == 0.0
    trained = [p for p in trainer.unwrapped.model.parameters() if p.requires_grad]
    assert trained


@table("kind", [kind for kind in KINDS if kind not in ("pissa", "saved module")])
def test_the_reference_is_the_model_without_the_adapter_and_shares_all_of_it(kind: str) -> None:
    """What training does to the adapter does not reach the reference, nor does asking it switch anything."""
    model = load_model(ModelConfig(model_path=tiny_llama(10), peft_config=KINDS[kind]))
    policy = CausalPolicy(model)
    reference = Reference(policy)
    before = logits(reference.policy.model)
    with torch.no_grad():
        for parameter in (p for p in policy.parameters() if p.requires_grad):
            parameter.add_(0.5)
    assert not torch.equal(logits(policy.model), before)
    assert torch.equal(logits(reference.policy.model), before)
    assert not torch.equal(logits(policy.model), before), "asking the reference has not switched the policy's off"
    for own, other in zip(policy.parameters(), reference.policy.parameters(), strict=True):
        assert (own.data_ptr() == other.data_ptr()) is not own.requires_grad


def test_an_adapter_on_the_upper_layers_leaves_a_trunk_that_runs_once() -> None:
    model = load_model(ModelConfig(model_path=tiny_llama(10), peft_config=KINDS["some layers"]))
    assert CausalPolicy(model).trunk.depth == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_run_resumes_bit_equal_from_checkpoints_that_hold_the_adapter_alone(
    name: str, at: int, tmp_path: Path
) -> None:
    changes = {
        "model__peft_config": {**LORA, "lora_dropout": 0.1},
        "model__disable_dropout": False,
        "train__save_interval": 1,
        "train__batch_size": 6,
    }
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    straight.learn()
    tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=at).learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    a, b = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []
    saved = load_file(tmp_path / "straight" / "checkpoints" / "step_00000006" / "model.safetensors")
    assert all("lora_" in key or not key.startswith("model.") for key in saved)


@pytest.mark.daily(name=("dpo",))
@pytest.mark.parametrize("name", TRAINERS)
def test_a_checkpoint_of_an_adapter_does_not_go_onto_other_weights(name: str, tmp_path: Path) -> None:
    """The base is not in the checkpoint; here it comes from a live model, which no setting describes."""

    def trainer(seed: int, **changes: Any) -> Any:
        torch.manual_seed(seed)
        live = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(10)))
        made = tiny_trainer(name, tmp_path, model__peft_config=LORA, train__save_interval=3, **changes)
        made.live_model = live
        return made

    trainer(1, train__total_steps=3).learn()
    with pytest.raises(CheckpointError, match="another initial model"):
        trainer(2, train__resume="auto").learn()
    again = trainer(1, train__resume="auto")
    again.learn()
    assert again.progress.step == 6


@pytest.mark.daily(name=("ppo",), kind=("lora",), base=("path",))
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("kind", ["lora", "saved module", "pissa"])
@pytest.mark.parametrize("base", ["random", "path"])
def test_an_export_loads_in_transformers_merges_and_goes_on(name: str, kind: str, base: str, tmp_path: Path) -> None:
    model: Any = tiny_llama(10)
    if base == "path":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).save_pretrained(tmp_path / "base")
        model = str(tmp_path / "base")
    trainer = tiny_trainer(
        name, tmp_path / "run", model__model_path=model, model__peft_config=KINDS[kind], optimizer__lr=0.01
    )
    trainer.learn()
    trained = logits(trainer.unwrapped.model)
    export, merged = tmp_path / "run" / "model", tmp_path / "merged"
    assert (export / "base").is_dir() is (base == "random" or kind == "pissa")
    assert not (export / "model.safetensors").exists()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(export)), trained, rtol=0, atol=1e-6)

    done = CliRunner().invoke(app, ["export", str(export), str(merged)])
    assert done.exit_code == 0, done.output
    plain = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(logits(plain), trained, rtol=0, atol=1e-5)
    assert not hasattr(plain, "peft_config")
    heads = [key for key in trainer.unwrapped.state_dict() if not key.startswith("model.")]
    assert (merged / "heads.safetensors").exists() is bool(heads)
    assert AutoTokenizer.from_pretrained(merged).eos_token == "<eos>"

    again = tiny_trainer(
        name, tmp_path / "again", model__model_path=str(export), model__peft_config=KINDS[kind], optimizer__lr=0.01
    )
    again.models.build()
    torch.testing.assert_close(logits(again.unwrapped.model), trained, rtol=0, atol=1e-5)
    again.learn()  # an adapter on an adapter: its export has both
    done = CliRunner().invoke(app, ["export", str(tmp_path / "again" / "model"), str(tmp_path / "both")])
    assert done.exit_code == 0, done.output
    both = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "both"))
    torch.testing.assert_close(both, logits(again.unwrapped.model), rtol=0, atol=1e-5)
    assert not torch.allclose(both, trained, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_live_peft_model_is_trained_in_place_and_its_reference_is_the_adapter_as_given(tmp_path: Path) -> None:
    import peft

    torch.manual_seed(0)
    live = peft.get_peft_model(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10))),
        peft.LoraConfig(r=2, init_lora_weights=False),
    )
    before = {key: tensor.clone() for key, tensor in live.state_dict().items()}
    given = logits(live)
    trainer = tiny_trainer("ppo", tmp_path)
    trainer.live_model = live
    trainer.learn()
    moved = [key for key, tensor in live.state_dict().items() if not torch.equal(tensor, before[key])]
    assert moved
    assert all("lora_" in key for key in moved)
    torch.testing.assert_close(logits(trainer.reference.policy.model), given, rtol=0, atol=0)
    export = tmp_path / "model"
    assert (export / "adapter_config.json").exists()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(export)), logits(live), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@table("what", ["nothing to train", "two adapters"])
def test_a_live_model_whose_adapters_do_not_say_what_to_train_is_refused(what: str, tmp_path: Path) -> None:
    import peft

    live = peft.get_peft_model(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10))), peft.LoraConfig(r=2)
    )
    if what == "two adapters":
        live.add_adapter("more", peft.LoraConfig(r=2))
        live.base_model.set_adapter(["default", "more"])
    else:
        live.requires_grad_(False)
    trainer = tiny_trainer("sft", tmp_path)
    trainer.live_model = live
    with pytest.raises(
        ConfigError, match="default, more, of which 2 are active" if what == "two adapters" else "is_trainable=True"
    ):
        trainer.learn()


def test_a_peft_object_says_what_its_fields_say() -> None:
    import peft

    given = peft.LoraConfig(r=3, lora_alpha=5, target_modules={"v_proj", "q_proj"}, use_rslora=True)
    plain = ModelConfig(peft_config=given).peft_config  # type: ignore[arg-type]
    assert plain == {
        "peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "use_rslora": True
    }  # fmt: skip
    fields = ModelConfig(peft_config=given.to_dict()).peft_config or {}  # the type is an enumeration there
    assert plain.items() <= fields.items()


@table(
    "fields, message",
    [
        ({"target_modules": ["nope"]}, r"fits no module of GPT2LMHeadModel.*nope.*\n.*c_attn.*c_fc.*c_proj"),
        ({"r": 0}, r"r is 0, the rank of the adapter; give 1 or more"),
        ({"lora_dropout": 0.1}, r"lora_dropout is 0\.1, and model\.disable_dropout switches all dropout off"),
        ({"rank": 4}, r"peft_config.rank: no field of peft's LORA"),
        ({"peft_type": "LORRA"}, r"unknown type of adapter; did you mean 'LORA'\?; known: .*IA3"),
        ({"peft_type": "CARTRIDGE", "num_virtual_tokens": 3}, "tokens before the prompt"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_a_model_is_loaded(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trainkit.models.loading._load", load)
    with pytest.raises(ConfigError, match=message):
        tiny_trainer("sft", tmp_path, model__peft_config=fields)


def test_adapter_and_frozen_layers_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of the two"):
        trainkit.default_config("sft").evolve(model={"peft_config": LORA, "num_layers_unfrozen": 1})


def test_merging_what_does_not_merge_is_an_explained_error(tmp_path: Path) -> None:
    tiny_trainer("sft", tmp_path / "run", model__peft_config=LORA, train__total_steps=1).learn()
    export, out, full = tmp_path / "run" / "model", tmp_path / "out", tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("x")

    def said(*arguments: Path | str) -> str:
        done = CliRunner().invoke(app, ["export", str(export), *map(str, arguments)])
        assert done.exit_code == 2
        return done.output

    assert "not empty" in said(full)
    assert "--base" in said(out, "--base", tmp_path / "gone")
    (export / "adapter_config.json").unlink()
    assert "holds neither a model" in said(out)


@table("start", [True, "pissa"])
def test_a_model_whose_adapter_cannot_be_saved_is_as_it_was(start: bool | str, tmp_path: Path) -> None:
    fields = {"init_lora_weights": start, "target_modules": ["q_proj"]}
    model = load_model(ModelConfig(model_path=tiny_llama(10), peft_config=fields))
    config = model.peft_config["default"]
    before = dict(vars(config))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "adapter_model.safetensors").mkdir()  # no file can be written there
    with pytest.raises(Exception, match="Is a directory"):
        save_model(model, tmp_path / "export", tmp_path / "model")
    assert vars(config) == before


def test_a_live_model_that_was_frozen_takes_an_adapter() -> None:
    """As one prepared for training with few bits is."""
    live = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10))).requires_grad_(False)
    model = load_model(ModelConfig(peft_config=LORA), live)
    assert model is live
    assert {"lora_A", "lora_B"} == {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad}
