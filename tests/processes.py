"""Children of tests: they import the package that is tested, as pytest does."""

from __future__ import annotations

import sys

# "-c" puts the working directory first; a checkout's own edgespec/ has no C library.
ORDER = "import sys; sys.path.append(sys.path.pop(0))\n"


def python(code: str) -> list[str]:
    """The command that runs code, the working directory last on the path."""
    return [sys.executable, "-c", ORDER + code]
