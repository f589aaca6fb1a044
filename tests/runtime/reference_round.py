"""The algorithm on one page: EAGLE-3 with dynamic trees over transformers, without caches, batches and kernels.

draft    the head continues the verifier's own hidden states (EAGLE-3, arXiv:2503.01840, section 3); each level expands
         its best nodes, and of all nodes the best are kept (EAGLE-2, arXiv:2406.16858, section 4)
verify   one forward pass of the verifier over the text and the tree, in which a node sees the text and its ancestors
accept   the token at a position is argmax(logits / T + Gumbel(seed, position, token)): a sample of softmax(logits / T)
         that does not depend on drafts, and greedy at T = 0; a drafted token is accepted where it is that token
keep     the accepted path and the token behind it are text now; their hidden states are what the next draft continues

`Engine.step` does so for many sequences at once and computes no token twice: keys and values stay in blocks, the
accepted path's are moved into place, and the drafter has its own in another process.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.heads.contract import DraftHead


class Node(NamedTuple):
    """A node of a draft tree: token, index of the parent (-1: none), sum of its path's log-probabilities, path."""

    token: int
    parent: int
    score: float
    path: tuple[int, ...]


class Sampling(NamedTuple):
    """Rule by which tokens are chosen."""

    temperature: float = 0.0
    seed: int = 0

    def scores(self, logits: Tensor, token_ids: Tensor, position: int) -> Tensor:
        """[vocab_size]: the best of them is the token at the position."""
        if self.temperature == 0:
            return logits
        noise = gumbel_noise(torch.tensor([self.seed]), torch.tensor([position]), token_ids)
        return logits / self.temperature + noise[0]


def draft(head: DraftHead, taps: Tensor, text: list[int], shape: SpeculationConfig, sampling: Sampling) -> list[Node]:
    """The tree that grows from the text's last token; node 0 is that token.

    Args:
        taps: [len(text) - 1, taps_size]: hidden states of the verifier at all tokens but the last.
    """
    nodes, level = [Node(text[-1], -1, 0.0, ())], [0]
    for depth in range(1, shape.max_path):
        first = len(nodes)
        for parent in level:
            logits = head_logits(head, taps, text, nodes[parent].path)
            scores = sampling.scores(logits, head.draft_token_ids, len(text) + depth - 1).log_softmax(-1)
            best = scores.topk(shape.draft_top_k)
            for score, column in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                token, (_, _, above, path) = int(head.draft_token_ids[column]), nodes[parent]
                nodes.append(Node(token, parent, above + score, (*path, token)))
        level = sorted(range(first, len(nodes)), key=lambda node: -nodes[node].score)[: shape.draft_top_k]
    best = sorted(range(1, len(nodes)), key=lambda node: -nodes[node].score)[: shape.num_nodes - 1]
    kept = [0, *sorted(best)]  # a parent's score is no less than its child's: it is kept, too
    return [nodes[node]._replace(parent=kept.index(nodes[node].parent) if node else -1) for node in kept]


def head_logits(head: DraftHead, taps: Tensor, text: list[int], path: tuple[int, ...]) -> Tensor:
    """[draft_vocab_size] of what follows a path of drafted tokens: pairs of a token's features and the next token."""
    features, tokens = head.fuse(taps), text[1:]
    for drafted in (*path, None):
        hidden = head(torch.tensor(tokens), features, head.rotary(torch.arange(len(tokens))), attend)
        features, tokens = torch.cat([features, head.feedback(hidden[-1:])]), [*tokens, drafted]
    return head.logits(hidden[-1])


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention [T, heads, head_dim] of a head's layer."""
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def verify(
    model: PreTrainedModel, text: list[int], tree: list[Node], tap_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Logits [num_nodes, vocab_size] behind each node, and taps [len(text) - 1 + num_nodes, taps_size]."""
    before = len(text) - 1
    visible = torch.ones(before + len(tree), before + len(tree)).tril().bool()
    for index, node in enumerate(tree[1:], 1):
        visible[before + index, before:] = visible[before + node.parent, before:]
        visible[before + index, before + index] = True
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    output = model(
        torch.tensor([[*text[:-1], *(node.token for node in tree)]]),
        attention_mask=mask[None, None],
        position_ids=torch.tensor([[*range(before), *(before + len(node.path) for node in tree)]]),
        use_cache=False,
        output_hidden_states=True,
    )
    return output.logits[0, before:], torch.cat([output.hidden_states[layer][0] for layer in tap_layers], dim=-1)


def accept(logits: Tensor, tree: list[Node], text: list[int], sampling: Sampling) -> tuple[list[int], list[int]]:
    """The accepted nodes, root first, and the tokens chosen at them: the accepted drafts, and the one behind them."""
    every, nodes, chosen = torch.arange(logits.shape[-1]), [0], []
    while True:
        scores = sampling.scores(logits[nodes[-1]], every, len(text) + len(chosen))
        chosen.append(int(scores.argmax()))
        children = [i for i, node in enumerate(tree) if (node.parent, node.token) == (nodes[-1], chosen[-1])]
        if not children:
            return nodes, chosen
        nodes += children


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    head: DraftHead,
    prompt: list[int],
    shape: SpeculationConfig,
    sampling: Sampling,
    num_tokens: int,
) -> list[list[int]]:
    """The tokens of each round, the prompt's own first, until there are `num_tokens` or more."""
    bare = [Node(prompt[-1], -1, 0.0, ())]
    logits, taps = verify(model, prompt, bare, head.tap_layers)
    rounds = [accept(logits, bare, prompt, sampling)[1]]
    text = prompt + rounds[0]
    while len(text) < len(prompt) + num_tokens:
        tree = draft(head, taps, text, shape, sampling)
        logits, states = verify(model, text, tree, head.tap_layers)
        nodes, chosen = accept(logits, tree, text, sampling)
        taps = torch.cat([states[: len(text) - 1], states[[len(text) - 1 + node for node in nodes]]])
        text, rounds = text + chosen, [*rounds, chosen]
    return rounds
