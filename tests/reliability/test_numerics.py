"""Area D of the battery: numbers that are not finite, closed forms, invariants, and learning."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainkit
from closed_forms import FORMS, Form
from trainkit.errors import NonFiniteError
from trainkit.functional import kl_k3, leave_one_out
from trainkit.models.policy import token_logprobs
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import Bandit

ROOT = Path(__file__).parents[2]

SAMPLED, WHOLE = 20, 200
"""Examples of a property in a sample, and with ``--full``."""
EXACT = 1e-6


# ------------------------------------------------------------------------------------------- D1: not finite


class Breaks:
    """Makes a weight infinite behind the third step, as a step that is too long does."""

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        if step == 3:
            next(trainer.unwrapped.parameters()).data.fill_(torch.inf)


def broken(trainer: Any, what: str) -> None:
    """Make the loss, its gradient or the weights of the third step not finite."""
    if what == "weights":
        trainer.hooks.register(Breaks())
        return
    honest = trainer.loss

    def loss(batch: Any) -> Any:
        value, found = honest(batch)
        if trainer.progress.step < 2:
            return value, found
        if what == "gradient":  # the slope of a root at 0
            return value + (value - value.detach()).sqrt(), found
        return value * {"NaN": torch.nan, "infinite": torch.inf}[what.split()[0]], found

    trainer.loss = loss


SAID = {
    "NaN loss": r"step 3: the loss is nan and the gradient norm nan; not finite in \S+",
    "infinite loss": r"step 3: the loss is -?inf and the gradient norm (nan|inf); not finite in \S+",
    "gradient": r"step 3: the loss is -?\d.* and the gradient norm (nan|inf); not finite in \S+",
    "weights": r"after step 3 the weights are not finite in \S+",
}


def test_d1_not_finite(tmp_path: Path, figure: Callable[[str], None], full: bool) -> None:
    """NaN or inf in loss, gradient or weights ends the run at that step, names a tensor and tells the true value."""
    names = trainkit.available_trainers() if full else ["ppo", "rloo", "sft"]
    for name, what in product(names, SAID):
        place = tmp_path / f"{name}-{what}"
        trainer = tiny_trainer(name, place, train__save_interval=1)
        before: list[Any] = []
        update = trainer.update
        trainer.update = lambda batch, update=update, trainer=trainer, before=before: (
            before.append({key: value.clone() for key, value in trainer.unwrapped.state_dict().items()}),
            update(batch),
        )[1]
        broken(trainer, what)
        with pytest.raises(NonFiniteError, match=SAID[what]):
            trainer.learn()
        if what != "weights":
            now = trainer.unwrapped.state_dict()
            assert all(torch.equal(now[key], value) for key, value in before[-1].items()), "the weights have not moved"
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        assert all(math.isfinite(value) for line in lines for value in line.values()), "no 0.0 in place of it"
        assert max(line["step"] for line in lines) <= 3
        assert not (place / "model").exists()
    figure(f"{len(names) * len(SAID)} of {len(names) * len(SAID)} runs of {len(names)} algorithms ended at the step")


# -------------------------------------------------------------------------------------------- D2: closed forms


@st.composite
def cases(draw: Any, form: Form) -> tuple[Any, ...]:
    """A mask with a token in each row, two numbers, and columns of log-probabilities and the like."""
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=4))
    mask = draw(hnp.arrays(bool, shape))
    mask[:, 0] |= ~mask.any(1)
    a, b = (draw(st.floats(0.05, 0.95)) for _ in range(2))
    numbers = st.floats(-2, 2, allow_subnormal=False)
    columns = [draw(hnp.arrays(np.float64, shape, elements=numbers)) for _ in range(form.columns)]
    return mask, a, b, columns, draw(st.integers(0, 10**6))


def difference(found: Any, expected: Any) -> float:
    """The largest difference between two results, relative where they are larger than 1."""
    found = found.detach().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    return float(np.max(np.abs(found - expected) / np.maximum(1, np.abs(expected)), initial=0.0))


def held_against(form: Form, mask: Any, a: float, b: float, columns: Any, seed: int, *, fast: bool) -> float:
    """How far trainkit's function is from its closed form; its gradient is held against finite differences."""
    chosen = torch.from_numpy(mask)
    found = form.found(chosen, a, b, *map(torch.from_numpy, columns))
    apart = difference(found, form.closed(mask, a, b, *(x.copy() for x in columns)))
    learnt = form.columns if form.learnt is None else form.learnt
    if learnt:  # not on the edges that are drawn, where it has two slopes
        moved = [
            torch.from_numpy(x + np.random.default_rng(seed + i).normal(0, 0.1, x.shape)) for i, x in enumerate(columns)
        ]
        inputs = [x.requires_grad_(i < learnt) for i, x in enumerate(moved)]
        assert torch.autograd.gradcheck(lambda *x: form.found(chosen, a, b, *x), inputs, fast_mode=fast)
    return apart


def test_d2_closed_forms(figure: Callable[[str], None], full: bool) -> None:
    """Every loss, advantage and KL estimator is its float64 NumPy closed form, and its gradient is checked."""
    examples, worst, count = WHOLE if full else SAMPLED, {}, 0

    def check(name: str) -> None:
        @settings(max_examples=examples, database=None)
        @given(cases(FORMS[name]))
        def law(case: Any) -> None:
            nonlocal count
            count += 1
            apart = held_against(FORMS[name], *case, fast=not full)
            assert apart <= EXACT, f"{name}: {apart}"
            worst[name] = max(worst.get(name, 0.0), apart)

        law()

    for name in FORMS:
        check(name)
    gradients = sum(form.learnt != 0 for form in FORMS.values())
    most = max(worst.values())
    figure(f"{len(worst)} forms, {gradients} with gradients, {count} examples, largest difference {most:.1e}")


# ---------------------------------------------------------------------------------------------- D3: invariants


WITH_RATIOS = ("ppo", "rloo", "grpo")
"""The algorithms of language models whose loss has a ratio to the policy that sampled."""


def first_ratios(name: str, place: Path, **changes: Any) -> tuple[float, float]:
    """How far the ratios of the first pass, as trained on and as logged, are from 1."""
    trainer = tiny_trainer(name, place, **changes)
    trainer.collect()
    batch = trainer.store.experience
    with torch.no_grad():
        found = trainer.unwrapped(batch.sequences).logprobs
        metrics = trainer.loss(batch)[1]
    mask = batch.sequences.response_mask
    apart = (found - batch.old_logprobs)[mask].double().expm1().abs().max().item()
    return apart, abs(float(metrics["policy/ratio"].compute()) - 1)


def adapter_off(place: Path) -> float:
    """How far the reference of a trained adapter is from the model before training; the policy has moved."""
    peft = {"r": 4, "target_modules": "all-linear"}
    trainer = tiny_trainer("ppo", place, model__peft_config=peft, optimizer__lr=0.01)
    trainer.collect()
    sequences = trainer.store.experience.sequences
    trainer.store.clear()
    with torch.no_grad():
        start = trainer.unwrapped(sequences).logprobs
        trainer.learn()
        policy, reference = trainer.unwrapped(sequences).logprobs, trainer.reference(sequences).logprobs
    assert (policy - start).abs().max() > 1e-3, "the adapter has learnt"
    return float((reference - start).abs().max())


def apart_from_temperature(name: str, temperature: float, place: Path) -> float:
    """How far what policy, old policy and reference say is from log softmax(logits / temperature) of the one model."""
    kl = {"method__kl_coef": 0.1} if name == "grpo" else {}  # by default, it has no reference
    trainer = tiny_trainer(name, place, rollout__temperature=temperature, **kl)
    seen: list[Any] = []
    honest = trainer.experience
    trainer.experience = lambda rollouts, scores: (seen.append(rollouts), honest(rollouts, scores))[1]
    trainer.collect()
    apart = 0.0
    for rollouts in seen:
        sequences, mask = rollouts.sequences, rollouts.sequences.response_mask
        with torch.no_grad():
            logits = trainer.unwrapped.model(
                sequences.input_ids, attention_mask=sequences.attention_mask.long()
            ).logits.double()
            sides = [trainer.unwrapped(sequences).logprobs, trainer.reference(sequences).logprobs, rollouts.logprobs]
        expected = torch.zeros(mask.shape, dtype=torch.float64)
        flat = token_logprobs(logits[:, :-1].flatten(0, 1) / temperature, sequences.input_ids[:, 1:].flatten())
        expected[:, 1:] = flat.view(len(mask), -1)
        apart = max(apart, *(float((side - expected)[mask].abs().max()) for side in sides))
    return apart


def test_d3_invariants(tmp_path: Path, figure: Callable[[str], None], full: bool, drawn: int) -> None:
    """First ratios are 1, sums of RLOO's advantages 0, k3 >= 0, the adapter off is the reference, one temperature."""
    names = WITH_RATIOS if full else WITH_RATIOS[:2]
    draws = random.Random(drawn)
    first, heat = 0.0, 0.0
    for name, seed in product(names, range(5 if full else 1)):
        temperature = draws.uniform(0.4, 2.0)
        place = tmp_path / f"{name}-{seed}"
        changes = {"train__seed": draws.randrange(10**6), "rollout__temperature": temperature}
        first = max(first, *first_ratios(name, place / "ratio", **changes))
        heat = max(heat, apart_from_temperature(name, temperature, place / "heat"))
    assert first <= EXACT, "old log-probabilities are those that are recomputed"
    assert heat <= 1e-5
    adapter = adapter_off(tmp_path / "lora")
    assert adapter <= EXACT
    sums, least = [0.0], [math.inf]

    @settings(max_examples=WHOLE if full else SAMPLED, database=None)
    @given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, min_side=2), elements=st.floats(-100, 100)))
    def sums_of_advantages_are_0(rewards: Any) -> None:
        groups = leave_one_out(torch.from_numpy(rewards.ravel()), rewards.shape[1]).view(rewards.shape)
        sums.append(float(groups.sum(1).abs().max()))

    @settings(max_examples=WHOLE if full else SAMPLED, database=None)
    @given(st.floats(-50, 0, width=32), st.floats(-50, 0, width=32))
    def k3_is_not_negative(logprob: float, ref: float) -> None:
        for kind in (torch.float32, torch.float64):
            least.append(float(kl_k3(torch.tensor(logprob, dtype=kind), torch.tensor(ref, dtype=kind))))

    sums_of_advantages_are_0()
    k3_is_not_negative()
    assert max(sums) <= EXACT
    assert min(least) >= 0
    figure(
        f"ratio - 1: {first:.1e}, sums {max(sums):.1e}, least k3 {min(least):.1e}, adapter off {adapter:.1e}, "
        f"temperatures {heat:.1e}, of {', '.join(names)}"
    )


# ------------------------------------------------------------------------------------------------ D4: learning


def benchmark() -> Any:
    """The module that measures learning, ``benchmarks/learning.py``."""
    spec = importlib.util.spec_from_file_location("learning_of_the_battery", ROOT / "benchmarks" / "learning.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SECONDS: list[float] = []


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Require that the block takes at most so many seconds of this process's CPU time, whatever else runs."""
    begun = time.process_time()
    yield
    SECONDS.append(time.process_time() - begun)
    assert SECONDS[-1] <= seconds


def share_of_optimum(bandit: Bandit, trainer: Any, beta: float) -> float:
    """How much of the way from the reference to the optimum of E[r] - beta KL the policy has gone.

    The objective falls short of its optimum by beta KL(policy | optimum).
    """
    reference = trainer.reference.policy.model
    start, end = (bandit.divergences(model, reference, beta)[0] for model in (reference, trainer.unwrapped.model))
    return 1 - end / start


def drift(bandit: Bandit, trainer: Any, samples: int = 512) -> float:
    """The change of the mean reward by the table that training did not see, in standard errors of ``samples``."""
    moments = []
    for model in (trainer.reference.policy.model, trainer.unwrapped.model):
        weights = bandit.logprobs(model).exp() / len(bandit.prompts)
        mean = float((weights * bandit.rewards).sum())
        moments.append((mean, float((weights * bandit.rewards**2).sum()) - mean**2))
    (before, spread), (after, other) = moments
    return abs(after - before) / math.sqrt((spread + other) / samples)


class Null(Bandit):
    """A bandit whose rewards, a constant or noise, have nothing to do with the responses."""

    kind: str = "constant"

    def reward(self, prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        """Return 1 for every response, or a number that is drawn for it."""
        if self.kind == "constant":
            return [1.0] * len(outputs)
        return torch.randn(len(outputs), generator=self.noise).tolist()

    @classmethod
    def of(cls, kind: str, seed: int) -> Any:
        """Return a problem of that kind."""
        made = cls(seed=seed)
        object.__setattr__(made, "kind", kind)
        object.__setattr__(made, "noise", torch.Generator().manual_seed(seed))
        return made


def test_d4_learning(tmp_path: Path, figure: Callable[[str], None], full: bool, drawn: int) -> None:
    """Bandits and random walks reach 95 % of the known optimum within 60 s; a null reward drifts by at most 3 sigma."""
    learning = benchmark()
    seeds = [1, 2, 3, 4, 5] if full else [1 + drawn % 5]
    steps = 200 if full else 100
    SECONDS.clear()
    shares, walks, drifts = [], [], []
    for name, seed in product(("ppo", "rloo") if full else ("rloo",), seeds):
        bandit = Bandit(seed=seed)
        with within(60):
            trainer = learning.reach_for_optimum(name, bandit, seed, tmp_path, steps)
        shares.append(share_of_optimum(bandit, trainer, learning.BETA))
    for seed in seeds if full else []:
        begun = time.process_time()
        curve, _, _ = learning.reinforce("ppo", learning.load_task(), seed, tmp_path)
        walks.append(curve.settled())
        reached = (at for at, (_, value) in zip(curve.seconds, curve.points, strict=True) if value >= 0.95)
        SECONDS.append(next(reached, math.inf) - begun)
        assert SECONDS[-1] <= 60
    for kind, seed in product(("constant", "noise"), seeds):
        null = Null.of(kind, seed)
        drifts.append(drift(null, learning.reach_for_optimum("ppo", null, seed, tmp_path / kind, steps // 2)))
    walked = f"{len(walks)} walks >= {min(walks):.3f}" if walks else "no walks"
    figure(
        f"{len(shares)} bandits >= {min(shares):.3f}, {walked}, "
        f"at most {max(SECONDS):.0f} s of the CPU, {len(drifts)} null rewards: {max(drifts):.2f} sigma"
    )
    assert min([*shares, *walks]) >= 0.95
    assert max(drifts) <= 3
