"""`headloom compare`: sweeps, runs side by side, plans that are run elsewhere, and what is refused."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess

import pytest

from cli_support import BINARY, COMPARE, ENVIRONMENT, files, headloom, refused, wait_for

SWEEP = COMPARE + "[sweep]\nlr = [1e-3, 3e-3]\nextensions = 1\n"


def place(tmp_path, text=SWEEP):
    (tmp_path / "c.toml").write_text(text)
    return tmp_path


def losses(folder):
    """The last held-out loss of every run, and the number of steps that are written down."""
    out = {}
    for metrics in sorted(folder.rglob("metrics.jsonl")):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [line["step"] for line in lines if "lr" in line]
        assert steps == sorted(set(steps)), metrics
        out[str(metrics.parent.relative_to(folder))] = [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
    return out


def results(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("result.json")}


def test_runs_side_by_side_are_those_one_after_the_other(tmp_path):
    place(tmp_path)
    one = json.loads(headloom("compare", "c.toml", "--json", "--out", "one", cwd=tmp_path).stdout)
    done = headloom("compare", "c.toml", "--json", "--out", "two", "--jobs", "2", cwd=tmp_path)
    two = json.loads(done.stdout)
    numbered = re.findall(r"^\[(\d+)/(\d+)\] copy ", done.stderr, re.MULTILINE)
    assert {int(number) for number, _ in numbered} == set(range(1, int(numbered[-1][1]) + 1))
    assert one["finished"] == two["finished"] == one["planned"] == 4
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    before = results(tmp_path / "two")
    headloom("compare", "c.toml", "--out", "two", "--jobs", "2", cwd=tmp_path)
    assert results(tmp_path / "two") == before
    # One more seed costs its own runs only.
    headloom("compare", "c.toml", "--out", "two", "--jobs", "2", "--set", "seeds=[1,2,3]", cwd=tmp_path)
    after = results(tmp_path / "two")
    assert {p: t for p, t in after.items() if p in before} == before
    assert sorted(p.parent.name for p in set(after) - set(before)) == ["seed-3", "seed-3"]
    assert not list((tmp_path / "two").rglob(".headloom.lock"))


def test_the_commands_of_a_plan_may_run_in_any_order(tmp_path):
    place(tmp_path)
    whole = headloom("compare", "c.toml", "--json", "--out", "whole", cwd=tmp_path)
    rounds = []
    while lines := headloom("compare", "c.toml", "--out", "a folder", "--plan", cwd=tmp_path).stdout.splitlines():
        for line in reversed(lines):
            command = shlex.split(line)
            assert command[:3] == [str(BINARY), "compare", "a folder"]
            headloom(*command[1:], cwd=tmp_path)
        if not rounds:  # nobody has written down yet what the commands have trained
            sweep = json.loads(headloom("report", "a folder", "--json", cwd=tmp_path).stdout)["sweep_runs"]
            assert [run["state"] for run in sweep] == ["finished"] * 4
            assert all(run["points"] and run["setting"]["lr"] for run in sweep)
        rounds.append(len(lines))
    assert rounds[0] == 4 and rounds[-1] == 4, "two rates of two models, then two seeds of each"
    before = results(tmp_path / "a folder")
    report = headloom("compare", "c.toml", "--json", "--out", "a folder", cwd=tmp_path)
    assert results(tmp_path / "a folder") == before
    assert losses(tmp_path / "a folder") == losses(tmp_path / "whole")
    assert json.loads(report.stdout)["finished"] == json.loads(whole.stdout)["finished"] == 4
    message = refused("compare", "a folder", "--run", "runs/copy/mha/seed-9", cwd=tmp_path)
    assert "--run runs/copy/mha/seed-9: there is no such run" in message
    refused("compare", "c.toml", "--jobs", "0", cwd=tmp_path)
    assert refused("compare", "nowhere", "--run", "x", cwd=tmp_path, code=1) == "nowhere: is not the folder of a comparison."
    assert refused("compare", "c.toml", "--run", "", cwd=tmp_path) == "--run is empty, expected a name."
    for option in (["--set", "train.steps=3"], ["--jobs", "2"], ["--json"], ["--fresh"]):
        assert "cannot be given together" in refused("compare", "a folder", "--run", "x", *option, cwd=tmp_path)
    for option in (["--jobs", "2"], ["--json"]):
        assert "cannot be given together" in refused("compare", "a folder", "--plan", *option, cwd=tmp_path)
    # The folder stands for its configuration.
    assert json.loads(headloom("compare", "a folder", "--json", cwd=tmp_path).stdout)["finished"] == 4


def test_a_command_of_a_plan_trains_what_was_planned_or_nothing(tmp_path):
    place(tmp_path, COMPARE)
    lines = headloom("compare", "c.toml", "--out", "c", "--plan", cwd=tmp_path).stdout.splitlines()
    assert lines == headloom("compare", "c.toml", "--out", "c", "--plan", cwd=tmp_path).stdout.splitlines()
    old = shlex.split(lines[0])[1:]
    headloom("compare", "c.toml", "--out", "c", "--plan", "--set", "train.lr=0.5", cwd=tmp_path)
    message = refused(*old, cwd=tmp_path)
    assert message.startswith(f"--run {old[-1]}: the plan of c has runs/copy/mha/seed-1 with another configuration by now")
    assert not (tmp_path / "c/runs").exists()


def test_a_comparison_goes_on_from_any_working_directory(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    task = 'type = "text", paths = ["text.txt"], length = 16, eval_tokens = 64'
    place(tmp_path, COMPARE.replace('type = "copy", symbols = 8, count = 4, eval_sequences = 8', task))
    headloom("compare", "c.toml", "--out", "c", cwd=tmp_path)
    before = results(tmp_path / "c")
    (tmp_path / "elsewhere").mkdir()
    done = headloom("compare", "../c", "--json", cwd=tmp_path / "elsewhere")
    assert json.loads(done.stdout)["finished"] == 4 and results(tmp_path / "c") == before


def test_a_run_that_fails_is_said_at_once(tmp_path):
    place(tmp_path, COMPARE)
    done = headloom("compare", "c.toml", "--set", "train.lr=1e38", "--set", "seeds=[1]", cwd=tmp_path, code=1)
    assert len(re.findall(r"^\[[12]/2\] copy \w+ seed 1  the run failed: .* became ", done.stderr, re.MULTILINE)) == 2, done.stderr


def test_a_run_that_failed_before_it_began_is_not_planned_again(tmp_path):
    rng = random.Random(1)
    lines = [json.dumps({"input": f"{rng.choice('abcd') * 3} {i}", "label": rng.choice("xyz")}) + "\n" for i in range(300)]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    (tmp_path / "text.txt").write_text("".join(rng.choice(["abc ", "bcd ", "dab "]) for _ in range(3000)))
    headloom("vocabulary", "text.txt", "--size", 265, "--out", "v.model", cwd=tmp_path)
    text, _, _ = COMPARE.partition("[[tasks]]")
    task = 'type = "jsonl", path = "data.jsonl", tokenizer = "v.model", length = 24, eval_sequences = 8'
    place(tmp_path, f"{text}[[tasks]]\nname = 'copy'\ntask = {{ {task} }}\n")
    first, *others = headloom("compare", "c.toml", "--out", "c", "--plan", cwd=tmp_path).stdout.splitlines()
    (tmp_path / "data.jsonl").write_text("".join([*lines, "{broken\n"]))
    done = headloom(*shlex.split(first)[1:], cwd=tmp_path, code=1)
    assert "line 301: is not JSON" in done.stderr
    (tmp_path / "data.jsonl").write_text("".join(lines))
    assert headloom("compare", "c.toml", "--out", "c", "--plan", cwd=tmp_path).stdout.splitlines() == others
    report = json.loads(headloom("report", "c", "--json", cwd=tmp_path).stdout)
    (failed,) = [run for model in report["tasks"][0]["models"] for run in model["runs"] if run["state"] == "failed"]
    assert "line 301: is not JSON" in failed["problem"]
    # The documented way to have it tried again.
    (tmp_path / failed["folder"] / "result.json").unlink()
    assert len(headloom("compare", "c.toml", "--out", "c", "--plan", cwd=tmp_path).stdout.splitlines()) == len(others) + 1


def test_a_setting_of_a_sweep_that_fails_is_no_failure(tmp_path):
    place(tmp_path, COMPARE + "[sweep]\nlr = [1e-3, 1e38]\nextensions = 0\n")
    done = headloom("compare", "c.toml", "--out", "c", "--set", "seeds=[1]", cwd=tmp_path)
    assert "2 of the sweep's runs failed; the report says why." in done.stderr.splitlines()
    for model in ("mha", "talking"):
        assert f"failed in the sweep: {model}, lr = 1e+38: c/sweep/copy/{model}/" in " ".join(done.stdout.split())
    page = (tmp_path / "c/report.html").read_text()
    assert page.count("Failed in the sweep: ") == page.count(" became nan at step 2") == 2
    assert json.loads((tmp_path / "c/comparison.json").read_text())["failed"] == 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_long_warm_up_is_said_once(tmp_path, jobs):
    place(tmp_path)
    sentence = (
        "model 'mha' on task 'copy': train.warmup = 50 is not shorter than train.steps = 3: the learning rate only rises, "
        "to 6e-05 at the last step; a shorter warm-up is set by train.warmup = 0, for example\n"
    )
    said = headloom("compare", "c.toml", "--out", "c", "--jobs", jobs, cwd=tmp_path).stderr
    assert said.count("train.warmup") == said.count(sentence) + 1 == 2
    assert "train.warmup" not in headloom("compare", "c.toml", "--out", "c", cwd=tmp_path).stderr
    assert "train.warmup" not in headloom("compare", "c.toml", "--out", "d", "--plan", "--set", "train.warmup=1", cwd=tmp_path).stderr


def children(process):
    return [int(p) for p in open(f"/proc/{process}/task/{process}/children").read().split()]


def started(tmp_path, *arguments):
    return subprocess.Popen(
        [str(BINARY), "compare", "c.toml", *arguments],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


LONG = COMPARE.replace("steps = 3", "steps = 200").replace("eval_every = 3", "eval_every = 50")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of LONG where nothing happens to it."""
    folder = place(tmp_path_factory.mktemp("whole"), LONG)
    headloom("compare", "c.toml", "--out", "whole", cwd=folder)
    return losses(folder / "whole")


def test_the_run_of_a_killed_process_is_taken_up_again(tmp_path, whole):
    place(tmp_path, LONG)
    process = started(tmp_path, "--jobs", "2", "--out", "c")
    metrics = tmp_path / "c/runs/copy/mha/seed-1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 60)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert losses(tmp_path / "c") == whole
    # A run that is started again keeps its number.
    numbered = set(re.findall(r"^\[(\d)/4\] (copy \w+ seed \d)", errors, re.MULTILINE))
    assert len(numbered) == len({number for number, _ in numbered}) == len({run for _, run in numbered}) == 4, numbered


def replaced_by_a_file(folder):
    """False where a run saves there at this moment."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.write_text("")
    except IsADirectoryError:
        return False
    return True


def test_a_run_that_cannot_save_when_it_is_interrupted_says_so(tmp_path):
    place(tmp_path, LONG.replace("steps = 400", "steps = 100000"))
    process = started(tmp_path, "--jobs", "2", "--out", "c")
    metrics = [tmp_path / f"c/runs/copy/{model}/seed-1/metrics.jsonl" for model in ("mha", "talking")]
    wait_for(lambda: all(file.exists() and len(file.read_text().splitlines()) > 2 for file in metrics))
    for file in metrics:
        wait_for(lambda folder=file.parent / "checkpoints": replaced_by_a_file(folder))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("interrupted") == 1
    assert len(re.findall(r"^\[[12]/4\] headloom: the checkpoint of step \d+ could not be saved", errors, re.MULTILINE)) == 2, errors


def test_runs_go_on_with_their_data_or_the_comparison_stops(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    task = 'type = "text", paths = ["text.txt"], length = 16, eval_tokens = 64'
    three = LONG.replace("seeds = [1, 2]", "seeds = [1, 2, 3]")
    place(tmp_path, three.replace('type = "copy", symbols = 8, count = 4, eval_sequences = 8', task))
    process = started(tmp_path, "--out", "c")
    metrics = tmp_path / "c/runs/copy/mha/seed-1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    text.write_text("a quick brown fox jumps over the lazy dog. " * 40)
    refusal = "c/runs/copy/mha/seed-1: the data of 'task.paths' are not those that the run was trained on"
    way_out = "; restore them, or train all runs of the comparison anew with --fresh."
    message = refused("compare", "c.toml", "--out", "c", cwd=tmp_path)
    assert message.startswith(refusal) and message.endswith(way_out), message
    process = started(tmp_path, "--out", "c", "--jobs", "2")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.count(f"[1/6] headloom: {refusal}") == errors.count("--fresh") == 1, errors
    end = "the run copy mha seed 1 was refused, as is said above, so the comparison stops; finished runs are kept."
    assert errors.endswith(f"headloom: {end}\n"), errors
    assert not results(tmp_path / "c")


def test_an_interruption_reaches_all_processes_and_the_same_command_goes_on(tmp_path, whole):
    place(tmp_path, LONG)
    process = started(tmp_path, "--jobs", "2", "--out", "c")
    metrics = tmp_path / "c/runs/copy/mha/seed-1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.count("interrupted") == 1 and "The same command goes on" in errors
    assert re.search(r"^\[1/\d+\] copy mha .* left$", errors, re.MULTILINE)
    assert not results(tmp_path / "c") or len(results(tmp_path / "c")) < 4
    headloom("compare", "c.toml", "--jobs", "2", "--out", "c", cwd=tmp_path)
    assert losses(tmp_path / "c") == whole


def test_what_cannot_be_swept_is_one_sentence(tmp_path):
    place(tmp_path, COMPARE)
    for sweep, said in {
        "{lrr=[1e-3]}": "did you mean 'lr'?",
        "{lr=[1e-3, -1.0]}": "sweep.lr = -1.0: 'train.lr' is -1",
        "{lr={from=1e-2}}": "--set sweep: 'sweep.lr' has no 'to'",
        "{lr=[]}": "'sweep.lr' is empty",
        "{lr={from=1e-2, to=1e-3, count=3}}": "expected less than 'to'",
        "{lr={from=1e-3, to=1e-2, count=1}}": "count",
        "{lr=[1e-3], seeds=[2]}": "the seed 2, which is one of 'seeds'",
    }.items():
        assert said in refused("compare", "c.toml", "--set", f"sweep={sweep}", cwd=tmp_path), sweep
    settings = ["budget=flops", "train.steps=1", "models.1.model={depth=9}", "match_parameters=false"]
    message = refused("compare", "c.toml", *[word for setting in settings for word in ("--set", setting)], cwd=tmp_path)
    assert "model 'talking' on task 'copy'" in message and "is shorter than a step" in message
    assert files(tmp_path).keys() == {"c.toml"}


def test_speed_and_memory_are_measured_apart_and_once(tmp_path):
    place(tmp_path, COMPARE)
    done = headloom("compare", "c.toml", "--set", "speed.rounds=2", cwd=tmp_path)
    assert "measuring the speed of 2 models on copy" in done.stderr
    kept = tmp_path / "runs/c/speeds.json"
    speeds = json.loads(kept.read_text())["copy"]["models"]
    for model in ("mha", "talking"):
        for what in ("train_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"):
            assert len(speeds[model][what]) == 2 and min(speeds[model][what]) > 0
    before = kept.read_bytes()
    again = headloom("compare", "c.toml", "--set", "speed.rounds=2", cwd=tmp_path)
    assert "measuring" not in again.stderr and kept.read_bytes() == before
    # What trains nothing leaves the report as it was; one in progress has what was measured, too.
    report = [tmp_path / "runs/c" / name for name in ("report.html", "comparison.json")]
    whole = [path.read_bytes() for path in report]
    assert headloom("compare", "c.toml", "--set", "speed.rounds=2", "--plan", cwd=tmp_path).stdout == ""
    assert [path.read_bytes() for path in report] == whole
    assert headloom("compare", "c.toml", "--set", "speed.rounds=2", "--set", "seeds=[1,2,3]", "--plan", cwd=tmp_path).stdout != ""
    in_progress = json.loads(report[1].read_text())
    assert (in_progress["planned"], in_progress["finished"]) == (6, 4)
    for model in in_progress["tasks"][0]["models"]:
        assert model["decode_tokens_per_second"]["low"] == pytest.approx(min(speeds[model["model"]]["decode_tokens_per_second"]))
    headloom("compare", "c.toml", "--set", "speed.rounds=1", cwd=tmp_path)
    assert kept.read_bytes() != before
    # On another machine, or with other threads, they are measured anew; a report shows where they are from.
    once = json.loads(kept.read_text())
    kept.write_text(json.dumps(once | {"copy": once["copy"] | {"machine": "another"}}))
    written = json.loads(report[1].read_text())
    written["machine"]["Processor"] = "another"
    report[1].write_text(json.dumps(written))
    shown = json.loads(headloom("report", "runs/c", "--json", cwd=tmp_path).stdout)
    assert shown["machine"]["Processor"] == "another"
    assert shown["tasks"][0]["models"][0]["decode_tokens_per_second"]["median"] > 0
    assert "measuring" in headloom("compare", "c.toml", "--set", "speed.rounds=1", cwd=tmp_path).stderr
    headloom("compare", "c.toml", "--set", "speed.rounds=0", "--fresh", cwd=tmp_path)
    assert not kept.exists()


def test_speed_and_memory_are_those_of_all_training_lengths(tmp_path):
    """Whichever comes first: the steps of each length are timed."""
    task = "{ type = 'mqar', vocabulary = 24, eval_segments = ['16:2'], eval_sequences = 8, segments = [%s] }"
    lengths = ["'16:2:32'", "'512:2:32'"]
    tasks = [f"[[tasks]]\nname = '{name}'\ntask = {task % ', '.join(order)}\n" for name, order in (("up", lengths), ("down", lengths[::-1]))]
    place(
        tmp_path,
        "title = 'lengths'\nseeds = [1]\n[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 2\nbatch = 8\n[speed]\nrounds = 1\n"
        "[[models]]\nname = 'mha'\nmixer = { type = 'mha', heads = 2 }\n" + "".join(tasks),
    )
    headloom("compare", "c.toml", cwd=tmp_path)
    speeds = json.loads((tmp_path / "runs/c/speeds.json").read_text())
    memory = {name: speeds[name]["models"]["mha"]["peak_memory_bytes"][0] for name in ("up", "down")}
    assert memory["up"] == pytest.approx(memory["down"], rel=0.3), "where the first length alone counts they are 15 times apart"


def test_a_budget_of_seconds_is_measured_once(tmp_path):
    place(tmp_path, COMPARE.replace("steps = 3", "steps = 60"))
    arguments = ("compare", "c.toml", "--set", "budget=seconds", "--set", "match_parameters=false")
    deep = ("--set", "models.1.model={depth=8}", "--set", "speed.rounds=0")
    headloom(*arguments, *deep, cwd=tmp_path)
    steps = {}
    for model in ("mha", "talking"):
        lines = (tmp_path / f"runs/c/runs/copy/{model}/seed-1/config.toml").read_text().splitlines()
        steps[model] = [line for line in lines if line.startswith("steps")]
    assert steps["mha"] == ["steps = 60"] and 1 <= int(steps["talking"][0].split()[-1]) < 60
    before = results(tmp_path / "runs/c")
    headloom(*arguments, *deep, cwd=tmp_path)
    assert results(tmp_path / "runs/c") == before
    # Steps of two machines are not set against each other.
    kept = tmp_path / "runs/c/step_seconds.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"machine": "another"}))
    headloom(*arguments, *deep, cwd=tmp_path)
    more = ("--set", "models.1.model={depth=9}", "--set", "speed.rounds=0")
    assert 'steps were timed on "another", and this is "' in refused(*arguments, *more, cwd=tmp_path, code=1)


def test_a_run_of_a_sweep_belongs_to_its_comparison(tmp_path):
    place(tmp_path)
    headloom("compare", "c.toml", "--set", "speed.rounds=0", cwd=tmp_path)
    message = refused("train", "runs/c/sweep/copy/mha/seed-1001,lr=0.001", "--resume", "--set", "train.steps=9", cwd=tmp_path)
    assert "a run of the comparison" in message and "keeps its configuration" in message
