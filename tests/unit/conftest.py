import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _mlflow_is_not_installed() -> Iterator[None]:
    """A stage works without MLflow, whose store takes a second of each run; the tests of tracking have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)  # what makes `import mlflow` an ImportError
        yield


def _restored_kernels() -> Iterator[None]:
    """A job that a test runs in its own process selects kernels for that process; later tests must not meet them."""
    from implicit_llm.kernels import selection

    before = selection._Process.backend
    yield
    selection._Process.backend = before


_of_modules = pytest.fixture(scope="module", autouse=True)(_restored_kernels)
_of_tests = pytest.fixture(autouse=True)(_restored_kernels)
