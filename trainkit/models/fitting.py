"""Passes that do not fit into memory, and the number of rows that does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache

from trainkit.errors import OutOfMemoryError
from trainkit.models.backend import autocast_dtype

log = logging.getLogger(__name__)

T = TypeVar("T")

SAID = (
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "could not create a primitive",  # of oneDNN
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",  # of cuBLAS and cuDNN
)
"""What messages of a `RuntimeError` say if memory does not suffice."""
ADVICE = (
    "Set train.gradient_checkpointing to true, shorten sequences (train.seq_length, rollout.max_new_tokens), train an "
    "adapter (model.peft_config), or divide the model among processes (train.sharding); trainkit estimate CONFIG says "
    "what fits"
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one during which it was raised, says that memory does not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in SAID):
        return True
    return error.__context__ is not None and out_of_memory(error.__context__)


STATES, CACHE = 0.8, 0.3
"""The parts of a device's memory for the states of training, and for keys and values in sampling."""


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of a CUDA device; None for others. With those that are free, the rounding would change, too."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def tokens_that_fit(config: Any, room: float, *, low: bool, recomputes: bool | str) -> int | None:
    """Return for about how many tokens a backward pass has memory; None if the configuration does not say.

    Of each token, a layer keeps its states and those of its MLP: 32 bytes per number of the hidden state and 8 of the
    MLP's in 16 bits, 40 and 16 in float32, as is measured for Qwen2 and Llama.

    Args:
        config: transformers' configuration of the model.
        room: the bytes for the states that are kept.
        low: whether the model is run in 16 bits.
        recomputes: whether layers keep their inputs alone; ``"mlp"``: whether their MLPs do.
    """
    text = config.get_text_config()
    width, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if not width or not layers:
        return None
    inner = getattr(text, "intermediate_size", None) or 4 * width
    attention, mlp = (32 * width, 8 * inner) if low else (40 * width, 16 * inner)
    token = layers * (attention + mlp)
    if recomputes:  # beside what is kept, a block, or an MLP, is computed again
        token = layers * attention + mlp if recomputes == "mlp" else layers * 4 * width + attention + mlp
    return max(int(room / token), 1)


def rows_that_fit(model: Any, tokens: int) -> int | None:
    """Return for how many rows of so many tokens there is memory for keys and values; None if that is not known."""
    memory, dtype = memory_of(model.device), autocast_dtype(model.device.type) or model.dtype
    token = cache_bytes(model.config, dtype)
    return None if memory is None or token is None else max(int(CACHE * memory / (token * tokens)), 1)


def cache_bytes(config: Any, dtype: torch.dtype) -> int | None:
    """Return the bytes of the keys and values of a token; None if the configuration does not say."""
    text = config.get_text_config()
    heads, layers = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", None)
    if not heads or not layers:
        return None
    kept, size = getattr(text, "num_key_value_heads", None) or heads, getattr(text, "head_dim", None)
    return 2 * int(layers) * int(kept) * int(size or text.hidden_size // heads) * dtype.itemsize


class Holder(Protocol):
    """What holds the number of rows that fit."""

    microbatch: int | None


class RowLimit:
    """The most rows that are run through a model at a time, halved when they do not fit into memory.

    Copies of a model share it.

    Args:
        holder: returns what holds the number, in the attribute ``microbatch``; None: no limit.
    """

    def __init__(self, holder: Callable[[], Holder]) -> None:
        self._holder = holder

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def rows(self) -> int | None:
        """The most rows; None: no limit."""
        return self._holder().microbatch

    @rows.setter
    def rows(self, rows: int | None) -> None:
        self._holder().microbatch = rows

    def without_gradient(self, rows: int, run: Callable[[], T]) -> T:
        """Return what ``run`` returns, which runs a model without gradient and by no more than `rows` at a time.

        It is called again with half the limit while it does not fit.

        Args:
            rows: the rows that it reads.
            run: the function; it has no other effect than what it returns.

        Raises:
            OutOfMemoryError: one row does not fit.
        """
        while True:
            used = rows if self.rows is None else min(rows, self.rows)
            try:
                return run()
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, OutOfMemoryError) or not out_of_memory(error):
                    raise
                fault = first_line(error)
            self.rows = halved(used, fault)
            release()
            log.warning("%d rows at a time do not fit into memory; trying %d", used, self.rows)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the limit at the end of the block."""
        rows = self.rows
        try:
            yield
        finally:
            self.rows = rows


def halved(rows: int, fault: str) -> int:
    """Return half of ``rows``.

    Raises:
        OutOfMemoryError: there is one row.
    """
    if rows == 1:
        raise OutOfMemoryError(no_smaller(fault))
    return rows // 2


def no_smaller(fault: str) -> str:
    """Return the message for a row that does not fit."""
    return f"a micro-batch of one row does not fit into memory ({fault}). {ADVICE}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error) or type(error).__name__).splitlines()[0]


def release() -> None:
    """Give memory that is no longer used back to the device."""
    clear_device_cache(garbage_collection=True)
