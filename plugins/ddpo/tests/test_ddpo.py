"""DDPO on pixels: experience, loss, what is refused, what is left to look at, and that it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import trainkit
from tables import table
from trainkit.errors import ConfigError, DataError
from trainkit.testing.trainers import tiny_trainer
from trainkit_ddpo import Conditions, DDPOBatch, ImagePipeline, ImageRollouts, Noise, PixelPipeline, save_grid, to_pil

PIXELS = {"model_type": "pixel_unet", "image_size": 8, "width": 8, "prompts": ["a", "b"]}


def collected(run_dir: Path, **changes: Any) -> Any:
    trainer = tiny_trainer("ddpo", run_dir, **changes)
    trainer.collect()
    return trainer


# ------------------------------------------------------------------------------------------------- experience


def test_an_image_is_a_row_for_each_of_its_steps_that_draws_something(tmp_path: Path) -> None:
    """Three steps, the last of which only computes: its ᾱ is 1, its σ 0."""
    trainer = collected(tmp_path)
    batch = trainer.store.experience
    assert len(batch) == trainer.experience_rows == 8 * 2
    assert batch.steps.view(8, 2).sort(1).values.tolist() == [[0, 1]] * 8
    for image in range(8):
        first, second = sorted(range(2 * image, 2 * image + 2), key=lambda row: int(batch.steps[row]))
        assert torch.equal(batch.next_latents[first], batch.latents[second]), "one trajectory"
        assert batch.advantages[first] == batch.advantages[second]


def test_a_share_of_the_steps_is_drawn_anew_for_each_image_and_none_twice(tmp_path: Path) -> None:
    trainer = collected(tmp_path, method__num_steps=9, method__timestep_fraction=0.5)
    steps = trainer.store.experience.steps.view(8, 4)
    assert trainer.steps_per_image == 4
    assert all(len(set(row)) == 4 for row in steps.tolist())
    assert len({tuple(sorted(row)) for row in steps.tolist()}) > 1
    assert int(steps.max()) < 8


def test_a_prompts_condition_is_kept_once_for_each_image_wherever_rows_go(tmp_path: Path) -> None:
    """The store, which checkpoints hold, its minibatches and their micro-batches; rows read the same as ever."""
    trainer = collected(tmp_path, method__num_steps=9, train__batch_size=24)
    batch = trainer.store.experience
    prompts = [row["prompt"] for part in trainer.collector.collection.rollouts for row in part.rows]
    own = trainer.unwrapped.pipeline.encode(prompts)
    assert (len(batch), len(batch.condition.kept)) == (64, 8)
    assert torch.equal(batch.condition.rows, own.repeat_interleave(8))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:24]
    for rows, part in zip(order.split(5), [batch.select(rows) for rows in order.split(5)], strict=True):
        assert torch.equal(part.condition.rows, own.repeat_interleave(8)[rows])
        assert len(part.condition.kept) == len(set((rows // 8).tolist()))
    assert all(len(micro.condition.kept) <= len(micro) for micro in batch.select(order).split(3))
    trainer.save(tmp_path / "saved")
    [held] = (tmp_path / "saved").glob("step_*/store-00000.safetensors")
    assert load_file(held)["experience.condition.kept"].shape == (8,)


def test_conditions_of_several_batches_are_joined_and_exported_as_rows(tmp_path: Path) -> None:
    one = Conditions(torch.tensor([1, 0, 1]), torch.tensor([[1.0], [2.0]]))
    two = Conditions(torch.tensor([0, 0]), torch.tensor([[3.0]]))
    both = Conditions.cat([one, two, one])
    assert both.rows.flatten().tolist() == [2, 1, 2, 3, 3, 2, 1, 2]
    assert both.select(torch.tensor([7, 3])).flatten("condition.")["condition"].tolist() == [[2.0], [3.0]]
    trainer = collected(tmp_path)
    trainer.store.export(tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["condition"] for line in lines] == trainer.store.experience.condition.rows.tolist()


@table("fraction, rows", [(0.29, 29), (0.57, 57), (0.001, 1), (1.0, 100)])
def test_a_share_of_the_steps_loses_none_to_rounding(fraction: float, rows: int, tmp_path: Path) -> None:
    """0.29 · 100 and 0.57 · 100 are a little less than 29 and 57 in binary."""
    trainer = tiny_trainer("ddpo", tmp_path, method__num_steps=101, method__timestep_fraction=fraction)
    assert len(trainer.denoising.trained) == 100
    assert trainer.steps_per_image == rows


@table("precision", ["no", "bf16"])
def test_before_the_first_update_the_ratio_is_one(precision: str, tmp_path: Path) -> None:
    """Latents are kept rounded, and what is compared speaks of what is kept; with guidance, too."""
    trainer = collected(tmp_path, train__mixed_precision=precision, method__guidance_scale=5.0)
    batch = trainer.store.experience
    assert batch.latents.dtype == {"no": torch.float32, "bf16": torch.bfloat16}[precision]
    for micro in [*batch.split(None), *batch.split(1), *batch.split(3)]:
        assert trainer.updater.measure(micro)[1]["policy/ratio"].compute() == pytest.approx(1.0, abs=1e-6)


@table("dtype", [torch.bfloat16, torch.float16])
def test_latents_kept_in_half_have_the_logprobs_they_were_sampled_with(dtype: torch.dtype, tmp_path: Path) -> None:
    """To 1e-6 for every row alone."""
    trainer = tiny_trainer("ddpo", tmp_path)
    trainer.models.build()
    policy = trainer.unwrapped
    noise = torch.randn((4, 4, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    condition = policy.pipeline.encode(["a", "bc", "def", "e"])
    latents, logprobs = policy.sample(condition, noise, dtype)
    assert latents.dtype == dtype
    for step in (0, 1):
        at = torch.full((4,), step)
        again = policy.logprobs(policy(latents[:, step], at, condition), latents[:, step + 1], at)
        assert (again - logprobs[:, step]).exp().tolist() == pytest.approx([1.0] * 4, abs=1e-6)
    assert logprobs[:, 2].tolist() == [0.0] * 4


def test_the_loss_is_the_clipped_surrogate_of_each_step(tmp_path: Path) -> None:
    """log ρ = (.3, −.3, .00005), A = (1, −1, 2), ε = 1e-4: −1.0001, 0.9999, −2 · 1.00005."""
    trainer = collected(tmp_path, method__cliprange=1e-4)
    batch = trainer.store.experience.select(torch.arange(3))
    with torch.no_grad():
        mean = trainer.policy(batch.latents, batch.steps, batch.condition.rows)
        now = trainer.unwrapped.logprobs(mean, batch.next_latents, batch.steps)
    old = now - torch.tensor([0.3, -0.3, 0.00005])
    advantages = torch.tensor([1.0, -1.0, 2.0])
    rows = DDPOBatch(batch.latents, batch.next_latents, batch.steps, old, advantages, batch.condition)
    loss, found = trainer.loss(rows)
    assert float(loss.detach()) == pytest.approx((-1.0001 + 0.9999 - 2.0001) / 3, abs=1e-5)
    assert found["policy/clipfrac"].compute() == pytest.approx(2 / 3)
    assert found["policy/approx_kl"].compute() == pytest.approx(0.5 * (0.3**2 + 0.3**2) / 3, rel=1e-3)


def test_advantages_are_clipped_and_of_the_prompts_own_rewards(tmp_path: Path) -> None:
    trainer = collected(tmp_path, method__adv_clip_max=0.5, method__buffer_size=0)
    rewards = torch.cat([part.scores for part in trainer.collector.collection.rollouts])
    expected = ((rewards - rewards.mean()) / rewards.std(correction=0)).clamp(-0.5, 0.5)
    torch.testing.assert_close(trainer.store.experience.advantages[::2], expected, atol=1e-4, rtol=0)
    single = collected(tmp_path / "own", method__min_count=1)
    assert single.store.experience.advantages.abs().max() == 0, "eight prompts with one reward each"


def test_guidance_leads_from_the_negative_prompt_to_the_prompt() -> None:
    """v = v_neg + g (v_prompt − v_neg), in one pass; g = 1 asks for no second one."""
    from trainkit_ddpo import DiffusionPolicy

    torch.manual_seed(0)
    pipeline = PixelPipeline(PIXELS)
    steps, x, t = pipeline.noise(4).steps(1.0), torch.randn(2, 1, 8, 8), torch.tensor([0, 1])
    at = steps.timesteps[t]
    prompts, negative = pipeline.encode(["a", "b"]), pipeline.encode(["b", "b"])
    policy = DiffusionPolicy(pipeline, steps, guidance_scale=3.0, negative_prompt="b")
    away, towards = pipeline.predict(x, at, negative), pipeline.predict(x, at, prompts)
    torch.testing.assert_close(policy._guided(x, at, prompts), away + 3 * (towards - away), atol=1e-5, rtol=0)
    alone = DiffusionPolicy(pipeline, steps, guidance_scale=1.0)
    assert torch.equal(alone._guided(x, at, prompts), towards)
    assert not torch.allclose(away[0], towards[0]), "the prompt makes a difference"


# ----------------------------------------------------------------------------------------------- what it makes


def test_images_follow_from_their_seeds_and_from_nothing_around_them(tmp_path: Path) -> None:
    trainer = tiny_trainer("ddpo", tmp_path)
    rows = [{"prompt": "a", "seed": 3}, {"prompt": "a", "seed": 4}, {"prompt": "bc", "seed": 3}]
    images = trainer.generate(rows).images
    assert torch.allclose(trainer.generate(rows[1]).images[0], images[1], atol=1e-5)
    assert not torch.allclose(images[0], images[1], atol=1e-2)
    assert not torch.equal(trainer.generate("a").images, trainer.generate("a").images), "without a seed, drawn anew"
    assert images.shape == (3, 1, 8, 8)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_evaluations_show_the_same_noise_each_time_and_measure_it(tmp_path: Path) -> None:
    trainer = tiny_trainer("ddpo", tmp_path)
    trainer.metric_fn = lambda images, prompts, **_: {"contrast": images.flatten(1).std(1), "count": len(prompts)}
    (first, samples), (second, again) = trainer.evaluation(), trainer.evaluation()
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(samples, again, strict=True))
    assert {k: v for k, v in first.items() if k != "eval/time"} == {k: v for k, v in second.items() if k != "eval/time"}
    assert first["eval/reward"] == pytest.approx(sum(float(s["image"].mean()) for s in samples) / 8, abs=1e-6)
    assert first["eval/contrast"] == pytest.approx(sum(float(s["image"].std()) for s in samples) / 8, abs=1e-6)
    assert first["eval/count"] == 4  # batches of four


def test_a_run_leaves_images_and_hooks_see_them(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watch:
        @trainkit.hookimpl
        def on_experience(self, rollouts: list[ImageRollouts]) -> None:
            seen.extend(rollouts)

        @trainkit.hookimpl
        def on_evaluate(self, samples: list[dict[str, Any]]) -> None:
            seen.append(samples)

    trainer = tiny_trainer(
        "ddpo", tmp_path, callbacks=[Watch()], train__eval_interval=2, train__total_steps=2,
        train__trackers=["tensorboard"],
    )  # fmt: skip
    trainer.learn()
    before, *rollouts, after = seen
    assert before[0]["image"].shape == after[0]["image"].shape == (1, 8, 8)
    assert [len(part) for part in rollouts] == [4, 4]
    assert all(part.scores.shape == (4,) and part.images.shape == (4, 1, 8, 8) for part in rollouts)
    names = ["evaluation_00000000.png", "evaluation_00000002.png", "rollout_00000000.png"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == names
    with Image.open(tmp_path / "images" / names[0]) as grid:
        assert grid.size == (3 * 66, 3 * 66)  # eight of them, eight times as large, with a border
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"evaluation", "rollout"}
    assert all("image" in line["output"] and "image" not in line for line in lines)
    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"eval/images" in events.read_bytes()


@table("channels", [1, 3])
def test_pictures_hold_what_was_made(channels: int, tmp_path: Path) -> None:
    images = torch.linspace(0, 1, 2 * channels * 4).view(2, channels, 2, 2)
    save_grid(images, tmp_path / "grid.png", columns=2)
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.mode == {1: "L", 3: "RGB"}[channels]
        assert grid.size == (2 * 66, 66)
        expected = (images[1, :, 1, 0] * 255).round().int().tolist()
        found = grid.getpixel((66 + 1, 64))
    assert (list(found) if isinstance(found, tuple) else [found]) == expected
    assert to_pil(images[0]).size == (2, 2)


# -------------------------------------------------------------------------------------------- in and out again


@pytest.mark.daily(adapter=(None,))
@pytest.mark.parametrize("adapter", [None, {"r": 2, "init_lora_weights": False}])
def test_an_export_makes_the_same_images(adapter: dict[str, Any] | None, tmp_path: Path) -> None:
    trainer = tiny_trainer("ddpo", tmp_path / "run", model__peft_config=adapter, train__total_steps=3)
    trainer.models.build()
    before = {name: value.clone() for name, value in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    moved = [name for name, value in trainer.unwrapped.state_dict().items() if not torch.equal(value, before[name])]
    assert moved
    assert adapter is None or all("lora_" in name for name in moved)
    row = {"prompt": "a", "seed": 1}
    images = trainer.generate(row).images
    exported = tmp_path / "run" / "model"
    again = tiny_trainer("ddpo", tmp_path / "again", model__model_path=str(exported))
    torch.testing.assert_close(again.generate(row).images, images, atol=1e-5, rtol=0)
    live = PixelPipeline.from_pretrained(exported)
    assert live.config.model_type == "pixel_unet"
    assert "lora" not in "".join(live.state_dict())


def test_a_pipeline_of_ones_own_is_trained_live(tmp_path: Path) -> None:
    """T8.22: one number instead of an image, drawn towards where the prompt says; no UNet, no text encoder."""

    class Line(ImagePipeline):
        shape = (1, 1, 1)
        config = "one number"

        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Linear(3, 1)

        def noise(self, steps: int) -> Noise:
            alphas = torch.linspace(0.999, 0.01, 50, dtype=torch.float64)
            return Noise(alphas, torch.arange(steps, 0, -1) * (50 // steps) - 1, final_alpha=0.9, prediction="sample")

        def encode(self, prompts: Any) -> Tensor:
            return torch.tensor([[float(len(prompt))] for prompt in prompts])

        def predict(self, latents: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
            known = torch.cat([latents.flatten(1), timesteps.unsqueeze(1) / 50, condition], 1)
            return self.network(known).view(-1, 1, 1, 1)

        def decode(self, latents: Tensor) -> Tensor:
            return latents.sigmoid()

        def save_pretrained(self, directory: str | Path) -> None:
            Path(directory).mkdir(parents=True)
            torch.save(self.state_dict(), Path(directory) / "line.pt")

    torch.manual_seed(0)
    trainer = trainkit.train(
        Line(),
        method="ddpo",
        reward_fn=lambda images, **_: -((images.flatten() - 0.9) ** 2),
        prompts=["a", "bb"],
        config={
            "method": {"num_steps": 5, "guidance_scale": 1.0, "cliprange": 0.1},
            "optimizer": {"lr": 0.06, "weight_decay": 0.0},
            "rollout": {"num_rollouts": 64, "batch_size": 64},
            "train": {"batch_size": 256, "total_steps": 30, "run_dir": str(tmp_path / "run"), "trackers": []},
        },
    )
    images = trainer.generate(["a", "bb"] * 50).images.flatten()
    assert float(images.mean()) > 0.75, "from about .5, towards .9"
    assert (tmp_path / "run" / "model" / "line.pt").is_file()


def test_a_loop_of_ones_own_makes_collections_and_resumes_bit_equal(tmp_path: Path) -> None:
    def loop(run_dir: Path, count: int, **changes: Any) -> Any:
        trainer = tiny_trainer("ddpo", run_dir, method__ddpo_epochs=2, **changes)
        trainer.begin()
        for _ in range(count):
            found = trainer.step(["a", {"prompt": "bc"}, "a", "def"])
            assert {"reward/mean", "policy/ratio", "loss/total"} <= found.keys()
        return trainer

    straight = loop(tmp_path / "straight", 3)
    # 4 images of two steps that add noise, in one step, in two passes
    assert (straight.progress.step, straight.progress.collection, straight.progress.cursor) == (6, 3, 12)
    assert len(straight.tracker.rewards["a"]) == 6
    loop(tmp_path / "stopped", 2).save()
    resumed = loop(tmp_path / "stopped", 1, train__resume="auto")
    a, b = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []
    assert straight.tracker.rewards == resumed.tracker.rewards
    with pytest.raises(DataError, match="the model knows"):
        resumed.step(["cow"])


@pytest.mark.slow
def test_denoising_is_learnt_from_images() -> None:
    """Of images that are all one grey, the clean one is known whatever the noise: the loss falls to near 0."""
    torch.manual_seed(0)
    pipeline, draws = PixelPipeline({**PIXELS, "width": 16}), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = pipeline.denoising_loss(torch.full((32, 1, 8, 8), 0.75), ["a"] * 32, draws)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 0.5
    assert sum(losses[-5:]) / 5 < 0.1


# -------------------------------------------------------------------------------------------------- bad input


@table(
    "changes, said",
    [
        ({"rollout__temperature": 0.5}, r"rollout\.temperature is set, but does not apply to images"),
        ({"rollout__eval_kwargs": {"top_k": 1}}, r"rollout\.eval_kwargs"),
        ({"train__seq_length": 8}, r"train\.seq_length"),
        ({"model__num_layers_unfrozen": 1}, r"model\.num_layers_unfrozen"),
        ({"tokenizer__tokenizer_path": "x"}, r"tokenizer\.tokenizer_path"),
        ({"model__kwargs": {"revision": "main"}}, r"model\.kwargs"),
        ({"method__num_steps": 1}, "none of these steps adds noise"),
        ({"method__num_steps": 2000}, "1 to 1000; choose one"),
        ({"method__eta": 0.0}, r"method\.eta.*greater than 0"),
        ({"method__buffer_size": 4, "method__min_count": 5}, "buffer_size 4 is below min_count 5"),
        ({"method__eta": 1.5}, r"method\.eta.*less than or equal to 1"),
        ({"model": {"model_type": "gpt2"}}, "'gpt2'.*only for 'pixel_unet'"),
        ({"model": {**PIXELS, "image_size": 7}}, "image_size 7 cannot be halved"),
        ({"model": {**PIXELS, "channels": 4}}, "channels"),
        ({"model__peft_config": {"target_modules": ["nowhere"]}}, "fits no module of UNet"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("ddpo", tmp_path, **changes).models.build()


def test_dropout_of_an_adapter_that_would_be_switched_off_is_refused_at_the_door(tmp_path: Path) -> None:
    adapter = {"r": 2, "lora_dropout": 0.5}
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.5, and model\.disable_dropout switches all dropout off"):
        tiny_trainer("ddpo", tmp_path, model__peft_config=adapter)
    trainer = tiny_trainer("ddpo", tmp_path, model__peft_config=adapter, model__disable_dropout=False)
    trainer.models.build()
    kept = [module.p for module in trainer.unwrapped.modules() if isinstance(module, torch.nn.Dropout)]
    assert kept == [0.5] * 4, "one for each layer of the attention"


@table("name", ["logit_mask", "stop_sequences", "tokenizer"])
def test_arguments_about_text_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} applies to text"):
        trainkit.train(
            PIXELS, method="ddpo", reward_fn=lambda images, **_: [0.0] * len(images), prompts=["a"],
            **{name: ["x"]},
        )  # fmt: skip


def test_prompts_that_the_model_does_not_know_are_named(tmp_path: Path) -> None:
    trainer = tiny_trainer("ddpo", tmp_path)
    with pytest.raises(DataError, match=r"prompt 1 is 'nine'.*the model knows 'a', 'bc'"):
        trainer.add_prompt_pipeline(["a", "nine"])
    with pytest.raises(DataError, match=r"negative_prompt is 'nine'"):
        tiny_trainer("ddpo", tmp_path, method__negative_prompt="nine")


def test_a_function_of_prompts_is_told_how_to_be_a_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\[prompt_function\(\) for _ in range\(1000\)\]"):
        tiny_trainer("ddpo", tmp_path).add_prompt_pipeline(lambda: ("a", {}))


def test_no_setting_of_the_method_differs_from_what_users_of_trl_know() -> None:
    """Steps, η, guidance, clipping and the buffer, by TRL's DDPOConfig."""
    method = trainkit.default_config("ddpo").method
    assert (method.num_steps, method.eta, method.guidance_scale) == (50, 1.0, 5.0)
    assert (method.cliprange, method.adv_clip_max, method.timestep_fraction) == (1e-4, 5.0, 1.0)
    assert (method.ddpo_epochs, method.buffer_size, method.min_count) == (1, 16, 16)


def test_the_schedule_of_pixels_is_nichols_and_dhariwals() -> None:
    """ᾱ = f(t) / f(0), f(t) = cos²((t/T + .008) / 1.008 · π/2), but for the last β, which is at most .999."""
    noise = PixelPipeline(PIXELS).noise(10)
    f = [math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(1001)]
    assert noise.alphas_cumprod[:999].tolist() == pytest.approx([f[t] / f[0] for t in range(1, 1000)], abs=1e-9)
    assert noise.timesteps.tolist() == [999, 899, 799, 699, 599, 499, 399, 299, 199, 99]
    assert noise.steps(1.0).previous[-1] == 1.0
