"""Trees over lists, for the tests of this folder: random parents, and the path of a node."""

import random

import torch


def random_parents(rng: random.Random, num_reqs: int, num_nodes: int, shape: str) -> torch.Tensor:
    def parent(node: int) -> int:
        if node == 0:
            return -1
        return {"chain": node - 1, "star": 0}.get(shape, rng.randrange(node))

    return torch.tensor([[parent(node) for node in range(num_nodes)] for _ in range(num_reqs)])


def path_to_root(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path
