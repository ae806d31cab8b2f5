"""A small Hugging Face hub on loopback: one repository with the files of a folder."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(repo: str, folder: Path, gated: bool = False) -> Iterator[str]:
    """Serve `folder` as `repo`; yields the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            if repo not in path:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            elif path.startswith("/api/") and f"/{repo}/tree" in path:
                files = [
                    {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                    for p in sorted(folder.iterdir())
                ]
                self.send(200, json.dumps(files).encode(), {}, with_body)
            elif path.startswith("/api/"):
                siblings = [{"rfilename": p.name} for p in sorted(folder.iterdir())]
                info = {"id": repo, "sha": COMMIT, "siblings": siblings}
                self.send(200, json.dumps(info).encode(), {}, with_body)
            else:
                file = folder / path.rsplit("/", 1)[1]
                if not file.exists():
                    self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
                    return
                data = file.read_bytes()
                etag = hashlib.sha256(data).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
                self.send(200, data, headers, with_body)

        def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
