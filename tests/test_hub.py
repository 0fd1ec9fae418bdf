"""Models by their id on the hub, of which a cache holds what was downloaded: heads, adapters and their bases."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tables import table
from trainkit.config import ModelConfig, TRLConfig
from trainkit.errors import ConfigError
from trainkit.models import AutoModelForCausalLMWithValueHead, CausalPolicy, RewardModel, load_heads, load_model
from trainkit.models.loading import load_frozen, load_tokenizer
from trainkit.testing import tiny_llama
from trainkit.testing.trainers import tiny_trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
IDS = torch.arange(8).unsqueeze(0)
LORA = {"r": 2, "target_modules": ["q_proj"]}


class Cache:
    """A directory as huggingface_hub fills it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def publish(self, repository: str, directory: Path, revision: str = "main") -> str:
        """Have the repository hold at the revision what the directory holds; gives its id."""
        place = self.path / f"models--{repository.replace('/', '--')}"
        commit = hashlib.sha1(revision.encode(), usedforsecurity=False).hexdigest()
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / revision).write_text(commit)
        shutil.copytree(directory, place / "snapshots" / commit)
        return repository


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Not where huggingface_hub looks unless told."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    return Cache(tmp_path / "cache")


def language_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10))).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("name", ["ppo", "ilql"])
def test_training_goes_on_with_the_heads_of_an_export_on_the_hub(name: str, cache: Cache, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path / "run", optimizer__lr=0.01)
    trainer.learn()
    language_model().save_pretrained(tmp_path / "plain")
    cache.publish("someone/model", tmp_path / "plain")
    path = cache.publish("someone/model", tmp_path / "run" / "model", revision="trained")
    where = {"cache_dir": str(cache.path), "revision": "trained"}
    again = tiny_trainer(name, tmp_path / "again", model__model_path=path, model__kwargs=where)
    again.models.build()
    before, found = trainer.unwrapped.state_dict(), again.unwrapped.state_dict()
    heads = [key for key in before if not key.startswith("model.")]
    assert heads
    assert [key for key in heads if not torch.equal(found[key], before[key])] == []


def test_a_policy_takes_over_the_head_that_trl_has_among_the_weights(cache: Cache, tmp_path: Path) -> None:
    wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(language_model())
    wrapper.pretrained_model.save_pretrained(tmp_path / "trl")
    weights = tmp_path / "trl" / "model.safetensors"
    head = {f"v_head.{key}": tensor for key, tensor in wrapper.v_head.state_dict().items()}
    save_file({**load_file(weights), **head}, weights, {"format": "pt"})
    path, where = cache.publish("someone/trl", tmp_path / "trl"), {"cache_dir": str(cache.path)}
    model = load_model(ModelConfig(model_path=path, kwargs=where))
    policy = load_heads(CausalPolicy(model, value_head=True), path, where)
    assert policy.value_head is not None
    assert torch.equal(policy.value_head.summary.weight, wrapper.v_head.summary.weight)


def test_a_reward_model_is_read_from_the_hub_as_from_its_directory(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head, and that it was trained on texts as they are, whatever template its tokenizer has."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.path))
    tiny_trainer("reward", tmp_path / "run").learn()
    export = tmp_path / "run" / "model"
    tokenizer = AutoTokenizer.from_pretrained(export)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(export)
    local, other = (RewardModel.from_pretrained(path) for path in (export, cache.publish("someone/reward", export)))
    assert not other.chat
    assert other(["ab", "c"]) == local(["ab", "c"])

    (export / "heads.safetensors").unlink()
    with pytest.raises(ConfigError, match="'someone/words' is a language model without a head for scores"):
        RewardModel.from_pretrained(cache.publish("someone/words", export))
    save_file({"value_head.summary.weight": torch.zeros(1, 32)}, export / "heads.safetensors")
    with pytest.raises(ConfigError, match="without a head for scores"):
        RewardModel.from_pretrained(export)


def test_an_adapter_on_the_hub_is_merged_into_its_base_whose_revision_is_its_own(cache: Cache, tmp_path: Path) -> None:
    import peft

    language_model().save_pretrained(tmp_path / "base")
    base = cache.publish("someone/base", tmp_path / "base")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(language_model(), peft.LoraConfig(**LORA, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": base}))
    path = cache.publish("someone/adapter", tmp_path / "adapter", revision="trained")
    where = {"cache_dir": str(cache.path), "revision": "trained"}
    expected = logits(adapted)
    assert not torch.allclose(logits(language_model()), expected, atol=1e-3)
    model = load_model(ModelConfig(model_path=path, kwargs=where))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    for more in ({}, {"peft_config": LORA}):  # the adapter itself, and merged below a new one
        wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(path, **where, **more).eval()
        torch.testing.assert_close(logits(wrapper.pretrained_model), expected, rtol=0, atol=1e-5)
    local = ModelConfig(model_path=str(tmp_path), kwargs={**where, "subfolder": "adapter"})
    torch.testing.assert_close(logits(load_model(local)), expected, rtol=0, atol=1e-5)


@table("key", ["model.model_path", "tokenizer.tokenizer_path", "model.reference_path"])
def test_a_directory_that_is_not_there_is_said_to_be_not_there(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also relative ones; the nearest name is suggested. What can be an id of the Hub is none of them."""
    good = tmp_path / "runs" / "sft" / "model"
    good.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def said(path: str) -> str:
        config = TRLConfig(method="dpo").update({"model.model_path": "some/model", key: path})
        frozen = key == "model.reference_path"
        with pytest.raises(ConfigError) as raised:
            load_frozen(config.model, path, key) if frozen else load_tokenizer(config)
        return str(raised.value)

    place = str(good.parent / "modle")
    assert said(place).startswith(
        f"{key} is {place!r}, and there is no directory {place!r}; did you mean {str(good)!r}? Give a hub"
    )
    assert "and there is no directory 'runs/sft/modle'; did you mean 'runs/sft/model'?" in said("runs/sft/modle")
    assert "and there is no directory 'run'; did you mean 'runs'?" in said("run/sft/model")
    assert "and there is no directory 'runs/stf'; did you mean 'runs/sft'?" in said("runs/stf")
    assert "and there is no directory '../nothing'." in said("../nothing")
    assert f"{key} is '/{'x' * 300}', and there is no " in said(f"/{'x' * 300}")
    for hub_id in ("gpt2-nope", "somebody/gpt2-nope"):
        assert f"{hub_id!r} ({key}) cannot be loaded" in said(hub_id)
    assert "There is no such directory; did you mean 'runs/sft'? Give" in said("rusn/sft")
