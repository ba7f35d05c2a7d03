# SPDX-License-Identifier: Apache-2.0
"""What planning or a wrapped step left behind.

`of_model` describes a model down to plain values, hooks and attributes of parameters, as text without
addresses: descriptions from different processes can be compared. `of_process` does so for settings and
functions of PyTorch that a library may exchange. `fakes` finds tensors without data, and what refers to them.
"""

from __future__ import annotations

import enum
import functools
import gc
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sweeping.digests import of_tensor
from sweeping.objects import living_tensors

Described = dict[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_DEPTH = 4
_TABLES = ("_parameters", "_buffers", "_modules")
_MANY = 400


def of_model(model: nn.Module) -> Described:
    """Path → text, for everything that hangs on the model but the values of its parameters."""
    found: Described = {}
    for path, module in model.named_modules():
        where = path or "(model)"
        found[f"{where}: class"] = type(module).__qualname__
        for name, value in vars(module).items():
            if name in _TABLES:
                found[f"{where}.{name}"] = str([(key, type(item).__name__) for key, item in value.items()])
            elif name.endswith("_hooks") and isinstance(
                value, dict
            ):  # by numbers that count all hooks of the process
                found[f"{where}.{name}"] = describe(list(value.values()))
            else:
                found[f"{where}.{name}"] = describe(value)
    for name, parameter in model.named_parameters():
        kept = {key: describe(item) for key, item in vars(parameter).items()}
        tables = (parameter._backward_hooks, _post_hooks(parameter))
        hooks = [describe(list((table or {}).values())) for table in tables]
        state = (parameter.requires_grad, parameter.grad is None, str(parameter.dtype), hooks, kept)
        found[f"parameter {name}"] = f"{type(parameter).__name__} {state}"
    return found


def identities(model: nn.Module) -> Described:
    """Which objects the model has; comparable within one process."""
    named: Iterator[tuple[str, Any]] = iter([*model.named_modules(), *model.named_buffers()])
    found = {f"{name}: identity": str(id(item)) for name, item in named}
    return found | {
        f"parameter {name}: identity": f"{id(item)} {item.data_ptr()}"
        for name, item in model.named_parameters()
    }


def of_classes(model: nn.Module) -> Described:
    """Attributes of the classes of all modules, and plain globals of the files that define them."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if _is_foreign(kind)}
    found = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            if not name.startswith("__"):
                found[f"class {kind.__module__}.{kind.__qualname__}.{name}"] = describe(value)
    for file in {kind.__module__ for kind in kinds} & sys.modules.keys():
        for name, value in vars(sys.modules[file]).items():
            if isinstance(value, (bool, int, float, str, Tensor)) and not name.startswith("__"):
                found[f"global {file}.{name}"] = describe(value)
    return found


def _is_foreign(kind: type) -> bool:
    return kind.__module__.split(".")[0] not in ("torch", "builtins", "memscale", "typing", "abc")


def describe(value: Any, depth: int = _DEPTH) -> str:
    """A text that says all that matters of a value, without addresses."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return _of_any_tensor(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, nn.Module):
        return f"<module {kind.__qualname__}>"
    if isinstance(value, functools.partial):
        return f"partial({describe(value.func, depth - 1)}, {describe(value.args, depth - 1)})"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return f"<{getattr(value, '__module__', '')}.{value.__qualname__}>"
    if depth == 0:
        return f"<{kind.__qualname__}>"
    if isinstance(value, Mapping):
        items = [f"{describe(key, 1)}: {describe(item, depth - 1)}" for key, item in _some(value.items())]
        return f"{kind.__name__}{{{', '.join(items)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{kind.__name__}{{{', '.join(sorted(describe(item, depth - 1) for item in value))}}}"
    if isinstance(value, (list, tuple)):
        return f"{kind.__name__}[{', '.join(describe(item, depth - 1) for item in _some(value))}]"
    inside = getattr(value, "__dict__", None)
    return f"<{kind.__qualname__} {describe(inside, depth - 1)}>" if inside else f"<{kind.__qualname__}>"


def _some(items: Any) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number == _MANY:
            return
        yield item


def _of_any_tensor(tensor: Tensor) -> str:
    if _is_fake(tensor):
        return f"FAKE {type(tensor).__name__} {tuple(tensor.shape)}"
    try:
        return of_tensor(tensor)
    except Exception:
        return f"<{type(tensor).__name__} {tuple(tensor.shape)}>"


def _post_hooks(parameter: Tensor) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


_PATCHED = (
    (nn.Module, "__call__ _call_impl _wrapped_call_impl __setattr__ __getattr__ __delattr__"),
    (nn.Module, "register_forward_hook train"),
    (Tensor, "backward register_hook __torch_function__ __setattr__"),
    (torch.autograd, "backward grad"),
    (torch.optim.Optimizer, "step zero_grad state_dict load_state_dict __setstate__"),
    (torch.nn.functional, "scaled_dot_product_attention dropout cross_entropy linear layer_norm"),
    (torch, "compile save load matmul cat empty no_grad"),
    (torch.utils.checkpoint, "checkpoint"),
)  # fmt: skip


def of_process() -> Described:
    """Settings of PyTorch and Python, and functions of PyTorch that somebody may have exchanged."""
    hooks = vars(nn.modules.module)
    found = {name: describe(value) for name, value in hooks.items() if name.startswith("_global_")}
    for owner, names in _PATCHED:
        for name in names.split():
            value = getattr(owner, name, None)
            found[f"{owner.__name__}.{name}"] = f"{describe(value)} {id(getattr(value, '__code__', None))}"
    found |= {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "gradients": str((torch.is_grad_enabled(), torch.is_inference_mode_enabled())),
        "autocast": str((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "threads of torch": str(torch.get_num_threads()),
        "modes": str((torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())),
        "attention": str((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())),
        "oneDNN": str((torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic)),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": str(sorted(thread.name for thread in threading.enumerate())),
        "garbage collector": str((gc.isenabled(), gc.get_threshold(), len(gc.callbacks))),
        "SIGINT": describe(signal.getsignal(signal.SIGINT)),
        "tracing": str((sys.gettrace(), sys.getprofile(), sys.getrecursionlimit())),
        "environment": str(sorted(os.environ.items())),
        "hooks of saved tensors": str(_saved_tensors_hooks_enabled()),
    }
    return found


def _saved_tensors_hooks_enabled() -> bool:
    autograd: Any = torch._C._autograd  # its stub leaves this function out
    return bool(autograd._saved_tensors_hooks_is_enabled())


def changed(before: Described, after: Described) -> list[str]:
    """One line for each difference."""
    lines = []
    for name in {**before, **after}:
        old, new = before.get(name, "(not there)"), after.get(name, "(not there)")
        if old != new:
            lines.append(f"{name}: {_around_difference(old, new)}")
    return lines


def _around_difference(old: str, new: str, width: int = 60) -> str:
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    start = max(0, same - 20)
    return f"{old[start : start + width]!r} became {new[start : start + width]!r}"


def _is_fake(item: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return issubclass(type(item), FakeTensor) or item.device.type == "meta"


def fakes() -> list[str]:
    """Where each tensor without data that is alive hangs, as far as it can be told."""
    found = [item for item in living_tensors() if _is_fake(item)]
    if not found:
        return []
    gc.unfreeze()  # referrers are looked for among all objects
    return [f"{type(item).__name__} {tuple(item.shape)} in {_holder(item, found)}" for item in found]


def _holder(item: Any, ignored: list[Any], depth: int = 5) -> str:
    """The nearest thing with a name that refers to an object."""
    skipped = {id(ignored), id(vars())}
    paths = [(item, "")]
    for _ in range(depth):
        farther = []
        for target, said in paths[:20]:
            for referrer in gc.get_referrers(target):
                if isinstance(referrer, types.FrameType) or id(referrer) in skipped or referrer is paths:
                    continue
                skipped.add(id(referrer))
                name = _name(referrer, target)
                if name:
                    return name + said
                farther.append((referrer, f" → {type(referrer).__name__}{said}"))
        paths = farther
    return " or ".join(f"{said}" for _, said in paths[:3]) or "something outside Python"


def _name(referrer: Any, target: Any) -> str:
    if isinstance(referrer, (types.FunctionType, type, types.ModuleType)) or hasattr(referrer, "cache_info"):
        module, name = getattr(referrer, "__module__", ""), getattr(referrer, "__qualname__", "")
        return f"{module}.{name or type(referrer).__name__}"
    if isinstance(referrer, nn.Module):
        return f"module {type(referrer).__qualname__}"
    if isinstance(referrer, dict) and "__name__" in referrer and "__builtins__" in referrer:
        key = next((key for key, value in referrer.items() if value is target), "?")
        return f"global {referrer['__name__']}.{key}"
    return ""
