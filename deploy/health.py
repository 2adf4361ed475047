"""Tell Docker whether a container is healthy: ``python health.py http[s]://HOST:PORT/PATH``.

It is if the address answers in time, with a status from 200 to 299.  With https nobody's certificate is
checked: it is the container's own address.  What is printed is kept by Docker: ``docker inspect`` shows it.
"""

import http.client
import ssl
import sys
import urllib.parse
from typing import Final

TIMEOUT_S: Final = 3.0
MAX_BYTES: Final = 1000
"""Of an answer that are shown."""


def main() -> int:
    """Ask, and say what was answered.

    Returns:
        0 if all is well, 1 if not.
    """
    url = urllib.parse.urlsplit(sys.argv[1])
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(url.netloc, timeout=TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", url.path)
        answer = connection.getresponse()
        text = answer.read(MAX_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer: {error!r}")  # noqa: T201
        return 1
    finally:
        connection.close()
    print(answer.status, text)  # noqa: T201
    return 0 if 200 <= answer.status < 300 else 1


if __name__ == "__main__":
    sys.exit(main())
