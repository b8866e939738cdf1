"""Runs in the environment of PyPI's forkd-mcp: reads calls as lines of JSON, makes them with the real MCP client."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

_SERVER = Path(sys.executable).parent / "forkd-mcp"


async def answer(session: ClientSession, call: dict[str, Any]) -> dict[str, Any]:
    if call.get("names"):
        return {"result": sorted(tool.name for tool in (await session.list_tools()).tools)}
    result = await session.call_tool(call["tool"], call.get("kwargs", {}))
    text = "\n".join(getattr(part, "text", "") for part in result.content)
    if result.isError:
        return {"error": {"type": "ToolError", "message": text}}
    structured = result.structuredContent
    if structured is None:
        return {"result": json.loads(text)}
    return {"result": structured["result"] if structured.keys() == {"result"} else structured}


async def main() -> None:
    settings = {name: value for name, value in os.environ.items() if name.startswith("FORKD_")}
    server = StdioServerParameters(command=str(_SERVER), env=settings)
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answer(session, json.loads(line))), flush=True)


asyncio.run(main())
