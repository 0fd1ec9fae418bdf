# The first of three steps: supervised fine-tuning of an adapter on answers, packed into rows of one length
import argparse
import os

from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, logging, set_seed
from trl import SFTTrainer
from trl.trainer import ConstantLengthDataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", type=str, default="")
    parser.add_argument("--seq_length", type=int, default=16)
    parser.add_argument("--max_steps", type=int, default=80)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=2e-2)
    parser.add_argument("--lr_scheduler_type", type=str, default="cosine")
    parser.add_argument("--num_warmup_steps", type=int, default=5)
    parser.add_argument("--weight_decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=str, default="./checkpoints")
    parser.add_argument("--log_freq", default=1, type=int)
    parser.add_argument("--eval_freq", default=40, type=int)
    parser.add_argument("--save_freq", default=40, type=int)
    return parser.parse_args()


def prepare_sample_text(example):
    return f"{example['question']}#{example['response_j']}"


def chars_token_ratio(dataset, tokenizer, nb_examples=40):
    total_characters, total_tokens = 0, 0
    for _, example in tqdm(zip(range(nb_examples), iter(dataset)), total=nb_examples, disable=True):
        text = prepare_sample_text(example)
        total_characters += len(text)
        total_tokens += len(tokenizer(text).tokens())
    return total_characters / total_tokens


def create_datasets(tokenizer, args):
    rows = [{"question": q, "response_j": a} for q in "bcdefgh" for a in ("abab", "baab", "abca", "aabb")] * 4
    dataset = Dataset.from_list(rows).train_test_split(test_size=0.1, seed=args.seed)
    ratio = chars_token_ratio(dataset["train"], tokenizer)
    how = dict(formatting_func=prepare_sample_text, seq_length=args.seq_length, chars_per_token=ratio)
    train_dataset = ConstantLengthDataset(tokenizer, dataset["train"], infinite=True, **how)
    valid_dataset = ConstantLengthDataset(tokenizer, dataset["test"], infinite=False, **how)
    return train_dataset, valid_dataset


def run_training(args, train_data, val_data):
    lora_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
    train_data.start_iteration = 0
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        dataloader_drop_last=True,
        eval_strategy="steps",
        max_steps=args.max_steps,
        eval_steps=args.eval_freq,
        save_steps=args.save_freq,
        logging_steps=args.log_freq,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.num_warmup_steps,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        weight_decay=args.weight_decay,
        run_name="llama-finetuned",
        report_to="none",
        ddp_find_unused_parameters=False,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model_path, device_map={"": "cpu"})
    assert Accelerator().process_index == 0
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train_data,
        eval_dataset=val_data,
        peft_config=lora_config,
        packing=True,
    )
    trainer.train()
    trainer.model.save_pretrained(os.path.join(args.output_dir, "final_checkpoint/"))
    return trainer


args = get_args()
set_seed(args.seed)
os.makedirs(args.output_dir, exist_ok=True)
logging.set_verbosity_error()
tokenizer = AutoTokenizer.from_pretrained(args.model_path)
train_dataset, eval_dataset = create_datasets(tokenizer, args)
trainer = run_training(args, train_dataset, eval_dataset)

# what merge_peft_adapter does
base = AutoModelForCausalLM.from_pretrained(args.model_path)
merged = PeftModel.from_pretrained(base, os.path.join(args.output_dir, "final_checkpoint/")).merge_and_unload()
merged.save_pretrained(os.path.join(args.output_dir, "merged"))
tokenizer.save_pretrained(os.path.join(args.output_dir, "merged"))
