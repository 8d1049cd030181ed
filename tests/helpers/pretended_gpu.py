"""A GPU that is not there: tensors that say they are on cuda:0, and whose numbers lie in the CPU's memory.

Most of what PyTorch refuses on a GPU is refused here too: an operation of tensors on two devices, ``.numpy()`` of a
tensor that is not on the CPU, a generator of another device, a pickle read where there is no GPU. It says nothing about
the kernels of a real GPU, about bf16 (autocast does not act on such tensors), speed or memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)  # the only operations that go from device to device
# the indices of a tensor on the GPU, their second argument, may lie on the CPU
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
JOINING = (aten.cat.default, aten.stack.default, aten.index_select.default, aten.gather.default)
FUNCTIONS: dict[str, Any] = {  # of torch.cuda
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_bf16_supported": lambda: True,
    "device_count": lambda: 1,
    "get_device_name": lambda device=None: "a pretended GPU",
    "mem_get_info": lambda device=None: (16 * 10**9, 16 * 10**9),
    "max_memory_allocated": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "synchronize": lambda device=None: None,
}


class OnGPU(Tensor):
    """A tensor of the pretended GPU; ``numbers`` has its numbers. To PyTorch's C++ code it is one without numbers."""

    numbers: Tensor
    device = GPU
    is_cuda, is_cpu, is_meta = True, False, False

    @staticmethod
    def __new__(cls: type["OnGPU"], numbers: Tensor) -> "OnGPU":
        """Wrap ``numbers``, without copying it."""
        made: OnGPU = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device("meta"),
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation with such a tensor."""
        return on_one_device(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickles, which only a machine with a GPU can read."""
        return _rebuilt, (self.numbers,)

    def tolist(self) -> Any:
        """The numbers, which a GPU's tensor gives too."""
        return self.numbers.tolist()


def _rebuilt(numbers: Tensor) -> OnGPU:
    if not torch.cuda.is_available():
        raise RuntimeError("a tensor of a GPU was saved, and this machine has none")
    return OnGPU(numbers)


class Generator(torch.Generator):
    """A generator of the CPU that says it is where it was asked to be."""

    places: ClassVar[dict[int, torch.device]] = {}  # by the address of the C++ object, all that an operation is given

    def __new__(cls, device: str | torch.device = "cpu") -> "Generator":
        """As torch.Generator."""
        made: Generator = super().__new__(cls)
        cls.places[_address(made)] = GPU if torch.device(device).type == "cuda" else CPU
        return made

    @property
    def device(self) -> torch.device:
        """Where it claims to be."""
        return self.places[_address(self)]


def _address(rng: torch.Generator) -> int:
    return rng._cdata


class Dispatch(TorchDispatchMode):
    """Operations without a tensor of the GPU, such as making one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation of this thread."""
        return on_one_device(func, args, kwargs or {})


def on_one_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on the CPU, if a real GPU would do it; its results are where they would be."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    judged = tree_leaves((args[:1], args[2:])) if func in INDEXING and isinstance(args[0], OnGPU) else tensors
    whole = [t for t in judged if isinstance(t, Tensor) and (t.dim() or func in JOINING or isinstance(t, OnGPU))]
    places = {isinstance(t, OnGPU) for t in whole}  # a single number of the CPU may go anywhere else
    if len(places) > 1 and func not in COPIES:
        raise RuntimeError(f"{func}: expected all tensors on the same device, found cuda:0 and cpu")
    asked = kwargs.get("device")  # "meta" where C++ code asked for the device of a tensor that is here
    if asked is not None and torch.device(asked).index:
        raise RuntimeError(f"{func}: there is no {asked}")
    to_gpu = torch.device(asked).type != "cpu" if asked is not None else _on_gpu(func, tensors)
    rng = kwargs.get("generator")
    if rng is not None and (Generator.places.get(_address(rng)) == GPU) != to_gpu:
        raise RuntimeError(f"{func}: the generator is on another device")
    args, kwargs = tree_map_only(OnGPU, lambda tensor: tensor.numbers, (args, kwargs))
    kwargs |= {} if asked is None else {"device": CPU}
    answer = func(*args, **kwargs)
    if not to_gpu:
        return answer
    known = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, OnGPU)}  # of operations in place
    return tree_map_only(Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else OnGPU(tensor), answer)


def _on_gpu(func: Any, tensors: list[Tensor]) -> bool:
    judged = tensors[:1] if func in COPIES else tensors  # a copy is where its target is
    return any(isinstance(tensor, OnGPU) for tensor in judged)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Inside, this thread has one GPU."""
    torch._C._ensureCUDADeviceGuardSet()
    lifts, swaps = torch._C._only_lift_cpu_tensors(), torch.__future__.get_swap_module_params_on_conversion()
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor(..., device="cuda") makes a tensor of the CPU and copies it
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to("cuda") gives its parameters another class
    try:
        with patch.multiple(torch.cuda, **FUNCTIONS), patch("torch.Generator", Generator), Dispatch():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.__future__.set_swap_module_params_on_conversion(swaps)
