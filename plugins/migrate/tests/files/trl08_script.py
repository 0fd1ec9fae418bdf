from transformers import TrainingArguments
from trl import DPOTrainer

trainer = DPOTrainer(
    "gpt2",
    args=TrainingArguments(output_dir="out", optim="paged_adamw_32bit", max_steps=10),
    beta=0.1,
    ref_adapter_name="b",
    train_dataset=pairs,
)
trainer.train()
