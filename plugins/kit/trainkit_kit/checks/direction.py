"""Checks of time: a reward reaches the tokens before it, and none after it, by as much as the discount says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import suggest
from trainkit.models import TokenOutputs
from trainkit.testing.declarations import Structure
from trainkit_kit.checking import check
from trainkit_kit.checks.context import Given, reads_text, responses
from trainkit_kit.checks.episodes import playing
from trainkit_kit.checks.losses import evaluated
from trainkit_kit.checks.structure import structures
from trainkit_kit.checks.tools import for_loss
from trainkit_kit.failures import require
from trainkit_kit.stand_in import Number, Response, can_stand_in, collect_given, learns_from_given, standing_in, varied
from trainkit_kit.subjects import Bench, Subject

AT = 5
"""The row of `responses` whose rewards are changed; it has six tokens and has ended."""
CUT = 1
"""One that has six tokens, too, and was truncated."""
FIRST = 2
"""The first token that is chosen in a state which no other response has."""
RAISE = 3.0
"""By how much a reward or a value rises."""
CLOSE = 1e-3
"""Largest difference of credits, in units of the largest one; experience is computed in float32."""
SMALL = 0.1
"""By how much a value rises that a loss may clip to where it was."""
GAMMA, LAM = 0.9, 0.7
"""γ and λ with which a declared discount is checked: unequal, so that they cannot be exchanged."""

Credits = dict[tuple[int, ...], Tensor]
"""The credit of the tokens of each response, by its ids."""


def rewarded_text(subject: Subject) -> bool:
    """Return whether the subject learns from rewards of text that it samples."""
    return subject.samples_text and subject.rewarded and learns_from_given(subject)


@check(where=rewarded_text)
def time_has_a_direction(bench: Bench) -> None:
    """Check that a reward raises the credit of the tokens up to it, and changes none after it.

    What changes in all responses alike, as by whitening, is left out; where scores change other responses in another
    way, as a running scale of rewards does, only their sign is checked. An algorithm that credits a whole response with
    the sum of its rewards may do that for rewards at any token, and then its first token gets as much as its last. The
    same is so in episodes, of which a later turn is a result of the earlier ones. An algorithm that samples more
    responses to make experience passes. Sums in the direction of the text instead of the other, and rewards that are
    placed at a wrong token, teach which token follows a reward.

    Causes: ``cumsum`` without the two ``flip``; rewards that are used as advantages; a reward at the next token; a sum
    that ends with a turn.
    """
    if not can_stand_in(bench):
        return
    _require_direction(_Effects(bench))
    if bench.subject.plays:
        _require_direction(_Effects(playing(bench), episodes=True))


def _require_direction(effects: _Effects) -> None:
    found = torch.stack([effects.of_reward(token) for token in range(effects.length)])  # [reward, token]
    largest = float(found.abs().max())
    if not effects.comparable:
        require(
            bool((found.diag() >= -CLOSE * largest).all()),
            f"if the reward of a token rises by {RAISE:g}, its credit changes by one of {_told(found.diag())}; none "
            "should fall",
        )
        return
    if largest == 0 or _same_for_all(found, largest):
        lowest = found[-1].min()
        require(
            float(lowest) >= -CLOSE * largest and (largest == 0 or float(found[-1, 0]) > CLOSE * largest),
            f"if the score of a response rises by {RAISE:g}, the credits of its tokens change by {_told(found[-1])}; "
            "all should rise",
        )
        return
    for token, row in enumerate(found):
        seen = f"if the reward of token {token} of a response rises by {RAISE:g}, the credits of its tokens change by"
        require(float(row[token]) > CLOSE * largest, f"{seen} {_told(row)}; that of token {token} itself should rise")
        require(
            bool((row[token + 1 :].abs() <= CLOSE * largest).all()),
            f"{seen} {_told(row)}; those of later tokens should not change: a sum in the wrong direction of time, or a "
            "reward at another token",
        )
        require(bool((row >= -CLOSE * largest).all()), f"{seen} {_told(row)}; none of them should fall")
    at_once = effects.has_values and float(found.tril(-1).abs().max()) <= CLOSE * largest  # A = δ: GAE with λ = 0
    require(
        at_once or float(found[-1, 0]) > CLOSE * largest,
        f"if the reward of the last token rises by {RAISE:g}, the credits of the tokens change by {_told(found[-1])}; "
        "without a critic, that of the first token should rise",
    )


def _same_for_all(found: Tensor, largest: float) -> bool:
    """Return whether it makes no difference which token is rewarded."""
    return bool(((found - found[-1]).abs() <= CLOSE * largest).all())


@check(where=rewarded_text)
def values_reach_back(bench: Bench) -> None:
    """Check that a critic's value of a state lowers the credit of its own token, and reaches no later token.

    A critic is a baseline in its own state and a forecast for the states before it. One that is read one state early or
    late, or is added where it was subtracted, still trains, and a short run learns with it. The value of the state
    after a response that has ended counts nowhere. Algorithms without a critic pass, and so do those where a value
    changes the credit of other responses in another way.

    Causes: V of the same state, or of the one before, instead of the next in δ; a ``roll`` by one column that is too
    few or too many; the state before the last token as the one after it; a sign.
    """
    if not can_stand_in(bench):
        return
    for row in (AT, CUT):
        effects = _Effects(bench, row=row)
        if not effects.has_values:
            return
        unit = float(effects.of_reward(effects.length - 1).abs().max())
        for token in (FIRST, effects.length - 1, effects.length):
            found = effects.of_value(token)
            if not effects.comparable or unit == 0:
                return
            _require_critic(effects, token, found, unit)


def _require_critic(effects: _Effects, token: int, found: Tensor, unit: float) -> None:
    """Fail unless the value of the state before a token, or after the last, changes credits as a critic's does."""
    small, own = CLOSE * unit, found[token : token + 1]
    at = f"in which token {token} is chosen" if len(own) else "after the last token"
    seen = (
        f"if the value of the state {at} of a response rises by {RAISE:g}, the credits of its tokens change by "
        f"{_told(found)}; "
    )
    require(
        bool((own < -small).all()),
        f"{seen}that of token {token} should fall: V is not subtracted there, or is added again as that of the next "
        "state",
    )
    require(bool((found[token + 1 :].abs() <= small).all()), f"{seen}those of later tokens should not change")
    require(bool((found[:token] >= -small).all()), f"{seen}those of earlier tokens should not fall")
    counts = bool(len(own)) or not effects.ended
    require(counts or bool((found.abs() <= small).all()), f"{seen}the response has ended, so none should change")


@check(where=rewarded_text)
def critic_follows_rewards(bench: Bench) -> None:
    """Check that a reward raises the target of a critic in the states up to its token, and in none after it.

    A critic with a wrong target is a baseline still, so that a run learns, with more noise than without it. One that
    is fitted to the sum of a response's rewards in all states passes. What the critic said of a state before the update
    is no part of this state's target: in A + V it cancels.

    Causes: returns that leave out the own reward, or are summed in the direction of the text; advantages that are taken
    for returns, or V that is added to them twice; a reward at another token; a sign.
    """
    if not can_stand_in(bench):
        return
    effects = _Effects(bench, of="values")
    if not effects.has_values:
        return
    found = torch.stack([effects.of_reward(token) for token in range(effects.length)])  # [reward, state]
    largest = float(found.abs().max())
    if not effects.comparable or largest == 0:
        return
    for token, row in enumerate([] if _same_for_all(found, largest) and bool((found > 0).all()) else found):
        seen = f"if the reward of token {token} of a response rises by {RAISE:g}, the loss pulls up the values by"
        require(
            float(row[token]) > CLOSE * largest, f"{seen} {_told(row)}; that of the state of token {token} should rise"
        )
        require(bool((row >= -CLOSE * largest).all()), f"{seen} {_told(row)}; none of them should fall")
        later = row[token + 1 :].abs() <= CLOSE * largest
        require(bool(later.all()), f"{seen} {_told(row)}; those of later states should not change")
    for token in (FIRST, effects.length - 1):
        pull = float(effects.of_value(token, SMALL, before=True)[token])
        require(
            not effects.comparable or abs(pull) <= 0.1 * largest * SMALL / RAISE,
            f"if the critic's value of the state of token {token} rises by {SMALL:g} before the update, and not in it, "
            f"the loss pulls up the value of this state by {pull:.4g}; it should be 0: the target is a return, in "
            "which the own value cancels, as in A + V",
        )


def writes_text(subject: Subject) -> bool:
    """Return whether the subject trains a policy over tokens on text of the usual form."""
    return reads_text(subject) and subject.writes_text


@check(where=writes_text)
def critic_is_fitted_everywhere(bench: Bench) -> None:
    """Check that values, and outputs of a head, are fitted in all states in which a token was chosen, or in the first.

    A critic that is not fitted in some states is left there at what it was, and says it of every response. Which tokens
    the policy learns from is another question, which an algorithm may decide.

    Causes: values of the last or the first token that are taken for those of all; a difference of neighbours that
    leaves out one end; a mask without EOS.
    """
    if not can_stand_in(bench):
        return
    trainer = bench.in_one_turn().trainer()
    with standing_in(trainer, varied):
        if trainer.online:
            collect_given(trainer, responses(trainer))
        else:
            with torch.no_grad():
                trainer.collect()
        found = evaluated(trainer, for_loss(trainer, trainer.store.experience))
        for (sequences, _), slopes in zip(found.calls, found.slopes(), strict=True):
            for name in slopes.keys() - set(TokenOutputs._fields) | slopes.keys() & {"values"}:
                for ids, slope, mask in zip(sequences.responses, slopes[name], sequences.response_mask, strict=True):
                    fitted = (slope[mask] != 0).tolist()
                    require(
                        all(fitted) or not any(fitted[1:]),
                        f"the loss has a derivative by {name} at the tokens {[at for at, x in enumerate(fitted) if x]} "
                        f"of the response {ids.tolist()}, and not at the others",
                    )


def declares_discount(subject: Subject) -> bool:
    """Return whether the subject declares a discount of rewards of tokens."""
    return rewarded_text(subject) and bool(structures(subject, "discount"))


@check(where=declares_discount)
def discounted_as_declared(bench: Bench) -> None:
    """Check that a reward one token later gives γλ times the credit, and a higher value the credit that GAE says.

    If V of a state rises by 1, the credit of the token before it rises by γ − γλ, and that of the token that is chosen
    in it falls by 1. γ and λ that are exchanged, a value of the state before or behind, and a discount that is missing
    or applied twice all train, with another bias.

    Causes: V of the same state instead of the next one in δ; γλ instead of γ before V; arguments in another order; a
    sum over columns that includes tokens of an environment.
    """
    for structure in structures(bench.subject, "discount"):
        settings, gamma, lam = _discount(bench, structure)
        for row in (AT, CUT):
            _require_discount(_Effects(bench, settings, row), gamma, lam)


def _require_discount(effects: _Effects, gamma: float, lam: float) -> None:
    """Fail unless rewards and values of a response change the credits of its tokens as GAE says."""
    length, unit = effects.length, float(effects.of_reward(0)[0])
    require(unit > 0, "if the reward of the first token rises, its credit does not")
    trace = torch.tensor([(gamma * lam) ** at for at in range(length)], dtype=torch.float64)
    for token in range(length):
        due = torch.zeros(length, dtype=torch.float64)
        due[: token + 1] = trace[: token + 1].flip(0)
        _require(effects.of_reward(token), unit * due, f"the reward of token {token} of a response", (gamma, lam))
        if effects.has_values and token >= FIRST:
            due[:token] = gamma * (1 - lam) * trace[:token].flip(0)
            due[token] = -1
            what = f"the value of the state in which token {token} of a response is chosen"
            _require(effects.of_value(token), unit * due, what, (gamma, lam))
    if effects.has_values:
        found, what = effects.of_value(length), "the value of the state after the last token of a response"
        bootstrapped = not effects.ended and bool(found.any())
        _require(found, unit * gamma * trace.flip(0) * bootstrapped, what, (gamma, lam), least=CLOSE * unit)


def _discount(bench: Bench, structure: Structure) -> tuple[dict[str, Any], float, float]:
    """Return the settings with which a declared discount is measured, and its γ and λ."""
    assert structure.discount is not None, "structures() has selected it"
    settings, found = dict(structure.under), list[float]()
    for given, value in zip(structure.discount, (GAMMA, LAM), strict=True):
        if isinstance(given, str):
            known = bench.subject.method_fields
            require(
                given in known, f"the declared discount names {given!r}, which is no setting{suggest(given, known)}"
            )
            settings[f"method.{given}"] = value
        found.append(value if isinstance(given, str) else float(given))
    return settings, found[0], found[1]


def _require(found: Tensor, due: Tensor, what: str, discount: tuple[float, float], least: float = 0.0) -> None:
    require(
        bool(((found - due).abs() <= max(CLOSE * float(due.abs().max()), least)).all()),
        f"if {what} rises by {RAISE:g}, the credits of its tokens change by {_told(found)}, and should change by "
        f"{_told(due)}: γ is {discount[0]:g} and λ {discount[1]:g}",
    )


def _per_token(response: Response) -> Response:
    """Return the response with its score as the reward of its last token."""
    assert not isinstance(response.score, tuple), "`responses` gives scores of responses"
    return replace(response, score=(0.0,) * (len(response.ids) - 1) + (response.score,))


def _told(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values.tolist()) + "]"


# -------------------------------------------------------------------------------------------------- what is measured


class _Effects:
    """By how much the credits of a response's tokens change with a reward or a value, without what changes in all rows.

    ``of`` names the output whose derivative is credit: log-probabilities, or values, which a loss pulls up. Of
    ``episodes``, the response is the tokens of two turns.

    Whitening and the scale of a collection change the credits of all responses by one factor and one summand. Both are
    found from the responses to other prompts, and undone.
    """

    def __init__(
        self,
        bench: Bench,
        settings: dict[str, Any] | None = None,
        row: int = AT,
        *,
        of: str = "logprobs",
        episodes: bool = False,
    ) -> None:
        self.bench, self.settings, self.row, self.of, self.asked = bench, settings or {}, row, of, set[str]()
        trainer = self._trainer()
        size = trainer.samples_per_prompt
        self.group = range(row // size * size, row // size * size + size)
        given = responses(trainer, groups=max(4, 24 // size), episodes=episodes)
        self.given = [_per_token(each) for each in given]
        self.given[row] = replace(self.given[row], score=(0.0,) * (len(self.given[self.row].ids) - 1) + (-2.0,))
        self.length = len(self.given[row].ids)
        self.comparable = True
        """Whether the credits of other responses have changed by one factor and one summand, each time so far."""
        self.usual = self._credits(self.given, varied)

    @property
    def ended(self) -> bool:
        """Whether the response has ended, and was not truncated."""
        return self.given[self.row].ended

    @property
    def has_values(self) -> bool:
        """Whether the policy gives the value of a state."""
        return "values" in self.asked

    def of_reward(self, token: int) -> Tensor:
        """Return the effect of a higher reward of one token. -> [tokens], float64."""
        dense = self.given[self.row].score
        assert isinstance(dense, tuple), "it is made so"
        raised = tuple(reward + RAISE * (at == token) for at, reward in enumerate(dense))
        given = [*self.given[: self.row], replace(self.given[self.row], score=raised), *self.given[self.row + 1 :]]
        return self._effect(self._credits(given, varied))

    def of_value(self, token: int, by: float = RAISE, *, before: bool = False) -> Tensor:
        """Return the effect of a higher value of the state in which one token is chosen. -> [tokens], float64.

        If it is higher ``before`` the update only, the loss reads the usual one.
        """
        state = self.given[self.row].ids[:token]

        def number(name: str, trained: bool, past: tuple[int, ...], chosen: int | None) -> float:
            here = name == "values" and past == state and not (before and torch.is_grad_enabled())
            return varied(name, trained, past, chosen) + by * here

        return self._effect(self._credits(self.given, number))

    def _trainer(self) -> Any:
        return self.bench.in_one_turn().trainer(**self.settings)

    def _credits(self, given: Given, number: Number) -> Credits:
        def noted(name: str, trained: bool, before: tuple[int, ...], token: int | None) -> float:
            self.asked |= {name} if trained else set()
            return number(name, trained, before, token)

        trainer = self._trainer()
        with standing_in(trainer, noted):
            batch = collect_given(trainer, given)
            found = evaluated(trainer, for_loss(trainer, batch))
            credits_: Credits = {}
            for (sequences, _), slopes in zip(found.calls, found.slopes(), strict=True):
                whole = slopes.get(self.of, torch.zeros(sequences.response_mask.shape))
                for ids, slope, mask in zip(sequences.responses, whole, sequences.response_mask, strict=True):
                    own = -slope[mask] * float(batch.weight)
                    key = tuple(ids.tolist())
                    credits_[key] = credits_[key] + own if key in credits_ else own
        return credits_

    def _effect(self, after: Credits) -> Tensor:
        own = self.given[self.row].ids
        others = [each.ids for at, each in enumerate(self.given) if at not in self.group]
        one, other = (
            torch.cat([found.get(ids, torch.zeros(len(ids), dtype=torch.float64)) for ids in others])
            for found in (self.usual, after)
        )
        table = torch.stack([one, torch.ones_like(one)], dim=1)
        factor, summand = torch.linalg.lstsq(table, other.unsqueeze(1)).solution.flatten().tolist()
        off = float((factor * one + summand - other).abs().max())
        self.comparable &= off <= CLOSE * float(other.abs().max()) / 10
        zeros = torch.zeros(self.length, dtype=torch.float64)
        before, now = self.usual.get(own, zeros), after.get(own, zeros)
        effect: Tensor = (now - factor * before - summand) / (factor or 1.0)
        return effect
