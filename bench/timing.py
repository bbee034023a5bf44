"""What the scripts of this folder share: timing a step."""

import statistics
import time


def median_seconds(step, seconds):
    """Runs ``step`` once to warm up, then for about ``seconds`` and at least five times."""
    step()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
