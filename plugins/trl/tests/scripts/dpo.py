# DPO on dialogues, with the arguments of the command line in four dataclasses or in a YAML file
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import DPOTrainer, ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
from trl.commands.cli_utils import DpoScriptArguments, TrlParser

parser = TrlParser((DpoScriptArguments, TrainingArguments, ModelConfig))
args, training_args, model_config = parser.parse_args_and_config()
quantization_config = get_quantization_config(model_config)
model_kwargs = dict(
    revision=model_config.model_revision,
    trust_remote_code=model_config.trust_remote_code,
    attn_implementation=model_config.attn_implementation,
    torch_dtype=model_config.torch_dtype,
    device_map=get_kbit_device_map() if quantization_config is not None else None,
    quantization_config=quantization_config,
)
model = AutoModelForCausalLM.from_pretrained(model_config.model_name_or_path, **model_kwargs)
peft_config = get_peft_config(model_config)
model_ref = AutoModelForCausalLM.from_pretrained(model_config.model_name_or_path, **model_kwargs)
if peft_config is not None:
    model_ref = None
tokenizer = AutoTokenizer.from_pretrained(model_config.model_name_or_path)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
ds = Dataset.from_list([{"question": q, "good": q * 3, "bad": "hgh"} for q in "abcdef"] * 4)


def process(row):
    return {"prompt": row["question"] + "#", "chosen": row["good"], "rejected": row["bad"]}


ds = ds.map(process, load_from_cache_file=False)
trainer = DPOTrainer(
    model,
    model_ref,
    args=training_args,
    beta=args.beta,
    train_dataset=ds,
    eval_dataset=ds,
    tokenizer=tokenizer,
    max_length=args.max_length,
    max_target_length=args.max_target_length,
    max_prompt_length=args.max_prompt_length,
    generate_during_eval=args.generate_during_eval,
    peft_config=peft_config,
)
trainer.train()
trainer.save_model(training_args.output_dir)
