"""A bucket on this machine: as much of Google Cloud Storage's JSON interface as gcsfs and tensorstore use.

Objects are kept in memory, written whole or not at all; there is no append, no rename and no lock.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Bucket(ThreadingHTTPServer):
    """The server; `objects` holds bytes by name, `.url` is where clients find it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.generations: dict[str, int] = {}
        self.uploads: dict[str, bytearray] = {}
        self.unknown: list[str] = []
        self.denied = False  # whether to refuse everything, as to an account without rights
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """Clients hang up on answers that they no longer need; anything else is a fault of this server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def put(self, name, content):
        """Replaces an object."""
        with self.lock:
            self.objects[name] = bytes(content)
            self.generations[name] = self.generations.get(name, 0) + 1

    def remove(self, name):
        """Whether there was such an object, which is gone now."""
        with self.lock:
            return self.objects.pop(name, None) is not None

    def describe(self, name):
        """An object's metadata."""
        content = self.objects[name]
        digest = base64.b64encode(hashlib.md5(content).digest()).decode()
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "test",
            "size": str(len(content)),
            "md5Hash": digest,
            "generation": str(self.generations[name]),
            "metageneration": "1",
            "etag": digest,
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def log_message(self, *_):
        pass

    def handle_one(self):
        split = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(split.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else self.rfile.read(length)
        self.answer(*self.route(self.command, split.path, query, body))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_one

    def _chunks(self):
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)

    def answer(self, status, content=b"", headers=()):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def route(self, method, path, query, body):
        server = self.server
        if server.denied:
            return 403, {"error": {"code": 403, "message": "no access"}}
        path = re.sub(r"^/(download|upload)?/?storage/v1", "", path) if "storage/v1" in path else path
        if path == "/batch":
            return self.batch(body)
        if method == "GET" and path == "/b/test/o":
            return 200, self.listing(query)
        if method == "GET" and path.rstrip("/") in ("/b/test", "/b/test/storageLayout"):
            return 200, {"kind": "storage#bucket", "name": "test", "location": "US", "locationType": "region"}
        if method in ("POST", "PUT") and path == "/b/test/o":
            return self.upload(method, query, body)
        if found := re.fullmatch(r"/b/test/o/([^/]+)/(?:rewriteTo|copyTo)/b/test/o/([^/]+)", path):
            source, target = map(urllib.parse.unquote, found.groups())
            server.put(target, server.objects[source])
            return 200, {"done": True, "resource": server.describe(target)}
        if found := re.fullmatch(r"/b/test/o/(.+)", path):
            return self.object(method, urllib.parse.unquote(found.group(1)), query)
        server.unknown.append(f"{method} {path}")
        return 404, {"error": {"code": 404, "message": f"no such thing: {path}"}}

    def object(self, method, name, query):
        server = self.server
        if name not in server.objects:
            return 404, {"error": {"code": 404, "message": f"No such object: test/{name}"}}
        if method == "DELETE":
            server.remove(name)
            return 204, b""
        content, details = server.objects[name], server.describe(name)
        if query.get("alt") != "media":
            return 200, details
        headers = {"x-goog-generation": details["generation"], "x-goog-hash": f"md5={details['md5Hash']}"}
        if found := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = found.groups()
            start = int(first) if first else max(0, len(content) - int(last))
            stop = min(int(last) + 1, len(content)) if first and last else len(content)
            if start >= len(content):
                return 416, b"", headers | {"Content-Range": f"bytes */{len(content)}"}
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return 206, content[start:stop], headers
        return 200, content, headers

    def listing(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        for name in sorted(self.server.objects):
            if not name.startswith(prefix) or not query.get("startOffset", "") <= name:
                continue
            if query.get("endOffset") and name >= query["endOffset"]:
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                prefixes.add(prefix + head + delimiter)
            else:
                items.append(self.server.describe(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def upload(self, method, query, body):
        server, kind = self.server, query.get("uploadType")
        if kind == "media":
            name = query["name"]
        elif kind == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"]).group(1).encode()
            parts = body.split(b"--" + boundary)[1:-1]
            details, body = (part.split(b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n", 1)[1] for part in parts)
            name = json.loads(details)["name"]
            body = body[:-2] if body.endswith(b"\r\n") else body[:-1]
        elif "upload_id" in query:
            return self.resume(query["upload_id"], body)
        else:  # the beginning of a resumable upload
            name = json.loads(body)["name"]
            number = f"{len(server.uploads)}:{name}"
            server.uploads[number] = bytearray()
            where = f"{server.url}/upload/storage/v1/b/test/o?upload_id={urllib.parse.quote(number, safe='')}"
            return 200, {}, {"Location": where}
        if query.get("ifGenerationMatch") is not None:
            current = server.generations[name] if name in server.objects else 0
            if int(query["ifGenerationMatch"]) != current:
                return 412, {"error": {"code": 412, "message": "conditionNotMet"}}
        server.put(name, body)
        return 200, server.describe(name)

    def resume(self, number, body):
        server = self.server
        server.uploads[number] += body
        total = self.headers["Content-Range"].rpartition("/")[2]
        if total == "*":
            return 308, b"", {"Range": f"bytes=0-{len(server.uploads[number]) - 1}"}
        name = number.partition(":")[2]
        server.put(name, server.uploads.pop(number))
        return 200, server.describe(name)

    def batch(self, body):
        boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"]).group(1)
        answers = []
        for part in body.decode().split(f"--{boundary}")[1:-1]:
            method, path = re.search(r"^(DELETE|GET) (\S+)", part, re.MULTILINE).groups()
            number = re.search(r"Content-ID:\s*(\S+)", part, re.IGNORECASE)
            path = urllib.parse.urlsplit(path).path
            status, *_ = self.route(method, path, {}, b"")
            label = f"Content-ID: {number.group(1).replace('<', '<response-')}\r\n" if number else ""
            answers.append(
                f"--answer\r\nContent-Type: application/http\r\n{label}\r\nHTTP/1.1 {status} OK\r\n"
                "Content-Length: 0\r\n\r\n"
            )
        content = ("".join(answers) + "--answer--\r\n").encode()
        return 200, content, {"Content-Type": "multipart/mixed; boundary=answer"}


def environment(bucket):
    """What makes gcsfs and tensorstore take this server for Google's."""
    return {
        "STORAGE_EMULATOR_HOST": bucket.url,
        "TENSORSTORE_GCS_HTTP_URL": bucket.url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_GCE_CHECK": "true",
    }
