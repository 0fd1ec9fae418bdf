"""Bugs that only a law finds: what must not matter, the direction of time, expectations that are known exactly."""

from __future__ import annotations

from mutants.planting import Bug

OF_CONTEXT = (
    Bug(
        "lengths_with_prompts",
        "the loss of a response is divided by the tokens of its prompt, too",
        "of the field",
        "grpo",
        ("context_does_not_count@kl",),
        patch="""
-        logprobs, lengths = self.policy(batch.sequences).logprobs, mask.sum(1).clamp(min=1)
+        logprobs, lengths = self.policy(batch.sequences).logprobs, batch.sequences.attention_mask.sum(1)
""",
        missed="lengths that count prompt tokens",
    ),
    Bug(
        "gae_over_observations",
        "returns are computed over the columns of an episode, so those of an observation count as steps",
        "of the field",
        "ppo",
        ("context_does_not_count",),
        patch="""
-        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
+        steps = x.sequences.attention_mask & ~x.sequences.prompt_mask
+        advantages, returns = gae(
+            zero_masked(x.values, mask), rewards, steps, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap
+        )
+        returns = zero_masked(returns, mask)
""",
        missed="GAE over observations",
    ),
    Bug(
        "odds_of_whole_sequences",
        "the mean log-probability of an output is its sum divided by the tokens of prompt and output",
        "of the field",
        "orpo",
        ("context_does_not_count",),
        patch="""
-        means = sums / both.response_mask.sum(1)
+        means = sums / both.attention_mask.sum(1)
""",
        missed="lengths that count prompt tokens",
    ),
    Bug(
        "observations_are_steps",
        "every token of a prompt between two outputs discounts the value of the next state, as if it were a step",
        "of the field",
        "ilql",
        ("context_does_not_count",),
        patch="""
-    chosen, rows = values[mask], mask.nonzero()[:, 0]
-    follows = F.pad(rows[1:] == rows[:-1], (0, 1))
-    return torch.zeros_like(values).masked_scatter(mask, zero_masked(chosen.roll(-1), follows))
+    further = F.pad(mask[:, 1:].flip(1).cumsum(1).flip(1) > 0, (0, 1))
+    distances = torch.arange(mask.size(1), device=mask.device).expand(mask.shape)
+    at = torch.where(mask, distances, mask.size(1)).flip(1).cummin(1).values.flip(1)
+    following = F.pad(at[:, 1:], (0, 1)).clamp(max=mask.size(1) - 1)
+    gaps = 0.99 ** (following - distances - 1)
+    return zero_masked(values.gather(1, following) * gaps, mask & further)
""",
    ),
    Bug(
        "scores_per_token_of_the_row",
        "scores are divided by the length of prompt and response, where that of the response is meant",
        "of the field",
        "reinforce_pp",
        ("context_does_not_count",),
        patch="""
-        rewards = kl_shaped_rewards(scores, policy.logprobs, reference, mask, self.method.kl_coef)
+        lengths = sequences.lengths if scores.dim() == 1 else sequences.lengths.unsqueeze(1)
+        rewards = kl_shaped_rewards(scores / lengths, policy.logprobs, reference, mask, self.method.kl_coef)
""",
        missed="lengths that count prompt tokens",
    ),
    Bug(
        "weights_by_position",
        "later tokens weigh less, counted from the beginning of the prompt",
        "of the field",
        "mine",
        ("context_does_not_count",),
        patch="""
-        loss = masked_mean(-batch.advantages.unsqueeze(1) * ratio, mask)
+        decay = 0.97 ** batch.sequences.position_ids
+        loss = masked_mean(-batch.advantages.unsqueeze(1) * ratio * decay, mask)
""",
    ),
    Bug(
        "likelihood_per_token_of_the_row",
        "the log-probability of a response is divided by the tokens of prompt and response",
        "of the field",
        "remax",
        ("context_does_not_count",),
        patch="""
-        losses = -masked_sum(batch.advantages * logprobs, mask, dim=1)
+        losses = -masked_sum(batch.advantages * logprobs, mask, dim=1) / batch.sequences.lengths
""",
    ),
    Bug(
        "truncated_if_not_the_longest",
        "responses that are shorter than the longest of their part count as ended, the others as truncated",
        "of the field",
        "rloo",
        ("context_does_not_count",),
        patch="""
-            return penalise_truncated(placed, terminated, mask, self.method.missing_eos_penalty)
+            terminated = mask.sum(1) < mask.sum(1).max()
+            return penalise_truncated(placed, terminated, mask, self.method.missing_eos_penalty)
""",
    ),
)

OF_TIME = (
    Bug(
        "rewards_so_far",
        "a token is credited with the sum of the rewards before it, not with those to come",
        "of the field",
        "reinforce_pp",
        ("time_has_a_direction",),
        patch="""
-        returns, _ = gae(torch.zeros_like(rewards), rewards, mask, gamma=1.0, lam=1.0)
+        returns = zero_masked(zero_masked(rewards, mask).cumsum(1), mask)
""",
        missed="sums in the direction of the text",
    ),
    Bug(
        "rewards_at_once",
        "a token is credited with its own reward alone, so that a score teaches the last token alone",
        "of the field",
        "reinforce_pp",
        ("time_has_a_direction",),
        patch="""
-        returns, _ = gae(torch.zeros_like(rewards), rewards, mask, gamma=1.0, lam=1.0)
+        returns = zero_masked(rewards, mask)
""",
    ),
    Bug(
        "bootstrap_one_state_early",
        "the error of a step compares the value of a state with itself instead of the value of the next state",
        "of the field",
        "ppo",
        ("discounted_as_declared",),
        patch="""
-        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
+        ahead = F.pad(zero_masked(x.values, mask)[:, 1:], (0, 1))
+        early = rewards + method.gamma * (x.values - ahead)
+        advantages, returns = gae(x.values, early, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
""",
        missed="bootstrap one state early",
    ),
    Bug(
        "bootstrap_of_the_last_token",
        "a truncated response is bootstrapped with the value of the state before its last token, not after it",
        "of the field",
        "ppo",
        ("discounted_as_declared",),
        patch="""
-        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
+        lasts = masked_sum(x.values, mask & (mask.flip(1).cumsum(1).flip(1) == 1), dim=1)
+        ends = torch.where(x.bootstrap != 0, lasts, x.bootstrap)
+        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=ends)
""",
    ),
    Bug(
        "gamma_and_lambda_exchanged",
        "γ is passed as λ, and λ as γ; their product is the same",
        "of the field",
        "ppo",
        ("discounted_as_declared", "effects_as_declared"),
        patch="""
-        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
+        advantages, returns = gae(x.values, rewards, mask, gamma=method.lam, lam=method.gamma, bootstrap=x.bootstrap)
""",
        missed="γ and λ exchanged",
    ),
    Bug(
        "discounted_to_the_start",
        "rewards are discounted by their distance from the start of the response, and once more by the returns",
        "of the field",
        "ppo",
        ("discounted_as_declared",),
        patch="""
-        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
+        rewards = rewards * method.gamma ** (mask.cumsum(1) - 1).clamp(min=0)
+        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
""",
    ),
    Bug(
        "lambda_on_values_too",
        "the value of the next state is discounted by γλ instead of γ",
        "of the field",
        "ppo",
        ("discounted_as_declared",),
        patch="""
-        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
+        discount = method.gamma * method.lam
+        advantages, returns = gae(x.values, rewards, mask, gamma=discount, lam=1.0, bootstrap=x.bootstrap)
""",
    ),
)

OF_EXPECTATION = (
    Bug(
        "k3_in_the_reward",
        "the penalty in the reward is k3, whose expected score-function gradient is not that of the KL",
        "of the field",
        "ppo",
        ("gradient_in_expectation",),
        patch="""
-        return kl_k1(policy.logprobs, reference.logprobs)
+        return kl_k3(policy.logprobs, reference.logprobs)
""",
    ),
    Bug(
        "k2_in_the_reward",
        "the penalty in the reward is the square of the log-ratio",
        "of the field",
        "reinforce_pp",
        ("gradient_in_expectation",),
        patch="""
-        rewards = kl_shaped_rewards(scores, policy.logprobs, reference, mask, self.method.kl_coef)
+        squares = 0.5 * (policy.logprobs - reference) ** 2
+        rewards = kl_shaped_rewards(scores, policy.logprobs, reference, mask, self.method.kl_coef, penalty=squares)
""",
    ),
    Bug(
        "mean_of_the_own_tokens_as_baseline",
        "returns are compared with the mean of the returns of the same response",
        "of the field",
        "reinforce_pp",
        ("gradient_in_expectation",),
        patch="""
-        advantages = whiten(returns, mask, reduce=self.reduce)
+        means = (returns.sum(1) / mask.sum(1)).unsqueeze(1)
+        advantages = whiten(returns - 0.5 * means, mask, reduce=self.reduce)
""",
        missed="a wrong baseline",
    ),
    Bug(
        "penalty_without_the_own_token",
        "a token does not pay for its own KL, only for that of later tokens",
        "of the field",
        "remax",
        ("gradient_in_expectation",),
        patch="""
-    following = penalty.sum(1, keepdim=True) - penalty.cumsum(1) + penalty
+    following = penalty.sum(1, keepdim=True) - penalty.cumsum(1)
""",
        missed="off by one token",
    ),
    Bug(
        "best_of_the_group_as_baseline",
        "the baseline is the best score of the group, the own one included",
        "of the field",
        "grpo",
        ("gradient_in_expectation",),
        patch="""
-        advantages = groups - groups.mean(1, keepdim=True)
+        advantages = groups - (groups.mean(1, keepdim=True) + groups.amax(1, keepdim=True)) / 2
""",
        missed="a wrong baseline",
    ),
    Bug(
        "references_of_pairs_exchanged",
        "the reference's log-probability of the best response is compared with the policy's of the worst",
        "of the field",
        "online_dpo",
        ("gradient_in_expectation",),
        patch="""
-        return DPOBatch(chosen, rejected, x.ref_logps[best], x.ref_logps[worst], decided)
+        return DPOBatch(chosen, rejected, x.ref_logps[worst], x.ref_logps[best], decided)
""",
    ),
    Bug(
        "beta_twice",
        "β multiplies the rewards, and once more the margins",
        "of the field",
        "kto",
        ("gradient_in_expectation",),
        patch="""
-        return kto_loss(margins, weights).mean(), {**told, **({} if kl is None else {"policy/kl": Mean.of(kl)})}
+        told |= {} if kl is None else {"policy/kl": Mean.of(kl)}
+        return kto_loss(method.beta * margins, weights).mean(), told
""",
    ),
    Bug(
        "odds_of_products",
        "the odds are those of the whole output's probability, where the mean over its tokens is meant",
        "of the field",
        "orpo",
        ("gradient_in_expectation", "effects_as_declared"),
        patch="""
-        beta, (_, means) = self.method.beta, self.read(batch)
-        ratios = self.log_ratios(*means)
+        beta, (sums, means) = self.method.beta, self.read(batch)
+        ratios = self.log_ratios(*sums)
""",
    ),
    Bug(
        "likelihood_of_both_sides",
        "the likelihood that is raised beside the comparison is that of both sides of a pair",
        "of the field",
        "cpo",
        ("gradient_in_expectation",),
        patch="""
-        return (losses - method.nll_weight * means.chosen).mean(), metrics
+        return (losses - method.nll_weight * (0.9 * means.chosen + 0.1 * means.rejected)).mean(), metrics
""",
    ),
    Bug(
        "divergences_exchanged",
        "'reverse' is the forward divergence, and 'forward' the reverse one",
        "of the field",
        "distill_offline",
        ("gradient_in_expectation",),
        patch="""
-        told = self.policy(batch.sequences, reference=self.reference, divergence=measure)
+        measure = {"reverse": "forward", "forward": "reverse"}.get(measure, measure) if name == measure else measure
+        told = self.policy(batch.sequences, reference=self.reference, divergence=measure)
""",
    ),
    Bug(
        "target_of_the_next_action",
        "the target of Q is r + γ Q of the next token in the data, as in SARSA, and not r + γ V",
        "of the field",
        "ilql",
        ("gradient_in_expectation",),
        patch="""
-    goal = (zero_masked(rewards, mask) + gamma * next_values(values, mask)).detach()
+    goal = (zero_masked(rewards, mask) + gamma * next_values(target_q, mask)).detach()
""",
    ),
    Bug(
        "gamma_twice",
        "the value of the next state is discounted twice",
        "of the field",
        "ilql",
        ("gradient_in_expectation",),
        patch="""
-    goal = (zero_masked(rewards, mask) + gamma * next_values(values, mask)).detach()
+    goal = (zero_masked(rewards, mask) + gamma**2 * next_values(values, mask)).detach()
""",
    ),
)

OF_ESTIMATES = (
    Bug(
        "entropy_by_the_sampled_token",
        "the entropy bonus is −log π of the sampled token, whose gradient is 0 on average",
        "of the field",
        "ppo",
        ("entropy_of_states",),
        patch="""
-            loss = loss - method.ent_coef * masked_mean(new.entropy, mask)
+            loss = loss + method.ent_coef * masked_mean(new.logprobs, mask)
""",
    ),
    Bug(
        "entropy_of_one_term",
        "the entropy bonus is the sampled token's term of the entropy, −π log π",
        "of the field",
        "ppo",
        ("entropy_of_states",),
        patch="""
-            loss = loss - method.ent_coef * masked_mean(new.entropy, mask)
+            loss = loss + method.ent_coef * masked_mean(new.logprobs.exp() * new.logprobs, mask)
""",
    ),
    Bug(
        "entropy_where_there_is_advantage",
        "the entropy bonus is multiplied by the size of the advantage",
        "of the field",
        "ppo",
        ("entropy_of_states",),
        patch="""
-            loss = loss - method.ent_coef * masked_mean(new.entropy, mask)
+            loss = loss - method.ent_coef * masked_mean(new.entropy * batch.advantages.abs(), mask)
""",
    ),
    Bug(
        "kl_per_token_by_k1",
        "the KL per token is reported by k1, which is negative for every other response",
        "of the field",
        "rloo",
        ("estimates_as_declared",),
        patch="""
-                "policy/kl_per_token": Mean.of(kl_k3(x.logprobs, x.ref_logprobs), mask),
+                "policy/kl_per_token": Mean.of(kl_k1(x.logprobs, x.ref_logprobs), mask),
""",
    ),
    Bug(
        "kl_as_a_mean_of_means",
        "the KL per token is a mean over responses of their means over tokens",
        "of the field",
        "grpo",
        ("estimates_as_declared",),
        patch="""
-            losses, metrics["policy/kl_per_token"] = losses + method.kl_coef * k3, Mean.of(k3, mask)
+            losses = losses + method.kl_coef * k3
+            metrics["policy/kl_per_token"] = Mean.of(masked_sum(k3, mask, dim=1) / lengths)
""",
    ),
    Bug(
        "kl_by_squares",
        "the KL per token is reported by k2, half the square of the log-ratio",
        "of the field",
        "online_dpo",
        ("estimates_as_declared",),
        patch="""
-        "policy/kl_per_token": Mean.of(kl_k3(logprobs, ref_logprobs), mask),
+        "policy/kl_per_token": Mean.of(0.5 * kl_k1(logprobs, ref_logprobs) ** 2, mask),
""",
    ),
)

OF_FORMULAS = (
    Bug(
        "groups_kept_by_a_margin",
        "groups whose best score is less than a half above their mean are replaced, as if their scores were equal",
        "of the field",
        "grpo",
        ("effects_as_declared",),
        patch="""
-        return (groups != groups[:, :1]).flatten(1).any(1).repeat_interleave(size)
+        return (groups.amax(1) > groups.mean(1) + 0.5).flatten(1).any(1).repeat_interleave(size)
""",
    ),
    Bug(
        "steered_by_the_mean",
        "text is sampled by the mean of the two targets of Q, of which training reads the lower one",
        "of the field",
        "ilql",
        ("effects_as_declared",),
        patch="""
-        return torch.stack([q(states) for q in self.target_q]).amin(0) - values.unsqueeze(-1)
+        return torch.stack([q(states) for q in self.target_q]).mean(0) - values.unsqueeze(-1)
""",
        missed="the higher of two targets",
    ),
    Bug(
        "newest_leave_a_full_pool",
        "a pool that is full keeps its oldest responses, and learns from them for ever",
        "of the field",
        "rft",
        ("effects_as_declared",),
        patch="""
-                self.pools[query] = dict([*others, (response, score)][-self.method.pool_size :])
+                self.pools[query] = dict([*others, (response, score)][: self.method.pool_size])
""",
    ),
)

OF_LAWS = (*OF_CONTEXT, *OF_TIME, *OF_EXPECTATION, *OF_ESTIMATES, *OF_FORMULAS)
"""All of them, by law."""
