# Walks on a ring of letters, a to h, that go on by one or by two letters; the goal is a, by as few steps as possible
from itertools import pairwise

import torch

LETTERS = "abcdefgh"


def generate_walks(n_walks=200, max_length=6, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(n, (), generator=random))

    walks = []
    for _ in range(n_walks):
        node = 1 + draw(len(LETTERS) - 1)
        walk = [node]
        while len(walk) < max_length and node != 0:
            node = (node + 1 + draw(2)) % len(LETTERS)
            walk.append(node)
        walks.append("".join(LETTERS[node] for node in walk))

    def metric_fn(samples, _prompts=None, _outputs=None):
        lengths, best = [], []
        for sample in samples:
            nodes = [LETTERS.find(letter) for letter in sample]
            steps = [(after - before) % len(LETTERS) for before, after in pairwise(nodes)]
            arrived = nodes.index(0) if 0 in nodes else None
            valid = arrived is not None and all(step in (1, 2) for step in steps[:arrived])
            lengths.append(arrived if valid else 10)
            best.append((len(LETTERS) - nodes[0] + 1) // 2)
        lengths = torch.tensor(lengths, dtype=torch.float)
        return {"lengths": lengths.tolist(), "optimality": (10 - lengths) / (10 - torch.tensor(best))}

    return metric_fn, list(LETTERS[1:]), walks
