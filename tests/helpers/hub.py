"""A stand-in for the hub's HTTP interface on a local port, which keeps what is uploaded to it."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import yaml


class HubServer(ThreadingHTTPServer):
    """Creates repositories of models, and takes commits of files, small ones within the commit and others by LFS.

    `repositories` has the names of those that were created; `files` what they contain; `tokens` those of the requests.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: list[str] = []
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization')}/{given['name']}"
            self.server.repositories.append(name)
            self.answer({"url": f"{self.server.url}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            card = json.loads(body)["content"]
            is_mapping = isinstance(yaml.safe_load(card.split("---\n")[1]), dict)
            errors = [] if is_mapping else [{"message": "the front matter is no mapping"}]
            self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif "/preupload/" in self.path:
            files = []
            for file in json.loads(body)["files"]:
                mode = "regular" if file["path"].endswith((".md", ".json", ".html")) else "lfs"
                files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            self.answer({"files": files})
        elif self.path.endswith("/objects/batch"):
            objects = []
            for thing in json.loads(body)["objects"]:
                action = {"upload": {"href": f"{self.server.url}/objects/{thing['oid']}"}}
                objects.append({**thing, "actions": action})
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                self.commit(line["key"], line["value"])
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self.answer({"commitUrl": f"{self.server.url}/{name}/commit/0a", "commitOid": "0a", "success": True})
        else:
            self.answer({"error": f"unexpected {self.path}"}, 404)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[self.path.rpartition("/")[2]] = body
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"error": "not found"}, 404)

    do_HEAD = do_GET

    def commit(self, key: str, value: dict[str, Any]) -> None:
        if key == "header":
            self.server.messages.append(value["summary"])
        elif key == "file":
            self.server.files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            self.server.files[value["path"]] = self.server.objects[value["oid"]]

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
