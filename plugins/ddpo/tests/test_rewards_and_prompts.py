"""The reward functions and prompts of ddpo-pytorch."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tables import table
from trainkit.errors import ConfigError, DataError, RewardError
from trainkit.testing.trainers import tiny_trainer
from trainkit_ddpo import prompts, rewards

torch.manual_seed(0)
IMAGES = torch.stack([torch.full((3, 32, 32), 0.5), torch.rand(3, 32, 32)])


def test_a_size_is_that_of_the_file_in_kilobytes() -> None:
    file = io.BytesIO()
    pixels = (IMAGES[1] * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    flat, noise = rewards.jpeg_incompressibility(IMAGES, prompts=["a", "b"], column=[1, 2])
    assert noise == file.tell() / 1000
    assert flat < noise
    assert rewards.jpeg_compressibility(IMAGES) == [-flat, -noise]
    assert len(rewards.jpeg_incompressibility(IMAGES[:, :1])) == 2


def test_a_scorer_gets_bytes() -> None:
    seen: list[Any] = []

    def scorer(images: Any) -> Any:
        seen.append((images, torch.is_grad_enabled()))
        return images.float().mean((1, 2, 3), keepdim=True)

    assert rewards.aesthetic_score(scorer)(IMAGES, prompts=["a", "b"])[0] == 128.0
    [(images, graded)] = seen
    assert (images.dtype, graded) == (torch.uint8, False)


def test_answers_are_compared_with_those_that_are_expected() -> None:
    asked: list[Any] = []

    def ask(images: list[Image.Image], questions: list[list[str]]) -> list[list[str]]:
        asked.append((images[0].size, questions))
        return [["There are two.", "a cat"], ["There are two.", "an otter"]][: len(images)]

    rows = prompts.counting(["cat", "goose, geese"], 2, 2)
    columns = {name: [row[name] for row in rows] for name in ("questions", "answers")}
    assert rewards.llava_strict_satisfaction(ask)(IMAGES, prompts=["", ""], **columns) == [1.0, 0.5]
    assert asked == [((32, 32), columns["questions"])]
    with pytest.raises(RewardError, match=r"asked \[1\] questions about 1 images, and returned .*; return a list of"):
        rewards.llava_strict_satisfaction(ask)(IMAGES[:1], questions=[["How many?"]], answers=[["two"]])


def test_descriptions_are_compared_with_prompts() -> None:
    def recall(described: list[str], wanted: list[str]) -> list[float]:
        assert wanted == ["This image shows cat.", "This image shows dog."]
        return [float(len(text)) for text in described]

    reward = rewards.llava_bertscore(lambda images, questions: [["a"], ["bc"]], recall)
    assert reward(IMAGES, prompts=["cat", "dog"]) == [1.0, 2.0]


def test_names_make_reward_functions_as_in_ddpo_pytorch(tmp_path: Path) -> None:
    """They are called with images, prompts and metadata, and return a pair; a run calls them with columns, by name."""
    sizes = rewards.jpeg_incompressibility(IMAGES)
    made = rewards.jpeg_compressibility()
    found, info = made(IMAGES, ("a", "b"), ({}, {}))
    assert (found.tolist(), info) == ([-size for size in sizes], {})
    assert made(images=IMAGES, prompts=["a", "b"], metadata=[1, 2]) == found.tolist()
    rows = [{"questions": ["How many?"], "answers": ["two"]}, {"questions": ["How many?"], "answers": ["one"]}]
    answered = rewards.llava_strict_satisfaction(lambda images, questions: [["two"], ["two"]])
    assert answered(IMAGES, ["", ""], rows)[0].tolist() == [1.0, 0.0]
    assert answered(IMAGES, [row["questions"] for row in rows], [["two"], ["one"]]) == [1.0, 0.0]
    trainer = tiny_trainer("ddpo", tmp_path, arguments={"reward_fn": made})
    assert trainer.step([{**trainer.pipeline.take(0, 1)[0]}] * 2)["reward/mean"] < 0


@table("make", [rewards.aesthetic_score, rewards.llava_strict_satisfaction, rewards.llava_bertscore])
def test_a_reward_function_of_a_model_needs_the_model(make: Any) -> None:
    name = make.__name__
    with pytest.raises(ConfigError, match=rf"{name}\(\) needs a .*; given None.*give {name}\(FUNCTION\)"):
        make()


def test_lists_of_words_are_files_or_lists(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("cat\n\n dog \nemu\n", encoding="utf-8")
    assert prompts.from_file(path) == [{"prompt": "cat"}, {"prompt": "dog"}, {"prompt": "emu"}]
    assert prompts.from_file(str(path), 1, 2) == [{"prompt": "dog"}]
    made = prompts.nouns_activities(["otter", "unicorn", "hourglass"], ["at sea", "asleep"])
    assert [row["prompt"] for row in made] == [
        "an otter at sea", "an otter asleep", "a unicorn at sea", "a unicorn asleep", "an hourglass at sea",
        "an hourglass asleep",
    ]  # fmt: skip


def test_imagenet_is_cut_by_the_order_of_its_classes() -> None:
    classes = [f"class {index}" for index in range(1000)]
    assert len(prompts.imagenet_all(classes)) == 1000
    assert prompts.imagenet_animals(classes)[-1] == {"prompt": "class 397"}
    dogs = prompts.imagenet_dogs(classes)
    assert (len(dogs), dogs[0], dogs[-1]) == (118, {"prompt": "class 151"}, {"prompt": "class 268"})


def test_numbers_are_written_in_words() -> None:
    rows = prompts.counting(["cat", "fly", "goose, geese", "fox"], 1, 2)
    assert [row["prompt"] for row in rows] == [
        "one cat", "one fly", "one goose", "one fox", "two cats", "two flies", "two geese", "two foxes",
    ]  # fmt: skip
    assert rows[6]["answers"] == ["two", "goose"]
    assert rows[6]["questions"][0] == "How many geese does this image show?"
    assert [row["prompt"] for row in prompts.counting(["cat"], 19, 21)] == [
        "nineteen cats",
        "twenty cats",
        "twenty-one cats",
    ]


@table(
    "make, words",
    [
        (lambda: prompts.from_file("nowhere.txt"), r"no file 'nowhere.txt'; give the path of a file with one entry"),
        (lambda: prompts.from_file(["a"], 3, 4), r"there are 1 lines, and none from 3 to 4"),
        (lambda: prompts.from_file(["a", 3]), r"a list of words should hold texts; it holds 3"),  # type: ignore[list-item]
        (lambda: prompts.imagenet_all(["a"]), r"ImageNet has 1000 classes; given 1\. Give their names, in the order"),
        (lambda: prompts.counting(["a"], 1, 100), r"numbers should be from 0 to 99, low to high; given 1 to 100"),
    ],
)
def test_bad_input_is_told(make: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make()


def test_a_run_is_trained_on_them(tmp_path: Path) -> None:
    """A drawn prompt is one of the rows."""
    random.seed(0)
    assert {prompts.drawing(prompts.counting(["cat"], 1, 9))()[0] for _ in range(99)} >= {"one cat", "nine cats"}
    trainer = tiny_trainer("ddpo", tmp_path, arguments={"reward_fn": rewards.jpeg_compressibility})
    found = trainer.step([{**trainer.pipeline.take(0, 1)[0]}] * 2)
    assert found["reward/mean"] < 0
