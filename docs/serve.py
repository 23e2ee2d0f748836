"""Build the documentation site and show it on this machine: ``python docs/serve.py``; ``--build`` only builds it."""

from __future__ import annotations

import argparse
import functools
import http.server
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(site: Path) -> None:
    """Build the site, in which a warning is an error."""
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", ROOT / "docs", ROOT, site], check=True
    )


def main() -> None:
    """Build, and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", help="where to build (build/site)")
    parser.add_argument("--build", action="store_true", help="build it, and end")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    build(options.site)
    if not options.build:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=options.site)
        with http.server.ThreadingHTTPServer(("127.0.0.1", options.port), handler) as server:
            print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                pass


if __name__ == "__main__":
    main()
