"""Encoder-decoders behind the faces that causal models have: policy, sampler, laws, freezing, adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedTokenizerFast

import trainkit
from tables import table
from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Sequences, batches
from trainkit.errors import ConfigError, DataError
from trainkit.functional import entropy_from_logits
from trainkit.models import CausalPolicy, Reference, Seq2SeqPolicy, ValueHead, make_policy
from trainkit.models.trunk import freeze_below
from trainkit.rollouts import Seq2SeqSampler
from trainkit.testing import EOS, PAD, character_tokenizer, tiny_bart, tiny_gpt2, tiny_t5
from trainkit.testing.trainers import LETTERS, tiny_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V = 10
TOKENS = [*LETTERS, EOS, PAD]
NAMES = ("ppo", "rloo", "sft")
ONLINE = ("ppo", "rloo")
SHAPES: dict[str, dict[str, Any]] = {
    "t5": tiny_t5(V),
    "t5 unscaled": tiny_t5(V, tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
    "t5 shallow decoder": tiny_t5(V, num_decoder_layers=1),
    "bart": tiny_bart(V),
    "bart shallow encoder": tiny_bart(V, encoder_layers=1, decoder_layers=3),
}
QUERIES = [[1, 2], [3], [4, 8, 9, 6], [3], [8]]  # with EOS and padding within, one of them twice
RESPONSES = [[7, 0, 9], [1, 2, 3, 4], [5], [9, 9], [8]]
every_name = pytest.mark.parametrize("name", NAMES)
both = table("fields", [tiny_t5(V), tiny_bart(V)])
one_of_each = table("name, fields", [("ppo", tiny_t5(V)), ("rloo", tiny_bart(V))])


def make(fields: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**fields)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # so that tokens are of unlike probability
    model.get_input_embeddings().weight.data[V - 2] *= 2  # and some responses end
    return model


def own_logits(model: PreTrainedModel, query: Tensor, response: Tensor, prefix: list[int]) -> Tensor:
    """The model's own logits [R, V] for each response token of one row that stands alone: no padding, no masks."""
    read = torch.tensor([[*prefix, *response[:-1].tolist()]])
    return model(input_ids=query.unsqueeze(0), decoder_input_ids=read).logits[0, len(prefix) - 1 :]


class Echo(torch.nn.Module):
    """A head that says which token it was given, and a number for the state."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        return {"token": tokens.float(), "state": hidden.sum(-1)}


# ------------------------------------------------------------------------------------------------------- the policy


@table("shape, chunk", list(zip(SHAPES, (3 * V, 2**22, 3 * V, 3 * V, 2**22), strict=True)))
def test_every_response_token_is_an_action_with_the_models_own_odds(
    shape: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first token, row by row, and gradients too; EOS and padding are ids like others."""
    monkeypatch.setattr("trainkit.models.policy.CHUNK", chunk)
    policy = make_policy(make(SHAPES[shape]), temperature=0.7, value_head=True, head=Echo()).eval()
    assert isinstance(policy, Seq2SeqPolicy)
    assert policy.head_alone
    torch.nn.init.normal_(policy.value_head.summary.weight)
    sequences = Sequences.from_lists(QUERIES, RESPONSES)
    said = policy(sequences, entropy=True)
    (said.logprobs.sum() + said.entropy.sum()).backward()
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.zero_grad()
    total = torch.zeros(())
    for row, (query, response) in enumerate(zip(sequences.queries, sequences.responses, strict=True)):
        at = sequences.response_mask[row]
        logits = own_logits(policy.model, query, response, policy.prefix) / 0.7
        logprobs = logits.log_softmax(-1).gather(1, response.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(said.logprobs[row, at], logprobs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(said.entropy[row, at], entropy_from_logits(logits), rtol=1e-4, atol=1e-5)
        assert said.head["token"][row, at].tolist() == response.tolist()
        total = total + logprobs.sum() + entropy_from_logits(logits).sum()
    assert (said.logprobs[~sequences.response_mask] == 0).all()
    assert (said.values[sequences.response_mask] != 0).all()
    total.backward()
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_a_model_that_adds_to_its_logits_is_run_whole() -> None:
    """BART's bias over the vocabulary, which Marian's and mBART's models use."""
    model = make(tiny_bart(V))
    model.final_logits_bias.normal_()
    policy = make_policy(model, value_head=True)
    assert not policy.head_alone
    sequences = Sequences.from_lists(QUERIES, RESPONSES)
    said = policy(sequences)
    for row, (query, response) in enumerate(zip(sequences.queries, sequences.responses, strict=True)):
        logprobs = own_logits(model, query, response, policy.prefix).log_softmax(-1)
        expected = logprobs.gather(1, response.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(said.logprobs[row, sequences.response_mask[row]], expected, rtol=1e-4, atol=1e-5)


@both
def test_rows_divided_by_length_say_what_they_say_together(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, sequences = make_policy(make(fields), value_head=True), Sequences.from_lists(QUERIES, RESPONSES)
    together = policy(sequences, entropy=True)
    monkeypatch.setitem(batches.PASS_COST, "cpu", batches.PassCost(0))
    assert len(sequences.buckets(0)) > 2
    for one, other in zip(together[:3], policy(sequences, entropy=True)[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@both
def test_a_mask_by_the_previous_token_begins_with_the_decoders_start(fields: dict[str, Any]) -> None:
    """Not with the prompt's last token, which the decoder never reads."""
    start = fields["decoder_start_token_id"]
    mask = torch.ones(V, V, dtype=torch.bool)
    mask[start] = torch.arange(V) == 7
    policy = make_policy(make(fields), logit_mask=mask)
    said = policy(Sequences.from_lists([[1, 2], [start]], [[7, 1], [7, 3]]))
    assert said.logprobs[0, 2] == said.logprobs[1, 1] == 0.0, "the only token allowed is certain"
    assert said.logprobs[0, 3] < 0


def test_the_architecture_picks_the_policy_and_the_other_is_refused() -> None:
    t5, gpt2 = make(tiny_t5(V)), trainkit.models.load_model(trainkit.config.ModelConfig(model_path=tiny_gpt2(V)))
    assert isinstance(make_policy(gpt2), CausalPolicy)
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration is an encoder-decoder.*make_policy"):
        CausalPolicy(t5)
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel is no encoder-decoder.*make_policy"):
        Seq2SeqPolicy(gpt2)


def test_a_model_without_a_decoder_start_is_an_error() -> None:
    model = make(tiny_t5(V))
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(ConfigError, match=r"which token its decoder starts with; set decoder_start_token_id"):
        make_policy(model)


# ------------------------------------------------------------------------------------------------------ the sampler


def sample(model: PreTrainedModel, queries: list[list[int]], sampler: Any = None, **settings: Any) -> Rollouts:
    sampler = sampler or Seq2SeqSampler(model, character_tokenizer(LETTERS), hidden=True)
    rows: list[Any] = [{"prompt": torch.tensor(query)} for query in queries]
    return sampler(rows, queries, SamplingConfig(**{"max_new_tokens": 8, **settings}), range(len(rows)))


def own_generate(model: PreTrainedModel, query: list[int], **settings: Any) -> list[int]:
    """transformers' own greedy search, after the decoder's prefix."""
    model.generation_config.update(eos_token_id=V - 2)
    ids = model.generate(
        torch.tensor([query]),
        generation_config=GenerationConfig(
            max_new_tokens=settings.pop("max_new_tokens", 8), do_sample=False, eos_token_id=V - 2, **settings
        ),
    )
    return ids[0].tolist()


@table("shape, penalty", list(zip(SHAPES, (1.7, 1.0, 1.7, 1.0, 1.7), strict=True)))
def test_greedy_responses_are_those_of_transformers(shape: str, penalty: float) -> None:
    """The penalty is for what the decoder has, as in transformers; what the encoder reads is not penalised."""
    model = make(SHAPES[shape])
    found = sample(model, QUERIES, temperature=0, repetition_penalty=penalty)
    expected = [own_generate(model, query, repetition_penalty=penalty)[1:] for query in QUERIES]
    assert [response.tolist() for response in found.responses] == expected
    assert len({len(response) for response in expected}) > 1 or penalty == 1.0, "some end, some are cut"


def test_a_first_token_that_the_model_forces_is_read_and_is_no_action() -> None:
    model = make(tiny_bart(V))
    model.generation_config.forced_bos_token_id = 3
    found = sample(model, QUERIES, temperature=0)
    for query, response in zip(QUERIES, found.responses, strict=True):
        assert [V - 2, 3, *response.tolist()] == own_generate(model, query, max_new_tokens=9)
    policy = make_policy(model)
    assert policy.prefix == [V - 2, 3]
    torch.testing.assert_close(found.logprobs, policy(found.sequences).logprobs, rtol=0, atol=1e-5)


@table("shape, masked", list(zip(SHAPES, (True, False, True, False, True), strict=True)))
def test_what_the_sampler_has_seen_is_what_the_policy_says(shape: str, masked: bool) -> None:
    mask = torch.rand(V, V, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[:, V - 2] = True
    model = make(SHAPES[shape])
    policy = make_policy(model, temperature=0.7, logit_mask=mask if masked else None, value_head=True)
    assert isinstance(policy.value_head, ValueHead)
    torch.nn.init.normal_(policy.value_head.summary.weight)
    sampler = Seq2SeqSampler(model, character_tokenizer(LETTERS), logit_mask=mask if masked else None, hidden=True)
    assert not sampler.fault
    found = sample(model, QUERIES * 4, sampler, temperature=0.7, top_k=5, repetition_penalty=1.1)
    assert len({len(response) for response in found.responses}) > 2, "rows leave at different times"
    real, said = found.sequences.response_mask, policy(found.sequences, entropy=True)
    torch.testing.assert_close(found.logprobs, said.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.entropy, said.entropy, rtol=0, atol=2e-5)
    values = torch.zeros_like(said.values).masked_scatter(real, policy.value_head(found.hidden[real]))
    torch.testing.assert_close(values, said.values, rtol=1e-4, atol=1e-4)


@both
def test_the_encoder_reads_each_distinct_prompt_once_whatever_is_sampled(fields: dict[str, Any]) -> None:
    model, read = make(fields), []
    sampler = Seq2SeqSampler(model, character_tokenizer(LETTERS))
    model.get_encoder().register_forward_hook(
        lambda _, args, kwargs, __: read.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = sample(model, QUERIES * 3, sampler)
    assert read == [4]
    assert [query.tolist() for query in found.queries] == QUERIES * 3


@both
def test_the_models_own_generate_runs_it_where_stepping_would_not(fields: dict[str, Any]) -> None:
    model = make(fields)
    stepping, falling = (Seq2SeqSampler(model, character_tokenizer(LETTERS)) for _ in range(2))
    falling.fault = "for the test"
    one, other = (sample(model, QUERIES, s, temperature=0.9, top_k=6) for s in (stepping, falling))
    assert [r.tolist() for r in one.responses] == [r.tolist() for r in other.responses]
    assert other.logprobs is None


@both
def test_prompts_stop_strings_and_endings_are_read_in_the_response_alone(fields: dict[str, Any]) -> None:
    """EOS within a prompt ends nothing; a stop string in the prompt stops nothing."""
    model = make(fields)
    mask = torch.zeros(V, V, dtype=torch.bool)
    for here, there in [(V - 2, 0), (V - 1, 0), (0, 1), (1, 2), (2, 3), (3, V - 2)]:
        mask[here, there] = True
    mask[4:8, V - 2] = True
    sampler = Seq2SeqSampler(model, character_tokenizer(LETTERS), logit_mask=mask)
    stopped = sample(model, [[8, 1, 2], [1, 2]], sampler, stop_sequences=["bc"])
    assert (stopped.outputs, stopped.terminated.tolist()) == (["a", "a"], [True, True])
    ended = sample(model, [[8, 1, 2], [1, 2]], sampler)
    assert [r.tolist() for r in ended.responses] == [[0, 1, 2, 3, V - 2]] * 2
    assert ended.terminated.all()
    assert not sample(model, [[1]], sampler, max_new_tokens=4).terminated.any()


# --------------------------------------------------------------------------------------------------------- the loop


@one_of_each
def test_what_the_sampler_has_seen_is_used_in_the_policys_place(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    trainer = tiny_trainer(name, tmp_path, model=fields, rollout__temperature=0.7, rollout__top_k=4)
    trainer.collect()
    assert trainer.progress.sampler == "local"
    assert trainer.progress.sampler_exact
    rollouts = trainer.sample([{"prompt": p} for p in ("a", "bcd", "ef")])
    said = trainer.unwrapped(rollouts.sequences, entropy=True)
    seen = trainer.behaviour(rollouts)
    torch.testing.assert_close(seen.logprobs, said.logprobs, rtol=0, atol=1e-5)
    if said.values is not None:
        torch.testing.assert_close(seen.values, said.values, rtol=0, atol=1e-5)


@pytest.mark.slow
@every_name
@table(
    "changes",
    [
        {"model": tiny_t5(V, dropout_rate=0.1), "model__disable_dropout": False, "model__num_layers_unfrozen": 1},
        {"model": tiny_t5(V), "model__peft_config": {"r": 2, "init_lora_weights": "gaussian"}},
    ],
)
def test_a_run_that_trains_a_part_resumes_bit_equal(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {**changes, "train__batch_size": 6, "train__save_interval": 1}
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    straight.learn()
    tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=2).learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()
    assert resumed.progress.step == straight.progress.step == 6
    a, b = straight.unwrapped.state_dict(), resumed.unwrapped.state_dict()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


@one_of_each
def test_a_loop_of_ones_own_generates_steps_and_evaluates(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, model=fields)
    trainer.models.build()
    before = {key: value.clone() for key, value in trainer.unwrapped.state_dict().items()}
    prompts = [p for p in ("ab", "c", "def", "g") for _ in range(trainer.samples_per_prompt)]
    rollouts = trainer.generate(prompts, max_new_tokens=4)
    assert rollouts.sequences.response_mask.sum(1).max() <= 4
    metrics = trainer.step(rollouts.queries, rollouts.responses, [float(len(o)) for o in rollouts.outputs])
    assert metrics["policy/kl"] == 0.0
    assert any(not torch.equal(before[key], value) for key, value in trainer.unwrapped.state_dict().items())
    assert 0 <= trainer.evaluate()["eval/reward"] <= 6
    one, two = (trainer.generate_eval(["ab", "c"], temperature=0).outputs for _ in range(2))
    assert one == two


# --------------------------------------------------------------------------------------------------- what is trained


@table("unfrozen", [0, 1, 2, 3])
@table("fields", [tiny_t5(V, num_decoder_layers=3), tiny_bart(V, decoder_layers=3)])
def test_the_decoders_uppermost_layers_are_trained_and_nothing_below_them(
    fields: dict[str, Any], unfrozen: int
) -> None:
    """By name; T5's last norm is trained with them, BART has none."""
    model = make(fields)
    if unfrozen == 0 and fields["model_type"] == "bart":
        with pytest.raises(ConfigError, match=r"num_layers_unfrozen is 0.*nothing follows the layers.*1 to 3"):
            freeze_below(model, unfrozen)
        return
    freeze_below(model, unfrozen)
    blocks = "decoder.block." if fields["model_type"] == "t5" else "model.decoder.layers."
    upper = tuple(f"{blocks}{index}." for index in range(3 - unfrozen, 3))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith((*upper, "decoder.final_layer_norm")), name


@table("unfrozen", [-1, 1, 2])
@both
def test_the_reference_shares_what_is_frozen_and_stays_when_the_rest_moves(
    fields: dict[str, Any], unfrozen: int
) -> None:
    model, sequences = make(fields), Sequences.from_lists(QUERIES, RESPONSES)
    if unfrozen >= 0:
        freeze_below(model, unfrozen)
    policy = make_policy(model)
    reference = Reference(policy)
    for (key, own), copied in zip(policy.named_parameters(), reference.policy.parameters(), strict=True):
        assert (own.data_ptr() == copied.data_ptr()) is not own.requires_grad, key
    known = policy.through_trunk(sequences)
    assert (known.trunk is not None) == (unfrozen >= 0)
    before = reference(known).logprobs
    with torch.no_grad():  # with a gradient, T5's attention runs in another kernel, which rounds otherwise
        assert torch.equal(policy(known, reference=reference).divergence, torch.zeros_like(before))
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    policy(known).logprobs.sum().backward()
    optimizer.step()
    assert torch.equal(reference(known).logprobs, before)
    kl = policy(known, reference=reference).divergence
    assert (kl[sequences.response_mask] > 0).all()


@table("name, dropout", [("ppo", 0.0), ("rloo", 0.3)])
def test_a_frozen_encoder_runs_once_for_reference_and_all_passes(name: str, dropout: float, tmp_path: Path) -> None:
    """With dropout too: what is frozen never drops anything out."""
    trainer = tiny_trainer(
        name, tmp_path, model=tiny_t5(V, dropout_rate=dropout), model__num_layers_unfrozen=1,
        model__disable_dropout=not dropout,
    )  # fmt: skip
    trainer.collect()
    batch = trainer.store.experience
    assert batch.sequences.trunk is not None
    gradients = []
    for trial in (batch, replace(batch, sequences=replace(batch.sequences, trunk=None))):
        trainer.unwrapped.train()
        torch.manual_seed(3)
        trainer.optimizer.zero_grad()
        trainer.loss(trial)[0].backward()
        gradients.append({n: p.grad.clone() for n, p in trainer.unwrapped.named_parameters() if p.grad is not None})
    trainer.optimizer.zero_grad()
    assert gradients[0].keys() == {n for n, p in trainer.unwrapped.named_parameters() if p.requires_grad}
    for key, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][key], rtol=1e-4, atol=1e-6)
    calls: list[str] = []
    for side in ("encoder", "decoder"):
        getattr(trainer.unwrapped.model, side).register_forward_hook(lambda *_, side=side: calls.append(side))
    for minibatch in trainer.store.batches(8, torch.Generator()):
        trainer.update(minibatch)
    assert calls == ["decoder"] * 2


@table("fields", [tiny_t5(V, num_decoder_layers=1), tiny_bart(V, decoder_layers=1)])
def test_layers_are_counted_in_the_decoder_and_too_many_refused_at_the_door(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"num_layers_unfrozen is 2.* 1 layers.*0 to 1, or -1"):
        tiny_trainer("sft", tmp_path, model=fields, model__num_layers_unfrozen=2)


@pytest.mark.daily(name=("ppo",), fields=("t5",))
@every_name
@pytest.mark.parametrize("fields", ["t5", "bart"])
def test_an_adapter_is_trained_exported_and_goes_on(name: str, fields: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path / "run", model=SHAPES[fields], model__peft_config={"r": 2})
    if name in ONLINE:
        trainer.collect()
        assert trainer.recorder.pending["policy/kl"].compute() == 0.0
    trainer.learn()
    trained = {n for n, p in trainer.unwrapped.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    path = trainer.save_pretrained()
    ids = torch.tensor([[1, 2, 3]])
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    expected = trainer.unwrapped.model(**inputs).logits
    merged = trainkit.models.load_model(trainkit.config.ModelConfig(model_path=str(path)))
    torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_cut_response_goes_on_with_the_value_of_the_state_it_ends_in(tmp_path: Path) -> None:
    """The state in which the decoder has read every token of the response."""
    trainer = tiny_trainer("ppo", tmp_path, model=tiny_t5(V), method__bootstrap_truncated=True)
    trainer.models.build()
    torch.nn.init.normal_(trainer.unwrapped.value_head.summary.weight)
    rollouts = trainer.generate(["ab", "c", "def"], max_new_tokens=5)
    rollouts = replace(rollouts, terminated=torch.tensor([False, True, False]))
    found = trainer.bootstrap(rollouts)
    for row in (0, 2):
        read = torch.tensor([[V - 1, *rollouts.responses[row].tolist()]])
        outputs = trainer.unwrapped.model(
            input_ids=rollouts.queries[row].unsqueeze(0), decoder_input_ids=read, output_hidden_states=True
        )
        expected = trainer.unwrapped.value_head(outputs.decoder_hidden_states[-1][0, -1])
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)
    assert found[1] == 0


# --------------------------------------------------------------------------------------------------------- the data


def ending_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Like T5's, one that ends what it encodes with EOS; like BART's, with a beginning token too."""
    tokenizer = character_tokenizer(LETTERS, **special)
    begin = [(tokenizer.bos_token, tokenizer.bos_token_id)] if tokenizer.bos_token else []
    template = " ".join([*(token for token, _ in begin), "$A", EOS])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, pair=None, special_tokens=[*begin, (EOS, tokenizer.eos_token_id)]
    )
    return tokenizer


def trainer_with(tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any], **changes: Any) -> Any:
    config = trainkit.default_config("sft").update(
        {"model.model_path": fields, "rollout.max_new_tokens": 6, "train.trackers": [], **changes}
    )
    return trainkit.get_trainer("sft")(config, tokenizer=tokenizer)


def test_prompts_are_as_the_tokenizer_makes_them_for_an_encoder_alone() -> None:
    """T5's end with EOS, BART's begin with BOS too; a causal model goes on from the text."""
    end, bos = V - 2, V
    assert trainer_with(ending_tokenizer(), tiny_t5(V)).text.encode("ab") == [0, 1, end]
    assert trainer_with(ending_tokenizer(), tiny_t5(V)).text.encode("ab" + EOS) == [0, 1, end], "once"
    assert trainer_with(ending_tokenizer(), tiny_gpt2(V)).text.encode("ab") == [0, 1]
    assert trainer_with(ending_tokenizer(bos_token="<bos>"), tiny_bart(V + 1)).text.encode("ab") == [bos, 0, 1, end]
    assert trainer_with(character_tokenizer(LETTERS), tiny_t5(V)).text.encode("ab") == [0, 1]


def test_a_sample_is_a_prompt_for_the_encoder_and_an_output_with_one_eos() -> None:
    trainer = trainer_with(ending_tokenizer(), tiny_t5(V))
    rows = trainer.read_samples([("ab", "cd"), ("a", "b" + EOS)])
    found = trainer.encode_samples(rows)
    assert [query.tolist() for query in found.queries] == [[0, 1, V - 2], [0, V - 2]]
    assert [response.tolist() for response in found.responses] == [[2, 3, V - 2], [1, V - 2]]


@table("sample", ["abc", ["a", "b", "c", "d"]])
def test_text_without_a_prompt_and_several_turns_are_refused_at_the_door(sample: Any) -> None:
    with pytest.raises(DataError, match=r"sample 1 has (1|4) turns.*encoder-decoder.*give \(prompt, output\)"):
        trainer_with(character_tokenizer(LETTERS), tiny_t5(V)).add_samples([("a", "b"), sample])


def test_prompt_and_response_have_a_budget_each(caplog: pytest.LogCaptureFixture) -> None:
    """Eight tokens for each, the decoder's start included; prompts keep their end, outputs their beginning."""
    changes = {"train.seq_length": 8, "rollout.max_new_tokens": 7}
    trainer = trainer_with(character_tokenizer(LETTERS), tiny_bart(V), **changes)
    assert trainer.text.encode("abcdefgh") == list(range(8))
    assert (trainer.text.fits(8, 7), trainer.text.fits(9, 1), trainer.text.fits(1, 8)) == (True, False, False)
    with pytest.raises(DataError, match="has 9 tokens, and at most 8 are read"):
        trainer.text.encode("abcdefgha")
    rows = trainer.read_samples([("abcdefghab", "hgfedcba"), ("a", "b")])
    assert "1 of 2 samples were truncated to 8 tokens" in caplog.text
    found = trainer.encode_samples(rows)
    assert found.queries[0].tolist() == [2, 3, 4, 5, 6, 7, 0, 1]
    assert found.responses[0].tolist() == [7, 6, 5, 4, 3, 2, 1]
    trainer.tokenizer.truncation_side = "left"
    assert trainer.encode_samples(rows).responses[0].tolist() == [5, 4, 3, 2, 1, 0, V - 2]
    assert trainer.encode_samples(rows).queries[0].tolist() == [2, 3, 4, 5, 6, 7, 0, 1]
    with pytest.raises(DataError, match=r"do not fit into 8 tokens each"):
        trainer.generate(["a"], max_new_tokens=8)


def test_the_context_of_a_model_with_relative_positions_has_no_end() -> None:
    """T5's configs say how long its training data was, in n_positions; BART's positions are a table."""
    assert trainkit.models.context_length(AutoConfig.for_model(**tiny_t5(V, n_positions=512))) is None
    assert trainkit.models.context_length(AutoConfig.for_model(**tiny_bart(V))) == 64
