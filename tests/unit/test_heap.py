"""What a service keeps for good when it is ready, and what it does not."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: what is kept stays so.
_PROGRAM = """
import gc, weakref
from shared.heap import keep_for_good

class Node:
    pass

def ring():
    node = Node()
    node.itself = node
    return weakref.ref(node)

gc.disable()
before = ring()
kept = [Node() for _ in range(1000)]
keep_for_good()
assert before() is None, "garbage by then is gone"
assert not any(isinstance(each, Node) for each in gc.get_objects()), "who is there is not looked at again"
after, found = ring(), []
gc.callbacks.append(lambda phase, info: found.append(info["collected"]) if phase == "stop" else None)
gc.collect()
assert after() is None, "garbage since then goes as ever"
assert sum(found) <= 10, found
"""


def test_what_is_there_is_not_looked_through_again_and_garbage_goes_as_before() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
