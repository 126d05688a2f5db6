"""Popularity and recency: everybody gets the items with most training interactions, so far or in the last block."""

import torch

from fedcl_bench import Method


class Popularity(Method):
    """s(u, i) = the number of training interactions with i in the blocks 0..t."""

    name = "popularity"
    numbers = 1
    title = "bound: items by their training interactions so far, the same for everybody"
    reference = "Ji et al., A Re-visit of the Popularity Baseline in Recommender Systems, SIGIR 2020"
    first_step = 0
    trains = "nobody"
    needs_backbone = False
    history = True
    gives_up = {"F4": "the server counts everybody's interactions", "C1": "of all blocks"}

    def begin_round(self, step, round_, backbone):
        self.server_state = {"counts": torch.bincount(step.train.values, minlength=step.n_items)}

    def rescore(self, users, scores, model, backbone):
        counts = self.server_state["counts"]
        later = scores.shape[1] - len(counts)  # items that arrive after the block's training (`cold_items`): never yet
        return torch.nn.functional.pad(counts, (0, later)).to(scores).expand_as(scores)


class Recency(Popularity):
    """s(u, i) = the number of training interactions with i in block t."""

    name = "recency"
    numbers = 1
    title = "bound: items by their training interactions in the last block, the same for everybody"
    history = False
    gives_up = {"F4": "the server counts everybody's interactions"}
