"""An engine in a process of its own: answers one prompt, and says how much of it was loaded."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "_plugins"))

from trtllm_executor import Executor
from trtllm_model import LayerGroup, Toy
from trtllm_names import LAYOUTS, installed


def main(address: str, generation: int, prompt: list[int]) -> None:
    layouts = generation >= LAYOUTS
    toy = Toy((LayerGroup((0, 2)), LayerGroup((1,), window=24))) if layouts else Toy()
    with installed(generation) as names:
        engine = Executor(names, address, toy, layouts=layouts, ranks=2)
        run = engine.generate(prompt)
        engine.close()
    print(json.dumps({"taken": run.taken, "answer": run.answer}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
