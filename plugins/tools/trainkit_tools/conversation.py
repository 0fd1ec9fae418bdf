"""A conversation with a model that is tried, whose answers are shown while they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkit.data import Images, PromptEncoder, written_prompts
from trainkit.data.images import READERS, expanded
from trainkit.errors import ConfigError, DataError
from trainkit.rollouts import cut_at_stop, decode
from trainkit.seeding import derive_seed
from trainkit.trainer.inference import Tried

SHORTER = "Shorten the message, or lower --max-new-tokens"


class Conversation:
    """A conversation with a model, whose answers are told while they are written.

    Without a chat template, every message is text that the model continues, and nothing is remembered.

    Args:
        tried: the model.
        system: the system prompt.

    Raises:
        ConfigError: there is a system prompt, and no chat template to write it with.
    """

    def __init__(self, tried: Tried, system: str | None = None) -> None:
        self.tried, self.turn = tried, 0
        self.dropped = 0
        """Messages that the last answer did not read, because the context had no room for them."""
        self.messages: list[dict[str, Any]] = []
        self.begin(system)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return getattr(self.tried.trainer.tokenizer, "chat_template", None) is not None

    def begin(self, system: str | None) -> None:
        """Forget all messages, and begin with a system prompt; None or empty text: with none."""
        if system and not self.has_template:
            raise ConfigError(
                f"the tokenizer of {self.tried.source.model!r} has no chat template, so there is no place for a system "
                "prompt; write it at the beginning of the text"
            )
        self.system, self.messages = system or None, []
        self.shown: list[Any] = []
        """The images of the next message."""
        self.last: Any = None
        """The content of the last message."""

    def show(self, path: str) -> None:
        """Put an image into the next message.

        Raises:
            ConfigError: the model reads none.
            DataError: it cannot be read.
        """
        reader = READERS.get(self.tried.trainer.tokenizer)
        if reader is None:
            raise ConfigError(f"{self.tried.source.model!r} reads no images; write text, or give a model that does")
        self.shown.append(reader.open(path, "the image"))

    def again(self, tell: Callable[[str], None]) -> str:
        """Return another answer to the last message, which is remembered instead of the first.

        Raises:
            ConfigError: there is no message yet.
        """
        if self.last is None:
            raise ConfigError("there is no message yet that could be answered again; write one")
        del self.messages[-2:]
        return self.answer(self.last, tell)

    def answer(self, message: Any, tell: Callable[[str], None]) -> str:
        """Return the answer to a message, which is remembered; ``tell`` gets its text, piece after piece.

        The message is its content: text, to which images are added that are to be shown, or parts.

        If ``tell`` or the sampler is interrupted (KeyboardInterrupt), the answer is what has been told.

        Raises:
            DataError: the message has no tokens, or too many for the context; it is not remembered.
        """
        trainer, settings = self.tried.trainer, self.tried.settings
        if self.shown:
            parts = [{"type": "image", "image": image} for image in self.shown]
            message = [*parts, {"type": "text", "text": message}]
        messages = [*self.messages, {"role": "user", "content": message}]
        query, images = self._fitting(messages, settings.max_new_tokens)
        self.last, self.shown = message, []
        told = _Told(trainer.tokenizer, settings.stop_sequences, trainer.config.rollout.skip_special_tokens, tell)
        seed, self.turn = derive_seed(trainer.config.train.seed, "chat", self.turn), self.turn + 1
        sampler: Any = trainer.core_sampler()
        trainer.unwrapped.eval()
        try:
            with trainer.accelerator.autocast():
                sampler.generate([query], settings, [seed], watch=lambda _, new: told.add(new.tolist()), **images)
            told.end()
        except KeyboardInterrupt:
            pass  # the answer is what has been told
        if self.has_template:
            self.messages = [*messages, {"role": "assistant", "content": told.text}]
        return told.text

    def _fitting(self, messages: list[dict[str, Any]], room: int) -> tuple[list[int], dict[str, Images]]:
        """Return the tokens and images of the newest messages that leave room for an answer; forget the others."""
        self.dropped = 0
        while True:
            query, images = self._encode(messages)
            if self.tried.trainer.text.fits(len(query), room):
                return query, images
            if len(messages) < 3:
                what, limit = self.tried.trainer.text.what_fits, len(query)
                raise DataError(f"the message has {limit} tokens, and the answer may have {room}; {what}. {SHORTER}")
            del messages[:2]
            self.dropped += 2

    def _encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], dict[str, Images]]:
        trainer, row = self.tried.trainer, {"prompt": messages[-1]["content"]}
        if self.has_template:
            first = [] if self.system is None else [{"role": "system", "content": self.system}]
            [row] = written_prompts([{"prompt": [*first, *messages]}], trainer.tokenizer)
        images, device = trainer.text.images([row]), trainer.accelerator.device
        if trainer.text.reads_images:
            row, _ = expanded(trainer.tokenizer, row, "the message")
        encode = PromptEncoder(trainer.tokenizer, None, ends=trainer.text.is_encoder_decoder)
        return encode(row["prompt"], "the message"), {} if images is None else {"images": images.to(device)}


class _Told:
    """The text of an answer, told as far as later tokens cannot change it."""

    def __init__(self, tokenizer: Any, stops: list[str], skip: bool, tell: Callable[[str], None]) -> None:
        self.tokenizer, self.stops, self.skip, self.tell = tokenizer, stops, skip, tell
        self.ids: list[int] = []
        self.text = ""

    def add(self, ids: list[int]) -> None:
        """Take further tokens."""
        self.ids += ids
        text = self._whole()
        kept = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        settled = text[: len(text) - kept].rstrip("\ufffd")  # the bytes of a character may be in several tokens
        settled = settled.rstrip()  # which a stop string, or punctuation with some tokenizers, would remove
        if settled.startswith(self.text):
            self._tell(settled)

    def end(self) -> None:
        """Tell the rest."""
        self._tell(self._whole())

    def _whole(self) -> str:
        [text] = decode(self.tokenizer, [self.ids], self.skip) or [""]
        return cut_at_stop(text, self.stops)

    def _tell(self, text: str) -> None:
        new, self.text = text[len(self.text) :], text
        if new:
            self.tell(new)
