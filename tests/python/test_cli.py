"""The command line as a user meets it: results, exit codes, messages, interruption."""

import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess

import pytest
from cli_support import BINARY, COMPARE, ENVIRONMENT, MODEL, ROOT, TEXT, files, headloom, make_place, refused, wait_for, weights

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

COMMANDS = ["train", "compare", "generate", "serve", "eval", "describe", "bench", "list", "vocabulary", "tokenize", "import", "export"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("cli"))


def test_help_of_every_command_has_an_example(tmp_path):
    top = headloom("--help", cwd=tmp_path).stdout
    assert headloom("help", cwd=tmp_path).stdout == top
    assert headloom("help", "train", cwd=tmp_path).stdout == headloom("train", "--help", cwd=tmp_path).stdout
    for command in COMMANDS:
        assert command in top
        text = headloom(command, "--help", cwd=tmp_path).stdout
        assert f"Example:\n  {BINARY} {command}" in text


def test_version(tmp_path):
    said = headloom("--version", cwd=tmp_path).stdout
    assert re.fullmatch(r"headloom \d+\.\d+\.\d+ with PyTorch \d+\.\d+\.\d+\n", said), said


def test_usage_errors_leave_with_two(tmp_path):
    assert "train one model" in headloom(cwd=tmp_path, code=2).stderr
    assert "did you mean 'train'" in refused("trian", "x.toml", cwd=tmp_path)
    assert "there are train, compare" in refused("zzzzzz", cwd=tmp_path)
    assert "did you mean 'dcmha'" in refused("list", "dcmah", cwd=tmp_path)


@pytest.mark.parametrize(
    "line, message",
    [
        ("train", "train: CONFIG is missing, expected configuration file, or with --resume the folder of a run to go on with."),
        ("train --out", "train: --out has no value, expected folder of the run."),
        ("train a.toml --ste train.steps=3", "train has no option --ste; did you mean --set?"),
        ("train --ste", "train has no option --ste; did you mean --set?"),
        (
            "train a.toml --out --resume",
            "train: --out has no value before --resume, expected folder of the run (--out=--resume if that is meant).",
        ),
        (
            "generate run --stop --prompt=x",
            "generate: --stop has no value before --prompt=x, expected end before this text (--stop=--prompt=x if that is meant).",
        ),
        ("train a.toml b.toml", f"train: 'b.toml' is one argument too many; {BINARY} train --help shows what it takes."),
        ("train a.toml --out a --out b", "train: --out is given several times, expected once."),
        ("train a.toml --from=", "--from is empty, expected a name."),
        ("train a.toml --checkpoint=", "--checkpoint is empty, expected a name."),
        ("eval a --device=", "--device is empty, expected a name."),
        ("export a --out b --as=", "--as is empty, expected a name."),
        ("bench --only=", "--only is empty, expected a name."),
        ("list --nonsense", "list has no option --nonsense; there are --help, --help-all, --json, --markdown."),
        ("--nonsense", "there is no option --nonsense; there are --help, --version, --help-all."),
        ("generate run --temperature -1", "--temperature is -1, expected at least 0."),
        ("generate run --temperature hot", "--temperature is 'hot', expected a number, at least 0."),
        ("generate run --temperature nan", "--temperature is 'nan', expected a number, at least 0."),
        ("generate run --temperature inf", "--temperature is 'inf', expected a number, at least 0."),
        ("generate run --top-p 2", "--top-p is 2, expected at least 0 and at most 1."),
        ("generate run --top-k -1", "--top-k is -1, expected at least 0."),
        ("generate run --tokens 1.5", "--tokens is '1.5', expected a whole number, at least 0."),
        ("generate run --tokens 010", "--tokens is '010', expected a whole number, at least 0."),
        (
            "generate run --seed 18446744073709551615",
            "--seed is 18446744073709551615, which an integer of 64 bits with a sign cannot hold, expected at least 0.",
        ),
        ("generate run --repetition-penalty 0", "--repetition-penalty is 0, expected above 0."),
        ("generate run --seed -1", "--seed is -1, expected at least 0."),
        ("generate run --samples 0", "--samples is 0, expected at least 1 and at most 1024."),
        ("generate run --dtype flaot32", "--dtype is 'flaot32', expected one of float32, bfloat16, float64; did you mean 'float32'?"),
        ("serve run --port 70000", "--port is 70000, expected at least 0 and at most 65535."),
        ("eval run --context 0", "--context is 0, expected at least 1."),
        ("list mha --json --markdown", "list: --json and --markdown cannot be given together."),
        ("describe a.toml --length -5", "--length is -5, expected at least 1 and at most 1073741824."),
        ("bench --seconds 0", "--seconds is 0, expected above 0."),
        ("bench wkv --only conv", "--only is 'conv', but no case or figure of wkv has that in its name."),
        ("bench train_step --only fnet", "--only is 'fnet', but no case or figure of train_step has that in its name."),
        ("bench wkv --profile", "--profile is of 'step', which is not asked for: leave it out."),
        ("bench decode --backend reference", "--backend is of an operator, but 'decode' measures whole models: leave it out."),
        ("list machine --markdown", "--markdown is of tables of options, which 'machine' has none of."),
        ("analyze theorems --tensors", "--tensors is given, but without --out nothing is written: give a folder there."),
        ("eval run --logits x", "--logits is 'x', expected a name that ends in .safetensors."),
        ("report run --out one.toml", "--out is 'one.toml', expected a name that ends in .html or .htm."),
        ("vocabulary a.txt", "vocabulary: --out is missing, expected file of the model, *.model."),
        ("vocabulary a.txt --out v.model --size 3", "--size is 3, expected at least 259 and at most 1048576."),
        ("vocabulary a.txt --out v.model --method bpee", "--method is 'bpee', expected one of bpe, unigram; did you mean 'bpe'?"),
        (
            "vocabulary a.txt --out v.json",
            "--out is 'v.json', expected a name that ends in .model, by which tokenize and task.tokenizer know a vocabulary of "
            "this kind.",
        ),
    ],
)
def test_command_lines_that_cannot_be_understood(tmp_path, line, message):
    assert refused(*line.split(), cwd=tmp_path) == message


@pytest.mark.parametrize("command", ["train", "compare", "describe"])
def test_an_empty_name_of_a_configuration_stands_for_none(tmp_path, command):
    assert refused(command, "", cwd=tmp_path) == "CONFIG is empty, expected a name."


@pytest.mark.parametrize("command", ["train x.toml", "compare x.toml", "import x", "export x", "analyze x"])
def test_an_empty_name_of_a_folder_stands_for_none(tmp_path, command):
    assert refused(*command.split(), "--out", "", cwd=tmp_path) == "--out is empty, expected a name."
    assert not list(tmp_path.iterdir())


def test_lists_end_where_the_next_argument_begins(tmp_path):
    for words in ("analyze --layers 0,1 no/run maps", "analyze --heads 0 no/run", "serve --cors https://a.example no/run"):
        assert refused(*words.split(), cwd=tmp_path, code=1) == "no/run: is not the folder of a run."


def test_the_script_of_the_tests_takes_no_arguments():
    asked = subprocess.run([ROOT / "test", "--help"], capture_output=True, text=True, timeout=30)
    assert asked.returncode == 0 and asked.stdout == "usage: ./test    sets up, builds and runs every test\n"
    done = subprocess.run([ROOT / "test", "tests/python"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr.startswith("./test takes no arguments.\nusage: ./test ")


def test_the_script_refuses_one_model_before_it_builds():
    done = subprocess.run(["./run", "configs/text.toml"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "configs/text.toml configures one model, not a comparison;" in done.stderr


def test_a_first_interrupt_is_answered_at_a_terminal(place, tmp_path):
    """The process that the user started says that it ends, and the run goes on from what is kept."""
    leader, follower = pty.openpty()
    command = [BINARY, "train", "long.toml", "--out", tmp_path / "run", "--set", "train.steps=100000"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": follower}
    process = subprocess.Popen(command, cwd=place, env=ENVIRONMENT, start_new_session=True, **streams)
    os.close(follower)
    wait_for((tmp_path / "run/metrics.jsonl").exists, process)
    process.send_signal(signal.SIGINT)
    said = b""
    while b"press Ctrl-C again to stop at once." not in said:
        said += os.read(leader, 4096)
    assert process.wait(60) == 1
    os.close(leader)
    assert b"headloom: ending after this step, which is kept;" in said


def test_an_interrupt_that_ends_the_reader_too(place, tmp_path):
    """As in `headloom train ... 2>&1 | tee log`: what is still said must not end the run before it has saved."""
    command = [BINARY, "train", "long.toml", "--out", tmp_path / "run", "--set", "train.steps=100000", "--set", "train.eval_every=1"]
    process = subprocess.Popen(
        [*command, "--set", "train.checkpoint_every=100000"], cwd=place, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(60) == 1
    assert any((tmp_path / "run/checkpoints").glob("step-*/state.json"))


@pytest.mark.parametrize("ignored", [False, True], ids=["", "nohup"])
def test_a_terminal_that_closes_ends_a_run_after_its_step(place, tmp_path, ignored):
    """Unless it was started with nohup, which ignores the signal."""
    command = [BINARY, "train", "long.toml", "--out", tmp_path / "run", "--set", "train.steps=100000"]
    # Set in both cases: these tests may have been started with nohup themselves.
    on_hangup = signal.SIG_IGN if ignored else signal.SIG_DFL
    process = subprocess.Popen(
        command,
        cwd=place,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, on_hangup),
    )
    wait_for((tmp_path / "run/metrics.jsonl").exists, process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    if ignored:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "is saved. Go on with: " in said


def test_files_that_are_not_there_leave_with_one(place, tmp_path):
    for command in ["train", "compare", "describe"]:
        assert "no.toml: cannot be read" in refused(command, "no.toml", cwd=tmp_path, code=1)
    for command in ["eval", "generate"]:
        assert "no: is not the folder of a run" in refused(command, "no", cwd=tmp_path, code=1)
    assert refused("train", "my", cwd=tmp_path, code=1) == "my: cannot be read: there is no such file or folder."
    assert "did you mean 'text.toml'?" in refused("train", "text", cwd=place, code=1)
    assert "did you mean 'long.toml'?" in refused("describe", "lnog.toml", cwd=place, code=1)
    assert "[model] as preset = \"bert-mini\"" in refused("train", "bert-mini", cwd=place, code=1)
    assert "'mamba-tiny' is a preset" in refused("describe", "mamba-tinny", cwd=place, code=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused("train", empty, cwd=tmp_path, code=1) == f"{empty}: is not the folder of a run, it has no config.toml."
    assert refused("eval", empty, cwd=tmp_path, code=1) == f"{empty}: is not the folder of a run, it has no config.toml."
    assert "runs: is not the folder of a run, it has no config.toml; did you mean 'runs/" in refused("eval", "runs", cwd=place, code=1)
    assert refused("generate", "runs/txt", cwd=place, code=1) == "runs/txt: is not the folder of a run; did you mean 'runs/text'?"
    assert refused("eval", "", cwd=place, code=1) == "the name of the run's folder is empty."
    runs = place / "runs"
    assert refused("eval", "txt/", cwd=runs, code=1) == "txt/: is not the folder of a run; did you mean 'text'?"
    assert refused("eval", runs / "nothing", cwd=place, code=1) == f"{runs}/nothing: is not the folder of a run."
    assert refused("report", "txt", cwd=runs, code=1) == "txt: is not the folder of a run or of a comparison; did you mean 'text'?"
    others = tmp_path / "kinds"
    for name, text in [("first", COMPARE), ("fist", TEXT)]:
        (others / name).mkdir(parents=True)
        (others / name / "config.toml").write_text(text)
    for arguments, meant in [(["eval"], "fist"), (["train", "--resume"], "fist"), (["compare"], "first"), (["report"], "first")]:
        assert refused(*arguments, "firstt", cwd=others, code=1).endswith(f"; did you mean '{meant}'?")
    shutil.rmtree(others / "fist")
    assert refused("eval", "firstt", cwd=others, code=1) == "firstt: is not the folder of a run."
    assert refused("eval", "kinds", cwd=tmp_path, code=1) == "kinds: is not the folder of a run, it has no config.toml."
    assert refused("help", "generat", cwd=place) == "there is no command 'generat'; did you mean 'generate'?"
    (tmp_path / "runs/theirs").mkdir(parents=True)
    shutil.copy(place / "runs/text/config.toml", tmp_path / "runs/theirs")
    message = f"{empty}: has no config.json and no params.json, expected the folder of a Hugging Face model."
    assert message in refused("import", empty, "--out", "x", cwd=tmp_path, code=1)
    message = "runs/theirs: is the folder of a run already, expected that of a Hugging Face model."
    assert refused("import", "runs/theirs", "--out", "ours", cwd=tmp_path, code=1) == message
    shutil.copy(place / "runs/text/config.toml", empty)
    assert "no checkpoint yet" in refused("eval", empty, cwd=tmp_path, code=1)


@pytest.mark.parametrize(
    "change, message",
    [
        (("width = 16", "widht = 16"), "bad.toml:3: unknown key 'model.widht'; did you mean 'model.width'?"),
        (("steps = 6", "stpes = 6"), "did you mean 'train.steps'?"),
        (("[train]", "[trian]"), "did you mean 'train'?"),
        (("width = 16", "width = 'big'"), "bad.toml:3: 'model.width' is 'big', expected an integer."),
        (("depth = 2", "depth = 0"), "bad.toml:4: 'model.depth' is 0, expected at least 1 and at most 10000."),
        (("heads = 2", "heads = 3"), "model.layer[0].mixer (mha): heads is 3, expected a divisor"),
        (("heads = 2", "window = 0"), "bad.toml:6: 'model.layer[0].mixer.window' is 0, expected at least 1."),
        (('"mha"', '"mah"'), '"mah", expected one of mha, '),
        (('"mha", heads = 2', '"multi_token", heads = 2, key_kernel = 4'), "key_kernel is 4, expected an odd number"),
        (('"mha"', '"mah"'), 'did you mean "mha"?'),
        (("batch = 4", "batch = 4\naccumulate = 3"), "'train.accumulate' is 3"),
        (("width = 16", "width = = 16"), "bad.toml:3: not valid TOML"),
        (("width = 16", "preset = 'transformer'"), "'transformer++'"),
        (('"text"', '"txet"'), 'did you mean "text"?'),
        (("paths", "path"), "did you mean 'task.paths'?"),
    ],
)
def test_bad_configurations(place, tmp_path, change, message):
    assert change[0] in TEXT
    (place / "bad.toml").write_text(TEXT.replace(*change, 1))
    assert message in refused("train", "bad.toml", "--out", tmp_path / "run", cwd=place)
    assert not (tmp_path / "run").exists()


def test_configurations_of_another_command(place):
    (place / "many.toml").write_text('[[models]]\nname = "a"\n[[tasks]]\nname = "b"\n')
    for command in ("train", "describe"):
        assert "many.toml: configures a comparison" in refused(command, "many.toml", cwd=place)
    assert "text.toml: configures one model" in refused("compare", "text.toml", cwd=place)


def test_bad_overrides(place, tmp_path):
    def message(*arguments):
        return refused("train", "text.toml", "--out", tmp_path / "run", *arguments, cwd=place)

    assert "did you mean 'train.steps'" in message("--set", "train.stepz=3")
    assert "--set train.steps: 'train.steps' is 'many', expected an integer." in message("--set", "train.steps=many")
    assert "expected key=value" in message("--set", "train.steps")
    assert "did you mean 'train'" in message("--set", "trian.steps=3")
    assert "--set task.paths: [a.txt] is not a TOML value; texts in it need quotes" in message("--set", "task.paths=[a.txt]")
    assert "--set train..steps: has an empty part" in message("--set", "train..steps=3")
    assert "'width' is an integer, not a table" in message("--set", "model.width.size=3")
    assert "'layer' has no entry 'mixer', expected 0, its only entry." in message("--set", "model.layer.mixer.heads=3")
    assert "'train.lr' is -1.0, expected above 0." in message("--set", "train.lr=-1.0")
    assert "'train.lr' is inf, expected a finite number above 0." in message("--set", "train.lr=inf")


def test_corpora_that_cannot_be_used(place, tmp_path):
    def message(**corpus):
        for name, text in corpus.items():
            (tmp_path / name).write_bytes(text)
        paths = json.dumps([str(tmp_path / name) for name in corpus] or [str(tmp_path / "missing")])
        return refused("train", "text.toml", "--out", tmp_path / "run", "--set", f"task.paths={paths}", cwd=place, code=1)

    assert "missing" in message()
    assert "empty" in message(empty=b"")
    short = message(short=b"too short")
    assert "too short" in short and "length = 16" in short
    assert "zeros" in message(zeros=b"\0" * 1000)
    assert not (tmp_path / "run").exists()


def test_train_writes_a_whole_run(place):
    run = place / "runs/text"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-3", "step-6"]
    assert sorted(files(run / "checkpoints/step-6")) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    # config.toml is complete: it alone describes the run.
    text = (run / "config.toml").read_text()
    assert "beta2 = 0.95" in text and "vocabulary = 256" in text
    described = json.loads(headloom("describe", run / "config.toml", "--json", cwd=place).stdout)
    assert described["parameters"] == json.loads(headloom("describe", "text.toml", "--json", cwd=place).stdout)["parameters"]


def test_the_same_training_gives_the_same_weights(place, tmp_path):
    done = headloom("train", "text.toml", "--out", tmp_path / "again", "--json", cwd=place)
    result = json.loads(done.stdout)
    assert result["step"] == 6 and result["loss"] > 0
    assert weights(tmp_path / "again", 6) == weights(place / "runs/text", 6)
    headloom("train", "text.toml", "--out", tmp_path / "other", "--set", "train.seed=2", cwd=place)
    assert weights(tmp_path / "other", 6) != weights(place / "runs/text", 6)


def test_a_present_run_is_not_written_over(place):
    before = files(place / "runs/text")
    message = refused("train", "text.toml", cwd=place)
    assert "already holds a run at step 6" in message and "--resume" in message
    message = refused("train", "text.toml", "--resume", "--set", "train.batch=2", cwd=place)
    assert "config.toml" in message and "'train.batch' = 2" in message
    assert files(place / "runs/text") == before
    # A finished run has nothing left to do.
    headloom("train", "runs/text", "--resume", cwd=place)
    assert weights(place / "runs/text", 6) == before["checkpoints/step-6/model.safetensors"]


def test_interrupt_saves_and_resume_ends_the_same(place, tmp_path):
    headloom("train", "long.toml", "--out", tmp_path / "whole", cwd=place)
    run = tmp_path / "run"
    process = subprocess.Popen(
        [str(BINARY), "train", "long.toml", "--out", str(run)], cwd=place, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 7, process)
    # As one request may come, by `timeout` for example.
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    message = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 1
    step = max(int(p.name[5:]) for p in (run / "checkpoints").iterdir())
    assert 7 <= step < 150
    assert message == f"headloom: interrupted; step {step} is saved. Go on with: {BINARY} train {run} --resume"
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == step
    headloom("train", run, "--resume", cwd=place)
    assert weights(run, 150) == weights(tmp_path / "whole", 150)
    optimizer = "checkpoints/step-150/optimizer.safetensors"
    assert (run / optimizer).read_bytes() == (tmp_path / "whole" / optimizer).read_bytes()

    def figures(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in lines]

    assert figures(run) == figures(tmp_path / "whole")


def test_a_run_whose_folder_is_moved_ends_with_a_sentence(place, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    arguments = ["train", "long.toml", "--out", str(run), "--set", "train.checkpoint_every=2", "--set", "train.steps=100000"]
    process = subprocess.Popen([str(BINARY), *arguments], cwd=place, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_for((run / "checkpoints/step-2").exists, process)
    run.rename(moved)
    said = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 1 and not run.exists(), said
    assert f"{run}: step " in said and " is not saved, because the run's folder was moved or removed while it trained." in said
    last = max(int(p.name[5:]) for p in (moved / "checkpoints").glob("step-*"))
    headloom("train", moved, "--resume", "--set", f"train.steps={last + 2}", cwd=place)
    assert weights(moved, last + 2)


def test_a_killed_run_goes_on_from_its_checkpoint(place, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", "long.toml", "--out", str(run), "--set", "train.checkpoint_every=2", "--set", "train.steps=60"]
    process = subprocess.Popen([str(BINARY), *arguments], cwd=place, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_for(lambda: list(run.glob("checkpoints/step-1?")), process)
    process.kill()
    process.wait()
    headloom(*arguments, "--resume", cwd=place)
    arguments[3] = str(tmp_path / "whole")
    headloom(*arguments, cwd=place)
    assert weights(run, 60) == weights(tmp_path / "whole", 60)


def test_damaged_checkpoints_name_the_file_and_an_intact_step(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    model = run / "checkpoints/step-6/model.safetensors"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    for command in [["eval", run, "--checkpoint", 6], ["generate", run, "--checkpoint", "last"]]:
        message = refused(*command, cwd=place, code=1)
        assert str(model) in message and "damaged" in message and "step 3 is intact" in message
    headloom("eval", run, "--checkpoint", 3, cwd=place)
    model.write_bytes(content[:100])
    message = refused("train", run, "--resume", cwd=place, code=1)
    assert str(model) in message and "has 100 bytes" in message and "--checkpoint 3" in message
    headloom("train", run, "--checkpoint", 3, cwd=place)
    assert weights(run, 6) == weights(place / "runs/text", 6)


def test_weights_of_another_model_are_not_called_damaged(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    config = run / "config.toml"
    written = config.read_text()
    for key, old, new in [("model.width", "16", "32"), ("model.position.base", "10000.0", "20000.0")]:
        line = f"{key.split('.')[-1]} = {old}\n"
        assert line in written
        config.write_text(written.replace(line, line.replace(old, new)))
        for command, step in [(["generate", run], 6), (["eval", run, "--checkpoint", 3], 3), (["train", run, "--resume"], 6)]:
            assert refused(*command, cwd=place, code=1) == (
                f"{run}/checkpoints/step-{step}: its weights are of a model with '{key}' = {old}, but the configuration "
                f"(config.toml of a run) has '{key}' = {new}."
            )
    config.write_text(written.replace("dropout = 0.0\n", "dropout = 0.5\n"))  # does not belong to the weights
    assert config.read_text() != written
    headloom("eval", run, cwd=place)


def test_a_run_without_its_model_names_the_file(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    config = run / "config.toml"
    task = '[task]\ntype = "text"\npaths = ["corpus.txt"]\nlength = 16\n'
    for content, why in [("", "is empty"), ("# nothing\n", "is empty"), (task, "has no [model]")]:
        config.write_text(content)
        for command in ["eval", "generate", "describe"]:
            message = refused(command, run, cwd=place, code=2 if command == "describe" and not content.startswith("[task]") else 1)
            assert message.startswith(f"{config}: {why}, expected the configuration of a "), message
        assert str(config) in refused("train", "text.toml", "--out", run, "--resume", cwd=place, code=1)


def test_a_configuration_without_a_model_trains_the_default_one_and_says_so(tmp_path):
    (tmp_path / "c.toml").write_text('[task]\ntype = "copy"\ncount = 4\n[train]\nsteps = 1\nbatch = 1\neval_sequences = 1\n')
    note = "c.toml has no [model], so all of the model's options have their defaults; 'describe' prints them.\n"
    small = ["--set", "model.depth=1", "--set", "model.width=16"]
    assert note in headloom("train", "c.toml", "--out", "a", cwd=tmp_path).stderr
    assert note not in headloom("train", "c.toml", *small, "--out", "b", cwd=tmp_path).stderr
    # Not of a model whose table has another name.
    (tmp_path / "d.toml").write_text('[modell]\nwidth = 3\n[task]\ntype = "copy"\n')
    said = headloom("train", "d.toml", "--out", "c", cwd=tmp_path, code=2).stderr
    assert said == "headloom: d.toml:1: unknown key 'modell'; did you mean 'model'?\n"


def test_a_checkpoint_without_files_is_none(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    expected = headloom("eval", run, "--checkpoint", "last", "--json", cwd=place).stdout
    (run / "checkpoints/step-9").mkdir()
    assert headloom("eval", run, "--checkpoint", "last", "--json", cwd=place).stdout == expected
    headloom("generate", run, "--checkpoint", "last", "--tokens", 3, cwd=place)
    assert "has no checkpoint '9', expected best, last or one of the steps 3, 6." in refused("eval", run, "--checkpoint", 9, cwd=place)
    # The run goes on, and its own checkpoint comes to stand there.
    headloom("train", run, "--resume", "--set", "train.steps=9", cwd=place)
    assert weights(run, 9)
    for name in ("3", "6", "9"):
        shutil.rmtree(run / f"checkpoints/step-{name}", ignore_errors=True)
        (run / f"checkpoints/step-{name}").mkdir()
    assert refused("eval", run, cwd=place, code=1) == f"{run}: has no checkpoint yet."


def test_weights_are_read_where_the_optimizer_is_lost(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    expected = headloom("eval", run, "--checkpoint", 6, cwd=place).stdout
    lost = run / "checkpoints/step-6/optimizer.safetensors"
    lost.unlink()
    assert headloom("eval", run, "--checkpoint", 6, cwd=place).stdout == expected
    headloom("generate", run, "--checkpoint", 6, "--tokens", 1, cwd=place)
    headloom("export", run, "--checkpoint", 6, "--out", tmp_path / "hub", cwd=place)
    message = refused("train", run, "--resume", cwd=place, code=1)
    assert str(lost) in message and message.endswith("The checkpoint of step 3 is intact (--checkpoint 3).")
    # What one checkpoint lacks, another that is recommended has.
    (run / "checkpoints/step-3/optimizer.safetensors").unlink()
    assert refused("train", run, "--resume", cwd=place, code=1).endswith("No other checkpoint is intact.")
    (run / "checkpoints/step-6/model.safetensors").unlink()
    assert "The checkpoint of step 3 is intact" in refused("eval", run, "--checkpoint", 6, cwd=place, code=1)


def test_a_diverging_run_stops(place, tmp_path):
    message = refused(
        "train", "long.toml", "--out", tmp_path / "run", "--set", "train.lr=1e30", "--set", "train.warmup=0", cwd=place, code=1
    )
    assert "at step" in message and "no checkpoint" in message and "train.lr" in message
    assert "became nan at step" in message or "became inf at step" in message, "the sign of a NaN means nothing"


def test_generate_follows_its_seed_and_needs_no_corpus(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs/text", run)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("corpus.txt", "gone.txt"))

    def text(*arguments, **options):
        return headloom("generate", run, "--tokens", 24, *arguments, cwd=tmp_path, **options).stdout

    first = text("--prompt", "The ", "--seed", 3)
    assert first.startswith("The ") and first.endswith("\n")
    assert text("--prompt", "The ", "--seed", 3) == first
    assert text("--prompt", "The ", "--seed", 4) != first
    assert text("--prompt", "The ", "--temperature", 0, "--seed", 1) == text("--prompt", "The ", "--top-k", 1, "--seed", 2)
    assert text("--prompt", "-", "--seed", 3, input=b"The ") == first
    zero = ["generate", run, "--tokens", 0, "--prompt", "-"]
    assert headloom(*zero, input=b"a\0b", cwd=tmp_path).stdout == "a\0b\n"
    two = headloom(*zero, "--samples", 2, input=b"\0b", cwd=tmp_path).stdout
    assert two == "--- sample 1\n\0b\n--- sample 2\n\0b\n"
    # Where both go to one place, the line about the speed stands below the text.
    command = [str(BINARY), "generate", "runs/text", "--prompt", "T", "--tokens", "1"]
    both = subprocess.run(command, cwd=place, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    assert b"\nprompt: 1 token, " in both and b" text: 1 token, " in both
    unprompted = headloom("generate", run, "--tokens", 1, cwd=tmp_path).stderr
    assert "text: 1 token, " in unprompted and "prompt" not in unprompted
    assert "gone.txt" in refused("eval", run, cwd=tmp_path, code=1)
    assert refused("analyze", run, "maps", cwd=tmp_path, code=1).endswith("or read a text of yours with --text.")
    assert "expected best, last or one of the steps 3, 6" in refused("generate", run, "--checkpoint", 5, cwd=tmp_path)


def test_a_run_keeps_its_vocabulary(place, tmp_path):
    shutil.copy(place / "corpus.txt", tmp_path)
    headloom("vocabulary", "corpus.txt", "--size", 290, "--out", "my.model", cwd=tmp_path)
    # What is too small or too large says what is not.
    (tmp_path / "letters.txt").write_text("".join(chr(0x400 + i) + " " for i in range(90)) * 20)
    for method in ("bpe", "unigram"):
        for text, size in [("letters.txt", 300), ("corpus.txt", 5000)]:
            learn = ["vocabulary", text, "--method", method, "--out", "x.model", "--size"]
            said = refused(*learn, size, cwd=tmp_path)
            found = re.fullmatch(rf"--size {size} is too (small|large) for this text.*, expected at (least|most) (\d+)\.", said)
            assert found and found[1] == ("small" if size == 300 else "large"), said
            headloom(*learn, found[3], cwd=tmp_path)
            headloom("tokenize", "x.model", cwd=tmp_path, input=b"abc")
    # SentencePiece's BPE crashes on words of 64 KiB.
    (tmp_path / "word.txt").write_text("".join(random.Random(2).choices("ACGT", k=200_000)))
    headloom("vocabulary", "word.txt", "--size", 280, "--out", "word.model", cwd=tmp_path)
    assert '"AC' in headloom("tokenize", "word.model", cwd=tmp_path, input=b"ACGTACGTACGT").stdout
    (tmp_path / "other.model").write_bytes(b"another program's")
    message = refused("vocabulary", "corpus.txt", "--size", 290, "--out", "other.model", cwd=tmp_path)
    assert message == "other.model: is there and is no vocabulary; choose another file with --out."
    # One that cannot be read may be anything, and an empty one, as mktemp makes it, is nobody's.
    (tmp_path / "memory.model").symlink_to("/proc/self/mem")
    message = refused("vocabulary", "corpus.txt", "--size", 290, "--out", "memory.model", cwd=tmp_path, code=1)
    assert message == "memory.model: cannot be read: Input/output error."
    (tmp_path / "empty.model").write_text("")
    headloom("vocabulary", "corpus.txt", "--size", 290, "--out", "empty.model", cwd=tmp_path)
    assert (tmp_path / "empty.model").stat().st_size > 0
    assert (tmp_path / "other.model").read_bytes() == b"another program's"
    assert '"he"' in headloom("tokenize", "my.model", cwd=tmp_path, input=b"The quick fox").stdout
    (tmp_path / "text.toml").write_text(TEXT.replace("length = 16", 'length = 16\ntokenizer = "my.model"'))
    headloom("train", "text.toml", cwd=tmp_path)
    (tmp_path / "my.model").rename(tmp_path / "gone.model")
    run = tmp_path / "runs/text"
    assert headloom("generate", run, "--prompt", "The ", cwd=tmp_path).stdout.startswith("The ")
    result = json.loads(headloom("eval", run, "--json", cwd=tmp_path).stdout)
    bytes_per_token = result["loss"] / 0.6931471805599453 / result["bits_per_byte"]
    assert 1.05 < bytes_per_token < 45
    # No other is taken: neither bytes, nor a file by a model of bytes.
    for model, tokenizer, made in [
        (run, "bytes", f"another one, {run}/tokenizer.model"),
        (run, place / "other.json", f"another one, {run}/tokenizer.model"),
        (place / "runs/text", tmp_path / "gone.model", '"bytes"'),
    ]:
        (place / "other.json").write_text("{}")
        message = refused("eval", model, "--set", f"task.tokenizer='{tokenizer}'", cwd=place)
        expected = f"'task.tokenizer' is \"{tokenizer}\", but the run was made with {made}; leave it out to take that."
        assert message == expected
    headloom("eval", run, "--set", f"task.tokenizer='{tmp_path / 'gone.model'}'", cwd=tmp_path)
    assert "no_such.json" in refused("eval", run, "--set", "task.tokenizer='no_such.json'", cwd=tmp_path, code=1)
    assert "my.model" in refused("train", "text.toml", "--out", "again", cwd=tmp_path, code=1)


def test_eval_reports_and_writes_logits(place, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    logits = tmp_path / "logits.safetensors"
    done = headloom("eval", "runs/text", "--json", "--logits", logits, "--checkpoint", "last", cwd=place)
    result = json.loads(done.stdout)
    assert result["step"] == 6 and 0 < result["loss"] < 6
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / 0.6931471805599453)
    tensors = safetensors.load_file(logits)
    assert tensors["logits"].shape == (4, 16, 256) and tensors["tokens"].shape == (4, 16)
    assert "perplexity" in headloom("eval", "runs/text", cwd=place).stdout
    for key in ("model.width", "train.lr", "tasks.length"):
        message = refused("eval", "runs/text", "--set", f"{key}=64", cwd=place)
        assert message.startswith(f"--set {key}: ") and "expected a key of [task]" in message
    # A pipe is not replaced by a file, and is refused before anything is computed.
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    assert f"{pipe}: is a device, a pipe" in refused("eval", "runs/text", "--logits", pipe, cwd=place, code=1)
    assert pipe.is_fifo()
    # Any reader of the format reads the weights.
    parameters = safetensors.load_file(place / "runs/text/checkpoints/step-6/model.safetensors")
    described = json.loads(headloom("describe", "text.toml", "--json", cwd=place).stdout)
    assert sum(tensor.size for tensor in parameters.values()) == described["parameters"]


def test_eval_reads_the_half_that_training_evaluated(place, tmp_path):
    run = tmp_path / "half"
    options = ["--set", "train.eval_split=test", "--set", "train.steps=2"]
    headloom("train", "text.toml", *options, "--out", run, cwd=place)
    trained = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    result = json.loads(headloom("eval", run, "--json", cwd=place).stdout)
    assert result["split"] == "test" and result["loss"] == pytest.approx(trained, rel=1e-6)
    assert " of the test half (" in headloom("eval", run, cwd=place).stdout
    # Other windows are no halves of these.
    other = json.loads(headloom("eval", run, "--json", "--set", "task.length=8", cwd=place).stdout)
    assert other["split"] == "all" and other["sequences"] > result["sequences"]
    longer = headloom("eval", run, "--set", "task.length=4096", cwd=place, code=2).stderr
    assert longer.startswith("headloom: 'task.length' is 4096, expected at most the run's 'model.max_length', ")
    assert "; --context 4096 reads sequences of that length." in longer


def test_eval_knows_data_that_were_moved(place, tmp_path):
    (tmp_path / "before").mkdir()
    shutil.copy(place / "corpus.txt", tmp_path / "before/a.txt")
    options = ["--set", "task.paths=['before']", "--set", "train.eval_split=test", "--set", "train.steps=1"]
    headloom("train", place / "text.toml", *options, "--out", "run", cwd=tmp_path)
    expected = headloom("eval", "run", "--json", cwd=tmp_path).stdout
    (tmp_path / "before").rename(tmp_path / "after")
    for there in ("after", "after/a.txt"):
        moved = headloom("eval", "run", "--json", "--set", f"task.paths=['{there}']", cwd=tmp_path)
        assert moved.stdout == expected and moved.stderr == ""
    # Sequences of another length are chosen anew, of what was held out.
    shorter = json.loads(headloom("eval", "run", "--json", "--set", "task.paths=['after']", "--set", "task.length=8", cwd=tmp_path).stdout)
    assert shorter["split"] == "all" and shorter["read"]["share"] < 0.1
    # Other data are read whole.
    with open(tmp_path / "after/a.txt", "a") as file:
        file.write(" And more.")
    other = json.loads(headloom("eval", "run", "--json", "--set", "task.paths=['after']", cwd=tmp_path).stdout)
    assert other["split"] == "all" and other["read"]["share"] > 0.9


def test_eval_says_where_sequences_count_alike(tmp_path):
    (tmp_path / "mqar.toml").write_text(
        "[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 1\nbatch = 2\n[task]\ntype = 'mqar'\nvocabulary = 32\n"
        "segments = ['16:1:8', '32:6:8']\neval_sequences = 8\n"
    )
    headloom("train", "mqar.toml", "--out", "run", cwd=tmp_path)
    # A sequence with six questions counts as much as one with a single question.
    assert "of a sequence's targets, mean" in headloom("eval", "run", cwd=tmp_path).stdout
    # Where tokens are numbers, a space keeps the prompt's last and the text's first apart.
    assert headloom("generate", "run", "--prompt", "1 2", "--tokens", "2", cwd=tmp_path).stdout.startswith("1 2 ")


def test_eval_reads_long_contexts_in_pieces(place):
    def evaluated(*arguments):
        return json.loads(headloom("eval", "runs/text", "--json", *arguments, cwd=place).stdout)

    assert evaluated("--piece", 7)["loss"] == pytest.approx(evaluated()["loss"], rel=1e-5)
    pieces = evaluated("--context", 80, "--piece", 7)
    assert pieces["loss"] == pytest.approx(evaluated("--context", 80, "--piece", 80)["loss"], rel=1e-5)
    assert pieces["context"] == 80 and pieces["piece"] == 7 and pieces["cache"] == "full"
    forgetful = evaluated("--context", 80, "--cache", "tova:8")
    assert forgetful == evaluated("--context", 80, "--piece", 1, "--cache", "tova:8")
    done = headloom("eval", "runs/text", "--json", "--piece", 16, "--cache", "tova:8", cwd=place)
    assert json.loads(done.stdout)["loss"] == pytest.approx(evaluated()["loss"], rel=1e-5)
    assert done.stderr.strip().endswith("with pieces of 16 tokens the sequences of 16 tokens are one piece each: nothing is forgotten.")
    done = headloom("eval", "runs/text", "--cache", "window:8", "--set", "task.length=1", cwd=place)
    assert "with pieces of 1 token the sequences of 1 token are one piece each" in done.stderr
    assert forgetful["state_bytes"] < pieces["state_bytes"] and forgetful["loss"] != pieces["loss"]
    assert "in pieces of 512" in headloom("eval", "runs/text", "--context", 80, cwd=place).stdout
    # The logits are those that the loss is of.
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    file = place / "pieces.safetensors"
    for how in (["--cache", "window:2"], ["--cache-dtype", "int8"], ["--context", 24, "--piece", 7, "--cache", "tova:8"]):
        result = evaluated(*how, "--sequences", 1, "--logits", file)
        tensors = safetensors.load_file(file)
        assert len(tensors["tokens"]) == 1
        losses = torch.nn.functional.cross_entropy(tensors["logits"].flatten(0, 1), tensors["targets"].flatten())
        assert losses.item() == pytest.approx(result["loss"], rel=1e-6), how
    assert "the cache policy is \"tova\"" in refused("eval", "runs/text", "--cache", "tova", cwd=place)
    assert "the cache policy is \"tova:0\"" in refused("generate", "runs/text", "--cache", "tova:0", cwd=place)
    # The held-out part is that of the run, whatever the length.
    message = refused("eval", "runs/text", "--context", 96, cwd=place)
    assert message == "the held-out part of the text has 90 tokens, but a sequence of 96 and its last target take 97."
    told = headloom("eval", "runs/text", "--set", "task.held_out=0.5", cwd=place).stderr
    assert "task.held_out is 0.5, and the run held out 0.05 of the same data: some of what is read was trained on." in told
    # What --context cannot change is named as it was written.
    mqar = '{type="mqar", vocabulary=256, eval_sequences=8, %s}'
    for task, context, said in (
        ('{type="copy"}', 9, "the task 'copy' has no key 'length'."),
        (mqar % 'segments=["16:2:8"]', 64, "the task 'mqar' takes its lengths from 'task.segments'."),
        (mqar % "pairs=1", 3, "'task.length' is 3, expected at least 4"),
    ):
        message = refused("eval", "runs/text", "--context", context, "--set", f"task={task}", cwd=place)
        assert message.startswith(f"--context {context}: {said}"), message


def test_eval_says_what_narrower_types_cost(place):
    def evaluated(*arguments):
        return json.loads(headloom("eval", "runs/text", "--json", *arguments, cwd=place).stdout)

    trained = evaluated()
    assert "costs" not in trained
    for types in [
        ["--dtype", "bfloat16"],
        ["--quantize", "int8"],
        ["--dtype", "bfloat16", "--quantize", "int8"],
        ["--quantize", "int4"],
        ["--dtype", "bfloat16", "--quantize", "int4"],
    ]:
        narrow = evaluated(*types)
        assert narrow["dtype"] == ("bfloat16" if "bfloat16" in types else "float32")
        assert narrow["quantize"] == (types[-1] if "--quantize" in types else "")
        assert narrow["trained_loss"] == trained["loss"]
        assert narrow["costs"] == pytest.approx(narrow["loss"] - trained["loss"])
        assert abs(narrow["costs"]) < 0.05
        # The loss of each batch is a float32, and that of so small a model may be the same with int8.
        assert narrow["costs"] != 0 or types == ["--quantize", "int8"]
        headloom("generate", "runs/text", "--prompt", "The ", "--tokens", 4, *types, cwd=place)
    assert evaluated("--dtype", "float32")["costs"] == 0
    both = headloom("eval", "runs/text", "--dtype", "bfloat16", "--quantize", "int8", cwd=place).stdout
    assert "in int8, computing in bfloat16; " in both


def test_keys_and_values_in_int8(place):
    def evaluated(*arguments):
        return json.loads(headloom("eval", "runs/text", "--json", *arguments, cwd=place).stdout)

    wide, narrow = evaluated("--piece", 16), evaluated("--piece", 16, "--cache-dtype", "int8")
    assert narrow["cache_dtype"] == "int8" and narrow["dtype"] == "float32" and narrow["quantize"] == ""
    assert narrow["trained_loss"] == wide["loss"]
    assert 0 < abs(narrow["costs"]) < 0.01
    assert narrow["costs"] == pytest.approx(narrow["loss"] - wide["loss"])
    assert narrow["state_bytes"] < 0.4 * wide["state_bytes"]
    assert evaluated("--cache-dtype", "int8")["loss"] == pytest.approx(narrow["loss"], rel=1e-3)
    forgetful = evaluated("--piece", 1, "--cache", "tova:8", "--cache-dtype", "int8")
    assert forgetful["cache"] == "tova:8" and forgetful["state_bytes"] < narrow["state_bytes"]
    # What the type costs, and not what the policy costs.
    assert forgetful["trained_loss"] == evaluated("--cache", "tova:8")["loss"] != wide["loss"]
    told = headloom("eval", "runs/text", "--cache", "tova:8", "--cache-dtype", "int8", cwd=place).stdout
    assert f"{forgetful['trained_loss']:.4f} as trained, but with this cache, so " in told
    both = headloom("eval", "runs/text", "--quantize", "int4", "--cache-dtype", "int8", cwd=place).stdout
    assert "in int4, keys and values in int8; " in both
    alone = headloom("eval", "runs/text", "--cache-dtype", "int8", cwd=place).stdout
    assert "with keys and values in int8; " in alone
    written = headloom(
        "generate", "runs/text", "--prompt", "The ", "--tokens", 40, "--quantize", "int4", "--cache-dtype", "int8", cwd=place
    ).stdout
    assert written.startswith("The ")
    assert "--cache-dtype" in refused("generate", "runs/text", "--cache-dtype", "int4", cwd=place)




def test_generate_forgets_as_told(place):
    def text(*arguments):
        return headloom("generate", "runs/text", "--prompt", "The ", "--tokens", 40, *arguments, cwd=place).stdout

    assert text("--cache", "tova:500") == text("--cache", "full")
    assert text("--cache", "window:6").startswith("The ")


def test_generate_says_which_part_of_a_text_it_reads(place):
    said = "headloom: the text has outgrown the 16 positions that the model was built for (max_length): "
    said += "it goes on from its newest 8 tokens alone.\n"
    cases = [(40, 20, 8, 1), (17, 1, 8, 1), (16, 1, 16, 0), (10, 7, 10, 0), (10, 8, 10, 1), (10, 30, 10, 1)]
    for length, tokens, read, outgrown in cases:
        for samples in (1, 2):
            options = ["--prompt", "x" * length, "--tokens", tokens, "--temperature", 0, "--samples", samples]
            done = headloom("generate", "runs/text", *options, cwd=place)
            assert done.stderr.count(said) == done.stderr.count("headloom: ") == outgrown, (length, tokens)
            assert f"prompt: {read} tokens, " in done.stderr
            assert done.stdout.count("x" * length) == samples and done.stdout.endswith("\n")
    assert said[:20] not in headloom("generate", "runs/text", "--prompt", "x" * 40, "--cache", "window:6", cwd=place).stderr


def test_a_policy_is_for_layers_that_attend(place, tmp_path):
    def trained(name, *mixers):
        layers = "".join(f"[[model.layer]]\nmixer = {{ type = '{m}' }}\nchannel = {{ type = 'none' }}\n" for m in mixers)
        model = "[model]\nwidth = 16\ndepth = 2\nposition = { type = 'none' }\n" + layers
        task = "[task]\ntype = 'text'\npaths = ['corpus.txt']\nlength = 32\neval_tokens = 256\n"
        (place / f"{name}.toml").write_text(model + task + "[train]\nsteps = 1\nbatch = 2\neval_every = 1\n")
        headloom("train", f"{name}.toml", "--out", tmp_path / name, cwd=place)
        return tmp_path / name

    hybrid = trained("hybrid", "rwkv", "mha")
    text = [
        headloom("generate", hybrid, "--prompt", "The ", "--tokens", 20, "--cache", policy, cwd=place).stdout
        for policy in ("full", "tova:500", "tova:6")
    ]
    assert text[0] == text[1] and text[2].startswith("The ")
    recurrence = trained("recurrence", "rwkv", "mamba")
    for command in [["generate", recurrence, "--prompt", "The "], ["serve", recurrence]]:
        for option in (("--cache", "tova:6"), ("--cache-dtype", "int8")):
            assert "no layer keeps keys and values" in refused(*command, *option, cwd=place)
    # Nothing else is said beside it, though one piece holds a whole sequence.
    message = refused("eval", recurrence, "--cache", "tova:6", "--piece", 128, cwd=place)
    assert message == "the cache policy is tova:6, but no layer keeps keys and values that it could forget, expected \"full\"."


def test_describe_adds_up(place):
    result = json.loads(headloom("describe", "text.toml", "--json", "--length", 64, cwd=place).stdout)
    assert result["length"] == 64
    assert sum(part["parameters"] for part in result["parts"]) == result["parameters"]
    assert sum(part["flops_per_token"] for part in result["parts"]) == pytest.approx(result["flops_per_token"])
    assert "parameters" in headloom("describe", "text.toml", cwd=place).stdout
    assert result["measured_state"]["bytes"] == result["state_bytes"] > 0
    assert result["measured_state"]["bytes_per_token"] == result["state_bytes_per_token"]
    # What a state has from the first token on is not what each token adds.
    once = json.loads(headloom("describe", "text.toml", "--json", "--length", 1, cwd=place).stdout)
    assert once["measured_state"]["bytes_per_token"] == once["state_bytes_per_token"]
    branches = result["initial_branches"]
    assert [branch["layer"] for branch in branches] == list(range(len(branches)))
    assert all(branch["ratio"] == pytest.approx(branch["output_rms"] / branch["residual_rms"]) for branch in branches)
    assert "of the residual stream in layer 0" in headloom("describe", "text.toml", cwd=place).stdout
    # What does not decode has no state.
    full = ["describe", "text.toml", "--set", 'model.layer=[{mixer={type="aft",form="full"}}]']
    assert "decoding state        none" in headloom(*full, cwd=place).stdout
    nothing = json.loads(headloom(*full, "--json", cwd=place).stdout)
    assert nothing["state_bytes"] is None and nothing["state_bytes_per_token"] is None
    # A complete configuration is described without its corpus.
    complete = (place / "runs/text/config.toml").read_text().replace("corpus.txt", "gone.txt")
    (place / "complete.toml").write_text(complete)
    assert "parameters" in headloom("describe", "complete.toml", cwd=place).stdout


def test_describe_says_of_a_mechanism_only_where_there_is_one(place):
    said = {
        kind: headloom("describe", "text.toml", "--set", f"model.layer=[{{mixer={{type='{kind}'}}}}]", cwd=place).stdout
        for kind in ("mha", "mamba", "dcmha")
    }
    assert {kind: "to plain attention" in text for kind, text in said.items()} == {"mha": False, "mamba": False, "dcmha": True}


def test_describe_refuses_what_train_refuses(place):
    (place / "empty.toml").write_text("# nothing\n")
    (place / "model.toml").write_text(MODEL)
    for command in [("train", "--out", "new"), ("describe",)]:
        assert refused(*command, "empty.toml", cwd=place).startswith("empty.toml: is empty, expected ")
        assert "'train.device' is \"gpu\"" in refused(*command, "text.toml", "--set", "train.device=gpu", cwd=place)
        assert "the task text needs 'paths'" in refused(*command, "text.toml", "--set", "task.paths=[]", cwd=place)
    assert refused("train", "text.toml", "--set", "task.paths=['gone/*.md']", "--out", "new", cwd=place, code=1).startswith(
        "there is no file or folder 'gone/*.md', which 'task.paths' names; say where the data is "
    )
    assert "has no table [task]" in refused("train", "model.toml", cwd=place)
    # The device may be another machine's, and a model needs no task to be described.
    headloom("describe", "model.toml", "--set", "train.device=cuda:7", cwd=place)


def test_subnormal_numbers_count_as_zero(tmp_path):
    # A saturated softmax has such gradients, and they cost Intel's processors a hundred times as much.
    assert re.search(r"Below 1.2e-38 +counts as 0", headloom("list", "machine", cwd=tmp_path).stdout)


def test_list_names_everything(tmp_path):
    result = json.loads(headloom("list", "--json", cwd=tmp_path).stdout)
    text = headloom("list", cwd=tmp_path).stdout
    assert {"mixers", "channels", "blocks", "tasks", "presets"} <= set(result)
    for section in result.values():
        for item in section:
            assert item["name"] in text
            for option in item["options"]:
                assert option["doc"] and option["type"]
    assert {"mha", "talking_heads", "dcmha", "differential", "multi_token"} <= {m["name"] for m in result["mixers"]}
    assert {"text", "find_block", "recall"} <= {t["name"] for t in result["tasks"]}
    assert "heads" in headloom("list", "mha", cwd=tmp_path).stdout


def test_compare_reports_goes_on_and_keeps_to_its_configuration(tmp_path):
    (tmp_path / "small.toml").write_text(COMPARE)
    done = headloom("compare", "small.toml", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)
    out = tmp_path / "runs/small"
    report = (out / "report.html").read_text()
    assert "talking" in report and "http" not in report.replace("http://www.w3.org", "")
    for command, *more in ["train", "--resume"], ["generate"]:
        assert refused(command, "runs/small", *more, cwd=tmp_path, code=1) == (
            "runs/small: is the folder of a comparison, expected that of one of its runs, runs/small/runs/TASK/MODEL/seed-N."
        )
    before = (out / "runs/copy/mha/seed-1/metrics.jsonl").stat().st_mtime_ns
    assert "talking" in headloom("compare", "small.toml", cwd=tmp_path).stdout
    assert (out / "runs/copy/mha/seed-1/metrics.jsonl").stat().st_mtime_ns == before
    assert "unknown key 'modles'" in refused("compare", "small.toml", "--set", "modles=1", "--out", "x", cwd=tmp_path)
    for command in ["train", "describe"]:
        assert "headloom compare" in refused(command, "small.toml", cwd=tmp_path)
    # Where the advice names a folder, the command goes on with what is there.
    one = "runs/small/runs/copy/mha/seed-1"
    assert f"headloom train {one} trains it" in refused("compare", one, cwd=tmp_path)
    # --fresh empties a comparison's folder and no other.
    (tmp_path / "config.toml").write_text(COMPARE)
    assert "not a comparison's folder" in refused("compare", "small.toml", "--fresh", "--out", ".", cwd=tmp_path, code=1)
    assert out.exists()
    other = out / "runs/other"  # somebody else's
    shutil.copytree(out / "runs/copy/mha/seed-1", other)
    headloom("compare", "small.toml", "--fresh", "--set", "train.lr=0.5", cwd=tmp_path)
    assert (other / "config.toml").exists() and (out / "runs/copy/mha/seed-1/result.json").exists()


def test_an_interrupted_comparison_goes_on(tmp_path):
    (tmp_path / "c.toml").write_text(COMPARE.replace("steps = 3", "steps = 80").replace("batch = 4", "batch = 64"))
    process = subprocess.Popen(
        [str(BINARY), "compare", "c.toml"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs/c/runs/copy/mha/seed-1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 500, process)
    process.send_signal(signal.SIGINT)
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "The same command goes on." in message
    assert not (metrics.parent / "result.json").exists()
    # Its own report says so, and so do others.
    written = json.loads((tmp_path / "runs/c/comparison.json").read_text())
    for report in written, *(json.loads(headloom("report", f, "--json", cwd=tmp_path).stdout) for f in ("runs/c", metrics.parent)):
        assert (report["running"], report["interrupted"]) == (0, 1)
        run = next(run for task in report["tasks"] for model in task["models"] for run in model["runs"])
        assert run["state"] == "interrupted" and run["interruption"]["steps"] == 80
        assert run["interruption"]["go_on"].startswith("headloom compare ") and run["interruption"]["go_on"].endswith("runs/c")
    result = json.loads(headloom("compare", "c.toml", "--json", cwd=tmp_path).stdout)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "step_seconds" in line]
    assert steps == list(range(1, 81))
    assert json.dumps(result).count('"state": "finished"') == 4


def test_results_that_cannot_be_written_are_a_failure():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([str(BINARY), "list"], stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert done.returncode == 1 and b"standard output" in done.stderr


def test_tokenize_names_the_line_that_is_no_json_string():
    done = headloom("tokenize", "bytes", "--json", input=b'"a"\n"b"\n[1]\n', code=1)
    assert "standard input: line 3 is no JSON string, expected one on each line." in done.stderr
