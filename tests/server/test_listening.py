"""What a server does before its first request."""

import socket

from localllm.server.run import _listen


def test_connections_send_each_token_at_once() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
