"""The sampler: what it says it drew is what it drew, from the distribution it names, and text follows from ids."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import trainkit
import trainkit.rollouts.sampler as sampler_module
from tables import table
from trainkit import default_config
from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Row, Sequences
from trainkit.errors import ConfigError, DataError, PluginError
from trainkit.models import CausalPolicy
from trainkit.rollouts import CausalSampler, assemble, cut_at_stop
from trainkit.rollouts.sampler import Generated
from trainkit.seeding import PLACE, Place, philox, placed, response_seeds, turn_seed, uniforms
from trainkit.testing import EOS, PAD, character_tokenizer, tiny_gpt2, tiny_llama
from trainkit.testing.trainers import LETTERS, tiny_trainer
from trainkit.trainer.generation import given_rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    rows = rows or [{"prompt": torch.tensor(query), PLACE: Place(at)} for at, query in enumerate(queries)]
    seeds = [turn_seed(own, 0) for own in response_seeds(seed, "test", rows, queries)]
    return sampler(rows, queries, SamplingConfig(**settings), seeds)


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


def random_mask(*shape: int) -> Tensor:
    """About half is allowed; EOS always, so that no row is empty."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[..., TOKENS.index(EOS)] = True
    return mask


MASKS = {"[V]": random_mask(10), "[V, V]": random_mask(10, 10)}

both_pads = table("pad", [PAD, EOS])


# ---------------------------------------------------------------------------------------------- masks and lengths


@both_pads
def test_masks_lengths_and_endings_are_those_of_what_was_sampled(pad: str) -> None:
    """Terminating EOS counts, also where padding has its id; being cut is not ending."""
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
    sampler = on_rails("abc", pad_token=pad)
    queries = [ids_of(EOS, "a"), ids_of("a", EOS, EOS, "a"), ids_of("a")]
    found = sample(sampler, queries, max_new_tokens=5)
    assert [r.tolist() for r in found.responses] == [ids_of("b", "c", EOS)] * 3
    assert [q.tolist() for q in found.queries] == queries
    assert found.sequences.attention_mask.sum(1).tolist() == [5, 7, 4]


@both_pads
@table("fields", [tiny_gpt2, tiny_llama])
def test_prompts_of_special_tokens_alone_are_attended_to_by_sampler_and_policy_alike(fields: Any, pad: str) -> None:
    """An unconditional prompt is EOS as BOS; its response has the same log-probabilities on both sides."""
    model = make_model(fields(len(TOKENS)))
    queries = [ids_of(EOS), ids_of(EOS, EOS, "a"), ids_of("c", EOS), ids_of("e")]
    found = sample(CausalSampler(model, tokenizer(pad_token=pad)), queries, max_new_tokens=6)
    again = CausalPolicy(model)(found.sequences).logprobs
    torch.testing.assert_close(found.logprobs, again, rtol=0, atol=1e-5)


def test_eos_as_the_last_token_that_fits_is_an_end() -> None:
    sampler = on_rails("abc")
    assert sample(sampler, [ids_of("a")], max_new_tokens=3).terminated.tolist() == [True]
    assert sample(sampler, [ids_of("a")], max_new_tokens=2).terminated.tolist() == [False]


@table("more", [TOKENS.index("c"), [TOKENS.index("c")], [TOKENS.index("h"), TOKENS.index("c")]])
def test_every_eos_of_the_model_ends_a_response(more: Any) -> None:
    """Chat models stop at several ids; there is one flag for all, and the tokenizer's stays one of them."""
    sampler = on_rails("abcd", "ef")
    sampler.model.generation_config.eos_token_id = more
    found = sample(sampler, [ids_of("a"), ids_of("e")], max_new_tokens=9)
    assert [r.tolist() for r in found.responses] == [ids_of(*"bc"), ids_of("f", EOS)]
    assert found.terminated.tolist() == [True, True]


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


@table("stops, output, tokens, terminated", STOPS.values())
def test_a_stop_string_cuts_the_text_and_counts_the_token_that_completes_it(
    stops: list[str], output: str, tokens: int, terminated: bool
) -> None:
    """The ids are those that were sampled, one by one; nothing is encoded again."""
    found = sample(on_rails("abcdef"), [ids_of("a")], max_new_tokens=9, stop_sequences=stops)
    assert found.outputs == [output]
    assert found.responses[0].tolist() == ids_of(*"bcdef", EOS)[:tokens]
    assert found.terminated.tolist() == [terminated]


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_may_be_a_special_token(skip: bool, tmp_path: Path) -> None:
    """It is not in the text that special tokens are left out of."""
    trainer = tiny_trainer("ppo", tmp_path, rollout__stop_sequences=[PAD], rollout__skip_special_tokens=skip)
    found = trainer.generate([{"prompt": "a", "seed": seed} for seed in range(40)], max_new_tokens=9)
    ids = {int(row[-1]) for row, ended in zip(found.responses, found.terminated, strict=True) if ended}
    assert ids == {TOKENS.index(EOS), TOKENS.index(PAD)}
    assert not any(TOKENS.index(PAD) in row[:-1] for row in found.responses)
    assert not any(PAD in output for output in found.outputs)
    assert given_rollouts(trainer, ["a"], [ids_of("b", PAD)]).terminated.all()
    if skip:
        with pytest.raises(ConfigError, match=r"'a<pad>' holds the special token '<pad>'.* give '<pad>' alone"):
            trainer.generate("a", stop_sequences=["a<pad>"])


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


@table("stops", [["ba"], ["é"], ["aé", "b b"], ["😀a"]])
def test_stop_strings_are_looked_for_in_the_last_tokens_alone(
    stops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters of several tokens, and special tokens without text, are no place to miss one."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted({char for word, _ in words.pre_tokenize_str("ab é😀") for char in word})
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = words, decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "additional_special_tokens": ["<other>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    allowed = torch.ones(len(made), len(made), dtype=torch.bool)
    for character in "é😀":  # after the first of its bytes come the others
        for here, there in itertools.pairwise(made.encode(character)):
            allowed[here] = torch.arange(len(made)) == there
    sampler = CausalSampler(make_model(tiny_gpt2(len(made))), made, logit_mask=allowed)
    queries, found = [made.encode(character) for character in "ab "] * 20, []
    for parts in (sampler_module.PARTS, 10**6):
        monkeypatch.setattr(sampler_module, "PARTS", parts)
        found.append(sample(sampler, queries, max_new_tokens=40, stop_sequences=stops, temperature=9.0))
    assert [each.tolist() for each in found[0].responses] == [each.tolist() for each in found[1].responses]
    assert found[0].outputs == found[1].outputs
    assert any(len(each) > 30 for each in found[0].responses)


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


@table("text, stops, cut", CUTS)
def test_text_ends_before_the_first_stop_string_without_blanks(text: str, stops: list[str], cut: str) -> None:
    assert cut_at_stop(text, stops) == cut


# ------------------------------------------------------------------------------------------------------ greedy

SHARED = {"vocab_size": 10, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA = {**tiny_llama(10), "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": tiny_gpt2(10),
    "llama": tiny_llama(10),
    "qwen2": {**tiny_llama(10), "model_type": "qwen2"},
    "qwen3": {**GEMMA, "model_type": "qwen3"},
    "gpt_neox": {
        **SHARED, "model_type": "gpt_neox", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32,
        "intermediate_size": 64, "max_position_embeddings": 64,
    },
    "mistral, every layer sliding": {**tiny_llama(10), "model_type": "mistral", "sliding_window": 4},
    "gemma": {**GEMMA, "model_type": "gemma"},
    "gemma2, sliding and capped": {
        **GEMMA, "model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    },
    "gemma3, sliding and full": {
        **GEMMA, "model_type": "gemma3_text", "sliding_window": 4, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "lfm2, convolution and attention": {
        **tiny_llama(10), "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "tie_word_embeddings": False,
    },
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {**SHARED, "model_type": "mamba", "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
    "mamba2": {
        **SHARED, "model_type": "mamba2", "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "n_groups": 1,
    },
    "recurrent_gemma": {
        **GEMMA, "model_type": "recurrent_gemma", "num_hidden_layers": 3, "attention_window_size": 4, "lru_width": 32,
    },
    "rwkv": {
        **SHARED, "model_type": "rwkv", "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2,
        "context_length": 64,
    },
}  # fmt: skip
some_families = table("family", ["gpt2", "llama", "mistral, every layer sliding", "gemma2, sliding and capped"])
"""Families whose positions, caches and heads differ."""
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


@table("family, seed", [(family, index % 3) for index, family in enumerate(FAMILIES)])
def test_greedy_responses_are_those_of_transformers_token_by_token(family: str, seed: int) -> None:
    """Ragged prompts, some rows ended by EOS while others go on."""
    model = make_model(FAMILIES[family], seed)
    eos = generated(model, None)[1][4]  # a token that does come, after a few others
    expected = generated(model, eos)
    sampler = CausalSampler(model, tokenizer(eos_token=TOKENS[eos]))
    assert sampler.fault == "", "it is run step by step"
    found = sample(sampler, RAGGED, max_new_tokens=12, temperature=0)
    assert [r.tolist() for r in found.responses] == expected
    assert found.terminated.tolist() == [row[-1] == eos for row in expected]
    assert len(set(map(len, expected))) > 1, "rows that end at different times are what is hard"


@some_families
def test_greedy_responses_under_a_repetition_penalty_are_those_of_transformers(family: str) -> None:
    """One by one, because transformers penalises padding too."""
    model = make_model(FAMILIES[family])
    found = sample(CausalSampler(model, tokenizer()), RAGGED, max_new_tokens=8, temperature=0, repetition_penalty=1.3)
    arguments = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 9, "eos_token_id": TOKENS.index(EOS)}
    for query, response in zip(RAGGED, found.responses, strict=True):
        prompt = torch.tensor([query])
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), repetition_penalty=1.3, **arguments
        ).tolist()[0]
        assert response.tolist() == whole[len(query) :]


# -------------------------------------------------------------------------------------------- the distribution

DRAWS = 4000


def first_logits(model: PreTrainedModel, query: list[int]) -> list[float]:
    with torch.no_grad():
        return model(torch.tensor([query])).logits[0, -1].double().tolist()


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    masses = [math.exp(logit / temperature) for logit in logits]
    return [mass / sum(masses) for mass in masses]


def penalised(logits: list[float], query: list[int], penalty: float) -> list[float]:
    """Tokens of the prompt made rarer (or likelier); written down anew."""
    return [z if i not in query else z * penalty if z < 0 else z / penalty for i, z in enumerate(logits)]


def truncated(probs: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """The k likeliest, of these the fewest whose share reaches p, of these those near the likeliest; anew."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or None]
    share, total = 0.0, sum(probs[i] for i in order)
    kept = []
    for i in order:
        if share < top_p:
            kept.append(i)
        share += probs[i] / total
    kept = [i for i in kept if probs[i] >= min_p * probs[order[0]]]
    return [probs[i] / sum(probs[j] for j in kept) if i in kept else 0.0 for i in range(len(probs))]


def expected_probs(
    model: PreTrainedModel, query: list[int], temperature: float = 1.0, repetition_penalty: float = 1.0, **cuts: Any
) -> list[float]:
    """The distribution of the first token under sampling settings."""
    probs = truncated(softmax(penalised(first_logits(model, query), query, repetition_penalty), temperature), **cuts)
    assert min(DRAWS * p for p in probs if p) >= 5, "the test needs five draws of each"
    return probs


def first_tokens(model: PreTrainedModel, query: list[int], **settings: Any) -> list[int]:
    """DRAWS first tokens after one prompt, in one batch."""
    made = drawn_ids(CausalSampler(model, tokenizer()), [query] * DRAWS, max_new_tokens=1, **settings)
    return [ids[0] for ids in made.ids]


def drawn_ids(sampler: CausalSampler, queries: list[list[int]], **settings: Any) -> Generated:
    """What is sampled, without its text."""
    return sampler.generate(queries, SamplingConfig(**settings), range(len(queries)))


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
    "min-p": {"min_p": 0.3},
    "penalty": {"repetition_penalty": 2.0},
    "all": {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.25, "repetition_penalty": 1.2},
}


@table("settings", SETTINGS.values())
def test_tokens_are_drawn_with_the_probabilities_that_the_settings_name(settings: dict[str, Any]) -> None:
    model, query = make_model(spread=0.12), ids_of(*"abc")
    plain, probs = softmax(first_logits(model, query)), expected_probs(model, query, **settings)
    tokens = first_tokens(model, query, **settings)
    assert chi_square(tokens, probs) < critical(probs)
    if settings:
        assert chi_square(tokens, plain) > 2 * critical(plain), "and it would notice if the settings were ignored"


@table("stop", [EOS, "h"])
def test_a_response_does_not_end_before_its_shortest_length(stop: str) -> None:
    """The next token is drawn from the other tokens; log-probabilities are those of the whole distribution."""
    model, query, end = make_model(spread=0.12), ids_of(*"abc"), TOKENS.index(stop)
    settings: dict[str, Any] = {"stop_token_ids": [TOKENS.index("h")]} if stop == "h" else {}
    ends = {end, TOKENS.index(EOS)}
    sampler = CausalSampler(model, tokenizer())
    found = drawn_ids(sampler, [query] * DRAWS, max_new_tokens=3, min_new_tokens=1, top_p=0.9, **settings)
    whole = softmax(first_logits(model, query))
    left = [0.0 if token in ends else p for token, p in enumerate(whole)]
    firsts = [response[0] for response in found.ids]
    probs = truncated([p / sum(left) for p in left], top_p=0.9)
    assert chi_square(firsts, probs) < critical(probs)
    assert truncated(whole, top_p=0.9)[end] * DRAWS > 20, "it would notice if the setting were ignored"
    assert found.logprobs is not None
    starts = torch.tensor([0, *itertools.accumulate(len(response) for response in found.ids)][:-1])
    assert found.logprobs[starts].tolist() == pytest.approx([math.log(whole[token]) for token in firsts], abs=1e-5)
    short = [response for response in found.ids if len(response) < 3]
    assert short, "some end at the second token"
    assert all(response[-1] in ends and ends.isdisjoint(response[:-1]) for response in short)
    assert all((why == "stop") == (ids[-1] in ends) for why, ids in zip(found.reasons, found.ids, strict=True))


def test_a_response_of_a_fixed_length_has_no_eos_unless_nothing_else_is_allowed() -> None:
    sampler = CausalSampler(make_model(), tokenizer())
    found = sample(sampler, RAGGED * 8, max_new_tokens=6, min_new_tokens=6)
    assert [len(response) for response in found.responses] == [6] * len(found)
    assert not bool(found.terminated.any())
    forced = sample(on_rails("abc"), [ids_of("a")], max_new_tokens=6, min_new_tokens=6)
    assert forced.responses[0].tolist() == ids_of("b", "c", EOS)
    assert bool(forced.terminated.all())


def test_a_stop_token_ends_a_response_and_belongs_to_it(tmp_path: Path) -> None:
    """As EOS: it is the last token of the response, which is terminated, also among given responses."""
    found = sample(on_rails("abcdef"), [ids_of("a")], max_new_tokens=8, stop_token_ids=ids_of("d"))
    assert (found.responses[0].tolist(), found.terminated.tolist()) == (ids_of(*"bcd"), [True])
    trainer = tiny_trainer("ppo", tmp_path, rollout__stop_token_ids=[3])
    given = given_rollouts(trainer, [[1], [1]], [[2, 3], [2, 2]])
    assert given.terminated.tolist() == [True, False]


@table(
    "settings, said",
    [
        ({"min_new_tokens": 9, "max_new_tokens": 4}, "min_new_tokens is 9 and max_new_tokens 4"),
        ({"stop_token_ids": [-1]}, "greater than or equal to 0"),
        ({"stop_token_ids": [100_000]}, r"stop_token_ids holds 100000, and the model has \d+ tokens"),
    ],
)
def test_lengths_and_stop_tokens_that_cannot_be_are_refused(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("ppo", tmp_path).generate("a", **settings)


def test_the_shortest_length_of_evaluations_is_compared_with_their_longest() -> None:
    rollout = {"max_new_tokens": 60, "eval_kwargs": {"min_new_tokens": 50}}
    assert default_config("ppo").evolve(rollout=rollout).rollout.eval_kwargs == {"min_new_tokens": 50}
    with pytest.raises(ConfigError, match="min_new_tokens is 50 and max_new_tokens 20"):
        default_config("ppo").evolve(rollout={**rollout, "max_new_tokens": 20})


@table("temperature", [0.7, 1.0, 2.0])
def test_logprobs_are_those_at_the_temperature_before_anything_is_cut(temperature: float) -> None:
    model, query = make_model(), ids_of(*"abc")
    whole = softmax(first_logits(model, query), temperature)
    cuts = {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}
    settings = {"temperature": temperature, "max_new_tokens": 1, **cuts}
    found = sample(CausalSampler(model, tokenizer()), [query] * 20, **settings)
    expected = [math.log(whole[int(r[0])]) for r in found.responses]
    assert found.logprobs is not None
    assert found.logprobs[:, -1].tolist() == pytest.approx(expected, abs=1e-5)


@table(
    "family, head_alone, masked",
    [
        *itertools.product(("gpt2", "llama"), (False, True), (False, True)),
        *((family, index % 2 == 0, index % 4 < 2) for index, family in enumerate([*FAMILIES][2:])),
    ],
)
def test_logprobs_entropies_and_states_are_those_of_the_policy(family: str, head_alone: bool, masked: bool) -> None:
    """What a trainer would ask its policy for again is what the sampler has seen: the value of a state too."""
    model, mask = make_model(FAMILIES[family]), MASKS["[V, V]"] if masked else None
    policy = CausalPolicy(model, temperature=0.7, logit_mask=mask, value_head=True)
    assert policy.value_head is not None
    torch.nn.init.normal_(policy.value_head.summary.weight)
    sampler = CausalSampler(
        model, tokenizer(), logit_mask=mask, head_alone=head_alone and policy.head_alone, hidden=True
    )
    cuts = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
    found = sample(sampler, RAGGED * 2, max_new_tokens=7, temperature=0.7, **cuts)
    real = found.sequences.response_mask
    assert found.hidden is not None
    assert (found.hidden.shape[:2], found.entropy.shape) == (real.shape, real.shape)
    assert (found.hidden[~real].abs().sum(), found.entropy[~real].abs().sum()) == (0, 0)
    expected = policy(found.sequences, entropy=True)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-5)
    values = torch.zeros_like(found.logprobs).masked_scatter(real, policy.value_head(found.hidden[real]))
    torch.testing.assert_close(values, expected.values, rtol=0, atol=1e-5)


@table("model, name, critic", [(tiny_gpt2(10), "ppo", True), (GEMMA | {"model_type": "gemma2"}, "rloo", False)])
def test_a_trainers_rollouts_hold_states_if_its_policy_has_a_value_head(
    name: str, critic: bool, model: dict[str, Any], tmp_path: Path
) -> None:
    trainer = tiny_trainer(name, tmp_path, model=model)
    found = trainer.sample([{"prompt": "a"}, {"prompt": "bcd"}])
    expected = trainer.unwrapped(found.sequences, entropy=True)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-5)
    assert (found.hidden is not None) == critic


# ----------------------------------------------------------------------------------------------------- logit masks


every_mask = table("mask", MASKS.values())


@every_mask
@table("temperature", [1.0, 0.0])
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


@table("mask, said", BAD_MASKS.values())
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


@table("fields", [None, RECURRENT["mamba"]])
def test_global_generators_are_neither_read_nor_moved(fields: Any) -> None:
    sampler = CausalSampler(make_model(fields), tokenizer())
    found = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append([r.tolist() for r in sample(sampler, RAGGED, max_new_tokens=8).responses])
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def test_every_call_of_generate_draws_anew_and_a_second_trainer_draws_the_same(tmp_path: Path) -> None:
    first, second = (tiny_trainer("ppo", tmp_path / str(i)) for i in range(2))
    calls = [first.generate(["ab", "c"]).outputs for _ in range(3)]
    assert len(set(map(tuple, calls))) > 1
    assert calls == [second.generate(["ab", "c"]).outputs for _ in range(3)]


# ------------------------------------------------------------------------------------------------ seeds of prompts


def seeded(*rows: tuple[str, int | None]) -> list[Row]:
    return [{"prompt": prompt} if seed is None else {"prompt": prompt, "seed": seed} for prompt, seed in rows]


def unending() -> CausalSampler:
    """A sampler of eight letters, each about as likely: two responses are alike only if they were drawn alike."""
    return CausalSampler(make_model(spread=0.1), tokenizer(), logit_mask=torch.arange(10) < len(LETTERS))


def drawn_with(sampler: CausalSampler, rows: list[Row], run_seed: int = 1) -> list[list[int]]:
    queries = [ids_of(*row["prompt"]) for row in rows]
    return [r.tolist() for r in sample(sampler, queries, run_seed, rows, max_new_tokens=8).responses]


def test_a_seeded_row_is_drawn_alike_whatever_stands_around_it() -> None:
    sampler = unending()
    (alone,) = drawn_with(sampler, seeded(("ab", 5)), run_seed=1)
    among = drawn_with(sampler, seeded(("c", None), ("ab", 6), ("gfe", 5), ("ab", None), ("ab", 5)), run_seed=2)
    assert among[4] == alone
    assert alone not in (among[1], among[3])


def test_rows_without_a_seed_are_drawn_as_if_no_row_had_one() -> None:
    sampler = unending()
    plain = drawn_with(sampler, seeded(("ab", None), ("c", None)))
    assert drawn_with(sampler, seeded(("ab", None), ("c", 3)))[0] == plain[0]


def test_several_rows_of_one_prompt_and_seed_differ_and_are_told_apart_by_their_order() -> None:
    sampler = unending()
    several = drawn_with(sampler, seeded(*[("ab", 5)] * 6))
    assert len(set(map(tuple, several))) == 6
    mixed = drawn_with(sampler, seeded(("c", 5), ("ab", 5), ("c", 6), ("ab", 5)))
    assert [mixed[1], mixed[3]] == several[:2]


def test_generating_with_a_seed_again_gives_the_same_and_evaluation_gives_it_too(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, rollout__batch_size=2)
    rows = seeded(("ab", 5), ("c", None), ("ab", 5), ("ab", 5))
    first, second = trainer.generate(rows), trainer.generate(rows)
    own = [0, 2, 3]
    assert [first.outputs[i] for i in own] == [second.outputs[i] for i in own]
    assert first.outputs[1] != second.outputs[1]
    assert first.rows == rows, "reward functions see the seeds that were given"
    trainer.add_eval_pipeline(rows)
    seen: list[list[str]] = []

    class Watch:
        @trainkit.hookimpl
        def on_evaluate(self, samples: list[dict[str, Any]]) -> None:
            seen.append([s["output"] for s in samples])

    trainer.hooks.register(Watch())
    trainer.evaluate()
    trainer.evaluate()
    for outputs in seen:
        assert [outputs[i] for i in own] == [first.outputs[i] for i in own], "counted over batches of two"


class Collections:
    """What was sampled in each collection: (prompt, response)s."""

    def __init__(self) -> None:
        self.found: list[list[tuple[str, str]]] = []

    @trainkit.hookimpl
    def on_experience(self, rollouts: list[Rollouts]) -> None:
        self.found.append([pair for r in rollouts for pair in zip(r.prompts, r.outputs, strict=True)])


def collected(tmp_path: Path, **changes: Any) -> list[list[tuple[str, str]]]:
    """Two collections of eight prompts, each twice and with a seed, by a model that does not move."""
    watch = Collections()
    trainer = tiny_trainer(
        "ppo", tmp_path, callbacks=[watch], optimizer__lr=1e-30, train__total_steps=9, rollout__max_new_tokens=12,
        **changes,
    )  # fmt: skip
    trainer.add_prompt_pipeline([{"prompt": p, "seed": 7} for p in ("a", "bc", "def", "ghab", "ccc", "hg", "e", "fa")])
    trainer.learn()
    return watch.found[:2]


def test_in_training_a_seeded_prompt_is_drawn_anew_in_every_epoch(tmp_path: Path) -> None:
    """The seed decides with the epoch, however a collection is divided into batches, whatever the run's own seed is."""
    found = collected(tmp_path / "a")
    of_a = [output for collection in found for prompt, output in collection if prompt == "a"]
    assert len(of_a) == len(set(of_a)) == 4
    divided = collected(tmp_path / "b", rollout__batch_size=2, train__seed=1)
    assert [sorted(c) for c in divided] == [sorted(c) for c in found]


def places(*positions: int) -> list[Row]:
    return [{"prompt": "ab", PLACE: Place(position)} for position in positions]


def test_a_response_is_drawn_from_its_rows_position_and_its_number_not_from_calls_or_other_rows() -> None:
    group = response_seeds(1, "train", places(3, 3, 4, 4), [[0, 1]] * 4)
    assert len(set(group)) == 4
    assert response_seeds(1, "train", places(4, 3, 4, 3), [[0, 1]] * 4) == [group[2], group[0], group[3], group[1]]
    seen: Any = Counter()
    parts = [response_seeds(1, "train", places(at), [[0, 1]], seen) for at in (3, 3, 4, 4)]
    assert [seed for part in parts for seed in part] == group
    assert not set(group) & set(response_seeds(1, "evaluate", places(3, 3, 4, 4), [[0, 1]] * 4))
    assert not set(group) & set(response_seeds(2, "train", places(3, 3, 4, 4), [[0, 1]] * 4))
    assert len({turn_seed(group[0], turn) for turn in range(100)}) == 100


def test_rows_that_are_not_of_the_stream_are_told_apart_by_their_prompts() -> None:
    rows, queries = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}], [[0], [1], [0]]
    found = response_seeds(1, "train", rows, queries)
    assert len(set(found)) == 3
    assert response_seeds(1, "train", rows[1:], queries[1:]) == [found[1], found[0]]


def test_rows_that_are_generated_from_have_places_unless_they_have_seeds() -> None:
    given = [{"prompt": "a", PLACE: Place(7)}, {"prompt": "b", "seed": 3}, {"prompt": "c"}]
    assert placed(given, 10) == [
        {"prompt": "a", PLACE: Place(10, row=0)},
        {"prompt": "b", "seed": 3},
        {"prompt": "c", PLACE: Place(12, row=2)},
    ]


PHILOX = [  # known answers of the authors' implementation, Random123 1.14
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@table("counter, key, words", PHILOX)
def test_philox_gives_its_authors_numbers(counter: Any, key: Any, words: Any) -> None:
    found = philox([torch.tensor(word) for word in counter], [torch.tensor(word) for word in key])
    assert tuple(int(word) for word in found) == words


def test_uniform_numbers_follow_from_their_seed_and_their_index_alone() -> None:
    seeds = torch.tensor([5, (1 << 63) - 1, 0, 5])
    found = uniforms(seeds, 40)
    assert torch.equal(found[0], found[3])
    assert torch.equal(found[:2, :7], uniforms(seeds[:2], 7))
    assert len(found[:3].unique()) == 120
    words = philox([torch.tensor(w) for w in (39, 0, 0, 0)], [torch.tensor(w) for w in (0xFFFFFFFF, 0x7FFFFFFF)])
    assert float(found[1, 39]) == int(words[0]) // 256 / 2**24


def test_uniform_numbers_are_uniform_and_independent_of_each_other() -> None:
    found = uniforms(torch.arange(20_000) * 7919, 50).double()
    assert 0 <= float(found.min()) < float(found.max()) < 1
    counts = torch.histc(found.float(), bins=64, min=0, max=1)
    expected = found.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 6 * math.sqrt(2 * 63)
    assert float(torch.corrcoef(found.T).triu(1).abs().max()) < 6 / math.sqrt(20_000), "within a response"
    neighbours = torch.corrcoef(torch.stack([found[:-1].flatten(), found[1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 6 / math.sqrt(found.numel()), "of neighbouring seeds"


BAD_SEEDS = [1.5, "1", True, -1, [1], math.nan]


@table("seed", BAD_SEEDS)
def test_a_seed_that_is_no_integer_is_refused_where_prompts_are_given(seed: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    rows = [{"prompt": "a"}, {"prompt": "b", "seed": seed}]
    for give in (trainer.add_prompt_pipeline, trainer.add_eval_pipeline, trainer.generate):
        with pytest.raises(DataError, match=r"prompt 1 has the seed .*should be a non-negative integer"):
            give(rows)


def test_a_seed_of_numpy_is_an_integer_and_none_is_no_seed() -> None:
    sampler = CausalSampler(make_model(), tokenizer())
    assert drawn_with(sampler, [{"prompt": "ab", "seed": np.int64(5)}]) == drawn_with(sampler, seeded(("ab", 5)))
    assert drawn_with(sampler, [{"prompt": "ab", "seed": None}]) == drawn_with(sampler, seeded(("ab", None)))


# ------------------------------------------------------------------------------------------ places of ended rows


@table("family, joins", [("gpt2", True), ("llama", True), ("gemma2, sliding and capped", False)])
def test_rows_that_do_not_fit_take_the_places_of_rows_that_have_ended(
    family: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses are those of all rows at a time, also where the host looks only now and then which have ended."""
    model, queries = make_model(FAMILIES[family], spread=0.2), [*RAGGED, ids_of("a")] * 3
    sampler = CausalSampler(model, tokenizer(), hidden=True)
    read, begun = type(sampler.decoder).prefill, list[int]()

    def noted(decoder: Any, queries: Any, room: int) -> Any:
        begun.append(room)
        return read(decoder, queries, room)

    monkeypatch.setattr(type(sampler.decoder), "prefill", noted)
    for stops, least in ((["ab", "c"], 0), ([], 5)):
        settings, found = SamplingConfig(max_new_tokens=12, stop_sequences=stops, min_new_tokens=least), []
        for most, every in ((None, 1), (4, 1), (4, 8), (None, 5)):
            sampler.most, begun[:] = most, []
            monkeypatch.setattr(sampler_module, "READ_EVERY", {"cpu": every})
            found.append(sampler.generate(queries, settings, range(15)))
            assert (0 in begun) == (joins and most == 4), "prompts that are read while others go on need no room"
        first = found[0]
        assert len({*map(len, first.ids)}) > 1, "they end at different times"
        for each in found[1:]:
            assert (each.ids, each.reasons) == (first.ids, first.reasons)
            for name in ("logprobs", "entropy", "hidden"):
                torch.testing.assert_close(getattr(each, name), getattr(first, name), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------- models that only their generate can run


@table("family", ["mamba", "rwkv"])
def test_models_without_a_cache_of_keys_and_values_generate_themselves_and_it_is_said(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(RECURRENT[family])
    sampler = CausalSampler(model, tokenizer(), hidden=True)
    found = sample(sampler, RAGGED, max_new_tokens=4)
    sample(sampler, RAGGED, max_new_tokens=4)
    said = [record.message for record in caplog.records if record.name == "trainkit.rollouts.sampler"]
    assert len(said) == 1
    assert said[0].startswith(f"{type(model).__name__} cannot be sampled from with a key-value cache")
    assert (found.logprobs, found.entropy, found.hidden) == (None, None, None)


@table("family", ["mamba", "recurrent_gemma"])
def test_greedy_responses_of_recurrent_models_are_those_of_whole_forward_passes(family: str) -> None:
    model = make_model(RECURRENT[family])
    found = sample(CausalSampler(model, tokenizer()), RAGGED, max_new_tokens=8, temperature=0)
    for query, response in zip(RAGGED, found.responses, strict=True):
        expected: list[int] = []
        while len(expected) < 8 and EOS not in [TOKENS[t] for t in expected]:
            logits = first_logits(model, [*query, *expected])
            expected.append(max(range(10), key=logits.__getitem__))
        assert response.tolist() == expected


@pytest.mark.slow
@table("settings", SETTINGS.values())
def test_recurrent_models_draw_with_the_probabilities_that_the_settings_name(settings: dict[str, Any]) -> None:
    """What the model's own generation config says does not count."""
    model, query = make_model(RECURRENT["mamba"], spread=0.05), ids_of(*"abc")
    model.generation_config.update(do_sample=True, top_k=2, repetition_penalty=3.0, suppress_tokens=[1, 2])
    probs = expected_probs(model, query, **settings)
    assert sum(p > 0 for p in probs) > 2
    assert chi_square(first_tokens(model, query, **settings), probs) < critical(probs)
    assert model.generation_config.top_k == 2


def test_recurrent_models_stop_and_obey_masks_and_seeds_as_others_do() -> None:
    model = make_model(RECURRENT["mamba"])
    sampler = CausalSampler(model, tokenizer(), logit_mask=rail("abcdef", "gg"))
    queries = [ids_of("a"), ids_of(*"hb"), ids_of("g"), ids_of(*"ce")]
    found = sample(sampler, queries, max_new_tokens=4, stop_sequences=["cd"])
    assert found.outputs == ["b", "", "gggg", "f"]
    assert found.terminated.tolist() == [True, True, False, True]
    assert [q.tolist() for q in found.queries] == queries
    free = CausalSampler(model, tokenizer())
    (alone,) = drawn_with(free, seeded(("ab", 5)))
    assert drawn_with(free, seeded(("ab", None), ("cd", 5), ("ab", 5)), run_seed=2)[2] == alone


@pytest.mark.slow
def test_a_recurrent_model_is_trained_and_resumed_as_others_are(tmp_path: Path) -> None:
    """Law 7, where the model's own generate samples."""
    run = {"model": RECURRENT["mamba"], "train__total_steps": 6, "train__save_interval": 3}
    whole = tiny_trainer("rloo", tmp_path / "whole", **run)
    whole.learn()
    first = tiny_trainer("rloo", tmp_path / "parts", **{**run, "train__total_steps": 3})
    first.learn()
    second = tiny_trainer("rloo", tmp_path / "parts", train__resume="auto", **run)
    second.learn()
    assert second.progress.step == 6
    for name, weight in whole.unwrapped.state_dict().items():
        assert torch.equal(weight, second.unwrapped.state_dict()[name]), name


# ------------------------------------------------------------------------------------------------------- steering


@table("family", ["gpt2", "mamba", "rwkv"])
def test_a_sampler_is_steered_by_the_states_that_tokens_are_chosen_in(family: str) -> None:
    """A table of the states decides; top_k cuts what was steered, the mask holds, log-probabilities are the model's."""
    model = make_model({**FAMILIES, **RECURRENT}[family])
    table = torch.randn(model.config.hidden_size, len(TOKENS), generator=torch.Generator().manual_seed(2))
    allowed = torch.arange(len(TOKENS)) != TOKENS.index(EOS)
    told: list[SamplingConfig] = []

    def steer(logits: Tensor, states: Tensor, settings: SamplingConfig) -> Tensor:
        told.append(settings)
        assert logits[:, ~allowed].isneginf().all()
        return logits + 1e6 * states @ table

    sampler = CausalSampler(model, tokenizer(), logit_mask=allowed, steer=steer)
    found = sample(sampler, RAGGED, max_new_tokens=4, top_k=1, temperature=0.7)
    for row, query in enumerate(RAGGED):
        for step in range(4):
            ids = torch.tensor([[*query, *found.responses[row][:step]]])
            with torch.no_grad():
                state = model.base_model(ids).last_hidden_state[0, -1]
            assert found.responses[row][step] == (state @ table).masked_fill(~allowed, -torch.inf).argmax()
    assert {settings.temperature for settings in told} == {0.7}
    assert found.hidden is None
    if found.logprobs is not None:
        logits = torch.tensor(first_logits(model, RAGGED[0])).masked_fill(~allowed, -torch.inf) / 0.7
        first = found.logprobs[0][found.sequences.response_mask[0]][0]
        torch.testing.assert_close(first, logits.log_softmax(-1)[found.responses[0][0]], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------- samplers of others


class Provides:
    """A hook that provides ``sampler``."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    @trainkit.hookimpl
    def make_sampler(self, trainer: Any) -> Any:
        return self.sampler(trainer) if isinstance(self.sampler, type(lambda: 0)) else self.sampler


def always(trainer: Any) -> Any:
    """A sampler whose every response is b, then EOS."""

    def sampler(rows: Any, queries: Any, settings: SamplingConfig, seeds: Any, purpose: str) -> Rollouts:
        return assemble(
            trainer.tokenizer,
            rows,
            queries,
            [ids_of("b", EOS)] * len(rows),
            terminated=torch.ones(len(rows), dtype=torch.bool),
            logprobs=None,
            stops=settings.stop_sequences,
            skip_special_tokens=True,
        )

    return sampler


@pytest.mark.daily(name=("rloo",))
@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_a_hooks_sampler_takes_the_place_of_the_cores_and_its_responses_are_trained(name: str, tmp_path: Path) -> None:
    watch, trained = Collections(), []
    trainer = tiny_trainer(name, tmp_path, callbacks=[Provides(always), watch])
    honest = trainer.loss

    def loss(batch: Any) -> Any:
        trained.extend(r.tolist() for r in batch.sequences.responses)
        return honest(batch)

    trainer.loss = loss  # type: ignore[method-assign]
    trainer.learn()
    assert {output for collection in watch.found for _, output in collection} == {"b"}
    assert trained == [ids_of("b", EOS)] * len(trained)
    assert len(trained) == 6 * 8


def with_a_tool(trainer: Any) -> Any:
    """A sampler that inserts two tokens of a tool into every response, and says how often it was used."""

    def sampler(rows: Any, queries: Any, settings: SamplingConfig, seeds: Any, purpose: str) -> Rollouts:
        return assemble(
            trainer.tokenizer,
            [{**row, "tool": 1.0, "asked_for": purpose} for row in rows],
            queries,
            [ids_of("b", "h", "h", "c", EOS)] * len(rows),
            sampled=[[True, False, False, True, True]] * len(rows),
            terminated=torch.ones(len(rows), dtype=torch.bool),
            logprobs=None,
            stops=settings.stop_sequences,
            skip_special_tokens=True,
        )

    return sampler


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ["ppo", "rloo", "rft"])
def test_a_hooks_sampler_may_return_rows_with_holes_and_columns_of_its_own(name: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(outputs: list[str], tool: list[float], asked_for: list[str], **_: Any) -> list[float]:
        seen.extend(zip(outputs, tool, asked_for, strict=True))
        return [float(len(seen) % 3)] * len(outputs)

    trainer = tiny_trainer(name, tmp_path, callbacks=[Provides(with_a_tool)], arguments={"reward_fn": reward})
    trainer.collect()
    for sequences in trainer.collector.collection.rollouts:
        assert [r.tolist() for r in sequences.responses] == [ids_of("b", "c", EOS)] * len(sequences)
    assert set(seen) == {("bhhc", 1.0, "train")}
    trainer.store.clear()
    trainer.learn()
    found = trainer.evaluate()
    assert found["eval/tool"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {line["asked_for"] for line in lines if line["kind"] == "evaluation"} == {"evaluate"}


def spoiled(change: Any) -> Any:
    return lambda trainer: lambda *args: change(always(trainer)(*args))


def fewer(rollouts: Rollouts) -> Rollouts:
    rows = torch.arange(len(rollouts) - 1)
    return replace(rollouts, rows=rollouts.rows[:-1], sequences=rollouts.sequences.select(rows))


WRONG: dict[str, tuple[Any, str]] = {
    "no function": (3, r"make_sampler returned 3 \(int\), which cannot be called; return a function"),
    "no rollouts": (spoiled(lambda rollouts: None), r"asked for 2 responses, and returned None \(NoneType\)"),
    "a row less": (spoiled(fewer), "returned 1 whose prompts are not those that were asked for"),
    "another order": (
        spoiled(lambda r: replace(r, sequences=r.sequences.select(torch.tensor([1, 0])))), "in their order"
    ),
    "no tokens": (
        spoiled(lambda r: replace(r, sequences=Sequences.from_lists(r.queries, [[], [1]]))), "a response without tokens"
    ),
    "a text less": (spoiled(lambda r: replace(r, outputs=r.outputs[1:])), "returned 1 in the field 'outputs'"),
    "logprobs of the responses alone": (
        spoiled(lambda r: replace(r, logprobs=torch.zeros(2, 1))), r"'logprobs' of shape \(2, 1\) for sequences"
    ),
}  # fmt: skip


@table("sampler, said", WRONG.values())
def test_a_hooks_sampler_that_returns_something_else_is_refused(sampler: Any, said: str, tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, callbacks=[Provides(sampler)])
    with pytest.raises(PluginError, match=said):
        trainer.generate(["ab", "c"])


# ---------------------------------------------------------------------------------------------------- bad settings

OUT_OF_RANGE: dict[str, tuple[float, str]] = {
    "min_p": (1.5, "less than or equal to 1"),
    "repetition_penalty": (0, "greater than 0"),
    "top_p": (0, "greater than 0"),
    "top_k": (-1, "greater than or equal to 0"),
    "temperature": (-0.1, "greater than or equal to 0"),
    "max_new_tokens": (0, "greater than or equal to 1"),
}


@table("name, value, allowed", [(k, *v) for k, v in OUT_OF_RANGE.items()])
def test_a_setting_out_of_range_is_refused_in_configs_and_calls(
    name: str, value: float, allowed: str, tmp_path: Path
) -> None:
    said = rf"{name}: .*{allowed} \(given {value} "
    with pytest.raises(ConfigError, match=f"rollout.{said}"):
        tiny_trainer("ppo", tmp_path, **{f"rollout__{name}": value})
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("ppo", tmp_path).generate("a", **{name: value})


# ------------------------------------------------------------------------------------------------------------ text


def test_prompts_keep_their_text_and_ids_are_decoded() -> None:
    """Text that encodes to the same ids may have been another; what was given is what is passed on."""
    sampler = on_rails("abc")
    rows: list[Row] = [{"prompt": "other  words, a"}, {"prompt": torch.tensor(ids_of(*"ha"))}, {"prompt": ids_of("a")}]
    found = sample(sampler, [ids_of("a"), ids_of(*"ha"), ids_of("a")], rows=rows, max_new_tokens=5)
    assert found.prompts == ["other  words, a", "ha", "a"]
    assert found.samples == ["other  words, abc", "habc", "abc"]
    assert found.rows == rows


@table("skip, prompt, output", [(True, "ha", "bc"), (False, "h<eos>a", "bc<eos>")])
def test_special_tokens_are_left_out_of_text_or_kept(skip: bool, prompt: str, output: str) -> None:
    sampler = on_rails("abc", skip_special_tokens=skip)
    found = sample(sampler, [ids_of("h", EOS, "a")], max_new_tokens=5)
    assert (found.prompts, found.outputs) == ([prompt], [output])


@table("skip, output", [(True, "bc"), (False, "bc<eos>")])
def test_reward_functions_see_special_tokens_if_asked_to(skip: bool, output: str, tmp_path: Path) -> None:
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

        def sampler(rows: Any, queries: Any, settings: SamplingConfig, seeds: Any, purpose: str) -> Rollouts:
            self.settings.append(settings)
            return core(rows, queries, settings, seeds)

        return sampler


SWEEP = {"temperature": [0, 0.5, 2.0], "max_new_tokens": 3}


def test_a_sweep_evaluates_every_value_under_its_own_suffix_and_rollouts_keep_the_plain_one(tmp_path: Path) -> None:
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


@table("settings, response, output, with_eos", DECODED.values())
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


@table("stops", [[], ["c"], ["ab", "d"]])
def test_decode_gives_the_texts_that_the_sampler_gave(stops: list[str], tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, rollout__stop_sequences=stops)
    found = trainer.generate(["ab", "c", "def"] * 4)
    whole = [torch.cat(pair) for pair in zip(found.queries, found.responses, strict=True)]
    assert trainer.decode(found.queries, whole) == (found.samples, found.prompts, found.outputs)


def test_what_is_given_to_step_ended_where_the_sampler_says_it_did(tmp_path: Path) -> None:
    """By EOS, by another EOS of the model, by a stop string, or not at all."""
    honest = tiny_trainer("ppo", tmp_path, rollout__stop_sequences=["gg"])
    mask = rail("abc", "de", "hh", "gg")
    trainer = type(honest)(honest.config, tokenizer=honest.tokenizer, reward_fn=honest.reward_fn, logit_mask=mask)
    trainer.models.build()
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


def test_ids_without_a_mask_that_begin_or_end_with_padding_are_refused(tmp_path: Path) -> None:
    """Masks never come from ids: what looks like padding may be a prompt, so somebody has to say."""
    trainer = tiny_trainer("ppo", tmp_path)
    pad = trainer.tokenizer.pad_token_id
    for padded in ([[pad, 1], [2, 3]], [[2, 3], [1, pad]]):
        with pytest.raises(DataError, match="attention_mask"):
            trainer.generate(input_ids=torch.tensor(padded))
    assert trainer.generate(input_ids=torch.tensor([[1, 2], [3, pad]]), attention_mask=torch.ones(2, 2)).prompts
    assert trainer.generate(input_ids=torch.tensor([[1, 2], [2, 3]])).prompts == ["bc", "cd"]


@table("pad_is_eos", [False, True])
def test_padding_at_the_end_of_a_batch_changes_no_decoded_output(pad_is_eos: bool, tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    tokenizer = trainer.tokenizer
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    prompts = [torch.tensor([1])] * 2
    samples = torch.tensor([[1, 2, eos, pad, pad], [1, 2, 3, 4, eos]])  # as a batch, padded on the right
    *_, outputs = trainer.decode(prompts, list(samples), append_eos_token=True)
    assert outputs == [f"c{tokenizer.eos_token}", f"cde{tokenizer.eos_token}"]
