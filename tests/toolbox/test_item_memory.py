"""Item memories: what clients keep is found again, as of dictionaries, and tables of before stay as they were."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcl_bench.toolbox import item_memory
from fedcl_bench.toolbox.places import distinct

USERS, ITEMS = 5, 6
ROUNDS = st.lists(st.dictionaries(st.integers(0, USERS - 1), st.lists(st.integers(0, ITEMS - 1), max_size=9),
                                  min_size=1), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(ROUNDS)
def test_memories_are_dictionaries(rounds):
    kept, state, number = {user: {} for user in range(USERS)}, {}, 0.0
    for drawn in rounds:
        before, copies = state, {name: table.clone() for name, table in state.items()}
        state = item_memory.copied(state, "m", (ITEMS, 2), USERS, torch.zeros(1))
        users, width = torch.tensor(list(drawn)), max(map(len, drawn.values()))
        lists = torch.tensor([[*items, *items[:1] * (width - len(items))] if items else [0] * width
                              for items in drawn.values()], dtype=torch.int64)
        places, count = distinct(lists, ITEMS)
        items, rows = lists.gather(1, places), torch.zeros(*places.shape, 2)
        for k, user in enumerate(drawn):
            assert items[k, :count[k]].tolist() == list(dict.fromkeys(lists[k].tolist()))
            kept[user] = {}
            for place, item in enumerate(items[k, :count[k]].tolist()):
                number += 1.0
                rows[k, place], kept[user][item] = number, number
        item_memory.write(state, "m", users, rows, items, count)
        assert all(torch.equal(before[name], table) for name, table in copies.items())
    everyone = torch.arange(USERS)
    found = item_memory.look_up(state, "m", everyone, torch.arange(ITEMS).expand(USERS, -1))
    assert found[:, :, 0].tolist() == [[kept[user].get(item, 0.0) for item in range(ITEMS)] for user in range(USERS)]
    rows, items = item_memory.listed(state, "m", everyone)
    whole = torch.zeros(USERS, ITEMS, 2).scatter_add_(1, items[:, :, None].expand_as(rows), rows)
    assert torch.equal(whole, found)
