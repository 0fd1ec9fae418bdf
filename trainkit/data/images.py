"""Images of rows: opening them, and what the model's processor makes of them and of their placeholders in a text."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from trainkit.data.batches import IMAGE_INPUTS, Row, is_given
from trainkit.errors import ConfigError, DataError, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE_COLUMNS = ("images", "image")
"""Columns with the images of a row: a list, or one."""
IMAGE_PARTS = {"image": ("image", "path", "url", "base64"), "image_url": ("image_url",)}
"""By the types of parts of messages that are images, the keys that have them."""
MEDIA = (
    *("image", "images", "video", "videos", "audio", "audios"),
    *("pixel_values", "pixel_values_videos", "pixel_attention_mask"),
    *("image_sizes", "image_grid_thw", "video_grid_thw", "input_features", "input_values"),
)
"""Columns with what only models of other inputs than text read: as they are, and as processors prepare them."""
IN_PARTS = (*MEDIA, "image_url", "video_url", "input_audio", "path", "url", "base64")
"""The keys of parts of messages that hold something else than text."""
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
"""What a processor returns besides `IMAGE_INPUTS`; models get token types from the ids."""
REMEMBERED = 2**28
"""The most bytes of prepared images that are kept, because a row is encoded several times."""
THUMBNAIL = (64, 64)
"""The most pixels of a thumbnail, in width and height."""
READERS: WeakKeyDictionary[PreTrainedTokenizerBase, ImageReader] = WeakKeyDictionary()
"""What reads the images of a model, by its tokenizer."""


class ImageReader:
    """Reads the images of rows by the processor of a model.

    Args:
        processor: the processor; None if there is none.
        why_none: why there is none, for messages.
        urls: whether images are fetched from addresses.
    """

    def __init__(self, processor: Any, why_none: str = "", *, urls: bool = False) -> None:
        self.processor, self.why_none, self.urls = processor, why_none, urls
        self._known: dict[tuple[str, ...], tuple[list[str], dict[str, Tensor]]] = {}
        self._bytes = 0

    @property
    def placeholder(self) -> str:
        """The text that stands for an image."""
        token: str = self.processor.image_token
        return token

    @property
    def ids(self) -> list[int]:
        """The token ids that stand for parts of an image, which are never outputs."""
        return [token for token in self.processor.image_token_ids if token is not None] if self.processor else []

    def expand(self, texts: Sequence[str], images: Sequence[Any], what: str) -> tuple[list[str], dict[str, Tensor]]:
        """Return texts in which each placeholder is as long as its image, and the model's inputs by name.

        The same images in the same texts have the same inputs, as an object. Without images there are no inputs.

        Raises:
            DataError: an image cannot be read, or there are more or fewer than placeholders; ``what`` names the row.
        """
        for kind in ("video", "audio"):
            token = getattr(self.processor, f"{kind}_token", None)
            if token and any(token in text for text in texts):
                raise DataError(f"{what} has {token!r} in its text; training is on text and images alone: remove it")
        if not images and (self.processor is None or not any(self.placeholder in text for text in texts)):
            return [*texts], {}
        if self.processor is None:
            raise DataError(f"{what} has images, and {self.why_none}")
        count = sum(text.count(self.placeholder) for text in texts)
        if count != len(images):
            raise DataError(
                f"{what} has {len(images)} image{'s' * (len(images) != 1)} and {count} placeholder"
                f"{'s' * (count != 1)} {self.placeholder!r} in its text; give one for each image"
            )
        opened = [self.open(image, f"{what}: image {index}") for index, image in enumerate(images)]
        key = (*texts, *(hashlib.sha256(f"{each.size}".encode() + each.tobytes()).hexdigest() for each in opened))
        if (known := self._known.get(key)) is None:
            known = self._process(texts, opened, what)
            size = sum(value.nbytes for value in known[1].values())
            if self._bytes + size > REMEMBERED:
                self._known, self._bytes = {}, 0
            self._bytes += size
            self._known[key] = known
        return known

    def _process(self, texts: Sequence[str], images: list[Any], what: str) -> tuple[list[str], dict[str, Tensor]]:
        whole = "".join(texts)
        try:
            made = self.processor(
                text=[whole],
                images=images,
                add_special_tokens=False,
                return_tensors="pt",
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # processors have no exception class of their own
            raise DataError(f"{what}: {type(self.processor).__name__} cannot read its images: {error}") from error
        if unknown := [name for name in made if name not in (*OF_TEXT, *IMAGE_INPUTS)]:
            raise ConfigError(
                f"{type(self.processor).__name__} returns {unknown[0]!r}, and models get {', '.join(IMAGE_INPUTS)} of "
                "images here; give a model of another family"
            )
        expanded, end = list[str](), 0
        replaced = iter([(each["span"], each["replacement"]) for each in made["text_replacement_offsets"][0]])
        for text in texts:
            at, end, parts = end, end + len(text), list[str]()
            for _ in range(text.count(self.placeholder)):
                (start, stop), replacement = next(replaced)
                parts += [whole[at:start], replacement]
                at = stop
            expanded.append("".join([*parts, whole[at:end]]))
        return expanded, {name: made[name] for name in IMAGE_INPUTS if name in made}

    def open(self, image: Any, what: str) -> Any:
        """Return an image, given in one of the forms that rows have, as a `PIL.Image.Image` in RGB.

        It is turned as its EXIF orientation says, as transformers and datasets do.

        Raises:
            DataError: it cannot be read, or is an address, and the run may not fetch it.
        """
        from PIL import Image, ImageOps

        if isinstance(image, Image.Image):
            return ImageOps.exif_transpose(image).convert("RGB")
        if isinstance(image, Mapping):  # an undecoded one of datasets
            image = image["path"] if image.get("bytes") is None and "path" in image else image.get("bytes")
        source: Any = image
        try:
            if isinstance(image, str) and image.startswith("data:"):
                source = io.BytesIO(base64.b64decode(image.partition(",")[2], validate=True))
            elif isinstance(image, str) and image.lower().startswith(("http://", "https://")):
                source = io.BytesIO(self._fetched(image, what))
            elif isinstance(image, bytes):
                source = io.BytesIO(image)
            elif not isinstance(image, str | Path):
                raise ValueError("an image is a path, bytes or a PIL.Image")
            with Image.open(source) as opened:
                return ImageOps.exif_transpose(opened).convert("RGB")
        except DataError:
            raise
        except Exception as error:  # of any format's reader
            raise DataError(f"{what}, {describe(image)}, cannot be read: {error}") from error

    def _fetched(self, address: str, what: str) -> bytes:
        from urllib.request import urlopen

        if not self.urls:
            raise DataError(
                f"{what} is the address {describe(address)}, and nothing is fetched; set data.image_urls to true, or "
                "give a file"
            )
        with urlopen(address, timeout=60) as answer:
            content: bytes = answer.read()
        return content


def thumbnail(image: Any) -> str:
    """Return a small copy of an image as a `data:` address; of one that is not at hand, what it is in words."""
    try:
        small = ImageReader(None).open(image, "an image")
    except DataError:
        return describe(image)
    small.thumbnail(THUMBNAIL)
    small.save(file := io.BytesIO(), "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def image_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a message that is an image, with its image under ``image``, if it has one."""
    given = next((part[key] for key in IMAGE_PARTS[part["type"]] if part.get(key) is not None), None)
    if isinstance(given, Mapping) and "url" in given:
        given = given["url"]
    if given is not None and part.get("base64") is given:
        given = f"data:image;base64,{given}"
    return {"type": "image"} if given is None else {"type": "image", "image": given}


def placed(messages: Sequence[Row], images: Sequence[Any], placeholder: str) -> list[Row]:
    """Return messages in which the images of the row are parts, if none is one yet.

    They are where the text of users has ``placeholder`` or ``<image>``, as in the data of LLaVA, or begin the first
    message of the user.
    """
    parts = [part for message in messages for part in parts_of(message)]
    first = next((at for at, message in enumerate(messages) if message.get("role") == "user"), None)
    if not images or first is None or any(part["type"] == "image" for part in parts):
        return [*messages]
    marks = re.compile(f"({re.escape(placeholder)}|<image>)")
    split = [
        {**message, "content": _split(message, marks)} if message.get("role") == "user" else message
        for message in messages
    ]
    if any(part["type"] == "image" for message in split for part in parts_of(message)):
        return split
    begun = {**messages[first], "content": [*({"type": "image"} for _ in images), *parts_of(messages[first])]}
    return [*messages[:first], begun, *messages[first + 1 :]]


def _split(message: Row, marks: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return the parts of a message of text, with a part for each mark in it."""
    texts = [text for part in parts_of(message) for text in marks.split(part["text"]) if text]
    return [{"type": "image"} if marks.fullmatch(text) else {"type": "text", "text": text} for text in texts]


def save_processor(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the processor that reads images for a tokenizer into a directory, if there is one."""
    if (reader := READERS.get(tokenizer)) is not None and reader.processor is not None:
        reader.processor.save_pretrained(directory)


def parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message in parts of text and images."""
    content = message.get("content")
    return content if isinstance(content, list) else [] if not content else [{"type": "text", "text": content}]


def images_of(messages: Sequence[Mapping[str, Any]], images: Sequence[Any], what: str) -> list[Any]:
    """Return the images of the parts of messages, in their order; those without one take one of ``images``.

    Raises:
        DataError: more or fewer of ``images`` are needed; ``what`` names the row.
    """
    parts = [part for message in messages for part in parts_of(message) if part["type"] == "image"]
    bare = sum("image" not in part for part in parts)
    if bare != len(images):
        raise DataError(
            f"{what} has {len(images)} image{'s' * (len(images) != 1)} in its column, and {bare} part"
            f"{'s' * (bare != 1)} of its messages without one; give one for each"
        )
    left = iter(images)
    return [part["image"] if "image" in part else next(left) for part in parts]


def in_output(what: str) -> DataError:
    """Return the error for an image in an output of the row ``what``."""
    return DataError(f"{what} has an image in an output, and models write text alone; put it into the prompt")


def given_images(row: Mapping[str, Any], what: str = "the row") -> list[Any]:
    """Return the images in the columns of a row.

    Raises:
        DataError: both columns hold some; ``what`` names the row.
    """
    columns = [row[name] for name in IMAGE_COLUMNS if is_given(row.get(name))]
    if len(columns) > 1:
        raise DataError(f"{what} has images in both columns, {' and '.join(IMAGE_COLUMNS)}; give them in one")
    column: Any = columns[0] if columns else []
    return [*column] if isinstance(column, list | tuple) else [column]


def with_images(row: Row, images: Sequence[Any]) -> Row:
    """Return a row whose images are these, in the column ``images``."""
    rest = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
    return {**rest, "images": [*images]} if images else rest


def expanded(tokenizer: PreTrainedTokenizerBase, row: Row, what: str) -> tuple[Row, dict[str, Tensor]]:
    """Return a row whose placeholders are as long as its images, and what the model reads of these.

    Raises:
        DataError: as `ImageReader.expand`.
    """
    names = [name for name in ("prompt", "chosen", "rejected") if isinstance(row.get(name), str)]
    texts = row["turns"] if "turns" in row else [row[name] for name in names]
    texts, inputs = READERS[tokenizer].expand(texts, given_images(row), what)
    changed: Row = {"turns": texts} if "turns" in row else dict(zip(names, texts, strict=True))
    if "turns" in row and "prompt" in row:  # a sample to whose prompt the policy responds
        changed["prompt"] = texts[0]
    return {**row, **changed}, inputs
