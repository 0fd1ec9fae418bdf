# The last of three steps: PPO of a new adapter, with the reward model in a pipeline
import sys
from dataclasses import dataclass, field
from typing import Optional

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from tqdm import tqdm
from transformers import Adafactor, AutoTokenizer, HfArgumentParser, pipeline
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl.core import LengthSampler

tqdm.pandas()


@dataclass
class ScriptArguments:
    model_name: Optional[str] = field(default="", metadata={"help": "the model name"})
    tokenizer_name: Optional[str] = field(default="", metadata={"help": "the tokenizer name"})
    reward_model_name: Optional[str] = field(default="", metadata={"help": "the reward model name"})
    learning_rate: Optional[float] = field(default=1e-2, metadata={"help": "the learning rate"})
    output_max_length: Optional[int] = field(default=7, metadata={"help": "maximum length for generation"})
    mini_batch_size: Optional[int] = field(default=4, metadata={"help": "the PPO minibatch size"})
    batch_size: Optional[int] = field(default=16, metadata={"help": "the batch size"})
    ppo_epochs: Optional[int] = field(default=4, metadata={"help": "the number of ppo epochs"})
    gradient_accumulation_steps: Optional[int] = field(default=2, metadata={"help": "gradient accumulation steps"})
    adafactor: Optional[bool] = field(default=False, metadata={"help": "whether to use the adafactor optimizer"})
    early_stopping: Optional[bool] = field(default=False, metadata={"help": "whether to early stop"})
    target_kl: Optional[float] = field(default=0.1, metadata={"help": "kl target for early stopping"})
    reward_baseline: Optional[float] = field(default=0.0, metadata={"help": "subtracted from the reward"})
    save_freq: Optional[int] = field(default=None, metadata={"help": "n steps to save the model"})
    output_dir: Optional[str] = field(default="runs/", metadata={"help": "where the model is saved"})
    seed: Optional[int] = field(default=0, metadata={"help": "the seed"})
    steps: Optional[int] = field(default=160, metadata={"help": "the number of responses"})
    init_kl_coef: Optional[float] = field(default=0.02, metadata={"help": "first KL penalty coefficient"})
    adap_kl_ctrl: Optional[bool] = field(default=True, metadata={"help": "use adaptive KL control"})


parser = HfArgumentParser(ScriptArguments)
script_args = parser.parse_args_into_dataclasses(sys.argv[1:])[0]
config = PPOConfig(
    steps=script_args.steps,
    model_name=script_args.model_name,
    learning_rate=script_args.learning_rate,
    batch_size=script_args.batch_size,
    mini_batch_size=script_args.mini_batch_size,
    gradient_accumulation_steps=script_args.gradient_accumulation_steps,
    optimize_cuda_cache=True,
    early_stopping=script_args.early_stopping,
    target_kl=script_args.target_kl,
    ppo_epochs=script_args.ppo_epochs,
    seed=script_args.seed,
    init_kl_coef=script_args.init_kl_coef,
    adap_kl_ctrl=script_args.adap_kl_ctrl,
)
tokenizer = AutoTokenizer.from_pretrained(script_args.tokenizer_name)
if getattr(tokenizer, "pad_token", None) is None:
    tokenizer.pad_token = tokenizer.eos_token
sent_kwargs = {"top_k": None, "function_to_apply": "none", "batch_size": 16, "truncation": True}


def build_dataset(tokenizer):
    train_dataset = Dataset.from_dict({"question": list("bcdefgh") * 32})

    def preprocess_function(examples):
        new_examples = {"query": [], "input_ids": []}
        for question in examples["question"]:
            query = question + "#"
            new_examples["query"].append(query)
            new_examples["input_ids"].append(tokenizer(query, truncation=True)["input_ids"])
        return new_examples

    ds = train_dataset.map(preprocess_function, batched=True, remove_columns=train_dataset.column_names)
    ds = ds.filter(lambda x: len(x["input_ids"]) < 16, batched=False)
    ds.set_format(type="torch")
    return ds


def collator(data):
    return {key: [d[key] for d in data] for key in data[0]}


dataset = build_dataset(tokenizer)
set_seed(config.seed)
current_device = Accelerator().local_process_index
lora_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name, peft_config=lora_config)
optimizer = None
if script_args.adafactor:
    optimizer = Adafactor(
        filter(lambda p: p.requires_grad, model.parameters()),
        scale_parameter=False,
        relative_step=False,
        warmup_init=False,
        lr=config.learning_rate,
    )
ppo_trainer = PPOTrainer(
    config,
    model,
    ref_model=None,
    tokenizer=tokenizer,
    dataset=dataset,
    data_collator=collator,
    optimizer=optimizer,
)
device = ppo_trainer.accelerator.device
if ppo_trainer.accelerator.num_processes == 1:
    device = 0 if torch.cuda.is_available() else "cpu"
sentiment_pipe = pipeline("sentiment-analysis", model=script_args.reward_model_name, tokenizer=tokenizer, device=device)
if sentiment_pipe.model.config.pad_token_id is None:
    sentiment_pipe.model.config.pad_token_id = sentiment_pipe.model.config.eos_token_id
generation_kwargs = {
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.pad_token_id,
    "eos_token_id": 100_000,
}
output_length_sampler = LengthSampler(4, script_args.output_max_length)
history, answers = [], []
for epoch, batch in tqdm(enumerate(ppo_trainer.dataloader), disable=True):
    if epoch >= config.total_ppo_epochs:
        break
    question_tensors = batch["input_ids"]
    response_tensors = ppo_trainer.generate(
        question_tensors, return_prompt=False, length_sampler=output_length_sampler, **generation_kwargs
    )
    batch["response"] = tokenizer.batch_decode(response_tensors, skip_special_tokens=True)
    texts = [q + r for q, r in zip(batch["query"], batch["response"])]
    pipe_outputs = sentiment_pipe(texts, **sent_kwargs)
    rewards = [torch.tensor(output[0]["score"] - script_args.reward_baseline) for output in pipe_outputs]
    stats = ppo_trainer.step(question_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards)
    history.append(float(torch.stack(rewards).mean()))
    answers.append(sum(text.count("a") for text in batch["response"]) / sum(map(len, batch["response"])))
    if script_args.save_freq and epoch and epoch % script_args.save_freq == 0:
        ppo_trainer.save_pretrained(script_args.output_dir + f"step_{epoch}")
