"""The sampler: what it says it drew is what it drew, from the distribution it names, and text follows from ids."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import trainkit
from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Row
from trainkit.errors import ConfigError
from trainkit.models.policy import CausalPolicy
from trainkit.sampling import CausalSampler, cut_at_stop
from trainkit.seeding import generator
from trainkit.testing import EOS, PAD, character_tokenizer, tiny_gpt2, tiny_llama
from trainkit.testing.trainers import LETTERS, tiny_trainer

TOKENS = [*LETTERS, EOS, PAD]
"""The vocabulary, in the order of ids."""


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    return character_tokenizer(LETTERS, **special)


def make_model(fields: dict[str, Any] | None = None, seed: int = 0, spread: float = 0.3) -> PreTrainedModel:
    """Random weights, wide enough apart for tokens to be of unlike probability."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**(fields or tiny_gpt2(len(TOKENS))), initializer_range=spread)
    return AutoModelForCausalLM.from_config(config).eval()


def ids_of(*tokens: str) -> list[int]:
    return [TOKENS.index(token) for token in tokens]


def sample(
    sampler: CausalSampler, queries: list[list[int]], seed: int = 1, rows: list[Row] | None = None, **settings: Any
) -> Rollouts:
    return sampler(
        rows or [{"prompt": torch.tensor(query)} for query in queries],
        queries,
        SamplingConfig(**settings),
        generator(seed, "test"),
    )


def rail(*ways: str) -> Tensor:
    """A mask [V, V] that leaves one token after each: along the letters of ``ways`` (``"dd"`` never ends), then EOS."""
    after = {here: there for way in ways for here, there in reversed(list(zip(way, [*way[1:], EOS], strict=True)))}
    mask = torch.zeros(len(TOKENS), len(TOKENS), dtype=torch.bool)
    for here in TOKENS:
        mask[TOKENS.index(here), TOKENS.index(after.get(here, EOS))] = True
    return mask


def on_rails(*ways: str, **kwargs: Any) -> CausalSampler:
    """A real sampler with a real model whose responses are known: after a prompt's last letter, the rest of its way."""
    special = {name: kwargs.pop(name) for name in ("pad_token", "bos_token") if name in kwargs}
    return CausalSampler(make_model(), tokenizer(**special), logit_mask=rail(*ways), **kwargs)


both_pads = pytest.mark.parametrize("pad", [PAD, EOS])


# ---------------------------------------------------------------------------------------------- masks and lengths


@both_pads
def test_masks_lengths_and_endings_are_those_of_what_was_sampled(pad: str) -> None:
    """S-01, S-02: terminating EOS counts, also where padding has its id; being cut is not ending."""
    sampler = on_rails("abc", "dd", pad_token=pad)
    queries = [ids_of("a"), ids_of(*"hgh"), ids_of(*"fd")]
    found = sample(sampler, queries, max_new_tokens=4)
    assert [r.tolist() for r in found.responses] == [ids_of("b", "c", EOS), ids_of(EOS), ids_of(*"dddd")]
    assert [q.tolist() for q in found.queries] == queries
    assert found.terminated.tolist() == [True, True, False]
    rows = ["".join(".x"[m] for m in mask) for mask in found.sequences.response_mask.int().tolist()]
    assert rows == [".xxx..", "...x..", "..xxxx"]
    assert found.sequences.attention_mask.sum(1).tolist() == [4, 4, 6]


@both_pads
def test_eos_within_a_prompt_neither_ends_the_response_nor_hides_from_attention(pad: str) -> None:
    """S-24, S-04."""
    sampler = on_rails("abc", pad_token=pad)
    queries = [ids_of(EOS, "a"), ids_of("a", EOS, EOS, "a"), ids_of("a")]
    found = sample(sampler, queries, max_new_tokens=5)
    assert [r.tolist() for r in found.responses] == [ids_of("b", "c", EOS)] * 3
    assert [q.tolist() for q in found.queries] == queries
    assert found.sequences.attention_mask.sum(1).tolist() == [5, 7, 4]


@both_pads
@pytest.mark.parametrize("fields", [tiny_gpt2, tiny_llama])
def test_prompts_of_special_tokens_alone_are_attended_to_by_sampler_and_policy_alike(fields: Any, pad: str) -> None:
    """S-04: an unconditional prompt is EOS as BOS; its response has the same log-probabilities on both sides."""
    model = make_model(fields(len(TOKENS)))
    queries = [ids_of(EOS), ids_of(EOS, EOS, "a"), ids_of("c", EOS), ids_of("e")]
    found = sample(CausalSampler(model, tokenizer(pad_token=pad)), queries, max_new_tokens=6)
    again = CausalPolicy(model)(found.sequences).logprobs
    torch.testing.assert_close(found.logprobs, again, rtol=0, atol=1e-5)


def test_eos_as_the_last_token_that_fits_is_an_end() -> None:
    sampler = on_rails("abc")
    assert sample(sampler, [ids_of("a")], max_new_tokens=3).terminated.tolist() == [True]
    assert sample(sampler, [ids_of("a")], max_new_tokens=2).terminated.tolist() == [False]


@pytest.mark.parametrize("more", [TOKENS.index("c"), [TOKENS.index("c")], [TOKENS.index("h"), TOKENS.index("c")]])
def test_every_eos_of_the_model_ends_a_response(more: Any) -> None:
    """S-65: chat models stop at several ids; there is one flag for all, and the tokenizer's stays one of them."""
    sampler = on_rails("abcd", "ef")
    sampler.model.generation_config.eos_token_id = more
    found = sample(sampler, [ids_of("a"), ids_of("e")], max_new_tokens=9)
    assert [r.tolist() for r in found.responses] == [ids_of(*"bc"), ids_of("f", EOS)]
    assert found.terminated.tolist() == [True, True]


def test_logprobs_stand_at_the_response_and_are_zero_elsewhere() -> None:
    found = sample(CausalSampler(make_model(), tokenizer()), [ids_of(*"abc"), ids_of("d")], max_new_tokens=5)
    mask = found.sequences.response_mask
    assert found.logprobs is not None
    assert found.logprobs.shape == mask.shape
    assert (found.logprobs[mask] < 0).all()
    assert found.logprobs[~mask].abs().sum() == 0


# ---------------------------------------------------------------------------------------------------- stop strings


STOPS: dict[str, tuple[list[str], str, int, bool]] = {
    # prompt "a", after which come b c d e f EOS: stops, output, tokens, terminated
    "none": ([], "bcdef", 6, True),
    "one letter": (["d"], "bc", 3, True),
    "over two tokens": (["cd"], "b", 3, True),
    "over three tokens": (["bcd"], "", 3, True),
    "the first letter": (["b"], "", 1, True),
    "the last letter": (["f"], "bcde", 5, True),
    "the first of several to be completed": (["f", "cd", "e"], "b", 3, True),
    "two completed by one token": (["bcd", "d"], "", 3, True),
    "one that never comes": (["ca"], "bcdef", 6, True),
    "what only the prompt holds": (["a"], "bcdef", 6, True),
    "over the prompt's end": (["ab"], "bcdef", 6, True),
}


@pytest.mark.parametrize(("stops", "output", "tokens", "terminated"), STOPS.values(), ids=STOPS)
def test_a_stop_string_cuts_the_text_and_counts_the_token_that_completes_it(
    stops: list[str], output: str, tokens: int, terminated: bool
) -> None:
    """S-09: the ids are those that were sampled, one by one; nothing is encoded again."""
    found = sample(on_rails("abcdef"), [ids_of("a")], max_new_tokens=9, stop_sequences=stops)
    assert found.outputs == [output]
    assert found.responses[0].tolist() == ids_of(*"bcdef", EOS)[:tokens]
    assert found.terminated.tolist() == [terminated]


def test_rows_stop_each_at_its_own_place() -> None:
    sampler = on_rails("abcd", "ee")
    found = sample(sampler, [ids_of("a"), ids_of("b"), ids_of("e")], max_new_tokens=4, stop_sequences=["c", "eee"])
    assert found.outputs == ["b", "", ""]
    assert [len(r) for r in found.responses] == [2, 1, 3]
    assert found.terminated.tolist() == [True] * 3


def test_a_response_that_is_cut_before_its_stop_string_is_whole_is_not_terminated() -> None:
    found = sample(on_rails("abcdef"), [ids_of("a")], max_new_tokens=3, stop_sequences=["de"])
    assert found.outputs == ["bcd"]
    assert found.terminated.tolist() == [False]


def test_a_token_that_holds_more_than_the_stop_string_counts_whole() -> None:
    """Its text before the stop string stays, its text after is cut, its id is trained."""
    made = character_tokenizer("abcdefgh")
    made.add_tokens(["xstopy"])
    mask = torch.zeros(11, 11, dtype=torch.bool)
    mask[:, 0] = mask[0] = False
    for here, there in ((0, 1), (1, 10), (10, 2)):
        mask[here, there] = True
    mask[mask.sum(1) == 0, made.eos_token_id] = True
    sampler = CausalSampler(make_model(tiny_gpt2(11)), made, logit_mask=mask)
    found = sample(sampler, [[0]], max_new_tokens=5, stop_sequences=["stop"])
    assert found.responses[0].tolist() == [1, 10]
    assert found.outputs == ["bx"]
    assert found.terminated.tolist() == [True]


CUTS = [
    ("hello STOP rest", ["STOP"], "hello"),
    ("hello  \n STOP", ["STOP"], "hello"),
    ("  hello", ["STOP"], "  hello"),
    ("no stop  ", ["STOP"], "no stop  "),
    ("a;b,c", [",", ";"], "a"),
    ("a,b;c", [",", ";"], "a"),
    ("STOP", ["STOP"], ""),
    ("a\n\nb", ["\n\n"], "a"),
    ("stop", ["STOP"], "stop"),
    ("anything", [], "anything"),
]


@pytest.mark.parametrize(("text", "stops", "cut"), CUTS)
def test_text_ends_before_the_first_stop_string_without_blanks(text: str, stops: list[str], cut: str) -> None:
    assert cut_at_stop(text, stops) == cut


# ------------------------------------------------------------------------------------------------------ greedy

SHARED = {"vocab_size": 10, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": tiny_gpt2(10),
    "llama": tiny_llama(10),
    "qwen2": {**tiny_llama(10), "model_type": "qwen2"},
    "gpt_neox": {
        **SHARED, "model_type": "gpt_neox", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32,
        "intermediate_size": 64, "max_position_embeddings": 64,
    },
}  # fmt: skip
RAGGED = [ids_of("a"), ids_of(*"bcd"), ids_of(*"efghab"), ids_of(*"gf")]


def generated(model: PreTrainedModel, eos: int | None) -> list[list[int]]:
    """Greedy responses to RAGGED by transformers, each ending with EOS if it comes."""
    width = max(map(len, RAGGED))
    padded = torch.tensor([[9] * (width - len(query)) + query for query in RAGGED])
    real = torch.tensor([[0] * (width - len(query)) + [1] * len(query) for query in RAGGED])
    arguments = {} if eos is None else {"eos_token_id": eos}
    whole = model.generate(
        padded, attention_mask=real, do_sample=False, max_new_tokens=12, pad_token_id=9, **arguments
    ).tolist()
    responses = [row[width:] for row in whole]
    return [row[: row.index(eos) + 1] if eos in row else row for row in responses]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_responses_are_those_of_transformers_token_by_token(family: str, seed: int) -> None:
    """Ragged prompts, some rows ended by EOS while others go on."""
    model = make_model(FAMILIES[family], seed)
    eos = generated(model, None)[1][4]  # a token that does come, after a few others
    expected = generated(model, eos)
    sampler = CausalSampler(model, tokenizer(eos_token=TOKENS[eos]))
    found = sample(sampler, RAGGED, max_new_tokens=12, temperature=0)
    assert [r.tolist() for r in found.responses] == expected
    assert found.terminated.tolist() == [row[-1] == eos for row in expected]
    assert len(set(map(len, expected))) > 1, "rows that end at different times are what is hard"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_sampled_as_if_it_were_alone(family: str) -> None:
    sampler = CausalSampler(make_model(FAMILIES[family]), tokenizer())
    together = sample(sampler, RAGGED, max_new_tokens=8, temperature=0)
    for index, query in enumerate(RAGGED):
        alone = sample(sampler, [query], max_new_tokens=8, temperature=0)
        assert alone.responses[0].tolist() == together.responses[index].tolist()
        torch.testing.assert_close(
            alone.logprobs[alone.sequences.response_mask],
            together.logprobs[index, together.sequences.response_mask[index]],
            rtol=0,
            atol=1e-5,
        )


# -------------------------------------------------------------------------------------------- the distribution

DRAWS = 4000


def first_logits(model: PreTrainedModel, query: list[int]) -> list[float]:
    with torch.no_grad():
        return model(torch.tensor([query])).logits[0, -1].double().tolist()


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    masses = [math.exp(logit / temperature) for logit in logits]
    return [mass / sum(masses) for mass in masses]


def truncated(probs: list[float], top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The k likeliest, then the fewest of these whose share reaches p; written down anew."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or None]
    share, total = 0.0, sum(probs[i] for i in order)
    kept = []
    for i in order:
        if share < top_p:
            kept.append(i)
        share += probs[i] / total
    return [probs[i] / sum(probs[j] for j in kept) if i in kept else 0.0 for i in range(len(probs))]


def first_tokens(model: PreTrainedModel, query: list[int], **settings: Any) -> list[int]:
    """DRAWS first tokens after one prompt, in one batch."""
    found = sample(CausalSampler(model, tokenizer()), [query] * DRAWS, max_new_tokens=1, **settings)
    return [int(r[0]) for r in found.responses]


def chi_square(tokens: list[int], probs: list[float]) -> float:
    """Σ (observed − expected)² / expected over possible tokens; infinite if an impossible one was drawn."""
    counts = Counter(tokens)
    if any(probs[token] == 0 for token in counts):
        return math.inf
    return sum((counts[i] - len(tokens) * p) ** 2 / (len(tokens) * p) for i, p in enumerate(probs) if p)


def critical(probs: list[float]) -> float:
    """What χ² exceeds once in a thousand times (Wilson and Hilferty 1931; 3.09 is that quantile of the normal)."""
    freedom = sum(p > 0 for p in probs) - 1
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "all three": {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_drawn_with_the_probabilities_that_the_settings_name(settings: dict[str, Any]) -> None:
    model, query = make_model(spread=0.12), ids_of(*"abc")
    plain = softmax(first_logits(model, query))
    cuts = {k: v for k, v in settings.items() if k != "temperature"}
    probs = truncated(softmax(first_logits(model, query), settings.get("temperature", 1.0)), **cuts)
    assert min(DRAWS * p for p in probs if p) >= 5, "the test needs five draws of each"
    tokens = first_tokens(model, query, **settings)
    assert chi_square(tokens, probs) < critical(probs)
    if settings:
        assert chi_square(tokens, plain) > 2 * critical(plain), "and it would notice if the settings were ignored"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_logprobs_are_those_at_the_temperature_before_anything_is_cut(temperature: float) -> None:
    """S-08, F-02."""
    model, query = make_model(), ids_of(*"abc")
    whole = softmax(first_logits(model, query), temperature)
    settings = {"temperature": temperature, "top_k": 3, "top_p": 0.9, "max_new_tokens": 1}
    found = sample(CausalSampler(model, tokenizer()), [query] * 20, **settings)
    expected = [math.log(whole[int(r[0])]) for r in found.responses]
    assert found.logprobs is not None
    assert found.logprobs[:, -1].tolist() == pytest.approx(expected, abs=1e-5)


# ----------------------------------------------------------------------------------------------------- logit masks


def random_mask(*shape: int) -> Tensor:
    """About half is allowed; EOS always, so that no row is empty."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[..., TOKENS.index(EOS)] = True
    return mask


MASKS = {"[V]": random_mask(10), "[V, V]": random_mask(10, 10)}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@every_mask
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_forbidden_tokens_are_never_sampled(mask: Tensor, temperature: float) -> None:
    sampler = CausalSampler(make_model(spread=0.1), tokenizer(), logit_mask=mask)
    queries = [ids_of(letter) for letter in LETTERS] * 40
    found = sample(sampler, queries, max_new_tokens=8, temperature=temperature)
    steps = [
        (before, token)
        for query, response in zip(queries, found.responses, strict=True)
        for before, token in zip([query[-1], *response.tolist()], response.tolist(), strict=False)
    ]
    forbidden = [(before, token) for before, token in steps if not (mask if mask.dim() == 1 else mask[before])[token]]
    assert len(steps) > 500
    assert forbidden == []


@every_mask
def test_logprobs_are_renormalised_over_allowed_tokens_and_the_policy_agrees(mask: Tensor) -> None:
    model, temperature = make_model(), 0.7
    found = sample(
        CausalSampler(model, tokenizer(), logit_mask=mask), RAGGED, max_new_tokens=6, temperature=temperature
    )
    policy = CausalPolicy(model, temperature=temperature, logit_mask=mask)
    assert found.logprobs is not None
    torch.testing.assert_close(found.logprobs, policy(found.sequences).logprobs, rtol=0, atol=1e-5)
    for row, query in enumerate(RAGGED):
        token = int(found.responses[row][0])
        allowed = (mask if mask.dim() == 1 else mask[query[-1]]).tolist()
        masses = [m * a for m, a in zip(softmax(first_logits(model, query), temperature), allowed, strict=True)]
        assert float(found.logprobs[row, len(query)]) == pytest.approx(math.log(masses[token] / sum(masses)), abs=1e-5)


BAD_MASKS: dict[str, tuple[Any, str]] = {
    "floats": (torch.ones(10), r"bool tensor of shape \(10,\) or \(10, 10\).*given torch.float32 \(10,\)"),
    "ints": (torch.ones(10, dtype=torch.long), r"given torch.int64 \(10,\)"),
    "too short": (torch.ones(9, dtype=torch.bool), r"given torch.bool \(9,\)"),
    "not square": (torch.ones(10, 9, dtype=torch.bool), r"given torch.bool \(10, 9\)"),
    "3-D": (torch.ones(10, 10, 1, dtype=torch.bool), r"given torch.bool \(10, 10, 1\)"),
    "nothing allowed": (torch.zeros(10, dtype=torch.bool), "allows no token at all"),
    "nothing allowed after one": (torch.arange(10).ne(3).unsqueeze(1).expand(10, 10), "allows no token at all"),
}


@pytest.mark.parametrize(("mask", "said"), BAD_MASKS.values(), ids=BAD_MASKS)
def test_a_mask_of_another_shape_or_type_is_refused(mask: Tensor, said: str) -> None:
    model = make_model()
    for make in (
        lambda: CausalSampler(model, tokenizer(), logit_mask=mask),
        lambda: CausalPolicy(model, logit_mask=mask),
    ):
        with pytest.raises(ConfigError, match=said):
            make()


def test_a_mask_may_be_a_list() -> None:
    only_c = [token == "c" for token in TOKENS]
    found = sample(CausalSampler(make_model(), tokenizer(), logit_mask=only_c), [ids_of("a")], max_new_tokens=3)
    assert found.outputs == ["ccc"]


def test_the_trainers_mask_reaches_sampler_and_policy(tmp_path: Path) -> None:
    """With one token allowed after each, everything is certain: log-probabilities 0 on both sides."""
    honest = tiny_trainer("ppo", tmp_path)
    trainer = type(honest)(
        honest.config, tokenizer=honest.tokenizer, reward_fn=honest.reward_fn, logit_mask=rail("abc", "dd")
    )
    found = trainer.sample([{"prompt": "a"}, {"prompt": "d"}])
    assert found.outputs == ["bc", "dddddd"]
    assert found.logprobs.abs().sum() == 0
    assert trainer.behaviour(found).logprobs.abs().sum() == 0


# ------------------------------------------------------------------------------------------------------ randomness


def drawn(seed: int) -> list[list[int]]:
    found = sample(CausalSampler(make_model(), tokenizer()), RAGGED, seed=seed, max_new_tokens=8)
    return [r.tolist() for r in found.responses]


def test_a_generator_of_the_same_seed_draws_the_same_and_of_another_others() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_global_generators_are_neither_read_nor_moved() -> None:
    sampler = CausalSampler(make_model(), tokenizer())
    found = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append([r.tolist() for r in sample(sampler, RAGGED, max_new_tokens=8).responses])
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def test_greedy_responses_do_not_depend_on_the_generator() -> None:
    sampler = CausalSampler(make_model(), tokenizer())
    ends = [sample(sampler, RAGGED, seed=seed, max_new_tokens=8, temperature=0).outputs for seed in (1, 2)]
    assert ends[0] == ends[1]


def test_every_call_of_generate_draws_anew_and_a_second_trainer_draws_the_same(tmp_path: Path) -> None:
    first, second = (tiny_trainer("ppo", tmp_path / str(i)) for i in range(2))
    calls = [first.generate(["ab", "c"]).outputs for _ in range(3)]
    assert len(set(map(tuple, calls))) > 1
    assert calls == [second.generate(["ab", "c"]).outputs for _ in range(3)]


# ------------------------------------------------------------------------------------------------------------ text


def test_prompts_keep_their_text_and_ids_are_decoded() -> None:
    """S-09: text that encodes to the same ids may have been another; what was given is what is passed on."""
    sampler = on_rails("abc")
    rows: list[Row] = [{"prompt": "other  words, a"}, {"prompt": torch.tensor(ids_of(*"ha"))}, {"prompt": ids_of("a")}]
    found = sample(sampler, [ids_of("a"), ids_of(*"ha"), ids_of("a")], rows=rows, max_new_tokens=5)
    assert found.prompts == ["other  words, a", "ha", "a"]
    assert found.samples == ["other  words, abc", "habc", "abc"]
    assert found.rows == rows


@pytest.mark.parametrize(("skip", "prompt", "output"), [(True, "ha", "bc"), (False, "h<eos>a", "bc<eos>")])
def test_special_tokens_are_left_out_of_text_or_kept(skip: bool, prompt: str, output: str) -> None:
    sampler = on_rails("abc", skip_special_tokens=skip)
    found = sample(sampler, [ids_of("h", EOS, "a")], max_new_tokens=5)
    assert (found.prompts, found.outputs) == ([prompt], [output])


@pytest.mark.parametrize(("skip", "output"), [(True, "bc"), (False, "bc<eos>")])
def test_reward_functions_see_special_tokens_if_asked_to(skip: bool, output: str, tmp_path: Path) -> None:
    """S-60."""
    honest = tiny_trainer("ppo", tmp_path, rollout__skip_special_tokens=skip)
    seen: list[str] = []

    def judge(outputs: list[str], **_: Any) -> list[float]:
        seen.extend(outputs)
        return [0.0] * len(outputs)

    trainer = type(honest)(honest.config, tokenizer=honest.tokenizer, reward_fn=judge, logit_mask=rail("abc"))
    trainer.score(trainer.sample([{"prompt": "a"}]))
    assert seen == [output]


def test_a_stop_string_may_be_the_text_of_a_special_token_that_is_kept() -> None:
    sampler = on_rails("abc", skip_special_tokens=False)
    found = sample(sampler, [ids_of("a")], max_new_tokens=5, stop_sequences=[EOS])
    assert found.outputs == ["bc"]
    assert found.responses[0].tolist() == ids_of("b", "c", EOS)


# ---------------------------------------------------------------------------------------------- evaluation sweeps


class Noted:
    """The core's sampler, noting the settings it is asked for."""

    def __init__(self) -> None:
        self.settings: list[SamplingConfig] = []

    @trainkit.hookimpl
    def make_sampler(self, trainer: Any) -> Any:
        core = CausalSampler(trainer.unwrapped.model, trainer.tokenizer)

        def sampler(rows: Any, queries: Any, settings: SamplingConfig, generator: torch.Generator) -> Rollouts:
            self.settings.append(settings)
            return core(rows, queries, settings, generator)

        return sampler


SWEEP = {"temperature": [0, 0.5, 2.0], "max_new_tokens": 3}


def test_a_sweep_evaluates_every_value_under_its_own_suffix_and_rollouts_keep_the_plain_one(tmp_path: Path) -> None:
    """S-33."""
    noted = Noted()
    trainer = tiny_trainer(
        "ppo", tmp_path, callbacks=[noted], rollout__eval_kwargs=SWEEP, train__eval_interval=1, train__total_steps=1
    )
    trainer.metric_fn = lambda outputs, **_: {"letters": [float(len(o)) for o in outputs]}
    trainer.learn()
    plain = [s for s in noted.settings if s.max_new_tokens == 6]
    assert {s.temperature for s in plain} == {1.0}
    assert len(plain) == 2  # 16 rollouts by 8
    swept = [s.temperature for s in noted.settings if s.max_new_tokens == 3]
    assert swept == [0.0, 0.5, 2.0] * 2  # before the first step and after the last
    found = trainer.evaluate()
    names = ("length", "reward", "letters", "time")
    assert set(found) == {f"eval/{name}@temperature={value}" for name in names for value in ("0", "0.5", "2.0")}
    assert all(found[f"eval/length@temperature={value}"] <= 3 for value in ("0", "0.5", "2.0"))


def test_without_a_sweep_names_have_no_suffix(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, rollout__eval_kwargs={"temperature": 0})
    assert set(trainer.evaluate()) == {"eval/length", "eval/reward", "eval/time"}


def test_every_swept_sample_tells_its_setting(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Watch:
        @trainkit.hookimpl
        def on_evaluate(self, samples: list[dict[str, Any]]) -> None:
            seen.extend(samples)

    trainer = tiny_trainer("ppo", tmp_path, callbacks=[Watch()], rollout__eval_kwargs={"top_k": [1, 2]})
    trainer.evaluate()
    assert Counter(s["setting"] for s in seen) == {"top_k=1": 8, "top_k=2": 8}


def test_generating_as_in_evaluation_takes_the_first_value_of_a_sweep(tmp_path: Path) -> None:
    noted = Noted()
    trainer = tiny_trainer("ppo", tmp_path, callbacks=[noted], rollout__eval_kwargs=SWEEP)
    trainer.generate_eval(["a"])
    trainer.generate_eval(["a"], temperature=0.3)
    trainer.generate(["a"])
    assert [(s.temperature, s.max_new_tokens) for s in noted.settings] == [(0, 3), (0.3, 3), (1.0, 6)]


def test_stop_strings_are_a_list_and_no_sweep(tmp_path: Path) -> None:
    noted = Noted()
    trainer = tiny_trainer("ppo", tmp_path, callbacks=[noted], rollout__eval_kwargs={"stop_sequences": ["a", "b"]})
    assert "eval/reward" in trainer.evaluate()
    assert [s.stop_sequences for s in noted.settings] == [["a", "b"]]


# ---------------------------------------------------------------------------------------------- text by the trainer

DECODED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # settings, response, output, output with append_eos_token
    "no stop": ({}, "bcde", "bcde", "bcde"),
    "no stop, ended by EOS": ({}, f"bcd{EOS}", "bcd", f"bcd{EOS}"),
    "two stops, the second comes first": ({"stop_sequences": ["e", "c"]}, "bcde", "b", f"b{EOS}"),
    "two stops, one of which comes": ({"stop_sequences": ["h", "d"]}, "bcde", "bc", f"bc{EOS}"),
    "two stops, truncated before either": ({"stop_sequences": ["h", "gg"]}, "bcdeg", "bcdeg", "bcdeg"),
    "stopped at once": ({"stop_sequences": ["b"]}, "bcde", "", EOS),
    "stopped, then EOS": ({"stop_sequences": ["d"]}, f"bcd{EOS}", "bc", f"bc{EOS}"),
    "nothing": ({}, "", "", ""),
    "special tokens kept": ({"skip_special_tokens": False}, f"bc{EOS}", f"bc{EOS}", f"bc{EOS}"),
    "special tokens kept, truncated": ({"skip_special_tokens": False}, "bc", "bc", "bc"),
}


def as_tensor(text: str) -> Tensor:
    return torch.tensor(ids_of(*[*text.removesuffix(EOS), *([EOS] if text.endswith(EOS) else [])]), dtype=torch.long)


@pytest.mark.parametrize(("settings", "response", "output", "with_eos"), DECODED.values(), ids=DECODED)
def test_decode_cuts_outputs_at_stops_and_ends_with_eos_what_has_ended(
    settings: dict[str, Any], response: str, output: str, with_eos: str, tmp_path: Path
) -> None:
    trainer = tiny_trainer("ppo", tmp_path, **{f"rollout__{name}": value for name, value in settings.items()})
    prompts = [as_tensor("a"), as_tensor("hgf")]
    samples = [torch.cat([prompt, as_tensor(response)]) for prompt in prompts]
    assert trainer.decode(prompts, samples) == ([f"a{output}", f"hgf{output}"], ["a", "hgf"], [output] * 2)
    assert trainer.decode(prompts, samples, append_eos_token=True)[2] == [with_eos] * 2


def test_decode_finds_responses_behind_prompts_of_given_sizes(tmp_path: Path) -> None:
    """Samples whose prompts are longer than what is shown of them."""
    trainer = tiny_trainer("ppo", tmp_path)
    found = trainer.decode([as_tensor("a"), as_tensor("b")], [as_tensor("hhac"), as_tensor("bdd")], [3, 1])
    assert found == (["ac", "bdd"], ["a", "b"], ["c", "dd"])


@pytest.mark.parametrize("stops", [[], ["c"], ["ab", "d"]], ids=str)
def test_decode_gives_the_texts_that_the_sampler_gave(stops: list[str], tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, rollout__stop_sequences=stops)
    found = trainer.generate(["ab", "c", "def"] * 4)
    whole = [torch.cat(pair) for pair in zip(found.queries, found.responses, strict=True)]
    assert trainer.decode(found.queries, whole) == (found.samples, found.prompts, found.outputs)


def test_what_is_given_to_step_ended_where_the_sampler_says_it_did(tmp_path: Path) -> None:
    """S-65: by EOS, by another EOS of the model, by a stop string, or not at all."""
    honest = tiny_trainer("ppo", tmp_path, rollout__stop_sequences=["gg"])
    mask = rail("abc", "de", "hh", "gg")
    trainer = type(honest)(honest.config, tokenizer=honest.tokenizer, reward_fn=honest.reward_fn, logit_mask=mask)
    trainer.unwrapped.model.generation_config.eos_token_id = ids_of("e")
    sampled = trainer.generate(["a", "d", "g", "h"])
    assert sampled.terminated.tolist() == [True, True, True, False]
    given: list[Rollouts] = []

    class Watch:
        @trainkit.hookimpl
        def on_experience(self, rollouts: list[Rollouts]) -> None:
            given.extend(rollouts)

    trainer.hooks.register(Watch())
    trainer.step(sampled.queries, sampled.responses, [0.0, 1.0, 2.0, 3.0])
    assert given[0].terminated.tolist() == [True, True, True, False]
    assert given[0].outputs == sampled.outputs


def test_ids_and_mask_of_a_tokenizer_are_prompts_too(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    trainer.tokenizer.padding_side = "left"
    batch = trainer.tokenizer(["ab", "cdef"], return_tensors="pt", padding=True)
    found = trainer.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], temperature=0)
    assert found.prompts == ["ab", "cdef"]
    assert found.outputs == trainer.generate(["ab", "cdef"], temperature=0).outputs
