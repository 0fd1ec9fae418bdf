"""Reward functions of ddpo-pytorch (Black et al. 2023): of images [B, 1 or 3, H, W] with values from 0 to 1.

`jpeg_compressibility` and `jpeg_incompressibility` are reward functions. The others return one, made of a model that
you give, such as a scorer of aesthetics or a model that answers questions about images.

In ddpo-pytorch, each of these names makes a reward function, which is called with images, prompts and metadata and
returns a pair: ``rewards, info = jpeg_compressibility()(images, prompts, metadata)``. This works too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainkit.errors import ConfigError, RewardError, describe
from trainkit_ddpo.images import to_pil

T = TypeVar("T", bound=Callable[..., Any])
Ask = Callable[[list[Image.Image], list[list[str]]], Sequence[Sequence[str]]]
"""Answers the questions about each image: B images, and the questions of each -> the answers to each."""
Reward = Callable[..., list[float]]
"""A reward function: ``(images, prompts, **columns)`` -> a number for each image."""


def _as_in_ddpo_pytorch(reward: Reward) -> Callable[..., Any]:
    """Return a reward function that also takes images, prompts and metadata, and then returns rewards and a dict."""

    @wraps(reward)
    def called(*given: Any, **columns: Any) -> Any:
        if len(given) != 3 or not all(isinstance(each, Mapping) for each in given[2]):
            return reward(*given, **columns)
        images, prompts, rows = given
        named = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        return np.array(reward(images, prompts=list(prompts), **named)), {}

    return called


def _made_or_called(reward: Reward) -> Callable[..., Any]:
    """Return a reward function that returns itself if it is called without arguments."""
    made = _as_in_ddpo_pytorch(reward)

    @wraps(reward)
    def called(*given: Any, **columns: Any) -> Any:
        return made(*given, **columns) if given or columns else made

    return called


def _needed(name: str, given: T | None, what: str) -> T:
    """Return the function of which a reward function is made, or raise a `ConfigError` if there is none."""
    if not callable(given):
        raise ConfigError(
            f"{name}() needs {what}; given {describe(given)}. ddpo-pytorch loads its own model or asks its own "
            f"server; write a function that calls yours, and give {name}(FUNCTION) as the reward function"
        )
    return given


@_made_or_called
def jpeg_incompressibility(images: Tensor, **_: Any) -> list[float]:
    """Return the size of each image as a JPEG of quality 95, in kilobytes."""
    sizes = []
    for image in images:
        file = io.BytesIO()
        to_pil(image).save(file, "JPEG", quality=95)
        sizes.append(file.tell() / 1000)
    return sizes


@_made_or_called
def jpeg_compressibility(images: Tensor, **_: Any) -> list[float]:
    """Return minus the size of each image as a JPEG of quality 95, in kilobytes."""
    return [-size for size in jpeg_incompressibility(images)]


def aesthetic_score(scorer: Callable[[Tensor], Any] | None = None) -> Reward:
    """Return a reward function: the numbers that a scorer gives images.

    Args:
        scorer: called without gradient with images [B, C, H, W] as uint8, on the device of the run; returns a number
            for each. ddpo-pytorch's is a linear probe on CLIP embeddings.

    Raises:
        ConfigError: there is no scorer.
    """
    score = _needed("aesthetic_score", scorer, "a scorer, called with images [B, C, H, W] as uint8")

    @_as_in_ddpo_pytorch
    @torch.no_grad()
    def reward(images: Tensor, **_: Any) -> list[float]:
        scores = score((images.clamp(0, 1) * 255).round().to(torch.uint8))
        return torch.as_tensor(scores).flatten().tolist()

    return reward


def llava_strict_satisfaction(ask: Ask | None = None) -> Reward:
    """Return a reward function: the share of questions about an image whose answer contains the expected one.

    It needs the columns ``questions`` and ``answers`` of the prompts, a list each, as `trainkit_ddpo.prompts.counting`
    makes them.

    Args:
        ask: answers questions about images, such as a call of a server of LLaVA.

    Raises:
        ConfigError: there is no such function.
    """
    answer = _needed("llava_strict_satisfaction", ask, "a function that answers questions about images")

    @_as_in_ddpo_pytorch
    def reward(images: Tensor, questions: Sequence[Any], answers: Sequence[Any], **_: Any) -> list[float]:
        found = _answered(answer, images, [list(each) for each in questions])
        return [
            sum(wanted in given for wanted, given in zip(expected, told, strict=True)) / len(expected)
            for expected, told in zip(answers, found, strict=True)
        ]

    return reward


def llava_bertscore(
    ask: Ask | None = None,
    recall: Callable[[list[str], list[str]], Any] | None = None,
    question: str = "What does this image show? Answer in one short sentence.",
    reference: str = "This image shows {prompt}.",
) -> Reward:
    """Return a reward function: how much of the prompt is in the description of the image, such as BERTScore's recall.

    Args:
        ask: answers questions about images, such as a call of a server of LLaVA.
        recall: called with descriptions and references, B each; returns a number for each pair.
        question: what is asked about each image.
        reference: what a description is compared with; ``{prompt}`` stands for the prompt.

    Raises:
        ConfigError: there are no such functions.
    """
    answer = _needed("llava_bertscore", ask, "a function that answers questions about images")
    compare = _needed("llava_bertscore", recall, "a function that compares texts, as the argument recall")

    @_as_in_ddpo_pytorch
    def reward(images: Tensor, prompts: Sequence[str], **_: Any) -> list[float]:
        described = [answers[0] for answers in _answered(answer, images, [[question]] * len(images))]
        wanted = [reference.replace("{prompt}", prompt) for prompt in prompts]
        return torch.as_tensor(compare(described, wanted)).flatten().tolist()

    return reward


def _answered(ask: Ask, images: Tensor, questions: list[list[str]]) -> Sequence[Sequence[str]]:
    """Return the answers to the questions about each image, checked to be as many as the questions."""
    found = ask([to_pil(image) for image in images], questions)
    counts = [len(each) for each in questions]
    if isinstance(found, str) or [len(each) for each in found if not isinstance(each, str)] != counts:
        raise RewardError(
            f"the function that answers questions was asked {counts} questions about {len(images)} images, and "
            f"returned {describe(found)}; return a list of answers for each image"
        )
    return found
