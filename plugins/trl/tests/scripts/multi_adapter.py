# PPO with one base model that has two adapters: the policy's, which is trained, and the reward model's
import sys
from dataclasses import dataclass, field
from typing import Optional

import torch
from datasets import Dataset
from peft import LoraConfig
from tqdm import tqdm
from transformers import AutoTokenizer, HfArgumentParser
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import LengthSampler, set_seed


@dataclass
class ScriptArguments:
    model_name: Optional[str] = field(default="huggyllama/llama-7b", metadata={"help": "the model name"})
    rm_adapter: Optional[str] = field(default="rm-adapter", metadata={"help": "the reward adapter"})
    log_with: Optional[str] = field(default=None, metadata={"help": "use 'wandb' to log with wandb"})
    use_safety_checker: Optional[bool] = field(default=False)
    use_score_scaling: Optional[bool] = field(default=False, metadata={"help": "Use score scaling"})
    use_score_norm: Optional[bool] = field(default=False, metadata={"help": "Use score normalization"})
    score_clip: Optional[float] = field(default=None, metadata={"help": "Score clipping"})


script_args = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(sys.argv[1:])[0]


def create_and_prepare_dataset(tokenizer):
    dataset = Dataset.from_dict({"prompt": list("bcdefgh") * 16})

    def tokenize(example):
        example["query"] = example["prompt"] + "#"
        example["input_ids"] = tokenizer(example["query"])["input_ids"]
        return example

    dataset = dataset.map(tokenize, batched=False)
    dataset.set_format(type="torch")
    return dataset


set_seed(0)
lora_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    script_args.model_name, peft_config=lora_config, reward_adapter=script_args.rm_adapter
)
tokenizer = AutoTokenizer.from_pretrained(script_args.model_name)
tokenizer.pad_token = tokenizer.eos_token
dataset = create_and_prepare_dataset(tokenizer)


def collator(data):
    return dict((key, [d[key] for d in data]) for key in data[0])


config = PPOConfig(
    model_name=script_args.model_name,
    log_with=script_args.log_with,
    learning_rate=1e-2,
    batch_size=16,
    mini_batch_size=8,
    gradient_accumulation_steps=2,
    optimize_cuda_cache=True,
    seed=1,
    init_kl_coef=0.02,
    use_score_scaling=script_args.use_score_scaling,
    use_score_norm=script_args.use_score_norm,
    score_clip=script_args.score_clip,
)
ppo_trainer = PPOTrainer(config, model, ref_model=None, tokenizer=tokenizer, dataset=dataset, data_collator=collator)
generation_kwargs = {
    "top_k": 0.0,
    "top_p": 0.9,
    "do_sample": True,
    "pad_token_id": tokenizer.pad_token_id,
    "max_new_tokens": 6,
}
output_length_sampler = LengthSampler(4, 7)
history = []
for _round in range(2):
    for _epoch, batch in tqdm(enumerate(ppo_trainer.dataloader), disable=True):
        question_tensors = batch["input_ids"]
        response_tensors = ppo_trainer.generate(
            question_tensors, return_prompt=False, length_sampler=output_length_sampler, **generation_kwargs
        )
        batch["response"] = tokenizer.batch_decode(response_tensors, skip_special_tokens=True)
        texts = [q + r for q, r in zip(batch["query"], batch["response"])]
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(ppo_trainer.accelerator.device)
        raw_rewards = ppo_trainer.accelerator.unwrap_model(ppo_trainer.model).compute_reward_score(**inputs)
        rewards = [raw_rewards[i, int(inputs["attention_mask"][i].sum()) - 1, 0] for i in range(len(raw_rewards))]
        stats = ppo_trainer.step(question_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
        history.append(float(torch.stack(rewards).mean()))
