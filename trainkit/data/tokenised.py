"""Rows that are token ids already, and texts of which only what follows a template is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.data.batches import Row, is_given
from trainkit.data.pipeline import IDS, SIDES, as_ids, check_text, encode_continuation, encode_sample, id_count
from trainkit.errors import DataError, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK, LABELS = "attention_mask", "labels"
COLUMNS = (IDS, MASK, LABELS)
"""The columns of a tokenised sample."""
PAIR_COLUMNS = tuple(f"{name}_{side}" for name in (IDS, MASK) for side in SIDES)
"""The columns of a tokenised pair."""
IGNORED = -100
"""The label of a token that is not trained on."""


def tokenised_row(sample: Mapping[str, Any], what: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Row:
    """Return a tokenised sample as ``{"input_ids": [int], "outputs": [bool], **columns}``.

    ``outputs`` marks the tokens that are trained on: those whose label is not -100, or without labels all but the
    first, which nothing precedes. Tokens whose attention mask is 0 are removed.

    Args:
        sample: has the column ``input_ids``, and may have ``attention_mask`` and ``labels``.
        what: names the sample in errors.
        tokenizer: its largest id limits the ids.

    Raises:
        DataError: ids are no integers of the vocabulary, mask or labels have another length or other values, or no
            token is trained on.
    """
    ids, real = _attended(sample, IDS, MASK, what, tokenizer)
    labels: list[int] = ids
    if is_given(sample.get(LABELS)):
        labels = _integers(sample[LABELS], f"{what}: {LABELS}", len(ids))
        for at, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (IGNORED, token):
                raise DataError(
                    f"{what}: label {at} is {label}, and the token there {token}; labels are the token ids themselves, "
                    f"not shifted, or {IGNORED} where a token is not trained on"
                )
    outputs = [at > 0 and label != IGNORED for at, label in enumerate(labels)]
    kept = [at for at, keep in enumerate(real) if keep]
    if not any(outputs[at] for at in kept[1:]):
        raise DataError(f"{what} has no token to train on; give a label other than {IGNORED} after the first token")
    outputs = [outputs[at] and at != kept[0] for at in kept]
    return {**_others(sample, COLUMNS), IDS: [ids[at] for at in kept], "outputs": outputs}


def tokenised_pair(sample: Mapping[str, Any], what: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Row:
    """Return a tokenised pair as ``{"input_ids_chosen": [int], "input_ids_rejected": [int], **columns}``.

    Tokens whose attention mask is 0 are removed.

    Args:
        sample: has both columns, and may have ``attention_mask_chosen`` and ``attention_mask_rejected``.
        what: names the pair in errors.
        tokenizer: its largest id limits the ids.

    Raises:
        DataError: ids are no integers of the vocabulary, or a mask has another length or other values.
    """
    row = _others(sample, PAIR_COLUMNS)
    for side in SIDES:
        ids, real = _attended(sample, f"{IDS}_{side}", f"{MASK}_{side}", what, tokenizer)
        row[f"{IDS}_{side}"] = [token for token, keep in zip(ids, real, strict=True) if keep]
    return row


def _others(sample: Mapping[str, Any], columns: Sequence[str]) -> Row:
    return {name: value for name, value in sample.items() if name not in columns}


def _attended(
    sample: Mapping[str, Any], name: str, mask: str, what: str, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[int], list[int]]:
    """Return the ids in a column, and which of them are real, 1 or 0."""
    ids = _integers(sample[name], f"{what}: {name}")
    most = max(ids, default=0) if tokenizer is None else id_count(tokenizer) - 1
    if wrong := [token for token in ids if not 0 <= token <= most]:
        raise DataError(f"{what}: {name} has the id {wrong[0]}; ids of this tokenizer are 0 to {most}")
    real = _integers(sample[mask], f"{what}: {mask}", len(ids)) if is_given(sample.get(mask)) else [1] * len(ids)
    if {*real} - {0, 1}:
        raise DataError(f"{what}: {mask} should be 1 for tokens that are read, else 0; given {describe(sample[mask])}")
    if not any(real):
        raise DataError(f"{what}: {name} has no tokens; remove the row")
    return ids, real


def _integers(value: Any, what: str, length: int | None = None) -> list[int]:
    try:
        ids = as_ids(value.tolist() if hasattr(value, "tolist") else value)
    except DataError as error:
        raise DataError(f"{what} should be a list of int; given {describe(value)}") from error
    if length is not None and len(ids) != length:
        raise DataError(f"{what} has {len(ids)} numbers, and there are {length} tokens; give one for each")
    return [int(token) for token in ids]


# -------------------------------------------------------------------------------------------------------- templates


def output_spans(
    whole: Sequence[Any], response: Sequence[Any], instruction: Sequence[Any] | None = None
) -> list[tuple[int, int]]:
    """Return where the outputs of a text, or of token ids, begin and end.

    Without ``instruction`` there is one, from the end of the last ``response`` on. With it, one begins after every
    ``response``, and ends where the next ``instruction`` begins.
    """
    starts = [at + len(response) for at in _places(whole, response)]
    if instruction is None:
        starts, stops = starts[-1:], [len(whole)]
    else:
        stops = [*_places(whole, instruction), len(whole)]
    spans: list[tuple[int, int]] = []
    for start in starts:
        end = next(stop for stop in stops if stop >= start)
        if start < end and (not spans or start >= spans[-1][1]):
            spans.append((start, end))
    return spans


def _places(whole: Sequence[Any], part: Sequence[Any]) -> list[int]:
    """Return the indices at which ``part`` occurs."""
    return [at for at in range(len(whole) - len(part) + 1) if whole[at : at + len(part)] == part]


class Completions:
    """Converts texts to samples of which only what follows a template is trained on; a ``formatting_func``.

    A row is a text, a dict with ``text``, or a dict with ``input_ids``. Templates in a text are found in the text, so
    that they need not be tokenised alone as they are in their context. If a template is token ids, the text is
    tokenised first, and the ids are compared.

    Args:
        response_template: what comes before an output: text, or token ids.
        instruction_template: what follows an output, in texts of several turns; without it the last output counts.
        tokenizer: needed for token ids.

    Raises:
        ValueError: a template is empty, or there are token ids and no tokenizer.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.response_template, self.instruction_template = response_template, instruction_template
        self.tokenizer = tokenizer
        templates = [template for template in (response_template, instruction_template) if template is not None]
        if not all(hasattr(template, "__len__") and len(template) for template in templates):
            raise ValueError(
                "a template is empty, or no text; give the text or the token ids that come before an output"
            )
        self.reads_text = all(isinstance(template, str) for template in templates)
        if not self.reads_text and tokenizer is None:
            raise ValueError("a template is token ids, with which tokenised texts are compared; give tokenizer=")

    def __call__(self, row: Any) -> Any:
        """Return a sample: turns of text, or token ids with labels.

        Raises:
            DataError: the row is no text, or nothing follows a template in it, so that nothing would be trained on.
        """
        fields = row if isinstance(row, Mapping) else {"text": row}
        if IDS not in fields:
            check_text(fields.get("text"), "the text", "a string, or a dict with the key 'text' or 'input_ids'")
        labelled = self.turns(fields["text"]) if self.reads_text and IDS not in fields else self._labelled(fields)
        if labelled is None:
            raise DataError(
                f"nothing follows the response_template {self.response_template!r} in {describe(row)}, so nothing "
                "would be trained on; remove the row, or correct the template"
            )
        return labelled

    def turns(self, text: str) -> tuple[str, ...] | None:
        """Return a text as turns, in which context and output alternate; None if nothing follows a template."""
        response, instruction = self.response_template, self.instruction_template
        pieces: list[str] = []
        at = 0
        for start, end in output_spans(text, response, instruction):
            pieces += [text[at:start], text[start:end]]
            at = end
        return tuple(pieces) or None

    def labels(self, ids: Sequence[int]) -> list[int] | None:
        """Return labels [T]: the ids of the outputs, and -100 elsewhere; None if nothing follows a template."""
        response, instruction = self._ids(self.response_template), self._ids(self.instruction_template)
        assert response is not None
        labels = [IGNORED] * len(ids)
        for start, end in output_spans(list(ids), response, instruction):
            labels[start:end] = ids[start:end]
        return labels if any(label != IGNORED for label in labels) else None

    def _labelled(self, row: Mapping[str, Any]) -> Row | None:
        if IDS in row:
            encoded = tokenised_row(row, "the row", self.tokenizer)
        else:
            assert self.tokenizer is not None
            text: Row = {"turns": [row["text"]], "outputs": [True]}
            encoded = {IDS: encode_sample(self.tokenizer, text, None)[0]}
        labels = self.labels(encoded[IDS])
        return None if labels is None else {IDS: encoded[IDS], LABELS: labels}

    def _ids(self, template: str | Sequence[int] | None) -> list[int] | None:
        if not isinstance(template, str):
            return None if template is None else list(template)
        if self.tokenizer is None:
            raise ValueError("the rows are token ids, and the template is text; give tokenizer=")
        return encode_continuation(self.tokenizer, template)
