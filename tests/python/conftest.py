import os
import random

import pytest
import torch

# The tensors of these tests are tiny: a second thread would only wait, here and in the programs that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Two runs that a test compares must not take two routes to one product (src/ops/product/product.h).
os.environ["HEADLOOM_PRODUCTS"] = "blocked"


# Files that take long come first, so that one processor does not wait for the other at the end.
LONG = ["test_mixers", "test_distributed", "test_distributed_failures", "test_model", "test_serve_clients", "test_gpu_mixes"]
LONG += ["test_memory", "test_setup", "test_soak", "test_ddp", "test_dtensor", "test_symbols", "test_types"]


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):  # of pytest-xdist, which would sort files by their number of tests
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of bytes that mean nothing."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = random.Random(1)
    path.write_bytes(bytes(rng.randrange(1, 256) for _ in range(6000)))
    return path
