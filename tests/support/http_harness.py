"""A local HTTP server for tests: answers JSON by a function, counts connections and requests at once."""

import contextlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service:
    """answer: message -> (status, JSON), or (status, JSON, headers)."""

    def __init__(self, answer):
        self.messages, self.headers, self.times, self.paths = [], [], [], []
        self.connections = set()
        self.most_at_once = 0
        now, lock, service = 0, threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept
            disable_nagle_algorithm = True

            def do_POST(self):
                nonlocal now
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    now += 1
                    service.most_at_once = max(service.most_at_once, now)
                    service.messages.append(message)
                    service.headers.append(dict(self.headers))
                    service.paths.append(self.path)
                    service.connections.add(self.client_address)
                    service.times.append(time.monotonic())
                status, reply, *more = answer(message)
                with lock:
                    now -= 1
                body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle(self):
                with contextlib.suppress(ConnectionError):  # nobody waits any more
                    super().handle()

            def log_message(self, *arguments):
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"


@contextmanager
def serving(answer):
    """A Service that runs while the context lasts."""
    service = Service(answer)
    thread = threading.Thread(target=service.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        thread.join()
        service.server.server_close()
