"""Aggregators whose server looks at each client's update, so that no single one decides: norm bounding, median."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcl_bench import Method, setting


@dataclass(frozen=True)
class NormBoundSettings:
    norm_bound: float = setting(1.0, "largest norm of a client's change, as a multiple of the round's median norm",
                                above=0.0, search=(0.5, 1.0, 2.0))


class NormBound(Method):
    """The mean of clients' changes, of which the larger ones are scaled down to a norm M: w_u = min(1, M / ||d_u||).
    Sun et al. have M fixed; here it follows the training, as M = norm_bound times the median of the round's norms."""

    name = "norm-bound"
    numbers = 1
    title = "mean of clients' changes, each of at most a multiple of their median norm"
    reference = "norm thresholding (Sun et al., FL-NeurIPS 2019)"
    Settings = NormBoundSettings
    first_step = 0
    gives_up = {"F7": "the server takes the norm of each client's change"}

    def aggregate_updates(self, updates):
        norms = updates.norms()
        bounded = (self.settings.norm_bound * norms.median() / norms.clamp(min=1e-30)).clamp(max=1.0)
        return updates.weighted_sum(bounded * updates.weights / updates.weights.sum())


class Median(Method):
    """Of each number the median change among the clients that sent it, times their share: an item's row is sent by
    those who looked it up, mostly a few, and the median over all would be 0."""

    name = "median"
    numbers = 1
    title = "median of clients' changes of each number, among those who sent it"
    reference = "coordinate-wise median (Yin et al., ICML 2018), over the senders of each row"
    first_step = 0
    gives_up = {"F7": "the server compares clients' changes number by number"}
    ignored = {"weighting": "with the method median, in which all clients count alike"}

    def aggregate_updates(self, updates):
        return updates.coordinatewise(self.of_senders)

    def of_senders(self, changes, sent):  # each (N, n)
        medians = changes.where(sent, torch.nan).nanquantile(0.5, dim=0)
        return medians.nan_to_num(0.0) * sent.sum(0) / len(changes)
