"""Items that a client has several times in a block: trained on in every row, or once."""

import pytest
import torch
from helpers import build, grown, one_step, train_once

from fedcl_bench import LocalSettings
from fedcl_bench.data.source import configured
from fedcl_bench.runs.config import resolve
from fedcl_bench.testing.worlds import ragged

TWICE, ONCE = ragged([3, 1, 3, 3], [], [0, 2, 0]), ragged([3, 1], [], [0, 2])


@pytest.mark.parametrize("backbone", ["fedmf", "fedncf", "fedrap"])
def test_once_is_training_on_the_distinct_items(registry, backbone):
    """In the order of the first rows; and every row counts by default."""
    model = grown(build(registry, "backbone", backbone), one_step(TWICE, 12))

    def trained(train, how):
        after, loss, _ = train_once(build(registry, "backbone", backbone), model, train,
                                    LocalSettings(repeated_positives=how))
        return [*after.public.values(), *after.private.values()], loss
    tables, loss = trained(TWICE, "once")
    expected, expected_loss = trained(ONCE, "every")
    assert loss == expected_loss and all(map(torch.equal, tables, expected))
    assert trained(TWICE, "every")[1] != expected_loss


def test_of_last_fm_each_counts_once(registry):
    """As the released code does on the one dataset of its paper that has repeated pairs."""
    hows = {name: resolve(registry, "ft", "fedmf", name).local.repeated_positives for name in configured()}
    assert {name for name, how in hows.items() if how == "once"} == {"lastfm-2k"}
