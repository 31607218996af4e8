"""Tensors on a simulated `cuda`. Their bytes are on the host and are written when the device gets there.

Operations that a GPU refuses are refused: tensors of two devices in one operation, values read within a
capture, device bytes as an array. Operations that a GPU does, but slowly, are recorded as a wait
(`machine.waits`): values that are read, sizes that depend on data, copies that block or come from memory that
is not pinned, scalars that have to be copied, index tensors on the host.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paper_gpu.machine import Machine, Memory, Mistake

CUDA = torch.device("cuda", 0)
CPU, META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)
BY_MASK = (torch.bool, torch.uint8)


class PaperTensor(Tensor):
    """`sheet` is the host tensor with its bytes, `memory` the block that they are in."""

    sheet: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, sheet: Tensor, memory: Memory) -> "PaperTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            sheet.shape,
            strides=sheet.stride(),
            storage_offset=sheet.storage_offset(),
            dtype=sheet.dtype,
            device=CUDA,
        )
        made.sheet, made.memory = sheet, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in leaves((args, kwargs)):
            if isinstance(value, PaperTensor):
                return dispatch(value.memory.machine, func, args, kwargs or {})
        raise AssertionError("no paper")

    def data_ptr(self) -> int:
        """An address as on the device: blocks of 512 bytes."""
        return Address.of(self)

    def tolist(self) -> Any:
        """A read of all values."""
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        """The allocator will wait for all work of the stream so far."""
        self.memory.also.append((stream.stream, len(stream.stream.jobs)))

    def is_pinned(self, *_: Any) -> bool:
        """Never."""
        return False

    __torch_function__ = torch._C._disabled_torch_function_impl


class Address(int):
    """Where a tensor begins; a launch that is given no more than this still knows the tensor."""

    tensor: PaperTensor

    @classmethod
    def of(cls, tensor: PaperTensor) -> "Address":
        made = cls(tensor.sheet.data_ptr())
        made.tensor = tensor
        return made


def leaves(values: Any) -> list[Any]:
    """All arguments, including those in lists and dicts."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return [values]
    return [leaf for value in values for leaf in leaves(value)]


def mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    """The arguments with each leaf changed, also within dataclasses of tensors."""
    if isinstance(values, dict):
        return {key: mapped(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(mapped(value, change) for value in values)
    if is_dataclass(values) and not isinstance(values, type) and not hasattr(values, "sheet"):
        return type(values)(**{f.name: mapped(getattr(values, f.name), change) for f in fields(values)})
    return change(values)


def sheets(values: Any) -> Any:
    """The arguments as on the device."""
    return mapped(values, lambda value: value.sheet if isinstance(value, PaperTensor) else value)


def empty(machine: Machine, shape: Any, stride: Any, dtype: torch.dtype) -> PaperTensor:
    """Poison, from the current stream's part of the memory."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    memory = Memory(machine, extent * dtype.itemsize, machine.current, machine.capturing)
    flat = memory.bytes[: extent * dtype.itemsize].view(dtype)
    return PaperTensor(flat.as_strided(tuple(shape), tuple(stride)), memory)


class OnPaper(TorchDispatchMode):
    """Replaces what is created on `cuda` on this thread, and pinned memory."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard costs as much as an operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(self._machine, func, args, kwargs or {})


def moving(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.to` for the simulated `cuda`; torch would ask a driver."""

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(self, *map(_indexed, args), **{name: _indexed(value) for name, value in kwargs.items()})

    return to


def making(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` in two steps: on the host, then on its device."""

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        made = plain(data, **kwargs)
        return made if device is None else made.to(device)

    return tensor


def _indexed(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CUDA
    return CUDA if isinstance(value, str) and value in ("cuda", "cuda:0") else value


def dispatch(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator of torch."""
    given = leaves((args, kwargs))
    papers = [value for value in given if isinstance(value, PaperTensor)]
    device = kwargs.get("device")
    made_here = device is not None and device.type == "cuda"
    if not papers and not made_here:
        if func is aten.is_pinned.default:
            return machine.is_pinned(args[0])
        if kwargs.get("pin_memory"):
            plain = func(*args, **{**kwargs, "pin_memory": False})
            return pinned_like(machine, plain)
        return func(*args, **kwargs)
    if func is aten._to_copy.default:
        return _moved(machine, args[0], kwargs)
    if func is aten.copy_.default and (type(args[0]), type(args[1])) != (PaperTensor, PaperTensor):
        return _copied(machine, *args, **kwargs)
    _refuse_mixtures(machine, func, args, given)
    if func in READS:
        machine.wait("a value is read")
        return func(*sheets(args), **sheets(kwargs))
    if _aliases(func):
        made = func(*sheets(args), **sheets(kwargs))
        return mapped(made, lambda part: PaperTensor(part, papers[0].memory))
    if _depends_on_data(func, given):
        machine.wait(f"{func.name()}: how large the result is depends on values")
        return _wrapped(machine, func(*sheets(args), **sheets(kwargs)))
    return _launched(machine, func, args, kwargs)


def pinned_like(machine: Machine, plain: Tensor) -> Tensor:
    """The tensor in pinned memory."""
    memory = machine.pin(plain.numel() * plain.dtype.itemsize)
    return memory.view(plain.dtype).view(plain.shape).copy_(plain)


def _refuse_mixtures(machine: Machine, func: Any, args: Any, given: list[Any]) -> None:
    for value in given:
        if not isinstance(value, Tensor) or isinstance(value, PaperTensor):
            continue
        if value.dim() or func in (aten.index.Tensor, aten._index_put_impl_.default):
            raise Mistake(f"{func.name()}: tensors of cuda and {value.device} together")
        if func is aten.index_put_.default:  # torch copies the scalar to the device, and waits for it
            machine.wait("a scalar is copied for an assignment by index")


def _aliases(func: Any) -> bool:
    infos = [value.alias_info for value in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _depends_on_data(func: Any, given: list[Any]) -> bool:
    if func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
        # The tensors behind the first one are indices, but for the value at an assignment's end.
        tensors = [value for value in given if isinstance(value, Tensor)][1:]
        return any(tensor.dtype in BY_MASK for tensor in tensors[: None if func is aten.index.Tensor else -1])
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    return any(tag in func.tags for tag in tags)


def _wrapped(machine: Machine, made: Any) -> Any:
    def wrap(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        paper = empty(machine, part.shape, part.stride(), part.dtype)
        paper.sheet.copy_(part)
        return paper

    return mapped(made, wrap)


def _launched(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator as a job: in place, or into new memory whose shape is known without a value."""
    where = {**kwargs, "device": CPU} if "device" in kwargs else dict(kwargs)
    if "pin_memory" in where:
        where["pin_memory"] = False
    real_args, real_kwargs = mapped((args, where), _as_given)
    changed = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    changed = [value for value in leaves(changed) if isinstance(value, PaperTensor)]
    if changed:
        machine.push(lambda: _in_place(func, real_args, real_kwargs))
        if not func._schema.returns:  # as of torch._foreach_copy_
            return None
        return changed[0] if len(changed) == 1 else tuple(changed)
    results = mapped(
        _shapes(func, args, where), lambda meta: empty(machine, meta.shape, meta.stride(), meta.dtype)
    )
    if func in (aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default):
        return results
    if func is aten.empty_like.default:
        return results
    targets = [paper.sheet for paper in leaves(results)]

    def job() -> None:
        for target, found in zip(targets, leaves(func(*real_args, **real_kwargs)), strict=True):
            target.copy_(found)

    machine.push(job)
    return results


def _as_given(value: Any) -> Any:
    if isinstance(value, PaperTensor):
        return value.sheet
    return value.clone() if isinstance(value, Tensor) else value


def _in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    func(*args, **kwargs)


def _shapes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the operator returns, on torch's `meta`: asked once for each form of its arguments."""
    key = func, _form(args), _form(kwargs)
    if key not in _SHAPES:
        _SHAPES[key] = func(
            *_meta(args), **_meta({**kwargs, "device": META} if "device" in kwargs else kwargs)
        )
    return _SHAPES[key]


_SHAPES: dict[Any, Any] = {}


def _form(value: Any) -> Any:
    """What a result's shape and dtype depend on, as a key. 1, 1.0 and True are three forms."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _form(own)) for name, own in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return None if isinstance(value, torch.Generator) else (type(value), value)


def _meta(values: Any) -> Any:
    def change(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        return None if isinstance(value, torch.Generator) else value

    return mapped(values, change)


def _moved(machine: Machine, source: Tensor, options: dict[str, Any]) -> Tensor:
    """`Tensor.to` and its kin."""
    dtype, later = options.get("dtype") or source.dtype, options.get("non_blocking", False)
    device = options.get("device") or source.device
    if isinstance(source, PaperTensor) and device.type == "cuda":
        return _launched(machine, aten._to_copy.default, (source,), {**options, "device": CUDA})
    if device.type == "cuda":
        made = empty(machine, source.shape, torch.empty_like(source).stride(), dtype)
        _copied(machine, made, source, later)
        return made
    host = torch.empty(source.shape, dtype=dtype)
    _copied(machine, host, source, later)
    return host


def _copied(machine: Machine, target: Tensor, source: Tensor, later: bool = False) -> Tensor:
    """A copy between the host and the device."""
    to_device = isinstance(target, PaperTensor)
    host, there = (source, target.sheet) if to_device else (target, source.sheet)  # type: ignore[attr-defined]
    if not host.numel():
        return target
    if machine.capturing is not None:
        raise Mistake("memory of the host in a captured graph")
    alike = (
        host.dtype is there.dtype
        and host.shape == there.shape
        and host.is_contiguous()
        and there.is_contiguous()
    )
    if later and alike and machine.is_pinned(host):
        machine.push((lambda: there.copy_(host)) if to_device else (lambda: host.copy_(there)))
        return target
    what = "to the device" if to_device else "to the host"
    if not later:
        kind = f"a copy {what} blocks"
    elif not machine.is_pinned(host):
        kind = f"a copy {what} of memory that is not pinned"
    else:
        kind = f"a copy {what} through memory in between: dtypes or layouts differ"
    if to_device:
        snapshot = host.clone()
        machine.push(lambda: there.copy_(snapshot))
        machine.wait(kind, flush=not later)
    else:
        machine.wait(kind)
        host.copy_(there)
    return target
