"""llama-cpp-python's C bindings: loaded once, checked, their log kept for errors."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from edgespec.errors import BackendError

_WARN, _ERROR = 2, 3  # levels of ggml's log
_log: deque[str] = deque(maxlen=8)  # what llama.cpp last complained about
_callback: Any = None  # C keeps a pointer to it
_api: Any = None


def library() -> Any:
    """The bindings, initialised once.

    Raises BackendError, with the remedy, when they are missing, broken or too old.
    """
    global _api, _callback
    if _api is not None:
        return _api
    try:
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        raise BackendError(
            "the llamacpp backend needs llama-cpp-python: pip install 'edgespec[llama]'"
        ) from error
    except Exception as error:  # a library built for another machine
        raise BackendError(f"llama-cpp-python does not load: {error}") from error
    missing = [
        name
        for name in ("kv_unified", "flash_attn_type", "swa_full")
        if not hasattr(api.llama_context_params, name)
    ]
    if missing:
        raise BackendError(
            f"llama-cpp-python is too old (no {', '.join(missing)}): "
            "pip install -U 'edgespec[llama]'"
        )
    _callback = api.llama_log_callback(_remember)
    api.llama_log_set(_callback, ctypes.c_void_p(0))
    api.llama_backend_init()
    _api = api
    return api


def _remember(level: int, text: bytes, _data: Any) -> None:
    line = text.decode(errors="replace").strip()
    if level in (_WARN, _ERROR) and line:
        _log.append(line)


def reason() -> str:
    """The last complaints as the tail of a message; forgets them."""
    lines = list(dict.fromkeys(_log))
    _log.clear()
    return ": " + "; ".join(lines) if lines else ""
