# ILQL on dialogues of several turns: of the two answers to a question, the chosen one is rewarded
import json
import sys

import trlx
from trlx.data.default_configs import TRLConfig, default_ilql_config

default_config = default_ilql_config().evolve(
    train=dict(seq_length=24, batch_size=16, total_steps=100, epochs=100, eval_interval=50, checkpoint_interval=1000,
               tracker=None),
    model=dict(num_layers_unfrozen=-1),
    optimizer=dict(name="adamw", kwargs=dict(lr=2e-3, betas=(0.9, 0.95), eps=1.0e-8, weight_decay=1.0e-6)),
    scheduler=dict(name="cosine_annealing", kwargs=dict(T_max=10000, eta_min=2e-3)),
    method=dict(tau=0.6, gamma=0.99, cql_scale=0.1, awac_scale=1, alpha=0.1, beta=0, steps_for_target_q_sync=1,
                two_qs=True, gen_kwargs=dict(max_new_tokens=2, top_k=20, beta=8, temperature=1.0)),
)  # fmt: skip


def preprocess(sample):
    sample["prompt_output"] = [
        [*sample["turns"], sample["chosen"]],
        [*sample["turns"], sample["rejected"]],
    ]
    sample["reward"] = [1, -1]
    return sample


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams)
    turns = [["Hb", "Ac", "He"], ["Hc", "Ad", "Hf"], ["Hd", "Ab", "He"], ["Hf"]]
    dataset = [preprocess({"turns": each, "chosen": "Aa", "rejected": "Ag"}) for each in turns * 8]
    prompts_outputs = sum((each["prompt_output"] for each in dataset), [])
    rewards = sum((each["reward"] for each in dataset), [])

    def metric_fn(samples, prompts, outputs, **kwargs):
        return {"reward": [float(output.startswith("Aa")) - float(output.startswith("Ag")) for output in outputs]}

    return trlx.train(
        samples=prompts_outputs,
        rewards=rewards,
        config=config,
        eval_prompts=["".join(each) for each in turns],
        metric_fn=metric_fn,
        stop_sequences=["H"],
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
