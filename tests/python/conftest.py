import os
import random

import pytest
import torch

# The tensors of these tests are tiny: a second thread would only wait, here and in the programs that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Two runs that a test compares must not take two routes to one product (src/ops/product/product.h).
os.environ["HEADLOOM_PRODUCTS"] = "blocked"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of bytes that mean nothing."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = random.Random(1)
    path.write_bytes(bytes(rng.randrange(1, 256) for _ in range(6000)))
    return path
