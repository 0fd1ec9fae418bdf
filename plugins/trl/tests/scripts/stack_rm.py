# The second of three steps: reward modelling on pairs of answers, with an adapter
import sys
from dataclasses import dataclass, field
from typing import Optional

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, TaskType
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import RewardConfig, RewardTrainer


@dataclass
class ScriptArguments:
    model_name: Optional[str] = field(default="gpt2", metadata={"help": "the model that is trained"})
    output_dir: Optional[str] = field(default="reward", metadata={"help": "the output directory"})
    target_modules: Optional[list[str]] = field(default=None, metadata={"help": "where the adapter is"})


script_args = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(sys.argv[1:])[0]
tokenizer = AutoTokenizer.from_pretrained(script_args.model_name)
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(script_args.model_name, num_labels=1)
model.config.pad_token_id = tokenizer.pad_token_id

raw = Dataset.from_list(
    [
        {"question": q, "response_j": good, "response_k": bad}
        for q in "bcdefgh"
        for good, bad in (("aaab", "bcbd"), ("abaa", "dbcc"), ("aabc", "cdeb"), ("abab", "bbcd"), ("aaaa", "ebdb"))
    ]
)


def preprocess_function(examples):
    new_examples = {
        "input_ids_chosen": [],
        "attention_mask_chosen": [],
        "input_ids_rejected": [],
        "attention_mask_rejected": [],
    }
    for question, chosen, rejected in zip(examples["question"], examples["response_j"], examples["response_k"]):
        tokenized_chosen = tokenizer(f"{question}#{chosen}")
        tokenized_rejected = tokenizer(f"{question}#{rejected}")
        new_examples["input_ids_chosen"].append(tokenized_chosen["input_ids"])
        new_examples["attention_mask_chosen"].append(tokenized_chosen["attention_mask"])
        new_examples["input_ids_rejected"].append(tokenized_rejected["input_ids"])
        new_examples["attention_mask_rejected"].append(tokenized_rejected["attention_mask"])
    return new_examples


data = raw.map(preprocess_function, batched=True)
data = data.filter(lambda x: len(x["input_ids_chosen"]) <= 16 and len(x["input_ids_rejected"]) <= 16)
training_args = RewardConfig(
    output_dir=script_args.output_dir,
    per_device_train_batch_size=8,
    num_train_epochs=12,
    learning_rate=1e-2,
    report_to="none",
    remove_unused_columns=False,
    optim="adamw_torch",
    logging_steps=10,
    evaluation_strategy="steps",
    eval_steps=10,
    save_strategy="steps",
    save_steps=10,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    max_length=16,
)
peft_config = LoraConfig(
    task_type=TaskType.SEQ_CLS,
    inference_mode=False,
    r=8,
    lora_alpha=32,
    lora_dropout=0.1,
    target_modules=script_args.target_modules,
)
trainer = RewardTrainer(
    model=model,
    args=training_args,
    tokenizer=tokenizer,
    train_dataset=data,
    eval_dataset=data,
    peft_config=peft_config,
)
trainer.train()
trainer.save_model(script_args.output_dir)
metrics = trainer.evaluate()

# what merge_peft_adapter does
base = AutoModelForSequenceClassification.from_pretrained(script_args.model_name, num_labels=1)
base.config.pad_token_id = tokenizer.pad_token_id
merged = PeftModel.from_pretrained(base, script_args.output_dir).merge_and_unload()
merged.save_pretrained(f"{script_args.output_dir}/merged")
tokenizer.save_pretrained(f"{script_args.output_dir}/merged")
