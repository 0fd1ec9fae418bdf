"""Prompts and dialogues."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from trainkit.errors import DataError, describe
from trainkit_trlx.data.configs import say_once
from trainkit_trlx.data.ilql_types import ILQLBatch, ILQLElement, ILQLSeq2SeqBatch, ILQLSeq2SeqElement
from trainkit_trlx.overrides import own_class, remembered, replaced
from trainkit_trlx.pipeline import BasePipeline, BaseRolloutStore, register_datapipeline

log = logging.getLogger(__name__)
IGNORED = -100
"""The label of a token that is not trained on."""


@dataclass
class DialogMessage:
    """A message of a dialogue."""

    is_output: bool
    """Whether it is the model's."""
    tokens: tuple[int, ...]
    """Its token ids."""


def tokenize_dialogue(dialogue: str | Iterable[str], tokenizer: Any, max_length: int = 2048) -> list[DialogMessage]:
    """Return the messages of a dialogue as token ids, at most ``max_length`` in all.

    The messages alternate between prompts and outputs. A string alone is an output after the beginning token. The last
    message ends with EOS. ``tokenizer.truncation_side`` says which end is cut.

    Raises:
        ValueError: there is an odd number of messages.
    """
    start = tokenizer.bos_token or tokenizer.eos_token
    messages = [start, dialogue] if isinstance(dialogue, str) else list(dialogue)
    if len(messages) % 2:
        raise ValueError(f"a dialogue has as many prompts as outputs; given {len(messages)} messages")
    if not messages[-1].endswith(tokenizer.eos_token):
        messages[-1] += tokenizer.eos_token
    ids = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in messages]
    found = [DialogMessage(bool(place % 2), tokens) for place, tokens in enumerate(_cut(ids, tokenizer, max_length))]
    found = [message for message in found if message.tokens]
    if found and found[0].is_output:
        if sum(len(message.tokens) for message in found) == max_length:  # room for the prompt that is added
            whole = tokenizer.truncation_side == "left"
            side = found[0] if whole else found[-1]
            side.tokens = side.tokens[1:] if whole else side.tokens[:-1]
        found.insert(0, DialogMessage(False, tuple(tokenizer(start, add_special_tokens=False).input_ids)))
    return found


def _cut(ids: list[tuple[int, ...]], tokenizer: Any, max_length: int) -> list[tuple[int, ...]]:
    """Return the messages with at most ``max_length`` ids in all, from the end or the beginning."""
    left = tokenizer.truncation_side == "left"
    room, found = max_length, []
    for tokens in reversed(ids) if left else ids:
        found.append((tokens[-room:] if left else tokens[:room]) if room else ())
        room -= len(found[-1])
    return found[::-1] if left else found


@remembered
class DialogStore(BaseRolloutStore):
    """Tokenised dialogues, with labels for outputs and -100 for prompts.

    Args:
        dialogs: the dialogues as `tokenize_dialogue` returns them.
        tokenizer: pads the batches.
    """

    def __init__(self, dialogs: list[list[DialogMessage]], tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        for dialog in dialogs:
            ids = [token for message in dialog for token in message.tokens]
            labels = [token if message.is_output else IGNORED for message in dialog for token in message.tokens]
            self.history.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})

    def create_loader(  # type: ignore[override]
        self, batch_size: int, shuffle: bool = False
    ) -> DataLoader[Any]:
        """Return a loader of padded batches; labels of padding are -100."""

        def collate(items: list[dict[str, list[int]]]) -> Any:
            batch = self.tokenizer.pad(
                [{k: v for k, v in item.items() if k != "labels"} for item in items], return_tensors="pt"
            )
            labels = torch.full_like(batch["input_ids"], IGNORED)
            labels[batch["attention_mask"].bool()] = torch.tensor([label for item in items for label in item["labels"]])
            batch["labels"] = labels
            return batch

        return DataLoader(self, batch_size=batch_size, collate_fn=collate, shuffle=shuffle)


def checked_prompts(prompts: Any) -> list[Any]:
    """Return prompts as a list.

    Raises:
        DataError: there are none, or one is neither a string nor a dict with a ``prompt``.
    """
    allowed = "strings, or dicts with a 'prompt' and further columns"
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise DataError(f"prompts should be a list of {allowed}; given {describe(prompts)}")
    found = list(prompts)
    if not found:
        raise DataError("prompts is empty; give at least one")
    for place, prompt in enumerate(found):
        if not isinstance(prompt.get("prompt") if isinstance(prompt, Mapping) else prompt, str):
            raise DataError(f"prompt {place} is {describe(prompt)}; prompts should be {allowed}")
    return found


@register_datapipeline
class PromptPipeline(BasePipeline):
    """Tokenised prompts. Trainers take the prompts themselves, and tokenise them again.

    Args:
        prompts: strings, or dicts with a ``prompt`` and further columns. They are not changed.
        max_prompt_length: the most tokens of a prompt.
        tokenizer: the tokenizer.
        add_special_tokens: whether it adds its special tokens.

    Raises:
        DataError: there are no prompts, or one is neither a string nor a dict with a ``prompt``.
    """

    def __init__(
        self, prompts: list[Any], max_prompt_length: int, tokenizer: Any, add_special_tokens: bool = False
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        rows = [
            dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in checked_prompts(prompts)
        ]
        texts = [row.pop("prompt") for row in rows]

        def encoded(**truncation: Any) -> Any:
            return tokenizer(texts, padding=False, add_special_tokens=add_special_tokens, **truncation)

        cut, whole = encoded(truncation=True, max_length=max_prompt_length), encoded()["input_ids"]
        ids, masks = cut["input_ids"], cut["attention_mask"]
        long = [len(before) > len(after) for before, after in zip(whole, ids, strict=True)]
        self._texts = [
            (tuple(tokens), _decoded(tokenizer, tokens, add_special_tokens) if is_cut else text)
            for text, tokens, is_cut in zip(texts, ids, long, strict=True)
        ]
        if any(long):
            lost = "end" if tokenizer.truncation_side == "right" else "beginning"
            log.warning(
                "%d of %d prompts were truncated to %d tokens: they lose their %s (tokenizer.truncation_side is %r)",
                sum(long),
                len(long),
                max_prompt_length,
                lost,
                tokenizer.truncation_side,
            )
        self.prompts = [
            {"input_ids": tokens, "attention_mask": mask, **row}
            for tokens, mask, row in zip(ids, masks, rows, strict=True)
        ]

    @property
    def given(self) -> list[dict[str, Any]]:
        """The prompts as text, cut like their ids, with their columns; text of ids that were changed is decoded."""
        found = []
        for index, row in enumerate(self.prompts):
            ids, text = self._texts[index] if index < len(self._texts) else ((), "")
            if ids != tuple(row["input_ids"]):
                text = _decoded(self.tokenizer, row["input_ids"], added=True)
            columns = {name: value for name, value in row.items() if name not in ("input_ids", "attention_mask")}
            found.append({"prompt": text, **columns})
        return found

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a prompt: ``input_ids``, ``attention_mask`` and its columns."""
        return self.prompts[index]

    def __len__(self) -> int:
        """Return how many prompts there are."""
        return len(self.prompts)

    def create_loader(  # type: ignore[override]
        self, batch_size: int, shuffle: bool = False, sampler: Any = None, drop_last: bool = False
    ) -> DataLoader[Any]:
        """Return a loader of batches, padded as the tokenizer pads; columns are lists."""

        def collate(items: list[dict[str, Any]]) -> Any:
            ids = [{key: item[key] for key in ("input_ids", "attention_mask")} for item in items]
            batch = self.tokenizer.pad(ids, return_tensors="pt")
            for key in items[0].keys() - batch.keys():
                batch[key] = [item[key] for item in items]
            return batch

        return DataLoader(
            self,
            batch_size=batch_size,
            collate_fn=collate,
            shuffle=shuffle and sampler is None,
            sampler=sampler,
            drop_last=drop_last,
        )


def _decoded(tokenizer: Any, ids: list[int], added: bool) -> str:
    """Return the text of ids, without the special tokens that the tokenizer has added, if it has."""
    return str(tokenizer.decode(ids, skip_special_tokens=added))


def lacking(batch: Any, names: Iterable[str]) -> list[str]:
    """Return which of the names a batch, a mapping or an object, does not have."""
    return [name for name in names if not (name in batch if isinstance(batch, Mapping) else hasattr(batch, name))]


def batches_of(store: Any, batch_size: int, names: Iterable[str]) -> list[Any]:
    """Return the batches of one pass over a store or a pipeline, in its order.

    Args:
        store: has `create_loader`.
        batch_size: the rows of a batch.
        names: what a batch has.

    Raises:
        DataError: its loader has no end, or gives something else.
    """
    name = f"{type(store).__name__}.create_loader"
    if not hasattr(store, "create_loader"):
        raise DataError(f"given {describe(store)}; it has no create_loader: derive it from BaseRolloutStore")
    if replaced(store, ("create_loader",)):
        say_once(
            f"{name} is called once for all passes, and trainkit makes batches of its own of the rows; to train on its "
            "batches, derive the trainer from AccelerateRLTrainer"
        )
    taken = inspect.signature(store.create_loader).parameters.values()
    shuffles = any(each.name == "shuffle" or each.kind is each.VAR_KEYWORD for each in taken)
    loader = store.create_loader(batch_size, **({"shuffle": False} if shuffles else {}))
    try:
        len(loader)
    except TypeError as error:
        raise DataError(
            f"{name} returned {describe(loader)}, which has no length; return a DataLoader of a dataset that has one"
        ) from error
    batches = list(loader)
    for batch in batches:
        if lacking(batch, names):
            raise DataError(f"{name} gave {describe(batch)}; return a DataLoader whose batches have {', '.join(names)}")
    return batches


def prompts_of(pipeline: Any, tokenizer: Any, batch_size: int) -> list[Any]:
    """Return the prompts of a pipeline as text with their columns; a list of prompts, checked.

    Raises:
        DataError: there are no prompts, or one is neither a string nor a dict with a ``prompt``.
    """
    if not hasattr(pipeline, "create_loader"):
        return checked_prompts(pipeline)
    own = replaced(pipeline, ("__getitem__", "__len__", "create_loader"))
    if own_class(type(pipeline)) is PromptPipeline and not own:
        return checked_prompts(pipeline.given)
    rows = []
    for batch in batches_of(pipeline, batch_size, ("input_ids", "attention_mask")):
        ids, real = (torch.as_tensor(batch[name]) for name in ("input_ids", "attention_mask"))
        columns = {name: values for name, values in dict(batch).items() if name not in ("input_ids", "attention_mask")}
        for index, (prompt, keep) in enumerate(zip(ids, real.bool(), strict=True)):
            further = {name: values[index] for name, values in columns.items()}
            rows.append({"prompt": _decoded(tokenizer, prompt[keep].tolist(), added=True), **further})
    return checked_prompts(rows)


def ilql_collate_fn(elems: Iterable[ILQLElement]) -> ILQLBatch:
    """Return samples as a batch, padded with 0."""
    return ILQLBatch(*_padded(ILQLElement, elems))


def ilql_seq2seq_collate_fn(elems: Iterable[ILQLSeq2SeqElement]) -> ILQLSeq2SeqBatch:
    """Return samples of an encoder-decoder as a batch, padded with 0."""
    return ILQLSeq2SeqBatch(*_padded(ILQLSeq2SeqElement, elems))


def _padded(cls: type[Any], rows: Iterable[Any]) -> list[torch.Tensor]:
    rows = list(rows)
    columns = ([getattr(row, about.name) for row in rows] for about in fields(cls))
    return [pad_sequence(column, batch_first=True) for column in columns]


@remembered
class ILQLRolloutStorage(BaseRolloutStore):
    """Samples with rewards, each of which is made of its attributes.

    Args:
        input_ids: token ids of each sample [T].
        attention_mask: which of them are real [T].
        rewards: of each action [A].
        states_ixs: positions of the states [A + 1].
        actions_ixs: positions of the actions [A].
        dones: 0 at the last state, else 1 [A + 1].
    """

    kind: type[Any] = ILQLElement
    collate: Callable[[Iterable[Any]], Any] = staticmethod(ilql_collate_fn)

    def __init__(
        self, input_ids: Any, attention_mask: Any, rewards: Any, states_ixs: Any, actions_ixs: Any, dones: Any
    ) -> None:
        self._fill(input_ids, attention_mask, rewards, states_ixs, actions_ixs, dones)

    def _fill(self, *columns: Any) -> None:
        """Set the columns, one list of each kind."""
        names = [about.name for about in fields(self.kind)]
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"give one list of the same length for each of {', '.join(names)}")
        vars(self).update(zip(names, map(list, columns), strict=True))

    def push(self, exps: Iterable[Any]) -> None:
        """Add samples."""
        for each in exps:
            for about in fields(self.kind):
                getattr(self, about.name).append(getattr(each, about.name))

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self.kind(*(getattr(self, about.name)[index] for about in fields(self.kind)))

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.input_ids)  # type: ignore[attr-defined]

    def create_loader(self, batch_size: int, shuffle: bool = True) -> DataLoader[Any]:  # type: ignore[override]
        """Return a loader of batches, padded with 0."""
        return DataLoader(self, batch_size, shuffle=shuffle, collate_fn=self.collate)


@remembered
class ILQLSeq2SeqRolloutStorage(ILQLRolloutStorage):
    """The same for encoder-decoders, with ``decoder_input_ids`` after ``attention_mask``."""

    kind = ILQLSeq2SeqElement
    collate = staticmethod(ilql_seq2seq_collate_fn)

    def __init__(
        self,
        input_ids: Any,
        attention_mask: Any,
        decoder_input_ids: Any,
        rewards: Any,
        states_ixs: Any,
        actions_ixs: Any,
        dones: Any,
    ) -> None:
        self._fill(input_ids, attention_mask, decoder_input_ids, rewards, states_ixs, actions_ixs, dones)
