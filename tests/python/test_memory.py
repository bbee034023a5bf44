"""Running out of memory, and what is refused before it can."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import cli_support
import headloom
from cli_support import ROOT
SENTENCEPIECE = """
import pathlib, sys
import torch, headloom
path = pathlib.Path(sys.argv[1])
tokenizer = headloom.Tokenizer(str(path))
assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
try:
    torch.empty(1 << 44)
except RuntimeError as error:
    assert "you tried to allocate 70368744177664 bytes" in str(error), error
    print("caught by", headloom.__file__)
"""


def run(*command, **options):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    (folder / "words.txt").write_text("the cat sat on the mat and the dog ran after the cat\n" * 40)
    cli_support.headloom("vocabulary", "words.txt", "--size", 300, "--out", "words.model", cwd=folder)
    (folder / "copy.toml").write_text(
        "[model]\nwidth = 16\ndepth = 2\n[[model.layer]]\nmixer = { type = 'mha', heads = 2 }\n"
        "[task]\ntype = 'copy'\ncount = 4\n[train]\nsteps = 2\nbatch = 8\neval_every = 2\n"
    )
    return folder


LIMIT = 6 << 30  # bytes of address space


def refused(command, *arguments, cwd, code=2, address_space=LIMIT):
    """The one sentence on standard error of a process that can have so much memory."""
    done = cli_support.run(command, *arguments, cwd=cwd, timeout=300, address_space=address_space)
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]
    assert len(lines) == 1 and lines[0].endswith("."), done.stderr
    return lines[0]


def test_torch_without_memory_is_an_exception_beside_headloom(place):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = run(sys.executable, "-c", SENTENCEPIECE, place / "words.model", env=environment)
    assert done.returncode == 0 and done.stdout.startswith("caught"), (done.returncode, done.stderr)


def test_the_installed_package_opens_sentencepiece_apart_too(place, tmp_path):
    shutil.copytree(ROOT / "python/headloom", tmp_path / "headloom", ignore=shutil.ignore_patterns("__pycache__"))
    done = run("cmake", "--install", ROOT / "build", "--prefix", tmp_path, "--component", "python")
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, "-c", SENTENCEPIECE, place / "words.model", env=environment, cwd="/")
    assert done.returncode == 0 and str(tmp_path) in done.stdout, (done.returncode, done.stderr)


ESTIMATE = "this training needs at least "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.width=4000000"], ESTIMATE),
        (["model.width=1000000000"], "parameters, expected at most 1e+18"),
        (["model.width=1073741824"], "parameters, expected at most 1e+18"),
        (["model.width=2000000000"], "'model.width' is 2000000000, expected at least 1 and at most 1073741824"),
        (["model.depth=10000", "model.width=256"], ESTIMATE),
        (["model.depth=100000"], "'model.depth' is 100000, expected at least 1 and at most 10000"),
        (["model.depth=9223372036854775807"], "'model.depth' is 9223372036854775807, expected at least 1"),
        (["train.batch=100000000"], ESTIMATE),
        (["train.batch=1000000000", "train.accumulate=1000000000"], ESTIMATE),
        (["train.batch=1099511627776"], "'train.batch' is 1099511627776, expected at least 1 and at most 1073741824"),
        (["model.vocabulary=1000000000"], ESTIMATE),
        (["model.layer=[{ channel = { type = 'mlp', hidden = 1000000000 } }]"], ESTIMATE),
        # Before a sequence is drawn, which would take minutes.
        (["task.count=100000000", "task.symbols=3"], ESTIMATE),
        (["task={ type = 'recall', length = 1000000000, pairs = 2 }"], ESTIMATE),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(place, changes, message):
    out = place / "refused"
    sets = [word for change in changes for word in ("--set", change)]
    sentence = refused("train", "copy.toml", "--out", out, *sets, cwd=place)
    assert message in sentence, sentence
    if message == ESTIMATE:
        assert "(parameters " in sentence and "this process can have 6.0 GiB (the limit of address space" in sentence
    assert not out.exists()


def test_describe_and_train_have_one_estimate(place):
    sets = ["--set", "train.batch=10000000"]
    described = json.loads(cli_support.headloom("describe", "copy.toml", "--json", *sets, cwd=place).stdout)["training_memory"]
    # Inputs and targets of a sequence, int64 each.
    assert described["batch_bytes"] % (2 * 8 * 10000000) == 0 and described["batch_bytes"] > 0
    said = cli_support.headloom("describe", "copy.toml", *sets, cwd=place).stdout
    peak, parts = re.search(r"training memory +(\S+ \S+) or more .*?: (.*)", said).groups()
    sentence = refused("train", "copy.toml", "--out", place / "refused", *sets, cwd=place)
    assert f"{ESTIMATE}{peak} of memory by estimate ({parts})" in sentence


def test_a_comparison_is_refused_before_it_trains(place):
    (place / "compare.toml").write_text(
        "seeds = [1]\nmatch_parameters = false\n[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 1\nbatch = 4\n"
        "[[models]]\nname = 'small'\n[[models]]\nname = 'large'\nmodel = { width = 400000 }\n"
        "[[tasks]]\nname = 'copy'\ntask = { type = 'copy', count = 4 }\n"
    )
    sentence = refused("compare", "compare.toml", "--out", "compared", cwd=place)
    assert "model 'large' on task 'copy': " + ESTIMATE in sentence
    assert not (place / "compared/runs").exists()


def test_what_does_not_fit_is_described_all_the_same(place):
    def described(*sets):
        return json.loads(cli_support.headloom("describe", "copy.toml", "--json", *sets, cwd=place, address_space=LIMIT).stdout)

    big = described("--set", "model.width=65536", "--set", "model.depth=100")
    assert big["parameters"] > 1e12 and big["training_memory"]["peak"] >= 16 * big["parameters"]
    assert "measured_state" not in big
    small = described("--length", "1073741824")
    assert small["training_memory"]["activations"] > 1e12
    assert "expected at most 1e+18" in refused("describe", "copy.toml", "--set", "model.width=1000000000", cwd=place)


def test_a_sequence_that_does_not_fit_is_not_drawn(place):
    cli_support.headloom("train", "copy.toml", "--out", "drawn", cwd=place)
    count = ["--set", "task.count=500000000"]
    sentence = refused("eval", "drawn", *count, cwd=place)
    assert "one sequence of the task needs at least 29.8 GiB of memory by estimate (1000000000 positions)" in sentence


# Tensors alone are within twice of the estimate. glibc does not reuse what was aligned to large pages for the next one.
FACTOR = 3


# A width of 64 is enough for bfloat16, whose products are slow on processors that have no instructions for them.
@pytest.mark.parametrize(
    ("layer", "changes"),
    [
        ("mixer = { type = 'mha' }", ""),
        ("mixer = { type = 'mha' }", "train.accumulate = 4"),
        ("mixer = { type = 'mha' }", "model.depth = 1"),
        ("mixer = { type = 'mha' }", "model.vocabulary = 30000\ntrain.batch = 8"),
        ("mixer = { type = 'mha' }", "train.activation_checkpointing = true\nmodel.depth = 8"),
        ("mixer = { type = 'dcmha' }", ""),
        ("mixer = { type = 'multi_token' }", ""),
        ("mixer = { type = 'retention' }", ""),
        ("mixer = { type = 'rwkv' }", ""),
        ("mixer = { type = 'mamba' }", ""),
        ("channel = { type = 'moe' }", ""),
        ("mixer = { type = 'mha' }", "model.width = 64\ntrain.batch = 48\ntrain.dtype = 'bfloat16'"),
        ("mixer = { type = 'rwkv' }", "model.width = 64\ntrain.batch = 48\ntrain.dtype = 'bfloat16'"),
    ],
)
def test_the_estimate_is_near_what_a_step_takes(tmp_path, layer, changes):
    (tmp_path / "run.toml").write_text(
        f"[model]\nwidth = 256\ndepth = 3\n[[model.layer]]\n{layer}\n"
        "[task]\ntype = 'copy'\ncount = 128\neval_sequences = 4\n[train]\nsteps = 1\nbatch = 16\neval_every = 1\n"
    )
    sets = [word for change in changes.splitlines() for word in ("--set", change.replace(" ", ""))]
    described = cli_support.headloom("describe", "run.toml", "--json", *sets, cwd=tmp_path)
    estimate = json.loads(described.stdout)["training_memory"]["peak"]
    done = run(cli_support.BINARY, "train", "run.toml", "--json", *sets, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["peak_memory_bytes"]
    assert measured > 80e6
    assert estimate / 2 < measured < FACTOR * estimate, (estimate / 2**20, measured / 2**20)


def big_step(place):
    """A configuration whose estimate fits an address space in which the libraries take a part, but not the rest."""
    (place / "big.toml").write_text(
        "[model]\nwidth = 256\ndepth = 4\n[[model.layer]]\n"
        "[task]\ntype = 'copy'\ncount = 128\n[train]\nsteps = 1\nbatch = 64\neval_every = 1\n"
    )
    described = json.loads(cli_support.headloom("describe", "big.toml", "--json", cwd=place).stdout)
    return int(described["training_memory"]["peak"]) + (16 << 20)


def test_running_out_of_memory_is_one_sentence(place):
    limit = big_step(place)
    sentence = refused("train", "big.toml", "--out", "big", cwd=place, code=1, address_space=limit)
    assert "out of memory: an allocation of " in sentence
    assert "the limit of address space" in sentence and "a smaller batch, length or model needs less" in sentence


def test_a_comparison_goes_on_after_a_run_without_memory(place):
    limit = big_step(place)
    (place / "both.toml").write_text(
        "seeds = [1]\nmatch_parameters = false\n[model]\nwidth = 256\ndepth = 4\n"
        "[train]\nsteps = 1\nbatch = 64\neval_every = 1\n"
        "[[models]]\nname = 'large'\n[[models]]\nname = 'small'\nmodel = { width = 16, depth = 1 }\n"
        "[[tasks]]\nname = 'copy'\ntask = { type = 'copy', count = 128, eval_sequences = 8 }\n"
    )
    cli_support.headloom("compare", "both.toml", "--out", "both", cwd=place, code=1, address_space=limit)
    assert "out of memory: an allocation of " in (place / "both/comparison.json").read_text()
    assert len(list((place / "both").rglob("metrics.jsonl"))) == 2


def test_python_refuses_more_samples_than_fit():
    layer = {"mixer": {"type": "mha", "heads": 1}}
    model = headloom.model(width=4, depth=1, vocabulary=1_000_000, max_length=32, layer=[layer])
    prompt = torch.ones(16, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_samples is 1099511627776, expected a whole number from 1 to 65536"):
        model.generate(prompt, 2, num_samples=2**40)
    with pytest.raises(ValueError, match="texts side by side need at least [0-9.]+ TiB of memory by estimate .scores"):
        model.generate(prompt, 2, num_samples=65536)
    assert model.generate(prompt[:1], 2, num_samples=2).shape == (2, 5)


# Importing torch takes longer than the steps of both ways, which are forks of one process for that.
STEPS = """
import os, resource
from concurrent.futures import ThreadPoolExecutor
import torch, headloom
keeps = os.fork() == 0
if keeps:
    assert headloom.keep_freed_memory()
else:
    assert os.wait()[1] == 0
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
parts = [torch.randn(10 << 20) for _ in range(2)]
def step():
    return torch.cat([part * 2 for part in parts]).sum()
def faults_of_step():
    before = faults()
    step()
    return faults() - before
def least():
    for _ in range(5):
        step()
    return min(faults_of_step() for _ in range(5))
print("keep" if keeps else "return", least(), ThreadPoolExecutor(1).submit(least).result(), flush=True)
"""


def test_keeps_freed_memory():
    """160 MiB a step are 40960 small pages. With kept memory a step has none, once the allocator has arranged itself:
    neither in the main thread nor in another one, whose memory glibc takes in pieces of 64 MiB."""
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0", "PYTHONPATH": str(ROOT / "python")}
    for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"):
        environment.pop(name, None)
    done = run(sys.executable, "-c", STEPS, env=environment)
    assert done.returncode == 0, done.stderr
    said = (line.split() for line in done.stdout.splitlines())
    faults = {option: [int(count) for count in counts] for option, *counts in said}
    assert faults.keys() == {"keep", "return"}
    for kept, returned in zip(faults["keep"], faults["return"], strict=True):
        assert 10 * kept < returned, faults
