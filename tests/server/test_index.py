"""The address of a server in a browser."""

import httpx
from server.conftest import Server


def test_the_root_says_what_is_served_and_where(server: Server) -> None:
    answer = httpx.get(f"{server.url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert "serves pocket" in answer.text
    for line in answer.text.splitlines()[2:]:
        address = line.split()[-1]
        if not address.endswith("/v1"):
            assert httpx.get(address).status_code == 200, address
