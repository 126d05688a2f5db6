"""RLP2: every client keeps its own mispredictions and corrects later predictions by those of similar pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcl_bench import (Backbone, Chunk, LocalSettings, Method, Snapshot, all_keys, draw_negatives, in_pieces,
                         make_chunks, pair_keys, score_users, setting)
from fedcl_bench.toolbox.functional import nearest_entries


@dataclass(frozen=True)
class RLP2Settings:
    lambda_error: float = setting(0.1, "weight of the estimated error in the corrected probability", low=0.0,
                                  search=(0.05, 0.1, 0.2, 0.5))
    neighbours: int = setting(2, "memory entries K that an estimate is made from", low=1, search=(2, 5, 10))
    memory: int = setting(64, "places in each client's memory; the oldest entries leave first", low=1)
    errors: int = setting(16, "places that a block takes, the largest errors first; some stay empty where a client has "
                          "fewer samples", low=1, search=(8, 16, 32))
    temperature: float = setting(1.0, "tau of the weights softmax(-||k - k_j||^2 / tau)", above=0.0)
    memory_negatives: int = setting(4, "sampled negatives per positive among which errors are looked for", low=1)


def estimated_error(queries: Tensor, keys: Tensor, errors: Tensor, filled: Tensor, neighbours: int,
                    temperature: float) -> Tensor:
    """Weighted mean error of the nearest memory entries: e_hat = sum_j softmax_j(-||k - k_j||^2 / tau) e_j over the K
    nearest keys k_j. ``queries``: (n, items, k); ``keys``: (n, memory, k); ``errors``: (n, memory); ``filled``: which
    entries exist, bool of shape (n, memory). Returns shape (n, items); 0 for a client without entries."""
    distance, entry = nearest_entries(queries, keys, filled, min(neighbours, keys.shape[1]))
    weight = torch.softmax(distance / -temperature, dim=1).nan_to_num(0.0)  # no entry: inf - inf
    return (weight * errors.unsqueeze(2).expand(-1, -1, queries.shape[1]).gather(1, entry)).sum(1)


class RLP2(Method):
    """Our adaptation of ReLoop2 to one memory per client, as F3CRec describes its baseline.

    After a block a client stores the pairs it mispredicts most among its positives and sampled negatives, as (key,
    error e = y - sigmoid(s)); the memory stays at the client. From the next block on it ranks by sigmoid(s) +
    lambda_error * e_hat, where e_hat is the mean error of the K nearest keys, weighted by softmax(-distance^2 / tau).
    Only keys and errors are kept, so no interaction is revisited. F3CRec gives no equation for this baseline; the
    formulas are ours.
    """

    name = "rlp2"
    numbers = 1
    title = "each client's error memory corrects its predictions (ReLoop2 per user)"
    reference = ("Zhu et al., ReLoop2, KDD 2023, arXiv 2306.08808; baseline of F3CRec (Lim et al., CIKM 2025), whose "
                 "code is not released")
    Settings = RLP2Settings
    reimplementation = True
    reads_logits = True

    def rescore(self, users, scores, model, backbone):
        if self.settings.lambda_error == 0.0 or "keys" not in self.client_state:
            return scores
        entries = self.client_state["filled"].any(0).nonzero().flatten()
        if not len(entries):
            return scores
        used = int(entries[-1]) + 1
        state = {name: values[:, :used] for name, values in self.client_state.items()}
        known = (users < len(state["keys"])).nonzero().flatten()
        known = known[state["filled"][users[known]].any(1)]
        result = scores.double()  # a client without entries ranks as ever
        for piece in in_pieces(known, scores.shape[1] * state["keys"].shape[1]):
            owner = users[piece]
            queries = all_keys(backbone, model, owner, scores.shape[1])
            error = estimated_error(queries, state["keys"][owner], state["errors"][owner], state["filled"][owner],
                                    self.settings.neighbours, self.settings.temperature)
            # Clipping to [0, 1] as a probability would only make ties.
            result[piece] = torch.sigmoid(result[piece]) + self.settings.lambda_error * error
        return result

    def end_step(self, step, model, backbone, trained, draw):
        if self.settings.lambda_error == 0.0 or not len(trained):
            return
        sampling = LocalSettings(negatives=self.settings.memory_negatives)
        entries: dict[str, list[Tensor]] = {"keys": [], "errors": [], "filled": []}
        order = []
        for chunk in (later.materialise() for later in make_chunks(step, trained, sampling, 1)):
            negatives = draw_negatives(chunk, sampling, draw.seed, draw.step, -1)
            item, error, filled = self._mispredictions(chunk, negatives, model, backbone)
            entries["keys"].append(pair_keys(backbone, model, chunk.users, item))
            entries["errors"].append(error)
            entries["filled"].append(filled)
            order.append(chunk.users)
        self._remember(torch.cat(order), {name: torch.cat(values).detach() for name, values in entries.items()},
                       model.n_users)

    def _mispredictions(self, chunk: Chunk, negatives: Tensor, model: Snapshot,
                        backbone: Backbone) -> tuple[Tensor, Tensor, Tensor]:
        """The items whose errors e = y - sigmoid(s) are the largest among a client's samples, their errors, and which
        of these entries exist, each (C, errors)."""
        n, width = chunk.count[:, None], chunk.positives.shape[1]
        sampled = torch.cat([torch.arange(width, device=n.device) < n,
                             torch.arange(negatives.shape[1], device=n.device) < n * self.settings.memory_negatives], 1)
        items = torch.cat([chunk.positives, negatives], 1).where(sampled, chunk.positives[:, :1])
        with torch.no_grad():
            probability = torch.sigmoid(score_users(backbone, model, chunk.users))
        # One error per item, however often it was drawn; -inf where the client has no sample of it.
        error = torch.full_like(probability, -torch.inf).scatter_(1, items, probability.gather(1, items))
        error.scatter_(1, chunk.positives, 1.0 - probability.gather(1, chunk.positives))
        size, item = error.topk(min(self.settings.errors, error.shape[1]), dim=1)
        positive = torch.zeros_like(error, dtype=torch.bool).scatter_(1, chunk.positives, True).gather(1, item)
        filled = size > -torch.inf
        return item, torch.where(positive, size, -size).where(filled, torch.zeros_like(size)), filled

    def _remember(self, users: Tensor, entries: dict[str, Tensor], n_users: int) -> None:
        """Put entries (n, errors, ...) of some users, the empty ones too, into their memories before the older."""
        for name, values in entries.items():
            old = self.client_state.get(name)
            memory = torch.zeros(n_users, self.settings.memory, *values.shape[2:], dtype=values.dtype,
                                 device=values.device)
            if old is not None:
                memory[:len(old)] = old
            memory[users] = torch.cat([values, memory[users]], 1)[:, :self.settings.memory]
            self.client_state[name] = memory
