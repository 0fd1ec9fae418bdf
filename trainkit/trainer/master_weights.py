"""Steps in float32 for weights of lower precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

LOW = (torch.bfloat16, torch.float16)
"""The types of weights that are trained by a copy in float32."""
MASTER = "master"
"""The name of the copy in the state of a parameter."""


class MasterWeights(torch.optim.Optimizer):
    """An optimizer that makes its steps on float32 copies of weights of lower precision, and then rounds these.

    A change below half of the distance of two numbers of bfloat16, 2⁻⁹ of a weight, is lost if it is rounded after
    every step; the copies add such changes up (Micikevicius et al. 2018, section 3.1). Gradients are accumulated in
    float32, too, so that a step hardly depends on its micro-batches. Weights of float32 are trained as usual.

    It is the first base of a class that is made by `with_masters`.
    """

    _masters: dict[nn.Parameter, Tensor]

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make a step. What has changed a weight since the last one, is kept.

        Raises:
            ValueError: a ``closure`` is given, which would run the model between the copies.
        """
        if closure is not None:
            raise ValueError("a closure is given, and a step with float32 copies of weights takes none; call it before")
        for parameter, master in self._masters.items():
            follow(master, parameter.detach())
        with self._copies():
            super().step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in which every parameter of lower precision has its ``master``."""
        state = super().state_dict()
        for index, parameter in enumerate(self._parameters()):
            if (master := self._masters.get(parameter)) is not None:
                state["state"][index] = {**state["state"].get(index, {}), MASTER: master}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        values = {index: dict(each) for index, each in state_dict["state"].items()}
        for index, parameter in enumerate(self._parameters()):
            if (master := self._masters.get(parameter)) is not None:
                master.copy_(values.get(index, {}).pop(MASTER, parameter.detach()))
        with self._copies():  # torch gives a state the type of its parameter
            super().load_state_dict({**state_dict, "state": {index: each for index, each in values.items() if each}})

    def masters(self) -> list[Tensor]:
        """Return the float32 copies."""
        return list(self._masters.values())

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    @contextmanager
    def _copies(self) -> Iterator[None]:
        """Return a context in which the parameters are their float32 copies."""
        rounded = {parameter: parameter.data for parameter in self._masters}
        try:
            for parameter, master in self._masters.items():
                parameter.data = master
            yield
        finally:
            for parameter, own in rounded.items():
                parameter.data = own


def with_masters(cls: type[torch.optim.Optimizer]) -> type[MasterWeights]:
    """Return the class of optimizers ``cls``, with float32 copies of weights of lower precision."""

    def make(self: Any, params: Iterable[nn.Parameter | dict[str, Any]], **kwargs: Any) -> None:
        given = list(params)
        parameters = [p for each in given for p in (each["params"] if isinstance(each, dict) else [each])]
        self._masters = {each: each.detach().float() for each in low_precision(parameters)}
        for parameter in self._masters:
            parameter.grad_dtype = torch.float32
        with self._copies():  # some make their state here, of the type of the parameters
            cls.__init__(self, cast(Any, given), **kwargs)

    return type(cls.__name__, (MasterWeights, cls), {"__init__": make})


def follow(master: Tensor, rounded: Tensor) -> None:
    """Let a copy follow weights of lower precision where these are no longer its rounding."""
    master.copy_(torch.where(master.to(rounded.dtype) == rounded, master, rounded.to(master.dtype)))


def low_precision(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trained parameters that are of a lower precision than float32."""
    return [each for each in parameters if each.requires_grad and each.dtype in LOW]
