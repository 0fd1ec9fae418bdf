# PPO with an adapter, given as an object of peft; the other settings are the defaults of PPO, with frozen layers
import json
import sys

import trlx
from peft import LoraConfig, TaskType
from trlx.data.default_configs import TRLConfig, default_ppo_config


def main(hparams={}):
    # the command changes single settings
    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)
    config.method.cliprange_reward = False
    config.method.gen_kwargs["max_new_tokens"] = 6
    config.model.peft_config = LoraConfig(
        r=8,
        task_type=TaskType.CAUSAL_LM,
        lora_alpha=32,
        lora_dropout=0.1,
        fan_in_fan_out=True,
    )

    def reward_fn(samples, prompts, outputs, **kwargs):
        scores = [float(output.count("a")) for output in outputs]
        samples += prompts  # reward functions may change their lists
        return scores

    return trlx.train(
        reward_fn=reward_fn,
        prompts=["bc", "d"] * 16,
        eval_prompts=["bc"] * 32,
        config=config,
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
