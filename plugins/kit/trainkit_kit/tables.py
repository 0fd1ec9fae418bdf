"""Policies that are tables: a row of logits for every state, which is what has been chosen of a response so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from trainkit.data import Sequences
from trainkit.models import Policy

State = tuple[int, ...]
"""The ids of the response tokens that have been chosen."""
SIZE = 128
"""The most states of a table."""


class Table:
    """Logits of every state, float64 [states, V], which are drawn when they are first read.

    Args:
        vocabulary: V.
        seed: of what is drawn.
        width: the width of the hidden states that a value head or another head reads.
        known: log-probabilities of states that are not drawn, by token; other tokens are as good as impossible there.
    """

    def __init__(
        self, vocabulary: int, seed: int, width: int, known: Mapping[State, Mapping[int, float]] | None = None
    ) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(SIZE, vocabulary, generator=draws, dtype=torch.float64)
        self.hidden = torch.randn(SIZE, width, generator=draws)
        self.places: dict[State, int] = {}
        for state, chances in (known or {}).items():
            row = torch.full((vocabulary,), -40.0, dtype=torch.float64)
            row[list(chances)] = torch.tensor(list(chances.values()), dtype=torch.float64)
            self.logits[self.place(state)] = row
        self.logits.requires_grad_()

    def place(self, state: State) -> int:
        """Return the row of a state."""
        return self.places.setdefault(state, len(self.places))

    def states(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [N, V], hidden states [N, D] and previous tokens [N] of the N response tokens of sequences."""
        responses = [response.tolist() for response in sequences.responses]
        places = [self.place(tuple(ids[:at])) for ids in responses for at in range(len(ids))]
        previous = sequences.input_ids.roll(1, 1)[sequences.response_mask]
        return self.logits[places].float().to(previous.device), self.hidden[places].to(previous.device), previous

    def logprobs(self, responses: Sequence[Sequence[int]]) -> Tensor:
        """Return the log-distribution [B, T, V] of the states in which each token was chosen; 0 behind responses."""
        longest, logs = max(map(len, responses)), self.logits.log_softmax(-1)
        nothing = torch.zeros_like(logs[:1])
        rows = [
            torch.cat(
                [logs[[self.place(tuple(ids[:at])) for at in range(len(ids))]], *[nothing] * (longest - len(ids))]
            )
            for ids in map(list, responses)
        ]
        return torch.stack(rows)


@contextmanager
def tabular(trainer: Any, policy: Table, reference: Table) -> Iterator[None]:
    """Let the trained policy and the reference be tables within the context."""
    trainer.models.build()
    models = [(trainer.unwrapped, policy)]
    if trainer.needs_reference:
        models.append((trainer.reference.policy, reference))
    alone = [model.head_alone for model, _ in models]
    for model, table in models:
        assert isinstance(model, Policy), "a table takes the place of a policy of trainkit"
        model.head_alone = False  # `_states` returns logits
        model._states = table.states  # type: ignore[method-assign]
        model._states_and_critics = lambda sequences, _, of=table: (of.states(sequences), of.states(sequences)[1])  # type: ignore[method-assign,misc]
    try:
        yield
    finally:
        for (model, _), was in zip(models, alone, strict=True):
            model.head_alone = was
            for name in ("_states", "_states_and_critics"):
                vars(model).pop(name)


def chances(state: State, tokens: Sequence[int], shares: Sequence[int], seed: int = 0) -> dict[int, float]:
    """Return log-probabilities of tokens in proportion to ``shares``, in an order that differs among states."""
    total, turn = sum(shares), crc32(repr((state, seed)).encode()) % len(shares)
    return {
        token: float(torch.tensor(shares[(at + turn) % len(shares)] / total, dtype=torch.float64).log())
        for at, token in enumerate(tokens)
    }
