"""A file that takes a browser to the page, with the token of its conversations.

A browser's command line can be read by all users of the machine; a private file cannot.
"""

import html
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from localllm.files.private_files import make_private_folder, write_private
from localllm.user.places import runtime_folder

_TEXT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<title>localllm</title>
<meta http-equiv="refresh" content="0; url={address}">
<a href="{address}">the page</a>
"""


@contextmanager
def page_file(address: str) -> Iterator[Path]:
    """A file that sends the browser which opens it to `address`; it is gone after the block.

    Raises: OSError if there is no folder that other users cannot read.
    """
    folder = runtime_folder()
    make_private_folder(folder)
    path = folder / f"page-{os.getpid()}.html"
    try:
        write_private(path, _TEXT.format(address=html.escape(address)).encode())
        yield path
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
