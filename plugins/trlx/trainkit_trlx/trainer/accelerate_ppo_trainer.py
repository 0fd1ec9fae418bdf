"""PPO with the interface of trlX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from trainkit import Sequences, get_trainer
from trainkit import functional as F
from trainkit.errors import ConfigError, DataError, describe
from trainkit.metrics import Mean
from trainkit.models import ValueHead
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.ppo_types import PPORLBatch, PPORLElement
from trainkit_trlx.models.modeling_base import checkpoint, new_model, under
from trainkit_trlx.models.modeling_ppo import (
    AdaptiveKLController,
    AutoModelForCausalLMWithHydraValueHead,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithHydraValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    FixedKLController,
    relative_error,
)
from trainkit_trlx.overrides import replaced
from trainkit_trlx.pipeline.offline_pipeline import batches_of
from trainkit_trlx.pipeline.ppo_pipeline import PPORolloutStorage, ppo_collate_fn
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.bridge import Bridge
from trainkit_trlx.trainer.computed import Computed
from trainkit_trlx.trainer.names import OWN, tensor_statistics
from trainkit_trlx.utils.modeling import RunningMoments

if TYPE_CHECKING:
    from torch import Tensor

Trainer: Any = get_trainer("ppo")
Experience: Any = import_module(Trainer.__module__).PPOBatch
NAMES = {"logprobs": "old_logprobs", "values": "old_values", "rewards": "rewards"}
"""Fields of a rollout of trlX with those of trainkit, per token of the response."""

EARLIER = 2**20
"""The epoch of the prompts that `make_experience` takes before training."""


@dataclass(frozen=True)
class Rewarded(Experience):  # type: ignore[misc]
    """Experience with the rewards per token, the KL penalty included [B, T]."""

    rewards: Tensor


@dataclass
class Whole(PPORLElement):
    """A rollout without padding: tokens that are the padding token too are part of it."""


class PPO(Bridge, Trainer):  # type: ignore[misc]
    """trainkit's PPO for trlX's."""

    def __init__(self, config: Any, *, outer: Any, **kwargs: Any) -> None:
        method = outer.config.method
        self._value_layers = int(getattr(method, "num_value_layers_unfrozen", 0))
        super().__init__(config, outer=outer, **kwargs)
        if self.method.scale_reward == "ref" and getattr(method, "ref_std", None) is not None:
            self.ref_std = float(method.ref_std)
        self.running, self.kl_penalised = RunningMoments(), torch.empty(0)

    def critic(self, model: Any) -> int | None:
        """Return how many layers of its own the critic has."""
        return self._value_layers or None

    def get_arch(self, config: Any) -> Any:
        """Return the policy, with the critic's layers of a checkpoint of trlX."""
        saved = getattr(self.live_model, "critic", None)
        if saved is not None:
            self._value_layers = saved.layers
        policy = super().get_arch(config)
        if saved is not None:
            policy.critic.load_state_dict(saved.state_dict())
        return policy

    def stored(self, rows: list[Any]) -> Any:
        """Return the experience that the trainer's `make_experience` puts into its store, which is then emptied."""
        outer = self.outer
        outer.make_experience(len(rows), self.progress.step)
        if not len(outer.store):
            raise DataError(f"{type(outer).__name__}.make_experience put nothing into the store; call push_to_store")
        if outer.rollout_logging_dir is not None and self.parallel.is_main:
            outer.store.export_history(location=str(outer.rollout_logging_dir))
        made = self.from_trlx(self.stored_elements(outer.store))
        outer.store.clear_history()
        return made

    def stored_elements(self, store: Any) -> Iterable[PPORLElement]:
        """Return the rollouts of a store; with a `create_loader` of the user's own, those of its batches."""
        if not replaced(store, ("create_loader",)):
            return store  # type: ignore[no-any-return]
        batches = batches_of(store, self.outer.config.train.batch_size, self.outer.fields)
        return [each for batch in batches for each in _rows(batch, self.tokenizer.pad_token_id, len(self.start))]

    def rewards(self, experience: Any, scores: Tensor) -> Tensor:
        """Return the rewards per token of a collection [B, T], and keep them."""
        self.kl_penalised = super().rewards(experience, scores)
        return self.kl_penalised

    def prepare_experience(self, experience: Any) -> Any:
        """Return the experience with its rewards, and record the moments of all scores so far."""
        if isinstance(experience, Rewarded):  # of the store
            return experience
        self.running.update(experience.scores.sum(1), self.reduce)
        moments = {"rollout_scores/running_mean": self.running.mean, "rollout_scores/running_std": self.running.std}
        self.record({name: Mean.of(value) for name, value in moments.items() if value.isfinite()})
        made = super().prepare_experience(experience)
        return Rewarded(**{each.name: getattr(made, each.name) for each in fields(made)}, rewards=self.kl_penalised)

    def statistics(self, batch: Any, outputs: Any) -> Any:
        """Return the metrics of a micro-batch with those of trlX."""
        mask = batch.sequences.response_mask
        counts = mask.sum(1)
        tensors = {"values": outputs.values, "old_values": batch.old_values, "returns": batch.returns}
        return {
            **super().statistics(batch, outputs),
            **{key: each for name, x in tensors.items() for key, each in tensor_statistics(name, x, mask).items()},
            f"{OWN}values/values_mape_error": Mean.of(relative_error(outputs.values, batch.returns), mask),
            f"{OWN}padding_percentage": Mean.of(1 - counts.double().mean() / counts.max().clamp(min=1)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what trainkit's PPO saves, and the moments of all scores."""
        return {**super().state_dict(), "running": self.running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state)
        self.running.load_state_dict(state["running"])

    @property
    def start(self) -> Tensor:
        """The token before each response in trlX: that with which the decoder of an encoder-decoder starts [0 or 1]."""
        config = self.model_config
        return torch.tensor([config.decoder_start_token_id] if config.is_encoder_decoder else [], dtype=torch.long)

    def elements(self, experience: Any) -> list[PPORLElement]:
        """Return rollouts as trlX stores them, without padding, on the CPU."""
        sequences = experience.sequences
        columns = zip(sequences.queries, sequences.responses, sequences.response_mask, strict=True)
        return [
            Whole(
                query.cpu(),
                torch.cat([self.start, response.cpu()]),
                **{name: getattr(experience, ours)[row][mask].cpu() for name, ours in NAMES.items()},
            )
            for row, (query, response, mask) in enumerate(columns)
        ]

    def of_method(self, batch: Any) -> Any:
        """Return experience with the advantages and returns of the settings, if the user has replaced these."""
        if "get_advantages_and_returns" not in self.outer.own_of_method:
            return batch
        mask = batch.sequences.response_mask
        values, rewards = by_response(batch.old_values, mask), by_response(batch.rewards, mask)
        found = self.outer.config.method.get_advantages_and_returns(values, rewards, rewards.shape[1])
        advantages, returns = (from_responses(each.detach(), mask) for each in found)
        return replace(batch, advantages=advantages, returns=returns)

    def loss_of_method(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and the statistics of the user's `loss` of the settings; tensors are [B, R]."""
        mask = batch.sequences.response_mask
        new = self.policy(batch.sequences)
        tensors = {"logprobs": new.logprobs, "values": new.values, "old_logprobs": batch.old_logprobs}
        tensors |= {"old_values": batch.old_values, "advantages": batch.advantages, "returns": batch.returns}
        given = {name: by_response(x, mask) for name, x in tensors.items()}
        return self.outer.config.method.loss(**given, mask=by_response(mask.long(), mask))  # type: ignore[no-any-return]

    def as_trlx(self, batch: Any) -> PPORLBatch:
        """Return rollouts as a batch, with prompts padded on the left."""
        elements = self.elements(batch)
        found = ppo_collate_fn("left", self.tokenizer.pad_token_id, elements)
        device = batch.sequences.input_ids.device
        made = PPORLBatch(**{name: value.to(device) for name, value in vars(found).items()})
        made.sizes = [(len(each.query_tensor), len(each.rewards)) for each in elements]  # type: ignore[attr-defined]
        return made

    def from_trlx(self, batch: PPORLBatch | Iterable[PPORLElement]) -> Any:
        """Return rollouts of trlX, a batch or a list, as experience: GAE, and whitening over all of them.

        Raises:
            DataError: a rollout has different numbers of log-probabilities, values and rewards.
        """
        pad, first = self.tokenizer.pad_token_id, len(self.start)
        rows = [
            replace(each, response_tensor=each.response_tensor[first:])
            for each in (_rows(batch, pad, first) if isinstance(batch, PPORLBatch) else batch)
        ]
        elements = [_trimmed(each, pad, index) for index, each in enumerate(rows)]
        queries = [each.query_tensor.tolist() for each in elements]
        sequences = Sequences.from_lists(queries, [each.response_tensor.tolist() for each in elements])
        mask = sequences.response_mask
        given = {}
        for name in NAMES:
            numbers = torch.cat([getattr(each, name).float().cpu() for each in elements])
            given[name] = torch.zeros(mask.shape).masked_scatter(mask, numbers)
        values, method = given["values"], self.method
        advantages, returns = F.gae(values, given["rewards"], mask, gamma=method.gamma, lam=method.lam)
        made = Rewarded(
            sequences,
            given["logprobs"],
            values,
            F.whiten(advantages, mask, reduce=self.reduce),
            returns,
            given["rewards"],
        )
        return made.to(self.accelerator.device)


def by_response(x: Tensor, mask: Tensor) -> Tensor:
    """Return the numbers of tokens in a mask from the first column on, followed by zeros. [B, T], [B, T] -> [B, R]."""
    return pad_sequence([row[keep] for row, keep in zip(x, mask, strict=True)], batch_first=True)


def from_responses(x: Tensor, mask: Tensor) -> Tensor:
    """Return the numbers of `by_response` at their tokens. [B, R], [B, T] -> [B, T]."""
    counts = mask.sum(1, keepdim=True)
    given = torch.arange(x.shape[1], device=x.device) < counts
    return torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_scatter(mask, x[given])


def _rows(batch: PPORLBatch, pad: int, first: int) -> list[PPORLElement]:
    """Return the rollouts of a batch. What follows the last token or number that is not padding is padding.

    ``first`` is the number of tokens before the first one that was sampled.
    """
    found: list[PPORLElement] = []
    known = getattr(batch, "sizes", None)
    for row, (query, response) in enumerate(zip(batch.query_tensors, batch.response_tensors, strict=True)):
        numbers = {name: getattr(batch, name)[row] for name in NAMES}
        if known is not None and len(known) == len(batch.query_tensors):
            asked, size = known[row]
            cut = {name: each[:size] for name, each in numbers.items()}
            found.append(Whole(query[-asked:], response[: size + first], **cut))
            continue
        wide = sum(each.abs() for each in numbers.values())
        size = max(
            [0, *(int(at) + 1 for at in wide.nonzero()), *(int(at) + 1 for at in (response[first:] != pad).nonzero())]
        )
        found.append(PPORLElement(query, response, **{name: each[:size] for name, each in numbers.items()}))
    return found


def _trimmed(element: PPORLElement, pad: int, index: int) -> PPORLElement:
    """Return a rollout without the padding that trlX leaves before its prompt and after its response.

    Raises:
        DataError: it has different numbers of log-probabilities, values and rewards, or more than tokens.
    """
    sizes = {name: len(getattr(element, name)) for name in NAMES}
    size, tokens = sizes["rewards"], len(element.response_tensor)
    if len({*sizes.values()}) > 1 or not 0 < size <= tokens:
        said = ", ".join(f"{count} {name}" for name, count in sizes.items())
        raise DataError(f"rollout {index} has {said} and {tokens} tokens; give one of each for every token")
    query = element.query_tensor
    if isinstance(element, Whole):  # what looks like padding is part of it
        return element
    first = next(iter((query != pad).nonzero().flatten().tolist()), len(query) - 1)
    return replace(element, query_tensor=query[first:], response_tensor=element.response_tensor[:size])


class KL(AdaptiveKLController, FixedKLController):
    """The controller of the KL penalty; ``value`` is β, and may be set."""

    def __init__(self, controller: Any) -> None:
        self._controller, self.target, self.horizon = controller, controller.target, controller.horizon

    @property
    def value(self) -> float:
        """β."""
        return float(self._controller.coef)

    @value.setter
    def value(self, value: float) -> None:
        self._controller.coef = value

    def update(self, current: float, n_steps: int) -> None:
        """Adapt β to a KL, if there is a target."""
        self._controller.update(current, n_steps)


@register_trainer
class AcceleratePPOTrainer(Computed):
    """Trainer of PPO. ``store`` gets the rollouts of `make_experience`, if that is called or overridden."""

    trainer_class, algorithm = PPO, "ppo"
    fields = tuple(each.name for each in fields(PPORLBatch))
    heads: ClassVar[Mapping[str, type[Any]]] = {"v_head": ValueHead}
    of_method = ("loss", "get_advantages_and_returns")

    def __init__(self, config: TRLConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._drawn = 0
        self.store = PPORolloutStorage(self.tokenizer.pad_token_id, self.tokenizer.padding_side)

    def take_store(self) -> None:
        """Let collections be those of the store, if the user fills it or has a store of their own.

        Raises:
            ConfigError: it is no store.
        """
        if not hasattr(self.store, "clear_history"):
            raise ConfigError(f"store should be a PPORolloutStorage or derive from it; given {describe(self.store)}")
        own = replaced(self, ("make_experience", "push_to_store")) or replaced(self.store)
        if own or type(self.store) is not PPORolloutStorage or len(self.store):
            trainer = self.trainer
            trainer.make_experience, trainer.from_store = trainer.stored, True  # for a whole collection, as trlX does
            rows = max(trainer.config.rollout.num_rollouts // trainer.parallel.world, 1)
            trainer.config = trainer.config.evolve(rollout={"batch_size": rows})

    @staticmethod
    def from_checkpoint(path: str, seq2seq: bool) -> Any:
        """Return the model that trlX has saved in a directory, with its value head and its frozen branch."""
        made: Any = AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead
        if under("frozen_head.", checkpoint(path)):
            made = AutoModelForSeq2SeqLMWithHydraValueHead if seq2seq else AutoModelForCausalLMWithHydraValueHead
        return made.from_pretrained(path, is_trainable=True)

    def get_arch(self, config: TRLConfig) -> Any:
        """Return a new language model with a value head, whose weights trainkit trains if this is overridden."""
        return new_model(
            (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead),
            config.model,
            num_value_layers_unfrozen=getattr(config.method, "num_value_layers_unfrozen", 0),
        )

    def wrapped_model(self, policy: Any) -> Any:
        """Return the language model with the value head, which are trained, and the reference as frozen branch."""
        seq2seq = policy.model.config.is_encoder_decoder
        cls: Any = AutoModelForSeq2SeqLMWithHydraValueHead if seq2seq else AutoModelForCausalLMWithHydraValueHead
        unfrozen = self.config.model.num_layers_unfrozen
        made = cls(policy.model, num_layers_unfrozen=unfrozen, frozen=self.ref_model)
        made.v_head = policy.value_head
        if policy.critic is not None:
            made.critic = policy.critic
        return made

    @property
    def ref_model(self) -> Any:
        """The language model that the policy is compared with; None if it is the model without its adapter."""
        self.trainer.models.build()
        reference = self.trainer.models.reference.policy
        return None if reference is self.trainer.models.unwrapped else reference.model

    def push_to_store(self, data: Any) -> None:
        """Add rollouts, `PPORLElement`, to the store; the next collection has them too.

        Raises:
            DataError: they are something else.
        """
        rows = list(data) if isinstance(data, Iterable) else [data]
        if wrong := [each for each in rows if not isinstance(each, PPORLElement)]:
            raise DataError(f"push_to_store() takes a list of PPORLElement; given {describe(wrong[0])} in it")
        super().push_to_store(rows)

    @property
    def kl_ctl(self) -> KL:
        """The controller of the KL penalty."""
        return KL(self.trainer.kl)

    @property
    def running_moments(self) -> RunningMoments:
        """The moments of all scores so far."""
        found: RunningMoments = self.trainer.running
        return found

    def generation(self, given: Any) -> dict[str, Any]:
        """Return arguments of `generate` as trlX keeps them."""
        return {"do_sample": True, "use_cache": True, **super().generation(given)}

    def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
        """Sample responses to the next prompts, score them, and put the rollouts into ``store``.

        `learn` calls it if it or `push_to_store` is overridden, or if ``store`` is not empty; otherwise it samples
        without the store.

        Args:
            num_rollouts: how many, in this process.
            iter_count: the number of steps; without effect.
        """
        self.refresh()
        trainer = self.trainer
        if trainer.pipeline is None:
            raise ConfigError("make_experience() needs prompts; call add_prompt_pipeline before")
        trainer.models.build()
        size, world, rank = self.config.method.chunk_size, trainer.parallel.world, trainer.parallel.rank  # type: ignore[attr-defined]
        first = trainer.progress.cursor
        if not trainer.run.learning:  # prompts of a later epoch, so that no response is that of a collection
            first, self._drawn = EARLIER * len(trainer.pipeline) + self._drawn, self._drawn + num_rollouts * world
        rows = trainer.pipeline.take(first, num_rollouts * world, rank=rank, world=world)
        with trainer.inference():
            parts = []
            for start in range(0, len(rows), size):
                rollouts, scores = trainer.sample_and_score(rows[start : start + size])
                parts.append(trainer.experience(rollouts, scores))
            made = trainer.prepare_experience(type(parts[0]).cat(parts))
        self.push_to_store(trainer.elements(made))
