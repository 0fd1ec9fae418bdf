"""Conversations as text: rendering by a chat template, and locating the assistant's part in the text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from trainkit.data.pipeline import id_count
from trainkit.errors import DataError, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
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

SETTINGS = ("tools", "chat_template_kwargs")
"""Columns of a row that are passed to the template with its messages."""


def is_conversation(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether ``value`` is a list of dicts, as messages are."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(message, Mapping) for message in value)


SENDERS = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system", "tool")}}
"""Roles by the senders of ShareGPT's messages."""


def with_roles(messages: Sequence[Mapping[str, Any]], what: str) -> list[Message]:
    """Return messages with ``role`` and ``content`` in the place of ShareGPT's ``from`` and ``value``; copies.

    Raises:
        DataError: a sender is not known; ``what`` names the row.
    """
    found = []
    for index, message in enumerate(messages):
        copied = dict(message)
        if "from" in copied and "value" in copied and "role" not in copied:
            sender = copied.pop("from")
            if sender not in SENDERS:
                raise DataError(
                    f"{what}: message {index} is from {describe(sender)}; known are {', '.join(SENDERS)}. Give it the "
                    "'role' and 'content' that the chat template expects"
                )
            copied = {"role": SENDERS[sender], "content": copied.pop("value"), **copied}
        found.append(copied)
    return found


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
        tools = {} if row.get("tools") is None else {"tools": row["tools"]}
        self.settings = {**tools, **(row.get("chat_template_kwargs") or {})}

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a prompt, ending with the assistant's header, or in the last message if that is the assistant's."""
        checked = self._check(messages)
        goes_on = checked[-1]["role"] == "assistant"
        return self._write(checked, add_generation_prompt=not goes_on, continue_final_message=goes_on)

    def outputs(
        self, prompt: Sequence[Mapping[str, Any]], *completions: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[str]]:
        """Return the prompt's text, and the text of each completion to it, up to the EOS that ends it.

        Raises:
            DataError: the template renders the prompt differently when a completion follows.
        """
        asked, texts = self.prompt(prompt), []
        for completion in completions:
            whole = self._write([*self._check(prompt), *self._check(completion)])
            if not whole.startswith(asked):
                raise self._no_prefix(asked, whole)
            text = whole[len(asked) :]
            texts.append(text[: _end(text, self._closing)] or text)
        return asked, texts

    def spans(self, messages: Sequence[Mapping[str, Any]], first: int = 0) -> list[Span]:
        """Return the conversation's text in pieces; outputs are the assistant's messages from message ``first`` on.

        An output is the text between ``{% generation %}`` and ``{% endgeneration %}`` in the template. If the template
        has no such marks, it is the text that an assistant's message adds to the rendering of the messages before it.
        EOS, or another of ``ends``, ends an output, whatever the template writes after it. Text after the last output
        is dropped.

        Raises:
            DataError: no message is the assistant's; or the template has no marks, and a prefix of the conversation is
                not rendered as a prefix of its text.
        """
        checked = self._check(messages)
        marked = re.search(r"\{%-?\s*generation\s*-?%\}", self._template)
        whole, outputs = (self._marked if marked else self._by_prefixes)(checked, first)
        spans, at = [], 0
        for start, end in outputs:
            spans += [(whole[at:start], False), (whole[start:end], True)]
            at = end
        closed = _closed([*spans, (whole[at:], False)], self._closing)
        if not closed:
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in checked))
            raise DataError(
                f"{self.what} has no message of the assistant to learn from; its role is 'assistant', given {roles}"
            )
        return closed

    # ---------------------------------------------------------------------------------------------------- internals

    @property
    def _template(self) -> str:
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise DataError(
                f"{self.what} is a conversation, and the tokenizer has no chat template to write it with. Set the "
                "template that your model was trained with, or a plain one:\n"
                "    from trainkit.data import PLAIN_TEMPLATE\n"
                "    tokenizer.chat_template = PLAIN_TEMPLATE  # then trainkit.train(..., tokenizer=tokenizer)"
            )
        template: str = self.tokenizer.get_chat_template(tools=self.settings.get("tools"))
        return template

    @property
    def _closing(self) -> re.Pattern[str]:
        """A pattern of the texts of the tokens that end an output."""
        assert self.tokenizer is not None
        known = [token for token in self.ends if token < id_count(self.tokenizer)]
        texts = {str(self.tokenizer.eos_token), *self.tokenizer.convert_ids_to_tokens(known)}
        return re.compile("|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))))

    def _check(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages as dicts, without keys whose value is None, which datasets use to fill tables."""
        checked = []
        for index, message in enumerate(with_roles(messages, self.what)):
            given = {key: value for key, value in message.items() if value is not None}
            empty = given.keys() <= {"role", "name"}  # with content of None, or with tool calls of None
            if not isinstance(message.get("role"), str) or empty or not ({"content", "tool_calls"} & message.keys()):
                raise DataError(
                    f"{self.what}: message {index} should be a dict with 'role' and 'content'; "
                    f"given {describe(message)}"
                )
            checked.append(given)
        return checked

    def _write(self, messages: list[Message], **flags: Any) -> str:
        assert self._template
        assert self.tokenizer is not None
        settings: dict[str, Any] = {**flags, **self.settings}
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        except Exception as error:  # a template may raise any exception
            raise DataError(f"{self.what}: the chat template cannot render it: {error}") from error
        return str(text)

    def _marked(self, messages: list[Message], first: int) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        whole, asked = self._write(messages), self.prompt(messages[:first]) if first else ""
        if not whole.startswith(asked):
            raise self._no_prefix(asked, whole)
        assert self.tokenizer is not None
        settings: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.settings}
        rendered: Any = render_jinja_template(
            [messages], chat_template=self._template, return_assistant_tokens_mask=True, **settings
        )
        marks: list[tuple[int, int]] = rendered[1][0]
        return whole, [(start, end) for start, end in marks if start >= len(asked) and end > start]

    def _by_prefixes(self, messages: list[Message], first: int) -> tuple[str, list[tuple[int, int]]]:
        whole, found = self._write(messages), []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < first:
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
            if not after.startswith(before) or not whole.startswith(after):
                raise self._no_prefix(before if not after.startswith(before) else after, whole)
            found.append((len(before), len(after)))
        return whole, found

    def _no_prefix(self, part: str, whole: str) -> DataError:
        at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
        return DataError(
            f"{self.what}: the chat template renders the beginning of the conversation differently from the whole "
            f"({describe(part[at:][:30])} becomes {describe(whole[at:][:30])}), so the assistant's part cannot be "
            "located. Mark it in the template with {% generation %} and {% endgeneration %}, or train on the last "
            'answers only:\n    samples = [{"prompt": m[:-1], "completion": m[-1:]} for m in conversations]'
        )


def _end(text: str, closing: re.Pattern[str]) -> int:
    """Return the index after the last EOS, or of several with nothing between them after the first; 0 without one."""
    found = [*closing.finditer(text)]
    for before, match in zip(found[-2::-1], found[:0:-1], strict=False):
        if text[before.end() : match.start()].strip():
            return match.end()
    return found[0].end() if found else 0


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
