"""A check of gradients in a world that can be enumerated: expectations are exact, and the paper says what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from trainkit.data import Batch, Preferences, Sequences
from trainkit.errors import suggest
from trainkit.models import Policy
from trainkit.testing.declarations import Structure, World
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import Settings
from trainkit_kit.checks.structure import sized, structures
from trainkit_kit.checks.tools import for_loss, hashed, nudged, require_close
from trainkit_kit.failures import require
from trainkit_kit.stand_in import Response, collect_given, learns_from_given, letters
from trainkit_kit.subjects import Bench, Subject
from trainkit_kit.tables import State, Table, chances, tabular

CLOSE = 1e-4
"""Largest difference of gradients, in units of the largest element; losses are computed in float32."""
BETA = 0.5
"""The coefficient of the KL penalty."""


def declares_gradient(subject: Subject) -> bool:
    """Return whether the subject declares what its gradient is."""
    return subject.causal and bool(structures(subject, "gradient")) and learns_from_given(subject)


@check(where=declares_gradient)
def gradient_in_expectation(bench: Bench) -> None:
    """Check the exact expected gradient over all responses of a tiny world, against the one that is declared.

    The policy is a table, and a collection has every response, or every group of responses, as often as it is likely.
    The mean over it is therefore the expectation, which for a policy gradient is that of the objective, whatever the
    baseline, and else the closed form of the paper. Baselines with a part of the own score, estimates of the KL that
    are biased, lengths and numbers of responses that are wrong by one, and signs are found at once.

    Causes: the own score, or something of the own response, in the baseline; k2 or k3 instead of k1 in the reward; a
    mean where a sum is meant; the reference of another row or side; a coefficient that is applied twice.
    """
    for structure in structures(bench.subject, "gradient"):
        if structure.gradient != "policy":
            _require_closed_form(bench, structure)
            continue
        factors = {}
        for size, length in ((2, 2), (3, 1)) if bench.subject.trainer_class.group else ((1, 2),):
            collection = Enumerated(bench, settings_of(bench.subject, structure), size, length)
            factors[size] = _require_direction(collection, 0.0 if structure.penalty is None else BETA)
        if structures(bench.subject, "baseline"):
            told = ", ".join(f"{factor:.4g} in groups of {size}" for size, factor in factors.items())
            require(
                all(abs(factor - 1) < 1e-3 for factor in factors.values()),
                f"the expected gradient has the direction of the policy gradient; its size is {told}, and should be 1",
            )


# ---------------------------------------------------------------------------------------------- a collection of all


SHARES = {1: (4, 2, 1, 1), 2: (2, 1, 1), 3: (2, 1, 1)}
"""How often the tokens are chosen in a state, in some order, by the number of responses to a prompt."""
MANY = (2, 1)
"""The same for larger groups, of which there would be too many."""


class Enumerated:
    """A trainer whose policy is a table, with a collection that has each group as often as it is likely.

    A response is one of at most ``length`` letters, and ends with EOS or with its last letter.

    Args:
        bench: makes the trainer.
        settings: of the trainer, by dotted path.
        size: the number of responses to a prompt, if the setting of the group allows it.
        length: of a response.
        equal: whether all scores are 0, and the reference equals the policy.
    """

    def __init__(self, bench: Bench, settings: Settings, size: int, length: int, *, equal: bool = False) -> None:
        grouped = sized(bench, size) if bench.subject.trainer_class.group else {}
        self.trainer = bench.in_one_turn().trainer(**{**settings, **grouped})
        shares = SHARES.get(self.trainer.samples_per_prompt, MANY)
        length = length if self.trainer.samples_per_prompt in SHARES else 1
        tokens = [*letters(self.trainer, len(shares) - 1), self.trainer.tokenizer.eos_token_id]
        states = [state for at in range(length) for state in product(tokens[:-1], repeat=at)]
        self.table = table_of(self.trainer, 1, {state: chances(state, tokens, shares) for state in states})
        other = {state: chances(state, tokens, range(1, len(tokens) + 1), seed=7) for state in states}
        self.reference = self.table if equal else table_of(self.trainer, 2, other)
        self.every = [
            (*state, token) for state in states for token in tokens if token == tokens[-1] or len(state) == length - 1
        ]
        self.scores = {ids: 0.0 if equal else hashed("score", str(ids)) / (1 << 31) - 1 for ids in self.every}
        with torch.no_grad():
            shown = [round(float(each) * sum(shares) ** length) for each in self.likelihoods(self.table).exp()]
        likely = [ids for ids, times in zip(self.every, shown, strict=True) for _ in range(times)]
        groups = product(likely, repeat=self.trainer.samples_per_prompt)
        self.given = [Response(tuple(tokens[:1]), ids, self.scores[ids]) for group in groups for ids in group]

    def likelihoods(self, table: Table) -> Tensor:
        """Return the log-probability of every response, with gradient. -> [R], float64."""
        own: Tensor = world_of(self.trainer, table, table, self.every, torch.zeros(len(self.every))).logprobs.sum(1)
        return own

    def world(self) -> World:
        """Return the collection for a closed form."""
        scores = torch.tensor([each.score for each in self.given], dtype=torch.float64)
        return world_of(self.trainer, self.table, self.reference, [each.ids for each in self.given], scores)

    def objective(self, beta: float) -> Tensor:
        """Return E[score] − β KL(π‖π_ref), exactly. -> []."""
        own, other = self.likelihoods(self.table), self.likelihoods(self.reference).detach()
        scores = torch.tensor([self.scores[each] for each in self.every], dtype=torch.float64)
        return (own.exp() * (scores - beta * (own - other))).sum()


def settings_of(subject: Subject, structure: Structure) -> Settings:
    """Return the settings under which a gradient is declared, with the KL penalty."""
    return {**structure.under, **_penalty(subject, structure.penalty)}


def _penalty(subject: Subject, name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    known = subject.method_fields
    require(name in known, f"the structure names the penalty {name!r}, which is no setting{suggest(name, known)}")
    return {f"method.{name}": BETA}


def table_of(trainer: Any, seed: int, known: Mapping[State, Mapping[int, float]] | None = None) -> Table:
    """Return a table for the model of a trainer."""
    trainer.models.build()
    require(isinstance(trainer.unwrapped, Policy), "the policy is none of trainkit's, so it cannot be a table")
    vocabulary = trainer.unwrapped.vocabulary or trainer.unwrapped.model.config.get_text_config().vocab_size
    return Table(vocabulary, seed, trainer.unwrapped.model.config.get_text_config().hidden_size, known)


@torch.no_grad()
def _set_values(trainer: Any) -> None:
    """Give all states unequal values, if the policy has values: a baseline by state changes no expectation."""
    if trainer.unwrapped.value_head is not None:
        draws = torch.Generator().manual_seed(3)
        for parameter in trainer.unwrapped.value_head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draws).to(parameter))


def gradient_by(trainer: Any, table: Table, batch: Batch) -> Tensor:
    """Return the gradient of the loss on a batch of a collection by the logits of a table, float64 [states, V]."""
    table.logits.grad = None
    loss, _ = trainer.loss(for_loss(trainer, batch))
    loss.backward()
    trainer.optimizer.zero_grad()
    found = table.logits.grad
    require(found is not None and found.isfinite().all(), "the loss has no finite gradient for the policy")
    assert found is not None, "just required"
    return found.clone()


def _gradient(collection: Enumerated) -> Tensor:
    """Return the gradient of the loss by the logits of all states, and leave the collection in the store."""
    with tabular(collection.trainer, collection.table, collection.reference):
        _set_values(collection.trainer)
        collect_given(collection.trainer, collection.given)
        return gradient_by(collection.trainer, collection.table, collection.trainer.store.experience)


def _require_direction(collection: Enumerated, beta: float) -> float:
    """Fail unless the expected gradient has the direction of the policy gradient; return how large it is beside it."""
    found = -_gradient(collection)
    batch, rows = collection.trainer.store.experience, len(collection.given)
    found = found * float(batch.weight) / rows  # of a sum over tokens, per response
    (due,) = torch.autograd.grad(collection.objective(beta), collection.table.logits)
    cosine = float(cosine_similarity(found.flatten(), due.flatten(), dim=0))
    factor = float((found * due).sum() / (due * due).sum())
    size = collection.trainer.samples_per_prompt
    what = f" over all groups of {size} responses" if size > 1 else " over all responses"
    off = (found / (factor or 1.0) - due).abs()
    at = divmod(int(off.argmax()), off.size(1))
    state = next((state for state, place in collection.table.places.items() if place == at[0]), ())
    require(
        factor > 0 and float(off.max()) <= 10 * CLOSE * float(due.abs().max()),
        f"the cosine of the exact expected gradient{what} and that of E[score]"
        f"{' − β KL' if beta else ''} is {cosine:.5f}; after the tokens {list(state)}, the logit of token "
        f"{at[1]} has {float(found[at] / (factor or 1.0)):.4g} instead of {float(due[at]):.4g}. The baseline depends "
        "on the own response, an estimate is biased, or a score or length is that of another response",
    )
    return factor


# ------------------------------------------------------------------------------------------------------ closed forms


def world_of(trainer: Any, table: Table, reference: Table, responses: Sequence[Sequence[int]], scores: Tensor) -> World:
    """Return what a closed form is computed from."""
    policy, other = table.logprobs(responses), reference.logprobs(responses).detach()
    ids = torch.zeros(policy.shape[:2], dtype=torch.long)
    mask = torch.zeros(policy.shape[:2], dtype=torch.bool)
    for row, response in enumerate(responses):
        ids[row, : len(response)] = torch.as_tensor(response)
        mask[row, : len(response)] = True
    own, ref = (x.gather(-1, ids.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0.0) for x in (policy, other))
    return World(trainer.method, own, ref, policy, other, mask, scores)


def _require_closed_form(bench: Bench, structure: Structure) -> None:
    outputs: dict[str, Tensor] = {}
    if bench.subject.online:
        size = 2 if bench.subject.trainer_class.group else 1
        collection = Enumerated(bench, settings_of(bench.subject, structure), size, 2)
        found, world, table = _gradient(collection), collection.world(), collection.table
    else:
        found, outputs, world, table = _of_dataset(bench, structure)
    assert callable(structure.gradient), "a name is another case"
    loss = structure.gradient(world)
    due, *of_head = torch.autograd.grad(loss, [table.logits, *world.head.values()], materialize_grads=True)
    for name, wanted in zip(world.head, of_head, strict=True):
        what = f"the derivatives of the loss and of {_name(structure)} by the output {name!r} of the head"
        require_close(outputs[name], wanted, what, rtol=1e-3, atol=1e-6, tokens=world.mask)
    at = divmod(int((found - due).abs().argmax()), due.size(1))
    state = next((state for state, place in table.places.items() if place == at[0]), ())
    require(
        bool(due.any()) and float((found - due).abs().max()) <= CLOSE * float(due.abs().max()),
        f"the gradient differs from that of {_name(structure)}: after the "
        f"tokens {list(state)}, the logit of token {at[1]} has {float(found[at]):.6g} instead of {float(due[at]):.6g}. "
        "A coefficient, a sign, a length, a side of a pair or a reference is another one",
    )


def _name(structure: Structure) -> str:
    return getattr(structure.gradient, "__name__", "the declared loss")


def _of_dataset(bench: Bench, structure: Structure) -> tuple[Tensor, dict[str, Tensor], World, Table]:
    """Return the gradient on the dataset of the tiny run, what a closed form is computed from, and the table.

    The second are the derivatives by the outputs of the policy's head, for the tokens of the outputs. [B, T] each.
    """
    trainer = bench.trainer(**settings_of(bench.subject, structure))
    # so that the mean log-ratio is positive, which the reference point of KTO is then, too
    table, reference, rows = table_of(trainer, 2), table_of(trainer, 1), trainer.pipeline.rows
    read: list[tuple[Sequences, dict[str, Tensor]]] = []

    def note(_: Any, given: Any, outputs: Any) -> Any:
        leaves = {name: x.detach().requires_grad_() for name, x in outputs.head.items()}
        read.append((given[0], leaves))
        return outputs._replace(head=leaves)

    with tabular(trainer, table, reference):
        with torch.no_grad():  # in the order of the dataset, which a collection shuffles
            batch = trainer.prepare_experience(trainer.make_experience(rows))
        nudged(trainer, 0.3)  # heads whose outputs are 0 at first
        handle = trainer.policy.register_forward_hook(note)
        found = gradient_by(trainer, table, batch)
        handle.remove()
    if "pairs" in bench.subject.inputs:
        pairs: Preferences = trainer.encode_preferences(rows)
        sequences, key = pairs.both, "margin"
    else:
        sequences, key = trainer.encode_samples(rows), "label" if "labels" in bench.subject.inputs else "reward"
    scores = torch.tensor([float(row.get(key) or 0) for row in rows], dtype=torch.float64)
    world = world_of(trainer, table, reference, [response.tolist() for response in sequences.responses], scores)
    own, leaves = read[-1]

    def in_world(x: Tensor) -> Tensor:
        return torch.zeros_like(world.logprobs).detach().masked_scatter(world.mask, x[own.response_mask].cpu().double())

    head = {name: in_world(x.detach()).requires_grad_() for name, x in leaves.items()}
    slopes = {name: in_world(torch.zeros_like(x) if x.grad is None else x.grad) for name, x in leaves.items()}
    return found, slopes, replace(world, head=head), table
