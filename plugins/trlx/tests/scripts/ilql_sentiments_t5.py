# ILQL on an encoder-decoder: reviews of two parts, with a label of 1 where the second part is of a
import json
import sys

import trlx
from trlx.data.configs import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from trlx.models.modeling_ilql import ILQLConfig

default_config = TRLConfig(
    train=TrainConfig(
        seq_length=16,
        epochs=100,
        total_steps=100,
        batch_size=16,
        checkpoint_interval=100000,
        eval_interval=50,
        pipeline="PromptPipeline",
        trainer="AccelerateILQLTrainer",
        save_best=False,
        tracker=None,
    ),
    model=ModelConfig(model_path="lvwerra/t5-imdb", num_layers_unfrozen=-1, model_arch_type="seq2seq"),
    tokenizer=TokenizerConfig(tokenizer_path="lvwerra/t5-imdb", padding_side="right", truncation_side="right"),
    optimizer=OptimizerConfig(
        name="adamw", kwargs={"lr": 3.0e-3, "betas": [0.9, 0.999], "eps": 1.0e-8, "weight_decay": 1.0e-6}
    ),
    scheduler=SchedulerConfig(name="cosine_annealing", kwargs={"T_max": 100000, "eta_min": 3.0e-3}),
    method=ILQLConfig(
        name="ilqlconfig",
        tau=0.7,
        gamma=0.99,
        cql_scale=0.1,
        awac_scale=1,
        alpha=0.1,
        beta=0,
        steps_for_target_q_sync=1,
        two_qs=True,
        gen_kwargs={"max_new_tokens": 4, "top_k": 20, "beta": 6, "temperature": 1.0},
    ),
)


def main(hparams={}):
    config = TRLConfig.update(default_config.to_dict(), hparams)

    def metric_fn(samples: list[str], outputs: list[str], **kwargs) -> dict[str, list[float]]:
        return {"sentiments": [float("a" in output) for output in outputs]}

    def preprocess(query, output, label):
        return {"output_prompt": [[query, output]], "label": label}

    queries = ["bc", "cd", "db", "cb"]
    dataset = [preprocess(query, "aa", 1) for query in queries * 8]
    dataset += [preprocess(query, "gg", 0) for query in queries * 8]
    return trlx.train(
        samples=sum((row["output_prompt"] for row in dataset), []),
        rewards=[float(row["label"]) for row in dataset],
        eval_prompts=queries * 4,
        metric_fn=metric_fn,
        config=config,
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
