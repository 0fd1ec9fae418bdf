"""What an algorithm declares about itself for tests: a tiny run, effects of its settings, and its structure.

`tiny_trainer` makes the tiny run. The conformance kit measures the rest. Training reads nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from trainkit.errors import PluginError, describe

if TYPE_CHECKING:
    from torch import Tensor

QUANTITIES: Mapping[str, str] = {
    "loss": "the loss on the first collection, with a policy that has moved",
    "collections": "the number of collections in a run of twelve steps",
    "responses": "the number of responses to each prompt",
    "rows": "the rows of experience of the first collection",
    "weight": "the number of units that the loss on the first collection averages over",
    "skipped": "the number of steps that are skipped in a run of twelve",
    "unclipped": "the share of response tokens that have credit, with a policy that has moved",
    "unclipped values": "the same share, of the values of response tokens",
    "entropy": "how much a step raises the policy's entropy",
    "divergence": "how much a step raises the policy's divergence from the reference, from which it has moved",
    "values": "how much a step raises the values of states",
    "likelihood": "how much a step raises the log-probability of the tokens that are trained on",
    "credit of truncated": "the mean credit of the tokens of truncated responses",
    "credit of terminated": "the mean credit of the tokens of responses that have ended",
    "credit of first tokens": "the mean credit of the first tokens of responses",
    "credit of chosen": "the mean credit of the tokens of chosen outputs of pairs",
    "credit of rejected": "the mean credit of the tokens of rejected outputs of pairs",
    "credit of desirable": "the mean credit of the tokens of samples whose label is true",
    "credit of undesirable": "the mean credit of the tokens of samples whose label is false",
    "gradient": "the gradient of the loss, with a policy that has left its reference and the policy that sampled",
    "gradient of PART": "the same, of the parameters whose name contains PART",
    "metric NAME": "a metric of that loss",
    "slope of OUTPUT": "how much that loss rises if the policy's OUTPUT, such as values, rises by one at all tokens",
    "FIELD": "the mean of a field of the experience: over response tokens for [B, T], over rows for [B]",
    "FIELD of truncated": "the same over truncated responses",
    "FIELD of terminated": "the same over responses that have ended",
    "size of FIELD": "the mean absolute value of a field of the experience",
}
"""The quantities that an `Effect` can name. Credit is how much the loss raises the log-probability of a token.

Gradients are vectors: they are compared element by element, or by their norm if they
should rise, fall or have a value.
"""


WAYS = ("rises", "falls", "same", "equals", "linear", "proportional")
"""The ways to say what a setting does."""


@dataclass(frozen=True)
class Effect:
    """The effect of a setting on a quantity. Exactly one of the six ways to say it is given.

    `equals`, `linear` and `proportional` prove more than a direction: that a weight is not applied twice, nor half, and
    that nothing of its term is left at 0. Weights that may be 0 are measured there, too.

    Args:
        quantity: a name of `QUANTITIES`, or a function that is called with a tiny trainer which has made its first
            collection, and returns a number or a tensor.
        rises: values of the setting with which the quantity rises, in this order.
        falls: values of the setting with which the quantity falls, in this order.
        same: values of the setting that do not change the quantity.
        equals: the quantity's value, such as one that was computed by hand, for values of the setting.
        linear: at least three values of a setting that is the weight of a term: the quantity is a constant and the
            setting times another, so that twice the setting is twice its term. At 0, the quantity is the constant, and
            has no part of the term.
        proportional: values of a setting that multiplies the quantity: twice the setting is twice the quantity.
        under: other settings, by dotted path; those of `Declaration.contexts` are used, too.
    """

    quantity: str | Callable[[Any], Any]
    rises: tuple[Any, ...] = ()
    falls: tuple[Any, ...] = ()
    same: tuple[Any, ...] = ()
    equals: Mapping[Any, float] = field(default_factory=dict)
    linear: tuple[float, ...] = ()
    proportional: tuple[float, ...] = ()
    under: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in WAYS if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"give an Effect one of {', '.join(WAYS[:-1])} and {WAYS[-1]}; "
                f"given {' and '.join(given) or 'none of them'}"
            )
        least = {"equals": 1, "linear": 3}.get(given[0], 2)
        if len(self.values) < least:
            words = {2: "two", 3: "three"}[least]
            raise ValueError(f"{given[0]} of an Effect should be at least {words} values; given {self.values!r}")

    @property
    def way(self) -> str:
        """Which of `WAYS` is given."""
        return next(name for name in WAYS if getattr(self, name))

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the setting that are compared."""
        return tuple(getattr(self, self.way))

    @property
    def name(self) -> str:
        """The name of the quantity, for messages."""
        return self.quantity if isinstance(self.quantity, str) else getattr(self.quantity, "__name__", "its quantity")


@dataclass(frozen=True)
class World:
    """A dataset or a collection whose policy is a table, from which a closed form of an algorithm's loss is computed.

    B rows in their order, of pairs first all chosen and then all rejected outputs; T tokens, V vocabulary. Tensors are
    float64, and 0 behind the end of an output.

    Args:
        method: the settings of the method.
        logprobs: log π of the tokens [B, T], with gradient.
        ref_logprobs: log π_ref of the tokens [B, T], of the reference or the teacher.
        policy: log π of all tokens in the states of the tokens [B, T, V], with gradient.
        reference: the same of the reference [B, T, V].
        mask: which tokens belong to outputs, bool [B, T].
        scores: scores, rewards or margins [B], labels as 1 and 0; of pairs [B / 2].
        head: outputs of the policy's head by name, such as values or Q of the tokens [B, T], with gradient.
    """

    method: Any
    logprobs: Tensor
    ref_logprobs: Tensor
    policy: Tensor
    reference: Tensor
    mask: Tensor
    scores: Tensor
    head: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """The structure of an algorithm; what is None is not checked.

    `detached` is checked of every trainer. The other parts are measured by the log-probabilities of tokens, or by the
    scores of texts: for a model that has neither, such as one of images, declare only `detached`, and test the others
    with numbers.

    Args:
        scores: whose scores, rewards, labels or margins count in what is learnt from a row: only its own (``row``),
            those of its ``group``, of responses to one prompt, or those of the whole ``collection``, or dataset.
        baseline: ``leave_one_out``: a score is compared with the mean of the others of its group, so that one more in
            the score raises the advantage by as much in groups of any size. The class has a ``group``.
        surrogate: the clipped surrogate is the pessimistic one, max(−Aρ, −A clip(ρ)), and ρ is an importance ratio per
            ``token`` or per ``sequence``, or the geometric mean over the tokens of a response (``sequence_mean``); or
            it is −A clip(ρ) log π with ρ per token and without gradient through ρ (``cispo``), or −Aρ where ρ of a
            token is in the range and 0 elsewhere (``masked``). ``none``: nothing is clipped, so that no token loses its
            gradient when the policy moves.
        cliprange: the names of the settings that say how far ρ may fall below 1 and rise above it.
        detached: outputs of the policy, such as ``logprobs``, ``values`` or the name of a head's output, through which
            the loss has less gradient than its value says, because a part of it is detached. ``()``: the gradient is
            that of the loss.
        whitened: fields of the experience that have mean 0 and standard deviation 1 over the response tokens of a
            collection.
        unscaled: fields of the experience that rise, at the last token of a response, as much as its score.
        kl: where the KL penalty of a token counts: in the advantages of its whole ``response``, or of this ``token``
            and the tokens before it. Its weight is a setting ``kl_coef``.
        discount: γ and λ of generalised advantage estimation, each the name of a setting or a number: a reward one
            token later counts γλ times as much. (1, 1) is the sum of the rewards to come; with λ = 0, credit is the
            error of one step.
        gradient: what the gradient is before the first update, with a policy whose outputs can all be enumerated.
            ``policy``: online, the expected gradient has the direction of ∇(E[score] − β KL(π‖π_ref)), and with a
            declared ``baseline`` also its size. A function of the `World` returns the loss of which it is the gradient.
        unbiased: metrics that are exact in expectation: with ``entropy`` in their name, the mean entropy over tokens,
            with ``per_token``, the mean KL from the reference over tokens, else the mean KL of responses.
        non_negative: metrics that are not negative for any response.
        penalty: with ``gradient``, ``unbiased`` or ``non_negative``, the name of the setting that is β; None: there is
            no KL penalty.
        under: settings, by dotted path, under which this is so.
    """

    scores: Literal["row", "group", "collection"] | None = None
    baseline: Literal["leave_one_out"] | None = None
    surrogate: Literal["none", "token", "sequence", "sequence_mean", "cispo", "masked"] | None = None
    cliprange: tuple[str, str] = ("cliprange", "cliprange")
    detached: tuple[str, ...] | None = None
    whitened: tuple[str, ...] | None = None
    unscaled: tuple[str, ...] | None = None
    kl: Literal["response", "token"] | None = None
    discount: tuple[str | float, str | float] | None = None
    gradient: Literal["policy"] | Callable[[World], Tensor] | None = None
    unbiased: tuple[str, ...] | None = None
    non_negative: tuple[str, ...] | None = None
    penalty: str | None = None
    under: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A quantity that follows another, as target networks and running means do: t ← t + rate · (source − t).

    Args:
        value: returns the quantity of a trainer, [] or [N].
        source: returns what it follows, of the same shape, after an optimizer step or a collection that has moved it.
        rate: returns the rate from the settings of the method; one minus it is the decay.
    """

    value: Callable[[Any], float | Tensor]
    source: Callable[[Any], float | Tensor]
    rate: Callable[[Any], float]


@dataclass(frozen=True)
class Declaration:
    """What an algorithm declares for tests. Settings are dotted paths, such as ``method.kl_coef``.

    Args:
        arguments: arguments of `trainkit.train` from which `tiny_trainer` makes a trainer. Those of a trainer of
            language models are only the ones that differ from the defaults of `tiny_trainer`.
        contexts: by field of the method, settings under which the field has an effect in a tiny run, such as
            ``{"horizon": {"method.target": 0.01}}``. Most fields need none. If the settings contain the field itself,
            the kit compares that value with the usual one.
        variants: settings, by the name of a variant, under which the kit repeats its checks of a step, such as
            ``{"kl": {"method.kl_coef": 0.05}}``. Without one, what is off by default is not checked.
        effects: by field of the method, what changing the field does. Without it, the kit only checks that a field has
            some effect, which a wrong sign has, too.
        structure: what the kit checks about the algorithm's structure.
        targets: quantities that follow others, by name.
        expected_failures: checks that the algorithm cannot pass, each with the reason, such as ``{"given_responses":
            "the greedy response is not given"}``. It is an error if one passes.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    contexts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    effects: Mapping[str, Effect | Sequence[Effect]] = field(default_factory=dict)
    structure: Sequence[Structure] = ()
    targets: Mapping[str, Target] = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)


def declaration_of(cls: type) -> Declaration:
    """Return the declaration of a trainer class, or that of its nearest base class that has one.

    It is ``KIT`` of the class's module, or of the module ``kit`` in the same package: a `Declaration`, or a dict of
    them by the names of classes.

    Raises:
        PluginError: ``KIT`` is something else.
    """
    for base in cls.__mro__:
        for module, kit in _kits(base):
            if isinstance(kit, Mapping):
                kit = kit.get(base.__name__)
            if isinstance(kit, Declaration):
                return kit
            if kit is not None:
                expected = "a trainkit.testing.Declaration, or a dict of them by the names of trainer classes"
                raise PluginError(f"KIT of {module} is {describe(kit)}; it should be {expected}")
    return Declaration()


def _kits(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield ``KIT`` of the module of a class, and that of the module ``kit`` beside it, with the modules' names."""
    module = sys.modules.get(cls.__module__)
    yield cls.__module__, getattr(module, "KIT", None)
    package = getattr(module, "__package__", None)
    if package and find_spec(f"{package}.kit") is not None:
        yield f"{package}.kit", getattr(import_module(f"{package}.kit"), "KIT", None)
