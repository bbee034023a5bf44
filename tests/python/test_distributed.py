"""Several processes train one model: what they compute is what one computes, however they were started."""

import json
import shutil
import subprocess

import pytest
import torch
from cli_support import BINARY, ENVIRONMENT, TEXT, headloom, refused, weights
from distributed_support import LAUNCHERS, finish, free_port, has_gloo, model, start_rank, torchrun, train_together
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built"),
    pytest.mark.skipif(BINARY.exists() and not has_gloo(), reason="this Headloom was built without gloo"),
]

TRAIN = """
[train]
steps = 20
batch = 12
warmup = 4
lr = 5e-3
eval_every = 10
eval_sequences = 7
"""
MOE = '{ type = "moe", routed = 4, active = 2, shared = 1, hidden = 8, balance = 0.05, bias_speed = 0.01, scores = "sigmoid" }'
TASK = 'type = "copy"\nsymbols = 8\ncount = 6\neval_sequences = 7'
REVERSE = 'type = "sequence"\nkind = "reverse"\nsymbols = 8\ncount = 6\neval_sequences = 7'
# Sequences of several lengths, which a task pads to the longest of a batch.
RAGGED = 'type = "recall"\nvocabulary = 32\nsegments = ["16:2:9", "24:2:8"]\neval_sequences = 8'

# A model, its task, and the numbers of processes that train it. 1, 2, 3 and 4 of them share 12 sequences equally.
KINDS = {
    "mha": (model('{ type = "mha", heads = 2 }', extra="dropout = 0.1"), TASK, [1, 2, 3, 4]),
    "dcmha": (model('{ type = "dcmha", heads = 2 }'), TASK, [1, 2]),
    "moe": (model('{ type = "mha", heads = 2 }', MOE, "dropout = 0.1"), RAGGED, [1, 3]),
    "mamba": (model('{ type = "mamba" }'), TASK, [1, 2]),
    "simplified": (model('{ type = "shaped", heads = 2 }', block='{ type = "simplified" }'), TASK, [1, 2]),
    "reverse": (model('{ type = "mha", heads = 2 }', extra='kind = "encoder_decoder"\ndropout = 0.1'), REVERSE, [1, 3]),
}


def configure(folder):
    for name, (text, task, _) in KINDS.items():
        (folder / f"{name}.toml").write_text(text + f"[task]\n{task}\n" + TRAIN)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run) if "loss" in line]


def tensors(run, which="model", step=20):
    """Those of one file, or of the parts that several processes wrote: rows of the tensors' elements."""
    parts = [load_file(file) for file in sorted((run / f"checkpoints/step-{step}").glob(f"{which}*.safetensors"))]
    names = {name: None for part in parts for name in part}
    return {name: torch.cat([part[name].flatten() for part in parts if name in part]) for name in names}


def optimizer_files(run):
    return sorted((run / "checkpoints/step-20").glob("optimizer*.safetensors"))


def assert_same_course(one, several):
    """That two runs have the same figures, to rounding."""
    for a, b in zip(lines(one), lines(several), strict=True):
        assert (a["step"], a.get("tokens")) == (b["step"], b.get("tokens"))
        for key in ("loss", "balance_loss", "eval_loss", "train_loss"):
            assert (key in a) == (key in b)
            assert abs(a.get(key, 0) - b.get(key, 0)) < 1e-4, (key, a, b)
        for layer, load in a.get("expert_load", {}).items():
            assert load == pytest.approx(b["expert_load"][layer], abs=1e-5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Every run of KINDS, as NAME-PROCESSES."""
    folder = tmp_path_factory.mktemp("distributed")
    configure(folder)
    for name, (_, _, numbers) in KINDS.items():
        for number in numbers:
            train_together(folder, f"{name}.toml", f"{name}-{number}", number)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_several_processes_compute_what_one_does(place, name):
    _, _, (one, *several) = KINDS[name]
    assert len(losses(place / f"{name}-{one}")) == 20
    assert losses(place / f"{name}-{one}")[-1] < losses(place / f"{name}-{one}")[0]
    for number in several:
        assert_same_course(place / f"{name}-{one}", place / f"{name}-{number}")


def same_weights(run, other, step=20):
    return weights(run, step) == weights(other, step)


def test_every_launcher_starts_the_same_run(place):
    """Of the launchers that are not here, by the variables that they set."""
    processes = {}
    for launcher in LAUNCHERS:
        port, out = free_port(), f"as {launcher}"
        processes[launcher] = [start_rank(launcher, rank, 2, port, ["train", "mha.toml", "--out", out], place) for rank in range(2)]
    for launcher, both in processes.items():
        codes, said = finish(both)
        assert (codes, said) == ([0, 0], []), launcher
        assert same_weights(place / f"as {launcher}", place / "mha-2"), launcher


def test_torchrun_starts_the_same_run(place):
    done = torchrun(place, 2, "train", "mha.toml", "--out", "by torchrun")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss") == 1 and done.stderr.count("parameters, step 0 of 20") == 1
    assert same_weights(place / "by torchrun", place / "mha-2")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_mpirun_starts_the_same_run(place):
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-np", "2", str(BINARY), "train", "mha.toml", "--out", "by mpirun"]
    done = subprocess.run(command, cwd=place, env={**ENVIRONMENT, **allowed}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert same_weights(place / "by mpirun", place / "mha-2")


@pytest.mark.parametrize("number", [2, 3])
def test_the_optimisers_state_is_shared_out(place, number):
    """ZeRO-1: an odd number of elements is cut within tensors."""
    out = f"zero-{number}"
    train_together(place, "mha.toml", out, number, "--set", 'train.shard="optimizer"')
    assert_same_course(place / f"mha-{number}", place / out)
    for which in ("model", "optimizer"):
        whole, shared = (tensors(place / run, which=which) for run in (f"mha-{number}", out))
        assert whole.keys() == shared.keys()
        for name, value in whole.items():
            torch.testing.assert_close(shared[name], value, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    sizes = [sum(t.numel() for name, t in load_file(file).items() if name.startswith("mean.")) for file in optimizer_files(place / out)]
    assert len(sizes) == number and max(sizes) - min(sizes) <= 1


def test_a_part_of_a_checkpoint_is_missing(place):
    shutil.copytree(place / "zero-3", place / "part")
    missing = optimizer_files(place / "part")[1]
    missing.unlink()
    for number in (1, 3):
        done = train_together(place, "part", "part", number, "--checkpoint", 20, "--set", "train.steps=22", code=1)
        (said,) = [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]
        assert str(missing.relative_to(place)) in said and "The checkpoint of step 10 is intact" in said


def test_pieces_and_layers_that_are_computed_again(place):
    more = ["--set", "train.accumulate=2", "--set", "train.activation_checkpointing=true"]
    for number in (1, 3):
        train_together(place, "moe.toml", f"pieces-{number}", number, *more)
    assert_same_course(place / "pieces-1", place / "pieces-3")
    assert losses(place / "pieces-1") != losses(place / "moe-1")  # dropout differs


def test_metrics_say_what_each_process_used(place):
    for number in KINDS["mha"][2]:
        found = [line for line in lines(place / f"mha-{number}") if "eval_loss" in line]
        assert len(found) == 2
        for line in found:
            ranks = line.get("ranks", [])
            assert len(ranks) == (number if number > 1 else 0)
            assert all(rank["peak_memory_bytes"] > 0 and rank["waiting_seconds"] >= 0 for rank in ranks)


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_run_that_goes_on_gives_the_same_bits(place, shard):
    number, whole = (2, "mha-2") if shard == "none" else (3, "zero-3")
    again = f"again-{number}"
    shutil.copytree(place / whole, place / again)
    train_together(place, again, again, number, "--checkpoint", 10)
    assert weights(place / again, 20) == weights(place / whole, 20)
    assert [f.read_bytes() for f in optimizer_files(place / again)] == [f.read_bytes() for f in optimizer_files(place / whole)]
    assert losses(place / again) == losses(place / whole)


def test_a_run_goes_on_with_another_number_of_processes(place):
    constant = ["--set", 'train.schedule="constant"']
    train_together(place, "reverse.toml", "steady", 1, *constant)
    train_together(place, "reverse.toml", "changing", 2, *constant, "--set", "train.steps=8", "--set", 'train.shard="optimizer"')
    for number, steps in [(3, 14), (1, 20)]:
        train_together(place, "changing", "changing", number, "--resume", "--set", f"train.steps={steps}")
    assert len(losses(place / "changing")) == 20
    for a, b in zip(losses(place / "steady"), losses(place / "changing"), strict=True):
        assert abs(a - b) < 1e-4


def test_other_commands_read_the_checkpoints(tmp_path):
    (tmp_path / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    (tmp_path / "text.toml").write_text(TEXT)
    train_together(tmp_path, "text.toml", "run", 2)
    assert "loss" in headloom("eval", "run", "--sequences", 4, cwd=tmp_path).stdout
    assert headloom("generate", "run", "--prompt", "The ", "--tokens", 4, cwd=tmp_path).stdout.startswith("The ")
    headloom("export", "run", "--out", "hf", cwd=tmp_path)
    assert (tmp_path / "hf/model.safetensors").exists()


def test_describe_estimates_several_machines(place):
    options = ["--bandwidth", 8, "--speed", 0.5, "--length", 32]
    described = json.loads(headloom("describe", "mha.toml", "--machines", 4, *options, "--json", cwd=place).stdout)
    step, parameters = 3 * described["flops_per_token"] * 12 * 32, described["parameters"]
    rows = described["machines"]["numbers"]
    assert [row["machines"] for row in rows] == [1, 2, 4]
    for row in rows:
        n, none, sharded = row["machines"], row["none"], row["optimizer"]
        share = 4 * parameters * (n - 1) / n
        assert row["compute_seconds"] == pytest.approx(step / 0.5e9 / n)
        assert (none["bytes_sent"], sharded["bytes_sent"]) == pytest.approx((2 * share, 3 * share))
        assert none["reduce_seconds"] == sharded["reduce_seconds"] == pytest.approx(2 * share / 1e9)
        hidden = max(2 / 3 * row["compute_seconds"], none["reduce_seconds"])
        assert none["step_seconds"] == pytest.approx(row["compute_seconds"] / 3 + hidden)
        assert sharded["step_seconds"] == pytest.approx(none["step_seconds"] + share / 1e9)
        assert none["efficiency"] == pytest.approx(row["compute_seconds"] / none["step_seconds"])
        assert none["memory"] - sharded["memory"] == pytest.approx(8 * parameters * (n - 1) / n)
    assert rows[0]["none"]["efficiency"] == 1 and rows[0]["none"]["memory"] == described["training_memory"]["peak"]
    # At that number the sums take as long as the backward.
    limit = described["machines"]["hidden_up_to"]
    assert 2 / 3 * step / 0.5e9 / limit == pytest.approx(8 * parameters * (limit - 1) / limit / 1e9)
    shown = headloom("describe", "mha.toml", "--machines", 4, *options, cwd=place).stdout
    assert f"up to {limit:.3g} machines" in shown
    assert "needs --bandwidth" in refused("describe", "mha.toml", "--machines", 2, cwd=place)
    assert "expected a multiple of 5" in refused("describe", "mha.toml", "--machines", 5, *options, cwd=place)
