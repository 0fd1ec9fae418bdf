"""What a run needs on one process that holds the whole model: each part, measured on passes without data."""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from trainkit.config import TRLConfig
from trainkit.data import Batch, Sequences
from trainkit.data.batches import COPIED
from trainkit.errors import ConfigError, TrainkitError
from trainkit.models.backend import attention_as_on
from trainkit.models.loading import length_limit, load_tokenizer
from trainkit.models.policy import CausalPolicy, Policy
from trainkit.models.reward import Scorer
from trainkit.plugins import get_trainer
from trainkit.rollouts.decoding import _cache
from trainkit.rollouts.packing import bytes_of_packs
from trainkit.testing import character_tokenizer
from trainkit.testing.declarations import declaration_of
from trainkit.testing.trainers import LETTERS, tiny_trainer
from trainkit.trainer import offloading, optim, sharing
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.master_weights import MasterWeights
from trainkit.trainer.sharding import blocks_of
from trainkit.trainer.update import MICROBATCH_TOKENS, OTHER_TOKENS
from trainkit_tools.estimates.depth import Shallow, shallow
from trainkit_tools.estimates.tracing import Counter, Shapes, held, tensors_of, without_data

UNLIMITED = 1024
"""The length of sequences if neither the model nor the configuration limits it."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence; every row is as long."""

    tokens: int
    """All tokens."""
    chosen: int
    """Those that are trained on."""


@dataclass
class Need:
    """Bytes, of one process that holds the whole model."""

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    """Weights of the reference and of further frozen models that are not shared with the trained model."""
    block: int
    """Weights of the largest block."""
    verify: bool | None
    """Whether exports are loaded again, beside the model; None: if the weights are few."""
    root: int
    """Weights that are in no block: embeddings, head, and what follows the blocks."""
    reference_root: int
    leaves: bool
    """Whether the reference is moved to the CPU after its only pass, where the model is not divided and it is large."""
    step: int
    """The most that the optimizer's step needs besides."""
    lengths: Lengths
    rows: int
    """Rows of a micro-batch."""
    batch: int
    """Rows of a step."""
    first: int
    """The most that a step's first forward and backward pass needs besides weights: it makes the gradients."""
    update: int
    """The most that a later one needs besides weights and gradients. On CPUs `first` is this and the gradients:
    glibc seldom gives activations the memory that the gradients of the step before have left in pieces."""
    experience: int
    """The same of passes without gradient: old policy, reference."""
    prefill: int
    """The same of the pass over the prompts, as `local` samples, with the cache of keys and values."""
    decoding: int
    """The same of the passes over single tokens."""
    cache: int
    """Of both, the cache of keys and values."""
    narrow: float = 1.0
    """The part of the bytes of weights in which FSDP2 gathers them."""
    again: Callable[[int], int] = field(repr=False, default=int)
    """Returns `update` for another number of rows."""

    @property
    def sampling(self) -> int:
        """The most that sampling by `local` needs besides weights; 0 if it does not sample."""
        return max(self.prefill, self.decoding)

    def with_rows(self, rows: int) -> Need:
        """Return the need with another number of rows in a micro-batch."""
        return self if rows == self.rows else replace(self, rows=rows, update=self.again(rows))

    def facts(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in ("again", "lengths")]
        found = {name: getattr(self, name) for name in names} | {"sampling": self.sampling}
        return found | dataclasses.asdict(self.lengths)


def measure(
    config: TRLConfig[Any],
    *,
    prompt: int | None = None,
    tokens: int | None = None,
    chosen: int | None = None,
    rows: int | None = None,
    device: str = "cpu",
) -> Need:
    """Return what a run needs; no weights are loaded, and nothing is read but the model's configuration.

    Args:
        config: the configuration.
        prompt: tokens of a prompt. None: as many as leave room for the response.
        tokens: of an offline algorithm, tokens of a row before truncation. None: as many as a row may have.
        chosen: of these, the tokens that are trained on. None: all but one.
        rows: rows of a micro-batch. None: those of the configuration.
        device: the kind of device, on which the precision of attention depends, packed weights, and the size of a
            micro-batch where the configuration does not limit it.

    Raises:
        ConfigError: the model cannot be found, or a pass of the algorithm cannot be made without data.
    """
    tokenizer = _tokenizer(config)
    trainer = _trainer(config, tokenizer)
    lengths = _lengths(trainer, prompt, tokens, chosen)
    example = _example(config)
    fewer = shallow(config)
    if fewer is not None:
        less, more = (_trainer(each, tokenizer) for each in (fewer.less, fewer.more))
        if not less.models.frozen:  # they would be run twice, with all their blocks
            return _deep(fewer, *(_measured(each, lengths, example, rows, device) for each in (less, more)))
    return _measured(trainer, lengths, example, rows, device)


def _deep(fewer: Shallow, less: Need, more: Need) -> Need:
    """Return the need of the whole model."""
    names = [each.name for each in dataclasses.fields(Need) if type(getattr(less, each.name)) is int]
    found: dict[str, Any] = {name: fewer.whole(getattr(less, name), getattr(more, name)) for name in names}
    return replace(less, **found, again=lambda count: fewer.whole(less.again(count), more.again(count)))


def _measured(trainer: Any, lengths: Lengths, example: Batch, rows: int | None, device: str) -> Need:
    """Return the need of the model of a trainer, from passes through it."""
    shapes, counter = Shapes(), Counter()
    with attention_as_on(device), without_data(lengths.chosen, shapes, counter):
        found = _passes(trainer, counter, lengths, example, rows, device)

    def again(count: int) -> int:
        with attention_as_on(device), without_data(lengths.chosen, shapes, counter):
            return _update(trainer, counter, example, count, lengths)

    return replace(found, again=again)


def _passes(trainer: Any, counter: Counter, lengths: Lengths, example: Batch, given: int | None, device: str) -> Need:
    policy = trainer.models.load_policy()
    rows = given or _rows(trainer, lengths, max(len(_sequences(example)), 1), device)
    own = held(tensors_of(policy))
    reference = trainer._make_reference(policy) if trainer.needs_reference else None
    compared: list[nn.Module] = [each.policy for each in ([] if reference is None else [reference])]
    compared += [each.load().policy for each in trainer.models.frozen]
    trainer.models.use(policy, None, reference)
    for each in (policy, *compared):
        if isinstance(each, Policy | Scorer):
            each.one_pass = True  # rows are of one length
    others = {key: size for each in compared for key, size in held(tensors_of(each), own).items()}
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = optim.make_optimizer(trainer.config.optimizer, policy)
    blocks = [sum(held(tensors_of(block)).values()) for block in blocks_of(policy)]

    gradients = sum(each.numel() * (each.grad_dtype or each.dtype).itemsize for each in trained)
    try:
        first = _update(trainer, counter, example, rows if device != "cpu" else 1, lengths)
        needed = _update(trainer, counter, example, rows, lengths)
        step = counter.most(optimizer.step)
        state = sum(held(_tensors_in(optimizer)).values())
        experience = _without_gradient(trainer, counter, lengths, example, rows)
        samples = trainer.online and not trainer.sampling.samples_apart
        prefill, decoding, cache = _sampling(trainer, counter, lengths, device) if samples else (0, 0, 0)
    except TrainkitError:
        raise
    except Exception as error:  # of operators that need data, which depend on the model and the algorithm
        raise ConfigError(
            f"a pass of {trainer.config.method.name!r} through {type(policy).__name__} cannot be made without data "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}), so its memory cannot be estimated; train "
            "a few steps with train.microbatch_size 'auto'"
        ) from error
    return Need(
        parameters=sum(parameter.numel() for parameter in policy.parameters()),
        trained=sum(each.numel() for each in trained),
        weights=sum(own.values()),
        gradients=gradients,
        optimizer=state,
        reference=sum(others.values()),
        block=max(blocks, default=0),
        verify=trainer.config.train.verify_export,
        root=sum(own.values()) - sum(blocks),
        reference_root=_root(compared, others),
        leaves=not trainer.online and offloading.can_offload(trainer, reference, trainer.sharding, device),
        step=max(step - state, 0),
        lengths=lengths,
        rows=rows,
        batch=trainer.config.train.batch_size,
        first=first if device != "cpu" else needed + gradients,
        update=needed,
        experience=experience,
        prefill=prefill,
        decoding=decoding,
        cache=cache,
        narrow=_narrow(trainer.config),
    )


def _narrow(config: TRLConfig[Any]) -> float:
    low = config.train.mixed_precision == "bf16" and config.model.dtype in (None, "float32")
    return 0.5 if low else 1.0


def _tensors_in(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Return the tensors of an optimizer's state."""
    yield from optimizer.masters() if isinstance(optimizer, MasterWeights) else ()
    for each in optimizer.state.values():
        yield from (value for value in each.values() if isinstance(value, Tensor))


def _root(models: list[nn.Module], own: dict[int, int]) -> int:
    """Return the bytes of models that are in no block, of the storages ``own``."""
    inside = {key for model in models for block in blocks_of(model) for key in held(tensors_of(block))}
    return sum(size for key, size in own.items() if key not in inside)


def _tokenizer(config: TRLConfig[Any]) -> Any:
    try:
        return load_tokenizer(config)
    except ConfigError:  # it is not needed: rows have no text
        return character_tokenizer(LETTERS)


def _trainer(config: TRLConfig[Any], tokenizer: Any) -> Any:
    """Return a trainer of the configuration without trackers and plugins, in one process."""
    changed: dict[str, Any] = {"train.trackers": [], "train.sharding": "none", "train.push_to_hub": None, "plugins": []}
    alone = config.update({**changed, "tokenizer.tokenizer_path": None})
    cls = get_trainer(config.method.name)
    if not issubclass(cls, AccelerateRLTrainer):
        raise ConfigError(
            f"{config.method.name!r} trains no language model, and the memory of other models is not estimated; train "
            "a few steps with train.microbatch_size 'auto'"
        )
    with _quiet():
        return cls(alone, tokenizer=tokenizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore what a run would log; nothing is run."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _lengths(trainer: Any, prompt: int | None, tokens: int | None, chosen: int | None) -> Lengths:
    limit = length_limit(trainer.model_config, trainer.config.train.seq_length) or UNLIMITED
    if not trainer.online:
        if prompt is not None:
            raise ConfigError(
                f"{trainer.config.method.name!r} learns from samples, which are as long as train.seq_length allows, or "
                "as the longest of the data that is given; remove the tokens of a prompt"
            )
        whole = limit if tokens is None else min(tokens, limit)
        return Lengths(whole, whole - 1 if chosen is None else min(chosen, whole - 1))
    new = trainer.config.rollout.max_new_tokens
    if prompt is not None and prompt + new > limit:
        raise ConfigError(
            f"prompts of {prompt} tokens and responses of {new} (rollout.max_new_tokens) are longer than the limit of "
            f"{limit}; give at most {limit - new}"
        )
    return Lengths(limit if prompt is None else prompt + new, new)


def _example(config: TRLConfig[Any]) -> Batch:
    """Return experience of the algorithm, of a tiny run: which tensors it has, of which types and dimensions."""
    cls: Any = get_trainer(config.method.name)
    needed = declaration_of(cls).arguments.get("config", {}).get("method", {})
    given = {name: getattr(config.method, name) for name in config.method.model_fields_set - {"name", *needed}}
    changes = {f"method__{name}": value for name, value in given.items() if name != cls.group}
    with tempfile.TemporaryDirectory() as place, _quiet():
        trainer = tiny_trainer(config.method.name, Path(place), **changes)
        trainer.collect()
        batch: Batch = trainer.store.experience
        with torch.no_grad():
            batch = trainer.prepare_step(batch.take(torch.arange(len(batch))))
    return batch


def _sequences(batch: Batch) -> list[Sequences]:
    if isinstance(batch, Sequences):
        return [batch]
    return [found for part in batch.parts().values() if isinstance(part, Batch) for found in _sequences(part)]


def _rows(trainer: Any, lengths: Lengths, per_row: int, device: str) -> int:
    """Return the rows of a micro-batch of this configuration."""
    train = trainer.config.train
    batch: int = train.batch_size
    if isinstance(train.microbatch_size, int):
        return min(train.microbatch_size, batch)
    most = max(MICROBATCH_TOKENS.get(device, OTHER_TOKENS) // (_as_run(trainer, lengths).tokens * per_row), 1)
    return math.ceil(batch / math.ceil(batch / most))  # they are about equally large


def _as_run(trainer: Any, lengths: Lengths, rows: int | None = None) -> Lengths:
    """Return the tokens of each row as a pass runs them: its part of a prompt that rows share, and the copy of that.

    Args:
        trainer: the trainer.
        lengths: the tokens of a row.
        rows: how many rows there are; None: whole groups.
    """
    each = trainer.samples_per_prompt if trainer.online else 2  # the two of a pair
    groups = 1 / each if rows is None or not trainer.online else math.ceil(rows / each) / rows
    prompt = (lengths.tokens - lengths.chosen) * (groups + 1 / COPIED)
    shared = replace(lengths, tokens=lengths.chosen + math.ceil(prompt))
    pays = shared.tokens <= sharing.GAIN * lengths.tokens  # without the cost of a pass, which depends on the depth
    return shared if _can_share(trainer) and (pays or trainer.config.train.share_prompts) else lengths


def _can_share(trainer: Any) -> bool:
    """Return whether prompts can be shared, as far as it is known without the passes of `Policy.why_not_shared`."""
    policy, train = trainer.unwrapped, trainer.config.train
    if train.share_prompts is False or train.gradient_checkpointing is True or not trainer.sharing.has_common_prompts:
        return False
    if not isinstance(policy, CausalPolicy) or policy.has_trunk or policy.critic is not None:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=policy.model.config).layers)


def _batch(example: Batch, rows: int, lengths: Lengths, policy: Any, stored: bool = True) -> Any:
    """Return a batch like ``example`` without data, of other rows and columns.

    ``stored``: with the output of the frozen layers, if there are some, which online algorithms compute once.
    """

    def resized(x: Tensor) -> Tensor:
        columns = (lengths.tokens, *x.shape[2:]) if x.dim() > 1 else ()
        return torch.zeros((rows, *columns), dtype=x.dtype)

    made = example.map(resized)
    trunk = isinstance(policy, Policy) and policy.has_trunk and stored
    return _with_trunk(made, policy) if trunk else made


def _with_trunk(batch: Any, policy: Any) -> Any:
    """Return the batch with the output of the frozen layers, if the algorithm computes it once."""
    if isinstance(batch, Sequences):
        with torch.no_grad():
            return replace(batch, trunk=policy._through_trunk(batch))
    parts = {name: value for name, value in batch.parts().items() if isinstance(value, Sequences)}
    return replace(batch, **{name: _with_trunk(value, policy) for name, value in parts.items()})


def _update(trainer: Any, counter: Counter, example: Batch, rows: int, lengths: Lengths) -> int:
    """Return the most that a forward and backward pass needs, with the gradients that it makes."""
    batch = _batch(example, rows, _as_run(trainer, lengths, rows), trainer.unwrapped, trainer.online)

    def run() -> None:
        trainer.policy.train()
        with trainer.accelerator.autocast():
            loss, _ = trainer.loss(batch)
        loss.backward()

    return counter.most(run)


def _without_gradient(trainer: Any, counter: Counter, lengths: Lengths, example: Batch, rows: int) -> int:
    """Return the most that passes of the old policy and the reference need, as experience is made."""
    policy, reference = trainer.unwrapped.eval(), trainer.models.reference
    if not isinstance(policy, Policy) or not (trainer.online or reference is not None):
        return 0
    count = min(trainer.config.rollout.batch_size, trainer.collection_rows * trainer.samples_per_prompt)
    count = count if trainer.online else rows * len(_sequences(example))
    sequences = _batch(_sequences(example)[0], count, _as_run(trainer, lengths, count), policy)

    def run() -> None:
        with torch.no_grad(), trainer.accelerator.autocast():
            if trainer.online:
                policy(sequences, entropy=True)
            if reference is not None:
                reference(sequences)

    return counter.most(run)


def _sampling(trainer: Any, counter: Counter, lengths: Lengths, device: str) -> tuple[int, int, int]:
    """Return the most that the pass over prompts and those over single tokens need, and the bytes of the cache."""
    model, rollout = trainer.unwrapped.model, trainer.config.rollout
    prompt, vocabulary = lengths.tokens - lengths.chosen, model.config.get_text_config().vocab_size
    rows = min(rollout.batch_size, rollout.num_rollouts)
    cache = 0

    def run() -> None:
        nonlocal cache
        made = _cache(model.config, lengths.tokens)
        ids = torch.zeros(rows, prompt, dtype=torch.long)
        model.eval()
        with torch.no_grad(), trainer.accelerator.autocast():
            state = model.base_model(input_ids=ids, past_key_values=made, use_cache=True).last_hidden_state[:, -1]
        layers: list[Any] = made.layers
        kept = [x for layer in layers for x in getattr(layer, "buffers", None) or (layer.keys, layer.values)]
        cache = sum(held(kept).values())
        del state

    if model.config.is_encoder_decoder:
        raise ConfigError(
            "the cache of an encoder-decoder is not estimated; train a few steps with train.microbatch_size 'auto'"
        )
    prefill = counter.most(run)
    logits = 4 * rows * vocabulary * 4  # logits, probabilities and their log, and a sorted or masked copy: float32
    packs = bytes_of_packs(model, rows, trainer.accelerator.mixed_precision == "bf16") if device == "cpu" else 0
    return prefill, cache + logits + packs, cache
