"""A PyTorch module that a method's server trains, from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable

import torch
from torch import Tensor, nn

from .. import rng
from ..rng import Tables


@dataclass(frozen=True)
class ServerModule:
    """What is known of it before a run. Its parameters and what its optimiser remembers are tensors by name, for
    ``Method.server_state``: a method adds ``start`` in ``new_server_state``, and in a hook of the server what ``train``
    gives. Its forward pass draws no random numbers."""

    name: str  # what the tensors' names begin with
    make: Callable[[], nn.Module]  # a new module
    # One of its parameters, as ``partial(torch.optim.Adam, lr=0.01)``, which remembers tensors
    optimiser: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    def start(self, seed: int, like: Tensor) -> Tables:
        """Its untrained parameters and buffers, drawn by PyTorch with a run's seed; of the type and device of
        ``like``."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(rng.key(seed, f"server {self.name}") >> 1)
            module = self.make()
        return self._named(module.to(like.device, like.dtype).state_dict())

    def load(self, state: Tables) -> nn.Module:
        """The module as a state has it."""
        values = {name.removeprefix(f"{self.name}/"): value for name, value in state.items()
                  if name.startswith(f"{self.name}/")}
        like = next(value for value in values.values() if value.is_floating_point())
        module = self.make().to(like.device, like.dtype)
        module.load_state_dict(values)
        return module

    def train(self, state: Tables, loss: Callable[[nn.Module], Tensor], steps: int = 1) -> Tables:
        """What the module and its optimiser are after so many steps down a loss; the tensors of ``state`` stay."""
        module = self.load(state)
        optimiser = self.optimiser(module.parameters())
        names, memory = [name for name, _ in module.named_parameters()], {}
        for name, value in state.items():
            what, _, of = name.partition(f" of {self.name}/")
            if of:
                memory.setdefault(names.index(of), {})[what] = value.clone()
        optimiser.load_state_dict({**optimiser.state_dict(), "state": memory})
        with torch.enable_grad():
            for _ in range(steps):
                optimiser.zero_grad()
                loss(module).backward()
                optimiser.step()
        kept = {f"{what} of {self.name}/{names[number]}": value for number, values in
                optimiser.state_dict()["state"].items() for what, value in values.items() if value is not None}
        return {**self._named(module.state_dict()), **kept}

    def _named(self, values: Tables) -> Tables:
        return {f"{self.name}/{name}": value.detach().clone() for name, value in values.items()}
