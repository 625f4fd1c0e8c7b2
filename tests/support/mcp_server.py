"""An MCP server for tests, by the official SDK; `python -m tests.support.mcp_server [SOCKET]`.

SOCKET is the number of an inherited file descriptor: a socket that is bound to a port of this machine.
"""

import os
import socket
import sys
import time

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")


@server.tool()
def price(item: str, count: int = 1) -> str:
    """Look up what items cost."""
    if item == "stone":
        raise ToolError("nobody sells a stone")
    return f"{len(item) * count} crowns"


@server.tool()
def secret(context: Context) -> str:
    """Return the key that this server was given, in its environment or in a header, and a key that it was not given."""
    headers = context.headers or {}
    found = [headers.get("x-shop-key"), *(os.environ.get(name) for name in ("SHOP_KEY", "OTHER_KEY"))]
    return " ".join(dict.fromkeys(filter(None, found)))


@server.tool()
def misbehave(how: str) -> str:
    """Hang, die, or return garbage."""
    if how == "hang":
        time.sleep(3600)
    elif how == "garbage":
        os.write(1, b"this is no JSON\n")
        time.sleep(3600)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
        uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
    else:
        server.run("stdio")
