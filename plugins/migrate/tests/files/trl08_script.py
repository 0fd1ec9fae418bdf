from transformers import TrainingArguments
from trl import DPOTrainer

trainer = DPOTrainer(
    "gpt2",
    args=TrainingArguments(output_dir="out", optim="paged_adamw_32bit", max_steps=10),
    beta=0.1,
    loss_type="bco_pair",
    train_dataset=pairs,
)
trainer.train()
