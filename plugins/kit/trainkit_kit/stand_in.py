"""Models whose outputs follow from the tokens of a response alone, and rollouts that a check has written itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from trainkit.data import Batch, Rollouts, Sequences
from trainkit.models import Policy, Scorer, TokenOutputs
from trainkit.rollouts import assemble
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit_kit.subjects import Bench, Subject

Number = Callable[[str, bool, tuple[int, ...], int | None], float]
"""Computes an output of a model: its name, whether the model is the trained one, the ids of the response before the
token, and the token; None for an output that belongs to the state in which it was chosen."""

OF_STATES = ("values", "entropy", "divergence")
"""Outputs that belong to the state in which a token is chosen. The others belong to the token."""


def varied(name: str, trained: bool, before: tuple[int, ...], token: int | None) -> float:
    """Return a number that differs for every state: in [−2.5, −0.5] for log-probabilities, else in [0, 1].

    Those of two models differ, so that no divergence between them is 0.
    """
    unit = crc32(repr((name, trained, before, token)).encode()) / (1 << 32)
    return -0.5 - 2 * unit if name == "logprobs" else unit


def moved(name: str, trained: bool, before: tuple[int, ...], token: int | None) -> float:
    """Return `varied`, with other log-probabilities of the trained model where its loss is computed."""
    number = varied(name, trained, before, token)
    if name == "logprobs" and trained and torch.is_grad_enabled():
        number += 0.1 * varied("moved", trained, before, token)
    return number


@contextmanager
def standing_in(trainer: Any, number: Number = varied) -> Iterator[None]:
    """Let the outputs of all policies and scorers follow from responses alone, as ``number`` says, within the context.

    Policies are those that return `TokenOutputs`, such as references and teachers; scorers return a number per row [B].
    Outputs at other tokens than those of responses differ with the length of the row: no algorithm may read them.
    """
    trainer.models.build()  # references are made with it
    model = trainer.unwrapped

    def outputs_of(module: Any, positional: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> Any:
        trained = module is model
        scores = isinstance(module, Scorer)
        if not scores and not isinstance(outputs, TokenOutputs):
            return None
        sequences = positional[0] if positional else named["sequences"]
        responses = [tuple(response.tolist()) for response in sequences.responses]
        if scores:
            return _like(outputs, [number("scores", trained, response, None) for response in responses])

        def other(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            numbers = [
                number(name, trained, response[:at], None if name in OF_STATES else response[at])
                for response in responses
                for at in range(len(response))
            ]
            placed = sequences.place(torch.tensor(numbers, dtype=torch.float64, device=x.device))
            return _like(x, torch.where(sequences.response_mask, placed, elsewhere(name, sequences).to(x.device)))

        def elsewhere(name: str, sequences: Sequences) -> Tensor:
            lengths = sequences.attention_mask.sum(1).tolist()
            rest = [number(name, trained, (-length,), None) for length in lengths]
            return torch.tensor(rest, dtype=torch.float64)[:, None]

        head = {name: other(name, x) for name, x in outputs.head.items()}
        parts = {name: other(name, x) for name, x in outputs._asdict().items() if name != "head"}
        return outputs._replace(**parts, head=head)

    handle = register_module_forward_hook(outputs_of, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _like(x: Tensor, values: Any) -> Tensor:
    """Return ``values`` as a leaf of the kind of ``x``."""
    return torch.as_tensor(values, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


# ----------------------------------------------------------------------------------------- rollouts that are given


@dataclass(frozen=True)
class Response:
    """A response to a prompt, as token ids, with its score."""

    query: tuple[int, ...]
    ids: tuple[int, ...]
    """Ids that the policy has chosen, EOS included if the response has ended."""
    score: float | tuple[float, ...]
    """Of the response, or of each of its tokens."""
    ended: bool = True
    observations: tuple[tuple[int, tuple[int, ...]], ...] = field(default=())
    """What an environment has said: after how many of ``ids``, and which ids."""

    def written(self) -> tuple[list[int], list[bool]]:
        """Return all ids after the prompt, and which of them are the policy's."""
        ids, sampled, said = list[int](), list[bool](), dict(self.observations)
        for at, token in enumerate(self.ids, 1):
            ids, sampled = [*ids, token], [*sampled, True]
            ids, sampled = [*ids, *said.get(at, ())], [*sampled, *[False] * len(said.get(at, ()))]
        return ids, sampled


def letters(trainer: Any, count: int) -> list[int]:
    """Return the ids of ``count`` tokens that are no special tokens."""
    special = {*trainer.tokenizer.all_special_ids}
    return [token for token in range(len(trainer.tokenizer)) if token not in special][:count]


def rollouts_of(trainer: Any, given: Sequence[Response]) -> tuple[Rollouts, Tensor]:
    """Return the rollouts with the given responses, and their scores [B], or [B, T] if one has a score per token.

    Who has sampled them is unknown, as in `step`.
    """
    written = [response.written() for response in given]
    device, rows = trainer.accelerator.device, trainer.pipeline.rows
    prompts = [trainer.tokenizer.decode(list(response.query), skip_special_tokens=True) for response in given]
    rollouts = assemble(
        trainer.tokenizer,
        [{**rows[at % len(rows)], "prompt": prompt} for at, prompt in enumerate(prompts)],
        [list(response.query) for response in given],
        [ids for ids, _ in written],
        sampled=[sampled for _, sampled in written],
        terminated=torch.tensor([response.ended for response in given], device=device),
        logprobs=None,
        stops=[],
        skip_special_tokens=True,
    )
    scores = _scores(rollouts.sequences, given)
    if "environment" in trainer.inputs or any(response.observations for response in given):
        dense = scores if scores.dim() == 2 else _scores(rollouts.sequences, [_per_token(each) for each in given])
        rollouts, scores = replace(rollouts, rewards=dense, turns=[_turns(trainer, each) for each in given]), dense
    return rollouts, scores


def _per_token(response: Response) -> Response:
    if isinstance(response.score, tuple):
        return response
    return replace(response, score=(0.0,) * (len(response.ids) - 1) + (response.score,))


def _scores(sequences: Sequences, given: Sequence[Response]) -> Tensor:
    device = sequences.input_ids.device
    if not any(isinstance(response.score, tuple) for response in given):
        return torch.tensor([response.score for response in given], device=device)
    numbers = [number for response in given for number in _numbers(response)]
    return sequences.place(torch.tensor(numbers, device=device))


def _numbers(response: Response) -> tuple[float, ...]:
    dense = _per_token(response).score
    assert isinstance(dense, tuple), "it is made so"
    return dense


def _turns(trainer: Any, response: Response) -> list[dict[str, Any]]:
    """Return the turns of an episode, whose score is the reward of the last one."""
    ends, said, start = dict(response.observations), list[dict[str, Any]](), 0
    for end in [*ends, len(response.ids)]:
        output, observation = (
            trainer.tokenizer.decode(list(ids), skip_special_tokens=True)
            for ids in (response.ids[start:end], ends.get(end, ()))
        )
        reward = sum(_numbers(response)[start:end])
        said, start = [*said, {"output": output, "observation": observation, "reward": reward}], end
    return said


def learns_from_given(subject: Subject) -> bool:
    """Return whether the subject learns from samples, or from rollouts that it need not have sampled itself."""
    return not subject.online or subject.trainer_class.experience is not AccelerateRLTrainer.experience


def can_stand_in(bench: Bench) -> bool:
    """Return whether something can stand in for all that a loss depends on besides the given responses.

    Nothing can for a trained model that is none of trainkit's policies, whose heads may read its states by themselves,
    nor for responses that are sampled when experience is made of others, as VinePPO does to estimate values.
    """
    trainer = bench.in_one_turn().trainer()
    trainer.models.build()
    if not isinstance(trainer.unwrapped, Policy | Scorer):
        return False
    if not trainer.online:
        return True
    token = letters(trainer, 1)[0]
    given = [Response((token,), (token,) * (2 + at), float(at)) for at in range(trainer.samples_per_prompt)]
    sampled = noted_responses(trainer)
    collect_given(trainer, given)
    return not sampled


def noted_responses(trainer: Any) -> list[int]:
    """Return a list that grows with every call that samples responses from now on."""
    calls, honest = list[int](), trainer.sampling.respond

    def respond(*positional: Any, **named: Any) -> Any:
        calls.append(1)
        return honest(*positional, **named)

    trainer.sampling.respond = respond
    return calls


@torch.no_grad()
def collect_given(
    trainer: Any, given: Sequence[Response], change: Callable[[Rollouts, Tensor], tuple[Rollouts, Tensor]] | None = None
) -> Batch:
    """Make one collection of the given responses, which the trainer then holds; return its experience.

    Args:
        trainer: a trainer without experience.
        given: the responses, those to one prompt one after the other.
        change: changes rollouts and scores before experience is made of them.
    """
    rollouts, scores = rollouts_of(trainer, given)
    if change is not None:
        rollouts, scores = change(rollouts, scores)
    trainer.store.push(trainer.collector.experience(rollouts, scores))
    trainer.collector.prepare()
    experience: Batch = trainer.store.experience
    return experience
