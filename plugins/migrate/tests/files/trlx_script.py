import trlx
from trlx.data.configs import TRLConfig
from trlx.data.default_configs import default_nemo_1_3b_config, default_ppo_config

LARGER = default_nemo_1_3b_config
default_config = default_ppo_config().evolve(optimizer=dict(name="adamw_8bit_bnb"), train={"seed": 3})


def main(hparams={}):
    config = TRLConfig.update(default_config.to_dict(), hparams)
    config.train.trainer = "NeMoPPOTrainer"
    config.method.gen_kwargs = dict(max_new_tokens=8, num_beams=4, do_sample=True)
    trlx.train(reward_fn=lambda samples, **kwargs: [0.0 for _ in samples], prompts=["a"], config=config)
