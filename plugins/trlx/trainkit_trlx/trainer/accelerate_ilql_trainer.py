"""ILQL with the interface of trlX."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from trainkit import Sequences, get_trainer
from trainkit import functional as F
from trainkit.errors import ConfigError
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.ilql_types import ILQLBatch, ILQLElement, ILQLSeq2SeqBatch, ILQLSeq2SeqElement
from trainkit_trlx.models.modeling_base import load, new_model
from trainkit_trlx.models.modeling_ilql import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads
from trainkit_trlx.pipeline.offline_pipeline import (
    IGNORED,
    ILQLRolloutStorage,
    ilql_collate_fn,
    ilql_seq2seq_collate_fn,
    tokenize_dialogue,
)
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.names import tensor_statistics
from trainkit_trlx.trainer.offline import Offline, Samples

if TYPE_CHECKING:
    from torch import Tensor

Trainer: Any = get_trainer("ilql")
Experience: Any = import_module(Trainer.__module__).ILQLBatch
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
    rows = [
        _indexed(
            torch.tensor([token for message in dialogue for token in message.tokens]),
            torch.tensor([message.is_output for message in dialogue for _ in message.tokens]),
        )
        for dialogue in dialogues
    ]
    returns = torch.tensor(rewards, dtype=torch.float32)
    scores = F.whiten(returns, torch.ones_like(returns, dtype=torch.bool))
    for row, score in zip(rows, scores, strict=True):
        row["rewards"][-1] = score
    if verbose:
        log.info("%d samples, with a mean reward of %.4g", len(rows), returns.mean().item())
    return ILQLRolloutStorage(**{name: [row[name] for row in rows] for name in rows[0]})


def _indexed(ids: Tensor, output: Tensor) -> dict[str, Tensor]:
    """Return token ids [T] with the positions before which outputs are chosen, the actions [A], and states [A + 1].

    ``output`` [T] marks the tokens of outputs.
    """
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


class ILQL(Samples, Trainer):  # type: ignore[misc]
    """trainkit's ILQL for trlX's, with the heads of a checkpoint of trlX."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
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

    def statistics(self, batch: Any, outputs: Any) -> Any:
        """Return the metrics of a micro-batch with those of trlX."""
        mask, head = batch.sequences.response_mask, outputs.head
        qs = {f"qvalues/{name[1:]}": answer for name, answer in head.items() if name in ("q0", "q1")}
        tensors = {"values": head["values"], **qs, "awac_weight": self.weights(outputs)}
        own = {key: each for name, x in tensors.items() for key, each in tensor_statistics(name, x, mask).items()}
        return {**super().statistics(batch, outputs), **own}

    def as_trlx(self, batch: Any) -> ILQLBatch | ILQLSeq2SeqBatch:
        """Return samples with the positions of states and actions; of an encoder-decoder, its decoder's start first."""
        if self.model_config.is_encoder_decoder:
            return self._as_seq2seq(batch)
        sequences, rows = batch.sequences, []
        for ids, real, chosen, rewards in zip(
            sequences.input_ids, sequences.attention_mask, sequences.response_mask, batch.rewards, strict=True
        ):
            rows.append(ILQLElement(**{**_indexed(ids[real], chosen[real]), "rewards": rewards[chosen]}))
        return ilql_collate_fn(rows)

    def _as_seq2seq(self, batch: Any) -> ILQLSeq2SeqBatch:
        sequences, rows = batch.sequences, []
        start = sequences.input_ids.new_tensor([self.model_config.decoder_start_token_id])
        for query, response, rewards, chosen in zip(
            sequences.queries, sequences.responses, batch.rewards, sequences.response_mask, strict=True
        ):
            ids = torch.cat([start, response])
            of_decoder = {**_indexed(ids, torch.arange(len(ids), device=ids.device) > 0), "rewards": rewards[chosen]}
            of_encoder = {"input_ids": query, "attention_mask": torch.ones_like(query)}
            rows.append(ILQLSeq2SeqElement(**{**of_decoder, **of_encoder, "decoder_input_ids": ids}))
        return ilql_seq2seq_collate_fn(rows)

    def from_trlx(self, batch: ILQLBatch | ILQLSeq2SeqBatch) -> Any:
        """Return samples of trlX as sequences with rewards [B, T]."""
        if isinstance(batch, ILQLSeq2SeqBatch):
            sizes = batch.dones.sum(1).long().tolist()
            real = zip(batch.input_ids, batch.attention_mask.bool(), strict=True)
            queries = [ids[keep].tolist() for ids, keep in real]
            written = zip(batch.decoder_input_ids, sizes, strict=True)
            made = Sequences.from_lists(queries, [ids[1 : size + 1].tolist() for ids, size in written])
            given = [row[:size] for row, size in zip(batch.rewards, sizes, strict=True)]
            return self._rewarded(made.to(batch.input_ids.device), given)
        rows, chosen, rewards = [], [], []
        for ids, real, given, actions, dones in zip(
            batch.input_ids, batch.attention_mask.bool(), batch.rewards, batch.actions_ixs, batch.dones, strict=True
        ):
            places = actions[: int(dones.sum())] + 1
            mask = torch.zeros_like(real).index_fill(0, places, True)
            rows.append(ids[real].tolist())
            chosen.append(mask[real].tolist())
            rewards.append(given[: len(places)])
        return self._rewarded(Sequences.from_rows(rows, chosen).to(batch.input_ids.device), rewards)

    def _rewarded(self, sequences: Sequences, rewards: list[Tensor]) -> Any:
        """Return sequences with the rewards of the actions of each."""
        placed = torch.zeros(sequences.input_ids.shape, device=sequences.input_ids.device)
        return Experience(sequences, placed.masked_scatter(sequences.response_mask, torch.cat(rewards)))


@register_trainer
class AccelerateILQLTrainer(Offline):
    """Trainer of ILQL."""

    trainer_class, algorithm = ILQL, "ilql"
    fields = tuple(each.name for each in fields(ILQLBatch))

    @property
    def ilql(self) -> Any:
        """The settings of ILQL, with their loss."""
        return self.config.method

    @staticmethod
    def from_checkpoint(path: str, seq2seq: bool) -> Any:
        """Return the language model that trlX has saved in a directory, with its heads."""
        made = AutoModelForSeq2SeqLMWithILQLHeads if seq2seq else AutoModelForCausalLMWithILQLHeads
        return made.from_pretrained(path, is_trainable=True)

    def get_arch(self, config: TRLConfig) -> Any:
        """Return a new language model with heads, whose weights trainkit trains if this is overridden."""
        method: Any = config.method
        return new_model(
            (AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads),
            config.model,
            two_qs=method.two_qs,
            alpha=method.alpha,
        )

    def wrapped_model(self, policy: Any) -> Any:
        """Return the language model with the heads of ILQL, which are trained."""
        method, seq2seq = self.trainer.method, policy.model.config.is_encoder_decoder
        cls = AutoModelForSeq2SeqLMWithILQLHeads if seq2seq else AutoModelForCausalLMWithILQLHeads
        made = cls(policy.model, two_qs=method.two_qs, alpha=method.alpha)
        trained = policy.head.state_dict(keep_vars=True)
        heads = {name: trained[_ours(name)] for name in made.ilql_heads.state_dict()}
        made.ilql_heads.load_state_dict(heads, assign=True)
        return made

    def make_experience(self, samples: Any, rewards: Any, max_length: int = 2048) -> None:
        """Set the samples to train on, of at most ``max_length`` tokens, and their rewards."""
        self.set_samples(samples, rewards, max_length)

    def make_experience_seq2seq(self, samples: Any, rewards: Any, max_length: int = 2048) -> None:
        """Set the samples to train on, as `make_experience`: trainkit knows whether the model is an encoder-decoder."""
        self.make_experience(samples, rewards, max_length)

    def new_store(self, samples: list[Any], rewards: Any, max_length: int) -> ILQLRolloutStorage:
        """Return the samples, tokenised, with normalised rewards.

        Raises:
            ConfigError: the model is an encoder-decoder.
        """
        if self.trainer.model_config.is_encoder_decoder:
            raise ConfigError(
                "the store has samples of causal models, and the model is an encoder-decoder; give its samples as text"
            )
        return make_experience(samples, rewards, self.tokenizer, max_length, verbose=False)

    def samples_of(self, store: Any) -> tuple[list[Any], list[float]]:
        """Return the samples of a store, tokenised, with the sum of the rewards of each."""
        rows = []
        for item in store:
            labels = torch.full_like(item.input_ids, IGNORED)
            places = item.actions_ixs + 1
            labels[places] = item.input_ids[places]
            rows.append({"input_ids": item.input_ids.tolist(), "labels": labels.tolist()})
        return rows, [float(item.rewards.sum()) for item in store]
