# Fine-tuning on instructions, a prompt and an output each, with a metric; the model is saved, and its answers are read
import json
from argparse import ArgumentParser

import trlx
from transformers import AutoModelForCausalLM, AutoTokenizer
from trlx.data.default_configs import TRLConfig, default_sft_config


def preprocess(instruction: str, input: str, output: str):
    """Build prompt and output from an instruction, what it is about if anything, and an output"""
    return [f"H{instruction}{input}A" if input else f"H{instruction}A", output]


def main(hparams={}, model_name="EleutherAI/gpt-j-6B", saved="alpaca-sft"):
    config = default_sft_config()
    config = config.evolve(
        train=dict(total_steps=60, batch_size=8, seq_length=16, eval_interval=30),
        model=dict(model_path=model_name),
        tokenizer=dict(tokenizer_path=model_name),
        optimizer=dict(kwargs=dict(lr=3e-3)),
        scheduler=dict(kwargs=dict(eta_min=3e-3)),
        method=dict(gen_kwargs=dict(max_new_tokens=2)),
    )
    config = TRLConfig.update(config.to_dict(), hparams)
    alpaca = [preprocess("b", letter, letter) for letter in "cdef"] + [preprocess("h", "", "a")]

    def metric_fn(samples: list[str], **kwargs) -> dict[str, list[float]]:
        responses = [sample.split("A")[1] for sample in samples]
        asked = [sample.split("A")[0][-1].replace("h", "a") for sample in samples]
        return {"repeated": [float(answer.startswith(letter)) for letter, answer in zip(asked, responses)]}

    trainer = trlx.train(
        samples=alpaca * 16,
        eval_prompts=[prompt for prompt, _ in alpaca],
        metric_fn=metric_fn,
        config=config,
    )
    trainer.save_pretrained(saved)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    asked = tokenizer("HbdA", return_tensors="pt")
    return trainer, tokenizer.decode(model.generate(**asked, max_new_tokens=1, do_sample=False)[0])


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("override_hparams", type=str, default="{}")
    args = parser.parse_args()
    hparams = json.loads(args.override_hparams)
    model_name, saved = hparams.pop("model_name"), hparams.pop("saved")
    trainer, answer = main(hparams, model_name, saved)
