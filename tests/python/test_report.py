"""Reports of any runs, and their metrics for TensorBoard."""

import contextlib
import fcntl
import json
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import types
import urllib.error
import urllib.request

import pytest

from cli_support import BINARY, ENVIRONMENT, headloom, refused, wait_for
from headloom import tensorboard

CONFIG = """
[model]
width = 16
depth = 1
[[model.layer]]
mixer = { type = "mha", heads = 2 }
[task]
type = "copy"
count = 4
eval_sequences = 8
[train]
steps = 4
batch = 4
eval_every = 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "run.toml").write_text(CONFIG)
    for name, changes in {
        "plain": [],
        "plain-2": ["train.seed=2"],
        "wide": ["model.width=32"],
    }.items():
        headloom("train", "run.toml", "--out", name, *[w for c in changes for w in ("--set", c)], cwd=folder)
    comparison = CONFIG.replace("[model]", "seeds = [1, 2]\n[model]", 1)
    comparison = re.sub(r"\[task\](.*?)\[train\]", "[train]", comparison, flags=re.S)
    (folder / "compare.toml").write_text(
        comparison + "[[models]]\nname = 'mha'\n[[tasks]]\nname = 'copying'\ntask = { type = 'copy', count = 4, eval_sequences = 8 }\n"
    )
    headloom("compare", "compare.toml", "--out", "comparison", cwd=folder)
    return folder


def test_runs_that_differ_in_the_seed_are_one_model(place):
    done = headloom("report", "plain", "plain-2", "wide", "--out", "all.html", "--json", cwd=place)
    report = json.loads(done.stdout)
    (task,) = report["tasks"]
    assert task["task"] == "copy" and sorted(m["model"] for m in task["models"]) == ["plain", "wide"]
    assert report["seeds"] == [1, 2] and report["planned"] == 3
    page = (place / "all.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "plain" in page and "wide" in page
    assert "In progress" not in page  # "wide" has one seed, and nothing says that it should have two
    # The page is passed on: it has no path of this machine.
    assert report["command"] == "headloom report plain plain-2 wide --out all.html"
    assert str(BINARY) not in page and report["command"] in page


def test_the_name_of_a_report_ends_as_pages_do(place):
    for name in ["rep.htm", "REP.HTML"]:
        headloom("report", "plain", "--out", name, cwd=place)
        assert (place / name).read_text().startswith("<!DOCTYPE html>")
    assert "expected a name that ends in .html or .htm." in refused("report", "plain", "--out", ".HTM", cwd=place)


def test_tasks_of_two_tokenizers_are_apart_and_say_why(tmp_path):
    (tmp_path / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    text = CONFIG.replace('type = "copy"\ncount = 4\neval_sequences = 8', 'type = "text"\npaths = ["corpus.txt"]\nlength = 8')
    (tmp_path / "text.toml").write_text(text)
    headloom("vocabulary", "corpus.txt", "--size", 290, "--out", "v.model", cwd=tmp_path)
    for name, changes in {"bytes": [], "a": ["task.tokenizer=v.model"], "b": ["task.tokenizer=v.model", "train.lr=0.002"]}.items():
        headloom("train", "text.toml", "--out", name, *[w for c in changes for w in ("--set", c)], cwd=tmp_path)
    report = json.loads(headloom("report", "bytes", "a", "b", "--json", cwd=tmp_path).stdout)
    # The copies of the tokenizer in two runs are one.
    models = {task["task"]: sorted(model["model"] for model in task["models"]) for task in report["tasks"]}
    assert models == {"text": ["bytes"], "text (2)": ["a", "b"]}
    assert "the task `text (2)` differs from `text` in `tokenizer` ('a/tokenizer.model', not 'bytes')" in report["limits"]
    for name in ["one", "two", "three"]:
        (tmp_path / f"{name}.txt").write_text(f"{name} quick brown foxes jump over the lazy dog.\n" * 40)
    files = ["corpus.txt", "one.txt", "two.txt", "three.txt"]
    for name, paths in {"few": files[:2], "many": files}.items():
        headloom("train", "text.toml", "--out", name, "--set", f"task.paths={paths}", cwd=tmp_path)
    limits = json.loads(headloom("report", "few", "many", "--json", cwd=tmp_path).stdout)["limits"]
    assert f"in `paths` (['{tmp_path}/two.txt', and 3 more], not ['{tmp_path}/corpus.txt', and 1 more])" in limits
    # A report has no --set: where the data are is said in the run.
    (tmp_path / "three.txt").rename(tmp_path / "moved.txt")
    message = refused("report", "few", "many", cwd=tmp_path, code=1)
    assert message == (
        f"there is no file or folder '{tmp_path}/three.txt', which 'task.paths' in many/config.toml names; put the data back "
        "there, or write in that line where they are now."
    )
    config = tmp_path / "many/config.toml"
    config.write_text(config.read_text().replace("three.txt", "moved.txt"))
    headloom("report", "few", "many", cwd=tmp_path)


def test_a_single_run_keeps_its_report(place):
    headloom("report", "plain", cwd=place)
    assert (place / "plain/report.html").exists()


def test_a_comparison_stands_for_its_runs(place):
    done = headloom("report", "comparison", "--json", cwd=place)
    report = json.loads(done.stdout)
    assert [t["task"] for t in report["tasks"]] == ["copying"] and report["finished"] == 2
    assert [m["model"] for m in report["tasks"][0]["models"]] == ["mha"]
    assert (place / "report.html").exists()


def test_a_comparison_is_in_the_order_of_its_configuration_with_its_speeds(tmp_path):
    text = CONFIG.replace("[model]", "seeds = [1]\nmatch_parameters = false\nspeed = { rounds = 2 }\n[model]", 1)
    text = re.sub(r"\[task\](.*?)\[train\]", "[train]", text, flags=re.S)
    for name, changes in {"plain": "", "wide": "model = { width = 32 }", "also": "mixer = { type = 'talking_heads' }"}.items():
        text += f"[[models]]\nname = '{name}'\n{changes}\n"
    for name, count in (("two", 2), ("four", 4)):
        text += f"[[tasks]]\nname = '{name}'\ntask = {{ type = 'copy', count = {count}, eval_sequences = 8 }}\n"
    (tmp_path / "c.toml").write_text(text)
    whole = json.loads(headloom("compare", "c.toml", "--out", "c", "--json", "--jobs", "2", cwd=tmp_path).stdout)
    # The baseline is the first model also where it has begun on another task alone.
    for absent in (False, True):
        if absent:
            shutil.rmtree(tmp_path / "c/runs/two/plain")
        report = json.loads(headloom("report", "c/", "--json", cwd=tmp_path).stdout)
        assert [task["task"] for task in report["tasks"]] == ["two", "four"]
        assert [model["model"] for model in report["tasks"][1]["models"] if model["baseline"]] == ["plain"]
        for task, same in list(zip(report["tasks"], whole["tasks"]))[absent:]:
            expected = {model["model"]: model for model in same["models"]}
            assert {model["model"] for model in task["models"]} == {"plain", "wide", "also"}
            for model in task["models"]:
                for what in ("tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"):
                    assert model[what] == expected[model["model"]][what], (model["model"], what)
                assert model["decode_tokens_per_second"]["low"] > 0


def test_sizes_of_a_comparison_are_tasks_of_their_own(place, tmp_path):
    text = (place / "compare.toml").read_text()
    for width in (16, 32):
        text += f"[[sizes]]\nname = '{width}'\nmodel = {{ width = {width} }}\n"
    (tmp_path / "c.toml").write_text(text)
    for out, seed in (("one", 1), ("two", 2)):
        headloom("compare", "c.toml", "--out", out, "--set", "speed.rounds=0", "--set", f"seeds=[{seed}]", cwd=tmp_path)
    report = json.loads(headloom("report", "one", "two", "--json", cwd=tmp_path).stdout)
    models = {task["task"]: [(m["model"], m["result"]["count"]) for m in task["models"]] for task in report["tasks"]}
    assert models == {"copying-16": [("mha", 2)], "copying-32": [("mha", 2)]}
    # In another order, too, and where one of them has fewer.
    sizes = text[text.index("[[sizes]]") :].split("[[sizes]]")[1:]
    for out, seed, kept in (("turned", 3, sizes[::-1]), ("less", 4, sizes[1:])):
        (tmp_path / "c.toml").write_text(text[: text.index("[[sizes]]")] + "".join("[[sizes]]" + one for one in kept))
        headloom("compare", "c.toml", "--out", out, "--set", "speed.rounds=0", "--set", f"seeds=[{seed}]", cwd=tmp_path)
    report = json.loads(headloom("report", "one", "turned", "less", "--json", cwd=tmp_path).stdout)
    models = {task["task"]: [(m["model"], m["result"]["count"]) for m in task["models"]] for task in report["tasks"]}
    assert models == {"copying-16": [("mha", 2)], "copying-32": [("mha", 3)]}


def test_a_model_of_a_comparison_has_one_name_on_all_tasks(place, tmp_path):
    """Also where another comparison's model of this name is on some of them alone."""
    text = (place / "compare.toml").read_text()
    longer = "[[tasks]]\nname = 'longer'\ntask = { type = 'copy', count = 6, eval_sequences = 8 }\n"
    (tmp_path / "wide.toml").write_text(text.replace("[[tasks]]", longer + "[[tasks]]").replace("width = 16", "width = 32"))
    headloom("compare", "wide.toml", "--out", "wide", "--set", "speed.rounds=0", "--set", "seeds=[1]", cwd=tmp_path)
    report = json.loads(headloom("report", place / "comparison", "wide", "--json", cwd=tmp_path).stdout)
    models = {task["task"]: sorted(m["model"] for m in task["models"]) for task in report["tasks"]}
    assert models == {"copying": ["mha", "mha (2)"], "longer": ["mha (2)"]}


def test_what_a_run_has_been_through_keeps_it_apart(place, tmp_path):
    """Weights of another run at the start, and steps with other options, are no equal training."""
    short = ["--set", "train.schedule=constant", "--set", "train.steps=2"]
    for seed in (1, 2):
        own = ["--set", f"train.seed={seed}"]
        headloom("train", place / "run.toml", "--out", f"plain-{seed}", *own, cwd=tmp_path)
        headloom("train", place / "run.toml", "--out", f"tuned-{seed}", "--from", f"plain-{seed}", "--checkpoint", "4", *own,
                 cwd=tmp_path)  # fmt: skip
        headloom("train", place / "run.toml", "--out", f"changed-{seed}", *short, "--set", "train.lr=0.5", *own, cwd=tmp_path)
        back = ["--set", "train.schedule=cosine", "--set", "train.steps=4", "--set", "train.lr=0.001"]
        headloom("train", f"changed-{seed}", "--resume", *back, cwd=tmp_path)
        headloom("train", place / "run.toml", "--out", f"longer-{seed}", *short, *own, cwd=tmp_path)
        headloom("train", f"longer-{seed}", "--resume", "--set", "train.steps=4", cwd=tmp_path)

    def told(*names):
        folders = [f"{name}-{seed}" for seed in (2, 1) for name in names]
        report = json.loads(headloom("report", *folders, "--out", "r.html", "--json", cwd=tmp_path).stdout)
        models = report["tasks"][0]["models"]
        assert [m["result"]["count"] for m in models] == [2] * len(names)
        return {m["model"]: m.get("train_differences", "") for m in models}

    (lr,) = re.findall(r"(?m)^lr = (.*)$", (place / "plain/config.toml").read_text())
    assert lr == "0.001"
    at_the_start = "weights of `plain-2` (step 4) at the start"
    until = "other options until step 2 (lr = 0.5, schedule = 'constant')"
    assert told("plain", "tuned", "changed") == {"plain-2": "", "tuned-2": at_the_start, "changed-2": until}
    assert told("tuned", "plain") == {"tuned-2": "", "plain-2": f"no {at_the_start}"}
    # With a constant rate it does not matter that the run was shorter.
    assert told("longer") == {"longer-2": ""}
    (tmp_path / "tuned-1/origin.json").write_text("{")
    assert "tuned-1/origin.json: is damaged, expected " in refused("report", "plain-1", "tuned-1", cwd=tmp_path, code=1)


def test_data_that_have_changed_are_found_under_every_seed(tmp_path):
    config = CONFIG.replace('type = "copy"\ncount = 4\neval_sequences = 8', "type = 'text'\npaths = ['text']\nlength = 8")
    (tmp_path / "run.toml").write_text(config)
    (tmp_path / "text").mkdir()
    text = "All happy families are alike; each unhappy family is unhappy in its own way. " * 20
    for seed, written in {1: text, 2: text.upper(), 3: text.upper()}.items():
        (tmp_path / "text/a.txt").write_text(written)
        headloom("train", "run.toml", "--out", f"run-{seed}", "--set", f"train.seed={seed}", cwd=tmp_path)
    headloom("report", "run-2", "run-3", "--out", "r.html", cwd=tmp_path)
    message = refused("report", "run-2", "run-3", "run-1", cwd=tmp_path)
    assert "run-1: the data of 'task.paths' are not those that the run was trained on" in message

def test_what_is_trained_otherwise_is_no_claim(place, tmp_path):
    """Every claim needs equal training, except in what each comparison has swept."""
    for name, changes in {"rate": ["train.lr=0.5", "train.eval_every=4"], "same": ["train.eval_every=4", "train.seed=2"]}.items():
        headloom("train", place / "run.toml", "--out", name, *[w for c in changes for w in ("--set", c)], cwd=tmp_path)

    def told(*folders):
        report = json.loads(headloom("report", *folders, "--out", "r.html", "--json", cwd=tmp_path).stdout)
        return report, {m["model"]: m.get("train_differences", "") for m in report["tasks"][0]["models"]}

    report, differences = told(place / "plain", "rate", "same")
    assert differences == {"plain": "", "rate": "lr = 0.5", "same": ""}
    assert "no training option was swept" in report["limits"]
    text = (place / "compare.toml").read_text() + "[sweep]\nlr = [1e-9, 1e-2]\nextensions = 0\n"
    text += "[[models]]\nname = 'talking'\nmixer = { type = 'talking_heads' }\ntrain = { beta1 = 0.8 }\n"
    (tmp_path / "c.toml").write_text(text)
    headloom("compare", "c.toml", "--out", "c", "--set", "speed.rounds=0", cwd=tmp_path)

    def choose(rate, runs):
        """As if another rate had been chosen."""
        for file in [*runs.glob("*/config.toml"), *runs.rglob("state.json")]:
            text, count = re.subn(r"(\n|\\n)lr = [0-9.e-]+", rf"\g<1>lr = {rate}", file.read_text())
            assert count == 1
            file.write_text(text)

    choose(0.3, tmp_path / "c/runs/copying/talking")
    report, differences = told("c")
    assert differences == {"mha": "", "talking": "beta1 = 0.8"}
    assert report["swept"] == ["lr"] and "swept" not in report["limits"]
    report, differences = told("c", place / "plain")
    assert report["swept"] == [] and differences["plain"].startswith("lr = ") and "eval_split = 'all'" in differences["plain"]
    # Rates that were chosen from others are not tuned alike.
    for name, rates in {"alike": "[1e-9, 1e-2]", "finer": "[1e-9, 1e-5, 1e-2]"}.items():
        text = (tmp_path / "c.toml").read_text().replace("[1e-9, 1e-2]", rates).replace("'talking'", f"'{name}'")
        (tmp_path / f"{name}.toml").write_text(text.replace("beta1 = 0.8", ""))
        headloom("compare", f"{name}.toml", "--out", name, "--set", "speed.rounds=0", "--set", "seeds=[7]", cwd=tmp_path)
        choose(0.2, tmp_path / f"{name}/runs/copying/{name}")
        report, differences = told("c", name)
        assert differences[name] == {"alike": "", "finer": "lr = 0.2"}[name]
        assert report["swept"] == {"alike": ["lr"], "finer": []}[name]
        assert ("training options were not swept in the same way" in report["limits"]) == (name == "finer")


def test_a_run_that_has_stopped_early_is_finished(place, tmp_path):
    for split in ("all", "test"):
        task = 'task={type="induction", vocabulary=3, length=8, eval_sequences=64}'
        settings = [task, "train.steps=400", "train.stop_accuracy=0.4", f"train.eval_split={split}"]
        given = [word for setting in settings for word in ("--set", setting)]
        headloom("train", place / "run.toml", "--out", split, *given, cwd=tmp_path)
        report = json.loads(headloom("report", split, "--json", cwd=tmp_path).stdout)
        assert (report["finished"], report["running"]) == (1, 0)
        (task,) = report["tasks"]
        assert task["models"][0]["runs"][0]["points"][-1]["step"] < 400
        assert "runs end once they reach an accuracy of 40.0% on validation data" in report["limits"]
        assert ("which is half of the data of their results" in report["limits"]) == (split == "all")


def without_circumstances(report):
    """What is said, and not by whom, when and from which folder."""

    def walk(part):
        if isinstance(part, dict):
            return {key: walk(value) for key, value in part.items() if key not in ("command", "date", "machine", "folder")}
        return [walk(value) for value in part] if isinstance(part, list) else part

    return walk(report)


def headings(page):
    return re.findall(r"<h[123][^>]*>.*?</h[123]>|<summary>.*?</summary>", page, flags=re.S)


MODELS = "[[models]]\nname = 'mha'\n[[models]]\nname = 'talking'\nmixer = { type = 'talking_heads' }\n"
COMPARED = {
    "a choice at its edge": MODELS + "[sweep]\nlr = [1e-6, 1e-3]\nextensions = 0\n",
    "a swept option of the mixer": MODELS + "[sweep]\nmixer.qk_norm = [true]\n[robustness]\nmodel = { init_std = 0.3 }\n",
    "a scaling law": MODELS + "".join(f"[[sizes]]\nname = '{n}'\nmodel = {{ width = {n} }}\ntrain = {{ steps = {n} }}\n" for n in (8, 16, 32)),
    "no setting that can be chosen": MODELS + "[sweep]\nlr = [1e30]\n",
    "a model without a result": MODELS + "train = { lr = 1e30 }\n",
    "an end before the budget": MODELS + "train = { stop_accuracy = 0.01 }\n",
}


@pytest.mark.parametrize("case", COMPARED)
def test_a_comparison_is_reported_as_it_reports_itself(tmp_path, case):
    text = re.sub(r"\[task\](.*?)\[train\]", "[train]", CONFIG, flags=re.S)
    seeds = [5, 1] if case == "a scaling law" else [5, 1, 2, 3, 4]
    text = f"title = 'Mixers'\nseeds = {seeds}\nspeed = {{ rounds = 0 }}\n" + text + COMPARED[case]
    (tmp_path / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    tasks = {"copying": "type = 'copy', symbols = 4, count = 4", "text": "type = 'text', paths = ['corpus.txt'], length = 8"}
    for name, task in tasks.items():
        text += f"[[tasks]]\nname = '{name}'\ntask = {{ {task}, {'eval_tokens = 128' if name == 'text' else 'eval_sequences = 16'} }}\n"
    (tmp_path / "c.toml").write_text(text)
    fails = 1 if case in ("no setting that can be chosen", "a model without a result") else 0
    whole = json.loads(headloom("compare", "c.toml", "--out", "c", "--json", "--jobs", 2, cwd=tmp_path, code=fails).stdout)
    report = json.loads(headloom("report", "c", "--json", cwd=tmp_path).stdout)
    assert without_circumstances(report) == without_circumstances(whole)
    assert headings((tmp_path / "report.html").read_text()) == headings((tmp_path / "c/report.html").read_text())
    models = [model for task in whole["tasks"] for model in task["models"]]
    if case == "a choice at its edge":
        assert any("lr of `mha` at the edge of its sweep" in m["against_baseline"]["caveats"] for m in models)
    if case == "a scaling law":
        assert [law["task"] for law in report["scaling"]] == ["copying", "text"]
    if case == "a swept option of the mixer":
        assert all("qk_norm = true" in m["config"] for m in models)
    # Beside another run, what is at an edge is no claim either; the file of an earlier version has fewer keys.
    if case == "a choice at its edge":
        headloom("train", "c/runs/text/mha/seed-1/config.toml", "--out", "other", "--set", "train.seed=9", cwd=tmp_path)
        both = json.loads(headloom("report", "c", "other", "--json", cwd=tmp_path).stdout)
        (task,) = [task for task in both["tasks"] if task["task"] == "text"]
        caveats = {m["model"]: m["against_baseline"]["caveats"] for m in task["models"]}
        assert "lr of `talking` at the edge of its sweep" in caveats["talking"]
        (tmp_path / "c/comparison.json").write_text("{}")
        without = json.loads(headloom("report", "c", "--json", cwd=tmp_path).stdout)
        assert without["finished"] == 20 and without["title"] == "Mixers"


def test_a_run_that_failed_before_its_first_evaluation_is_reported(place, tmp_path):
    shutil.copytree(place / "comparison", tmp_path / "c")
    run = tmp_path / "c/runs/copying/mha/seed-1"
    (run / "metrics.jsonl").unlink()
    result = {"problem": "there is too little memory.", "warning": "", "tokens_per_second": 0.0, "peak_memory_bytes": -1}
    (run / "result.json").write_text(json.dumps(result))
    report = json.loads(headloom("report", "c", "--json", cwd=tmp_path).stdout)
    assert (report["finished"], report["failed"], report["planned"]) == (1, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 1, "nowhere: is not the folder of a run or of a comparison."),
        (["."], 1, ".: has no config.toml, expected the folder of a run or of a comparison."),
        (["plain", "plain/"], 2, "plain/: the run is named twice."),
        (["plain", "--out", "no/where.html"], 1, "no/where.html: there is no folder "),
        ([], 2, "RUN is missing, expected folders of runs"),
    ],
)
def test_what_cannot_be_reported_is_named(place, arguments, code, message):
    assert message in headloom("report", *arguments, cwd=place, code=code).stderr


def test_a_folder_that_cannot_be_written_is_told_of_out(place, tmp_path):
    runs = [place / "plain", place / "wide"]
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)), "env": ENVIRONMENT}
    message = headloom("report", *runs, cwd=tmp_path, code=1, **full).stderr
    assert message == "headloom: report.html: cannot be written: File too large; choose another file with --out.\n"
    message = headloom("report", *runs, "--out", "report.html", cwd=tmp_path, code=1, **full).stderr
    assert message == "headloom: report.html: cannot be written: File too large.\n"
    assert not list(tmp_path.iterdir())


def test_links_lead_to_the_runs_from_wherever_the_report_is(place, tmp_path):
    for folder in ("proj/runs", "pages"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copytree(place / "plain", tmp_path / "proj/runs/plain")
    for out, link in {"../pages/r.html": "../proj/runs/plain", "../r.html": "proj/runs/plain", "runs/../r.html": "runs/plain"}.items():
        report = json.loads(headloom("report", "runs/plain", "--out", out, "--json", cwd=tmp_path / "proj").stdout)
        assert report["tasks"][0]["models"][0]["runs"][0]["folder"] == link, out


def test_lines_that_are_no_json_are_named(place, tmp_path):
    shutil.copytree(place / "plain", tmp_path / "run")
    metrics = tmp_path / "run/metrics.jsonl"
    whole = metrics.read_text()
    expected = headloom("report", "run", "--json", cwd=tmp_path)
    lines = whole.splitlines(keepends=True)

    def said(*content):
        metrics.write_text("".join(content))
        done = headloom("report", "run", "--json", cwd=tmp_path)
        assert done.stdout == expected.stdout
        return [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]

    assert said(whole, '{"step": 5, "lo') == said(whole, "\n") == []  # interrupted; an empty line
    assert said(lines[0], '{"step": 2, "lo\n', *lines[1:]) == ["headloom: run/metrics.jsonl: line 2 is no JSON object and is left out."]
    assert said("a\n", *lines, "[]\n") == [f"headloom: run/metrics.jsonl: lines 1, {len(lines) + 2} are no JSON objects and are left out."]
    assert said(*["a\n"] * 7, *lines) == ["headloom: run/metrics.jsonl: lines 1, 2, 3, 4, 5, and 2 more are no JSON objects and are left out."]


@contextlib.contextmanager
def watched(folder, cwd):
    """The address at which `report FOLDER --watch` serves its page."""
    server = subprocess.Popen(
        [str(BINARY), "report", str(folder), "--watch", "--port", "0"], cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


def test_watching_sees_a_run_that_is_trained_anew(place, tmp_path):
    subprocess.run(["cp", "-r", place / "plain", tmp_path / "run"], check=True)
    with watched("run", tmp_path) as address:

        def rows(page):
            return re.findall(r"<td.*?</td>", re.sub(r'<a href="\./run/">(.*?)</a>', r"\1", page), flags=re.S)

        before = rows(urllib.request.urlopen(address, timeout=30).read().decode())
        shutil.rmtree(tmp_path / "run")
        headloom("train", place / "run.toml", "--out", "run", "--set", "model.width=48", cwd=tmp_path)
        after = rows(urllib.request.urlopen(address, timeout=30).read().decode())
        headloom("report", "run", "--out", "fresh.html", cwd=tmp_path)
        assert not any("href" in row for row in after)  # to folders, which no server has
        assert after == rows((tmp_path / "fresh.html").read_text()) != before


def test_watching_writes_no_file(place):
    said = headloom("report", "plain", "--watch", "--out", "page.html", cwd=place, code=2).stderr
    assert "--watch serves a page and writes no file: leave out --out or --watch." in said


def test_a_copy_of_a_run_is_refused(place, tmp_path):
    subprocess.run(["cp", "-r", place / "plain", tmp_path / "copy"], check=True)
    assert "same configuration and seed as plain" in headloom("report", "plain", tmp_path / "copy", cwd=place, code=2).stderr


def test_watching_serves_what_has_come(place, tmp_path):
    subprocess.run(["cp", "-r", place / "plain", tmp_path / "run"], check=True)
    with watched(tmp_path / "run", tmp_path) as address:
        before = urllib.request.urlopen(address, timeout=30).read().decode()
        assert 'http-equiv="refresh"' in before
        port = re.search(r":(\d+)/", address)[1]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(address, headers={"Host": f"evil.example:{port}"}), timeout=30)
        said = f"the Host is 'evil.example:{port}', expected localhost, 127.0.0.1 and [::1], because the report is for this machine"
        assert refused.value.code == 421 and refused.value.read().decode() == f"{said} alone.\n"
        with pytest.raises(urllib.error.HTTPError) as other:
            urllib.request.urlopen(address + "favicon.ico", timeout=30)
        assert other.value.code == 404
        assert other.value.read().decode() == "there is no GET /favicon.ico here; the report is at GET /.\n"
        with pytest.raises(urllib.error.HTTPError) as posted:
            urllib.request.urlopen(address, data=b"{}", timeout=30)
        assert posted.value.read().decode() == "there is no POST / here; the report is at GET /.\n"
        second = headloom("report", place / "plain", "--watch", "--port", port, cwd=tmp_path, code=1).stderr
        assert second == f"headloom: cannot listen at 127.0.0.1:{port}: Address already in use.\n"
        with open(tmp_path / "run/metrics.jsonl", "a") as metrics:
            metrics.write('{"step":6,"tokens":999,"seconds":9.0,"eval_loss":0.1,"accuracy":0.875,"train_loss":0.1}\n')
        after = urllib.request.urlopen(address, timeout=30).read().decode()
        assert "12.5%" in after and "12.5%" not in before
        # A page that cannot be made says why, and renews itself too.
        (tmp_path / "run/metrics.jsonl").rename(tmp_path / "metrics.jsonl")
        gone = urllib.request.urlopen(address, timeout=30).read().decode()
        assert 'http-equiv="refresh"' in gone and "run/metrics.jsonl: cannot be read" in gone
        (tmp_path / "metrics.jsonl").rename(tmp_path / "run/metrics.jsonl")
        assert urllib.request.urlopen(address, timeout=30).read().decode() == after


def test_a_killed_run_was_interrupted(place, tmp_path):
    training = subprocess.Popen(
        [str(BINARY), "train", str(place / "run.toml"), "--out", "run", "--set", "train.steps=1000000", "--set", "train.eval_every=50"],
        cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: list(tmp_path.glob("run/checkpoints/step-*")), training)
        report = json.loads(headloom("report", "run", "--json", cwd=tmp_path).stdout)
        assert (report["running"], report["interrupted"]) == (1, 0) and training.poll() is None
        with watched("run", tmp_path) as address:
            assert ", 1 under way" in urllib.request.urlopen(address, timeout=30).read().decode()
            training.kill()
            training.wait()
            # No file has changed since the last page need have been made.
            page = urllib.request.urlopen(address, timeout=30).read().decode()
            assert ", 1 was interrupted" in page and "under way" not in page
    finally:
        training.kill()
        training.wait()
    assert (tmp_path / "run/.headloom.lock").exists()
    step = json.loads([line for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines() if line.endswith("}")][-1])["step"]
    saved = max(int(p.name[5:]) for p in (tmp_path / "run/checkpoints").glob("step-*"))
    (tmp_path / "run").rename(tmp_path / "my run")
    # A copy has no lock.
    shutil.copytree(tmp_path / "my run", tmp_path / "copy", ignore=shutil.ignore_patterns(".headloom.lock"))
    for name, word in {"my run": "'my run'", "copy": "copy"}.items():
        done = headloom("report", name, "--json", cwd=tmp_path)
        (run,) = json.loads(done.stdout)["tasks"][0]["models"][0]["runs"]
        assert run["state"] == "interrupted"
        go_on = f"headloom train {word} --resume"
        assert run["interruption"] == {"step": step, "steps": 1000000, "saved_step": saved, "go_on": go_on}
        said = headloom("report", name, cwd=tmp_path).stdout
        assert f"after step {step} of 1000000; step {saved} is saved. Go on with:\n    {go_on}\n" in said.replace("saved.\nGo", "saved. Go")


def test_a_run_whose_training_failed_says_why_until_it_goes_on(place, tmp_path):
    message = refused("train", str(place / "run.toml"), "--out", "run", "--set", "train.lr=1e38", cwd=tmp_path, code=1)
    assert "became" in message
    (run,) = json.loads(headloom("report", "run", "--json", cwd=tmp_path).stdout)["tasks"][0]["models"][0]["runs"]
    assert run["state"] == "failed" and run["problem"] == message.removeprefix("headloom: ").strip()
    headloom("train", str(place / "run.toml"), "--out", "run", "--resume", cwd=tmp_path)
    (run,) = json.loads(headloom("report", "run", "--json", cwd=tmp_path).stdout)["tasks"][0]["models"][0]["runs"]
    assert run["state"] == "finished" and json.loads((tmp_path / "run/result.json").read_text())["problem"] == ""


def test_a_run_by_itself_that_diverged_says_so_in_reports(place, tmp_path):
    done = headloom("train", str(place / "run.toml"), "--out", "run", "--set", "train.lr=10.0", "--set", "train.clip=0.0", "--set", "train.warmup=0", "--set", "train.steps=20", cwd=tmp_path)
    assert "warning: the run has diverged" in done.stderr
    for resume in (), ("--resume",):
        if resume:
            headloom("train", "run", *resume, cwd=tmp_path)
        (model,) = json.loads(headloom("report", "run", "--json", cwd=tmp_path).stdout)["tasks"][0]["models"]
        assert "the run has diverged" in model["runs"][0]["warning"]
        assert "diverged" in headloom("report", "run", cwd=tmp_path).stdout


def test_a_run_that_processes_shared_goes_on_with_as_many(place, tmp_path):
    shutil.copytree(place / "plain", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    # It was killed before its first evaluation.
    kept = [line | {"processes": 3} for line in lines if line["step"] <= 2 and "loss" in line]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    said = headloom("report", "run", cwd=tmp_path).stdout
    assert "Go on with:\n    headloom train run --resume --processes 3\n" in said


def test_a_comparison_that_was_killed_between_two_runs_was_interrupted(place, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(place / "comparison", folder)
    shutil.rmtree(folder / "runs/copying/mha/seed-2")
    done = headloom("report", "c", cwd=tmp_path).stdout
    assert "Interrupted: 1 of 2 runs have finished." in done and "Go on with:\n    headloom compare c\n" in done
    page = (tmp_path / "report.html").read_text()
    assert "Interrupted: 1 of 2" in page and "Go on with: <code>headloom compare c</code>" in page
    assert json.loads(headloom("report", "c", "--json", cwd=tmp_path).stdout)["go_on"] == "headloom compare c"
    # While a process holds the comparison, it is in progress.
    with open(folder / ".headloom.lock", "w") as lock:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
        done = headloom("report", "c", cwd=tmp_path).stdout
        assert "In progress: 1 of 2 runs have finished." in done and "Go on" not in done
    # Runs that --plan has printed may wait for their turn.
    (command,) = headloom("compare", "c", "--plan", cwd=tmp_path).stdout.splitlines()
    done = headloom("report", "c", cwd=tmp_path).stdout
    assert "In progress: 1 of 2 runs have finished. Runs that are still to come are trained by" in done
    assert "Go on with:\n    headloom compare c --plan\n" in done and "Interrupted" not in done
    headloom(*shlex.split(command)[1:], cwd=tmp_path)
    assert "--plan" not in headloom("report", "c", cwd=tmp_path).stdout


def test_watching_a_comparison_sees_runs_that_begin(place, tmp_path):
    shutil.copytree(place / "comparison", tmp_path / "c")
    (tmp_path / "c/runs/copying/mha/seed-2").rename(tmp_path / "seed-2")
    with watched(tmp_path / "c", tmp_path) as address:
        assert "Interrupted: 1 of 2 runs" in urllib.request.urlopen(address, timeout=30).read().decode()
        (tmp_path / "seed-2").rename(tmp_path / "c/runs/copying/mha/seed-2")
        assert "Interrupted" not in urllib.request.urlopen(address, timeout=30).read().decode()


def test_metrics_for_tensorboard(place, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    target = tensorboard(place / "plain", tmp_path / "events")
    tensorboard(place / "plain", tmp_path / "events")  # in place of the first
    events = accumulator.EventAccumulator(target)
    events.Reload()
    lines = [json.loads(line) for line in (place / "plain/metrics.jsonl").read_text().splitlines()]
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4]
    wanted = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert [e.value for e in events.Scalars("eval/loss")] == pytest.approx(wanted)


class Written(list):
    """In place of TensorBoard's SummaryWriter, which is not installed everywhere."""

    def add_scalar(self, name, value, step):
        self.append((name, value, step))

    def close(self):
        pass


def test_damaged_metrics_for_tensorboard_are_named(tmp_path, monkeypatch):
    written = Written()
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder: written
    monkeypatch.setitem(sys.modules, module.__name__, module)
    lines = [b'{"step":1,"loss":2.5}', b"", b'{"ste', b"[]", b"\xff", b'{"step":2,"loss":"x"}', b'{"step":3,"loss":1.5}', b'{"step":4,']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning) as warned:
        tensorboard(tmp_path)
    assert [str(w.message) for w in warned] == [
        f"{tmp_path}/metrics.jsonl: lines 3, 4, 5 are no JSON objects and are left out."
    ]
    assert warned[0].filename == __file__
    assert written == [("train/loss", 2.5, 1), ("train/loss", 1.5, 3)]


def test_only_runs_have_metrics_for_tensorboard(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no metrics.jsonl"):
        tensorboard(tmp_path)
