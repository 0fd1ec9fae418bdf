"""Text of a run as token ids: the tokenizer, prompts and samples, and how long they may be."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from trainkit.config import SamplingConfig, TRLConfig
from trainkit.data import (
    Preferences,
    PromptEncoder,
    Row,
    Sequences,
    is_conversation,
    labelled,
    sample_rows,
    taken_apart,
    unrendered,
    written_prompts,
)
from trainkit.data.batches import Images, is_given
from trainkit.data.chat import SETTINGS, STARTS
from trainkit.data.columns import check_images, without
from trainkit.data.formats import check_list, preference_row
from trainkit.data.images import IMAGE_COLUMNS, READERS, ImageReader, expanded, given_images, in_output
from trainkit.data.pipeline import (
    IDS,
    EncodedSide,
    EqualSidesError,
    NoOutputError,
    Shape,
    check_sides,
    encode_pair_within,
    encode_within,
    id_count,
    lost_by_truncation,
)
from trainkit.data.tokenised import PAIR_COLUMNS
from trainkit.errors import ConfigError, DataError
from trainkit.models import load_tokenizer
from trainkit.models.images import image_token, reads_images
from trainkit.models.loading import (
    balances_experts,
    check_trainable,
    coming_eos,
    count_virtual,
    load_model_config,
    pad_id,
)
from trainkit.runs.parallel import Parallel
from trainkit.seeding import PLACE
from trainkit.trainer import generation
from trainkit.trainer.settings import check_length

log = logging.getLogger(__name__)


class Text:
    """Prompts and samples of a run as token ids, no longer than the model can read.

    Args:
        config: the run's configuration.
        parallel: the processes; the main one logs.
        tokenizer: a live tokenizer; None: the one that the configuration names.
        model_config: that of the trained model.
        virtual: tokens before every row that an adapter adds.
        ends: token ids at which responses end, besides the tokenizer's EOS; outputs of samples end there, too.
        scored: whether the model scores text and generates none.
        inputs: what the algorithm learns from.
        columns: columns of samples that it reads besides those of their format.
        why_no_images: why rows may have no images, and what to do; None: they may.
        began: when the run began, for templates that write a date.

    Raises:
        ConfigError: tokenizer, model and lengths do not fit each other.
    """

    def __init__(
        self,
        config: TRLConfig[Any],
        parallel: Parallel,
        *,
        tokenizer: Any,
        model_config: PreTrainedConfig,
        virtual: int,
        ends: list[int],
        scored: bool,
        inputs: tuple[str, ...],
        columns: tuple[str, ...],
        why_no_images: str | None,
        began: datetime,
    ) -> None:
        self.config, self.parallel, self.inputs, self.columns = config, parallel, inputs, columns
        self.tokenizer, self.why_no_images = tokenizer, why_no_images
        STARTS[self.tokenizer] = began
        self.model_config, self.ends, self.scored = model_config, ends, scored
        self.is_encoder_decoder = bool(model_config.is_encoder_decoder)
        """Whether the model reads prompt and response separately, each with its own length limit."""
        self.limit = self._length_limit(virtual)
        """The most tokens of prompt and response together, or of each if they are read separately; None: no limit."""
        whole = self.limit is None or self.is_encoder_decoder
        budget = self.limit if whole else self.limit - config.rollout.max_new_tokens  # type: ignore[operator]
        self.encode = PromptEncoder(
            self.tokenizer, budget, config.rollout.overlong_prompts, ends=self.is_encoder_decoder
        )
        self.shape: Shape | None = None
        """What makes samples and pairs of their whole token ids; None: they are truncated to ``limit``."""
        self._warned: set[str] = set()  # columns and parts of conversations that a warning has named

    def _length_limit(self, virtual: int) -> int | None:
        """Return the largest number of tokens of prompt and response together, or of each if they are read separately.

        It is the smaller of train.seq_length and the model's context.
        """
        vocabulary, ids = self.model_config.get_text_config().vocab_size, id_count(self.tokenizer)
        if ids > vocabulary:
            known = f"{len(self.tokenizer)} tokens"
            known += "" if ids == len(self.tokenizer) else f", the largest with the id {ids - 1},"
            raise ConfigError(
                f"the tokenizer has {known} and the model {vocabulary}; give the tokenizer that belongs to the model, "
                "or a model with vocab_size to match"
            )
        return check_length(self.config, self.model_config, virtual, online="prompts" in self.inputs)

    def fits(self, prompt: int, response: int) -> bool:
        """Return whether the model can read so many tokens: together, or apart with a start token."""
        if self.limit is None:
            return True
        return max(prompt, response + 1) <= self.limit if self.is_encoder_decoder else prompt + response <= self.limit

    @property
    def what_fits(self) -> str:
        """The length limit in words, for error messages."""
        if self.limit is None:
            return "any number fits"
        each = f"a prompt of {self.limit} and a response of {self.limit - 1} tokens fit"
        return f"at most {each}" if self.is_encoder_decoder else f"together at most {self.limit} fit"

    # ------------------------------------------------------------------------------------------------------ prompts

    def fit(self, rows: list[Row]) -> list[Row]:
        """Return the prompts, as text, that leave room for a response."""
        written = written_prompts(rows, self.tokenizer)
        return [written[at] for at in self._kept(written, range(len(rows)))]

    def _kept(self, written: list[Row], numbers: Iterable[int]) -> list[int]:
        """Return the numbers of those of `written_prompts` that leave room for a response."""
        whole = [
            {**(self._expanded(row, f"prompt {at}")[0] if self.reads_images else row), "index": at}
            for row, at in zip(written, numbers, strict=True)
        ]
        kept = self.encode.fit(whole)
        for row in kept if self.reads_images else ():
            self._check_whole([row["prompt"]], self.encode(row["prompt"]), f"prompt {row['index']}")
        return [row["index"] for row in kept]

    def fit_episodes(self, rows: list[Row], check: Callable[[Any, Row, str], None]) -> list[Row]:
        """Return the rows, as they were given, whose prompts, if they have one, leave room for a response.

        Args:
            rows: the rows.
            check: raises an error if the template cannot go on from a conversation: of a prompt, its row and its name.
        """
        for index, row in enumerate(rows):
            check_images(row, self.reads_images, f"prompt {index}")
            if is_conversation(prompt := row.get("prompt")):
                check(prompt, row, f"prompt {index}")
        known = [index for index, row in enumerate(rows) if row.get("prompt") is not None]
        texts = written_prompts([rows[index] for index in known], self.tokenizer)
        fitting = {*(self._kept(texts, known) if known else ())} | {*range(len(rows))} - {*known}
        return [row for index, row in enumerate(rows) if index in fitting]

    def queries(self, rows: list[Row]) -> list[list[int]]:
        """Return the prompts' token ids; none for a row whose environment gives the prompt."""
        parts = ("prompt", *SETTINGS, *IMAGE_COLUMNS)
        read = [tuple(id(row.get(name)) for name in parts) for row in rows]  # the same for a group
        different = {key: row for key, row in zip(read, rows, strict=True) if row.get("prompt") is not None}
        written = written_prompts([*different.values()], self.tokenizer)
        ids = dict(zip(different, map(self.query, written), strict=True))
        return [[*ids.get(key, ())] for key in read]

    def query(self, row: Row, what: str = "the prompt") -> list[int]:
        """Return the token ids of a prompt of `written_prompts`, with those that stand for its images.

        Raises:
            DataError: its images cannot be read, or it is too long; ``what`` names it.
        """
        return self.encode(self._expanded(row, what)[0]["prompt"] if self.reads_images else row["prompt"], what)

    def images(self, rows: list[Row]) -> Images | None:
        """Return the images of rows, prompts or samples; None if no row has any."""
        if not self.reads_images:
            return None
        parts = (*IMAGE_COLUMNS, "prompt", "turns", "chosen", "rejected")
        read = [tuple(id(row.get(name)) for name in parts) for row in rows]  # the same for a group
        different = dict(zip(read, rows, strict=True))
        inputs = {key: self._expanded(row)[1] for key, row in different.items()}
        return Images.of_rows([inputs[key] for key in read])

    @property
    def reads_images(self) -> bool:
        """Whether the model reads images."""
        return self.tokenizer in READERS

    def without_images(self, logit_mask: Tensor | None) -> Tensor | None:
        """Return a logit mask that excludes the tokens that stand for images, if the model reads any."""
        config = self.model_config
        if not reads_images(config):
            return logit_mask
        vocabulary = torch.arange(config.get_text_config().vocab_size)
        allowed = (vocabulary != image_token(config)) & (vocabulary != getattr(config, "video_token_id", -1))
        return allowed if logit_mask is None else torch.as_tensor(logit_mask) & allowed

    def _expanded(self, row: Row, what: str = "the row") -> tuple[Row, dict[str, Tensor]]:
        """Return a row whose placeholders are as long as their images, and what the model reads of these.

        Raises:
            DataError: as `trainkit.data.images.expanded`; or rows may have no images in this run.
        """
        if self.why_no_images and given_images(row):
            raise DataError(f"{what} has images, and {self.why_no_images}, or remove them")
        return expanded(self.tokenizer, row, what)

    def _check_whole(self, texts: list[str], ids: list[int], what: str, chosen: list[bool] | None = None) -> None:
        """Check that no token of an image has been cut off from the ids of texts, or is one of the ``chosen``.

        Raises:
            DataError: one has, or is.
        """
        tokens = READERS[self.tokenizer].ids
        whole = sum(text.count(str(self.tokenizer.convert_ids_to_tokens(token))) for token in tokens for text in texts)
        if sum(token in tokens for token in ids) != whole:
            raise DataError(
                f"{what} has images and is longer than {self.limit} tokens, prompt and response together, and no image "
                "can be truncated; raise train.seq_length, or give smaller images"
            )
        if any(token in tokens for token, keep in zip(ids, chosen or [], strict=False) if keep):
            raise in_output(what)

    def numbered(self, row: Row) -> Row:
        """Return a row without its index if prompts were dropped: it is then not the index in the user's list."""
        if PLACE not in row or self.config.rollout.overlong_prompts != "drop":
            return row
        return {**row, PLACE: row[PLACE]._replace(row=None)}

    def settings(self, **overrides: Any) -> SamplingConfig:
        """Return the rollout's sampling settings with ``overrides``.

        A stop string that is a special token is a stop token too, because decoded text may not have it.

        Raises:
            ConfigError: a setting does not exist, or its value is not allowed.
        """
        settings = generation.settings(self.config, overrides)
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        for stop in settings.stop_sequences if self.config.rollout.skip_special_tokens else ():
            if stop not in special and (inside := [token for token in special if token in stop]):
                raise ConfigError(
                    f"sampling settings: the stop string {stop!r} holds the special token {inside[0]!r}, and the text "
                    f"of responses has none; give {inside[0]!r} alone, or set rollout.skip_special_tokens to false"
                )
        if stops := [special[stop] for stop in settings.stop_sequences if stop in special]:
            settings = settings.model_copy(
                update={"stop_token_ids": [*dict.fromkeys([*settings.stop_token_ids, *stops])]}
            )
        vocabulary = self.model_config.get_text_config().vocab_size
        if outside := [token for token in settings.stop_token_ids if token >= vocabulary]:
            raise ConfigError(
                f"sampling settings: stop_token_ids holds {outside[0]}, and the model has {vocabulary} tokens; remove "
                "it. For responses of a fixed length, set min_new_tokens to max_new_tokens"
            )
        return settings

    # ------------------------------------------------------------------------------------------------------ samples

    def read_samples(
        self, samples: Iterable[Any], rewards: Iterable[Any] | None, first: int, check: Callable[..., None]
    ) -> list[Row]:
        """Return samples as rows; each is encoded once to check that it can be.

        Args:
            samples: as for `trainkit.train`.
            rewards: numbers or labels of the samples.
            first: the number of the first sample, for messages.
            check: raises an error if the algorithm cannot learn from rows: of the rows and ``first``.
        """
        samples = without(samples, self.config.data.ignore_columns)
        if "pairs" in self.inputs:
            rows, cut = self._read_pairs(samples, first, check)
        else:
            needed = bool({"rewards", "labels"} & {*self.inputs})
            rows = sample_rows(
                samples, rewards, self.tokenizer, rated=needed, first=first, columns=self.columns, ends=self.ends
            )
            rows = labelled(rows, first=first) if "labels" in self.inputs else rows
            parts = [self._fitting(row, f"sample {index}") for index, row in enumerate(rows, first)]
            cut = sum(shorter for _, shorter in parts)
            check(rows, first=first)
            whole, rows = len(rows), [part for fitting, _ in parts for part in fitting]
            self._warn_apart(whole, len(rows))
        read = {"prompt", "chosen", "rejected"} if "pairs" in self.inputs else {"turns", "outputs"}
        if not any("turns" in row or "chosen" in row for row in rows):
            read |= {IDS, *PAIR_COLUMNS}
        rated = [kind.removesuffix("s") for kind in self.inputs if kind in ("rewards", "labels")]
        if "reward_fn" not in self.inputs:  # otherwise it gets the columns
            self.warn_unread(rows, {*read, *rated}, "samples")
        self.warn_unrendered(samples, "sample")
        if cut and self.parallel.is_main:
            log.warning("%d of %d samples were truncated to %s tokens: %s", cut, len(rows), self.limit, self._lost)
        return rows

    def _fitting(self, row: Row, what: str) -> tuple[list[Row], bool]:
        """Return the rows that a sample is trained on in, and whether truncation removes something or all of one."""
        fitting, cut = list[Row](), False
        for part in (parts := taken_apart(row)):
            try:
                cut |= self._encode_sample(part, what)[2]
                fitting.append(part)
            except NoOutputError:
                if part is parts[-1] and not fitting:
                    raise
                cut = True
        return fitting, cut

    def _warn_apart(self, samples: int, rows: int) -> None:
        """Log, once, that samples are trained on in more rows."""
        if rows > samples and "apart" not in self._warned and self.parallel.is_main:
            log.warning(
                "%d samples are trained on in %d rows: the chat template writes answers differently when others "
                "follow, such as without their reasoning, and each of these is trained on as the model writes it",
                samples,
                rows,
            )
            self._warned.add("apart")

    def warn_unrendered(self, values: Iterable[Any], what: str) -> None:
        """Log what the chat template leaves out of the text of conversations; each part once."""
        counts: Counter[str] = Counter()
        for index, row in enumerate(values):
            counts.update(unrendered(row, self.tokenizer, f"{what} {index}"))
        new = {name: count for name, count in counts.items() if f"unrendered {name}" not in self._warned}
        self._warned |= {f"unrendered {name}" for name in new}
        if new and self.parallel.is_main:
            named = ", ".join(f"{name} of {count}" for name, count in new.items())
            log.warning(
                "the chat template does not render everything that the %ss say (%s), so the model does not see it; "
                "use a template that does (tokenizer.chat_template), or remove it",
                what,
                named,
            )

    def warn_unread(self, rows: Iterable[Row], read: set[str], what: str) -> None:
        """Log which columns of the rows are neither ``read`` nor read by the algorithm; each once."""
        names = dict.fromkeys(name for row in rows for name, value in row.items() if is_given(value))
        used = {*read, *SETTINGS, *self.columns, *self._warned, *(IMAGE_COLUMNS if self.reads_images else ())}
        new = [str(name) for name in names if name not in used]
        self._warned |= {*new}
        if new and self.parallel.is_main:
            columns, name = f"column{'s' * (len(new) > 1)} {', '.join(map(repr, new))}", self.config.method.name
            log.warning("%s does not read the %s of the %s", name, columns, what)

    @property
    def _lost(self) -> str:
        """What truncated samples lose, in words."""
        return (
            self.shape.lost
            if self.shape
            else lost_by_truncation(
                self.tokenizer, pairs="pairs" in self.inputs, is_encoder_decoder=self.is_encoder_decoder
            )
        )

    def _read_pairs(self, samples: Iterable[Any], first: int, check: Callable[..., None]) -> tuple[list[Row], int]:
        """Return pairs as rows, and how many are truncated; skip those whose sides are equal, and log which.

        Raises:
            EqualSidesError: no other pair is left.
            DataError: a pair cannot be used.
        """
        check_list(samples, "sample")
        rows, cut, equal, index = dict[int, Row](), 0, list[int](), first - 1
        for index, sample in enumerate(samples, first):
            try:
                what = f"sample {index}"
                row = preference_row(sample, what, self.tokenizer, columns=self.columns, ends=self.ends)
                cut += self._encode_pair(row, what)[2]
                rows[index] = row
            except EqualSidesError:
                equal.append(index)
        if index < first:
            raise DataError("samples is empty; give at least one pair")
        if equal:
            self._warn_equal(equal, index + 1 - first)
        if not rows:
            raise EqualSidesError(
                f"all {len(equal)} pairs have the same chosen and rejected output{self._within_limit}; give pairs that "
                "differ"
            )
        for index, row in rows.items() if equal else ():
            check([row], first=index)
        if not equal:
            check([*rows.values()], first=first)
        return [*rows.values()], cut

    @property
    def _within_limit(self) -> str:
        return "" if self.limit is None else f" within {self.limit} tokens"

    def _warn_equal(self, equal: list[int], count: int) -> None:
        """Log which pairs are skipped, of ``count``."""
        if self.parallel.is_main:
            log.warning(
                "%d of %d pairs are skipped, because chosen and rejected are the same%s: sample%s %s",
                len(equal),
                count,
                self._within_limit,
                "s" if len(equal) > 1 else "",
                ", ".join(map(str, equal[:20])) + (", ..." if len(equal) > 20 else ""),
            )

    def _encode_pair(self, row: Row, what: str = "the sample") -> tuple[EncodedSide, EncodedSide, bool]:
        limit, texts = None if self.shape else self.limit, list[str]()
        if self.reads_images:
            row, inputs = self._expanded(row, what)
            texts = [row["prompt"], row["chosen"], row["rejected"]] if inputs else []
        chosen, rejected, cut = encode_pair_within(
            self.tokenizer,
            row,
            limit,
            what,
            is_encoder_decoder=self.is_encoder_decoder,
            ends=self.ends,
            scored=self.scored,
        )
        if self.shape:
            (chosen, rejected), cut = self._shaped(what, chosen, rejected)
            check_sides(chosen, rejected, what, self.limit if cut else None)
        for side, text in zip((chosen, rejected), texts[1:], strict=False):
            self._check_whole([texts[0], text], *side[:1], what, side[1])
        return chosen, rejected, cut

    def _shaped(self, what: str, *sides: EncodedSide) -> tuple[tuple[EncodedSide, ...], bool]:
        """Return what `shape` makes of a sample, or of the sides of a pair, and whether one is shorter now.

        Raises:
            DataError: one is longer than the model can read.
        """
        assert self.shape is not None, "it is called if there is one"
        shaped = self.shape(*sides)
        for _, chosen in shaped:
            if not self.fits(len(chosen) - sum(chosen), sum(chosen)):
                raise DataError(f"{what} has {len(chosen)} tokens, and {self.what_fits}; shorten it")
        return shaped, any(len(new[0]) < len(old[0]) for new, old in zip(shaped, sides, strict=True))

    def encode_samples(self, rows: list[Row]) -> Sequences:
        """Encode sample rows as sequences on the device; outputs and their EOS are marked as responses."""
        encoded = [self._encode_sample(row) for row in rows]
        sequences = Sequences.from_rows(
            [ids for ids, _, _ in encoded], [chosen for _, chosen, _ in encoded], pad_id(self.tokenizer)
        )
        return replace(sequences, images=self.images(rows)).to(self.parallel.device)

    def _encode_sample(self, row: Row, what: str = "the sample") -> tuple[list[int], list[bool], bool]:
        """Return the ids, which of them are outputs, and whether the sample was truncated."""
        limit, inputs = None if self.shape else self.limit, dict[str, Tensor]()
        if self.reads_images:
            row, inputs = self._expanded(row, what)
        ids, chosen, cut = encode_within(
            self.tokenizer, row, limit, what, is_encoder_decoder=self.is_encoder_decoder, ends=self.ends
        )
        if self.shape:
            ((ids, chosen),), cut = self._shaped(what, (ids, chosen))
        if inputs:
            self._check_whole(row["turns"], ids, what, chosen)
        elif "turns" not in row and (token := image_token(self.model_config)) in ids:
            raise DataError(
                f"{what} holds the token id {token}, which stands for a part of an image, and no image is given; give "
                "rows with text and images, and not with token ids"
            )
        return ids, chosen, cut

    def encode_preferences(self, rows: list[Row]) -> Preferences:
        """Encode rows of pairs as sequences on the device; prompt and output are tokenised as one text."""
        pairs, fill = [self._encode_pair(row) for row in rows], pad_id(self.tokenizer)
        chosen, rejected = (
            Sequences.from_rows([ids for ids, _ in side], [mask for _, mask in side], fill)
            for side in ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        )
        images = self.images(rows)
        both = (replace(side, images=images) for side in (chosen, rejected))
        return Preferences(*both).to(self.parallel.device)


def make_text(
    config: TRLConfig[Any],
    parallel: Parallel,
    *,
    model: Any,
    tokenizer: Any,
    generates: bool,
    encoder_decoders: bool,
    **kwargs: Any,
) -> Text:
    """Return the text of a run, after checking that tokenizer and model suit the algorithm.

    Args:
        config: the run's configuration.
        parallel: the processes; the main one logs.
        model: a live model; None: the one that the configuration names.
        tokenizer: a live tokenizer; None: the one that the configuration names.
        generates: whether the model generates text.
        encoder_decoders: whether the algorithm can train encoder-decoders.
        **kwargs: the other arguments of `Text`.

    Raises:
        ConfigError: they do not.
    """
    name = config.method.name
    if tokenizer is not None and config.tokenizer.tokenizer_path is not None:
        raise ConfigError(
            f"a tokenizer is given, and tokenizer.tokenizer_path is {config.tokenizer.tokenizer_path!r}; "
            "give one of the two"
        )
    tokenizer = load_tokenizer(config, tokenizer)
    model_config = model.config if model is not None else load_model_config(config.model)
    check_trainable(config.model, model_config, live=model is not None)
    if not reads_images(model_config) and tokenizer in READERS:
        kind = model_config.model_type
        READERS[tokenizer] = ImageReader(None, f"a model of the kind {kind!r} reads none; give one that does")
    elif reads_images(model_config) and tokenizer not in READERS:
        READERS[tokenizer] = ImageReader(None, "no processor reads them; give the model's processor as the tokenizer")
    if balances_experts(model_config) and parallel.is_main:
        log.warning(
            "the loss that balances the experts of a mixture (router_aux_loss_coef) is not added to that of %s; "
            "model.kwargs.output_router_logits: true adds it",
            name,
        )
    if model_config.is_encoder_decoder and not encoder_decoders:
        raise ConfigError(
            f"a model of type {model_config.model_type!r} is an encoder-decoder, and {name!r} trains none; give a "
            "model that reads prompt and response as one text"
        )
    return Text(
        config,
        parallel,
        tokenizer=tokenizer,
        model_config=model_config,
        virtual=count_virtual(config.model, model),
        ends=coming_eos(config.model, model, model_config) if generates else [],
        scored=not generates,
        **kwargs,
    )
