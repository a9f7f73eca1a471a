"""ONNX Runtime sessions as target and draft graphs need them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from edgespec.errors import BackendError, FormatError

SPIN_US = "100"


def open_graph(
    path: Path, threads: int, providers: Sequence[str] = ()
) -> ort.InferenceSession:
    """A session on a graph.

    Raises FormatError for a file that is no graph, BackendError for one that ONNX
    Runtime cannot load, both naming it.
    """
    if not path.is_file():
        raise FormatError(f"{path}: no such file")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Threads wait actively between the ops of a forward, not longer: spinning through
    # the pauses between forwards takes the cores from whoever else needs them.
    options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_US)
    # Every tree size is a new shape; a remembered allocation plan per shape only grows.
    options.enable_mem_pattern = False
    options.log_severity_level = 4  # errors come back as exceptions; never print
    try:
        return ort.InferenceSession(
            str(path),
            sess_options=options,
            providers=list(providers) or ["CPUExecutionProvider"],
        )
    except Exception as error:  # its exceptions share no base
        broken = type(error).__name__ in ("InvalidProtobuf", "InvalidGraph")
        kind = FormatError if broken else BackendError
        raise kind(f"{path}: ONNX Runtime cannot load it: {error}") from error
