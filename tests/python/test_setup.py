"""What ./run and ./test set up is recognised the next time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def folder(interpreter, *extra):
    script = 'source tools/setup.sh; python_requirements+=("${@:2}"); torch_folder "$1" all'
    done = subprocess.run(["bash", "-c", script, "bash", interpreter, *extra], cwd=ROOT,
                          capture_output=True, text=True)
    return done.stdout.strip()


def test_an_interpreter_that_has_everything_is_taken_as_it_is():
    assert folder(sys.executable) == os.path.dirname(torch.__file__)


def test_an_interpreter_that_lacks_a_package_is_not():
    assert folder(sys.executable, "no-such-package") == ""


def test_git_ignores_a_python_environment_that_is_a_link(tmp_path):
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / ".venv").symlink_to("/")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = subprocess.run(["git", "status", "--short"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "?? .gitignore\n"


def test_run_can_only_build(tmp_path):
    shutil.copy(ROOT / "run", tmp_path / "run")
    for name in ["tools", "configs"]:
        (tmp_path / name).mkdir()
    (tmp_path / "configs/quickstart.toml").write_text("")
    (tmp_path / "tools/setup.sh").write_text('set_up() { echo set up; }\nbuild() { echo "build $*"; }\n')

    def run(*arguments):
        return subprocess.run([tmp_path / "run", *arguments], cwd="/", capture_output=True, text=True)

    assert (run("--build").returncode, run("--build").stdout) == (0, "set up\nbuild headloom\n")
    for more in [("--json",), ("--text", "/"), (tmp_path / "configs/quickstart.toml",)]:
        done = run("--build", *more)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("--build compares nothing, so nothing else goes with it.")


def test_run_takes_paths_as_they_are_seen_from_where_it_is_given(tmp_path):
    checkout, here = tmp_path / "check out", tmp_path / "here"
    for folder in ["tools", "configs", "build/bin"]:
        (checkout / folder).mkdir(parents=True)
    here.mkdir()
    shutil.copy(ROOT / "run", checkout / "run")
    (checkout / "configs/quickstart.toml").write_text('[[tasks]]\ntask = { type = "text", paths = ["text"] }\n')
    (checkout / "tools/setup.sh").write_text("set_up() { torch_dir=/torch; }\nbuild() { echo building; }\ncores() { echo 3; }\n")
    program = checkout / "build/bin/headloom"
    program.write_text('#!/bin/sh\npwd > "$0.folder"\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    (here / "mine.toml").write_text("models = []\n")
    (here / 'a "text".txt').write_text("text")

    def run(*arguments):
        done = subprocess.run([checkout / "run", *arguments], cwd=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert program.with_suffix(".folder").read_text().rstrip() == str(here)  # data in a configuration are seen from there, too
        building, said = "building\n", done.stdout
        assert (building in done.stderr) == ("--json" in arguments) == (building not in said)
        return said.removeprefix(building).splitlines()

    assert run("--json") == ["compare", str(checkout / "configs/quickstart.toml"), "--jobs", "3", *run()[4:], "--json"]
    assert run("--out", "o")[-2:] == ["--out", str(here / "o")]
    assert run("--out=o", "mine.toml")[:2] == ["compare", str(here / "mine.toml")]
    assert run("--out=o")[-2:] == ["--out", str(here / "o")]
    assert run("--out", "/o")[-2:] == ["--out", "/o"]
    assert f'tasks.0.task.paths=["{here}/a \\"text\\".txt"]' in run("--text", 'a "text".txt')
    assert "runs/quickstart-here" in run("--text", ".")
    for given in [["--text", ".", "--out", "o"], ["--out=o", "--text", "."]]:
        assert run(*given).count("--out") == 1 and str(here / "o") in run(*given)
    for other in ['tasks = [{ task = { type = "text", paths = ["text"] } }]\n', '[[tasks]]\ntask = { type = "text", paths = ["mine"] }\n']:
        (here / "mine.toml").write_text(other)
        assert not any("tasks." in word for word in run("mine.toml"))
        done = subprocess.run([checkout / "run", "mine.toml", "--text", "."], cwd=here, capture_output=True, text=True)
        assert done.returncode == 2 and "--text is for [[tasks]] with task = { type" in done.stderr
    (here / "mine.toml").write_text('  [[tasks]]\n  task = { type = "text", paths = ["text"] }\n')
    assert f'tasks.0.task.paths=["{here}/."]' in run("mine.toml", "--text", ".")
    for option in ["--text", "--out", "--set"]:  # an empty path would be the whole working folder
        for given in [[option, ""], [option + "="], [option]]:
            done = subprocess.run([checkout / "run", *given], cwd=here, capture_output=True, text=True)
            assert done.returncode == 2 and done.stderr.startswith(f"{option} needs a value."), done.stderr


def test_a_project_of_somebody_elses_links_a_layer(tmp_path):
    """docs/architecture.md, "From C++": its folders are not taken for Headloom's, and it need not ask for C++20."""
    (tmp_path / "CMakeLists.txt").write_text(f"""
cmake_minimum_required(VERSION 3.25)
project(mine LANGUAGES CXX)
add_subdirectory("{ROOT}" headloom EXCLUDE_FROM_ALL)
add_executable(mine main.cpp)
target_link_libraries(mine PRIVATE headloom_core)
if(TARGET headloom OR TARGET test_core OR NOT TARGET headloom_train)
  message(FATAL_ERROR "not the layers alone")
endif()
""")
    (tmp_path / "main.cpp").write_text("""
#include <iostream>
#include "core/config.h"
#include "core/error.h"
int main() {
  try {
    headloom::parse_toml("a = [", "mine");
  } catch (const headloom::UsageError& e) {
    std::cout << e.what();
  }
}
""")
    build = tmp_path / "build"
    torch_folder = os.path.dirname(torch.__file__)
    # What PyTorch has of gloo is not asked again, which would take as long as everything else. Nothing is optimised.
    for command in (["cmake", "-S", tmp_path, "-B", build, "-G", "Ninja", f"-DPython3_EXECUTABLE={sys.executable}",
                     f"-DHEADLOOM_TORCH_DIR={torch_folder}", "-DHEADLOOM_GLOO=ON", "-DCMAKE_UNITY_BUILD=ON",
                     "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"],
                    ["cmake", "--build", build, "--target", "mine"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    said = subprocess.run([build / "mine"], capture_output=True, text=True).stdout
    assert said.startswith("mine:1: not valid TOML")
