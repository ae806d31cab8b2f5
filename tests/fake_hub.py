"""A small Hugging Face hub on loopback: repositories that are folders, and faults on demand."""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """What is wrong with the next `times` answers for a file.

    `status`: another one; `cut_at`: the connection ends after so many bytes; `flip`: the bit of a
    byte is another one; `length`: what Content-Length says more than there is; `pause_s`: before
    every 64 KiB.
    """

    times: int = 1
    status: int | None = None
    cut_at: int | None = None
    flip: bool = False
    length: int = 0
    pause_s: float = 0.0


@dataclass
class Hub:
    """The hub's side: what it serves, what it was asked, what goes wrong."""

    folders: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    commit: str = COMMIT
    endpoint: str = ""
    # Bodies that were sent, and their bytes, by file name.
    sent: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    tokens: set[str] = field(default_factory=set)
    # Where large files are redirected to, as to the signed addresses of a CDN.
    elsewhere: str = ""
    # Changes what it says of a repository; headers that it sends in the place of its own.
    lie: Callable[[dict[str, Any]], None] = lambda answer: None
    lying_headers: dict[str, str] = field(default_factory=dict)

    def fault(self, name: str) -> Fault | None:
        """What is wrong this time."""
        for fault in self.faults.get(name, []):
            if fault.times:
                fault.times -= 1
                return fault
        return None


def git_digest(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def is_large(path: Path) -> bool:
    return path.suffix in (".safetensors", ".gguf")


def describe(path: Path, folder: Path) -> dict[str, Any]:
    """A file as the hub lists it."""
    data = path.read_bytes()
    described: dict[str, Any] = {
        "rfilename": str(path.relative_to(folder)),
        "size": len(data),
        "blobId": git_digest(data),
    }
    if is_large(path):
        sha256 = hashlib.sha256(data).hexdigest()
        described["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
    return described


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """Serve `hub`, whose endpoint is set."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = unquote(self.path.split("?")[0])
            hub.tokens.add(self.headers.get("Authorization", ""))
            named = [repo for repo in hub.folders if f"/{repo}" in path]
            repo = max(named, key=len, default=None)
            if repo is None:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif repo in hub.gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
            elif path.startswith("/api/"):
                self.answer_api(repo, path, with_body)
            else:
                # Behind .../resolve/REVISION/
                name = path.split("/resolve/")[-1].split("/", 1)[-1]
                place = hub.folders[repo] / name
                # What a hub lies about may lie elsewhere.
                file = place if place.exists() else place.parents[name.count("/")] / place.name
                self.answer_file(file, with_body)

        def answer_api(self, repo: str, path: str, with_body: bool) -> None:
            revision = re.search(r"/(?:revision|tree)/([^/]+)", path)
            if revision and revision[1] not in ("main", hub.commit):
                self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
                return
            fault = hub.fault("api")
            if fault is not None and fault.status:
                self.send(fault.status, b"", {}, with_body)
                return
            folder = hub.folders[repo]
            files = [describe(p, folder) for p in sorted(folder.rglob("*")) if p.is_file()]
            answer: Any = {"id": repo, "sha": hub.commit, "siblings": files}
            hub.lie(answer)
            if "/tree/" in path:
                answer = [
                    {
                        "type": "file",
                        "path": file["rfilename"],
                        "size": file["size"],
                        "oid": file["blobId"],
                        **(
                            {"lfs": {**file["lfs"], "oid": file["lfs"]["sha256"]}}
                            if "lfs" in file
                            else {}
                        ),
                    }
                    for file in files
                ]
            self.send(200, json.dumps(answer).encode(), {}, with_body)

        def answer_file(self, file: Path, with_body: bool) -> None:
            if not file.exists():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
                return
            data = file.read_bytes()
            large = is_large(file)
            if large and hub.elsewhere:
                sha256 = hashlib.sha256(data).hexdigest()
                headers = {
                    "Location": hub.elsewhere + self.path,
                    "X-Linked-Size": str(len(data)),
                    "X-Linked-Etag": f'"{sha256}"',
                    "X-Repo-Commit": hub.commit,
                }
                self.send(302, b"", headers, with_body)
                return
            etag = hashlib.sha256(data).hexdigest() if large else git_digest(data)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
            headers.update(hub.lying_headers)
            fault = hub.fault(file.name) if with_body else None
            if fault is not None and fault.status:
                self.send(fault.status, b"", {}, with_body)
                return
            status, start = 200, 0
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if asked:
                status, start = 206, int(asked[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if fault is not None and fault.flip:
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            self.send(status, data[start:], headers, with_body, fault, file.name)

        def send(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str],
            with_body: bool,
            fault: Fault | None = None,
            name: str = "",
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) + (fault.length if fault else 0)))
            self.end_headers()
            if not with_body:
                return
            hub.sent[name] += 1
            end = len(body) if fault is None or fault.cut_at is None else fault.cut_at
            for at in range(0, min(end, len(body)), 1 << 16):
                piece = body[at : min(at + (1 << 16), end)]
                if fault is not None and fault.pause_s:
                    time.sleep(fault.pause_s)
                # Counted first: whoever has received the last piece looks at once.
                hub.sent_bytes[name] += len(piece)
                try:
                    self.wfile.write(piece)
                except OSError:
                    hub.sent_bytes[name] -= len(piece)
                    self.close_connection = True
                    return
            if fault is not None and (fault.cut_at is not None or fault.length):
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    # It looks so often whether it is to end; by default every half second.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve_hub(repo: str, folder: Path, gated: bool = False) -> Iterator[str]:
    """Serve `folder` as `repo`; yields the endpoint."""
    with running_hub(Hub({repo: folder}, gated={repo} if gated else set())) as hub:
        yield hub.endpoint


def use_hub(hub: Hub, monkeypatch: "pytest.MonkeyPatch") -> None:
    """Have calls in this process ask `hub`."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
