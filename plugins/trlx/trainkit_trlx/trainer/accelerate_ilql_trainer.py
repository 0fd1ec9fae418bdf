"""ILQL with the interface of trlX."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from trainkit import Sequences, get_trainer
from trainkit import functional as F
from trainkit.errors import ConfigError, DataError, describe
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.ilql_types import ILQLBatch, ILQLElement, ILQLSeq2SeqBatch, ILQLSeq2SeqElement
from trainkit_trlx.models.modeling_base import load, new_model
from trainkit_trlx.models.modeling_ilql import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    ILQLHeads,
)
from trainkit_trlx.pipeline.offline_pipeline import (
    ILQLRolloutStorage,
    ilql_collate_fn,
    ilql_seq2seq_collate_fn,
    tokenize_dialogue,
)
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.names import tensor_statistics
from trainkit_trlx.trainer.offline import TOKEN_REWARDS, Offline, Samples

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

    columns = (TOKEN_REWARDS,)

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        given: Any = self.live_model
        self._saved: Any = getattr(given, "ilql_heads", None)
        self.live_model: Any = given if self._saved is None else given.base_model

    def get_arch(self, config: Any) -> Any:
        """Return the policy, with the heads of a checkpoint of trlX."""
        policy = super().get_arch(config)
        if self._saved is not None:
            for head in (self._saved.v_head, *self._saved.q_heads, *self._saved.target_q_heads):
                if [type(each) for each in head.children()] != [nn.Linear, nn.ReLU, nn.Linear]:
                    raise ConfigError(
                        f"a head of ilql_heads is {describe(head)}, and trainkit's are Linear, ReLU, Linear; write "
                        "make_head, or derive the trainer from AccelerateRLTrainer, whose loop calls the model"
                    )
            ours = {_ours(name): tensor for name, tensor in self._saved.state_dict().items()}
            load(policy.head, ours, "ilql_heads of the model")
        return policy

    def rows_of(self, batch: Any) -> list[dict[str, Any]]:
        """Return what is trained on as tokenised samples, with the rewards of their tokens."""
        masks = zip(batch.rewards, batch.sequences.response_mask, strict=True)
        rewards = [{TOKEN_REWARDS: given[chosen].tolist()} for given, chosen in masks]
        return [row | each for row, each in zip(super().rows_of(batch.sequences), rewards, strict=True)]

    def make_experience(self, rows: Any, rewards: Any = None, max_length: int | None = None) -> Any:
        """Return samples as experience; those of a store have the rewards of their tokens as they are there.

        Raises:
            DataError: a sample has fewer tokens than rewards, because it was cut.
        """
        made = super().make_experience(rows, rewards, max_length)
        if TOKEN_REWARDS not in rows[0]:
            return made
        counts = made.sequences.response_mask.sum(1).tolist()
        if wrong := [row for row, count in zip(rows, counts, strict=True) if len(row[TOKEN_REWARDS]) != count]:
            raise DataError(
                f"a sample of the store has {len(wrong[0]['input_ids'])} tokens, more than train.seq_length; raise "
                "that, or make the store with a smaller max_length"
            )
        given = [torch.tensor(row[TOKEN_REWARDS], device=made.rewards.device) for row in rows]
        return self._rewarded(made.sequences, given)

    def statistics(self, batch: Any, outputs: Any) -> Any:
        """Return the metrics of a micro-batch with those of trlX."""
        mask, head = batch.sequences.response_mask, outputs.head
        qs = {f"qvalues/{name[1:]}": answer for name, answer in head.items() if name in ("q0", "q1")}
        tensors = {"values": head["values"], **qs, "awac_weight": self.weights(outputs)}
        own = {key: each for name, x in tensors.items() for key, each in tensor_statistics(name, x, mask).items()}
        return {**super().statistics(batch, outputs), **own}

    def loss_of_method(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and the statistics of the user's `loss` of the settings."""
        given = self.as_trlx(batch)
        inputs = ("input_ids", "attention_mask", "decoder_input_ids", "actions_ixs", "states_ixs")
        outputs = self.outer.model(**{name: getattr(given, name) for name in inputs if hasattr(given, name)})
        logits, qs, target_qs, values = outputs[:4]
        return self.outer.config.method.loss((logits, (qs, target_qs, values)), given)  # type: ignore[no-any-return]

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
    heads: ClassVar[Mapping[str, type[Any]]] = {"ilql_heads": ILQLHeads}
    of_method = ("loss",)

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
        if self.trainer.model_config.is_encoder_decoder:
            return self.make_experience_seq2seq(samples, rewards, max_length)
        return self.set_samples(samples, rewards, max_length)

    def make_experience_seq2seq(self, samples: Any, rewards: Any, max_length: int = 2048) -> None:
        """Set the samples to train an encoder-decoder on, as `make_experience` does with other models."""
        self.set_samples(samples, rewards, max_length)

    def new_store(self, samples: list[Any], rewards: Any, max_length: int | None) -> ILQLRolloutStorage:
        """Return the samples, tokenised, with normalised rewards."""
        return make_experience(samples, rewards, self.tokenizer, max_length or self.max_length, verbose=False)
