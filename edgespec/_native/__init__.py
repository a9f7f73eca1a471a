"""The binding to the C core: the only package that touches it.

`library` finds it, the other modules declare the functions and structs of one section
of native/include/edgespec.h each, and give them Python types.
"""

from edgespec._native.head import HEAD_KINDS, HeadInfo, NativeDrafter, NativeHead
from edgespec._native.kv import Ring, kv_compact
from edgespec._native.library import ABI, library_path, version
from edgespec._native.machine import (
    cpu_features,
    int8_kernels,
    measure_int8,
    measure_read,
)
from edgespec._native.model import ModelInfo, NativeModel, cpu_variants
from edgespec._native.sampling import (
    ALL_TOKENS,
    SampleParams,
    Verdict,
    noise,
    sample_draw,
    sample_process,
    verify_coupled,
    verify_rejection,
)
from edgespec._native.session import (
    DRAFT,
    FINISH,
    PLAIN,
    PREFILL,
    NativeSession,
    NativeStats,
    Round,
)
from edgespec._native.target import (
    KV_TYPES,
    NativeBatch,
    NativeRound,
    NativeTargetState,
    target_memory,
)
from edgespec._native.trees import CTree, tree_derive

__all__ = [
    "ABI",
    "ALL_TOKENS",
    "DRAFT",
    "FINISH",
    "HEAD_KINDS",
    "KV_TYPES",
    "PLAIN",
    "PREFILL",
    "CTree",
    "HeadInfo",
    "ModelInfo",
    "NativeBatch",
    "NativeDrafter",
    "NativeHead",
    "NativeModel",
    "NativeRound",
    "NativeSession",
    "NativeStats",
    "NativeTargetState",
    "Ring",
    "Round",
    "SampleParams",
    "Verdict",
    "cpu_features",
    "cpu_variants",
    "int8_kernels",
    "kv_compact",
    "library_path",
    "measure_int8",
    "measure_read",
    "noise",
    "sample_draw",
    "sample_process",
    "target_memory",
    "tree_derive",
    "verify_coupled",
    "verify_rejection",
    "version",
]
