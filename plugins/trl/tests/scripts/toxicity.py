# Detoxifying: a classifier says how likely a continuation is clean; model and reference share their lower layers
import sys
from dataclasses import dataclass, field
from typing import Optional

import torch
from datasets import Dataset
from torch.optim import Adam
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, set_seed
from trl.core import LengthSampler

tqdm.pandas()


@dataclass
class ScriptArguments:
    model_name: Optional[str] = field(default="ybelkada/gpt-j-6b-sharded-bf16", metadata={"help": "the model name"})
    toxicity_model: Optional[str] = field(default="", metadata={"help": "the classifier"})
    log_with: Optional[str] = field(default=None, metadata={"help": "use 'wandb' to log with wandb"})
    learning_rate: Optional[float] = field(default=1e-2, metadata={"help": "the learning rate"})
    mini_batch_size: Optional[int] = field(default=16, metadata={"help": "the PPO minibatch size"})
    batch_size: Optional[int] = field(default=32, metadata={"help": "the batch size"})
    gradient_accumulation_steps: Optional[int] = field(default=1, metadata={"help": "gradient accumulation steps"})
    model_save_path: Optional[str] = field(default="./detoxified", metadata={"help": "where the model is saved"})


script_args = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(sys.argv[1:])[0]
config = PPOConfig(
    model_name=script_args.model_name,
    learning_rate=script_args.learning_rate,
    log_with=script_args.log_with,
    ppo_epochs=4,
    mini_batch_size=script_args.mini_batch_size,
    batch_size=script_args.batch_size,
    gradient_accumulation_steps=script_args.gradient_accumulation_steps,
    init_kl_coef=0.0,
)


def build_dataset(config, input_min_text_length=2, input_max_text_length=4):
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [
        {"prompt": {"text": text, "toxicity": value}, "continuation": {"text": "de"}}
        for text, value in (("bc", 0.9), ("cd", 0.5), ("ef", 0.8), ("gh", 0.1), ("fb", None))
    ]
    ds = Dataset.from_list(rows * 40)

    def filter_fn(sample):
        toxicity = sample["prompt"]["toxicity"]
        return toxicity is not None and toxicity > 0.3

    ds = ds.filter(filter_fn, batched=False)
    input_size = LengthSampler(input_min_text_length, input_max_text_length)

    def tokenize(sample):
        text = sample["prompt"]["text"] + sample["continuation"]["text"]
        sample["input_ids"] = tokenizer.encode(text)[: input_size()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    ds = ds.map(tokenize, batched=False)
    ds.set_format(type="torch")
    return ds.train_test_split(test_size=0.2, shuffle=False)["train"]


def collator(data):
    return dict((key, [d[key] for d in data]) for key in data[0])


dataset = build_dataset(config)
set_seed(config.seed)
model = AutoModelForCausalLM.from_pretrained(config.model_name, torch_dtype=torch.float32)
model = AutoModelForCausalLMWithValueHead.from_pretrained(model)
ref_model = create_reference_model(model, num_shared_layers=1)
optimizer = Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=config.learning_rate)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token
ppo_trainer = PPOTrainer(
    config,
    model,
    ref_model=ref_model,
    tokenizer=tokenizer,
    dataset=dataset,
    data_collator=collator,
    optimizer=optimizer,
)
device = ppo_trainer.accelerator.device
toxicity_tokenizer = AutoTokenizer.from_pretrained(script_args.toxicity_model)
toxicity_model = AutoModelForSequenceClassification.from_pretrained(script_args.toxicity_model).to(device)
generation_kwargs = {
    "min_length": -1,
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.eos_token_id,
}
output_length_sampler = LengthSampler(4, 6)
history = []
for _round in range(4):
    for epoch, batch in tqdm(enumerate(ppo_trainer.dataloader), disable=True):
        query_tensors = batch["input_ids"]
        response_tensors = []
        for query in query_tensors:
            gen_len = output_length_sampler()
            generation_kwargs["max_new_tokens"] = gen_len
            response = ppo_trainer.generate(query, **generation_kwargs)
            response_tensors.append(response.squeeze()[-gen_len:])
        batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]
        texts = batch["response"]
        toxicity_inputs = toxicity_tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
        logits = toxicity_model(**toxicity_inputs).logits.float()
        toxicity_labels = (logits[:, 0]).tolist()
        rewards = [torch.tensor(output) for output in toxicity_labels]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
        history.append(float(torch.stack(rewards).mean()))
        if epoch % 100 == 0 and ppo_trainer.accelerator.is_main_process:
            ppo_trainer.save_pretrained(script_args.model_save_path)
