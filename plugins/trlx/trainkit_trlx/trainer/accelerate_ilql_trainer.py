"""ILQL with the interface of trlX."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from trainkit import functional as F
from trainkit import get_trainer
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.models.modeling_base import load
from trainkit_trlx.models.modeling_ilql import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads
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


def _ours(name: str) -> str:
    """Return the name of a weight of trlX's heads in the heads of trainkit."""
    *path, layer, kind = name.replace("v_head", "v").replace("q_heads", "q").split(".")
    last = "summary" if path[0] == "v" else "out"
    return ".".join([*path, {"0": "hidden", "2": last}[layer], kind])


@register_trainer
class AccelerateILQLTrainer(Offline, Trainer):  # type: ignore[misc]
    """Trainer of ILQL."""

    @staticmethod
    def from_checkpoint(path: str, seq2seq: bool) -> Any:
        """Return the language model that trlX has saved in a directory, with its heads."""
        made = AutoModelForSeq2SeqLMWithILQLHeads if seq2seq else AutoModelForCausalLMWithILQLHeads
        return made.from_pretrained(path, is_trainable=True)

    def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        given: Any = self.live_model
        self._saved: Any = getattr(given, "ilql_heads", None)
        self.live_model: Any = given if self._saved is None else given.base_model

    def get_arch(self, config: Any) -> Any:
        """Return the policy, with the heads of a checkpoint of trlX."""
        policy = super().get_arch(config)
        if self._saved is not None:
            ours = {_ours(name): tensor for name, tensor in self._saved.state_dict().items()}
            load(policy.head, ours, "the checkpoint")
        return policy

    @cached_property
    def model(self) -> Any:
        """The language model with the heads of ILQL, which are trained."""
        policy = self.unwrapped
        method, seq2seq = self.method, policy.model.config.is_encoder_decoder
        cls = AutoModelForSeq2SeqLMWithILQLHeads if seq2seq else AutoModelForCausalLMWithILQLHeads
        made = cls(policy.model, two_qs=method.two_qs, alpha=method.alpha)
        trained = policy.head.state_dict(keep_vars=True)
        heads = {name: trained[_ours(name)] for name in made.ilql_heads.state_dict()}
        made.ilql_heads.load_state_dict(heads, assign=True)
        return made

    def make_experience_seq2seq(self, samples: Any, rewards: Any, max_length: int = 2048) -> None:
        """Set the samples to train on, as `make_experience`: trainkit knows whether the model is an encoder-decoder."""
        self.make_experience(samples, rewards, max_length)
