"""Opening an address: impatient with servers that do not answer.

Apart from `fetch` because Python's own client takes longer to import than many a model
to load.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping

from edgespec.cache import CHUNK
from edgespec.fetch import FetchError, Interrupted, RangeError
from edgespec.version import __version__

CONNECT_SECONDS = 4.0  # a hub that cannot be reached must not hold up the next source
READ_SECONDS = 30.0


class _HttpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.timeout = CONNECT_SECONDS
        super().connect()
        self.sock.settimeout(READ_SECONDS)


class _HttpsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        self.timeout = CONNECT_SECONDS
        super().connect()
        self.sock.settimeout(READ_SECONDS)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, req)


def open_url(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """An answer to read from. Raises FetchError, or RangeError for an absent range."""
    opener = urllib.request.build_opener(_HttpHandler, _HttpsHandler)
    if not url.startswith(("http://", "https://")):
        raise FetchError(f"{url}: expected an address that begins with https://")
    request = urllib.request.Request(
        url, headers={"User-Agent": f"edgespec/{__version__}"}
    )
    for name, value in headers.items():
        # Unredirected: a token is for the hub, not for the store it points to.
        if name == "Authorization":
            request.add_unredirected_header(name, value)
        else:
            request.add_header(name, value)
    try:
        response: http.client.HTTPResponse = opener.open(request)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            raise RangeError from None
        advice = {401: "; is HF_TOKEN needed?", 403: "; is HF_TOKEN needed?"}
        raise FetchError(
            f"{url}: HTTP {error.code} {error.reason}{advice.get(error.code, '')}"
        ) from None
    except urllib.error.URLError as error:
        raise FetchError(f"{url}: cannot be reached: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url}: cannot be reached: {_reason(error)}") from None
    return response


def read(response: http.client.HTTPResponse) -> bytes:
    """The next bytes, none at the end. Raises Interrupted."""
    try:
        return response.read(CHUNK // 4)
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(f"the connection broke: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
