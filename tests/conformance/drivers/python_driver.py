"""Runs in the environment of PyPI's forkd: reads calls as lines of JSON, makes them, writes what came of each."""

import dataclasses
import functools
import json
import sys
from typing import Any

import forkd


class Driver:
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {"Controller": forkd.Controller, "Sandbox": forkd.Sandbox}

    def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self.make(call)}
        except forkd.ControllerError as error:
            described = {"status": error.status, "body": error.body, "url": error.url}
            return {"error": {"type": "ControllerError", "message": str(error), **described}}
        except Exception as error:
            return {"error": {"type": type(error).__name__, "message": str(error)}}

    def make(self, call: dict[str, Any]) -> object:
        target = functools.reduce(getattr, call["path"][1:], self.objects[call["path"][0]])
        if call.get("names"):
            return sorted(name for name in dir(target) if not name.startswith("_"))
        result = target(*call.get("args", []), **call.get("kwargs", {}))
        if "keep" in call:
            self.objects[call["keep"]] = result
            return None
        return dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result


def main() -> None:
    driver = Driver()
    for line in sys.stdin:
        print(json.dumps(driver.answer(json.loads(line))), flush=True)
    for made in driver.objects.values():
        if isinstance(made, forkd.Sandbox):
            made.kill()  # it would not do so by itself, should a test have failed


main()
