"""A reference engine in a process of its own, told by lines on standard input: see `other_host_stand.RemoteEngine`."""

import hashlib
import json
import logging
import sys
from typing import Any

from reference_stand import epochs

from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.shapes import GEOMETRIES


def main() -> None:
    logging.basicConfig(level="INFO")
    settings: dict[str, Any] = json.loads(sys.argv[1])
    with Engine(GEOMETRIES[settings.pop("shape")], **settings) as engine:
        tell({"pids": engine.rank_pids})
        for line in sys.stdin:
            command = json.loads(line)
            if "generate" in command:
                (output,) = engine.generate([command["generate"]], command["max_tokens"])
                digest = hashlib.sha256(b"".join(row.tobytes() for row in output.logits)).hexdigest()
                tell(
                    {
                        "tokens": output.tokens,
                        "logits": digest,
                        "hit": output.hit_tokens,
                        "computed": output.computed_tokens,
                        "failures": output.load_failures,
                    }
                )
            elif "forget" in command:
                engine.drop_prefix_cache()
                tell({})
            elif "epochs" in command:
                tell(sorted(epochs(engine)))
            elif "end" in command:
                return


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


main()
