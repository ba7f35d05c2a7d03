# SPDX-License-Identifier: Apache-2.0
"""Quantised bases: the linear layers of a model with the bytes that they have in each format.

    bitsandbytes 4-bit   two codes a byte, a scale per 64 (FP32, or 8 bits and a scale per 256 of them)
    bitsandbytes 8-bit   a byte, an FP32 scale per row
    GPTQ, AWQ            codes and zeros packed into int32, an FP16 scale per group and column; GPTQ: order
    FP8                  a byte, an FP32 scale per block

Such weights are frozen: they are trained through, by adapters. A product unpacks the weight for its own time,
in forward and again in backward, and saves nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from memscale.cli.problems import UsageError

__all__ = ["Quantization", "quantization_of"]

Forms = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a tensor → its shape and dtype."""

_BLOCK, _SCALES = 64, 256  # of bitsandbytes: weights per scale, scales per scale of scales
_COMPUTED: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_WAY_OUT: Final = "to count its weights unpacked, give a copy of config.json without quantization_config"


@dataclass(frozen=True)
class Quantization:
    """How a base is quantised.

    Attributes:
        label: for people, such as "bitsandbytes 4-bit".
        forms: the tensors of a layer of so many inputs and outputs.
        skipped: names of layers that are left as they are, as patterns; None: the output head.
        also_head: the head is left as it is beside them.
        only: names of the only layers; empty: all.
        in_blocks: layers outside the numbered blocks are left as they are.
        compute: dtype of products; None: that of the input.
        keeps_input: a product keeps its input until backward (8-bit of bitsandbytes).
        stacks: layers of experts in one tensor stay as they are; else they cannot be counted.
    """

    label: str
    forms: Callable[[int, int], Forms]
    skipped: tuple[str, ...] | None = None
    also_head: bool = False
    only: tuple[str, ...] = ()
    in_blocks: bool = False
    compute: torch.dtype | None = None
    keeps_input: bool = False
    stacks: bool = False

    def apply(self, model: nn.Module) -> None:
        """Exchanges a model's linear layers for quantised ones, and freezes all of it.

        Raises:
            UsageError: it has layers that are not counted in this format, or none at all.
        """
        self._refuse_stacks(model)
        kept = self._kept(model)
        found = {name: module for name, module in model.named_modules() if self._is_meant(name, module, kept)}
        if not found:
            raise UsageError(f"quantization_config ({self.label}): the model has no layer that it applies to")
        for name, module in found.items():
            model.set_submodule(name, _Packed(module, self))
        model.requires_grad_(False)

    def _is_meant(self, name: str, module: nn.Module, kept: tuple[str, ...]) -> bool:
        if type(module) is not nn.Linear and type(module).__name__ != "Conv1D":
            return False
        if self.in_blocks and not re.search(r"\.\d+\.", name):
            return False
        if self.only and not name.endswith(self.only):
            return False
        border = r"(?:(?<=\.)|(?=\.|$))"  # as transformers reads such lists
        return not any(name.endswith(key) or re.match(f"(?:{key}){border}", name) for key in kept)

    def _kept(self, model: nn.Module) -> tuple[str, ...]:
        if self.skipped is not None and not self.also_head:
            return self.skipped
        head = getattr(model, "get_output_embeddings", lambda: None)()
        last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
        heads = [name for name, module in model.named_modules() if module is head]
        return (*(self.skipped or ()), *heads, last)

    def _refuse_stacks(self, model: nn.Module) -> None:
        if self.stacks:
            return
        for name, weight in model.named_parameters():
            if weight.dim() == 3 and re.search(r"\.\d+\.", name) and "conv" not in name:
                raise UsageError(
                    f"quantization_config ({self.label}): {name!r} holds the experts of a layer in one "
                    f"tensor, which is not counted in this format; {_WAY_OUT}"
                )


def quantization_of(values: Mapping[str, Any], trains_adapters: bool) -> Quantization | None:
    """What the `quantization_config` of a configuration says; None if there is none.

    Args:
        values: the content of a `config.json`.
        trains_adapters: LoRA was asked for.

    Raises:
        UsageError: the format is not counted here, or a value of it; or it is to be trained itself.
    """
    settings = values.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise UsageError(f"quantization_config is {settings!r}; allowed: a mapping")
    method = str(settings.get("quant_method", "")).lower()
    if not method and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "mxfp4":
        raise UsageError(
            "quantization_config: transformers does not train MXFP4 weights, it unpacks them first "
            f"(Mxfp4Config(dequantize=True)); {_WAY_OUT}, and --dtype bf16"
        )
    if method not in _METHODS:
        raise UsageError(
            f"quantization_config: quant_method {method!r} is not counted here; allowed: "
            f"{', '.join(sorted(_METHODS))}; {_WAY_OUT}"
        )
    found = _METHODS[method](settings)
    if not trains_adapters:
        raise UsageError(
            f"quantization_config ({found.label}): quantised weights cannot be trained, only adapters on "
            f"them: give --lora N; {_WAY_OUT}"
        )
    return found


# ---- formats ---------------------------------------------------------------------------------------


def _number(settings: Mapping[str, Any], name: str, usual: int | None, allowed: tuple[int, ...]) -> int:
    value = settings.get(name, usual)
    fits = type(value) is int and (value in allowed if allowed else value == -1 or value > 0)
    if not fits:
        words = ", ".join(map(str, allowed)) if allowed else "-1 or a number above 0"
        raise UsageError(f"quantization_config: {name} is {value!r}; allowed: {words}")
    assert isinstance(value, int)
    return value


def _names(value: Any) -> tuple[str, ...] | None:
    """Names of modules, out of lists in lists; None where nothing is given."""
    if value is None:
        return None
    parts = (value,) if isinstance(value, str) else tuple(value)
    return tuple(
        name for part in parts for name in ((part,) if isinstance(part, str) else _names(part) or ())
    )


def _bitsandbytes(settings: Mapping[str, Any]) -> Quantization:
    skipped = _names(settings.get("llm_int8_skip_modules"))
    if settings.get("load_in_4bit"):
        nested = bool(settings.get("bnb_4bit_use_double_quant"))
        name = settings.get("bnb_4bit_compute_dtype", "float32")
        if name not in _COMPUTED:
            allowed = ", ".join(_COMPUTED)
            raise UsageError(f"quantization_config: bnb_4bit_compute_dtype is {name!r}; allowed: {allowed}")
        return Quantization(
            f"bitsandbytes 4-bit{', double' if nested else ''}",
            lambda ins, outs: _four_bits(ins * outs, nested),
            skipped,
            compute=_COMPUTED[name],
            stacks=True,
        )
    if settings.get("llm_int8_has_fp16_weight"):
        raise UsageError(f"quantization_config: llm_int8_has_fp16_weight is not counted here; {_WAY_OUT}")

    def forms(ins: int, outs: int) -> Forms:
        return {"weight": ((outs, ins), torch.int8), "scale": ((outs,), torch.float32)}

    return Quantization("bitsandbytes 8-bit", forms, skipped, keeps_input=True, stacks=True)


def _four_bits(elements: int, nested: bool) -> Forms:
    scales = -(-elements // _BLOCK)
    forms: Forms = {"weight": (((elements + 1) // 2, 1), torch.uint8), "code": ((16,), torch.float32)}
    if not nested:
        return {**forms, "absmax": ((scales,), torch.float32)}
    return {
        **forms,
        "absmax": ((scales,), torch.uint8),
        "nested_absmax": ((-(-scales // _SCALES),), torch.float32),
        "nested_code": ((256,), torch.float32),
        "nested_offset": ((1,), torch.float32),
    }


def _gptq(settings: Mapping[str, Any]) -> Quantization:
    bits = _number(settings, "bits", None, (2, 3, 4, 8))
    group = _number(settings, "group_size", 128, ())
    for name in ("dynamic", "lm_head"):
        if settings.get(name):
            raise UsageError(f"quantization_config: {name} is not counted here; {_WAY_OUT}")

    def forms(ins: int, outs: int) -> Forms:
        groups = -(-ins // (ins if group == -1 else group))
        return {
            "weight": ((ins * bits // 32, outs), torch.int32),
            "qzeros": ((groups, outs * bits // 32), torch.int32),
            "scales": ((groups, outs), torch.float16),
            "g_idx": ((ins,), torch.int32),
        }

    only = _names(settings.get("modules_in_block_to_quantize")) or ()
    return Quantization(f"GPTQ {bits}-bit", forms, only=only, in_blocks=True)


def _awq(settings: Mapping[str, Any]) -> Quantization:
    bits = _number(settings, "bits", 4, (4,))
    group = _number(settings, "group_size", 128, ())

    def forms(ins: int, outs: int) -> Forms:
        groups = -(-ins // (ins if group == -1 else group))
        return {
            "weight": ((ins, outs * bits // 32), torch.int32),
            "qzeros": ((groups, outs * bits // 32), torch.int32),
            "scales": ((groups, outs), torch.float16),
        }

    skipped = _names(settings.get("modules_to_not_convert"))
    return Quantization(f"AWQ {bits}-bit", forms, skipped, also_head=True)


def _fp8(settings: Mapping[str, Any]) -> Quantization:
    block = settings.get("weight_block_size", (128, 128))
    pair = isinstance(block, (list, tuple)) and len(block) == 2
    if block is not None and not (pair and all(type(size) is int and size > 0 for size in block)):
        raise UsageError(
            f"quantization_config: weight_block_size is {block!r}; allowed: two numbers, or null"
        )

    def forms(ins: int, outs: int) -> Forms:
        scales = () if block is None else (-(-outs // block[0]), -(-ins // block[1]))
        return {"weight": ((outs, ins), torch.float8_e4m3fn), "weight_scale_inv": (scales, torch.float32)}

    return Quantization("FP8", forms, _names(settings.get("modules_to_not_convert")))


_METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], Quantization]]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "gptq": _gptq,
}


# ---- layers ----------------------------------------------------------------------------------------


class _Packed(nn.Linear):
    """A quantised linear layer: the bytes of its format, and products that unpack them.

    peft puts adapters on it as on any linear layer. `weight` has the codes; scales are beside it.
    """

    def __init__(self, linear: Any, form: Quantization) -> None:
        nn.Module.__init__(self)
        transposed = type(linear).__name__ == "Conv1D"
        shape = tuple(linear.weight.shape)
        self.in_features, self.out_features = shape if transposed else shape[::-1]
        self.form = form
        for name, (size, dtype) in form.forms(self.in_features, self.out_features).items():
            tensor = torch.zeros(size, dtype=dtype, device=linear.weight.device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """The product of an input."""
        inner = x if self.form.compute is None else x.to(self.form.compute)
        bias = None if self.bias is None else self.bias.to(inner.dtype)
        shape = (self.out_features, self.in_features)
        out: Tensor = _Product.apply(inner, shape, self.form.keeps_input, bias)  # type: ignore[no-untyped-call]
        return out.to(x.dtype)


class _Product(torch.autograd.Function):
    """A product with a packed weight, of as many bytes as the formats' own take."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: tuple[int, int], keeps_input: bool, bias: Tensor | None
    ) -> Tensor:
        """The product, by a weight that is unpacked for the time of it."""
        ctx.shape, ctx.kept = shape, x if keeps_input else None
        return functional.linear(x, x.new_zeros(shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input."""
        (gradient,) = gradients
        return gradient @ gradient.new_zeros(ctx.shape), None, None, None
