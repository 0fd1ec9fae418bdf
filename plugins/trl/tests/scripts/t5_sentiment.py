# PPO with an encoder-decoder and a value head; the reward of an output is what a classifier would say
import sys

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoTokenizer
from trl import AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.core import LengthSampler

config = PPOConfig(
    model_name=sys.argv[1], learning_rate=3e-3, batch_size=16, mini_batch_size=8, init_kl_coef=0.05, seed=0
)


def build_dataset(tokenizer):
    ds = Dataset.from_dict({"review": ["bcde", "cdef", "defg", "efgh"] * 8})
    input_size = LengthSampler(2, 4)

    def tokenize(sample):
        sample["input_ids"] = tokenizer.encode(sample["review"])[: input_size()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    ds = ds.map(tokenize, batched=False)
    ds.set_format(type="torch")
    return ds


def collater(data):
    return dict((key, [d[key] for d in data]) for key in data[0])


model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(config.model_name)
ref_model = create_reference_model(model)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=build_dataset(tokenizer), data_collator=collater)
generation_kwargs = {"top_k": 0.0, "top_p": 1.0, "do_sample": True, "eos_token_id": -1}
output_length_sampler = LengthSampler(4, 6)
history = []
for _epoch in range(12):
    for batch in tqdm(ppo_trainer.dataloader, disable=True):
        query_tensors = batch["input_ids"]
        response_tensors = ppo_trainer.generate(
            query_tensors, return_prompt=False, length_sampler=output_length_sampler, **generation_kwargs
        )
        batch["response"] = tokenizer.batch_decode([r for r in response_tensors])
        rewards = [torch.tensor(float(text.count("a"))) for text in batch["response"]]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
        history.append(float(torch.stack(rewards).mean()))
