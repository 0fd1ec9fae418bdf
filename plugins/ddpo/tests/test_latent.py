"""DDPO through diffusers: on a Stable Diffusion made of tiny configurations, with random weights."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tables import table
from trainkit.errors import ConfigError, DataError, PluginError
from trainkit.testing.trainers import tiny_trainer
from trainkit_ddpo import LatentPipeline, ddim_mean
from trainkit_ddpo.latent import scheduled_noise

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LORA = {"r": 2}
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def tiny_pipe() -> Any:
    """Images of 8 × 8 from latents of 4 × 4, prompts of at most six letters; the scheduler of Stable Diffusion 1."""
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    size = len(tokens)
    unet = UNet2DConditionModel(
        sample_size=4, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8), norm_num_groups=2, sample_size=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=size - 1,
    )  # fmt: skip
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=8),
        unet=unet,
        scheduler=PNDMScheduler(**NOISE, skip_prk_steps=True, steps_offset=1, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The pipeline's directory, as it may come from a hub."""
    path = tmp_path_factory.mktemp("sd")
    tiny_pipe().save_pretrained(path)
    return str(path)


def latent_trainer(path: str, run_dir: Path, **changes: Any) -> Any:
    return tiny_trainer("ddpo", run_dir, model__model_path=path, **{"method__num_steps": 4, **changes})


# ------------------------------------------------------------------------------------------------ the steps


@table("prediction", ["epsilon", "v_prediction", "sample"])
@table("clip", [False, True])
@table("spacing", [{"steps_offset": 1, "set_alpha_to_one": False}, {"timestep_spacing": "trailing"}])
@table("eta", [0.3, 1.0])
def test_steps_are_those_of_diffusers(prediction: str, clip: bool, spacing: dict[str, Any], eta: float) -> None:
    """Every one of eight, the last among them, which leads to the final ᾱ."""
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(**NOISE, prediction_type=prediction, clip_sample=clip, **spacing)
    scheduler.set_timesteps(8)
    steps = scheduled_noise(scheduler.config, 8).steps(eta)
    draws = torch.Generator().manual_seed(0)
    x, out, z = (torch.randn(2, 4, 3, 3, generator=draws) for _ in range(3))
    for index, t in enumerate(scheduler.timesteps):
        at = torch.full((2,), index)
        numbers = (steps.alphas[at], steps.previous[at], steps.sigmas[at])
        mean = ddim_mean(x, out, *numbers, prediction=steps.noise.prediction, clip=steps.noise.clip)
        theirs = scheduler.step(out, int(t), x, eta=eta, variance_noise=z).prev_sample
        torch.testing.assert_close(mean + steps.sigmas[index].float() * z, theirs, atol=2e-5, rtol=1e-4)
    assert len(steps.trained) == (8 if "steps_offset" in spacing else 7)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, LORA])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("size", [None, 3])
def test_before_the_first_update_the_ratio_is_one(
    saved: str, adapter: Any, precision: str, size: int | None, tmp_path: Path
) -> None:
    """Under guidance, with what is frozen held in half where the network computes in half."""
    trainer = latent_trainer(saved, tmp_path, model__peft_config=adapter, train__mixed_precision=precision)
    trainer.collect()
    batch = trainer.store.experience
    half = torch.bfloat16 if precision == "bf16" else torch.float32
    assert batch.latents.dtype == batch.condition.kept.dtype == half
    for micro in batch.split(size):
        ratio = trainer.updater.measure(micro)[1]["policy/ratio"].compute()
        assert ratio == pytest.approx(1.0, abs=1e-6 if size is None else 1e-5)
    named = dict(trainer.unwrapped.named_parameters())
    assert {p.dtype for p in named.values() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in named.values() if not p.requires_grad} == {half}
    assert all("network" in name for name, p in named.items() if p.requires_grad)


def test_images_are_those_of_the_pipeline_itself(saved: str, tmp_path: Path) -> None:
    """diffusers' own loop at η = 1, given the same noise, guidance and negative prompt."""
    from diffusers import DDIMScheduler

    trainer = latent_trainer(saved, tmp_path, method__guidance_scale=3.0, method__negative_prompt="b")
    trainer.models.build()
    policy = trainer.unwrapped
    noise = torch.randn((2, 5, 4, 4, 4), generator=torch.Generator().manual_seed(0))
    pipe = tiny_pipe()
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    steps = iter(noise.unbind(1)[1:])
    honest = pipe.scheduler.step
    pipe.scheduler.step = lambda *given, eta, generator, **rest: honest(
        *given, eta=eta, variance_noise=next(steps), **rest
    )
    theirs = pipe(
        ["a", "cd"], negative_prompt=["b", "b"], latents=noise[:, 0], num_inference_steps=4, eta=1.0,
        guidance_scale=3.0, output_type="pt",
    ).images  # fmt: skip
    assert policy.clip is None, "PNDM's configuration says nothing of clipping; DDIM's default would clip latents"
    latents, _ = policy.sample(policy.pipeline.encode(["a", "cd"]), noise, torch.float32)
    torch.testing.assert_close(policy.pipeline.decode(latents[:, -1]), theirs, atol=1e-4, rtol=0)


# -------------------------------------------------------------------------------------- training and after it


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {**LORA, "init_lora_weights": "gaussian"}])
def test_only_the_network_or_its_adapter_is_trained_and_the_export_makes_the_same_images(
    saved: str, adapter: Any, tmp_path: Path
) -> None:
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    trainer = latent_trainer(saved, tmp_path / "run", model__peft_config=adapter, train__total_steps=3)
    trainer.models.build()
    before = {name: value.clone() for name, value in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    moved = [name for name, value in trainer.unwrapped.state_dict().items() if not torch.equal(value, before[name])]
    assert moved
    assert all(name.startswith("pipeline.network.") for name in moved)
    assert adapter is None or all("lora_" in name for name in moved)
    row, export = {"prompt": "a", "seed": 1}, tmp_path / "run" / "model"
    images = trainer.generate(row).images
    again = latent_trainer(str(export), tmp_path / "again")
    torch.testing.assert_close(again.generate(row).images, images, atol=1e-5, rtol=0)
    theirs = StableDiffusionPipeline.from_pretrained(export, safety_checker=None)
    assert isinstance(theirs.scheduler, PNDMScheduler)
    if adapter is not None:
        loaded = StableDiffusionPipeline.from_pretrained(saved, safety_checker=None)
        loaded.load_lora_weights(export)
        loaded.fuse_lora()
        x, at, condition = torch.randn(1, 4, 4, 4), torch.tensor([5]), torch.randn(1, 8, 16)
        found = [p.unet(x, at, encoder_hidden_states=condition).sample for p in (loaded, theirs)]
        torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_run_with_an_adapter_resumes_bit_equal_and_checkpoints_hold_the_adapter_alone(
    saved: str, at: int, tmp_path: Path
) -> None:
    changes = {
        "model__peft_config": LORA, "train__save_interval": 1, "train__batch_size": 12, "method__min_count": 1,
        "train__mixed_precision": "bf16",
    }  # fmt: skip
    straight = latent_trainer(saved, tmp_path / "straight", **changes)
    straight.learn()
    latent_trainer(saved, tmp_path / "stopped", **changes, train__total_steps=at).learn()
    resumed = latent_trainer(saved, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    a, b = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []
    assert straight.tracker.rewards == resumed.tracker.rewards
    held = load_file(tmp_path / "straight" / "checkpoints" / "step_00000006" / "model.safetensors")
    assert held
    assert all("lora_" in key for key in held)


def test_what_is_frozen_stays_as_it_samples_while_the_network_trains(saved: str, tmp_path: Path) -> None:
    """Or dropout of the text encoder would make another condition of the same prompt."""
    trainer = latent_trainer(saved, tmp_path)
    trainer.models.build()
    trainer.policy.train()
    pipeline = trainer.unwrapped.pipeline
    assert all(module.training for module in pipeline.network.modules())
    assert not any(module.training for part in (pipeline.vae, pipeline.text_encoder) for module in part.modules())
    trainer.policy.eval()
    assert not any(module.training for module in pipeline.modules())


@pytest.mark.slow
def test_a_live_pipeline_is_trained_in_place(tmp_path: Path) -> None:
    import trainkit

    pipe = tiny_pipe()
    before = copy.deepcopy(pipe.unet.state_dict())
    trainkit.train(
        pipe,
        method="ddpo",
        reward_fn=lambda images, **_: images.flatten(1).mean(1),
        prompts=[{"prompt": "a"}, {"prompt": "bc"}],
        config={
            "method": {"num_steps": 3},
            "rollout": {"num_rollouts": 4},
            "train": {"total_steps": 1, "batch_size": 12, "run_dir": str(tmp_path), "trackers": []},
        },
    )
    assert any(not torch.equal(value, before[name]) for name, value in pipe.unet.state_dict().items())
    assert (tmp_path / "model" / "model_index.json").is_file()


@pytest.mark.slow
def test_the_negative_prompt_leads_away(saved: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "seed": 1}
    plain, led = (
        latent_trainer(saved, tmp_path, method__negative_prompt=negative).generate(row).images
        for negative in ("", "zz")
    )
    assert not torch.allclose(plain, led, atol=1e-4)


# -------------------------------------------------------------------------------------------------- bad input


def test_prompts_that_the_text_encoder_would_cut_are_refused_cut_or_dropped(
    saved: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["abc", "abcdefghij"]
    with pytest.raises(DataError, match="prompt 1 has more tokens"):
        latent_trainer(saved, tmp_path).add_prompt_pipeline(prompts)
    kept = {}
    for how in ("truncate", "drop"):
        trainer = latent_trainer(saved, tmp_path, rollout__overlong_prompts=how)
        trainer.add_prompt_pipeline(prompts)
        kept[how] = [row["prompt"] for row in trainer.pipeline.rows]
    assert kept == {"truncate": prompts, "drop": ["abc"]}
    assert "1 of 2 prompts were truncated" in caplog.text
    with pytest.raises(DataError, match="none is left"):
        trainer.add_prompt_pipeline(prompts[1:])


def test_a_pipeline_of_another_kind_is_refused() -> None:
    second = SimpleNamespace(components={**tiny_pipe().components, "text_encoder_2": object()})
    with pytest.raises(ConfigError, match="has text_encoder_2 too"):
        LatentPipeline(second)
    with pytest.raises(ConfigError, match="lacks vae, text_encoder, tokenizer, scheduler"):
        LatentPipeline(SimpleNamespace(components={"unet": object()}))


@pytest.mark.slow
def test_a_directory_that_holds_nothing_is_an_explained_error(saved: str, tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    with pytest.raises(ConfigError, match=r"(?s)cannot be loaded.*Stable Diffusion pipeline"):
        latent_trainer(str(tmp_path / "nothing"), tmp_path)
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps({**NOISE, "thresholding": True}))
    CLIPTokenizer.from_pretrained(saved, subfolder="tokenizer").save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="dynamic thresholding"):
        latent_trainer(str(tmp_path), tmp_path)


@pytest.mark.slow
def test_without_diffusers_latents_are_an_explained_error_and_pixels_train(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "diffusers"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "diffusers").mkdir()
    (tmp_path / "diffusers" / "__init__.py").write_text("raise RuntimeError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"needs? diffusers.*RuntimeError: built for another torch.*trainkit-ddpo\[diffusers\]"
    with pytest.raises(PluginError, match=said):
        latent_trainer(saved, tmp_path / "latent")
    trainer = tiny_trainer("ddpo", tmp_path / "pixels", train__total_steps=1)
    trainer.learn()
    assert trainer.progress.step == 1


@pytest.mark.slow
def test_the_card_of_an_export_says_how_diffusers_loads_it(saved: str, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    directory = latent_trainer(saved, tmp_path / "run", model__peft_config=LORA).save_pretrained()
    card = (directory / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: diffusers\npipeline_tag: text-to-image\n")
    found: dict[str, Any] = {"directory": directory}
    exec(card.partition("```python\n")[2].partition("```")[0], found)
    assert isinstance(found["pipeline"], StableDiffusionPipeline)
