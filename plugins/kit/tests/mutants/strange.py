"""Bugs that are planted into algorithms of strangers: those of `sound` and of `examples/plugins`."""

from __future__ import annotations

from mutants.planting import Bug

STRANGE = (
    Bug(
        "overlong_rewarded",
        "long responses are rewarded instead of punished",
        "of the field",
        "_sound_dapo",
        ("effects_as_declared",),
        patch="""
-        punished = per_response(scores) - self.method.overlong_penalty * over.clamp(0, buffer) / buffer
+        punished = per_response(scores) + self.method.overlong_penalty * over.clamp(0, buffer) / buffer
""",
    ),
    Bug(
        "overlong_penalty_twice",
        "the penalty of long responses is multiplied by itself",
        "of the field",
        "_sound_dapo",
        ("effects_as_declared",),
        patch="""
-        punished = per_response(scores) - self.method.overlong_penalty * over.clamp(0, buffer) / buffer
+        punished = per_response(scores) - self.method.overlong_penalty**2 * over.clamp(0, buffer) / buffer
""",
    ),
    Bug(
        "clip_ranges_exchanged",
        "the lower range limits the ratio from above, and the reverse",
        "of the field",
        "_sound_dapo",
        ("surrogate_is_pessimistic",),
        patch="""
-        losses = clipped_surrogate(ratio, advantages, cliprange=method.cliprange, cliprange_high=method.cliprange_high)
+        losses = clipped_surrogate(ratio, advantages, cliprange=method.cliprange_high, cliprange_high=method.cliprange)
""",
    ),
    Bug(
        "mean_of_responses_weighed_as_tokens",
        "the loss is a mean of the means of responses, and weighed by tokens",
        "of the field",
        "_sound_dapo",
        ("micro_batches", "accumulation"),
        patch="""
-        return masked_mean(losses, mask), {
+        lengths = mask.sum(1)
+        return (zero_masked(losses, mask).sum(1) / lengths).mean(), {
""",
    ),
    Bug(
        "groups_of_equal_scores_kept",
        "groups are kept whose scores are equal, and the others are dropped",
        "of the field",
        "_sound_dapo",
        ("credit_follows_scores",),
        patch="""
-        return (groups != groups[:, :1]).any(1).repeat_interleave(self.method.group_size)
+        return (groups == groups[:, :1]).all(1).repeat_interleave(self.method.group_size)
""",
    ),
    Bug(
        "weights_of_awr_undetached",
        "the weights of samples have a gradient, which raises V of what is rewarded",
        "of the field",
        "_sound_awr",
        ("gradient_is_that_of_the_loss",),
        patch="""
-        weights = (error.detach() / method.temperature).clamp(max=math.log(method.weight_max)).exp()
+        weights = (error / method.temperature).clamp(max=math.log(method.weight_max)).exp()
""",
    ),
    Bug(
        "value_minus_reward",
        "advantages are V − R, so that bad samples weigh more",
        "of the field",
        "_sound_awr",
        ("learns",),
        patch="""
-        weights = (error.detach() / method.temperature).clamp(max=math.log(method.weight_max)).exp()
+        weights = (-error.detach() / method.temperature).clamp(max=math.log(method.weight_max)).exp()
""",
    ),
    Bug(
        "temperature_multiplied",
        "advantages are multiplied by the temperature",
        "of the field",
        "_sound_awr",
        ("effects_as_declared",),
        patch="""
-        weights = (error.detach() / method.temperature).clamp(max=math.log(method.weight_max)).exp()
+        weights = (error.detach() * method.temperature).clamp(max=math.log(method.weight_max)).exp()
""",
    ),
    Bug(
        "critic_weighted_twice",
        "the critic's loss is weighted inside its square",
        "of the field",
        "_sound_awr",
        ("effects_as_declared",),
        patch="""
-        loss = masked_mean(-weights * out.logprobs, mask) + method.vf_coef * masked_mean(error**2, mask)
+        loss = masked_mean(-weights * out.logprobs, mask) + masked_mean((method.vf_coef * error) ** 2, mask)
""",
    ),
    Bug(
        "rejected_side_raised",
        "the rejected side is raised as the chosen one is",
        "of the field",
        "_sound_apo_zero",
        ("sides_of_pairs",),
        patch="""
-        losses = (-good).sigmoid() + bad.sigmoid()
+        losses = (-good).sigmoid() + (-bad).sigmoid()
""",
    ),
    Bug(
        "references_of_the_other_side",
        "each side is compared with the reference's probability of the other",
        "of the field",
        "_sound_apo_zero",
        ("effects_as_declared",),
        patch="""
-        return APOZeroBatch(pairs.chosen, pairs.rejected, ref[:, 0], ref[:, 1])
+        return APOZeroBatch(pairs.chosen, pairs.rejected, ref[:, 1], ref[:, 0])
""",
    ),
    Bug(
        "scores_of_pairs_averaged",
        "log-probabilities of a response are averaged over the columns of the batch",
        "of the field",
        "_sound_apo_zero",
        ("padding_amount",),
        patch="""
-        return masked_sum(policy(sequences).logprobs, sequences.response_mask, dim=1)
+        return masked_sum(policy(sequences).logprobs, sequences.response_mask, dim=1) / sequences.input_ids.size(1)
""",
    ),
    Bug(
        "expectile_of_the_other_side",
        "errors below 0 have the weight of those above",
        "of the field",
        "_sound_expectile",
        ("effects_as_declared",),
        patch="""
-            "loss/v": torch.where(u < 0, 1 - method.tau, method.tau) * u**2,
+            "loss/v": torch.where(u > 0, 1 - method.tau, method.tau) * u**2,
""",
    ),
    Bug(
        "goal_with_a_gradient",
        "the goal of Q has a gradient, which moves V",
        "of the field",
        "_sound_expectile",
        ("effects_as_declared",),
        patch="""
-            "loss/q": (q - goal.detach()) ** 2,
+            "loss/q": (q - goal) ** 2,
""",
    ),
    Bug(
        "live_q_as_its_target",
        "V is fitted to Q itself, and the target is not read",
        "of the field",
        "_sound_expectile",
        ("gradient_is_that_of_the_loss",),
        patch="""
-        u = target - v
+        u = q.detach() + 0 * target - v
""",
    ),
    Bug(
        "value_of_the_same_state",
        "Q is fitted to r + γ V of the state it began in",
        "of the field",
        "_sound_expectile",
        ("effects_as_declared",),
        patch="""
-        found[row, at[:-1]] = values[row, at[1:]]
+        found[row, at[:-1]] = values[row, at[:-1]]
""",
    ),
    Bug(
        "target_moves_the_other_way",
        "the target moves by 1 − α towards Q",
        "of the field",
        "_sound_expectile",
        ("effects_as_declared",),
        patch="""
-        self.unwrapped.head.follow(self.method.polyak)
+        self.unwrapped.head.follow(1 - self.method.polyak)
""",
    ),
    Bug(
        "greedy_score_added",
        "the score of the greedy response is added instead of subtracted",
        "of the field",
        "remax",
        ("constant_in_scores",),
        patch="""
-        return self.experience(sampled, scores - baselines)
+        return self.experience(sampled, scores + baselines)
""",
    ),
    Bug(
        "penalty_of_remax_rewarded",
        "the divergence from the reference is rewarded",
        "of the field",
        "remax",
        ("kl_pulls_back",),
        patch="""
-    return zero_masked(gains.unsqueeze(1) - following, mask)
+    return zero_masked(gains.unsqueeze(1) + following, mask)
""",
    ),
    Bug(
        "penalty_of_remax_squared",
        "the penalty of a token is its squared log-ratio",
        "of the field",
        "remax",
        ("reported_kl",),
        patch="""
-        mask, k1 = sequences.response_mask, kl_k1(policy.logprobs, self.reference(sequences).logprobs)
+        mask, k1 = sequences.response_mask, kl_k1(policy.logprobs, self.reference(sequences).logprobs) ** 2
""",
    ),
    Bug(
        "penalty_left_at_0",
        "the weight of the penalty has a smallest value, which is left if it is switched off",
        "of the field",
        "remax",
        ("effects_as_declared",),
        patch="""
-    penalty = zero_masked(kl_coef * k1, mask)
+    penalty = zero_masked((kl_coef + 0.01) * k1, mask)
""",
    ),
    Bug(
        "critic_left_at_0",
        "the critic's loss is there if its weight is 0",
        "of the field",
        "_sound_vapo",
        ("effects_as_declared",),
        patch="""
-        losses = policy + method.vf_coef * value - method.imitation * likelihood
+        losses = policy + max(method.vf_coef, 1e-4) * value - method.imitation * likelihood
""",
    ),
    Bug(
        "value_of_the_same_state_in_vapo",
        "δ reads V of the state itself instead of the next, so that V is in no advantage",
        "of the field",
        "_sound_vapo",
        ("values_reach_back",),
        patch="""
-        advantages, _ = gae(policy.values, rewards, mask, gamma=1.0, lam=lam)
+        advantages, _ = gae(0 * policy.values, rewards, mask, gamma=1.0, lam=lam)
""",
        missed="bootstrap one state early",
    ),
    Bug(
        "value_of_the_same_state_in_td_lambda",
        "the error of a step compares the value of a state with itself, but for the last",
        "of the field",
        "_sound_td_lambda",
        ("values_reach_back",),
        patch="""
-            found = rewards[:, t] + value - values[:, t] + trace * advantage
+            found = rewards[:, t] + torch.where(value == 0, value, values[:, t]) - values[:, t] + trace * advantage
""",
        missed="bootstrap one state early",
    ),
    Bug(
        "keep_reads_two_of_a_group",
        "a group is kept if the scores of its first two responses differ, whatever the others have",
        "of the field",
        "_sound_dapo",
        ("keep_chooses",),
        patch="""
-        return (groups != groups[:, :1]).any(1).repeat_interleave(self.method.group_size)
+        return (groups[:, 0] != groups[:, 1]).repeat_interleave(self.method.group_size)
""",
    ),
    Bug(
        "critic_without_the_own_reward",
        "the critic is fitted to the rewards after a token, without its own",
        "of the field",
        "_sound_vapo",
        ("critic_follows_rewards",),
        patch="""
-        _, returns = gae(policy.values, rewards, mask, gamma=1.0, lam=1.0)
+        _, returns = gae(policy.values, rewards, mask, gamma=1.0, lam=1.0)
+        returns = returns - rewards
""",
    ),
    Bug(
        "value_behind_the_end_in_td_lambda",
        "responses that have ended are bootstrapped with the value of their last state",
        "of the field",
        "_sound_td_lambda",
        ("values_reach_back",),
        patch="""
-            found = rewards[:, t] + value - values[:, t] + trace * advantage
+            value = torch.where(value == 0, values[:, t], value)
+            found = rewards[:, t] + value - values[:, t] + trace * advantage
""",
    ),
    Bug(
        "value_of_the_wrong_neighbour",
        "δ reads V of the token before instead of the one after",
        "of the field",
        "_sound_vapo",
        ("values_reach_back",),
        patch="""
-        advantages, _ = gae(policy.values, rewards, mask, gamma=1.0, lam=lam)
+        wrong = zero_masked(policy.values.roll(1, 1) - policy.values.roll(-1, 1), mask)
+        advantages, _ = gae(policy.values, rewards + wrong, mask, gamma=1.0, lam=lam)
""",
    ),
    Bug(
        "trace_that_never_ends",
        "λ of every response is that of the longest one",
        "of the field",
        "_sound_vapo",
        ("batch_mates",),
        patch="""
-        lam = (1 - 1 / (self.method.alpha * mask.sum(1))).clamp(min=0)  # [B]
+        lam = max(1 - 1 / (self.method.alpha * mask.size(1)), 0.0)
""",
    ),
    Bug(
        "bad_responses_imitated",
        "responses below the score are imitated",
        "of the field",
        "_sound_vapo",
        ("effects_as_declared",),
        patch="""
-        imitated = mask & (rewards.sum(1, keepdim=True) >= self.method.good)
+        imitated = mask & (rewards.sum(1, keepdim=True) < self.method.good)
""",
    ),
    Bug(
        "imitation_lowers",
        "the likelihood of good responses is lowered",
        "of the field",
        "_sound_vapo",
        ("effects_as_declared",),
        patch="""
-        losses = policy + method.vf_coef * value - method.imitation * likelihood
+        losses = policy + method.vf_coef * value + method.imitation * likelihood
""",
    ),
    Bug(
        "own_answers_preferred",
        "the policy's own answers are preferred to the given ones",
        "of the field",
        "spin",
        ("sides_of_pairs",),
        patch="""
-        ratios = given - batch.old_chosen, own - batch.old_rejected
+        ratios = own - batch.old_rejected, given - batch.old_chosen
""",
    ),
    Bug(
        "opponent_that_is_the_policy",
        "log-ratios are those to the current policy, which are always 0",
        "of the field",
        "spin",
        ("gradient_is_that_of_the_loss",),
        patch="""
-        ratios = given - batch.old_chosen, own - batch.old_rejected
+        ratios = given - given.detach(), own - own.detach()
""",
    ),
    Bug(
        "level_not_saved",
        "the level of the curriculum is not in the checkpoint",
        "of the field",
        "_sound_curriculum",
        ("state_is_complete",),
        patch="""
-    remembers: ClassVar[dict[str, Any]] = {"level": float, "steps_at_level": int}
-    level: float
+    remembers: ClassVar[dict[str, Any]] = {"steps_at_level": int}
+    level: float = 0.0
""",
    ),
    Bug(
        "gains_of_the_collection",
        "the mean of the collection is subtracted, and not that of the group",
        "of the field",
        "_sound_curriculum",
        ("scores_count_where_declared",),
        patch="""
-        return replace(experience, advantages=(groups - groups.mean(1, keepdim=True)).flatten())
+        return replace(experience, advantages=(groups - groups.mean()).flatten())
""",
    ),
    Bug(
        "returns_whitened_by_rows",
        "returns are whitened over responses and not over tokens",
        "of the field",
        "reinforce_pp",
        ("finite_at_extremes",),
        patch="""
-        advantages = whiten(returns, mask, reduce=self.reduce)
+        rows = torch.where(mask, returns, 0.0).sum(1)
+        advantages = (returns - rows.mean()) / rows.std(correction=0) * mask
""",
    ),
    Bug(
        "kl_by_the_length_of_a_part",
        "the KL penalty is divided by the number of tokens of the part of the collection that is made at once",
        "of the field",
        "reinforce_pp",
        ("batch_mates",),
        patch="""
-        rewards = kl_shaped_rewards(scores, policy.logprobs, reference, mask, self.method.kl_coef)
+        rewards = kl_shaped_rewards(scores, policy.logprobs, reference, mask, self.method.kl_coef / mask.sum())
""",
    ),
    Bug(
        "advantages_for_returns",
        "the critic is fitted to the advantages, without the values that were subtracted",
        "of the field",
        "_sound_td_lambda",
        ("critic_follows_rewards",),
        patch="""
-        return replace(experience, advantages=advantages, returns=zero_masked(advantages + values, mask))
+        return replace(experience, advantages=advantages, returns=advantages)
""",
    ),
    Bug(
        "running_baseline_of_today",
        "the running baseline has the scores of the collection from which it is subtracted",
        "of the field",
        "_sound_ema_baseline",
        ("own_score_left_out",),
        patch="""
-        return replace(experience, advantages=scores - before)
+        return replace(experience, advantages=scores - self.baseline)
""",
        missed="the own score in the baseline",
    ),
    Bug(
        "clipped_alone",
        "the ratio is clipped, without the minimum of both terms, and no surrogate is declared",
        "of the field",
        "reinforce_pp",
        ("surrogate_is_pessimistic",),
        patch="""
-        surrogate = clipped_surrogate(ratio, batch.advantages, cliprange=self.method.cliprange)
+        surrogate = -batch.advantages * ratio.clamp(1 - self.method.cliprange, 1 + self.method.cliprange)
""",
    ),
    Bug(
        "baseline_weighted_by_length",
        "the baseline is the mean of the others' scores over their tokens, so that long responses count more",
        "of the field",
        "_sound_length_penalty",
        ("mates_count_alike",),
        patch="""
-        return replace(experience, advantages=leave_one_out(experience.advantages, self.method.k))
+        lengths = experience.sequences.response_mask.sum(1).view(-1, self.method.k)
+        scores = experience.advantages.view(-1, self.method.k)
+        totals = [x.sum(1, keepdim=True) - x for x in (lengths * scores, lengths)]
+        return replace(experience, advantages=(scores - totals[0] / totals[1]).flatten())
""",
    ),
    Bug(
        "turns_end_the_sum",
        "a turn is credited with its own rewards, without those of later turns",
        "of the field",
        "_test_turns",
        ("time_has_a_direction",),
        patch="""
-        return TurnsBatch(rollouts.sequences, zero_masked(rewards.flip(1).cumsum(1).flip(1), mask))
+        returns, total = rewards.clone(), rewards.new_zeros(len(rewards))
+        for t in range(mask.size(1) - 1, -1, -1):
+            returns[:, t] = total = (total + rewards[:, t]) * mask[:, t]
+        return TurnsBatch(rollouts.sequences, returns)
""",
    ),
    Bug(
        "penalty_after_the_baseline",
        "the penalty of length is subtracted from advantages, so that a whole group is lowered",
        "of the field",
        "_sound_length_penalty",
        ("mates_count_alike",),
        patch="""
-        rewards = per_response(scores) - self.method.price * beyond
+        rewards = per_response(scores)
@@
-        return replace(experience, advantages=leave_one_out(experience.advantages, self.method.k))
+        beyond = (experience.sequences.response_mask.sum(1) - self.method.budget).clamp(min=0)
+        gains = leave_one_out(experience.advantages, self.method.k)
+        return replace(experience, advantages=gains - self.method.price * beyond)
""",
    ),
    Bug(
        "reward_on_the_first_token",
        "the reward of a sample is placed on its first token",
        "of the field",
        "_sound_expectile",
        (
            "rewards_reach_the_end",
            "effects_as_declared",
        ),
        patch="""
-        return ExpectileBatch(sequences, place_scores(rewards, sequences.response_mask))
+        mask = sequences.response_mask
+        first = mask & (mask.cumsum(1) == 1)
+        return ExpectileBatch(sequences, zero_masked(rewards.unsqueeze(1).expand(mask.shape), first))
""",
    ),
    Bug(
        "level_before_the_gains",
        "the level rises with the scores of a collection before gains over it are computed",
        "of the field",
        "_sound_curriculum",
        ("context_does_not_count",),
        patch="""
-        over = experience.advantages - self.level
-        gains = over.clamp(min=0) + 0.1 * over.clamp(max=0)
-        groups = gains.view(-1, self.method.k)
-        above = over.new_tensor([float((over >= 0).sum()), float(len(over))])
+        over = experience.advantages - self.level
+        above = over.new_tensor([float((over >= 0).sum()), float(len(over))])
@@
-            self.level, self.steps_at_level = self.level + self.method.rise, 0
+            self.level, self.steps_at_level = self.level + self.method.rise, 0
+        over = experience.advantages - self.level
+        gains = over.clamp(min=0) + 0.1 * over.clamp(max=0)
+        groups = gains.view(-1, self.method.k)
""",
    ),
    Bug(
        "value_of_the_last_token",
        "the reward is compared with the value of the last token in all states, so that V of the others is not fitted",
        "of the field",
        "_sound_awr",
        ("critic_is_fitted_everywhere",),
        patch="""
-        error = batch.rewards.unsqueeze(1) - out.values
+        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
+        error = batch.rewards.unsqueeze(1) - (out.values * last).sum(1, keepdim=True).expand_as(out.values)
""",
    ),
    Bug(
        "long_beside_the_longest",
        "the penalty of length is relative to the longest response of the collection",
        "of the field",
        "_sound_length_penalty",
        ("context_does_not_count",),
        patch="""
-        rewards = per_response(scores) - self.method.price * beyond
+        rewards = per_response(scores)
@@
-        return replace(experience, advantages=leave_one_out(experience.advantages, self.method.k))
+        lengths = experience.sequences.response_mask.sum(1)
+        beyond = (lengths - self.method.budget).clamp(min=0) / lengths.max()
+        rewards = experience.advantages - self.method.price * beyond
+        return replace(experience, advantages=leave_one_out(rewards, self.method.k))
""",
    ),
)
