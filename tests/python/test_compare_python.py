"""headloom.compare: comparisons whose runs executors train."""

import concurrent.futures
import multiprocessing
import os
import pathlib
import signal
import sys

import headloom
import pytest
from cli_support import BINARY, COMPARE
from headloom import _command
from test_compare import losses

SWEEP = COMPARE + "[sweep]\nlr = [1e-3, 3e-3]\nextensions = 0\n[speed]\nrounds = 1\n"


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setenv("HEADLOOM_BINARY", str(BINARY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the fork server of the pools


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(COMPARE)
    return path


def pool(workers=2):
    """Of new processes that get everything by pickles. One of them imports torch, the workers are its forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headloom"])
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)


def test_an_executor_gives_the_report_of_one_run_after_the_other(config, tmp_path, monkeypatch):
    config.write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    headloom.compare(config)
    (tmp_path / "runs/c").rename(tmp_path / "plain")
    with pool() as executor:
        spread = headloom.compare(config, folder=tmp_path / "spread", executor=executor)
        assert spread["finished"] == spread["planned"] == 4
        assert losses(tmp_path / "spread") == losses(tmp_path / "plain")
        times = {p: p.stat().st_mtime_ns for p in (tmp_path / "spread").rglob("result.json")}
        assert len(times) == 8
        headloom.compare(config, tmp_path / "spread", executor=executor)
        # The folder stands for its configuration.
        headloom.compare(tmp_path / "spread", executor=executor)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "spread").rglob("result.json")} == times
    assert not (tmp_path / "runs/spread").exists()


def test_dask_is_an_executor(config, tmp_path):
    distributed = pytest.importorskip("dask.distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client:
            report = headloom.compare(config, tmp_path / "dask", executor=client.get_executor())
    assert report["finished"] == report["planned"] == 4


class Once(concurrent.futures.Executor):
    """Calls at once. The first calls of a run end as those of a worker that dies do."""

    def __init__(self, deaths):
        self.deaths, self.calls = deaths, {}

    def submit(self, fn, /, *args, **kwargs):
        future = concurrent.futures.Future()
        path = args[-1].rpartition("@")[0]  # without the hash of the configuration
        self.calls[path] = self.calls.get(path, 0) + 1
        if self.calls[path] <= self.deaths.get(path, 0):
            future.set_exception(ConnectionError("the worker is gone"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_the_run_of_a_dead_worker_is_taken_up_once_more(config, tmp_path):
    run = "runs/copy/mha/seed-2"
    config.write_text(COMPARE.replace("seeds = [1, 2]", "seeds = [2]"))
    executor = Once({run: 1})
    assert headloom.compare(config, tmp_path / "c", executor=executor)["finished"] == 2
    assert executor.calls[run] == 2 and set(executor.calls.values()) == {1, 2}
    executor = Once({run: 9})
    with pytest.raises(RuntimeError) as caught:
        headloom.compare(config, tmp_path / "d", executor=executor)
    assert executor.calls[run] == 2
    assert f"the run {run} in {tmp_path / 'd'} has ended twice without a result: the worker is gone" in str(caught.value)
    assert headloom.compare(config, tmp_path / "d")["finished"] == 2


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_pool_that_has_lost_a_worker_is_one_sentence(config, tmp_path):
    with pool(1) as executor:
        with pytest.raises(concurrent.futures.BrokenExecutor):
            executor.submit(_die).result()
        with pytest.raises(RuntimeError) as caught:
            headloom.compare(config, tmp_path / "c", executor=executor)
    message = str(caught.value)
    assert message.startswith("a worker of the executor has died") and "\n" not in message and message.endswith(".")


def test_wrong_configurations_are_value_errors(config, tmp_path):
    config.write_text(SWEEP.replace("lr = [1e-3, 3e-3]", "lrr = [1e-3]"))
    for executor in (None, Once({})):
        with pytest.raises(ValueError, match="did you mean 'lr'"):
            headloom.compare(config, tmp_path / "c", executor=executor)
    assert not (tmp_path / "c").exists()


def test_the_command_is_looked_for(monkeypatch):
    monkeypatch.delenv("HEADLOOM_BINARY")
    found = pathlib.Path(_command.program())
    assert found.name == "headloom" and found.exists()
