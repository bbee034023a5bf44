"""The examples of docstrings run as they stand, and print what they say."""

import doctest
import importlib
import pkgutil

import headloom
import pytest
import torch

# One trains a whole comparison. What the other changes would hold for all tests after it; test_memory.py calls it in a fork.
LEFT_OUT = {"headloom._compare.compare", "headloom._training.keep_freed_memory"}


class Checker(doctest.OutputChecker):
    """Compares what is printed where the example says what that is."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def examples():
    found = []
    for _, name, _ in pkgutil.iter_modules(headloom.__path__, "headloom."):
        try:
            module = importlib.import_module(name)
        except ImportError:  # of a library that is not installed
            continue
        found += [test for test in doctest.DocTestFinder().find(module, name) if test.examples and test.name not in LEFT_OUT]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the run that the examples load."""
    torch.manual_seed(0)
    where = tmp_path_factory.mktemp("examples")
    layer = {"mixer": {"type": "mha", "heads": 8}, "channel": {"type": "swiglu"}}
    headloom.model(width=32, depth=1, tokenizer="bytes", max_length=64, layer=[layer]).save(where / "runs" / "text")
    (where / "runs" / "text" / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    return where


@pytest.mark.filterwarnings("ignore:the text has outgrown")
@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_example(test, folder, monkeypatch):
    if test.name == "headloom._tensorboard.tensorboard":
        pytest.importorskip("tensorboard")
    monkeypatch.chdir(folder)
    model = headloom.load("runs/text")
    tokens = torch.randint(256, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    surroundings = dict(headloom=headloom, torch=torch, model=model, tokens=tokens, prompt=tokens[:, :4], optimizer=optimizer, steps=2)
    test.globs = {"__name__": "__main__", **surroundings}
    said = []
    runner = doctest.DocTestRunner(Checker(), verbose=False)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
