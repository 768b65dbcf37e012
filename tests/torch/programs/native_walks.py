"""Walks through random graphs of autograd by the bridge's native module, and by a few lines of Python that say what is meant. Prints
nothing where they agree."""
import random
import sys

import torch

native = sys.modules["_forkpoint_bridge"]._native
LEAF = 2**64 - 1


def expected(starts, edges, oldest, most):
    origins = [node for _, node, _, _ in edges if node is not None]
    found, seen, queue = [], list(starts), [node for node in starts if node not in origins]
    for node in queue:
        for k, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            names = [name for name, origin, place, _ in edges if origin is following and place == number][:1]
            if not names and following._sequence_nr() == LEAF:
                names = [name for name, _, _, leaf in edges if leaf is following.variable][-1:]
                if not names:
                    continue
            if names:
                found += [names[0], node, k]
            elif following._sequence_nr() >= oldest and following not in seen and following not in origins:
                seen.append(following)
                queue.append(following)
                if len(queue) > most:
                    return None
    return found


def grown(values, count, dice):
    for _ in range(count):
        a, b = dice.choice(values), dice.choice(values)
        kind = dice.randrange(4)
        values = values + ([a + b], [a * 2], list(torch.stack([a, b]).unbind(0)), [torch.sin(a) * b])[kind]
    return values


dice, walks, edges_found, too_large = random.Random(4), 0, 0, 0
for _ in range(150):
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    outside = grown(leaves, 4, dice)
    oldest = torch._C._autograd._get_sequence_nr()
    inside = grown(outside + [torch.ones(2, requires_grad=True)], dice.randrange(1, 14), dice)
    inputs = [*dice.sample(outside, 2), dice.choice(inside)]
    edges = [(f"i{n}", t.grad_fn, t.output_nr if t.grad_fn else 0, None if t.grad_fn else t) for n, t in enumerate(inputs)]
    starts = tuple({t.grad_fn: None for t in inside[-2:] if t.grad_fn is not None})
    for most in (3, 96):
        found, meant = native.contributions(starts, edges, oldest, most), expected(starts, edges, oldest, most)
        assert found == meant, f"found {found}, expected {meant}"
        walks, edges_found, too_large = walks + 1, edges_found + len(meant or ()) // 3, too_large + (meant is None)
for wrong in ((1, [], 0, 1), ((), [("a",)], 0, 1), ((), [1], 0, 1), ((object(),), [], 0, 1), ((), [("a", None, "b", None)], 0, 1)):
    try:
        native.contributions(*wrong)
        print("was taken for a graph:", wrong)
    except (TypeError, ValueError, AttributeError, IndexError, SystemError):
        pass
assert walks == 300 and edges_found > 100 and too_large > 30, (walks, edges_found, too_large)
