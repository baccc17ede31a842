import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _mlflow_is_not_installed() -> Iterator[None]:
    """A stage works without MLflow, whose store takes a second of each run; the tests of tracking have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)  # what makes `import mlflow` an ImportError
        yield
