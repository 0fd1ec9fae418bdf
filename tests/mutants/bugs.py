"""The table: what was shipped, where it is planted, and which checks must find it.

Where the source is S-nn, the bug is one of the list of faults found in trlX, TRL 0.7 and 0.8, async_rlhf and
ddpo-pytorch. What is without a number is known from the issues of the systems that are named.
"""

from __future__ import annotations

from mutants.planting import Bug

BUGS = (
    # ------------------------------------------------------------------------------------- masks, padding, EOS
    Bug(
        "eos_unlearnt_online",
        "EOS is masked out of what is learnt, because it is also what pads; the policy never learns to stop",
        "S-01: trlX",
        "ppo",
        ("eos_is_trained",),
        (
            ("from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"),
            (
                "        sequences, policy = rollouts.sequences, self.behaviour(rollouts)\n",
                "        sequences, policy = rollouts.sequences, self.behaviour(rollouts)\n"
                "        kept = sequences.response_mask & (sequences.input_ids != self.tokenizer.eos_token_id)\n"
                "        sequences = replace(sequences, response_mask=kept)\n",
            ),
        ),
    ),
    Bug(
        "eos_unlearnt_offline",
        "labels are dropped wherever the id is that of padding, which is EOS's",
        "S-35: TRL's collator",
        "sft",
        ("eos_is_trained",),
        (
            (
                "        sequences = self.encode_samples(samples)\n",
                "        sequences = self.encode_samples(samples)\n"
                "        kept = sequences.response_mask & (sequences.input_ids != self.tokenizer.eos_token_id)\n"
                "        sequences = replace(sequences, response_mask=kept)\n",
            ),
        ),
    ),
    Bug(
        "eos_of_pairs_unlearnt",
        "EOS is left out of the log-probabilities of both sides of a pair",
        "S-36: TRL",
        "dpo",
        ("eos_is_trained",),
        (
            (
                "        pairs = self.encode_preferences(rows)\n",
                "        pairs, eos = self.encode_preferences(rows), self.tokenizer.eos_token_id\n"
                "        pairs = Preferences(*(\n"
                "            replace(side, response_mask=side.response_mask & (side.input_ids != eos))\n"
                "            for side in (pairs.chosen, pairs.rejected)\n"
                "        ))\n",
            ),
        ),
    ),
    Bug(
        "first_token_unlearnt",
        "the first token that an encoder-decoder's decoder chooses has no part in the loss",
        "S-23: TRL; S-03: trlX",
        "rloo",
        ("encoder_decoder",),
        (
            (
                "        mask = batch.sequences.response_mask\n",
                "        mask = batch.sequences.response_mask\n"
                "        if self.apart:\n"
                "            mask = mask & (mask.cumsum(1) > 1)\n",
            ),
        ),
    ),
    Bug(
        "score_one_token_late",
        "the score lands on the token behind the last one, which no loss reads",
        "S-02: trlX",
        "ppo",
        ("credit_of_scores",),
        (
            (
                "        placed = place_scores(scores, sequences.response_mask)\n",
                "        placed = place_scores(scores, sequences.response_mask).roll(1, 1)\n",
            ),
        ),
    ),
    Bug(
        "score_in_the_last_column",
        "the score stands in the last column, which in shorter rows is padding",
        "S-27: TRL, of the place that a reward is read from",
        "ppo",
        ("credit_of_scores",),
        (
            (
                "        placed = place_scores(scores, sequences.response_mask)\n",
                "        placed = place_scores(scores, torch.ones_like(sequences.response_mask))\n",
            ),
        ),
    ),
    Bug(
        "mask_as_a_factor",
        "a product with the mask leaves NaN what is NaN under it",
        "S-15: trlX",
        "ppo",
        ("mask_law",),
        (
            (
                "loss = masked_mean(policy, mask) + ",
                "loss = (policy * mask).sum() / mask.sum() + ",
            ),
        ),
    ),
    Bug(
        "mean_over_padding",
        "the loss is a mean over columns, padding among them, so it depends on the longest row in the batch",
        "S-38, S-56: TRL, trlX",
        "sft",
        ("padding_amount", "micro_batches"),
        (("return nll(logprobs, batch.response_mask), found", "return -logprobs.mean(), found"),),
    ),
    Bug(
        "metric_over_padding",
        "a metric is divided by the padded size",
        "S-56: trlX, TRL",
        "ppo",
        ("metric_totals",),
        (("Mean.of(ratio - 1 - log_ratio, mask)", "Mean.of(ratio - 1 - log_ratio)"),),
    ),
    Bug(
        "entropy_of_padding",
        "every token of padding adds 1 to the entropy",
        "S-51: async_rlhf",
        "ppo",
        ("padding_amount",),
        (
            (
                '"policy/entropy": Mean.of(x.entropy, mask)',
                '"policy/entropy": Mean.of(x.entropy.masked_fill(~mask, 1.0))',
            ),
        ),
    ),
    Bug(
        "prompts_are_learnt",
        "prompts are labels too",
        "S-29: trlX",
        "rft",
        ("sampled_ids",),
        (
            ("from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"),
            (
                "        return Sequences.from_lists([json.loads(query) for query, _ in mine], "
                "[json.loads(r) for _, r in mine])\n",
                "        kept = Sequences.from_lists([json.loads(query) for query, _ in mine], "
                "[json.loads(r) for _, r in mine])\n"
                "        return replace(kept, response_mask=kept.attention_mask & "
                "(torch.arange(kept.input_ids.size(1)) > 0))\n",
            ),
        ),
    ),
    Bug(
        "packed_samples_attend",
        "samples that are packed into one row attend to each other",
        "S-34: TRL",
        "sft",
        ("packing",),
        (
            (
                'return sequences.packed([len(row["samples"]) for row in rows]) if packed else sequences',
                'return replace(sequences.packed([len(row["samples"]) for row in rows]), segments=None) '
                "if packed else sequences",
            ),
        ),
    ),
    Bug(
        "retokenised",
        "what is learnt is the text encoded again, with other ids than were sampled",
        "S-09: trlX",
        "rft",
        ("sampled_ids",),
        (
            (
                "        return RFTRows(rollouts.sequences, per_response(scores))\n",
                "        eos = self.tokenizer.eos_token_id\n"
                "        ids = [[*self.tokenizer.encode(text), eos] for text in rollouts.outputs]\n"
                "        prompts = [query.tolist() for query in rollouts.sequences.queries]\n"
                "        return RFTRows(Sequences.from_lists(prompts, ids), per_response(scores))\n",
            ),
        ),
    ),
    # ---------------------------------------------------------------------------- divergence, ratios, advantages
    Bug(
        "trained_at_temperature_1",
        "samples are drawn at the temperature, and learnt as if it were 1",
        "S-08: trlX, TRL",
        "ppo",
        ("sampling_distribution",),
        (("            temperature=config.rollout.temperature,\n", "            temperature=1.0,\n"),),
    ),
    Bug(
        "ratio_between_temperatures",
        "the ratio's old log-probabilities are the sampler's at its temperature, the new ones at 1",
        "S-08: trlX, TRL",
        "ppo",
        ("first_update",),
        (
            ("            temperature=config.rollout.temperature,\n", "            temperature=1.0,\n"),
            ("            logprobs=policy.logprobs,\n", "            logprobs=rollouts.logprobs,\n"),
        ),
    ),
    Bug(
        "rounded_old_logprobs",
        "old log-probabilities are kept in half precision, so the first ratio is not 1",
        "S-50: TRL, ddpo-pytorch",
        "rloo",
        ("first_update",),
        (
            (
                "        return RLOORollouts(sequences, policy.logprobs, ",
                "        return RLOORollouts(sequences, policy.logprobs.bfloat16().float(), ",
            ),
        ),
    ),
    Bug(
        "kl_without_gradient",
        "the divergence in the loss is computed from the old log-probabilities, and pulls nothing back",
        "the field",
        "grpo",
        ("kl_pulls_back",),
        (
            (
                "k3 = kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))",
                "k3 = kl_k3(zero_masked(batch.old_logprobs, mask), zero_masked(batch.ref_logprobs, mask))",
            ),
        ),
    ),
    Bug(
        "kl_the_wrong_way",
        "the divergence from the reference is rewarded",
        "S-06's kin",
        "ppo",
        ("kl_pulls_back",),
        (("x.logprobs, x.ref_logprobs, mask, self.kl.coef)", "x.ref_logprobs, x.logprobs, mask, self.kl.coef)"),),
    ),
    Bug(
        "whitened_over_padding",
        "mean and deviation of the advantages count padding",
        "S-10: trlX",
        "ppo",
        ("padding_amount",),
        (
            (
                "whiten(advantages, mask, reduce=self.reduce)",
                "whiten(advantages, torch.ones_like(mask), reduce=self.reduce)",
            ),
        ),
    ),
    Bug(
        "whitened_per_micro_batch",
        "advantages are whitened over each micro-batch",
        "S-10: trlX",
        "ppo",
        ("micro_batches",),
        (
            ("whiten(advantages, mask, reduce=self.reduce)", "advantages"),
            (
                "clipped_surrogate(ratio, batch.advantages, cliprange=method.cliprange)",
                "clipped_surrogate(ratio, whiten(batch.advantages, mask), cliprange=method.cliprange)",
            ),
        ),
    ),
    Bug(
        "no_deviation",
        "advantages are divided by the deviation of their group, also where it is 0",
        "S-16: trlX, TRL",
        "grpo",
        ("finite_at_extremes",),
        (("/ (groups.std(1, keepdim=True) + 1e-6)", "/ groups.std(1, keepdim=True)"),),
    ),
    Bug(
        "first_of_k_trained",
        "of the k responses to a prompt only the first is learnt from",
        "S-52: async_rlhf",
        "rloo",
        ("credit_of_scores",),
        (
            (
                "return RLOORows(x.sequences, x.logprobs, advantages)",
                "return RLOORows(x.sequences, x.logprobs, advantages).select("
                "torch.arange(0, len(x), self.method.rloo_k))",
            ),
        ),
    ),
    Bug(
        "advantages_of_integers",
        "advantages have the type of the rewards, so that those of integers are cut to integers",
        "S-58: ddpo-pytorch, TRL",
        "rloo",
        ("integer_scores",),
        (
            (
                '        self.record(\n            {\n                "policy/kl": Mean.of(k1.sum(1)),\n',
                "        advantages = advantages.to(self.kind).float()\n"
                '        self.record(\n            {\n                "policy/kl": Mean.of(k1.sum(1)),\n',
            ),
        ),
        loop="AdvantagesOfIntegers",
    ),
    Bug(
        "truncated_advantages",
        "advantages are written into an array of integers",
        "S-58: ddpo-pytorch, TRL",
        "rloo",
        ("credit_of_scores",),
        (
            (
                '        self.record(\n            {\n                "policy/kl": Mean.of(k1.sum(1)),\n',
                "        advantages = advantages.trunc()\n"
                '        self.record(\n            {\n                "policy/kl": Mean.of(k1.sum(1)),\n',
            ),
        ),
    ),
    Bug(
        "token_kl_that_is_none",
        "a setting for the divergence of each token adds it up over the response again, and changes nothing",
        "S-66: TRL",
        "rloo",
        ("fields_have_effects",),
        (('if self.method.kl_level == "token" else torch.zeros_like(penalty)', "* 0"),),
    ),
    # -------------------------------------------------------------------------------------------- losses of pairs
    Bug(
        "margins_broadcast",
        "margins [B, 1] and rewards [B] make a loss of B × B pairs",
        "S-37: TRL",
        "reward",
        ("micro_batches",),
        (("chosen - rejected - margins)", "chosen - rejected - margins.unsqueeze(1)).mean(0)"),),
    ),
    Bug(
        "pair_mean_over_padding",
        "log-probabilities of a response are a mean over columns",
        "S-38: TRL",
        "dpo",
        ("padding_amount",),
        (("sums = masked_sum(logprobs, mask, dim=1)", "sums = logprobs.mean(1)"),),
    ),
    # ------------------------------------------------------------------------------------ what outlasts a batch
    Bug(
        "target_never_synced",
        "the target network stays what it was",
        "S-14: trlX",
        "ilql",
        ("kept_state_moves",),
        (("            self.unwrapped.head.sync(self.method.alpha)\n", "            pass\n"),),
    ),
    Bug(
        "unbounded_weights",
        "weights of advantages are not bounded, whatever the setting says",
        "S-43: trlX",
        "ilql",
        ("finite_at_extremes",),
        (("(beta * advantages).clamp(max=math.log(limit)).exp()", "(beta * advantages).exp()"),),
    ),
    Bug(
        "end_percentile_unused",
        "thresholds never reach the last percentile that is set",
        "S-28: trlX",
        "rft",
        ("fields_have_effects",),
        (
            (
                "torch.linspace(method.start_percentile, method.end_percentile,",
                "torch.linspace(method.start_percentile, method.start_percentile,",
            ),
        ),
    ),
    Bug(
        "visits_not_saved",
        "where the thresholds stand is not in the checkpoint",
        "S-20: trlX",
        "rft",
        ("resume_every_step",),
        (
            ('{"visits": dict, "pools": dict}\n', '{"pools": dict}\n'),
            (
                "    @property\n    def experience_rows(",
                "    def __init__(self, *args: Any, **kwargs: Any) -> None:\n"
                "        super().__init__(*args, **kwargs)\n"
                "        self.visits = {}\n\n"
                "    @property\n    def experience_rows(",
            ),
        ),
    ),
    Bug(
        "kl_coef_not_saved",
        "a resumed run begins with the first price of divergence",
        "S-20: trlX",
        "ppo",
        ("state_is_complete",),
        (('            self.kl.coef = state["kl_coef"]\n', "            pass\n"),),
    ),
    Bug(
        "critic_per_micro_batch",
        "the critic's loss is a mean over each micro-batch, so its gradient grows with their number",
        "S-11: trlX",
        "ppo",
        ("micro_batches",),
        (
            (
                "    def judge(self, metrics",
                "    def prepare_step(self, batch: PPOBatch) -> PPOBatch:\n"
                "        self.tokens = batch.weight\n"
                "        return batch\n\n"
                "    def judge(self, metrics",
            ),
            (
                "method.vf_coef * masked_mean(value, mask)",
                "method.vf_coef * masked_mean(value, mask) * self.tokens / batch.weight",
            ),
        ),
    ),
    Bug(
        "responses_counted_as_tokens",
        "the loss is a mean over tokens, and micro-batches are weighted by their rows",
        "S-62: TRL, verl, SkyRL, prime-rl, slime",
        "ppo",
        ("micro_batches", "weight_counts"),
        (
            (
                "    old_logprobs: Tensor\n    old_values: Tensor\n    advantages: Tensor\n    returns: Tensor\n",
                "    old_logprobs: Tensor\n    old_values: Tensor\n    advantages: Tensor\n    returns: Tensor\n\n"
                "    @property\n    def weight(self) -> Tensor:\n        return torch.tensor(float(len(self)))\n",
            ),
        ),
    ),
    Bug(
        "attribute_of_the_wrapper",
        "the model is asked through what accelerate wraps it in, which has no such attribute with several processes",
        "S-18: trlX",
        "sft",
        ("two_processes",),
        (("embedding_noise(self.unwrapped.model, ", "embedding_noise(self.policy.model, "),),
    ),
    Bug(
        "unknown_settings_dropped",
        "a setting that is misspelt is dropped without a word",
        "S-31: trlX",
        "rloo",
        ("errors_at_the_door",),
        (("    rloo_k: int = ", '    model_config = {"extra": "ignore"}\n    rloo_k: int = '),),
    ),
    Bug(
        "batch_changed_in_place",
        "a batch is changed while it is read, so the second pass over it reads something else",
        "S-32: trlX, of prompts",
        "rloo",
        ("batch_is_frozen",),
        (
            (
                "        ratio = log_ratio.exp()\n",
                "        ratio = log_ratio.exp()\n        batch.advantages.mul_(0.5)\n",
            ),
        ),
    ),
    # ----------------------------------------------------------------------------------------------- of the loop
    Bug(
        "means_of_means",
        "the loss is averaged over each micro-batch, and these averages over their number",
        "S-62: TRL, verl, SkyRL, prime-rl, slime",
        "sft",
        ("micro_batches",),
        loop="MeansOfMeans",
    ),
    Bug(
        "micro_batches_summed",
        "gradients of micro-batches are added up and not divided",
        "S-11: trlX",
        "sft",
        ("micro_batches",),
        loop="MicroBatchesSummed",
    ),
    Bug(
        "means_of_ranks",
        "each process averages over its own rows, and these averages are averaged",
        "S-62, S-38: TRL",
        "sft",
        ("two_processes",),
        loop="MeansOfRanks",
    ),
    Bug(
        "gradients_not_exchanged",
        "the loss calls the model itself and not what wraps it, so processes do not exchange gradients",
        "S-48: TRL",
        "sft",
        ("two_processes",),
        (
            (
                "            logprobs = self.policy(batch).logprobs\n",
                "            logprobs = self.unwrapped(batch).logprobs\n",
            ),
        ),
    ),
    Bug(
        "moments_of_one_process",
        "each process whitens advantages by the moments of its own rows",
        "S-10, S-16: trlX, TRL",
        "ppo",
        ("two_processes",),
        (("whiten(advantages, mask, reduce=self.reduce)", "whiten(advantages, mask)"),),
    ),
    Bug(
        "one_seed_for_all",
        "processes sample with one seed, and so the same for equal prompts",
        "S-55: TRL",
        "rloo",
        ("two_processes",),
        loop="OneSeedForAll",
    ),
    Bug(
        "clipped_once",
        "gradients are clipped at the first step only",
        "S-22: TRL",
        "sft",
        ("clipping",),
        loop="ClippedOnce",
    ),
    Bug(
        "guard_that_steps",
        "the guard of the ratio sets the loss to zero, and the optimizer steps by momentum and decay",
        "S-21: TRL",
        "ppo",
        ("skipped_steps",),
        loop="GuardThatSteps",
    ),
    Bug(
        "schedule_first",
        "the schedule moves before the optimizer",
        "S-54: async_rlhf",
        "sft",
        ("schedule",),
        loop="ScheduleFirst",
    ),
    Bug(
        "optimizer_forgotten",
        "a resumed run begins with empty moments",
        "S-20: trlX, TRL",
        "sft",
        ("resume_every_step",),
        loop="OptimizerForgotten",
    ),
    Bug(
        "position_forgotten",
        "a resumed run goes over its data from the start again",
        "S-20: trlX, TRL",
        "sft",
        ("resume_every_step",),
        loop="PositionForgotten",
    ),
    Bug(
        "cursor_forgotten",
        "a resumed run samples for the first prompts again",
        "S-20: trlX, TRL",
        "rloo",
        ("resume_every_step",),
        loop="CursorForgotten",
    ),
    Bug(
        "sampler_forgotten",
        "the state of what samples are drawn with is not saved",
        "S-20, S-55: trlX, TRL",
        "rloo",
        ("resume_every_step",),
        loop="SamplerForgotten",
    ),
    Bug(
        "schedule_forgotten",
        "a resumed run begins its schedule again",
        "S-20: trlX, TRL",
        "sft",
        ("resume_every_step",),
        loop="ScheduleForgotten",
    ),
    Bug(
        "exported_wrapper",
        "an export has the wrapper's names, and reloads as random weights",
        "S-19: trlX",
        "ppo",
        ("export",),
        loop="ExportedWrapper",
    ),
    Bug(
        "evaluation_draws",
        "an evaluation uses up randomness of training",
        "the field",
        "rloo",
        ("evaluation_is_free",),
        loop="EvaluationDraws",
    ),
    Bug(
        "global_randomness",
        "training draws from the process's global generator",
        "S-34: TRL",
        "sft",
        ("global_rng",),
        loop="GlobalRandomness",
    ),
    Bug(
        "reference_in_train_mode",
        "the reference draws dropout",
        "S-17: trlX, TRL",
        "rloo",
        ("first_update",),
        loop="ReferenceInTrainMode",
    ),
    Bug(
        "reference_skips_a_block",
        "the reference is made of the upper blocks, fed with what the lower ones should have been fed with",
        "S-05: trlX",
        "rloo",
        ("first_update",),
        loop="ReferenceSkipsABlock",
    ),
    Bug(
        "reference_moves",
        "the reference shares embeddings that are trained",
        "S-05, S-25: trlX, TRL",
        "rloo",
        ("reference_is_frozen",),
        loop="ReferenceMoves",
    ),
    Bug(
        "adapter_stays_on",
        "the reference of a model with an adapter is that model with its adapter",
        "S-26: TRL",
        "rloo",
        ("adapter",),
        loop="AdapterStaysOn",
    ),
    Bug(
        "rows_changed",
        "prompts are changed by the first use of them",
        "S-32: trlX",
        "rloo",
        ("batch_is_frozen",),
        loop="RowsChanged",
    ),
    Bug(
        "stale_sampler",
        "samples are drawn from weights that the updates do not reach",
        "S-53: async_rlhf",
        "rloo",
        ("sampling_distribution",),
        loop="StaleSampler",
    ),
    Bug(
        "freezes_nothing",
        "layers that should be frozen are trained",
        "S-59: trlX",
        "sft",
        ("gradient_reaches",),
        (("        return make_policy(model)\n", "        return make_policy(model.requires_grad_(True))\n"),),
    ),
    Bug(
        "half_precision_weights",
        "with mixed precision the weights themselves are cast",
        "S-49: TRL",
        "sft",
        ("bf16_autocast",),
        (
            (
                "        return make_policy(model)\n",
                '        return make_policy(model.bfloat16() if config.train.mixed_precision == "bf16" else model)\n',
            ),
        ),
    ),
    Bug(
        "k3_the_wrong_way",
        "k3 takes the reference's log-probabilities for the policy's, and estimates no KL",
        "S-06: trlX",
        "grpo",
        ("reported_kl",),
        (
            (
                "kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))",
                "kl_k3(zero_masked(batch.ref_logprobs, mask), logprobs)",
            ),
        ),
    ),
    Bug(
        "sampled_with_dropout",
        "the model samples in training mode",
        "S-17: trlX",
        "rloo",
        ("sampling_distribution",),
        loop="SampledWithDropout",
    ),
)
