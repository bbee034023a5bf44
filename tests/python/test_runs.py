"""Runs on disk: training longer, fine-tuning, moving, several processes, comparisons that grow, a user's own text."""

import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess

import pytest
from cli_support import BINARY, COMPARE, ENVIRONMENT, ROOT, TEXT, files, headloom, make_place, refused, wait_for
from safetensors.numpy import load_file

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

TUNE = """
[task]
type = "text"
paths = ["corpus.txt"]
length = 16
eval_tokens = 256
[train]
steps = 2
batch = 4
eval_every = 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("runs"))


def started(*arguments, cwd, until):
    """A process of the command line, once until() holds."""
    process = subprocess.Popen(
        [str(BINARY), *map(str, arguments)], cwd=cwd, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(until, process)
    return process


def test_a_finished_run_is_trained_longer(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    earlier = (run / "config.toml").read_text()
    done = headloom("train", run, "--resume", "--set", "train.steps=9", cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("goes on with")]
    assert len(lines) == 1
    assert "train.steps = 9 (was 6); the learning rate is " in lines[0] and " at step 7 (it was " in lines[0]
    assert (run / "config.until-step-6.toml").read_text() == earlier
    assert "steps = 9" in (run / "config.toml").read_text()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if "step_seconds" in line]
    assert steps == list(range(1, 10))
    done = headloom("train", run, "--resume", cwd=tmp_path)
    assert "\nnothing is left to train: the run is finished; --set train.steps=N with more steps trains it longer\n" in done.stderr
    # What says which data come next stays.
    message = refused("train", run, "--resume", "--set", "train.batch=2", cwd=tmp_path)
    assert "'train.batch' = 4, now it is 'train.batch' = 2" in message


def test_what_is_edited_in_a_run_is_refused_or_said(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    config = run / "config.toml"
    written = config.read_text()

    def edit(*lines):
        text = written
        for old, new in lines:
            assert text.count(f"\n{old}\n") == 1
            text = text.replace(f"\n{old}\n", f"\n{new}\n")
        config.write_text(text)
        return text

    for old, new, key in [("batch = 4", "batch = 2", "train.batch"), ("length = 16", "length = 8", "task.length")]:
        edit((old, new))
        message = refused("report", run, cwd=tmp_path)
        assert f"config.toml: the run was trained with '{key}' = {old.split()[-1]}, now it is '{key}' = {new.split()[-1]};" in message
        text = edit((old, new), ("steps = 6", "steps = 9"))
        message = refused("train", run, "--resume", cwd=tmp_path)
        assert f"the run was made with '{key}' = {old.split()[-1]}, now it is '{key}' = {new.split()[-1]};" in message
        assert config.read_text() == text and not list(run.glob("config.until*"))
    edit(("steps = 6", "steps = 9"), ("clip = 1.0", "clip = 0.5"), ("dropout = 0.0", "dropout = 0.1"))
    assert "clip = 0.5" in config.read_text() and "dropout = 0.1" in config.read_text()
    done = headloom("train", run, "--resume", cwd=tmp_path)
    for change in ("train.steps = 9 (was 6)", "train.clip = 0.5 (was 1.0)", "model.dropout = 0.1 (was 0.0)"):
        assert change in done.stderr
    assert (run / "config.until-step-6.toml").read_text() == written
    headloom("report", place / "runs/text", run, "--out", tmp_path / "report.html", cwd=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "other options until step 6 (dropout = 0.0, clip = 1.0" in page


def test_a_run_begins_with_the_weights_of_another(place, tmp_path):
    (place / "tune.toml").write_text(TUNE)
    run = tmp_path / "run"
    done = headloom("train", "tune.toml", "--from", "runs/text", "--checkpoint", "last", "--out", run, cwd=place)
    assert "the weights are those of runs/text, step 6" in done.stderr
    config = (run / "config.toml").read_text()
    assert config.startswith(f"# Began with the weights of {place / 'runs/text'}, step 6.\n") and "hidden = 16" in config
    before = json.loads((place / "runs/text/metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    after = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    assert after < before + 0.01
    headloom("train", run, "--resume", "--set", "train.steps=4", cwd=tmp_path)
    # [model] may say again what the model is, and nothing else.
    other = tmp_path / "other"
    message = refused("train", "text.toml", "--from", "runs/text", "--set", "model.depth=3", "--out", other, cwd=place)
    assert "runs/text: its weights are of a model with 'model.depth' = 2" in message and "'model.depth' = 3" in message
    headloom("train", "text.toml", "--from", "runs/text", "--set", "model.dropout=0.1", "--out", other, cwd=place)
    # What it leaves out is the other run's.
    (place / "dropout.toml").write_text("[model]\ndropout = 0.2\n" + TUNE)
    headloom("train", "dropout.toml", "--from", "runs/text", "--out", tmp_path / "dropout", cwd=place)
    config = (tmp_path / "dropout/config.toml").read_text()
    assert "dropout = 0.2" in config and "width = 16" in config and "hidden = 16" in config
    message = refused("train", "tune.toml", "--from", "3", cwd=place)
    assert "--checkpoint 3" in message


def test_plain_attention_goes_on_as_dcmha(place, tmp_path):
    change = ["--set", 'model.layer.0.mixer.type="dcmha"', "--set", "train.lr=1e-9"]
    headloom("train", "text.toml", "--from", "runs/text", "--checkpoint", "last", *change, "--out", tmp_path / "run", cwd=place)
    before = json.loads((place / "runs/text/metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    after = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    assert after == pytest.approx(before, abs=0.02)
    old, new = (load_file(run / "checkpoints/step-6/model.safetensors") for run in (place / "runs/text", tmp_path / "run"))
    assert new.keys() - old.keys() and not old.keys() - new.keys()
    for name in old:
        assert new[name] == pytest.approx(old[name], abs=1e-5), name
    # Other differences are refused as ever, and nothing else becomes another mixer.
    other = ["--out", tmp_path / "other"]
    message = refused("train", "text.toml", "--from", "runs/text", *change, "--set", "model.layer.0.mixer.heads=4", *other, cwd=place)
    assert "'model.layer.0.mixer.heads' = 2" in message and "'model.layer.0.mixer.heads' = 4" in message
    message = refused("train", "text.toml", "--from", "runs/text", *change, "--set", "model.layer.0.mixer.window=4", *other, cwd=place)
    assert "'model.layer.0.mixer.window' = 4" in message, message
    message = refused("train", "text.toml", "--from", tmp_path / "run", *other, cwd=place)
    assert "'model.layer.0.mixer.type' = 'dcmha'" in message


def test_an_imported_checkpoint_is_tuned(place, tmp_path):
    headloom("export", "runs/text", "--out", tmp_path / "hub", cwd=place)
    headloom("import", tmp_path / "hub", "--out", tmp_path / "imported", cwd=place)
    (place / "tune.toml").write_text(TUNE)
    headloom("train", "tune.toml", "--from", tmp_path / "imported", "--out", tmp_path / "run", cwd=place)
    message = refused("import", tmp_path / "hub", "--out", tmp_path / "hub", cwd=place)
    assert message.endswith(
        "hub: holds 'config.json', as the folder of a Hugging Face model does; choose another folder for the run."
    )
    # The tokenizer came along.
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (tmp_path / "hub/tokenizer.json").read_bytes()
    headloom("eval", tmp_path / "run", cwd=tmp_path)
    paths = f"task.paths=['{place / 'corpus.txt'}']"
    message = refused("train", tmp_path / "imported", "--resume", "--set", paths, cwd=tmp_path)
    assert "has weights alone" in message and f"headloom train CONFIG --from {tmp_path / 'imported'}" in message
    assert "headloom import " in refused("train", "tune.toml", "--from", tmp_path / "hub", cwd=place, code=1)


def test_weights_that_are_not_finite_are_named(place, tmp_path):
    headloom("export", "runs/text", "--out", tmp_path / "hub", cwd=place)
    file = tmp_path / "hub/model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\xff\xff\xff\x7f")  # a NaN
    run = tmp_path / "run"
    headloom("import", tmp_path / "hub", "--out", run, cwd=place)
    (place / "tune.toml").write_text(TUNE)
    held_out = ["--set", "task.paths=['corpus.txt']", "--set", "task.length=16"]
    said = rf"{run}: the weights of step 0 have values that are not finite, first in '[\w.]+': they are damaged, or .*"
    for command in [
        ["eval", run, *held_out],
        ["eval", run, "--json", "--quantize", "int8", *held_out],
        ["generate", run, "--prompt", "The ", "--quantize", "int4"],
        ["analyze", run, "--text", "The quick"],
        ["analyze", run, "rank", "--text", "The quick"],
        ["train", "tune.toml", "--from", run, "--out", tmp_path / "tuned"],
    ]:
        assert re.fullmatch(said, refused(*command, cwd=place, code=1))
    assert not (tmp_path / "tuned").exists()
    # The sentence has a line to itself where the prompt stands already, and no other where none does.
    for prompt, shown in [("The ", "The \n"), ("The\n", "The\n"), ("", "")]:
        done = headloom("generate", run, "--prompt", prompt, cwd=place, code=1)
        assert done.stdout == shown and done.stderr.startswith("headloom: the model's scores of the next token are not finite")


def test_a_file_that_may_not_grow_is_an_error(place, tmp_path):
    """A limit of the shell (ulimit -f) sends a signal that ends a process unless it is ignored."""
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)), "env": ENVIRONMENT}
    message = refused("train", "tune.toml", "--from", "runs/text", "--out", tmp_path / "run", cwd=place, code=1, **limited)
    assert "cannot be written: File too large" in message
    message = refused("export", "runs/text", "--out", tmp_path / "hub", cwd=place, code=1, **limited)
    assert "cannot be written: File too large" in message


def test_a_run_is_moved_and_its_data_too(place, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    shutil.copy(place / "corpus.txt", here)
    headloom("vocabulary", "corpus.txt", "--size", 290, "--out", "my.model", cwd=here)
    (here / "text.toml").write_text(TEXT.replace("length = 16", 'length = 16\ntokenizer = "my.model"'))
    headloom("train", "text.toml", cwd=here)
    expected = json.loads(headloom("eval", "runs/text", "--json", cwd=here).stdout)["loss"]
    there.mkdir()
    (here / "runs/text").rename(there / "moved")
    (here / "my.model").unlink()

    # From anywhere, without the tokenizer's original.
    assert json.loads(headloom("eval", there / "moved", "--json", cwd=tmp_path).stdout)["loss"] == expected
    headloom("train", "moved", "--resume", "--set", "train.steps=8", cwd=there)
    headloom("describe", "moved", cwd=there)
    headloom("train", "moved/config.toml", "--out", "again", "--set", "train.steps=2", cwd=there)

    (here / "corpus.txt").rename(there / "corpus.txt")
    for command in [["eval", "moved"], ["train", "moved", "--resume", "--set", "train.steps=9"]]:
        message = refused(*command, cwd=there, code=1)
        assert f"there is no file or folder '{here / 'corpus.txt'}', which 'task.paths' names" in message
        assert "--set 'task.paths=[\"PATH\"]'" in message
    moved = "task.paths=[\"corpus.txt\"]"
    headloom("train", "moved", "--resume", "--set", "train.steps=9", "--set", moved, cwd=there)
    assert str(there / "corpus.txt") in (there / "moved/config.toml").read_text()
    headloom("describe", "moved", cwd=tmp_path / "there")


def test_json_has_a_name_that_is_no_utf8(place, tmp_path):
    shutil.copytree(place / "runs/text", os.fsdecode(os.fsencode(tmp_path) + b"/run\xff"))
    done = subprocess.run([BINARY, "eval", b"run\xff", "--json"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=True)
    assert json.loads(done.stdout)["run"] == "run\ufffd"


def test_a_run_goes_on_with_its_own_data(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / f"texts/{name}.txt").write_text(f"{name} quick brown fox jumps over the lazy dog.\n" * 20)
    (tmp_path / "text.toml").write_text(TEXT.replace("corpus.txt", "texts"))
    headloom("train", "text.toml", cwd=tmp_path)
    before = files(tmp_path / "runs")
    more = ["train", "runs/text", "--resume", "--set", "train.steps=8"]
    fewer = refused(*more, "--set", 'task.paths=["texts/a.txt", "texts/b.txt"]', cwd=tmp_path)
    assert "the data of 'task.paths' are not those that the run was trained on (2584 tokens, now 1723); go on" in fewer, fewer
    assert "headloom train CONFIG --from runs/text." in fewer
    # In the same place, and of the same length.
    text = tmp_path / "texts/b.txt"
    written = text.read_text()
    text.write_text(written.replace("quick", "quiet"))
    others = "are not those that the run was trained on, or are in another order; go on"
    assert others in refused(*more, cwd=tmp_path)
    assert files(tmp_path / "runs") == before
    text.write_text(written)
    own = headloom("eval", "runs/text", cwd=tmp_path).stderr
    assert "are not those" not in own, own
    text.rename(tmp_path / "texts/d.txt")  # which now comes last
    assert others in refused(*more, cwd=tmp_path)
    # What is now held out was trained on.
    told = "runs/text: the data of 'task.paths' are not those that the run was trained on, or are in another order; what is held"
    assert told in headloom("eval", "runs/text", cwd=tmp_path).stderr
    assert told in headloom("analyze", "runs/text", "maps", cwd=tmp_path).stderr
    message = refused("report", "runs/text", cwd=tmp_path)
    assert message.endswith("in another order; a report needs the data of its runs: restore them."), message
    (tmp_path / "texts/d.txt").rename(text)
    (tmp_path / "texts").rename(tmp_path / "moved")
    headloom(*more, "--set", 'task.paths=["moved"]', cwd=tmp_path)
    state = tmp_path / "runs/text/checkpoints/step-8/state.json"
    assert json.loads(state.read_text())["data"]["count"] == 2584


def test_a_new_run_writes_over_nothing(place, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name, why in {
        "metrics.jsonl": "which would be overwritten",
        "result.json": "which would be overwritten",
        "config.json": "as the folder of a Hugging Face model does",
        "comparison.json": "as the folder of a comparison does",
    }.items():
        (other / name).write_text("mine")
        message = refused("train", "text.toml", "--out", other, cwd=place)
        assert message == f"{other}: holds '{name}', {why}; choose another folder for the run."
        message = refused("train", "text.toml", "--out", other / name, cwd=place)
        assert f"{name}: is a file, expected a folder for the run" in message
        assert files(other) == {name: b"mine"}
        (other / name).unlink()
    # Nor where a run could have stopped before its first checkpoint.
    (other / "config.toml").write_text("mine = 1\n")
    (other / "metrics.jsonl").write_text('{"mine": 1}\n')
    message = refused("train", "text.toml", "--out", other, cwd=place)
    assert message.startswith(f"{other}: holds 'metrics.jsonl', which is not a run's and would be overwritten;")
    assert files(other) == {"config.toml": b"mine = 1\n", "metrics.jsonl": b'{"mine": 1}\n'}


def test_a_new_run_begins_beside_other_files(place, tmp_path):
    """Its configuration, its tokenizer, a log and what a file system puts there."""
    new = tmp_path / "new"
    (new / "lost+found").mkdir(parents=True)
    (new / ".gitkeep").write_text("")
    headloom("vocabulary", place / "corpus.txt", "--size", 290, "--out", new / "v.model", cwd=tmp_path)
    (new / "mine.toml").write_text(TEXT.replace("length = 16", f'length = 16\ntokenizer = "{new}/v.model"'))
    (new / "tokenizer.model").write_text("mine")
    begin = ["train", new / "mine.toml", "--out", new, "--resume", "--set", "train.warmup=6"]
    assert f"{new}: holds 'tokenizer.model', which would be overwritten" in refused(*begin, cwd=place)
    (new / "tokenizer.model").unlink()
    with open(new / "slurm-1.out", "w") as log:
        subprocess.run([str(BINARY), *map(str, begin)], cwd=place, env=ENVIRONMENT, stdout=log, stderr=log, check=True)
    said = (new / "slurm-1.out").read_text()
    assert f"{new}: there is no checkpoint to go on from yet, so the run begins" in said
    assert "train.warmup = 6 is not shorter than train.steps = 6: the learning rate only rises" in said
    assert "a shorter warm-up is set by train.warmup = 0, for example" in said
    assert (new / "tokenizer.model").read_bytes() == (new / "v.model").read_bytes()


def test_two_processes_do_not_share_a_run(place, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", "long.toml", "--out", run, "--set", "train.steps=100000"]
    metrics = run / "metrics.jsonl"
    first = started(*arguments, cwd=place, until=lambda: metrics.exists() and metrics.stat().st_size > 200)
    try:
        for more in [[], ["--resume"]]:
            message = refused(*arguments, *more, cwd=place, code=1)
            assert message.startswith(f"{run} is in use by process {first.pid} on host "), message
            assert " since 20" in message
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 1
    # Each step is there once.
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "step_seconds" in line]
    assert steps == list(range(1, steps[-1] + 1))
    assert not (run / ".headloom.lock").exists()
    headloom("train", run, "--resume", "--set", f"train.steps={steps[-1] + 1}", cwd=place)


def test_a_killed_process_blocks_nobody(place, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", "long.toml", "--out", run, "--set", "train.checkpoint_every=2", "--set", "train.steps=100000"]
    process = started(*arguments, cwd=place, until=lambda: bool(list(run.glob("checkpoints/step-??"))))
    headloom("eval", run, cwd=place)  # readers need no lock
    process.kill()
    process.wait()
    assert (run / ".headloom.lock").exists()
    step = max(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*"))
    headloom("train", run, "--resume", "--set", f"train.steps={step + 2}", cwd=place)
    assert not (run / ".headloom.lock").exists()


def test_what_is_printed_goes_into_no_file_of_the_run(place, tmp_path):
    """Where standard error is closed, its number would be that of the lock."""
    run = tmp_path / "run"
    command = [BINARY, "train", "long.toml", "--out", run, "--set", "train.steps=100000"]
    process = subprocess.Popen(command, cwd=place, env=ENVIRONMENT, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(2))
    try:
        wait_for(lambda: bool(list(run.glob("metrics.jsonl"))), process)
        assert f"process {process.pid} " in refused("train", run, "--resume", cwd=place, code=1)
    finally:
        process.kill()
        process.wait()


def test_an_interrupted_text_is_told(place):
    command = [BINARY, "generate", "runs/text", "--prompt", "The", "--tokens", "1000000"]
    process = subprocess.Popen(command, cwd=place, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(20).startswith(b"The")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and said.endswith(b"headloom: interrupted; the text is not complete.\n")


def test_two_processes_do_not_share_a_comparison(tmp_path):
    (tmp_path / "c.toml").write_text(COMPARE.replace("steps = 3", "steps = 100000"))
    run = tmp_path / "runs/c/runs/copy/mha/seed-1"
    metrics = run / "metrics.jsonl"
    first = started("compare", "c.toml", cwd=tmp_path, until=lambda: metrics.exists() and metrics.stat().st_size > 200)
    try:
        # It holds the folder while it stands still, and does not remove old checkpoints meanwhile.
        first.send_signal(signal.SIGSTOP)
        os.waitpid(first.pid, os.WUNTRACED)
        before = files(run / "checkpoints")
        for command in [["compare", "c.toml"], ["compare", "c.toml", "--fresh"], ["train", run, "--resume"]]:
            message = refused(*command, cwd=tmp_path, code=1)
            assert f"runs/c is in use by process {first.pid} on host " in message
        assert files(run / "checkpoints") == before
    finally:
        first.kill()
        first.wait()
    (tmp_path / "c.toml").write_text(COMPARE)
    headloom("compare", "c.toml", cwd=tmp_path)


def test_a_run_of_a_comparison_that_another_process_trains(tmp_path):
    """It has not failed, and is not removed."""
    (tmp_path / "c.toml").write_text(COMPARE)
    headloom("compare", "c.toml", "--set", "seeds=[1]", cwd=tmp_path)
    run = tmp_path / "runs/c/runs/copy/mha/seed-2"
    run.mkdir()
    before = files(tmp_path / "runs/c")
    with open(run / ".headloom.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"{run.relative_to(tmp_path)} is in use by" in refused("compare", "c.toml", "--fresh", cwd=tmp_path, code=1)
        lock.flush()
        assert {**files(tmp_path / "runs/c"), **before} == files(tmp_path / "runs/c")
        said = headloom("compare", "c.toml", "--jobs", 2, cwd=tmp_path, code=1).stderr
        assert " is in use by another process" in said and "copy mha seed 2 could not be trained, as is said above" in said
    headloom("compare", "c.toml", cwd=tmp_path)


def test_a_comparison_grows(tmp_path):
    (tmp_path / "small.toml").write_text(COMPARE)
    headloom("compare", "small.toml", cwd=tmp_path)
    out = tmp_path / "runs/small"
    before = (out / "runs/copy/talking/seed-2/metrics.jsonl").stat().st_mtime_ns
    done = headloom("compare", "small.toml", "--set", "seeds=[2, 3]", "--set", "title=New", "--json", cwd=tmp_path)
    assert "2 of the 4 runs exist already: finished ones are kept, others are resumed" in done.stderr
    left_out = [line for line in done.stderr.splitlines() if "left out of the report" in line]
    assert len(left_out) == 1 and left_out[0].startswith("2 runs in runs/small are of other models")
    assert " runs/copy/mha/seed-1, runs/copy/talking/seed-1" in left_out[0]
    assert (out / "runs/copy/talking/seed-2/metrics.jsonl").stat().st_mtime_ns == before
    result = json.loads(done.stdout)
    assert result["seeds"] == [2, 3] and result["finished"] == result["planned"] == 4
    assert "New" in (out / "report.html").read_text() and (out / "runs/copy/mha/seed-1/result.json").exists()
    # A changed configuration is trained anew beside what was there.
    done = headloom("compare", "small.toml", "--set", "seeds=[1]", "--set", "models.1.trian.lr=0.5", cwd=tmp_path, code=2)
    assert "models.1.trian" in done.stderr.replace("models[1]", "models.1")
    done = headloom("compare", "small.toml", "--set", "seeds=[1]", "--set", "tasks.0.train.lr=0.5", cwd=tmp_path)
    assert "copy/mha/seed-1.earlier-1, " in done.stderr and "runs in runs/small are of other" in done.stderr
    assert (out / "runs/copy/mha/seed-1.earlier-1/result.json").exists()
    # Somebody else's folder is left alone.
    shutil.copy(out / "runs/copy/mha/seed-1/config.toml", tmp_path / "config.toml")
    message = refused("compare", "small.toml", "--out", ".", cwd=tmp_path)
    assert "is not the configuration of a comparison" in message


def test_the_report_says_how_to_repeat_it(tmp_path):
    (tmp_path / "it's small.toml").write_text(COMPARE)
    overrides = ["title=\"it's $HOME `x` \\\\ done\"", 'tasks.0.task={type="copy", symbols=8, count=4, eval_sequences=8}', "seeds=[1]"]
    arguments = [part for override in overrides for part in ("--set", override)]
    done = headloom("compare", "it's small.toml", *arguments, "--out", "a folder", "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    words = subprocess.run(["sh", "-c", f"printf '%s\\0' {result['command']}"], capture_output=True, text=True).stdout
    expected = ["headloom", "compare", "it's small.toml", *arguments, "--out", "a folder"]
    assert words.split("\0")[:-1] == expected == shlex.split(result["command"])
    again = headloom(*words.split("\0")[1:-1], "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["title"] == result["title"] == "it's $HOME `x` \\ done"
    assert "2 of the 2 runs exist already" in again.stderr


def test_eval_reads_all_of_a_text_of_ones_own(place, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{i} lazy dogs and the quick brown fox.\n" for i in range(300)))

    def evaluated(*arguments):
        return json.loads(headloom("eval", "runs/text", "--json", *arguments, cwd=place).stdout)

    mine = ["--set", f"task.paths=['{book}']"]
    size = book.stat().st_size + 1  # and the mark of its end
    whole = evaluated(*mine)
    assert whole["read"] == {"tokens": size, "share": 1.0, "bytes": size}
    assert whole["target_tokens"] == size - 1
    shown = headloom("eval", "runs/text", *mine, cwd=place).stdout
    assert f"read        {size} tokens (" in shown and "100% of the text" in shown
    part = evaluated(*mine, "--set", "task.held_out=0.1")
    assert part["read"]["tokens"] <= 256 and part["read"]["share"] < 0.1
    some = evaluated(*mine, "--sequences", 4)
    assert some["read"]["tokens"] == 64
    # In windows of any length that is all of it, too.
    assert evaluated(*mine, "--context", 100)["target_tokens"] == size - 1
    # The run's own text: what is held out.
    own = evaluated()
    corpus = (place / "corpus.txt").stat().st_size + 2  # the part before the cut ends like a document
    assert own["read"]["share"] == pytest.approx(own["read"]["tokens"] / corpus) and own["read"]["share"] < 0.2
    assert evaluated("--set", f"task.paths=['{place / 'corpus.txt'}']") == own
    # Nothing is left to train on.
    message = refused("train", "text.toml", "--out", tmp_path / "r", "--set", "task.held_out=1", cwd=place)
    assert "nothing to train on" in message
    assert "expected at most 0.5, or 1" in refused("train", "text.toml", "--set", "task.held_out=0.7", "--out", "x", cwd=place)
    book.write_text("short")
    assert "length = 16 needs at least 17" in refused("eval", "runs/text", *mine, cwd=place, code=1)


def test_describe_takes_a_run_and_needs_no_data(place, tmp_path):
    described = json.loads(headloom("describe", place / "runs/text", "--json", cwd=tmp_path).stdout)
    assert described == json.loads(headloom("describe", "text.toml", "--json", cwd=place).stdout)
    gone = TEXT.replace("corpus.txt", "gone.txt")
    (tmp_path / "gone.toml").write_text(gone)
    assert json.loads(headloom("describe", "gone.toml", "--json", cwd=tmp_path).stdout) == described
    classes = TEXT.replace('type = "text"\npaths = ["corpus.txt"]', 'type = "classify_text"\npath = "gone"')
    (tmp_path / "classes.toml").write_text(
        classes.replace("width = 16", 'width = 16\nkind = "encoder"').replace("eval_tokens", "eval_sequences")
    )
    message = refused("describe", "classes.toml", cwd=tmp_path, code=1)
    assert message.startswith(
        "the configuration leaves model.vocabulary, model.max_length, model.head, model.segments, model.classes to the data of "
        "the task classify_text, but there is no file or folder 'gone', "
    )
    assert message.count(". ") == 0
    message = refused("describe", "classes.toml", "--set", "model.classes=3", "--set", "model.head=label", cwd=tmp_path, code=1)
    assert "the configuration leaves model.vocabulary, model.max_length, model.segments to the data of " in message
    sizes = ["vocabulary=256", "max_length=16", "head=label", "segments=0", "classes=3"]
    headloom("describe", "classes.toml", *[x for size in sizes for x in ("--set", f"model.{size}")], cwd=tmp_path)


def test_describe_of_a_whole_model_needs_neither_paths_nor_a_tokenizer(place, tmp_path):
    headloom("export", "runs/text", "--out", tmp_path / "exported", cwd=place)
    headloom("import", "exported", "--out", "imported", cwd=tmp_path)
    assert "paths = []" in (tmp_path / "imported/config.toml").read_text()
    parameters = {
        json.loads(headloom("describe", *arguments, "--json", cwd=cwd).stdout)["parameters"]
        for arguments, cwd in [(["imported"], tmp_path), ([tmp_path / "imported/config.toml"], "/")]
    }
    assert len(parameters) == 1
    assert refused("eval", "imported", cwd=tmp_path) == (
        "the task text needs 'paths', the files, folders or globs to read, as in --set 'task.paths=[\"my/texts\"]'."
    )
    headloom("vocabulary", "corpus.txt", "--size", 290, "--out", tmp_path / "v.model", cwd=place)
    run = tmp_path / "run"
    headloom("train", "text.toml", "--set", f"task.tokenizer='{tmp_path}/v.model'", "--out", run, cwd=place)
    expected = headloom("describe", run, cwd=place).stdout
    shutil.copy(run / "config.toml", tmp_path / "copy.toml")
    assert headloom("describe", run / "config.toml", cwd="/").stdout == expected
    assert headloom("describe", "copy.toml", cwd=tmp_path).stdout == expected
    written = (tmp_path / "copy.toml").read_text()
    (tmp_path / "copy.toml").write_text(re.sub("(?m)^paths = .*$", "", written))
    assert headloom("describe", "copy.toml", cwd=tmp_path).stdout == expected


def test_a_model_of_bytes_is_exported_with_its_tokenizer(place, tmp_path):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "hub"
    headloom("export", "runs/text", "--out", out, cwd=place)
    for load in (transformers.PreTrainedTokenizerFast, transformers.AutoTokenizer):
        tokenizer = load.from_pretrained(out)
        assert len(tokenizer) == 256 and tokenizer.eos_token_id == 0
        text = "".join(map(chr, range(500))) + " two  spaces\n\n漢字 <s>"
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
        assert tokenizer.decode([65, 0], skip_special_tokens=True) == "A"
    # And comes back as the same model.
    headloom("import", out, "--out", tmp_path / "back", cwd=place)
    paths = ["--set", f"task.paths=['{place / 'corpus.txt'}']"]
    back = json.loads(headloom("eval", tmp_path / "back", "--json", *paths, "--set", "task.length=16", cwd=tmp_path).stdout)
    whole = ["--set", "task.held_out=1", "--set", "task.eval_tokens=100000"]
    here = json.loads(headloom("eval", "runs/text", "--json", *whole, cwd=place).stdout)
    assert back["loss"] == pytest.approx(here["loss"], rel=1e-6) and back["read"] == here["read"]


@pytest.mark.parametrize("arguments", [["--txt", "x"], ["none.toml"], ["--text"], ["--text", "/none"], ["--out"]])
def test_run_checks_its_arguments_first(arguments):
    done = subprocess.run([str(ROOT / "run"), *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "usage: ./run" in done.stderr and "==" not in done.stdout
