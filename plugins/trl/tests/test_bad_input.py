"""What is wrong is told with what was given, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tables import table
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama
from trainkit_trl import (
    AutoModelForCausalLMWithValueHead,
    DataCollatorForCompletionOnlyLM,
    DpoScriptArguments,
    DPOTrainer,
    IterativeSFTTrainer,
    KTOConfig,
    LengthSampler,
    ModelConfig,
    PPOConfig,
    PPOTrainer,
    RewardTrainer,
    SFTTrainer,
    create_reference_model,
    set_seed,
)
from trainkit_trl.trainer.truncation import truncation

pytestmark = pytest.mark.filterwarnings("ignore:there is no dataset")
TOKENIZER = character_tokenizer("abcdefgh")
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4


def model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    set_seed(0)
    return AutoModelForCausalLM.from_config(GPT2Config(**{**tiny_gpt2(len(TOKENIZER)), **fields}))


def valued(**fields: Any) -> Any:
    return AutoModelForCausalLMWithValueHead.from_pretrained(model(**fields))


class Scaled(AutoModelForCausalLMWithValueHead):
    """A model whose logits are others."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, *rest = super().forward(*args, **kwargs)
        return 2 * logits, *rest


def headed(head: Any) -> Any:
    """Return a model with another value head."""
    made = valued()
    made.v_head = head
    return made


def generating() -> Any:
    """Return a model with a function in the place of its ``generate``."""
    made = valued()
    made.generate = lambda *_, **__: None
    return made


def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{name: value for name, value in tiny_llama(len(TOKENIZER)).items() if name != "model_type"})
    return AutoModelForCausalLMWithValueHead.from_pretrained(AutoModelForCausalLM.from_config(config))


def ppo(**changes: Any) -> Any:
    """Return a trainer of PPO with other arguments; those of `PPOConfig` are in ``config``."""
    config = PPOConfig(**{"batch_size": 2, "mini_batch_size": 2, "kl_penalty": "kl", **changes.pop("config", {})})
    return PPOTrainer(**{"config": config, "model": valued(), "tokenizer": TOKENIZER, **changes})


def step(**changes: Any) -> Any:
    given = {
        "queries": [torch.tensor([1, 2]), torch.tensor([3])],
        "responses": [torch.tensor([4, 5]), torch.tensor([6])],
        "scores": [torch.tensor(1.0), torch.tensor([0.0])],
    }
    return ppo().step(**{**given, **changes})


def rows(dataset: Any, **changes: Any) -> Any:
    """Return the first batch of a dataset."""
    return next(iter(ppo(dataset=dataset, **changes).dataloader))


def offline(trainer: Any, data: Any, **changes: Any) -> Any:
    from transformers import TrainingArguments

    args = TrainingArguments("out", max_steps=2, report_to="none", **changes.pop("args", {}))
    named = {} if trainer is IterativeSFTTrainer else {"train_dataset": data}
    return trainer(**{"model": model(), "args": args, "tokenizer": TOKENIZER, **named, **changes})


BAD: list[tuple[str, Callable[[], Any], str]] = [
    ("too few queries", lambda: step(queries=[torch.tensor([1])]), r"Batch size \(2\) does not match .* 1 for: quer"),
    ("no list", lambda: step(responses=torch.ones(2, 2)), r"responses must be a list of tensors - got <class 'torch"),
    ("numbers", lambda: step(scores=[1.0, 2.0]), r"Elements in scores must be tensors - got <class 'float'>"),
    ("the second is no tensor", lambda: step(scores=[torch.tensor(1.0), 2.0]), r"Elements in scores must be tensors"),
    ("two scores", lambda: step(scores=[torch.ones(2)] * 2), r"Scores must be 0- or 1-dimensional .* got \(2,\)"),
    ("a score in a matrix", lambda: step(scores=[torch.ones(1, 1)] * 2), r"Scores must be 0- or 1-dimensional"),
    ("NaN", lambda: step(scores=[torch.tensor(float("nan"))] * 2), r"scores\[0\] is nan; .* correct the reward"),
    ("infinite", lambda: step(scores=[torch.tensor(1.0), torch.tensor(float("inf"))]), r"scores\[1\] is inf"),
    ("rows of one", lambda: step(queries=[torch.tensor([[1, 2]])] * 2), r"queries\[0\] must be .* \(1, 2\); .*squeeze"),
    (
        "empty response",
        lambda: step(responses=[torch.tensor([4]), torch.tensor([], dtype=torch.long)]),
        r"responses\[1\] must be token ids \[T\], at least one - got torch.int64 of the shape \(0,\)",
    ),
    ("floats", lambda: step(responses=[torch.tensor([4.0])] * 2), r"responses\[0\] must be token ids .* torch.float32"),
    (
        "mask of another shape",
        lambda: step(response_masks=[torch.ones(2), torch.ones(2)]),
        r"response_masks\[1\] has the shape \(2,\), and its response \(1,\); give 1 or 0 for each token",
    ),
    ("one mask", lambda: step(response_masks=[torch.ones(2)]), r"does not match .* for: response_masks"),
    ("ids of no token", lambda: step(responses=[torch.tensor([99])] * 2), r"outside the model's vocabulary of 10"),
    ("no tokenizer", lambda: ppo(tokenizer=None), r"tokenizer should be a tokenizer of transformers; given NoneType"),
    ("no value head", lambda: ppo(model=model()), r"model should be an AutoModelForCausalLM.* given GPT2"),
    ("no config", lambda: ppo(model=valued()) and PPOTrainer({}, valued()), r"config should be a PPOConfig"),
    ("a reference by name", lambda: ppo(ref_model="gpt2"), r"ref_model should be a model with .* given str"),
    ("another vocabulary", lambda: ppo(ref_model=valued(vocab_size=99)), r"vocab|99"),
    ("a forward", lambda: ppo(model=Scaled.from_pretrained(model())), r"model is a Scaled, which overrides forward; "),
    ("that of a reference", lambda: ppo(ref_model=Scaled(model())), r"ref_model is a Scaled, which overrides"),
    ("a generate", lambda: ppo(model=generating()), r"overrides generate; .* or override loss, generate or _save_pre"),
    ("another model", lambda: setattr(ppo(), "model", valued()), r"model is read when PPOTrainer is made; give it to"),
    ("a running mean", lambda: setattr(ppo(), "running", None), r"running of PPOTrainer cannot be set"),
    ("a head", lambda: ppo(model=headed(torch.nn.Linear(32, 1))), r"v_head of model is a Linear, .* make it a sub"),
    ("a collator that is no function", lambda: ppo(data_collator=3), r"data_collator should be a function; given 3"),
    ("a collator of nothing", lambda: ppo(data_collator=lambda: 1), r"data_collator is called with rows"),
    ("an unknown argument", lambda: ppo(peft_config=1), r"PPOTrainer takes no peft_config; did you mean .* It takes: "),
    ("an unknown setting", lambda: PPOConfig(foo=1), r"PPOConfig takes no foo. It takes: exp_name, seed, "),  # type: ignore[call-arg]
    ("text for a number", lambda: PPOConfig(batch_size="8"), r"batch_size of PPOConfig should be an integer"),  # type: ignore[arg-type]
    ("a switch", lambda: PPOConfig(early_stopping=1), r"early_stopping of PPOConfig should be True or False; given 1"),  # type: ignore[arg-type]
    ("a setting of later versions", lambda: KTOConfig("out", loss_type="kto"), r"KTOConfig takes no loss_type. It"),  # type: ignore[call-arg]
    ("a rank that is text", lambda: ModelConfig(lora_r="8"), r"lora_r of ModelConfig should be an integer or None"),  # type: ignore[arg-type]
    ("no setting of a model", lambda: ModelConfig(loras=8), r"ModelConfig takes no loras; did you mean 'lora_r'\?"),  # type: ignore[call-arg]
    ("no argument of a script", lambda: DpoScriptArguments(betas=1), r"DpoScriptArguments takes no betas; did you"),  # type: ignore[call-arg]
    ("no rows in a pass", lambda: PPOConfig(mini_batch_size=0), r"mini_batch_size should be 1 at least; given 0"),
    ("layers beyond the model", lambda: ppo(num_shared_layers=3), r"num_shared_layers should be from 0 to 2, "),
    ("queries as lists", lambda: ppo().generate([[1, 2]]), r"Elements in query_tensor must be tensors - got"),
    ("a query as text", lambda: ppo().generate("ab"), r"query_tensor must be a list of tensors - got <class 'str'>"),
    ("no rows at a time", lambda: ppo().generate([torch.tensor([1])], batch_size=0), r"batch_size should be 1"),
    ("a number of tokens", lambda: ppo().generate([], length_sampler=3), r"length_sampler should be a function"),
    ("no lengths", lambda: LengthSampler(5, 5), r"lengths are integers from min_value to max_value - 1; given 5, 5"),
    ("statistics of nothing", lambda: ppo().log_stats({}, {}, []), r"log_stats takes what step returned, .* \[\]"),
    ("rewards as text", lambda: ppo().log_stats({}, {}, ["a"]), r"scores\[0\] must be a number or a tensor of one"),
    (
        "a score for two",
        lambda: ppo().compute_rewards([1.0], *[torch.zeros(2, 3)] * 2, torch.ones(2, 3)),
        r"there are 1 scores for 2 responses; give one for each",
    ),
    ("nothing to record", lambda: ppo().record_step_stats(0.1), r"lacks masks, logprobs, .*; it takes masks, logprobs"),
    ("no repository", lambda: ppo().push_to_hub(None), r"repo_id should be the name of a repository, .* given None"),
    ("no model to copy", lambda: create_reference_model(None), r"takes a model and a number of layers"),
    ("a dataset without length", lambda: ppo(dataset=iter([1])), r"dataset should have a length"),
    ("a dataset by name", lambda: ppo(dataset="imdb"), r"dataset should have a length and rows .* given 'imdb'"),
    (
        "a dataset without input_ids",
        lambda: ppo(dataset=Dataset.from_list([{"text": "a"}])),
        r"dataset has no input_ids; it has text, .* tokenise it into input_ids, or set remove_unused_columns=False",
    ),
    (
        "rows of several lengths",
        lambda: rows([{"input_ids": torch.ones(length)} for length in (1, 2)]),
        r"rows cannot be stacked .* give a data_collator, such as lambda rows",
    ),
    (
        "a field without counterpart",
        lambda: ppo(config={"push_to_hub_if_best_kwargs": {"repo_id": "a/b"}}),
        r"push_to_hub_if_best_kwargs: call trainer.push_to_hub\(repo_id\) after training",
    ),
    ("sizes", lambda: ppo(config={"batch_size": 3}), r"batch_size \(3\) should be a multiple of mini_batch_size \(2\)"),
    ("an unknown penalty", lambda: ppo(config={"kl_penalty": "k9"}), r"kl_penalty should be kl, abs, mse or full"),
    ("no model", lambda: offline(DPOTrainer, PAIRS, model=None), r"model of DPOTrainer should be a model of tr.* None"),
    ("no argument", lambda: offline(DPOTrainer, PAIRS, bet=1), r"DPOTrainer takes no bet.*; it takes model, ref_model"),
    ("other arguments", lambda: SFTTrainer(model(), 3), r"args of SFTTrainer should be transformers.Training"),
    ("a name", lambda: offline(DPOTrainer, "imdb"), r"train_dataset of DPOTrainer should be a dataset, .* 'imdb'"),
    ("several datasets", lambda: offline(DPOTrainer, {"a": PAIRS}), r"train_dataset of DPOTrainer should be a dataset"),
    ("no name", lambda: offline(DPOTrainer, PAIRS, tokenizer=None), r"tokenizer is not given, and the model has no"),
    (
        "a model that is loaded already",
        lambda: offline(DPOTrainer, PAIRS, model_init_kwargs={"torch_dtype": "auto"}),
        r"model_init_kwargs is how a model is loaded, and model is one that is loaded already; leave it out",
    ),
    (
        "a reference that is loaded already",
        lambda: offline(DPOTrainer, PAIRS, ref_model_init_kwargs={"torch_dtype": "auto"}),
        r"ref_model_init_kwargs is given, and ref_model is no name to load; leave one of them out",
    ),
    ("pairs without prompts", lambda: offline(DPOTrainer, [{"chosen": "a", "rejected": "b"}]), r"has no prompt; it"),
    (
        "texts in the place of token ids",
        lambda: offline(RewardTrainer, Dataset.from_list(PAIRS)),
        r"has no input_ids_chosen, input_ids_rejected; it has prompt, chosen, rejected; name its columns so",
    ),
    (
        "a column that is not there",
        lambda: offline(SFTTrainer, [{"words": "abc"}], dataset_text_field="text"),
        r"dataset_text_field is 'text'; the dataset has words: give one of them",
    ),
    (
        "a template that is not there",
        lambda: offline(
            SFTTrainer, [{"text": "abc"}], dataset_text_field="text",
            data_collator=DataCollatorForCompletionOnlyLM("ef", tokenizer=TOKENIZER),
        ),
        r"nothing follows the response_template 'ef' in any of the 1 samples, .* give one that is in them",
    ),
    ("no column", lambda: offline(SFTTrainer, [{"words": "abc"}]), r"give dataset_text_field, the column"),
    (
        "one text for a batch",
        lambda: offline(SFTTrainer, [{"text": "abc"}], formatting_func=lambda row: row["text"][0]),
        r"formatting_func gets a batch of rows, and should return the list of their texts",
    ),
    (
        "a callback of transformers",
        lambda: offline(
            SFTTrainer,
            [{"text": "abc"}],
            dataset_text_field="text",
            callbacks=[import_module("transformers").TrainerCallback()],
        ),
        r"callbacks of transformers are not called; give objects with methods that trainkit.hookimpl marks",
    ),
    (
        "arguments that quantise without what does so",
        lambda: offline(
            SFTTrainer, [{"text": "abc"}], model="gpt2", dataset_text_field="text", max_seq_length=8,
            model_init_kwargs={"load_in_8bit": True},
        ),
        r"load_in_8bit needs bitsandbytes, which is not installed",
    ),
    (
        "weights of TensorFlow for the reference",
        lambda: offline(DPOTrainer, PAIRS, ref_model="gpt2", ref_model_init_kwargs={"from_tf": True}),
        r"from_tf is given; transformers 5 reads no weights",
    ),
    (
        "arguments of a reference that is loaded",
        lambda: offline(DPOTrainer, PAIRS, ref_model_init_kwargs={"a": 1}, ref_model=model()),
        r"ref_model_init_kwargs is given, and ref_model is no name to load",
    ),
    (
        "a collator for packed rows",
        lambda: offline(
            SFTTrainer, [{"text": "abc"}], dataset_text_field="text", eval_packing=True, data_collator=lambda rows: rows
        ),
        r"data_collator is one of your own, which packed rows are not given to; set packing=False",
    ),
    (
        "a collator of another kind",
        lambda: offline(DPOTrainer, PAIRS, data_collator=lambda rows: rows),
        r"trainkit makes the batches; give rows with prompt, chosen and rejected",
    ),
    (
        "a metric that evaluations lack",
        lambda: offline(
            DPOTrainer, PAIRS, eval_dataset=PAIRS,
            args={"load_best_model_at_end": True, "metric_for_best_model": "rouge", "eval_strategy": "steps",
                  "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
        ).train(),
        r"'eval/rouge', which is no metric of this run's evaluations",
    ),
    *(
        (f"{name} of another type", lambda name=name, value=value: offline(DPOTrainer, PAIRS, **{name: value}), words)
        for name, value, words in (
            ("callbacks", 3, r"callbacks of DPOTrainer should be a list or None; given 3 \(int\)"),
            ("optimizers", (None,), "optimizers of DPOTrainer should be an optimizer and its schedule; given"),
            ("max_prompt_length", "x", "max_prompt_length of DPOTrainer should be an integer or None; given 'x'"),
            ("model_adapter_name", 3, "model_adapter_name of DPOTrainer should be text or None"),
            ("precompute_ref_log_probs", 3, "precompute_ref_log_probs of DPOTrainer should be True or False"),
        )
    ),
    (
        "a function of another type",
        lambda: offline(SFTTrainer, [{"text": "abc"}], dataset_text_field="text", formatting_func=3),
        "formatting_func of SFTTrainer should be a function or None",
    ),
    (
        "a length of another type in args",
        lambda: truncation({"max_prompt_length": [1]}, TOKENIZER, 8),
        r"max_prompt_length should be 1 at least; given \[1\]",
    ),
    (
        "labels of a decoder",
        lambda: offline(IterativeSFTTrainer, None).step(texts=["a"], texts_labels=["b"]),
        r"texts_labels of a model that is no encoder-decoder should be the texts themselves",
    ),
]  # fmt: skip


@table("make, words", [each[1:] for each in BAD])
def test_bad_input_is_told(
    make: Callable[[], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        make()


def test_a_reference_of_another_architecture_is_compared_by_its_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the same tokens, and nothing else; with other lower layers nothing is shared."""
    monkeypatch.chdir(tmp_path)
    stats = ppo(ref_model=llama()).step([torch.tensor([1])] * 2, [torch.tensor([2])] * 2, [torch.tensor(1.0)] * 2)
    assert stats["objective/kl"] != 0
    with pytest.warns(UserWarning, match="num_shared_layers has no effect, since ref_model is given"):
        ppo(ref_model=llama(), num_shared_layers=1)
