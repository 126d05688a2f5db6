"""Items that a client has several times in a block: trained on in every row, or once."""

from __future__ import annotations

import pytest
import torch
from helpers import build, one_step, train_once

from fedcl_bench.data.source import configured
from fedcl_bench.core.errors import UserError
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.plugin.state import Snapshot
from fedcl_bench.runs.config import make_config, resolve
from fedcl_bench.plugin.local_settings import LocalSettings
from fedcl_bench.testing.worlds import ragged

TWICE, ONCE = ragged([3, 1, 3, 3], [], [0, 2, 0]), ragged([3, 1], [], [0, 2])


@pytest.mark.parametrize("backbone", ["fedmf", "fedncf", "fedrap"])
def test_once_is_training_on_the_distinct_items(registry, backbone):
    """In the order of the first rows; and every row counts by default."""
    model = grow(Snapshot({}, {}), build(registry, "backbone", backbone), 0, one_step(TWICE, 12), torch.float64,
                 torch.device("cpu"), Method(NoSettings()))

    def trained(train, how):
        after, loss, _ = train_once(build(registry, "backbone", backbone), model, train,
                                    LocalSettings(repeated_positives=how))
        return [*after.public.values(), *after.private.values()], loss
    tables, loss = trained(TWICE, "once")
    expected, expected_loss = trained(ONCE, "every")
    assert loss == expected_loss and all(map(torch.equal, tables, expected))
    assert trained(TWICE, "every")[1] != expected_loss


def test_the_default_changes_no_name(registry):
    def config(**settings):
        return make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", settings)])
    assert config().hash == config(repeated_positives="every").hash != config(repeated_positives="once").hash
    with pytest.raises(UserError, match="'repeated_positives'.*no effect with stream=sessions"):
        config(stream="sessions", repeated_positives="once")


def test_of_last_fm_each_counts_once(registry):
    """As the released code does on the one dataset of its paper that has repeated pairs."""
    hows = {name: resolve(registry, "ft", "fedmf", name).local.repeated_positives for name in configured()}
    assert {name for name, how in hows.items() if how == "once"} == {"lastfm-2k"}
