"""ILQL with the interface of trlX."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trainkit import functional as F
from trainkit import get_trainer
from trainkit_trlx.pipeline.offline_pipeline import ILQLRolloutStorage, tokenize_dialogue
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import Offline

Trainer: Any = get_trainer("ilql")
log = logging.getLogger(__name__)


def make_experience(
    samples: Iterable[Any],
    rewards: Sequence[float],
    tokenizer: Any = None,
    max_length: int = 2048,
    verbose: bool = True,
) -> ILQLRolloutStorage:
    """Return samples with rewards for a loop of one's own; trainers have a method of this name.

    A reward is on the last action of its sample. Rewards are normalised over the samples, as trainkit's ILQL does.

    Args:
        samples: strings or dialogues; without a tokenizer, what `tokenize_dialogue` returns.
        rewards: one number per sample.
        tokenizer: tokenises the samples.
        max_length: the most tokens of a sample.
        verbose: whether the number of samples is logged.
    """
    dialogues = samples if tokenizer is None else [tokenize_dialogue(each, tokenizer, max_length) for each in samples]
    rows = [_indexed(dialogue) for dialogue in dialogues]
    returns = torch.tensor(rewards, dtype=torch.float32)
    scores = F.whiten(returns, torch.ones_like(returns, dtype=torch.bool))
    for row, score in zip(rows, scores, strict=True):
        row["rewards"][-1] = score
    if verbose:
        log.info("%d samples, with a mean reward of %.4g", len(rows), returns.mean().item())
    return ILQLRolloutStorage(**{name: [row[name] for row in rows] for name in rows[0]})


def _indexed(dialogue: list[Any]) -> dict[str, torch.Tensor]:
    """Return token ids [T] with the positions before which outputs are chosen, the actions [A], and states [A + 1]."""
    ids = torch.tensor([token for message in dialogue for token in message.tokens])
    output = torch.tensor([message.is_output for message in dialogue for _ in message.tokens])
    actions = output.nonzero().squeeze(-1) - 1
    states = torch.cat([actions, torch.tensor([len(ids) - 1])])
    dones = torch.ones_like(states)
    dones[-1] = 0
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "rewards": torch.zeros(len(actions)),
        "states_ixs": states,
        "actions_ixs": actions,
        "dones": dones,
    }


@register_trainer
class AccelerateILQLTrainer(Offline, Trainer):  # type: ignore[misc]
    """Trainer of ILQL."""

    def make_experience_seq2seq(self, samples: Any, rewards: Any, max_length: int = 2048) -> None:
        """Set the samples to train on, as `make_experience`: trainkit knows whether the model is an encoder-decoder."""
        self.make_experience(samples, rewards, max_length)
