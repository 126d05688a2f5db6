"""Frozen: block 0's model for ever."""

from fedcl_bench import Method


class Frozen(Method):
    """After block 0 nobody trains, and the model that it was tested with stays, whatever ``init_from`` and
    ``reset_private`` say. New users and items have their initial rows; with ``fold_in`` new users fit their private
    parameters, with ``cold_items`` new items get theirs."""

    name = "frozen"
    numbers = 2
    title = "bound: block 0's model for ever, what learning nothing gives"
    reference = "the model without updates of incremental learning (De Lange et al., TPAMI 2022)"
    trains = "nobody"
