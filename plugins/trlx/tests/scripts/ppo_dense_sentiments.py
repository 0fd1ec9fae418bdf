# PPO with a reward for each token: the first half of a response should be of e, the second half of a
import json
import sys

import trlx
from trlx.data.default_configs import TRLConfig, default_ppo_config


def share(text, letter):
    return text.count(letter) / max(len(text), 1)


def main(hparams={}):
    # the command changes single settings
    config = TRLConfig.update(default_ppo_config().to_dict(), hparams)

    def dense_reward_fn(samples: list[str], prompts: list[str], outputs: list[str], tokenizer, **kwargs):
        found = []
        for output in outputs:
            tokens = tokenizer(output).input_ids
            rewards = [0] * len(tokens)
            if tokens:
                half = len(output) // 2
                rewards[len(tokens) // 2] = share(output[:half], "e")
                rewards[-1] += share(output[half:], "a")
            found.append(rewards)
        return found

    return trlx.train(
        reward_fn=dense_reward_fn,
        prompts=["bc", "d"] * 16,
        eval_prompts=["bc"] * 32,
        config=config,
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
