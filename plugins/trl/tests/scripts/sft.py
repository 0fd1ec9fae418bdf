# Supervised fine-tuning: packed texts, or instructions of which only the answers are trained on
import sys
from dataclasses import dataclass, field
from typing import Optional

from datasets import Dataset
from transformers import AutoTokenizer, HfArgumentParser, TrainingArguments
from trl import DataCollatorForCompletionOnlyLM, SFTTrainer, is_xpu_available


@dataclass
class ScriptArguments:
    model_name: Optional[str] = field(default="facebook/opt-350m", metadata={"help": "the model name"})
    dataset_text_field: Optional[str] = field(default="text", metadata={"help": "the text field of the dataset"})
    learning_rate: Optional[float] = field(default=1e-2, metadata={"help": "the learning rate"})
    batch_size: Optional[int] = field(default=8, metadata={"help": "the batch size"})
    seq_length: Optional[int] = field(default=16, metadata={"help": "Input sequence length"})
    output_dir: Optional[str] = field(default="output", metadata={"help": "the output directory"})
    max_steps: Optional[int] = field(default=60, metadata={"help": "the number of training steps"})
    packing: Optional[bool] = field(default=False, metadata={"help": "whether to pack texts"})


parser = HfArgumentParser(ScriptArguments)
script_args = parser.parse_args_into_dataclasses(sys.argv[1:])[0]
device_map = {"": "xpu:0"} if is_xpu_available() else None

rows = [{"question": letter, "answer": letter * 3} for letter in "abcdefgh"] * 8
dataset = Dataset.from_list([{**row, "text": f"{row['question']}#{row['answer']}"} for row in rows])
tokenizer = AutoTokenizer.from_pretrained(script_args.model_name)


def formatting_prompts_func(example):
    output_texts = []
    for i in range(len(example["question"])):
        output_texts.append(f"{example['question'][i]}#{example['answer'][i]}")
    return output_texts


training_args = TrainingArguments(
    output_dir=script_args.output_dir,
    per_device_train_batch_size=script_args.batch_size,
    gradient_accumulation_steps=1,
    learning_rate=script_args.learning_rate,
    logging_steps=10,
    max_steps=script_args.max_steps,
    report_to="none",
    save_strategy="no",
)
if script_args.packing:
    how = dict(packing=True, dataset_text_field=script_args.dataset_text_field)
else:
    collator = DataCollatorForCompletionOnlyLM("#", tokenizer=tokenizer)
    how = dict(formatting_func=formatting_prompts_func, data_collator=collator)
trainer = SFTTrainer(
    model=script_args.model_name,
    args=training_args,
    max_seq_length=script_args.seq_length,
    train_dataset=dataset,
    tokenizer=tokenizer,
    **how,
)
trainer.train()
trainer.save_model(script_args.output_dir)
