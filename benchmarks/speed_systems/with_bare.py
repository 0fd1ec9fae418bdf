"""The baseline: the same work in plain torch, written by hand for speed.

The weights are those of a transformers model. The arithmetic is written for rows without padding, so no mask is needed.
A prompt is run once for all its samples. The cache has room for the response from the start. Log-probabilities, and the
states that the value head reads, are kept from sampling. The language-model head runs only at tokens that enter the
loss, and its logits are computed, normalised and differentiated in one buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel
from work import Turns, Work, serve

from trainkit.models.backend import by_default_library, use_fast_exact_matmul

Cache = list[tuple[Tensor, Tensor]]


class HeadLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens, log softmax(hidden · weightᵀ)[token]. [N, D], [V, D], [N] -> [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities; keep exp(logits − largest) in the buffer of the logits."""
        logits = hidden @ weight.t()
        chosen = logits.gather(1, tokens.unsqueeze(1))
        top = logits.amax(1, keepdim=True)
        total = logits.sub_(top).exp_().sum(1, keepdim=True)
        ctx.save_for_backward(hidden, weight, tokens, logits, total)
        return (chosen - top - total.log()).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients; ∂/∂logits = onehot − softmax is computed in the same buffer."""
        hidden, weight, tokens, exps, total = ctx.saved_tensors
        grad = grads[0].unsqueeze(1)
        exps.mul_(-grad / total).scatter_add_(1, tokens.unsqueeze(1), grad)
        return exps @ weight, exps.t() @ hidden, None


def attend(q: Tensor, k: Tensor, v: Tensor, cache: Cache | None, layer: int, start: int) -> Tensor:
    """Compute causal attention over these and all cached keys. [B, H, T, d] -> [B, T, D]."""
    if cache is not None:
        for buffer, new in zip(cache[layer], (k, v), strict=True):
            buffer[:, :, start : start + new.size(2)] = new
        k, v = (buffer[:, :, : start + q.size(2)] for buffer in cache[layer])
    causal = partial(F.scaled_dot_product_attention, is_causal=q.size(2) > 1)
    return by_default_library(causal, q, k, v).transpose(1, 2).flatten(2)


class GPT2:
    """The trunk and head of GPT-2, with the weights of a transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.head = model, model.lm_head.weight
        self.layers, self.heads = model.transformer.h, model.config.n_head

    def trunk(self, ids: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Return the hidden states [B, T, D] of ids at positions ``start`` and after."""
        base = self.model.transformer
        x = F.embedding(ids, base.wte.weight) + base.wpe.weight[start : start + ids.size(1)]
        for i, layer in enumerate(self.layers):
            qkv = layer.attn.c_attn(layer.ln_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + layer.attn.c_proj(attend(qkv[0], qkv[1], qkv[2], cache, i, start))
            x = x + layer.mlp.c_proj(F.gelu(layer.mlp.c_fc(layer.ln_2(x)), approximate="tanh"))
        return base.ln_f(x)


class Llama:
    """The trunk and head of Llama, with the weights of a transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.head = model, model.lm_head.weight
        self.layers, self.heads = model.model.layers, model.config.num_attention_heads
        self.eps = model.config.rms_norm_eps
        cos, sin = model.model.rotary_emb(
            torch.zeros(1), torch.arange(model.config.max_position_embeddings).unsqueeze(0)
        )
        half = cos.size(-1) // 2
        self.cos, self.sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)  # the sign of rotate_half

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply the RMS norm."""
        return F.rms_norm(x, (x.size(-1),), weight, self.eps)

    def trunk(self, ids: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Return the hidden states [B, T, D] of ids at positions ``start`` and after."""
        base, at = self.model.model, slice(start, start + ids.size(1))
        cos, sin = self.cos[at], self.sin[at]
        half = cos.size(-1) // 2
        x = F.embedding(ids, base.embed_tokens.weight)
        for i, layer in enumerate(self.layers):
            h, attn, mlp = self.norm(x, layer.input_layernorm.weight), layer.self_attn, layer.mlp
            q, k, v = (
                F.linear(h, proj.weight).unflatten(2, (self.heads, -1)).transpose(1, 2)
                for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            q, k = (x * cos + x.roll(half, -1) * sin for x in (q, k))
            x = x + F.linear(attend(q, k, v, cache, i, start), attn.o_proj.weight)
            h = self.norm(x, layer.post_attention_layernorm.weight)
            gated = F.silu(F.linear(h, mlp.gate_proj.weight)) * F.linear(h, mlp.up_proj.weight)
            x = x + F.linear(gated, mlp.down_proj.weight)
        return self.norm(x, base.norm.weight)


Net = GPT2 | Llama


def logprobs(net: Net, ids: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [B, R] of the tokens after the prompt, and the states [B, R, D] before each."""
    states = net.trunk(ids[:, :-1])[:, prompt - 1 :]
    tokens = ids[:, prompt:]
    return HeadLogprobs.apply(states.flatten(0, 1), net.head, tokens.flatten()).view(tokens.shape), states


def empty_cache(net: Net, rows: int, room: int) -> Cache:
    """Create uninitialised keys and values [rows, H, room, d] for every layer."""
    shape = (rows, net.heads, room, net.model.config.hidden_size // net.heads)
    return [(torch.empty(shape), torch.empty(shape)) for _ in net.layers]


@torch.no_grad()
def generate(net: Net, prompts: Tensor, samples: int, new: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample sequences [B, T], ``samples`` per prompt; return them, log-probabilities [B, new], states [B, new, D]."""
    prompt, rows = prompts.size(1), len(prompts) * samples
    width = net.model.config.hidden_size
    read = empty_cache(net, len(prompts), prompt)
    state = net.trunk(prompts, read)[:, -1].repeat_interleave(samples, 0)
    cache = empty_cache(net, rows, prompt + new)
    for buffers, known in zip(cache, read, strict=True):
        for buffer, states in zip(buffers, known, strict=True):
            buffer[:, :, :prompt] = states.repeat_interleave(samples, 0)
    tokens, chosen = torch.empty((new, rows), dtype=torch.long), torch.empty((new, rows))
    states, uniforms = torch.empty((new, rows, width)), torch.rand((new, rows, 1))
    for step in range(new):
        if step:
            state = net.trunk(tokens[step - 1].unsqueeze(1), cache, prompt + step - 1)[:, 0]
        states[step] = state
        probs = (state @ net.head.t()).softmax(-1)
        mass = probs.cumsum(-1)
        token = torch.searchsorted(mass, uniforms[step] * mass[:, -1:]).clamp_(max=probs.size(1) - 1)
        tokens[step], chosen[step] = token[:, 0], probs.gather(1, token)[:, 0].log()
    return torch.cat([prompts.repeat_interleave(samples, 0), tokens.t()], 1), chosen.t(), states.transpose(0, 1)


def surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return the clipped objective, negated."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


def gae(values: Tensor, rewards: Tensor) -> Tensor:
    """Compute advantages [B, T] by GAE with γ = 1, λ = 0.95."""
    columns, after, advantage = [], torch.zeros(len(values)), torch.zeros(len(values))
    for t in range(values.size(1) - 1, -1, -1):
        advantage = rewards[:, t] + after - values[:, t] + 0.95 * advantage
        after = values[:, t]
        columns.append(advantage)
    return torch.stack(columns[::-1], 1)


class Floor:
    """One trainable model, its frozen copy, a value head and an optimizer."""

    def __init__(self, work: Work, turns: Turns) -> None:
        self.work, self.turns, self.count = work, turns, 0
        model = work.network()
        kind: Callable[[PreTrainedModel], Net] = GPT2 if model.config.model_type == "gpt2" else Llama
        self.net = kind(model)
        if work.case in ("ppo", "rloo"):
            self.frozen = kind(copy.deepcopy(model).requires_grad_(False))
        width = model.config.hidden_size
        self.value = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))
        self.trained = [*model.parameters(), *(self.value.parameters() if work.case == "ppo" else [])]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6, weight_decay=0.0, fused=True)

    def collect(self, samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample responses to the next prompts; return sequences, old and reference log-probabilities, and states."""
        work = self.work
        with self.turns.phase("generate"):
            prompts = work.ids(256, work.prompt).roll(-self.count, 0)[: work.rows // samples].to(work.device)
            ids, old, states = generate(self.net, prompts, samples, work.new)
        self.count += len(prompts)
        with self.turns.phase("reference"), torch.no_grad():
            reference, _ = logprobs(self.frozen, ids, work.prompt)
        return ids, old, reference, states

    def update(self, loss: Callable[[], Tensor]) -> None:
        """Make one optimizer step."""
        with self.turns.phase("forward"):
            value = loss()
        with self.turns.phase("backward"):
            value.backward()
        clip_grad_norm_(self.trained, 1.0)
        with self.turns.phase("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def rloo(self) -> None:
        """Run a collection and its one update."""
        ids, old, reference, _ = self.collect(self.work.samples)
        rewards = (torch.arange(len(ids)) % 2 - 0.05 * (old - reference).sum(1)).view(-1, self.work.samples)
        others = (rewards.sum(1, keepdim=True) - rewards) / (self.work.samples - 1)
        advantages = (rewards - others).flatten()

        def loss() -> Tensor:
            new, _ = logprobs(self.net, ids, self.work.prompt)
            return surrogate((new - old).sum(1).exp(), advantages).mean()

        self.update(loss)

    def ppo(self) -> None:
        """Run a collection and the updates of its epochs."""
        ids, old, reference, states = self.collect(1)
        with torch.no_grad():
            values = self.value(states).squeeze(-1)
            rewards = -0.05 * (old - reference)
            rewards[:, -1] += torch.arange(len(ids)) % 2
            raw = gae(values, rewards)
            returns, advantages = raw + values, (raw - raw.mean()) * (raw.var() + 1e-8).rsqrt()

        def loss() -> Tensor:
            new, hidden = logprobs(self.net, ids, self.work.prompt)
            now = self.value(hidden).squeeze(-1)
            clipped = values + (now - values).clamp(-0.2, 0.2)
            wrong = 0.5 * torch.maximum((now - returns) ** 2, (clipped - returns) ** 2)
            return surrogate((new - old).exp(), advantages).mean() + wrong.mean()

        for _ in range(self.work.epochs):
            self.update(loss)

    def sft(self) -> None:
        """Run the update of one batch."""
        ids = self.work.ids(self.work.rows, self.work.longest).to(self.work.device)
        self.update(lambda: -logprobs(self.net, ids, 1)[0].mean())

    def generate(self) -> None:
        """Generate one response to every prompt."""
        with self.turns.phase("generate"):
            prompts = self.work.ids(self.work.rows, self.work.prompt).to(self.work.device)
            generate(self.net, prompts, 1, self.work.new)


@torch.no_grad()
def check(net: Net) -> float:
    """Return the largest difference from the model's own log-probabilities, in reading and in sampling."""
    ids, old, _ = generate(net, torch.arange(24).view(2, 12), 2, 8)
    logits = net.model(ids).logits[:, 11:-1].log_softmax(-1)
    right = logits.gather(2, ids[:, 12:].unsqueeze(2)).squeeze(2)
    return max(float((found - right).abs().max()) for found in (logprobs(net, ids, 12)[0], old))


def run(work: Work, turns: Turns) -> None:
    """Make steps forever."""
    if work.precision != "float32" or work.shortest != work.longest:
        return turns.say(skip="the baseline is written for float32 and rows of equal length")
    use_fast_exact_matmul(torch.device(work.device))
    torch.set_default_device(work.device)
    floor = Floor(work, turns)
    if (difference := check(floor.net)) > 1e-4:
        raise ValueError(f"the baseline's log-probabilities differ from the model's by {difference}")
    turns.ready()
    while True:
        getattr(floor, work.case)()
        turns.end()


if __name__ == "__main__":
    serve(run)
