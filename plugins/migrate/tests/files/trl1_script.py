from trl import ModelConfig, SFTConfig, SFTTrainer

model = ModelConfig("gpt2", torch_dtype=None)
args = SFTConfig("sft", learning_rate=1e-5, num_train_epochs=2, per_device_train_batch_size=2, max_length=32)
SFTTrainer(model="gpt2", args=args, train_dataset=rows, processing_class=tokenizer).train()
