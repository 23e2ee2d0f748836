"""As much of the server of Weights & Biases as wandb's own client asks for, on this machine."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub:
    """Keeps the rows of each run, by its id; ``asked`` has the names of the questions."""

    def __init__(self):
        self.rows, self.inserted, self.asked, self.ended = {}, [], [], {}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words):
                """Write nothing."""

            def do_GET(self):
                self.answer({})

            def do_PUT(self):
                self.content()
                self.answer({})

            def do_POST(self):
                content = self.content()
                if self.path.endswith("/graphql"):
                    self.answer({"data": stub.graphql(json.loads(content))})
                else:
                    stub.take(self.path.split("/")[-2], json.loads(content))
                    self.answer({})

            def content(self):
                size = int(self.headers.get("content-length") or 0)
                content = self.rfile.read(size)
                return gzip.decompress(content) if self.headers.get("content-encoding") == "gzip" else content

            def answer(self, said):
                content = json.dumps(said).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def graphql(self, asked):
        """Answer a question."""
        name, given = asked.get("operationName"), asked.get("variables") or {}
        self.asked.append(name)
        entity = {"id": "e", "name": "somebody"}
        project = {"id": "p", "name": given.get("project") or "p", "entity": entity}
        if name == "Viewer":
            return {
                "viewer": {
                    "id": "v",
                    "entity": "somebody",
                    "username": "somebody",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            }
        if name == "RunResumeStatus":
            return {"model": {**project, "bucket": self.bucket(given["name"])}}
        if name == "UpsertBucket":
            run = given["name"]
            fresh = run not in self.rows
            self.rows.setdefault(run, [])
            self.inserted.append((run, fresh))
            return {"upsertBucket": {"bucket": {**self.bucket(run), "project": project}, "inserted": fresh}}
        if name == "CreateRunFiles":
            files = [{"name": each, "uploadUrl": f"{self.address}/storage/{each}"} for each in given["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def bucket(self, run):
        """What is known of a run."""
        if run not in self.rows:
            return None
        rows = self.rows[run]
        return {
            "id": run, "name": run, "displayName": run, "description": None, "sweepName": None, "config": "{}",
            "summaryMetrics": "{}", "logLineCount": 0, "eventsLineCount": 0, "historyLineCount": len(rows),
            "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]), "eventsTail": "[]", "tags": [],
            "notes": None, "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def take(self, run, sent):
        """Keep what a stream of files sends."""
        history = sent.get("files", {}).get("wandb-history.jsonl")
        if history is not None:
            del self.rows[run][history["offset"] :]
            self.rows[run] += [json.loads(line) for line in history["content"]]
        if sent.get("complete"):
            self.ended[run] = sent.get("exitcode")

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
