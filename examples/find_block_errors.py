"""Where a model of the task find_block fails: its errors by what makes a sequence hard.

    python examples/find_block_errors.py runs/find_block/multi_token/seed-1 ...

The runs must be trained on 8 blocks of 5 letters and queries of 2, as configs/papers/golovneva_find_block.toml is.
"""

import collections
import random
import sys

import headloom
import torch

BLOCKS, LETTERS, SEPARATOR, QUERY = 8, 5, 26, 27


def sequence(chance):
    """Tokens of a sequence with its answer, its blocks, and the letters it asks for."""
    target = chance.sample(range(26), LETTERS)
    query = chance.sample(target, 2)
    place = chance.randrange(BLOCKS)
    blocks = []
    for i in range(BLOCKS):
        block = target
        while i != place and set(query) <= set(block):
            block = chance.sample(range(26), LETTERS)
        blocks.append(block)
    tokens = [token for block in blocks for token in (*block, SEPARATOR)][:-1]
    return [*tokens, QUERY, *query, *target], blocks, query


def across_blocks(tokens, query):
    """Whether both letters stand within five characters that belong to two blocks."""
    places = [i for i, token in enumerate(tokens[: BLOCKS * (LETTERS + 1) - 1]) if token in query]
    pairs = [(a, b) for a in places for b in places if a < b <= a + 4 and tokens[a] != tokens[b]]
    return any(SEPARATOR in tokens[a:b] for a, b in pairs)


def main(runs):
    chance = random.Random(1)
    drawn = [sequence(chance) for _ in range(3000)]
    tokens = torch.tensor([sample[0] for sample in drawn])
    errors, letters = collections.defaultdict(list), torch.zeros(LETTERS)
    second = []  # of wrong second letters: whether they follow the first one in another block
    for run in runs:
        with torch.no_grad():
            found = headloom.load(run).eval()(tokens[:, :-1]).argmax(-1)[:, -LETTERS:]
        wrong = found != tokens[:, -LETTERS:]
        letters += wrong.float().mean(0) / len(runs)
        for i in wrong[:, 1].nonzero().flatten().tolist():
            pair = (int(tokens[i, -LETTERS]), int(found[i, 1]))
            second.append(any(pair in zip(block, block[1:]) for block in drawn[i][1]))
        for (sample, blocks, query), failed in zip(drawn, wrong.any(1).tolist(), strict=True):
            others = sum(len(set(block) & set(query)) == 1 for block in blocks)
            errors["all sequences"].append(failed)
            errors[f"other blocks with one of the letters: {min(others, 4)}{' or more' if others >= 4 else ''}"].append(failed)
            errors[f"both letters close, but in two blocks: {'yes' if across_blocks(sample, query) else 'no'}"].append(failed)
    for what, failed in sorted(errors.items()):
        print(f"{100 * sum(failed) / len(failed):5.1f}% of {len(failed):6}  {what}")
    print("wrong at each letter of the answer:", ", ".join(f"{100 * share:.1f}%" for share in letters.tolist()))
    print(f"of the wrong second letters, {100 * sum(second) / max(len(second), 1):.0f}% follow the first one in another block")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
