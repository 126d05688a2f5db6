"""A pretended GPU, for machines without one: what ``--device cuda`` would run, on the processor.

Tensors that are moved to or made on "cuda" stay where they are and are marked. They say that their device is cuda, and
an operation raises, as it would there, if it has marked and other tensors or reads the memory of a marked one. Compiled
kernels refuse them. So all that a real GPU's runs do is done, but for its own arithmetic and random numbers.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
_MARK = "_on_pretended_gpu"
_ACROSS = {Tensor.copy_, Tensor.__setitem__, torch._has_compatible_shallow_copy_type}  # take tensors of both devices
_SETS = {Tensor.data.__set__, Tensor.grad.__set__}
_READS = {Tensor.numpy, Tensor.__array__}
_OF_DEVICE = {Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.is_cpu.__get__}


def marked(tensor: Tensor) -> bool:
    return getattr(tensor, _MARK, False)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _is_batched(tensor: Tensor) -> bool:
    """Whether it is what ``torch.func.vmap`` hands its function, which has no mark of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class PretendedGPU(TorchFunctionMode):
    """The device while the mode is on; ``pretended`` also stands in for what ``torch.cuda`` says."""

    def __init__(self):
        super().__init__()
        self._batched_on_gpu = False  # whether vmap was given marked tensors

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _OF_DEVICE:
            return self._told(function, args[0])
        if function in _READS and marked(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        given = list(_tensors((args, kwargs)))
        on_gpu = [tensor for tensor in given if self._is_on_gpu(tensor)]
        device, args, kwargs = _asked(function, args, kwargs)
        if device is not None:
            result = function(*args, **kwargs)
            if args and result is args[0] and marked(result) != (device.type == "cuda"):
                result = result.clone()
            return self._placed(result, device.type == "cuda")
        if function in _SETS:
            function(*args)
            if isinstance(args[1], Tensor) and function == Tensor.data.__set__:
                setattr(args[0], _MARK, marked(args[1]))
            return None
        if function in _ACROSS:
            return function(*args, **kwargs)
        if on_gpu:
            self._check(function, args, given)
        return self._placed(function(*args, **kwargs), bool(on_gpu))

    def _told(self, function, tensor: Tensor):
        on_gpu = self._is_on_gpu(tensor)
        return {"device": GPU if on_gpu else CPU, "is_cuda": on_gpu, "is_cpu": not on_gpu}[function.__self__.__name__]

    def _is_on_gpu(self, tensor: Tensor) -> bool:
        return self._batched_on_gpu if _is_batched(tensor) else marked(tensor)

    def _check(self, function, args, given: list[Tensor]) -> None:
        """Raise RuntimeError if tensors of both devices are given; single numbers and indices may be the CPU's."""
        if torch._C._current_graph_task_id() != -1:
            return  # in backward gradients come without marks
        may_be_indices = function is Tensor.__getitem__ and self._is_on_gpu(args[0])
        others = [tensor for tensor in given if tensor.dim() and not self._is_on_gpu(tensor)]
        if others and not may_be_indices:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {function.__name__} was given some "
                               f"on cuda:0 and one on cpu, of shape {tuple(others[0].shape)}")

    @staticmethod
    def _placed(result, on_gpu: bool):
        for tensor in _tensors(result):
            if not _is_batched(tensor):
                setattr(tensor, _MARK, on_gpu)
        return result

    def load(self, load):
        """``torch.load`` to the device."""
        def marking(file, map_location, **named):
            return self._placed(load(file, map_location="cpu", **named), torch.device(map_location).type == "cuda")
        return marking

    def vmap(self, vmap):
        """``torch.func.vmap`` whose results are marked as what it is given is."""
        def marking(function, *settings, **named):
            batched = vmap(function, *settings, **named)

            def call(*args, **kwargs):
                self._batched_on_gpu = any(map(marked, _tensors((args, kwargs))))
                try:
                    return self._placed(batched(*args, **kwargs), self._batched_on_gpu)
                finally:
                    self._batched_on_gpu = False
            return call
        return marking


def _asked(function, args, kwargs) -> tuple[torch.device | None, tuple, dict]:
    """The device that a call asks for, and its arguments with the processor in its place."""
    if function in (Tensor.cuda, Tensor.cpu):
        return GPU if function is Tensor.cuda else CPU, (args[0], "cpu") if function is Tensor.cuda else args, {}
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]), args, {**kwargs, "device": "cpu"}
    if function is not Tensor.to or len(args) < 2:
        return None, args, kwargs
    target = args[1]
    if isinstance(target, Tensor):
        return GPU if marked(target) else CPU, args, kwargs
    if isinstance(target, (str, torch.device)):
        return torch.device(target), (args[0], "cpu", *args[2:]), kwargs
    return None, args, kwargs


@contextmanager
def pretended() -> Iterator[PretendedGPU]:
    """Within the block there is a GPU with 64 GiB."""
    mode, size = PretendedGPU(), 64 << 30
    says = {"is_available": lambda: True, "mem_get_info": lambda device=None: (size, size), "empty_cache": lambda: None,
            "memory_reserved": lambda device=None: 0, "memory_allocated": lambda device=None: 0,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: None,
            "get_device_name": lambda device=None: "pretended", "device_count": lambda: 1,
            "synchronize": lambda device=None: None}
    with ExitStack() as stack:
        for name, answer in says.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # A build with CUDA asks the driver here.
        stack.enter_context(mock.patch.object(torch.optim.Optimizer, "_accelerator_graph_capture_health_check",
                                              lambda optimiser: None, create=True))
        stack.enter_context(mock.patch.object(torch.func, "vmap", mode.vmap(torch.func.vmap)))
        stack.enter_context(mock.patch.object(torch, "load", mode.load(torch.load)))
        stack.enter_context(mode)
        yield mode
