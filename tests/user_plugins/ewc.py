"""EWC (Kirkpatrick et al., PNAS 2017) of the public item tables: rows stay near those of the block before, each number
the more so the more it mattered. The server takes squared changes, summed over rounds, for the importance."""

from dataclasses import dataclass

import torch

from fedcl_bench import Method, setting


@dataclass(frozen=True)
class EWCSettings:
    strength: float = setting(1e-4, "weight of the penalty; from 2e-3 on FedMF overshoots", above=0.0,
                              search=(1e-6, 1e-5, 1e-4))
    memory: float = setting(0.5, "weight of the importance from earlier blocks", low=0.0, high=1.0)


class EWC(Method):
    name = "ewc"
    title = "elastic weight consolidation of item tables, importance from the server's changes"
    reference = "Kirkpatrick et al., PNAS 2017"
    Settings = EWCSettings
    first_step = 0  # importance of block 0 counts
    broadcasts = ("summed",)  # of which clients make the importance, too

    def aggregate(self, public):  # server
        state = dict(self.server_state)
        for name, mean in public.items():
            before, summed = state.get(f"round {name}", mean), state.get(f"summed {name}", torch.zeros_like(mean)[:0])
            summed = torch.cat([summed, torch.zeros_like(mean[len(summed):])])
            old = len(before)
            change = torch.cat([mean[:old] - before, torch.zeros_like(mean[old:])])
            state[f"round {name}"], state[f"summed {name}"] = mean, summed + change.square()
        self.server_state = state
        return public

    def end_step(self, step, model, backbone, trained, draw):
        state = dict(self.server_state)
        for name, table in model.public.items():
            summed = state.pop(f"summed {name}", table[:0])
            summed = torch.cat([summed, torch.zeros_like(table[len(summed):])])  # of items that came after training
            importance = summed / summed.mean().clamp(min=1e-30)
            past = state.get(f"importance {name}", importance[:0])
            past = torch.cat([past, importance[len(past):]])
            weight = self.settings.memory
            state[f"importance {name}"] = ((1.0 - weight) * importance + weight * past).clamp(max=10.0)
            state[f"anchor {name}"], state[f"round {name}"] = table, table
        self.server_state = state

    def row_penalty(self, name):  # clients
        if f"anchor {name}" not in self.server_state:  # block 0
            return None
        anchor, importance = (self.server_state[f"{part} {name}"] for part in ("anchor", "importance"))

        def penalty(rows, items):
            known = items.clamp(max=len(anchor) - 1)
            moved = importance[known] * (rows - anchor[known]).square()
            return self.settings.strength / 2 * moved.flatten(2).sum(2) * (items < len(anchor))
        return penalty

    def downloads_previous_model(self):
        return True
