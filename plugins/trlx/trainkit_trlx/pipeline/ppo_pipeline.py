"""The store of rollouts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from trainkit_trlx.data.ppo_types import PPORLBatch, PPORLElement
from trainkit_trlx.overrides import remembered
from trainkit_trlx.pipeline import BaseRolloutStore

if TYPE_CHECKING:
    from torch import Tensor


def ppo_collate_fn(padding_side: str, pad_token_id: int, elems: Iterable[PPORLElement]) -> PPORLBatch:
    """Return rollouts as a batch: prompts padded on ``padding_side``, everything else on the right."""
    rows = list(elems)
    queries = [row.query_tensor for row in rows]
    if padding_side == "left":
        padded = pad_sequence([query.flip(0) for query in queries], padding_value=pad_token_id, batch_first=True).flip(
            1
        )
    elif padding_side == "right":
        padded = pad_sequence(queries, padding_value=pad_token_id, batch_first=True)
    else:
        raise ValueError(f"padding_side should be 'left' or 'right'; given {padding_side!r}")

    def right(name: str, value: float) -> Tensor:
        return pad_sequence([getattr(row, name) for row in rows], padding_value=value, batch_first=True)

    return PPORLBatch(padded, right("response_tensor", pad_token_id), *(right(name, 0.0) for name in NUMBERS))


NUMBERS = ("logprobs", "values", "rewards")


@remembered
class PPORolloutStorage(BaseRolloutStore):
    """Rollouts, for loops of one's own; trainkit's trainers keep theirs themselves.

    Args:
        pad_token_id: the id that pads.
        padding_side: where prompts are padded.
    """

    def __init__(self, pad_token_id: int, padding_side: str) -> None:
        super().__init__()
        self.pad_token_id, self.padding_side = pad_token_id, padding_side

    def clear_history(self) -> None:
        """Remove all rollouts."""
        self.history = []

    def export_history(self, location: str, only_text: bool = True) -> None:
        """Write the rollouts to a new JSON file in a directory, which exists: token ids, or all fields."""
        if not Path(location).is_dir():
            raise ValueError(f"there is no directory {location!r}; make it before")
        names = ("query_tensor", "response_tensor", *(() if only_text else NUMBERS))
        rows = [{name: getattr(row, name).tolist() for name in names} for row in self.history]
        (Path(location) / f"epoch-{time.time()}.json").write_text(json.dumps(rows), encoding="utf-8")

    def create_loader(self, batch_size: int, shuffle: bool, **_: Any) -> DataLoader[Any]:  # type: ignore[override]
        """Return a loader of batches."""

        def collate(rows: list[PPORLElement]) -> PPORLBatch:
            return ppo_collate_fn(self.padding_side, self.pad_token_id, rows)

        return DataLoader(self, batch_size, shuffle=shuffle, collate_fn=collate)
