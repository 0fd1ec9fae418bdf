"""The table: what was shipped, where it is planted, and which checks must find it.

Where the source is S-nn, the bug is one of the list of faults found in trlX, TRL 0.7 and 0.8, async_rlhf and
ddpo-pytorch. What is "of the field" has been in the issues of many.
"""

from __future__ import annotations

from mutants.laws import OF_LAWS
from mutants.planting import Bug
from mutants.strange import STRANGE

BUGS = (
    *OF_LAWS,
    # ------------------------------------------------------------------------------------- masks, padding, EOS
    Bug(
        "eos_unlearnt_online",
        "EOS is masked out of what is learnt, because it is also what pads; the policy never learns to stop",
        "trlX",
        "ppo",
        ("eos_is_trained",),
        patch="""
-from dataclasses import dataclass
+from dataclasses import dataclass, replace
@@
         sequences, policy = rollouts.sequences, self.behaviour(rollouts)
+        kept = sequences.response_mask & (sequences.input_ids != self.tokenizer.eos_token_id)
+        sequences = replace(sequences, response_mask=kept)
""",
    ),
    Bug(
        "eos_unlearnt_offline",
        "labels are dropped wherever the id is that of padding, which is EOS's",
        "TRL's collator",
        "sft",
        ("eos_is_trained",),
        patch="""
         sequences = self.encode_samples(samples)
+        kept = sequences.response_mask & (sequences.input_ids != self.tokenizer.eos_token_id)
+        sequences = replace(sequences, response_mask=kept)
""",
    ),
    Bug(
        "eos_of_pairs_unlearnt",
        "EOS is left out of the log-probabilities of both sides of a pair",
        "TRL",
        "dpo",
        ("eos_is_trained",),
        patch="""
-        pairs = self.through_trunk(self.encode_preferences(rows))
+        pairs, eos = self.encode_preferences(rows), self.tokenizer.eos_token_id
+        pairs = Preferences(*(
+            replace(side, response_mask=side.response_mask & (side.input_ids != eos))
+            for side in (pairs.chosen, pairs.rejected)
+        ))
""",
    ),
    Bug(
        "first_token_unlearnt",
        "the first token that an encoder-decoder's decoder chooses has no part in the loss",
        "TRL; trlX",
        "rloo",
        ("encoder_decoder",),
        patch="""
         mask = batch.sequences.response_mask
+        if self.text.is_encoder_decoder:
+            mask = mask & (mask.cumsum(1) > 1)
""",
    ),
    Bug(
        "score_one_token_late",
        "the score lands on the token behind the last one, which no loss reads",
        "trlX",
        "ppo",
        ("credit_of_scores",),
        patch="""
-        placed = place_scores(scores, sequences.response_mask)
+        placed = place_scores(scores, sequences.response_mask).roll(1, 1)
""",
    ),
    Bug(
        "score_in_the_last_column",
        "the score stands in the last column, which in shorter rows is padding",
        "TRL, of the place that a reward is read from",
        "ppo",
        ("credit_of_scores",),
        patch="""
-        placed = place_scores(scores, sequences.response_mask)
+        placed = place_scores(scores, torch.ones_like(sequences.response_mask))
""",
    ),
    Bug(
        "mask_as_a_factor",
        "a product with the mask leaves NaN what is NaN under it",
        "trlX",
        "ppo",
        ("mask_law",),
        patch="""
-        loss = masked_mean(policy, mask) + method.vf_coef * masked_mean(value, mask)
+        loss = (policy * mask).sum() / mask.sum() + method.vf_coef * masked_mean(value, mask)
""",
    ),
    Bug(
        "mean_over_padding",
        "the loss is a mean over columns, padding among them, so it depends on the longest row in the batch",
        "TRL, trlX",
        "sft",
        ("padding_amount", "micro_batches"),
        patch="""
-        return nll(logprobs, batch.response_mask), found
+        return -logprobs.mean(), found
""",
    ),
    Bug(
        "metric_over_padding",
        "a metric is divided by the padded size",
        "trlX, TRL",
        "ppo",
        ("metric_totals",),
        patch="""
-            "policy/approx_kl": Mean.of(ratio - 1 - log_ratio, mask),
+            "policy/approx_kl": Mean.of(ratio - 1 - log_ratio),
""",
    ),
    Bug(
        "entropy_of_padding",
        "every token of padding adds 1 to the entropy",
        "async_rlhf",
        "ppo",
        ("padding_amount",),
        patch="""
-                "policy/entropy": Mean.of(x.entropy, mask),
+                "policy/entropy": Mean.of(x.entropy.masked_fill(~mask, 1.0)),
""",
    ),
    Bug(
        "prompts_are_learnt",
        "prompts are labels too",
        "trlX",
        "rft",
        ("sampled_ids",),
        patch="""
-            [[False] * len(q) + [i >= 0 for i in response] for q, response in zip(queries, responses, strict=True)],
+            [[False] + [True] * (len(q) + len(r) - 1) for q, r in zip(queries, responses, strict=True)],
""",
    ),
    Bug(
        "images_lost_in_the_pool",
        "what is learnt again is made of token ids, without the images of the prompts",
        "trainkit",
        "rft",
        ("images",),
        patch="""
-        return replace(rows, images=images)
+        return rows
""",
    ),
    Bug(
        "images_prepared_otherwise",
        "images are scaled otherwise in training than in sampling",
        "trainkit",
        "rloo",
        ("images",),
        patch="""
-        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
+        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
+        if sequences.images is not None:
+            sequences.images.pixel_values.div_(2)
""",
    ),
    Bug(
        "packed_samples_attend",
        "samples that are packed into one row attend to each other",
        "TRL",
        "sft",
        ("packing",),
        patch="""
-        return sequences.packed([len(row["samples"]) for row in rows]) if packed else sequences
+        return replace(sequences.packed([len(row["samples"]) for row in rows]), segments=None) if packed else sequences
""",
    ),
    Bug(
        "retokenised",
        "what is learnt is the text encoded again, with other ids than were sampled",
        "trlX",
        "rft",
        ("sampled_ids",),
        patch="""
-        return RFTRows(rollouts.sequences, per_response(scores), positions)
+        eos = self.tokenizer.eos_token_id
+        ids = [[*self.tokenizer.encode(text), eos] for text in rollouts.outputs]
+        prompts = [query.tolist() for query in rollouts.sequences.queries]
+        return RFTRows(Sequences.from_lists(prompts, ids), per_response(scores), positions)
""",
    ),
    # ---------------------------------------------------------------------------- divergence, ratios, advantages
    Bug(
        "trained_at_temperature_1",
        "samples are drawn at the temperature, and learnt as if it were 1",
        "trlX, TRL",
        "ppo",
        ("sampling_distribution",),
        patch="""
-            temperature=config.rollout.temperature,
+            temperature=1.0,
""",
    ),
    Bug(
        "ratio_between_temperatures",
        "the ratio's old log-probabilities are the sampler's at its temperature, the new ones at 1",
        "trlX, TRL",
        "ppo",
        ("first_update",),
        patch="""
-            temperature=config.rollout.temperature,
+            temperature=1.0,
@@
-            logprobs=policy.logprobs,
+            logprobs=rollouts.logprobs,
""",
    ),
    Bug(
        "rounded_old_logprobs",
        "old log-probabilities are kept in half precision, so the first ratio is not 1",
        "TRL, ddpo-pytorch",
        "rloo",
        ("first_update",),
        patch="""
-        return RLOORollouts(sequences, policy.logprobs, reference.logprobs, policy.entropy, placed, weights)
+        rounded = policy.logprobs.bfloat16().float()
+        return RLOORollouts(sequences, rounded, reference.logprobs, policy.entropy, placed, weights)
""",
    ),
    Bug(
        "importance_weights_ignored",
        "rollouts of older weights are learnt from as if they were the policy's own",
        "of the field",
        "grpo",
        ("corrections_as_declared",),
        patch="""
-        advantages = advantages * batch.weights
""",
    ),
    Bug(
        "importance_weights_whitened",
        "advantages are whitened after they are weighed, so that weights of some responses change the others",
        "of the field",
        "ppo",
        ("corrections_as_declared",),
        patch="""
-        advantages = whiten(advantages, mask, reduce=self.reduce) * x.weights
+        advantages = whiten(advantages * x.weights, mask, reduce=self.reduce)
""",
    ),
    Bug(
        "old_policy_instead_of_the_sampler",
        "with the correction 'sampler' the ratio is still that to the policy before the collection",
        "of the field",
        "rloo",
        ("corrections_as_declared",),
        patch="""
-        weights = self.importance_weights(rollouts, policy)
+        weights, policy = self.importance_weights(rollouts, policy), self.unwrapped(sequences, entropy=True)
""",
    ),
    Bug(
        "kl_without_gradient",
        "the divergence in the loss is computed from the old log-probabilities, and pulls nothing back",
        "of the field",
        "grpo",
        ("kl_pulls_back@kl",),
        patch="""
-            k3 = kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))  # of the current policy: it has a gradient
+            k3 = kl_k3(zero_masked(batch.old_logprobs, mask), zero_masked(batch.ref_logprobs, mask))
""",
    ),
    Bug(
        "kl_the_wrong_way",
        "the divergence from the reference is rewarded",
        "a sign that is easily wrong",
        "ppo",
        ("kl_pulls_back",),
        patch="""
-        return kl_k1(policy.logprobs, reference.logprobs)
+        return kl_k1(reference.logprobs, policy.logprobs)
""",
    ),
    Bug(
        "whitened_over_padding",
        "mean and deviation of the advantages count padding",
        "trlX",
        "ppo",
        ("padding_amount",),
        patch="""
-        advantages = whiten(advantages, mask, reduce=self.reduce) * x.weights
+        advantages = whiten(advantages, torch.ones_like(mask), reduce=self.reduce)
""",
    ),
    Bug(
        "whitened_per_micro_batch",
        "advantages are whitened over each micro-batch",
        "trlX",
        "ppo",
        ("micro_batches",),
        patch="""
-        advantages = whiten(advantages, mask, reduce=self.reduce) * x.weights
@@
-        policy = clipped_surrogate(ratio, batch.advantages, cliprange=method.cliprange)
+        policy = clipped_surrogate(ratio, whiten(batch.advantages, mask), cliprange=method.cliprange)
""",
    ),
    Bug(
        "no_deviation",
        "advantages are divided by the deviation of their group, also where it is 0",
        "trlX, TRL",
        "grpo",
        ("finite_at_extremes",),
        patch="""
-            advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
+            advantages = advantages / groups.std(1, keepdim=True)
""",
    ),
    Bug(
        "first_of_k_trained",
        "of the k responses to a prompt only the first is learnt from",
        "async_rlhf",
        "rloo",
        ("credit_of_scores",),
        patch="""
-            return RLOORows(x.sequences, x.logprobs, advantages * weights)
+            rows = RLOORows(x.sequences, x.logprobs, advantages * weights)
+            return rows.select(torch.arange(0, len(x), self.method.rloo_k))
""",
    ),
    Bug(
        "advantages_of_integers",
        "advantages have the type of the rewards, so that those of integers are cut to integers",
        "ddpo-pytorch, TRL",
        "rloo",
        ("integer_scores",),
        patch="""
         advantages = leave_one_out(masked_sum(x.scores + penalty, mask, dim=1), self.method.rloo_k)
+        advantages = advantages.to(self.kind).float()
""",
        loop="AdvantagesOfIntegers",
    ),
    Bug(
        "truncated_advantages",
        "advantages are written into an array of integers",
        "ddpo-pytorch, TRL",
        "rloo",
        ("credit_of_scores",),
        patch="""
         advantages = leave_one_out(masked_sum(x.scores + penalty, mask, dim=1), self.method.rloo_k)
+        advantages = advantages.trunc()
""",
    ),
    Bug(
        "token_kl_that_is_none",
        "a setting for the divergence of each token adds it up over the response again, and changes nothing",
        "TRL",
        "rloo",
        ("fields_have_effects",),
        patch="""
-        past = running_sums(penalty) - penalty if self.method.kl_level == "token" else torch.zeros_like(penalty)
+        past = torch.zeros_like(penalty)
""",
    ),
    # -------------------------------------------------------------------------------------------- losses of pairs
    Bug(
        "margins_broadcast",
        "margins [B, 1] and rewards [B] make a loss of B × B pairs",
        "TRL",
        "reward",
        ("micro_batches",),
        patch="""
-    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2
+    return -F.logsigmoid(chosen - rejected - margins.unsqueeze(1)).mean(0) + center_coef * (chosen + rejected) ** 2
""",
    ),
    Bug(
        "pair_mean_over_padding",
        "log-probabilities of a response are a mean over columns",
        "TRL",
        "dpo",
        ("padding_amount",),
        patch="""
-        sums = masked_sum(logprobs, mask, dim=1)
+        sums = logprobs.mean(1)
""",
    ),
    # ------------------------------------------------------------------------------------ what outlasts a batch
    Bug(
        "rate_of_targets_exchanged",
        "the target network moves by one minus the rate",
        "of the field",
        "ilql",
        ("targets_follow",),
        patch="""
-            target.lerp_(parameter, alpha)
+            target.lerp_(parameter, 1 - alpha)
""",
    ),
    Bug(
        "decay_for_rate",
        "a running baseline moves by its decay",
        "of the field",
        "_sound_ema_baseline",
        ("targets_follow",),
        patch="""
-        self.baseline = self.method.decay * before + (1 - self.method.decay) * total / count
+        self.baseline = (1 - self.method.decay) * before + self.method.decay * total / count
""",
    ),
    Bug(
        "target_never_synced",
        "the target network stays what it was",
        "trlX",
        "ilql",
        ("kept_state_moves",),
        patch="""
-            self.unwrapped.head.sync(self.method.alpha)
+            pass
""",
    ),
    Bug(
        "unbounded_weights",
        "weights of advantages are not bounded, whatever the setting says",
        "trlX",
        "ilql",
        ("finite_at_extremes",),
        patch="""
-    return (beta * advantages).clamp(max=math.log(limit)).exp()
+    return (beta * advantages).exp()
""",
    ),
    Bug(
        "end_percentile_unused",
        "thresholds never reach the last percentile that is set",
        "trlX",
        "rft",
        ("fields_have_effects",),
        patch="""
-        first, last = method.start_percentile, method.end_percentile
+        first = last = method.start_percentile
""",
    ),
    Bug(
        "rows_that_fill_up_are_trained",
        "where responses cannot be divided among the processes, the first ones are trained twice",
        "trainkit before 0.1",
        "rft",
        ("two_processes",),
        patch="""
-    filled = [*kept, *[(kept[0][0], "[]")] * (-len(kept) % batch_size)]
+    filled = [*kept, *kept[: -len(kept) % world]]
""",
    ),
    Bug(
        "visits_not_saved",
        "a resumed run begins again with the first thresholds",
        "trlX",
        "rft",
        ("resume_every_step",),
        patch="""
-    remembers: ClassVar[dict[str, Any]] = {"visits": dict, "pools": dict}
+    remembers: ClassVar[dict[str, Any]] = {"pools": dict}
@@
     pools: dict[str, dict[str, float]]  # scores by response, latest last; the same on all processes
+
+    def __init__(self, *args: Any, **kwargs: Any) -> None:
+        super().__init__(*args, **kwargs)
+        self.visits = {}
""",
    ),
    Bug(
        "pools_not_saved",
        "the responses that thresholds are computed from are not in the checkpoint",
        "trlX",
        "rft",
        ("resume_every_step",),
        patch="""
-    remembers: ClassVar[dict[str, Any]] = {"visits": dict, "pools": dict}
+    remembers: ClassVar[dict[str, Any]] = {"visits": dict}
@@
     pools: dict[str, dict[str, float]]  # scores by response, latest last; the same on all processes
+
+    def __init__(self, *args: Any, **kwargs: Any) -> None:
+        super().__init__(*args, **kwargs)
+        self.pools = {}
@@
-        method, pools = self.method, [self.pools[query] for query in queries]
+        method, pools = self.method, [self.pools.get(query, {"[5]": 0.0}) for query in queries]
""",
    ),
    Bug(
        "kl_coef_not_saved",
        "a resumed run begins with the first price of divergence",
        "trlX",
        "ppo",
        ("state_is_complete",),
        patch="""
-            self.kl.coef = state["kl_coef"]
+            pass
""",
    ),
    Bug(
        "critic_per_micro_batch",
        "the critic's loss is a mean over each micro-batch, so its gradient grows with their number",
        "trlX",
        "ppo",
        ("micro_batches",),
        patch="""
-        loss = masked_mean(policy, mask) + method.vf_coef * masked_mean(value, mask)
+        loss = masked_mean(policy, mask) + method.vf_coef * masked_mean(value, mask) * self.tokens / batch.weight
@@
             "values/clipfrac": Mean.of(value > 0.5 * (new.values - batch.returns) ** 2, mask),
             **self.statistics(batch, new),
         }
+
+    def prepare_step(self, batch: PPOBatch) -> PPOBatch:
+        self.tokens = batch.weight
+        return batch
""",
    ),
    Bug(
        "responses_counted_as_tokens",
        "the loss is a mean over tokens, and micro-batches are weighted by their rows",
        "TRL, verl, SkyRL, prime-rl, slime",
        "ppo",
        ("micro_batches", "weight_counts"),
        patch="""
     returns: Tensor
+
+    @property
+    def weight(self) -> Tensor:
+        return torch.tensor(float(len(self)))
""",
    ),
    Bug(
        "attribute_of_the_wrapper",
        "the model is asked through what accelerate wraps it in, which has no such attribute with several processes",
        "trlX",
        "sft",
        ("two_processes",),
        patch="""
-        with embedding_noise(self.unwrapped, self.method.neftune_alpha):
+        with embedding_noise(self.policy, self.method.neftune_alpha):
""",
    ),
    Bug(
        "unknown_settings_dropped",
        "a setting that is misspelt is dropped without a word",
        "trlX",
        "rloo",
        ("errors_at_the_door",),
        patch="""
+    model_config = {"extra": "ignore"}
     rloo_k: GroupSize = 4
""",
    ),
    Bug(
        "batch_changed_in_place",
        "a batch is changed while it is read, so the second pass over it reads something else",
        "trlX, of prompts",
        "rloo",
        ("batch_is_frozen",),
        patch="""
         ratio = log_ratio.exp()
+        batch.advantages.mul_(0.5)
""",
    ),
    # ----------------------------------------------------------------------------------------------- of the loop
    Bug(
        "means_of_means",
        "the loss is averaged over each micro-batch, and these averages over their number",
        "TRL, verl, SkyRL, prime-rl, slime",
        "sft",
        ("micro_batches",),
        loop="MeansOfMeans",
    ),
    Bug(
        "micro_batches_summed",
        "gradients of micro-batches are added up and not divided",
        "trlX",
        "sft",
        ("micro_batches",),
        loop="MicroBatchesSummed",
    ),
    Bug(
        "means_of_ranks",
        "each process averages over its own rows, and these averages are averaged",
        "TRL",
        "sft",
        ("two_processes",),
        loop="MeansOfRanks",
    ),
    Bug(
        "gradients_not_exchanged",
        "the loss calls the model itself and not what wraps it, so processes do not exchange gradients",
        "TRL",
        "sft",
        ("two_processes",),
        patch="""
-            logprobs = self.policy(batch).logprobs
+            logprobs = self.unwrapped(batch).logprobs
""",
    ),
    Bug(
        "moments_of_one_process",
        "each process whitens advantages by the moments of its own rows",
        "trlX, TRL",
        "ppo",
        ("two_processes",),
        patch="""
-        advantages = whiten(advantages, mask, reduce=self.reduce) * x.weights
+        advantages = whiten(advantages, mask) * x.weights
""",
    ),
    Bug(
        "one_seed_for_all",
        "processes sample with one seed, and so the same for equal prompts",
        "TRL",
        "rloo",
        ("two_processes",),
        loop="OneSeedForAll",
    ),
    Bug(
        "observations_dropped",
        "an episode is taken apart into prompt and outputs, and what the environment said is not there in training",
        "of the field",
        "rloo",
        ("episodes_are_whole",),
        loop="ObservationsDropped",
    ),
    Bug(
        "observations_trained",
        "everything after the prompt is taken for the response, what the environment said too",
        "of the field",
        "ppo",
        ("episodes_are_whole",),
        loop="ObservationsTrained",
    ),
    Bug(
        "last_turn_paid",
        "of the rewards of an episode only that of its last turn is learnt from",
        "of the field",
        "ppo",
        ("turn_rewards",),
        loop="LastTurnPaid",
    ),
    Bug(
        "drawn_by_rank",
        "the seeds of samples depend on the process, so a run depends on the number of processes",
        "of the field",
        "rloo",
        ("two_processes",),
        loop="DrawnByRank",
    ),
    Bug(
        "shuffled_apart",
        "every process shuffles its own rows, so what makes up a step depends on the number of processes",
        "of the field",
        "ppo",
        ("two_processes",),
        loop="ShuffledApart",
    ),
    Bug(
        "clipped_once",
        "gradients are clipped at the first step only",
        "TRL",
        "sft",
        ("clipping",),
        loop="ClippedOnce",
    ),
    Bug(
        "guard_that_steps",
        "the guard of the ratio sets the loss to zero, and the optimizer steps by momentum and decay",
        "TRL",
        "ppo",
        ("skipped_steps",),
        loop="GuardThatSteps",
    ),
    Bug(
        "schedule_first",
        "the schedule moves before the optimizer",
        "async_rlhf",
        "sft",
        ("schedule",),
        loop="ScheduleFirst",
    ),
    Bug(
        "optimizer_forgotten",
        "a resumed run begins with empty moments",
        "trlX, TRL",
        "sft",
        ("resume_every_step",),
        loop="OptimizerForgotten",
    ),
    Bug(
        "position_forgotten",
        "a resumed run goes over its data from the start again",
        "trlX, TRL",
        "sft",
        ("resume_every_step",),
        loop="PositionForgotten",
    ),
    Bug(
        "cursor_forgotten",
        "a resumed run samples for the first prompts again",
        "trlX, TRL",
        "rloo",
        ("resume_every_step",),
        loop="CursorForgotten",
    ),
    Bug(
        "sampler_forgotten",
        "the state of what samples are drawn with is not saved",
        "trlX, TRL",
        "rloo",
        ("resume_every_step",),
        loop="SamplerForgotten",
    ),
    Bug(
        "schedule_forgotten",
        "a resumed run begins its schedule again",
        "trlX, TRL",
        "sft",
        ("resume_every_step",),
        loop="ScheduleForgotten",
    ),
    Bug(
        "exported_wrapper",
        "an export has the wrapper's names, and reloads as random weights",
        "trlX",
        "ppo",
        ("export",),
        loop="ExportedWrapper",
    ),
    Bug(
        "evaluation_draws",
        "an evaluation uses up randomness of training",
        "of the field",
        "rloo",
        ("evaluation_is_free",),
        loop="EvaluationDraws",
    ),
    Bug(
        "global_randomness",
        "training draws from the process's global generator",
        "TRL",
        "sft",
        ("global_rng",),
        loop="GlobalRandomness",
    ),
    Bug(
        "reference_in_train_mode",
        "the reference draws dropout",
        "trlX, TRL",
        "rloo",
        ("first_update",),
        loop="ReferenceInTrainMode",
    ),
    Bug(
        "reference_skips_a_block",
        "the reference is made of the upper blocks, fed with what the lower ones should have been fed with",
        "trlX",
        "rloo",
        ("first_update",),
        loop="ReferenceSkipsABlock",
    ),
    Bug(
        "reference_moves",
        "the reference shares embeddings that are trained",
        "trlX, TRL",
        "rloo",
        ("reference_is_frozen",),
        loop="ReferenceMoves",
    ),
    Bug(
        "adapter_stays_on",
        "the reference of a model with an adapter is that model with its adapter",
        "TRL",
        "rloo",
        ("adapter",),
        loop="AdapterStaysOn",
    ),
    Bug(
        "rows_changed",
        "prompts are changed by the first use of them",
        "trlX",
        "rloo",
        ("batch_is_frozen",),
        loop="RowsChanged",
    ),
    Bug(
        "stale_sampler",
        "samples are drawn from weights that the updates do not reach",
        "async_rlhf",
        "rloo",
        ("sampling_distribution",),
        loop="StaleSampler",
    ),
    Bug(
        "freezes_nothing",
        "layers that should be frozen are trained",
        "trlX",
        "sft",
        ("gradient_reaches",),
        patch="""
-        return make_policy(model)
+        return make_policy(model.requires_grad_(True))
""",
    ),
    Bug(
        "half_precision_weights",
        "with mixed precision the weights themselves are cast",
        "TRL",
        "sft",
        ("bf16_autocast",),
        patch="""
-        return make_policy(model)
+        return make_policy(model.bfloat16() if config.train.mixed_precision == "bf16" else model)
""",
    ),
    Bug(
        "k3_the_wrong_way",
        "k3 takes the reference's log-probabilities for the policy's, and estimates no KL",
        "trlX",
        "grpo",
        ("reported_kl@kl",),
        patch="""
-            k3 = kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))  # of the current policy: it has a gradient
+            k3 = kl_k3(zero_masked(batch.ref_logprobs, mask), logprobs)
""",
    ),
    Bug(
        "sampled_with_dropout",
        "the model samples in training mode",
        "trlX",
        "rloo",
        ("sampling_distribution",),
        loop="SampledWithDropout",
    ),
    # ------------------------------------------------------- bugs that the first edition of the kit did not find
    Bug(
        "second_best_instead_of_worst",
        "the best of k responses is paired with the second-best, which only with k = 2 is the worst",
        "of the field",
        "online_dpo",
        ("credit_follows_scores",),
        patch="""
-    best, worst = first + groups.argmax(1), first + groups.argmin(1)
+    best, worst = first + groups.argmax(1), first + groups.argsort(1, descending=True)[:, 1]
""",
    ),
    Bug(
        "groups_merged_by_prompt",
        "the group of a response is all responses to prompts of the same text",
        "of the field",
        "rloo",
        ("prompts_may_repeat",),
        patch="""
-        advantages = leave_one_out(masked_sum(x.scores + penalty, mask, dim=1), self.method.rloo_k)
+        totals = masked_sum(x.scores + penalty, mask, dim=1)
+        names = [query.tolist() for query in x.sequences.queries]
+        same = torch.tensor([[one == other for other in names] for one in names], device=totals.device)
+        others = (same & ~torch.eye(len(names), dtype=torch.bool, device=totals.device)).float()
+        advantages = totals - (others @ totals) / others.sum(1)
""",
    ),
    Bug(
        "sides_swapped_when_shorter",
        "the longer side of a pair is taken for the chosen one",
        "of the field",
        "dpo",
        ("sides_of_pairs",),
        patch="""
-        pairs = self.through_trunk(self.encode_preferences(rows))
+        pairs = self.encode_preferences(rows)
+        swap = pairs.rejected.lengths < pairs.chosen.lengths
+        both, n = pairs.both, len(rows)
+        at = torch.arange(n, device=swap.device)
+        pairs = Preferences(both.select(torch.where(swap, at + n, at)), both.select(torch.where(swap, at, at + n)))
""",
    ),
    Bug(
        "entropy_bonus_subtracted",
        "the entropy bonus has the sign of a penalty",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-            loss = loss - method.ent_coef * masked_mean(new.entropy, mask)
+            loss = loss + method.ent_coef * masked_mean(new.entropy, mask)
""",
    ),
    Bug(
        "label_smoothing_reversed",
        "label smoothing sharpens labels",
        "of the field",
        "dpo",
        ("effects_as_declared",),
        patch="""
-            return loss(chosen, rejected, method.beta, method.label_smoothing)
+            return loss(chosen, rejected, method.beta, 1 - method.label_smoothing)
""",
    ),
    Bug(
        "margin_added",
        "the margin of a pair makes its comparison easier instead of harder",
        "of the field",
        "reward",
        ("sides_of_pairs",),
        patch="""
-    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2
+    return -F.logsigmoid(chosen - rejected + margins) + center_coef * (chosen + rejected) ** 2
""",
    ),
    Bug(
        "missing_eos_rewarded",
        "the penalty of truncated responses is added to their scores",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        if self.method.missing_eos_penalty is not None:
+        if self.method.missing_eos_penalty is not None:
+            added = -2 * self.method.missing_eos_penalty  # it is subtracted once in the next line
+            placed = penalise_truncated(placed, rollouts.terminated, sequences.response_mask, added)
""",
    ),
    Bug(
        "bootstrap_of_terminated",
        "responses that ended are bootstrapped like truncated ones",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        cut = ~rollouts.terminated
+        cut = torch.ones_like(rollouts.terminated)
""",
    ),
    Bug(
        "surrogate_without_the_max",
        "the surrogate is the clipped term alone, so a ratio that has left the range the wrong way stays there",
        "of the field",
        "rloo",
        ("surrogate_is_pessimistic",),
        patch="""
-        loss = clipped_surrogate(ratio, batch.advantages, cliprange=self.method.cliprange)
+        loss = -batch.advantages * ratio.clamp(1 - self.method.cliprange, 1 + self.method.cliprange)
""",
    ),
    Bug(
        "clipped_above_only",
        "ratios are clipped above and not below",
        "of the field",
        "ppo",
        ("surrogate_is_pessimistic",),
        patch="""
-        policy = clipped_surrogate(ratio, batch.advantages, cliprange=method.cliprange)
+        clipped = ratio.clamp(max=1 + method.cliprange)
+        policy = torch.maximum(-batch.advantages * ratio, -batch.advantages * clipped)
""",
    ),
    Bug(
        "self_ratio",
        "the ratio is that of the policy to itself, always 1",
        "of the field",
        "rloo",
        ("surrogate_is_pessimistic",),
        patch="""
-        log_ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask)
+        logprobs = self.policy(batch.sequences).logprobs
+        log_ratio = zero_masked(logprobs - logprobs.detach(), mask)
""",
    ),
    Bug(
        "returns_whitened",
        "the critic's targets are whitened like the advantages",
        "of the field",
        "ppo",
        ("fields_keep_the_scale_of_scores",),
        patch="""
-        total, episodes = self.reduce(torch.stack(kl.tensors())).tolist()
+        returns = whiten(returns, mask, reduce=self.reduce)
+        total, episodes = self.reduce(torch.stack(kl.tensors())).tolist()
""",
    ),
    Bug(
        "token_kl_off_by_one",
        "a token does not pay for its own KL, only for that of later tokens",
        "of the field",
        "rloo",
        ("kl_penalty_counts_where_declared",),
        patch="""
-        past = running_sums(penalty) - penalty if self.method.kl_level == "token" else torch.zeros_like(penalty)
+        past = running_sums(penalty) if self.method.kl_level == "token" else torch.zeros_like(penalty)
""",
        missed="off by one token",
    ),
    Bug(
        "kl_left_out_of_the_baseline",
        "the baseline is the mean of scores, without the KL penalties of the others",
        "of the field",
        "rloo",
        ("kl_penalty_counts_where_declared",),
        patch="""
-        advantages = leave_one_out(masked_sum(x.scores + penalty, mask, dim=1), self.method.rloo_k)
+        advantages = leave_one_out(masked_sum(x.scores, mask, dim=1), self.method.rloo_k)
+        advantages = advantages + masked_sum(penalty, mask, dim=1)
""",
    ),
    Bug(
        "own_score_in_the_baseline",
        "the baseline is the mean of the whole group",
        "of the field",
        "rloo",
        ("own_score_left_out",),
        patch="""
-        advantages = leave_one_out(masked_sum(x.scores + penalty, mask, dim=1), self.method.rloo_k)
+        groups = masked_sum(x.scores + penalty, mask, dim=1).view(-1, self.method.rloo_k)
+        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
""",
        missed="the own score in the baseline",
    ),
    Bug(
        "rows_interleaved",
        "the responses to a prompt are looked for k rows apart",
        "of the field",
        "rloo",
        ("own_score_left_out", "credit_follows_scores"),
        patch="""
-        advantages = leave_one_out(masked_sum(x.scores + penalty, mask, dim=1), self.method.rloo_k)
+        totals = masked_sum(x.scores + penalty, mask, dim=1).view(self.method.rloo_k, -1)
+        advantages = leave_one_out(totals.T.flatten(), self.method.rloo_k).view(-1, self.method.rloo_k).T.flatten()
""",
    ),
    Bug(
        "awac_weight_undetached",
        "the weights of the language-model loss have a gradient, which lowers V",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-        return (outputs.head["target_q"] - outputs.head["values"]).detach()
+        return outputs.head["target_q"] - outputs.head["values"]
""",
    ),
    Bug(
        "target_update_the_wrong_way",
        "the target moves by 1 − α instead of α",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-            self.unwrapped.head.sync(self.method.alpha)
+            self.unwrapped.head.sync(1 - self.method.alpha)
""",
    ),
    Bug(
        "reference_half_live",
        "in half of the rows the policy stands in for the reference",
        "of the field",
        "rloo",
        ("reference_counts_in_every_row",),
        patch="""
-        reference = self.reference(sequences)
+        reference = self.reference(sequences)
+        live = torch.arange(len(sequences), device=scores.device).unsqueeze(1) % 2 == 0
+        reference = reference._replace(logprobs=torch.where(live, policy.logprobs, reference.logprobs))
""",
    ),
    Bug(
        "rejected_side_without_reference",
        "the rejected side is compared with itself instead of the reference",
        "of the field",
        "dpo",
        ("reference_counts_in_every_row",),
        patch="""
-        ratios = logps[0] - batch.ref_chosen, logps[1] - batch.ref_rejected
+        ratios = logps[0] - batch.ref_chosen, logps[1] - logps[1].detach()
""",
    ),
    Bug(
        "deviation_of_one_process",
        "each process divides by the standard deviation of its own rewards",
        "of the field",
        "grpo",
        ("two_processes@batch",),
        patch="""
-            moments.update(rewards, self.reduce)
+            moments.update(rewards)
""",
    ),
    Bug(
        "weight_without_equal_groups",
        "rows whose advantage is 0 have no weight, although the loss averages over them",
        "of the field",
        "grpo",
        ("accumulation@kl", "micro_batches@kl"),
        patch="""
-        return self.advantages.new_tensor(len(self))
+        return (self.advantages > 0).sum().float() + 1
""",
    ),
    Bug(
        "ratio_of_a_response_by_its_length",
        "the ratio of a response is the product of its tokens' ratios, where the geometric mean is meant",
        "of the field",
        "grpo",
        ("surrogate_is_pessimistic",),
        patch="""
-            log_ratio = zero_masked((log_ratio.sum(1) / lengths).unsqueeze(1).expand_as(mask), mask)
+            log_ratio = zero_masked(log_ratio.sum(1).unsqueeze(1).expand_as(mask), mask)
""",
    ),
    Bug(
        "upper_clip_range_ignored",
        "the upper limit of the ratio is that of the lower one",
        "of the field",
        "grpo",
        ("surrogate_is_pessimistic", "effects_as_declared"),
        patch="""
-        ratio, low, high = log_ratio.exp(), method.cliprange, method.cliprange_high or method.cliprange
+        ratio, low, high = log_ratio.exp(), method.cliprange, method.cliprange
""",
    ),
    Bug(
        "labels_exchanged",
        "desirable samples are lowered and undesirable ones raised",
        "of the field",
        "kto",
        ("labels_decide",),
        patch="""
-        margins = torch.where(desirable, rewards - point, point - rewards)
+        margins = torch.where(desirable, point - rewards, rewards - point)
""",
    ),
    Bug(
        "weights_of_labels_exchanged",
        "each kind of sample has the weight of the other",
        "of the field",
        "kto",
        ("effects_as_declared",),
        patch="""
-        weights = torch.where(batch.desirable, method.desirable_weight, method.undesirable_weight)
+        weights = torch.where(batch.desirable, method.undesirable_weight, method.desirable_weight)
""",
    ),
    Bug(
        "rewards_with_the_wrong_sign",
        "beside a teacher, rewards push the policy away from what is rewarded",
        "of the field",
        "distill",
        ("credit_of_scores@rewards",),
        patch="""
-        loss = told.divergence - batch.advantages.unsqueeze(1) * told.logprobs
+        loss = told.divergence + batch.advantages.unsqueeze(1) * told.logprobs
""",
    ),
    Bug(
        "estimate_of_the_kl_negated",
        "the estimate of the KL, to which samples are compared, has the wrong sign",
        "of the field",
        "kto",
        ("effects_as_declared",),
        patch="""
-        return replace(batch, kl=kl.expand(len(batch)))
+        return replace(batch, kl=-kl.expand(len(batch)))
""",
    ),
    Bug(
        "reference_half_live_in_the_loss",
        "in half of the rows the KL penalty is that of the policy from itself",
        "of the field",
        "grpo",
        ("reference_counts_in_every_row@kl",),
        patch="""
-            reference = self.reference(sequences).logprobs
+            reference = self.reference(sequences).logprobs
+            reference[::2] = policy.logprobs[::2]
""",
    ),
    Bug(
        "cispo_weight_undetached",
        "the clipped weight of a token has a gradient",
        "of the field",
        "grpo",
        ("surrogate_is_pessimistic",),
        patch="""
-            weight = ratio.detach().clamp(1 - low, 1 + high)
+            weight = ratio.clamp(1 - low, 1 + high)
""",
    ),
    Bug(
        "cispo_limits_exchanged",
        "the lower limit of a weight is that of the upper one, and the reverse",
        "of the field",
        "grpo",
        ("surrogate_is_pessimistic",),
        patch="""
-            weight = ratio.detach().clamp(1 - low, 1 + high)
+            weight = ratio.detach().clamp(1 - high, 1 + low)
""",
    ),
    Bug(
        "constant_that_is_none",
        "what should be divided by a constant is divided by the length",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-        length = lengths if method.average == "responses" else self.config.rollout.max_new_tokens
+        length = lengths if method.average == "responses" else 4 * lengths
""",
    ),
    Bug(
        "margins_centred",
        "the mean margin of the dataset is subtracted from each margin, so that a margin counts in all pairs",
        "of the field",
        "reward",
        ("scores_count_where_declared",),
        patch="""
-    def make_experience(self, rows: list[Row]) -> RewardBatch:
+    def read_samples(self, samples, rewards=None, *, first=0):
+        rows = super().read_samples(samples, rewards, first=first)
+        given = [float(row["margin"]) for row in rows if row.get("margin") is not None]
+        return [{**row, "margin": float(row["margin"]) - sum(given) / len(given)} if given else row for row in rows]
+
+    def make_experience(self, rows: list[Row]) -> RewardBatch:
""",
    ),
    Bug(
        "margins_clamped",
        "margins are clamped, so that samples whose log-ratio is far from that of the reference have no gradient",
        "of the field",
        "kto",
        ("nothing_is_clipped",),
        patch="""
-        weights = torch.where(batch.desirable, method.desirable_weight, method.undesirable_weight)
+        weights = torch.where(batch.desirable, method.desirable_weight, method.undesirable_weight)
+        margins = margins.clamp(-1, 1)
""",
    ),
    Bug(
        "centring_detached",
        "the term that keeps the mean of scores near 0 is in the loss, and without gradient",
        "of the field",
        "reward",
        ("gradient_is_that_of_the_loss",),
        patch="""
-    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2
+    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected).detach() ** 2
""",
    ),
    # ---------------------------------------- bugs that symmetric probes hide: weights, targets, statistics, limits
    Bug(
        "teacher_and_student_exchanged",
        "the teacher has the policy's weight in the mixture, which at β = ½ is no difference",
        "of the field",
        "distill",
        ("effects_as_declared",),
        patch="""
-        measure: Any = (lambda p, q, _: jensen_shannon(p, q, beta=beta)) if name == "jensen_shannon" else name
+        measure: Any = (lambda p, q, _: jensen_shannon(q, p, beta=beta)) if name == "jensen_shannon" else name
""",
        missed="teacher and student exchanged",
    ),
    Bug(
        "mixture_weight_of_the_student",
        "β is the policy's weight in the mixture instead of the teacher's",
        "of the field",
        "distill_offline",
        ("effects_as_declared",),
        patch="""
-        mask, name, beta = batch.sequences.response_mask, self.method.divergence, self.method.beta
+        mask, name, beta = batch.sequences.response_mask, self.method.divergence, 1 - self.method.beta
""",
    ),
    Bug(
        "weight_of_rewards_applied_twice",
        "rewards beside a teacher are weighted in the advantage and again in the loss",
        "of the field",
        "distill",
        ("effects_as_declared",),
        patch="""
-        return replace(experience, advantages=(self.method.reward_coef * advantages).float())
+        return replace(experience, advantages=(self.method.reward_coef**2 * advantages).float())
""",
    ),
    Bug(
        "higher_of_two_targets",
        "the higher of two target Q is taken, which overestimates",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-            "target_q": torch.stack(targets).amin(0),
+            "target_q": torch.stack(targets).amax(0),
""",
        missed="the higher of two targets",
    ),
    Bug(
        "mean_of_two_targets",
        "the mean of two target Q is taken instead of the lower one",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-            "target_q": torch.stack(targets).amin(0),
+            "target_q": torch.stack(targets).mean(0),
""",
    ),
    Bug(
        "conservative_loss_without_the_data",
        "the conservative loss lowers Q of all tokens, and raises it nowhere",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-            return q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -token_logprobs(q, tokens)
+            return q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), q.logsumexp(-1)
""",
        missed="CQL without its second part",
    ),
    Bug(
        "conservative_loss_of_one_head",
        "of two Q heads only the first has a conservative loss",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-            "cql": torch.stack([conservative for _, conservative in read]).sum(0),
+            "cql": read[0][1],
""",
    ),
    Bug(
        "cql_weighted_twice",
        "the conservative loss is weighted twice",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-        loss = loss + method.cql_scale * masked_mean(head["cql"], mask) + method.awac_scale * masked_mean(awac, mask)
+        loss = loss + method.cql_scale**2 * masked_mean(head["cql"], mask)
+        loss = loss + method.awac_scale * masked_mean(awac, mask)
""",
        missed="a weight applied twice",
    ),
    Bug(
        "own_value_as_the_next",
        "Q is fitted to r + γ V of the same state",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-    return torch.zeros_like(values).masked_scatter(mask, zero_masked(chosen.roll(-1), follows))
+    return torch.zeros_like(values).masked_scatter(mask, zero_masked(chosen, follows))
""",
    ),
    Bug(
        "next_value_of_another_row",
        "the last token of a row is followed by the first state of the next row",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-    return torch.zeros_like(values).masked_scatter(mask, zero_masked(chosen.roll(-1), follows))
+    return torch.zeros_like(values).masked_scatter(mask, chosen.roll(-1) + 0 * follows)
""",
    ),
    Bug(
        "weight_limited_before_its_scale",
        "advantages of the language-model loss are limited before they are scaled",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-    return (beta * advantages).clamp(max=math.log(limit)).exp()
+    return (beta * advantages.clamp(max=math.log(limit))).exp()
""",
    ),
    Bug(
        "every_step_syncs",
        "the targets are updated after every step, whatever the interval",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-        if self.progress.step % self.method.steps_for_target_q_sync == 0:
+        if self.progress.step % self.method.steps_for_target_q_sync >= 0:
""",
    ),
    Bug(
        "weights_of_labels_applied_twice",
        "the weight of a sample is applied in the loss and in its margin",
        "of the field",
        "kto",
        ("effects_as_declared",),
        patch="""
-    return weights * F.sigmoid(-margins)  # 1 − σ(m) = σ(−m)
+    return weights**2 * F.sigmoid(-margins)
""",
    ),
    Bug(
        "reference_point_below_zero",
        "an estimate of the KL that is negative is not raised to 0",
        "of the field",
        "kto",
        ("effects_as_declared",),
        patch="""
-        margins, told = self.margins(batch, 0.0 if kl is None else method.beta * kl.clamp(min=0))
+        margins, told = self.margins(batch, 0.0 if kl is None else method.beta * kl)
""",
    ),
    Bug(
        "reference_point_without_beta",
        "the estimate of the KL is compared with rewards in another unit",
        "of the field",
        "kto",
        ("effects_as_declared", "gradient_in_expectation"),
        patch="""
-        margins, told = self.margins(batch, 0.0 if kl is None else method.beta * kl.clamp(min=0))
+        margins, told = self.margins(batch, 0.0 if kl is None else kl.clamp(min=0))
""",
    ),
    Bug(
        "reference_point_of_own_samples",
        "the reference point is estimated from the samples themselves and not from mismatched ones",
        "of the field",
        "kto",
        ("effects_as_declared",),
        patch="""
-        kl = self.step_mean(batch, lambda x: response_logprobs(self.unwrapped, x.mismatched) - x.mismatched_ref_logps)
+        kl = self.step_mean(batch, lambda x: response_logprobs(self.unwrapped, x.own) - x.ref_logps)
""",
    ),
    Bug(
        "odds_weighted_twice",
        "λ weighs the log-odds and again their loss",
        "of the field",
        "orpo",
        ("effects_as_declared",),
        patch="""
-        losses = odds_ratio_loss(ratios)
+        losses = odds_ratio_loss(beta * ratios)
""",
    ),
    Bug(
        "odds_without_the_complement",
        "the odds of a response are taken for its probability",
        "of the field",
        "orpo",
        ("effects_as_declared",),
        patch="""
-        return log_odds(chosen) - log_odds(rejected)
+        return chosen - rejected
""",
    ),
    Bug(
        "likelihood_weighted_twice",
        "the weight of the likelihood of chosen outputs is applied twice",
        "of the field",
        "cpo",
        ("effects_as_declared",),
        patch="""
-        return (losses - method.nll_weight * means.chosen).mean(), metrics
+        return (losses - method.nll_weight**2 * means.chosen).mean(), metrics
""",
    ),
    Bug(
        "simpo_margin_added",
        "the margin of SimPO makes its comparison easier",
        "of the field",
        "cpo",
        ("effects_as_declared",),
        patch="""
-                return simpo_loss(margins, gamma=method.simpo_gamma, **smoothing)
+                return simpo_loss(margins, gamma=-method.simpo_gamma, **smoothing)
""",
    ),
    Bug(
        "centring_of_each_side",
        "the scores of a pair are squared one by one, which pulls their difference to 0 too",
        "of the field",
        "reward",
        ("effects_as_declared",),
        patch="""
-    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2
+    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen**2 + rejected**2)
""",
    ),
    Bug(
        "centring_weighted_twice",
        "the weight of the centring is applied twice",
        "of the field",
        "reward",
        ("effects_as_declared",),
        patch="""
-    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2
+    return -F.logsigmoid(chosen - rejected - margins) + (center_coef * (chosen + rejected)) ** 2
""",
    ),
    Bug(
        "margins_of_pairs_doubled",
        "the margin of a pair is subtracted from both of its sides",
        "of the field",
        "reward",
        ("effects_as_declared",),
        patch="""
-    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2
+    return -F.logsigmoid(chosen - rejected - 2 * margins) + center_coef * (chosen + rejected) ** 2
""",
    ),
    Bug(
        "kl_weighted_twice",
        "the KL penalty in the loss is weighted twice",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-            losses, metrics["policy/kl_per_token"] = losses + method.kl_coef * k3, Mean.of(k3, mask)
+            losses, metrics["policy/kl_per_token"] = losses + method.kl_coef**2 * k3, Mean.of(k3, mask)
""",
        missed="a weight applied twice",
    ),
    Bug(
        "kl_that_is_always_there",
        "the KL penalty has a smallest weight, so that a small one has no effect",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-            losses, metrics["policy/kl_per_token"] = losses + method.kl_coef * k3, Mean.of(k3, mask)
+            losses, metrics["policy/kl_per_token"] = losses + max(method.kl_coef, 0.6) * k3, Mean.of(k3, mask)
""",
    ),
    Bug(
        "kl_estimated_by_a_square",
        "the KL penalty is that of k2, half the squared log-ratio, and its metric that of k3",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-            losses, metrics["policy/kl_per_token"] = losses + method.kl_coef * k3, Mean.of(k3, mask)
+            k2 = 0.5 * (logprobs - zero_masked(batch.ref_logprobs, mask)) ** 2
+            losses, metrics["policy/kl_per_token"] = losses + method.kl_coef * k2, Mean.of(k3, mask)
""",
    ),
    Bug(
        "deviation_of_group_means",
        "advantages are divided by the deviation of the means of the groups",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-            moments.update(rewards, self.reduce)
+            moments.update(groups.mean(1), self.reduce)
""",
        missed="statistics over group means",
    ),
    Bug(
        "deviation_of_centred_rewards",
        "advantages are divided by the deviation of the advantages of the collection",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-            moments.update(rewards, self.reduce)
+            moments.update(advantages.flatten(), self.reduce)
""",
    ),
    Bug(
        "lengths_of_the_batch",
        "a response is divided by the mean length of the batch instead of its own",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-        length = lengths if method.average == "responses" else self.config.rollout.max_new_tokens
+        means = lengths.float().mean().expand(len(lengths))
+        length = means if method.average == "responses" else self.config.rollout.max_new_tokens
""",
    ),
    Bug(
        "value_loss_weighted_twice",
        "the value loss is weighted twice",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        loss = masked_mean(policy, mask) + method.vf_coef * masked_mean(value, mask)
+        loss = masked_mean(policy, mask) + method.vf_coef**2 * masked_mean(value, mask)
""",
        missed="a weight applied twice",
    ),
    Bug(
        "value_loss_doubled",
        "the value loss is the squared error and not half of it, as its weight was chosen for",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        loss = masked_mean(policy, mask) + method.vf_coef * masked_mean(value, mask)
+        loss = masked_mean(policy, mask) + 2 * method.vf_coef * masked_mean(value, mask)
""",
    ),
    Bug(
        "value_loss_by_the_smaller",
        "of the two value losses, clipped and not, the smaller one is taken",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        value = clipped_value_loss(new.values, batch.old_values, batch.returns, cliprange=method.cliprange_value)
+        reach = method.cliprange_value
+        near = torch.clamp(new.values, batch.old_values - reach, batch.old_values + reach)
+        value = 0.5 * torch.minimum((new.values - batch.returns) ** 2, (near - batch.returns) ** 2)
""",
    ),
    Bug(
        "values_clipped_around_returns",
        "values are clipped around the returns instead of the values at sampling",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        value = clipped_value_loss(new.values, batch.old_values, batch.returns, cliprange=method.cliprange_value)
+        value = clipped_value_loss(new.values, batch.returns, batch.returns, cliprange=method.cliprange_value)
""",
    ),
    Bug(
        "entropy_bonus_halved",
        "the entropy bonus is averaged over twice as many tokens",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-            loss = loss - method.ent_coef * masked_mean(new.entropy, mask)
+            loss = loss - 0.5 * method.ent_coef * masked_mean(new.entropy, mask)
""",
    ),
    Bug(
        "returns_of_the_sum_of_rewards",
        "the critic is fitted to the sum of the rewards, whatever λ is",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        advantages = whiten(advantages, mask, reduce=self.reduce) * x.weights
+        returns = gae(torch.zeros_like(x.values), rewards, mask, gamma=method.gamma, lam=1.0)[1]
+        advantages = whiten(advantages, mask, reduce=self.reduce) * x.weights
""",
    ),
    Bug(
        "kl_paid_one_token_late",
        "a token pays for the KL of the token before it",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        return kl_shaped_rewards(scores, x.logprobs, x.ref_logprobs, mask, self.kl.coef, penalty=x.penalty)
+        late = zero_masked(x.penalty, mask).roll(1, 1)
+        return kl_shaped_rewards(scores, x.logprobs, x.ref_logprobs, mask, self.kl.coef, penalty=late)
""",
    ),
    Bug(
        "kl_controller_reversed",
        "a KL above the target lowers the price of the KL",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-            error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
+            error = min(max(1 - mean_kl / self.target, -0.2), 0.2)
""",
    ),
    Bug(
        "kl_controller_without_a_horizon",
        "β is adapted by collections instead of responses",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-            self.coef = max(self.coef * (1 + error * episodes / self.horizon), 0.0)
+            self.coef = max(self.coef * (1 + error / self.horizon), 0.0)
""",
    ),
    Bug(
        "scores_clipped_above_only",
        "scores are clipped above and not below",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        return scores if limit is None else scores.clamp(-limit, limit)
+        return scores if limit is None else scores.clamp(max=limit)
""",
    ),
    Bug(
        "threshold_of_the_kl_doubled",
        "steps are skipped from twice the target KL on, instead of 1.5 times",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        if target is not None and metrics["policy/approx_kl"] > 1.5 * target:
+        if target is not None and metrics["policy/approx_kl"] > 2 * target:
""",
    ),
    Bug(
        "kl_of_rewards_weighted_twice",
        "the KL penalty in the reward is weighted twice",
        "of the field",
        "rloo",
        ("effects_as_declared",),
        patch="""
-        penalty = -self.method.kl_coef * k1
+        penalty = -(self.method.kl_coef**2) * k1
""",
    ),
    Bug(
        "penalty_for_ending",
        "the penalty is subtracted from responses that have ended",
        "of the field",
        "rloo",
        ("effects_as_declared",),
        patch="""
-            return penalise_truncated(placed, terminated, mask, self.method.missing_eos_penalty)
+            return penalise_truncated(placed, ~terminated, mask, self.method.missing_eos_penalty)
""",
    ),
    Bug(
        "epochs_of_one_pass",
        "a collection has one pass more than is set",
        "of the field",
        "rloo",
        ("effects_as_declared",),
        patch="""
-        return self.method.rloo_epochs
+        return self.method.rloo_epochs + 1
""",
    ),
    Bug(
        "temperature_of_ipo_exchanged",
        "the target of IPO is 1/β instead of 1/2β",
        "of the field",
        "dpo",
        ("effects_as_declared",),
        patch="""
-            return loss(chosen, rejected, method.beta, method.label_smoothing)
+            beta = method.beta / 2 if method.loss_type == "ipo" else method.beta
+            return loss(chosen, rejected, beta, method.label_smoothing)
""",
    ),
    Bug(
        "beta_of_pairs_applied_twice",
        "log-ratios are scaled by β before the loss scales them",
        "of the field",
        "dpo",
        ("effects_as_declared",),
        patch="""
-            return loss(chosen, rejected, method.beta, method.label_smoothing)
+            return loss(method.beta * chosen, method.beta * rejected, method.beta, method.label_smoothing)
""",
    ),
    Bug(
        "best_of_the_first_two",
        "of k responses only the first two are compared",
        "of the field",
        "online_dpo",
        ("credit_follows_scores",),
        patch="""
-    groups = x.scores.view(-1, k)
+    groups = x.scores.view(-1, k).clone()
+    groups[:, 2:] = groups[:, :1]
""",
    ),
    Bug(
        "threshold_above_the_quantile",
        "a response at the threshold is not kept",
        "of the field",
        "rft",
        ("effects_as_declared",),
        patch="""
-        kept.append([s >= limit and s > least if least < max(row) else s >= median for s in row])
+        kept.append([s > limit and s > least if least < max(row) else s >= median for s in row])
""",
    ),
    Bug(
        "thresholds_one_visit_late",
        "the second visit has the threshold of the first one again",
        "of the field",
        "rft",
        ("effects_as_declared",),
        patch="""
-        percentiles = [schedule[self.visits.get(query, 0) % method.n_improve_steps] for query in queries]
+        visits = [max(self.visits.get(query, 0) - 1, 0) for query in queries]
+        percentiles = [schedule[visit % method.n_improve_steps] for visit in visits]
""",
    ),
    Bug(
        "pool_of_one_more",
        "a pool holds one response more than is set",
        "of the field",
        "rft",
        ("effects_as_declared",),
        patch="""
-                self.pools[query] = dict([*others, (response, score)][-self.method.pool_size :])
+                self.pools[query] = dict([*others, (response, score)][-self.method.pool_size - 1 :])
""",
    ),
    Bug(
        "surrogate_of_images_by_the_minimum",
        "of the two terms of the surrogate of images, the larger objective is taken",
        "of the field",
        "ddpo",
        ("effects_as_declared",),
        patch="""
-        loss = clipped_surrogate(ratio, batch.advantages, cliprange=limit).mean()
+        clipped = ratio.clamp(1 - limit, 1 + limit)
+        loss = torch.minimum(-batch.advantages * ratio, -batch.advantages * clipped).mean()
""",
    ),
    Bug(
        "advantages_of_images_clipped_above_only",
        "advantages of images are clipped above and not below",
        "of the field",
        "ddpo",
        ("effects_as_declared",),
        patch="""
-            self.advantages(rows, rewards).clamp(-limit, limit)[image],
+            self.advantages(rows, rewards).clamp(max=limit)[image],
""",
    ),
    Bug(
        "noise_of_embeddings_by_the_length",
        "the noise of the embeddings has the scale of a longer sample",
        "of the field",
        "sft",
        ("effects_as_declared",),
        patch="""
-        with embedding_noise(self.unwrapped, self.method.neftune_alpha):
+        with embedding_noise(self.unwrapped, self.method.neftune_alpha / 2**0.5):
""",
    ),
    Bug(
        "kl_is_scaled_too",
        "the KL penalty is subtracted before rewards are scaled, and divided by the deviation of scores, too",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        rewards = self.rewards(x, self.scaled(zero_masked(x.scores, mask), mask))
+        rewards = self.scaled(self.rewards(x, zero_masked(x.scores, mask)), mask)
""",
    ),
    Bug(
        "controller_reads_tokens",
        "the controller compares the mean KL of a token with the target, which is that of a response",
        "of the field",
        "ppo",
        ("effects_as_declared",),
        patch="""
-        self.kl.update(total / episodes, int(episodes))
+        tokens = self.reduce(mask.sum().double()).item()
+        self.kl.update(total / tokens, int(episodes))
""",
    ),
    Bug(
        "own_kl_of_pairs",
        "each side of a pair is compared with its own estimate of the KL instead of the other side's",
        "of the field",
        "dpo",
        ("gradient_in_expectation",),
        patch="""
-        sides = kto_pair_losses(chosen, rejected, batch.chosen_kl, batch.rejected_kl, beta=method.beta)
+        sides = kto_pair_losses(chosen, rejected, batch.rejected_kl, batch.chosen_kl, beta=method.beta)
""",
    ),
    Bug(
        "own_place_in_sorted_order",
        "margins are sorted, but compared with what the order of the reference has in the place of the pair itself",
        "of the field",
        "dpo",
        ("gradient_in_expectation",),
        patch="""
-        ranks = order.argsort(dim=0)[start : start + len(mine)]
+        ranks = order[start : start + len(mine)]
""",
    ),
    Bug(
        "synced_one_step_early",
        "targets are updated one step before their interval is over",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-        if self.progress.step % self.method.steps_for_target_q_sync == 0:
+        if (self.progress.step + 1) % self.method.steps_for_target_q_sync == 0:
""",
    ),
    Bug(
        "repeats_stay_old",
        "a response that is sampled again keeps its old place in the pool, and leaves it first",
        "of the field",
        "rft",
        ("effects_as_declared",),
        patch="""
-                others = [item for item in self.pools.get(query, {}).items() if item[0] != response]
-                self.pools[query] = dict([*others, (response, score)][-self.method.pool_size :])
+                pool = {**self.pools.get(query, {}), response: score}
+                self.pools[query] = dict([*pool.items()][-self.method.pool_size :])
""",
    ),
    Bug(
        "ranks_for_indices",
        "samples are packed by their rank in the order of lengths instead of their index, so that rows are too long",
        "of the field",
        "sft",
        ("packing",),
        patch="""
-    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
+    for rank, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
@@
-        bins[into].append(index)
+        bins[into].append(rank)
""",
    ),
    Bug(
        "rows_of_images_transposed",
        "images are numbered row by row of another table than their steps, so that some steps are trained twice",
        "of the field",
        "ddpo",
        ("rows_are_trained_once",),
        patch="""
-        image = torch.arange(len(experience)).unsqueeze(1).expand_as(steps).flatten()
+        image = torch.arange(len(experience)).repeat(steps.size(1))
""",
    ),
    *STRANGE,
    Bug(
        "controller_counts_own_episodes",
        "the KL controller counts the responses of one process, so that β adapts more slowly on two",
        "of the field",
        "ppo",
        ("two_processes@scaled",),
        patch="""
-        self.kl.update(total / episodes, int(episodes))
+        self.kl.update(total / episodes, len(mask))
""",
    ),
    Bug(
        "reference_point_of_one_process",
        "the estimate of the KL is a mean over the rows of one process instead of those of all",
        "of the field",
        "kto",
        ("two_processes",),
        patch="""
-        kl = self.step_mean(batch, lambda x: response_logprobs(self.unwrapped, x.mismatched) - x.mismatched_ref_logps)
-        return replace(batch, kl=kl.expand(len(batch)))
+        logps = self.in_micro_batches(batch, lambda x: response_logprobs(self.unwrapped, x.mismatched))
+        kl = (logps - batch.mismatched_ref_logps).mean()
+        return replace(batch, kl=kl.expand(len(batch)))
""",
    ),
    Bug(
        "score_of_zero_is_none",
        "a score of 0 for responses that have not ended is tested for its truth, and they keep their own",
        "of the field",
        "rloo",
        ("zero_is_a_number",),
        patch="""
-        if self.method.missing_eos_score is not None:
+        if self.method.missing_eos_score:
""",
    ),
    Bug(
        "values_of_the_next_column",
        "V(s') is read in the next column, where a dialogue has what the user says, and V is 0",
        "of the field",
        "ilql",
        ("context_does_not_count",),
        patch="""
-    chosen, rows = values[mask], mask.nonzero()[:, 0]
-    follows = F.pad(rows[1:] == rows[:-1], (0, 1))
-    return torch.zeros_like(values).masked_scatter(mask, zero_masked(chosen.roll(-1), follows))
+    following = F.pad(zero_masked(values, mask)[:, 1:], (0, 1))
+    return zero_masked(following, mask)
""",
    ),
    Bug(
        "packed_samples_predict_each_other",
        "with packing and train_on_prompts, the first token of a sample is predicted from the sample before it",
        "TRL",
        "sft",
        ("packing",),
        patch="""
         sequences = self.encode_samples(samples)
+        if packed:
+            sequences = sequences.packed([len(row["samples"]) for row in rows])
         if self.method.train_on_prompts:
@@
-        return sequences.packed([len(row["samples"]) for row in rows]) if packed else sequences
+        return sequences
""",
    ),
    Bug(
        "loss_logged_as_its_term",
        "the whole loss is logged as the divergence, with the term of the rewards",
        "of the field",
        "distill",
        ("effects_as_declared",),
        patch="""
-        return masked_mean(loss, mask), {"loss/divergence": Mean.of(told.divergence, mask)}
+        return masked_mean(loss, mask), {"loss/divergence": Mean.of(loss, mask)}
""",
    ),
    Bug(
        "memory_cut_off_in_checkpoints",
        "a checkpoint has fewer rewards of each prompt than the run remembers",
        "of the field",
        "ddpo",
        ("state_is_complete",),
        patch="""
-        return {"rewards": self.tracker.state_dict()}
+        enough = self.method.min_count  # rewards that a prompt needs for its own mean and deviation
+        return {"rewards": {prompt: rewards[-enough:] for prompt, rewards in self.tracker.state_dict().items()}}
""",
    ),
    Bug(
        "first_deviation_derived_again",
        "the deviation of the first scores is not saved, and a resumed run takes that of all so far",
        "of the field",
        "ppo",
        ("state_is_complete",),
        patch="""
-        return {"kl_coef": self.kl.coef, "moments": self.moments.state_dict(), "ref_std": self.ref_std}
+        return {"kl_coef": self.kl.coef, "moments": self.moments.state_dict()}
@@
-        self.ref_std = state["ref_std"]
         self.moments.load_state_dict(state["moments"])
+        self.ref_std = self.moments.std if self.moments.count > 1 else 0.0
""",
    ),
    Bug(
        "accuracy_of_likelihoods",
        "the accuracy that is logged compares log-probabilities, and the margin beside it rewards",
        "TRL",
        "dpo",
        ("metric_totals",),
        patch="""
-        "rewards/accuracies": Mean.of(preference_accuracy(*ratios), decided),
+        "rewards/accuracies": Mean.of(preference_accuracy(*logps), decided),
""",
    ),
    Bug(
        "score_of_truncated_in_the_last_token",
        "a truncated response keeps the rewards of its earlier tokens, besides the score that is set for it",
        "of the field",
        "rloo",
        ("effects_as_declared",),
        patch="""
     kl_k3,
+    last_token,
     leave_one_out,
@@
-            fixed = place_scores(placed.new_full((len(mask),), self.method.missing_eos_score), mask)
-            return torch.where(terminated.unsqueeze(-1), placed, fixed)
+            cut = last_token(mask) & ~terminated.unsqueeze(-1)
+            return placed.masked_fill(cut, self.method.missing_eos_score)
""",
    ),
    Bug(
        "kept_by_what_is_logged",
        "groups are kept by their score where named rewards are compared, and the score is only logged",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-        groups: Tensor = self.rewards(rollouts, scores).unflatten(0, (-1, size))  # [G, size, N]
-        return (groups != groups[:, :1]).flatten(1).any(1).repeat_interleave(size)
+        groups = per_response(scores).view(-1, size)
+        return (groups != groups[:, :1]).any(1).repeat_interleave(size)
""",
    ),
    Bug(
        "pools_of_other_images",
        "prompts with the same text and other images share a pool of responses",
        "of the field",
        "rft",
        ("images",),
        patch="""
-        prompts = [f"{query.tolist()}{each.name}" for query, each in zip(x.sequences.queries, seen, strict=True)]
+        prompts = [str(query.tolist()) for query in x.sequences.queries]
""",
    ),
    Bug(
        "margins_of_integers",
        "margins of pairs are cut to integers, because they take the type of token ids",
        "of the field",
        "reward",
        ("scores_count_where_declared",),
        patch="""
-        margins = torch.tensor([float(row.get("margin") or 0) for row in rows], device=pairs.chosen.input_ids.device)
+        margins = pairs.chosen.input_ids.new_tensor([row.get("margin") or 0 for row in rows])
""",
    ),
    Bug(
        "weights_of_tokens_for_responses",
        "a response with one ratio has the mean importance weight of its tokens instead of their product",
        "of the field",
        "rloo",
        ("corrections_as_declared",),
        patch="""
-        return "sequence" if self.method.ratio_level == "sequence" else super().correction_level
+        return super().correction_level
""",
    ),
    Bug(
        "no_bonus_for_ties",
        "the bonus for exploration is left out for prompts whose responses have equal scores",
        "of the field",
        "xpo",
        ("effects_as_declared",),
        patch="""
-    return -F.logsigmoid(sign * beta * ratios) * (sign != 0) + alpha * other
+    return (alpha * other - F.logsigmoid(sign * beta * ratios)) * (sign != 0)
""",
    ),
    Bug(
        "fitted_at_the_temperature_of_samples",
        "a model is fitted with logits divided by the temperature of samples for evaluation",
        "of the field",
        "sft",
        ("sampling_settings_do_not_count",),
        patch="""
-        return make_policy(model)
+        return make_policy(model, temperature=config.rollout.temperature)
""",
    ),
    Bug(
        "mean_of_all_steps",
        "the running mean of a label's rewards divides by all steps, also those without the label",
        "of the field",
        "bco",
        ("effects_as_declared",),
        patch="""
-                self.seen = {**self.seen, label: [steps + 1, mean + (reward - mean) / (steps + 1)]}
+                mean += (reward - mean) / (self.progress.step + 1)
+                self.seen = {**self.seen, label: [steps + 1, mean]}
""",
    ),
)
