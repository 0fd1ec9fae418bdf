"""Conversations as text: rendering by a chat template, and locating the assistant's part in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from weakref import WeakKeyDictionary

from trainkit.data.batches import is_given
from trainkit.data.images import (
    IMAGE_PARTS,
    IN_PARTS,
    MEDIA,
    READERS,
    given_images,
    image_part,
    images_of,
    in_output,
    parts_of,
    placed,
)
from trainkit.data.pipeline import id_count
from trainkit.errors import ConfigError, DataError, describe, suggest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Output = tuple[int, int] | None
"""Where an output begins and ends in the text of a conversation; None if that is not known."""
Span = tuple[str, bool]
"""Text, and whether it is an output."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}### {{ message['role'] }}{{ '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant{{ '\n' }}{% endif %}"
)
"""A chat template of plain text and EOS, for tokenizers that have none: it needs no new tokens."""

TEMPLATES = {"plain": PLAIN_TEMPLATE} | {
    path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
TEMPLATES["llama3.2"] = TEMPLATES["llama3.1"].replace("'26 Jul 2024'", "strftime_now('%d %b %Y')")
"""Chat templates by name, which mark the outputs of the assistant; each renders what the templates of its family do."""


def read_template(source: str) -> str:
    """Return the chat template of a name in `TEMPLATES`, or of a file.

    Raises:
        ConfigError: there is neither.
    """
    if source in TEMPLATES:
        return TEMPLATES[source]
    try:
        return Path(source).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer.chat_template is {source!r}, which is no file that can be read; give a file with a Jinja "
            f"template, or one of {', '.join(TEMPLATES)}{suggest(source, TEMPLATES)}"
        ) from error


SETTINGS = ("tools", "chat_template_kwargs")
"""Columns of a row that are passed to the template with its messages."""


def is_conversation(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether ``value`` is a list of dicts, as messages are."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(message, Mapping) for message in value)


SENDERS = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system", "tool")}}
"""Roles by the senders of ShareGPT's messages."""


SAID = {"reasoning_content", "reasoning", "thinking", "tool_calls"}
"""Keys of messages, besides their content, with what the model has written."""
TRIAL = "\ue000"
"""Takes the place of a message to find where it is rendered."""
STARTS: WeakKeyDictionary[Any, datetime] = WeakKeyDictionary()
"""When the run of a tokenizer began, which is the present in its chat template: text does not change overnight."""
KEPT: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()
"""By tokenizer, the kinds of conversations whose answers its template has kept as they are when others follow."""
MOST_KINDS = 4096
"""The most of these that are remembered."""
TAG = re.compile(r"<[^<>\s]*>")
"""What a template may look for in the content of a message, such as reasoning."""
NOW = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>[^"']*)(?P=quote)\s*\)""")
"""The present, in a template."""
TRAINED = ("weight", "train")
"""Keys of a message of the assistant that say whether it is an output: 0 or 1, false or true."""


def plain_messages(messages: Sequence[Mapping[str, Any]], what: str, *, images: bool = False) -> list[Message]:
    """Return messages with ``role``, and ``content`` of text; copies.

    ShareGPT's ``from`` and ``value`` are replaced. Content in parts, ``{"type": "text", "text": ...}``, is joined,
    unless some are images, which is an error without ``images``. In calls of tools, arguments of JSON text are read,
    and keys whose value is None are removed at any depth, because datasets use them to fill tables.

    Raises:
        DataError: a sender is not known, content or a part of it is not text, a message has images in another key, or
            a call of a tool has no name or arguments that are no JSON object; ``what`` names the row.
    """
    plain = []
    for index, message in enumerate(messages):
        copied, where = dict(message), f"{what}: message {index}"
        if "from" in copied and "value" in copied and "role" not in copied:
            sender = copied.pop("from")
            if sender not in SENDERS:
                raise DataError(
                    f"{where} is from {describe(sender)}; known are {', '.join(SENDERS)}. Give it the "
                    "'role' and 'content' that the chat template expects"
                )
            copied = {"role": SENDERS[sender], "content": copied.pop("value"), **copied}
        if unread := [key for key in MEDIA if is_given(copied.get(key))]:
            instead = "images are parts of its content, or in the column 'images' of the row, and " if images else ""
            raise DataError(
                f"{where} has the key {unread[0]!r}, which is not read; {instead}training is on "
                f"{'text and images' if images else 'text'} alone. Remove the key or the row"
            )
        if copied.get("content") is not None:
            copied["content"] = _content_of(copied["content"], where, images)
        if copied.get("tool_calls") is not None:
            copied["tool_calls"] = _calls(copied["tool_calls"], where)
        plain.append(copied)
    return plain


def _content_of(content: Any, where: str, images: bool) -> str | list[dict[str, Any]]:
    """Return the content of a message as text, or if some parts are images in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        todo = "; convert it by json.dumps" if isinstance(content, Mapping) else ""
        raise DataError(
            f"{where}: its content should be text, or a list of parts of text; given {describe(content)}{todo}"
        )
    parts = list[dict[str, Any]]()
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        held = {key for key in ("text", *IN_PARTS) if kind is not None and is_given(part.get(key))}
        if images and kind in IMAGE_PARTS and held <= {*IMAGE_PARTS[kind]}:
            parts.append(image_part(part))
            continue
        if kind != "text" or not isinstance(part.get("text"), str) or held - {"text"}:
            form = "{'type': 'text', 'text': ...}" + (" or {'type': 'image', 'image': ...}" if images else "")
            raise DataError(
                f"{where}: part {index} of its content is {describe(part)}; a part should be {form}, because training "
                f"is on {'text and images' if images else 'text'} alone. Remove the part or the row"
            )
        parts.append({"type": "text", "text": part["text"]})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools of a message, each with its arguments as a dict."""
    plain = _plain(calls)
    if not isinstance(plain, list) or not all(isinstance(call, dict) for call in plain):
        raise DataError(f"{where}: tool_calls should be a list of dicts; given {describe(calls)}")
    for call in plain:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: a call of a tool should be {{'function': {{'name': ..., 'arguments': {{...}}}}}}; "
                f"given {describe(call)}"
            )
        arguments = function.get("arguments", {})
        function["arguments"] = {} if arguments == "" else _plain(arguments)
        if not isinstance(function["arguments"], dict):
            raise DataError(
                f"{where}: the arguments of a call of {function['name']!r} should be a dict, or JSON text of one; "
                f"given {describe(arguments)}"
            )
    return plain


def _plain(value: Any) -> Any:
    """Return the value of JSON text; of dicts and lists a copy without the keys whose value is None, at any depth."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return _without_none(value)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value


def _is_trained(message: Message, where: str) -> bool:
    """Remove from a message what says whether it is trained on; return whether it is."""
    flags = {key: message.pop(key) for key in TRAINED if key in message}
    spoken = message["role"] == "assistant"
    for key, value in flags.items():
        if value not in (0, 1):
            raise DataError(f"{where}: {key} should be 0 or 1, false or true; given {describe(value)}")
        if value and not spoken:
            raise DataError(
                f"{where}: {key} is {value!r}, and its role is {message['role']!r}; only messages of the assistant are "
                "trained on. Remove it"
            )
    return spoken and all(flags.values())


class Chat:
    """Renders the conversations of one row with the tokenizer's chat template.

    Args:
        tokenizer: has a chat template; None if the caller expects no conversations.
        row: its columns ``tools`` and ``chat_template_kwargs`` are passed to the template.
        what: names the row in errors.
        ends: token ids at which responses end, besides EOS.

    Raises:
        DataError: raised by all methods; there is no template, it cannot render the messages, or a message is invalid.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        row: Mapping[str, Any],
        what: str,
        *,
        ends: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.what, self.ends = tokenizer, what, ends
        given = {name: _plain(row.get(name)) for name in SETTINGS}
        for name, kind in zip(SETTINGS, (list, dict), strict=True):
            if given[name] is not None and not isinstance(given[name], kind):
                raise DataError(
                    f"{what}: {name} should be a {kind.__name__}, or JSON text of one; given {describe(row[name])}"
                )
        tools, settings = given.values()
        self.settings: dict[str, Any] = {**({"tools": tools} if tools else {}), **(settings or {})}
        self.reads_images = tokenizer is not None and tokenizer in READERS
        self._column = given_images(row, what) if self.reads_images else []

    def images(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the images of a conversation in the order of their placeholders: of its parts, or of the row."""
        return images_of(self._read(messages)[0], self._column, self.what)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a prompt, ending with the assistant's header, or in the last message if that is the assistant's."""
        checked, _ = self._read(messages)
        goes_on = checked[-1]["role"] == "assistant"
        return self._write(checked, add_generation_prompt=not goes_on, continue_final_message=goes_on)

    def outputs(
        self, prompt: Sequence[Mapping[str, Any]], *completions: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[str]]:
        """Return the prompt's text, and the text of each completion to it, up to the EOS that ends it.

        Raises:
            DataError: the template renders the prompt differently when a completion follows, or a message of a
                completion is not to be trained on.
        """
        asked, texts = self.prompt(prompt), []
        for completion in completions:
            read, trained = self._read(completion, place=False)
            if any(part["type"] == "image" for message in read for part in parts_of(message)):
                raise in_output(self.what)
            if any(message["role"] == "assistant" and not keep for message, keep in zip(read, trained, strict=True)):
                raise DataError(
                    f"{self.what}: {' or '.join(TRAINED)} excludes a message of an output, and pairs compare whole "
                    "outputs; move what is before the compared answer to the prompt, or remove the key"
                )
            whole = self._write([*self._read(prompt)[0], *read])
            if not whole.startswith(asked):
                raise self._no_prefix(asked, whole)
            text = whole[len(asked) :]
            texts.append(text[: _end(text, self._closing)] or text)
        return asked, texts

    def samples(self, messages: Sequence[Mapping[str, Any]], first: int = 0) -> list[list[Span]]:
        """Return the conversation's text in pieces; outputs are the assistant's messages from message ``first`` on.

        A message that the template writes differently when others follow, such as without its reasoning, or after
        another text than the prompt, is no output there: before the whole, the list has the conversation up to each of
        these, which alone is output, as the model reads and writes it.

        An output is the text between ``{% generation %}`` and ``{% endgeneration %}`` in the template. If the template
        has no such marks, it is the text that an assistant's message adds to the rendering of the messages before it.
        EOS, or another of ``ends``, ends an output, whatever the template writes after it. Text after the last output
        is dropped, and messages with ``weight`` 0 or ``train`` false are no outputs.

        Raises:
            DataError: no message is the assistant's; or the template has no marks, and a message cannot be located.
        """
        checked, trained = self._read(messages)
        marked = re.search(r"\{%-?\s*generation\s*-?%\}", self._template)
        locate = self._marked if marked else self._by_prefixes
        whole, outputs = locate(checked, trained, first)
        samples, answers = list[list[Span]](), [at for at in range(first, len(checked)) if trained[at]]
        kept = KEPT.setdefault(self.tokenizer, set())
        kind = self._kind(checked), tuple(answers)
        known = (kind in kept and None not in outputs) or len(answers) != len(outputs)
        pairs = [] if known else list(zip(answers, outputs, strict=True))
        for at, output in pairs:
            asked, begun = self._asked(checked, at), checked[: at + 1]
            text = whole if len(begun) == len(checked) else self._write(begun)
            if output is not None and whole.startswith(asked) and text.startswith(whole[: output[1]]):
                continue
            if not marked:
                samples.append(self._spans(*locate(begun, trained[: at + 1], at)))
            elif marks := self._marks(begun):
                start, end = marks[-1]
                if text.startswith(asked):
                    asked = text[: (start := max(start, len(asked)))]
                samples.append(self._spans(asked + text[start:], [(len(asked), len(asked) + end - start)]))
            outputs.remove(output)
        if pairs and not samples and len(kept) < MOST_KINDS:
            kept.add(kind)
        samples = [spans for spans in [*samples, self._spans(whole, outputs)] if spans]
        if not samples:
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in checked))
            excluded = f", and not excluded by {' or '.join(TRAINED)}" if "'assistant'" in roles else ""
            raise DataError(
                f"{self.what} has no message of the assistant to learn from; its role is 'assistant'{excluded}, "
                f"given {roles}"
            )
        return samples

    def _kind(self, messages: list[Message]) -> str:
        """Return what decides whether a template writes messages differently when others follow, besides their text."""
        parts = []
        for message in messages:
            pieces = parts_of(message)
            text, types = "".join(piece.get("text", "") for piece in pieces), [piece["type"] for piece in pieces]
            parts.append((message["role"], sorted(message), types, TAG.findall(text), bool(text), text == text.strip()))
        return repr((self._template, self.settings, parts))

    def _asked(self, messages: list[Message], at: int) -> str:
        """Return the text that message ``at`` of the assistant answers; empty if it goes on from another one."""
        follows = at and messages[at - 1]["role"] != "assistant"
        return self._write(messages[:at], add_generation_prompt=True) if follows else ""

    def _spans(self, whole: str, outputs: list[Output]) -> list[Span]:
        """Return a text in pieces up to the last output; none without one."""
        spans, at = [], 0
        for start, end in filter(None, outputs):
            spans += [(whole[at:start], False), (whole[start:end], True)]
            at = end
        return _closed([*spans, (whole[at:], False)], self._closing)

    def unrendered(self, messages: Sequence[Mapping[str, Any]], first: int | None = None) -> list[str]:
        """Return which parts of a conversation the template leaves out of the text: ``tools``, or keys of messages.

        Messages of the assistant from message ``first`` on are looked for in the text that ends with them.
        A key of `SAID` is left out if the text is the same without it; content, if it is not in the text, whatever
        its blanks.
        """
        checked, _ = self._read(messages)
        whole, names = self._write(checked), []
        if "tools" in self.settings:
            bare = Chat(self.tokenizer, {}, self.what)
            bare.settings = {key: value for key, value in self.settings.items() if key != "tools"}
            names += ["tools"] * (bare._write(checked) == whole)
        for at, message in enumerate(checked):
            alone = first is not None and at >= first and message["role"] == "assistant"
            rest = [] if alone else checked[at + 1 :]
            text = self._write([*checked[: at + 1], *rest]) if alone else whole
            texts = [part["text"] for part in parts_of(message) if part["type"] == "text"]
            names += ["content"] * any(piece and not _is_in(piece, text) for piece in texts)
            for key in sorted(SAID & message.keys()):
                other = {"content": "", **{name: value for name, value in message.items() if name != key}}
                try:
                    names += [key] * (self._write([*checked[:at], other, *rest]) == text)
                except DataError:  # the template needs it
                    continue
        return [*dict.fromkeys(names)]

    # ---------------------------------------------------------------------------------------------------- internals

    @property
    def _template(self) -> str:
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise DataError(
                f"{self.what} is a conversation, and the tokenizer has no chat template to write it with. Set "
                "tokenizer.chat_template to that of the model's family "
                f"({', '.join(TEMPLATES)}), to a file, or to 'plain', which needs no special tokens but EOS"
            )
        template: str = self.tokenizer.get_chat_template(tools=self.settings.get("tools"))
        began = STARTS.get(self.tokenizer)
        return template if began is None else NOW.sub(lambda call: repr(began.strftime(call["format"])), template)

    @property
    def _closing(self) -> re.Pattern[str]:
        """A pattern of the texts of the tokens that end an output."""
        assert self.tokenizer is not None
        in_vocabulary = [token for token in self.ends if token < id_count(self.tokenizer)]
        texts = {str(self.tokenizer.eos_token), *self.tokenizer.convert_ids_to_tokens(in_vocabulary)}
        return re.compile("|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))))

    def _read(self, messages: Sequence[Mapping[str, Any]], *, place: bool = True) -> tuple[list[Message], list[bool]]:
        """Return the messages as the template gets them, and which of them are trained on.

        Keys whose value is None, which datasets use to fill tables, are removed. The images of the row are parts of
        the first user message, unless parts of messages are images, or ``place`` is false.
        """
        read, trained = [], []
        plain = plain_messages(messages, self.what, images=self.reads_images)
        if place and self._column:
            assert self.tokenizer is not None
            reader = READERS[self.tokenizer]
            plain = placed(plain, self._column, reader.placeholder if reader.processor else "<image>")
        for index, message in enumerate(plain):
            fields = {key: value for key, value in message.items() if value is not None}
            empty = fields.keys() <= {"role", "name", *TRAINED}  # with content of None, or with tool calls of None
            if not isinstance(message.get("role"), str) or empty or not ({"content", "tool_calls"} & message.keys()):
                raise DataError(
                    f"{self.what}: message {index} should be a dict with 'role' and 'content'; "
                    f"given {describe(message)}"
                )
            trained.append(_is_trained(fields, f"{self.what}: message {index}"))
            read.append(fields)
        return read, trained

    def _write(self, messages: list[Message], **flags: Any) -> str:
        settings: dict[str, Any] = {"chat_template": self._template, **flags, **self.settings}
        assert self.tokenizer is not None
        return str(self._tried(partial(self.tokenizer.apply_chat_template, tokenize=False, **settings), messages))

    def _tried(self, render: Callable[[list[Message]], Any], messages: list[Message]) -> Any:
        """Call ``render``; where it fails, again with the arguments of calls as text, which some templates need."""
        messages = [self._for_template(message) for message in messages]
        try:
            return render(messages)
        except Exception as error:  # a template may raise any exception
            fault = DataError(f"{self.what}: the chat template cannot render it: {error}")
            if not any("tool_calls" in message for message in messages):
                raise fault from error
            try:
                return render(_with_text_arguments(messages))
            except Exception:
                raise fault from error

    def _for_template(self, message: Message) -> Message:
        """Return a message as templates of models that read images expect it: in parts, which say where images are."""
        if not self.reads_images or "content" not in message:
            return message
        parts = [part if part["type"] == "text" else {"type": "image"} for part in parts_of(message)]
        if "image" in self._template:
            return {**message, "content": parts}
        if any(part["type"] == "image" for part in parts):
            raise DataError(
                f"{self.what} has images, and the chat template has no place for them; set tokenizer.chat_template to "
                "that of the model's processor"
            )
        return message

    def _marks(self, messages: list[Message]) -> list[tuple[int, int]]:
        """Return where the marked parts of the rendered conversation begin and end."""
        from transformers.utils.chat_template_utils import render_jinja_template

        assert self.tokenizer is not None
        settings: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.settings}
        render = partial(
            render_jinja_template, chat_template=self._template, return_assistant_tokens_mask=True, **settings
        )
        marks: list[tuple[int, int]] = self._tried(lambda given: render(conversations=[given]), messages)[1][0]
        return [(start, end) for start, end in marks if end > start]

    def _marked(self, messages: list[Message], trained: list[bool], first: int) -> tuple[str, list[Output]]:
        whole, asked = self._write(messages), self.prompt(messages[:first]) if first else ""
        if not whole.startswith(asked):
            raise self._no_prefix(asked, whole)
        spoken = [message["role"] == "assistant" for message in messages]
        before = len(self._marks(messages[:first])) if any(spoken[:first]) else 0
        marks: list[Output] = [(max(start, len(asked)), end) for start, end in self._marks(messages)[before:]]
        keeps = [keep for said, keep in zip(spoken[first:], trained[first:], strict=True) if said]
        if all(keeps):
            return whole, marks
        if len(marks) != len(keeps):
            raise DataError(
                f"{self.what}: {' or '.join(TRAINED)} excludes messages, and the chat template marks {len(marks)} "
                f"parts of {len(keeps)} messages of the assistant, so which to exclude is not known. Use a template "
                "that marks each message of the assistant once"
            )
        return whole, [mark for mark, keep in zip(marks, keeps, strict=True) if keep]

    def _by_prefixes(self, messages: list[Message], trained: list[bool], first: int) -> tuple[str, list[Output]]:
        whole, spans = self._write(messages), list[Output]()
        for index in range(first, len(messages)):
            if not trained[index]:
                continue
            if index == 0:
                raise DataError(
                    f"{self.what} begins with a message of the assistant; begin with the one that it answers, or mark "
                    "the assistant's part in the chat template with {% generation %}"
                )
            before, after = (
                self._write(messages[:index], add_generation_prompt=True),
                self._write(messages[: index + 1]),
            )
            end = len(after) if whole.startswith(after) else self._end_of_trial(messages, index, before, whole)
            if whole.startswith(before) and end is not None and end >= len(before):
                spans.append((len(before), end))
            elif index + 1 < len(messages):
                spans.append(None)
            else:
                raise self._no_prefix(before, whole)
        return whole, spans

    def _end_of_trial(self, messages: list[Message], index: int, before: str, whole: str) -> int | None:
        """Return where a message ends that the template renders differently when others follow; None if unknown.

        Another text takes the place of the message: what then follows it is the rest of the conversation, and what
        follows it where it is the last message is what closes a message.
        """
        trial: Message = {"role": "assistant", "content": TRIAL}
        try:
            last = self._write([*messages[:index], trial])
            among = self._write([*messages[:index], trial, *messages[index + 1 :]])
        except DataError:  # e.g. an answer of a tool without a call of it
            return None
        closing, rest = (text[len(before) :].partition(TRIAL)[2] for text in (last, among))
        if not rest.startswith(closing) and self.tokenizer is not None:  # EOS may be written once, at the end of all
            closing = closing.removesuffix(str(self.tokenizer.eos_token))
        is_certain = among.startswith(before) and closing and rest.startswith(closing) and whole.endswith(rest)
        return len(whole) - len(rest) + len(closing) if is_certain else None

    def _no_prefix(self, part: str, whole: str) -> DataError:
        at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
        return DataError(
            f"{self.what}: the chat template renders the beginning of the conversation differently from the whole "
            f"({describe(part[at:][:30])} becomes {describe(whole[at:][:30])}), so the assistant's part cannot be "
            "located. Use a template that marks it: set tokenizer.chat_template to that of the model's family "
            f"({', '.join(TEMPLATES)}), or to a file of your own with {{% generation %}} and {{% endgeneration %}}"
        )


def _with_text_arguments(messages: list[Message]) -> list[Message]:
    """Return the messages with the arguments of calls of tools as JSON text."""
    copied = json.loads(json.dumps(messages))
    for call in (call for message in copied for call in message.get("tool_calls", ())):
        function = call.get("function", call)
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return cast("list[Message]", copied)


def _is_in(text: str, whole: str) -> bool:
    """Return whether a text has another one in it, as it is or as JSON, whatever the blanks."""
    squeezed = "".join(whole.split())
    return any("".join(form.split()) in squeezed for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]))


def _end(text: str, closing: re.Pattern[str]) -> int:
    """Return the index after the last EOS, or of several with nothing between them after the first; 0 without one."""
    matches = [*closing.finditer(text)]
    for before, match in zip(matches[-2::-1], matches[:0:-1], strict=False):
        if text[before.end() : match.start()].strip():
            return match.end()
    return matches[0].end() if matches else 0


def _closed(spans: list[Span], closing: re.Pattern[str]) -> list[Span]:
    """Return the spans with every output ending at its EOS, if it or the next span has one; the last is an output."""
    closed: list[Span] = []
    for text, is_output in spans:
        if not is_output and closed and closed[-1][1] and _end(closed[-1][0], closing) < len(closed[-1][0]):
            eos = first.group() if (first := closing.match(text)) else ""
            closed[-1], text = (closed[-1][0] + eos, True), text[len(eos) :]
        end = (_end(text, closing) or len(text)) if is_output else len(text)
        for part, role in ((text[:end], is_output), (text[end:], False)):
            if part and closed and closed[-1][1] == role:
                closed[-1] = (closed[-1][0] + part, role)
            elif part:
                closed.append((part, role))
    while closed and not closed[-1][1]:
        closed.pop()
    return closed
