"""Fails when a file under src/ includes a header of a layer it must not know.

Each layer knows only the ones above it in LAYERS (docs/architecture.md). data and report are seams:
they need no model.
"""
import pathlib
import re
import sys

# What training knows, and with it all that trains, loads or runs models.
OF_TRAINING = ["core", "ops", "mixers", "blocks", "model", "storage", "data", "report", "distributed"]
OF_MODELS = [*OF_TRAINING, "train"]
LAYERS = {
    "core": [],
    "ops": ["core"],
    "mixers": ["core", "ops"],
    "blocks": ["core", "ops", "mixers"],
    "model": ["core", "ops", "mixers", "blocks"],
    "storage": ["core"],
    "data": ["core", "storage"],
    "report": ["core"],
    "distributed": ["core"],
    "train": OF_TRAINING,
    "analysis": OF_MODELS,
    "interop": OF_MODELS,
    "serve": OF_MODELS,
    "bench": OF_MODELS,
    "cli": [*OF_MODELS, "analysis", "interop", "serve", "bench"],
}


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    wrong = 0
    for path in sorted(root.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu"}:
            continue
        layer = path.relative_to(root).parts[0]
        if layer not in LAYERS:
            print(f"{path}: '{layer}' is not a layer; layers are {', '.join(LAYERS)}")
            wrong += 1
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#include "(\w+)/', line)
            if match and match[1] != layer and match[1] not in LAYERS[layer]:
                print(f"{path}:{number}: {layer}/ must not include {match[1]}/")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
