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
steps = 12
batch = 12
warmup = 3
lr = 5e-3
eval_every = 6
eval_sequences = 7
"""
MOE = '{ type = "moe", routed = 4, active = 2, shared = 1, hidden = 8, balance = 0.05, bias_speed = 0.01, scores = "sigmoid" }'
TASK = 'type = "copy"\nsymbols = 8\ncount = 6\neval_sequences = 7'
REVERSE = 'type = "sequence"\nkind = "reverse"\nsymbols = 8\ncount = 6\neval_sequences = 7'
# Sequences of several lengths, which a task pads to the longest of a batch.
RAGGED = 'type = "recall"\nvocabulary = 32\nsegments = ["16:2:9", "24:2:8"]\neval_sequences = 8'

MASKED = 'type = "masked_text"\npaths = ["text"]\nlength = 32\neval_tokens = 224\nseparate_documents = false'


def layer(mixer, channel='{ type = "swiglu", hidden = 16 }', block='{ type = "sequential" }'):
    return f"[[model.layer]]\nblock = {block}\nmixer = {mixer}\nchannel = {channel}\n"


def hybrid(*layers, extra=""):
    """A model of different layers. The sum of gradients does not know which mixer they are of: mixers that bring the
    training of several processes nothing of their own share one."""
    return f"\n[model]\nwidth = 16\ndepth = {len(layers)}\n{extra}\n" + "".join(layers)


# A model, its task, and the numbers of processes that train it. 1, 2, 3 and 4 of them share 12 sequences equally.
KINDS = {
    "mha": (model('{ type = "mha", heads = 2 }', extra="dropout = 0.1"), TASK, [1, 2, 3, 4]),
    "moe": (model('{ type = "mha", heads = 2 }', MOE, "dropout = 0.1"), RAGGED, [1, 3]),
    "mamba": (model('{ type = "mamba" }'), TASK, [1, 2]),
    "reverse": (model('{ type = "mha", heads = 2 }', extra='kind = "encoder_decoder"\ndropout = 0.1'), REVERSE, [1, 3]),
    # Of a large table the processes exchange the rows that have gradients.
    "tied": (model('{ type = "mha", heads = 2 }', extra="vocabulary = 9000"), TASK, [1, 3]),
    "untied": (model('{ type = "mha", heads = 2 }', extra="vocabulary = 9000\ntied = false"), TASK, [1, 2]),
    "two tables": (model('{ type = "mha", heads = 2 }', extra='kind = "encoder_decoder"\nvocabulary = 900'), REVERSE, [1, 2]),
}

HEADS = ("dcmha", "talking_heads", "differential", "multi_token", "gla", "performer")
KINDS["mixers"] = (
    hybrid(
        *(layer(f'{{ type = "{name}", heads = 2 }}') for name in HEADS),
        *(layer(f'{{ type = "{name}" }}') for name in ("rwkv", "aft", "synthesizer")),
        layer('{ type = "shaped", heads = 2 }', block='{ type = "simplified" }'),
    ),
    TASK,
    [1, 2],
)
ENCODER = hybrid(layer('{ type = "linformer", heads = 2 }'), layer('{ type = "fnet" }'), extra='kind = "encoder"')
KINDS["both ways"] = (ENCODER, MASKED, [1, 2])
KINDS["retention"] = (model('{ type = "retention", heads = 2 }'), TASK, [1, 2])
KINDS["float64"] = (model('{ type = "retention", heads = 2 }'), TASK, [1, 2])


def train_of(name):
    """Retention's rate is lower, because the norms of heads with small outputs let rounding grow fast."""
    slow = TRAIN.replace("lr = 5e-3", "lr = 1e-3")
    return {"retention": slow, "float64": slow + 'dtype = "float64"\n'}.get(name, TRAIN)


def configure(folder):
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("the heads of a layer read the words of a text. " * 200)
    for name, (text, task, _) in KINDS.items():
        (folder / f"{name}.toml").write_text(text + f"[task]\n{task}\n" + train_of(name))


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run) if "loss" in line]


def tensors(run, which="model", step=12):
    """Those of one file, or of the parts that several processes wrote: rows of the tensors' elements."""
    parts = [load_file(file) for file in sorted((run / f"checkpoints/step-{step}").glob(f"{which}*.safetensors"))]
    names = {name: None for part in parts for name in part}
    return {name: torch.cat([part[name].flatten() for part in parts if name in part]) for name in names}


def assert_same_course(one, several, rounding=1e-4):
    """That two runs have the same figures, to rounding."""
    for a, b in zip(*([line for line in lines(run) if line["step"] > 0] for run in (one, several)), strict=True):
        assert (a["step"], a.get("tokens")) == (b["step"], b.get("tokens"))
        for key in ("loss", "balance_loss", "eval_loss", "train_loss"):
            assert (key in a) == (key in b)
            assert abs(a.get(key, 0) - b.get(key, 0)) < rounding, (key, a, b)
        # Training hardly notices that all gradients are too large by one factor.
        assert b.get("gradient_norm", 0) == pytest.approx(a.get("gradient_norm", 0), rel=1e-3)
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
    assert len(losses(place / f"{name}-{one}")) == 12
    assert losses(place / f"{name}-{one}")[-1] < losses(place / f"{name}-{one}")[0]
    for number in several:
        assert_same_course(place / f"{name}-{one}", place / f"{name}-{number}", 1e-9 if name == "float64" else 1e-4)


def same_weights(run, other, step=12):
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
    assert done.stdout.count("held-out loss") == 1 and done.stderr.count("parameters, step 0 of 12") == 1
    assert same_weights(place / "by torchrun", place / "mha-2")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_mpirun_starts_the_same_run(place):
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-np", "2", str(BINARY), "train", "mha.toml", "--out", "by mpirun"]
    done = subprocess.run(command, cwd=place, env={**ENVIRONMENT, **allowed}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert same_weights(place / "by mpirun", place / "mha-2")


SHARED = {
    "zero-2": ("mha", 2, "optimizer"),
    "zero-3": ("mha", 3, "optimizer"),
    "all-2": ("mha", 2, "parameters"),
    "all-moe": ("moe", 3, "parameters"),
    "all-mamba": ("mamba", 2, "parameters"),
    "all-reverse": ("reverse", 3, "parameters"),
    "all-float64": ("float64", 2, "parameters"),
}


@pytest.fixture(scope="module")
def shared(place):
    """Runs that share out the optimiser's state, or the parameters as well. Odd numbers of elements are cut within tensors."""
    for out, (name, number, shard) in SHARED.items():
        train_together(place, f"{name}.toml", out, number, "--set", f'train.shard="{shard}"')
    return place


@pytest.mark.parametrize("out", SHARED)
def test_what_processes_share_out_is_the_same(shared, out):
    name, number, shard = SHARED[out]
    plain = f"{name}-{number}"
    assert_same_course(shared / plain, shared / out)
    for which in ("model", "optimizer"):
        whole, parts = (tensors(shared / run, which=which) for run in (plain, out))
        assert whole.keys() == parts.keys()
        for tensor, value in whole.items():
            torch.testing.assert_close(parts[tensor], value, atol=1e-5, rtol=1e-4, msg=lambda text, tensor=tensor: f"{tensor}: {text}")
    count = sum(t.numel() for t in tensors(shared / plain).values())
    kinds = {"optimizer": "mean.", "model": ""} if shard == "parameters" else {"optimizer": "mean."}
    for which, prefix in kinds.items():
        files = sorted((shared / out / "checkpoints/step-12").glob(f"{which}-*.safetensors"))
        sizes = [sum(t.numel() for tensor, t in load_file(file).items() if tensor.startswith(prefix)) for file in files]
        assert len(sizes) == number and max(sizes) < 0.05 * count + count / number, sizes


CUT = {
    "mha": model('{ type = "mha", heads = 4, kv_heads = 2, qk_norm = true }', extra="dropout = 0.1\nbias = true"),
    "dcmha": model('{ type = "dcmha", heads = 4, groups = 2, static = "add" }', block='{ type = "sequential", short_conv = 3 }'),
    "mixers": hybrid(
        layer('{ type = "differential", heads = 4 }', '{ type = "swiglu", hidden = 16, gate_groups = 4 }', '{ type = "parallel" }'),
        layer('{ type = "multi_token", heads = 4, conv_layers = "all", gate = "full" }'),
        layer('{ type = "rwkv" }', '{ type = "rwkv_channel", hidden = 16 }'),
        layer('{ type = "gla", heads = 4 }', MOE),
    ),
    "retention": model('{ type = "retention", heads = 4 }', '{ type = "mlp", hidden = 16 }'),
    "reverse": model('{ type = "mha", heads = 4 }', extra='kind = "encoder_decoder"\ndropout = 0.1'),
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Runs of one process, of two that share out the layers, and of two pairs of these that share the batch."""
    folder = tmp_path_factory.mktemp("cut")
    for name, text in CUT.items():
        (folder / f"{name}.toml").write_text(text + f"[task]\n{REVERSE if name == 'reverse' else TASK}\n" + train_of(name))
        train_together(folder, f"{name}.toml", f"{name}-one", 1)
        train_together(folder, f"{name}.toml", f"{name}-2", 2, "--set", "train.tensor_parallel=2")
    for name in ("dcmha", "mixers"):
        train_together(folder, f"{name}.toml", f"{name}-4", 4, "--set", "train.tensor_parallel=2")
    return folder


@pytest.mark.parametrize("name", CUT)
def test_processes_that_share_out_the_layers_compute_what_one_does(cut, name):
    for several in [run for run in (cut / f"{name}-2", cut / f"{name}-4") if run.exists()]:
        assert_same_course(cut / f"{name}-one", several)
        norms = [[line["gradient_norm"] for line in lines(run) if "gradient_norm" in line] for run in (cut / f"{name}-one", several)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)
        sizes = [sum(t.numel() for t in load_file(file).values()) for file in sorted((several / "checkpoints/step-12").glob("model-*"))]
        assert len(sizes) == 2 and sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_a_cut_run_goes_on_with_the_same_bits_and_with_other_numbers(cut):
    for number in (2, 4):
        whole, again = f"dcmha-{number}", f"again-{number}"
        shutil.copytree(cut / whole, cut / again)
        train_together(cut, again, again, number, "--checkpoint", 6)
        files = [
            {file.name: file.read_bytes() for file in (cut / run / "checkpoints/step-12").glob("*.safetensors")}
            for run in (whole, again)
        ]
        assert files[0] == files[1] and len(files[0]) == 4
    constant = ["--set", 'train.schedule="constant"']
    train_together(cut, "reverse.toml", "steady", 1, *constant)
    train_together(cut, "reverse.toml", "changing", 2, *constant, "--set", "train.steps=6", "--set", "train.tensor_parallel=2")
    for number, among, shard, steps in [(4, 4, "none", 8), (3, 1, "parameters", 10), (2, 2, "none", 11), (1, 1, "none", 12)]:
        shared = ["--set", f"train.tensor_parallel={among}", "--set", f'train.shard="{shard}"']
        train_together(cut, "changing", "changing", number, "--resume", "--set", f"train.steps={steps}", *shared)
    assert losses(cut / "changing") == pytest.approx(losses(cut / "steady"), abs=1e-4)


def test_other_commands_read_a_cut_run_and_a_cut_run_begins_with_weights(cut):
    found = [json.loads(headloom("eval", f"dcmha-{run}", "--sequences", 4, "--json", cwd=cut).stdout) for run in ("one", "2")]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], abs=1e-4)
    for number, out in [(1, "from-1"), (2, "from-2")]:
        train_together(cut, "mha.toml", out, number, "--from", "mha-one", "--set", f"train.tensor_parallel={number}")
    assert_same_course(cut / "from-1", cut / "from-2")
    assert losses(cut / "from-1")[0] < losses(cut / "mha-one")[0]


@pytest.mark.parametrize(
    "number, options, said",
    [
        (3, ["train.tensor_parallel=2"], "'train.tensor_parallel' is 2, which does not divide the 3 processes of this run"),
        (1, ["train.tensor_parallel=2"], "'train.tensor_parallel' is 2, which does not divide the 1 process of this run"),
        (4, ["train.tensor_parallel=4"], "groups is 2, which the 4 processes of train.tensor_parallel cannot share equally"),
        (2, ["train.tensor_parallel=2", 'train.shard="optimizer"'], "'train.shard' is \"optimizer\", expected \"none\""),
        (2, ["train.tensor_parallel=2", 'model.layer=[{mixer={type="mamba"}}]'], "mamba cannot share out its heads"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out(cut, number, options, said):
    done = train_together(cut, "dcmha.toml", "refused", number, *[part for o in options for part in ("--set", o)], code=2)
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]
    assert said in sentence and not (cut / "refused").exists()


CONTEXT = {
    "mha": model('{ type = "mha", heads = 4, kv_heads = 2 }', MOE, "dropout = 0.1"),
    "learned": hybrid(
        layer('{ type = "mha", heads = 2 }'),
        layer('{ type = "mamba" }', '{ type = "none" }'),
        extra='position = { type = "learned" }\nmax_length = 24\nbias = true',
    ),
    "retention": model('{ type = "retention", heads = 2 }', '{ type = "mlp", hidden = 16 }', "dropout = 0.1\nequal_init = true"),
}
TOGETHER = ["--set", "train.context_parallel=2"]


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """Runs of one process, of two that share every sequence, and of two pairs of these that share the batch."""
    folder = tmp_path_factory.mktemp("context")
    for name, text in CONTEXT.items():
        (folder / f"{name}.toml").write_text(text + f"[task]\n{RAGGED}\n" + train_of(name))
        train_together(folder, f"{name}.toml", f"{name}-one", 1)
        train_together(folder, f"{name}.toml", f"{name}-2", 2, *TOGETHER)
    train_together(folder, "mha.toml", "mha-4", 4, *TOGETHER, "--set", "train.activation_checkpointing=true")
    train_together(folder, "retention.toml", "retention-4", 4, *TOGETHER, "--set", "train.tensor_parallel=2")
    train_together(folder, "learned.toml", "learned-4", 4, "--set", "train.context_parallel=4", "--set", 'train.shard="parameters"')
    return folder


@pytest.mark.parametrize("name", CONTEXT)
def test_processes_that_share_every_sequence_compute_what_one_does(context, name):
    for several in [run for run in (context / f"{name}-2", context / f"{name}-4") if run.exists()]:
        assert_same_course(context / f"{name}-one", several)


def test_a_run_that_shares_every_sequence_goes_on_with_the_same_bits_and_alone(context):
    shutil.copytree(context / "learned-2", context / "again")
    train_together(context, "again", "again", 2, "--checkpoint", 6)
    assert same_weights(context / "learned-2", context / "again")
    constant = ["--set", 'train.schedule="constant"']
    train_together(context, "mha.toml", "steady", 1, *constant)
    train_together(context, "mha.toml", "changing", 2, *constant, *TOGETHER, "--set", "train.steps=8")
    train_together(context, "changing", "changing", 1, "--resume", "--set", "train.steps=12", "--set", "train.context_parallel=1")
    assert losses(context / "changing") == pytest.approx(losses(context / "steady"), abs=1e-4)


@pytest.mark.parametrize(
    "number, options, said",
    [
        (3, [], "'train.context_parallel' is 2, which does not divide the 3 processes of this run"),
        (2, ["train.tensor_parallel=2"], "which does not divide the 1 process with the same part of the layers"),
        (2, ['model.layer=[{mixer={type="dcmha",heads=2}}]'], "dcmha cannot share out the positions of a sequence"),
    ],
)  # fmt: skip
def test_sequences_that_cannot_be_shared(context, number, options, said):
    done = train_together(context, "mha.toml", "refused", number, *TOGETHER, *[part for o in options for part in ("--set", o)], code=2)
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]
    assert said in sentence and not (context / "refused").exists()


def test_sequences_of_odd_lengths_are_not_shared(context):
    (context / "odd.toml").write_text(CONTEXT["retention"] + f"[task]\n{TASK.replace('count = 6', 'count = 5')}\n" + TRAIN)
    done = train_together(context, "odd.toml", "odd", 2, *TOGETHER, code=2)
    assert "but the sequences have 10 positions, expected a multiple of 4" in done.stderr


def test_shared_parameters_in_pieces_and_computed_again(shared):
    more = ["--set", "train.accumulate=2", "--set", "train.activation_checkpointing=true"]
    train_together(shared, "reverse.toml", "pieces-plain", 2, *more)
    train_together(shared, "reverse.toml", "pieces-shared", 2, *more, "--set", 'train.shard="parameters"')
    assert_same_course(shared / "pieces-plain", shared / "pieces-shared")


def test_shared_parameters_have_memory_while_their_layer_computes(tmp_path):
    """The training state of 12.6M parameters takes 16 bytes each; a process alone has all of it."""
    mixers = model('{ type = "mha", heads = 4 }', '{ type = "swiglu" }')
    mixers = mixers.replace("width = 16", "width = 256").replace("depth = 2", "depth = 16")
    assert "width = 256" in mixers and "depth = 16" in mixers
    train = TRAIN.replace("steps = 12", "steps = 2").replace("batch = 12", "batch = 4")
    (tmp_path / "deep.toml").write_text(mixers + f"[task]\n{TASK}\n" + train)
    peak = {}
    for shard in ("none", "parameters"):
        train_together(tmp_path, "deep.toml", shard, 4, "--set", f'train.shard="{shard}"')
        (*_, last) = [line["ranks"] for line in lines(tmp_path / shard) if "ranks" in line]
        peak[shard] = max(rank["peak_memory_bytes"] for rank in last)
    assert peak["parameters"] < 0.6 * peak["none"], peak


@pytest.mark.parametrize("which", ["optimizer", "model"])
def test_a_part_of_a_checkpoint_is_missing(shared, which):
    part = f"part-{which}"
    shutil.copytree(shared / "all-moe", shared / part)
    missing = shared / part / f"checkpoints/step-12/{which}-00002-of-00003.safetensors"
    missing.unlink()
    for number in (1, 3):
        done = train_together(shared, part, part, number, "--checkpoint", 12, "--set", "train.steps=14", code=1)
        (said,) = [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]
        assert str(missing.relative_to(shared)) in said and "The checkpoint of step 6 is intact" in said


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
        steps = [line for line in lines(place / f"mha-{number}") if "step_seconds" in line]
        assert steps and all(line.get("processes", 1) == number for line in steps)


def test_a_run_that_ended_before_its_first_step_goes_on_with_as_many(place, tmp_path):
    train_together(tmp_path, place / "mha.toml", "run", 2, "--set", "train.steps=1", "--set", "train.eval_every=1")
    metrics = tmp_path / "run/metrics.jsonl"
    first = metrics.read_text().splitlines()[0]
    assert json.loads(first) == {"step": 0, "processes": 2}
    for left in (first + "\n", ""):  # what is there once the run has begun, and nothing, as of one process
        metrics.write_text(left)
        shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)
        command = "headloom train run --resume" + (" --processes 2" if left else "")
        assert f" before its first step of 1. Go on with:\n    {command}\n" in headloom("report", "run", cwd=tmp_path).stdout
    train_together(tmp_path, "run", "run", 2, "--resume")
    assert json.loads(metrics.read_text().splitlines()[0]) == {"step": 0, "processes": 2}


@pytest.mark.parametrize("whole, number", [("mha-2", 2), ("zero-3", 3), ("all-2", 2)])
def test_a_run_that_goes_on_gives_the_same_bits(shared, whole, number):
    again = f"again-{whole}"
    shutil.copytree(shared / whole, shared / again)
    train_together(shared, again, again, number, "--checkpoint", 6)
    contents = [
        {file.name: file.read_bytes() for file in (shared / run / "checkpoints/step-12").glob("*.safetensors")} for run in (whole, again)
    ]
    assert contents[0] == contents[1] and len(contents[0]) >= 2
    assert losses(shared / again) == losses(shared / whole)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_run_goes_on_with_another_number_of_processes(place, shard):
    constant, out = ["--set", 'train.schedule="constant"'], f"changing-{shard}"
    if not (place / "steady").exists():
        train_together(place, "reverse.toml", "steady", 1, *constant)
    train_together(place, "reverse.toml", out, 2, *constant, "--set", "train.steps=8", "--set", f'train.shard="{shard}"')
    for number, steps in [(3, 10), (1, 12)]:
        train_together(place, out, out, number, "--resume", "--set", f"train.steps={steps}")
    assert len(losses(place / out)) == 12
    for a, b in zip(losses(place / "steady"), losses(place / out), strict=True):
        assert abs(a - b) < 1e-4


def test_other_commands_read_the_checkpoints(tmp_path):
    (tmp_path / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    (tmp_path / "text.toml").write_text(TEXT)
    train_together(tmp_path, "text.toml", "run", 2, "--set", 'train.shard="parameters"')
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
        everything = row["parameters"]
        assert everything["bytes_sent"] == pytest.approx(4 * share) and everything["gather_seconds"] == pytest.approx(2 * share / 1e9)
        forward = max(row["compute_seconds"] / 3, share / 1e9)
        assert everything["step_seconds"] == pytest.approx(forward + max(2 / 3 * row["compute_seconds"], 3 * share / 1e9))
    assert rows[0]["none"]["efficiency"] == 1 and rows[0]["none"]["memory"] == described["training_memory"]["peak"]
    for row in rows[1:]:
        # What the layers of two mixers sum, in the forward and in the backward.
        tensor, n = row.get("tensor_parallel"), row["machines"]
        assert (tensor is None) == (n == 4)  # two heads
        if tensor is None:
            continue
        summed = 2 * 2 * 2 * 4 * 12 * 32 * 16
        assert tensor["bytes_sent"] == pytest.approx(2 * summed * (n - 1) / n)
        assert row["compute_seconds"] < tensor["step_seconds"] - tensor["reduce_seconds"] < 2 * row["compute_seconds"]
    deep = ["--set", "model.width=256", "--set", "model.depth=16"]
    rows = json.loads(headloom("describe", "mha.toml", "--machines", 4, *options, *deep, "--json", cwd=place).stdout)["machines"]["numbers"]
    assert all(row["parameters"]["memory"] < row["optimizer"]["memory"] < row["none"]["memory"] for row in rows[1:])
    assert rows[1]["tensor_parallel"]["memory"] < rows[1]["none"]["memory"]
    # At that number the sums take as long as the backward.
    limit = described["machines"]["hidden_up_to"]
    assert 2 / 3 * step / 0.5e9 / limit == pytest.approx(8 * parameters * (limit - 1) / limit / 1e9)
    shown = headloom("describe", "mha.toml", "--machines", 4, *options, cwd=place).stdout
    assert f"up to {limit:.3g} machines" in shown
    assert "needs --bandwidth" in refused("describe", "mha.toml", "--machines", 2, cwd=place)
    assert "expected a multiple of 5" in refused("describe", "mha.toml", "--machines", 5, *options, cwd=place)
