# SPDX-License-Identifier: Apache-2.0
"""Which operators of the CUDA build are treated how. Names as in native_functions.yaml, without overloads."""

from __future__ import annotations

NO_KERNEL = frozenset(
    (
        "_efficientzerotensor",
        "_empty_affine_quantized",
        "_empty_per_channel_affine_quantized",
        "_local_scalar_dense",
        "_nested_view_from_buffer",
        "_pin_memory",
        "_reshape_alias",
        "_resize_output_",
        "_use_cudnn_ctc_loss",
        "_use_miopen_ctc_loss",
        "as_strided",
        "empty",
        "empty_strided",
        "is_pinned",
        "is_set_to",
        "record_stream",
        "resize_",
        "resize_as_",
        "set_",
        "unfold",
        "view",
        "view_as_complex",
        "view_as_real",
    )
)
"""Views, memory and what the host answers: they work on the stand-in as they are."""

ALIEN = ("_cudnn", "cudnn_", "miopen_", "_sparse", "sparse_", "_to_sparse", "_cslt", "quantized", "_nested")
"""Beginnings of names that are left alone: libraries and layouts that the stand-in does not have."""

SIZE_FROM_VALUES = frozenset(
    (
        "_assert_async",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "histc",
        "masked_select",
        "nonzero",
        "nonzero_static",
        "repeat_interleave",
        "_segment_reduce_backward",
        "segment_reduce",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    )
)
"""The original asks the device for numbers and would get rubbish: its result is allocated here instead."""

OTHER_LIBRARY = (
    "_fft",
    "linalg_",
    "_linalg",
    "cholesky",
    "_cholesky",
    "lu_",
    "ormqr",
    "geqrf",
    "triangular_solve",
)
"""Beginnings of names whose originals call cuFFT, cuSOLVER or MAGMA, which are not there."""

IN_SINGLE = ("native_layer_norm", "native_batch_norm", "native_group_norm", "cudnn_batch_norm", "_batch_norm")
"""Beginnings of names whose CUDA kernels keep statistics of halves in single precision; the CPU's do not."""
