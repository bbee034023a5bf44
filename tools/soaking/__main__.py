"""Tries to break Headloom: kills it, damages what it reads, crowds it and starves it, and says what did not hold.

Every case is a function of the seed and its number, so a case that failed can be repeated alone; how many cases there are
follows from the time.
"""

import argparse
import itertools
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

import data
import files
import kills
import locks
import memory
import ranks
import serving
from program import BINARY, ROOT, Broken

# Each has a class Campaign(place) with case(number, random), which returns what was tried and raises Broken, and close();
# SHARE is its part of the time, DOC what it does.
CAMPAIGNS = {"kills": kills, "ranks": ranks, "files": files, "data": data, "requests": serving, "locks": locks, "memory": memory}

MOST_KEPT = 50  # failures whose files stay


def keep(place, folder, name):
    """Copies what a failed case has left to a folder that stays."""
    target = folder / name.replace(":", "-")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(place, target, symlinks=True)
    return target


class Soak:
    def __init__(self, options):
        self.seed, self.folder = options.seed, options.keep
        self.cases = self.failures = 0
        self.tried = {}

    def campaign(self, name, seconds, only=None):
        """Cases of one campaign until its time has passed, at least one; or case number `only`."""
        module, started = CAMPAIGNS[name], time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"soak-{name}-") as scratch:
            place = pathlib.Path(scratch)
            campaign = None
            try:
                campaign = module.Campaign(place)
                for number in itertools.count() if only is None else [only]:
                    self.case(campaign, name, number, place)
                    if time.monotonic() - started > seconds:
                        break
            except Broken as broken:  # what the cases stand on did not work
                self.failed(f"{name}", broken, place)
            finally:
                if campaign is not None:
                    campaign.close()
        seen = ", ".join(f"{count} {what}" for what, count in sorted(self.tried.get(name, {}).items()))
        print(f"{name}: {seen or 'no case'} ({time.monotonic() - started:.0f} s)", flush=True)

    def case(self, campaign, name, number, place):
        self.cases += 1
        try:
            what = campaign.case(number, random.Random(f"{self.seed}/{name}/{number}"))
        except Broken as broken:
            what = broken.what
            self.failed(f"{name}:{number}", broken, place)
        counts = self.tried.setdefault(name, {})
        counts[what] = counts.get(what, 0) + 1

    def failed(self, name, broken, place):
        self.failures += 1
        repeat = f"--case {name}" if ":" in name else f"--only {name}"
        print(f"FAILED {name}: {broken}\n  again: tools/soak --seed {self.seed} {repeat}", flush=True)
        if self.failures <= MOST_KEPT:
            print(f"  kept: {keep(place, self.folder, f'seed-{self.seed}-{name}')}", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="tools/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "campaigns:\n" + "\n".join(f"  {name:9} {module.DOC}" for name, module in CAMPAIGNS.items())
    parser.add_argument("--minutes", type=float, default=10, help="how long, all campaigns together; 10")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000, help="of the cases; drawn where it is not given")
    parser.add_argument("--only", metavar="NAMES", default=",".join(CAMPAIGNS), help="campaigns, with commas")
    parser.add_argument("--case", metavar="NAME:NUMBER", help="a single case, as a failure names it")
    parser.add_argument(
        "--keep", metavar="FOLDER", type=pathlib.Path, default=ROOT / "build" / "soak",
        help="where the files of failed cases stay; build/soak",
    )
    options = parser.parse_args()
    if not BINARY.exists():
        parser.error(f"{BINARY} is not built; ./test builds it.")
    names, number = options.only.split(","), None
    if options.case:
        name, _, text = options.case.partition(":")
        if not text.isdigit():
            parser.error(f"--case is {options.case!r}, expected a campaign and a number, as in files:12.")
        names, number = [name], int(text)
    for name in names:
        if name not in CAMPAIGNS:
            parser.error(f"there is no campaign {name!r}; there are {', '.join(CAMPAIGNS)}.")
    # Sums are added in another order by another number of threads, and results are compared bit for bit.
    os.environ["OMP_NUM_THREADS"] = "1"
    soak, started = Soak(options), time.monotonic()
    parts = sum(CAMPAIGNS[name].SHARE for name in names)
    for name in names:
        soak.campaign(name, 60 * options.minutes * CAMPAIGNS[name].SHARE / parts, number)
    minutes = (time.monotonic() - started) / 60
    print(f"soak: {soak.cases} cases, {soak.failures} failures, seed {options.seed}, {minutes:.1f} minutes")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
