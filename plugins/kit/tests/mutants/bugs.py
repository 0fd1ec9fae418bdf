"""The table: what was shipped, where it is planted, and which checks must find it.

Where the source is S-nn, the bug is one of the list of faults found in trlX, TRL 0.7 and 0.8, async_rlhf and
ddpo-pytorch. What is "of the field" has been in the issues of many.
"""

from __future__ import annotations

from mutants.laws import OF_LAWS
from mutants.planting import Bug

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
-        past = penalty.cumsum(1) - penalty if self.method.kl_level == "token" else torch.zeros_like(penalty)
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
-        schedule = torch.linspace(method.start_percentile, method.end_percentile, method.n_improve_steps).tolist()
+        schedule = torch.linspace(method.start_percentile, method.start_percentile, method.n_improve_steps).tolist()
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
-        smoothing = {"beta": method.beta, "label_smoothing": method.label_smoothing}
+        smoothing = {"beta": method.beta, "label_smoothing": -method.label_smoothing}
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
-        past = penalty.cumsum(1) - penalty if self.method.kl_level == "token" else torch.zeros_like(penalty)
+        past = penalty.cumsum(1) if self.method.kl_level == "token" else torch.zeros_like(penalty)
""",
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
-        advantages = (head["target_q"] - head["values"]).detach()
+        advantages = head["target_q"] - head["values"]
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
-        weights = torch.where(desirable, method.desirable_weight, method.undesirable_weight)
+        weights = torch.where(desirable, method.undesirable_weight, method.desirable_weight)
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
-        return kto_loss(margins, weights).mean(), {
+        return kto_loss(margins.clamp(-1, 1), weights).mean(), {
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
)
