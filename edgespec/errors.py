"""Errors a user can meet. Messages say what, where, expected, got and what next."""


class EdgeSpecError(Exception):
    """Base of every error edgespec raises on purpose."""


class UsageError(EdgeSpecError, ValueError):
    """A combination of arguments that cannot work; the command line exits with 2."""


class FormatError(EdgeSpecError, ValueError):
    """A file whose contents break its format: truncated, inconsistent or unknown."""


class UnsupportedError(EdgeSpecError, ValueError):
    """A model, type or option this version knows of but does not do."""


class ModelNotFoundError(EdgeSpecError, OSError):
    """A model that is neither on disk nor obtainable."""


class ContextError(EdgeSpecError, ValueError):
    """A prompt that does not fit the context."""


class BackendError(EdgeSpecError, RuntimeError):
    """A backend that is missing or failed."""


class OutOfMemoryError(EdgeSpecError, MemoryError):
    """More memory than there is, found before or while taking it."""


class NativeError(EdgeSpecError, RuntimeError):
    """A status from the C core without a closer Python counterpart."""
