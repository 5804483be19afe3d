"""A server on this machine that speaks as much of the model hub's protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


@contextmanager
def small_hub(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Serve files by name of repositories as "owner/name"; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            repo = next((name for name in repos if f"/{name}/" in self.path), None)
            headers, body = {}, b"{}"
            if repo is not None and "/resolve/" in self.path:
                body = repos[repo].get(self.path.rpartition("/")[2])
                headers = {"ETag": f'"{_digest(body or b"")}"', "X-Repo-Commit": COMMIT}
            elif repo is not None and "/tree/" in self.path:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                    for name, data in repos[repo].items()
                ]
                body = json.dumps(entries).encode()
            elif repo is not None:
                siblings = [{"rfilename": name} for name in repos[repo]]
                body = json.dumps({"_id": "1", "id": repo, "sha": COMMIT, "siblings": siblings}).encode()
            self.send_response(200 if body is not None else 404)
            for name, value in {**headers, "Content-Length": str(len(body or b""))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
