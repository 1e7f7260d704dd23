"""A proxy before Azurite that is sometimes busy, as the service is when it throttles."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUSY = b'<?xml version="1.0"?><Error><Code>ServerBusy</Code><Message>busy</Message></Error>'
HOPS = ("connection", "transfer-encoding", "content-length", "keep-alive")


class Front:
    """Answers every `nth` request with 503 and Retry-After, and forwards the others."""

    def __init__(self, port, behind, nth):
        self.refused = 0
        self._seen = 0
        self._nth = nth
        self._lock = threading.Lock()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if front.is_busy():
                    self.tell(503, {"x-ms-error-code": "ServerBusy", "Retry-After": "1"}, BUSY)
                    return
                connection = http.client.HTTPConnection("127.0.0.1", behind, timeout=20)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                response = connection.getresponse()
                headers = {k: v for k, v in response.getheaders() if k.lower() not in HOPS}
                self.tell(response.status, headers, response.read())
                connection.close()

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815  # the server's names

            def tell(self, status, headers, body):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def is_busy(self):
        with self._lock:
            self._seen += 1
            busy = self._seen % self._nth == 0
            self.refused += busy
            return busy

    def close(self):
        self._server.shutdown()
        self._server.server_close()
