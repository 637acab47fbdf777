"""The part of W&B's server that its client needs of it to send a run: an HTTP server that keeps the rows of metrics."""

import gzip
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROJECT = {"id": "1", "name": "p", "entity": {"id": "1", "name": "e"}}


class WandbServer(ThreadingHTTPServer):
    """Serve with `serve_forever` in a thread."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.rows: list[dict] = []  # of the one run that there is

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, query: str, variables: dict) -> dict:
        if "mutation UpsertBucket" in query:
            bucket = {"id": "1", "name": variables["name"], "displayName": "x", "config": "{}", "project": PROJECT}
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.rows}}
        if "query RunResumeStatus" in query:
            return {"model": PROJECT | {"bucket": self.bucket(variables["name"]) if self.rows else None}}
        if "mutation CreateRunFiles" in query:
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}
        return {}

    def bucket(self, name: str) -> dict:
        tail = json.dumps([json.dumps(self.rows[-1])])
        counts = {"historyLineCount": len(self.rows), "eventsLineCount": 0, "logLineCount": 0}
        texts = {"historyTail": tail, "eventsTail": "[]", "summaryMetrics": "{}", "config": "{}"}
        return {"id": "1", "name": name, "displayName": "x", "wandbConfig": '{"t": 1}'} | counts | texts


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        content = json.loads(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        answer: dict = {}
        if self.path == "/graphql":
            answer = {"data": self.server.answer(content["query"], content.get("variables") or {})}
        elif history := content.get("files", {}).get("wandb-history.jsonl"):
            assert history["offset"] == len(self.server.rows)
            self.server.rows += [json.loads(line) for line in history["content"]]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments) -> None:
        """Nothing."""
