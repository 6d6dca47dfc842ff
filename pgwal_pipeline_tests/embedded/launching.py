"""What the tests of servers and of their programs share."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

FAST = {"fsync": "off", "shared_buffers": "16MB"}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another user")


class OpenFolder:
    """A temporary folder that every user may enter (pytest's own is closed)."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pgwal-test-"))
        self.path.chmod(0o755)

    def close(self) -> None:
        shutil.rmtree(self.path)
