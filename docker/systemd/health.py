"""Whether the SuperLink of this machine answers; exit code 1 if it does not."""

import argparse
import ssl
import sys
import time
import urllib.request


def main() -> None:
    """Ask until it answers or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("authority", help="the ca.crt that signed its certificate")
    parser.add_argument("--wait", type=float, default=0, help="seconds in which it may come to answer (default 0)")
    parser.add_argument("--port", type=int, default=8000, help="where it listens (default 8000)")
    given = parser.parse_args()
    began = time.monotonic()
    while problem := ask(f"https://127.0.0.1:{given.port}/health", given.authority):
        if time.monotonic() - began >= given.wait:
            sys.exit(f"the SuperLink does not answer: {problem}")
        time.sleep(1)


def ask(url: str, authority: str) -> str:
    """Why there is no good answer, or an empty text."""
    direct = urllib.request.ProxyHandler({})  # a proxy of the system must not be asked for this machine
    try:
        secure = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority))
        urllib.request.build_opener(direct, secure).open(url, timeout=10).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
