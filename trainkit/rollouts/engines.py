"""Generation engines: from prompts as token ids to responses as token ids, with the weights that they were given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainkit.config import PluginConfig, SamplingConfig
from trainkit.data import Rollouts, Row
from trainkit.data.batches import Images
from trainkit.errors import EngineError, TrainkitError, describe
from trainkit.plugins import get_engine
from trainkit.plugins.guard import error_text
from trainkit.plugins.hooks import entry_name
from trainkit.rollouts.sampler import Generated, Purpose, TokenSampler, assemble, decode, make_sampler

Ability = Literal["encoder_decoder", "images", "logit_mask", "steer"]
"""What not every engine can do: run an encoder-decoder, read images and sample no token that stands for one, obey any
logit mask, or let the algorithm change the logits."""


@dataclass(frozen=True)
class ServedModel:
    """The model that an engine generates with, as it is when the engine is made."""

    model: Any
    """The language model, from `transformers`, possibly with an adapter of peft; without heads of the algorithm. It is
    the model that is trained: an engine that does not share it makes a copy."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer of the run."""
    eos: list[int]
    """The token ids that end a response."""
    limit: int | None = None
    """The largest number of tokens of prompt and response together; None: no limit."""
    mixed_precision: str = "no"
    """The precision of forward passes, as `train.mixed_precision`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `make_sampler`: the logit mask, and whether hidden states are needed."""
    processes: int = 1
    """The number of processes of the run."""
    address: Any = None
    """If processes share an engine (`Engine.shared`), its `Engine.address`, in those that join it; else None."""
    divided: bool = False
    """Whether `model` is divided among the processes as soon as the engine is made. No process can run it alone then;
    whole tensors are in `Weights`."""

    def sampler(self) -> TokenSampler:
        """Return trainkit's own sampler of the model."""
        return make_sampler(self.model, self.tokenizer, **self.options)

    def fitting(self, weights: Weights) -> dict[str, Tensor]:
        """Return the tensors of ``weights`` by name, after comparing names, shapes and dtypes with the model's.

        Raises:
            EngineError: a trained parameter is missing, or a tensor does not fit; names it.
        """
        tensors, state = dict(weights.tensors()), self.model.state_dict()
        trained = [name for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad]
        if missing := [name for name in trained if name not in tensors]:
            raise EngineError(f"the weights of step {weights.version} lack {missing[0]}, which is trained")
        for name, tensor in tensors.items():
            if name not in state:
                raise EngineError(f"the weights of step {weights.version} have {name}, which the model has not")
            if (tensor.shape, tensor.dtype) != (state[name].shape, state[name].dtype):
                raise EngineError(
                    f"{name} of step {weights.version} is {tuple(tensor.shape)}, {tensor.dtype}; that of the model is "
                    f"{tuple(state[name].shape)}, {state[name].dtype}"
                )
        return tensors


@dataclass(frozen=True)
class Weights:
    """The weights of the trained model at one time."""

    version: int
    """The number of optimizer steps after which they are taken."""
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    """Returns what training may change, parameters and buffers, by the names of the model's ``state_dict``."""
    changes: int = 0
    """A number that increases when a tensor is changed in place, also without a step of the trainer."""


@dataclass(frozen=True)
class Request:
    """A call of an engine: one response to each of ``queries``."""

    queries: list[list[int]]
    """Prompts as token ids."""
    seeds: Sequence[int]
    """The seed of each response, below 2⁶³: all of its random numbers follow from it."""
    settings: SamplingConfig
    """How to sample."""
    purpose: Purpose
    """What the responses are for."""
    images: Images | None = None
    """The images of the prompts; None: they have none."""


class Engine(ABC):
    """The interface of a generation engine. Derive from it, and register the class with `register_engine`.

    An engine is made when a run first samples. Its methods are called from one thread at a time.

    Args:
        config: its settings, of the class that it is registered with; None if it has no settings.
        served: the model.
    """

    abilities: ClassVar[frozenset[Ability]] = frozenset()
    """What it can do besides sampling from causal language models. What a run needs and it cannot do is refused."""
    own_copy: ClassVar[bool] = True
    """Whether it generates with a copy of the weights, and so may generate while the model is trained."""
    exact: ClassVar[bool] = False
    """Whether its ids, log-probabilities, entropies and hidden states are the bits of the engine ``local``."""
    shared: ClassVar[Literal["machine", "run"] | None] = None
    """Which processes share one engine, that of the first of them: those of a machine, or all of a run. None: each
    process has its own. The others make objects of the class with `ServedModel.address` and perhaps without weights;
    their `load` gets no tensors and returns when the engine generates with the weights, or before."""

    def __init__(self, config: PluginConfig | None, served: ServedModel) -> None:
        self.config, self.served = config, served

    @classmethod  # noqa: B027  (most have nothing to check)
    def check(cls, config: PluginConfig | None, processes: int) -> None:
        """Check what can be known when a trainer is made, before a model is loaded: packages, numbers of processes.

        Args:
            config: the settings, as for the constructor.
            processes: the number of processes of the run.

        Raises:
            ConfigError: the engine cannot be used; says what to do.
        """

    @classmethod
    def of(cls, config: PluginConfig | None) -> type[Engine]:  # noqa: ARG003  (most have one class)
        """Return the class for these settings: this one, unless a setting changes what the engine can do."""
        return cls

    address: Any = None
    """What a process needs to know to share this engine; it can be pickled."""

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that it started on this machine and that generate. The kit kills them in turn."""
        return []

    def __str__(self) -> str:
        """Return its name and where it runs, for error messages."""
        return type(self).__name__

    @abstractmethod
    def load(self, weights: Weights) -> None:
        """Generate with ``weights`` from now on. All requests have been answered when it is called, on all processes.

        An engine that loses its weights, because it is restarted, loads the last ones again before it answers.
        """

    @abstractmethod
    def submit(self, request: Request) -> Future[Generated]:
        """Begin to generate, or to wait for the first call of `result`, and return the future result.

        Several requests may be under way.
        """

    def rest(self) -> bool:
        """Release the memory of a device that is needed to generate, because the run trains now, before any request.

        Returns:
            Whether it did so, and needs its weights again (`load`) before the next request.
        """
        return False

    def close(self) -> None:  # noqa: B027  (an engine need not hold anything)
        """Release processes, connections and memory. Called once, at the end; no request follows."""


def engine_class(entry: str | PluginConfig) -> type[Engine]:
    """Return the class of an engine; ``entry`` is what `rollout.engine` says: its name, or its settings."""
    cls: type[Engine] = get_engine(entry_name(entry)).made
    return cls.of(None if isinstance(entry, str) else entry)


def start(entry: str | PluginConfig, served: ServedModel) -> Engine:
    """Make an engine; ``entry`` as for `engine_class`.

    Raises:
        EngineError: it cannot be started; the original error is the cause.
    """
    cls = engine_class(entry)
    try:
        return cls(None if isinstance(entry, str) else entry, served)
    except TrainkitError:
        raise
    except Exception as error:
        if not cls.own_copy:
            raise
        raise EngineError(f"the engine {entry_name(entry)!r} could not be started: {error_text(error)}") from error


class EngineSampler:
    """The sampler of a run that generates with an engine: makes requests, checks the answers, returns rollouts.

    Args:
        engine: the engine.
        vocabulary: the number of token ids, from 0 on, that may be sampled.
        device: where the rollouts' tensors are.
        skip_special_tokens: omit special tokens from the text.
    """

    def __init__(
        self, engine: Engine, *, vocabulary: int, device: torch.device, skip_special_tokens: bool = True
    ) -> None:
        self.engine, self.vocabulary, self.device = engine, vocabulary, device
        self.skip_special_tokens = skip_special_tokens
        self.weights: Weights | None = None
        """The weights that the engine generates with; None: it has none, or rests."""
        self._begun: dict[tuple[int, ...], Future[Generated]] = {}

    def generates_with(self, weights: Weights) -> bool:
        """Return whether the engine has loaded ``weights``."""
        loaded = self.weights
        return loaded is not None and (loaded.version, loaded.changes) == (weights.version, weights.changes)

    def use(self, weights: Weights) -> None:
        """Generate with ``weights`` from now on.

        Raises:
            EngineError: the engine cannot load them.
        """
        for begun in self._begun.values():  # they are answered with the weights that they were made for
            begun.exception()
        self._begun.clear()
        with _named(self.engine, "could not load the weights"):
            self.engine.load(weights)
        self.weights = weights

    def rest(self) -> None:
        """Let the engine release memory until it gets weights again."""
        if self.engine.rest():
            self.weights = None

    def begin(self, request: Request) -> None:
        """Begin to generate for a call that follows, so that the engine has several requests at a time."""
        with _named(self.engine, f"could not answer {len(request.queries)} requests"):
            self._begun[tuple(request.seeds)] = self.engine.submit(request)

    def __call__(
        self,
        rows: list[Row],
        queries: list[list[int]],
        settings: SamplingConfig,
        seeds: Sequence[int],
        purpose: Purpose,
        images: Images | None = None,
    ) -> Rollouts:
        """Return a response to each of ``queries``, as `Sampler` describes.

        Raises:
            EngineError: the engine failed, or its answer is not what was asked for; names the engine.
        """
        assert self.weights is not None, "the trainer gives weights before it samples"
        request = Request(queries, seeds, settings, purpose, images)
        with _named(self.engine, f"could not answer {len(queries)} requests"):
            answer = (self._begun.pop(tuple(seeds), None) or self.engine.submit(request)).result()
        if fault := self.fault(request, answer):
            raise EngineError(f"the engine {self.engine} {fault}")
        return assemble(
            self.engine.served.tokenizer,
            rows,
            queries,
            answer.ids,
            terminated=torch.tensor([reason == "stop" for reason in answer.reasons], device=self.device),
            logprobs=answer.logprobs,
            entropy=answer.entropy,
            hidden=answer.hidden,
            versions=torch.full((len(queries),), self.weights.version, device=self.device),
            stops=settings.stop_sequences,
            skip_special_tokens=self.skip_special_tokens,
            images=images,
        )

    def fault(self, request: Request, answer: Any) -> str:
        """Return what is wrong with an engine's answer; empty if nothing is."""
        if not isinstance(answer, Generated):
            return f"returned {describe(answer)}; the future result of submit should be a Generated"
        count, room = len(request.queries), request.settings.max_new_tokens
        for name in ("ids", "reasons", "versions"):
            if len(column := getattr(answer, name)) != count:
                return f"returned {len(column)} {name} for {count} requests"
        assert self.weights is not None
        for index, (ids, reason, version) in enumerate(zip(answer.ids, answer.reasons, answer.versions, strict=True)):
            which = f"response {index}"
            if version != self.weights.version:
                return f"sampled {which} with the weights of step {version}; those of {self.weights.version} are loaded"
            if reason not in ("stop", "length"):
                return f"ended {which} for the reason {describe(reason)}; a whole response ends by 'stop' or 'length'"
            if not 1 <= len(ids) <= room:
                return f"returned {len(ids)} tokens as {which}; max_new_tokens is {room}"
            if reason == "length" and len(ids) < room:
                return f"ended {which} for its length after {len(ids)} tokens; max_new_tokens is {room}"
            if not all(0 <= token < self.vocabulary for token in ids):
                return f"returned ids outside the vocabulary of {self.vocabulary} in {which}"
        return self._stop_fault(request, answer) or _numbers_fault(answer)

    def _stop_fault(self, request: Request, answer: Generated) -> str:
        """Return which response does not end by EOS or at a stop string as its reason says; empty if none is wrong."""
        served, stops = self.engine.served, request.settings.stop_sequences
        ends = {*served.eos, *request.settings.stop_token_ids}

        def stopped(responses: list[list[int]]) -> list[bool]:
            ended = [not ends.isdisjoint(ids) for ids in responses]
            if not stops:
                return ended
            texts = decode(served.tokenizer, responses, self.skip_special_tokens)
            return [end or any(stop in text for stop in stops) for end, text in zip(ended, texts, strict=True)]

        masked = served.options.get("logit_mask") is not None  # it may leave EOS alone
        least = 0 if masked else request.settings.min_new_tokens
        whole, before = stopped(answer.ids), stopped([ids[:-1] for ids in answer.ids])
        for index, (reason, now, earlier) in enumerate(zip(answer.reasons, whole, before, strict=True)):
            if earlier:
                return f"went on after the EOS, stop token or stop string of response {index}"
            if not ends.isdisjoint(answer.ids[index][:least]):
                return f"ended response {index} by token {len(answer.ids[index])}; min_new_tokens is {least}"
            if now != (reason == "stop"):
                by = "by EOS, a stop token or a stop string"
                ending = f"ends {by}" if now else f"does not end {by}"
                return f"gave the reason {reason!r} for response {index}, which {ending}"
        return ""


def _numbers_fault(answer: Generated) -> str:
    """Return what is wrong with the numbers about the tokens; empty if nothing is."""
    count = sum(map(len, answer.ids))
    for name in ("logprobs", "entropy", "hidden"):
        numbers = getattr(answer, name)
        if numbers is None:
            continue
        dimensions = 2 if name == "hidden" else 1
        if not isinstance(numbers, Tensor) or numbers.dim() != dimensions or numbers.size(0) != count:
            shape = f"of shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else describe(numbers)
            return f"returned {name} {shape} for {count} tokens"
        if not bool(numbers.isfinite().all()):
            return f"returned {name} that are not finite"
    return ""


@contextmanager
def _named(engine: Engine, what: str) -> Iterator[None]:
    """Raise an error of the engine as an `EngineError` that names it, with the original as its cause.

    If it generates with the trained model itself, its errors are those of the model, and unchanged.
    """
    try:
        yield
    except TrainkitError:
        raise
    except Exception as error:
        if not engine.own_copy:
            raise
        raise EngineError(f"the engine {engine} {what}: {error_text(error)}") from error
