"""Tapes: the calls of torch that a model makes in a step, recorded once and made again without the model's Python code.

A step of a small model takes about as long in Python as in its products. Nearly all of that is the modules' own code,
which makes the same calls of torch in every step. A tape makes only these calls, so the results have the same bits.
Under autocast, it makes each of them with the autocast of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from operator import getitem
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainkit.models.backend import by_default_library
from trainkit.rollouts.packing import Packs

KNOWN = frozenset(  # split, because a list would have a line for each name
    """
    __add__ __getitem__ __mul__ __neg__ __pow__ __radd__ __rmul__ __rsub__ __sub__ __truediv__ add add_ addmm baddbmm
    bmm cat chunk clamp clone contiguous cos div dropout embedding exp expand expand_as flatten float gelu layer_norm
    linear matmul mean mm movedim mul mul_ narrow neg permute pow relu repeat reshape rms_norm rsqrt
    scaled_dot_product_attention select sigmoid silu sin softmax split sqrt square squeeze stack sub sum t tanh
    to transpose type_as unflatten unsqueeze update view view_as
    """.split()  # noqa: SIM905
)
"""The names of functions that may be on a tape: what they do, and the shapes of their results, follow from the shapes
of their arguments."""

EFFECTS = frozenset(("add_", "mul_", "update"))
"""Those that change a tensor, or the cache."""

UNRECORDED = frozenset(
    "__contains__ __get__ __len__ _set_grad_enabled dim is_contiguous is_floating_point numel size stride".split()  # noqa: SIM905
)
"""The names of functions that are called but not recorded, unless they return a tensor: facts about shapes, and
transformers' search for padding among the inputs, which leads to nothing but a warning."""


class TapeError(Exception):
    """A step cannot be recorded; the message says why."""


class Call(NamedTuple):
    """A call of torch."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: list[tuple[Any, Any, int]]
    """Where among the arguments, and which of the values, computed tensors are put."""
    slot: int
    """Which of the values the result is."""
    autocast: bool
    """Whether autocast was on."""


class Tape:
    """The calls that a step made. `play` makes them again for other inputs of the same shapes."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.values: list[Any] = []
        self.results: tuple[int | None, ...] = ()
        self.autocast = False
        self.parts: list[tuple[AbstractContextManager[Any], list[Call]]] = []
        """Calls that are made one after the other within a context."""

    def finish(self, results: tuple[int | None, ...], device: str, autocast: bool) -> None:
        """Remove the calls that neither change a tensor nor lead to the results, and group the others.

        Args:
            results: where the results are among the values.
            device: the type of the device.
            autocast: whether autocast is on when the tape is played.
        """
        needed, kept = {*results}, []
        for call in reversed(self.calls):
            if call.slot in needed or call.function.__name__ in EFFECTS:
                needed |= {at for _, _, at in call.places}
                kept.append(call)
        self.results, self.calls, self.autocast = results, kept[::-1], autocast
        for enabled, calls in groupby(self.calls, key=lambda call: call.autocast):
            other = torch.autocast(device, torch.get_autocast_dtype(device), enabled=enabled)
            self.parts.append((nullcontext() if enabled == autocast else other, list(calls)))

    def play(self, *inputs: Tensor | None) -> tuple[Any, ...]:
        """Make the calls with ``inputs``, and return the results, as the recorded function did."""
        # no code of the model runs here that might keep a tensor for a backward pass, so that inference mode, which is
        # faster, is possible; but there autocast would cast the weights in each step
        with torch.no_grad() if self.autocast else torch.inference_mode():
            return self._play(inputs)

    def _play(self, inputs: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        values = self.values
        values[: len(inputs)] = inputs
        for context, calls in self.parts:
            with context:
                for function, args, kwargs, places, slot, _ in calls:
                    for holder, key, at in places:
                        holder[key] = values[at]
                    values[slot] = function(*args, **kwargs)
        return tuple(None if at is None else values[at] for at in self.results)


def record(
    step: Callable[..., tuple[Tensor | None, ...]],
    inputs: tuple[Tensor | None, ...],
    constants: Iterable[Tensor],
    packs: Packs | None = None,
) -> tuple[Tape, tuple[Any, ...]]:
    """Call ``step(*inputs)``, and return a tape of it and its results.

    Args:
        step: a function of tensors, without gradient.
        inputs: its arguments.
        constants: other tensors that it may read, such as the weights; the tape reads them anew.
        packs: those of the weights, if these do not change while the tape is used.

    Raises:
        TapeError: a call is not `KNOWN`, or reads another tensor.
    """
    device = next(each.device.type for each in inputs if each is not None)
    recorder = _Recorder(inputs, constants, device, packs)
    with recorder:
        results = step(*inputs)
    slots = tuple(None if found is None else recorder.slot(found) for found in results)
    recorder.tape.finish(slots, device, torch.is_autocast_enabled(device))
    return recorder.tape, results


class _Recorder(TorchFunctionMode):
    """Records the calls of torch made inside the context."""

    def __init__(
        self, inputs: Iterable[Tensor | None], constants: Iterable[Tensor], device: str, packs: Packs | None
    ) -> None:
        super().__init__()
        self.tape, self.device, self.packs = Tape(), device, packs
        self.slots: dict[int, int] = {}
        self.constants = {id(tensor) for tensor in constants}
        for tensor in inputs:
            self.new(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        result = func(*args, **kwargs)
        if name in UNRECORDED and not isinstance(result, Tensor):
            return result
        if name not in KNOWN or (name == "__getitem__" and not _plain(args[1])):
            raise TapeError(f"it calls {name}")
        if name in ("contiguous", "dropout", "float", "to") and result is args[0]:
            return result
        places: list[tuple[Any, Any, int]] = []
        held, named = self.held(list(args), places), self.held(dict(kwargs), places)
        if func is F.scaled_dot_product_attention:
            func = _attention
        if func is F.linear and self.packs is not None and id(args[1]) in self.constants:
            func = self.packs.linear(*args, **kwargs) or func
        slot, autocast = self.new(result), torch.is_autocast_enabled(self.device)
        self.tape.calls.append(Call(func, held, named, places, slot, autocast))
        if isinstance(result, tuple | list):
            for index, each in enumerate(result):
                part: list[Any] = [None, index]
                self.tape.calls.append(Call(getitem, part, {}, [(part, 0, slot)], self.new(each), autocast))
        return result

    def new(self, result: Any) -> int:
        """Return a new slot for a result, which is kept, so that no other tensor has its id."""
        self.slots[id(result)] = len(self.tape.values)
        self.tape.values.append(result)
        return len(self.tape.values) - 1

    def slot(self, tensor: Tensor) -> int:
        """Return the slot of a tensor that the step has computed."""
        if id(tensor) not in self.slots:
            raise TapeError("it reads a tensor that is neither an input nor a weight")
        return self.slots[id(tensor)]

    def held(self, holder: Any, places: list[tuple[Any, Any, int]]) -> Any:
        """Return arguments as lists and dicts; append to ``places`` where in them computed tensors are to be put."""
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, tuple | list) and any(isinstance(each, Tensor) for each in value):
                holder[key] = self.held(list(value), places)
            elif isinstance(value, Tensor) and id(value) not in self.constants:
                places.append((holder, key, self.slot(value)))
        return holder


def _plain(index: Any) -> bool:
    """Return whether an index holds no tensors, so that the shape of what it selects is known."""
    return not any(isinstance(each, Tensor) for each in (index if isinstance(index, tuple | list) else (index,)))


def _attention(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """Compute attention with the default library, as the recorded step does."""
    return by_default_library(partial(F.scaled_dot_product_attention, **kwargs), query, key, value)
