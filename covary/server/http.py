"""HTTP as it is taken: heads of a limited length, and no other protocol."""

from __future__ import annotations

import json

from covary.data.dataset import needed

with needed("httptools", "covary serve", "serve"):
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 2**16  # bytes of a request's first line and headers
_LONG = f"The first line and the headers, or trailers, are longer than {MOST_HEAD:,} bytes."
_OTHER = "This is no request that HTTP/1.1 has: send another."
_OFFERS = (b"upgrade", b"http2-settings")  # of another protocol


class Http(HttpToolsProtocol):
    """Reads requests; a head, or what follows the parts of a body, has at most ``MOST_HEAD`` bytes.

    The parser collects these without a limit, before any application sees the request. And it
    gives up HTTP where a client offers another protocol, as clients of Java do by default. The
    offer is not taken: the same request is read once more, without it.
    """

    _collected = 0  # bytes since the parser last came to the end of a head or to a part of a body
    _head = 0  # bytes of the head that the parser has told of
    _is_offer = False  # whether the head that was read offers another protocol

    def data_received(self, data: bytes) -> None:
        """Read some bytes of a connection."""
        self._unset_keepalive_if_required()
        self._collected += len(data)
        try:
            while data:
                data = self._left(data)
        except httptools.HttpParserError:
            self.send_400_response(_LONG if self._head > MOST_HEAD else _OTHER)
        else:
            if self._collected > MOST_HEAD and not self.transport.is_closing():
                self.send_400_response(_LONG)

    def _left(self, data: bytes) -> bytes:
        """Parse some bytes; give those that a new parser has to begin with."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            if not self._is_offer:
                self.send_400_response(_OTHER)  # such as CONNECT
                return b""
            head = self._without_offer()
            self.parser = httptools.HttpRequestParser(self)
            return head + data[stopped.args[0] :]
        return b""

    def _without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() not in _OFFERS)
            if value and name not in _OFFERS:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read, and hang up."""
        if self.transport.is_closing():
            return
        body = json.dumps({"error": msg}).encode()
        head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """Called by the parser, as are the following."""
        self._head, self._is_offer = 0, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MOST_HEAD:
            raise ValueError(_LONG)  # which the parser turns into an error of its own

    def on_headers_complete(self) -> None:
        """The end of a head."""
        self._collected = 0
        if self.parser.should_upgrade():
            self._is_offer = self.parser.get_method() != b"CONNECT"
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._collected = 0
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._collected = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()
