"""Token ids as tokenizers of several families write them: spaces before texts, prefixes, turn ends, gaps."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import trainkit
from tables import table
from trainkit.config import ModelConfig, TRLConfig
from trainkit.data import PromptEncoder, preference_rows, sample_rows
from trainkit.data.pipeline import encode_apart, encode_continuation, encode_pair, encode_sample, id_count
from trainkit.errors import ConfigError, DataError, PluginError
from trainkit.functional import kl_exact
from trainkit.models import load_model
from trainkit.plugins import get_trainer
from trainkit.rollouts import Turn
from trainkit.rollouts.decoding import CausalDecoder, stepping_fault
from trainkit.rollouts.sampler import assemble, make_sampler
from trainkit.testing import character_tokenizer, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer

TURNS = [
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "it is a cat"},
    {"role": "user", "content": "and that"},
    {"role": "assistant", "content": "that is a dog"},
]
HEADERS = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL_HEADERS = HEADERS.replace("|>\n", "|>")
SPECIALS = ["<unk>", "<bos>", "<eos>", "<turn>", "<|user|>", "<|assistant|>"]
TEXTS = ["what is it and that", "it is a cat and that is a dog", "1 . a\nb"]


def metaspace(scheme: str, *, split: bool = True) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def trained(kind: str, template: str = HEADERS) -> PreTrainedTokenizerFast:
    """A tokenizer of a family, trained on a few lines."""
    family, _, model = kind.partition(" of ")
    if model == "Unigram":
        made = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        )
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIALS, show_progress=False)
    if family == "Prepend":  # Llama 2
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif family == "ByteLevel":  # RoBERTa
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = decoders.ByteLevel()
    else:
        made.pre_tokenizer = metaspace(family)
    made.train_from_iterator(TEXTS, trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    found.chat_template = template
    return found


@table(
    "kind, template",
    [
        (kind, template)
        for kind in ("first of BPE", "first of Unigram", "always of BPE", "Prepend of BPE", "ByteLevel of BPE")
        for template in (HEADERS, SPECIAL_HEADERS)
    ],
)
def test_every_turn_of_a_conversation_has_the_ids_that_it_has_in_the_whole_text(kind: str, template: str) -> None:
    """Its text is encoded as a continuation, so SFT, DPO and generation read the same ids."""
    made = trained(kind, template)
    text = made.apply_chat_template(TURNS, tokenize=False)
    whole = made(text, add_special_tokens=False)["input_ids"]
    ids, chosen = encode_sample(made, sample_rows([TURNS], tokenizer=made)[0], None)
    assert ids == whole[: len(ids)]
    outputs = made.decode([token for token, own in zip(ids, chosen, strict=True) if own])
    assert re.sub("[ ▁]", "", outputs) == "itisacat<eos>thatisadog<eos>"
    pair = {"prompt": TURNS[:3], "chosen": TURNS[3:], "rejected": TURNS[1:2]}
    assert encode_pair(made, preference_rows([pair], made)[0], None)[0][0] == ids
    asked = made.apply_chat_template(TURNS[:3], tokenize=False, add_generation_prompt=True)
    generated = PromptEncoder(made, None)(asked)
    assert generated + encode_continuation(made, "that is a dog<eos>", generated[-1]) == ids


def test_the_first_text_and_the_output_of_a_decoder_keep_their_space() -> None:
    made = trained("first of BPE")
    first = made("cat", add_special_tokens=False)["input_ids"]
    assert made.convert_ids_to_tokens(first)[0].startswith("▁")
    assert encode_sample(made, sample_rows([("cat", "dog")])[0], None)[0][: len(first)] == first
    assert encode_apart(made, "dog", "cat", None)[0][-len(first) - 1 : -1] == first
    spaced = encode_continuation(made, " cat", first[-1])
    assert made.convert_ids_to_tokens(spaced)[0].startswith("▁")


class _Talks:
    """Answers an output by text of its own, once."""

    def __init__(self, row: Any) -> None:
        self.done = False

    def reset(self) -> None: ...

    def step(self, output: str) -> Turn:
        self.done, done = True, self.done
        return Turn("" if done else "cat", 1.0, done=done)


def test_an_observation_continues_the_output_before_it(tmp_path: Path) -> None:
    made = trained("first of BPE")
    changes = {"model": tiny_gpt2(id_count(made)), "rollout__min_new_tokens": 3, "rollout__max_new_tokens": 3}
    arguments = {"tokenizer": made, "environment": _Talks, "reward_fn": None, "prompts": ["what"] * 8}
    found = tiny_trainer("ppo", tmp_path, arguments=arguments, **changes).play([{"prompt": "what is it"}])
    real = found.sequences.attention_mask & ~found.sequences.prompt_mask & ~found.sequences.response_mask
    assert "".join(made.convert_ids_to_tokens(found.sequences.input_ids[real])) == "cat"


# ------------------------------------------------------------------------------------------------- prefixes


def lettered(template: str, *, bos: str | None = "<bos>", side: str = "right") -> PreTrainedTokenizerFast:
    made = character_tokenizer("abcdef", bos_token=bos)
    made.add_special_tokens({"additional_special_tokens": ["<x>", "<y>", "<bos>", "<sep>"]})
    special = [(token, made.get_vocab()[token]) for token in ("<bos>", "<x>", "<y>", "<sep>", "<eos>")]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    made.truncation_side = side
    return made


PREFIXES = {
    "<bos> $A": ("<bos>", "<bos>"),
    "<bos> $A unnamed": (None, "<bos>"),
    "<x> <y> $A": (None, "<x><y>"),
    "<x> <y> $A <eos>": ("<bos>", "<x><y>"),
    "<bos> $A <sep>": ("<bos>", "<bos>"),
    "<bos> $A <eos> <y>": ("<bos>", "<bos>"),
}


@table("template, bos, prefix", [(name.removesuffix(" unnamed"), *case) for name, case in PREFIXES.items()])
def test_what_a_tokenizer_writes_before_a_text_stands_there_once_and_survives_truncation(
    template: str, bos: str | None, prefix: str
) -> None:
    made = lettered(template, bos=bos, side="left")
    begins = made(prefix, add_special_tokens=False)["input_ids"]
    letters = made("abcdef", add_special_tokens=False)["input_ids"]
    encode = PromptEncoder(made, None)
    assert encode("abcdef") == encode(prefix + "abcdef") == begins + letters
    assert PromptEncoder(made, 4, "truncate")("abcdef") == begins + letters[len(begins) - 4 :]
    with pytest.raises(DataError, match="which truncation keeps"):
        PromptEncoder(made, len(begins), "truncate")("abcdef")

    def sample(text: Any, limit: int | None = None) -> tuple[list[int], list[bool]]:
        return encode_sample(made, sample_rows([text])[0], limit)

    eos = [made.eos_token_id]
    assert sample("abc") == sample(prefix + "abc")  # text alone: all of it after the prefix is trained
    assert sample("abc")[0] == [*begins, *letters[:3], *eos]
    assert sample(("abcd", "ef"), 5)[0] == [*begins, *[*letters, *eos][len(begins) - 5 :]]
    for limit in (6, 5):
        pair = {"prompt": "abcd", "chosen": "e", "rejected": "f"}
        sides = encode_pair(made, pair, limit)[:2]
        assert [ids for ids, _ in sides] == [
            [*begins, *[*letters[:4], letter, *eos][len(begins) - limit :]] for letter in letters[4:]
        ]
        assert [mask[-3:] for _, mask in sides] == [[False, True, True]] * 2


# ------------------------------------------------------------------------------------------------- turn ends

GEMMA = (
    "<bos>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "<bos>{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def of_turns(template: str) -> PreTrainedTokenizerFast:
    letters = "".join(dict.fromkeys("".join(TEXTS) + "\n"))
    made = character_tokenizer(letters, bos_token="<bos>")
    made.add_special_tokens({"additional_special_tokens": ["<turn>", "<|user|>", "<|assistant|>"]})
    made.chat_template = template
    return made


@table("template", [GEMMA, MARKED, GEMMA.replace("\n{% e", "\n<eos>{% e"), MARKED.replace("\n{% e", "\n<eos>{% e")])
def test_rows_end_at_the_tokens_that_end_sampling(template: str, tmp_path: Any) -> None:
    made = of_turns(template)
    made.save_pretrained(tmp_path)
    model = GPT2LMHeadModel(GPT2Config(**tiny_gpt2(len(made), n_positions=128)))
    turn, eos = made.convert_tokens_to_ids(["<turn>", "<eos>"])
    model.generation_config = GenerationConfig(eos_token_id=[eos, turn])
    model.save_pretrained(tmp_path)
    for name in ("sft", "dpo"):
        config = TRLConfig.from_dict(
            {"method": {"name": name}, "model": {"model_path": str(tmp_path)}, "train": {"total_steps": 1}}
        )
        for live in ({}, {"model": model, "tokenizer": AutoTokenizer.from_pretrained(tmp_path)}):
            trainer = get_trainer(name)(config if not live else config.evolve(model={"model_path": None}), **live)
            if name == "sft":
                sequences = trainer.encode_samples(trainer.read_samples([TURNS]))
            else:
                pair = {"prompt": TURNS[:3], "chosen": TURNS[3:], "rejected": TURNS[1:2]}
                sequences = trainer.encode_preferences(trainer.read_samples([pair])).chosen
            trained_on = made.decode(sequences.input_ids[0][sequences.response_mask[0]])
            assert trained_on == ("it is a cat<turn>" if name == "sft" else "") + "that is a dog<turn>"
            assert int(sequences.input_ids[0][sequences.attention_mask[0]][-1]) == turn


# ------------------------------------------------------------------------------------------- ids with gaps


def with_gap() -> PreTrainedTokenizerFast:
    """Ten tokens, of which the last has the id 19."""
    vocab = {token: at for at, token in enumerate([*"abcdefg", "<eos>", "<pad>"])} | {"z": 19}
    made = Tokenizer(models.WordLevel(vocab, unk_token=None))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def test_ids_after_a_gap_are_the_tokenizers_and_have_to_be_the_models() -> None:
    made = with_gap()
    row = sample_rows([{"input_ids": [0, 19]}], tokenizer=made)[0]
    assert row["input_ids"] == [0, 19]
    with pytest.raises(DataError, match="has the id 20; ids of this tokenizer are 0 to 19"):
        sample_rows([{"input_ids": [0, 20]}], tokenizer=made)
    with pytest.raises(ConfigError, match="has 10 tokens, the largest with the id 19, and the model 12"):
        trainkit.train(model_path=tiny_gpt2(12), tokenizer=made, samples=["ab"])


# -------------------------------------------------------------------------------- heads padded beyond the tokenizer

PADDED = {"gpt2": tiny_gpt2, "llama": tiny_llama, "t5": tiny_t5, "bart": tiny_bart}


def padded(name: str, size: int = 64) -> Any:
    """A lively model whose head has 64 ids for the 10 tokens of the tokenizer."""
    starts = {"decoder_start_token_id": 9, "pad_token_id": 9} if name in ("t5", "bart") else {}
    torch.manual_seed(1)
    model = load_model(ModelConfig(model_path=PADDED[name](size, **starts)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@table("name, masked", [("gpt2", 0), ("gpt2", 2), ("llama", 1), ("t5", 0), ("bart", 2)])
def test_ids_that_are_no_tokens_are_neither_sampled_nor_have_a_probability(
    name: str, masked: int, tmp_path: Path
) -> None:
    """Sampler, policy and reference speak of one distribution, over the ids of the tokenizer."""
    mask = None
    if masked:
        mask = torch.rand((64,) * masked, generator=torch.Generator().manual_seed(2)) < 0.7
        mask[..., 8] = True
    arguments = {"model": padded(name), "logit_mask": mask}
    changes = {"model__model_path": None, "rollout__temperature": 0.7, "rollout__repetition_penalty": 1.1}
    trainer = tiny_trainer("ppo", tmp_path, arguments=arguments, **changes)
    trainer.collect()
    assert trainer.recorder.pending["policy/kl"].compute() == 0.0
    rollouts, policy = trainer.collector.collection.rollouts[0], trainer.unwrapped
    real = rollouts.sequences.response_mask
    assert int(rollouts.sequences.input_ids[real].max()) < 10
    seen: list[Any] = []

    def measure(logits: Any, others: Any, tokens: Any) -> Any:
        seen.append(logits)
        return kl_exact(logits, others)

    told = policy(rollouts.sequences, entropy=True, reference=trainer.reference, divergence=measure)
    assert all(logits.shape[1] == 10 for logits in seen)
    assert told.divergence.abs().max() < 1e-6
    torch.testing.assert_close(rollouts.logprobs, told.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(rollouts.logprobs, policy(rollouts.sequences).logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(rollouts.entropy, told.entropy, rtol=0, atol=1e-5)
    masses = torch.cat(seen).softmax(-1)
    expected = -(masses * masses.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(told.entropy[real], expected, rtol=0, atol=1e-5)
    policy(rollouts.sequences).logprobs.sum().backward()
    head = policy.model.get_output_embeddings().weight
    tied = head is policy.model.get_input_embeddings().weight
    assert tied or head.grad[10:].abs().max() == 0


def test_a_response_of_ids_that_are_no_tokens_is_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, model=tiny_gpt2(64), train__batch_size=1)
    with pytest.raises(DataError, match="ids outside the tokenizer's 10 ids, or the model's vocabulary of 64"):
        trainer.step([torch.tensor([63])], [torch.tensor([10])], [1.0])


class _Sampler:
    @trainkit.hookimpl
    def make_sampler(self, trainer: Any) -> Any:
        def sampler(rows: Any, queries: Any, *_: Any) -> Any:
            ended = torch.ones(len(rows), dtype=torch.bool)
            return assemble(
                trainer.tokenizer, rows, queries, [[11]] * len(rows), terminated=ended, logprobs=None, stops=[],
                skip_special_tokens=True,
            )  # fmt: skip

        return sampler


def test_a_sampler_of_a_hook_that_returns_ids_that_are_no_tokens_is_named(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, model=tiny_gpt2(64), callbacks=[_Sampler()])
    with pytest.raises(PluginError, match="returned ids outside the vocabulary of 10"):
        trainer.collect()


@pytest.mark.slow
def test_every_algorithm_trains_with_a_padded_head(tmp_path: Path) -> None:
    """Also those that steer, and those that compare distributions."""
    for name in ("ilql", "distill", "sft", "dpo", "grpo"):
        trainer = tiny_trainer(name, tmp_path / name, model=tiny_gpt2(64))
        trainer.learn()
        assert max(int(ids.max()) for ids in trainer.generate(["a"] * 8).responses) < 10


# --------------------------------------------------------------------------------------- the probe of the cache


@table("bad, tied, offset", [(10, False, math.nan), (64, True, 1000.0), (64, False, 1000.0)])
@torch.no_grad()
def test_a_model_keeps_its_cache_though_some_tokens_are_untrained_or_rounding_is_large(
    bad: int, tied: bool, offset: float
) -> None:
    """Cached steps are as near to the exact logits as full passes are, where the normalisation cancels an offset."""
    made = character_tokenizer("".join(map(chr, range(100, 152))))
    made.add_special_tokens({"additional_special_tokens": [f"<{at}>" for at in range(10)]})
    torch.manual_seed(1)
    model = load_model(ModelConfig(model_path=tiny_gpt2(64, n_layer=4, tie_word_embeddings=tied)))
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    model.get_input_embeddings().weight[64 - bad :] += offset
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    assert not make_sampler(model, made).fault
    after = model.state_dict()
    assert all(
        after[name].data_ptr() == at and torch.equal(after[name].nan_to_num(), own.nan_to_num())
        for name, (at, own) in before.items()
    )


class _Forgetful(CausalDecoder):
    """A decoder whose steps do not see the first token."""

    def next(self, active: Any) -> Any:
        active.real[:, 0], active.padded = False, True
        return super().next(active)


@torch.no_grad()
def test_a_cache_that_gives_other_logits_is_found_whatever_the_rounding() -> None:
    for offset in (0, 1000):
        model = padded("gpt2")
        model.get_input_embeddings().weight += offset
        assert "cached steps differ" in stepping_fault(_Forgetful(model, 0, True, False), range(64))


@table("name", ["grpo", "rloo", "ppo"])
def test_a_prompt_is_encoded_once_for_all_its_responses_and_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = list[str](), PromptEncoder._encode
    monkeypatch.setattr(PromptEncoder, "_encode", lambda self, *args: encoded.append(args[0]) or encode(self, *args))
    trainer = tiny_trainer(name, tmp_path, train__total_steps=4)
    trainer.learn()
    assert sorted(encoded) == sorted({row["prompt"] for row in trainer.pipeline.rows})
