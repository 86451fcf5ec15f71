import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Other tests look at what runs below this process."""
    yield
    if "ranks" in sys.modules:
        sys.modules["ranks"].stop_servers()
