"""What every driver of a real engine does with the lines that a test writes to it (`vllm_stand.EngineProcess`)."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def obey(start: Callable[[dict[str, Any]], Any]) -> None:
    """Start a driver with the options that the command line gives, and call its methods by what standard input says.

    A line is a JSON object: `do` names the method, the rest are its arguments. The driver is closed when input ends.
    """
    # engines and what they start write to standard output; answers keep the pipe for themselves
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = start(json.loads(sys.argv[1]))
    print(json.dumps({"result": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(driver, request.pop("do"))(**request)}
        except Exception:  # noqa: BLE001 - whatever it is, the test is told
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=answers, flush=True)
    driver.close()
