"""Scores for texts: read where the mask says, and given to a run as its reward function."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import trainkit
from tables import table
from trainkit.config import ModelConfig
from trainkit.data import Sequences, batches
from trainkit.errors import ConfigError, DataError
from trainkit.models import RewardModel, Scorer, load_scorer
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama
from trainkit.testing.trainers import LETTERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXTS = ["abc", "h", "", "bbbbbbbb", "abcabcabcabc", "de"]
OPT = {
    "model_type": "opt", "vocab_size": 10, "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "vocab_size": 10, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
BERT = {
    "model_type": "bert", "vocab_size": 10, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip


def classifier(fields: dict[str, Any], **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(**fields, num_labels=1, **changes)
    ).eval()


def scorer(fields: dict[str, Any]) -> Scorer:
    torch.manual_seed(0)
    return Scorer(AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval())


def reward_model(fields: dict[str, Any] | None = None, **options: Any) -> RewardModel:
    tokenizer = options.pop("tokenizer", None) or character_tokenizer(LETTERS)
    return RewardModel(scorer(fields or tiny_gpt2(10)), tokenizer, **options)


def padded(rows: list[list[int]], side: str, fill: int) -> Sequences:
    """The rows, padded on one side with ``fill``."""
    if side == "left":
        return padded([row[::-1] for row in rows], "right", fill).map(lambda x: x.flip(1))
    return Sequences.from_lists(rows, [[]] * len(rows), fill)


# ---------------------------------------------------------------------------------------------------------- scorer


@table("made", [scorer, lambda fields: Scorer(classifier(fields))])
@table("fields", [tiny_gpt2(10), tiny_llama(10), OPT])
@table("side", ["right", "left"])
def test_the_score_is_read_at_the_last_attended_token_whatever_padding_holds(made: Any, fields: Any, side: str) -> None:
    """The EOS that ends a text has the id that fills padding, and stands within a text too."""
    model, eos = made(fields), 8
    rows = [[1, 2, eos], [3, eos, 4, 5, 6, eos], [7]]
    alone = torch.cat([model(padded([row], "right", 0)) for row in rows])
    together = [model(padded(rows, side, fill)) for fill in (eos, 0)]
    assert alone.std() > 1e-3
    for scores in together:
        assert scores.shape == (3,)
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)


@table("fields", [tiny_gpt2(10), tiny_llama(10), BERT])
def test_a_classifiers_score_is_its_own(fields: dict[str, Any]) -> None:
    model = classifier(fields)
    row = torch.tensor([[1, 2, 3, 4]])
    mask = torch.ones_like(row, dtype=torch.bool)
    found = Scorer(model)(Sequences(row, mask, ~mask))
    torch.testing.assert_close(found, model(row).logits[:, 0], rtol=0, atol=1e-5)


@table("made", [scorer, lambda fields: Scorer(classifier(fields))])
def test_scores_are_not_rounded_by_autocast(made: Any) -> None:
    model, sequences = made(tiny_llama(10)), padded([[1, 2, 3], [4, 5]], "right", 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(sequences)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores.bfloat16().float(), scores)


@table("pad", range(4))
@table("fields", [tiny_gpt2(10), tiny_llama(10)])
def test_a_classifier_is_read_where_the_mask_says_whatever_its_padding_token_is(fields: Any, pad: int) -> None:
    """The padding token ends the text, where transformers looks for the last token before it."""
    model = classifier({**fields, "pad_token_id": pad})
    ids = torch.tensor([[4, 5, pad]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        expected = model.score(model.base_model(ids).last_hidden_state[:, -1])[:, 0]
        found = Scorer(model)(Sequences(ids, mask, ~mask))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_head_of_words_is_not_trained_with_scores_unless_it_is_the_embeddings() -> None:
    assert not scorer(tiny_llama(10)).model.lm_head.weight.requires_grad
    assert scorer(tiny_gpt2(10)).model.lm_head.weight.requires_grad


def test_a_classifier_with_several_labels_is_refused() -> None:
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**tiny_gpt2(10), num_labels=3))
    with pytest.raises(ConfigError, match="has 3 labels, and a reward is one number"):
        Scorer(model)


def test_a_classifier_is_no_policy(tmp_path: Path) -> None:
    classifier(tiny_gpt2(10)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GPT2ForSequenceClassification gives tokens no probabilities"):
        trainkit.train(str(tmp_path), samples=["ab"], tokenizer=character_tokenizer(LETTERS),
                       config={"train": {"run_dir": str(tmp_path / "run")}})  # fmt: skip


def test_beside_an_adapter_a_classifiers_head_is_trained(tmp_path: Path) -> None:
    classifier(tiny_llama(10)).save_pretrained(tmp_path)
    model = load_scorer(ModelConfig(model_path=str(tmp_path), peft_config={"r": 2}))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("score" in name for name in trained)
    assert all("score" in name or "lora_" in name for name in trained)


# ---------------------------------------------------------------------------------------------------- reward model


def test_scores_depend_neither_on_order_nor_on_batch_mates() -> None:
    model = reward_model()
    found = model(TEXTS)
    assert len(set(found)) == len(TEXTS)
    assert model(TEXTS[::-1]) == pytest.approx(found[::-1], abs=1e-5)
    assert reward_model(batch_size=1)(TEXTS) == pytest.approx(found, abs=1e-5)
    assert all(type(score) is float for score in found)


def test_a_text_is_read_as_one_and_ends_in_eos_once() -> None:
    model, eos = reward_model(), 8
    assert model._encode(["ab", "ab<eos>", ""], None, None) == [[0, 1, eos], [0, 1, eos], [eos]]
    assert model(prompts=["a", "ab"], outputs=["bc", "c"]) == model(["abc", "abc"])


def test_the_beginning_token_stands_once_and_stays() -> None:
    tokenizer = character_tokenizer(LETTERS, bos_token="<bos>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 10)])
    model = reward_model(tiny_gpt2(11), tokenizer=tokenizer)
    assert model._encode(["ab", "<bos>ab"], None, None) == [[10, 0, 1, 8]] * 2
    short = reward_model(tiny_gpt2(11), tokenizer=tokenizer, max_length=4)
    assert short(["hhhhab", "ab"]) == pytest.approx(model(["ab"]) * 2, abs=1e-5)


def test_long_texts_lose_their_beginning_and_are_counted() -> None:
    model = reward_model(max_length=4)
    assert model(["hhhhabc", "ggabc", "abc"]) == pytest.approx(reward_model()(["abc"]) * 3, abs=1e-5)
    assert model.truncated == 2
    assert reward_model().limit == 64, "the model's context"


def test_a_classifier_that_reads_its_first_token_keeps_it() -> None:
    model = RewardModel(Scorer(classifier(BERT)), character_tokenizer(LETTERS), max_length=4)
    assert not model.scorer.reads_last
    assert model._fit([0, 1, 2, 3, 4, 5]) == [0, 3, 4, 5]


def test_asking_leaves_no_gradient_and_no_dropout() -> None:
    fields = tiny_gpt2(10, resid_pdrop=0.5, embd_pdrop=0.5)
    model = reward_model(fields)
    model.scorer.train()
    assert model(TEXTS) == model(TEXTS)
    assert not model.scorer.training


def test_it_can_be_pickled() -> None:
    model = reward_model()
    assert pickle.loads(pickle.dumps(model))(TEXTS) == model(TEXTS)


@table("fields", [tiny_gpt2(10), tiny_llama(10), OPT, MAMBA])
def test_it_is_saved_and_loaded(fields: dict[str, Any], tmp_path: Path) -> None:
    """Also where transformers has no classifier of the architecture."""
    model = reward_model(fields)
    path = model.save_pretrained(tmp_path / "saved")
    assert (path / "heads.safetensors").exists() is (fields is MAMBA)
    assert RewardModel.from_pretrained(path)(TEXTS) == pytest.approx(model(TEXTS), abs=1e-5)


@table("fields", [tiny_gpt2(10), tiny_llama(10)])
def test_what_is_saved_is_a_classifier_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    model = reward_model(fields)
    path = model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(
        [text + tokenizer.eos_token for text in TEXTS], padding=True, padding_side="right", return_tensors="pt"
    )
    own = loaded(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert own.tolist() == pytest.approx(model(TEXTS), abs=1e-5)
    live = RewardModel.from_pretrained(loaded, tokenizer)
    assert live(TEXTS) == pytest.approx(model(TEXTS), abs=1e-5)


def test_where_eos_is_padding_none_is_set_so_that_transformers_cannot_mistake_it(tmp_path: Path) -> None:
    model = reward_model(tiny_gpt2(9), tokenizer=character_tokenizer(LETTERS, pad_token="<eos>"))
    loaded = AutoModelForSequenceClassification.from_pretrained(model.save_pretrained(tmp_path))
    one = loaded(torch.tensor([model._encode(["abc"], None, None)[0]])).logits
    assert one.item() == pytest.approx(model(["abc"])[0], abs=1e-5)
    with pytest.raises(ValueError, match="no padding token is defined"):
        loaded(torch.zeros(2, 3, dtype=torch.long))


def test_a_language_model_without_a_head_is_refused(tmp_path: Path) -> None:
    scorer(tiny_gpt2(10)).model.save_pretrained(tmp_path)
    character_tokenizer(LETTERS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a language model without a head for scores"):
        RewardModel.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="without a tokenizer"):
        RewardModel.from_pretrained(classifier(tiny_gpt2(10)))


def test_what_is_no_reward_model_is_an_error_of_this_door(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"^the model of the reward model .* cannot be loaded") as raised:
            RewardModel.from_pretrained(path)
        assert "model_path" not in str(raised.value)
    classifier(tiny_llama(10)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)^the tokenizer of the reward model .* or tokenizer="):
        RewardModel.from_pretrained(tmp_path)
    assert RewardModel.from_pretrained(tmp_path, character_tokenizer(LETTERS))(["ab"])


@table(
    "given, said",
    [
        ({}, "reads samples, or prompts and outputs; give"),
        ({"prompts": ["a"]}, "reads samples, or prompts and outputs; give"),
        ({"outputs": ["a"]}, "reads samples, or prompts and outputs; give"),
        ({"samples": "abc"}, r"samples should be a list of strings; given 'abc' \(str\)"),
        ({"samples": 3}, r"samples should be a list of strings; given 3 \(int\)"),
        ({"prompts": "ab", "outputs": ["a", "b"]}, "prompts should be a list of strings; given 'ab'"),
        ({"samples": ["a", 3]}, r"samples\[1\] should be a string; given 3 \(int\)"),
        ({"prompts": ["a", "b"], "outputs": ["c"]}, "2 prompts and 1 outputs; give one output per prompt"),
    ],
)
def test_texts_of_another_form_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        reward_model()(**given)


def test_chats_go_through_the_template_of_the_models_own_tokenizer(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.chat_template = "{% for m in messages %}{{ 'g' if m.role == 'user' else 'h' }}{{ m.content }}{% endfor %}"
    classifier(tiny_gpt2(10)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = RewardModel.from_pretrained(tmp_path)
    assert model.chat, "it comes from elsewhere and has a template"
    plain = RewardModel.from_pretrained(tmp_path, chat=False)
    assert tokenizer.decode(model._encode(None, ["ab"], ["c"])[0]) == "gabhc"
    assert model(prompts=["ab"], outputs=["c"]) != plain(prompts=["ab"], outputs=["c"])
    with pytest.raises(DataError, match="give both"):
        model(["abc"])
    again = RewardModel.from_pretrained(model.save_pretrained(tmp_path / "again"))
    assert again.chat
    assert not RewardModel.from_pretrained(plain.save_pretrained(tmp_path / "plain")).chat
    with pytest.raises(ConfigError, match="no chat template"):
        reward_model(chat=True)


def test_it_is_a_reward_function_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """The policy has other ids for the same letters."""
    path = reward_model().save_pretrained(tmp_path / "saved")
    policy_tokenizer = character_tokenizer(LETTERS[::-1])
    trainer = trainkit.train(
        tiny_gpt2(len(policy_tokenizer)),
        reward_fn=RewardModel.from_pretrained(path),
        prompts=[{"prompt": "ab", "column": 1}, {"prompt": "c", "column": 2}],
        tokenizer=policy_tokenizer,
        config={
            "rollout": {"max_new_tokens": 4, "num_rollouts": 8},
            "train": {"batch_size": 8, "total_steps": 1, "run_dir": str(tmp_path / "run"), "trackers": []},
        },
    )
    texts = trainer.collector.collection.rollouts[0].samples
    expected = sum(RewardModel.from_pretrained(path)(texts)) / len(texts)
    rewards = trainer.score(trainer.collector.collection.rollouts[0])
    assert float(rewards.mean()) == pytest.approx(expected, abs=1e-5)


@table("shared", [False, True])
def test_rows_that_are_scored_by_length_have_the_scores_they_have_together(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scorer(tiny_llama(10))
    model.can_share_prompts = model.shares_prompts = shared
    lengths = [3, 9, 3, 12, 4, 12, 1, 8]
    ids = torch.randint(0, 10, (8, 14), generator=torch.Generator().manual_seed(1)).tolist()
    outputs = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    rows = Sequences.from_lists([[1, 2 + index // 2] for index in range(8)], outputs)
    passes, found = list[int](), []
    model.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    for cost in (10**6, 0):
        monkeypatch.setitem(batches.PASS_COST, "cpu", batches.PassCost(cost))
        model.zero_grad()
        scores = model(rows)
        (scores * torch.arange(8)).sum().backward()
        found.append([scores, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        passes.append(0)
    assert "".join(map(str, passes)).split("0")[:2] == (["11", "1" * 7] if shared else ["1", "1" * 6])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
