"""Random walks: find the shortest path to the goal, one letter per node.

The shortest-path task of the Decision Transformer paper (Chen et al. 2021), as in trlX's examples: a random
directed graph, a language model that is trained on random walks on it, and a reward for short valid walks to the goal.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase
from typing import Any

import networkx as nx
import numpy as np

from trainkit.testing import character_tokenizer

NODES, EDGE_PROBABILITY, WALKS, MAX_STEPS, GOAL = 21, 0.1, 1000, 10, 0
LETTERS = ascii_lowercase[:NODES]


@dataclass(frozen=True)
class RandomWalks:
    """The graph of one seed, with its walks, its start nodes and the optimality of a walk."""

    graph: nx.DiGraph
    walks: list[str]
    shortest: dict[str, int]
    """Steps of the shortest path to the goal, by start letter; only starts for which the optimality is defined."""

    @classmethod
    def generate(cls, seed: int) -> RandomWalks:
        """Draw random walks and a graph in which every node has an out-edge and some nodes can reach the goal."""
        rng = np.random.default_rng(seed)
        shortest: dict[str, int] = {}
        while not shortest:
            graph = _graph(rng)
            lengths = nx.single_source_shortest_path_length(graph.reverse(), GOAL)
            # for a start MAX_STEPS away the optimality is 0/0, so it is not a prompt
            shortest = {LETTERS[n]: steps for n, steps in sorted(lengths.items()) if 0 < steps < MAX_STEPS}
        return cls(graph, [_walk(graph, rng) for _ in range(WALKS)], shortest)

    @property
    def starts(self) -> list[str]:
        """The prompts: every start from which the goal can be reached in time."""
        return list(self.shortest)

    def optimality(self, walk: str) -> float:
        """Return (10 − length) / (10 − shortest length) if the walk is valid and reaches the goal in time, else 0."""
        nodes = [LETTERS.find(letter) for letter in walk]
        valid = all(self.graph.has_edge(a, b) for a, b in pairwise(nodes))
        if not valid or GOAL not in nodes or walk[0] not in self.shortest:
            return 0.0
        return max(MAX_STEPS - nodes.index(GOAL), 0) / (MAX_STEPS - self.shortest[walk[0]])

    def metric(self, samples: list[str], **_: Any) -> dict[str, list[float]]:
        """Return the optimality of each sample as a metric."""
        return {"optimality": self.reward(samples)}

    def reward(self, samples: list[str], **_: Any) -> list[float]:
        """Return the optimality of each sample."""
        return [self.optimality(walk) for walk in samples]


def _graph(rng: np.random.Generator) -> nx.DiGraph:
    """Draw a random directed graph in which every node has an out-edge; only the goal has a self-loop."""
    while True:
        adjacency = rng.random((NODES, NODES)) < EDGE_PROBABILITY
        np.fill_diagonal(adjacency, False)
        if adjacency.any(axis=1).all():
            adjacency[GOAL] = np.arange(NODES) == GOAL
            return nx.from_numpy_array(adjacency, create_using=nx.DiGraph)


def _walk(graph: nx.DiGraph, rng: np.random.Generator) -> str:
    """Draw a random walk from any node but the goal; it ends at the goal or after MAX_STEPS steps."""
    node = int(rng.integers(1, NODES))
    nodes = [node]
    while node != GOAL and len(nodes) <= MAX_STEPS:
        node = int(rng.choice(list(graph.successors(node))))
        nodes.append(node)
    return "".join(LETTERS[n] for n in nodes)


def sft(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT: walks as (start, rest) pairs."""
    task = RandomWalks.generate(seed)
    return {
        "samples": [(walk[:1], walk[1:]) for walk in task.walks],
        "eval_prompts": task.starts * 10,
        "metric_fn": task.metric,
        "tokenizer": character_tokenizer(LETTERS),
    }


def ppo(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for an online method with a reward for short walks."""
    task = RandomWalks.generate(seed)
    return {
        "reward_fn": task.reward,
        "prompts": task.starts,
        "eval_prompts": task.starts * 10,
        "metric_fn": task.metric,
        "tokenizer": character_tokenizer(LETTERS),
    }


rloo = grpo = rft = ppo
"""The arguments for the other algorithms, which are the same."""
