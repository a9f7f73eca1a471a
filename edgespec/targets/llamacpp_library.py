"""llama-cpp-python's C bindings: loaded once, checked, their log kept for errors."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from edgespec.errors import BackendError

# Hidden states between layers are not in llama.h: the C++ functions by their names in
# libraries made by gcc and clang, and by Microsoft's compiler.
_SET_LAYER = (
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
)
_GET_LAYER = (
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
)
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


def layer_states(api: Any) -> tuple[Any, Any] | None:
    """Functions that have layers' inputs kept, and that give them; None without.

    set(context, layer, is_kept), get(context, layer) -> rows of the last decode.
    """
    found = []
    for names in (_SET_LAYER, _GET_LAYER):
        named = [name for name in names if hasattr(api._lib, name)]
        if not named:
            return None
        found.append(getattr(api._lib, named[0]))
    set_layer, get_layer = found
    set_layer.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool]
    set_layer.restype = None
    get_layer.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    get_layer.restype = ctypes.POINTER(ctypes.c_float)
    return set_layer, get_layer


def _remember(level: int, text: bytes, _data: Any) -> None:
    line = text.decode(errors="replace").strip()
    if level in (_WARN, _ERROR) and line:
        _log.append(line)


def reason() -> str:
    """The last complaints as the tail of a message; forgets them."""
    lines = list(dict.fromkeys(_log))
    _log.clear()
    return ": " + "; ".join(lines) if lines else ""
