"""Laws of images: what the model reads of them in training and in sampling, and rows that are refused."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.image_utils import load_image
from typer.testing import CliRunner

import forking
from tables import table
from trainkit.cli import app
from trainkit.data import Sequences
from trainkit.data.batches import Images
from trainkit.data.images import READERS, ImageReader, given_images
from trainkit.errors import DataError, EpisodeError, TrainkitError
from trainkit.models.joined import different_prompts
from trainkit.plugins import get_trainer
from trainkit.rollouts import Turn
from trainkit.rollouts.local import LocalEngine
from trainkit.runs.record import Record
from trainkit.testing import nudged, tiny_llama
from trainkit.testing.images import PROMPTS, SAMPLES, picture
from trainkit.testing.trainers import Letters, language_trainers, tiny_trainer
from trainkit.trainer.inference import load_tried
from trainkit_kit.copying import registered
from trainkit_report.report import report
from trainkit_tools.conversation import Conversation
from trainkit_tools.merging import merge_export
from vision import FAMILIES, ImagesOnly, family, vision_trainer

KINDS = [pytest.param(kind, marks=() if kind == "qwen2_vl" else pytest.mark.slow) for kind in FAMILIES]


def sampled(kind: str, tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    """Return a trainer of a family, with the rollouts of its eight prompts, each with two responses."""
    trainer = nudged(vision_trainer(kind, "grpo", tmp_path, **changes), 0.1)  # projections of images may begin at 0
    rows = [row for row in trainer.pipeline.take(0, 8) for _ in range(2)]
    return trainer, trainer.sample(rows)


def by_transformers(trainer: Any, processor: Any, row: dict[str, Any], response: list[int]) -> Tensor:
    """Return the logits [T, V] in which a response was chosen, of inputs that the processor makes of a prompt."""
    images = row.get("images")
    made = processor(text=[row["prompt"]], images=images, add_special_tokens=False, return_tensors="pt")
    after = torch.tensor([response])
    kinds = {name: torch.cat([made[name], torch.zeros_like(after)], 1) for name in made if name.endswith("type_ids")}
    inputs = {**made, **kinds, "input_ids": torch.cat([made["input_ids"], after], 1)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        logits: Tensor = trainer.unwrapped.model(**inputs).logits
    return logits[0, made["input_ids"].size(1) - 1 : -1]


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_policy_and_transformers_read_the_same_images(kind: str, tmp_path: Path) -> None:
    trainer, rollouts = sampled(kind, tmp_path)
    sequences = rollouts.sequences
    with torch.no_grad():
        logprobs = trainer.unwrapped(sequences).logprobs
    assert torch.allclose(logprobs, rollouts.logprobs, atol=2e-5)
    allowed, processor = trainer.logit_mask, READERS[trainer.tokenizer].processor
    for index, (row, response) in enumerate(zip(rollouts.rows, rollouts.responses, strict=True)):
        logits = by_transformers(trainer, processor, row, response.tolist()).masked_fill(~allowed, -torch.inf)
        expected = logits[:, : trainer.sampling.vocabulary].log_softmax(-1).gather(1, response.unsqueeze(1)).squeeze(1)
        assert torch.allclose(logprobs[index][sequences.response_mask[index]], expected, atol=2e-5)
    others = replace(sequences.images, pixel_values=sequences.images.pixel_values.flip(-1) * 0.5)
    with torch.no_grad():
        assert not torch.allclose(trainer.unwrapped(replace(sequences, images=others)).logprobs, logprobs, atol=1e-4)


@contextmanager
def images_read(trainer: Any) -> Iterator[list[int]]:
    """Yield a list of the numbers of images, or of their patches, that are read in each pass of the vision tower."""
    counts: list[int] = []

    def count(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        counts.append(len(arguments[0] if arguments else named["pixel_values"]))

    tower = trainer.unwrapped.model.get_encoder(modality="image")
    handle = tower.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_the_images_of_a_prompt_are_read_once_for_all_its_responses(kind: str, tmp_path: Path) -> None:
    trainer = nudged(vision_trainer(kind, "grpo", tmp_path), 0.1)
    rows, policy = trainer.pipeline.take(0, 8), trainer.unwrapped
    with images_read(trainer) as alone:
        trainer.sample(rows)
    with images_read(trainer) as sampled:
        rollouts = trainer.sample([row for row in rows for _ in range(3)])
    assert sampled == alone
    sequences, found = rollouts.sequences, {}
    assert len(sequences.images.counts) == 7  # one prompt has no image
    for shared in (False, True):
        policy.shares_prompts = shared and policy.can_share_prompts
        policy.zero_grad()
        with images_read(trainer) as read:
            logprobs = policy(sequences).logprobs
        logprobs.sum().backward()
        gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        found[shared] = (sum(read), logprobs.detach(), gradients)
    assert found[False][0] == 3 * sum(alone)
    assert found[True][0] == sum(alone)
    assert torch.allclose(found[True][1], found[False][1], atol=2e-5)
    assert found[True][2].keys() == found[False][2].keys()
    for name, gradient in found[True][2].items():
        assert torch.allclose(gradient, found[False][2][name], rtol=1e-3, atol=2e-5), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["sft", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(method: str, kind: str, tmp_path: Path) -> None:
    gradients = []
    for size in (8, 3):
        trainer = nudged(vision_trainer(kind, method, tmp_path / str(size), train__microbatch_size=size), 0.1)
        trainer.collect()
        batch = next(trainer.store.batches(8, torch.Generator().manual_seed(0)))
        trainer.updater._gradient(batch, batch.weight)
        gradients.append({n: p.grad.clone() for n, p in trainer.unwrapped.named_parameters() if p.grad is not None})
    assert any("vis" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-3, atol=2e-6), name


def require_same_numbers(trainer: Any, rollouts: Any) -> None:
    """Check that sampler and policy have read the same images."""
    mask = rollouts.sequences.response_mask
    with torch.no_grad():
        logprobs = trainer.unwrapped(rollouts.sequences).logprobs
    assert torch.allclose(logprobs[mask], rollouts.logprobs[mask], atol=2e-5)


def test_images_of_one_text_have_their_own_lengths(tmp_path: Path) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>a?"
    prompts = [{"prompt": text, "images": [picture("r", height=height)]} for height in (28, 56)] * 4
    trainer = vision_trainer("qwen2_vl", "grpo", tmp_path, arguments={"prompts": prompts})
    queries = trainer.text.queries(trainer.pipeline.rows)
    assert [len(each) - len(queries[0]) for each in queries[:2]] == [0, 4]
    require_same_numbers(trainer, trainer.sample(trainer.pipeline.take(0, 8)))


def test_engines_with_a_copy_of_the_model_read_images(tmp_path: Path) -> None:
    found = []
    for engine in ("local", registered()):
        trainer = nudged(vision_trainer("llava", "grpo", tmp_path / engine, rollout__engine=engine), 0.1)
        found.append(trainer.sample(trainer.pipeline.take(0, 8)))
        require_same_numbers(trainer, found[-1])
    assert torch.equal(found[0].sequences.input_ids, found[1].sequences.input_ids)


class Shows(Letters):
    """The game, which begins with an image that it shows itself."""

    def reset(self) -> list[dict[str, Any]]:
        image = {"type": "image", "image": picture(self.draws.choice("rgb"), height=self.draws.choice([28, 56]))}
        return [{"role": "user", "content": [image, {"type": "text", "text": "a?"}]}]


class Answers(Letters):
    """The game, whose first observation is an image."""

    def step(self, output: str) -> Turn:
        return replace(super().step(output), observation=[{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize(
    "place", ["of reset", *(pytest.param(each, marks=pytest.mark.slow) for each in ("of the row", "of text"))]
)
def test_environments_play_on_from_prompts_with_images(place: str, tmp_path: Path) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>a?"
    rows = {
        "of the row": PROMPTS,
        "of reset": [{}] * 8,
        "of text": [{"prompt": text, "images": [picture("r", height=height)]} for height in (28, 56)] * 4,
    }[place]
    arguments = {"environment": Shows if place == "of reset" else Letters, "reward_fn": None, "prompts": rows}
    trainer = nudged(vision_trainer("qwen2_vl", "grpo", tmp_path, arguments=arguments), 0.1)
    taken = [row for row in trainer.pipeline.take(0, 8) for _ in range(2)]
    rollouts = trainer.sample(taken)
    assert max(len(turns) for turns in rollouts.turns) == 2
    images = rollouts.sequences.images
    assert (images.of >= 0).sum() == 14 + 2 * (place != "of the row")
    assert len(images.counts) <= 8, "the responses to a prompt share its images"
    assert all(bool(row.get("images")) == (of >= 0) for row, of in zip(rollouts.rows, images.of, strict=True))
    require_same_numbers(trainer, rollouts)
    trainer.learn()
    assert trainer.progress.step


def test_an_observation_with_an_image_is_refused(tmp_path: Path) -> None:
    arguments = {"environment": Answers, "reward_fn": None}
    trainer = vision_trainer("qwen2_vl", "grpo", tmp_path, arguments=arguments)
    with pytest.raises(EpisodeError, match="its observation has a message of the role 'user' with the content"):
        trainer.sample(trainer.pipeline.take(0, 2))


METHODS = [name for name in language_trainers() if get_trainer(name).images]
ALSO = ("sft", "dpo", "reward", "grpo", "rloo", "ppo")
LIGHT = {"optimizer__name": "sgd", "optimizer__lr": 0.05}
TOWERS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "visual"),
    **dict.fromkeys(("llava", "gemma3"), "vision_tower"),
    **dict.fromkeys(("idefics3", "smolvlm"), "vision_model"),
}
"""The part of a family's model that reads images."""
LANGUAGES = dict.fromkeys(("idefics3", "smolvlm"), "text_model")


def started(kind: str, method: str, run_dir: Path, **changes: Any) -> Any:
    """Return a trainer whose model has read images before: the projection of Gemma 3 begins at 0."""
    trainer = vision_trainer(kind, method, run_dir, **changes)
    trainer.models.build()
    for name, value in trainer.unwrapped.named_parameters():
        if not value.any() and "projection" in name:
            torch.nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(1))
    return trainer


def changed(trainer: Any, kind: str) -> set[str]:
    """Make the steps of a run; return the parts of the model whose parameters have changed."""
    trainer.models.build()
    before = {name: value.clone() for name, value in trainer.unwrapped.named_parameters()}
    trainer.learn()
    after = dict(trainer.unwrapped.named_parameters())
    names = {name for name, value in before.items() if not torch.equal(value, after[name])}
    parts = {"vision": TOWERS[kind], "language": LANGUAGES.get(kind, "language_model"), "lora": "lora"}
    return {part for part, inside in parts.items() if any(f".{inside}" in name for name in names)}


RESUMED = [
    *(
        pytest.param(name, "qwen2_vl", marks=pytest.mark.slow if name in ALSO else pytest.mark.weekly)
        for name in METHODS
    ),
    *(
        pytest.param(name, kind, marks=pytest.mark.slow if name == "grpo" else pytest.mark.weekly)
        for name in ALSO
        for kind in FAMILIES
        if kind != "qwen2_vl"
    ),
]


@pytest.mark.parametrize(("method", "kind"), RESUMED)
def test_algorithms_learn_from_images_and_their_runs_resume_bit_equal(method: str, kind: str, tmp_path: Path) -> None:
    changes = {**LIGHT, "train__save_interval": 1, "train__batch_size": 6}
    straight = started(kind, method, tmp_path / "straight", **changes, train__total_steps=4)
    assert {"vision", "language"} <= changed(straight, kind)
    started(kind, method, tmp_path / "stopped", **changes, train__total_steps=2).learn()
    resumed = vision_trainer(kind, method, tmp_path / "stopped", **changes, train__total_steps=4, train__resume="auto")
    resumed.learn()
    assert resumed.progress.step == straight.progress.step == 4
    weights = resumed.unwrapped.state_dict()
    assert [name for name, a in straight.unwrapped.state_dict().items() if not torch.equal(a, weights[name])] == []


PARTS: dict[str, tuple[Callable[[str, str], dict[str, Any]], set[str]]] = {
    "everything": (lambda *_: {}, {"vision", "language"}),
    "not the tower": (lambda *_: {"model__freeze_vision": True}, {"language"}),
    "the top layer": (lambda *_: {"model__num_layers_unfrozen": 1}, {"language"}),
    "an adapter of the language": (
        lambda tower, language: {"model__peft_config": {"r": 2, "target_modules": rf".*\.{language}\..*(q|v)_proj"}},
        {"lora", "language"},
    ),
    "an adapter of the vision": (
        lambda tower, language: {"model__peft_config": {"r": 2, "target_modules": rf".*\.{tower}\..*(qkv|q_proj)"}},
        {"lora", "vision"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("part", PARTS)
def test_what_is_trained_is_what_the_settings_say(part: str, kind: str, tmp_path: Path) -> None:
    settings, expected = PARTS[part]
    changes = settings(TOWERS[kind], LANGUAGES.get(kind, "language_model"))
    trainer = started(kind, "rloo", tmp_path, **LIGHT, **changes, train__total_steps=2)
    rollouts = trainer.sample(trainer.pipeline.take(0, 8))
    with torch.no_grad():
        sequences = trainer.unwrapped.through_trunk(rollouts.sequences)
        for model in (trainer.unwrapped, *([] if kind == "gemma3" else [trainer.reference])):  # made before `started`
            assert torch.allclose(model(sequences).logprobs, rollouts.logprobs, atol=2e-5)
    assert changed(trainer, kind) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_frozen_layers_need_not_read_images_again(kind: str, tmp_path: Path) -> None:
    trainer, rollouts = sampled(kind, tmp_path, model__num_layers_unfrozen=1)
    policy = trainer.unwrapped
    assert policy.has_trunk
    frozen = [name for name, p in policy.named_parameters() if not p.requires_grad]
    assert any("vis" in name for name in frozen)
    with torch.no_grad():
        kept = policy(policy.through_trunk(rollouts.sequences)).logprobs
    assert torch.allclose(kept, rollouts.logprobs, atol=2e-5)


SCRIPT = """
import sys
from pathlib import Path
import torch
from vision import vision_trainer

torch.set_num_threads(1)
root, sharding, kind = Path(sys.argv[1]), *sys.argv[2:]
for method in ("grpo", "dpo"):
    changes = {"train__total_steps": 4, "train__sharding": sharding, "train__microbatch_size": 1}
    trainer = vision_trainer(kind, method, root / method, **changes)
    trainer.learn()
    with trainer.sharding.unsharded():
        if trainer.accelerator.is_main_process:
            torch.save(dict(trainer.unwrapped.state_dict()), root / f"{method}.pt")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "kind"), [("none", "qwen2_vl"), ("fsdp2", "qwen2_vl"), ("fsdp2", "llava")])
def test_two_processes_end_with_the_weights_of_one(sharding: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        forking.run(script, processes, str(tmp_path / str(processes)), sharding if processes == 2 else "none", kind)
    for method in ("grpo", "dpo"):
        one, two = (torch.load(tmp_path / str(count) / f"{method}.pt") for count in (1, 2))
        for name, value in one.items():
            assert torch.allclose(value, two[name], rtol=1e-3, atol=1e-5), (method, name)


EXPORTED = [pytest.param(kind, marks=() if kind == "llava" else pytest.mark.slow) for kind in FAMILIES]


@pytest.mark.parametrize("kind", EXPORTED)
def test_exports_hold_the_processor_and_load_in_transformers_and_here(kind: str, tmp_path: Path) -> None:
    trained = vision_trainer(kind, "sft", tmp_path / "run", train__total_steps=1, train__verify_export=True)
    trained.learn()
    path = tmp_path / "run" / "model"
    model, processor = AutoModelForImageTextToText.from_pretrained(path), READERS[trained.tokenizer].processor
    assert all(torch.equal(a, model.state_dict()[name]) for name, a in trained.unwrapped.model.state_dict().items())
    assert "AutoProcessor" in (path / "README.md").read_text(encoding="utf-8")
    data = {"tokenizer": None, "prompts": PROMPTS, "samples": SAMPLES}
    if isinstance(processor, ImagesOnly):  # transformers loads Qwen's own class, which needs torchvision
        AutoProcessor.register(type(trained.unwrapped.model.config), ImagesOnly, exist_ok=True)
    assert type(AutoProcessor.from_pretrained(path)) is type(processor)
    again = tiny_trainer("sft", tmp_path / "again", arguments=data, model__model_path=str(path), train__total_steps=1)
    trained.models.build(), again.models.build()
    sequences = [each.encode_samples(each.pipeline.take(0, 8)) for each in (trained, again)]
    with torch.no_grad():
        here, there = (each.unwrapped(rows).logprobs for each, rows in zip((trained, again), sequences, strict=True))
    assert torch.equal(here, there)


def test_a_merged_adapter_has_the_processor(tmp_path: Path) -> None:
    base = vision_trainer("llava", "sft", tmp_path / "base", train__total_steps=1)
    base.learn()
    data = {"tokenizer": None, "prompts": PROMPTS, "samples": SAMPLES}
    path = str(tmp_path / "base" / "model")
    changes = {
        "model__model_path": path,
        "model__peft_config": {"r": 2, "target_modules": "all-linear"},
        "train__total_steps": 1,
    }
    tiny_trainer("sft", tmp_path / "run", arguments=data, **changes).learn()
    merge_export(tmp_path / "run" / "model", tmp_path / "merged")
    assert type(AutoProcessor.from_pretrained(tmp_path / "merged")) is type(AutoProcessor.from_pretrained(path))


def test_a_run_is_shown_evaluated_and_talked_to_with_its_images(tmp_path: Path) -> None:
    for index, row in enumerate(PROMPTS):
        for image in row.get("images", []):
            image.save(tmp_path / f"{index}.png")
    files = [
        {**row, "images": [str(tmp_path / f"{i}.png")]} if "images" in row else row for i, row in enumerate(PROMPTS)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in files), encoding="utf-8")
    (tmp_path / "reward.py").write_text("from trainkit.testing.trainers import count_first_letters\n", encoding="utf-8")
    changes = {"train__total_steps": 1, "train__eval_interval": 1, "rollout__max_new_tokens": 3}
    trained = vision_trainer("llava", "grpo", tmp_path / "run", **changes)
    trained.add_eval_pipeline(files)
    trained.learn()

    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text("utf-8").splitlines()]
    shown = [line["columns"]["images"][0] for line in lines if line.get("columns", {}).get("images")]
    assert {line["kind"] for line in lines} == {"rollout", "evaluation"}
    assert shown
    assert all(each.startswith("data:image/jpeg;base64,") and len(each) < 4000 for each in shown)
    red = trained.text.images([{"prompt": "<image>", "images": [shown[0]]}]).pixel_values
    assert torch.allclose(
        red, trained.text.images([{"prompt": "<image>", "images": [picture("r")]}]).pixel_values, atol=0.1
    )
    page = report([Record(tmp_path / "run")])
    assert page.count('<img src="data:image/jpeg;base64,') >= 10

    given = [str(tmp_path / "run"), "--prompts", str(tmp_path / "prompts.jsonl")]
    scored = ["--reward-fn", f"{tmp_path / 'reward.py'}:count_first_letters", "--json"]
    found = json.loads(CliRunner().invoke(app, ["eval", *given, *scored]).stdout)
    assert found["metrics"]["eval/reward"] == trained.history["eval/reward"][1]

    chat = Conversation(load_tried(str(tmp_path / "run"), settings={"temperature": 0}, seed=1))
    answers = {}
    nudged(chat.tried.trainer, 0.3)
    for index in (0, 1):
        chat.begin(None)
        chat.show(str(tmp_path / f"{index}.png"))
        answers[index] = chat.answer("a?", lambda _: None), chat.again(lambda _: None)
    assert answers[0][0] == answers[0][1]
    assert answers[0] != answers[1], "the answer depends on the image"
    typed = f"/image {tmp_path / 'none.png'}\n/image {tmp_path / '0.png'}\na?\n"
    result = CliRunner().invoke(app, ["chat", str(tmp_path / "run"), "--seed", "1"], input=typed)
    assert "none.png" in result.stderr
    assert "the next message has the image" in result.stderr
    assert result.stdout.strip()


def test_the_page_names_the_families_that_are_checked() -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    assert re.findall(r"\| `(\w+)` \| yes \| yes \| yes \|", page) == [*FAMILIES]


# ------------------------------------------------------------------------------------------------------ bad input

SAY = {"completion": [{"role": "assistant", "content": "r"}]}
ROW = {"prompt": [{"role": "user", "content": "a?"}], **SAY}


def shown(*parts: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "a?"}]}], **SAY}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a file that is none": ({**ROW, "images": ["nowhere.png"]}, "image 0, 'nowhere.png' .*cannot be read"),
    "bytes of no image": ({**ROW, "images": [b"abc"]}, "image 0, b'abc' .*cannot be read"),
    "no form of an image": ({**ROW, "images": [3]}, "image 0, 3 .*cannot be read: an image is a path, bytes or"),
    "an address": ({**ROW, "images": ["http://localhost/a.png"]}, "nothing is fetched; set data.image_urls to true"),
    "an address in a part": (
        shown({"type": "image_url", "image_url": {"url": "https://localhost/a"}}),
        "nothing is fetched",
    ),
    "more images than parts": (
        {**shown({"type": "image"}), "images": [picture("r")] * 2},
        "has 2 images in its column, and 1 part",
    ),
    "a part without image": (
        shown({"type": "image"}),
        "has 0 images in its column, and 1 part of its messages without",
    ),
    "a placeholder in text": ({"prompt": "<image>", "completion": "a"}, "has 0 images and 1 placeholder '<image>'"),
    "no placeholder in text": (
        {"prompt": "a", "completion": "a", "images": [picture("r")]},
        "has 1 image and 0 placeholders",
    ),
    "an image in an output": (
        {"prompt": "a", "completion": "<image>", "images": [picture("r")]},
        "has an image in an output",
    ),
    "a video": (shown({"type": "video", "video": "a.mp4"}), "training is on text and images alone"),
    "a sound": (shown({"type": "audio", "audio": "a.wav"}), "training is on text and images alone"),
    "videos": ({**ROW, "videos": ["a.mp4"]}, "has the column 'videos', which is not read"),
    "audio": ({**ROW, "audio": "a.wav"}, "has the column 'audio', which is not read"),
    "prepared pixels": ({**ROW, "pixel_values": [[0.5]]}, "has the column 'pixel_values', which is not read"),
    "sizes": ({**ROW, "image_sizes": [[28, 28]]}, "has the column 'image_sizes', which is not read"),
    "images of a message": (
        {"prompt": [{**ROW["prompt"][0], "images": [picture("r")]}], **SAY},
        "message 0 has the key 'images', which is not read; images are parts of its content, or in the column",
    ),
    "a sound of a message": (
        {"prompt": [{**ROW["prompt"][0], "audio": "a.wav"}], **SAY},
        "message 0 has the key 'audio', which is not read",
    ),
    "both columns": (
        {**ROW, "images": [picture("r")], "image": picture("g")},
        "has images in both columns, images and image; give them in one",
    ),
    "a part of text with an image": (
        shown({"type": "text", "text": "b", "image": picture("r")}),
        "part 0 of its content is .*; a part should be",
    ),
    "a part without type": (shown({"text": "b", "image_url": "a.png"}), "part 0 of its content is .*; a part should"),
    "an image with a text": (
        shown({"type": "image", "image": picture("r"), "text": "b"}),
        "part 0 of its content is .*; a part should be",
    ),
    "more marks than images": (
        {"prompt": [{"role": "user", "content": "<image>a<image>?"}], **SAY, "images": [picture("r")]},
        "has 1 image in its column, and 2 parts of its messages without one",
    ),
    "token ids": ({"input_ids": [1, 2, 3], "images": [picture("r")]}, "has the column 'images', which is not read"),
}


@table("row, said", REFUSED.values())
def test_a_row_whose_images_cannot_be_read_is_refused_with_its_number(row: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"sample 1.*{said}"):
        vision_trainer("llava", "sft", tmp_path, arguments={"samples": [ROW, row]})


def test_an_image_in_a_side_of_a_pair_is_refused(tmp_path: Path) -> None:
    side = [{"role": "assistant", "content": [{"type": "image", "image": picture("r")}, {"type": "text", "text": "r"}]}]
    pair = {"prompt": ROW["prompt"], "chosen": side, "rejected": SAY["completion"]}
    with pytest.raises(DataError, match="sample 0 has an image in an output"):
        vision_trainer("llava", "dpo", tmp_path, arguments={"samples": [pair]})


@pytest.mark.parametrize("prompt", ["a?<|video_pad|>", [{"role": "user", "content": "a?<|video_pad|>"}]])
def test_the_token_of_a_video_is_refused_in_samples_and_prompts(prompt: Any, tmp_path: Path) -> None:
    said = "'<|video_pad|>' in its text; training is on text and images alone"
    samples = [("a?", "b<|video_pad|>")] if isinstance(prompt, str) else [{"prompt": prompt, **SAY}]
    with pytest.raises(DataError, match=re.escape(said)):
        vision_trainer("qwen2_vl", "sft", tmp_path / "sft", arguments={"samples": samples})
    trainer = vision_trainer("qwen2_vl", "grpo", tmp_path / "grpo")
    with pytest.raises(DataError, match=re.escape(said)):
        trainer.generate([{"prompt": prompt}])


@pytest.mark.parametrize("column", ["videos", "audio", "pixel_values", "image"])
def test_generating_refuses_columns_that_the_model_does_not_read(column: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"prompt 0 has the column '{column}', which the model does not see"):
        tiny_trainer("grpo", tmp_path).generate([{"prompt": "a", column: ["x"]}])


def test_marks_in_the_text_of_a_conversation_are_its_images(tmp_path: Path) -> None:
    """As in the data of LLaVA, whatever the placeholder of the model; a column that is empty holds none."""
    red, green = picture("r"), picture("g")
    marked = {"prompt": [{"role": "user", "content": "<image>\na <image>?"}], **SAY, "images": [red, green]}
    shown = [{"type": "image", "image": red}, {"type": "text", "text": "\na "}, {"type": "image", "image": green}]
    parts = {"prompt": [{"role": "user", "content": [*shown, {"type": "text", "text": "?"}]}], **SAY}
    trainer = vision_trainer("qwen2_vl", "sft", tmp_path, arguments={"samples": [marked, parts]})
    one, other = (trainer.encode_samples([row]) for row in trainer.pipeline.rows)
    torch.testing.assert_close(one.flatten(), other.flatten(), rtol=0, atol=0)
    for images in ({"images": [], "image": red}, {"images": [red], "image": None}):
        assert given_images({**ROW, **images}) == [red]


REFUSING: dict[str, tuple[str, dict[str, Any], str]] = {
    "no processor": ("grpo", {"arguments": {"tokenizer": family("llava")[0].tokenizer}}, "no processor reads them"),
    "a model of text": (
        "grpo",
        {"model__model_path": tiny_llama(30)},
        "a model of the kind 'llama' reads none; give one",
    ),
    "truncation": (
        "grpo",
        {"train__seq_length": 9, "rollout__overlong_prompts": "truncate"},
        "no image can be truncated",
    ),
    "packing": (
        "sft",
        {"method__packing": True, "train__seq_length": 60},
        "cannot be trained on packed rows: images have",
    ),
    "the tower of a model of text": (
        "sft",
        {"model__model_path": tiny_llama(30), "model__freeze_vision": True},
        "reads no images",
    ),
}


@table("method, changes, said", REFUSING.values())
def test_runs_that_cannot_read_images_say_so(method: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TrainkitError, match=said):
        vision_trainer("llava", method, tmp_path, **changes).models.build()


def test_an_algorithm_that_learns_from_text_alone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_trainer("sft"), "images", False)
    with pytest.raises(DataError, match="sample 0 has images, and 'sft' learns from text alone"):
        vision_trainer("llava", "sft", tmp_path)


def test_an_engine_that_reads_no_images_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "abilities", LocalEngine.abilities - {"images"})
    with pytest.raises(DataError, match="prompt 0 has images, and the engine 'local' reads text alone"):
        vision_trainer("llava", "grpo", tmp_path)


def test_a_model_that_reads_images_learns_from_text_by_an_engine_without_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vision_trainer("llava", "grpo", tmp_path / "a", arguments={"prompts": ["a?"] * 8}).logit_mask is not None
    monkeypatch.setattr(LocalEngine, "abilities", LocalEngine.abilities - {"images", "logit_mask"})
    trainer = vision_trainer("llava", "grpo", tmp_path / "b", arguments={"prompts": ["a?"] * 8})
    trainer.learn()
    assert trainer.logit_mask is None
    assert trainer.progress.step
    with pytest.raises(DataError, match="sample 0 holds the token id 15, which stands for a part of an image"):
        vision_trainer("llava", "sft", tmp_path / "c", arguments={"samples": [{"input_ids": [15, 1, 2]}]})


def test_images_are_fetched_if_the_run_may(tmp_path: Path) -> None:
    picture("r").save(tmp_path / "red.png")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        there, gone = (f"http://127.0.0.1:{server.server_port}/{name}.png" for name in ("red", "gone"))
        trainer = vision_trainer("llava", "sft", tmp_path / "run", data__image_urls=True)
        images = trainer.encode_samples(
            trainer.read_samples([{**ROW, "images": [each]} for each in (there, picture("r"))])
        )
        assert images.images.of.tolist() == [0, 0]
        with pytest.raises(DataError, match=r"sample 0: image 0, .*gone.png.* cannot be read: .*404"):
            trainer.read_samples([{**ROW, "images": [gone]}])
        server.shutdown()


FORMS: dict[str, Callable[[Path, bytes], Any]] = {
    "path": lambda path, _: path,
    "text": lambda path, _: str(path),
    "bytes": lambda _, png: png,
    "of datasets": lambda path, png: {"bytes": png, "path": None},
    "of datasets, on disk": lambda path, _: {"bytes": None, "path": str(path)},
    "in text": lambda _, png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
    "decoded": lambda path, _: Image.open(path),
}


def test_all_forms_of_an_image_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    picture("r").save(path)
    trainer = vision_trainer("llava", "sft", tmp_path / "run")
    forms = [form(path, path.read_bytes()) for form in FORMS.values()]
    rows = [{**ROW, "images": [form]} for form in forms] + [{**ROW, "image": form} for form in forms]
    rows += [shown({"type": "image", "image": form}) for form in forms]
    rows += [shown({"type": "image_url", "image_url": {"url": forms[5]}}), shown({"type": "image", "path": str(path)})]
    rows += [{"prompt": "<bos><image>a?\n", "completion": "r", "images": [forms[0]]}]
    images = trainer.encode_samples(trainer.read_samples(rows)).images
    assert images.of.tolist() == [0] * (len(rows) - 1) + [1]  # the last one has another text
    assert torch.equal(*images.pixel_values)


def test_images_are_turned_as_their_orientation_says(tmp_path: Path) -> None:
    turned, path = Image.Exif(), tmp_path / "turned.jpg"
    turned[0x0112] = 6
    Image.new("RGB", (40, 20)).save(path, exif=turned)
    for form in FORMS.values():
        assert (
            ImageReader(None).open(form(path, path.read_bytes()), "it").size == load_image(str(path)).size == (20, 40)
        )


def test_rows_with_different_images_and_the_same_text_are_different_prompts() -> None:
    pixels = [{"pixel_values": torch.full((1, 3), float(value))} for value in (0, 1)]
    images = Images.of_rows([pixels[0], pixels[0], pixels[1], {}])
    assert images is not None
    sequences = replace(Sequences.from_lists([[1, 2]] * 4, [[3]] * 4), images=images)
    assert sequences.follows.tolist() == [False, True, False, False]
    assert different_prompts(sequences)[1].unique().numel() == 3
    part = sequences.select(torch.tensor([3, 2])).images
    assert (part.of.tolist(), part.pixel_values.tolist()) == ([-1, 0], [[1.0] * 3])
    joined = Sequences.cat([Sequences.from_lists([[1, 2]], [[3, 4]]), sequences, sequences.select(torch.tensor([2]))])
    assert joined.images.of.tolist() == [-1, 0, 0, 1, -1, 2]
    assert joined.images.inputs["pixel_values"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
