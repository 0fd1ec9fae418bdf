"""Compiled models: `torch.compile` of a model's blocks, one at a time, with lengths that vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.data import Sequences
from trainkit.models.backend import keep_attention_uncompiled
from trainkit.models.fitting import first_line
from trainkit.models.policy import hidden_states, inputs_of
from trainkit.models.prompts import equal_but_for_rounding, with_gradient
from trainkit.models.trunk import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKEND = "inductor"
VARIANTS = 64
"""How often torch may compile a block anew: with gradient and without, in training mode, for single rows."""


def compile_blocks(model: PreTrainedModel) -> str | None:
    """Compile the blocks of a model; return why they stay as they are, None if they are compiled.

    All blocks of a kind have the same code, with the lengths as variables. Attention stays as it is: it is a kernel
    already. States and gradients of the compiled blocks are compared with those of the model on a small input.
    """
    name, blocks = type(model).__name__, find_blocks(model)
    if model.config.is_encoder_decoder or blocks is None:
        return f"{name} is not a causal model with blocks that are found"
    import torch._dynamo  # takes two seconds

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, VARIANTS)
    keep_attention_uncompiled()
    training = model.training
    model.eval()

    def states(rows: Sequences, _: None) -> Tensor:
        return hidden_states(model, inputs_of(rows))[rows.attention_mask]

    def compile_all() -> None:
        for block in blocks:
            block.compile(dynamic=True, backend=BACKEND)

    try:
        fault = _fault(lambda: with_gradient(model, states, None), compile_all)
    finally:
        model.train(training)
    if fault is not None:
        for block in blocks:
            block._compiled_call_impl = None
        return f"compiled blocks of {name} give {fault}"
    return None


def _fault(numbers: Callable[[], tuple[Tensor, ...]], compile_all: Callable[[], None]) -> str | None:
    """Return what is wrong with ``numbers()`` after ``compile_all()``; None if they are equal but for rounding."""
    try:
        expected = numbers()
        compile_all()
        equal = all(map(equal_but_for_rounding, numbers(), expected))
    except Exception as error:  # of the compiler, which raises whatever it meets
        return f"an error ({type(error).__name__}: {first_line(error)})"
    return None if equal else "other numbers"


def is_compiled(model: PreTrainedModel) -> bool:
    """Return whether `compile_blocks` has compiled the blocks of this model; copies of it are not compiled."""
    return any(block._compiled_call_impl is not None for block in find_blocks(model) or ())


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the blocks of a model inside the block as they are, for sampling, whose steps are captured as graphs."""
    if not is_compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
