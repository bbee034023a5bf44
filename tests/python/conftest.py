import random

import pytest
import torch

# The tensors of these tests are tiny: a second thread would only wait.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of bytes that mean nothing."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = random.Random(1)
    path.write_bytes(bytes(rng.randrange(1, 256) for _ in range(6000)))
    return path
