"""Every configuration that comes with the project can be built: its tasks, its models, its settings."""

import random
import re

import pytest
from cli_support import ROOT, headloom

CONFIGURATIONS = sorted((ROOT / "configs").glob("**/*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with what the configurations name: a folder of texts and a vocabulary."""
    folder = tmp_path_factory.mktemp("configurations")
    texts = folder / "text"
    texts.mkdir()
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]
    for name in ("a.h", "b.txt"):
        lines = (" ".join(rng.choices(words, k=10)) for _ in range(2000))
        (texts / name).write_text("\n".join(lines))
    headloom("vocabulary", texts, "--size", 4096, "--out", "text.model", cwd=folder)
    return folder


def test_protocols_are_among_them():
    names = {path.name for path in CONFIGURATIONS if path.parent.name == "protocols"}
    assert names >= {"mqar.toml", "recall_state.toml", "mad_cpu.toml", "text_small.toml"}


PAPERS = [path for path in CONFIGURATIONS if path.parent.name == "papers"]


def test_every_paper_is_among_them():
    names = {path.stem for path in PAPERS}
    for author in ("golovneva", "xiao", "ye", "bhojanapalli", "he", "dai"):
        assert any(name.startswith(author + "_") for name in names), author
    described = (ROOT / "docs" / "tasks.md").read_text()
    assert all(f"`{path.name}`" in described for path in PAPERS)


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_paper_says_what_is_published_and_what_departs(path):
    """A claim is tested with five seeds or more; rates are swept past the edges; the header names source and departures."""
    text = path.read_text()
    header = text[: text.index("\ntitle = ")]
    assert all(line.startswith("#") for line in header.splitlines())
    assert re.match(r"# .*20\d\d", header), "the first line names the paper"
    for heading in ("# Published", "# Departures: ", "# TIME"):
        assert heading in header, heading
    assert re.search(r"\nseeds = \[1, 2, 3, 4, 5(, \d+)*\]\n", text)
    assert "extensions = 3" in text
    rates = re.search(r"\blr = \[(.*?)\]", text).group(1).split(",")
    assert 2 <= len(rates) <= 3


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_a_configuration_is_built(path, folder):
    if not re.search(r"^(\[\[models\]\]|models = )", path.read_text(), re.MULTILINE):
        assert "parameters" in headloom("describe", path, cwd=ROOT).stdout
        return
    out = folder / "runs" / path.stem
    plan = headloom("compare", path, "--out", out, "--plan", cwd=folder).stdout.splitlines()
    assert plan and all("--run" in line for line in plan)
    assert len(plan) == len(set(plan))
    # Nothing is trained.
    assert not list(out.glob("**/metrics.jsonl"))
